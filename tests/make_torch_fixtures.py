"""Writes tests/golden/torch/: small .pt files of every kind, and what PyTorch reads from them. Needs torch.

    python tests/make_torch_fixtures.py

The folder then holds <case>.<container><protocol>.pt, expected.safetensors with the key "<case>/<path>" for each
tensor (BF16 as U16 bit patterns, C64 as F32 with a last axis of 2), and expected.json with {case: {path: [dtype,
shape]}}. test_torch_reader.py uses the same cases to compare with torch.load directly where torch is installed.
"""

import argparse
import collections
import contextlib
import datetime
import functools
import io
import json
import pathlib
import pickle
import struct
import sys
import typing
import unittest.mock
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

FOLDER = Path(__file__).parent / "golden" / "torch"
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.complex64: "C64",
    torch.bool: "BOOL", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}


class Attributed(torch.Tensor):
    """A subclass with an attribute: saved through _rebuild_from_type_v2."""


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dtypes():
    base = torch.tensor([[0, 1, 2], [3, 100, 127]])
    table = {str(kind)[6:]: base.to(kind) for kind in NAMES}
    for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        table["special_" + str(kind)[6:]] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-7]).to(kind)
    return table


def layouts():
    base = numbers(4, 6)
    parameter = torch.nn.Parameter(numbers(3))
    noted = torch.nn.Parameter(numbers(2, 2), requires_grad=False)
    noted.note = "kept with the parameter"
    own = numbers(5).as_subclass(Attributed)
    own.note = "kept with the tensor"
    return {
        "whole": base, "same": base, "row": base[2], "column": base[:, 3], "block": base[1:3, 2:5],
        "turned": base.t(),
        "steps": base[::2, ::3], "expanded": base[:, :1].expand(4, 5), "scalar": base[3, 3], "one": torch.tensor(7),
        "empty": torch.empty(0), "no_rows": torch.empty(0, 3), "no_columns": torch.empty(3, 0),
        "swapped": numbers(2, 3, 4).permute(2, 0, 1), "channels_last": numbers(1, 2, 3, 3).to(
            memory_format=torch.channels_last), "parameter": parameter, "noted": noted, "own": own,
        "bits": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t(),
        "wide": torch.arange(9).to(torch.uint16)[2:7],
    }


def containers():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    for index, value in enumerate(model.parameters()):
        value.data = numbers(*value.shape, seed=index)
    return {
        "state_dict": model.state_dict(),  # an OrderedDict with the attribute _metadata
        "plain": plain(),
        "counts": collections.defaultdict(list, {"a": [numbers(1)]}),
        "bag": collections.Counter("hello"),
        "queue": collections.deque([1, 2], 5),
        "size": torch.Size([2, 3]),
    }


def plain():
    """Values without torch, as read_torch must give them back."""
    return {
        "none": None, "yes": True, "no": False,
        "ints": [0, 1, -1, 255, 256, 65535, 65536, -2 ** 31, 2 ** 31, 2 ** 70],
        "floats": (0.0, -0.0, 1.5, float("inf")), "complex": 1.5 - 2j, "text": "grüße\n日本 \U0001f600",
        "bytes": b"\x00\xff" * 3, "array": bytearray(b"ab\x80"), "set": {1, "a", (2, 3)},
        "frozen": frozenset((4, 5)), "empty": [(), [], {}, ""],
        1: "int key", 2.5: "float key", None: "none key", (1, "b"): "tuple key", "long": "x" * 300,
    }


def optimizer():
    weight = torch.nn.Parameter(numbers(3, 2))
    adam = torch.optim.Adam([weight], lr=0.01)
    weight.grad = numbers(3, 2, seed=1)
    adam.step()
    return {"step": 1, "optimizer": adam.state_dict()}


