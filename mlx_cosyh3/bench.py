"""`mlx_cosyh3 bench`: how fast a model is on this machine, stage by stage, in several runs that do the same work.

    mlx_cosyh3 bench cosyvoice3-tiny --runs 5 --json a.json --plot a.png
    mlx_cosyh3 bench compare a.json b.json
    mlx_cosyh3 bench --table cosyvoice3-tiny

Each mode ("at_once", "streamed", "batch", "vc") is run once before, which shows what the first use costs: MLX compiles
its kernels then. All runs draw with one seed. What is not comparable is told, never left out in silence. How two
reports are compared is in `bench_compare.py`, how the power is read in `power.py`.
"""

import dataclasses
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_cosyh3 import logs
from mlx_cosyh3.bench_compare import compare_files, number
from mlx_cosyh3.errors import CosyH3Error, nearest
from mlx_cosyh3.load import find_model, load

SENTENCE = "Your train leaves at nine from platform four."  # what a model that speaks says
PROMPT = "It was a dark and stormy night, and"  # what a language model continues
MODES = ("at_once", "streamed", "batch", "vc")  # vc: a recording is said by another voice
METRICS = {  # name: (unit, which is better, what it is)
    "total": ("s", "lower", "from the call to the whole result"),
    "first_audio": ("s", "lower", "from the call to the first piece of audio"),
    "first_text": ("s", "lower", "from the call to the first piece of text"),
    "speech_tokenizer": ("s", "lower", "speech tokens of a recording"),
    "llm": ("s", "lower", "speech tokens of the text"),
    "flow": ("s", "lower", "mel of the speech tokens"),
    "vocoder": ("s", "lower", "audio of the mel"),
    "prompt": ("s", "lower", "reading the prompt, up to the first token"),
    "generation": ("s", "lower", "the tokens after the first"),
    "rtf": ("", "lower", "seconds of computing for a second of audio"),
    "tokens_per_s": ("1/s", "higher", "language model; in a batch: all tokens over the whole time"),
    "prompt_per_s": ("1/s", "higher", "tokens of the prompt"),
    "cpu": ("%", "lower", "of one core, of this process"),
    "peak_memory": ("GB", "lower", "the most that MLX held"),
    "power": ("W", "lower", "CPU, GPU and Neural Engine of the machine together"),
    "first_run": ("s", "lower", "the first run of this mode"),
    "compile": ("s", "lower", "what the first run took longer than the others"),
    "load": ("s", "lower", "loading the model"),
}


@dataclass
class Job:
    """What is to be done in each run.

    options   of `generate`
    batch     how many at once in mode "batch"
    source    in mode "vc": the recording, a path or (samples, rate)
    clock, cpu_clock   seconds of the wall and of all threads of this process"""

    text: str
    options: dict = field(default_factory=dict)
    runs: int = 5
    batch: int = 4
    source: object = None
    clock: object = time.perf_counter
    cpu_clock: object = time.process_time

    def __post_init__(self):
        for name, value, most in (("--runs", self.runs, 1000), ("--batch", self.batch, 256)):
            if not isinstance(value, int) or not 1 <= value <= most:
                raise CosyH3Error(f"{name} must be a whole number from 1 to {most}, not {value!r}")


# ---------------------------------------------------------------- measuring


def measure(model, mode, job, step=lambda: None, power=None):
    """Run `job` in `mode` once to warm up and job.runs times more -> what a report holds of a mode, a dict.

    step    called after each run
    power   power.Power, whose samples are taken from run to run"""
    first = one_run(model, mode, job)
    step()
    runs = []
    for _ in range(job.runs):
        since = power.mark() if power is not None else None
        runs.append(one_run(model, mode, job))
        watts = power.since(since) if power is not None else None
        if watts is not None:
            runs[-1]["metrics"]["power"] = watts
        step()
    values = {}
    for name in METRICS:
        found = [run["metrics"][name] for run in runs if name in run["metrics"]]
        if len(found) == len(runs):
            values[name] = found
    total = first["metrics"]["total"]
    values["first_run"] = [total]
    values["compile"] = [max(0.0, total - statistics.median(values["total"]))]
    made = [run["made"] for run in runs]
    return {
        "runs": len(runs),
        "made": made[0],
        "same_work": all(m == made[0] for m in made),
        "metrics": {name: summary(name, values[name]) for name in METRICS if name in values},
    }


