"""Reads PyTorch checkpoint files without PyTorch, and without running anything that is in them.

- Containers: the zip archive of PyTorch 1.6 and later (TorchScript archives too) and the stream of pickles before it.
- The pickle goes through our own machine (pickle_vm.py); which names it may hold is decided in pickle_names.py.
- Storages stay in the file: it is memory-mapped read-only, and a tensor reads its part when it is asked to.
- What comes out is a tree of dict, list, tuple, set, str, int, float, complex, bool, None, bytes, `TorchTensor`, and
  `Opaque` for foreign objects. An OrderedDict is a dict here; attributes of dicts and tensors are dropped.
"""

import math
import mmap
import os
import stat
import struct

import numpy as np

from mlx_cosyh3.convert.pickle_names import check_call, check_name
from mlx_cosyh3.convert.pickle_tree import Global, Opaque, damaged
from mlx_cosyh3.convert.pickle_vm import PickleMachine
from mlx_cosyh3.convert.torch_tensor import Storage, TorchTensor, data_builders, storage_class
from mlx_cosyh3.convert.zip_index import find_data, read_index
from mlx_cosyh3.errors import CheckpointError

__all__ = ["read_torch", "find_tensors", "TorchTensor", "Opaque"]

MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of the old container
PROTOCOL = 1001  # the second
MAX_WALK = 1 << 22  # values that find_tensors looks at


def read_torch(path, record="data.pkl"):
    """The value in a .pt, .pth, .bin or .jit file (see above). Only its pickle is read; tensors wait.

    record   which pickle of a zip archive: TorchScript keeps its module in data.pkl and its constants in constants.pkl
    CheckpointError, in one line that names the file, if it is damaged, too strange, or not a plain checkpoint.
    """
    try:
        source = _open(path)
        if source.map[:2] == b"PK":
            return _read_zip(source, record)
        return _read_legacy(source)
    except CheckpointError as e:
        raise CheckpointError(f"{path}: {e}") from None


def find_tensors(value):
    """{dotted path: TorchTensor} of all tensors in a value of read_torch, in the order they stand there.

    Foreign modules count as what they hold, so a TorchScript module or a pickled nn.Module gives the keys of its
    state dict. An object that points back at one around it is not entered again.
    """
    found, looked = {}, 0
    todo = [("", value, ())]  # path, value, ids of the objects around it
    while todo:
        path, node, around = todo.pop()
        looked += 1
        if looked > MAX_WALK:
            raise CheckpointError(f"more than {MAX_WALK} values; pick the part that holds the tensors")
        if isinstance(node, TorchTensor):
            found[path] = node
            continue
        if not isinstance(node, (dict, list, tuple, Opaque)) or id(node) in around:
            continue
        pairs = []
        if isinstance(node, Opaque):
            fields = node.fields
            for part in (fields, node.entries or {}):
                pairs += part.items()
            for group in ("_parameters", "_buffers", "_modules"):  # how nn.Module keeps its own
                if isinstance(fields.get(group), dict):
                    pairs += fields[group].items()
                    pairs = [pair for pair in pairs if pair[0] != group]
            pairs += enumerate(node.items or ())
        else:
            pairs = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
        around = (*around, id(node))
        for key, child in reversed(pairs):
            if isinstance(child, (TorchTensor, dict, list, tuple, Opaque)):
                todo.append((f"{path}.{key}" if path else str(key), child, around))
    return found


class _Source:
    """A file and its read-only mapping; tensors hold on to it, so it is unmapped when the last one goes."""

    __slots__ = ("path", "size", "map")

    def __init__(self, path, size, mapping):
        self.path, self.size, self.map = path, size, mapping


def _open(path):
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError("a folder, not a checkpoint file" if stat.S_ISDIR(status.st_mode) else "not a file")
        if status.st_size == 0:
            raise CheckpointError("an empty file (0 bytes); copy or download it again")
        with open(path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise CheckpointError(f"cannot be opened ({e.strerror})") from None
    return _Source(os.fspath(path), len(mapping), mapping)


class _Reader:
    """One checkpoint on its way in: its storages by key, and its tensors, which are checked when all is known."""

    def __init__(self, source):
        self.source = source
        self.storages = {}
        self.tensors = []
        self.builders = data_builders(self.tensors.append)
        self.names = {}  # (module, name) -> Global: each is judged once

    def find_global(self, module, name):
        found = self.names.get((module, name))
        if found is None:
            found = storage_class(module, name)
            if found is None:
                full = check_name(module, name)
                found = Global(full, self.builders.get(full))
            self.names[module, name] = found
        return found

    def run(self, buffer, start, end, persistent_load=None):
        """-> (value, where the stream ended)"""
        machine = PickleMachine(buffer, start, end, self.find_global, lambda name: check_call(name.name),
                                persistent_load)
        return machine.load(), machine.position

    def finish(self, value):
        for tensor in self.tensors:
            tensor.check_range()
        return value

    def storage_id(self, saved_id):
        """('storage', class, key, device, number of elements[, view]) -> (class, key, bytes, view)"""
        if not isinstance(saved_id, tuple) or not saved_id or saved_id[0] not in ("storage", b"storage"):
            raise damaged(f"a persistent id that names no storage ({type(saved_id).__name__})")
        if len(saved_id) not in (5, 6):
            raise damaged(f"a storage of {len(saved_id)} parts; 5 or 6 are known")
        kind, key, count = saved_id[1], saved_id[2], saved_id[4]
        if not isinstance(kind, StorageClass) or isinstance(key, bool) or not isinstance(key, (str, int, bytes)):
            raise damaged("a storage without a type or a key")
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2 ** 62:
            raise damaged(f"a storage of {count!r} elements" if isinstance(count, int) else "a storage without a size")
        key = key.decode("latin-1") if isinstance(key, bytes) else str(key)
        return kind, key, count * kind.itemsize, saved_id[5] if len(saved_id) == 6 else None