def lightning():
    """What training frameworks put beside the weights."""
    return {
        "state_dict": {"weight": numbers(2, 2)}, "epoch": 3, "pytorch-lightning_version": "2.0.0",
        "hyper_parameters": {
            "args": argparse.Namespace(lr=0.1, device=torch.device("cuda", 0), dtype=torch.float16),
            "optimizer": functools.partial(torch.optim.AdamW, lr=1e-3), "path": pathlib.PurePosixPath("/data/x"),
            "when": datetime.datetime(2024, 1, 2), "activation": torch.nn.GELU, "function": torch.nn.functional.relu,
            "types": [int, str, list[int], typing.Optional[float]],
        },
        "callbacks": {datetime.timedelta: {"best": np.float64(0.25), "steps": np.int64(7)}},
        "loops": {"history": np.arange(3.0), "error": ValueError("x")},
    }


def storages():
    base = numbers(6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {"view": base[2:5], "typed": base.storage(),
                "bytes": torch.arange(5, dtype=torch.uint8).untyped_storage(),
                "half": torch.arange(4, dtype=torch.float16).storage()}


def bits():
    """Conjugation and negation that PyTorch keeps as a flag beside the storage."""
    value = torch.complex(numbers(2, 2), numbers(2, 2, seed=1))
    return {"plain": value, "conj": value.conj(), "neg": value.clone().conj().imag}


class Gate(torch.nn.Module):
    """Our own layers, so that no source text of PyTorch goes into a committed file."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(numbers(3, 2))
        self.register_buffer("seen", torch.tensor(5))
        self.register_buffer("window", numbers(2), persistent=False)

    def forward(self, x):
        return x @ self.weight


class Tower(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Gate(), Gate()
        self.bias = torch.nn.Parameter(numbers(2, seed=1).half())
        self.rates = [8000, 16000]

    def forward(self, x):
        return self.second(self.first(x)[:, :1].expand(-1, 3)) + self.bias


def module():
    tower = Tower()
    tower.spare = [tower.bias]  # torch.nn.LSTM too keeps its weights a second time
    return tower


CASES = {f.__name__: f for f in (dtypes, layouts, containers, optimizer, lightning, storages, bits, module)}


def save(value, container, protocol):
    """The bytes of torch.save in the "zip" or "legacy" container."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # typed storages, pickled modules
        torch.save(value, buffer, pickle_protocol=protocol, _use_new_zipfile_serialization=container == "zip")
    return buffer.getvalue()


def load(data):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(io.BytesIO(data), weights_only=False)


def script():
    """The bytes of a TorchScript archive."""
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Tower()), buffer)
    return buffer.getvalue()


def short_names():
    """PyTorch saves the source file's name beside a module; the committed files get it without its folder."""
    find = torch._sources.get_source_lines_and_file

    def found(*args, **kwargs):
        lines, number, file = find(*args, **kwargs)
        return lines, number, Path(file).name if file else file

    stack = contextlib.ExitStack()
    for user in (torch._sources, torch.serialization, torch.jit.frontend):
        stack.enter_context(unittest.mock.patch.object(user, "get_source_lines_and_file", found))
    return stack


# -- containers that today's PyTorch still reads but no longer writes ------------------------------------------


def swapped_zip(value):
    """The archive that a big-endian machine would have written."""
    data = save(value, "zip", 2)
    widths = {}  # storage key -> bytes of one number

    def note(saved_id):
        kind = saved_id[1]
        name = kind.__name__ if isinstance(kind, type) else "ByteStorage"
        width = torch.empty(0, dtype=kind.dtype if hasattr(kind, "dtype") else torch.uint8).element_size()
        widths[saved_id[2]] = 4 if "Complex" in name else width
        return torch.UntypedStorage(saved_id[4] * width)

    class Unpickler(pickle.Unpickler):
        persistent_load = staticmethod(note)

        def find_class(self, module, name):
            return getattr(torch, name) if name.endswith("Storage") else (lambda *args: args)

    result = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(result, "w") as new:
        Unpickler(io.BytesIO(old.read("archive/data.pkl"))).load()
        for info in old.infolist():
            content = old.read(info)
            folder, _, key = info.filename.rpartition("/")
            if folder == "archive/data":
                content = np.frombuffer(content, f"u{widths[key]}").byteswap().tobytes()
            elif key == "byteorder":
                content = b"big"
            new.writestr(zipfile.ZipInfo(info.filename, (1980, 1, 1, 0, 0, 0)), content)
    return result.getvalue()


