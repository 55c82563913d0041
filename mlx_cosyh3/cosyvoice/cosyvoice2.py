"""CosyVoice 2: Qwen2 speech LM -> causal U-Net flow matching -> HiFT that looks both ways.

Streamed, the flow is exact (equal to offline with the streaming mask), the vocoder is faded chunk by chunk.
"""

from functools import partial

from mlx_cosyh3.cosyvoice import flow_upsampled, llm
from mlx_cosyh3.cosyvoice.crossfade import CentredVocoding
from mlx_cosyh3.cosyvoice.flow_upsampled import UpsampledFlow, UpsampledFlowConfig
from mlx_cosyh3.cosyvoice.hift_centred import CentredHiFT
from mlx_cosyh3.cosyvoice.hift_decoder import HiFTConfig
from mlx_cosyh3.cosyvoice.llm import SpeechLM, SpeechLMConfig
from mlx_cosyh3.cosyvoice.model import FRONT_ENDS, CosyVoice, cast  # noqa: F401 - cast: for `load`
from mlx_cosyh3.cosyvoice.model import build as build_model

PARTS = {
    "llm": (SpeechLM, SpeechLMConfig),
    "flow": (UpsampledFlow, UpsampledFlowConfig),
    "hift": (CentredHiFT, HiFTConfig),
} | FRONT_ENDS
QUANTIZES = {"llm": llm.quantizes, "flow": flow_upsampled.quantizes}


class CosyVoice2(CentredVocoding, CosyVoice):
    version, parts, quantizes, overlap = 2, PARTS, QUANTIZES, 8


build = partial(build_model, CosyVoice2)
