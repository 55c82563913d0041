"""CosyVoice 3's flow: speech tokens and a speaker -> mel spectrogram, by flow matching with a DiT.

After upstream's cosyvoice/flow/flow.py (CausalMaskedDiffWithDiT). Each token is two mel frames (50 a second) and looks
three tokens ahead. A voice's own tokens and mel go in front, so that the speech goes on from them.
"""

from dataclasses import dataclass

import mlx.core as mx

from mlx_cosyh3.cosyvoice.causal_flow import MEL, CausalFlow, LookAhead
from mlx_cosyh3.cosyvoice.dit import DiT, DiTConfig, DiTState, quantizes  # noqa: F401 (part of this part's interface)
from mlx_cosyh3.errors import CheckpointError, nearest


@dataclass
class FlowConfig:
    """Numbers of the yaml's `flow`, and of what is nested in it."""

    vocab_size: int  # speech tokens
    dit: DiTConfig
    look_ahead_dims: int
    spk_embed_dim: int = 192
    look_ahead: int = 3  # tokens
    token_mel_ratio: int = 2  # mel frames a token
    guidance: float = 0.7

    @classmethod
    def from_dict(cls, d):
        """From the layout of upstream's constructor: `pre_lookahead_layer`, `dit` and `cfm` are dicts of their own."""
        for name in ("vocab_size", "dit", "pre_lookahead_layer"):
            if name not in d:
                raise CheckpointError(f"the flow's config lacks {name}: convert the model again")
        ahead = d["pre_lookahead_layer"]
        if d.get("output_size", MEL) != MEL or d.get("input_size", MEL) != MEL:
            sizes = f"{d.get('input_size')} -> {d.get('output_size')}"
            raise CheckpointError(f"the flow's config says {sizes} mel bins; only {MEL} are supported")
        return cls(
            d["vocab_size"],
            DiTConfig.from_dict(d["dit"]),
            ahead["channels"],
            d.get("spk_embed_dim", 192),
            ahead.get("pre_lookahead_len", 3),
            d.get("token_mel_ratio", 2),
            d.get("cfm", {}).get("inference_cfg_rate", 0.7),
        )


class Flow(CausalFlow):
    def __init__(self, config):
        super().__init__(config, MEL)
        self.pre_lookahead_layer = LookAhead(MEL, config.look_ahead_dims, config.look_ahead)
        self.dit = DiT(config.dit)
        self._ratio, self._config = config.token_mel_ratio, config.dit
        self.chunk_frames = config.dit.static_chunk_size

    @property
    def network(self):
        return self.dit

    @property
    def step_bytes(self):
        """Of keys and values that a frame leaves in all layers, with the conditions and without."""
        c = self._config
        return 2 * 2 * c.depth * c.heads * c.dim_head * self.dit.proj_in.weight.dtype.size

    def make_state(self):
        return DiTState(self._config.depth)

    def encode(self, x, ahead, streaming, state=None, lengths=None):
        """mu float32 [B, frames, 80] of embedded tokens x [B, T, C].

        ahead       [B, n <= look-ahead, C]: the tokens that follow (zeros beyond)
        streaming   whether tokens see no further than their chunk and those; here they never do
        state       of `make_encoder_state`, for the tokens before x; moves on
        lengths     tokens of each row, where they differ: x is zeros from there on; here that is all it takes"""
        x, hidden = self.pre_lookahead_layer(x, ahead, None if state is None else state.hidden)
        if state is not None:
            state.hidden = hidden
        return mx.repeat(x, self._ratio, axis=1)

    def make_encoder_state(self):
        return LookAheadState()


class LookAheadState:
    """The last hidden frames of the look-ahead layer."""

    def __init__(self):
        self.hidden = None

    def arrays(self):
        return [self.hidden]


RENAMED = {
    "time_embed.time_mlp.0": "time_in", "time_embed.time_mlp.2": "time_out", "input_embed.proj": "proj_in",
    "input_embed.conv_pos_embed.conv1.0": "conv_pos.0", "input_embed.conv_pos_embed.conv2.0": "conv_pos.1",
    "norm_out.linear": "modulation", "proj_out": "proj_out",
}  # fmt: skip
RENAMED_IN_BLOCK = {
    "attn_norm.linear": "modulation", "attn.to_q": "to_q", "attn.to_k": "to_k", "attn.to_v": "to_v",
    "attn.to_out.0": "to_out", "ff.ff.0.0": "ff_in", "ff.ff.2": "ff_out",
}  # fmt: skip
SAME = ("input_embedding", "spk_embed_affine_layer", "pre_lookahead_layer.conv1", "pre_lookahead_layer.conv2")
ESTIMATOR, BLOCKS = "decoder.estimator.", "transformer_blocks."
DROPPED = ESTIMATOR + "rotary_embed.inv_freq"  # made from the base


def sanitize(weights):
    """Upstream's flow.pt ({key: numpy array}) -> this module's names and layouts; what is converted stays as it is."""
    out = {}
    for key, a in weights.items():
        if key == DROPPED:
            continue
        name, _, kind = key.rpartition(".")
        ours, transpose = _name(name), False
        if ours is None and name.startswith("dit."):
            ours = name
        elif ours is not None:
            # Convolutions [out, in, K] -> [out, K, in]; those that have our names already are converted.
            transpose = kind == "weight" and a.ndim == 3 and not _converted(weights)
        if ours is None or kind not in ("weight", "bias", "scale", "scales", "biases"):
            known = [*SAME, *(ESTIMATOR + n for n in RENAMED)]
            raise CheckpointError(f"the flow's weights have an unknown tensor {key!r}{nearest(name, known)}")
        out[f"{ours}.{kind}"] = a.transpose(0, 2, 1) if transpose else a
    return out


def _converted(weights):
    return any(key.startswith("dit.") for key in weights)


def _name(name):
    if name in SAME:
        return name
    if not name.startswith(ESTIMATOR):
        return None
    name = name.removeprefix(ESTIMATOR)
    if name in RENAMED:
        return f"dit.{RENAMED[name]}"
    index, _, rest = name.removeprefix(BLOCKS).partition(".")
    if name.startswith(BLOCKS) and index.isdigit() and rest in RENAMED_IN_BLOCK:
        return f"dit.blocks.{index}.{RENAMED_IN_BLOCK[rest]}"
    return None
