"""CosyVoice 2's flow: speech tokens and a speaker -> mel spectrogram, by flow matching with a causal U-Net.

After upstream's cosyvoice/flow/flow.py (CausalMaskedDiffWithXvec) and transformer/upsample_encoder.py. Tokens (25 a
second) look three tokens ahead, go through transformer layers with relative positions, become two mel frames each, and
go through more such layers. A voice's own tokens and mel go in front, so that the speech goes on from them.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlx_cosyh3.cosyvoice import conformer, unet
from mlx_cosyh3.cosyvoice.causal_flow import MEL, CausalFlow, LookAhead, both, length_mask
from mlx_cosyh3.cosyvoice.conformer import EncoderConfig, RelativeEncoder, chunk_mask
from mlx_cosyh3.cosyvoice.conv import Conv1d
from mlx_cosyh3.cosyvoice.unet import UNet, UNetConfig
from mlx_cosyh3.errors import CheckpointError, nearest

RATIO = 2  # mel frames a token
KERNEL = 2 * RATIO + 1  # of the convolution after the upsampling
FRAME_LAYERS = 4  # of the encoder, after the upsampling


@dataclass
class UpsampledFlowConfig:
    """Numbers of the yaml's `flow`, and of what is nested in it."""

    vocab_size: int  # speech tokens
    input_size: int  # width of their embedding
    encoder: EncoderConfig
    unet: UNetConfig
    chunk: int = 25  # tokens of a chunk of the streaming mask
    spk_embed_dim: int = 192
    look_ahead: int = 3  # tokens
    guidance: float = 0.7

    @classmethod
    def from_dict(cls, d):
        """From the layout of upstream's constructor: `encoder`, `decoder` (the U-Net), `cfm` are dicts of their own."""
        for name in ("vocab_size", "input_size", "encoder", "decoder"):
            if name not in d:
                raise CheckpointError(f"the flow's config lacks {name}: convert the model again")
        for name, only in (("output_size", MEL), ("token_mel_ratio", RATIO)):
            if d.get(name, only) != only:
                raise CheckpointError(f"the flow's config has {name} = {d[name]}; only {only} is supported")
        return cls(
            d["vocab_size"],
            d["input_size"],
            EncoderConfig.from_dict(d["encoder"], "flow.encoder", input_layer="linear", input_size=d["input_size"]),
            UNetConfig.from_dict(d["decoder"], causal=True),
            d["encoder"].get("static_chunk_size", 25),
            d.get("spk_embed_dim", 192),
            d.get("pre_lookahead_len", 3),
            d.get("cfm", {}).get("inference_cfg_rate", 0.7),
        )


def quantizes(path):
    """Whether `-q` takes the linear layer at `path`: attention and feed-forward of the encoder and of the U-Net."""
    return conformer.quantizes(path) or unet.quantizes(path)


class UpsamplingEncoder(nn.Module):
    """Layers over tokens, then over their frames. chunk: tokens of a chunk of the streaming mask."""

    def __init__(self, config, look_ahead, chunk):
        super().__init__()
        dims, heads, hidden = config.output_size, config.attention_heads, config.linear_units
        self.tokens = RelativeEncoder.from_config(config, norm=False)
        self.look_ahead = LookAhead(dims, dims, look_ahead)
        self.upsample = Conv1d(dims, dims, KERNEL)
        self.frames = RelativeEncoder(dims, dims, heads, hidden, FRAME_LAYERS)
        self._chunk = chunk

    def __call__(self, x, ahead, streaming=False, state=None, lengths=None):
        """x [B, T, C] tokens, `ahead` [B, n <= look-ahead, C] those that follow (zeros beyond) -> [B, 2 T, D].

        streaming   tokens and frames see their chunk and what is before it, else all
        state       EncoderState of the tokens before x; moves on
        lengths     tokens of each row, where they differ, with neither `ahead` nor `state`: none sees beyond its row"""
        state = self.make_state() if state is None else state
        T, start = x.shape[1], state.tokens[0].offset
        masks = [chunk_mask(n * T, n * self._chunk, n * start) if streaming else None for n in (1, RATIO)]
        h = self.tokens.embed(mx.concatenate([x, ahead], axis=1))
        if lengths is not None:
            h = h * (mx.arange(T) < mx.array(lengths)[:, None])[..., None]  # for the look-ahead
            masks = [both(m, length_mask([n * L for L in lengths], n * T)) for n, m in zip((1, RATIO), masks)]
        h, state.hidden = self.look_ahead(h[:, :T], h[:, T:], state.hidden)
        h = self.tokens.layers_only(h, masks[0], state.tokens)
        h = mx.repeat(h, RATIO, axis=1)
        before = state.context
        if before is None:
            before = mx.zeros((h.shape[0], KERNEL - 1, h.shape[2]), dtype=h.dtype)
        h = mx.concatenate([before, h], axis=1)
        state.context = h[:, h.shape[1] - (KERNEL - 1) :]
        return self.frames(self.upsample(h), masks[1], state.frames)

    def make_state(self):
        return EncoderState(self.tokens.make_cache(), self.frames.make_cache())


