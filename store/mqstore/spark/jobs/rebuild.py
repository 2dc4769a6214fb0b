"""Build consume queues and index anew from the commitlog, in parallel (store-format 4, 6, 9.8; spark.md B8).

    driver        writer locks; ranges of every log                                                         `ranges`
    range task    every record, checksums included: runs of units to their slots in fresh files; index entries aside
    store task    joins the ranges of a store. A record's queue offset says its slot, so most queues are done by now.
                  Those whose records do not follow each other, and those of ranges that did not fit, are built once
                  more from the front, in log order. Then slots that no record tells: before the first, behind the last
    index task    an index file: its hash chains are sequential
    driver        in place: what differs is renamed into the store

There is no shuffle: ranges write to the same files at different places, so all tasks must see one file system. What is
written is a function of the log, so a task may run twice.

**In place** the result is what `mqstore recover` would make of queues and index (the rules are its own: `sort_out`,
`first_slot_in_range`), except that nothing is cut and the commitlog is never written. Slots of records that retention
took keep their units, slots of lost ones become void (4.3), and so no queue offset is given out twice (5.4).

The swap replaces file by file, under the writer lock, and a file is old or new at any moment. Before the first rename
the checkpoint is made to say "a writer was killed, and all units and entries are in doubt", after the last one it says
what it said before. So whoever opens the store after a crash in between reads the whole log and mends what is not new
yet, as after any other crash:

    checkpoint (flushed F, dispatched = log start, no clean end), abort  ->  renames  ->  abort away  ->  checkpoint

**With `dest`** nothing of the store is touched: `consumequeue/` and `index/` appear there.

Work in progress lies in `rebuild/` of the store (or of `dest`), which nobody else reads. Knows no Spark.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from mqstore.clock import SYSTEM_CLOCK
from mqstore.errors import ConfigError
from mqstore.files.abort import AbortMark
from mqstore.files.filesystem import FILE_MODE, REAL, FileSystem
from mqstore.files.lock import WriterLock, refuse_beside_writer
from mqstore.files.quiet import QUIET
from mqstore.layout.consumequeue import UNIT_BYTES, UNIT_DTYPE, VOID_UNIT
from mqstore.layout.dispatch import Rows, rows_of, under_another_table
from mqstore.layout.indexfile import IndexHeader, file_bytes, put_entries
from mqstore.log.checkpoint import CheckpointFile
from mqstore.log.consumequeue import ConsumeQueue
from mqstore.log.names import is_path_safe
from mqstore.log.recovery import first_slot_in_range, watermark_of
from mqstore.log.scanner import End, Good, least_plausible, scan_segment, sort_out
from mqstore.log.store import MessageStore
from mqstore.log.txn import IntentWatch
from mqstore.spark.jobs.ranges import (
    RANGE_BYTES,
    LogRange,
    QueueKey,
    QueuePart,
    RangeResult,
    SegmentParts,
    Stitcher,
    bundles,
    cut_ranges,
    is_straight,
    read_range,
)
from mqstore.spark.jobs.shape import Plan, Progress, Selection, Shaped, Stores, run
from mqstore.spark.jobs.verify import plan_verify, whole_stores
from mqstore.spark.plan import StoreName, open_store

__all__ = ["RebuildReport", "RebuiltQueue", "RebuiltStore", "plan_rebuild", "rebuild"]

What = Literal["queues", "index"]
_WORK = "rebuild"
_ENTRY = np.dtype([("hash", "<i4"), ("physical", "<i8"), ("stamp", "<i8")])
"""An index entry on its way from a range to its file."""
_MAX_OPEN = 64
_JOINED_FASTER = 4
"""Times that ranges are joined faster than they are read, at least."""
_CHUNK_UNITS = 1 << 16


@dataclass(frozen=True, slots=True)
class RebuiltQueue(Shaped):
    """A queue, before and after. Offsets as `mqstore inspect` has them."""

    store: str
    topic: str
    queue_id: int
    old_min: int
    old_max: int
    new_min: int
    new_max: int
    changed: int
    """Units that differ, and stand in files that were replaced."""
    void: int
    """Queue offsets whose records are lost to damage."""
    in_order: bool
    """Built record by record, since its records do not simply follow each other."""


@dataclass(frozen=True, slots=True)
class RebuiltStore(Shaped):
    """A store."""

    store: str
    messages: int
    bad_stretches: int
    """Places in the log that hold no record; `mqstore verify` tells which."""
    odd_records: int
    """Records whose queue offset is nonsense: they are in no queue."""
    queues: int
    changed_queues: int
    changed_units: int
    index_files: int
    index_entries: int
    index_changed: bool
    """Whether the index was not what it is now, byte for byte."""


@dataclass(frozen=True, slots=True)
class RebuildReport(Shaped):
    """What `rebuild` made."""

    dest: str | None
    changed: bool
    stores: tuple[RebuiltStore, ...]
    queues: tuple[RebuiltQueue, ...]


def rebuild(
    spark: object,
    stores: Stores | Selection,
    *,
    what: Sequence[What] = ("queues", "index"),
    dest: str | os.PathLike[str] | None = None,
    range_bytes: int = RANGE_BYTES,
    progress: Progress | None = None,
) -> RebuildReport:
    """Build `what` of `stores` anew from their logs, in place or below `dest`.

    `spark`: a session, or None to do it here. In place the stores are locked for as long as it takes: StoreLockedError,
    naming the process, while a writer has one open; nothing was changed then. `dest` must be empty or missing; with
    several stores each gets a folder named like its own. Raises ConfigError, and what reading and writing raises, in
    place leaving each store as it was or as it shall be. spark.md B7, B8.
    """
    _, names, asked = _checked(stores, what, dest)
    with ExitStack() as held:
        works = [_prepare(name, asked, dest, len(names) > 1, held) for name in names]
        ranges: list[_Piece] = []
        for work in works:
            with open_store(work.name) as store:
                ranges += [_Piece(work, each) for each in cut_ranges(store, work.name, range_bytes)]
        tasks = bundles(ranges, min(range_bytes, RANGE_BYTES))
        found: dict[StoreName, list[RangeResult]] = {name: [] for name in names}
        for outcome in run(spark, tasks, _build_ranges, progress, "mqstore rebuild: ranges"):
            for result in outcome:
                found[result.range.store].append(result)
        joins = bundles(_Joining(work, found[work.name]) for work in works)
        joined = [each for task in run(spark, joins, _join, title="mqstore rebuild: stores") for each in task]
        files = [file for each in joined for file in each.index]
        run(spark, files, _build_index, title="mqstore rebuild: index")
        rows = [_publish(each) for each in joined]
    return RebuildReport(
        dest=None if dest is None else os.fspath(dest),
        changed=dest is None and any(row.changed_units or row.index_changed for row in rows),
        stores=tuple(rows),
        queues=tuple(queue for each in joined for queue in each.queues),
    )


def plan_rebuild(
    stores: Stores | Selection,
    *,
    what: Sequence[What] = ("queues", "index"),
    dest: str | os.PathLike[str] | None = None,
    range_bytes: int = RANGE_BYTES,
) -> Plan:
    """What `rebuild` would read, after the checks it makes. Writes nothing and takes no lock."""
    chosen, names, _ = _checked(stores, what, dest)
    if dest is None:
        for name in names:
            refuse_beside_writer(name.path)
    return plan_verify(chosen, range_bytes=range_bytes)


def _checked(
    stores: Stores | Selection, what: Sequence[What], dest: str | os.PathLike[str] | None
) -> tuple[Selection, list[StoreName], frozenset[str]]:
    chosen = whole_stores(stores, "rebuild")
    asked = frozenset([what] if isinstance(what, str) else what)
    if not asked or asked - {"queues", "index"}:
        raise ConfigError(f"what={tuple(sorted(asked))!r}: 'queues', 'index', or both can be rebuilt")
    names = chosen.stores()
    for name in names:
        open_store(name).close()  # is it a store?
        if IntentWatch(Path(name.path), QUIET).pending() is not None:
            raise ConfigError(
                f"{name.path}: a Spark job ended while it wrote to this store, and half of what it wrote would get "
                "into the queues; open the store once (mqstore recover), which undoes it, and rebuild it then"
            )
    if dest is not None:
        root = Path(dest)
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise ConfigError(f"dest={os.fspath(dest)!r} is not an empty directory; what is rebuilt would mix with it")
        folders = [os.path.basename(os.path.normpath(name.path)) for name in names]
        if len(names) > 1 and len(set(folders)) < len(folders):
            raise ConfigError(f"dest: two stores would get the same folder ({', '.join(folders)}); rebuild them apart")
        inside = [name.path for name in names if Path(name.path).resolve() in (root.resolve(), *root.resolve().parents)]
        if inside:
            raise ConfigError(f"dest={os.fspath(dest)!r} lies in the store {inside[0]}; give a directory elsewhere")
    return chosen, names, asked


# -- before ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Work:
    """A store, and where its new files are made."""

    name: StoreName
    folder: str
    what: frozenset[str]
    dest: str | None

    @property
    def queues(self) -> Path:
        return Path(self.folder, "consumequeue")

    @property
    def index(self) -> Path:
        return Path(self.folder, "index")

    def spill(self, piece: LogRange, first: int) -> Path:
        """Where the index entries of a range go that was read from `first` on."""
        return Path(self.folder, "entries", f"{piece.base}-{piece.low}-{first}")


@dataclass(frozen=True, slots=True)
class _Piece:
    work: _Work
    range: LogRange

    @property
    def store(self) -> StoreName:
        return self.work.name

    @property
    def weight(self) -> int:
        return self.range.weight


def _prepare(
    name: StoreName, what: frozenset[str], dest: str | os.PathLike[str] | None, several: bool, held: ExitStack
) -> _Work:
    """Lock the store, unless it stays as it is, and make an empty folder to work in, which goes in the end."""
    if dest is None:
        lock = WriterLock(name.path, "mqstore rebuild")
        lock.acquire()
        held.callback(lock.release)
        target, root = None, Path(name.path)
        shutil.rmtree(root / _WORK, ignore_errors=True)  # of one that was killed
    else:
        root = Path(dest, os.path.basename(os.path.normpath(name.path))) if several else Path(dest)
        target = str(root)
    folder = root / _WORK / secrets.token_hex(4)
    for each in ("consumequeue", "entries", "index"):
        (folder / each).mkdir(parents=True)
    held.callback(shutil.rmtree, root / _WORK, ignore_errors=True)
    return _Work(name, str(folder), what, target)


# -- ranges ------------------------------------------------------------------------------------------------------------


class _UnitFiles:
    """Fresh queue files, sparse and at full length; many processes may write to them at different places."""

    def __init__(self, folder: Path, segment_bytes: int, fs: FileSystem = REAL) -> None:
        self.per = segment_bytes // UNIT_BYTES
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._fs = fs
        self._open: OrderedDict[tuple[str, int, int], int] = OrderedDict()

    def __enter__(self) -> _UnitFiles:
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

    def sync(self, topic: str, queue_id: int, segment: int) -> None:
        self._fs.fdatasync(self._file(topic, queue_id, segment))

    def remove(self, topic: str, queue_id: int, segments: Sequence[int]) -> None:
        """Delete these files."""
        for segment in segments:
            fd = self._open.pop((topic, queue_id, segment), None)
            if fd is not None:
                self._fs.close(fd)
            self._fs.unlink(self.path(topic, queue_id, segment), missing_ok=True)

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


def _build_ranges(task: Sequence[_Piece]) -> list[RangeResult]:
    results = []
    with ExitStack() as opened:
        stores: dict[StoreName, MessageStore] = {}
        for piece in task:
            name = piece.work.name
            if name not in stores:
                stores[name] = opened.enter_context(open_store(name))
            if (result := _build_range(stores[name], piece.work, piece.range)) is not None:
                results.append(result)
    return results


def _build_range(store: MessageStore, work: _Work, piece: LogRange, start: int | None = None) -> RangeResult | None:
    """Units of straight runs to their slots, entries to a file of the range."""
    runs: dict[QueueKey, list[bytes]] = {}
    entries: list[npt.NDArray[np.void]] = []

    def take_run(topic: str, queue_id: int, first: int, units: npt.NDArray[np.void]) -> tuple[()]:
        del first
        if "queues" in work.what:
            runs.setdefault((topic, queue_id), []).append(units.tobytes())
        return ()

    def take_rows(rows: Rows) -> None:
        if "index" in work.what and len(rows.entry_row):
            entries.append(_entries_of(rows))

    result = read_range(store, piece, take_run=take_run, take_rows=take_rows, start=start)
    if result is None:
        return None
    with _UnitFiles(work.queues, store.manifest.consumequeue_segment_bytes) as files:
        for (topic, queue_id), parts in runs.items():
            part = result.queues[topic, queue_id]
            if part.straight:
                files.write(topic, queue_id, part.first, b"".join(parts))
    if entries and result.first is not None:
        path = work.spill(piece, result.first)
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        temporary.write_bytes(b"".join(each.tobytes() for each in entries))
        os.replace(temporary, path)
    return result


def _entries_of(rows: Rows) -> npt.NDArray[np.void]:
    found = np.empty(len(rows.entry_row), _ENTRY)
    found["hash"] = rows.entry_hash
    found["physical"] = rows.physical_offset[rows.entry_row]
    found["stamp"] = rows.store_timestamp_ms[rows.entry_row]
    return found


# -- stores ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Joining:
    work: _Work
    results: list[RangeResult]

    @property
    def store(self) -> StoreName:
        return self.work.name

    @property
    def weight(self) -> int:
        return sum(result.range.weight for result in self.results) // _JOINED_FASTER


@dataclass(frozen=True, slots=True)
class _IndexPart:
    """Entries [start, stop) of a spill file."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _IndexFile:
    path: str
    slots: int
    capacity: int
    parts: tuple[_IndexPart, ...]


