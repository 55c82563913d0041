"""The fused mixer's Metal text, run by the emulator (tests/mslemu): right numbers, no finding, lint clean."""

import functools

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.kernels import h3_layer as hl
from mlx_cosyh3.kernels._trust import BOUND
from tests import mslemu
from tests.test_kernels import step64

if mslemu.missing():
    pytest.skip(f"the Metal emulator needs {mslemu.missing()}", allow_module_level=True)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
SIZES = [1, 31, 32, 33, 63, 64, 65, 255, 257, 896, 1000, 4864, 6761]
WIDTHS = [4, 132, *(n for n in SIZES if n % 4 == 0)]  # K is compiled in, and K % 4 must be 0
MIXER = mslemu.metal_kernel(**hl.MIXER_KERNEL.metal_arguments())


def numbers(a):
    return np.array(a.astype(mx.float32)).astype(np.float64)


def run(kernel, arguments, schedules):
    """The outputs as numpy float64, the same in all `schedules` (or in the one that is set)."""
    results = []
    for schedule in schedules or [{}]:
        with mslemu.settings(**schedule):
            results.append([numbers(a) for a in kernel(**arguments)])
    for other in results[1:]:
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(results[0], other))
    return results[0]


def error(got, want, bound):
    return np.abs(got - want).max() / (bound * max(1.0, np.abs(want).max()))


def norm64(x, layer_norm):
    x, (weight, bias) = numbers(x), map(numbers, layer_norm[:2])
    return (x - x.mean()) / np.sqrt(x.var() + layer_norm[2]) * weight + bias


def int8_widths(dtype):
    """Int8 weights come with float32 elsewhere: `-q int8` writes nothing else."""
    return (4, 132, 1000, 4864) if dtype == mx.float32 else (132,)


@functools.cache
def wide_case(K, channels):
    """A mixer of which only the first `channels` are to be computed, and have weights."""
    x, norm, projections, s, S, p = hl._mixer_case((mx.float32, K, 2, 1))
    return x, norm, [W[:channels] if W.ndim > 1 else W for W in projections], s, S, p


def cast(case, dtype, int8):
    x, (w, b, eps), projections, *rest = case
    projections, scales = [a.astype(dtype) for a in projections], []
    for i in (0, 2, 4) if int8 else ():
        projections[i], scale = hl.to_int8(projections[i])
        scales.append(scale)
    return x.astype(dtype), (w.astype(dtype), b.astype(dtype), eps), projections + scales, *rest


def mixer_error(variant, seed=1, schedules=None, groups=None):
    """Over what is allowed, against float64. groups: so many threadgroups run, and their channels count."""
    dtype, K, taps, modes, int8 = hl._Mixer(*variant)
    n = groups * hl.SIMDGROUPS if groups else K
    args = cast(wide_case(K, n), dtype, int8) if groups else hl._mixer_case(variant, seed)
    x, norm, projections, s, S, p = args
    arguments = hl._mixer_arguments(*args)
    arguments["grid"] = (n + -n % hl.SIMDGROUPS) * 32, 1, 1
    with mslemu.settings(allow={"unwritten-output": ""} if groups else {}):
        got = run(MIXER, arguments, schedules)
    h, scales = norm64(x, norm), [numbers(a)[:n] for a in projections[6:]] or [1.0] * 3
    q, k, v = (numbers(W) @ h * t + numbers(b)[:n] for W, b, t in zip(projections[:6:2], projections[1:6:2], scales))
    p = {name: numbers(a)[:n] for name, a in p._asdict().items()}
    p |= {name: p[name][..., 0] + 1j * p[name][..., 1] for name in ("dA", "dB", "C")}
    s, S = numbers(s)[:, :n], numbers(S)[:, :n]
    y, s, S = step64(q[None], k[None], v[None], s, S[..., 0] + 1j * S[..., 1], p)
    want = y[0], s, np.stack([S.real, S.imag], axis=-1)
    got = got[0][:n], got[1][:, :n], got[2][:, :n]
    return max(error(*three) for three in zip(got, want, (2 * BOUND[dtype], 1e-3, 1e-3)))


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", WIDTHS)
def test_mixer(K, dtype, int8):
    """Every width in all schedules; some with int8 weights, and one of those in half precision."""
    if int8 and K not in int8_widths(dtype):
        return
    assert mixer_error((dtype, K, 2, 1, int8), schedules=mslemu.SCHEDULES, groups=2 if K > 800 else None) < 1


@pytest.mark.parametrize("taps, modes", [(1, 1), (4, 2)])
def test_mixer_other_state_sizes(taps, modes):
    assert mixer_error((mx.float32, 20, taps, modes), schedules=mslemu.SCHEDULES) < 1


@pytest.mark.parametrize("schedule", mslemu.SWEEP, ids=lambda s: "-".join(map(str, s.values())))
def test_all_schedules(schedule):
    with mslemu.settings(**schedule):
        assert mixer_error((mx.float16, 36, 2, 1)) < 1
        assert mixer_error((mx.float32, 36, 2, 1, True)) < 1


@pytest.mark.skipif(mslemu.clang() is None, reason="no clang: the rules of address spaces are not checked")
@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lint(dtype, int8):
    for K in (36, 4):  # the second: arrays of fewer than 8 elements
        assert mslemu.lint(MIXER, **hl._mixer_arguments(*hl._mixer_case((dtype, K, 2, 1, int8)))) == []


def test_texts_of_cuda_differ_by_template_alone():
    """MLX names a CUDA kernel by its template arguments: the types of all inputs must follow from those."""
    types = {}
    for dtype in DTYPES:
        for int8 in (False, True):
            call = hl._mixer_arguments(*hl._mixer_case((dtype, 12, 2, 1, int8)))
            key = tuple(f"{v}" for _, v in call["template"])
            assert types.setdefault(key, [a.dtype for a in call["inputs"]]) == [a.dtype for a in call["inputs"]]


def test_what_the_kernels_leave_to_others():
    x, norm, projections, s, S, p = hl._mixer_case((mx.float32, 12, 2, 1))
    assert hl._mixer_variant(x, norm, projections, p) is not None
    assert hl._mixer_variant(x.astype(mx.float16), norm, projections, p) is None
    assert not hl.mixer_usable(x, norm, projections, p, stream=mx.cpu)
    assert hl._mixer_variant(x, norm, (*projections, s, s, s), p) is None  # scales without int8
    x, norm, projections, s, S, p = hl._mixer_case((mx.float32, 12, 2, 1, True))
    assert hl._mixer_variant(x, norm, projections, p).int8
    assert hl._mixer_variant(x, norm, projections[:6], p) is None  # no scales
