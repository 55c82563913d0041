"""Tensors that lie in a memory-mapped checkpoint, and the builders that make them (and plain data) from a pickle.

A tensor is a window on a storage: byte offset, shape, strides. Nothing is read before numpy() or rows(), and every
window is checked against its storage first (check_range), in Python's integers, so no size can overflow.
"""

import math

import numpy as np

from mlx_cosyh3.convert.pickle_names import refused
from mlx_cosyh3.convert.pickle_tree import Global, Opaque, damaged
from mlx_cosyh3.errors import CheckpointError

# safetensors' name -> numpy type in the file; BF16 has none and comes as its bit patterns
DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "C64": "<c8", "BOOL": "|b1",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1",
}
TORCH_DTYPES = {
    "float64": "F64", "double": "F64", "float32": "F32", "float": "F32", "float16": "F16", "half": "F16",
    "bfloat16": "BF16", "complex64": "C64", "cfloat": "C64", "bool": "BOOL", "int64": "I64", "long": "I64",
    "int32": "I32", "int": "I32", "int16": "I16", "short": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16",
    "uint32": "U32", "uint64": "U64",
}
STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "ComplexFloatStorage": "C64", "BoolStorage": "BOOL", "LongStorage": "I64", "IntStorage": "I32",
    "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8", "UntypedStorage": "U8",
    "ComplexDoubleStorage": "torch.complex128", "QInt8Storage": "torch.qint8", "QUInt8Storage": "torch.quint8",
    "QInt32Storage": "torch.qint32", "QUInt4x2Storage": "torch.quint4x2", "QUInt2x4Storage": "torch.quint2x4",
}
# Types whose values are not read; their tensors still have a shape. Those of one byte need no entry.
OTHER_SIZES = {"torch.complex128": 16, "torch.complex32": 4, "torch.qint32": 4, "torch.bits16": 2}
MAX_DIMS = 32  # numpy's limit before 2.0
# A tensor may be larger than its file (an expanded one repeats its storage), but not beyond this.
EXPANSION = 64  # times the size of the file
EXPANSION_SLACK = 64 << 20  # bytes


def item_size(dtype):
    return np.dtype(DTYPES[dtype]).itemsize if dtype in DTYPES else OTHER_SIZES.get(dtype, 1)


class Storage:
    """A run of bytes of the file. In the old container `start` and `size` become known only after the pickle."""

    __slots__ = ("source", "key", "start", "size", "big_endian", "itemsize")

    def __init__(self, source, key, start=None, size=None, big_endian=False, itemsize=1):
        self.source, self.key, self.start, self.size = source, key, start, size
        self.big_endian, self.itemsize = big_endian, itemsize


class StorageClass(Global):
    """`torch.FloatStorage` and its like: the type of a storage in a persistent id."""

    __slots__ = ("dtype", "itemsize")

    def __init__(self, name, dtype):
        super().__init__(name)
        self.dtype, self.itemsize = dtype, item_size(dtype)


def storage_class(module, name):
    """The StorageClass of `torch.cuda.HalfStorage` and the like, or None."""
    if name in STORAGES and module in ("torch", "torch.cuda", "torch.storage"):
        return StorageClass(f"{module}.{name}", STORAGES[name])
    return None


