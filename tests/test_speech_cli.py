"""say, clone, vc, voices: what they write, and one clear line for every user error.

Run: python -m pytest -q tests/test_speech_cli.py
"""

import io
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import soundfile

from mlx_cosyh3 import generate
from mlx_cosyh3.costs import costs_of
from mlx_cosyh3.cosyvoice import audio
from mlx_cosyh3.cosyvoice.voice import Voice
from tests.policies import SPEECH_STAGES, costly, no_gpu
from tests.small_model import write_model
from tests.small_voice_model import small_voice, write_voice_model
from tests.test_cli import COMMAND, one_line, run  # noqa: F401 - `run` is a fixture

TEXT = "Hello there."


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture
def say(run, voice_folder):  # noqa: F811
    return lambda *words, stdin=None: run("say", *words, "--model", voice_folder, stdin=stdin)


@pytest.fixture
def recording(tmp_path):
    rng = np.random.default_rng(0)
    t = np.arange(2 * 24000) / 24000
    sound = 0.3 * np.sin(2 * np.pi * 150 * t) * np.sin(2 * np.pi * 2 * t) + 0.02 * rng.standard_normal(len(t))
    soundfile.write(tmp_path / "me.wav", sound.astype(np.float32), 24000)
    return tmp_path / "me.wav"


def read(file):
    samples, rate = soundfile.read(file, dtype="float32")
    assert rate == 24000
    return samples


def same(samples, result):
    """16-bit samples are those of a result."""
    return samples.shape == result.audio.shape and np.abs(samples - result.audio).max() < 1e-4


# ---------------------------------------------------------------- say


@pytest.mark.parametrize("way", ["argument", "dash", "pipe", "file", "file -"])
def test_every_way_to_give_a_text(say, speaker, here, way):
    (here.parent / "text.txt").write_text(TEXT + "\n")
    words, stdin = {
        "argument": ([TEXT], None), "dash": (["-"], b"Hello there.\n"), "pipe": ([], b"Hello there."),
        "file": (["--file", here.parent / "text.txt"], None), "file -": (["--file", "-"], b"Hello there."),
    }[way]  # fmt: skip
    assert say(*words, "--seed", 1, stdin=stdin) == (0, "speech.wav\n", "")
    assert same(read("speech.wav"), generate(speaker, TEXT, seed=1)) and os.listdir() == ["speech.wav"]


def test_where_it_is_written(say, speaker, here):
    want = generate(speaker, TEXT, seed=1)
    for name in ("a.wav", "b.flac"):
        assert say(TEXT, "--seed", 1, "-o", name) == (0, f"{name}\n", "")
        assert same(read(name), want)
    assert "a.wav exists: pass --overwrite" in one_line(say(TEXT, "--seed", 2, "-o", "a.wav"))
    assert same(read("a.wav"), want)
    assert say(TEXT, "--seed", 2, "-o", "a.wav", "--overwrite")[0] == 0
    assert same(read("a.wav"), generate(speaker, TEXT, seed=2))


def test_a_wav_on_stdout(voice_folder, speaker, here):
    words = ["say", TEXT, "--model", str(voice_folder), "--seed", "1", "-o", "-", "--stats"]
    done = subprocess.run([*COMMAND, *words], capture_output=True, timeout=120)
    assert done.returncode == 0 and same(read(io.BytesIO(done.stdout)), generate(speaker, TEXT, seed=1))
    assert done.stderr.count(b"\n") == 1 and os.listdir() == []


def test_every_option_reaches_the_model(say, speaker, here):
    options = dict(
        seed=3, temperature=0.8, top_k=20, top_p=0.9, win_size=5, tau_r=0.3, speed=1.3, steps=4, instruct="Loud."
    )
    words = [w for name, value in options.items() for w in ("--" + name.replace("_", "-"), value)]
    want = generate(speaker, TEXT, voice="bert", **options)
    assert say(TEXT, "--voice", "bert", *words)[0] == 0
    assert same(read("speech.wav"), want)
    assert say(TEXT, "--seed", 3, "--causal")[0] == 0
    assert same(read("speech.wav"), generate(speaker, TEXT, seed=3, causal=True))
    assert say("Take 3.", "--seed", 3, "--no-normalize")[0] == 0
    assert same(read("speech.wav"), generate(speaker, "Take 3.", seed=3, normalize=False))
    assert say(TEXT, "--seed", 3, "--mode", "zero_shot", "--voice", "clara")[0] == 0
    assert same(read("speech.wav"), generate(speaker, TEXT, seed=3, voice="clara", mode="zero_shot"))


