"""The kernels on this GPU against the CPU (H3 step: the reference; the others: numpy float64): random shapes, many times.

    python benchmarks/thousand.py [--runs 1000] [--seed 0] [--seconds N]

int8 x int8 must give the same bytes (compared by hash); floats must stay within the bound. Prints the count, the worst
error of each operation as a fraction of what is allowed, and where it was. Exits with 1 if anything is beyond.
"""

import argparse
import hashlib
import sys
import time

import mlx.core as mx
import numpy as np

from mlx_cosyh3.kernels import H3StepParams, h3_step, int8_matmul, softmax, use_kernels

UNIT = {mx.float32: 2e-6, mx.float16: 1e-3, mx.bfloat16: 8e-3}


def normal(rng, *shape):
    return mx.array(rng.standard_normal(shape).astype(np.float32))


def softmax_case(rng):
    rows, n = int(rng.integers(1, 40)), int(rng.choice([rng.integers(1, 300), rng.integers(300, 9000), rng.integers(9000, 160000)]))
    x = (5 * normal(rng, rows, n)).astype(dtype_of(rng))

    def run(stream):
        if stream is None:
            return [softmax(x, scale=0.7)]
        # In float64: MLX's sum on a CPU adds one number after another, which costs 3e-4 at 150,000 columns.
        z = np.array(x.astype(mx.float32)).astype(np.float64) * 0.7
        e = np.exp(z - z.max(axis=1, keepdims=True))
        return [mx.array((e / e.sum(axis=1, keepdims=True)).astype(np.float32))]

    return f"softmax {rows} x {n} {x.dtype}", run, UNIT[x.dtype] * 8


def int8_case(rng):
    M, K, N = int(rng.choice([1, 3, 8])), int(rng.choice([rng.integers(1, 300), 768, 896, 1024, 4864])), int(rng.integers(1, 5000))
    w = mx.array(rng.integers(-127, 128, (N, K)).astype(np.int8))
    scale, bias = mx.array((rng.random(N) / K).astype(np.float32)), normal(rng, N)
    x = normal(rng, M, K).astype(dtype_of(rng))

    def run(stream):
        if stream is None:
            return [int8_matmul(x, w, scale, bias)]
        y = np.array(x.astype(mx.float32)).astype(np.float64) @ np.array(w).astype(np.float64).T
        return [mx.array((y * np.array(scale) + np.array(bias)).astype(np.float32))]

    return f"int8 {M} x {K} -> {N} {x.dtype}", run, UNIT[x.dtype] * 8


def exact_case(rng):
    M, K, N = int(rng.integers(1, 65)), int(rng.choice([rng.integers(1, 300), 896, 4864, 8192])), int(rng.integers(1, 2000))
    w = mx.array(rng.integers(-128, 128, (N, K)).astype(np.int8))
    x = mx.array(rng.integers(-128, 128, (M, K)).astype(np.int8))
    scale, bias, xs = (mx.array(rng.random(n).astype(np.float32)) for n in (N, N, M))

    def run(stream):
        if stream is None:
            return [int8_matmul(x, w, scale, bias, x_scale=xs)]
        # The sum is exact in float64; then one rounding each, in float32, as the reference has it.
        total = (np.array(x).astype(np.float64) @ np.array(w).astype(np.float64).T).astype(np.float32)
        return [mx.array(total * np.array(xs)[:, None] * np.array(scale) + np.array(bias))]

    return f"int8 x int8 {M} x {K} -> {N}", run, None


def step_case(rng):
    B, T, H, hd = int(rng.integers(1, 9)), int(rng.integers(1, 5)), int(rng.integers(1, 800)), int(rng.choice([1, 1, 1, 2]))
    D, dtype = H * hd, dtype_of(rng)
    p = H3StepParams(normal(rng, D, 64) / 8, normal(rng, D, 64) / 8, normal(rng, D), *(0.2 * normal(rng, H, 32, 2) for _ in range(3)),
                     normal(rng, H))  # fmt: skip
    q, k, v = (normal(rng, B, T, D).astype(dtype) for _ in range(3))
    s, S = normal(rng, B, D, 64), normal(rng, B, H, hd, hd, 32, 2)
    return f"h3_step {B} x {T} x {D}, head_dim {hd} {dtype}", lambda t: h3_step(q, k, v, s, S, p, stream=t), UNIT[dtype] * 16


def dtype_of(rng):
    return list(UNIT)[int(rng.integers(3))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    args = parser.parse_args()
    end = time.monotonic() + args.seconds
    cases = {"softmax": softmax_case, "int8": int8_case, "int8 x int8": exact_case, "h3_step": step_case}
    worst, beyond, counts, hashes = {}, [], dict.fromkeys(cases, 0), 0
    for run in range(args.runs):
        if time.monotonic() > end:
            break
        rng = np.random.default_rng([args.seed, run])
        name = list(cases)[run % len(cases)]
        where, function, bound = cases[name](rng)
        with use_kernels("1"):
            got = [np.array(a.astype(mx.float32)) for a in function(None)]
        want = [np.array(a.astype(mx.float32)) for a in function(mx.cpu)]
        counts[name] += 1
        if bound is None:
            same = [hashlib.sha256(a.tobytes()).digest() for a in got] == [hashlib.sha256(a.tobytes()).digest() for a in want]
            hashes += same
            error = 0.0 if same else float("inf")
        else:
            error = max(float(np.abs(a - b).max() / (bound * max(1.0, np.abs(b).max()))) for a, b in zip(got, want))
        if not error <= worst.get(name, (-1, ""))[0]:
            worst[name] = (error, f"run {run}: {where}")
        if not error <= 1:
            beyond.append(where)
    print(f"{sum(counts.values())} runs on {mx.device_info().get('device_name')}, mlx {mx.__version__}")
    for name, (error, where) in worst.items():
        print(f"{name}: {counts[name]} runs, worst {error:.3f} of what is allowed, at {where}")
    print(f"int8 x int8: {hashes} of {counts['int8 x int8']} identical by hash; {len(beyond)} beyond the bound {beyond[:3]}")
    sys.exit(1 if beyond else 0)


if __name__ == "__main__":
    main()
