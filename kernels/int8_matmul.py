"""INT8 matrix product: y = x W^T with W stored as int8 and one fp32 scale per output.

    weight-only   x [..., K] float32 | float16 | bfloat16:   y_n = scale_n sum_k x_k w_nk + bias_n   fp32 accumulation
    int8 x int8   x [..., K] int8, x_scale [...] fp32 per row:
                  y_n = (x_scale (float) sum_k x_k w_nk) scale_n + bias_n                          int32 accumulation

weight  int8 [N, K], scale fp32 [N], bias [N] or None. The result is [..., N], in x's dtype (fp32 for int8 x).

The int32 sum is exact for every K < 2^31 / 128^2 = 131,072, so int8 x int8 gives the same bits on every device: one
conversion of the sum to fp32, times x_scale, times scale, plus bias, each rounded once, never contracted.
MLX has no integer GEMM; the reference is exact all the same: products of int8 are integers, and an fp32 GEMM over
at most 1,024 of them stays below 2^24 (1,040 x 127^2; 1,024 x 128^2 is just 2^24), so every partial sum is exact in
any order; blocks are added in int32. TF32 and bf16 hold int8 values exactly, too.

On a GPU BREAK_EVEN says what runs, by the rows of x and by K:
    gemv         few rows: int8_gemv.py
    gemm, mma    some: the tiled kernel of int8_gemm.py on Metal, that of int8_mma.py on CUDA for half-precision x
    dequantize   many: the weight in x's dtype (so each one is rounded to it) for MLX's matrix product
    affine       MLX's own 8-bit product, from a second copy of the weight (`repack`), where the caller keeps one
"""

import mlx.core as mx

from mlx_cosyh3.kernels import _dispatch
from mlx_cosyh3.kernels.int8_gemm import INT8_DEQUANTIZE, INT8_GEMM, dequantize, gemm
from mlx_cosyh3.kernels.int8_gemv import (
    ACTIVATIONS,
    INT8_GEMV,
    INT8_GEMV_INT8,
    cuda_shape,
    ending,
    gemv,
    gemv_int8,
    metal_shape,
)
from mlx_cosyh3.kernels.int8_mma import INT8_MMA, mma, mma_shape

EXACT_K = 1024  # 1024 * 128 * 128 = 2^24: the longest block whose fp32 sum is exact
INT32_K = 131_072  # from this K on an int32 sum may overflow
FLOATS = (mx.float32, mx.float16, mx.bfloat16)

GROUP = 64  # of `mx.quantized_matmul`

# {back end: {x: [(rows up to, K up to, way), ...]}}: the first entry that fits; beyond, float x takes "dequantize" and
# int8 x the reference. "affine" counts only where there is that copy and nothing but a bias follows the product: an
# activation, `times` or `residual` would be launches of their own.
ANY = 1 << 30
BREAK_EVEN = {
    # Guesses from counted bytes and operations; never timed. "affine" moves 6 % more bytes than "gemv", and where K is no
    # multiple of 256, as 896, MLX takes its slower kernel: so it is not on the list.
    "metal": {
        "float32": [(8, ANY, "gemv"), (512, ANY, "gemm")],
        "half": [(8, ANY, "gemv"), (512, ANY, "gemm")],
        "int8": [(16, ANY, "gemv")],
    },
    # NVIDIA H200, MLX 0.32.4 (docs/LOG.md, 2026-11-30), float16 x: "affine" took 0.38 to 0.71 of the time of our kernels
    # at 1 row and 0.94 at 8 (K 8192); int8 x int8 was 1.3 to 3.4 times as fast as the reference at 1 and 8 rows, 0.87 to
    # 0.96 at 64. Guesses: float32 x, where mma ends, and what lies between those rows.
    "cuda": {
        "float32": [(16, ANY, "gemv")],
        "half": [(8, ANY, "affine"), (1, ANY, "gemv"), (64, ANY, "mma")],
        "int8": [(32, ANY, "gemv")],
    },
}
WAYS = {"gemv": (INT8_GEMV, gemv), "gemm": (INT8_GEMM, gemm), "mma": (INT8_MMA, mma), "dequantize": (INT8_DEQUANTIZE, None)}


