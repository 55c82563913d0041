"""The model equals upstream's, number for number: logits, states, greedy ids, in every form and chunk length."""


import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3 import generate
from mlx_cosyh3.h3 import H3, H3Config
from tests.golden_data import H3_MODELS, SMALL, checkpoint_weights, golden_folder, large, load_golden, read_config

LOGITS, STATES = 1e-3, 2e-4


def cases(io):
    return sorted({key.split(".")[0] for key in io if key.endswith(".input_ids")})


def upstream_states(cache, i):
    """Layer i's state under upstream's names and axis orders."""
    s = cache.layers[i]
    if hasattr(s, "ssm"):
        ssm = s.ssm[:, :, 0, 0] if s.ssm.shape[2] == 1 else s.ssm.transpose(0, 2, 3, 1, 4, 5)
        return {"shift": s.shift, "ssm": ssm}
    return {"k": s.keys[:, :, : s.end].swapaxes(1, 2), "v": s.values[:, :, : s.end].swapaxes(1, 2)}


def assert_close(a, b, bound):
    assert a.shape == b.shape
    worst = mx.abs(a - b).max().item()
    assert worst <= bound, worst  # NaN fails, too


@pytest.mark.parametrize("name", H3_MODELS)
def test_full_forward(name):
    model, _, io = load_golden(name)
    for case in cases(io):
        assert_close(model(io[f"{case}.input_ids"]), io[f"{case}.logits"], LOGITS)


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
@pytest.mark.parametrize("name", H3_MODELS)
def test_prefill_states_and_steps(name, chunk):
    model, config, io = load_golden(name)
    checked = 0
    for case in cases(io):
        ids = io[f"{case}.input_ids"]
        cache = model.make_cache(ids.shape[0])
        assert_close(model.prefill(ids, cache, chunk=chunk), io[f"{case}.logits"][:, -1], LOGITS)
        for i in range(config["n_layer"]):
            for key, value in upstream_states(cache, i).items():
                if f"{case}.state.{i}.{key}" in io:  # headdim8: some cases have none
                    assert_close(value, io[f"{case}.state.{i}.{key}"], STATES)
                    checked += 1
        if f"{case}.step_ids" in io:
            steps = io[f"{case}.step_ids"]
            for t in range(steps.shape[1]):
                assert_close(model.step(steps[:, t], cache), io[f"{case}.step_logits"][:, t], LOGITS)
    assert checked >= 2 * config["n_layer"]


@pytest.mark.parametrize("name", H3_MODELS)
def test_greedy(name):
    model, _, io = load_golden(name)
    found = [case for case in cases(io) if f"{case}.greedy" in io]
    for case in found:
        for prompt, want in zip(io[f"{case}.input_ids"].tolist(), io[f"{case}.greedy"].tolist()):
            cache = model.make_cache()
            logits = model.prefill(mx.array([prompt]), cache)
            got = []
            for _ in want:
                got.append(logits[0].argmax().item())
                logits = model.step(mx.array([got[-1]]), cache)
            assert got == want
    assert found


def test_end_of_text_stops():
    """Upstream's `generate` with an eos id: the eos is the last token that is kept."""
    model, config, io = load_golden("hybrid")
    ends = H3(H3Config.from_dict(config | {"eos_token_id": io["eos.token"].item()}))
    ends.load_weights(checkpoint_weights(golden_folder("hybrid") / "model.pt"))
    prompt = io["b1_l7.input_ids"][0].tolist()
    result = generate(ends, prompt, temperature=0, max_tokens=64)
    assert prompt + result.tokens == io["eos.sequence"].tolist()
    assert result.finish_reason == "stop"


def test_hidden_states():
    """Layer by layer, so that an error names its place."""
    model, _, io = load_golden("hybrid")
    hidden = mx.load(str(large("golden", "h3", "hybrid", "hidden.safetensors")))
    ids = io["b3_l37.input_ids"]
    cache, lengths = model.make_cache(3), np.full(3, ids.shape[1])
    x = model.embeddings(ids)
    assert_close(x, hidden["embed"], 1e-6)
    r = 0
    for i, (layer, state) in enumerate(zip(model.layers, cache.layers)):
        r = r + x
        h = layer.norm1(r)
        assert_close(h, hidden[f"layer{i}.norm1"], 1e-4)
        x = layer.mixer(h, state, lengths if hasattr(state, "ssm") else 0)
        assert_close(x, hidden[f"layer{i}.mixer"], 2e-4)
        r = r + x
        x = layer.mlp(layer.norm2(r))
        assert_close(x, hidden[f"layer{i}.out"], 2e-4)
    assert_close(model.norm_f(r + x), hidden["ln_f"], 2e-4)


LEGACY = ["lightning_new_names", "lightning_old_names", "plain_old_names", "plain_new_prefix_old_norms"]


@pytest.mark.parametrize("file", LEGACY)
def test_legacy_layouts_give_the_same_weights(file):
    small = SMALL / "h3" / "legacy" / f"{file}.pt"
    path = small if small.exists() else large("golden", "h3", "legacy", f"{file}.pt")
    want = dict(checkpoint_weights(SMALL / "h3" / "hybrid" / "model.pt"))
    got = dict(checkpoint_weights(path))
    assert got.keys() == want.keys()
    assert all(mx.array_equal(got[name], want[name]).item() for name in want)


@pytest.mark.half
def test_half_precision():
    """The only fp16 on the CPU stream: linear layers, embedding and norms in half, SSM and states fp32."""
    io = mx.load(str(large("golden", "h3", "hybrid", "io.safetensors")))
    folder = golden_folder("hybrid")
    model = H3(H3Config.from_dict(read_config(folder)))
    model.load_weights(checkpoint_weights(folder / "model.pt", half=True))
    cache = model.make_cache(3)
    ids, steps, want = io["b3_l37.input_ids"], io["b3_l37.step_ids"], io["fp16.b3_l37.logits"]
    assert_close(model(ids, cache).astype(mx.float32), want[:, :37].astype(mx.float32), 0.25)
    assert cache.layers[0].ssm.dtype == cache.layers[0].shift.dtype == mx.float32
    for t in range(steps.shape[1]):
        logits = model.step(steps[:, t], cache)
        assert logits.dtype == mx.float16
        assert_close(logits.astype(mx.float32), want[:, 37 + t].astype(mx.float32), 0.25)
