"""Voices: from a recording, saved and loaded, voice conversion, and files that are damaged.

Run: python -m pytest -q tests/test_voice.py
"""

import dataclasses
import io
import os

import mlx.core as mx
import numpy as np
import pytest
import soundfile
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from mlx_cosyh3 import generate, load
from mlx_cosyh3.convert.front_ends import speech_tokenizer_from
from mlx_cosyh3.cosyvoice import audio, features, utterance
from mlx_cosyh3.cosyvoice.campplus import CAMPPlus, CAMPPlusConfig
from mlx_cosyh3.cosyvoice.modes import check_made_for
from mlx_cosyh3.cosyvoice.s3tokenizer import S3Tokenizer, S3TokenizerConfig
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.runtime import Policy, default_policy
from tests import golden_voice_models
from tests.golden_data import cosyvoice_golden, large
from tests.small_voice_model import CAMPPLUS, SPEECH, small_voice, write_voice_model

TEXT = "Hello there."
ARRAYS = ("embedding", "prompt_tokens", "prompt_mel", "transcript_ids")
REST = ("transcript", "name", "codebook", "sample_rate", "made_for")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(write_voice_model(tmp_path_factory.mktemp("models") / "voice"))


def sound(seconds, rate=24000, seed=0):
    """Something like speech: a tone that comes and goes, and noise."""
    t = np.arange(int(seconds * rate)) / rate
    noise = np.random.default_rng(seed).standard_normal(len(t))
    return (0.3 * np.sin(2 * np.pi * 150 * t) * np.sin(2 * np.pi * 2 * t) + 0.02 * noise).astype(np.float32)


def equal(a, b):
    for name in ARRAYS:
        one, two = getattr(a, name), getattr(b, name)
        assert (one is None) == (two is None), name
        if one is not None:
            assert one.dtype == two.dtype
            np.testing.assert_array_equal(one, two)
    assert [getattr(a, n) for n in REST] == [getattr(b, n) for n in REST]


# ---------------------------------------------------------------- from a recording


def test_what_a_voice_holds(model):
    voice = Voice.from_audio(model, (sound(2), 24000), "  the cat\n", name="me")
    assert (
        voice.embedding.shape == (192,) and voice.prompt_tokens.shape == (50,) and voice.prompt_mel.shape == (100, 80)
    )
    assert (voice.transcript, voice.name, voice.codebook, voice.seconds) == ("the cat", "me", SPEECH, 2.0)
    assert voice.made_for == "cosyvoice3"
    assert Voice.from_audio(model, (sound(2), 24000), "  ").transcript is None
    assert generate(model, TEXT, voice=voice, seed=1).mode == "zero_shot"


def test_a_voice_is_computed_where_its_policy_says(model, monkeypatch):
    asked, plain = [], Policy.request
    monkeypatch.setattr(Policy, "request", lambda self, *args: asked.append(self) or plain(self, *args))
    own = Policy(device="cpu")
    equal(Voice.from_audio(model, (sound(1), 24000), policy=own), Voice.from_audio(model, (sound(1), 24000)))
    assert asked == [own, default_policy()]
    with pytest.raises(CosyH3Error, match="policy must be"):
        Voice.from_audio(model, (sound(1), 24000), policy="cpu")


def test_every_kind_of_recording(model, tmp_path):
    """A path, a string, an open file, numbers; two channels and another rate are the same voice, nearly."""
    x = sound(1)
    soundfile.write(tmp_path / "a.wav", x, 24000, subtype="FLOAT")
    want = Voice.from_audio(model, (x, 24000))
    with open(tmp_path / "a.wav", "rb") as file:
        made = [Voice.from_audio(model, source) for source in (tmp_path / "a.wav", str(tmp_path / "a.wav"), file)]
    made.append(Voice.from_audio(model, io.BytesIO((tmp_path / "a.wav").read_bytes())))
    made.append(Voice.from_audio(model, (np.stack([x, x], axis=1), 24000)))
    for voice in made:
        equal(voice, want)
    other = Voice.from_audio(model, (audio.resample(x, 24000, 48000), 48000))
    assert abs(len(other.prompt_tokens) - 25) <= 1
    # The other rate's filter shows in the empty upper bands alone.
    np.testing.assert_allclose(other.prompt_mel[:48, :60], want.prompt_mel[:48, :60], atol=0.3)


@pytest.mark.parametrize("seconds", [31, 40.02])
def test_more_than_30_seconds_are_no_error(model, seconds):
    notes = []
    voice = Voice.from_audio(model, (sound(seconds, 16000), 16000), note=notes.append)
    assert abs(len(voice.prompt_tokens) - round(25 * seconds)) <= 1 and len(voice.prompt_mel) == 2 * len(
        voice.prompt_tokens
    )
    assert len(notes) == 1 and "longer than 30 s" in notes[0]


