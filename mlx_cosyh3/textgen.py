"""Text generation for language models: the decode loop, and generate / stream / batch on top of it.

The loop dispatches the next step before it reads the last token, so that a GPU never waits for Python. When a token
turns out to be the last, the step already dispatched is undone on the cache, which thus always holds exactly the
prompt and what was generated. Knows nothing of any model but `prefill`, `step`, `make_cache`, `tokenizer`, `config`.
"""

import threading
import time
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_cosyh3 import deadline, lighter, runtime, sampling, trace
from mlx_cosyh3.costs import costs_of
from mlx_cosyh3.errors import CosyH3Error, NotFiniteError, take_options
from mlx_cosyh3.results import TextResult
from mlx_cosyh3.stream import Stopped, Stream

CLEAR_EVERY = 256  # tokens between returns of MLX's free buffers to the system


@dataclass(kw_only=True)
class TextOptions:
    """What `generate`, `stream_generate` and `batch_generate` take for a language model.

    max_tokens           most tokens to draw
    temperature          0 = always the likeliest; top_k, top_p, min_p apply in this order (0, 1, 0 = off)
    repetition_penalty   > 1 makes tokens that occurred in this call's prompt or text less likely
    seed                 the same seed gives the same text, in any thread; None = another one each time
    stop                 text that ends the generation, and is not returned: a string or several
    cache                `model.make_cache()`: start from what it has read, and leave it after the text
    logprobs             return each token's log-probability, too
    policy               a runtime.Policy: on which device to run; None: as the environment says
    deadline             seconds in which the first token (streamed) or all of them are to be there: see deadline.py
    late                 what if that cannot be: "refuse" it before the work starts, or do one's "best" (at once: the
                         text that could be made in time)"""

    max_tokens: int = 256
    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.9
    min_p: float = 0.0
    repetition_penalty: float = None
    seed: int = None
    stop: tuple = ()
    cache: object = None
    logprobs: bool = False
    policy: object = None
    deadline: float = None
    late: str = "refuse"

    def __post_init__(self):
        sampling.check_options(
            self.max_tokens, self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty, self.seed
        )
        sampling.StopText(self.stop)
        deadline.check(self.deadline, self.late)
        runtime.check(self.policy)


class TextGeneration:
    """generate, stream_generate and batch_generate for a language model (a mix-in)."""

    def generate(self, prompt, **options):
        """Continue `prompt` (text, or a list of ids) -> TextResult. For the options see TextOptions.

        An empty prompt starts from the end-of-text token (with a cache that has read something: goes on from there).
        Raises CosyH3Error for a value out of range, text that cannot be encoded, or a cache of another model."""
        run = _Run(self, [prompt], take_options(TextOptions, options))
        for _ in run.steps():
            continue
        return run.result()

    def stream_generate(self, prompt, **options):
        """`generate` as an iterator of text pieces, none of which splits a character -> Stream.

        `stream.result` is there when the stream has ended or was closed."""
        return self.start(prompt, True, **options)

    def start(self, prompt, streamed, **options):
        """`stream_generate`, or with streamed=False `generate`, at work in a thread of its own -> Stream.

        The text comes in pieces either way; but a deadline is for the first token, or for all of them."""
        return Stream(_Run(self, [prompt], take_options(TextOptions, options), streamed))

    def batch_generate(self, prompts, **options):
        """`generate` for several prompts of any lengths at once -> list of TextResult.

        `seed` may be a list; with one seed s, row r draws what `generate` draws with s + r. `cache`, of one row or of
        as many as there are prompts, is where all start from; it is left as it was."""
        if isinstance(prompts, str):
            raise CosyH3Error(f"batch_generate takes a list of prompts, not the text {prompts[:40]!r}")
        o = take_options(TextOptions, options)
        if len(prompts) == 0:
            return []
        o.cache = None if o.cache is None else o.cache.repeated(len(prompts))
        run = _Run(self, list(prompts), o)
        for _ in run.steps():
            continue
        return run.results()


