"""Self-tests: a kernel computes for the user only after it has computed something known on this very machine.

The first use of a kernel's variant in a process runs its self-test. What passed is remembered in a stamp file, which
counts for the same kernel text, source files, device, system and MLX version only. A kernel whose self-test raises or
gives wrong numbers is off for the process, all its variants: one warning names the kernel, the device and a report
file, and MLX's own operations take over.

A fault on the GPU can end the whole process, out of reach of any `except`. So a note lies beside the stamps while a
self-test runs: one that a process left behind when it ended says that the kernel is not to be tried again, until
`mlx_cosyh3 doctor` does so.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import platform
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path

import mlx.core as mx


@dataclasses.dataclass
class Outcome:
    """What is known of one variant of a kernel in this process."""

    kernel: str
    operation: str
    variant: str
    passed: bool
    error: float | None = None  # worst error / allowed error; None: taken from a stamp, or it raised
    seconds: float = 0.0
    stamped: bool = False  # a self-test of an earlier process passed
    trouble: str | None = None
    report: str | None = None  # the file that says all about a failure

    def record(self):
        """A dict that JSON takes, which has no word for infinity or for what is not a number."""
        fields = dataclasses.asdict(self)
        if self.error is not None and not math.isfinite(self.error):
            fields["error"] = str(self.error)
        return fields


_lock = threading.RLock()  # one self-test at a time; re-entrant, for a self-test may call the operation itself
_passed = {}  # (kernel name, variant) -> bool
_running = set()  # keys whose self-test is under way, in the thread that holds the lock
_outcomes = []
_fresh = False  # stamps and notes of earlier processes do not count


# What a self-test may be off by, of the largest value or of 1: rounding of the result, and of long sums in fp32.
BOUND = {mx.float32: 1e-4, mx.float16: 2e-3, mx.bfloat16: 2e-2}


def error_ratio(got, want, bounds):
    """The worst error of arrays `got` over what is allowed; inf where a value is NaN."""
    worst = 0.0
    for a, b, bound in zip(got, want, bounds, strict=True):
        error = (mx.abs(a - b).max() / (bound * mx.maximum(mx.abs(b).max(), 1.0))).item()
        worst = max(worst, error) if error == error else float("inf")
    return worst


def normals(seed):
    """normal(*shape): fp32 standard normal arrays, other ones at each call, the same ones for the same seed."""
    keys = iter(mx.random.split(mx.random.key(seed), 32))
    return lambda *shape: mx.random.normal(shape, key=next(keys))


def known(kernel, variant):
    """Whether the variant may run, or None if that is not known yet."""
    return _passed.get((kernel.name, variant))


def first_use(kernel, operation, variant, selftest):
    """Find out whether the variant may run. Other threads wait; a self-test that runs already counts as passed."""
    key = kernel.name, variant
    with _lock:
        if key in _passed or key in _running:
            return _passed.get(key, True)
        off = any(o.kernel == kernel.name and not o.passed for o in _outcomes)
        if off:
            _passed[key] = False
            return False
        _running.add(key)
        try:
            outcome = _find_out(kernel, operation, variant, selftest)
        finally:
            _running.discard(key)
        _outcomes.append(outcome)
        _passed[key] = outcome.passed
        if not outcome.passed:
            for other in _passed:
                if other[0] == kernel.name:
                    _passed[other] = False
            _warn(outcome)  # last: a filter may turn it into an exception
        return outcome.passed


def outcomes():
    """The outcomes of all self-tests of this process so far, in order."""
    with _lock:
        return list(_outcomes)


def test_anew():
    """Forget what is known: each variant is tested at its next use, whatever stamps and notes say."""
    global _fresh
    with _lock:
        _fresh = True
        _passed.clear()
        _outcomes.clear()


def _find_out(kernel, operation, variant, selftest):
    outcome = Outcome(kernel.name, operation, str(variant), True)
    name = _stamp_name(kernel, variant)
    stamp = cache_folder() / "kernels" / name
    if not _fresh and os.path.exists(stamp):
        outcome.stamped = True
        return outcome
    if not _fresh and _left_behind(stamp):
        outcome.trouble = "its self-test ended the whole process before (`mlx_cosyh3 doctor` tries it again)"
        return _failed(outcome, kernel, name, None)
    remove_file(stamp)
    write_file(stamp.with_name(f"{name}.{platform.node()}.{os.getpid()}.running"), "")
    begin, trace, ended = time.perf_counter(), None, True
    try:
        outcome.error = float(selftest())
        if not outcome.error < 1:  # not a number does not pass
            outcome.trouble = f"its result is wrong (worst error {outcome.error:.3g} times what is allowed)"
    except Exception as e:  # whatever a compiler or a driver says: the reference is always right
        outcome.trouble, trace = f"{type(e).__name__}: {e}", traceback.format_exc()
        ended = _gpu_answers()
        if not ended:
            outcome.trouble += "; the GPU does not answer this process any more: start it again"
    finally:
        if ended:
            for note in _left_behind(stamp):
                remove_file(note)
    outcome.seconds = time.perf_counter() - begin
    if outcome.trouble is not None:
        return _failed(outcome, kernel, name, trace)
    write_file(stamp, json.dumps(outcome.record() | machine()))
    return outcome


def _failed(outcome, kernel, name, trace):
    """`outcome` as a failure, its report written."""
    outcome.passed = False
    report = cache_folder() / "reports" / f"{name}.json"  # one a kernel and machine, however often it fails
    record = outcome.record() | {"traceback": trace, "text": kernel.text()} | machine()
    if write_file(report, json.dumps(record, indent=1)):
        outcome.report = str(report)
    return outcome


def _warn(outcome):
    trouble = (outcome.trouble.splitlines() or ["?"])[0]
    warnings.warn(
        f"kernel {outcome.kernel} is off for this process on {machine()['device']}: variant {outcome.variant}: "
        f"{trouble}; MLX's own operations take over, with the same results"
        f"; report: {outcome.report or 'could not be written'}",
        RuntimeWarning,
        stacklevel=4,  # the operation, where it calls `usable`
    )


def _gpu_answers():
    """Whether the GPU still computes after a failure: a fault can leave a process without it for good."""
    try:
        return (mx.array([1.0]) + 1).item() == 2
    except Exception:  # of any kind: it does not
        return False


# ---------------------------------------------------------------- what lies on the disk


def _stamp_name(kernel, variant):
    parts = (kernel.name, str(variant), kernel.text(), _sources(), json.dumps(machine(), sort_keys=True))
    return f"{kernel.name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}"


@functools.lru_cache(maxsize=1)
def _sources():
    """A digest of this folder's files: how a kernel is launched is as much part of it as its text."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _left_behind(stamp):
    """Notes of self-tests on this machine whose process has ended, and this process's own."""
    notes = stamp.parent.glob(f"{stamp.name}.{platform.node()}.*.running")
    return [note for note in notes if not _alive(int(note.name.split(".")[-2]))]


def _alive(pid):
    """Whether another process has this id; one that had this process's own is gone."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def machine():
    """What a kernel's result depends on besides its text."""
    info = mx.device_info(mx.gpu)
    return {"device": str(info.get("device_name", "unknown GPU")), "architecture": str(info.get("architecture", "?")),
            "mlx": mx.__version__, "system": platform.platform()}  # fmt: skip


def cache_folder():
    """Where this program keeps small files of its own: $MLX_COSYH3_CACHE, else the user's cache folder."""
    given = os.environ.get("MLX_COSYH3_CACHE")
    if given:
        return Path(given)
    try:
        home = Path.home()
    except RuntimeError:  # a user without a home, as in some containers
        return Path(tempfile.gettempdir()) / f"mlx_cosyh3-{os.getuid()}"
    if platform.system() == "Darwin":
        return home / "Library" / "Caches" / "mlx_cosyh3"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "mlx_cosyh3"


def write_file(path, text):
    """Write a small file whole or not at all; False where that is not possible (a read-only home, a full disk)."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
        return True
    except OSError:
        remove_file(part)
        return False


def remove_file(path):
    """Remove a file if it is there and may be removed."""
    with contextlib.suppress(OSError):
        path.unlink()
