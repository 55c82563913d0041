"""A published CosyVoice 3 folder, read: its numbers as our config.json, its five parts as named tensors, its voices.

The yaml says which version it is and what the sizes are; the weights say what the sizes are, too. Where both do, they
must agree. Nothing is computed here and nothing is copied: tensors are views of memory-mapped files.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mlx_cosyh3.convert.common import some
from mlx_cosyh3.convert.cosyvoice_check import QWEN2, check_kinds, check_numbers, check_parts
from mlx_cosyh3.convert.hyperyaml import read_hyperyaml
from mlx_cosyh3.convert.sources import FLOATS, ArrayTensor, as_float32, is_tensor, open_source
from mlx_cosyh3.convert.torch_file import read_torch
from mlx_cosyh3.cosyvoice import flow, hift, llm, text_tokenizer
from mlx_cosyh3.errors import CheckpointError, CosyH3Error

YAML = "cosyvoice3.yaml"
OTHER_YAMLS = {"cosyvoice.yaml": "CosyVoice 1", "cosyvoice2.yaml": "CosyVoice 2"}
FRONT_ENDS = {"campplus": "campplus.onnx", "speech_tokenizer": "speech_tokenizer_v3.onnx"}
VOICES = "spk2info.pt"
TEXT_FILES = tuple(f"{QWEN2}/{name}" for name in ("config.json", *text_tokenizer.FILES))
SANITIZE = {"llm": llm.sanitize, "flow": flow.sanitize, "hift": hift.sanitize}


@dataclass
class SpeechSource:
    """An opened model folder."""

    name: str  # a repo id, or the folder's name
    folder: Path
    config: dict  # what config.json will say of the model itself: no dtype, no quantisation
    parts: dict  # {part: {our name: tensor}}
    files: dict  # {part: the file it is from}
    tokenizer: list  # of paths
    voices: dict = field(default_factory=dict)  # {name: Voice}
    skipped: dict = field(default_factory=dict)  # {file name: [tensors that the model does not need]}
    notes: list = field(default_factory=list)
    others: list = field(default_factory=list)  # further files that were read
    read: dict = field(default_factory=dict)  # {part: bytes of its tensors in the file}, where they are not ours
    packed: dict = field(default_factory=dict)  # {part: quantisation that its tensors have already}
    repo: str = None
    revision: str = None

    @property
    def paths(self):
        return list(dict.fromkeys([*self.files.values(), *self.others, *self.tokenizer]))


def version_of(names):
    """Which model a folder with these file names holds: the name of its yaml, or None. Raises CosyH3Error."""
    if YAML in names:
        return YAML
    for name, model in OTHER_YAMLS.items():
        if name in names:
            raise CosyH3Error(f"{name} says that this is {model}, which is not supported yet: use a CosyVoice 3 folder")
    if {"llm.pt", "flow.pt"} <= set(names):
        raise CosyH3Error(f"there are llm.pt and flow.pt, but no {YAML}, which says what they are: copy it, too")
    return None


def wanted(llm_file="llm.pt"):
    """The files of a hub repo that are needed."""
    return [YAML, llm_file, "flow.pt", "hift.pt", *FRONT_ENDS.values(), VOICES, *TEXT_FILES]


def read_folder(folder, name, llm_file=None, front_ends=None):
    """Open the model in `folder` -> SpeechSource. Raises CosyH3Error.

    llm_file     in place of llm.pt
    front_ends   {part: path} of ONNX files in place of the folder's"""
    folder = Path(folder)
    files = {"llm": folder / (llm_file or "llm.pt"), "flow": folder / "flow.pt", "hift": folder / "hift.pt"}
    missing = [path.name for path in files.values() if not path.is_file()]
    if missing:
        raise CosyH3Error(f"{name} lacks {', '.join(missing)}: copy the whole model folder")
    yaml = read_hyperyaml(folder / YAML)
    qwen2 = _json(folder / QWEN2 / "config.json")
    tokenizer = text_tokenizer.SpeechTextTokenizer.from_dir(folder)
    with _told(folder / YAML):
        config = config_of(yaml, qwen2, tokenizer)
    check_kinds(config, YAML)
    source = SpeechSource(name, folder, config, {}, files, text_tokenizer.files(folder))
    source.others = [folder / YAML, folder / QWEN2 / "config.json"]
    for part, path in files.items():
        source.parts[part] = _read_part(source, part, path)
    with _told(folder / YAML):
        check_numbers(source.config, source.parts, {p: f.name for p, f in files.items()}, YAML)
    tokenizer.check(config["llm"]["qwen2"]["vocab_size"])
    for part, file in FRONT_ENDS.items():
        path = (front_ends or {}).get(part, folder / file)
        if path.is_file():
            read_front_end(source, part, path)
    if (folder / VOICES).is_file():
        source.others.append(folder / VOICES)
        source.voices = read_voices(folder / VOICES, config, source.notes)
    need_voices(source)
    check_parts(source)
    return source


