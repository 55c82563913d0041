"""Where the time of a generation goes: a Chrome trace of its stages, and on a Mac what the GPU did.

    with trace.recording() as t:                 # holds in this thread or task, and in the streams made within
        generate(model, "Good morning.")
    t.write("stages.json")                       # open it in https://ui.perfetto.dev or chrome://tracing

A stage tells of itself with `trace.record` or `trace.span`, which cost next to nothing where nobody records. The format
is Chrome's "Trace Event Format": complete events (ph "X") in microseconds, which nest within a thread; each request
as a whole, in a row of its own, whatever threads worked for it ("b" to "e"); counters ("C") of memory, names ("M").
"""

import contextlib
import contextvars
import json
import os
import sys
import threading
import time
from pathlib import Path

import mlx.core as mx

from mlx_cosyh3.errors import CosyH3Error

MOST = 200_000  # events; what comes later is counted, not kept
CAPTURE = "MTL_CAPTURE_ENABLED"  # Metal takes a GPU trace only in a process that began with this set to 1

_current = contextvars.ContextVar("mlx_cosyh3_trace", default=None)


class Trace:
    """Events as they are recorded, from any thread.

    clock   seconds; that of `begin` and `end` given to `add`
    memory  () -> bytes in use, noted at the end of each event; None: not noted"""

    def __init__(self, clock=time.perf_counter, memory=mx.get_active_memory):
        self.clock, self._memory = clock, memory
        self._lock = threading.Lock()
        self._start = clock()
        self._events, self._threads = [], {}
        self.left_out = 0

    def add(self, name, begin, end, /, **args):
        """A stage that was at work in this thread from `begin` to `end`, seconds by the trace's clock."""
        from mlx_cosyh3.logs import plain, request_id

        begin, end = self._ns(begin), self._ns(end)
        args = plain(args) | ({} if request_id() is None else {"request": request_id()})
        memory = None if self._memory is None else self._memory()
        with self._lock:
            if len(self._events) >= MOST:
                self.left_out += 1
                return
            thread = threading.current_thread()
            tid = self._threads.setdefault(thread.ident, (len(self._threads) + 1, thread.name))[0]
            event = {"name": name, "cat": "stage", "ph": "X", "ts": begin / 1e3, "dur": max(0, end - begin) / 1e3}
            self._events.append(event | {"pid": os.getpid(), "tid": tid} | ({"args": args} if args else {}))
            if memory is not None:
                counter = {"name": "memory", "ph": "C", "ts": end / 1e3, "pid": os.getpid(), "tid": tid}
                self._events.append(counter | {"args": {"MB": round(memory / 1e6, 3)}})

    @contextlib.contextmanager
    def span(self, name, /, **args):
        """`with t.span("flow"):` records what is done within, also if it fails."""
        begin = self.clock()
        try:
            yield
        except BaseException as e:
            args["error"] = type(e).__name__
            raise
        finally:
            self.add(name, begin, self.clock(), **args)

    def _ns(self, seconds):
        """Whole nanoseconds since the trace began: sums of floats would let an event stick out of its parent."""
        return round((seconds - self._start) * 1e9)

    def json(self):
        """The trace as a dict that JSON takes."""
        from mlx_cosyh3.logs import machine

        with self._lock:
            # Parents before children: of two that begin together the longer one, or the one that was told later.
            events = sorted(reversed(self._events), key=lambda e: (e["ts"], -e.get("dur", 0)))
            threads = list(self._threads.values())
        events = sorted(events + _requests(events), key=lambda e: e["ts"])
        pid = os.getpid()
        names = [{"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": "mlx_cosyh3"}}]
        names += [{"name": "thread_name", "ph": "M", "pid": pid, "tid": t, "args": {"name": n}} for t, n in threads]
        told = {k: machine()[k] for k in ("machine", "versions")}
        if self.left_out:
            told["left_out"] = f"{self.left_out} events, of which the first {MOST} are here"
        return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": told}

    def write(self, path):
        """Write it to a file, which appears whole or not at all. Raises CosyH3Error where that is not possible."""
        from mlx_cosyh3.kernels._trust import write_file

        if not write_file(Path(path), json.dumps(self.json()) + "\n"):
            raise CosyH3Error(f"cannot write the trace to {path}")

    def totals(self):
        """{stage: seconds} that it was at work."""
        sums = {}
        for e in self.json()["traceEvents"]:
            if e["ph"] == "X":
                sums[e["name"]] = sums.get(e["name"], 0.0) + e["dur"] / 1e6
        return sums


