"""`bench`: what is measured (by a clock that stands still), the report's format, comparing, the table, the command."""

import itertools
import json
import math
import random

import mlx.core as mx
import numpy as np
import pytest
import soundfile

from mlx_cosyh3.bench import METRICS, MODES, Job, bench, measure, show, show_table, table_rows
from mlx_cosyh3.bench_compare import check, compare, number, rank_test, rarest, read
from mlx_cosyh3.cli import main
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.results import SpeechResult, TextResult
from tests.small_voice_model import small_voice, write_voice_model


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Model:
    """Takes the times it is told to: one (llm, flow, vocoder) for each run; its threads use half as much CPU."""

    config = {"model_type": "cosyvoice3", "dtype": {"llm": "float32"}}

    def __init__(self, times, spoken=True, tokens=(50,)):
        self.clock, self.cpu = Clock(), Clock()
        self.times, self.tokens = iter(times), itertools.cycle(tokens)
        self.spoken, self.asked = spoken, []

    def parameters(self):
        return {"weight": mx.zeros((10, 10))}

    def pass_(self, seconds):
        self.clock.now += seconds
        self.cpu.now += seconds / 2

    def generate(self, text, **options):
        self.asked.append((text, options))
        stages = next(self.times)
        self.pass_(sum(stages))
        return self.result(stages)

    def result(self, stages):
        tokens = [1] * next(self.tokens)
        if self.spoken:
            names = ("llm", "flow", "vocoder")
            return SpeechResult("stop", dict(zip(names, stages)), duration=2.0, tokens=tokens)
        prompt, generation, _ = stages
        return TextResult("stop", {"prompt": prompt, "generation": generation}, tokens=tokens, prompt_tokens=8,
                          prompt_tps=8 / prompt, generation_tps=49 / generation)  # fmt: skip

    def stream_generate(self, text, **options):
        return Pieces(self, text, options)

    def batch_generate(self, texts, **options):
        self.asked.append((tuple(texts), options))
        stages = next(self.times)
        self.pass_(sum(stages))
        return [self.result(stages) for _ in texts]


class Pieces:
    def __init__(self, model, text, options):
        self.model, self.text, self.options = model, text, options

    def __iter__(self):
        self.model.asked.append((self.text, self.options))
        stages = next(self.model.times)
        self.model.pass_(sum(stages) / 4)
        yield "first"
        self.model.pass_(3 * sum(stages) / 4)
        yield "second"
        self.result = self.model.result(stages)


def job(model, **changes):
    return Job("hello", {"seed": 1}, clock=model.clock, cpu_clock=model.cpu, **changes)


FIVE = [(2.0, 1.0, 1.0), (0.5, 0.25, 0.25), (0.5, 0.5, 0.25), (0.25, 0.25, 0.25), (0.5, 0.25, 0.25), (1.0, 0.25, 0.25)]


# ---------------------------------------------------------------- measuring


def test_speech_at_once():
    model, steps = Model(FIVE), []
    found = measure(model, "at_once", job(model), step=lambda: steps.append(1))
    m = found["metrics"]
    assert len(steps) == 6 and model.asked == [("hello", {"seed": 1})] * 6
    assert (found["runs"], found["made"], found["same_work"]) == (5, {"tokens": 50, "seconds": 2.0}, True)
    assert m["total"]["values"] == [1.0, 1.25, 0.75, 1.0, 1.5]
    assert (m["total"]["median"], m["total"]["min"], m["total"]["max"], m["total"]["spread"]) == (1.0, 0.75, 1.5, 0.75)
    assert (m["llm"]["median"], m["flow"]["median"], m["vocoder"]["max"]) == (0.5, 0.25, 0.25)
    assert (m["rtf"]["median"], m["tokens_per_s"]["median"], m["cpu"]["median"]) == (0.5, 100.0, 50.0)
    assert (m["first_run"]["median"], m["compile"]["median"]) == (4.0, 3.0)
    assert m["peak_memory"]["min"] >= 0 and "first_audio" not in m


