"""CosyVoice 3's flow against upstream's tensors. Its streaming: test_cosyvoice_causal_flow.py."""

import importlib.util
import json

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.convert.torch_file import read_torch
from mlx_cosyh3.cosyvoice import cfm, dit, noise
from mlx_cosyh3.cosyvoice.causal_flow import FlowStream
from mlx_cosyh3.cosyvoice.flow import Flow, FlowConfig, sanitize
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.int8 import Int8Linear
from tests.golden_data import cosyvoice_golden, large

FULL = {"vocab_size": 6561, "dit": {"dim": 1024, "depth": 22, "heads": 16}, "pre_lookahead_layer": {"channels": 1024}}


def load(config, weights):
    flow = Flow(FlowConfig.from_dict(config))
    flow.load_weights([(k, mx.array(np.ascontiguousarray(v, np.float32))) for k, v in sanitize(weights).items()])
    mx.eval(flow.parameters())
    return flow


@pytest.fixture(scope="module")
def golden():
    folder = cosyvoice_golden("v3_flow")
    weights = {k: t.numpy() for k, t in open_source(folder / "flow.pt").tensors.items()}
    return load(json.loads((folder / "config.json").read_text()), weights), mx.load(str(folder / "io.safetensors"))


def close(ours, theirs, tolerance):
    """`theirs` [B, C, T], as upstream lays it out; the tolerance is relative to its largest value."""
    theirs = np.array(theirs.swapaxes(1, 2))
    np.testing.assert_allclose(np.array(ours), theirs, atol=tolerance * np.abs(theirs).max(), rtol=0)


