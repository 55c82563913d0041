"""Several utterances decoded in one batch by a speech language model.

Each row begins by itself, as it would alone; then its keys and values move in with the others', their ends side by
side, so that what is shorter begins later (a mask hides what is before it). A row leaves when it ends, and the next one
that waits takes its place. Every row draws with its own random key, counts its own limits and may have options of its
own: what comes is what comes alone, but for what sums in another order round differently.

Letters: B rows, S positions of the longest row.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlx_cosyh3 import trace
from mlx_cosyh3.cosyvoice.llm import CLEAR_EVERY, SpeechTokens, Whole, not_finite
from mlx_cosyh3.cosyvoice.qwen2 import CACHE_STEP, JointCache
from mlx_cosyh3.cosyvoice.ras import RowDraws, State


class Rows(NamedTuple):
    """What a language model has to know of rows of different lengths, for one new position of each."""

    positions: mx.array  # int32 [B], of the new ones, counted from where each row begins
    mask: mx.array  # bool [B, 1, 1, S + 1]


class RaggedCache(list):
    """The caches of several sequences as one cache, a list of one a layer.

    lengths   positions of each row; the longest one's are all there are"""

    def __init__(self, caches=(), lengths=()):
        super().__init__(caches)
        self.lengths = list(lengths)
        longest = max(self.lengths, default=0)
        self._starts = mx.array([longest - n for n in self.lengths], dtype=mx.int32)
        self._even = len(set(self.lengths)) <= 1

    def rows(self):
        """Rows for the next position; None if they are all of one length."""
        if self._even:
            return None
        S = self[0].offset
        mask = mx.arange(S + 1)[None] >= self._starts[:, None]
        return Rows(S - self._starts, mask[:, None, None])

    def moved_on(self):
        """Every row got one more position."""
        self.lengths = [n + 1 for n in self.lengths]

    def changed(self, keep, new):
        """A RaggedCache of the rows with the indices `keep`, and of `new`, caches of one sequence each."""
        lengths = [self.lengths[r] for r in keep] + [c[0].offset for c in new]
        if not lengths:
            return RaggedCache()
        picked = mx.array(keep, dtype=mx.int32)
        layers = zip(*([self] if keep else []), *new)
        made = RaggedCache([_together(caches, picked if keep else None, max(lengths)) for caches in layers], lengths)
        mx.async_eval([getattr(c, name) for c in made for name in _buffers(c)])
        return made


def _buffers(cache):
    return ("both",) if isinstance(cache, JointCache) else ("keys", "values")