def summary(name, values):
    """All values of a metric and what there is to say of them; `spread` is (max - min) / median."""
    unit, better, _ = METRICS[name]
    middle = statistics.median(values)
    spread = (max(values) - min(values)) / middle if middle else 0.0
    return {"unit": unit, "better": better, "median": middle, "min": min(values), "max": max(values),
            "spread": spread, "values": list(values)}  # fmt: skip


def one_run(model, mode, job):
    """One run -> {"metrics": {name: number}, "made": what was made: tokens, seconds of audio}."""
    mx.clear_cache()
    mx.reset_peak_memory()
    begin, busy, first = job.clock(), job.cpu_clock(), None
    if mode == "streamed":
        stream = model.stream_generate(job.text, **job.options)
        for _ in stream:
            if first is None:
                first = job.clock() - begin
        results = [stream.result]
    elif mode == "batch":
        results = model.batch_generate([job.text] * job.batch, **job.options)
    elif mode == "vc":
        results = [model.convert_voice(job.source, **job.options)]
    else:
        results = [model.generate(job.text, **job.options)]
    total, busy = job.clock() - begin, job.cpu_clock() - busy
    metrics = {"total": total, "cpu": 100 * busy / max(total, 1e-9), "peak_memory": mx.get_peak_memory() / 1e9}
    tokens = sum(len(r.tokens) for r in results)
    made = {"tokens": tokens}
    spoken = hasattr(results[0], "duration")
    if first is not None:
        metrics["first_audio" if spoken else "first_text"] = first
    if spoken:
        made["seconds"] = sum(r.duration for r in results)
        metrics["rtf"] = total / max(made["seconds"], 1e-9)
    if mode == "batch":  # its rows share their stages
        metrics["tokens_per_s"] = tokens / max(total, 1e-9)
        return {"metrics": metrics, "made": made}
    (r,) = results
    metrics |= {stage: s for stage, s in r.seconds.items() if stage in METRICS and stage != "first_audio"}
    if spoken:
        if r.seconds.get("llm"):
            metrics["tokens_per_s"] = tokens / r.seconds["llm"]
    else:
        metrics |= {"tokens_per_s": r.generation_tps, "prompt_per_s": r.prompt_tps}
    return {"metrics": metrics, "made": made}


def bench(name, modes, make_job, *, loader=load, clock=time.perf_counter, step=lambda: None, power=None):
    """Load a model and measure it in `modes` -> the report, a dict that JSON takes; see `bench_compare.check`.

    make_job   (model) -> Job"""
    begin = clock()
    model = loader(name)
    loaded = clock() - begin
    job = make_job(model)
    report = {
        "bench": 1,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": describe(model, name),
        "settings": {"text": job.text, "batch": job.batch, "options": _told(job.options)},
        "load": summary("load", [loaded]),
        "modes": {},
    }
    for mode in modes:
        report["modes"][mode] = measure(model, mode, job, step, power)
    return report | {k: v for k, v in logs.machine().items() if k != "memory"}


def _told(options):
    """Options as the report holds them: a Voice by its name, and none that does not change the work."""
    voice = options.get("voice")
    told = options | ({"voice": voice.name} if hasattr(voice, "name") else {})
    return logs.plain({name: value for name, value in told.items() if name != "note"}, allow=True)


def describe(model, name):
    """What a report says of a model: name (of a folder its last part), type, formats, bytes of its weights."""
    config = model.config if isinstance(model.config, dict) else dataclasses.asdict(model.config)
    shown = Path(str(name)).name if name is not None else "the small model of the package"
    found = {"name": shown, "type": config.get("model_type", "h3"), "quantization": config.get("quantization"),
             "dtype": config.get("dtype")}  # fmt: skip
    return found | {"bytes": sum(a.nbytes for _, a in tree_flatten(model.parameters()))}


# ---------------------------------------------------------------- what is printed


