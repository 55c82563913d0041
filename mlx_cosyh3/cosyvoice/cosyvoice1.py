"""CosyVoice 1: transformer speech LM -> U-Net flow matching -> HiFT, all of which look both ways; 22.05 kHz.

Speech tokens come 50 a second, or 25. The language model is told the speaker, but for instruct mode, which speaks with
the speaker embedding of one of the model's voices. Streamed, flow and vocoder are faded window by window.
"""

from functools import partial

import mlx.core as mx

from mlx_cosyh3.cosyvoice import flow_regulated, transformer_lm
from mlx_cosyh3.cosyvoice.crossfade import CentredVocoding, FadedFlow
from mlx_cosyh3.cosyvoice.flow_regulated import RegulatedFlow, RegulatedFlowConfig
from mlx_cosyh3.cosyvoice.hift_centred import CentredHiFT
from mlx_cosyh3.cosyvoice.hift_decoder import HiFTConfig
from mlx_cosyh3.cosyvoice.model import FRONT_ENDS, CosyVoice, cast  # noqa: F401 - cast: for `load`
from mlx_cosyh3.cosyvoice.model import build as build_model
from mlx_cosyh3.cosyvoice.transformer_lm import TransformerLM, TransformerLMConfig
from mlx_cosyh3.cosyvoice.whisper_tokenizer import WhisperTokenizer
from mlx_cosyh3.errors import CosyH3Error

PARTS = {
    "llm": (TransformerLM, TransformerLMConfig),
    "flow": (RegulatedFlow, RegulatedFlowConfig),
    "hift": (CentredHiFT, HiFTConfig),
} | FRONT_ENDS
QUANTIZES = {"llm": transformer_lm.quantizes, "flow": flow_regulated.quantizes}
HOP = 2  # s of speech in a window of the stream
COMPAT_RATE = 24000  # Hz: what upstream resamples a recording to before its mel, whose settings are for 22.05 kHz


class CosyVoice1(CentredVocoding, CosyVoice):
    version, parts, quantizes, overlap = 1, PARTS, QUANTIZES, 20
    causal = text_in_pieces = False

    @property
    def chunk_tokens(self):
        return HOP * self.token_rate, HOP * self.token_rate

    # From a recording

    def speech_features(self, samples, rate, compat=False):
        """(speech tokens int32 [P], mel float32 [M, 80]): M follows from the recording, no whole number a token."""
        return self.speech_tokens(samples, rate), self.mel_frames(samples, rate, COMPAT_RATE if compat else None)

    # From text to speech tokens

    def read_tokenizer(self, folder):
        told = self.config["text_tokenizer"]
        tokenizer = WhisperTokenizer.from_dir(folder, told["kind"], told.get("languages"))
        tokenizer.check(self.config["llm"]["text_token_size"])
        return tokenizer

    @property
    def tags(self):
        return self.tokenizer.tags

    def check_mode(self, mode, speaker, named):
        if mode == "instruct" and speaker.has_prompt and not named:
            known = ", ".join(self.voices) or "none"
            raise CosyH3Error(
                f"instruct in CosyVoice 1 speaks with one of the model's voices (it has: {known}), not with the "
                f"recording of {speaker.name!r}: give the name of one, or leave instruct out"
            )

    def speak(self, segment, mode, speaker, options, key):
        embedding = None if mode == "instruct" else mx.array(speaker.embedding)[None]
        return self.llm.generate(
            segment.text_ids, segment.prompt_ids, segment.prompt_speech, options, key, speaker=embedding
        )

    # From speech tokens to audio

    def heard(self, speaker, mode):
        return super().heard(speaker, "sft" if mode == "instruct" else mode)

    def mel(self, tokens, prompt, o, key, on_step=None):
        return self.flow(mx.array([tokens]), *prompt, key=key, steps=o.steps, on_step=on_step)[0]

    def mel_stream(self, prompt, o, key):
        return FadedFlow(self.flow, prompt, o.steps, key, o.compat)

    def hops(self, prompt, o):
        chunk = o.chunk_tokens
        yield chunk + FadedFlow.look_ahead
        while True:
            chunk = min(2 * chunk, o.max_chunk_tokens)
            yield chunk


build = partial(build_model, CosyVoice1)
