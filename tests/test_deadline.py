"""Deadlines: what stages cost, what is chosen, and how many deadlines are met on a machine that is slow and moody.

That machine is simulated, with a clock of its own: nothing here depends on how fast the tests run.
Run: python -m pytest -q -s tests/test_deadline.py     (-s shows the figures)
"""

import itertools
import json

import numpy as np
import pytest

from mlx_cosyh3 import (
    batch_generate,
    deadline,
    generate,
    load,
    runtime,
    stream_generate,
)
from mlx_cosyh3.deadline import (
    MARGIN,
    Costs,
    Line,
    Plan,
    Speech,
    SpeechController,
    TextController,
)
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.probes import Memory, Probes
from mlx_cosyh3.runtime import Policy
from tests.small_voice_model import small_voice, write_voice_model


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    for name in runtime.KNOBS:
        monkeypatch.delenv(f"MLX_COSYH3_{name.upper()}", raising=False)
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(tmp_path / "cache"))


def policy(gpu=True, **knobs):
    """A policy on a machine with a GPU, or without one, and nothing else to mind."""
    missing = None if gpu else "no GPU in this test"
    nothing = lambda: None  # noqa: E731
    probes = Probes(gpu=lambda: missing, memory=lambda: Memory(0), battery=nothing, heat=nothing)
    return Policy(probes=probes, **knobs)


# ---------------------------------------------------------------- costs


def test_a_line_is_found_in_spite_of_outliers():
    sizes = np.arange(10, 210, 10)
    samples = [(x, 0.1 + 0.002 * x) for x in sizes]
    samples[3] = (40, 9.0)  # the machine was asleep
    samples[11] = (120, 5.0)
    line = Line.through(samples)
    assert (line.overhead, line.rate) == (pytest.approx(0.1, rel=0.02), pytest.approx(0.002, rel=0.02))
    assert line.spread == pytest.approx(1, abs=0.02)


def test_one_size_says_nothing_of_an_overhead():
    line = Line.through([(100, 1.0), (100, 1.01), (101, 1.0)])
    assert line.overhead == 0 and line.at(50) == pytest.approx(0.5, rel=0.02)


def test_what_was_measured_while_others_ran_is_no_jitter():
    calm = [(10, 1.0)] * 4 + [(10, 1.2)] * 4
    line = Line.through(calm)
    assert (line.at(10), line.spread) == (pytest.approx(1), pytest.approx(1.2))
    busy = Line.through(calm + [(10, 4.0)] * 7)
    assert (busy.at(10), busy.spread) == (pytest.approx(1), pytest.approx(1.2))


def test_costs_need_some_measurements_and_forget_the_oldest():
    costs = Costs()
    for n in range(1, deadline.ENOUGH + 1):
        assert costs.expect("flow", "gpu", 100) is None
        costs.add("flow", "gpu", 100 * n, n)
    assert costs.expect("flow", "gpu", 100) == pytest.approx(1 * MARGIN)
    assert costs.expect("flow", "cpu", 100) is None and costs.expect("vocoder", "gpu", 100) is None
    for size, seconds in ((0, 1), (-1, 1), (5, float("nan")), (5, float("inf")), (5, -1)):
        costs.add("flow", "gpu", size, seconds)  # nothing that could be measured
    assert costs.expect("flow", "gpu", 100) == pytest.approx(1 * MARGIN)
    for n in range(deadline.KEPT):
        costs.add("flow", "gpu", 100 + n, 10 * (100 + n))
    assert costs.expect("flow", "gpu", 100) == pytest.approx(1000 * MARGIN, rel=0.01)


def test_a_stage_slower_than_its_history_tells_of_a_load():
    now = [0.0]
    costs = Costs(clock=lambda: now[0])
    for _ in range(20):
        costs.add("flow", "gpu", 100, 1.0)
    assert costs.load("gpu") == 1
    for _ in range(4):
        costs.add("flow", "gpu", 100, 4.0)
    assert costs.load("gpu") == pytest.approx(4) and costs.load("cpu") == 1
    assert costs.expect("flow", "gpu", 200) == pytest.approx(2 * 4 * MARGIN)
    now[0] += deadline.FRESH + 1  # long ago
    assert costs.load("gpu") == 1 and costs.expect("flow", "gpu", 200) < 4


