"""`mlx_cosyh3 plot speech.wav`: a picture of a recording (waveform, mel, pitch, speech tokens), and of `bench` reports.

Drawn by matplotlib (the extra `plot`) without a display: Figure draws to a file, pyplot and its windows are not used.
"""

import io
import os
import sys
from pathlib import Path

import numpy as np

from mlx_cosyh3.bench_compare import number
from mlx_cosyh3.cosyvoice import audio, features
from mlx_cosyh3.errors import CosyH3Error, nearest

ENDINGS = (".png", ".svg", ".pdf")
COLUMNS = 4000  # of what is drawn across the picture: a longer recording is drawn coarser
LONGEST = 600.0  # s of a recording that are read in one picture
# The mel of a recording without a model: CosyVoice 2 and 3's, and so is the rate of tokens.
MEL = {"rate": 24000, "n_fft": 1920, "hop": 480, "win": 1920, "fmin": 0, "fmax": None, "bins": 80}
TOKEN_RATE = 25
LINES = 300  # token boundaries that are drawn as lines; more would hide the waveform
FLOOR = float(np.log(1e-5))  # where a mel is clipped: silence
BLUE, ORANGE, GREY = "#20639b", "#d1603d", "#888888"


def speech(source, path=None, model=None, title=None):
    """Draw a recording -> matplotlib's Figure, written to `path` if that is given.

    source   a path, an open file, or (samples [T] or [T, C], rate Hz); of any rate and up to 600 s
    model    a CosyVoice model with a speech tokenizer: its mel settings, and the tokens that it hears. Without one the
             strip shows where tokens begin and end, 25 a second, and not which they are
    Raises CosyH3Error for a recording that cannot be read or a picture that cannot be written."""
    Figure = _figure()
    samples, rate = audio.read_audio(source)
    seconds = len(samples) / rate
    if seconds > LONGEST:
        raise CosyH3Error(f"the recording is {seconds:.0f} s long, a picture takes at most {LONGEST:.0f} s: cut it")
    tokens = None
    if model is not None:
        model.need("speech_tokenizer")
        tokens = model.speech_tokens(samples, rate)
    figure = Figure(figsize=(12, 9), dpi=100, layout="constrained")
    axes = figure.subplots(4, 1, sharex=True, height_ratios=[1, 2, 1, 0.5])
    _wave(axes[0], samples, rate)
    _mel(axes[1], samples, rate, MEL if model is None else model.mel_settings())
    _pitch(axes[2], samples, rate)
    _tokens(axes, tokens, seconds, TOKEN_RATE if model is None else model.token_rate)
    axes[-1].set(xlabel="s", xlim=(0, seconds))
    if title is None:
        title = Path(source).name if isinstance(source, (str, os.PathLike)) else "recording"
    axes[0].set_title(title, loc="left")
    axes[0].set_title(f"{seconds:.3g} s, {rate} Hz", loc="right", fontsize="medium", color=GREY)
    if path is not None:
        save(figure, path)
    return figure


def _wave(ax, samples, rate):
    """Line of the samples, or their highest and lowest where several fall on one column."""
    if len(samples) <= 2 * COLUMNS:
        ax.plot(np.arange(len(samples)) / rate, samples, color=BLUE, linewidth=0.7,
                marker="." if len(samples) < 200 else "", clip_on=len(samples) >= 200)  # fmt: skip
    else:
        edges = np.linspace(0, len(samples), COLUMNS + 1).astype(int)[:-1]
        high, low = np.maximum.reduceat(samples, edges), np.minimum.reduceat(samples, edges)
        ax.fill_between(edges / rate, low, high, color=BLUE, linewidth=0.3)
    largest = max(float(np.abs(samples).max()), 1e-3)
    ax.set(ylabel="wave", ylim=(-1.05 * largest, 1.05 * largest))


