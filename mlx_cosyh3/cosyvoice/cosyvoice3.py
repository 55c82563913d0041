"""CosyVoice 3: Qwen2 speech LM -> DiT flow matching -> causal HiFT. What is offline with the streaming mask is equal
to what is streamed. Long silences among the speech tokens are cut short, as upstream does."""

from functools import partial

from mlx_cosyh3.cosyvoice import dit, llm
from mlx_cosyh3.cosyvoice.flow import Flow, FlowConfig
from mlx_cosyh3.cosyvoice.hift import HiFT, HiFTConfig
from mlx_cosyh3.cosyvoice.llm import SpeechLM, SpeechLMConfig
from mlx_cosyh3.cosyvoice.model import FRONT_ENDS, CosyVoice, cast  # noqa: F401 - cast: for `load`
from mlx_cosyh3.cosyvoice.model import build as build_model

PARTS = {"llm": (SpeechLM, SpeechLMConfig), "flow": (Flow, FlowConfig), "hift": (HiFT, HiFTConfig)} | FRONT_ENDS
QUANTIZES = {"llm": llm.quantizes, "flow": dit.quantizes}
# Pauses and breaths among the speech tokens: of a run of these, all but the first MAX_SILENT are dropped.
SILENT = frozenset((1, 2, 28, 29, 55, 248, 494, 2241, 2242, 2322, 2323))
MAX_SILENT = 5


class CosyVoice3(CosyVoice):
    version, parts, quantizes = 3, PARTS, QUANTIZES

    @staticmethod
    def is_silent(token):
        return token in SILENT

    def trim_silence(self, tokens):
        run = 0
        for token in tokens:
            run = run + 1 if token in SILENT else 0
            if run <= MAX_SILENT:
                yield token

    def wave(self, mel, key):
        return self.hift(mel)

    def wave_stream(self, o, key):
        return self.hift.stream()


build = partial(build_model, CosyVoice3)