def test_costs_are_kept_in_a_file(tmp_path):
    now = [0.0]
    path = tmp_path / "costs" / "a.json"
    costs = Costs(path, clock=lambda: now[0])
    costs.save(now=True)
    assert not path.exists()  # there is nothing to keep
    for n in (1, 2, 3):
        costs.add("flow", "gpu", 100 * n, n)
    costs.save()
    costs.add("flow", "gpu", 400, 4)
    costs.save()  # too soon
    assert len(json.loads(path.read_text())["stages"]["gpu/flow"]) == 3
    now[0] += deadline.SAVE_EVERY
    costs.save()
    assert Costs(path).expect("flow", "gpu", 250) == pytest.approx(2.5 * MARGIN)
    assert len(json.loads(path.read_text())["stages"]["gpu/flow"]) == 4


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99, "stages": {}}', '{"format": 1}', "\x00\xff",
                                  '{"format": 1, "stages": {"gpu/flow": [[1, 2], [3]]}}',
                                  '{"format": 1, "stages": {"gpuflow": [[1, 2]]}}',
                                  '{"format": 1, "stages": {"gpu/flow": 3}}'])  # fmt: skip
def test_a_bad_file_counts_for_nothing(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text, encoding="latin-1")
    costs = Costs(path)
    assert costs.expect("flow", "gpu", 1) is None
    for n in (1, 2, 3):
        costs.add("flow", "gpu", n, n)
    costs.save(now=True)
    assert Costs(path).expect("flow", "gpu", 2) == pytest.approx(2 * MARGIN)


def test_nowhere_to_write_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    costs = Costs(tmp_path / "file" / "costs.json")
    costs.add("flow", "gpu", 1, 1)
    costs.save(now=True)


# ---------------------------------------------------------------- what is chosen

# Seconds: a stage's overhead, and what each unit takes
MACHINE = {
    "gpu": {"prefill": (0.01, 1e-4), "llm": (0, 0.008), "flow": (0.008, 4e-5), "flow_chunk": (0.008, 4e-5),
            "vocoder": (0.02, 2e-4), "probe": (0.001, 0)},
    "cpu": {"prefill": (0.02, 1e-3), "llm": (0, 0.020), "flow": (0.030, 3e-4), "flow_chunk": (0.030, 3e-4),
            "vocoder": (0.03, 8e-4), "probe": (0.002, 0)},
}  # fmt: skip


def known(devices=("gpu", "cpu"), clock=None):
    """Costs of a machine like MACHINE."""
    costs = Costs(clock=clock or (lambda: 0.0))
    for device in devices:
        for stage, (overhead, rate) in MACHINE[device].items():
            for size in (10, 50, 100, 200, 400) * 8:
                costs.add(stage, device, size, overhead + rate * size)
    for ids in (5, 10, 20):
        costs.add("tokens", "text", ids, 6 * ids)
    return costs


def job(tokens=120, chunks=None, steps=10, **changes):
    return Speech(**{"prefix": 60, "tokens": tokens, "segments": 1, "prompt_frames": 100, "frames_per_token": 2,
                     "steps": steps, "chunks": chunks} | changes)  # fmt: skip


def controller(seconds, late="refuse", costs=None, p=None, busy=1.0, clock=lambda: 0.0):
    """busy   how many times slower than usual the GPU is"""
    probe = lambda device: MACHINE[device]["probe"][0] * (busy if device == "gpu" else 1)  # noqa: E731
    return SpeechController(costs or known(), (p or policy()).request(clock=clock), seconds, late, probe)


CHUNKS = [(25, 28), (12, 15), (6, 9)]


def test_with_time_enough_all_is_as_asked():
    control = controller(60)
    plan = control.begin(job(chunks=CHUNKS))
    assert (plan.steps, plan.chunk) == (10, 25)
    assert all(d["device"] == "gpu" for d in control.request.decisions if "device" in d)
    assert "in time" in control.request.decisions[-1]["reason"]
    assert controller(None).begin(job(chunks=CHUNKS)) == Plan(10, 25)


def test_quality_is_given_up_last():
    """As the time gets shorter: first smaller chunks at full quality, then fewer steps; the least of all at the end."""
    plans = [controller(s, "best").begin(job(chunks=CHUNKS)) for s in np.arange(1.0, 0.1, -0.04)]
    chosen = [key for key, _ in itertools.groupby((p.steps, p.chunk) for p in plans)]
    assert chosen[:3] == [(10, 25), (10, 12), (10, 6)]
    assert chosen[-1] == (deadline.LEAST_STEPS, 6)
    assert [steps for steps, _ in chosen] == sorted((steps for steps, _ in chosen), reverse=True)


