"""From logits to the next id: options, filters, the draw, and stop strings.

The draw uses the Gumbel-max rule: argmax(logits / T + g), g = -log(-log u) drawn once per id of the vocabulary,
picks an id with probability softmax(logits / T). Its noise belongs to (row key, id), not to a position in a sorted
list, so a last-bit difference in the logits, as between one row alone and the same row in a batch, hardly ever
changes the draw.

Nothing here uses MLX's implicit random state: it is per thread, so a seed set in one thread would not reach others.
"""

import math
import operator
import secrets

import mlx.core as mx

from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.kernels import softmax
from mlx_cosyh3.kernels.top_k import top_k as largest

MAX_SEED = 2**63 - 1
GREEDY_BELOW = 1e-6  # a lower temperature than this is argmax: every other id's probability rounds to 0 in fp32


def check_options(
    max_tokens=1, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=None, seed=None
):
    """Raise CosyH3Error, naming the option, its value and its range, if one of them cannot be used.

    `repetition_penalty` may be None (off), `seed` None (drawn by the system) or a list, one seed per prompt.
    """
    whole("max_tokens", max_tokens, 1, None)
    number("temperature", temperature, lambda x: x >= 0, "0 (always the likeliest token) or more")
    whole("top_k", top_k, 0, None, " (0 = off)")
    number("top_p", top_p, lambda x: 0 < x <= 1, "more than 0 and at most 1 (1 = off)")
    number("min_p", min_p, lambda x: 0 <= x <= 1, "from 0 (off) to 1")
    if repetition_penalty is not None:
        number("repetition_penalty", repetition_penalty, lambda x: x > 0, "more than 0 (1 = off)")
    for one in seed if isinstance(seed, (list, tuple)) else [seed]:
        if one is not None:
            whole("seed", one, 0, MAX_SEED)


def whole(name, value, low, high, note=""):
    wanted = f"a whole number from {low}{f' to {high}' if high is not None else ''}{note}"
    try:
        ok = not isinstance(value, bool) and operator.index(value) >= low and (high is None or value <= high)
    except TypeError:
        ok = False
    if not ok:
        raise CosyH3Error(f"{name} must be {wanted}, not {value!r}")


def number(name, value, in_range, wanted):
    try:
        ok = not isinstance(value, (bool, str)) and math.isfinite(value) and in_range(value)
    except (TypeError, OverflowError):
        ok = False
    if not ok:
        raise CosyH3Error(f"{name} must be {wanted}, not {value!r}")


def row_keys(seed, batch):
    """PRNG keys uint32 [batch, 2]. Row r of seed s has the key of seed s + r, and draws what that draws alone.

    `seed`: an int, a list of one int per row, or None for seeds from the system.
    """
    if seed is None:
        seeds = [secrets.randbelow(MAX_SEED) for _ in range(batch)]
    elif isinstance(seed, (list, tuple)):
        if len(seed) != batch:
            raise CosyH3Error(f"{len(seed)} seeds for {batch} prompts; give one seed, or one per prompt")
        seeds = [secrets.randbelow(MAX_SEED) if one is None else int(one) for one in seed]
    else:
        seeds = [int(seed) + row for row in range(batch)]
    return mx.stack([mx.random.key(one) for one in seeds])


def next_keys(keys):
    """Split keys uint32 [B, 2] into (keys for the next step, keys to draw with now), both [B, 2]."""
    pairs = mx.vmap(mx.random.split)(keys)  # [B, 2, 2]
    return pairs[:, 0], pairs[:, 1]


def sample(logits, keys, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Draw one id per row: logits [B, V] (any float type), keys uint32 [B, 2] -> ids int32 [B]. Lazy.

    temperature 0 takes the likeliest id (the lowest of equals). Otherwise, in this order: keep the `top_k` largest
    logits (of equals at the last place the lowest ids; 0 = all), divide by `temperature`, keep the smallest set whose
    probability reaches `top_p`, keep ids with at least `min_p` of the largest probability. Row b depends on
    logits[b] and keys[b] alone. Logits of -inf are never drawn while the row has others.
    """
    if temperature < GREEDY_BELOW or top_k == 1:
        return mx.argmax(logits, axis=-1).astype(mx.int32)
    ids, scores = candidates(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    noise = mx.vmap(lambda key: mx.random.uniform(shape=logits.shape[-1:], key=key))(keys)  # fp32 [B, V], [0, 1)
    if ids is not None:
        noise = mx.take_along_axis(noise, ids, axis=-1)
    # uniform() steps by 2^-32 near 0 and 2^-24 near 1, so the large noise values, which decide, come from small u.
    gumbel = -mx.log(-mx.log1p(-mx.maximum(noise, 2.0**-33)))
    best = mx.argmax(scores + gumbel, axis=-1, keepdims=True)  # [B, 1]
    return (best if ids is None else mx.take_along_axis(ids, best, axis=-1))[:, 0].astype(mx.int32)


def candidates(logits, *, temperature, top_k, top_p, min_p):
    """The ids that may be drawn: (ids [B, K], or None for 0..V-1 in order; scores fp32 [B, K]).

    A score is (logit - row's largest) / temperature, or -inf where a filter drops the id.
    """
    if 0 < top_k < logits.shape[-1]:
        scores, ids = largest(logits, top_k)  # falling: the only look at the whole vocabulary
        peak = scores[:, :1]
    else:
        scores, ids = logits.astype(mx.float32), None
        peak = scores.max(axis=-1, keepdims=True)
    # The largest becomes 0 before the division, which then cannot overflow at a low temperature.
    scores = (scores - mx.where(mx.isinf(peak), 0.0, peak)) / float(temperature)
    if top_p < 1:
        if ids is None:
            # All are sorted, though few may be kept: how many is known on the device alone, and to wait for its answer
            # would stop the next token's work from being prepared meanwhile. `mx.where` would compute both ways.
            ids = mx.argsort(-scores, axis=-1)
            scores = mx.take_along_axis(scores, ids, axis=-1)
        before = mx.cumsum(softmax(scores, axis=-1), axis=-1, inclusive=False)  # probability of all larger ones
        scores = mx.where(before < max(top_p, 1e-9), scores, -mx.inf)  # the first, with 0 before it, always stays
    if min_p > 0:
        scores = mx.where(scores >= math.log(min_p), scores, -mx.inf)  # exp(score) is p / largest p
    return ids, scores


def penalize(logits, seen, penalty):
    """Make ids that occurred less likely: logits [B, V], seen bool [B, V] -> logits. Positive ones are divided by
    `penalty`, negative ones multiplied with it (the rule of the CTRL paper, arXiv 1909.05858)."""
    penalty = float(penalty)  # MLX takes no whole number beyond 2^63
    return mx.where(seen, mx.where(logits > 0, logits / penalty, logits * penalty), logits)


class StopText:
    """Passes text on until a stop string occurs, which is cut off with all that follows.

    The stop string that is complete first wins, so the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops=()):
        """`stops`: strings (one string counts as a list of one). Raises CosyH3Error for an empty one."""
        self._stops = [stops] if isinstance(stops, str) else list(stops)
        for stop in self._stops:
            if not isinstance(stop, str) or not stop:
                raise CosyH3Error(f"stop must be a string that is not empty, or a list of those, not {stop!r}")
        self._held = ""  # not shown yet: it may be the beginning of a stop string
        self.stopped = False

    def add(self, text):
        """The text that is safe to show now. After a stop string: "" for ever."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]  # (end, start)
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        hold = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def finish(self):
        """The end of the text came: what was still held back."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text, stop):
        """Length of the longest end of `text` that begins `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
