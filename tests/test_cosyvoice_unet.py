"""The U-Net of CosyVoice 1 and 2 against upstream's tensors, and its streaming against itself."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten, tree_map

from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.cosyvoice import unet
from mlx_cosyh3.cosyvoice.model import quantize
from mlx_cosyh3.cosyvoice.unet import UNet, UNetConfig
from mlx_cosyh3.errors import CheckpointError
from mlx_cosyh3.int8 import Int8Linear, quantize_int8
from tests.golden_data import cosyvoice_golden

TINY = {"channels": [16, 24], "num_heads": 2, "attention_head_dim": 8, "n_blocks": 2, "num_mid_blocks": 2}
CAUSAL = TINY | {"channels": [16], "causal": True, "static_chunk_size": 8}
PREFIX = "decoder.estimator."


def renamed(weights):
    """Upstream's tensors of the network, of all of a flow's, as ours."""
    out = {}
    for key, a in weights.items():
        if key.startswith(PREFIX):
            name, _, kind = key.removeprefix(PREFIX).rpartition(".")
            out[f"{unet.renamed(name)}.{kind}"] = unet.layout(name, a)
    return out


@pytest.fixture(scope="module")
def golden(request):
    """(version, network, io)"""
    folder = cosyvoice_golden(f"{request.param}_flow")
    config = json.loads((folder / "config.json").read_text())["decoder"]
    net = UNet(UNetConfig.from_dict(config, causal=request.param == "v2"))
    weights = renamed({k: t.numpy() for k, t in open_source(folder / "flow.pt").tensors.items()})
    net.load_weights([(k, mx.array(np.ascontiguousarray(a))) for k, a in weights.items()])
    mx.eval(net.parameters())
    return request.param, net, mx.load(str(folder / "io.safetensors"))


def random_net(config, seed=0):
    net = UNet(UNetConfig.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(seed), 1000))
    draw = lambda a: mx.random.normal(a.shape, key=next(keys)) / math.prod(a.shape[1:]) ** 0.5  # noqa: E731
    net.update(tree_map(draw, net.parameters()))
    mx.eval(net.parameters())
    return net


def random_inputs(frames):
    """x, cond, mu and speakers, of two rows"""
    rng = np.random.default_rng(frames)
    return [mx.array(rng.standard_normal((2, *s)).astype(np.float32)) for s in [(frames, 80)] * 3 + [(80,)]]


def near(ours, theirs, tolerance=1e-4):
    theirs = np.array(theirs)
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(np.array(ours), theirs, atol=tolerance * np.abs(theirs).max(), rtol=0)


@pytest.fixture
def seen(monkeypatch):
    """{id of a module: what it gave last}"""
    outputs = {}

    def watch(kind):
        call = kind.__call__

        def watching(self, *args):
            outputs[id(self)] = y = call(self, *args)
            return y

        monkeypatch.setattr(kind, "__call__", watching)

    for kind in (unet.Block, unet.Resnet, unet.Transformer, unet.FrameConv, unet.Halve, unet.Double):
        watch(kind)
    return outputs


@pytest.mark.parametrize("golden, kind", [("v1", "full"), ("v2", "full"), ("v2", "stream")], indirect=["golden"])
def test_network(golden, kind, seen):
    version, net, io = golden
    x, mu, cond = (io[f"unet.in.{n}"].swapaxes(1, 2) for n in ("x", "mu", "cond"))
    mask = net.chunk_mask(0, x.shape[1]) if kind == "stream" else None
    assert mx.array_equal(io["unet.in.mask"], mx.ones((2, 1, x.shape[1])))  # upstream masks nothing else
    out = net(x, cond, mu, io["unet.in.spks"], net.modulations(io["unet.in.t"][:1])[0], mask)
    prefix = "unet." if version == "v1" else f"unet.{kind}."
    parts = {
        "down0.resnet": net.down[0].resnet, "down0.tf0": net.down[0].transformers[0], "down0.down": net.down[0].after,
        "down1.down": net.down[-1].after, "mid0.resnet": net.mid[0].resnet, "mid1.tf1": net.mid[1].transformers[1],
        "up0.resnet": net.up[0].resnet, "up1.resnet": net.up[-1].resnet, "final_block": net.final,
    }  # fmt: skip
    compared = [name for name in parts if f"{prefix}{name}" in io]
    assert len(compared) >= 5
    for name in compared:
        theirs = io[f"{prefix}{name}"]  # [B, C, T], but for transformers
        near(seen[id(parts[name])], theirs if ".tf" in name else theirs.swapaxes(1, 2))
    near(out, io[f"{prefix}out"].swapaxes(1, 2))
    if version == "v2":
        near(mx.repeat(net.time_embedding(io["unet.in.t"][:1]), 2, axis=0), io[f"{prefix}time_mlp"])


@settings(max_examples=25, deadline=None)
@given(frames=st.integers(1, 60), cuts=st.sets(st.integers(1, 7), max_size=5))
def test_chunks_equal_the_whole(frames, cuts):
    net, inputs = random_net(CAUSAL), random_inputs(frames)
    *inputs, speakers = inputs
    modulations = net.modulations(np.array([0.3], np.float32))[0]
    whole = net(*inputs, speakers, modulations, net.chunk_mask(0, frames))
    state, parts = net.make_state(), []
    edges = [0, *(8 * c for c in sorted(cuts) if 8 * c < frames), frames]
    for a, b in zip(edges, edges[1:]):
        parts.append(net(*(i[:, a:b] for i in inputs), speakers, modulations, net.chunk_mask(a, b - a), state))
        mx.eval(parts[-1], state.arrays())
    near(mx.concatenate(parts, axis=1), whole, 1e-5)


def test_a_state_keeps_no_more_than_it_says():
    net, (*inputs, speakers) = random_net(CAUSAL), random_inputs(40)
    state = net.make_state()
    net(*inputs, speakers, net.modulations(np.zeros(1, np.float32))[0], net.chunk_mask(0, 40), state)
    caches = state.caches
    assert len(caches) == 2 * 4 and all(c.offset == 40 for c in caches)
    used = sum(2 * c.keys[:, :, : c.offset].nbytes for c in caches)
    assert used == 2 * 40 * net.bytes_per_frame  # two rows
    assert all(c.shape[:2] == (2, 2) for c in state.contexts) and len(state.contexts) == 2 * 4 + 3


def test_contexts_do_not_keep_what_they_are_cut_from():
    frames = 1600
    net, (*inputs, speakers) = random_net(CAUSAL), random_inputs(frames)
    modulations = net.modulations(np.zeros(1, np.float32))[0]
    mx.eval(inputs, speakers, modulations)
    before, state = mx.get_active_memory(), net.make_state()
    mx.eval(net(*inputs, speakers, modulations, None, state), state.arrays())
    state.caches.clear()
    whole = sum(a.nbytes * frames // 2 for a in state.contexts)
    assert mx.get_active_memory() - before < whole / 4


def test_a_frame_sees_its_chunk_and_what_is_before_it():
    net, (*inputs, speakers) = random_net(CAUSAL), random_inputs(24)
    modulations = net.modulations(np.array([0.5], np.float32))[0]
    run = lambda x: np.array(net(x, *inputs[1:], speakers, modulations, net.chunk_mask(0, 24)))  # noqa: E731
    changed = mx.where(mx.arange(24)[None, :, None] == 12, inputs[0] + 1, inputs[0])
    moved = np.abs(run(changed) - run(inputs[0])).max(axis=(0, 2))
    assert not moved[:8].any() and (moved[8:] > 0).all()


@pytest.mark.parametrize("frames", [1, 2, 3, 5, 8, 11])
def test_any_number_of_frames(frames):
    *inputs, speakers = random_inputs(frames)
    for config in (TINY, CAUSAL, TINY | {"channels": [16, 24, 8]}, TINY | {"num_mid_blocks": 0}):
        net = random_net(config)
        y = net(*inputs, speakers, net.modulations(np.array([0.5], np.float32))[0])
        assert y.shape == (2, frames, 80) and mx.isfinite(y).all()


def test_rows_do_not_mix():
    net, inputs = random_net(TINY), random_inputs(9)
    modulations = net.modulations(np.array([0.5], np.float32))[0]
    both = net(*inputs, modulations)
    for row in (0, 1):
        near(net(*(a[row : row + 1] for a in inputs), modulations), both[row : row + 1], 1e-5)


def test_modulations_of_many_times_are_those_of_each():
    net, times = random_net(TINY), np.array([0.0, 0.25, 1.0], np.float32)
    for t, together in zip(times, net.modulations(times)):
        for a, b in zip(together, net.modulations(t[None])[0]):
            near(a, b, 1e-5)


def test_only_the_causal_kind_has_a_state():
    with pytest.raises(TypeError, match="looks both ways"):
        random_net(TINY).make_state()


@pytest.mark.parametrize("config", [TINY, CAUSAL])
def test_bf16_weights(config):
    net, inputs = random_net(config), random_inputs(21)
    half = UNet(UNetConfig.from_dict(config))
    half.update(tree_map(lambda a: a.astype(mx.bfloat16), net.parameters()))
    a, b = (n(*inputs, n.modulations(np.array([0.5], np.float32))[0]) for n in (net, half))
    assert b.dtype == mx.float32 and half.modulations(np.zeros(1, np.float32))[0][0].dtype == mx.bfloat16
    assert 0 < mx.abs(a - b).max() < 0.1 * mx.abs(a).max()
    assert 2 * half.bytes_per_frame == net.bytes_per_frame


@pytest.mark.parametrize("how", [{"mode": "int8"}, {"mode": "affine", "bits": 8, "group_size": 32}])
def test_quantised(how):
    config = CAUSAL | {"channels": [32], "attention_head_dim": 16}
    net, other, inputs = random_net(config), random_net(config), random_inputs(21)
    linear = {n: m for n, m in net.named_modules() if unet.quantizes(n)}
    assert len(linear) == 6 * 2 * 4
    quantize(other, how, unet.quantizes)
    if how["mode"] == "int8":
        for name, layer in other.named_modules():
            assert isinstance(layer, Int8Linear) == (name in linear)
            if name in linear:
                q, scale = quantize_int8(np.array(linear[name].weight))
                layer.weight, layer.scale = mx.array(q), mx.array(scale)
                if "bias" in layer:
                    layer.bias = linear[name].bias
    a, b = (n(*inputs, n.modulations(np.array([0.5], np.float32))[0]) for n in (net, other))
    assert b.dtype == mx.float32
    assert 0 < mx.abs(a - b).max() < 0.05 * mx.abs(a).max()


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_full_size_names_and_shapes(version):
    sizes = {"num_heads": 8, "attention_head_dim": 64, "n_blocks": 4, "num_mid_blocks": 12}
    channels = {"v1": [256, 256], "v2": [256]}[version]
    config = UNetConfig.from_dict(sizes | {"channels": channels}, causal=version == "v2")
    known = json.loads((cosyvoice_golden("inventory.json")).read_text())[f"{version}.flow"]["keys"]
    theirs = renamed({k: np.broadcast_to(np.float32(0), shape) for k, (shape, _) in known.items()})
    ours = {k: a.shape for k, a in tree_flatten(UNet(config).parameters())}
    assert ours == {k: a.shape for k, a in theirs.items()}


def test_a_transposed_convolution_is_turned_otherwise():
    a = np.zeros((3, 5, 4), np.float32)
    assert unet.layout("up_blocks.0.2.conv", a).shape == (5, 4, 3)
    assert unet.layout("down_blocks.0.2.conv", a).shape == (3, 4, 5)
    assert unet.layout("up_blocks.1.2", a).shape == (3, 4, 5)
    assert unet.layout("final_proj", a[:, :, :1]).shape == (3, 5)
    assert np.shares_memory(unet.layout("up_blocks.0.2.conv", a), a)


def test_unknown_names():
    side = ["down_blocks", "down_blocks.0", "down_blocks.0.3", "down_blocks.x.2", "side_blocks.0.2"]
    inner = ["mid_blocks.0.1.0.norm2", "down_blocks.0.1.norm1", "down_blocks.0.0.norm1"]
    for name in ["", *side, *inner, "time_mlp.linear_3"]:
        assert unet.renamed(name) is None


@pytest.mark.parametrize(
    "change, message",
    [
        ({"act_fn": "snake"}, "act_fn = 'snake'; only 'gelu'"),
        ({"in_channels": 240}, "240 channels in, 80 out"),
        ({"causal": True}, "causal decoder has 2 levels; only 1"),
        ({"channels": [16, 12]}, r"\[16, 12\]; only multiples of 8"),
    ],
)
def test_other_networks_are_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        UNetConfig.from_dict(TINY | change)


@pytest.mark.parametrize("name", TINY)
def test_a_config_must_be_complete(name):
    with pytest.raises(CheckpointError, match=f"lacks decoder.{name}"):
        UNetConfig.from_dict({k: v for k, v in TINY.items() if k != name})


def test_gelu_is_the_exact_form():
    x = np.linspace(-6, 6, 101, dtype=np.float32)
    want = [0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.astype(float)]
    np.testing.assert_allclose(np.array(unet.gelu(mx.array(x))), want, atol=1e-6)


def test_mish_far_out():
    x = mx.array([-1e4, -100.0, -30.0, 0.0, 30.0, 100.0, 1e4])
    want = [v * math.tanh(max(v, 0) + math.log1p(math.exp(-abs(v)))) for v in x.tolist()]
    np.testing.assert_allclose(np.array(unet.mish(x)), want, rtol=1e-5, atol=1e-10)
