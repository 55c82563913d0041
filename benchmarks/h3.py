"""Speed and memory of H3 on this machine: against a naive version, over the context length, by method and chunk.

    python benchmarks/h3.py [--size h3-tiny|125M|355M|1.3B|2.7B] [--quick] [--only naive,context,scan,chunk,share]

Prints tables in Markdown with ratios taken in this run. docs/LOG.md keeps dated copies.
"""

import argparse
import platform
import time

import mlx.core as mx
import numpy as np

from mlx_cosyh3.h3 import CHUNK, H3, Attention, H3Config
from mlx_cosyh3.scan import DiagonalScan, ShiftScan

GPT2 = {"vocab_size": 50257, "padded_vocab_size": 50264, "eos_token_id": 50256}
SIZES = {  # random weights in these shapes; "pure" leaves the attention layers out
    "h3-tiny": {"d_model": 256, "n_layer": 10, "attn_layer_idx": [3, 7], "num_heads": 4, "vocab_size": 4096,
                "padded_vocab_size": 4096, "eos_token_id": 4095},
    "125M": {"d_model": 768, "n_layer": 12, "attn_layer_idx": [6], "num_heads": 12} | GPT2,
    "355M": {"d_model": 1024, "n_layer": 24, "attn_layer_idx": [8, 16], "num_heads": 16} | GPT2,
    "1.3B": {"d_model": 2048, "n_layer": 24, "attn_layer_idx": [8, 16], "num_heads": 16} | GPT2,
    "2.7B": {"d_model": 2560, "n_layer": 32, "attn_layer_idx": [8, 16, 24], "num_heads": 20} | GPT2,
}  # fmt: skip


def random_model(size, pure=False, kv_window=None):
    config = SIZES[size] | ({"attn_layer_idx": []} if pure else {})
    return H3(H3Config.from_dict(config), kv_window).init_weights()


def seconds(function, repeat=3):
    """The least of `repeat` timings of function(), which must evaluate what it computes."""
    best = float("inf")
    for _ in range(repeat):
        begin = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - begin)
    return best


def ids_of(n):
    return mx.array(np.random.default_rng(0).integers(0, 4000, (1, n)).astype(np.int32))


def prefill(model, n, cache=None, **kw):
    cache = cache or model.make_cache()
    mx.eval(model.prefill(ids_of(n), cache, **kw))
    return cache


def decode(model, cache, n):
    """n greedy tokens the way `generate` does it: the next step dispatched before the last token is read."""
    token = mx.array([1])
    for _ in range(n):
        following = mx.argmax(model.step(token, cache), axis=-1)
        mx.async_eval(following)
        token.tolist()
        token = following
    mx.eval(token)


