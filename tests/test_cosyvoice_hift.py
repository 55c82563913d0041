"""The vocoder of CosyVoice 3 against upstream's tensors, its checkpoint formats and its errors.

Run: pytest tests/test_cosyvoice_hift.py (the goldens' folder in MLX_COSYH3_GOLDENS)."""

import math
import threading

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlx_cosyh3.cosyvoice.hift import HiFT, HiFTConfig, sanitize
from mlx_cosyh3.cosyvoice.hift_layers import STFT, Past, ResBlock, Snake, sin_squared
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from tests.cosyvoice_hift_data import (
    SMALL, arrays, build, decibels, error, golden, mel_of, random_mel, real_size, small, trained,
)  # fmt: skip
from tests.golden_data import cosyvoice_golden


def f0_of(model, mel):
    return model.f0_predictor(mx.pad(mel, [(0, 0), (0, 3), (0, 0)]), Past())


def test_audio():
    model, io = golden("v3_hift")
    assert error(model(mel_of(io)), io["final.wav"]) < 2e-6
    assert error(model(mel_of(io), finalize=False), io["nofinal.wav"]) < 2e-6


def test_pitch_is_upstreams_to_the_bit():
    model, io = golden("v3_hift")
    mel = mel_of(io)
    assert error(f0_of(model, mel), io["final.f0"]) == 0
    assert error(model.f0_predictor(mel, Past()), io["nofinal.f0"]) == 0


def test_pitch_in_fp32_is_near():
    model, io = golden("v3_hift")
    model.f0_predictor.precise = False
    try:
        f0 = f0_of(model, mel_of(io))
        assert 0 < error(f0, io["final.f0"]) < 2e-3
    finally:
        model.f0_predictor.precise = True
    assert f0.dtype == mx.float32
    assert error(f0_of(model, mel_of(io)), io["final.f0"]) == 0  # and back


def test_source():
    model, io = golden("v3_hift")
    f0 = mx.array(io["final.f0"])
    waves, _ = model.m_source.waves(f0, 0)
    assert error(waves[:, :2400], io["final.sine_waves"]) < 1e-7
    source, turns = model.m_source(f0, 0)
    assert error(source, io["final.source"][:, 0]) < 1e-6
    assert error(source[:, : 27 * 480], io["nofinal.source"][:, 0]) < 1e-6
    assert error((f0 > 10).astype(mx.float32)[..., None], io["final.uv"]) == 0
    # The carried phase: two calls give what one does, to the bit.
    a, turns_a = model.m_source(f0[:, :11], 0)
    b, turns_b = model.m_source(f0[:, 11:], 11, turns_a)
    assert error(mx.concatenate([a, b], axis=1), source) == 0 and error(turns, turns_b) == 0


def test_spectra_of_the_source():
    model, io = golden("v3_hift")
    source = model._stft.reflect(mx.array(io["final.source"][:, 0]), True, True)
    assert error(source, np.pad(io["final.source"][:, 0], [(0, 0), (8, 8)], mode="reflect")) == 0
    spectra = np.array(model._stft.frames(source))[:, :256].swapaxes(1, 2)  # [1, 18, 256]
    assert error(spectra[:, :9], io["final.stft_real"]) < 1e-6
    assert error(spectra[:, 9:], io["final.stft_imag"]) < 1e-6


@pytest.mark.parametrize("j", range(5))
def test_trained(j):
    model, io = trained()
    wav = np.array(model(mx.array(io[f"s{j}.mel"].T[None])))[0]
    assert error(wav, io[f"s{j}.wav"]) < 1e-4
    assert decibels(wav, io[f"s{j}.wav"]) > 95


def test_trained_with_pitch_in_fp32():
    model, io = trained()
    model.f0_predictor.precise = False
    try:
        wav = np.array(model(mx.array(io["s3.mel"].T[None])))[0]
    finally:
        model.f0_predictor.precise = True
    assert error(wav, io["s3.wav"]) < 1e-2 and decibels(wav, io["s3.wav"]) > 50


@pytest.mark.slow
def test_real_size():
    model, io = real_size("v3")
    mel = mel_of(io)
    assert error(f0_of(model, mel), io["final.f0"]) == 0
    assert error(model(mel), io["final.wav"]) < 1e-5
    assert error(model(mel, finalize=False), io["nofinal.wav"]) < 1e-5


@pytest.mark.parametrize("frames", (0, 1, 2, 7, 8, 9, 49, 50, 51, 107))
def test_lengths(frames):
    model, mel = small(), random_mel(frames)
    whole = model(mel)
    assert whole.shape == (1, 480 * frames) and whole.dtype == mx.float32
    part = model(mel, finalize=False)
    assert part.shape == (1, 480 * max(0, frames - 8))
    assert error(part, whole[:, : part.shape[1]]) < 1e-6
    assert frames == 0 or 0.005 < float(mx.abs(whole).max()) < 0.991