def need_voices(source):
    """Without front ends a model can speak only with voices that it holds."""
    lacking = [part for part in FRONT_ENDS if source.config.get(part) is None]
    names = ", ".join(FRONT_ENDS[part] for part in lacking)
    if lacking and not source.voices:
        raise CosyH3Error(
            f"{source.name} lacks {names}, and {VOICES} with voices as well: nothing could speak; copy them"
        )
    if lacking:
        source.notes.append(
            f"without {names} no voice can be made of a recording; it speaks with {some(list(source.voices))}"
        )


# What the yaml says


class _told:
    """Within it, a missing or odd entry is an error that names the file."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, KeyError):
            raise CheckpointError(f"{self.path} lacks the entry {error}: it is not a CosyVoice 3 yaml") from error
        if isinstance(error, (TypeError, AttributeError, IndexError, ZeroDivisionError)):
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"{self.path} has an entry of another kind than expected ({reason})") from error
        if isinstance(error, CheckpointError):
            text = str(error)
            raise CheckpointError(text if self.path.name in text else f"{self.path}: {text}") from error
        return False


def config_of(yaml, qwen2, tokenizer):
    """config.json from the yaml and from Qwen2's own config (dicts)."""
    made = yaml["llm"]["__new__"].rpartition(".")[2]
    if made != "CosyVoice3LM":
        raise CheckpointError(f"its llm is a {made}, not a CosyVoice3LM; only CosyVoice 3 is supported")
    lm = llm.SpeechLMConfig.v3(
        qwen2, yaml["llm"]["speech_token_size"], tokenizer.end_of_prompt_id, yaml["llm"].get("mix_ratio", (5, 15))
    )
    mel, decoder = yaml["feat_extractor"], yaml["flow"]["decoder"]
    flow_config = {k: v for k, v in _plain(yaml["flow"]).items() if k != "decoder"}
    flow_config |= {"dit": _plain(decoder["estimator"]), "cfm": _plain(decoder["cfm_params"]["content"])}
    config = {
        "model_type": "cosyvoice3",
        "sample_rate": yaml["sample_rate"],
        "token_frame_rate": yaml["token_frame_rate"],
        "token_mel_ratio": yaml["token_mel_ratio"],
        "chunk_size": yaml["chunk_size"],
        "llm": dataclasses.asdict(lm) | {"mix_ratio": list(lm.mix_ratio)},
        "flow": flow_config,
        "hift": _plain(yaml["hift"]),
        "campplus": None,
        "speech_tokenizer": None,
        "mel": {k: mel[k] for k in ("n_fft", "hop_size", "win_size", "num_mels", "fmin", "fmax")},
        "special_tokens": tokenizer.special,
    }
    numbers = {k: config[k] for k in ("sample_rate", "token_frame_rate", "token_mel_ratio", "chunk_size")}
    numbers |= {f"feat_extractor.{k}": config["mel"][k] for k in ("n_fft", "hop_size", "win_size", "num_mels")}
    numbers["flow.spk_embed_dim"] = flow_config.get("spk_embed_dim", 192)
    for key, value in numbers.items():
        if type(value) is not int or value < 1:
            raise CheckpointError(f"{key} is {value!r}, not a whole number from 1")
    for what, a, b in (
        ("feat_extractor.num_mels and flow.output_size", mel["num_mels"], flow_config["output_size"]),
        ("llm.llm_input_size and the Qwen2 config's hidden_size", yaml["llm"]["llm_input_size"], lm.qwen2.hidden_size),
        ("llm.speech_token_size and flow.vocab_size", lm.speech_token_size, flow_config["vocab_size"]),
        ("sample_rate and hift.sampling_rate", yaml["sample_rate"], config["hift"]["sampling_rate"]),
        ("sample_rate and feat_extractor.sampling_rate", yaml["sample_rate"], mel["sampling_rate"]),
        ("token_mel_ratio and flow.token_mel_ratio", yaml["token_mel_ratio"], flow_config["token_mel_ratio"]),
        ("mel frames a second, of hop_size and of token_frame_rate * token_mel_ratio,",
         yaml["sample_rate"] / mel["hop_size"], yaml["token_frame_rate"] * yaml["token_mel_ratio"]),
    ):  # fmt: skip
        if a != b:
            raise CheckpointError(f"{what} differ: {a} and {b}")
    return config


