"""The recurrent update of one H3 layer between its projections, T >= 1 tokens.

For channel c of D (= H hd), head h of H, positions d1, d2 of hd, mode n of M (one of each conjugate pair), N shift taps:

    s[c, n] <- s[c, n-1] + shift_B[c, n] k[c]                          (s[c, -1] = 0; the last entry falls off)
    k'[c]    = sum_n shift_C[c, n] s[c, n] + shift_D[c] k[c]
    u        = k'[h hd + d1] v[h hd + d2]                              (hd = 1: simply k' v)
    S[h, d1, d2, n] <- dA[h, n] S[h, d1, d2, n] + dB[h, n] u
    y[h, d1, d2] = 2 Re(sum_n C[h, n] S[h, d1, d2, n]) + D[h] u        (the factor 2 stands for the dropped conjugates)
    out[d2 H + h] = sum_d1 y[h, d1, d2] q[h hd + d1]                   (mind the order; hd = 1: out = y q)

q, k, v        [B, T, D] float32 | float16 | bfloat16; out [B, T, D] in q's dtype; all arithmetic in fp32
shift_state    [B, D, N] fp32
ssm_state      [B, H, hd, hd, M] complex64
Source: H3 paper (arXiv 2212.14052), section 3; layout of HazyResearch/H3's `SSMLMHeadModel`.
"""

from typing import NamedTuple

import mlx.core as mx

from mlx_cosyh3.kernels._dispatch import pick

KERNELS = {}


class H3StepParams(NamedTuple):
    """One layer's coefficients, ready to use (discretised in float64 at load)."""

    shift_B: mx.array  # [D, N] fp32
    shift_C: mx.array  # [D, N] fp32
    shift_D: mx.array  # [D] fp32
    dA: mx.array  # [H, M] complex64
    dB: mx.array  # [H, M] complex64
    C: mx.array  # [H, M] complex64
    D: mx.array  # [H] fp32


def h3_step(q, k, v, shift_state, ssm_state, params, *, stream=None):
    """Advance one H3 layer by the T tokens of q, k, v [B, T, D] -> (out [B, T, D], shift_state, ssm_state)."""
    return pick(KERNELS, reference, stream)(q, k, v, shift_state, ssm_state, params, stream=stream)


def reference(q, k, v, shift_state, ssm_state, params, *, stream=None):
    """`h3_step` in plain MLX ops, one token after another."""
    with mx.stream(stream if stream is not None else mx.default_stream(mx.default_device())):
        outs = []
        for t in range(q.shape[1]):
            out, shift_state, ssm_state = _one(q[:, t], k[:, t], v[:, t], shift_state, ssm_state, params)
            outs.append(out)
        y = mx.stack(outs, axis=1) if len(outs) > 1 else outs[0][:, None]
        return y.astype(q.dtype), shift_state, ssm_state


def _one(q, k, v, s, S, p):
    """One token: q, k, v [B, D]; s [B, D, N]; S [B, H, hd, hd, M] -> out [B, D] fp32 and the new states."""
    H, hd = S.shape[1], S.shape[2]
    q, k, v = (a.astype(mx.float32) for a in (q, k, v))
    k = k[..., None]  # [B, D, 1]
    s = mx.concatenate([p.shift_B[:, :1] * k, s[..., :-1] + p.shift_B[:, 1:] * k], axis=-1)
    k = mx.sum(p.shift_C * s, axis=-1) + p.shift_D * k[..., 0]  # [B, D]
    k, v, q = (a.reshape(-1, H, hd) for a in (k, v, q))
    u = k[..., :, None] * v[..., None, :]  # [B, H, d1, d2]
    S = p.dA[:, None, None] * S + p.dB[:, None, None] * u[..., None]
    y = 2 * mx.sum(mx.real(p.C[:, None, None] * S), axis=-1) + p.D[:, None, None] * u  # [B, H, d1, d2]
    out = mx.sum(y * q[..., None], axis=2)  # [B, H, d2]
    return mx.swapaxes(out, 1, 2).reshape(-1, H * hd), s, S
