"""Do the numbers of a CosyVoice folder's yaml and its weights belong together? Both tell the sizes of the model."""

import importlib
import math
import re
from pathlib import Path

from mlx.utils import tree_flatten

from mlx_cosyh3.cosyvoice import llm
from mlx_cosyh3.errors import CheckpointError, CosyH3Error

QWEN2 = "CosyVoice-BlankEN"
CLASSES = {  # part: (its module, its class)
    "llm": ("llm", "SpeechLM"),
    "flow": ("flow", "Flow"),
    "hift": ("hift", "HiFT"),
    "campplus": ("campplus", "CAMPPlus"),
    "speech_tokenizer": ("s3tokenizer", "S3Tokenizer"),
}

COUNTS = (  # whole numbers from 1 on
    "sample_rate", "token_frame_rate", "token_mel_ratio", "chunk_size", "mel.n_fft", "mel.hop_size", "mel.win_size",
    "flow.dit.static_chunk_size", "hift.istft_params.hop_len",
)  # fmt: skip
AMOUNTS = (  # numbers from 0 on
    "hift.nsf_alpha", "hift.nsf_sigma", "hift.nsf_voiced_threshold", "hift.lrelu_slope", "hift.audio_limit",
    "flow.cfm.inference_cfg_rate", "mel.fmin", "llm.qwen2.rms_norm_eps", "llm.qwen2.rope_theta",
)  # fmt: skip
ONLY = {"flow.cfm.solver": "euler", "flow.cfm.t_scheduler": "cosine", "flow.dit.num_decoding_left_chunks": -1}


def check_kinds(config, told):
    """Numbers that no weight tells must be numbers, fit each other, and ask for nothing that is not done here.

    `told`: the file that the config is from. Raises CheckpointError."""
    mel, mix, rates = config["mel"], config["llm"]["mix_ratio"], _at(config, "hift.upsample_rates")
    if not _counts(rates):
        raise CheckpointError(f"{told}: hift.upsample_rates is {rates!r}, not a list of whole numbers from 1 on")
    if not _counts(mix) or len(mix) != 2:
        raise CheckpointError(f"{told}: llm.mix_ratio is {mix!r}, not two whole numbers from 1 on")
    for path in COUNTS:
        if not _counts([_at(config, path)]):
            raise CheckpointError(f"{told}: {path} is {_at(config, path)!r}, not a whole number from 1 on")
    for path in AMOUNTS:
        value = _at(config, path)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            where = f"{QWEN2}/config.json" if path.startswith("llm.qwen2.") else told
            raise CheckpointError(f"{where}: {path} is {value!r}, not a number from 0 on")
    for path, only in ONLY.items():
        if (value := _at(config, path, only)) != only:
            raise CheckpointError(f"{told}: {path} is {value!r}; only {only!r} is supported")
    top = config["sample_rate"] / 2 if mel["fmax"] is None else mel["fmax"]
    if type(top) not in (int, float) or not mel["fmin"] < top <= config["sample_rate"] / 2:
        raise CheckpointError(f"{told}: mel.fmin and fmax are {mel['fmin']} and {top!r} Hz, not within half the rate")
    hop, window, n_fft = (mel[k] for k in ("hop_size", "win_size", "n_fft"))
    if not hop <= window <= n_fft <= 1 << 16:
        raise CheckpointError(f"{told}: mel.hop_size, win_size, n_fft are {hop}, {window}, {n_fft}: no windows")
    chunk, static = config["chunk_size"] * config["token_mel_ratio"], config["flow"]["dit"]["static_chunk_size"]
    samples = math.prod(rates) * config["hift"]["istft_params"]["hop_len"]  # of a mel frame
    for what, a, b in (
        ("chunk_size * token_mel_ratio and the estimator's static_chunk_size", chunk, static),
        ("hift.upsample_rates * hop_len and mel.hop_size", samples, hop),
    ):  # fmt: skip
        if a != b:
            raise CheckpointError(f"{told}: {what} differ: {a!r} and {b!r}")


def _counts(values):
    return isinstance(values, list) and all(type(n) is int and n > 0 for n in values)


def _at(config, path, default=None):
    for key in path.split("."):
        if not isinstance(config, dict) or key not in config:
            return default
        config = config[key]
    return config


