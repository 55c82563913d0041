"""Speech in chunks: equal to what is made at once, seams, text that arrives in pieces, streams that are cut short.

Run: python -m pytest -q tests/test_cosyvoice_speech_stream.py
"""

import threading
import time

import numpy as np
import pytest

from mlx_cosyh3 import generate, load, stream_generate
from mlx_cosyh3.cosyvoice.utterance import FADE
from mlx_cosyh3.errors import CosyH3Error
from tests.small_voice_model import small_voice, write_voice_model

TEXT = "The cat sat."  # 26 speech tokens or more with the seeds below
LONG = "The cat sat on the mat, and it was warm. " * 5
CHUNKS = dict(chunk_tokens=5, max_chunk_tokens=10)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(write_voice_model(tmp_path_factory.mktemp("models") / "voice"))


def chunks(model, text, **options):
    """(list of chunks, the result)"""
    stream = stream_generate(model, text, **options)
    made = list(stream)
    np.testing.assert_array_equal(np.concatenate(made), stream.result.audio)
    return made, stream.result


def long_seed(model, text=TEXT, **options):
    """A seed with which there are at least 40 tokens."""
    return next(s for s in range(50) if len(generate(model, text, seed=s, **options).tokens) >= 40)


VOICES = {
    "embedding": "anna",
    "prompt": small_voice(),
    "odd prompt": small_voice(tokens=13),
    "no transcript": small_voice(transcript=None),
}


# ---------------------------------------------------------------- equal to what is made at once


@pytest.mark.parametrize("voice", VOICES)
@pytest.mark.parametrize(
    "sizes", [{}, CHUNKS, dict(chunk_tokens=3, max_chunk_tokens=3), dict(chunk_tokens=7, max_chunk_tokens=100)]
)
def test_the_stream_equals_offline_with_the_chunk_mask(model, voice, sizes):
    options = {"voice": VOICES[voice], "seed": long_seed(model, voice=VOICES[voice])}
    at_once = generate(model, TEXT, causal=True, **options)
    made, result = chunks(model, TEXT, **sizes, **options)
    assert result.tokens == at_once.tokens and result.finish_reason == at_once.finish_reason == "stop"
    assert len(made) > 1 and result.audio.shape == at_once.audio.shape
    assert np.abs(result.audio - at_once.audio).max() <= 1e-3  # phase adds up what rounds off
    full = generate(model, TEXT, **options)  # full attention differs
    assert full.tokens == at_once.tokens and np.abs(full.audio - at_once.audio).max() > 1e-3


def test_the_first_chunk_is_early_and_the_others_grow(model):
    seed = long_seed(model)
    made, result = chunks(model, TEXT, seed=seed, **CHUNKS)
    sizes = [len(chunk) / 960 for chunk in made]  # in tokens; the vocoder looks 8 frames ahead, 4 tokens
    assert sizes[0] == 5 - 4 and sizes[1] == 10 and set(sizes[1:-1]) == {10}
    assert 0 < result.seconds["first_audio"] < sum(s for name, s in result.seconds.items() if name != "first_audio")


@pytest.mark.parametrize("speed", [0.5, 2.0])
def test_a_speed_that_divides_the_frames_is_the_same_streamed(model, speed):
    seed = long_seed(model)
    at_once = generate(model, TEXT, seed=seed, causal=True, speed=speed)
    made, result = chunks(model, TEXT, seed=seed, speed=speed, **CHUNKS)
    assert len(made) > 2 and np.abs(result.audio - at_once.audio).max() <= 1e-3


@pytest.mark.parametrize("speed", [0.7, 1.3, 1.9])
def test_any_speed_has_the_same_length_streamed(model, speed):
    seed = long_seed(model)
    at_once = generate(model, TEXT, seed=seed, causal=True, speed=speed)
    _, result = chunks(model, TEXT, seed=seed, speed=speed, **CHUNKS)
    assert result.audio.shape == at_once.audio.shape
    plain = generate(model, TEXT, seed=seed)
    assert result.duration == pytest.approx(plain.duration / speed, rel=0.02)


def test_compat_computes_the_last_chunk_with_full_attention(model):
    seed = long_seed(model)
    made, result = chunks(model, TEXT, seed=seed, **CHUNKS)
    upstream, told = chunks(model, TEXT, seed=seed, compat=True, **CHUNKS)
    assert [len(a) for a in made] == [len(a) for a in upstream] and told.tokens == result.tokens
    for a, b in zip(made[:-1], upstream[:-1]):
        np.testing.assert_array_equal(a, b)
    assert np.abs(made[-1] - upstream[-1]).max() > 1e-3


# ---------------------------------------------------------------- seams


def jump(audio, where=None):
    steps = np.abs(np.diff(audio))
    return steps.max() if where is None else max(steps[max(0, i - 2) : i + 2].max() for i in where)


