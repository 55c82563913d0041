"""In time, or a word beforehand: `deadline=2.0` and what is done so that a request keeps it.

`Costs` are the seconds that stages took on this machine with this model, kept in the user's cache folder; a stage that
takes longer than its own history says that something else is at work there (`load`), and a small piece of work before
each request with a deadline (`measure`) says whether it still is. A controller forecasts with them and chooses, before
and during the work, in this order: the device of each stage, smaller chunks, fewer steps of the flow. So quality is
given up last. If nothing is enough, the caller is told before the work starts (late="refuse"), or
gets what is possible (late="best").

What has never been measured cannot be forecast: the first requests of a model run as asked, and are measured.
"""

import functools
import hashlib
import itertools
import json
import math
import statistics
import threading
import time
from collections import deque
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_cosyh3 import sampling
from mlx_cosyh3.errors import CosyH3Error, nearest
from mlx_cosyh3.gate import GATE
from mlx_cosyh3.kernels import _trust

LATE = ("refuse", "best")
KEPT = 128  # measurements of a stage on a device
BUSY = 1.6  # times slower than the quicker quarter: more than jitter
MARGIN = 1.1  # of any forecast
ENOUGH = 3  # of them, before a forecast is made
PROBES = 4  # small pieces of work before a request with a deadline
RECENT, FRESH = 6, 30.0  # how many of the last measurements, from how many seconds, say how busy a device is
LEAST_STEPS = 4  # of the flow, unless fewer are asked for: below that speech turns hoarse
SAVE_EVERY = 30.0  # s
FORMAT = 1


# ---------------------------------------------------------------- what stages cost


class Costs:
    """Seconds that stages took, by stage, device and size.

    path    JSON file they are kept in; None: in memory alone. One that cannot be read counts for nothing
    A stage's cost is a `Line` through its last measurements, as long as the device is as free as it was at its best;
    `load` says how far from that it is."""

    def __init__(self, path=None, clock=time.monotonic):
        self.path, self._clock = path, clock
        self._lock = threading.Lock()
        self._samples = {}  # (stage, device) -> deque of (size, seconds)
        self._ratios = {}  # device -> deque of (when, measured / expected)
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
                ratios = self._ratios.setdefault(device, deque(maxlen=RECENT))
                ratios.append((self._clock(), seconds / line.at(size)))
            if keep:
                self._samples.setdefault(key, deque(maxlen=KEPT)).append((float(size), float(seconds)))
                self._lines.pop(key, None)
                self._changed = True

    def expect(self, stage, device, size):
        """Seconds that `stage` may take now, its usual jitter or the device's load included. None: not known."""
        with self._lock:
            line = self._line((stage, device))
            return None if line is None else line.at(size) * max(line.spread, MARGIN * self._load(device))

    def known(self, stage, device):
        with self._lock:
            return self._line((stage, device)) is not None

    def load(self, device):
        """How many times slower than their history stages were on `device` lately; 1: as ever, or nothing is known."""
        with self._lock:
            return self._load(device)

    def _load(self, device):
        since = self._clock() - FRESH
        ratios = [r for when, r in self._ratios.get(device, ()) if when >= since]
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
            kept = json.loads(self.path.read_text())
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
    begin = time.perf_counter()
    with GATE.on(device):
        x = mx.full((256, 256), 1 / 256)
        for _ in range(8):
            x = x @ x
        mx.eval(x)
    return time.perf_counter() - begin


def check(seconds, late):
    """Raise CosyH3Error for a deadline or a `late` that cannot be."""
    if seconds is not None:
        sampling.number("deadline", seconds, lambda x: x > 0, "more than 0 seconds")
    if late not in LATE:
        raise CosyH3Error(f"late must be one of {', '.join(LATE)}, not {late!r}{nearest(str(late), LATE)}")


# ---------------------------------------------------------------- who chooses


