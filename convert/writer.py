"""Writing: safetensors files block by block, and a folder that appears whole or not at all.

`write_tensors` knows every name, dtype and shape in advance, so it writes each file's header first and then puts
blocks of rows where they belong: memory does not grow with the model.

`OutputFolder` writes to a hidden sibling `.NAME.tmp-PID-...` and renames it to NAME at the end. A process that is
killed leaves at most such a sibling, which the next run to the same target removes. Replacing an existing model
goes through a second sibling, `.NAME.old-PID-...`: if the process dies between the two renames, the next run puts
it back.
"""

import errno
import fcntl
import json
import math
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_cosyh3.convert.sources import NUMPY_DTYPES
from mlx_cosyh3.errors import CosyH3Error
from mlx_cosyh3.load import FAMILIES

SHARD_BYTES = 5_000_000_000


@dataclass
class Entry:
    """A tensor to be written. `dtype` in safetensors' spelling."""

    name: str
    dtype: str
    shape: tuple

    @property
    def itemsize(self):
        return np.dtype(NUMPY_DTYPES[self.dtype]).itemsize

    @property
    def nbytes(self):
        return math.prod(self.shape) * self.itemsize


def plan_shards(groups, limit=SHARD_BYTES):
    """Split groups of entries (a group = the tensors made from one source tensor) -> [(file name, [groups])]."""
    shards, size = [[]], 0
    for group in groups:
        nbytes = sum(e.nbytes for e in group)
        if shards[-1] and size + nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(group)
        size += nbytes
    if len(shards) == 1:
        return [("model.safetensors", shards[0])]
    return [(f"model-{i:05d}-of-{len(shards):05d}.safetensors", s) for i, s in enumerate(shards, start=1)]


class TensorFile:
    """One .safetensors file being written. Blocks of one tensor must come in order; tensors in any order."""

    def __init__(self, path, entries):
        # Widest dtypes first keeps every tensor aligned to its own size.
        entries = sorted(entries, key=lambda e: (-e.itemsize, e.name))
        header, self._next, self._end, at = {"__metadata__": {"format": "mlx"}}, {}, {}, 0
        for e in entries:
            header[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": [at, at + e.nbytes]}
            self._next[e.name], self._end[e.name] = at, at + e.nbytes
            at += e.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._base = 8 + len(text)
        self._file = open(path, "wb", buffering=0)
        self._write(len(text).to_bytes(8, "little") + text, 0)

    def write(self, name, block):
        """Append a block of rows (numpy, already of the tensor's dtype) to tensor `name`."""
        data = memoryview(np.ascontiguousarray(block)).cast("B")
        at = self._next[name]
        if at + len(data) > self._end[name]:
            raise AssertionError(f"more data than planned for tensor {name!r}")
        self._write(data, self._base + at)
        self._next[name] = at + len(data)

    def _write(self, data, at):
        data = memoryview(data)
        self._file.seek(at)
        while data:  # an unbuffered write may be short
            data = data[self._file.write(data) :]

    def close(self):
        """Check that all tensors are complete and force the file to the disk."""
        unfinished = [n for n, at in self._next.items() if at != self._end[n]]
        if unfinished:
            raise AssertionError(f"tensor {unfinished[0]!r} was not written whole")
        os.fsync(self._file.fileno())
        self._file.close()

    def abort(self):
        self._file.close()


def write_tensors(folder, groups, produce, progress=lambda n: None, limit=SHARD_BYTES):
    """Write `groups` of entries as shards with an index into `folder`.

    `produce(group)` yields (name, block of rows) until the group's tensors are complete; `progress` is told the
    bytes written.
    """
    weight_map, total = {}, 0
    for file_name, shard in plan_shards(groups, limit):
        entries = [e for group in shard for e in group]
        out = TensorFile(Path(folder) / file_name, entries)
        try:
            for group in shard:
                for name, block in produce(group):
                    out.write(name, block)
                    progress(block.nbytes)
            out.close()
        finally:
            out.abort()
        weight_map |= {e.name: file_name for e in entries}
        total += sum(e.nbytes for e in entries)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_file(Path(folder) / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True) + "\n")


def write_file(path, content):
    """Write text or bytes and force them to the disk."""
    with open(path, "wb") as f:
        f.write(content.encode() if isinstance(content, str) else content)
        f.flush()
        os.fsync(f.fileno())


class OutputFolder:
    """`with OutputFolder(target) as tmp:` write into tmp; at the end it becomes `target`, on an error it goes."""

    def __init__(self, target, overwrite=False):
        self.target = Path(
            os.path.realpath(Path(target).expanduser())
        )  # through a link: replace what it points to
        self._overwrite = overwrite
        self._lock = None
        self.check()

    def check(self):
        """Whether the target may be written; raises CosyH3Error."""
        if self.target == self.target.parent:
            raise CosyH3Error(f"{self.target} cannot be the output folder")
        if not os.path.lexists(self.target):
            return
        if not self._overwrite:
            raise CosyH3Error(f"{self.target} exists: pass --overwrite to replace it, or choose another --out")
        if not self.target.is_dir() or (any(self.target.iterdir()) and not _is_model(self.target)):
            raise CosyH3Error(
                f"{self.target} exists and is not a converted model: it is not replaced, remove it yourself"
            )

    def __enter__(self):
        parent = self.target.parent
        try:
            parent.mkdir(parents=True, exist_ok=True)
            clean_up(self.target)
            self.check()  # the clean-up may have put a model back
            self.tmp = parent / f".{self.target.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
            self.tmp.mkdir()
            self._lock = _lock(self.tmp)
        except OSError as e:
            raise _disk_error(e, parent) from e
        return self.tmp

    def __exit__(self, kind, error, traceback):
        try:
            if kind is None:
                self._publish()
        except OSError as e:
            kind, error = type(e), e
        finally:
            if self.tmp.exists():
                shutil.rmtree(self.tmp, ignore_errors=True)
            os.close(self._lock)
        if isinstance(error, OSError):
            raise _disk_error(error, self.target.parent) from error
        return False

    def _publish(self):
        parent, old = self.target.parent, None
        _fsync_folder(self.tmp)
        if os.path.lexists(self.target):
            self.check()
            old = parent / self.tmp.name.replace(".tmp-", ".old-")
            os.rename(self.target, old)
        try:
            os.rename(self.tmp, self.target)
        except OSError:
            if old:
                os.rename(old, self.target)
            raise
        _fsync_folder(parent)
        if old:
            shutil.rmtree(old, ignore_errors=True)


def clean_up(target):
    """Remove what dead processes left beside `target`; put the old model back if one died while replacing it."""
    leftover = re.compile(re.escape(f".{target.name}.") + r"(tmp|old)-(\d+)-[0-9a-f]{8}$")
    for path in sorted(target.parent.iterdir()):
        match = leftover.match(path.name)
        if not match or _alive(int(match[2])):
            continue
        lock = _lock(path)
        if lock is None:  # a live process of another machine or container holds it
            continue
        try:
            if match[1] == "old" and not os.path.lexists(target):
                os.rename(path, target)
            else:
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _is_model(folder):
    try:
        return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type") in FAMILIES
    except (OSError, ValueError, AttributeError):
        return False


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _lock(folder):
    """An open, locked descriptor of `folder`, or None when a process has it. The lock ends with that."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError as e:
        if e.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP):
            os.close(fd)
            raise
    return fd  # on a file system without locks the process id in the name must do


def _fsync_folder(folder):
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _disk_error(error, where):
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    reason = "the disk is full" if full else f"{error.strerror or error}"
    return CosyH3Error(f"cannot write to {where}: {reason}; nothing was left behind")
