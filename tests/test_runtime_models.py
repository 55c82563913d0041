"""Models under a policy: decisions in the results, and failures on the GPU that nobody hears of.

Run: python -m pytest -q tests/test_runtime_models.py
"""

import logging

import numpy as np
import pytest

from mlx_cosyh3 import batch_generate, generate, load, logs, stream_generate
from mlx_cosyh3.caches import StateCache
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.gate import GATE
from mlx_cosyh3.h3 import CHUNK, H3
from mlx_cosyh3.runtime import Policy, Request
from mlx_cosyh3.scheduler import Scheduler
from tests.policies import GPU_ERROR, NAN, again, alone, fault, policy, probes  # noqa: F401 - `alone` is a fixture
from tests.small_voice_model import small_voice, write_voice_model

TEXT = "Hello there."

# ---------------------------------------------------------------- models: speech


@pytest.fixture(scope="module")
def voice_model(tmp_path_factory):
    return load(write_voice_model(tmp_path_factory.mktemp("models") / "voice"))


def test_decisions_are_in_the_result(voice_model):
    result = generate(voice_model, TEXT, seed=1, policy=Policy(probes=probes(gpu="no GPU in this test")))
    assert [(d["stage"], d["device"], d["reason"]) for d in result.decisions] == [
        (stage, "cpu", "no GPU in this test") for stage in ("llm", "flow", "vocoder")
    ]
    on_gpu = generate(voice_model, TEXT, seed=1, policy=policy())
    assert {d["device"] for d in on_gpu.decisions} == {"gpu"}
    np.testing.assert_array_equal(on_gpu.audio, result.audio)


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("stage, part, call", [("flow", "flow", 1), ("vocoder", "hift", 1)])
def test_speech_at_once_outlives_a_failure(voice_model, monkeypatch, stage, part, call, nan):
    want = generate(voice_model, TEXT, seed=1, voice=small_voice())
    seen = fault(monkeypatch, type(getattr(voice_model, part)), "__call__", call, nan=nan)
    got = generate(voice_model, TEXT, seed=1, voice=small_voice(), policy=policy())
    assert seen == ["gpu", "cpu"] and len(again(got, stage)) == 1
    np.testing.assert_allclose(got.audio, want.audio, atol=1e-6)


@pytest.mark.parametrize("options", [{"seed": 1}, {"temperature": 0}])
@pytest.mark.parametrize("call", [1, 2, 9])
def test_the_language_model_goes_on_from_its_last_token(voice_model, monkeypatch, call, options):
    want = generate(voice_model, TEXT, voice=small_voice(), **options)
    seen = fault(monkeypatch, type(voice_model.llm), "last_logits", call)
    got = generate(voice_model, TEXT, voice=small_voice(), policy=policy(), **options)
    assert seen[call - 1 : call + 1] == ["gpu", "cpu"] and "gpu" not in seen[call:]
    assert got.tokens == want.tokens and got.finish_reason == want.finish_reason and len(again(got, "llm")) == 1
    np.testing.assert_allclose(got.audio, want.audio, atol=1e-6)


def streamed(model, text, **options):
    stream = stream_generate(model, text, voice=small_voice(), seed=2, chunk_tokens=5, max_chunk_tokens=5, **options)
    pieces = list(stream)
    assert np.array_equal(np.concatenate(pieces), stream.result.audio)
    return stream.result, len(pieces)


@pytest.mark.parametrize("cls, name, stage, call", [("flow", "solve", "flow", 3), ("llm", "last_logits", "llm", 12),
                                                    ("hift", "decode", "vocoder", 2)])  # fmt: skip
def test_a_stream_of_speech_outlives_a_failure(voice_model, monkeypatch, cls, name, stage, call):
    want, pieces = streamed(voice_model, TEXT)
    fault(monkeypatch, type(getattr(voice_model, cls)), name, call)
    got, got_pieces = streamed(voice_model, TEXT, policy=policy())
    assert len(again(got, stage)) == 1 and got.tokens == want.tokens and got_pieces == pieces > 2
    np.testing.assert_allclose(got.audio, want.audio, atol=1e-5)


def test_text_in_pieces_is_read_once(voice_model, monkeypatch):
    words, asked = ["Hello ", "there, ", "this is ", "some text."], []

    def text():
        for word in words:
            asked.append(word)
            yield word

    want, _ = streamed(voice_model, text())
    assert asked == words
    seen = fault(monkeypatch, type(voice_model.llm), "last_logits", 14)
    got, _ = streamed(voice_model, text(), policy=policy())
    assert asked == words * 2 and "cpu" in seen and len(again(got, "llm")) == 1
    assert got.tokens == want.tokens
    np.testing.assert_allclose(got.audio, want.audio, atol=1e-5)