def test_a_busy_gpu_is_left_for_the_cpu_before_quality_is():
    control = controller(4.8, busy=12)
    plan = control.begin(job())
    assert plan.steps == 10 and "cpu" in plan.devices.values()
    moved = [d for d in control.request.decisions if d.get("device") == "cpu"]
    assert moved and all(d["reason"].startswith("deadline: ") for d in moved)
    bound = controller(4.8, "best", busy=12, p=policy(device="gpu"))
    assert set(bound.begin(job()).devices.values()) == {"gpu"}  # the user has said so


def test_a_load_that_has_gone_is_noticed_by_the_probe():
    costs = known()
    for _ in range(6):
        costs.add("llm", "gpu", 100, 5 * 0.8)
    assert costs.load("gpu") == pytest.approx(5)
    assert set(controller(3, costs=costs, busy=1).begin(job()).devices.values()) == {"gpu"}
    assert costs.load("gpu") < 1.5


def test_what_cannot_be_is_told_before_the_work():
    with pytest.raises(CosyH3Error) as e:
        controller(0.05).begin(job(chunks=CHUNKS))
    assert "deadline=0.05 cannot be met: the first audio takes about 0." in str(e.value)
    assert "late='best'" in str(e.value) and "\n" not in str(e.value)
    with pytest.raises(CosyH3Error, match="the whole answer takes about .* or less text"):
        controller(0.3).begin(job())
    with pytest.raises(CosyH3Error, match=r"\(now: gpu 5.0 times slower than usual\)"):
        controller(0.3, busy=5, p=policy(device="gpu")).begin(job())
    plan = controller(0.05, "best").begin(job(chunks=CHUNKS))
    assert (plan.steps, plan.chunk) == (deadline.LEAST_STEPS, 6)


def test_fewer_steps_than_the_least_are_only_taken_if_asked_for():
    assert controller(0.05, "best").begin(job(steps=2)).steps == 2


def test_nothing_known_nothing_promised():
    control = controller(0.001, costs=Costs())
    assert control.begin(job(chunks=CHUNKS)) == Plan(10, 25)
    assert "no times" in control.request.decisions[-1]["reason"]
    assert control.steps(100) == 10 and not control.enough(50)
    control = controller(60, costs=known(("gpu",)))  # the CPU was never used: nobody is sent there
    assert set(control.begin(job()).devices.values()) == {"gpu"}
    assert controller(60).begin(job(tokens=None)) == Plan(10)  # how long it will be is not known


def test_steps_follow_from_what_is_left():
    now = [0.0]
    control = controller(3.0, clock=lambda: now[0])
    control.begin(job())
    taken = []
    for now[0] in (0.5, 2.3, 2.6, 2.7, 2.9, 5.0):
        taken.append(control.steps(120))
    assert taken[0] == 10 and taken[-1] == deadline.LEAST_STEPS and taken == sorted(taken, reverse=True)
    assert len(set(taken)) > 2
    assert "late" in control.request.decisions[-1]["reason"]


def test_the_best_so_far_leaves_time_for_its_sound():
    now = [0.0]
    control = controller(2.0, "best", clock=lambda: now[0])
    control.begin(job(tokens=400))
    n = 0
    while not control.enough(n):
        n += 1
        now[0] += 0.008
    assert 50 < n < 400
    now[0] += sum(control.steps(n) * (0.008 + 4e-5 * (100 + 2 * n)) for _ in range(1)) + 0.02 + 2e-4 * 2 * n
    assert now[0] <= 2.0
    refusing = controller(2.0, clock=lambda: 99.0)
    refusing.job = job(tokens=400)
    assert not refusing.enough(n)  # what was begun is spoken to its end


def test_text():
    costs = Costs()
    for device, slow in (("gpu", 1), ("cpu", 3)):
        for n in (10, 20, 40):
            costs.add("prompt", device, n, slow * 0.001 * n)
            costs.add("text", device, n, slow * 0.01 * n)

    def control(seconds, late="refuse"):
        return TextController(costs, policy().request(clock=lambda: 0.0), seconds, late, lambda device: 0.001)

    control(1.2).begin(20, 100, False)
    with pytest.raises(CosyH3Error, match="a text of max_tokens=100 takes about 1"):
        control(0.5).begin(20, 100, False)
    control(0.5).begin(20, 100, True)  # the first token alone
    with pytest.raises(CosyH3Error, match="the first token takes about 0.02"):
        control(0.01).begin(20, 100, True)
    c = control(0.5, "best")
    c.begin(20, 100, False)
    assert c.enough(0.6) and not c.enough(0.4)