class Controller:
    """What all kinds of requests share: the time that is left, who may run where, and the words for it.

    request   a runtime.Request;  seconds   the deadline, from the request's `begin`; None: none, all stays as asked"""

    def __init__(self, costs, request, seconds=None, late="refuse", probe=None):
        """probe   (device) -> seconds that a small piece of work takes there; None: `measure`"""
        self.costs, self.request, self.seconds, self.late = costs, request, seconds, late
        self._probe = probe or measure

    @property
    def left(self):
        """Seconds until the deadline."""
        if self.seconds is None:
            return math.inf
        return self.seconds - (self.request.clock() - self.request.begin)

    def spent(self, stage, name, size, seconds):
        """Measured: the request's `stage` took so long for `size` units of what Costs know as `name`."""
        self.costs.add(name, self.request.device(stage), size, seconds)

    def look(self, stages):
        """See how busy the devices are on which `stages` may run: what was measured last may be long ago."""
        for device in sorted({d for way in self.placements(stages) for d in way.values()}):
            for n in range(PROBES):  # one of them is history: or a busy quarter of an hour would be all there is of it
                self.costs.add("probe", device, 1, self._probe(device), keep=n == 0)

    def placements(self, stages):
        """Each way to place `stages` ({stage: name in Costs}) -> dicts {stage: device}, the rules' own way first."""
        ways = []
        for stage in stages:
            own = self.request.device(stage)
            ways.append((own, "cpu") if own == "gpu" and self.request.may_move(stage) else (own,))
        return [dict(zip(stages, way)) for way in itertools.product(*ways)]

    def _cost(self, name, device, size):
        """Seconds, inf where nothing is known: what cannot be forecast is not chosen."""
        seconds = self.costs.expect(name, device, size)
        return math.inf if seconds is None else seconds

    def choose(self, options, what, advice):
        """The first of `options`, (plan, forecast in seconds) by falling quality, that is in time -> its plan.

        None if there is nothing to go by. Raises CosyH3Error if none is in time and the caller wants to be told."""
        best = None
        for plan, forecast in options:
            if forecast <= self.left:
                return plan, forecast
            if best is None or forecast < best[1]:
                best = plan, forecast
        if best is None or best[1] == math.inf:
            return None, None
        if self.late == "refuse":
            busy = [f"{d} {self.costs.load(d):.1f} times slower than usual" for d in ("gpu", "cpu")
                    if self.costs.load(d) > 1.3]  # fmt: skip
            raise CosyH3Error(
                f"deadline={self.seconds:g} cannot be met: {what} takes about {best[1]:.2g} s here"
                f"{' (now: ' + ', '.join(busy) + ')' if busy else ''}; {advice}, or pass late='best'"
            )
        return best

    def follow(self, placement, reason):
        for stage, device in placement.items():
            self.request.move(stage, device, reason)

    def ended(self, in_time_at):
        """The work is done; `in_time_at`: seconds after which what was due was there, or None."""
        self.costs.save(now=self.seconds is not None)
        if self.seconds is None or in_time_at is None:
            return
        verdict = "met" if in_time_at <= self.seconds else "late"
        self.request.record(
            "deadline", reason=f"{verdict}: {in_time_at:.2f} of {self.seconds:g} s", met=verdict == "met"
        )


@dataclass
class Speech:
    """A request for speech, in the numbers that its time follows from.

    prefix          ids that the language model reads before the first token, on average of the segments
    tokens          speech tokens to be expected in all (None: no idea)
    segments        of the text
    prompt_frames   of the voice's recording;  frames_per_token   of mel
    steps           of the flow, as asked
    chunks          streamed: [(chunk_tokens, tokens that the first chunk then waits for)], as asked first; else None
    recording       seconds of a recording to be converted; then there is no `language_model`"""

    prefix: int
    tokens: float
    segments: int
    prompt_frames: int
    frames_per_token: float
    steps: int
    chunks: list = None
    language_model: bool = True
    recording: float = 0.0


@dataclass
class Plan:
    steps: int
    chunk: int = None
    devices: dict = None


