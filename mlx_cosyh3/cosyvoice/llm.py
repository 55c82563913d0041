"""The speech language model of CosyVoice 2 and 3: text ids in, speech token ids (25 a second) out.

    [sos, text of the prompt ++ text, task, speech of the prompt] -> Qwen2 -> head -> repetition-aware sampling -> ...

The versions differ in where the embeddings of sos and task are, in the head's bias, in the special ids, and in how
text that arrives bit by bit begins; all of it is in the config. After upstream's `llm/llm.py`: Qwen2LM, CosyVoice3LM.

Decoding dispatches the step after before it reads a token, so that a GPU never waits for Python; if the token turns
out to be the last, that step is undone or dropped. All state of an utterance is in the iterator that makes it.
"""

import math
import operator
import re
from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_cosyh3.cosyvoice.qwen2 import Qwen2, Qwen2Config
from mlx_cosyh3.cosyvoice.ras import KeyDraws, RecordedDraws, Sampler
from mlx_cosyh3.errors import CheckpointError, CosyH3Error, NotFiniteError, nearest
from mlx_cosyh3.sampling import check_options

CLEAR_EVERY = 256  # tokens between returns of MLX's free buffers to the system
V2_SPECIALS, V3_SPECIALS = 3, 200  # rows of the head beyond the speech ids


@dataclass
class SpeechLMConfig:
    """Sizes and ids. Speech ids are 0 .. speech_token_size - 1; each id from there on ends an utterance."""

    qwen2: Qwen2Config
    speech_token_size: int
    speech_vocab_size: int  # rows of the speech embedding and of the head
    own_specials: bool  # v2: sos and task are rows of a table of their own; v3: of the speech embedding
    head_bias: bool
    end_of_prompt_id: int = None  # v3: the text id of <|endofprompt|>, which it cannot do without; v2: None
    mix_ratio: tuple = (5, 15)  # text ids and speech ids that take turns while text still arrives

    @classmethod
    def from_dict(cls, d):
        """The config from `config.json`; keys that this class does not know are ignored."""
        for name in ("qwen2", "speech_token_size", "speech_vocab_size", "own_specials", "head_bias"):
            if name not in d:
                raise CheckpointError(f"the config of the speech LM lacks {name}: convert the model again")
        values = {f.name: d[f.name] for f in fields(cls) if f.name in d}
        values["mix_ratio"] = tuple(values.get("mix_ratio", cls.mix_ratio))
        return cls(**values | {"qwen2": Qwen2Config.from_dict(d["qwen2"])})

    @classmethod
    def v2(cls, qwen2, speech_token_size, mix_ratio=(5, 15)):
        """CosyVoice 2's, from the Qwen2 `config.json` (a dict) and numbers of `cosyvoice2.yaml`."""
        rows, qwen2 = speech_token_size + V2_SPECIALS, Qwen2Config.from_dict(qwen2)
        return cls(qwen2, speech_token_size, rows, True, True, None, tuple(mix_ratio))

    @classmethod
    def v3(cls, qwen2, speech_token_size, end_of_prompt_id, mix_ratio=(5, 15)):
        """CosyVoice 3's, from the Qwen2 `config.json` (a dict), `cosyvoice3.yaml`, and the id of <|endofprompt|>."""
        rows, qwen2 = speech_token_size + V3_SPECIALS, Qwen2Config.from_dict(qwen2)
        return cls(qwen2, speech_token_size, rows, False, False, end_of_prompt_id, tuple(mix_ratio))

    # Special ids by version. v2: eos, (unused), fill. v3: sos, eos, task, fill.
    @property
    def eos_id(self):
        return self.speech_token_size + (0 if self.own_specials else 1)

    @property
    def fill_id(self):
        """What the model says when it wants the next text ids."""
        return self.speech_token_size + (2 if self.own_specials else 3)

    @property
    def sos_row(self):
        return 0 if self.own_specials else self.speech_token_size

    @property
    def task_row(self):
        return 1 if self.own_specials else self.speech_token_size + 2


