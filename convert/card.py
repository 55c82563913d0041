"""README.md of a converted model: what it is, from what it was made, and how."""

import shlex
from pathlib import Path

import mlx_cosyh3
from mlx_cosyh3.convert.h3 import RELEASED


def license_of(source):
    """The licence a repo is known to carry, or None."""
    return "bsd-3-clause" if (source.repo or "").startswith("danfu09/H3-") else None


def command_line(source, out, options):
    """The command that makes this model again. Local folders are left out: they mean nothing to a reader."""
    words = ["mlx_cosyh3", "convert", "--model", source.name]
    for name, value in options.items():
        if name in ("tokenizer", "campplus", "speech-tokenizer") and value not in (None, "none"):
            value = Path(value).resolve().name
        if value is not None:
            words += [f"--{name}", str(value)]
    return shlex.join([*words, "--out", Path(out).name])


def model_card(source, report, vocabulary, hashes, options):
    """The text of README.md. `hashes`: [(file name, sha256)] of every file that went in."""
    config, licence = report.config, license_of(source)
    front = ["---", "library_name: mlx", "pipeline_tag: text-generation"]
    front += [f"license: {licence}"] if licence else []
    front += [f"base_model: {source.repo}"] if source.repo else []
    front += ["tags:", "- mlx", "- h3", "---"]
    attention = ", ".join(map(str, config["attn_layer_idx"])) or "none"
    heads = f" ({config['num_heads']} heads)" if config["num_heads"] else ""
    known = next((f", the shapes of {v[0]}" for k, v in RELEASED.items() if k == _key(config)), "")
    quantization = {"int8": "int8 per output row (norms, biases and SSM in float32)"}.get(
        report.quantize, f"MLX affine, {report.quantize} bits (SSM in float32, the rest in {config['dtype']})"
    )
    revision = f" at revision {source.revision}" if source.revision else ""
    licence_line = (
        f"Licence: {licence}, as the source repo says."
        if licence
        else "Licence: that of the source model; converting does not change it."
    )
    left_out = [f"Not quantised, no group size divides their width: {', '.join(report.unquantized)}.", ""]
    lines = [
        *front,
        "",
        f"# {report.out.name}",
        "",
        f"An H3 (Hungry Hungry Hippos) language model{known}, converted from `{source.name}`{revision} for "
        f"[MLX](https://github.com/ml-explore/mlx) with mlx_cosyh3 {mlx_cosyh3.__version__}:",
        "",
        f"    {command_line(source, report.out, options)}",
        "",
        "| | |",
        "| --- | --- |",
        f"| parameters | {report.parameters:,}{' (head = embedding, counted once)' if report.tied else ''} |",
        f"| layers | {config['n_layer']}, attention in layers {attention}{heads} |",
        f"| width | {config['d_model']}, MLP {config['d_inner']}, SSM state {config['d_state']} |",
        f"| vocabulary | {config['vocab_size']:,} ids in {config['padded_vocab_size']:,} rows |",
        f"| weights | {quantization if report.quantize else config['dtype'] + ' (SSM in float32)'} |",
        f"| size | {report.bytes:,} bytes, {report.bits_per_weight:.2f} bits a weight |",
        f"| tokenizer | {vocabulary.origin} |",
        "",
        *(left_out if report.unquantized else []),
        "Made from these files (sha256):",
        "",
        *(f"    {digest}  {name}" for name, digest in hashes),
        "",
        licence_line,
        "",
        "Use:",
        "",
        *usage(report, vocabulary),
        "",
    ]
    return "\n".join(lines)


def speech_card(source, report, hashes, options):
    """README.md of a converted CosyVoice model. `hashes`: [(file name, sha256)] of every file that went in."""
    config = report.config
    revision = f" at revision {source.revision}" if source.revision else ""
    front = ["---", "library_name: mlx", "pipeline_tag: text-to-speech"]
    front += [f"base_model: {source.repo}"] if source.repo else []
    front += ["tags:", "- mlx", "- cosyvoice", "---"]
    sizes = [f"| {part} | {n:,} | {_kept(part, config)} | {b:,} |" for part, (n, _, b) in report.sizes.items()]
    say = f"mlx_cosyh3 say 'Good morning.' --model {report.out.name}"
    voice = shlex.quote(report.voices[0]) if report.voices else "me.wav --voice-text 'what is said in it'"
    lines = [
        *front,
        "",
        f"# {report.out.name}",
        "",
        f"A CosyVoice {config['model_type'][-1]} text-to-speech model, converted from `{source.name}`{revision} for "
        f"[MLX](https://github.com/ml-explore/mlx) with mlx_cosyh3 {mlx_cosyh3.__version__}:",
        "",
        f"    {command_line(source, report.out, options)}",
        "",
        "| part | parameters | weights | bytes |",
        "| --- | --- | --- | --- |",
        *sizes,
        "",
        f"Audio at {config['sample_rate']:,} Hz; {config['token_frame_rate']} speech tokens a second out of "
        f"{config['llm']['speech_token_size']:,}; voices: {', '.join(report.voices) or 'none'}.",
        "",
        *(f"Note: {note}." for note in report.notes),
        *([""] if report.notes else []),
        "Made from these files (sha256):",
        "",
        *(f"    {digest}  {name}" for name, digest in hashes),
        "",
        "Licence: that of the source model; converting does not change it.",
        "",
        "Use:",
        "",
        f"    {say} --voice {voice}",
        "",
    ]
    return "\n".join(lines)


def _kept(part, config):
    """How a part's weights are kept, in words."""
    computed = config["dtype"].get(part, "float32")
    stored = config.get("store", {}).get(part, computed)
    q = config.get("quantization", {}).get(part)
    floats = stored if stored == computed else f"{stored}, computed in {computed}"
    if q is None:
        return floats
    how = "int8 per output row" if q["mode"] == "int8" else f"{q['bits']} bits"
    return f"linear layers {how}, the rest {floats}"


def usage(report, vocabulary):
    if vocabulary.files:
        return [f"    mlx_cosyh3 generate --model {report.out.name} --prompt 'Once upon a time'"]
    return ["    import mlx.core as mx", "    import mlx_cosyh3", "",
            f"    logits = mlx_cosyh3.load({report.out.name!r})(mx.array([[1, 2, 3]]))"]  # fmt: skip


def _key(config):
    return config["d_model"], config["n_layer"], tuple(config["attn_layer_idx"])
