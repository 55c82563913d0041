"""What the flows of CosyVoice 2 and 3 share: speech tokens -> mel frames, all at once or as the tokens come.

A version's flow says what is its own: how tokens become `mu`, the frames' first guess (`encode`), and which network
moves noise from there to a mel spectrogram (`network`). After upstream's cosyvoice/flow/flow.py.
"""

import copy

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cosyh3.cosyvoice import cfm, noise
from mlx_cosyh3.cosyvoice.conv import Conv1d
from mlx_cosyh3.cosyvoice.qwen2 import CACHE_STEP
from mlx_cosyh3.cosyvoice.token_flow import MEL, TokenFlow
from mlx_cosyh3.errors import CosyH3Error


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


class CausalFlow(TokenFlow):
    """A flow whose frames see, with the streaming mask, their own chunk and what comes before it.

    A version gives
        network                          (x, cond, mu, speaker, modulation, mask, state) -> velocity, all [B, T, 80];
                                         with `modulations(times)` and `chunk_mask(start, frames)`
        make_state()                     an empty state of the network for one step: `caches` (each a KVCache),
                                         `contexts`, a list of whatever else it carries, and `arrays()`
        encode(x, ahead, streaming, state, lengths) -> mu; see `Flow.encode`
        make_encoder_state()             what `encode` carries from tokens to those that follow
        step_bytes                       of the keys and values that a frame leaves in the network, in one step"""

    def __init__(self, config, dims):
        """dims   width of the tokens' embedding"""
        super().__init__(config, dims)
        self.look_ahead = config.look_ahead  # tokens
        self.chunk = 1  # tokens that `encode` needs together when it streams
        self.chunk_frames = 1  # mel frames that the network needs together

    def __call__(
        self, tokens, prompt_tokens, prompt_mel, embedding, *, streaming=False, finalize=True, steps=10, on_step=None
    ):
        """Mel frames float32 [1, n, 80] for `tokens` (upstream's `inference`).

        tokens, prompt_tokens   int [1, T], [1, P];  prompt_mel [1, M, 80], most often M = 2 P;  embedding [1, 192]
        streaming   use the chunk mask, as chunk-wise generation does
        finalize    False: the last tokens are only looked ahead at
        steps       of the flow, at least 1
        on_step     called with the number of steps done after each
        Raises CosyH3Error for tokens out of range, 0 steps, more than 300 s, or values that are not finite."""
        modulations = self.modulations(steps)
        x = self.embed(mx.concatenate([prompt_tokens, tokens], axis=1))  # [1, P + T, C]
        count = x.shape[1] if finalize else x.shape[1] - self.look_ahead
        if count <= 0:
            return mx.zeros((1, 0, MEL))
        mu = self.encode(x[:, :count], x[:, count:], streaming)  # [1, frames, 80]
        mask = self.network.chunk_mask(0, mu.shape[1]) if streaming else None
        mel = self.solve(mu, prompt_mel, self.speaker(embedding), modulations, on_step=on_step, mask=mask)
        return mel[:, prompt_mel.shape[1] :]

    def together(self, rows, *, streaming=False, steps=10, on_step=None):
        """Mel frames of several utterances in one batch -> a list of float32 [1, n, 80]: each what `self` makes of the
        row alone, but for what sums in another order round differently.

        rows   (tokens, prompt_tokens, prompt_mel, embedding) of each, as for `self`; the shorter ones are padded
        The other arguments are those of `self`, the errors, too: one row that has them fails all."""
        if len(rows) == 1:
            return [self(*rows[0], streaming=streaming, steps=steps, on_step=on_step)]
        modulations = self.modulations(steps)
        each = [self.embed(mx.concatenate([prompt, tokens], axis=1)) for tokens, prompt, _, _ in rows]
        lengths = [x.shape[1] for x in each]
        x = mx.concatenate([_padded(x, max(lengths)) for x in each])  # [B, T, C], zeros beyond the ends
        lengths = None if len(set(lengths)) == 1 else lengths
        mu = self.encode(x, x[:, :0], streaming, lengths=lengths)  # [B, frames, 80]
        T, ratio = mu.shape[1], mu.shape[1] // x.shape[1]
        check_length(T)
        mask = self.network.chunk_mask(0, T) if streaming else None
        frames = [ratio * n for n in lengths or [x.shape[1]] * len(rows)]
        if lengths is not None:
            mask = both(mask, length_mask(frames + frames, T))
        cond = mx.concatenate([_padded(mel[:, :T], T) for _, _, mel, _ in rows])
        speaker = self.speaker(mx.concatenate([embedding for *_, embedding in rows]))
        velocity = self._velocity(mu, cond, speaker, modulations, mask)
        noises = mx.broadcast_to(mx.array(noise.cfm_noise(T)), mu.shape)
        mel = cfm.euler(noises, len(modulations), velocity, self._guidance, on_step)
        return [mel[r : r + 1, prompt.shape[1] : n] for r, (n, (_, _, prompt, _)) in enumerate(zip(frames, rows))]

    def modulations(self, steps):
        """What `solve` takes for so many steps."""
        return self.network.modulations(cfm.times(steps)[0])

    def solve(self, mu, prompt_mel, speaker, modulations, *, on_step=None, mask=None, start=0, states=None, keep=True):
        """Mel float32 [1, T, 80] of the frames from `start`, whose `mu` this is.

        states   the network's, one a step, which hold the frames before `start`
        keep     whether these frames are added to the states"""
        T, M = mu.shape[1], prompt_mel.shape[1]
        check_length(start + T)
        cond = mx.zeros(mu.shape)
        if start < M:
            cond = mx.concatenate([prompt_mel[:, start : start + T], cond[:, min(T, M - start) :]], axis=1)
        velocity = self._velocity(mu, cond, speaker, modulations, mask, states, keep)
        x = mx.array(noise.cfm_noise(start + T)[:, start:])
        return cfm.euler(x, len(modulations), velocity, self._guidance, on_step)

    def _velocity(self, mu, cond, speaker, modulations, mask, states=None, keep=True):
        """What `cfm.euler` asks, for B utterances: mu, cond [B, T, 80], speaker [B, 80]."""
        nothing = mx.zeros_like(mu)
        mu, cond = mx.concatenate([mu, nothing]), mx.concatenate([cond, nothing])  # then without the conditions
        speaker = mx.concatenate([speaker, mx.zeros_like(speaker)])

        def velocity(x, k):
            state = None if states is None else states[k] if keep else _aside(states[k])
            v = self.network(x, cond, mu, speaker, modulations[k], mask, state)
            if states is not None and keep:
                mx.async_eval(v, state.arrays())  # lazy ones would keep the whole step alive
            return v

        return velocity

    def stream(self, prompt_tokens, prompt_mel, embedding, *, steps=10, memory_budget=None):
        """Chunk-wise generation -> FlowStream. memory_budget: bytes that the network's keys and values may take."""
        budget = default_budget() if memory_budget is None else memory_budget
        return FlowStream(self, prompt_tokens, prompt_mel, embedding, steps, budget)


