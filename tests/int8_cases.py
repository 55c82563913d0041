"""What the tests of the INT8 kernels share: arrays, exact results, and the kernels on the emulator."""

import functools

import mlx.core as mx
import numpy as np

from mlx_cosyh3.kernels.int8_gemm import INT8_DEQUANTIZE, INT8_GEMM
from mlx_cosyh3.kernels.int8_gemv import INT8_GEMV, INT8_GEMV_INT8

from . import mslemu

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
HALF_ULP = {mx.float32: 2e-7, mx.float16: 2**-11, mx.bfloat16: 2**-8}
SIZES = [1, 31, 32, 33, 63, 64, 65, 255, 257, 896, 1000, 4864, 6761]
MOST_ROWS = 257  # of a GEMV: far more than it is used for
KERNELS = [INT8_GEMV, INT8_GEMV_INT8, INT8_GEMM, INT8_DEQUANTIZE]


@functools.cache
def emulated(kernel):
    return mslemu.metal_kernel(**kernel.metal_arguments())


def run(kernel, call, schedules=({},)):
    """The result of a call on the emulator, which raises for whatever Metal forbids; the same bits in all schedules."""
    results = []
    for settings in schedules:
        with mslemu.settings(**settings):
            results.append(emulated(kernel)(**call)[0])
    for y in results[1:]:
        assert np.array_equal(bits(y), bits(results[0]))
    return results[0]


def bits(y):
    return np.array(y.view(mx.uint16 if y.dtype.size == 2 else mx.uint32))


def numbers(a):
    return np.array(a.astype(mx.float32)).astype(np.float64)


@functools.cache
def data(rows, n, k, dtype=mx.float32):
    """x [rows, k] of `dtype`, weight int8 [n, k], scale and bias fp32 [n], times and residual [rows, n] of `dtype`."""
    r = np.random.default_rng((rows, n, k))
    normal = lambda *shape: mx.array(r.standard_normal(shape).astype(np.float32))  # noqa: E731
    weight = mx.array(r.integers(-128, 128, (n, k)).astype(np.int8))
    scale = mx.array(((0.5 + r.random(n)) / (74 * k**0.5)).astype(np.float32))
    return normal(rows, k).astype(dtype), weight, scale, normal(n), normal(rows, n).astype(dtype), normal(rows, n).astype(dtype)


def check(y, x, weight, scale, bias=None, activation=None, times=None, residual=None):
    """`y` against float64: the rounding of its dtype, and 2e-6 of the sum of the magnitudes for fp32 arithmetic."""
    x64, w64 = numbers(x), np.array(weight).astype(np.float64) * numbers(scale)[:, None]
    want, size = x64 @ w64.T, np.abs(x64) @ np.abs(w64.T)
    if bias is not None:
        want, size = want + numbers(bias), size + np.abs(numbers(bias))
    if activation == "gelu_tanh":
        want = want / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (want + 0.044715 * want**3)))
    elif activation == "silu":
        want = want / (1 + np.exp(-want))
    if times is not None:
        want, size = want * numbers(times), size * np.abs(numbers(times))
    if residual is not None:
        want, size = want + numbers(residual), size + np.abs(numbers(residual))
    assert y.dtype == x.dtype and y.shape == want.shape
    over = np.abs(numbers(y) - want) - 1.01 * HALF_ULP[x.dtype] * np.abs(want) - 2e-6 * size
    assert over.max() < 0, f"off by {over.max():.3g} more than allowed"


def exact(x, weight, x_scale, scale, bias):
    """numpy: every operation in fp32, rounded once, after an integer sum."""
    total = (np.array(x).astype(np.int64) @ np.array(weight).T.astype(np.int64)).astype(np.float32)
    y = total * np.array(x_scale)[:, None] * np.array(scale)
    return y if bias is None else y + np.array(bias)


def integers(rows, n, k, worst=False):
    r = np.random.default_rng((rows, n, k))
    x, w = (r.integers(-128, 128, (m, k)).astype(np.int8) for m in (rows, n))
    if worst:
        x[0], w[0], x[-1], w[-1] = 127, 127, -128, -128
    # Scales that give products with all their bits, and a bias of their size that an fma would round otherwise.
    x_scale, scale, bias = (mx.array((0.5 + r.random(m)).astype(np.float32)) for m in (rows, n, n))
    return mx.array(x), mx.array(w), x_scale, scale, (bias - 1) * 3000


def same(kernel_result, *args):
    assert np.array_equal(bits(kernel_result), exact(*args).view(np.uint32))
