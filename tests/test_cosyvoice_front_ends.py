"""The speaker encoder and the speech tokenizers against upstream's, from checkpoints and from ONNX graphs."""

import importlib.util
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mlx_cosyh3.convert import front_ends
from mlx_cosyh3.convert.front_ends import campplus_from, speech_tokenizer_from
from mlx_cosyh3.convert.onnx_file import Graph, Node, read_onnx
from mlx_cosyh3.convert.sources import open_source
from mlx_cosyh3.cosyvoice import campplus, s3tokenizer
from mlx_cosyh3.cosyvoice.campplus import CAMPPlus, CAMPPlusConfig
from mlx_cosyh3.cosyvoice.s3tokenizer import S3Tokenizer, S3TokenizerConfig
from mlx_cosyh3.errors import CheckpointError, CosyH3Error
from tests import onnx_writer
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
    with pytest.raises(CosyH3Error, match="30.0 s is more than the 30 s"):
        model(mx.array(mel[None, :3001]))


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


# ---------------------------------------------------------------- graphs made here


class Stored:
    """A weight of a graph in memory."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def numpy(self):
        return self.array


def v1_graph(weights, strides, folded, fused, names=True):
    """What torch.onnx makes of a v1 tokenizer, less the nodes between layers -> (nodes, {name: array}, output).

    folded   weights of linear layers are transposed in the file, else by a node
    fused    layer norms are one node each, else ten
    names    weights that no node changed have their names, as in the published 25 Hz file, the convolutions', too;
             else those have numbers, as at 50 Hz"""
    nodes, stored = [], {}

    def add(op, name, *inputs, **attributes):
        """Add a node; inputs: names of what is computed, or (name, array)."""
        known = []
        for i in inputs:
            if isinstance(i, tuple):
                stored.setdefault(*i)
                i = i[0]
            known.append(i)
        nodes.append(Node(name, op, known, [f"{name}_output_0"], attributes))
        return nodes[-1].outputs[0]

    def number(name, value):
        return add("Constant", name, value=np.array(value, np.float32))

    def kept(name):
        return name.replace("encoder.", "encoders.", 1), weights[name]

    def turned(op, name, w):
        """A weight that the graph has transposed."""
        if folded:
            return f"onnx::{op}_{1000 + len(stored)}", np.ascontiguousarray(w.T)
        return add("Transpose", f"{name}/Transpose", (f"{name}.weight", w), perm=[1, 0])

    def linear(x, name):
        path = "/" + name.removeprefix("encoder.").replace(".", "/")
        path = path.replace("blocks/", "blocks.").replace("mlp/", "mlp/mlp.")
        x = add("MatMul", f"{path}/MatMul", x, turned("MatMul", path, weights[f"{name}.weight"]))
        return add("Add", f"{path}/Add", kept(f"{name}.bias"), x) if f"{name}.bias" in weights else x

    def norm(x, name):
        path = "/" + name.removeprefix("encoder.").replace(".attn", "/attn").replace(".mlp", "/mlp")
        w, b = kept(f"{name}.weight"), kept(f"{name}.bias")
        if fused:
            return add("LayerNormalization", f"{path}/LayerNormalization", x, w, b, epsilon=float(np.float32(1e-5)))
        middle = add("Sub", f"{path}/Sub", x, add("ReduceMean", f"{path}/ReduceMean", x, axes=[-1]))
        square = add("Pow", f"{path}/Pow", middle, number(f"{path}/Constant", 2))
        var = add("ReduceMean", f"{path}/ReduceMean_1", square, axes=[-1])
        var = add("Sqrt", f"{path}/Sqrt", add("Add", f"{path}/Add", var, number(f"{path}/Constant_1", 1e-5)))
        return add("Add", f"{path}/Add_1", add("Mul", f"{path}/Mul", add("Div", f"{path}/Div", middle, var), w), b)

    x = "feats"
    for i, stride in enumerate(strides, 1):
        pair = [kept(f"encoder.conv{i}.{kind}") for kind in ("weight", "bias")]
        if not names:
            pair = [(f"onnx::Conv_{1517 + 2 * i + k}", a) for k, (_, a) in enumerate(pair)]
        x = add("Conv", f"/conv{i}/Conv", x, *pair, strides=[stride], group=1, dilations=[1])
    x = add("Add", "/Add", x, add("Slice", "/Slice", kept("encoder.positional_embedding"), "start", "stop"))
    for i in range(len({n.split(".")[2] for n in weights if n.startswith("encoder.blocks.")})):
        block = f"encoder.blocks.{i}"
        y = norm(x, f"{block}.attn_ln")
        q, k, v = (linear(y, f"{block}.attn.{role}") for role in ("query", "key", "value"))
        scores = add("Softmax", f"/blocks.{i}/attn/Softmax", add("MatMul", f"/blocks.{i}/attn/MatMul", q, k), axis=-1)
        y = add("MatMul", f"/blocks.{i}/attn/MatMul_1", scores, v)
        x = add("Add", f"/blocks.{i}/Add", x, linear(y, f"{block}.attn.out"))
        y = add("Gelu", f"/blocks.{i}/mlp/mlp.1/Gelu", linear(norm(x, f"{block}.mlp_ln"), f"{block}.mlp.0"))
        x = add("Add", f"/blocks.{i}/Add_1", x, linear(y, f"{block}.mlp.2"))
    path = "/quantizer/rq/model/layers.0/_codebook"
    book = turned("Pow", path, weights["quantizer._codebook.embed"])
    squared = add("Pow", f"{path}/Pow_1", book, number(f"{path}/Constant", 2))
    x = add("Sub", f"{path}/Sub", squared, add("MatMul", f"{path}/MatMul", x, book))
    return nodes, stored, x


def golden_v1_graph(name, *how):
    tensors = open_source(cosyvoice_golden(name) / "tokenizer.pt").tensors
    upstream = {n: np.asarray(t.numpy()) for n, t in tensors.items()}
    return v1_graph(upstream, (1, 2) if name == "s3_v1_50hz" else (2, 2), *how)


@pytest.mark.parametrize("folded, fused", [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("name, rate", [("s3_v1_50hz", 50), ("s3_v1_25hz", 25)])
def test_a_v1_file_gives_upstream_s_tokens(name, rate, folded, fused, tmp_path):
    """The weights of the golden checkpoint in an ONNX file that is laid out and named like the published one."""
    nodes, weights, out = golden_v1_graph(name, folded, fused, rate == 25)
    if (folded, fused) == (True, False):
        told = {n.name for n in nodes} | set(weights)
        assert told >= {"/blocks.1/attn/key/MatMul", "/blocks.0/attn_ln/Mul", "/blocks.0/attn_ln/Add_1",
                        "/blocks.1/mlp/mlp.0/Add", "encoders.positional_embedding",
                        "/quantizer/rq/model/layers.0/_codebook/Pow_1",
                        "onnx::Conv_1522" if rate == 50 else "encoders.conv2.bias"}  # fmt: skip
    (tmp_path / "speech_tokenizer_v1.onnx").write_bytes(onnx_writer.graph(nodes, weights, ["feats"], [out]))
    config, weights = speech_tokenizer_from(tmp_path / "speech_tokenizer_v1.onnx")
    wanted_config, wanted = speech_tokenizer_from(cosyvoice_golden(name) / "tokenizer.pt", rate)
    assert config == wanted_config and weights.keys() == wanted.keys()
    assert all(np.array_equal(weights[n], wanted[n]) for n in wanted)
    model = load(S3Tokenizer(S3TokenizerConfig.from_dict(config)), weights)
    io = load_file(cosyvoice_golden(name) / "io.safetensors")
    assert model.rate == rate
    for case in ("real", "rand"):
        np.testing.assert_array_equal(np.array(model(mx.array(io[f"{case}.mel"].swapaxes(1, 2)))), io[f"{case}.codes"])


STRANGE = ["text", -1, 0, 1 << 62, 1.5, float("nan"), [], [0], [-3], ["text"], [1.5], [1 << 62],
           Stored(np.zeros((0,), np.float32)), Stored(np.array(3))]  # fmt: skip
SHAPED = [lambda a: a.reshape(-1), lambda a: a[:0] if a.ndim else a[None], lambda a: a.astype(np.int64),
          lambda a: a[None], lambda a: a.T, lambda a: np.zeros((0,) * max(1, a.ndim), np.float32)]  # fmt: skip
OPS = ["Conv", "Gemm", "MatMul", "Sqrt", "LayerNormalization", "BatchNormalization", "Constant", "Transpose", "Pow",
       "Add", "AveragePool", "Slice"]  # fmt: skip


def damage(graph, draw):
    """A copy of the graph with one thing changed."""
    nodes = [Node(n.name, n.op, list(n.inputs), list(n.outputs), dict(n.attributes)) for n in graph.nodes]
    weights, n = dict(graph.weights), draw(st.sampled_from(nodes))
    how = draw(st.sampled_from(["gone", "op", "fewer inputs", "other input", "attribute", "weight", "no weight"]))
    if how == "gone":
        nodes.remove(n)
    elif how == "op":
        n.op = draw(st.sampled_from(OPS))
    elif how == "fewer inputs":
        del n.inputs[draw(st.integers(0, len(n.inputs))) :]
    elif how == "other input" and n.inputs:
        n.inputs[draw(st.integers(0, len(n.inputs) - 1))] = draw(st.sampled_from(["", *weights, *graph.maker]))
    elif how == "attribute":
        known = ["epsilon", "group", "strides", "kernel_shape", "dilations", "value", "transB", "perm"]
        n.attributes[draw(st.sampled_from([*n.attributes, *known]))] = draw(st.sampled_from(STRANGE))
    elif how == "weight":
        name = draw(st.sampled_from(list(weights)))
        weights[name] = Stored(draw(st.sampled_from(SHAPED))(weights[name].numpy()))
    elif how == "no weight":
        del weights[draw(st.sampled_from(list(weights)))]
    return Graph(nodes, weights, graph.inputs, graph.outputs)


@pytest.mark.parametrize(
    "name, file, read",
    [
        ("campplus", "campplus_tiny.onnx", campplus_from),
        ("s3_v1_50hz", None, speech_tokenizer_from),
        ("s3_v2", "tokenizer_lookalike.onnx", speech_tokenizer_from),
        ("s3_v3", "tokenizer_lookalike.onnx", speech_tokenizer_from),
    ],
)
def test_a_damaged_graph_is_a_model_or_an_error(name, file, read):
    if file:
        whole = read_onnx(cosyvoice_golden(name) / file)
    else:
        nodes, weights, out = golden_v1_graph(name, True, False)
        whole = Graph(nodes, {n: Stored(a) for n, a in weights.items()}, ["feats"], [out])

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def check(data):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(front_ends, "read_onnx", lambda path: damage(whole, data.draw))
            try:
                config, weights = read("damaged.onnx")
            except CheckpointError as e:  # the only error there may be
                assert "damaged.onnx" in str(e) and "\n" not in str(e)
            else:
                assert config and all(a.size for a in weights.values())

    check()


@pytest.mark.parametrize("how", SHAPED)
def test_a_checkpoint_with_a_misshapen_tensor(how, monkeypatch):
    for name, file, read in (
        ("campplus", "campplus_tiny.pt", campplus_from),
        ("s3_v3", "tokenizer.pt", speech_tokenizer_from),
    ):
        whole = {n: np.asarray(t.numpy()) for n, t in open_source(cosyvoice_golden(name) / file).tensors.items()}
        names = [n for n in whole if any(part in n for part in (".0.", "tdnnd1.", "conv", "quantizer", "xvector.tdnn"))]
        for broken in names:
            source = SimpleNamespace(tensors={n: Stored(how(a) if n == broken else a) for n, a in whole.items()})
            monkeypatch.setattr(front_ends, "open_source", lambda path, source=source: source)
            try:
                read("damaged.pt")
            except CheckpointError as e:
                assert "damaged.pt" in str(e)
            else:  # it had this shape before, or is not used
                assert how(whole[broken]).shape == whole[broken].shape or broken.endswith("num_batches_tracked")
