"""1-D convolutions over [B, T, C], in the form that is fast on the device at hand.

MLX's CPU back end computes dilated, grouped and transposed convolutions with naive loops, and plain ones with a BLAS
call that copies its input K times. A sum of K shifted matrix products, each added by the BLAS call itself, is 2 to 60
times faster there, and equal to rounding. On a GPU the built-in operations are used, but for wide kernels on CUDA: for
those cuDNN may take an FFT that writes outside of its arrays (seen with 31 taps in 16 groups, 50 to 80 frames, fp32, by
compute-sanitizer; MLX 0.32.4). Weights are MLX's: [out, K, in / groups].

One core of an EPYC 9004, OpenBLAS, ms and MB of scratch, 1 s of audio in a full-size vocoder:
                                 products, added   products + sums   im2col, 1 product   mx.conv1d   stock BLAS: these 4
    256 -> 256 k11 d5   T  400      6.7    3.2        9.3    6.8        6.1    4.3       (naive)     113  112  290    -
    128 -> 128 k11 d1   T 2000      8.0    1.7       10.0   11.9       12.2   12.2       12.0        120  145  370  307
     64 ->  64 k11 d5   T 6000      7.0    1.7        9.8   16.9       11.9   18.3       (naive)      90   91  278    -
     18 -> 256 k30 s15  T 6000      2.4    1.0        4.2    6.7        1.4    1.3        1.5         33   38   60   60
"""

import mlx.core as mx
import mlx.nn as nn

from mlx_cosyh3.kernels import _dispatch

WIDE = 16  # taps: a wider kernel is one product of windows on CUDA


def conv1d(x, weight, bias=None, *, stride=1, dilation=1, groups=1, padding=(0, 0)):
    """x [B, T, C], weight [O, K, C / groups] -> [B, T', O]; `padding`: zeros before and after, in samples.

    T' = floor((T + sum(padding) - dilation * (K - 1) - 1) / stride) + 1."""
    if any(padding):
        x = mx.pad(x, [(0, 0), tuple(padding), (0, 0)])
    if _dispatch.on_gpu() and (weight.shape[1] <= WIDE or mx.metal.is_available()):
        y = mx.conv1d(x, weight, stride=stride, dilation=dilation, groups=groups)
    elif _dispatch.on_gpu():
        y = _window_product(x, weight, stride, dilation, groups)
    else:
        y = _shifted_products(x, weight, stride, dilation, groups)
    return y if bias is None else y + bias


def conv_transpose1d(x, weight, bias=None, *, stride=1, padding=0):
    """x [B, T, C], weight [O, K, C] -> [B, (T - 1) * stride - 2 * padding + K, O], as torch.nn.ConvTranspose1d."""
    if _dispatch.on_gpu():
        y = mx.conv_transpose1d(x, weight, stride=stride, padding=padding)
    else:
        y = _overlap_add(x, weight, stride)
        y = y[:, padding : y.shape[1] - padding]
    return y if bias is None else y + bias


def _shifted_products(x, weight, stride, dilation, groups):
    B, T, C = x.shape
    O, K, _ = weight.shape
    length = (T - dilation * (K - 1) - 1) // stride + 1
    if groups == C == O:  # depthwise: no products worth a BLAS call
        taps = (x[:, k * dilation :: stride][:, :length] * weight[:, k, 0] for k in range(K))
        return sum(taps)
    if groups == 1:
        tap = lambda k: (x[:, k * dilation :: stride][:, :length], weight[:, k].T)  # noqa: E731 [B, T', C], [C, O]
    else:
        x = x.reshape(B, T, groups, C // groups).transpose(0, 2, 1, 3)  # [B, G, T, C/G]
        w = weight.reshape(groups, O // groups, K, C // groups).transpose(2, 0, 3, 1)  # [K, G, C/G, O/G]
        tap = lambda k: (x[:, :, k * dilation :: stride][:, :, :length], w[k])  # noqa: E731
    a, b = tap(0)
    y = a @ b
    for k in range(1, K):
        y = mx.addmm(y, *tap(k))
    return y if groups == 1 else y.transpose(0, 2, 1, 3).reshape(B, length, O)


def _window_product(x, weight, stride, dilation, groups):
    """All the inputs of an output side by side, and one product a group."""
    B, T, C = x.shape
    O, K, _ = weight.shape
    length, G = (T - dilation * (K - 1) - 1) // stride + 1, groups
    x = mx.contiguous(x)
    steps = T * C, C // G, stride * C, dilation * C, 1
    windows = mx.as_strided(x, (B, G, length, K, C // G), steps).reshape(B, G, length, -1)
    w = weight.reshape(G, O // G, -1).swapaxes(1, 2)  # [G, K C/G, O/G]
    return (windows @ w).swapaxes(1, 2).reshape(B, length, O)


def _overlap_add(x, weight, stride):
    """One product for all taps, then each tap's slice added where it belongs."""
    B, T, C = x.shape
    O, K, _ = weight.shape
    rounds = -(-K // stride)  # how many inputs touch one output
    taps = (x.reshape(B * T, C) @ weight.transpose(2, 1, 0).reshape(C, K * O)).reshape(B, T, K, O)
    taps = mx.pad(taps, [(0, 0), (0, 0), (0, rounds * stride - K), (0, 0)]).reshape(B, T, rounds, stride, O)
    y = mx.zeros((B, T + rounds - 1, stride, O), dtype=taps.dtype)
    for r in range(rounds):
        y = y + mx.pad(taps[:, :, r], [(0, 0), (r, rounds - 1 - r), (0, 0), (0, 0)])
    return y.reshape(B, -1, O)[:, : (T - 1) * stride + K]


class Conv1d(nn.Module):
    """A convolution with its weights; `padding` (before, after), both 0 for one whose input brings its own context."""

    def __init__(self, in_dims, out_dims, kernel, *, stride=1, dilation=1, groups=1, padding=(0, 0), bias=True):
        super().__init__()
        self.weight = mx.zeros((out_dims, kernel, in_dims // groups))
        if bias:
            self.bias = mx.zeros((out_dims,))
        self._how = {"stride": stride, "dilation": dilation, "groups": groups, "padding": padding}

    @property
    def stride(self):
        return self._how["stride"]

    @property
    def context(self):
        """How many earlier samples an output needs besides its own, when all padding is on the left."""
        return self._how["dilation"] * (self.weight.shape[1] - 1)

    def __call__(self, x, padding=None):
        """x [B, T, C] -> [B, T', O]; `padding` in place of the layer's own."""
        how = self._how if padding is None else self._how | {"padding": padding}
        return conv1d(x, self.weight, self.get("bias"), **how)


class ConvTranspose1d(nn.Module):
    """A transposed convolution with its weights [out, K, in]."""

    def __init__(self, in_dims, out_dims, kernel, *, stride=1, padding=0):
        super().__init__()
        self.weight = mx.zeros((out_dims, kernel, in_dims))
        self.bias = mx.zeros((out_dims,))
        self._how = {"stride": stride, "padding": padding}

    def __call__(self, x):
        return conv_transpose1d(x, self.weight, self.bias, **self._how)
