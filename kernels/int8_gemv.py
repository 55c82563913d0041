"""Kernels for few rows of x: y = x W^T read straight from the int8 weight [N, K], each byte of it once.

Both are bound by reading the weight. A simdgroup makes R outputs of M rows of x: its lanes walk along K side by side,
4 weights (Metal) or 8 (CUDA) a lane and step, and keep M x R sums, so that a value of x serves R outputs. S simdgroups
may share the K of the same outputs where there are few of them; their sums meet in threadgroup memory. More rows than
M are slices of the grid, which read the weight again, most often from cache.

    INT8_GEMV         x float32 | float16 | bfloat16, fp32 sums;  y = activation(sum scale + bias) times + residual
    INT8_GEMV_INT8    x int8, int32 sums;                         y = ((float) sum x_scale) scale + bias

The second gives the same bits everywhere: every operation is rounded once. Only the last product and sum could be
contracted to an fma. CUDA has functions that forbid it. Metal's compiler may contract within a statement even in safe
mode, and the pragma against it is younger than the oldest Metal we run on, so the product passes through an integer
exclusive-or with a zero that the compiler cannot know. (Metal may flush subnormal numbers; none occur unless scales do.)

K and N are free. Wide loads need K % 4 == 0 on Metal, K % 8 == 0 (16 for int8 x) and aligned arrays on CUDA; otherwise
single bytes are read. On Metal the weight, and an int8 x, must have 8 elements or more and begin on a multiple of 4
bytes, as all arrays do but odd slices of flat int8 arrays.
"""

import functools

import mlx.core as mx

from mlx_cosyh3.kernels._gpu import GpuKernel

ACTIVATIONS = {None: 0, "gelu_tanh": 1, "silu": 2}
MAX_ROWS = 8  # of one slice
SIMDGROUPS = 4  # of a threadgroup, or more where more share an output

# y -> activation(y): both are y sigmoid(z), which an overflow of exp takes to 0, not to NaN.
EPILOGUE = """
template <int A> INT8_FUNC float int8_activate(float y) {
  if (A == 0) return y;
  float z = A == 1 ? 1.5957691216057308f * (y + 0.044715f * (y * y * y)) : y;
  return y / (1.0f + INT8_EXP(-z));
}
"""
METAL_EPILOGUE = "#define INT8_FUNC inline\n#define INT8_EXP metal::exp\n" + EPILOGUE
CUDA_EPILOGUE = "#define INT8_FUNC __device__ __forceinline__\n#define INT8_EXP expf\n" + EPILOGUE

# What the end of a float kernel reads, with row, n, N at hand, and what it does with that and `sum`.
OPERANDS = """
    const size_t at = size_t(row) * N + n;
    const float scale_n = scale[n], bias_n = BIAS ? bias[n] : 0.0f;
    const float times_n = TIMES ? static_cast<float>(times[at]) : 1.0f;
    const float residual_n = RESIDUAL ? static_cast<float>(residual[at]) : 0.0f;
"""
FINISH = """
    float y = sum * scale_n;
    if (BIAS) y += bias_n;
    y = int8_activate<ACT>(y);
    if (TIMES) y *= times_n;
    if (RESIDUAL) y += residual_n;
    out[at] = static_cast<T>(y);
"""

# Where this thread works. M, R, S are template arguments.
PLACE = """
  constexpr int G = S > 4 ? S : 4;  // simdgroups of the threadgroup
  const int rows = x_shape[0], N = weight_shape[0], K = weight_shape[1];
  const int lane = thread_index_in_simdgroup, simdgroup = simdgroup_index_in_threadgroup;
  const int part = simdgroup % S;
  const int n0 = (int(threadgroup_position_in_grid.x) * (G / S) + simdgroup / S) * R;
  const int row0 = int(threadgroup_position_in_grid.y) * M;
  size_t wrow[R], xrow[M];  // past the end the last one again: read, never written
  for (int r = 0; r < R; r++) wrow[r] = size_t(n0 + r < N ? n0 + r : N - 1) * K;
  for (int m = 0; m < M; m++) xrow[m] = size_t(row0 + m < rows ? row0 + m : rows - 1) * K;
"""

# The sums of the S parts -> those of part 0. `mine` is this lane's value.
JOIN = """
  if (S > 1) {
    parts[simdgroup * 32 + lane] = mine;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (part == 0)
      for (int s = 1; s < S; s++) mine += parts[(simdgroup + s) * 32 + lane];
  }
"""