class EncoderState:
    """What the tokens so far leave behind in the encoder: 57 kB each at full size, where the U-Net keeps 9 MB."""

    def __init__(self, tokens, frames):
        self.tokens, self.frames = tokens, frames  # a cache for each layer
        self.hidden = None  # of the look-ahead layer
        self.context = None  # the last inputs of the convolution [1, 4, C]

    def arrays(self):
        caches = [a for c in self.tokens + self.frames for a in (c.keys, c.values, c.table)]
        return caches + [self.hidden, self.context]


class UpsampledFlow(CausalFlow):
    def __init__(self, config):
        super().__init__(config, config.input_size)
        self.encoder = UpsamplingEncoder(config.encoder, config.look_ahead, config.chunk)
        self.encoder_proj = nn.Linear(config.encoder.output_size, MEL)
        self.unet = UNet(config.unet)
        self.chunk, self.chunk_frames = config.chunk, config.unet.static_chunk_size

    @property
    def network(self):
        return self.unet

    def make_state(self):
        return self.unet.make_state()

    @property
    def step_bytes(self):
        """Of keys and values that a frame leaves in all layers, with the conditions and without."""
        return 2 * self.unet.bytes_per_frame

    def encode(self, x, ahead, streaming, state=None, lengths=None):
        """mu float32 [B, frames, 80] of embedded tokens x [B, T, C]; the arguments are those of UpsamplingEncoder."""
        dtype = self.encoder_proj.weight.dtype
        h = self.encoder(x.astype(dtype), ahead.astype(dtype), streaming, state, lengths)
        return self.encoder_proj(h).astype(mx.float32)

    def make_encoder_state(self):
        return self.encoder.make_state()


SAME = ("input_embedding", "spk_embed_affine_layer", "encoder_proj")
RENAMED = {
    **{f"encoder.pre_lookahead_layer.{n}": f"encoder.look_ahead.{n}" for n in ("conv1", "conv2")},
    "encoder.up_layer.conv": "encoder.upsample",
}
ENCODER, ESTIMATOR = "encoder.", "decoder.estimator."


def sanitize(weights):
    """Upstream's flow.pt ({key: numpy array}) -> this module's names and layouts; what is converted stays as it is."""
    if any(key.startswith("unet.") for key in weights):
        return dict(weights)
    out = {}
    for key, a in weights.items():
        name, _, kind = key.rpartition(".")
        ours = _renamed(key)
        if ours is None or (kind not in ("weight", "bias") and not key.startswith(ENCODER)):
            known = [*SAME, *RENAMED, *(ESTIMATOR + n for n in unet.NAMES), *(ENCODER + n for n in conformer.NAMES)]
            raise CheckpointError(f"the flow's weights have an unknown tensor {key!r}{nearest(name, known)}")
        out[ours] = unet.layout(name.removeprefix(ESTIMATOR), a)
    return out


def _renamed(key):
    """Our key for upstream's, or None."""
    name, _, kind = key.rpartition(".")
    if name in SAME:
        return key
    if name in RENAMED:
        return f"{RENAMED[name]}.{kind}"
    if key.startswith(ESTIMATOR):
        ours = unet.renamed(name.removeprefix(ESTIMATOR))
        return ours and f"unet.{ours}.{kind}"
    if not key.startswith(ENCODER):
        return None
    rest = key.removeprefix(ENCODER)
    above = rest.startswith(("up_embed.", "up_encoders."))  # after the upsampling, as is after_norm
    ours = conformer.renamed(rest.removeprefix("up_") if above else rest)
    return ours and f"encoder.{'frames' if above or rest.startswith('after_norm.') else 'tokens'}.{ours}"
