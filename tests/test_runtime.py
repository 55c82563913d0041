"""Where stages run, and what happens when one fails. The GPU, where this machine has none, is played by the CPU.

Run: python -m pytest -q tests/test_runtime.py
"""

import argparse
import logging
import threading
import types

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3 import batch_generate, generate, load, logs, runtime, stream_generate
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.gate import GATE, Gate
from mlx_cosyh3.h3 import H3
from mlx_cosyh3.probes import Battery, Memory, Probes
from mlx_cosyh3.runtime import Policy, Restartable
from tests.small_voice_model import small_voice, write_voice_model

TEXT = "Hello there."
GB = 10**9


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No knobs from outside, no files outside, MLX's limits as they were."""
    for name in runtime.KNOBS:
        monkeypatch.delenv(f"MLX_COSYH3_{name.upper()}", raising=False)
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(tmp_path))
    limits = mx.set_memory_limit(2**40), mx.set_cache_limit(2**40)
    mx.set_memory_limit(limits[0])
    mx.set_cache_limit(limits[1])
    yield
    mx.set_memory_limit(limits[0])
    mx.set_cache_limit(limits[1])


def probes(gpu=None, used=1 * GB, others=0, total=10 * GB, battery=None, heat=None):
    memory = used if callable(used) else lambda: Memory(used, others, total)
    return Probes(gpu=lambda: gpu, memory=memory, battery=lambda: battery, heat=lambda: heat, every=0)


def policy(**knobs):
    """A policy on a machine with a GPU, unless `knobs` have other probes."""
    return Policy(**{"probes": probes()} | knobs)


# ---------------------------------------------------------------- the rules


def test_no_gpu():
    found = Policy(probes=probes(gpu="MLX finds no GPU here")).decide("llm")
    assert (found.device, found.reason) == ("cpu", "MLX finds no GPU here")
    found = Policy(device="gpu", probes=probes(gpu="MLX finds no GPU here")).decide("llm")
    assert found.device == "cpu" and "though device=gpu" in found.reason


def test_the_users_word_comes_first():
    asked = []

    def never():
        asked.append(1)

    cpu = Policy(device="cpu", probes=Probes(gpu=never, memory=never, battery=never, heat=never)).decide("flow")
    assert (cpu.device, cpu.reason) == ("cpu", "device=cpu") and not asked
    assert policy().decide("flow").device == policy(device="gpu").decide("flow").device == "gpu"


@pytest.mark.parametrize(
    "knob, sign", [("on_battery", {"battery": Battery(False, 40)}), ("at_heat", {"heat": "serious"})]
)
def test_battery_and_heat(knob, sign):
    sparing = {how: policy(probes=probes(**sign), **{knob: how}).decide("llm") for how in ("reduce", "cpu", "ignore")}
    assert [d.device for d in sparing.values()] == ["gpu", "cpu", "gpu"]
    assert [d.rest for d in sparing.values()] == [1.0, 0.0, 0.0]
    words = "on battery, 40 % left" if knob == "on_battery" else "the thermal state is serious"
    assert (
        words in sparing["reduce"].reason and words in sparing["cpu"].reason and words not in sparing["ignore"].reason
    )
    assert policy(probes=probes(**sign)).decide("llm") == sparing["reduce"]  # the default
    assert policy(probes=probes(**sign), rest=3).decide("llm").rest == 3


def test_plugged_in_and_cool_is_nothing_to_mention():
    for sign in ({"battery": Battery(True, 3)}, {"heat": "nominal"}, {"heat": "fair"}):
        assert policy(probes=probes(**sign)).decide("llm") == policy().decide("llm")


def test_critical_heat_is_more_than_serious():
    assert policy(probes=probes(heat="critical")).decide("llm").device == "cpu"
    assert policy(probes=probes(heat="critical"), at_heat="ignore").decide("llm").device == "gpu"
    both = policy(probes=probes(heat="critical", battery=Battery(False)))  # heat counts more
    assert "critical" in both.decide("llm").reason


# ---------------------------------------------------------------- memory


