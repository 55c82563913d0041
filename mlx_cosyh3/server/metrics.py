"""Numbers for Prometheus, in its text format. Labels come from tables of our own, so that no client makes them grow."""

import os
import time
from collections import defaultdict

import mlx.core as mx

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PREFIX = "mlx_cosyh3_"
HELP = {
    "requests_total": ("counter", "Requests answered, by route and status; 499 are those whose client went away."),
    "request_seconds": ("histogram", "Time from a request to the end of its answer."),
    "first_piece_seconds": ("histogram", "Time from a request to the first piece of a streamed answer."),
    "stage_seconds_total": ("counter", "Time that the stages of a model took."),
    "audio_seconds_total": ("counter", "Audio that was made."),
    "tokens_total": ("counter", "Text tokens that were read and written."),
    "active": ("gauge", "Requests at work or waiting."),
    "scheduler": ("gauge", "Generations of a model at work or waiting."),
    "ended_total": ("counter", "Generations of a model that have ended, by how, since it was loaded."),
    "voices": ("gauge", "Voices that clients made."),
    "memory_bytes": ("gauge", "What MLX holds: active, cache, and the most so far."),
    "resident_bytes": ("gauge", "Memory of this process that is in RAM."),
    "open_files": ("gauge", "Descriptors of this process."),
    "start_time_seconds": ("gauge", "When the server began, in seconds since 1970."),
}


class Metrics:
    """Belongs to one event loop; only there it is written and read."""

    def __init__(self):
        self.started = time.time()
        self._counts = defaultdict(float)  # (name, labels) -> value; labels: a tuple of (name, value)
        self._times = {}  # (name, labels) -> [count per bucket, count, sum]

    def add(self, name, amount=1, **labels):
        self._counts[name, tuple(labels.items())] += amount

    def observe(self, name, seconds, **labels):
        buckets, total = self._times.setdefault((name, tuple(labels.items())), ([0] * len(SECONDS), [0, 0.0]))
        for i, bound in enumerate(SECONDS):
            buckets[i] += seconds <= bound
        total[0] += 1
        total[1] += seconds

    def text(self, gauges=()):
        """All of it. gauges: (name, labels dict, value) of the moment."""
        rows = defaultdict(list)
        for (name, labels), value in self._counts.items():
            rows[name].append(_row(name, labels, value))
        for (name, labels), (buckets, (count, total)) in self._times.items():
            for bound, n in zip(SECONDS, buckets):
                rows[name].append(_row(name + "_bucket", (*labels, ("le", f"{bound:g}")), n))
            rows[name].append(_row(name + "_bucket", (*labels, ("le", "+Inf")), count))
            rows[name] += [_row(name + "_count", labels, count), _row(name + "_sum", labels, total)]
        for name, labels, value in [*gauges, ("start_time_seconds", {}, self.started), *process()]:
            rows[name].append(_row(name, tuple(labels.items()), value))
        lines = []
        for name, (kind, text) in HELP.items():
            if rows[name]:
                lines += [f"# HELP {PREFIX}{name} {text}", f"# TYPE {PREFIX}{name} {kind}", *rows[name]]
        return "\n".join(lines) + "\n"


def _row(name, labels, value):
    inside = ",".join(f'{k}="{_escape(str(v))}"' for k, v in labels)
    return f"{PREFIX}{name}{'{' + inside + '}' if inside else ''} {value:.10g}"


def _escape(text):
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def process():
    """Gauges of this process."""
    yield "memory_bytes", {"kind": "active"}, mx.get_active_memory()
    yield "memory_bytes", {"kind": "cache"}, mx.get_cache_memory()
    yield "memory_bytes", {"kind": "peak"}, mx.get_peak_memory()
    try:  # only Linux shows these as files
        with open("/proc/self/statm") as file:
            yield "resident_bytes", {}, int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        yield "open_files", {}, len(os.listdir("/proc/self/fd"))
    except OSError:
        return
