"""Models under a deadline, on this machine: in time, refused, or the best there is; the same for speech and text.

Run: python -m pytest -q tests/test_deadline_models.py
"""

import itertools
import threading

import numpy as np
import pytest

from mlx_cosyh3 import batch_generate, deadline, generate, load, stream_generate
from mlx_cosyh3.caches import StateCache
from mlx_cosyh3.costs import costs_of
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.probes import Memory, Probes
from mlx_cosyh3.scheduler import Scheduler
from tests.policies import SPEECH_STAGES, alone, costly, no_gpu, policy  # noqa: F401 - `alone` is a fixture
from tests.small_voice_model import small_voice, write_voice_model
from tests.test_scheduler_models import os_threads

TEXT = "Hello there."


@pytest.fixture(scope="module")
def voice_model(tmp_path_factory):
    return load(write_voice_model(tmp_path_factory.mktemp("models") / "voice"))


def spoken(model, p, **options):
    return generate(model, TEXT, voice=small_voice(), seed=1, policy=p, **options)


def test_time_enough_changes_nothing(voice_model):
    want, p = spoken(voice_model, None), no_gpu()
    for _ in range(4):
        got = spoken(voice_model, p, deadline=600)
        np.testing.assert_array_equal(got.audio, want.audio)
        assert got.finish_reason == "stop" and got.decisions[-1]["met"] is True
    stream = stream_generate(voice_model, TEXT, voice=small_voice(), seed=1, policy=p, deadline=600)
    assert len(np.concatenate(list(stream))) == len(want.audio) and stream.result.decisions[-1]["met"] is True


def test_costs_of_a_model_are_kept_for_the_next_process(voice_model, model, tmp_path):
    p = no_gpu()
    for _ in range(3):
        spoken(voice_model, p, deadline=600)
        generate(model, "the cat", max_tokens=5, seed=1, policy=p, deadline=600)
    files = list((tmp_path / "cache" / "costs").iterdir())
    assert len(files) == 2 and len({f.name for f in files}) == 2
    later = no_gpu()
    for m, stages in ((voice_model, SPEECH_STAGES[:3]), (model, ("prompt", "text"))):
        assert all(costs_of(later, m).known(stage, "cpu") for stage in stages)
    assert costs_of(later, voice_model).known("tokens", "text")


@pytest.mark.parametrize("way", [generate, stream_generate])
def test_speech_that_cannot_be_in_time_is_refused_before_the_work(voice_model, monkeypatch, way):
    p = no_gpu()
    costly(p, voice_model, SPEECH_STAGES, 7.0)
    monkeypatch.setattr(type(voice_model.llm), "generate", None)  # would be an error if it were asked
    with pytest.raises(CosyH3Error, match="deadline=2 cannot be met: the .* takes about [0-9]+ s here"):
        way(voice_model, TEXT, voice=small_voice(), seed=1, policy=p, deadline=2)


def test_the_best_that_can_be_said_in_time(voice_model):
    p, notes = no_gpu(), []
    costly(p, voice_model, SPEECH_STAGES, 7.0)
    result = spoken(voice_model, p, deadline=2, late="best", note=notes.append)
    assert result.finish_reason == "length" and len(result.tokens) == 1 and len(result.audio) == 960
    assert notes == ["the speech was cut off, so that deadline=2 can be met"]
    assert [d["steps"] for d in result.decisions if d["stage"] == "flow" and "steps" in d] == [deadline.LEAST_STEPS]


def test_a_late_stream_begins_as_soon_as_it_can_and_is_whole(voice_model):
    p = no_gpu()
    costly(p, voice_model, SPEECH_STAGES, 7.0)
    whole = stream_generate(voice_model, TEXT, voice=small_voice(), seed=1)
    first = len(next(whole))
    rest = list(whole)
    stream = stream_generate(voice_model, TEXT, voice=small_voice(), seed=1, policy=p, deadline=2, late="best")
    pieces = list(stream)
    assert len(pieces[0]) < first or not rest
    assert sum(map(len, pieces)) == len(whole.result.audio) and stream.result.finish_reason == "stop"
    assert stream.result.tokens == whole.result.tokens
    planned = [d for d in stream.result.decisions if d["stage"] == "deadline"][0]
    assert planned["steps"] == deadline.LEAST_STEPS and "late even so" in planned["reason"]


