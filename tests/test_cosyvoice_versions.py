"""The same for every version: upstream's audio, modes, streams, seeds, threads, seams, long texts, clear errors.

Run: MLX_COSYH3_GOLDENS=folder python -m pytest -q tests/test_cosyvoice_versions.py
"""

import time
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_cosyh3 import generate, stream_generate
from mlx_cosyh3.cosyvoice import prompts, utterance
from mlx_cosyh3.cosyvoice.speech import SpeechOptions
from mlx_cosyh3.cosyvoice.utterance import Utterance
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.errors import CosyH3Error
from tests.cosyvoice_hift_data import error
from tests.golden_data import cosyvoice_golden
from tests.golden_voice_models import VERSIONS, model, voice

TOLERANCE = 1e-2  # of a wav, end to end: the phase adds up what rounds off
TEXT = "The cat sat on the mat."
LONG = "The cat sat on the mat, and it was warm. " * 5
CHUNKS = dict(chunk_tokens=25, max_chunk_tokens=25)
SHORT = dict(max_seconds=1.0, steps=2, note=lambda text: None)
SPEAKS_SO = [  # voice, options -> mode, whether its recording goes to the language model and to the flow
    ("anna", {}, "sft", False, False),
    ("clara", {}, "sft", False, False),
    ("recording", {}, "zero_shot", True, True),
    ("untold", {}, "cross_lingual", False, True),
    ("clara", {"mode": "zero_shot"}, "zero_shot", True, True),
    ("recording", {"mode": "cross_lingual"}, "cross_lingual", False, True),
    ("anna", {"instruct": "Speak fast."}, "instruct", False, False),
    ("clara", {"instruct": "Speak fast."}, "instruct", False, True),
    ("recording", {"instruct": "Speak fast."}, "instruct", False, True),
]
versions = pytest.mark.parametrize("version", VERSIONS)


@pytest.fixture
def speaks_short(version, monkeypatch):
    monkeypatch.setattr(model(version), "short", True)


def given(version, name):
    return {"recording": voice(version), "untold": voice(version, transcript=None)}.get(name, name)


# ---------------------------------------------------------------- from upstream's speech tokens to upstream's audio


class Recorded:
    """A part of a golden's model, which draws what upstream drew: for the flow `noise`, for the vocoder nothing."""

    def __init__(self, part, noise=()):
        self.part, self.noise = part, list(noise)

    def __getattr__(self, name):
        return getattr(self.part, name)

    def __call__(self, x, *rest, key, **options):
        if self.noise:
            return self.part(x, *rest, noise=mx.array(self.noise.pop(0).swapaxes(1, 2)), **options)
        silence = mx.zeros((1, x.shape[1] * self.config.samples_per_frame, 9))
        return self.part.render(x, silence, mx.zeros((1, 9)), *rest)


@pytest.fixture
def golden(monkeypatch):
    """golden(version, case, streamed, **options) -> the chunks of audio that upstream's tokens become."""

    def made(version, case, streamed=False, **options):
        io, m = load_file(cosyvoice_golden(f"v{version}_e2e") / "io.safetensors"), model(version)
        prompt = [io[f"in.{name}"][0] for name in ("embedding", "prompt_token", "prompt_feat")]
        rate = m.sample_rate
        told = Voice(*prompt, None, None, "golden", 0, rate)
        monkeypatch.setattr(type(m), "speech_tokens", lambda self, samples, rate: io["in.token"][0])
        monkeypatch.setattr(utterance, "LONGEST", 1000)
        before = m.flow, m.hift
        if version < 3:
            m.hift = Recorded(m.hift)
        if version == 1:
            m.flow = Recorded(m.flow, [io[f"{case}.z"]] if not streamed else [io[f"stream.z{i}"] for i in range(3)])
        try:
            o = SpeechOptions(voice=told, seed=0, **options)
            chunks = list(Utterance(m, None, o, streamed, None, None, source=(np.zeros(24000), 24000)).pieces())
        finally:
            m.flow, m.hift = before
        return chunks, io

    return made


@versions
def test_offline_is_upstreams(golden, version):
    [wav], io = golden(version, "nostream")
    assert error(wav, io["nostream.wav"][0]) < TOLERANCE


@pytest.mark.parametrize("version", [2, 3])
def test_speed_is_upstreams(golden, version):
    [wav], io = golden(version, "nostream_speed1.3", speed=1.3)
    assert error(wav, io["nostream_speed1.3.wav"][0]) < TOLERANCE / 4


