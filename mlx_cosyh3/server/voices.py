"""Voices that clients make of recordings, kept under names of our own.

An id is "voice_" and 24 random hex digits. What the client calls a voice is a label inside it, never a file's name.
"""

import contextlib
import io
import re
import secrets
import time
from pathlib import Path

import numpy as np
import soundfile

from mlx_cosyh3 import logs
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.server.errors import ApiError

ID = re.compile(r"voice_[0-9a-f]{24}")
LABEL = 60  # characters of what a client calls a voice
MAGIC = {b"RIFF": "wav", b"fLaC": "flac", b"OggS": "ogg", b"FORM": "aiff", b"ID3": "mp3", b"\xff\xfb": "mp3",
         b"\xff\xf3": "mp3", b"\xff\xf2": "mp3"}  # fmt: skip
MEDIA = "wav, flac, ogg, mp3 or aiff"
BLOCK = 1 << 16  # frames read at a time
log = logs.get("server")


class Voices:
    """folder   where they are kept from one run to the next; None: in memory alone
    most     how many there may be"""

    def __init__(self, folder=None, most=64):
        self.folder, self.most = None if folder is None else Path(folder), most
        self._held = {}  # id -> (Voice, the model's name, seconds since 1970)
        self._promised = 0  # places of voices that are being made
        if self.folder is not None:
            self._read()

    def _read(self):
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as e:
            raise CosyH3Error(f"cannot keep voices in {self.folder}: {e.strerror or e}") from e
        for file in sorted(self.folder.glob("voice_*.safetensors")):
            if not ID.fullmatch(file.stem):
                continue
            try:  # which of the server's models a voice fits shows when it is used: it knows what it was made for
                self._held[file.stem] = Voice.load(file), None, int(file.stat().st_mtime)
            except CosyH3Error as e:
                log.warning("a voice is left out", file=file.name, error=e)

    def __len__(self):
        return len(self._held)

    def __iter__(self):
        """(id, Voice, name of the model, seconds since 1970)"""
        for id, (voice, model, created) in list(self._held.items()):
            yield id, voice, model, created

    def get(self, id):
        """The Voice of an id, or None."""
        return self._held[id][0] if id in self._held else None

    @contextlib.contextmanager
    def place(self):
        """A place for one more voice, for as long as the block runs. Raises ApiError 409 when there is none."""
        if len(self._held) + self._promised >= self.most:
            raise ApiError(
                409, f"there are {self.most} voices already, the most there may be: delete one", code="voices_full"
            )
        self._promised += 1
        try:
            yield
        finally:
            self._promised -= 1

    def save(self, voice):
        """Write it, in any thread -> its id; `keep` then makes it known."""
        id = "voice_" + secrets.token_hex(12)
        if self.folder is not None:
            voice.save(self._file(id))
        return id

    def keep(self, id, voice, model):
        self._held[id] = voice, model, int(time.time())

    def delete(self, id):
        """Forget a voice; whoever speaks with it goes on. Raises ApiError 404."""
        if self._held.pop(id, None) is None:
            raise ApiError(
                404, f"there is no voice {id[:60]!r} that a client made", param="voice", code="voice_not_found"
            )
        self.forget(id)

    def forget(self, id):
        """Take its file away."""
        if self.folder is not None:
            self._file(id).unlink(missing_ok=True)

    def _file(self, id):
        assert ID.fullmatch(id)
        return self.folder / f"{id}.safetensors"


def label(text):
    """What a client calls a voice, fit to be shown: one line, of bounded length."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return text[:LABEL]


def read_recording(data, longest):
    """The bytes of an upload -> (samples float32 [N] mono, Hz). Never more than `longest` seconds are decoded."""
    if not data:
        raise ApiError(400, "the recording is empty (0 bytes)", param="file", code="invalid_audio")
    kind = next((kind for magic, kind in MAGIC.items() if data.startswith(magic)), None)
    if kind is None:
        raise ApiError(400, f"the recording is not {MEDIA}: export it as a wav", param="file", code="invalid_audio")
    blocks, seen = [], 0
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate, channels = file.samplerate, file.channels
            if not 8000 <= rate <= 384000 or channels > 8:
                raise ApiError(
                    400,
                    f"the recording has {channels} channels at {rate} Hz: export it as a mono wav",
                    param="file",
                    code="invalid_audio",
                )
            while len(block := file.read(BLOCK, dtype="float32", always_2d=True)):
                blocks.append(block.mean(axis=1, dtype=np.float32))
                seen += len(block)
                if seen > longest * rate:
                    raise ApiError(
                        400,
                        f"the recording is longer than {longest:g} s: 3 to 30 s of clear speech are enough",
                        param="file",
                        code="audio_too_long",
                    )
    except (soundfile.SoundFileError, RuntimeError, ValueError, OSError) as e:
        why = getattr(e, "error_string", None) or str(e) or type(e).__name__
        raise ApiError(
            400,
            f"the recording cannot be read ({str(why).splitlines()[0].rstrip('. ')}): export it as a wav",
            param="file",
            code="invalid_audio",
        ) from None
    return np.concatenate(blocks or [np.zeros(0, np.float32)]), rate


def make(model, samples, rate, text, name, policy):
    """A Voice and what is to be said about the recording (a list of strings). Raises CosyH3Error."""
    notes = []
    return Voice.from_audio(model, (samples, rate), text, name=name, note=notes.append, policy=policy), notes
