"""CosyVoice 2's flow against upstream's tensors. Its streaming: test_cosyvoice_causal_flow.py."""

import importlib.util
import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.cosyvoice import cfm, noise, unet
from mlx_cosyh3.cosyvoice.conformer import RelativeCache, chunk_mask
from mlx_cosyh3.cosyvoice.flow_upsampled import UpsampledFlow, UpsampledFlowConfig, quantizes, sanitize
from mlx_cosyh3.cosyvoice.model import quantize
from mlx_cosyh3.errors import CheckpointError
from mlx_cosyh3.int8 import Int8Linear, quantize_int8
from tests.golden_data import cosyvoice_golden, large

FULL = {
    "vocab_size": 6561, "input_size": 512, "pre_lookahead_len": 3, "token_mel_ratio": 2,
    "cfm": {"inference_cfg_rate": 0.7},
    "encoder": {"input_size": 512, "output_size": 512, "attention_heads": 8, "linear_units": 2048, "num_blocks": 6,
                "static_chunk_size": 25},
    "decoder": {"in_channels": 320, "out_channels": 80, "channels": [256], "attention_head_dim": 64, "n_blocks": 4,
                "num_mid_blocks": 12, "num_heads": 8, "act_fn": "gelu", "static_chunk_size": 50},
}  # fmt: skip


def load(config, weights):
    flow = UpsampledFlow(UpsampledFlowConfig.from_dict(config))
    flow.load_weights([(k, mx.array(np.ascontiguousarray(v, np.float32))) for k, v in sanitize(weights).items()])
    mx.eval(flow.parameters())
    return flow


def golden_weights():
    return {k: t.numpy() for k, t in open_source(cosyvoice_golden("v2_flow") / "flow.pt").tensors.items()}


def golden_config():
    return json.loads((cosyvoice_golden("v2_flow") / "config.json").read_text())


@pytest.fixture(scope="module")
def golden():
    return load(golden_config(), golden_weights()), mx.load(str(cosyvoice_golden("v2_flow") / "io.safetensors"))


def inputs(io, tokens=83):
    return io["in.token"][:, :tokens], io["in.prompt_token"], io["in.prompt_feat"], io["in.embedding"]


def near(ours, theirs, tolerance=1e-4):
    """The tolerance is relative to the largest value of `theirs`."""
    theirs = np.array(theirs)
    np.testing.assert_allclose(np.array(ours), theirs, atol=tolerance * np.abs(theirs).max(), rtol=0)


def close(ours, theirs, tolerance):
    """`theirs` [B, C, T], as upstream lays it out."""
    near(ours, theirs.swapaxes(1, 2), tolerance)


