"""Transformers with relative positions: upstream's encoders, a plain reference in float64, caches, blocks, masks."""

import functools
import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.cosyvoice import conformer
from mlx_cosyh3.cosyvoice.conformer import (
    STEP,
    EncoderConfig,
    RelativeEncoder,
    causal_mask,
    chunk_mask,
    positions,
    quantizes,
    renamed,
)
from mlx_cosyh3.errors import CheckpointError
from tests.golden_data import cosyvoice_golden

UPSTREAM = {"dims": 64, "heads": 4, "hidden": 96}  # sizes of the goldens


def loaded(path, rename, **options):
    """An encoder with the tensors of a flow for which `rename` gives a name."""
    encoder = RelativeEncoder(64, **UPSTREAM, **options)
    names = {ours: t for name, t in open_source(path).tensors.items() if (ours := rename(name))}
    encoder.load_weights([(ours, mx.array(t.numpy())) for ours, t in names.items()])
    mx.eval(encoder.parameters())
    return encoder


@functools.cache
def golden(version):
    """(encoder of v1 or of the first half of v2, of the second half of v2, io tensors)."""
    folder = cosyvoice_golden(f"v{version}_flow")

    def below(prefix):
        return lambda name: renamed(name.removeprefix(prefix)) if name.startswith(prefix) else None

    first, second = below("encoder."), below("encoder.up_")
    io = mx.load(str(folder / "io.safetensors"))
    if version == 1:
        return loaded(folder / "flow.pt", first, blocks=2), None, io
    is_norm = lambda name: name.startswith("encoder.after_norm")  # noqa: E731 it follows the second half
    return (
        loaded(folder / "flow.pt", lambda n: None if is_norm(n) else first(n), blocks=2, norm=False),
        loaded(folder / "flow.pt", lambda n: first(n) if is_norm(n) else second(n), blocks=4),
        io,
    )


def random_encoder(seed=0, **changes):
    encoder = RelativeEncoder(**{"input_size": 12, "dims": 32, "heads": 2, "hidden": 24, "blocks": 2} | changes)
    rng = np.random.default_rng(seed)
    weights = []
    for name, a in tree_flatten(encoder.parameters()):
        x = rng.standard_normal(a.shape)
        x = 1 + 0.1 * x if "norm" in name else x if "bias_" in name else x / np.sqrt(a.shape[-1])
        weights.append((name, mx.array(x.astype(np.float32))))
    encoder.load_weights(weights)
    mx.eval(encoder.parameters())
    return encoder


def random_input(T, width=12, rows=1, seed=1):
    return mx.array(np.random.default_rng(seed).standard_normal((rows, T, width)).astype(np.float32))


def reference(encoder, x, mask, activation, legacy):
    """The encoder in float64, each score by the formula; x [T, C], mask bool [T, T]."""
    w = {name: np.array(a, dtype=np.float64) for name, a in tree_flatten(encoder.parameters())}

    def linear(name, x):
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def norm(name, x, eps):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = norm("embed.norm", linear("embed.linear", x), 1e-5)
    C, T = x.shape[1], len(x)
    x = (np.maximum(x, 0) if legacy else x) * math.sqrt(C)
    for n in range(len(encoder.layers)):
        at = f"layers.{n}"
        h = norm(f"{at}.norm_attention", x, 1e-12)
        q, k, v = (linear(f"{at}.attention.{p}", h) for p in "qkv")
        u, s = w[f"{at}.attention.bias_u"], w[f"{at}.attention.bias_v"]
        H, D = u.shape
        rates = 10000 ** (-np.arange(0, C, 2) / C)
        y = np.zeros((T, C))
        for head in range(H):
            cut = slice(head * D, (head + 1) * D)
            for i in range(T):
                scores = np.full(T, -np.inf)
                for j in np.flatnonzero(mask[i]):
                    angles = (i - j) * rates
                    p = linear(f"{at}.attention.pos", np.stack([np.sin(angles), np.cos(angles)], axis=1).reshape(C))
                    scores[j] = ((q[i, cut] + u[head]) @ k[j, cut] + (q[i, cut] + s[head]) @ p[cut]) / math.sqrt(D)
                e = np.exp(scores - scores.max())
                y[i, cut] = e / e.sum() @ v[:, cut]
        x = x + linear(f"{at}.attention.out", y)
        h = linear(f"{at}.ff_in", norm(f"{at}.norm_ff", x, 1e-12))
        h = np.maximum(h, 0) if activation == "relu" else h / (1 + np.exp(-h))
        x = x + linear(f"{at}.ff_out", h)
    return norm("after_norm", x, 1e-5)


