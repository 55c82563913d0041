"""The INT8 kernels: their Metal text on the emulator against numpy in float64, and the choice between them.

Run: MLX_DISABLE_COMPILE=1 python -m pytest -q tests/test_int8_kernel.py
"""

import functools
import sys

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.kernels import _dispatch, _trust, int8_matmul, use_kernels
from mlx_cosyh3.kernels.int8_gemm import INT8_DEQUANTIZE, INT8_GEMM, dequantize, gemm
from mlx_cosyh3.kernels.int8_gemv import INT8_GEMV, INT8_GEMV_INT8, cuda_shape, gemv, gemv_int8, metal_shape, slice_rows
from mlx_cosyh3.kernels.int8_mma import INT8_MMA, mma, mma_shape

from . import mslemu

if mslemu.missing():
    pytest.skip(f"Metal emulator: {mslemu.missing()}", allow_module_level=True)

module = sys.modules["mlx_cosyh3.kernels.int8_matmul"]  # the package has a function of that name
int8_linear = module.int8_linear

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


@pytest.fixture
def on_a_mac(monkeypatch, tmp_path):
    """The dispatcher believes in a Metal GPU, and the kernels run on the emulator."""
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(tmp_path))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(_dispatch, "on_gpu", lambda stream=None: True)
    monkeypatch.setattr(_dispatch, "_environment", None)
    monkeypatch.delenv(_dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(_trust, "_passed", {})
    monkeypatch.setattr(_trust, "_outcomes", [])
    monkeypatch.setattr(module, "_plans", {})
    for kernel in KERNELS:
        monkeypatch.setattr(kernel, "_made", emulated(kernel))


def used_by(function):
    with _dispatch.watch() as used:
        y = function()
    return y, {kernel for _, kernel, _ in used}


@pytest.mark.parametrize("rows, kernel", [((), INT8_GEMV), ((1, 1), INT8_GEMV), ((2, 4), INT8_GEMV), ((3, 3), INT8_GEMM), ((600,), INT8_DEQUANTIZE)])
def test_the_way_follows_the_rows(on_a_mac, rows, kernel):
    count = int(np.prod(rows))
    x, w, s, b, times, residual = data(count, 33, 36, mx.bfloat16)
    shaped = [a.reshape(*rows, -1) for a in (x, times, residual)]
    b = b.astype(mx.bfloat16)  # a bias of another dtype is converted
    y, used = used_by(lambda: int8_matmul(shaped[0], w, s, b))
    assert used == {kernel.name} and y.shape == (*rows, 33)
    z = int8_linear(shaped[0], w, s, b, activation="gelu_tanh", times=shaped[1], residual=shaped[2])
    if kernel is not INT8_DEQUANTIZE:
        check(y.reshape(count, 33), x, w, s, b)
        check(z.reshape(count, 33), x, w, s, b, "gelu_tanh", times, residual)
    want = module.linear_reference(shaped[0], w, s, b, activation="gelu_tanh", times=shaped[1], residual=shaped[2])
    assert z.shape == want.shape and np.abs(numbers(z) - numbers(want)).max() < 2**-6 * np.abs(numbers(want)).max()
    assert all(o.passed and not o.stamped for o in _trust.outcomes())


def test_int8_by_int8_takes_its_kernel(on_a_mac):
    x, w, xs, s, b = integers(6, 33, 68)
    y, used = used_by(lambda: int8_matmul(x.reshape(2, 3, 68), w, s, b, x_scale=xs.reshape(2, 3)))
    assert used == {INT8_GEMV_INT8.name} and y.shape == (2, 3, 33)
    same(y.reshape(6, 33), x, w, xs, s, b)
    many = integers(40, 9, 68)
    y, used = used_by(lambda: int8_matmul(many[0], many[1], many[3], many[4], x_scale=many[2]))
    assert not used
    same(y, *many)


def test_the_reference_runs_where_the_kernels_do_not(on_a_mac):
    x, w, s, b, *_ = data(1, 33, 36)
    with use_kernels("0"):
        y, used = used_by(lambda: int8_matmul(x, w, s, b))
    assert not used
    check(y, x, w, s, b)
    tiny = data(1, 2, 3)
    y, used = used_by(lambda: int8_matmul(*tiny[:4]))
    assert not used
    check(y, *tiny[:4])
    y, used = used_by(lambda: int8_matmul(mx.zeros((0, 36)), w, s, b))
    assert not used and y.shape == (0, 33)
    y, used = used_by(lambda: int8_matmul(mx.zeros((2, 0)), mx.zeros((9, 0), dtype=mx.int8), mx.ones(9), mx.ones(9)))
    assert not used and np.all(np.array(y) == 1)


@pytest.mark.parametrize("kernel", [INT8_GEMV, INT8_GEMV_INT8])
def test_a_wrong_kernel_is_switched_off(on_a_mac, monkeypatch, kernel):
    """A kernel that forgets the last element of a row fails its self-test; the results stay right."""
    arguments = kernel.metal_arguments()
    wrong = arguments["source"].replace("k < K; k += 32 * S", "k < K - 1; k += 32 * S")
    assert wrong != arguments["source"]
    monkeypatch.setattr(kernel, "_made", mslemu.metal_kernel(**{**arguments, "source": wrong}))
    with pytest.warns(RuntimeWarning, match=kernel.name):
        if kernel is INT8_GEMV:
            x, w, s, b, *_ = data(1, 33, 36)
            check(int8_matmul(x, w, s, b), x, w, s, b)
        else:
            x, w, xs, s, b = integers(1, 33, 68)
            same(int8_matmul(x, w, s, b, x_scale=xs), x, w, xs, s, b)
    assert not _trust.outcomes()[-1].passed


def stand_in(inputs, template, **_call):
    """Computes what a kernel of float x would on CUDA."""
    t = dict(template)
    if len(inputs) == 2:
        return [(inputs[0].astype(mx.float32) * inputs[1][:, None]).astype(t["T"])]
    x, w, s, *more = inputs
    bias, times, residual = (a if t[has] else None for a, has in zip(more, ("BIAS", "TIMES", "RESIDUAL")))
    return [module.linear_reference(x, w, s, bias, activation=(None, "gelu_tanh", "silu")[t["ACT"]], times=times, residual=residual)]


@pytest.mark.parametrize("dtype, rows, name", [
    (mx.float16, 1, "int8_gemv"), (mx.float16, 2, "int8_mma"), (mx.bfloat16, 16, "int8_mma"), (mx.float32, 8, "int8_gemv"),
    (mx.bfloat16, 65, "int8_dequantize"), (mx.float32, 17, "int8_dequantize"),
])  # fmt: skip
def test_the_way_on_cuda(on_a_mac, monkeypatch, dtype, rows, name):
    """The choice alone: other kernels take their place here, for none of CUDA's can run."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    for kernel in (INT8_GEMV, INT8_MMA, INT8_DEQUANTIZE):
        monkeypatch.setattr(kernel, "_made", stand_in)
    x, w, s, b, times, residual = data(rows, 33, 36, dtype)
    y, used = used_by(lambda: int8_linear(x, w, s, b, activation="silu", times=times, residual=residual))
    assert used == {name}
    want = module.linear_reference(x, w, s, b, activation="silu", times=times, residual=residual)
    assert np.abs(numbers(y) - numbers(want)).max() < 2**-6 * np.abs(numbers(want)).max()


def test_the_table_decides(on_a_mac, monkeypatch):
    """Rows and K choose; the call may say otherwise; the affine copy counts where nothing but a bias follows."""
    table = [(1, 36, "gemv"), (2, 64, "gemm"), (8, module.ANY, "affine"), (4, module.ANY, "gemm")]
    monkeypatch.setitem(module.BREAK_EVEN["metal"], "float32", table)
    took = []
    monkeypatch.setattr(module, "_run", lambda way, *a: took.append(way) or mx.zeros((a[1].shape[0], a[2].shape[0])))
    monkeypatch.setattr(module, "_affine", lambda *a: took.append("affine"))
    monkeypatch.setattr(_dispatch, "usable", lambda *a: True)

    def way(rows, k, function=int8_matmul, **how):
        took.clear()
        function(*data(rows, 33, k)[:4], **how)
        return took[0]

    copy = module.repack(*data(1, 33, 64)[1:3], mx.float32)
    assert way(1, 36) == "gemv" and way(1, 64) == way(2, 36) == "gemm" and way(2, 65) == "gemm" and way(5, 65) == "dequantize"
    assert way(1, 64, affine=copy) == "gemm" and way(3, 64, affine=copy) == "affine" == way(8, 64, affine=copy)
    assert way(3, 64, int8_linear, affine=copy, activation="silu") == "gemm" and way(3, 64) == "gemm"
    assert way(3, 64, affine=module.repack(*data(1, 33, 64)[1:3], mx.bfloat16)) == "gemm"  # of another dtype
    assert way(1, 36, way="dequantize") == "dequantize" and way(1, 64, affine=copy, way="affine") == "affine"
    for platform in module.BREAK_EVEN.values():
        assert set(platform) == {"float32", "half", "int8"}
        assert all(w in ("affine", *module.WAYS) for entries in platform.values() for _, _, w in entries)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_affine_copy(on_a_mac, dtype):
    """Not one weight differs but by the rounding of its scale: the same bytes with their sign bit turned."""
    x, w, s, b, times, residual = data(3, 33, 128, dtype)
    copy = module.repack(w, s, dtype)
    packed, scales, biases = np.array(copy[0].view(mx.uint8)), *(np.repeat(numbers(a), 64, axis=1) for a in copy[1:])
    assert np.array_equal(packed * scales + biases, np.array(w) * numbers(s.astype(dtype))[:, None])
    assert np.array_equal(packed, np.array(w).astype(np.int16) + 128)
    for how in ({}, {"activation": "silu", "times": times, "residual": residual}):
        y = int8_linear(x, w, s, b, affine=copy, way="affine", **how)
        want = module.linear_reference(x, w, s, b, **how)
        assert y.dtype == dtype and np.abs(numbers(y) - numbers(want)).max() < 8 * HALF_ULP[dtype] * np.abs(numbers(want)).max()
    assert not _trust.outcomes()
    with use_kernels("0"):
        assert mx.array_equal(int8_matmul(x, w, s, b, affine=copy, way="affine"), module.linear_reference(x, w, s, b)).item()


def test_no_affine_copy():
    _, w, s, *_ = data(1, 9, 64)
    assert module.repack(w[:, :63], s, mx.float32) is None
    assert module.repack(w, s * 2.0**-15, mx.float16) is None and module.repack(w, s * 2.0**-15, mx.bfloat16)


def test_refusals():
    x, w, s, b, times, residual = data(2, 9, 8)
    for error, words, kw in (
        (ValueError, "no activation 'relu'", {"activation": "relu"}),
        (ValueError, "times must be", {"times": times.astype(mx.float16)}),
        (ValueError, "residual must be", {"residual": residual[:, :8]}),
        (ValueError, "no way 'fast'", {"way": "fast"}),
    ):
        with pytest.raises(error, match=words):
            int8_linear(x, w, s, b, **kw)
    with pytest.raises(ValueError, match="bias"):
        int8_matmul(x, w, s, b[:8])
    with pytest.raises(TypeError, match="floating or int8"):
        int8_linear(x.astype(mx.int32), w, s)


def test_linear_on_the_cpu():
    """Without a GPU the reference runs, here with everything that is optional."""
    x, w, s, b, times, residual = data(3, 33, 65)
    for activation in (None, "gelu_tanh", "silu"):
        y = int8_linear(x, w, s, b, activation=activation, times=times, residual=residual, stream=mx.cpu)
        check(y, x, w, s, b, activation, times, residual)


def test_a_call_like_one_before_is_launched_alike(on_a_mac, monkeypatch):
    """The second call goes by the plan of the first: the same launch with its own numbers; a switch still counts."""
    monkeypatch.setattr(_trust, "known", lambda *a: True)
    launches = []

    def launch(self, *, inputs, stream, **fixed):
        launches.append((inputs, fixed))
        return [mx.zeros(fixed["output_shapes"][0], dtype=fixed["output_dtypes"][0])]

    monkeypatch.setattr(type(INT8_GEMV), "__call__", launch)
    x, weight, scale, bias, *_ = data(2, 9, 16)
    for shape in ((2, 16), (1, 2, 16)):
        x = x.reshape(shape)
        more = {"times": mx.ones((*shape[:-1], 9)), "activation": "silu"}
        y = [int8_linear(a, weight, scale, bias, **more) for a in (x, x + 1)]
        assert y[0].shape == y[1].shape == (*shape[:-1], 9)
        (first, fixed), (second, again) = launches[-2:]
        assert fixed == again and len(first) == len(second) == 6
        assert second[0].shape == (2, 16) and mx.array_equal(second[0].reshape(-1), x.reshape(-1) + 1).item()
    assert len(module._plans) == 2
    with use_kernels("softmax"):
        int8_linear(x, weight, scale, bias, **more)
    assert len(launches) == 4
