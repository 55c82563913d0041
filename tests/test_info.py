"""`mlx_cosyh3 info`: what it says of every kind of model, without reading a weight, and of damaged folders."""

import json
import os
import shutil

import mlx.core as mx
import numpy as np
import pytest

from mlx_cosyh3 import cli, load
from mlx_cosyh3.convert import convert
from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from mlx_cosyh3.info import info
from tests.cosyvoice_layouts import version_1
from tests.golden_data import cosyvoice_golden
from tests.make_cosyvoice_folder import make_folder, voice, write_torch
from tests.small_model import write_model
from tests.small_voice_model import write_voice_model


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("info")
    return {version: make_folder(root / f"v{version}", version=version) for version in (1, 2, 3)}


@pytest.fixture(scope="module")
def converted(sources, tmp_path_factory):
    """{version: the folder, its linear layers in int8 and the rest in float16}"""
    root = tmp_path_factory.mktemp("converted")
    for version, source in sources.items():
        convert(str(source), str(root / f"v{version}"), quantize="int8", store="float16")
    return {version: root / f"v{version}" for version in sources}


def facts(found):
    return {name.split()[0]: " ".join(name.split()[1:]) for name in found.table().splitlines() if name}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_model_that_speaks(converted, sources, version, monkeypatch):
    monkeypatch.setattr(mx, "load", None)  # no weight is read
    found, config = info(converted[version]), json.loads((converted[version] / "config.json").read_text())
    assert (found.model, found.model_type) == (f"CosyVoice {version}", f"cosyvoice{version}")
    rate, tokens = ("22,050", 50) if version == 1 else ("24,000", 25)
    assert found.facts["audio"].startswith(f"{rate} Hz")
    assert f"{tokens} speech tokens a second, 99" in found.facts["speech"]
    assert list(found.parts) == ["llm", "flow", "hift"]
    assert {name: p.quantised for name, p in found.parts.items()} == {"llm": "int8", "flow": "int8", "hift": None}
    for name, part in found.parts.items():
        assert part.computed == config["dtype"][name] == "float32" and "F16" in part.stored and "F32" not in part.stored
        if name != "hift":  # of which some are folded
            kept = [t for n, t in open_source(sources[version] / f"{name}.pt").tensors.items() if "lm_head" not in n]
            dropped = 32 if (name, version) == ("flow", 3) else 0  # a table of frequencies
            assert part.parameters == sum(int(np.prod(t.shape)) for t in kept) - dropped
    files = [p for p in converted[version].rglob("*") if p.is_file()]
    assert (found.files, found.bytes) == (len(files), sum(p.stat().st_size for p in files))
    stored = open_source(converted[version] / "model.safetensors").tensors
    assert sum(p.bytes for p in found.parts.values()) == sum(t.nbytes for t in stored.values())
    assert list(found.voices) == ["anna", "晓"] and "recording, with its transcript" in found.voices["anna"]
    assert found.modes["zero_shot"] == found.modes["cross_lingual"] == "anna" and found.modes["sft"] == "anna, 晓"
    assert found.modes["vc"] == "no: the folder has no speech tokenizer"
    assert ("text as it arrives" in found.modes["streaming"]) == (version > 1)
    assert ("CosyVoice-300M-Instruct" in found.modes["instruct"]) == (version == 1)


@pytest.mark.parametrize("q", ["4", 8, "llm=4"])
def test_parameters_do_not_depend_on_the_format(sources, converted, tmp_path, q):
    convert(str(sources[2]), str(tmp_path / "out"), quantize=q, dtype="bfloat16")
    found, other = info(tmp_path / "out"), info(converted[2])
    assert {n: p.parameters for n, p in found.parts.items()} == {n: p.parameters for n, p in other.parts.items()}
    bits = str(q).removeprefix("llm=")
    assert found.parts["llm"].quantised == f"{bits} bits, groups of 64"
    assert f"linear layers {bits} bits, groups of 64, bfloat16" in found.table()


def test_parameters_are_those_of_the_loaded_model(sources, tmp_path):
    convert(str(sources[1]), str(tmp_path / "out"))
    from mlx.utils import tree_flatten

    model = load(tmp_path / "out")
    for name, part in info(tmp_path / "out").parts.items():
        assert part.parameters == sum(a.size for _, a in tree_flatten(model[name].parameters()))


def test_front_ends_open_all_modes(sources, tmp_path):
    source = shutil.copytree(sources[2], tmp_path / "source")
    shutil.copy(cosyvoice_golden("campplus") / "campplus_tiny.onnx", source / "campplus.onnx")
    shutil.copy(cosyvoice_golden("s3_v2") / "tokenizer_lookalike.onnx", source / "speech_tokenizer_v2.onnx")
    (source / "spk2info.pt").unlink()
    convert(str(source), str(tmp_path / "out"))
    found = info(tmp_path / "out")
    assert list(found.parts) == ["llm", "flow", "hift", "campplus", "speech_tokenizer"] and not found.voices
    recorded = [mode for mode, text in found.modes.items() if text == "a voice made of a recording"]
    assert recorded == ["zero_shot", "cross_lingual", "instruct", "vc"]
    assert found.modes["sft"] == "no: the folder holds no voices" and "voices" in found.table()


