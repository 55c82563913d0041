"""What the emulator computes: Metal's operations against numpy, counters, schedules, rounding and noise."""

import mlx.core as mx
import numpy as np
import pytest

from . import mslemu

if mslemu.missing():
    pytest.skip(f"Metal emulator: {mslemu.missing()}", allow_module_level=True)

GID = "uint i = thread_position_in_grid.x; uint lane = thread_index_in_simdgroup;\n"
LANES = np.arange(64) % 32
X = (np.random.default_rng(0).integers(-5, 6, 64)).astype(np.float32)
V = X.reshape(2, 32)


def run(body, inputs, shape, dtype=mx.float32, grid=None, threadgroup=None, header="", names="abcdefg", **more):
    kernel = mslemu.metal_kernel("k", list(names[: len(inputs)]), ["o"], GID + body, header=header)
    n = grid or (int(np.prod(shape)), 1, 1)
    out = kernel(
        inputs=[mx.array(x) if isinstance(x, np.ndarray) else x for x in inputs],
        output_shapes=[shape],
        output_dtypes=[dtype],
        grid=n,
        threadgroup=threadgroup or n,
        **more,
    )[0]
    run.report = kernel.report
    return np.array(out.astype(mx.float32) if dtype == mx.bfloat16 else out)


def _each(f):
    return np.concatenate([f(v) for v in V])


SIMD = {
    "simd_sum(a[i])": _each(lambda v: np.full(32, v.sum())),
    "simd_max(a[i])": _each(lambda v: np.full(32, v.max())),
    "simd_min(a[i])": _each(lambda v: np.full(32, v.min())),
    "simd_product(a[i] / 4)": _each(lambda v: np.full(32, np.prod(v / 4))),
    "simd_or(int(a[i]) + 5)": _each(lambda v: np.full(32, np.bitwise_or.reduce(v.astype(int) + 5))),
    "simd_and(int(a[i]) | 9)": _each(lambda v: np.full(32, np.bitwise_and.reduce(v.astype(int) | 9))),
    "simd_xor(int(a[i]))": _each(lambda v: np.full(32, np.bitwise_xor.reduce(v.astype(int)))),
    "simd_prefix_inclusive_sum(a[i])": _each(np.cumsum),
    "simd_prefix_exclusive_sum(a[i])": _each(lambda v: np.cumsum(v) - v),
    "simd_shuffle(a[i], ushort(31 - lane))": _each(lambda v: v[::-1]),
    "simd_shuffle_xor(a[i], 5)": _each(lambda v: v[np.arange(32) ^ 5]),
    "simd_shuffle_up(a[i], 3)": _each(lambda v: np.concatenate([v[:3], v[:-3]])),
    "simd_shuffle_down(a[i], 3)": _each(lambda v: np.concatenate([v[3:], v[-3:]])),
    "simd_shuffle_and_fill_up(a[i], 9.0f, 3)": _each(lambda v: np.concatenate([np.full(3, 9), v[:-3]])),
    "simd_shuffle_and_fill_down(a[i], 9.0f, 3)": _each(lambda v: np.concatenate([v[3:], np.full(3, 9)])),
    "simd_shuffle_rotate_down(a[i], 4)": _each(lambda v: np.roll(v, -4)),
    "simd_shuffle_rotate_up(a[i], 4)": _each(lambda v: np.roll(v, 4)),
    "simd_broadcast(a[i], 7)": _each(lambda v: np.full(32, v[7])),
    "simd_broadcast_first(a[i])": _each(lambda v: np.full(32, v[0])),
    "simd_any(a[i] > 4)": _each(lambda v: np.full(32, (v > 4).any())),
    "simd_all(a[i] > -6)": np.ones(64),
    "simd_is_first()": LANES == 0,
    "popcount(uint((ulong)simd_ballot(a[i] > 0)))": _each(lambda v: np.full(32, (v > 0).sum())),
    "quad_sum(a[i])": np.repeat(X.reshape(-1, 4).sum(1), 4),
    "quad_shuffle_xor(a[i], 1)": X.reshape(-1, 2)[:, ::-1].reshape(-1),
    "quad_broadcast(a[i], 2)": np.repeat(X.reshape(-1, 4)[:, 2], 4),
}


def test_simd_operations():
    body = "".join(f"o[{64 * k} + i] = float({op});\n" for k, op in enumerate(SIMD))
    for schedule in mslemu.SCHEDULES:
        with mslemu.settings(**schedule):
            got = run(body, [X], (len(SIMD), 64), grid=(64, 1, 1))
        for row, (op, want) in zip(got, SIMD.items()):
            np.testing.assert_allclose(row, want, rtol=1e-6, err_msg=op)


