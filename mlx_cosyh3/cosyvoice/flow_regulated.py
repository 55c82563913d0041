"""CosyVoice 1's flow: speech tokens and a speaker -> mel spectrogram, by flow matching with a U-Net.

After upstream's cosyvoice/flow/{flow,length_regulator,flow_matching}.py (MaskedDiffWithXvec, InterpolateRegulator,
ConditionalCFM). 50 or 25 tokens a second become 86.13 mel frames a second: a ratio that is not whole, so that a length
regulator stretches what the encoder makes of the tokens. A voice's own tokens and mel go in front, so that the speech
goes on from them.

Everything sees everything, so a chunk of a stream cannot go on from what was computed before it. Instead chunks
overlap: `MelCache` keeps the noise and the first guess of the frames that the next chunk shares, which makes them alike
there.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from mlx_cosyh3.cosyvoice import cfm, conformer, unet
from mlx_cosyh3.cosyvoice.conformer import EncoderConfig, RelativeEncoder
from mlx_cosyh3.cosyvoice.conv import Conv1d
from mlx_cosyh3.cosyvoice.dit import mish
from mlx_cosyh3.cosyvoice.interpolate import interpolate
from mlx_cosyh3.cosyvoice.token_flow import MEL, TokenFlow
from mlx_cosyh3.cosyvoice.unet import UNet, UNetConfig
from mlx_cosyh3.errors import CheckpointError, CosyH3Error, nearest

SAMPLE_RATE, HOP = 22050, 256  # Hz and samples of a mel frame
OVERLAP = 20  # tokens at either end that are stretched on their own: they are what chunks of a stream share
KEPT = 34  # frames at the end that a cache keeps: those of the overlap at 50 tokens a second, but so at any rate


@dataclass
class RegulatedFlowConfig:
    """Numbers of the yaml's `flow`, and of what is nested in it."""

    vocab_size: int  # speech tokens
    input_size: int  # width of their embedding
    encoder: EncoderConfig
    unet: UNetConfig
    input_frame_rate: int = 50  # tokens a second
    regulator_layers: int = 4
    spk_embed_dim: int = 192
    guidance: float = 0.7

    @classmethod
    def from_dict(cls, d):
        """From the layout of upstream's constructor: `encoder`, `decoder` (the U-Net), `length_regulator` and `cfm` are
        dicts of their own."""
        for name in ("vocab_size", "input_size", "encoder", "decoder"):
            if name not in d:
                raise CheckpointError(f"the flow's config lacks {name}: convert the model again")
        regulator = d.get("length_regulator", {})
        sizes = {"output_size": d.get("output_size", MEL), "length_regulator.channels": regulator.get("channels", MEL)}
        for name, bins in sizes.items():
            if bins != MEL:
                raise CheckpointError(f"the flow's config has {name} = {bins}; only {MEL} mel bins are supported")
        return cls(
            d["vocab_size"],
            d["input_size"],
            EncoderConfig.from_dict(d["encoder"], "flow.encoder", input_layer="linear", input_size=d["input_size"]),
            UNetConfig.from_dict(d["decoder"], causal=False),
            d.get("input_frame_rate", 50),
            len(regulator.get("sampling_ratios", [1, 1, 1, 1])),
            d.get("spk_embed_dim", 192),
            d.get("cfm", {}).get("inference_cfg_rate", 0.7),
        )


def quantizes(path):
    """Whether `-q` takes the linear layer at `path`: attention and feed-forward of the encoder and of the U-Net."""
    return conformer.quantizes(path) or unet.quantizes(path)