class Naive:
    """The same maths as one would first write it in MLX ops, of the same weights: the whole prompt at once with
    materialised SSM kernels and FFTs of twice its length, coefficients made anew at each call, growing arrays."""

    def __init__(self, model):
        self.model = model

    def coefficients(self, ssm):
        dt = mx.exp(ssm.log_dt)[:, None]
        A = -mx.exp(ssm.inv_A_real) + 1j * ssm.A_imag
        B, C = (p[..., 0] + 1j * p[..., 1] for p in (ssm.B, ssm.C))
        z = A * dt / 2
        return (1 + z) / (1 - z), B * dt / (1 - z), C

    def mixer(self, m, x, state):
        dA, dB, C = self.coefficients(m.ssm)
        q, k, v = m.q_proj(x), m.k_proj(x), m.v_proj(x)  # [1, L, D]
        B, Cs, N, L = m.shift.B, m.shift.C, m.shift.B.shape[1], x.shape[1]
        if state is None:
            n = 2 * max(L, N)
            f = mx.fft.irfft(mx.conj(mx.fft.rfft(B, 2 * N)) * mx.fft.rfft(Cs, 2 * N), 2 * N)[:, :N]
            conv = lambda a, h: mx.fft.irfft(mx.fft.rfft(a, n, 1) * mx.fft.rfft(h, n, 1), n, 1)[:, :L]  # noqa: E731
            k2 = conv(k, f.T[None]) + m.shift.D * k
            kv = k2 * v
            powers = dA[..., None] ** mx.arange(L).astype(mx.complex64)  # [D, M, L]
            K = 2 * mx.real(mx.sum((C * dB)[..., None] * powers, axis=1))
            y = conv(kv, K.T[None]) + m.ssm.D * kv
            S = mx.sum(dB[..., None] * powers[..., ::-1] * kv[0].T[:, None], axis=-1)
            s = mx.zeros((x.shape[2], N))
            for j in range(min(L, N)):
                s = s + mx.pad(B[:, : N - j], [(0, 0), (j, 0)]) * k[0, L - 1 - j][:, None]
        else:
            s, S = state
            s = mx.concatenate([mx.zeros((s.shape[0], 1)), s[:, :-1]], axis=1) + B * k[0, 0][:, None]
            kv = (mx.sum(Cs * s, axis=1) + m.shift.D * k[0, 0]) * v[0, 0]
            S = dA * S + dB * kv[:, None]
            y = (2 * mx.real(mx.sum(C * S, axis=1)) + m.ssm.D * kv)[None, None]
        return m.output_linear(y * q), (s, S)

    def attention(self, m, x, state):
        L = x.shape[1]
        q, k, v = m.Wqkv(x).reshape(1, L, 3, m._heads, -1).transpose(2, 0, 3, 1, 4)
        if state is not None:
            k, v = mx.concatenate([state[0], k], axis=2), mx.concatenate([state[1], v], axis=2)
        mask = mx.triu(mx.full((L, L), -mx.inf), 1) if L > 1 else 0
        w = mx.softmax(q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5 + mask, axis=-1)
        return m.out_proj((w @ v).swapaxes(1, 2).reshape(x.shape)), (k, v)

    def __call__(self, ids, states):
        model = self.model
        x, r, new = model.embeddings(ids), 0, []
        for layer, state in zip(model.layers, states or [None] * len(model.layers)):
            r = r + x
            mix = self.attention if isinstance(layer.mixer, Attention) else self.mixer
            x, state = mix(layer.mixer, layer.norm1(r), state)
            new.append(state)
            r = r + x
            h = layer.mlp.fc1(layer.norm2(r))
            x = layer.mlp.fc2(0.5 * h * (1 + mx.tanh(0.7978845608 * (h + 0.044715 * h**3))))
        return model.embeddings.as_linear(model.norm_f(r + x)), new


def naive(size, quick):
    model = random_model(size)
    slow = Naive(model)
    L, n = (256, 32) if quick else (1024, 128)
    ids = ids_of(L)
    logits, states = slow(ids, None)
    cache = model.make_cache()
    ours = model.prefill(ids, cache)
    print(f"\nLargest difference of the last logits: {mx.abs(ours - logits[:, -1]).max().item():.1e}\n")

    def naive_decode():
        token, s = mx.array([[1]]), states
        for _ in range(n):
            logits, s = slow(token, s)
            token = mx.argmax(logits[:, -1:], axis=-1)
            token.item()

    pre = seconds(lambda: prefill(model, L)), seconds(lambda: mx.eval(slow(ids, None)))
    dec = seconds(lambda: decode(model, cache, n)) / n, seconds(naive_decode) / n
    print(f"| {size}'s shape, fp32 | ours | naive | ratio |\n| --- | ---: | ---: | ---: |")
    print(f"| prompt of {L} tokens, ms | {pre[0] * 1e3:.0f} | {pre[1] * 1e3:.0f} | {pre[1] / pre[0]:.2f} |")
    print(f"| decode, ms a token | {dec[0] * 1e3:.2f} | {dec[1] * 1e3:.2f} | {dec[1] / dec[0]:.2f} |")


def context(size, quick):
    """Tokens per second and peak memory as the context grows, for a pure model and a hybrid with a window."""
    print("\n| context | pure: prompt tok/s | decode tok/s | peak MB | window 256: prompt tok/s | decode tok/s | peak MB |")
    print("| ---: " * 7 + "|")
    models = [random_model(size, pure=True), random_model(size, kv_window=256)]
    for n in (1024, 2048, 4096) if quick else (1024, 2048, 4096, 8192, 16384, 32768, 65536):
        cells = []
        for model in models:
            mx.clear_cache()
            mx.reset_peak_memory()
            begin = time.perf_counter()
            cache = prefill(model, n)
            rate = n / (time.perf_counter() - begin)
            peak = mx.get_peak_memory() / 1e6
            cells += [f"{rate:.0f}", f"{64 / seconds(lambda: decode(model, cache, 64)):.1f}", f"{peak:.0f}"]
        print(f"| {n:,} | " + " | ".join(cells) + " |", flush=True)