def test_an_error_of_the_text_is_the_callers(voice_model):
    def text():
        yield "Hello there, how "
        raise RuntimeError("the text broke")

    with pytest.raises(RuntimeError, match="the text broke"):
        list(stream_generate(voice_model, text(), seed=2, policy=policy()))


def test_a_recording_is_converted_in_spite_of_a_failure(voice_model, monkeypatch):
    t = np.arange(4 * 16000) / 16000
    tone = (0.3 * np.sin(2 * np.pi * 220 * t) * (1 + np.sin(9 * t))).astype(np.float32)
    options = {"seed": 1, "note": lambda text: None}
    want = voice_model.convert_voice((tone, 16000), small_voice(), **options)
    seen = fault(monkeypatch, type(voice_model.speech_tokenizer), "tokenize", 1)
    got = voice_model.convert_voice((tone, 16000), small_voice(), policy=policy(), **options)
    assert seen == ["gpu", "cpu"] and len(again(got, "speech_tokenizer")) == 1
    np.testing.assert_allclose(got.audio, want.audio, atol=1e-6)


ALIKE = [{"text": TEXT, "seed": 4}] * 2  # their flow is one batch


@pytest.mark.parametrize("cls, name, stage, call", [("llm", "last_logits", "llm", 9), ("flow", "together", "flow", 1),
                                                    ("hift", "__call__", "vocoder", 2)])  # fmt: skip
def test_a_batch_of_texts_outlives_a_failure(voice_model, monkeypatch, cls, name, stage, call):
    texts, options = ALIKE + ["How are you?"], {"seed": 3, "voice": "anna", "note": lambda text: None}
    want = batch_generate(voice_model, texts, **options)
    seen = fault(monkeypatch, type(getattr(voice_model, cls)), name, call)
    got = batch_generate(voice_model, texts, policy=policy(), **options)
    assert seen[:call] == ["gpu"] * call
    assert (stage == "flow") == (not any(again(r, stage) for r in got))  # a batch of the flow is tried row by row first
    for a, b in zip(got, want):
        assert a.tokens == b.tokens and a.finish_reason == b.finish_reason
        np.testing.assert_allclose(a.audio, b.audio, atol=1e-3)


def test_a_batch_runs_where_the_policy_says(voice_model, monkeypatch):
    seen = [fault(monkeypatch, type(getattr(voice_model, cls)), name, 0)
            for cls, name in (("llm", "last_logits"), ("flow", "together"), ("hift", "__call__"))]  # fmt: skip
    for device in ("cpu", "gpu"):
        batch_generate(voice_model, ALIKE, voice="anna", policy=policy(device=device), note=lambda text: None)
        assert [set(places) for places in seen] == [{device}] * 3
        for places in seen:
            places.clear()


def test_on_the_cpu_a_failure_is_a_failure(voice_model, monkeypatch):
    monkeypatch.setattr(type(voice_model.flow), "__call__", lambda *a, **k: (_ for _ in ()).throw(NAN))
    with pytest.raises(CosyH3Error, match="not finite"):
        generate(voice_model, TEXT, seed=1)


def test_a_policy_must_be_one(voice_model, model):
    for m in (voice_model, model):
        with pytest.raises(CosyH3Error, match="policy must be a runtime.Policy, not str"):
            generate(m, "the cat", policy="cpu")


# ---------------------------------------------------------------- models: text


def text_options(**options):
    return {"max_tokens": 20, "seed": 5, "temperature": 0.9, "repetition_penalty": 1.1, "logprobs": True} | options


def same(got, want):
    assert (got.tokens, got.text, got.finish_reason) == (want.tokens, want.text, want.finish_reason)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)


@pytest.mark.parametrize("where, call", [("prefill", 1), ("step", 1), ("step", 7), ("step", 19)])
def test_text_outlives_a_failure(model, monkeypatch, where, call):
    want = generate(model, "the cat", **text_options())
    fault(monkeypatch, H3, where, call)
    got = generate(model, "the cat", policy=policy(), **text_options())
    same(got, want)
    assert len(again(got, "text")) == 1


