"""generate, stream_generate, batch_generate: what they return, what they refuse, and that they agree."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3 import batch_generate, generate, stream_generate
from mlx_cosyh3.errors import CosyH3Error

PROMPTS = ["the end of the day", "A", "and the other, which is quite a bit longer than the rest of them", "é"]


def test_result(model):
    r = generate(model, "the cat", max_tokens=20, seed=1)
    assert r.finish_reason in ("stop", "length") and len(r.tokens) <= 20
    assert r.text == model.tokenizer.decode(r.tokens)
    assert r.prompt_tokens == len(model.tokenizer.encode("the cat"))
    assert r.prompt_tps > 0 and r.generation_tps > 0 and r.peak_memory > 0 and r.logprobs is None
    assert set(r.seconds) == {"prompt", "generation"}


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 5}, {"seed": 5, "top_k": 0, "top_p": 1, "temperature": 2},
                                     {"seed": 3, "repetition_penalty": 1.3, "min_p": 0.01}])  # fmt: skip
def test_streamed_and_repeated_equal(model, options):
    r = generate(model, "the cat", max_tokens=30, **options)
    stream = stream_generate(model, "the cat", max_tokens=30, **options)
    pieces = list(stream)
    assert "".join(pieces) == r.text == stream.result.text
    assert stream.result.tokens == r.tokens == generate(model, "the cat", max_tokens=30, **options).tokens
    assert stream.result.finish_reason == r.finish_reason
    assert all(pieces)


def test_greedy_is_the_argmax_of_the_full_forward(model):
    prompt = model.tokenizer.encode("the cat")
    r = generate(model, "the cat", max_tokens=12, temperature=0)
    ids = list(prompt)
    for token in r.tokens:
        logits = model(mx.array([ids]))[0, -1, : model.config.vocab_size]
        assert logits.argmax().item() == token
        ids.append(token)


def test_different_seeds_differ(model):
    texts = {tuple(generate(model, "the", max_tokens=10, seed=s, temperature=1.5, top_p=1).tokens) for s in range(5)}
    assert len(texts) > 1
    assert generate(model, "the", max_tokens=10, temperature=1.5, top_p=1).tokens is not None  # no seed: works, too


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 7}, {"seed": 7, "repetition_penalty": 1.2}])
def test_batch_rows_equal_single_runs(model, options):
    results = batch_generate(model, PROMPTS, max_tokens=15, logprobs=True, **options)
    for row, (prompt, r) in enumerate(zip(PROMPTS, results)):
        alone = dict(options)
        if "seed" in alone:
            alone["seed"] += row
        want = generate(model, prompt, max_tokens=15, logprobs=True, **alone)
        assert (r.tokens, r.text, r.finish_reason, r.prompt_tokens) == (
            want.tokens, want.text, want.finish_reason, want.prompt_tokens)  # fmt: skip
        assert np.allclose(r.logprobs, want.logprobs, atol=1e-3)
    assert batch_generate(model, []) == []


def test_batch_from_a_shared_context(model):
    cache = model.make_cache()
    generate(model, "Once upon a time", cache=cache, temperature=0, max_tokens=3)
    before = cache.length
    results = batch_generate(model, PROMPTS, cache=cache, temperature=0, max_tokens=8)
    assert cache.length == before
    for prompt, r in zip(PROMPTS, results):
        assert r.tokens == generate(model, prompt, cache=cache.copy(), temperature=0, max_tokens=8).tokens


def test_logprobs(model):
    r = generate(model, "the cat", max_tokens=6, seed=2, logprobs=True)
    ids = model.tokenizer.encode("the cat") + r.tokens
    logits = model(mx.array([ids]))[0, :, : model.config.vocab_size]
    want = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    start = r.prompt_tokens - 1
    assert np.allclose(r.logprobs, [want[start + n, t].item() for n, t in enumerate(r.tokens)], atol=1e-4)


def test_continuing_equals_never_having_stopped(model):
    whole = generate(model, "the cat", max_tokens=24, temperature=0)
    cache = model.make_cache()
    parts = [generate(model, "the cat" if n == 0 else "", max_tokens=8, temperature=0, cache=cache) for n in range(3)]
    assert sum((p.tokens for p in parts), []) == whole.tokens
    assert cache.length == whole.prompt_tokens + 24


def test_a_prompt_in_pieces_equals_the_prompt(model):
    """The state after text a then text b is that after a + b (where the tokens are the same)."""
    cache = model.make_cache()
    first = generate(model, "the cat", max_tokens=4, temperature=0, cache=cache)
    ids = model.tokenizer.encode("the cat") + first.tokens + model.tokenizer.encode(" and")
    a = generate(model, " and", max_tokens=10, temperature=0, cache=cache)
    assert a.tokens == generate(model, ids, max_tokens=10, temperature=0).tokens


def ends_after(model, n, **options):
    """Options under which the text stops at its n-th token: a stop string made of that token's text."""
    r = generate(model, "the cat", max_tokens=40, **options)
    for at in range(n, len(r.tokens)):
        text = model.tokenizer.decode(r.tokens[at : at + 1])
        if text.strip() and text not in model.tokenizer.decode(r.tokens[:at]) and "\ufffd" not in text:
            return r, at, text
    pytest.skip("no token of its own in this random text")


def test_stop_string(model):
    options = {"seed": 11, "temperature": 1.5, "top_k": 0, "top_p": 1.0}
    r, at, stop = ends_after(model, 3, **options)
    cache = model.make_cache()
    cut = generate(model, "the cat", max_tokens=40, stop=stop, cache=cache, **options)
    assert cut.finish_reason == "stop" and stop not in cut.text
    assert cut.text == r.text[: r.text.index(stop)]
    assert cache.length == cut.prompt_tokens + len(cut.tokens)
    assert "".join(stream_generate(model, "the cat", max_tokens=40, stop=[stop, "zzzzz"], **options)) == cut.text


