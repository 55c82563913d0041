"""The H3 mixer for one token of one sequence, up to its output projection: one launch in place of about fifteen.

    y = step(Wq h + bq, Wk h + bk, Wv h + bv), h = LayerNorm(x)      both states move on (head_dim 1)

x, y, weights and biases in one dtype, float32 | float16 | bfloat16; sums, norm and states in fp32; weights may be int8, as
in norm_linear.py, whose pieces it is made of. A simdgroup makes q, k and v of one channel, and then has all that the
channel's step needs (h3_step.py). The rest of a layer is three launches of norm_linear.py.
"""

from typing import NamedTuple

import mlx.core as mx

from mlx_cosyh3.kernels import _dispatch
from mlx_cosyh3.kernels._trust import BOUND, error_ratio, normals
from mlx_cosyh3.kernels.h3_step import H3StepParams
from mlx_cosyh3.kernels.h3_step import reference as step_reference
from mlx_cosyh3.kernels.norm_linear import (
    FLOATS,
    LAYER_NORM,
    MAX_WIDTH,
    READS,
    SIMDGROUPS,
    float_bits,
    lanes,
    layer_kernel,
    to_int8,
)

# Template, besides: TAPS = N / 32, MODES = M / 32. Grid (32 SG x threadgroups, 1, 1). All that does not depend on x is
# read before the norm, which hides the time that takes.
MIXER = (
    READS
    + """
  const int c = threadgroup_position_in_grid.x * SG + simdgroup, row = c < K ? c : K - 1;
  LayerWide<Q, L> wq[AHEAD], wk[AHEAD], wv[AHEAD];
  for (int a = 0; a < AHEAD; a++) {
    const int i = a * STEP + lane * L;
    const size_t at = size_t(row) * K + (i < K ? i : 0);
    wq[a] = load_wide<Q, L>(Wq + at);
    wk[a] = load_wide<Q, L>(Wk + at);
    wv[a] = load_wide<Q, L>(Wv + at);
  }
  float tap[TAPS], tap_b[TAPS], tap_c[TAPS];
  for (int i = 0; i < TAPS; i++) {
    const int at = (row * TAPS + i) * 32 + lane;
    tap[i] = shift_in[at];
    tap_b[i] = shift_B[at];
    tap_c[i] = shift_C[at];
  }
  float sr[MODES], si[MODES], ar[MODES], ai[MODES], br[MODES], bi[MODES], cr[MODES], ci[MODES];
  for (int i = 0; i < MODES; i++) {
    const int at = ((row * MODES + i) * 32 + lane) * 2;
    sr[i] = ssm_in[at];
    si[i] = ssm_in[at + 1];
    ar[i] = dA[at];
    ai[i] = dA[at + 1];
    br[i] = dB[at];
    bi[i] = dB[at + 1];
    cr[i] = C[at];
    ci[i] = C[at + 1];
  }
"""
    + LAYER_NORM
    + """
  float q = 0.0f, k = 0.0f, v = 0.0f;
  for (int s = 0; s < STEPS; s += AHEAD) {
    for (int a = 0; a < AHEAD; a++) {
      const int i = (s + a) * STEP + lane * L;
      if (i < K) {
        for (int j = 0; j < L; j++) {
          q += static_cast<float>(wq[a].x[j]) * h[i + j];
          k += static_cast<float>(wk[a].x[j]) * h[i + j];
          v += static_cast<float>(wv[a].x[j]) * h[i + j];
        }
      }
    }
    if (s + AHEAD < STEPS) {
      for (int a = 0; a < AHEAD; a++) {
        const int i = (s + AHEAD + a) * STEP + lane * L;
        const size_t at = size_t(row) * K + (i < K ? i : 0);
        wq[a] = load_wide<Q, L>(Wq + at);
        wk[a] = load_wide<Q, L>(Wk + at);
        wv[a] = load_wide<Q, L>(Wv + at);
      }
    }
  }
  q = simd_sum(q);
  k = simd_sum(k);
  v = simd_sum(v);
  if (sizeof(Q) == 1) {
    q *= static_cast<float>(sq[row]);
    k *= static_cast<float>(sk[row]);
    v *= static_cast<float>(sv[row]);
  }
  q += static_cast<float>(bq[row]);
  k += static_cast<float>(bk[row]);
  v += static_cast<float>(bv[row]);
  if (c >= K) { return; }

  float partial = 0.0f;
  for (int i = TAPS - 1; i >= 0; --i) {  // from the last tap down: tap 32 i takes what tap 32 i - 1 held
    const float below = simd_shuffle_up(tap[i], 1);
    const float carry = i > 0 ? simd_broadcast(tap[i > 0 ? i - 1 : 0], 31) : 0.0f;
    tap[i] = (lane == 0 ? carry : below) + tap_b[i] * k;
    partial += tap_c[i] * tap[i];
    shift_out[(c * TAPS + i) * 32 + lane] = tap[i];
  }
  const float u = (simd_sum(partial) + shift_D[c] * k) * v;
  float y = 0.0f;
  for (int i = 0; i < MODES; i++) {
    const int at = ((c * MODES + i) * 32 + lane) * 2;
    const float re = ar[i] * sr[i] - ai[i] * si[i] + br[i] * u;
    const float im = ar[i] * si[i] + ai[i] * sr[i] + bi[i] * u;
    ssm_out[at] = re;
    ssm_out[at + 1] = im;
    y += cr[i] * re - ci[i] * im;
  }
  y = 2.0f * simd_sum(y) + D[c] * u;
  if (lane == 0) { out[c] = static_cast<T>(y * q); }
"""
)

