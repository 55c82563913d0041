"""Float operations of a dispatch: how often each basic block ran, times the float instructions in it.

The kernel is compiled once more with a call at the head of every basic block (-fsanitize-coverage=trace-pc); the
calls are counted by address, and the disassembly tells what stands between one call and the next. So it counts what
g++ made of the kernel: operations that were folded away are not in it.
"""

import re
import subprocess
from dataclasses import dataclass

# One operation each; a fused multiply-add counts two. Comparisons, minima, conversions and moves are not counted.
ARITHMETIC = re.compile(r"v?(add|sub|mul|div|sqrt)(ss|sd|ps|pd)$")
FUSED = re.compile(r"vf(n?m)(add|sub)\d+(ss|sd|ps|pd)$")
LANES = {"ss": 1, "sd": 1, "ps": 4, "pd": 2}
CALLED = re.compile(r"<(\w+)@plt>")
SPECIAL = {
    f"{name}f"
    for name in (
        "exp exp2 log log2 log10 pow sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh fmod"
    ).split()
}


@dataclass
class Flops:
    """Operations of all threads of one dispatch."""

    arithmetic: int  # + - * / sqrt, a fused multiply-add as two
    special: int  # exp, log, sin ... one each
    matrix: int  # in simdgroup matrix products: 2 * 8 * 8 * 8 each
    simd: int  # reductions over a simdgroup, one a lane

    @property
    def total(self):
        return self.arithmetic + self.special + self.matrix + self.simd


def blocks(path):
    """{offset after the counting call: (arithmetic, special)} of a shared object built with mode "count"."""
    out = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(path)], capture_output=True, text=True, check=True
    ).stdout
    found, current = {}, None
    pending = False
    for line in out.splitlines():
        if line.endswith(">:"):
            current, pending = None, False
            continue
        match = re.match(r"\s*([0-9a-f]+):\s+(\S+)\s*(.*)", line)
        if not match:
            continue
        at, op, rest = int(match.group(1), 16), match.group(2), match.group(3)
        if pending:
            current, pending = at, False
            found[current] = [0, 0]
        if op.startswith("call") and "__sanitizer_cov_trace_pc" in rest:
            pending = True
        elif current is not None:
            if m := FUSED.match(op):
                found[current][0] += 2 * LANES[m.group(3)]
            elif m := ARITHMETIC.match(op):
                found[current][0] += LANES[m.group(2)]
            elif (m := CALLED.search(rest)) and m.group(1) == "fmaf":
                found[current][0] += 2
            elif m and m.group(1) in SPECIAL:
                found[current][1] += 1
    return {at: tuple(n) for at, n in found.items()}


def total_flops(path, hits, matrix, simd):
    """Flops from {offset: number of runs}."""
    table = blocks(path)
    arithmetic = sum(n * table.get(at, (0, 0))[0] for at, n in hits.items())
    special = sum(n * table.get(at, (0, 0))[1] for at, n in hits.items())
    return Flops(arithmetic, special, matrix, simd)
