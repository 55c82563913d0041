"""Conversion of a CosyVoice 3 folder: its numbers, its layers, its voices.

Bad folders are in test_convert_cosyvoice_errors.py, what is the same in all versions in test_convert_all_versions.py.
"""

import json
import re
import shutil
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx_cosyh3.convert import convert
from mlx_cosyh3.convert.cosyvoice import find_speech_model, open_speech, part_formats
from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.convert.verify import verify

from mlx_cosyh3.cosyvoice.voice import Voice
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.load import load
from tests import cosyvoice_layouts
from tests.golden_data import large
from tests.make_cosyvoice_folder import make_folder, numbers, voice, write_torch
from tests.speech_folders import error, replace

SHAPES, SIZES = cosyvoice_layouts.SHAPES[3], cosyvoice_layouts.SIZES[3]

@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("speech") / "source")


@pytest.fixture
def copy(source, tmp_path):
    """A folder of the test's own."""
    return shutil.copytree(source, tmp_path / "source")


# The test's own folder


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("part", ["llm", "flow", "hift"])
def test_the_full_size_of_the_test_folder_is_that_of_the_released_model(version, part):
    inventory = json.loads((large("golden", "cosyvoice") / "inventory.json").read_text())[f"v{version}.{part}"]
    theirs = {k: tuple(v[0]) for k, v in inventory["keys"].items()}
    shapes, sizes = cosyvoice_layouts.SHAPES[version], cosyvoice_layouts.SIZES[version]["full"]
    assert shapes[f"{part}.pt"](sizes) == theirs


# True conversions


