"""Audio as bytes of a format, at once or piece by piece. Samples are float32 [n], mono, from -1 to 1.

libsndfile writes what is compressed. What it would go back for and mend at the end, the length in a header, cannot
be mended in a stream: a streamed wav gives the largest there is, a streamed flac says that it is unknown, as the
formats want it.
"""

import io
import struct

import numpy as np
import soundfile

from mlx_cosyh3.cosyvoice.audio import resample
from mlx_cosyh3.errors import CosyH3Error

# name -> (media type, libsndfile's format and subtype, rates it can have in Hz; None: any)
FORMATS = {
    "mp3": ("audio/mpeg", "MP3", "MPEG_LAYER_III", (16000, 22050, 24000, 44100, 48000)),
    "opus": ("audio/ogg", "OGG", "OPUS", (16000, 24000, 48000)),
    "flac": ("audio/flac", "FLAC", "PCM_16", None),
    "wav": ("audio/wav", "WAV", "PCM_16", None),
    "pcm": ("audio/pcm", None, None, (24000,)),  # 16 bits, little endian; OpenAI's clients take its rate for granted
}
UNKNOWN = 0xFFFFFFFF  # of a wav's length


def media_type(name):
    return FORMATS[name][0]


def encode(samples, rate, name):
    """All of `samples` -> bytes, with the right length in the header."""
    samples, rate = fit(samples, rate, name)
    if name in ("wav", "pcm"):
        data = pcm(samples)
        return data if name == "pcm" else wav_head(rate, len(data)) + data
    out = io.BytesIO()
    with _open(out, rate, name) as file:
        file.write(samples)
    return out.getvalue()


class Encoder:
    """Piece by piece: `add(samples)` and, at last, `finish()` give the bytes that are ready by then, maybe none."""

    def __init__(self, rate, name):
        self.name, self.rate = name, rate
        self._out, self._begun, fits = _Sink(), False, _rate(rate, name)
        self._file = None if name in ("wav", "pcm") else _open(self._out, fits, name)
        self._fitted = None if fits == rate else Resampler(rate, fits)

    def add(self, samples):
        if self._fitted is not None:
            samples = self._fitted.add(samples)
        return self._write(samples)

    def finish(self):
        """The end; nothing may be added after it."""
        out = b"" if self._fitted is None else self._write(self._fitted.add(np.zeros(0, np.float32), last=True))
        if self._file is not None:
            self._file.close()
            out += self._out.take()
        return out

    def close(self):
        """Give up; what is not written yet is lost."""
        if self._file is not None:
            self._file.close()

    def _write(self, samples):
        if self._file is not None:
            self._file.write(np.ascontiguousarray(samples, np.float32))
            return self._out.take()
        head = b"" if self._begun or self.name == "pcm" else wav_head(self.rate)
        self._begun = True
        return head + pcm(samples)


class Resampler:
    """`resample` piece by piece, with the numbers it has for the whole."""

    def __init__(self, old, new):
        self.old, self.new = old, new
        self._step = old // np.gcd(old, new)  # input samples after which the filter's phases come again
        self._around = 64 * self._step  # more than the filter's reach
        self._past, self._wait = np.zeros(0, np.float32), np.zeros(0, np.float32)

    def add(self, samples, last=False):
        self._wait = np.concatenate([self._wait, np.asarray(samples, np.float32)])
        n = len(self._wait) if last else max(0, (len(self._wait) - self._around) // self._step * self._step)
        if not n:
            return np.zeros(0, np.float32)
        made = resample(np.concatenate([self._past, self._wait]), self.old, self.new)
        begin = len(self._past) * self.new // self.old
        end = None if last else begin + n * self.new // self.old
        both = np.concatenate([self._past, self._wait[:n]])
        keep = min(self._around, len(both) // self._step * self._step)
        self._past, self._wait = both[len(both) - keep :], self._wait[n:]
        return made[begin:end]


class _Sink(io.RawIOBase):
    """Takes what is written at its end; what would change bytes that are on their way already is dropped."""

    def __init__(self):
        self._ready, self._at, self._size = [], 0, 0

    def write(self, data):
        data = bytes(data)
        fresh = data[max(0, self._size - self._at) :]
        self._at += len(data)
        if fresh:
            self._ready.append(fresh)
            self._size = self._at
        return len(data)

    def seek(self, offset, whence=0):
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self):
        return self._at

    def readinto(self, buffer):
        return 0

    def readable(self):
        return True

    def writable(self):
        return True

    def seekable(self):
        return True

    def take(self):
        ready, self._ready = b"".join(self._ready), []
        return ready


def _open(out, rate, name):
    """A SoundFile that writes to `out`."""
    _, kind, subtype, _ = FORMATS[name]
    how = {"compression_level": 0.4, "bitrate_mode": "CONSTANT"} if name == "mp3" else {}  # 96 kbit/s
    try:
        return soundfile.SoundFile(out, "w", rate, 1, subtype, format=kind, **how)
    except (soundfile.SoundFileError, RuntimeError) as e:
        raise CosyH3Error(f"cannot write {name}: {str(e).splitlines()[0]}; ask for wav") from e


def fit(samples, rate, name):
    """(samples, rate) at a rate that the format can have."""
    to = _rate(rate, name)
    return (samples, rate) if to == rate else (resample(samples, rate, to), to)


def _rate(rate, name):
    rates = FORMATS[name][3]
    return rate if rates is None or rate in rates else 24000


def pcm(samples):
    """16 bits, little endian."""
    return np.rint(np.clip(samples, -1, 1) * 32767).astype("<i2").tobytes()


def wav_head(rate, size=None):
    """The 44 bytes before `size` bytes of samples (None: nobody knows how many)."""
    riff, data = (UNKNOWN, UNKNOWN) if size is None else (36 + size, size)
    kind = struct.pack("<IHHIIHH", 16, 1, 1, rate, 2 * rate, 2, 16)  # PCM, mono, 16 bits
    return b"RIFF" + struct.pack("<I", riff) + b"WAVEfmt " + kind + b"data" + struct.pack("<I", data)
