"""Batches of speech: each row is what it is alone, whatever else is in the batch, fails, or is cancelled."""

import threading

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cosyh3 import batch_generate, generate, load
from mlx_cosyh3.cosyvoice import batch
from mlx_cosyh3.cosyvoice.batch import BatchError, SpeechBatch, buckets
from mlx_cosyh3.cosyvoice.llm import LMOptions, SpeechLM
from mlx_cosyh3.cosyvoice.ragged import RaggedCache, Row, decode
from mlx_cosyh3.cosyvoice.ras import BLOCK, KeyDraws, RowDraws
from mlx_cosyh3.errors import CosyH3Error, StageError
from mlx_cosyh3.results import SpeechResult
from tests import golden_voice_models
from tests.small_voice_model import END_OF_PROMPT_ID, small_voice, write_voice_model

TEXTS = ["Hello.", "There is a cat on the mat, and it looks at you.", "You.", "Oh well.", "Long ago in a land far away."]
LONG = "The cat sat on the mat for a while. " * 12  # several segments
BOUND = 1e-3  # of audio: a last bit of the mel adds up in the phase of its pitch
quiet = lambda text: None  # noqa: E731


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(write_voice_model(tmp_path_factory.mktemp("voice")))


@pytest.fixture(params=golden_voice_models.VERSIONS)
def golden(request, monkeypatch):
    """A model of each version that says two tokens a letter."""
    made = golden_voice_models.model(request.param)
    monkeypatch.setattr(made, "short", True)
    return made


def assert_same(result, want):
    assert isinstance(result, SpeechResult), result
    assert (result.tokens, result.segments, result.mode) == (want.tokens, want.segments, want.mode)
    assert result.finish_reason == want.finish_reason and result.audio.shape == want.audio.shape
    assert np.abs(result.audio - want.audio).max() <= BOUND
    assert result.audio.dtype == np.float32 and result.duration == want.duration


# ---------------------------------------------------------------- speech tokens


def alone(lm, rows):
    """The ids of each (text ids, prompt's, its speech, options, key), and how they ended."""
    made = []
    for ids, prompt, speech, options, key in rows:
        run = lm.generate(ids, prompt, speech, options, key)
        made.append((list(run), run.finish_reason))
    return made


def together(lm, rows, most):
    made = [Row(lm.generate(*row)) for row in rows]
    for _ in decode(lm, iter(made), most, lambda: 0.0):
        pass
    assert all(row.ended and row.error is None for row in made)
    return [(row.tokens, row.run.finish_reason) for row in made]


ROW = st.tuples(
    st.integers(1, 8),  # text ids
    st.integers(0, 6),  # speech of the prompt
    st.sampled_from([
        LMOptions(), LMOptions(temperature=0, max_ratio=4), LMOptions(top_k=3, win_size=0), LMOptions(max_tokens=3),
        LMOptions(min_ratio=1, max_ratio=3, temperature=0.7),
    ]),
    st.integers(0, 9),  # seed
)  # fmt: skip


