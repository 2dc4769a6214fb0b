"""Numbers of slots and entries of an index file, inferred from its content (format#sizes, format#index).

    0         40                                40 + 4 slots
    | header  | slots x i32                     | entry 0, entry 1, ... entry n - 1, unused       |
      begin, end physical offset                           ^ begin               ^ end
                ^ slot[hash of entry n - 1 % slots] == n - 1

The shape is saved in the manifest alone. A Java broker's store has none, and a file of length L can have L / 20 shapes.
But the first entry must have the header's begin offset, and the last entry its end offset. The last entry is also the
head of its chain. Each shape puts these three at different positions, so a file with a few entries fits only one shape.

`check_index` checks the rest of the file.
"""

from __future__ import annotations

import os
from pathlib import Path

from mqstore import arrays as np
from mqstore.errors import MQStoreError
from mqstore.files.filesystem import FileSystem
from mqstore.layout.arrays.scan import everywhere
from mqstore.layout.indexfile import (
    ENTRY_BYTES,
    ENTRY_OFFSET_AT,
    HEADER_BYTES,
    SLOT_BYTES,
    IndexHeader,
    check_index,
    slots_entries_from_length,
)

_ENTRY_PER_SLOT = ENTRY_BYTES // SLOT_BYTES
_MAX_LENGTH = 1 << 31
_CHUNK = 1 << 18
"""Number of shapes examined in one pass: a few MiB of arrays for a file of any size."""


def shape_of(data: np.NDArray[np.uint8]) -> tuple[int, int] | None:
    """Return (slots, entries) of the index file `data`, or None unless exactly one shape fits.
    A file without entries fits none."""
    length = len(data)
    words = length - HEADER_BYTES
    if words < SLOT_BYTES + 2 * ENTRY_BYTES or words % SLOT_BYTES or length > _MAX_LENGTH:
        return None
    header = IndexHeader.decode(data[:HEADER_BYTES].tobytes())
    count = header.next_entry
    if count <= 1:
        return None
    words //= SLOT_BYTES
    # words = slots + 5 * entries, and there is room for all used entries.
    most = (words - 1) // _ENTRY_PER_SLOT
    usual = slots_entries_from_length(length)
    if usual is not None and count <= usual[1] and len(_fitting(data, header, np.array([usual[0]], np.int64))):
        return usual
    found: list[int] = []
    for low in range(count, most + 1, _CHUNK):
        entries = np.arange(low, min(low + _CHUNK, most + 1), dtype=np.int64)
        found += _fitting(data, header, words - _ENTRY_PER_SLOT * entries)
        if len(found) > 64:
            return None  # zeros and the like prove nothing
    shapes = [(slots, (words - slots) // _ENTRY_PER_SLOT) for slots in found]
    if len(shapes) > 1:
        shapes = [shape for shape in shapes if not check_index(data.data, *shape)]
    return shapes[0] if len(shapes) == 1 else None


def _fitting(data: np.NDArray[np.uint8], header: IndexHeader, slots: np.NDArray[np.int64]) -> list[int]:
    """Return the slot counts for which the first entry, the last entry and its slot are consistent."""
    first = HEADER_BYTES + SLOT_BYTES * slots + ENTRY_BYTES
    last = first + ENTRY_BYTES * (header.next_entry - 2)
    offsets, words = everywhere(data, ">i8"), everywhere(data, ">i4")
    fits = offsets[first + ENTRY_OFFSET_AT] == header.begin_physical_offset
    fits &= offsets[last + ENTRY_OFFSET_AT] == header.end_physical_offset
    slots, last = slots[fits], last[fits]
    hashes = words[last].astype(np.int64)
    fine = hashes >= 0
    slots, hashes = slots[fine], hashes[fine]
    heads = words[HEADER_BYTES + SLOT_BYTES * (hashes % slots)]
    return [int(n) for n in slots[heads == header.next_entry - 1].tolist()]


def shape_of_file(path: Path, fs: FileSystem) -> tuple[int, int] | None:
    """Return the `shape_of` the file at `path`, or None if it cannot be read."""
    try:
        with fs.opened(path, os.O_RDONLY) as fd:
            length = fs.size(fd)
            if not HEADER_BYTES < length <= _MAX_LENGTH:
                return None
            mapping = fs.map(fd, length, writable=False)
    except (MQStoreError, FileNotFoundError):
        return None
    return shape_of(np.frombuffer(mapping, np.uint8))
