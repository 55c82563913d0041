"""Softmax with scale and mask: y = softmax(scale * x + mask) along one axis.

    m = max_j(scale x_j + mask_j);  e_j = exp(scale x_j + mask_j - m);  y_j = e_j / sum_j e_j

x       any shape, float32 | float16 | bfloat16; the result has x's shape and dtype
mask    None, boolean (True = keep) or additive (floating), broadcastable to x
Everything in between is fp32. A row with no finite entry left (all masked, all -inf) gives zeros, where MLX's own
softmax gives NaN. A NaN in a row stays NaN.
"""

import mlx.core as mx

from mlx_cosyh3.kernels._dispatch import pick

KERNELS = {}


def softmax(x, axis=-1, *, scale=1.0, mask=None, stream=None):
    """Softmax of `scale * x + mask` along `axis`, accumulated in fp32; fully masked rows give zeros."""
    if not mx.issubdtype(x.dtype, mx.floating):
        raise TypeError(f"softmax takes floating input, not {x.dtype}")
    return pick(KERNELS, reference, stream)(x, axis, scale=scale, mask=mask, stream=stream)


def reference(x, axis=-1, *, scale=1.0, mask=None, stream=None):
    """`softmax` in plain MLX ops."""
    s = stream
    z = mx.multiply(x.astype(mx.float32, stream=s), scale, stream=s)
    if mask is not None and mask.dtype == mx.bool_:
        z = mx.where(mask, z, -mx.inf, stream=s)
    elif mask is not None:
        z = mx.add(z, mask.astype(mx.float32, stream=s), stream=s)
    peak = mx.max(z, axis=axis, keepdims=True, stream=s)
    peak = mx.where(mx.equal(peak, -mx.inf, stream=s), 0.0, peak, stream=s)  # exp(-inf - 0) = 0, not NaN
    e = mx.exp(mx.subtract(z, peak, stream=s), stream=s)
    total = mx.sum(e, axis=axis, keepdims=True, stream=s)
    total = mx.where(mx.equal(total, 0.0, stream=s), 1.0, total, stream=s)
    return mx.divide(e, total, stream=s).astype(x.dtype, stream=s)
