"""HiFT, the vocoder of CosyVoice 3: mel [B, T, 80] at 50 frames/s -> audio at 24 kHz, in chunks that carry their state.

Every layer looks back only, but for the first of the pitch predictor (3 frames ahead) and conv_pre (4 more). So one
computation serves all: a chunk that is everything is the offline result, and a short one costs the same whenever it
comes. After upstream's `hifigan/generator.py`, CausalHiFTGenerator.
"""

import mlx.core as mx

from mlx_cosyh3.cosyvoice.causal_flow import default_budget
from mlx_cosyh3.cosyvoice.conv import Conv1d
from mlx_cosyh3.cosyvoice.f0 import F0Predictor
from mlx_cosyh3.cosyvoice.hift_decoder import Decoder, HiFTConfig, Upsample, check_finite  # noqa: F401
from mlx_cosyh3.cosyvoice.hift_layers import Past
from mlx_cosyh3.cosyvoice.hift_weights import sanitize  # noqa: F401 - belongs to this part
from mlx_cosyh3.cosyvoice.source import CausalSource
from mlx_cosyh3.cosyvoice.speed import change_speed, speed_stream  # noqa: F401 - what one does to a mel before
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.kernels import _dispatch

# Mel frames at a time offline, which bounds memory. Few and small arrays stay in a CPU's cache; many keep a GPU busy.
CPU_BLOCK, GPU_BLOCK = 50, 250
FRAME_BYTES = 2.1e6  # that a frame takes at full size


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

    def together(self, mels, on_block=None):
        """The audio of several utterances in one batch -> a list of fp32 [1, T * 480]: each what `self` makes of the
        row alone, but for what sums in another order round differently.

        mels       [1, T, 80] of each, T of its own
        on_block   called after each block of frames; what it raises ends the work
        Errors are those of `self`: one row that has them fails all."""
        order = sorted(range(len(mels)), key=lambda r: -mels[r].shape[1])  # rows leave from the end
        lengths = [mels[r].shape[1] for r in order]
        total, room = max(lengths, default=0) + self.look_ahead, _room()
        rows = [mx.pad(mels[r], [(0, 0), (0, total - mels[r].shape[1]), (0, 0)]) for r in order]
        stream, pieces, start = HiFTStream(self, lengths), {r: [] for r in order}, 0
        while rows:
            stop = start + max(room // len(rows), 1)
            stop = total if total - stop <= self.look_ahead else stop
            audio = stream.add(mx.concatenate([mel[:, start:stop] for mel in rows]))
            for i, r in enumerate(order[: len(rows)]):
                pieces[r].append(audio[i : i + 1])
            rows = rows[: sum(n + self.look_ahead > stop for n in lengths)]
            stream.keep(len(rows))
            start = stop
            if on_block is not None:
                on_block()
        size = self.config.samples_per_frame
        return [mx.concatenate(pieces[r], axis=1)[:, : mel.shape[1] * size] for r, mel in enumerate(mels)]

    def stream(self):
        """A HiFTStream, whose add(mel, last) gives the audio of one utterance chunk by chunk."""
        return HiFTStream(self)


def _room():
    """Mel frames of a block of `together`, of all its rows: on a GPU what an eighth of its memory holds."""
    return max(int(default_budget() / 2 / FRAME_BYTES), GPU_BLOCK) if _dispatch.on_gpu() else 2 * CPU_BLOCK


class HiFTStream:
    """The vocoder on one utterance: what each `add` leaves behind for the next.

    Counted from the utterance's start: `_arrived` mel frames, the pitch of `_pitched`, the spectra of `_decoded`.

    lengths   mel frames of each of several utterances, behind which zeros follow without a `last`: there each ends, as
              far as its own samples go"""

    def __init__(self, hift, lengths=None):
        self._hift = hift
        self._lengths = None if lengths is None else mx.array(lengths)[:, None]  # [B, 1]
        self._past = Past()
        self._mel = None  # [B, n, 80] from frame `_decoded` on
        self._arrived = self._pitched = self._decoded = 0
        self._turns = None  # the source's phase
        self._source = None  # its samples that spectra still need, [B, n]
        self._overlap = None  # unfinished hops of the iSTFT
        self._held = None  # samples that are done, but later than upstream would give them
        self._ended = False

    def keep(self, rows):
        """Go on with the first `rows` utterances only."""
        self._past.keep(rows)
        for name in ("_lengths", "_mel", "_turns", "_source", "_overlap", "_held"):
            if (state := getattr(self, name)) is not None:
                setattr(self, name, state[:rows])

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
            self._reflect_ends()
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

    def _reflect_ends(self):
        """The source of utterances that end among others: what they have behind their ends is their reflection."""
        if self._lengths is None:
            return
        stft = self._hift._stft
        begin = self._decoded * self._hift.config.samples_per_frame + (stft.hop if self._decoded else 0) - stft.edge
        self._source = stft.reflect_at(self._source, self._lengths * self._hift.config.samples_per_frame - begin)

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
        ends = None
        if self._lengths is not None:  # the spectra of each that are its own, counted from these
            ends = (self._lengths - self._decoded) * (c.samples_per_frame // hift._stft.hop) + y.shape[1]
        audio, self._overlap = hift._stft.samples(hift.spectra(y), self._overlap, last, ends)
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
