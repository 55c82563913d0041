"""CosyVoice 2 and 3 folders in the layout of mlx-audio: one model.safetensors, in our names.

The prefixes are `qwen2.` (the transformer), `llm.` (speech embedding and head), `flow.`, `campplus.`, and for the
vocoder `hift.` (version 2) or `hifigan.` (3); convolutions are [out, K, in] already, weight norm is folded, and
`quantization` in config.json tells of Qwen2's layers. That config holds little, or the released model's sizes whatever
the weights are, so sizes are taken from the weights. Facts from PyPI mlx-audio-plus 0.1.8,
tts/models/cosyvoice{2,3}/scripts/convert.py; what is different in the versions is in `cosyvoice_mlx_v2.py` and
`cosyvoice_mlx_v3.py`. The speech tokenizer is not in it.
"""

import dataclasses
import importlib
import json
import re
from pathlib import Path

import numpy as np

from mlx_cosyh3.convert.cosyvoice_check import check_kinds, check_numbers, check_parts, count
from mlx_cosyh3.convert.cosyvoice_folder import FRONT_ENDS, SpeechSource, read_front_end
from mlx_cosyh3.convert.sources import ArrayTensor, as_float32, open_source
from mlx_cosyh3.cosyvoice import campplus, hift_weights, llm, s3tokenizer, text_tokenizer
from mlx_cosyh3.cosyvoice.hift_decoder import HiFTConfig
from mlx_cosyh3.errors import CheckpointError, nearest

NEEDED = {"config.json", "model.safetensors"}
PATTERNS = ["config.json", "model.safetensors", *text_tokenizer.FILES]
LAYOUTS = {"cosyvoice2": "cosyvoice_mlx_v2", "cosyvoice3": "cosyvoice_mlx_v3"}  # model_type -> its module
HEAD = 64  # width of an attention head, in all released models
CAMPPLUS_NAMES = (
    (r"^(tdnn|dense|out_nonlinear)\.", r"xvector.\1."),
    (r"^blocks\.(\d)\.layers\.(\d+)\.", r"xvector.block-\1.tdnnd-\2."),
    (r"^transits\.(\d)\.", r"xvector.transit-\1."),
    (r"nonlinear(\d?)\.0\.", r"nonlinear\1.batchnorm."),
)
HIFT = {  # what config.json may lack
    "in_channels": 80, "nb_harmonics": 8, "sampling_rate": 24000, "nsf_alpha": 0.1, "nsf_sigma": 0.003,
    "nsf_voiced_threshold": 10, "lrelu_slope": 0.1, "audio_limit": 0.99, "upsample_rates": [8, 5, 3],
    "istft_params": {"n_fft": 16, "hop_len": 4}, "resblock_kernel_sizes": [3, 7, 11],
    "resblock_dilation_sizes": [[1, 3, 5]] * 3, "source_resblock_kernel_sizes": [7, 7, 11],
    "source_resblock_dilation_sizes": [[1, 3, 5]] * 3,
}  # fmt: skip
MEL = {"n_fft": 1920, "hop_size": 480, "win_size": 1920, "num_mels": 80, "fmin": 0}


def is_layout(folder):
    """Whether `folder` holds a model in this layout."""
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and is_layout_config(config)


def is_layout_config(config):
    """Whether a config.json (a dict) is of this layout, not ours."""
    return config.get("model_type") in LAYOUTS and "mel" not in config


def from_mlx_layout(folder):
    """The model in `folder` -> (config as of config.json, {our name: numpy array}). Raises CosyH3Error."""
    folder = Path(folder)
    source = read_layout(folder, folder.resolve().name)
    config = source.config | {"dtype": dict.fromkeys(("llm", "flow", "hift"), "float32")}
    if source.packed:
        config["quantization"] = source.packed
    return config, {f"{p}.{n}": t.numpy() for p, tensors in source.parts.items() for n, t in tensors.items()}


