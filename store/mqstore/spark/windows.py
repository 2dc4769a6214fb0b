"""Bounded views of commitlog segments: a reader maps what it looks at, not whole files.

A Java broker's segments have a gigabyte. Spark may limit a worker's address space, mapped pages count as its memory,
and a mapping keeps the disk space of a file that retention has deleted. So at most a few windows of 64 MiB are mapped
at a time, none of them beyond what the file holds (a touch there would kill the process), and where the address space
is used up, the bytes are read instead. So are records that lie far apart: to map the pages of each costs several times
what it costs to read it.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from mqstore.files.filesystem import FileSystem
from mqstore.files.segments import SegmentRun
from mqstore.native import kernel

__all__ = ["WINDOW_BYTES", "Window", "Windows", "lie_far_apart"]

WINDOW_BYTES = 64 << 20
_READ_BYTES = 8 << 20
_FEW = 64
_SMALL_BYTES = 1 << 20
"""What a damaged unit claims is not read, nor are large records copied."""
_FAR_BYTES = 16 << 10
"""How far apart records are read one by one: the system maps some 64 KiB at a touch."""


def lie_far_apart(physical: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> bool:
    """Whether records at these offsets are read quicker one by one (`Windows.read`), by compiled parts, than through
    windows: they are small, and most lie far from the one before."""
    if kernel is None or len(physical) < _FEW or int(sizes.max()) > _SMALL_BYTES:
        return False
    far = np.count_nonzero(np.abs(np.diff(physical)) - sizes[:-1] >= _FAR_BYTES)
    return bool(2 * far >= len(physical))


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes of the log: `buffer[i]` lies at physical offset `base + i`. `at_end`: they go to the end of the file."""

    base: int
    buffer: mmap.mmap | bytes
    at_end: bool

    @property
    def end(self) -> int:
        """Physical offset behind the last byte."""
        return self.base + len(self.buffer)


class Windows:
    """The windows that one reader has open. Drop all references to let go of them."""

    def __init__(self, run: SegmentRun, fs: FileSystem, *, window_bytes: int = WINDOW_BYTES, keep: int = 3) -> None:
        self._run = run
        self._fs = fs
        self.window_bytes = max(mmap.ALLOCATIONGRANULARITY, window_bytes)
        self._keep = keep
        self._open: OrderedDict[int, Window] = OrderedDict()

    def cells(self, physical: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where the windows begin that records at these offsets are looked at in; those of one cell share a window."""
        starts = physical - physical % self._run.segment_bytes
        found: npt.NDArray[np.int64] = starts + (physical - starts) // self.window_bytes * self.window_bytes
        return found

    def of(self, cell: int, end: int) -> Window | None:
        """The window of a cell, at least up to `end` if the segment's file goes that far. None: there is no file, or it
        ends before the cell."""
        window = self._open.get(cell)
        if window is not None and (window.end >= end or window.at_end):
            self._open.move_to_end(cell)
            return window
        self._open.pop(cell, None)
        window = self._map(cell, max(end, cell + self.window_bytes), end)
        if window is not None:
            while len(self._open) >= self._keep:
                self._open.popitem(last=False)
            self._open[cell] = window
        return window

    def from_(self, position: int, end: int) -> Window | None:
        """A window that begins at the page of `position` and goes on for `window_bytes`, or up to `end` if that is
        further; for who walks forward and does not come back."""
        return self._map(position, max(end, position + self.window_bytes), max(end, position + _READ_BYTES))

    def read(self, physical: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> bytes | None:
        """The records at these offsets side by side. None: some does not lie within its file."""
        assert kernel is not None, "as `lie_far_apart` has it"
        starts = physical - physical % self._run.segment_bytes
        parts: list[bytes] = []
        bounds = [0, *(np.flatnonzero(np.diff(starts)) + 1).tolist(), len(starts)]
        for low, high in pairwise(bounds):  # one file open at a time
            positions, lengths = physical[low:high] - starts[low], np.ascontiguousarray(sizes[low:high])
            with self._file(int(starts[low])) as file:
                if file is None or int((positions + lengths).max()) > file[2] or int(lengths.min()) < 0:
                    return None
                data = kernel.read_at(np.full(high - low, file[0]), positions, lengths)
            if data is None:
                return None
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        self._open.clear()

    def _map(self, start: int, end: int, needed: int) -> Window | None:
        with self._file(start) as file:
            if file is None:
                return None
            fd, begin, length = file
            first = (start - begin) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            size = min(end - begin, length) - first
            if size <= 0:
                return None
            try:
                buffer: mmap.mmap | bytes = mmap.mmap(fd, size, access=mmap.ACCESS_READ, offset=first)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                size = min(needed - begin, length) - first
                if size <= 0:
                    return None
                buffer = self._fs.pread(fd, size, first)
            return Window(begin + first, buffer, first + size >= length)

    @contextmanager
    def _file(self, position: int) -> Iterator[tuple[int, int, int] | None]:
        """The file that has this offset: (descriptor, where it begins, how many bytes of it count). None: there is
        none."""
        segment = self._run.find(position)
        try:
            fd = None if segment is None else self._fs.open(segment.path, os.O_RDONLY)
        except FileNotFoundError:  # retention took it
            fd = None
        if segment is None or fd is None:
            yield None
            return
        try:
            length = min(self._fs.size(fd), segment.size)
            if self._run.limit is not None:  # behind it lies a splice that is not in yet
                length = min(length, self._run.limit - segment.start)
            yield fd, segment.start, length
        finally:
            self._fs.close(fd)
