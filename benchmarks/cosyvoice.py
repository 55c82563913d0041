"""CosyVoice 3 at full size with random weights: time per stage, real-time factor, first audio, cost of the n-th chunk.

    python benchmarks/cosyvoice.py [--seconds 10] [--long 60] [--dtypes float32,bfloat16,int8] [--size full|tiny]

Random weights speak noise, but they cost what trained ones cost. The speech head's rows for special ids are zero, so
that none is drawn and exactly the wanted number of speech tokens (25 a second) is made. bfloat16 and int8: the language
model and the flow; the vocoder is float32 always.
"""

import argparse
import time

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path

from mlx_cosyh3.cosyvoice import cosyvoice3
from mlx_cosyh3.cosyvoice.llm import LMOptions
from mlx_cosyh3.cosyvoice.model import size
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.int8 import quantize_int8
from mlx_cosyh3.kernels import use_kernels

HIFT = {"in_channels": 80, "base_channels": 512, "nb_harmonics": 8, "sampling_rate": 24000, "nsf_alpha": 0.1, "nsf_sigma": 0.003,
        "nsf_voiced_threshold": 10, "upsample_rates": [8, 5, 3], "upsample_kernel_sizes": [16, 11, 7],
        "istft_params": {"n_fft": 16, "hop_len": 4}, "resblock_kernel_sizes": [3, 7, 11],
        "resblock_dilation_sizes": [[1, 3, 5]] * 3, "source_resblock_kernel_sizes": [7, 7, 11],
        "source_resblock_dilation_sizes": [[1, 3, 5]] * 3, "lrelu_slope": 0.1, "audio_limit": 0.99, "conv_pre_look_right": 4,
        "f0_predictor": {"cond_channels": 512}}  # fmt: skip
SIZES = {
    "full": {"qwen2": (896, 24, 4864, 14, 2, 151936), "dit": (1024, 22, 16), "hift": (512, 512)},
    "tiny": {"qwen2": (128, 2, 256, 2, 1, 300), "dit": (128, 2, 2), "hift": (32, 32)},
}


def config(size, dtype):
    hidden, layers, inner, heads, kv, vocab = SIZES[size]["qwen2"]
    dim, depth, dit_heads = SIZES[size]["dit"]
    base, f0 = SIZES[size]["hift"]
    qwen2 = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner, "num_attention_heads": heads,
             "num_key_value_heads": kv, "vocab_size": vocab, "rms_norm_eps": 1e-6, "rope_theta": 1e6}  # fmt: skip
    compute = "bfloat16" if dtype == "bfloat16" else "float32"
    int8 = {"llm": {"mode": "int8"}, "flow": {"mode": "int8"}}
    return {
        "model_type": "cosyvoice3", "sample_rate": 24000, "token_frame_rate": 25, "token_mel_ratio": 2, "chunk_size": 25,
        "llm": {"qwen2": qwen2, "speech_token_size": 6561, "speech_vocab_size": 6761, "own_specials": False, "head_bias": False,
                "end_of_prompt_id": vocab - 290, "mix_ratio": [5, 15]},
        "flow": {"vocab_size": 6561, "dit": {"dim": dim, "depth": depth, "heads": dit_heads},
                 "pre_lookahead_layer": {"channels": dim}},
        "hift": HIFT | {"base_channels": base, "f0_predictor": {"cond_channels": f0}},
        "dtype": {"llm": compute, "flow": compute, "hift": "float32"},
        **({"quantization": int8} if dtype == "int8" else {}),
    }  # fmt: skip


class Words:
    """In place of a tokenizer: one id a character."""

    def __init__(self, end_of_prompt):
        self.end_of_prompt = end_of_prompt

    def encode(self, text):
        return [self.end_of_prompt] * text.count("<|endofprompt|>") + [ord(c) % 200 for c in text.replace("<|endofprompt|>", "")]

    def count(self, text):
        return len(self.encode(text))


