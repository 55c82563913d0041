"""What a model folder holds and what can be asked of it, from its config and the headers of its files alone."""

import importlib
import json
import math
from dataclasses import dataclass, field

from mlx_cosyh3.convert.sources import read_safetensors
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.load import FAMILIES, find_model, read_config

NAMES = {  # of dtypes, in safetensors' spelling
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U32": "packed",
    "I32": "int32", "I64": "int64", "U8": "uint8",
}  # fmt: skip


@dataclass
class Part:
    """A part of a model, as it lies in the files."""

    parameters: int = 0  # as they were before quantisation
    bytes: int = 0
    stored: dict = field(default_factory=dict)  # {dtype: bytes}, the largest first
    computed: str = None  # dtype
    quantised: str = None  # "int8", or "8 bits, groups of 64"


@dataclass
class Info:
    folder: str
    model: str  # "CosyVoice 2"
    model_type: str
    facts: dict  # {what: one line}
    parts: dict  # {name: Part}
    voices: dict  # {name: what there is of it}
    modes: dict  # {mode: with what it can be used}
    files: int
    bytes: int  # of all files

    def json(self):
        told = vars(self) | {"parts": {name: vars(part) for name, part in self.parts.items()}}
        return json.dumps(told, ensure_ascii=False, indent=2)

    def table(self):
        width = max(map(len, ("parameters", *self.facts, *self.modes, *self.parts))) + 2
        line = lambda name, text: f"{name:{width}}{text}"  # noqa: E731
        lines = [line("folder", self.folder), line("model", f"{self.model} ({self.model_type})")]
        lines += [line(name, text) for name, text in self.facts.items()]
        lines += ["", f"{'part':{width}}{'parameters':>13}  {'bytes':>13}  {'computed in':11}  stored as"]
        whole = Part(sum(p.parameters for p in self.parts.values()), sum(p.bytes for p in self.parts.values()))
        for name, p in (*self.parts.items(), *([("all", whole)] if len(self.parts) > 1 else [])):
            row = f"{name:{width}}{p.parameters:13,}  {p.bytes:13,}  {p.computed or '':11}  {how_stored(p)}"
            lines.append(row.rstrip())
        if self.modes:
            lines += ["", line("voices", "; ".join(f"{n} ({what})" for n, what in self.voices.items()) or "none")]
            lines += ["", line("mode", "with"), *(line(name, text) for name, text in self.modes.items())]
        return "\n".join([*lines, "", line("on disk", f"{self.bytes:,} bytes in {self.files} files")])


def how_stored(part):
    floats = ", ".join(NAMES.get(d, d) for d in part.stored if d not in ("I8", "U32"))
    return ", ".join(filter(None, [part.quantised and f"linear layers {part.quantised}", floats]))


def info(path_or_repo=None, *, revision=None):
    """What is in a model folder (or hub repo; None: the small model of the package) -> Info, to print by `table()`.

    No weight is read. Raises CosyH3Error for a folder that holds no converted model, or a damaged one."""
    folder = find_model(path_or_repo, revision)
    config = read_config(folder)
    try:
        return _describe(folder, config)
    except (KeyError, TypeError, AttributeError, ValueError, ZeroDivisionError) as e:
        reason = f"{type(e).__name__}: {e}"
        raise CheckpointError(
            f"{folder}/config.json lacks a value or has a strange one ({reason}): convert the model again"
        ) from e


