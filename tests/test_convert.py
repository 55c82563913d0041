"""Conversion: names and config. Tiny random models, and the goldens. Formats and sources have files of their own."""

import json
import re

import mlx.core as mx
import numpy as np
import pytest
from tests.h3_checkpoints import Lazy, golden, make, save, state_dict
from safetensors.numpy import load_file

import mlx_cosyh3
from mlx_cosyh3.convert import infer_config, sanitize
from mlx_cosyh3.convert import h3
from mlx_cosyh3.errors import CheckpointError, CosyH3Error

LEGACY = ("lightning_new_names", "plain_old_names", "lightning_old_names", "plain_new_prefix_old_norms")
EMBEDDING = "backbone.embeddings.word_embeddings.weight"


@pytest.fixture
def source(tmp_path):
    """A small hybrid model: 2 heads, named by its config.json."""
    return save(tmp_path / "source", state_dict(), config={"num_heads": 2}).parent


def weights_of(folder):
    out = {}
    for path in sorted(folder.glob("model*.safetensors")):
        out |= mx.load(str(path))
    return out


# Names


def test_sanitize_renames_everything_a_model_has():
    tensors = state_dict(rotary=16)
    out = sanitize(tensors)
    config = infer_config(tensors, heads=2)
    assert {k: v.shape for k, v in out.items()} == h3.expected_shapes(config)
    kernel = "backbone.layers.0.mixer.kernel.kernel"
    assert np.array_equal(out["layers.0.mixer.ssm.C"], tensors[f"{kernel}.C"][0])
    assert np.array_equal(
        out["layers.0.mixer.shift.C"], tensors["backbone.layers.0.mixer.ssm_k_kernel.kernel.C"][0]
    )
    assert out["layers.2.mixer.ssm.D"] is tensors["backbone.layers.2.mixer.D"]
    assert out["norm_f.bias"] is tensors["backbone.ln_f.bias"]


@pytest.mark.parametrize("kind", ["numpy", "mlx", "lazy"])
def test_sanitize_is_pure_and_idempotent(kind):
    wrap = {"numpy": lambda a: a, "mlx": mx.array, "lazy": Lazy}[kind]
    tensors = {k: wrap(v) for k, v in state_dict(rotary=16).items()}
    before = dict(tensors)
    once = sanitize(tensors)
    twice = sanitize(once)
    assert tensors == before or all(tensors[k] is before[k] for k in before)
    assert list(twice) == list(once) and all(twice[k] is once[k] for k in once)


def test_unknown_key_names_the_nearest():
    with pytest.raises(
        CheckpointError,
        match="unknown tensor 'backbone.layers.0.mlp.fc3.weight', nearest known: "
        "'backbone.layers.0.mlp.fc[12].weight'",
    ):
        sanitize({**state_dict(), "backbone.layers.0.mlp.fc3.weight": np.zeros(3)})


def test_one_tensor_under_two_names():
    tensors = state_dict()
    with pytest.raises(CheckpointError, match="both 'norm_f.bias'"):
        sanitize({**tensors, "norm_f.bias": tensors["backbone.ln_f.bias"]})


