"""A small CosyVoice model of each version, made of the parts of upstream's goldens, with a stand-in for its tokenizer.

It says noise: 15 speech tokens a letter of the text, or 2 if `model.short`. Its chunks are 25 tokens, as those of the
released models.
"""

import dataclasses
import functools
import json

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.cosyvoice import cosyvoice1, cosyvoice2, cosyvoice3, hift_weights, llm, transformer_lm
from mlx_cosyh3.cosyvoice import flow as flow3
from mlx_cosyh3.cosyvoice import flow_regulated as flow1
from mlx_cosyh3.cosyvoice import flow_upsampled as flow2
from mlx_cosyh3.cosyvoice.llm import SpeechLMConfig
from mlx_cosyh3.cosyvoice.special_tokens import TAGS
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.int8 import quantize_int8
from tests.golden_data import LARGE, SMALL, cosyvoice_golden

VERSIONS = (1, 2, 3)
MODULES = {1: cosyvoice1, 2: cosyvoice2, 3: cosyvoice3}
SANITIZE = {
    "llm": {1: transformer_lm.sanitize, 2: llm.sanitize, 3: llm.sanitize},
    "flow": {1: flow1.sanitize, 2: flow2.sanitize, 3: flow3.sanitize},
    "hift": dict.fromkeys(VERSIONS, hift_weights.sanitize),
}
TOKEN_RATE = {1: 50, 2: 25, 3: 25}
QUANTISED = {
    "int8": {"mode": "int8"},
    "8": {"mode": "affine", "bits": 8, "group_size": 32},
    "4": {"mode": "affine", "bits": 4, "group_size": 32},
}
SPEECH = 120  # speech tokens of the language models; the flows know more
END_OF_PROMPT = 500


class Letters:
    """In place of a tokenizer: one id a letter."""

    end_of_prompt_id, tags = END_OF_PROMPT, TAGS

    def encode(self, text):
        tag = "<|endofprompt|>"
        return [END_OF_PROMPT] * text.count(tag) + [ord(c) % 400 for c in text.replace(tag, "")]

    def count(self, text):
        return len(self.encode(text))


def part(version, name):
    """(upstream's constructor arguments, our weights) of a part; the flows are large, without their goldens random."""
    if name == "flow" and LARGE is None:
        return random_flow(version)
    folder = cosyvoice_golden(f"v{version}_{name}")
    arguments = json.loads((folder / "config.json").read_text())
    weights = SANITIZE[name][version]({k: t.numpy() for k, t in open_source(folder / f"{name}.pt").tensors.items()})
    return arguments, {f"{name}.{k}": mx.array(np.ascontiguousarray(a)).astype(mx.float32) for k, a in weights.items()}


def random_flow(version):
    """The flow of the golden's sizes with weights that keep the size of what goes through."""
    arguments = json.loads((SMALL / "cosyvoice" / "flow_configs.json").read_text())[f"v{version}_flow"]
    cls, config = MODULES[version].PARTS["flow"]
    rng, weights = np.random.default_rng(version), {}
    for path, a in tree_flatten(cls(config.from_dict(arguments)).parameters()):
        noise = rng.standard_normal(a.shape).astype(np.float32)
        if "norm" in path and path.endswith("weight"):
            noise = 1 + 0.1 * noise
        elif a.ndim == 1:
            noise *= 0.1
        elif "embedding" not in path:
            noise /= np.sqrt(np.prod(a.shape[1:]))
        weights[f"flow.{path}"] = mx.array(noise)
    return arguments, weights


def lm_config(version, d):
    if version == 1:
        return d
    qwen2, mix = d["qwen2"], d["mix_ratio"]
    made = (
        SpeechLMConfig.v2(qwen2, SPEECH, mix) if version == 2 else SpeechLMConfig.v3(qwen2, SPEECH, END_OF_PROMPT, mix)
    )
    return vars(made) | {"qwen2": vars(made.qwen2)}


@functools.cache
def model(version):
    """The model, with the voices anna (an embedding alone) and clara (with a recording and its transcript)."""
    return _build(version)


@functools.cache
def quantised(version, how):
    """The same with `how` ("int8", "8", "4") for the linear layers that `-q` takes."""
    return _build(version, QUANTISED[how])


def _build(version, how=None):
    parts = {name: part(version, name) for name in SANITIZE}
    rate = 22050 if version == 1 else 24000
    config = {
        "model_type": f"cosyvoice{version}", "sample_rate": rate, "token_frame_rate": TOKEN_RATE[version],
        "token_mel_ratio": 2, "chunk_size": 25, "llm": lm_config(version, parts["llm"][0]), "flow": parts["flow"][0],
        "hift": parts["hift"][0], "campplus": None, "speech_tokenizer": None,
        "mel": {"n_fft": 1024 if version == 1 else 1920, "hop_size": 256 if version == 1 else 480,
                "win_size": 1024 if version == 1 else 1920, "num_mels": 80, "fmin": 0,
                "fmax": None if version == 3 else 8000},
    }  # fmt: skip
    config["quantization"] = {part: how for part in ("llm", "flow")} if how else {}
    made = MODULES[version].build(config)
    weights = {n: a for _, own in parts.values() for n, a in own.items()}
    for path, layer in made.named_modules():
        if how and "weight" in layer and layer.weight.dtype in (mx.int8, mx.uint32):
            weights |= packed(path, weights[f"{path}.weight"], how)
    made.load_weights(list(weights.items()))
    if hasattr(made.llm, "join"):
        made.llm.join()
    mx.eval(made.parameters())
    made._tokenizer = Letters()
    made.short = False
    made.speak = functools.partial(_speak, made)
    made._voices = {"anna": voice(version, 0, 1, "anna"), "clara": voice(version, 16, 2, "clara")}
    return made


def packed(path, weight, how):
    """The tensors that stand for a linear layer's weight."""
    if how["mode"] == "int8":
        return dict(zip((f"{path}.weight", f"{path}.scale"), map(mx.array, quantize_int8(np.array(weight)))))
    made = mx.quantize(weight, how["group_size"], how["bits"])
    return dict(zip((f"{path}.weight", f"{path}.scales", f"{path}.biases"), made))


def _speak(made, segment, mode, speaker, options, key):
    """`speak` of the model, but that it ends: the language models of the goldens go on for ever."""
    options = dataclasses.replace(options, min_ratio=1, max_ratio=2 if made.short else 15)
    return type(made).speak(made, segment, mode, speaker, options, key)


def voice(version, tokens=16, seed=3, name="prompted", transcript="the cat"):
    """A random Voice for that model; tokens=0: a speaker embedding alone."""
    rng = np.random.default_rng(seed)
    frames = int(tokens / 50 * 22050 / 256) if version == 1 else 2 * tokens
    return Voice(
        rng.standard_normal(192).astype(np.float32), rng.integers(0, SPEECH, tokens).astype(np.int32),
        rng.standard_normal((frames, 80)).astype(np.float32), transcript if tokens else None, None, name, SPEECH,
        22050 if version == 1 else 24000,
    )  # fmt: skip