STEP_INPUTS = ["shift_in", "ssm_in", "shift_B", "shift_C", "shift_D", "dA", "dB", "C", "D"]
MIXER_KERNEL = layer_kernel(
    "h3_mixer", ["x", "norm_w", "norm_b", "Wq", "bq", "Wk", "bk", "Wv", "bv", "sq", "sk", "sv", *STEP_INPUTS],
    ["out", "shift_out", "ssm_out"], MIXER,
)  # fmt: skip


def mixer_usable(x, layer_norm, projections, params, stream=None):
    """Whether `h3_mixer` runs for these arguments."""
    variant = _mixer_variant(x, layer_norm, projections, params)
    return variant is not None and _dispatch.usable(
        MIXER_KERNEL, "h3_step", variant, stream, lambda: _mixer_selftest(variant)
    )


def h3_mixer(x, layer_norm, projections, shift_state, ssm_state, params, *, stream=None):
    """x [K] -> (y [K], shift_state, ssm_state), the states [1, K, N] and [1, K, 1, 1, M, 2].

    layer_norm   (weight, bias, eps)
    projections  (Wq, bq, Wk, bk, Wv, bv), with the three scales behind them where the weights are int8
    Only where `mixer_usable` says so."""
    return MIXER_KERNEL(
        **_mixer_arguments(x, layer_norm, projections, shift_state, ssm_state, params), stream=stream
    )


class _Mixer(NamedTuple):
    """What h3_mixer is compiled for."""

    dtype: mx.Dtype
    width: int
    taps: int  # / 32
    modes: int  # / 32
    int8: bool = False


def _mixer_variant(x, layer_norm, projections, params):
    K, N, M = x.shape[0], params.shift_B.shape[1], params.dA.shape[1]
    weights, biases, scales = projections[:6:2], projections[1:6:2], projections[6:]
    int8 = weights[0].dtype == mx.int8
    if x.ndim != 1 or K % 4 or K > MAX_WIDTH or x.dtype not in FLOATS or len(scales) != (3 if int8 else 0):
        return None
    if any(a.dtype != x.dtype for a in (*layer_norm[:2], *biases)) or any(a.dtype != mx.float32 for a in scales):
        return None
    if any(a.dtype != (mx.int8 if int8 else x.dtype) for a in weights):
        return None
    if params.dA.shape[0] != K or N % 32 or M % 32 or K * max(N, 2 * M) >= 2**30:
        return None
    return _Mixer(x.dtype, K, N // 32, M // 32, int8)


def _mixer_arguments(x, layer_norm, projections, shift_state, ssm_state, params):
    dtype, K, taps, modes, int8 = _mixer_variant(x, layer_norm, projections, params)
    weights = mx.int8 if int8 else dtype
    scales = projections[6:] if int8 else projections[1:6:2]
    return {
        "inputs": [x, *layer_norm[:2], *projections[:6], *scales, shift_state, ssm_state, *params],
        "template": [("T", dtype), ("Q", weights), ("K", K), ("L", lanes(weights, K)), ("SG", SIMDGROUPS),
                     ("EPS", float_bits(layer_norm[2])), ("TAPS", taps), ("MODES", modes)],
        "grid": (-(-K // SIMDGROUPS) * SIMDGROUPS * 32, 1, 1),
        "threadgroup": (SIMDGROUPS * 32, 1, 1),
        "output_shapes": [(K,), shift_state.shape, ssm_state.shape],
        "output_dtypes": [dtype, mx.float32, mx.float32],
    }


def mixer_reference(x, layer_norm, projections, shift_state, ssm_state, params):
    """`h3_mixer` in plain MLX ops, in fp32 between its input and its output."""
    f = lambda a: a.astype(mx.float32)  # noqa: E731
    h = mx.fast.layer_norm(f(x), f(layer_norm[0]), f(layer_norm[1]), layer_norm[2])
    scales = projections[6:] or (1.0, 1.0, 1.0)
    q, k, v = ((f(W) @ h * s + f(b))[None, None] for W, b, s in zip(projections[:6:2], projections[1:6:2], scales))
    y, s, S = step_reference(q, k, v, shift_state, ssm_state, params)
    return y[0, 0].astype(x.dtype), s, S


def _mixer_case(variant, seed=7):
    dtype, K, taps, modes, int8 = _Mixer(*variant)
    normal, N, M = normals(seed), 32 * taps, 32 * modes
    norm = (1 + 0.1 * normal(K)).astype(dtype), (0.1 * normal(K)).astype(dtype), 1e-5
    projections = [(normal(*s) * K ** (-0.5 if len(s) > 1 else 0)).astype(dtype) for s in ((K, K), (K,)) * 3]
    if int8:
        for i in (0, 2, 4):
            projections[i], scale = to_int8(projections[i])
            projections.append(scale)
    params = H3StepParams(normal(K, N) / N**0.5, normal(K, N) / N**0.5, normal(K), 0.3 * normal(K, M, 2),
                          normal(K, M, 2) / M**0.5, normal(K, M, 2) / M**0.5, normal(K))  # fmt: skip
    return normal(K).astype(dtype), norm, projections, normal(1, K, N), normal(1, K, 1, 1, M, 2), params


def _mixer_selftest(variant):
    args = _mixer_case(variant)
    return error_ratio(h3_mixer(*args), mixer_reference(*args), (2 * BOUND[variant[0]], 1e-3, 1e-3))