@pytest.mark.parametrize(
    "samples, rate, said",
    [
        (sound(0.1), 24000, "too short"),
        (np.zeros(48000), 24000, "silent"),
        (sound(2, 8000), 8000, "8000 Hz"),
        (np.full(48000, np.nan), 24000, "not finite"),
        (np.zeros(0), 24000, "no audio"),
        (sound(2), 0, "sample rate"),
    ],
)
def test_a_recording_of_no_use_is_one_line(model, samples, rate, said):
    for use in (lambda r: Voice.from_audio(model, r), lambda r: model.convert_voice(r, "anna")):
        with pytest.raises(CosyH3Error, match=said) as e:
            use((samples, rate))
        assert "\n" not in str(e.value)


@pytest.mark.parametrize("rate", [50, 25])
def test_a_recording_for_version_1(rate, monkeypatch):
    """Its mel at 22.05 kHz is upstream's; tokens and mel are not cut to one length; compat makes upstream's mistake."""
    golden = load_file(large("golden", "cosyvoice", "frontend", "features.safetensors"))
    model = golden_voice_models.model.__wrapped__(1)
    config, weights = speech_tokenizer_from(cosyvoice_golden(f"s3_v1_{rate}hz") / "tokenizer.pt", rate)
    model.speech_tokenizer = S3Tokenizer(S3TokenizerConfig.from_dict(config))
    model.speech_tokenizer.load_weights([(n, mx.array(np.ascontiguousarray(a))) for n, a in weights.items()])
    model.campplus = CAMPPlus(CAMPPlusConfig.from_dict(CAMPPLUS))
    monkeypatch.setattr(type(model), "codebook", 256)  # the tokenizer's: the goldens are of several models
    wav, mel = golden["wav22k"].ravel(), golden["mel22k_fmax8000"][0].T
    np.testing.assert_allclose(model.speech_features(wav, 22050)[1], mel, rtol=0, atol=1e-4)
    for seconds in (1.0, 1.234, 3.21):
        samples = sound(seconds, 44100)
        voice = Voice.from_audio(model, (samples, 44100), "the cat sat")
        frames = int(np.ceil(len(samples) * 16000 / 44100)) // 160  # of the log-mel; each halving rounds up
        wanted = (frames + 1) // 2 if rate == 50 else ((frames + 1) // 2 + 1) // 2
        assert len(voice.prompt_tokens) == wanted and voice.sample_rate == 22050
        assert voice.prompt_mel.shape == (int(np.ceil(len(samples) / 2)) // 256, 80)
        assert voice.seconds == pytest.approx(seconds, abs=0.02) and voice.token_rate == rate
        same = Voice.from_audio(model, (samples, 44100), "the cat sat", compat=True)
        np.testing.assert_array_equal(same.prompt_tokens, voice.prompt_tokens)
        at_24k = audio.resample(samples, 44100, 24000)
        wanted = features.mel_spectrogram(at_24k, rate=22050, n_fft=1024, hop=256, win=1024, fmin=0, fmax=8000, bins=80)
        np.testing.assert_array_equal(same.prompt_mel, wanted)
        assert len(wanted) == len(at_24k) // 256 and same.token_rate == rate


def test_a_voice_of_an_embedding_has_no_rate():
    assert small_voice(tokens=0).token_rate is None and small_voice().token_rate == 25


def test_a_transcript_that_does_not_fit_the_text_is_noted(model):
    notes = []
    generate(
        model, "Oh", voice=small_voice(transcript="the cat sat on the mat and was warm"), seed=1, note=notes.append
    )
    assert any("less than half as long as the voice's transcript" in text for text in notes)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    "seconds, text, said",
    [
        (6, "the cat", "'the cat' is too short for a recording of 6.0 s"),
        (2, "the cat sat on the mat and " * 4, "is too long for a recording of 2.0 s: give exactly what is said in it"),
        (2, "希望你以后能够做的比我还好呦希望你以后能够做的比我还好", "is too long"),
        (2, "You are a helpful assistant.<|endofprompt|>the cat", None),
        (3, "希望你以后能够做的比我还好呦。", None),
        (6, "The cat sat on the mat, [breath] and it was warm and dry there.", None),
    ],
)
def test_a_transcript_that_does_not_fit_the_recording_is_noted(model, seconds, text, said):
    notes = []
    voice = Voice.from_audio(model, (sound(seconds), 24000), text, note=notes.append)
    assert voice.transcript == text.strip()
    assert notes == [] if said is None else len(notes) == 1 and said in notes[0]


