"""Which implementation of an operation runs: a hand-written kernel, or the reference in plain MLX ops.

A kernel runs where all of this holds: the user has not switched it off, the stream's device is a GPU, the operation's
module supports the input, and the kernel has passed its self-test on this machine (`_trust.py`).

MLX_COSYH3_KERNELS=0 switches all kernels off, 1 lets all run (the default), `softmax,h3_step` those alone. It is read
once, at first use. `use_kernels` makes the same choice in code and comes before it.

The choice is made when an operation is called, not when it is computed: a function compiled by `mx.compile` keeps the
choice of the call that traced it. A first use inside such a trace is fine: MLX evaluates arrays there that do not
depend on the traced inputs, and a self-test's do not.
"""

import contextlib
import contextvars
import os

import mlx.core as mx

from mlx_cosyh3.errors import CosyH3Error, nearest
from mlx_cosyh3.kernels import _trust

NAMES = ("softmax", "int8_matmul", "h3_step", "norm_linear")
VARIABLE = "MLX_COSYH3_KERNELS"

_override = contextvars.ContextVar("mlx_cosyh3_kernels", default=None)
_used = contextvars.ContextVar("mlx_cosyh3_kernels_used", default=None)
_environment = None  # the names that VARIABLE allows, once it has been read


@contextlib.contextmanager
def use_kernels(choice):
    """`with use_kernels("softmax,h3_step"):` lets only these kernels run; "0" none, "1" all.

    It holds for the thread or task that enters it, and for the streams made within. Raises CosyH3Error."""
    token = _override.set(parse(choice, "use_kernels"))
    try:
        yield
    finally:
        _override.reset(token)


def allowed():
    """The names of the kernels that the user lets run. Raises CosyH3Error for a bad value in the environment."""
    global _environment
    override = _override.get()
    if override is not None:
        return override
    if _environment is None:  # looking into os.environ takes longer than all the rest of `usable`
        _environment = parse(os.environ.get(VARIABLE) or "1", VARIABLE)
    return _environment


def parse(choice, where):
    """The names that `choice` ("0", "1", or names with commas) lets run; `where` it was given, for the error."""
    valid = f"use 0 (none), 1 (all), or some of {','.join(NAMES)}"
    names = tuple(n.strip() for n in choice.split(",")) if isinstance(choice, str) else ()
    if names in (("0",), ("1",)):
        return NAMES if names == ("1",) else ()
    if not any(names):
        raise CosyH3Error(f"{where}: {choice!r} names no kernel; {valid}")
    for name in names:
        if name not in NAMES:
            raise CosyH3Error(f"{where}: there is no kernel {name!r}{nearest(name, NAMES)}; {valid}")
    return names


def usable(kernel, name, variant, stream, selftest):
    """Whether `variant` of GpuKernel `kernel`, part of operation `name`, may run on `stream` (None: the default).

    variant      hashable: what the kernel is compiled for; its str() goes into reports
    selftest()   -> worst error / allowed error of this very variant on a small input; below 1 it passes. It evaluates
                 what it computes, draws with explicit keys only, and may call the operation itself"""
    if name not in allowed() or not on_gpu(stream):
        return False
    passed = _trust.known(kernel, variant)
    if passed is None:
        token = _used.set(None)  # what a self-test uses is nobody's business
        try:
            with contextlib.nullcontext() if stream is None else mx.stream(stream):
                passed = _trust.first_use(kernel, name, variant, selftest)
        finally:
            _used.reset(token)
    used = _used.get()
    if passed and used is not None:
        used.add((name, kernel.name, str(variant)))
    return passed


def on_gpu(stream=None):
    """Whether `stream` (None: the default device; a Stream, Device or DeviceType) runs kernels: a Metal or CUDA GPU."""
    if stream is None:
        stream = mx.default_device()
    elif isinstance(stream, mx.Stream):
        stream = stream.device
    device = stream.type if isinstance(stream, mx.Device) else stream
    return device == mx.gpu and (mx.metal.is_available() or mx.cuda.is_available())


@contextlib.contextmanager
def watch():
    """`with watch() as used:` collects (operation, kernel, variant) of each kernel that runs in this thread."""
    used = set()
    token = _used.set(used)
    try:
        yield used
    finally:
        _used.reset(token)
