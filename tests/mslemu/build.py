"""Compiles kernels and the runtime with g++; finds the kernel line that belongs to an address.

Everything is cached by the hash of what goes in, in a folder of the user under the temporary directory.
"""

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx

HERE = Path(__file__).parent
SHIM = HERE / "shim"
INCLUDE = Path(mx.__file__).parent / "include"
CXX = os.environ.get("MSLEMU_CXX", "g++")
KERNEL = "kernel.metal"

# half is rounded after each operation; literals are float; uninitialised locals hold a pattern, never a lucky 0.
BASE = (
    "-std=c++17 -g -fPIC -fno-exceptions -fno-rtti -fexcess-precision=16 -mf16c -fsingle-precision-constant"
    " -ftrivial-auto-var-init=pattern -fno-strict-aliasing -fno-builtin-memcpy -fno-builtin-memset"
    " -fvisibility=hidden"
    " -Wno-attributes -Wno-literal-suffix -Wuninitialized -Wmaybe-uninitialized -nostdinc++ -fno-math-errno"
).split()
CHECKS = (
    "-O1 -fsanitize=thread,alignment,bounds,shift,integer-divide-by-zero,float-cast-overflow"
    ",signed-integer-overflow,return"
    " --param tsan-instrument-func-entry-exit=0"
).split()
MODES = {"full": CHECKS, "fast": ["-O2"], "count": ["-O1", "-fsanitize-coverage=trace-pc"]}
CONTRACT = {"off": ["-ffp-contract=off"], "fast": ["-ffp-contract=fast", "-mfma", "-fexpensive-optimizations"]}


class BuildError(RuntimeError):
    """g++ refused the text."""


def missing():
    """Why the emulator cannot run here, or None."""
    if os.uname().machine != "x86_64" or os.uname().sysname != "Linux":
        return "the emulator switches fibers in x86-64 code and needs Linux"
    for tool in (CXX, "addr2line", "objdump"):
        if not shutil.which(tool):
            return f"{tool} is not installed"
    flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
    if not {"f16c", "fma"} <= flags:
        return "the processor lacks f16c or fma"
    if not (INCLUDE / "mlx/backend/metal/kernels/utils.h").exists():
        return "this mlx wheel does not bring its Metal headers"
    return None


@functools.cache
def cache_folder():
    folder = Path(tempfile.gettempdir()) / f"mslemu-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise BuildError(f"{folder} belongs to someone else")
    return folder


def digest(*parts):
    h = hashlib.sha256()
    for part in parts:
        h.update(part if isinstance(part, bytes) else str(part).encode())
        h.update(b"\0")
    return h.hexdigest()[:24]


@functools.cache
def shim_digest():
    files = sorted(p for p in SHIM.rglob("*") if p.is_file())
    utils = INCLUDE / "mlx/backend/metal/kernels/utils.h"
    version = subprocess.run([CXX, "--version"], capture_output=True, text=True, check=True).stdout
    return digest(version, *(p.read_bytes() for p in files), utils.read_bytes())


def run(command, cwd=None):
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd)
    if result.returncode:
        raise BuildError(result.stderr.strip() or f"{command[0]} failed with {result.returncode}")
    return result.stderr


@functools.cache
def runtime():
    """Path of the compiled scheduler and hooks."""
    sources = [HERE / f"{name}.cpp" for name in ("dispatch", "scheduler", "shadow")]
    key = digest("runtime", *(p.read_bytes() for p in [*sources, HERE / "runtime.h"]), shim_digest())
    path = cache_folder() / f"runtime-{key}.so"
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}.tmp")
        run(
            [
                CXX,
                "-std=c++17",
                "-O2",
                "-g1",
                "-fPIC",
                "-shared",
                "-Wall",
                "-o",
                str(part),
                *map(str, sources),
                "-lrt",
            ]
        )
        part.rename(path)
    return path


def compile_kernel(text, entry, mode="full", contract="off", fast_math=False):
    """Path of the shared object of `text` (threadgroup variables already rewritten) and g++'s warnings."""
    flags = [*BASE, *MODES[mode], *CONTRACT[contract]]
    if fast_math:
        flags.append("-D__FAST_MATH__=1")
    lib = runtime()
    key = digest(text, entry, " ".join(flags), shim_digest(), lib)
    path = cache_folder() / f"kernel-{key}.so"
    log = path.with_suffix(".log")
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            folder = Path(folder)
            prelude = '#include <metal_stdlib>\n#include "mlx/backend/metal/kernels/utils.h"\n'
            (folder / "k.cpp").write_text(
                f'{prelude}#line 1 "{KERNEL}"\n{text}\n'
                f'#line 1 "entry"\n#pragma GCC visibility push(default)\n{entry}'
            )
            includes = ["-I", str(SHIM), "-isystem", str(INCLUDE)]
            warnings = run([CXX, *flags, *includes, "-c", "k.cpp", "-o", "k.o"], cwd=folder)
            run([CXX, "-shared", "-o", "k.so", "k.o", str(lib), "-lm"], cwd=folder)
            (folder / "k.log").write_text(warnings)
            (folder / "k.log").rename(log)
            (folder / "k.so").rename(path)
    return path, log.read_text()


@functools.lru_cache(maxsize=4096)
def kernel_line(path, offset):
    """Line of the kernel text at a return address (offset in the image), 0 if unknown. Shim frames are skipped."""
    command = ["addr2line", "-i", "-e", str(path), hex(offset - 1)]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for frame in out.splitlines():  # innermost first
        match = re.match(rf"(?:.*/)?{re.escape(KERNEL)}:(\d+)", frame)
        if match:
            return int(match.group(1))
    return 0
