"""What `mlx_cosyh3 doctor` computes: the operations of kernels/ on known inputs, and the truth in numpy float64.

The allowed error of a result w is  n u |w| + c m:  u the rounding of its dtype, n how often it may be rounded; m the
same formula with every term taken absolutely, the size of what cancels in it; c a few roundings of float32. So a
missing term or a wrong index shows in every dtype, and a sum in another order does not.
"""

from dataclasses import dataclass
from typing import Callable

import mlx.core as mx
import numpy as np

from mlx_cosyh3.kernels import norm_linear as nl
from mlx_cosyh3.kernels.h3_step import H3StepParams, h3_step
from mlx_cosyh3.kernels.int8_matmul import int8_linear, int8_matmul
from mlx_cosyh3.kernels.ras import ras_step
from mlx_cosyh3.kernels.softmax import argmax_lse, softmax_lse
from mlx_cosyh3.kernels.top_k import top_k

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # half the distance from 1 to the next
FP32 = 4e-6  # c above: some 60 roundings of float32
TF32 = 2.0**-10  # c where MLX may round the operands of a float32 matrix product to TF32
FEW_ROWS = 8  # beyond, the int8 weight may become one of x's dtype, for a matrix product

# columns, what is special; three rows, or one if long
SOFTMAX = [(1, ""), (33, ""), (257, "boolean mask"), (896, "additive mask"), (1000, "transposed"), (6761, ""),
           (50264, ""), (151936, "")]  # fmt: skip
TOP_K = [(2, 257, 5), (1, 6761, 50), (1, 50264, 40)]  # rows, columns, k
RAS_STEP = [(1, 6761, False), (3, 257, True)]  # rows, ids, mask
# rows, K (in), N (out), bias
INT8 = [(1, 7, 5, True), (3, 33, 65, True), (1, 896, 896, True), (2, 1000, 257, False), (1, 4864, 896, False),
        (8, 1024, 1024, True), (33, 896, 130, True), (1, 2048, 4096, False)]  # fmt: skip
# B, T, D, head_dim, N, M
H3_STEP = [(1, 1, 3, 1, 64, 32), (2, 5, 33, 1, 64, 32), (3, 2, 12, 4, 64, 32), (1, 3, 6, 2, 5, 3),
           (1, 1, 768, 1, 64, 32), (16, 1, 768, 1, 64, 32), (1, 33, 256, 1, 64, 32)]  # fmt: skip
# K (in), N (out), norm, activation, int8 weights
NORM_LINEAR = [(12, 5, None, None, False), (896, 1152, "rms", "rotary", False), (896, 4864, "rms", "silu_gate", True),
               (4864, 896, None, None, True), (768, 3072, "layer", "gelu_tanh", False)]  # fmt: skip


@dataclass
class Case:
    operation: str
    shape: str
    dtype: str
    run: Callable  # () -> list of lazy arrays
    truth: Callable  # (c, n) -> list of (float64 result, allowed error of each element)
    product: bool = False  # may run as MLX's matrix product even where kernels run


def cases():
    """All cases, their inputs made as they are reached."""
    for dtype in DTYPES:
        for columns, special in SOFTMAX:
            yield _softmax(columns, special, dtype)
    for dtype in DTYPES:
        for shape in TOP_K:
            yield _argmax(*shape, dtype)
            yield _top_k(*shape, dtype)
    for shape in RAS_STEP:
        yield _ras_step(*shape)
    for dtype in DTYPES:
        for shape in INT8:
            yield _int8_weight(*shape, dtype)
        yield _int8_fused(2, 896, 256, dtype)
    for shape in INT8:
        yield _int8_by_int8(*shape)
    yield _int8_by_int8(2, 8192, 33, True)
    for dtype in DTYPES:
        for shape in H3_STEP:
            yield _h3_step(*shape, dtype)
        for shape in NORM_LINEAR:
            yield _norm_linear(*shape, dtype)


