"""What the HiFT vocoders of all CosyVoice versions share: the config, and the decoder from mel and source to spectra.

    pitch -> harmonic source -> STFT 16/4 -----------+-------------+------------+
    mel -> conv_pre -> upsample x8 -> + residual -> x5 -> + ... -> x3 -> + ... -> conv_post -> magnitude, phase -> iSTFT

HiFTNet (Li et al., 2023) as upstream's `hifigan/generator.py` has it. The versions differ in which way convolutions
look, in how upsampling is done, and in the source; see `hift.py` (CosyVoice 3) and `hift_centred.py` (1 and 2).
"""

import math
from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn

from mlx_cosyh3.cosyvoice.hift_layers import STFT, PastConv1d, ResBlock, leaky_relu
from mlx_cosyh3.errors import CheckpointError, NotFiniteError

MAX_MAGNITUDE = 100.0
LAST_SLOPE = 0.01  # upstream leaves the last leaky ReLU at torch's default


@dataclass
class HiFTConfig:
    """The `hift` entry of a CosyVoice yaml, by its own names."""

    in_channels: int  # mel bins
    base_channels: int
    nb_harmonics: int  # besides the fundamental
    sampling_rate: int  # Hz
    nsf_alpha: float  # amplitude of the sines, and 3 times that of unvoiced noise
    nsf_sigma: float  # amplitude of voiced noise
    nsf_voiced_threshold: float  # Hz
    upsample_rates: list
    upsample_kernel_sizes: list
    istft_params: dict  # n_fft, hop_len
    resblock_kernel_sizes: list
    resblock_dilation_sizes: list
    source_resblock_kernel_sizes: list
    source_resblock_dilation_sizes: list
    lrelu_slope: float
    audio_limit: float
    f0_predictor: dict  # cond_channels
    conv_pre_look_right: int = None  # frames; None: not a causal vocoder (CosyVoice 1 and 2)

    @classmethod
    def from_dict(cls, d):
        """From the yaml's mapping or `config.json`. Other keys are ignored; CheckpointError for one that is missing."""
        d = dict(d)
        for f in fields(cls):
            if f.name not in d and f.name != "conv_pre_look_right":
                raise CheckpointError(f"the vocoder's config lacks {f.name}: convert the model again")
        d["istft_params"] = _pick(d, "istft_params", ("n_fft", "hop_len"))
        d["f0_predictor"] = _pick(d, "f0_predictor", ("cond_channels",))
        config = cls(**{f.name: d[f.name] for f in fields(cls) if f.name in d})
        config._check()
        return config

    def _check(self):
        stages, n_fft, hop = len(self.upsample_rates), *self.istft_params.values()
        for name in ("upsample_kernel_sizes", "source_resblock_kernel_sizes", "source_resblock_dilation_sizes"):
            entries = len(getattr(self, name))
            if entries != stages:
                raise CheckpointError(f"the vocoder's {name} has {entries} entries, upsample_rates {stages}")
        if len(self.resblock_kernel_sizes) != len(self.resblock_dilation_sizes):
            raise CheckpointError("the vocoder's resblock_kernel_sizes and resblock_dilation_sizes differ in length")
        for k in (*self.resblock_kernel_sizes, *self.source_resblock_kernel_sizes):
            if k % 2 == 0:
                raise CheckpointError(f"the vocoder has a residual block with kernel {k}; only odd ones are supported")
        if n_fft != 4 * hop:
            raise CheckpointError(f"the vocoder's iSTFT has n_fft {n_fft} and hop_len {hop}; n_fft must be 4 hop_len")

    @property
    def samples_per_frame(self):
        return math.prod(self.upsample_rates) * self.istft_params["hop_len"]

    @property
    def upsampling(self):
        """(kernel, rate) of each stage."""
        return list(zip(self.upsample_kernel_sizes, self.upsample_rates))

    def channels(self, stage):
        """Channels before upsampling stage `stage`."""
        return self.base_channels >> stage

    @property
    def spectrum(self):
        """Channels of a spectrum: real ++ imaginary."""
        return self.istft_params["n_fft"] + 2