@dataclass(slots=True)
class _Joined:
    work: _Work
    row: RebuiltStore
    queues: list[RebuiltQueue] = field(default_factory=list)
    index: list[_IndexFile] = field(default_factory=list)
    watermark: int | None = None
    """F; None for an empty log, which leaves nothing to do."""
    log_start: int = 0
    queue_files: list[str] = field(default_factory=list)
    """New ones that are to be published, by their paths below the store."""


@dataclass(slots=True)
class _Slots:
    """Where a queue stands: the next slot, the place of its last record, and how it began."""

    next: int | None
    seen: int
    begin: int | None
    """The first slot that is not one of a record below the log, by the old files; None when these do not say."""
    first: int | None = None
    """Of the first record."""
    void: int = 0
    in_order: bool = False


def _join(jobs: Sequence[_Joining]) -> list[_Joined]:
    joined = []
    for job in jobs:
        with open_store(job.store) as store:
            joined.append(_Joiner(store, job).join())
    return joined


class _Joiner:
    def __init__(self, store: MessageStore, job: _Joining) -> None:
        store._queues.load(exact=True)
        self._store = store
        self._work = job.work
        self._segment_bytes = store.manifest.consumequeue_segment_bytes
        self._log_start = store._run.min_offset
        self._stitcher = Stitcher(store, job.work.name, job.results, partial(_build_range, store, job.work))
        self._results: list[RangeResult] = []
        self._odd = 0
        self._bad = 0
        self._end = 0

    def join(self) -> _Joined:
        store = self._store
        work = self._work
        joined = _Joined(work, self._row(), log_start=self._log_start)
        if not store._run.starts:
            return joined
        joined.watermark = watermark_of(store._parts(clean=store.clean_shutdown, has_checkpoint=store._has_checkpoint))
        segments: list[SegmentParts] = []
        for event in self._stitcher.events():
            if isinstance(event, SegmentParts):
                segments.append(event)
                self._results += event.results
            elif isinstance(event, End):
                self._end = event.position
            else:
                self._bad += 1
        if "queues" in work.what:
            with _UnitFiles(work.queues, self._segment_bytes) as files:
                for key, slots in sorted(self._place(segments, files).items()):
                    joined.queues.append(self._finish(files, *key, slots, joined))
        if "index" in work.what:
            joined.index = self._index_files()
        joined.row = self._row(joined)
        return joined

    def _row(self, joined: _Joined | None = None) -> RebuiltStore:
        queues = joined.queues if joined is not None else []
        return RebuiltStore(
            store=self._work.name.id,
            messages=sum(result.records for result in self._results),
            bad_stretches=self._bad,
            odd_records=self._odd,
            queues=len(queues),
            changed_queues=sum(1 for queue in queues if queue.changed),
            changed_units=sum(queue.changed for queue in queues),
            index_files=len(joined.index) if joined is not None else 0,
            index_entries=sum(result.entries for result in self._results) if "index" in self._work.what else 0,
            index_changed=False,
        )

    # -- slots that records tell

    def _place(self, segments: Sequence[SegmentParts], files: _UnitFiles) -> dict[QueueKey, _Slots]:
        """Every queue: those of records are in their slots now, those that only old files know are empty."""
        parts: dict[QueueKey, list[QueuePart]] = {}
        for segment in segments:
            for key, found in segment.queues().items():
                if key[1] >= 0 and is_path_safe(key[0]):
                    parts.setdefault(key, []).extend(found)
        doubted = {key for result in self._stitcher.discarded for key in result.queues}
        placed: dict[QueueKey, _Slots] = {}
        for key, found in parts.items():
            slots = self._begin(*key, found[0].first)
            straight = key not in doubted and is_straight(found) and slots.next in (None, found[0].first)
            if not straight:
                continue
            slots.first, slots.next, slots.seen = found[0].first, found[-1].stop, found[-1].last_physical
            placed[key] = slots
        crooked = parts.keys() - placed.keys()
        for key in doubted | crooked:
            if key[1] >= 0 and is_path_safe(key[0]):
                files.remove(*key, files.segments(*key))
        if crooked:
            placed |= self._in_order(segments, crooked, files)
        for queue in self._store._queues:
            key = (queue.topic, queue.queue_id)
            if key not in placed:
                placed[key] = self._begin(*key, None)
        return placed

    def _begin(self, topic: str, queue_id: int, least: int | None) -> _Slots:
        queue = self._store._queues.create(topic, queue_id)
        begin, seen = first_slot_in_range(queue, self._log_start, least)
        return _Slots(begin, seen, begin)

    def _in_order(
        self, segments: Sequence[SegmentParts], crooked: set[QueueKey], files: _UnitFiles
    ) -> dict[QueueKey, _Slots]:
        """These queues from the front, record by record, as recovery does it."""
        store = self._store
        placed: dict[QueueKey, _Slots] = {}
        for segment in segments:
            if crooked.isdisjoint(segment.queues()):
                continue
            for event in scan_segment(store._run, segment.segment, segment.start, store.manifest.checksum):
                if not isinstance(event, Good):
                    continue
                rows = rows_of(event.buffer, event.headers, event.base, store.delay_table_ms)
                for topic, queue_id, chosen in rows.by_queue():
                    if (topic, queue_id) in crooked:
                        self._take(placed, topic, queue_id, rows, chosen, files)
        return placed

    def _take(
        self,
        placed: dict[QueueKey, _Slots],
        topic: str,
        queue_id: int,
        rows: Rows,
        chosen: npt.NDArray[np.int64],
        files: _UnitFiles,
    ) -> None:
        offsets, physical = rows.queue_offset[chosen], rows.physical_offset[chosen]
        slots = placed.get((topic, queue_id))
        if slots is None:
            slots = self._begin(topic, queue_id, least_plausible(offsets, physical))
            slots.in_order = True
            placed[topic, queue_id] = slots
        runs, odd = sort_out(slots.next, slots.seen, offsets, physical)
        self._odd += len(odd)
        for low, high in runs:
            first = int(offsets[low])
            if slots.first is None:
                slots.first = first
            elif slots.next is not None and first > slots.next:
                files.void(topic, queue_id, slots.next, first)
                slots.void += first - slots.next
            files.write(topic, queue_id, first, rows.units(chosen[low:high]).tobytes())
            slots.next = first + high - low
        slots.seen = int(physical[-1]) + int(rows.size[chosen[-1]])

    # -- slots that no record tells

    def _finish(self, files: _UnitFiles, topic: str, queue_id: int, slots: _Slots, joined: _Joined) -> RebuiltQueue:
        """Fill what lies before the first record and behind the last, and note which files are other than before."""
        queue = self._store._queues.create(topic, queue_id)
        first, stop, begin = slots.first, slots.next, slots.begin
        if first is None or stop is None:  # no record is of this queue: old files alone tell
            begin, _ = first_slot_in_range(queue, self._log_start, None)
            first = stop = queue.max_offset if begin is None else begin
        end = self._tail(queue, stop)
        low = (first if begin is None else begin) // files.per
        if begin is None:
            files.void(topic, queue_id, low * files.per, first)
        else:
            # Retention took the records of these, but their numbers stay given out.
            files.write(topic, queue_id, low * files.per, queue.read(low * files.per, begin - low * files.per))
            files.void(topic, queue_id, begin, first)
            slots.void += first - begin
        files.void(topic, queue_id, stop, end)
        slots.void += end - stop
        queue.correct_min(self._log_start)
        return RebuiltQueue(
            store=self._work.name.id,
            topic=topic,
            queue_id=queue_id,
            old_min=queue.min_offset,
            old_max=queue.max_offset,
            new_min=end if slots.first is None else first,
            new_max=end,
            changed=self._compare(files, queue, low, joined),
            void=slots.void,
            in_order=slots.in_order,
        )

    def _tail(self, queue: ConsumeQueue, first: int) -> int:
        """Behind the last slot from `first` on whose number was given out to a record of this log: it stays given
        out, though its record is lost."""
        for at, units in queue.chunks(first, queue.max_offset):
            beyond = np.flatnonzero((units["physical_offset"] >= self._end) | (units["size"] <= 0))
            if len(beyond):
                return at + int(beyond[0])
        return max(first, queue.max_offset)

    # -- against what was there

    def _compare(self, files: _UnitFiles, queue: ConsumeQueue, low: int, joined: _Joined) -> int:
        """Note what is to be published: of segments below `low` the old files, from there on the fresh ones where they
        differ; the others go. How many units differ."""
        key = (queue.topic, queue.queue_id)
        in_place = self._work.dest is None
        fresh = files.segments(*key)
        old = [int(name) // self._segment_bytes for name in queue.list_files()]
        changed = 0
        for segment in sorted({*fresh, *old}):
            found = queue.units(segment * files.per, files.per)
            if segment < low:
                if not in_place:
                    files.write(*key, segment * files.per, found.tobytes())
            elif segment in fresh:
                wanted = files.read(*key, segment)
                kept = under_another_table(queue.topic, found, wanted)
                if kept is not wanted:
                    files.write(*key, segment * files.per, kept.tobytes())
                differ = int(np.count_nonzero(found != kept))
                changed += differ
                if in_place and not differ and self._is_whole(files.name(*key, segment)):
                    files.remove(*key, [segment])
            else:
                # Behind the end of the queue: zeros, and never fewer files, as the name of one tells of offsets, too.
                used = int(np.count_nonzero(found != np.zeros(1, UNIT_DTYPE)))
                changed += used
                if used and in_place:
                    files.write(*key, segment * files.per, bytes(UNIT_BYTES))
        for segment in files.segments(*key):
            files.sync(*key, segment)
            joined.queue_files.append(files.name(*key, segment))
        return changed

    def _is_whole(self, name: str) -> bool:
        """Whether the store has that file, at its full length."""
        try:
            return os.path.getsize(Path(self._work.name.path, name)) == self._segment_bytes
        except FileNotFoundError:
            return False

    # -- the index

    def _index_files(self) -> list[_IndexFile]:
        """Entries in log order, by the files they go into."""
        slots, entries = self._store._index.slots, self._store._index.entries_per_file
        files: list[list[_IndexPart]] = []
        room = 0
        for result in self._results:
            start = 0
            while start < result.entries and result.first is not None:
                if not room:
                    files.append([])
                    room = entries - 1  # entry 0 is never used
                stop = min(result.entries, start + room)
                files[-1].append(_IndexPart(str(self._work.spill(result.range, result.first)), start, stop))
                room -= stop - start
                start = stop
        return [
            _IndexFile(str(self._work.index / str(number)), slots, entries, tuple(parts))
            for number, parts in enumerate(files)
        ]


def _build_index(file: _IndexFile) -> None:
    """One index file, synced."""
    length = file_bytes(file.slots, file.capacity)
    REAL.unlink(file.path, missing_ok=True)  # of an attempt that failed
    fd = REAL.open(file.path, os.O_RDWR | os.O_CREAT)
    try:
        REAL.allocate(fd, length)
        buffer = REAL.map(fd, length, writable=True)
        for part in file.parts:
            entries = np.fromfile(part.path, _ENTRY, part.stop - part.start, offset=part.start * _ENTRY.itemsize)
            done = put_entries(
                buffer, file.slots, file.capacity, entries["hash"], entries["physical"], entries["stamp"]
            )
            assert done == part.stop - part.start
        REAL.fdatasync(fd)
    finally:
        REAL.close(fd)


# -- publishing --------------------------------------------------------------------------------------------------------


def _publish(joined: _Joined, fs: FileSystem = REAL) -> RebuiltStore:
    """Put the new files of a store where they belong; its row of the report."""
    work, row = joined.work, joined.row
    if work.dest is not None:
        _move_out(joined, Path(work.dest), fs)
        return row
    if joined.watermark is None:
        return row
    row = replace(row, index_changed="index" in work.what and _index_differs(joined))
    if joined.queue_files or row.index_changed:
        _swap(joined, fs, with_index=row.index_changed)
    return row


def _move_out(joined: _Joined, dest: Path, fs: FileSystem) -> None:
    for kind in sorted(joined.work.what):
        source = joined.work.queues if kind == "queues" else joined.work.index
        if kind == "index":
            for number, name in enumerate(_index_names(len(joined.index), 0)):
                fs.replace(source / str(number), source / name)
        for folder, _, _ in os.walk(source, topdown=False):
            fs.sync_directory(folder)
        fs.replace(source, dest / source.name)
    fs.sync_directory(dest)


def _index_names(count: int, newest: int) -> list[str]:
    """Names of new index files, which sort behind `newest`: local times, as the engine gives them (6)."""
    now = datetime.fromtimestamp(SYSTEM_CLOCK.now_ms() / 1000).strftime("%Y%m%d%H%M%S%f")[:17]
    begin = max(int(now), newest + 1)
    return [f"{begin + number:017d}" for number in range(count)]


def _index_differs(joined: _Joined) -> bool:
    """Whether the store's index is other than the new one, but for the names of its files."""
    with open_store(joined.work.name) as store:
        old = [file.path for file in store._index.files]
        if store._index_findings or len(old) != len(joined.index):
            return True
    return any(
        not np.array_equal(np.memmap(mine, np.uint8, "r"), np.memmap(theirs.path, np.uint8, "r"))
        for mine, theirs in zip(old, joined.index, strict=True)
    )


def _swap(joined: _Joined, fs: FileSystem, *, with_index: bool) -> None:
    """See the module. The lock is held, and all new files are on disk."""
    root = Path(joined.work.name.path)
    assert joined.watermark is not None
    mark = AbortMark(root, fs)
    was_marked = mark.exists()
    checkpoint = CheckpointFile(root, fs, FILE_MODE)
    there = checkpoint.load()
    before = checkpoint.current
    known = joined.log_start if before.dispatched is None else min(before.dispatched, joined.log_start)
    checkpoint.save(replace(before, flushed=joined.watermark, dispatched=known, clean_end=-1))
    if not was_marked:
        mark.set(os.getpid())

    changed: set[Path] = set()
    like = fs.stat(root / "commitlog")
    for name in joined.queue_files:
        target = root / name
        changed |= {target.parent, *_make_folders(target.parent, like, fs)}
        _take_after(Path(joined.work.folder, name), like)
        fs.replace(Path(joined.work.folder, name), target)
    if with_index:
        changed |= {root / "index", *_make_folders(root / "index", like, fs)}
        for file in joined.index:
            _take_after(Path(file.path), like)
        before = replace(before, index_msg_timestamp_ms=_swap_index(joined, root / "index", fs))
    for folder in sorted(changed):
        fs.sync_directory(folder)

    if not was_marked:
        mark.clear()
    if there:
        checkpoint.save(before)
    else:  # whoever opens it next reads the whole log, as he would have
        fs.unlink(checkpoint.path)
        fs.sync_directory(root)


def _take_after(path: Path, like: os.stat_result) -> None:
    """Give a new file or folder the owner and the mode that those of the store have, for who repairs another's."""
    mode = stat.S_IMODE(like.st_mode)
    os.chmod(path, mode if path.is_dir() else mode & 0o666)
    if (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
        with suppress(PermissionError):  # only root may
            os.chown(path, like.st_uid, like.st_gid)


def _make_folders(folder: Path, like: os.stat_result, fs: FileSystem) -> list[Path]:
    """`folder`, and what is missing above it; those whose names have changed."""
    missing = []
    while not fs.exists(folder):
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        fs.mkdir(each)
        _take_after(each, like)
    return [each.parent for each in missing]


def _swap_index(joined: _Joined, folder: Path, fs: FileSystem) -> int:
    """The new files, then the old ones away; the end time of the newest full one, for the checkpoint (7)."""
    old = [name for name in fs.scandir(folder) if len(name) == 17 and name.isascii() and name.isdigit()]
    full_ms = 0
    for file, name in zip(joined.index, _index_names(len(joined.index), int(max(old, default="0"))), strict=True):
        with open(file.path, "rb") as opened:
            header = IndexHeader.decode(opened.read(40))
        if header.next_entry >= file.capacity:
            full_ms = header.end_timestamp_ms
        fs.replace(file.path, folder / name)
    for name in old:
        fs.unlink(folder / name)
    return full_ms