def test_several_segments(voice_model):
    text = "The first sentence is here, and it is quite long for a sentence, as such sentences go. " * 4
    want = generate(voice_model, text, voice="anna", seed=1, max_seconds=6, note=lambda t: None)
    got = generate(voice_model, text, voice="anna", seed=1, max_seconds=6, note=lambda t: None, deadline=600)
    assert len(want.segments) > 1 and got.segments == want.segments and len(got.audio) == len(want.audio)
    np.testing.assert_allclose(got.audio, want.audio, atol=1e-3)  # together or one by one


def test_a_batch_has_none(voice_model):
    for texts, options in (([TEXT, TEXT], {"deadline": 9}), ([TEXT, {"text": TEXT, "deadline": 9}], {})):
        with pytest.raises(CosyH3Error, match="deadline goes with one text, not with a batch"):
            batch_generate(voice_model, texts, **options)


def test_a_conversion_has_a_deadline_too(voice_model):
    p = no_gpu()
    t = np.arange(4 * 16000) / 16000
    tone = (0.3 * np.sin(2 * np.pi * 220 * t) * (1 + np.sin(9 * t))).astype(np.float32)
    ask = lambda **options: voice_model.convert_voice(  # noqa: E731
        (tone, 16000), small_voice(), seed=1, policy=p, note=lambda text: None, **options
    )
    assert ask(deadline=600).decisions[-1]["met"] is True
    costly(p, voice_model, ("speech_tokenizer", "flow", "vocoder"), 7.0)
    with pytest.raises(CosyH3Error, match="deadline=2 cannot be met"):
        ask(deadline=2)
    assert len(ask(deadline=2, late="best").audio) > 0


def test_text_that_cannot_be_in_time(model):
    p = no_gpu()
    costly(p, model, ("prompt", "text"), 7.0)
    options = {"max_tokens": 20, "seed": 1, "policy": p}
    with pytest.raises(CosyH3Error, match="deadline=3 cannot be met: a text of max_tokens=20 takes about 1[0-9] s"):
        generate(model, "the cat", deadline=3, **options)
    with pytest.raises(CosyH3Error, match="the first token takes about"):
        stream_generate(model, "the cat", deadline=3, **options)
    want = generate(model, "the cat", **options)
    stream = stream_generate(model, "the cat", deadline=3, late="best", **options)
    assert "".join(stream) == want.text  # late, and whole
    part = generate(model, "the cat", deadline=1e-6, late="best", **options)
    assert part.finish_reason == "length" and part.tokens == want.tokens[:1]
    assert generate(model, "the cat", deadline=600, **options).text == want.text


@pytest.mark.parametrize(
    "options, words", [({"deadline": 0}, "deadline must be more than 0"), ({"late": "no"}, "late must be")]
)
def test_options_of_both_families(voice_model, model, options, words):
    for m, way in itertools.product((voice_model, model), (generate, stream_generate)):
        with pytest.raises(CosyH3Error, match=words):
            way(m, "the cat", **options)


# ---------------------------------------------------------------- time in a queue


@pytest.fixture(params=["speech", "streamed speech", "text", "streamed text", "text from a state"])
def asked(request, voice_model, model):
    """(model, Scheduler options, options of a request, stages) of each kind of request."""
    if "speech" in request.param:
        return voice_model, {}, {"voice": small_voice(), "seed": 1, "stream": "streamed" in request.param}
    states = StateCache(1 << 24) if "state" in request.param else None
    return model, {"states": states}, {"max_tokens": 20, "seed": 1, "stream": "streamed" in request.param}


def known(p, m, seconds):
    costly(p, m, SPEECH_STAGES if hasattr(m, "voices") else ("prompt", "text"), seconds)


