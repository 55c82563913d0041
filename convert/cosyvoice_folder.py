"""A published CosyVoice folder, read: its numbers as our config.json, its five parts as named tensors, its voices.

The yaml says which version it is (by upstream's classes, whatever its name) and what the sizes are; the weights say
what the sizes are, too. Where both do, they must agree. Nothing is computed here and nothing is copied: tensors are
views of memory-mapped files. What a version has alone is in its own module, `cosyvoice_v1.py` and so on.
"""

import importlib
import math
from dataclasses import dataclass, field
from pathlib import Path

from mlx_cosyh3.convert.common import some
from mlx_cosyh3.convert.cosyvoice_check import check_kinds, check_numbers, check_parts
from mlx_cosyh3.convert.cosyvoice_voices import read_voices
from mlx_cosyh3.convert.hyperyaml import read_hyperyaml
from mlx_cosyh3.convert.sources import FLOATS, ArrayTensor, as_float32, open_source
from mlx_cosyh3.cosyvoice.s3tokenizer import MEL_RATE
from mlx_cosyh3.errors import CheckpointError, CosyH3Error

YAMLS = ("cosyvoice3.yaml", "cosyvoice2.yaml", "cosyvoice.yaml")
VERSIONS = {1: "TransformerLM", 2: "Qwen2LM", 3: "CosyVoice3LM"}  # upstream's class of the language model
# Tensors that only one version has: prefix -> version, the first that is found counts
MARKS = {
    "llm": {"text_encoder.": 1, "llm_embedding.": 2, "llm.model.": 3},
    "flow": {"length_regulator.": 1, "encoder.": 2, "pre_lookahead_layer.": 3},
    "hift": {},
}
PARTS = ("llm", "flow", "hift")
FRONT_ENDS = ("campplus", "speech_tokenizer")
VOICES = "spk2info.pt"


@dataclass
class SpeechSource:
    """An opened model folder."""

    name: str  # a repo id, or the folder's name
    folder: Path
    config: dict  # what config.json will say of the model itself: no dtype, no quantisation
    parts: dict  # {part: {our name: tensor}}
    files: dict  # {part: the file it is from}
    tokenizer: dict  # {name in the converted folder: path} of the text tokenizer's files
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
        return list(dict.fromkeys([*self.files.values(), *self.others, *self.tokenizer.values()]))

    @property
    def unread(self):
        """Names of the folder's files that nothing was read from, in order."""
        names = {path.name for path in self.folder.iterdir() if path.is_file() and path.name[0] != "."}
        return sorted(names - {path.name for path in self.paths})

    @property
    def version(self):
        """The module of its version."""
        return version_module(int(self.config["model_type"][-1]))


def version_module(number):
    return importlib.import_module(f"mlx_cosyh3.convert.cosyvoice_v{number}")


def front_end_files(number):
    """{part: its file} in a folder of that version."""
    return {"campplus": "campplus.onnx", "speech_tokenizer": f"speech_tokenizer_v{number}.onnx"}


def yaml_of(names):
    """The yaml of a folder with these file names, or None if it holds no CosyVoice. Raises CosyH3Error."""
    found = next((name for name in YAMLS if name in names), None)
    if found is None and {"llm.pt", "flow.pt"} <= set(names):
        raise CosyH3Error(
            f"there are llm.pt and flow.pt, but no {', '.join(YAMLS[:2])} or {YAMLS[2]}, which says what they are: "
            "copy it, too"
        )
    return found


def wanted(llm_file="llm.pt"):
    """The files of a hub repo that are needed, of whatever version it is."""
    from mlx_cosyh3.convert import cosyvoice_qwen2, cosyvoice_v1

    front_ends = dict.fromkeys(file for n in VERSIONS for file in front_end_files(n).values())
    text = (*cosyvoice_qwen2.FILES, *cosyvoice_v1.RANKS)
    return [*YAMLS, llm_file, "flow.pt", "hift.pt", *front_ends, VOICES, *text]


