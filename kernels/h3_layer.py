"""Whole pieces of a layer for one token of one sequence: four launches a layer in place of about twenty.

    h3_mixer       y = step(Wq h + bq, Wk h + bk, Wv h + bv), h = LayerNorm(x); both states move on (head_dim 1)
    norm_linear    y = activation(W h + b), h = LayerNorm(x), or h = x without a norm; plus a residual

x, y, weights and biases in one dtype, float32 | float16 | bfloat16; x [K], W [N, K]; sums, norm and states in fp32. What
lies between the pieces' operations (h, q, k, v) is never rounded to that dtype, so results are a little closer to fp32
than those of the separate operations.

A simdgroup makes one output after another: its lanes walk along a row of W side by side, four weights each. Every
threadgroup normalises x for itself, into threadgroup memory: K values, far fewer than the weights that it reads. For
h3_mixer a simdgroup makes q, k and v of one channel, and then has all that the channel's step needs (h3_step.py).
"""

import functools

import mlx.core as mx

from mlx_cosyh3.kernels import _dispatch
from mlx_cosyh3.kernels._gpu import GpuKernel
from mlx_cosyh3.kernels._trust import BOUND, error_ratio, normals
from mlx_cosyh3.kernels.h3_step import H3StepParams
from mlx_cosyh3.kernels.h3_step import reference as step_reference

SIMDGROUPS = 8  # of a threadgroup
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
MAX_WIDTH = 6144  # values that fit a threadgroup's memory, with a margin

METAL_FOUR = """
template <typename P> inline void load_four(P p, thread float* v) {
  for (int i = 0; i < 4; i++) { v[i] = static_cast<float>(p[i]); }
}
"""
CUDA_FOUR = """
template <typename T> struct alignas(4 * sizeof(T)) LayerFour { T x[4]; };
template <typename T> __device__ __forceinline__ void load_four(const T* p, float* v) {
  const LayerFour<T> four = *reinterpret_cast<const LayerFour<T>*>(p);
  for (int i = 0; i < 4; i++) { v[i] = static_cast<float>(four.x[i]); }
}
"""

# h = LayerNorm(x) into threadgroup memory. K and SG (simdgroups) are template arguments.
NORM = """
  threadgroup float h[K];
  threadgroup float parts[2 * SG];
  const int lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const int me = simdgroup * 32 + lane;
  float sum = 0.0f;
  for (int i = me; i < K; i += 32 * SG) {
    const float value = static_cast<float>(x[i]);
    h[i] = value;
    sum += value;
  }
  sum = simd_sum(sum);
  if (lane == 0) { parts[simdgroup] = sum; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float mean = 0.0f;
  for (int i = 0; i < SG; i++) { mean += parts[i]; }
  mean /= float(K);
  float square = 0.0f;
  for (int i = me; i < K; i += 32 * SG) {
    const float value = h[i] - mean;
    square += value * value;
  }
  square = simd_sum(square);
  if (lane == 0) { parts[SG + simdgroup] = square; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float variance = 0.0f;
  for (int i = 0; i < SG; i++) { variance += parts[SG + i]; }
  const float inverse = 1.0f / sqrt(variance / float(K) + eps[0]);
  for (int i = me; i < K; i += 32 * SG) {
    h[i] = (h[i] - mean) * inverse * static_cast<float>(norm_w[i]) + static_cast<float>(norm_b[i]);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
"""