def metal_body(kind, wide_load, wide_product, narrow_product, finish):
    """Body of either kernel for Metal; `kind` is the type of a sum."""
    return f"""{PLACE}
  threadgroup {kind} parts[G * 32];
  {kind} sums[M][R];
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) sums[m][r] = 0;
  if (K % 4 == 0) {{
    auto w4 = reinterpret_cast<const device char4*>(weight);
    for (int k = 4 * (lane + 32 * part); k < K; k += 128 * S) {{
      {kind}4 w[R];
      for (int r = 0; r < R; r++) w[r] = {kind}4(w4[(wrow[r] + k) / 4]);
      for (int m = 0; m < M; m++) {{
        {wide_load}
        for (int r = 0; r < R; r++) sums[m][r] += {wide_product};
      }}
    }}
  }} else {{
    for (int k = lane + 32 * part; k < K; k += 32 * S)
      for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) sums[m][r] += {narrow_product};
  }}
  {kind} mine = 0;  // lane m R + r keeps the sum of row m and output r
  for (int m = 0; m < M; m++)
    for (int r = 0; r < R; r++) {{
      {kind} total = simd_sum(sums[m][r]);
      if (lane == m * R + r) mine = total;
    }}
{JOIN}
  const int row = row0 + lane / R, n = n0 + lane % R;
  if (part == 0 && lane < M * R && row < rows && n < N) {{
{finish}
  }}
"""


METAL_BODY = metal_body(
    "float",
    "auto p = x + xrow[m] + k; float4 v = float4(float(p[0]), float(p[1]), float(p[2]), float(p[3]));",
    "v.x * w[r].x + v.y * w[r].y + v.z * w[r].z + v.w * w[r].w",
    "static_cast<float>(x[xrow[m] + k]) * float(weight[wrow[r] + k])",
    OPERANDS + "    const float sum = mine;" + FINISH,
)
METAL_INTEGER_BODY = metal_body(
    "int",
    "int4 v = int4(reinterpret_cast<const device char4*>(x)[(xrow[m] + k) / 4]);",
    "v.x * w[r].x + v.y * w[r].y + v.z * w[r].z + v.w * w[r].w",
    "int(x[xrow[m] + k]) * int(weight[wrow[r] + k])",
    """
    float y = static_cast<float>(mine) * x_scale[row];
    y = y * scale[n];
    y = as_type<float>(as_type<uint>(y) ^ uint(weight_ndim - 2));  // no fma: see the top of the file
    if (BIAS) y += bias[n];
    out[size_t(row) * N + n] = y;""",
)

CUDA_LOADS = """
__device__ __forceinline__ bool int8_aligned(const void* p, int bytes) {
  return reinterpret_cast<size_t>(p) % bytes == 0;
}
// 8 or 16 weights, which are read once: they need not push x out of the L1 cache.
__device__ __forceinline__ uint2 int8_load8(const void* p) {
  uint2 v;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
__device__ __forceinline__ uint4 int8_load16(const void* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
"""
CUDA_HEADER = """
// Four int8 -> float. The conversion unit is too slow for this; but 0x4b0000uu is 2^23 + uu, and uu = byte + 128 (flip = 0x80808080).
__device__ __forceinline__ void int8_unpack(uint four, uint flip, float* f) {
  four ^= flip;
  for (int i = 0; i < 4; i++) f[i] = __uint_as_float(__byte_perm(four, 0x4b000000u, 0x7440 + i)) - 8388736.0f;
}
// Sums V values over the 32 lanes (V = 1, 2, 4 .. 32): lane l returns the total of value l V / 32. Each step hands half
// of the values that are left to the other half of the lanes, so it takes V - 1 + 5 - log2 V shuffles in place of 5 V.
template <int V, typename A> __device__ __forceinline__ A int8_fold(A* v, int lane) {
#pragma unroll
  for (int n = V / 2, bit = 16; n > 0; n /= 2, bit /= 2) {
    const bool high = lane & bit;
#pragma unroll
    for (int i = 0; i < n; i++) {
      const A give = high ? v[i] : v[i + n], keep = high ? v[i + n] : v[i];
      v[i] = keep + __shfl_xor_sync(0xffffffffu, give, bit);
    }
  }
#pragma unroll
  for (int bit = 16 / V; bit > 0; bit /= 2) v[0] += __shfl_xor_sync(0xffffffffu, v[0], bit);
  return v[0];
}
"""


