"""Conversion of CosyVoice 1 (50 and 25 Hz) and 2: what they have alone, their voices, text tokenizers and bad folders.

What is the same in all versions is in test_convert_all_versions.py.
"""

import json
import re
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_cosyh3.convert import convert, main
from mlx_cosyh3.convert.common import TextTokenizer
from mlx_cosyh3.convert.cosyvoice import find_speech_model, open_speech
from mlx_cosyh3.convert.cosyvoice_check import check_kinds, check_numbers, model_class
from mlx_cosyh3.convert.cosyvoice_folder import config_of, version_module
from mlx_cosyh3.convert.cosyvoice_voices import file_stem
from mlx_cosyh3.convert.hyperyaml import parse
from mlx_cosyh3.convert.sources import ArrayTensor, open_source
from mlx_cosyh3.convert.verify import main as verify_main
from mlx_cosyh3.convert.verify import verify

from mlx_cosyh3.cosyvoice import whisper_tokenizer
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.load import load
from tests.cosyvoice_layouts import SHAPES, SIZES, YAML, version_1
from tests.make_cosyvoice_folder import qwen2_config, voice, write_ranks, write_torch
from tests.speech_folders import (  # noqa: F401 - two are fixtures
    KINDS,
    YAMLS,
    add_front_ends,
    copy_of,
    error,
    replace,
    sources,
)  # fmt: skip


@pytest.fixture(params=["v1", "v1-25Hz", "v2"])
def source(request, sources):
    return sources[request.param]


# True conversions


@pytest.mark.parametrize("name", ["v1", "v1-25Hz"])
def test_the_config_of_version_1(sources, tmp_path, name):
    convert(str(sources[name]), str(tmp_path / "out"))
    config, s = json.loads((tmp_path / "out" / "config.json").read_text()), version_1("small", KINDS[name][1])
    assert (config["model_type"], config["sample_rate"], config["token_frame_rate"]) == ("cosyvoice1", 22050, s["rate"])
    lm, flow = config["llm"], config["flow"]
    assert lm["text_token_size"] == s["text_vocab"] and lm["llm"]["num_blocks"] == s["blocks"] and "sampling" not in lm
    assert flow["decoder"]["channels"] == [s["unet"]] * 2 and flow["cfm"]["inference_cfg_rate"] == 0.7
    assert config["mel"] == {"n_fft": 1024, "hop_size": 256, "win_size": 1024, "num_mels": 80, "fmin": 0, "fmax": 8000}
    assert config["text_tokenizer"] == {"kind": "whisper" if s["rate"] == 50 else "tiktoken", "languages": 100}
    assert "__new__" not in json.dumps(config)
    ranks = whisper_tokenizer.KINDS[config["text_tokenizer"]["kind"]].file
    assert (tmp_path / "out" / ranks).read_bytes() == (sources[name] / ranks).read_bytes()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "A CosyVoice 1 text-to-speech model" in card and "22,050 Hz" in card and ranks in card


def test_the_config_of_version_2(sources, tmp_path):
    convert(str(sources["v2"]), str(tmp_path / "out"))
    config, s = json.loads((tmp_path / "out" / "config.json").read_text()), SIZES[2]["small"]
    assert config["model_type"] == "cosyvoice2" and config["sample_rate"] == 24000 and config["chunk_size"] == 25
    assert config["llm"]["own_specials"] and config["llm"]["speech_vocab_size"] == s["codes"] + 3
    assert config["flow"]["decoder"]["static_chunk_size"] == 50 and config["flow"]["encoder"]["num_blocks"] == 2
    assert config["mel"]["fmax"] == 8000 and len(config["special_tokens"]) == 17
    assert "A CosyVoice 2 text-to-speech model" in (tmp_path / "out" / "README.md").read_text()


def test_an_early_folder_of_version_2(copy_of, sources, tmp_path):
    """Its yaml has version 1's name, names no chunks, and limits the left context, which upstream no longer heeds."""
    copy = copy_of("v2")
    yaml = (copy / "cosyvoice2.yaml").rename(copy / "cosyvoice.yaml")
    replace(yaml, "chunk_size: 25\nnum_decoding_left_chunks: -1\n", "")
    replace(yaml, "        static_chunk_size: !ref <chunk_size>\n    decoder", "    decoder")
    replace(yaml, "<chunk_size> * <token_mel_ratio>", "<token_frame_rate> * <token_mel_ratio>")
    replace(yaml, "num_decoding_left_chunks: !ref <num_decoding_left_chunks>", "num_decoding_left_chunks: 2")
    early, now = (convert(str(f), str(tmp_path / "out"), dry_run=True).config for f in (copy, sources["v2"]))
    assert early["flow"]["decoder"].pop("num_decoding_left_chunks") == 2
    now["flow"]["decoder"].pop("num_decoding_left_chunks")
    assert early == now


