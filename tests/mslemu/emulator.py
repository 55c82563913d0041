"""`metal_kernel`: runs a kernel of `mx.fast.metal_kernel` on the CPU and checks every access it makes.

Constructor and call take what MLX's own take. A finding raises MslError. How kernels run is set around the call:

    with settings(order="reverse", contract="fast"):
        y = kernel(inputs=[x], ...)[0]
"""

import contextlib
import contextvars
import ctypes
import functools
import re
import threading
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from . import build, wrapper
from .flops import Flops, total_flops

ORDERS = ("forward", "reverse", "random")
MAX_THREADS = 1024
MAX_BUFFERS = 31


@dataclass(frozen=True)
class Settings:
    order: str = "forward"  # of threadgroups, simdgroups and lanes: forward | reverse | random
    seed: int = 0  # of the random order and of the noise
    contract: str = "off"  # off | fast: may the compiler fuse a * b + c?
    noise: bool = False  # perturb exp and friends by what Metal allows
    check: str = "full"  # full | fast: without any check | count: float operations
    allow: dict = field(default_factory=dict)  # kind -> part of the source line that may do it ("" = any line)
    watchdog: float = 60.0  # seconds of CPU time


_one_at_a_time = threading.Lock()  # the runtime holds one dispatch
_settings = contextvars.ContextVar("mslemu", default=Settings())
SCHEDULES = [{"order": o, "seed": 7} for o in ORDERS]
SWEEP = [{**s, "contract": c} for c in ("off", "fast") for s in SCHEDULES]


@contextlib.contextmanager
def settings(**changes):
    """Run the kernels called inside with other Settings."""
    new = replace(_settings.get(), **changes)
    if new.order not in ORDERS or new.contract not in build.CONTRACT or new.check not in build.MODES:
        raise ValueError(f"no such setting: {changes}")
    token = _settings.set(new)
    try:
        yield new
    finally:
        _settings.reset(token)


@contextlib.contextmanager
def installed():
    """Inside, mx.fast.metal_kernel is the emulator's and mx.metal.is_available() true: for importing modules."""
    saved = mx.fast.metal_kernel, mx.metal.is_available
    mx.fast.metal_kernel, mx.metal.is_available = metal_kernel, lambda: True
    try:
        yield
    finally:
        mx.fast.metal_kernel, mx.metal.is_available = saved


@dataclass
class Finding:
    """One thing that is wrong; `count` is how often it was seen at this line."""

    kind: str
    message: str
    line: int  # of the generated text, 1-based, 0 = unknown
    source: str  # that line
    thread: tuple = None  # in the threadgroup
    group: tuple = None
    other_line: int = 0
    other_thread: tuple = None
    other_group: tuple = None
    count: int = 1

    def __str__(self):
        text = f"{self.kind}: {self.message}\n  kernel line {self.line}: {self.source.strip()}"
        if self.thread is not None:
            text += f"\n  thread {self.thread} of threadgroup {self.group}"
        if self.other_thread is not None:
            text += f"\n  against thread {self.other_thread} of threadgroup {self.other_group}"
            text += f", line {self.other_line}" if self.other_line else ""
        return text + (f"\n  seen {self.count} times" if self.count > 1 else "")


class MslError(RuntimeError):
    """The kernel did something that Metal does not allow. `.findings`, `.kind` (of the first), `.kinds`."""

    def __init__(self, name, findings, text=""):
        self.findings, self.kind, self.kinds = findings, findings[0].kind, {f.kind for f in findings}
        self.text = text
        super().__init__(f"kernel {name}: " + "\n".join(map(str, findings)))


@dataclass
class Traffic:
    """Bytes that the threads of a dispatch read from and wrote to one parameter."""

    read: int
    written: int


@dataclass
class Report:
    """What the last call of a kernel did: the traffic with check="full", the operations with check="count"."""

    buffers: dict  # parameter name -> Traffic
    threadgroup: Traffic
    threadgroup_bytes: int  # allocated by a threadgroup
    barriers: int
    simd_ops: int
    allowed: list  # findings that `allow` let pass
    flops: Flops = None


class _Buffer(ctypes.Structure):
    _fields_ = [
        ("bytes", ctypes.c_uint64),
        ("granule", ctypes.c_uint32),
        ("writable", ctypes.c_uint8),
        ("initialised", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 2),
        ("data", ctypes.c_void_p),
        ("result", ctypes.c_void_p),
        ("read", ctypes.c_uint64),
        ("written", ctypes.c_uint64),
        ("unwritten", ctypes.c_uint64),
        ("first_unwritten", ctypes.c_uint64),
    ]