def test_the_config_says_what_the_folder_says(source, tmp_path):
    convert(str(source), str(tmp_path / "out"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    s = SIZES["small"]
    assert config["model_type"] == "cosyvoice3" and config["sample_rate"] == 24000 and config["chunk_size"] == 25
    assert config["llm"]["qwen2"]["vocab_size"] == s["vocab"] and config["llm"]["speech_vocab_size"] == s["codes"] + 200
    assert config["llm"]["end_of_prompt_id"] == config["special_tokens"]["<|endofprompt|>"] == s["base_vocab"] + 3
    assert config["flow"]["dit"]["static_chunk_size"] == 50 and config["flow"]["dit"]["depth"] == s["depth"]
    assert config["hift"]["f0_predictor"]["cond_channels"] == s["f0"] and config["mel"]["fmax"] is None
    assert config["campplus"] is None and "quantization" not in config and "__new__" not in json.dumps(config)
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.count("  llm.pt") == 1 and "--dtype float32" in card and str(source.parent) not in card


def test_quantisation_takes_the_linear_layers_of_llm_and_dit_alone(source, tmp_path):
    convert(str(source), str(tmp_path / "out"), quantize="int8")
    kinds = {n: t.dtype for n, t in open_source(tmp_path / "out").tensors.items()}
    int8 = {re.sub(r"\d+", "#", n) for n, kind in kinds.items() if kind == "I8"}
    llm = [f"llm.qwen#.layers.#.self_attn.{p}_proj.weight" for p in "qkvo"]
    llm += [f"llm.qwen#.layers.#.mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    flow = [f"flow.dit.blocks.#.{n}.weight" for n in ("to_q", "to_k", "to_v", "to_out", "ff_in", "ff_out")]
    assert int8 == {*llm, *flow}


def test_layers_that_64_does_not_divide_stay_and_are_reported(copy, tmp_path):
    shapes = SHAPES["llm.pt"](SIZES["small"] | {"inner": 160})
    write_torch(copy / "llm.pt", {n: (n, shape) for n, shape in shapes.items()})
    replace(copy / "CosyVoice-BlankEN" / "config.json", '"intermediate_size": 192', '"intermediate_size": 160')
    report = convert(str(copy), str(tmp_path / "out"), quantize=8)
    assert report.unquantized == [f"llm.qwen2.layers.{i}.mlp.down_proj" for i in range(2)]
    assert any("not quantised" in note for note in report.notes)
    assert verify(tmp_path / "out", copy).ok


def test_the_vocoder_saved_with_its_discriminator_and_old_weight_norm(copy, source, tmp_path):
    shapes = SHAPES["hift.pt"](SIZES["small"])
    old = {n.replace("parametrizations.weight.original0", "weight_g"): (n, s) for n, s in shapes.items()}
    old = {f"generator.{n.replace('parametrizations.weight.original1', 'weight_v')}": v for n, v in old.items()}
    write_torch(copy / "hift.pt", old)
    convert(str(copy), str(tmp_path / "a"))
    convert(str(source), str(tmp_path / "b"))
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


def test_another_language_model(copy, tmp_path):
    shapes = SHAPES["llm.pt"](SIZES["small"])
    write_torch(copy / "llm.rl.pt", {n: (f"rl.{n}", s) for n, s in shapes.items()})
    report = convert(str(copy), str(tmp_path / "out"), llm="llm.rl.pt")
    assert "llm.rl.pt" in report.files and "llm.pt" not in report.files
    stored = open_source(tmp_path / "out").tensors["llm.llm_decoder.weight"].numpy()
    assert np.array_equal(stored, numbers("rl.llm_decoder.weight", shapes["llm_decoder.weight"]))
    assert verify(tmp_path / "out", copy, llm="llm.rl.pt").ok
    assert not verify(tmp_path / "out", copy).ok


def test_voices(source, tmp_path):
    convert(str(source), str(tmp_path / "out"))
    model, entry = load(tmp_path / "out"), voice(SIZES["small"])
    assert set(model.voices) == {"anna", "晓"}
    anna, other = model.voices["anna"], model.voices["晓"]
    assert np.array_equal(anna.embedding, entry["embedding"][0]) and np.array_equal(
        anna.prompt_mel, entry["prompt_speech_feat"][0]
    )
    assert np.array_equal(anna.prompt_tokens, entry["flow_prompt_speech_token"][0])
    assert np.array_equal(anna.transcript_ids, entry["prompt_text"][0]) and anna.codebook == SIZES["small"]["codes"]
    assert not other.has_prompt and other.prompt_mel.shape == (0, 80) and other.transcript_ids is None
    assert anna.made_for == other.made_for == "cosyvoice3"


def test_names_of_voices_cannot_leave_their_folder(copy, tmp_path):
    s = SIZES["small"]
    names = ["../../x", "a/b", "a_b", "A_B", ".", "x" * 200]
    write_torch(copy / "spk2info.pt", {name: voice(s, 0, i) for i, name in enumerate(names)})
    convert(str(copy), str(tmp_path / "out"))
    assert len(list((tmp_path / "out" / "voices").iterdir())) == len(names)
    assert set(load(tmp_path / "out").voices) == set(names)


# Report


def test_the_sources_are_not_overwritten(copy, tmp_path):
    convert(str(copy), str(tmp_path / "out"))
    shutil.move(copy, tmp_path / "out" / "source")
    with pytest.raises(CosyH3Error, match="holds what is to be converted"):
        convert(str(tmp_path / "out" / "source"), str(tmp_path / "out"), overwrite=True)


def test_verify_finds_damage(source, tmp_path):
    convert(str(source), str(tmp_path / "out"), quantize="int8")
    path = tmp_path / "out" / "model.safetensors"
    tensors = mx.load(str(path))
    tensors["flow.dit.blocks.1.to_v.weight"] = -tensors["flow.dit.blocks.1.to_v.weight"]
    del tensors["hift.conv_pre.bias"]
    mx.save_safetensors(str(path), tensors)
    anna = tmp_path / "out" / "voices" / "anna.safetensors"
    changed = Voice.load(anna)
    changed.embedding = changed.embedding + 1
    changed.save(anna)
    report = verify(tmp_path / "out", source)
    wrong = {t.name: t.status for t in report.tensors if t.status != "ok"}
    assert wrong == {
        "flow.dit.blocks.1.to_v.weight": "beyond the bound",
        "hift.conv_pre.bias": "missing: conv_pre.bias",
    }
    assert report.voices["anna"] == "differs in embedding" and not report.ok and report.table().endswith("FAIL")


# Bad folders


def test_a_yaml_of_another_version_under_this_name(copy, tmp_path):
    replace(copy / "cosyvoice3.yaml", "CosyVoice3LM", "Qwen2LM")
    message = error(copy, tmp_path)
    assert "its llm is a Qwen2LM, which is CosyVoice 2's, but its flow is a CausalMaskedDiffWithDiT" in message


def test_the_name_of_the_yaml_does_not_matter(copy, source, tmp_path):
    (copy / "cosyvoice3.yaml").rename(copy / "cosyvoice.yaml")
    convert(str(copy), str(tmp_path / "a"))
    convert(str(source), str(tmp_path / "b"))
    assert (tmp_path / "a" / "config.json").read_text() == (tmp_path / "b" / "config.json").read_text()


def test_part_formats():
    formats, dtypes = part_formats("bfloat16", None, "8")
    assert dtypes == {"llm": "bfloat16", "flow": "bfloat16", "hift": "float32"}
    assert {p: (f.dtype, f.quantize) for p, f in formats.items()} == {
        "llm": ("bfloat16", "8"), "flow": ("bfloat16", "8"), "hift": ("float32", None),
        "campplus": ("float32", None), "speech_tokenizer": ("float32", None),
    }  # fmt: skip


# The trained model


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Converted as it is embedded: int8 linear layers, the rest stored float16."""
    out = tmp_path_factory.mktemp("trained") / "out"
    convert(str(large("checkpoints", "cosyvoice3-tiny")), str(out), quantize="int8", store="float16")
    return out


def test_the_trained_folder_is_exact_in_float32(tmp_path):
    folder = large("checkpoints", "cosyvoice3-tiny")
    convert(str(folder), str(tmp_path / "out"))
    model = load(tmp_path / "out")
    io = {n: t.numpy() for n, t in open_source(folder / "io.safetensors").tensors.items() if n.startswith("s0.")}
    told = json.loads((folder / "io.json").read_text())
    said = told["s0"]
    v = model.find_voice(said["voice"])
    nothing = mx.zeros((1, 0), dtype=mx.int32), mx.zeros((1, 0, 80))
    mel = model.flow(mx.array(io["s0.tokens"].reshape(1, -1)), *nothing, v.arrays()[2])
    assert np.abs(np.array(mel[0].T) - io["s0.mel"]).max() < 1e-3


def test_the_embedded_form_is_small_and_close(trained):
    checked = verify(trained, large("checkpoints", "cosyvoice3-tiny"))
    assert checked.ok, checked.table()
    errors = {s.name: s.error / s.peak for s in checked.stages}
    assert errors["logits"] < 0.05 and errors["mel"] < 0.02 and errors["wav"] < 0.01
    assert sum(f.stat().st_size for f in trained.rglob("*") if f.is_file()) < 18_000_000
    assert set(load(trained).voices) == {"slt", "rms", "awb"}


def test_the_size_before_is_that_of_the_file(tmp_path):
    folder = large("checkpoints", "cosyvoice3-tiny")
    sizes = convert(str(folder), str(tmp_path / "out"), dry_run=True).sizes
    for part in ("flow", "hift"):  # float16 there
        file = (folder / f"{part}.pt").stat().st_size
        assert 0.95 * file < sizes[part][1] < file


def test_what_is_found(tmp_path, source):
    assert find_speech_model(str(tmp_path)) is None
    assert find_speech_model(str(source))[0] == source
    assert find_speech_model(str(source / "llm.pt")) is None
    opened = open_speech(find_speech_model(str(source)))
    assert opened.skipped["flow.pt"] == ["decoder.estimator.rotary_embed.inv_freq"]


def test_a_hub_repo(source, tmp_path, monkeypatch):
    """What is fetched is what is needed."""
    fetched = []

    def find_model(name, revision, patterns):
        fetched.append((name, revision, patterns))
        return source

    monkeypatch.setattr(sys.modules["mlx_cosyh3.load"], "find_model", find_model)
    names = [p.name for p in source.iterdir()]
    monkeypatch.setattr("mlx_cosyh3.convert.cosyvoice.repo_files", lambda repo, revision: names)
    report = convert("someone/voice", str(tmp_path / "out"), revision="v1", dry_run=True)
    assert report.source == "someone/voice" and len(report.sizes) == 3
    ((name, revision, patterns),) = fetched
    assert (name, revision) == ("someone/voice", "v1")
    assert {"llm.pt", "flow.pt", "hift.pt", "cosyvoice3.yaml", "campplus.onnx", "CosyVoice-BlankEN/vocab.json"} <= set(
        patterns
    )
    assert not any("model.safetensors" in p or "*" in p for p in patterns)
    monkeypatch.setattr("mlx_cosyh3.convert.cosyvoice.repo_files", lambda repo, revision: None)  # no network
    assert convert("someone/voice", str(tmp_path / "out"), dry_run=True).source == "someone/voice"


def test_a_yaml_alone_is_a_folder_that_lacks_the_rest(tmp_path):
    (tmp_path / "cosyvoice3.yaml").write_text("a: 1\n")
    with pytest.raises(CosyH3Error, match="lacks llm.pt, flow.pt, hift.pt"):
        convert(str(tmp_path), str(tmp_path.parent / "nothing"))