CASES = {
    "nostream_final": (83, True, {}),
    "stream_final": (83, True, {"streaming": True}),
    "stream_chunk0": (33, True, {"streaming": True, "finalize": False}),
    "stream_chunk1": (58, True, {"streaming": True, "finalize": False}),
    "nostream_nofinal": (40, True, {"finalize": False}),
    "noprompt": (26, False, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_mel(golden, case):
    flow, io = golden
    tokens, prompted, how = CASES[case]
    prompt = (io["in.prompt_token"], io["in.prompt_feat"]) if prompted else (io["in.prompt_token"][:, :0], io["in.prompt_feat"][:, :0])
    close(flow(io["in.token"][:, :tokens], *prompt, io["in.embedding"], **how), io[f"{case}.mel"], 1e-3)


@pytest.mark.parametrize("kind", ["full", "stream"])
def test_network(golden, kind):
    flow, io = golden
    net = flow.dit
    x, mu, cond = (io[f"dit.in.{n}"].swapaxes(1, 2) for n in ("x", "mu", "cond"))
    spks, t = io["dit.in.spks"], io["dit.in.t"]
    mask = net.chunk_mask(0, x.shape[1]) if kind == "stream" else None
    modulations = net.modulations(t[:1])[0]
    near = lambda a, name: np.testing.assert_allclose(  # noqa: E731
        np.array(a), np.array(io[f"dit.{kind}.{name}"]), atol=1e-4 * np.abs(np.array(io[f"dit.{kind}.{name}"])).max(), rtol=0)  # fmt: skip
    near(mx.broadcast_to(net.time_embedding(t[:1]), (2, 128)), "time_embed")
    wide = mx.broadcast_to(spks[:, None], (2, x.shape[1], 80))
    h = net.embed(mx.concatenate([x, cond, mu, wide], axis=-1))
    near(h, "input_embed")
    shift, scale = modulations[0][:2]
    near(dit.norm(h, scale, shift), "block0.attn_norm_x")
    near(net.blocks[0].attention(dit.norm(h, scale, shift), mask, None), "block0.attn")
    h = net.blocks[0](h, modulations[0], mask)
    near(h, "block0")
    h = net.blocks[1](h, modulations[1], mask)
    near(h, "block1")
    near(dit.norm(h, *modulations[2]), "norm_out")
    close(net(x, cond, mu, spks, modulations, mask), io[f"dit.{kind}.out"], 1e-4)


@pytest.fixture
def watched(monkeypatch):
    """All calls of the network: (x, cond, mu, spks, v)."""
    calls, call = [], dit.DiT.__call__

    def watch(self, *args, **how):
        v = call(self, *args, **how)
        calls.append((*args[:4], v))
        return v

    monkeypatch.setattr(dit.DiT, "__call__", watch)
    return calls


def test_what_the_network_takes_and_gives(golden, watched):
    flow, io = golden
    np.testing.assert_allclose(cfm.times(10)[0], np.array(io["nostream_final.t"])[:, 0], atol=1e-6)
    flow(io["in.token"], io["in.prompt_token"], io["in.prompt_feat"], io["in.embedding"])
    assert len(watched) == 10
    for step in (0, 1, 9):
        x, cond, mu, spks, v = watched[step]
        for name, ours in (("cond", cond), ("mu", mu)):
            close(ours, io[f"nostream_final.{name}"], 1e-4)
        close(spks[:, None], io["nostream_final.spks"][:, :, None], 1e-4)
        close(x, io[f"nostream_final.step{step}.x"], 1e-4)
        close(v, io[f"nostream_final.step{step}.v"], 1e-4)
    assert mx.array_equal(io["nostream_final.mask"], mx.ones((2, 1, 206)))  # upstream masks nothing, we have none
    np.testing.assert_allclose(noise.cfm_noise(206)[0].T, np.array(io["in.rand_noise"])[0], atol=1e-6)


def test_look_ahead(golden):
    flow, io = golden
    x = io["prelookahead.in"]
    np.testing.assert_allclose(np.array(flow.pre_lookahead_layer(x)[0]), np.array(io["prelookahead.out"]), atol=1e-4)
    got, _ = flow.pre_lookahead_layer(x[:, :-3], x[:, -3:])
    np.testing.assert_allclose(np.array(got), np.array(io["prelookahead.ctx_out"]), atol=1e-4)


def test_full_size_takes_so_many_bytes_a_frame():
    stream = FlowStream.__new__(FlowStream)  # its weights stay lazy: nothing of the 1.3 GB is made
    stream.flow, stream.steps = Flow(FlowConfig.from_dict(FULL)), 10
    assert stream.bytes_per_frame == 2 * 2 * 10 * 22 * 1024 * 4  # k and v, two rows, steps, layers, width, fp32: 3.6 MB


def test_trained_model():
    folder = large("checkpoints", "cosyvoice3-tiny")
    weights = {k: t.numpy() for k, t in open_source(folder / "flow.pt").tensors.items()}
    config = {"vocab_size": 928, "dit": {"dim": 192, "depth": 8, "heads": 3}, "pre_lookahead_layer": {"channels": 192}}
    flow, io = load(config, weights), load_file(folder / "io.safetensors")
    voices = read_torch(folder / "spk2info.pt")
    told = json.loads((folder / "io.json").read_text())
    for name in ("s1", "s2"):
        embedding = mx.array(np.array(voices[told[name]["voice"]]["embedding"].numpy(), np.float32))
        tokens = mx.array(io[f"{name}.tokens"])[None]
        mel = flow(tokens, mx.zeros((1, 0), dtype=mx.int32), mx.zeros((1, 0, 80)), embedding.reshape(1, 192))
        close(mel, mx.array(io[f"{name}.mel"])[None], 1e-3)


@pytest.mark.slow
def test_full_size(watched):
    folder = cosyvoice_golden("real_size")
    spec = importlib.util.spec_from_file_location("seeded_weights", folder.parent / "seeded_weights.py")
    seeded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(seeded)
    flow = load(FULL, seeded.state_dict("v3.flow"))
    io = mx.load(str(folder / "v3.flow.safetensors"))
    mel = flow(io["in.token"], io["in.prompt_token"], io["in.prompt_feat"], io["in.embedding"])
    first, last = watched[0], watched[9]
    cases = {"mu": (first[2][:1], 1e-4), "step0.v": (first[4], 1e-3), "step9.x": (last[0][:1], 2e-3),
             "step9.v": (last[4], 2e-3), "mel": (mel, 2e-3)}  # fmt: skip
    for name, (ours, bound) in cases.items():
        theirs = np.array(io[name].swapaxes(1, 2))
        print(f"{name}: largest error {np.abs(np.array(ours) - theirs).max():.2g} of {np.abs(theirs).max():.3g}")
        np.testing.assert_allclose(np.array(ours), theirs, atol=bound, rtol=0)


def test_int8_layers(golden):
    from mlx_cosyh3.cosyvoice.model import quantize

    folder = cosyvoice_golden("v3_flow")
    flow = Flow(FlowConfig.from_dict(json.loads((folder / "config.json").read_text())))
    quantize(flow, {"mode": "int8"}, dit.quantizes)
    kinds = {n: type(m) for n, m in flow.named_modules()}
    assert kinds["dit.blocks.0.to_q"] is kinds["dit.blocks.1.ff_out"] is Int8Linear
    assert kinds["dit.proj_in"] is not Int8Linear and kinds["dit.blocks.0.modulation"] is not Int8Linear


@pytest.mark.parametrize("bad", [1, 2, 4])
def test_the_first_bad_step_is_named(bad):
    nan = lambda x, k: x * (float("nan") if k + 1 >= bad else 0.0)  # noqa: E731
    with pytest.raises(CosyH3Error, match=f"in step {bad} of 4"):
        cfm.euler(mx.ones((1, 3, 80)), 4, nan, 0.7)


@pytest.mark.parametrize("frames", [1, 7, 8, 9, 30])
@pytest.mark.parametrize("start", [0, 8, 16])
def test_chunk_mask(start, frames):
    mask = dit.chunk_mask(start, frames, 8)
    want = [[j < (i // 8 + 1) * 8 for j in range(start + frames)] for i in range(start, start + frames)]
    assert np.array(want).all() if mask is None else np.array_equal(np.array(mask), want)


def test_sanitize():
    a = np.zeros((4, 3, 5), np.float32)
    out = sanitize({"pre_lookahead_layer.conv1.weight": a, "decoder.estimator.rotary_embed.inv_freq": a[0]})
    assert list(out) == ["pre_lookahead_layer.conv1.weight"] and out["pre_lookahead_layer.conv1.weight"].shape == (4, 5, 3)
    with pytest.raises(CheckpointError, match="unknown tensor 'decoder.estimator.proj_outt.weight', nearest known: 'decoder.estimator.proj_out'"):
        sanitize({"decoder.estimator.proj_outt.weight": a})


def test_sanitize_twice(golden):
    folder = cosyvoice_golden("v3_flow")
    once = sanitize({k: t.numpy() for k, t in open_source(folder / "flow.pt").tensors.items()})
    twice = sanitize(once)
    assert list(once) == list(twice) and all(once[k] is twice[k] for k in once)
