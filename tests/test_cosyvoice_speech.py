"""generate with a CosyVoice model: modes, options, segments, results and errors. The model is small and random.

Run: python -m pytest -q tests/test_cosyvoice_speech.py
"""

import itertools

import mlx.core as mx
import numpy as np
import pytest
import soundfile

from mlx_cosyh3 import batch_generate, generate, load, stream_generate
from mlx_cosyh3.cosyvoice import prompts
from mlx_cosyh3.cosyvoice.flow import Flow
from mlx_cosyh3.cosyvoice.llm import SpeechLM
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.errors import CosyH3Error
from tests.small_voice_model import SPEECH, config, small_voice, write_voice_model

TEXT = "Hello there."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_voice_model(tmp_path_factory.mktemp("models") / "voice")


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


@pytest.fixture
def calls(monkeypatch):
    """What the language model and the flow were given: {"llm": [(text ids, prompt ids, speech)], "flow": [...]}."""
    seen, generate_ids, flow = {"llm": [], "flow": []}, SpeechLM.generate, Flow.__call__

    def spy_llm(self, text_ids, prompt_ids, prompt_speech, options, key):
        seen["llm"].append((list(text_ids), list(prompt_ids), list(prompt_speech), options))
        return generate_ids(self, text_ids, prompt_ids, prompt_speech, options, key)

    def spy_flow(self, tokens, prompt_tokens, prompt_mel, embedding, **options):
        seen["flow"].append(
            (tokens.shape[1], prompt_tokens.shape[1], prompt_mel.shape[1], np.array(embedding[0]), options)
        )
        return flow(self, tokens, prompt_tokens, prompt_mel, embedding, **options)

    monkeypatch.setattr(SpeechLM, "generate", spy_llm)
    monkeypatch.setattr(Flow, "__call__", spy_flow)
    return seen


# ---------------------------------------------------------------- modes

SYSTEM = prompts.PREFIX
END = "<|endofprompt|>"
MODES = [  # voice, options; the mode, the prompt's text, the text, whether the prompt's speech goes to LM and to flow
    (None, {}, "sft", "", END + TEXT, False, False),
    ("bert", {}, "sft", "", END + TEXT, False, False),
    ("clara", {}, "sft", "", END + TEXT, False, False),
    ("clara", {"mode": "zero_shot"}, "zero_shot", SYSTEM + "the cat", TEXT, True, True),
    ("prompted", {}, "zero_shot", SYSTEM + "the cat", TEXT, True, True),
    ("untold", {}, "cross_lingual", "", SYSTEM + TEXT, False, True),
    ("prompted", {"mode": "cross_lingual"}, "cross_lingual", "", SYSTEM + TEXT, False, True),
    ("prompted", {"instruct": "Speak fast."}, "instruct", prompts.SYSTEM + " Speak fast." + END, TEXT, False, True),
    ("anna", {"instruct": "Speak fast."}, "instruct", prompts.SYSTEM + " Speak fast." + END, TEXT, False, False),
    ("plain", {}, "sft", "", END + TEXT, False, False),
]


@pytest.mark.parametrize("voice, options, mode, prompt, text, llm_speech, flow_speech", MODES)
def test_the_mode_follows_from_the_arguments(model, calls, voice, options, mode, prompt, text, llm_speech, flow_speech):
    given = {"prompted": small_voice(), "untold": small_voice(transcript=None), "plain": small_voice(tokens=0)}.get(
        voice, voice
    )
    held = given if not isinstance(given, str) and given else model.voices[given or "anna"]
    result = generate(model, TEXT, voice=given, seed=1, note=lambda text: None, **options)
    assert result.mode == mode and result.finish_reason == "stop" and result.segments == [TEXT]
    [(text_ids, prompt_ids, speech, _)] = calls["llm"]
    encode = model.tokenizer.encode
    assert (text_ids, prompt_ids) == (encode(text), encode(prompt))
    assert speech == (held.prompt_tokens.tolist() if llm_speech else [])
    [(said, tokens, mel, embedding, _)] = calls["flow"]
    assert said == len(result.tokens)
    assert (tokens, mel) == ((12, 24) if flow_speech else (0, 0))
    np.testing.assert_array_equal(embedding, held.embedding)


