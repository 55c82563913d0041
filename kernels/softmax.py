"""Softmax with scale and mask along an axis, the log-sum-exp of its rows, and arg-max with it.

    z_j = scale x_j + mask_j;  m = max_j z_j;  s = sum_j exp(z_j - m);  y_j = exp(z_j - m) / s;  lse = m + log(s)

x       any shape, float32 | float16 | bfloat16; y has x's shape and dtype, everything in between and lse are fp32
mask    None, boolean (True = keep) or additive (floating), broadcastable to x
A row with no finite entry left (all masked, all -inf) gives zeros and an lse of -inf, where MLX's own softmax gives
NaN. A NaN or +inf in a row makes the row and its lse NaN (but where `builtin` runs, columns of -inf stay 0).

Kernels: softmax_rows.py, which read x once up to 8,192 columns and twice beyond. `softmax` alone may also run as MLX's
own kernel and two small operations (`builtin`): CHOICE says which of both is faster where.
"""

import mlx.core as mx

from mlx_cosyh3.kernels import _dispatch
from mlx_cosyh3.kernels.softmax_rows import argmax_route, route, task_of

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
MAX_ROWS = (2**31 - 1) // 1024  # a grid counts threads, in int32

# {back end: {what is asked for: [(elements of x, up to; way), ...]}}; beyond the last entry the kernels run.
# "plain": no mask, scale 1; "masked": all other calls of `softmax`. With the log-sum-exp the kernels always run.
CHOICE = {
    # Measured on an NVIDIA H200, MLX 0.32.4 (docs/LOG.md, 2026-11-30), kernels against mx.softmax alone: 70 us to 9.9 at
    # 1 x 50,264, 72 to 9.9 at 16 x 151,936, 128 to 89 at 512 x 50,264. The two small operations are not in that: at
    # the launch floor they cost some 16 us, at 512 rows 13 bytes an element (fp32), more than the difference. Where the
    # ways cross in between is computed from those, not measured. "masked" was not measured.
    "cuda": {"plain": [(1 << 23, "builtin")], "masked": []},
    # Predicted, never timed: bytes and launches are the same as those of mx.softmax up to 4,096 columns, to which
    # `builtin` adds two launches; from there to 8,192 it reads x once more; beyond, it leaves a row to one threadgroup.
    "metal": {"plain": [], "masked": []},
}


def softmax(x, axis=-1, *, scale=1.0, mask=None, way=None, stream=None):
    """Softmax of `scale * x + mask` along `axis`, accumulated in fp32; fully masked rows give zeros.

    way   "kernel" or "builtin", whatever CHOICE says (a kernel that may not run gives way to the reference)"""
    mask = _check("softmax", x, mask, stream)
    if way not in (None, "kernel", "builtin"):
        raise ValueError(f"softmax: no way {way!r}; use 'kernel' or 'builtin'")
    if way is None and x.size and "softmax" in _dispatch.allowed() and _dispatch.on_gpu(stream):
        table = CHOICE["metal" if mx.metal.is_available() else "cuda"]
        table = table["plain" if mask is None and scale == 1 else "masked"]
        way = next((way for most, way in table if x.size <= most), "kernel")
    if way == "builtin":
        return builtin(x, axis, scale=scale, mask=mask, stream=stream)
    return softmax_lse(x, axis, scale=scale, mask=mask, stream=stream)[0]


def softmax_lse(x, axis=-1, *, scale=1.0, mask=None, stream=None):
    """`softmax` and the log-sum-exp of each row, fp32, with x's shape less `axis`; -inf for a fully masked row.

    Raises TypeError for x that is not floating, ValueError for a mask that does not broadcast to x."""
    mask = _check("softmax", x, mask, stream)
    if x.size == 0:
        lse = list(x.shape)
        lse.pop(axis)
        return mx.zeros(x.shape, dtype=x.dtype, stream=stream), mx.full(lse, -mx.inf, stream=stream)
    if _supported(x, axis, scale, mask):
        to = route(*_rows_columns(x, axis))
        if _usable(to, x, mask, stream):
            last = axis in (-1, x.ndim - 1)
            if not last:  # a copy: neighbours in a row should be neighbours in memory
                x = mx.contiguous(mx.moveaxis(x, axis, -1, stream=stream), stream=stream)
                mask = None if mask is None else mx.moveaxis(mask, axis, -1, stream=stream)
            y, lse = to.launch(task_of(x, mask, scale, stream), to.values, stream)
            y = mx.reshape(y, x.shape, stream=stream)
            y = y if last else mx.moveaxis(y, -1, axis, stream=stream)
            return y, mx.reshape(lse, x.shape[:-1], stream=stream)
    return reference(x, axis, scale=scale, mask=mask, stream=stream)


def argmax_lse(x, *, scale=1.0, mask=None, stream=None):
    """Column of the largest `scale * x + mask` on the last axis (the first of equals; NaN counts for nothing), int32,
    and the row's log-sum-exp, fp32, both of x's shape less that axis. Raises as `softmax_lse` does."""
    mask = _check("argmax_lse", x, mask, stream)
    if x.size and _supported(x, -1, scale, mask):
        to = argmax_route(*_rows_columns(x, -1))
        if _usable(to, x, mask, stream):
            out = to.launch(task_of(x, mask, scale, stream), to.values, stream)
            return tuple(mx.reshape(a, x.shape[:-1], stream=stream) for a in out)
    return argmax_reference(x, scale=scale, mask=mask, stream=stream)


