"""Conversion of CosyVoice folders of every version: all formats and back, commands, missing and damaged files.

What a version has alone is in test_convert_cosyvoice.py and test_convert_cosyvoice_versions.py; how converted models
speak, in test_cosyvoice_every_cell.py.
"""

import os

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_cosyh3.convert import convert, main
from mlx_cosyh3.convert.cosyvoice import find_speech_model, open_speech
from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.convert.verify import main as verify_main
from mlx_cosyh3.convert.verify import verify

from mlx_cosyh3 import load
from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.errors import CosyH3Error
from tests.cosyvoice_layouts import SHAPES
from tests.make_cosyvoice_folder import write_torch
from tests.speech_folders import (  # noqa: F401 - three are fixtures
    FORMATS,
    KINDS,
    TOKENIZERS,
    YAMLS,
    add_front_ends,
    config_of,
    converted,
    copy_of,
    error,
    kinds,
    numbers_of,
    sources,
)  # fmt: skip

FILES = ("llm.pt", "flow.pt", "hift.pt")


# ---------------------------------------------------------------- round trips


@kinds
@pytest.mark.parametrize("how", FORMATS)
def test_round_trip(converted, sources, name, how):  # noqa: F811
    folder, report, model = converted(name, how)
    assert report.bytes == sum(t.nbytes for t in open_source(folder).tensors.values())
    checked = verify(folder, sources[name])
    assert checked.ok, checked.table()
    assert [s.name for s in checked.stages] == ["logits", "mel", "wav"] and all(s.peak > 0.01 for s in checked.stages)
    if how == "fp32":
        assert all(s.error == 0 for s in checked.stages)
    dtypes = config_of(folder)["dtype"]
    for path, a in tree_flatten(model.parameters()):
        kept = path.endswith(".scale") or path.startswith("hift.f0_predictor.")  # float32 whatever is computed in
        if mx.issubdtype(a.dtype, mx.floating) and not kept:
            assert a.dtype == getattr(mx, dtypes.get(path.split(".")[0], "float32")), path


@kinds
def test_sanitize_twice_equals_once(sources, name):  # noqa: F811
    module = open_speech(find_speech_model(str(sources[name]))).version
    for part, sanitize in module.SANITIZE.items():
        once = sanitize({n: t.numpy() for n, t in open_source(sources[name] / f"{part}.pt").tensors.items()})
        twice = sanitize(once)
        assert once.keys() == twice.keys() and all(np.array_equal(once[n], twice[n]) for n in once)


@kinds
def test_front_ends(copy_of, tmp_path, name):  # noqa: F811
    copy = copy_of(name)
    add_front_ends(copy, KINDS[name][0], TOKENIZERS[name])
    (copy / "spk2info.pt").unlink()
    report = convert(str(copy), str(tmp_path / "out"))
    assert set(report.sizes) == {"llm", "flow", "hift", "campplus", "speech_tokenizer"} and not report.voices
    checked = verify(tmp_path / "out", copy)
    assert checked.ok, checked.table()
    model = load(tmp_path / "out")
    model.need("campplus", "speech_tokenizer")
    assert model.campplus(mx.zeros((1, 131, 80))).shape == (1, 192)
    sound = 0.1 * np.random.default_rng(0).standard_normal(24000).astype(np.float32)
    anyone = Voice(np.ones(192, np.float32), np.zeros(0, np.int32), np.zeros((0, 80), np.float32))
    with pytest.raises(CosyH3Error, match="gave token .*, and the model has 99: they do not belong together") as e:
        model.convert_voice((sound, 24000), anyone)
    assert f"speech_tokenizer_v{model.version}.onnx" in str(e.value)


@kinds
def test_commands(copy_of, tmp_path, name, capsys):  # noqa: F811
    source = copy_of(name)
    (source / "flow.decoder.estimator.fp32.onnx").write_bytes(b"of another program")
    words = ["--model", str(source), "--out", str(tmp_path / "out"), "-q", "int8"]
    assert main([*words, "--dry-run"]) == 0 and [p.name for p in tmp_path.iterdir()] == ["source"]
    out = capsys.readouterr()
    assert "flow.spk_embed_affine_layer.weight" in out.out and "would write" in out.out and "campplus.onnx" in out.err
    assert "\nnot read: flow.decoder.estimator.fp32.onnx\n" in out.out
    assert main(words) == 0
    assert "bits per weight" in capsys.readouterr().out
    assert verify_main([str(tmp_path / "out"), "--against", str(source)]) == 0
    assert capsys.readouterr().out.endswith("PASS\n")
    assert main(words) == 2 and "--overwrite" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0  # a converted model of any version is replaced
    assert load(tmp_path / "out").version == KINDS[name][0]


# ---------------------------------------------------------------- what cannot be


@kinds
@pytest.mark.parametrize("file", [*FILES, "spk2info.pt"])
@pytest.mark.parametrize("part", [0, 0.3, 0.99])
def test_truncated_checkpoints(copy_of, tmp_path, name, file, part):  # noqa: F811
    copy = copy_of(name)
    os.truncate(copy / file, int((copy / file).stat().st_size * part))
    assert file in error(copy, tmp_path)


@kinds
@pytest.mark.parametrize("file", FILES)
def test_tensors_that_are_missing_or_unknown(copy_of, tmp_path, name, file):  # noqa: F811
    copy, shapes = copy_of(name), SHAPES[KINDS[name][0]][file](numbers_of(name))
    bias = next(n for n in shapes if n.endswith("bias"))
    write_torch(copy / file, {n: (n, s) for n, s in shapes.items() if n != bias})
    assert f"{file} lacks" in error(copy, tmp_path)
    write_torch(copy / file, {n: (n, s) for n, s in (shapes | {"more.weight": (3, 3)}).items()})
    message = error(copy, tmp_path)
    assert "'more.weight'" in message and file in message


@kinds
def test_missing_files(copy_of, tmp_path, name):  # noqa: F811
    copy, (version, _) = copy_of(name), KINDS[name]
    for file, said in (
        ("llm.pt", "lacks llm.pt"),
        ("hift.pt", "lacks hift.pt"),
        ("spk2info.pt", f"campplus.onnx, speech_tokenizer_v{version}.onnx, and spk2info.pt"),
        (YAMLS[version], "no cosyvoice3.yaml, cosyvoice2.yaml or cosyvoice.yaml"),
    ):
        (copy / file).rename(tmp_path / file)
        assert said in error(copy, tmp_path)
        (tmp_path / file).rename(copy / file)
