"""The transformer with relative positions (Transformer-XL's, as ESPnet has it) inside CosyVoice 1 and 2: both encoders
and the language model of version 1, the flow's encoder of both.

    score[i, j] = ((q_i + u) . k_j + (q_i + v) . p[i - j]) / sqrt(d)        p[r] = W sinusoids(r)

u and v are learned, the same for all queries. The second term does not fit a plain attention, but it is a table of
queries against distances: it is sheared into one of queries against keys, and goes into the fused attention as an
additive mask, for BLOCK queries at a time. After upstream's `transformer/{attention,embedding,encoder}.py`.

Letters: B rows, T new positions, S all positions (those in a cache first), C width, H heads, D = C / H.
"""

import math
import re
from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cosyh3.cosyvoice import dit
from mlx_cosyh3.cosyvoice.qwen2 import KVCache
from mlx_cosyh3.errors import CheckpointError

BLOCK = 256  # queries whose position scores are in memory at a time
STEP = 256  # distances by which a cache's table grows


@dataclass
class EncoderConfig:
    """Upstream's constructor arguments that matter here."""

    input_size: int
    output_size: int  # C
    attention_heads: int
    linear_units: int  # width within the feed-forward layers
    num_blocks: int

    @classmethod
    def from_dict(cls, d, name, **plain):
        """Other keys are ignored, but not those that ask for another computation than ours: CheckpointError.

        name    of this encoder, for the messages
        plain   what further keys must be where they are given, such as input_layer="linear"."""
        for f in fields(cls):
            if f.name not in d:
                raise CheckpointError(f"the config lacks {name}.{f.name}: convert the model again")
        plain = PLAIN | plain
        for key in plain.keys() & d.keys():
            if d[key] != plain[key]:
                raise CheckpointError(f"the config has {name}.{key} = {d[key]!r}; only {plain[key]!r} is supported")
        config = cls(**{f.name: d[f.name] for f in fields(cls)})
        if config.output_size % config.attention_heads or config.output_size % 2:
            raise CheckpointError(
                f"the config's {name}.output_size = {config.output_size} must be even, and a multiple of "
                f"attention_heads = {config.attention_heads}"
            )
        return config


PLAIN = {
    "pos_enc_layer_type": "rel_pos_espnet",
    "selfattention_layer_type": "rel_selfattn",
    "use_cnn_module": False,
    "macaron_style": False,
    "normalize_before": True,
    "key_bias": True,
}


def positions(T, dims):
    """The sinusoids of all distances within T positions: float32 [2T - 1, dims], row k is of distance T - 1 - k."""
    return mx.array(sinusoids(T - 1, -T, dims))


def sinusoids(first, last, dims):
    """numpy float32 [first - last, dims], of the distances first, first - 1, ... (last not included)."""
    rates = np.exp(np.arange(0, dims, 2, dtype=np.float32) * np.float32(-math.log(10000) / dims))
    angles = np.arange(first, last, -1, dtype=np.float32)[:, None] * rates  # rounded to float32, as upstream
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(angles), dims)


def causal_mask(T, offset=0):
    """bool [T, offset + T]: a position sees itself and all before it."""
    return mx.array(np.tri(T, offset + T, offset, dtype=bool))


def chunk_mask(T, chunk, offset=0):
    """bool [T, offset + T]: a position sees its own chunk and all before it. None where that hides nothing."""
    return dit.chunk_mask(offset, T, chunk)


