"""The H3 step's Metal text, run by the emulator (tests/mslemu): right numbers, no finding, lint clean."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.kernels import H3StepParams
from mlx_cosyh3.kernels.h3_step import KERNEL, _arguments, _ones
from tests import mslemu
from tests.test_kernels import step64

DTYPES = {"float32": (mx.float32, 1e-4), "float16": (mx.float16, 2e-3), "bfloat16": (mx.bfloat16, 2e-2)}
SIZES = [1, 31, 32, 33, 63, 64, 65, 255, 257, 896, 1000, 4864, 6761]
# rows, tokens, heads, head_dim, taps / 32, modes / 32
SHAPES = [(1, 1, 1, 1, 2, 1), (1, 1, 33, 1, 2, 1), (2, 3, 5, 1, 2, 1), (3, 2, 3, 4, 2, 1), (1, 2, 2, 8, 2, 1),
          (1, 2, 5, 1, 4, 2), (2, 2, 3, 2, 1, 1)]  # fmt: skip


@pytest.fixture(scope="module")
def kernel():
    return mslemu.metal_kernel(**KERNEL.metal_arguments())


def case(shape, dtype, seed=0):
    B, T, H, hd, taps, modes = shape
    D, N, M = H * hd, 32 * taps, 32 * modes
    rng = np.random.default_rng(seed)
    f = lambda *s, scale=1.0: mx.array((scale * rng.standard_normal(s)).astype(np.float32))  # noqa: E731
    angle = rng.uniform(-3, 3, (H, M))
    dA = mx.array((0.95 * np.stack([np.cos(angle), np.sin(angle)], axis=-1)).astype(np.float32))
    params = H3StepParams(f(D, N, scale=N**-0.5), f(D, N, scale=N**-0.5), f(D), dA,
                          f(H, M, 2, scale=M**-0.5), f(H, M, 2, scale=M**-0.5), f(H))  # fmt: skip
    q, k, v = (f(B, T, D).astype(dtype) for _ in range(3))
    return q, k, v, f(B, D, N), f(B, H, hd, hd, M, 2), params


def numbers(a):
    return np.array(a.astype(mx.float32)).astype(np.float64)


def exact(q, k, v, s, S, p, lengths):
    """The outputs in float64, token by token."""
    q, k, v, s, S = map(numbers, (q, k, v, s, S))
    p = {name: numbers(a) for name, a in p._asdict().items()}
    p |= {name: p[name][..., 0] + 1j * p[name][..., 1] for name in ("dA", "dB", "C")}
    S, out = S[..., 0] + 1j * S[..., 1], np.zeros(q.shape)
    ends = np.full(len(q), q.shape[1]) if lengths is None else np.array(lengths)
    for t in range(q.shape[1]):
        on = ends > t
        if on.any():
            out[on, t], s[on], S[on] = step64(q[on, t], k[on, t], v[on, t], s[on], S[on], p)
    return out, s, np.stack([S.real, S.imag], axis=-1)


def check(kernel, args, lengths, bound, schedules=None):
    """Against float64; the same bits in all `schedules` (or in the one that is set)."""
    want, first = exact(*args, lengths), None
    for schedule in schedules or [{}]:
        with mslemu.settings(**schedule):
            got = [numbers(a) for a in kernel(**_arguments(*args, lengths))]
        first = first or got
        assert all(np.array_equal(a, b) for a, b in zip(got, first))
    for a, b, allowed in zip(first, want, (bound, 1e-4, 1e-4), strict=True):
        assert np.abs(a - b).max() <= allowed * max(1.0, np.abs(b).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(kernel, shape, dtype):
    dtype, bound = DTYPES[dtype]
    check(kernel, case(shape, dtype), None, bound, mslemu.SCHEDULES)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size(kernel, dtype):
    """As channels, tokens and (up to 257) rows, with and without lengths, in all schedules (half precision beyond 1,000: in
    one or another)."""
    dtype, bound = DTYPES[dtype]
    for n in SIZES:
        schedules = mslemu.SCHEDULES if n <= 1000 or dtype == mx.float32 else mslemu.SCHEDULES[(n + (dtype == mx.float16)) % 3 :][:1]
        check(kernel, case((1, 1, n, 1, 2, 1), dtype), None, bound, schedules)
        check(kernel, case((2, n, 1, 1, 2, 1), dtype), mx.array([n, n // 2], dtype=mx.int32), bound, schedules)
        if n <= 257:
            check(kernel, case((n, 1, 2, 1, 2, 1), dtype), mx.arange(n) % 3, bound, mslemu.SCHEDULES)


@pytest.mark.parametrize("schedule", mslemu.SWEEP, ids=lambda s: "-".join(map(str, s.values())))
def test_all_schedules(kernel, schedule):
    with mslemu.settings(**schedule):
        check(kernel, case((2, 3, 3, 2, 2, 1), mx.float16), mx.array([3, 1], dtype=mx.int32), 2e-3)


def test_rows_end_at_their_lengths(kernel):
    args = case((3, 4, 3, 1, 2, 1), mx.float32)
    check(kernel, args, mx.array([4, 0, 2], dtype=mx.int32), 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_that_are_not_contiguous(kernel, dtype):
    dtype, bound = DTYPES[dtype]
    q, k, v, s, S, p = case((2, 2, 4, 1, 2, 1), dtype)
    turned = tuple(mx.contiguous(a.swapaxes(0, 1)).swapaxes(0, 1) for a in (q, k, v, s, S))
    check(kernel, (*turned, p), None, bound, mslemu.SCHEDULES)


def test_random_shapes_and_seeds(kernel):
    """The emulated Metal text against the reference, shape after shape."""
    rng = np.random.default_rng(5)
    for seed in range(40):
        hd = int(rng.choice([1, 1, 1, 2, 3]))
        shape = (int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 6)), hd, 2, 1)
        lengths = mx.array(rng.integers(0, shape[1] + 1, shape[0]).astype(np.int32))
        check(kernel, case(shape, mx.float32, seed), lengths, 1e-4)


@pytest.mark.skipif(mslemu.clang() is None, reason="no clang: the rules of address spaces are not checked")
@pytest.mark.parametrize("dtype", DTYPES)
def test_lint(kernel, dtype):
    for shape in SHAPES[::3]:
        for lengths in (None, mx.ones((shape[0],), dtype=mx.int32)):
            assert mslemu.lint(kernel, **_arguments(*case(shape, DTYPES[dtype][0]), lengths)) == []


def test_arguments_made_in_a_thread_serve_all():
    """What stands in for lengths is made once: it must not wait for a thread that has ended."""
    _ones.cache_clear()
    args = case((1, 1, 1, 1, 2, 1), mx.float32)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_arguments, *args, None).result()
    mx.eval(_arguments(*args, None)["inputs"])
