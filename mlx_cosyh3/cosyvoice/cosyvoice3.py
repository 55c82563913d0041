"""CosyVoice 3 put together: Qwen2 speech LM -> DiT flow matching -> causal HiFT, with its two front ends.

Facts are upstream's (FunAudioLLM/CosyVoice, cosyvoice/cli/{cosyvoice,frontend,model}.py); how text becomes speech with
these parts is in `speech.py`. A folder may lack the front ends (speaker encoder, speech tokenizer): then it speaks
with the voices it holds, and makes no new ones.
"""

from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path

from mlx_cosyh3.cosyvoice import audio, dit, features, llm, voice
from mlx_cosyh3.cosyvoice.campplus import CAMPPlus, CAMPPlusConfig
from mlx_cosyh3.cosyvoice.flow import Flow, FlowConfig
from mlx_cosyh3.cosyvoice.hift import HiFT, HiFTConfig
from mlx_cosyh3.cosyvoice.llm import SpeechLM, SpeechLMConfig
from mlx_cosyh3.cosyvoice.s3tokenizer import S3Tokenizer, S3TokenizerConfig
from mlx_cosyh3.cosyvoice.speech import SpeechGeneration
from mlx_cosyh3.cosyvoice.text_tokenizer import SpeechTextTokenizer
from mlx_cosyh3.errors import CheckpointError, CosyH3Error, nearest
from mlx_cosyh3.int8 import Int8Linear

PARTS = {
    "llm": (SpeechLM, SpeechLMConfig),
    "flow": (Flow, FlowConfig),
    "hift": (HiFT, HiFTConfig),
    "campplus": (CAMPPlus, CAMPPlusConfig),
    "speech_tokenizer": (S3Tokenizer, S3TokenizerConfig),
}
FRONT_ENDS = {"campplus": "speaker encoder (campplus.onnx)", "speech_tokenizer": "speech tokenizer (speech_tokenizer_v3.onnx)"}
QUANTIZES = {"llm": llm.quantizes, "flow": dit.quantizes}
# Pauses and breaths among the speech tokens: of a run of these, all but the first MAX_SILENT are dropped.
SILENT = frozenset((1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323))
MAX_SILENT = 5


class CosyVoice3(nn.Module, SpeechGeneration):
    """The model: `generate`, `stream_generate`, `convert_voice` come from SpeechGeneration.

    voices   {name: Voice} that the folder holds"""

    version = 3

    def __init__(self, config):
        super().__init__()
        for name, (part, part_config) in PARTS.items():
            if config.get(name) is not None:
                self[name] = part(part_config.from_dict(config[name]))
            elif name not in FRONT_ENDS:
                raise CheckpointError(f"config.json lacks the part {name!r}: convert the model again")
        self._config = config
        self._voices, self._tokenizer = {}, None

    # What it is made of

    @property
    def config(self):
        return self._config

    @property
    def sample_rate(self):
        """Hz of the audio it makes."""
        return self._config["sample_rate"]

    @property
    def token_rate(self):
        """Speech tokens per second."""
        return self._config["token_frame_rate"]

    @property
    def codebook(self):
        """Number of speech tokens (the special ones not counted)."""
        return self._config["llm"]["speech_token_size"]

    @property
    def voices(self):
        return self._voices

    @property
    def tokenizer(self):
        return self._tokenizer

    def need(self, *parts):
        """Raise CosyH3Error unless the model has these parts."""
        for name in parts:
            if name not in self:
                has = f"the voices it holds are {', '.join(self._voices)}" if self._voices else "it holds no voices either"
                raise CosyH3Error(f"this model folder has no {FRONT_ENDS[name]}, so it cannot take a recording; {has}")

    # From a recording

    def speech_features(self, samples, rate):
        """(speech tokens int32 [P], mel float32 [2 P, 80]) of a recording: mono float samples, Hz."""
        mel = {k: self._config["mel"][k] for k in ("n_fft", "fmin", "fmax")}
        mel |= {"rate": self.sample_rate, "hop": self._config["mel"]["hop_size"], "win": self._config["mel"]["win_size"],
                "bins": self._config["mel"]["num_mels"]}  # fmt: skip
        return voice.speech_features(samples, rate, self.speech_tokenizer, mel, self.sample_rate, self._config["token_mel_ratio"])

    def speech_tokens(self, samples, rate):
        """Speech tokens int32 [P] of a recording."""
        return np.asarray(self.speech_tokenizer.tokenize(audio.resample(samples, rate, 16000)), np.int32)

    def speaker(self, samples, rate):
        """Speaker embedding float32 [192] of a recording."""
        fbank = features.kaldi_fbank(audio.resample(samples, rate, 16000))
        return np.array(self.campplus(mx.array(fbank - fbank.mean(axis=0))[None])[0], dtype=np.float32)

    # Between the language model and the flow

    @staticmethod
    def is_silent(token):
        """Whether a speech token is a pause or a breath."""
        return token in SILENT

    def trim_silence(self, tokens):
        """Yield `tokens` without what exceeds MAX_SILENT in each run of silent ones (upstream trims offline only)."""
        run = 0
        for token in tokens:
            run = run + 1 if token in SILENT else 0
            if run <= MAX_SILENT:
                yield token

    def finish(self, folder):
        """Take the tokenizer and the voices from the model's folder, and compute all that is still lazy."""
        folder = Path(folder)
        self._tokenizer = SpeechTextTokenizer.from_dir(folder)
        self._tokenizer.check(self._config["llm"]["qwen2"]["vocab_size"])
        for file in sorted((folder / "voices").glob("*.safetensors")):
            v = voice.Voice.load(file)
            self._voices[v.name] = v
        mx.eval(self.parameters())

    def find_voice(self, name):
        if name not in self._voices:
            known = ", ".join(self._voices) or "none"
            raise CosyH3Error(f"this model has no voice {name!r} (it has: {known}){nearest(name, self._voices)}; clone one from a recording")
        return self._voices[name]