def _requests(events):
    """A begin and an end for each request that stages tell of."""
    spans = {}
    for e in events:
        id = e.get("args", {}).get("request")
        if id is not None:
            begin, end, _ = spans.get(id, (e["ts"], 0, None))
            spans[id] = min(begin, e["ts"]), max(end, e["ts"] + e["dur"]), e
    found = []
    for id, (begin, end, e) in spans.items():
        same = {"name": "request", "cat": "request", "id": id, "pid": e["pid"], "tid": e["tid"]}
        found += [same | {"ph": "b", "ts": begin, "args": {"request": id}}, same | {"ph": "e", "ts": end}]
    return found


# ---------------------------------------------------------------- for those who do the work


def record(name, begin, end, /, **args):
    """Tell the trace that records here, if there is one, when a stage began and ended (by time.perf_counter)."""
    trace = _current.get()
    if trace is not None:
        trace.add(name, begin, end, **args)


def span(name, /, **args):
    """`with trace.span("load"):` the same for what is done within."""
    trace = _current.get()
    return contextlib.nullcontext() if trace is None else trace.span(name, **args)


@contextlib.contextmanager
def recording(trace=None):
    """`with recording() as trace:` what is done within goes to `trace` (None: a new one)."""
    trace = trace or Trace()
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


# ---------------------------------------------------------------- on the command line


def add_option(parser):
    """--trace, for a command that generates."""
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace of the stages (JSON); on a Mac, with "
                        f"{CAPTURE}=1 set, also a GPU trace for Xcode beside it")  # fmt: skip


@contextlib.contextmanager
def to_file(path, note=lambda text: print(f"note: {text}", file=sys.stderr, flush=True)):
    """`with to_file(args.trace):` records what is done within, to `path` (None: nothing is done).

    What was recorded before an error or Ctrl-C is written, too. Raises CosyH3Error, before any work, for a path that
    cannot be written."""
    if path is None:
        yield None
        return
    path = Path(path).expanduser()
    if path.is_dir():
        raise CosyH3Error(f"--trace: {path} is a folder; name a file, such as {path}/trace.json")
    if not path.parent.is_dir():
        raise CosyH3Error(f"--trace: there is no folder {path.parent}")
    if path.suffix == ".gputrace":
        raise CosyH3Error(f"--trace: {path} is to be a .json file; the .gputrace is written beside it")
    with recording() as trace, _gpu_capture(path.with_suffix(".gputrace"), note):
        try:
            yield trace
        finally:
            trace.write(path)
            if trace.left_out:
                note(f"the trace was full: {trace.left_out} events are not in it")
            note(f"trace: {path} (open it in https://ui.perfetto.dev)")


@contextlib.contextmanager
def _gpu_capture(path, note):
    """Let Metal write down what the GPU does, where it can and was asked to."""
    if not mx.metal.is_available():
        yield
        return
    if os.environ.get(CAPTURE) != "1":
        note(f"for a GPU trace set {CAPTURE}=1 before the program starts")
        yield
        return
    if path.exists():  # a folder, which Metal does not replace
        raise CosyH3Error(f"--trace: {path} exists: remove it, or choose another name")
    try:
        mx.metal.start_capture(str(path))
    except RuntimeError as e:
        raise CosyH3Error(f"--trace: Metal takes no GPU trace: {str(e).splitlines()[0]}") from e
    try:
        yield
    finally:
        mx.metal.stop_capture()
        note(f"GPU trace: {path} (open it in Xcode)")
