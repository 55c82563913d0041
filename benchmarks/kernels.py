"""The kernels on this GPU: against MLX's built-ins, against the same in unfused MLX ops, and against the bandwidth.

    python benchmarks/kernels.py [--only h3_step,softmax,int8,decode]

Every ratio is taken in this run. The bandwidth is that of a copy of 1 GB, bytes read and written counted. "GPU" is the
time of the kernels alone, on CUDA where PyTorch is installed, whose profiler sees them; the other times hold what it costs
the host to launch them, which on a large GPU is more.
"""

import argparse
import time

import mlx.core as mx
from h3 import decode, prefill, random_model, seconds  # benchmarks/h3.py: this folder is on the path of a script
from mlx.utils import tree_flatten

from mlx_cosyh3.kernels import H3StepParams, h3_step, int8_matmul, softmax, use_kernels
from mlx_cosyh3.kernels.softmax import softmax_lse

HALF_BYTES = {"125M": 266.8e6, "1.3B": 2727e6, "2.7B": 5464e6}  # a decoded token, batch 1, 16-bit weights


def microseconds(function, repeat=5, chain=20):
    """Least time of one call, from `chain` calls dispatched together (each a list of arrays), over `repeat` rounds."""
    mx.eval(function())
    best = float("inf")
    for _ in range(repeat):
        mx.synchronize()
        begin = time.perf_counter()
        mx.eval([function() for _ in range(chain)])
        mx.synchronize()
        best = min(best, (time.perf_counter() - begin) / chain)
    return best * 1e6


def gpu_microseconds(function, calls=12):
    """Mean time of a call's kernels on the GPU, from PyTorch's profiler; NaN without it. `function(i)` is the i-th call."""
    try:
        from torch.profiler import ProfilerActivity, profile
    except ImportError:
        return float("nan")
    if not mx.cuda.is_available():
        return float("nan")
    mx.eval(function(0))
    mx.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for i in range(calls):
            mx.eval(function(i))
        mx.synchronize()
    return sum(e.device_time for e in seen.events() if "Memcpy" not in e.name and "Memset" not in e.name) / calls


def bandwidth():
    """GB/s of a copy."""
    x = mx.zeros((256 << 20,), dtype=mx.float32)
    mx.eval(x)
    return 2 * x.nbytes / 1e3 / microseconds(lambda: [x + 1], chain=4)


def random_params(D, N=64, M=32, key=0):
    keys = iter(mx.random.split(mx.random.key(key), 16))
    f = lambda *s: mx.random.normal(s, key=next(keys))  # noqa: E731
    return H3StepParams(f(D, N), f(D, N), f(D), *(0.3 * f(D, M, 2) for _ in range(3)), f(D))


def bench_h3_step(limit):
    print("\n| h3_step | batch | tokens | kernel, us | unfused ops, us | ratio | GB/s | of the copy |\n" + "| ---: " * 8 + "|")
    for D in (768, 2560):
        p = random_params(D)
        mx.eval(p)
        for B, T in ((1, 1), (16, 1), (1, 8)):
            q = mx.random.normal((B, T, D), key=mx.random.key(1)).astype(mx.float16)
            s, S = mx.zeros((B, D, 64)), mx.zeros((B, D, 1, 1, 32, 2))
            mx.eval(q, s, S)
            times = times_of("h3_step", lambda: h3_step(q, q, q, s, S, p))
            moved = 4 * D * (128 + 2 + 192 + 2 * B * (64 + 64)) / 1e3 / times[0]
            print(f"| D {D} | {B} | {T} | {times[0]:.1f} | {times[1]:.1f} | {times[1] / times[0]:.1f} | {moved:.0f} "
                  f"| {moved / limit:.0%} |", flush=True)  # fmt: skip


def times_of(kernel, function, chain=20):
    """Microseconds with that kernel alone, and with MLX's operations."""
    times = []
    for choice in (kernel, "0"):
        with use_kernels(choice):
            times.append(microseconds(function, chain=chain))
    return times


def bench_softmax(limit):
    print("\n| softmax | dtype | kernel, us | mx.softmax, us | ratio | GPU: kernel, us | mx.softmax, us | ratio "
          "| softmax + lse: kernel, us | in MLX ops, us | ratio |\n" + "| ---: " * 11 + "|")  # fmt: skip
    for rows, n in ((64, 6761), (1, 50264), (16, 50264), (1, 151936), (16, 151936), (512, 50264)):
        for dtype in (mx.float32, mx.float16):
            x = mx.random.normal((rows, n), key=mx.random.key(0)).astype(dtype)
            mx.eval(x)
            ours, _ = times_of("softmax", lambda: [softmax(x, way="kernel")])
            gpu = [gpu_microseconds(f) for f in (lambda i: softmax(x, way="kernel"), lambda i: mx.softmax(x, axis=-1, precise=True))]
            plain = microseconds(lambda: [mx.softmax(x, axis=-1, precise=True)])
            both = times_of("softmax", lambda: list(softmax_lse(x)))
            print(f"| {rows} x {n} | {str(dtype)[9:]} | {ours:.1f} | {plain:.1f} | {plain / ours:.2f} | {gpu[0]:.1f} | {gpu[1]:.1f} "
                  f"| {gpu[1] / gpu[0]:.2f} | {both[0]:.1f} | {both[1]:.1f} | {both[1] / both[0]:.2f} |", flush=True)  # fmt: skip


