"""The U-Net of the flows of CosyVoice 1 and 2: what moves a mel spectrogram one step from noise to speech.

Levels of a ResNet block and a few transformer blocks, all over mel frames: down, middle, up, with a skip from each
level down to its level up. After upstream's cosyvoice/flow/decoder.py (ConditionalDecoder, CausalConditionalDecoder)
and the blocks that it takes from Matcha-TTS. Positions come from the convolutions alone. Two kinds:

    CosyVoice 1   two levels, the inner one at half the frame rate; convolutions look both ways; group norms
    CosyVoice 2   one level; causal convolutions and layer norms, so that frames can come in chunks

With the streaming mask a frame sees its own chunk of frames and all earlier ones. What a complete chunk leaves behind
in the causal kind then never changes, and `UNetState` keeps it for the chunks that follow.
"""

import math
import re
from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn

from mlx_cosyh3.cosyvoice import cfm
from mlx_cosyh3.cosyvoice.conv import Conv1d, ConvTranspose1d
from mlx_cosyh3.cosyvoice.dit import chunk_mask, mish, silu
from mlx_cosyh3.cosyvoice.qwen2 import KVCache
from mlx_cosyh3.errors import CheckpointError

KERNEL = 3  # of all convolutions but those that change the frame rate
GROUPS = 8  # of the group norms
TIME_WIDTH = 4  # width of the time embedding, in widths of the first level


@dataclass
class UNetConfig:
    """Upstream's constructor arguments, and which of its two classes."""

    channels: list[int]  # width of each level
    num_heads: int
    attention_head_dim: int
    n_blocks: int  # transformer blocks of a level
    num_mid_blocks: int
    causal: bool = False
    static_chunk_size: int = 50  # mel frames of a chunk of the streaming mask
    in_channels: int = 320  # x, mu, speaker and cond
    out_channels: int = 80

    @classmethod
    def from_dict(cls, d, causal=None):
        """Raises CheckpointError for a missing key, or for sizes that upstream's network does not have."""
        d = d if causal is None else d | {"causal": causal}
        for name in ("channels", "num_heads", "attention_head_dim", "n_blocks", "num_mid_blocks"):
            if name not in d:
                raise CheckpointError(f"the flow's config lacks decoder.{name}: convert the model again")
        if d.get("act_fn", "gelu") != "gelu":
            raise CheckpointError(f"the flow's config has decoder.act_fn = {d['act_fn']!r}; only 'gelu' is supported")
        config = cls(**{f.name: d[f.name] for f in fields(cls) if f.name in d})
        config.channels = list(config.channels)
        if config.in_channels != 4 * config.out_channels:
            raise CheckpointError(
                f"the flow's decoder has {config.in_channels} channels in, {config.out_channels} out; only four times "
                "as many in are supported"
            )
        if config.causal and len(config.channels) != 1:
            raise CheckpointError(f"the flow's causal decoder has {len(config.channels)} levels; only 1 is supported")
        if not config.causal and any(c % GROUPS for c in config.channels):
            raise CheckpointError(f"the flow's decoder has channels {config.channels}; only multiples of {GROUPS} work")
        return config


def quantizes(path):
    """Whether `-q` takes the linear layer at `path`: attention and feed-forward alone."""
    return path.rpartition(".")[2] in ("to_q", "to_k", "to_v", "to_out", "ff_in", "ff_out")


class FrameConv(Conv1d):
    """A convolution over three frames that keeps their number: a frame, and two before it or one at either side."""

    def __init__(self, in_dims, out_dims, causal):
        super().__init__(in_dims, out_dims, KERNEL, padding=(KERNEL - 1, 0) if causal else (1, 1))
        self._slot = 0  # its place in a state

    def __call__(self, x, state=None):
        """[B, T, C] -> [B, T, O]. `state`: x goes on from the last inputs that it holds, and leaves its own there."""
        if state is None:
            return super().__call__(x)
        before = state.contexts[self._slot]
        if before is None:
            before = mx.zeros((x.shape[0], KERNEL - 1, x.shape[2]), dtype=x.dtype)
        x = mx.concatenate([before, x], axis=1)
        state.contexts[self._slot] = mx.contiguous(x[:, x.shape[1] - (KERNEL - 1) :])  # a view would keep all of x
        return super().__call__(x, padding=(0, 0))


class Block(nn.Module):
    """Convolution, norm, Mish."""

    def __init__(self, in_dims, out_dims, causal):
        super().__init__()
        self.conv = FrameConv(in_dims, out_dims, causal)
        self.norm = nn.LayerNorm(out_dims) if causal else nn.GroupNorm(GROUPS, out_dims, pytorch_compatible=True)

    def __call__(self, x, state=None):
        return mish(self.norm(self.conv(x, state)))


