"""Conditional flow matching: from noise to a mel spectrogram in a few Euler steps, shared by all versions.

With guidance: each step asks the network twice, in one batch, with the conditions (the first rows) and without (as many
again), and goes beyond the first away from the second. After upstream's cosyvoice/flow/flow_matching.py.
"""

import math

import mlx.core as mx
import numpy as np

from mlx_cosyh3.errors import CosyH3Error, NotFiniteError


def times(steps):
    """(t, dt), float32 [steps]: the cosine schedule from 0 to 1. t is summed up, as upstream does: it differs in rounding.

    The cosine is rounded once, as torch's is and numpy's float32 one is not: DiT sees 1000 t as an angle, so the last bit
    of t shows in the mel."""
    if steps < 1:
        raise CosyH3Error(f"the flow cannot take {steps} steps: give at least 1")
    angles = np.linspace(0, 1, steps + 1, dtype=np.float32) * np.float32(0.5 * np.pi)
    grid = np.float32(1) - np.cos(angles.astype(np.float64)).astype(np.float32)
    t, out = grid[0], []
    for following in grid[1:]:
        dt = following - t
        out.append((t, dt))
        t = t + dt
    return np.array(out, np.float32).T


def sinusoids(times, dims):
    """The flow's times float32 [S] -> float32 [S, dims]: sines and cosines of 1000 t, at rates from 1 to 1/10000."""
    half = dims // 2
    exponents = np.arange(half, dtype=np.float32) * np.float32(-math.log(10000) / (half - 1))
    rates = np.exp(exponents.astype(np.float64)).astype(np.float32)  # as torch's: angles near 1000 show the last bit
    angles = 1000 * mx.array(np.asarray(times, np.float32))[:, None] * mx.array(rates)
    return mx.concatenate([mx.sin(angles), mx.cos(angles)], axis=-1)


def euler(x, steps, velocity, guidance, on_step=None):
    """x float32 [B, T, 80], noise -> float32 [B, T, 80], after `steps` steps of the cosine schedule.

    velocity(x, k)   float32 [2 B, T, 80] at step k for x [2 B, T, 80]: with the conditions, and without
    guidance         how far to go beyond the first
    on_step          called with the number of steps done after each
    Raises NotFiniteError naming the step from which on something is not finite."""
    finite, B = [], x.shape[0]
    for k, dt in enumerate(times(steps)[1]):
        v = velocity(mx.concatenate([x, x]), k)
        x = x + float(dt) * ((1 + guidance) * v[:B] - guidance * v[B:])
        finite.append(mx.isfinite(x).all())
        mx.async_eval(x, finite[-1])
        if k > 0:  # one step is computed while the next is set up: no more, so that memory stays flat
            _wait(finite, k, on_step)
    _wait(finite, steps, on_step)
    check_finite(finite, "flow")
    return x


def _wait(finite, done, on_step):
    """Until the first `done` steps are computed."""
    mx.eval(finite[done - 1])
    if on_step is not None:
        on_step(done)


def check_finite(flags, stage):
    """Raise NotFiniteError if one of `flags`, bool scalars of one step each, is not true."""
    for k, ok in enumerate(flags):
        if not ok.item():
            raise NotFiniteError(f"the {stage} gave a value that is not finite (inf or NaN) in step {k + 1} of "
                                 f"{len(flags)}: convert the model with --dtype float32")  # fmt: skip