def test_a_transcript_stored_as_ids_is_used_as_it_is(model, calls):
    voice = small_voice(transcript=None)
    voice.transcript_ids = np.array([1, 2, prompts_end(model)], np.int32)
    assert generate(model, TEXT, voice=voice, seed=1).mode == "zero_shot"
    assert calls["llm"][0][1] == [1, 2, prompts_end(model)]


def prompts_end(model):
    return model.tokenizer.end_of_prompt_id


@pytest.mark.parametrize(
    "voice, options, words",
    [
        ("anna", {"mode": "zero_shot"}, "'zero_shot' needs a voice made from a recording; 'anna'"),
        ("anna", {"mode": "cross_lingual"}, "'cross_lingual' needs a voice made from a recording"),
        ("anna", {"mode": "instruct"}, "do not go together"),
        ("anna", {"mode": "sft", "instruct": "Loud."}, "do not go together"),
        ("untold", {"mode": "zero_shot"}, "needs the transcript of the voice"),
        ("anna", {"mode": "zeroshot"}, "nearest known: 'zero_shot'"),
        ("ana", {}, "no voice 'ana' (it has: anna, bert, clara), nearest known: 'anna'; clone one"),
        (3, {}, "voice must be a Voice or the name of one, not int"),
        ("other", {}, "was made for a model with 6561 speech tokens, this one has 81"),
        ("anna", {"instruct": "  "}, "instruct is empty"),
    ],
)
def test_what_does_not_go_together(model, voice, options, words):
    given = {"untold": small_voice(transcript=None), "other": small_voice(codebook=6561)}.get(voice, voice)
    with pytest.raises(CosyH3Error) as e:
        generate(model, TEXT, voice=given, **options)
    assert words in str(e.value) and "\n" not in str(e.value)


# ---------------------------------------------------------------- options and text


@pytest.mark.parametrize(
    "option, bad",
    [
        ("steps", [0, -1, 1.5, None, True, "3"]),
        ("speed", [0, 10, 0.49, 2.01, float("nan"), "fast", None]),
        ("chunk_tokens", [0, -5, 2.5]),
        ("max_chunk_tokens", [0, 24]),
        ("temperature", [-1, float("inf"), "hot"]),
        ("top_k", [-1, 0.5]),
        ("top_p", [0, 1.1]),
        ("win_size", [-1, 1.5]),
        ("tau_r", [-0.1, 2]),
        ("seed", [-1, 1.5, 2**64]),
        ("max_seconds", [0, -1, "x"]),
        ("pause", [-1, 11]),
        ("language", ["de", "english"]),
        ("mode", ["x", 3]),
    ],
)
def test_an_option_out_of_range_is_one_line_that_names_it(model, option, bad):
    for value, way in itertools.product(bad, (generate, stream_generate)):
        with pytest.raises(CosyH3Error) as e:
            way(model, TEXT, **{option: value})
        assert option in str(e.value) and repr(value) in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("way", [generate, stream_generate])
def test_an_unknown_option_is_a_type_error_that_suggests_one(model, way):
    with pytest.raises(TypeError, match="no option 'sped', nearest known: 'speed'"):
        way(model, TEXT, sped=1.0)
    with pytest.raises(TypeError, match="'max_tokens'"):
        way(model, TEXT, max_tokens=5)


@pytest.mark.parametrize(
    "text", ["", "   ", "\n", "...", "?!", "，。", "<|endofprompt|>", "<|endofprompt|> ...", None, 5, b"x", ["a"]]
)
def test_nothing_to_speak_is_an_error(model, text):
    with pytest.raises(CosyH3Error, match="text") as e:
        generate(model, text)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("texts", [[], [""], ["..", "!"], iter([" ", "\n"])])