class Resnet(nn.Module):
    """Two blocks beside a residual; the flow's time comes in between them, as `shift` [O]."""

    def __init__(self, in_dims, out_dims, time_dims, causal):
        super().__init__()
        self.block1, self.block2 = Block(in_dims, out_dims, causal), Block(out_dims, out_dims, causal)
        self.time = nn.Linear(time_dims, out_dims)
        self.skip = nn.Linear(in_dims, out_dims)

    def __call__(self, x, shift, state=None):
        h = self.block1(x, state) + shift
        return self.block2(h, state) + self.skip(x)


class Transformer(nn.Module):
    """Attention without positions, and a feed-forward layer four times as wide; norms come before them."""

    def __init__(self, dims, heads, head_dims):
        super().__init__()
        inner = heads * head_dims
        self.norm_attention, self.norm_ff = nn.LayerNorm(dims), nn.LayerNorm(dims)
        self.to_q, self.to_k, self.to_v = (nn.Linear(dims, inner, bias=False) for _ in range(3))
        self.to_out = nn.Linear(inner, dims)
        self.ff_in, self.ff_out = nn.Linear(dims, 4 * dims), nn.Linear(4 * dims, dims)
        self._heads, self._head_dims = heads, head_dims
        self._slot = 0  # its place in a state

    def __call__(self, x, mask=None, state=None):
        """x [B, T, C] -> [B, T, C]. `state`: x also sees the frames that it holds, and is added to them."""
        x = x + self.attention(self.norm_attention(x), mask, state)
        return x + self.ff_out(gelu(self.ff_in(self.norm_ff(x))))

    def attention(self, x, mask, state):
        B, T, _ = x.shape
        q, k, v = (f(x).reshape(B, T, self._heads, -1).swapaxes(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        if state is not None:
            k, v = state.caches[self._slot].append(k, v)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=self._head_dims**-0.5, mask=mask)  # [B, H, T, D]
        return self.to_out(y.swapaxes(1, 2).reshape(B, T, -1))


class Level(nn.Module):
    """A ResNet block and transformer blocks. What leads on to the next level, `after`, is for the U-Net to apply:
    between down and up, what goes there and what is kept for the skip are not the same."""

    def __init__(self, in_dims, out_dims, config, after=None):
        super().__init__()
        self.resnet = Resnet(in_dims, out_dims, TIME_WIDTH * config.channels[0], config.causal)
        heads, head_dims = config.num_heads, config.attention_head_dim
        self.transformers = [Transformer(out_dims, heads, head_dims) for _ in range(config.n_blocks)]
        if after is not None:
            self.after = after

    def __call__(self, x, shift, mask=None, state=None):
        x = self.resnet(x, shift, state)
        for transformer in self.transformers:
            x = transformer(x, mask, state)
        return x


class Halve(Conv1d):
    """To half the frame rate (of an odd number of frames, one more than half)."""

    def __init__(self, dims):
        super().__init__(dims, dims, KERNEL, stride=2, padding=(1, 1))

    def __call__(self, x, state=None):
        return super().__call__(x)


class Double(ConvTranspose1d):
    """Back to twice the frame rate."""

    def __init__(self, dims):
        super().__init__(dims, dims, 4, stride=2, padding=1)

    def __call__(self, x, state=None):
        return super().__call__(x)


class UNet(nn.Module):
    def __init__(self, config):
        super().__init__()
        widths, causal = config.channels, config.causal
        self.time_in = nn.Linear(config.in_channels, TIME_WIDTH * widths[0])
        self.time_out = nn.Linear(TIME_WIDTH * widths[0], TIME_WIDTH * widths[0])
        self.down, self.mid, self.up = [], [], []
        for n, (before, width) in enumerate(zip([config.in_channels, *widths], widths)):
            last = n == len(widths) - 1
            self.down.append(Level(before, width, config, FrameConv(width, width, causal) if last else Halve(width)))
        for _ in range(config.num_mid_blocks):
            self.mid.append(Level(widths[-1], widths[-1], config))
        for n, (before, width) in enumerate(zip(widths[::-1], [*widths[-2::-1], widths[0]])):
            last = n == len(widths) - 1
            self.up.append(Level(2 * before, width, config, FrameConv(width, width, causal) if last else Double(width)))
        self.final = Block(widths[0], widths[0], causal)
        self.proj_out = nn.Linear(widths[0], config.out_channels)
        self._sinusoids, self._causal, self._chunk = config.in_channels, causal, config.static_chunk_size
        self._inner = config.num_heads * config.attention_head_dim
        self._convs, self._transformers = self._number(FrameConv), self._number(Transformer)

    def _number(self, kind):
        """Give the modules of that kind their places in a state -> how many there are."""
        found = [module for _, module in self.named_modules() if isinstance(module, kind)]
        for slot, module in enumerate(found):
            module._slot = slot
        return len(found)

    def modulations(self, times):
        """What the times of all steps add within the levels: times float32 [S] -> for each step a list of [C], one a
        level. It depends on nothing else, so it is computed once for all calls."""
        e = mish(self.time_embedding(times))
        tables = [level.resnet.time(e) for level in self.down + self.mid + self.up]
        return [[t[s] for t in tables] for s in range(e.shape[0])]

    def time_embedding(self, times):
        """times float32 [S] -> [S, 4 C]"""
        e = cfm.sinusoids(times, self._sinusoids).astype(self.time_in.weight.dtype)
        return self.time_out(silu(self.time_in(e)))

    def __call__(self, x, cond, mu, spks, modulations, mask=None, state=None):
        """The velocity at x: x, cond, mu [B, T, 80], spks [B, 80] -> float32 [B, T, 80].

        modulations   one step's, of `modulations`
        mask          bool [T, keys], None: all frames see one another. For the causal kind
        state         UNetState of this step (causal kind): x goes on from the frames it holds, and is added to them"""
        spks = mx.broadcast_to(spks[:, None], x.shape[:2] + spks.shape[-1:])
        h = mx.concatenate([x, mu, spks, cond], axis=-1).astype(self.proj_out.weight.dtype)  # [B, T, 320]
        shift = iter(modulations)
        skips = []
        for level in self.down:
            h = level(h, next(shift), mask, state)
            skips.append(h)
            h = level.after(h, state)
        for level in self.mid:
            h = level(h, next(shift), mask, state)
        for level in self.up:
            skip = skips.pop()
            h = h[:, : skip.shape[1]]  # there is one too many where an odd number was halved
            h = mx.concatenate([h, skip], axis=-1)
            h = level(h, next(shift), mask, state)
            h = level.after(h, state)
        return self.proj_out(self.final(h, state)).astype(mx.float32)

    def chunk_mask(self, start, frames):
        """bool [frames, start + frames] of the streaming mask for frames from `start`; None where it hides nothing."""
        return chunk_mask(start, frames, self._chunk)

    def make_state(self):
        """An empty state for one step of the flow, of the causal kind: in the other, all frames depend on all."""
        if not self._causal:
            raise TypeError("this U-Net looks both ways: it keeps no state")
        return UNetState(self._transformers, self._convs)

    @property
    def bytes_per_frame(self):
        """Of the keys and values that one frame of one row leaves in a state."""
        return 2 * self._inner * self._transformers * self.proj_out.weight.dtype.size


class UNetState:
    """What the frames so far leave behind in one step of the flow, in the causal kind."""

    def __init__(self, transformers, convs):
        self.caches = [KVCache() for _ in range(transformers)]
        self.contexts = [None] * convs  # the last two inputs of each convolution [B, 2, C]

    def arrays(self):
        return [a for c in self.caches for a in (c.keys, c.values)] + self.contexts


def gelu(x):
    return 0.5 * x * (1 + mx.erf(x * math.sqrt(0.5)))


NAMES = {
    "time_mlp.linear_1": "time_in",
    "time_mlp.linear_2": "time_out",
    "final_block.block.0": "final.conv",
    "final_block.block.1": "final.norm",  # of the kind for version 1
    "final_block.block.2": "final.norm",  # of the causal kind
    "final_proj": "proj_out",
}
NAMES_IN_LEVEL = {
    "0.mlp.1": "resnet.time",
    "0.res_conv": "resnet.skip",
    **{f"0.block{n}.block.0": f"resnet.block{n}.conv" for n in (1, 2)},
    **{f"0.block{n}.block.{norm}": f"resnet.block{n}.norm" for n in (1, 2) for norm in (1, 2)},
    "2": "after",
    "2.conv": "after",  # where it changes the frame rate
}
NAMES_IN_TRANSFORMER = {
    "norm1": "norm_attention",
    **{f"attn1.{n}": n for n in ("to_q", "to_k", "to_v")},
    "attn1.to_out.0": "to_out",
    "norm3": "norm_ff",
    "ff.net.0.proj": "ff_in",
    "ff.net.2": "ff_out",
}


def renamed(name):
    """Our name for upstream's `name` of a module, below the prefix of the network; None for an unknown one."""
    block = re.fullmatch(r"(down|mid|up)_blocks\.(\d+)\.(?:1\.(\d+)\.)?(.+)", name)
    if block is None:
        return NAMES.get(name)
    side, level, transformer, rest = block.groups()
    if transformer is not None:
        ours = NAMES_IN_TRANSFORMER.get(rest)
        return ours and f"{side}.{level}.transformers.{transformer}.{ours}"
    ours = NAMES_IN_LEVEL.get(rest)
    return ours and f"{side}.{level}.{ours}"


def layout(name, a):
    """Upstream's tensor `a` of its module `name` as ours, a view: convolutions are [out, K, in], or linear if K = 1."""
    if a.ndim != 3:
        return a
    if name.startswith("up_blocks") and name.endswith(".2.conv"):  # transposed: upstream's is [in, out, K]
        return a.transpose(1, 2, 0)
    return a[:, :, 0] if a.shape[2] == 1 else a.transpose(0, 2, 1)