def test_options_are_checked():
    for seconds in (0, -1, "2", float("inf"), float("nan"), True):
        with pytest.raises(CosyH3Error, match="deadline must be more than 0 seconds"):
            deadline.check(seconds, "refuse")
    with pytest.raises(CosyH3Error, match="late must be one of refuse, best, not 'bst', nearest known: 'best'"):
        deadline.check(1, "bst")


# ---------------------------------------------------------------- a slow and moody machine


class Simulated:
    """MACHINE with jitter, hiccups, and another program that takes the GPU for a while, again and again."""

    def __init__(self, seed):
        self.now, self._rng = 0.0, np.random.default_rng(seed)
        self._busy, self._until = 1.0, 0.0

    def clock(self):
        return self.now

    def work(self, stage, device, size, times=1):
        """Seconds that it takes; the clock moves on."""
        overhead, rate = MACHINE[device][stage]
        begin = self.now
        for _ in range(times):
            while self.now >= self._until:
                self._busy = 1.0 if self._busy > 1 else self._rng.uniform(2.5, 5)
                self._until += self._rng.uniform(15, 60)
            jitter = self._rng.lognormal(0, 0.12) * (3 if self._rng.random() < 0.01 else 1)
            self.now += (overhead + rate * size) * jitter * (self._busy if device == "gpu" else 1)
        return self.now - begin

    def pause(self):
        self.now += self._rng.exponential(2.0)


def utterances(seed, n):
    """[(text ids, speech tokens)]"""
    rng = np.random.default_rng(seed)
    return [(ids, max(5, int(ids * rng.normal(6, 0.6)))) for ids in rng.integers(5, 25, n).tolist()]


def speak(machine, control, text_ids, tokens, chunks):
    """One request, as utterance.py goes about it -> (seconds until what was due, steps, share that was spoken)."""
    request = control.request
    plan = control.begin(job(control.expected_tokens(text_ids), chunks, prefix=40 + text_ids))
    request.begin = machine.now
    device = request.device
    control.first_token(40 + text_ids, machine.work("prefill", device("llm"), 40 + text_ids))
    wanted = tokens if chunks is None else min(tokens, dict(chunks)[plan.chunk])
    made = seconds = 0
    while made < wanted and not control.enough(made):
        seconds += machine.work("llm", device("llm"), 1)
        made += 1
    control.tokens_made(made, seconds)
    steps = control.steps(made, streamed=chunks is not None)
    frames, flow = 2 * made, "flow" if chunks is None else "flow_chunk"
    control.mel_made(100 + frames, steps, machine.work(flow, device("flow"), 100 + frames, steps), chunks is not None)
    control.audio_made(frames, machine.work("vocoder", device("vocoder"), frames))
    took = machine.now - request.begin
    if chunks is None and made == tokens:
        control.text_spoken(text_ids, tokens)
    control.ended(took)
    return took, steps, made / wanted


def campaign(seconds, late, chunks, seed, n=200):
    """Requests one after the other -> (share in time, mean steps, share of whole answers, how many were refused)."""
    machine, p = Simulated(seed), policy()
    costs = known(clock=machine.clock)  # as a calm machine has left them
    met, steps, whole, refused = [], [], [], 0
    for text_ids, tokens in utterances(seed, n):
        request = p.request(clock=machine.clock)
        probe = lambda device: machine.work("probe", device, 1)  # noqa: E731
        control = SpeechController(costs, request, seconds if late else None, late or "refuse", probe)
        try:
            took, s, share = speak(machine, control, text_ids, tokens, chunks)
        except CosyH3Error as e:
            assert "cannot be met" in str(e)
            refused += 1
        else:
            met.append(took <= seconds)
            steps.append(s)
            whole.append(share == 1)
        machine.pause()
    return np.mean(met), np.mean(steps), np.mean(whole), refused


