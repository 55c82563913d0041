"""Linear interpolation along time, rounded as PyTorch's F.interpolate(mode="linear", align_corners=False) does."""

import mlx.core as mx
import numpy as np


def interpolate(x, size):
    """x [B, T, C] -> [B, size, C]: frame i is a mix of the two around (i + 0.5) * T / size - 0.5, ends held.

    Rounded as torch does: the ratio to float32, then a fused multiply-add. It moves positions near 10000 by a
    thousandth."""
    T = x.shape[1]
    if T == size:
        return x
    ratio = np.float64(np.float32(T) / np.float32(size))
    return between(x, ratio * (np.arange(size) + 0.5) - 0.5)


def between(x, positions):
    """x [B, T, C] at fractional frames, numpy float64 [n], those outside taken as the ends -> [B, n, C]."""
    last = x.shape[1] - 1
    at = np.maximum(positions, 0).astype(np.float32)
    below = np.minimum(at.astype(np.int32), last)
    share = mx.array((at - below).clip(0, 1).astype(np.float32))[:, None]
    return (1 - share) * x[:, mx.array(below)] + share * x[:, mx.array(np.minimum(below + 1, last))]
