"""Per-output-channel symmetric int8: the format of `-q int8`, and the layers that compute with it.

A weight [out, in] is stored as int8 [out, in] and one fp32 scale per output row: w = q * scale[:, None],
q = round(w / scale) in -127..127, scale = max|row| / 127. The error of an entry is at most scale / 2.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cosyh3.kernels import int8_matmul
from mlx_cosyh3.kernels.int8_matmul import int8_linear, repack


def quantize_int8(weight):
    """Quantise `weight`, numpy fp32 [out, in] -> (int8 [out, in], fp32 scale [out]). A row of zeros gets scale 1."""
    scale = np.abs(weight).max(axis=1) / np.float32(127)
    scale = np.where(scale > 0, scale, np.float32(1))  # of zeros, or of numbers so small that the scale underflows
    q = np.rint(weight / scale[:, None]).clip(-127, 127).astype(np.int8)
    return q, scale


class Int8Linear(nn.Module):
    """A linear layer with an int8 weight: x [..., in] floating -> [..., out] in x's dtype."""

    def __init__(self, input_dims, output_dims, bias=True):
        super().__init__()
        self.weight = mx.zeros((output_dims, input_dims), dtype=mx.int8)
        self.scale = mx.ones((output_dims,))
        if bias:
            self.bias = mx.zeros((output_dims,))
        self._affine = None
        self.freeze()

    def __call__(self, x, activation=None, times=None, residual=None):
        """activation(x W^T + bias) * times + residual, rounded once: see `int8_linear`. With SiLU,
        `down(gate(x, "silu", times=up(x)))` is a gated MLP."""
        ending = {"activation": activation, "times": times, "residual": residual}
        return int8_linear(x, self.weight, self.scale, self.get("bias"), **ending, affine=self._affine)

    def keep_affine(self, dtype):
        """Keep a second copy of the weight, for MLX's own product with x of `dtype`, which is faster on some GPUs
        (`BREAK_EVEN`). It takes as much memory as the first, so both are no smaller than float16."""
        self._affine = repack(self.weight, self.scale, dtype)


class Int8Embedding(nn.Module):
    """An int8 embedding table that also serves as the tied head. `dtype` is what a look-up returns."""

    def __init__(self, num_embeddings, dims, dtype=mx.float32):
        super().__init__()
        self.weight = mx.zeros((num_embeddings, dims), dtype=mx.int8)
        self.scale = mx.ones((num_embeddings,))
        self._dtype = dtype
        self.freeze()

    def __call__(self, ids):
        return (self.weight[ids].astype(mx.float32) * self.scale[ids][..., None]).astype(self._dtype)

    def as_linear(self, x):
        return int8_matmul(x, self.weight, self.scale)
