"""Kernel for 2 to 32 rows of half-precision x on CUDA: y = activation(x W^T scale + bias) times + residual.

From two rows on a GEMV is bound by arithmetic, not by the reading of the weight. Tensor cores take that away: a warp
makes 16 outputs of 8 C rows by mma.m16n8k16, weight x x^T with fp32 sums. Both operands may walk along K in any order
as long as it is the same one, so nothing needs shuffling: of 64 values of K lane 4 g + t reads 16 in a row, from t 16
on, of outputs g and g + 8 (16 bytes each) and of x's row g (32 bytes), and feeds them to 4 products, 4 values each.
S warps share the K of the same outputs.

An int8 becomes exact half precision without the conversion unit, two at a time:
    float16    0x6400 + u is 1024 + u for 8 bits u = byte + 128; less 1152
    bfloat16   0x4300 + u is 128 + u for the low 7 bits u of the byte; less 128, or 256 (0x4380) with the byte's sign

K % 16 must be 0 and the arrays aligned to 16 bytes; else single values are read. Metal has no use for this: there the
matrix instructions are no faster than the others, and the tile of int8_gemm.py holds what it needs.
"""

import functools

from mlx_cosyh3.kernels._gpu import GpuKernel
from mlx_cosyh3.kernels.int8_gemv import CUDA_EPILOGUE, CUDA_LOADS, FINISH, ending

MAX_ROWS = 32  # of one slice: C <= 4

CUDA_HEADER = """
// Two int8 (the low or the high half of a word) -> two of T; b = the product's other operand, two of T in each word.
__device__ __forceinline__ uint int8_pair(uint four, bool high, const __half*) {
  uint v = __byte_perm(four ^ 0x80808080u, 0x64646464u, high ? 0x4342 : 0x4140);
  asm("sub.f16x2 %0, %1, %2;" : "=r"(v) : "r"(v), "r"(0x64806480u));
  return v;
}
__device__ __forceinline__ uint int8_pair(uint four, bool high, const __nv_bfloat16*) {
  const uint v = __byte_perm(four, 0x43434343u, high ? 0x4342 : 0x4140);
  const uint low = v & 0xff7fff7fu, minus = (v & 0xff80ff80u) | 0x80008000u;
  uint r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(0x3f803f80u), "r"(minus));
  return r;
}
__device__ __forceinline__ void int8_mma(float* c, const uint* a, const uint* b, const __half*) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void int8_mma(float* c, const uint* a, const uint* b, const __nv_bfloat16*) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
"""

# One step: all loads, then the products. `w` and `xs` are words of 4 weights and of 2 values of x.
STEP = """
  for (int k0 = 64 * part; k0 < K; k0 += 64 * S * U) {
    uint w[U][2][4], xs[U][C][8];
    uint all = __float_as_uint(scale_n) | __float_as_uint(bias_n);
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int k = k0 + 64 * S * u + 16 * t;
      LOADS
    }
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint a[4];
        for (int i = 0; i < 4; i++) a[i] = int8_pair(w[u][i % 2][j] ^ all, i / 2, type);
        for (int c = 0; c < C; c++) int8_mma(sums[j % 2][c], a, xs[u][c] + 2 * j, type);
      }
  }
"""

# All loads first, and products that depend on `all` of them: see int8_gemv.py.
WIDE = """const int safe = k < K ? k : 0;
      for (int i = 0; i < 2; i++) {
        const uint4 v = int8_load16(weight + wrow[i] + safe);
        w[u][i][0] = v.x; w[u][i][1] = v.y; w[u][i][2] = v.z; w[u][i][3] = v.w;
        all |= v.x;
      }
      for (int c = 0; c < C; c++)
        for (int i = 0; i < 2; i++) {
          const uint4 v = reinterpret_cast<const uint4*>(x + xrow[c] + safe)[i];
          uint* to = xs[u][c] + 4 * i;
          to[0] = v.x; to[1] = v.y; to[2] = v.z; to[3] = v.w;
          all |= v.x;
        }
    }
    all &= weight_ndim - 2;  // 0, which the compiler cannot know
    if (k0 + 64 * (S * (U - 1) + 1) > K) {  // the last step: no x past the end
#pragma unroll
      for (int u = 0; u < U; u++)
        if (k0 + 64 * S * u + 16 * t >= K)
          for (int c = 0; c < C; c++)
            for (int j = 0; j < 8; j++) xs[u][c][j] = 0;"""