class SpeechController(Controller):
    """Chooses devices, first chunk and steps so that the first audio (streamed) or all of it is there in time."""

    def begin(self, job):
        """Before the work -> Plan. Raises CosyH3Error if it cannot be in time, and the caller wants to be told."""
        self.job = job
        asked = Plan(job.steps, job.chunks[0][0] if job.chunks else None)
        if self.seconds is None:
            return asked
        self.look(self._stages())
        plan, forecast = self.choose(
            self._plans(), "the first audio" if job.chunks else "the whole answer",
            "give it more time" if job.chunks else "give it more time or less text",
        )  # fmt: skip
        if plan is None:
            self.request.record("deadline", reason="no times of this model on this machine are known yet: as asked")
            return asked
        self.follow(plan.devices, f"deadline: {forecast:.2f} s to be expected, {self.left:.2f} s left")
        told = {"steps": plan.steps} | ({"chunk_tokens": plan.chunk} if job.chunks else {})
        fits = "in time" if forecast <= self.left else "late even so"
        self.request.record("deadline", reason=f"{forecast:.2f} of {self.seconds:g} s to be expected: {fits}", **told)
        return plan

    def _plans(self):
        """(Plan, forecast), by falling quality; of the same quality those as asked and as the rules say first."""
        job, ways = self.job, self.placements(self._stages())
        for steps in self._steps():
            for chunk, wait in job.chunks or [(None, None)]:
                for devices in ways:
                    yield Plan(steps, chunk, devices), self._forecast(steps, wait, devices)

    def _stages(self):
        return ["llm" if self.job.language_model else "speech_tokenizer", "flow", "vocoder"]

    def _steps(self):
        return range(self.job.steps, min(self.job.steps, LEAST_STEPS) - 1, -1)

    def _forecast(self, steps, wait, devices):
        job = self.job
        tokens = job.tokens if wait is None else wait if job.tokens is None else min(wait, max(1, job.tokens))
        if tokens is None:
            return math.inf
        segments = job.segments if wait is None else 1
        seconds = self._to_sound(tokens / segments, steps, devices, wait is not None) * segments
        if job.language_model:
            seconds += segments * self._cost("prefill", devices["llm"], max(1, job.prefix))
            seconds += self._cost("llm", devices["llm"], max(1, tokens))
        if job.recording:
            seconds += self._cost("speech_tokenizer", devices["speech_tokenizer"], job.recording)
        return seconds

    def _to_sound(self, tokens, steps, devices, streamed):
        """Seconds from speech tokens to audio."""
        frames = tokens * self.job.frames_per_token
        flow = self._cost(_flow(streamed), devices["flow"], max(1, self.job.prompt_frames + frames))
        return steps * flow + self._cost("vocoder", devices["vocoder"], max(1, frames))

    # During the work

    def steps(self, tokens, to_come=0, streamed=False):
        """Steps of the flow for so many speech tokens that are there now; `to_come`: tokens of later segments.

        As many as fit in what is left, whatever was planned: the language model may have been quicker, or slower."""
        job = self.job
        if self.seconds is None or not self.costs.known(_flow(streamed), self.request.device("flow")):
            return job.steps
        placements = self.placements(["flow", "vocoder"])
        for steps in self._steps():
            for devices in placements:
                seconds = self._to_sound(tokens, steps, devices, streamed)
                if to_come:
                    seconds += self._to_sound(to_come, steps, devices, streamed)
                    if job.language_model:
                        seconds += self._cost("llm", self.request.device("llm"), to_come)
                if seconds <= self.left:
                    return self._settle(steps, devices, f"{seconds:.2f} s to be expected, {self.left:.2f} s left")
        fastest = min(placements, key=lambda d: self._to_sound(tokens, self._steps()[-1], d, streamed))
        return self._settle(self._steps()[-1], fastest, f"late: {self.left:.2f} s left")

    def _settle(self, steps, devices, reason):
        self.follow(devices, f"deadline: {reason}")
        if steps != self.job.steps:
            self.request.record("flow", steps=steps, reason=f"deadline: {reason}")
        return steps

    def enough(self, tokens):
        """Whether the speech tokens so far must do (late="best", at once): more would not become audio in time."""
        if self.seconds is None or self.late != "best" or self.job.chunks:
            return False
        devices = {stage: self.request.device(stage) for stage in ("flow", "vocoder")}
        seconds = self._to_sound(tokens, self._steps()[-1], devices, False)
        return tokens > 0 and seconds < math.inf and self.left <= seconds

    # Measured

    def first_token(self, prefix, seconds):
        self.spent("llm", "prefill", max(1, prefix), seconds)

    def tokens_made(self, count, seconds):
        self.spent("llm", "llm", count, seconds)

    def mel_made(self, frames, steps, seconds, streamed=False):
        self.spent("flow", _flow(streamed), frames, seconds / steps)

    def audio_made(self, frames, seconds):
        self.spent("vocoder", "vocoder", frames, seconds)

    def text_spoken(self, text_ids, tokens):
        """How much speech a text gave: for the next forecast."""
        self.costs.add("tokens", "text", max(1, text_ids), tokens)

    def expected_tokens(self, text_ids):
        """Speech tokens of a text, or None."""
        return self.costs.expect("tokens", "text", text_ids) if text_ids else None


def _flow(streamed):
    return "flow_chunk" if streamed else "flow"


class TextController(Controller):
    """Chooses the device so that the first token (streamed) or all `max_tokens` are there in time."""

    def begin(self, prompt, max_tokens, streamed):
        """Before the work: prompt tokens in all, tokens to draw at most. Raises CosyH3Error as told above."""
        self.streamed = streamed
        if self.seconds is None:
            return
        self.look(["text"])
        plans = [
            (d, self._forecast(prompt, 1 if streamed else max_tokens, d["text"])) for d in self.placements(["text"])
        ]
        what = "the first token" if streamed else f"a text of max_tokens={max_tokens}"
        devices, forecast = self.choose(
            plans, what, "give it more time" if streamed else "give it more time or less to say"
        )
        if devices is None:
            self.request.record("deadline", reason="no times of this model on this machine are known yet: as asked")
            return
        reason = f"{forecast:.2f} of {self.seconds:g} s to be expected"
        self.follow(devices, f"deadline: {reason}")
        self.request.record("deadline", reason=reason)

    def _forecast(self, prompt, tokens, device):
        seconds = self._cost("prompt", device, prompt)
        return seconds + (self._cost("text", device, tokens - 1) if tokens > 1 else 0.0)

    def enough(self, seconds):
        """Whether the text so far must do (late="best", at once): another token takes `seconds`."""
        return self.seconds is not None and self.late == "best" and not self.streamed and self.left <= seconds
