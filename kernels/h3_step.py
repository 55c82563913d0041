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
ssm_state      [B, H, hd, hd, M, 2] fp32, (re, im)
lengths        [B] int32, optional: row b stops after lengths[b] tokens (its later outputs are 0)
Source: H3 paper (arXiv 2212.14052), section 3; layout of HazyResearch/H3's `SSMLMHeadModel`.

The kernel gives one simdgroup to each (row, h, d2): a lane holds N / 32 shift taps and N / 64 modes of every d1 in
registers over all T tokens, and the two sums over n are simd sums. Coefficients and states are read once and the states
written once: 578 words a channel for N = 64, T = 1 (hd > 1 reads the shift coefficients hd times).
"""

import functools
from typing import NamedTuple

import mlx.core as mx

from mlx_cosyh3.kernels import _dispatch
from mlx_cosyh3.kernels._gpu import GpuKernel
from mlx_cosyh3.kernels._trust import BOUND, error_ratio, normals


class H3StepParams(NamedTuple):
    """One layer's coefficients, ready to use (discretised in float64 at load)."""

    shift_B: mx.array  # [D, N] fp32
    shift_C: mx.array  # [D, N] fp32
    shift_D: mx.array  # [D] fp32
    dA: mx.array  # [H, M, 2] fp32, (re, im)
    dB: mx.array  # [H, M, 2]
    C: mx.array  # [H, M, 2]
    D: mx.array  # [H] fp32


# Template: T element type of q, k, v; HD head_dim; TAPS = N / 32; MODES = M / 32.
# RAGGED: `lengths` counts (it is q else). Grid (32, H hd, B).
BODY = r"""
  const int tokens = q_shape[1], heads = D_shape[0];
  const uint lane = thread_position_in_grid.x;
  const uint row = thread_position_in_grid.y;  // h HD + d2
  const uint b = thread_position_in_grid.z;
  if (row >= uint(heads * HD)) { return; }
  const int h = row / HD, d2 = row % HD;
  const int channels = heads * HD;
  const int N = TAPS * 32, M = MODES * 32;

  float tap_b[HD][TAPS], tap_c[HD][TAPS], s[HD][TAPS];
  float sr[HD][MODES], si[HD][MODES];
  float ar[MODES], ai[MODES], br[MODES], bi[MODES], cr[MODES], ci[MODES];
  for (int d1 = 0; d1 < HD; ++d1) {
    const int c = h * HD + d1;
    for (int i = 0; i < TAPS; ++i) {
      const int n = i * 32 + lane;
      tap_b[d1][i] = shift_B[c * N + n];
      tap_c[d1][i] = shift_C[c * N + n];
      s[d1][i] = shift_in[(b * channels + c) * N + n];
    }
    for (int i = 0; i < MODES; ++i) {
      const int at = ((((b * heads + h) * HD + d1) * HD + d2) * M + i * 32 + lane) * 2;
      sr[d1][i] = ssm_in[at];
      si[d1][i] = ssm_in[at + 1];
    }
  }
  for (int i = 0; i < MODES; ++i) {
    const int at = (h * M + i * 32 + lane) * 2;
    ar[i] = dA[at];
    ai[i] = dA[at + 1];
    br[i] = dB[at];
    bi[i] = dB[at + 1];
    cr[i] = C[at];
    ci[i] = C[at + 1];
  }
  const float skip = D[h];
  const int length = RAGGED ? int(lengths[b]) : tokens;

  for (int t = 0; t < tokens; ++t) {
    const int token = (b * tokens + t) * channels;
    float total = 0.0f, direct = 0.0f;
    if (t < length) {
      const float vt = static_cast<float>(v[token + h * HD + d2]);
      for (int d1 = 0; d1 < HD; ++d1) {
        const int c = h * HD + d1;
        const float kt = static_cast<float>(k[token + c]);
        const float qt = static_cast<float>(q[token + c]);
        float partial = 0.0f;
        for (int i = TAPS - 1; i >= 0; --i) {  // from the last tap down: tap 32 i takes what tap 32 i - 1 held
          const float below = simd_shuffle_up(s[d1][i], 1);
          const float carry = i > 0 ? simd_broadcast(s[d1][i > 0 ? i - 1 : 0], 31) : 0.0f;
          s[d1][i] = (lane == 0 ? carry : below) + tap_b[d1][i] * kt;
          partial += tap_c[d1][i] * s[d1][i];
        }
        const float u = (simd_sum(partial) + shift_D[c] * kt) * vt;
        float y = 0.0f;
        for (int i = 0; i < MODES; ++i) {
          const float re = ar[i] * sr[d1][i] - ai[i] * si[d1][i] + br[i] * u;
          const float im = ar[i] * si[d1][i] + ai[i] * sr[d1][i] + bi[i] * u;
          sr[d1][i] = re;
          si[d1][i] = im;
          y += cr[i] * re - ci[i] * im;
        }
        total += y * qt;
        direct += u * qt;
      }
    }
    total = 2.0f * simd_sum(total) + skip * direct;
    if (lane == 0) {
      out[token + d2 * heads + h] = static_cast<T>(total);
    }
  }

  for (int d1 = 0; d1 < HD; ++d1) {
    const int c = h * HD + d1;
    for (int i = 0; i < TAPS; ++i) {
      if (d2 == 0) {
        shift_out[(b * channels + c) * N + i * 32 + lane] = s[d1][i];
      }
    }
    for (int i = 0; i < MODES; ++i) {
      const int at = ((((b * heads + h) * HD + d1) * HD + d2) * M + i * 32 + lane) * 2;
      ssm_out[at] = sr[d1][i];
      ssm_out[at + 1] = si[d1][i];
    }
  }
"""
KERNEL = GpuKernel(
    "h3_step",
    ["q", "k", "v", "shift_in", "ssm_in", "shift_B", "shift_C", "shift_D", "dA", "dB", "C", "D", "lengths"],
    ["out", "shift_out", "ssm_out"],
    BODY,
)
MAX_HEAD_DIM = 16  # beyond, a lane's registers do not hold the states of all d1