def build(config):
    """The model that a config.json (a dict) describes, its quantised layers in place, without weights."""
    try:
        model = CosyVoice3(config)
    except (KeyError, TypeError) as e:
        raise CheckpointError(f"config.json lacks a value ({type(e).__name__}: {e}): convert the model again") from e
    for part, how in (config.get("quantization") or {}).items():
        if part in QUANTIZES:
            _quantize(model[part], how, QUANTIZES[part])
    return model


def _quantize(part, how, chosen):
    """Exchange the linear layers that `chosen(path)` names for their quantised forms, to be filled by load_weights."""
    if how.get("mode") == "int8":

        def int8(path, module):
            if isinstance(module, nn.Linear) and chosen(path):
                return Int8Linear(module.weight.shape[1], module.weight.shape[0], "bias" in module)
            return module

        part.update_modules(tree_map_with_path(int8, part.leaf_modules(), is_leaf=nn.Module.is_module))
        return
    if how.get("mode", "affine") != "affine":
        raise CheckpointError(f"config.json: quantization mode {how['mode']!r} is not int8 or affine")
    fits = partial(_fits, group=how["group_size"], own=how)
    nn.quantize(part, how["group_size"], how["bits"], class_predicate=lambda path, m: chosen(path) and fits(path, m))


def _fits(path, module, group, own):
    return isinstance(module, nn.Linear) and own.get(path, True) and module.weight.shape[1] % group == 0


def cast(weights, config):
    """`weights` (a dict) as the parts compute with them: files may store floats in a smaller dtype."""
    dtypes = {part: getattr(mx, name) for part, name in (config.get("dtype") or {}).items()}
    out = {}
    for name, a in weights.items():
        dtype = dtypes.get(name.split(".", 1)[0], mx.float32)
        if name.startswith("hift.f0_predictor."):
            dtype = mx.float32  # an error of the pitch adds up to one of the phase
        keep = a.dtype not in (mx.float32, mx.float16, mx.bfloat16) or name.endswith((".scale",))
        out[name] = a if keep else a.astype(dtype)
    return out


def size(model):
    """Bytes of each part's parameters."""
    return {name: sum(a.nbytes for _, a in tree_flatten(model[name].parameters())) for name in PARTS if name in model}