class Call:
    def __init__(self, function, *args):
        self.parts = function, args

    def __reduce__(self):
        return self.parts


class StorageId:
    def __init__(self, *parts):
        self.parts = parts


def old_legacy(little_endian=True):
    """_rebuild_tensor of PyTorch 0.1 to 0.3 and a storage that is a view of another, as they were saved then."""
    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return value.parts if isinstance(value, StorageId) else None

    root = ("storage", torch.FloatStorage, "100", "cpu", 8)
    value = {
        "old": Call(torch._utils._rebuild_tensor, StorageId(*root, None), 2, (2, 3), (3, 1)),
        "view": Call(torch._utils._rebuild_tensor, StorageId(*root, ("101", 3, 4)), 1, (3,), (1,)),
    }
    buffer = io.BytesIO()
    for part in (torch.serialization.MAGIC_NUMBER, 1001, {"little_endian": little_endian}):
        pickle.dump(part, buffer, 2)
    Pickler(buffer, 2).dump(value)
    pickle.dump(["100"], buffer, 2)
    buffer.write(struct.pack("<q8f", 8, *range(8)))
    return buffer.getvalue()


def variants():
    """(file name, case, bytes) of all files."""
    for name, make in CASES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = make()
        for container, protocol in (("zip", 2), ("legacy", 2)):
            yield f"{name}.{container}{protocol}.pt", name, save(value, container, protocol)
        if name in ("dtypes", "containers"):
            for container, protocol in (("zip", 3), ("zip", 4), ("zip", 5), ("legacy", 1), ("legacy", 4)):
                yield f"{name}.{container}{protocol}.pt", name, save(value, container, protocol)
    without_u = {key: value for key, value in dtypes().items() if not key.startswith("uint") or key == "uint8"}
    yield "big_endian.zip2.pt", "big_endian", swapped_zip(without_u)
    yield "old.legacy2.pt", "old", old_legacy()
    yield "old_big_endian.legacy2.pt", "old", old_legacy(little_endian=False)
    yield "torchscript.jit", "torchscript", script()


def expected_tensors(value, path=""):
    """{path: tensor} in the manner of find_tensors."""
    if isinstance(value, torch.nn.Module):
        value = value.state_dict()
    if isinstance(value, (torch.storage.TypedStorage, torch.UntypedStorage)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind = value.dtype if isinstance(value, torch.storage.TypedStorage) else torch.uint8
            value = torch.empty(0, dtype=kind).set_(getattr(value, "_untyped_storage", value))
    if isinstance(value, torch.Tensor):
        return {path: value}
    found = {}
    if isinstance(value, (dict, list, tuple, collections.deque)):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            found.update(expected_tensors(child, f"{path}.{key}" if path else str(key)))
    return found


def as_numpy(tensor):
    """A tensor's values as the reader gives them: BF16 as bit patterns."""
    tensor = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    return (tensor.contiguous().view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    arrays, table = {}, {}
    with short_names():
        files = list(variants())
    for file, case, data in files:
        (FOLDER / file).write_bytes(data)
        if case in table:
            continue
        value = torch.jit.load(io.BytesIO(data)) if case == "torchscript" else load(data)
        table[case] = {}
        for path, tensor in expected_tensors(value).items():
            array = np.ascontiguousarray(as_numpy(tensor)).reshape(tensor.shape)
            table[case][path] = [NAMES[tensor.dtype], list(tensor.shape)]
            if array.dtype == "c8":
                array = array.view(np.float32).reshape(*array.shape, 2)
            arrays[f"{case}/{path}"] = array
    save_file(arrays, FOLDER / "expected.safetensors")
    (FOLDER / "expected.json").write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    size = sum(file.stat().st_size for file in FOLDER.iterdir())
    print(f"{len(list(FOLDER.iterdir()))} files, {size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