class TorchTensor:
    """A tensor in a checkpoint file.

    shape    tuple of int
    dtype    safetensors' name ("F32", "BF16", ...), or torch's ("torch.complex128") for a type that is not read
    nbytes   logical size, whatever the storage holds
    """

    __slots__ = ("shape", "dtype", "_storage", "_start", "_strides", "_trouble", "_conj", "_neg")

    def __init__(self, storage, start, shape, strides, dtype, trouble=None, conj=False, neg=False):
        self.shape, self.dtype = shape, dtype
        self._storage, self._start, self._strides = storage, start, strides  # start in bytes, strides in elements
        self._trouble, self._conj, self._neg = trouble, conj, neg

    @property
    def nbytes(self):
        return math.prod(self.shape) * item_size(self.dtype)

    def numpy(self):
        """The values: a read-only view into the file where they lie there in order, else a copy in C order.

        BF16 comes as uint16 bit patterns. CheckpointError for a type that is not read and for an absurd size.
        """
        return self._read(self.shape, self._start)

    def rows(self, start, stop):
        """numpy() of rows start:stop along axis 0; only these are read or copied."""
        if not self.shape or not 0 <= start <= stop <= self.shape[0]:
            raise self._error(f"there are no rows {start}:{stop} in a tensor of shape {self.shape}")
        shape = (stop - start, *self.shape[1:])
        return self._read(shape, self._start + start * self._strides[0] * item_size(self.dtype))

    def check_range(self):
        """CheckpointError if an element lies outside the storage."""
        storage = self._storage
        if storage is None or self.dtype not in DTYPES:
            return
        if storage.start is None:
            raise CheckpointError(f"truncated or damaged: storage {storage.key!r} has no data")
        count = math.prod(self.shape)
        last = sum((length - 1) * stride for length, stride in zip(self.shape, self._strides))
        stop = self._start + (last + 1) * item_size(self.dtype)
        if count and stop > storage.size:
            raise CheckpointError(f"truncated or damaged: a tensor of shape {_brief(self.shape)} needs {stop} "
                                  f"bytes of storage {storage.key!r}, which has {storage.size}")

    def _read(self, shape, start):
        if self._trouble or self.dtype not in DTYPES:
            raise self._error(self._trouble or f"a tensor of type {self.dtype} cannot be read; convert it in "
                                               f"PyTorch to one of {', '.join(DTYPES)} and save it again")
        storage, kind = self._storage, np.dtype(DTYPES[self.dtype])
        size, limit = math.prod(shape) * kind.itemsize, EXPANSION * storage.source.size + EXPANSION_SLACK
        if size > limit or math.prod(max(length, 1) for length in shape) > 2 ** 60:
            raise self._error(f"a tensor of shape {_brief(shape)} would take {size} bytes, more than {EXPANSION} "
                              f"times its file of {storage.source.size} bytes; save a smaller copy of it")
        if size == 0:
            return np.empty(shape, kind)
        stored = kind.newbyteorder(">") if storage.big_endian else kind
        strides = [stride * kind.itemsize for stride in self._strides]
        values = np.ndarray(shape, stored, storage.source.map, storage.start + start, strides)
        if self._conj or self._neg:
            values = np.conjugate(values) if self._conj else values
            values = np.negative(values) if self._neg else values
        # A copy in C order for what numpy's users may not expect: gaps, foreign byte order, odd addresses.
        if not (values.flags.c_contiguous and values.flags.aligned and values.dtype.isnative):
            values = np.array(values, kind, order="C")
        return values

    def _error(self, what):
        return CheckpointError(f"{self._storage.source.path}: {what}" if self._storage else what)

    def __repr__(self):
        return f"TorchTensor({self.dtype}, {_brief(self.shape)})"


def _brief(shape):
    return str(shape) if len(str(shape)) <= 200 else f"({len(shape)} dimensions)"


# -- what a pickle gives to the builders is checked here, value by value ---------------------------------------


def _whole(value, what):
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2 ** 62:
        raise damaged(f"{what} of a tensor is {value if isinstance(value, int) and abs(value) < 2**70 else '?'}, "
                      "not an integer from 0")
    return value


def _wholes(values, what):
    if not isinstance(values, (tuple, list)):
        raise damaged(f"{what} of a tensor is a {type(values).__name__}")
    if len(values) > MAX_DIMS:
        raise CheckpointError(f"a tensor of {len(values)} dimensions; up to {MAX_DIMS} are read")
    return tuple(_whole(value, what) for value in values)


def _window(flat, offset, shape, strides, dtype, metadata=None):
    """torch's set_(): a tensor on the storage under `flat`, which is a persistent id's tensor of one dimension."""
    if not isinstance(flat, TorchTensor) or flat._storage is None:
        raise damaged(f"a tensor is built on a {type(flat).__name__}, not on a storage")
    shape, strides = _wholes(shape, "the size"), _wholes(strides, "the stride")
    if len(shape) != len(strides):
        raise damaged(f"a tensor of {len(shape)} dimensions has {len(strides)} strides")
    start = flat._start + _whole(offset, "the offset") * item_size(dtype)
    marks = metadata if isinstance(metadata, dict) else {}
    return TorchTensor(flat._storage, start, shape, strides, dtype,
                       conj=marks.get("conj") is True and dtype == "C64",
                       neg=marks.get("neg") is True and dtype in ("F64", "F32", "F16", "C64"))


def _dtype(value):
    """A dtype from its name in the pickle: a Global of torch."""
    if not isinstance(value, Global) or not value.name.startswith("torch."):
        raise damaged("a tensor's type is no torch type")
    return TORCH_DTYPES.get(value.name[len("torch."):], value.name)


def _unreadable(like, shape, trouble):
    """A tensor that has a shape and a type but no values for us."""
    storage = like._storage if isinstance(like, TorchTensor) else None
    dtype = like.dtype if isinstance(like, TorchTensor) else "torch.unknown"
    return TorchTensor(storage, 0, shape, (0,) * len(shape), dtype, trouble)