def test_streamed(say, speaker, here):
    status, out, err = say(TEXT, "--seed", 1, "--stream", "--stats", "--chunk-tokens", 5, "--max-chunk-tokens", 10)
    assert (status, out) == (0, "speech.wav\n")
    want = generate(speaker, TEXT, seed=1, causal=True).audio
    assert np.abs(read("speech.wav") - want).max() < 1e-3
    for word in (
        "s of audio, sft",
        "llm",
        "flow",
        "vocoder",
        "first audio",
        "real-time factor",
        "peak memory",
        "seed 1",
    ):
        assert word in err


def test_a_limit_is_told(say, here):
    status, out, err = say(TEXT, "--seed", 1, "--max-seconds", 0.3)
    assert (status, out) == (0, "speech.wav\n") and err == "note: the speech was cut off by max_seconds=0.3\n"


def test_voices_from_files(say, speaker, here, recording):
    small_voice("me").save(here / "me.voice.safetensors")
    assert say(TEXT, "--seed", 1, "--voice", "me.voice.safetensors")[0] == 0
    assert same(read("speech.wav"), generate(speaker, TEXT, seed=1, voice=small_voice("me")))
    for given, text in ((["--voice-text", "the cat"], "the cat"), ([], None)):
        assert say(TEXT, "--seed", 1, "--voice", recording, *given)[0] == 0
        assert same(
            read("speech.wav"), generate(speaker, TEXT, seed=1, voice=Voice.from_audio(speaker, recording, text))
        )


def test_a_recording_is_heard_where_all_is_computed(say, run, voice_folder, here, recording, monkeypatch):  # noqa: F811
    asked, plain = [], Voice.from_audio

    def from_audio(*args, policy, **how):
        asked.append(policy.device)
        return plain(*args, **how)

    monkeypatch.setattr(Voice, "from_audio", from_audio)
    assert say(TEXT, "--voice", recording, "--device", "cpu")[0] == 0
    assert run("vc", recording, "--voice", recording, "--device", "cpu", "--model", voice_folder)[0] == 0
    assert asked == ["cpu", "cpu"]


class Played:
    """In place of a loudspeaker."""

    pieces, broken = [], False

    def __init__(self, rate):
        self.open = True

    def add(self, samples):
        if Played.broken:
            raise audio.CosyH3Error("the sound device failed: unplugged")
        Played.pieces.append(samples)

    def finish(self):
        assert self.open

    def close(self):
        self.open = False


def test_played(say, speaker, here, monkeypatch):
    monkeypatch.setattr(audio, "Player", Played)
    monkeypatch.setattr(Played, "pieces", [])
    want = generate(speaker, TEXT, seed=1)
    assert say(TEXT, "--seed", 1, "--play") == (0, "", "") and os.listdir() == []
    np.testing.assert_array_equal(np.concatenate(Played.pieces), want.audio)
    monkeypatch.setattr(Played, "broken", True)
    status, out, err = say(TEXT, "--seed", 1, "--play", "-o", "a.wav")
    assert (status, out) == (
        0,
        "a.wav\n",
    ) and err == "note: the sound device failed: unplugged; the rest is not played\n"
    assert same(read("a.wav"), want)


def test_nothing_to_play_with(say, here, monkeypatch):
    def nothing(rate):
        raise audio.CosyH3Error("there is nothing to play audio with")

    monkeypatch.setattr(audio, "Player", nothing)
    assert "nothing to play" in one_line(say(TEXT, "--play"))