class _Run:
    """One generation of one or more rows, on the thread that iterates over `steps`.

    stopped   an event that ends it, also while it reads a long prompt
    waited    seconds that it waited for its turn before that, if somebody had it wait"""

    def __init__(self, model, prompts, options, streamed=False):
        o, cache = options, options.cache
        if cache is not None and cache.fingerprint != model.fingerprint:
            raise CosyH3Error("the cache belongs to another model: make one with model.make_cache()")
        if cache is not None and cache.batch_size != len(prompts):
            raise CosyH3Error(f"the cache holds {cache.batch_size} rows, but there are {len(prompts)} prompts")
        self.model, self.options, self.cache = model, o, cache
        self.tokenizer = model.tokenizer or _NoTokenizer()
        self.filters = {"temperature": o.temperature, "top_k": o.top_k, "top_p": o.top_p, "min_p": o.min_p}
        self.prompts = [self._ids(p) for p in prompts]
        self.rows = [_Row(self.tokenizer, sampling.StopText(o.stop)) for _ in prompts]
        self.prompt_tokens = [0] * len(prompts)
        self.prompt_seconds = self.seconds = 0.0
        self.stopped, self.waited, self._started = threading.Event(), 0.0, False
        policy = runtime.check(o.policy)
        self.request = policy.request()
        other = lighter.of(model) if cache is None else None  # the caller's cache is of this model
        self._weights = model, other
        costs = [None if m is None else costs_of(policy, m) for m in self._weights]
        self.control = deadline.TextController(costs[0], self.request, o.deadline, o.late, lighter=costs[1])
        self._streamed, self._length = streamed, max(1, sum(map(len, self.prompts)))
        self._plan()

    def _plan(self):
        """Settle what a deadline changes. Raises CosyH3Error if it cannot be met."""
        self.control.begin(self._length, self.options.max_tokens, self._streamed, len(self.rows))
        self.model = self._weights[self.control.lighter]

    def start(self):
        """The work begins: settle what the time in a queue has changed. Once; `steps` does it otherwise."""
        if not self._started:
            self._started = True
            if self.request.start(self.waited):
                self._plan()

    def _ids(self, prompt):
        """Ids of a prompt given as text or as ids; may be empty."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        ids, vocab = [int(i) for i in prompt], self.model.config.vocab_size
        for i in ids:
            if not 0 <= i < vocab:
                raise CosyH3Error(f"prompt id {i} is outside of the vocabulary (0 to {vocab - 1})")
        return ids

    def _start_ids(self):
        """What each row feeds first: the token a cache still owes, then the prompt; never nothing."""
        owed, eos = self.cache.pending, self.model.config.eos_token_id
        rows = [([owed[i]] if owed else []) + ids for i, ids in enumerate(self.prompts)]
        if any(not ids for ids in rows) and eos is None:
            raise CosyH3Error("the prompt is empty and the model names no end-of-text token to start from")
        return [ids or [eos] for ids in rows]

    def steps(self):
        """Draw token after token; yields what each row may show of it, a list of text."""
        self.start()
        model = self.model
        if self.cache is None:
            self.cache = model.make_cache(len(self.rows))
        cache, rows = self.cache, self._start_ids()
        lengths = np.array([len(ids) for ids in rows])
        ids = np.zeros((len(rows), lengths.max()), dtype=np.int32)
        for r, row in enumerate(rows):
            ids[r, : len(row)] = row
        self.seen = None if self.options.repetition_penalty is None else _seen(rows, model.config.vocab_size)
        self.keys = sampling.row_keys(self.options.seed, len(rows))
        self.prompt_tokens = lengths.tolist()

        self.first_keys = self.keys
        started = time.perf_counter()
        before, cache.pending = cache.copy(), None
        try:
            again = lambda *_: self._begin_again(before, rows)  # noqa: E731
            drawn = self.request.guard("text", self._begin, ids, lengths, again=again)
        except BaseException:  # interrupted, or out of memory: half a prompt is of no use to the caller
            cache.take_from(before)
            raise
        # What it was at first is kept only where it may be needed: it is as large as the context that came with it.
        theirs = self.options.cache is not None
        before = before if theirs or self.request.device("text") == "gpu" else None
        again = lambda n: self._turn(self._begin_again(before, rows), n)  # noqa: E731
        self.prompt_seconds = time.perf_counter() - started
        trace.record("prompt", started, started + self.prompt_seconds)
        self.control.prompt_read(int(lengths.sum()), self.prompt_seconds)
        first = self.request.worked
        owed, worked, spoilt = None, 0.0, False
        try:
            for n in range(self.options.max_tokens):
                begin = time.perf_counter()
                following, values = self.request.guard("text", self._turn, drawn, n, again=lambda _, n: again(n))
                now = time.perf_counter()
                worked += now - begin
                trace.record("tokens", begin, now)
                owed, texts = self._take(values, n, self.control.enough(now - begin))
                self.seconds = now - started - self.prompt_seconds
                self.request.breathe("text", now - begin)
                yield texts
                if all(row.finish_reason for row in self.rows):
                    break
                drawn = following
                if n % CLEAR_EVERY == CLEAR_EVERY - 1:
                    mx.clear_cache()
        except Exception:
            spoilt = theirs  # what it holds now is not to be trusted
            raise
        finally:  # also when the caller stops asking
            if spoilt:
                cache.take_from(before)
            else:
                cache.rewind(self.mark)
                cache.pending = owed
            made = max(len(row.tokens) for row in self.rows)
            if made > 1:
                self.control.tokens_made(made - 1, worked)
            whole = self.request.worked if all(row.finish_reason for row in self.rows) else None
            self.control.ended(first if self._streamed else whole)

    def _begin(self, ids, lengths):
        """Read the prompts and draw the first token of each."""
        drawn = self._draw(self.model.prefill(mx.array(ids), self.cache, lengths, on_chunk=self.between))
        mx.eval(drawn)
        self.mark = self.cache.mark()
        return drawn

    def between(self, seconds):
        """After a part of a long prompt, which took `seconds`: let others have the device."""
        if self.stopped.is_set():
            raise Stopped
        self.request.breathe("text", seconds)

    def _begin_again(self, before, rows):
        """`_begin` from the cache as it was `before`, the tokens so far being part of the prompts: what was computed
        since is not to be trusted."""
        self.cache.take_from(before)
        self.cache.pending = None
        so_far = [ids + row.tokens for ids, row in zip(rows, self.rows)]
        lengths = np.array([len(ids) for ids in so_far])
        padded = np.zeros((len(so_far), lengths.max()), dtype=np.int32)
        for r, row in enumerate(so_far):
            padded[r, : len(row)] = row
        if self.seen is not None:
            self.seen = _seen(so_far, self.model.config.vocab_size)
        self.keys = self.first_keys
        for _ in range(max(len(row.tokens) for row in self.rows)):
            self.keys, _ = sampling.next_keys(self.keys)
        return self._begin(padded, lengths)

    def _turn(self, drawn, n):
        """Dispatch the step that follows on `drawn`, and wait for `drawn` -> (that step or None, its `_values`)."""
        self.mark, following = self.cache.mark(), None
        if n + 1 < self.options.max_tokens:
            following = self._draw(self.model.step(drawn[0], self.cache))
            mx.async_eval(following)
        return following, self._values(drawn, n)

    def _draw(self, logits):
        """logits [B, padded vocabulary] -> ids int32 [B], whether all was finite, log-probabilities [B] (or nothing)."""
        raw = logits[:, : self.model.config.vocab_size]
        logits = raw if self.seen is None else sampling.penalize(raw, self.seen, self.options.repetition_penalty)
        self.keys, now = sampling.next_keys(self.keys)
        ids = sampling.sample(logits, now, **self.filters)
        if self.seen is not None:
            self.seen = mx.put_along_axis(self.seen, ids[:, None], mx.array(True), axis=1)
        drawn = [ids, mx.isfinite(raw).all()]
        if self.options.logprobs:
            raw = raw.astype(mx.float32)
            picked = mx.take_along_axis(raw, ids[:, None], axis=-1)[:, 0]
            drawn.append(picked - mx.logsumexp(raw, axis=-1))
        return drawn

    def _values(self, drawn, n):
        """Wait for a drawn step -> (ids, log-probabilities), lists."""
        if not drawn[1].item():
            raise NotFiniteError(
                f"the model gave a non-finite value (inf or NaN) at token {n + 1}: try --dtype float32"
            )
        tokens = drawn[0].tolist()
        return tokens, drawn[2].tolist() if self.options.logprobs else [None] * len(tokens)

    def _take(self, values, n, enough):
        """Hand a drawn step to the rows -> (the ids the cache does not hold yet, or None; new texts).

        enough   no more is to be drawn"""
        tokens, logprobs = values
        eos = self.model.config.eos_token_id
        last = enough or n + 1 == self.options.max_tokens
        texts = [row.add(t, p, t == eos, last) for row, t, p in zip(self.rows, tokens, logprobs)]
        # After an end-of-text token the cache holds the text before it, so that a caller may go on.
        return (None if len(tokens) == 1 and tokens[0] == eos else tokens), texts

    def pieces(self):
        """The text of a single row, piece by piece (some empty): what a Stream runs."""
        try:
            for texts in self.steps():
                yield texts[0]
        except Stopped:
            return

    def result(self):
        return self.results()[0]

    def results(self):
        for row in self.rows:
            if row.finish_reason is None:  # cut short by the caller; the cache holds all its tokens, so show them all
                row.text.append(row.end("cancelled"))
        return [
            TextResult(
                finish_reason=row.finish_reason,
                seconds={"prompt": self.prompt_seconds, "generation": self.seconds},
                text="".join(row.text),
                tokens=row.tokens,
                logprobs=row.logprobs if self.options.logprobs else None,
                prompt_tokens=count,
                prompt_tps=count / max(self.prompt_seconds, 1e-9),
                generation_tps=max(0, len(row.tokens) - 1) / max(self.seconds, 1e-9),  # the first came with the prompt
                decisions=list(self.request.decisions),
            )
            for row, count in zip(self.rows, self.prompt_tokens)
        ]


def _seen(rows, vocab):
    """Which ids occur in each list of `rows`: bool [B, vocab]."""
    seen = np.zeros((len(rows), vocab), dtype=bool)
    for r, row in enumerate(rows):
        seen[r, row] = True
    return mx.array(seen)


class _NoTokenizer:
    """For a model that came without one: ids in, ids out, no text."""

    def encode(self, text):
        raise CosyH3Error("the model has no tokenizer: pass the prompt as a list of ids")

    def detokenizer(self):
        return self

    def add(self, token):
        return ""

    def finish(self):
        return ""


class _Row:
    """The text of one row as it grows."""

    def __init__(self, tokenizer, stop):
        self.detokenizer, self.stop = tokenizer.detokenizer(), stop
        self.tokens, self.logprobs, self.text, self.finish_reason = [], [], [], None

    def add(self, token, logprob, is_eos, is_last):
        """Take one more token; returns the text that can be shown because of it."""
        if self.finish_reason:  # other rows of the batch still go on
            return ""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        text = "" if is_eos else self.stop.add(self.detokenizer.add(token))
        if self.stop.stopped:
            self.finish_reason = "stop"
        elif is_eos or is_last:
            text += self.end("stop" if is_eos else "length")
        self.text.append(text)
        return text

    def end(self, reason):
        """No more tokens come; returns the text that was held back for them."""
        self.finish_reason = reason
        return self.stop.add(self.detokenizer.finish()) + self.stop.finish()