def _together(caches, picked, longest):
    """One layer's caches as one of `longest` positions, ends side by side. picked: which rows of the first to take."""
    # A RelativeCache also has a table of distances, the same in all but for its length.
    richest = max(caches, key=lambda c: getattr(c, "high", 0))
    made = type(richest)()
    made.__dict__.update(richest.__dict__)
    made.offset = longest
    capacity = -(-(longest + 1) // CACHE_STEP) * CACHE_STEP
    for name in _buffers(made):
        parts = []
        for n, cache in enumerate(caches):
            a = getattr(cache, name)[:, :, max(0, cache.offset - longest) : cache.offset]
            a = a[picked] if n == 0 and picked is not None else a
            before = longest - a.shape[2]
            parts.append(mx.pad(a, [(0, 0), (0, 0), (before, capacity - longest), (0, 0)]))
        setattr(made, name, parts[0] if len(parts) == 1 else mx.concatenate(parts))
    return made


@dataclass(eq=False)
class Row:
    """One utterance in a batch.

    tokens    speech ids so far
    error     what ended it, if something went wrong
    stopped   set by who consumes: it needs no more, and leaves before the next step
    seconds   its share of the time that the batch took"""

    run: SpeechTokens
    tokens: list = field(default_factory=list)
    error: Exception = None
    stopped: bool = False
    ended: bool = False
    seconds: float = 0.0

    def end(self, reason=None, error=None):
        self.ended, self.error = True, error
        self.run.finish_reason = reason
        self.run.close()

    def begin(self):
        """Work out what the model reads first, and its bounds."""
        if not isinstance(self.run.plan, Whole):
            raise TypeError("text that arrives in pieces cannot be decoded in a batch")
        self.least, self.most = self.run.plan.bounds(self.run.options)
        self.drawn = 0  # draws that are under way or done

    @property
    def bound(self):
        """Whether its next draw must not be the end."""
        return self.drawn < self.least


def decode(lm, waiting, most, clock):
    """Decode the Rows of the iterator `waiting`, at most `most` at a time. Yields the rows that got a token or ended,
    after each step; a row that ended has `finish_reason` in its run, or an error, or was stopped.

    lm      with `last_logits`, `embed_drawn` and a config, as SpeechLM
    clock   () -> seconds"""
    batch, begin, steps = Batch(lm), clock(), 0
    more = True
    while more or batch.rows:
        changed, new = [], []
        while more and len(batch.rows) + len(new) < most:
            row = next(waiting, None)
            more = row is not None
            if more:
                changed += [] if batch.begin(row, new) else [row]
        batch.change([r for r, row in enumerate(batch.rows) if not row.ended], new)
        if batch.rows:
            changed += batch.step()
        now = clock()
        for row in changed:
            row.seconds += (now - begin) / len(changed)
        trace.record("llm", begin, now, rows=len(changed))
        begin, steps = now, steps + 1
        if steps % CLEAR_EVERY == 0:
            mx.clear_cache()
        if changed:
            yield changed
        batch.drop([row for row in batch.rows if row.stopped and not row.ended])
        if any(row.ended for row in batch.rows):
            batch.change([r for r, row in enumerate(batch.rows) if not row.ended], [])


class Batch:
    """The rows that are being decoded. `_ids` and `_lse`: what was drawn for each and not read yet."""

    def __init__(self, lm):
        self.rows = []
        self._lm, self._cache, self._groups = lm, RaggedCache(), []
        self._ids = self._lse = None
        self._not_yet = mx.array(np.arange(lm.config.speech_vocab_size) != lm.config.speech_token_size)[None]

    def begin(self, row, new):
        """Let `row` read its text and draw its first id, in a batch of its own -> whether it is to go on, in `new`."""
        try:
            row.begin()
            if row.most <= 0:
                row.end("length")
                return False
            options = row.run.options
            sampler = options.sampler()
            cache = self._lm.make_cache()
            logits = self._lm.last_logits(row.run.plan.prefix(), cache)
            draws = None if sampler.greedy else RowDraws.start(row.run.key)
            group = Group(options, sampler, [row], sampler.start(draws))
            ids, lse = group.draw(logits, self._not_yet)
            mx.async_eval(ids, lse, group.state.arrays())
        except Exception as e:  # its own: the others go on
            row.end(error=e)
            return False
        new.append((row, group, cache, ids, lse))
        return True

    def change(self, keep, new):
        """Go on with the rows of the indices `keep`, and those that `begin` gave."""
        if len(keep) == len(self.rows) and not new:
            return
        staying = [self.rows[r] for r in keep]
        self._cache = self._cache.changed(keep, [n[2] for n in new])
        self.rows = staying + [n[0] for n in new]
        self._groups = Group.of([g.only(staying) for g in self._groups] + [n[1] for n in new])
        picked = mx.array(keep, dtype=mx.int32)
        for name, place in (("_ids", 3), ("_lse", 4)):
            old = [getattr(self, name)[picked]] if keep else []
            parts = old + [n[place] for n in new]
            setattr(self, name, mx.concatenate(parts) if parts else None)

    def drop(self, rows):
        for row in rows:
            row.end()

    def step(self):
        """Dispatch the next draw of all rows, then read the last -> the rows."""
        ids, lse = self._ids, self._lse
        if any(row.drawn < row.most for row in self.rows):
            self._dispatch()
        size = self._lm.config.speech_token_size
        for row, token, z in zip(self.rows, ids.tolist(), lse.tolist()):
            if not math.isfinite(z):
                row.end(error=not_finite(len(row.tokens) + 1))
            elif token >= size:
                row.end("stop")
            else:
                row.tokens.append(token)
                if len(row.tokens) >= row.most:
                    row.end("length")
        return list(self.rows)

    def _dispatch(self):
        logits = self._lm.last_logits(self._lm.embed_drawn(self._ids), self._cache, self._cache.rows())
        self._cache.moved_on()
        if len(self._groups) == 1:
            self._ids, self._lse = self._groups[0].draw(logits, self._not_yet)
        else:
            drawn = [g.draw(logits[g.places(self.rows)], self._not_yet) for g in self._groups]
            order = np.argsort([self.rows.index(row) for g in self._groups for row in g.rows])
            back = mx.array(order.astype(np.int32))
            self._ids, self._lse = (mx.concatenate(parts)[back] for parts in zip(*drawn))
        mx.async_eval(self._ids, self._lse, [g.state.arrays() for g in self._groups])


class Group:
    """The rows of a batch that are drawn with the same options, in the order of their states."""

    def __init__(self, options, sampler, rows, state):
        self.options, self.sampler, self.rows, self.state = options, sampler, rows, state
        self._kept = None  # (which rows are bound, the mask for it)

    @classmethod
    def of(cls, groups):
        """`groups` with those of the same options put together, and without empty ones."""
        made = {}
        for g in groups:
            if g.rows:
                how = tuple(getattr(g.options, n) for n in ("temperature", "top_p", "top_k", "win_size", "tau_r"))
                made.setdefault(how, []).append(g)
        return [cls._joined(same) for same in made.values()]

    @classmethod
    def _joined(cls, groups):
        if len(groups) == 1:
            return groups[0]
        first = groups[0]
        window = mx.concatenate([g.state.window for g in groups])
        draws = None if first.state.draws is None else RowDraws.join([g.state.draws for g in groups])
        return cls(first.options, first.sampler, sum((g.rows for g in groups), []), State(window, draws))

    def only(self, rows):
        """The group of those of its rows that are among `rows`."""
        keep = [i for i, row in enumerate(self.rows) if row in rows]
        if len(keep) == len(self.rows) or not keep:
            return self if keep else Group(self.options, self.sampler, [], None)
        draws = None if self.state.draws is None else self.state.draws.take(keep)
        state = State(self.state.window[mx.array(keep)], draws)
        return Group(self.options, self.sampler, [self.rows[i] for i in keep], state)

    def places(self, rows):
        """Where its rows are among those of the batch, int32 [n]."""
        return mx.array([rows.index(row) for row in self.rows], dtype=mx.int32)

    def draw(self, logits, not_yet):
        """logits [n, V] -> (ids int32 [n], log-sum-exp [n]). not_yet: what may be drawn while a row is bound, [1, V]."""
        bound = [row.bound for row in self.rows]
        if self._kept is None or self._kept[0] != bound:
            free = mx.array([not b for b in bound])[:, None]
            self._kept = bound, not_yet if all(bound) else mx.logical_or(not_yet, free) if any(bound) else None
        ids, lse, self.state = self.sampler(logits, self.state, self._kept[1])
        for row in self.rows:
            row.drawn += 1
        return ids, lse
