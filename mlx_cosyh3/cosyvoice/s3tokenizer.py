"""S3, the speech tokenizer: a Whisper encoder cut after a few blocks, then each frame is one of a few thousand ids.

One class for the tokenizers of all CosyVoice versions (xingchensong/S3Tokenizer, s3tokenizer/model{,_v2}.py):

                strides   positions   memory branch   quantiser                         ids
    v1 50 Hz    1, 2      sinusoids   no              nearest of 4096 unit vectors      50 a second
    v1 25 Hz    2, 2      sinusoids   no              the same                          25
    v2, v3      2, 2      rotary      yes             8 numbers rounded to -1, 0, 1     25, 3^8 = 6561 of them

Frames are [B, T, C]. It sees 30 s at a time; longer audio goes through overlapping windows.
"""

import re
from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cosyh3.cosyvoice.conv import Conv1d
from mlx_cosyh3.cosyvoice.features import whisper_log_mel
from mlx_cosyh3.errors import CheckpointError, CosyH3Error, nearest

MEL_RATE = 100  # log-mel frames a second
WINDOW, STRIDE = 3000, 2600  # frames: of a window, and from one to the next
EDGE = (WINDOW - STRIDE) // 2  # frames at an inner edge of a window whose ids are the other window's
HEAD_DIM = 64  # Whisper's, at any width
BELOW_1 = 0.9990000128746033  # so that tanh never rounds past 1


@dataclass
class S3TokenizerConfig:
    n_mels: int = 128
    n_state: int = 1280
    n_head: int = 20
    n_layer: int = 12
    strides: tuple = (2, 2)  # of the two convolutions
    positions: int = 0  # rows of the position table; 0: rotary positions
    memory: int = 31  # taps of the memory branch; 0: none
    codebook: int = 0  # vectors to choose from; 0: the frame's numbers are rounded
    digits: int = 8  # numbers that are rounded
    attn_epsilon: float = 1e-5
    mlp_epsilon: float = 1e-5
    key_bias: bool = False

    @classmethod
    def from_dict(cls, d):
        missing = [f.name for f in fields(cls) if f.name not in d]
        if missing:
            raise CheckpointError(f"the speech tokenizer's config lacks {missing[0]!r}: convert the model again")
        return cls(**{f.name: d[f.name] for f in fields(cls)})

    @classmethod
    def from_weights(cls, weights, **known):
        """The sizes that the shapes of converted weights imply; `known`: what is known besides."""
        layers = {n.split(".")[1] for n in weights if n.startswith("blocks.")}
        rows = lambda name: weights[name].shape[0] if name in weights else 0  # noqa: E731
        try:
            state, _, mels = weights["conv1.weight"].shape
            memory = weights["blocks.0.attn.memory.weight"].shape[1] if "blocks.0.attn.memory.weight" in weights else 0
            if state % HEAD_DIM:
                raise CheckpointError(f"the speech tokenizer is {state} wide, which is no multiple of {HEAD_DIM}")
            if "codebook" not in weights and "project.weight" not in weights:
                raise CheckpointError("the speech tokenizer has no quantiser: neither a codebook nor a projection")
            tables = {"positions": rows("positions"), "codebook": rows("codebook"), "digits": rows("project.weight")}
        except (KeyError, ValueError, IndexError) as e:
            if isinstance(e, CheckpointError):
                raise
            raise CheckpointError(
                "the speech tokenizer lacks its first convolution, or has weights of the wrong shape: it is cut short, "
                "or no S3"
            ) from e
        sizes = {"n_mels": mels, "n_state": state, "n_head": state // HEAD_DIM, "n_layer": len(layers),
                 "memory": memory, "key_bias": "blocks.0.attn.key.bias" in weights}  # fmt: skip
        return cls(**sizes | tables | known)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        c, n = config, config.n_state
        self.query, self.key = nn.Linear(n, n), nn.Linear(n, n, bias=c.key_bias)
        self.value, self.out = nn.Linear(n, n), nn.Linear(n, n)
        if c.memory:
            half = (c.memory - 1) // 2
            self.memory = Conv1d(n, n, c.memory, groups=n, padding=(half, c.memory - 1 - half), bias=False)
        self._heads, self._rotary = c.n_head, not c.positions

    def __call__(self, x):  # [B, L, C]
        B, L, C = x.shape
        heads = lambda y: y.reshape(B, L, self._heads, -1).transpose(0, 2, 1, 3)  # noqa: E731 [B, H, L, D]
        v = self.value(x)
        q, k = heads(self.query(x)), heads(self.key(x))
        d = q.shape[-1]
        if self._rotary:
            q, k = (mx.fast.rope(y, d, traditional=False, base=10000.0, scale=1.0, offset=0) for y in (q, k))
        y = mx.fast.scaled_dot_product_attention(q, k, heads(v), scale=d**-0.5)
        y = self.out(y.transpose(0, 2, 1, 3).reshape(B, L, C))
        return y + (self.memory(v) + v) if "memory" in self else y


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        n = config.n_state
        self.attn_ln = nn.LayerNorm(n, config.attn_epsilon)
        self.attn = Attention(config)
        self.mlp_ln = nn.LayerNorm(n, config.mlp_epsilon)
        self.mlp1, self.mlp2 = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)

    def __call__(self, x):
        x = x + self.attn(self.attn_ln(x))
        return x + self.mlp2(_gelu(self.mlp1(self.mlp_ln(x))))


