"""Predicted times of a sentence of CosyVoice 3 on Apple chips, from its layers' sizes. Nothing here was measured on a Mac.

    python benchmarks/predict_speech.py [--seconds 4] [--voice 5] [--steps 10]

Weights are never computed, only their shapes count. A part takes launches * 5 us + the longer of bytes / (0.75 bandwidth)
and operations / (share of the peak): 0.7 of it for products, 0.35 for convolutions, whose kernels are less even. What is
assumed besides: ARRAYS arrays as wide as the residual move between the products of a transformer block of the flow; int8
weights of the flow are turned into floats for each product; the host prepares a launch while the GPU is at work on the
one before. Twice as long would be no surprise; ten times would be a bug.
"""

import argparse
import importlib
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from mlx.utils import tree_flatten  # noqa: E402

from benchmarks.cosyvoice import config  # noqa: E402
from benchmarks.predict import CHIPS, LAUNCH  # noqa: E402

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
ARRAYS = 30
TEXT = 25  # ids of the sentence, and as many of the voice's transcript


def seconds(chip, launches=0, moved=0.0, flop=0.0, share=0.7):
    bandwidth, peak = CHIPS[chip]
    return launches * LAUNCH + max(moved / (0.75e9 * bandwidth), flop / (share * 1e12 * peak))


class Sizes:
    """What the layers of a full-size model come to."""

    def __init__(self, dtype):
        c, _ = config(3, "full", dtype)
        model = importlib.import_module("mlx_cosyh3.cosyvoice.cosyvoice3").build(config(3, "full", "float32")[0])
        shapes = {part: {n: a.shape for n, a in tree_flatten(getattr(model, part).parameters())} for part in ("llm", "flow", "hift")}
        size = lambda part, *words: sum(math.prod(s) for n, s in shapes[part].items() if len(s) > 1 and any(w in n for w in words))  # noqa: E731
        self.dtype, self.float = dtype, 2 if dtype == "bfloat16" else 4
        q, d = c["llm"]["qwen2"], c["flow"]["dit"]
        self.layers, self.kv = q["num_hidden_layers"], 2 * q["num_key_value_heads"] * q["hidden_size"] // q["num_attention_heads"]
        self.linear, self.head = size("llm", "_proj"), size("llm", "llm_decoder")
        self.blocks, self.dim = d["depth"], d["dim"]
        self.flow = size("flow", "to_", "ff_")  # one product a frame each
        self.position = size("flow", "conv_pos")
        self.rates = [math.prod(c["hift"]["upsample_rates"][: i + 1]) for i in range(3)]
        self.vocoder = self._vocoder(shapes["hift"])
        self.pitch = 2 * sum(math.prod(s) for n, s in shapes["hift"].items() if "condnet" in n and "_v" in n)

    def _vocoder(self, shapes):
        """Operations a mel frame: a convolution of a stage runs `rates[stage]` times a frame."""
        flop = 0
        for name, shape in shapes.items():
            if len(shape) != 3 or "f0" in name:
                continue
            part, *rest = name.split(".")
            stage = {"resblocks": lambda: int(rest[0]) // 3, "conv_post": lambda: 2, "conv_pre": lambda: None}.get(part, lambda: int(rest[0]))()
            flop += 2 * math.prod(shape) * (1 if stage is None else self.rates[stage])
        return flop

    def token(self, chip, position):
        moved = self.linear * BYTES[self.dtype] + self.head * self.float + self.layers * self.kv * position * self.float
        return seconds(chip, 6 * self.layers + 6, moved, 2 * (self.linear + self.head))

    def prefill(self, chip, n):
        return seconds(chip, 20 * self.layers, self.linear * BYTES[self.dtype], 2 * self.linear * n)

    def mel(self, chip, frames, steps):
        """Two rows a step: with the voice and without (classifier-free guidance)."""
        rows, D = 2 * frames, self.dim
        flop = 2 * (self.flow + self.position) * rows + self.blocks * 2 * 4 * frames**2 * D
        between = self.blocks * ARRAYS * rows * D * self.float
        if self.dtype == "int8":
            between += self.flow * (1 + 2 * self.float)
        return steps * (seconds(chip, 22 * self.blocks, 0, flop) + seconds(chip, 0, between))

    def audio(self, chip, frames):
        blocks = -(-frames // 250)
        return seconds(chip, 400 * blocks, 7.2e6 * frames, self.vocoder * frames, 0.35) + self.pitch * frames / 5e10  # a CPU's float64


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4, help="of audio")
    parser.add_argument("--voice", type=float, default=5, help="seconds of its recording")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    n, voice = round(25 * args.seconds), round(25 * args.voice)
    prefix = 2 * TEXT + 2 + voice
    print(f"Predicted, not measured: {args.seconds:g} s of audio, a voice of {args.voice:g} s, {args.steps} flow steps. Seconds.\n")
    print("| chip | weights | language model | tokens/s | flow | vocoder | sentence | first audio, streamed |")
    print("| --- | --- " + "| ---: " * 6 + "|")
    for dtype in BYTES:
        s = Sizes(dtype)
        for chip in CHIPS:
            said = lambda count: s.prefill(chip, prefix) + sum(s.token(chip, prefix + i) for i in range(count))  # noqa: B023, E731
            lm, flow, vocoder = said(n), s.mel(chip, 2 * (voice + n), args.steps), s.audio(chip, 2 * n)
            first = said(28) + s.mel(chip, 2 * (voice + 25), args.steps) + s.audio(chip, 42)
            print(f"| {chip} | {dtype} | {lm:.2f} | {n / lm:.0f} | {flow:.2f} | {vocoder:.2f} | {lm + flow + vocoder:.2f} | {first:.2f} |")
    print(f"\nOperations: flow {2 * s.flow / 1e6:.0f} MFLOP a frame and row, vocoder {50 * s.vocoder / 1e9:.1f} GFLOP a second of audio.")


if __name__ == "__main__":
    main()
