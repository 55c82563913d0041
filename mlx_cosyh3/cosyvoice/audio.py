"""Recordings in, audio files out, and sound from the loudspeaker. Audio is float32 numpy [N], mono, from -1 to 1."""

import contextlib
import io
import math
import numbers
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import soundfile

from mlx_cosyh3.errors import CosyH3Error

MIN_RATE = 16000  # Hz: the front ends listen up to 8 kHz
MIN_SECONDS = 0.5
LONG_SECONDS = 30  # upstream refuses longer recordings
SILENCE = 1e-3  # a recording that never leaves its mean by more is silent (-60 dB)
BLOCK = 1 << 20  # numbers worked on at a time
FORMATS = {".wav": ("WAV", "PCM_16"), ".flac": ("FLAC", "PCM_16")}
PLAYERS = {
    "afplay": ["afplay"],
    "paplay": ["paplay"],
    "aplay": ["aplay", "-q"],
    "ffplay": ["ffplay", "-nodisp", "-autoexit", "-loglevel", "error"],
}


def warn(text):
    """What notes go to unless the caller takes them."""
    warnings.warn(text, UserWarning, stacklevel=3)


# ---------------------------------------------------------------- recordings


def read_audio(source):
    """A recording -> (float32 [N], the mean of its channels; rate in Hz).

    source   a path or an open binary file, in any format of libsndfile (wav, flac, ogg, mp3 ...); or (array, rate)
             with an array [N], [N, channels] or [channels, N] of floats, or of integers at full scale
    Raises CosyH3Error for what cannot be read, is empty, or holds numbers that are not finite."""
    if isinstance(source, tuple):
        name, (samples, rate) = "the recording", _from_array(source)
    elif isinstance(source, (str, os.PathLike)) or hasattr(source, "read"):
        name, samples, rate = _from_file(source)
    else:
        raise CosyH3Error(f"a recording is a path, an open file or (samples, rate), not {type(source).__name__}")
    if not len(samples):
        raise CosyH3Error(f"{name} holds no audio: it has 0 samples")
    bad = len(samples) - np.count_nonzero(np.isfinite(samples))
    if bad:
        raise CosyH3Error(f"{name} holds {bad} samples that are not finite numbers (NaN or infinity): export it again")
    return samples, rate


