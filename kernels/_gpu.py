"""One kernel body for two languages: Metal (`mx.fast.metal_kernel`) and CUDA (`mx.fast.cuda_kernel`).

A body is written in Metal's words; for CUDA the header below gives those words a meaning. What a body must keep to:

- guard every index against its bound: CUDA rounds the grid up to whole threadgroups, and the surplus threads run;
- all 32 lanes of a simdgroup take part in every simd operation; the grid's first axis is the lane where one is used;
- `auto p = x` for pointers to inputs: Metal passes inputs of fewer than 8 elements in another address space;
- no scalar inputs (pass an array of one and index it), no `threadgroup T*` pointers in helpers, no double;
- conversions from and to half by static_cast; only mem_threadgroup barriers.
"""

import hashlib
import re
import threading

import mlx.core as mx

CUDA_WORDS = r"""
#undef __device__  // CUDA's headers spell it with the word `device`, which is about to vanish
#define __device__ __attribute__((__device__))
#define device
#define constant
#define thread
#define threadgroup __shared__
#define thread_position_in_grid make_uint3(blockIdx.x * blockDim.x + threadIdx.x, blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.z + threadIdx.z)
#define thread_position_in_threadgroup make_uint3(threadIdx.x, threadIdx.y, threadIdx.z)
#define threadgroup_position_in_grid make_uint3(blockIdx.x, blockIdx.y, blockIdx.z)
#define threads_per_threadgroup make_uint3(blockDim.x, blockDim.y, blockDim.z)
#define thread_index_in_threadgroup (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z))
#define thread_index_in_simdgroup (thread_index_in_threadgroup & 31u)
#define simdgroup_index_in_threadgroup (thread_index_in_threadgroup >> 5)
struct mem_flags { enum { mem_none, mem_device, mem_threadgroup }; };
#define threadgroup_barrier(flags) __syncthreads()
#define simdgroup_barrier(flags) __syncwarp()
template <typename T> __device__ __forceinline__ T simd_sum(T x) {
  for (int i = 16; i; i >>= 1) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}
template <typename T> __device__ __forceinline__ T simd_max(T x) {
  for (int i = 16; i; i >>= 1) { T y = __shfl_xor_sync(0xffffffffu, x, i); x = y > x ? y : x; }
  return x;
}
template <typename T> __device__ __forceinline__ T simd_shuffle_up(T x, unsigned n) { return __shfl_up_sync(0xffffffffu, x, n); }
template <typename T> __device__ __forceinline__ T simd_shuffle(T x, unsigned lane) { return __shfl_sync(0xffffffffu, x, lane); }
template <typename T> __device__ __forceinline__ T simd_shuffle_xor(T x, unsigned n) { return __shfl_xor_sync(0xffffffffu, x, n); }
template <typename T> __device__ __forceinline__ T simd_broadcast(T x, unsigned lane) { return __shfl_sync(0xffffffffu, x, lane); }
namespace metal { namespace fast {
__device__ __forceinline__ float exp(float x) { return __expf(x); }
__device__ __forceinline__ float log(float x) { return __logf(x); }
} }
typedef unsigned int uint;
typedef unsigned char uchar;
"""


def bare(source):
    """`source` without comments and indents; its lines keep their numbers."""
    source = re.sub(r"/\*.*?\*/", lambda m: "\n" * m[0].count("\n"), source, flags=re.DOTALL)
    return "\n".join(re.sub(r"//.*", "", line).strip() for line in source.split("\n"))


def _words(text):
    """Those definitions of CUDA_WORDS that `text` uses, and that those use."""
    # One definition ends where the next begins; what defines no name of its own is always needed.
    parts = re.split(r"\n(?=#|template|struct|namespace|typedef)", bare(CUDA_WORDS).strip())
    names = [re.match(r"#define (\w+)|.*?(\w+)\(T |struct (\w+)|namespace (\w+)|typedef .* (\w+);", p) for p in parts]
    names = [next(filter(None, m.groups()), None) if m else None for m in names]
    used = {None, "__device__"}
    before = -1
    while len(used) != before:
        before = len(used)
        chosen = [p for p, n in zip(parts, names) if n in used]
        used |= {n for n in names if n and re.search(rf"\b{n}\b", "\n".join([text, *chosen]))}
    return "\n".join(p for p, n in zip(parts, names) if n in used) + "\n"


class GpuKernel:
    """A kernel in source form, compiled at first use on whichever GPU there is.

    name       distinct for every kernel and variant that differs in its text
    inputs, outputs   names, as `mx.fast.metal_kernel` takes them
    body       Metal source of the function's body; `cuda_body` where CUDA needs another one (None: the same)
    header     Metal helpers in front of it; `cuda_header` likewise
    contiguous copy strided inputs first; False: the body goes by `x_strides` (in elements)

    MLX copies and hashes the whole text at every launch (4 us for 20 KB), so comments and indents are left out."""

    def __init__(self, name, inputs, outputs, body, *, header="", cuda_body=None, cuda_header=None, contiguous=True):
        self.name, self.inputs, self.outputs = name, list(inputs), list(outputs)
        self.body, self.header, self.contiguous = bare(body), bare(header), contiguous
        self.cuda_body = self.body if cuda_body is None else bare(cuda_body)
        cuda_header = self.header if cuda_header is None else bare(cuda_header)
        self.cuda_header = _words(cuda_header + self.cuda_body) + cuda_header
        self._lock, self._made = threading.Lock(), None

    def metal_arguments(self):
        """The keyword arguments of `mx.fast.metal_kernel`."""
        return {
            "name": self.name, "input_names": self.inputs, "output_names": self.outputs,
            "source": self.body, "header": self.header, "ensure_row_contiguous": self.contiguous,
        }  # fmt: skip

    def cuda_arguments(self):
        """The keyword arguments of `mx.fast.cuda_kernel`. MLX keeps compiled CUDA kernels, on disk too, by name and
        template values alone: the name carries a digest of the text, and every dtype that varies is a template value."""
        digest = hashlib.sha256((self.cuda_header + self.cuda_body).encode()).hexdigest()[:8]
        return {
            "name": f"{self.name}_{digest}", "input_names": self.inputs, "output_names": self.outputs,
            "source": self.cuda_body, "header": self.cuda_header, "ensure_row_contiguous": self.contiguous,
        }  # fmt: skip

    def text(self):
        """What would be compiled here: part of the stamp that says a self-test has passed."""
        return self.header + self.body if mx.metal.is_available() else self.cuda_header + self.cuda_body

    def __call__(self, **kwargs):
        """Run it; keyword arguments as for an `mx.fast.metal_kernel` object. Returns a list of arrays."""
        if self._made is None:
            with self._lock:
                if self._made is None:
                    if mx.metal.is_available():
                        self._made = mx.fast.metal_kernel(**self.metal_arguments())
                    else:
                        self._made = mx.fast.cuda_kernel(**self.cuda_arguments())
        return self._made(**kwargs)