@pytest.mark.parametrize("what, seconds, chunks", [("first audio", 0.85, CHUNKS), ("whole answer", 3.0, None)])
def test_deadlines_met_with_and_without_the_controller(what, seconds, chunks):
    """200 requests on each of two machines. The figures are the same each time."""
    rows = {late: np.mean([campaign(seconds, late, chunks, seed) for seed in (1, 2)], axis=0)
            for late in (None, "refuse", "best")}  # fmt: skip
    print(f"\n{what} within {seconds:g} s: met, mean steps, whole answers, refused of 200")
    for late, (met, steps, whole, refused) in rows.items():
        print(
            f"  {'no controller' if late is None else f'late={late!r}':16}"
            f" {met:6.1%} {steps:6.2f} {whole:7.1%} {refused:6.1f}"
        )
    without, refusing, best = rows[None], rows["refuse"], rows["best"]
    assert without[0] < 0.8
    assert refusing[0] > 0.94 and best[0] > 0.94  # of those that were begun
    assert refusing[3] < (1 - without[0]) * 200  # no more than would have been late
    assert min(refusing[1], best[1]) > 8.5 and best[2] > without[0]  # little quality is given up, little is left out


def test_on_a_calm_machine_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(
        Simulated, "work", lambda self, stage, device, size, times=1: _calm(self, stage, device, size, times)
    )
    met, steps, whole, refused = campaign(4.0, "refuse", None, 5, 100)
    assert (met, steps, whole, refused) == (1, 10, 1, 0)


def _calm(machine, stage, device, size, times):
    overhead, rate = MACHINE[device][stage]
    machine.now += times * (overhead + rate * size)
    return times * (overhead + rate * size)


# ---------------------------------------------------------------- models, on this machine

TEXT = "Hello there."


@pytest.fixture(scope="module")
def voice_model(tmp_path_factory):
    return load(write_voice_model(tmp_path_factory.mktemp("models") / "voice"))


def spoken(model, p, **options):
    return generate(model, TEXT, voice=small_voice(), seed=1, policy=p, **options)


def costly(p, model, stages, seconds):
    """Let `model` be known to take `seconds` for each of `stages`."""
    costs = deadline.costs_of(p, model)
    for stage in stages:
        for size in (1, 10, 100):
            costs.add(stage, "text" if stage == "tokens" else "cpu", size, seconds if stage != "tokens" else 2.0 * size)


SPEECH_STAGES = ("prefill", "llm", "flow", "flow_chunk", "vocoder", "tokens")


def test_time_enough_changes_nothing(voice_model):
    want, p = spoken(voice_model, None), policy(gpu=False)
    for _ in range(4):
        got = spoken(voice_model, p, deadline=600)
        np.testing.assert_array_equal(got.audio, want.audio)
        assert got.finish_reason == "stop" and got.decisions[-1]["met"] is True
    stream = stream_generate(voice_model, TEXT, voice=small_voice(), seed=1, policy=p, deadline=600)
    assert len(np.concatenate(list(stream))) == len(want.audio) and stream.result.decisions[-1]["met"] is True


def test_costs_of_a_model_are_kept_for_the_next_process(voice_model, model, tmp_path):
    p = policy(gpu=False)
    for _ in range(3):
        spoken(voice_model, p, deadline=600)
        generate(model, "the cat", max_tokens=5, seed=1, policy=p, deadline=600)
    files = list((tmp_path / "cache" / "costs").iterdir())
    assert len(files) == 2 and len({f.name for f in files}) == 2
    later = policy(gpu=False)
    for m, stages in ((voice_model, SPEECH_STAGES[:3]), (model, ("prompt", "text"))):
        assert all(deadline.costs_of(later, m).known(stage, "cpu") for stage in stages)
    assert deadline.costs_of(later, voice_model).known("tokens", "text")


@pytest.mark.parametrize("way", [generate, stream_generate])
def test_speech_that_cannot_be_in_time_is_refused_before_the_work(voice_model, monkeypatch, way):
    p = policy(gpu=False)
    costly(p, voice_model, SPEECH_STAGES, 7.0)
    monkeypatch.setattr(type(voice_model.llm), "generate", None)  # would be an error if it were asked
    with pytest.raises(CosyH3Error, match="deadline=2 cannot be met: the .* takes about [0-9]+ s here"):
        way(voice_model, TEXT, voice=small_voice(), seed=1, policy=p, deadline=2)


