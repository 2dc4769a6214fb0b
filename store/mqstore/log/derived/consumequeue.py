"""Consume queues: for each (topic, queue id) a run of 20-byte units with the positions of its messages.

    consumequeue/<topic>/<queue id>/<20 digits>      unit k of the queue at byte k * 20 of the run (format#unit)

A queue is a function of the commitlog: lost units are rebuilt from it. Its files are sparse, and written with `pwrite`
through a bounded set of descriptors (format#unit-append). A new file gets its full length and then its name, without a
sync in between. So after a power cut it may be short. The next opening for writing extends it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from mqstore import arrays as np
from mqstore.files.segment import segment_start
from mqstore.files.tmp import new_file
from mqstore.layout.arrays.dispatch import Rows, as_kept, rows_of
from mqstore.layout.arrays.scan import Headers
from mqstore.layout.consumequeue import UNIT, UNIT_BYTES, VOID, VOID_UNIT, is_void, unit_dtype, used_units
from mqstore.layout.record import MAGIC_V1
from mqstore.log.directory.names import is_path_safe, is_queue_id
from mqstore.log.recovery.report import Finding, Kind
from mqstore.log.writing.log_tail import QueueRef, QueueTail
from mqstore.native import crc32c
from mqstore.signalsafe import Lock

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from mqstore.log.directory.store_files import StoreParts


_CHUNK_UNITS = 1 << 16
_BLOCK_UNITS = 4096 // UNIT_BYTES


class ConsumeQueue(QueueTail):
    """Consume queue. Offsets count units, and `min_offset <= max_offset <= next_offset`.

    `max_offset` is the end of the dispatched messages, `next_offset` the offset of the next message. Only the holder of
    the dispatch lock writes units. Only the holder of the append lock moves `next_offset`.
    """

    __slots__ = (
        "_kept",
        "_last_path",
        "_starts",
        "_table",
        "cut_to",
        "cuts",
        "directory",
        "max_offset",
        "min_offset",
        "topic",
        "topic_bytes",
        "units_per_file",
    )

    def __init__(self, table: QueueTable, topic: str, queue_id: int) -> None:
        self._table = table
        self.topic = topic
        self.topic_bytes = topic.encode("utf-8", "surrogateescape")
        """Topic as encoded in records."""
        self.queue_id = queue_id
        self.directory = f"{table.root}/{topic}/{queue_id}"
        self.min_offset = 0
        self.max_offset = 0
        self.next_offset = 0
        self.cuts = 0
        """Number of times that a reader saw the end move back. `cut_to` is the end after the last time."""
        self.cut_to = 0
        self.ref = QueueRef(topic, queue_id)
        self.units_per_file = table.units_per_segment
        self.magic = MAGIC_V1
        self.plain_tail = b""
        self._starts: list[int] = []
        """Numbers of the existing segments. Segment n begins with unit n * units_per_segment."""
        self._last_path = (-1, "")
        self._kept = (0, b"")
        """First slot of the last file, and its units as `load` found them, if they are kept."""

    def extent(self) -> str:
        """Return the queue's name, files and end as text, or "" if it has no files or no units."""
        starts, end = self._starts, self.max_offset
        return f"{self.topic}/{self.queue_id}/{starts[0]}/{len(starts)}/{end}" if starts and end else ""

    def as_kept(self, found: np.NDArray[np.void], wanted: np.NDArray[np.void]) -> np.NDArray[np.void]:
        """Return `wanted`, the units derived from records, with data that only the `found` units have."""
        return as_kept(self.topic, found, wanted, has_addresses=self._table.has_addresses)

    def __repr__(self) -> str:
        return f"ConsumeQueue({self.topic!r}, {self.queue_id}, {self.min_offset}..{self.max_offset})"

    # -- files ------------------------------------------------------------------------------------------------------

    def _path(self, segment: int) -> str:
        last = self._last_path  # one pair, replaced as a whole: readers and the dispatcher use it concurrently
        if segment != last[0]:
            path = f"{self.directory}/{segment * self._table.segment_bytes:020d}"
            self._last_path = last = (segment, path)
        return last[1]

    def missing_units(self, first: int, last: int) -> Finding:
        """Return the finding for offsets `first` to `last`, which are in one file and have no unit."""
        which = f"offset {first}" if first == last else f"offsets {first}..{last}"
        detail = f"{self.topic}, queue {self.queue_id}, {which}: no unit, though later units exist"
        return self.finding("missing_units", first, last, detail)

    def finding(self, kind: Kind, first: int, last: int, detail: str) -> Finding:
        """Return a finding for the units of offsets `first` to `last`, which are in one file."""
        segment, index = divmod(first, self._table.units_per_segment)
        file = f"consumequeue/{self.topic}/{self.queue_id}/{segment * self._table.segment_bytes:020d}"
        return Finding(kind, file, index * UNIT_BYTES, (last + 1 - first) * UNIT_BYTES, detail)

    def list_files(self) -> list[str]:
        """Return the names of the queue's files, oldest first."""
        return [f"{n * self._table.segment_bytes:020d}" for n in self._starts]

    def load(self, *, exact: bool) -> None:
        """Find the files and the end of the queue, which follows the last used unit.
        With `exact`, read every unit of the last files instead of bisecting, since a crash may have left holes."""
        table = self._table
        starts = []
        self._kept = (0, b"")
        with suppress(FileNotFoundError):
            for name, length in table.fs.scandir_files(self.directory, own=table.own):
                start = segment_start(name)
                if start is not None and start % table.segment_bytes == 0:
                    starts.append(start // table.segment_bytes)
                    if length < table.segment_bytes:
                        table.short_files[os.path.join(self.directory, name)] = length
        self._starts = sorted(starts)
        per = table.units_per_segment
        end = self._starts[0] * per if self._starts else 0
        for segment in reversed(self._starts):
            used = self._used_units(segment, exact=exact)
            if used:
                end = segment * per + used
                break
        self.max_offset = self.next_offset = end
        if end == self.first_offset() and self._is_front_gone():
            self.load(exact=exact)  # retention ran between the listing and the reading of the files

    def _is_front_gone(self) -> bool:
        """Return True if another process's retention has removed the first known file."""
        return bool(self._starts) and not os.path.lexists(self._path(self._starts[0]))

    def _used_units(self, segment: int, *, exact: bool) -> int:
        """Return the number of units up to the last used one of a file."""
        table, path = self._table, self._path(segment)
        with suppress(FileNotFoundError):
            if not table.may_keep:
                cache = table.descriptors
                return self._find_end(segment, partial(cache.pread, path), partial(cache.data_end, path), exact=exact)
            with table.fs.opened(path, os.O_RDONLY) as fd:  # not the cache, in which each call looks the file up
                ends = partial(table.fs.data_end, fd, 0)
                return self._find_end(segment, partial(table.fs.pread, fd), ends, exact=exact)
        return 0

    def _find_end(
        self, segment: int, pread: Callable[[int, int], bytes], data_end: Callable[[int], int], *, exact: bool
    ) -> int:
        """Return `_used_units` of a file that is read by `pread(length, position)`. Keep the units if they are few."""
        table, per = self._table, self._table.units_per_segment

        def read(at: int, stop: int) -> bytes:
            length = (stop - at) * UNIT_BYTES
            return pread(length, at * UNIT_BYTES).ljust(length, b"\0")

        first = read(0, min(per, _BLOCK_UNITS + exact))  # with `exact` also the unit in which a page ends
        low = used_units(first)
        if exact and (used := -(-data_end(table.segment_bytes) // UNIT_BYTES)) > _BLOCK_UNITS + 1:
            # Holes are left out: reading them for thousands of queues takes longer than all else.
            return used_units(read(0, min(per, used)))
        full = low >= _BLOCK_UNITS and not exact
        if (size := (1 if full else low) * UNIT_BYTES) <= table.may_keep:  # of a full block one, which all callers read
            table.may_keep -= size
            self._kept = (segment * per, first[:size])
        # Bisected by blocks. The first block is read first, since most queues end there. The last used unit of a block
        # counts, so that readers see a hole before it, and do not take the hole for the end.
        high = per if full else low
        while low < high:
            at = low if high - low <= _BLOCK_UNITS else (low + high) // 2
            stop = min(at + _BLOCK_UNITS, high)
            count = used_units(read(at, stop))
            if count:
                low = at + count
            if at + count < stop:
                high = at + count
        return low

    def stop_at_hole(self, dispatched: int) -> None:
        """End the queue at its first unused unit, for readers of a crashed store (format#readers).
        Units of records at or beyond `dispatched` may have reached the disk in any order. A reader that passed a hole
        would miss the units that recovery writes there."""
        low = self.max_offset
        for low, units in self.held_before(self.max_offset, 4096):
            older = np.flatnonzero((units["physical_offset"] < dispatched) & (units["size"] > 0) & ~is_void(units))
            if len(older):
                low += int(older[-1]) + 1
                break
        for at, units in self.chunks(low, self.max_offset):
            holes = np.flatnonzero(units["size"] <= 0)
            if len(holes):
                self.max_offset = self.next_offset = at + int(holes[0])
                return

    def refresh(self) -> None:
        """Find units that another process has published or removed since (format#readers)."""
        with self._table.news_lock:  # otherwise two threads would each add the units that both have found
            known = self.max_offset
            if known > self.first_offset() and self.unit(known - 1)[1] <= 0:
                self.load(exact=False)  # it was cut, or retention removed its file, as it may once a later one exists
                if self.max_offset < known:
                    self.min_offset = min(self.min_offset, self.max_offset)
                    self.cut_to = self.max_offset
                    self.cuts += 1
            elif known == self.first_offset() and self._is_front_gone():
                self.load(exact=False)
            self._grow()

    def _grow(self) -> None:
        per = self._table.units_per_segment
        while True:
            segment = self.max_offset // per
            if not self._starts or segment not in self._starts[-2:]:
                if not os.path.exists(self._path(segment)):
                    if not self._starts:
                        self.load(exact=False)
                    return
                self._starts.append(segment)
            index = self.max_offset % per
            sizes = self.units(self.max_offset, min(per - index, 4096))["size"]
            end = np.flatnonzero(sizes <= 0)
            self.max_offset += int(end[0]) if len(end) else len(sizes)
            self.next_offset = self.max_offset
            if len(end):
                return

    # -- units ------------------------------------------------------------------------------------------------------

    def read(self, offset: int, count: int) -> bytes:
        """Return the bytes of units [offset, offset + count). Units outside the files are zeros, like holes."""
        table = self._table
        per = table.units_per_segment
        segment, index = divmod(offset, per)
        if index + count <= per:
            return self._read_segment(segment, index, count)
        parts = []
        while count > 0:
            here = min(count, per - index)
            parts.append(self._read_segment(segment, index, here))
            count -= here
            segment += 1
            index = 0
        return b"".join(parts)

    def _read_segment(self, segment: int, index: int, count: int) -> bytes:
        length = count * UNIT_BYTES
        try:
            data = self._table.descriptors.pread(self._path(segment), length, index * UNIT_BYTES)
        except FileNotFoundError:
            return bytes(length)
        return data if len(data) == length else data + bytes(length - len(data))

    def kept(self, offset: int, count: int) -> bytes:
        """Return the bytes of units as they were when they were first read, if they are kept. Otherwise read them, and
        as many of those after them as may be kept."""
        first, units = self._kept
        begin, end = (offset - first) * UNIT_BYTES, (offset + count - first) * UNIT_BYTES
        if begin >= 0 and end <= len(units):
            return units[begin:end]
        per = self._table.units_per_segment
        ahead = min(self._table.keeps_each, self.max_offset - offset, per - offset % per)
        if count >= ahead:
            return self.read(offset, count)
        self._kept = offset, self.read(offset, ahead)
        return self._kept[1][: count * UNIT_BYTES]

    def unit(self, offset: int) -> tuple[int, int, int]:
        """Return (physical offset, size, tags code) of a unit."""
        return UNIT.unpack(self.read(offset, 1))

    def units(self, offset: int, count: int) -> np.NDArray[np.void]:
        """Return units [offset, offset + count) as a read-only array of `unit_dtype`."""
        return np.frombuffer(self.read(offset, count), unit_dtype())

    def chunks(self, start: int, stop: int) -> Iterator[tuple[int, np.NDArray[np.void]]]:
        """Yield (offset, units) chunks of [start, stop), in order, each of bounded size."""
        while start < stop:
            count = min(stop - start, _CHUNK_UNITS)
            yield start, self.units(start, count)
            start += count

    def held(self, start: int, stop: int) -> Iterator[tuple[int, np.NDArray[np.void]]]:
        """Yield chunks as `chunks` does, but only of units in files. Gaps between files may be huge."""
        per = self._table.units_per_segment
        for segment in self._starts:
            yield from self.chunks(max(start, segment * per), min(stop, (segment + 1) * per))

    def held_before(self, stop: int, most: int) -> Iterator[tuple[int, np.NDArray[np.void]]]:
        """Yield chunks as `held` does, from slot `stop` back to the first, of at most `most` units."""
        per = self._table.units_per_segment
        for segment in reversed(self._starts):
            high = min(stop, (segment + 1) * per)
            while high > segment * per:
                count = min(most, high - segment * per)
                high -= count
                yield high, self.units(high, count)

    def last_message(self) -> tuple[int, int, int]:
        """Return (physical offset, size, slot) of the newest unit that is used and not void, or (-1, 0, -1)."""
        per = self._table.units_per_segment
        for segment in reversed(self._starts):
            for slot in range(min(self.max_offset, (segment + 1) * per) - 1, segment * per - 1, -1):
                unit = self.unit(slot)
                if unit[1] > 0 and unit != VOID:
                    return *unit[:2], slot
        return -1, 0, -1

    def write(self, offset: int, units: bytes | memoryview) -> None:
        """Write `units` at `offset`. Skipped slots become void. May be repeated.
        Does not publish them: the caller raises `max_offset` afterwards. Raises StoreFullError, StoreIOError."""
        # A record gets its offset under the append lock, and the log is dispatched in order. So a record with a lower
        # offset that has no unit yet is lost (format#void).
        first = self.max_offset
        segment, index = divmod(offset, self.units_per_file)
        if not self._starts or (offset <= first and segment not in self._starts):
            first = offset - index  # a first file, or a lost one, whose first records were removed before
        while first < offset:
            count = min(offset - first, _CHUNK_UNITS)
            self._pwrite(first, VOID_UNIT * count)
            first += count
        self._pwrite(offset, units)

    def _pwrite(self, offset: int, data: bytes | memoryview) -> None:
        table = self._table
        per = table.units_per_segment
        view = memoryview(data)
        done = 0
        while done < len(view):
            segment, index = divmod(offset + done // UNIT_BYTES, per)
            length = min(len(view) - done, (per - index) * UNIT_BYTES)
            path = self._path(segment)
            if not self._starts or segment > self._starts[-1] or segment not in self._starts:
                table.create_file(self.directory, path)
                self._starts.append(segment)
                self._starts.sort()
            table.descriptors.pwrite(path, view[done : done + length], index * UNIT_BYTES)
            table.note_dirty(path)
            done += length

    def write_back(self, start: int, end: int) -> None:
        """Start writing back the full files of units [start, end), which are synced later."""
        per = self._table.units_per_segment
        for segment in range(start // per, end // per):
            self._table.descriptors.write_back(self._path(segment))

    def publish(self, end: int) -> None:
        """Make units below `end` readable."""
        if self.max_offset == self.min_offset == 0 and not self.next_offset:
            self.min_offset = self.first_offset() if self._starts else 0
        self.max_offset = max(self.max_offset, end)
        if self.next_offset < self.max_offset:
            self.next_offset = self.max_offset

    def first_offset(self) -> int:
        """Return the first slot of the first file."""
        return self._starts[0] * self._table.units_per_segment if self._starts else self.max_offset

    def last_file_offset(self) -> int:
        """Return the first slot of the last file. There must be one."""
        return self._starts[-1] * self._table.units_per_segment

    def zero_from(self, offset: int) -> int:
        """Write zeros over every unit from `offset` on. Return the number of used ones.
        The files keep their length."""
        removed = 0
        if not self._starts:
            return 0
        for at, units in self.held(offset, (self._starts[-1] + 1) * self._table.units_per_segment):
            used = np.flatnonzero((units["physical_offset"] != 0) | (units["size"] != 0) | (units["tags_code"] != 0))
            if len(used):
                low, high = int(used[0]), int(used[-1]) + 1
                self._pwrite(at + low, bytes((high - low) * UNIT_BYTES))
                removed += len(used)
        self.max_offset = min(self.max_offset, max(offset, self.first_offset()))
        self.next_offset = min(self.next_offset, self.max_offset)
        return removed

    # -- the front --------------------------------------------------------------------------------------------------

    @property
    def is_there(self) -> bool:
        """True if the queue has ever had a message that was not deleted with its topic."""
        return self.next_offset > (0 if self._starts else self.max_offset)

    def forget_files(self) -> None:
        """Forget files that were removed. The end of the queue stays. New files may get the same names."""
        for segment in self._starts:
            self._table.descriptors.forget(self._path(segment))
        self._starts = []

    def correct_min(self, min_physical: int) -> None:
        """Set `min_offset` to the first unit that is not void and points to or beyond `min_physical`.
        Set it to `max_offset` if there is none in the files (format#queue-start)."""
        per = self._table.units_per_segment
        end = self.max_offset  # later units, which the dispatcher may add meanwhile, are not below it
        for segment in list(self._starts):
            first = segment * per
            count = min(per, end - first)
            if count <= 0:
                break
            physical, size, _ = head = UNIT.unpack(self.kept(first, 1))
            if physical >= min_physical and size > 0 and head != VOID:
                self.min_offset = first
                return
            newest = self.unit(first + count - 1)
            if newest[0] < min_physical and newest != VOID and first + count < end:
                continue  # its newest message is gone, and so are all before it
            units = self.units(first, count)
            live = np.flatnonzero((units["physical_offset"] >= min_physical) & (units["size"] > 0) & ~is_void(units))
            if len(live):
                self.min_offset = first + int(live[0])
                return
        self.min_offset = end

    def drop_before(self, min_physical: int) -> int:
        """Delete leading files whose newest unit points below `min_physical`, never the last. Return their number."""
        per = self._table.units_per_segment
        dropped = 0
        while len(self._starts) > 1:
            segment = self._starts[0]
            units = self.units(segment * per, per)
            if int(units["physical_offset"].max()) >= min_physical:
                break
            self._table.remove_file(self._path(segment))
            del self._starts[0]
            dropped += 1
        if dropped:
            self._table.fs.sync_directory(self.directory)
        self.correct_min(min_physical)
        return dropped


def _sync_kept(sync: Callable[[str], None], path: str) -> None:
    """Sync a file or folder, unless retention has removed it, or all files of a deleted topic."""
    with suppress(FileNotFoundError):
        sync(path)


class QueueTable:
    """Consume queues of a store, by topic and queue id."""

    def __init__(self, parts: StoreParts, *, own: bool) -> None:
        self.root = str(parts.root / "consumequeue")
        self.own = own
        """True if this process is the writer. A writer refuses links and the like in place of files and folders."""
        self.segment_bytes = parts.manifest.consumequeue_segment_bytes
        self.units_per_segment = self.segment_bytes // UNIT_BYTES
        self.delay_table_ms = parts.delay_table_ms
        """Delay of each level in ms, level 1 first (format#tags-code)."""
        self.fs = parts.fs
        self.descriptors = parts.descriptors
        self.short_files: dict[str, int] = {}
        """Lengths of files that are shorter than a segment, by path."""
        self.unsafe_names: list[str] = []
        """Names of folders that cannot be queues (format#names)."""
        self.deleted: dict[str, int] = {}
        """Physical offset of each topic's deletion (`log.deleted`). Replaced as a whole."""
        self.batch_topics: frozenset[str] = frozenset()
        """Topics with RocketMQ's batch queues, which are in a separate folder. mqstore does not write them.
        RocketMQ does not start if a topic has queues of both kinds."""
        self.has_addresses = False
        """True if tags codes may be addresses (`LAST_ADDRESS`) in extension files, which exist."""
        self.in_rocksdb = False
        """True if RocketMQ keeps the queues in RocksDB, in the same folder as mqstore's.
        A writer creates mqstore's files next to it, which RocketMQ ignores."""
        self.keeps_each = 0
        """Number of units after those asked for that each queue may keep, once all are loaded."""
        self.may_keep = 0
        """Number of bytes of units that `load` may keep, for queues with few. Opening thousands of files takes long."""
        self._tmp, self._file_mode = parts.root / "tmp", parts.config.file_mode
        self._queues: dict[tuple[str, int], ConsumeQueue] = {}
        self._topics: dict[str, dict[int, ConsumeQueue]] = {}
        self._lock = Lock()
        self.news_lock = Lock()
        """Lock of readers that move the end of a queue."""
        self._dirty: set[str] = set()
        self._dirty_directories: set[str] = set()
        self.made_directories: set[str] = set()

    # -- the table --------------------------------------------------------------------------------------------------

    def load(self, *, exact: bool, then: Callable[[ConsumeQueue], None] | None = None) -> None:
        """Find every queue on disk. `then` is called for each one while its file is open."""
        self.short_files.clear()
        beside = os.path.dirname(self.root)
        self.batch_topics = frozenset(self._folders(os.path.join(beside, "batchconsumequeue")))
        self.has_addresses = bool(self._folders(os.path.join(beside, "consumequeue_ext")))
        self.in_rocksdb = self.fs.exists(os.path.join(self.root, "CURRENT"))
        topics = sorted(self._folders(self.root, own=self.own))
        self.unsafe_names += [topic for topic in topics if not is_path_safe(topic)]
        for key in self.on_disk(topics):
            queue = self.create(*key)
            queue.load(exact=exact)
            if then is not None:
                then(queue)
        self.keeps_each = min(self.may_keep // UNIT_BYTES // max(1, len(self._queues)), 4 * _BLOCK_UNITS)

    def rows_of(self, buffer: ReadableBuffer, headers: Headers, base: int) -> Rows:
        """Return the rows that queues and index should have for the records of `headers`, all of them `ok`.
        `base` is the physical offset of the start of `buffer`."""
        return rows_of(buffer, headers, base, self.delay_table_ms, self.batch_topics)

    def digest(self) -> int:
        """Return a number for the existing queues, their files, and their ends."""
        extents = filter(None, (queue.extent() for queue in self))
        return sum(crc32c(extent.encode("utf-8", "surrogateescape")) for extent in extents)

    def _folders(self, path: str, *, own: bool = False) -> list[str]:
        if not os.path.isdir(path):
            return []
        return self.fs.scandir_own(path)[1] if own else self.fs.scandir_directories(path)

    def on_disk(self, topics: Iterable[str]) -> Iterator[tuple[str, int]]:
        """Yield the queues of `topics` that have a folder, by topic and queue id."""
        for topic in topics:
            if is_path_safe(topic):
                for name in self._folders(os.path.join(self.root, topic), own=self.own):
                    if is_queue_id(name):
                        yield topic, int(name)

    def refresh(self, only: str | None) -> list[ConsumeQueue]:
        """Find queues that another process has created, of the topic `only`, or of all if None. Return the new ones."""
        keys = self.on_disk(self._folders(self.root) if only is None else [only])
        found = [self.create(*key) for key in keys if key not in self._queues]
        for queue in found:
            queue.load(exact=False)
        return found

    def get(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        return self._queues.get((topic, queue_id))

    def create(self, topic: str, queue_id: int) -> ConsumeQueue:
        """Return the queue. A new one is created in memory. Its first unit creates its folder."""
        key = (topic, queue_id)
        queue = self._queues.get(key)
        if queue is None:
            with self._lock:
                queue = self._queues.get(key) or ConsumeQueue(self, topic, queue_id)
                self._topics.setdefault(topic, {})[queue_id] = queue
                self._queues[key] = queue
        return queue

    def __iter__(self) -> Iterator[ConsumeQueue]:
        return iter(list(self._queues.values()))

    def __len__(self) -> int:
        return len(self._queues)

    def of(self, topic: str) -> list[ConsumeQueue]:
        return sorted(self._topics.get(topic, {}).values(), key=lambda q: q.queue_id)

    # -- files ------------------------------------------------------------------------------------------------------

    def create_file(self, directory: str, path: str) -> None:
        """Create a sparse file of full length at `path`. It is prepared in tmp/, so that its name never has less."""
        fs = self.fs
        if directory not in self.made_directories:
            for folder in (self.root, os.path.dirname(directory), directory):
                if folder not in self.made_directories:
                    fs.mkdir(folder, exist_ok=True)
                    self.made_directories.add(folder)
            self.note_names(directory)
        with new_file(fs, self._tmp, "cq", path, self._file_mode) as fd:
            fs.truncate_sparse(fd, self.segment_bytes)
        self.descriptors.forget(path)
        with self._lock:
            self._dirty_directories.add(directory)

    def lengthen(self) -> None:
        """Extend short files to their full length, with holes."""
        for path in self.short_files:
            with self.fs.opened(path, os.O_RDWR) as fd:
                self.fs.truncate_sparse(fd, self.segment_bytes)
            self.note_dirty(path)

    def note_names(self, directory: str) -> None:
        """Let the next `sync` make the names of a queue's files and folders durable, also those made by others."""
        topic = os.path.dirname(directory)
        with self._lock:
            self._dirty_directories.update((os.path.dirname(self.root), self.root, topic, directory))

    def remove_file(self, path: str) -> None:
        self.fs.unlink(path, missing_ok=True)
        self.descriptors.forget(path)  # after the unlink, or a reader might open it again and keep its space
        with self._lock:
            self._dirty.discard(path)

    def note_dirty(self, path: str) -> None:
        with self._lock:  # `sync` swaps the set from another thread
            self._dirty.add(path)

    @property
    def dirty_count(self) -> int:
        return len(self._dirty)

    def sync(self) -> None:
        """Make every unit written so far durable: files first, then the folders that name them.
        If it raises, all files stay dirty. The dispatcher may write more files meanwhile."""
        with self._lock:
            files, self._dirty = self._dirty, set()
            directories, self._dirty_directories = self._dirty_directories, set()
        try:
            self.fs.sync_each(partial(_sync_kept, self.descriptors.fdatasync), sorted(files))
            self.fs.sync_each(partial(_sync_kept, self.fs.sync_directory), sorted(directories))
        except BaseException:
            with self._lock:
                self._dirty |= files
                self._dirty_directories |= directories
            raise