def _rebuild_quantized(_, flat, offset, size, stride, *rest):
    kind = flat.dtype if isinstance(flat, TorchTensor) else "torch.qint8"
    return _unreadable(flat, _wholes(size, "the size"),
                       f"a quantised tensor ({kind}) cannot be read; save its dequantize()")


def _rebuild_sparse(_, layout, data):
    name = layout.name if isinstance(layout, Opaque) else "sparse"
    if isinstance(layout, Opaque) and layout.args and isinstance(layout.args[0], str):
        name = ascii(layout.args[0][:40]).strip("'")  # torch.serialization._get_layout("torch.sparse_coo")
    if not isinstance(data, tuple) or len(data) < 3:
        raise damaged("a sparse tensor without its parts")
    values, size = (data[2], data[3]) if len(data) == 4 and not isinstance(data[3], bool) else (data[1], data[2])
    return _unreadable(values, _wholes(size, "the size"),
                       f"a sparse tensor ({name}) cannot be read; save its to_dense()")


def _rebuild_meta(_, dtype, size, stride, *rest):
    shape = _wholes(size, "the size")
    return TorchTensor(None, 0, shape, (0,) * len(shape), _dtype(dtype), "a tensor without data (meta device)")


def _first(_, value, *rest):
    """Parameters and lists of TorchScript: the value is the first argument, the rest is bookkeeping."""
    return value


def _from_type(machine, function, cls, args, *state):
    """A tensor of a subclass, or one with attributes: (what builds it, its class, arguments, attributes)."""
    if not isinstance(function, Global) or function.build is None or function.build.inner is _from_type:
        raise damaged("a tensor subclass that is not built from a tensor")
    return machine.call(function, args)


def _variable(_, *args):
    if args and isinstance(args[0], TorchTensor):
        return args[0]
    return Opaque("torch.nn.parameter.Parameter", args)


# -- plain data ------------------------------------------------------------------------------------------------


def _table(machine, pairs=()):
    table = {}
    if isinstance(pairs, dict):
        table.update(machine.copied(pairs))
        return table
    flat = []
    for pair in machine.copied(pairs):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise damaged("a dict from something that is no pair")
        flat += pair
    machine.set_pairs(table, flat)
    return table


def _default_table(machine, factory=None, *pairs):
    return _table(machine, *pairs)


def _sequence(kind):
    return lambda machine, values=(), *limit: kind(machine.copied(values))


def _set(kind):
    return lambda machine, values=(): machine.set_of(kind, machine.copied(values))


def _bytes(kind):
    def build(machine, value=b"", encoding=None):
        machine.copied(value)
        if isinstance(value, str):
            return kind(_latin1(value, encoding))
        if not isinstance(value, (bytes, bytearray)):
            raise damaged(f"bytes from a {type(value).__name__}")
        return kind(value)
    return build


def _latin1(text, encoding):
    """How pickles before protocol 3 hold bytes: as text whose characters are the bytes."""
    if encoding not in ("latin1", "latin-1") or not isinstance(text, str) or (text and max(text) > "\xff"):
        raise damaged("bytes in an unknown encoding")
    return text.encode("latin-1")


def _encode(machine, text="", encoding=None):
    return _latin1(machine.copied(text), encoding)


def _complex(_, real=0.0, imaginary=0.0):
    if not all(isinstance(part, float) for part in (real, imaginary)):
        raise damaged("a complex number whose parts are no numbers")
    return complex(real, imaginary)


def _type(_, value, *body):
    if value is not None or body:  # type(name, bases, dict) would make a class
        raise refused("builtins.type", "calls")
    return Global("builtins.NoneType")


def _get_item(_, generic, argument):
    """`typing.Optional[int]` and the like are pickled as a subscription."""
    if not isinstance(generic, Opaque) or not generic.name.startswith(("typing.", "builtins.", "collections.")):
        raise refused("operator.getitem", "calls")
    return Opaque(generic.name, (argument,))


def _reconstruct(_, cls, base, state):
    """Instances in protocols 0 and 1."""
    if not isinstance(cls, Global):
        raise damaged("an instance of no class")
    return Opaque(cls.name, () if state is None else (state,))


def _new_object(machine, cls, *args):
    return machine.instance(cls, args, "__newobj__")


def _scalar(machine, dtype, raw=None):
    """A numpy scalar as a Python number; one of another type stays foreign."""
    code = dtype.args[0] if isinstance(dtype, Opaque) and dtype.args else None
    state = dtype.state if isinstance(dtype, Opaque) and isinstance(dtype.state, tuple) else ()
    order = state[1] if len(state) > 1 else "<"
    if code in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1", "c8", "c16"):
        kind = np.dtype((">" if order == ">" else "<") + code)
        if not isinstance(raw, bytes) or len(raw) != kind.itemsize:
            raise damaged(f"a numpy scalar of type {code} without its {kind.itemsize} bytes")
        return np.frombuffer(raw, kind)[0].item()
    return Opaque("numpy.core.multiarray.scalar", (dtype, raw))


