"""Peak memory of converting a checkpoint of two gigabytes or more, format by format.

    python benchmarks/convert_memory.py [--gigabytes 2] [--keep DIR]

Makes an H3-1.3B-like .pt of random weights (a zip container as PyTorch writes it, without PyTorch), converts it in
a subprocess that is sampled every 2 ms, and prints a table. RssAnon is what counts: memory that the process itself
holds, without pages of mapped files, which the system takes back when it needs them.
"""

import argparse
import os
import pickle
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mlx_cosyh3.convert.h3 import ATTENTION, LINEARS  # noqa: E402

FORMATS = (("float32", None), ("float16", None), ("float32", "int8"), ("float32", "4"), ("float16", "4"))
LIMIT_MB = 700


def shapes(layers, D=2048, rows=50264, N=64, attention=(1,)):
    """{upstream's name: shape} of an H3 of this width."""
    P, M, out = "backbone.", N // 2, {"backbone.embeddings.word_embeddings.weight": (rows, D)}
    pair = lambda name, a, *b: out.update({f"{name}.weight": (a, *b), f"{name}.bias": (a,)})  # noqa: E731
    for i in range(layers):
        m = f"{P}layers.{i}.mixer"
        if i in attention:
            pair(f"{m}.{ATTENTION[0]}", 3 * D, D)
            pair(f"{m}.{ATTENTION[1]}", D, D)
        else:
            for name in LINEARS:
                pair(f"{m}.{name}", D, D)
            out |= {f"{m}.ssm_k_D": (D,), f"{m}.D": (D,), f"{m}.ssm_k_kernel.kernel.B": (D, N)}
            k = f"{m}.kernel.kernel"
            out |= {f"{m}.ssm_k_kernel.kernel.C": (1, D, N), f"{k}.C": (1, D, M, 2), f"{k}.B": (D, M, 2)}
            out |= {f"{k}.log_dt": (D,), f"{k}.inv_A_real": (D, M), f"{k}.A_imag": (D, M)}
        pair(f"{P}layers.{i}.norm1", D)
        pair(f"{P}layers.{i}.norm2", D)
        pair(f"{P}layers.{i}.mlp.fc1", 4 * D, D)
        pair(f"{P}layers.{i}.mlp.fc2", D, 4 * D)
    pair(f"{P}ln_f", D)
    return out


def write_pt(path, shapes, tied=("lm_head.weight", "backbone.embeddings.word_embeddings.weight")):
    """A .pt of random fp32 weights as torch.save lays it out: data.pkl, then one aligned record a storage."""
    # The pickler writes names, and looks that they can be imported: modules of these names are enough.
    utils, torch = types.ModuleType("torch._utils"), types.ModuleType("torch")

    def rebuild(*args):
        raise NotImplementedError

    rebuild.__module__, rebuild.__qualname__, rebuild.__name__ = "torch._utils", *["_rebuild_tensor_v2"] * 2
    storage_type = type("FloatStorage", (), {"__module__": "torch"})
    utils._rebuild_tensor_v2, torch.FloatStorage, torch._utils = rebuild, storage_type, utils

    class Storage:
        def __init__(self, key, count):
            self.id = ("storage", storage_type, str(key), "cpu", count)

    class Tensor:
        def __init__(self, storage, shape):
            self.storage, self.shape = storage, shape

        def __reduce__(self):
            strides = tuple(int(np.prod(self.shape[i + 1 :])) for i in range(len(self.shape)))
            return rebuild, (self.storage, 0, self.shape, strides, False, OrderedDict())

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return value.id if isinstance(value, Storage) else None

    counts = [int(np.prod(s)) for s in shapes.values()]
    storages = [Storage(i, n) for i, n in enumerate(counts)]
    tree = OrderedDict((name, Tensor(s, shape)) for s, (name, shape) in zip(storages, shapes.items()))
    tree[tied[0]] = tree[tied[1]]
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(1 << 20, dtype=np.float32) * np.float32(0.02)
    sys.modules |= {"torch": torch, "torch._utils": utils}
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as z:
            with z.open("model/data.pkl", "w") as f:
                Pickler(f, protocol=2).dump(tree)
            for i, count in enumerate(counts):
                info = zipfile.ZipInfo(f"model/data/{i}")
                start = z.fp.tell() + 30 + len(info.filename) + 4 + 20  # local header, name, extra header, zip64
                info.extra = b"FB" + (-start % 64).to_bytes(2, "little") + b"Z" * (-start % 64)
                with z.open(info, "w", force_zip64=True) as f:
                    for at in range(0, count, len(noise)):
                        f.write((noise[: count - at] * rng.uniform(0.5, 2)).astype(np.float32).tobytes())
            z.writestr("model/version", "3\n")
    finally:
        del sys.modules["torch"], sys.modules["torch._utils"]