def int8_matmul(x, weight, scale, bias=None, *, x_scale=None, affine=None, way=None, stream=None):
    """`x @ weight.T` for int8 `weight` [out, in] with fp32 `scale` [out]; see the module for both forms.

    affine   None, or what `repack` made of weight and scale for x's dtype
    way      one of the module's ways, whatever BREAK_EVEN says (one that may not run gives way to the reference)

    Raises TypeError for other dtypes, ValueError for shapes that do not fit."""
    if x_scale is None:
        return int8_linear(x, weight, scale, bias, affine=affine, way=way, stream=stream)
    _check(x, weight, scale, bias, x_scale, way)
    rows = x_scale.size
    way = way or _way(rows, weight.shape[1], "int8", False)
    if way == "gemv" and _supported(x, weight) and weight.shape[1] < INT32_K:
        shape, has_bias = _shape(rows, weight.shape), bias is not None
        selftest = lambda: _int8_selftest(shape, has_bias)  # noqa: E731
        if _dispatch.usable(INT8_GEMV_INT8, "int8_matmul", (shape, has_bias), stream, selftest):
            y = _run_int8(x, x_scale, weight, scale, bias, shape, stream)
            return mx.reshape(y, (*x.shape[:-1], weight.shape[0]), stream=stream)
    return reference(x, weight, scale, bias, x_scale=x_scale, stream=stream)


def int8_linear(
    x, weight, scale, bias=None, *, activation=None, times=None, residual=None, affine=None, way=None, stream=None
):
    """activation(x W^T + bias) * times + residual in one launch where there are few rows; x floating [..., in].

    activation   None, "gelu_tanh" or "silu"
    times        None, or [..., out] in x's dtype: silu(x Wg^T) * (x Wu^T) takes the second product here
    residual     None, or [..., out] in x's dtype

    All of it is computed in fp32 and rounded once, to x's dtype. `affine`, `way` and errors as `int8_matmul`."""
    key = _alike(x, weight, scale, bias, activation, times, residual, affine is not None, way)
    plan = _plans.get(key)
    if plan is not None:
        y = _planned(plan, x, weight, scale, bias, times, residual, stream)
        if y is not None:
            return y
    _check(x, weight, scale, bias, None, way)
    if activation not in ACTIVATIONS:
        raise ValueError(f"int8_linear: no activation {activation!r}; use one of {', '.join(map(repr, ACTIVATIONS))}")
    for name, a in (("times", times), ("residual", residual)):
        if a is not None and (a.dtype != x.dtype or a.shape != (*x.shape[:-1], weight.shape[0])):
            want = f"{x.dtype} {[*x.shape[:-1], weight.shape[0]]}"
            raise ValueError(f"int8_linear: {name} must be {want} like the result, not {a.dtype} {list(a.shape)}")
    return _linear(key, x, weight, scale, bias, activation, times, residual, affine, way, stream)


def reference(x, weight, scale, bias=None, *, x_scale=None, stream=None):
    """`int8_matmul` in plain MLX ops."""
    if x_scale is None:
        return linear_reference(x, weight, scale, bias, stream=stream)
    s = stream
    y = _exact_sum(x, weight, s).astype(mx.float32, stream=s)  # [..., out]
    y = mx.multiply(y, mx.expand_dims(x_scale, -1, stream=s), stream=s)
    y = mx.multiply(y, scale, stream=s)
    return y if bias is None else mx.add(y, bias.astype(mx.float32, stream=s), stream=s)


def linear_reference(x, weight, scale, bias=None, *, activation=None, times=None, residual=None, stream=None):
    """`int8_linear` in plain MLX ops."""
    s = stream
    w = mx.transpose(weight.astype(mx.float32, stream=s), stream=s)
    y = mx.matmul(x.astype(mx.float32, stream=s), w, stream=s)
    y = mx.multiply(y, scale, stream=s)
    if bias is not None:
        y = mx.add(y, bias.astype(mx.float32, stream=s), stream=s)
    return _finish(y, x.dtype, activation, times, residual, s)


def _finish(y, dtype, activation, times, residual, s):
    """activation(y) * times + residual in fp32, rounded to `dtype`."""
    if activation is not None:
        z = y
        if activation == "gelu_tanh":  # as h3.gelu_tanh: y (1 + tanh(z)) / 2 = y sigmoid(2 z)
            cube = mx.multiply(mx.square(y, stream=s), y, stream=s)
            z = mx.multiply(1.5957691216057308, mx.add(y, mx.multiply(0.044715, cube, stream=s), stream=s), stream=s)
        y = mx.multiply(y, mx.sigmoid(z, stream=s), stream=s)
    if times is not None:
        y = mx.multiply(y, times.astype(mx.float32, stream=s), stream=s)
    if residual is not None:
        y = mx.add(y, residual.astype(mx.float32, stream=s), stream=s)
    return y.astype(dtype, stream=s)


