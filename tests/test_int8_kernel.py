"""The INT8 kernels: their Metal text on the emulator against numpy in float64.

Run: MLX_DISABLE_COMPILE=1 python -m pytest -q tests/test_int8_kernel.py
"""

import sys

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.kernels.int8_gemm import INT8_DEQUANTIZE, INT8_GEMM, dequantize, gemm
from mlx_cosyh3.kernels.int8_gemv import INT8_GEMV, INT8_GEMV_INT8, cuda_shape, gemv, gemv_int8, metal_shape, slice_rows
from mlx_cosyh3.kernels.int8_mma import INT8_MMA, mma, mma_shape
from tests.int8_cases import DTYPES, KERNELS, MOST_ROWS, SIZES, bits, check, data, emulated, exact, integers, run, same

from . import mslemu

if mslemu.missing():
    pytest.skip(f"Metal emulator: {mslemu.missing()}", allow_module_level=True)

module = sys.modules["mlx_cosyh3.kernels.int8_matmul"]  # the package has a function of that name

# The GEMV of float x


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemv_sizes(dtype):
    """Every size as K, as N (whole and broken steps of K) and as rows, in all schedules."""
    shapes = [(3, 9, k) for k in SIZES] + [(3, n, 8 + n % 2) for n in SIZES] + [(m, 3, 8) for m in SIZES if m <= MOST_ROWS]
    for rows, n, k in shapes:
        x, w, s, b, *_ = data(rows, n, k, dtype)
        m = min(3, rows) if rows <= 3 else 8
        check(run(INT8_GEMV, gemv(x, w, s, b, (m, 2, 1)), mslemu.SCHEDULES), x, w, s, b)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 11, 20])
def test_gemv_rows(rows):
    """Every number of rows of a slice, and rows in slices, the last one broken."""
    x, w, s, b, *_ = data(rows, 33, 68)
    m = slice_rows(rows)
    assert m <= 8 and (rows <= 8) == (m == rows)
    check(run(INT8_GEMV, gemv(x, w, s, b, (m, 4, 1))), x, w, s, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 2, 4), (8, 4, 2)])
