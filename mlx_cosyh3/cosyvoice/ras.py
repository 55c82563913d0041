"""Repetition-aware sampling (VALL-E 2, arXiv 2406.05370), as CosyVoice does it in `utils/common.py: ras_sampling`.

1. Nucleus: of the ids by falling probability those before which less than `top_p` has gone by, `top_k` at most; draw
   one of them.
2. If it is among the last `win_size` ids `win_size * tau_r` times or more: leave it out, and draw from all the others.

A step is `kernels/ras.py`: one launch on a GPU. Nothing waits for its result, and the list of last ids is an array,
too, so that the step after can be dispatched before anyone has read this one.

Letters: B rows, V ids.
"""

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_cosyh3.kernels.ras import ras_step, shifted
from mlx_cosyh3.kernels.softmax import argmax_lse
from mlx_cosyh3.sampling import GREEDY_BELOW, next_keys

BLOCK = 256  # steps whose uniform numbers are made at once


class KeyDraws(NamedTuple):
    """Uniform numbers that follow from PRNG keys: two a step, used or not."""

    keys: mx.array  # uint32 [B, 2], of the next block
    block: mx.array  # fp32 [B, BLOCK, 2], in [0, 1)
    step: int  # within the block

    @classmethod
    def start(cls, keys):
        """`keys`: uint32 [B, 2], or [2] for one row."""
        keys, now = next_keys(keys.reshape(-1, 2))
        return cls(keys, mx.vmap(lambda key: mx.random.uniform(shape=(BLOCK, 2), key=key))(now), 0)

    def pair(self):
        """fp32 [B, 2]: for the nucleus, for the second draw."""
        return self.block[:, self.step]

    def after(self, fell_back):
        """The draws of the next step; these stay as they are, for going back. `fell_back`: bool [B]."""
        return self.start(self.keys) if self.step + 1 == BLOCK else self._replace(step=self.step + 1)


class RowDraws(NamedTuple):
    """The KeyDraws of rows that began at different times: each row draws what it draws alone."""

    keys: mx.array  # uint32 [B, 2], of each row's next block
    block: mx.array  # fp32 [B, BLOCK, 2]
    at: mx.array  # int32 [B, 1, 1]: the step of each row within its block
    steps: tuple  # the same

    @classmethod
    def start(cls, key):
        """One row that begins. `key`: uint32 [2]."""
        keys, block, _ = KeyDraws.start(key)
        return cls(keys, block, mx.array([[[0]]], dtype=mx.int32), (0,))

    @classmethod
    def join(cls, several):
        keys, block, at = (mx.concatenate([getattr(d, name) for d in several]) for name in ("keys", "block", "at"))
        return cls(keys, block, at, sum((d.steps for d in several), ()))

    def take(self, rows):
        """Those of the rows with these indices, a list."""
        picked = mx.array(rows)
        return RowDraws(self.keys[picked], self.block[picked], self.at[picked], tuple(self.steps[r] for r in rows))

    def pair(self):
        at = mx.broadcast_to(self.at, (len(self.steps), 1, 2))
        return mx.take_along_axis(self.block, at, axis=1)[:, 0]

    def after(self, fell_back):
        steps = tuple((s + 1) % BLOCK for s in self.steps)
        if 0 not in steps:
            return self._replace(at=self.at + 1, steps=steps)
        over = mx.array([s == 0 for s in steps])[:, None]
        fresh = KeyDraws.start(self.keys)  # of all, for those few
        return RowDraws(
            mx.where(over, fresh.keys, self.keys),
            mx.where(over[..., None], fresh.block, self.block),
            (self.at + 1) % BLOCK,
            steps,
        )


class RecordedDraws(NamedTuple):
    """Uniform numbers from a list, taken one after the other: one a step, two where a second draw is made.

    This replays a run of upstream whose draws were written down. Past the end of the list all are 0."""

    values: mx.array  # fp32 [B, N + 2]
    at: mx.array  # int32 [B, 1]: numbers taken so far

    @classmethod
    def start(cls, values):
        """`values`: numbers in [0, 1), [N] for one row or [B, N]."""
        values = np.asarray(values, dtype=np.float32).reshape(-1, np.shape(values)[-1])
        values = np.minimum(values, np.nextafter(np.float32(1), np.float32(0)))  # rounding to fp32 may have given 1
        return cls(mx.array(np.pad(values, [(0, 0), (0, 2)])), mx.array(np.zeros((len(values), 1), dtype=np.int32)))

    def pair(self):
        places = mx.minimum(self.at + mx.array([0, 1]), self.values.shape[1] - 1)
        return mx.take_along_axis(self.values, places, axis=1)

    def after(self, fell_back):
        return self._replace(at=self.at + 1 + fell_back[:, None].astype(mx.int32))


class State(NamedTuple):
    """What a step leaves for the next one."""

    window: mx.array  # int32 [B, win_size]: the last ids, the oldest first; -1 where there was none yet
    draws: object  # KeyDraws or RecordedDraws

    def arrays(self):
        return [self.window] + [a for a in self.draws or () if isinstance(a, mx.array)]

    def push(self, ids):
        """The state after `ids` (int32 [B]) that were not drawn."""
        return self._replace(window=shifted(self.window, ids))


class Sampler:
    """Draws ids step by step. Options:

    temperature      divides the logits; 0: always the likeliest id, without a look at repetitions
    top_p, top_k     of the nucleus (1 and 0: all ids)
    win_size, tau_r  when an id counts as repeated; win_size 0: never"""

    def __init__(self, *, temperature=1.0, top_p=0.8, top_k=25, win_size=10, tau_r=0.1):
        self.greedy = temperature < GREEDY_BELOW
        self._win_size = int(win_size)
        self._options = {
            "scale": 1.0 if self.greedy else 1.0 / temperature,
            "top_p": top_p,
            "top_k": top_k,
            "repeated": math.ceil(win_size * tau_r),  # occurrences from which on an id is left out
        }

    def start(self, draws, rows=1):
        return State(mx.full((rows, self._win_size), -1, dtype=mx.int32), draws)

    def __call__(self, logits, state, keep=None):
        """One step for logits fp32 [B, V] -> (ids int32 [B], their rows' log-sum-exp fp32 [B], the next State).

        keep   bool, broadcast to [B, V]: the ids that may be drawn, first or second
        A log-sum-exp that is not finite says that the logits were not."""
        if self.greedy:
            ids, lse = argmax_lse(logits, mask=keep)
            return ids, lse, state
        ids, lse, window, again = ras_step(logits, state.draws.pair(), state.window, keep, **self._options)
        return ids, lse, State(window, state.draws.after(again))
