"""Perplexity: windows, chunks and pieces of text against scores computed in one go.

Run: MLX_DISABLE_COMPILE=1 python -m pytest -q tests/test_perplexity.py
"""

import json
import math
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlx_cosyh3.perplexity as module
from mlx_cosyh3 import load
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.perplexity import perplexity
from tests.golden_data import h3_tiny, large
from tests.small_model import write_model

TEXT = "the theatre, a thing\nof a kind: naïve 字 and the rest of the day. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(write_model(tmp_path_factory.mktemp("model")))


def reference(model, text, context):
    """Sum of nll in nats and the number of tokens, window by window, each in one call and softmax in float64."""
    ids, total = model.tokenizer.encode(text), 0.0
    step = context or len(ids)
    for start in range(0, len(ids), step):
        window = ids[start : start + step]
        logits = np.array(model(mx.array([[model.config.eos_token_id, *window[:-1]]])))[0]
        logits = logits[:, : model.config.vocab_size].astype(np.float64)
        logsum = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        total += (logsum - logits[np.arange(len(window)), window]).sum()
    return total, len(ids)


@pytest.mark.parametrize("context", [0, 1, 2, 7, 64, 10_000])
@pytest.mark.parametrize("at_once", [1, 5, 1000])
def test_equals_the_definition_for_any_window_and_chunk(model, monkeypatch, context, at_once):
    monkeypatch.setattr(module, "LOGITS", at_once * model.config.padded_vocab_size)
    got = perplexity(model, TEXT, context)
    total, count = reference(model, TEXT, context)
    assert (got.tokens, got.bytes) == (count, len(TEXT.encode()))
    assert got.mean_nll == pytest.approx(total / count, rel=2e-5)
    assert got.perplexity == pytest.approx(math.exp(total / count), rel=2e-4)
    assert got.bits_per_byte == pytest.approx(total / math.log(2) / len(TEXT.encode()), rel=2e-5)


def test_no_call_computes_more_logits_than_allowed(model, monkeypatch):
    sizes = []

    class Spy:
        config, tokenizer, make_cache = model.config, model.tokenizer, model.make_cache

        def __call__(self, ids, cache):
            sizes.append(ids.size)
            return model(ids, cache)

    monkeypatch.setattr(module, "LOGITS", 10 * model.config.padded_vocab_size + 1)
    perplexity(Spy(), TEXT, 64)
    assert max(sizes) == 10 and sum(sizes) == len(model.tokenizer.encode(TEXT))
    monkeypatch.setattr(module, "LOGITS", 1)  # a vocabulary larger than the limit still works
    perplexity(Spy(), "the a", 64)
    assert sizes[-1] == 1


words = st.lists(
    st.sampled_from(["the", " a", "\n", " ", "  ", "\t", "\u00a0", "\u2003", "'s", ",", "é", "字", "12", "\r\n"])
)


@given(words=words, cuts=st.lists(st.integers(0, 60)))
@settings(max_examples=300, deadline=None)
def test_text_in_pieces_has_the_ids_of_the_whole(model, words, cuts):
    text = "".join(words)
    edges = sorted({0, len(text), *(c for c in cuts if c < len(text))})
    pieces = [text[a:b] for a, b in zip(edges, edges[1:])]
    size = {"bytes": 0}
    got = [i for ids in module._ids(model.tokenizer, iter(pieces), size) for i in ids]
    assert got == model.tokenizer.encode(text)
    assert size["bytes"] == len(text.encode())


def test_a_string_is_cut_into_pieces_where_words_begin(model, monkeypatch):
    whole = perplexity(model, TEXT, 16)
    monkeypatch.setattr(module, "PIECE", 7)
    assert perplexity(model, TEXT, 16) == whole
    assert perplexity(model, (c for c in TEXT), 16) == whole


def test_a_word_without_end_is_cut_and_nothing_lost(model, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_WORD", 50)
    monkeypatch.setattr(module, "PIECE", 20)
    pieces = list(module._cut(module._pieces("the" * 100)))
    assert "".join(pieces) == "the" * 100 and max(map(len, pieces)) <= 70
    assert perplexity(model, "the" * 100).bytes == 300


@given(lengths=st.lists(st.integers(0, 30), max_size=8), context=st.integers(0, 12), at_once=st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_blocks_never_cross_a_window(lengths, context, at_once):
    ids = list(range(sum(lengths)))
    ends = np.cumsum([0, *lengths])
    blocks = list(module._blocks((ids[a:b] for a, b in zip(ends, ends[1:])), context, at_once))
    assert [i for block in blocks for i in block] == ids
    for block in blocks:
        assert 0 < len(block) <= at_once
        if context:
            assert block[0] // context == block[-1] // context


@pytest.mark.parametrize("text", ["", [], ["", ""]])
def test_empty_text(model, text):
    with pytest.raises(CosyH3Error, match="the text is empty"):
        perplexity(model, text)


@pytest.mark.parametrize("context", [-1, 1.5, "8", None, True])
def test_bad_context(model, context):
    with pytest.raises(CosyH3Error, match="context must be a whole number of tokens from 0"):
        perplexity(model, "the", context)


def test_nan_is_an_error(tmp_path):
    model = load(write_model(tmp_path))
    model.norm_f.weight = model.norm_f.weight * float("nan")
    with pytest.raises(CosyH3Error, match="no finite probability between tokens 0 and "):
        perplexity(model, "the a")


@pytest.mark.parametrize("name", ["passage0", "passage1"])
def test_trained_model_scores_passages_as_upstream_did(name):
    """Upstream scored ids 1.. given id 0, so id 0 stands in for the end-of-text token here."""
    tiny, golden = h3_tiny(), json.loads(large("checkpoints", "h3-tiny", "io.json").read_text())[name]
    first, *rest = tiny.tokenizer.encode(golden["text"])
    text = tiny.tokenizer.decode(rest)
    assert tiny.tokenizer.encode(text) == rest

    class Scored:
        tokenizer, make_cache = tiny.tokenizer, tiny.make_cache
        config = replace(tiny.config, eos_token_id=first)

        def __call__(self, ids, cache):
            return tiny(ids, cache)

    got = perplexity(Scored(), text, context=0)
    assert got.tokens == golden["tokens"] - 1
    assert got.mean_nll == pytest.approx(golden["mean_nll"], abs=2e-5)
    assert got.perplexity == pytest.approx(golden["ppl"], rel=1e-4)
