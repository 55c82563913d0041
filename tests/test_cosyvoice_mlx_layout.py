"""The layout of mlx-audio, of CosyVoice 2 and 3: what its own converter writes is read as the folder it was made from.

The converter is the one of PyPI mlx-audio-plus 0.1.8, found in the environment or in the unpacked wheel that
MLX_AUDIO_PLUS names (tests without it are skipped). It wants PyTorch for `torch.load` alone: here our reader stands in.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mlx_cosyh3.convert import convert
from mlx_cosyh3.convert.cosyvoice import find_speech_model, open_speech
from mlx_cosyh3.convert.cosyvoice_mlx import from_mlx_layout, is_layout, read_speech_tokenizer
from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.convert.verify import verify
from mlx_cosyh3.cosyvoice import campplus, s3tokenizer
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.load import load
from tests.golden_data import cosyvoice_golden
from tests.make_cosyvoice_folder import make_folder

CONVERTER = "tts/models/cosyvoice{}/scripts/convert.py"
VERSIONS = (2, 3)
RUN = """
import importlib.util, sys, types
import numpy, safetensors.numpy
from mlx_cosyh3.convert.torch_file import read_torch
from mlx_cosyh3.convert.torch_tensor import TorchTensor
TorchTensor.cpu = lambda tensor: tensor
sys.modules["torch"] = types.SimpleNamespace(load=lambda path, **options: read_torch(path))
# safetensors 0.8 writes the memory of a transposed array as it lies; earlier ones, which made the published files, in
# the order of the axes.
write = safetensors.numpy.save_file
safetensors.numpy.save_file = lambda t, path: write({n: numpy.ascontiguousarray(a) for n, a in t.items()}, path)
spec = importlib.util.spec_from_file_location("their_convert", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.convert_from_source(sys.argv[2], sys.argv[3], dtype=sys.argv[4])
"""


def theirs(version=3):
    """The folder of the package mlx_audio; skips without it."""
    path = os.environ.get("MLX_AUDIO_PLUS")
    spec = importlib.util.find_spec("mlx_audio") if path is None else None
    folder = Path(path) / "mlx_audio" if path else Path(spec.origin).parent if spec and spec.origin else None
    if folder is None or not (folder / CONVERTER.format(version)).is_file():
        pytest.skip("needs mlx-audio-plus: install it, or set MLX_AUDIO_PLUS to its unpacked wheel")
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("layout")
    return {version: make_folder(root / f"v{version}", version=version) for version in VERSIONS}


@pytest.fixture
def source(sources):
    return sources[3]


def write_theirs(source, out, dtype="float32", version=3):
    """Their converter's folder, with the tokenizer files that it would make with transformers."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HF_HUB_OFFLINE": "1"}
    converter = theirs(version) / CONVERTER.format(version)
    command = [sys.executable, "-c", RUN, str(converter), str(source), str(out), dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(source / "CosyVoice-BlankEN" / name, out)
    return out


RENAMED = {  # (upstream's, theirs) within the flow
    3: (("time_mlp.", "time_mlp_"), ("conv1.0.", "conv1."), ("conv2.0.", "conv2."), ("to_out.0", "to_out_0"),
        ("ff.ff.0.0", "ff.ff_0_0"), ("ff.ff.2", "ff.ff_2")),
    2: (("encoders.", "encoders_"), ("embed.out.0", "embed.linear"), ("embed.out.1", "embed.norm"),
        ("blocks.0.0.", "blocks_0.resnet."), ("mid_blocks.1.0.", "mid_blocks_1.resnet."),
        ("blocks.0.1.0.", "blocks_0.transformer_0."), ("mid_blocks.1.1.0.", "mid_blocks_1.transformer_0."),
        ("down_blocks.0.2.", "down_blocks_0.downsample.conv."), ("up_blocks.0.2.", "up_blocks_0.upsample.conv."),
        (".block.0.", ".conv.conv."), (".block.2.", ".norm."), ("mlp.1.", "mlp_linear."),
        ("attn1.to_q", "attn.query_proj"), ("attn1.to_k", "attn.key_proj"), ("attn1.to_v", "attn.value_proj"),
        ("attn1.to_out.0", "attn.out_proj"), ("ff.net.0.proj", "ff.layers.0"), ("ff.net.2", "ff.layers.1")),
}  # fmt: skip


def write_ours(source, out, bits=None, version=3):
    """A folder in this layout, from what is known of it, with Qwen2 quantised; shows what is tested without theirs."""
    out.mkdir()
    tensors, vocoder = {}, "hifigan" if version == 3 else "hift"
    opened = {n: t.numpy() for f in ("llm.pt", "flow.pt") for n, t in open_source(source / f).tensors.items()}
    for name, a in opened.items():
        if name.startswith("llm.model.model."):
            name = name.replace("llm.model.model.", "qwen2.model.")
            if bits and re.search(r"layers.*_proj\.weight$", name):
                packed = mx.quantize(mx.array(np.ascontiguousarray(a)), 64, bits)
                for kind, part in zip(("weight", "scales", "biases"), packed):
                    tensors[name.replace("weight", kind)] = np.array(part)
                continue
        elif name.startswith(("speech_embedding", "llm_")):
            name = f"llm.{name}"
        elif name.startswith("llm."):
            continue
        else:
            a = a.transpose(0, 2, 1) if a.ndim == 3 else a
            for old, new in RENAMED[version]:
                name = name.replace(old, new)
            name = f"flow.{name}"
        tensors[name] = a
    original = open_speech(find_speech_model(str(source)))
    for name, tensor in original.parts["hift"].items():
        if name.endswith("weight_g"):
            continue
        a, part = tensor.numpy(), name.rpartition(".")[0]
        if name.endswith("weight_v"):
            g = original.parts["hift"][f"{part}.weight_g"].numpy()
            a = (a / np.sqrt(np.square(a, dtype=np.float64).sum((1, 2), keepdims=True)) * g[:, None, None]).astype(
                np.float32
            )
            name = f"{part}.weight"
        if version == 3 and re.search(r"conv|ups|downs", part):
            name = re.sub(r"\.(weight|bias)$", r".conv.\1", name)
        tensors[f"{vocoder}." + re.sub(r"condnet\.", "condnet_", name)] = a
    save_file({n: np.ascontiguousarray(a) for n, a in tensors.items()}, out / "model.safetensors")
    hift = {k: v for k, v in original.config["hift"].items() if k not in ("istft_params", "f0_predictor")}
    if version == 3:
        config = {
            "model_type": "cosyvoice3", "sample_rate": 24000, "dtype": "float32",
            "llm": {"llm_input_size": 896, "speech_token_size": 6561},
            "flow": {
                "vocab_size": 6561, "token_mel_ratio": 2, "dit": {"dim": 1024, "depth": 22, "static_chunk_size": 50},
            },
            "hifigan": hift | {"istft_n_fft": 16, "istft_hop_len": 4, "base_channels": 512},
        }  # fmt: skip
    else:
        config = {"model_type": "cosyvoice2", "version": "0.5B", "sample_rate": 24000, "mel_channels": 80}
        config |= {"speech_token_size": 6561, "dtype": "float32"}
    if bits:
        config["quantization"] = {"bits": bits, "group_size": 64, "quantized_components": ["qwen2.model.layers"]}
    (out / "config.json").write_text(json.dumps(config))
    for name in ("vocab.json", "merges.txt", "tokenizer_config.json"):
        shutil.copy(source / "CosyVoice-BlankEN" / name, out)
    return out


def same_model(folder, source, tolerance):
    """The layout's model has the tensors and numbers of the folder that it was made from."""
    config, weights = from_mlx_layout(folder)
    original = open_speech(find_speech_model(str(source)))
    for name, tensor in ((f"{p}.{n}", t) for p, tensors in original.parts.items() for n, t in tensors.items()):
        a, b = weights.pop(name).astype(np.float64), tensor.numpy().astype(np.float64)
        if name.endswith("weight_v"):  # of folded weights only the direction is known
            norm = lambda x: np.sqrt(np.square(x).sum((1, 2), keepdims=True))  # noqa: E731
            a, b = a / norm(a), b / norm(b)
        assert a.shape == b.shape and np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-3), name
    assert not weights
    for key in original.config.keys() - {"flow", "hift"}:
        assert config[key] == original.config[key], key
    for part in ("flow", "hift"):
        for key, value in config[part].items():
            if not isinstance(value, dict):
                assert original.config[part][key] == value, key
    nested = {
        "dit": ("dim", "depth", "heads", "dim_head", "ff_mult", "static_chunk_size"),
        "decoder": ("channels", "num_heads", "attention_head_dim", "n_blocks", "num_mid_blocks", "static_chunk_size"),
        "encoder": ("input_size", "output_size", "attention_heads", "linear_units", "num_blocks", "static_chunk_size"),
    }
    for part, keys in nested.items():
        for key in keys if part in config["flow"] else ():
            assert config["flow"][part][key] == original.config["flow"][part][key], key


@pytest.mark.parametrize("version", VERSIONS)
def test_what_their_converter_writes_is_the_model(sources, tmp_path, version):
    same_model(write_theirs(sources[version], tmp_path / "mlx", version=version), sources[version], 1e-6)


@pytest.mark.parametrize("version", VERSIONS)
def test_what_their_converter_writes_in_half_precision_speaks_alike(sources, tmp_path, version):
    source = sources[version]
    folder = write_theirs(source, tmp_path / "mlx", "float16", version)
    same_model(folder, source, 2e-3)
    convert(str(folder), str(tmp_path / "out"))
    report = verify(tmp_path / "out", folder)
    assert report.ok, report.table()
    assert load(tmp_path / "out").llm.speech_embedding.weight.dtype == mx.float32


@pytest.mark.parametrize("version", VERSIONS)
def test_the_layout_without_their_converter(sources, tmp_path, version):
    source = sources[version]
    folder = write_ours(source, tmp_path / "mlx", version=version)
    assert is_layout(folder) and not is_layout(source) and not is_layout(tmp_path)
    same_model(folder, source, 1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", VERSIONS)
def test_quantised_models_stay_as_they_are(sources, tmp_path, bits, version):
    folder = write_ours(sources[version], tmp_path / "mlx", bits, version)
    report = convert(str(folder), str(tmp_path / "out"), quantize="flow=int8")
    assert report.config["quantization"]["llm"] == {"mode": "affine", "bits": bits, "group_size": 64}
    stored, packed = open_source(tmp_path / "out").tensors, load_file(folder / "model.safetensors")
    q = "layers.1.self_attn.q_proj"
    for kind in ("weight", "scales", "biases"):
        assert np.array_equal(stored[f"llm.qwen2.{q}.{kind}"].numpy(), packed[f"qwen2.model.{q}.{kind}"])
    checked = verify(tmp_path / "out", folder)
    assert checked.ok, checked.table()
    assert checked.stages[0].error == 0
    with pytest.raises(CosyH3Error, match="quantised already"):
        convert(str(folder), str(tmp_path / "again"), quantize="int8")


def test_bad_folders(source, tmp_path):
    folder = write_ours(source, tmp_path / "mlx", 8)
    good, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())

    def message(tensors=None, **changed):
        save_file(good if tensors is None else tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | changed).items() if v is not None}))
        with pytest.raises(CosyH3Error) as e:
            convert(str(folder), str(tmp_path / "out"))
        assert "\n" not in str(e.value) and not (tmp_path / "out").exists()
        return str(e.value)

    assert "quantization" in message(quantization=None)
    assert "'vocoder.x'" in message(good | {"vocoder.x": np.zeros(1, np.float32)})
    assert "'hifigan'" in message({n: a for n, a in good.items() if not n.startswith("hifigan")})
    assert "lacks" in message(
        {n: a for n, a in good.items() if n != "flow.decoder.estimator.proj_in.bias" and "conv_pre" not in n}
    )
    assert "lacks" in message(flow=None)
    data = (folder / "model.safetensors").read_bytes()
    save_file(good, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CosyH3Error, match="model.safetensors"):
        convert(str(folder), str(tmp_path / "out"))
    save_file(good, folder / "model.safetensors")
    with pytest.raises(CosyH3Error, match="--llm"):
        convert(str(folder), str(tmp_path / "out"), llm="llm.rl.pt")


