"""Mutated PyTorch files: the reader ends in a value or in CheckpointError, and never in anything else.

MLX_COSYH3_FUZZ sets the number of files (default 3000); the seeds are fixed, so a failing round can be run again.
"""

import io
import os
import pickletools
import random
import re
import time
import zipfile
from pathlib import Path

from mlx_cosyh3.errors import CheckpointError
from tests import torch_streams as streams
from tests.test_torch_hostile import HARMLESS
from tests.torch_streams import WATCH

GOLDEN = Path(__file__).parent / "golden" / "torch"
ROUNDS = int(os.environ.get("MLX_COSYH3_FUZZ", "3000"))
EXTREMES = (0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
SPICE = [
    b"r\xff\xff\xff\xff", b"\x8e" + b"\xff" * 8, b"\x95" + b"\xff" * 8, b"2", b"0", b"(", b"t", b"\x94", b"R",
    b"b", b"\x81", b"Q", b"u", b"s", b"e", b"a", b"\x85", b"\x86", b"\x87", b"1", b"l", b"d", b"o", b"\x92",
    b"\x93", b"h\x00", b"h\x05", b"cos\nsystem\n", b"ccollections\nOrderedDict\n", b"}", b"]", b")", b"N",
    b"\x8f", b"\x90", b"\x91", b"L99999999999L\n", b"X\x01\x00\x00\x00a", b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
    b"K\x00", b"J\xff\xff\xff\xff", b"\x88", b"G" + b"\x7f\xf0" + bytes(6),
]


class Seed:
    """A file to mutate: its bytes, and its pickle taken apart."""

    def __init__(self, name, data):
        self.name, self.data = name, data
        self.records = None
        if data[:2] == b"PK":
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                names = archive.namelist()
                self.pickle_name = next(name for name in names if name.endswith("data.pkl"))
                self.records = {name: archive.read(name) for name in names}
            stream, self.head, self.tail = self.records[self.pickle_name], b"", b""
        else:
            position = 0
            for _ in range(3):
                position = 1 + max(at for _, _, at in pickletools.genops(io.BytesIO(data[position:]))) + position
            end = 1 + max(at for _, _, at in pickletools.genops(io.BytesIO(data[position:]))) + position
            stream, self.head, self.tail = data[position:end], data[:position], data[end:]
        starts = [at for _, _, at in pickletools.genops(stream)] + [len(stream)]
        self.operations = [stream[a:b] for a, b in zip(starts, starts[1:])]

    def rebuilt(self, stream):
        if self.records is None:
            return self.head + stream + self.tail
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in self.records.items():
                archive.writestr(zipfile.ZipInfo(name), stream if name == self.pickle_name else content)
        return buffer.getvalue()


def mutate_bytes(rng, seed, seeds):
    data = bytearray(seed.data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, kind = rng.randrange(len(data) or 1), rng.randrange(7)
        if not data:
            break
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            del data[at:]
        elif kind == 3:
            data[at:at] = rng.randbytes(rng.randrange(1, 9))
        elif kind == 4:
            del data[at:at + rng.randrange(1, 33)]
        elif kind == 5:
            other = rng.choice(seeds).data
            start = rng.randrange(len(other))
            data[at:at + rng.randrange(64)] = other[start:start + rng.randrange(1, 256)]
        else:
            start = rng.randrange(len(data))
            data[at:at] = data[start:start + rng.randrange(1, 64)]
    return bytes(data)


def mutate_operations(rng, seed, seeds):
    operations = list(seed.operations)
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        at, kind = rng.randrange(len(operations)), rng.randrange(8)
        piece = operations[at]
        if kind == 0:
            operations[at] = rng.choice(SPICE)
        elif kind == 1:
            operations.insert(at, rng.choice(SPICE))
        elif kind == 2:
            del operations[at]
        elif kind == 3:
            operations.insert(at, rng.choice(operations))
        elif kind == 4:
            other = rng.randrange(len(operations))
            operations[at], operations[other] = operations[other], operations[at]
        elif kind == 5 and len(piece) > 1:
            number = rng.choice(EXTREMES).to_bytes(8, "little")[:len(piece) - 1]
            operations[at] = piece[:1] + number + piece[1 + len(number):]
        elif kind == 6:
            operations[at:at] = [operations[at]] * rng.choice((2, 10, 100))
        else:
            other = rng.choice(seeds).operations
            start = rng.randrange(len(other))
            operations[at:at] = other[start:start + rng.randrange(1, 20)]
        if not operations:
            break
    return seed.rebuilt(b"".join(operations))


def mutate_zip(rng, seed, seeds):
    """Numbers of the zip headers: sizes, offsets, counts, flags."""
    data = bytearray(seed.data)
    kinds = {b"PK\x03\x04": 30, b"PK\x01\x02": 46, b"PK\x05\x06": 22, b"PK\x06\x06": 56, b"PK\x06\x07": 20}
    headers = [(found.start(), length) for magic, length in kinds.items()
               for found in re.finditer(re.escape(magic), seed.data)]
    if not headers:
        return mutate_operations(rng, seed, seeds)
    for _ in range(rng.choice((1, 1, 2, 4))):
        start, length = rng.choice(headers)
        at, width = start + rng.randrange(4, length), rng.choice((1, 2, 4, 8))
        near = int.from_bytes(data[at:at + width], "little") + rng.choice((-1, 1))
        number = rng.choice((*EXTREMES, rng.randrange(len(data)), near))
        field = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        data[at:at + width] = field[:max(0, len(data) - at)]
    return bytes(data)


def resident():
    status = Path("/proc/self/status")
    return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024 if status.exists() else 0


def test_mutated_files(tmp_path):
    seeds = [Seed(path.name, path.read_bytes()) for path in sorted(GOLDEN.glob("*.[pj][ti]*"))]
    seeds += [Seed(str(make), make((2, 2), (2, 1))) for make in (streams.zip_tensor, streams.legacy_tensor)]
    seeds += [Seed(name, streams.archive(stream)) for name, stream in HARMLESS.items() if len(stream) < 100]
    assert len(seeds) > 30
    path = tmp_path / "x.pt"
    for seed in seeds:  # all whole to begin with, and every module that reading needs is there
        path.write_bytes(seed.rebuilt(b"".join(seed.operations)))
        WATCH.read(path)
    before, slowest, values, messages = resident(), 0.0, 0, {}
    for number in range(ROUNDS):
        rng = random.Random(number)
        seed = rng.choice(seeds)
        data = rng.choice((mutate_bytes, mutate_operations, mutate_operations, mutate_zip))(rng, seed, seeds)
        path.write_bytes(data)
        begin = time.process_time()
        try:
            WATCH.read(path)
            values += 1
        except CheckpointError as e:
            assert "\n" not in str(e) and len(str(e)) < 3000, str(e)
            kind = re.sub(r"[0-9]+|'[^']*'", "#", str(e).split(": ", 1)[1])[:40]
            messages[kind] = messages.get(kind, 0) + 1
        except BaseException as e:
            (tmp_path / "failed.pt").write_bytes(data)
            raise AssertionError(f"round {number}, {seed.name}: {type(e).__name__}: {e}") from e
        slowest = max(slowest, time.process_time() - begin)
    grown = resident() - before
    print(f"\n{ROUNDS} files: {values} values, {len(messages)} kinds of errors, slowest {slowest:.3f} s, "
          f"memory grew by {grown >> 20} MB")
    assert slowest < 10 and grown < 96 << 20
    assert values and len(messages) > 20  # the mutations reach deep, and do not break everything
