"""The speaker encoder and the speech tokenizers against upstream's, from checkpoints and from ONNX graphs."""

import importlib.util

import mlx.core as mx
import numpy as np
import pytest
from safetensors.numpy import load_file

from mlx_cosyh3.convert.front_ends import campplus_from, speech_tokenizer_from
from mlx_cosyh3.cosyvoice import campplus, s3tokenizer
from mlx_cosyh3.cosyvoice.campplus import CAMPPlus, CAMPPlusConfig
from mlx_cosyh3.cosyvoice.s3tokenizer import S3Tokenizer, S3TokenizerConfig
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from tests.golden_data import cosyvoice_golden

S3_FILES = [
    ("s3_v3", "tokenizer.pt", None),
    ("s3_v3", "tokenizer_lookalike.onnx", None),
    ("s3_v2", "tokenizer.pt", None),
    ("s3_v2", "tokenizer_lookalike.onnx", None),
    ("s3_v1_50hz", "tokenizer.pt", 50),
    ("s3_v1_25hz", "tokenizer.pt", 25),
]


def load(model, weights):
    model.load_weights([(k, mx.array(np.ascontiguousarray(v))) for k, v in weights.items()])
    mx.eval(model.parameters())
    return model


def tokenizer(name, file="tokenizer.pt", rate=None):
    config, weights = speech_tokenizer_from(cosyvoice_golden(name) / file, rate)
    return load(S3Tokenizer(S3TokenizerConfig.from_dict(config)), weights)


def near(got, want, bound=1e-4):
    got = np.array(got)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= bound * np.abs(want).max()


@pytest.mark.parametrize("file", ["campplus_tiny.pt", "campplus_tiny.onnx"])
def test_tiny_campplus_is_upstreams(file):
    folder = cosyvoice_golden("campplus")
    io = load_file(folder / "io.safetensors")
    config, weights = campplus_from(folder / file)
    model = load(CAMPPlus(CAMPPlusConfig.from_dict(config)), weights)
    for frames in ("131", "450"):
        x = mx.array(io[f"in.{frames}"])
        near(model(x), io[f"tiny.out.{frames}"])
        head = model.head(x)
        channels = io[f"tiny.head.{frames}"].shape[1]
        near(head.swapaxes(1, 2)[:, :channels], io[f"tiny.head.{frames}"])
        tdnn = mx.maximum(model.tdnn(head), 0)
        near(tdnn.swapaxes(1, 2), io[f"tiny.tdnn.{frames}"])
        for layer in model.block1:
            tdnn = mx.concatenate([tdnn, layer(tdnn)], axis=-1)
        near(tdnn.swapaxes(1, 2), io[f"tiny.block1.{frames}"])


def test_full_size_campplus_is_upstreams():
    folder = cosyvoice_golden("campplus")
    spec = importlib.util.spec_from_file_location("seeded_weights", folder.parent / "seeded_weights.py")
    seeded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(seeded)
    weights = campplus.sanitize(seeded.state_dict("campplus"))
    model = load(CAMPPlus(CAMPPlusConfig.from_weights(weights)), weights)
    io = load_file(folder / "io.safetensors")
    for given, wanted in (("in.131", "full.out.131"), ("in.450", "full.out.450"), ("fbank_in", "full.fbank_out")):
        near(model(mx.array(io[given])), io[wanted])


def test_campplus_head_in_pieces_is_exact(monkeypatch):
    config, weights = campplus_from(cosyvoice_golden("campplus") / "campplus_tiny.pt")
    model = load(CAMPPlus(CAMPPlusConfig.from_dict(config)), weights)
    x = mx.random.normal((1, 130, 80), key=mx.random.key(0))
    whole = np.array(model.head(x))
    monkeypatch.setattr(campplus, "HEAD_FRAMES", 37)
    np.testing.assert_allclose(np.array(model.head(x)), whole, rtol=0, atol=1e-5)
    with pytest.raises(CosyH3Error, match="too few"):
        model(x[:, :2])