def reference(x, axis=-1, *, scale=1.0, mask=None, stream=None):
    """`softmax_lse` in plain MLX ops."""
    s = stream
    z = _logits(x, scale, mask, s)
    peak = mx.max(z, axis=axis, keepdims=True, stream=s)
    peak = mx.where(mx.equal(peak, -mx.inf, stream=s), 0.0, peak, stream=s)  # exp(-inf - 0) = 0, not NaN
    e = mx.exp(mx.subtract(z, peak, stream=s), stream=s)
    total = mx.sum(e, axis=axis, keepdims=True, stream=s)
    lse = mx.squeeze(mx.add(peak, mx.log(total, stream=s), stream=s), axis, stream=s)
    total = mx.where(mx.equal(total, 0.0, stream=s), 1.0, total, stream=s)
    return mx.divide(e, total, stream=s).astype(x.dtype, stream=s), lse


def builtin(x, axis=-1, *, scale=1.0, mask=None, stream=None):
    """`softmax` by MLX's own kernel, which gives NaN for a row of -inf: columns of -inf become 0."""
    s = stream
    z = x if mask is None and scale == 1 else _logits(x, scale, mask, s)
    y = mx.softmax(z, axis=axis, precise=True, stream=s)  # precise: fp32 within
    return mx.where(mx.equal(z, -mx.inf, stream=s), 0.0, y, stream=s).astype(x.dtype, stream=s)


def argmax_reference(x, *, scale=1.0, mask=None, stream=None):
    """`argmax_lse` in plain MLX ops."""
    s = stream
    z = _logits(x, scale, mask, s)
    ids = mx.argmax(mx.where(mx.isnan(z, stream=s), -mx.inf, z, stream=s), axis=-1, stream=s).astype(mx.int32, stream=s)
    return ids, reference(z, stream=s)[1]


def _logits(x, scale, mask, s):
    z = mx.multiply(x.astype(mx.float32, stream=s), scale, stream=s)
    if mask is not None and mask.dtype == mx.bool_:
        return mx.where(mask, z, -mx.inf, stream=s)
    return z if mask is None else mx.add(z, mask.astype(mx.float32, stream=s), stream=s)


def _check(what, x, mask, stream):
    """`mask` with x's shape."""
    if not mx.issubdtype(x.dtype, mx.floating):
        raise TypeError(f"{what} takes floating input, not {x.dtype}")
    if mask is None or mask.shape == x.shape:
        return mask
    try:
        return mx.broadcast_to(mask, x.shape, stream=stream)
    except ValueError:
        raise ValueError(f"{what}: mask {list(mask.shape)} does not broadcast to x {list(x.shape)}") from None


def _rows_columns(x, axis):
    return x.size // x.shape[axis], x.shape[axis]


def _supported(x, axis, scale, mask):
    """Whether the kernels take these arguments at all; the reference says what is wrong with an axis."""
    return (
        x.dtype in FLOATS
        and 0 < x.ndim <= 8
        and -x.ndim <= axis < x.ndim
        and isinstance(scale, (int, float))
        and (mask is None or mask.dtype in (mx.bool_, *FLOATS))
        and x.size // x.shape[axis] <= MAX_ROWS
        and x.shape[axis] < 2**30
    )


def _usable(to, x, mask, stream):
    variant = (x.dtype, None if mask is None else mask.dtype, to.values, to.best)
    test = lambda: _selftest(to, *variant[:2])  # noqa: E731
    return all(_dispatch.usable(kernel, "softmax", variant, stream, test) for kernel in to.kernels)


def _selftest(to, dtype, mask_dtype):
    """Error over what is allowed on 2 x 3 rows, one without a finite entry and one with a NaN, and a broadcast mask."""
    n = to.columns
    keys = mx.random.split(mx.random.key(11), 2)
    row = mx.arange(6).reshape(2, 3, 1)
    x = 4 * mx.random.normal((2, 3, n), key=keys[0])
    x = mx.where(row == 1, -mx.inf, x)
    x = mx.where((row == 4) & (mx.arange(n) == n // 2), mx.nan, x).astype(dtype)
    mask = None
    if mask_dtype is not None:
        mask = mx.random.normal((2, 1, n), key=keys[1])
        mask = mask > -1 if mask_dtype == mx.bool_ else mask.astype(mask_dtype)
        mask = mx.broadcast_to(mask, x.shape)
    out = to.launch(task_of(x, mask, 0.75, None), to.values, None)
    argmax = out[0].dtype == mx.int32
    want = (argmax_reference if argmax else reference)(x, scale=0.75, mask=mask)
    error = _error(out[1].reshape(2, 3), want[1], 1e-5, 1e-5)
    if argmax:
        wrong = mx.any((out[0].reshape(2, 3) != want[0])).item()
        return mx.inf if wrong else error
    relative, smallest = {mx.float32: (3e-5, 1e-12), mx.float16: (2e-3, 1e-7), mx.bfloat16: (1.6e-2, 1e-12)}[dtype]
    return max(error, _error(out[0].reshape(x.shape), want[0], relative, smallest))


def _error(y, want, relative, absolute):
    """Worst |y - want| / (relative |want| + absolute); infinite where one is NaN or infinite and the other is not."""
    y, want = y.astype(mx.float32), want.astype(mx.float32)
    same = (y == want) | (mx.isnan(y) & mx.isnan(want))
    error = mx.where(same, 0.0, mx.abs(y - want) / (relative * mx.abs(want) + absolute))
    return mx.max(mx.where(mx.isnan(error), mx.inf, error)).item()
