"""The hot spots: softmax, INT8 matrix product, and the fused H3 state update.

Each module holds one operation: its maths and layout, the GPU kernels as Metal (and CUDA) source, a reference in plain
MLX ops that runs on any device and on an explicit CPU stream, and the dispatcher that picks what runs. A kernel runs
only where it has passed its self-test (`_dispatch.py`, `_trust.py`); `_gpu.py` lets one source serve both languages.
"""

from mlx_cosyh3.kernels._dispatch import use_kernels
from mlx_cosyh3.kernels.h3_step import H3StepParams, h3_step
from mlx_cosyh3.kernels.int8_matmul import int8_matmul
from mlx_cosyh3.kernels.softmax import softmax

__all__ = ["softmax", "int8_matmul", "h3_step", "H3StepParams", "use_kernels"]
