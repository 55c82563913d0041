"""The kernels of softmax.py: their text, and which of them a row's length calls for.

They see x as [rows, n] with any strides, and the mask with x's axes and any strides (0 where it is broadcast).
    n <= 256            `softmax_lanes`   one simdgroup a row, 8 rows a threadgroup; x read once
    n <= 8192           `softmax_row`     one threadgroup a row, 4 or 8 values a thread in registers; x read once
    beyond, few rows    `softmax_part`, `softmax_spread`   many threadgroups a row, in two launches; x read twice
    beyond, many rows   `softmax_loop`    one threadgroup a row; x read twice
The last two carry a running maximum and a sum relative to it (arXiv 1805.02867). Arg-max with log-sum-exp reads x
once: `softmax_argmax`, or `softmax_part` and `softmax_argmax_join` for few long rows.
"""

import functools
from typing import NamedTuple

import mlx.core as mx

from mlx_cosyh3.kernels._gpu import GpuKernel

LANES_COLUMNS, ROW_COLUMNS = 256, 8192  # the longest rows of `softmax_lanes` and `softmax_row`
PART_THREADS, PART_COLUMNS = 256, 2048  # a threadgroup of `softmax_part` and its share of a row
LOOP_THREADS = 512
FEW_ROWS = 128  # up to so many long rows are cut into parts: one threadgroup a row would leave a large GPU idle

# Words of the bodies that differ: vectors of four columns. Apple's GPUs load four neighbours at any element's alignment,
# and the compiler joins the loads. CUDA wants a vector's address aligned, so there the vectors of a row start row_head
# columns before it, those that overlap its ends go element by element, and all do where row_ready is false.
METAL_VECTORS = r"""
#define HELPER inline
#define precise_log(x) metal::precise::log(x)
template <typename P>
HELPER int row_head(P p) { return 0; }
template <typename P>
HELPER bool row_ready(P p) { return true; }
template <typename P>
HELPER void row_load4(P p, thread float* v) {
  for (int i = 0; i < 4; i++) { v[i] = static_cast<float>(p[i]); }
}
template <typename T>
HELPER void row_store4(device T* p, thread float* v) {
  for (int i = 0; i < 4; i++) { p[i] = static_cast<T>(v[i]); }
}
"""
CUDA_VECTORS = r"""
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#define HELPER __device__ __forceinline__
#define precise_log(x) ::logf(x)
template <typename T> struct alignas(4 * sizeof(T)) RowFour { T x[4]; };
template <typename T> HELPER int row_head(const T* p) { return int(reinterpret_cast<size_t>(p) / sizeof(T)) & 3; }
template <typename T> HELPER bool row_ready(const T* p) {
  return (reinterpret_cast<size_t>(p) & (4 * sizeof(T) - 1)) == 0;
}
template <typename T> HELPER void row_load4(const T* p, float* v) {
  const RowFour<T> four = *reinterpret_cast<const RowFour<T>*>(p);
  for (int i = 0; i < 4; i++) { v[i] = static_cast<float>(four.x[i]); }
}
template <typename T> HELPER void row_store4(T* p, float* v) {
  RowFour<T> four;
  for (int i = 0; i < 4; i++) { four.x[i] = static_cast<T>(v[i]); }
  *reinterpret_cast<RowFour<T>*>(p) = four;
}
"""
# KIND: 0 no mask, 1 boolean, 2 additive. Beyond columns 0 .. n - 1 a logit is -inf, and nothing is written.
# row_logits, row_write: V values of one thread, in vectors `apart` columns from each other (a multiple of 4) from j on.
# The loads come before all else: with a branch between them they would wait for each other.
WORDS = r"""
#define ROW_LOWEST -3.402823466e38f
#define ROW_NOWHERE -0x7fffffff
template <int KIND, typename P, typename Q>
HELPER float row_logit(P x, int64_t x_step, Q mask, int64_t mask_step, float scale, int j, int n) {
  if (j < 0 || j >= n) { return -INFINITY; }
  float z = static_cast<float>(x[j * x_step]) * scale;
  if (KIND == 1) { z = static_cast<float>(mask[j * mask_step]) != 0.0f ? z : -INFINITY; }
  if (KIND == 2) { z += static_cast<float>(mask[j * mask_step]); }
  return z;
}
template <int KIND, int V, typename P, typename Q>
HELPER void row_logits(P x, int64_t x_step, Q mask, int64_t mask_step, float scale, int j, int apart, int n,
                       thread float* z) {
  const bool inside = j >= 0 && j + (V / 4 - 1) * apart + 4 <= n;
  if (inside && x_step == 1 && row_ready(x + j) && (KIND == 0 || (mask_step == 1 && row_ready(mask + j)))) {
    float m[V];
    for (int i = 0; i < V / 4; i++) { row_load4(x + j + i * apart, z + 4 * i); }
    if (KIND != 0) {
      for (int i = 0; i < V / 4; i++) { row_load4(mask + j + i * apart, m + 4 * i); }
    }
    for (int i = 0; i < V; i++) {
      z[i] *= scale;
      if (KIND == 1) { z[i] = m[i] != 0.0f ? z[i] : -INFINITY; }
      if (KIND == 2) { z[i] += m[i]; }
    }
  } else {
    for (int i = 0; i < V; i++) {
      z[i] = row_logit<KIND>(x, x_step, mask, mask_step, scale, j + i / 4 * apart + i % 4, n);
    }
  }
}
template <int V, typename T>
HELPER void row_write(device T* y, int j, int apart, int n, thread float* v) {
  if (j >= 0 && j + (V / 4 - 1) * apart + 4 <= n && row_ready(y + j)) {
    for (int i = 0; i < V / 4; i++) { row_store4(y + j + i * apart, v + 4 * i); }
  } else {
    for (int i = 0; i < V; i++) {
      const int at = j + i / 4 * apart + i % 4;
      if (at >= 0 && at < n) { y[at] = static_cast<T>(v[i]); }
    }
  }
}
HELPER float row_lse(float m, float s) { return s == 0.0f ? -INFINITY : m + precise_log(s); }
"""

