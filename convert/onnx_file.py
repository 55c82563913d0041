"""Reads ONNX files without the onnx package: the nodes of the graph, and its weights as views of the mapped file.

An ONNX file is one protobuf message (onnx/onnx.proto): a tree of numbered fields, each a number or a run of bytes.
Only what a graph of layers needs is read; sizes and offsets are checked against the file before any use, so a damaged
or hostile file is a CheckpointError. Subgraphs (If, Loop), sparse and string tensors are passed over, and weights in
other files (external data) are refused.
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass, field

import numpy as np

from mlx_cosyh3.errors import CheckpointError

MAX_ITEMS = 1 << 17  # nodes, tensors, or entries of a list: a few bytes of file each, hundreds once read
MAX_NAME = 1 << 14  # bytes
MAX_VARINTS = 1 << 26  # bytes of a tensor stored as numbers of variable length, which must be unpacked

# TensorProto.DataType; bfloat16 is read as its bits, then widened
DTYPES = {
    1: "<f4", 2: "u1", 3: "i1", 4: "<u2", 5: "<i2", 6: "<i4", 7: "<i8", 9: "?", 10: "<f2", 11: "<f8",
    12: "<u4", 13: "<u8", 16: "<u2",
}  # fmt: skip
BFLOAT16, FLOAT16 = 16, 10
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types

# TensorProto's fields with data: raw_data, then the typed ones and the item they hold (None: of variable length)
RAW, TYPED = 9, {4: "<f4", 5: None, 7: None, 10: "<f8", 11: None}


class OnnxTensor:
    """A tensor in the file, or the reason why it cannot be had."""

    def __init__(self, buffer, name, kind, shape, data, bad=None):
        self.name, self.shape = name, shape
        self._buffer, self._kind, self._data, self._bad = buffer, kind, data, bad

    def numpy(self):
        """The tensor, read-only: a view of the file where it is stored plainly; bfloat16 as fp32."""
        if self._bad:
            raise CheckpointError(f"tensor {self.name!r} {self._bad}")
        dtype, stored, spans = np.dtype(DTYPES[self._kind]), *self._data
        if stored is None:
            flat = np.concatenate([_varints(self._buffer, *s) for s in spans] or [np.zeros(0, np.uint64)])
            flat = _from_varints(flat, self._kind, dtype)
        else:
            parts = [
                np.frombuffer(self._buffer, stored, (b - a) // np.dtype(stored).itemsize, a) for a, b in spans if b > a
            ]
            flat = parts[0] if len(parts) == 1 else np.concatenate(parts or [np.zeros(0, stored)])
        if len(flat) != math.prod(self.shape):
            raise CheckpointError(f"tensor {self.name!r} has {len(flat)} numbers, but the shape {list(self.shape)}")
        if self._kind == BFLOAT16:
            flat = (flat.astype(np.uint32) << 16).view(np.float32)
        out = flat.reshape(self.shape)
        out.flags.writeable = False
        return out


@dataclass
class Node:
    name: str
    op: str
    inputs: list
    outputs: list
    attributes: dict  # int, float, str, list of these, or OnnxTensor


@dataclass
class Graph:
    """nodes        in an order in which they can be computed
    weights      {name: OnnxTensor} of the initialisers
    inputs, outputs   names; inputs without the weights"""

    nodes: list
    weights: dict
    inputs: list
    outputs: list
    maker: dict = field(init=False)  # {tensor name: Node}
    users: dict = field(init=False)  # {tensor name: [Node]}

    def __post_init__(self):
        self.maker = {o: n for n in self.nodes for o in n.outputs if o}
        self.users = {}
        for n in self.nodes:
            for name in dict.fromkeys(n.inputs):
                self.users.setdefault(name, []).append(n)

    def value(self, name, depth=8):
        """The constant `name`, from an initialiser or a Constant node, as numpy; None if it is computed."""
        if name in self.weights:
            return self.weights[name].numpy()
        node = self.maker.get(name)
        if node is None:
            return None
        if node.op == "Constant":
            value = next(iter(node.attributes.values()), None)
            return value.numpy() if isinstance(value, OnnxTensor) else None if value is None else np.asarray(value)
        # Shared weights come through Identity nodes; Transpose stays where the exporter did not fold constants.
        if node.op not in ("Identity", "Transpose") or not node.inputs or not depth:
            return None
        value = self.value(node.inputs[0], depth - 1)
        if value is None or node.op == "Identity":
            return value
        axes = list(range(value.ndim))
        order = node.attributes.get("perm", axes[::-1])
        if not isinstance(order, list) or not all(isinstance(i, int) for i in order) or sorted(order) != axes:
            raise CheckpointError(f"the node {node.name!r} transposes {value.ndim} axes in the order {str(order)[:80]}")
        return value.transpose(order)

    def constants(self, node):
        """{position: numpy} of the inputs of a node that are constants."""
        values = ((i, self.value(name)) for i, name in enumerate(node.inputs) if name)
        return {i: v for i, v in values if v is not None}


def read_onnx(path):
    """The Graph in an .onnx file. Raises CheckpointError, in one line that names the file."""
    try:
        size = os.path.getsize(path)
        with open(path, "rb") as file:
            start = file.read(40)
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as e:
        raise CheckpointError(f"cannot read {path}: {e.strerror or e}") from e
    if not size:
        raise CheckpointError(f"{path} is empty (0 bytes)")
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a pointer of git-lfs, not the file itself: run git lfs pull")
    try:
        graphs = [at for number, wire, at in _fields(buffer, 0, size) if number == 7 and wire == BYTES]
        if not graphs:
            raise CheckpointError("no graph in it: it is no ONNX file, or cut short")
        return _graph(buffer, *graphs[-1])
    except CheckpointError as e:
        raise CheckpointError(f"{path} ({size} bytes) cannot be read as ONNX: {str(e)[:400]}") from None


# ---------------------------------------------------------------- messages


def _graph(buffer, start, stop):
    nodes, weights, inputs, outputs = [], {}, [], []
    count = 0
    for number, wire, at in _fields(buffer, start, stop):
        if wire != BYTES:
            continue
        count += 1
        if count > MAX_ITEMS:
            raise CheckpointError(f"more than {MAX_ITEMS} entries in the graph")
        if number == 1:
            nodes.append(_node(buffer, *at))
        elif number == 5:
            tensor = _tensor(buffer, *at)
            if tensor.name in weights:
                raise CheckpointError(f"two weights are named {tensor.name!r}")
            weights[tensor.name] = tensor
        elif number in (11, 12):
            name = next((_text(buffer, *a) for n, w, a in _fields(buffer, *at) if n == 1 and w == BYTES), "")
            (inputs if number == 11 else outputs).append(name)
    return Graph(nodes, weights, [n for n in inputs if n not in weights], outputs)


def _node(buffer, start, stop):
    texts, attributes = {1: [], 2: [], 3: [], 4: []}, {}
    for number, wire, at in _fields(buffer, start, stop):
        if wire == BYTES and number in texts:
            texts[number].append(_text(buffer, *at))
        elif wire == BYTES and number == 5:
            name, value = _attribute(buffer, *at)
            if value is not None:
                attributes[name] = value
    name, op = ("".join(texts[k][-1:]) for k in (3, 4))
    return Node(name, op, texts[1], texts[2], attributes)


def _attribute(buffer, start, stop):
    """(name, value); the value is None for what is not read."""
    name, value, lists = "", None, {7: [], 8: [], 9: []}
    for number, wire, at in _fields(buffer, start, stop):
        if number == 1 and wire == BYTES:
            name = _text(buffer, *at)
        elif number == 2 and wire == FIXED32:
            value = struct.unpack("<f", at)[0]
        elif number == 3 and wire == VARINT:
            value = _signed(at)
        elif number == 4 and wire == BYTES:
            value = _text(buffer, *at)
        elif number == 5 and wire == BYTES:
            value = _tensor(buffer, *at)
        elif number == 7:
            lists[7] += [struct.unpack("<f", at)[0]] if wire == FIXED32 else _packed_floats(buffer, at, wire)
        elif number == 8:
            lists[8] += [_signed(at)] if wire == VARINT else _packed_ints(buffer, at, wire)
        elif number == 9 and wire == BYTES:
            lists[9].append(_text(buffer, *at))
    return name, next((values for values in lists.values() if values), value)


def _tensor(buffer, start, stop):
    name, kind, shape, spans, external = "", 0, [], {}, False
    for number, wire, at in _fields(buffer, start, stop):
        if number == 1:
            shape += [_signed(at)] if wire == VARINT else _packed_ints(buffer, at, wire)
        elif number == 2 and wire == VARINT:
            kind = at
        elif number == 8 and wire == BYTES:
            name = _text(buffer, *at)
        elif number == RAW or number in TYPED:
            if wire != BYTES:
                raise CheckpointError(f"tensor {name!r} has its numbers one by one, which is not read")
            spans.setdefault(number, []).append(at)
        elif number == 13 or number == 14 and at == 1:
            external = True
    if len(shape) > 16 or any(not 0 <= n < 1 << 40 for n in shape):
        raise CheckpointError(f"tensor {name!r} has the impossible shape {shape[:16]}")
    shape, count = tuple(shape), math.prod(shape)
    bad, data = None, (DTYPES.get(kind, "u1"), [])
    if external:
        bad = "is stored in another file (external data): save the model as one file"
    elif kind not in DTYPES:
        bad = f"has the data type {kind}, which is not read"
    elif len(spans) > 1:
        raise CheckpointError(f"tensor {name!r} has its numbers twice")
    elif spans:
        ((number, at),) = spans.items()
        stored = DTYPES[kind] if number == RAW else TYPED[number]
        data = (stored, at)
        nbytes = sum(b - a for a, b in at)
        if stored is None:
            if nbytes > MAX_VARINTS:
                bad = f"holds {nbytes} bytes of numbers of variable length: save it with raw data"
        elif np.dtype(stored) != np.dtype(DTYPES[kind]):
            bad = "has a data type that does not go with how it is stored"
        elif nbytes != count * np.dtype(stored).itemsize:
            raise CheckpointError(f"tensor {name!r} of the shape {list(shape)} has {nbytes} bytes: the file is damaged")
    elif count:
        bad = "has no numbers in the file"
    return OnnxTensor(buffer, name, kind, shape, data, bad)


# ---------------------------------------------------------------- fields and numbers


def _fields(buffer, start, stop):
    """Yield (number, wire type, value) of a message: an int, a float's bytes, or (start, stop) of a run of bytes."""
    at = start
    while at < stop:
        tag, at = _varint(buffer, at, stop)
        number, wire = tag >> 3, tag & 7
        if not 0 < number < 1 << 29:
            raise CheckpointError("a field has an impossible number: it is no ONNX file, or damaged")
        if wire == VARINT:
            value, at = _varint(buffer, at, stop)
        elif wire in (FIXED32, FIXED64):
            size = 4 if wire == FIXED32 else 8
            if stop - at < size:
                raise CheckpointError("it is cut short, or damaged")
            value, at = buffer[at : at + size], at + size
        elif wire == BYTES:
            length, at = _varint(buffer, at, stop)
            if length > stop - at:
                raise CheckpointError(
                    f"it is cut short, or damaged: {length} bytes are to follow where {stop - at} are left"
                )
            value, at = (at, at + length), at + length
        else:
            raise CheckpointError("a field has an unknown type: it is no ONNX file, or damaged")
        yield number, wire, value