def _exact_sum(x, weight, s):
    """The int32 sums of x [..., K] times weight [N, K], both int8 -> int32 [..., N]."""
    total = None
    for start in range(0, weight.shape[1], EXACT_K):
        stop = start + EXACT_K
        xs = x[..., start:stop].astype(mx.float32, stream=s)
        ws = mx.transpose(weight[:, start:stop].astype(mx.float32, stream=s), stream=s)
        part = mx.matmul(xs, ws, stream=s).astype(mx.int32, stream=s)
        total = part if total is None else mx.add(total, part, stream=s)
    if total is None:  # K = 0
        return mx.zeros((*x.shape[:-1], weight.shape[0]), dtype=mx.int32, stream=s)
    return total


def _check(x, weight, scale, bias, x_scale, way):
    if way not in (None, "affine", *WAYS):
        raise ValueError(f"int8_matmul: no way {way!r}; use one of affine, {', '.join(WAYS)}")
    if weight.dtype != mx.int8 or weight.ndim != 2:
        raise TypeError(f"int8_matmul: weight must be int8 [out, in], not {weight.dtype} {list(weight.shape)}")
    if (x.dtype == mx.int8) != (x_scale is not None):
        raise TypeError(f"int8_matmul: x_scale goes with int8 x and only with it (x is {x.dtype})")
    if x.dtype != mx.int8 and not mx.issubdtype(x.dtype, mx.floating):
        raise TypeError(f"int8_matmul: x must be floating or int8, not {x.dtype}")
    out_dims, in_dims = weight.shape
    if x.ndim == 0 or x.shape[-1] != in_dims or scale.shape != (out_dims,):
        raise ValueError(
            f"int8_matmul: x {list(x.shape)}, weight {[out_dims, in_dims]}, scale {list(scale.shape)} do not fit"
        )
    if bias is not None and bias.shape != (out_dims,):
        raise ValueError(f"int8_matmul: bias {list(bias.shape)} is not one value per row of weight {[out_dims, in_dims]}")
    if x_scale is not None and x_scale.shape != x.shape[:-1]:
        raise ValueError(f"int8_matmul: x_scale {list(x_scale.shape)} is not one value per row of x {list(x.shape)}")


def _platform():
    return "metal" if mx.metal.is_available() else "cuda"


def _supported(x, weight):
    """What the kernels take. Of fewer than 8 elements Metal makes another kind of pointer; nothing is gained there."""
    return weight.size >= 8 and x.size >= (8 if x.dtype == mx.int8 else 1) and x.dtype in (*FLOATS, mx.int8)


def _shape(rows, shape):
    return (metal_shape if _platform() == "metal" else cuda_shape)(rows, *shape)


def _how(way, rows, shape, dtype):
    """What a way is compiled for besides dtypes and extras."""
    if way == "gemv":
        return _shape(rows, shape)
    if way == "gemm":
        return mx.float16 if dtype == mx.float16 else mx.float32
    return mma_shape(rows, *shape) if way == "mma" else None


def _way(rows, k, kind, affine):
    """What BREAK_EVEN says of `rows` of x; None beyond its entries."""
    table = BREAK_EVEN[_platform()][kind]
    return next((w for most, longest, w in table if rows <= most and k <= longest and (affine or w != "affine")), None)


# Calls that differ in their numbers alone -> how to launch "gemv", found out at the first of them, which takes as long as
# two launches: (variant, arguments of the kernel but its inputs, shape of the result).
_plans = {}
MOST_PLANS = 4096


def _alike(*arguments):
    return tuple((a.dtype, a.shape) if isinstance(a, mx.array) else a for a in arguments)


def _planned(plan, x, weight, scale, bias, times, residual, stream):
    """The result of a call for which there is a plan, or None if the kernel may not run now."""
    variant, fixed, shape = plan
    if not _dispatch.usable(INT8_GEMV, "int8_matmul", variant, stream, lambda: _selftest("gemv", *variant)):
        return None
    if x.ndim != 2:
        x, times, residual = _flat(x, stream), _flat(times, stream), _flat(residual, stream)
    inputs, _ = ending(x, scale, bias, None, times, residual)
    y = INT8_GEMV(inputs=[x, weight, scale, *inputs], stream=stream, **fixed)[0]
    return y if len(shape) == 2 else mx.reshape(y, shape, stream=stream)


