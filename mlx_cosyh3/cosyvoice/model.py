"""What the CosyVoice versions share: parts, voices, front ends, and the two ways from speech tokens to audio.

A version (`cosyvoice1.py`, `cosyvoice2.py`, `cosyvoice3.py`) is a subclass that names its parts and says where it
differs. Facts are upstream's (FunAudioLLM/CosyVoice, cosyvoice/cli/{cosyvoice,frontend,model}.py); how text becomes
speech with a model is in `speech.py` and `utterance.py`. A folder may lack the front ends (speaker encoder, speech
tokenizer): then it speaks with the voices it holds, and makes no new ones.
"""

import contextlib
import unicodedata
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path

from mlx_cosyh3.cosyvoice import abilities, audio, features, voice
from mlx_cosyh3.cosyvoice.campplus import CAMPPlus, CAMPPlusConfig
from mlx_cosyh3.cosyvoice.s3tokenizer import S3Tokenizer, S3TokenizerConfig
from mlx_cosyh3.cosyvoice.special_tokens import TAGS
from mlx_cosyh3.cosyvoice.speech import SpeechGeneration
from mlx_cosyh3.cosyvoice.text_tokenizer import SpeechTextTokenizer
from mlx_cosyh3.errors import CheckpointError, CosyH3Error, nearest
from mlx_cosyh3.int8 import Int8Linear

FRONT_ENDS = {"campplus": (CAMPPlus, CAMPPlusConfig), "speech_tokenizer": (S3Tokenizer, S3TokenizerConfig)}
NO_PROMPT = {"prompt_tokens": np.zeros(0, np.int32), "prompt_mel": np.zeros((0, 80), np.float32)}


