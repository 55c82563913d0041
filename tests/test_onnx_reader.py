"""The ONNX reader: every way of storing a tensor, and damaged files, which are errors and never crashes."""

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_cosyh3.convert.onnx_file import read_onnx
from mlx_cosyh3.errors import CheckpointError
from tests.golden_data import cosyvoice_golden
from tests.onnx_writer import model, number, run, tensor, varint


def write(tmp_path, data):
    path = tmp_path / "x.onnx"
    path.write_bytes(data)
    return path


FLOATS = np.array([[1.5, -2, 3], [0, 5, 6]], np.float32)
INTS = np.array([1, -1, 1 << 40], np.int64)
STORED = {
    "raw": (tensor("t", 1, (2, 3), run(9, FLOATS.tobytes())), FLOATS),
    "float_data": (tensor("t", 1, (2, 3), run(4, FLOATS.tobytes())), FLOATS),
    "int64_data": (tensor("t", 7, (3,), run(7, b"".join(varint(int(n)) for n in INTS))), INTS),
    "raw int64": (tensor("t", 7, (3,), run(9, INTS.tobytes())), INTS),
    "raw fp16": (tensor("t", 10, (2, 3), run(9, FLOATS.astype(np.float16).tobytes())), FLOATS.astype(np.float16)),
    "fp16 in int32_data": (
        tensor("t", 10, (6,), run(5, b"".join(varint(int(n)) for n in FLOATS.astype(np.float16).view(np.uint16).flat))),
        FLOATS.astype(np.float16).ravel(),
    ),
    "bf16": (tensor("t", 16, (2, 3), run(9, (FLOATS.view(np.uint32) >> 16).astype(np.uint16).tobytes())), FLOATS),
    "double_data": (
        tensor("t", 11, (6,), run(10, FLOATS.astype(np.float64).tobytes())),
        FLOATS.astype(np.float64).ravel(),
    ),
    "scalar": (tensor("t", 1, (), run(9, struct.pack("<f", 2))), np.float32(2)),
    "empty": (tensor("t", 1, (0, 3), b""), np.zeros((0, 3), np.float32)),
}


@pytest.mark.parametrize("how", STORED)
def test_tensors_as_stored(tmp_path, how):
    data, wanted = STORED[how]
    got = read_onnx(write(tmp_path, model(run(5, data)))).weights["t"].numpy()
    assert got.dtype == wanted.dtype and not got.flags.writeable
    np.testing.assert_array_equal(got, wanted)


def test_nodes_and_constants(tmp_path):
    attributes = run(1, "value") + run(5, tensor("", 1, (2,), run(9, struct.pack("<2f", 1, 2)))) + number(20, 4)
    conv = run(1, "x") + run(1, "y2") + run(2, "z") + run(3, "/conv/Conv") + run(4, "Conv")
    conv += run(5, run(1, "strides") + number(8, 2) + number(8, 1)) + run(
        5, run(1, "pads") + run(8, varint(-1) + varint(3))
    )
    nodes = [
        run(2, "y") + run(4, "Constant") + run(5, attributes),
        run(1, "y") + run(2, "y2") + run(4, "Identity"),
        conv,
    ]
    graph = read_onnx(write(tmp_path, model(*(run(1, n) for n in nodes), run(11, run(1, "x")), run(12, run(1, "z")))))
    assert (graph.inputs, graph.outputs) == (["x"], ["z"])
    assert graph.nodes[2].attributes == {"strides": [2, 1], "pads": [-1, 3]} and graph.nodes[2].name == "/conv/Conv"
    np.testing.assert_array_equal(graph.constants(graph.nodes[2])[1], [1, 2])
    assert graph.value("x") is None and graph.maker["z"] is graph.nodes[2]


def transposed(perm):
    how = run(5, run(1, "perm") + run(8, b"".join(varint(n) for n in perm))) if perm else b""
    node = run(1, "t") + run(2, "y") + run(4, "Transpose") + how
    return model(run(5, STORED["raw"][0]), run(1, node), run(1, run(1, "y") + run(2, "z") + run(4, "Transpose")))