def _plain(mapping):
    """Without the names of upstream's classes."""
    if not isinstance(mapping, dict):
        return mapping
    return {k: _plain(v) for k, v in mapping.items() if not str(k).startswith("__")}


def _json(path):
    if not path.is_file():
        raise CosyH3Error(
            f"{path} is missing: copy the whole model folder ({QWEN2}/ holds the tokenizer and config.json)"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not valid JSON ({type(e).__name__})") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


# What the weights say


def _read_part(source, part, path):
    opened = open_source(path)
    arrays = {k: _numpy(t, path, k) for k, t in opened.tensors.items()}
    try:
        ours = SANITIZE[part](arrays)
    except CheckpointError as e:
        raise CheckpointError(f"{path}: {e}") from e
    skipped = list(opened.ignored)
    if part != "hift":  # of which every tensor is needed, halves of weight norm only together
        skipped += [k for k, a in arrays.items() if not SANITIZE[part]({k: a})]
    source.skipped[path.name] = skipped
    source.read[part] = sum(t.nbytes for k, t in opened.tensors.items() if k not in skipped)
    return {name: ArrayTensor(a) for name, a in ours.items()}


def _numpy(tensor, path, name):
    if tensor.dtype not in FLOATS:
        raise CheckpointError(
            f"{path}: tensor {name!r} is of type {tensor.dtype}, not a float: the file is of another model"
        )
    array = tensor.numpy()
    return as_float32(array, "BF16") if tensor.dtype == "BF16" else array


# Front ends and voices


def read_front_end(source, part, path):
    """Add the front end `part` from an ONNX file; the speech tokenizer also from an MLX conversion."""
    # Imported here: most calls need none of it.
    from mlx_cosyh3.convert import cosyvoice_mlx, front_ends

    path = Path(path).expanduser()
    if path.suffix != ".onnx" and part == "speech_tokenizer":
        config, weights = cosyvoice_mlx.read_speech_tokenizer(path)
    elif path.suffix != ".onnx":
        raise CosyH3Error(f"--{part} {path}: expected an .onnx file")
    else:
        config, weights = {"campplus": front_ends.campplus_from, "speech_tokenizer": front_ends.speech_tokenizer_from}[
            part
        ](path)
    codes = config.get("codebook") or 3 ** config.get("digits", 0)
    if part == "speech_tokenizer" and codes != source.config["llm"]["speech_token_size"]:
        source.notes.append(
            f"{path.name} has {codes} speech tokens, the language model {source.config['llm']['speech_token_size']}: "
            "they do not belong together, and a voice made with it may not speak"
        )
    source.files[part] = path if path.is_file() else next(iter(sorted(path.glob("*.safetensors"))))
    source.config[part] = config
    source.parts[part] = {name: ArrayTensor(a) for name, a in weights.items()}


def read_voices(path, config, notes):
    """spk2info.pt -> {name: Voice}."""
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
            voices[name] = _voice(name, entry, config, notes)
        except CheckpointError as e:
            raise CheckpointError(f"{path}: the voice {name!r} {e}") from e
    return voices


def _voice(name, entry, config, notes):
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
    size, rows = config["llm"]["speech_token_size"], config["llm"]["qwen2"]["vocab_size"]
    for what, values, count in (("speech tokens", tokens, size), ("text ids", ids, rows)):
        if values is not None and values.size and not 0 <= values.min() <= values.max() < count:
            raise CheckpointError(f"has {what} outside of 0 to {count - 1}")
    ratio = config["token_mel_ratio"]
    if len(mel) != len(tokens) * ratio:
        raise CheckpointError(f"has {len(tokens)} speech tokens and {len(mel)} mel frames, not {ratio} a token")
    lm_tokens = get("llm_prompt_speech_token", np.int64)
    if lm_tokens is not None and not np.array_equal(lm_tokens.reshape(-1), tokens):
        notes.append(
            f"voice {name!r}: the speech tokens for the flow and for the language model differ; the flow's are used"
        )
    ids = None if ids is None or not ids.size else ids.reshape(-1).astype(np.int32)
    return Voice(embedding.reshape(-1), tokens.astype(np.int32), mel, None, ids, name, size, config["sample_rate"])