def show(report):
    """The report as text for people."""
    model, machine = report["model"], report["machine"]
    size, loaded = model["bytes"] / 1e6, report["load"]["median"]
    lines = [
        f"model    {model['name']} ({model['type']}, {size:.1f} MB), loaded in {loaded:.2f} s",
        f"machine  {machine['device']} ({machine['backend']}), {machine['system']}, MLX {report['versions']['mlx']}",
        f"text     {report['settings']['text']}",
    ]
    for mode, found in report["modes"].items():
        made = found["made"]
        audio = f", {made['seconds']:.2f} s of audio" if "seconds" in made else ""
        runs = "1 run," if found["runs"] == 1 else f"{found['runs']} runs, each"
        lines += ["", f"{mode}: {runs} {made['tokens']} tokens{audio}"]
        lines.append(f"  {'':17}{'median':>10}{'min':>10}{'max':>10}{'spread':>9}")
        for name, m in found["metrics"].items():
            numbers = "".join(f"{number(m[key]):>10}" for key in ("median", "min", "max"))
            spread = "" if len(m["values"]) == 1 else f"{100 * m['spread']:7.0f} %"
            lines.append(f"  {name:17}{numbers}{spread:>9}  {m['unit']}".rstrip())
        if not found["same_work"]:
            lines.append("  note: the runs did not all make the same tokens: their times differ for that reason, too")
    return "\n".join(lines)


TABLE = ("mode", "s per sentence", "s to first", "CPU %", "memory GB", "power W")


def table_rows(reports):
    """The user's table: one row for each (label, report) and mode."""
    rows = []
    for label, report in reports:
        for mode, found in report["modes"].items():
            m = {name: v["median"] for name, v in found["metrics"].items()}
            count = report["settings"]["batch"] if mode == "batch" else 1
            first = m.get("first_audio", m.get("first_text"))
            rows.append([f"{label}, {mode.replace('_', ' ')}{f' of {count}' if mode == 'batch' else ''}",
                         m["total"] / count, first, m["cpu"], m["peak_memory"], m.get("power")])  # fmt: skip
    return rows


def show_table(rows):
    """Markdown, so that it can be pasted."""
    cells = [[row[0], *("-" if x is None else number(x) for x in row[1:])] for row in rows]
    widths = [max(len(line[i]) for line in [TABLE, *cells]) for i in range(len(TABLE))]
    line = lambda row: "| " + " | ".join(  # noqa: E731
        c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))
    ) + " |"  # fmt: skip
    rule = "| " + " | ".join("-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)) + " |"
    return "\n".join([line(TABLE), rule, *map(line, cells)])


# ---------------------------------------------------------------- the command


def add_arguments(parser):
    from mlx_cosyh3.speech_cli import add_voice

    parser.add_argument("what", nargs="*", metavar="MODEL", help="model folders or hub repo ids; default: the small "
                        "language model; or: compare A.json B.json")  # fmt: skip
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="runs of each mode, after one to warm up (5)")
    parser.add_argument("--modes", metavar="M,M", help=f"some of {','.join(MODES)} "
                        "(at_once,streamed; with --table batch, too; with --recording vc, too)")  # fmt: skip
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="texts at once in mode batch (4)")
    parser.add_argument("--text", metavar="TEXT", help="what to speak or to continue")
    add_voice(parser)
    parser.add_argument("--recording", metavar="F", help="mode vc: what is to be said in another voice")
    parser.add_argument("--max-tokens", type=int, default=100, metavar="N", help="models that continue text (100)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of all runs (1)")
    parser.add_argument("--json", metavar="F", help="write the report; '-' prints it in place of the tables")
    parser.add_argument("--plot", metavar="F", help="draw the report (png, svg or pdf; needs matplotlib)")
    parser.add_argument("--table", action="store_true", help="mode by mode: time, CPU, memory and, on a Mac where "
                        "powermetrics may run (as root, or by sudo without a password), power")  # fmt: skip


def add_parser(subparsers):
    parser = subparsers.add_parser("bench", help="measure a model on this machine, or compare two measurements")
    add_arguments(parser)
    parser.set_defaults(run=run)
    return parser


def run(args):
    """The command `bench`."""
    _check_output(args)
    if args.what and args.what[0] == "compare":
        for name in ("table", "text", "modes", "voice", "recording"):
            if getattr(args, name):
                raise CosyH3Error(f"compare measures nothing: leave --{name} out")
        return compare_files(args.what[1:], args.json, args.plot)
    modes = _modes(args)
    Job("", {}, args.runs, args.batch)  # bad numbers before a model is loaded
    names = args.what or [None]
    if len(names) > 1 and not args.table:
        raise CosyH3Error(f"one model at a time, not {len(names)}: write a --json of each and `bench compare` them, "
                          "or use --table")  # fmt: skip
    for name in names:
        find_model(name)
    if args.table:
        return _run_table(args, names, modes)
    with _bar(len(modes) * (args.runs + 1)) as bar:
        report = bench(names[0], modes, lambda model: _job(args, model), step=bar.update)
    return _deliver(args, report, show(report), [(report["model"]["name"], report)])