def scan(size, quick):
    """Methods of the convolutions, one layer of D channels, a chunk of T tokens, ms."""
    rng = np.random.default_rng(0)
    print("\n| D | T | shift: fft | shift: toeplitz | shift: conv1d, filter only | diagonal: fft | diagonal: toeplitz |")
    print("| ---: " * 7 + "|")
    for D in (SIZES[size]["d_model"],):
        taps = [rng.standard_normal(s) for s in ((D, 64), (D, 64), (D,))]
        dA = np.exp(-rng.uniform(1e-3, 0.05, (D, 32)) + 1j * rng.uniform(0, 2.7, (D, 32)))
        dB, C = (rng.standard_normal((2, D, 32)) + 1j * rng.standard_normal((2, D, 32)))
        s, S = mx.zeros((1, D, 64)), mx.zeros((1, D, 1, 1, 32, 2))
        for T in (8, 64, 512, 1024):
            x, n = mx.random.normal((1, T, D), key=mx.random.key(0)), np.array([T])
            cells = [lambda f=ShiftScan(*taps, m): f(x, s, n) for m in ("fft", "toeplitz")]
            weight, padded = mx.array(taps[1].astype(np.float32))[..., None], mx.pad(x, [(0, 0), (63, 0), (0, 0)])
            cells += [lambda: mx.conv1d(padded, weight, groups=D)]
            cells += [lambda f=DiagonalScan(dA, dB, C, taps[2], m): f(x[..., None, None], S, n) for m in ("fft", "toeplitz")]
            times = [seconds(lambda c=c: mx.eval(c()), 7) * 1e3 for c in cells]
            print(f"| {D} | {T} | " + " | ".join(f"{t:.2f}" for t in times) + " |", flush=True)


def chunk(size, quick):
    """Which chunk of the prompt to read at once."""
    model = random_model(size, pure=True)
    n = 1024 if quick else 4096
    print(f"\n| chunk | prompt of {n}, tok/s | peak MB |\n| ---: | ---: | ---: |")
    for size in (64, 128, 256, 512, 1024, 2048):
        mx.clear_cache()
        mx.reset_peak_memory()
        t = seconds(lambda: prefill(model, n, chunk=size), 2)
        star = " (default)" if size == CHUNK else ""
        print(f"| {size}{star} | {n / t:.0f} | {mx.get_peak_memory() / 1e6:.0f} |", flush=True)


def share(size, quick):
    """What the attention layers cost without a window, as the context grows."""
    model = random_model(size)
    print("\n| context | prompt tok/s | of it attention | decode ms a token | of it attention |\n" + "| ---: " * 5 + "|")
    for n in (2048,) if quick else (2048, 4096, 8192, 16384):
        cache = prefill(model, n - CHUNK)
        before = cache.copy()
        whole = seconds(lambda: prefill(model, CHUNK, before.copy()), 2)
        step = seconds(lambda: decode(model, cache.copy(), 16), 2) / 16
        x = mx.random.normal((1, CHUNK, model.config.d_model), key=mx.random.key(0))
        layers = [(model.layers[j].mixer, j) for j in model.config.attn_layer_idx]

        def attend(x, times):
            for m, j in layers:
                state = before.layers[j].copy()
                for _ in range(times):
                    mx.eval(m(x, state, n))

        part = seconds(lambda: attend(x, 1), 2)
        one = seconds(lambda: attend(x[:, :1], 16), 2) / 16
        print(f"| {n:,} | {CHUNK / whole:.0f} | {part / whole:.0%} | {step * 1e3:.1f} | {one / step:.0%} |", flush=True)


def main():
    parts = {"naive": naive, "context": context, "scan": scan, "chunk": chunk, "share": share}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="h3-tiny")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--only", default=",".join(parts), help="some of " + ",".join(parts))
    args = parser.parse_args()
    print(f"{args.size}, mlx {mx.__version__}, {mx.default_device()}, {platform.machine()} {platform.system()}")
    for name in args.only.split(","):
        parts[name](args.size, args.quick)


if __name__ == "__main__":
    main()
