"""Settings for all tests. Run them with `make test`, or `pytest` in a virtual environment that holds the package."""

import os

# On a CPU, mx.compile runs a C++ compiler at the first use of each graph: seconds, and no faster.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
# fp32 means fp32, also on GPUs that would round to TF32.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
