"""The pitch of a mel spectrogram: five convolutions, Hz per frame. After upstream's `hifigan/f0_predictor.py`.

The harmonic source integrates this pitch, so an error grows into a phase error: CosyVoice 3 computes it in float64,
which MLX has on the CPU stream only. For the same reason the weight norm stays unfolded in the files: folded to fp32
the pitch is off by 1e-7 to 2e-6, and the audio by 2e-4 after 4 s, by 1e-2 after a minute.
"""

import mlx.core as mx
import mlx.nn as nn

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

    def folded(self, dtype):
        """(weight [O, K, I], bias [O]), folded in `dtype` (the norm in float64)."""
        norm = mx.sqrt(mx.sum(mx.square(self.weight_v.astype(mx.float64)), axis=(1, 2)))
        v, g, bias = (a.astype(dtype) for a in (self.weight_v, self.weight_g, self.bias))
        return v * (g / norm.astype(dtype))[:, None, None], bias


class ELU(nn.Module):
    def __call__(self, x):
        return mx.where(x > 0, x, mx.expm1(x))


class F0Predictor(nn.Module):
    """Mel -> pitch. `causal`: the first layer looks ahead (kernel - 1 frames), the others look back only.

    precise   compute in float64 on the CPU stream. False: in fp32 where the model runs; no ear will notice, but the
              audio drifts from upstream's as the utterance gets longer (1e-3 after 4 s)"""

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
        if not self.precise:
            return self._run(mel.astype(mx.float32), past)
        with mx.stream(mx.cpu):
            return self._run(mel.astype(mx.float64), past).astype(mx.float32)

    def _run(self, x, past):
        *convs, (weight, bias) = self._weights(x.dtype)
        for i, (layer, w) in enumerate(zip(self.condnet[::2], convs)):
            if past is None:
                x = mx.pad(x, [(0, 0), (1, 1), (0, 0)])
            elif i > 0:
                x = past.join(layer, x, layer.context)
            x = self.condnet[1](conv1d(x, *w))
        return mx.abs(x @ weight.T + bias)[..., 0]

    def _weights(self, dtype):
        """(weight, bias) of each layer in `dtype`: made at first use, and again when parameters were exchanged."""
        convs = self.condnet[::2]
        now = [a for c in convs for a in (c.weight_v, c.weight_g, c.bias)]
        now += [self.classifier.weight, self.classifier.bias]
        ready = self._ready  # read once: another thread may be doing the same
        if ready is None or ready[0] != dtype or any(a is not b for a, b in zip(ready[1], now)):
            with mx.stream(mx.cpu):
                pairs = [c.folded(dtype) for c in convs]
                pairs.append((self.classifier.weight.astype(dtype), self.classifier.bias.astype(dtype)))
                mx.eval(pairs)
            self._ready = ready = (dtype, now, pairs)
        return ready[2]
