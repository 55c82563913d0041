"""The recipe for CosyVoice 1, 2 and 3: a published model folder -> one MLX model folder.

Its five parts go into one set of safetensors shards under `llm.`, `flow.`, `hift.`, `campplus.` and
`speech_tokenizer.`, its voices into `voices/`. Each part has a dtype to compute in, one to store in, and may be
quantised. Nothing is written before everything that can be known in advance has been checked.
"""

import json
import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from mlx_cosyh3.convert import cosyvoice_mlx
from mlx_cosyh3.convert.card import speech_card
from mlx_cosyh3.convert.common import ConvertReport, Progress, check_space, keep_sources, some
from mlx_cosyh3.convert.cosyvoice_check import model_class
from mlx_cosyh3.convert.cosyvoice_folder import FRONT_ENDS, read_folder, wanted, yaml_of
from mlx_cosyh3.convert.cosyvoice_folder import PARTS as COMPUTED
from mlx_cosyh3.convert.cosyvoice_voices import write_voices
from mlx_cosyh3.convert.formats import DTYPES, QUANTIZE, PartFormat
from mlx_cosyh3.convert.sources import repo_files, sha256
from mlx_cosyh3.convert.writer import Entry, OutputFolder, write_file, write_tensors
from mlx_cosyh3.errors import CosyH3Error, nearest

PARTS = (*COMPUTED, *FRONT_ENDS)  # the first three have a choice of dtype; front ends are float32
QUANTIZED = ("llm", "flow")  # parts that -q knows, and what a bare -q or --dtype is about


@dataclass
class SpeechReport(ConvertReport):
    """What `convert` did with a speech model."""

    sizes: dict = field(default_factory=dict)  # {part: (parameters, bytes before, bytes after)}
    files: dict = field(default_factory=dict)  # {file: (tensors read, [names of those that were skipped])}
    voices: list = field(default_factory=list)
    unread: list = field(default_factory=list)  # names of files in the folder that are none of the model's

    def parts(self):
        """One line per part, and per file."""
        lines = [f"{'part':16}  {'parameters':>12}  {'bytes before':>14}  {'after':>14}"]
        lines += [f"{part:16}  {n:12,}  {a:14,}  {b:14,}" for part, (n, a, b) in self.sizes.items()]
        for file, (read, skipped) in self.files.items():
            lines.append(
                f"{file}: {read} tensors read, {len(skipped)} skipped" + (f" ({some(skipped)})" if skipped else "")
            )
        lines += [f"not read: {some(self.unread)}"] if self.unread else []
        lines.append(f"voices: {', '.join(self.voices) or 'none'}")
        return "\n".join(lines)

    def plan(self):
        return f"{self.parts()}\n{super().plan()}"


def find_speech_model(model, revision=None, llm_file=None):
    """The local folder of `model` if it holds a CosyVoice model -> (folder, name, repo or None), else None.

    Of a hub repo the files that are needed are fetched."""
    path = Path(model).expanduser()
    if path.is_dir():
        names = {p.name for p in path.iterdir() if p.is_file()}
        found = yaml_of(names) or cosyvoice_mlx.is_layout(path)
        if found and revision is not None:
            raise CosyH3Error(f"--revision {revision} goes with a hub repo, and {model} is a local path: leave it out")
        return (path, path.resolve().name, None) if found else None
    if path.exists() or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", str(model)):
        return None
    from mlx_cosyh3.load import find_model  # here: a local folder does not need it

    names = repo_files(model, revision)
    if names is None:  # no network: what the cache holds
        try:
            names = {p.name for p in find_model(model, revision, ["config.json", "*.yaml"]).iterdir()}
        except CosyH3Error:
            return None
    if yaml_of(names):
        return find_model(model, revision, wanted(llm_file or "llm.pt")), str(model), str(model)
    if cosyvoice_mlx.NEEDED <= set(names):
        folder = find_model(model, revision, ["config.json"])
        if cosyvoice_mlx.is_layout(folder):
            return find_model(model, revision, cosyvoice_mlx.PATTERNS), str(model), str(model)
    return None


