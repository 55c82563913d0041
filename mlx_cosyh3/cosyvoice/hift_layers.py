"""What the HiFT vocoders are built of: convolutions that may remember, Snake, residual blocks, a 16-point STFT.

A causal layer takes a `Past` that holds the inputs it still needs from earlier chunks; at the start these are zeros,
so that one chunk that is everything is upstream's left padding. Without a Past a layer pads both sides (CosyVoice 1
and 2). Everything is [B, T, C]. After upstream's `hifigan/generator.py` and BigVGAN's Snake.
"""

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cosyh3.cosyvoice.conv import Conv1d
from mlx_cosyh3.kernels import _dispatch


class Past:
    """The last inputs of each causal layer of one stream."""

    def __init__(self):
        self._tails = {}  # id of a layer -> [B, n, C]

    def join(self, layer, x, left):
        """Earlier inputs that the layer's next outputs need, then x; before the first input, `left` zeros. x may be
        numpy's, always of the same kind."""
        lib, tail = np if isinstance(x, np.ndarray) else mx, self._tails.get(id(layer))
        if tail is None:
            tail = lib.zeros((x.shape[0], left, x.shape[2]), dtype=x.dtype)
        x = lib.concatenate([tail, x], axis=1)
        outputs = (x.shape[1] - layer.context - 1) // layer.stride + 1
        # A slice would keep all of x in memory; a sum is a copy.
        self._tails[id(layer)] = x[:, outputs * layer.stride :] + 0
        return x

    def keep(self, rows):
        """Go on with the first `rows` of a batch only."""
        self._tails = {layer: a[:rows] for layer, a in self._tails.items()}

    def arrays(self):
        """Those that MLX has to compute."""
        return [a for a in self._tails.values() if isinstance(a, mx.array)]


class PastConv1d(Conv1d):
    """A convolution that keeps the length (T / stride of it): causal with a Past, else centred."""

    def __init__(self, in_dims, out_dims, kernel, *, stride=1, dilation=1, padding=None):
        """padding   on each side when there is no Past; None: half of what the kernel covers"""
        padding = (kernel - 1) * dilation // 2 if padding is None else padding
        super().__init__(in_dims, out_dims, kernel, stride=stride, dilation=dilation, padding=(padding, padding))

    def __call__(self, x, past=None, left=None):
        """x [B, T, C] -> [B, T', O]. `left`: zeros before a Past's first input; None: as many as keep the length."""
        if past is None:
            return super().__call__(x)
        return super().__call__(past.join(self, x, self.context if left is None else left), padding=(0, 0))


# sin(r)^2 = z P(z) with z = r^2 and |r| <= pi / 2: Chebyshev interpolation of degree 5, error 2e-8
_SIN2 = (9.99999991e-01, -3.33333066e-01, 4.44431749e-02, -3.17239510e-03, 1.39347711e-04, -3.63079651e-06)
_PI_HIGH, _PI_LOW = 3.140625, math.pi - 3.140625  # the first has 8 bits: its multiples are exact


def sin_squared(x):
    """sin(x)^2 to 3e-7. MLX's sine on x86 is one libm call per value: the polynomial takes a sixth of its time."""
    if _dispatch.on_gpu() or x.dtype != mx.float32:
        return mx.square(mx.sin(x))
    turns = mx.round(x * (1 / math.pi))
    z = mx.square(x - turns * _PI_HIGH - turns * _PI_LOW)
    p = z * _SIN2[-1]
    for c in _SIN2[-2:0:-1]:
        p = (p + c) * z
    return (p + _SIN2[0]) * z


class Snake(nn.Module):
    """x + sin(alpha x)^2 / alpha: a ripple on the identity, one frequency per channel."""

    def __init__(self, channels):
        super().__init__()
        self.alpha = mx.ones((channels,))

    def __call__(self, x):
        return x + sin_squared(x * self.alpha) * (1 / (self.alpha + 1e-9))


class ResBlock(nn.Module):
    """Per dilation: Snake, dilated convolution, Snake, convolution, added to the input."""

    def __init__(self, channels, kernel, dilations):
        super().__init__()
        self.convs1 = [PastConv1d(channels, channels, kernel, dilation=d) for d in dilations]
        self.convs2 = [PastConv1d(channels, channels, kernel) for _ in dilations]
        self.activations1 = [Snake(channels) for _ in dilations]
        self.activations2 = [Snake(channels) for _ in dilations]

    def __call__(self, x, past=None):
        for act1, conv1, act2, conv2 in zip(self.activations1, self.convs1, self.activations2, self.convs2):
            x = x + conv2(act2(conv1(act1(x), past)), past)
        return x