@pytest.mark.parametrize("kind", ["prompt", "no transcript", "embedding", "ids"])
def test_save_and_load(tmp_path, kind):
    voice = {"prompt": small_voice(transcript="naïve 字\nline"), "no transcript": small_voice(transcript=None),
             "embedding": small_voice(tokens=0), "ids": small_voice(transcript=None)}[kind]  # fmt: skip
    if kind == "ids":
        voice.transcript_ids = np.array([1, 2, 3], np.int32)
    voice.save(tmp_path / "me.voice.safetensors")
    equal(Voice.load(tmp_path / "me.voice.safetensors"), voice)
    assert os.listdir(tmp_path) == ["me.voice.safetensors"]


def test_a_voice_without_a_name_is_called_after_its_file(tmp_path):
    small_voice("").save(tmp_path / "me.voice.safetensors")
    assert Voice.load(tmp_path / "me.voice.safetensors").name == "me"


def test_a_loaded_voice_speaks_the_same(model, tmp_path):
    voice = Voice.from_audio(model, (sound(1), 24000), "the cat")
    voice.save(tmp_path / "v.safetensors")
    a, b = (
        generate(model, TEXT, voice=v, seed=1, note=lambda text: None).audio
        for v in (voice, Voice.load(tmp_path / "v.safetensors"))
    )
    np.testing.assert_array_equal(a, b)


def test_a_saved_voice_cannot_take_an_instruction_s_place(model):
    """Upstream's saved speakers carry a prompt text that replaces the instruction."""
    voice = small_voice(transcript="the cat")
    said = [generate(model, TEXT, voice=voice, seed=1, instruct=how).tokens for how in ("Speak fast.", "Speak slowly.")]
    other = generate(model, TEXT, voice=small_voice(transcript="a dog"), seed=1, instruct="Speak fast.").tokens
    assert said[0] != said[1] and said[0] == other


def rewrite(path, change=None, **tensors):
    """Write the voice file `path` anew with some tensors, or with changed metadata, and without its digest."""
    with safe_open(path, "np") as file:
        told, held = file.metadata(), {n: file.get_tensor(n) for n in file.keys()}
    held = {n: a for n, a in (held | tensors).items() if a is not None}
    told.pop("digest", None)
    save_file(held, path, (change or (lambda told: told))(told))


@pytest.mark.parametrize(
    "tensors, said",
    [
        ({"embedding": None}, "embedding"),
        ({"embedding": np.zeros(191, np.float32)}, "shape"),
        ({"prompt_mel": np.zeros((10, 40), np.float32)}, "shapes"),
        ({"prompt_tokens": np.zeros(0, np.int32)}, "0 speech tokens and 24 mel frames"),
        ({"prompt_mel": np.full((24, 80), np.nan, np.float32)}, "finite"),
        ({"prompt_tokens": np.full(12, SPEECH, np.int32)}, "outside of 0 to 80"),
        ({"prompt_tokens": np.zeros((3, 4), np.int32)}, "shapes"),
        ({"embedding": np.full(192, np.inf, np.float32)}, "finite"),
        ({"transcript_ids": np.zeros((2, 2), np.int32)}, "transcript"),
    ],
)
def test_a_damaged_voice_is_one_line(tmp_path, tensors, said):
    path = tmp_path / "v.safetensors"
    small_voice().save(path)
    rewrite(path, **tensors)
    with pytest.raises(CheckpointError, match=said) as e:
        Voice.load(path)
    assert str(path) in str(e.value) and "\n" not in str(e.value)


def test_a_file_that_is_no_voice(tmp_path):
    path = tmp_path / "v.safetensors"
    small_voice().save(path)
    whole = path.read_bytes()
    for raw in (b"", b"text", whole[:50], whole[:-10], b"\xff" * 100):
        path.write_bytes(raw)
        with pytest.raises(CheckpointError, match="is not a voice file") as e:
            Voice.load(path)
        assert "\n" not in str(e.value)
    save_file({"a": np.zeros(3)}, path)
    with pytest.raises(CheckpointError, match="no voice file of this program"):
        Voice.load(path)
    small_voice().save(path)
    rewrite(path, lambda told: told | {"codebook": "many"})
    with pytest.raises(CheckpointError, match="damaged voice file"):
        Voice.load(path)
    for none in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(CosyH3Error, match="no voice file"):
            Voice.load(none)