@given(rows=st.lists(ROW, min_size=1, max_size=5), most=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_rows_are_decoded_as_alone(model, rows, most):
    """Rows of all lengths and options, that come and go."""
    lm, rng = model.llm, np.random.default_rng(0)
    draw = lambda n, high: rng.integers(0, high, n).tolist()  # noqa: E731
    made = [
        (draw(n, 256), [*draw(3, 256), END_OF_PROMPT_ID], draw(p, 81), o, mx.random.key(seed)) for n, p, o, seed in rows
    ]
    assert together(lm, made, most) == alone(lm, made)


def test_every_version_decodes_rows_as_alone(golden):
    options = [LMOptions(min_ratio=1, max_ratio=3), LMOptions(temperature=0, max_ratio=2)]
    letters = golden.tokenizer.encode
    rows = [
        (letters(text), letters("the cat<|endofprompt|>"), [5] * (3 * r), options[r % 2], mx.random.key(r))
        for r, text in enumerate(["ab", "a long text of words", "no", "maybe so", "x"])
    ]
    assert together(golden.llm, rows, 3) == alone(golden.llm, rows)


def test_more_tokens_than_a_block_of_draws(model):
    """Rows whose blocks of uniform numbers end at different times."""
    o = LMOptions(min_ratio=0, max_ratio=1000, max_tokens=2 * BLOCK + 20)
    head = model.llm.llm_decoder.weight
    rows = [([65 + r] * (3 + r), [END_OF_PROMPT_ID], [], o, mx.random.key(r)) for r in range(3)]
    try:
        model.llm.llm_decoder.weight = mx.where((mx.arange(head.shape[0]) < 81)[:, None], head, 0)  # hardly ever ends
        assert together(model.llm, rows, 2) == alone(model.llm, rows)
    finally:
        model.llm.llm_decoder.weight = head


def test_row_draws_are_those_of_each_key():
    keys, begun = [mx.random.key(s) for s in range(3)], (0, 5, BLOCK - 1)
    want = [KeyDraws.start(k) for k in keys]
    draws = None
    for step in range(BLOCK + 40):
        for r, at in enumerate(begun):
            if step == at:
                draws = RowDraws.join(([draws] if draws else []) + [RowDraws.start(keys[r])])
        pair = draws.pair()
        for r, at in enumerate(begun):
            if step >= at:
                assert mx.array_equal(pair[r : r + 1], want[r].pair())
                want[r] = want[r].after(None)
        draws = draws.after(None)
    assert mx.array_equal(draws.take([2, 0]).pair(), mx.concatenate([want[2].pair(), want[0].pair()]))


def test_no_more_rows_at_once_than_allowed(model, monkeypatch):
    seen, plain = [], SpeechLM.last_logits

    def watched(self, embeddings, cache, rows=None):
        seen.append(embeddings.shape[0])
        return plain(self, embeddings, cache, rows)

    monkeypatch.setattr(SpeechLM, "last_logits", watched)
    batch_generate(model, TEXTS * 2, seed=1, steps=1, max_batch=3)
    assert max(seen) == 3 and seen.count(3) > 10


def test_rows_that_leave_take_their_memory_along(model):
    lm = model.llm
    caches = []
    for n in (3, 30, 300):
        cache = lm.make_cache()
        mx.eval(lm.last_logits(mx.zeros((1, n, 64)), cache))
        caches.append(cache)
    ragged = RaggedCache().changed([], caches)
    assert ragged.lengths == [3, 30, 300] and ragged[0].offset == 300 and ragged[0].both.shape[2] == 512
    rest = ragged.changed([1, 0], [])
    assert rest.lengths == [30, 3] and rest[0].offset == 30 and rest[0].both.shape[::2] == (2, 256)
    assert mx.array_equal(rest[0].both[1, :, 27:30], caches[0][0].both[0, :, :3])
    assert rest.rows().positions.tolist() == [30, 3] and rest.changed([1], []).rows() is None


# ---------------------------------------------------------------- flow


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_the_flow_of_rows_is_that_of_each(version, streaming):
    flow, rng = golden_voice_models.model(version).flow, np.random.default_rng(3)
    rows = []
    for tokens, prompt in ((31, 7), (12, 0), (40, 16), (1, 3)):
        ids = [mx.array(rng.integers(0, 100, (1, n)).astype(np.int32)) for n in (tokens, prompt)]
        mel, embedding = rng.standard_normal((1, 2 * prompt, 80)), rng.standard_normal((1, 192))
        rows.append((*ids, mx.array(mel.astype(np.float32)), mx.array(embedding.astype(np.float32))))
    told = []
    made = flow.together(rows, streaming=streaming, steps=4, on_step=told.append)
    for row, mel in zip(rows, made):
        want = flow(*row, streaming=streaming, steps=4)
        assert mel.shape == want.shape and mx.abs(mel - want).max().item() <= 1e-4
    assert told == [1, 2, 3, 4]
    same = flow.together([rows[0]] * 2, streaming=streaming, steps=2)  # of one length: nothing to mask
    assert mx.abs(same[0] - flow(*rows[0], streaming=streaming, steps=2)).max().item() <= 1e-4
    assert mx.array_equal(same[0], same[1])


@given(lengths=st.lists(st.tuples(st.integers(1, 400), st.sampled_from([5, 10])), max_size=30))
@settings(max_examples=50, deadline=None)
def test_buckets_hold_every_job_and_little_padding(model, lengths):
    jobs = []
    for n, steps in lengths:
        [talk] = SpeechBatch(model, ["Hi."], steps=steps, voice="clara", mode="zero_shot", note=quiet).talks
        talk.take()
        talk.jobs[0].tokens = [0] * n
        jobs.append(talk.jobs[0])
    made = buckets(jobs)
    assert sorted(map(id, sum(made, []))) == sorted(map(id, jobs))
    for bucket in made:
        frames = [2 * (12 + len(job.tokens)) for job in bucket]
        assert len({job.talk.options.steps for job in bucket}) == 1
        assert min(frames) >= batch.FILLED * max(frames)
        assert len(bucket) == 1 or max(frames) * len(bucket) <= batch.CPU_FRAMES


# ---------------------------------------------------------------- texts


@pytest.mark.parametrize("filled", [batch.FILLED, 0])
def test_a_batch_is_what_each_is_alone(model, monkeypatch, filled):
    monkeypatch.setattr(batch, "FILLED", filled)  # 0: the flow takes all at once
    monkeypatch.setattr(batch, "CPU_FRAMES", 4000)
    results = batch_generate(model, TEXTS, seed=7, voice="bert")
    for r, (text, result) in enumerate(zip(TEXTS, results)):
        assert_same(result, generate(model, text, seed=7 + r, voice="bert"))
        assert set(result.seconds) == {"llm", "flow", "vocoder", "first_audio"} and min(result.seconds.values()) > 0
        assert 0 < result.seconds["first_audio"] <= result.total and result.rtf > 0
    assert batch_generate(model, []) == []
    again = batch_generate(model, TEXTS, seed=[9, 8, 7, 6, 5], voice="bert", temperature=0.8)
    for seed, text, result in zip((9, 8, 7, 6, 5), TEXTS, again):
        assert_same(result, generate(model, text, seed=seed, voice="bert", temperature=0.8))


REQUESTS = [
    {"text": "Hello there.", "voice": "anna"},
    {"text": "The cat is on the mat.", "voice": "clara", "mode": "zero_shot", "seed": 40},
    {"text": "Be quick about it.", "voice": "clara", "instruct": "Speak very fast."},
    {"text": LONG[:160], "voice": small_voice("other", 9, "a dog", seed=8), "speed": 1.3},
    "Plain.",
    {"text": "Once upon a time.", "voice": "clara", "mode": "cross_lingual", "temperature": 0.0, "max_seconds": 2},
    {"text": "In the end.", "steps": 3, "causal": True, "top_k": 4, "win_size": 0},
    {"text": LONG, "max_seconds": 1.5, "pause": 0.3},
]


@pytest.mark.parametrize("max_batch", [1, 3, None])
def test_voices_modes_and_options_of_their_own(model, max_batch):
    results = batch_generate(model, REQUESTS, seed=3, steps=2, note=quiet, max_batch=max_batch)
    for r, (request, result) in enumerate(zip(REQUESTS, results)):
        own = dict(request) if isinstance(request, dict) else {"text": request}
        assert_same(result, generate(model, own.pop("text"), **{"seed": 3 + r, "steps": 2, "note": quiet} | own))


def test_every_version_speaks_batches(golden):
    texts = ["Hello there.", {"text": "The cat is on the mat.", "voice": "clara"}, "Yes."]
    results = batch_generate(golden, texts, seed=1, steps=2, note=quiet)
    options = {"steps": 2, "note": quiet}
    assert_same(results[0], generate(golden, "Hello there.", seed=1, **options))
    assert_same(results[1], generate(golden, "The cat is on the mat.", voice="clara", seed=2, **options))
    assert_same(results[2], generate(golden, "Yes.", seed=3, **options))


def pieces_of(model, text, **options):
    """The result of the same text segment by segment."""
    stream = model.start(text, False, **options)
    for _ in stream:
        pass
    return stream.result


@pytest.mark.parametrize("options", [{}, {"max_seconds": 1.1}, {"pause": 0, "speed": 0.8, "temperature": 0.5}])
def test_segments_of_a_long_text_are_spoken_together(model, monkeypatch, options):
    options = {"seed": 5, "steps": 2, "voice": "clara", "note": quiet} | options
    want, used = pieces_of(model, LONG, **options), []
    plain = SpeechBatch.of
    monkeypatch.setattr(SpeechBatch, "of", lambda talk: used.append(1) or plain(talk))
    result = generate(model, LONG, **options)
    assert used and len(want.segments) > 2
    assert_same(result, want)


def test_notes_say_which_text(model):
    notes, greedy = [], {"temperature": 0, "steps": 1, "note": None}
    greedy["note"] = notes.append
    generate(model, "Oh", **greedy)
    batch_generate(model, ["Oh", "Ah"], **greedy)
    assert notes[0] in notes[1] + notes[2] and sorted(n.split(":")[0] for n in notes[1:]) == ["text 1", "text 2"]


def test_progress_of_a_batch(model):
    told = []
    results = batch_generate(model, TEXTS, seed=1, steps=3, progress=lambda *now: told.append(now))
    tokens = [done for stage, done, _ in told if stage == "llm"]
    assert tokens == sorted(tokens) and tokens[-1] >= sum(len(r.tokens) for r in results)
    assert [done for stage, done, _ in told if stage == "vocoder"] == [1, 2, 3, 4, 5]
    assert {(done, all) for stage, done, all in told if stage == "flow"} == {(1, 3), (2, 3), (3, 3)}


def test_results_come_as_they_are_done(model):
    made = SpeechBatch(model, ["Hi.", "A cat.", "Yo."], seed=1, steps=1, max_batch=1)
    run = made.run()
    row, result = next(run)
    assert row == 0 and result.finish_reason == "stop" and made.talks[2].jobs[0].row is None  # the last has not begun
    assert [row for row, _ in run] == [1, 2]


# ---------------------------------------------------------------- errors


def test_bad_requests_are_told_before_any_work(model, monkeypatch):
    monkeypatch.setattr(SpeechLM, "last_logits", lambda *given: pytest.fail("work has begun"))
    for bad, message in (
        (["Hi.", " "], "text 2: "),
        (["Hi.", {"text": "Yo.", "voice": "zoe"}], "text 2: this model has no voice 'zoe'"),
        (["Hi.", {"text": "Yo.", "speed": 9}], "text 2: speed must be"),
        (["Hi.", 3], "text 2: text must be a string"),
        (["Hi.", {"words": "Yo."}], "text 2: a request needs a 'text', it has words"),
        ("Hi.", "takes a list of texts"),
        ({"text": "Hi."}, "takes a list of texts"),
    ):
        with pytest.raises(CosyH3Error, match=message) as e:
            model.batch_generate(bad)
        assert "\n" not in str(e.value)
    for options, message in (
        ({"seed": "x"}, "seed"), ({"seed": [1]}, "1 seeds for 2 texts"), ({"max_batch": 0}, "max_batch"),
        ({"errors": "ignore"}, "errors must be 'raise' or 'return', not 'ignore'"),
    ):  # fmt: skip
        with pytest.raises(CosyH3Error, match=message):
            batch_generate(model, ["Hi.", "Yo."], **options)
    with pytest.raises(TypeError, match="no option 'sped', nearest known: 'speed'"):
        batch_generate(model, ["Hi.", {"text": "Yo.", "sped": 1}], errors="return")


def test_bad_requests_in_place_of_their_results(model):
    good, bad, other = batch_generate(model, ["Hi.", " ", "Yo."], seed=1, steps=1, errors="return")
    assert isinstance(bad, CosyH3Error)
    assert_same(good, generate(model, "Hi.", seed=1, steps=1))
    assert_same(other, generate(model, "Yo.", seed=3, steps=1))


def test_a_deadline_is_for_one_text(model):
    asked = ["Hi.", {"text": "Yo.", "deadline": 5.0}]
    with pytest.raises(CosyH3Error, match="^text 2: deadline goes with one text"):
        batch_generate(model, asked)
    good, bad = batch_generate(model, asked, seed=1, steps=1, errors="return")
    assert "deadline goes with one text" in str(bad)
    assert_same(good, generate(model, "Hi.", seed=1, steps=1))


def fails(stage, monkeypatch, model):
    """Make the second of three texts fail in that stage -> (its voice, the message)."""
    if stage == "llm":
        plain = type(model).speak

        def speak(self, segment, mode, speaker, options, key):
            if speaker.name == "bert":
                raise CosyH3Error("bert is silent")
            return plain(self, segment, mode, speaker, options, key)

        monkeypatch.setattr(type(model), "speak", speak)
        return "bert", "bert is silent"
    if stage == "prefix":
        plain = SpeechLM.embed_prefix

        def embed_prefix(self, text, prompt, speech):
            made = plain(self, text, prompt, speech)
            return made * mx.nan if speech else made

        monkeypatch.setattr(SpeechLM, "embed_prefix", embed_prefix)
        return "clara", "speech language model gave a non-finite value"
    if stage == "flow":
        voice = small_voice("broken", 12, seed=5)
        voice.prompt_mel[:] = np.inf
        return voice, "flow gave a value that is not finite"
    plain = type(model).wave

    def wave(self, mel, key):
        made = plain(self, mel, key)
        calls.append(1)
        if len(calls) == 2:
            raise CosyH3Error("the vocoder has a cold")
        return made

    calls = []
    monkeypatch.setattr(type(model), "wave", wave)
    return "anna", "the vocoder has a cold"


@pytest.mark.parametrize("stage", ["llm", "prefix", "flow", "vocoder"])
def test_an_error_of_one_row_does_not_lose_the_others(model, monkeypatch, stage):
    options = {"steps": 2, "note": quiet}
    texts = ["The dog runs.", {"text": "The cat sits on the mat.", "voice": None, "seed": 2}, "The cow moos."]
    want = [generate(model, texts[r], seed=5 + r, **options) for r in (0, 2)]
    texts[1]["voice"], message = fails(stage, monkeypatch, model)
    monkeypatch.setattr(batch, "FILLED", 0)  # so that the flow takes all at once
    if stage in ("prefix", "flow"):
        texts[1]["mode"] = "zero_shot"
    with pytest.raises(BatchError, match=message) as e:
        batch_generate(model, texts, seed=5, **options)
    assert "1 of 3 texts failed" in str(e.value) and "\n" not in str(e.value)
    results, failed = e.value.results, [r for r, x in enumerate(e.value.results) if isinstance(x, Exception)]
    assert len(failed) == 1 and (stage == "vocoder" or failed == [1])
    for r, one in ((0, want[0]), (2, want[1])):
        if r not in failed:
            assert_same(results[r], one)


def test_an_error_of_the_batch_leaves_what_was_done(model, monkeypatch):
    want, calls, plain = generate(model, "Hi.", seed=1, steps=1), [], SpeechLM.last_logits

    def last_logits(self, embeddings, cache, rows=None):
        calls.append(1)
        if len(calls) > 3 * len(want.tokens) + 10:
            raise RuntimeError("the device is gone")
        return plain(self, embeddings, cache, rows)

    monkeypatch.setattr(SpeechLM, "last_logits", last_logits)
    first, *others = batch_generate(model, ["Hi."] + [LONG] * 2, seed=1, steps=1, max_batch=1, errors="return")
    assert_same(first, want)
    assert [isinstance(e, StageError) and "the device is gone" in str(e) for e in others] == [True] * 2


def test_a_batch_that_does_not_fit_is_made_row_by_row(model, monkeypatch):
    """Memory for all at once may lack: then each goes alone."""

    def together(*given, **options):
        raise RuntimeError("[malloc] Unable to allocate")

    monkeypatch.setattr(type(model.flow), "together", together)
    for r, result in enumerate(batch_generate(model, TEXTS[:3], seed=7, steps=1)):
        assert_same(result, generate(model, TEXTS[r], seed=7 + r, steps=1))


# ---------------------------------------------------------------- cancelling


def test_cancelling_one_row(model):
    run = SpeechBatch(model, ["Good morning to you.", "How are you today?", "Fine."], seed=1, steps=2, progress=None)
    run._progress = lambda stage, done, all: run.cancel(1) if stage == "llm" and done >= 3 else None
    results = run.results()
    assert results[1].finish_reason == "cancelled" and len(results[1].audio) == 0
    assert_same(results[0], generate(model, "Good morning to you.", seed=1, steps=2))
    assert_same(results[2], generate(model, "Fine.", seed=3, steps=2))


@pytest.mark.parametrize("stage", ["llm", "flow", "vocoder"])
def test_cancelling_all_ends_at_once(model, stage):
    told = []

    def progress(now, done, all):
        told.append(now)
        if now == stage:
            run.cancel()

    run = SpeechBatch(model, [*TEXTS, LONG], seed=1, steps=5, note=quiet, progress=progress)
    results = run.results()
    assert [r.finish_reason for r in results].count("cancelled") >= len(TEXTS)
    assert told.count(stage) == 1 and told[-1] == stage
    assert_same(batch_generate(model, ["Hi."], seed=1)[0], generate(model, "Hi.", seed=1))  # and all goes on


@pytest.mark.parametrize("stage", ["llm", "flow", "vocoder"])
def test_what_progress_raises_ends_the_batch(model, stage):
    class Enough(Exception):
        pass

    def progress(now, done, all):
        told.append(now)
        if now == stage:
            raise Enough

    for errors in ("raise", "return"):
        told = []
        with pytest.raises(Enough):
            batch_generate(model, TEXTS, seed=1, steps=2, errors=errors, progress=progress)
        assert told[-1] == stage and told.count(stage) == 1


def test_a_batch_may_run_in_another_thread(model):
    want, made = batch_generate(model, TEXTS, seed=3, steps=1), []
    run = SpeechBatch(model, TEXTS, seed=3, steps=1)
    worker = threading.Thread(target=lambda: made.extend(run.results()))
    worker.start()
    worker.join()
    for a, b in zip(made, want):
        assert a.tokens == b.tokens
        np.testing.assert_array_equal(a.audio, b.audio)