def test_text_with_a_context_and_a_nan(model, monkeypatch):
    """What was computed with the NaN leaves no trace in the caller's cache."""

    def run(**options):
        cache = model.make_cache()
        first = generate(model, "Once upon a time", cache=cache, **text_options())
        second = generate(model, " and", cache=cache, **text_options(seed=9), **options)
        return first, second, generate(model, " then", cache=cache, **text_options(seed=3))

    want = run()
    step, calls = H3.step, []

    def bad_step(self, ids, cache):
        logits = step(self, ids, cache)
        calls.append(GATE.here)
        if GATE.here == "gpu" and calls.count("gpu") == 6:
            for layer in cache.layers:  # the state is spoilt, too
                if hasattr(layer, "ssm"):
                    layer.ssm = layer.ssm * float("nan")
            return logits * float("nan")
        return logits

    monkeypatch.setattr(H3, "step", bad_step)
    got = run(policy=policy())
    for a, b in zip(got, want):
        same(a, b)
    assert "not finite" in again(got[1], "text")[0]


def test_rows_of_a_batch_outlive_a_failure(model, monkeypatch):
    prompts = ["the end of the day", "A", "and the other, which is longer"]
    stop = generate(model, "A", **text_options(seed=6)).text[4:6]  # a row that ends before the others
    want = batch_generate(model, prompts, **text_options(stop=stop))
    assert len({len(r.tokens) for r in want}) > 1
    fault(monkeypatch, H3, "step", 15)
    got = batch_generate(model, prompts, policy=policy(), **text_options(stop=stop))
    for a, b in zip(got, want):
        same(a, b)
    assert len(again(got[0], "text")) == 1


def test_streamed_text_outlives_a_failure(model, monkeypatch):
    want = generate(model, "the cat", **text_options())
    fault(monkeypatch, H3, "step", 8)
    stream = stream_generate(model, "the cat", policy=policy(), **text_options())
    assert "".join(stream) == want.text
    same(stream.result, want)
    assert len(again(stream.result, "text")) == 1


# ---------------------------------------------------------------- models: text, long prompts and states


def test_others_have_the_device_between_the_parts_of_a_long_prompt(model, monkeypatch):
    seen = []
    breathe = Request.breathe
    monkeypatch.setattr(
        Request, "breathe", lambda self, stage, worked=0.0: (seen.append((stage, worked)), breathe(self, stage, worked))
    )
    generate(model, [65] * (2 * CHUNK + 10), max_tokens=1, seed=1, policy=policy())
    assert [stage for stage, _ in seen] == ["text"] * 3 and all(worked > 0 for _, worked in seen)


def test_a_long_prompt_is_left_in_the_middle(model, monkeypatch):
    """The caller's cache is then what it was before."""
    cache, hidden = model.make_cache(), H3._hidden
    first = generate(model, "the cat", cache=cache, **text_options())
    stream = stream_generate(model, [65] * (3 * CHUNK), cache=cache, **text_options())
    parts = []

    def counted(self, ids, state, lengths=None):
        parts.append(ids.shape[1])
        stream.run.stopped.set()
        return hidden(self, ids, state, lengths)

    monkeypatch.setattr(H3, "_hidden", counted)
    assert list(stream) == [] and stream.result.finish_reason == "cancelled" and parts == [CHUNK]
    monkeypatch.undo()
    other = model.make_cache()
    assert generate(model, "the cat", cache=other, **text_options()).tokens == first.tokens
    same(*(generate(model, " sat", cache=c, **text_options()) for c in (cache, other)))


@pytest.mark.parametrize("nan", [False, True])
def test_a_prompt_from_cached_states_outlives_a_failure_and_leaves_no_trace(model, monkeypatch, nan):
    prompt, states = "once upon a time " * 3, StateCache(1 << 24)

    def ask(p=None):
        with Scheduler(model, states=states, policy=p) as s:
            return s.submit(prompt, **text_options(repetition_penalty=None)).result()

    want = ask()
    states.clear()
    prefill, seen = H3.prefill, []

    def bad(self, ids, cache, *args, **options):
        logits = prefill(self, ids, cache, *args, **options)
        seen.append(GATE.here)
        if len(seen) > 1:
            return logits
        if not nan:
            raise GPU_ERROR
        return logits * float("nan")

    monkeypatch.setattr(H3, "prefill", bad)
    got = ask(policy())
    assert seen[:2] == ["gpu", "cpu"] and len(again(got, "text")) == 1
    same(got, want)
    assert states.stats()["entries"] == 2  # of the prompt, and of what followed
    same(ask(policy()), want)


def test_decisions_about_text_are_in_the_result_and_in_the_log(model, caplog):
    logs.setup("")
    with caplog.at_level(logging.INFO, logger="mlx_cosyh3"):
        result = generate(model, "the cat", policy=policy(device="cpu"), **text_options())
    assert [(d["stage"], d["device"], d["reason"]) for d in result.decisions] == [("text", "cpu", "device=cpu")]
    assert [r.facts["stage"] for r in caplog.records if r.message == "decision"] == ["text"]
