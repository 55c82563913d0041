"""The voices of a published CosyVoice folder: spk2info.pt -> {name: Voice} -> a file for each.

Names are anything (`中文女`); names of files are ASCII, which every file system keeps as they are. Which voice
a file holds is said inside it.
"""

import re

import numpy as np

from mlx_cosyh3.convert.sources import FLOATS, as_float32, is_tensor
from mlx_cosyh3.convert.torch_file import read_torch
from mlx_cosyh3.errors import CheckpointError

RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)  # which Windows does not let one use
LONGEST_STEM = 60
SLACK = 8  # frames by which a prompt's mel may differ from its tokens' time, and a share of it besides
UPSTREAM_RATE = 24000  # Hz, at which upstream's later code makes the mel of version 1, too


def write_voices(folder, voices):
    """One file a voice."""
    if not voices:
        return
    folder.mkdir()
    taken = set()
    for name, voice in voices.items():
        stem = base = file_stem(name)
        while stem.casefold() in taken:
            stem = f"{base}-{len(taken)}"
        taken.add(stem.casefold())
        voice.save(folder / f"{stem}.safetensors")


def file_stem(name):
    """What the file of a voice is called: ASCII letters, digits, - and _; other letters as their code points."""
    stem = "".join(c if re.match(r"[A-Za-z0-9.-]", c) else f"u{ord(c):04x}" if c.isalnum() else "_" for c in name)
    stem = stem[:LONGEST_STEM].strip(".") or "voice"
    return f"voice-{stem}" if RESERVED.fullmatch(stem) else stem


def read_voices(path, config, text_ids, notes):
    """spk2info.pt -> {name: Voice}. text_ids: how many the language model knows. Raises CheckpointError."""
    table = read_torch(path)
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} does not hold a table of voices")
    voices = {}
    for name, entry in table.items():
        if not isinstance(name, str) or not name.strip() or len(name) > 200 or not isinstance(entry, dict):
            raise CheckpointError(f"{path}: the voice {str(name)[:50]!r} is no table with a name of 1 to 200 letters")
        if any("\ud800" <= c <= "\udfff" for c in name):  # which no file can hold
            raise CheckpointError(f"{path}: the name of the voice {name!r} is not Unicode text")
        try:
            voices[name] = _voice(name, entry, config, text_ids, notes)
        except CheckpointError as e:
            raise CheckpointError(f"{path}: the voice {name!r} {e}") from e
    return voices


def _voice(name, entry, config, text_ids, notes):
    from mlx_cosyh3.cosyvoice.voice import Voice

    def get(key, dtype):
        if key not in entry:
            return None
        if not is_tensor(entry[key]):
            raise CheckpointError(f"has {key} that is not a tensor")
        t = entry[key]
        a = as_float32(t.numpy(), t.dtype) if t.dtype in FLOATS else t.numpy()
        if not np.isfinite(a).all():
            raise CheckpointError(f"has {key} with numbers that are not finite")
        if dtype is np.int64 and a.dtype.kind not in "iu":
            raise CheckpointError(f"has {key} of type {t.dtype}, not of whole numbers")
        return np.ascontiguousarray(a, dtype=dtype)

    embedding = next((e for k in ("flow_embedding", "embedding") if (e := get(k, np.float32)) is not None), None)
    width, bins = config["flow"].get("spk_embed_dim", 192), config["mel"]["num_mels"]
    if embedding is None or embedding.size != width:
        found = "none" if embedding is None else f"one of shape {list(embedding.shape)}"
        raise CheckpointError(f"needs an embedding of {width} numbers, has {found}")
    tokens = get("flow_prompt_speech_token", np.int64)
    mel = get("prompt_speech_feat", np.float32)
    ids = get("prompt_text", np.int64)
    if (tokens is None) != (mel is None):
        raise CheckpointError("has only one of flow_prompt_speech_token and prompt_speech_feat")
    tokens = np.zeros(0, np.int64) if tokens is None else tokens.reshape(-1)
    if mel is not None and (mel.size % bins or mel.shape[-1] != bins):
        raise CheckpointError(f"has prompt_speech_feat of shape {list(mel.shape)}, not of {bins} bins")
    mel = np.zeros((0, bins), np.float32) if mel is None else mel.reshape(-1, bins)
    size = config["llm"]["speech_token_size"]
    for what, values, count in (("speech tokens", tokens, size), ("text ids", ids, text_ids)):
        if values is not None and values.size and not 0 <= values.min() <= values.max() < count:
            raise CheckpointError(f"has {what} outside of 0 to {count - 1}")
    _check_lengths(name, len(tokens), len(mel), config, notes)
    lm_tokens = get("llm_prompt_speech_token", np.int64)
    if lm_tokens is not None and not np.array_equal(lm_tokens.reshape(-1), tokens):
        notes.append(
            f"voice {name!r}: the speech tokens for the flow and for the language model differ; the flow's are used"
        )
    ids = None if ids is None or not ids.size else ids.reshape(-1).astype(np.int32)
    return Voice(
        embedding.reshape(-1), tokens.astype(np.int32), mel, None, ids, name, size, config["sample_rate"],
        config["model_type"],
    )  # fmt: skip


def _check_lengths(name, tokens, frames, config, notes):
    """As many mel frames as the tokens last; in version 1, about as many."""
    ratio = config.get("token_mel_ratio")
    if ratio is not None:
        if frames != tokens * ratio:
            raise CheckpointError(f"has {tokens} speech tokens and {frames} mel frames, not {ratio} a token")
        return
    rate = config["sample_rate"] / config["mel"]["hop_size"]
    expected = tokens / config["token_frame_rate"] * rate
    if (tokens == 0) != (frames == 0) or abs(frames - expected) > SLACK + 0.15 * expected:
        raise CheckpointError(
            f"has {tokens} speech tokens and {frames} mel frames, where about {expected:.0f} are right"
        )
    if abs(frames - expected * UPSTREAM_RATE / config["sample_rate"]) < abs(frames - expected) - SLACK / 4:
        notes.append(
            f"voice {name!r}: its mel was made of {UPSTREAM_RATE} Hz audio, as upstream's later code does by mistake; "
            "make the voice again from its recording"
        )