def test_constants_that_the_exporter_did_not_transpose(tmp_path):
    for perm in ([], [1, 0]):
        graph = read_onnx(write(tmp_path, transposed(perm)))
        np.testing.assert_array_equal(graph.value("y"), FLOATS.T)
        np.testing.assert_array_equal(graph.value("z"), FLOATS)
    for perm in ([0], [0, 0], [0, 2], [-1, 0], [0, 1, 2]):
        with pytest.raises(CheckpointError, match="transposes 2 axes"):
            read_onnx(write(tmp_path, transposed(perm))).value("y")


def test_a_constant_in_a_circle_is_none(tmp_path):
    nodes = (run(1, a) + run(2, b) + run(4, "Identity") for a, b in ("ab", "ba"))
    assert read_onnx(write(tmp_path, model(*(run(1, n) for n in nodes)))).value("a") is None


@pytest.mark.parametrize(
    "data, why",
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid 1", "git lfs pull"),
        (b"<html>not found</html>", "cannot be read"),
        (number(1, 8), "no graph"),
        (model(run(5, tensor("t", 1, (3,), run(9, b"1234")))), "damaged"),
        (model(run(5, tensor("t", 1, (1 << 39, 1 << 39), run(9, b"1234")))), "damaged"),
        (model(run(5, tensor("t", 1, (-1,), b""))), "impossible shape"),
        (
            model(run(5, tensor("t", 1, (1,), run(9, b"1234"))), run(5, tensor("t", 1, (1,), run(9, b"1234")))),
            "two weights",
        ),
        (model(run(5, run(8, b"n" * 20000))), "a name of 20000"),
        (model(run(1, b"") * 140000), "more than 131072 entries"),
        (model(run(1, run(5, run(8, b"\x01" * 2000000)))), "a list of 2000000 bytes"),
        (b"\x3a" + varint(1 << 50) + b"x", "cut short"),
        (b"\xff" * 40, "too long"),
    ],
)
def test_bad_files(tmp_path, data, why):
    with pytest.raises(CheckpointError, match=why) as e:
        read_onnx(write(tmp_path, data))
    assert "x.onnx" in str(e.value) and "\n" not in str(e.value)


def test_external_data_and_unknown_types_are_refused_when_asked_for(tmp_path):
    for data, why in (
        (tensor("t", 1, (2,), run(13, run(1, "location") + run(2, "../w.bin")) + number(14, 1)), "external data"),
        (tensor("t", 8, (1,), run(6, "text")), "data type 8"),
        (tensor("t", 7, (5,), run(7, varint(3))), "1 numbers"),
        (tensor("t", 1, (5,), b""), "no numbers"),
    ):
        with pytest.raises(CheckpointError, match=why):
            read_onnx(write(tmp_path, model(run(5, data)))).weights["t"].numpy()


def walk(path):
    for weight in read_onnx(path).weights.values():
        weight.numpy()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(tmp_path_factory, data):
    path = write(tmp_path_factory.mktemp("fuzz"), data)
    with contextlib.suppress(CheckpointError):  # the only error there may be
        walk(path)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(STORED)), st.integers(0, 10**6), st.integers(0, 255), st.booleans())
def test_changed_and_cut_files(tmp_path_factory, how, at, byte, cut):
    node = run(1, run(1, "x") + run(2, "y") + run(4, "Relu") + run(5, run(1, "axes") + run(8, b"\x01\x02")))
    data = bytearray(model(node, run(5, STORED[how][0])))
    at %= len(data)
    if cut:
        del data[at:]
    else:
        data[at] = byte
    path = write(tmp_path_factory.mktemp("fuzz"), bytes(data))
    with contextlib.suppress(CheckpointError):  # the only error there may be
        walk(path)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9999])
def test_a_cut_model_is_refused(tmp_path, share):
    data = (cosyvoice_golden("s3_v3") / "tokenizer_lookalike.onnx").read_bytes()
    with pytest.raises(CheckpointError, match="cut short"):
        read_onnx(write(tmp_path, data[: int(len(data) * share)]))
