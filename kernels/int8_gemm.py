"""Kernels for many rows of x, where arithmetic, not the reading of the weight, is the bound.

    INT8_GEMM         Metal: y = activation(x W^T scale + bias) times + residual in tiles of 32 rows x 32 outputs
    INT8_DEQUANTIZE   both:  q scale in x's dtype, for MLX's own matrix product

INT8_GEMM: a threadgroup of 4 simdgroups walks along K in steps of 32. It copies 32 x 32 of x and of the weight, as
exact floating numbers, to threadgroup memory; each simdgroup multiplies 16 x 16 of the tile by simdgroup_matrix of
8 x 8 with fp32 sums. The tile holds float16 where x does (an int8 is exact in it), else fp32. Edges are filled with
zeros. The finished tile goes through threadgroup memory, too: which lane holds which element of a simdgroup_matrix
is nowhere documented.

It has no twin on CUDA: its tensor cores want tiles of another shape and layout, which MLX's matrix product has already;
there the weight is dequantised for it.
"""

from mlx_cosyh3.kernels._gpu import GpuKernel
from mlx_cosyh3.kernels.int8_gemv import FINISH, METAL_EPILOGUE, OPERANDS, ending

TILE = 32
THREADS = 128

GEMM_BODY = f"""
  constexpr int L = 36;  // length of a row of a tile: 32, and 4 more against bank conflicts
  threadgroup X xs[32 * L];  // [row, k]
  threadgroup X ws[32 * L];  // [output, k]
  threadgroup float ys[32 * L];  // [row, output]
  const int rows = x_shape[0], N = weight_shape[0], K = weight_shape[1];
  const int thread_index = thread_index_in_threadgroup, simdgroup = simdgroup_index_in_threadgroup;
  const int n0 = int(threadgroup_position_in_grid.x) * 32, row0 = int(threadgroup_position_in_grid.y) * 32;
  const int line = thread_index / 4, column = thread_index % 4 * 8;  // of the tile: this thread loads 8 numbers
  const int y0 = simdgroup / 2 * 16, x0 = simdgroup % 2 * 16;  // this simdgroup's part of it
  const bool has_x = row0 + line < rows, has_w = n0 + line < N;
  const size_t xrow = size_t(has_x ? row0 + line : 0) * K, wrow = size_t(has_w ? n0 + line : 0) * K;
  simdgroup_float8x8 sums[2][2];
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++) sums[i][j] = simdgroup_float8x8(0.0f);

  for (int k0 = 0; k0 < K; k0 += 32) {{
    const int k = k0 + column;
    for (int i = 0; i < 8; i++)
      xs[line * L + column + i] = has_x && k + i < K ? static_cast<X>(x[xrow + k + i]) : static_cast<X>(0.0f);
    if (K % 4 == 0) {{
      for (int i = 0; i < 8; i += 4) {{
        char4 w = char4(0);
        if (has_w && k + i < K) w = reinterpret_cast<const device char4*>(weight)[(wrow + k + i) / 4];
        for (int j = 0; j < 4; j++) ws[line * L + column + i + j] = static_cast<X>(float(w[j]));
      }}
    }} else {{
      for (int i = 0; i < 8; i++)
        ws[line * L + column + i] = static_cast<X>(has_w && k + i < K ? float(weight[wrow + k + i]) : 0.0f);
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int kk = 0; kk < 32; kk += 8) {{
      simdgroup_matrix<X, 8, 8> a[2], b[2];
      for (int i = 0; i < 2; i++) {{
        simdgroup_load(a[i], xs + (y0 + 8 * i) * L + kk, L);
        simdgroup_load(b[i], ws + (x0 + 8 * i) * L + kk, L, ulong2(0, 0), true);  // [k, output]
      }}
      for (int i = 0; i < 2; i++)
        for (int j = 0; j < 2; j++) simdgroup_multiply_accumulate(sums[i][j], a[i], b[j], sums[i][j]);
    }}
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }}

  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++) simdgroup_store(sums[i][j], ys + (y0 + 8 * i) * L + x0 + 8 * j, L);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = thread_index; i < 32 * 32; i += 128) {{
    const int row = row0 + i / 32, n = n0 + i % 32;
    if (row >= rows || n >= N) continue;
{OPERANDS}
    const float sum = ys[i / 32 * L + i % 32];
{FINISH}
  }}
"""

DEQUANTIZE_BODY = """
  const int N = weight_shape[0], K = weight_shape[1], n = threadgroup_position_in_grid.x;
  if (n >= N) return;
  const float s = scale[n];
  const size_t row = size_t(n) * K;
  for (int k = thread_position_in_threadgroup.x; k < K; k += int(threads_per_threadgroup.x))
    out[row + k] = static_cast<T>(static_cast<float>(weight[row + k]) * s);
"""

INT8_GEMM = GpuKernel(
    "int8_gemm", ["x", "weight", "scale", "bias", "times", "residual"], ["out"], GEMM_BODY, header=METAL_EPILOGUE
)
INT8_DEQUANTIZE = GpuKernel("int8_dequantize", ["weight", "scale"], ["out"], DEQUANTIZE_BODY)


def gemm(x, weight, scale, bias, tile_dtype, activation=None, times=None, residual=None):
    """The call of INT8_GEMM, as keyword arguments: x, times, residual [rows, K or N] of one dtype, bias fp32 or None."""
    rows, n = x.shape[0], weight.shape[0]
    inputs, flags = ending(x, scale, bias, activation, times, residual)
    template = [("T", x.dtype), ("X", tile_dtype), *flags]
    return {
        "inputs": [x, weight, scale, *inputs], "template": template,
        "output_shapes": [(rows, n)], "output_dtypes": [x.dtype],
        "grid": (THREADS * -(-n // TILE), -(-rows // TILE), 1), "threadgroup": (THREADS, 1, 1),
    }  # fmt: skip


def dequantize(weight, scale, dtype):
    """The call of INT8_DEQUANTIZE: the weight [N, K] in `dtype`."""
    return {
        "inputs": [weight, scale], "template": [("T", dtype)],
        "output_shapes": [weight.shape], "output_dtypes": [dtype],
        "grid": (256 * weight.shape[0], 1, 1), "threadgroup": (256, 1, 1),
    }  # fmt: skip