THREAD = r"""
  const int t = int(thread_index_in_threadgroup), threads = int(threads_per_threadgroup.x);
  const int lane = int(thread_index_in_simdgroup), sg = int(simdgroup_index_in_threadgroup), sgs = threads / 32;
"""
# Of `row`: where x and the mask begin. Sizes come from x_shape, the mask's row from its strides over x's axes.
ROW = r"""
  const int n = x_shape[1];
  const int64_t x_step = x_strides[1];
  const float factor = scale[0];
  auto p = x + row * x_strides[0];
  auto q = mask;
  int64_t mask_step = 0;
  if (KIND != 0) {
    int rest = int(row);
    for (int d = mask_ndim - 2; d >= 0; d--) {
      q += rest % mask_shape[d] * mask_strides[d];
      rest /= mask_shape[d];
    }
    mask_step = mask_strides[mask_ndim - 1];
  }
"""
# Columns start .. stop - 1 are the threadgroup's; vectors begin at start, which may be before the row.
WHOLE_ROW = "  const int64_t row = int64_t(threadgroup_position_in_grid.x);\n"
WHOLE_RANGE = "  const int start = x_step == 1 ? -row_head(p) : 0, stop = n;\n"
PART_OF_ROW = r"""
  const int64_t row = int64_t(threadgroup_position_in_grid.y);
  const int index = int(threadgroup_position_in_grid.x);
"""
PART_RANGE = r"""
  const int start = index * threads * V - (x_step == 1 ? row_head(p) : 0);
  const int stop = start + threads * V < n ? start + threads * V : n;
"""
# Running maximum m, sum s of exp(z - m), and with BEST minus the first column that has m.
ONLINE = r"""
  float m = ROW_LOWEST, s = 0.0f;
  int best = ROW_NOWHERE;
  for (int j = start + 4 * t; j < stop; j += threads * V) {
    float z[V];
    row_logits<KIND, V>(p, x_step, q, mask_step, factor, j, 4 * threads, stop, z);
    float top = m;
    for (int i = 0; i < V; i++) {
      if (BEST && (z[i] > top || (z[i] == top && best == ROW_NOWHERE))) { best = -(j + i / 4 * 4 * threads + i % 4); }
      top = z[i] > top ? z[i] : top;
    }
    s = top > m ? s * metal::fast::exp(m - top) : s;
    m = top;
    for (int i = 0; i < V; i++) { s += metal::fast::exp(z[i] - m); }
  }
"""
# Each lane's m, s, best become those of the simdgroup,
MERGE = r"""
  {
    const float top = simd_max(m);
    s = simd_sum(s * metal::fast::exp(m - top));
    if (BEST) { best = simd_max(m == top ? best : ROW_NOWHERE); }
    m = top;
  }
"""
# and those of the threadgroup.
SHARED = r"""
  threadgroup float tops[32];
  threadgroup float sums[32];
  threadgroup int bests[32];
"""
JOIN = MERGE + r"""
  if (lane == 0) {
    tops[sg] = m;
    sums[sg] = s;
    if (BEST) { bests[sg] = best; }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  m = lane < sgs ? tops[lane] : ROW_LOWEST;
  s = lane < sgs ? sums[lane] : 0.0f;
  if (BEST) { best = lane < sgs ? bests[lane] : ROW_NOWHERE; }
""" + MERGE  # fmt: skip
# m, s and best of a row from those of its parts, by each simdgroup for itself.
GATHER = r"""
  const int parts = part_shape[0];
  float m = ROW_LOWEST, s = 0.0f;
  int best = ROW_NOWHERE;
  for (int i = lane; i < parts; i += 32) {
    const int64_t at = i * int64_t(part_shape[1]) + row;
    const float a = part[2 * at], b = part[2 * at + 1];
    if (BEST) {
      const int place = places[at];
      best = a > m || best == ROW_NOWHERE ? place : best;
    }
    const float top = a > m ? a : m;
    s = s * metal::fast::exp(m - top) + b * metal::fast::exp(a - top);
    m = top;
  }
""" + MERGE  # fmt: skip
INVERSE = "  const float inverse = s == 0.0f ? 0.0f : 1.0f / s;\n"
LSE = "  if (t == 0) { lse[row] = row_lse(m, s); }\n"


