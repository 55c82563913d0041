"""`verify`: true conversions pass in every format, damage of any kind is found, the bounds are right."""

import json
import shutil

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cosyh3.convert import convert
from mlx_cosyh3.convert.formats import Format
from mlx_cosyh3.convert.verify import main, verify
from mlx_cosyh3.errors import CheckpointError
from tests.h3_checkpoints import Lazy, save, state_dict

FORMATS = [
    ("float32", None), ("float16", None), ("bfloat16", None), ("float32", "int8"),
    ("float32", 4), ("float32", 8), ("float16", 4), ("bfloat16", 8),
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    tensors = state_dict(rotary=16, d_model=96)
    return save(tmp_path_factory.mktemp("source"), tensors, config={"num_heads": 2}).parent


@pytest.fixture(scope="module")
def models(source, tmp_path_factory):
    """{(dtype, quantize): folder}, made once."""
    folder = tmp_path_factory.mktemp("models")
    made = {}
    for dtype, quantize in FORMATS:
        made[dtype, quantize] = folder / f"{dtype}-{quantize}"
        convert(str(source), str(made[dtype, quantize]), dtype=dtype, quantize=quantize, tokenizer="none")
    return made


def damage(model, tmp_path, change):
    """A copy of a converted model with `change` applied to its tensors."""
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    tensors = mx.load(str(folder / "model.safetensors"))
    change(tensors)
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return folder


def failed(report):
    return {t.name: t.status for t in report.tensors if t.status != "ok"}


@pytest.mark.parametrize("dtype, quantize", FORMATS)
def test_true_conversions_pass(models, source, dtype, quantize):
    report = verify(models[dtype, quantize], source)
    assert report.ok, report.table()
    assert len(report.tensors) == 65 and report.logits_peak > 1
    exact = dtype == "float32" and quantize is None
    assert (report.logits_error == 0) == exact and (max(t.error for t in report.tensors) == 0) == exact
    assert all(t.error == 0 for t in report.tensors if ".ssm." in t.name or ".shift." in t.name)
    if not exact:  # the bounds are not idle: the worst weight comes close to its own
        assert max(t.ratio for t in report.tensors) > 0.15


def test_command_prints_a_table(models, source, capsys):
    assert main([str(models["float32", "int8"]), "--against", str(source / "model.safetensors")]) == 0
    out, err = capsys.readouterr()
    assert "layers.2.mlp.fc2.weight" in out and "65 tensors, 0 wrong" in out and "same argmax" in out
    assert out.endswith("PASS\n") and err == ""


@pytest.mark.parametrize("dtype, quantize", FORMATS)
def test_one_changed_weight_is_found(models, source, tmp_path, dtype, quantize):
    name = "layers.1.mixer.Wqkv.weight"

    def change(tensors):
        a = tensors[name]
        if a.dtype == mx.uint32:
            a[7, 3] = a[7, 3] ^ 0x80  # bit 3 of a code of 4 bits, bit 7 of one of 8: half the range
        elif a.dtype == mx.int8:
            a[7, 3] = a[7, 3] + (2 if a[7, 3].item() < 0 else -2)
        else:
            a[7, 3] = a[7, 3] * (1 + 2.0**-6)

    folder = damage(models[dtype, quantize], tmp_path, change)
    report = verify(folder, source)
    assert failed(report) == {name: "beyond the bound"} and not report.ok
    assert report.logits_error is not None  # and says what it does to the logits
    assert main([str(folder), "--against", str(source)]) == 1


@pytest.mark.parametrize(
    "quantize, name, weight",
    [
        ("int8", "layers.0.mlp.fc1.scale", "layers.0.mlp.fc1.weight"),
        (4, "embeddings.scales", "embeddings.weight"),
        (4, "embeddings.biases", "embeddings.weight"),
        (8, "layers.2.mixer.q_proj.biases", "layers.2.mixer.q_proj.weight"),
        (None, "layers.0.mixer.ssm.log_dt", "layers.0.mixer.ssm.log_dt"),
    ],
)
def test_wrong_scales_are_found(models, source, tmp_path, quantize, name, weight):
    def change(tensors):
        tensors[name] = tensors[name] * 1.2

    assert failed(verify(damage(models["float32", quantize], tmp_path, change), source)) == {
        weight: "beyond the bound"
    }


@pytest.mark.parametrize("quantize", ["int8", 4])
def test_scales_of_zero_are_no_excuse(models, source, tmp_path, quantize):
    """A bound taken from the scales shrinks with them."""
    name = "layers.0.mlp.fc1." + ("scale" if quantize == "int8" else "scales")

    def change(tensors):
        tensors[name] = tensors[name] * 0

    assert "layers.0.mlp.fc1.weight" in failed(
        verify(damage(models["float32", quantize], tmp_path, change), source)
    )


def test_missing_extra_and_misshapen(models, source, tmp_path):
    def change(tensors):
        del tensors["norm_f.bias"]
        del tensors["layers.0.mlp.fc1.scale"]
        tensors["layers.9.norm1.bias"] = mx.zeros((3,))
        tensors["layers.0.norm1.bias"] = mx.zeros((95,))
        tensors["layers.2.norm1.bias"] = mx.zeros((96,), dtype=mx.float16)

    folder = damage(models["float32", "int8"], tmp_path, change)
    # The index of the folder names what is in the file.
    report = verify(folder, source)
    assert failed(report) == {
        "norm_f.bias": "missing: norm_f.bias",
        "layers.0.mlp.fc1.weight": "missing: layers.0.mlp.fc1.scale",
        "layers.9.norm1.bias": "extra: not in the original",
        "layers.0.norm1.bias": "wrong shape: layers.0.norm1.bias is F32 [95], expected F32 [96]",
        "layers.2.norm1.bias": "wrong shape: layers.2.norm1.bias is F16 [96], expected F32 [96]",
    }
    assert report.logits_error is None and "not compared" in report.table() and report.table().endswith("FAIL")


@pytest.mark.parametrize("dtype, quantize", [("float32", None), ("float32", "int8"), ("float16", 4)])
def test_nan_in_the_model(models, source, tmp_path, dtype, quantize):
    def change(tensors):
        tensors["layers.2.norm2.weight"][5] = float("nan")

    report = verify(damage(models[dtype, quantize], tmp_path, change), source)
    assert failed(report) == {"layers.2.norm2.weight": "holds NaN or infinite values"} and not report.ok


def test_weights_in_place_but_another_config(models, source, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models["float32", None], folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in (("rotary_emb_dim", 32), ("attn_layer_idx", [2])):
        path.write_text(json.dumps({**config, key: value}))
        if key == "attn_layer_idx":
            with pytest.raises(CheckpointError, match="lacks the tensor 'layers.1.mixer.q_proj.weight'"):
                verify(folder, source)
        else:
            report = verify(folder, source)
            assert not report.ok and report.logits_status == "config.json says rotary_emb_dim 32, the original 16"


def test_another_model_of_the_same_shapes(models, tmp_path):
    other = save(tmp_path / "other", state_dict(rotary=16, d_model=96, seed=1))
    report = verify(models["float32", None], other)
    assert len(failed(report)) >= 50 and report.logits_status == "beyond 0.001"


def test_bad_input_ends_with_2(models, source, tmp_path, capsys):
    model = str(models["float32", None])
    (tmp_path / "empty").mkdir()
    nan = state_dict(rotary=16, d_model=96)
    nan["backbone.ln_f.bias"][0] = np.nan
    for argv, message in [
        ([str(tmp_path / "none"), "--against", str(source)], "not a model folder"),
        ([str(tmp_path / "empty"), "--against", str(source)], "has no config.json"),
        ([model, "--against", str(tmp_path / "none.pt")], "no such file or folder"),
        ([model, "--against", str(save(tmp_path / "g", {"wte.weight": np.ones((2, 2))}))], "this is GPT-2"),
        ([model, "--against", str(save(tmp_path / "n", nan))], "'norm_f.bias' holds nan"),
        ([model, "--against", str(source), "--file", "x.pt"], "holds no file 'x.pt'"),
    ]:
        assert main(argv) == 2, argv
        out, err = capsys.readouterr()
        assert message in err and err.startswith("error: ") and err.count("\n") == 1 and out == ""


def quantize(array, dtype, bits):
    """An array as stored, restored: (values, allowed error, scales), all float64."""
    fmt, parts = Format(dtype, bits), {}
    for name, block in fmt.blocks("embeddings.weight", Lazy(array)):
        parts.setdefault(name, []).append(block)
    dtypes = {e.name: e.dtype for e in fmt.entries("embeddings.weight", array.shape)}
    rows = lambda name: (np.concatenate(parts[name]), dtypes[name])  # noqa: E731
    values, allowed = fmt.restore("embeddings.weight", rows)
    return values, allowed(array.astype(np.float64))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_are_restored_as_mlx_does(bits, dtype):
    a = np.random.default_rng(0).normal(size=(40, 128)).astype(np.float32)
    stored = mx.quantize(mx.array(a).astype(getattr(mx, dtype)), group_size=64, bits=bits)
    wanted = mx.dequantize(
        *[p.astype(mx.float32) if i else p for i, p in enumerate(stored)], group_size=64, bits=bits
    )
    assert np.abs(quantize(a, dtype, bits)[0] - np.array(wanted)).max() < 1e-5


KINDS = {
    "normal": lambda r, a: a,
    "one side": lambda r, a: np.abs(a) + r.uniform(0, 50, (a.shape[0], 1)),
    "constant": lambda r, a: np.zeros_like(a) + a[:, :1],
    "zero": lambda r, a: a * 0,
    "tiny": lambda r, a: a * 1e-7,
    "mixed": lambda r, a: a * r.choice([1e-9, 1e-6, 1e-3, 1, 1e3], (a.shape[0], 1)),
    "heavy tails": lambda r, a: np.clip(np.sinh(2 * a), -60000, 60000),
    # The widest gap between step and bound: codes that round to a half at the end farther from zero.
    "half": lambda r, a: np.clip(a, -1, 1) * np.where(a > 0, 1 + r.uniform(-0.1, 0.1, (a.shape[0], 1)), 1),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.sampled_from([4, 8]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
def test_affine_bound_holds(kind, seed, bits, dtype):
    rng = np.random.default_rng(seed)
    a = KINDS[kind](rng, rng.normal(size=(64, 128))).astype(np.float32)
    values, allowed = quantize(a, dtype, bits)
    assert (np.abs(values - a) <= allowed).all()


def test_affine_bound_is_tight():
    """Half a step is too little (MLX keeps zero exact, so the far end is clipped); a whole one is reached."""
    a = np.random.default_rng(0).normal(size=(2000, 64)).astype(np.float32)
    values, allowed = quantize(a, "float32", 4)
    step = np.abs(np.array(mx.quantize(mx.array(a), group_size=64, bits=4)[1]))
    error = np.abs(values - a)
    assert 0.9 < (error / step).max() <= 1.0001 and (error / allowed).max() > 0.999


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-30, 1e-6, 1, 1e6, 1e30]))
def test_int8_bound_holds(seed, scale):
    a = (np.random.default_rng(seed).normal(size=(32, 50)) * scale).astype(np.float32)
    values, allowed = quantize(a, "float32", "int8")
    ratio = np.abs(values - a) / allowed
    assert 0.9 < ratio.max() <= 1
