"""DiT, the network of CosyVoice 3's flow: what moves a mel spectrogram one step from noise to speech.

A transformer over mel frames whose layer norms are modulated by the flow's time (adaLN). After upstream's
cosyvoice/flow/DiT/{dit,modules}.py. Positions enter twice: through two causal convolutions over the input, and through
rotary positions, which upstream applies before it splits q and k into heads, so that they turn the first head alone.

With the streaming mask a frame sees its own chunk of frames and all earlier ones. What a complete chunk leaves behind
then never changes, and `DiTState` keeps it for the chunks that follow.
"""

from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cosyh3.cosyvoice import cfm
from mlx_cosyh3.cosyvoice.conv import Conv1d
from mlx_cosyh3.cosyvoice.qwen2 import KVCache
from mlx_cosyh3.errors import CheckpointError

SINUSOIDS = 256  # width of the sinusoids that the time goes in as
KERNEL, GROUPS = 31, 16  # of the two convolutions
ROTARY_BASE = 10000.0


@dataclass
class DiTConfig:
    """Upstream's constructor arguments."""

    dim: int
    depth: int
    heads: int
    dim_head: int = 64
    ff_mult: int = 2
    mel_dim: int = 80
    static_chunk_size: int = 50  # mel frames of a chunk of the streaming mask

    @classmethod
    def from_dict(cls, d):
        for name in ("dim", "depth", "heads"):
            if name not in d:
                raise CheckpointError(f"the flow's config lacks dit.{name}: convert the model again")
        return cls(**{f.name: d[f.name] for f in fields(cls) if f.name in d})


def quantizes(path):
    """Whether `-q` takes the linear layer at `path`: attention and feed-forward alone."""
    return path.rpartition(".")[2] in ("to_q", "to_k", "to_v", "to_out", "ff_in", "ff_out")


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim, inner = config.dim, config.heads * config.dim_head
        self.modulation = nn.Linear(dim, 6 * dim)
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, inner) for _ in range(3))
        self.to_out = nn.Linear(inner, dim)
        self.ff_in, self.ff_out = nn.Linear(dim, config.ff_mult * dim), nn.Linear(config.ff_mult * dim, dim)
        self._heads, self._dim_head = config.heads, config.dim_head

    def __call__(self, x, modulation, mask=None, cache=None):
        """x [B, T, D], modulation: six [D] -> [B, T, D]. `cache`: keys and values of earlier frames, moves on by T."""
        shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation
        x = x + gate * self.attention(norm(x, scale, shift), mask, cache)
        h = self.ff_in(norm(x, ff_scale, ff_shift))
        h = h * mx.sigmoid(h * (1.5957691216057308 + 0.07135481282553 * (h * h)))  # GELU, its tanh form
        return x + ff_gate * self.ff_out(h)

    def attention(self, x, mask, cache):
        B, T, _ = x.shape
        start = 0 if cache is None else cache.offset
        # As upstream: before the split into heads, so that only the first one turns.
        turn = lambda a: mx.fast.rope(a, self._dim_head, traditional=True, base=ROTARY_BASE, scale=1.0, offset=start)  # noqa: E731
        q, k, v = turn(self.to_q(x)), turn(self.to_k(x)), self.to_v(x)  # [B, T, H 64]
        q, k, v = (a.reshape(B, T, self._heads, -1).swapaxes(1, 2) for a in (q, k, v))
        if cache is not None:
            k, v = cache.append(k, v)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=self._dim_head**-0.5, mask=mask)  # [B, H, T, 64]
        return self.to_out(y.swapaxes(1, 2).reshape(B, T, -1))


