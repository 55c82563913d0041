"""Chrome traces: their format, their nesting, what is recorded of a generation, and where a trace cannot be written."""

import contextvars
import json
import os
import threading

import mlx.core as mx
import pytest

from mlx_cosyh3 import generate, load, logs, stream_generate, trace
from mlx_cosyh3.cli import main
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.stream import Beside
from tests.small_voice_model import write_voice_model


class Clock:
    """Seconds that pass only when they are told to."""

    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def new(clock=None, memory=None):
    return trace.Trace(clock or Clock(), memory)


def check(told):
    """Raise AssertionError unless this is a trace that Chrome and Perfetto read; returns its complete events."""
    told = json.loads(json.dumps(told, allow_nan=False))
    assert isinstance(told["traceEvents"], list) and told["displayTimeUnit"] in ("ms", "ns")
    names, stacks, complete, before, open_ = set(), {}, [], -1, set()
    for e in told["traceEvents"]:
        assert e["ph"] in ("X", "C", "M", "b", "e") and isinstance(e["name"], str)
        assert isinstance(e["pid"], int) and isinstance(e["tid"], int)
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "thread_name") and isinstance(e["args"]["name"], str)
            names.add(e["tid"])
            continue
        assert e["tid"] in names  # told before it is used
        assert e["ts"] >= before, "not in order"
        before = e["ts"]
        if e["ph"] in "be":  # each begins once, then ends once
            assert isinstance(e["cat"], str) and (e["id"] in open_) == (e["ph"] == "e")
            (open_.remove if e["ph"] == "e" else open_.add)(e["id"])
            continue
        if e["ph"] == "C":
            assert all(isinstance(v, (int, float)) for v in e["args"].values())
            continue
        assert e["dur"] >= 0
        begin, end = round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)  # ns
        stack = stacks.setdefault(e["tid"], [])
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1], f"{e['name']} sticks out of what it lies in"
        stack.append(end)
        complete.append(e)
    assert not open_, "a request does not end"
    return complete


def test_what_an_event_looks_like():
    clock = Clock()
    t = new(clock, memory=lambda: 2_500_000)
    clock.sleep(0.25)
    with logs.request("r1"):
        t.add("flow", 100.25, 100.75, steps=10, text="secret words")
    told = t.json()
    assert check(told) == [{
        "name": "flow", "cat": "stage", "ph": "X", "ts": 250000.0, "dur": 500000.0, "pid": os.getpid(), "tid": 1,
        "args": {"steps": 10, "text": "12 characters", "request": "r1"},
    }]  # fmt: skip
    (memory,) = [e for e in told["traceEvents"] if e["ph"] == "C"]
    assert (memory["name"], memory["ts"], memory["args"]) == ("memory", 750000.0, {"MB": 2.5})
    assert told["otherData"]["versions"]["mlx"] == mx.__version__


def test_spans_nest():
    clock = Clock(0.1)
    t = new(clock)
    with t.span("all"):
        for _ in range(30):
            clock.sleep(0.1)  # not a sum of powers of two
            with t.span("part"), t.span("inner"):
                clock.sleep(1 / 3)
    events = check(t.json())
    assert [e["name"] for e in events[:3]] == ["all", "part", "inner"]
    assert t.totals() == pytest.approx({"all": 13, "part": 10, "inner": 10})


def test_the_check_sees_what_is_wrong():
    t = new()
    t.add("one", 100, 102)
    t.add("two", 101, 103)
    with pytest.raises(AssertionError, match="two sticks out"):
        check(t.json())