def _from_file(source):
    """(what to call it, samples, rate) of a file, read block by block: its header's length is not trusted."""
    is_path = not hasattr(source, "read")
    name = str(source) if is_path else str(getattr(source, "name", "the recording"))
    if is_path:
        source = _path(source)
        try:
            is_file, is_folder = source.is_file(), source.is_dir()
            size = source.stat().st_size if is_file else 0
        except OSError as e:
            raise CosyH3Error(f"cannot read {name[:200]}: {e.strerror or e}") from e
        if not is_file:
            raise CosyH3Error(f"{name} is a folder, not a recording" if is_folder else f"there is no recording {name}")
        if not size:
            raise CosyH3Error(f"{name} is empty (0 bytes)")
    blocks = []
    try:
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(open(source, "rb")) if is_path else source
            file = stack.enter_context(soundfile.SoundFile(raw))
            size = max(1, BLOCK // file.channels)
            while len(block := file.read(size, dtype="float32", always_2d=True)):
                blocks.append(block.mean(axis=1, dtype=np.float32))
            rate = file.samplerate
    except (soundfile.SoundFileError, OSError, RuntimeError, TypeError, ValueError, AttributeError) as e:
        why = getattr(e, "error_string", None) or getattr(e, "strerror", None) or str(e) or type(e).__name__
        hint = "" if isinstance(e, OSError) else "; make a wav of it: ffmpeg -i IN -ar 24000 -ac 1 OUT.wav"
        raise CosyH3Error(f"cannot read {name} as audio ({str(why).splitlines()[0].rstrip('. ')}){hint}") from e
    return name, np.concatenate(blocks or [np.zeros(0, np.float32)]), rate


def _from_array(source):
    """(samples, rate) of (array, rate)."""
    if len(source) != 2:
        raise CosyH3Error(f"a recording given as numbers is (samples, rate), not a tuple of {len(source)}")
    rate = _rate(source[1])
    try:
        samples = np.asarray(source[0])
    except ValueError as e:
        raise CosyH3Error("samples must be one array [N] or [N, channels]: the channels differ in length") from e
    if samples.ndim not in (1, 2):
        raise CosyH3Error(f"samples must have the shape [N] or [N, channels], not {list(samples.shape)}")
    if samples.dtype.kind == "i":
        samples = samples.astype(np.float32) / (1 << 8 * samples.itemsize - 1)
    elif samples.dtype == np.uint8:
        samples = (samples.astype(np.float32) - 128) / 128
    elif samples.dtype.kind != "f":
        raise CosyH3Error(f"samples must be floats from -1 to 1 or signed integers, not {samples.dtype}")
    with np.errstate(over="ignore"):  # infinite then, and refused
        samples = samples.astype(np.float32)
    if samples.ndim == 2 and not samples.size:
        samples = samples.reshape(-1)
    if samples.ndim == 2:  # a recording has more samples than channels
        samples = samples.mean(axis=1 if samples.shape[0] >= samples.shape[1] else 0, dtype=np.float32)
    return samples, rate


def _rate(rate):
    if isinstance(rate, numbers.Real) and math.isfinite(rate) and 0 < rate == int(rate) < 1 << 31:
        return int(rate)
    raise CosyH3Error(f"a sample rate is a whole number of Hz such as 24000, not {rate!r}")


def _path(path):
    """As a Path, with ~ made the home folder; where there is no such home, the name as it is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def check_clip(audio, rate, note=warn):
    """Raise CosyH3Error for a recording that is of no use; call `note` with what makes it a poor one."""
    seconds = len(audio) / rate
    if rate < MIN_RATE:
        raise CosyH3Error(
            f"the recording has a rate of {rate} Hz: at least {MIN_RATE} Hz is needed: record it again"
        )
    if seconds < MIN_SECONDS:
        raise CosyH3Error(
            f"the recording is too short ({seconds:.2f} s): the minimum is {MIN_SECONDS} s, and 3 to 30 s are best"
        )
    high, low = float(audio.max()), float(audio.min())
    if max(high - audio.mean(), audio.mean() - low) < SILENCE:
        raise CosyH3Error(
            f"the recording is silent (its peak is {max(high, -low):.1g} of full scale): check the microphone"
        )
    peak = max(high, -low)
    if peak > 1.001:
        note(
            f"the recording is clipped or badly scaled: its peak is {peak:.2f} of full scale; record it lower"
        )
    elif peak > 0.9 and (share := _flat_tops(audio, peak)) > 1e-3:
        note(f"the recording is clipped ({share:.1%} of its samples stand at the limit): record it at a lower level")
    if seconds > LONG_SECONDS:
        note(f"the recording ({seconds:.1f} s) is longer than {LONG_SECONDS} s: 3 to {LONG_SECONDS} s of clear "
             "speech are enough, more is slower and no better")  # fmt: skip


def _flat_tops(audio, peak):
    """Share of the samples that stand at the peak, three or more in a row."""
    top = np.concatenate(([0], np.abs(audio) >= peak - 2**-15, [0])).astype(np.int8)
    edges = np.diff(top)
    runs = np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)
    return runs[runs >= 3].sum() / len(audio)


def resample(x, old, new):
    """float32 [N] at `old` Hz -> float32 [ceil(N new / old)] at `new` Hz.

    Windowed-sinc interpolation with the numbers of torchaudio.transforms.Resample: a Hann window over 6 zero crossings
    each side, the filter's edge at 0.99 of the lower Nyquist frequency. Memory is bounded for any two rates: only the
    taps inside the window are computed, and outputs are made a block at a time."""
    x = np.asarray(x, dtype=np.float32)
    if x.ndim != 1:
        raise CosyH3Error(f"resample takes mono audio [N], not {list(x.shape)}: average the channels first")
    old, new = _rate(old), _rate(new)
    common = math.gcd(old, new)
    old, new = old // common, new // common
    if old == new:
        return x
    zeros, edge = 6, min(old, new) * 0.99
    width = math.ceil(zeros * old / edge)  # input samples each side
    taps = np.arange(2 * width + 2)

    def kernel(phase):  # [P] -> [P, taps]; output phase p of `new` lies at the input sample p old / new
        first = phase * old // new - width
        t = (first[:, None] + taps) / old - phase[:, None] / new
        t = np.clip(t * edge, -zeros, zeros)
        window = np.cos(t * (np.pi / zeros / 2)) ** 2
        return (np.sinc(t) * window * (edge / old)).astype(np.float32)

    length = -(-len(x) * new // old)
    size = max(1, BLOCK // len(taps))
    table = kernel(np.arange(new)) if new <= size else None  # where all phases fit in a block
    padded = np.concatenate([np.zeros(width, np.float32), x, np.zeros(width + 2, np.float32)])
    out = np.empty(length, np.float32)
    for start in range(0, length, size):
        n = np.arange(start, min(start + size, length), dtype=np.int64)
        weights = kernel(n % new) if table is None else table[n % new]
        near = padded[(n * old // new)[:, None] + taps]  # [P, taps]
        out[n] = np.einsum("pk,pk->p", near, weights)
    return out


# ---------------------------------------------------------------- files


def write_wav(path, audio, rate):
    """Write audio [N] as 16-bit wav, or flac if the name ends so; "-" writes a wav to stdout.

    The file appears whole or not at all. Raises CosyH3Error for an ending that is not known, a place that cannot be
    written, and audio that is empty, not finite or all zeros: such a file is never what was wanted."""
    audio, rate = np.asarray(audio), _rate(rate)
    ending = ".wav" if str(path) == "-" else Path(path).suffix.lower()
    if ending not in FORMATS:
        raise CosyH3Error(f"{path}: audio is written as {' or '.join(FORMATS)}, not {ending or 'without an ending'!r}")
    if audio.ndim != 1 or audio.dtype.kind != "f":
        raise CosyH3Error(f"cannot write {path}: audio must be floats [N], not {audio.dtype} {list(audio.shape)}")
    if not len(audio):
        raise CosyH3Error(f"cannot write {path}: there is no audio (0 samples)")
    if not np.isfinite(audio).all():
        raise CosyH3Error(f"cannot write {path}: the audio holds numbers that are not finite")
    if not audio.any():
        raise CosyH3Error(f"cannot write {path}: the audio is all zeros")
    pcm = np.round(np.clip(audio, -1, 1) * 32767).astype(np.int16)
    kind, subtype = FORMATS[ending]
    buffer = io.BytesIO()
    try:
        soundfile.write(buffer, pcm, rate, format=kind, subtype=subtype)
        if str(path) == "-":
            sys.stdout.buffer.write(buffer.getbuffer())
            sys.stdout.buffer.flush()
        else:
            _replace(os.path.realpath(_path(path)), buffer.getbuffer())
    except (OSError, ValueError, soundfile.LibsndfileError) as e:  # ValueError: a zero byte in the name
        why = getattr(e, "error_string", None) or getattr(e, "strerror", None) or e
        raise CosyH3Error(f"cannot write {'to stdout' if str(path) == '-' else path}: {why}") from e


def _replace(path, data):
    """Write a file beside `path`, then give it that name. A pipe or a device is written as it is."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(data)
        return
    partial = path.with_name(f".{path.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)  # gone already, unless something failed


# ---------------------------------------------------------------- loudspeaker


class Player:
    """Plays mono audio: piece by piece where `sounddevice` can, else all of it at `finish` with a program.

    Raises CosyH3Error where there is nothing to play with, and later if the device fails."""

    def __init__(self, rate):
        self.rate = _rate(rate)
        self._device = self._stream = self._program = self._process = None
        self._pieces = []
        try:
            import sounddevice  # optional; OSError: the package is there, its library is not

            self._device = sounddevice
        except (ImportError, OSError):
            self._program = next((command for name, command in PLAYERS.items() if shutil.which(name)), None)
            if self._program is None:
                raise CosyH3Error(
                    "there is nothing to play audio with: pip install sounddevice, or install one of "
                    f"{', '.join(PLAYERS)}"
                ) from None
        if self._device is not None:
            with self._device_errors():
                self._stream = self._device.OutputStream(samplerate=self.rate, channels=1, dtype="float32")
                self._stream.start()

    def add(self, samples):
        """Play `samples` [n] after all before; with a device it waits until they are on their way."""
        samples = np.ascontiguousarray(samples, dtype=np.float32)
        if not len(samples):
            return
        if self._stream is None:
            self._pieces.append(samples)
        else:
            with self._device_errors():
                self._stream.write(samples[:, None])

    def finish(self):
        """Wait until everything was played."""
        if self._stream is not None:
            with self._device_errors():
                self._stream.stop()
        elif self._pieces:
            with tempfile.TemporaryDirectory() as folder:
                file = os.path.join(folder, "speech.wav")
                write_wav(file, np.concatenate(self._pieces), self.rate)
                self._pieces = []
                self._run(file)

    def close(self):
        """Be silent at once and let the device go. May be called twice."""
        self._pieces = []
        if self._stream is not None:
            stream, self._stream = self._stream, None
            with self._device_errors():
                stream.abort()
                stream.close()
        self._stop_process()

    def _run(self, file):
        try:
            self._process = subprocess.Popen([*self._program, file], stdin=subprocess.DEVNULL,
                                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                                             text=True, errors="replace")  # fmt: skip
            said = self._process.communicate()[1].strip()
            if self._process.returncode:
                why = said.splitlines()[-1] if said else f"exit code {self._process.returncode}"
                raise CosyH3Error(f"{self._program[0]} could not play the audio: {why}")
        except OSError as e:
            raise CosyH3Error(f"cannot run {self._program[0]}: {e.strerror or e}") from e
        finally:
            self._stop_process()

    def _stop_process(self):
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process is not None and process.stderr is not None:
            process.stderr.close()

    @contextlib.contextmanager
    def _device_errors(self):
        try:
            yield
        except self._device.PortAudioError as e:
            raise CosyH3Error(f"the sound device failed: {str(e).splitlines()[0]}") from e
