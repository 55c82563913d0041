"""The trained model: its numbers equal upstream's in fp32, and quantisation costs next to nothing."""

import json
import math

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map_with_path

from mlx_cosyh3 import generate, load
from mlx_cosyh3.convert import convert
from tests.golden_data import h3_tiny, large


@pytest.fixture(scope="module")
def io():
    folder = large("checkpoints", "h3-tiny")
    return mx.load(str(folder / "io.safetensors")), json.loads((folder / "io.json").read_text())


def passages(tensors):
    return sorted(name.split(".")[0] for name in tensors if name.endswith(".logprobs"))


def logprobs(model, ids):
    """Log-probability of each id of `ids` [n] given those before it, from the second on."""
    logits = model(ids[None])[0, :-1].astype(mx.float32)
    picked = mx.take_along_axis(logits, ids[1:, None], axis=-1)[:, 0]
    return picked - mx.logsumexp(logits, axis=-1)


def perplexity(model, tensors):
    """Over all passages."""
    scores = mx.concatenate([logprobs(model, tensors[f"{p}.input_ids"]) for p in passages(tensors)])
    return math.exp(-scores.mean().item())


def test_greedy_texts(io):
    tensors, texts = io
    model = h3_tiny()
    for prompt in (name for name in texts if name.startswith("prompt")):
        assert model.tokenizer.encode(texts[prompt]["text"]) == tensors[f"{prompt}.input_ids"].tolist()
        r = generate(model, texts[prompt]["text"], temperature=0, max_tokens=64)
        assert tensors[f"{prompt}.input_ids"].tolist() + r.tokens == tensors[f"{prompt}.greedy"].tolist()
        assert texts[prompt]["text"] + r.text == texts[prompt]["greedy_text"]
        last = model(tensors[f"{prompt}.input_ids"][None])[0, -1]
        assert mx.abs(last - tensors[f"{prompt}.last_logits"]).max().item() < 1e-3


def test_passage_logprobs(io):
    tensors, texts = io
    assert passages(tensors)
    for p in passages(tensors):
        got = logprobs(h3_tiny(), tensors[f"{p}.input_ids"])
        assert mx.abs(got - tensors[f"{p}.logprobs"]).max().item() < 2e-3
        assert abs(math.exp(-got.mean().item()) / texts[p]["ppl"] - 1) < 1e-4


def dequantized(model):
    """`model` with its affine layers as plain fp32 ones: MLX's quantised product is 30 times slower on a Linux CPU."""

    def plain(_, m):
        if not isinstance(m, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            return m
        w = mx.dequantize(m.weight, m.scales, m.biases, group_size=m.group_size, bits=m.bits)
        new = nn.Embedding(*w.shape) if isinstance(m, nn.QuantizedEmbedding) else nn.Linear(*w.shape[::-1])
        new.weight = w
        if "bias" in m:
            new.bias = m.bias
        return new

    model.update_modules(tree_map_with_path(plain, model.leaf_modules(), is_leaf=nn.Module.is_module))
    return model.prepare()


@pytest.mark.parametrize("q, bound", [("int8", 0.005), (8, 0.005), (4, None)])
def test_perplexity_after_quantisation(io, tmp_path, q, bound, record_property):
    tensors, _ = io
    source = large("checkpoints", "h3-tiny")
    convert(source, tmp_path / "q", file="model.pt", quantize=q)
    model = load(tmp_path / "q")
    if q != "int8":
        ids = tensors["prompt0.input_ids"][None]
        quantised = model(ids)
        model = dequantized(model)
        assert mx.abs(model(ids) - quantised).max().item() < 1e-3
    change = perplexity(model, tensors) / perplexity(h3_tiny(), tensors) - 1
    record_property("perplexity_change", change)
    print(f"perplexity after -q {q}: {change:+.3%}")
    if bound is None:  # 4 bits are reported; they still must give a language model, not noise
        assert abs(change) < 0.5
    else:
        assert abs(change) <= bound


def test_embedded_model_is_this_model(io):
    """What the package ships is the int8 conversion of the same checkpoint."""
    tensors, _ = io
    assert abs(perplexity(load(), tensors) / perplexity(h3_tiny(), tensors) - 1) <= 0.005