def test_nothing_to_speak_in_pieces_is_an_error(model, texts):
    with pytest.raises(CosyH3Error, match="text"):
        list(stream_generate(model, texts))


@pytest.mark.parametrize(
    "texts, words", [([1], "must be strings"), (b"xy", "must be strings"), (["a <|endofprompt|> b"], "instruct")]
)
def test_pieces_that_cannot_be_spoken(model, texts, words):
    with pytest.raises(CosyH3Error, match=words):
        list(stream_generate(model, texts))


def test_every_option_reaches_the_model(model, calls):
    lm = dict(temperature=0.7, top_k=7, top_p=0.6, win_size=5, tau_r=0.3)
    generate(model, TEXT, seed=1, steps=3, causal=True, **lm)
    options = calls["llm"][0][3]
    assert {name: getattr(options, name) for name in lm} == lm
    flow = calls["flow"][0][4]
    assert flow["steps"] == 3 and flow["streaming"] is True


def test_numbers_are_read_unless_told_otherwise(model, calls):
    assert generate(model, "Take 3.", seed=1).segments == ["Take three."]
    assert generate(model, "Take 3.", seed=1, normalize=False).segments == ["Take 3."]
    assert generate(model, "Take 3.", seed=1, language="zh").segments != ["Take three."]


def test_progress_is_told_stage_by_stage(model):
    seen = []
    result = generate(model, TEXT, seed=1, steps=4, progress=lambda *told: seen.append(told))
    stages = [stage for stage, _ in itertools.groupby(told[0] for told in seen)]
    assert stages == ["llm", "flow", "vocoder"]
    assert [told for told in seen if told[0] == "flow"] == [("flow", k, 4) for k in (1, 2, 3, 4)]
    assert len([told for told in seen if told[0] == "llm"]) >= len(result.tokens)


# ---------------------------------------------------------------- results


def test_a_result_tells_what_was_made(model, tmp_path):
    r = generate(model, TEXT, seed=1)
    assert r.audio.dtype == np.float32 and r.audio.ndim == 1 and np.isfinite(r.audio).all() and r.audio.any()
    assert r.sample_rate == 24000 and len(r.audio) == 960 * len(r.tokens)  # 25 tokens a second
    assert r.duration == len(r.audio) / 24000
    assert list(r.seconds) == ["llm", "flow", "vocoder", "first_audio"] and all(s > 0 for s in r.seconds.values())
    work = r.seconds["llm"] + r.seconds["flow"] + r.seconds["vocoder"]
    assert r.rtf == pytest.approx(work / r.duration) and r.total >= work and r.peak_memory > 0
    r.save(tmp_path / "a.wav")
    samples, rate = soundfile.read(tmp_path / "a.wav", dtype="float32")
    assert rate == 24000 and np.abs(samples - r.audio).max() < 1e-4


def test_speed_is_tempo(model):
    plain = generate(model, "The cat sat on the mat.", seed=1)
    for speed in (0.5, 0.8, 2.0):
        changed = generate(model, "The cat sat on the mat.", seed=1, speed=speed)
        assert changed.tokens == plain.tokens
        assert changed.duration == pytest.approx(plain.duration / speed, rel=0.02)


def test_a_limit_is_told_and_named(model):
    notes = []
    full = generate(model, TEXT, seed=1)
    cut = generate(model, TEXT, seed=1, max_seconds=0.4, note=notes.append)
    assert full.finish_reason == "stop" and cut.finish_reason == "length"
    assert cut.duration == pytest.approx(0.4, abs=0.04) and cut.tokens == full.tokens[: len(cut.tokens)]
    assert notes == ["the speech was cut off by max_seconds=0.4"]
    fast = generate(model, TEXT, seed=1, max_seconds=0.4, speed=2.0, note=notes.append)
    assert fast.duration == pytest.approx(0.4, abs=0.04)


