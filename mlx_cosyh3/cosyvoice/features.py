"""What CosyVoice's models hear of a recording: three kinds of log-mel frames, float32 numpy [T, bins].

    mel_spectrogram   what the flow continues and the vocoder turns into sound (Matcha-TTS, matcha/utils/audio.py)
    kaldi_fbank       for the speaker encoder (torchaudio.compliance.kaldi.fbank without dither)
    whisper_log_mel   for the speech tokenizer (OpenAI's whisper/audio.py, but not padded to 30 s)

Computed in float64, a block of frames at a time; only mel energies, 1/10 of the size, are kept.
"""

import functools

import numpy as np

from mlx_cosyh3.errors import CosyH3Error

BLOCK = 256  # frames worked on at a time


def mel_spectrogram(audio, *, rate, n_fft, hop, win, fmin, fmax, bins):
    """audio [N] at `rate` Hz -> [N // hop, bins], natural log of mel magnitudes.

    n_fft, hop, win   in samples
    fmin, fmax        Hz; fmax None: half the rate"""
    pad = (n_fft - hop) // 2
    # Frames of n_fft samples; a shorter window stands in their middle.
    window = np.zeros(n_fft)
    window[(n_fft - win) // 2 :][:win] = _hann(win)
    filters = slaney_filters(rate, n_fft, bins, fmin, fmax)

    def energies(frames):
        spectrum = np.fft.rfft(frames * window)
        return np.sqrt(spectrum.real**2 + spectrum.imag**2 + 1e-9) @ filters.T

    mel = _framewise(_reflect(audio, pad), n_fft, hop, bins, energies)
    return np.log(np.maximum(mel, 1e-5)).astype(np.float32)


def kaldi_fbank(audio):
    """audio [N] at 16 kHz -> [1 + (N - 400) // 160, 80], natural log of mel powers; their mean is not subtracted."""
    size, n_fft = 400, 512
    window = np.hanning(size) ** 0.85  # "povey"
    filters = kaldi_filters(16000, n_fft, 80)

    def energies(frames):
        frames = frames - frames.mean(axis=1, keepdims=True)
        before = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
        spectrum = np.fft.rfft((frames - 0.97 * before) * window, n_fft)[:, :-1]  # no filter reaches the last bin
        return (spectrum.real**2 + spectrum.imag**2) @ filters.T

    mel = _framewise(_mono(audio), size, 160, 80, energies)
    return np.log(np.maximum(mel, np.finfo(np.float32).eps)).astype(np.float32)


def whisper_log_mel(audio, bins=128):
    """audio [N] at 16 kHz -> [N // 160, bins], log10 of mel powers, scaled; depends on the loudest frame."""
    n_fft = 400
    window, filters = _hann(n_fft), slaney_filters(16000, n_fft, bins, 0, None)

    def energies(frames):
        spectrum = np.fft.rfft(frames * window)
        return (spectrum.real**2 + spectrum.imag**2) @ filters.T

    mel = _framewise(_reflect(audio, n_fft // 2), n_fft, 160, bins, energies)[: len(audio) // 160]
    log = np.log10(np.maximum(mel, 1e-10))
    log = np.maximum(log, log.max(initial=-np.inf) - 8)
    return ((log + 4) / 4).astype(np.float32)


# ---------------------------------------------------------------- frames and windows


def _framewise(audio, size, hop, bins, energies):
    """`energies` ([n, size] -> [n, bins]) of all whole frames of `audio` -> float64 [T, bins]."""
    if len(audio) < size:
        return np.zeros((0, bins))
    frames = np.lib.stride_tricks.sliding_window_view(audio, size)[::hop]
    out = np.empty((len(frames), bins))
    for start in range(0, len(frames), BLOCK):
        out[start : start + BLOCK] = energies(frames[start : start + BLOCK].astype(np.float64))
    return out


def _mono(audio):
    audio = np.asarray(audio, dtype=np.float32)
    if audio.ndim != 1:
        raise CosyH3Error(f"features are made of mono audio [N], not {list(audio.shape)}")
    return audio


def _reflect(audio, pad):
    audio = _mono(audio)
    return np.pad(audio, pad, mode="reflect") if len(audio) else audio


def _hann(size):
    """Periodic, as of a spectrogram."""
    return np.hanning(size + 1)[:-1]


# ---------------------------------------------------------------- mel filters


@functools.lru_cache(maxsize=8)
def slaney_filters(rate, n_fft, bins, fmin, fmax):
    """Triangles [bins, n_fft / 2 + 1] of equal area on Slaney's scale: linear to 1 kHz, then logarithmic.

    Equal to librosa.filters.mel with its defaults."""
    fmax = rate / 2 if fmax is None else fmax
    edges = _slaney_hz(np.linspace(_slaney_mel(fmin), _slaney_mel(fmax), bins + 2))  # Hz
    bin_hz = np.linspace(0, rate / 2, n_fft // 2 + 1)
    left, centre, right = (e[:, None] for e in (edges[:-2], edges[1:-1], edges[2:]))
    triangles = np.maximum(0, np.minimum((bin_hz - left) / (centre - left), (right - bin_hz) / (right - centre)))
    filters = triangles * (2 / (right - left))
    filters.flags.writeable = False  # it is cached
    return filters


_LINEAR, _KNEE = 200 / 3, 1000.0  # Hz per mel below the knee (Hz)
_STEP = np.log(6.4) / 27  # per mel above it


def _slaney_mel(hz):
    return hz / _LINEAR if hz < _KNEE else _KNEE / _LINEAR + np.log(hz / _KNEE) / _STEP


def _slaney_hz(mel):
    knee = _KNEE / _LINEAR
    return np.where(mel < knee, mel * _LINEAR, _KNEE * np.exp(_STEP * (mel - knee)))


@functools.lru_cache(maxsize=2)
def kaldi_filters(rate, n_fft, bins, low=20.0):
    """Triangles [bins, n_fft / 2] that are straight in mel, not in Hz; from `low` Hz to half the rate."""
    mel = lambda hz: 1127 * np.log(1 + hz / 700)  # noqa: E731
    edges = np.linspace(mel(low), mel(rate / 2), bins + 2)
    at = mel(np.arange(n_fft // 2) * (rate / n_fft))
    step = edges[1] - edges[0]
    filters = np.maximum(0, 1 - np.abs(at - edges[1:-1, None]) / step)
    filters.flags.writeable = False
    return filters
