"""Log and wheel of the timer (delivery#timer-files, format#sizes).

    timerlog/<20 digits>    segments with one unit for each waiting message, in order of the timer topic's queue

        offset size type  field
             0    4 i32   size             52
             4    8 i64   prevPos          the previous unit of the same slot, or -1
            12    4 i32   magic            1, plus 2 if it will be rolled, plus 4 if it is a cancellation
            16    8 i64   writeTime        ms: the second in which the message was stored. mqstore adds the milliseconds
                                           of its due time, since only the sum matters to other readers
            24    4 i32   delay            ms; writeTime + delay is the slot
            28    8 i64   offsetPy         physical offset of the record in the commitlog
            36    4 i32   sizePy           size of the record
            40    4 i32   hash             Java's hash of the real topic
            44    8 i64   reserved         RocketMQ writes 0. mqstore writes the CRC-32C of the 44 bytes before, started
                                           from the position, which shows if a unit is damaged or in a wrong place
            52

        A unit that would leave less than 16 bytes of its segment is put in the next one. Then the old segment ends with
        i32 bytes left, i64 0, i32 0xCBD43194.

    timerwheel              1 209 600 slots of 32 bytes, sparse. The slot of time t is number t / P mod 1 209 600

             0    8 i64   t / P            the slot is empty if this is another time
             8    8 i64   firstPos
            16    8 i64   lastPos          head of the chain of prevPos
            24    4 i32   num
            28    4 i32   magic            0

After a crash only the checkpoint is trusted, and the log up to the end in the checkpoint (delivery#timer-files). Later
units were never promised, and are written again. The wheel is rebuilt from the log at each opening (52 MB to read for a
million messages), so it is never synced.

Not thread-safe. The timer calls it under its lock.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from mqstore import arrays as np
from mqstore.broker.delay.route import PRECISION_MS
from mqstore.errors import FlushFailedError
from mqstore.files.filesystem import FileSystem, SyncNotBegunError
from mqstore.files.segments import SegmentRun
from mqstore.files.segmentwriter import SegmentWriter
from mqstore.files.tmp import temporary_path
from mqstore.native import crc32c

NOWHERE: Final = -1
WAITS, ROLLS, CANCELS = 1, 2, 4


class TimerFilesDamaged(Exception):  # noqa: N818  # not an error of the user: the files are rebuilt
    """Raised if the log or the wheel is damaged. Caught in `delay/`, where both are rebuilt from the topic."""


_UNIT: Final = struct.Struct(">iqiqiqii")
_SUM: Final = struct.Struct(">q")
UNIT_BYTES: Final = _UNIT.size + _SUM.size
_BLANK: Final = struct.Struct(">iqi")
_BLANK_MAGIC: Final = 0xCBD4_3194 - (1 << 32)
_UNITS_READ: Final = 8_192


class TimerUnit(NamedTuple):
    """Unit of a waiting message. Times are in ms, positions in bytes of their log."""

    previous: int
    magic: int
    write_ms: int
    delay_ms: int
    physical_offset: int
    record_size: int
    topic_hash: int

    @property
    def slot_ms(self) -> int:
        return self.write_ms + self.delay_ms

    @property
    def due_ms(self) -> int:
        """Due time. It is the end of the slot for a unit without milliseconds."""
        return self.slot_ms + 1 + (self.write_ms - 1) % PRECISION_MS


@cache
def unit_dtype() -> np.dtype[np.void]:
    """Return the dtype of the log's units."""
    return np.dtype(
        [
            ("size", ">i4"),
            ("previous", ">i8"),
            ("magic", ">i4"),
            ("write_ms", ">i8"),
            ("delay_ms", ">i4"),
            ("physical_offset", ">i8"),
            ("record_size", ">i4"),
            ("topic_hash", ">i4"),
            ("sum", ">i8"),
        ]
    )