@pytest.mark.parametrize(
    "words, said",
    [
        ([""], "text is empty"),
        (["   "], "text is empty"),
        (["..."], "nothing to speak"),
        (["-"], "text is empty"),
        ([TEXT, "--steps", 0], "steps must be a whole number from 1"),
        ([TEXT, "--speed", 0], "speed must be from 0.5"),
        ([TEXT, "--speed", 10], "speed must be from 0.5"),
        ([TEXT, "--chunk-tokens", 0], "chunk_tokens must be"),
        ([TEXT, "--temperature", -1], "temperature"),
        ([TEXT, "--seed", -1], "seed"),
        ([TEXT, "--max-seconds", 0], "max_seconds"),
        ([TEXT, "--speed", "fast"], "--speed: invalid float value"),
        ([TEXT, "--sped", 1], "--sped, nearest known: '--speed'"),
        ([TEXT, "--voice", "ana"], "no voice 'ana' (it has: anna, bert, clara), nearest known: 'anna'"),
        ([TEXT, "--voice", "no/such.wav"], "no voice file or recording no/such.wav"),
        ([TEXT, "--voice", "none.safetensors"], "no voice file none.safetensors"),
        ([TEXT, "--voice", "anna", "--voice-text", "x"], "--voice-text goes with a recording"),
        ([TEXT, "--mode", "zero_shot"], "needs a voice made from a recording"),
        ([TEXT, "--mode", "zeroshot"], "nearest known: 'zero_shot'"),
        ([TEXT, "--stream", "--causal"], "leave it out"),
        ([TEXT, "--file", "x"], "one text"),
        (["--file", "none"], "none: No such file"),
        ([TEXT, "-o", "no/such/a.wav"], "there is no folder no/such"),
        ([TEXT, "-o", ".."], "is a folder"),
        ([TEXT, "-o", "a.mp3"], "must end in .wav or .flac"),
        ([TEXT, "-o", "a"], "must end in .wav or .flac"),
        ([TEXT, "-o", "/proc/a.wav"], "cannot write /proc/a.wav"),
        ([TEXT, "-o", ""], "is a folder"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(say, here, words, said):
    line = one_line(say(*words, stdin=b" \n" if words == ["-"] else None))
    assert said in line and os.listdir() == []


def test_no_text_at_a_terminal(say, here):
    assert "no text: give it" in one_line(say())


def test_a_folder_without_permission(say, here, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot write a.wav: no permission" in one_line(say(TEXT, "-o", "a.wav"))


def test_a_disk_that_fills_leaves_nothing(say, here, monkeypatch):
    def full(self, data):
        open(self, "wb").close()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    assert "cannot write speech.wav: No space left on device" in one_line(say(TEXT, "--seed", 1))
    assert os.listdir() == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_stdout_on_a_full_disk(voice_folder, here):
    with open("/dev/full", "wb") as full:
        words = [*COMMAND, "say", TEXT, "--model", str(voice_folder), "--seed", "1", "-o", "-"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, timeout=120)
    assert done.returncode == 2 and b"No space left" in done.stderr and done.stderr.count(b"\n") == 1


def test_a_model_that_does_not_speak_and_one_that_does_not_write(run, tmp_path, voice_folder, here):  # noqa: F811
    h3 = write_model(tmp_path / "h3")
    for words in (["say", TEXT], ["voices"], ["vc", __file__, "--voice", "anna"]):
        assert "no CosyVoice model" in one_line(run(*words, "--model", h3))
    assert "speaks" in one_line(run("generate", TEXT, "--model", voice_folder)) and os.listdir() == []


def interrupted(words, patch=""):
    """Run the program with a player of ours, and SIGINT once it was given two pieces -> (status, stdout, stderr)."""
    script = (
        "import os, signal, sys\n"
        "from mlx_cosyh3 import cli\nfrom mlx_cosyh3.cosyvoice import audio, utterance\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Player:\n    n = 0\n    def __init__(self, rate): pass\n    def finish(self): pass\n"
        "    def close(self): pass\n"
        "    def add(self, samples):\n        self.n += 1\n"
        "        if self.n == 2: print('two', file=sys.stderr, flush=True)\n"
        f"audio.Player = Player\n{patch}\nsys.exit(cli.main(sys.argv[1:]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )  # fmt: skip
    while line := process.stderr.readline():
        if line == b"two\n":
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.parametrize("stream", [True, False])
def test_ctrl_c_keeps_the_audio_made_so_far(voice_folder, speaker, here, stream):
    """In the middle of a long text, once it has played something."""
    text = "The cat sat on the mat, and it was warm. " * 40
    words = ["say", text, "--model", voice_folder, "--seed", "3", "--play", "-o", "a.wav", *["--stream"] * stream]
    status, out, err = interrupted(words)
    assert status == 130 and out == b"a.wav\n" and b"Traceback" not in err
    got, full = read("a.wav"), generate(speaker, text, seed=3, causal=stream, note=lambda text: None)
    assert 0.1 < len(got) / 24000 < full.duration * 0.9
    assert np.abs(got - full.audio[: len(got)]).max() < (1e-3 if stream else 1e-4)


@pytest.mark.parametrize("stream", [True, False])
def test_ctrl_c_keeps_what_was_converted_so_far(voice_folder, here, stream):
    """In the middle of a long recording, which is converted in parts."""
    sound = 0.1 * np.random.default_rng(0).standard_normal(30 * 24000).astype(np.float32)
    soundfile.write("long.wav", sound, 24000)
    words = ["vc", "long.wav", "--voice", "clara", "--model", voice_folder, "--play", "-o", "a.wav"]
    status, out, err = interrupted(words + ["--stream"] * stream, "utterance.LONGEST = 2.0")
    assert status == 130 and out == b"a.wav\n" and b"Traceback" not in err
    assert 0.1 < len(read("a.wav")) / 24000 < 29


# ---------------------------------------------------------------- clone, vc, voices


def test_clone_and_speak(run, voice_folder, speaker, here, recording):  # noqa: F811
    status, out, err = run("clone", recording, "--text", "the cat", "--model", voice_folder)
    assert (status, out) == (0, "me.voice.safetensors\n") and "2.0 s, 50 speech tokens, with a transcript" in err
    voice = Voice.load("me.voice.safetensors")
    assert (voice.name, voice.transcript) == ("me", "the cat")
    assert "exists: pass --overwrite" in one_line(run("clone", recording, "--model", voice_folder))
    assert run("clone", recording, "--model", voice_folder, "-o", "b.safetensors", "--name", "B")[0] == 0
    assert Voice.load("b.safetensors").transcript is None and Voice.load("b.safetensors").name == "B"
    assert "must end in .safetensors" in one_line(run("clone", recording, "--model", voice_folder, "-o", "b.wav"))
    assert "-o -" in one_line(run("clone", recording, "--model", voice_folder, "-o", "-"))
    assert "no recording none.wav" in one_line(run("clone", "none.wav", "--model", voice_folder))


@pytest.mark.parametrize(
    "samples, rate, said",
    [
        (np.zeros(0), 24000, "0 samples"),
        (np.ones(2400), 24000, "too short"),
        (np.zeros(48000), 24000, "silent"),
        (np.ones(16000), 8000, "8000 Hz"),
    ],
)
def test_a_recording_of_no_use(run, voice_folder, here, samples, rate, said):  # noqa: F811
    soundfile.write(here.parent / "bad.wav", samples.astype(np.float32) * 0.1, rate)
    for words in (
        ["clone", here.parent / "bad.wav"],
        ["vc", here.parent / "bad.wav"],
        ["say", TEXT, "--voice", here.parent / "bad.wav"],
    ):
        assert said in one_line(run(*words, "--model", voice_folder))
    (here.parent / "text.wav").write_text("no audio")
    assert "cannot read" in one_line(run("clone", here.parent / "text.wav", "--model", voice_folder))
    assert os.listdir() == []


def test_convert_a_voice(run, voice_folder, speaker, here, recording):  # noqa: F811
    assert run("vc", recording, "--voice", "clara", "--model", voice_folder) == (0, "converted.wav\n", "")
    assert same(read("converted.wav"), speaker.convert_voice(recording, "clara"))
    assert run("vc", recording, "--model", voice_folder, "--speed", 2, "--steps", 3, "-o", "b.wav")[0] == 0
    assert len(read("b.wav")) == pytest.approx(24000, rel=0.02)
    assert run("vc", recording, "--voice", "clara", "--model", voice_folder, "--stream", "-o", "c.wav")[0] == 0
    causal = speaker.convert_voice(recording, "clara", causal=True)
    assert len(read("c.wav")) == len(causal.audio) and np.abs(read("c.wav") - causal.audio).max() < 1e-3
    assert "speed" in one_line(run("vc", recording, "--model", voice_folder, "--speed", 5))
    assert "b.wav exists" in one_line(run("vc", recording, "--model", voice_folder, "-o", "b.wav"))


def test_voices(run, voice_folder, tmp_path):  # noqa: F811
    status, out, err = run("voices", "--model", voice_folder)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "anna\tspeaker embedding alone\t-",
        "bert\tspeaker embedding alone\t-",
        "clara\t0.5 s recording\tthe cat",
    ]
    bare = write_voice_model(tmp_path / "m")
    for file in (bare / "voices").iterdir():
        file.unlink()
    assert run("voices", "--model", bare)[:2] == (0, "")


# ---------------------------------------------------------------- where it runs, and by when


@pytest.mark.parametrize("words", [[], ["--stream"]])
def test_say_in_time(say, here, words):
    assert say(TEXT, "--seed", 1, "-o", "plain.wav", *words)[0] == 0
    knobs = ["--deadline", 600, "--late", "best", "--device", "cpu", "--max-memory", "50GB", "--at-heat", "ignore"]
    assert say(TEXT, "--seed", 1, "-o", "timed.wav", *words, *knobs)[0] == 0
    np.testing.assert_array_equal(read("timed.wav"), read("plain.wav"))


@pytest.mark.parametrize("command", ["say", "vc"])
def test_what_cannot_be_in_time_is_refused(run, here, monkeypatch, recording, speaker, voice_folder, command):  # noqa: F811
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(here / "cache"))
    p = no_gpu()
    costly(p, speaker, (*SPEECH_STAGES, "speech_tokenizer"), 50.0)
    costs_of(p, speaker).save(now=True)  # as another process has left them
    what = TEXT if command == "say" else recording
    result = run(command, what, "--voice", "anna", "--model", voice_folder, "--deadline", 2, "-o", "late.wav")
    assert "deadline=2 cannot be met: the whole answer takes" in one_line(result)
    assert not (here / "late.wav").exists()