def _flat(a, stream):
    """[..., N] -> [rows, N]"""
    return None if a is None else mx.reshape(a, (-1, a.shape[-1]), stream=stream)


def _linear(key, x, weight, scale, bias, activation, times, residual, affine, way, stream):
    """`int8_linear` by the fastest way that may be used here."""
    n, k = weight.shape
    if _supported(x, weight):
        rows = x.size // k
        plain = activation is None and times is None and residual is None
        kind = "float32" if x.dtype == mx.float32 else "half"
        way = way or _way(rows, k, kind, plain and affine is not None and affine[1].dtype == x.dtype) or "dequantize"
        if way == "affine":
            if affine is not None and _dispatch.on_gpu(stream) and "int8_matmul" in _dispatch.allowed():
                return _affine(x, affine, bias, activation, times, residual, stream)
            return linear_reference(x, weight, scale, bias, activation=activation, times=times, residual=residual, stream=stream)
        how = _how(way, rows, weight.shape, x.dtype)
        extras = bias is not None, activation, times is not None, residual is not None
        variant = x.dtype, how, None if way == "dequantize" else extras
        if _dispatch.usable(WAYS[way][0], "int8_matmul", variant, stream, lambda: _selftest(way, *variant)):
            flat, shape = [_flat(a, stream) for a in (x, times, residual)], (*x.shape[:-1], n)
            fp32 = scale.dtype == mx.float32 and (bias is None or bias.dtype == mx.float32)
            if way == "gemv" and fp32 and len(_plans) < MOST_PLANS:
                fixed = gemv(flat[0], weight, scale, bias, how, activation, *flat[1:])
                _plans[key] = variant, {name: a for name, a in fixed.items() if name != "inputs"}, shape
            y = _run(way, how, flat[0], weight, scale, bias, activation, *flat[1:], stream)
            return mx.reshape(y, shape, stream=stream)
    return linear_reference(x, weight, scale, bias, activation=activation, times=times, residual=residual, stream=stream)