def _kernel(name, inputs, outputs, *pieces):
    # The text is searched for names of attributes, shapes and strides: a piece brings what it needs.
    return GpuKernel(name, inputs, outputs, "".join(pieces), header=METAL_VECTORS + WORDS,
                     cuda_header=CUDA_VECTORS + WORDS, contiguous=False)  # fmt: skip


# Templates: T, M types of x and the mask (MLX tells CUDA kernels apart by name and templates alone), KIND, V, BEST.
LANES_KERNEL = _kernel("softmax_lanes", ["x", "mask", "scale"], ["y", "lse"], r"""
  const int64_t row = int64_t(thread_position_in_grid.x >> 5);
  const int lane = int(thread_index_in_simdgroup);
  if (row >= x_shape[0]) { return; }
""", ROW, r"""
  float z[V], m = ROW_LOWEST, s = 0.0f;
  for (int i = 0; i < V; i++) {
    z[i] = row_logit<KIND>(p, x_step, q, mask_step, factor, 32 * i + lane, n);
    m = z[i] > m ? z[i] : m;
  }
  m = simd_max(m);
  for (int i = 0; i < V; i++) {
    z[i] = metal::fast::exp(z[i] - m);
    s += z[i];
  }
  s = simd_sum(s);
  const float inverse = s == 0.0f ? 0.0f : 1.0f / s;
  for (int i = 0; i < V; i++) {
    if (32 * i + lane < n) { y[row * n + 32 * i + lane] = static_cast<T>(z[i] * inverse); }
  }
  if (lane == 0) { lse[row] = row_lse(m, s); }
""")  # fmt: skip