def test_rows_of_a_batch_are_alone():
    model = small()
    mels = [random_mel(12, seed) for seed in (1, 2)]
    both = model(mx.concatenate(mels))
    for row, mel in zip(both, mels):
        assert error(row[None], model(mel)) < 1e-6


def test_loud_audio_is_limited():
    model = small()
    kept = model.conv_post.bias
    model.conv_post.bias = kept + 9.0  # e^9: beyond the limit of magnitudes, far beyond 0.99
    try:
        wav = np.array(model(random_mel(10)))
    finally:
        model.conv_post.bias = kept
    assert np.abs(wav).max() == np.float32(0.99)


def test_bfloat16_weights():
    """The decoder may be bfloat16; phases, spectra and the pitch (if its weights are left alone) are not."""
    model, io = trained()
    half = HiFT(model.config)
    half.load_weights(
        [(name, a if "f0" in name else a.astype(mx.bfloat16)) for name, a in tree_flatten(model.parameters())]
    )
    wav = half(mx.array(io["s2.mel"].T[None, :40]))
    assert wav.dtype == mx.float32
    assert decibels(wav[0], model(mx.array(io["s2.mel"].T[None, :40]))[0]) > 20


def test_any_thread():
    model, mel = small(), random_mel(10)
    model.f0_predictor._ready = None  # as after loading
    got = []
    thread = threading.Thread(target=lambda: got.append(np.array(model(mel))))
    thread.start()
    thread.join()
    assert error(got[0], model(mel)) == 0


# Parts


@settings(max_examples=30, deadline=None)
@given(st.floats(-1e4, 1e4, width=32), st.integers(0, 1000))
def test_sin_squared(centre, seed):
    x = np.float32(centre) + np.random.default_rng(seed).uniform(-5, 5, 1000).astype(np.float32)
    assert error(sin_squared(mx.array(x)), np.sin(x.astype(np.float64)) ** 2) < 6e-7


