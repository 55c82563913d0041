"""Deadlines: what is chosen, and how many are met on a machine that is slow and moody.

That machine is simulated, with a clock of its own: nothing here depends on how fast the tests run.
Run: python -m pytest -q -s tests/test_deadline.py     (-s shows the figures)
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from mlx_cosyh3 import deadline
from mlx_cosyh3.costs import Costs
from mlx_cosyh3.deadline import Plan, Speech, SpeechController, TextController
from mlx_cosyh3.errors import CosyH3Error
from tests.policies import alone, policy  # noqa: F401 - `alone` is a fixture

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
        controller(1, busy=5, p=policy(device="gpu")).begin(job())
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


class Recorded(Simulated):
    """MACHINE, its GPU as busy as an H200 was while other programs multiplied matrices on it in spells.

    tests/golden/gpu_load.json is what benchmarks/deadline.py wrote there: (seconds, stage, times slower than calm). It
    takes STRETCH times as long here, since MACHINE is so much slower, and begins anew when it is over."""

    STRETCH = 6
    NAMES = {"flow_chunk": "flow", "probe": "llm"}

    def __init__(self, seed):
        super().__init__(seed)
        rows = json.loads((Path(__file__).parent / "golden" / "gpu_load.json").read_text())
        self._times = {s: np.array([(t, x) for t, name, x in rows if name == s]).T for s in {r[1] for r in rows}}
        self._length = max(t for t, *_ in rows)
        self.now = self._rng.uniform(0, 200.0)

    def work(self, stage, device, size, times=1):
        overhead, rate = MACHINE[device][stage]
        begin = self.now
        for _ in range(times):
            slower = 1.0
            if device == "gpu":
                when, factors = self._times[self.NAMES.get(stage, stage)]
                slower = factors[np.abs(when - self.now / self.STRETCH % self._length).argmin()]
            self.now += (overhead + rate * size) * slower
        return self.now - begin


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


def campaign(seconds, late, chunks, seed, n=200, machine=Simulated):
    """Requests one after the other -> (share in time, mean steps, share of whole answers, how many were refused)."""
    machine, p = machine(seed), policy()
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


@pytest.mark.parametrize("machine", [Simulated, Recorded])
@pytest.mark.parametrize("what, seconds, chunks", [("first audio", 0.85, CHUNKS), ("whole answer", 3.0, None)])
def test_deadlines_met_with_and_without_the_controller(what, seconds, chunks, machine):
    """200 requests on each of two machines. The figures are the same each time."""
    rows = {late: np.mean([campaign(seconds, late, chunks, seed, machine=machine) for seed in (1, 2)], axis=0)
            for late in (None, "refuse", "best")}  # fmt: skip
    print(f"\n{machine.__name__}: {what} within {seconds:g} s: met, mean steps, whole answers, refused of 200")
    for late, (met, steps, whole, refused) in rows.items():
        print(
            f"  {'no controller' if late is None else f'late={late!r}':16}"
            f" {met:6.1%} {steps:6.2f} {whole:7.1%} {refused:6.1f}"
        )
    without, refusing, best = rows[None], rows["refuse"], rows["best"]
    assert without[0] < 0.85
    assert refusing[0] > 0.93 and best[0] > 0.93  # of those that were begun
    assert refusing[3] < 1.25 * (1 - without[0]) * 200  # no more than would have been late
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