@versions
def test_streamed_is_upstreams(golden, version):
    """With compat, every chunk; without, those before anything is faded or the last is computed in full."""
    chunks, io = golden(version, "stream", True, compat=True)
    ours, _ = golden(version, "stream", True)
    assert len(chunks) == len(ours) == 3
    for i, chunk in enumerate(chunks):
        assert error(chunk, io[f"stream.chunk{i}"][0]) < TOLERANCE
        assert ours[i].shape == chunk.shape
    assert error(ours[0], io["stream.chunk0"][0]) < TOLERANCE
    assert error(ours[2], io["stream.chunk2"][0]) > TOLERANCE


# ---------------------------------------------------------------- modes


@pytest.fixture
def seen(monkeypatch):
    """What the parts were given: {"llm": ..., "flow": ...} of the last utterance."""
    told = {}
    for m in map(model, VERSIONS):
        for cls, name, part in ((type(m.llm), "generate", "llm"), (type(m.flow), "__call__", "flow")):
            made = getattr(cls, name)

            def spy(self, *args, made=made, part=part, **options):
                told[part] = args, options
                return made(self, *args, **options)

            monkeypatch.setattr(cls, name, spy)
    return told


@versions
@pytest.mark.parametrize("name, options, mode, to_llm, to_flow", SPEAKS_SO)
def test_every_mode(seen, version, name, options, mode, to_llm, to_flow):
    m = model(version)
    speaker = given(version, name)
    held = m.voices[speaker] if isinstance(speaker, str) else speaker
    run = lambda: generate(m, TEXT, voice=speaker, seed=1, **options, **SHORT)  # noqa: E731
    if version == 1 and mode == "instruct" and name == "recording":
        with pytest.raises(CosyH3Error, match="one of the model's voices .it has: anna, clara., not with"):
            run()
        return
    result = run()
    assert result.mode == mode and result.sample_rate == (22050 if version == 1 else 24000)
    assert 0.5 < result.duration < 1.03 and np.isfinite(result.audio).all() and result.audio.any()
    (text, prompt, speech, *_), lm_options = seen["llm"]
    encode = m.tokenizer.encode
    assert speech == (held.prompt_tokens.tolist() if to_llm else [])
    if version == 1:  # the speaker, but for instruct
        assert ("speaker" in lm_options) and (lm_options["speaker"] is None) == (mode == "instruct")
        to_flow = to_flow and mode != "instruct"
    told = prompts.layout(
        mode, version, "The cat sat on the mat.", held.transcript, options.get("instruct"), note=lambda text: None
    )
    assert (prompt, text) == tuple(map(encode, told))
    (said, tokens, mel, embedding), _ = seen["flow"]
    assert said.shape[1] == len(result.tokens)
    assert (tokens.shape[1], mel.shape[1]) == ((16, len(held.prompt_mel)) if to_flow else (0, 0))
    np.testing.assert_array_equal(embedding[0], held.embedding)


@versions
def test_what_it_cannot_do_is_one_clear_line(version):
    m = model(version)
    pieces = lambda: list(stream_generate(m, iter(["The cat ", "sat."]), seed=1, **SHORT))  # noqa: E731
    causal = lambda: generate(m, TEXT, seed=1, causal=True, **SHORT)  # noqa: E731
    if version == 1:
        for ask, words in ((pieces, "CosyVoice 1 reads a whole text"), (causal, "CosyVoice 1 has no streaming mask")):
            with pytest.raises(CosyH3Error, match=words) as e:
                ask()
            assert "\n" not in str(e.value)
        assert m.abilities == "sft, zero_shot, cross_lingual, instruct, at once or streamed"
    else:
        assert sum(map(len, pieces())) > 0 and causal().duration > 0
        assert m.abilities == "sft, zero_shot, cross_lingual, instruct, at once or streamed, also from text in pieces"
    with pytest.raises(CosyH3Error, match="text must be a string, not int"):
        generate(m, 5)
    with pytest.raises(CosyH3Error, match="mode must be one of zero_shot, cross_lingual, .*, not 'zeroshot'"):
        generate(m, TEXT, mode="zeroshot")
    with pytest.raises(CosyH3Error, match=f"speech_tokenizer_v{version}.onnx"):
        m.convert_voice((np.ones(48000, np.float32), 24000), "anna")
    other = voice(3 if version == 1 else 1)
    with pytest.raises(CosyH3Error, match="was made for a model of"):
        generate(m, TEXT, voice=other)


