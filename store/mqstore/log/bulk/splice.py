"""Appending staged shards to the log in bulk, all of them or none, and each once (spark#splice).

    step                          log                 config/spark/txn.json      a crash right after it leaves
    1 check every shard           ends at S           no intent                  nothing
    2 hold puts, write intent     "                   intent, start S            an empty intent: cleared
    3 copy, roll                  S, bytes beyond     "                          half: cut back to S
    4 sync the log                "                   "                          whole, but not recorded: cut back to S
    5 record app and version *    "                   no intent, app: version    all of it
    6 move the end, let puts in   ends at E                                      all of it

Until step 6 the end of the log does not move, and with it neither dispatch, nor retention, nor the watermarks of the
checkpoint: to everybody else the records are not there. Puts of other threads wait meanwhile, so nothing but this
splice can lie beyond S, and cutting back takes nobody's message away. Step 5 is one rename, made durable; step 4 comes
before it, so that what is recorded is on disk. * Of a splice that nobody will repeat only the intent is cleared: its
application would take room in the table from those that are asked for again.

What fails before step 5 is undone at once: zeros from S on, segments beyond removed, intent cleared, numbers never
given out. Where even that fails, and whenever a sync fails (format#flush), the store takes no more puts until it
is opened anew, and opening undoes it (`undo`). A second splice of the same (app, version), or of an older one, writes
nothing.

All records of a splice bear one store time, that of its intent, as those of a batch do (format#batch): it tells
them from whatever else might stand beyond S. Numbers, places, times and checksums are put into a window of 8 MiB at a
time with numpy; a thread of its own writes them while the next window is made.
"""

from __future__ import annotations

import logging
import queue
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from mqstore.errors import ConfigError, FlushFailedError, FormatError, MQStoreError, StoreBusyError, StoreClosedError
from mqstore.files.filesystem import FileSystem
from mqstore.files.segment import place_in_file
from mqstore.files.segments import SegmentRun
from mqstore.files.segmentwriter import SegmentWriter
from mqstore.layout.hosts import IPV4_BYTES
from mqstore.layout.record import (
    BLANK_BYTES,
    CHECKSUM_AT,
    QUEUE_OFFSET_AT,
    STORE_TIMESTAMP_AT_V4,
    Checksum,
    encode_blank,
)
from mqstore.log.bulk.shard import Groups, Limits, QueueKey, Shard, Window, by_queue
from mqstore.log.bulk.txn import TXN_FILE, Intent, TxnFile, TxnState, doubt, is_app
from mqstore.log.commitlog import CommitLog
from mqstore.log.consumequeue import ConsumeQueue
from mqstore.log.parts import StoreParts
from mqstore.log.recovery.report import Cut, Finding
from mqstore.log.recovery.scanner import used_end
from mqstore.native import kernel

__all__ = ["SpliceResult", "Splicer", "Undone", "undo", "would_undo"]

_log = logging.getLogger("mqstore")
_BUFFERS = 4
"""Windows in memory: one being read, one being made, one waiting, one being written."""
_REMEMBERED = 8 << 20
"""Records whose queue is kept from check to copy, two bytes each."""

Checked = tuple[Shard, list[Groups] | None]
"""A shard, and what its check remembers of it."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all): every byte counts twice, once checked and once copied."""


@dataclass(frozen=True, slots=True)
class SpliceResult:
    """What became of a splice. `already`: its version, or a later one of its application, was in; nothing was done.

    Offsets: `first_offset` and `end_offset` physical, `offsets` (start, stop) of each queue that got records.
    """

    already: bool
    first_offset: int
    end_offset: int
    records: int
    offsets: Mapping[QueueKey, tuple[int, int]]


