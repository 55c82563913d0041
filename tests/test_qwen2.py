"""Qwen2's quick ways (joined products, the fused layer) give what its plain one gives."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_cosyh3.cosyvoice.qwen2 import Qwen2, Qwen2Config
from mlx_cosyh3.int8 import Int8Linear, quantize_int8
from mlx_cosyh3.kernels import _dispatch, norm_linear
from mlx_cosyh3.linear import joined, plus

CONFIG = Qwen2Config(64, 3, 128, 4, 2, 50, 1e-6, 1e6)


def model(kind="plain", seed=0):
    m = Qwen2(CONFIG)
    names = [n for n, _ in tree_flatten(m.parameters())]
    keys = mx.random.split(mx.random.key(seed), len(names))
    normal = lambda n, a, k: mx.random.normal(a.shape, key=k) * (0.1 if a.ndim > 1 else 0.3) + ("norm" in n)  # noqa: E731
    m.load_weights([(n, normal(n, a, k)) for (n, a), k in zip(tree_flatten(m.parameters()), keys)])
    if kind == "affine":
        nn.quantize(m, 64, 8, class_predicate=lambda path, layer: isinstance(layer, nn.Linear))
    if kind == "int8":
        for layer in m.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, linear in list(part.items()):
                    q, scale = quantize_int8(np.array(linear.weight))
                    part[name] = Int8Linear(linear.weight.shape[1], linear.weight.shape[0], "bias" in linear)
                    part[name].weight, part[name].scale = mx.array(q), mx.array(scale)
                    if "bias" in linear:
                        part[name].bias = linear.bias
    if kind == "bfloat16":
        m.set_dtype(mx.bfloat16)
    mx.eval(m.parameters())
    return m


def outputs(m, dtype=mx.float32):
    """Hidden states of a prefix of 5 and of six tokens behind it, one at a time, and the cache's length."""
    x = mx.random.normal((1, 11, CONFIG.hidden_size), key=mx.random.key(1)).astype(dtype)
    cache = m.make_cache()
    parts = [m(x[:, :5], cache)] + [m(x[:, t : t + 1], cache) for t in range(5, 11)]
    return mx.concatenate(parts, axis=1).astype(mx.float32), cache[0].offset


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is a GPU on which norm_linear's kernels pass: their reference stands in for them."""
    calls = []

    def bound(dtype, W, bias=None, scale=None, *, adds=False, **options):
        def call(x, last=None):
            calls.append(options.get("activation"))
            more = {"residual": last} if adds else {"turn": last}
            return norm_linear.reference(x, W, bias, scale, **options, **more)

        return call

    monkeypatch.setattr(norm_linear, "bound", bound)
    monkeypatch.setattr(_dispatch, "on_gpu", lambda stream=None: True)
    monkeypatch.setattr(_dispatch, "usable", lambda kernel, *a: kernel in norm_linear.KERNELS.values())
    return calls


@pytest.mark.parametrize("kind", ["plain", "int8", "affine"])
def test_joined_equals_separate(kind):
    separate, one = model(kind), model(kind)
    one.join()
    size = lambda m: sum(a.nbytes for _, a in tree_flatten(m.parameters()))  # noqa: E731
    assert size(one) == size(separate)
    assert "q_proj" not in one.layers[0].self_attn and "up_proj" not in one.layers[0].mlp
    (got, _), (want, _) = outputs(one), outputs(separate)
    assert mx.abs(got - want).max().item() < 2e-5


@pytest.mark.parametrize("kind", ["plain", "int8", "bfloat16"])
def test_fused_equals_the_general_way(kind, gpu, monkeypatch):
    m, dtype = model(kind), mx.bfloat16 if kind == "bfloat16" else mx.float32
    m.join()
    got, offset = outputs(m, dtype)
    assert len(gpu) == 6 * 4 * 3 and offset == 11  # each of six tokens: four pieces in each of three layers
    with monkeypatch.context() as without:
        without.setattr(_dispatch, "on_gpu", lambda stream=None: False)
        want, _ = outputs(m, dtype)
    assert mx.abs(got - want).max().item() < (0.1 if kind == "bfloat16" else 2e-5)


def test_compiled_in_the_main_thread_alone(gpu, monkeypatch):
    """There the graph is traced once for each span and cache size; in another thread it is built for each token."""
    monkeypatch.setattr(norm_linear, "reference", lambda x, W, *a, **k: mx.ones((W.shape[0] // (1 + ((k.get("activation") == "silu_gate"))),)))
    m = model()
    m.join()
    mx.enable_compile()
    try:
        outputs(m)
        here = len(gpu)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(outputs, m).result()
    finally:
        mx.disable_compile()
    assert here == 6 + 3 * 4 - 1  # the first product of each of six tokens; the rest of three layers, once
    assert len(gpu) == here + 6 * 4 * 3


def test_what_cannot_be_fused_takes_the_general_way(gpu):
    want, _ = outputs(model())
    assert gpu == []  # not joined
    affine = model("affine")
    affine.join()
    outputs(affine)
    assert gpu == []
    assert mx.isfinite(want).all().item()


def test_two_sequences_take_the_general_way(gpu):
    m = model()
    m.join()
    x = mx.random.normal((2, 1, CONFIG.hidden_size), key=mx.random.key(1))
    assert m(x, m.make_cache()).shape == x.shape and gpu == []


def test_layers_of_different_kinds_are_not_joined():
    plain, int8 = nn.Linear(64, 8), Int8Linear(64, 8)
    assert joined([plain, int8]) is None
    assert joined([plain, nn.Linear(64, 8, bias=False)]) is None
    assert joined([nn.QuantizedLinear(64, 8, bits=8), nn.QuantizedLinear(64, 8, bits=4)]) is None
    assert plain.weight.shape == (8, 64)
    assert joined([plain, nn.Linear(64, 3)]).weight.shape == (11, 64)


@pytest.mark.parametrize("bias", [True, False])
def test_plus(bias):
    layer, x, y = nn.Linear(16, 8, bias=bias), mx.random.normal((2, 16)), mx.random.normal((2, 8))
    assert mx.allclose(plus(layer, x, y), layer(x) + y, atol=1e-6).item()
    assert mx.allclose(plus(layer, x, y.astype(mx.bfloat16)), layer(x) + y.astype(mx.bfloat16), atol=1e-6).item()


def test_bound_launches_what_norm_linear_does(monkeypatch):
    seen = []
    kernel = norm_linear.KERNELS["rms"]
    monkeypatch.setattr(type(kernel), "__call__", lambda self, **kw: seen.append(kw) or [kw["inputs"][0]])
    x, W, w, y, turn = mx.ones(8), mx.ones((4, 8)), mx.ones(8), mx.ones(4), mx.ones(2)
    norm = w, None, 1e-6
    for options, last in (({}, None), ({"residual": y}, y), ({"activation": "rotary", "heads": (2, 1), "turn": turn}, turn)):
        norm_linear.norm_linear(x, W, norm=norm, **options)
        kept = {name: a for name, a in options.items() if name in ("activation", "heads")}
        norm_linear.bound(mx.float32, W, norm=norm, adds="residual" in options, **kept)(x, last)
        a, b = seen[-2:]
        assert [id(i) for i in a.pop("inputs")] == [id(i) for i in b.pop("inputs")]
        assert a.pop("stream") is None and a == b