def test_simd_operations_of_vectors_and_small_types():
    body = """
        float2 v = simd_sum(float2(a[i], 1));
        half h = simd_max(half(a[i]));
        char c = simd_min(char(a[i]));
        bfloat16_t b = simd_shuffle_xor(bfloat16_t(a[i]), 1);
        o[i] = v.x + 1000 * v.y + float(h) * 0.5f + float(c) * 0.25f + float(b) * 0.125f;
    """
    want = _each(lambda v: v.sum() + 32000 + v.max() / 2 + v.min() / 4 + v[np.arange(32) ^ 1] / 8)
    np.testing.assert_array_equal(run(body, [X], (64,)), want.astype(np.float32))


def test_vectors():
    body = """
        float4 v = float4(a[0], a[1], a[2], a[3]);
        float4 w = v.wzyx;
        w.xy = v.zw + float2(1, 2);
        uchar4 u = uchar4(v);
        half4 h = half4(v) * half(2);
        float3 p = v.xyz;
        char4 q = as_type<char4>(as_type<uint>(u));
        int4 k = int4(q) * int4(1, 2, 3, 4);
        float r[8] = {w.x, w.w, float(u.y), float(h.z), dot(p, p), metal::length(float2(3, 4)), float(k.w),
                      float(any(v > 3.5f))};
        o[i] = r[i];
    """
    got = run(body, [np.arange(1, 9, dtype=np.float32)], (8,))
    np.testing.assert_array_equal(got, [4, 1, 2, 6, 14, 5, 16, 1])


def test_half_and_bfloat_round_after_each_operation():
    r = np.random.default_rng(1)
    a, b = r.standard_normal((2, 256)).astype(np.float16)
    got = run("o[i] = a[i] * b[i] + a[i] - b[i] * a[i];", [a, b], (256,), mx.float16, threadgroup=(64, 1, 1))
    np.testing.assert_array_equal(got, a * b + a - b * a)
    x, y = mx.array(a).astype(mx.bfloat16), mx.array(b).astype(mx.bfloat16)
    got = run("o[i] = a[i] * b[i] + a[i];", [x, y], (256,), mx.bfloat16, threadgroup=(64, 1, 1))
    np.testing.assert_array_equal(got, np.array((x * y + x).astype(mx.float32)))
    every = mx.arange(65536).astype(mx.uint16).view(mx.float16)
    got = run("o[i] = bfloat16_t(float(a[i]));", [every], (65536,), mx.bfloat16, threadgroup=(256, 1, 1))
    np.testing.assert_array_equal(got, np.array(every.astype(mx.bfloat16).astype(mx.float32)))


def test_literals_are_float():
    got = run("o[i] = a[i] * 0.1 + 1e-3;", [X], (64,))
    np.testing.assert_array_equal(got, X * np.float32(0.1) + np.float32(1e-3))


def test_contraction():
    a = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    body = "o[i] = a[i] * a[i] - b[i];"
    square = a * a
    assert np.all(run(body, [a, square], (64,)) == 0)
    with mslemu.settings(contract="fast"):
        fused = run(body, [a, square], (64,))
    np.testing.assert_allclose(fused, a.astype(np.float64) ** 2 - square, rtol=1e-6)
    assert np.any(fused != 0)


def _ulps(x, want):
    return np.abs(x.astype(np.float64) - want) / np.spacing(np.abs(want).astype(np.float32)).astype(np.float64)


def test_noise_stays_within_metals_bounds():
    x = np.random.default_rng(3).uniform(-8, 8, 4096).astype(np.float32)
    x64 = x.astype(np.float64)
    cases = {
        "metal::precise::exp(a[i])": (np.exp(x64), 4),
        "metal::fast::exp(a[i])": (np.exp(x64), 3 + np.floor(np.abs(2 * x64))),
        "exp(a[i])": (np.exp(x64), 4),
        "metal::rsqrt(abs(a[i]))": (1 / np.sqrt(np.abs(x64)), 1),
        "metal::fast::log(abs(a[i]) + 2)": (np.log(np.float32(np.abs(x) + np.float32(2)).astype(np.float64)), 3),
    }
    call = dict(inputs=[x], shape=(4096,), threadgroup=(256, 1, 1))
    for op, (want, bound) in cases.items():
        plain = run(f"o[i] = {op};", **call)
        assert np.all(_ulps(plain, want) <= 1), op
        with mslemu.settings(noise=True, seed=1):
            noisy, again = run(f"o[i] = {op};", **call), run(f"o[i] = {op};", **call)
        with mslemu.settings(noise=True, seed=2):
            other = run(f"o[i] = {op};", **call)
        assert np.array_equal(noisy, again)
        assert np.all(_ulps(noisy, want) <= bound + 1), op
        if "rsqrt" not in op:
            assert np.any(noisy != plain) and np.any(noisy != other), op
    with mslemu.settings(noise=True):
        assert np.array_equal(
            run("o[i] = a[i] * 2 + sqrt(abs(a[i]));", **call), x * 2 + np.sqrt(np.abs(x))
        )  # exact on Metal, too
        assert run("o[i] = metal::fast::exp(a[i]);", [np.array([-np.inf], np.float32)], (1,))[0] == 0


