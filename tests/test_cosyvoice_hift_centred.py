"""The vocoders of CosyVoice 1 and 2 against upstream's tensors.

Run: pytest tests/test_cosyvoice_hift_centred.py (the goldens' folder in MLX_COSYH3_GOLDENS)

Upstream computes the pitch in fp32 there. What torch and MLX round differently in it, one unit in the last place, makes
1e-3 in the source after half a second; so each stage is checked on upstream's input of that stage, tightly."""

import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.cosyvoice.hift import HiFT, HiFTConfig, sanitize
from mlx_cosyh3.cosyvoice.hift_centred import CentredHiFT
from mlx_cosyh3.cosyvoice.hift_layers import leaky_relu
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from tests.cosyvoice_hift_data import SMALL, arrays, error, golden, mel_of, random_mel, real_size
from tests.golden_data import cosyvoice_golden

VERSIONS = ("v1", "v2")


def vocoder(version):
    return golden(f"{version}_hift", CentredHiFT)


def draws(version, io):
    """Upstream's random numbers as `render` takes them."""
    if version == "v2":
        return mx.array(io["rand.noise"]), mx.zeros((1, 9))
    phases = -math.pi + 2 * math.pi * io["rand.phase_uniform01"][:, :, 0]
    return mx.array(io["rand.noise"].swapaxes(1, 2)), mx.array(phases, dtype=mx.float32)


@pytest.mark.parametrize("version", VERSIONS)
def test_audio(version):
    model, io = vocoder(version)
    audio, source, _ = model.render(mel_of(io), *draws(version, io))
    assert error(source, io["source"][:, 0]) < 1.5e-3
    assert error(audio, io["wav"]) < 1e-3


@pytest.mark.parametrize("version", VERSIONS)
def test_without_noise(version):
    model, io = vocoder(version)
    noise, phases = draws(version, io)
    phases = phases if version == "v2" else mx.full((1, 9), -math.pi)
    audio, source, _ = model.render(mel_of(io), mx.zeros_like(noise), phases)
    assert error(source, io["zero_noise.source"][:, 0]) < 1.5e-3
    assert error(audio, io["zero_noise.wav"]) < 1e-3


@pytest.mark.parametrize("version", VERSIONS)
def test_pitch(version):
    model, io = vocoder(version)
    f0 = model.f0_predictor(mel_of(io))
    assert error(f0, io["f0"]) < 3e-6 * io["f0"].max()


@pytest.mark.parametrize("version", VERSIONS)
def test_source_of_upstreams_pitch(version):
    model, io = vocoder(version)
    assert error(model.m_source(mx.array(io["f0"]), *draws(version, io))[0], io["source"][:, 0]) < 3e-4


@pytest.mark.parametrize("version", VERSIONS)
def test_audio_of_upstreams_source(version):
    model, io = vocoder(version)
    audio, source, _ = model.render(mel_of(io), *draws(version, io), cache_source=mx.array(io["source"][:, 0]))
    assert error(source, io["source"][:, 0]) == 0
    assert error(audio, io["wav"]) < 3e-6


@pytest.mark.parametrize("version", VERSIONS)
def test_cached_source(version):
    model, io = vocoder(version)
    cache = mx.array(io["cached.in_cache_source"][:, 0])
    audio, source, _ = model.render(mel_of(io), *draws(version, io), cache_source=cache)
    assert error(source[:, : cache.shape[1]], cache) == 0
    assert error(audio, io["cached.wav"]) < 1e-3


@pytest.mark.parametrize("version", VERSIONS)
def test_layers(version):
    model, io = vocoder(version)
    x = model.conv_pre(mel_of(io))
    up = model.ups[0](leaky_relu(x, 0.1))
    spectra = model._stft.frames(model._stft.reflect(mx.array(io["source"][:, 0]), True, True))
    down = model.source_downs[0](spectra)
    mixed = up + model.source_resblocks[0](down)
    got = {"conv_pre": x, "ups0": up, "sd0": down, "srb0": model.source_resblocks[0](down),
           "rb0": model.resblocks[0](mixed), "conv_post": model.decode(mel_of(io), spectra)}  # fmt: skip
    for name, a in got.items():
        want = io[f"decode.{name}"].swapaxes(1, 2)
        assert error(a[:, : want.shape[1]], want) < 1e-5 * max(1, np.abs(want).max()), name
    assert error(spectra[:, :256, :9], io["stft_real"].swapaxes(1, 2)) < 1e-5
    assert error(spectra[:, :256, 9:], io["stft_imag"].swapaxes(1, 2)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_real_size(version):
    model, io = real_size(version, CentredHiFT)
    samples = io["wav"].shape[1]
    audio, source, _ = model.render(mel_of(io), mx.zeros((1, samples, 9)), mx.zeros((1, 9)))
    assert error(source, io["source"][:, 0]) < 1e-3
    assert error(audio, io["wav"]) < 3e-4


@pytest.mark.parametrize("version", VERSIONS)
def test_key_decides(version):
    model, io = vocoder(version)
    mel = mel_of(io)[:, :5]
    a, b, c = (np.array(model(mel, key=mx.random.key(k))[0]) for k in (1, 1, 2))
    assert error(a, b) == 0 and error(a, c) > 1e-4
    assert a.shape == (1, 5 * model.config.samples_per_frame)


@pytest.mark.parametrize("version", VERSIONS)
def test_sanitize_twice_is_once(version):
    state = arrays(cosyvoice_golden(f"{version}_hift") / "hift.pt")
    once = sanitize(state)
    twice = sanitize(once)
    assert once.keys() == twice.keys() and all(error(once[k], twice[k]) == 0 for k in once)
    # The magnitudes of a transposed convolution are those of its input channels.
    g, v = (state[f"ups.0.parametrizations.weight.original{i}"] for i in (0, 1))
    i, o, k = 3, 5, 7
    want = g[i, 0, 0] * v[i, o, k] / np.sqrt((v[i].astype(np.float64) ** 2).sum())
    assert abs(once["ups.0.weight"][o, k, i] - want) < 1e-7


def test_versions_are_told_apart():
    v12 = {name: value for name, value in SMALL.items() if name != "conv_pre_look_right"}
    CentredHiFT(HiFTConfig.from_dict(v12))
    with pytest.raises(CheckpointError, match="is one of CosyVoice 3"):
        CentredHiFT(HiFTConfig.from_dict(SMALL))
    with pytest.raises(CheckpointError, match="not one of CosyVoice 3"):
        HiFT(HiFTConfig.from_dict(v12))


def test_bad_input():
    model, _ = vocoder("v2")
    key = mx.random.key(0)
    with pytest.raises(CosyH3Error, match=r"must be \[batch, frames, 80\]"):
        model(mx.zeros((1, 5, 79)), key=key)
    with pytest.raises(CosyH3Error, match=r"not \[1, 0, 80\]"):
        model(mx.zeros((1, 0, 80)), key=key)
    with pytest.raises(CosyH3Error, match="cache_source has 961 samples, more than the 960"):
        model(random_mel(2), mx.zeros((1, 961)), key=key)
    mel = random_mel(4)
    mel[0, 1, 1] = math.nan
    with pytest.raises(CosyH3Error, match="not finite, first in the mel"):
        model(mel, key=key)