def difference(a, b):
    assert a.shape == b.shape
    return np.abs(np.array(a, dtype=np.float64) - np.array(b, dtype=np.float64)).max()


# upstream's values


def test_v1_flow():
    encoder, _, io = golden(1)
    assert difference(encoder(io["enc.in"]), io["enc.out"]) < 1e-5


@pytest.mark.parametrize("case, chunk", (("full", None), ("stream", 25)))
def test_v2_flow(case, chunk):
    first, second, io = golden(2)
    get = lambda name: io[f"enc.{case}.{name}"]  # noqa: E731
    assert difference(first.embed(io["enc.in"]), get("embed")) < 1e-5
    one = RelativeEncoder(64, **UPSTREAM, blocks=1, embed=False, norm=False)
    for encoder, x, wanted, T, chunk_ in (
        (first, get("pre_lookahead"), get("enc0"), 103, chunk),
        (second, second.embed(get("up").swapaxes(1, 2)), get("up_enc0"), 206, chunk and 2 * chunk),
    ):
        one.layers = encoder.layers[:1]
        mask = chunk_ and chunk_mask(T, chunk_)
        assert difference(one(x, mask), wanted) < 3e-5
    assert difference(second(get("up").swapaxes(1, 2), mask), get("out")) < 3e-5


# the formula


