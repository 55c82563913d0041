"""CosyVoice 3's flow: speech tokens and a speaker -> mel spectrogram, by flow matching with a DiT.

After upstream's cosyvoice/flow/flow.py (CausalMaskedDiffWithDiT). Each token is two mel frames (50 a second) and looks
three tokens ahead. A voice's own tokens and mel go in front, so that the speech goes on from them.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cosyh3.cosyvoice import cfm, noise
from mlx_cosyh3.cosyvoice.conv import Conv1d
from mlx_cosyh3.cosyvoice.dit import DiT, DiTConfig, DiTState, quantizes  # noqa: F401 (part of this part's interface)
from mlx_cosyh3.cosyvoice.qwen2 import CACHE_STEP
from mlx_cosyh3.errors import CheckpointError, CosyH3Error, nearest

MEL = 80


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
            raise CheckpointError(f"the flow's config says {d.get('input_size')} -> {d.get('output_size')} mel bins; only {MEL} are supported")
        return cls(
            d["vocab_size"],
            DiTConfig.from_dict(d["dit"]),
            ahead["channels"],
            d.get("spk_embed_dim", 192),
            ahead.get("pre_lookahead_len", 3),
            d.get("token_mel_ratio", 2),
            d.get("cfm", {}).get("inference_cfg_rate", 0.7),
        )


class LookAhead(nn.Module):
    """Each token looks at the next ones: two convolutions around a residual."""

    def __init__(self, dims, hidden, ahead):
        super().__init__()
        self.conv1, self.conv2 = Conv1d(dims, hidden, ahead + 1), Conv1d(hidden, dims, 3)
        self._ahead = ahead

    def __call__(self, x, ahead=None, hidden=None):
        """x [1, T, C], `ahead` [1, n <= look-ahead, C] what follows (zeros beyond) -> ([1, T, C], what `hidden` takes).

        hidden   the last two hidden frames before x, from the call for the tokens before; None: x is the beginning"""
        following = self._ahead - (0 if ahead is None else ahead.shape[1])
        y = x if ahead is None else mx.concatenate([x, ahead], axis=1)
        y = self.conv1(mx.pad(y, [(0, 0), (0, following), (0, 0)]))
        y = mx.maximum(y, 0.01 * y)  # LeakyReLU
        y = mx.pad(y, [(0, 0), (2, 0), (0, 0)]) if hidden is None else mx.concatenate([hidden, y], axis=1)
        return self.conv2(y) + x, y[:, y.shape[1] - 2 :]


class Flow(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_embedding = nn.Embedding(config.vocab_size, MEL)
        self.spk_embed_affine_layer = nn.Linear(config.spk_embed_dim, MEL)
        self.pre_lookahead_layer = LookAhead(MEL, config.look_ahead_dims, config.look_ahead)
        self.dit = DiT(config.dit)
        self._vocab, self._ratio, self._guidance = config.vocab_size, config.token_mel_ratio, config.guidance
        self._depth, self._chunk = config.dit.depth, config.dit.static_chunk_size
        self.look_ahead = config.look_ahead

    def __call__(self, tokens, prompt_tokens, prompt_mel, embedding, *, streaming=False, finalize=True, steps=10, on_step=None):
        """Mel frames float32 [1, n, 80] for `tokens` (upstream's `inference`).

        tokens, prompt_tokens   int [1, T], [1, P];  prompt_mel [1, M, 80], most often M = 2 P;  embedding [1, 192]
        streaming   use the chunk mask, as chunk-wise generation does
        finalize    False: the last tokens are only looked ahead at
        steps       of the flow, at least 1
        on_step     called with the number of steps done after each
        Raises CosyH3Error for tokens out of range, 0 steps, more than 300 s, or values that are not finite."""
        modulations = self.modulations(steps)
        x = self.embed(mx.concatenate([prompt_tokens, tokens], axis=1))  # [1, P + T, 80]
        count = x.shape[1] if finalize else x.shape[1] - self.look_ahead
        if count <= 0:
            return mx.zeros((1, 0, MEL))
        x, _ = self.pre_lookahead_layer(x[:, :count], x[:, count:])
        mu = mx.repeat(x, self._ratio, axis=1)  # [1, frames, 80]
        mask = self.dit.chunk_mask(0, mu.shape[1]) if streaming else None
        mel = self.solve(mu, prompt_mel, self.speaker(embedding), modulations, on_step=on_step, mask=mask)
        return mel[:, prompt_mel.shape[1] :]

    def modulations(self, steps):
        """What `solve` takes for so many steps."""
        return self.dit.modulations(cfm.times(steps)[0])

    def solve(self, mu, prompt_mel, speaker, modulations, *, on_step=None, mask=None, start=0, states=None):
        """Mel float32 [1, T, 80] of the frames from `start`, whose `mu` this is. `states`: one DiTState a step."""
        T, M = mu.shape[1], prompt_mel.shape[1]
        if start + T > noise.FRAMES:
            raise CosyH3Error(
                f"{(start + T) / 50:.0f} s of speech, the voice's own included, are too long for one piece: at most "
                f"{noise.FRAMES // 50} s; split the text"
            )
        cond = mx.zeros(mu.shape)
        if start < M:
            cond = mx.concatenate([prompt_mel[:, start : start + T], cond[:, min(T, M - start) :]], axis=1)
        nothing = mx.zeros_like(mu)
        mu, cond = mx.concatenate([mu, nothing]), mx.concatenate([cond, nothing])  # row 1: without the conditions
        speaker = mx.concatenate([speaker, mx.zeros_like(speaker)])

        def velocity(x, k):
            v = self.dit(x, cond, mu, speaker, modulations[k], mask, None if states is None else states[k])
            if states is not None:
                mx.async_eval(v, states[k].arrays())  # lazy ones would keep the whole step alive
            return v

        x = mx.array(noise.cfm_noise(start + T)[:, start:])
        return cfm.euler(x, len(modulations), velocity, self._guidance, on_step)

    def embed(self, tokens):
        """int [1, T] -> [1, T, 80]. Raises CosyH3Error for a token that is none."""
        if tokens.size and not 0 <= tokens.min().item() <= tokens.max().item() < self._vocab:
            raise CosyH3Error(f"a speech token is outside of 0 to {self._vocab - 1}: {tokens.min().item()} to {tokens.max().item()}")
        return self.input_embedding(tokens).astype(mx.float32)

    def speaker(self, embedding):
        """float32 [1, 192] -> [1, 80]"""
        embedding = embedding / mx.maximum(mx.sqrt((embedding * embedding).sum(axis=-1, keepdims=True)), 1e-12)
        return self.spk_embed_affine_layer(embedding.astype(self.spk_embed_affine_layer.weight.dtype)).astype(mx.float32)

    def stream(self, prompt_tokens, prompt_mel, embedding, *, steps=10, memory_budget=None):
        """Chunk-wise generation -> FlowStream. memory_budget: bytes that the kept keys and values may take."""
        return FlowStream(self, prompt_tokens, prompt_mel, embedding, steps, default_budget() if memory_budget is None else memory_budget)


class FlowStream:
    """Mel frames of a growing list of tokens: equal to `flow(all tokens, streaming=True)`.

    Only complete chunks of the mask are computed (and the rest at the end), each once: keys, values and convolution
    inputs of every step and layer are kept. When they would exceed the budget, everything is computed anew for each
    chunk instead, which gives the same result in a time that grows.

    frames   new mel frames that have been returned"""

    def __init__(self, flow, prompt_tokens, prompt_mel, embedding, steps, budget):
        self.flow, self.steps, self.budget = flow, steps, budget
        self.modulations = flow.modulations(steps)
        mx.eval(self.modulations)
        self.prompt_mel, self.speaker = prompt_mel, flow.speaker(embedding)
        self.tokens = [int(t) for t in np.array(prompt_tokens)[0]]
        self.mu = None  # [1, frames, 80], of all tokens: small, and needed if all is to be computed anew
        self.looked = 0  # tokens that mu covers
        self.hidden = None
        self.done = 0  # frames, the prompt's included
        self.frames = 0
        self.states = [DiTState(flow._depth) for _ in range(steps)]

    @property
    def bytes_per_frame(self):
        """Of the kept keys and values: two of them, in both rows, for each step and layer."""
        block = self.flow.dit.blocks[0]
        return 4 * self.steps * self.flow._depth * block._heads * block._dim_head * self.flow.dit.proj_in.weight.dtype.size

    def add(self, tokens, last=False):
        """Take more tokens (ints) -> mel float32 [1, n, 80]: the frames that can be told now, all of them if `last`."""
        flow = self.flow
        self.tokens += [int(t) for t in tokens]
        self._look(last)
        total = 0 if self.mu is None else self.mu.shape[1]
        ready = total if last else total // flow._chunk * flow._chunk
        if ready <= self.done:
            return mx.zeros((1, 0, MEL))
        room = -(-ready // CACHE_STEP) * CACHE_STEP
        if self.states is not None and room * self.bytes_per_frame > self.budget:
            self.states = None
        if self.states is None:
            mask = flow.dit.chunk_mask(0, ready)
            mel = flow.solve(self.mu[:, :ready], self.prompt_mel, self.speaker, self.modulations, mask=mask)
            mel = mel[:, self.done :]
        else:
            start = self.done
            mask = flow.dit.chunk_mask(start, ready - start)
            mel = flow.solve(self.mu[:, start:ready], self.prompt_mel, self.speaker, self.modulations, mask=mask,
                             start=start, states=self.states)  # fmt: skip
        before, self.done = self.done, ready
        mel = mel[:, max(0, self.prompt_mel.shape[1] - before) :]
        self.frames += mel.shape[1]
        return mel

    def _look(self, last):
        """Extend mu by the tokens whose look-ahead is there."""
        flow = self.flow
        stop = len(self.tokens) if last else len(self.tokens) - flow.look_ahead
        if stop <= self.looked:
            return
        x = flow.embed(mx.array([self.tokens[self.looked : stop]]))
        ahead = None if last else flow.embed(mx.array([self.tokens[stop:]]))
        x, self.hidden = flow.pre_lookahead_layer(x, ahead, self.hidden)
        mu = mx.repeat(x, flow._ratio, axis=1)
        self.mu = mu if self.mu is None else mx.concatenate([self.mu, mu], axis=1)
        self.looked = stop
        mx.eval(self.mu, self.hidden)


def default_budget():
    """Bytes: a quarter of what the GPU may use, else 2 GB."""
    if not mx.is_available(mx.gpu):
        return 2e9
    info = mx.device_info(mx.gpu)  # Metal names the first two, CUDA the last
    names = ("max_recommended_working_set_size", "memory_size", "total_memory")
    return next((info[n] for n in names if info.get(n)), 8e9) / 4


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
    """Upstream's flow.pt ({key: numpy array}) -> this module's names and layouts; what is converted passes unchanged."""
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
