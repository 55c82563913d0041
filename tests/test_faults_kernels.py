"""Kernels that fail, as a user meets them: generation goes on with the same result, one warning a kernel, and goes on
without it from then on. The GPU is claimed; what a kernel computes there is what the test says.

Run: MLX_COSYH3_GOLDENS=folder python -m pytest -q tests/test_faults_kernels.py
"""

import warnings

import mlx.core as mx
import pytest

from mlx_cosyh3 import load
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.gate import GATE
from mlx_cosyh3.kernels import _dispatch, _gpu, _trust, use_kernels
from tests import golden_voice_models
from tests.faults import WAYS, ask, ask_speech, cpu, gpu, same

BOUND = 1e-3


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A new process on a machine with a GPU, as long as nobody is through the gate for the CPU."""
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(tmp_path))
    monkeypatch.delenv("MLX_COSYH3_KERNELS", raising=False)
    for name, value in (("_passed", {}), ("_outcomes", []), ("_fresh", False)):
        monkeypatch.setattr(_trust, name, value)
    monkeypatch.setattr(_dispatch, "_environment", None)
    monkeypatch.setattr(_dispatch, "on_gpu", lambda stream=None: GATE.here != "cpu")


@pytest.fixture(scope="module")
def h3():
    """The embedded model: its sizes are such as the kernels take."""
    return load()


@pytest.fixture(params=["h3", 1, 2, 3])
def any_model(request, h3, monkeypatch):
    if request.param == "h3":
        return h3
    made = golden_voice_models.quantised(request.param, "int8")
    monkeypatch.setattr(made, "short", True)
    return made


def at_construction(self, **launch):
    raise RuntimeError("[metal::Device] Unable to build metal library from source\nprogram_source:12: error: no type")


def at_first_use(self, **launch):
    raise ValueError(f"[metal_kernel] {self.name}: too many threads in a threadgroup")


def wrong(self, *, output_shapes, output_dtypes, **launch):
    return [mx.ones(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes)]


def not_finite(self, *, output_shapes, output_dtypes, **launch):
    fill = lambda dtype: float("nan") if mx.issubdtype(dtype, mx.floating) else 0  # noqa: E731
    return [mx.full(shape, fill(dtype), dtype) for shape, dtype in zip(output_shapes, output_dtypes)]


def ask_and_warn(model, way, policy):
    """(answer, the warnings about kernels)"""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = ask(model, way, policy)
    return got, [str(w.message) for w in caught if str(w.message).startswith("kernel ")]


@pytest.mark.parametrize("failure", [at_construction, at_first_use, wrong], ids=lambda f: f.__name__)
def test_kernels_that_fail_their_self_test(any_model, monkeypatch, failure):
    with use_kernels("0"):
        want = ask(any_model, "at once", cpu())
    monkeypatch.setattr(_gpu.GpuKernel, "__call__", failure)
    got, told = ask_and_warn(any_model, "at once", gpu())
    same(got, want, BOUND)
    tried = _trust.outcomes()
    assert tried and not any(o.passed for o in tried)
    assert len(told) == len({o.kernel for o in tried}) and all("\n" not in text for text in told)
    got, told = ask_and_warn(any_model, "stream", gpu())
    assert not told or {o.kernel for o in _trust.outcomes()} > {o.kernel for o in tried}  # each once, new ones alone
    with use_kernels("0"):
        same(got, ask(any_model, "stream", cpu()), BOUND)


@pytest.mark.parametrize("way", WAYS)
def test_kernels_that_fail_in_use(any_model, monkeypatch, way):
    """They had passed: the stage runs again where there are no kernels."""
    with use_kernels("0"):
        want = ask(any_model, way, cpu())
    monkeypatch.setattr(_trust, "known", lambda kernel, variant: True)
    launched = []

    def fails(self, **launch):
        launched.append(self.name)
        raise RuntimeError("[METAL] Command buffer execution failed: Caused GPU Hang Error (00000003)")

    monkeypatch.setattr(_gpu.GpuKernel, "__call__", fails)
    same(ask(any_model, way, gpu()), want, BOUND)
    assert launched


def test_kernels_that_give_nonsense_in_use(h3, monkeypatch):
    """Not finite: found where a stage ends. The text of an H3 model, and speech."""
    monkeypatch.setattr(_trust, "known", lambda kernel, variant: True)
    speaker = golden_voice_models.quantised(3, "int8")
    monkeypatch.setattr(speaker, "short", True)
    for model in (h3, speaker):
        with use_kernels("0"):
            want = ask(model, "at once", cpu())
        with monkeypatch.context() as m:
            m.setattr(_gpu.GpuKernel, "__call__", not_finite)
            same(ask(model, "at once", gpu()), want, BOUND)


def test_without_another_device_it_is_one_error(monkeypatch):
    model = golden_voice_models.quantised(3, "int8")
    monkeypatch.setattr(model, "short", True)
    with use_kernels("0"):
        want = ask_speech(model, "at once", cpu())
    monkeypatch.setattr(_trust, "known", lambda kernel, variant: True)
    policy = gpu()
    policy.retry_on_cpu = False
    with monkeypatch.context() as m:
        m.setattr(_gpu.GpuKernel, "__call__", at_construction)
        with pytest.raises(CosyH3Error, match="failed on the GPU .*Unable to build metal library") as e:
            ask_speech(model, "at once", policy)
        assert "\n" not in str(e.value)
    with use_kernels("0"):
        same(ask_speech(model, "at once", policy), want, BOUND)
