"""load: what it accepts, and the one line it says otherwise."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3 import generate, load
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.int8 import Int8Embedding, Int8Linear, quantize_int8
from mlx_cosyh3.load import EMBEDDED, find_model
from tests.small_model import write_model


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "small")


def edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_embedded_model(tmp_path, monkeypatch):
    """Without a name; the folder one happens to be in does not matter."""
    (tmp_path / "h3-tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    model = load()
    assert isinstance(model.embeddings, Int8Embedding) and isinstance(model.layers[0].mlp.fc1, Int8Linear)
    assert model.tokenizer.vocab_size == model.config.vocab_size == 4096
    assert generate(model, "It was", max_tokens=3, seed=1).text
    size = sum(f.stat().st_size for f in (EMBEDDED / "h3-tiny").iterdir())
    assert size <= 12e6


def test_several_shards(folder):
    weights = mx.load(str(folder / "model.safetensors"))
    want = generate(load(folder), "the", max_tokens=5, temperature=0).tokens
    half = len(weights) // 2
    for n, names in enumerate((list(weights)[:half], list(weights)[half:])):
        mx.save_safetensors(str(folder / f"model-0000{n + 1}-of-00002.safetensors"), {k: weights[k] for k in names})
    (folder / "model.safetensors").unlink()
    assert generate(load(folder), "the", max_tokens=5, temperature=0).tokens == want


def test_unknown_config_keys_are_ignored(folder):
    edit(folder, something_new=[1, 2])
    assert load(folder).config.d_model == 16


def test_kv_window(folder):
    assert load(folder, kv_window=7).make_cache().layers[1].window == 7
    for bad in (0, -1, 1.5):
        with pytest.raises(CosyH3Error, match="kv_window"):
            load(folder, kv_window=bad)


def test_refusals(folder, tmp_path):
    def refused(words, path=folder):
        with pytest.raises(CosyH3Error, match=words) as e:
            load(path)
        assert "\n" not in str(e.value)

    refused("neither a folder here nor a hub repo id", tmp_path / "nothing")
    refused("is not a model folder", folder / "config.json")
    (tmp_path / "empty").mkdir()
    refused("has no config.json", tmp_path / "empty")
    for changes, words in (
        ({"model_type": "h4"}, "model type 'h4' .* nearest known: 'h3'"),
        ({"model_type": None}, "is not a model's config"),
        ({"d_model": None}, "lacks a value"),
        ({"d_inner": 33}, "has shape"),
        ({"n_layer": 4}, "lacks tensor"),
        ({"n_layer": 2}, "unknown tensor"),
        ({"quantization": {"mode": "mxfp4"}}, "quantization mode 'mxfp4'"),
    ):
        original = (folder / "config.json").read_text()
        edit(folder, **changes)
        refused(words)
        (folder / "config.json").write_text(original)
    (folder / "config.json").write_text("{")
    refused("is not a model's config")


def test_damaged_weights(folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:1000])
    with pytest.raises(CheckpointError, match="cannot read"):
        load(folder)
    file.unlink()
    with pytest.raises(CheckpointError, match="holds no model"):
        load(folder)


def test_no_tokenizer(folder):
    """A model for ids alone loads; text for it is one clear line."""
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    model = load(folder)
    with pytest.raises(CosyH3Error, match="no tokenizer"):
        generate(model, "the")
    assert len(generate(model, [1, 2, 3], max_tokens=4, temperature=0).tokens) == 4


@pytest.mark.parametrize("offline, words", [("1", "HF_HUB_OFFLINE"), ("", "check the network")])
def test_no_network(tmp_path, monkeypatch, offline, words):
    """The hub's address is a port where nobody listens."""
    import huggingface_hub.constants as hub

    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", bool(offline))
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CosyH3Error, match=words) as e:
        find_model("someone/some-model")
    assert "\n" not in str(e.value)


def test_hub_snapshot_in_the_cache_is_used_offline(folder, tmp_path, monkeypatch):
    """A repo that was downloaded before loads without a network, at the revision asked for."""
    import huggingface_hub

    seen = {}

    def snapshot(repo, revision=None, allow_patterns=None, tqdm_class=None):
        seen.update(repo=repo, revision=revision, patterns=allow_patterns)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert load("someone/some-model", revision="v1").config.d_model == 16
    assert seen["repo"] == "someone/some-model" and seen["revision"] == "v1" and "*.safetensors" in seen["patterns"]


def test_a_checkpoint_on_the_hub_is_refused_before_it_is_fetched(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repo, allow_patterns=None, **more: asked.append(allow_patterns) or str(tmp_path)
    )
    for config in (None, '{"architectures": ["CosyVoice"]}'):
        if config is not None:
            (tmp_path / "config.json").write_text(config)
        with pytest.raises(CheckpointError, match="mlx_cosyh3 convert --model PATH_OR_REPO --out DIR"):
            load("someone/some-checkpoint")
    assert asked == [["config.json"]] * 2


def test_quantize_int8():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((7, 33)).astype(np.float32)
    w[2], w[3] = 0, 1e-44
    q, scale = quantize_int8(w)
    assert q.dtype == np.int8 and scale.dtype == np.float32 and np.abs(q).max() == 127
    assert (np.abs(q * scale[:, None] - w) <= scale[:, None] / 2 * (1 + 1e-6)).all()
    assert np.isfinite(scale).all() and (scale > 0).all()


@pytest.mark.parametrize("q", ["int8", 8, 4])
def test_quantised_round_trip(tmp_path, q):
    """convert -> load -> generate, and the tensors in the file are the ones in the model."""
    from mlx_cosyh3.convert import convert

    source = write_model(tmp_path / "source")
    convert(source, tmp_path / "q", quantize=q, tokenizer=str(source))
    model = load(tmp_path / "q")
    stored = mx.load(str(tmp_path / "q" / "model.safetensors"))
    from mlx.utils import tree_flatten

    parameters = dict(tree_flatten(model.parameters()))
    assert parameters.keys() == stored.keys()
    assert all(mx.array_equal(parameters[k], stored[k]).item() and parameters[k].dtype == stored[k].dtype for k in stored)
    assert len(generate(model, "the", max_tokens=4, temperature=0).tokens) == 4
    shutil.rmtree(tmp_path / "q")
