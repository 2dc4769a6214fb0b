"""Records into slots of fresh queue files: what every way of `rebuild` ends in (store-format 4, 9.8; spark.md B8).

    UnitFiles   the files: many processes may write to them at different places
    stretches   what a segment holds of some queues, in the portions that recovery would read
    Placer      stretches to slots, from the front of a queue, by the rules of recovery: `Lives`, `sort_out`
    Slots       where a queue stands then

Whether a queue offset is nonsense shows by those beside it, so other portions could give another result. Knows no
Spark, and not which way stretches come to the placer.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mqstore.files.filesystem import REAL, FileSystem
from mqstore.layout.consumequeue import UNIT_BYTES, UNIT_DTYPE, VOID_UNIT
from mqstore.log.lives import Lives
from mqstore.log.scanner import Good, first_slot_in_range, least_plausible, scan_segment, sort_out
from mqstore.log.store import MessageStore
from mqstore.spark.jobs.ranges import QueueKey

__all__ = ["Placer", "Slots", "UnitFiles", "first_slots", "stretches"]

_MAX_OPEN = 64
_CHUNK_UNITS = 1 << 16


@dataclass(slots=True)
class Slots:
    """Where a queue stands: the next slot, where its last record ends, and how it began."""

    next: int | None
    seen: int
    begin: int | None
    """The first slot that is not one of a record below the log, by the old files; None when these do not say."""
    first: int | None = None
    """Of the first record."""
    void: int = 0
    odd: int = 0
    """Records that can have no slot."""


def first_slots(store: MessageStore, log_start: int, key: QueueKey, least: int | None) -> Slots:
    """Where a queue begins whose records have no smaller number than `least`; None: it has none."""
    begin, seen = first_slot_in_range(store._queues.create(*key), log_start, least)
    return Slots(begin, seen, begin)


class UnitFiles:
    """Fresh queue files, sparse and at full length; many processes may write to them at different places."""

    def __init__(self, folder: Path, segment_bytes: int, fs: FileSystem = REAL) -> None:
        self.per = segment_bytes // UNIT_BYTES
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._fs = fs
        self._open: OrderedDict[tuple[str, int, int], int] = OrderedDict()

    def __enter__(self) -> UnitFiles:
        return self

    def __exit__(self, *exc: object) -> None:
        while self._open:
            self._fs.close(self._open.popitem()[1])

    def directory(self, topic: str, queue_id: int) -> Path:
        return self._folder / topic / str(queue_id)

    def name(self, topic: str, queue_id: int, segment: int) -> str:
        """The path of a file below its store."""
        return f"consumequeue/{topic}/{queue_id}/{segment * self._segment_bytes:020d}"

    def path(self, topic: str, queue_id: int, segment: int) -> Path:
        return self.directory(topic, queue_id) / f"{segment * self._segment_bytes:020d}"

    def segments(self, topic: str, queue_id: int) -> list[int]:
        """Numbers of the files that there are."""
        directory = self.directory(topic, queue_id)
        names = os.listdir(directory) if directory.is_dir() else []
        return sorted(int(name) // self._segment_bytes for name in names)

    def write(self, topic: str, queue_id: int, first: int, units: bytes) -> None:
        """Put units into slots [first, ...)."""
        done = 0
        while done < len(units):
            segment, index = divmod(first + done // UNIT_BYTES, self.per)
            data = units[done : done + (self.per - index) * UNIT_BYTES]
            self._fs.pwrite(self._file(topic, queue_id, segment), data, index * UNIT_BYTES)
            done += len(data)

    def void(self, topic: str, queue_id: int, first: int, stop: int) -> None:
        """Make slots [first, stop) void."""
        for at in range(first, stop, _CHUNK_UNITS):
            self.write(topic, queue_id, at, VOID_UNIT * min(_CHUNK_UNITS, stop - at))

    def read(self, topic: str, queue_id: int, segment: int) -> npt.NDArray[np.void]:
        """All units of a file."""
        data = self._fs.pread(self._file(topic, queue_id, segment), self._segment_bytes, 0)
        return np.frombuffer(data, UNIT_DTYPE)

    def write_back(self, topic: str, queue_id: int, segment: int) -> None:
        """Have the system begin to write a file that is synced later."""
        self._fs.write_back(self._file(topic, queue_id, segment))

    def sync(self, topic: str, queue_id: int, segment: int) -> None:
        self._fs.fdatasync(self._file(topic, queue_id, segment))

    def _file(self, topic: str, queue_id: int, segment: int) -> int:
        key = (topic, queue_id, segment)
        fd = self._open.get(key)
        if fd is not None:
            self._open.move_to_end(key)
            return fd
        path = self.path(topic, queue_id, segment)
        for folder in (path.parent.parent, path.parent):
            self._fs.mkdir(folder, exist_ok=True)
        fd = self._fs.open(path, os.O_RDWR | os.O_CREAT)
        self._open[key] = fd
        self._fs.truncate_sparse(fd, self._segment_bytes)
        if len(self._open) > _MAX_OPEN:
            self._fs.close(self._open.popitem(last=False)[1])
        return fd


def stretches(
    store: MessageStore, base: int, start: int, end: int, wanted: Collection[QueueKey]
) -> Iterator[tuple[QueueKey, npt.NDArray[np.int64], npt.NDArray[np.void]]]:
    """(queue, queue offsets, units) of the records of these queues in the segment at physical offset `base`, which a
    scan of the log enters `start` bytes from there, before the log's `end`. Nothing when retention has taken it."""
    segment = store._run.find(base)
    if segment is None:
        return
    for event in scan_segment(store._run, segment, start, store.manifest.checksum, stop=end - base):
        if not isinstance(event, Good):
            continue
        rows = store.rows_of(event.buffer, event.headers, event.base)
        for topic, queue_id, _, offsets, units, _ in rows.listed():
            if (topic, queue_id) in wanted:
                yield (topic, queue_id), offsets, units


class Placer:
    """Puts the records of queues into their slots, each queue from its front, as recovery does it."""

    def __init__(self, store: MessageStore, log_start: int, files: UnitFiles) -> None:
        self.placed: dict[QueueKey, Slots] = {}
        self._store = store
        self._lives = Lives(store._run, store.manifest.checksum)
        self._log_start = log_start
        self._files = files

    def take(self, key: QueueKey, offsets: npt.NDArray[np.int64], units: npt.NDArray[np.void]) -> None:
        """The next stretch of a queue, as `stretches` gives it: one at least."""
        physical = units["physical_offset"].astype(np.int64)
        queue = self._store._queues.create(*key)
        kept = self._lives.of_this(queue, offsets, physical)
        if kept is not None:
            if not kept.any():
                return
            offsets, units, physical = offsets[kept], units[kept], physical[kept]
        slots = self.placed.get(key)
        if slots is None:
            slots = first_slots(self._store, self._log_start, key, least_plausible(offsets, physical))
            self.placed[key] = slots
        asked = queue if self._store.manifest.checksum == "crc32-body" else None
        offsets, runs, odd = sort_out(slots.next, slots.seen, offsets, physical, units["size"], asked)
        slots.odd += len(odd)
        for low, high in runs:
            first = int(offsets[low])
            if slots.first is None:
                slots.first = first
            elif slots.next is not None and first > slots.next:
                self._files.void(*key, slots.next, first)
                slots.void += first - slots.next
            self._files.write(*key, first, units[low:high].tobytes())
            slots.next = first + high - low
            slots.seen = int(physical[high - 1]) + int(units["size"][high - 1])