def _softmax(columns, special, dtype):
    r = np.random.default_rng(columns)
    rows = 3 if columns < 10_000 else 1
    x = mx.array((4 * r.standard_normal((rows, columns))).astype(np.float32)).astype(DTYPES[dtype])
    scale, mask = 0.7, None
    if special == "transposed":
        x = mx.contiguous(x.T).T
    if special == "boolean mask":
        mask = r.random((rows, columns)) < 0.5
        mask[0], mask[1:, -1] = False, True
    if special == "additive mask":
        mask = r.standard_normal((rows, columns)).astype(np.float32)
        mask[:, ::3] = -np.inf
    given = None if mask is None else mx.array(mask)

    def truth(c, n=1):
        z = _float64(x) * np.float64(np.float32(scale))
        if mask is not None:
            z = np.where(mask, z, -np.inf) if mask.dtype == bool else z + mask
        peak = z.max(axis=-1, keepdims=True)
        e = np.exp(z - np.where(np.isneginf(peak), 0, peak))
        total = e.sum(axis=-1, keepdims=True)
        y = e / np.where(total == 0, 1, total)
        # A float32 exponent of size |z| is off by |z| roundings, and so, relatively, is its power. MLX's CPU adds a
        # row term by term: its sum of many small numbers is off by a fraction of a rounding for each.
        off = 10 * FP32 + columns / 32 * UNIT["float32"]
        with np.errstate(divide="ignore"):
            lse = (peak + np.log(total))[:, 0]
        smallest = n * 2.0**-24 if dtype == "float16" else 1e-30
        return [(y, (n * UNIT[dtype] + off) * y + smallest), (lse, off + FP32 * np.abs(np.nan_to_num(lse, neginf=0)))]

    text = f"{rows} x {columns}" + (f", {special}" if special else "")
    return Case("softmax", text, dtype, lambda: list(softmax_lse(x, scale=scale, mask=given)), truth)


def _logits(rows, columns, dtype):
    r = np.random.default_rng([rows, columns])
    return mx.array((4 * r.standard_normal((rows, columns))).astype(np.float32)).astype(DTYPES[dtype])


def _argmax(rows, columns, k, dtype):
    x = _logits(rows, columns, dtype)

    def truth(c, n=1):
        z = _float64(x)
        lse = np.log(np.exp(z).sum(axis=-1))
        off = 10 * FP32 + columns / 32 * UNIT["float32"]
        return [(z.argmax(axis=-1).astype(np.float64), np.zeros(rows)), (lse, np.full(rows, off))]

    return Case("argmax_lse", f"{rows} x {columns}", dtype, lambda: list(argmax_lse(x)), truth)


def _top_k(rows, columns, k, dtype):
    x = _logits(rows, columns, dtype)

    def truth(c, n=1):
        z = _float64(x)
        first = np.argsort(-z, axis=-1, kind="stable")[:, :k]  # of equals, which float16 has, the first
        exactly = np.zeros(first.shape)
        return [(np.take_along_axis(z, first, -1), exactly), (first.astype(np.float64), exactly)]

    return Case("top_k", f"{rows} x {columns}, k {k}", dtype, lambda: list(top_k(x, k)), truth)


