"""Conversion: dtypes, quantisation, shards, the card. Tiny random models."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tests.h3_checkpoints import make, save, state_dict
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from safetensors import safe_open

import mlx_cosyh3
from mlx_cosyh3.convert import convert, main, sanitize
from mlx_cosyh3.convert import formats, h3, sources, writer
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.h3 import H3, H3Config
from mlx_cosyh3.int8 import quantize_int8
from tests.test_convert import EMBEDDING, source, weights_of  # noqa: F401 - `source` is a fixture


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