@pytest.mark.parametrize("layout", LEGACY)
def test_legacy_layouts_give_the_same_weights_bit_for_bit(layout, tmp_path):
    plain = golden("hybrid", "model.pt")
    make(plain, tmp_path / "plain")
    make(golden("legacy", f"{layout}.pt"), tmp_path / "legacy", heads=4)
    for name in ("model.safetensors", "model.safetensors.index.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "legacy" / name).read_bytes()


@pytest.mark.parametrize("prefix, old_names", [("backbone.", False), ("s4seq.encoder.", True)])
def test_old_norm_order_of_a_model_made_here(prefix, old_names):
    """The renames undone by hand: norms numbered after each residual add, with the older prefix or the newer."""
    plain, last = state_dict(n_layer=3), 2
    old = {}
    for key, array in plain.items():
        where, part = key.rsplit(".", 1)
        for i in range(last + 1):
            if where == f"backbone.layers.{i}.norm1":
                where = f"backbone.layers.{i - 1}.norm2" if i else "backbone.norm"
            elif where == f"backbone.layers.{i}.norm2":
                where = f"backbone.layers.{i}.norm1"
            else:
                continue
            break
        if where == "backbone.ln_f":
            where = f"backbone.layers.{last}.norm2"
        if old_names:
            where = where.replace("backbone.embeddings.word_embeddings", "embedding").replace("backbone.", prefix)
        old[f"{where}.{part}"] = array
    assert len(old) == len(plain) and "backbone.ln_f.weight" not in old
    wanted, got = sanitize(plain), sanitize(old)
    assert got.keys() == wanted.keys() and all(np.array_equal(got[k], wanted[k]) for k in wanted)


@pytest.mark.parametrize("model", ["pure", "hybrid", "rotary", "headdim8"])
def test_converted_goldens_give_upstreams_logits(model, tmp_path):
    io = load_file(golden(model, "io.safetensors"))
    make(golden(model, "model.pt"), tmp_path / "out")
    case = min(k for k in io if k.endswith("input_ids")).removesuffix(".input_ids")
    logits = mlx_cosyh3.load(tmp_path / "out")(mx.array(io[f"{case}.input_ids"]))
    assert np.abs(np.array(logits) - io[f"{case}.logits"]).max() < 1e-3


@pytest.mark.parametrize(
    "name, keys",
    [
        ("GPT-2", ["wte.weight", "wpe.weight", "h.0.attn.c_attn.weight", "h.0.attn.bias"]),
        ("Llama", ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"]),
        ("Qwen2", ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"]),
        ("Mamba", ["backbone.embedding.weight", "backbone.layers.0.mixer.A_log", "backbone.norm_f.weight"]),
        ("GPT-NeoX", ["gpt_neox.embed_in.weight"]),
        ("Whisper", ["model.encoder.conv1.weight", "model.decoder.embed_tokens.weight"]),
        ("llm.pt", ["llm.model.model.layers.0.self_attn.q_proj.weight", "speech_embedding.weight"]),
        ("flow.pt", ["decoder.estimator.transformer_blocks.0.attn.to_q.weight", "spk_embed_affine_layer.weight"]),
        ("hift.pt", ["m_source.l_linear.weight", "conv_pre.weight"]),
        ("BERT", ["embeddings.word_embeddings.weight", "encoder.layer.0.attention.self.query.weight"]),
    ],
)
def test_other_architectures_are_named(name, keys, tmp_path):
    path = save(tmp_path, {k: np.zeros((8, 8), np.float32) for k in keys})
    with pytest.raises(CheckpointError, match=f"{name}.*not an H3 checkpoint"):
        make(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Head, rotary


def test_tied_head(tmp_path):
    tensors = state_dict()
    copied = {**tensors, "lm_head.weight": tensors["lm_head.weight"].copy()}
    absent = {k: v for k, v in tensors.items() if k != "lm_head.weight"}
    for i, case in enumerate((tensors, copied, absent)):
        report = make(save(tmp_path / str(i), case), tmp_path / f"out{i}", heads=2)
        assert report.config["tie_word_embeddings"] and "lm_head.weight" not in weights_of(tmp_path / f"out{i}")


@pytest.mark.parametrize("quantize", [None, "int8", 4])
def test_untied_head_is_kept(tmp_path, quantize):
    tensors = state_dict()
    tensors["lm_head.weight"] = tensors["lm_head.weight"].copy()
    tensors["lm_head.weight"][103, 63] = np.nextafter(tensors["lm_head.weight"][103, 63], np.float32(9))
    report = make(save(tmp_path / "a", tensors), tmp_path / "out", heads=2, quantize=quantize)
    assert report.config["tie_word_embeddings"] is False and "lm_head.weight" in weights_of(tmp_path / "out")
    assert np.isfinite(np.array(mlx_cosyh3.load(tmp_path / "out")(mx.array([[1, 2]])))).all()


def test_inv_freq_of_another_base_is_refused():
    tensors = state_dict(rotary=16)
    name = "backbone.layers.1.mixer.rotary_emb.inv_freq"
    half = {**tensors, name: tensors[name].astype(np.float16)}
    assert infer_config(half, heads=2)["rotary_emb_dim"] == 16
    with pytest.raises(CheckpointError, match="inv_freq' is not rotary embedding with base 10000"):
        sanitize({**tensors, name: tensors[name] ** 1.1})


# Config


@pytest.mark.parametrize(
    "shape",
    [
        dict(d_model=32, n_layer=2, attention=(), d_state=16),
        dict(d_model=32, n_layer=1, attention=(0,), rows=8, rotary=8),
        dict(d_model=48, n_layer=5, attention=(1, 4), head_dim=4, d_inner=100),
        dict(d_model=64, n_layer=2, attention=(1,), n_ssm=4, head_dim=2, d_state=32, rotary=32),
    ],
)
def test_config_from_shapes(shape):
    config = infer_config(state_dict(**shape), heads=2)
    wanted = {
        k: v for k, v in shape.items() if k in ("d_model", "n_layer", "d_inner", "d_state", "head_dim", "n_ssm")
    }
    assert wanted == {k: config[k] for k in wanted}
    assert config["attn_layer_idx"] == list(shape["attention"])
    assert config["rotary_emb_dim"] == shape.get("rotary", 0)
    assert config["num_heads"] == (2 if shape["attention"] else 0)
    assert config["vocab_size"] == config["padded_vocab_size"] == shape.get("rows", 104)


@pytest.mark.parametrize(
    "D, n, attention, heads, rotary, parameters",
    [
        (768, 12, (6,), 12, 0, 126_387_456),
        (1024, 24, (8, 16), 16, 0, 361_058_304),
        (2048, 24, (8, 16), 16, 0, 1_326_096_384),
        (2560, 32, (8, 16, 24), 20, 0, 2_670_307_840),
        (2560, 32, (10, 21), 20, 64, 2_671_134_720),
    ],
)
def test_released_models(D, n, attention, heads, rotary, parameters):
    """Heads and rotary dims come from the table; the parameter counts are the published files'."""
    base = dict(
        d_model=D, n_layer=n, d_inner=4 * D, d_state=64, head_dim=1, n_ssm=D, attn_layer_idx=list(attention)
    )
    shapes = h3.expected_shapes({**base, "padded_vocab_size": 50264, "tie_word_embeddings": True})
    config = infer_config({k: Lazy(shape=s) for k, s in shapes.items()}, vocab_size=50257, eos_token_id=50256)
    assert (config["num_heads"], config["rotary_emb_dim"], config["d_inner"]) == (heads, rotary, 4 * D)
    assert (config["vocab_size"], config["padded_vocab_size"], config["eos_token_id"]) == (50257, 50264, 50256)
    assert sum(int(np.prod(s)) for s in shapes.values()) == parameters


def test_heads():
    with pytest.raises(CheckpointError, match="none of the released models.*--heads"):
        infer_config(state_dict())
    with pytest.raises(CheckpointError, match="5 attention heads do not divide d_model 64"):
        infer_config(state_dict(), heads=5)
    with pytest.raises(CheckpointError, match="16 rotary dims do not fit an attention head of 8 dims"):
        infer_config(state_dict(rotary=16), heads=8)


@pytest.mark.parametrize(
    "name, shape, message",
    [
        ("2.mlp.fc2.weight", (256, 64), "2.mlp.fc2.weight' has the shape [256, 64], expected [64, 256]"),
        ("0.mlp.fc1.weight", (128, 64), "0.mlp.fc1.weight' has the shape [128, 64], expected [256, 64]"),
        ("1.mixer.Wqkv.bias", (64,), "1.mixer.Wqkv.bias' has the shape [64], expected [192]"),
        ("0.mixer.kernel.kernel.B", (64, 64), "0.mixer.ssm.B' has the shape [64, 64], expected [64, 32, 2]"),
        (
            "0.mixer.kernel.kernel.C",
            (2, 64, 32, 2),
            "0.mixer.kernel.kernel.C' has the shape [2, 64, 32, 2]: its first",
        ),
    ],
)
def test_mixed_up_shapes_name_tensor_shape_and_expected(name, shape, message):
    with pytest.raises(CheckpointError, match=re.escape(message)):
        infer_config({**state_dict(), f"backbone.layers.{name}": np.zeros(shape, np.float32)}, heads=2)


def test_missing_tensors_are_named():
    def without(*words):
        return {k: v for k, v in state_dict().items() if not any(w in k for w in words)}

    with pytest.raises(CheckpointError, match="lacks the tensor 'layers.2.mlp.fc1.bias'"):
        infer_config(without("layers.2.mlp.fc1.bias"), heads=2)
    with pytest.raises(CheckpointError, match="lacks the tensor 'layers.0.mixer.ssm.C' and 5 more"):
        infer_config(without("layers.0.mixer.kernel", "layers.2.norm2.bias"), heads=2)
    with pytest.raises(CheckpointError, match="layer 1 is missing, though there is a layer 2"):
        infer_config(without("layers.1."), heads=2)
    with pytest.raises(CheckpointError, match="the embedding is missing"):
        infer_config(without("embeddings", "lm_head"), heads=2)
    with pytest.raises(CheckpointError, match="holds no layers"):
        infer_config(without("layers"), heads=2)


def test_a_layer_number_beyond_reason_is_an_error_at_once():
    with pytest.raises(CheckpointError, match="layer 3 is missing"):
        infer_config({**state_dict(), "backbone.layers.99999999999.norm1.bias": np.zeros(64)}, heads=2)


def test_config_of_another_model_beside_the_weights(tmp_path):
    path = save(tmp_path, state_dict(), config={"d_model": 128, "num_heads": 2})
    with pytest.raises(CheckpointError, match="says d_model 128, its weights say 64"):
        make(path, tmp_path / "out")
    save(tmp_path, state_dict(), config={"model_type": "gpt2", "num_heads": 2})
    assert "'gpt2' model's: not used" in make(path, tmp_path / "out", heads=4).notes[0]
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CosyH3Error, match="not valid JSON"):
        make(path, tmp_path / "out2")


def test_settings_of_the_config_beside_are_kept(tmp_path):
    given = {"attn_cfg": {"num_heads": 4}, "ssm_cfg": {"disc": "zoh"}, "layer_norm_epsilon": 1e-6}
    path = save(tmp_path / "a", state_dict(), config={**given, "vocab_size": 101, "eos_token_id": 7})
    make(path, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    got = [config[k] for k in ("num_heads", "discretization", "layer_norm_epsilon", "vocab_size", "eos_token_id")]
    assert got == [4, "zoh", 1e-6, 101, 7]


def test_a_converted_model_converts_again(source, tmp_path):
    """float32 -> int8 by way of a converted folder gives the same as straight from the checkpoint, rotary kept."""
    path = save(tmp_path / "r", state_dict(rotary=16))
    make(path, tmp_path / "f32", heads=2)
    make(path, tmp_path / "a", heads=2, quantize="int8")
    make(tmp_path / "f32", tmp_path / "b", quantize="int8")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    with pytest.raises(CheckpointError, match="quantised already"):
        make(tmp_path / "a", tmp_path / "c")