@dataclass
class MelCache:
    """What a chunk of a stream shares with the one before it: the prompt's frames, then the last ones of that chunk."""

    noise: mx.array  # float32 [1, L, 80]
    mu: mx.array  # float32 [1, L, 80]

    @classmethod
    def of(cls, noise, mu, prompt_frames):
        """From all frames of a chunk, [1, T, 80] each."""
        ends = lambda a: mx.concatenate([a[:, :prompt_frames], a[:, max(0, a.shape[1] - KEPT) :]], axis=1)  # noqa: E731
        cache = cls(ends(noise), ends(mu))
        mx.eval(cache.noise, cache.mu)
        return cache

    def overwrite(self, noise, mu):
        """(noise, mu) with these frames in place of the first ones."""
        over = lambda kept, a: mx.concatenate([kept, a[:, kept.shape[1] :]], axis=1)[:, : a.shape[1]]  # noqa: E731
        return over(self.noise, noise), over(self.mu, mu)


class LengthRegulator(nn.Module):
    """Token rate -> frame rate: linear interpolation, then convolutions. The norms are over all frames and channels."""

    def __init__(self, dims, layers):
        super().__init__()
        self.convs = [Conv1d(dims, dims, 3, padding=(1, 1)) for _ in range(layers)]
        self.norms = [nn.GroupNorm(1, dims, pytorch_compatible=True) for _ in range(layers)]
        self.out = nn.Linear(dims, dims)

    def __call__(self, prompt, x, prompt_frames, frames, overlap_frames):
        """prompt [1, P, C], x [1, T, C] -> [1, prompt_frames + frames, C]; each of the two becomes so many frames.

        overlap_frames   of OVERLAP tokens: as many at either end, if there are enough of them"""
        parts = [interpolate(prompt, prompt_frames)]
        if x.shape[1] > 2 * OVERLAP:
            parts.append(interpolate(x[:, :OVERLAP], overlap_frames))
            parts.append(interpolate(x[:, OVERLAP:-OVERLAP], frames - 2 * overlap_frames))
            parts.append(interpolate(x[:, -OVERLAP:], overlap_frames))
        else:
            parts.append(interpolate(x, frames))
        h = mx.concatenate(parts, axis=1).astype(self.out.weight.dtype)
        for conv, norm in zip(self.convs, self.norms):
            h = mish(norm(conv(h)))
        return self.out(h)


class RegulatedFlow(TokenFlow):
    def __init__(self, config):
        super().__init__(config, config.input_size)
        encoder = config.encoder
        heads, hidden, blocks = encoder.attention_heads, encoder.linear_units, encoder.num_blocks
        self.encoder = RelativeEncoder(encoder.input_size, encoder.output_size, heads, hidden, blocks)
        self.encoder_proj = nn.Linear(encoder.output_size, MEL)
        self.length_regulator = LengthRegulator(MEL, config.regulator_layers)
        self.unet = UNet(config.unet)
        self._rate = config.input_frame_rate

    def frames(self, tokens):
        """How many mel frames so many tokens become. In upstream's order, which its rounding depends on."""
        return int(tokens / self._rate * SAMPLE_RATE / HOP)

    def __call__(
        self, tokens, prompt_tokens, prompt_mel, embedding, *, noise=None, key=None, steps=10, cache=None, on_step=None
    ):
        """(mel frames float32 [1, n, 80] for `tokens`, MelCache for the next chunk), as upstream's `inference`.

        tokens, prompt_tokens   int [1, T], [1, P];  prompt_mel [1, M, 80];  embedding [1, 192];  n = `frames(T)`
        noise     float32 [1, M + n, 80] to start from, normally distributed; or `key`, of mx.random, to draw it with
        steps     of the flow, at least 1
        cache     MelCache of the chunk before, whose last frames are this one's first
        on_step   called with the number of steps done after each
        Raises CosyH3Error for tokens out of range, a voice with tokens or mel alone, 0 steps, or values that are not
        finite."""
        modulations = self.unet.modulations(cfm.times(steps)[0])
        M, n = prompt_mel.shape[1], self.frames(tokens.shape[1])
        if (prompt_tokens.shape[1] == 0) != (M == 0):
            raise CosyH3Error(
                f"the voice has {prompt_tokens.shape[1]} speech tokens and {M} mel frames: it must have both or neither"
            )
        if (noise is None) == (key is None):
            raise TypeError("give either noise or key")
        if noise is None:
            noise = mx.random.normal((1, M + n, MEL), key=key)
        elif noise.shape != (1, M + n, MEL):
            raise CosyH3Error(f"noise has the shape {noise.shape}; {tokens.shape[1]} tokens take {(1, M + n, MEL)}")
        if n == 0:
            return mx.zeros((1, 0, MEL)), cache
        mu = self.encode(tokens, prompt_tokens, M)
        if cache is not None:
            noise, mu = cache.overwrite(noise, mu)
        mel = self.solve(noise, mu, prompt_mel, self.speaker(embedding), modulations, on_step)
        return mel[:, M:], MelCache.of(noise, mu, M)

    def encode(self, tokens, prompt_tokens, prompt_frames):
        """mu, the first guess of all frames: float32 [1, prompt_frames + n, 80]."""
        P = prompt_tokens.shape[1]
        x = self.embed(mx.concatenate([prompt_tokens, tokens], axis=1)).astype(self.encoder_proj.weight.dtype)
        h = self.encoder_proj(self.encoder(x)).astype(mx.float32)  # [1, P + T, 80]
        overlap = self.frames(OVERLAP)
        mu = self.length_regulator(h[:, :P], h[:, P:], prompt_frames, self.frames(tokens.shape[1]), overlap)
        return mu.astype(mx.float32)

    def solve(self, noise, mu, prompt_mel, speaker, modulations, on_step=None):
        """Mel float32 [1, T, 80] of all frames, the prompt's included."""
        T, M = mu.shape[1], prompt_mel.shape[1]
        cond = mx.pad(prompt_mel.astype(mx.float32), [(0, 0), (0, T - M), (0, 0)])
        nothing = mx.zeros_like(mu)
        mu, cond = mx.concatenate([mu, nothing]), mx.concatenate([cond, nothing])  # row 1: without the conditions
        speaker = mx.concatenate([speaker, mx.zeros_like(speaker)])
        velocity = lambda x, k: self.unet(x, cond, mu, speaker, modulations[k])  # noqa: E731
        return cfm.euler(noise, len(modulations), velocity, self._guidance, on_step)


