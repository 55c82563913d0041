"""Runs Metal kernels of MLX on a Linux CPU and checks what they do. See README.md."""

from .build import missing
from .emulator import SCHEDULES, SWEEP, MslError, installed, metal_kernel, settings
from .lint import clang, lint
from .wrapper import mlx_text

__all__ = [
    "SCHEDULES",
    "SWEEP",
    "MslError",
    "clang",
    "installed",
    "lint",
    "metal_kernel",
    "missing",
    "mlx_text",
    "settings",
]