def test_modes_of_voices_without_recordings(tmp_path, sources):
    source = shutil.copytree(sources[1], tmp_path / "source")
    write_torch(source / "spk2info.pt", {"中文女": voice(version_1("small"), 0)})
    convert(str(source), str(tmp_path / "out"))
    found = info(tmp_path / "out")
    assert found.voices == {"中文女": "speaker embedding alone"} and found.modes["sft"] == "中文女"
    for mode in ("zero_shot", "cross_lingual"):
        assert found.modes[mode].startswith("no: the folder has no campplus and no speech tokenizer, and no voice")


def test_the_layout_of_mlx_audio(sources, tmp_path):
    from tests.test_cosyvoice_mlx_layout import write_ours

    for version, bits in ((2, 8), (3, None)):
        found = info(write_ours(sources[version], tmp_path / f"v{version}", bits, version))
        assert found.model_type == f"cosyvoice{version}" and list(found.parts) == ["llm", "flow", "hift"]
        assert found.parts["llm"].quantised == (f"{bits} bits, groups of 64" if bits else None) and not found.voices


def test_h3(tmp_path):
    folder = write_model(tmp_path / "h3")
    found = info(folder)
    assert found.model_type == "h3" and not found.modes and not found.voices
    told, config = facts(found), json.loads((folder / "config.json").read_text())
    assert told["width"].startswith("16; MLP") and told["layers"].startswith(f"{config['n_layer']}; attention")
    assert found.parts["model"].parameters == sum(a.size for a in mx.load(str(folder / "model.safetensors")).values())


@pytest.mark.parametrize("name, said", [(None, "H3"), ("cosyvoice3-tiny", "CosyVoice 3")])
def test_the_models_of_the_package(capsys, name, said):
    assert cli.main(["info", *([name] if name else [])]) == 0
    out = capsys.readouterr().out
    assert said in out and "linear layers int8" in out and "on disk" in out


def test_the_command(converted, capsys):
    folder = str(converted[1])
    assert cli.main(["info", folder]) == 0
    first = capsys.readouterr().out
    assert cli.main(["info", "--model", folder]) == 0
    assert capsys.readouterr().out == first and "晓" in first
    assert cli.main(["info", folder, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["model_type"] == "cosyvoice1" and told["parts"]["llm"]["parameters"] > 0 and "晓" in told["voices"]
    assert cli.main(["info", folder, "--model", folder]) == 2
    assert "one model" in capsys.readouterr().err


# Bad folders


def test_folders_that_hold_no_converted_model(sources, tmp_path):
    with pytest.raises(CosyH3Error, match="no such model"):
        info("/no/such/folder")
    with pytest.raises(CheckpointError, match="mlx_cosyh3 convert"):
        info(tmp_path)
    with pytest.raises(CheckpointError, match="mlx_cosyh3 convert"):
        info(sources[2])
    with pytest.raises(CheckpointError, match="not a model folder"):
        info(sources[2] / "llm.pt")


@pytest.mark.parametrize("key", ["mel", "llm", "dtype", "sample_rate", "token_frame_rate"])
@pytest.mark.parametrize("value", [None, "x", 3, []])
def test_damaged_configs(converted, tmp_path, key, value):
    folder = shutil.copytree(converted[2], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    if value == 3 and key.endswith("rate"):
        assert info(folder).facts  # another number
        return
    with pytest.raises(CosyH3Error) as e:
        info(folder)
    assert "\n" not in str(e.value)


def test_damaged_files(converted, tmp_path):
    folder = shutil.copytree(converted[3], tmp_path / "model")
    weights = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    whole = weights.read_bytes()
    for size in (0, 5, 1000, len(whole) // 2):
        os.truncate(weights, size)
        with pytest.raises(CheckpointError, match="model.safetensors"):
            info(folder)
        weights.write_bytes(whole)
    index.write_text(json.dumps({"weight_map": {"a": "model-00002-of-00002.safetensors"}}))
    with pytest.raises(CheckpointError, match="lacks model-00002-of-00002.safetensors"):
        info(folder)
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="no index"):
        info(folder)
    index.unlink()
    (folder / "voices" / "anna.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="anna.safetensors"):
        info(folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match="holds no model"):
        info(folder)


def test_another_model_type(tmp_path):
    folder = write_voice_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "cosyvoice4"}))
    with pytest.raises(CheckpointError, match="cosyvoice4"):
        info(folder)