@pytest.mark.parametrize("version", [1, 2, 3])
def test_the_released_yaml_and_weights_make_a_model(version):
    """Of the full size: the yaml's numbers and the names of upstream's checkpoints, without their values."""
    s = version_1("full") if version == 1 else SIZES[version]["full"]
    module, yaml = version_module(version), parse(YAML[version].format(**s))
    added = SimpleNamespace(special={}, end_of_prompt_id=151646)
    text = TextTokenizer(added, {}, [], {"kind": "whisper"}, None if version == 1 else qwen2_config(s))
    config = config_of(module, yaml, text)
    check_kinds(config, module)
    parts = {}
    for file, shapes in SHAPES[version].items():
        weights = {n: np.broadcast_to(np.float32(1), shape) for n, shape in shapes(s).items()}
        part = file.removesuffix(".pt")
        parts[part] = {n: ArrayTensor(a) for n, a in module.SANITIZE[part](weights).items()}
    check_numbers(config, parts, dict.fromkeys(parts, "its file"), "the yaml", module)
    for part, (cls, part_config) in model_class(config).parts.items():
        if part in parts:
            model = cls(part_config.from_dict(config[part]))
            expected = {n: a.shape for n, a in tree_flatten(model.parameters())}
            assert expected == {n: t.shape for n, t in parts[part].items()}


def quantised(folder):
    kinds = {n: t.dtype for n, t in open_source(folder).tensors.items()}
    return {re.sub(r"\d+", "#", n) for n, kind in kinds.items() if kind == "I8"}


