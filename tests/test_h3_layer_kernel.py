"""The fused layer pieces' Metal text, run by the emulator (tests/mslemu): right numbers, no finding, lint clean."""

import mlx.core as mx
import pytest

from mlx_cosyh3.kernels import h3_layer as hl
from mlx_cosyh3.kernels._trust import BOUND, error_ratio
from tests import mslemu

if mslemu.missing():
    pytest.skip(f"the Metal emulator needs {mslemu.missing()}", allow_module_level=True)

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
MIXER = mslemu.metal_kernel(**hl.MIXER_KERNEL.metal_arguments())
LINEAR = mslemu.metal_kernel(**hl.LINEAR_KERNEL.metal_arguments())
NORM_LINEAR = mslemu.metal_kernel(**hl.NORM_LINEAR_KERNEL.metal_arguments())


def run(kernel, arguments):
    return [mx.array(a) for a in kernel(**arguments)]


def mixer_error(variant, seed=1):
    args = hl._mixer_case(variant, seed)
    return error_ratio(run(MIXER, hl._mixer_arguments(*args)), hl.mixer_reference(*args), (2 * BOUND[variant[0]], 1e-3, 1e-3))


def linear_call(variant, N, seed=1):
    args, options = hl._linear_case(variant, N, seed)
    arguments = hl._linear_arguments(*args, options["layer_norm"], options["residual"], options["activation"])
    return (NORM_LINEAR if variant[-1] else LINEAR), arguments, hl.linear_reference(*args, **options)


def linear_error(variant, N, seed=1):
    kernel, arguments, want = linear_call(variant, N, seed)
    return error_ratio(run(kernel, arguments), [want], (BOUND[variant[0]],))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [4, 12, 36, 128, 132, 260])
def test_mixer(K, dtype):
    assert mixer_error((dtype, K, 2, 1)) < 1


@pytest.mark.parametrize("taps, modes", [(1, 1), (4, 2)])
def test_mixer_other_state_sizes(taps, modes):
    assert mixer_error((mx.float32, 20, taps, modes)) < 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K, N", [(4, 1), (8, 9), (36, 33), (132, 65), (256, 100), (768, 7)])
@pytest.mark.parametrize("normed, act, add, bias", [(True, 1, False, True), (False, 0, True, True), (True, 0, False, False)])
def test_linear(K, N, dtype, normed, act, add, bias):
    assert linear_error((dtype, K, 1, act, add, bias, normed), N) < 1


def test_linear_of_many_outputs():
    """Eight outputs a simdgroup, the last threadgroup and the last simdgroup cut."""
    assert linear_error((mx.float32, 8, 8, 0, False, False, True), 16384 + 13) < 1


@pytest.mark.parametrize("schedule", mslemu.SWEEP, ids=lambda s: "-".join(map(str, s.values())))
def test_all_schedules(schedule):
    with mslemu.settings(**schedule):
        assert mixer_error((mx.float16, 36, 2, 1)) < 1
        assert linear_error((mx.float16, 132, 1, 1, True, True, True), 33) < 1
        assert linear_error((mx.float16, 132, 1, 1, True, True, False), 33) < 1


def test_lint():
    assert mslemu.lint(MIXER, **hl._mixer_arguments(*hl._mixer_case((mx.float16, 36, 2, 1)))) == []
    for normed in (True, False):
        kernel, arguments, _ = linear_call((mx.float16, 36, 1, 1, True, True, normed), 9)
        assert mslemu.lint(kernel, **arguments) == []


def test_what_the_kernels_leave_to_others():
    x, norm, projections, s, S, p = hl._mixer_case((mx.float32, 12, 2, 1))
    assert hl._mixer_variant(x, norm, projections, p) is not None
    assert hl._mixer_variant(x.astype(mx.float16), norm, projections, p) is None
    assert not hl.mixer_usable(x, norm, projections, p, stream=mx.cpu)
    assert hl._linear_variant(mx.zeros(6), mx.zeros((3, 6)), None, None, None, None) is None  # 6 is no multiple of 4
    assert not hl.linear_usable(mx.zeros(8), mx.zeros((3, 8)), stream=mx.cpu)
