"""Checkpoint of the timer: its progress on disk (delivery#timer-files).

config/timercheck       4096 bytes

         0   56 7 i64  lastReadTimeMs, lastTimerLogFlushPos, lastTimerQueueOffset, masterTimerQueueOffset,
                       stateVersion, timestamp, counter                      as RocketMQ has them
      1024   84        `_EXTENSION`: `Progress` and its CRC-32C              odd counters
      2048   84        the same                                              even counters
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

from mqstore import arrays as np
from mqstore.broker.delay.timerfiles import NOWHERE
from mqstore.errors import FlushFailedError
from mqstore.files.filesystem import FileSystem
from mqstore.native import crc32c

_JAVA: Final = struct.Struct(">7q")
_EXTENSION: Final = struct.Struct(">iiq8q")
_EXTENSION_MAGIC: Final = 0x4D51_5354
_EXTENSION_VERSION: Final = 2
"""Version of the record. Version 1 counted the units of a slot in another order.
After version 1 the timer continues from the first bytes, as after a Java broker, and repeats one slot."""
_CRC: Final = struct.Struct(">I")
_EXTENSION_AT: Final = (2048, 1024)
"""Position by counter modulo 2. Each is in a separate sector, so that a torn write damages only one."""
_CHECK_BYTES: Final = 4096


class Progress(NamedTuple):
    """Progress of the timer.
    The commitlog, and the timer log up to `log_end`, are synced before it is saved."""

    read_ms: int
    """Every slot before this one is done."""
    log_end: int
    queue_offset: int
    """Next message of the timer topic to place. Earlier ones have a unit below `log_end`, or are done."""
    log_low: int = 0
    """Every unit before this position is done, or its message was put again later in the log."""
    slot_done: int = 0
    """Number of units of slot `read_ms` that are done, in the order of their due times."""
    skip_ms: int = 0
    skip_until: int = 0
    """Messages before `skip_until` whose slot is before `skip_ms` are done, even if `read_ms` is lower.
    It is lower while the files are rebuilt, or after the clock was set back."""
    late_offset: int = NOWHERE
    """First message that was placed in a later slot than its own and may not be done."""


class JavaProgress(NamedTuple):
    """Progress of a Java broker's timer."""

    read_ms: int
    log_end: int
    queue_offset: int


class JavaPlaces:
    """Slots in which a Java broker placed the records at `offsets`, and the first slot that it had not read."""

    def __init__(self, read_ms: int, offsets: np.NDArray[np.int64], slots_ms: np.NDArray[np.int64]) -> None:
        self._read_ms, self._offsets, self._slots_ms = read_ms, offsets, slots_ms

    def was_done(self, physical_offset: int) -> bool | None:
        """Return True if the broker had delivered or rolled that record, or None if it had not placed it."""
        at = int(np.searchsorted(self._offsets, physical_offset))
        if at == len(self._offsets) or self._offsets[at] != physical_offset:
            return None
        return bool(self._slots_ms[at] < self._read_ms)


class TimerCheck:
    def __init__(self, path: Path, fs: FileSystem, file_mode: int) -> None:
        self._path = path
        self._fs = fs
        self._file_mode = file_mode
        self._page = bytearray(_CHECK_BYTES)
        self._counter = 0
        self._known = False
        self._failed: OSError | None = None

    def load(self) -> Progress | JavaProgress | None:
        """Return the newer valid record, or else the Java broker's progress, or None if there is neither."""
        try:
            with self._fs.opened(self._path, os.O_RDONLY) as fd:
                data = self._fs.pread(fd, _CHECK_BYTES, 0)
        except FileNotFoundError:
            return None
        self._page[: len(data)] = data
        self._known = len(data) == _CHECK_BYTES
        found = [each for at in _EXTENSION_AT if (each := decode_extension(self._page, at)) is not None]
        *java, _, _, _, java_counter = _JAVA.unpack_from(self._page)
        if found:
            self._counter, progress = max(found, key=lambda each: each[0])
            # A Java broker writes only the first bytes. If they match neither record, it has used the store since then,
            # and the records are outdated. In a torn page they may match either record.
            if any((*java, java_counter) == (*each[:3], counter) for counter, each in found):
                return progress
        left = JavaProgress(*java)
        return left if left.read_ms > 0 and left.queue_offset >= 0 else None

    def save(self, progress: Progress, now_ms: int) -> None:
        """Write and sync the checkpoint. A failed sync is final, as in `TimerLog.write`."""
        if self._failed is not None:
            raise FlushFailedError(f"{self._path}: {self._failed}; close the store and open it again")
        counter = self._counter + 1
        page = bytearray(self._page)
        p = progress
        _JAVA.pack_into(page, 0, p.read_ms, p.log_end, p.queue_offset, p.queue_offset, 0, now_ms, counter)
        at = _EXTENSION_AT[counter % 2]
        _EXTENSION.pack_into(page, at, _EXTENSION_MAGIC, _EXTENSION_VERSION, counter, *progress)
        end = at + _EXTENSION.size
        _CRC.pack_into(page, end, crc32c(bytes(page[at:end])))
        fs = self._fs
        if not self._known:
            fs.mkdir(self._path.parent, exist_ok=True)
            fs.sync_directory(self._path.parent.parent)
        with fs.opened(self._path, os.O_RDWR | os.O_CREAT, self._file_mode) as fd:
            # The first bytes are written last, since they show which program wrote the others.
            fs.pwrite(fd, page[_JAVA.size :], _JAVA.size)
            fs.pwrite(fd, page[: _JAVA.size], 0)
            try:
                fs.fdatasync(fd)
            except OSError as error:
                self._failed = error
                raise
        if not self._known:
            fs.sync_directory(self._path.parent)
            self._known = True
        self._page = page
        self._counter = counter


def decode_extension(page: bytearray, at: int) -> tuple[int, Progress] | None:
    end = at + _EXTENSION.size
    magic, version, counter, *fields = _EXTENSION.unpack_from(page, at)
    whole = _CRC.unpack_from(page, end)[0] == crc32c(bytes(page[at:end]))
    if magic != _EXTENSION_MAGIC or version != _EXTENSION_VERSION or not whole:
        return None
    return counter, Progress(*fields)
