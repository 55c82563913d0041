"""Speech tokens that outlive a failure on the GPU: the language model goes on, on the CPU, from the last good token.

Its caches are not to be trusted then. A second run reads the same text with the same draws; in place of drawing it
takes the ids that the first one drew, so that what follows is what would have followed, but for rounding.
"""

import itertools
from typing import NamedTuple

import mlx.core as mx


class SafeTokens:
    """Iterator of speech ids as `llm.SpeechTokens`, each under `request.guard("llm", ...)`.

    text   an iterator of text ids, for a model that reads while it speaks; None: it has read all"""

    def __init__(self, request, make, text=None):
        """make   (text ids or None) -> SpeechTokens, the same each time"""
        self._request, self._make = request, make
        self._text = None if text is None else _Text(request, text)
        self._run, self._given = make(self._text), 0

    @property
    def finish_reason(self):
        return self._run.finish_reason

    def __iter__(self):
        return self

    def __next__(self):
        token = self._request.guard("llm", self._next, again=self._again)
        if token is None:
            raise StopIteration
        self._given += 1
        return token

    def close(self):
        self._run.close()

    def _next(self):
        return next(self._run, None)

    def _again(self):
        self._run.close()
        drawn = self._run.drawn
        self._run = self._make(None if self._text is None else self._text.again())
        self._run._sampler = Replay(self._run._sampler, drawn)
        for _ in range(self._given):
            next(self._run)
        return self._next()


class _Text:
    """Text ids of the caller's, which can be read a second time."""

    def __init__(self, request, ids):
        self._request, self._ids, self._read = request, iter(ids), []

    def __iter__(self):
        return self

    def __next__(self):
        self._read.append(self._request.theirs(next, self._ids))
        return self._read[-1]

    def again(self):
        """All ids from the first one."""
        read, self._read = self._read, []
        self._ids = itertools.chain(read, self._ids)
        return self


class Replay:
    """A sampler whose first ids are given; their random numbers are taken all the same."""

    class State(NamedTuple):
        inner: object
        count: int  # ids so far

        def arrays(self):
            return self.inner.arrays()

        def push(self, ids):
            return self._replace(inner=self.inner.push(ids))

    def __init__(self, sampler, ids):
        self._sampler, self._ids, self.greedy = sampler, ids, sampler.greedy

    def start(self, draws, rows=1):
        return self.State(self._sampler.start(draws, rows), 0)

    def __call__(self, logits, state, keep=None):
        inner, n = state
        if n >= len(self._ids):
            ids, lse, inner = self._sampler(logits, inner, keep)
        else:
            ids, lse = mx.array([self._ids[n]], dtype=mx.int32), mx.zeros((1,))
            if not self.greedy:
                inner = inner.push(ids)._replace(draws=inner.draws.after(mx.array([False])))
        return ids, lse, self.State(inner, n + 1)
