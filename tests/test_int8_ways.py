"""Which of the INT8 kernels runs for a product, and what runs where none may.

Run: MLX_DISABLE_COMPILE=1 python -m pytest -q tests/test_int8_ways.py
"""

import sys

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.kernels import _dispatch, _trust, int8_matmul, use_kernels
from mlx_cosyh3.kernels.int8_gemm import INT8_DEQUANTIZE, INT8_GEMM
from mlx_cosyh3.kernels.int8_gemv import INT8_GEMV, INT8_GEMV_INT8
from mlx_cosyh3.kernels.int8_mma import INT8_MMA
from tests.int8_cases import DTYPES, HALF_ULP, KERNELS, check, data, emulated, integers, numbers, same

from . import mslemu

if mslemu.missing():
    pytest.skip(f"Metal emulator: {mslemu.missing()}", allow_module_level=True)

module = sys.modules["mlx_cosyh3.kernels.int8_matmul"]  # the package has a function of that name
int8_linear = module.int8_linear


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