def test_speech_that_does_not_end_by_itself_is_told(model):
    notes = []
    result = generate(model, "Oh", temperature=0, note=notes.append)  # the likeliest token is never the end here
    assert result.finish_reason == "length" and len(notes) == 1 and "'Oh.' was cut off" in notes[0]


def test_notes_are_warnings_unless_taken(model):
    with pytest.warns(UserWarning, match="max_seconds=0.4"):
        generate(model, TEXT, seed=1, max_seconds=0.4)


def test_batch_generate_is_what_each_is_alone(model):
    texts = ["Hello.", "There.", "You."]
    results = batch_generate(model, texts, seed=7, voice="bert")
    for r, (text, result) in enumerate(zip(texts, results)):
        want = generate(model, text, seed=7 + r, voice="bert")
        assert result.tokens == want.tokens and np.abs(result.audio - want.audio).max() <= 1e-3
    with pytest.raises(CosyH3Error, match="list of texts"):
        batch_generate(model, "Hello.")
    with pytest.raises(CosyH3Error, match="seed"):
        batch_generate(model, texts, seed="x")


def test_another_seed_is_other_speech(model):
    assert len({tuple(generate(model, TEXT, seed=s).tokens) for s in range(4)}) == 4
    assert generate(model, TEXT).tokens != generate(model, TEXT).tokens  # and without one it differs


def test_long_silences_are_cut(model, monkeypatch):
    """Upstream's rule, offline and streamed: of a run of silent tokens the first five stay."""
    tokens = [3, *[1] * 9, 2, 4, *[28] * 5, 7, 1, 2, 1, 2, 1, 2, 5]
    kept = [3, *[1] * 5, 4, *[28] * 5, 7, 1, 2, 1, 2, 1, 5]

    class Run:
        finish_reason = "stop"

        def __init__(self):
            self._ids = iter(tokens)

        def __iter__(self):
            return self

        def __next__(self):
            return next(self._ids)

        def close(self):
            pass

    monkeypatch.setattr(SpeechLM, "generate", lambda *given: Run())
    assert generate(model, TEXT).tokens == kept
    stream = stream_generate(model, TEXT)
    assert sum(map(len, stream)) == 960 * len(kept) and stream.result.tokens == kept


# ---------------------------------------------------------------- numbers that are not finite


@pytest.mark.parametrize(
    "stage, weight",
    [("speech language model", "llm.llm_decoder"), ("flow", "flow.dit.proj_out"), ("vocoder", "hift.conv_post")],
)
def test_weights_that_are_not_finite_name_the_stage(folder, stage, weight):
    model = load(folder)
    module = model
    for name in weight.split("."):
        module = module[name]
    module.weight = mx.full(module.weight.shape, mx.nan)
    for way in (lambda: generate(model, TEXT, seed=1), lambda: list(stream_generate(model, TEXT, seed=1))):
        with pytest.raises(CosyH3Error, match=stage) as e:
            way()
        assert "finite" in str(e.value) and "\n" not in str(e.value)


def test_a_model_without_front_ends_says_so(tmp_path):
    model = load(write_voice_model(tmp_path / "m", campplus=None, speech_tokenizer=None))
    recording = (np.ones(24000, np.float32), 24000)
    assert generate(model, TEXT, seed=1).duration > 0
    with pytest.raises(CosyH3Error, match="no speaker encoder.*anna, bert, clara"):
        Voice.from_audio(model, recording)
    with pytest.raises(CosyH3Error, match="no speech tokenizer"):
        model.convert_voice(recording, "anna")


def test_a_model_without_voices_says_how_to_make_one(tmp_path):
    folder = write_voice_model(tmp_path / "m")
    for file in (folder / "voices").iterdir():
        file.unlink()
    model = load(folder)
    with pytest.raises(CosyH3Error, match="this model holds none"):
        generate(model, TEXT)
    with pytest.raises(CosyH3Error, match="no voice 'anna' .it has: none."):
        generate(model, TEXT, voice="anna")


def test_the_small_model_is_what_it_says(folder):
    assert config()["llm"]["speech_token_size"] == SPEECH == 3**4