def _array(_, cls, *rest):
    """A numpy array stays foreign, under its own name; its state is (version, shape, dtype, order, bytes)."""
    return Opaque(cls.name if isinstance(cls, Global) else "numpy.ndarray", rest)


def _array_of(_, *args):
    """A numpy array in protocol 5: (bytes, dtype, shape, order)."""
    return Opaque("numpy.ndarray", args)


def data_builders(record):
    """{global's name: builder}. `record(tensor)` is told of each tensor that must be checked in the end."""

    def recorded(tensor):
        record(tensor)
        return tensor

    def rebuild(_, flat, offset, size, stride, grad=None, hooks=None, metadata=None):
        dtype = flat.dtype if isinstance(flat, TorchTensor) else "U8"
        return recorded(_window(flat, offset, size, stride, dtype, metadata))

    def rebuild_v3(_, flat, offset, size, stride, grad, hooks, dtype, metadata=None):
        return recorded(_window(flat, offset, size, stride, _dtype(dtype), metadata))

    rows = {
        # name: (builder, fewest and most arguments)
        "torch._utils._rebuild_tensor": (rebuild, 4, 4),
        "torch._utils._rebuild_tensor_v2": (rebuild, 6, 7),
        "torch._utils._rebuild_tensor_v3": (rebuild_v3, 7, 8),
        "torch._utils._rebuild_parameter": (_first, 3, 3),
        "torch._utils._rebuild_parameter_with_state": (_first, 4, 4),
        "torch._utils._rebuild_device_tensor_from_cpu_tensor": (_first, 4, 4),
        "torch._utils._rebuild_qtensor": (_rebuild_quantized, 5, 7),
        "torch._utils._rebuild_sparse_tensor": (_rebuild_sparse, 2, 2),
        "torch._utils._rebuild_meta_tensor_no_storage": (_rebuild_meta, 4, 4),
        "torch._tensor._rebuild_from_type": (_from_type, 4, 4),
        "torch._tensor._rebuild_from_type_v2": (_from_type, 4, 4),
        "torch.tensor._rebuild_from_type": (_from_type, 4, 4),
        "torch.nn.parameter.Parameter": (_variable, 0, 4),
        "torch.autograd.variable.Variable": (_variable, 0, 4),
        "torch.Size": (_sequence(tuple), 0, 1),
        "torch.jit._pickle.build_intlist": (_first, 1, 1),
        "torch.jit._pickle.build_doublelist": (_first, 1, 1),
        "torch.jit._pickle.build_boollist": (_first, 1, 1),
        "torch.jit._pickle.build_tensorlist": (_first, 1, 1),
        "torch.jit._pickle.restore_type_tag": (_first, 2, 2),
        "collections.OrderedDict": (_table, 0, 1),
        "collections.defaultdict": (_default_table, 0, 2),
        "collections.Counter": (_table, 0, 1),
        "collections.deque": (_sequence(list), 0, 2),
        "builtins.dict": (_table, 0, 1),
        "builtins.list": (_sequence(list), 0, 1),
        "builtins.tuple": (_sequence(tuple), 0, 1),
        "builtins.set": (_set(set), 0, 1),
        "builtins.frozenset": (_set(frozenset), 0, 1),
        "builtins.bytes": (_bytes(bytes), 0, 2),
        "builtins.bytearray": (_bytes(bytearray), 0, 2),
        "builtins.complex": (_complex, 0, 2),
        "builtins.type": (_type, 1, 3),
        "_codecs.encode": (_encode, 1, 2),
        "copyreg._reconstructor": (_reconstruct, 3, 3),
        "copyreg.__newobj__": (_new_object, 1, 64),
        "operator.getitem": (_get_item, 2, 2),
        "_operator.getitem": (_get_item, 2, 2),
        "numpy.core.multiarray._reconstruct": (_array, 3, 3),
        "numpy._core.multiarray._reconstruct": (_array, 3, 3),
        "numpy.core.numeric._frombuffer": (_array_of, 4, 4),
        "numpy._core.numeric._frombuffer": (_array_of, 4, 4),
        "numpy.core.multiarray.scalar": (_scalar, 1, 2),
        "numpy._core.multiarray.scalar": (_scalar, 1, 2),
    }
    return {name: _counted(name, *row) for name, row in rows.items()}


def _counted(name, function, fewest, most):
    def build(machine, *args):
        if not fewest <= len(args) <= most:
            raise damaged(f"{name} with {len(args)} arguments")
        return function(machine, *args)

    build.inner = function
    return build
