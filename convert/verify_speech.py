"""`verify` for CosyVoice: every tensor of every part, the voices, then a probe of each stage against the original.

The probe gives both models the same inputs, stage by stage, so that one stage's error is not another's: logits of a
row of text and speech tokens, a mel of given tokens, the waveform of a given mel.
"""

import inspect
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_cosyh3.convert.cosyvoice import PARTS, entries, find_speech_model, open_speech
from mlx_cosyh3.convert.cosyvoice_check import model_class
from mlx_cosyh3.convert.formats import PartFormat
from mlx_cosyh3.convert.sources import as_float32
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.errors import CheckpointError, CosyH3Error

EXACT = {"logits": 1e-3, "mel": 1e-3, "wav": 1e-4}  # of float32 against float32
STAGES = {"logits": "llm", "mel": "flow", "wav": "hift"}


@dataclass
class StageCheck:
    """One stage of the probe: largest absolute difference, largest value, and "ok" or what is wrong."""

    name: str
    error: float
    peak: float
    status: str


@dataclass
class SpeechVerifyReport:
    tensors: list
    voices: dict = field(default_factory=dict)  # {name: status}
    stages: list = field(default_factory=list)
    status: str = "ok"  # of what is neither

    @property
    def ok(self):
        checks = [c.status for c in (*self.tensors, *self.stages)] + [*self.voices.values(), self.status]
        return all(s == "ok" for s in checks)

    def table(self):
        width = max([len(t.name) for t in self.tensors] + [6])
        lines = [f"{'tensor':{width}}  stored  max |diff|    allowed  of it  status"]
        for t in self.tensors:
            lines.append(f"{t.name:{width}}  {t.stored:6}  {t.error:10.3e} {t.bound:10.3e} {t.ratio:6.2f}  {t.status}")
        lines.append(f"{len(self.tensors)} tensors, {sum(t.status != 'ok' for t in self.tensors)} wrong")
        lines += [f"voice {name}: {status}" for name, status in self.voices.items()]
        lines += [f"{s.name}: max |diff| {s.error:.3e} of {s.peak:.3g}: {s.status}" for s in self.stages]
        lines += [] if self.status == "ok" else [self.status]
        return "\n".join([*lines, "PASS" if self.ok else "FAIL"])


def verify_speech(folder, config, against, *, llm_file=None, front_ends=None, tokenizer=None, revision=None):
    """Compare the converted model `folder` (its config.json: `config`) with the model `against` it was made from.

    llm_file, front_ends, tokenizer   as they were given to `convert`
    Returns a SpeechVerifyReport. Raises CosyH3Error where there is nothing to compare."""
    from mlx_cosyh3.convert.verify import TensorCheck, compare_one, stored_tensors

    found = find_speech_model(against, revision, llm_file)
    if found is None:
        raise CosyH3Error(f"{against} is no CosyVoice folder: give the one that {folder} was made from")
    source = open_speech(found, llm_file, front_ends, tokenizer, revision)
    stored = stored_tensors(folder)
    formats = formats_of(config)
    checks, left = [], set(stored)
    for part, tensors in source.parts.items():
        prefix = f"{part}."
        here = {n.removeprefix(prefix): t for n, t in stored.items() if n.startswith(prefix)}
        for name, tensor in tensors.items():
            made = entries(formats[part], part, name, tensor)
            left -= {e.name for e in made}
            if tensor.dtype in ("U32", "I32"):
                check = _same(TensorCheck, prefix + name, tensor, stored.get(prefix + name))
            else:
                check = compare_one(formats[part], name, tensor, formats[part].entries(name, tensor.shape), here)
                check.name = prefix + name
            checks.append(check)
    checks += [TensorCheck(n, stored[n].dtype, 0, 0, 0, "extra: not in the original") for n in sorted(left)]
    report = SpeechVerifyReport(checks, _compare_voices(folder, source.voices))
    for key, value in source.config.items():
        if config.get(key) != value:
            report.status = f"config.json says another {key!r} than the original"
            return report
    if all(t.status in ("ok", "beyond the bound") for t in checks):
        report.stages = _probe(folder, config, source)
    return report


