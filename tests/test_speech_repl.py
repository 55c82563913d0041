"""The REPL of a model that speaks: each line becomes a file, its commands, errors that are one line, Ctrl-C.

Run: python -m pytest -q tests/test_speech_repl.py
"""

import io
import os
import subprocess

import numpy as np
import pytest
import soundfile

from mlx_cosyh3 import generate
from mlx_cosyh3.cosyvoice import audio
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.speech_repl import SpeechRepl
from tests.small_model import write_model
from tests.small_voice_model import small_voice
from tests.test_cli import COMMAND, one_line, run  # noqa: F401 - `run` is a fixture
from tests.test_repl import Terminal, command

TEXT = "Hello there."


class Played:
    """In place of a loudspeaker; `interrupt`: Ctrl-C comes at this piece."""

    heard, interrupt = [], None

    def __init__(self, rate):
        self.n = 0

    def add(self, samples):
        Played.heard.append(samples)
        self.n += 1
        if self.n == Played.interrupt:
            raise KeyboardInterrupt

    def finish(self):
        pass

    def close(self):
        pass


class Session:
    """A SpeechRepl whose lines are given one by one; say(line) -> (stdout, stderr) of that line."""

    def __init__(self, model, folder, **options):
        self.out, self.err = io.StringIO(), io.StringIO()
        self.folder, self.repl = folder, SpeechRepl(model, {"seed": 1}, folder, out=self.out, err=self.err, **options)

    def say(self, line):
        for stream in (self.out, self.err):
            stream.seek(0), stream.truncate()
        lines = iter([line])
        self.repl.run(lambda: next(lines, None))
        return self.out.getvalue(), self.err.getvalue()


@pytest.fixture
def session(speaker, tmp_path, monkeypatch):
    monkeypatch.setattr(audio, "Player", Played)
    monkeypatch.setattr(Played, "heard", [])
    monkeypatch.setattr(Played, "interrupt", None)
    return Session(speaker, tmp_path)


def read(path):
    samples, rate = soundfile.read(path, dtype="float32")
    assert rate == 24000
    return samples


def same(path, result):
    samples = read(path)
    return samples.shape == result.audio.shape and np.abs(samples - result.audio).max() < 1e-4


def test_each_line_is_a_file_and_is_played(session, speaker, tmp_path):
    (tmp_path / "speech-007.wav").write_bytes(b"mine")
    for n, text in ((8, TEXT), (9, "And you."), (10, TEXT)):
        assert session.say(text) == (f"{tmp_path}/speech-{n:03d}.wav\n", "")
        want = generate(speaker, text, seed=1 + n - 8)
        assert same(tmp_path / f"speech-{n:03d}.wav", want)
        np.testing.assert_array_equal(Played.heard[-1], want.audio)
    assert (tmp_path / "speech-007.wav").read_bytes() == b"mine"
    assert session.say("/play off")[1] == "play = off\n"
    session.say(TEXT)
    assert len(Played.heard) == 3 and (tmp_path / "speech-011.wav").exists()


def test_voice_instruction_and_speed(session, speaker, tmp_path):
    small_voice("me").save(tmp_path / "me too.safetensors")
    assert session.say("/voice")[1] == "* anna\n  bert\n  clara\n"
    assert session.say("/voice bert") == ("", "voice = bert\n") and "* bert" in session.say("/voice")[1]
    session.say(TEXT)
    assert same(tmp_path / "speech-001.wav", generate(speaker, TEXT, voice="bert", seed=1))
    assert session.say("/instruct Speak fast.")[1] == "instruct = Speak fast.\n"
    session.say("/speed 2")
    session.say(TEXT)
    assert same(
        tmp_path / "speech-002.wav", generate(speaker, TEXT, voice="bert", seed=2, instruct="Speak fast.", speed=2.0)
    )
    assert session.say("/instruct off")[1] == "instruct = none\n"
    session.say(f"/voice {tmp_path}/me too.safetensors"), session.say("/speed 1"), session.say("/seed 5")
    session.say(TEXT)
    assert same(tmp_path / "speech-003.wav", generate(speaker, TEXT, voice=small_voice("me"), seed=5))
    assert session.repl.result.mode == "zero_shot" and "* prompted" not in session.say("/voice")[1]