def test_speech_streamed():
    model = Model(FIVE)
    m = measure(model, "streamed", job(model))["metrics"]
    assert m["first_audio"]["values"] == [0.25, 0.3125, 0.1875, 0.25, 0.375]
    assert m["total"]["median"] == 1.0 and m["llm"]["median"] == 0.5


def test_batch():
    model = Model(FIVE)
    found = measure(model, "batch", job(model, batch=3))
    assert model.asked[0][0] == ("hello",) * 3
    assert found["made"] == {"tokens": 150, "seconds": 6.0}
    m = found["metrics"]
    assert m["tokens_per_s"]["median"] == 150 and "llm" not in m
    assert m["rtf"]["median"] == pytest.approx(1 / 6)


def test_text():
    model = Model([(0.5, 0.5, 0.0)] * 3, spoken=False)
    m = measure(model, "streamed", job(model, runs=2))["metrics"]
    assert (m["first_text"]["median"], m["prompt"]["median"], m["generation"]["median"]) == (0.25, 0.5, 0.5)
    assert (m["prompt_per_s"]["median"], m["tokens_per_s"]["median"]) == (16, 98)
    assert not {"rtf", "first_audio", "llm"} & m.keys()


def test_a_faster_first_run_compiled_nothing():
    model = Model([(0.1, 0.1, 0.1)] + FIVE[1:])
    assert measure(model, "at_once", job(model))["metrics"]["compile"]["median"] == 0


def test_runs_that_differ_are_told():
    model = Model(FIVE, tokens=(50, 50, 51))
    report = bench("x", ["at_once"], lambda m: job(m), loader=lambda name: model, clock=model.clock)
    assert not report["modes"]["at_once"]["same_work"] and "did not all make the same tokens" in show(report)


def test_power_is_taken_from_run_to_run():
    class Power:
        marks = 0

        def mark(self):
            self.marks += 1
            return self.marks

        def since(self, mark):
            return 2.0 * mark

    model = Model(FIVE)
    assert measure(model, "at_once", job(model), power=Power())["metrics"]["power"]["values"] == [2, 4, 6, 8, 10]
    model, silent = Model(FIVE), Power()
    silent.since = lambda mark: None if mark == 2 else 1.0  # a run that was too short for a sample
    assert "power" not in measure(model, "at_once", job(model), power=silent)["metrics"]


@pytest.mark.parametrize("bad", [{"runs": 0}, {"runs": 1001}, {"runs": 2.5}, {"batch": 0}, {"batch": "4"}])
def test_bad_numbers(bad):
    (name,) = bad
    with pytest.raises(CosyH3Error, match=f"--{name} must be a whole number from 1"):
        Job("x", **bad)


# ---------------------------------------------------------------- the report


def report(times=FIVE, modes=("at_once", "streamed", "batch")):
    model = Model(list(times) * len(modes))

    def loader(name):
        model.pass_(0.5)
        return model

    return bench("a/model", modes, lambda m: job(m, runs=len(times) - 1), loader=loader, clock=model.clock)


def test_the_report_is_what_the_format_says():
    r = json.loads(json.dumps(report(), allow_nan=False))
    check(r)
    assert list(r["modes"]) == list(MODES[:3]) and r["bench"] == 1
    assert r["load"]["median"] == 0.5
    about = {"name": "model", "type": "cosyvoice3", "quantization": None, "dtype": {"llm": "float32"}, "bytes": 400}
    assert r["model"] == about
    assert r["settings"] == {"text": "hello", "batch": 4, "options": {"seed": 1}}
    assert r["versions"]["mlx"] == mx.__version__ and r["machine"]["device"]
    for found in r["modes"].values():
        assert set(found["metrics"]) <= set(METRICS)
        for name, m in found["metrics"].items():
            assert (m["unit"], m["better"]) == METRICS[name][:2]
            assert m["min"] <= m["median"] <= m["max"] and m["min"] in m["values"] and m["max"] in m["values"]