SAME = ("input_embedding", "spk_embed_affine_layer", "encoder_proj")
ENCODER, ESTIMATOR, REGULATOR = "encoder.", "decoder.estimator.", "length_regulator.model."


def sanitize(weights):
    """Upstream's flow.pt ({key: numpy array}) as our names and layouts; what is converted already passes unchanged."""
    if any(key.startswith("unet.") for key in weights):
        return dict(weights)
    layers = sum(key.startswith(REGULATOR) and a.ndim == 3 for key, a in weights.items()) - 1
    out = {}
    for key, a in weights.items():
        name, _, kind = key.rpartition(".")
        ours = _renamed(key, layers)
        if ours is None or (kind not in ("weight", "bias") and not key.startswith(ENCODER)):
            known = [*SAME, *(ESTIMATOR + n for n in unet.NAMES), *(ENCODER + n for n in conformer.NAMES)]
            raise CheckpointError(f"the flow's weights have an unknown tensor {key!r}{nearest(name, known)}")
        out[ours] = unet.layout(name.removeprefix(ESTIMATOR), a)
    return out


def _renamed(key, layers):
    """Our key for upstream's, or None. layers: of the regulator; each takes three places in upstream's list."""
    name, _, kind = key.rpartition(".")
    if name in SAME:
        return key
    if key.startswith(ENCODER):
        ours = conformer.renamed(key.removeprefix(ENCODER))
        return ours and f"encoder.{ours}"
    if key.startswith(ESTIMATOR):
        ours = unet.renamed(name.removeprefix(ESTIMATOR))
        return ours and f"unet.{ours}.{kind}"
    place = name.removeprefix(REGULATOR)
    if not key.startswith(REGULATOR) or not place.isdigit() or int(place) > 3 * layers or int(place) % 3 == 2:
        return None
    layer, part = divmod(int(place), 3)
    ours = "out" if layer == layers else f"{('convs', 'norms')[part]}.{layer}"
    return f"length_regulator.{ours}.{kind}"
