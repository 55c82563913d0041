"""What the machine is asked: battery, heat, memory; answers of machines that this one is not.

Run: python -m pytest -q tests/test_probes.py
"""

import os
import platform
import subprocess
import sys
import types

import mlx.core as mx
import pytest

from mlx_cosyh3 import probes
from mlx_cosyh3.probes import Battery, Memory, Probes

# ---------------------------------------------------------------- battery


def psutil_with(answer):
    def sensors_battery():
        if isinstance(answer, Exception):
            raise answer
        return answer

    return types.SimpleNamespace(sensors_battery=sensors_battery)


@pytest.mark.parametrize(
    "answer, want",
    [
        (types.SimpleNamespace(power_plugged=True, percent=80), Battery(True, 80)),
        (types.SimpleNamespace(power_plugged=False, percent=12.5), Battery(False, 12.5)),
        (types.SimpleNamespace(power_plugged=None, percent=50), None),  # it does not say
        (None, None),  # there is none
        (OSError("no such file"), None),
    ],
)
def test_battery(monkeypatch, answer, want):
    monkeypatch.setitem(sys.modules, "psutil", psutil_with(answer))
    assert probes.battery() == want


def test_without_psutil_the_battery_is_not_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)  # import raises ImportError
    assert probes.battery() is None
    monkeypatch.setitem(sys.modules, "psutil", types.SimpleNamespace())  # a system where it has no such function
    assert probes.battery() is None


def test_psutil_is_imported_by_the_battery_probe_alone():
    code = "import sys, mlx_cosyh3.runtime; assert 'psutil' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=os.getcwd())


# ---------------------------------------------------------------- heat


class Function:
    """A function of a library as ctypes has it: it can be told its types."""

    def __init__(self, call):
        self._call = call

    def __call__(self, *args):
        return self._call(self, *args)


def foundation(state, process=42):
    """What stands in for ctypes.CDLL: an Objective-C runtime whose process has thermal state `state`."""
    opened = []

    def send(function, receiver, selector):
        if (receiver, selector) == (b"NSProcessInfo", b"processInfo"):
            return process
        assert (receiver, selector) == (process, b"thermalState")
        return state

    def load(path):
        opened.append(path)
        return types.SimpleNamespace(
            objc_getClass=Function(lambda f, name: name),
            sel_registerName=Function(lambda f, name: name),
            objc_msgSend=Function(send),
        )

    load.opened = opened
    return load


@pytest.mark.parametrize(
    "state, want", [(0, "nominal"), (1, "fair"), (2, "serious"), (3, "critical"), (4, None), (-1, None)]
)
def test_heat_is_the_thermal_state_of_foundation(state, want):
    load = foundation(state)
    assert probes.heat(load, "Darwin") == want
    assert load.opened == [probes.FOUNDATION, probes.OBJC]


def test_heat_is_not_known_elsewhere():
    def missing(path):
        raise OSError("no such library")

    assert probes.heat(missing, "Darwin") is None
    assert probes.heat(foundation(3), "Linux") is None
    assert probes.heat(foundation(3, process=0), "Darwin") is None


# ---------------------------------------------------------------- memory, two processes


def test_memory_counts_arrays_and_free_buffers():
    mx.clear_cache()
    before = probes.memory().used
    a = mx.zeros((1 << 20,))
    mx.eval(a)
    held = probes.memory().used
    assert held - before >= 4 << 20
    del a  # its buffer is kept for later: still memory that others cannot have
    assert probes.memory().used == held
    mx.clear_cache()
    assert probes.memory().used <= held - (4 << 20)


def test_metal_asks_for_the_recommended_working_set_and_reads_notes(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_COSYH3_CACHE", str(tmp_path))
    monkeypatch.setattr(mx, "is_available", lambda device: True)
    monkeypatch.setattr(mx, "device_info", lambda device: {"max_recommended_working_set_size": 10**10})
    other = tmp_path / "memory" / f"{platform.node()}.{os.getppid()}"
    other.parent.mkdir()
    other.write_text("3000000000")
    found = probes.memory()
    assert (found.others, found.total) == (3 * 10**9, 10**10)
    assert (tmp_path / "memory" / f"{platform.node()}.{os.getpid()}").read_text() == str(found.used)


def test_cuda_tells_of_all_processes(monkeypatch):
    monkeypatch.setattr(mx, "is_available", lambda device: True)
    monkeypatch.setattr(mx, "device_info", lambda device: {"free_memory": 4 * 10**9, "total_memory": 10**10})
    monkeypatch.setattr(mx, "get_active_memory", lambda: 10**9)
    monkeypatch.setattr(mx, "get_cache_memory", lambda: 0)
    assert probes.memory() == Memory(10**9, 5 * 10**9, 10**10)


def test_notes_of_the_living_are_added_those_of_the_dead_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = platform.node()
    gone, other, odd = (tmp_path / f"{host}.{end}" for end in (dead.pid, os.getppid(), "notanumber"))
    gone.write_text("5000")
    other.write_text("700")
    odd.write_text("90")
    (tmp_path / f"elsewhere.{os.getppid()}").write_text("11")
    assert probes.notes(123, tmp_path) == 700
    assert not gone.exists() and odd.exists()
    other.write_text("")  # being written
    assert probes.notes(124, tmp_path) == 0
    assert (tmp_path / f"{host}.{os.getpid()}").read_text() == "124"


def test_two_processes_see_one_another(tmp_path):
    """The second one reads the first one's note, which goes with it."""
    code = (
        "import sys, pathlib; from mlx_cosyh3 import probes\n"
        "print(probes.notes(2000, pathlib.Path(sys.argv[1])), flush=True); input()"
    )
    assert probes.notes(1000, tmp_path) == 0
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "1000\n"
        assert probes.notes(1000, tmp_path) == 2000
        other.communicate("\n")
    assert other.returncode == 0
    assert [p.name for p in tmp_path.iterdir()] == [f"{platform.node()}.{os.getpid()}"]


def test_nowhere_to_leave_a_note(tmp_path):
    (tmp_path / "file").write_text("")
    assert probes.notes(1000, tmp_path / "file" / "memory") == 0


# ---------------------------------------------------------------- the bundle


def test_slow_probes_are_asked_rarely():
    now, asked = [0.0], []

    def battery():
        asked.append(now[0])
        return Battery(False)

    p = Probes(battery=battery, every=5, clock=lambda: now[0])
    for now[0] in (0.0, 1.0, 4.9, 5.0, 9.0, 10.0):
        assert p.battery() == Battery(False)
    assert asked == [0.0, 5.0, 10.0]


def test_here():
    """Whatever this machine is: an answer of the right kind."""
    p = Probes()
    assert (p.gpu() is None) == (mx.is_available(mx.gpu) and mx.default_device().type == mx.gpu)
    assert p.heat() in (None, *probes.HEAT)
    assert p.battery() is None or isinstance(p.battery(), Battery)
    assert p.memory().used >= 0
