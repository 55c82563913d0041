"""CosyVoice 1's flow against upstream's tensors."""

import importlib.util
import json
import math

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.cosyvoice import cfm, flow_regulated, unet
from mlx_cosyh3.cosyvoice.flow_regulated import MelCache, RegulatedFlow, RegulatedFlowConfig, interpolate, sanitize
from mlx_cosyh3.cosyvoice.model import quantize
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.int8 import Int8Linear, quantize_int8
from tests.golden_data import cosyvoice_golden

ENCODER = {"input_size": 32, "output_size": 32, "attention_heads": 2, "linear_units": 48, "num_blocks": 2}
DECODER = {"channels": [32, 32], "num_heads": 2, "attention_head_dim": 16, "n_blocks": 1, "num_mid_blocks": 1}
TINY = {"vocab_size": 30, "input_size": 32, "encoder": ENCODER, "decoder": DECODER}
FULL = {
    "vocab_size": 4096, "input_size": 512,
    "encoder": {"input_size": 512, "output_size": 512, "attention_heads": 8, "linear_units": 2048, "num_blocks": 6},
    "decoder": {"channels": [256, 256], "num_heads": 8, "attention_head_dim": 64, "n_blocks": 4, "num_mid_blocks": 12},
}  # fmt: skip


def load(config, weights):
    flow = RegulatedFlow(RegulatedFlowConfig.from_dict(config))
    flow.load_weights([(k, mx.array(np.ascontiguousarray(v))) for k, v in sanitize(weights).items()])
    mx.eval(flow.parameters())
    return flow


def upstream_weights():
    return {k: t.numpy() for k, t in open_source(cosyvoice_golden("v1_flow") / "flow.pt").tensors.items()}


@pytest.fixture(scope="module")
def golden():
    folder = cosyvoice_golden("v1_flow")
    flow = load(json.loads((folder / "config.json").read_text()), upstream_weights())
    return flow, mx.load(str(folder / "io.safetensors"))


def random_flow(config=TINY):
    flow = RegulatedFlow(RegulatedFlowConfig.from_dict(config))
    keys = iter(mx.random.split(mx.random.key(0), 1000))
    draw = lambda a: mx.random.normal(a.shape, key=next(keys)) / math.prod(a.shape[1:]) ** 0.5  # noqa: E731
    flow.update(tree_map(draw, flow.parameters()))
    mx.eval(flow.parameters())
    return flow