def test_end_of_text_leaves_the_cache_before_it(model):
    eos = model.config.eos_token_id
    first = generate(model, "the cat", max_tokens=5, temperature=0).tokens
    index = next(i for i, t in enumerate(first) if t not in first[:i] and i > 0) if len(set(first)) > 1 else 0
    model.config.eos_token_id = first[index]
    try:
        cache = model.make_cache()
        r = generate(model, "the cat", max_tokens=5, temperature=0, cache=cache)
        assert r.finish_reason == "stop" and r.tokens == first[: index + 1]
        assert r.text == model.tokenizer.decode(first[:index])
        assert cache.pending is None and cache.length == r.prompt_tokens + index
    finally:
        model.config.eos_token_id = eos


def test_empty_prompt_starts_from_end_of_text(model):
    eos = model.config.eos_token_id
    assert generate(model, "", max_tokens=5, temperature=0).tokens == generate(model, [eos], max_tokens=5, temperature=0).tokens
    assert generate(model, "", max_tokens=1).prompt_tokens == 1


def test_padding_ids_are_never_drawn(model):
    """The last rows of the embedding are padding. Here they are by far the likeliest."""
    vocab = model.config.vocab_size
    table = np.array(model.embeddings.weight)
    direction = np.array(model(mx.array([[1, 2, 3]]))[0, -1])  # noqa: F841  (shows the model works before the change)
    changed = table.copy()
    changed[vocab:] = 100 * table[:1]
    model.embeddings.weight = mx.array(changed)
    mx.eval(model.parameters())
    try:
        tokens = [t for s in range(5) for t in generate(model, "the", max_tokens=20, temperature=5.0, top_k=0, top_p=1, seed=s).tokens]
        greedy = generate(model, "the", max_tokens=20, temperature=0).tokens
        raw = model(mx.array([model.tokenizer.encode("the")]))[0, -1]
    finally:
        model.embeddings.weight = mx.array(table)
        mx.eval(model.parameters())
    assert max(tokens + greedy) < vocab
    assert raw.shape == (model.config.padded_vocab_size,)


def test_closing_a_stream_keeps_what_was_written(model):
    cache = model.make_cache()
    stream = stream_generate(model, "the cat", max_tokens=200, temperature=0, cache=cache)
    pieces = [next(stream) for _ in range(5)]
    stream.close()
    r = stream.result
    assert r.finish_reason == "cancelled" and r.text.startswith("".join(pieces))
    assert len(r.tokens) < 200 and cache.length == r.prompt_tokens + len(r.tokens)
    assert list(stream) == []
    goes_on = generate(model, "", max_tokens=5, temperature=0, cache=cache)
    whole = generate(model, "the cat", max_tokens=len(r.tokens) + 5, temperature=0)
    assert r.tokens + goes_on.tokens == whole.tokens


def test_context_manager(model):
    with stream_generate(model, "the cat", max_tokens=100, temperature=0) as stream:
        next(stream)
    assert stream.result.finish_reason == "cancelled"


def test_refusals(model):
    other = model.make_cache()
    other.fingerprint = "another"
    for options, words in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 2}, "top_p"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"seed": -1}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"cache": other}, "another model"),
        ({"cache": model.make_cache(2)}, "2 rows"),
    ):
        for function in (generate, stream_generate):
            with pytest.raises(CosyH3Error, match=words):
                function(model, "the", **options)
    with pytest.raises(CosyH3Error, match="vocabulary"):
        generate(model, [1, model.config.vocab_size])
    with pytest.raises(CosyH3Error, match="list of prompts"):
        batch_generate(model, "the")
    with pytest.raises(TypeError, match="there is no option 'temprature', nearest known: 'temperature'"):
        generate(model, "the", temprature=1)
    with pytest.raises(TypeError, match="load"):
        generate("h3", "the")


def test_non_finite_values_are_reported(model):
    weight = model.norm_f.weight
    model.norm_f.weight = mx.full(weight.shape, mx.nan)
    mx.eval(model.parameters())
    try:
        with pytest.raises(CosyH3Error, match="non-finite value .* at token 1"):
            generate(model, "the")
        with pytest.raises(CosyH3Error, match="non-finite"):
            list(stream_generate(model, "the"))
    finally:
        model.norm_f.weight = weight


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_numbers_beyond_those_of_mlx(model, name):
    """A whole number of 2^63 or more is as good as any other."""
    texts = [generate(model, "the cat", max_tokens=3, seed=1, **{name: value}).text for value in (2**63, 1e19)]
    assert texts[0] == texts[1]


def test_an_interrupted_prompt_leaves_the_cache_alone(model, monkeypatch):
    cache = model.make_cache()
    generate(model, "the cat", max_tokens=3, temperature=0, cache=cache)
    length, pending = cache.length, cache.pending
    real, calls = model.step, []

    def interrupted(ids, cache, lengths=None, chunk=512, on_chunk=None):
        calls.append(1)
        real(ids[:, 0], cache)  # some of it was read
        raise KeyboardInterrupt

    monkeypatch.setattr(type(model), "prefill", lambda self, *a, **k: interrupted(*a, **k))
    with pytest.raises(KeyboardInterrupt):
        generate(model, " and", max_tokens=3, cache=cache)
    monkeypatch.undo()
    assert calls and (cache.length, cache.pending) == (length, pending)
    want = generate(model, "the cat", max_tokens=6, temperature=0).tokens
    assert generate(model, "", max_tokens=3, temperature=0, cache=cache).tokens == want[3:]