class Splicer:
    """The splicing half of `MessageStore`; one splice at a time.

    `queue_of(topic, queue id)`: the queue to put to. `sync(end)`: make the log durable up to `end`, beyond its end as
    puts know it. `poison(error)`: take no more puts. `stopping()`: whether the store is being closed.
    """

    def __init__(
        self,
        parts: StoreParts,
        txn: TxnFile,
        log: CommitLog,
        *,
        queue_of: Callable[[str, int], ConsumeQueue],
        sync: Callable[[int], None],
        poison: Callable[[MQStoreError], None],
        stopping: Callable[[], bool],
    ) -> None:
        self.txn = txn
        self.lock = threading.RLock()
        """Held during a splice: closing the store waits for it."""
        self._run = log.run
        self._log = log
        manifest = parts.manifest
        self._limits = Limits(manifest.profile, manifest.commitlog_segment_bytes, parts.config.max_message_size)
        self._checksum, self._clock, self._fs = parts.checksum, parts.clock, parts.fs
        self._queue_of = queue_of
        self._sync = sync
        self._poison = poison
        self._stopping = stopping
        self.is_busy = False

    def splice(
        self,
        shards: Sequence[Path],
        *,
        app: str,
        version: int,
        progress: Progress | None = None,
        create: Mapping[str, int] | None = None,
        remembered: bool = True,
    ) -> SpliceResult:
        """As `MessageStore.splice`. `create`: topics with their queues to be noted for a broker to come.

        StoreBusyError for one that `progress`, or a signal handler, asks for in the middle of another: it would find
        the version of that one not yet recorded, and in the end let in the puts that it holds.
        """
        if not is_app(app):
            raise ConfigError(f"app must be a text of 1..255 bytes, not {app!r:.80}")
        if type(version) is not int or not 0 <= version < 1 << 63:
            raise ConfigError(f"version must be an integer from 0 on, not {version!r:.80}")
        with self.lock:
            if self.is_busy:  # of this thread, or the lock would not have let us in
                raise StoreBusyError("splice within a splice of the same thread; do it later")
            try:
                self.is_busy = True
                return self._splice(shards, app, version, progress, create or {}, remembered)
            finally:
                self.is_busy = False

    def _splice(
        self,
        shards: Sequence[Path],
        app: str,
        version: int,
        progress: Progress | None,
        create: Mapping[str, int],
        remembered: bool,
    ) -> SpliceResult:
        self._stop()
        if version <= self.txn.state.version_of(app):
            return SpliceResult(True, self._log.end, self._log.end, 0, {})
        found = [Shard.load(Path(shard), self._limits, self._fs) for shard in shards]
        if not remembered and not any(shard.records for shard in found):
            return SpliceResult(False, self._log.end, self._log.end, 0, {})
        work = _Progress(progress, 2 * sum(shard.bytes for shard in found), self._stop)
        checked = []
        left = _REMEMBERED
        for shard in found:
            checked.append((shard, shard.check(work.add, left)))
            left -= shard.records
        return self._run_all(checked, app, version, work, create, remembered)

    def _stop(self) -> None:
        if self._stopping():
            raise StoreClosedError("the store is being closed: splice again once it is open")

    # -- the protocol -----------------------------------------------------------------------------------------------

    def _run_all(
        self,
        shards: list[Checked],
        app: str,
        version: int,
        work: _Progress,
        create: Mapping[str, int],
        remembered: bool,
    ) -> SpliceResult:
        before = self.txn.state
        queues = {key: self._queue_of(*key) for shard, _ in shards for key, count in shard.queues.items() if count}
        end: int | None = None
        recording = False
        try:
            start = self._log.hold()  # in here: Ctrl-C right behind it must not leave puts waiting
            numbers = {key: queue.next_offset for key, queue in queues.items()}
            stamp_ms = self._clock.now_ms()
            intent = Intent(app, version, start, stamp_ms, numbers)
            cleared = replace(before, intent=None)
            recorded = cleared.recorded(app, version, stamp_ms, create) if remembered else cleared
            try:
                if queues:
                    self.txn.save(replace(before, intent=intent))
                copied, stops = self._copy(shards, start, numbers, stamp_ms, work)
                if queues:
                    self._sync(copied)
                self._stop()
                recording = True  # before it the file may say the same, if this splice is not to be remembered
                self.txn.save(recorded)
            except BaseException as error:
                if not (recording and self._is_recorded(recorded, error)):
                    self._take_back(before, start, error)
                    raise
                # Ctrl-C came behind the last step: it is in, and the error goes up all the same.
                end = self._publish(queues, stops, copied)
                raise
            end = self._publish(queues, stops, copied)
        finally:
            self._let_puts_in(end)
        records = sum(shard.records for shard, _ in shards)
        return SpliceResult(False, start, end, records, {key: (numbers[key], stops[key]) for key in queues})

    def _is_recorded(self, recorded: TxnState, error: BaseException) -> bool:
        """Whether step 5 was done although it, or what came around it, raised `error`. FlushFailedError where that is
        not known."""
        if self.txn.state is recorded:
            return True
        try:
            renamed = self.txn.on_disk() == recorded
        except Exception:
            renamed = True  # not known
        if renamed:
            # The rename was made but perhaps not durable: neither taking back nor going on would be safe.
            unknown = FlushFailedError(
                f"{self.txn.path}: a splice was recorded, but not known to be on disk ({error}); close the store "
                "and open it again"
            )
            self._poison(unknown)
            if isinstance(error, Exception):
                raise unknown from error  # not `error`: that would say that nothing was done
        return False

    def _publish(self, queues: Mapping[QueueKey, ConsumeQueue], stops: Mapping[QueueKey, int], end: int) -> int:
        def move() -> None:
            for key, each in queues.items():
                each.next_offset = stops[key]

        try:
            move()
        except BaseException:  # Ctrl-C in between: all of it or none, and none is no longer possible
            move()
            raise
        return end

    def _let_puts_in(self, end: int | None) -> None:
        try:
            self._log.release(end)
        except BaseException:  # Ctrl-C: whoever waits must not wait for ever
            self._log.release(end)
            raise

    # -- taking back ------------------------------------------------------------------------------------------------

    def _take_back(self, before: TxnState, start: int, error: BaseException) -> None:
        """Make everything as it was. Where that cannot be done, the store is poisoned: opening it will."""
        if self._log.failed is not None and not isinstance(self._log.failed, StoreClosedError):
            return  # a sync failed: what the disk holds is not known
        try:
            _cut_back(self._run, start)
            self._restore(before)
        except BaseException as worse:
            self._poison(
                FlushFailedError(
                    f"a splice failed ({error}) and could not be taken back ({worse}); close the store and open it "
                    "again, which does so"
                )
            )
            if not isinstance(worse, Exception):
                raise

    def _restore(self, before: TxnState) -> None:
        """Clear the intent. If there is no room for a new file, the backup made by the intent says the same."""
        if self.txn.on_disk() == before:
            self.txn.state = before
            return
        try:
            self.txn.save(before)
        except OSError:
            backup = f"{self.txn.path}.bak"
            self._fs.replace(backup, self.txn.path)
            self._fs.sync_directory(self.txn.path.parent)
            if self.txn.on_disk() != before:
                raise
            self.txn.state = before

    # -- copying ----------------------------------------------------------------------------------------------------

    def _copy(
        self, shards: list[Checked], start: int, numbers: Mapping[QueueKey, int], stamp_ms: int, work: _Progress
    ) -> tuple[int, dict[QueueKey, int]]:
        """Lay the records of `shards` into the log from `start` on; (where they end, the next number of each queue)."""
        stops = dict(numbers)
        laid = 0  # of the last window, which is not told of before it is written
        sink = _Sink(self._run, start)
        try:
            for shard, groups in shards:
                known = iter(groups or ())
                for window in shard.windows(sink.take):
                    offsets = _numbers_of(window, next(known, None), stops, shard)
                    pieces, places = sink.lay(window.headers.size)
                    _patch(window, offsets, places, stamp_ms, self._checksum)
                    sink.put(window, pieces)
                    work.add(laid)
                    laid = window.stop
            sink.finish()
            work.add(laid)
        finally:
            sink.close()
        return sink.end, stops


