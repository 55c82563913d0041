"""One step of repetition-aware sampling (VALL-E 2, arXiv 2406.05370): from logits to the next id, in one launch.

    p = softmax(scale x) over the ids that may be drawn
    nucleus: the ids by falling p before which less than top_p has gone by, top_k at most; one of them is drawn
    If it is in the window `repeated` times or more, one is drawn from all ids but this, by their p.

A draw takes a uniform number u to the first id whose cumulative share exceeds u: of the nucleus by falling p (the lower
id first of equals), else in the order of ids. The drawn id goes into the window from the right.

logits  fp32 [B, V]
u       fp32 [B, 2], in [0, 1): for the nucleus, for the second draw
window  int32 [B, W]: the last ids; W = 0: nothing counts as repeated
keep    None, or bool that broadcasts to [B, V]: the ids that may be drawn

A threadgroup takes a row, 8 neighbouring logits a thread, into registers. The nucleus is found by as many rounds of
arg-max as it has ids, a handful in speech. In plain MLX operations a step is some 40 launches, and launches are what
it costs.
"""

import functools

import mlx.core as mx

from mlx_cosyh3.kernels import _dispatch
from mlx_cosyh3.kernels._gpu import GpuKernel
from mlx_cosyh3.kernels.norm_linear import float_bits
from mlx_cosyh3.kernels.softmax import softmax_lse
from mlx_cosyh3.kernels.softmax_rows import CUDA_VECTORS, METAL_VECTORS, THREAD, WHOLE_ROW, WORDS
from mlx_cosyh3.kernels.top_k import top_k as largest

VALUES = 8  # a thread
MAX_IDS = 1024 * VALUES
MAX_K = 128  # ids of the nucleus: as many as the kernel's threadgroup memory takes
MAX_ROWS = (2**31 - 1) // 1024  # a grid counts threads, in int32

METAL_BITS = r"""
#define as_bits(x) as_type<uint>(x)
#define from_bits(x) as_type<float>(x)
#define precise_exp(x) metal::precise::exp(x)
#define lanes_max(x) simd_max(x)
"""
CUDA_BITS = r"""
#define as_bits(x) __float_as_uint(x)
#define from_bits(x) __uint_as_float(x)
#define precise_exp(x) ::expf(x)
HELPER uint lanes_max(uint x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, x);
#else
  return simd_max(x);
#endif
}
"""
LANES_MIN = "#define lanes_min(x) (~lanes_max(~(x)))\n"

