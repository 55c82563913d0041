"""The harmonic source of HiFT: sines at the pitch and its multiples, with noise, mixed to one wave.

Neural source filter (Wang et al., 2019) as upstream's `hifigan/generator.py` has it: SineGen of CosyVoice 1, whose
phase is summed sample by sample; SineGen2 of CosyVoice 2 and 3, whose phase is summed frame by frame, and between
frames goes in a line (2) or not at all (3). Kept, as the networks were trained with it: CosyVoice 3's noise is uniform
in [0, 1) and the same for every utterance, and SineGen2's random initial phases have no effect.

Phases of 1e5 rad are common. Upstream sums turns in double, and rounds the sum, and each product after it, to fp32; we
round alike, and take the sine in float64, with numpy, since a GPU has no float64 and a poor sine for large arguments.
(Not on MLX's CPU stream: which device is the default belongs to the process, so other threads would be moved, too.)
"""

import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cosyh3.cosyvoice import noise


class Source(nn.Module):
    """What the versions share."""

    def __init__(self, config):
        super().__init__()
        self.l_linear = nn.Linear(config.nb_harmonics + 1, 1)
        self._config = config

    def levels(self, f0):
        """f0 in Hz -> (1 where voiced, amplitude of the noise), of the same shape."""
        c = self._config
        voiced = (f0 > c.nsf_voiced_threshold).astype(mx.float32)
        return voiced, voiced * c.nsf_sigma + (1 - voiced) * (c.nsf_alpha / 3)

    def steps(self, f0):
        """f0 [B, n], numpy fp32 -> turns per sample of each harmonic, [B, n, harmonics]."""
        harmonics = np.arange(1, self._config.nb_harmonics + 2, dtype=np.float32)
        return f0[:, :, None] * harmonics / self._config.sampling_rate

    def mix(self, waves):
        """[B, N, harmonics] -> [B, N] in -1 .. 1, in fp32 whatever the weights are."""
        weight, bias = self.l_linear.weight.astype(mx.float32), self.l_linear.bias.astype(mx.float32)
        return mx.tanh(waves @ weight.T + bias)[..., 0]


def sum_turns(step, before=None):
    """Running sums of `step` [B, n, H] in float64, from `before` [B, 1, H] on; numpy."""
    before = np.zeros_like(step[:, :1], dtype=np.float64) if before is None else before
    return np.cumsum(np.concatenate([before, step.astype(np.float64)], axis=1), axis=1)[:, 1:]


def sine(phase):
    """numpy fp32 -> MLX fp32"""
    return mx.array(np.sin(phase.astype(np.float64)).astype(np.float32))


class CausalSource(Source):
    """CosyVoice 3's: pitch per frame in, samples out, in chunks of any size. `turns` are numpy float64 [B, 1, harmonics]."""

    def __call__(self, f0, start, turns=None):
        """f0 [B, n] in Hz, fp32; `start`: frames before these; `turns`: the phase there, as the last call gave it.

        -> (source [B, n * hop], turns)"""
        waves, turns = self.waves(f0, start, turns)
        return self.mix(waves), turns

    def waves(self, f0, start, turns=None):
        """-> (sines with noise [B, n * hop, harmonics], turns)."""
        n, hop = f0.shape[1], self._config.samples_per_frame
        total = sum_turns(self.steps(np.array(f0)) % 1, turns)
        sines = self._config.nsf_alpha * sine(total.astype(np.float32) * 2 * math.pi * hop)  # [B, n, harmonics]
        end = total[:, -1:]
        voiced, level = self.levels(f0[:, :, None, None])
        hiss = mx.array(noise.sine_noise(start * hop, (start + n) * hop)).reshape(1, n, hop, -1)
        waves = sines[:, :, None] * voiced + level * hiss  # [B, n, hop, harmonics]
        return waves.reshape(f0.shape[0], n * hop, -1), end


class CentredSource(Source):
    """That of CosyVoice 1 (22.05 kHz) and 2 (24 kHz; upstream, too, tells them by the rate): a whole chunk at once."""

    @property
    def by_sample(self):
        return self._config.sampling_rate == 22050

    def draw(self, batch, frames, key):
        """The random numbers of `frames` frames: (normal noise [B, N, harmonics], phases [B, harmonics] in rad)."""
        c = self._config
        keys = mx.random.split(key)
        normal = mx.random.normal((batch, frames * c.samples_per_frame, c.nb_harmonics + 1), key=keys[0])
        phases = mx.random.uniform(-math.pi, math.pi, (batch, c.nb_harmonics + 1), key=keys[1])
        return normal, phases

    def __call__(self, f0, normal, phases, before=None):
        """f0 [B, T] in Hz, fp32 -> (source [B, N], SourceEnd). `phases` are those of the harmonics; the fundamental
        starts at 0, and CosyVoice 2 has none.

        before   (source [B, L], SourceEnd) of whole frames that this one begins with: it goes on from them in phase"""
        hop, lead = self._config.samples_per_frame, 0
        kept, turns = None, None
        if before is not None:
            kept, end = before
            f0, turns, phases = f0[:, kept.shape[1] // hop :], end.turns, end.phases
        hz = np.array(f0)
        if self.by_sample:
            total = sum_turns(self.steps(np.repeat(hz, hop, axis=1)), turns)
            offset = np.array(phases)
            offset[:, 0] = 0
            phase = 2 * math.pi * (total.astype(np.float32) % 1) + offset[:, None]
        else:
            total = sum_turns(self.steps(hz) % 1, turns)
            if before is not None:  # the line goes on from the middle of the last frame
                lead = hop // 2
                kept, f0 = kept[:, : kept.shape[1] - lead], mx.concatenate([end.f0, f0], axis=1)
                total = np.concatenate([turns, total], axis=1)
            phase = _in_a_line(total.astype(np.float32) * 2 * math.pi * hop, hop)[:, lead:]
        sines = self._config.nsf_alpha * sine(phase)  # [B, N, harmonics]
        end = SourceEnd(total[:, -1:] % 1, f0[:, -1:], phases)
        voiced, level = self.levels(mx.repeat(f0, hop, axis=1)[:, lead:, None])
        source = self.mix(sines * voiced + level * normal[:, normal.shape[1] - sines.shape[1] :])
        return source if kept is None else mx.concatenate([kept, source], axis=1), end


@dataclass
class SourceEnd:
    """Where a CentredSource ended, for one that goes on from there."""

    turns: np.ndarray  # float64 [B, 1, harmonics]: at the last sample (CosyVoice 1), in the middle of the last frame (2)
    f0: mx.array  # [B, 1], of the last frame
    phases: mx.array  # [B, harmonics]


def _in_a_line(x, rate):
    """numpy [B, T, C] -> [B, T * rate, C]: linear interpolation with the ends held, rounded to fp32 as torch does."""
    T = x.shape[1]
    position = np.maximum((np.arange(T * rate, dtype=np.float32) + np.float32(0.5)) * np.float32(1 / rate) - np.float32(0.5), 0)
    below = np.minimum(np.floor(position), np.float32(T - 1))
    share = (position - below)[None, :, None]
    below = below.astype(np.int32)
    return (1 - share) * x[:, below] + share * x[:, np.minimum(below + 1, T - 1)]