ROW_KERNEL = _kernel("softmax_row", ["x", "mask", "scale"], ["y", "lse"], r"""
  threadgroup float tops[32];
  threadgroup float sums[32];
""", THREAD, WHOLE_ROW, ROW, r"""
  const int head = x_step == 1 ? row_head(p) : 0;
  const int j = 4 * t - (n + head > threads * V ? 0 : head);
  float z[V], m = ROW_LOWEST, s = 0.0f;
  row_logits<KIND, V>(p, x_step, q, mask_step, factor, j, 4 * threads, n, z);
  for (int i = 0; i < V; i++) { m = z[i] > m ? z[i] : m; }
  m = simd_max(m);
  if (lane == 0) { tops[sg] = m; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  m = simd_max(lane < sgs ? tops[lane] : ROW_LOWEST);
  for (int i = 0; i < V; i++) {
    z[i] = metal::fast::exp(z[i] - m);
    s += z[i];
  }
  s = simd_sum(s);
  if (lane == 0) { sums[sg] = s; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  s = simd_sum(lane < sgs ? sums[lane] : 0.0f);
""", INVERSE, r"""
  for (int i = 0; i < V; i++) { z[i] *= inverse; }
  row_write<V>(y + row * n, j, 4 * threads, n, z);
""", LSE)  # fmt: skip

LOOP_KERNEL = _kernel("softmax_loop", ["x", "mask", "scale"], ["y", "lse"],
                      SHARED, THREAD, WHOLE_ROW, ROW, WHOLE_RANGE, ONLINE, JOIN, INVERSE, r"""
  for (int j = start + 4 * t; j < stop; j += threads * V) {
    float z[V];
    row_logits<KIND, V>(p, x_step, q, mask_step, factor, j, 4 * threads, stop, z);
    for (int i = 0; i < V; i++) { z[i] = metal::fast::exp(z[i] - m) * inverse; }
    row_write<V>(y + row * n, j, 4 * threads, stop, z);
  }
""", LSE)  # fmt: skip

# part [parts, rows, 2]: m and s; places [parts, rows]: best
PART_KERNEL = _kernel("softmax_part", ["x", "mask", "scale"], ["part", "places"],
                      SHARED, THREAD, PART_OF_ROW, ROW, PART_RANGE, ONLINE, JOIN, r"""
  if (t == 0) {
    const int64_t at = index * int64_t(x_shape[0]) + row;
    part[2 * at] = m;
    part[2 * at + 1] = s;
    places[at] = best;
  }
""")  # fmt: skip

# A part is threads x V columns: each thread loads its values before it needs m and s of the row.
SPREAD_KERNEL = _kernel("softmax_spread", ["x", "mask", "scale", "part"], ["y", "lse"],
                        THREAD, PART_OF_ROW, ROW, PART_RANGE, r"""
  const int j = start + 4 * t;
  float z[V];
  row_logits<KIND, V>(p, x_step, q, mask_step, factor, j, 4 * threads, stop, z);
""", GATHER.replace("places[at]", "0"), INVERSE, r"""
  for (int i = 0; i < V; i++) { z[i] = metal::fast::exp(z[i] - m) * inverse; }
  row_write<V>(y + row * n, j, 4 * threads, stop, z);
  if (t == 0 && index == 0) { lse[row] = row_lse(m, s); }
""")  # fmt: skip

IDS = "  if (t == 0) { ids[row] = best == ROW_NOWHERE ? 0 : -best; }\n"
ARGMAX_KERNEL = _kernel("softmax_argmax", ["x", "mask", "scale"], ["ids", "lse"],
                        SHARED, THREAD, WHOLE_ROW, ROW, WHOLE_RANGE, ONLINE, JOIN, LSE, IDS)  # fmt: skip
ARGMAX_JOIN_KERNEL = _kernel("softmax_argmax_join", ["part", "places"], ["ids", "lse"], WHOLE_ROW, r"""
  const int t = int(thread_index_in_threadgroup), lane = t;
""", GATHER, LSE, IDS)  # fmt: skip


class Route(NamedTuple):
    """Which kernels compute a row of this length, and how."""

    launch: object  # (Task, values, stream) -> the two outputs
    kernels: tuple
    values: int  # V
    best: bool  # BEST
    columns: int  # of the self-test: odd, and with the largest threadgroup