def convert_cosyvoice(
    found,
    out,
    *,
    llm_file=None,
    dtype="float32",
    store=None,
    quantize=None,
    campplus=None,
    speech_tokenizer=None,
    tokenizer=None,
    revision=None,
    overwrite=False,
    dry_run=False,
    progress=None,
):
    """Convert the model that `find_speech_model` found to the MLX folder `out` -> SpeechReport.

    llm_file          the language model in place of llm.pt, e.g. llm.rl.pt
    dtype             what to compute in: float32 or bfloat16 (llm and flow), or per part "llm=bfloat16,hift=float32"
    store             what floats are stored in, as `dtype` or per part (None: in what is computed in)
    quantize          None, "int8", "8", "4" (llm and flow), or per part "llm=int8,flow=8"
    campplus, speech_tokenizer   ONNX files (or, of the MLX layout, safetensors) to take in place of the folder's
    tokenizer         CosyVoice 1: the file of its text tokenizer's ranks, where it is not found without
    overwrite, dry_run, progress, revision: as for `convert`. Raises CosyH3Error; then `out` is as it was before."""
    begin = time.perf_counter()
    part_formats(dtype, store, quantize)  # bad options before anything is read
    output = OutputFolder(out, overwrite)
    front_ends = {"campplus": campplus, "speech_tokenizer": speech_tokenizer}
    source = open_speech(found, llm_file, front_ends, tokenizer, revision)
    formats, dtypes = part_formats(dtype, store, quantize, model_class(source.config).quantizes)
    keep_sources(output.target, [source.folder, *(Path(p).parent for p in source.paths)])

    config = source.config | {"dtype": {part: dtypes[part] for part in COMPUTED}}
    if store:
        config["store"] = {part: formats[part].dtype for part in PARTS if part in source.parts}
    quantization = {part: q for part in source.parts if (q := formats[part].quantization())}
    for part, q in source.packed.items():
        if part in quantization:
            raise CosyH3Error(f"the {part} of {source.name} is quantised already: leave it out of -q")
        quantization[part] = q
    if quantization:
        config["quantization"] = quantization

    groups, made, sizes, unquantized = [], {}, {}, []
    for part, tensors in source.parts.items():
        before = len(groups)
        for name, tensor in tensors.items():
            group = entries(formats[part], part, name, tensor)
            groups.append(group)
            made[group[0].name] = (formats[part], part, name, tensor)
        count = sum(math.prod(t.shape) for t in tensors.values())
        stored = sum(e.nbytes for group in groups[before:] for e in group)
        sizes[part] = (count, source.read.get(part) or sum(t.nbytes for t in tensors.values()), stored)
        unquantized += [f"{part}.{n}" for n in formats[part].unquantized({n: t.shape for n, t in tensors.items()})]
    report = SpeechReport(
        out=output.target,
        source=source.name,
        config=config,
        tensors=[e for group in groups for e in group],
        parameters=sum(n for n, _, _ in sizes.values()),
        source_bytes=sum(n for _, n, _ in sizes.values()),
        bytes=sum(n for _, _, n in sizes.values()),
        quantize=quantize,
        unquantized=unquantized,
        notes=source.notes,
        dry_run=dry_run,
        sizes=sizes,
        files={
            Path(f).name: (len(source.parts[p]), source.skipped.get(Path(f).name, [])) for p, f in source.files.items()
        },
        voices=list(source.voices),
        unread=source.unread,
    )
    if unquantized:
        report.notes.append(f"not quantised, 64 does not divide their width: {some(unquantized)}")
    if dtypes["hift"] != "float32":
        report.notes.append("in bfloat16 the vocoder's phases drift: the audio differs sample by sample from float32's")
    if dry_run:
        return report

    check_space(output.target, report.bytes + sum(p.stat().st_size for p in source.tokenizer.values()))
    options = {"llm": llm_file, "dtype": dtype, "store": store, "quantize": quantize, "revision": revision}
    options |= {"campplus": campplus, "speech-tokenizer": speech_tokenizer, "tokenizer": tokenizer}
    total = sum(p.stat().st_size for p in source.paths) + report.bytes
    with Progress(total, progress) as tick, output as folder:
        hashes = [(path.name, sha256(path, tick)) for path in source.paths]
        for name, path in source.tokenizer.items():
            write_file(folder / name, path.read_bytes())
        write_tensors(folder, groups, lambda group: blocks(*made[group[0].name]), tick)
        write_voices(folder / "voices", source.voices)
        write_file(folder / "config.json", json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
        write_file(folder / "README.md", speech_card(source, report, hashes, options))
    report.seconds = time.perf_counter() - begin
    return report


def open_speech(found, llm_file=None, front_ends=None, tokenizer=None, revision=None):
    """The model that `find_speech_model` found -> SpeechSource."""
    folder, name, repo = found
    front_ends = {part: Path(path) for part, path in (front_ends or {}).items() if path is not None}
    for option, path in (*front_ends.items(), ("tokenizer", tokenizer)):
        if path is not None and not Path(path).expanduser().exists():
            raise CosyH3Error(f"--{option.replace('_', '-')} {path}: there is no such file")
    if yaml_of({p.name for p in folder.iterdir()}):
        source = read_folder(folder, name, llm_file, front_ends, tokenizer)
    else:
        for option, value in (("llm", llm_file), ("tokenizer", tokenizer)):
            if value is not None:
                raise CosyH3Error(
                    f"--{option} {value} goes with a published model folder, and {name} is an MLX conversion: "
                    "leave it out"
                )
        source = cosyvoice_mlx.read_layout(folder, name, front_ends)
    source.repo, source.revision = repo, revision
    return source


# Formats


def part_formats(dtype="float32", store=None, quantize=None, quantizes=None):
    """The options as ({part: PartFormat}, {part: dtype to compute in}).

    quantizes   {part: which of its linear layers -q takes}, of a version"""
    dtypes = dict.fromkeys(COMPUTED, "float32") | _by_part(
        "--dtype", dtype, COMPUTED, QUANTIZED, ("float32", "bfloat16")
    )
    stored = {part: dtypes.get(part, "float32") for part in PARTS}
    stored |= _by_part("--store", store, PARTS, PARTS, tuple(DTYPES))
    quantized = _by_part("-q", quantize, QUANTIZED, QUANTIZED, QUANTIZE)
    return {p: PartFormat((quantizes or {}).get(p), stored[p], quantized.get(p)) for p in PARTS}, dtypes


def _by_part(option, text, parts, default, values):
    """ "a" for all of `default`, or "part=a,part=b" -> {part: value}."""
    if text is None:
        return {}
    pairs = [item.partition("=") for item in str(text).split(",")]
    given = {}
    if len(pairs) == 1 and not pairs[0][1]:
        given = dict.fromkeys(default, pairs[0][0].strip())
    else:
        for part, equals, value in pairs:
            part = part.strip()
            if not equals or part not in parts or part in given:
                what = f"names {part} twice" if part in given else f"has {part!r}{nearest(part, parts)}"
                raise CosyH3Error(
                    f"{option} {text} {what}: give one value, or part=value,... with the parts {', '.join(parts)}"
                )
            given[part] = value.strip()
    for value in given.values():
        if value not in values:
            hint = "; to store it smaller use --store" if option == "--dtype" and value in DTYPES else ""
            raise CosyH3Error(f"{option} {text}: {value!r} is not one of {', '.join(values)}{hint}")
    return given


def entries(fmt, part, name, tensor):
    """The stored tensors of one weight."""
    if tensor.dtype in ("U32", "I32"):  # quantised already
        return [_entry(part, name, tensor.dtype, tensor.shape)]
    return [_entry(part, e.name, e.dtype, e.shape) for e in fmt.entries(name, tensor.shape)]


def _entry(part, name, dtype, shape):
    return Entry(f"{part}.{name}", dtype, shape)


def blocks(fmt, part, name, tensor):
    """(stored name, block of rows) of one weight."""
    if tensor.dtype in ("U32", "I32"):
        yield f"{part}.{name}", tensor.numpy()
        return
    for stored, block in fmt.blocks(name, tensor):
        yield f"{part}.{stored}", block
