"""HiFT, the vocoder of CosyVoice 1 and 2: layers that look both ways, so a whole utterance (or window) at once.

Chunks are joined by who calls it: each overlaps the one before, starts from its source (`cache_source`) and is faded
into it. After upstream's `hifigan/generator.py`, HiFTGenerator.
"""

import mlx.core as mx

from mlx_cosyh3.cosyvoice.conv import ConvTranspose1d
from mlx_cosyh3.cosyvoice.f0 import F0Predictor
from mlx_cosyh3.cosyvoice.hift_decoder import Decoder, check_finite
from mlx_cosyh3.cosyvoice.hift_layers import PastConv1d
from mlx_cosyh3.cosyvoice.source import CentredSource
from mlx_cosyh3.errors import CheckpointError, CosyH3Error


class CentredHiFT(Decoder):
    """The vocoder that is not causal."""

    def __init__(self, config):
        if config.conv_pre_look_right is not None:
            raise CheckpointError("the vocoder's config has conv_pre_look_right: it is one of CosyVoice 3")
        super().__init__(config)
        c = config
        self.conv_pre = PastConv1d(c.in_channels, c.base_channels, 7)
        self.ups = [
            ConvTranspose1d(c.channels(i), c.channels(i + 1), kernel, stride=rate, padding=(kernel - rate) // 2)
            for i, (kernel, rate) in enumerate(c.upsampling)
        ]
        self.m_source = CentredSource(c)
        self.f0_predictor = F0Predictor(c.in_channels, c.f0_predictor["cond_channels"], causal=False)

    def __call__(self, mel, cache_source=None, end=None, *, key):
        """mel [B, T, 80] -> (audio, source, SourceEnd), the first two fp32 [B, N] with N = T * samples_per_frame.

        cache_source   [B, L], L <= N: the source of the overlap with the chunk before, taken in place of a new one
        end            SourceEnd of the chunk before: the source goes on in phase with it; None: from 0, as upstream
        key            an MLX random key: the source's noise and phases
        Raises CosyH3Error, naming the stage, when numbers are not finite."""
        draws = self.m_source.draw(mel.shape[0], mel.shape[1], key)
        return self.render(mel, *draws, cache_source, end)

    def render(self, mel, noise, phases, cache_source=None, end=None):
        """As __call__, with the random numbers given (see CentredSource.draw)."""
        c = self.config
        if mel.ndim != 3 or mel.shape[2] != c.in_channels or mel.shape[1] == 0:
            raise CosyH3Error(f"a vocoder's mel must be [batch, frames, {c.in_channels}], not {list(mel.shape)}")
        kept, samples = 0 if cache_source is None else cache_source.shape[1], mel.shape[1] * c.samples_per_frame
        if kept > samples:
            raise CosyH3Error(f"cache_source has {kept} samples, more than the {samples} of this chunk")
        f0 = self.f0_predictor(mel)
        source, following = self.m_source(f0, noise, phases, (cache_source, end) if kept and end is not None else None)
        if kept and end is None:
            source = mx.concatenate([cache_source, source[:, kept:]], axis=1)
        dtype = self.conv_pre.weight.dtype
        spectra = self._stft.frames(self._stft.reflect(source, True, True))
        y = self.decode(mel.astype(dtype), spectra.astype(dtype))
        audio, _ = self._stft.samples(self.spectra(y), last=True)
        audio = mx.clip(audio, -c.audio_limit, c.audio_limit)
        stages = {"mel (the flow's work)": mel, "pitch predictor": f0, "harmonic source": source, "decoder": y}
        check_finite(stages, audio, source)
        return audio, source, following
