"""Qwen2 as CosyVoice uses it: a causal transformer from input embeddings to final hidden states.

Pre-norm layers, grouped-query attention with biases on q, k and v only, half-split rotary positions, a gated MLP.
After transformers' `models/qwen2/modeling_qwen2.py`; without its token head, which CosyVoice does not use.
Every array has a batch axis; activations are of the dtype of the embeddings that go in.
"""

from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn

from mlx_cosyh3.errors import CheckpointError

CACHE_STEP = 256  # positions by which a cache grows


@dataclass
class Qwen2Config:
    """The keys of a Qwen2 `config.json` that matter here."""

    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int  # rows of the text embedding
    rms_norm_eps: float
    rope_theta: float

    @classmethod
    def from_dict(cls, d):
        """Other keys are ignored, but not those that ask for another computation than ours: CheckpointError."""
        for f in fields(cls):
            if f.name not in d:
                raise CheckpointError(f"the Qwen2 config lacks {f.name}: it is not one of CosyVoice 2 or 3")
        for name, plain in (("hidden_act", "silu"), ("rope_scaling", None), ("use_sliding_window", False)):
            if d.get(name, plain) != plain:
                raise CheckpointError(f"the Qwen2 config asks for {name} = {d[name]!r}; only {plain!r} is supported")
        config = cls(**{f.name: d[f.name] for f in fields(cls)})
        for whole, part in (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_key_value_heads")):
            if getattr(config, whole) % getattr(config, part):
                raise CheckpointError(f"the Qwen2 config's {whole} = {d[whole]} is no multiple of {part} = {d[part]}")
        return config

    @property
    def head_dim(self):
        return self.hidden_size // self.num_attention_heads


class KVCache:
    """Keys and values of one layer, in buffers that grow by CACHE_STEP positions."""

    def __init__(self):
        self.keys = self.values = None  # [B, kv heads, capacity, head_dim]
        self.offset = 0  # positions that hold something

    def append(self, keys, values):
        """Add [B, kv heads, T, head_dim] of each -> all so far, [B, kv heads, offset, head_dim]."""
        end = self.offset + keys.shape[2]
        self.keys, self.values = self._room(self.keys, keys, end), self._room(self.values, values, end)
        self.keys[:, :, self.offset : end] = keys
        self.values[:, :, self.offset : end] = values
        self.offset = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _room(self, buffer, new, end):
        """`buffer`, or a larger one with its content, in which `end` positions fit."""
        if buffer is not None and end <= buffer.shape[2]:
            return buffer
        B, H, _, D = new.shape
        capacity = -(-end // CACHE_STEP) * CACHE_STEP
        rest = mx.zeros((B, H, capacity - self.offset, D), dtype=new.dtype)
        return rest if buffer is None else mx.concatenate([buffer[:, :, : self.offset], rest], axis=2)

    def rewind(self, offset):
        """Forget all from position `offset` on."""
        self.offset = offset


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        D, hd = c.hidden_size, c.head_dim
        self.q_proj = nn.Linear(D, D)
        self.k_proj = nn.Linear(D, c.num_key_value_heads * hd)
        self.v_proj = nn.Linear(D, c.num_key_value_heads * hd)
        self.o_proj = nn.Linear(D, D, bias=False)
        self._head_dim, self._base = hd, c.rope_theta

    def __call__(self, x, cache):
        """x [B, T, D] -> [B, T, D]; `cache` (a KVCache) moves on by T positions."""
        B, T, D = x.shape
        hd = self._head_dim
        heads = lambda a: a.reshape(B, T, -1, hd).swapaxes(1, 2)  # noqa: E731 [B, heads, T, hd]
        turn = lambda a: mx.fast.rope(  # noqa: E731
            a, hd, traditional=False, base=self._base, scale=1.0, offset=cache.offset
        )
        q, k, v = turn(heads(self.q_proj(x))), turn(heads(self.k_proj(x))), heads(self.v_proj(x))
        k, v = cache.append(k, v)
        # "causal" lines up the ends: the last query sees all keys, whatever was in the cache before.
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=hd**-0.5, mask="causal" if T > 1 else None)
        return self.o_proj(y.swapaxes(1, 2).reshape(B, T, D))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def __call__(self, x):
        gate = self.gate_proj(x)
        return self.down_proj(gate * mx.sigmoid(gate) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.mlp = MLP(c)

    def __call__(self, x, cache):
        x = x + self.self_attn(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2(nn.Module):
    """The transformer; `embed_tokens` turns text ids into embeddings."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Layer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def make_cache(self):
        return [KVCache() for _ in self.layers]

    def __call__(self, embeddings, cache):
        """embeddings [B, T, D] -> hidden states [B, T, D] after the last norm; `cache` moves on by T positions."""
        x = embeddings
        for layer, kv in zip(self.layers, cache):
            x = layer(x, kv)
        return self.norm(x)