class _Progress:
    """Bytes done, told to whoever asked; and the moment to give up when the store is being closed."""

    def __init__(self, tell: Progress | None, total: int, stop: Callable[[], None]) -> None:
        self._tell = tell
        self._total = total
        self._stop = stop
        self._done = 0

    def add(self, count: int) -> None:
        self._done += count
        self._stop()
        if self._tell is not None:
            self._tell(self._done, self._total)


# -- a window ----------------------------------------------------------------------------------------------------------


def _numbers_of(
    window: Window, known: Groups | None, stops: dict[QueueKey, int], shard: Shard
) -> npt.NDArray[np.int64]:
    """The queue offset of each record, counted on in `stops`. FormatError for what the check did not see; a change that
    is not seen here will be seen by the CRC of the whole."""
    keys, group, counts = known or by_queue(window)
    same = len(group) == len(window.headers) and int(window.headers.size.max()) <= shard.largest
    if not same or any(key not in stops for key in keys):
        raise FormatError(f"{shard.file}: it has changed since it was checked", "record", 0)
    firsts = np.array([stops[key] for key in keys], np.int64)
    for key, count in zip(keys, counts.tolist(), strict=True):
        stops[key] += count
    if len(keys) == 1:
        return np.arange(firsts[0], firsts[0] + len(group))
    order = np.argsort(group, kind="stable")
    within = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = np.empty(len(group), np.int64)
    offsets[order] = within
    offsets += firsts[group]
    return offsets


