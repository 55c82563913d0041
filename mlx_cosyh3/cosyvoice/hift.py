"""HiFT, the vocoder of CosyVoice 3: mel [B, T, 80] at 50 frames/s -> audio at 24 kHz, in chunks that carry their state.

Every layer looks back only, but for the first of the pitch predictor (3 frames ahead) and conv_pre (4 more). So one
computation serves all: a chunk that is everything is the offline result, and a short one costs the same whenever it
comes. After upstream's `hifigan/generator.py`, CausalHiFTGenerator.
"""

import mlx.core as mx

from mlx_cosyh3.cosyvoice.conv import Conv1d
from mlx_cosyh3.cosyvoice.f0 import F0Predictor
from mlx_cosyh3.cosyvoice.hift_decoder import Decoder, HiFTConfig, Upsample, check_finite  # noqa: F401
from mlx_cosyh3.cosyvoice.hift_layers import Past
from mlx_cosyh3.cosyvoice.hift_weights import sanitize  # noqa: F401 - belongs to this part
from mlx_cosyh3.cosyvoice.source import CausalSource
from mlx_cosyh3.cosyvoice.speed import change_speed, speed_stream  # noqa: F401 - what one does to a mel before
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.kernels import _dispatch

# Mel frames at a time offline, which bounds memory: 2.1 MB a frame at full size. Few and small arrays stay in a CPU's
# cache; many keep a GPU busy.
CPU_BLOCK, GPU_BLOCK = 50, 250


class HiFT(Decoder):
    """The causal vocoder."""

    def __init__(self, config):
        if config.conv_pre_look_right is None:
            raise CheckpointError("the vocoder's config lacks conv_pre_look_right: it is not one of CosyVoice 3")
        super().__init__(config)
        c = config
        self.conv_pre = Conv1d(c.in_channels, c.base_channels, c.conv_pre_look_right + 1)
        self.ups = [Upsample(c.channels(i), c.channels(i + 1), *kr) for i, kr in enumerate(c.upsampling)]
        self.m_source = CausalSource(c)
        self.f0_predictor = F0Predictor(c.in_channels, c.f0_predictor["cond_channels"], causal=True)

    @property
    def look_ahead(self):
        """Mel frames that must follow a frame before `finalize=False` and streams give its audio (upstream's 8)."""
        return self.f0_predictor.look_ahead + self.config.conv_pre_look_right + 1

    def __call__(self, mel, finalize=True):
        """mel [B, T, 80] -> audio fp32 [B, T * 480] in -audio_limit .. audio_limit.

        finalize   False: more frames will follow these, so the last `look_ahead` of them make no audio yet
        Raises CosyH3Error, naming the stage, when numbers are not finite."""
        stream, block = self.stream(), GPU_BLOCK if _dispatch.on_gpu() else CPU_BLOCK
        starts = range(0, max(mel.shape[1], 1), block)
        pieces = [stream.add(mel[:, i : i + block], last=finalize and i == starts[-1]) for i in starts]
        return mx.concatenate(pieces, axis=1)

    def stream(self):
        """A HiFTStream, whose add(mel, last) gives the audio of one utterance chunk by chunk."""
        return HiFTStream(self)


class HiFTStream:
    """The vocoder on one utterance: what each `add` leaves behind for the next.

    Counted from the utterance's start: `_arrived` mel frames, the pitch of `_pitched`, the spectra of `_decoded`."""

    def __init__(self, hift):
        self._hift = hift
        self._past = Past()
        self._mel = None  # [B, n, 80] from frame `_decoded` on
        self._arrived = self._pitched = self._decoded = 0
        self._turns = None  # the source's phase
        self._source = None  # its samples that spectra still need, [B, n]
        self._overlap = None  # unfinished hops of the iSTFT
        self._held = None  # samples that are done, but later than upstream would give them
        self._ended = False

    def add(self, mel, last=False):
        """mel [B, n, 80], any n -> audio [B, m] fp32: all that can be known now, as upstream's schedule has it.

        After T frames in all there are (T - look_ahead) * 480 samples in all; after the `last`, T * 480."""
        if self._ended:
            raise CosyH3Error("this utterance has ended: begin another with stream()")
        if mel.ndim != 3 or mel.shape[2] != self._hift.config.in_channels:
            bins = self._hift.config.in_channels
            raise CosyH3Error(f"a vocoder's mel must be [batch, frames, {bins}], not {list(mel.shape)}")
        self._ended = last
        self._mel = mel if self._mel is None else mx.concatenate([self._mel, mel], axis=1)
        self._arrived += mel.shape[1]
        stages = {"mel (the flow's work)": mel}
        f0 = self._pitch(last)
        if f0 is not None:
            stages["pitch predictor"] = f0
            stages["harmonic source"] = source = self._excite(f0, last)
            self._source = source if self._source is None else mx.concatenate([self._source, source], axis=1)
        audio = mx.zeros((mel.shape[0], 0))
        y = self._decode(last)
        if y is not None:
            stages["decoder"] = y
            audio = self._synthesise(y, last)
        self._settle(audio, stages)
        return audio

    def _pitch(self, last):
        """Pitch [B, n] of the frames whose right context has arrived, or None."""
        predictor = self._hift.f0_predictor
        ready = self._arrived - (0 if last else predictor.look_ahead)
        if ready <= self._pitched:
            return None
        mel = self._mel[:, self._pitched - self._decoded :]
        if last:
            mel = mx.pad(mel, [(0, 0), (0, predictor.look_ahead), (0, 0)])
        return predictor(mel, self._past)

    def _excite(self, f0, last):
        """The source [B, n * 480] of new frames, with its reflections at the utterance's ends."""
        source, self._turns = self._hift.m_source(f0, self._pitched, self._turns)
        first = self._pitched == 0
        self._pitched += f0.shape[1]
        return self._hift._stft.reflect(source, first, last)

    def _decode(self, last):
        """The decoder's output for the frames whose right context has arrived, or None."""
        hift, c = self._hift, self._hift.config
        right = c.conv_pre_look_right
        n = self._pitched - self._decoded - (0 if last else right)
        if n <= 0:
            return None
        first = self._decoded == 0
        mel = self._mel[:, : n + right]
        if last:
            mel = mx.pad(mel, [(0, 0), (0, right), (0, 0)])
        self._mel = self._mel[:, n:] + 0
        self._decoded += n
        stft = hift._stft
        count = n * c.samples_per_frame // stft.hop + first
        spectra = stft.frames(self._source[:, : (count - 1) * stft.hop + stft.n_fft])
        self._source = self._source[:, count * stft.hop :] + 0
        dtype = hift.conv_pre.weight.dtype
        return hift.decode(mel.astype(dtype), spectra.astype(dtype), self._past, first)

    def _synthesise(self, y, last):
        """New spectra -> samples, but for those that upstream's schedule gives later."""
        hift, c = self._hift, self._hift.config
        audio, self._overlap = hift._stft.samples(hift.spectra(y), self._overlap, last)
        audio = mx.clip(audio, -c.audio_limit, c.audio_limit)
        if self._held is not None:
            audio = mx.concatenate([self._held, audio], axis=1)
        if last:
            return audio
        given = audio.shape[1] - (c.samples_per_frame - hift._stft.hop)
        self._held = audio[:, given:] + 0
        return audio[:, :given]

    def _settle(self, audio, stages):
        """Compute what this chunk gives and leaves; raise if some of it is not a number."""
        state = (self._mel, self._source, self._overlap, self._held)
        check_finite(stages, audio, *self._past.arrays(), *(a for a in state if a is not None))
