"""Settings for all tests. Run them with `make test`, or `pytest` in a virtual environment that holds the package."""

import os
import tempfile

# On a CPU, mx.compile runs a C++ compiler at the first use of each graph: seconds, and no faster.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
# fp32 means fp32, also on GPUs that would round to TF32.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
# Reports, stamps and measured costs of the tests do not go into the user's own cache.
os.environ.setdefault("MLX_COSYH3_CACHE", tempfile.mkdtemp(prefix="mlx_cosyh3-tests-"))

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

settings.register_profile("default", deadline=None)  # a busy machine is no error
settings.load_profile("default")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a small random model with a byte tokenizer (tests/small_model.py), one for each test file."""
    from tests.small_model import write_model

    return write_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="module")
def model(folder):
    """The model in `folder`, loaded."""
    from mlx_cosyh3 import load

    return load(folder)


@pytest.fixture(scope="module")
def voice_folder(tmp_path_factory):
    """The folder of a small random CosyVoice 3 (tests/small_voice_model.py), one for each test file."""
    from tests.small_voice_model import write_voice_model

    return write_voice_model(tmp_path_factory.mktemp("models") / "voice")


@pytest.fixture(scope="module")
def speaker(voice_folder):
    """The model in `voice_folder`, loaded."""
    from mlx_cosyh3 import load

    return load(voice_folder)