@versions
def test_a_recording_becomes_a_prompt(version, monkeypatch):
    """The mel is at the model's rate; in CosyVoice 1 its length is its own. compat: upstream's, wrong there."""
    m = model(version)
    rate, hop = (22050, 256) if version == 1 else (24000, 480)
    heard = np.arange(2 * m.token_rate + 1, dtype=np.int32) % 100
    monkeypatch.setattr(type(m), "speech_tokens", lambda self, samples, rate: heard)
    sound = np.random.default_rng(0).standard_normal(2 * 44100).astype(np.float32)
    tokens, mel = m.speech_features(sound, 44100)
    assert mel.shape[0] == pytest.approx(2 * rate / hop, abs=1) and mel.dtype == np.float32
    if version == 1:
        np.testing.assert_array_equal(tokens, heard)
        compat = m.speech_features(sound, 44100, compat=True)[1]
        assert compat.shape[0] == pytest.approx(2 * 24000 / 256, abs=1)
    else:
        assert len(mel) == 2 * len(tokens)
        np.testing.assert_array_equal(m.speech_features(sound, 44100, compat=True)[1], mel)


# ---------------------------------------------------------------- streams


def streamed(m, text=TEXT, **options):
    """(list of chunks, the result)"""
    stream = stream_generate(m, text, note=lambda text: None, **options)
    made = list(stream)
    np.testing.assert_array_equal(np.concatenate(made), stream.result.audio)
    return made, stream.result


@versions
@pytest.mark.parametrize("name", ["anna", "recording", "untold"])
def test_a_stream_says_what_offline_says(version, name):
    options = dict(voice=given(version, name), seed=1, steps=2, max_seconds=2.5)
    m = model(version)
    at_once = generate(m, TEXT, note=lambda text: None, **options)
    made, result = streamed(m, **options, **CHUNKS)
    assert result.tokens == at_once.tokens and result.finish_reason == at_once.finish_reason and len(made) > 2
    # CosyVoice 1 rounds the frames of each window down.
    assert len(at_once.audio) - len(result.audio) in (range(256 * len(made)) if version == 1 else (0,))
    if version == 3:
        causal = generate(m, TEXT, causal=True, note=lambda text: None, **options)
        assert error(result.audio, causal.audio) <= 1e-3


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("name", ["anna", "recording"])
def test_the_flow_is_exact_in_chunks(version, name):
    """Where the masks allow it: the mel of a stream is that of offline with the streaming mask."""
    m, tokens = model(version), np.random.default_rng(0).integers(0, 300, 83).tolist()
    speaker, key = voice(version) if name == "recording" else m.voices[name], mx.random.key(0)
    prompt = m.prompt(speaker, "zero_shot" if name == "recording" else "sft")
    whole = m.mel(tokens, prompt, SpeechOptions(causal=True, steps=2), key)
    o = SpeechOptions(steps=2, **CHUNKS).settle(m)
    stream, hops, made, at = m.mel_stream(prompt, o, key), m.hops(prompt, o), [], 0
    while at < len(tokens):
        n = next(hops)
        made.append(stream.add(tokens[at : at + n], at + n >= len(tokens)))
        at += n
    assert len(made) > 2 and error(mx.concatenate(made, axis=1), whole) < 1e-4 * np.abs(whole).max()


@versions
@pytest.mark.parametrize("compat", [False, True])
def test_a_stream_ends_at_any_step_of_its_flow(version, compat, monkeypatch):
    """Steps of every chunk are told, the last one's, too; who no longer waits there has to wait for no more of them."""
    m, steps = model(version), []
    network = type(getattr(m.flow, "network" if version > 1 else "unet"))
    made = network.__call__
    monkeypatch.setattr(network, "__call__", lambda self, *a, **o: steps.append(1) or made(self, *a, **o))

    def run(stop=None):
        steps.clear()
        o, told = SpeechOptions(voice=voice(version), seed=1, steps=10, max_seconds=2.5, compat=compat, **CHUNKS), []

        def progress(stage, done, all):
            told.extend([stage] * (stage == "flow"))
            if len(told) == stop:
                u.stopped.set()

        u = Utterance(m, TEXT, o, True, lambda text: None, progress)
        return list(u.pieces()), len(told), u

    chunks, all_told, _ = run()
    assert len(chunks) > 1 and len(steps) == 10 * len(chunks)
    assert all_told >= len(steps)  # every step, and the beginning of each chunk
    for stop in (3, all_told - 4):
        _, told, u = run(stop)
        assert told == stop and len(steps) <= stop + 1 and u.result().finish_reason == "cancelled"