def test_fast_math_mode():
    kernel = mslemu.metal_kernel(
        "k", ["a"], ["o"], GID + "o[i] = tanh(a[i]);", compile_options={"math_mode": "fast"}
    )
    call = dict(
        inputs=[mx.full((8,), 100.0)],
        output_shapes=[(8,)],
        output_dtypes=[mx.float32],
        grid=(8, 1, 1),
        threadgroup=(8, 1, 1),
    )
    assert np.all(np.isnan(np.array(kernel(**call)[0])))  # fast::tanh is (t - 1) / (t + 1), t = exp(2 x)
    kernel.fast_math = False
    assert np.all(np.array(kernel(**call)[0]) == 1)


def test_edge_threadgroups():
    body = """
        o[i] = threads_per_threadgroup.x * 10000 + dispatch_threads_per_threadgroup.x * 100
            + simdgroups_per_threadgroup * 10 + threadgroups_per_grid.x;
    """
    got = run(body, [X], (100,), threadgroup=(48, 1, 1))
    np.testing.assert_array_equal(got, [484823] * 96 + [44813] * 4)
    body = """
        uint3 p = thread_position_in_grid, q = threads_per_grid;
        o[(p.z * q.y + p.y) * q.x + p.x] = thread_position_in_threadgroup.x + 10 * threadgroup_position_in_grid.y
            + 100 * thread_position_in_threadgroup.z + 1000 * thread_index_in_threadgroup;
    """
    got = run(body, [X], (3, 4, 5), grid=(5, 4, 3), threadgroup=(2, 3, 2))
    z, y, x = np.mgrid[:3, :4, :5]
    size = lambda p, n, g: np.minimum(n - p // g * g, g)  # noqa: E731
    index = (z % 2 * size(y, 4, 3) + y % 3) * size(x, 5, 2) + x % 2
    np.testing.assert_array_equal(got, x % 2 + 10 * (y // 3) + 100 * (z % 2) + 1000 * index)


def test_scalars_small_arrays_and_strides():
    m = np.arange(12, dtype=np.float32).reshape(3, 4)
    body = "o[i] = a[i / 3 * a_strides[0] + i % 3 * a_strides[1]] + b + c_ndim * c[0] + a_shape[1] * d;"
    kernel = mslemu.metal_kernel(
        "k",
        ["a", "b", "c", "d"],
        ["o"],
        GID + body,
        ensure_row_contiguous=False,
    )
    call = dict(output_shapes=[(4, 3)], output_dtypes=[mx.float32], grid=(12, 1, 1), threadgroup=(12, 1, 1))
    got = np.array(kernel(inputs=[mx.array(m).T, 2, mx.array([[3.0, 4.0]]), 0.5], **call)[0])
    np.testing.assert_array_equal(got, m.T + 2 + 2 * 3 + 3 * 0.5)
    got = np.array(kernel(inputs=[mx.array(np.repeat(m, 2, 1)).T[::2], 2, mx.array([[3.0, 4.0]]), 0.5], **call)[0])
    np.testing.assert_array_equal(got, m.T + 9.5)


def test_init_value_and_atomics():
    kernel = mslemu.metal_kernel(
        "k",
        ["a"],
        ["o", "p"],
        GID
        + """
        atomic_fetch_add_explicit(&o[uint(a[i]) % 4], a[i], memory_order_relaxed);
        atomic_fetch_max_explicit(&p[0], int(a[i]), memory_order_relaxed);""",
        atomic_outputs=True,
    )
    # one init_value serves both outputs
    x = np.arange(100, dtype=np.float32)
    for schedule in mslemu.SCHEDULES:
        with mslemu.settings(**schedule):
            o, p = kernel(
                inputs=[mx.array(x)],
                output_shapes=[(5,), (1,)],
                output_dtypes=[mx.float32, mx.int32],
                grid=(100, 1, 1),
                threadgroup=(33, 1, 1),
                init_value=1,
            )
        np.testing.assert_array_equal(np.array(o), [*(1 + x[k::4].sum() for k in range(4)), 1])
        assert p.item() == 99


@pytest.mark.parametrize("kind", ["half", "float", "bfloat"])
def test_matrices(kind):
    dtype = {"half": mx.float16, "float": mx.float32, "bfloat": mx.bfloat16}[kind]
    body = f"""
        simdgroup_matrix<{kind}, 8, 8> x, y;
        simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(0.5f), d = simdgroup_float8x8(1.0f);
        simdgroup_load(x, a, 16, ulong2(8, 8));
        simdgroup_load(y, b, 8, ulong2(0, 0), true);
        simdgroup_multiply_accumulate(c, x, y, c);
        simdgroup_multiply(d, d, c);
        simdgroup_store(d, o, 8);
    """
    r = np.random.default_rng(4)
    a, b = r.integers(-8, 9, (16, 16)).astype(np.float32), r.integers(-8, 9, (8, 8)).astype(np.float32)
    got = run(body, [mx.array(a).astype(dtype), mx.array(b).astype(dtype)], (8, 8), grid=(32, 1, 1))
    np.testing.assert_array_equal(got, a[8:, 8:] @ b.T + 0.5)


def test_traffic_is_counted_by_buffer():
    body = """
        threadgroup float t[64];
        t[i] = a[i] + a[0];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = half(t[63 - i] + b[i]) + half(a_shape[0]);
    """
    run(body, [X, X.astype(np.int8)], (64,), mx.float16)
    buffers = {name: (t.read, t.written) for name, t in run.report.buffers.items()}
    assert buffers == {"a": (512, 0), "a_shape": (256, 0), "b": (64, 0), "o": (0, 128)}
    assert (run.report.threadgroup.read, run.report.threadgroup.written, run.report.threadgroup_bytes) == (
        256,
        256,
        256,
    )
    assert run.report.barriers == 1


def test_float_operations_are_counted():
    body = """
        float s = 0;
        for (int j = 0; j < 10; j++) s = s * a[i] + a[j];
        o[i] = metal::fast::exp(s) / a[i] + fma(s, s, s) + simd_sum(s);
    """
    for contract in ("off", "fast"):
        with mslemu.settings(check="count", contract=contract):
            run(body, [np.abs(X) / 9 + 1], (64,))
        flops = run.report.flops
        assert (flops.arithmetic, flops.special, flops.simd, flops.matrix) == (64 * 25, 64, 64, 0)
    body = """
        simdgroup_float8x8 m;
        simdgroup_load(m, a, 8);
        simdgroup_multiply_accumulate(m, m, m, m);
        simdgroup_store(m, o, 8);
    """
    with mslemu.settings(check="count"):
        run(body, [X], (64,), grid=(32, 1, 1))
    assert run.report.flops.matrix == run.report.flops.total == 2 * 8**3


def test_fast_mode_computes_the_same():
    with mslemu.settings(check="fast"):
        got = run("o[i] = simd_sum(a[i]) + a[i];", [X], (64,))
    np.testing.assert_array_equal(got, np.repeat(V.sum(1), 32) + X)


def test_accesses_smaller_than_an_element():
    body = """
        threadgroup uint t[16];
        ((threadgroup uchar*)t)[i] = uchar(i);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        ((device uchar*)o)[i] = ((threadgroup uchar*)t)[63 - i];
    """
    got = run(body, [X], (16,), mx.uint32, grid=(64, 1, 1))
    np.testing.assert_array_equal(got.view(np.uint8), np.arange(64)[::-1])


def test_the_order_changes_what_an_atomic_sees():
    kernel = mslemu.metal_kernel(
        "k",
        ["a"],
        ["n", "p"],
        GID + "int k = atomic_fetch_add_explicit(&n[0], 1, memory_order_relaxed);"
        " atomic_store_explicit(&p[i], k, memory_order_relaxed);",
        atomic_outputs=True,
    )
    seen = []
    for schedule in [*mslemu.SCHEDULES, {"order": "random", "seed": 8}]:
        with mslemu.settings(**schedule):
            out = kernel(
                inputs=[mx.array(X)],
                output_shapes=[(1,), (128,)],
                output_dtypes=[mx.int32] * 2,
                grid=(128, 1, 1),
                threadgroup=(64, 1, 1),
                init_value=0,
            )
        seen.append(np.array(out[1]).tolist())
    assert seen[0] == list(range(128)) and seen[1] == list(range(128))[::-1]
    assert sorted(seen[2]) == list(range(128)) and seen[2] not in (seen[0], seen[1]) and seen[3] != seen[2]


def test_installed_swaps_mlx_and_puts_it_back():
    before = mx.fast.metal_kernel, mx.metal.is_available
    with mslemu.installed():
        assert mx.metal.is_available() and mx.fast.metal_kernel is mslemu.metal_kernel
    assert (mx.fast.metal_kernel, mx.metal.is_available) == before


def test_wrong_settings():
    with pytest.raises(ValueError, match="no such setting"):
        with mslemu.settings(order="sideways"):
            pass
    with pytest.raises(TypeError):
        with mslemu.settings(sideways=1):
            pass
