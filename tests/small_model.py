"""A small random H3 model folder with a byte tokenizer, for tests that do not care what the model says."""

import json

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_cosyh3.h3 import build
from mlx_cosyh3.tokenizer import ALPHABET

CONFIG = {
    "model_type": "h3", "d_model": 16, "n_layer": 3, "d_inner": 32, "vocab_size": 262, "padded_vocab_size": 264,
    "d_state": 8, "head_dim": 1, "attn_layer_idx": [1], "num_heads": 2, "rotary_emb_dim": 0, "rotary_base": 10000,
    "layer_norm_epsilon": 1e-5, "discretization": "bilinear", "eos_token_id": 261, "tie_word_embeddings": True,
    "dtype": "float32",
}  # fmt: skip


def write_model(folder, seed=0, **changes):
    """Write the folder: 256 byte tokens, five merges, end-of-text = 261; weights drawn from `seed`.

    changes   other values of config.json's entries"""
    folder.mkdir(parents=True, exist_ok=True)
    config, weights = CONFIG | changes, {}
    for i, (name, a) in enumerate(tree_flatten(build(config).parameters())):
        noise = mx.random.normal(a.shape, key=mx.random.key(1000 * seed + i))
        if name.endswith("log_dt"):
            weights[name] = noise * 0.5 - 3
        elif "norm" in name and name.endswith("weight"):
            weights[name] = 1 + 0.1 * noise
        else:
            weights[name] = noise * (0.5 if "mixer" in name else 0.25)
    # End-of-text is next to impossible, so that a test decides itself when a generation ends.
    weights["norm_f.bias"] = mx.full((config["d_model"],), 2.0)
    weights["embeddings.weight"][261] = -2.0
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, sort_keys=True))
    vocab = dict(ALPHABET)
    for token in ("th", "the", "Ġa", "ĊĊ", "ĠĠ", "<|endoftext|>"):
        vocab[token] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ a\nĊ Ċ\nĠ Ġ\n")
    return folder
