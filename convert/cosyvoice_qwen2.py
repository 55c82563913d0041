"""What the published folders of CosyVoice 2 and 3 share: Qwen2, as text tokenizer and as language model."""

import dataclasses
import json

from mlx_cosyh3.convert.common import TextTokenizer
from mlx_cosyh3.convert.cosyvoice_check import counts, same
from mlx_cosyh3.cosyvoice import text_tokenizer
from mlx_cosyh3.errors import CheckpointError, CosyH3Error

FOLDER = "CosyVoice-BlankEN"
FILES = tuple(f"{FOLDER}/{name}" for name in ("config.json", *text_tokenizer.FILES))
AMOUNTS = ("llm.qwen2.rms_norm_eps", "llm.qwen2.rope_theta")


def read_text(folder, given, version):
    """The text tokenizer in `folder` -> TextTokenizer. `given`: --tokenizer, which these versions do not take."""
    if given is not None:
        raise CosyH3Error(
            f"--tokenizer {given} goes with H3 and CosyVoice 1 models, and this is CosyVoice {version}: leave it out"
        )
    path = folder / FOLDER / "config.json"
    qwen2 = _json(path)
    tokenizer = text_tokenizer.SpeechTextTokenizer.from_dir(folder, version)
    return TextTokenizer(tokenizer, {p.name: p for p in text_tokenizer.files(folder)}, [path], qwen2=qwen2)


def text_rows(config):
    """How many text ids the language model knows."""
    return config["llm"]["qwen2"]["vocab_size"]


def _json(path):
    if not path.is_file():
        raise CosyH3Error(
            f"{path} is missing: copy the whole model folder ({FOLDER}/ holds the tokenizer and config.json)"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not valid JSON ({type(e).__name__})") from e
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return value


def lm_config(lm, yaml):
    """A SpeechLMConfig as config.json holds it."""
    same("llm.llm_input_size and the Qwen2 config's hidden_size", yaml["llm"]["llm_input_size"], lm.qwen2.hidden_size)
    return dataclasses.asdict(lm) | {"mix_ratio": list(lm.mix_ratio)}


def check(config):
    """What several entries say must be the same: CheckpointError."""
    mix, ratio = config["llm"]["mix_ratio"], config["token_mel_ratio"]
    if not counts(mix) or len(mix) != 2:
        raise CheckpointError(f"llm.mix_ratio is {mix!r}, not two whole numbers from 1 on")
    same("token_mel_ratio and flow.token_mel_ratio", ratio, config["flow"]["token_mel_ratio"])
    what = "mel frames a second, of hop_size and of token_frame_rate * token_mel_ratio,"
    same(what, config["sample_rate"] / config["mel"]["hop_size"], config["token_frame_rate"] * ratio)


def sizes(config, specials):
    """Rows and numbers of layers, as those of a version; `specials`: rows beyond the speech tokens."""
    lm = config["llm"]
    q, layer, told = lm["qwen2"], "qwen2.layers.0.", f"{FOLDER}/config.json"
    kv = q["num_key_value_heads"] * (q["hidden_size"] // q["num_attention_heads"])
    rows = [
        ("llm", "qwen2.embed_tokens.weight", 0, "vocab_size", q["vocab_size"], told),
        ("llm", "qwen2.embed_tokens.weight", 1, "hidden_size", q["hidden_size"], told),
        ("llm", layer + "mlp.up_proj.weight", 0, "intermediate_size", q["intermediate_size"], told),
        ("llm", layer + "self_attn.k_proj.bias", 0, "num_key_value_heads * head size", kv, told),
        ("llm", "speech_embedding.weight", 0, f"llm.speech_token_size + {specials}", lm["speech_vocab_size"]),
        ("llm", "llm_decoder.weight", 0, f"llm.speech_token_size + {specials}", lm["speech_vocab_size"]),
    ]
    return rows, [("llm", "qwen2.layers", "num_hidden_layers", q["num_hidden_layers"], told)]
