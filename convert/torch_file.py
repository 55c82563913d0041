"""Reads PyTorch checkpoint files without PyTorch, and without running anything that is in them.

- Containers: the zip archive of PyTorch 1.6 and later (TorchScript archives too), and the stream of pickles of
  before.
- The pickle goes through our own machine (pickle_vm.py); which names it may hold is decided in pickle_names.py.
- Storages stay in the file: it is memory-mapped read-only, and a tensor reads its part when it is asked to.
- What comes out is a tree of dict, list, tuple, set, str, int, float, complex, bool, None, bytes, `TorchTensor`,
  and `Opaque` for foreign objects. An OrderedDict is a dict here; attributes of dicts and tensors are dropped.
"""

import mmap
import os
import stat
import struct

from mlx_cosyh3.convert.pickle_names import check_call, check_name
from mlx_cosyh3.convert.pickle_tree import MAX_DEPTH, Global, Opaque, damaged
from mlx_cosyh3.convert.pickle_vm import PickleMachine
from mlx_cosyh3.convert.torch_tensor import Storage, StorageClass, TorchTensor, data_builders, storage_class
from mlx_cosyh3.convert.zip_index import find_data, read_index
from mlx_cosyh3.errors import CheckpointError

__all__ = ["read_torch", "find_tensors", "TorchTensor", "Opaque"]

MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of the old container
PROTOCOL = 1001  # the second
MAX_WALK = 1 << 22  # values that find_tensors looks at


def read_torch(path, record="data.pkl"):
    """The value in a .pt, .pth, .bin or .jit file (see above). Only its pickle is read; tensors wait.

    record   which pickle of a zip archive: TorchScript has its module in data.pkl, its constants in constants.pkl
    CheckpointError, in one line that names the file, if it is damaged, too strange, or not a plain checkpoint.
    """
    try:
        source = _open(path)
        if source.map[:2] == b"PK":
            return _read_zip(source, record)
        return _read_legacy(source)
    except CheckpointError as e:
        text = str(e)  # which may hold names from the file, of any length
        raise CheckpointError(f"{path}: {text if len(text) <= 800 else text[:800] + ' ...'}") from None


def find_tensors(value):
    """{dotted path: TorchTensor} of all tensors in a value of read_torch, in the order they stand there.

    Foreign objects count as what they hold: a pickled nn.Module gives the keys of its state dict, and a TorchScript
    module these and its other tensors. An object that points back at one around it is not entered again.
    """
    found, looked = {}, 0
    todo = [("", value, ())]  # path, value, ids of the objects around it
    while todo:
        path, node, around = todo.pop()
        looked += 1
        if looked > MAX_WALK:
            raise CheckpointError(f"more than {MAX_WALK} values; pick the part that holds the tensors")
        if isinstance(node, TorchTensor):
            if path in found:
                raise CheckpointError(f"two tensors are named {path[:200]!r}; pick the part that holds the right one")
            found[path] = node
            continue
        if not isinstance(node, (dict, list, tuple, Opaque)) or id(node) in around:
            continue
        if isinstance(node, Opaque):
            pairs = _module_members(node.fields)
            if pairs is None:
                pairs = [*node.fields.items(), *(node.entries or {}).items(), *enumerate(node.items or ())]
        else:
            pairs = list(node.items()) if isinstance(node, dict) else list(enumerate(node))
        around = (*around, id(node))
        if len(around) > 2 * MAX_DEPTH:
            raise CheckpointError(f"more than {2 * MAX_DEPTH} objects inside one another; pick the part "
                                  "that holds the tensors")
        for key, child in reversed(pairs):
            if isinstance(child, (TorchTensor, dict, list, tuple, Opaque)):
                todo.append((f"{path}.{key}" if path else str(key), child, around))
    return found