def test_gemv_of_shared_outputs_in_all_schedules(shape, dtype):
    for n, k in ((33, 65), (33, 260)):
        x, w, s, b, times, residual = data(shape[0], n, k, dtype)
        for schedules in (mslemu.SWEEP[:3], mslemu.SWEEP[3:]):  # contracted or not: other bits, both within the bound
            check(run(INT8_GEMV, gemv(x, w, s, b, shape, "silu", times, residual), schedules), x, w, s, b, "silu", times, residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemv_of_models(dtype):
    """The shapes that the dispatcher takes on a Mac for the widths of real layers."""
    for n, k in ((65, 4864), (1024, 256), (2048, 64)):
        x, w, s, b, *_ = data(1, n, k, dtype)
        with mslemu.settings(check="full" if n == 65 else "fast"):
            check(emulated(INT8_GEMV)(**gemv(x, w, s, None, metal_shape(1, n, k)))[0], x, w, s)


@pytest.mark.parametrize("kernel", [INT8_GEMV, INT8_GEMM])
@pytest.mark.parametrize("activation", [None, "gelu_tanh", "silu"])
@pytest.mark.parametrize("extras", ["", "b", "t", "r", "btr"])
def test_epilogues(kernel, activation, extras):
    x, w, s, b, times, residual = data(2, 33, 36)
    bias, times, residual = (a if letter in extras else None for letter, a in (("b", b), ("t", times), ("r", residual)))
    with mslemu.settings(noise=True):
        if kernel is INT8_GEMV:
            y = run(kernel, gemv(x, w, s, bias, (2, 2, 1), activation, times, residual))
        else:
            y = run(kernel, gemm(x, w, s, bias, mx.float32, activation, times, residual))
    check(y, x, w, s, bias, activation, times, residual)


def test_activations_of_extreme_sums():
    """No NaN where exp overflows; an infinity of x comes through; a NaN stays in its row."""
    w = mx.array(np.eye(8, dtype=np.int8))
    x = mx.array([[1e4, -1e4, 1e30, -1e30, 88.0, -88.0, 0.0, 20.0], [mx.inf] * 8, [mx.nan] + [1.0] * 7], dtype=mx.float32)
    for activation in ("gelu_tanh", "silu"):
        y = np.array(run(INT8_GEMV, gemv(x, w, mx.ones(8), None, (3, 2, 1), activation)))
        assert np.allclose(y[0], np.maximum(np.array(x[0]), 0), atol=1e-5) and not np.isnan(y[0]).any()
        assert np.isnan(y[1:]).all()  # inf * 0 and NaN


def test_each_byte_of_the_weight_is_read_once():
    x, w, s, b, *_ = data(4, 64, 260)
    run(INT8_GEMV, gemv(x, w, s, b, (4, 4, 1)))
    assert emulated(INT8_GEMV).report.buffers["weight"].read == w.size


@pytest.mark.parametrize("dtype", DTYPES)
def test_few_elements(dtype):
    """Metal passes arrays of fewer than 8 elements in another address space."""
    for rows, n, k in ((1, 1, 8), (1, 2, 4), (1, 5, 7), (3, 9, 1), (1, 8, 1), (2, 3, 3)):
        x, w, s, b, times, residual = data(rows, n, k, dtype)
        tile = mx.float16 if dtype == mx.float16 else mx.float32
        y = run(INT8_GEMV, gemv(x, w, s, b, (rows, 2, 1), None, times, residual), mslemu.SCHEDULES)
        check(y, x, w, s, b, None, times, residual)
        check(run(INT8_GEMM, gemm(x, w, s, b, tile), mslemu.SCHEDULES), x, w, s, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs(dtype):
    x, w, s, b, times, residual = data(3, 33, 65, dtype)
    tile = mx.float16 if dtype == mx.float16 else mx.float32
    turn = lambda a: mx.contiguous(mx.swapaxes(a, 0, 1)).swapaxes(0, 1)  # noqa: E731  (the same values, columns first)
    every = lambda a: mx.stack([a, a], axis=-1).reshape(*a.shape[:-1], -1)[..., ::2]  # noqa: E731
    y = run(INT8_GEMV, gemv(x, w, s, b, (3, 2, 1), None, times, residual))
    call = gemv(every(x), turn(w), every(s), every(b), (3, 2, 1), None, turn(times), every(residual))
    assert np.array_equal(bits(y), bits(run(INT8_GEMV, call, mslemu.SCHEDULES)))
    y = run(INT8_GEMM, gemm(x, w, s, b, tile))
    assert np.array_equal(bits(y), bits(run(INT8_GEMM, gemm(turn(x), every(w), s, b, tile), mslemu.SCHEDULES)))
    y = run(INT8_DEQUANTIZE, dequantize(w, s, dtype))
    assert np.array_equal(bits(y), bits(run(INT8_DEQUANTIZE, dequantize(turn(w), every(s), dtype), mslemu.SCHEDULES)))


# The tiled product and the dequantised weight


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_sizes(dtype):
    """Every size as K, as N and as rows, in all schedules."""
    tile = mx.float16 if dtype == mx.float16 else mx.float32
    shapes = [(9, 3, k) for k in SIZES] + [(3, n, 8) for n in SIZES] + [(m, 3, 8) for m in SIZES] + [(33, 33, 896), (65, 33, 36)]
    for rows, n, k in shapes:
        x, w, s, b, *_ = data(rows, n, k, dtype)
        check(run(INT8_GEMM, gemm(x, w, s, b, tile), mslemu.SCHEDULES), x, w, s, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemm_in_all_schedules(dtype):
    x, w, s, b, times, residual = data(35, 37, 68, dtype)
    call = gemm(x, w, s, b, mx.float16 if dtype == mx.float16 else mx.float32, "gelu_tanh", times, residual)
    for schedules in (mslemu.SWEEP[:3], mslemu.SWEEP[3:]):
        check(run(INT8_GEMM, call, schedules), x, w, s, b, "gelu_tanh", times, residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize(dtype):
    for n, k in [(9, k) for k in SIZES] + [(n, 9) for n in SIZES]:
        _, w, s, *_ = data(1, n, k)
        y = run(INT8_DEQUANTIZE, dequantize(w, s, dtype), mslemu.SCHEDULES)
        assert np.array_equal(bits(y), bits((w.astype(mx.float32) * s[:, None]).astype(dtype)))


# int8 x int8


def test_int8_by_int8_sizes():
    """Every size as K, as N and as rows, in all schedules."""
    shapes = [(8, 9, k) for k in SIZES] + [(3, n, 8 + n % 2) for n in SIZES] + [(m, 3, 8) for m in SIZES if m <= MOST_ROWS]
    for rows, n, k in shapes:
        x, w, xs, s, b = integers(rows, n, k)
        m = min(3, rows) if rows <= 3 else 8
        same(run(INT8_GEMV_INT8, gemv_int8(x, xs, w, s, b, (m, 2, 1)), mslemu.SCHEDULES), x, w, xs, s, b)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 8, 11, 20])
def test_int8_by_int8_rows(rows):
    x, w, xs, s, b = integers(rows, 33, 68)
    same(run(INT8_GEMV_INT8, gemv_int8(x, xs, w, s, None, (slice_rows(rows), 4, 1))), x, w, xs, s, None)


@pytest.mark.parametrize("k", [1041, 4864, 8192, 8191])
def test_int8_by_int8_at_its_worst(k):
    """All 127 and all -128: far beyond 2^24, where fp32 sums are not exact any more."""
    x, w, xs, s, b = integers(3, 9, k, worst=True)
    same(run(INT8_GEMV_INT8, gemv_int8(x, xs, w, s, b, (3, 2, 4)), mslemu.SWEEP[::2]), x, w, xs, s, b)


def test_int8_by_int8_is_never_contracted():
    """Where the compiler may fuse a * b + c the bits stay; without the guard of the kernel they would not."""
    x, w, xs, s, b = integers(8, 65, 68)
    call = gemv_int8(x, xs, w, s, b, (8, 4, 1))
    same(run(INT8_GEMV_INT8, call, mslemu.SWEEP), x, w, xs, s, b)
    arguments = INT8_GEMV_INT8.metal_arguments()
    guard = "y = as_type<float>(as_type<uint>(y) ^ uint(weight_ndim - 2));"
    assert guard in arguments["source"]
    arguments["source"] = arguments["source"].replace(guard, "")
    with mslemu.settings(contract="fast"):
        assert not np.array_equal(bits(mslemu.metal_kernel(**arguments)(**call)[0]), exact(x, w, xs, s, b).view(np.uint32))


def test_int8_by_int8_strided():
    x, w, xs, s, b = integers(3, 33, 64)
    every = lambda a: mx.stack([a, a], axis=-1).reshape(*a.shape[:-1], -1)[..., ::2]  # noqa: E731
    same(run(INT8_GEMV_INT8, gemv_int8(every(x), every(xs), every(w), every(s), every(b), (3, 2, 1))), x, w, xs, s, b)


# The text


def calls():
    """A call of every variant: dtypes, with and without all that is optional, ordinary and tiny arrays."""
    for dtype in DTYPES:
        tile = mx.float16 if dtype == mx.float16 else mx.float32
        for n, k in ((33, 36), (2, 4)):
            x, w, s, b, times, residual = data(1, n, k, dtype)
            yield INT8_GEMV, gemv(x, w, s, b, (1, 2, 1), "gelu_tanh", times, residual)
            yield INT8_GEMV, gemv(x, w, s, None, (1, 1, 8))
            yield INT8_GEMM, gemm(x, w, s, b, tile, "silu", times, residual)
            yield INT8_DEQUANTIZE, dequantize(w, s, dtype)
    for n, k in ((33, 36), (1, 8)):
        x, w, xs, s, b = integers(1, n, k)
        yield INT8_GEMV_INT8, gemv_int8(x, xs, w, s, b, (1, 2, 4))


@pytest.mark.skipif(mslemu.clang() is None, reason="no clang: the rules of address spaces are not checked")
def test_lint():
    for kernel, call in calls():
        found = mslemu.lint(emulated(kernel), **call)
        assert not found, "\n".join(map(str, found))


def test_names_are_distinct():
    assert len({k.name for k in [*KERNELS, INT8_MMA]}) == len(KERNELS) + 1


def test_texts_of_cuda_differ_by_template_alone():
    """MLX names a CUDA kernel by its template arguments: the types of all inputs must follow from those."""
    types = {}
    x, w, s, b, times, residual = data(2, 33, 36, mx.bfloat16)
    for kernel, call in [*calls(), (INT8_MMA, mma(x, w, s, b, (1, 2), None, times)), (INT8_MMA, mma(x, w, s, None, (1, 2), None, x))]:
        key = (kernel.name, *(f"{v}" for _, v in call["template"]))
        assert types.setdefault(key, [a.dtype for a in call["inputs"]]) == [a.dtype for a in call["inputs"]]


# The dispatcher


def test_shapes_cover_what_is_asked():
    for n in (1, 8, 896, 2048, 4864, 8192, 50264, 151936):
        for k in (1, 33, 768, 896, 2048, 4864, 8192):
            for rows in (1, 2, 8, 9, 16, 31):
                for m, r, s in (metal_shape(rows, n, k), cuda_shape(rows, n, k)):
                    assert m * r <= 32 and s in (1, 2, 4, 8) and -(-rows // m) == -(-rows // 8)
                tiles, s = mma_shape(rows, n, k)
                assert tiles <= 4 and s in (2, 4, 8) and 8 * tiles * -(-rows // 32) >= rows