def h3_step(q, k, v, shift_state, ssm_state, params, *, lengths=None, stream=None):
    """Advance one H3 layer by the T tokens of q, k, v [B, T, D] -> (out [B, T, D], shift_state, ssm_state)."""
    variant = _variant(q, k, v, shift_state, ssm_state)
    if variant and _dispatch.usable(KERNEL, "h3_step", variant, stream, lambda: _selftest(variant)):
        return KERNEL(**_arguments(q, k, v, shift_state, ssm_state, params, lengths), stream=stream)
    return reference(q, k, v, shift_state, ssm_state, params, lengths=lengths, stream=stream)


def _variant(q, k, v, shift_state, ssm_state):
    """What the kernel is compiled for: (dtype, HD, TAPS, MODES), or None where it cannot run."""
    hd, N, M = ssm_state.shape[2], shift_state.shape[2], ssm_state.shape[4]
    same = q.dtype == k.dtype == v.dtype and q.dtype in (mx.float32, mx.float16, mx.bfloat16)
    if not same or N % 32 or M % 32 or hd > MAX_HEAD_DIM or q.size == 0 or ssm_state.size >= 2**30:
        return None
    return q.dtype, hd, N // 32, M // 32


def _arguments(q, k, v, shift_state, ssm_state, p, lengths):
    """The keyword arguments of a call of the kernel."""
    B, T, D = q.shape
    dtype, hd, taps, modes = _variant(q, k, v, shift_state, ssm_state)
    # Sizes come as shapes: MLX's CUDA back end keeps arrays of up to 8 bytes where the host looks, and a kernel that
    # reads one waits 10 us.
    return {
        "inputs": [q, k, v, shift_state, ssm_state, *p, _ones() if lengths is None else lengths],
        "template": [("T", dtype), ("HD", hd), ("TAPS", taps), ("MODES", modes), ("RAGGED", lengths is not None)],
        "grid": (32, D, B),
        "threadgroup": (32, 4, 1),
        "output_shapes": [(B, T, D), shift_state.shape, ssm_state.shape],
        "output_dtypes": [dtype, mx.float32, mx.float32],
    }