BREAK = [
    lambda r: r.pop("machine"), lambda r: r.update(bench=2), lambda r: r.update(modes=[]), lambda r: r.update(date=3),
    lambda r: r["modes"]["at_once"].pop("metrics"), lambda r: r["modes"]["at_once"].pop("made"),
    lambda r: r["modes"]["at_once"]["metrics"]["total"].pop("values"),
    lambda r: r["modes"]["at_once"]["metrics"]["total"].update(values=[]),
    lambda r: r["modes"]["at_once"]["metrics"]["total"].update(values=[1, "2"]),
    lambda r: r["modes"]["at_once"]["metrics"]["total"].update(median=math.nan),
    lambda r: r["modes"]["at_once"]["metrics"]["total"].update(median=True),
    lambda r: r["modes"]["at_once"]["metrics"]["total"].update(better="more"),
    lambda r: r["modes"]["at_once"]["metrics"].update(total=3), lambda r: r["modes"].update(at_once=3),
    lambda r: r.update(table=1),
]  # fmt: skip


@pytest.mark.parametrize("n", range(len(BREAK)))
def test_a_broken_report_is_refused(n, tmp_path):
    r = report()
    BREAK[n](r)
    (tmp_path / "a.json").write_text(json.dumps(r))
    with pytest.raises(CosyH3Error, match="a.json is no report of `mlx_cosyh3 bench --json`: "):
        read(tmp_path / "a.json")


@pytest.mark.parametrize("content", [b"", b"[1, 2", b"3", b"\xff\xfe", b"null"])
def test_no_report_at_all(content, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CosyH3Error, match="a.json is no report"):
        read(tmp_path / "a.json")


def test_what_is_shown():
    text = show(report())
    assert "model    model (cosyvoice3, 0.0 MB), loaded in 0.50 s" in text
    assert "streamed: 5 runs, each 50 tokens, 2.00 s of audio" in text
    (line,) = [x for x in text.splitlines() if x.startswith("  first_audio")]
    assert line.split() == ["first_audio", "0.25", "0.188", "0.375", "75", "%", "s"]
    assert max(map(len, text.splitlines())) < 121


@pytest.mark.parametrize("x, shown", [(0, "0"), (234.5, "234"), (12.34, "12.3"), (0.0123, "0.0123"), (1e-5, "1.0e-05")])
def test_numbers(x, shown):
    assert number(x) == shown


def test_table():
    rows = table_rows([("small on cpu", report())])
    assert [row[0] for row in rows] == ["small on cpu, at once", "small on cpu, streamed", "small on cpu, batch of 4"]
    assert [row[1] for row in rows] == [1.0, 1.0, 0.25] and [row[2] for row in rows] == [None, 0.25, None]
    assert [row[3] for row in rows] == [50, 50, 50] and rows[0][5] is None
    lines = show_table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1 and len(lines) == 5
    cells = [c.strip() for c in lines[3].split("|")[1:-1]]
    assert cells[:4] == ["small on cpu, streamed", "1", "0.25", "50"] and cells[5] == "-"


# ---------------------------------------------------------------- comparing


def scaled(factor, times=FIVE):
    return report([tuple(factor * x for x in stages) for stages in times])


def verdicts(a, b, mode="at_once"):
    return {name: m["verdict"] for name, m in compare(a, b)["modes"][mode].items()}


def test_half_the_time_is_better():
    found = compare(scaled(1), scaled(0.25))
    assert not found["notes"]
    m = found["modes"]["at_once"]["total"]
    assert (m["a"], m["b"], m["ratio"], m["verdict"]) == (1.0, 0.25, 0.25, "better")
    assert m["p"] == pytest.approx(2 / 252)
    v = verdicts(scaled(1), scaled(0.25))
    assert v["tokens_per_s"] == v["rtf"] == "better"  # one grew, the other shrank
    assert v["cpu"] == "same" and v["first_run"] == "-"
    v = verdicts(scaled(0.25), scaled(1))
    assert v["total"] == v["tokens_per_s"] == v["llm"] == "worse"


