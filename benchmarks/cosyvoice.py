"""CosyVoice at full size with random weights: time per stage, real-time factor, first audio, cost of the n-th chunk.

    python benchmarks/cosyvoice.py [--versions 1,2,3] [--dtypes float32,bfloat16,int8] [--seconds 10] [--long 60]
    python benchmarks/cosyvoice.py --batch 1,4,16 [--versions 1,2,3] [--dtypes ...] [--seconds 10]

Random weights speak noise, but they cost what trained ones cost. The speech head's rows for special ids are zero, so
that none is drawn and exactly the wanted number of speech tokens is made. bfloat16 and int8: the language model and the
flow; the vocoder is float32 always.
"""

import argparse
import importlib
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import mlx.core as mx  # noqa: E402
import numpy as np  # noqa: E402
from mlx.utils import tree_flatten, tree_map_with_path  # noqa: E402

from mlx_cosyh3.convert.common import TextTokenizer  # noqa: E402
from mlx_cosyh3.convert.cosyvoice_folder import config_of, version_module  # noqa: E402
from mlx_cosyh3.convert.hyperyaml import read_hyperyaml  # noqa: E402
from mlx_cosyh3.cosyvoice.llm import LMOptions  # noqa: E402
from mlx_cosyh3.cosyvoice.model import cast, size  # noqa: E402
from mlx_cosyh3.cosyvoice.voice import Voice  # noqa: E402
from mlx_cosyh3.int8 import quantize_int8  # noqa: E402
from mlx_cosyh3.kernels import use_kernels  # noqa: E402
from tests.cosyvoice_layouts import SIZES, YAML, version_1  # noqa: E402
from tests.make_cosyvoice_folder import qwen2_config  # noqa: E402


def config(version, size, dtype):
    """config.json of the released model, as its yaml says it."""
    s = version_1(size) if version == 1 else SIZES[version][size]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cosyvoice.yaml"
        path.write_text(YAML[version].format(**s))
        yaml = read_hyperyaml(path)
    words = Words(s.get("base_vocab", 200))
    text = TextTokenizer(words, {}, config={"kind": "whisper"}, qwen2=qwen2_config(s) if version > 1 else None)
    compute = "bfloat16" if dtype == "bfloat16" else "float32"
    int8 = {"llm": {"mode": "int8"}, "flow": {"mode": "int8"}}
    made = config_of(version_module(version), yaml, text)
    made |= {"dtype": {"llm": compute, "flow": compute, "hift": "float32"}, **({"quantization": int8} if dtype == "int8" else {})}
    return made, words


class Words:
    """In place of a tokenizer: one id a character."""

    tags = frozenset()

    def __init__(self, end_of_prompt):
        self.end_of_prompt = self.end_of_prompt_id = end_of_prompt
        self.special = {"<|endofprompt|>": end_of_prompt}

    def encode(self, text):
        return [self.end_of_prompt] * text.count("<|endofprompt|>") + [ord(c) % 200 for c in text.replace("<|endofprompt|>", "")]

    def count(self, text):
        return len(self.encode(text))


def random_model(size, dtype, version=3, seed=0):
    """The model, evaluated; weights as their layers would be initialised, from one key."""
    cfg, words = config(version, size, dtype)
    module = importlib.import_module(f"mlx_cosyh3.cosyvoice.cosyvoice{version}")
    plain = module.build({k: v for k, v in cfg.items() if k != "quantization"})
    codes = cfg["llm"]["speech_token_size"]
    names = [n for n, _ in tree_flatten(plain.parameters())]
    keys = dict(zip(names, mx.random.split(mx.random.key(seed), len(names))))

    def draw(name, a):
        if name.endswith("llm_decoder.weight"):
            w = mx.random.normal(a.shape, key=keys[name]) * a.shape[1] ** -0.5
            return mx.where((mx.arange(a.shape[0]) < codes)[:, None], w, 0.0)
        if "norm" in name or name.endswith("alpha"):
            return mx.ones(a.shape)
        scale = 1.0 if "embedding" in name or "embed_tokens" in name else (a.size / a.shape[0]) ** -0.5
        return mx.random.normal(a.shape, key=keys[name]) * (scale if a.ndim > 1 else 0.01)

    weights = dict(tree_flatten(tree_map_with_path(draw, plain.parameters())))
    model = module.build(cfg)
    if dtype == "int8":
        for name in [n for n, _ in tree_flatten(model.parameters()) if n.endswith(".scale")]:
            path = name.removesuffix("scale") + "weight"
            q, scale = quantize_int8(np.array(weights[path]))
            weights[path], weights[name] = mx.array(q), mx.array(scale)
    weights = cast(weights, cfg)
    model.load_weights(list(weights.items()))
    if hasattr(model.llm, "join"):
        model.llm.join()
    model._tokenizer = words
    mx.eval(model.parameters())
    return model


