"""A linear layer for one row, with the norm before it and all that follows: one launch in place of three to six.

    y = activation(W h + b) + residual      h = LayerNorm(x), RMSNorm(x), or x as it is
    y = silu(V h) * (U h)                   "silu_gate": the rows of W are those of V, then those of U
    y = rotated(W h + b)                    "rotary": q, k and v side by side, heads of q and k turned by their position

x [K], W [N, K], biases, norm weights and residual in one dtype, float32 | float16 | bfloat16; sums and norm in fp32. What
lies between (h, the sums) is never rounded to that dtype, so results are a little closer to fp32 than those of separate
operations. Weights may be int8 with an fp32 scale for each output, which multiplies its sum.

A simdgroup makes an output (or several): its lanes walk along a row of W side by side, 4 or 8 weights each, with several
reads under way, the first ones before the norm. Every threadgroup normalises x for itself, into threadgroup memory: K
values, far fewer than the weights that it reads.
"""

import functools
import struct
from typing import NamedTuple

import mlx.core as mx

from mlx_cosyh3.kernels import _dispatch
from mlx_cosyh3.kernels._gpu import GpuKernel
from mlx_cosyh3.kernels._trust import BOUND, error_ratio, normals

SIMDGROUPS = 8  # of a threadgroup
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
MAX_WIDTH = 6144  # values that fit a threadgroup's memory, with a margin
ACTIVATIONS = {None: 0, "gelu_tanh": 1, "silu_gate": 2, "rotary": 3}

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

# In the bodies below: T, Q (type of the weights: T or int8), K (width), SG (simdgroups), L as template arguments. A
# simdgroup reads 32 L weights of a row at once, and AHEAD of those reads are under way together: without that a read's
# latency, not the bandwidth, is what counts.
READS = """
  constexpr int STEP = 32 * L, STEPS = (K + STEP - 1) / STEP;
  constexpr int AHEAD = STEPS < MOST_AHEAD ? STEPS : MOST_AHEAD;
  const int lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
"""