def _pick(d, name, keys):
    for key in keys:
        if key not in d[name]:
            raise CheckpointError(f"the vocoder's config lacks {name}.{key}: convert the model again")
    return {key: d[name][key] for key in keys}


class Upsample(PastConv1d):
    """Each frame `rate` times, then a causal convolution."""

    def __init__(self, in_dims, out_dims, kernel, rate):
        super().__init__(in_dims, out_dims, kernel)
        self._rate = rate

    def __call__(self, x, past):
        return super().__call__(mx.repeat(x, self._rate, axis=1), past)


class Decoder(nn.Module):
    """The layers that are alike in all versions; a subclass adds conv_pre and ups."""

    def __init__(self, config):
        super().__init__()
        c = self._config = config
        self.source_downs, self.source_resblocks, self.resblocks = [], [], []
        for i, kernel in enumerate(c.source_resblock_kernel_sizes):
            channels, rate = c.channels(i + 1), math.prod(c.upsample_rates[i + 1 :])
            down = PastConv1d(c.spectrum, channels, 2 * rate if rate > 1 else 1, stride=rate, padding=rate // 2)
            self.source_downs.append(down)
            self.source_resblocks.append(ResBlock(channels, kernel, c.source_resblock_dilation_sizes[i]))
            both = zip(c.resblock_kernel_sizes, c.resblock_dilation_sizes)
            self.resblocks += [ResBlock(channels, kernel, dilations) for kernel, dilations in both]
        self.conv_post = PastConv1d(channels, c.spectrum, 7)
        self._stft = STFT(*c.istft_params.values())

    @property
    def config(self):
        return self._config

    def decode(self, mel, spectra, past=None, first=True):
        """mel [B, n (+ look right), 80], the source's spectra -> log magnitudes ++ phases [B, n * 120 (+ 1), 18].

        past    of causal layers; None: the whole utterance at once, layers look both ways
        first   the utterance begins here, with one spectrum more than n * 120"""
        c, per_stage = self.config, len(self.config.resblock_kernel_sizes)
        x = self.conv_pre(mel)
        for i, (up, down) in enumerate(zip(self.ups, self.source_downs)):
            x = leaky_relu(x, c.lrelu_slope)
            x = up(x) if past is None else up(x, past)
            if first and i == len(self.ups) - 1:
                x = mx.concatenate([x[:, 1:2], x], axis=1)  # reflection, for an odd number of spectra
            x = x + self.source_resblocks[i](down(spectra, past, left=down.stride - 1), past)
            blocks = self.resblocks[i * per_stage : (i + 1) * per_stage]
            x = sum(block(x, past) for block in blocks) / per_stage
        return self.conv_post(leaky_relu(x, LAST_SLOPE), past).astype(mx.float32)

    def spectra(self, y):
        """log magnitudes ++ phase angles [B, F, 18] -> spectra. The angle is a sine, as upstream's."""
        magnitude = mx.minimum(mx.exp(y[..., : self._stft.bins]), MAX_MAGNITUDE)
        phase = mx.sin(y[..., self._stft.bins :])
        return mx.concatenate([magnitude * mx.cos(phase), magnitude * mx.sin(phase)], axis=-1)


def check_finite(stages, *arrays):
    """Compute `arrays`; NotFiniteError naming the first of `stages` ({name: array}) that is not finite."""
    finite = mx.stack([mx.isfinite(a).all() for a in stages.values()])
    mx.eval(finite, *arrays)
    if not finite.all().item():
        bad = next(name for name, good in zip(stages, finite.tolist()) if not good)
        raise NotFiniteError(f"the vocoder's numbers are not finite, first in the {bad}; compute it in fp32")
