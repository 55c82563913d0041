"""Turn an H3 checkpoint into an MLX model folder: the recipe, its report, and its command line.

Nothing is written before everything that can be known in advance has been checked; what is written appears under
its name only when it is whole.
"""

import json
import math
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from mlx_cosyh3.convert.card import model_card
from mlx_cosyh3.convert.formats import Format
from mlx_cosyh3.convert.h3 import model_weights, source_config
from mlx_cosyh3.convert.sources import open_source, sha256
from mlx_cosyh3.convert.vocabulary import find_vocabulary
from mlx_cosyh3.convert.writer import OutputFolder, write_file, write_tensors
from mlx_cosyh3.errors import CheckpointError, CosyH3Error


@dataclass
class ConvertReport:
    """What `convert` did, or with dry_run would do."""

    out: Path
    source: str
    config: dict
    tensors: list  # of writer.Entry, as stored
    parameters: int
    source_bytes: int  # of the tensors of the model in the checkpoint
    bytes: int  # of the tensors written
    quantize: str | None
    unquantized: list[str]  # layers that -q left as they are
    notes: list[str] = field(default_factory=list)  # what the user should know
    dry_run: bool = False
    seconds: float = 0.0

    @property
    def bits_per_weight(self):
        return 8 * self.bytes / self.parameters

    @property
    def tied(self):
        return self.config["tie_word_embeddings"]

    def summary(self):
        """One line."""
        before = 8 * self.source_bytes / self.parameters
        done = "would write" if self.dry_run else "wrote"
        return (
            f"{done} {self.out}: {self.parameters:,} parameters, {self.source_bytes:,} -> {self.bytes:,} bytes, "
            f"{before:.2f} -> {self.bits_per_weight:.2f} bits per weight"
        )

    def plan(self):
        """The whole plan as text: config, tensors, sizes."""
        width = max(len(e.name) for e in self.tensors)
        rows = [f"{e.name:{width}}  {e.dtype:4}  {str(list(e.shape)):16} {e.nbytes:>14,}" for e in self.tensors]
        return "\n".join([json.dumps(self.config, indent=2, sort_keys=True), *rows, self.summary()])


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
    overwrite=False,
    dry_run=False,
    progress=None,
):
    """Convert the H3 checkpoint `model` to the MLX model folder `out` -> ConvertReport.

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
    begin = time.perf_counter()
    fmt = Format(dtype, quantize)
    output = OutputFolder(out, overwrite)
    source = open_source(model, file, revision)
    _keep_sources(output.target, source, tokenizer)

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
            f"left out {len(source.ignored)} entries that are no weights of the model: {_some(source.ignored)}"
        )
    if report.unquantized:
        notes.append(f"not quantised, no group size divides their width: {_some(report.unquantized)}")
    if dry_run:
        return report

    _check_space(output.target, report.bytes)
    options = {"file": file, "dtype": dtype, "quantize": fmt.quantize, "tokenizer": tokenizer, "heads": heads}
    options["revision"] = revision
    with _Progress(source.nbytes + report.bytes, progress) as tick, output as folder:
        hashes = source.hash_files(tick)
        for path, name in vocabulary.files:
            write_file(folder / name, path.read_bytes())
            hashes.append((path.name, sha256(path)))
        write_tensors(folder, groups, lambda group: fmt.blocks(group[0].name, weights[group[0].name]), tick)
        write_file(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
        write_file(folder / "README.md", model_card(source, report, vocabulary, hashes, options))
    report.seconds = time.perf_counter() - begin
    return report


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


def _keep_sources(target, source, tokenizer):
    """--overwrite must not delete what is being read."""
    folders = [source.folder, *(p.parent for p in source.paths)]
    if tokenizer not in (None, "none"):
        folders.append(Path(tokenizer).expanduser())
    for folder in folders:
        if target == folder.resolve() or target in folder.resolve().parents:
            raise CosyH3Error(f"--out {target} holds what is to be converted ({folder}): choose another folder")


def _check_space(target, nbytes):
    folder = target.parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise CosyH3Error(f"the disk of {folder} is too full: {nbytes:,} bytes are needed, {free:,} are free")


def _some(names, limit=4):
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


class _Progress:
    """Counts bytes: to the caller's function, or to a bar on stderr when that is a terminal."""

    def __init__(self, total, function):
        self._total, self._done, self._function, self._bar = total, 0, function, None

    def __enter__(self):
        if self._function is None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="B", unit_scale=True, desc="converting", leave=False)
        return self._tick

    def _tick(self, nbytes):
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        if self._function is not None:
            self._function(self._done, self._total)

    def __exit__(self, *error):
        if self._bar is not None:
            self._bar.close()


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
        "--dtype", default="float32", help="float32 (default), float16 or bfloat16; SSM tensors are always float32"
    )
    add("-q", "--quantize", metavar="int8|4|8", help="int8 per output row, or MLX's 4 or 8 bits per weight")
    add(
        "--tokenizer",
        metavar="DIR",
        help="folder with the tokenizer, or 'none'; default: the source's, else GPT-2's",
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
        overwrite=args.overwrite,
        dry_run=args.dry_run,
    )
    for note in report.notes:
        print(f"note: {note}", file=sys.stderr)
    print(report.plan() if args.dry_run else report.summary())
    return 0


def main(argv=None):
    """The command `python -m mlx_cosyh3.convert`; returns the exit status."""
    from argparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m mlx_cosyh3.convert", description="Convert an H3 checkpoint to an MLX model."
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