CASES = {
    "nostream_final": (83, {}),
    "stream_final": (83, {"streaming": True}),
    "stream_chunk0": (33, {"streaming": True, "finalize": False}),
    "stream_chunk1": (58, {"streaming": True, "finalize": False}),
    "nostream_nofinal": (40, {"finalize": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_mel(golden, case):
    flow, io = golden
    tokens, how = CASES[case]
    close(flow(*inputs(io, tokens), **how), io[f"{case}.mel"], 1e-3)


@pytest.mark.parametrize("kind", ["full", "stream"])
def test_encoder(golden, kind):
    flow, io = golden
    encoder, x, streaming = flow.encoder, io["enc.in"], kind == "stream"
    T, nothing = x.shape[1], x[:, :0]
    h = encoder.tokens.embed(x)
    near(h, io[f"enc.{kind}.embed"])
    h, _ = encoder.look_ahead(h)
    near(h, io[f"enc.{kind}.pre_lookahead"])
    masks = [chunk_mask(T, 25), chunk_mask(2 * T, 50)] if streaming else [None, None]
    missing = lambda T, cache: cache.missing(T, T - 1, 64)  # noqa: E731
    cache = RelativeCache()
    near(encoder.tokens.layers[0](h, masks[0], cache, missing(T, cache)), io[f"enc.{kind}.enc0"])
    h = mx.repeat(encoder.tokens.layers_only(h, masks[0]), 2, axis=1)
    h = encoder.upsample(mx.pad(h, [(0, 0), (4, 0), (0, 0)]))
    close(h, io[f"enc.{kind}.up"], 1e-4)
    cache = RelativeCache()
    h = encoder.frames.layers[0](encoder.frames.embed(h), masks[1], cache, missing(2 * T, cache))
    near(h, io[f"enc.{kind}.up_enc0"])
    near(encoder(x, nothing, streaming), io[f"enc.{kind}.out"])


def test_encoder_with_tokens_that_follow(golden):
    flow, io = golden
    x = io["enc.in"]
    near(flow.encoder(x[:, :-3], x[:, -3:], True), io["enc.ctx_stream.out"])


def test_encoder_in_pieces(golden):
    """Complete chunks, then the rest: what is carried is enough."""
    flow, io = golden
    x, state, parts = io["enc.in"], flow.encoder.make_state(), []
    for a, b in ((0, 25), (25, 75), (75, 103)):
        parts.append(flow.encoder(x[:, a:b], x[:, b : b + 3], True, state))
        mx.eval(parts[-1], state.arrays())
    near(mx.concatenate(parts, axis=1), io["enc.stream.out"])


def test_what_the_network_takes_and_gives(golden, monkeypatch):
    flow, io = golden
    calls, call = [], unet.UNet.__call__

    def watch(self, *args, **how):
        v = call(self, *args, **how)
        calls.append((*args[:4], v))
        return v

    monkeypatch.setattr(unet.UNet, "__call__", watch)
    np.testing.assert_allclose(cfm.times(10)[0], np.array(io["nostream_final.t"])[:, 0], atol=1e-6)
    flow(*inputs(io))
    assert len(calls) == 10
    for step in (0, 1, 9):
        x, cond, mu, spks, v = calls[step]
        for name, ours in (("cond", cond), ("mu", mu)):
            close(ours, io[f"nostream_final.{name}"], 1e-4)
        near(spks, io["nostream_final.spks"])
        close(x, io[f"nostream_final.step{step}.x"], 1e-4)
        close(v, io[f"nostream_final.step{step}.v"], 1e-4)
    assert mx.array_equal(io["nostream_final.mask"], mx.ones((2, 1, 206)))  # upstream masks nothing, we have none
    np.testing.assert_allclose(noise.cfm_noise(206)[0].T, np.array(io["in.rand_noise"])[0], atol=1e-6)


@pytest.mark.parametrize("sizes", [[83], [33, 25, 25], [7] * 11 + [6], [1] * 83])
def test_stream_is_upstreams_streaming(golden, sizes):
    """One stream gives what upstream computes anew for all tokens so far, and at the end the streaming mask's mel."""
    flow, io = golden
    tokens, *prompt = inputs(io)
    tokens, stream = tokens[0].tolist(), flow.stream(*prompt)
    parts, done = [], 0
    for size in sizes:
        parts.append(stream.add(tokens[done : done + size]))
        done += size
    parts.append(stream.add([], last=True))
    mel = mx.concatenate(parts, axis=1)
    close(mel, io["stream_final.mel"], 1e-3)
    for case in ("stream_chunk0", "stream_chunk1"):
        frames = io[f"{case}.mel"].shape[2]
        close(mel[:, :frames], io[f"{case}.mel"], 1e-3)


def test_int8(golden):
    flow, io = golden
    small = UpsampledFlow(UpsampledFlowConfig.from_dict(golden_config()))
    quantize(small, {"mode": "int8"}, quantizes)
    layers = {name for name, module in small.named_modules() if isinstance(module, Int8Linear)}
    weights = {}
    for name, a in tree_flatten(flow.parameters()):
        layer, _, kind = name.rpartition(".")
        if layer in layers and kind == "weight":
            weights[name], weights[f"{layer}.scale"] = (mx.array(q) for q in quantize_int8(np.array(a)))
        else:
            weights[name] = a
    small.load_weights(list(weights.items()))
    a, b = (f(*inputs(io, 30), streaming=True) for f in (flow, small))
    assert 0 < mx.abs(a - b).max() < 0.05 * mx.abs(a).max()
    stream = small.stream(*inputs(io)[1:])
    parts = [stream.add(io["in.token"][0, :30].tolist()), stream.add([], last=True)]
    near(mx.concatenate(parts, axis=1), b, 1e-3)


def test_what_int8_takes():
    flow = UpsampledFlow(UpsampledFlowConfig.from_dict(golden_config()))
    quantize(flow, {"mode": "int8"}, quantizes)
    layers = {name for name, module in flow.named_modules() if isinstance(module, Int8Linear)}
    ends = ("attention.q", "attention.k", "attention.v", "attention.out", "ff_in", "ff_out")
    want = {f"encoder.{side}.{n}.{e}" for side, count in (("tokens.layers", 2), ("frames.layers", 4))
            for n in range(count) for e in ends}  # fmt: skip
    want |= {f"unet.{level}.transformers.{n}.{e}" for level in ("down.0", "mid.0", "mid.1", "up.0") for n in range(2)
             for e in ("to_q", "to_k", "to_v", "to_out", "ff_in", "ff_out")}  # fmt: skip
    assert layers == want


def test_sanitize_fits_the_full_size():
    """Names and shapes of all tensors of the released model are those of ours, none is left over on either side."""
    keys = json.loads(large("golden", "cosyvoice", "inventory.json").read_text())["v2.flow"]["keys"]
    theirs = sanitize({key: np.broadcast_to(np.float32(0), shape) for key, (shape, _) in keys.items()})
    flow = UpsampledFlow(UpsampledFlowConfig.from_dict(FULL))  # its weights stay lazy: none of the 450 MB is made
    assert {k: a.shape for k, a in theirs.items()} == {k: a.shape for k, a in tree_flatten(flow.parameters())}
    assert sum(a.size for a in theirs.values()) == 112_549_360
    assert len(theirs) == len(keys) == 1121


def test_full_size_takes_so_many_bytes_a_frame():
    flow = UpsampledFlow(UpsampledFlowConfig.from_dict(FULL))
    assert flow.step_bytes == 2 * 2 * 56 * 512 * 4  # k and v, two rows, layers, width, fp32: 0.46 MB a step


def test_sanitize_copies_nothing():
    weights = golden_weights()
    out = sanitize(weights)
    name = "encoder.pre_lookahead_layer.conv1.weight"
    assert out["encoder.look_ahead.conv1.weight"].shape == (64, 4, 64) and weights[name].shape == (64, 64, 4)
    assert np.shares_memory(out["encoder.look_ahead.conv1.weight"], weights[name])
    assert all(np.may_share_memory(b, weights[a]) for a, b in zip(weights, out.values()))


def test_sanitize_twice():
    once = sanitize(golden_weights())
    twice = sanitize(once)
    assert list(once) == list(twice) and all(once[k] is twice[k] for k in once)


@pytest.mark.parametrize(
    "key, nearest",
    [
        ("encoder.up_encoders.0.self_attn.linear_qq.weight", ""),
        ("encoder.up_layer.conf.weight", "encoder.up_layer.conv"),
        ("encoder.up_after_norm.weight", "encoder.after_norm"),
        ("decoder.estimator.final_projj.weight", "decoder.estimator.final_proj"),
        ("decoder.estimator.down_blocks.0.3.weight", ""),
        ("encoder_proj.wait", "encoder_proj"),
        ("length_regulator.model.0.weight", ""),
        ("encoder.encoders.0.self_attn.linear_pos.bias", ""),
    ],
)
def test_unknown_tensor(key, nearest):
    told = f"unknown tensor '{key}'" + (f", nearest known: '{nearest}'" if nearest else "")
    with pytest.raises(CheckpointError, match=told):
        sanitize({key: np.zeros((4, 4), np.float32)})


@pytest.mark.parametrize(
    "change, told",
    [
        ({"encoder": None}, "lacks encoder"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"output_size": 100}, "output_size = 100; only 80"),
        ({"token_mel_ratio": 4}, "token_mel_ratio = 4; only 2"),
        ({"input_size": 256}, "flow.encoder.input_size = 512; only 256"),
        ({"encoder": FULL["encoder"] | {"input_layer": "conv2d"}}, "flow.encoder.input_layer = 'conv2d'"),
        ({"decoder": FULL["decoder"] | {"channels": [256, 256]}}, "2 levels; only 1"),
    ],
)
def test_config(change, told):
    with pytest.raises(CheckpointError, match=told):
        UpsampledFlowConfig.from_dict({k: v for k, v in (FULL | change).items() if v is not None})


@pytest.mark.slow
def test_full_size(monkeypatch):
    folder = cosyvoice_golden("real_size")
    spec = importlib.util.spec_from_file_location("seeded_weights", folder.parent / "seeded_weights.py")
    seeded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(seeded)
    flow = load(FULL, seeded.state_dict("v2.flow"))
    io = mx.load(str(folder / "v2.flow.safetensors"))
    calls, call = [], unet.UNet.__call__

    def watch(self, *args, **how):
        v = call(self, *args, **how)
        calls.append((*args[:4], v))
        return v

    monkeypatch.setattr(unet.UNet, "__call__", watch)
    mel = flow(*inputs(io, None))
    first, last = calls[0], calls[9]
    cases = {"mu": (first[2][:1], 1e-4), "step0.v": (first[4], 1e-3), "step9.x": (last[0][:1], 2e-3),
             "step9.v": (last[4], 2e-3), "mel": (mel, 2e-3)}  # fmt: skip
    for name, (ours, bound) in cases.items():
        theirs = np.array(io[name].swapaxes(1, 2))
        print(f"{name}: largest error {np.abs(np.array(ours) - theirs).max():.2g} of {np.abs(theirs).max():.3g}")
        np.testing.assert_allclose(np.array(ours), theirs, atol=bound, rtol=0)
