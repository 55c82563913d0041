"""Pictures of recordings and of bench reports: their size, that each panel is drawn in, and the pitch that is drawn."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
import soundfile

from mlx_cosyh3 import load, plot
from mlx_cosyh3.cli import main
from mlx_cosyh3.errors import CosyH3Error
from tests.small_voice_model import write_voice_model

pytest.importorskip("matplotlib", reason="the extra `plot`")

RATE = 16000


def tone(hz, seconds=1.0, rate=RATE, level=0.3):
    """A voice of a kind: eight harmonics."""
    t = np.arange(int(seconds * rate)) / rate
    return level * sum(np.sin(2 * np.pi * hz * k * t) / k for k in range(1, 9)).astype(np.float32) / 2


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    return write_voice_model(tmp_path_factory.mktemp("models") / "voice")


def pixels(path):
    """[height, width, 3] of a png, 0 to 1."""
    from matplotlib.image import imread

    return imread(path)[..., :3]


def panels(figure, picture):
    """The pixels inside each of a figure's axes."""
    height, width = picture.shape[:2]
    found = []
    for ax in figure.axes:
        box = ax.get_position()
        rows = slice(int((1 - box.y1) * height) + 3, int((1 - box.y0) * height) - 3)
        found.append(picture[rows, int(box.x0 * width) + 3 : int(box.x1 * width) - 3])
    return found


def near(picture, colour, within=0.25):
    """Which pixels have about this colour, (r, g, b) or a name of matplotlib's."""
    from matplotlib.colors import to_rgb

    return np.abs(picture - np.array(to_rgb(colour))).max(axis=-1) < within


# ---------------------------------------------------------------- pitch


@pytest.mark.parametrize("hz", [70, 100, 151, 220, 330, 480])
@pytest.mark.parametrize("rate", [16000, 22050, 48000])
def test_pitch_of_a_tone(hz, rate):
    times, found = plot.pitch(tone(hz, rate=rate), rate)
    inner = found[(times > 0.05) & (times < 0.9)]
    assert np.isfinite(inner).all() and np.abs(inner / hz - 1).max() < 0.01
    assert np.allclose(np.diff(times), 0.01)