def cuda_body(kind, step, wide, operands, loads, products, narrow_product, finish):
    """Body of either kernel for CUDA: `step` weights a lane and load; U loads of R outputs are under way together."""
    return f"""{PLACE}
  constexpr int V = M * R > 16 ? 32 : M * R > 8 ? 16 : M * R > 4 ? 8 : M * R > 2 ? 4 : M * R;
  constexpr int U = M == 1 ? 4 : M == 2 ? 2 : 1;
  __shared__ {kind} parts[G * 32];
  {kind} sums[V];
  for (int i = 0; i < V; i++) sums[i] = 0;
  const int index = lane * V / 32;  // of the sum that this lane finishes
  const bool finishes = part == 0 && lane % (32 / V) == 0 && index < M * R &&
                        row0 + index / R < rows && n0 + index % R < N;
  const int row = finishes ? row0 + index / R : 0, n = finishes ? n0 + index % R : 0;
{operands}
  if ({wide}) {{
    for (int k0 = {step} * 32 * part; k0 < K; k0 += {step} * 32 * S * U) {{
{loads}
      // All loads first and without a condition. `all` depends on each of them (and on those for the end), and what
      // follows depends on `all`, or the compiler would wait for one load before it issues the next.
      uint all = early;
#pragma unroll
      for (int u = 0; u < U; u++) {{
        const int k = k0 + {step} * (32 * S * u + lane), safe = k < K ? k : 0;
        for (int r = 0; r < R; r++) w[u][r] = int8_load{step}(weight + wrow[r] + safe);
        for (int m = 0; m < M; m++) xs[u][m] = *reinterpret_cast<const X*>(x + xrow[m] + safe);
        for (int r = 0; r < R; r++) all |= w[u][r].x;
        for (int m = 0; m < M; m++) all |= *reinterpret_cast<const uint*>(&xs[u][m]);
      }}
      all &= weight_ndim - 2;  // 0, which the compiler cannot know
      if (k0 + {step} * 32 * (S * (U - 1) + 1) > K) {{  // the last step: no x past the end
#pragma unroll
        for (int u = 0; u < U; u++)
          if (k0 + {step} * (32 * S * u + lane) >= K)
            for (int m = 0; m < M; m++) xs[u][m] = X{{}};
      }}
{products}
    }}
  }} else {{
    for (int k = lane + 32 * part; k < K; k += 32 * S)
      for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) sums[m * R + r] += {narrow_product};
  }}
  {kind} mine = int8_fold<V>(sums, lane);
{JOIN}
  if (finishes) {{
{finish}
  }}
"""


CUDA_BODY = cuda_body(
    "float",
    8,
    "K % 8 == 0 && int8_aligned(weight, 8) && int8_aligned(x, 16)",
    OPERANDS + """
    const uint early = __float_as_uint(scale_n) | __float_as_uint(bias_n) | __float_as_uint(times_n) |
                       __float_as_uint(residual_n);
""",
    """
      struct __align__(16) X { uint bits[2 * sizeof(T)]; };  // 8 values of x
      uint2 w[U][R];
      X xs[U][M];""",
    """
#pragma unroll
      for (int u = 0; u < U; u++) {
        float f[R][8];
        for (int r = 0; r < R; r++) {
          int8_unpack(w[u][r].x, 0x80808080u ^ all, f[r]);
          int8_unpack(w[u][r].y, 0x80808080u ^ all, f[r] + 4);
        }
        for (int m = 0; m < M; m++) {
          const T* v = reinterpret_cast<const T*>(xs[u][m].bits);
          for (int i = 0; i < 8; i++) {
            const float xi = static_cast<float>(v[i]);
            for (int r = 0; r < R; r++) sums[m * R + r] += xi * f[r][i];
          }
        }
      }""",
    "static_cast<float>(x[xrow[m] + k]) * static_cast<float>(weight[wrow[r] + k])",
    "    const float sum = mine;" + FINISH,
)
CUDA_INTEGER_BODY = cuda_body(
    "int",
    16,
    "K % 16 == 0 && int8_aligned(weight, 16) && int8_aligned(x, 16)",
    """
    const float scale_x = x_scale[row], scale_n = scale[n], bias_n = BIAS ? bias[n] : 0.0f;
    const uint early = __float_as_uint(scale_x) | __float_as_uint(scale_n) | __float_as_uint(bias_n);
""",
    """
      typedef uint4 X;
      uint4 w[U][R];
      uint4 xs[U][M];""",
    """
#pragma unroll
      for (int u = 0; u < U; u++)
        for (int m = 0; m < M; m++)
          for (int r = 0; r < R; r++) {
            const uint4 a = xs[u][m], b = w[u][r];
            int sum = sums[m * R + r];
            sum = __dp4a(int(a.x), int(b.x ^ all), sum);
            sum = __dp4a(int(a.y), int(b.y), sum);
            sum = __dp4a(int(a.z), int(b.z), sum);
            sums[m * R + r] = __dp4a(int(a.w), int(b.w), sum);
          }""",
    "int(x[xrow[m] + k]) * int(weight[wrow[r] + k])",
    """
    float y = __fmul_rn(__fmul_rn(__int2float_rn(mine), scale_x), scale_n);
    if (BIAS) y = __fadd_rn(y, bias_n);
    out[size_t(row) * N + n] = y;""",
)

