"""Build consume queues and index anew from the commitlog, in parallel (store-format 4, 6, 9.8; spark.md B8).

    driver        writer locks; ranges of every log                                                         `ranges`
    range task    every record, checksums included: runs of units to their slots in fresh files; index entries aside
    store task    joins the ranges of a store. A record's queue offset says its slot, so most queues are done by now.
                  Those whose records do not follow each other, and those of ranges that did not fit, are built once
                  more from the front, in log order: way `order`. Where that is much of a log, way `shuffle`:
        segment task  their records, in the stretches in which recovery would read them
        queue task    a queue: its stretches as Spark has sorted them, to their slots
    last tasks    of a store: slots that no record tells, before the first and behind the last; comparison with what was
                  there. Beside them, of an index file: all of it, as its hash chains are sequential
    driver        in place: what differs is renamed into the store

All three ways end in the same files: `order` and `shuffle` give the same stretches to the same `Placer`. Ranges write
to a file at different places, the task of a sorted queue has its files for itself; all tasks must see one file system.
What is written is a function of the log, and no task deletes anything, so a task may run twice, even at once.

**In place** the result is what `mqstore recover` would make of queues and index (the rules are its own: `Lives`,
`sort_out`, `first_slot_in_range`), except that nothing is cut and the commitlog is never written. Slots of records that
retention took keep their units, slots of lost ones become void (4.3), and so no queue offset is given out twice (5.4).

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
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from mqstore.clock import SYSTEM_CLOCK
from mqstore.errors import ConfigError
from mqstore.files.abort import AbortMark
from mqstore.files.beneath import resolved
from mqstore.files.filesystem import FILE_MODE, REAL, FileSystem
from mqstore.files.lock import WriterLock, refuse_beside_writer
from mqstore.files.quiet import QUIET
from mqstore.layout.consumequeue import UNIT_BYTES, UNIT_DTYPE, VOID_UNIT
from mqstore.layout.dispatch import Rows
from mqstore.layout.indexfile import IndexHeader, file_bytes, put_entries
from mqstore.log.checkpoint import CheckpointFile
from mqstore.log.consumequeue import ConsumeQueue
from mqstore.log.lives import Lives
from mqstore.log.names import is_path_safe
from mqstore.log.recovery import given_out
from mqstore.log.scanner import End, first_slot_in_range, strays_in_front
from mqstore.log.store import MessageStore
from mqstore.log.txn import IntentWatch
from mqstore.spark.jobs.placing import Placer, Slots, UnitFiles, first_slots, stretches
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
from mqstore.spark.jobs.shape import Plan, Progress, Selection, Shaped, Stores, join, run, tasks_for
from mqstore.spark.jobs.shuffle import Row, shuffle
from mqstore.spark.jobs.verify import plan_verify, whole_stores
from mqstore.spark.plan import StoreName, open_store

__all__ = [
    "QueueWay",
    "RebuildReport",
    "RebuiltQueue",
    "RebuiltStore",
    "Shuffle",
    "Way",
    "plan_rebuild",
    "plan_ways",
    "rebuild",
]

What = Literal["queues", "index"]
Shuffle = Literal["auto", "always", "never"]
"""Which queues Spark sorts: those that would keep one task reading much of a log again; all; none."""
Way = Literal["slots", "order", "shuffle"]
"""How a queue is built. `slots`: each record says its slot, and the range tasks put it there. `order`: its records do
not follow each other, and a task reads them once more in log order. `shuffle`: sorted by Spark, and put by a task that
has this queue alone."""
_WORK = "rebuild"
_ENTRY = np.dtype([("hash", "<i4"), ("physical", "<i8"), ("stamp", "<i8")])
"""An index entry on its way from a range to its file."""
_JOINED_FASTER = 4
"""Times that ranges are joined faster than they are read, at least."""
_UNIT_WEIGHT = 4 * UNIT_BYTES
_ENTRY_WEIGHT = 4 * _ENTRY.itemsize
"""What it takes to finish a unit, and an index entry, in bytes of a log that are read in that time."""
_READ_AGAIN_BYTES = 4 * RANGE_BYTES
"""Of a log, by one task, rather than shuffle: that takes Spark about as long as reading this does."""
_SENT = np.dtype([("slot", "<i8"), ("unit", UNIT_DTYPE)])
_SENT_UNITS = 64
"""In a row. Spark makes batches of so many rows as were small enough before, so none should be much larger."""


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
    way: Way
    """How it was built; the same files come of every way."""


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
class QueueWay(Shaped):
    """How `rebuild` would build a queue."""

    store: str
    topic: str
    queue_id: int
    way: Way


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
    shuffle: Shuffle = "auto",
    range_bytes: int = RANGE_BYTES,
    progress: Progress | None = None,
) -> RebuildReport:
    """Build `what` of `stores` anew from their logs, in place or below `dest`.

    `spark`: a session, or None to do it here. In place the stores are locked for as long as it takes: StoreLockedError,
    naming the process, while a writer has one open; nothing was changed then. `dest` must be empty or missing; with
    several stores each gets a folder named like its own. `shuffle` needs a session to be "always", and changes nothing
    of what is built. Raises ConfigError, and what reading and writing raises, in place leaving each store as it was or
    as it shall be. spark.md B7, B8.
    """
    _, names, asked = _checked(stores, what, dest)
    sorting = _checked_shuffle(shuffle, with_spark=spark is not None)
    with ExitStack() as held:
        works = [_prepare(name, asked, dest, sorting, len(names) > 1, held) for name in names]
        found = _read_ranges(spark, works, range_bytes, progress)
        joins = bundles((_Joining(work, found[work.name]) for work in works), tasks_for(spark))
        joined = join(spark, joins, _join, "mqstore rebuild: stores")
        _sort_queues(spark, joined)
        joined = _finish(spark, joined)
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


def plan_ways(
    stores: Stores | Selection,
    *,
    shuffle: Shuffle = "auto",
    with_spark: bool = True,
    range_bytes: int = RANGE_BYTES,
    progress: Progress | None = None,
) -> tuple[QueueWay, ...]:
    """Which way `rebuild` would go with each queue that has records. Only the logs tell, so they are read, here; writes
    nothing and takes no lock."""
    sorting = _checked_shuffle(shuffle, with_spark=with_spark)
    works = [_Work(name, "", frozenset(), None, *sorting) for name in whole_stores(stores, "rebuild").stores()]
    found = _read_ranges(None, works, range_bytes, progress)
    ways = []
    for work in works:
        with open_store(work.name) as store:
            store._queues.load(exact=True)
            joiner = _Joiner(store, _Joining(work, found[work.name]))
            joiner.stitch()
            straight, others = joiner.sort_out()
            other: Way = "shuffle" if joiner.to_shuffle(others) else "order"
            for key in sorted({*straight, *others}):
                ways.append(QueueWay(work.name.id, *key, way="slots" if key in straight else other))
    return tuple(ways)


def _checked_shuffle(shuffle: Shuffle, *, with_spark: bool) -> tuple[Shuffle, int]:
    if shuffle not in get_args(Shuffle):
        raise ConfigError(f"shuffle={shuffle!r} is none of 'auto', 'always', 'never'")
    if shuffle == "always" and not with_spark:
        raise ConfigError("shuffle='always' needs a Spark session: without one there is nothing to carry")
    return (shuffle if with_spark else "never"), _READ_AGAIN_BYTES


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
    shuffle: Shuffle
    read_again_bytes: int
    """As `_READ_AGAIN_BYTES`."""

    @property
    def queues(self) -> Path:
        return Path(self.folder, "consumequeue")

    @property
    def sorted(self) -> Path:
        """Where queues are built that are not built by ranges: what a range wrote of one may be wrong, and a range task
        that Spark has given up may write it once more."""
        return Path(self.folder, "sorted")

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
    name: StoreName,
    what: frozenset[str],
    dest: str | os.PathLike[str] | None,
    sorting: tuple[Shuffle, int],
    several: bool,
    held: ExitStack,
) -> _Work:
    """Lock the store, unless it stays as it is, and make an empty folder to work in, which goes in the end."""
    if dest is None:
        lock = WriterLock(name.path, "mqstore rebuild")
        held.callback(lock.release)
        lock.acquire()
        target, root = None, Path(resolved(name.path))
        shutil.rmtree(root / _WORK, ignore_errors=True)  # of one that was killed
    else:
        root = Path(resolved(dest))
        if several:
            root /= os.path.basename(os.path.normpath(name.path))
        target = str(root)
    folder = root / _WORK / secrets.token_hex(4)
    for each in ("consumequeue", "sorted", "entries", "index"):
        (folder / each).mkdir(parents=True)
    held.callback(shutil.rmtree, root / _WORK, ignore_errors=True)
    return _Work(name, str(folder), what, target, *sorting)


# -- ranges ------------------------------------------------------------------------------------------------------------


def _read_ranges(
    spark: object, works: Sequence[_Work], range_bytes: int, progress: Progress | None
) -> dict[StoreName, list[RangeResult]]:
    ranges: list[_Piece] = []
    for work in works:
        with open_store(work.name) as store:
            ranges += [_Piece(work, each) for each in cut_ranges(store, work.name, range_bytes)]
    tasks = bundles(ranges, tasks_for(spark), range_bytes)
    found: dict[StoreName, list[RangeResult]] = {work.name: [] for work in works}
    for outcome in run(spark, tasks, _build_ranges, progress, "mqstore rebuild: ranges"):
        for result in outcome:
            found[result.range.store].append(result)
    return found


def _build_ranges(task: Sequence[_Piece]) -> list[RangeResult]:
    for piece in task:
        _check_folder(piece.work)
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


def _check_folder(work: _Work) -> None:
    """ConfigError on a machine that does not see where the driver works."""
    if work.what and not os.path.isdir(work.folder):
        raise ConfigError(
            f"{work.folder} is not there on {socket.gethostname()}: rebuild needs a file system that the driver and "
            "all executors see under the same path and write to; with --master local[*] it runs on one machine"
        )


def _build_range(store: MessageStore, work: _Work, piece: LogRange, start: int | None = None) -> RangeResult | None:
    """Units of straight runs to their slots, entries to a file of the range."""
    in_slots = "queues" in work.what and work.shuffle != "always"
    runs: dict[QueueKey, list[bytes]] = {}
    entries: list[npt.NDArray[np.void]] = []

    def take_run(topic: str, queue_id: int, first: int, units: npt.NDArray[np.void]) -> tuple[()]:
        del first
        if in_slots:
            runs.setdefault((topic, queue_id), []).append(units.tobytes())
        return ()

    def take_rows(rows: Rows) -> None:
        if "index" in work.what and len(rows.entry_row):
            entries.append(_entries_of(rows))

    result = read_range(store, piece, take_run=take_run, take_rows=take_rows, start=start)
    if result is None:
        return None
    with UnitFiles(work.queues, store.manifest.consumequeue_segment_bytes) as files:
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
    store: StoreName
    path: str
    slots: int
    capacity: int
    parts: tuple[_IndexPart, ...]

    @property
    def weight(self) -> int:
        return sum(part.stop - part.start for part in self.parts) * _ENTRY_WEIGHT


@dataclass(slots=True)
class _Joined:
    work: _Work
    row: RebuiltStore
    queues: list[RebuiltQueue] = field(default_factory=list)
    index: list[_IndexFile] = field(default_factory=list)
    watermark: int | None = None
    """F; None for an empty log, which leaves nothing to do."""
    log_start: int = 0
    log_end: int = 0
    queue_files: list[tuple[str, str]] = field(default_factory=list)
    """New ones that are to be published, and their paths below the store."""
    apart: frozenset[QueueKey] = frozenset()
    """Queues of which nothing counts that ranges wrote: their files are made in `sorted`."""
    placed: dict[QueueKey, tuple[Way, Slots]] = field(default_factory=dict)
    """Queues whose records are in their slots."""
    unsorted: list[QueueKey] = field(default_factory=list)
    """Queues that wait for Spark to sort them, and"""
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    """(start, where a scan of the log enters it, bytes) of those that have records of them."""

    @property
    def store(self) -> StoreName:
        return self.work.name

    @property
    def weight(self) -> int:
        return sum((slots.next or 0) - (slots.first or 0) for _, slots in self.placed.values()) * _UNIT_WEIGHT


def _is_usable(key: QueueKey) -> bool:
    return key[1] >= 0 and is_path_safe(key[0])


def _join(jobs: Sequence[_Joining]) -> list[_Joined]:
    joined = []
    for job in jobs:
        with open_store(job.store) as store:
            store._queues.load(exact=True)
            joined.append(_Joiner(store, job).join())
    return joined


def _finish(spark: Any, joined: Sequence[_Joined]) -> list[_Joined]:
    """The same, with all files of queues and index made."""
    files = [file for each in joined for file in each.index]
    number = tasks_for(spark)
    tasks: list[Sequence[_IndexFile | _Joined]] = [*bundles(joined, number), *bundles(files, number)]
    outcomes = run(spark, tasks, _finish_some, title="mqstore rebuild: queues and index")
    return [each for task in outcomes for each in task]


def _finish_some(jobs: Sequence[_IndexFile | _Joined]) -> list[_Joined]:
    for job in jobs:
        if isinstance(job, _IndexFile):
            _build_index(job)
            continue
        with open_store(job.store) as store:
            store._queues.load(exact=True)
            _Finisher(store, job).finish()
    return [job for job in jobs if isinstance(job, _Joined)]


class _Joiner:
    """What the ranges of a store come to, and its queues, but for those that are left for the shuffle."""

    def __init__(self, store: MessageStore, job: _Joining) -> None:
        self._store = store
        self._work = job.work
        self._log_start = store._run.min_offset
        self._stitcher = Stitcher(store, job.work.name, job.results, partial(_build_range, store, job.work))
        self._segments: list[SegmentParts] = []
        self._results: list[RangeResult] = []
        self._bad = 0
        self._end = 0

    def join(self) -> _Joined:
        store, work = self._store, self._work
        _check_folder(work)
        if store._run.starts:
            self.stitch()
        joined = _Joined(work, self._row(), log_start=self._log_start, log_end=self._end)
        if not store._run.starts:
            return joined
        joined.watermark = store.watermark()
        if "index" in work.what:
            joined.index = self._index_files()
            joined.row = replace(
                joined.row,
                index_files=len(joined.index),
                index_entries=sum(result.entries for result in self._results),
            )
        if "queues" in work.what:
            self._place(joined)
        return joined

    def stitch(self) -> None:
        """Read again what did not fit together."""
        for event in self._stitcher.events():
            if isinstance(event, SegmentParts):
                self._segments.append(event)
                self._results += event.results
            elif isinstance(event, End):
                self._end = event.position
            else:
                self._bad += 1

    def _row(self) -> RebuiltStore:
        return RebuiltStore(
            store=self._work.name.id,
            messages=sum(result.records for result in self._results),
            bad_stretches=self._bad,
            odd_records=0,
            queues=0,
            changed_queues=0,
            changed_units=0,
            index_files=0,
            index_entries=0,
            index_changed=False,
        )

    # -- slots that records tell

    def sort_out(self) -> tuple[dict[QueueKey, Slots], set[QueueKey]]:
        """(queues whose records simply follow each other, and so are in their slots; the others)."""
        parts: dict[QueueKey, list[QueuePart]] = {}
        for segment in self._segments:
            for key, found in segment.queues().items():
                if _is_usable(key):
                    parts.setdefault(key, []).extend(found)
        if self._work.shuffle == "always":
            return {}, {*parts}
        doubted = self._doubted()
        lives = Lives(self._store._run, self._store.manifest.checksum)
        straight: dict[QueueKey, Slots] = {}
        for key, found in parts.items():
            first = found[0]
            if key in doubted or lives.is_in_doubt(self._store._queues.create(*key), first.first, first.first_physical):
                continue  # ranges have put what may be of a topic that was deleted since
            slots = first_slots(self._store, self._log_start, key, first.first)
            if is_straight(found) and slots.next in (None, first.first):
                slots.first, slots.next, slots.seen = first.first, found[-1].stop, found[-1].last_end
                straight[key] = slots
        return straight, parts.keys() - straight.keys()

    def _doubted(self) -> set[QueueKey]:
        """Queues that ranges have written to which do not count."""
        return {key for result in self._stitcher.discarded for key in result.queues}

    def _segments_of(self, queues: set[QueueKey]) -> list[tuple[int, int, int]]:
        return [
            (each.segment.start, each.start, min(each.segment.end, self._end) - each.segment.start)
            for each in self._segments
            if not queues.isdisjoint(each.queues())
        ]

    def to_shuffle(self, queues: set[QueueKey]) -> bool:
        """Whether these are for Spark to sort."""
        if self._work.shuffle != "auto":
            return self._work.shuffle == "always"
        sizes = [size for _, _, size in self._segments_of(queues)]
        return len(sizes) > 1 and sum(sizes) > self._work.read_again_bytes

    def _place(self, joined: _Joined) -> None:
        straight, others = self.sort_out()
        joined.placed = {key: ("slots", slots) for key, slots in straight.items()}
        joined.apart = frozenset(others | {key for key in self._doubted() if _is_usable(key)})
        segments = self._segments_of(others)
        if self.to_shuffle(others):
            joined.unsorted, joined.segments = sorted(others), segments
            return
        with UnitFiles(self._work.sorted, self._store.manifest.consumequeue_segment_bytes) as files:
            placer = Placer(self._store, self._log_start, files)
            for base, start, _ in segments:
                for stretch in stretches(self._store, base, start, self._end, others):
                    placer.take(*stretch)
        joined.placed |= {key: ("order", slots) for key, slots in placer.placed.items()}

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
            _IndexFile(self._work.name, str(self._work.index / str(number)), slots, entries, tuple(parts))
            for number, parts in enumerate(files)
        ]


class _Finisher:
    """The rest of a store's queues: slots that no record tells, and which files are other than before."""

    def __init__(self, store: MessageStore, joined: _Joined) -> None:
        self._store = store
        self._work = joined.work
        self._joined = joined
        self._segment_bytes = store.manifest.consumequeue_segment_bytes

    def finish(self) -> None:
        joined = self._joined
        if joined.watermark is None or "queues" not in self._work.what:
            return
        for queue in self._store._queues:
            key = (queue.topic, queue.queue_id)
            if key not in joined.placed:  # only old files know it
                joined.placed[key] = "slots", first_slots(self._store, joined.log_start, key, None)
        with (
            UnitFiles(self._work.queues, self._segment_bytes) as ours,
            UnitFiles(self._work.sorted, self._segment_bytes) as theirs,
        ):
            built: list[tuple[UnitFiles, QueueKey, list[int]]] = []
            for key, (way, slots) in sorted(joined.placed.items()):
                files = theirs if key in joined.apart else ours
                row, fresh = self._finish(files, *key, way, slots)
                joined.queues.append(row)
                built.append((files, key, fresh))
            for files, key, fresh in built:  # all of them are on their way to the disk by now
                for segment in fresh:
                    files.sync(*key, segment)
                    joined.queue_files.append((str(files.path(*key, segment)), files.name(*key, segment)))
        joined.row = replace(
            joined.row,
            odd_records=sum(slots.odd for _, slots in joined.placed.values()),
            queues=len(joined.queues),
            changed_queues=sum(1 for queue in joined.queues if queue.changed),
            changed_units=sum(queue.changed for queue in joined.queues),
        )
        joined.placed = {}

    def _finish(
        self, files: UnitFiles, topic: str, queue_id: int, way: Way, slots: Slots
    ) -> tuple[RebuiltQueue, list[int]]:
        """Fill what lies before the first record and behind the last. The queue's row, and which of its files are
        other than before."""
        queue = self._store._queues.create(topic, queue_id)
        first, stop, begin = slots.first, slots.next, slots.begin
        seen = slots.seen
        if first is None or stop is None:  # no record is of this queue: old files alone tell
            begin, seen = first_slot_in_range(queue, self._joined.log_start, None)
            first = stop = queue.max_offset if begin is None else begin
        end = given_out(queue, stop, seen, self._joined.log_end)
        front = first if begin is None else begin
        low = front // files.per
        # Retention took the records of what is in front, but their numbers stay given out.
        strays = [*strays_in_front(queue, front, self._joined.log_start)]
        below = {segment for at, behind in strays for segment in range(at // files.per, -(-behind // files.per))}
        for segment in sorted(each for each in below if each < low):
            files.write(topic, queue_id, segment * files.per, _kept(queue, segment * files.per, files.per, strays))
        if begin is None:
            files.void(topic, queue_id, low * files.per, first)
        else:
            files.write(topic, queue_id, low * files.per, _kept(queue, low * files.per, begin % files.per, strays))
            files.void(topic, queue_id, begin, first)
            slots.void += first - begin
        files.void(topic, queue_id, stop, end)
        slots.void += end - stop
        queue.correct_min(self._joined.log_start)
        changed, fresh = self._compare(files, queue, low)
        row = RebuiltQueue(
            store=self._work.name.id,
            topic=topic,
            queue_id=queue_id,
            old_min=queue.min_offset,
            old_max=queue.max_offset,
            new_min=end if slots.first is None else first,
            new_max=end,
            changed=changed,
            void=slots.void,
            way=way,
        )
        return row, fresh

    # -- against what was there

    def _compare(self, files: UnitFiles, queue: ConsumeQueue, low: int) -> tuple[int, list[int]]:
        """How many units differ; and what is to be published: of segments below `low` the old files, where there is no
        fresh one, and from there on the fresh ones where they differ. The others go."""
        key = (queue.topic, queue.queue_id)
        in_place = self._work.dest is None
        fresh = files.segments(*key)
        old = [int(name) // self._segment_bytes for name in queue.list_files()]
        same: set[int] = set()
        changed = 0
        for segment in sorted({*fresh, *old}):
            found = queue.units(segment * files.per, files.per)
            if segment < low and segment not in fresh:
                if not in_place:
                    files.write(*key, segment * files.per, found.tobytes())
            elif segment in fresh:
                wanted = files.read(*key, segment)
                kept = queue.as_kept(found, wanted)
                if kept is not wanted:
                    files.write(*key, segment * files.per, kept.tobytes())
                differ = int(np.count_nonzero(found != kept))
                changed += differ
                if in_place and not differ and self._is_whole(files.name(*key, segment)):
                    same.add(segment)  # and left there: this task may run twice
            else:
                # Behind the end of the queue: zeros, and never fewer files, as the name of one tells of offsets, too.
                used = int(np.count_nonzero(found != np.zeros(1, UNIT_DTYPE)))
                changed += used
                if used and in_place:
                    files.write(*key, segment * files.per, bytes(UNIT_BYTES))
        wanted_files = [segment for segment in files.segments(*key) if segment not in same]
        for segment in wanted_files:
            files.write_back(*key, segment)
        return changed, wanted_files

    def _is_whole(self, name: str) -> bool:
        """Whether the store has that file, at its full length."""
        try:
            return os.path.getsize(Path(self._work.name.path, name)) == self._segment_bytes
        except FileNotFoundError:
            return False


def _kept(queue: ConsumeQueue, first: int, count: int, strays: Sequence[tuple[int, int]]) -> bytes:
    """Units of a queue as they are, but for `strays`, which become void."""
    units = bytearray(queue.read(first, count))
    for low, high in strays:
        low, high = max(low - first, 0), min(high - first, count)
        if low < high:
            units[low * UNIT_BYTES : high * UNIT_BYTES] = VOID_UNIT * (high - low)
    return bytes(units)


# -- queues that Spark sorts -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sorting:
    """A store's queues that are to be sorted, by the keys of their rows; and one segment, in a task that reads it."""

    work: _Work
    numbers: Mapping[QueueKey, int]
    log_start: int
    log_end: int


@dataclass(frozen=True, slots=True)
class _Segment:
    sorting: int
    """Which of those of the job."""
    store: StoreName
    base: int
    start: int
    weight: int


def _sort_queues(spark: Any, joined: Sequence[_Joined]) -> None:
    """Let Spark sort what is unsorted, and put it into its slots."""
    jobs: list[_Sorting] = []
    owners: list[tuple[_Joined, QueueKey]] = []
    pieces: list[_Segment] = []
    for each in joined:
        if each.unsorted:
            pieces += [_Segment(len(jobs), each.store, *segment) for segment in each.segments]
            numbers = {key: len(owners) + i for i, key in enumerate(each.unsorted)}
            jobs.append(_Sorting(each.work, numbers, each.log_start, each.log_end))
            owners += [(each, key) for key in each.unsorted]
    if not jobs:
        return
    sorted_queues = shuffle(
        spark,
        bundles(pieces, tasks_for(spark)),
        partial(_scatter, jobs),
        partial(_gather, jobs),
        len(owners),
        "mqstore rebuild: queues, sorted",
    )
    for number, slots in sorted_queues:
        each, key = owners[number]
        each.placed[key] = "shuffle", slots


def _scatter(jobs: Sequence[_Sorting], pieces: Sequence[_Segment]) -> Iterator[Row]:
    """The records of queues that are to be sorted, a row for some of them: the last of a stretch begins with 1."""
    for piece in pieces:
        job = jobs[piece.sorting]
        with open_store(piece.store) as store:
            for key, offsets, units in stretches(store, piece.base, piece.start, job.log_end, job.numbers):
                sent = np.empty(len(units), _SENT)
                sent["slot"], sent["unit"] = offsets, units
                for at in range(0, len(sent), _SENT_UNITS):
                    data = sent[at : at + _SENT_UNITS].tobytes()
                    last = at + _SENT_UNITS >= len(sent)
                    yield job.numbers[key], int(units["physical_offset"][at]), (b"\1" if last else b"\0") + data


def _gather(jobs: Sequence[_Sorting], rows: Iterator[Row]) -> Iterator[tuple[int, Slots]]:
    """Rows to slots. Keys are numbered store by store, so each store is opened once."""
    keys = [(at, key) for at, job in enumerate(jobs) for key in job.numbers]
    for at, of_store in groupby(rows, key=lambda row: keys[row[0]][0]):
        job = jobs[at]
        _check_folder(job.work)
        with (
            open_store(job.work.name) as store,
            UnitFiles(job.work.sorted, store.manifest.consumequeue_segment_bytes) as files,
        ):
            store._queues.load(exact=True)
            placer = Placer(store, job.log_start, files)
            held: list[bytes] = []
            for number, _, data in of_store:
                held.append(data[1:])
                if data[0]:
                    sent = np.frombuffer(b"".join(held), _SENT)
                    placer.take(keys[number][1], sent["slot"].astype(np.int64), sent["unit"])
                    held = []
            assert not held
            for key, slots in placer.placed.items():
                yield job.numbers[key], slots


# -- index files -------------------------------------------------------------------------------------------------------


def _build_index(file: _IndexFile) -> None:
    """One index file, synced."""
    length = file_bytes(file.slots, file.capacity)
    path = Path(file.path)
    temporary = path.parent.parent / "entries" / f"index-{path.name}.{secrets.token_hex(4)}"
    fd = REAL.open(temporary, os.O_RDWR | os.O_CREAT)
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
    REAL.replace(temporary, path)  # whole, whoever else builds it: a task may run twice, even at once


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
        else:
            for topic, queue_id in sorted(joined.apart):
                _replace_queue(joined.work.sorted / topic / str(queue_id), source / topic / str(queue_id), fs)
        for folder, _, _ in os.walk(source, topdown=False):
            fs.sync_directory(folder)
        fs.replace(source, dest / source.name)
    fs.sync_directory(dest)


def _replace_queue(source: Path, target: Path, fs: FileSystem) -> None:
    shutil.rmtree(target, ignore_errors=True)
    if source.is_dir():
        target.parent.mkdir(exist_ok=True)
        fs.replace(source, target)
    else:
        with suppress(OSError):  # other queues of the topic are there
            target.parent.rmdir()


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
    for file, name in joined.queue_files:
        target = root / name
        changed |= {target.parent, *_make_folders(target.parent, like, fs)}
        _take_after(Path(file), like)
        fs.replace(file, target)
    if with_index:
        changed |= {root / "index", *_make_folders(root / "index", like, fs)}
        for each in joined.index:
            _take_after(Path(each.path), like)
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