def test_pitch_where_there_is_no_voice():
    noise = np.random.default_rng(0).normal(0, 0.1, RATE).astype(np.float32)
    assert np.isfinite(plot.pitch(noise, RATE)[1]).mean() < 0.05
    assert np.isnan(plot.pitch(np.zeros(RATE, np.float32), RATE)[1]).all()
    times, hz = plot.pitch(np.concatenate([tone(150, 0.5), np.zeros(RATE // 2, np.float32)]), RATE)
    assert np.isfinite(hz[(times > 0.05) & (times < 0.45)]).all() and np.isnan(hz[times > 0.6]).all()


def test_a_constant_has_no_pitch():
    """As a recording has it whose microphone has an offset."""
    assert np.isnan(plot.pitch(np.full(RATE, 0.5, np.float32), RATE)[1]).all()
    times, hz = plot.pitch(tone(150) + 0.5, RATE)
    assert np.abs(hz[(times > 0.05) & (times < 0.9)] - 150).max() < 2


def test_pitch_that_leaps_for_a_frame_is_left_out():
    nan = np.nan
    hz = np.array([120, 121, 60, 122, nan, nan, nan, 119, 60, nan, nan, nan, 90, nan])
    got = plot._without_leaps(hz)
    assert np.isnan(got[[2, 7, 8]]).all()  # of two that disagree neither is believed
    assert got[[0, 1, 3, 12]].tolist() == [120, 121, 122, 90]


def test_pitch_that_glides():
    t = np.arange(RATE) / RATE
    glide = np.sin(2 * np.pi * (100 * t + 50 * t**2)).astype(np.float32)  # 100 to 200 Hz
    times, hz = plot.pitch(glide, RATE)
    inner = (times > 0.1) & (times < 0.85)
    assert np.abs(hz[inner] - (100 + 100 * (times[inner] + 0.016))).max() < 5


@pytest.mark.parametrize("n", [1, 10, 400, 5000])
def test_pitch_of_short_recordings(n):
    times, hz = plot.pitch(tone(150)[:n], RATE)
    assert len(times) == len(hz) >= 1


# ---------------------------------------------------------------- pictures of recordings


def test_each_panel_is_drawn_in(tmp_path):
    path = tmp_path / "a.png"
    figure = plot.speech((tone(150), RATE), path)
    picture = pixels(path)
    assert picture.shape == (900, 1200, 3)
    wave, mel, pitch, strip = panels(figure, picture)
    assert near(wave, plot.BLUE).mean() > 0.1
    assert len(np.unique(mel.reshape(-1, 3).round(2), axis=0)) > 50
    drawn = near(pitch, plot.BLUE)
    rows = np.flatnonzero(drawn.any(axis=1))
    assert drawn.any(axis=0).mean() > 0.2
    assert figure.axes[2].get_ylim() == (50, 320)
    at = 320 - 270 * rows.mean() / len(drawn)  # Hz
    assert abs(at - 150) < 8
    grey, paper = near(strip, "0.85", 0.05).mean(), near(strip, "white", 0.01).mean()
    assert abs(grey - 12 / 25) < 0.03 and abs(paper - 13 / 25) < 0.03


def test_the_picture_shows_the_recording(tmp_path):
    """Another pitch lies elsewhere; silence has no pitch at all, and is told so."""
    heights = []
    for n, samples in enumerate((tone(100), tone(280), np.zeros(RATE, np.float32))):
        figure = plot.speech((samples, RATE), tmp_path / f"{n}.png")
        assert [t.get_text() for t in figure.axes[2].texts] == ["no pitch"] * (n == 2)
        drawn = near(panels(figure, pixels(tmp_path / f"{n}.png"))[2], plot.BLUE)
        heights.append(np.flatnonzero(drawn.any(axis=1)).mean() if drawn.any() else None)
    low, high, none = heights
    assert high < low - 20 and none is None


def test_tokens_of_a_model(speaker, tmp_path):
    model = load(speaker)
    samples = tone(150, 1.2)
    figure = plot.speech((samples, RATE), tmp_path / "a.png", model)
    tokens = model.speech_tokens(samples, RATE)
    assert len(figure.axes) == 4
    wave, _, _, strip = panels(figure, pixels(tmp_path / "a.png"))
    edges = np.count_nonzero(np.diff(tokens)) + 1
    assert len([line for line in figure.axes[0].lines if line.get_color() == plot.ORANGE]) == edges
    assert [text.get_text() for text in figure.axes[3].texts] == [str(t) for t in tokens]
    assert len(np.unique(strip.reshape(-1, 3).round(1), axis=0)) >= min(edges, 2)
    assert near(wave, plot.BLUE).any()


@pytest.mark.parametrize("seconds", [0.03, 1.0, 3.0, 30.0])
def test_token_boundaries_without_a_model(seconds):
    """25 a second; of a long recording as a strip alone, since lines would hide the waveform."""
    figure = plot.speech((tone(150, seconds), RATE))
    lines = [line.get_xdata()[0] for line in figure.axes[0].lines if line.get_color() == plot.ORANGE]
    count = int(np.ceil(seconds * 25))
    np.testing.assert_allclose(lines, np.arange(count) / 25 if count <= plot.LINES else [])
    (strip,) = figure.axes[3].images
    assert strip.get_array().shape == (1, count) and strip.get_extent()[1] == pytest.approx(count / 25)


def test_frequencies_of_the_mel():
    """A tone is brightest where its frequency is written."""
    t = np.arange(24000) / 24000
    for hz in (500, 1000, 4000):
        figure = plot.speech((0.3 * np.sin(2 * np.pi * hz * t).astype(np.float32), 24000))
        ax = figure.axes[1]
        labels = {text.get_text(): at for text, at in zip(ax.get_yticklabels(), ax.get_yticks())}
        brightest = ax.images[0].get_array()[:, 25].argmax() + 0.5
        assert abs(labels[f"{hz / 1000:g}"] - brightest) <= 1


def test_a_model_without_a_tokenizer(tmp_path):
    folder = write_voice_model(tmp_path / "voice", speech_tokenizer=None)
    with pytest.raises(CosyH3Error, match="no speech tokenizer"):
        plot.speech((tone(150), RATE), tmp_path / "a.png", load(folder))
    assert not (tmp_path / "a.png").exists()


def test_a_long_recording_is_drawn_coarser(tmp_path):
    samples = np.tile(tone(150, 2.0, 8000), 30)
    samples[100_000] = 0.9  # one sample of 480,000 is still to be seen
    figure = plot.speech((samples, 8000), tmp_path / "a.png")
    assert len(figure.axes[1].images[0].get_array().T) <= 2 * plot.COLUMNS
    assert len(figure.axes[2].lines[0].get_xdata()) <= plot.COLUMNS + 10
    high = figure.axes[0].collections[0].get_datalim(figure.axes[0].transData).y1
    assert high == pytest.approx(0.9)


def test_too_long():
    with pytest.raises(CosyH3Error, match="700 s long, a picture takes at most 600 s"):
        plot.speech((np.zeros(700 * 1000, np.float32), 1000))


@pytest.mark.parametrize("n", [1, 100, 2000])
def test_short_recordings(n, tmp_path):
    plot.speech((tone(150)[:n], RATE), tmp_path / "a.png")
    assert pixels(tmp_path / "a.png").shape == (900, 1200, 3)


@pytest.mark.parametrize("name, begins", [("a.svg", b"<?xml"), ("a.pdf", b"%PDF"), ("A.PNG", b"\x89PNG")])
def test_formats(name, begins, tmp_path):
    plot.speech((tone(150), RATE), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)
    assert [p.name for p in tmp_path.iterdir()] == [name]  # nothing half-written lies beside it


@pytest.mark.parametrize("name, says", [("a.txt", "ends in .png or .svg or .pdf"), ("a", "ends in"),
                                        ("no/a.png", "there is no folder"),
                                        ("a.jpng", "nearest known: '.png'")])  # fmt: skip
def test_names_that_cannot_be(name, says, tmp_path):
    with pytest.raises(CosyH3Error, match=says):
        plot.check(tmp_path / name)


def test_without_a_display_or_pyplot(tmp_path):
    code = f"""
import sys, numpy as np
from mlx_cosyh3 import plot
plot.speech((np.sin(np.arange(16000) / 9).astype(np.float32), 16000), {str(tmp_path / "a.png")!r})
assert "matplotlib.pyplot" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=headless())
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").stat().st_size > 5000


def headless():
    import os
    from pathlib import Path

    kept = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "MPLBACKEND", "WAYLAND_DISPLAY")}
    return kept | {"PYTHONPATH": str(Path(__file__).parent.parent)}


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CosyH3Error, match="pip install matplotlib"):
        plot.speech((tone(150), RATE))


# ---------------------------------------------------------------- the command


@pytest.fixture
def wav(tmp_path):
    soundfile.write(tmp_path / "me.wav", tone(150), RATE)
    return tmp_path / "me.wav"


def test_command(wav, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plot", str(wav)]) == 0
    assert capsys.readouterr().out == "me.png\n" and pixels(tmp_path / "me.png").shape == (900, 1200, 3)
    assert main(["plot", str(wav), "-o", "me.png"]) == 2
    assert "me.png exists: pass --overwrite" in capsys.readouterr().err
    assert main(["plot", str(wav), "-o", "me.png", "--overwrite"]) == 0


def test_command_with_a_model(wav, speaker, tmp_path):
    assert main(["plot", str(wav), "-o", str(tmp_path / "b.png"), "--model", str(speaker)]) == 0
    assert pixels(tmp_path / "b.png").shape == (900, 1200, 3)


def test_command_from_a_pipe(wav, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(wav.read_bytes())))
    assert main(["plot", "-", "-o", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").exists()


@pytest.mark.parametrize("args, says", [
    (["no.wav"], "there is no recording no.wav"), (["text.wav", "-o", "x.png"], "text.wav"),
    (["me.wav", "-o", "x.gif"], "ends in .png"), (["me.wav", "--model", "h3-tiny"], "is no CosyVoice model"),
])  # fmt: skip
def test_errors_of_the_command(args, says, wav, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.wav").write_text("not audio")
    assert main(["plot", *args]) == 2
    err = capsys.readouterr().err
    assert says in err and len(err.splitlines()) == 1
    assert not list(tmp_path.glob("*.png"))


# ---------------------------------------------------------------- pictures of bench reports


def metric(*values):
    return {"median": sorted(values)[len(values) // 2], "min": min(values), "max": max(values), "values": list(values)}


def test_bench_picture(tmp_path):
    modes = {
        "at_once": {"metrics": {"llm": metric(1, 2, 3), "total": metric(4, 5, 6), "rtf": metric(0.5)}},
        "streamed": {"metrics": {"llm": metric(1, 1, 1), "first_audio": metric(0.5), "rtf": metric(0.6)}},
    }
    figure = plot.bench([("small", {"modes": modes})], tmp_path / "a.png")
    picture = pixels(tmp_path / "a.png")
    assert picture.shape == (350, 1200, 3) and len(figure.axes) == 2
    seconds, rtf = panels(figure, picture)
    for panel in (seconds, rtf):
        assert near(panel, "C0").mean() > 0.02 and near(panel, "C1").mean() > 0.02
    containers = [c for c in figure.axes[0].containers if hasattr(c, "patches")]
    bars = [[round(float(p.get_width()), 3) for p in c.patches] for c in containers]
    assert bars == [[2, 5], [1, 0.5]]
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["llm", "first audio", "total"]
    assert [t.get_text() for t in figure.axes[0].texts] == ["2", "5", "1", "0.5"]  # the numbers of the bars


def test_bench_picture_of_nothing():
    with pytest.raises(CosyH3Error, match="no mode to draw"):
        plot.bench([("small", {"modes": {}})])


def test_bench_command_draws(folder, tmp_path):
    args = ["bench", str(folder), "--runs", "1", "--max-tokens", "2", "--plot", str(tmp_path / "a.png"), "--json"]
    assert main([*args, str(tmp_path / "a.json")]) == 0
    assert pixels(tmp_path / "a.png").shape[1] == 1200 and json.loads((tmp_path / "a.json").read_text())