def after_a_wait(asked, waited, p, **options):
    """The ticket of a request whose turn comes so many seconds after it was asked."""
    m, settings, own = asked
    gate = threading.Event()
    with Scheduler(m, **settings) as s:
        first = s.call(gate.wait)
        ticket = s.submit(TEXT, policy=p, **own, **options)
        ticket._job.asked -= waited
        gate.set()
        assert first.result() is True
        ticket.wait()
    return ticket


def test_a_request_that_waited_has_less_time(asked):
    """deadline=9000 and some 1000 s of work: in time after 500 s, not after 8990."""
    p = no_gpu()
    known(p, asked[0], 10.0)
    result = after_a_wait(asked, 500, p, deadline=9000).result()
    assert [d["stage"] for d in result.decisions].count("deadline") == 2  # its plan, made when its turn came; the end
    assert result.decisions[-1]["met"] is True
    assert float(result.decisions[-1]["reason"].split()[1]) >= 500  # what it waited is part of it
    late = after_a_wait(asked, 8990, p, deadline=9000)
    with pytest.raises(CosyH3Error, match="^deadline=9000 cannot be met: (the|a) .* takes about .* s here.*, and") as e:
        late.result()
    assert "and the request has waited 8990." in str(e.value) and " s for its turn; give it more time" in str(e.value)
    assert late.state == "failed"


def test_a_request_that_waited_too_long_does_its_best(asked):
    p, streamed = no_gpu(), asked[2]["stream"]
    known(p, asked[0], 10.0)
    whole = after_a_wait(asked, 0, None).result()
    part = after_a_wait(asked, 8990, p, deadline=9000, late="best").result()
    if not streamed and hasattr(asked[0], "voices"):
        assert len(part.tokens) == 1 and part.finish_reason == "length"
    else:
        assert part.tokens == whole.tokens[: len(part.tokens)] and part.tokens
    begun_late = after_a_wait(asked, 9001, p, deadline=9000, late="best").result()
    assert begun_late.decisions[-1]["met"] is False and (streamed or len(begun_late.tokens) == 1)


def test_after_the_deadline_nothing_need_be_known_to_refuse(asked):
    with pytest.raises(CosyH3Error, match=r"deadline=60 cannot be met: the request has waited 61\.. s for its turn"):
        after_a_wait(asked, 61, no_gpu(), deadline=60).result()
    assert after_a_wait(asked, 20, no_gpu(), deadline=60).result().decisions[-1]["met"] is True


def test_the_rules_are_asked_when_its_turn_comes(asked):
    """A GPU that is there when a request is made, and not when it begins."""
    asked_for = [None, "gone by now"]
    p = policy(probes=Probes(gpu=lambda: asked_for.pop(0) if len(asked_for) > 1 else asked_for[0],
                             memory=lambda: Memory(0), battery=lambda: None, heat=lambda: None))  # fmt: skip
    result = after_a_wait(asked, 100, p, deadline=600).result()
    assert {(d["device"], d["reason"]) for d in result.decisions if "device" in d} == {("cpu", "gone by now")}


def test_a_batch_of_texts_says_nothing_of_one(model):
    p = no_gpu()
    for _ in range(3):
        batch_generate(model, ["the cat", "a dog", "tea"], max_tokens=5, seed=1, policy=p)
    costs = costs_of(p, model)
    assert not costs.known("text", "cpu") and costs.known("text x3", "cpu") and costs.known("prompt x3", "cpu")


# ---------------------------------------------------------------- threads


def test_requests_made_in_threads_that_end_leave_nothing(voice_model, model):
    """MLX keeps something for every thread that computes; a request is only made there, and computed elsewhere."""
    p = no_gpu()

    def ask():
        streams.append(stream_generate(voice_model, TEXT, voice=small_voice(), seed=1, policy=p, deadline=600))
        streams.append(stream_generate(model, "the cat", max_tokens=3, seed=1, policy=p, deadline=600))

    counts = []
    for _ in range(12):
        streams = []
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        for stream in streams:
            assert len(list(stream)) > 0
        counts.append(os_threads())
    assert max(counts[3:]) <= max(counts[:3]), counts
