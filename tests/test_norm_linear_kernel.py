"""The linear layer of one row: its Metal text, run by the emulator (tests/mslemu): right numbers, no finding, lint clean."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.kernels import norm_linear as nl
from mlx_cosyh3.kernels._trust import BOUND
from tests import mslemu

if mslemu.missing():
    pytest.skip(f"the Metal emulator needs {mslemu.missing()}", allow_module_level=True)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
SIZES = [1, 31, 32, 33, 63, 64, 65, 255, 257, 896, 1000, 4864, 6761]
WIDTHS = [4, 132, *(n for n in SIZES if n % 4 == 0)]  # K is compiled in, and K % 4 must be 0
ENDS = [(1, False, True), (0, True, True), (0, False, False), (2, False, True), (2, True, False)]  # act, residual, bias
NORMS = [None, "layer", "rms"]
KERNELS = {norm: mslemu.metal_kernel(**kernel.metal_arguments()) for norm, kernel in nl.KERNELS.items()}


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


def norm64(x, norm):
    x, weight = numbers(x), numbers(norm[0])
    if norm[1] is None:
        return x / np.sqrt((x * x).mean() + norm[2]) * weight
    return (x - x.mean()) / np.sqrt(x.var() + norm[2]) * weight + numbers(norm[1])


def int8_widths(dtype):
    """Int8 weights come with float32 elsewhere: `-q int8` writes nothing else."""
    return (4, 132, 1000, 4864) if dtype == mx.float32 else (132,)


def variant(dtype, K, end, norm, int8=False, many=False):
    act, add, bias = end
    rows = 4 if many else 2 if act == 2 else 1
    return nl.Variant(dtype, K, rows, act, add, bias, norm, int8)


def rotary(dtype, K, norm, half, turned, bias=True, int8=False):
    return nl.Variant(dtype, K, 2, 3, False, bias, norm, int8, half, 2 * half * turned)


def linear_call(v, N, seed=1):
    """(kernel, its arguments, the truth)"""
    args, options = nl.case(v, N, seed)
    x, W, bias, scale = args
    assert nl.variant_of(*args, *(options.get(n) for n in ("norm", "residual", "activation", "heads"))) == v
    y = numbers(W) @ (norm64(x, options["norm"]) if options["norm"] else numbers(x))
    y = y if scale is None else y * numbers(scale)
    y = y if bias is None else y + numbers(bias)
    if options["activation"] == "gelu_tanh":
        y = y / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (y + 0.044715 * y**3)))
    if options["activation"] == "silu_gate":
        y = y[:N] / (1 + np.exp(-y[:N])) * y[N:]
    if options["activation"] == "rotary":
        head, (cosines, sines) = y.reshape(-1, 2, v.half), numbers(options["turn"]).reshape(2, -1)
        a, b = head[:, 0].copy(), head[:, 1].copy()
        turned = np.arange(len(head))[:, None] < v.turned // (2 * v.half)
        head[:, 0], head[:, 1] = np.where(turned, a * cosines - b * sines, a), np.where(turned, b * cosines + a * sines, b)
    y = y if options["residual"] is None else y + numbers(options["residual"])
    return KERNELS[v.norm], nl.arguments(v, *args, options["norm"], options["residual"], options.get("turn")), y


def linear_error(v, N, seed=1, schedules=None):
    kernel, arguments, want = linear_call(v, N, seed)
    return error(run(kernel, arguments, schedules)[0], want, BOUND[v.dtype])


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_widths(dtype, int8, norm):
    """Every width in all schedules, with one or another end; some with int8 weights."""
    for i, K in enumerate(int8_widths(dtype) if int8 else WIDTHS):
        assert linear_error(variant(dtype, K, ENDS[i % 5], norm, int8), 33, schedules=mslemu.SCHEDULES) < 1, K


@pytest.mark.parametrize("dtype, int8", [*((d, False) for d in DTYPES), (mx.float32, True)], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_outputs(dtype, int8, norm):
    """Every number of outputs: up to 65 with every end in all schedules; beyond one end, one schedule."""
    for i, N in enumerate(SIZES):
        schedules = mslemu.SCHEDULES if N < 66 else mslemu.SCHEDULES[(i + dtype.size) % 3 :][:1]
        for end in ENDS if N < 66 else ENDS[i % 5 :][:1]:
            assert linear_error(variant(dtype, 12, end, norm, int8), N, schedules=schedules) < 1, N


@pytest.mark.parametrize("dtype, int8, schedule", [
    *((d, False, s) for d, s in zip(DTYPES, mslemu.SCHEDULES)), (mx.float32, True, mslemu.SCHEDULES[1]),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("end", [(0, False, False), (2, True, True)], ids=["plain", "gate"])
def test_many_outputs(dtype, int8, schedule, end):
    """Several outputs a simdgroup, the last threadgroup and the last simdgroup cut."""
    N = 16384 + 13 if end[0] == 0 else 8192 + 13  # a gate has two rows of W for each
    assert linear_error(variant(dtype, 8, end, "layer", int8, many=True), N, schedules=[schedule]) < 1


@pytest.mark.parametrize("dtype, int8", [*((d, False) for d in DTYPES), (mx.float32, True)], ids=str)
@pytest.mark.parametrize("half, heads, turned", [(1, 1, 1), (1, 5, 3), (4, 2, 0), (32, 4, 3), (33, 2, 2)])
def test_rotary(dtype, int8, half, heads, turned):
    """Heads of q and k are turned, those of v are not; pairs of one head in two threadgroups."""
    v = rotary(dtype, 36, NORMS[half % 3], half, turned, heads > 1, int8)
    assert linear_error(v, 2 * half * heads, schedules=mslemu.SCHEDULES) < 1


@pytest.mark.parametrize("schedule", mslemu.SWEEP, ids=lambda s: "-".join(map(str, s.values())))
def test_all_schedules(schedule):
    with mslemu.settings(**schedule):
        for dtype, int8 in ((mx.float16, False), (mx.float32, True)):
            for norm in NORMS:
                assert linear_error(variant(dtype, 132, (1, True, True), norm, int8), 33) < 1
            assert linear_error(variant(dtype, 132, (2, True, True), "rms", int8), 33) < 1
            assert linear_error(rotary(dtype, 132, "rms", 16, 2, int8=int8), 96) < 1


@pytest.mark.skipif(mslemu.clang() is None, reason="no clang: the rules of address spaces are not checked")
@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_lint(dtype, int8, norm):
    for K, N in ((36, 9), (4, 1)):  # the second: arrays of fewer than 8 elements
        for act in (1, 2):
            kernel, arguments, _ = linear_call(variant(dtype, K, (act, True, True), norm, int8), N)
            assert mslemu.lint(kernel, **arguments) == []
        kernel, arguments, _ = linear_call(rotary(dtype, K, norm, 1, 1, int8=int8), 2)
        assert mslemu.lint(kernel, **arguments) == []


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
def test_fewer_than_eight_elements(int8):
    for dtype in DTYPES if not int8 else DTYPES[:1]:
        for norm in NORMS:
            for act in (1, 2):
                v = variant(dtype, 4, (act, True, True), norm, int8)
                assert linear_error(v, 1, schedules=mslemu.SCHEDULES) < 1
            assert linear_error(rotary(dtype, 4, norm, 1, 1, int8=int8), 2, schedules=mslemu.SCHEDULES) < 1


def test_texts_of_cuda_differ_by_template_alone():
    """MLX names a CUDA kernel by its template arguments: the types of all inputs must follow from those."""
    types = {}
    for dtype in DTYPES:
        for int8 in (False, True):
            for kernel, call, _ in (linear_call(variant(dtype, 12, end, n, int8), 9) for end in ENDS for n in NORMS):
                key = (kernel.name, *(f"{v}" for _, v in call["template"]))
                assert types.setdefault(key, [a.dtype for a in call["inputs"]]) == [a.dtype for a in call["inputs"]]


def test_what_the_kernels_leave_to_others():
    (x, W, bias, scale), options = nl.case(variant(mx.float32, 12, (0, False, True), None, True), 9)
    rest = None, None, None  # norm, residual, activation
    assert nl.variant_of(x, W, bias, scale, *rest).int8
    assert nl.variant_of(x, W, bias, None, *rest) is None
    assert nl.variant_of(x, W, bias, scale.astype(mx.float16), *rest) is None
    assert nl.variant_of(x, W, bias.astype(mx.float16), scale, *rest) is None
    assert nl.variant_of(mx.zeros(6), mx.zeros((3, 6)), None, None, *rest) is None  # 6 is no multiple of 4
    assert nl.variant_of(mx.zeros(8), mx.zeros((3, 8), dtype=mx.float16), None, None, *rest) is None
    for heads in (None, (3, 1), (4, 1)):  # none, odd, not all of W
        assert nl.variant_of(mx.zeros(8), mx.zeros((6, 8)), None, None, None, None, "rotary", heads) is None
    assert not nl.usable(mx.zeros(8), mx.zeros((3, 8)), stream=mx.cpu)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("act", [0, 1, 2])
@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
def test_reference(norm, act, int8):
    """The reference that self-tests trust, against float64."""
    for v in (variant(mx.float32, 40, (act, True, True), norm, int8), rotary(mx.float32, 40, norm, 3, 2, int8=int8)):
        args, options = nl.case(v, 24)
        assert error(numbers(nl.reference(*args, **options)), linear_call(v, 24, 8)[2], 1e-6) < 1
