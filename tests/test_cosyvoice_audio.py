"""Recordings in, resampling, files out, and the player."""

import io
import os
import stat
import sys
import warnings

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mlx_cosyh3.cosyvoice import audio
from mlx_cosyh3.cosyvoice.audio import Player, check_clip, read_audio, resample, write_wav
from mlx_cosyh3.errors import CosyH3Error
from tests.golden_data import large


def tone(seconds=1.0, rate=24000, level=0.5):
    return (level * np.sin(2 * np.pi * 220 * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


# ---------------------------------------------------------------- resampling


@pytest.mark.parametrize(
    "name, source, old, new",
    [
        ("16k_to_24k", "wav16k", 16000, 24000),
        ("22k05_to_24k", "wav22k", 22050, 24000),
        ("24k_to_16k", "wav24k", 24000, 16000),
        ("44k1_to_16k", "wav44k", 44100, 16000),
        ("44k1_to_24k", "wav44k", 44100, 24000),
    ],
)
def test_resampling_is_upstreams(name, source, old, new):
    golden = load_file(large("golden", "cosyvoice", "frontend", "features.safetensors"))
    got, wanted = resample(golden[source][0], old, new), golden[f"resample_{name}"][0]
    assert got.dtype == np.float32 and got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3000), st.integers(1000, 200000), st.sampled_from([16000, 22050, 24000]))
