"""Conversion: names, config, formats, tokenizer, sources, command. Tiny random models, and the goldens."""

import fcntl
import json
import os
import re
import select
import struct
import subprocess
import sys
import termios

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tests.h3_checkpoints import Lazy, golden, make, save, save_tokenizer, state_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import mlx_cosyh3
from mlx_cosyh3.convert import convert, infer_config, main, sanitize
from mlx_cosyh3.convert import formats, h3, sources, vocabulary, writer
from mlx_cosyh3.convert.sources import open_source, read_safetensors
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.h3 import H3, H3Config
from mlx_cosyh3.int8 import quantize_int8

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


# Formats


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dtypes(source, tmp_path, dtype):
    make(source, tmp_path / "out", dtype=dtype)
    stored, original = weights_of(tmp_path / "out"), sanitize(state_dict())
    assert stored.keys() == original.keys()
    for name, array in stored.items():
        kept = ".ssm." in name or ".shift." in name
        wanted = mx.array(original[name]).astype(mx.float32 if kept else getattr(mx, dtype))
        assert array.dtype == wanted.dtype and mx.array_equal(array, wanted), name
    assert mlx_cosyh3.load(tmp_path / "out").config.num_heads == 2


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**127, min_value=-(2.0**127)),
        min_size=1,
    )
)
def test_bfloat16_rounds_as_mlx_does(values):
    values = np.array(values, np.float32)
    bits = formats.cast("x", values, "BF16")
    # MLX flushes nothing here: compare the bits.
    assert np.array_equal(bits, np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16)))


