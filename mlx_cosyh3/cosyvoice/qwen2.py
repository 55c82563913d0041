"""Qwen2 as CosyVoice uses it: a causal transformer from input embeddings to final hidden states.

Pre-norm layers, grouped-query attention with biases on q, k and v only, half-split rotary positions, a gated MLP.
After transformers' `models/qwen2/modeling_qwen2.py`; without its token head, which CosyVoice does not use.
Every array has a batch axis; activations are of the dtype of the embeddings that go in.

Launches, not arithmetic, are what a decoded token costs on a large GPU. So q, k and v, and gate and up, are one product
each once `join` has been called, and one token of one sequence takes the way of `Fused`: six launches a layer in place
of twenty, four of which are kernels/norm_linear.py.
"""

from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cosyh3.compiled import in_main_thread
from mlx_cosyh3.errors import CheckpointError
from mlx_cosyh3.kernels import _dispatch, norm_linear
from mlx_cosyh3.linear import joined, plus, weights

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


class JointCache(KVCache):
    """A KVCache with keys and values in one buffer [B, 2 kv heads, capacity, head_dim], so that both come in one copy."""

    def __init__(self):
        super().__init__()
        self.both = None

    def append(self, keys, values):
        return self.append_both(mx.concatenate([keys, values], axis=1))

    def append_both(self, both):
        """Add [B, 2 kv heads, T, head_dim], the keys first -> all so far, as `append`."""
        end, heads = self.offset + both.shape[2], both.shape[1] // 2
        self.both = self._room(self.both, both, end)
        self.both[:, :, self.offset : end] = both
        self.offset = end
        return self.both[:, :heads, :end], self.both[:, heads:, :end]


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        D, hd = c.hidden_size, c.head_dim
        self.q_proj = nn.Linear(D, D)
        self.k_proj = nn.Linear(D, c.num_key_value_heads * hd)
        self.v_proj = nn.Linear(D, c.num_key_value_heads * hd)
        self.o_proj = nn.Linear(D, D, bias=False)
        self._head_dim, self._heads, self._base = hd, c.num_attention_heads, c.rope_theta

    def join(self):
        """One product for q, k and v, if their layers are of one kind."""
        qkv = joined([self.q_proj, self.k_proj, self.v_proj])
        if qkv is not None:
            self.qkv_proj = qkv
            for name in ("q_proj", "k_proj", "v_proj"):
                del self[name]

    def __call__(self, x, cache, residual, offset, mask=None):
        """x [B, T, D] -> [B, T, D], `residual` added; `cache` (a KVCache) moves on by T positions from `offset` on.

        offset   int, or int32 [B]: one for each row
        mask     bool, broadcast to [B, 1, T, S], in place of the causal one"""
        if "qkv_proj" in self:
            qkv = self.qkv_proj(x)
        else:
            qkv = mx.concatenate([self.q_proj(x), self.k_proj(x), self.v_proj(x)], axis=-1)
        return plus(self.o_proj, self.attend(qkv, cache, offset, mask), residual)

    def attend(self, qkv, cache, offset, mask=None):
        """q, k and v side by side, [B, T, D + 2 kv heads * hd] -> [B, T, D]"""
        B, T, _ = qkv.shape
        hd, H = self._head_dim, self._heads
        heads = qkv.reshape(B, T, -1, hd).swapaxes(1, 2)  # [B, H + 2 kv heads, T, hd]
        turned = (H + heads.shape[1]) // 2  # q's and k's
        qk = mx.fast.rope(heads[:, :turned], hd, traditional=False, base=self._base, scale=1.0, offset=offset)
        k, v = cache.append(qk[:, H:], heads[:, turned:])
        return self._attend(qk[:, :H], k, v, mask).reshape(B, T, H * hd)

    def attend_turned(self, qkv, cache):
        """`attend` for one token of one sequence whose q and k are turned already: [..] -> [D]"""
        H = self._heads
        heads = qkv.reshape(1, -1, 1, self._head_dim)
        k, v = cache.append_both(heads[:, H:])
        return self._attend(heads[:, :H], k, v).reshape(-1)

    def _attend(self, q, k, v, mask=None):
        # "causal" lines up the ends: the last query sees all keys, whatever was in the cache before.
        mask = "causal" if mask is None and q.shape[2] > 1 else mask
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=mask).swapaxes(1, 2)

    def turns(self, positions):
        """cos and sin of the angles at positions 0 .. positions - 1, fp32 [positions, hd], from float64."""
        half = self._head_dim // 2
        angles = np.arange(positions)[:, None] * self._base ** (-np.arange(half) / half)
        return mx.array(np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def join(self):
        """One product for gate and up, if their layers are of one kind."""
        both = joined([self.gate_proj, self.up_proj])
        if both is not None:
            self.gate_up_proj = both
            del self["gate_proj"], self["up_proj"]

    def __call__(self, x, residual):
        gate, up = mx.split(self.gate_up_proj(x), 2, axis=-1) if "gate_up_proj" in self else (self.gate_proj(x), self.up_proj(x))
        return plus(self.down_proj, gate * mx.sigmoid(gate) * up, residual)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.mlp = MLP(c)

    def __call__(self, x, cache, offset, mask=None):
        x = self.self_attn(self.input_layernorm(x), cache, x, offset, mask)
        return self.mlp(self.post_attention_layernorm(x), x)

    def pieces(self):
        """What norm_linear is to compute, in order: (weights, named arguments of `norm_linear.bound`)."""
        a, m = self.self_attn, self.mlp
        norm1, norm2 = ((n.weight, None, n.eps) for n in (self.input_layernorm, self.post_attention_layernorm))
        turned = (a._heads + a.qkv_proj.weight.shape[0] // a._head_dim) // 2
        return (
            (weights(a.qkv_proj), {"norm": norm1, "activation": "rotary", "heads": (a._head_dim, turned)}),
            (weights(a.o_proj), {"adds": True}),
            (weights(m.gate_up_proj), {"norm": norm2, "activation": "silu_gate"}),
            (weights(m.down_proj), {"adds": True}),
        )

    def fusable(self, dtype):
        """Whether `Fused` may run here for x of `dtype`."""
        if "qkv_proj" not in self.self_attn or "gate_up_proj" not in self.mlp:
            return False
        for w, options in self.pieces():
            if w is None:
                return False
            x, residual = (mx.zeros((n,), dtype=dtype) for n in w[0].shape[::-1])
            named = {name: a for name, a in options.items() if name != "adds"}
            if not norm_linear.usable(x, *w, residual=residual if "adds" in options else None, **named):
                return False
        return True


class Fused:
    """The layers for one token of one sequence, [D] -> [D], the last norm included.

    What lies between two attentions is one compiled function; its plain form launches the same kernels."""

    def __init__(self, layers, norm, dtype):
        pieces = [[norm_linear.bound(dtype, *w, **options) for w, options in layer.pieces()] for layer in layers]
        self._attentions = [layer.self_attn for layer in layers]
        self._first = pieces[0][0]
        following = [qkv for qkv, *_ in pieces[1:]] + [lambda x, turn: norm(x)]
        self._between = [in_main_thread(_between(*own[1:], after)) for own, after in zip(pieces, following)]

    def __call__(self, x, cache, turn):
        """x [D] -> [D]; `cache`: a JointCache a layer. turn: the position's row of Attention.turns."""
        y = self._first(x, turn)
        for attention, kv, between in zip(self._attentions, cache, self._between):
            y, x = between(attention.attend_turned(y, kv), x, turn)
        return y


def _between(out, gate_up, down, following):
    """From what attention gave [D] and the residual x [D] to (what follows on this layer, the new residual)."""

    def run(attended, x, turn):
        x = out(attended, x)
        x = down(gate_up(x), x)
        return following(x, turn), x

    return run


class Qwen2(nn.Module):
    """The transformer; `embed_tokens` turns text ids into embeddings."""

    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Layer(config) for _ in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._fusable = {}  # (kernels that may run, dtype) -> whether every layer can be fused
        self._fused = {}  # dtype -> Fused
        self._turns = None

    def join(self):
        """Exchange products of the same input for one. Weights must be loaded; called once, by who loads the model."""
        for layer in self.layers:
            layer.self_attn.join()
            layer.mlp.join()
            mx.eval(layer.parameters())  # layer by layer, so that few weights are there twice

    def make_cache(self):
        return [JointCache() for _ in self.layers]

    def __call__(self, embeddings, cache, rows=None):
        """embeddings [B, T, D] -> hidden states [B, T, D] after the last norm; `cache` moves on by T positions.

        rows   ragged.Rows, where those of the cache are of different lengths"""
        x, position, mask = embeddings, cache[0].offset, None
        if rows is not None:
            position, mask = rows.positions, rows.mask
        elif x.shape[:2] == (1, 1) and self._can_fuse(x.dtype):
            if x.dtype not in self._fused:
                self._fused[x.dtype] = Fused(self.layers, self.norm, x.dtype)
            return self._fused[x.dtype](x[0, 0], cache, self._turn(position))[None, None]
        for layer, kv in zip(self.layers, cache):
            x = layer(x, kv, position, mask)
        return self.norm(x)

    def _can_fuse(self, dtype):
        if not _dispatch.on_gpu():
            return False
        key = _dispatch.allowed(), dtype
        if key not in self._fusable:
            self._fusable[key] = all(layer.fusable(dtype) for layer in self.layers)
        return self._fusable[key]

    def _turn(self, position):
        """The row of Attention.turns: made beforehand, for all layers, not by each."""
        if self._turns is None or position >= self._turns.shape[0]:
            self._turns = self.layers[0].self_attn.turns(max(4096, 2 * position))
            mx.eval(self._turns)
        return self._turns[position]
