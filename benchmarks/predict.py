"""Predicted times of the kernels on Apple chips, from what the emulator counts. Nothing here was measured on a Mac.

    python benchmarks/predict.py

The emulator (tests/mslemu) runs each kernel's Metal text and counts the bytes it reads and writes and its float
operations. The model: time = launch + max(bytes / (0.75 bandwidth), operations / (0.7 peak)), with launch = 5 us (2 to 10
are plausible) and the chips' published bandwidth and fp32 peak. Bytes count once per array: what threadgroups read
again (x, the norm) comes from a cache. The decoded token adds up its launches, one sequence, fp16 weights.
"""

import sys
from pathlib import Path

import mlx.core as mx

sys.path.insert(0, str(Path(__file__).parent.parent))

from mlx_cosyh3.kernels import h3_layer as hl  # noqa: E402
from mlx_cosyh3.kernels import norm_linear as nl  # noqa: E402
from tests import mslemu  # noqa: E402

CHIPS = {"M1": (68, 2.6), "M1 Pro": (200, 5.3), "M1 Max": (400, 10.6), "M4": (120, 4.2), "M4 Max": (546, 16.0)}  # GB/s, TFLOPS
LAUNCH = 5e-6
DTYPE = mx.float16
MODELS = {"125M": (768, 12, 1, 50264), "1.3B": (2048, 24, 2, 50264), "2.7B": (2560, 32, 3, 50264)}  # D, layers, attention, V


def count(kernel, arguments):
    """(bytes moved, each array counted once; float operations) of one launch."""
    emulated = mslemu.metal_kernel(**kernel.metal_arguments())
    with mslemu.settings(check="count"):
        out = emulated(**arguments)
    arrays = {id(a): a for a in arguments["inputs"]}.values()
    moved = sum(a.nbytes for a in arrays) + sum(mx.array(a).nbytes for a in out)
    return moved, emulated.report.flops.total


def mixer(D):
    return count(hl.MIXER_KERNEL, hl._mixer_arguments(*hl._mixer_case((DTYPE, D, 2, 1))))


def linear(K, N, normed, act=False, add=False, bias=True):
    v = nl.Variant(DTYPE, K, 1 if N <= 16384 else 4, int(act), add, bias, "layer" if normed else None)
    args, o = nl.case(v, N)
    return count(nl.KERNELS[v.norm], nl.arguments(v, *args, o["norm"], o["residual"]))


def seconds(work, chip):
    bandwidth, peak = CHIPS[chip]
    return LAUNCH + max(work[0] / (0.75e9 * bandwidth), work[1] / (0.7e12 * peak))


def main():
    if mslemu.missing():
        raise SystemExit(f"the emulator needs {mslemu.missing()}")
    print("Predicted, not measured.\n")
    print("| kernel (fp16, one token) | MB | MFLOP | " + " | ".join(f"{c}, us" for c in CHIPS) + " |")
    print("| --- " + "| ---: " * (2 + len(CHIPS)) + "|")
    tokens = {}
    for name, (D, layers, attention, V) in MODELS.items():
        parts = {
            "h3_mixer": mixer(D),
            "linear_row, output": linear(D, D, False, add=True),
            "layer_norm_linear, MLP up + GELU": linear(D, 4 * D, True, act=True),
            "linear_row, MLP down": linear(4 * D, D, False, add=True),
            "layer_norm_linear, head": linear(D, V, True, bias=False),
        }
        for part, work in parts.items():
            times = " | ".join(f"{seconds(work, c) * 1e6:.0f}" for c in CHIPS)
            print(f"| {name}: {part} | {work[0] / 1e6:.2f} | {work[1] / 1e6:.2f} | {times} |", flush=True)
        qkv = linear(D, 3 * D, True)
        *each, head = parts.values()
        for c in CHIPS:
            mlp = sum(seconds(w, c) for w in each[1:])
            h3, attend = seconds(each[0], c) + mlp, seconds(qkv, c) + 3 * LAUNCH + mlp  # + rotation, cache, attention
            tokens[name, c] = (layers - attention) * h3 + attention * attend + seconds(head, c) + 8 * LAUNCH  # + the draw
    print("\n| decoded token, tokens/s | " + " | ".join(CHIPS) + " |\n| --- " + "| ---: " * len(CHIPS) + "|")
    for name in MODELS:
        print(f"| {name} | " + " | ".join(f"{1 / tokens[name, c]:.0f}" for c in CHIPS) + " |")


if __name__ == "__main__":
    main()
