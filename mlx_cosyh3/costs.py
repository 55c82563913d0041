"""What stages cost: the seconds that they took on this machine with a model, kept in the user's cache folder.

A stage that takes longer than its own history says that something else is at work there (`Costs.load`), and a small
piece of work before each request with a deadline (`measure`) says whether it still is. What has never been measured
cannot be forecast.
"""

import functools
import hashlib
import json
import math
import statistics
import threading
import time
from collections import deque
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_cosyh3.gate import GATE
from mlx_cosyh3.kernels import _trust
from mlx_cosyh3.stream import Beside

KEPT = 128  # measurements of a stage on a device
BUSY = 1.6  # times slower than the quicker quarter: more than jitter
MARGIN = 1.1  # of any forecast
ENOUGH = 3  # of them, before a forecast is made
LOADED = 1.3  # times slower than usual: a load, not jitter
RECENT, FRESH = 6, 30.0  # how many of the last measurements, from how many seconds, say how busy a device is
SAVE_EVERY = 30.0  # s
FORMAT = 1


class Costs:
    """Seconds that stages took, by stage, device and size.

    path    JSON file they are kept in; None: in memory alone. One that cannot be read counts for nothing
    A stage's cost is a `Line` through its last measurements, as long as the device is as free as it was at its best;
    `load` says how far from that it is."""

    def __init__(self, path=None, clock=time.monotonic):
        self.path, self._clock = path, clock
        self._lock = threading.Lock()
        self._samples = {}  # (stage, device) -> deque of (size, seconds)
        self._ratios = {}  # device -> deque of (when, stage, measured / expected)
        self._burdens = {}  # (stage, device) -> deque of (its slowing / that of others), when the device was busy
        self._lines = {}
        self._saved, self._changed = -math.inf, False
        self._read()

    def add(self, stage, device, size, seconds, keep=True):
        """`stage` took `seconds` for `size` units on `device`. keep: as history, too, not just for the load of now."""
        if not (size > 0 and seconds >= 0 and math.isfinite(seconds)):
            return
        with self._lock:
            key = stage, device
            line = self._line(key)
            if line is not None and line.at(size) > 0:
                ratio, load = seconds / line.at(size), self._load(device, but=stage)
                if load > LOADED:
                    self._burdens.setdefault(key, deque(maxlen=RECENT)).append((ratio - 1) / (load - 1))
                self._ratios.setdefault(device, deque(maxlen=RECENT)).append((self._clock(), stage, ratio))
            if keep:
                self._samples.setdefault(key, deque(maxlen=KEPT)).append((float(size), float(seconds)))
                self._lines.pop(key, None)
                self._changed = True

    def expect(self, stage, device, size):
        """Seconds that `stage` may take now, its usual jitter or the device's load included. None: not known."""
        with self._lock:
            line = self._line((stage, device))
            return None if line is None else line.at(size) * max(line.spread, MARGIN * self._slowed(stage, device))

    def known(self, stage, device):
        with self._lock:
            return self._line((stage, device)) is not None

    def used(self, device):
        """Whether any stage was measured on `device`."""
        with self._lock:
            return any(on == device and stage != "probe" for stage, on in self._samples)

    def load(self, device):
        """How many times slower than their history stages were on `device` lately; 1: as ever, or nothing is known."""
        with self._lock:
            return self._load(device)

    def _slowed(self, stage, device):
        """How many times slower `stage` is under the device's load: one with larger kernels waits longer for its turn."""
        burdens = self._burdens.get((stage, device))
        burden = min(max(statistics.median(burdens), 0.5), 4.0) if burdens else 1.0
        return 1 + (self._load(device) - 1) * burden

    def _load(self, device, but=None):
        since = self._clock() - FRESH
        ratios = [r for when, stage, r in self._ratios.get(device, ()) if when >= since and stage != but]
        return max(1.0, statistics.median(ratios)) if ratios else 1.0

    def _line(self, key):
        if key not in self._lines:
            samples = self._samples.get(key, ())
            self._lines[key] = Line.through(samples) if len(samples) >= ENOUGH else None
        return self._lines[key]

    def _read(self):
        if self.path is None:
            return
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            if kept["format"] != FORMAT:
                return
            for key, pairs in kept["stages"].items():
                device, stage = key.split("/")
                samples = [(float(size), float(s)) for size, s in pairs]
                if all(size > 0 and 0 <= s < math.inf for size, s in samples):
                    self._samples[stage, device] = deque(samples, maxlen=KEPT)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # not there, or of another time
            self._samples.clear()

    def save(self, now=False):
        """Write the file, at most every half minute unless `now`; a full disk is no error."""
        with self._lock:
            when = self._clock()
            if self.path is None or not self._changed or (when - self._saved < SAVE_EVERY and not now):
                return
            self._saved, self._changed = when, False
            stages = {f"{device}/{stage}": [[x, float(f"{y:.4g}")] for x, y in samples]
                      for (stage, device), samples in self._samples.items()}  # fmt: skip
        _trust.write_file(self.path, json.dumps({"format": FORMAT, "stages": stages}))


@dataclass
class Line:
    """overhead + rate * size: the quicker quarter of the measurements, which nothing else slowed down."""

    overhead: float
    rate: float
    spread: (
        float  # jitter: what four of five measurements stay below, as a multiple of the line, when nothing else runs
    )

    @classmethod
    def through(cls, samples):
        x, y = np.array(samples).T
        if x.max() < 1.2 * x.min():  # one size says nothing of the overhead
            overhead, rate = 0.0, float(np.median(y / x))
        else:
            i, j = np.triu_indices(len(x), 1)
            apart = x[i] != x[j]
            rate = max(0.0, float(np.median((y[j] - y[i])[apart] / (x[j] - x[i])[apart])))
            overhead = float(np.median(y - rate * x))
            if overhead <= 0:
                overhead, rate = 0.0, float(np.median(y / x))
        ratios = np.sort(y / np.maximum(overhead + rate * x, 1e-12))
        quick = float(ratios[len(ratios) // 4])
        free = ratios[ratios <= BUSY * quick]
        return cls(overhead * quick, rate * quick, float(free[int(0.8 * len(free))] / max(quick, 1e-12)))

    def at(self, size):
        return self.overhead + self.rate * size


def costs_of(policy, model):
    """The Costs of `model` on this machine, one object for all requests under `policy`."""
    key = fingerprint(model)
    with policy._lock:
        if key not in policy.costs:
            device = mx.device_info(mx.gpu if mx.is_available(mx.gpu) else mx.cpu).get("device_name", "unknown")
            name = "".join(c if c.isalnum() else "_" for c in str(device))
            policy.costs[key] = Costs(_trust.cache_folder() / "costs" / f"{name}-{key}.json")
        return policy.costs[key]


def fingerprint(model):
    """Tells models apart whose stages may differ in time: sizes, dtypes, quantisation."""
    known = getattr(model, "fingerprint", None)
    if isinstance(known, str):
        return known
    return _digest(json.dumps(model.config, sort_keys=True, default=str))


@functools.lru_cache(maxsize=64)
def _digest(text):
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def measure(device):
    """Seconds that a small piece of work takes on `device` now: a millisecond or two where nothing else runs."""
    n, products = (256, 8) if device == "gpu" else (128, 4)  # small enough for a CPU with a slow BLAS

    def work():
        begin = time.perf_counter()
        with GATE.on(device):
            x = mx.full((n, n), 1 / n)
            for _ in range(products):
                x = x @ x
            mx.eval(x)
        return time.perf_counter() - begin

    return Beside(work).result()  # not in the caller's thread, for which MLX would keep one of its own