def test_over_the_line_caches_go_first_then_requests_go_to_the_cpu():
    held, freed = [9 * GB], []

    def free(to):
        freed.append(to)
        held[0] = to

    p = policy(probes=probes(used=lambda: Memory(held[0], 0, 10 * GB)))
    p.release.append(lambda: free(5 * GB))  # the caches were all that was too much
    assert p.decide("llm").device == "gpu" and freed == [5 * GB]
    assert p.decide("llm").device == "gpu" and freed == [5 * GB]  # nothing to free any more
    p.release[0] = lambda: free(held[0])  # nothing can be freed
    held[0] = 8.5 * GB
    found = p.decide("llm")
    assert found.device == "cpu" and freed[-1] == 8.5 * GB
    assert found.reason == "memory: 8.5 of 10.0 GB in use, over 0.8"
    held[0] = 7 * GB
    assert p.decide("llm").device == "gpu"  # a new request, a new look


def test_free_buffers_of_mlx_are_cleared(monkeypatch):
    mx.clear_cache()
    a = mx.zeros((1 << 20,))
    mx.eval(a)
    del a
    assert mx.get_cache_memory() >= 4 << 20
    policy(probes=probes(used=9 * GB)).decide("llm")
    assert mx.get_cache_memory() == 0


def test_the_other_program_counts():
    found = policy(probes=probes(used=2 * GB, others=7 * GB)).decide("llm")
    assert found.device == "cpu" and "7.0 by other programs" in found.reason
    assert policy(probes=probes(used=2 * GB, others=5 * GB)).decide("llm").device == "gpu"


@pytest.mark.parametrize("given, bytes", [(4 * GB, 4 * GB), ("4GB", 4 * GB), (0.4, 4 * GB), ("40%", 4 * GB),
                                          ("0.4", 4 * GB),
                                          ("4096M", 4 * 2**30), (1.0, 10 * GB), (99 * GB, 10 * GB)])  # fmt: skip
def test_max_memory(given, bytes):
    p = policy(max_memory=given)
    assert p.limit(Memory(0, 0, 10 * GB)) == bytes
    line = int(0.8 * bytes)
    assert policy(max_memory=given, probes=probes(used=line - 1000)).decide("llm").device == "gpu"
    assert policy(max_memory=given, probes=probes(used=line + 1000)).decide("llm").device == "cpu"


def test_mlx_is_told_the_limits():
    assert policy(max_memory=4 * GB, memory_share=0.75).decide("llm").device == "gpu"
    assert (mx.set_memory_limit(GB), mx.set_cache_limit(GB)) == (4 * GB, GB)
    assert Policy(max_memory=2 * GB, probes=probes(total=None)).apply() == 2 * GB  # without a GPU, too
    assert mx.set_memory_limit(GB) == 2 * GB
    assert Policy(probes=probes(total=None)).apply() is None  # nothing known, nothing asked for: MLX's own
    assert mx.set_memory_limit(GB) == GB


# ---------------------------------------------------------------- knobs


def test_knobs_from_the_environment(monkeypatch):
    for name, value in (
        ("DEVICE", "cpu"),
        ("MAX_MEMORY", "50%"),
        ("ON_BATTERY", "ignore"),
        ("RETRY_ON_CPU", "0"),
        ("REST", "2"),
    ):
        monkeypatch.setenv(f"MLX_COSYH3_{name}", value)
    p = Policy()
    assert (p.device, p.max_memory, p.on_battery, p.retry_on_cpu, p.rest) == ("cpu", 0.5, "ignore", False, 2.0)
    assert Policy(device="gpu", retry_on_cpu=True).retry_on_cpu and Policy(device="gpu").device == "gpu"


