"""The k largest values of each row with their columns, sorted: all that a sampler needs of the logits.

x       [..., n] float32 | float16 | bfloat16, any strides
values  [..., k] fp32, falling;  columns  [..., k] int32. Of equal values the first columns come first, also where the
        k-th place cuts through them, so the result is one and the same everywhere. NaN is below all, -inf included.

A threadgroup takes 2,048 columns of a row into registers, finds the k-th largest by bisection over the bits of an
order-preserving integer key, and writes its k largest; a second launch does the same with those of a row's parts and
sorts them. x is read once. MLX's own `argpartition` sorts the whole row on a GPU.
"""

import functools

import mlx.core as mx

from mlx_cosyh3.kernels import _dispatch
from mlx_cosyh3.kernels._gpu import GpuKernel
from mlx_cosyh3.kernels.softmax import FLOATS
from mlx_cosyh3.kernels.softmax_rows import CUDA_VECTORS, METAL_VECTORS, PART_OF_ROW, THREAD, WORDS

MAX_K = 128  # as many as the kernel's threadgroup memory takes
PART_THREADS, PART_VALUES = 256, 8  # of a threadgroup of the first launch
JOIN_THREADS, JOIN_VALUES = 512, 16  # of the second
MAX_ROWS = 65535  # the grid's second axis on CUDA
LOW_BITS = {mx.float32: 0, mx.float16: 13, mx.bfloat16: 16}  # of a value as fp32 that are all 0

METAL_KEYS = r"""
#define as_bits(x) as_type<uint>(x)
#define lanes_count(x) simd_sum(x)
"""
CUDA_KEYS = r"""
#define as_bits(x) __float_as_uint(x)
HELPER uint lanes_count(uint x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_add_sync(0xffffffffu, x);
#else
  return simd_sum(x);
#endif
}
"""
KEYS = r"""
#define ROW_NAN (INFINITY - INFINITY)
HELPER uint row_key(float z) {  // orders as z does; NaN below all
  const uint u = as_bits(z == 0.0f ? 0.0f : z);
  return z != z ? 0u : (u >> 31) != 0u ? ~u : u | 0x80000000u;
}
"""
# The k largest of threads x V neighbours. The k-th largest key is found bit by bit from the top (LOW: lower bits that
# say nothing, for values that were 16 bits wide): a bit is 1 if at least k keys are no smaller then. Of equals the
# first columns are taken. values, places [rows, parts, k]: in order of columns, or with SORT of falling values.
# FROM: the columns are those that `columns` names. What a part lacks is NaN, behind its columns and below all of them.
KERNEL = GpuKernel("top_k", ["x", "columns", "sizes"], ["values", "places"], r"""
  threadgroup uint counts[64];
  threadgroup float found[128];
  threadgroup int found_place[128];
""" + THREAD + PART_OF_ROW + r"""
  const int n = x_shape[1], k = sizes[0], begin = (index * threads + t) * V;
  auto p = x + row * x_strides[0];
  float z[V];
  uint key[V];
  row_logits<0, V>(p, x_strides[1], p, 0, 1.0f, begin, 4, n, z);
  for (int i = 0; i < V; i++) {
    z[i] = begin + i < n ? z[i] : ROW_NAN;
    key[i] = row_key(z[i]) >> LOW;
  }

  uint least = 0u;  // the k-th largest key
  for (int bit = 31 - LOW; bit >= 0; bit--) {
    const uint trial = least | (1u << bit);
    const int side = bit % 2 * 32;  // two sides: the next round writes while some still read
    uint count = 0u;
    for (int i = 0; i < V; i++) { count += key[i] >= trial ? 1u : 0u; }
    count = lanes_count(count);
    if (lane == 0) { counts[side + sg] = count; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    count = lanes_count(lane < sgs ? counts[side + lane] : 0u);
    least = count >= uint(k) ? trial : least;
  }

  uint mine = 0u;  // keys above `least` in the upper half, equal ones in the lower
  for (int i = 0; i < V; i++) { mine += key[i] > least ? 0x10000u : key[i] == least ? 1u : 0u; }
  uint before = mine;
  for (int d = 1; d < 32; d *= 2) {
    const uint up = simd_shuffle_up(before, d);
    before += lane >= d ? up : 0u;
  }
  if (lane == 31) { counts[32 + sg] = before; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint others = lane < sgs ? counts[32 + lane] : 0u;
  const uint above = lanes_count(others) >> 16, wanted = uint(k) - above;  // so many of the equal ones
  before += lanes_count(lane < sg ? others : 0u) - mine;
  const int64_t out = (row * int64_t(sizes[1]) + index) * k;
  for (int i = 0; i < V; i++) {
    const uint equal = before & 0xffffu;
    if (key[i] > least || (key[i] == least && equal < wanted)) {
      const int at = int((before >> 16) + (equal < wanted ? equal : wanted));
      int place = begin + i;
      if (FROM) { place = columns[row * n + begin + i]; }
      if (SORT) {
        found[at] = z[i];
        found_place[at] = place;
      } else {
        values[out + at] = z[i];
        places[out + at] = place;
      }
    }
    before += key[i] > least ? 0x10000u : key[i] == least ? 1u : 0u;
  }
  if (SORT) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int a = t; a < k; a += threads) {
      const uint own = row_key(found[a]);
      int rank = 0;
      for (int b = 0; b < k; b++) {
        const uint other = row_key(found[b]);
        rank += other > own || (other == own && b < a) ? 1 : 0;
      }
      values[out + rank] = found[a];
      places[out + rank] = found_place[a];
    }
  }
""", header=METAL_VECTORS + WORDS + METAL_KEYS + KEYS, contiguous=False,
    cuda_header=CUDA_VECTORS + WORDS + CUDA_KEYS + KEYS)  # fmt: skip