NARROW = """for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++) {
          w[u][i][j] = 0;
          for (int b = 0; b < 4; b++)
            if (k + 4 * j + b < K) w[u][i][j] |= uint(weight[wrow[i] + k + 4 * j + b] & 255) << 8 * b;
        }
      for (int c = 0; c < C; c++)
        for (int j = 0; j < 8; j++) {
          T two[2];
          for (int b = 0; b < 2; b++) two[b] = k + 2 * j + b < K ? x[xrow[c] + k + 2 * j + b] : static_cast<T>(0.0f);
          const auto bits = reinterpret_cast<const unsigned short*>(two);
          xs[u][c][j] = uint(bits[0]) | uint(bits[1]) << 16;
        }
      all = 0;"""

CUDA_BODY = f"""
  const T* const type = nullptr;
  const int rows = x_shape[0], N = weight_shape[0], K = weight_shape[1];
  const int lane = thread_index_in_simdgroup, part = simdgroup_index_in_threadgroup, g = lane / 4, t = lane % 4;
  const int n0 = int(threadgroup_position_in_grid.x) * 16, row0 = int(threadgroup_position_in_grid.y) * 8 * C;
  __shared__ float parts[S][8 * C][16];  // [part, row, output]
  size_t wrow[2], xrow[C];  // past the end the last one again: read, never written
  for (int i = 0; i < 2; i++) wrow[i] = size_t(n0 + g + 8 * i < N ? n0 + g + 8 * i : N - 1) * K;
  for (int c = 0; c < C; c++) xrow[c] = size_t(row0 + g + 8 * c < rows ? row0 + g + 8 * c : rows - 1) * K;
  const int n = n0 + int(threadIdx.x) % 16;  // the output that this thread finishes
  const float scale_n = scale[n < N ? n : 0], bias_n = BIAS ? bias[n < N ? n : 0] : 0.0f;

  float sums[2][C][4] = {{}};  // two, for a product waits for the last one of the same sums
  if (K % 16 == 0 && int8_aligned(weight, 16) && int8_aligned(x, 16)) {{
    constexpr int U = C == 1 ? 4 : C == 2 ? 2 : 1;  // blocks of 64 K under way together
{STEP.replace("LOADS", WIDE)}
  }} else {{
    constexpr int U = 1;
{STEP.replace("LOADS", NARROW)}
  }}
  for (int c = 0; c < C; c++)
    for (int i = 0; i < 4; i++) parts[part][8 * c + 2 * t + i % 2][g + i / 2 * 8] = sums[0][c][i] + sums[1][c][i];
  __syncthreads();
  for (int i = threadIdx.x; i < 128 * C; i += 32 * S) {{
    const int row = row0 + i / 16;
    if (row >= rows || n >= N) break;
    float sum = 0.0f;
    for (int s = 0; s < S; s++) sum += parts[s][i / 16][i % 16];
    const size_t at = size_t(row) * N + n;
    const float times_n = TIMES ? static_cast<float>(times[at]) : 1.0f;
    const float residual_n = RESIDUAL ? static_cast<float>(residual[at]) : 0.0f;
{FINISH}
  }}
"""

INT8_MMA = GpuKernel(
    "int8_mma", ["x", "weight", "scale", "bias", "times", "residual"], ["out"], "",
    cuda_body=CUDA_BODY, cuda_header=CUDA_EPILOGUE + CUDA_LOADS + CUDA_HEADER,
)  # fmt: skip


@functools.lru_cache(1024)
def mma_shape(rows, n, k):
    """(C, S): tiles of 8 rows, and warps that share 16 outputs; a guess, not measured yet."""
    slices = -(-rows // MAX_ROWS)
    tiles = -(-rows // (8 * slices))
    s = max(s for s in (2, 4, 8) if s == 2 or (-(-n // 16) * s <= 4000 and k >= 128 * s))
    return tiles, s


def mma(x, weight, scale, bias, shape, activation=None, times=None, residual=None):
    """The call of INT8_MMA, as keyword arguments: x, times, residual [rows, K or N] of one dtype, bias fp32 or None."""
    tiles, s = shape
    rows, n = x.shape[0], weight.shape[0]
    inputs, flags = ending(x, scale, bias, activation, times, residual)
    template = [("T", x.dtype), ("C", tiles), ("S", s), *flags]
    return {
        "inputs": [x, weight, scale, *inputs], "template": template,
        "output_shapes": [(rows, n)], "output_dtypes": [x.dtype],
        "grid": (32 * s * -(-n // 16), -(-rows // (8 * tiles)), 1), "threadgroup": (32 * s, 1, 1),
    }  # fmt: skip
