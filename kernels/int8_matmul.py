"""INT8 matrix product: y = x W^T with W stored as int8 and one fp32 scale per output.

    weight-only   x [..., K] float32 | float16 | bfloat16:   y_n = scale_n sum_k x_k w_nk + bias_n   fp32 accumulation
    int8 x int8   x [..., K] int8, x_scale [...] fp32 per row:
                  y_n = (x_scale (float) sum_k x_k w_nk) scale_n + bias_n                          int32 accumulation

weight  int8 [N, K], scale fp32 [N], bias [N] or None. The result is [..., N], in x's dtype (fp32 for int8 x).

The int32 sum is exact for every K <= 2^31 / 127^2 (133,144), so int8 x int8 gives the same bits on every device: one
conversion of the sum to fp32, times x_scale, times scale, plus bias, each rounded once, never contracted.
MLX has no integer GEMM; the reference is exact all the same: products of int8 are integers, and an fp32 GEMM over
at most 1,024 of them stays below 2^24 (1,040 x 127^2; 1,024 x 128^2 is just 2^24), so every partial sum is exact in
any order; blocks are added in int32. TF32 and bf16 hold int8 values exactly, too.
"""

import mlx.core as mx

from mlx_cosyh3.kernels._dispatch import pick

KERNELS = {}

EXACT_K = 1024  # 1024 * 128 * 128 = 2^24: the longest block whose fp32 sum is exact


def int8_matmul(x, weight, scale, bias=None, *, x_scale=None, stream=None):
    """`x @ weight.T` for int8 `weight` [out, in] with fp32 `scale` [out]; see the module for both forms.

    Raises TypeError for other dtypes, ValueError for shapes that do not fit."""
    if weight.dtype != mx.int8 or weight.ndim != 2:
        raise TypeError(f"int8_matmul: weight must be int8 [out, in], not {weight.dtype} {list(weight.shape)}")
    if (x.dtype == mx.int8) != (x_scale is not None):
        raise TypeError(f"int8_matmul: x_scale goes with int8 x and only with it (x is {x.dtype})")
    if x.dtype != mx.int8 and not mx.issubdtype(x.dtype, mx.floating):
        raise TypeError(f"int8_matmul: x must be floating or int8, not {x.dtype}")
    out_dims, in_dims = weight.shape
    if x.shape[-1] != in_dims or scale.shape != (out_dims,):
        raise ValueError(
            f"int8_matmul: x {list(x.shape)}, weight {[out_dims, in_dims]}, scale {list(scale.shape)} do not fit"
        )
    if x_scale is not None and x_scale.shape != x.shape[:-1]:
        raise ValueError(f"int8_matmul: x_scale {list(x_scale.shape)} is not one value per row of x {list(x.shape)}")
    return pick(KERNELS, reference, stream)(x, weight, scale, bias, x_scale=x_scale, stream=stream)


def reference(x, weight, scale, bias=None, *, x_scale=None, stream=None):
    """`int8_matmul` in plain MLX ops."""
    s = stream
    dtype = mx.float32 if x.dtype == mx.int8 else x.dtype
    if x.dtype == mx.int8:
        y = _exact_sum(x, weight, s).astype(mx.float32, stream=s)  # [..., out]
        y = mx.multiply(y, mx.expand_dims(x_scale, -1, stream=s), stream=s)
    else:
        w = mx.transpose(weight.astype(mx.float32, stream=s), stream=s)
        y = mx.matmul(x.astype(mx.float32, stream=s), w, stream=s)
    y = mx.multiply(y, scale, stream=s)
    if bias is not None:
        y = mx.add(y, bias.astype(mx.float32, stream=s), stream=s)
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
