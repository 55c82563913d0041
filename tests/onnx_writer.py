"""Writes ONNX files without the onnx package, for tests: single fields, and whole graphs of layers."""

import struct

import numpy as np

from mlx_cosyh3.convert.onnx_file import DTYPES


def varint(n):
    """A whole number, as protobuf writes it."""
    n &= (1 << 64) - 1
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def run(number, data):
    """The field `number` with a run of bytes."""
    data = data.encode() if isinstance(data, str) else data
    return varint(number << 3 | 2) + varint(len(data)) + data


def number(field, n):
    """A field with a whole number."""
    return varint(field << 3) + varint(n)


def tensor(name, kind, shape, data):
    """A TensorProto; data: its fields with the numbers."""
    return run(1, b"".join(varint(n) for n in shape)) + number(2, kind) + run(8, name) + data


def model(*parts):
    """A ModelProto of the fields of a graph."""
    return number(1, 8) + run(7, b"".join(parts))


def array(name, a):
    """A TensorProto of a numpy array, stored plainly."""
    kind = next(k for k, dtype in DTYPES.items() if np.dtype(dtype) == a.dtype)
    return tensor(name, kind, a.shape, run(9, np.ascontiguousarray(a).tobytes()))


def attribute(name, value):
    if isinstance(value, np.ndarray):
        return run(1, name) + run(5, array("", value)) + number(20, 4)
    if isinstance(value, float):
        return run(1, name) + varint(2 << 3 | 5) + struct.pack("<f", value) + number(20, 1)
    if isinstance(value, int):
        return run(1, name) + number(3, value) + number(20, 2)
    return run(1, name) + run(8, b"".join(map(varint, value))) + number(20, 7)


def graph(nodes, weights, inputs, outputs):
    """The file of a graph. nodes: onnx_file.Node; weights: {name: numpy array}"""
    parts = []
    for n in nodes:
        fields = [run(1, i) for i in n.inputs] + [run(2, o) for o in n.outputs] + [run(3, n.name), run(4, n.op)]
        parts.append(run(1, b"".join(fields + [run(5, attribute(*item)) for item in n.attributes.items()])))
    parts += [run(5, array(name, a)) for name, a in weights.items()]
    parts += [run(11, run(1, name)) for name in inputs] + [run(12, run(1, name)) for name in outputs]
    return model(*parts)