def test_overflow_names_the_tensor(tmp_path):
    tensors = state_dict()
    tensors["backbone.layers.2.mlp.fc1.weight"][5, 5] = -65505
    path = save(tmp_path / "a", tensors)
    with pytest.raises(CheckpointError, match="'layers.2.mlp.fc1.weight' holds 65505, beyond 65504"):
        make(path, tmp_path / "out", heads=2, dtype="float16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    make(path, tmp_path / "out", heads=2, dtype="bfloat16")


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_source_dtypes(tmp_path, dtype):
    tensors = {k: v.astype(dtype) for k, v in state_dict().items()}
    make(save(tmp_path / "a", tensors), tmp_path / "out", heads=2)
    stored = weights_of(tmp_path / "out")
    for name, array in sanitize(tensors).items():
        assert np.array_equal(np.array(stored[name]), array.astype(np.float32)), name


def test_bfloat16_source_is_copied_bit_by_bit(tmp_path):
    save_dir = tmp_path / "a"
    save_dir.mkdir()
    mx.save_safetensors(
        str(save_dir / "model.safetensors"), {k: mx.array(v).astype(mx.bfloat16) for k, v in state_dict().items()}
    )
    make(save_dir, tmp_path / "out", heads=2, dtype="bfloat16")
    got, want = weights_of(tmp_path / "out"), mx.array(state_dict()[EMBEDDING]).astype(mx.bfloat16)
    assert mx.array_equal(got["embeddings.weight"], want) and got["layers.0.mixer.ssm.D"].dtype == mx.float32


def test_integer_weights_are_refused(tmp_path):
    tensors = {**state_dict(), "backbone.ln_f.bias": np.zeros(64, np.int64)}
    with pytest.raises(CheckpointError, match="'norm_f.bias' has the dtype I64, expected floating point"):
        make(save(tmp_path / "a", tensors), tmp_path / "out", heads=2)


def test_int8_is_quantize_int8_in_any_blocks(source, tmp_path, monkeypatch):
    make(source, tmp_path / "out", quantize="int8")
    stored, original = weights_of(tmp_path / "out"), sanitize(state_dict())
    for name, array in original.items():
        if h3.is_matrix(name):
            q, scale = quantize_int8(array)
            assert np.array_equal(np.array(stored[name]), q)
            assert np.array_equal(np.array(stored[name.removesuffix("weight") + "scale"]), scale)
        else:
            assert np.array_equal(np.array(stored[name]), array)  # fp32
    monkeypatch.setattr(formats.float_blocks, "__defaults__", (1000,))  # 15 rows of 64 a block
    make(source, tmp_path / "blocks", quantize="int8")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (
        tmp_path / "blocks/model.safetensors"
    ).read_bytes()
    assert mlx_cosyh3.load(tmp_path / "out")(mx.array([[1, 2, 3]])).shape == (1, 3, 104)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_affine_is_what_nn_quantize_gives(tmp_path, bits, dtype):
    """d_model 96: group size 32 where the width is 96, 64 for the MLP's 384; one exception each in config.json."""
    tensors = state_dict(d_model=96, n_layer=2)
    report = make(save(tmp_path / "a", tensors), tmp_path / "out", heads=2, quantize=bits, dtype=dtype)
    plain = {k: v for k, v in report.config.items() if not k.startswith("quantization")}
    reference = H3(H3Config.from_dict(plain))
    weights = {k: mx.array(v) for k, v in sanitize(tensors).items()}
    cast = {k: v if h3.is_ssm(k) else v.astype(getattr(mx, dtype)) for k, v in weights.items()}
    nn.Module.load_weights(reference, list(cast.items()))

    def settings_of(path, module):
        return (
            {"group_size": 32 if module.weight.shape[1] % 64 else 64, "bits": bits}
            if hasattr(module, "to_quantized")
            else False
        )

    nn.quantize(reference, 64, bits, class_predicate=settings_of)
    wanted, stored = dict(tree_flatten(reference.parameters())), weights_of(tmp_path / "out")
    assert stored.keys() == wanted.keys()
    for name in wanted:
        assert stored[name].dtype == wanted[name].dtype and mx.array_equal(stored[name], wanted[name]), name
    quantization = report.config["quantization"]
    assert quantization == report.config["quantization_config"]
    assert {k: quantization[k] for k in ("mode", "bits", "group_size")} == {
        "mode": "affine",
        "bits": bits,
        "group_size": 64,
    }
    assert (
        quantization["layers.0.mlp.fc1"] == {"group_size": 32, "bits": bits}
        and "layers.0.mlp.fc2" not in quantization
    )
    assert mlx_cosyh3.load(tmp_path / "out")(mx.array([[1, 2, 3]])).shape == (1, 3, 104)


def test_widths_no_group_divides_stay_and_are_reported(tmp_path, capsys):
    path = save(tmp_path / "a", state_dict(d_model=48, n_layer=2))
    assert (
        main(
            [
                "--model",
                str(path),
                "--out",
                str(tmp_path / "out"),
                "--heads",
                "2",
                "-q",
                "4",
                "--tokenizer",
                "none",
            ]
        )
        == 0
    )
    assert "note: not quantised, no group size divides their width: embeddings, " in capsys.readouterr().err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization"]["embeddings"] is False and "layers.0.mlp.fc2" not in config["quantization"]
    stored = weights_of(tmp_path / "out")
    assert stored["embeddings.weight"].dtype == mx.float32 and stored["layers.0.mlp.fc2.weight"].dtype == mx.uint32
    assert mlx_cosyh3.load(tmp_path / "out")(mx.array([[1, 2, 3]])).shape == (1, 3, 104)


def test_unknown_formats():
    for options, message in [
        (dict(dtype="float8"), "unknown --dtype 'float8', nearest known: 'float"),
        (dict(quantize="int4"), "unknown -q 'int4' .one of int8, 4, 8"),
        (dict(quantize=2), "unknown -q 2"),
        (dict(quantize="int8", dtype="float16"), "-q int8 keeps all else in float32"),
    ]:
        with pytest.raises(CosyH3Error, match=message):
            convert("does-not-matter.pt", "out", **options)


# The files


def test_shards_index_and_header(source, tmp_path, monkeypatch):
    make(source, tmp_path / "one", quantize=8)
    monkeypatch.setattr(writer.write_tensors, "__defaults__", (lambda n: None, 100_000))
    make(source, tmp_path / "many", quantize=8)
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "many" / f).stat().st_size < 110_000 for f in files)
    one, many = weights_of(tmp_path / "one"), weights_of(tmp_path / "many")
    assert one.keys() == many.keys() and all(mx.array_equal(one[k], many[k]) for k in one)
    for folder in ("one", "many"):
        index = json.loads((tmp_path / folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(a.nbytes for a in one.values())
        for name, file in index["weight_map"].items():
            with safe_open(tmp_path / folder / file, framework="numpy") as f:
                assert f.metadata() == {"format": "mlx"} and name in f.keys()
        assert index["weight_map"].keys() == one.keys()
        assert mlx_cosyh3.load(tmp_path / folder)(mx.array([[5]])).shape == (1, 1, 104)
    raw = (tmp_path / "one" / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    sizes = {"F32": 4, "U32": 4, "I8": 1}
    assert all(v["data_offsets"][0] % sizes[v["dtype"]] == 0 for k, v in header.items() if k != "__metadata__")


def test_the_same_input_gives_the_same_bytes(source, tmp_path):
    for name in ("a/m", "b/m"):
        make(source, tmp_path / name, quantize=4)
    names = sorted(p.name for p in (tmp_path / "a/m").iterdir())
    assert names == ["README.md", "config.json", "model.safetensors", "model.safetensors.index.json"]
    assert all((tmp_path / "a/m" / n).read_bytes() == (tmp_path / "b/m" / n).read_bytes() for n in names)


def test_card(source, tmp_path):
    report = make(source, tmp_path / "my-model", quantize="int8")
    text = (tmp_path / "my-model" / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: mlx\n") and str(tmp_path) not in text
    assert f"{sources.sha256(source / 'model.safetensors')}  model.safetensors" in text
    assert "--quantize int8" in text and "--out my-model" in text
    assert f"{report.parameters:,}" in text and f"{report.bytes:,} bytes" in text
    assert report.bytes == sum(a.nbytes for a in weights_of(tmp_path / "my-model").values())


def test_config_keys_are_sorted(source, tmp_path):
    make(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(config) == sorted(config) and config["model_type"] == "h3" and config["dtype"] == "float32"


# Tokenizer


def wide(tmp_path, rows=264, **config):
    return save(tmp_path / "wide", state_dict(rows=rows, n_layer=1, attention=()), config=config or None).parent


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_tokenizer_sets_the_true_vocabulary(tmp_path, names):
    folder = save_tokenizer(tmp_path / "tokens", 260, names=names)
    make(wide(tmp_path), tmp_path / "out", tokenizer=str(folder))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["padded_vocab_size"], config["eos_token_id"]) == (260, 264, 259)
    model = mlx_cosyh3.load(tmp_path / "out")
    assert model.tokenizer.vocab_size == 260 and model.tokenizer.decode(model.tokenizer.encode("ab é")) == "ab é"
    assert "merges.txt" in os.listdir(tmp_path / "out") and "vocab.json" in os.listdir(tmp_path / "out")


def test_tokenizer_of_the_source_folder_and_its_eos(tmp_path):
    source = wide(tmp_path, eos_token_id=65)
    save_tokenizer(source, 260)
    make(source, tmp_path / "out", tokenizer=None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (260, 65)
    assert "tokenizer | the source's own |" in (tmp_path / "out" / "README.md").read_text()


def test_tokenizer_json(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    from mlx_cosyh3.tokenizer import ALPHABET

    bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<|endoftext|>"])
    source = wide(tmp_path)
    bpe.save(str(source / "tokenizer.json"))
    report = make(source, tmp_path / "out", tokenizer=None)
    assert (report.config["vocab_size"], report.config["eos_token_id"]) == (257, 256)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_tokenizer_errors(tmp_path, monkeypatch):
    source = wide(tmp_path)
    with pytest.raises(CosyH3Error, match="has 300 ids, more than the 264 rows"):
        make(source, tmp_path / "out", tokenizer=str(save_tokenizer(tmp_path / "big", 300)))
    with pytest.raises(CosyH3Error, match="no such folder"):
        make(source, tmp_path / "out", tokenizer=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CosyH3Error, match="holds neither tokenizer.json nor"):
        make(source, tmp_path / "out", tokenizer=str(tmp_path / "empty"))
    with pytest.raises(CosyH3Error, match="with 264 rows of embedding it is not GPT-2's either: pass --tokenizer"):
        make(source, tmp_path / "out", tokenizer=None)
    with pytest.raises(CosyH3Error, match="vocab_size 999 is not in 1..264"):
        make(wide(tmp_path, vocab_size=999), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_gpt2s_tokenizer_comes_from_the_hub(tmp_path, monkeypatch):
    """50,264 rows without a tokenizer beside them: GPT-2's, and only its two files."""
    asked = []
    folder = save_tokenizer(tmp_path / "hub", 270)

    def find_model(repo, **options):
        asked.append((repo, options))
        return folder

    monkeypatch.setattr(sys.modules["mlx_cosyh3.load"], "find_model", find_model)
    monkeypatch.setattr(vocabulary, "GPT2_ROWS", range(270, 280))
    report = make(wide(tmp_path, rows=272), tmp_path / "out", tokenizer=None)
    assert asked == [("openai-community/gpt2", {"allow_patterns": ["vocab.json", "merges.txt"]})]
    assert (report.config["vocab_size"], report.config["eos_token_id"]) == (270, 269)
    assert "`openai-community/gpt2` (MIT)" in (tmp_path / "out" / "README.md").read_text()


# Sources


def test_folder_with_several_models(source, tmp_path):
    save(source, state_dict(seed=1), name="other.safetensors")
    with pytest.raises(
        CosyH3Error, match=r"holds 2 models: pick one with --file \(model.safetensors, other.safetensors\)"
    ):
        make(source, tmp_path / "out")
    make(source, tmp_path / "out", file="other.safetensors")
    with pytest.raises(
        CosyH3Error, match="holds no file 'third.pt'; it holds model.safetensors, other.safetensors"
    ):
        make(source, tmp_path / "out2", file="third.pt")
    with pytest.raises(CosyH3Error, match="leave it out"):
        make(source / "model.safetensors", tmp_path / "out2", file="other.safetensors")
    (source / "training_args.bin").write_bytes(b"x")
    (source / "other.safetensors").unlink()
    make(source, tmp_path / "out3")


def test_sharded_source_with_and_without_index(tmp_path):
    tensors, folder = state_dict(), tmp_path / "a"
    names = list(tensors)
    parts = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for i, part in enumerate(parts):
        save(folder, {k: tensors[k] for k in names[i::3]}, name=part)
    make(folder, tmp_path / "plain", heads=2)
    index = {"weight_map": {k: parts[i % 3] for i, k in enumerate(names)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    make(folder, tmp_path / "index", heads=2, file="model.safetensors.index.json")
    assert (tmp_path / "plain/model.safetensors").read_bytes() == (
        tmp_path / "index/model.safetensors"
    ).read_bytes()
    assert weights_of(tmp_path / "plain").keys() == sanitize(tensors).keys()
    (folder / parts[1]).unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of 3 files of the model: model-00002-of-00003.safetensors"):
        make(folder, tmp_path / "out", heads=2)


def test_source_reports_files_and_hashes(source):
    opened = open_source(str(source))
    assert opened.files == [("model.safetensors", sources.sha256(source / "model.safetensors"))]
    tensor = opened.tensors[EMBEDDING]
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == ((104, 64), "F32", 104 * 64 * 4)
    assert np.array_equal(tensor.rows(3, 9), state_dict()[EMBEDDING][3:9])
    assert not tensor.numpy().flags.writeable


def test_state_dict_wrappers():
    inner = {k: Lazy(v) for k, v in state_dict().items()}
    for tree in (inner, {"state_dict": inner, "epoch": 3}, {"model": inner}):
        assert sources.state_dict(tree, "x.pt")[0].keys() == inner.keys()
    lightning = {
        "pytorch-lightning_version": "1.8",
        "state_dict": {**{f"model.{k}": v for k, v in inner.items()}, "loss.w": Lazy(np.ones(1))},
    }
    tensors, ignored = sources.state_dict(lightning, "x.pt")
    assert tensors.keys() == inner.keys() and ignored == ["loss.w"]
    for tree, message in [
        ([1], "holds one object of type list, not a state dict"),
        ({"a": 1}, "holds no tensors at its top .its keys: 'a'"),
        ({"pytorch-lightning_version": "1", "state_dict": {"a": inner[EMBEDDING]}}, "none of the keys"),
        ({"pytorch-lightning_version": "1"}, "without a state_dict"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            sources.state_dict(tree, "x.pt")


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_damaged_safetensors_never_crash(tmp_path_factory, data):
    """Any bytes changed in the header, or the file cut: an error of one line, or tensors inside the file."""
    folder = tmp_path_factory.getbasetemp()
    path = folder / "damaged.safetensors"
    save_file({"a": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(3, np.float16)}, path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 50))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        for tensor in read_safetensors(path).values():
            assert tensor.numpy().shape == tensor.shape
    except CheckpointError as e:
        assert "\n" not in str(e)


def hub_cache(tmp_path, repo, files):
    """A hub cache that holds a repo: what snapshot_download leaves behind."""
    root = tmp_path / "hub" / f"models--{repo.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    for name, write in files.items():
        write(root / "snapshots" / commit, name)
    return {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "MLX_DISABLE_COMPILE": "1"}


def test_hub_repo_from_the_local_cache(tmp_path):
    def model(folder, name):
        save(folder, state_dict(rows=264, n_layer=1, attention=()), name=name)
        save_tokenizer(folder, 260)

    env = hub_cache(tmp_path, "danfu09/H3-small", {"model-a.safetensors": model, "model-b.safetensors": model})
    command = [
        sys.executable,
        "-m",
        "mlx_cosyh3.convert",
        "--model",
        "danfu09/H3-small",
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (
        done.returncode == 2 and "pick one with --file (model-a.safetensors, model-b.safetensors)" in done.stderr
    )
    done = subprocess.run([*command, "--file", "model-b.safetensors"], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    text = (tmp_path / "out" / "README.md").read_text()
    assert "license: bsd-3-clause\nbase_model: danfu09/H3-small\n" in text and "--file model-b.safetensors" in text


# Command


def test_dry_run_prints_the_plan_and_writes_nothing(source, tmp_path, capsys):
    for flag in ("--dry-run", "--dry_run"):
        command = ["--model", str(source), "--out", str(tmp_path / "out"), "--tokenizer", "none", "-q", "8", flag]
        assert main(command) == 0
        out = capsys.readouterr().out
        assert '"d_model": 64' in out and "layers.2.mlp.fc2.scales" in out and "would write" in out
        assert sorted(os.listdir(tmp_path)) == ["source"]


def test_report_and_summary(source, tmp_path, capsys):
    seen = []
    report = make(source, tmp_path / "out", quantize=4, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == (source / "model.safetensors").stat().st_size + report.bytes
    assert report.bits_per_weight == pytest.approx(8 * report.bytes / report.parameters)
    assert main(["--model", str(source), "--out", str(tmp_path / "b"), "--tokenizer", "none", "--quantize=4"]) == 0
    out, err = capsys.readouterr()
    assert f"32.00 -> {report.bits_per_weight:.2f} bits per weight" in out and err == ""  # no bar: not a terminal


def test_bar_on_a_terminal_only(source, tmp_path):
    command = [sys.executable, "-m", "mlx_cosyh3.convert", "--model", str(source), "--tokenizer", "none", "--out"]
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    subprocess.run([*command, str(tmp_path / "a")], stderr=slave, stdout=subprocess.DEVNULL, check=True)
    assert select.select([master], [], [], 5)[0] and b"converting" in os.read(master, 4096)
    os.close(slave)
    os.close(master)
    piped = subprocess.run([*command, str(tmp_path / "b")], capture_output=True, check=True, text=True)
    assert piped.stderr == "" and piped.stdout.count("\n") == 1


def test_wrong_options_end_with_2(tmp_path, capsys):
    assert main(["--model", str(tmp_path / "none.pt"), "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: no such file or folder: ") and err.count("\n") == 1
    for argv in (["--model", "x"], ["--model", "x", "--out", "y", "--heads", "two"]):
        with pytest.raises(SystemExit) as e:
            main(argv)
        assert e.value.code == 2
