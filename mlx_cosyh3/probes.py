"""What the machine is like right now: GPU, memory, battery, heat. `runtime.Policy` asks, and acts on the answers.

Each probe is a function without arguments that answers None where it cannot know, and never raises: a machine without
a battery, a system without a thermal state and a missing psutil are no errors. `Probes` bundles them; tests and
programs that know better put their own functions in.

Memory is the case where two programs on one machine meet. CUDA tells what all processes use. Metal tells a process
about itself alone, so each process of this program leaves a note of what it holds in the cache folder, and reads
those of the others.
"""

import atexit
import ctypes
import importlib
import math
import os
import platform
import threading
import time
from dataclasses import dataclass, field

import mlx.core as mx

from mlx_cosyh3.gate import GATE
from mlx_cosyh3.kernels import _trust

HEAT = ("nominal", "fair", "serious", "critical")  # as Foundation counts them
NO_GPU = "MLX finds no GPU here"
OFF = "MLX's default device is the CPU"


@dataclass
class Battery:
    plugged: bool  # whether it is being charged, or need not be
    percent: float = None


@dataclass
class Memory:
    """Bytes on the device that the model computes on: `used` by this process, by `others`; `total` that it may hold.

    `total` is the recommended working set (Metal), the GPU's memory (CUDA), or None without a GPU."""

    used: int
    others: int = 0
    total: int = None


@dataclass
class Probes:
    """The probes of one policy. Battery and heat are asked at most once in `every` seconds."""

    gpu: object = None  # () -> None if there is a GPU to compute on, else the reason why not (a string)
    memory: object = None  # () -> Memory
    battery: object = None  # () -> Battery, or None
    heat: object = None  # () -> one of HEAT, or None
    every: float = 5.0
    clock: object = time.monotonic
    _answers: dict = field(default_factory=dict, repr=False)

    def __post_init__(self):
        self.gpu, self.memory = self.gpu or gpu, self.memory or memory
        self.battery, self.heat = self._rarely(self.battery or battery), self._rarely(self.heat or heat)

    def _rarely(self, probe):
        def ask():
            now = self.clock()
            when, answer = self._answers.get(probe, (-math.inf, None))
            if now - when >= self.every:
                answer = probe()
                self._answers[probe] = now, answer
            return answer

        return ask


def gpu():
    """None if MLX computes on a GPU here, else why not."""
    if not mx.is_available(mx.gpu):
        return NO_GPU
    return None if GATE.home.type == mx.gpu else OFF


# ---------------------------------------------------------------- memory


def memory():
    """What MLX holds in this process, free buffers included, what others hold, and what there is."""
    used = mx.get_active_memory() + mx.get_cache_memory()
    if not mx.is_available(mx.gpu):
        return Memory(used)
    info = mx.device_info(mx.gpu)
    if "free_memory" in info:  # CUDA: all processes
        total = info["total_memory"]
        return Memory(used, max(0, total - info["free_memory"] - used), total)
    total = info.get("max_recommended_working_set_size") or info.get("memory_size")
    return Memory(used, notes(used), total)


def notes(used, folder=None):
    """Leave a note that this process holds `used` bytes, and read those of others on this machine -> their sum.

    Notes of processes that have ended are removed. Where nothing can be written, others are not known: 0."""
    folder = folder or _trust.cache_folder() / "memory"
    host = platform.node()
    own = folder / f"{host}.{os.getpid()}"
    _forget_at_exit(own)
    if not _trust.write_file(own, str(int(used))):
        return 0
    total = 0
    for note in folder.glob(f"{host}.*"):
        pid = note.name.removeprefix(f"{host}.")
        if note == own or not pid.isdigit():
            continue
        if not _trust._alive(int(pid)):
            _trust.remove_file(note)
            continue
        try:
            total += int(note.read_text())
        except (OSError, ValueError):  # it is being written, or has just gone
            continue
    return total


_noted = set()
_noted_lock = threading.Lock()


def _forget_at_exit(path):
    with _noted_lock:
        if path in _noted:
            return
        _noted.add(path)
    atexit.register(_trust.remove_file, path)


# ---------------------------------------------------------------- battery and heat


def battery():
    """Battery by psutil (an optional package), or None: no battery, no psutil, or a system that does not say."""
    try:
        psutil = importlib.import_module("psutil")
    except ImportError:
        return None
    try:
        found = psutil.sensors_battery()
    except (AttributeError, OSError, RuntimeError, ValueError):  # systems differ in what they have
        return None
    if found is None or found.power_plugged is None:
        return None
    return Battery(bool(found.power_plugged), found.percent)


FOUNDATION = "/System/Library/Frameworks/Foundation.framework/Foundation"
OBJC = "/usr/lib/libobjc.dylib"


def heat(load=ctypes.CDLL, system=None):
    """NSProcessInfo.thermalState as a word, or None where there is no Foundation.

    load     what opens a library (for tests)"""
    if (system or platform.system()) != "Darwin":
        return None
    try:
        load(FOUNDATION)  # brings the class
        objc = load(OBJC)
        objc.objc_getClass.restype = objc.sel_registerName.restype = ctypes.c_void_p
        objc.objc_getClass.argtypes = objc.sel_registerName.argtypes = [ctypes.c_char_p]
        cls = objc.objc_getClass(b"NSProcessInfo")
        send = objc.objc_msgSend
        send.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        send.restype = ctypes.c_void_p
        process = send(cls, objc.sel_registerName(b"processInfo"))  # one for the process: nothing to release
        if not process:
            return None
        send.restype = ctypes.c_long
        state = send(process, objc.sel_registerName(b"thermalState"))
    except (OSError, AttributeError):
        return None
    return HEAT[state] if 0 <= state < len(HEAT) else None
