"""Turn a checkpoint into an MLX model folder: the recipe for H3, the choice between it and CosyVoice's, the command.

Nothing is written before everything that can be known in advance has been checked; what is written appears under
its name only when it is whole.
"""

import json
import math
import sys
import time
from pathlib import Path

from mlx_cosyh3.convert.card import model_card
from mlx_cosyh3.convert.common import ConvertReport, Progress, check_space, keep_sources, some
from mlx_cosyh3.convert.formats import Format
from mlx_cosyh3.convert.h3 import model_weights, source_config
from mlx_cosyh3.convert.sources import open_source, sha256
from mlx_cosyh3.convert.vocabulary import find_vocabulary
from mlx_cosyh3.convert.writer import OutputFolder, write_file, write_tensors
from mlx_cosyh3.errors import CheckpointError, CosyH3Error


def convert(
    model,
    out,
    *,
    file=None,
    dtype="float32",
    quantize=None,
    tokenizer=None,
    heads=None,
    revision=None,
    llm=None,
    store=None,
    campplus=None,
    speech_tokenizer=None,
    overwrite=False,
    dry_run=False,
    progress=None,
):
    """Convert the H3 checkpoint or CosyVoice folder `model` to the MLX model folder `out` -> ConvertReport.

    For CosyVoice see `cosyvoice.convert_cosyvoice`, which takes llm, store, campplus and speech_tokenizer, too, and
    dtype and quantize for each part, but not file and heads. For H3:

    model      a .pt, .pth, .bin, .ckpt or .safetensors file, a folder that holds one, or a hub repo id
    file       which file, where a folder or repo holds several
    dtype      float32, float16 or bfloat16: linear layers, embedding, norms (SSM tensors are always float32)
    quantize   None, "int8" (ours), 4 or 8 (MLX's)
    tokenizer  a folder with the tokenizer, "none", or None: the source's own, else GPT-2's from the hub
    heads      attention heads, for a model that is not one of the released ones
    revision   branch, tag or commit of a hub repo
    overwrite  replace a converted model that is there already
    dry_run    only report
    progress   called with (bytes done, bytes in all); None: a bar on stderr when that is a terminal
    Raises CosyH3Error; then `out` is as it was before.
    """
    # Imported here: it imports the speech model.
    from mlx_cosyh3.convert.cosyvoice import convert_cosyvoice, find_speech_model

    speech = {"store": store, "llm": llm, "campplus": campplus, "speech_tokenizer": speech_tokenizer}
    common = {"dtype": dtype, "quantize": quantize, "revision": revision}
    common |= {"overwrite": overwrite, "dry_run": dry_run, "progress": progress}
    found = find_speech_model(model, revision, llm)
    _refuse(model, found, speech, {"file": file, "heads": heads})
    if found:
        return convert_cosyvoice(found, out, llm_file=speech.pop("llm"), tokenizer=tokenizer, **speech, **common)

    begin = time.perf_counter()
    fmt = Format(dtype, quantize)
    output = OutputFolder(out, overwrite)
    source = open_source(model, file, revision)
    folders = [source.folder, *(p.parent for p in source.paths)]
    if tokenizer not in (None, "none"):
        folders.append(Path(tokenizer).expanduser())
    keep_sources(output.target, folders)

    weights = model_weights(source)
    given, notes = _given_config(source)
    heads_here = heads if heads is not None else given.get("num_heads")
    config = source_config(source, weights, heads=heads_here, rotary_emb_dim=given.get("rotary_emb_dim"))
    _compare(source, given, config)
    config |= {k: given[k] for k in ("layer_norm_epsilon", "discretization") if k in given}
    vocabulary = find_vocabulary(tokenizer, source, given, config["padded_vocab_size"])
    config |= {"vocab_size": vocabulary.size, "eos_token_id": vocabulary.eos, "dtype": dtype}

    shapes = {name: tuple(t.shape) for name, t in weights.items()}
    quantization = fmt.quantization(shapes)
    if quantization:
        config["quantization"] = quantization
    if fmt.bits:
        config["quantization_config"] = quantization  # where mlx-lm's tools look as well
    groups = [fmt.entries(name, shape) for name, shape in shapes.items()]
    report = ConvertReport(
        out=output.target,
        source=source.name,
        config=config,
        tensors=[e for group in groups for e in group],
        parameters=sum(math.prod(s) for s in shapes.values()),
        source_bytes=sum(t.nbytes for t in weights.values()),
        bytes=sum(e.nbytes for group in groups for e in group),
        quantize=fmt.quantize,
        unquantized=fmt.unquantized(shapes),
        notes=notes,
        dry_run=dry_run,
    )
    if source.ignored:
        notes.append(
            f"left out {len(source.ignored)} entries that are no weights of the model: {some(source.ignored)}"
        )
    if report.unquantized:
        notes.append(f"not quantised, no group size divides their width: {some(report.unquantized)}")
    if dry_run:
        return report

    check_space(output.target, report.bytes)
    options = {"file": file, "dtype": dtype, "quantize": fmt.quantize, "tokenizer": tokenizer, "heads": heads}
    options["revision"] = revision
    with Progress(source.nbytes + report.bytes, progress) as tick, output as folder:
        hashes = source.hash_files(tick)
        for path, name in vocabulary.files:
            write_file(folder / name, path.read_bytes())
            hashes.append((path.name, sha256(path)))
        write_tensors(folder, groups, lambda group: fmt.blocks(group[0].name, weights[group[0].name]), tick)
        write_file(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        write_file(folder / "README.md", model_card(source, report, vocabulary, hashes, options))
    report.seconds = time.perf_counter() - begin
    return report


def _refuse(model, found, speech, text):
    """Options of the other family are errors."""
    family, other, options = ("a CosyVoice model", "H3", text) if found else ("none", "CosyVoice", speech)
    for name, value in options.items():
        if value is not None:
            option = f"--{name.replace('_', '-')}"
            raise CosyH3Error(f"{option} {value} goes with {other} models, and {model} is {family}: leave it out")


def _given_config(source):
    """What config.json beside the checkpoint says, under our names -> (dict, notes). Only an H3's is used."""
    raw = source.config()
    if not raw:
        return {}, []
    if raw.get("model_type", "h3") != "h3":
        return {}, [f"config.json beside {source.name} is a {raw['model_type']!r} model's: not used"]
    if "quantization" in raw:
        raise CheckpointError(f"{source.name} is quantised already: convert from the original weights")
    given = {**raw, **_part(source, raw, "attn_cfg")}  # upstream's nested form: num_heads, rotary_emb_dim
    if "disc" in (ssm := _part(source, raw, "ssm_cfg")):
        given["discretization"] = ssm["disc"]
    checks = {
        "num_heads": lambda v: type(v) is int and v >= 0,
        "rotary_emb_dim": lambda v: type(v) is int and v >= 0 and v % 2 == 0,
        "layer_norm_epsilon": lambda v: isinstance(v, (int, float)) and 0 < v < 1,
        "discretization": lambda v: v in ("bilinear", "zoh"),
    }
    for key, valid in checks.items():
        if key in given and not valid(given[key]):
            raise CosyH3Error(f"config.json beside {source.name}: {key} {given[key]!r} is not valid")
    if ssm.get("mode", "diag") != "diag":
        raise CosyH3Error(
            f"config.json beside {source.name}: SSM mode {ssm['mode']!r} is not supported, only 'diag'"
        )
    return given, []


def _part(source, raw, key):
    part = raw.get(key) or {}
    if not isinstance(part, dict):
        raise CosyH3Error(f"config.json beside {source.name}: {key} {part!r} is not an object")
    return part


def _compare(source, given, config):
    """A config.json that is not this checkpoint's must not lend it its heads or vocabulary."""
    for key in (
        "d_model",
        "n_layer",
        "d_inner",
        "padded_vocab_size",
        "d_state",
        "head_dim",
        "attn_layer_idx",
        "rotary_emb_dim",
    ):
        if given.get(key, config[key]) != config[key]:
            raise CheckpointError(
                f"config.json beside {source.name} says {key} {given[key]}, its weights say {config[key]}: "
                "move that file away if it is another model's"
            )


def add_arguments(parser):
    """The options of `convert`, for this module's own parser and for the program's."""
    add = parser.add_argument
    add(
        "--model",
        required=True,
        metavar="PATH_OR_REPO",
        help="checkpoint file, folder that holds one, or hub repo id",
    )
    add("--out", required=True, metavar="DIR", help="folder to write; it must not exist")
    add("--file", help="which file, where a folder or repo holds several")
    add(
        "--dtype",
        default="float32",
        help="float32 (default), float16 or bfloat16; SSM tensors are always float32. "
        "CosyVoice: float32 or bfloat16, also by part: llm=bfloat16,flow=float32"
    )
    add(
        "-q", "--quantize", metavar="int8|4|8",
        help="int8 per output row, or MLX's 4 or 8 bits per weight. CosyVoice: also by part, llm=int8,flow=8",
    )
    add("--store", metavar="DTYPE", help="CosyVoice: what to store floats in, where not --dtype; also by part")
    add("--llm", metavar="FILE", help="CosyVoice: the language model in place of llm.pt, e.g. llm.rl.pt")
    add("--campplus", metavar="FILE", help="CosyVoice: campplus.onnx from elsewhere")
    add("--speech-tokenizer", metavar="FILE", help="CosyVoice: speech_tokenizer_v1, _v2 or _v3.onnx from elsewhere")
    add(
        "--tokenizer",
        metavar="DIR_OR_FILE",
        help="folder with the tokenizer, or 'none'; default: the source's, else GPT-2's. CosyVoice 1: the .tiktoken "
        "file, which is otherwise looked for in the folder and in the packages that ship it",
    )
    add("--heads", type=int, metavar="N", help="attention heads, for a model that is not one of the released ones")
    add("--revision", help="branch, tag or commit of a hub repo")
    add("--overwrite", action="store_true", help="replace a converted model that is there already")
    add("--dry-run", "--dry_run", action="store_true", help="print the plan and write nothing")


def run(args):
    """Convert as the parsed options say and print the result; returns the exit status. Raises CosyH3Error."""
    report = convert(
        args.model,
        args.out,
        file=args.file,
        dtype=args.dtype,
        quantize=args.quantize,
        tokenizer=args.tokenizer,
        heads=args.heads,
        revision=args.revision,
        llm=args.llm,
        store=args.store,
        campplus=args.campplus,
        speech_tokenizer=args.speech_tokenizer,
        overwrite=args.overwrite,
        dry_run=args.dry_run,
    )
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    if not args.dry_run and hasattr(report, "parts"):
        print(report.parts())
    print(report.plan() if args.dry_run else report.summary())
    return 0


def main(argv=None):
    """The command `python -m mlx_cosyh3.convert`; returns the exit status."""
    from argparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m mlx_cosyh3.convert", description="Convert an H3 or CosyVoice checkpoint to an MLX model."
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        return run(args)
    except CosyH3Error as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