class DiT(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim = config.dim
        self.time_in, self.time_out = nn.Linear(SINUSOIDS, dim), nn.Linear(dim, dim)
        self.proj_in = nn.Linear(4 * config.mel_dim, dim)
        self.conv_pos = [Conv1d(dim, dim, KERNEL, groups=GROUPS) for _ in range(2)]
        self.blocks = [Block(config) for _ in range(config.depth)]
        self.modulation = nn.Linear(dim, 2 * dim)
        self.proj_out = nn.Linear(dim, config.mel_dim)
        self._chunk = config.static_chunk_size

    def modulations(self, times):
        """What the times of all steps do to the layers, computed at once: the weights for it are a third of the model.

        times float32 [S] -> one list a step: for each block shift, scale and gate before the attention and before the
        feed-forward layers, then scale and shift for the end, each [D]. 1 is added to the scales: both rows and all
        frames share a time, so that scale and shift are the affine part of a layer norm."""
        e = silu(self.time_embedding(times))  # [S, D]
        S, D = e.shape
        block = mx.array([0, 1, 0, 0, 1, 0], dtype=e.dtype)[:, None]
        end = mx.array([1, 0], dtype=e.dtype)[:, None]  # this order, other than in the blocks
        tables = [b.modulation(e).reshape(S, 6, D) + block for b in self.blocks]
        tables.append(self.modulation(e).reshape(S, 2, D) + end)
        return [[list(t[s]) for t in tables] for s in range(S)]

    def time_embedding(self, times):
        """times float32 [S] -> [S, D]"""
        e = cfm.sinusoids(times, SINUSOIDS).astype(self.time_in.weight.dtype)
        return self.time_out(silu(self.time_in(e)))

    def __call__(self, x, cond, mu, spks, modulations, mask=None, state=None):
        """The velocity at x: x, cond, mu [B, T, 80], spks [B, 80] -> float32 [B, T, 80].

        modulations   one step's, of `modulations`
        mask          bool [T, keys], None: all frames see one another
        state         DiTState of this step: x goes on from the frames it holds, and is added to them"""
        spks = mx.broadcast_to(spks[:, None], x.shape[:2] + spks.shape[-1:])
        inputs = mx.concatenate([x, cond, mu, spks], axis=-1).astype(self.proj_in.weight.dtype)  # [B, T, 320]
        h = self.embed(inputs, state)
        for i, block in enumerate(self.blocks):
            h = block(h, modulations[i], mask, None if state is None else state.caches[i])
        return self.proj_out(norm(h, *modulations[-1])).astype(mx.float32)

    def embed(self, inputs, state=None):
        """[B, T, 320] -> [B, T, D]: the projection, and around it two causal convolutions."""
        h = self.proj_in(inputs)
        y = h
        for n, conv in enumerate(self.conv_pos):
            before = mx.zeros((y.shape[0], KERNEL - 1, y.shape[2]), dtype=y.dtype) if state is None else state.before(n, y)
            y = mx.concatenate([before, y], axis=1)
            if state is not None:
                state.contexts[n] = mx.contiguous(y[:, y.shape[1] - (KERNEL - 1) :])  # a view would keep all of y
            y = mish(conv(y))
        return h + y

    def chunk_mask(self, start, frames):
        """bool [frames, start + frames] of the streaming mask for frames from `start`; None where it hides nothing."""
        return chunk_mask(start, frames, self._chunk)


class DiTState:
    """What the frames so far leave behind in one step of the flow."""

    def __init__(self, depth):
        self.caches = [KVCache() for _ in range(depth)]
        self.contexts = [None, None]  # the last inputs of either convolution [B, 30, D]

    def before(self, n, like):
        if self.contexts[n] is None:
            return mx.zeros((like.shape[0], KERNEL - 1, like.shape[2]), dtype=like.dtype)
        return self.contexts[n]

    def arrays(self):
        return [a for c in self.caches for a in (c.keys, c.values)] + self.contexts


def chunk_mask(start, frames, chunk):
    """bool [frames, start + frames]: frame i sees key j < (i // chunk + 1) chunk. None where it hides nothing."""
    if (start + frames - 1) // chunk == start // chunk:
        return None
    ends = (np.arange(start, start + frames) // chunk + 1) * chunk
    return mx.array(np.arange(start + frames)[None] < ends[:, None])


def norm(x, scale, shift):
    return mx.fast.layer_norm(x, scale, shift, 1e-6)


def silu(x):
    return x * mx.sigmoid(x)


def mish(x):
    return x * mx.tanh(mx.logaddexp(x, mx.array(0.0, dtype=x.dtype)))