# options: bits of scale and top_p, then k, W, repeated. MASKED: whether `keep` is one. Arrays of simdgroups have two
# halves in turn: the next round writes one while some still read the other. All threads come to the same numbers, so
# that loops and branches with a barrier inside are the same for all.
KERNEL = GpuKernel("ras_step", ["logits", "keep", "window", "u", "options"], ["ids", "lse", "last", "again"], r"""
  threadgroup float parts[64];
  threadgroup uint heads[64];
  threadgroup uint places[64];
  threadgroup float below[128];
  threadgroup uint found[128];
""" + THREAD + WHOLE_ROW + r"""
  const int n = logits_shape[1], begin = 8 * t;
  const float scale = from_bits(options[0]), top_p = from_bits(options[1]);
  const int k = options[2], width = options[3], repeated = options[4];
  auto p = logits + row * logits_strides[0];
  auto q = keep + row * keep_strides[0];
  auto said = window + row * window_strides[0];
  const int64_t said_step = window_strides[1];
  float z[8];
  row_logits<MASKED, 8>(p, logits_strides[1], q, keep_strides[1], scale, begin, 4, n, z);

  float m = ROW_LOWEST, s = 0.0f;
  for (int i = 0; i < 8; i++) { m = z[i] > m ? z[i] : m; }
  m = simd_max(m);
  if (lane == 0) { parts[sg] = m; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  m = simd_max(lane < sgs ? parts[lane] : ROW_LOWEST);
  float e[8];
  for (int i = 0; i < 8; i++) {
    e[i] = precise_exp(z[i] - m);
    s += e[i];
  }
  s = simd_sum(s);
  if (lane == 0) { parts[32 + sg] = s; }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  s = simd_sum(lane < sgs ? parts[32 + lane] : 0.0f);
  const float inverse = 1.0f / s;
  uint key[8];  // orders as a probability does; 0 for an id that cannot be drawn, of NaN too
  for (int i = 0; i < 8; i++) {
    const float share = e[i] * inverse;
    key[i] = share > 0.0f ? as_bits(share) : 0u;
  }

  int count = 0;  // ids of the nucleus so far, and their probability
  float sum = 0.0f;
  uint id = uint(n);
  for (int side = 0; count < k && (count == 0 || sum < top_p); side = 32 - side) {
    uint head = 0u, place = 0u;
    for (int i = 0; i < 8; i++) {
      key[i] = uint(begin + i) == id ? 0u : key[i];  // the one of the round before
      place = key[i] > head ? uint(begin + i) : place;
      head = key[i] > head ? key[i] : head;
    }
    const uint top = lanes_max(head);
    place = lanes_min(head == top ? place : uint(n));
    if (lane == 0) {
      heads[side + sg] = top;
      places[side + sg] = place;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    head = lane < sgs ? heads[side + lane] : 0u;
    place = lane < sgs ? places[side + lane] : uint(n);
    const uint most = lanes_max(head);
    if (most == 0u) { break; }
    id = lanes_min(head == most ? place : uint(n));
    sum += from_bits(most);
    if (t == 0) {
      below[count] = sum;
      found[count] = id;
    }
    count++;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint at = uint(k);
  for (int j = lane; j < count; j += 32) { at = below[j] > u[row * u_strides[0]] * sum && uint(j) < at ? uint(j) : at; }
  at = lanes_min(at);
  id = count == 0 ? 0u : found[at < uint(count) ? at : 0u];

  uint times = 0u;
  for (int j = lane; j < width; j += 32) { times += uint(said[j * said_step]) == id ? 1u : 0u; }
  times = simd_sum(times);
  const bool another = width > 0 && int(times) >= repeated;
  if (another) {
    // A new maximum: at a low temperature all that is left may have had probability 0 beside the one left out.
    float peak = ROW_LOWEST, own = 0.0f;
    for (int i = 0; i < 8; i++) {
      z[i] = uint(begin + i) == id ? -INFINITY : z[i];
      peak = z[i] > peak ? z[i] : peak;
    }
    peak = simd_max(peak);
    if (lane == 0) { parts[sg] = peak; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    peak = simd_max(lane < sgs ? parts[lane] : ROW_LOWEST);
    for (int i = 0; i < 8; i++) {
      e[i] = precise_exp(z[i] - peak);
      own += e[i];
    }
    float reach = own;  // the sum up to and with this thread's
    for (int d = 1; d < 32; d *= 2) {
      const float up = simd_shuffle_up(reach, d);
      reach += lane >= d ? up : 0.0f;
    }
    float before = simd_shuffle_up(reach, 1);
    if (lane == 31) { parts[32 + sg] = reach; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float others = simd_sum(lane < sg ? parts[32 + lane] : 0.0f);
    before = others + (lane > 0 ? before : 0.0f);
    reach = own > 0.0f && others + reach > 0.0f ? others + reach : 0.0f;
    // Sums in another order may differ in their last bit: the largest of them is the whole.
    float whole = simd_max(reach);
    if (lane == 0) { parts[sg] = whole; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    whole = simd_max(lane < sgs ? parts[lane] : 0.0f);
    const float target = u[row * u_strides[0] + u_strides[1]] * whole;
    uint pick = uint(n);
    if (reach > target) {
      bool passed = false;
      for (int i = 0; i < 8; i++) {
        before += e[i];
        pick = e[i] > 0.0f && !passed ? uint(begin + i) : pick;
        passed = passed || (e[i] > 0.0f && before > target);
      }
    }
    pick = lanes_min(pick);
    if (lane == 0) { places[sg] = pick; }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    pick = lanes_min(lane < sgs ? places[lane] : uint(n));
    id = pick < uint(n) ? pick : 0u;
  }

  const int wide = width > 0 ? width : 1;
  for (int j = t; j < wide; j += threads) { last[row * wide + j] = j + 1 < wide ? said[(j + 1) * said_step] : int(id); }
  if (t == 0) {
    ids[row] = int(id);
    lse[row] = row_lse(m, s);
    again[row] = another;
  }
""", header=METAL_VECTORS + WORDS + METAL_BITS + LANES_MIN, contiguous=False,
    cuda_header=CUDA_VECTORS + WORDS + CUDA_BITS + LANES_MIN)  # fmt: skip


def ras_step(logits, u, window, keep=None, *, scale=1.0, top_p=1.0, top_k=0, repeated=1):
    """One step -> (ids int32 [B], log-sum-exp of scale x fp32 [B], the window after it [B, W], whether there was a
    second draw bool [B]).

    top_p, top_k   of the nucleus (1 and 0: all ids)
    repeated       occurrences in the window from which on an id is left out

    A row in which nothing can be drawn (all masked or -inf, a NaN) gives id 0, and a log-sum-exp that is not finite."""
    options = {"scale": scale, "top_p": top_p, "top_k": top_k, "repeated": repeated}
    if _supported(logits, u, window, keep, top_k):
        variant = (keep is not None,)
        if _dispatch.usable(KERNEL, "softmax", variant, None, lambda: _selftest(*variant)):
            return _kernel(logits, u, window, keep, **options)
    return reference(logits, u, window, keep, **options)


def _supported(logits, u, window, keep, top_k):
    return (
        logits.ndim == 2
        and logits.dtype == u.dtype == mx.float32
        and window.dtype == mx.int32
        and (keep is None or keep.dtype == mx.bool_)
        and 0 < logits.shape[1] <= MAX_IDS
        and 0 < logits.shape[0] <= MAX_ROWS
        and min(top_k or MAX_IDS, logits.shape[1]) <= MAX_K
    )