@dataclass(kw_only=True)
class LMOptions:
    """How speech tokens are drawn, and how many.

    temperature        0 = always the likeliest token, without a look at repetitions
    top_p, top_k       of the nucleus (1 and 0: all tokens)
    win_size, tau_r    a token that is among the last win_size ones win_size * tau_r times or more is drawn anew from
                       all others; win_size 0: never
    min_ratio          least speech tokens per text token; without effect on CosyVoice 3, see `generate`
    max_ratio          most speech tokens per text token
    max_tokens         most speech tokens (None: by max_ratio alone)"""

    temperature: float = 1.0
    top_p: float = 0.8
    top_k: int = 25
    win_size: int = 10
    tau_r: float = 0.1
    min_ratio: float = 2.0
    max_ratio: float = 20.0
    max_tokens: int = None

    def __post_init__(self):
        check_options(1 if self.max_tokens is None else self.max_tokens, self.temperature, self.top_k, self.top_p)
        for name in ("win_size", "tau_r", "min_ratio", "max_ratio"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (name == "win_size" and value != int(value)):
                what = "a whole number" if name == "win_size" else "a number"
                raise CosyH3Error(f"{name} must be {what} from 0, not {value!r}")

    def sampler(self):
        names = ("temperature", "top_p", "top_k", "win_size", "tau_r")
        return Sampler(**{name: getattr(self, name) for name in names})


class SpeechLM(nn.Module):
    """The model. Call it with embeddings [B, T, D] and a cache for logits."""

    def __init__(self, config):
        super().__init__()
        D, rows = config.qwen2.hidden_size, config.speech_vocab_size
        self.qwen2 = Qwen2(config.qwen2)
        self.speech_embedding = nn.Embedding(rows, D)
        if config.own_specials:
            self.llm_embedding = nn.Embedding(2, D)
        self.llm_decoder = nn.Linear(D, rows, bias=config.head_bias)
        self.config = config

    def join(self):
        """Make fewer, larger products of the transformer's; its weights must be loaded."""
        self.qwen2.join()

    def make_cache(self):
        """An empty cache; it takes the batch size of what is first read into it."""
        return self.qwen2.make_cache()

    def __call__(self, embeddings, cache=None):
        """embeddings [B, T, D] -> logits fp32 [B, T, speech_vocab_size]; `cache` moves on by T positions."""
        return self._head(self.qwen2(embeddings, self.make_cache() if cache is None else cache))

    def last_logits(self, embeddings, cache, rows=None):
        """Logits fp32 [B, speech_vocab_size] of the last position alone. rows: see `Qwen2`."""
        return self._head(self.qwen2(embeddings, cache, rows)[:, -1])

    def _head(self, hidden):
        return self.llm_decoder(hidden).astype(mx.float32)

    def embed_text(self, ids):
        """A list of text ids -> [1, T, D]."""
        return self.qwen2.embed_tokens(mx.array([ids], dtype=mx.int32))

    def embed_speech(self, ids):
        """A list of speech ids -> [1, T, D]."""
        return self.speech_embedding(mx.array([ids], dtype=mx.int32))

    def embed_drawn(self, ids):
        """Ids as the sampler gives them, int32 [B] with those that end an utterance -> [B, 1, D]."""
        return self.speech_embedding(ids[:, None])

    def embed_sos(self):
        """What every sequence begins with, [1, 1, D]."""
        return self._special(self.config.sos_row)

    def embed_task(self):
        """What comes between all text and the speech, [1, 1, D]."""
        return self._special(self.config.task_row)

    def _special(self, row):
        table = self.llm_embedding if self.config.own_specials else self.speech_embedding
        return table(mx.array([[row]], dtype=mx.int32))

    def embed_prefix(self, text_ids, prompt_text_ids, prompt_speech):
        """Three lists of ids -> [1, 2 + all ids, D]."""
        parts = [self.embed_sos(), self.embed_text([*prompt_text_ids, *text_ids]), self.embed_task()]
        return mx.concatenate(parts + [self.embed_speech(prompt_speech)] * bool(prompt_speech), axis=1)

    def generate(self, text_ids, prompt_text_ids, prompt_speech, options, key):
        """Say `text_ids` in the voice and manner of a prompt -> SpeechTokens, an iterator of ids.

        prompt_text_ids   what the prompt says, or an instruction; may be empty in CosyVoice 2. In CosyVoice 3 it or
                          text_ids must hold <|endofprompt|>
        prompt_speech     speech ids of the prompt; may be empty
        key               an MLX PRNG key, or ras.RecordedDraws; not used at temperature 0
        At least int(min_ratio * text ids) tokens come (CosyVoice 2; in 3 upstream's rule forbids sos in place of eos,
        which is kept), at most int(max_ratio * text ids). Raises CosyH3Error for ids that the model does not have."""
        c = self.config
        text_ids = self._text_ids(text_ids, "the text")
        prompt_text_ids = self._text_ids(prompt_text_ids, "the prompt's text")
        prompt_speech = checked_ids(prompt_speech, c.speech_token_size, "the prompt's speech")
        if not text_ids:
            raise CosyH3Error("the text is empty (no text ids): there is nothing to say")
        if c.end_of_prompt_id is not None and c.end_of_prompt_id not in prompt_text_ids + text_ids:
            raise CosyH3Error(
                f"neither the prompt's text nor the text holds <|endofprompt|> (id {c.end_of_prompt_id}), "
                "which CosyVoice 3 needs: put it after the instruction, or before the text"
            )
        prefix = lambda: self.embed_prefix(text_ids, prompt_text_ids, prompt_speech)  # noqa: E731
        return SpeechTokens(self, options, key, Whole(len(text_ids), prefix))

    def generate_from_stream(self, text_id_iterator, prompt_text_ids, prompt_speech, options, key, compat=False):
        """`generate` for text whose ids arrive one by one: speech starts after the first few -> SpeechTokens.

        text_id_iterator   any iterable of text ids; it is asked for more only when speech needs them
        prompt_text_ids    must hold <|endofprompt|> in CosyVoice 3
        compat             as upstream, which (1) in CosyVoice 3 without speech of a prompt says 15 tokens before it
                           has read any text, (2) says 15 too many before it reads on if the prompt has a multiple of
                           15, (3) drops what is left of the prompt's speech when the text is short, and so says the
                           prompt's text, too, (4) reads the last speech token before the end of the text twice. The
                           model was trained without these
        Unlike upstream's, special ids that have no place are never drawn (there they are errors), and max_ratio holds
        (of the text ids that came); min_ratio does not. Errors in the text are raised when it has come so far."""
        c = self.config
        prompt_text_ids = self._text_ids(prompt_text_ids, "the prompt's text")
        prompt_speech = checked_ids(prompt_speech, c.speech_token_size, "the prompt's speech")
        if c.end_of_prompt_id is not None and c.end_of_prompt_id not in prompt_text_ids:
            raise CosyH3Error(
                f"the prompt's text does not hold <|endofprompt|> (id {c.end_of_prompt_id}), which CosyVoice 3 needs "
                "to speak while text arrives: put it after the instruction"
            )
        text_ids = iter(text_id_iterator)
        return SpeechTokens(
            self, options, key, lambda t: t.taking_turns(text_ids, prompt_text_ids, prompt_speech, compat)
        )

    def _text_ids(self, ids, what):
        return checked_ids(ids, self.config.qwen2.vocab_size, what)


class SpeechTokens:
    """Iterator of the speech ids of one utterance, each computed when it is asked for, in the thread that asks.

    It decodes with any model that has `make_cache`, `last_logits`, `embed_speech` and `embed_drawn` as SpeechLM does,
    and config.speech_token_size and .speech_vocab_size.

    finish_reason   "stop" (the model was done) or "length" (a limit cut it); None until the iterator has ended
    drawn           all ids so far, those that are no speech included"""

    def __init__(self, lm, options, key, plan):
        """`plan`: what makes the generator of ids, from this object; a Whole can also be decoded with others."""
        self.finish_reason, self.drawn = None, []
        self.plan, self.options, self.key = plan, options, key
        self._lm = lm
        self._cache, self._sampler = lm.make_cache(), options.sampler()
        if not (self._sampler.greedy or isinstance(key, RecordedDraws)):
            if not (isinstance(key, mx.array) and key.shape == (2,) and key.dtype == mx.uint32):
                raise TypeError(f"key must be an MLX PRNG key (mx.random.key(seed)) or ras.RecordedDraws, not {key!r}")
            mx.eval(key)  # it may be used in another thread
        self._ids = plan(self)

    def __iter__(self):
        return self

    def __next__(self):
        return next(self._ids)

    def close(self):
        """Make no more of them."""
        self._ids.close()

    def at_once(self, whole):
        """The plan of a Whole."""
        self._start()
        least, limit = whole.bounds(self.options)
        not_yet = self._keep(lambda i: i != self._lm.config.speech_token_size)
        _, ended = yield from self._speak([whole.prefix()], limit, lambda n: not_yet if n < least else None)
        self.finish_reason = "stop" if ended else "length"

    def taking_turns(self, text_ids, prompt_text, prompt_speech, compat):
        """A plan: blocks of mix_ratio text and speech ids, the prompt's first; in the end the rest of the text."""
        lm, o, c = self._lm, self.options, self._lm.config
        self._start()
        text_block, speech_block = c.mix_ratio
        speech_ids = lambda i: i < c.speech_token_size  # noqa: E731
        turn = self._keep(lambda i: speech_ids(i) | (i == c.fill_id))
        rest = self._keep(lambda i: speech_ids(i) | (i == c.eos_id))
        feed = [lm.embed_sos()]  # embeddings that the model has not read yet
        waiting = prompt_text  # text ids that are not in a block yet
        if c.end_of_prompt_id is not None:  # the instruction comes before all blocks
            cut = prompt_text.index(c.end_of_prompt_id) + 1
            feed, waiting = feed + [lm.embed_text(prompt_text[:cut])], prompt_text[cut:]
        text_is_next = len(feed) == 1 or not compat
        # Where the model must ask for text, counted in its ids (asking included): when the block of speech is full.
        next_fill = speech_block - len(prompt_speech) % speech_block
        if prompt_speech and not compat:
            next_fill %= speech_block
        made = 0  # speech ids and requests for text so far
        read = 0  # text ids that came
        most = math.inf if o.max_tokens is None else o.max_tokens

        for text_id in text_ids:
            read += 1
            waiting = waiting + lm._text_ids([text_id], "the text")
            while prompt_speech and len(waiting) >= text_block:
                feed += [lm.embed_text(waiting[:text_block]), lm.embed_speech(prompt_speech[:speech_block])]
                waiting, prompt_speech = waiting[text_block:], prompt_speech[speech_block:]
                text_is_next = False
            if prompt_speech or (text_is_next and len(waiting) < text_block):
                continue
            if text_is_next:
                feed, waiting = feed + [lm.embed_text(waiting[:text_block])], waiting[text_block:]
            before = self._count
            feed, asked = yield from self._speak(feed, min(next_fill - made, most - before), lambda n: turn)
            if self._count == most:
                self.finish_reason = "length"
                return
            if not asked:
                self._state = self._state.push(mx.array([c.fill_id], dtype=mx.int32))
            made += self._count - before + 1
            next_fill = made + speech_block
            text_is_next = True

        if not read:
            raise CosyH3Error("the text is empty (no text ids came): there is nothing to say")
        if compat and self._count:
            feed.append(lm.embed_speech([self._last]))
        feed += [lm.embed_text(waiting)] * bool(waiting) + [lm.embed_task()]
        if prompt_speech and not compat:
            feed.append(lm.embed_speech(prompt_speech))
        limit = min(int(read * o.max_ratio), most) - self._count
        _, ended = yield from self._speak(feed, limit, lambda n: rest)
        self.finish_reason = "stop" if ended else "length"

    def _start(self):
        """Set up what takes MLX, in the thread that iterates."""
        draws = None if self._sampler.greedy else self.key
        self._state = self._sampler.start(KeyDraws.start(draws) if isinstance(draws, mx.array) else draws)
        self._count, self._last = 0, None  # of the speech ids handed out

    def _keep(self, test):
        """A mask over the ids, bool [1, V], from a test of all ids."""
        return mx.array(test(np.arange(self._lm.config.speech_vocab_size))[None])

    def _speak(self, feed, limit, keep):
        """Read the embeddings in `feed`, then draw up to `limit` ids, and yield them; an id beyond speech ends it.

        keep(n)   mask of the n-th draw
        Returns (a new feed: what was drawn but not read by the model, whether an id ended it)."""
        if limit <= 0:
            return feed, False
        lm, size = self._lm, self._lm.config.speech_token_size
        drawn = self._draw(mx.concatenate(feed, axis=1), keep(0))
        for n in range(limit):
            state, offset = self._state, self._cache[0].offset
            if n + 1 < limit:
                following = self._draw(lm.embed_drawn(drawn[0]), keep(n + 1))
            token = self._read(drawn)
            if token >= size:
                self._state = state
                for kv in self._cache:
                    kv.rewind(offset)
                return [], True
            yield token
            if n + 1 < limit:
                drawn = following
        return [lm.embed_speech([token])], False

    def _draw(self, embeddings, keep):
        """Dispatch a step: embeddings [1, T, D] -> (ids int32 [1], log-sum-exp [1])."""
        logits = self._lm.last_logits(embeddings, self._cache)
        ids, lse, self._state = self._sampler(logits, self._state, keep)
        mx.async_eval(ids, lse, self._state.arrays())  # nothing stays lazy, so that another thread may go on
        return ids, lse

    def _read(self, drawn):
        """Wait for a step, and check it."""
        ids, lse = drawn
        token = ids.item()
        if not math.isfinite(lse.item()):
            raise not_finite(self._count + 1)
        self.drawn.append(token)
        if token < self._lm.config.speech_token_size:
            self._count, self._last = self._count + 1, token
        if self._count % CLEAR_EVERY == CLEAR_EVERY - 1:
            mx.clear_cache()
        return token


@dataclass
class Whole:
    """A plan: the ids that follow on all embeddings that `prefix()` makes, for a text of `text_length` ids."""

    text_length: int
    prefix: object

    def __call__(self, tokens):
        return tokens.at_once(self)

    def bounds(self, o):
        """(least, most) speech ids under LMOptions `o`."""
        limit = int(self.text_length * o.max_ratio)
        return int(self.text_length * o.min_ratio), limit if o.max_tokens is None else min(limit, o.max_tokens)


def not_finite(token):
    return NotFiniteError(
        f"the speech language model gave a non-finite value (inf or NaN) at token {token}: try --dtype float32"
    )


def checked_ids(ids, count, what):
    """Ids as a list of int, each within 0 .. count - 1."""
    try:
        ids = [operator.index(i) for i in (ids.tolist() if hasattr(ids, "tolist") else ids)]
    except TypeError:
        raise CosyH3Error(f"{what} must be a flat list of whole numbers, not {ids!r}"[:200]) from None
    for i in ids:
        if not 0 <= i < count:
            raise CosyH3Error(f"id {i} in {what} is outside of the vocabulary (0 to {count - 1})")
    return ids


LAYER = re.compile(r"(.*layers\.)(\d+)(\..+)")
KNOWN = {
    "qwen2.embed_tokens.weight": "llm.model.model.embed_tokens.weight",
    "qwen2.norm.weight": "llm.model.model.norm.weight",
    **{
        f"qwen2.layers.#.{name}": f"llm.model.model.layers.#.{name}"
        for name in (
            *(f"self_attn.{p}_proj.{part}" for p in "qkv" for part in ("weight", "bias")),
            "self_attn.o_proj.weight",
            *(f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
            "input_layernorm.weight",
            "post_attention_layernorm.weight",
        )
    },
    **{n: n for n in ("speech_embedding.weight", "llm_embedding.weight", "llm_decoder.weight", "llm_decoder.bias")},
}  # our name: upstream's, with # for the number of a layer
OURS = {theirs: ours for ours, theirs in KNOWN.items()} | {ours: ours for ours in KNOWN}
# Qwen2's head over text, which speech does not use, and tables that older versions of transformers stored
DROPPED = re.compile(r"llm\.model\.lm_head\.weight|llm\.model\.model\..*rotary_emb\.inv_freq")


def sanitize(weights):
    """Tensors of upstream's `llm.pt` under our names: {name: array} -> {name: array}, the same arrays.

    `llm.model.lm_head.weight` is dropped; names that are ours already stay. CheckpointError for any other name."""
    out = {}
    for name, array in weights.items():
        if DROPPED.fullmatch(name):
            continue
        layer = LAYER.fullmatch(name)
        pattern = f"{layer[1]}#{layer[3]}" if layer else name
        if pattern not in OURS:
            near = nearest(pattern, OURS).replace("#", layer[2] if layer else "0")
            raise CheckpointError(f"the speech language model has no tensor {name!r}{near}")
        out[OURS[pattern].replace("#", layer[2] if layer else "")] = array
    return out


QUANTIZED = re.compile(r"(.+\.)?qwen2\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)")


def quantizes(path):
    """Whether the module at `path` may be quantised: the linear layers of the transformer, not embeddings or head."""
    return bool(QUANTIZED.fullmatch(path))
