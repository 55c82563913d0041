"""How well a model predicts a text: perplexity and bits per byte, in constant memory.

The text's n tokens are each scored once, given those before them in the same window:

    nll = -log p(token | window's tokens before it),  p over the true vocabulary (padding rows excluded)
    mean_nll = sum nll / n   (nats per token);   perplexity = exp(mean_nll)
    bits_per_byte = sum nll / (ln 2 * bytes of the text in UTF-8)

A window is `context` tokens long and starts from the end-of-text token and an empty state; context 0 is one window
for the whole text. Bits per byte can be compared between models with different tokenizers, perplexity cannot.
"""

import math
import re
from dataclasses import dataclass

import mlx.core as mx

from mlx_cosyh3.errors import CosyH3Error, NotFiniteError

LOGITS = 2**24  # most logits that are computed at once: 64 MB in fp32
PIECE = 2**16  # characters of text that are tokenised at once
LONGEST_WORD = 2**20  # characters without a place to cut before one is cut anyway, which may change a token or two

# The tokenizer never joins a visible character with white space that follows it, so ids of text cut there are the
# ids of the whole.
CUT = re.compile(r".*\S(?=[ \n])", re.DOTALL)


@dataclass
class Perplexity:
    """`tokens` scored, `bytes` of text (UTF-8), `mean_nll` in nats per token."""

    tokens: int
    bytes: int
    mean_nll: float

    @property
    def perplexity(self):
        return math.exp(self.mean_nll) if self.mean_nll < 709 else math.inf

    @property
    def bits_per_byte(self):
        return self.mean_nll * self.tokens / (math.log(2) * self.bytes)


def perplexity(model, text, context=512):
    """Score `text`, a string or an iterable of its pieces -> Perplexity.

    `context`: tokens per window; 0 = one window, in which only attention layers use more memory as it grows.
    Raises CosyH3Error for an empty text, a context below 0, or a model that gives NaN.
    """
    if isinstance(context, bool) or not isinstance(context, int) or context < 0:
        raise CosyH3Error(f"context must be a whole number of tokens from 0 (0 = the whole text), not {context!r}")
    vocab, eos = model.config.vocab_size, model.config.eos_token_id
    if eos is None:
        raise CosyH3Error("the model has no end-of-text token to start from (eos_token_id in its config.json)")
    size = {"tokens": 0, "bytes": 0}
    at_once = max(1, LOGITS // model.config.padded_vocab_size)
    total, cache, previous, room = 0.0, model.make_cache(), eos, context
    for ids in _blocks(_ids(model.tokenizer, text, size), context, at_once):
        if context and room == 0:
            cache.reset()
            previous, room = eos, context
        inputs = mx.array([[previous, *ids[:-1]]])  # [1, T]
        logits = model(inputs, cache)[0, :, :vocab].astype(mx.float32)  # [T, vocab]
        picked = mx.take_along_axis(logits, mx.array(ids)[:, None], axis=-1)[:, 0]
        nll = (mx.logsumexp(logits, axis=-1) - picked).sum()
        mx.eval(nll, cache.arrays())  # before the next block's graph is built on top of this state
        if not math.isfinite(nll.item()):
            raise NotFiniteError(
                f"the model gave no finite probability between tokens {size['tokens']} and "
                f"{size['tokens'] + len(ids)}: the weights or their precision cannot hold this text"
            )
        total += nll.item()
        size["tokens"] += len(ids)
        previous, room = ids[-1], room - len(ids)
    if size["tokens"] == 0:
        raise CosyH3Error("the text is empty: there is nothing to score")
    return Perplexity(size["tokens"], size["bytes"], total / size["tokens"])


def _ids(tokenizer, text, size):
    """Yield lists of ids that join to the ids of the whole text; adds up its bytes in size["bytes"]."""
    for piece in _cut(_pieces(text)):
        ids = tokenizer.encode(piece)
        size["bytes"] += len(piece.encode())
        yield ids


def _pieces(text):
    return (text[i : i + PIECE] for i in range(0, len(text), PIECE)) if isinstance(text, str) else text


def _cut(pieces):
    held = ""
    for piece in pieces:
        held += piece
        match = CUT.match(held)
        if match or len(held) > LONGEST_WORD:
            end = match.end() if match else len(held)
            yield held[:end]
            held = held[end:]
    yield held


def _blocks(lists, context, at_once):
    """Cut a stream of ids into lists of at most `at_once`, none of which crosses the end of a window."""
    held, room = [], context or math.inf
    for ids in lists:
        held += ids
        start = 0
        while len(held) - start >= (n := min(at_once, room)):
            yield held[start : start + n]
            start += n
            room = (room - n) or (context or math.inf)
        held = held[start:]
    while held:  # the last window may be short
        n = min(at_once, room)
        yield held[:n]
        held = held[n:]
        room = (room - n) or (context or math.inf)