class CosyVoice(nn.Module, SpeechGeneration):
    """A model: `generate`, `stream_generate`, `convert_voice` come from SpeechGeneration.

    voices   {name: Voice} that the folder holds"""

    # Of a version:
    version = None
    parts = {}  # name -> (class, class of its config)
    quantizes = {}  # part -> predicate on the paths of its linear layers
    causal = True  # whether the flow has a streaming mask, with which offline equals streamed
    text_in_pieces = True  # whether it can begin to speak before the text has ended
    chunk_tokens = (25, 100)  # speech tokens of the first and of the longest chunk, unless told otherwise

    def __init__(self, config):
        super().__init__()
        for name, (part, part_config) in self.parts.items():
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

    @property
    def abilities(self):
        """One line: what can be asked of it."""
        lacking = [name for name in FRONT_ENDS if name not in self]
        return abilities.line(abilities.modes(self.version, self.text_in_pieces, lacking, self.voices))

    def need(self, *parts):
        """Raise CosyH3Error unless the model has these front ends."""
        for name in parts:
            if name not in self:
                file = "campplus.onnx" if name == "campplus" else f"speech_tokenizer_v{self.version}.onnx"
                what = f"{'speaker encoder' if name == 'campplus' else 'speech tokenizer'} ({file})"
                held = ", ".join(self._voices)
                has = f"the voices it holds are {held}" if held else "it holds no voices either"
                raise CosyH3Error(
                    f"this model folder has no {what}, so it cannot take a recording; {has}; `convert` a full model for "
                    "that"
                )

    # From a recording

    def mel_settings(self):
        """Those of `features.mel_spectrogram`."""
        mel = self._config["mel"]
        return {
            "rate": self.sample_rate, "n_fft": mel["n_fft"], "hop": mel["hop_size"], "win": mel["win_size"],
            "fmin": mel["fmin"], "fmax": mel["fmax"], "bins": mel["num_mels"],
        }  # fmt: skip

    def speech_features(self, samples, rate, compat=False):
        """(speech tokens int32 [P], mel float32 [2 P, 80]) of a recording: mono float samples, Hz."""
        tokens, mel = self.speech_tokens(samples, rate), self.mel_frames(samples, rate)
        n = min(len(mel) // self._config["token_mel_ratio"], len(tokens))
        return tokens[:n], mel[: self._config["token_mel_ratio"] * n]

    def mel_frames(self, samples, rate, sample_rate=None):
        """Mel float32 [M, 80] of a recording that is first resampled to `sample_rate` (None: the model's)."""
        samples = audio.resample(samples, rate, sample_rate or self.sample_rate)
        return features.mel_spectrogram(samples, **self.mel_settings())

    def speech_tokens(self, samples, rate):
        """Speech tokens int32 [P] of a recording. Raises CheckpointError for those that the model does not know."""
        tokens = np.asarray(self.speech_tokenizer.tokenize(audio.resample(samples, rate, 16000)), np.int32)
        if tokens.size and tokens.max() >= self.codebook:
            raise CheckpointError(
                f"the speech tokenizer gave token {tokens.max()}, and the model has {self.codebook}: they do not "
                f"belong together; convert it again with the speech_tokenizer_v{self.version}.onnx of its own folder"
            )
        return tokens

    def speaker(self, samples, rate):
        """Speaker embedding float32 [192] of a recording."""
        fbank = features.kaldi_fbank(audio.resample(samples, rate, 16000))
        return np.array(self.campplus(mx.array(fbank - fbank.mean(axis=0))[None])[0], dtype=np.float32)

    def find_voice(self, name):
        """The Voice of that name, however it was typed: see `spellings`. Raises CosyH3Error."""
        if name not in self._voices:
            for known, v in self._voices.items():
                if spellings(known) & spellings(name):
                    return v
            known = ", ".join(self._voices) or "none"
            near = nearest(name, self._voices)
            raise CosyH3Error(f"this model has no voice {name!r} (it has: {known}){near}; clone one from a recording")
        return self._voices[name]

    # From text to speech tokens

    def read_tokenizer(self, folder):
        """The text tokenizer in the model's folder, checked against the language model."""
        tokenizer = SpeechTextTokenizer.from_dir(folder, self.version)
        tokenizer.check(self._config["llm"]["qwen2"]["vocab_size"])
        return tokenizer

    @property
    def tags(self):
        """What may stand in a text in brackets."""
        return TAGS

    def check_mode(self, mode, speaker, named):
        """Raise CosyH3Error if this version cannot speak so. `named`: the Voice `speaker` was given by its name."""

    def speak(self, segment, mode, speaker, options, key):
        """The language model on a Segment -> SpeechTokens. options: LMOptions; `speaker`: the Voice."""
        return self.llm.generate(segment.text_ids, segment.prompt_ids, segment.prompt_speech, options, key)

    def trim_silence(self, tokens):
        """`tokens` as the flow is to get them."""
        return tokens

    @staticmethod
    def is_silent(token):
        """Whether a speech token is known to be a pause or a breath."""
        return False

    # From speech tokens to audio: offline mel, then wave; streamed the two streams. o: SpeechOptions

    def heard(self, speaker, mode):
        """The Voice `speaker` as the flow gets it: without its recording in a mode that goes by the embedding alone."""
        return replace(speaker, **NO_PROMPT) if mode == "sft" else speaker

    def prompt(self, speaker, mode):
        """What the flow gets of a Voice: (tokens [1, P], mel [1, M, 80], embedding [1, 192])."""
        return self.heard(speaker, mode).arrays()

    def mel(self, tokens, prompt, o, key, on_step=None):
        """All speech tokens (a list) -> mel [1, n, 80]."""
        return self.flow(mx.array([tokens]), *prompt, streaming=o.causal, steps=o.steps, on_step=on_step)

    def wave(self, mel, key):
        """mel [1, n, 80] -> audio [1, N]."""
        raise NotImplementedError

    def mel_stream(self, prompt, o, key):
        """-> object whose add(tokens, last, on_step) gives the mel that is known now."""
        stream = self.flow.stream(*prompt, steps=o.steps)
        return LastInFull(self.flow, stream, prompt, o.steps) if o.compat else stream

    def wave_stream(self, o, key):
        """-> object whose add(mel, last) gives the audio that is known now."""
        raise NotImplementedError

    def hops(self, prompt, o):
        """How many new speech tokens each chunk of a stream waits for: first, longest = o.chunk_tokens, ..."""
        # Chunks end where those of the attention mask do, so that none is computed twice. Frames look tokens ahead.
        size, chunk = self._config["chunk_size"], o.chunk_tokens
        yield self.flow.look_ahead + chunk + (-(prompt[0].shape[1] + chunk)) % size
        while True:
            chunk = min(2 * chunk, o.max_chunk_tokens)
            yield -(-chunk // size) * size

    # Loading

    def finish(self, folder):
        """Take the tokenizer and the voices from the model's folder, and compute all that is still lazy."""
        folder = Path(folder)
        self._tokenizer = self.read_tokenizer(folder)
        for file in sorted((folder / "voices").glob("*.safetensors")):
            v = voice.Voice.load(file)
            self._voices[v.name] = v
        if hasattr(self.llm, "join"):
            self.llm.join()
        mx.eval(self.parameters())


class LastInFull:
    """A flow's stream whose last chunk is computed as upstream does: with full attention over everything so far."""

    def __init__(self, flow, stream, prompt, steps):
        self._flow, self._stream, self._prompt, self._steps = flow, stream, prompt, steps
        self._said = []

    def add(self, tokens, last=False, on_step=None):
        self._said += tokens
        if not last:
            return self._stream.add(tokens, on_step=on_step)
        mel = self._flow(mx.array([self._said]), *self._prompt, steps=self._steps, on_step=on_step)
        return mel[:, self._stream.frames :]


def spellings(name):
    """What the name of a voice may be typed as.

    With composed letters or not; in a terminal that is not set to UTF-8, where Python has it as single bytes; and where
    other letters cannot be typed at all, as errors show it there: \\u4e2d."""
    with contextlib.suppress(UnicodeError):
        name = name.encode("utf-8", "surrogateescape").decode("utf-8")
    composed = unicodedata.normalize("NFC", name)
    return {composed, composed.encode("ascii", "backslashreplace").decode()}


def build(cls, config):
    """The model of class `cls` that a config.json (a dict) describes: quantised layers in place, without weights."""
    try:
        model = cls(config)
    except (KeyError, TypeError) as e:
        raise CheckpointError(f"config.json lacks a value ({type(e).__name__}: {e}): convert the model again") from e
    for part, how in (config.get("quantization") or {}).items():
        if part in cls.quantizes:
            quantize(model[part], how, cls.quantizes[part])
    return model


def quantize(part, how, chosen):
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
    parts = [name for name in model.parts if name in model]
    return {name: sum(a.nbytes for _, a in tree_flatten(model[name].parameters())) for name in parts}
