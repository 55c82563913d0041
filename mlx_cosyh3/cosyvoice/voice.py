"""A voice: what is taken from a recording (and its transcript) once, so that any text can be spoken with it.

Holds numbers only, as numpy arrays: safe in any thread, saved and loaded as one safetensors file. Nothing in it comes
from the texts that are spoken with it.
"""

import contextlib
import hashlib
import json
import os
import secrets
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes

from mlx_cosyh3 import runtime
from mlx_cosyh3.cosyvoice import audio
from mlx_cosyh3.cosyvoice.special_tokens import TAG
from mlx_cosyh3.cosyvoice.text import take_head
from mlx_cosyh3.errors import CheckpointError, CosyH3Error

FORMAT = "1"
SLOWEST, FASTEST = 3, 30  # letters that are said in a second; a sign of Chinese, Japanese or Korean counts as 3
SPEAKER, MEL = 192, 80  # sizes of an embedding and of a mel frame, the same in all CosyVoice models


@dataclass
class Voice:
    """embedding       float32 [192], the speaker (CAM++)
    prompt_tokens   int32 [P], the recording as speech tokens; empty for a voice that is an embedding alone
    prompt_mel      float32 [M, 80], the recording's mel frames
    transcript      what is said in the recording; None: not known (the text is then spoken without that example)
    transcript_ids  the transcript as token ids, where only those are stored
    codebook        number of speech tokens of the model it was made for, which alone can use it; 0: not known
    made_for        the model's version, "cosyvoice2"; empty: not known. Speech tokens of one mean nothing to another"""

    embedding: np.ndarray
    prompt_tokens: np.ndarray
    prompt_mel: np.ndarray
    transcript: str | None = None
    transcript_ids: np.ndarray | None = None
    name: str = ""
    codebook: int = 0
    sample_rate: int = 24000
    made_for: str = ""

    @classmethod
    def from_audio(cls, model, recording, text=None, *, name="", note=None, compat=False, policy=None):
        """The voice of `recording` (a path, an open file, or (samples, rate)) for `model`.

        text     the transcript of the recording, word for word; without it `generate` has less to imitate
        note     called with each warning (a string); None: warnings.warn
        compat   CosyVoice 1: the mel as upstream makes it, of 24 kHz samples taken for 22.05 kHz ones
        policy   a runtime.Policy, which says where this is computed; None: what the environment says
        Raises CosyH3Error for a recording that is too short, silent or of too low a rate, or a model without the
        two parts that this needs."""
        note = note or audio.warn
        model.need("campplus", "speech_tokenizer")
        samples, rate = audio.read_audio(recording)
        audio.check_clip(samples, rate, note)
        request = runtime.check(policy).request()
        tokens, mel = request.guard("voice", model.speech_features, samples, rate, compat)
        if not len(tokens):
            raise CosyH3Error(f"the recording ({len(samples) / rate:.2f} s) is too short to be a voice: give 3 to 30 s")
        embedding = request.guard("voice", model.speaker, samples, rate)
        if text is not None:
            text = text.strip() or None
        if text:
            check_transcript(text, len(samples) / rate, note)
        made_for = f"cosyvoice{model.version}"
        return cls(embedding, tokens, mel, text, None, name, model.codebook, model.sample_rate, made_for)

    @property
    def has_prompt(self):
        return len(self.prompt_tokens) > 0

    @property
    def is_told(self):
        """Whether it is known what its recording says."""
        return self.transcript is not None or self.transcript_ids is not None

    @property
    def seconds(self):
        """Length of the recording that is kept, s, by its mel frames (so 9 % too much of version 1's with compat)."""
        return (
            self.prompt_mel.shape[0] * 480 / 24000
            if self.sample_rate == 24000
            else self.prompt_mel.shape[0] * 256 / 22050
        )

    @property
    def token_rate(self):
        """Speech tokens a second, 25 or 50, by the length; None without a recording. Version 1 has models of both."""
        if not self.has_prompt:
            return None
        return 50 if len(self.prompt_tokens) > 37.5 * self.seconds else 25

    def save(self, path):
        """Write one safetensors file; it appears whole or not at all. Raises CosyH3Error."""
        path = Path(path).expanduser()
        tensors = {"embedding": self.embedding, "prompt_tokens": self.prompt_tokens, "prompt_mel": self.prompt_mel}
        if self.transcript_ids is not None:
            tensors["transcript_ids"] = self.transcript_ids
        told = {
            "mlx_cosyh3_voice": FORMAT,
            "name": self.name,
            "codebook": str(self.codebook),
            "sample_rate": str(self.sample_rate),
            "made_for": self.made_for,
        }
        if self.transcript is not None:
            told["transcript"] = self.transcript
        told["digest"] = _digest(told, tensors)
        partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            partial.write_bytes(to_bytes({n: np.ascontiguousarray(a) for n, a in tensors.items()}, told))
            os.replace(partial, path)
        except OSError as e:
            raise CosyH3Error(f"cannot write the voice {path}: {e.strerror or e}") from e
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)  # gone already, unless something failed

    @classmethod
    def load(cls, path):
        """Read what `save` wrote. Raises CosyH3Error."""
        path = Path(path).expanduser()
        if not path.is_file():
            raise CosyH3Error(f"there is no voice file {path}")
        try:
            with safe_open(path, "np") as file:
                told, tensors = file.metadata() or {}, {n: file.get_tensor(n) for n in file.keys()}
        except (SafetensorError, OSError, ValueError) as e:
            raise CheckpointError(
                f"{path} is not a voice file ({str(e).splitlines()[0]}); make it again with: mlx_cosyh3 clone"
            ) from e
        if told.get("mlx_cosyh3_voice") != FORMAT:
            raise CheckpointError(f"{path} is no voice file of this program; make one with: mlx_cosyh3 clone")
        try:
            voice = cls(
                tensors["embedding"].astype(np.float32),
                tensors["prompt_tokens"].astype(np.int32),
                tensors["prompt_mel"].astype(np.float32),
                told.get("transcript"),
                tensors["transcript_ids"].astype(np.int32) if "transcript_ids" in tensors else None,
                told.get("name") or path.name.removesuffix(".safetensors").removesuffix(".voice"),
                int(told["codebook"]),
                int(told["sample_rate"]),
                told.get("made_for", ""),
            )
        except (KeyError, ValueError) as e:
            raise CheckpointError(f"{path} is a damaged voice file ({type(e).__name__}: {e}); make it again") from e
        voice._check(path)
        if told.get("digest") not in (None, _digest(told, tensors)):  # older files have none
            raise CheckpointError(f"{path} is a damaged voice file (it is not as it was written); make it again")
        return voice

    def _check(self, path):
        """Raise CheckpointError for numbers that are no voice's."""
        damaged = lambda what: CheckpointError(f"{path} is a damaged voice file ({what}); make it again")  # noqa: E731
        if self.embedding.shape != (SPEAKER,):
            raise damaged(f"its embedding has the shape {list(self.embedding.shape)}, not [{SPEAKER}]")
        if self.prompt_tokens.ndim != 1 or self.prompt_mel.ndim != 2 or self.prompt_mel.shape[1] != MEL:
            raise damaged(
                f"its prompt has the shapes {list(self.prompt_tokens.shape)} and {list(self.prompt_mel.shape)}"
            )
        if self.has_prompt != (len(self.prompt_mel) > 0):
            raise damaged(f"it has {len(self.prompt_tokens)} speech tokens and {len(self.prompt_mel)} mel frames")
        if self.transcript_ids is not None and self.transcript_ids.ndim != 1:
            raise damaged(f"its transcript has the shape {list(self.transcript_ids.shape)}")
        if not all(np.isfinite(a).all() for a in (self.embedding, self.prompt_mel)):
            raise damaged("it holds numbers that are not finite")
        if (
            self.has_prompt
            and self.codebook
            and not 0 <= self.prompt_tokens.min() <= self.prompt_tokens.max() < self.codebook
        ):
            raise damaged(f"it holds a speech token outside of 0 to {self.codebook - 1}")

    def arrays(self):
        """(prompt tokens int32 [1, P], prompt mel [1, M, 80], embedding [1, 192]) as evaluated MLX arrays."""
        out = (mx.array(self.prompt_tokens)[None], mx.array(self.prompt_mel)[None], mx.array(self.embedding)[None])
        mx.eval(out)
        return out


def check_transcript(text, seconds, note):
    """Call `note` when a recording of so many seconds can hardly say `text`: the speech made with it would be poor."""
    said = TAG.sub("", take_head(text)[1])
    letters = sum(3 if unicodedata.east_asian_width(c) in "WF" else 1 for c in said if c.isalnum())
    if not SLOWEST * (seconds - 1) <= letters <= FASTEST * seconds:  # a second may be silent
        wrong = "long" if letters > FASTEST * seconds else "short"
        note(
            f"the transcript {said[:30].strip()!r} is too {wrong} for a recording of {seconds:.1f} s: give exactly "
            "what is said in it"
        )


def _digest(told, tensors):
    """Of all that a voice file holds: a wrong bit in it would be heard, not seen."""
    digest = hashlib.sha256(json.dumps({n: told[n] for n in sorted(told) if n != "digest"}).encode())
    for name, a in sorted(tensors.items()):
        digest.update(f"{name} {a.dtype} {a.shape}".encode() + np.ascontiguousarray(a).tobytes())
    return digest.hexdigest()
