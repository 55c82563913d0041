"""CosyVoice speech and H3 language models in MLX: load, generate, stream_generate, batch_generate, Voice."""

import os
from pathlib import Path

__version__ = "0.1.0"

# In a source tree kernels/ and convert/ lie beside this folder and pyproject.toml maps them in; this lets
# `python -m mlx_cosyh3` and pytest find them there before anything is installed.
_root = Path(__file__).resolve().parent.parent
if (_root / "kernels" / "h3_step.py").is_file() and (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))

# MLX's CUDA back end prepares convolutions and attention anew for each length, which takes seconds an utterance, and by
# default remembers 128 and 256 of them: those of a few utterances. It reads these when the GPU is first used.
for _cache, _entries in (("CONV", 4096), ("SDPA", 1024)):
    os.environ.setdefault(f"MLX_CUDA_{_cache}_CACHE_SIZE", str(_entries))

try:
    from mlx_cosyh3.generate import batch_generate, generate, stream_generate
    from mlx_cosyh3.load import load
except ImportError:
    from mlx_cosyh3.floor import check_machine

    check_machine()  # says so where MLX is not made for this machine
    raise

__all__ = ["load", "generate", "stream_generate", "batch_generate", "Voice"]


def __getattr__(name):
    if name == "Voice":  # imported when asked for: text needs no audio
        from mlx_cosyh3.cosyvoice.voice import Voice

        return Voice
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
