"""Policies on machines that this one is not. The GPU, where this machine has none, is played by the CPU."""

import mlx.core as mx
import pytest

from mlx_cosyh3 import runtime
from mlx_cosyh3.costs import costs_of
from mlx_cosyh3.errors import NotFiniteError
from mlx_cosyh3.gate import GATE
from mlx_cosyh3.probes import Memory, Probes
from mlx_cosyh3.runtime import Policy

GB = 10**9
GPU_ERROR = RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")
NAN = NotFiniteError("the flow gave a value that is not finite (inf or NaN) in step 3 of 10")
SPEECH_STAGES = ("prefill", "llm", "flow", "flow_chunk", "vocoder", "tokens")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No knobs from outside, no files outside, MLX's limits as they were."""
    for name in runtime.KNOBS:
        monkeypatch.delenv(f"MLX_COSYH3_{name.upper()}", raising=False)
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(tmp_path / "cache"))
    limits = mx.set_memory_limit(2**40), mx.set_cache_limit(2**40)
    mx.set_memory_limit(limits[0])
    mx.set_cache_limit(limits[1])
    yield
    mx.set_memory_limit(limits[0])
    mx.set_cache_limit(limits[1])


def probes(gpu=None, used=1 * GB, others=0, total=10 * GB, battery=None, heat=None):
    memory = used if callable(used) else lambda: Memory(used, others, total)
    return Probes(gpu=lambda: gpu, memory=memory, battery=lambda: battery, heat=lambda: heat, every=0)


def policy(**knobs):
    """A policy on a machine with a GPU, unless `knobs` have other probes."""
    return Policy(**{"probes": probes()} | knobs)


def no_gpu(**knobs):
    """A policy on a machine without a GPU, and nothing else to mind."""
    return policy(probes=probes(gpu="no GPU in this test", total=None), **knobs)


def costly(p, model, stages, seconds):
    """Let `model` be known to take `seconds` for each of `stages` on the CPU."""
    costs = costs_of(p, model)
    for stage in stages:
        for size in (1, 10, 100):
            costs.add(stage, "text" if stage == "tokens" else "cpu", size, seconds if stage != "tokens" else 2.0 * size)


def fault(monkeypatch, cls, name, call, error=GPU_ERROR, nan=False):
    """The `call`-th call of a method fails if it is on the GPU. Returns the list of the devices it was called on."""
    original, seen = getattr(cls, name), []

    def wrapped(self, *args, **options):
        seen.append(GATE.here)
        if seen[-1] == "gpu" and len(seen) == call:
            if not nan:
                raise error
            args = [a * float("nan") if isinstance(a, mx.array) and a.dtype == mx.float32 else a for a in args]
        return original(self, *args, **options)

    monkeypatch.setattr(cls, name, wrapped)
    return seen


def again(result, stage):
    return [d["reason"] for d in result.decisions if d["stage"] == stage and "again" in d["reason"]]
