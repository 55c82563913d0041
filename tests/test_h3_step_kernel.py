"""The H3 step's Metal text, run by the emulator (tests/mslemu): right numbers, no finding, lint clean."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.kernels import H3StepParams
from mlx_cosyh3.kernels.h3_step import KERNEL, _arguments, reference
from tests import mslemu

DTYPES = {"float32": (mx.float32, 1e-4), "float16": (mx.float16, 2e-3), "bfloat16": (mx.bfloat16, 2e-2)}
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
    params = H3StepParams(f(D, N, scale=N**-0.5), f(D, N, scale=N**-0.5), f(D), f(H, M, 2, scale=0.5),
                          f(H, M, 2, scale=M**-0.5), f(H, M, 2, scale=M**-0.5), f(H))  # fmt: skip
    q, k, v = (f(B, T, D).astype(dtype) for _ in range(3))
    return q, k, v, f(B, D, N), f(B, H, hd, hd, M, 2), params


def check(kernel, args, lengths, bound):
    got = kernel(**_arguments(*args, lengths))
    want = reference(*args, lengths=lengths)
    for a, b, allowed in zip(got, want, (bound, 1e-4, 1e-4), strict=True):
        a, b = (np.array(mx.array(x).astype(mx.float32)) for x in (a, b))
        assert np.abs(a - b).max() <= allowed * max(1.0, np.abs(b).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(kernel, shape, dtype):
    dtype, bound = DTYPES[dtype]
    check(kernel, case(shape, dtype), None, bound)


@pytest.mark.parametrize("schedule", mslemu.SWEEP, ids=lambda s: "-".join(map(str, s.values())))
def test_all_schedules(kernel, schedule):
    with mslemu.settings(**schedule):
        check(kernel, case((2, 3, 3, 2, 2, 1), mx.float16), mx.array([3, 1], dtype=mx.int32), 2e-3)


def test_rows_end_at_their_lengths(kernel):
    args = case((3, 4, 3, 1, 2, 1), mx.float32)
    check(kernel, args, mx.array([4, 0, 2], dtype=mx.int32), 1e-4)


def test_inputs_that_are_not_contiguous(kernel):
    q, k, v, s, S, p = case((2, 2, 4, 1, 2, 1), mx.float32)
    turned = tuple(mx.array(np.array(a).transpose(1, 0, 2).copy()).swapaxes(0, 1) for a in (q, k, v))
    check(kernel, (*turned, s, S, p), None, 1e-4)


def test_random_shapes_and_seeds(kernel):
    """The emulated Metal text against the reference, shape after shape."""
    rng = np.random.default_rng(5)
    for seed in range(40):
        hd = int(rng.choice([1, 1, 1, 2, 3]))
        shape = (int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 6)), hd, 2, 1)
        lengths = mx.array(rng.integers(0, shape[1] + 1, shape[0]).astype(np.int32))
        check(kernel, case(shape, mx.float32, seed), lengths, 1e-4)


def test_lint(kernel):
    args = _arguments(*case((2, 1, 3, 1, 2, 1), mx.float16), None)
    assert mslemu.lint(kernel, **args) == []