@versions
def test_no_jumps_where_chunks_meet(version):
    made, result = streamed(model(version), seed=1, steps=2, max_seconds=2.5, **CHUNKS)
    meet, steps = np.cumsum([len(a) for a in made])[:-1], np.abs(np.diff(result.audio))
    assert len(meet) > 1 and steps[meet - 1].max() <= np.delete(steps, meet - 1).max()


@versions
@pytest.mark.parametrize("speed", [0.7, 2.0])
def test_speed(version, speed):
    m, options = model(version), dict(seed=1, voice=voice(version), note=lambda text: None, steps=2, max_seconds=2.0)
    plain = generate(m, TEXT, **options)
    fast = generate(m, TEXT, speed=speed, **options | {"max_seconds": 2.0 / speed})
    assert fast.tokens == plain.tokens and fast.duration == pytest.approx(plain.duration / speed, rel=0.02)
    del options["note"]
    _, result = streamed(m, speed=speed, **options | {"max_seconds": 2.0 / speed}, **CHUNKS)
    assert result.tokens == plain.tokens and result.duration == pytest.approx(plain.duration / speed, rel=0.03)


@versions
def test_chunks_begin_small_and_grow(version):
    """The hops of the options; CosyVoice 1's own is two seconds."""
    m, o = model(version), SpeechOptions()
    prompt = m.prompt(m.voices["anna"], "sft")
    hops = m.hops(prompt, o.settle(m))
    want = {1: [120, 100, 100], 2: [28, 50, 100, 100], 3: [28, 50, 100, 100]}[version]
    assert [next(hops) for _ in want] == want
    hops = m.hops(prompt, SpeechOptions(chunk_tokens=25, max_chunk_tokens=60).settle(m))
    assert [next(hops) for _ in range(3)] == ([45, 50, 60] if version == 1 else [28, 50, 75])
    with pytest.raises(CosyH3Error, match="max_chunk_tokens must be a whole number from 150"):
        SpeechOptions(chunk_tokens=150, max_chunk_tokens=100)
    assert SpeechOptions(chunk_tokens=150).settle(m).max_chunk_tokens == 150


# ---------------------------------------------------------------- seeds and threads


@versions
@pytest.mark.parametrize("live", [False, True])
def test_the_same_seed_is_the_same_bytes_in_any_thread(version, live):
    m = model(version)

    def speak(seed):
        options = dict(voice=voice(version), seed=seed, steps=2, max_seconds=2.0)
        return streamed(m, **options, **CHUNKS)[1] if live else generate(m, TEXT, **options, note=lambda text: None)

    want = [speak(seed) for seed in (1, 2)]
    assert len({tuple(r.tokens) for r in want}) == 2
    with ThreadPoolExecutor(4) as pool:
        for seed, r in zip((1, 2, 1, 2), pool.map(speak, (1, 2, 1, 2))):
            np.testing.assert_array_equal(r.audio, want[seed - 1].audio)


@versions
@pytest.mark.usefixtures("speaks_short")
def test_memory_is_flat(version):
    m, memory = model(version), []
    for n in range(8):
        generate(m, TEXT, seed=n, steps=1, note=lambda text: None)
        with stream_generate(m, LONG, seed=n, steps=1, note=lambda text: None, **CHUNKS) as stream:
            next(stream)  # and no more of it
        mx.clear_cache()
        memory.append(mx.get_active_memory())
    assert max(memory[2:]) <= 1.01 * min(memory[2:]), memory


@pytest.mark.parametrize("version", [1, 2])
def test_the_noise_is_the_seeds_too(version):
    """With the likeliest tokens, another seed changes the noise in flow and vocoder alone."""
    m, options = model(version), dict(temperature=0, **SHORT)
    a, b, again = (generate(m, TEXT, seed=seed, **options) for seed in (1, 2, 1))
    assert a.tokens == b.tokens and error(a.audio, b.audio) > 1e-4
    np.testing.assert_array_equal(a.audio, again.audio)


# ---------------------------------------------------------------- long texts


class AtOnce:
    """In place of Beside: the work is done before anything else goes on."""

    done = True

    def __init__(self, function, *args):
        self.result = lambda made=function(*args): made

    def wait(self, timeout=None):
        return True