def test_a_request_is_told_as_a_whole():
    """From its first stage to the end of its last, in whatever threads; what belongs to no request is in none."""
    t, gate, threads = new(), threading.Barrier(3), []
    t.add("load", 100, 105)

    def work(*event):
        t.add(*event)
        gate.wait()

    for id, begin, end in (("r1", 101, 103), ("r2", 102, 106), ("r1", 106, 109)):
        with logs.request(id):
            context = contextvars.copy_context()
        threads.append(threading.Thread(target=context.run, args=(work, "flow", begin, end)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    told = t.json()
    check(told)
    spans = {}
    for e in told["traceEvents"]:
        if e["ph"] in "be":
            spans.setdefault(e["id"], []).append((e["ph"], e["ts"] / 1e6))
    assert spans == {"r1": [("b", 1), ("e", 9)], "r2": [("b", 2), ("e", 6)]}


def test_a_failed_span_is_recorded():
    clock = Clock()
    t = new(clock)
    with pytest.raises(ValueError), t.span("flow"):
        clock.sleep(1)
        raise ValueError("no")
    (event,) = check(t.json())
    assert event["dur"] == 1e6 and event["args"] == {"error": "ValueError"}


def test_threads_are_told_apart():
    t, gate = new(), threading.Barrier(3)

    def work():
        gate.wait()
        t.add("x", 100, 101)
        gate.wait()

    threads = [threading.Thread(target=work, name=f"worker {n}") for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = t.json()
    assert sorted(e["tid"] for e in check(told)) == [1, 2, 3]
    named = [e["args"]["name"] for e in told["traceEvents"] if e["name"] == "thread_name"]
    assert sorted(named) == ["worker 0", "worker 1", "worker 2"]


def test_a_trace_is_bounded(monkeypatch):
    monkeypatch.setattr(trace, "MOST", 5)
    t = new()
    for n in range(8):
        t.add("x", 100 + n, 101 + n)
    told = t.json()
    assert len(check(told)) == 5 and t.left_out == 3 and "3 events" in told["otherData"]["left_out"]


def test_nothing_is_recorded_unless_asked():
    trace.record("x", 0, 1)
    with trace.span("y"):
        pass
    with trace.recording(new()) as t:
        trace.record("x", 100, 101)
        Beside(trace.record, "beside", 100, 101).result()
    trace.record("x", 100, 101)
    assert sorted(e["name"] for e in check(t.json())) == ["beside", "x"]


def test_recordings_of_threads_are_their_own():
    seen, gate = {}, threading.Barrier(2)

    def work(name):
        with trace.recording(new()) as t:
            gate.wait()
            trace.record(name, 100, 101)
            gate.wait()
            seen[name] = [e["name"] for e in check(t.json())]

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"a": ["a"], "b": ["b"]}


# ---------------------------------------------------------------- of a generation


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    return write_voice_model(tmp_path_factory.mktemp("models") / "voice")


@pytest.mark.parametrize("streamed", [False, True])
def test_speech_tells_its_stages(speaker, streamed):
    model = load(speaker)
    with trace.recording() as t:
        if streamed:
            stream = stream_generate(model, "the cat", voice="clara", seed=1, chunk_tokens=5)
            assert len(list(stream)) > 1
            result = stream.result
        else:
            result = generate(model, "the cat. " * 30, voice="clara", seed=1)  # of many segments, together
            assert len(result.segments) > 1
    events = check(t.json())
    assert {e["name"] for e in events} == {"llm", "flow", "vocoder"}
    totals = t.totals()
    for stage in ("llm", "flow", "vocoder"):
        assert totals[stage] == pytest.approx(result.seconds[stage], abs=1e-3)
    assert not streamed or sum(e["name"] == "llm" for e in events) >= len(result.tokens)


def test_text_tells_its_tokens(model):
    with trace.recording() as t:
        stream = stream_generate(model, "the cat", max_tokens=7, seed=1)
        list(stream)
    events = check(t.json())
    assert [e["name"] for e in events] == ["prompt"] + ["tokens"] * 7
    assert t.totals()["prompt"] == pytest.approx(stream.result.seconds["prompt"], abs=1e-6)


# ---------------------------------------------------------------- --trace


def test_say_with_trace(speaker, tmp_path, capsys):
    file = tmp_path / "t.json"
    assert main(["say", "the cat", "--model", str(speaker), "--seed", "1", "-o", str(tmp_path / "a.wav"),
                 "--trace", str(file)]) == 0  # fmt: skip
    told = json.loads(file.read_text())
    names = {e["name"] for e in check(told)}
    assert names == {"load", "llm", "flow", "vocoder"}
    assert all(e["args"]["request"] for e in told["traceEvents"] if e["ph"] == "X")
    assert f"note: trace: {file}" in capsys.readouterr().err


def test_generate_with_trace(folder, tmp_path):
    file = tmp_path / "t.json"
    assert main(["generate", "the cat", "--model", str(folder), "--max-tokens", "3", "--trace", str(file)]) == 0
    assert [e["name"] for e in check(json.loads(file.read_text()))] == ["load", "prompt"] + ["tokens"] * 3


def test_what_was_recorded_before_an_error_is_written(tmp_path):
    file, notes = tmp_path / "t.json", []
    with pytest.raises(RuntimeError), trace.to_file(file, notes.append) as t:
        t.add("x", t.clock(), t.clock())
        raise RuntimeError("gone")
    assert [e["name"] for e in check(json.loads(file.read_text()))] == ["x"] and str(file) in notes[0]


@pytest.mark.parametrize("name, says", [("", "is a folder"), ("no/t.json", "there is no folder"),
                                        ("t.gputrace", "is to be a .json file")])  # fmt: skip
def test_a_path_that_cannot_be_written_is_told_before_any_work(tmp_path, name, says):
    with pytest.raises(CosyH3Error, match=says), trace.to_file(tmp_path / name):
        pytest.fail("it began")


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CosyH3Error, match="cannot write the trace"):
        new().write(tmp_path / "file" / "t.json")


# ---------------------------------------------------------------- GPU traces, with a Metal that only takes notes


class Metal:
    def __init__(self, trouble=None):
        self.calls, self.trouble = [], trouble

    def is_available(self):
        return True

    def start_capture(self, path):
        if self.trouble:
            raise RuntimeError(self.trouble)
        self.calls.append(path)

    def stop_capture(self):
        self.calls.append("stop")


def on_metal(monkeypatch, metal, capture="1"):
    monkeypatch.setattr(trace.mx, "metal", metal)
    monkeypatch.setenv(trace.CAPTURE, capture)
    monkeypatch.setattr(logs, "machine", lambda: {"machine": {}, "versions": {}})
    return metal


def test_gpu_trace(tmp_path, monkeypatch):
    metal, notes = on_metal(monkeypatch, Metal()), []
    with pytest.raises(KeyboardInterrupt), trace.to_file(tmp_path / "t.json", notes.append):
        raise KeyboardInterrupt
    assert metal.calls == [str(tmp_path / "t.gputrace"), "stop"]
    assert any("t.gputrace" in note and "Xcode" in note for note in notes) and (tmp_path / "t.json").exists()


def test_gpu_trace_that_was_not_asked_for(tmp_path, monkeypatch):
    metal, notes = on_metal(monkeypatch, Metal(), "0"), []
    with trace.to_file(tmp_path / "t.json", notes.append):
        pass
    assert metal.calls == [] and "MTL_CAPTURE_ENABLED=1" in notes[0]


def test_gpu_trace_that_fails(tmp_path, monkeypatch):
    on_metal(monkeypatch, Metal("[metal::start_capture] Failed to start\nmore"))
    with pytest.raises(CosyH3Error, match=r"Metal takes no GPU trace: \[metal::start_capture\] Failed to start$"):
        with trace.to_file(tmp_path / "t.json", lambda text: None):
            pytest.fail("it began")


def test_gpu_trace_never_replaces(tmp_path, monkeypatch):
    metal = on_metal(monkeypatch, Metal())
    (tmp_path / "t.gputrace").mkdir()
    with pytest.raises(CosyH3Error, match="t.gputrace exists"), trace.to_file(tmp_path / "t.json", lambda text: None):
        pytest.fail("it began")
    assert metal.calls == []
