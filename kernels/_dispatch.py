"""Which implementation of an operation runs: a hand-written kernel, or the reference in plain MLX ops.

A kernel runs where all of this holds: the stream's device is a GPU, the kernel supports the input, the user has not
switched it off, and it has passed its self-test on this machine. The self-test runs the very variant on a small input
at its first use in a process, and is remembered in a stamp file for this text, device and MLX version. A kernel that
fails it, or raises, is off for the process: one warning names it, its device and a report file, and the reference
takes over with the same results.

MLX_COSYH3_KERNELS=0 switches all kernels off, 1 all on, `softmax,h3_step` those alone; `use_kernels` does so in code.
"""

import contextlib
import contextvars
import hashlib
import json
import os
import platform
import threading
import time
import warnings
from pathlib import Path

import mlx.core as mx

NAMES = ("softmax", "int8_matmul", "h3_step")
_override = contextvars.ContextVar("mlx_cosyh3_kernels", default=None)
_lock = threading.RLock()
_status = {}  # (name, variant) -> True or False


@contextlib.contextmanager
def use_kernels(choice):
    """`with use_kernels("softmax,h3_step"):` only these kernels may run in this thread or task; "0" none, "1" all."""
    token = _override.set(_parse(choice, "use_kernels"))
    try:
        yield
    finally:
        _override.reset(token)


def allowed():
    """The names of the kernels that the user lets run."""
    override = _override.get()
    return _parse(os.environ.get("MLX_COSYH3_KERNELS", "1"), "MLX_COSYH3_KERNELS") if override is None else override


def _parse(choice, where):
    if choice in ("0", "1"):
        return NAMES if choice == "1" else ()
    names = tuple(n.strip() for n in choice.split(",") if n.strip())
    for name in names:
        if name not in NAMES:
            raise ValueError(f"{where}: there is no kernel {name!r}; use 0, 1, or some of {','.join(NAMES)}")
    return names


def usable(kernel, name, variant, stream, selftest):
    """Whether `variant` of GpuKernel `kernel`, part of operation `name`, may run on `stream` (None: the default).

    selftest()   -> worst error / allowed error of this variant on a small input; below 1 it passes"""
    if not on_gpu(stream) or name not in allowed():
        return False
    key = (kernel.name, variant)
    known = _status.get(key)
    if known is None:
        with _lock:
            known = _status.get(key)
            if known is None:
                known = _status[key] = _passes(kernel, name, variant, selftest)
    return known


def on_gpu(stream=None):
    """Whether `stream` (None: the default device) runs on a GPU that takes custom kernels."""
    if stream is None:
        device = mx.default_device().type
    elif isinstance(stream, mx.Stream):
        device = stream.device.type
    else:
        device = stream.type if isinstance(stream, mx.Device) else stream
    return device == mx.gpu and (mx.metal.is_available() or mx.cuda.is_available())


def _passes(kernel, name, variant, selftest):
    stamp = cache_folder() / "kernels" / _stamp_name(kernel, variant)
    if stamp.exists():
        return True
    begin = time.perf_counter()
    try:
        error = float(selftest())
        trouble = None if error < 1 else f"its result is off by {error:.3g} times what is allowed"
    except Exception as e:  # whatever a compiler or a driver says: the reference is always right
        trouble = f"{type(e).__name__}: {e}"
    if trouble is None:
        write_file(stamp, json.dumps({"kernel": kernel.name, "variant": str(variant), "error": error, **machine()}))
        return True
    report = cache_folder() / "reports" / f"{kernel.name}-{int(time.time())}.json"
    record = {"kernel": kernel.name, "operation": name, "variant": str(variant), "trouble": trouble, **machine()}
    record |= {"seconds": time.perf_counter() - begin, "text": kernel.text()}
    where = f"; report: {report}" if write_file(report, json.dumps(record, indent=1)) else ""
    warnings.warn(
        f"kernel {kernel.name} {variant} is off for this process on {machine()['device']}: "
        f"{trouble.splitlines()[0]}; MLX's own operations take over{where}",
        RuntimeWarning,
        stacklevel=4,
    )
    return False


def _stamp_name(kernel, variant):
    parts = (kernel.name, str(variant), kernel.text(), json.dumps(machine(), sort_keys=True))
    return f"{kernel.name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}"


def machine():
    """What a result of a kernel depends on besides its text."""
    info = mx.device_info()
    return {"device": str(info.get("device_name", "?")), "architecture": str(info.get("architecture", "?")),
            "mlx": mx.__version__, "system": platform.platform()}  # fmt: skip


def cache_folder():
    """Where this program may keep small files of its own: $MLX_COSYH3_CACHE, else the user's cache folder."""
    given = os.environ.get("MLX_COSYH3_CACHE")
    if given:
        return Path(given)
    base = Path.home() / "Library" / "Caches" if platform.system() == "Darwin" else Path.home() / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME", base)) / "mlx_cosyh3"


def write_file(path, text):
    """Write a small file whole or not at all; False where that is not possible (a read-only home, a full disk)."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text)
        os.replace(part, path)
        return True
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        return False


def pick(kernels, reference, stream):
    """The entry of `kernels` (device type -> function) for the device of `stream` (None: the default), else `reference`."""
    if not kernels:
        return reference
    if stream is None:
        device = mx.default_device()
    else:
        device = stream.device if isinstance(stream, mx.Stream) else stream
    return kernels.get(device.type if isinstance(device, mx.Device) else device, reference)
