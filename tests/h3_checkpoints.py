"""Small random H3 checkpoints under upstream's names, for the tests of conversion. No PyTorch, no network."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mlx_cosyh3.convert import convert

P = "backbone.layers."


def state_dict(
    d_model=64,
    n_layer=3,
    attention=(1,),
    rows=104,
    d_inner=None,
    d_state=64,
    head_dim=1,
    n_ssm=None,
    rotary=0,
    seed=0,
):
    """{upstream's name: fp32 array}; the head is tied: both keys hold one array. Linears are shaped (out, in)."""
    rng = np.random.default_rng(seed)
    D, H, M, F = d_model, d_model // head_dim, d_state // 2, d_inner or 4 * d_model
    S = n_ssm or H
    r = lambda *shape, scale=1.0: (rng.normal(size=shape) * scale).astype(np.float32)  # noqa: E731
    out = {"backbone.embeddings.word_embeddings.weight": r(rows, D, scale=0.5)}

    def linear(name, a, b):
        out[f"{name}.weight"], out[f"{name}.bias"] = r(a, b, scale=b**-0.5), r(a, scale=0.1)

    def norm(name):
        out[f"{name}.weight"], out[f"{name}.bias"] = 1 + r(D, scale=0.1), r(D, scale=0.1)

    for i in range(n_layer):
        m = f"{P}{i}.mixer"
        if i in attention:
            if rotary:
                freq = 10000.0 ** (-np.arange(0, rotary, 2) / rotary)
                out[f"{m}.rotary_emb.inv_freq"] = freq.astype(np.float32)
            linear(f"{m}.Wqkv", 3 * D, D)
            linear(f"{m}.out_proj", D, D)
        else:
            out[f"{m}.ssm_k_D"], out[f"{m}.D"] = r(D), r(H)
            for name in ("q_proj", "k_proj", "v_proj", "output_linear"):
                linear(f"{m}.{name}", D, D)
            out[f"{m}.ssm_k_kernel.kernel.B"] = r(D, d_state, scale=0.1)
            out[f"{m}.ssm_k_kernel.kernel.C"] = r(1, D, d_state, scale=0.1)
            k = f"{m}.kernel.kernel"
            out[f"{k}.C"], out[f"{k}.B"] = r(1, H, M, 2, scale=0.3), 1 + r(S, M, 2, scale=0.1)
            out[f"{k}.log_dt"] = rng.uniform(np.log(1e-3), np.log(1e-1), H).astype(np.float32)
            out[f"{k}.inv_A_real"] = (np.log(0.5) + r(S, M, scale=0.1)).astype(np.float32)
            out[f"{k}.A_imag"] = (np.pi * np.arange(M) + r(S, M, scale=0.1)).astype(np.float32)
        norm(f"{P}{i}.norm1")
        linear(f"{P}{i}.mlp.fc1", F, D)
        linear(f"{P}{i}.mlp.fc2", D, F)
        norm(f"{P}{i}.norm2")
    norm("backbone.ln_f")
    out["lm_head.weight"] = out["backbone.embeddings.word_embeddings.weight"]
    return out


def save(folder, tensors, name="model.safetensors", config=None):
    """Write a checkpoint file (and config.json) into `folder` -> the file's path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder / name


def save_tokenizer(folder, size, eos=True, names=("vocab.json", "merges.txt")):
    """A byte-level BPE of `size` ids (256 bytes, pairs of letters, <|endoftext|> last) in GPT-2's two files."""
    from mlx_cosyh3.tokenizer import ALPHABET

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = list(ALPHABET)
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in letters for b in letters][: size - len(tokens) - eos]
    tokens += [a + b for a, b in pairs] + ["<|endoftext|>"] * eos
    assert len(tokens) == size
    (folder / names[0]).write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (folder / names[1]).write_text("\n".join(["#version: 0.2", *(" ".join(p) for p in pairs)]) + "\n")
    return folder


def golden(*parts):
    """A file of the golden models: kept with the tests, or below $MLX_COSYH3_GOLDENS. Skips when there is none."""
    roots = [Path(__file__).parent / "golden" / "h3"]
    if os.environ.get("MLX_COSYH3_GOLDENS"):
        roots.append(Path(os.environ["MLX_COSYH3_GOLDENS"]) / "golden" / "h3")
    for root in roots:
        if root.joinpath(*parts).exists():
            return root.joinpath(*parts)
    pytest.skip(f"no golden {'/'.join(parts)}: set MLX_COSYH3_GOLDENS")


class Lazy:
    """A tensor with the interface of a checkpoint's, over an array; or of nothing but a shape."""

    def __init__(self, array=None, shape=None, dtype="F32"):
        self._array, self.dtype = array, dtype
        self.shape = tuple(array.shape if shape is None else shape)
        self.nbytes = 4 * int(np.prod(self.shape))

    def numpy(self):
        return self._array

    def rows(self, start, stop):
        return self._array[start:stop]


def make(source, out, **options):
    """`convert` of a checkpoint that has no tokenizer, unless one is named."""
    options.setdefault("tokenizer", "none")
    return convert(str(source), str(out), **options)
