"""What happens when a stage fails, and the gate that lets one device in at a time.

Run: python -m pytest -q tests/test_runtime_failures.py
"""

import logging
import threading
import types

import mlx.core as mx
import pytest

from mlx_cosyh3 import logs, runtime
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.gate import GATE, Gate
from mlx_cosyh3.probes import Battery
from mlx_cosyh3.runtime import Restartable
from tests.policies import GPU_ERROR, NAN, alone, policy, probes  # noqa: F401 - `alone` is a fixture

# ---------------------------------------------------------------- a stage that fails


def fails(error, times=1):
    """A function that fails so often on the GPU, then says where it ran."""
    left = [times]

    def function():
        if GATE.here == "gpu" and left[0]:
            left[0] -= 1
            raise error
        return GATE.here

    return function


@pytest.mark.parametrize("error, words", [(GPU_ERROR, "Command buffer execution failed"), (NAN, "was not finite"),
                                          (MemoryError("no room"), "no room")])  # fmt: skip
def test_a_failed_stage_runs_again_on_the_cpu(error, words, caplog):
    logs.setup("")  # the first line of a process would do this, and forget the level below
    request = policy().request()
    with caplog.at_level(logging.INFO, logger="mlx_cosyh3"):
        assert request.guard("flow", fails(error)) == "cpu"
    assert [(d["stage"], d["device"]) for d in request.decisions] == [("flow", "gpu"), ("flow", "cpu")]
    assert words in request.decisions[1]["reason"] and "run again on the CPU" in request.decisions[1]["reason"]
    assert [r.facts["device"] for r in caplog.records if r.message == "decision"] == ["gpu", "cpu"]
    assert request.guard("flow", lambda: GATE.here) == "cpu"  # it stays there
    assert request.guard("vocoder", lambda: GATE.here) == "gpu"  # others do not
    assert GATE.here is None


def test_once_and_not_more():
    with pytest.raises(CosyH3Error, match="not finite"):
        policy().request().guard("flow", lambda: fails(NAN)() and (_ for _ in ()).throw(NAN))
    with pytest.raises(RuntimeError, match="Command buffer"):
        policy(retry_on_cpu=False).request().guard("flow", fails(GPU_ERROR))
    with pytest.raises(RuntimeError, match="Command buffer"):

        def always():
            raise GPU_ERROR

        policy(device="cpu").request().guard("flow", always)


@pytest.mark.parametrize(
    "error",
    [
        CosyH3Error("steps must be a whole number"),
        CosyH3Error("me.wav holds 3 samples that are not finite numbers (NaN or infinity): export it again"),
        TypeError("x"), KeyError("x"), ValueError("x"),
    ],
)
def test_other_errors_are_not_the_gpus(error):
    request = policy().request()
    with pytest.raises(type(error)):
        request.guard("flow", fails(error))
    assert [d["device"] for d in request.decisions] == ["gpu"]


def test_errors_of_the_callers_code_are_theirs():
    request, called = policy().request(), []

    def progress():
        called.append(GATE.here)
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        request.guard("flow", lambda: request.theirs(progress))
    assert called == [None]  # once, and not through the gate


def test_a_kernel_that_fails_its_self_test(monkeypatch):
    outcomes = []
    monkeypatch.setattr(runtime._trust, "outcomes", lambda: list(outcomes))

    def flow():
        if GATE.here == "gpu":
            outcomes.append(types.SimpleNamespace(kernel="softmax_rows", passed=False))
        return GATE.here

    request = policy().request()
    assert request.guard("flow", flow) == "cpu"
    assert "kernel softmax_rows failed its self-test" in request.decisions[-1]["reason"]
    assert policy().request().guard("flow", lambda: GATE.here) == "gpu"  # known by now


def test_a_gpu_that_is_gone_is_not_asked_again(monkeypatch):
    monkeypatch.setattr(runtime._trust, "_gpu_answers", lambda: False)
    p = policy()
    assert p.request().guard("flow", fails(GPU_ERROR)) == "cpu"
    assert p.decide("llm").device == "cpu" and "does not answer" in p.decide("llm").reason
    assert policy().decide("llm").device == "gpu"


class Sum:
    """A stream with a state: the sum of all it was given."""

    made = 0

    def __init__(self, bad=()):
        Sum.made += 1
        self.total, self._bad = mx.array(0.0), list(bad)

    def add(self, x):
        self.total = self.total + x
        if GATE.here == "gpu" and x in self._bad:
            self.total = self.total * float("nan")
            raise NAN
        return self.total * 1


def test_a_stream_goes_on_from_its_last_good_state():
    Sum.made, request = 0, policy().request()
    stream = Restartable(request, "flow", lambda: Sum(bad=[3, 4]))
    assert [stream.add(x).item() for x in (1, 2, 3, 4, 5)] == [1, 3, 6, 10, 15]
    assert Sum.made == 2 and [d["device"] for d in request.decisions] == ["gpu", "cpu"]


def test_rest(monkeypatch):
    slept = []
    monkeypatch.setattr(runtime.time, "sleep", slept.append)
    request = policy(probes=probes(battery=Battery(False)), rest=2).request()
    request.breathe("llm", 0.1)
    assert slept == [0.2] and request.decisions[0]["rest"] == 2
    policy().request().breathe("llm", 0.1)
    assert slept == [0.2]


# ---------------------------------------------------------------- the gate


def test_the_gate_lets_one_device_in_at_a_time():
    """Threads for both devices: within, the default device is always the thread's own; in the end it is what it was."""
    device = [mx.gpu]
    gate = Gate(lambda d: device.__setitem__(0, d), lambda: device[0], available=lambda: True)
    wrong, entered = [], []

    def work(name, own):
        for n in range(200):
            with gate.on(name):
                entered.append(name)
                for _ in range(3):
                    wrong.extend([name] * (device[0] != own))
                    gate.hand_over()
                if n % 10 == 0:
                    with gate.on("cpu"):
                        wrong.extend(["inner"] * (device[0] != mx.cpu))
                with gate.out():
                    wrong.extend(["out"] * (gate.here is not None))
                wrong.extend([name] * (device[0] != own))

    threads = [threading.Thread(target=work, args=a) for a in [("gpu", mx.gpu), ("cpu", mx.cpu)] * 3]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads) and not wrong
    assert len(entered) == 1200 and device == [mx.gpu] and gate.home == mx.gpu


def test_the_gate_opens_again_after_an_error():
    device = [mx.gpu]
    gate = Gate(lambda d: device.__setitem__(0, d), lambda: device[0], available=lambda: True)
    with pytest.raises(KeyError):
        with gate.on("cpu"):
            assert gate.home == mx.gpu
            raise KeyError
    assert device == [mx.gpu] and gate.here is None
    with gate.on("gpu"):
        assert gate.here == "gpu"
