"""Whole pieces of a layer for one token of one sequence: four launches a layer in place of about twenty.

    h3_mixer       y = step(Wq h + bq, Wk h + bk, Wv h + bv), h = LayerNorm(x); both states move on (head_dim 1)
    norm_linear    y = activation(W h + b), h = LayerNorm(x), or h = x without a norm; plus a residual

x, y, weights and biases in one dtype, float32 | float16 | bfloat16; x [K], W [N, K]; sums, norm and states in fp32. What
lies between the pieces' operations (h, q, k, v) is never rounded to that dtype, so results are a little closer to fp32
than those of the separate operations. Weights may be int8 with an fp32 scale for each output, which multiplies its sum.

A simdgroup makes an output (or several): its lanes walk along a row of W side by side, 4 or 8 weights each, with several
reads under way, the first ones before the norm. Every threadgroup normalises x for itself, into threadgroup memory: K
values, far fewer than the weights that it reads. For h3_mixer a simdgroup makes q, k and v of one channel, and then has all that the channel's step needs (h3_step.py).
"""

import functools
import struct
from typing import NamedTuple

import mlx.core as mx

from mlx_cosyh3.kernels import _dispatch
from mlx_cosyh3.kernels._gpu import GpuKernel
from mlx_cosyh3.kernels._trust import BOUND, error_ratio, normals
from mlx_cosyh3.kernels.h3_step import H3StepParams
from mlx_cosyh3.kernels.h3_step import reference as step_reference

SIMDGROUPS = 8  # of a threadgroup
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
MAX_WIDTH = 6144  # values that fit a threadgroup's memory, with a margin

# WIDE neighbouring weights of a lane, read at once; L counts them so that K % L == 0.
WIDE = """
template <typename T, int L> struct ALIGNED(L * sizeof(T)) LayerWide { T x[L]; };
"""
METAL_WORDS = """
#define MOST_AHEAD 4
#define ALIGNED(n)
#define FLOAT_OF(bits) as_type<float>(bits)
"""
CUDA_WORDS = """
#define MOST_AHEAD 8
#define ALIGNED(n) alignas(n)
#define FLOAT_OF(bits) __int_as_float(bits)
namespace metal { __device__ __forceinline__ float exp(float x) { return expf(x); } }
"""
METAL_WIDE = """
template <typename T, int L, typename P> inline LayerWide<T, L> load_wide(P p) {
  LayerWide<T, L> w;
  for (int i = 0; i < L; i++) { w.x[i] = p[i]; }
  return w;
}
"""
CUDA_WIDE = """
template <typename T, int L> __device__ __forceinline__ LayerWide<T, L> load_wide(const T* p) {
  return *reinterpret_cast<const LayerWide<T, L>*>(p);
}
"""

# In the bodies below: T, Q (type of the weights: T or int8), K (width), SG (simdgroups), L as template arguments. A simdgroup reads 32 L weights of a row at
# once, and AHEAD of those reads are under way together: without that a read's latency, not the bandwidth, is what counts.
READS = """
  constexpr int STEP = 32 * L, STEPS = (K + STEP - 1) / STEP;
  constexpr int AHEAD = STEPS < MOST_AHEAD ? STEPS : MOST_AHEAD;
  const int lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
"""

# h = LayerNorm(x) into threadgroup memory; a thread's own share of x stays in registers. Template, besides: EPS, the bits
# of a float. (Not an array of one: MLX's CUDA back end keeps those where the host looks, and reading it costs 10 us.)
NORM = """
  constexpr int MINE = (K + 32 * SG - 1) / (32 * SG);
  threadgroup float h[K];
  threadgroup float parts[2 * SG];
  const int me = simdgroup * 32 + lane;
  float mine[MINE];
  float sum = 0.0f;
  for (int j = 0; j < MINE; j++) {
    const int i = me + 32 * SG * j;
    mine[j] = i < K ? static_cast<float>(x[i < K ? i : 0]) : 0.0f;
    sum += mine[j];
  }
  sum = simd_sum(sum);
  if (lane == 0) { parts[simdgroup] = sum; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float mean = 0.0f;
  for (int i = 0; i < SG; i++) { mean += parts[i]; }
  mean /= float(K);
  float square = 0.0f;
  for (int j = 0; j < MINE; j++) {
    mine[j] -= mean;
    if (me + 32 * SG * j < K) { square += mine[j] * mine[j]; }
  }
  square = simd_sum(square);
  if (lane == 0) { parts[SG + simdgroup] = square; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float variance = 0.0f;
  for (int i = 0; i < SG; i++) { variance += parts[SG + i]; }
  const float inverse = 1.0f / sqrt(variance / float(K) + FLOAT_OF(EPS));
  for (int j = 0; j < MINE; j++) {
    const int i = me + 32 * SG * j;
    if (i < K) { h[i] = mine[j] * inverse * static_cast<float>(norm_w[i]) + static_cast<float>(norm_b[i]); }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
"""

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
    + NORM
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