def _patch(
    window: Window,
    offsets: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64],
    stamp_ms: int,
    checksum: Checksum,
) -> None:
    """Write into the records what only the log knows: numbers, places, the time, and at last the checksums."""
    data, headers = window.data, window.headers
    positions = headers.positions
    if kernel is not None and checksum == "crc32c-record":
        kernel.renumber(data, positions, offsets, places, stamp_ms)
        return
    moved = headers.born_host_size - IPV4_BYTES
    both = np.empty((len(positions), 2), ">i8")
    both[:, 0], both[:, 1] = offsets, places
    _column(data, "V16")[positions + QUEUE_OFFSET_AT] = both.view("V16").reshape(-1)  # one behind the other
    _column(data, ">i8")[positions + STORE_TIMESTAMP_AT_V4 + moved] = stamp_ms
    if checksum == "crc32c-record":
        crcs = np.fromiter(map(crc32c, _slices(data, positions, headers.size)), np.uint32, len(positions))
    else:
        crcs = np.fromiter(
            map(zlib.crc32, _slices(data, headers.body_position, headers.body_size)), np.uint32, len(positions)
        )
        crcs &= np.uint32(0x7FFF_FFFF)
    _column(data, ">u4")[positions + CHECKSUM_AT] = crcs


def _column(data: memoryview, kind: str) -> npt.NDArray[Any]:
    """What stands at any position, as a value of `kind`."""
    dtype = np.dtype(kind)
    return np.ndarray((len(data) - dtype.itemsize + 1,), dtype, data, 0, (1,))


def _slices(data: memoryview, starts: npt.NDArray[np.int64], sizes: npt.NDArray[np.integer]) -> map[memoryview]:
    return map(data.__getitem__, map(slice, starts.tolist(), (starts + sizes).tolist()))


# -- into the segments -----------------------------------------------------------------------------------------------


class _Sink:
    """Lays windows into segments beyond the end of the log, and writes them in a thread of its own.

    The rules of rolling are those of a put (format#blank): a record ends 8 bytes before its segment does, or a
    BLANK takes the rest and the record begins the next one. `end` is how far is laid, `_written` how far is written.
    """

    def __init__(self, run: SegmentWriter, start: int) -> None:
        self.end = start
        self._written = start
        self._run = run
        self._broken = False
        self._threads = ThreadPoolExecutor(1, "mqstore-splice")
        self._pending: list[Future[None]] = []
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self._free.put(memoryview(b""))

    def take(self, size: int) -> memoryview:
        """A buffer of `size` bytes that nobody uses. Raises what writing an earlier one raised."""
        buffer = self._free.get()
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()
        return buffer if len(buffer) >= size else np.empty(size, np.uint8).data

    def lay(self, sizes: npt.NDArray[np.int32]) -> tuple[list[tuple[int, int]], npt.NDArray[np.int64]]:
        """Find room for records of these sizes, each behind the other; none may be larger than a segment takes.

        Returns (pieces that lie together: (index behind its last record, physical offset); the physical offset of each
        record)."""
        ends = np.cumsum(sizes, dtype=np.int64)
        places = ends - sizes
        pieces: list[tuple[int, int]] = []
        first = done = 0
        segment_bytes = self._run.segment_bytes
        while first < len(sizes):
            limit = self.end - self.end % segment_bytes + segment_bytes - BLANK_BYTES
            last = int(np.searchsorted(ends, limit - self.end + done, "right"))
            if last == first:
                self.end = limit + BLANK_BYTES  # behind a BLANK, which `_make_room` writes
                continue
            places[first:last] += self.end - done
            pieces.append((last, self.end))
            self.end += int(ends[last - 1]) - done
            first, done = last, int(ends[last - 1])
        return pieces, places

    def put(self, window: Window, pieces: Sequence[tuple[int, int]]) -> None:
        """Have a window written as `lay` laid it; its buffer comes back by `take`."""
        self._pending.append(self._threads.submit(self._write, window, pieces))

    def finish(self) -> None:
        """Wait until all is written. Raises what writing raised."""
        while self._pending:
            self._pending.pop(0).result()

    def close(self) -> None:
        """End the thread, whatever comes: who takes back must not meet it still writing."""
        interrupted: BaseException | None = None
        while True:
            try:
                self._threads.shutdown(wait=True, cancel_futures=True)
                break
            except BaseException as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted

    def _write(self, window: Window, pieces: Sequence[tuple[int, int]]) -> None:
        try:
            if self._broken:
                return
            ends = window.headers.positions + window.headers.size
            at = 0
            for last, offset in pieces:
                self._make_room(offset)
                stop = int(ends[last - 1])
                self._run.write(offset, window.data[at:stop])
                self._run.write_back(offset)
                self._written = offset + stop - at
                at = stop
        except BaseException:
            self._broken = True
            raise
        finally:
            self._free.put(window.data)

    def _make_room(self, offset: int) -> None:
        """The segment of `offset`, made before the BLANK that leads to it, as for a put."""
        run = self._run
        if run.find(offset) is None:
            run.create(offset - offset % run.segment_bytes)
        if self._written < offset:
            run.write(self._written, encode_blank(offset - self._written))