INT8_GEMV = GpuKernel(
    "int8_gemv", ["x", "weight", "scale", "bias", "times", "residual"], ["out"], METAL_BODY,
    header=METAL_EPILOGUE, cuda_body=CUDA_BODY, cuda_header=CUDA_EPILOGUE + CUDA_LOADS + CUDA_HEADER,
)  # fmt: skip
INT8_GEMV_INT8 = GpuKernel(
    "int8_gemv_int8", ["x", "x_scale", "weight", "scale", "bias"], ["out"], METAL_INTEGER_BODY,
    cuda_body=CUDA_INTEGER_BODY, cuda_header=CUDA_LOADS + CUDA_HEADER,
)  # fmt: skip


@functools.lru_cache(1024)
def cuda_shape(rows, n, k):
    """(M, R, S) on a GPU of CUDA's: from the times of all R of 1, 2, 4 and S of 1, 2, 4, 8 on an H200 (docs/LOG.md)."""
    m = slice_rows(rows)
    r = 4 if n >= 8192 else 2 if n >= 4096 or (m > 4 and k >= 2048) else 1
    s = 1 if n >= 4096 else 4 if m > 4 or k >= 2048 else 1
    return m, r, s


@functools.lru_cache(1024)
def metal_shape(rows, n, k):
    """(M, R, S) on an Apple GPU; a guess, never timed."""
    r = 4 if n >= 2048 else 2
    s = 4 if n < 1024 * r and k >= 1024 else 1
    return slice_rows(rows), r, s


def slice_rows(rows):
    """M: rows of a slice, with `rows` in as few and as equal slices as there can be."""
    return -(-rows // -(-rows // MAX_ROWS))


def gemv(x, weight, scale, bias, shape, activation=None, times=None, residual=None):
    """The call of INT8_GEMV, as keyword arguments: x, times, residual [rows, K or N] of one dtype, bias fp32 or None."""
    inputs, flags = ending(x, scale, bias, activation, times, residual)
    template = [("T", x.dtype), *zip("MRS", shape), *flags]
    return launch(x, weight, shape, [x, weight, scale, *inputs], template, x.dtype)


def ending(x, scale, bias, activation, times, residual):
    """The last inputs of a float kernel and what its template says of them; in place of None another one of the dtype."""
    inputs = [scale if bias is None else bias, x if times is None else times, x if residual is None else residual]
    flags = [("BIAS", bias is not None), ("ACT", ACTIVATIONS[activation])]
    return inputs, [*flags, ("TIMES", times is not None), ("RESIDUAL", residual is not None)]


def gemv_int8(x, x_scale, weight, scale, bias, shape):
    """The call of INT8_GEMV_INT8: x int8 [rows, K], x_scale fp32 [rows], bias fp32 or None."""
    template = [*zip("MRS", shape), ("BIAS", bias is not None)]
    inputs = [x, x_scale, weight, scale, scale if bias is None else bias]
    return launch(x, weight, shape, inputs, template, mx.float32)


def launch(x, weight, shape, inputs, template, dtype):
    m, r, s = shape
    group = max(SIMDGROUPS, s)
    groups = -(-weight.shape[0] // (r * group // s))
    return {
        "inputs": inputs, "template": template,
        "output_shapes": [(x.shape[0], weight.shape[0])], "output_dtypes": [dtype],
        "grid": (32 * group * groups, -(-x.shape[0] // m), 1), "threadgroup": (32 * group, 1, 1),
    }  # fmt: skip