def test_a_voice_of_another_model_is_refused(model):
    with pytest.raises(CosyH3Error, match="6561 speech tokens, this one has 81: make it again"):
        generate(model, TEXT, voice=small_voice(codebook=6561))


def test_a_voice_belongs_to_a_version(model, tmp_path):
    """The codebooks of CosyVoice 2 and 3 are of one size: only what the voice says of itself tells them apart."""
    path = tmp_path / "v.safetensors"
    voice = dataclasses.replace(small_voice(), made_for="cosyvoice2")
    voice.save(path)
    assert Voice.load(path).made_for == "cosyvoice2"
    for use in (lambda v: generate(model, TEXT, voice=v), lambda v: model.convert_voice((sound(1), 24000), v)):
        with pytest.raises(CosyH3Error, match="was made for CosyVoice 2, this model is CosyVoice 3: make it") as e:
            use(Voice.load(path))
        assert "\n" not in str(e.value)
    dataclasses.replace(voice, made_for="cosyvoice3").save(path)
    assert generate(model, TEXT, voice=Voice.load(path), seed=1).duration > 0
    rewrite(path, lambda told: {n: text for n, text in told.items() if n != "made_for"})  # as older files are
    assert Voice.load(path).made_for == "" and generate(model, TEXT, voice=Voice.load(path), seed=1).duration > 0


def test_a_voice_of_another_token_rate():
    """CosyVoice 1 has models of 50 and of 25 tokens a second, with codebooks of one size."""
    model = golden_voice_models.model(1)
    voice = golden_voice_models.voice(1, 40)
    check_made_for(model, voice)
    half = dataclasses.replace(voice, prompt_tokens=voice.prompt_tokens[::2])
    assert (voice.token_rate, half.token_rate, golden_voice_models.voice(1, 0).token_rate) == (50, 25, None)
    with pytest.raises(CosyH3Error, match="model of 25 speech tokens a second, this one has 50: make it again"):
        generate(model, TEXT, voice=half)


def test_a_voice_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(CosyH3Error, match="cannot write the voice .*No such file"):
        small_voice().save(tmp_path / "none" / "v.safetensors")

    def full(self, data):
        open(self, "wb").close()
        raise OSError(28, "No space left on device")

    small_voice("old").save(tmp_path / "v.safetensors")
    with monkeypatch.context() as m:
        m.setattr("pathlib.Path.write_bytes", full)
        with pytest.raises(CosyH3Error, match="No space left"):
            small_voice("new").save(tmp_path / "v.safetensors")
    assert os.listdir(tmp_path) == ["v.safetensors"] and Voice.load(tmp_path / "v.safetensors").name == "old"


# ---------------------------------------------------------------- voice conversion


def test_convert_voice(model):
    source = (sound(2), 24000)
    stages = []
    r = model.convert_voice(source, small_voice(), progress=lambda *told: stages.append(told[0]))
    assert r.mode == "convert" and r.finish_reason == "stop" and r.duration == pytest.approx(2, abs=0.05)
    assert r.tokens == model.speech_tokens(*source).tolist() and set(stages) >= {"speech_tokenizer", "flow", "vocoder"}
    np.testing.assert_array_equal(model.convert_voice(source, small_voice()).audio, r.audio)
    assert np.abs(model.convert_voice(source, small_voice(seed=6)).audio - r.audio).max() > 1e-3
    fast = model.convert_voice(source, small_voice(), speed=2.0)
    assert fast.duration == pytest.approx(r.duration / 2, rel=0.02)


def test_a_named_voice_converts_with_its_recording(model):
    source = (sound(1), 24000)
    held = model.voices["clara"]
    np.testing.assert_array_equal(model.convert_voice(source, "clara").audio, model.convert_voice(source, held).audio)


def test_a_long_recording_is_converted_in_parts(model, monkeypatch):
    monkeypatch.setattr(utterance, "LONGEST", 1.0)
    notes = []
    r = model.convert_voice((sound(3.5), 24000), "anna", note=notes.append)
    assert r.duration == pytest.approx(3.5, abs=0.05) and not notes
    assert r.tokens == model.speech_tokens(sound(3.5), 24000).tolist()


@pytest.mark.parametrize("options, said", [({"steps": 0}, "steps"), ({"speed": 5}, "speed")])
def test_convert_voice_checks_its_options(model, options, said):
    with pytest.raises(CosyH3Error, match=said):
        model.convert_voice((sound(1), 24000), "anna", **options)
    with pytest.raises(TypeError):
        model.convert_voice((sound(1), 24000), "anna", temperature=0.5)
    with pytest.raises(CosyH3Error, match="no voice 'ana'"):
        model.convert_voice((sound(1), 24000), "ana")