def test_length_is_exact_for_any_rates(n, old, new):
    out = resample(np.ones(n, np.float32), old, new)
    assert len(out) == -(-n * new // old) and np.isfinite(out).all()


def test_blocks_do_not_show(monkeypatch):
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    whole = resample(x, 44101, 16000)
    monkeypatch.setattr(audio, "BLOCK", 1000)  # the table of phases no longer fits
    np.testing.assert_allclose(resample(x, 44101, 16000), whole, rtol=0, atol=1e-6)


def test_channels_are_not_resampled_as_time():
    with pytest.raises(CosyH3Error, match="mono"):
        resample(np.zeros((48000, 2)), 48000, 16000)
    samples, rate = read_audio((np.zeros((48000, 2)) + 0.1, 48000))
    assert len(resample(samples, rate, 16000)) == 16000


# ---------------------------------------------------------------- reading


def test_reads_files_open_files_and_arrays(tmp_path):
    stereo = np.stack([tone(), -tone() / 2], axis=1)
    path = tmp_path / "a.flac"
    soundfile.write(path, stereo, 24000)
    for source in (path, str(path), io.BytesIO(path.read_bytes()), (stereo, 24000), (stereo.T, 24000.0)):
        samples, rate = read_audio(source)
        assert rate == 24000 and samples.dtype == np.float32
        np.testing.assert_allclose(samples, stereo.mean(axis=1), atol=1e-4)
    for whole in ((tone() * 32768).astype(np.int16), (tone() * 128 + 128).astype(np.uint8)):
        np.testing.assert_allclose(read_audio((whole, 24000))[0], tone(), atol=0.01)


def test_bad_recordings(tmp_path):
    (tmp_path / "empty.wav").touch()
    (tmp_path / "text.wav").write_text("no audio at all")
    soundfile.write(tmp_path / "none.wav", np.zeros(0), 24000)
    nan = tone()
    nan[5] = np.nan
    soundfile.write(tmp_path / "nan.wav", nan, 24000, subtype="FLOAT")
    for source, why in (
        (tmp_path / "empty.wav", "empty.wav is empty"),
        (tmp_path / "text.wav", "cannot read .*text.wav.*ffmpeg"),
        (tmp_path / "none.wav", "none.wav holds no audio"),
        (tmp_path / "nan.wav", "nan.wav holds 1 samples"),
        (tmp_path / "gone.wav", "no recording"),
        (tmp_path, "is a folder"),
        (io.BytesIO(b"RIFF"), "cannot read"),
        ((nan, 24000), "not finite"),
        ((tone(), 0), "sample rate"),
        ((tone(), "24k"), "sample rate"),
        ((tone(), 1 << 33), "sample rate"),
        ((np.zeros((2, 2, 2)), 24000), "shape"),
        (([[0.1], [0.1, 0.2]], 24000), "differ in length"),
        ((np.zeros((0, 2)), 24000), "no audio"),
        ((np.full(9, 1e300), 24000), "not finite"),
        ("~nobody-of-this-name/a.wav", "no recording"),
        ("x" * 5000, "cannot read"),
        ((np.zeros(9, complex), 24000), "complex"),
        (7, "not int"),
    ):
        with pytest.raises(CosyH3Error, match=why) as e:
            read_audio(source)
        assert "\n" not in str(e.value)


# ---------------------------------------------------------------- checks


def test_useless_clips_are_errors():
    for clip, rate, why in (
        (tone(0.4), 24000, "too short .*minimum is 0.5 s"),
        (np.zeros(24000, np.float32), 24000, "silent"),
        (np.full(24000, 0.3, np.float32), 24000, "silent"),
        (tone(1, 8000), 8000, "8000 Hz: at least 16000"),
    ):
        with pytest.raises(CosyH3Error, match=why):
            check_clip(clip, rate)


def test_poor_clips_are_noted():
    said = []
    for clip in (tone(), tone(level=1.0), tone(3, 24000)):
        check_clip(clip, 24000, said.append)
    assert not said
    check_clip(np.clip(tone(level=2), -1, 1), 24000, said.append)
    check_clip(tone(level=2), 24000, said.append)
    check_clip(tone(31), 24000, said.append)
    assert "is clipped" in said[0] and "peak is 2.00" in said[1] and "longer than 30 s" in said[2] and len(said) == 3
    with pytest.warns(UserWarning, match="longer than 30 s"):
        check_clip(tone(31), 24000)


# ---------------------------------------------------------------- writing


@pytest.mark.parametrize("ending", ["wav", "flac"])
def test_what_is_written_is_read(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    write_wav(path, tone(), 24000)
    samples, rate = read_audio(path)
    assert rate == 24000 and soundfile.info(path).subtype == "PCM_16" and len(samples) == 24000
    np.testing.assert_allclose(samples, tone(), atol=1e-4)
    write_wav(path, tone(0.5, level=3), 24000)  # over it; clipped, not wrapped around
    assert np.abs(read_audio(path)[0]).max() > 0.99 and os.listdir(tmp_path) == [path.name]


def test_stdout(monkeypatch):
    class Out:
        buffer = io.BytesIO()

    monkeypatch.setattr(sys, "stdout", Out)
    write_wav("-", tone(), 24000)
    assert len(read_audio(io.BytesIO(Out.buffer.getvalue()))[0]) == 24000


def test_bad_audio_is_never_written(tmp_path):
    nan = tone()
    nan[0] = np.inf
    for name, samples, why in (
        ("a.wav", np.zeros(0, np.float32), "no audio"),
        ("a.wav", nan, "not finite"),
        ("a.wav", np.zeros(100, np.float32), "all zeros"),
        ("a.wav", np.zeros((2, 100), np.float32), "floats"),
        ("a.mp4", tone(), "'.mp4'"),
        ("a", tone(), "without an ending"),
    ):
        with pytest.raises(CosyH3Error, match=why):
            write_wav(tmp_path / name, samples, 24000)
    assert not os.listdir(tmp_path)


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / "a.wav"
    write_wav(path, tone(), 24000)
    before = path.read_bytes()

    def full(self, data):
        with open(self, "wb") as f:
            f.write(bytes(data[:100]))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(audio.Path, "write_bytes", full)
    with pytest.raises(CosyH3Error, match="No space left"):
        write_wav(path, tone(2), 24000)
    assert os.listdir(tmp_path) == ["a.wav"] and path.read_bytes() == before


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "folder.wav").mkdir()
    for path in (tmp_path / "gone" / "a.wav", tmp_path / "folder.wav", "~nobody-of-this-name/a.wav", "a\0.wav"):
        with pytest.raises(CosyH3Error, match="cannot write"):
            write_wav(path, tone(), 24000)
    with pytest.raises(CosyH3Error, match="cannot write .*sample rate"):
        write_wav(tmp_path / "a.flac", tone(), 700000)  # more than flac can say
    assert os.listdir(tmp_path) == ["folder.wav"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_device_that_is_full(tmp_path):
    (tmp_path / "a.wav").symlink_to("/dev/full")
    with pytest.raises(CosyH3Error, match="No space left"):
        write_wav(tmp_path / "a.wav", tone(), 24000)


# ---------------------------------------------------------------- playing


def program(tmp_path, monkeypatch, script):
    """A player program of this name, alone on the PATH."""
    file = tmp_path / "aplay"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.setattr(audio, "PLAYERS", {"aplay": ["aplay", "-q"]})
    monkeypatch.setitem(sys.modules, "sounddevice", None)


def test_a_program_plays_all_at_the_end(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, f'cp "$2" "{tmp_path}/played.wav"')
    player = Player(24000)
    for piece in (tone(0.5), np.zeros(0, np.float32), tone(0.5)):
        player.add(piece)
    player.finish()
    player.close()
    player.close()
    assert len(read_audio(tmp_path / "played.wav")[0]) == 24000


def test_a_program_that_fails(tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "echo no card >&2; exit 1")
    player = Player(24000)
    player.add(tone())
    with pytest.raises(CosyH3Error, match="aplay could not play the audio: no card"):
        player.finish()
    player.close()


def test_nothing_to_play_with(monkeypatch):
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    monkeypatch.setattr(audio, "PLAYERS", {})
    with pytest.raises(CosyH3Error, match="pip install sounddevice"):
        Player(24000)


def test_a_device_gets_pieces_as_they_come(monkeypatch):
    class Device:
        PortAudioError = type("PortAudioError", (Exception,), {})
        log = []

        class OutputStream:
            def __init__(self, samplerate, channels, dtype):
                Device.log.append((samplerate, channels, dtype))

            def write(self, data):
                if data.max() > 2:
                    raise Device.PortAudioError("unplugged")
                Device.log.append(data.shape)

            start, stop, abort, close = (
                lambda self, name=name: Device.log.append(name) for name in ("start", "stop", "abort", "close")
            )

    monkeypatch.setitem(sys.modules, "sounddevice", Device)
    player = Player(24000)
    player.add(tone(0.5))
    player.finish()
    with pytest.raises(CosyH3Error, match="unplugged"):
        player.add(tone(level=9))
    player.close()
    assert Device.log == [(24000, 1, "float32"), "start", (12000, 1), "stop", "abort", "close"]


def test_warn_is_a_warning():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        audio.warn("text")
    assert caught[0].category is UserWarning and str(caught[0].message) == "text"
