"""Seeded bugs: each edit of a sound kernel is caught by its kind and at its line, and the sound kernel passes."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest

from . import mslemu

if mslemu.missing():
    pytest.skip(f"Metal emulator: {mslemu.missing()}", allow_module_level=True)

N = 100  # columns: no multiple of anything

ROWS = """
    uint t = thread_index_in_threadgroup, row = threadgroup_position_in_grid.y, lane = thread_index_in_simdgroup;
    uint sg = simdgroup_index_in_threadgroup, step = threads_per_threadgroup.x, n = N;
    threadgroup float part[32];
    float s = 0;
    for (uint i = t; i < n; i += step) s += x[row * n + i];  // load
    s = simd_sum(s);
    if (lane == 0) part[sg] = s;
    threadgroup_barrier(mem_flags::mem_threadgroup);  // first
    if (sg == 0) {
        float v = lane < simdgroups_per_threadgroup ? part[lane] : 0;
        v = simd_sum(v);
        if (lane == 0) part[0] = v;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // second
    float total = part[0];
    for (uint i = t; i < n; i += step) y[row * n + i] = x[row * n + i] - total;  // store
"""

NEIGHBOUR = """
    uint t = thread_index_in_threadgroup, lane = thread_index_in_simdgroup;
    threadgroup float a[64];
    a[t] = x[t];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    float next = a[t / 32 * 32 + (lane + 1) % 32];
    y[t] = next;
    threadgroup_barrier(mem_flags::mem_device);
    float back = y[63 - t];
    threadgroup_barrier(mem_flags::mem_device);
    y[t] = back;
"""

MATRIX = """
    uint lane = thread_index_in_simdgroup;
    simdgroup_float8x8 a, b, c = simdgroup_float8x8(0.0f);
    simdgroup_load(a, x, 8);
    simdgroup_load(b, x + 64, 8);
    simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_store(c, y, 8);
    if (lane == 99) y[0] = 0;
"""

COUNT = """
    uint i = thread_position_in_grid.x;
    atomic_fetch_add_explicit(&y[uint(x[i]) % 4], 1, memory_order_relaxed);
"""

INTEGERS = """
    uint i = thread_position_in_grid.x;
    int v = int(x[i]), d = v + 1;
    int table[4] = {1, 2, 3, 4};
    int k = v & 3;
    y[i] = table[k] + 100 / d + (1 << (v & 7)) + (v * v) % 1000;
"""

FOUR = """
    uint i = thread_position_in_grid.x;
    float4 v = *(const device float4*)(x + 4 * i);
    *(device float4*)(y + 4 * i) = v * 2.0f;
"""


@dataclass
class Base:
    """A sound kernel and a call of it."""

    source: str
    x: np.ndarray
    shape: tuple
    dtype: mx.Dtype
    grid: tuple
    threadgroup: tuple
    want: object  # of x
    more: dict = field(default_factory=dict)

    def kernel(self, source, name="k"):
        return mslemu.metal_kernel(
            name=name,
            input_names=["x"],
            output_names=["y"],
            source=source,
            atomic_outputs="init_value" in self.more,
        )

    def run(self, source, **changes):
        call = dict(
            inputs=[mx.array(self.x)],
            output_shapes=[self.shape],
            output_dtypes=[self.dtype],
            grid=self.grid,
            threadgroup=self.threadgroup,
            template=[("N", N)],
            **self.more,
        )
        return np.array(self.kernel(source)(**{**call, **changes})[0])


def _rows(x):
    return x - x.sum(1, keepdims=True)


def _integers(x):
    v = x.astype(np.int64)
    return (v & 3) + 1 + 100 // (v + 1) + (1 << (v & 7)) + v * v % 1000


_r = np.random.default_rng(0)
_f32 = lambda *shape: _r.standard_normal(shape).astype(np.float32)  # noqa: E731
BASES = {
    "rows": Base(ROWS, _f32(3, N), (3, N), mx.float32, (96, 3, 1), (96, 1, 1), _rows),
    "neighbour": Base(
        NEIGHBOUR,
        _f32(64),
        (64,),
        mx.float32,
        (64, 1, 1),
        (64, 1, 1),
        lambda x: np.roll(x.reshape(2, 32), -1, 1).reshape(-1)[::-1],
    ),
    "matrix": Base(MATRIX, _f32(2, 8, 8), (8, 8), mx.float32, (32, 1, 1), (32, 1, 1), lambda x: x[0] @ x[1]),
    "count": Base(
        COUNT,
        np.arange(50, dtype=np.float32),
        (4,),
        mx.int32,
        (50, 1, 1),
        (32, 1, 1),
        lambda x: np.bincount(x.astype(int) % 4),
        {"init_value": 0},
    ),
    "integers": Base(
        INTEGERS, np.arange(40, dtype=np.float32), (40,), mx.int32, (40, 1, 1), (40, 1, 1), _integers
    ),
    "four": Base(FOUR, _f32(40), (40,), mx.float32, (10, 1, 1), (10, 1, 1), lambda x: 2 * x),
}

FIRST, SECOND = (f"threadgroup_barrier(mem_flags::mem_threadgroup);  // {w}" for w in ("first", "second"))
TOTAL, MEET = "float total = part[0];", "simdgroup_barrier(mem_flags::mem_threadgroup);"
GUARD = "for (uint i = t; i < n; i += step)"

# Base, kind, what is replaced, by what. The finding's line must be the edited one, or else the one named last.
BUGS = [
    ("rows", "race-threadgroup", FIRST, "", "part[lane] : 0"),
    ("rows", "race-threadgroup", SECOND, "", "float total"),
    ("rows", "race-threadgroup", FIRST, FIRST.replace("mem_threadgroup", "mem_none"), "part[lane] : 0"),
    ("rows", "race-threadgroup", FIRST, FIRST.replace("mem_threadgroup", "mem_device"), "part[lane] : 0"),
    (
        "rows",
        "race-threadgroup",
        FIRST,
        FIRST.replace("threadgroup_barrier", "simdgroup_barrier"),
        "part[lane] : 0",
    ),
    ("rows", "race-simdgroup", "if (lane == 0) part[sg] = s;", "part[sg] = s;"),
    ("rows", "race-simdgroup", "if (lane == 0) part[0] = v;", "if (lane < 2) part[0] = v;"),
    ("rows", "race-device", GUARD + " y", "for (uint i = t; i <= n; i += step) y"),
    ("rows", "race-device", "y[row * n + i] = ", "y[row * n + i / 2] = "),
    ("rows", "race-device", "y[row * n + i] = ", "y[i] = "),
    ("rows", "oob-device", GUARD + " s", "for (uint i = t; i <= n; i += step) s"),
    ("rows", "oob-device", "s += x[row * n + i]", "s += x[row * n + i - 1]"),
    ("rows", "oob-device", "s += x[row * n + i]", "s += x[int(row * n + i) - 200000]"),
    ("rows", "oob-device", "y[row * n + i] = ", "y[row * n + i + 40 * n] = "),
    ("rows", "oob-device", "n = N;", "n = x_shape[1] + x_shape[3];"),
    ("rows", "oob-threadgroup", "threadgroup float part[32];", "threadgroup float part[2];", "part[sg] = s;"),
    ("rows", "oob-threadgroup", TOTAL, "float total = part[int(t) - 95];"),
    ("rows", "oob-threadgroup", TOTAL, "threadgroup float* p = part; float total = p[32 * (t + 1)];"),
    ("rows", "uninit-threadgroup-read", "lane < simdgroups_per_threadgroup ? part[lane] : 0", "part[lane]"),
    ("rows", "uninit-threadgroup-read", TOTAL, "threadgroup float other[4]; float total = part[0] + other[1];"),
    ("rows", "uninit-device-read", "] = x[row * n + i] - total;", "] += x[row * n + i] - total;"),
    ("rows", "uninit-local-read", "float s = 0;", "float s;"),
    ("rows", "unwritten-output", "i += step) y", "i += 2 * step) y", None),
    ("rows", "unwritten-output", "i < n; i += step) y", "i < n - 1; i += step) y", None),
    ("rows", "barrier-divergence", "float s = 0;", "float s = 0; if (t >= n - 10) return;", "// first"),
    ("rows", "barrier-divergence", FIRST, "if (sg == 0) " + FIRST),
    ("rows", "barrier-divergence", FIRST, f"if (sg == 0) {FIRST}\n else {FIRST}"),
    ("rows", "barrier-divergence", FIRST, "for (uint k = 0; k <= sg; k++) " + FIRST),
    ("rows", "simd-op-divergent", "s = simd_sum(s);", "if (lane < 16) s = simd_sum(s);"),
    ("rows", "simd-op-exited-lanes", "float s = 0;", "float s = 0; if (lane == 31) return;", "s = simd_sum(s);"),
    ("rows", "shuffle-inactive-lane", TOTAL, "float total = simd_shuffle(part[0], ushort(32));"),
    ("rows", "write-to-input", TOTAL, TOTAL + " ((device float*)x)[t] = 0;"),
    ("rows", "wild-access", TOTAL, "float total = *(const device float*)(ulong(4096 * (t + 1)));"),
    ("rows", "wild-access", TOTAL, "const device float* p = nullptr; float total = p[t & 1];"),
    ("rows", "wild-access", TOTAL, "float total = x[(long)1 << 41];"),
    (
        "rows",
        "threadgroup-memory-limit",
        "threadgroup float part[32];",
        "threadgroup float part[32], big[8192]; big[t] = 0;",
    ),
    ("rows", "hang", TOTAL, TOTAL + " while (part[0] == total) total = part[0];"),
    ("rows", "hang", TOTAL, TOTAL + " while (true) " + SECOND, None),
    ("rows", "hang", TOTAL, TOTAL + " while (total < 3e38f) total = total * 0.5f + total * 0.5f;"),
    ("neighbour", "race-simdgroup", MEET, "", "float next"),
    ("neighbour", "race-simdgroup", MEET, "simdgroup_barrier(mem_flags::mem_none);", "float next"),
    ("neighbour", "race-threadgroup", "a[t / 32 * 32 + (lane + 1) % 32]", "a[(t + 1) % 64]"),
    (
        "neighbour",
        "race-device",
        "mem_flags::mem_device);\n    float back",
        "mem_flags::mem_threadgroup);\n    float back",
        "float back",
    ),
    (
        "neighbour",
        "race-device",
        "threadgroup_barrier(mem_flags::mem_device);\n    y[t] = back",
        "\n    y[t] = back",
        "y[t] = back",
    ),
    (
        "neighbour",
        "barrier-divergence",
        "simdgroup_barrier(mem_flags",
        "if (lane < 5) simdgroup_barrier(mem_flags",
    ),
    (
        "matrix",
        "simdgroup-matrix-partial",
        "simdgroup_multiply_accumulate",
        "if (lane < 31) simdgroup_multiply_accumulate",
    ),
    ("matrix", "simdgroup-matrix-partial", "simdgroup_load(a", "if (lane % 2) simdgroup_load(a"),
    ("matrix", "oob-device", "simdgroup_load(b, x + 64, 8)", "simdgroup_load(b, x + 64, 9)"),
    ("matrix", "race-device", "simdgroup_store(c, y, 8);", "simdgroup_store(c, y, 4);"),
    ("count", "race-device", "memory_order_relaxed);", "memory_order_relaxed); ((device int*)y)[0] += 1;"),
    ("count", "oob-device", "% 4]", "% 5]"),
    ("integers", "undefined-behaviour", "d = v + 1;", "d = v - 7;", "100 / d"),
    ("integers", "undefined-behaviour", "(1 << (v & 7))", "(1 << v)"),
    ("integers", "undefined-behaviour", "(v * v)", "((v << 24) * v)"),
    ("integers", "undefined-behaviour", "int(x[i])", "int(x[i] * 1e9f)"),
    ("integers", "oob-array", "int k = v & 3;", "int k = v & 7;", "table[k]"),
    ("four", "misaligned", "(x + 4 * i);", "(x + 4 * i + (i == 3));"),
    ("four", "misaligned", "(y + 4 * i) =", "(y + 4 * i - (i == 9)) ="),
]


@pytest.mark.parametrize("contract", ["off", "fast"])
@pytest.mark.parametrize("name", BASES)
def test_sound(name, contract):
    base = BASES[name]
    for schedule in mslemu.SCHEDULES:
        with mslemu.settings(contract=contract, **schedule):
            assert np.abs(base.run(base.source) - base.want(base.x)).max() < 2e-5


@pytest.mark.parametrize("number", range(len(BUGS)), ids=lambda i: f"{i}-{BUGS[i][0]}-{BUGS[i][1]}")
def test_bug(number):
    name, kind, old, new, *other = BUGS[number]
    base = BASES[name]
    assert base.source.count(old) == 1
    source = base.source.replace(old, new)
    with mslemu.settings(watchdog=0.5), pytest.raises(mslemu.MslError) as error:
        base.run(source)
    assert kind in error.value.kinds, error.value
    if other == [None]:
        return
    lines = error.value.text.splitlines()
    part = other[0] if other else new.strip().splitlines()[0]
    findings = [f for f in error.value.findings if f.kind == kind]
    assert all(f.source == lines[f.line - 1] for f in findings if f.line)
    assert any(part in f.source or part in lines[f.other_line - 1] for f in findings), error.value
    if kind not in ("uninit-local-read", "threadgroup-memory-limit"):
        assert all(len(f.thread) == 3 and len(f.group) == 3 for f in findings)
    if kind.startswith("race"):
        assert all(
            f.other_thread is not None and (f.other_thread, f.other_group) != (f.thread, f.group) for f in findings
        )


@pytest.mark.parametrize("schedule", mslemu.SCHEDULES, ids=lambda s: s["order"])
def test_races_are_found_in_every_schedule(schedule):
    races = [b for b in BUGS if b[1].startswith("race")]
    with mslemu.settings(**schedule):
        for name, kind, old, new, *_ in races:
            with pytest.raises(mslemu.MslError) as error:
                BASES[name].run(BASES[name].source.replace(old, new))
            assert any(k.startswith(("race", "oob")) for k in error.value.kinds), (kind, old, new)


def test_limits_of_a_dispatch():
    base = BASES["rows"]
    with pytest.raises(mslemu.MslError, match="limit is 1024") as error:
        base.run(base.source, grid=(2048, 3, 1), threadgroup=(1025, 1, 1))
    assert error.value.kind == "threadgroup-size-limit"
    base.run(base.source, threadgroup=(1025, 1, 1))  # clamped to the grid, as MLX does
    with pytest.raises(mslemu.MslError) as error:  # the grid counts threads, not threadgroups
        base.run(base.source, grid=(1, 1, 1))
    assert error.value.kinds == {"unwritten-output"}
    with pytest.raises(mslemu.MslError, match="three positive"):
        base.run(base.source, grid=(0, 1, 1))
    names = [f"x{i}" for i in range(31)]
    many = mslemu.metal_kernel("many", names, ["y"], "y[thread_position_in_grid.x] = x0[0];")
    with pytest.raises(mslemu.MslError, match="32 buffers"):
        many(
            inputs=[mx.zeros((9,))] * 31,
            output_shapes=[(1,)],
            output_dtypes=[mx.float32],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )


def test_exactly_32_kib_pass():
    source = ROWS.replace("part[32];", "part[32], big[8160]; big[t] = 0;")
    BASES["rows"].run(source)


def test_allow_names_the_line():
    source = ROWS.replace("if (lane == 0) part[sg] = s;", "part[sg] = s;")
    with mslemu.settings(allow={"race-simdgroup": "part[sg] = s;"}):
        BASES["rows"].run(source)
    with mslemu.settings(allow={"race-simdgroup": "part[0]"}), pytest.raises(mslemu.MslError):
        BASES["rows"].run(source)


def test_a_crash_is_a_finding():
    deep = "int down(int k) { volatile int a[64]; a[k % 64] = k; return k < 0 ? 0 : down(k + 1) + a[k % 64]; }"
    kernel = mslemu.metal_kernel(
        "k", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = down(int(x[0]));", deep
    )
    call = dict(output_shapes=[(1,)], output_dtypes=[mx.float32], grid=(1, 1, 1), threadgroup=(1, 1, 1))
    for check in ("full", "fast"):
        with mslemu.settings(check=check), pytest.raises(mslemu.MslError, match="stack overflow") as error:
            kernel(inputs=[mx.zeros((8,))], **call)
        assert error.value.kind == "crash"
    wild = mslemu.metal_kernel("k", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = x[1u << 31];")
    with mslemu.settings(check="fast"), pytest.raises(mslemu.MslError, match="belongs to no buffer"):
        wild(inputs=[mx.zeros((8,))], **call)
    divided = mslemu.metal_kernel("k", ["x"], ["y"], "y[thread_position_in_grid.x] = 100 / int(x[0]);")
    with mslemu.settings(check="fast"), pytest.raises(mslemu.MslError, match="division by zero"):
        divided(inputs=[mx.zeros((8,))], **call)


def test_threads_of_the_caller_take_turns():
    base = BASES["rows"]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: base.run(base.source), range(8)))
    assert all(np.array_equal(r, results[0]) for r in results)


def test_what_metal_does_not_compile():
    for old, new in [
        (TOTAL, TOTAL + " bfloat16_t b = total;"),  # float to bfloat by itself
        (TOTAL, "float total = std::max(part[0], 1.0f);"),
        (TOTAL, "float total = part[0] + max(int(t), n);"),  # int and uint
        (TOTAL, "float total = expf(part[0]);"),
        (
            TOTAL,
            "float4 v(part[0]); float total = float4(v.xxyx).x;",
        ),  # a swizzle the shim does not know
    ]:
        with pytest.raises(mslemu.MslError) as error:
            BASES["rows"].run(ROWS.replace(old, new))
        assert error.value.kind == "compile-error", new