# -- undoing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Undone:
    """What opening found of a splice that a crash cut short. `start`: where the log was cut, or would be; None: it was
    not."""

    start: int | None
    findings: list[Finding]
    truncated: list[Cut]


def _cut_back(run: SegmentWriter, start: int) -> None:
    """Zeros from `start` to the end of its segment, no segments behind, durably (format#zeros). A segment that
    begins at `start` stays when it is the first, so that the log remembers where it is. May be repeated."""
    run.zero(start)
    run.drop_from(start + 1 if run.starts and run.starts[0] == start else start)


def _remains(run: SegmentRun, intent: Intent) -> tuple[int, list[Cut]]:
    """(bytes from the start of `intent` on that are not zeros to the end, where they are)."""
    cuts = []
    total = 0
    for segment in run.segments():
        at = max(0, intent.start - segment.start)
        if segment.end <= intent.start:
            continue
        stop = used_end(run, segment, at)
        if stop > at:
            cuts.append(Cut(place_in_file(segment.start, run.segment_bytes)[0], at, stop, "unfinished_splice"))
            total += stop - at
    return total, cuts


def _describe(intent: Intent, run: SegmentRun, total: int) -> Finding:
    """The finding for a splice that is not finished."""
    detail = f"version {intent.version} of {intent.app!r} was being spliced when its writer died: none of it counts"
    return Finding("unfinished_splice", *place_in_file(intent.start, run.segment_bytes), total, detail)


def would_undo(intent: Intent, run: SegmentRun, fs: FileSystem) -> Undone:
    """What `undo` will do to the log that a reader's `run` shows up to the start of `intent`; changes nothing."""
    whole = SegmentRun(run.directory, run.segment_bytes, fs=fs)
    whole.load()
    try:
        total, cuts = _remains(whole, intent)
        return Undone(intent.start, [_describe(intent, run, total)], cuts)
    finally:
        whole.close()


def undo(txn: TxnFile, run: SegmentWriter, checksum: Checksum, flushed: int | None) -> Undone:
    """For a writer that opens a store, before anything else looks at the log: cut an unfinished splice back and clear
    its intent. Idempotent, and may be killed at any moment: the intent goes last.

    `flushed`: the watermark of the checkpoint. A file without an intent is written once more all the same: a killed
    process may have left it in the page cache alone, and an older one with an intent must not come back (format#flush).
    """
    nothing = Undone(None, [], [])
    intent = txn.state.intent
    if intent is None:
        if txn.written:
            txn.save(txn.state)
        return nothing
    why = doubt(intent, run, checksum, flushed, from_backup=bool(txn.problems))
    if why:
        txn.save(replace(txn.state, intent=None))
        detail = (
            f"an intent to splice version {intent.version} of {intent.app!r} from {intent.start} on is not acted on: "
            f"{why}; its records, if any, stay, and splicing it again may double them"
        )
        return replace(nothing, findings=[Finding("unfinished_splice", TXN_FILE, 0, 0, detail)])
    total, cuts = _remains(run, intent)
    finding = _describe(intent, run, total)
    _log.warning("%s: %s at %d: %s", finding.kind, finding.file, finding.position, finding.detail)
    run.own(intent.start)
    _cut_back(run, intent.start)
    txn.save(replace(txn.state, intent=None))
    return Undone(intent.start, [finding], cuts)