@pytest.mark.parametrize("activation, legacy", (("silu", False), ("relu", True)))
@pytest.mark.parametrize("T", (1, 2, 9))
@pytest.mark.parametrize("mask", ("full", "causal", "chunk"))
def test_float64_reference(activation, legacy, T, mask):
    encoder = random_encoder(activation=activation, legacy=legacy)
    x = random_input(T)
    masks = {"full": np.ones((T, T), bool), "causal": np.tri(T, dtype=bool),
             "chunk": np.array([[j < (i // 4 + 1) * 4 for j in range(T)] for i in range(T)])}  # fmt: skip
    wanted = reference(encoder, np.array(x[0], dtype=np.float64), masks[mask], activation, legacy)
    ours = {"full": [None, mx.array(masks["full"])], "causal": ["causal", causal_mask(T)], "chunk": [chunk_mask(T, 4)]}
    for given_mask in ours[mask]:
        assert difference(encoder(x, given_mask)[0], wanted) < 1e-5


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 12),
    st.integers(1, 8),
    st.sampled_from(("full", "causal", "chunk")),
)
def test_cache_and_blocks_change_nothing(parts, block, step, kind):
    """Any cut of the positions into calls, of a call's queries into blocks, of the table's growth into steps."""
    encoder, T = random_encoder(), sum(parts)
    x = random_input(T, rows=2)
    ends = np.cumsum(parts)
    last_seen = ends[np.searchsorted(ends, np.arange(T), side="right")]  # "full": all that have come in one call
    whole = {"full": mx.array(np.arange(T) < last_seen[:, None]), "causal": causal_mask(T), "chunk": chunk_mask(T, 1)}
    wanted = encoder(x, causal_mask(T) if kind == "chunk" else whole[kind])
    old = conformer.BLOCK, conformer.STEP
    conformer.BLOCK, conformer.STEP = block, step
    try:
        cache, got, start = encoder.make_cache(), [], 0
        for n in parts:
            mask = {"full": None, "causal": "causal", "chunk": chunk_mask(n, 1, start)}[kind]
            got.append(encoder(x[:, start : start + n], mask, cache))
            start += n
            assert cache[0].offset == start
        assert difference(mx.concatenate(got, axis=1), wanted) < 1e-5
    finally:
        conformer.BLOCK, conformer.STEP = old


def test_long_input():
    """More queries than a block, more positions than a step of the table."""
    encoder = random_encoder(blocks=1)
    T = 2 * conformer.BLOCK + 30
    x = random_input(T)
    assert difference(encoder(x, "causal"), encoder(x, causal_mask(T))) < 1e-5
    for at in (0, 255, 256, 511, T - 1):
        assert difference(encoder(x[:, : at + 1], "causal")[:, -1], encoder(x, "causal")[:, at]) < 1e-5


def test_rewind():
    encoder = random_encoder()
    x, cache = random_input(12), encoder.make_cache()
    encoder(x[:, :5], "causal", cache)
    wanted = encoder(x[:, 5:6], "causal", cache)
    encoder(x[:, 6:], "causal", cache)
    for kv in cache:
        kv.rewind(5)
    assert difference(encoder(x[:, 5:6], "causal", cache), wanted) == 0


def test_padding_mask():
    """A mask [B, 1, 1, S] of keys: what is padded does not matter."""
    encoder = random_encoder()
    x = random_input(10, rows=2)
    mask = mx.array(np.arange(10) < np.array([10, 6])[:, None])[:, None, None]
    got = encoder(x, mask)
    assert difference(got[1:, :6], encoder(x[1:, :6])) < 1e-5
    assert difference(got[:1], encoder(x[:1])) < 1e-5


def test_projected_distances_are_computed_once():
    """While tokens come one by one the position projection runs when the table grows, not for each token."""
    encoder, rows = random_encoder(blocks=1), []
    attention = encoder.layers[0].attention
    project = attention.pos

    class Counting(type(project)):
        def __call__(self, x):
            rows.append(x.shape[0])
            return super().__call__(x)

    attention.pos = Counting(32, 32, bias=False)
    attention.pos.weight = project.weight
    cache = encoder.make_cache()
    encoder(random_input(3), "causal", cache)
    for _ in range(2 * STEP):
        encoder(random_input(1), "causal", cache)
        mx.eval(cache[0].keys)
    assert rows == [STEP, 2, STEP, STEP]  # 2: ahead of the first two of three


def test_half_precision():
    encoder = random_encoder()
    x = random_input(20)
    wanted = encoder(x, "causal")
    encoder.set_dtype(mx.bfloat16)
    cache = encoder.make_cache()
    got = [encoder(x[:, a:b].astype(mx.bfloat16), "causal", cache) for a, b in ((0, 18), (18, 19), (19, 20))]
    got = mx.concatenate(got, axis=1)
    assert got.dtype == cache[0].table.dtype == mx.bfloat16
    assert 0 < mx.linalg.norm((got - wanted).reshape(-1)) / mx.linalg.norm(wanted.reshape(-1)) < 0.05


# positions, masks, names, configs


def test_positions():
    table = positions(5, 8)
    assert table.shape == (9, 8) and table.dtype == mx.float32
    for row, r in zip(np.array(table), range(4, -5, -1)):
        for i in range(4):
            angle = r * 10000 ** (-2 * i / 8)
            assert row[2 * i : 2 * i + 2] == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-6)
    assert positions(1, 8).shape == (1, 8)


def test_masks():
    assert causal_mask(2, 3).tolist() == [[True] * 4 + [False], [True] * 5]
    assert chunk_mask(4, 2).tolist() == [[True, True, False, False]] * 2 + [[True] * 4] * 2
    assert chunk_mask(2, 2, offset=3).tolist() == [[True] * 4 + [False], [True] * 5]
    assert chunk_mask(2, 2, offset=2) is None


def test_renamed():
    for theirs, ours in (
        ("encoders.11.norm1.bias", "layers.11.norm_attention.bias"),
        ("encoders.0.norm_mha.weight", "layers.0.norm_attention.weight"),
        ("encoders.0.norm2.weight", "layers.0.norm_ff.weight"),
        ("encoders.3.self_attn.pos_bias_u", "layers.3.attention.bias_u"),
        ("encoders.3.self_attn.linear_pos.weight", "layers.3.attention.pos.weight"),
        ("encoders.3.feed_forward.w_2.weight", "layers.3.ff_out.weight"),
        ("embed.out.1.weight", "embed.norm.weight"),
        ("after_norm.bias", "after_norm.bias"),
    ):
        assert renamed(theirs) == renamed(ours) == ours
    for unknown in ("encoders.3.self_attn.linear_pos.bias", "encoders.0", "norm1.bias", "layers.x.ff_in.bias", "pe"):
        assert renamed(unknown) is None


def test_quantizes():
    assert quantizes("encoder.layers.3.attention.q") and quantizes("layers.0.ff_out")
    for path in ("layers.3.attention.pos", "embed.linear", "layers.3.norm_ff", "layers.3.attention", "after_norm"):
        assert not quantizes(path)


def test_config():
    d = {"input_size": 8, "output_size": 16, "attention_heads": 2, "linear_units": 4, "num_blocks": 3}
    more = {"dropout_rate": 0.1, "input_layer": "linear"}
    config = EncoderConfig.from_dict(d | more, "encoder", input_layer="linear")
    assert len(RelativeEncoder.from_config(config, activation="relu").layers) == 3
    for change, message in (
        ({"input_layer": "conv2d"}, "encoder.input_layer = 'conv2d'; only 'linear'"),
        ({"macaron_style": True}, "encoder.macaron_style = True; only False"),
        ({"attention_heads": 3}, "output_size = 16 must be even, and a multiple of attention_heads = 3"),
    ):
        with pytest.raises(CheckpointError, match=message):
            EncoderConfig.from_dict(d | change, "encoder", input_layer="linear")
    with pytest.raises(CheckpointError, match="lacks encoder.num_blocks"):
        EncoderConfig.from_dict({k: v for k, v in d.items() if k != "num_blocks"}, "encoder")
