"""Where the files inside an uncompressed zip archive lie, read from its directory alone.

PyTorch stores every file of its archives uncompressed, so an entry is a byte range that can be memory-mapped.
Layout (PKWARE APPNOTE 6.3): local header + data for each entry, then the central directory, then its end record,
with 64-bit twins of the last two where a number does not fit 32 bits.
"""

import struct

from mlx_cosyh3.errors import CheckpointError

_LOCAL = struct.Struct("<4s5H3I2H")  # 30 bytes, then name and extra
_CENTRAL = struct.Struct("<4s6H3I5H2I")  # 46 bytes, then name, extra and comment
_END = struct.Struct("<4s4H2IH")  # 22 bytes, then the comment
_LOCATOR = struct.Struct("<4sIQI")  # just before the end record if there is a 64-bit one
_END64 = struct.Struct("<4sQ2H2I4Q")
_FULL = 0xFFFFFFFF  # "see the 64-bit field"


class ZipEntry:
    """One entry of the directory: its header begins at `start`, its data (see find_data) ends before `limit`."""

    __slots__ = ("name", "start", "size", "packed", "method", "flags", "limit")

    def __init__(self, name, start, size, packed, method, flags):
        self.name, self.start, self.size, self.packed = name, start, size, packed
        self.method, self.flags = method, flags


def read_index(buffer):
    """{name: ZipEntry} of the archive in `buffer` (an mmap). CheckpointError in one line if it is not whole."""
    size = len(buffer)
    at, count, length, start = _find_directory(buffer, size)
    if start + length > at:
        raise CheckpointError(f"truncated or damaged: the zip directory should end at byte {start + length}, "
                              f"but the record behind it stands at byte {at} of {size}")
    entries, position, end = {}, start, start + length
    for _ in range(count):
        if end - position < _CENTRAL.size:
            raise CheckpointError(f"damaged zip archive: its directory holds {len(entries)} of {count} entries")
        (magic, _, _, flags, method, _, _, _, packed, plain, name_size, extra_size, comment_size, _, _, _,
         offset) = _CENTRAL.unpack_from(buffer, position)
        body = position + _CENTRAL.size
        position = body + name_size + extra_size + comment_size
        if magic != b"PK\x01\x02" or position > end:
            raise CheckpointError(f"damaged zip archive: entry {len(entries)} of its directory is broken")
        name = buffer[body:body + name_size].decode("utf-8", "replace")
        extra = buffer[body + name_size:body + name_size + extra_size]
        plain, packed, offset = _wide(extra, [plain, packed, offset], name)
        if name in entries:
            raise CheckpointError(f"damaged zip archive: two entries are named {name!r}")
        entries[name] = ZipEntry(name, offset, plain, packed, method, flags)
    _check_overlap(entries.values(), start)
    return entries


def find_data(buffer, entry):
    """The byte offset of an entry's data, after its local header was checked against the directory."""
    if entry.flags & 1:
        raise CheckpointError(f"{entry.name!r} in the archive is encrypted")
    if entry.method != 0 or entry.packed != entry.size:
        raise CheckpointError(f"{entry.name!r} in the archive is compressed; PyTorch stores its files "
                              "uncompressed, so save the checkpoint again with torch.save")
    magic, *_, name_size, extra_size = _LOCAL.unpack_from(buffer, entry.start)  # in range: _check_overlap
    data = entry.start + _LOCAL.size + name_size + extra_size
    name = buffer[entry.start + _LOCAL.size:entry.start + _LOCAL.size + name_size].decode("utf-8", "replace")
    if magic != b"PK\x03\x04" or name != entry.name:
        raise CheckpointError(f"damaged zip archive: no header of {entry.name!r} at byte {entry.start}")
    if data + entry.size > entry.limit:
        raise CheckpointError(f"damaged zip archive: {entry.name!r} reaches into what follows at byte {entry.limit}")
    return data


def _find_directory(buffer, size):
    """(where the end record stands, number of entries, length and start of the directory)."""
    at = buffer.rfind(b"PK\x05\x06", max(0, size - _END.size - 0xFFFF))
    while at >= 0 and size - at < _END.size:
        at = buffer.rfind(b"PK\x05\x06", max(0, size - _END.size - 0xFFFF), at)
    if at < 0:
        raise CheckpointError(f"truncated: it begins as a zip archive, but after {size} bytes the directory that "
                              "belongs at its end is missing; copy or download it again")
    _, disk, first_disk, _, count, length, start, _ = _END.unpack_from(buffer, at)
    if at >= _LOCATOR.size and buffer[at - _LOCATOR.size:at - _LOCATOR.size + 4] == b"PK\x06\x07":
        _, _, wide_at, _ = _LOCATOR.unpack_from(buffer, at - _LOCATOR.size)
        if wide_at + _END64.size > at or buffer[wide_at:wide_at + 4] != b"PK\x06\x06":
            raise CheckpointError(f"truncated or damaged: no 64-bit zip directory at byte {wide_at} of {size}")
        _, _, _, _, disk, first_disk, _, count, length, start = _END64.unpack_from(buffer, wide_at)
        at = wide_at
    if disk or first_disk:
        raise CheckpointError("one part of a zip archive that was split; join the parts first")
    return at, count, length, start


def _wide(extra, values, name):
    """Sizes and offset, with those that overflowed 32 bits taken from the 64-bit extra field (tag 1)."""
    if _FULL not in values:
        return values
    position = 0
    while position + 4 <= len(extra):
        tag, length = struct.unpack_from("<2H", extra, position)
        position += 4
        if tag == 1:
            field = extra[position:position + length]
            wide = iter(struct.unpack(f"<{len(field) // 8}Q", field[:len(field) // 8 * 8]))
            values = [next(wide, None) if value == _FULL else value for value in values]
            break
        position += length
    if None in values or position + 4 > len(extra) and _FULL in values:
        raise CheckpointError(f"damaged zip archive: the size of {name!r} is missing")
    return values


def _check_overlap(entries, directory):
    """Every entry must lie before the directory and clear of the next one: no bytes belong to two names."""
    limit, follower = directory, ""
    for entry in sorted(entries, key=lambda entry: entry.start, reverse=True):
        free = entry.start + _LOCAL.size + len(entry.name.encode()) + entry.packed
        if free > directory:
            raise CheckpointError(f"truncated or damaged: {entry.name!r} should reach to byte {free} or beyond, "
                                  f"but the archive's data ends at byte {directory}")
        if free > limit:
            raise CheckpointError(f"damaged zip archive: {entry.name!r} and {follower!r} overlap")
        entry.limit = limit
        limit, follower = entry.start, entry.name
