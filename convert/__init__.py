"""Checkpoints of other programs -> MLX model folders. `convert(model, out)` does it, `main` is the command."""

from mlx_cosyh3.convert.h3 import infer_config, sanitize
from mlx_cosyh3.convert.pipeline import ConvertReport, add_arguments, convert, main, run

__all__ = ["convert", "ConvertReport", "sanitize", "infer_config", "add_arguments", "run", "main"]
