"""The fused step equals the general one: its kernels are stood in for by their references, which run anywhere."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3.kernels import _dispatch, h3_layer
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
    monkeypatch.setattr(h3_layer, "norm_linear", counted(h3_layer.linear_reference))
    monkeypatch.setattr(_dispatch, "on_gpu", lambda stream=None: True)
    monkeypatch.setattr(_dispatch, "usable", lambda kernel, *a: kernel.name in ("h3_mixer", "h3_linear", "h3_norm_linear"))
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_general_step(kind, monkeypatch, fused):
    model = random_h3(1, **KINDS[kind])
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


def test_half_precision_layers_must_agree(fused):
    """A norm in another dtype than the weights: not fused, still right."""
    model = random_h3(1)
    model.layers[1].norm1.weight = model.layers[1].norm1.weight.astype(mx.bfloat16)
    assert not model._fused_step.usable(model)