def read_layout(folder, name, front_ends=None):
    """Open the model in `folder` -> SpeechSource.

    front_ends   {part: path}, in place of or in addition to what the folder holds"""
    given = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    layout = importlib.import_module(f"mlx_cosyh3.convert.{LAYOUTS[given['model_type']]}")
    opened = open_source(folder, "model.safetensors")
    split = _split(opened.tensors, opened.paths[0], layout.VOCODER)
    tokenizer = text_tokenizer.SpeechTextTokenizer.from_dir(folder, layout.NUMBER)
    notes = []
    parts = {
        "llm": _language_model(split),
        "flow": _arrays(layout.flow(_upstream_flow(split["flow"], layout.FLOW_NAMES))),
        "hift": _vocoder(split[layout.VOCODER]),
    }
    try:
        shapes = {part: {n: t.shape for n, t in tensors.items()} for part, tensors in parts.items()}
        config = _config(layout, given, shapes, tokenizer)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as e:
        raise CheckpointError(f"{folder}: config.json or model.safetensors lacks what makes a model ({e})") from e
    text_files = {path.name: path for path in text_tokenizer.files(folder)}
    source = SpeechSource(name, folder, config, parts, dict.fromkeys(parts, opened.paths[0]), text_files)
    source.others, source.notes = [folder / "config.json"], notes
    source.skipped[opened.paths[0].name] = [n for n in opened.tensors if n.endswith("rotary_embed.inv_freq")]
    quantization = _quantization(given, parts["llm"])
    if quantization:
        source.packed["llm"] = quantization
    try:
        check_kinds(config, source.version)
    except CheckpointError as e:
        raise CheckpointError(f"{folder / 'config.json'}: {e}") from e
    check_numbers(config, parts, dict.fromkeys(parts, opened.paths[0].name), "config.json", source.version)
    tokenizer.check(config["llm"]["qwen2"]["vocab_size"])
    if split["campplus"] and "campplus" not in (front_ends or {}):
        _speaker_encoder(source, split["campplus"], opened.paths[0])
    for part, path in (front_ends or {}).items():
        read_front_end(source, part, Path(path))
    lacking = [part for part in FRONT_ENDS if config.get(part) is None]
    if lacking:
        options = ", ".join(f"--{part.replace('_', '-')} FILE" for part in lacking)
        notes.append(
            f"the folder holds no {' and no '.join(lacking)}, so no voice can be made of a recording: give {options}"
        )
    check_parts(source)
    return source


def _split(tensors, path, vocoder):
    prefixes = ("qwen2", "llm", "flow", vocoder, "campplus")
    split = {p: {} for p in prefixes}
    for name, tensor in tensors.items():
        prefix, _, rest = name.partition(".")
        if prefix not in split:
            raise CheckpointError(f"{path}: unknown tensor {name!r}{nearest(prefix, prefixes)}")
        split[prefix][rest] = as_float32(tensor.numpy(), "BF16") if tensor.dtype == "BF16" else tensor.numpy()
    for prefix in prefixes[:-1]:
        if not split[prefix]:
            raise CheckpointError(f"{path} has no tensors under {prefix!r}: it is cut short or another model's")
    return split


def _arrays(weights):
    return {n: ArrayTensor(a) for n, a in weights.items()}


def _language_model(split):
    weights, packed = {}, {}
    for name, a in split["qwen2"].items():
        name = name.replace("model.", "qwen2.", 1) if name.startswith("model.") else name
        (packed if name.endswith((".scales", ".biases")) else weights)[name] = a
    weights.pop("lm_head.weight", None)
    ours = llm.sanitize(weights | split["llm"])
    for name, a in packed.items():
        weight = f"{name.rpartition('.')[0]}.weight"
        if weight not in ours or ours[weight].dtype != "uint32":
            raise CheckpointError(f"the language model has {name}, but no quantised {weight}")
        ours[name] = a
    return _arrays(ours)


def _upstream_flow(weights, names):
    """Upstream's names and order of axes again, for `sanitize`."""
    upstream = {}
    for name, a in weights.items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        upstream[name] = a.transpose(0, 2, 1) if a.ndim == 3 else a
    return upstream


def _vocoder(weights):
    upstream = {}
    for name, a in weights.items():
        name = re.sub(r"condnet_(\d)\.", r"condnet.\1.", name)
        upstream[re.sub(r"\.conv\.(weight|bias)$", r".\1", name)] = a
    return _arrays(hift_weights.sanitize(upstream))