def _describe(folder, config):
    kind = config["model_type"]
    speaks = kind != "h3"
    if speaks and "mel" not in config:  # another program's layout
        from mlx_cosyh3.convert.cosyvoice_mlx import read_layout

        source = read_layout(folder, str(folder))
        config = source.config | {"dtype": {}, "quantization": source.packed}
        tensors = {f"{part}.{n}": t for part, own in source.parts.items() for n, t in own.items()}
    else:
        tensors = stored_tensors(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    voices = _voices(folder) if speaks else {}
    found = {name: _what(voice) for name, voice in voices.items()}
    size = sum(path.stat().st_size for path in files)
    facts, modes = (_speech_facts(config), _modes(config, voices)) if speaks else (_h3_facts(config), {})
    name = f"CosyVoice {kind[-1]}" if speaks else "H3, a language model"
    return Info(str(folder), name, kind, facts, _parts(tensors, config, speaks), found, modes, len(files), size)


def stored_tensors(folder):
    """{name: tensor} of the model's files, whose headers alone are read. Raises CheckpointError if one is missing."""
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("model*.safetensors"))
    if index.is_file():
        try:
            named = {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise CheckpointError(f"{index} is no index of a model's files ({type(e).__name__}): convert again") from e
        if missing := sorted(path.name for path in named.difference(files)):
            raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which its index names: copy it again")
    if not files:
        raise CheckpointError(f"{folder} holds no model*.safetensors: convert the model again")
    return {name: t for file in files for name, t in read_safetensors(file).items()}


# ---------------------------------------------------------------- parts


def _parts(tensors, config, speaks):
    quantization = config.get("quantization") or {}
    parts = {}
    for name, t in tensors.items():
        part = parts.setdefault(name.split(".", 1)[0] if speaks else "model", Part())
        how = quantization.get(name.split(".", 1)[0]) if speaks else quantization
        count = _parameters(name, t, tensors, how)
        part.bytes += t.nbytes
        part.parameters += count
        if count:
            part.stored[t.dtype] = part.stored.get(t.dtype, 0) + t.nbytes
    for name, part in parts.items():
        part.stored = dict(sorted(part.stored.items(), key=lambda item: -item[1]))
        part.computed = config["dtype"].get(name, "float32") if speaks else config["dtype"]
        how = quantization.get(name) if speaks else quantization
        if how:
            part.quantised = "int8" if how["mode"] == "int8" else f"{how['bits']} bits, groups of {how['group_size']}"
    order = ["llm", "flow", "hift"] + sorted(parts)
    return {name: parts[name] for name in dict.fromkeys(order) if name in parts}


def _parameters(name, t, tensors, how):
    """How many weights a stored tensor stands for: none, if it holds the scales of another."""
    count = math.prod(t.shape)
    path, _, kind = name.rpartition(".")
    weight = tensors.get(f"{path}.weight")
    if weight is not None and (kind, weight.dtype) in (("scale", "I8"), ("scales", "U32"), ("biases", "U32")):
        return 0
    if t.dtype == "U32":
        return count * 32 // (how.get(path) or how)["bits"]
    return count


# ---------------------------------------------------------------- what it is


def _h3_facts(config):
    attention = ", ".join(map(str, config["attn_layer_idx"])) or "none"
    heads = f" of {config['num_heads']} heads" if config["attn_layer_idx"] else ""
    tied = ", shared by embedding and head" if config["tie_word_embeddings"] else ""
    return {
        "layers": f"{config['n_layer']}; attention{heads} in layers {attention}",
        "width": f"{config['d_model']}; MLP {config['d_inner']}, SSM state {config['d_state']}",
        "vocabulary": f"{config['vocab_size']:,} ids in {config['padded_vocab_size']:,} rows{tied}",
    }


def _speech_facts(config):
    rate, hop, tokens = config["sample_rate"], config["mel"]["hop_size"], config["token_frame_rate"]
    lm = config["llm"]
    if "text_tokenizer" in config:
        text = f"{lm['text_token_size']:,} ids, {config['text_tokenizer']['kind']} ranks"
    else:
        text = f"{lm['qwen2']['vocab_size']:,} rows, Qwen2's and {len(config['special_tokens'])} special tokens"
    return {
        "audio": f"{rate:,} Hz; {rate / hop:.4g} mel frames a second",
        "speech": f"{tokens:g} speech tokens a second, {lm['speech_token_size']:,} different ones",
        "text": text,
    }


def _voices(folder):
    from mlx_cosyh3.cosyvoice.voice import Voice

    loaded = [Voice.load(file) for file in sorted((folder / "voices").glob("*.safetensors"))]
    return {voice.name: voice for voice in loaded}


def _what(voice):
    if not voice.has_prompt:
        return "speaker embedding alone"
    return f"{voice.seconds:.1f} s of a recording, {'with' if voice.is_told else 'without'} its transcript"


def _modes(config, voices):
    """{mode: what it takes here, or why it cannot be had}"""
    from mlx_cosyh3.cosyvoice import abilities

    model = importlib.import_module(FAMILIES[config["model_type"]])
    version = int(config["model_type"][-1])
    cls = getattr(model, f"CosyVoice{version}")
    lacking = [name for name in model.FRONT_ENDS if config.get(name) is None]
    return abilities.modes(version, cls.text_in_pieces, lacking, voices)


def add_arguments(parser):
    what = "model folder, or hub repo id; default: the small language model that comes with the package"
    parser.add_argument("folder", nargs="?", metavar="DIR_OR_REPO", help=what)
    parser.add_argument("--model", metavar="DIR_OR_REPO", help="the same")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub repo")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def run(args):
    """The command `info`."""
    if args.folder is not None and args.model is not None:
        raise CosyH3Error("give one model: as an argument or with --model")
    found = info(args.model if args.folder is None else args.folder, revision=args.revision)
    print(found.json() if args.json else found.table())
