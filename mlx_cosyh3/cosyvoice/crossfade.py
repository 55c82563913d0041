"""Streams of CosyVoice 1 and 2, whose layers look both ways: windows that overlap, each faded into the one before.

    vocoder (1, 2)   a window begins with the last frames of the one before, takes over the source that was made for
                     them and goes on from it in phase (upstream's starts anew); its audio there is faded
                     in; its own last frames are held back until the next window
    flow (1)         the same in tokens and mel frames; the ends of the noise and of the text's features are kept, too

After upstream's cosyvoice/cli/model.py, token2wav. What a stream gives depends on where its windows end, so it is not
equal to what is made at once; every window costs the same, however much was said before it.
"""

import mlx.core as mx
import numpy as np

from mlx_cosyh3.cosyvoice.causal_flow import MEL
from mlx_cosyh3.cosyvoice.flow_regulated import OVERLAP
from mlx_cosyh3.errors import CosyH3Error


def windows(n, compat=False):
    """(rise, fall): float32 [n] numpy, weights of the new and of the old where n samples (or frames) overlap.

    They add up to 1. compat: the halves of a Hamming window, as upstream has them, which add up to 1.08."""
    if compat:
        both = np.hamming(2 * n)
        return both[:n].astype(np.float32), both[n:].astype(np.float32)
    rise = 0.5 - 0.5 * np.cos(np.pi * (np.arange(n) + 0.5) / n)
    return rise.astype(np.float32), (1 - rise).astype(np.float32)


class Fade:
    """Joins pieces [1, m, ...] whose ends overlap by n along axis 1."""

    def __init__(self, n, compat=False):
        self.n, self._old = n, None
        self._rise, self._fall = (mx.array(w) for w in windows(n, compat))
        mx.eval(self._rise, self._fall)

    def add(self, new, last=False):
        """What is final of `new`, which begins where the piece before had its last n: all of it if `last`."""
        n = self.n
        if self._old is not None:
            shape = (1, n) + (1,) * (new.ndim - 2)
            mixed = new[:, :n] * self._rise.reshape(shape) + self._old * self._fall.reshape(shape)
            new = mx.concatenate([mixed, new[:, n:]], axis=1)
        if last:
            return new
        self._old = new[:, new.shape[1] - n :] + 0  # a slice would keep all of it in memory
        mx.eval(self._old)
        return new[:, : new.shape[1] - n]

    def rest(self):
        """The end that was held back, when nothing follows it."""
        return self._old


class FadedVocoder:
    """A CentredHiFT on a mel that arrives in pieces."""

    def __init__(self, hift, frames, key, compat=False):
        """frames   that windows overlap by;  key   of the noise in the source: each window draws with one of its own"""
        self._hift, self._frames, self._key = hift, frames, key
        self._samples = frames * hift.config.samples_per_frame
        self._fade = Fade(self._samples, compat)
        self._mel = None  # [1, n, 80]: the last frames of the window before, then those that are new
        self._source = None  # that of the window before, at its last frames
        self._end, self._in_phase = None, not compat
        self._ended = False

    def add(self, mel, last=False):
        """mel [1, n, 80], any n -> audio float32 [1, m]: all but the last `frames` frames so far; all if `last`."""
        if self._ended:
            raise CosyH3Error("this utterance has ended: begin another stream")
        self._ended = last
        self._mel = mel if self._mel is None else mx.concatenate([self._mel, mel], axis=1)
        known = self._mel.shape[1]
        if last and self._source is not None and known == self._frames:
            return self._fade.rest()
        if known == 0 or (known <= self._frames and not last):
            return mx.zeros((1, 0))
        self._key, now = mx.random.split(self._key)
        audio, source, end = self._hift(self._mel, self._source, self._end, key=now)
        if not last:
            self._mel = self._mel[:, known - self._frames :] + 0
            self._source = source[:, source.shape[1] - self._samples :] + 0
        if self._in_phase:
            self._end = end
        audio = self._fade.add(audio, last)
        mx.eval(audio, self._key, self._mel, [] if self._source is None else self._source, end.f0, end.phases)
        return audio


class CentredVocoding:
    """For models whose vocoder is a CentredHiFT (a mix-in): how mel becomes audio, at once and streamed."""

    overlap = None  # mel frames by which windows overlap

    def wave(self, mel, key):
        return self.hift(mel, key=key)[0]

    def wave_stream(self, o, key):
        return FadedVocoder(self.hift, self.overlap, key, o.compat)


class FadedFlow:
    """A RegulatedFlow on speech tokens that arrive in pieces."""

    look_ahead = OVERLAP  # tokens that windows overlap by

    def __init__(self, flow, prompt, steps, key, compat=False):
        """prompt   (tokens, mel, embedding), as the flow takes them;  key   of the noise: each window draws its own"""
        self._flow, self._prompt, self._steps, self._key = flow, prompt, steps, key
        self._fade = Fade(flow.frames(OVERLAP), compat)
        self._tokens, self._cache = [], None

    def add(self, tokens, last=False, on_step=None):
        """Speech tokens, a list -> mel [1, n, 80]: of all but the overlap with the next window; of all if `last`.

        on_step   called with the number of steps done after each, if there is anything to compute"""
        self._tokens = self._tokens + tokens
        if len(self._tokens) <= (0 if last else OVERLAP):
            return mx.zeros((1, 0, MEL))
        self._key, now = mx.random.split(self._key)
        mel, self._cache = self._flow(
            mx.array([self._tokens]), *self._prompt, key=now, steps=self._steps, cache=self._cache,
            on_step=on_step,
        )  # fmt: skip
        self._tokens = self._tokens[-OVERLAP:]
        mel = self._fade.add(mel, last)
        mx.eval(mel, self._key)
        return mel
