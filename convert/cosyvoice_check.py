"""Do the numbers of a CosyVoice folder's yaml and its weights belong together? Both tell the sizes of the model."""

import importlib
import math
import re
from pathlib import Path

from mlx.utils import tree_flatten

from mlx_cosyh3.errors import CheckpointError, CosyH3Error

COUNTS = (  # whole numbers from 1 on, in all versions
    "sample_rate", "token_frame_rate", "llm.speech_token_size", "flow.vocab_size", "mel.n_fft", "mel.hop_size",
    "mel.win_size", "mel.num_mels", "hift.istft_params.hop_len",
)  # fmt: skip
AMOUNTS = (  # numbers from 0 on
    "hift.nsf_alpha", "hift.nsf_sigma", "hift.nsf_voiced_threshold", "hift.lrelu_slope", "hift.audio_limit",
    "flow.cfm.inference_cfg_rate", "mel.fmin",
)  # fmt: skip
ONLY = {"flow.cfm.solver": "euler", "flow.cfm.t_scheduler": "cosine"}


def same(what, a, b):
    """CheckpointError unless both entries say the same."""
    if a != b:
        raise CheckpointError(f"{what} differ: {a!r} and {b!r}")


def check_kinds(config, version):
    """Numbers that no weight tells must be numbers, fit each other, and ask for nothing that is not done here.

    `version`: the module of the version. Raises CheckpointError."""
    mel, rates = config["mel"], at(config, "hift.upsample_rates")
    if not counts(rates):
        raise CheckpointError(f"hift.upsample_rates is {rates!r}, not a list of whole numbers from 1 on")
    for path in (*COUNTS, *version.COUNTS):
        if not counts([at(config, path)]):
            raise CheckpointError(f"{path} is {at(config, path)!r}, not a whole number from 1 on")
    for path in (*AMOUNTS, *version.AMOUNTS):
        value = at(config, path)
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            named = path.replace("llm.qwen2.", "CosyVoice-BlankEN/config.json: ")
            raise CheckpointError(f"{named} is {value!r}, not a number from 0 on")
    for path, only in (ONLY | version.ONLY).items():
        if (value := at(config, path, only)) != only:
            raise CheckpointError(f"{path} is {value!r}; only {only!r} is supported")
    top = config["sample_rate"] / 2 if mel["fmax"] is None else mel["fmax"]
    if type(top) not in (int, float) or not mel["fmin"] < top <= config["sample_rate"] / 2:
        raise CheckpointError(f"mel.fmin and fmax are {mel['fmin']} and {top!r} Hz, not within half the rate")
    hop, window, n_fft = (mel[k] for k in ("hop_size", "win_size", "n_fft"))
    if not hop <= window <= n_fft <= 1 << 16:
        raise CheckpointError(f"mel.hop_size, win_size, n_fft are {hop}, {window}, {n_fft}: no windows")
    version.check(config)
    samples = math.prod(rates) * config["hift"]["istft_params"]["hop_len"]  # of a mel frame
    same("hift.upsample_rates * hop_len and mel.hop_size", samples, hop)
    same("feat_extractor.num_mels and flow.output_size", mel["num_mels"], config["flow"]["output_size"])
    same("llm.speech_token_size and flow.vocab_size", config["llm"]["speech_token_size"], config["flow"]["vocab_size"])
    same("sample_rate and hift.sampling_rate", config["sample_rate"], config["hift"]["sampling_rate"])


def counts(values):
    return isinstance(values, list) and all(type(n) is int and n > 0 for n in values)


def at(config, path, default=None):
    for key in path.split("."):
        if not isinstance(config, dict) or key not in config:
            return default
        config = config[key]
    return config


# Sizes. A row is (part, tensor, axis, entry of the config, its value), a count (part, prefix of layers, entry, value);
# one more element is the file that the entry is from, where that is not the yaml.


def check_numbers(config, parts, files, told, version):
    """Sizes that both the config and the weights tell must be the same: CheckpointError names both.

    `files`: {part: file name}; `told`: where the config is from; `version`: the module of the version."""
    rows, layers = version.sizes(config)
    for part, prefix, key, value, *where in layers:
        found, where = count(parts[part], prefix), where[0] if where else told
        if found != value:
            raise CheckpointError(f"{where} says {key} = {value}, but {files[part]} has {found} ({prefix}.*)")
    for part, name, axis, key, value, *where in rows:
        if name in parts[part] and parts[part][name].shape[axis] != value:
            shape, where = list(parts[part][name].shape), where[0] if where else told
            raise CheckpointError(
                f"{where} says {key} = {value}, but {files[part]} has {shape[axis]} ({name}, {shape})"
            )