# Template: T, K (width), SG, TAPS = N / 32, MODES = M / 32. Grid (32 SG x threadgroups, 1, 1).
MIXER = (
    NORM
    + """
  const int c = threadgroup_position_in_grid.x * SG + simdgroup;
  if (c >= K) { return; }
  float q = 0.0f, k = 0.0f, v = 0.0f;
  for (int i = lane * 4; i < K; i += 128) {
    float wq[4], wk[4], wv[4];
    load_four(Wq + size_t(c) * K + i, wq);
    load_four(Wk + size_t(c) * K + i, wk);
    load_four(Wv + size_t(c) * K + i, wv);
    for (int j = 0; j < 4; j++) {
      q += wq[j] * h[i + j];
      k += wk[j] * h[i + j];
      v += wv[j] * h[i + j];
    }
  }
  q = simd_sum(q) + static_cast<float>(bq[c]);
  k = simd_sum(k) + static_cast<float>(bk[c]);
  v = simd_sum(v) + static_cast<float>(bv[c]);

  float tap[TAPS];
  for (int i = 0; i < TAPS; i++) { tap[i] = shift_in[(c * TAPS + i) * 32 + lane]; }
  float partial = 0.0f;
  for (int i = TAPS - 1; i >= 0; --i) {  // from the last tap down: tap 32 i takes what tap 32 i - 1 held
    const int at = (c * TAPS + i) * 32 + lane;
    const float below = simd_shuffle_up(tap[i], 1);
    const float carry = i > 0 ? simd_broadcast(tap[i > 0 ? i - 1 : 0], 31) : 0.0f;
    tap[i] = (lane == 0 ? carry : below) + shift_B[at] * k;
    partial += shift_C[at] * tap[i];
    shift_out[at] = tap[i];
  }
  const float u = (simd_sum(partial) + shift_D[c] * k) * v;
  float y = 0.0f;
  for (int i = 0; i < MODES; i++) {
    const int at = ((c * MODES + i) * 32 + lane) * 2;
    const float sr = ssm_in[at], si = ssm_in[at + 1];
    const float re = dA[at] * sr - dA[at + 1] * si + dB[at] * u;
    const float im = dA[at] * si + dA[at + 1] * sr + dB[at + 1] * u;
    ssm_out[at] = re;
    ssm_out[at + 1] = im;
    y += C[at] * re - C[at + 1] * im;
  }
  y = 2.0f * simd_sum(y) + D[c] * u;
  if (lane == 0) { out[c] = static_cast<T>(y * q); }
"""
)

# Template: T, K, SG, ROWS (outputs a simdgroup makes), ACT (0 none, 1 gelu_tanh), ADD (a residual), BIAS. sizes: N.
LINEAR = """
  const int first = (threadgroup_position_in_grid.x * SG + simdgroup) * ROWS;
  const int N = sizes[0];
  for (int row = first; row < first + ROWS; row++) {
    if (row >= N) { return; }
    float sum = 0.0f;
    for (int i = lane * 4; i < K; i += 128) {
      float w[4];
      load_four(W + size_t(row) * K + i, w);
      for (int j = 0; j < 4; j++) { sum += w[j] * INPUT(i + j); }
    }
    sum = simd_sum(sum);
    if (lane == 0) {
      if (BIAS) { sum += static_cast<float>(bias[row]); }
      if (ACT == 1) { sum = sum / (1.0f + metal::exp(-1.5957691216057308f * (sum + 0.044715f * (sum * sum * sum)))); }
      if (ADD) { sum += static_cast<float>(residual[row]); }
      out[row] = static_cast<T>(sum);
    }
  }
"""
PLAIN = """
  const int lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
"""
CUDA_EXP = "namespace metal { __device__ __forceinline__ float exp(float x) { return expf(x); } }\n"


def _kernel(name, inputs, outputs, body, words=""):
    return GpuKernel(name, inputs, outputs, body, header=METAL_FOUR + words, cuda_header=CUDA_FOUR + CUDA_EXP + words)