def test_their_speaker_encoder(source, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(theirs().parent)
    spec = importlib.util.spec_from_file_location("their_xvector", theirs() / "codec/models/s3gen/xvector.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    upstream = {n: t.numpy() for n, t in open_source(cosyvoice_golden("campplus") / "campplus_tiny.pt").tensors.items()}
    model = module.CAMPPlus(feat_dim=80, embedding_size=192, growth_rate=8, bn_size=2, init_channels=16)
    written = model.sanitize(
        {n: mx.array(np.ascontiguousarray(a)) for n, a in upstream.items() if "num_batches" not in n}
    )
    folder = write_ours(source, tmp_path / "mlx")
    tensors = load_file(folder / "model.safetensors") | {
        f"campplus.{n}": np.array(a, order="C") for n, a in written.items()
    }
    save_file(tensors, folder / "model.safetensors")
    weights = from_mlx_layout(folder)[1]
    expected = campplus.sanitize(upstream)
    assert {n.removeprefix("campplus.") for n in weights if n.startswith("campplus.")} == expected.keys()
    for name, a in expected.items():
        assert np.array_equal(weights[f"campplus.{name}"], a), name


def test_their_speech_tokenizer(tmp_path):
    upstream = {n: t.numpy() for n, t in open_source(cosyvoice_golden("s3_v3") / "tokenizer.pt").tensors.items()}
    written = {}
    for name, a in upstream.items():
        if re.search("freqs_cis|initted|cluster_size|embed_avg", name):
            continue
        name = re.sub(r"mlp\.(\d)", r"mlp.layers.\1", name).replace("_codebook", "fsq_codebook")
        written[name] = np.ascontiguousarray(a.transpose(0, 2, 1) if a.ndim == 3 else a)
    save_file(written, tmp_path / "model.safetensors")
    config, weights = read_speech_tokenizer(tmp_path)
    expected = s3tokenizer.sanitize(upstream)
    assert config["n_state"] == 128 and weights.keys() == expected.keys()
    assert all(np.array_equal(weights[n], a) for n, a in expected.items())


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("version", VERSIONS)
def test_loads_without_conversion(sources, tmp_path, bits, version):
    model = load(write_ours(sources[version], tmp_path / "layout", bits, version))
    kinds = {type(m).__name__ for n, m in model.llm.named_modules() if n.endswith(("q_proj", "qkv_proj"))}
    assert kinds == {"QuantizedLinear" if bits else "Linear"}
    tokens = mx.array([[1, 2, 3, 4]])
    mel = model.flow(tokens, tokens[:, :0], mx.zeros((1, 0, 80)), mx.ones((1, 192)), steps=1)
    wave = model.hift(mel) if version == 3 else model.hift(mel, key=mx.random.key(0))[0]
    assert mel.shape == (1, 8, 80) and wave.shape == (1, 8 * 480)