def test_quantisation_takes_attention_and_feed_forward_alone(sources, tmp_path):
    for name in ("v1", "v2"):
        convert(str(sources[name]), str(tmp_path / name), quantize="int8")
    encoder = [f"attention.{n}" for n in ("q", "k", "v", "out")] + ["ff_in", "ff_out"]
    network = ["to_q", "to_k", "to_v", "to_out", "ff_in", "ff_out"]
    unet = {f"flow.unet.{side}.#.transformers.#.{n}.weight" for side in ("down", "mid", "up") for n in network}
    lm = {f"llm.{n}.layers.#.{layer}.weight" for n in ("text_encoder", "llm") for layer in encoder}
    assert quantised(tmp_path / "v1") == lm | unet | {f"flow.encoder.layers.#.{n}.weight" for n in encoder}
    lm = {f"llm.qwen#.layers.#.self_attn.{p}_proj.weight" for p in "qkvo"}
    lm |= {f"llm.qwen#.layers.#.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    both = {f"flow.encoder.{half}.layers.#.{n}.weight" for half in ("tokens", "frames") for n in encoder}
    assert quantised(tmp_path / "v2") == lm | unet | both


def test_nothing_is_skipped_but_the_head_over_text(source):
    skipped = open_speech(find_speech_model(str(source))).skipped
    lm = [] if (source / "cosyvoice.yaml").exists() else ["llm.model.lm_head.weight"]
    assert skipped == {"llm.pt": lm, "flow.pt": [], "hift.pt": []}


def test_the_speech_tokenizer_of_the_other_rate(copy_of, tmp_path):
    copy = copy_of("v1")
    add_front_ends(copy, 1, "s3_v1_25hz")
    assert "makes 25 speech tokens a second, the model takes 50" in error(copy, tmp_path)


# Voices

SFT = ["中文女", "中文男", "日语男", "粤语女", "英文女", "英文男", "韩语女"]


def test_voices_of_the_sft_model(copy_of, tmp_path):
    copy = copy_of("v1")
    entries = {name: voice(version_1("small"), 0, i) for i, name in enumerate(SFT)}
    write_torch(copy / "spk2info.pt", entries)
    assert convert(str(copy), str(tmp_path / "out")).voices == SFT
    names = [p.name for p in (tmp_path / "out" / "voices").iterdir()]
    assert len(names) == len(SFT) and all(re.fullmatch(r"[a-z0-9]+\.safetensors", n) for n in names)
    voices = load(tmp_path / "out").voices
    assert set(voices) == set(SFT)
    for name, entry in entries.items():
        assert np.array_equal(voices[name].embedding, entry["embedding"][0]) and not voices[name].has_prompt
    assert verify(tmp_path / "out", copy).voices == dict.fromkeys(SFT, "ok")


@pytest.mark.parametrize("name", ["v1", "v1-25Hz"])
def test_a_voice_with_a_recording(sources, tmp_path, name):
    convert(str(sources[name]), str(tmp_path / "out"))
    anna, entry = load(tmp_path / "out").voices["anna"], voice(version_1("small", KINDS[name][1]))
    assert np.array_equal(anna.prompt_mel, entry["prompt_speech_feat"][0]) and anna.sample_rate == 22050
    assert np.array_equal(anna.transcript_ids, entry["prompt_text"][0])


@pytest.mark.parametrize(
    "name, stem",
    [
        ("anna", "anna"), ("中文女", "u4e2du6587u5973"), ("A b/c", "A_b_c"), ("..", "voice"), ("CON", "voice-CON"),
        ("lpt1.x", "voice-lpt1.x"), ("é", "u00e9"), ("😀", "_"), ("x" * 99, "x" * 60),
    ],
)  # fmt: skip
def test_names_of_files(name, stem):
    assert file_stem(name) == stem


@pytest.mark.parametrize(
    "change, said",
    [
        ({"prompt_speech_feat": np.zeros((1, 20, 80), np.float32)}, "tokens and 20 mel frames, where about 52"),
        ({"prompt_speech_feat": np.zeros((1, 90, 80), np.float32)}, "30 speech tokens and 90 mel frames"),
        ({"prompt_text": np.array([[1869]], np.int32)}, "text ids outside of 0 to 1868"),
    ],
)
def test_bad_voices(copy_of, tmp_path, change, said):
    copy = copy_of("v1")
    write_torch(copy / "spk2info.pt", {"anna": voice(version_1("small")) | change})
    message = error(copy, tmp_path)
    assert said in message and "'anna'" in message


def test_a_mel_at_upstreams_wrong_rate_is_told(copy_of, tmp_path):
    copy, entry = copy_of("v1"), voice(version_1("small"), prompt=250)
    for frames, told in ((430, False), (468, True)):  # of 22.05 kHz, of 24 kHz
        entry["prompt_speech_feat"] = np.zeros((1, frames, 80), np.float32)
        write_torch(copy / "spk2info.pt", {"anna": entry})
        notes = convert(str(copy), str(tmp_path / "out"), dry_run=True).notes
        assert any("24000 Hz audio" in note for note in notes) == told


# The text tokenizer of version 1


def test_ranks_from_elsewhere(copy_of, tmp_path, capsys):
    copy = copy_of("v1")
    ranks = (copy / "multilingual.tiktoken").rename(tmp_path / "other.name")
    words = ["--model", str(copy), "--out", str(tmp_path / "out"), "--tokenizer", str(ranks)]
    assert main(words) == 0
    assert (tmp_path / "out" / "multilingual.tiktoken").read_bytes() == ranks.read_bytes()
    assert "--tokenizer other.name" in (tmp_path / "out" / "README.md").read_text()
    assert verify_main([str(tmp_path / "out"), "--against", str(copy), "--tokenizer", str(ranks)]) == 0
    assert load(tmp_path / "out").tokenizer.encode("aab") == load(tmp_path / "out").tokenizer.encode("aa") + [98]


def test_ranks_from_an_installed_package(copy_of, tmp_path, monkeypatch):
    copy, assets = copy_of("v1"), tmp_path / "packages" / "whisper" / "assets"
    assets.mkdir(parents=True)
    (assets.parent / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (copy / "multilingual.tiktoken").rename(assets / "multilingual.tiktoken")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    report = convert(str(copy), str(tmp_path / "out"))
    assert (tmp_path / "out" / "multilingual.tiktoken").is_file()
    assert report.config["text_tokenizer"]["kind"] == "whisper"


@pytest.mark.parametrize("name, package", [("v1", "openai-whisper"), ("v1-25Hz", "cosyvoice2-eu")])
def test_no_ranks(copy_of, tmp_path, monkeypatch, name, package):
    copy = copy_of(name)
    for path in copy.glob("*.tiktoken"):
        path.unlink()
    monkeypatch.setattr(whisper_tokenizer, "_installed", lambda kind: [])
    message = error(copy, tmp_path)
    assert package in message and "--tokenizer" in message


def test_bad_ranks(copy_of, tmp_path):
    copy = copy_of("v1")
    path = copy / "multilingual.tiktoken"
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    assert "multilingual.tiktoken" in error(copy, tmp_path)
    write_ranks(path, merges=7)
    message = error(copy, tmp_path)
    assert "1872 ids" in message and "1869 rows" in message
    assert "no such file" in error(copy, tmp_path, tokenizer=str(tmp_path / "none"))
    path.write_bytes(good)
    replace(copy / "cosyvoice.yaml", "!name:whisper.tokenizer", "!name:other.tokenizer")
    assert "other.tokenizer.get_tokenizer" in error(copy, tmp_path)


def test_tokenizer_of_version_2_cannot_be_given(sources, tmp_path):
    path = sources["v1"] / "multilingual.tiktoken"
    assert "goes with H3 and CosyVoice 1 models" in error(sources["v2"], tmp_path, tokenizer=str(path))


# Bad folders


@pytest.mark.parametrize("file", ["llm.pt", "flow.pt"])
@pytest.mark.parametrize("other, one", [("v1", 2), ("v2", 1)])
def test_weights_of_another_version(copy_of, sources, tmp_path, file, other, one):
    copy = copy_of("v2" if one == 2 else "v1")
    shutil.copy(sources[other] / file, copy / file)
    message = error(copy, tmp_path)
    assert f"{YAMLS[one]} says that this is CosyVoice {one}, but {file} is CosyVoice {3 - one}'s" in message


def test_the_vocoder_of_another_version(copy_of, sources, tmp_path):
    copy = copy_of("v1")
    shutil.copy(sources["v2"] / "hift.pt", copy / "hift.pt")
    assert "the number of hift.upsample_rates = 2, but hift.pt has 3" in error(copy, tmp_path)


def test_two_yamls(copy_of, sources, tmp_path):
    copy = copy_of("v2")
    shutil.copy(copy / "cosyvoice2.yaml", copy / "cosyvoice.yaml")  # the old name beside the new one
    assert convert(str(copy), str(tmp_path / "out"), dry_run=True).config["model_type"] == "cosyvoice2"
    shutil.copy(sources["v1"] / "cosyvoice.yaml", copy)
    message = error(copy, tmp_path)
    assert "holds cosyvoice2.yaml of CosyVoice 2 and cosyvoice.yaml of CosyVoice 1" in message


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("text_token_size: 1869", "text_token_size: 1870", "llm.text_token_size = 1870, but llm.pt has 1869"),
        ("speech_token_size: 99", "speech_token_size: 100", "flow.vocab_size differ: 100 and 99"),
        ("size: 99", "size: 98", "flow.vocab_size = 98, but flow.pt has 99"),
        ("text_encoder_input_size: 32", "text_encoder_input_size: 64", "input_size = 64, but llm.pt has 32"),
        ("num_blocks: 3", "num_blocks: 4", "llm.llm.num_blocks = 4, but llm.pt has 3"),
        ("attention_heads: 2", "attention_heads: 4", "attention_heads = 4, but llm.pt has 2"),
        ("linear_units: 192", "linear_units: 256", "linear_units = 256, but llm.pt has 192"),
        ("linear_units: 128", "linear_units: 256", "flow.encoder.linear_units = 256, but flow.pt has 128"),
        ("llm_input_size: 128", "llm_input_size: 64", "= 64, but llm.pt has 128"),
        ("output_size: 128\n        att", "output_size: 64\n        att", "output_size = 64, but llm.pt has 128"),
        ("channels: [64, 64]", "channels: [128, 128]", "channels[0] = 128, but flow.pt has 64"),
        ("channels: [64, 64]", "channels: [64]", "number of flow.decoder.estimator.channels = 1, but flow.pt has 2"),
        ("num_mid_blocks: 2", "num_mid_blocks: 3", "num_mid_blocks = 3, but flow.pt has 2"),
        ("num_heads: 1", "num_heads: 2", "num_heads * attention_head_dim = 128, but flow.pt has 64"),
        ("input_frame_rate: 50", "input_frame_rate: 40", "input_frame_rate is 40"),
        ("sample_rate: 22050", "sample_rate: 24000", "sample_rate is 24000; only 22050"),
        ("upsample_rates: [8, 8]", "upsample_rates: [8, 4]", "mel.hop_size differ: 128 and 256"),
        ("spk_embed_dim: 192", "spk_embed_dim: 256", "spk_embed_dim = 256"),
        ("static_chunk_size: 1\n    llm", "static_chunk_size: 2\n    llm", "only 1 is supported"),
        ("use_cnn_module: False", "use_cnn_module: True", "only False is supported"),
        ("'gelu'", "'silu'", "only 'gelu' is supported"),
        ("num_languages: 100", "num_languages: x", "num_languages is 'x'"),
        ("get_tokenizer: !name", "get_tokeniser: !name", "lacks the entry 'get_tokenizer'"),
        ("flow.MaskedDiffWithXvec", "flow.CausalMaskedDiffWithXvec", "its flow is a CausalMaskedDiffWithXvec"),
        ("llm.TransformerLM", "llm.OtherLM", "its llm is a OtherLM, not one of TransformerLM, Qwen2LM, CosyVoice3LM"),
        ("llm: !new:cosyvoice.llm.llm.TransformerLM", "llm: !ref <sample_rate>", "valid YAML"),
    ],
)  # fmt: skip
def test_a_yaml_of_version_1_with_other_numbers_than_the_weights(copy_of, tmp_path, old, new, said):
    copy = copy_of("v1")
    replace(copy / "cosyvoice.yaml", old, new)
    message = error(copy, tmp_path)
    assert said in message


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("speech_token_size: 99", "speech_token_size: 100", "flow.vocab_size differ: 100 and 99"),
        ("size: 99", "size: 98", "llm.speech_token_size + 3 = 101, but llm.pt has 102"),
        ("llm_input_size: 128", "llm_input_size: 64", "hidden_size differ: 64 and 128"),
        ("input_size: 64", "input_size: 32", "flow.encoder.input_size = 32, but flow.pt has 64"),
        ("num_blocks: 2", "num_blocks: 3", "flow.encoder.num_blocks = 3, but flow.pt has 2"),
        ("pre_lookahead_len: 3", "pre_lookahead_len: 4", "pre_lookahead_len + 1 = 5, but flow.pt has 4"),
        ("channels: [64]", "channels: [128]", "channels[0] = 128, but flow.pt has 64"),
        ("chunk_size: 25", "chunk_size: 0", "chunk_size is 0"),
        ("<chunk_size> * <token_mel_ratio>", "<chunk_size> * 3", "differ: 50 and 75"),
        ("static_chunk_size: !ref <chunk_size>\n", "static_chunk_size: 30\n", "static_chunk_size differ: 25 and 30"),
        ("token_frame_rate: 25", "token_frame_rate: 50", "mel frames a second"),
        ("mix_ratio: [5, 15]", "mix_ratio: 5", "cosyvoice2.yaml"),
        ("t_scheduler: 'cosine'", "t_scheduler: 'linear'", "only 'cosine'"),
        ("upsample_rates: [8, 5, 3]", "upsample_rates: [8, 15]", "hift.upsample_rates = 2, but hift.pt has 3"),
    ],
)  # fmt: skip
def test_a_yaml_of_version_2_with_other_numbers_than_the_weights(copy_of, tmp_path, old, new, said):
    copy = copy_of("v2")
    replace(copy / "cosyvoice2.yaml", old, new)
    assert said in error(copy, tmp_path)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", ["v1", "v2"])
def test_no_entry_of_the_yaml_can_crash_the_converter(copy_of, tmp_path, name, every):
    """Whatever stands in any one place of the yaml, the outcome is a plan or a one-line error."""
    copy = copy_of(name)
    path, outcomes = copy / YAMLS[KINDS[name][0]], Counter()
    lines = path.read_text().splitlines()
    values = ("", "x", "[[1]]")
    for i, line in enumerate(lines):
        for value in values[i % every :: every] if line[:1] not in "#_" else ():
            path.write_text("\n".join([*lines[:i], f"{line.partition(':')[0]}: {value}", *lines[i + 1 :]]) + "\n")
            try:
                json.dumps(convert(str(copy), str(tmp_path / "out"), dry_run=True).config, sort_keys=True)
                outcomes["plan"] += 1
            except CosyH3Error as e:
                assert "\n" not in str(e), e
                outcomes["error"] += 1
    assert outcomes["plan"] > 20 / every and outcomes["error"] > 80 / every