def _mel(ax, samples, rate, settings):
    """Log magnitudes from silence to the loudest; bins are labelled by the frequency in their middle."""
    x = audio.resample(samples, rate, settings["rate"])
    if len(x) < settings["n_fft"]:
        x = np.pad(x, (0, settings["n_fft"] - len(x)))
    mel = features.mel_spectrogram(x, **settings)  # [T, bins]
    end = len(mel) * settings["hop"] / settings["rate"]
    mel = mel[:: max(1, len(mel) // COLUMNS)]
    ax.imshow(mel.T, origin="lower", aspect="auto", extent=(0, end, 0, mel.shape[1]), cmap="magma", vmin=FLOOR,
              vmax=max(mel.max(), FLOOR + 5))  # fmt: skip
    filters = features.slaney_filters(*(settings[k] for k in ("rate", "n_fft", "bins", "fmin", "fmax")))
    middles = filters.argmax(axis=1) * settings["rate"] / settings["n_fft"]  # Hz
    shown = [hz for hz in (500, 1000, 2000, 4000, 8000) if hz < middles[-1]]
    ax.set_yticks(np.interp(shown, middles, np.arange(len(middles)) + 0.5), [f"{hz / 1000:g}" for hz in shown])
    ax.set(ylabel="mel, kHz")


def _pitch(ax, samples, rate):
    times, hz = pitch(samples, rate)
    top = 520 if np.nanmax(hz, initial=0) > 300 else 320
    ax.plot(times, hz, ".", color=BLUE, markersize=3)
    ax.set(ylabel="f0, Hz", ylim=(50, top))
    ax.grid(axis="y", color=GREY, alpha=0.25, linewidth=0.5)
    if np.isnan(hz).all():
        ax.text(0.5, 0.5, "no pitch", transform=ax.transAxes, ha="center", va="center", color=GREY)


def _tokens(axes, tokens, seconds, rate):
    """A strip of the speech tokens, coloured by id, or shaded in turn where the ids are not known (None).

    In the waveform a line is where a token begins that is not the one before."""
    strip = axes[3]
    if tokens is None:
        count = int(np.ceil(seconds * rate))
        edges, colours, drawn = np.arange(count), np.arange(count) % 2, {"cmap": "Greys", "vmax": 4}
    else:
        count = len(tokens)
        edges = np.flatnonzero(np.diff(tokens, prepend=-1))
        colours = (tokens.astype(np.int64) * 2654435761 % 2**32) / 2**32  # ids that are near are not alike
        drawn = {"cmap": "hsv", "vmax": 1}
    for x in edges / rate if len(edges) <= LINES else ():
        axes[0].axvline(x, color=ORANGE, linewidth=0.4, alpha=0.6)
    if count:
        strip.imshow(colours[None], aspect="auto", extent=(0, count / rate, 0, 1), vmin=0, interpolation="nearest",
                     **drawn)  # fmt: skip
    if tokens is not None and count <= 80:
        for n, token in enumerate(tokens):
            strip.text((n + 0.5) / rate, 0.5, str(token), rotation=90, ha="center", va="center", fontsize=6)
    strip.set(ylabel=f"tokens,\n{rate:g} a s", yticks=[])


# ---------------------------------------------------------------- pitch


def pitch(samples, rate, low=60.0, high=500.0, hop=0.01):
    """(times s [T], Hz [T]; NaN where there is no voice) of samples [N] at `rate` Hz, mono.

    low, high   Hz that are looked for
    hop         s between two values; longer where there would be more than COLUMNS
    YIN (de Cheveigne and Kawahara, 2002), float64."""
    rate_in, rate = rate, 16000
    x = audio.resample(samples, rate_in, rate).astype(np.float64)
    window, first, last = 512, int(rate / high), int(rate / low)  # samples
    step = int(rate * max(hop, len(x) / rate / COLUMNS))
    x = np.pad(x - x.mean(), (window // 2, window + last))
    frames = np.lib.stride_tricks.sliding_window_view(x, window + last + 1)[::step]
    loud = np.sqrt(np.mean(np.square(frames[:, :window]), axis=1))
    hz = np.concatenate([_yin(frames[i : i + 512], window, first, last) for i in range(0, len(frames), 512)])
    hz = np.where(loud > max(1e-4, 0.01 * loud.max(initial=0)), rate / hz, np.nan)
    return np.arange(len(frames)) * step / rate, _without_leaps(hz)


def _without_leaps(hz):
    """Pitch [T] without the frames that none of the two before and after agrees with: half or twice it, mostly."""
    around = np.lib.stride_tricks.sliding_window_view(np.pad(hz, 2, constant_values=np.nan), 5)[:, [0, 1, 3, 4]]
    agree = (np.abs(np.log(around / hz[:, None])) < 0.25).any(axis=1)
    return np.where(agree | np.isnan(around).all(axis=1), hz, np.nan)


def _yin(frames, window, first, last):
    """Frames [T, window + last + 1] -> period in samples [T], NaN where none is clear."""
    size = 2 ** int(np.ceil(np.log2(frames.shape[1] + window)))
    spectrum = np.fft.rfft(frames, size) * np.conj(np.fft.rfft(frames[:, :window], size))
    product = np.fft.irfft(spectrum, size)[:, : last + 1]  # sum over j < window of x[j] x[j + lag]
    power = np.cumsum(np.pad(np.square(frames), ((0, 0), (1, 0))), axis=1)
    energy = power[:, window : window + last + 1] - power[:, : last + 1]
    unlike = np.maximum(energy[:, :1] + energy - 2 * product, 0)[:, 1:]  # lags 1 .. last
    lags = np.arange(1, last + 1)
    unlike = unlike * lags / np.maximum(np.cumsum(unlike, axis=1), 1e-12)
    inner = unlike[:, first - 1 :]
    # The first dip that is deep enough, else the deepest; a lag of twice the period dips as deep.
    dips = (inner[:, 1:-1] <= inner[:, :-2]) & (inner[:, 1:-1] < inner[:, 2:]) & (inner[:, 1:-1] < 0.15)
    at = np.where(dips.any(axis=1), np.argmax(dips, axis=1) + 1, np.argmin(inner, axis=1))
    rows, k = np.arange(len(frames)), np.clip(at, 1, inner.shape[1] - 2)
    a, b, c = inner[rows, k - 1], inner[rows, k], inner[rows, k + 1]
    bend = a - 2 * b + c
    shift = np.where(bend > 1e-12, 0.5 * (a - c) / np.maximum(bend, 1e-12), 0).clip(-0.5, 0.5)
    return np.where(inner[rows, at] < 0.3, first + k + shift, np.nan)


# ---------------------------------------------------------------- bench


def bench(reports, path=None):
    """Draw [(label, report of `bench`)] -> Figure: seconds of each stage, and the rest beside; lines are the range."""
    Figure = _figure()
    rows = [(f"{label}, {mode.replace('_', ' ')}", found["metrics"]) for label, report in reports
            for mode, found in report["modes"].items()]  # fmt: skip
    if not rows:
        raise CosyH3Error("the report holds no mode to draw")
    seconds = ("speech_tokenizer", "llm", "flow", "vocoder", "prompt", "generation", "first_audio", "first_text",
               "total", "first_run")  # fmt: skip
    panels = [([n for n in seconds if any(n in m for _, m in rows)], "s")]
    others = {"rtf": "", "tokens_per_s": "1/s", "peak_memory": "GB", "cpu": "%", "power": "W"}
    panels += [([n], unit) for n, unit in others.items() if any(n in m for _, m in rows)]
    thick = 0.2  # inches of a bar
    figure = Figure(figsize=(12, 2 + (thick * len(rows) + 0.1) * len(panels[0][0])), dpi=100, layout="constrained")
    axes = figure.subplots(1, len(panels), width_ratios=[3] + [1] * (len(panels) - 1), squeeze=False)[0]
    for ax, (names, unit) in zip(axes, panels):
        labels = [n.replace("_", " ") for n in names]
        # As thick in all panels; those of one metric stand in the middle.
        height = 0.8 / len(rows) * len(names) / len(panels[0][0])
        for i, (label, metrics) in enumerate(rows):
            here = [(k, metrics[n]) for k, n in enumerate(names) if n in metrics]
            middle = [m["median"] for _, m in here]
            reach = [[m["median"] - m["min"] for _, m in here], [m["max"] - m["median"] for _, m in here]]
            at = [k + (i - (len(rows) - 1) / 2) * height for k, _ in here]
            ax.barh(at, middle, 0.9 * height, xerr=reach, label=label, color=f"C{i % 10}", ecolor=GREY)
            for y, (_, m) in zip(at, here):
                ax.annotate(number(m["median"]), (m["max"], y), (4, 0), textcoords="offset points", va="center",
                            fontsize="small")  # fmt: skip
        ax.set(xlabel=unit, xlim=(0, 1.25 * max(ax.get_xlim()[1], 1e-9)), ylim=(len(names) - 0.5, -0.5))
        ax.set_yticks(range(len(names)) if ax is axes[0] else [], labels if ax is axes[0] else [])
        ax.set_title("seconds" if ax is axes[0] else labels[0], fontsize="medium")
        ax.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    if path is not None:
        save(figure, path)
    return figure


# ---------------------------------------------------------------- files and the command


def _figure():
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise CosyH3Error("pictures need matplotlib: pip install matplotlib") from e
    return Figure


def check(path):
    """Raise CosyH3Error unless a picture can be drawn to `path`: before any work is done."""
    path = Path(path).expanduser()
    if path.suffix.lower() not in ENDINGS:
        near = nearest(path.suffix.lower(), ENDINGS)
        raise CosyH3Error(f"{path}: a picture's name ends in {' or '.join(ENDINGS)}{near}")
    if path.is_dir() or not path.parent.is_dir():
        why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise CosyH3Error(f"cannot write {path}: {why}")
    _figure()
    return path


def save(figure, path):
    """Write a Figure; the file appears whole or not at all."""
    path = check(path)
    data = io.BytesIO()
    figure.savefig(data, format=path.suffix.lower()[1:])
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(data.getbuffer())
        os.replace(partial, path)
    except OSError as e:
        raise CosyH3Error(f"cannot write {path}: {e.strerror}") from e
    finally:
        partial.unlink(missing_ok=True)


def add_arguments(parser):
    parser.add_argument("recording", help="an audio file: wav, flac, ogg, mp3 ...; '-' reads it from a pipe")
    parser.add_argument("-o", "--output", metavar="F", help="picture to write, png, svg or pdf (default: the "
                        "recording's name with .png)")  # fmt: skip
    parser.add_argument("--model", metavar="DIR_OR_REPO", help="a CosyVoice model: draw its speech tokens, too")
    parser.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub repo")
    parser.add_argument("--overwrite", action="store_true", help="replace a file that is there already")


def add_parser(subparsers):
    parser = subparsers.add_parser("plot", help="draw a recording: waveform, mel, pitch, speech tokens")
    add_arguments(parser)
    parser.set_defaults(run=run)
    return parser


def run(args):
    """The command `plot`."""
    from mlx_cosyh3.speech_cli import load_speaker

    piped = args.recording == "-"
    path = check(args.output or ("speech.png" if piped else Path(args.recording).with_suffix(".png").name))
    if path.exists() and args.output is not None and not args.overwrite:
        raise CosyH3Error(f"{path} exists: pass --overwrite to replace it, or choose another -o")
    if piped and (sys.stdin is None or sys.stdin.isatty()):
        raise CosyH3Error("no recording: give a file, or pipe one in")
    source = io.BytesIO(sys.stdin.buffer.read()) if piped else Path(args.recording).expanduser()
    audio.read_audio(source)  # a bad one is told before a model is loaded
    if piped:
        source.seek(0)
    model = None if args.model is None else load_speaker(args)
    speech(source, path, model, "a pipe" if piped else None)
    print(path)
    return 0