def test_snake_keeps_small_values():
    snake = Snake(2)
    snake.alpha = mx.array([0.5, 3.0])
    x = np.array([[1e-4, 1e-4], [-2.0, 2.0], [0.0, 0.0]], np.float32)
    want = x + np.sin(x * [0.5, 3.0]) ** 2 / np.array([0.5, 3.0])
    assert np.allclose(snake(mx.array(x)), want, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("cuts", ((), (17,), (3, 4, 30)))
def test_stft_there_and_back(cuts):
    stft, x = STFT(16, 4), np.random.default_rng(0).standard_normal((2, 4 * 50)).astype(np.float32)
    spectra, carry, out = stft.frames(stft.reflect(mx.array(x), True, True)), None, []
    assert spectra.shape == (2, 51, 18)
    for start, stop in zip((0, *cuts), (*cuts, 51)):
        samples, carry = stft.samples(spectra[:, start:stop], carry, last=stop == 51)
        out.append(samples)
    assert error(mx.concatenate(out, axis=1), x) < 1e-6


@pytest.mark.parametrize("causal", (False, True))
def test_residual_block(causal):
    block, rng = ResBlock(4, 3, [1, 3]), np.random.default_rng(0)
    block.load_weights([(k, mx.array(rng.standard_normal(a.shape) * 0.3)) for k, a in tree_flatten(block.parameters())])
    x = mx.array(rng.standard_normal((2, 40, 4)).astype(np.float32))

    def conv(layer, x, dilation):
        padding = ([2 * dilation], [0]) if causal else dilation
        return mx.conv_general(x, layer.weight, padding=padding, kernel_dilation=dilation) + layer.bias

    want = x
    for i, d in enumerate((1, 3)):
        y = conv(block.convs1[i], block.activations1[i](want), d)
        want = want + conv(block.convs2[i], block.activations2[i](y), 1)
    assert error(block(x, Past() if causal else None), want) < 1e-4


# Checkpoints


@pytest.fixture(scope="module")
def state_dict():
    return arrays(cosyvoice_golden("v3_hift") / "hift.pt")


def old_spelling(weights):
    names = {"parametrizations.weight.original0": "weight_g", "parametrizations.weight.original1": "weight_v"}
    for new, old in names.items():
        weights = {name.replace(new, old): a for name, a in weights.items()}
    return weights


def without_norm(weights):
    out = {}
    for name, a in weights.items():
        if name.endswith("original0"):
            v = weights[name.replace("original0", "original1")].astype(np.float64)
            w = v * (a / np.sqrt((v**2).sum(axis=(1, 2), keepdims=True)))
            out[name.replace("parametrizations.weight.original0", "weight")] = w.astype(np.float32)
        elif not name.endswith("original1"):
            out[name] = a
    return out


def same(a, b, within=0.0):
    assert a.keys() == b.keys()
    for name in a:
        assert error(a[name], b[name]) <= within, name


def test_spellings(state_dict):
    ours = sanitize(state_dict)
    assert len(ours) == len(tree_flatten(golden("v3_hift")[0].parameters()))
    same(sanitize(old_spelling(state_dict)), ours)
    same(sanitize({f"generator.{name}": a for name, a in state_dict.items()}), ours)
    inner = {name.replace("f0_predictor.", "f0_predictor.generator."): a for name, a in state_dict.items()}
    same(sanitize(inner), ours)


def test_without_weight_norm(state_dict):
    """The pitch predictor's magnitudes then come from its weights: rounding apart, the same vocoder."""
    ours = sanitize(without_norm(state_dict))
    plain = {name: a for name, a in ours.items() if "condnet" not in name}
    same(plain, {name: a for name, a in sanitize(state_dict).items() if "condnet" not in name})
    model, io = golden("v3_hift")
    config = SMALL | {"base_channels": 64, "f0_predictor": {"cond_channels": 32}} | {
        name: getattr(model.config, name) for name in ("resblock_kernel_sizes", "resblock_dilation_sizes")
    }
    other = build(HiFT, config, without_norm(state_dict))
    assert error(other(mel_of(io)), io["final.wav"]) < 1e-4


@pytest.mark.parametrize("form", (dict, old_spelling, without_norm))
def test_sanitize_twice_is_once(state_dict, form):
    once = sanitize(form(state_dict))
    same(sanitize(once), once)
    assert {a.dtype for a in once.values()} == {np.dtype(np.float32)}


def test_plain_weights_are_views(state_dict):
    ours = sanitize(state_dict)
    for name in ("source_downs.0.weight", "source_downs.1.weight"):
        assert np.shares_memory(ours[name], state_dict[name])
    v = "f0_predictor.condnet.0."
    assert np.shares_memory(ours[v + "weight_v"], state_dict[v + "parametrizations.weight.original1"])


def test_unknown_tensor(state_dict):
    with pytest.raises(CheckpointError, match=r"'conv_prae.weight', nearest known: 'conv_pre.weight'"):
        sanitize(state_dict | {"conv_prae.weight": np.zeros((1, 1, 1))})
    with pytest.raises(CheckpointError, match=r"resblocks.3.convs1.2.wait"):
        sanitize(state_dict | {"resblocks.3.convs1.2.wait": np.zeros(1)})


def test_half_a_weight_norm(state_dict):
    name = "ups.1.parametrizations.weight.original0"
    with pytest.raises(CheckpointError, match="ups.1 has only one half"):
        sanitize({k: a for k, a in state_dict.items() if k != name})


# Bad input


def test_config_lacks_a_value():
    for name in SMALL:
        d = {k: v for k, v in SMALL.items() if k != name}
        if name == "conv_pre_look_right":  # right for CosyVoice 1 and 2
            with pytest.raises(CheckpointError, match="not one of CosyVoice 3"):
                HiFT(HiFTConfig.from_dict(d))
        else:
            with pytest.raises(CheckpointError, match=f"lacks {name}"):
                HiFTConfig.from_dict(d)
    with pytest.raises(CheckpointError, match=r"istft_params\.hop_len"):
        HiFTConfig.from_dict(SMALL | {"istft_params": {"n_fft": 16}})


def test_config_that_does_not_fit():
    for change, word in (
        ({"upsample_kernel_sizes": [16, 11]}, "upsample_kernel_sizes has 2 entries"),
        ({"resblock_dilation_sizes": [[1]]}, "differ in length"),
        ({"resblock_kernel_sizes": [3, 4]}, "kernel 4"),
        ({"istft_params": {"n_fft": 16, "hop_len": 8}}, "n_fft 16 and hop_len 8"),
    ):
        with pytest.raises(CheckpointError, match=word):
            HiFTConfig.from_dict(SMALL | change)


def test_other_keys_of_a_config_are_ignored():
    extra = {"cls": "CausalHiFTGenerator", "f0_predictor": {"cond_channels": 16, "num_class": 1}}
    assert HiFTConfig.from_dict(SMALL | extra) == HiFTConfig.from_dict(SMALL)


@pytest.mark.parametrize("shape", ((1, 5, 79), (5, 80), (1, 80, 5)))
def test_mel_of_a_wrong_shape(shape):
    with pytest.raises(CosyH3Error, match=r"must be \[batch, frames, 80\]"):
        small()(mx.zeros(shape))


@pytest.mark.parametrize(
    "tensor, stage",
    (
        ("f0_predictor.classifier.bias", "pitch predictor"),
        ("m_source.l_linear.bias", "harmonic source"),
        ("conv_post.bias", "decoder"),
    ),
)
def test_not_finite_names_the_stage(tensor, stage):
    model = HiFT(HiFTConfig.from_dict(SMALL))
    model.load_weights([(k, a * math.nan if k == tensor else a) for k, a in tree_flatten(small().parameters())])
    with pytest.raises(CosyH3Error, match=f"not finite, first in the {stage}"):
        model(random_mel(10))


def test_mel_that_is_not_finite():
    mel = random_mel(10)
    mel[0, 4, 7] = math.inf
    with pytest.raises(CosyH3Error, match="not finite, first in the mel"):
        small()(mel)
