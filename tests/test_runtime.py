"""Where stages run: the rules of a policy, its knobs, and memory.

Run: python -m pytest -q tests/test_runtime.py
"""

import argparse
import subprocess
import sys

import mlx.core as mx
import pytest

from mlx_cosyh3 import caches, runtime
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.probes import Battery, Memory, Probes
from mlx_cosyh3.runtime import Policy
from tests.policies import GB, alone, policy, probes  # noqa: F401 - `alone` is a fixture
from tests.small_voice_model import small_voice

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


# ---------------------------------------------------------------- caches, and two processes


def test_caches_of_voices_and_states_are_emptied_first(model):
    """Whoever made them, and under any policy; what was kept is made anew when it is asked for."""
    voices, states, own = caches.VoiceCache(), caches.StateCache(1 << 24), []
    voices.put("anna", small_voice())
    states.start(model, [65, 66, 67])
    held = [9 * GB]
    p = policy(probes=probes(used=lambda: Memory(held[0], 0, 10 * GB)))
    p.release.append(lambda: own.append((len(voices), len(states))))
    assert p.decide("llm").device == "cpu"
    assert own == [(0, 0)] and voices.bytes == states.bytes == 0
    assert states.start(model, [65, 66, 67])[1] == 0 and states.start(model, [65, 66, 67])[1] == 2
    held[0] = 1 * GB
    assert p.decide("llm").device == "gpu" and len(states) == 1  # there is room: they stay


def test_clear_all_says_what_was_held_and_forgets_caches_that_are_gone():
    one, two = caches.BoundedCache(1000, size=len), caches.BoundedCache(5000, size=len)
    one.put("a", "x" * 100)
    two.put("b", "y" * 200)
    before = one.bytes + two.bytes
    del two
    assert caches.clear_all() >= before - 200 - caches.ENTRY and len(one) == 0
    assert one.get("a") is None


def test_mlx_is_not_told_of_memory_that_others_hold():
    for used, others, limit in ((1, 0, 4), (1, 1, 3), (1, 9, 1)):
        p = policy(max_memory=4 * GB, memory_share=0.75, probes=probes(used=used * GB, others=others * GB))
        assert p.apply() == 4 * GB
        assert (mx.set_memory_limit(GB), mx.set_cache_limit(GB)) == (limit * GB, limit * GB // 4)


def test_two_processes_on_one_mac(monkeypatch, tmp_path):
    """The second one's memory sends requests of the first one to the CPU, until it ends."""
    monkeypatch.setattr(mx, "is_available", lambda device: True)
    monkeypatch.setattr(mx, "device_info", lambda device: {"max_recommended_working_set_size": 10 * GB})
    nothing = lambda: None  # noqa: E731
    p = Policy(probes=Probes(gpu=nothing, battery=nothing, heat=nothing))  # the memory probe is the real one
    assert p.decide("llm").device == "gpu"
    code = f"from mlx_cosyh3 import probes; print(probes.notes({9 * GB}), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert int(other.stdout.readline()) >= 0  # it has left its note, beside ours
        found = p.decide("llm")
        assert found.device == "cpu" and "9.0 by other programs" in found.reason
        other.communicate("\n")
    assert p.decide("llm").device == "gpu"
