"""What goes wrong on purpose, in models of both families; used by tests/test_faults*.py.

The GPU, where this machine has none, is played by the CPU: a request that is through the gate for it counts as there.
"""

import random

import mlx.core as mx
import numpy as np

from mlx_cosyh3 import batch_generate, generate, stream_generate
from mlx_cosyh3.gate import GATE
from mlx_cosyh3.h3 import H3
from mlx_cosyh3.probes import Memory, Probes
from mlx_cosyh3.runtime import Policy
from mlx_cosyh3.scheduler import Scheduler

GB = 10**9
ERRORS = {
    "memory": lambda: RuntimeError("[malloc] Unable to allocate 68719476736 bytes."),
    "metal": lambda: RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (00000008)\nmore"),
    "python": lambda: MemoryError(),
    "nan": None,
}


def gpu():
    """A policy on a machine with a GPU that is free."""
    probes = Probes(
        gpu=lambda: None, memory=lambda: Memory(1 * GB, 0, 10 * GB), battery=lambda: None, heat=lambda: None
    )
    return Policy(probes=probes)


def cpu():
    return Policy(device="cpu")


def points(model):
    """The methods in which a model's stages do their work: (class, name, whether what comes out of it is spoilt, or
    what goes in), since a NaN is looked for behind the one and within the other."""
    if isinstance(model, H3):
        return [(H3, "prefill", "out"), (H3, "step", "out")]
    parts = (model.llm, "last_logits", "out"), (model.flow, "solve", "in"), (model.hift, "decode", "in")
    return [(type(part), name, where) for part, name, where in parts]


def nan(values):
    """`values`, their fp32 arrays not finite."""
    spoil = lambda a: a * float("nan") if isinstance(a, mx.array) and a.dtype == mx.float32 else a  # noqa: E731
    return tuple(map(spoil, values)) if isinstance(values, tuple) else spoil(values)


class Fault:
    """`with Fault(model, call, how) as fault:` the call of that number fails in that way; call=0: none, they are counted.

    where   "gpu": only if it is there; calls on the CPU do not count"""

    def __init__(self, model, call=0, how="nan", where=None):
        self.model, self.call, self.how, self.where = model, call, how, where
        self.calls, self.stages = 0, []

    def __enter__(self):
        self.before = [(cls, name, getattr(cls, name)) for cls, name, _ in points(self.model)]
        for cls, name, spoilt in points(self.model):
            setattr(cls, name, self._wrapped(getattr(cls, name), name, spoilt))
        return self

    def __exit__(self, *exc):
        for cls, name, original in self.before:
            setattr(cls, name, original)

    def _wrapped(self, original, name, spoilt):
        def method(part, *args, **options):
            if self.where not in (None, GATE.here):
                return original(part, *args, **options)
            self.calls += 1
            self.stages.append(name)
            if self.calls != self.call:
                return original(part, *args, **options)
            if ERRORS[self.how] is not None:
                raise ERRORS[self.how]()
            if spoilt == "in":
                return original(part, *nan(args), **options)
            return nan(original(part, *args, **options))

        return method


# ---------------------------------------------------------------- the ways to ask


def ask_text(model, way, policy):
    """The answer to a request in one of WAYS, as a list of what is to be equal."""
    options = {"max_tokens": 8, "seed": 5, "temperature": 0.9, "policy": policy}
    if way == "batch":
        return [r.text for r in batch_generate(model, ["the cat", "a"], **options)]
    if way == "stream":
        return ["".join(stream_generate(model, "the cat", **options))]
    if way == "ticket":
        with Scheduler(model) as scheduler:
            return [scheduler.submit("the cat", **options).result().text]
    return [generate(model, "the cat", **options).text]


def ask_speech(model, way, policy):
    options = {"voice": "anna", "seed": 2, "steps": 2, "policy": policy, "note": lambda text: None, "max_seconds": 1.2}
    if way == "batch":
        return [r.audio for r in batch_generate(model, ["The cat.", "It sat on the mat."], **options)]
    text = "The cat sat on the mat."
    if way == "stream":
        return [np.concatenate(list(stream_generate(model, text, chunk_tokens=5, max_chunk_tokens=10, **options)))]
    if way == "ticket":
        with Scheduler(model) as scheduler:
            return [scheduler.submit(text, **options).result().audio]
    return [generate(model, text, **options).audio]


WAYS = ("at once", "stream", "ticket", "batch")


def ask(model, way, policy):
    return (ask_text if isinstance(model, H3) else ask_speech)(model, way, policy)


def same(got, want, atol=0.0):
    assert len(got) == len(want)
    for a, b in zip(got, want):
        if isinstance(b, str):
            assert a == b
        else:
            np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def some(seed, model):
    """(way, how, the number of a call, the answer without a fault), drawn at random."""
    draw = random.Random(seed)
    way, how = WAYS[seed % len(WAYS)], draw.choice(list(ERRORS))
    with Fault(model) as healthy:
        want = ask(model, way, gpu())
    return way, how, draw.randint(1, healthy.calls), want
