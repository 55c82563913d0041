"""Speech that begins before its text has ended: upstream's values, and the order in which the two are read."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.cosyvoice.llm import LMOptions
from mlx_cosyh3.cosyvoice.ras import RecordedDraws
from tests.test_cosyvoice_llm import GREEDY, VERSIONS, difference, golden, log_softmax, no_stop, random_lm


class Watched:
    """A sampler that keeps the logits it was given."""

    def __init__(self, sampler):
        self.sampler, self.greedy, self.start, self.logits = sampler, sampler.greedy, sampler.start, []

    def __call__(self, logits, state, keep):
        self.logits.append(logits)
        return self.sampler(logits, state, keep)


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("case", ("bistream", "bistream_noprompt"))
@pytest.mark.parametrize("how", ("greedy", "ras"))
def test_bistream(name, case, how):
    lm, d, io = golden(name)
    meta, text, u = d["meta"][f"{case}.{how}"], io["bistream.in.text"][0].tolist(), np.array(io[f"{case}.{how}.u"])
    options = LMOptions(max_tokens=meta["len"], **(GREEDY if how == "greedy" else {}))  # upstream's was ended by hand
    draws = RecordedDraws.start(u) if how == "ras" else None
    prompt, speech = meta["prompt_text"], meta["prompt_speech"]
    tokens = lm.generate_from_stream(text, prompt, speech, options, draws, compat=True)
    watched = tokens._sampler = Watched(tokens._sampler)
    assert list(tokens) == io[f"{case}.{how}.tokens"].tolist()
    assert difference(log_softmax(mx.concatenate(watched.logits[:40])), io[f"{case}.{how}.logp"]) < 3e-5
    if how == "ras":
        assert tokens._state.draws.at.item() == len(u)


def blocks(lm, said, text, prompt_text, prompt_speech):
    """What the model should have read, by its training: pairs (kind, ids) of blocks of 5 and 15, then the rest."""
    c = lm.config
    cut = 0 if c.end_of_prompt_id is None else prompt_text.index(c.end_of_prompt_id) + 1
    text, speech = prompt_text[cut:] + text, prompt_speech + said
    layout = [("sos", []), ("text", prompt_text[:cut])]
    while len(text) >= 5 and len(speech) >= 15:
        layout += [("text", text[:5]), ("speech", speech[:15])]
        text, speech = text[5:], speech[15:]
    return layout + [("text", text), ("task", []), ("speech", speech)]


@pytest.mark.parametrize("version", (2, 3))
@pytest.mark.parametrize("prompt", (0, 4, 14, 15, 16, 30, 70))
def test_stream_reads_what_the_model_was_trained_on(version, prompt):
    """Greedy ids of the stream are those of one forward pass over the layout of training."""
    lm = no_stop(version)
    rng = np.random.default_rng(prompt)
    prompt_text = ([7, 60] if version == 3 else []) + rng.integers(0, 50, prompt // 3).tolist()
    prompt_speech, text = rng.integers(0, 40, prompt).tolist(), rng.integers(0, 50, 13).tolist()
    tokens = lm.generate_from_stream(iter(text), prompt_text, prompt_speech, LMOptions(**GREEDY, max_ratio=5), None)
    said = list(tokens)
    assert len(said) == 65 and tokens.finish_reason == "length"
    parts, where = [], []  # embeddings; for each speech id the place it is predicted at
    length = 0
    for kind, ids in blocks(lm, said, text, prompt_text, prompt_speech):
        if kind == "speech":
            where += range(length - 1, length - 1 + len(ids))
        if kind in ("sos", "task"):
            part = lm.embed_sos() if kind == "sos" else lm.embed_task()
        else:
            part = lm.embed_text(ids) if kind == "text" else lm.embed_speech(ids)
        parts += [part] if part.size else []
        length += part.shape[1]
    logits = lm(mx.concatenate(parts, axis=1))[0]
    best = mx.argmax(logits[mx.array(where)], axis=-1).tolist()
    assert best[prompt:] == said


def test_stream_speaks_before_the_text_has_ended():
    lm, asked = no_stop(2), []

    def text():
        for i in range(12):
            asked.append(i)
            yield i

    tokens = lm.generate_from_stream(text(), [], [], LMOptions(**GREEDY), None)
    assert asked == []
    next(tokens)
    assert len(asked) == 5
    for _ in range(15):
        next(tokens)
    assert len(asked) == 10


def test_stream_in_which_the_model_asks_for_text_early():
    """A drawn request for text ends a block; the step dispatched after it leaves no trace."""
    lm = random_lm(2)
    fill = lm.config.fill_id
    lm.llm_decoder.bias = lm.llm_decoder.bias + 4 * (mx.arange(43) == fill)
    text = list(range(30))
    key = mx.random.key(3)
    tokens = lm.generate_from_stream(text, [], [], LMOptions(max_ratio=2), key)
    said = list(tokens)
    # By hand, without looking ahead:
    plain = lm.generate_from_stream(text, [], [], LMOptions(max_ratio=2), key)
    plain._start()
    turn, rest = (mx.array([[i < 40 or i == j for i in range(43)]]) for j in (fill, lm.config.eos_id))
    state, read, got, early = plain._state, [lm.embed_sos()], [], 0
    sampler = LMOptions().sampler()

    def draw(keep):
        nonlocal state
        ids, _, state = sampler(lm(mx.concatenate(read, axis=1))[:, -1], state, keep)
        return ids.item()

    for at in range(0, 30, 5):
        read.append(lm.embed_text(text[at : at + 5]))
        for n in range(16):
            if n == 15:
                state = state.push(mx.array([fill], dtype=mx.int32))
                break
            token = draw(turn)
            if token == fill:
                early += 1
                break
            got.append(token)
            read.append(lm.embed_speech([token]))
    read.append(lm.embed_task())
    while len(got) < 60 and (token := draw(rest)) != lm.config.eos_id:
        got.append(token)
        read.append(lm.embed_speech([token]))
    assert early > 0
    assert said == got


def test_stream_limits():
    lm = no_stop(2)
    for most in (1, 14, 15, 16, 40):
        tokens = lm.generate_from_stream(range(20), [], [], LMOptions(**GREEDY, max_tokens=most), None)
        assert len(list(tokens)) == most
        assert tokens.finish_reason == "length"


# bad input