# Template, besides: ROWS (outputs of a simdgroup), ACT (0 none, 1 gelu_tanh), ADD (a residual), BIAS.
FIRST_READS = """
  const int N = W_shape[0];
  const int first = (threadgroup_position_in_grid.x * SG + simdgroup) * ROWS;
  LayerWide<Q, L> w[ROWS][AHEAD];
  size_t start[ROWS];  // past the end the last row again: read, never written
  for (int r = 0; r < ROWS; r++) { start[r] = size_t(first + r < N ? first + r : N - 1) * K; }
  for (int r = 0; r < ROWS; r++) {
    for (int a = 0; a < AHEAD; a++) {
      const int i = a * STEP + lane * L;
      w[r][a] = load_wide<Q, L>(W + start[r] + (i < K ? i : 0));
    }
  }
"""
LINEAR = """
  float sums[ROWS];
  for (int r = 0; r < ROWS; r++) { sums[r] = 0.0f; }
  for (int s = 0; s < STEPS; s += AHEAD) {
    for (int a = 0; a < AHEAD; a++) {
      const int i = (s + a) * STEP + lane * L;
      if (i < K) {
        for (int j = 0; j < L; j++) {
          const float value = INPUT(i + j);
          for (int r = 0; r < ROWS; r++) { sums[r] += static_cast<float>(w[r][a].x[j]) * value; }
        }
      }
    }
    if (s + AHEAD < STEPS) {
      for (int r = 0; r < ROWS; r++) {
        for (int a = 0; a < AHEAD; a++) {
          const int i = (s + AHEAD + a) * STEP + lane * L;
          w[r][a] = load_wide<Q, L>(W + start[r] + (i < K ? i : 0));
        }
      }
    }
  }
  for (int r = 0; r < ROWS; r++) {
    float sum = simd_sum(sums[r]);
    const int row = first + r;
    if (lane == 0 && row < N) {
      if (sizeof(Q) == 1) { sum *= static_cast<float>(scale[row]); }
      if (BIAS) { sum += static_cast<float>(bias[row]); }
      if (ACT == 1) { sum = sum / (1.0f + metal::exp(-1.5957691216057308f * (sum + 0.044715f * (sum * sum * sum)))); }
      if (ADD) { sum += static_cast<float>(residual[row]); }
      out[row] = static_cast<T>(sum);
    }
  }
"""
def _kernel(name, inputs, outputs, body, words=""):
    # A lane's reads under way: 16 bytes each on CUDA, where registers are many.
    return GpuKernel(
        name, inputs, outputs, body,
        header=METAL_WORDS + WIDE + METAL_WIDE + words, cuda_header=CUDA_WORDS + WIDE + CUDA_WIDE + words,
    )  # fmt: skip