@pytest.mark.parametrize("name, file, rate", S3_FILES)
def test_speech_tokens_are_upstreams(name, file, rate):
    model = tokenizer(name, file, rate)
    io = load_file(cosyvoice_golden(name) / "io.safetensors")
    for case in ("real", "rand"):
        mel = mx.array(io[f"{case}.mel"].swapaxes(1, 2))
        hidden = model.encode(mel)
        near(hidden, io[f"{case}.hidden"])
        if f"{case}.fsq_pre" in io:
            near(model.project(hidden), io[f"{case}.fsq_pre"])
        ids = model(mel)
        assert ids.dtype == mx.int32
        np.testing.assert_array_equal(np.array(ids), io[f"{case}.codes"])
    for row, (frames, length) in enumerate(zip(io["batch.mel_len"], io["batch.len"])):
        mel = mx.array(io["batch.mel"][row : row + 1, :, :frames].swapaxes(1, 2))
        np.testing.assert_array_equal(np.array(model(mel))[0], io["batch.codes"][row, :length])


@pytest.mark.parametrize("name, rate", [("s3_v3", 25), ("s3_v1_50hz", 50)])
@pytest.mark.parametrize("seconds", [0.02, 0.5, 30, 30.01, 31, 34, 56.02])
def test_token_count_of_any_length(name, rate, seconds):
    noise = 0.1 * np.random.default_rng(0).standard_normal(int(seconds * 16000)).astype(np.float32)
    ids = tokenizer(name, rate=rate).tokenize(noise)
    assert ids.dtype == np.int32 and abs(len(ids) - round(rate * seconds)) <= 1


def test_windows_join_at_the_right_tokens():
    """Each window's ids are kept from 2 s after its start to 2 s before its end, and none is there twice."""
    model = tokenizer("s3_v3")
    audio = 0.1 * np.random.default_rng(1).standard_normal(16000 * 40).astype(np.float32)
    mel = s3tokenizer.whisper_log_mel(audio)
    first, second = (np.array(model(mx.array(mel[a : a + 3000])[None])[0]) for a in (0, 2600))
    np.testing.assert_array_equal(model.tokenize(audio), np.concatenate([first[:700], second[50:]]))
    assert len(model.tokenize(np.zeros(100, np.float32))) == 0


def test_sanitize_is_idempotent_and_names_unknown_keys():
    for part, name, known in ((campplus, "campplus", campplus_from), (s3tokenizer, "s3_v3", speech_tokenizer_from)):
        file = "campplus_tiny.pt" if part is campplus else "tokenizer.pt"
        _, weights = known(cosyvoice_golden(name) / file)
        again = part.sanitize(weights)
        assert list(again) == list(weights) and all(again[k] is weights[k] for k in weights)
        with pytest.raises(CheckpointError, match="strange"):
            part.sanitize({"strange.weight": np.zeros(3)})
        assert not part.quantizes("anything")


def test_a_file_of_another_model_is_refused():
    with pytest.raises(CheckpointError, match="tokenizer_lookalike.onnx.*speaker encoder"):
        campplus_from(cosyvoice_golden("s3_v3") / "tokenizer_lookalike.onnx")
    with pytest.raises(CheckpointError, match="campplus_tiny.onnx.*speech tokenizer"):
        speech_tokenizer_from(cosyvoice_golden("campplus") / "campplus_tiny.onnx")
    with pytest.raises(CosyH3Error, match="25 and at 50"):
        speech_tokenizer_from(cosyvoice_golden("s3_v1_50hz") / "tokenizer.pt")
    with pytest.raises(CheckpointError, match="lacks"):
        S3TokenizerConfig.from_dict({})
    with pytest.raises(CheckpointError, match="lacks"):
        CAMPPlusConfig.from_dict({})


@pytest.mark.parametrize("name", ["s3_v2", "s3_v3"])
def test_a_graph_without_node_names_gives_the_same(name, monkeypatch):
    from mlx_cosyh3.convert import front_ends

    path = cosyvoice_golden(name) / "tokenizer_lookalike.onnx"
    config, weights = speech_tokenizer_from(path)

    def nameless(file, read=front_ends.read_onnx):
        graph = read(file)
        for node in graph.nodes:
            node.name = ""
        return graph

    monkeypatch.setattr(front_ends, "read_onnx", nameless)
    again = speech_tokenizer_from(path)
    assert again[0] == config and again[1].keys() == weights.keys()
    assert all((again[1][k] == weights[k]).all() for k in weights)