def test_a_difference_within_the_spread_is_none():
    assert verdicts(scaled(1), scaled(0.8))["total"] == "same"  # 0.75 .. 1.5 and 0.6 .. 1.2
    assert verdicts(scaled(1), scaled(1))["total"] == "same"
    assert verdicts(scaled(0), scaled(0))["total"] == "same"  # and no division by zero


def test_a_difference_that_is_too_small_to_matter_is_none():
    steady = [(1.0, 1.0, 1.0)] * 6
    assert verdicts(scaled(1, steady), scaled(1.005, steady))["total"] == "same"
    assert verdicts(scaled(1, steady), scaled(1.02, steady))["total"] == "worse"


def test_three_runs_are_too_few():
    assert rarest(3, 3) == pytest.approx(0.1) and rarest(4, 4) < 0.05
    assert verdicts(scaled(1, FIVE[:4]), scaled(0.1, FIVE[:4]))["total"] == "too few runs"
    assert verdicts(scaled(1, FIVE[:5]), scaled(0.1, FIVE[:5]))["total"] == "better"


def test_notes_say_what_differs():
    a, b = report(), report(modes=("at_once",))
    b["machine"] = a["machine"] | {"device": "Apple M4"}
    b["environment"] = a["environment"] | {"MLX_ENABLE_TF32": "other"}
    b["modes"]["at_once"]["made"] = {"tokens": 3, "seconds": 1.0}
    b["settings"] = a["settings"] | {"text": "other"}
    notes = "\n".join(compare(a, b)["notes"])
    for word in ("machine, device:", "environment, MLX_ENABLE_TF32:", "settings, text: hello in a, other in b",
                 "at_once: not the same work", "only in one of them: mode batch, streamed"):  # fmt: skip
        assert word in notes
    assert len(notes.splitlines()) == 5


def by_hand(a, b):
    """The same p by trying all ways to share out the runs."""
    every, n = a + b, len(a)

    def u(ours):
        theirs = [x for i, x in enumerate(every) if i not in ours]
        return sum((every[i] < y) + 0.5 * (every[i] == y) for i in ours for y in theirs)

    middle = n * len(b) / 2
    here = abs(u(range(n)) - middle)
    shares = list(itertools.combinations(range(len(every)), n))
    return sum(abs(u(s) - middle) >= here for s in shares) / len(shares)


def test_rank_test_against_all_rankings():
    rng = random.Random(3)
    for _ in range(60):
        n, m = rng.randint(1, 5), rng.randint(1, 5)
        a, b = ([rng.random() + shift for _ in range(k)] for k, shift in ((n, 0), (m, rng.random())))
        assert rank_test(a, b) == pytest.approx(min(1, by_hand(a, b)))


def test_rank_test_with_ties():
    assert rank_test([1.0] * 5, [1.0] * 5) == 1
    assert rank_test([1.0] * 5, [2.0] * 5) == pytest.approx(2 / 252)
    assert rank_test([1, 2, 3, 4], [4, 5, 6, 7]) >= rank_test([1, 2, 3, 3.9], [4, 5, 6, 7])


def test_rank_test_is_right_in_one_case_of_twenty():
    """Among runs that do not differ, 5 of 100 comparisons or fewer find a difference."""
    rng = random.Random(7)
    found = sum(rank_test(*([rng.gauss(1, 0.1) for _ in range(6)] for _ in "ab")) < 0.05 for _ in range(2000))
    assert 0 < found < 120