def bench_int8(limit):
    print("\n| int8 [K -> N] | rows | kernel, us | quantized_matmul 8 bits, us | ratio | fp16 matmul, us | ratio "
          "| GPU: kernel, us | quantized_matmul, us | ratio | GB/s | of the copy |\n" + "| ---: " * 12 + "|")  # fmt: skip
    shapes = [(768, 3072), (896, 896), (896, 4864), (4864, 896), (2048, 8192), (2560, 10240), (8192, 8192)]
    for K, N in shapes:
        w = mx.random.normal((N, K), key=mx.random.key(1)).astype(mx.float16)
        q = mx.random.randint(-127, 128, (N, K), key=mx.random.key(2)).astype(mx.int8)
        scale, bias = mx.ones((N,)) / 1000, mx.zeros((N,))
        affine = mx.quantize(w, group_size=64, bits=8) if K % 64 == 0 else mx.quantize(w, group_size=32, bits=8)
        mx.eval(w, q, scale, bias, affine)
        for M in (1, 8):
            x = mx.random.normal((M, K), key=mx.random.key(3)).astype(mx.float16)
            mx.eval(x)
            ours, _ = times_of("int8_matmul", lambda: [int8_matmul(x, q, scale, way="gemv")])
            theirs = microseconds(lambda: [mx.quantized_matmul(x, *affine, group_size=K * N // affine[1].size, bits=8)])
            plain = microseconds(lambda: [x @ w.T])
            # Several weights in turn, more than the cache holds.
            several = [(mx.concatenate([q[1:], q[:1]]), [mx.concatenate([a[1:], a[:1]]) for a in affine])
                       for _ in range(max(1, min(64, 300_000_000 // q.nbytes)))]
            mx.eval(several)
            pick, group = lambda i: several[i % len(several)], K * N // affine[1].size  # noqa: E731
            gpu = [gpu_microseconds(lambda i: int8_matmul(x, pick(i)[0], scale, way="gemv")),
                   gpu_microseconds(lambda i: mx.quantized_matmul(x, *pick(i)[1], group_size=group, bits=8))]  # fmt: skip
            moved = q.nbytes / 1e3 / gpu[0]
            print(f"| {K} -> {N} | {M} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.2f} | {plain:.1f} | {plain / ours:.2f} "
                  f"| {gpu[0]:.1f} | {gpu[1]:.1f} | {gpu[1] / gpu[0]:.2f} | {moved:.0f} | {moved / limit:.0%} |", flush=True)  # fmt: skip
    print("\n| int8 x int8 [K -> N] | rows | kernel, us | fp32 GEMMs, us | ratio |\n" + "| ---: " * 5 + "|")
    for K, N in ((896, 896), (2048, 8192)):
        q = mx.random.randint(-127, 128, (N, K), key=mx.random.key(2)).astype(mx.int8)
        scale = mx.ones((N,)) / 1000
        for M in (1, 8, 64):
            x = mx.random.randint(-127, 128, (M, K), key=mx.random.key(3)).astype(mx.int8)
            x_scale = mx.ones((M,))
            mx.eval(q, scale, x, x_scale)
            a, b = times_of("int8_matmul", lambda: [int8_matmul(x, q, scale, x_scale=x_scale)], chain=8)
            print(f"| {K} -> {N} | {M} | {a:.1f} | {b:.1f} | {b / a:.2f} |", flush=True)


def half(model):
    """Linear layers, embedding and norms in float16, as upstream's generate script casts; SSM tensors stay fp32."""
    weights = [(n, a if ".shift." in n or ".ssm." in n else a.astype(mx.float16)) for n, a in tree_flatten(model.parameters())]
    return model.load_weights(weights)


def decode_rate(model, n=64):
    cache = prefill(model, 512)
    decode(model, cache, 8)
    mx.synchronize()
    return n / seconds(lambda: decode(model, cache, n), 1)


def bench_decode(limit):
    print("\n| decode, fp16, batch 1, after 512 tokens | kernels: tok/s | without: tok/s | ratio | of the bandwidth floor |\n"
          "| --- | ---: | ---: | ---: | ---: |")  # fmt: skip
    for name in HALF_BYTES:
        model = half(random_model(name))
        rates = []
        for choice in ("1", "0"):
            with use_kernels(choice):
                rates.append(decode_rate(model))
        floor = limit * 1e9 / HALF_BYTES[name]
        print(f"| {name} | {rates[0]:.0f} | {rates[1]:.0f} | {rates[0] / rates[1]:.2f} | {rates[0] / floor:.1%} |", flush=True)


def main():
    parts = {"h3_step": bench_h3_step, "softmax": bench_softmax, "int8": bench_int8, "decode": bench_decode}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(parts), help="some of " + ",".join(parts))
    args = parser.parse_args()
    info = mx.device_info()
    limit = bandwidth()
    print(f"mlx {mx.__version__}, {info.get('device_name')}; copy {limit:.0f} GB/s")
    for name in args.only.split(","):
        parts[name](limit)


if __name__ == "__main__":
    main()