def read_folder(folder, name, llm_file=None, front_ends=None, tokenizer=None):
    """Open the model in `folder` -> SpeechSource. Raises CosyH3Error.

    llm_file     in place of llm.pt
    front_ends   {part: path} of ONNX files in place of the folder's
    tokenizer    version 1: the ranks of its text tokenizer, in place of those that are found"""
    folder = Path(folder)
    files = {"llm": folder / (llm_file or "llm.pt"), "flow": folder / "flow.pt", "hift": folder / "hift.pt"}
    missing = [path.name for path in files.values() if not path.is_file()]
    if missing:
        raise CosyH3Error(f"{name} lacks {', '.join(missing)}: copy the whole model folder")
    path, yaml, number = read_yaml(folder)
    version = version_module(number)
    opened = {part: open_source(file) for part, file in files.items()}
    for part, file in files.items():
        check_version(number, part, opened[part].tensors, path.name, file.name)
    with _told(path, number):
        text = version.read_text(folder, yaml, tokenizer)
        config = config_of(version, yaml, text)
        check_kinds(config, version)
    source = SpeechSource(name, folder, config, {}, files, text.files)
    source.others = [path, *text.read]
    for part, file in files.items():
        source.parts[part] = _read_part(source, part, file, opened[part])
    with _told(path, number):
        check_numbers(source.config, source.parts, {p: f.name for p, f in files.items()}, path.name, version)
    text.tokenizer.check(version.text_rows(config))
    for part, file in front_end_files(number).items():
        file = (front_ends or {}).get(part, folder / file)
        if file.is_file():
            read_front_end(source, part, file)
    if (folder / VOICES).is_file():
        source.others.append(folder / VOICES)
        source.voices = read_voices(folder / VOICES, config, version.text_rows(config), source.notes)
    need_voices(source)
    check_parts(source)
    return source


def need_voices(source):
    """Without front ends a model can speak only with voices that it holds."""
    lacking = [part for part in FRONT_ENDS if source.config.get(part) is None]
    files = front_end_files(source.version.NUMBER)
    names = ", ".join(files[part] for part in lacking)
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

    def __init__(self, path, number):
        self.path, self.number = path, number

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        if isinstance(error, KeyError):
            raise CheckpointError(
                f"{self.path} lacks the entry {error}: it is not a CosyVoice {self.number} yaml"
            ) from error
        if isinstance(error, (TypeError, AttributeError, IndexError, ZeroDivisionError)):
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"{self.path} has an entry of another kind than expected ({reason})") from error
        if isinstance(error, CheckpointError):
            text = str(error)
            named = self.path.name in text or "config.json" in text
            raise CheckpointError(text if named else f"{self.path}: {text}") from error
        return False


def read_yaml(folder):
    """The yaml in `folder` -> (path, its entries, number of the version that its classes are of)."""
    found = [folder / name for name in YAMLS if (folder / name).is_file()]
    entries = [read_hyperyaml(path) for path in found]
    numbers = [number_of(path, yaml) for path, yaml in zip(found, entries)]
    for path, number in zip(found, numbers):
        if number != numbers[0]:
            raise CosyH3Error(
                f"{folder} holds {found[0].name} of CosyVoice {numbers[0]} and {path.name} of CosyVoice {number}: "
                "remove the one that the weights are not of"
            )
    return found[0], entries[0], numbers[0]


def number_of(path, yaml):
    """Which version the classes in a yaml are of."""
    made = {}
    for part in PARTS:
        entry = yaml.get(part)
        name = entry.get("__new__") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            raise CheckpointError(
                f"{path} lacks the entry {part!r} with the name of a class (!new:...): it is no CosyVoice yaml"
            )
        made[part] = name.rpartition(".")[2]
    number = next((n for n, name in VERSIONS.items() if name == made["llm"]), None)
    if number is None:
        raise CheckpointError(f"{path}: its llm is a {made['llm']}, not one of {', '.join(VERSIONS.values())}")
    for part, name in version_module(number).CLASSES.items():
        if made[part] != name:
            raise CheckpointError(
                f"{path}: its llm is a {made['llm']}, which is CosyVoice {number}'s, but its {part} is a {made[part]}, "
                f"not a {name}"
            )
    return number