@pytest.mark.parametrize(
    "knob, bad",
    [
        ("device", ["cuda", 3]), ("max_memory", [0, -1, "lots", "0", "200%", 1000, True, float("nan")]),
        ("memory_share", [0, 1.5, "x"]), ("on_battery", ["no", 1]), ("at_heat", ["cold"]), ("rest", [-1, "x", 100]),
        ("retry_on_cpu", ["maybe", 2]),
    ],
)  # fmt: skip
def test_a_bad_knob_is_one_line_that_names_it(monkeypatch, knob, bad):
    for value in bad:
        with pytest.raises(CosyH3Error) as e:
            Policy(**{knob: value})
        assert str(e.value).startswith(knob) and "\n" not in str(e.value)
        if isinstance(value, str):
            monkeypatch.setenv(f"MLX_COSYH3_{knob.upper()}", value)
            with pytest.raises(CosyH3Error, match=f"MLX_COSYH3_{knob.upper()}"):
                Policy()
            monkeypatch.delenv(f"MLX_COSYH3_{knob.upper()}")


def test_knobs_of_a_command_line():
    parser = argparse.ArgumentParser()
    runtime.add_arguments(parser)
    p = runtime.from_arguments(parser.parse_args(["--device", "cpu", "--max-memory", "6GB"]))
    assert (p.device, p.max_memory, p.on_battery) == ("cpu", 6 * GB, "reduce")
    with pytest.raises(CosyH3Error, match="at_heat"):
        runtime.from_arguments(parser.parse_args(["--at-heat", "cold"]))


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


GPU_ERROR = RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")
NAN = CosyH3Error("the flow gave a value that is not finite (inf or NaN) in step 3 of 10")


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
    "error", [CosyH3Error("steps must be a whole number"), TypeError("x"), KeyError("x"), ValueError("x")]
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


# ---------------------------------------------------------------- models: speech


@pytest.fixture(scope="module")
def voice_model(tmp_path_factory):
    return load(write_voice_model(tmp_path_factory.mktemp("models") / "voice"))


def test_decisions_are_in_the_result(voice_model):
    result = generate(voice_model, TEXT, seed=1, policy=Policy(probes=probes(gpu="no GPU in this test")))
    assert [(d["stage"], d["device"], d["reason"]) for d in result.decisions] == [
        (stage, "cpu", "no GPU in this test") for stage in ("llm", "flow", "vocoder")
    ]
    on_gpu = generate(voice_model, TEXT, seed=1, policy=policy())
    assert {d["device"] for d in on_gpu.decisions} == {"gpu"}
    np.testing.assert_array_equal(on_gpu.audio, result.audio)


def fault(monkeypatch, cls, name, call, error=GPU_ERROR, nan=False):
    """The `call`-th call of a method fails if it is on the GPU. Returns the list of the devices it was called on."""
    original, seen = getattr(cls, name), []

    def wrapped(self, *args, **options):
        seen.append(GATE.here)
        if seen[-1] == "gpu" and len(seen) == call:
            if not nan:
                raise error
            args = [a * float("nan") if isinstance(a, mx.array) and a.dtype == mx.float32 else a for a in args]
        return original(self, *args, **options)

    monkeypatch.setattr(cls, name, wrapped)
    return seen


def again(result, stage):
    return [d["reason"] for d in result.decisions if d["stage"] == stage and "again" in d["reason"]]


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("stage, part, call", [("flow", "flow", 1), ("vocoder", "hift", 1)])
def test_speech_at_once_outlives_a_failure(voice_model, monkeypatch, stage, part, call, nan):
    want = generate(voice_model, TEXT, seed=1, voice=small_voice())
    seen = fault(monkeypatch, type(getattr(voice_model, part)), "__call__", call, nan=nan)
    got = generate(voice_model, TEXT, seed=1, voice=small_voice(), policy=policy())
    assert seen == ["gpu", "cpu"] and len(again(got, stage)) == 1
    np.testing.assert_allclose(got.audio, want.audio, atol=1e-6)


@pytest.mark.parametrize("options", [{"seed": 1}, {"temperature": 0}])
@pytest.mark.parametrize("call", [1, 2, 9])
def test_the_language_model_goes_on_from_its_last_token(voice_model, monkeypatch, call, options):
    want = generate(voice_model, TEXT, voice=small_voice(), **options)
    seen = fault(monkeypatch, type(voice_model.llm), "last_logits", call)
    got = generate(voice_model, TEXT, voice=small_voice(), policy=policy(), **options)
    assert seen[call - 1 : call + 1] == ["gpu", "cpu"] and "gpu" not in seen[call:]
    assert got.tokens == want.tokens and got.finish_reason == want.finish_reason and len(again(got, "llm")) == 1
    np.testing.assert_allclose(got.audio, want.audio, atol=1e-6)