def reference(logits, u, window, keep=None, *, scale=1.0, top_p=1.0, top_k=0, repeated=1):
    """`ras_step` in plain MLX ops."""
    p, lse = softmax_lse(logits, scale=scale, mask=keep)
    shares, ids = nucleus(p, top_p, top_k)
    ids = mx.take_along_axis(ids, _place(shares, u[:, 0])[:, None], axis=-1)[:, 0]
    if window.shape[1] == 0:
        return ids, lse, window, mx.zeros(ids.shape, dtype=mx.bool_)
    again = (window == ids[:, None]).sum(axis=-1) >= repeated  # [B]
    others = mx.arange(logits.shape[-1]) != ids[:, None]
    others = others if keep is None else mx.logical_and(others, keep)
    # A new softmax: at a low temperature all that is left may have had probability 0 beside the one left out.
    p, _ = softmax_lse(logits, scale=scale, mask=others)
    ids = mx.where(again, _place(p, u[:, 1]), ids)
    return ids, lse, shifted(window, ids), again


def nucleus(p, top_p, top_k):
    """The candidates of probabilities p [B, V] -> (their p, falling, 0 from the first that is none on; ids), [B, K]."""
    size = p.shape[-1]
    p, ids = largest(p, min(top_k or size, size))
    if top_p < 1:
        p = mx.where(mx.cumsum(p, axis=-1, inclusive=False) < top_p, p, 0.0)
    return p, ids


def _place(p, u):
    """The first place whose cumulative share of p [B, K] exceeds u [B] -> int32 [B].

    Where parallel sums round so that there is none (u within 1e-7 of 1), place 0."""
    below = mx.cumsum(p, axis=-1)
    hit = mx.logical_and(below > u[:, None] * below[:, -1:], p > 0)
    return mx.argmax(hit.astype(mx.int32), axis=-1).astype(mx.int32)


def shifted(window, ids):
    """`window` [B, W] after ids [B]."""
    return mx.concatenate([window, ids[:, None]], axis=1)[:, 1:]


def _kernel(logits, u, window, keep, *, scale, top_p, top_k, repeated):
    (rows, n), width = logits.shape, window.shape[1]
    options = _options(scale, top_p if top_p < 1 else float("inf"), min(top_k or n, n), width, min(repeated, 2**30))
    mask = logits if keep is None else keep if keep.shape == logits.shape else mx.broadcast_to(keep, logits.shape)
    threads = 32 * -(-n // (32 * VALUES))
    ids, lse, last, again = KERNEL(
        inputs=[logits, mask, window if width else options, u, options],
        template=[("M", mask.dtype), ("MASKED", keep is not None)],
        grid=(rows * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows,), (rows,), (rows, width or 1), (rows,)],
        output_dtypes=[mx.int32, mx.float32, mx.int32, mx.bool_],
    )
    return ids, lse, last if width else window, again


@functools.lru_cache(64)
def _options(scale, top_p, *counts):
    """int32 [1, 16], made once: a copy from the host costs more than a kernel. Never only one or two: MLX's CUDA back
    end keeps arrays of up to 8 bytes where the host looks, and a kernel that reads one waits 10 us."""
    numbers = [float_bits(scale), float_bits(top_p), *counts]
    return mx.array([numbers + [0] * (16 - len(numbers))], dtype=mx.int32)


def case(masked, rows=8, n=MAX_IDS - 3, width=10):
    """Arguments of a step: every second row has said its likeliest ids just before."""
    keys = mx.random.split(mx.random.key(19), 3)
    logits = mx.tile(3 * mx.random.normal((rows, n // 2 + 1), key=keys[0]), (1, 2))[:, :n]  # each twice
    u = mx.random.uniform(shape=(rows, 2), key=keys[1])
    likeliest = mx.argsort(-logits, axis=-1)[:, :width].astype(mx.int32)
    window = mx.where(mx.arange(rows)[:, None] % 2 == 1, likeliest, -1)
    keep = mx.random.uniform(shape=(1, n), key=keys[2]) < 0.9 if masked else None
    return logits, u, window, keep


def _selftest(masked):
    """Error of the log-sum-exp over what is allowed, infinite if an id, a window or a repetition differs from what the
    reference gives on the CPU. The case's uniform numbers are not near to where a draw would come out otherwise; its
    first row gets NaN."""
    (logits, *rest), options = case(masked), {"scale": 1.5, "top_p": 0.9, "top_k": 50, "repeated": 1}
    logits[0, 100:110] = mx.nan
    got = _kernel(logits, *rest, **options)
    with mx.stream(mx.cpu):
        want = reference(logits, *rest, **options)
        if not all(mx.array_equal(a, b).item() for a, b in zip(got, want) if a is not got[1]):
            return mx.inf
        error = mx.where(mx.isnan(got[1]) & mx.isnan(want[1]), 0.0, mx.abs(got[1] - want[1]))
        return mx.max(mx.where(mx.isnan(error), mx.inf, error)).item() / 1e-4
