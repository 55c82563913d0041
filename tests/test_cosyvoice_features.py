"""The three log-mel front ends against upstream's, and what must hold for any audio."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mlx_cosyh3.cosyvoice import features
from mlx_cosyh3.cosyvoice.features import kaldi_fbank, mel_spectrogram, whisper_log_mel
from mlx_cosyh3.errors import CosyH3Error
from tests.golden_data import large

MEL24 = {"rate": 24000, "n_fft": 1920, "hop": 480, "win": 1920, "fmin": 0, "bins": 80}
MEL22 = {"rate": 22050, "n_fft": 1024, "hop": 256, "win": 1024, "fmin": 0, "bins": 80, "fmax": 8000}


@pytest.fixture(scope="module")
def golden():
    return load_file(large("golden", "cosyvoice", "frontend", "features.safetensors"))


def near(got, want, bound):
    assert got.dtype == np.float32 and got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "name, audio, settings_",
    [
        ("mel24k_fmaxnone", "wav24k", MEL24 | {"fmax": None}),
        ("mel24k_fmax8000", "wav24k", MEL24 | {"fmax": 8000}),
        ("mel22k_fmax8000", "wav22k", MEL22),
    ],
)
def test_mel_is_upstreams(golden, name, audio, settings_):
    near(mel_spectrogram(golden[audio][0], **settings_), golden[name][0].T, 1e-4)


def test_kaldi_fbank_is_upstreams(golden):
    fbank = kaldi_fbank(golden["wav16k"][0])
    near(fbank, golden["kaldi_fbank"], 1e-3)
    near(fbank - fbank.mean(axis=0), golden["kaldi_fbank_cmn"], 1e-3)


def test_whisper_log_mel_is_upstreams(golden):
    near(whisper_log_mel(golden["wav16k"][0]), golden["whisper_logmel128"][0].T, 1e-4)


def test_slaney_filters_are_upstreams(golden):
    want = golden["whisper_mel_filters128"]
    np.testing.assert_allclose(features.slaney_filters(16000, 400, 128, 0, None), want, rtol=0, atol=1e-7)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(0, 3000))
def test_frame_counts(n):
    audio = np.sin(np.arange(n, dtype=np.float32))
    assert whisper_log_mel(audio).shape == (n // 160, 128)
    assert kaldi_fbank(audio).shape == (max(0, 1 + (n - 400) // 160), 80)
    assert mel_spectrogram(audio, fmax=None, **MEL24).shape == (n // 480, 80)


def test_blocks_do_not_show(monkeypatch):
    audio = np.random.default_rng(0).standard_normal(16000).astype(np.float32)
    whole = [kaldi_fbank(audio), whisper_log_mel(audio), mel_spectrogram(audio, **MEL22)]
    monkeypatch.setattr(features, "BLOCK", 7)
    for a, b in zip(whole, [kaldi_fbank(audio), whisper_log_mel(audio), mel_spectrogram(audio, **MEL22)]):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_a_tone_is_in_its_bin():
    tone = np.sin(2 * np.pi * 1000 * np.arange(16000) / 16000).astype(np.float32)
    filters = features.slaney_filters(16000, 400, 128, 0, None)
    assert (whisper_log_mel(tone)[20:80].argmax(axis=1) == filters[:, 25].argmax()).all()  # bin 25 is 1000 Hz
    assert (kaldi_fbank(tone)[20:80].argmax(axis=1) == features.kaldi_filters(16000, 512, 80)[:, 32].argmax()).all()


def test_a_short_window_stands_in_the_middle():
    """win < n_fft: an impulse in the middle of a frame is seen, one at its edge is not."""
    kind = MEL22 | {"win": 256}
    audio = np.zeros(256 * 8, np.float32)
    audio[256 * 4 + 128] = 1  # the middle of frame 4
    mel = mel_spectrogram(audio, **kind)
    assert mel[4].max() > mel[0].max() + 1
    np.testing.assert_allclose(mel[2], mel[0], atol=1e-6)


def test_silence_is_finite():
    for out in (
        kaldi_fbank(np.zeros(16000)),
        whisper_log_mel(np.zeros(16000)),
        mel_spectrogram(np.zeros(9600), fmax=None, **MEL24),
    ):
        assert np.isfinite(out).all()


def test_stereo_is_refused():
    for call in (kaldi_fbank, whisper_log_mel, lambda x: mel_spectrogram(x, **MEL22)):
        with pytest.raises(CosyH3Error, match="mono"):
            call(np.zeros((16000, 2), np.float32))