def repack(weight, scale, dtype):
    """The weight as `mx.quantized_matmul` takes it for x of `dtype`: (uint32 [N, K / 4], scales, biases [N, K / 64]).

    The same bytes with their sign bit turned: q scale = (q + 128) scale - 128 scale; only the scale is rounded, to
    `dtype`. None where that cannot be: K % 64, or a scale below what is normal in float16. Evaluates."""
    n, k = weight.shape
    if k == 0 or k % GROUP or (dtype == mx.float16 and not 2.0**-14 <= scale.min().item() <= scale.max().item() < 2.0**8):
        return None
    packed = mx.contiguous(weight ^ mx.array(-128, dtype=mx.int8)).view(mx.uint32)
    scales = mx.contiguous(mx.broadcast_to(scale.astype(dtype)[:, None], (n, k // GROUP)))
    made = packed, scales, -128 * scales
    mx.eval(made)
    return made


def _affine(x, affine, bias, activation, times, residual, s):
    """The way "affine" of int8_linear."""
    y = mx.quantized_matmul(x, *affine, transpose=True, group_size=GROUP, bits=8, stream=s)
    if bias is not None:
        y = mx.add(y, bias.astype(x.dtype, stream=s), stream=s)
    if activation is None and times is None and residual is None:
        return y
    return _finish(y.astype(mx.float32, stream=s), x.dtype, activation, times, residual, s)


def _run(way, how, x, weight, scale, bias, activation, times, residual, s):
    """One way of int8_linear; x, times, residual [rows, K or N]."""
    scale = scale.astype(mx.float32, stream=s)
    if way == "dequantize":
        w = mx.transpose(INT8_DEQUANTIZE(**dequantize(weight, scale, x.dtype), stream=s)[0], stream=s)
        y = mx.matmul(x, w, stream=s) if bias is None else mx.addmm(bias.astype(x.dtype, stream=s), x, w, stream=s)
        if activation is None and times is None and residual is None:
            return y
        return _finish(y.astype(mx.float32, stream=s), x.dtype, activation, times, residual, s)
    bias = None if bias is None else bias.astype(mx.float32, stream=s)
    kernel, call = WAYS[way]
    return kernel(**call(x, weight, scale, bias, how, activation, times, residual), stream=s)[0]


def _run_int8(x, x_scale, weight, scale, bias, shape, s):
    x = mx.reshape(x, (-1, x.shape[-1]), stream=s)
    x_scale = mx.reshape(x_scale.astype(mx.float32, stream=s), (-1,), stream=s)
    bias = None if bias is None else bias.astype(mx.float32, stream=s)
    return INT8_GEMV_INT8(**gemv_int8(x, x_scale, weight, scale.astype(mx.float32, stream=s), bias, shape), stream=s)[0]


# K of the self-tests: wide loads with whole and broken steps of every shape, and single bytes.
SELFTEST_K = (8208, 67)


def _test_values(k, rows, n=37):
    """x fp32 [rows, K], weight int8 [n, K] with its extremes, scale, bias fp32 [n]; results are of the order of 1."""
    keys = mx.random.split(mx.random.key(k), 4)
    x = mx.random.normal((rows, k), key=keys[0])
    weight = mx.random.randint(-128, 128, (n, k), key=keys[1]).astype(mx.int8)
    weight[0], weight[1] = mx.array(-128, dtype=mx.int8), mx.array(127, dtype=mx.int8)
    scale = mx.random.uniform(0.5, 1.5, (n,), key=keys[2]) / (74 * k**0.5)
    return x, weight, scale, mx.random.normal((n,), key=keys[3])


def _selftest(way, dtype, how, extras):
    """Worst error of a way of int8_linear over what is allowed, against the reference on the CPU."""
    relative = {mx.float32: 1e-5, mx.float16: 2**-10, mx.bfloat16: 2**-7}[dtype]  # of halves: one unit in the last place
    worst = 0.0
    for k in SELFTEST_K:
        rows = how[0] + 1 if way == "gemv" else 8 * how[0] + 1 if way == "mma" else 35  # one more than a slice or tile
        x, weight, scale, bias = _test_values(k, rows)
        if way == "dequantize":
            y = INT8_DEQUANTIZE(**dequantize(weight, scale, dtype))[0]
            want = mx.multiply(weight.astype(mx.float32, stream=mx.cpu), scale[:, None], stream=mx.cpu)
        else:
            has_bias, activation, has_times, has_residual = extras
            x = x.astype(dtype)
            times, residual = (x[:, i : i + 37] for i in (3, 5))
            bias = bias if has_bias else None
            times, residual = times if has_times else None, residual if has_residual else None
            y = _run(way, how, x, weight, scale, bias, activation, times, residual, None)
            exact = lambda a: None if a is None else a.astype(mx.float32)  # noqa: E731  (unrounded results)
            want = linear_reference(exact(x), weight, scale, bias, activation=activation, times=exact(times),
                                    residual=exact(residual), stream=mx.cpu)  # fmt: skip
        worst = max(worst, _error(y.astype(mx.float32), want, relative))
    return worst


def _error(y, want, relative):
    """Worst |y - want| over what is allowed: `relative` of the entry and 1e-5 of the largest; not finite is infinite."""
    s = mx.cpu
    off = mx.abs(mx.subtract(y, want, stream=s), stream=s)
    size = mx.abs(want, stream=s)
    allowed = mx.add(mx.multiply(relative, size, stream=s), mx.multiply(1e-5, mx.max(size, stream=s), stream=s), stream=s)
    worst = mx.max(mx.divide(off, allowed, stream=s), stream=s).item()
    return worst if mx.all(mx.isfinite(y, stream=s), stream=s).item() else mx.inf


def _int8_selftest(shape, has_bias):
    """0 if not one bit differs from the reference on the CPU, else infinity."""
    for k in SELFTEST_K:
        rows = shape[0] + 1
        x, weight, scale, bias = _test_values(k, rows)
        x = mx.clip(mx.round(x * 50), -128, 127).astype(mx.int8)
        x[0] = mx.array(-128, dtype=mx.int8)
        x_scale, bias = mx.arange(1, rows + 1) / 70.0, bias if has_bias else None
        y = _run_int8(x, x_scale, weight, scale, bias, shape, None)
        want = reference(x, weight, scale, bias, x_scale=x_scale, stream=mx.cpu)
        if not mx.array_equal(y.view(mx.int32), want.view(mx.int32), stream=mx.cpu).item():
            return mx.inf
    return 0.0
