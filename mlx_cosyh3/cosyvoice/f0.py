"""The pitch of a mel spectrogram: five convolutions, Hz per frame. After upstream's `hifigan/f0_predictor.py`.

The harmonic source integrates this pitch, so an error grows into a phase error: CosyVoice 3 computes it in float64.
No GPU of ours has that, and MLX's CPU stream has it with a BLAS that is slow on Linux (1 s for 10 s of audio at full
size on a machine with an H200), so numpy does it, which brings a BLAS of its own. For the same reason the weight norm stays unfolded in the files: folded to fp32
the pitch is off by 1e-7 to 2e-6, and the audio by 2e-4 after 4 s, by 1e-2 after a minute.
"""

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cosyh3.cosyvoice.conv import conv1d


class NormedConv(nn.Module):
    """The weights of a convolution, magnitude apart from direction: weight = g v / |v|, a norm per output channel."""

    stride = 1

    def __init__(self, in_dims, out_dims, kernel):
        super().__init__()
        self.weight_g = mx.zeros((out_dims,))
        self.weight_v = mx.zeros((out_dims, kernel, in_dims))
        self.bias = mx.zeros((out_dims,))

    @property
    def context(self):
        return self.weight_v.shape[1] - 1

    def folded(self):
        """(weight [O, K, I], bias [O]), numpy float64."""
        v, g, bias = (np.array(a.astype(mx.float32)).astype(np.float64) for a in (self.weight_v, self.weight_g, self.bias))
        return v * (g / np.sqrt(np.sum(np.square(v), axis=(1, 2))))[:, None, None], bias


class ELU(nn.Module):
    def __call__(self, x):
        return mx.where(x > 0, x, mx.expm1(x))


class F0Predictor(nn.Module):
    """Mel -> pitch. `causal`: the first layer looks ahead (kernel - 1 frames), the others look back only.

    precise   compute in float64, with numpy. False: in fp32 where the model runs; no ear will notice, but the audio
              drifts from upstream's as the utterance gets longer (1e-3 after 4 s)"""

    def __init__(self, mel_bins, channels, *, causal):
        super().__init__()
        self.precise = causal
        first = NormedConv(mel_bins, channels, 4 if causal else 3)
        convs = [first, *(NormedConv(channels, channels, 3) for _ in range(4))]
        self.condnet = [layer for conv in convs for layer in (conv, ELU())]  # upstream's indices: 0, 2, 4, 6, 8
        self.classifier = nn.Linear(channels, 1)
        self._ready = None  # (dtype, parameters, what is computed with)

    @property
    def look_ahead(self):
        return self.condnet[0].context

    def __call__(self, mel, past=None):
        """mel [B, T, 80] -> Hz, fp32 [B, T]. With a Past: mel [B, n + look_ahead, 80] -> the next n frames."""
        if self.precise:
            with np.errstate(invalid="ignore"):  # what is not finite is reported with the stage it began in
                hz = self._precise(np.array(mel.astype(mx.float32)).astype(np.float64), past)
            return mx.array(hz.astype(np.float32))
        x = mel.astype(mx.float32)
        *convs, (weight, bias) = self._weights(mx.float32)
        for i, (layer, w) in enumerate(zip(self.condnet[::2], convs)):
            if past is None:
                x = mx.pad(x, [(0, 0), (1, 1), (0, 0)])
            elif i > 0:
                x = past.join(layer, x, layer.context)
            x = self.condnet[1](conv1d(x, *w))
        return mx.abs(x @ weight.T + bias)[..., 0]

    def _precise(self, x, past):
        *convs, (weight, bias) = self._weights(np.float64)
        for i, (layer, (w, b)) in enumerate(zip(self.condnet[::2], convs)):
            if past is None:
                x = np.pad(x, [(0, 0), (1, 1), (0, 0)])
            elif i > 0:
                x = past.join(layer, x, layer.context)
            n = x.shape[1] - layer.context
            x = sum(x[:, k : k + n] @ w[:, k].T for k in range(w.shape[1])) + b
            x = np.where(x > 0, x, np.expm1(np.minimum(x, 0)))
        return np.abs(x @ weight.T + bias)[..., 0]

    def _weights(self, dtype):
        """(weight, bias) of each layer in `dtype`: made at first use, and again when parameters were exchanged."""
        convs = self.condnet[::2]
        now = [a for c in convs for a in (c.weight_v, c.weight_g, c.bias)]
        now += [self.classifier.weight, self.classifier.bias]
        ready = self._ready  # read once: another thread may be doing the same
        if ready is None or ready[0] != dtype or any(a is not b for a, b in zip(ready[1], now)):
            pairs = [c.folded() for c in convs]
            pairs.append(tuple(np.array(a.astype(mx.float32)).astype(np.float64) for a in now[-2:]))
            if dtype != np.float64:
                pairs = [tuple(mx.array(a.astype(np.float32)) for a in pair) for pair in pairs]
            self._ready = ready = (dtype, now, pairs)
        return ready[2]
