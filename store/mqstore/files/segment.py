"""One segment file of a run (`files.segments`): its name, its place in the stream, its problems."""

from __future__ import annotations

import mmap
from typing import Literal, NamedTuple

from mqstore.files.descriptors import File

NAME_DIGITS = 20


def segment_name(start: int) -> str:
    """Return the file name of the segment that starts at `start`.

    >>> segment_name(67108864)
    '00000000000067108864'
    """
    return f"{start:0{NAME_DIGITS}d}"


def place_in_file(physical_offset: int, segment_bytes: int) -> tuple[str, int]:
    """Return the segment file of a physical offset, as a path below the store, and the position in it.

    >>> place_in_file(70000000, 67108864)
    ('commitlog/00000000000067108864', 2891136)
    """
    at = physical_offset % segment_bytes
    return f"commitlog/{segment_name(physical_offset - at)}", at


def segment_start(name: str) -> int | None:
    """Return the offset in a file name, or None for a name that is not a segment's."""
    return int(name) if len(name) == NAME_DIGITS and name.isascii() and name.isdigit() else None


class LoadProblem(NamedTuple):
    """Problem found by `SegmentRun.load`. None is fatal. Kinds are those of format#damage.

    ==================  ===============================================  ============================================
    kind                position, length                                 handling by load
    ==================  ===============================================  ============================================
    ``segment_size``    first missing or surplus byte, how many          last and short: extended with zeros by a
                                                                         writer. Otherwise the existing bytes are
                                                                         served, and a surplus is ignored
    ``empty_segment``   start, 0                                         last: removed by a writer. Else: not served
    ``missing_segment`` first missing byte, how many                     none
    ``segment_name``    the offset in the name, 0                        not served: off the grid, or beyond i64
    ==================  ===============================================  ============================================
    """

    file: str
    kind: Literal["segment_size", "empty_segment", "missing_segment", "segment_name"]
    position: int
    length: int
    detail: str

    def place(self, segment_bytes: int) -> int:
        """Return the position in its file where a ``segment_size`` begins, for a surplus the segment's end."""
        return self.position % segment_bytes or segment_bytes

    def is_surplus(self, segment_bytes: int) -> bool:
        """Return True if the file has bytes after the segment's end, which is at `position`."""
        return self.kind == "segment_size" and self.position % segment_bytes == 0


class Segment:
    """One file of a run, with the range `start` to `end` of the stream.

    `length` is the real length of the file, less than `size` only if it is damaged. `SegmentRun.mapping` creates
    `mapping`, which becomes None again when the run drops it: take a reference before use. `writable` means that it is
    mapped for writing, `in_memory` that it has no file (`extend_in_memory`). In a segment being written, the first
    `allocated` bytes have disk blocks.
    """

    def __init__(self, start: int, size: int, length: int, path: str) -> None:
        self.start = start
        self.size = size
        self.end = start + size
        self.length = length
        self.allocated = 0
        self.path = path
        self.mapping: mmap.mmap | None = None
        self.writable = False
        self.in_memory = False
        self.inode = -1  # of the file that a reader has mapped
        self.file: File | None = None

    def __repr__(self) -> str:
        return f"Segment({segment_name(self.start)}, {self.length} of {self.size} bytes)"