def test_the_best_that_can_be_said_in_time(voice_model):
    p, notes = policy(gpu=False), []
    costly(p, voice_model, SPEECH_STAGES, 7.0)
    result = spoken(voice_model, p, deadline=2, late="best", note=notes.append)
    assert result.finish_reason == "length" and len(result.tokens) == 1 and len(result.audio) == 960
    assert notes == ["the speech was cut off, so that deadline=2 can be met"]
    assert [d["steps"] for d in result.decisions if d["stage"] == "flow" and "steps" in d] == [deadline.LEAST_STEPS]


def test_a_late_stream_begins_as_soon_as_it_can_and_is_whole(voice_model):
    p = policy(gpu=False)
    costly(p, voice_model, SPEECH_STAGES, 7.0)
    whole = stream_generate(voice_model, TEXT, voice=small_voice(), seed=1)
    first = len(next(whole))
    rest = list(whole)
    stream = stream_generate(voice_model, TEXT, voice=small_voice(), seed=1, policy=p, deadline=2, late="best")
    pieces = list(stream)
    assert len(pieces[0]) < first or not rest
    assert sum(map(len, pieces)) == len(whole.result.audio) and stream.result.finish_reason == "stop"
    assert stream.result.tokens == whole.result.tokens
    planned = [d for d in stream.result.decisions if d["stage"] == "deadline"][0]
    assert planned["steps"] == deadline.LEAST_STEPS and "late even so" in planned["reason"]


def test_several_segments(voice_model):
    text = "The first sentence is here, and it is quite long for a sentence, as such sentences go. " * 4
    want = generate(voice_model, text, voice="anna", seed=1, max_seconds=6, note=lambda t: None)
    got = generate(voice_model, text, voice="anna", seed=1, max_seconds=6, note=lambda t: None, deadline=600)
    assert len(want.segments) > 1 and got.segments == want.segments and len(got.audio) == len(want.audio)
    np.testing.assert_allclose(got.audio, want.audio, atol=1e-3)  # together or one by one


def test_a_batch_has_none(voice_model):
    for texts, options in (([TEXT, TEXT], {"deadline": 9}), ([TEXT, {"text": TEXT, "deadline": 9}], {})):
        with pytest.raises(CosyH3Error, match="deadline goes with one text, not with a batch"):
            batch_generate(voice_model, texts, **options)


def test_a_conversion_has_a_deadline_too(voice_model):
    p = policy(gpu=False)
    t = np.arange(4 * 16000) / 16000
    tone = (0.3 * np.sin(2 * np.pi * 220 * t) * (1 + np.sin(9 * t))).astype(np.float32)
    ask = lambda **options: voice_model.convert_voice(  # noqa: E731
        (tone, 16000), small_voice(), seed=1, policy=p, note=lambda text: None, **options
    )
    assert ask(deadline=600).decisions[-1]["met"] is True
    costly(p, voice_model, ("speech_tokenizer", "flow", "vocoder"), 7.0)
    with pytest.raises(CosyH3Error, match="deadline=2 cannot be met"):
        ask(deadline=2)
    assert len(ask(deadline=2, late="best").audio) > 0


def test_text_that_cannot_be_in_time(model):
    p = policy(gpu=False)
    costly(p, model, ("prompt", "text"), 7.0)
    options = {"max_tokens": 20, "seed": 1, "policy": p}
    with pytest.raises(CosyH3Error, match="deadline=3 cannot be met: a text of max_tokens=20 takes about 1[0-9] s"):
        generate(model, "the cat", deadline=3, **options)
    with pytest.raises(CosyH3Error, match="the first token takes about"):
        stream_generate(model, "the cat", deadline=3, **options)
    want = generate(model, "the cat", **options)
    stream = stream_generate(model, "the cat", deadline=3, late="best", **options)
    assert "".join(stream) == want.text  # late, and whole
    part = generate(model, "the cat", deadline=1e-6, late="best", **options)
    assert part.finish_reason == "length" and part.tokens == want.tokens[:1]
    assert generate(model, "the cat", deadline=600, **options).text == want.text


@pytest.mark.parametrize(
    "options, words", [({"deadline": 0}, "deadline must be more than 0"), ({"late": "no"}, "late must be")]
)
def test_options_of_both_families(voice_model, model, options, words):
    for m, way in itertools.product((voice_model, model), (generate, stream_generate)):
        with pytest.raises(CosyH3Error, match=words):
            way(m, "the cat", **options)