@pytest.fixture(scope="module")
def tiny():
    """A random flow, its prompt, and 50 tokens [1, 50]."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 30, (1, 7)), rng.standard_normal((1, 12, 80)), rng.standard_normal((1, 192))
    prompt = [mx.array(a.astype(np.int32 if a.dtype.kind == "i" else np.float32)) for a in prompt]
    return random_flow(), prompt, mx.array(rng.integers(0, 30, (1, 50)))


def close(ours, theirs, tolerance):
    """`theirs` [B, C, T], as upstream lays it out; the tolerance is relative to its largest value."""
    theirs = np.array(theirs.swapaxes(1, 2))
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(np.array(ours), theirs, atol=tolerance * np.abs(theirs).max(), rtol=0)


CASES = {"a": (0, 61, True), "b_with_cache_from_a": (20, 55, True), "short": (0, 33, True), "noprompt": (0, 61, False)}


def run(golden, case, **how):
    flow, io = golden
    first, last, prompted = CASES[case]
    tokens, mel = io["in.prompt_token"], io["in.prompt_feat"]
    if not prompted:
        tokens, mel = tokens[:, :0], mel[:, :0]
    noise = io[f"{case}.z"].swapaxes(1, 2)
    return flow(io["in.token"][:, first:last], tokens, mel, io["in.embedding"], noise=noise, **how)


@pytest.mark.parametrize("case", CASES)
def test_mel_and_cache(golden, case):
    _, io = golden
    before = None
    if case == "b_with_cache_from_a":
        kept = io["a.cache_out"].transpose(3, 0, 2, 1)  # [2, 1, L, 80]
        before = MelCache(kept[0], kept[1])
    mel, cache = run(golden, case, cache=before)
    close(mel, io[f"{case}.mel"], 1e-3)
    for n, ours in enumerate((cache.noise, cache.mu)):
        close(ours, io[f"{case}.cache_out"][..., n], 1e-4)


def test_own_cache_goes_on_as_upstreams(golden):
    _, cache = run(golden, "a")
    mel, _ = run(golden, "b_with_cache_from_a", cache=cache)
    close(mel, golden[1]["b_with_cache_from_a.mel"], 1e-3)
    without, _ = run(golden, "b_with_cache_from_a")
    assert mx.abs(mel - without).max() > 0.1  # so that the cache is for something


def test_encoder_and_regulator(golden):
    flow, io = golden
    out = np.array(flow.encoder(io["enc.in"]))
    np.testing.assert_allclose(out, np.array(io["enc.out"]), atol=1e-4 * np.abs(out).max())
    x, M = io["reg.in"], io["in.prompt_feat"].shape[1]
    got = flow.length_regulator(x[:, :30], x[:, 30:], M, flow.frames(61), flow.frames(20))
    np.testing.assert_allclose(np.array(got), np.array(io["reg.out"]), atol=1e-4 * np.abs(got).max().item())


@pytest.fixture
def watched(monkeypatch):
    """All calls of the network: (x, cond, mu, spks, v)."""
    calls, call = [], unet.UNet.__call__

    def watch(self, *args):
        v = call(self, *args)
        calls.append((*args[:4], v))
        return v

    monkeypatch.setattr(unet.UNet, "__call__", watch)
    return calls


def test_what_the_network_takes_and_gives(golden, watched):
    _, io = golden
    run(golden, "a")
    assert len(watched) == 10
    np.testing.assert_allclose(cfm.times(10)[0], np.array(io["a.t"])[:, 0], atol=1e-6)
    for row in (0, 1):
        close(watched[0][0][row : row + 1], io["a.z"], 0)
    close(watched[0][2][:1], io["a.mu"], 1e-4)
    for step in (0, 9):
        close(watched[step][4], io[f"a.step{step}.v"], 1e-4)
    _, cond, mu, spks, _ = watched[3]
    assert mx.array_equal(cond[0, :51], io["in.prompt_feat"][0]) and not cond[0, 51:].any()
    assert not cond[1].any() and not mu[1].any() and not spks[1].any() and spks[0].any()


# torch.nn.functional.interpolate(mode="linear") of [0, 1, 4, 9, 16]
SQUARES = {1: [4.0], 3: [0.33333331, 4.0, 13.66666603], 5: [0.0, 1.0, 4.0, 9.0, 16.0],
           8: [0.0, 0.4375, 1.1875, 3.0625, 5.5625, 8.6875, 12.9375, 16.0]}  # fmt: skip
# and of 0, 1, 0, 1, ... 8600 times to 14812, at some places: they tell where torch's rounding puts them
FAR = {0: 0.0, 1: 0.3709155, 5: 0.69335675, 1000: 0.40063477, 7001: 0.64331055, 14000: 0.33496094, 14811: 1.0}


@pytest.mark.parametrize("size", SQUARES)
def test_interpolation_is_torchs(size):
    x = mx.array([0.0, 1, 4, 9, 16])[None, :, None]
    np.testing.assert_allclose(np.array(interpolate(x, size))[0, :, 0], SQUARES[size], atol=1e-6)


def test_interpolation_far_from_the_start():
    y = np.array(interpolate((mx.arange(8600) % 2).astype(mx.float32)[None, :, None], 14812))[0, :, 0]
    np.testing.assert_allclose(y[list(FAR)], list(FAR.values()), atol=1e-6)


@pytest.mark.parametrize("rate", [50, 25])
def test_numbers_of_frames(rate):
    flow = RegulatedFlow(RegulatedFlowConfig.from_dict(TINY | {"input_frame_rate": rate}))
    for tokens in range(3000):
        assert flow.frames(tokens) == int(tokens / rate * 22050 / 256)
        assert abs(flow.frames(tokens) - tokens * 22050 // (rate * 256)) <= 1
    assert flow.frames(20) == {50: 34, 25: 68}[rate]
    assert flow.frames(256) == {50: 441, 25: 882}[rate]  # whole: nothing is lost to rounding


@pytest.mark.parametrize("rate", [50, 25])
@pytest.mark.parametrize("count", [1, 2, 19, 20, 40, 41, 42, 50])
def test_any_number_of_tokens(tiny, rate, count):
    _, prompt, tokens = tiny
    flow = random_flow(TINY | {"input_frame_rate": rate})
    for some in (prompt, [prompt[0][:, :0], prompt[1][:, :0], prompt[2]]):
        mel, cache = flow(tokens[:, :count], *some, key=mx.random.key(3), steps=1)
        M, n = some[1].shape[1], flow.frames(count)
        assert mel.shape == (1, n, 80) and mx.isfinite(mel).all()
        assert cache.noise.shape == cache.mu.shape == (1, M + min(34, M + n), 80)
        again, _ = flow(tokens[:, -1:], *some, key=mx.random.key(3), steps=1, cache=cache)  # it is longer than this
        assert again.shape == (1, flow.frames(1), 80)


def test_chunks_share_their_overlap(tiny):
    flow, prompt, tokens = tiny
    _, cache = flow(tokens[:, :40], *prompt, key=mx.random.key(1), steps=1)
    noise = mx.random.normal((1, 12 + flow.frames(30), 80), key=mx.random.key(2))
    mu = flow.encode(tokens[:, 20:], prompt[0], 12)
    ours, guess = cache.overwrite(noise, mu)
    first = mx.random.normal((1, 12 + flow.frames(40), 80), key=mx.random.key(1))
    assert mx.array_equal(ours[:, :12], first[:, :12]) and mx.array_equal(ours[:, 12 : 12 + 34], first[:, -34:])
    assert mx.array_equal(ours[:, 46:], noise[:, 46:]) and mx.array_equal(guess[:, 46:], mu[:, 46:])
    assert ours.shape == noise.shape and guess.shape == mu.shape


def test_the_key_decides(tiny):
    flow, prompt, tokens = tiny
    mels = [flow(tokens, *prompt, key=mx.random.key(k), steps=2)[0] for k in (1, 1, 2)]
    assert mx.array_equal(mels[0], mels[1]) and not mx.allclose(mels[0], mels[2])
    noise = mx.random.normal((1, 12 + flow.frames(50), 80), key=mx.random.key(1))
    assert mx.array_equal(flow(tokens, *prompt, noise=noise, steps=2)[0], mels[0])


def test_no_tokens(tiny):
    flow, prompt, tokens = tiny
    _, cache = flow(tokens, *prompt, key=mx.random.key(0), steps=1)
    mel, same = flow(tokens[:, :0], *prompt, key=mx.random.key(0), cache=cache)
    assert mel.shape == (1, 0, 80) and same is cache


def test_bad_input(tiny):
    flow, prompt, tokens = tiny
    key = mx.random.key(0)
    with pytest.raises(CosyH3Error, match="outside of 0 to 29: 3 to 30"):
        flow(mx.array([[3, 30]]), prompt[0][:, :0], prompt[1][:, :0], prompt[2], key=key)
    with pytest.raises(CosyH3Error, match="7 speech tokens and 0 mel frames: it must have both"):
        flow(tokens, prompt[0], prompt[1][:, :0], prompt[2], key=key)
    with pytest.raises(CosyH3Error, match="0 speech tokens and 12 mel frames"):
        flow(tokens, prompt[0][:, :0], *prompt[1:], key=key)
    with pytest.raises(CosyH3Error, match=r"shape \(1, 9, 80\); 50 tokens take \(1, 98, 80\)"):
        flow(tokens, *prompt, noise=mx.zeros((1, 9, 80)))
    with pytest.raises(CosyH3Error, match="0 steps"):
        flow(tokens, *prompt, key=key, steps=0)
    for how in ({}, {"key": key, "noise": mx.zeros((1, 98, 80))}):
        with pytest.raises(TypeError, match="either noise or key"):
            flow(tokens, *prompt, **how)
    with pytest.raises(CosyH3Error, match=r"the flow gave a value that is not finite .* in step 1 of 3"):
        flow(tokens, prompt[0], prompt[1] * float("inf"), prompt[2], key=key, steps=3)


def test_progress_counts_the_steps(tiny):
    flow, prompt, tokens = tiny
    seen = []
    flow(tokens, *prompt, key=mx.random.key(0), steps=4, on_step=seen.append)
    assert seen == [1, 2, 3, 4]


def test_bf16_weights_keep_fp32_outside(tiny):
    flow, prompt, tokens = tiny
    half = RegulatedFlow(RegulatedFlowConfig.from_dict(TINY))
    half.update(tree_map(lambda a: a.astype(mx.bfloat16), flow.parameters()))
    kept = []
    unwatched = half.unet.time_embedding(np.zeros(1, np.float32))
    assert unwatched.dtype == half.encoder(mx.zeros((1, 3, 32), dtype=mx.bfloat16)).dtype == mx.bfloat16
    for f in (flow, half):
        mel, cache = f(tokens, *prompt, key=mx.random.key(0), steps=2)
        assert mel.dtype == cache.noise.dtype == cache.mu.dtype == mx.float32
        kept.append(mel)
    assert 0 < mx.abs(kept[0] - kept[1]).max() < 0.1 * mx.abs(kept[0]).max()


@pytest.mark.parametrize("how", [{"mode": "int8"}, {"mode": "affine", "bits": 8, "group_size": 32}])
def test_quantised(tiny, how):
    flow, prompt, tokens = tiny
    linear = {n: m for n, m in flow.named_modules() if flow_regulated.quantizes(n)}
    assert len(linear) == 2 * 6 + 5 * 6  # of the encoder: q, k, v, out and two; of the U-Net's levels the same
    other = random_flow()
    quantize(other, how, flow_regulated.quantizes)
    if how["mode"] == "int8":
        for name, layer in other.named_modules():
            assert isinstance(layer, Int8Linear) == (name in linear)
            if name in linear:
                q, scale = quantize_int8(np.array(linear[name].weight))
                layer.weight, layer.scale = mx.array(q), mx.array(scale)
                if "bias" in layer:
                    layer.bias = linear[name].bias
    a, b = (f(tokens, *prompt, key=mx.random.key(0), steps=2)[0] for f in (flow, other))
    assert b.dtype == mx.float32
    assert 0 < mx.abs(a - b).max() < 0.05 * mx.abs(a).max()


def test_full_size_names_and_shapes():
    known = json.loads(cosyvoice_golden("inventory.json").read_text())["v1.flow"]["keys"]
    theirs = sanitize({k: np.broadcast_to(np.float32(0), shape) for k, (shape, _) in known.items()})
    flow = RegulatedFlow(RegulatedFlowConfig.from_dict(FULL))  # its weights stay lazy
    ours = {k: a.shape for k, a in tree_flatten(flow.parameters())}
    assert ours == {k: a.shape for k, a in theirs.items()} and len(ours) == 1185
    assert sum(a.size for a in theirs.values()) == 104_874_752


def test_sanitize_twice_and_views():
    weights = upstream_weights()
    once = sanitize(weights)
    twice = sanitize(once)
    assert list(once) == list(twice) and all(once[k] is twice[k] for k in once)
    assert np.shares_memory(once["length_regulator.convs.1.weight"], weights["length_regulator.model.3.weight"])


@pytest.mark.parametrize(
    "name, hint",
    [
        ("decoder.estimator.final_projj.weight", ", nearest known: 'decoder.estimator.final_proj'"),
        ("encoder_projj.bias", ", nearest known: 'encoder_proj'"),
        ("encoder_proj.bios", ", nearest known: 'encoder_proj'"),
        ("length_regulator.model.2.weight", ""),  # a Mish
        ("length_regulator.model.13.weight", ""),
        ("encoder.encoders.0.conv_module.norm.weight", ""),
        ("rand_noise", ""),
    ],
)
def test_sanitize_names_what_it_does_not_know(name, hint):
    with pytest.raises(CheckpointError, match=f"unknown tensor '{name}'{hint}"):
        sanitize(upstream_weights() | {name: np.zeros((3, 3), np.float32)})


@pytest.mark.parametrize("name", TINY)
def test_a_config_must_be_complete(name):
    with pytest.raises(CheckpointError, match=f"lacks {name}"):
        RegulatedFlowConfig.from_dict({k: v for k, v in TINY.items() if k != name})


@pytest.mark.parametrize(
    "change, message",
    [
        ({"output_size": 100}, "output_size = 100; only 80"),
        ({"length_regulator": {"channels": 64}}, "length_regulator.channels = 64; only 80"),
        ({"encoder": ENCODER | {"input_layer": "conv2d"}}, "flow.encoder.input_layer = 'conv2d'; only 'linear'"),
        ({"input_size": 64}, "flow.encoder.input_size = 32; only 64"),
    ],
)
def test_other_flows_are_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        RegulatedFlowConfig.from_dict(TINY | change)


@pytest.mark.slow
def test_full_size(watched):
    folder = cosyvoice_golden("real_size")
    spec = importlib.util.spec_from_file_location("seeded_weights", folder.parent / "seeded_weights.py")
    seeded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(seeded)
    flow, io = load(FULL, seeded.state_dict("v1.flow")), mx.load(str(folder / "v1.flow.safetensors"))
    noise = io["in.z"].swapaxes(1, 2)
    mel, _ = flow(io["in.token"], io["in.prompt_token"], io["in.prompt_feat"], io["in.embedding"], noise=noise)
    first, last = watched[0], watched[9]
    cases = {"mu": (first[2][:1], 1e-4), "step0.v": (first[4], 1e-3), "step9.x": (last[0][:1], 2e-3),
             "step9.v": (last[4], 2e-3), "mel": (mel, 2e-3)}  # fmt: skip
    for name, (ours, bound) in cases.items():
        theirs = np.array(io[name].swapaxes(1, 2))
        print(f"{name}: largest error {np.abs(np.array(ours) - theirs).max():.2g} of {np.abs(theirs).max():.3g}")
        np.testing.assert_allclose(np.array(ours), theirs, atol=bound, rtol=0)