_Three = ctypes.c_uint32 * 3


class _Finding(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char * 32),
        ("message", ctypes.c_char * 256),
        ("pc", ctypes.c_uint64),
        ("other_pc", ctypes.c_uint64),
        ("line", ctypes.c_uint32),
        ("thread", _Three),
        ("group", _Three),
        ("other_thread", _Three),
        ("other_group", _Three),
        ("has_thread", ctypes.c_uint32),
        ("has_other", ctypes.c_uint32),
        ("other_line", ctypes.c_uint32),
        ("gap", ctypes.c_uint32),
        ("count", ctypes.c_uint64),
    ]


class _Dispatch(ctypes.Structure):
    _fields_ = [
        ("entry", ctypes.c_void_p),
        ("image", ctypes.c_uint64),
        ("image_end", ctypes.c_uint64),
        ("grid", _Three),
        ("threadgroup", _Three),
        ("buffers", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("watchdog", ctypes.c_double),
        ("noise", ctypes.c_uint32),
        ("finding_count", ctypes.c_uint32),
        ("aborted", ctypes.c_uint32),
        ("finer", ctypes.c_uint32),
        ("tg_read", ctypes.c_uint64),
        ("tg_written", ctypes.c_uint64),
        ("tg_bytes", ctypes.c_uint64),
        ("matrix_flops", ctypes.c_uint64),
        ("simd_flops", ctypes.c_uint64),
        ("barriers", ctypes.c_uint64),
        ("simd_ops", ctypes.c_uint64),
        ("buffer", ctypes.POINTER(_Buffer)),
        ("finding", ctypes.POINTER(_Finding)),
        ("hits", ctypes.c_void_p),
    ]


def to_numpy(x):
    """Contiguous numpy array with the bits of `x` (bfloat16 as uint16)."""
    if x.dtype == mx.bfloat16:
        return np.ascontiguousarray(np.array(x.view(mx.uint16)))
    return np.ascontiguousarray(np.array(x))


def to_mlx(bits, dtype, shape):
    """mx.array of `dtype` from its bytes."""
    if dtype == mx.bfloat16:
        return mx.array(bits.view(np.uint16).reshape(shape)).view(mx.bfloat16)
    name = "bool" if dtype == mx.bool_ else str(dtype).split(".")[-1]
    return mx.array(bits.view(np.dtype(name)).reshape(shape))


def _as_array(x):
    if isinstance(x, mx.array):
        return x
    if isinstance(x, np.ndarray):
        return mx.array(x)
    return mx.array(x, dtype=mx.bool_ if isinstance(x, bool) else mx.int32 if isinstance(x, int) else mx.float32)


class metal_kernel:  # noqa: N801 (it stands in for a function of MLX)
    """Stands in for mx.fast.metal_kernel: same arguments, mx.arrays out. `.report` = Report of the last call."""

    def __init__(
        self,
        name,
        input_names,
        output_names,
        source,
        header="",
        ensure_row_contiguous=True,
        atomic_outputs=False,
        compile_options=None,
    ):
        if not output_names:
            raise ValueError("[metal_kernel] Must specify at least one output.")
        self.name, self.source, self.header = name, source, header
        self.input_names, self.output_names = list(input_names), list(output_names)
        self.ensure_row_contiguous, self.atomic_outputs = ensure_row_contiguous, atomic_outputs
        self.fast_math = (compile_options or {}).get("math_mode", "safe") == "fast"
        self.report = None

    def text(self, inputs, output_dtypes, template=None):
        """KernelText of a call with these inputs."""
        if len(inputs) != len(self.input_names):
            raise ValueError(
                f"[metal_kernel] Expected `inputs` to have size {len(self.input_names)} but got {len(inputs)}."
            )
        kinds = [(x.dtype, tuple(x.shape)) for x in map(_as_array, inputs)]
        return wrapper.generate(
            self.name,
            self.input_names,
            self.output_names,
            self.source,
            self.header,
            self.atomic_outputs,
            kinds,
            output_dtypes,
            list(template or []),
        )

    def __call__(
        self,
        *,
        inputs,
        output_shapes,
        output_dtypes,
        grid,
        threadgroup,
        template=None,
        init_value=None,
        verbose=False,
        stream=None,
    ):
        cfg = _settings.get()
        inputs = [_as_array(x) for x in inputs]
        if not len(output_shapes) == len(output_dtypes) == len(self.output_names):
            raise ValueError("[metal_kernel] Expected one output shape and one output dtype per output name.")
        text = self.text(inputs, output_dtypes, template)
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```\n{text.text}\n```")
        grid, threadgroup = tuple(map(int, grid)), tuple(map(int, threadgroup))
        self._check_sizes(text, grid, threadgroup)
        threadgroup = tuple(min(a, b) for a, b in zip(grid, threadgroup))
        code, variables = wrapper.rewrite_threadgroup(text.text)
        try:
            path, warnings = build.compile_kernel(
                code, wrapper.entry_point(text), cfg.check, cfg.contract, self.fast_math
            )
        except build.BuildError as e:
            raise MslError(self.name, [Finding("compile-error", str(e), 0, "")], text.text) from e
        buffers, keep, outputs = self._buffers(text, inputs, output_shapes, output_dtypes, init_value)
        finer = 0
        while True:
            dispatch, found, hits = _run(path, cfg, grid, threadgroup, buffers, finer)
            if not dispatch.finer or finer:
                break
            finer = 1  # an access smaller than an element: again, with shadow cells of a byte
        lines = text.text.splitlines()
        findings = _uninitialised_locals(warnings, lines)
        findings += [_finding(f, path, lines, text, variables) for f in found[: dispatch.finding_count]]
        if not dispatch.aborted and cfg.check == "full":
            findings += self._unwritten(text, buffers, output_shapes, output_dtypes)
        allowed = [f for f in findings if f.kind in cfg.allow and cfg.allow[f.kind] in f.source]
        findings = [f for f in findings if f not in allowed]
        if findings:
            raise MslError(self.name, findings, text.text)
        traffic = {p.name: Traffic(b.read, b.written) for p, b in zip(text.parameters, buffers)}
        self.report = Report(
            traffic,
            Traffic(dispatch.tg_read, dispatch.tg_written),
            dispatch.tg_bytes,
            dispatch.barriers,
            dispatch.simd_ops,
            allowed,
        )
        if hits is not None:
            runs = {int(at): int(hits[at]) for at in np.flatnonzero(hits)}
            self.report.flops = total_flops(path, runs, dispatch.matrix_flops, dispatch.simd_flops)
        return [to_mlx(bits, d, tuple(s)) for bits, d, s in zip(outputs, output_dtypes, output_shapes)]

    def _check_sizes(self, text, grid, threadgroup):
        if len(grid) != 3 or len(threadgroup) != 3 or min(grid) < 1 or min(threadgroup) < 1:
            problem = (
                "bad-grid",
                f"grid {grid} and threadgroup {threadgroup} must be three positive numbers each",
            )
        elif np.prod([min(a, b) for a, b in zip(grid, threadgroup)]) > MAX_THREADS:
            problem = (
                "threadgroup-size-limit",
                f"a threadgroup of {threadgroup} threads, the limit is {MAX_THREADS}",
            )
        elif len(text.parameters) > MAX_BUFFERS:
            problem = ("buffer-limit", f"{len(text.parameters)} buffers, the limit is {MAX_BUFFERS}")
        else:
            return
        raise MslError(self.name, [Finding(*problem, 0, "")], text.text)

    def _buffers(self, text, inputs, output_shapes, output_dtypes, init_value):
        """(_Buffer array, what it points to, the outputs' bytes)"""
        array = (_Buffer * len(text.parameters))()
        keep, outputs = [], []
        arrays = [_strided(x, self.ensure_row_contiguous) for x in inputs]
        for p, b in zip(text.parameters, array):
            if p.role == "output":
                dtype, shape = output_dtypes[p.index], tuple(output_shapes[p.index])
                count = int(np.prod(shape, dtype=np.int64))
                bits = np.zeros(count * dtype.size, np.uint8)
                b.writable, b.initialised, b.granule = 1, init_value is not None, min(dtype.size, 4)
                if init_value is not None:
                    keep.append(to_numpy(mx.full(shape, init_value, dtype=dtype)))
                    b.data = keep[-1].ctypes.data
                outputs.append(bits)
                b.bytes, b.result = bits.nbytes, bits.ctypes.data
                continue
            data, strides = arrays[p.index]
            shape = tuple(inputs[p.index].shape)
            if p.role != "input":
                values = {"shape": np.array(shape, np.int32), "strides": np.array(strides, np.int64)}
                data = values.get(p.role, np.array([len(shape)], np.int32))
            keep.append(data)
            b.bytes, b.granule, b.data = data.nbytes, 1, data.ctypes.data
        return array, keep, outputs

    def _unwritten(self, text, buffers, shapes, dtypes):
        found = []
        for p, b in zip(text.parameters, buffers):
            if b.unwritten:
                first = np.unravel_index(b.first_unwritten // dtypes[p.index].size, shapes[p.index] or (1,))
                where = tuple(int(i) for i in first)
                found.append(
                    Finding(
                        "unwritten-output",
                        f"{b.unwritten} elements of {p.name} were never written, first {where}",
                        0,
                        "",
                    )
                )
        return found


def _strided(x, contiguous):
    """(memory, strides in elements) of an input as the kernel gets it."""
    if contiguous or x.size == 0:
        data = to_numpy(x)
        return data.reshape(-1), [s // max(data.itemsize, 1) for s in data.strides]
    mx.eval(x)
    view = np.array(x.view(mx.uint16), copy=False) if x.dtype == mx.bfloat16 else np.array(x, copy=False)
    strides = [s // view.itemsize for s in view.strides]
    if min(strides, default=0) < 0:
        raise ValueError("inputs with negative strides need ensure_row_contiguous=True here")
    span = 1 + sum((n - 1) * s for n, s in zip(view.shape, strides))
    return np.lib.stride_tricks.as_strided(view, (span,), (view.itemsize,)).copy(), strides


def _run(path, cfg, grid, threadgroup, buffers, finer):
    runtime = ctypes.CDLL(str(build.runtime()))
    kernel = ctypes.CDLL(str(path))
    start, end = image_of(path)
    found = (_Finding * 64)()
    dispatch = _Dispatch(
        entry=ctypes.cast(kernel.msl_entry, ctypes.c_void_p).value,
        image=start,
        image_end=end,
        grid=_Three(*grid),
        threadgroup=_Three(*threadgroup),
        buffers=len(buffers),
        order=ORDERS.index(cfg.order),
        seed=cfg.seed,
        watchdog=cfg.watchdog,
        noise=int(cfg.noise),
        finer=finer,
        buffer=buffers,
        finding=found,
    )
    hits = np.zeros(end - start, np.uint64) if cfg.check == "count" else None
    if hits is not None:
        dispatch.hits = hits.ctypes.data
    for b in buffers:
        b.read = b.written = 0
    with _one_at_a_time:
        failed = runtime.msl_run(ctypes.byref(dispatch))
    if failed:
        raise MemoryError("the emulator could not map its memory")
    return dispatch, found, hits


@functools.lru_cache
def image_of(path):
    """Where a loaded shared object lies in memory."""
    spans = [line.split()[0].split("-") for line in open("/proc/self/maps") if line.rstrip().endswith(str(path))]
    return min(int(a, 16) for a, _ in spans), max(int(b, 16) for _, b in spans)


def _finding(f, path, lines, text, variables):
    source = lambda n: lines[n - 1] if 0 < n <= len(lines) else ""  # noqa: E731
    line = f.line or (build.kernel_line(str(path), f.pc) if f.pc else 0)
    names = {"variable": [name for name, _ in variables], "parameter": [p.name for p in text.parameters]}
    message = re.sub(
        r"(variable|parameter) (\d+)", lambda m: names[m.group(1)][int(m.group(2))], f.message.decode()
    )
    found = Finding(f.kind.decode(), message, line, source(line), count=f.count)
    if f.has_thread:
        found.thread, found.group = tuple(f.thread), tuple(f.group)
    if f.has_other:
        found.other_thread, found.other_group = tuple(f.other_thread), tuple(f.other_group)
        found.other_line = f.other_line or (build.kernel_line(str(path), f.other_pc) if f.other_pc else 0)
    return found


def _uninitialised_locals(warnings, lines):
    """What g++ says of local variables; elsewhere their bytes are 0xfe, which a result seldom survives."""
    found, at = [], rf"^{re.escape(build.KERNEL)}:(\d+):\d+: "
    for part in re.split(r"(?=^\S+: warning: )", warnings, flags=re.M):
        told = re.search(r"warning: (.*?) (is|may be) used uninitialized", part)
        place = re.search(
            at + "(?:warning|note: .* declared here)", part, flags=re.M
        )  # used, or declared, in the kernel
        if told and place:
            line = int(place.group(1))
            message = f"{told.group(1)} {told.group(2)} used before it has a value"
            found.append(Finding("uninit-local-read", message, line, lines[line - 1]))
    return found
