"""Models of every version with int8, 8-bit and 4-bit linear layers: as fp32 ones, but for what rounds off.

Run: MLX_COSYH3_GOLDENS=folder python -m pytest -q tests/test_cosyvoice_quantised.py
"""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_cosyh3 import generate, stream_generate
from mlx_cosyh3.cosyvoice.llm import LMOptions
from mlx_cosyh3.cosyvoice.speech import SpeechOptions
from tests.golden_voice_models import END_OF_PROMPT, QUANTISED, VERSIONS, model, quantised, voice

CLOSE = {"int8": 0.03, "8": 0.03, "4": 0.3}  # relative error of logits and mel
SAME = {"int8": 0.9, "8": 0.9, "4": 0.7}  # share of the likeliest tokens
TEXT = "The cat sat on the mat."
IDS, PROMPT, SPOKEN = list(range(20, 35)), [END_OF_PROMPT, 5, 6, 7], [3, 50, 81, 17]  # text, the prompt's text, speech
every = [pytest.mark.parametrize("version", VERSIONS), pytest.mark.parametrize("how", QUANTISED)]


def both(test):
    for mark in every:
        test = mark(test)
    return test


def relative(got, want):
    got, want = (np.array(a, np.float64) for a in (got, want))
    assert np.isfinite(got).all() and got.shape == want.shape
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@both
def test_what_is_packed(version, how):
    """Attention and feed-forward of language model and flow, all of them, and nothing else."""
    m, plain = quantised(version, how), model(version)
    kinds = {n: a.dtype for n, a in tree_flatten(m.parameters()) if a.dtype in (mx.int8, mx.uint32)}
    assert {n.split(".")[0] for n in kinds} == {"llm", "flow"}
    assert all("attn" in n or "attention" in n or "to_" in n or "ff_" in n or "mlp" in n for n in kinds)
    for part in ("llm", "flow"):
        named = [layer for path, layer in m[part].named_modules() if m.quantizes[part](path)]
        assert named and all(layer.weight.dtype in (mx.int8, mx.uint32) for layer in named)
    size = lambda x: sum(a.nbytes for _, a in tree_flatten(x.parameters()))  # noqa: E731
    assert size(m) < size(plain)


@both
def test_the_language_model_is_close(version, how):
    """On the tokens that the fp32 model finds likeliest: logits, and which token is the likeliest."""
    plain, packed = model(version).llm, quantised(version, how).llm
    extra = {"speaker": mx.array(voice(version).embedding)[None]} if version == 1 else {}
    options = LMOptions(temperature=0, max_tokens=40)
    tokens = list(plain.generate(IDS, PROMPT, SPOKEN, options, None, **extra))
    if version == 1:
        extra["speaker"] = np.array(extra["speaker"][0])
    logits = [
        lm(mx.concatenate([lm.embed_prefix(IDS, PROMPT, SPOKEN, **extra), lm.embed_speech(tokens)], axis=1))[0]
        for lm in (packed, plain)
    ]
    assert len(tokens) == 40 and 0 < relative(*logits) < CLOSE[how]
    drawn = [np.array(a.argmax(axis=-1)) for a in logits]
    assert (drawn[0] == drawn[1]).mean() > SAME[how]


@both
def test_the_flow_is_close(version, how):
    speaker, tokens = voice(version), np.random.default_rng(0).integers(0, 300, 60).tolist()
    o, made = SpeechOptions(steps=4), []
    for m in (quantised(version, how), model(version)):
        made.append(m.mel(tokens, m.prompt(speaker, "zero_shot"), o, mx.random.key(0)))
    assert 0 < relative(*made) < CLOSE[how]


@both
def test_it_speaks(version, how):
    """At once and streamed: the same tokens, finite audio; where the flow is exact in chunks, it is so here."""
    m = quantised(version, how)
    options = dict(voice=voice(version), seed=1, steps=2, max_seconds=1.6, note=lambda text: None)
    whole = generate(m, TEXT, causal=version == 3, **options)
    stream = stream_generate(m, TEXT, chunk_tokens=25, max_chunk_tokens=25, **options)
    pieces = list(stream)
    assert pieces and whole.tokens == stream.result.tokens and whole.audio.any()
    assert np.isfinite(whole.audio).all() and np.isfinite(stream.result.audio).all()
    if version == 3:
        np.testing.assert_allclose(stream.result.audio, whole.audio, atol=2e-3)


@pytest.mark.parametrize("how", QUANTISED)
@pytest.mark.parametrize("version", [2, 3])
def test_the_flow_is_exact_in_chunks(version, how):
    m, tokens = quantised(version, how), np.random.default_rng(0).integers(0, 300, 83).tolist()
    prompt, o = m.prompt(voice(version), "zero_shot"), SpeechOptions(causal=True, steps=2)
    stream, made = m.mel_stream(prompt, o, None), []
    for at in range(0, 83, 25):
        made.append(stream.add(tokens[at : at + 25], at + 25 >= 83))
    assert relative(mx.concatenate(made, axis=1), m.mel(tokens, prompt, o, None)) < 1e-4
