"""Conversion of a CosyVoice 3 folder in which something is missing, damaged or other than it should be: one line."""

import json
from collections import Counter

import numpy as np
import pytest
from mlx_cosyh3.convert import convert

from mlx_cosyh3.errors import CosyH3Error
from tests.golden_data import cosyvoice_golden
from tests.make_cosyvoice_folder import voice, write_torch
from tests.speech_folders import error, replace
from tests.test_convert_cosyvoice import SHAPES, SIZES, copy, source  # noqa: F401 - two are fixtures


@pytest.mark.parametrize(
    "name, said",
    [
        ("hift.pt", "lacks hift.pt"),
        ("llm.pt", "lacks llm.pt"),
        ("cosyvoice3.yaml", "no cosyvoice3.yaml, cosyvoice2.yaml or cosyvoice.yaml"),
        ("spk2info.pt", "nothing could speak"),
        ("CosyVoice-BlankEN/config.json", "config.json is missing"),
        ("CosyVoice-BlankEN/vocab.json", "no tokenizer"),
        ("CosyVoice-BlankEN/merges.txt", "lacks merges.txt"),
    ],
)
def test_missing_files(copy, tmp_path, name, said):
    (copy / name).unlink()
    assert said in error(copy, tmp_path)


@pytest.mark.parametrize("name", ["campplus.onnx", "speech_tokenizer_v3.onnx"])
def test_truncated_onnx(copy, tmp_path, name):
    folder, file = {"c": ("campplus", "campplus_tiny.onnx"), "s": ("s3_v3", "tokenizer_lookalike.onnx")}[name[0]]
    data = (cosyvoice_golden(folder) / file).read_bytes()
    for part in (0, 1000, len(data) // 2, len(data) - 10):
        (copy / name).write_bytes(data[:part])
        assert name in error(copy, tmp_path)


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("speech_token_size: 99", "speech_token_size: 100", "flow.vocab_size differ: 100 and 99"),
        ("vocab_size: 99", "vocab_size: 98", "differ"),
        ("token_size: 99", "token_size: 98", "differ"),
        ("dim: 128", "dim: 256", "flow.decoder.estimator.dim = 256, but flow.pt has 128"),
        ("depth: 2", "depth: 3", "flow.decoder.estimator.depth = 3, but flow.pt has 2"),
        ("heads: 2", "heads: 4", "heads * dim_head = 256, but flow.pt has 128"),
        ("ff_mult: 2", "ff_mult: 4", "dim * ff_mult = 512, but flow.pt has 256"),
        ("channels: 64\n        pre", "channels: 65\n        pre", "channels = 65, but flow.pt has 64"),
        ("spk_embed_dim: 192", "spk_embed_dim: 256", "flow.spk_embed_dim = 256, but flow.pt has 192"),
        ("base_channels: 64", "base_channels: 32", "hift.base_channels = 32, but hift.pt has 64"),
        ("cond_channels: 32", "cond_channels: 16", "cond_channels = 16, but hift.pt has 32"),
        ("sizes: [16, 11, 7]", "sizes: [16, 9, 7]", "upsample_kernel_sizes[1] = 9, but hift.pt has 11"),
        ("conv_pre_look_right: 4", "conv_pre_look_right: 3", "conv_pre_look_right + 1 = 4, but hift.pt has 5"),
        ("upsample_rates: [8, 5, 3]", "upsample_rates: [8, 15]", "hift.upsample_rates = 2, but hift.pt has 3"),
        ("sizes: [3, 7, 11]\n    resblock", "sizes: [3, 7, 9]\n    resblock", "hift.pt: resblocks."),
        ("llm_input_size: 128", "llm_input_size: 64", "hidden_size differ: 64 and 128"),
        ("sample_rate: 24000", "sample_rate: 22050", "mel frames a second"),
        ("hop_size: 480", "hop_size: 240", "mel frames a second"),
        ("hop_len: 4", "hop_len: 8", "hop_size differ: 960 and 480"),
        ("hop_len: 4", "hop_len: 0", "hop_len is 0"),
        ("static_chunk_size: !ref <chunk_size> * <token_mel_ratio>", "static_chunk_size: 40", "differ: 50 and 40"),
        ("    num_mels: 80", "    num_mels: 40", "output_size differ: 40 and 80"),
        ("t_scheduler: 'cosine'", "t_scheduler: 'linear'", "only 'cosine'"),
        ("num_decoding_left_chunks: -1", "num_decoding_left_chunks: 2", "only -1"),
        ("mix_ratio: [5, 15]", "mix_ratio: [5, 0]", "mix_ratio is [5, 0]"),
        ("audio_limit: 0.99", "audio_limit: [1]", "audio_limit is [1]"),
        ("lrelu_slope: 0.1", "lrelu_slope: -0.1", "lrelu_slope is -0.1"),
        ("fmax: null", "fmax: 12001", "half the rate"),
        ("win_size: 1920", "win_size: 4000", "no windows"),
        ("    vocab_size: 99\n", "", "vocab_size"),
        ("sample_rate: 24000\n", "", "sample_rate"),
        ("flow: !new:", "flou: !new:", "flow"),
        ("istft_params:\n        n_fft: 16\n        hop_len: 4", "istft_params: 3", "hop_len is None"),
        ("depth: 2", "depth: two", "depth"),
        ("sample_rate: 24000", "sample_rate: [", "valid YAML"),
    ],
)  # fmt: skip
def test_a_yaml_with_other_numbers_than_the_weights(copy, tmp_path, old, new, said):
    replace(copy / "cosyvoice3.yaml", old, new)
    message = error(copy, tmp_path)
    assert said in message and ("cosyvoice3.yaml" in message or "hift.pt" in message)