def streamed(model, text, **options):
    stream = stream_generate(model, text, voice=small_voice(), seed=2, chunk_tokens=5, max_chunk_tokens=5, **options)
    pieces = list(stream)
    assert np.array_equal(np.concatenate(pieces), stream.result.audio)
    return stream.result, len(pieces)


@pytest.mark.parametrize("cls, name, stage, call", [("flow", "solve", "flow", 3), ("llm", "last_logits", "llm", 12),
                                                    ("hift", "decode", "vocoder", 2)])  # fmt: skip
def test_a_stream_of_speech_outlives_a_failure(voice_model, monkeypatch, cls, name, stage, call):
    want, pieces = streamed(voice_model, TEXT)
    fault(monkeypatch, type(getattr(voice_model, cls)), name, call)
    got, got_pieces = streamed(voice_model, TEXT, policy=policy())
    assert len(again(got, stage)) == 1 and got.tokens == want.tokens and got_pieces == pieces > 2
    np.testing.assert_allclose(got.audio, want.audio, atol=1e-5)


def test_text_in_pieces_is_read_once(voice_model, monkeypatch):
    words, asked = ["Hello ", "there, ", "this is ", "some text."], []

    def text():
        for word in words:
            asked.append(word)
            yield word

    want, _ = streamed(voice_model, text())
    assert asked == words
    seen = fault(monkeypatch, type(voice_model.llm), "last_logits", 14)
    got, _ = streamed(voice_model, text(), policy=policy())
    assert asked == words * 2 and "cpu" in seen and len(again(got, "llm")) == 1
    assert got.tokens == want.tokens
    np.testing.assert_allclose(got.audio, want.audio, atol=1e-5)


def test_an_error_of_the_text_is_the_callers(voice_model):
    def text():
        yield "Hello there, how "
        raise RuntimeError("the text broke")

    with pytest.raises(RuntimeError, match="the text broke"):
        list(stream_generate(voice_model, text(), seed=2, policy=policy()))


def test_a_recording_is_converted_in_spite_of_a_failure(voice_model, monkeypatch):
    t = np.arange(4 * 16000) / 16000
    tone = (0.3 * np.sin(2 * np.pi * 220 * t) * (1 + np.sin(9 * t))).astype(np.float32)
    options = {"seed": 1, "note": lambda text: None}
    want = voice_model.convert_voice((tone, 16000), small_voice(), **options)
    seen = fault(monkeypatch, type(voice_model.speech_tokenizer), "tokenize", 1)
    got = voice_model.convert_voice((tone, 16000), small_voice(), policy=policy(), **options)
    assert seen == ["gpu", "cpu"] and len(again(got, "speech_tokenizer")) == 1
    np.testing.assert_allclose(got.audio, want.audio, atol=1e-6)


ALIKE = [{"text": TEXT, "seed": 4}] * 2  # their flow is one batch


@pytest.mark.parametrize("cls, name, stage, call", [("llm", "last_logits", "llm", 9), ("flow", "together", "flow", 1),
                                                    ("hift", "__call__", "vocoder", 2)])  # fmt: skip
def test_a_batch_of_texts_outlives_a_failure(voice_model, monkeypatch, cls, name, stage, call):
    texts, options = ALIKE + ["How are you?"], {"seed": 3, "voice": "anna", "note": lambda text: None}
    want = batch_generate(voice_model, texts, **options)
    seen = fault(monkeypatch, type(getattr(voice_model, cls)), name, call)
    got = batch_generate(voice_model, texts, policy=policy(), **options)
    assert seen[:call] == ["gpu"] * call
    assert (stage == "flow") == (not any(again(r, stage) for r in got))  # a batch of the flow is tried row by row first
    for a, b in zip(got, want):
        assert a.tokens == b.tokens and a.finish_reason == b.finish_reason
        np.testing.assert_allclose(a.audio, b.audio, atol=1e-3)