# h = LayerNorm(x) into threadgroup memory; a thread's own share of x stays in registers. Template, besides: EPS, the bits
# of a float. (Not an array of one: MLX's CUDA back end keeps those where the host looks, and reading it costs 10 us.)
LAYER_NORM = """
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

RMS_NORM = """
  constexpr int MINE = (K + 32 * SG - 1) / (32 * SG);
  threadgroup float h[K];
  threadgroup float parts[SG];
  const int me = simdgroup * 32 + lane;
  float mine[MINE];
  float square = 0.0f;
  for (int j = 0; j < MINE; j++) {
    const int i = me + 32 * SG * j;
    mine[j] = i < K ? static_cast<float>(x[i < K ? i : 0]) : 0.0f;
    square += mine[j] * mine[j];
  }
  square = simd_sum(square);
  if (lane == 0) { parts[simdgroup] = square; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  square = 0.0f;
  for (int i = 0; i < SG; i++) { square += parts[i]; }
  const float inverse = 1.0f / sqrt(square / float(K) + FLOAT_OF(EPS));
  for (int j = 0; j < MINE; j++) {
    const int i = me + 32 * SG * j;
    if (i < K) { h[i] = mine[j] * inverse * static_cast<float>(norm_w[i]); }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
"""

# Template, besides: ROWS (of W, a simdgroup), ACT (see ACTIVATIONS), ADD (a residual), BIAS; HALF, TURNED. With a gate
# the first half of a simdgroup's rows is V's, the second that of U for the same outputs. With "rotary" it has two rows,
# HALF apart in a head of 2 HALF, which are turned together if they lie before row TURNED.
FIRST_READS = """
  constexpr int OUTS = ACT == 2 ? ROWS / 2 : ROWS;
  const int N = ACT == 2 ? W_shape[0] / 2 : W_shape[0];
  const int pair = threadgroup_position_in_grid.x * SG + simdgroup;
  const int first = ACT == 3 ? pair / HALF * 2 * HALF + pair % HALF : pair * OUTS;
  LayerWide<Q, L> w[ROWS][AHEAD];
  int rows[ROWS];  // past the end the last row again: read, never written
  size_t start[ROWS];
  for (int r = 0; r < ROWS; r++) {
    const int n = first + (ACT == 3 ? r * HALF : r % OUTS);
    rows[r] = (n < N ? n : N - 1) + (r < OUTS ? 0 : N);
    start[r] = size_t(rows[r]) * K;
  }
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
    sums[r] = simd_sum(sums[r]);
    if (sizeof(Q) == 1) { sums[r] *= static_cast<float>(scale[rows[r]]); }
    if (BIAS) { sums[r] += static_cast<float>(bias[rows[r]]); }
  }
  if (ACT == 3 && first < TURNED) {
    const int i = pair % HALF;
    const float c = turn[i], d = turn[HALF + i], even = sums[0], odd = sums[ROWS - 1];
    sums[0] = even * c - odd * d;
    sums[ROWS - 1] = odd * c + even * d;
  }
  for (int r = 0; r < OUTS; r++) {
    const int n = first + (ACT == 3 ? r * HALF : r);
    if (lane == 0 && n < N) {
      float y = sums[r];
      if (ACT == 1) { y = y / (1.0f + metal::exp(-1.5957691216057308f * (y + 0.044715f * (y * y * y)))); }
      if (ACT == 2) { y = y / (1.0f + metal::exp(-y)) * sums[ROWS - OUTS + r]; }
      if (ADD) { y += static_cast<float>(residual[n]); }
      out[n] = static_cast<T>(y);
    }
  }
"""


def layer_kernel(name, inputs, outputs, body, words=""):
    """A kernel made of these pieces; h3_layer.py has another one."""
    return GpuKernel(
        name, inputs, outputs, body,
        header=METAL_WORDS + WIDE + METAL_WIDE + words, cuda_header=CUDA_WORDS + WIDE + CUDA_WIDE + words,
    )  # fmt: skip


def _kernel(name, norm_inputs, norm):
    words = "#define INPUT(i) " + ("h[i]\n" if norm else "static_cast<float>(x[i])\n")
    inputs = ["x", *norm_inputs, "W", "bias", "scale", "residual", "turn"]
    return layer_kernel(name, inputs, ["out"], READS + FIRST_READS + norm + LINEAR, words)


KERNELS = {
    None: _kernel("linear_row", [], ""),
    "layer": _kernel("layer_norm_linear", ["norm_w", "norm_b"], LAYER_NORM),
    "rms": _kernel("rms_norm_linear", ["norm_w"], RMS_NORM),
}


def usable(x, W, bias=None, scale=None, *, norm=None, residual=None, activation=None, heads=None, stream=None):
    """Whether `norm_linear` runs for these arguments."""
    variant = variant_of(x, W, bias, scale, norm, residual, activation, heads)
    if variant is None:
        return False
    return _dispatch.usable(KERNELS[variant.norm], "norm_linear", variant, stream, lambda: _selftest(variant))


def norm_linear(
    x, W, bias=None, scale=None, *, norm=None, residual=None, activation=None, heads=None, turn=None, stream=None
):
    """activation(W h + bias) + residual: x [K], W [N, K] -> [N] ([N / 2] with "silu_gate"). Only where `usable`.

    scale        fp32 [N], with an int8 W and only then: (W h) scale in place of W h
    norm         None; (weight, bias, eps) for LayerNorm; (weight, None, eps) for RMSNorm
    activation   one of ACTIVATIONS
    heads, turn  with "rotary": (size of a head, how many of them to turn, from the first on), and fp32 [size]: cosines
                 of the position's size / 2 angles, then their sines (half-split rotation, as Qwen2's)"""
    variant = variant_of(x, W, bias, scale, norm, residual, activation, heads)
    return KERNELS[variant.norm](**arguments(variant, x, W, bias, scale, norm, residual, turn), stream=stream)[0]


def bound(dtype, W, bias=None, scale=None, *, norm=None, activation=None, heads=None, adds=False):
    """`norm_linear` with all that stays given -> function(x, last=None): `last` is the residual (adds=True) or `turn`.

    For calls that come thousands of times: what Python does for each is little more than the launch."""
    x, last = mx.zeros((W.shape[1],), dtype=dtype), mx.zeros((W.shape[0],), dtype=dtype)
    residual, turn = last if adds else None, None if adds else last
    variant = variant_of(x, W, bias, scale, norm, residual, activation, heads)
    fixed = arguments(variant, x, W, bias, scale, norm, residual, turn)
    kernel, inputs = KERNELS[variant.norm], fixed.pop("inputs")
    given = [None if a is x else a for a in inputs[1:-2]]  # None: not used, x stands in

    def call(x, last=None):
        last = x if last is None else last
        return kernel(inputs=[x, *(x if a is None else a for a in given), *((last, x) if adds else (x, last))], **fixed)[0]

    return call


class Variant(NamedTuple):
    """What norm_linear is compiled for."""

    dtype: mx.Dtype
    width: int
    rows: int  # of W, a simdgroup
    activation: int
    add: bool
    bias: bool
    norm: str  # a key of KERNELS
    int8: bool = False
    half: int = 1  # of a head, with "rotary"
    turned: int = 0  # rows of heads that are turned


def variant_of(x, W, bias, scale, norm, residual, activation, heads=None):
    """The Variant of a call, or None if the kernels do not take it."""
    K, dtype, int8 = x.shape[0], x.dtype, W.dtype == mx.int8
    if x.ndim != 1 or K % 4 or dtype not in FLOATS or (norm is not None and K > MAX_WIDTH):
        return None
    if any(a is not None and a.dtype != dtype for a in (bias, residual, *(norm[:2] if norm else ()))):
        return None
    if not (scale is not None and scale.dtype == mx.float32 if int8 else scale is None and W.dtype == dtype):
        return None
    # Many outputs: several a simdgroup, so that a threadgroup's own norm weighs less.
    rotary, gated = activation == "rotary", activation == "silu_gate"
    rows = 2 if rotary else 4 if W.shape[0] > 16384 else 2 if gated else 1
    if rotary and (heads is None or heads[0] % 2 or W.shape[0] % heads[0]):
        return None
    size, count = heads if rotary else (2, 0)
    kind = None if norm is None else "rms" if norm[1] is None else "layer"
    given = residual is not None, bias is not None
    return Variant(dtype, K, rows, ACTIVATIONS[activation], *given, kind, int8, size // 2, size * count)


def arguments(variant, x, W, bias, scale, norm, residual, turn=None):
    """The keyword arguments of a call of the kernel."""
    v, N = variant, W.shape[0]
    outs, rows = (N // 2, v.rows // 2) if v.activation == 2 else (N, v.rows)
    given = [a for a in norm[:2] if a is not None] if norm else []
    return {
        "inputs": [x, *given, W, bias if v.bias else x, scale if v.int8 else x, residual if v.add else x,
                   turn if v.activation == 3 else x],
        "template": [("T", v.dtype), ("Q", W.dtype), ("K", v.width), ("L", lanes(W.dtype, v.width)), ("SG", SIMDGROUPS),
                     ("ROWS", v.rows), ("ACT", v.activation), ("ADD", v.add), ("BIAS", v.bias),
                     ("EPS", float_bits(norm[2]) if norm else 0), ("HALF", v.half), ("TURNED", v.turned)],
        "grid": (-(-outs // (SIMDGROUPS * rows)) * SIMDGROUPS * 32, 1, 1),
        "threadgroup": (SIMDGROUPS * 32, 1, 1),
        "output_shapes": [(outs,)],
        "output_dtypes": [v.dtype],
    }  # fmt: skip


def lanes(dtype, K):
    """Weights that a lane reads at once: 16 bytes of them (int8: 8), or 4 where K has no more factors of 2."""
    return 8 if dtype != mx.float32 and K % 8 == 0 else 4


@functools.lru_cache
def float_bits(value):
    """The bits of a number as fp32, as an int."""
    return struct.unpack("i", struct.pack("f", value))[0]


def reference(x, W, bias=None, scale=None, *, norm=None, residual=None, activation=None, heads=None, turn=None):
    """`norm_linear` in plain MLX ops, in fp32 between its input and its output."""
    f = lambda a: a.astype(mx.float32)  # noqa: E731
    h = f(x)
    if norm is not None:
        h = mx.fast.rms_norm(h, f(norm[0]), norm[2]) if norm[1] is None else mx.fast.layer_norm(h, f(norm[0]), f(norm[1]), norm[2])
    y = f(W) @ h
    y = y if scale is None else y * scale
    y = y if bias is None else y + f(bias)
    if activation == "gelu_tanh":
        y = y * mx.sigmoid(1.5957691216057308 * (y + 0.044715 * (y * y * y)))
    if activation == "silu_gate":
        gate, up = mx.split(y, 2)
        y = gate * mx.sigmoid(gate) * up
    if activation == "rotary":
        y = _rotated(y, *heads, turn)
    return (y if residual is None else y + f(residual)).astype(x.dtype)


def _rotated(y, size, count, turn):
    parts = y.reshape(-1, 2, size // 2)  # [heads, half of a head, ..]
    a, b = parts[:count, 0], parts[:count, 1]
    cosines, sines = turn.reshape(2, -1)
    turned = mx.stack([a * cosines - b * sines, b * cosines + a * sines], axis=1)
    return mx.concatenate([turned, parts[count:]]).reshape(-1)


def to_int8(W):
    """W as (int8, fp32 scale of each row)."""
    W = W.astype(mx.float32)
    scale = mx.abs(W).max(axis=1) / 127
    return mx.round(W / scale[:, None]).astype(mx.int8), scale


def case(variant, N, seed=8):
    """Random arguments of the variant for N outputs -> (positional ones, named ones)."""
    v = Variant(*variant)
    normal, dtype, rows = normals(seed), v.dtype, 2 * N if v.activation == 2 else N
    norm = None
    if v.norm is not None:
        norm = (1 + 0.1 * normal(v.width)).astype(dtype), (0.1 * normal(v.width)).astype(dtype), 1e-5
        norm = norm if v.norm == "layer" else (norm[0], None, 1e-5)
    W = (normal(rows, v.width) * v.width**-0.5).astype(dtype)
    W, scale = to_int8(W) if v.int8 else (W, None)
    args = normal(v.width).astype(dtype), W, normal(rows).astype(dtype) if v.bias else None, scale
    name = {number: name for name, number in ACTIVATIONS.items()}[v.activation]
    more = {}
    if name == "rotary":
        angles = 3 * normal(v.half)
        more = {"heads": (2 * v.half, v.turned // (2 * v.half)), "turn": mx.concatenate([mx.cos(angles), mx.sin(angles)])}
    return args, {"norm": norm, "residual": normal(N).astype(dtype) if v.add else None, "activation": name} | more


def _selftest(variant):
    # `rows` follows from N, so the test takes a size that gives the variant's: here, 37 outputs, or whole heads.
    N = variant.turned + 6 * variant.half if variant.activation == 3 else 37 if variant.rows < 4 else 16384 + 5
    args, options = case(variant, N)
    return error_ratio([norm_linear(*args, **options)], [reference(*args, **options)], (BOUND[variant.dtype],))