def count(names, prefix):
    """How many layers `prefix.0`, `prefix.1` ... there are among these names."""
    return len({m[1] for m in (re.match(rf"{re.escape(prefix)}\.(\d+)\.", n) for n in names) if m})


def vocoder_sizes(config):
    hi = config["hift"]
    rows = [
        ("hift", "conv_pre.bias", 0, "hift.base_channels", hi["base_channels"]),
        ("hift", "m_source.l_linear.weight", 1, "hift.nb_harmonics + 1", hi["nb_harmonics"] + 1),
        ("hift", "conv_post.bias", 0, "hift.istft_params.n_fft + 2", hi["istft_params"]["n_fft"] + 2),
        ("hift", "f0_predictor.classifier.weight", 1, "hift.f0_predictor.cond_channels",
         hi["f0_predictor"]["cond_channels"]),
    ]  # fmt: skip
    for i, kernel in enumerate(hi["upsample_kernel_sizes"]):
        rows.append(("hift", f"ups.{i}.weight", 1, f"hift.upsample_kernel_sizes[{i}]", kernel))
    blocks = len(hi["upsample_rates"]) * len(hi["resblock_kernel_sizes"])
    return rows, [
        ("hift", "ups", "the number of hift.upsample_rates", len(hi["upsample_rates"])),
        ("hift", "resblocks", "the number of hift's resblocks", blocks),
    ]


def encoder_sizes(part, prefix, told, encoder):
    """Of an encoder with relative positions; `prefix`: of its tensors, `told`: of its entries."""
    layer = f"{prefix}layers.0."
    rows = [
        (part, f"{prefix}embed.linear.weight", 1, f"{told}.input_size", encoder["input_size"]),
        (part, f"{prefix}embed.linear.weight", 0, f"{told}.output_size", encoder["output_size"]),
        (part, f"{layer}attention.bias_u", 0, f"{told}.attention_heads", encoder["attention_heads"]),
        (part, f"{layer}ff_in.bias", 0, f"{told}.linear_units", encoder["linear_units"]),
    ]
    return rows, [(part, f"{prefix}layers", f"{told}.num_blocks", encoder["num_blocks"])]


def unet_sizes(flow):
    """Of versions 1 and 2, whose flows begin and end alike, too."""
    net, told, level = flow["decoder"], "flow.decoder.estimator", "unet.down.0."
    inner = net["num_heads"] * net["attention_head_dim"]
    rows = [
        ("flow", "input_embedding.weight", 0, "flow.vocab_size", flow["vocab_size"]),
        ("flow", "input_embedding.weight", 1, "flow.input_size", flow["input_size"]),
        ("flow", "spk_embed_affine_layer.weight", 1, "flow.spk_embed_dim", flow.get("spk_embed_dim", 192)),
        ("flow", level + "resnet.skip.bias", 0, f"{told}.channels[0]", net["channels"][0]),
        ("flow", level + "transformers.0.to_q.weight", 0, f"{told}.num_heads * attention_head_dim", inner),
    ]
    return rows, [
        ("flow", "unet.down", f"the number of {told}.channels", len(net["channels"])),
        ("flow", "unet.mid", f"{told}.num_mid_blocks", net["num_mid_blocks"]),
        ("flow", level + "transformers", f"{told}.n_blocks", net["n_blocks"]),
    ]


# The whole


def model_class(config):
    """The class of the model that a config.json describes; its `parts` are {name: (class, class of its config)}."""
    name = config["model_type"]
    module = importlib.import_module(f"mlx_cosyh3.cosyvoice.{name}")
    return getattr(module, name.replace("cosyvoice", "CosyVoice"))


def check_parts(source):
    """Every part has exactly the tensors, in their shapes, that a model of this config has."""
    classes = model_class(source.config).parts
    for part, tensors in source.parts.items():
        if part in source.packed:
            continue
        cls, part_config = classes[part]
        try:
            model = cls(part_config.from_dict(source.config[part]))
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