STEP_INPUTS = ["shift_in", "ssm_in", "shift_B", "shift_C", "shift_D", "dA", "dB", "C", "D"]
MIXER_KERNEL = _kernel(
    "h3_mixer", ["x", "norm_w", "norm_b", "Wq", "bq", "Wk", "bk", "Wv", "bv", "sq", "sk", "sv", *STEP_INPUTS],
    ["out", "shift_out", "ssm_out"], MIXER,
)  # fmt: skip
NORM_LINEAR_KERNEL = _kernel(
    "h3_norm_linear", ["x", "norm_w", "norm_b", "W", "bias", "scale", "residual"], ["out"],
    READS + FIRST_READS + NORM + LINEAR,
    "#define INPUT(i) h[i]\n",
)  # fmt: skip
LINEAR_KERNEL = _kernel(
    "h3_linear", ["x", "W", "bias", "scale", "residual"], ["out"], READS + FIRST_READS + LINEAR,
    "#define INPUT(i) static_cast<float>(x[i])\n",
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
        "template": [("T", dtype), ("Q", weights), ("K", K), ("L", _lanes(weights, K)), ("SG", SIMDGROUPS),
                     ("EPS", _bits(layer_norm[2])), ("TAPS", taps), ("MODES", modes)],
        "grid": (-(-K // SIMDGROUPS) * SIMDGROUPS * 32, 1, 1),
        "threadgroup": (SIMDGROUPS * 32, 1, 1),
        "output_shapes": [(K,), shift_state.shape, ssm_state.shape],
        "output_dtypes": [dtype, mx.float32, mx.float32],
    }


def _lanes(dtype, K):
    """Weights that a lane reads at once: 16 bytes of them (int8: 8), or 4 where K has no more factors of 2."""
    return 8 if dtype != mx.float32 and K % 8 == 0 else 4


def mixer_reference(x, layer_norm, projections, shift_state, ssm_state, params):
    """`h3_mixer` in plain MLX ops, in fp32 between its input and its output."""
    f = lambda a: a.astype(mx.float32)  # noqa: E731
    h = mx.fast.layer_norm(f(x), f(layer_norm[0]), f(layer_norm[1]), layer_norm[2])
    scales = projections[6:] or (1.0, 1.0, 1.0)
    q, k, v = ((f(W) @ h * s + f(b))[None, None] for W, b, s in zip(projections[:6:2], projections[1:6:2], scales))
    y, s, S = step_reference(q, k, v, shift_state, ssm_state, params)
    return y[0, 0].astype(x.dtype), s, S


def linear_usable(x, W, bias=None, scale=None, layer_norm=None, residual=None, activation=None, stream=None):
    """Whether `norm_linear` runs for these arguments."""
    variant = _linear_variant(x, W, bias, layer_norm, residual, activation, scale)
    if variant is None:
        return False
    kernel = LINEAR_KERNEL if layer_norm is None else NORM_LINEAR_KERNEL
    return _dispatch.usable(kernel, "h3_step", variant, stream, lambda: _linear_selftest(variant))


def norm_linear(x, W, bias=None, scale=None, *, layer_norm=None, residual=None, activation=None, stream=None):
    """activation(W h + bias) + residual, h = LayerNorm(x) with (weight, bias, eps), or x: x [K], W [N, K] -> [N].

    scale   fp32 [N], with an int8 W and only then: (W h) scale in place of W h"""
    kernel = LINEAR_KERNEL if layer_norm is None else NORM_LINEAR_KERNEL
    return kernel(**_linear_arguments(x, W, bias, layer_norm, residual, activation, scale), stream=stream)[0]


class _Linear(NamedTuple):
    """What norm_linear is compiled for."""

    dtype: mx.Dtype
    width: int
    rows: int  # outputs of a simdgroup
    activation: int
    add: bool
    bias: bool
    normed: bool
    int8: bool = False


def _linear_variant(x, W, bias, layer_norm, residual, activation, scale=None):
    K, int8 = x.shape[0], W.dtype == mx.int8
    arrays = [*(a for a in (bias, residual) if a is not None), *(layer_norm[:2] if layer_norm else ())]
    if x.ndim != 1 or K % 4 or x.dtype not in FLOATS or any(a.dtype != x.dtype for a in arrays):
        return None
    if not (scale is not None and scale.dtype == mx.float32 if int8 else scale is None and W.dtype == x.dtype):
        return None
    if layer_norm is not None and K > MAX_WIDTH:
        return None
    # Many outputs: several a simdgroup, so that a threadgroup's own norm weighs less.
    rows = 1 if W.shape[0] <= 16384 else 4
    given = residual is not None, bias is not None, layer_norm is not None
    return _Linear(x.dtype, K, rows, int(activation == "gelu_tanh"), *given, int8)


def _linear_arguments(x, W, bias, layer_norm, residual, activation, scale=None):
    dtype, K, rows, act, add, has_bias, normed, int8 = _linear_variant(x, W, bias, layer_norm, residual, activation, scale)
    N = W.shape[0]
    norm = layer_norm[:2] if normed else ()
    template = [("T", dtype), ("Q", W.dtype), ("K", K), ("L", _lanes(W.dtype, K)), ("SG", SIMDGROUPS), ("ROWS", rows), ("ACT", act), ("ADD", add),
                ("BIAS", has_bias), ("EPS", _bits(layer_norm[2]) if normed else 0)]  # fmt: skip
    return {
        "inputs": [x, *norm, W, bias if has_bias else x, scale if int8 else x, residual if add else x],
        "template": template,
        "grid": (-(-N // (SIMDGROUPS * rows)) * SIMDGROUPS * 32, 1, 1),
        "threadgroup": (SIMDGROUPS * 32, 1, 1),
        "output_shapes": [(N,)],
        "output_dtypes": [dtype],
    }


def linear_reference(x, W, bias=None, scale=None, *, layer_norm=None, residual=None, activation=None):
    """`norm_linear` in plain MLX ops, in fp32 between its input and its output."""
    f = lambda a: a.astype(mx.float32)  # noqa: E731
    h = f(x) if layer_norm is None else mx.fast.layer_norm(f(x), f(layer_norm[0]), f(layer_norm[1]), layer_norm[2])
    y = f(W) @ h
    y = y if scale is None else y * scale
    y = y if bias is None else y + f(bias)
    if activation == "gelu_tanh":
        y = y * mx.sigmoid(1.5957691216057308 * (y + 0.044715 * (y * y * y)))
    return (y if residual is None else y + f(residual)).astype(x.dtype)


@functools.lru_cache
def _bits(value):
    """The bits of a number as fp32, as an int."""
    return struct.unpack("i", struct.pack("f", value))[0]


def _mixer_case(variant, seed=7):
    dtype, K, taps, modes, int8 = _Mixer(*variant)
    normal, N, M = normals(seed), 32 * taps, 32 * modes
    norm = (1 + 0.1 * normal(K)).astype(dtype), (0.1 * normal(K)).astype(dtype), 1e-5
    projections = [(normal(*s) * K ** (-0.5 if len(s) > 1 else 0)).astype(dtype) for s in ((K, K), (K,)) * 3]
    if int8:
        for i in (0, 2, 4):
            projections[i], scale = _to_int8(projections[i])
            projections.append(scale)
    params = H3StepParams(normal(K, N) / N**0.5, normal(K, N) / N**0.5, normal(K), 0.3 * normal(K, M, 2),
                          normal(K, M, 2) / M**0.5, normal(K, M, 2) / M**0.5, normal(K))  # fmt: skip
    return normal(K).astype(dtype), norm, projections, normal(1, K, N), normal(1, K, 1, 1, M, 2), params


def _to_int8(W):
    """(int8, fp32 scale of each row)"""
    W = W.astype(mx.float32)
    scale = mx.abs(W).max(axis=1) / 127
    return mx.round(W / scale[:, None]).astype(mx.int8), scale


def _mixer_selftest(variant):
    args = _mixer_case(variant)
    return error_ratio(h3_mixer(*args), mixer_reference(*args), (2 * BOUND[variant[0]], 1e-3, 1e-3))


def _linear_case(variant, N, seed=8):
    dtype, K, rows, act, add, has_bias, normed, int8 = _Linear(*variant)
    normal = normals(seed)
    norm = ((1 + 0.1 * normal(K)).astype(dtype), (0.1 * normal(K)).astype(dtype), 1e-5) if normed else None
    args = normal(K).astype(dtype), (normal(N, K) * K**-0.5).astype(dtype), normal(N).astype(dtype) if has_bias else None
    if int8:
        W, scale = _to_int8(args[1])
        args = args[0], W, args[2], scale
    return args, {"layer_norm": norm, "residual": normal(N).astype(dtype) if add else None,
                  "activation": "gelu_tanh" if act else None}  # fmt: skip


def _linear_selftest(variant):
    # `rows` follows from N, so the test takes a size that gives the variant's.
    args, options = _linear_case(variant, 37 if variant[2] == 1 else 16384 + 5)
    return error_ratio([norm_linear(*args, **options)], [linear_reference(*args, **options)], (BOUND[variant[0]],))
