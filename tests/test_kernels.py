"""The three operations of kernels/ against numpy in float64, on the default device and on an explicit CPU stream."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.kernels import H3StepParams, h3_step, int8_matmul, softmax

SIZES = [1, 7, 31, 32, 33, 65, 896, 1000]


def rng(*seed):
    return np.random.default_rng(seed)


@pytest.fixture(params=["default", "device", "stream"])
def stream(request):
    return {"default": None, "device": mx.cpu, "stream": mx.default_stream(mx.cpu)}[request.param]


def softmax64(x, axis, scale, mask):
    z = np.asarray(x, dtype=np.float64) * scale
    if mask is not None:
        z = np.where(mask, z, -np.inf) if mask.dtype == bool else z + mask
    with np.errstate(invalid="ignore"):
        e = np.where(np.isneginf(z), 0, np.exp(z - z.max(axis, keepdims=True)))
    total = e.sum(axis, keepdims=True)
    return e / np.where(total == 0, 1, total)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
def test_softmax(size, kind, stream):
    r = rng(size)
    x = (10 * r.standard_normal((3, 2, size))).astype(np.float32)
    mask = {"none": None, "bool": r.random((2, size)) < 0.5, "additive": r.standard_normal((2, size)).astype(np.float32)}[kind]
    y = softmax(mx.array(x), scale=0.7, mask=None if mask is None else mx.array(mask), stream=stream)
    assert np.abs(np.array(y) - softmax64(x, -1, 0.7, mask)).max() < 5e-6  # scale * x itself is rounded


def test_softmax_rows_without_anything():
    x = np.array([[1, 2, 3], [-np.inf] * 3, [np.nan, 0, 0]], dtype=np.float32)
    y = np.array(softmax(mx.array(x)))
    assert np.all(y[1] == 0) and np.isnan(y[2]).all() and abs(y[0].sum() - 1) < 1e-6
    none = np.array(softmax(mx.array(x[:1]), mask=mx.zeros((1, 3), dtype=mx.bool_)))
    assert np.all(none == 0)
    assert np.all(np.array(softmax(mx.array(x[:1]), mask=mx.full((1, 3), -mx.inf))) == 0)


def test_softmax_axis_strides_and_dtype():
    x = rng(1).standard_normal((5, 6, 7)).astype(np.float32)
    turned = mx.array(x).transpose(2, 0, 1)[:, ::2]
    want = softmax64(x.transpose(2, 0, 1)[:, ::2], 1, 1.0, None)
    assert np.abs(np.array(softmax(turned, axis=1)) - want).max() < 1e-6
    y = softmax(mx.array(x).astype(mx.bfloat16))  # accumulated in fp32, rounded once
    assert y.dtype == mx.bfloat16
    want = softmax64(np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32)), -1, 1.0, None)
    assert np.abs(np.array(y.astype(mx.float32)) - want).max() < 2**-8
    with pytest.raises(TypeError, match="floating"):
        softmax(mx.array([1, 2, 3]))


@pytest.mark.parametrize("K", [1, 33, 896, 1024, 1025, 1041, 4864, 8192])
def test_int8_by_int8_is_exact(K, stream):
    """Worst case, all 127 or -128, and random values: not one bit off the integer sum."""
    r = rng(K)
    x = r.integers(-128, 128, (4, K)).astype(np.int8)
    w = r.integers(-128, 128, (9, K)).astype(np.int8)
    x[0], w[0], x[1], w[1] = 127, 127, -128, -128
    x_scale, scale, bias = (r.random(n).astype(np.float32) for n in (4, 9, 9))
    y = int8_matmul(mx.array(x), mx.array(w), mx.array(scale), mx.array(bias), x_scale=mx.array(x_scale), stream=stream)
    total = (x.astype(np.int64) @ w.T.astype(np.int64)).astype(np.float32)
    assert np.array_equal(np.array(y), total * x_scale[:, None] * scale + bias)


@pytest.mark.parametrize("shape", [(896,), (1, 896), (3, 2, 896), (70, 33)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_int8_weight_only(shape, dtype, stream):
    r = rng(*shape)
    w = r.integers(-127, 128, (65, shape[-1])).astype(np.int8)
    scale, bias = (r.random(65).astype(np.float32) for _ in range(2))
    x = mx.array(r.standard_normal(shape).astype(np.float32)).astype(dtype)
    y = int8_matmul(x, mx.array(w), mx.array(scale), mx.array(bias), stream=stream)
    want = np.array(x.astype(mx.float32)).astype(np.float64) @ (w.T * scale.astype(np.float64)) + bias
    assert y.dtype == dtype and y.shape == (*shape[:-1], 65)
    error = np.abs(np.array(y.astype(mx.float32)) - want).max() / np.abs(want).max()
    assert error < (5e-6 if dtype == mx.float32 else 2**-8)


def test_int8_refusals():
    w, s = mx.zeros((4, 8), dtype=mx.int8), mx.ones(4)
    for error, args, kw in (
        (TypeError, (mx.zeros((2, 8)), w.astype(mx.float32), s), {}),
        (TypeError, (mx.zeros((2, 8), dtype=mx.int8), w, s), {}),
        (TypeError, (mx.zeros((2, 8)), w, s), {"x_scale": mx.ones(2)}),
        (TypeError, (mx.zeros((2, 8), dtype=mx.int32), w, s), {}),
        (ValueError, (mx.zeros((2, 7)), w, s), {}),
        (ValueError, (mx.zeros((2, 8)), w, mx.ones(5)), {}),
        (ValueError, (mx.zeros((2, 8), dtype=mx.int8), w, s), {"x_scale": mx.ones(3)}),
    ):
        with pytest.raises(error, match="int8_matmul"):
            int8_matmul(*args, **kw)


def step64(q, k, v, s, S, p):
    """One token in numpy float64: q, k, v [B, D], s [B, D, N], S [B, H, hd, hd, M]."""
    B, D = q.shape
    H, hd = S.shape[1:3]
    s = np.concatenate([np.zeros((B, D, 1)), s[..., :-1]], -1) + p["shift_B"] * k[..., None]
    k = np.einsum("dn,bdn->bd", p["shift_C"], s) + p["shift_D"] * k
    u = np.einsum("bhi,bhj->bhij", k.reshape(B, H, hd), v.reshape(B, H, hd))
    S = p["dA"][:, None, None] * S + p["dB"][:, None, None] * u[..., None]
    y = 2 * np.einsum("hn,bhijn->bhij", p["C"], S).real + p["D"][:, None, None] * u
    out = np.einsum("bhij,bhi->bjh", y, q.reshape(B, H, hd))  # channel j H + h
    return out.reshape(B, D), s, S


@pytest.mark.parametrize("B, T, D, hd, N, M", [(1, 1, 3, 1, 64, 32), (2, 5, 8, 1, 64, 32), (3, 2, 12, 4, 16, 8), (1, 4, 6, 2, 5, 3)])
def test_h3_step(B, T, D, hd, N, M, stream):
    r = rng(B, T, D, hd)
    H = D // hd
    cplx = lambda *shape: r.standard_normal(shape) + 1j * r.standard_normal(shape)  # noqa: E731
    p = {
        "shift_B": r.standard_normal((D, N)), "shift_C": r.standard_normal((D, N)), "shift_D": r.standard_normal(D),
        "dA": 0.9 * np.exp(1j * r.uniform(-3, 3, (H, M))), "dB": cplx(H, M), "C": cplx(H, M), "D": r.standard_normal(H),
    }  # fmt: skip
    q, k, v = (r.standard_normal((B, T, D)) for _ in range(3))
    s, S = r.standard_normal((B, D, N)), cplx(B, H, hd, hd, M)
    pairs = lambda a: np.stack([a.real, a.imag], -1) if np.iscomplexobj(a) else a  # noqa: E731
    single = lambda a: mx.array(pairs(a).astype(np.float32))  # noqa: E731
    params = H3StepParams(**{name: single(a) for name, a in p.items()})
    y, s1, S1 = h3_step(single(q), single(k), single(v), single(s), single(S), params, stream=stream)
    for t in range(T):
        want, s, S = step64(q[:, t], k[:, t], v[:, t], s, S, p)
        assert np.abs(np.array(y)[:, t] - want).max() < 2e-4 * max(1, np.abs(want).max())
    assert np.abs(np.array(s1) - s).max() < 1e-5 and np.abs(np.array(S1) - pairs(S)).max() < 1e-4 * np.abs(S).max()


def test_h3_step_takes_the_dtype_of_the_projections():
    r = rng(9)
    p = H3StepParams(*(mx.array(r.standard_normal(shape).astype(np.float32)) for shape in ((4, 8), (4, 8), 4)),
                     *(mx.zeros((4, 2, 2)),) * 3, mx.ones(4))  # fmt: skip
    q = mx.ones((1, 1, 4), dtype=mx.bfloat16)
    y, s, S = h3_step(q, q, q, mx.zeros((1, 4, 8)), mx.zeros((1, 4, 1, 1, 2, 2)), p)
    assert (y.dtype, s.dtype, S.dtype) == (mx.bfloat16, mx.float32, mx.float32)