def top_k(x, k, *, stream=None):
    """The k largest of the last axis -> (values fp32 [..., k], falling; columns int32 [..., k]).

    Of equal values the first columns come first, also where the k-th place cuts through them; NaN is below all.
    Raises TypeError for x that is not floating, ValueError unless 1 <= k <= n."""
    if not mx.issubdtype(x.dtype, mx.floating):
        raise TypeError(f"top_k takes floating input, not {x.dtype}")
    if x.ndim == 0 or not 1 <= k <= x.shape[-1]:
        raise ValueError(f"top_k: k = {k} is not within 1 .. the length of the last axis of x {list(x.shape)}")
    if _supported(x, k):
        variant = (x.dtype, _parts(x) > 1)
        if _dispatch.usable(KERNEL, "softmax", variant, stream, lambda: _selftest(*variant)):
            return _kernel(x, k, stream)
    return reference(x, k, stream=stream)


def _supported(x, k):
    parts = _parts(x)
    few = parts == 1 or parts * k <= JOIN_THREADS * JOIN_VALUES
    return x.dtype in FLOATS and k <= MAX_K and few and 0 < x.size // x.shape[-1] <= MAX_ROWS


def _parts(x):
    return -(-x.shape[-1] // (PART_THREADS * PART_VALUES))


def reference(x, k, *, stream=None):
    """`top_k` in plain MLX ops: two partitions, so that equals at the k-th place are taken from the left."""
    s, n = stream, x.shape[-1]
    z = x.astype(mx.float32, stream=s)
    absent = mx.isnan(z, stream=s)
    low = mx.where(absent, mx.inf, mx.negative(z, stream=s), stream=s)  # ascending; NaN with -inf, settled below
    least = mx.partition(low, k - 1, axis=-1, stream=s)[..., k - 1 : k]
    # 0: surely taken, 1: equal to the k-th, 2: NaN among those, 3: not taken
    equal = mx.where(mx.equal(low, least, stream=s), mx.where(absent, 2, 1, stream=s), 3, stream=s)
    group = mx.where(mx.less(low, least, stream=s), 0, equal, stream=s)
    order = mx.add(mx.multiply(group, n, stream=s), mx.arange(n, stream=s), stream=s)  # int32: n below 2^29
    ids = mx.remainder(mx.partition(order, k - 1, axis=-1, stream=s)[..., :k], n, stream=s)
    ids = mx.sort(ids, axis=-1, stream=s)
    values = mx.take_along_axis(z, ids, axis=-1, stream=s)
    by_value = mx.argsort(mx.negative(values, stream=s), axis=-1, stream=s)  # stable; NaN last
    take = lambda a: mx.take_along_axis(a, by_value, axis=-1, stream=s)  # noqa: E731
    return take(values), take(ids).astype(mx.int32, stream=s)


def _kernel(x, k, stream):
    n, parts = x.shape[-1], _parts(x)
    values = mx.reshape(x, (-1, n), stream=stream)
    rows = values.shape[0]
    columns = _constant(0)
    stages = [(parts, PART_THREADS, PART_VALUES)] + [(1, JOIN_THREADS, JOIN_VALUES)] * (parts > 1)
    for stage, (groups, threads, per_thread) in enumerate(stages):
        values, columns = KERNEL(
            inputs=[values, columns, _constant(k, groups)],
            template=[("T", values.dtype), ("V", per_thread), ("LOW", LOW_BITS[x.dtype]),
                      ("FROM", stage == 1), ("SORT", groups == 1)],
            grid=(groups * threads, rows, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[(rows, groups * k)] * 2,
            output_dtypes=[mx.float32, mx.int32],
            stream=stream,
        )  # fmt: skip
    return tuple(mx.reshape(a, (*x.shape[:-1], k), stream=stream) for a in (values, columns))


@functools.lru_cache(64)
def _constant(*numbers):
    """`numbers` as int32, made once: a copy from the host costs more than a kernel. Never only one or two: MLX's CUDA
    back end keeps arrays of up to 8 bytes where the host looks, and a kernel that reads one waits 10 us."""
    return mx.array([*numbers, 0, 0], dtype=mx.int32)


def _selftest(dtype, in_parts):
    """0 if two rows with equal values and a NaN give exactly what the reference gives on the CPU, whose sorts are known
    to be stable; else infinity."""
    x = mx.round(8 * mx.random.normal((2, 2051 if in_parts else 203), key=mx.random.key(13))).astype(dtype)
    x = mx.where(mx.arange(x.shape[-1]) == 5, mx.nan, x).astype(dtype)
    pairs = zip(_kernel(x, 50, None), reference(x, 50, stream=mx.cpu))
    return 0.0 if all(mx.array_equal(a, b).item() for a, b in pairs) else mx.inf