def test_compare_command(tmp_path, capsys):
    for name, factor in (("a", 1), ("b", 0.25)):
        (tmp_path / f"{name}.json").write_text(json.dumps(scaled(factor)))
    a, b, out = (str(tmp_path / f"{name}.json") for name in "abc")
    assert main(["bench", "compare", a, b, "--json", out]) == 0
    shown = capsys.readouterr().out
    (line,) = [x for x in shown.splitlines() if x.startswith("  first_audio")]
    assert line.split() == ["first_audio", "0.25", "0.0625", "0.250", "better"]
    assert json.loads((tmp_path / "c.json").read_text())["modes"]["at_once"]["total"]["verdict"] == "better"
    assert main(["bench", "compare", a, b, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []


def test_what_there_is_once_is_not_judged():
    found = compare(scaled(1), scaled(0.25))["modes"]["at_once"]
    assert found["first_run"]["verdict"] == found["compile"]["verdict"] == "-"
    assert found["first_run"]["ratio"] == pytest.approx(0.25)


def test_compare_draws(tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `plot`")
    for name, factor in (("a", 1), ("b", 0.25)):
        (tmp_path / f"{name}.json").write_text(json.dumps(scaled(factor)))
    a, b, out = (str(tmp_path / name) for name in ("a.json", "b.json", "c.png"))
    assert main(["bench", "compare", a, b, "--plot", out]) == 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", [["--table"], ["--voice", "x"], ["--text", "x"], ["--modes", "batch"]])
def test_compare_swallows_no_option(option, capsys):
    assert main(["bench", "compare", "a.json", "b.json", *option]) == 2
    assert f"leave {option[0]} out" in capsys.readouterr().err


@pytest.mark.parametrize("files, says", [((), "takes two files, not 0"), (("a.json",), "takes two files, not 1"),
                                         (("a.json", "no.json"), "cannot read no.json: No such file")])  # fmt: skip
def test_compare_command_errors(files, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps(report()))
    assert main(["bench", "compare", *files]) == 2
    assert says in capsys.readouterr().err


def test_nothing_in_common(tmp_path, capsys):
    for name, mode in (("a", "at_once"), ("b", "batch")):
        (tmp_path / f"{name}.json").write_text(json.dumps(report(modes=(mode,))))
    assert main(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert "have no mode in common" in capsys.readouterr().err


# ---------------------------------------------------------------- the command on real models


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    return write_voice_model(tmp_path_factory.mktemp("models") / "voice")


def test_bench_of_a_language_model(folder, tmp_path, capsys):
    file = tmp_path / "a.json"
    assert main(["bench", str(folder), "--runs", "2", "--max-tokens", "4", "--json", str(file)]) == 0
    r = read(file)
    assert list(r["modes"]) == ["at_once", "streamed"]
    assert r["modes"]["streamed"]["made"] == {"tokens": 4} and r["modes"]["streamed"]["same_work"]
    assert {"first_text", "prompt", "generation", "tokens_per_s"} <= r["modes"]["streamed"]["metrics"].keys()
    assert r["model"]["type"] == "h3" and r["model"]["bytes"] > 1000
    assert "small (h3" in capsys.readouterr().out


def test_bench_of_a_voice(speaker, tmp_path, capsys):
    assert main(["bench", str(speaker), "--runs", "2", "--text", "the cat", "--voice", "clara", "--json", "-"]) == 0
    r = json.loads(capsys.readouterr().out)
    check(r)
    for mode in ("at_once", "streamed"):
        m = r["modes"][mode]["metrics"]
        assert {"llm", "flow", "vocoder", "rtf", "tokens_per_s", "peak_memory", "first_run", "compile"} <= m.keys()
        assert m["llm"]["median"] + m["flow"]["median"] + m["vocoder"]["median"] <= 1.2 * m["total"]["max"]
    assert r["modes"]["streamed"]["metrics"]["first_audio"]["max"] <= r["modes"]["streamed"]["metrics"]["total"]["max"]
    assert r["settings"]["options"] == {"seed": 1, "voice": "clara"}


def test_notes_of_a_model_are_told_once(speaker, monkeypatch, capsys):
    """Not with each run."""
    from mlx_cosyh3.cosyvoice.model import CosyVoice

    at_once = CosyVoice.generate

    def generate(model, text, *, note, **options):
        note("cut off")
        return at_once(model, text, note=note, **options)

    monkeypatch.setattr(CosyVoice, "generate", generate)
    assert main(["bench", str(speaker), "--runs", "2", "--modes", "at_once", "--text", "the cat"]) == 0
    assert capsys.readouterr().err.count("note: cut off\n") == 1


def test_bench_of_a_conversion(speaker, tmp_path, capsys):
    """A recording in another voice, which is given as a file."""
    t = np.arange(24000) / 16000
    soundfile.write(tmp_path / "me.wav", 0.3 * np.sin(2 * np.pi * 150 * t) * np.sin(2 * np.pi * 3 * t), 16000)
    args = ["bench", str(speaker), "--runs", "1", "--modes", "vc", "--recording", str(tmp_path / "me.wav")]
    small_voice("mine").save(tmp_path / "mine.safetensors")
    assert main([*args, "--voice", str(tmp_path / "mine.safetensors"), "--json", "-"]) == 0
    r = json.loads(capsys.readouterr().out)
    check(r)
    m = r["modes"]["vc"]["metrics"]
    assert {"speech_tokenizer", "flow", "vocoder", "rtf"} <= m.keys() and "llm" not in m
    assert r["modes"]["vc"]["made"]["seconds"] == pytest.approx(1.5, abs=0.1)
    assert r["settings"]["options"] == {"seed": 1, "voice": "mine"}


def test_table_command(speaker, tmp_path, capsys):
    file = tmp_path / "t.json"
    assert main(["bench", "--table", str(speaker), str(speaker), "--runs", "1", "--batch", "2", "--text", "the cat",
                 "--modes", "at_once,batch", "--json", str(file)]) == 0  # fmt: skip
    shown = capsys.readouterr().out
    assert shown.count("| voice on ") == 4 * len(json.loads(file.read_text())["reports"]) // 2
    assert "batch of 2" in shown and "s per sentence" in shown and "No power: " in shown
    for r in json.loads(file.read_text())["reports"]:
        check(r)
    assert main(["bench", "compare", str(file), str(file)]) == 2
    assert "--table" in capsys.readouterr().err


def test_table_asks_for_each_device(folder, monkeypatch, capsys):
    """Where there is a GPU, for both; here the policies are what can be seen of it."""
    from mlx_cosyh3 import bench as module
    from mlx_cosyh3 import textgen

    asked = []
    monkeypatch.setattr(module, "_has_gpu", lambda: True)
    monkeypatch.setattr(textgen.TextOptions, "__post_init__", lambda self: asked.append(self.policy.device))
    assert main(["bench", "--table", str(folder), "--runs", "1", "--max-tokens", "2", "--modes", "at_once"]) == 0
    assert asked == ["gpu", "gpu", "cpu", "cpu"]
    shown = capsys.readouterr().out
    assert "| small on gpu, at once " in shown and "| small on cpu, at once " in shown


@pytest.mark.parametrize("args, says", [
    (["--modes", "atonce"], "there is no mode 'atonce', nearest known: 'at_once'"), (["--runs", "0"], "--runs must be"),
    (["no/such/model"], "no such model"), (["h3-tiny", "h3-tiny"], "one model at a time, not 2"),
    (["--voice", "x"], "--voice goes with models that speak"), (["--json", "/no/folder/a.json"], "there is no folder"),
    (["--modes", "vc"], "goes with --recording"), (["--recording", "no.wav"], "there is no recording no.wav"),
    (["cosyvoice3-tiny", "--modes", "vc", "--recording", __file__], "no speech tokenizer"),
    (["cosyvoice3-tiny", "--voice", "no.wav"], "there is no voice file or recording no.wav"),
    (["--recording", __file__], "--recording goes with models that speak"),
    (["--plot", "a.txt"], "a picture's name ends in"), (["cosyvoice3-tiny", "--voice", "nobody"], "no voice 'nobody'"),
])  # fmt: skip
def test_errors_of_the_command(args, says, capsys):
    assert main(["bench", *args]) == 2
    assert says in capsys.readouterr().err