def check_version(number, part, names, told, file):
    """The weights must be of the version that the yaml says."""
    found = next((n for prefix, n in MARKS[part].items() if any(k.startswith(prefix) for k in names)), number)
    if found != number:
        raise CheckpointError(
            f"{told} says that this is CosyVoice {number}, but {file} is CosyVoice {found}'s: "
            "they do not belong together"
        )


def config_of(version, yaml, text):
    """config.json from the yaml and the text tokenizer."""
    mel, plain = yaml["feat_extractor"], _plain({part: yaml[part] for part in PARTS})
    config = {
        "model_type": f"cosyvoice{version.NUMBER}",
        "sample_rate": yaml["sample_rate"],
        "hift": plain["hift"],
        "campplus": None,
        "speech_tokenizer": None,
        "mel": {k: mel[k] for k in ("n_fft", "hop_size", "win_size", "num_mels", "fmin", "fmax")},
    }
    rate = mel.get("sampling_rate")
    if rate != yaml["sample_rate"]:
        raise CheckpointError(f"sample_rate and feat_extractor.sampling_rate differ: {yaml['sample_rate']} and {rate}")
    return config | version.config_of(yaml, plain, text)


def _plain(value):
    """Without the names of upstream's classes."""
    if not isinstance(value, dict):
        return value
    return {k: _plain(v) for k, v in value.items() if not str(k).startswith("__")}


# What the weights say


def _read_part(source, part, path, opened):
    sanitize = source.version.SANITIZE[part]
    arrays = {k: _numpy(t, path, k) for k, t in opened.tensors.items()}
    try:
        ours = sanitize(arrays)
        skipped = list(opened.ignored)
        if len(ours) < len(arrays) and part != "hift":  # where weight norm makes one of two
            skipped += [k for k, a in arrays.items() if not sanitize({k: a})]
    except CheckpointError as e:
        raise CheckpointError(f"{path}: {e}") from e
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


# Front ends


def read_front_end(source, part, path):
    """Add the front end `part` from an ONNX file; the speech tokenizer also from an MLX conversion."""
    # Imported here: most calls need none of it.
    from mlx_cosyh3.convert import cosyvoice_mlx, front_ends

    path, model = Path(path).expanduser(), source.config
    if part == "campplus":
        if path.suffix != ".onnx":
            raise CosyH3Error(f"--{part} {path}: expected an .onnx file")
        config, weights = front_ends.campplus_from(path)
    else:
        read = front_ends.speech_tokenizer_from if path.suffix == ".onnx" else cosyvoice_mlx.read_speech_tokenizer
        config, weights = read(path)
        _check_tokens(path, config, model, source.notes)
    source.files[part] = path if path.is_file() else next(iter(sorted(path.glob("*.safetensors"))))
    model[part] = config
    source.parts[part] = {name: ArrayTensor(a) for name, a in weights.items()}


def _check_tokens(path, tokenizer, model, notes):
    """The speech tokenizer must be the one that the language model was made for."""
    rate = MEL_RATE // math.prod(tokenizer["strides"])
    if rate != model["token_frame_rate"]:
        raise CosyH3Error(
            f"{path} makes {rate} speech tokens a second, the model takes {model['token_frame_rate']}: "
            "they do not belong together"
        )
    codes, known = tokenizer.get("codebook") or 3 ** tokenizer.get("digits", 0), model["llm"]["speech_token_size"]
    if codes != known:
        notes.append(
            f"{path.name} has {codes} speech tokens, the language model {known}: they do not belong together, "
            "and a voice made with it may not speak"
        )