@pytest.mark.slow
def test_no_entry_of_the_yaml_can_crash_the_converter(copy, tmp_path):
    """Whatever stands in any one place of the yaml, the outcome is a plan or a one-line error."""
    path, outcomes = copy / "cosyvoice3.yaml", Counter()
    lines = path.read_text().splitlines()
    for i, line in enumerate(lines):
        for value in ("", "0", "x", "[[1]]", "2001-01-01", "!new:a.b") if line[:1] not in "#_" else ():
            changed = [*lines[:i], f"{line.partition(':')[0]}: {value}", *lines[i + 1 :]]
            path.write_text("\n".join(changed) + "\n")
            try:
                report = convert(str(copy), str(tmp_path / "out"), dry_run=True)
                json.dumps(report.config, sort_keys=True)
                outcomes[report.dry_run] += 1
            except CosyH3Error as e:
                assert "\n" not in str(e), e
                outcomes["error"] += 1
    assert outcomes[True] > 20 and outcomes["error"] > 150


@pytest.mark.parametrize(
    "key, value, said",
    [
        ("hidden_size", 64, "differ"),
        ("vocab_size", 639, "vocab_size = 639, but llm.pt has 640"),
        ("num_hidden_layers", 3, "num_hidden_layers = 3, but llm.pt has 2"),
        ("intermediate_size", 128, "intermediate_size = 128, but llm.pt has 192"),
        ("num_key_value_heads", 2, "= 128, but llm.pt has 64"),
        ("hidden_act", "gelu", "hidden_act"),
    ],
)
def test_a_qwen2_config_with_other_numbers_than_the_weights(copy, tmp_path, key, value, said):
    path = copy / "CosyVoice-BlankEN" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert said in error(copy, tmp_path)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"embedding": None, "flow_embedding": None}, "needs an embedding"),
        ({"flow_embedding": np.zeros((1, 100), np.float32)}, "embedding of 192 numbers"),
        ({"flow_embedding": np.full((1, 192), np.nan, np.float32)}, "not finite"),
        ({"flow_prompt_speech_token": np.array([[99]], np.int32)}, "speech tokens outside of 0 to 98"),
        ({"prompt_text": np.array([[640]], np.int32)}, "text ids outside of 0 to 639"),
        ({"prompt_speech_feat": None}, "only one of"),
        ({"prompt_speech_feat": np.zeros((1, 60, 40), np.float32)}, "80 bins"),
        ({"prompt_text": "text"}, "not a tensor"),
        ({"prompt_text": np.ones((1, 3), np.float32)}, "not of whole numbers"),
        ({"prompt_speech_feat": np.zeros((1, 58, 80), np.float32)}, "30 speech tokens and 58 mel frames"),
        ({"flow_prompt_speech_token": np.zeros((1, 0), np.int32)}, "0 speech tokens and 60 mel frames"),
    ],
)
def test_bad_voices(copy, tmp_path, change, said):
    entry = {k: v for k, v in (voice(SIZES["small"]) | change).items() if v is not None}
    write_torch(copy / "spk2info.pt", {"anna": entry})
    message = error(copy, tmp_path)
    assert said in message and "'anna'" in message and "spk2info.pt" in message


class Raw(str):
    """Text that can be written as no valid UTF-8."""

    def encode(self, *_):
        return str.encode(self, "utf-8", "surrogatepass")


@pytest.mark.parametrize(
    "name, said", [(" ", "a name"), ("x" * 201, "a name"), (Raw("a\ud800"), "not Unicode")], ids=range(3)
)
def test_bad_names_of_voices(copy, tmp_path, name, said):
    write_torch(copy / "spk2info.pt", {name: voice(SIZES["small"])})
    message = error(copy, tmp_path)
    assert said in message and len(message) < 300


@pytest.mark.parametrize(
    "options, said",
    [
        ({"quantize": "int9"}, "not one of int8, 4, 8"),
        ({"quantize": "hift=8"}, "'hift'"),
        ({"quantize": "lm=8"}, "nearest known: 'llm'"),
        ({"quantize": "llm=8,llm=4"}, "twice"),
        ({"quantize": "8,4"}, "part=value"),
        ({"dtype": "float16"}, "--store"),
        ({"dtype": "float64"}, "not one of"),
        ({"dtype": "campplus=bfloat16"}, "'campplus'"),
        ({"store": "int8"}, "not one of"),
        ({"heads": 4}, "--heads 4 goes with H3"),
        ({"tokenizer": "none"}, "--tokenizer none: there is no such file"),
        ({"tokenizer": "/"}, "--tokenizer / goes with H3 and CosyVoice 1 models"),
        ({"llm": "llm.rl.pt"}, "lacks llm.rl.pt"),
        ({"revision": "main"}, "--revision"),
        ({"campplus": "/no/such.onnx"}, "no such file"),
    ],
)
def test_bad_options(source, tmp_path, options, said):
    assert said in error(source, tmp_path, **options)


def test_speech_options_of_an_h3_model(tmp_path):
    assert "--store float16 goes with CosyVoice" in error(tmp_path / "none.pt", tmp_path, store="float16")


def test_numbers_too_large_for_float16(copy, tmp_path):
    shapes = SHAPES["hift.pt"](SIZES["small"])
    big = {n: (n, s) for n, s in shapes.items()} | {"conv_post.bias": np.full(18, 1e6, np.float32)}
    write_torch(copy / "hift.pt", big)
    assert "beyond 65504" in error(copy, tmp_path, store="float16")
