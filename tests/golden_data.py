"""Where the golden values are: a small set in tests/golden, the rest in the folder named by MLX_COSYH3_GOLDENS."""

import functools
import json
import os
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.convert.h3 import sanitize
from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.h3 import H3, H3Config
from mlx_cosyh3.tokenizer import Tokenizer

SMALL = Path(__file__).parent / "golden"
LARGE = os.environ.get("MLX_COSYH3_GOLDENS")
H3_MODELS = ("pure", "hybrid", "rotary", "headdim8")


def large(*parts):
    """A path in the large goldens; skips the test where they are not at hand."""
    if LARGE is None:
        pytest.skip("needs the large goldens: set MLX_COSYH3_GOLDENS to their folder")
    path = Path(LARGE, *parts)
    assert path.exists(), f"MLX_COSYH3_GOLDENS is set, but {path} does not exist"
    return path


def golden_folder(name):
    """The folder of an H3 golden: the full one if it is at hand, else the small one."""
    small = SMALL / "h3" / name
    return small if LARGE is None and small.exists() else large("golden", "h3", name)


def cosyvoice_golden(name):
    """The folder of a CosyVoice golden: the full one if it is at hand, else the small one, else the test skips."""
    small = SMALL / "cosyvoice" / name
    return small if LARGE is None and small.exists() else large("golden", "cosyvoice", name)


def checkpoint_weights(path, half=False):
    """(name, array) pairs of an upstream checkpoint under this project's names.

    half   as upstream's generate script casts: linear layers, embedding and norms, not the SSM tensors"""
    pairs = []
    for name, tensor in sanitize(open_source(path).tensors).items():
        a = mx.array(np.ascontiguousarray(tensor.numpy()))
        pairs.append((name, a.astype(mx.float16) if half and ".shift." not in name and ".ssm." not in name else a))
    return pairs


def read_config(folder):
    """Upstream's constructor arguments as this project's config."""
    d = json.loads((folder / "config.json").read_text())
    d["num_heads"] = d["attn_cfg"]["num_heads"]
    return d


@functools.cache
def load_golden(name):
    """(model, config dict, io tensors)."""
    folder = golden_folder(name)
    d = read_config(folder)
    model = H3(H3Config.from_dict(d)).load_weights(checkpoint_weights(folder / "model.pt"))
    return model, d, mx.load(str(folder / "io.safetensors"))


@functools.cache
def h3_tiny(kv_window=None):
    """The trained model from upstream's checkpoint, fp32."""
    folder = large("checkpoints", "h3-tiny")
    model = H3(H3Config.from_dict(read_config(folder)), kv_window).load_weights(checkpoint_weights(folder / "model.pt"))
    model.tokenizer = Tokenizer.from_dir(folder, model.config.eos_token_id)
    return model


def random_h3(seed=0, **changes):
    """A small random model with the distributions of a fresh H3 (no tokenizer)."""
    sizes = {"d_model": 32, "n_layer": 3, "vocab_size": 61, "padded_vocab_size": 64, "eos_token_id": 60}
    return H3(H3Config.from_dict(sizes | changes)).init_weights(seed)