def random_model(size, dtype, seed=0):
    """The model, evaluated; weights as their layers would be initialised, from one key."""
    cfg = config(size, dtype)
    plain = cosyvoice3.build({k: v for k, v in cfg.items() if k != "quantization"})
    names = [n for n, _ in tree_flatten(plain.parameters())]
    keys = dict(zip(names, mx.random.split(mx.random.key(seed), len(names))))

    def draw(name, a):
        if name.endswith("llm_decoder.weight"):
            w = mx.random.normal(a.shape, key=keys[name]) * a.shape[1] ** -0.5
            return mx.where((mx.arange(a.shape[0]) < 6561)[:, None], w, 0.0)
        if "norm" in name or name.endswith("alpha"):
            return mx.ones(a.shape)
        scale = 1.0 if "embedding" in name or "embed_tokens" in name else (a.size / a.shape[0]) ** -0.5
        return mx.random.normal(a.shape, key=keys[name]) * (scale if a.ndim > 1 else 0.01)

    weights = dict(tree_flatten(tree_map_with_path(draw, plain.parameters())))
    model = cosyvoice3.build(cfg)
    if dtype == "int8":
        for name in [n for n, _ in tree_flatten(model.parameters()) if n.endswith(".scale")]:
            path = name.removesuffix("scale") + "weight"
            q, scale = quantize_int8(np.array(weights[path]))
            weights[path], weights[name] = mx.array(q), mx.array(scale)
    weights = cosyvoice3.cast(weights, cfg)
    model.load_weights(list(weights.items()))
    model.llm.qwen2.join()
    model._tokenizer = Words(cfg["llm"]["end_of_prompt_id"])
    mx.eval(model.parameters())
    return model


def random_voice(seconds=3.0):
    rng = np.random.default_rng(0)
    n = int(25 * seconds)
    return Voice(rng.standard_normal(192).astype(np.float32), rng.integers(0, 6561, n).astype(np.int32),
                 rng.standard_normal((2 * n, 80)).astype(np.float32), "a transcript of some length", name="random")  # fmt: skip


def line(*cells):
    print("| " + " | ".join(str(c) for c in cells) + " |", flush=True)


def stages(model, voice, seconds):
    """The second of two runs of one offline utterance -> SpeechResult."""
    for _ in range(2):
        result = model.generate("a" * 60, voice=voice, seed=1, max_seconds=seconds, normalize=False, note=lambda text: None)
    return result


def streamed(model, voice, seconds):
    """(first audio, [(seconds of audio, seconds it took) a chunk]) of the second of two streamed utterances."""
    for _ in range(2):
        begin, chunks = time.perf_counter(), []
        last = begin
        for piece in model.start("a" * 120, True, voice=voice, seed=1, max_seconds=seconds, normalize=False, note=lambda text: None):
            now = time.perf_counter()
            chunks.append((len(piece) / model.sample_rate, now - last))
            last = now
    return chunks[0][1], chunks


def token_rate(model, n=100):
    """Speech tokens a second, steady: behind the least length, up to which other kernels run (a mask)."""
    run = model.llm.generate([1] * 40, [model.tokenizer.end_of_prompt], [], LMOptions(), mx.random.key(0))
    for _ in range(100):
        next(run)
    begin = time.perf_counter()
    for _ in range(n):
        next(run)
    rate = n / (time.perf_counter() - begin)
    run.close()
    return rate


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--long", type=float, default=60, help="seconds of the long streamed utterance; 0: none")
    parser.add_argument("--dtypes", default="float32,bfloat16,int8")
    parser.add_argument("--size", default="full", choices=SIZES)
    args = parser.parse_args()
    print(f"mlx {mx.__version__}, {mx.device_info().get('device_name', 'CPU')}; {args.size} size, {args.seconds:g} s of audio, a voice of 3 s")
    line("weights", "kernels", "GB", "LM, s", "tokens/s", "flow, s", "vocoder, s", "RTF", "first audio, s", "peak GB")
    print("| --- | --- " + "| ---: " * 8 + "|")
    voice = random_voice()
    for dtype in args.dtypes.split(","):
        model = random_model(args.size, dtype)
        gb = sum(size(model).values()) / 1e9
        for kernels in ("1", "0"):
            mx.reset_peak_memory()
            with use_kernels(kernels):
                result = stages(model, voice, args.seconds)
                rate = token_rate(model)
                first, _ = streamed(model, voice, 3)
            s = result.seconds
            line(dtype, "on" if kernels == "1" else "off", f"{gb:.2f}", f"{s['llm']:.3f}", f"{rate:.0f}", f"{s['flow']:.3f}",
                 f"{s['vocoder']:.3f}", f"{result.rtf:.4f}", f"{first:.3f}", f"{mx.get_peak_memory() / 1e9:.2f}")  # fmt: skip
        if args.long:
            _, chunks = streamed(model, voice, args.long)
            each = " ".join(f"{took:.3f}" for _, took in chunks)
            print(f"{dtype}: {args.long:g} s streamed, seconds a chunk ({chunks[1][0]:.2f} s of audio, later {chunks[-2][0]:.2f} s): {each}", flush=True)
        del model
        mx.clear_cache()


if __name__ == "__main__":
    main()