def check_numbers(config, parts, files, told):
    """Sizes that both the config and the weights tell must be the same: CheckpointError names both.

    `files`: {part: file name}; `told`: where the config is from."""
    lm, fl, hi = config["llm"], config["flow"], config["hift"]
    q, dit = lm["qwen2"], fl["dit"]
    head = q["hidden_size"] // q["num_attention_heads"]
    qwen2, special = f"{QWEN2}/config.json", llm.V3_SPECIALS
    layer, block = "qwen2.layers.0.", "dit.blocks.0."
    kv, inner = q["num_key_value_heads"] * head, dit["heads"] * dit.get("dim_head", 64)
    estimator, ahead = "flow.decoder.estimator", fl["pre_lookahead_layer"]["channels"]
    taps, cond = fl["pre_lookahead_len"] + 1, hi["f0_predictor"]["cond_channels"]
    table = [
        ("llm", "qwen2.embed_tokens.weight", 0, qwen2, "vocab_size", q["vocab_size"]),
        ("llm", "qwen2.embed_tokens.weight", 1, qwen2, "hidden_size", q["hidden_size"]),
        ("llm", layer + "mlp.up_proj.weight", 0, qwen2, "intermediate_size", q["intermediate_size"]),
        ("llm", layer + "self_attn.k_proj.bias", 0, qwen2, "num_key_value_heads * head size", kv),
        ("llm", "speech_embedding.weight", 0, told, f"llm.speech_token_size + {special}", lm["speech_vocab_size"]),
        ("llm", "llm_decoder.weight", 0, told, f"llm.speech_token_size + {special}", lm["speech_vocab_size"]),
        ("flow", "input_embedding.weight", 0, told, "flow.vocab_size", fl["vocab_size"]),
        ("flow", "spk_embed_affine_layer.weight", 1, told, "flow.spk_embed_dim", fl.get("spk_embed_dim", 192)),
        ("flow", "pre_lookahead_layer.conv1.bias", 0, told, "flow.pre_lookahead_layer.channels", ahead),
        ("flow", "pre_lookahead_layer.conv1.weight", 1, told, "flow.pre_lookahead_len + 1", taps),
        ("flow", "dit.proj_in.bias", 0, told, f"{estimator}.dim", dit["dim"]),
        ("flow", block + "to_q.bias", 0, told, f"{estimator}.heads * dim_head", inner),
        ("flow", block + "ff_in.bias", 0, told, f"{estimator}.dim * ff_mult", dit["dim"] * dit.get("ff_mult", 2)),
        ("hift", "conv_pre.bias", 0, told, "hift.base_channels", hi["base_channels"]),
        ("hift", "conv_pre.weight", 1, told, "hift.conv_pre_look_right + 1", hi["conv_pre_look_right"] + 1),
        ("hift", "m_source.l_linear.weight", 1, told, "hift.nb_harmonics + 1", hi["nb_harmonics"] + 1),
        ("hift", "conv_post.bias", 0, told, "hift.istft_params.n_fft + 2", hi["istft_params"]["n_fft"] + 2),
        ("hift", "f0_predictor.classifier.weight", 1, told, "hift.f0_predictor.cond_channels", cond),
    ]  # fmt: skip
    for i, kernel in enumerate(hi["upsample_kernel_sizes"]):
        table.append(("hift", f"ups.{i}.weight", 1, told, f"hift.upsample_kernel_sizes[{i}]", kernel))
    for part, name, axis, where, key, value in table:
        if name in parts[part] and parts[part][name].shape[axis] != value:
            shape = list(parts[part][name].shape)
            raise CheckpointError(
                f"{where} says {key} = {value}, but {files[part]} has {shape[axis]} ({name}, {shape})"
            )
    blocks = len(hi["upsample_rates"]) * len(hi["resblock_kernel_sizes"])
    for part, prefix, where, key, value in (
        ("llm", "qwen2.layers", qwen2, "num_hidden_layers", q["num_hidden_layers"]),
        ("flow", "dit.blocks", told, f"{estimator}.depth", dit["depth"]),
        ("hift", "ups", told, "the number of hift.upsample_rates", len(hi["upsample_rates"])),
        ("hift", "resblocks", told, "the number of hift's resblocks", blocks),
    ):  # fmt: skip
        found = {m[1] for m in (re.match(rf"{re.escape(prefix)}\.(\d+)\.", name) for name in parts[part]) if m}
        if len(found) != value:
            raise CheckpointError(f"{where} says {key} = {value}, but {files[part]} has {len(found)} ({prefix}.*)")


def check_parts(source):
    """Every part has exactly the tensors, in their shapes, that a model of this config has."""
    for part, tensors in source.parts.items():
        if part in source.packed:
            continue
        module, cls = CLASSES[part]
        module = importlib.import_module(f"mlx_cosyh3.cosyvoice.{module}")
        try:
            config = getattr(module, f"{cls}Config").from_dict(source.config[part])
            model = getattr(module, cls)(config)
        except CosyH3Error as e:
            raise CheckpointError(f"{source.name}: {e}") from e
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as e:
            reason = f"{type(e).__name__}: {e}".splitlines()[0]
            raise CheckpointError(f"{source.name}: the numbers of {part} make no model ({reason})") from e
        expected = {name: a.shape for name, a in tree_flatten(model.parameters())}  # lazy: takes no memory
        file = Path(source.files[part]).name
        for what, names in (("lacks", expected.keys() - tensors.keys()), ("has", tensors.keys() - expected.keys())):
            if names:
                reason = "" if what == "lacks" else ", which the model has not"
                raise CheckpointError(f"{file} {what} {min(names)!r}{reason} ({len(names)} such tensors)")
        for name, shape in expected.items():
            if tensors[name].shape != shape:
                raise CheckpointError(f"{file}: {name} is {list(tensors[name].shape)}, the config says {list(shape)}")