@versions
@pytest.mark.usefixtures("speaks_short")
def test_segments_that_overlap_in_time_are_the_same(version, monkeypatch):
    m, options = model(version), dict(seed=1, steps=2, max_seconds=6.0, note=lambda text: None)
    ways = m.start(LONG, False, **options), m.start(LONG, False, **options)
    assert sum(map(len, ways[0])) > 0 and len(ways[0].result.segments) > 2
    monkeypatch.setattr(utterance, "Beside", AtOnce)
    assert sum(map(len, ways[1])) > 0
    result, want = (way.result for way in ways)
    assert result.tokens == want.tokens
    np.testing.assert_array_equal(result.audio, want.audio)


@versions
@pytest.mark.usefixtures("speaks_short")
def test_a_segment_becomes_audio_while_the_next_is_read(version):
    """Its audio may come before the next segment's tokens have all been drawn; stages are told one after the other."""
    m, told = model(version), []

    def progress(stage, done, all):
        told.append(stage)
        if stage == "llm":
            time.sleep(0.002)  # the language model is slow here

    stream = m.start(LONG, False, seed=1, steps=1, note=lambda text: None, progress=progress)
    first = next(stream)
    drawn = told.count("llm")
    rest = list(stream)
    assert len(first) and len(rest) == 2 * len(stream.result.segments) - 1  # the end of each comes on its own
    assert told.count("llm") > drawn
    assert told.count("flow") == len(stream.result.segments)


@versions
@pytest.mark.usefixtures("speaks_short")
def test_a_failure_comes_after_what_was_said_before(version, monkeypatch):
    m = model(version)
    made, count = type(m.llm).generate, []

    def fails_later(self, *args, **options):
        count.append(1)
        if len(count) == 3:
            raise CosyH3Error("the third fails")
        return made(self, *args, **options)

    monkeypatch.setattr(type(m.llm), "generate", fails_later)
    stream, heard = m.start(LONG, False, seed=1, steps=2, note=lambda text: None), []
    with pytest.raises(CosyH3Error, match="the third fails"):
        for piece in stream:
            heard.append(piece)
    assert len(heard) == 2 * 2 and stream.result.finish_reason == "cancelled"


@versions
@pytest.mark.usefixtures("speaks_short")
def test_closing_ends_what_works_beside(version):
    m = model(version)
    stream = m.start(LONG, False, seed=1, steps=10, note=lambda text: None)
    next(stream)
    stream.close()
    assert 0 < stream.result.duration and stream.result.finish_reason == "cancelled"
    assert len(generate(m, TEXT, seed=1, **SHORT).audio)  # and all goes on


@versions
@pytest.mark.usefixtures("speaks_short")
def test_the_limit_counts_pauses(version):
    result = generate(model(version), LONG, seed=1, steps=1, pause=0.5, max_seconds=4.0, note=lambda text: None)
    assert result.duration == pytest.approx(4, abs=0.05) and result.finish_reason == "length"


# ---------------------------------------------------------------- voice conversion


@versions
def test_convert_voice(version, monkeypatch):
    m, source = model(version), (np.random.default_rng(0).standard_normal(3 * 24000).astype(np.float32) * 0.1, 24000)
    tokens = np.random.default_rng(1).integers(0, 300, 3 * m.token_rate).astype(np.int32)
    monkeypatch.setattr(type(m), "speech_tokens", lambda self, samples, rate: tokens)
    monkeypatch.setattr(type(m), "need", lambda self, *parts: None)
    a, again = (m.convert_voice(source, "clara", seed=1, steps=2) for _ in range(2))
    assert a.mode == "convert" and a.tokens == tokens.tolist() and a.duration == pytest.approx(3, abs=0.02)
    np.testing.assert_array_equal(a.audio, again.audio)
    live = m.start_conversion(source, "clara", True, seed=1, steps=2, **CHUNKS)
    chunks = list(live)
    assert len(chunks) > 2 and live.result.tokens == a.tokens and live.result.duration == pytest.approx(3, abs=0.1)
    with pytest.raises(TypeError, match="takes no option 'pause', only steps, speed, seed"):
        m.convert_voice(source, "clara", pause=1.0)
    monkeypatch.setattr(utterance, "LONGEST", 1.0)
    parts = m.start_conversion(source, "clara", seed=1, steps=2)
    first = next(parts)
    parts.close()
    assert parts.result.finish_reason == "cancelled" and len(parts.result.audio) >= len(first) > 0
    assert m.convert_voice(source, "clara", seed=1, steps=2).duration == pytest.approx(3, abs=0.1)