def random_voice(model, seconds=3.0):
    rng = np.random.default_rng(0)
    n, mel = int(model.token_rate * seconds), model.config["mel"]
    frames = int(seconds * model.sample_rate / mel["hop_size"])
    return Voice(rng.standard_normal(192).astype(np.float32), rng.integers(0, model.codebook, n).astype(np.int32),
                 rng.standard_normal((frames, 80)).astype(np.float32), "a transcript of some length", name="random",
                 sample_rate=model.sample_rate)  # fmt: skip


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
    run = model.llm.generate([1] * 80, [model.tokenizer.end_of_prompt], [], LMOptions(min_ratio=1), mx.random.key(0))
    for _ in range(100):
        next(run, None)  # of a small model it may end
    begin = time.perf_counter()
    for _ in range(n):
        next(run, None)
    rate = n / (time.perf_counter() - begin)
    run.close()
    return rate


def batches(model, voice, seconds, sizes):
    """For each size a line: that many utterances of different lengths in one batch, against one after the other."""
    line("batch", "audio, s", "one by one, s", "batch, s", "ratio", "audio s / s", "LM, s", "flow, s", "vocoder, s", "peak GB")
    print("| ---: " * 10 + "|")
    options = {"voice": voice, "seed": 1, "normalize": False, "note": lambda text: None}
    for n in sizes:
        requests = [{"text": "a" * 60, "max_seconds": seconds * (0.6 + 0.4 * r / max(n - 1, 1))} for r in range(n)]
        for _ in range(2):  # the second run counts
            mx.reset_peak_memory()
            begin = time.perf_counter()
            results = model.batch_generate(requests, max_batch=n, **options)
            together = time.perf_counter() - begin
        peak = mx.get_peak_memory() / 1e9
        begin = time.perf_counter()
        for r, own in enumerate(requests):
            model.generate(**own, **options | {"seed": 1 + r})
        alone, total = time.perf_counter() - begin, sum(r.duration for r in results)
        s = {stage: sum(r.seconds[stage] for r in results) for stage in ("llm", "flow", "vocoder")}
        line(n, f"{total:.1f}", f"{alone:.3f}", f"{together:.3f}", f"{alone / together:.2f}", f"{total / together:.1f}", f"{s['llm']:.3f}",
             f"{s['flow']:.3f}", f"{s['vocoder']:.3f}", f"{peak:.2f}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--versions", default="3")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--long", type=float, default=60, help="seconds of the long streamed utterance; 0: none")
    parser.add_argument("--dtypes", default="float32,bfloat16,int8")
    parser.add_argument("--kernels", default="1,0", help="1: kernels on, 0: off")
    parser.add_argument("--batch", default="", help="in place of all else: sizes of batches, such as 1,4,16")
    parser.add_argument("--size", default="full", choices=SIZES[3])
    args = parser.parse_args()
    print(f"mlx {mx.__version__}, {mx.device_info().get('device_name', 'CPU')}; {args.size} size, {args.seconds:g} s of audio, a voice of 3 s")
    if not args.batch:
        heading()
    for version in map(int, args.versions.split(",")):
        for dtype in args.dtypes.split(","):
            if args.batch:
                model = random_model(args.size, dtype, version)
                print(f"\nversion {version}, {dtype}")
                batches(model, random_voice(model), args.seconds, [int(n) for n in args.batch.split(",")])
                del model
            else:
                bench(version, dtype, args)
            mx.clear_cache()


def heading():
    line("version", "weights", "kernels", "GB", "LM, s", "tokens/s", "flow, s", "vocoder, s", "RTF", "first audio, s", "peak GB")
    print("| --- | --- | --- " + "| ---: " * 8 + "|")


def bench(version, dtype, args):
    model = random_model(args.size, dtype, version)
    gb, voice = sum(size(model).values()) / 1e9, random_voice(model)
    for kernels in args.kernels.split(","):
        mx.reset_peak_memory()
        with use_kernels(kernels):
            result = stages(model, voice, args.seconds)
            rate = token_rate(model)
            first, _ = streamed(model, voice, 3)
        s = result.seconds
        line(version, dtype, "on" if kernels == "1" else "off", f"{gb:.2f}", f"{s['llm']:.3f}", f"{rate:.0f}", f"{s['flow']:.3f}",
             f"{s['vocoder']:.3f}", f"{result.rtf:.4f}", f"{first:.3f}", f"{mx.get_peak_memory() / 1e9:.2f}")  # fmt: skip
    if args.long:
        _, chunks = streamed(model, voice, args.long)
        each = " ".join(f"{took:.3f}" for _, took in chunks)
        print(f"{version}, {dtype}: {args.long:g} s streamed, seconds a chunk ({chunks[1][0]:.2f} s of audio, later {chunks[-2][0]:.2f} s): {each}", flush=True)


if __name__ == "__main__":
    main()
