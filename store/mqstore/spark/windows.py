"""Bounded views of commitlog segments: a reader maps what it looks at, not whole files.

A Java broker's segments have a gigabyte. Spark may limit a worker's address space, mapped pages count as its memory,
and a mapping keeps the disk space of a file that retention has deleted. So at most a few windows of 64 MiB are mapped
at a time, none of them beyond what the file holds (a touch there would kill the process), and where the address space
is used up, the bytes are read instead.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mqstore.files.filesystem import FileSystem
from mqstore.files.segments import SegmentRun

__all__ = ["WINDOW_BYTES", "Window", "Windows"]

WINDOW_BYTES = 64 << 20
_READ_BYTES = 8 << 20


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

    def close(self) -> None:
        self._open.clear()

    def _map(self, start: int, end: int, needed: int) -> Window | None:
        segment = self._run.find(start)
        if segment is None:
            return None
        try:
            fd = self._fs.open(segment.path, os.O_RDONLY)
        except FileNotFoundError:  # retention took it
            return None
        try:
            length = min(self._fs.size(fd), segment.size)
            if self._run.limit is not None:  # behind it lies a splice that is not in yet
                length = min(length, self._run.limit - segment.start)
            first = (start - segment.start) // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            size = min(end - segment.start, length) - first
            if size <= 0:
                return None
            try:
                buffer: mmap.mmap | bytes = mmap.mmap(fd, size, access=mmap.ACCESS_READ, offset=first)
            except OSError as error:
                if error.errno != errno.ENOMEM:
                    raise
                size = min(needed - segment.start, length) - first
                if size <= 0:
                    return None
                buffer = self._fs.pread(fd, size, first)
            return Window(segment.start + first, buffer, first + size >= length)
        finally:
            self._fs.close(fd)