STEP_INPUTS = ["shift_in", "ssm_in", "shift_B", "shift_C", "shift_D", "dA", "dB", "C", "D"]
MIXER_KERNEL = _kernel(
    "h3_mixer", ["x", "norm_w", "norm_b", "eps", "Wq", "bq", "Wk", "bk", "Wv", "bv", *STEP_INPUTS],
    ["out", "shift_out", "ssm_out"], MIXER,
)  # fmt: skip
NORM_LINEAR_KERNEL = _kernel(
    "h3_norm_linear", ["x", "norm_w", "norm_b", "eps", "W", "bias", "residual", "sizes"], ["out"], NORM + LINEAR,
    "#define INPUT(i) h[i]\n",
)  # fmt: skip
LINEAR_KERNEL = _kernel(
    "h3_linear", ["x", "W", "bias", "residual", "sizes"], ["out"], PLAIN + LINEAR,
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

    layer_norm   (weight, bias, eps);  projections: (Wq, bq, Wk, bk, Wv, bv). Only where `mixer_usable` says so."""
    return MIXER_KERNEL(
        **_mixer_arguments(x, layer_norm, projections, shift_state, ssm_state, params), stream=stream
    )


def _mixer_variant(x, layer_norm, projections, params):
    K, N, M = x.shape[0], params.shift_B.shape[1], params.dA.shape[1]
    arrays = (x, *layer_norm[:2], *projections)
    if x.ndim != 1 or K % 4 or K > MAX_WIDTH or x.dtype not in FLOATS or any(a.dtype != x.dtype for a in arrays):
        return None
    if params.dA.shape[0] != K or N % 32 or M % 32 or K * max(N, 2 * M) >= 2**30:
        return None
    return x.dtype, K, N // 32, M // 32


def _mixer_arguments(x, layer_norm, projections, shift_state, ssm_state, params):
    dtype, K, taps, modes = _mixer_variant(x, layer_norm, projections, params)
    return {
        "inputs": [x, *layer_norm[:2], _eps(layer_norm[2]), *projections, shift_state, ssm_state, *params],
        "template": [("T", dtype), ("K", K), ("SG", SIMDGROUPS), ("TAPS", taps), ("MODES", modes)],
        "grid": (-(-K // SIMDGROUPS) * SIMDGROUPS * 32, 1, 1),
        "threadgroup": (SIMDGROUPS * 32, 1, 1),
        "output_shapes": [(K,), shift_state.shape, ssm_state.shape],
        "output_dtypes": [dtype, mx.float32, mx.float32],
    }


def mixer_reference(x, layer_norm, projections, shift_state, ssm_state, params):
    """`h3_mixer` in plain MLX ops, in fp32 between its input and its output."""
    f = lambda a: a.astype(mx.float32)  # noqa: E731
    h = mx.fast.layer_norm(f(x), f(layer_norm[0]), f(layer_norm[1]), layer_norm[2])
    q, k, v = ((f(W) @ h + f(b))[None, None] for W, b in zip(projections[::2], projections[1::2]))
    y, s, S = step_reference(q, k, v, shift_state, ssm_state, params)
    return y[0, 0].astype(x.dtype), s, S


def linear_usable(x, W, bias=None, layer_norm=None, residual=None, activation=None, stream=None):
    """Whether `norm_linear` runs for these arguments."""
    variant = _linear_variant(x, W, bias, layer_norm, residual, activation)
    if variant is None:
        return False
    kernel = LINEAR_KERNEL if layer_norm is None else NORM_LINEAR_KERNEL
    return _dispatch.usable(kernel, "h3_step", variant, stream, lambda: _linear_selftest(variant))


def norm_linear(x, W, bias=None, *, layer_norm=None, residual=None, activation=None, stream=None):
    """activation(W h + bias) + residual, h = LayerNorm(x) with (weight, bias, eps), or x: x [K], W [N, K] -> [N]."""
    kernel = LINEAR_KERNEL if layer_norm is None else NORM_LINEAR_KERNEL
    return kernel(**_linear_arguments(x, W, bias, layer_norm, residual, activation), stream=stream)[0]


def _linear_variant(x, W, bias, layer_norm, residual, activation):
    arrays = [W, *(a for a in (bias, residual) if a is not None), *(layer_norm[:2] if layer_norm else ())]
    K = x.shape[0]
    if x.ndim != 1 or K % 4 or x.dtype not in FLOATS or any(a.dtype != x.dtype for a in arrays):
        return None
    if layer_norm is not None and K > MAX_WIDTH:
        return None
    # Many outputs: several a simdgroup, so that a threadgroup's own norm weighs less.
    rows = 1 if W.shape[0] <= 16384 else 8
    return x.dtype, K, rows, int(activation == "gelu_tanh"), residual is not None, bias is not None, layer_norm is not None


def _linear_arguments(x, W, bias, layer_norm, residual, activation):
    dtype, K, rows, act, add, has_bias, normed = _linear_variant(x, W, bias, layer_norm, residual, activation)
    N = W.shape[0]
    norm = [*layer_norm[:2], _eps(layer_norm[2])] if normed else []
    template = [("T", dtype), ("K", K), ("SG", SIMDGROUPS), ("ROWS", rows), ("ACT", act), ("ADD", add), ("BIAS", has_bias)]
    return {
        "inputs": [x, *norm, W, bias if has_bias else x, residual if add else x, _size(N)],
        "template": template,
        "grid": (-(-N // (SIMDGROUPS * rows)) * SIMDGROUPS * 32, 1, 1),
        "threadgroup": (SIMDGROUPS * 32, 1, 1),
        "output_shapes": [(N,)],
        "output_dtypes": [dtype],
    }


def linear_reference(x, W, bias=None, *, layer_norm=None, residual=None, activation=None):
    """`norm_linear` in plain MLX ops, in fp32 between its input and its output."""
    f = lambda a: a.astype(mx.float32)  # noqa: E731
    h = f(x) if layer_norm is None else mx.fast.layer_norm(f(x), f(layer_norm[0]), f(layer_norm[1]), layer_norm[2])
    y = f(W) @ h
    y = y if bias is None else y + f(bias)
    if activation == "gelu_tanh":
        y = y * mx.sigmoid(1.5957691216057308 * (y + 0.044715 * (y * y * y)))
    return (y if residual is None else y + f(residual)).astype(x.dtype)


@functools.lru_cache
def _eps(value):
    """An fp32 array of one, made once: a copy from the host costs more than a kernel."""
    return mx.array([value], dtype=mx.float32)


@functools.lru_cache
def _size(n):
    return mx.array([n], dtype=mx.int32)


def _mixer_case(variant, seed=7):
    dtype, K, taps, modes = variant
    normal, N, M = normals(seed), 32 * taps, 32 * modes
    norm = (1 + 0.1 * normal(K)).astype(dtype), (0.1 * normal(K)).astype(dtype), 1e-5
    projections = [(normal(*s) * K ** (-0.5 if len(s) > 1 else 0)).astype(dtype) for s in ((K, K), (K,)) * 3]
    params = H3StepParams(normal(K, N) / N**0.5, normal(K, N) / N**0.5, normal(K), 0.3 * normal(K, M, 2),
                          normal(K, M, 2) / M**0.5, normal(K, M, 2) / M**0.5, normal(K))  # fmt: skip
    return normal(K).astype(dtype), norm, projections, normal(1, K, N), normal(1, K, 1, 1, M, 2), params


def _mixer_selftest(variant):
    args = _mixer_case(variant)
    return error_ratio(h3_mixer(*args), mixer_reference(*args), (2 * BOUND[variant[0]], 1e-3, 1e-3))


def _linear_case(variant, N, seed=8):
    dtype, K, rows, act, add, has_bias, normed = variant
    normal = normals(seed)
    norm = ((1 + 0.1 * normal(K)).astype(dtype), (0.1 * normal(K)).astype(dtype), 1e-5) if normed else None
    args = normal(K).astype(dtype), (normal(N, K) * K**-0.5).astype(dtype), normal(N).astype(dtype) if has_bias else None
    return args, {"layer_norm": norm, "residual": normal(N).astype(dtype) if add else None,
                  "activation": "gelu_tanh" if act else None}  # fmt: skip


def _linear_selftest(variant):
    # `rows` follows from N, so the test takes a size that gives the variant's.
    args, options = _linear_case(variant, 37 if variant[2] == 1 else 16384 + 5)
    return error_ratio([norm_linear(*args, **options)], [linear_reference(*args, **options)], (BOUND[variant[0]],))