def _varint(buffer, at, stop):
    value = 0
    for shift in range(0, 70, 7):
        if at >= stop:
            raise CheckpointError("it is cut short, or damaged")
        byte = buffer[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value & (1 << 64) - 1, at
    raise CheckpointError("a number is too long: it is no ONNX file, or damaged")


def _signed(value):
    return value - (1 << 64) if value >> 63 else value


def _text(buffer, start, stop):
    if stop - start > MAX_NAME:
        raise CheckpointError(f"a name of {stop - start} bytes")
    return bytes(buffer[start:stop]).decode("utf-8", "replace")


def _packed_ints(buffer, at, wire):
    if wire != BYTES:
        raise CheckpointError("a list of whole numbers has the wrong type")
    if at[1] - at[0] > 10 * MAX_ITEMS:
        raise CheckpointError(f"a list of {at[1] - at[0]} bytes")
    return _varints(buffer, *at).astype(np.int64).tolist()


def _packed_floats(buffer, at, wire):
    if wire != BYTES or (at[1] - at[0]) % 4 or at[1] - at[0] > 4 * MAX_ITEMS:
        raise CheckpointError("a list of floats is damaged")
    return np.frombuffer(buffer, "<f4", (at[1] - at[0]) // 4, at[0]).tolist() if at[1] > at[0] else []


def _varints(buffer, start, stop):
    """All the numbers of variable length in a run of bytes -> uint64."""
    raw = np.frombuffer(buffer, np.uint8, stop - start, start) if stop > start else np.zeros(0, np.uint8)
    ends = np.flatnonzero(raw < 128)
    if len(raw) and (not len(ends) or ends[-1] != len(raw) - 1):
        raise CheckpointError("a list of numbers is cut short, or damaged")
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    lengths = ends - starts + 1
    if lengths.max(initial=0) > 10:
        raise CheckpointError("a number is too long: the file is damaged")
    out = np.zeros(len(ends), np.uint64)
    for k in range(int(lengths.max(initial=0))):
        has = lengths > k
        out[has] |= (raw[starts[has] + k].astype(np.uint64) & np.uint64(127)) << np.uint64(7 * k)
    return out


def _from_varints(numbers, kind, dtype):
    """uint64 as the tensor's type; half floats are stored as their bits."""
    if kind in (FLOAT16, BFLOAT16):
        return numbers.astype(np.uint16).view(dtype)
    return numbers.astype(dtype) if dtype.kind in "ub" else numbers.astype(np.int64).astype(dtype)
