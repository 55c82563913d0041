"""For the tests of the PyTorch reader: hand-made files around any pickle stream, and a watch over reading."""

import io
import struct
import sys
import zipfile

from mlx_cosyh3.convert.torch_file import find_tensors, read_torch
from mlx_cosyh3.errors import CheckpointError

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
HEADER = MAGIC + b"\x80\x02M\xe9\x03." + b"\x80\x02}(X\r\x00\x00\x00little_endian\x88u."
# The rest of a legacy file with one storage "0" of four float32
KEYS = b"\x80\x02]X\x01\x00\x00\x000a."
DATA = struct.pack("<q4f", 4, 1, 2, 3, 4)


def legacy(stream, keys=b"\x80\x02].", data=b""):
    return HEADER + stream + keys + data


def archive(stream, folder="archive", data=None, compression=zipfile.ZIP_STORED, **records):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as out:
        out.writestr(f"{folder}/data.pkl", stream)
        for key, content in (data or {}).items():
            out.writestr(f"{folder}/data/{key}", content)
        for name, content in records.items():
            out.writestr(f"{folder}/{name}", content)
    return buffer.getvalue()


def tensor(shape, strides, offset=0, kind=b"FloatStorage", numel=4, view=b""):
    """The opcodes of one tensor on storage "0"."""
    def number(value):
        raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
        return b"\x8a" + bytes([len(raw)]) + raw

    def numbers(values):
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = (b"(X\x07\x00\x00\x00storagectorch\n" + kind + b"\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
               + number(numel) + view + b"tQ")
    return (b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + number(offset) + numbers(shape) + numbers(strides)
            + b"\x89ccollections\nOrderedDict\n)RtR")


def zip_tensor(shape, strides, offset=0, kind=b"FloatStorage", numel=4, data=DATA[8:], **records):
    return archive(b"\x80\x02" + tensor(shape, strides, offset, kind, numel) + b".", data={"0": data}, **records)


def legacy_tensor(shape, strides, offset=0, kind=b"FloatStorage", numel=4, data=DATA):
    return legacy(b"\x80\x02" + tensor(shape, strides, offset, kind, numel, view=b"N") + b".", KEYS, data)


def sparse_zip(path, stream, key, size):
    """A zip archive whose storage of `size` bytes is a hole in the file: any size, no room on the disk."""
    def local(name, length):
        wide = struct.pack("<2H2Q", 1, 16, length, length) if length >= 1 << 32 else b""
        short = min(length, 0xFFFFFFFF)
        fields = (45, 0, 0, 0, 0, 0, short, short, len(name), len(wide))
        return struct.pack("<4s5H3I2H", b"PK\x03\x04", *fields) + name + wide

    def central(name, length, offset):
        values = [v for v in (length, length, offset) if v >= 1 << 32]
        wide = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
        short = min(length, 0xFFFFFFFF)
        fields = (45, 45, 0, 0, 0, 0, 0, short, short, len(name), len(wide), 0, 0, 0, 0, min(offset, 0xFFFFFFFF))
        return struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *fields) + name + wide

    storage, pickle = b"archive/data/" + key, b"archive/data.pkl"
    with open(path, "wb") as out:
        out.write(local(storage, size))
        start = out.tell()
        out.seek(start + size)
        second = out.tell()
        out.write(local(pickle, len(stream)) + stream)
        directory = out.tell()
        out.write(central(storage, size, 0) + central(pickle, len(stream), second))
        length = out.tell() - directory
        end = out.tell()
        out.write(struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 2, 2, length, directory))
        out.write(struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1))
        out.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 2, 2, length, min(directory, 0xFFFFFFFF), 0))
    return start


class Watch:
    """Sees through an audit hook what Python does while a file is read: imports, files, processes, code."""

    FORBIDDEN = ("import", "exec", "compile", "os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pickle.",
                 "marshal.", "tempfile.", "glob.", "urllib.", "webbrowser.", "code.", "builtins.breakpoint",
                 "builtins.input")

    def __init__(self):
        self.path = None  # the file that is being read; None: not watching
        self.seen = []
        sys.addaudithook(self.hook)

    def hook(self, event, args):
        if self.path is None:
            return
        if event.startswith(self.FORBIDDEN) or (event == "open" and args[0] != self.path):
            self.seen.append((event, str(args)[:200]))

    def read(self, path):
        """read_torch, and everything a user may ask of its value; CheckpointError passes through."""
        modules = set(sys.modules)
        self.seen, self.path = [], str(path)
        try:
            value = read_torch(str(path))
            walk(value)
            for tensor in find_tensors(value).values():
                try:
                    if tensor.nbytes <= 1 << 20:
                        tensor.numpy()
                    elif tensor.shape:
                        tensor.rows(0, 1)
                except CheckpointError:
                    continue  # a type that is not read, or an absurd size: said when it is asked for
            return value
        finally:
            self.path = None
            assert not self.seen, self.seen
            assert set(sys.modules) == modules


def walk(value):
    """The naive recursion that any user of a tree may write."""
    if isinstance(value, dict):
        return 1 + sum(walk(key) + walk(child) for key, child in value.items())
    if isinstance(value, (list, tuple)):
        return 1 + sum(walk(child) for child in value)
    repr(value)
    return 1


WATCH = Watch()  # one for all tests: an audit hook cannot be taken out again