def _speaker_encoder(source, weights, path):
    """CAM++: upstream's names again, and its order of axes, for its `sanitize` to fold the batch norms."""
    upstream = {}
    for name, a in weights.items():
        for pattern, replacement in CAMPPLUS_NAMES:
            name = re.sub(pattern, replacement, name)
        upstream[_one_more(name)] = np.moveaxis(a, -1, 1) if a.ndim > 2 else a
    ours = campplus.sanitize(upstream)
    source.config["campplus"] = dataclasses.asdict(campplus.CAMPPlusConfig.from_weights(ours))
    source.parts["campplus"] = _arrays(ours)
    source.files["campplus"] = path


def _one_more(name):
    return re.sub(r"-(\d+)", lambda m: str(int(m[1]) + 1), name)  # upstream counts from 1


def read_speech_tokenizer(path):
    """The speech tokenizer in that project's layout, a folder or .safetensors file -> (config, {our name: array})."""
    upstream = {}
    for name, tensor in open_source(path).tensors.items():
        a = as_float32(tensor.numpy(), "BF16") if tensor.dtype == "BF16" else tensor.numpy()
        name = re.sub(r"mlp\.layers\.(\d)", r"mlp.\1", name).replace("fsq_codebook", "_codebook")
        upstream[name] = a.transpose(0, 2, 1) if a.ndim == 3 else a
    ours = s3tokenizer.sanitize(upstream)
    return dataclasses.asdict(s3tokenizer.S3TokenizerConfig.from_weights(ours)), ours


def _quantization(given, tensors):
    q = given.get("quantization")
    found = any(t.dtype == "U32" for t in tensors.values())
    if not found:
        return None
    if not isinstance(q, dict) or type(q.get("bits")) is not int or type(q.get("group_size")) is not int:
        raise CheckpointError(
            "config.json has no quantization with bits and group_size, but there are quantised weights"
        )
    return {"mode": "affine", "bits": q["bits"], "group_size": q["group_size"]}


def _config(layout, given, shapes, tokenizer):
    """config.json: what shapes tell from the shapes, the rest from the folder's config."""
    hi, said = shapes["hift"], given.get(layout.VOCODER, {})
    known = {f.name for f in dataclasses.fields(HiFTConfig)}
    vocoder = HIFT | {k: v for k, v in said.items() if k in known} | {
        "base_channels": hi["conv_pre.bias"][0],
        "f0_predictor": {"cond_channels": hi["f0_predictor.classifier.weight"][1]},
        "upsample_kernel_sizes": [hi[f"ups.{i}.weight"][1] for i in range(count(hi, "ups"))],
    }  # fmt: skip
    if "istft_n_fft" in said:
        vocoder["istft_params"] = {"n_fft": said["istft_n_fft"], "hop_len": said["istft_hop_len"]}
    config = {
        "model_type": given["model_type"],
        "sample_rate": given["sample_rate"],
        "hift": vocoder,
        "campplus": None,
        "speech_tokenizer": None,
        "special_tokens": tokenizer.special,
    }
    return layout.complete(config, given, shapes, tokenizer)


def qwen2_config(lm, said):
    """Qwen2's own config, from the shapes of the language model and what config.json says of it."""
    vocab, hidden = lm["qwen2.embed_tokens.weight"]
    heads = said.get("num_attention_heads") or hidden // HEAD
    return {
        "hidden_size": hidden,
        "num_hidden_layers": count(lm, "qwen2.layers"),
        "intermediate_size": lm["qwen2.layers.0.mlp.up_proj.weight"][0],
        "num_attention_heads": heads,
        "num_key_value_heads": lm["qwen2.layers.0.self_attn.k_proj.bias"][0] * heads // hidden,
        "vocab_size": vocab,
        "rms_norm_eps": said.get("rms_norm_eps", 1e-6),
        "rope_theta": said.get("rope_theta", 1e6),
    }


def lm_config(speech):
    """A SpeechLMConfig as config.json holds it."""
    return dataclasses.asdict(speech) | {"mix_ratio": list(speech.mix_ratio)}