def _ras_step(rows, count, masked):
    r = np.random.default_rng([rows, count])
    x = (4 * r.standard_normal((rows, count))).astype(np.float32)
    keep = r.random((rows, count)) < (0.9 if masked else 2)
    p = np.where(keep, np.exp(x.astype(np.float64)), 0)
    window = np.full((rows, 10), -1, dtype=np.int32)
    u = np.empty((rows, 2))
    ids, again = np.empty(rows), np.arange(rows) % 2 == 0
    for row in range(rows):
        # Both draws are known: a uniform number lies in the middle of an id's share.
        falling = np.argsort(-p[row], kind="stable")
        nucleus = falling[: 1 + min(24, int((np.cumsum(p[row][falling]) < 0.8 * p[row].sum()).sum()))]
        first = nucleus[len(nucleus) // 2]
        second = falling[0] if first != falling[0] else falling[1]
        others = np.where(np.arange(count) == first, 0, p[row])
        u[row, 0] = (p[row][nucleus].cumsum()[len(nucleus) // 2] - p[row, first] / 2) / p[row][nucleus].sum()
        u[row, 1] = (others.cumsum()[second] - others[second] / 2) / others.sum()
        window[row, 3] = first if again[row] else -1
        ids[row] = second if again[row] else first

    given = mx.array(x), mx.array(u.astype(np.float32)), mx.array(window), mx.array(keep) if masked else None

    def truth(c, n=1):
        off = 10 * FP32 + count / 32 * UNIT["float32"]
        after = np.concatenate([window, ids[:, None]], axis=1)[:, 1:]
        exactly = lambda a: (a.astype(np.float64), np.zeros(a.shape))  # noqa: E731
        return [exactly(ids), (np.log(p.sum(axis=-1)), np.full(rows, off)), exactly(after), exactly(again)]

    text = f"{rows} x {count}" + (", boolean mask" if masked else "")
    return Case("ras_step", text, "float32", lambda: list(ras_step(*given, top_p=0.8, top_k=25)), truth)


def _int8_inputs(rows, K, N, bias):
    r = np.random.default_rng([rows, K, N])
    weight = r.integers(-127, 128, (N, K)).astype(np.int8)
    scale = (r.random(N) / 100).astype(np.float32)
    return r, weight, scale, r.standard_normal(N).astype(np.float32) if bias else None


def _int8_weight(rows, K, N, with_bias, dtype):
    r, weight, scale, bias = _int8_inputs(rows, K, N, with_bias)
    x = mx.array(r.standard_normal((rows, K)).astype(np.float32)).astype(DTYPES[dtype])
    given = mx.array(weight), mx.array(scale), mx.array(bias) if with_bias else None

    def truth(c, n=1):
        x64, w = _float64(x), weight.T * scale.astype(np.float64)
        y, size = x64 @ w, np.abs(x64) @ np.abs(w)
        if with_bias:
            y, size = y + bias, size + np.abs(bias)
        return [(y, n * UNIT[dtype] * np.abs(y) + c * size)]

    text = f"{rows} x {K} -> {N}"
    return Case("int8_matmul", text, dtype, lambda: [int8_matmul(x, *given)], truth, product=rows > FEW_ROWS)


def _int8_fused(rows, K, N, dtype):
    r, weight, scale, bias = _int8_inputs(rows, K, N, True)
    normal = lambda n: mx.array(r.standard_normal((rows, n)).astype(np.float32)).astype(DTYPES[dtype])  # noqa: E731
    x, times, residual = normal(K), normal(N), normal(N)
    given = [mx.array(a) for a in (weight, scale / 10, bias)]

    def truth(c, n=1):
        x64, t, e = map(_float64, (x, times, residual))
        w = weight.T * np.array(given[1]).astype(np.float64)
        z, size = x64 @ w + bias, np.abs(x64) @ np.abs(w) + np.abs(bias)
        y = z / (1 + np.exp(-z)) * t + e  # SiLU: its slope is below 1.1
        return [(y, n * UNIT[dtype] * np.abs(y) + c * (1.1 * size * np.abs(t) + np.abs(e)))]

    def run():
        return [int8_linear(x, *given, activation="silu", times=times, residual=residual)]

    return Case("int8_linear", f"{rows} x {K} -> {N}, SiLU, times, plus", dtype, run, truth)


def _int8_by_int8(rows, K, N, with_bias):
    r, weight, scale, bias = _int8_inputs(rows, K, N, with_bias)
    x = r.integers(-127, 128, (rows, K)).astype(np.int8)
    x[0], weight[0] = 127, 127  # the largest sum
    x_scale = r.random(rows).astype(np.float32)
    given = mx.array(x), mx.array(weight), mx.array(scale), mx.array(bias) if with_bias else None, mx.array(x_scale)

    def truth(c, n=1):
        # Not one bit may differ from the exact sum, converted to float32 and multiplied and added in float32.
        total = (x.astype(np.float64) @ weight.T.astype(np.float64)).astype(np.float32)  # exact below 2^53
        y = total * x_scale[:, None] * scale
        y = y + bias if with_bias else y
        return [(y.astype(np.float64), np.zeros(y.shape))]

    def run():
        x, weight, scale, bias, x_scale = given
        return [int8_matmul(x, weight, scale, bias, x_scale=x_scale)]

    return Case("int8_matmul", f"{rows} x {K} -> {N}", "int8", run, truth)


def _h3_step(B, T, D, head_dim, N, M, dtype):
    r = np.random.default_rng([B, T, D, head_dim])
    H = D // head_dim
    real = lambda *shape: r.standard_normal(shape).astype(np.float32)  # noqa: E731
    cplx = lambda *shape: (real(*shape) + 1j * real(*shape)).astype(np.complex64)  # noqa: E731
    decay = (0.95 * np.exp(1j * r.uniform(-3, 3, (H, M)))).astype(np.complex64)
    params = [real(D, N) / 8, real(D, N) / 8, real(D), decay, cplx(H, M), cplx(H, M) / 8, real(H)]
    q, k, v = (mx.array(real(B, T, D)).astype(DTYPES[dtype]) for _ in range(3))
    states = [real(B, D, N), cplx(B, H, head_dim, head_dim, M)]
    device = lambda a: mx.array(_pairs(a) if np.iscomplexobj(a) else a)  # noqa: E731
    given = (*map(device, states), H3StepParams(*map(device, params)))

    def truth(c, n=1):
        inputs = [*map(_float64, (q, k, v)), *(a.astype(np.complex128 if np.iscomplexobj(a) else np.float64)
                                               for a in (*states, *params))]  # fmt: skip
        (out, s, S), (out_size, s_size, S_size) = _h3_steps(*inputs), _h3_steps(*map(np.abs, inputs))
        small = c + UNIT["float32"]  # a state is not larger than its size
        off = n * UNIT[dtype] * np.abs(out) + c * out_size
        return [(out, off), (s, small * s_size), (_pairs(S), small * S_size[..., None])]

    text = f"{B} x {T} x {D}, head_dim {head_dim}, N {N}, M {M}"
    return Case("h3_step", text, dtype, lambda: list(h3_step(q, k, v, *given)), truth)


def _h3_steps(q, k, v, s, S, shift_B, shift_C, shift_D, dA, dB, C, D):
    """The formulas of kernels/h3_step.py, token by token, in the precision of what is given."""
    (B, T, channels), (H, hd) = q.shape, S.shape[1:3]
    out = np.empty((B, T, channels))
    for t in range(T):
        s = np.concatenate([np.zeros((B, channels, 1)), s[..., :-1]], -1) + shift_B * k[:, t, :, None]
        shifted = (shift_C * s).sum(-1) + shift_D * k[:, t]  # [B, D]
        u = shifted.reshape(B, H, hd, 1) * v[:, t].reshape(B, H, 1, hd)  # [B, H, d1, d2]
        S = dA[:, None, None] * S + dB[:, None, None] * u[..., None]
        y = 2 * (C[:, None, None] * S).sum(-1).real + D[:, None, None] * u
        gated = (y * q[:, t].reshape(B, H, hd, 1)).sum(2)  # [B, H, d2]
        out[:, t] = gated.swapaxes(1, 2).reshape(B, channels)
    return out, s, S


def _norm_linear(K, N, norm, activation, int8, dtype):
    numbers = {name: i for name, i in nl.ACTIVATIONS.items()}
    rows = 2 if activation in ("silu_gate", "rotary") else 1
    half, turned = (32, 16 * 64) if activation == "rotary" else (1, 0)
    adds = activation is None
    given, options = nl.case((DTYPES[dtype], K, rows, numbers[activation], adds, True, norm, int8, half, turned), N, seed=K)
    x, W, bias, scale = given

    def truth(c, n=1):
        h = _float64(x)
        if norm is not None:
            weight, shift, eps = options["norm"]
            h = h - (h.mean() if norm == "layer" else 0)
            h = h / np.sqrt((h * h).mean() + eps) * _float64(weight) + (0 if shift is None else _float64(shift))
        w = _float64(W) * (1 if scale is None else _float64(scale)[:, None])
        y, size = w @ h + _float64(bias), np.abs(w) @ np.abs(h) + np.abs(_float64(bias))
        if activation == "gelu_tanh":  # its slope is below 1.2, as that of SiLU
            y, size = y / (1 + np.exp(-1.5957691216057308 * (y + 0.044715 * y**3))), 1.2 * size
        if activation == "silu_gate":
            (gate, up), (a, b) = np.split(y, 2), np.split(size, 2)
            y, size = gate / (1 + np.exp(-gate)) * up, 1.2 * (a * np.abs(up) + b * np.abs(gate))
        if activation == "rotary":
            cosines, sines = _float64(options["turn"]).reshape(2, -1)
            size = size.reshape(-1, 2, half)[:, ::-1].reshape(-1) + size  # of the other of the pair, too
            parts = y.reshape(-1, 2, half)
            a, b = parts[: turned // 64, 0].copy(), parts[: turned // 64, 1].copy()
            parts[: turned // 64, 0], parts[: turned // 64, 1] = a * cosines - b * sines, b * cosines + a * sines
        if adds:
            y, size = y + _float64(options["residual"]), size + np.abs(_float64(options["residual"]))
        return [(y, n * UNIT[dtype] * np.abs(y) + c * size)]

    def run():
        return [(nl.norm_linear if nl.usable(*given, **_no_turn(options)) else nl.reference)(*given, **options)]

    text = f"{K} -> {N}" + "".join(f", {w}" for w in (norm, activation, "int8" if int8 else "") if w)
    return Case("norm_linear", text, dtype, run, truth, product=True)


def _no_turn(options):
    return {name: a for name, a in options.items() if name != "turn"}


def _pairs(a):
    """complex [...] -> real [..., 2]"""
    return np.stack([a.real, a.imag], axis=-1)


def _float64(x):
    return np.array(x.astype(mx.float32)).astype(np.float64)