def _module_members(fields):
    """What an nn.Module saves in its state dict, of the attributes of a pickled one; None for other objects."""
    groups = [fields.get(name) for name in ("_parameters", "_buffers", "_modules")]
    if not all(isinstance(group, dict) for group in groups):
        return None
    passing = fields.get("_non_persistent_buffers_set")
    passing = passing if isinstance(passing, set) else ()
    return [(key, value) for group in groups for key, value in group.items() if key not in passing]


class _Source:
    """A file and its read-only mapping; tensors hold on to it, so it is unmapped when the last one goes."""

    __slots__ = ("path", "size", "map")

    def __init__(self, path, size, mapping):
        self.path, self.size, self.map = path, size, mapping


def _open(path):
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError("a folder, not a checkpoint" if stat.S_ISDIR(status.st_mode) else "not a file")
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
        if not _is_size(count):
            raise damaged("a storage without a sensible number of elements")
        key = key.decode("latin-1") if isinstance(key, bytes) else str(key)
        return kind, key, count * kind.itemsize, saved_id[5] if len(saved_id) == 6 else None

    def flat(self, storage, kind, start, nbytes):
        """A persistent id's value: the storage (or a view of it) as a tensor of one dimension."""
        tensor = TorchTensor(storage, start, (nbytes // kind.itemsize,), (1,), kind.dtype)
        self.tensors.append(tensor)
        return tensor


# -- the zip archive -------------------------------------------------------------------------------------------


def _read_zip(source, record):
    entries = read_index(source.map)
    folder = _folder(entries, record)
    reader = _Reader(source)
    where = "constants/" if record == "constants.pkl" else "data/"
    big_endian = False
    if folder + "byteorder" in entries:
        order = _bytes_of(source, entries[folder + "byteorder"], 16)
        if order not in (b"little", b"big"):
            raise CheckpointError(f"its byteorder record says {order!r}, not little or big")
        big_endian = order == b"big"

    def persistent_load(saved_id):
        kind, key, nbytes, _ = reader.storage_id(saved_id)
        storage = reader.storages.get(key)
        if storage is None:
            entry = entries.get(folder + where + key)
            if entry is None and nbytes:
                raise CheckpointError(f"truncated or damaged: the archive lacks {folder + where + key!r}, "
                                      f"{nbytes} bytes of a tensor")
            start, size = (find_data(source.map, entry), entry.size) if entry else (0, 0)
            storage = reader.storages[key] = Storage(source, key, start, size, big_endian)
        return reader.flat(storage, kind, 0, nbytes)

    entry = entries[folder + record]
    start = find_data(source.map, entry)
    # In memory while it is read: slicing bytes is quicker than slicing a mapping.
    value, _ = reader.run(source.map[start:start + entry.size], 0, entry.size, persistent_load)
    return reader.finish(value)


def _folder(entries, record):
    """The archive's top folder: torch.save names it after the file, TorchScript after the model."""
    found = [name[:-len(record)] for name in entries if name == record or name.endswith("/" + record)]
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(f"{len(found)} checkpoints in one zip archive; unpack it first")
    if any(name.endswith("model.json") for name in entries):
        raise CheckpointError("a TorchScript archive from before PyTorch 1.4; save it again with a later version")
    raise CheckpointError(f"a zip archive without {record}: not a PyTorch checkpoint, or a checkpoint inside an "
                          "archive that must be unpacked first")


def _bytes_of(source, entry, most):
    start = find_data(source.map, entry)
    return source.map[start:start + min(entry.size, most)]


# -- the pickles of before PyTorch 1.6 -------------------------------------------------------------------------


def _read_legacy(source):
    """magic, protocol, facts about the machine, value, storage keys: five pickles; then each storage as its
    number of elements (8 bytes) and its elements."""
    _check_other_kinds(source)
    reader, size = _Reader(source), source.size
    magic, position = reader.run(source.map, 0, size)
    if isinstance(magic, bool) or magic != MAGIC:
        raise CheckpointError("a bare pickle, not a PyTorch checkpoint: it lacks the magic number of torch.save")
    protocol, position = reader.run(source.map, position, size)
    if isinstance(protocol, bool) or protocol != PROTOCOL:
        raise CheckpointError(f"its PyTorch protocol is {str(protocol)[:20]}; {PROTOCOL} is known")
    # Its `little_endian` tells of the machine that saved, not of the file: PyTorch writes this container in little
    # endian everywhere, and torch.load does not look at it either.
    facts, position = reader.run(source.map, position, size)
    if not isinstance(facts, dict):
        raise damaged("the description of the machine that saved it is missing")

    def persistent_load(saved_id):
        if isinstance(saved_id, tuple) and len(saved_id) == 4 and saved_id[0] in ("module", b"module"):
            return saved_id[1]  # a pickled nn.Module's class, with its source file and source text
        kind, key, nbytes, view = reader.storage_id(saved_id)
        storage = reader.storages.get(key)
        if storage is None:
            storage = reader.storages[key] = Storage(source, key, itemsize=kind.itemsize)
        if view is None:
            return reader.flat(storage, kind, 0, nbytes)
        if not isinstance(view, tuple) or len(view) != 3 or not all(_is_size(part) for part in view[1:]):
            raise damaged("a view of a storage without offset and size")
        return reader.flat(storage, kind, view[1] * kind.itemsize, view[2] * kind.itemsize)

    value, position = reader.run(source.map, position, size, persistent_load)
    keys, position = reader.run(source.map, position, size)
    if not isinstance(keys, list):
        raise damaged("the list of its storages is missing")
    for number, key in enumerate(keys):
        storage = reader.storages.get(key.decode("latin-1") if isinstance(key, bytes) else str(key))
        if storage is None or storage.start is not None:
            raise damaged(f"storage {number} of its list is unknown or twice there")
        which = f"truncated: storage {number + 1} of {len(keys)}"
        if size - position < 8:
            raise CheckpointError(f"{which} should begin at byte {position}, and the file has {size} bytes; "
                                  "copy or download it again")
        count = struct.unpack_from("<q", source.map, position)[0]
        position += 8
        if count < 0 or count * storage.itemsize > size - position:
            raise CheckpointError(f"{which} needs {count * storage.itemsize} bytes at byte {position}, and the "
                                  f"file has {size} bytes; copy or download it again")
        storage.start, storage.size = position, count * storage.itemsize
        position += storage.size
    return reader.finish(value)


def _is_size(value):
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2 ** 62


def _check_other_kinds(source):
    """Files that end up as a .pt by mistake get a line that says what they are."""
    head = source.map[:512]
    kinds = {
        b"\x1f\x8b": "a gzip archive; unpack it first",
        b"BZh": "a bzip2 archive; unpack it first",
        b"\xfd7zXZ": "an xz archive; unpack it first",
        b"7z\xbc\xaf": "a 7z archive; unpack it first",
        b"GGUF": "a GGUF file, not a PyTorch checkpoint",
        b"\x89HDF": "an HDF5 file, not a PyTorch checkpoint",
        b"version https://git-lfs": "a Git LFS pointer, not the file itself; fetch it with git lfs pull",
    }
    for start, what in kinds.items():
        if head.startswith(start):
            raise CheckpointError(what)
    if head[8:10] == b'{"' and head[6:8] == b"\0\0":
        raise CheckpointError("a safetensors file; give it the ending .safetensors")
    if head.lstrip()[:1] == b"<":
        raise CheckpointError("a web page, not a checkpoint; download the file itself")
    if head[257:262] == b"ustar" or head.split(b"\0")[0] in (b"storages", b"tensors", b"pickle"):
        raise CheckpointError("a tar archive: the format of PyTorch before 0.2 is not read, nor are packed "
                              "folders; load it in PyTorch and save it again")
    if not head.strip(b"\0"):
        raise CheckpointError(f"nothing but zeros where a checkpoint of {source.size} bytes should begin; "
                              "copy or download it again")
