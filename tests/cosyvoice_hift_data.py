"""HiFT vocoders and their golden values for the tests of `cosyvoice/hift*.py`."""

import functools
import importlib.util
import json
import math

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_cosyh3.convert.sources import open_source

from mlx_cosyh3.cosyvoice.hift import HiFT, HiFTConfig, sanitize
from tests.golden_data import cosyvoice_golden, large

SMALL = {
    "in_channels": 80, "base_channels": 16, "nb_harmonics": 8, "sampling_rate": 24000, "nsf_alpha": 0.1,
    "nsf_sigma": 0.003, "nsf_voiced_threshold": 10, "upsample_rates": [8, 5, 3], "upsample_kernel_sizes": [16, 11, 7],
    "istft_params": {"n_fft": 16, "hop_len": 4}, "resblock_kernel_sizes": [3, 7],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]], "source_resblock_kernel_sizes": [7, 7, 11],
    "source_resblock_dilation_sizes": [[1, 3, 5]] * 3, "lrelu_slope": 0.1, "audio_limit": 0.99,
    "conv_pre_look_right": 4, "f0_predictor": {"cond_channels": 16},
}  # fmt: skip


def build(cls, config, weights):
    """A vocoder of class `cls` from upstream's config and state dict."""
    model = cls(HiFTConfig.from_dict(config))
    pairs = sanitize(weights).items()
    model.load_weights([(name, mx.array(np.ascontiguousarray(a)).astype(mx.float32)) for name, a in pairs])
    mx.eval(model.parameters())
    return model


def arrays(path):
    return {name: tensor.numpy() for name, tensor in open_source(path).tensors.items()}


@functools.cache
def golden(name, cls=HiFT):
    """(vocoder, io tensors as numpy) of the golden v1_hift, v2_hift or v3_hift."""
    folder = cosyvoice_golden(name)
    config = json.loads((folder / "config.json").read_text())
    return build(cls, config, arrays(folder / "hift.pt")), arrays(folder / "io.safetensors")


def real_size(version, cls=HiFT):
    """(vocoder, io) at full size, its weights made from the seed."""
    source = large("golden", "cosyvoice", "seeded_weights.py")
    spec = importlib.util.spec_from_file_location("seeded_weights", source)
    seeded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(seeded)
    config = json.loads((cosyvoice_golden(f"{version}_hift") / "config.json").read_text())
    config |= {"base_channels": 512, "f0_predictor": {"cond_channels": 512}}
    model = build(cls, config, seeded.state_dict(f"{version}.hift"))
    return model, arrays(large("golden", "cosyvoice", "real_size", f"{version}.hift.safetensors"))


@functools.cache
def trained():
    """(vocoder, io) of the small trained CosyVoice 3."""
    folder = large("checkpoints", "cosyvoice3-tiny")
    config = json.loads((cosyvoice_golden("v3_hift") / "config.json").read_text())
    config |= {"base_channels": 160, "f0_predictor": {"cond_channels": 128}}
    return build(HiFT, config, arrays(folder / "hift.pt")), arrays(folder / "io.safetensors")


@functools.cache
def small(**changes):
    """A random vocoder with SMALL's sizes whose pitch is between 50 and 400 Hz and whose audio is neither silent nor
    clipped, which would hide errors."""
    model = HiFT(HiFTConfig.from_dict(SMALL | changes))
    rng = np.random.default_rng(0)

    def draw(name, a):
        n = rng.standard_normal(a.shape)
        if name.endswith(("alpha", "weight_g")):
            return 1 + 0.2 * np.tanh(n)
        if name == "f0_predictor.classifier.weight":
            return 300 * n
        if name.startswith("conv_post"):
            return 0.1 * n / math.sqrt(math.prod(a.shape[1:])) if a.ndim > 1 else 0.1 * n - 2
        return 0.1 * n if a.ndim == 1 else n / math.sqrt(math.prod(a.shape[1:]))

    model.load_weights([(k, mx.array(draw(k, a), dtype=mx.float32)) for k, a in tree_flatten(model.parameters())])
    mx.eval(model.parameters())
    return model


def mel_of(io):
    """The golden's mel as [1, T, 80]."""
    return mx.array(io["in.mel"].swapaxes(1, 2))


def random_mel(frames, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal((1, frames, 80)), dtype=mx.float32)


def error(a, b):
    """The largest absolute difference; their shapes must be the same."""
    a, b = np.array(a), np.array(b)
    assert a.shape == b.shape, (a.shape, b.shape)
    return float(np.abs(a.astype(np.float64) - b).max(initial=0))


def decibels(a, b):
    """Signal-to-noise ratio of `a` against the reference `b`."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return 10 * math.log10((b**2).sum() / ((a - b) ** 2).sum())