class RelativeCache(KVCache):
    """Keys, values and projected distances of one layer.

    The distances depend on the weights alone, but they are kept here: then nothing is shared between threads."""

    def __init__(self):
        super().__init__()
        self.table = None  # [H, high + low, D]: p of the distances high - 1, ..., -low
        self.high = self.low = 0

    def missing(self, high, low, dims):
        """The sinusoids of what it takes to reach high - 1 and -low: (before the table, after it), None for nothing."""
        high, low = -(-high // STEP) * STEP, max(low, self.low)  # `high` grows with each token, `low` hardly ever
        before = mx.array(sinusoids(high - 1, self.high - 1, dims)) if high > self.high else None
        return before, (mx.array(sinusoids(-self.low - 1, -low - 1, dims)) if low > self.low else None)

    def extend(self, before, after, project):
        """Take in what `missing` gave. project: [n, dims] -> [H, n, D]"""
        if before is None and after is None:
            return
        parts = [None if before is None else project(before), self.table, None if after is None else project(after)]
        self.table = mx.concatenate([p for p in parts if p is not None], axis=1)
        self.high += 0 if before is None else before.shape[0]
        self.low += 0 if after is None else after.shape[0]

    def distances(self, first, count):
        """p of `count` distances from `first` downwards, [H, count, D]."""
        return self.table[:, self.high - 1 - first : self.high - 1 - first + count]


class RelativeAttention(nn.Module):
    def __init__(self, dims, heads):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dims, dims) for _ in range(4))
        self.pos = nn.Linear(dims, dims, bias=False)
        self.bias_u = mx.zeros((heads, dims // heads))
        self.bias_v = mx.zeros((heads, dims // heads))

    def __call__(self, x, mask, cache, missing):
        """x [B, T, C] -> [B, T, C]; `cache` moves on by T, and takes in the sinusoids that were missing."""
        B, T, C = x.shape
        H, D = self.bias_u.shape
        scale = D**-0.5
        q = self.q(x).reshape(B, T, H, D)
        qu, qv = (q + self.bias_u).swapaxes(1, 2), ((q + self.bias_v) * scale).swapaxes(1, 2)  # [B, H, T, D]
        k, v = (a.reshape(B, T, H, D).swapaxes(1, 2) for a in (self.k(x), self.v(x)))
        start = cache.offset
        k, v = cache.append(k, v)
        cache.extend(*missing, self._project)
        y = []
        for a in range(0, T, BLOCK):
            b = min(a + BLOCK, T)
            S = start + (b if isinstance(mask, str) else T)  # keys that any of these queries may see
            bias = mask_scores(self._scores(qv[:, :, a:b], cache, start + a, S), block_of(mask, a, b))
            k_, v_ = k[:, :, :S], v[:, :, :S]
            y.append(mx.fast.scaled_dot_product_attention(qu[:, :, a:b], k_, v_, scale=scale, mask=bias))
        y = y[0] if len(y) == 1 else mx.concatenate(y, axis=2)  # [B, H, T, D]
        return self.out(y.swapaxes(1, 2).reshape(B, T, C))

    def _project(self, rows):
        H, D = self.bias_u.shape
        return self.pos(rows.astype(self.pos.weight.dtype)).reshape(-1, H, D).swapaxes(0, 1)

    def _scores(self, qv, cache, first, S):
        """The position term of the queries from position `first` on, qv [B, H, n, D], and S keys: [B, H, n, S]."""
        B, H, n, _ = qv.shape
        count = n + S - 1  # distances, from the last query to the first key down to the first query to the last key
        scores = qv @ cache.distances(first + n - 1, count).swapaxes(1, 2)  # [B, H, n, count]
        if n == 1:
            return scores
        # Query i and key j are n - 1 - i + j from the left: each row starts one place before that of the row above.
        strides = (H * n * count, n * count, count - 1, 1)
        return mx.as_strided(scores, (B, H, n, S), strides, n - 1)


def block_of(mask, a, b):
    """The rows a to b of a mask, for those queries."""
    if mask is None or isinstance(mask, str) or mask.shape[-2] == 1:
        return mask
    return mask[..., a:b, :]


def mask_scores(scores, mask):
    """scores [B, H, n, S] with -inf where a boolean mask is False. "causal": the last query sees all S keys."""
    n, S = scores.shape[-2:]
    if mask is None or (n == 1 and isinstance(mask, str)):
        return scores
    mask = causal_mask(n, S - n) if isinstance(mask, str) else mask
    return mx.where(mask, scores, mx.array(-mx.inf, dtype=scores.dtype))


class Layer(nn.Module):
    def __init__(self, dims, heads, hidden, activation):
        super().__init__()
        self.norm_attention = nn.LayerNorm(dims, eps=1e-12)
        self.attention = RelativeAttention(dims, heads)
        self.norm_ff = nn.LayerNorm(dims, eps=1e-12)
        self.ff_in, self.ff_out = nn.Linear(dims, hidden), nn.Linear(hidden, dims)
        self._activation = {"silu": silu, "relu": relu}[activation]

    def __call__(self, x, mask, cache, missing):
        x = x + self.attention(self.norm_attention(x), mask, cache, missing)
        return x + self.ff_out(self._activation(self.ff_in(self.norm_ff(x))))


class Embed(nn.Module):
    """What comes before the layers: a projection, a norm, and a scale; no positions are added."""

    def __init__(self, input_size, dims, legacy):
        super().__init__()
        self.linear, self.norm = nn.Linear(input_size, dims), nn.LayerNorm(dims, eps=1e-5)
        self._legacy, self._scale = legacy, math.sqrt(dims)

    def __call__(self, x):
        x = self.norm(self.linear(x))
        return (relu(x) if self._legacy else x) * self._scale


class RelativeEncoder(nn.Module):
    """Upstream's ConformerEncoder ("silu"; in CosyVoice it has no convolutions) or TransformerEncoder ("relu").

    hidden        width within the feed-forward layers
    legacy        upstream's input layer "linear_legacy": ReLU after the norm of the input
    embed, norm   whether there is an input layer, and a norm after the last layer"""

    def __init__(
        self, input_size, dims, heads, hidden, blocks, *, activation="silu", legacy=False, embed=True, norm=True
    ):
        super().__init__()
        if embed:
            self.embed = Embed(input_size, dims, legacy)
        self.layers = [Layer(dims, heads, hidden, activation) for _ in range(blocks)]
        if norm:
            self.after_norm = nn.LayerNorm(dims, eps=1e-5)
        self._dims = dims

    @classmethod
    def from_config(cls, c, **options):
        """From an EncoderConfig."""
        return cls(c.input_size, c.output_size, c.attention_heads, c.linear_units, c.num_blocks, **options)

    def make_cache(self):
        """An empty cache: a list of one RelativeCache a layer. `cache[0].offset` is the number of positions in it."""
        return [RelativeCache() for _ in self.layers]

    def __call__(self, x, mask=None, cache=None):
        """x [B, T, input_size] -> [B, T, C].

        mask    bool, True = may look, broadcastable to [B, 1, T, S]; None: all see all; "causal": the same as
                causal_mask(T, S - T), and what it hides is not computed
        cache   from `make_cache`: x goes on from the positions it holds, and is added to them"""
        return self.layers_only(self.embed(x) if "embed" in self else x, mask, cache)

    def layers_only(self, x, mask=None, cache=None):
        """`__call__` without the input layer: x [B, T, C]."""
        T = x.shape[1]
        start = cache[0].offset if cache else 0
        low = (min(T, BLOCK) if isinstance(mask, str) else T) - 1  # how far ahead a query may be asked to look
        missing = (cache[0] if cache else RelativeCache()).missing(start + T, low, self._dims)  # the same in all layers
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, cache[i] if cache else RelativeCache(), missing)
        return self.after_norm(x) if "after_norm" in self else x


def silu(x):
    return x * mx.sigmoid(x)


def relu(x):
    return mx.maximum(x, 0)


NAMES = {
    "embed.out.0": "embed.linear",
    "embed.out.1": "embed.norm",
    "after_norm": "after_norm",
    **{f"encoders.#.self_attn.linear_{n}": f"layers.#.attention.{n}" for n in ("q", "k", "v", "out", "pos")},
    "encoders.#.feed_forward.w_1": "layers.#.ff_in",
    "encoders.#.feed_forward.w_2": "layers.#.ff_out",
    **{f"encoders.#.{n}": "layers.#.norm_attention" for n in ("norm_mha", "norm1")},
    **{f"encoders.#.{n}": "layers.#.norm_ff" for n in ("norm_ff", "norm2")},
}  # upstream's module: ours, with # for the number of a layer
BIASES = {f"encoders.#.self_attn.pos_bias_{n}": f"layers.#.attention.bias_{n}" for n in "uv"}
OURS = {f"{a}.{part}": f"{b}.{part}" for a, b in NAMES.items() for part in ("weight", "bias")} | BIASES
OURS = {a: b for a, b in OURS.items() if not a.endswith("linear_pos.bias")}
OURS |= {b: b for b in OURS.values()}


def renamed(name):
    """Our name for upstream's `name` of a tensor, both below the prefix of the encoder; None for an unknown one. Names
    that are ours already stay."""
    layer = re.fullmatch(r"(encoders|layers)\.(\d+)\.(.+)", name)
    ours = OURS.get(f"{layer[1]}.#.{layer[3]}" if layer else name)
    return ours and ours.replace("#", layer[2] if layer else "")


def quantizes(path):
    """Whether `-q` takes the linear layer at `path` below an encoder: attention and feed-forward alone."""
    return bool(re.fullmatch(r"(.+\.)?layers\.\d+\.(attention\.(q|k|v|out)|ff_in|ff_out)", path))
