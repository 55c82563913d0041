"""Is a converted model what it was made from? Every tensor within the error its format allows, then the logits.

The bounds are derived in `formats.Format.restore`; nothing here is a tolerance, except 1e-3 on the logits of a
float32 model (two runs of the same fp32 model differ by up to 4e-4 between forms).
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_cosyh3.convert.formats import BLOCK, Format, float_blocks
from mlx_cosyh3.convert.h3 import check_shapes, model_weights, source_config
from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.errors import CheckpointError, CosyH3Error

LOGITS_LIMIT = 1e-3  # float32 against float32
PROBE_LENGTH = 48


@dataclass
class TensorCheck:
    """One weight: `status` is "ok" or says what is wrong."""

    name: str
    stored: str  # dtype
    error: float  # largest absolute difference
    bound: float  # allowed where the error comes closest to its limit
    ratio: float  # largest error / allowed
    status: str


@dataclass
class VerifyReport:
    tensors: list[TensorCheck]
    logits_error: float | None  # largest absolute difference; None when the tensors did not allow a comparison
    logits_peak: float | None
    argmax_agreement: float | None  # 0..1
    logits_status: str

    @property
    def ok(self):
        return self.logits_status == "ok" and all(t.status == "ok" for t in self.tensors)

    def table(self):
        width = max([len(t.name) for t in self.tensors] + [6])
        lines = [f"{'tensor':{width}}  stored  max |diff|    allowed  of it  status"]
        for t in self.tensors:
            lines.append(
                f"{t.name:{width}}  {t.stored:6}  {t.error:10.3e} {t.bound:10.3e} {t.ratio:6.2f}  {t.status}"
            )
        bad = sum(t.status != "ok" for t in self.tensors)
        lines.append(f"{len(self.tensors)} tensors, {bad} wrong")
        if self.logits_error is None:
            lines.append(f"logits: {self.logits_status}")
        else:
            lines.append(
                f"logits of {PROBE_LENGTH} tokens: max |diff| {self.logits_error:.3e} of {self.logits_peak:.1f}, "
                f"same argmax {self.argmax_agreement:.1%}: {self.logits_status}"
            )
        return "\n".join([*lines, "PASS" if self.ok else "FAIL"])


def verify(folder, against, *, file=None, revision=None, llm=None, campplus=None, speech_tokenizer=None,
           tokenizer=None):  # fmt: skip
    """Compare the converted model `folder` with the checkpoint `against` it was made from -> VerifyReport.

    file, revision, llm, campplus, speech_tokenizer, tokenizer   as they were given to `convert`
    A CosyVoice model gives a SpeechVerifyReport, which has `ok` and `table()` as well.
    Raises CosyH3Error where there is nothing to compare: no model, no checkpoint, another architecture.
    """
    # Imported here: load imports the whole model, and `convert` needs none of it.
    from mlx_cosyh3.load import read_config

    folder = Path(folder).expanduser()
    config = read_config(folder)
    if config["model_type"] != "h3":
        from mlx_cosyh3.convert.verify_speech import verify_speech

        front_ends = {"campplus": campplus, "speech_tokenizer": speech_tokenizer}
        return verify_speech(folder, config, against, llm_file=llm, front_ends=front_ends, tokenizer=tokenizer,
                             revision=revision)  # fmt: skip
    speech = {"llm": llm, "campplus": campplus, "speech-tokenizer": speech_tokenizer, "tokenizer": tokenizer}
    for name, value in speech.items():
        if value is not None:
            raise CosyH3Error(f"--{name} {value} goes with CosyVoice models, and {folder} is an H3 model: leave it out")
    try:
        fmt = Format.of_model(config)
    except (KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(
            f"{folder}/config.json lacks a value ({type(e).__name__}: {e}): convert again"
        ) from e
    stored = stored_tensors(folder)
    source = open_source(against, file, revision)
    weights = model_weights(source)
    tensors = _compare_tensors(fmt, weights, stored)
    report = VerifyReport(tensors, None, None, None, "not compared, for the tensors differ")
    if all(t.status in ("ok", "beyond the bound") for t in tensors):
        check_shapes(weights, config, source.name)
        _compare_logits(report, folder, config, source, weights)
    return report


def stored_tensors(folder):
    """The tensors of a converted model."""
    path = folder / "model.safetensors.index.json"
    return open_source(folder, path.name if path.is_file() else None).tensors


def _compare_tensors(fmt, weights, stored):
    checks, left = [], set(stored)
    for name, tensor in weights.items():
        entries = fmt.entries(name, tuple(tensor.shape))
        left -= {e.name for e in entries}
        checks.append(compare_one(fmt, name, tensor, entries, stored))
    checks += [TensorCheck(n, stored[n].dtype, 0, 0, 0, "extra: not in the original") for n in sorted(left)]
    return checks


def compare_one(fmt, name, tensor, entries, stored):
    for e in entries:
        if e.name not in stored:
            return TensorCheck(name, e.dtype, 0, 0, 0, f"missing: {e.name}")
        there = stored[e.name]
        if (tuple(there.shape), there.dtype) != (e.shape, e.dtype):
            what = f"{there.dtype} {list(there.shape)}, expected {e.dtype} {list(e.shape)}"
            return TensorCheck(name, there.dtype, 0, 0, 0, f"wrong shape: {e.name} is {what}")
    check, start = TensorCheck(name, entries[0].dtype, 0.0, 0.0, 0.0, "ok"), 0
    for block in float_blocks(name, tensor, BLOCK // 8):  # float64 arithmetic below
        stop = start + len(block)
        rows = lambda n: (stored[n].rows(start, stop), stored[n].dtype)  # noqa: B023, E731
        with np.errstate(invalid="ignore", over="ignore"):
            values, allowed = fmt.restore(name, rows)
            error, bound = np.abs(values - block), allowed(block.astype(np.float64))
        if entries[0].dtype == tensor.dtype or (entries[0].dtype == "F32" and tensor.dtype != "F64"):
            bound = np.zeros_like(bound)  # a copy, or widened
        if not np.isfinite(values).all():
            check.status, check.error, check.ratio = "holds NaN or infinite values", float("nan"), float("inf")
            return check
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(error > 0, error / bound, 0)
        worst = np.unravel_index(np.argmax(ratio), ratio.shape)
        check.error = max(check.error, float(error.max()))
        if start == 0 or ratio[worst] > check.ratio:
            check.ratio, check.bound = float(ratio[worst]), float(bound[worst])
        start = stop
    if check.ratio > 1:
        check.status = "beyond the bound"
    return check


def _compare_logits(report, folder, config, source, weights):
    from mlx_cosyh3.h3 import H3, H3Config
    from mlx_cosyh3.load import load

    plain = {k: v for k, v in config.items() if not k.startswith("quantization")}
    inferred = source_config(
        source, weights, heads=config["num_heads"] or None, rotary_emb_dim=config["rotary_emb_dim"]
    )
    # What the weights themselves say, so that a wrong config.json shows up in the logits or here.
    for key in (
        "d_model",
        "n_layer",
        "d_inner",
        "attn_layer_idx",
        "rotary_emb_dim",
        "head_dim",
        "tie_word_embeddings",
    ):
        if config.get(key) != inferred[key]:
            report.logits_status = f"config.json says {key} {config.get(key)}, the original {inferred[key]}"
            return
    ids = np.random.default_rng(0).integers(0, config["vocab_size"], (1, PROBE_LENGTH))
    ids = mx.array(ids.astype(np.int32))
    original = H3(H3Config.from_dict(plain))
    original.load_weights([(n, mx.array(np.concatenate(list(float_blocks(n, t))))) for n, t in weights.items()])
    expected = np.array(original(ids).astype(mx.float32))
    del original
    got = np.array(load(folder)(ids).astype(mx.float32))
    report.logits_error = float(np.abs(got - expected).max())
    report.logits_peak = float(np.abs(expected).max())
    report.argmax_agreement = float((got.argmax(-1) == expected.argmax(-1)).mean())
    exact = config["dtype"] == "float32" and "quantization" not in config
    if not np.isfinite(got).all():
        report.logits_status = "NaN or infinite"
    elif exact and report.logits_error > LOGITS_LIMIT:
        report.logits_status = f"beyond {LOGITS_LIMIT}"
    else:
        report.logits_status = "ok"


def add_arguments(parser):
    """The options of `verify`."""
    parser.add_argument("model", metavar="DIR", help="the converted model")
    parser.add_argument("--against", required=True, metavar="PATH_OR_REPO", help="the checkpoint it was made from")
    parser.add_argument("--file", help="which file, where a folder or repo holds several")
    parser.add_argument("--revision", help="branch, tag or commit of a hub repo")
    for name in ("llm", "campplus", "speech-tokenizer", "tokenizer"):
        parser.add_argument(f"--{name}", metavar="FILE", help="CosyVoice: as it was given to `convert`")


def run(args):
    """Verify as the parsed options say and print the table -> 0 (all is well) or 1. Raises CosyH3Error."""
    options = ("file", "revision", "llm", "campplus", "speech_tokenizer", "tokenizer")
    report = verify(args.model, args.against, **{name: getattr(args, name) for name in options})
    print(report.table())
    return 0 if report.ok else 1


def main(argv=None):
    """The command `python -m mlx_cosyh3.convert.verify`; returns the exit status."""
    from argparse import ArgumentParser

    parser = ArgumentParser(prog="python -m mlx_cosyh3.convert.verify", description=__doc__.splitlines()[0])
    add_arguments(parser)
    try:
        return run(parser.parse_args(argv))
    except CosyH3Error as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