def test_a_voice_from_a_recording_and_its_words(session, tmp_path):
    rng = np.random.default_rng(0)
    soundfile.write(tmp_path / "me.wav", 0.1 * rng.standard_normal(48000).astype(np.float32), 24000)
    assert session.say(f"/voice {tmp_path}/me.wav the cat sat")[1] == f"voice = {tmp_path}/me.wav\n"
    assert session.repl.voice.transcript == "the cat sat" and session.repl.voice.name == "me"
    session.say(f"/voice {tmp_path}/me.wav")
    assert session.repl.voice.transcript is None
    assert "* me (from a file)" in session.say("/voice")[1]


def test_streamed(session, speaker, tmp_path):
    for line, shown in (
        ("/stream on", "stream = on"),
        ("/set chunk_tokens 5", "chunk_tokens = 5"),
        ("/set max-chunk-tokens 10", "max_chunk_tokens = 10"),
    ):
        assert session.say(line)[1] == shown + "\n"
    session.say("The cat sat on the mat.")
    assert len(Played.heard) > 1
    np.testing.assert_array_equal(np.concatenate(Played.heard), session.repl.result.audio)
    want = generate(speaker, "The cat sat on the mat.", seed=1, causal=True)
    assert np.abs(read(tmp_path / "speech-001.wav") - want.audio).max() < 1e-3


def test_save_replay_stats_help(session, tmp_path):
    for line in ("/save x.wav", "/replay"):
        assert session.say(line)[1] == "mlx_cosyh3: nothing was spoken yet\n"
    assert session.say("/stats")[1] == "nothing was spoken yet\n"
    session.say(TEXT)
    assert "s saved to" in session.say(f"/save {tmp_path}/again.flac")[1] and same(
        tmp_path / "again.flac", session.repl.result
    )
    session.say("/replay")
    np.testing.assert_array_equal(Played.heard[-1], session.repl.result.audio)
    stats = session.say("/stats")[1]
    assert "s of audio, sft" in stats and "seed 1" in stats
    text = session.say("/help")[1]
    assert all(name in text for name in (*session.repl.commands, *session.repl.options))


def test_set_lists_all_options(session):
    listing = session.say("/set")[1]
    assert [line.split(" = ")[0] for line in listing.splitlines()] == list(session.repl.options)
    assert session.say("/set speed")[1] == "speed = 1.0\n" and session.say("/seed none")[1] == "seed = none\n"


@pytest.mark.parametrize(
    "line, words",
    [
        ("", "text is empty"),
        ("...", "nothing to speak"),
        ("/voice ana", "no voice 'ana' (it has: anna, bert, clara)"),
        ("/voice none.wav", "no voice file or recording none.wav"),
        ("/voice anna words", "--voice-text goes with a recording"),
        ("/speed 10", "speed must be from 0.5"),
        ("/speed fast", "speed must be a number, not 'fast'"),
        ("/seed -1", "seed must be"),
        ("/set steps 0", "steps must be"),
        ("/set steps 1.5", "steps must be a whole number"),
        ("/set sped 1", "nearest known: 'speed'"),
        ("/set max_chunk_tokens 3", "max_chunk_tokens must be"),
        ("/stream maybe", "/stream takes on or off"),
        ("/replay 3", "takes nothing"),
        ("/save", "/save needs a file name"),
        ("/vioce", "unknown command /vioce, nearest known: '/voice'"),
        ("ab\udcff", "not Unicode"),
    ],
)
def test_an_error_is_one_line_and_the_repl_goes_on(session, tmp_path, line, words):
    before = (dict(session.repl.options), session.repl.voice)
    out, err = session.say(line)
    assert out == "" and err.startswith("mlx_cosyh3: ") and err.count("\n") == 1 and words in err
    assert (session.repl.options, session.repl.voice) == before and os.listdir(tmp_path) == []
    assert session.say(TEXT) == (f"{tmp_path}/speech-001.wav\n", "")