class FlowStream:
    """Mel frames of a growing list of tokens: equal to `flow(all tokens, streaming=True)`.

    Only complete chunks of the mask are computed (and the rest at the end), each once: keys, values and convolution
    inputs of every step and layer are kept. Where the memory budget ends, they are not: all that follows is computed
    anew for each chunk, which gives the same result in a time that grows.

    frames   new mel frames that have been returned
    keep     frames, the prompt's included, of which keys and values are kept at most"""

    def __init__(self, flow, prompt_tokens, prompt_mel, embedding, steps, budget):
        self.flow, self.steps, self.budget = flow, steps, budget
        self.modulations = flow.modulations(steps)
        self.prompt_mel, self.speaker = prompt_mel, flow.speaker(embedding)
        self.tokens = [int(t) for t in np.array(prompt_tokens)[0]]
        self.mu = mx.zeros((1, 0, MEL))  # of all tokens: small, and needed where frames are computed anew
        mx.eval(self.modulations, self.prompt_mel, self.speaker, self.mu)
        self.encoded = 0  # tokens that mu covers
        self.encoder = flow.make_encoder_state()
        self.states = [flow.make_state() for _ in range(steps)]
        self.kept = 0  # frames that the states hold
        self.done = 0  # frames that have been told, the prompt's included
        self.frames = 0
        room = int(min(budget / self.bytes_per_frame, noise.FRAMES + CACHE_STEP)) // CACHE_STEP * CACHE_STEP
        self.keep = room // flow.chunk_frames * flow.chunk_frames

    @property
    def bytes_per_frame(self):
        """Of the kept keys and values: of all steps and layers."""
        return self.steps * self.flow.step_bytes

    def add(self, tokens, last=False, on_step=None):
        """Take more tokens (ints) -> mel float32 [1, n, 80]: the frames that can be told now, all of them if `last`.

        on_step   called with the number of steps done after each, if there is anything to compute
        Errors are those of the flow; a stream that raised one, or whose on_step did, is of no further use."""
        self.tokens += [int(t) for t in tokens]
        self._encode(last)
        size, total = self.flow.chunk_frames, self.mu.shape[1]
        ready = total if last else total // size * size
        if ready <= self.done:
            return mx.zeros((1, 0, MEL))
        passes = [(ready, ready <= self.keep)]  # up to which frame, and whether to keep it
        if ready > self.keep > self.kept and not last:
            passes.insert(0, (self.keep, True))
        parts = []
        for n, (stop, keep) in enumerate(passes):
            progress = None if on_step is None else lambda k, n=n: on_step((n * self.steps + k) // len(passes))
            parts.append(self._solve(stop, keep, progress))
        mel = mx.concatenate(parts, axis=1)
        self.frames += mel.shape[1]
        return mel

    def _solve(self, stop, keep, on_step):
        """Mel of the frames from `done` to `stop`, without the prompt's."""
        flow, start = self.flow, self.kept
        mel = flow.solve(
            self.mu[:, start:stop], self.prompt_mel, self.speaker, self.modulations, on_step=on_step,
            mask=flow.network.chunk_mask(start, stop - start), start=start, states=self.states, keep=keep,
        )  # fmt: skip
        mel = mel[:, max(self.done, self.prompt_mel.shape[1]) - start :]
        self.done = stop
        if keep:
            self.kept = stop
        return mel

    def _encode(self, last):
        """Extend mu by the tokens whose look-ahead is there, in complete chunks of the encoder's mask."""
        flow = self.flow
        stop = len(self.tokens) if last else (len(self.tokens) - flow.look_ahead) // flow.chunk * flow.chunk
        if stop <= self.encoded:
            return
        x = flow.embed(mx.array([self.tokens[self.encoded : stop + flow.look_ahead]]))
        count = stop - self.encoded
        mu = flow.encode(x[:, :count], x[:, count:], True, self.encoder)
        self.mu = mx.concatenate([self.mu, mu], axis=1)
        self.encoded = stop
        mx.eval(self.mu, self.encoder.arrays())


def check_length(frames):
    """Raise CosyH3Error if there is no noise for so many mel frames."""
    if frames > noise.FRAMES:
        raise CosyH3Error(
            f"{frames / 50:.0f} s of speech, the voice's own included, are too long for one piece: at most "
            f"{noise.FRAMES // 50} s; split the text"
        )


def length_mask(lengths, size):
    """bool [B, 1, 1, size]: what is within each row's length."""
    return (mx.arange(size) < mx.array(lengths)[:, None])[:, None, None]


def both(mask, other):
    return other if mask is None else mx.logical_and(mask, other)


def _padded(x, length):
    """x [1, T, C] with zeros up to `length`."""
    return mx.pad(x, [(0, 0), (0, length - x.shape[1]), (0, 0)])


class _Kept:
    """A layer's cache as it is: what is appended is seen once, and not kept."""

    def __init__(self, cache):
        self.keys, self.values, self.offset = cache.keys, cache.values, cache.offset

    def append(self, keys, values):
        if self.offset:
            keys = mx.concatenate([self.keys[:, :, : self.offset], keys], axis=2)
            values = mx.concatenate([self.values[:, :, : self.offset], values], axis=2)
        return keys, values


def _aside(state):
    """A copy of a network's state, for frames that are not to be added to it."""
    twin = copy.copy(state)
    twin.caches, twin.contexts = [_Kept(c) for c in state.caches], list(state.contexts)
    return twin


def default_budget():
    """Bytes: a quarter of what the GPU may use, else 2 GB."""
    if not mx.is_available(mx.gpu):
        return 2e9
    info = mx.device_info(mx.gpu)  # Metal names the first two, CUDA the last
    names = ("max_recommended_working_set_size", "memory_size", "total_memory")
    return next((info[n] for n in names if info.get(n)), 8e9) / 4
