"""Deadlines beside another program that takes the GPU in spells: how many are met, with the controller and without.

    python benchmarks/deadline.py [--minutes 2] [--slack 1.6] [--competitors 3] [--trace load.json]

A full-size CosyVoice 3 with random weights, so that every utterance has the same number of tokens. At first nothing else
runs: stages are measured, and their median time is the calm one. Then other processes multiply large matrices for some
seconds, rest for some, and so on, while utterances are asked for with `slack` times the calm time as their deadline:
without a controller, with late="refuse", with late="best", in turn. --trace writes how many times slower than calm each
stage was, and when (seconds, stage, times), which tests/test_deadline.py replays.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.cosyvoice import random_model, random_voice  # noqa: E402
from mlx_cosyh3.costs import Costs  # noqa: E402
from mlx_cosyh3.errors import DeadlineError  # noqa: E402

TEXT = "a" * 60


def compete():
    """What a competitor does, until it is killed."""
    x = mx.random.normal((4096, 4096), key=mx.random.key(0)) / 64
    mx.eval(x @ x)
    print("ready", flush=True)
    while True:
        mx.eval([x @ x for _ in range(4)])


class Load:
    """Competitors that run in spells; `with` starts and stops them, `spells` begins them in a thread."""

    def __init__(self, n, seed=0):
        self._n, self._draw, self._over = n, random.Random(seed), threading.Event()

    def __enter__(self):
        command = [sys.executable, __file__, "--compete"]
        self._running = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(self._n)]
        for p in self._running:
            p.stdout.readline()
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(self, *_):
        self._over.set()
        for p in self._running:
            p.kill()

    def _signal(self, which):
        for p in self._running:
            os.kill(p.pid, which)

    def spells(self):
        threading.Thread(target=self._spells, daemon=True).start()

    def _spells(self):
        while True:
            for which in (signal.SIGCONT, signal.SIGSTOP):
                self._signal(which)
                if self._over.wait(self._draw.uniform(2, 8)):
                    return


class Watch:
    """All that is measured: (when, stage, device, size, seconds)."""

    def __init__(self):
        self.begin, self.seen = time.perf_counter(), []
        add = Costs.add

        def watched(costs, stage, device, size, seconds, keep=True):
            self.seen.append((time.perf_counter() - self.begin, stage, device, size, seconds))
            add(costs, stage, device, size, seconds, keep)

        Costs.add = watched


def speak(model, streamed, **options):
    """(seconds until what is due is there, steps of the flow, share of the audio)"""
    begin = time.perf_counter()
    options = {"seed": 1, "normalize": False, "note": lambda text: None} | options
    if streamed:
        stream = model.start(TEXT, True, **options)
        next(stream)
        took = time.perf_counter() - begin
        stream.close()
        return took, None, 1.0
    result = model.generate(TEXT, **options)
    steps = [d["steps"] for d in result.decisions if d.get("steps")]
    return time.perf_counter() - begin, steps[-1] if steps else 10, result.duration / options["max_seconds"]


def campaign(model, voice, streamed, args, load):
    """Print a line for each way to treat deadlines -> when the load began, as time.perf_counter gives it."""
    options = {"voice": voice, "max_seconds": args.seconds}
    calm = sorted(speak(model, streamed, **options)[0] for _ in range(12))[6]
    deadline = args.slack * calm
    rows = {late: [] for late in (None, "refuse", "best")}
    load.spells()
    began, draw = time.perf_counter(), random.Random(1)
    while time.perf_counter() < began + 60 * args.minutes / 2:
        for late, row in rows.items():
            try:
                row.append(speak(model, streamed, **options, **({} if late is None else {"deadline": deadline, "late": late})))
            except DeadlineError:
                row.append(None)
            time.sleep(draw.expovariate(5))
    what = "first audio" if streamed else "whole answer"
    print(f"\n{what}: {calm:.3f} s where nothing else runs, deadline {deadline:.3f} s")
    print("| | requests | begun | of these in time | told beforehand | mean steps | mean share of the audio |")
    print("| --- " + "| ---: " * 6 + "|")
    for late, row in rows.items():
        begun = [r for r in row if r]
        met = np.mean([took <= deadline for took, *_ in begun]) if begun else 0
        steps = "" if streamed or not begun else f"{np.mean([s for _, s, _ in begun]):.1f}"
        share = f"{np.mean([share for *_, share in begun]):.2f}" if begun else ""
        print(f"| {'no controller' if late is None else late} | {len(row)} | {len(begun)} | {met:.1%} | {len(row) - len(begun)} | {steps} "
              f"| {share} |", flush=True)  # fmt: skip
    return began


def write_trace(seen, calm_until, path):
    """Each stage's seconds over those of its calm median (per unit of the same size), from `calm_until` on."""
    calm = {}
    for when, stage, device, size, seconds in seen:
        if when < calm_until and device == "gpu":
            calm.setdefault((stage, size), []).append(seconds)
    rows = [[round(when - calm_until, 2), stage, round(seconds / float(np.median(calm[stage, size])), 2)]
            for when, stage, device, size, seconds in seen if when >= calm_until and (stage, size) in calm]  # fmt: skip
    Path(path).write_text(json.dumps(rows))
    print(f"{path}: {len(rows)} measurements", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="full", choices=("full", "small"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "int8"))
    parser.add_argument("--seconds", type=float, default=3, help="of audio an utterance has")
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--slack", type=float, default=1.6, help="the deadline over the calm time")
    parser.add_argument("--competitors", type=int, default=3)
    parser.add_argument("--trace", help="JSON file to write")
    parser.add_argument("--compete", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.compete:
        compete()
    print(f"mlx {mx.__version__}, {mx.device_info().get('device_name', 'CPU')}; {args.size} size, {args.dtype}, {args.competitors} competitors")
    model = random_model(args.size, args.dtype)
    voice, watch = random_voice(model), Watch()
    for streamed in (False, True):
        # CUDA prepares convolutions anew for each length: all lengths that a first chunk may have, before anything counts
        for chunk in (25, 12, 6, 3, 1) if streamed else (25,):
            for _ in range(2):
                speak(model, streamed, voice=voice, max_seconds=args.seconds, **({"chunk_tokens": chunk} if streamed else {}))
        with Load(args.competitors) as load:
            began = campaign(model, voice, streamed, args, load)
        if args.trace and not streamed:
            write_trace(watch.seen, began - watch.begin, args.trace)


if __name__ == "__main__":
    main()