def test_a_disk_that_fills_is_one_line(session, tmp_path, monkeypatch):
    def full(self, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr("pathlib.Path.write_bytes", full)
        out, err = session.say(TEXT)
    assert out == "" and "No space left" in err and err.count("\n") == 1
    session.say(f"/save {tmp_path}/kept.wav")  # nothing is lost
    assert same(tmp_path / "kept.wav", session.repl.result)


def test_ctrl_c_keeps_the_audio_made_so_far(session, speaker, tmp_path, monkeypatch):
    monkeypatch.setattr(Played, "interrupt", 2)
    for line in ("/stream on", "/set chunk_tokens 5", "/set max_chunk_tokens 10"):
        session.say(line)
    text = "The cat sat on the mat, and it was warm. " * 4
    out, err = session.say(text)
    assert out == f"{tmp_path}/speech-001.wav\n" and session.repl.result.finish_reason == "cancelled"
    got, full = read(tmp_path / "speech-001.wav"), generate(speaker, text, seed=1, causal=True)
    assert 0 < len(got) < len(full.audio) and np.abs(got - full.audio[: len(got)]).max() < 1e-3
    assert "interrupted" in session.say("/stats")[1]
    monkeypatch.setattr(Played, "interrupt", None)
    assert session.say(TEXT) == (f"{tmp_path}/speech-002.wav\n", "")


def test_nothing_to_play_with_is_no_error(speaker, tmp_path, monkeypatch):
    def nothing(rate):
        raise CosyH3Error("there is nothing to play audio with")

    monkeypatch.setattr(audio, "Player", nothing)
    session = Session(speaker, tmp_path)
    assert session.say(TEXT) == (f"{tmp_path}/speech-001.wav\n", "")
    assert "nothing to play" in session.say("/replay")[1]


# ---------------------------------------------------------------- as a process


def test_the_command_chooses_by_model(voice_folder, speaker, tmp_path):
    lines = f"{TEXT}\n/nonsense\n/quit\nnever\n".encode()
    words = [
        *command(voice_folder),
        "--out-dir",
        str(tmp_path),
        "--seed",
        "1",
        "--voice",
        "bert",
        "--no-play",
        "--speed",
        "2",
    ]
    done = subprocess.run(words, input=lines, capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stdout.decode() == f"{tmp_path}/speech-001.wav\n"
    assert b"unknown command /nonsense" in done.stderr and done.stderr.count(b"\n") == 1
    assert same(tmp_path / "speech-001.wav", generate(speaker, TEXT, seed=1, voice="bert", speed=2.0))


@pytest.mark.parametrize(
    "words, said",
    [
        (["--max-tokens", 5], "--max-tokens goes with models that continue text"),
        (["--stop", "x"], "--stop goes with"),
        (["--kv-window", 5], "--kv-window goes with"),
        (["--speed", 5], "speed must be"),
        (["--out-dir", "/no/such"], "no folder /no/such"),
        (["--voice", "ana"], "no voice 'ana'"),
    ],
)
def test_options_that_do_not_fit_a_model_that_speaks(run, voice_folder, words, said):  # noqa: F811
    assert said in one_line(run("repl", "--model", voice_folder, *words, stdin=b""))


@pytest.mark.parametrize(
    "words", [["--speed", 2], ["--voice", "anna"], ["--out-dir", "."], ["--no-play"], ["--instruct", "x"]]
)
def test_options_that_do_not_fit_a_model_that_writes(run, tmp_path, words):  # noqa: F811
    folder = write_model(tmp_path / "h3")
    assert f"{words[0]} goes with models that speak" in one_line(run("repl", "--model", folder, *words, stdin=b""))


def test_in_a_terminal(voice_folder, tmp_path):
    t = Terminal(
        [*COMMAND, "repl", "--model", str(voice_folder), "--out-dir", str(tmp_path), "--no-play"],
        XDG_STATE_HOME=str(tmp_path),
    )
    try:
        t.wait_for(">> ")
        t.send("Hello there.\n")
        t.wait_for(r"speech-001\.wav\r\n")
        t.wait_for(r"real-time factor [^\n]*\n>> ")
        t.send("\x04")
        assert t.process.wait(timeout=60) == 0
    finally:
        t.close()
    assert len(read(tmp_path / "speech-001.wav"))
