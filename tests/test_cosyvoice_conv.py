"""The CPU forms of convolutions against MLX's own operations. Run: pytest tests/test_cosyvoice_conv.py"""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mlx_cosyh3.cosyvoice import conv
from mlx_cosyh3.cosyvoice.conv import Conv1d, ConvTranspose1d, conv1d, conv_transpose1d


def normal(shape, seed, dtype=mx.float32):
    return mx.array(np.random.default_rng(seed).standard_normal(shape), dtype=dtype)


def close(a, b, within=2e-5):
    assert a.shape == b.shape and a.dtype == b.dtype
    if a.size:
        assert float(mx.abs(a - b).max()) <= within * max(1.0, float(mx.abs(b).max()))


ways = {
    "batch": st.integers(1, 3),
    "length": st.integers(1, 40),
    "kernel": st.integers(1, 11),
    "stride": st.integers(1, 6),
    "dilation": st.integers(1, 5),
    "groups": st.sampled_from((1, 1, 2, 3, 6)),
    "per_group": st.tuples(st.integers(1, 5), st.integers(1, 5)),
    "padding": st.tuples(st.integers(0, 6), st.integers(0, 6)),
    "bias": st.booleans(),
}


@settings(max_examples=150, deadline=None)
@given(**ways)
@example(1, 12, 3, 1, 5, 6, (1, 1), (10, 0), True)  # depthwise, causal
@example(1, 30, 30, 15, 1, 1, (18, 4), (0, 0), True)  # one output
@example(2, 1, 1, 1, 1, 1, (1, 1), (0, 0), False)
@example(2, 9, 3, 2, 1, 2, (2, 3), (1, 1), True)
def test_conv1d(batch, length, kernel, stride, dilation, groups, per_group, padding, bias):
    assume(length + sum(padding) > dilation * (kernel - 1))
    x = normal((batch, length, groups * per_group[0]), 1)
    weight = normal((groups * per_group[1], kernel, per_group[0]), 2)
    b = normal((groups * per_group[1],), 3) if bias else None
    how = stride, dilation, groups
    got = conv1d(x, weight, b, stride=stride, dilation=dilation, groups=groups, padding=padding)
    windows = conv._window_product(mx.pad(x, [(0, 0), padding, (0, 0)]), weight, *how)  # as on CUDA for wide kernels
    close(windows if b is None else windows + b, got)
    want = mx.conv_general(
        x, weight, stride=stride, padding=([padding[0]], [padding[1]]), kernel_dilation=dilation, groups=groups
    )
    close(got, want if b is None else want + b)


@settings(max_examples=80, deadline=None)
@given(
    batch=st.integers(1, 3), length=st.integers(1, 20), kernel=st.integers(1, 17), stride=st.integers(1, 9),
    dims=st.tuples(st.integers(1, 6), st.integers(1, 6)), padding=st.integers(0, 8), bias=st.booleans(),
)  # fmt: skip
@example(1, 5, 16, 8, (4, 2), 4, True)
@example(1, 5, 11, 5, (4, 2), 3, True)
@example(1, 5, 2, 3, (4, 2), 0, True)  # samples that no input reaches
def test_conv_transpose1d(batch, length, kernel, stride, dims, padding, bias):
    assume(padding < kernel and (length - 1) * stride + kernel > 2 * padding)  # MLX's own takes no more padding
    x, weight = normal((batch, length, dims[0]), 1), normal((dims[1], kernel, dims[0]), 2)
    b = normal((dims[1],), 3) if bias else None
    got = conv_transpose1d(x, weight, b, stride=stride, padding=padding)
    want = mx.conv_transpose1d(x, weight, stride=stride, padding=padding)
    close(got, want if b is None else want + b)


@pytest.mark.parametrize("dtype", (mx.bfloat16, mx.float16, mx.float64))
def test_dtype_is_kept(dtype):
    with mx.stream(mx.cpu):  # float64 is there only
        x, weight = normal((1, 20, 6), 1).astype(dtype), normal((4, 3, 6), 2).astype(dtype)
        y = conv1d(x, weight, dilation=2)
        assert y.dtype == dtype
        want = mx.conv1d(x.astype(mx.float32), weight.astype(mx.float32), dilation=2)
        assert float(mx.abs(y.astype(mx.float32) - want).max()) < (1e-5 if dtype == mx.float64 else 0.2)


def test_input_that_is_not_contiguous():
    x = normal((6, 2, 40), 1).transpose(1, 2, 0)[:, ::2]  # [2, 20, 6]
    weight = normal((6, 5, 4), 2).transpose(2, 1, 0)  # [4, 5, 6]
    close(conv1d(x, weight, dilation=3), mx.conv1d(mx.contiguous(x), mx.contiguous(weight), dilation=3))


def test_gpu_form_is_the_same(monkeypatch):
    """The other branch, on the CPU: both take the same arguments."""
    x, weight, b = normal((2, 30, 6), 1), normal((4, 5, 3), 2), normal((4,), 3)
    wide, taps = normal((2, 9, 6), 4), normal((4, 16, 6), 5)

    def both():
        plain = conv1d(x, weight, b, stride=2, groups=2, padding=(3, 1))
        return plain, conv_transpose1d(wide, taps, b, stride=8, padding=4)

    ours = both()
    monkeypatch.setattr(conv._dispatch, "on_gpu", lambda: True)
    for a, want in zip(ours, both()):
        close(a, want)


def test_layers():
    layer = Conv1d(6, 4, 3, stride=1, dilation=2, groups=2, padding=(4, 0), bias=False)
    layer.weight = normal(layer.weight.shape, 1)
    x = normal((1, 12, 6), 2)
    assert layer.context == 4 and layer.stride == 1 and "bias" not in layer
    close(layer(x), conv1d(x, layer.weight, dilation=2, groups=2, padding=(4, 0)))
    # What went before as context is the same as padding with it.
    close(layer(mx.concatenate([x[:, :4], x[:, 4:]], axis=1), padding=(0, 0)), layer(x)[:, 4:])
    up = ConvTranspose1d(6, 4, 16, stride=8, padding=4)
    up.weight, up.bias = normal(up.weight.shape, 3), normal((4,), 4)
    close(up(x), conv_transpose1d(x, up.weight, up.bias, stride=8, padding=4))
    assert up(x).shape == (1, 96, 4)