def test_no_jumps_where_chunks_meet(model):
    made, result = chunks(model, TEXT, seed=long_seed(model), **CHUNKS)
    meet = np.cumsum([len(a) for a in made])[:-1]
    assert jump(result.audio, meet) <= jump(result.audio)
    inside = np.delete(np.abs(np.diff(result.audio)), [i - 1 for i in meet])
    assert np.abs(np.diff(result.audio))[meet - 1].max() <= inside.max()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_long_text_is_several_segments_with_pauses(model, streamed):
    options = dict(seed=3, pause=0.2, note=lambda text: None)
    if streamed:
        _, result = chunks(model, LONG, **CHUNKS, **options)
    else:
        result = generate(model, LONG, **options)
    assert len(result.segments) >= 2 and "".join(result.segments).replace(" ", "") == LONG.replace(" ", "")
    pauses = (len(result.segments) - 1) * 4800
    assert len(result.audio) == 960 * len(result.tokens) + pauses
    # Silence of 0.2 s between two segments, reached through a fade: no step there is larger than the fade allows.
    silent = np.flatnonzero(result.audio == 0)
    runs = [run for run in np.split(silent, np.flatnonzero(np.diff(silent) > 1) + 1) if len(run) >= 4800]
    assert len(runs) == len(result.segments) - 1
    for run in runs:
        n = int(FADE * 24000)
        around = result.audio[run[0] - n : run[-1] + n]
        assert np.abs(np.diff(around)).max() <= jump(result.audio)
        assert abs(result.audio[run[0] - 1]) < 0.02 and abs(result.audio[run[-1] + 1]) < 0.02


def test_long_text_streamed_equals_offline(model):
    options = dict(seed=3, note=lambda text: None)
    at_once = generate(model, LONG, causal=True, **options)
    made, result = chunks(model, LONG, **options)
    assert len(made) > len(result.segments) and np.abs(result.audio - at_once.audio).max() <= 1e-3


def test_the_limit_holds_over_all_segments(model):
    notes = []
    whole = generate(model, LONG, seed=3, note=lambda text: None)
    result = generate(model, LONG, seed=3, max_seconds=whole.duration / 2, note=notes.append)
    assert result.finish_reason == "length" and any("max_seconds" in text for text in notes)
    assert result.duration == pytest.approx(whole.duration / 2, abs=0.05)
    np.testing.assert_array_equal(result.tokens, whole.tokens[: len(result.tokens)])


# ---------------------------------------------------------------- text that arrives in pieces


@pytest.mark.parametrize("voice, mode", [("anna", "sft"), ("prompt", "zero_shot"), ("no transcript", "cross_lingual")])
def test_text_in_pieces_is_spoken(model, voice, mode):
    options = dict(voice=VOICES.get(voice, voice), seed=1, note=lambda text: None, **CHUNKS)
    results = [
        chunks(model, iter(cut), **options)[1]
        for cut in ([*"The cat sat on the mat."], ["The cat sat", " on the mat."])
    ]
    assert results[0].mode == mode and results[0].tokens == results[1].tokens and results[0].duration > 0.5
    np.testing.assert_array_equal(results[0].audio, results[1].audio)


def test_speech_begins_before_the_text_has_ended(model):
    """The text goes on only after the first audio was there."""
    asked = []

    def text():
        for word in "The cat sat on the mat and then it".split():
            asked.append(word)
            yield word + " "
        while not heard:
            time.sleep(0.01)
        yield "slept."

    heard = []
    stream = stream_generate(model, text(), seed=1, **CHUNKS)
    for chunk in stream:
        heard.append(len(chunk))
    assert len(asked) == 9 and stream.result.finish_reason in ("stop", "length")


def test_an_instruction_goes_with_text_in_pieces(model):
    _, result = chunks(
        model, iter(["The cat ", "sat."]), voice="clara", instruct="Speak fast.", seed=1, note=lambda text: None
    )
    assert result.mode == "instruct" and result.duration > 0


def test_an_error_in_the_text_source_reaches_the_caller(model):
    def text():
        yield "The cat sat on the mat and then it "
        raise ConnectionError("gone")

    stream = stream_generate(model, text(), seed=1, **CHUNKS)
    with pytest.raises(ConnectionError, match="gone"):
        list(stream)
    assert stream.result.finish_reason == "cancelled"


def test_generate_takes_no_pieces(model):
    with pytest.raises(CosyH3Error, match="stream_generate also takes an iterator"):
        generate(model, iter(["a"]))


# ---------------------------------------------------------------- cut short


def test_closing_keeps_the_audio_made_so_far(model):
    stream = stream_generate(model, LONG, seed=3, note=lambda text: None, **CHUNKS)
    got = [next(stream), next(stream)]
    stream.close()
    r = stream.result
    assert r.finish_reason == "cancelled" and np.isfinite(r.rtf)
    heard = np.concatenate(got)
    np.testing.assert_array_equal(r.audio[: len(heard)], heard)
    full = chunks(model, LONG, seed=3, note=lambda text: None, **CHUNKS)[1]
    assert len(heard) <= len(r.audio) < len(full.audio)
    np.testing.assert_array_equal(full.audio[: len(r.audio)], r.audio)
    with pytest.raises(StopIteration):
        next(stream)


def test_closing_before_the_first_chunk(model):
    stream = stream_generate(model, TEXT)
    stream.close()
    assert (
        stream.result.finish_reason == "cancelled"
        and len(stream.result.audio) == 0
        and stream.result.rtf == float("inf")
    )


def test_closing_does_not_wait_for_a_stage_to_end(model):
    """Offline, all is one piece: close() must end it between two steps."""
    steps = []

    def progress(stage, done, all):
        if stage == "flow":
            steps.append(done)
            while len(steps) == 2 and not stream.run.stopped.is_set():
                time.sleep(0.005)

    stream = model.start(TEXT, False, seed=1, steps=500, progress=progress)
    worker = threading.Thread(target=lambda: list(stream))
    worker.start()
    while len(steps) < 2:
        time.sleep(0.005)
    stream.close()
    worker.join(30)
    assert not worker.is_alive() and len(steps) == 2 and stream.result.finish_reason == "cancelled"


def test_a_with_block_closes(model):
    with stream_generate(model, LONG, seed=3, note=lambda text: None, **CHUNKS) as stream:
        next(stream)
    assert stream.result.finish_reason == "cancelled" and len(stream.result.audio)