@functools.lru_cache
def _ones():
    """In place of lengths that are not given: read by nobody. Not `mx.ones`, whose work would belong to a thread."""
    return mx.array([1] * 16, dtype=mx.int32)


def _selftest(variant):
    """Error over what is allowed, of two rows of three tokens, ragged and not, against the reference on the same device."""
    dtype, hd, taps, modes = variant
    B, T, H, N, M = 2, 3, 3, 32 * taps, 32 * modes
    normal, D = normals(7), H * hd
    params = H3StepParams(normal(D, N) / N**0.5, normal(D, N) / N**0.5, normal(D), 0.3 * normal(H, M, 2),
                          normal(H, M, 2) / M**0.5, normal(H, M, 2) / M**0.5, normal(H))  # fmt: skip
    q, k, v = (normal(B, T, D).astype(dtype) for _ in range(3))
    args = q, k, v, normal(B, D, N), normal(B, H, hd, hd, M, 2), params
    worst = 0.0
    for lengths in (None, mx.array([3, 2], dtype=mx.int32)):
        got, want = KERNEL(**_arguments(*args, lengths)), reference(*args, lengths=lengths)
        worst = max(worst, error_ratio(got, want, (BOUND[dtype], 1e-4, 1e-4)))
    return worst


def reference(q, k, v, shift_state, ssm_state, params, *, lengths=None, stream=None):
    """`h3_step` in plain MLX ops, one token after another."""
    with mx.stream(stream if stream is not None else mx.default_stream(mx.default_device())):
        outs = []
        for t in range(q.shape[1]):
            out, s, S = _one(q[:, t], k[:, t], v[:, t], shift_state, ssm_state, params)
            if lengths is not None:
                goes_on = t < lengths
                out = mx.where(goes_on[:, None], out, 0)
                s = mx.where(goes_on[:, None, None], s, shift_state)
                S = mx.where(goes_on.reshape(-1, *[1] * 5), S, ssm_state)
            shift_state, ssm_state = s, S
            outs.append(out)
        y = mx.stack(outs, axis=1) if len(outs) > 1 else outs[0][:, None]
        return y.astype(q.dtype), shift_state, ssm_state


def _one(q, k, v, s, S, p):
    """One token: q, k, v [B, D]; s [B, D, N]; S [B, H, hd, hd, M, 2] -> out [B, D] fp32 and the new states."""
    H, hd = S.shape[1], S.shape[2]
    q, k, v = (a.astype(mx.float32) for a in (q, k, v))
    k = k[..., None]  # [B, D, 1]
    s = mx.concatenate([p.shift_B[:, :1] * k, s[..., :-1] + p.shift_B[:, 1:] * k], axis=-1)
    k = mx.sum(p.shift_C * s, axis=-1) + p.shift_D * k[..., 0]  # [B, D]
    k, v, q = (a.reshape(-1, H, hd) for a in (k, v, q))
    u = k[..., :, None] * v[..., None, :]  # [B, H, d1, d2]
    dA, dB, C = (a[:, None, None] for a in (p.dA, p.dB, p.C))  # [H, 1, 1, M, 2]
    # the complex product dA S on pairs: (re) S + (im) i S
    turned = mx.concatenate([-S[..., 1:], S[..., :1]], axis=-1)
    S = dA[..., :1] * S + dA[..., 1:] * turned + dB * u[..., None, None]
    y = mx.sum(C * S * mx.array([2.0, -2.0]), axis=(-2, -1)) + p.D[:, None, None] * u  # 2 Re(C S) [B, H, d1, d2]
    out = mx.sum(y * q[..., None], axis=2)  # [B, H, d2]
    return mx.swapaxes(out, 1, 2).reshape(-1, H * hd), s, S