def _modes(args):
    """The modes that are asked for."""
    if args.recording is not None and not Path(args.recording).expanduser().is_file():
        raise CosyH3Error(f"--recording: there is no recording {args.recording}")
    if args.modes is None:
        return MODES[: 3 if args.table else 2] + (("vc",) if args.recording else ())
    modes = args.modes.split(",")
    for mode in modes:
        if mode not in MODES:
            raise CosyH3Error(f"--modes: there is no mode {mode!r}{nearest(mode, MODES)}; there are {', '.join(MODES)}")
    if ("vc" in modes) != (args.recording is not None):
        raise CosyH3Error("mode vc goes with --recording FILE: give both, or neither")
    return modes


def _run_table(args, names, modes):
    from mlx_cosyh3.power import Power

    devices = ["gpu", "cpu"] if _has_gpu() else [None]
    reports = []
    with _bar(len(names) * len(devices) * len(modes) * (args.runs + 1)) as bar, Power() as power:
        for name in names:
            for device in devices:
                report = bench(name, modes, lambda model: _job(args, model, device), step=bar.update, power=power)
                on = device or report["machine"]["backend"].lower()
                reports.append((f"{report['model']['name']} on {on}", report))
    runs = "One run each" if args.runs == 1 else f"Medians of {args.runs} runs"
    lines = [show_table(table_rows(reports)), "", f"{runs}. CPU: 100 % is one core. Memory: the most that MLX held. "
             "A language model's sentence is its whole text."]  # fmt: skip
    if power.trouble is not None:
        lines.append(f"No power: {power.trouble}.")
    return _deliver(args, {"table": 1, "reports": [r for _, r in reports]}, "\n".join(lines), reports)


def _deliver(args, report, text, reports):
    """Print and write what was asked for."""
    told = json.dumps(report, indent=1, ensure_ascii=False)
    print(told if args.json == "-" else text)
    if args.json not in (None, "-"):
        Path(args.json).expanduser().write_text(told + "\n", encoding="utf-8")
    if args.plot is not None:
        from mlx_cosyh3 import plot

        plot.bench(reports, args.plot)
    return 0


def _job(args, model, device=None):
    spoken = hasattr(model, "voices")
    options = {"seed": args.seed} | ({} if spoken else {"max_tokens": args.max_tokens})
    for name in ("voice", "voice_text", "recording"):
        if getattr(args, name) is not None and not spoken:
            raise CosyH3Error(f"--{name.replace('_', '-')} goes with models that speak: leave it out")
    if spoken:
        from mlx_cosyh3.speech_cli import find_voice

        options["voice"] = find_voice(model, args.voice, args.voice_text)  # raises, with the names there are
        options["note"] = _Notes()
    if args.recording is not None:
        model.need("speech_tokenizer")
    if device is not None:
        from mlx_cosyh3.runtime import Policy

        options["policy"] = Policy(device=device, on_battery="ignore", at_heat="ignore")
    source = None if args.recording is None else Path(args.recording).expanduser()
    return Job(args.text or (SENTENCE if spoken else PROMPT), options, args.runs, args.batch, source)


class _Notes:
    """Tells what a model notes once, not with each run."""

    def __init__(self):
        self._told = set()

    def __call__(self, text):
        if text not in self._told:
            self._told.add(text)
            print(f"note: {text}", file=sys.stderr)


def _check_output(args):
    """What cannot be written is told before the work."""
    if args.plot is not None:
        from mlx_cosyh3 import plot

        plot.check(args.plot)
    if args.json not in (None, "-"):
        path = Path(args.json).expanduser()
        if path.is_dir() or not path.parent.is_dir():
            why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise CosyH3Error(f"--json: cannot write {path}: {why}")


def _has_gpu():
    from mlx_cosyh3.kernels import _dispatch

    return _dispatch.on_gpu()


def _bar(total):
    from tqdm import tqdm

    return tqdm(total=total, unit="run", leave=False, disable=not sys.stderr.isatty())