def formats_of(config):
    """{part: PartFormat} of a converted model."""
    try:
        store, quantization = config.get("store", {}), config.get("quantization") or {}
        dtypes = {part: store.get(part, config["dtype"].get(part, "float32")) for part in PARTS}
        how = {p: "int8" if q["mode"] == "int8" else q["bits"] for p, q in quantization.items()}
        quantizes = model_class(config).quantizes
        return {p: PartFormat(quantizes.get(p), dtypes[p], how.get(p)) for p in PARTS}
    except (KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"config.json lacks a value ({type(e).__name__}: {e}): convert again") from e


def _same(make, name, tensor, there):
    if there is None:
        return make(name, tensor.dtype, 0, 0, 0, f"missing: {name}")
    same = there.dtype == tensor.dtype and np.array_equal(there.numpy(), tensor.numpy())
    return make(name, there.dtype, 0, 0, 0, "ok" if same else "differs, and should be the same")


def _compare_voices(folder, voices):
    there = {v.name: v for v in map(Voice.load, sorted((folder / "voices").glob("*.safetensors")))}
    status = {name: "extra: not in the original" for name in there.keys() - voices.keys()}
    for name, voice in voices.items():
        if name not in there:
            status[name] = "missing"
            continue
        fields = ("embedding", "prompt_tokens", "prompt_mel", "transcript_ids")
        wrong = [f for f in fields if not _equal(getattr(voice, f), getattr(there[name], f))]
        status[name] = f"differs in {', '.join(wrong)}" if wrong else "ok"
    return status


def _equal(a, b):
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def _probe(folder, config, source):
    from mlx_cosyh3.load import load

    got = load(folder)
    rng = np.random.default_rng(0)
    lm, bins = source.config["llm"], source.config["mel"]["num_mels"]
    text = rng.integers(0, source.version.text_rows(source.config), 12).tolist()
    tokens = rng.integers(0, lm["speech_token_size"], 24).tolist()
    voice = next(iter(source.voices.values()), None)
    width = source.config["flow"].get("spk_embed_dim", 192)
    speaker = mx.array(rng.standard_normal((1, width)).astype(np.float32) if voice is None else voice.embedding[None])
    prompt = (mx.zeros((1, 0), dtype=mx.int32), mx.zeros((1, 0, bins)))
    mel, key = None, mx.random.key(0)
    stages = []
    for stage, part in STAGES.items():
        original = _original(part, source)
        if stage == "logits":
            run = lambda m: m(m.embed_prefix(text, [], tokens))  # noqa: E731
        elif stage == "mel":
            given = (mx.array([tokens], dtype=mx.int32), *prompt, speaker)
            run = lambda m: _first(m(*given, steps=4, **_key(m, key)))  # noqa: E731, B023
        else:
            run = lambda m: _first(m(mel, **_key(m, key)))  # noqa: E731, B023
        expected = run(original).astype(mx.float32)
        mx.eval(expected)
        del original
        if stage == "mel":
            mel = expected
        stages.append(_stage(stage, config, np.array(run(got[part]).astype(mx.float32)), np.array(expected)))
    return stages


def _key(part, key):
    """The parts of some versions draw random numbers."""
    return {"key": key} if "key" in inspect.signature(type(part).__call__).parameters else {}


def _first(result):
    """Some also return what the next chunk needs."""
    return result[0] if isinstance(result, tuple) else result


def _stage(stage, config, got, expected):
    part = STAGES[stage]
    error, peak = float(np.abs(got - expected).max()), float(np.abs(expected).max())
    exact = config["dtype"][part] == "float32" and part not in (config.get("quantization") or {})
    exact = exact and config.get("store", {}).get(part, "float32") == "float32"
    status = "ok"
    if not np.isfinite(got).all():
        status = "NaN or infinite"
    elif exact and error > EXACT[stage]:
        status = f"beyond {EXACT[stage]}"
    return StageCheck(stage, error, peak, status)


def _original(part, source):
    """One part of the original in float32 (quantised where the original is)."""
    from mlx_cosyh3.cosyvoice.model import quantize

    whole = model_class(source.config)
    cls, part_config = whole.parts[part]
    model = cls(part_config.from_dict(source.config[part]))
    if part in source.packed:
        quantize(model, source.packed[part], whole.quantizes[part])
    weights = []
    for name, t in source.parts[part].items():
        a = np.ascontiguousarray(t.numpy())
        weights.append((name, mx.array(a if t.dtype in ("U32", "I32") else as_float32(a, t.dtype))))
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model