def leaky_relu(x, slope):
    return mx.maximum(x, x * slope)


class STFT:
    """Short DFTs and back, as products with fixed matrices (n_fft is 16: no FFT is worth its launch).

    Hann windows, hop n_fft / 4, the ends reflected as torch's center=True has it. Signals may come in pieces. Spectra
    are [..., bins real ++ bins imaginary], with bins = n_fft / 2 + 1."""

    def __init__(self, n_fft, hop):
        self.n_fft, self.hop, self.bins, self.edge = n_fft, hop, n_fft // 2 + 1, n_fft // 2
        n, k = np.arange(n_fft), np.arange(self.bins)
        window = 0.5 - 0.5 * np.cos(2 * np.pi * n / n_fft)
        angle = 2 * np.pi * np.outer(n, k) / n_fft
        self._analysis = _constant(window[:, None] * np.concatenate([np.cos(angle), -np.sin(angle)], axis=1))
        twice = np.where((k == 0) | (k == n_fft // 2), 1, 2)[:, None] / n_fft  # the bins that stand for two
        squares = (window**2).reshape(-1, hop)  # [n_fft / hop, hop]
        self._rounds = len(squares)
        back = np.concatenate([np.cos(angle).T * twice, -np.sin(angle).T * twice]) * window
        self._synthesis = _constant(back / np.tile(squares.sum(axis=0), self._rounds))
        # The first hop that is kept, and the last, are covered by fewer windows than the others.
        half = self._rounds // 2
        self._first_gain = _constant(squares.sum(axis=0) / squares[: half + 1].sum(axis=0))
        self._last_gain = _constant(squares.sum(axis=0) / squares[half - 1 :].sum(axis=0))

    def reflect(self, x, first, last):
        """Samples [B, N] with n_fft / 2 reflected ones before (`first`: the signal begins here) and after (`last`)."""
        edge = self.edge
        before, after = [x[:, edge:0:-1]] if first else [], [x[:, -2 : -edge - 2 : -1]] if last else []
        return mx.concatenate([*before, x, *after], axis=1)

    def reflect_at(self, x, ends):
        """Samples [B, N] with those from ends, int [B, 1], on replaced by the reflection of the ones before: n_fft / 2
        of them, and whatever behind those."""
        at = mx.arange(x.shape[1])[None]
        return mx.take_along_axis(x, mx.clip(mx.where(at < ends, at, 2 * ends - 2 - at), 0, x.shape[1] - 1), axis=1)

    def frames(self, x):
        """Samples [B, N] -> spectra [B, (N - n_fft) / hop + 1, 2 bins]; N is a multiple of hop."""
        blocks = x.reshape(x.shape[0], -1, self.hop)
        count = blocks.shape[1] - self._rounds + 1
        return mx.concatenate([blocks[:, r : r + count] for r in range(self._rounds)], axis=-1) @ self._analysis

    def samples(self, spectra, carry=None, last=False, ends=None):
        """Spectra [B, F, 2 bins] -> (the samples [B, hop F] that they complete, what to carry into the next call).

        carry   what the call before gave: the hops it left unfinished; None: the signal begins here, with n_fft / 2
                samples of padding, which are dropped
        last    the signal ends here: one hop more
        ends    int [B, 1], in place of `last`, for signals that end apart: how many of these spectra, and of those to
                come, are theirs; 0 or less: they have ended before. What follows their ends means nothing"""
        if ends is not None:
            spectra = mx.where((mx.arange(spectra.shape[1]) < ends)[..., None], spectra, 0)
        pieces = (spectra @ self._synthesis).reshape(*spectra.shape[:2], self._rounds, self.hop)
        R, F = self._rounds, spectra.shape[1]
        hops = sum(mx.pad(pieces[:, :, r], [(0, 0), (r, R - 1 - r), (0, 0)]) for r in range(R))  # [B, F + R - 1, hop]
        if carry is not None:
            hops = hops + mx.pad(carry, [(0, 0), (0, F), (0, 0)])
        done, rest = hops[:, :F], hops[:, F:]
        if ends is not None:
            done = mx.where((mx.arange(F) == ends)[..., None], done * self._last_gain, done)
        if carry is None:
            done = mx.concatenate([done[:, R // 2 : R // 2 + 1] * self._first_gain, done[:, R // 2 + 1 :]], axis=1)
        if last:
            done = mx.concatenate([done, rest[:, :1] * self._last_gain], axis=1)
        return done.reshape(done.shape[0], -1), rest + 0


def _constant(a):
    a = mx.array(a.astype(np.float32))
    mx.eval(a)
    return a