class S3Tokenizer(nn.Module):
    """The tokenizer; its parameters have the names that `sanitize` gives."""

    def __init__(self, config):
        super().__init__()
        c = self._config = config
        self.conv1 = Conv1d(c.n_mels, c.n_state, 3, stride=c.strides[0], padding=(1, 1))
        self.conv2 = Conv1d(c.n_state, c.n_state, 3, stride=c.strides[1], padding=(1, 1))
        if c.positions:
            self.positions = mx.zeros((c.positions, c.n_state))
        self.blocks = [Block(c) for _ in range(c.n_layer)]
        if c.codebook:
            self.codebook = mx.zeros((c.codebook, c.n_state))
        else:
            self.project = nn.Linear(c.n_state, c.digits)

    @property
    def config(self):
        return self._config

    @property
    def rate(self):
        """Ids a second."""
        return MEL_RATE // (self._config.strides[0] * self._config.strides[1])

    def __call__(self, log_mel):
        """log_mel [B, T, 128] of at most 30 s (`features.whisper_log_mel`) -> ids [B, L] int32; each stride halves T,
        rounding up. Raises CosyH3Error for more frames; `tokenize` takes audio of any length."""
        return self.quantize(self.encode(log_mel))

    def tokenize(self, audio):
        """audio [N] at 16 kHz, any length -> ids int32 numpy [about N / 16000 * rate]."""
        mel = whisper_log_mel(audio, self._config.n_mels)
        if not len(mel):
            return np.zeros(0, np.int32)
        out, each = [], MEL_RATE // self.rate  # frames an id
        for start in range(0, max(1, len(mel) - WINDOW + STRIDE), STRIDE):
            ids = np.array(self(mx.array(mel[start : start + WINDOW])[None])[0])
            last = start + WINDOW >= len(mel)
            out.append(ids[EDGE // each if start else 0 : None if last else (WINDOW - EDGE) // each])
        return np.concatenate(out)

    def encode(self, log_mel):
        """[B, T, 128] -> hidden [B, L, C], before the quantiser."""
        most = min(WINDOW, self._config.positions * MEL_RATE // self.rate or WINDOW)  # frames
        if log_mel.shape[1] > most:
            raise CosyH3Error(
                f"{log_mel.shape[1] / MEL_RATE:.1f} s is more than the {most // MEL_RATE} s that it sees at a time: "
                "use tokenize"
            )
        x = _gelu(self.conv2(_gelu(self.conv1(log_mel))))
        if self._config.positions:
            x = x + self.positions[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x

    def quantize(self, hidden):
        """hidden [B, L, C] -> ids [B, L] int32."""
        if self._config.codebook:
            x = hidden / mx.maximum(mx.linalg.norm(hidden, axis=-1, keepdims=True), 1e-12)
            near = 2 * (x @ self.codebook.T) - mx.square(self.codebook).sum(axis=1)  # |x|^2 is the same for all
            return mx.argmax(near, axis=-1).astype(mx.int32)
        digits = (mx.round(self.levels(hidden)) + 1).astype(mx.int32)  # 0, 1, 2; half to even
        return (digits * mx.array([3**i for i in range(self._config.digits)])).sum(axis=-1).astype(mx.int32)

    def levels(self, hidden):
        """hidden [B, L, C] -> the numbers that are rounded, [B, L, 8] from -0.999 to 0.999."""
        return mx.tanh(self.project(hidden)) * BELOW_1


def _gelu(x):
    return 0.5 * x * (1 + mx.erf(x * 2**-0.5))


# ---------------------------------------------------------------- weights


def quantizes(path):
    return False


_UPSTREAM = (
    (r"encoder\.conv([12])\.(weight|bias)", r"conv\1.\2"),
    (r"encoder\.positional_embedding", "positions"),
    (r"encoder\.blocks\.(\d+)\.attn\.fsmn_block\.weight", r"blocks.\1.attn.memory.weight"),
    (r"encoder\.blocks\.(\d+)\.attn\.(query|key|value|out)\.(weight|bias)", r"blocks.\1.attn.\2.\3"),
    (r"encoder\.blocks\.(\d+)\.(attn|mlp)_ln\.(weight|bias)", r"blocks.\1.\2_ln.\3"),
    (r"encoder\.blocks\.(\d+)\.mlp\.0\.(weight|bias)", r"blocks.\1.mlp1.\2"),
    (r"encoder\.blocks\.(\d+)\.mlp\.2\.(weight|bias)", r"blocks.\1.mlp2.\2"),
    (r"quantizer\._codebook\.embed", "codebook"),
    (r"quantizer\._codebook\.project_down\.(weight|bias)", r"project.\1"),
)
_OURS = re.compile(
    r"conv[12]\.(weight|bias)|positions|codebook|project\.(weight|bias)|blocks\.\d+\.("
    r"attn\.memory\.weight|attn\.(query|key|value|out)\.(weight|bias)|(attn|mlp)_ln\.(weight|bias)|"
    r"mlp[12]\.(weight|bias))"
)
# The rotary table, and how training moved the codebook
_USELESS = re.compile(r"(encoder\.)?freqs_cis|quantizer\._codebook\.(initted|cluster_size|embed_avg)")


def sanitize(weights):
    """{upstream's key: numpy array} -> {our key: numpy array} (views); what is converted already passes unchanged.

    Raises CheckpointError for an unknown key."""
    out = {}
    for name, a in weights.items():
        if _OURS.fullmatch(name):
            out[name] = a
        elif not _USELESS.fullmatch(name):
            ours = next((m.expand(ours) for pattern, ours in _UPSTREAM if (m := re.fullmatch(pattern, name))), None)
            if ours is None:
                raise CheckpointError(
                    f"the speech tokenizer has no tensor {name!r}{nearest(name, weights.keys() - {name})}"
                )
            out[ours] = a.transpose(0, 2, 1) if a.ndim == 3 else a  # [O, I, K] -> [O, K, I]
    return out