def test_a_batch_runs_where_the_policy_says(voice_model, monkeypatch):
    seen = [fault(monkeypatch, type(getattr(voice_model, cls)), name, 0)
            for cls, name in (("llm", "last_logits"), ("flow", "together"), ("hift", "__call__"))]  # fmt: skip
    for device in ("cpu", "gpu"):
        batch_generate(voice_model, ALIKE, voice="anna", policy=policy(device=device), note=lambda text: None)
        assert [set(places) for places in seen] == [{device}] * 3
        for places in seen:
            places.clear()


def test_on_the_cpu_a_failure_is_a_failure(voice_model, monkeypatch):
    monkeypatch.setattr(type(voice_model.flow), "__call__", lambda *a, **k: (_ for _ in ()).throw(NAN))
    with pytest.raises(CosyH3Error, match="not finite"):
        generate(voice_model, TEXT, seed=1)


def test_a_policy_must_be_one(voice_model, model):
    for m in (voice_model, model):
        with pytest.raises(CosyH3Error, match="policy must be a runtime.Policy, not str"):
            generate(m, "the cat", policy="cpu")


# ---------------------------------------------------------------- models: text


def text_options(**options):
    return {"max_tokens": 20, "seed": 5, "temperature": 0.9, "repetition_penalty": 1.1, "logprobs": True} | options


def same(got, want):
    assert (got.tokens, got.text, got.finish_reason) == (want.tokens, want.text, want.finish_reason)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)


@pytest.mark.parametrize("where, call", [("prefill", 1), ("step", 1), ("step", 7), ("step", 19)])
def test_text_outlives_a_failure(model, monkeypatch, where, call):
    want = generate(model, "the cat", **text_options())
    fault(monkeypatch, H3, where, call)
    got = generate(model, "the cat", policy=policy(), **text_options())
    same(got, want)
    assert len(again(got, "text")) == 1


def test_text_with_a_context_and_a_nan(model, monkeypatch):
    """What was computed with the NaN leaves no trace in the caller's cache."""

    def run(**options):
        cache = model.make_cache()
        first = generate(model, "Once upon a time", cache=cache, **text_options())
        second = generate(model, " and", cache=cache, **text_options(seed=9), **options)
        return first, second, generate(model, " then", cache=cache, **text_options(seed=3))

    want = run()
    step, calls = H3.step, []

    def bad_step(self, ids, cache):
        logits = step(self, ids, cache)
        calls.append(GATE.here)
        if GATE.here == "gpu" and calls.count("gpu") == 6:
            for layer in cache.layers:  # the state is spoilt, too
                if hasattr(layer, "ssm"):
                    layer.ssm = layer.ssm * float("nan")
            return logits * float("nan")
        return logits

    monkeypatch.setattr(H3, "step", bad_step)
    got = run(policy=policy())
    for a, b in zip(got, want):
        same(a, b)
    assert "not finite" in again(got[1], "text")[0]


def test_rows_of_a_batch_outlive_a_failure(model, monkeypatch):
    prompts = ["the end of the day", "A", "and the other, which is longer"]
    stop = generate(model, "A", **text_options(seed=6)).text[4:6]  # a row that ends before the others
    want = batch_generate(model, prompts, **text_options(stop=stop))
    assert len({len(r.tokens) for r in want}) > 1
    fault(monkeypatch, H3, "step", 15)
    got = batch_generate(model, prompts, policy=policy(), **text_options(stop=stop))
    for a, b in zip(got, want):
        same(a, b)
    assert len(again(got[0], "text")) == 1


def test_streamed_text_outlives_a_failure(model, monkeypatch):
    want = generate(model, "the cat", **text_options())
    fault(monkeypatch, H3, "step", 8)
    stream = stream_generate(model, "the cat", policy=policy(), **text_options())
    assert "".join(stream) == want.text
    same(stream.result, want)
    assert len(again(stream.result, "text")) == 1