def rss_anon(pid):
    """MB, 0 once the process is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("RssAnon:")), 0.0)


def peak_of(command):
    """(peak RssAnon in MB, seconds, stdout)."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MLX_DISABLE_COMPILE": "1"}
    begin, peak = time.perf_counter(), 0.0
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    while process.poll() is None:
        peak = max(peak, rss_anon(process.pid))
        time.sleep(0.002)
    if process.returncode:
        sys.exit(f"{command} failed with {process.returncode}")
    return peak, time.perf_counter() - begin, process.stdout.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0, help="least size of the checkpoint")
    parser.add_argument("--keep", help="folder for the checkpoint and the models; default: a temporary one")
    args = parser.parse_args()
    if not Path("/proc/self/status").exists():
        sys.exit("needs Linux: RssAnon is read from /proc")
    folder = Path(args.keep or tempfile.mkdtemp(prefix="convert_memory."))
    try:
        folder.mkdir(exist_ok=True)
        layers = next(
            n for n in range(2, 99) if 4 * sum(int(np.prod(s)) for s in shapes(n).values()) >= args.gigabytes * 1e9
        )
        write_pt(folder / "model.pt", shapes(layers))
        size = (folder / "model.pt").stat().st_size
        print(
            f"model.pt: {layers} layers of width 2048, {size / 1e9:.2f} GB; "
            f"{platform.machine()}, {os.cpu_count()} CPUs"
        )
        base, _, _ = peak_of([sys.executable, "-c", "import time; time.sleep(0.3)"])
        loaded, _, _ = peak_of([sys.executable, "-c", "import mlx_cosyh3.convert, time; time.sleep(0.3)"])
        print(f"RssAnon of the interpreter {base:.0f} MB, with the program imported {loaded:.0f} MB\n")
        print("| dtype | -q | peak RssAnon | above interpreter | seconds | bits a weight |")
        print("| --- | --- | ---: | ---: | ---: | ---: |")
        worst = 0
        for dtype, quantize in FORMATS:
            command = [sys.executable, "-m", "mlx_cosyh3.convert", "--model", str(folder / "model.pt")]
            command += [
                "--out",
                str(folder / "out"),
                "--heads",
                "16",
                "--tokenizer",
                "none",
                "--dtype",
                dtype,
                "--overwrite",
            ]
            peak, seconds, out = peak_of(command + (["-q", quantize] if quantize else []))
            bits = out.split(" -> ")[-1].split()[0]
            worst = max(worst, peak - base)
            print(
                f"| {dtype} | {quantize or '-'} | {peak:.0f} MB | {peak - base:.0f} MB | {seconds:.1f} | {bits} |",
                flush=True,
            )
        print(f"\nworst {worst:.0f} MB, limit {LIMIT_MB} MB: {'PASS' if worst < LIMIT_MB else 'FAIL'}")
        return 0 if worst < LIMIT_MB else 1
    finally:
        if not args.keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
