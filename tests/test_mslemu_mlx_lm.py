"""Kernels of others: mlx-lm 0.32.2's ssm and gated_delta pass, the race in its KL loss is found.

pip download --no-deps mlx-lm==0.32.2, unpack the wheel below a folder, name the folder in MLX_COSYH3_REAL_FILES.
"""

import importlib.util
import os
import sys
import types
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from . import mslemu

if mslemu.missing():
    pytest.skip(f"Metal emulator: {mslemu.missing()}", allow_module_level=True)
ROOT = os.environ.get("MLX_COSYH3_REAL_FILES")
FOUND = sorted(Path(ROOT).glob("**/mlx_lm/models/gated_delta.py")) if ROOT else []
if not FOUND:
    pytest.skip("MLX_COSYH3_REAL_FILES names no folder with mlx-lm 0.32.2 unpacked", allow_module_level=True)
MLX_LM = FOUND[0].parents[1]

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


def load(path, **fakes):
    """A module of mlx-lm on its own, its kernels made by the emulator; `fakes`: modules it imports by relation."""
    names = ["standin", "standin.sub", *(f"standin.{n}" for n in fakes)]
    made = {n: types.ModuleType(n) for n in names}
    made["standin"].__path__ = made["standin.sub"].__path__ = []
    for name, content in fakes.items():
        made[f"standin.{name}"].__dict__.update(content)
    spec = importlib.util.spec_from_file_location("standin.sub.module", MLX_LM / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.update({**made, "standin.sub.module": module})
    try:
        with mslemu.installed():
            spec.loader.exec_module(module)
    finally:
        for name in [*names, "standin.sub.module"]:
            del sys.modules[name]
    return module


def normal(*shape, dtype=mx.float32, scale=1.0):
    return (mx.random.normal(shape) * scale).astype(dtype)


def error(a, b, rows=slice(None)):
    a, b = (np.array(x.astype(mx.float32)) for x in (a, b))
    return np.abs(a - b)[:, rows].max()


@pytest.mark.parametrize("settings", mslemu.SWEEP, ids=lambda s: f"{s['order']}-{s['contract']}")
def test_ssm(settings):
    ssm = load("models/ssm.py")
    mx.random.seed(1)
    n, h, d, ds = 2, 4, 16, 64
    args = [
        normal(n, 1, h, d),
        normal(h),
        normal(n, 1, 2, ds),
        normal(n, 1, 2, ds),
        normal(h),
        normal(n, 1, h),
        normal(h),
        normal(n, h, d, ds),
        (0.001, 100.0),
    ]
    with mslemu.settings(**settings):
        y, state = ssm.ssm_update_kernel(*args)
    want, want_state = ssm.ssm_attn(*args)
    assert error(y, want) < 5e-5 and error(state, want_state) < 5e-6


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("vector", [False, True])
def test_gated_delta(vector, masked, dtype, order):
    gated = load("models/gated_delta.py")
    mx.random.seed(2)
    B, T, Hk, Hv, Dk, Dv = 1, 3, 1, 2, 128, 8
    q, k = normal(B, T, Hk, Dk, dtype=dtype, scale=0.1), normal(B, T, Hk, Dk, dtype=dtype, scale=0.1)
    v, beta = normal(B, T, Hv, Dv, dtype=dtype), mx.random.uniform(0, 1, (B, T, Hv)).astype(dtype)
    g = mx.random.uniform(0.5, 1, (B, T, Hv, Dk) if vector else (B, T, Hv))
    state, mask = normal(B, Hv, Dv, Dk, scale=0.1), mx.array([[True, False, True]]) if masked else None
    run = lambda: gated.gated_delta_kernel(q, k, v, g, beta, state, mask)  # noqa: E731
    if masked:  # 32 lanes write the same 0 to the same place: documented, and allowed on that line only
        with mslemu.settings(order=order), pytest.raises(mslemu.MslError) as found:
            run()
        assert found.value.kinds == {"race-device"}
        assert {f.source.strip() for f in found.value.findings} == {"y[dv_idx] = static_cast<InT>(0);"}
    with mslemu.settings(order=order, allow={"race-device": "y[dv_idx] = static_cast<InT>(0);"} if masked else {}):
        y, new = run()
    want, want_new = gated.gated_delta_ops(q, k, v, g, beta, state, mask)
    rows = [0, 2] if masked else slice(None)  # the reference leaves something in masked rows, the kernel zeros
    assert error(y, want, rows) < (1e-6 if dtype == mx.float32 else 2e-2) and error(new, want_new) < 1e-6


def kl(losses, q, p, backward):
    if not backward:
        return losses._kl_forward_kernel, dict(inputs=[q, p], output_shapes=[q.shape[:-1]])
    return losses._kl_backward_kernel, dict(inputs=[q, p, mx.ones(q.shape[:-1])], output_shapes=[q.shape])


@pytest.mark.parametrize("order", ["forward", "reverse", "random"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_race_in_the_kl_loss(backward, order):
    losses = load("tuner/losses.py", utils={"can_run_metal": lambda: True})
    mx.random.seed(3)
    q, p = normal(2, 5000, scale=3), normal(2, 5000, scale=3)
    kernel, call = kl(losses, q, p, backward)
    call.update(
        output_dtypes=[mx.float32],
        template=[("T", mx.float32), ("V", 5000)],
        grid=(1024, 2, 1),
        threadgroup=(1024, 1, 1),
    )
    with mslemu.settings(order=order), pytest.raises(mslemu.MslError) as found:
        kernel(**call)
    assert found.value.kinds <= {"race-threadgroup", "race-simdgroup"} and "race-threadgroup" in found.value.kinds
    pairs = {
        frozenset((f.source.strip(), found.value.text.splitlines()[f.other_line - 1].strip()))
        for f in found.value.findings
    }
    assert (
        frozenset(("max_q = shared[simd_lane_id * 2 + 0];", "shared[simd_group_id * 2 + 0] = sum_exp_q;")) in pairs
    )

    # One more barrier, between reading the maxima and writing the sums, and no mem_none: clean and right.
    maxima = "max_p = shared[simd_lane_id * 2 + 1];"
    assert kernel.source.count(maxima) == 1
    kernel.source = kernel.source.replace(maxima, maxima + BARRIER).replace(
        "mem_flags::mem_none", "mem_flags::mem_threadgroup"
    )
    with mslemu.settings(order=order):
        got = np.array(kernel(**call)[0], dtype=np.float64)
    q64, p64 = (np.array(x, dtype=np.float64) for x in (q, p))
    logq, logp = (
        x - x.max(1, keepdims=True) - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True))
        for x in (q64, p64)
    )
    want = np.exp(logq) - np.exp(logp) if backward else (np.exp(logp) * (logp - logq)).sum(1)
    assert np.abs(got - want).max() < 2e-5