def encode_unit(position: int, unit: TimerUnit) -> bytes:
    """Return the 52 bytes of `unit` at `position` of the timer log."""
    data = _UNIT.pack(UNIT_BYTES, *unit)
    return data + _SUM.pack(crc32c(data, position & 0xFFFF_FFFF))


def decode_unit(position: int, data: bytes) -> TimerUnit:
    """Return the unit that `encode_unit` encoded. Raises TimerFilesDamaged for other bytes."""
    if len(data) != UNIT_BYTES or _SUM.unpack_from(data, _UNIT.size)[0] != _sum(position, data):
        raise TimerFilesDamaged(f"timer log: no valid unit at {position}")
    return TimerUnit(*_UNIT.unpack_from(data)[1:])


def slots_of_units(units: np.NDArray[np.void]) -> np.NDArray[np.int64]:
    """Return the slot of each unit, in ms."""
    slots: np.NDArray[np.int64] = units["write_ms"].astype(np.int64) + units["delay_ms"]
    return slots


def _sum(position: int, data: bytes | memoryview) -> int:
    return crc32c(data[: _UNIT.size], position & 0xFFFF_FFFF)


class TimerLog:
    """Log of units. Appended units stay in memory until `write`, and can be read before.

    Positions only grow, even over a `restart`, so that a position never means two units.
    """

    def __init__(
        self, folder: Path, tmp: Path, segment_bytes: int, fs: FileSystem, file_mode: int, *, writable: bool = True
    ) -> None:
        """With `writable` false, `load` and `scan` change nothing."""
        # Sparse and by pwrite, because a preallocated segment of megabytes is too much for a few waiting messages.
        self._run = (
            SegmentWriter(folder, tmp, segment_bytes, fs=fs, max_mappings=8, file_mode=file_mode, sparse=True)
            if writable
            else SegmentRun(folder, segment_bytes, fs=fs, max_mappings=8)
        )
        self._per_segment = (segment_bytes - _BLANK.size) // UNIT_BYTES
        if self._per_segment < 1:
            raise ValueError(f"a timer log segment of {segment_bytes} bytes is too small for a unit")
        self.written = 0
        """End of the durable units."""
        self._buffer = bytearray()
        self._failed: OSError | None = None
        self.end = 0

    @property
    def _writer(self) -> SegmentWriter:
        assert isinstance(self._run, SegmentWriter), "opened for reading"
        return self._run

    def load(self, low: int, end: int) -> None:
        """Use [low, end) of the files as the log. Other bytes are ignored. `scan` finds a missing part."""
        run = self._run
        run.load()
        size = run.segment_bytes
        self.end = self.written = end
        if not 0 <= low <= end:
            raise TimerFilesDamaged(f"timer log: invalid bounds, {low} to {end}")
        if isinstance(run, SegmentWriter):
            run.drop_from(-(-end // size) * size)
            run.drop_before(low)

    def placed_by_java(self, end: int) -> tuple[np.NDArray[np.int64], np.NDArray[np.int64]]:
        """Return (physical offsets, slots) of the units in a Java broker's log up to `end`, sorted by offset.
        A record that was placed again has its last slot. Empty if a part of the log is missing."""
        try:
            self._run.load()
            self.load(self._run.min_offset, end)
            found = [units[units["size"] == UNIT_BYTES] for _, units in self.scan(self._run.min_offset, verified=False)]
        except TimerFilesDamaged:
            found = []
        none = np.empty(0, unit_dtype())
        units = np.concatenate([none, *found])[::-1]
        offsets, at = np.unique(units["physical_offset"].astype(np.int64), return_index=True)
        return offsets, slots_of_units(units[at])

    def restart(self, *, keep: bool = False) -> None:
        """Empty the log. Positions continue after all units that it ever had.
        With `keep` the files stay until they are dropped."""
        self._run.load()
        size = self._run.segment_bytes
        self.end = self.written = -(-max(self.end, self._run.end) // size) * size
        self._buffer.clear()
        if not keep:
            self._writer.drop_from(0)

    @property
    def pending_bytes(self) -> int:
        return len(self._buffer)

    def append(self, unit: TimerUnit) -> int:
        size = self._run.segment_bytes
        left = size - self.end % size
        if left < UNIT_BYTES + _BLANK.size:
            self._buffer += _BLANK.pack(left, 0, _BLANK_MAGIC).ljust(left, b"\0")
            self.end += left
        position = self.end
        self._buffer += encode_unit(position, unit)
        self.end += UNIT_BYTES
        return position

    def unit(self, position: int) -> TimerUnit:
        """Return the unit at `position`. Raises TimerFilesDamaged if it is missing or damaged."""
        if position >= self.written:
            at = position - self.written
            data = bytes(self._buffer[at : at + UNIT_BYTES])
        else:
            segment = self._run.find(position) if position >= 0 else None
            if segment is None:
                raise TimerFilesDamaged(f"timer log: nothing at {position}")
            at = position - segment.start
            data = self._run.mapping(segment)[at : at + UNIT_BYTES]
        return decode_unit(position, data)

    def find(self, physical_offset: int, low: int, from_end: int) -> tuple[int, TimerUnit] | None:
        """Return position and unit of the record at `physical_offset` among the units from `low` on, or None.
        The units must be in the order of their records. `from_end` is a guess, the number of units from the end. If it
        is right, this costs one read, or else a binary search."""
        first, end = self._ordinal(low), self._ordinal(self.end)
        at = end - from_end
        if not first <= at < end or self._offset_of(at) != physical_offset:
            at = bisect_left(range(end), physical_offset, first, key=self._offset_of)
        if at >= end or (unit := self.unit(self._nth(at))).physical_offset != physical_offset:
            return None
        return self._nth(at), unit

    def _offset_of(self, ordinal: int) -> int:
        return self.unit(self._nth(ordinal)).physical_offset

    def units(self, low: int, physical_offset: int) -> Iterator[tuple[np.NDArray[np.int64], np.NDArray[np.void]]]:
        """Yield (positions, units) from `low` on of records from `physical_offset` on, some thousands at a time.
        Units in memory are included. The units must be in the order of their records."""
        at, end = self._ordinal(low), self._ordinal(self.end)
        for first in range(bisect_left(range(end), physical_offset, at, key=self._offset_of), end, _UNITS_READ):
            positions = [self._nth(ordinal) for ordinal in range(first, min(end, first + _UNITS_READ))]
            count = bisect_left(positions, self.written)
            if count:
                yield from self.scan(positions[0], positions[count - 1] + UNIT_BYTES, verified=False)
            if rest := positions[count:]:
                starts = [position - self.written for position in rest]
                data = b"".join(self._buffer[start : start + UNIT_BYTES] for start in starts)
                yield np.array(rest, np.int64), np.frombuffer(data, unit_dtype())

    def _ordinal(self, position: int) -> int:
        """Return the number of units that would be before `position` without any `restart`."""
        segment, at = divmod(position, self._run.segment_bytes)
        return segment * self._per_segment + min(at // UNIT_BYTES, self._per_segment)

    def _nth(self, ordinal: int) -> int:
        segment, at = divmod(ordinal, self._per_segment)
        return segment * self._run.segment_bytes + at * UNIT_BYTES

    def scan(
        self, low: int, stop: int | None = None, *, verified: bool
    ) -> Iterator[tuple[np.NDArray[np.int64], np.NDArray[np.void]]]:
        """Yield (positions, units) of the units from `low` on, segment by segment.
        Ends at `stop`, or at the end of the log if it is None. All units must be written. With `verified` each is
        checked, and TimerFilesDamaged is raised for the first bad one."""
        end = self.end if stop is None else stop
        assert end <= self.written, "write first"
        size = self._run.segment_bytes
        for start in range(low - low % size, end, size):
            segment = self._run.find(start)
            if segment is None or segment.length < size:
                raise TimerFilesDamaged(f"timer log: the segment at {start} is missing, or shorter than {size}")
            first = max(0, low - start) // UNIT_BYTES
            last = min(self._per_segment, (end - start) // UNIT_BYTES)
            if first >= last:
                continue
            data = memoryview(self._run.mapping(segment))[first * UNIT_BYTES : last * UNIT_BYTES]
            positions = np.arange(first, last, dtype=np.int64) * UNIT_BYTES + start
            units: np.NDArray[np.void] = np.frombuffer(data, unit_dtype())
            if verified:
                sums = units["sum"].tolist()
                for at, position, expected in zip(
                    range(0, len(data), UNIT_BYTES), positions.tolist(), sums, strict=True
                ):
                    if _sum(position, data[at : at + UNIT_BYTES]) != expected:
                        raise TimerFilesDamaged(f"timer log: the unit at {position} is damaged")
            yield positions, units

    def write(self) -> None:
        """Make all units durable. May be tried again, except after a failed sync.
        A failed sync is final (format#flush), and the next opening continues from the last checkpoint."""
        if self._failed is not None:
            raise FlushFailedError(f"{self._run.directory}: {self._failed}; close the store and open it again")
        if not self._buffer:
            return
        run, size = self._writer, self._run.segment_bytes
        data, at = bytes(self._buffer), self.written
        while at < self.end:
            if run.find(at) is None:
                run.create(at - at % size)
            stop = min(self.end, at - at % size + size)
            run.write(at, data[at - self.written : stop - self.written])
            at = stop
        try:
            run.sync(self.written, self.end)
        except SyncNotBegunError:
            raise
        except OSError as error:
            self._failed = error
            raise
        self.written = self.end
        self._buffer.clear()

    def drop_before(self, low: int) -> None:
        self._writer.drop_before(low)

    def close(self) -> None:
        self._run.close()


WHEEL_SLOTS: Final = 2 * 7 * 86_400
_SLOT: Final = struct.Struct(">qqqii")
_SLOT_FIELDS: Final = [("tick", ">i8"), ("first", ">i8"), ("last", ">i8"), ("num", ">i4"), ("magic", ">i4")]
SLOT_BYTES: Final = _SLOT.size
WHEEL_BYTES: Final = WHEEL_SLOTS * SLOT_BYTES
_BLOCK_SLOTS: Final = 2048


class Slot(NamedTuple):
    """Chain of a slot: positions of its oldest and its newest unit, and the number of units.
    `first` is the oldest unit that was ever in the chain. A relocated unit leaves the chain: `num` no longer counts it,
    and it is not read any more."""

    first: int
    last: int
    num: int


class TimerWheel:
    """Slots by time. Times are in ms and multiples of `PRECISION_MS`.

    Times in use must be less than the wheel's length apart (14 days of seconds), because two times with the same place
    would replace each other. `timer.py` keeps them within half of that.
    """

    def __init__(self, path: Path, tmp: Path, fs: FileSystem, file_mode: int) -> None:
        self._path = path
        self._tmp = tmp
        self._fs = fs
        self._file_mode = file_mode
        self._fd = -1
        self._dirty: dict[int, Slot] = {}
        """Slots that `put` has changed and `write` has not yet written, by tick (time / precision)."""

    def make(self, slots_ms: np.NDArray[np.int64], positions: np.NDArray[np.int64]) -> None:
        """Replace the wheel by one of units at ascending `positions`, each in its slot of `slots_ms`.
        If this fails the old one is kept."""
        ticks, first_at, nums = np.unique(slots_ms // PRECISION_MS, return_index=True, return_counts=True)
        backwards = (slots_ms // PRECISION_MS)[::-1]
        last_at = len(backwards) - 1 - np.unique(backwards, return_index=True)[1]
        slots = np.zeros(len(ticks), _SLOT_FIELDS)
        slots["tick"], slots["first"], slots["last"] = ticks, positions[first_at], positions[last_at]
        slots["num"] = nums
        fs, new = self._fs, temporary_path(self._tmp, "timerwheel")
        fs.mkdir(self._tmp, exist_ok=True)
        fd = fs.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._file_mode)
        try:
            fs.truncate_sparse(fd, WHEEL_BYTES)
            self._write_blocks(fd, slots)
            fs.replace(new, self._path)
        except BaseException:
            fs.close(fd)
            fs.unlink(new, missing_ok=True)
            raise
        self.close()
        self._fd = fd

    def _write_blocks(self, fd: int, slots: np.NDArray[np.void]) -> None:
        """Write scattered slots to an empty file in blocks, since half a million calls of 32 bytes take seconds."""
        places = slots["tick"].astype(np.int64) % WHEEL_SLOTS
        order = np.argsort(places, kind="stable")
        slots, places = slots[order], places[order]
        blocks = places // _BLOCK_SLOTS
        starts = np.flatnonzero(np.diff(blocks, prepend=-1)).tolist()
        for begin, stop in pairwise([*starts, len(blocks)]):
            at = int(blocks[begin]) * _BLOCK_SLOTS
            block = np.zeros(min(_BLOCK_SLOTS, WHEEL_SLOTS - at), _SLOT_FIELDS)
            block[places[begin:stop] - at] = slots[begin:stop]
            self._fs.pwrite(fd, block.tobytes(), at * SLOT_BYTES)

    def get(self, slot_ms: int) -> Slot | None:
        """Return the slot of a time, or None if it is empty."""
        tick = slot_ms // PRECISION_MS
        if tick in self._dirty:
            return self._dirty[tick] if self._dirty[tick].num else None
        found, *chain, magic = _SLOT.unpack(self._fs.pread(self._fd, SLOT_BYTES, tick % WHEEL_SLOTS * SLOT_BYTES))
        return Slot(*chain) if found == tick and chain[2] > 0 and magic == 0 else None

    def put(self, slot_ms: int, slot: Slot) -> None:
        """Set a slot, in memory until `write`."""
        self._dirty[slot_ms // PRECISION_MS] = slot

    def write(self) -> None:
        """Write the slots that `put` changed, with one call for each run of neighbours. May be tried again."""
        if not self._dirty:
            return
        ticks = sorted(self._dirty)
        run: list[int] = []
        for tick in [*ticks, None]:
            if run and (tick is None or tick != run[-1] + 1 or tick % WHEEL_SLOTS == 0):
                data = b"".join(_SLOT.pack(each, *self._dirty[each], 0) for each in run)
                self._fs.pwrite(self._fd, data, run[0] % WHEEL_SLOTS * SLOT_BYTES)
                run = []
            if tick is not None:
                run.append(tick)
        self._dirty.clear()

    def first(self, start_ms: int, stop_ms: int) -> int | None:
        """Return the time of the first slot with a unit in [start_ms, stop_ms). One read covers half an hour."""
        self.write()
        tick, stop = start_ms // PRECISION_MS, stop_ms // PRECISION_MS
        while tick < stop:
            place = tick % WHEEL_SLOTS
            count = min(stop - tick, WHEEL_SLOTS - place, _BLOCK_SLOTS)
            slots: np.NDArray[np.void] = np.frombuffer(
                self._fs.pread(self._fd, count * SLOT_BYTES, place * SLOT_BYTES), _SLOT_FIELDS
            )
            if len(slots) < count:
                raise TimerFilesDamaged("timer wheel: the file is too short")
            hits = np.flatnonzero((slots["tick"] == np.arange(tick, tick + count)) & (slots["num"] > 0))
            if len(hits):
                return (tick + int(hits[0])) * PRECISION_MS
            tick += count
        return None

    def close(self) -> None:
        """Close the descriptor. Slots that were not written are lost."""
        self._dirty.clear()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._fs.close(fd)