class Task(NamedTuple):
    x: mx.array  # [rows, n]
    mask: mx.array  # x's original axes; x itself for none
    kind: int
    scale: mx.array  # fp32 [1]

    def call(self, kernel, values, grid, threads, outputs, stream, best=False, more=()):
        shapes, dtypes = zip(*outputs)
        return kernel(
            inputs=[self.x, self.mask, self.scale, *more],
            template=[("T", self.x.dtype), ("M", self.mask.dtype), ("KIND", self.kind), ("V", values), ("BEST", best)],
            grid=grid, threadgroup=(threads, 1, 1), output_shapes=shapes, output_dtypes=dtypes, stream=stream,
        )  # fmt: skip

    @property
    def results(self):
        return [(self.x.shape, self.x.dtype), (self.x.shape[:1], mx.float32)]  # y, lse


def task_of(x, mask, scale, stream):
    n = x.shape[-1]
    if mask is not None and x.ndim == 1:
        mask = mx.reshape(mask, (1, n), stream=stream)
    kind = 0 if mask is None else 1 if mask.dtype == mx.bool_ else 2
    x = mx.reshape(x, (-1, n), stream=stream)  # no copy where the leading axes collapse
    return Task(x, x if mask is None else mask, kind, _constant(scale))


@functools.lru_cache(64)
def _constant(value):
    """`value` as fp32, made once: a copy from the host costs more than a kernel. 16 times, since MLX's CUDA back end
    keeps arrays of up to 8 bytes where the host looks, and a kernel that reads one waits 10 us."""
    return mx.array([value] * 16, dtype=mx.float32)


def route(rows, n):
    if n <= LANES_COLUMNS:
        values = 1 if n <= 32 else 4 if n <= 128 else 8
        return Route(_lanes, (LANES_KERNEL,), values, False, 32 * values - 1)
    if n <= ROW_COLUMNS:
        values = 4 if n <= 2048 else 8
        return Route(_row, (ROW_KERNEL,), values, False, 1024 * values - 5)
    if rows <= FEW_ROWS:
        return Route(_parts, (PART_KERNEL, SPREAD_KERNEL), 8, False, 8197)
    return Route(_loop, (LOOP_KERNEL,), 8, False, 8197)


def argmax_route(rows, n):
    if rows <= FEW_ROWS and n > PART_COLUMNS:
        return Route(_argmax_parts, (PART_KERNEL, ARGMAX_JOIN_KERNEL), 8, True, 8197)
    return Route(_argmax, (ARGMAX_KERNEL,), 8, True, 8197)


def _lanes(task, values, stream):
    return task.call(LANES_KERNEL, values, (32 * task.x.shape[0], 1, 1), 256, task.results, stream)


def _row(task, values, stream):
    rows, n = task.x.shape
    threads = min(1024, 32 * -(-(n + 3) // (32 * values)))
    return task.call(ROW_KERNEL, values, (rows * threads, 1, 1), threads, task.results, stream)


def _loop(task, values, stream):
    grid = (task.x.shape[0] * LOOP_THREADS, 1, 1)
    return task.call(LOOP_KERNEL, values, grid, LOOP_THREADS, task.results, stream)


def _split(task, values, best, stream):
    """The first launch: (grid, part, places)"""
    rows, n = task.x.shape
    parts = -(-(n + 3) // PART_COLUMNS)  # + 3: vectors may start before the row
    grid = (parts * PART_THREADS, rows, 1)
    outputs = [((parts, rows, 2), mx.float32), ((parts, rows), mx.int32)]
    return grid, *task.call(PART_KERNEL, values, grid, PART_THREADS, outputs, stream, best)


def _parts(task, values, stream):
    grid, part, _ = _split(task, values, False, stream)
    return task.call(SPREAD_KERNEL, values, grid, PART_THREADS, task.results, stream, more=[part])


def _argmax(task, values, stream):
    rows = task.x.shape[0]
    outputs = [((rows,), mx.int32), ((rows,), mx.float32)]
    return task.call(ARGMAX_KERNEL, values, (rows * PART_THREADS, 1, 1), PART_THREADS, outputs, stream, best=True)


def _argmax_parts(task, values, stream):
    rows = task.x.shape[0]
    _, part, places = _split(task, values, True, stream)
    return ARGMAX_JOIN_KERNEL(
        inputs=[part, places], template=[("BEST", True)], grid=(32 * rows, 1, 1), threadgroup=(32, 1, 1),
        output_shapes=[(rows,), (rows,)], output_dtypes=[mx.int32, mx.float32], stream=stream,
    )  # fmt: skip
