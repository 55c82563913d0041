"""The fused step equals the general one: its kernels are stood in for by their references, which run anywhere."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_cosyh3.h3 import gelu_tanh, to_int8
from mlx_cosyh3.int8 import Int8Embedding, Int8Linear, quantize_int8
from mlx_cosyh3.kernels import _dispatch, h3_layer, norm_linear
from tests.golden_data import random_h3

KINDS = {
    "pure": {},
    "hybrid": {"attn_layer_idx": [1], "num_heads": 4, "rotary_emb_dim": 8},
    "untied": {"attn_layer_idx": [0, 2], "num_heads": 2, "tie_word_embeddings": False},
}


@pytest.fixture
def fused(monkeypatch):
    """Pretend that there is a GPU on which the layer kernels pass their tests; everything else runs as it does here."""
    calls = []

    def counted(function):
        def call(*args, **kwargs):
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(h3_layer, "h3_mixer", counted(h3_layer.mixer_reference))
    monkeypatch.setattr(norm_linear, "norm_linear", counted(norm_linear.reference))
    monkeypatch.setattr(_dispatch, "on_gpu", lambda stream=None: True)
    monkeypatch.setattr(_dispatch, "usable", lambda kernel, *a: kernel.name in ("h3_mixer", "linear_row", "layer_norm_linear"))
    return calls


def in_int8(model):
    """The model with its linear layers and embedding in int8."""
    plain = dict(model.named_modules())
    model = to_int8(model)
    for name, m in model.named_modules():
        if isinstance(m, (Int8Linear, Int8Embedding)):
            weight, scale = quantize_int8(np.array(plain[name].weight))
            m.weight, m.scale = mx.array(weight), mx.array(scale)
            if "bias" in m:
                m.bias = plain[name].bias
    return model.prepare()


@pytest.mark.parametrize("int8", [False, True], ids=["plain", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_general_step(kind, int8, monkeypatch, fused):
    model = random_h3(1, **KINDS[kind])
    model = in_int8(model) if int8 else model
    ids = mx.array(np.random.default_rng(0).integers(0, 60, (1, 30)).astype(np.int32))
    cache = model.make_cache()
    model.prefill(ids[:, :20], cache)
    other = cache.copy()
    for t in range(20, 30):
        got = model.step(ids[:, t], cache)
        with monkeypatch.context() as m:
            m.setattr(_dispatch, "on_gpu", lambda stream=None: False)
            want = model.step(ids[:, t], other)
        assert mx.abs(got - want).max().item() < 1e-4
    assert cache.length == other.length == 30
    attention = len(KINDS[kind].get("attn_layer_idx", []))
    layers = model.config.n_layer
    assert len(fused) == 10 * (4 * layers + 1)
    assert fused.count("mixer_reference") == 10 * (layers - attention)


def test_others_take_the_general_way(fused):
    for changes in ({"head_dim": 4}, {"d_model": 30, "n_ssm": 0}):
        model = random_h3(1, **changes)
        cache = model.make_cache()
        assert model.step(mx.array([1]), cache).shape == (1, 64)
    model = random_h3(1)
    model.step(mx.array([1, 2]), model.make_cache(2))
    assert fused == []


def test_the_mlp_of_int8_is_fused():
    """The activation in the product's own launch gives what it gives behind it."""
    model = in_int8(random_h3(1))
    mlp, x = model.layers[0].mlp, mx.random.normal((3, 32), key=mx.random.key(4))
    x = x[:, : model.config.d_model]
    h = mlp.fc1(x)
    assert mx.allclose(mlp(x), mlp.fc2(gelu_tanh(h)), rtol=1e-5, atol=1e-6).item()
    gated, plus = mlp.fc1(x, "silu", times=h), mlp.fc1(x, residual=h)
    assert mx.allclose(gated, h * mx.sigmoid(h) * h, rtol=1e-5, atol=1e-6).item()
    assert mx.allclose(plus, h + h, rtol=1e-5, atol=1e-6).item()
    mlp.fc1.keep_affine(mx.float32)  # of a width that is no multiple of 64: nothing to keep
    assert mx.array_equal(mlp.fc1(x), h).item() and len(mlp.parameters()["fc1"]) == 3


def test_other_quantised_layers_take_the_general_way(fused):
    model = random_h3(1)
    nn.quantize(model, 32, 8, class_predicate=lambda path, m: path.endswith("fc1"))
    assert not model._fused_step.usable(model)


def test_half_precision_layers_must_agree(fused):
    """A norm in another dtype than the weights: not fused, still right."""
    model = random_h3(1)
    model.layers[1].norm1.weight = model.layers[1].norm1.weight.astype(mx.bfloat16)
    assert not model._fused_step.usable(model)
