"""Bulk append of staged shards to the log: all of them or none, and each once (spark#splice).

    step                          log                 config/spark/txn.json      state after a crash
    1 check every shard           ends at S           no intent                  unchanged
    2 hold puts, write intent     "                   intent, start S            an empty intent: cleared
    3 copy, roll                  S, bytes beyond     "                          half: cut back to S
    4 sync the log                "                   "                          whole, but not recorded: cut back to S
    5 record app and version *    "                   no intent, app: version    complete
    6 move the end, let puts in   ends at E                                      complete

Until step 6 the end of the log does not move. So dispatch, retention and the watermarks of the checkpoint stop at S,
and no reader sees the records. Puts of other threads wait. Only this bulk append writes beyond S, so cutting back to S
removes no other message. Step 5 is one durable rename. Step 4 precedes it, so recorded versions are on disk.
* If the caller will not repeat the bulk append, only the intent is cleared. An entry for its application would displace
others from the table that may still need theirs.

An error before step 5 is undone at once: zeros from S on, later segments removed, intent cleared, queue offsets unused.
If that fails, or if a sync fails (format#flush), the store refuses puts until it is opened again. Opening then undoes
the bulk append (`undo`). A second bulk append of the same (app, version), or of an older one, writes nothing.

All records have the store time of the intent, as a batch has one time (format#batch). It distinguishes them from all
other bytes beyond S. With numpy, queue offsets, physical offsets, times and checksums are written into a window of
8 MiB at a time. A separate thread writes each window while the next one is prepared.
"""

from __future__ import annotations

import queue
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mqstore import arrays as np
from mqstore.errors import ConfigError, FlushFailedError, FormatError, StoreClosedError
from mqstore.files.filesystem import FileSystem
from mqstore.files.segment import place_in_file
from mqstore.files.segments import SegmentRun
from mqstore.files.segmentwriter import SegmentWriter
from mqstore.layout.arrays.scan import everywhere, slices
from mqstore.layout.hosts import IPV4_BYTES
from mqstore.layout.record import (
    BLANK_BYTES,
    CHECKSUM_AT,
    QUEUE_OFFSET_AT,
    STORE_TIMESTAMP_AT_V4,
    Checksum,
    encode_blank,
)
from mqstore.log.bulk.shard import Groups, Limits, Shard, Window, by_queue
from mqstore.log.bulk.txn import TXN_FILE, Intent, TxnFile, TxnState, doubt, is_app
from mqstore.log.commitlog import CommitLog
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.recovery.report import Cut, Finding
from mqstore.log.recovery.scanning.scanner import used_ranges
from mqstore.log.writing.log_tail import QueueRef
from mqstore.log.writing.syncs import LogSyncs
from mqstore.log.writing.wakeups import Wakeups
from mqstore.log.writing.writer import LogWriter
from mqstore.logger import log as _log
from mqstore.native import crc32c, kernel
from mqstore.signalsafe import Lock

_BUFFERS = 4
"""Windows in memory: one being read, one being prepared, one waiting and one being written."""
_REMEMBERED = 8 << 20
"""Number of records whose queue is kept in memory from check to copy, two bytes each."""

Checked = tuple[Shard, list[Groups] | None]
"""A shard, and the groups saved by its check."""

Progress = Callable[[int, int], None]
"""Function called with (bytes done, total bytes). Every byte counts twice: checked and copied."""


class SpliceResult(NamedTuple):
    """Result of a bulk append. With `already`, this or a later version was appended before, and nothing was done.

    `first_offset` and `end_offset` are physical. `offsets` has (start, stop) for each queue that got records.
    """

    already: bool
    first_offset: int
    end_offset: int
    records: int
    offsets: Mapping[QueueRef, tuple[int, int]]


class Splicer:
    """Bulk appends of a `MessageStore`, one at a time."""

    def __init__(
        self, parts: StoreParts, txn: TxnFile, log: CommitLog, writer: LogWriter, syncs: LogSyncs, wakeups: Wakeups
    ) -> None:
        self.txn = txn
        self.lock = Lock()
        """Held during a bulk append. Closing the store waits for it."""
        self._run = log.run
        self._log = log
        manifest = parts.manifest
        self._limits = Limits(manifest.profile, manifest.commitlog_segment_bytes, manifest.max_message_size)
        self._checksum, self._clock, self._fs = parts.checksum, parts.clock, parts.fs
        self._writer = writer
        self._syncs = syncs
        self.wakeups = wakeups

    def splice(
        self,
        shards: Sequence[Path],
        *,
        app: str,
        version: int,
        progress: Progress | None = None,
        create: Mapping[str, int] | None = None,
        remembered: bool = True,
        accepted: bool = False,
    ) -> SpliceResult:
        """Append `shards`. `MessageStore.splice` describes it. `create` has topics to save for the next broker.
        The caller holds `lock`."""
        if not is_app(app):
            raise ConfigError(f"app must be text of 1..255 bytes, not {app!r:.80}")
        if type(version) is not int or not 0 <= version < 1 << 63:
            raise ConfigError(f"version must be an integer of at least 0, not {version!r:.80}")
        self._stop()
        if version <= self.txn.state.version_of(app):
            return SpliceResult(True, self._log.end, self._log.end, 0, {})
        limits = self._limits._replace(max_body_bytes=self._limits.segment_bytes) if accepted else self._limits
        found = [Shard.load(Path(shard), limits, self._fs) for shard in shards]
        if not remembered and not any(shard.records for shard in found):
            return SpliceResult(False, self._log.end, self._log.end, 0, {})
        done, total = 0, 2 * sum(shard.bytes for shard in found)

        def add(count: int) -> None:
            nonlocal done
            done += count
            self._stop()
            if progress is not None:
                progress(done, total)

        checked = []
        left = _REMEMBERED
        for shard in found:
            checked.append((shard, shard.check(add, left)))
            left -= shard.records
        return self._run_all(checked, app, version, add, create or {}, remembered)

    def _stop(self) -> None:
        if self.wakeups.stopping:
            raise StoreClosedError("the store is being closed. Repeat the bulk append once it is open again")

    def _ask_for_room(self, shards: Sequence[Shard]) -> None:
        """Ask for the bytes of the shards, and for the unused end of each segment that a record does not fit."""
        size = sum(shard.bytes for shard in shards)
        largest = max((shard.largest for shard in shards), default=0)
        rolls = size // (self._limits.segment_bytes - largest) + 1
        messages = Counter[str]()
        for shard in shards:
            for (topic, _), count in shard.queues.items():
                messages[topic] += count
        if size:
            self._writer.check_room(size + min(size, rolls * largest), messages)

    # -- the protocol -----------------------------------------------------------------------------------------------

    def _run_all(
        self,
        shards: list[Checked],
        app: str,
        version: int,
        add: Callable[[int], None],
        create: Mapping[str, int],
        remembered: bool,
    ) -> SpliceResult:
        self._ask_for_room([shard for shard, _ in shards])  # before blocking puts, which may take part in freeing room
        before = self.txn.state
        wanted = dict.fromkeys(key for shard, _ in shards for key, count in shard.queues.items() if count)
        queues = {key: self._writer.queue_to_splice(*key) for key in wanted}
        end: int | None = None
        recording = False
        with self._log.lock:
            try:
                start = self._log.hold()
                numbers = {key: queue.next_offset for key, queue in queues.items()}
                stamp_ms = self._clock.now_ms()
                intent = Intent(app, version, start, stamp_ms)
                cleared = before._replace(intent=None)
                recorded = cleared.recorded(app, version, stamp_ms, create) if remembered else cleared
                try:
                    if queues:
                        self.txn.save(before._replace(intent=intent))
                    copied, stops = self._copy(shards, start, numbers, stamp_ms, add)
                    if queues:
                        self._syncs.sync_beyond(copied)
                    self._stop()
                    recording = True  # if the version is not recorded, the file may already look like `recorded`
                    self.txn.save(recorded)
                except BaseException as error:
                    if not (recording and self._is_recorded(recorded, error)):
                        self._take_back(before, start, error)
                        raise
                    # Ctrl-C came after the last step. The bulk append is complete, and the error is still raised.
                    end = _published(queues, stops, copied)
                    raise
                end = _published(queues, stops, copied)
            finally:
                try:
                    self._log.release(end)
                except BaseException:  # Ctrl-C
                    self._log.release(end)
                    raise
        records = sum(shard.records for shard, _ in shards)
        return SpliceResult(False, start, end, records, {key: (numbers[key], stops[key]) for key in queues})

    def _is_recorded(self, recorded: TxnState, error: BaseException) -> bool:
        """Return True if step 5 was done although `error` was raised in it or around it.
        Raises FlushFailedError if that is unknown."""
        if self.txn.state is recorded:
            return True
        try:
            renamed = self.txn.on_disk() == recorded
        except Exception:
            renamed = True  # unknown
        if renamed:
            # The rename may not be durable, so neither undoing nor continuing would be safe.
            unknown = FlushFailedError(
                f"{self.txn.path}: a bulk append was recorded, but is not known to be on disk ({error}). Close the "
                "store and open it again"
            )
            self._syncs.poison(unknown)
            if isinstance(error, Exception):
                raise unknown from error  # `error` itself would mean that nothing was done
        return False

    # -- undoing at once --------------------------------------------------------------------------------------------

    def _take_back(self, before: TxnState, start: int, error: BaseException) -> None:
        """Undo the bulk append. If that fails, the store is poisoned, and the next opening undoes it."""
        if self._log.failed is not None and not isinstance(self._log.failed, StoreClosedError):
            return  # a sync failed, so the content of the disk is unknown
        try:
            _cut_back(self._run, start)
            self._restore(before)
        except BaseException as worse:
            self._syncs.poison(
                FlushFailedError(
                    f"a bulk append failed ({error}) and could not be undone ({worse}). Close the store and open it "
                    "again to undo it"
                )
            )
            if not isinstance(worse, Exception):
                raise

    def _restore(self, before: TxnState) -> None:
        """Clear the intent. Without room for a new file, restore the backup made with the intent."""
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
        self,
        shards: list[Checked],
        start: int,
        numbers: Mapping[QueueRef, int],
        stamp_ms: int,
        add: Callable[[int], None],
    ) -> tuple[int, dict[QueueRef, int]]:
        """Copy the records of `shards` into the log from `start` on.
        Returns the end of the records, and the next offset of each queue."""
        stops = dict(numbers)
        laid = 0  # bytes of the last window, reported as progress once it is written
        sink = _Sink(self._run, start)
        try:
            for shard, groups in shards:
                known = iter(groups or ())
                for window in shard.windows(sink.take):
                    offsets = _numbers_of(window, next(known, None), stops, shard)
                    pieces, places = sink.lay(window.headers.size)
                    _patch(window, offsets, places, stamp_ms, self._checksum)
                    sink.put(window, pieces)
                    add(laid)
                    laid = window.stop
            sink.finish()
            add(laid)
        finally:
            sink.close()
        return sink.end, stops


def _published(queues: Mapping[QueueRef, ConsumeQueue], stops: Mapping[QueueRef, int], end: int) -> int:
    """Move the ends of the queues. Return `end`, that of the log."""

    def move() -> None:
        for key, each in queues.items():
            each.next_offset = stops[key]

    try:
        move()
    except BaseException:  # after Ctrl-C all queues must move, since the version is recorded
        move()
        raise
    return end


# -- a window ----------------------------------------------------------------------------------------------------------


def _numbers_of(window: Window, known: Groups | None, stops: dict[QueueRef, int], shard: Shard) -> np.NDArray[np.int64]:
    """Return the queue offset of each record, and advance `stops`.
    Raises FormatError if the records differ from the checked ones. The CRC finds changes that this comparison does not
    see."""
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
    window: Window, offsets: np.NDArray[np.int64], places: np.NDArray[np.int64], stamp_ms: int, checksum: Checksum
) -> None:
    """Write queue offsets, physical offsets and the store time into the records, then their checksums."""
    data, headers = window.data, window.headers
    positions = headers.positions
    if kernel is not None and checksum == "crc32c-record":
        kernel.renumber(data, positions, offsets, places, stamp_ms)
        return
    moved = headers.born_host_size - IPV4_BYTES
    both = np.empty((len(positions), 2), ">i8")
    both[:, 0], both[:, 1] = offsets, places
    everywhere(data, "V16")[positions + QUEUE_OFFSET_AT] = both.view("V16").reshape(-1)  # the two are contiguous
    everywhere(data, ">i8")[positions + STORE_TIMESTAMP_AT_V4 + moved] = stamp_ms
    if checksum == "crc32c-record":
        crcs = np.fromiter(map(crc32c, slices(data, positions, headers.size)), np.uint32, len(positions))
    else:
        crcs = np.fromiter(
            map(zlib.crc32, slices(data, headers.body_position, headers.body_size)), np.uint32, len(positions)
        )
        crcs &= np.uint32(0x7FFF_FFFF)
    everywhere(data, ">u4")[positions + CHECKSUM_AT] = crcs


# -- into the segments -----------------------------------------------------------------------------------------------


class _Sink:
    """Places windows in segments beyond the end of the log, and writes them in a separate thread.

    A record ends at least 8 bytes before its segment does. Otherwise a BLANK fills the rest and the record begins the
    next segment, as in a put (format#blank). Records are placed up to `end`, and written up to `_written`.
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
        """Return an unused buffer of at least `size` bytes. Raises the error of an earlier write."""
        buffer = self._free.get()
        while self._pending and self._pending[0].done():
            self._pending.pop(0).result()
        return buffer if len(buffer) >= size else np.empty(size, np.uint8).data

    def lay(self, sizes: np.NDArray[np.int32]) -> tuple[list[tuple[int, int]], np.NDArray[np.int64]]:
        """Find positions for consecutive records of these sizes. None may be larger than a segment can hold.

        Returns two values. The first has contiguous batches as (index after the last record, physical offset). The
        second has the physical offset of each record."""
        ends = np.cumsum(sizes, dtype=np.int64)
        places = ends - sizes
        pieces: list[tuple[int, int]] = []
        first = done = 0
        segment_bytes = self._run.segment_bytes
        while first < len(sizes):
            limit = self.end - self.end % segment_bytes + segment_bytes - BLANK_BYTES
            last = int(np.searchsorted(ends, limit - self.end + done, "right"))
            if last == first:
                self.end = limit + BLANK_BYTES  # after a BLANK, which `_make_room` writes
                continue
            places[first:last] += self.end - done
            pieces.append((last, self.end))
            self.end += int(ends[last - 1]) - done
            first, done = last, int(ends[last - 1])
        return pieces, places

    def put(self, window: Window, pieces: Sequence[tuple[int, int]]) -> None:
        """Write a window in the thread, at the positions from `lay`. Its buffer becomes free for `take`."""
        self._pending.append(self._threads.submit(self._write, window, pieces))

    def finish(self) -> None:
        """Wait until all windows are written. Raises the error of a write."""
        while self._pending:
            self._pending.pop(0).result()

    def close(self) -> None:
        """End the thread, even after an error. No write may still run while the bulk append is undone."""
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
        """Create the segment of `offset`, and then write the BLANK that points to it, as a put does."""
        run = self._run
        if run.find(offset) is None:
            run.create(offset - offset % run.segment_bytes)
        if self._written < offset:
            run.write(self._written, encode_blank(offset - self._written))


# -- undoing -----------------------------------------------------------------------------------------------------------


class Undone(NamedTuple):
    """Result of `undo`. The log was, or would be, cut at `start`. If `start` is None, it was not."""

    start: int | None
    findings: list[Finding]
    truncated: list[Cut]


def _cut_back(run: SegmentWriter, start: int) -> None:
    """Durably write zeros from `start` to the end of its segment, and remove later ones (format#zeros).
    A segment that begins at `start` stays if it is the first, so that the log keeps its position. May be repeated."""
    run.zero(start)
    run.drop_from(start + 1 if run.starts and run.starts[0] == start else start)


def _remains(run: SegmentRun, intent: Intent) -> tuple[int, list[Cut]]:
    """Return (bytes from the start of `intent` to the last non-zero byte, ranges of these bytes)."""
    size = run.segment_bytes
    cuts = [
        Cut(place_in_file(segment.start, size)[0], at, stop, "unfinished_splice")
        for segment, at, stop in used_ranges(run, intent.start)
    ]
    return sum(cut.stop - cut.start for cut in cuts), cuts


def _describe(intent: Intent, run: SegmentRun, total: int) -> Finding:
    """Return the finding about an unfinished bulk append."""
    detail = f"bulk append of version {intent.version} of {intent.app!r} was interrupted; it was rolled back"
    return Finding("unfinished_splice", *place_in_file(intent.start, run.segment_bytes), total, detail)


def would_undo(intent: Intent, run: SegmentRun, fs: FileSystem) -> Undone:
    """Return the result that `undo` would have. Changes nothing.
    A reader's `run` shows the log up to the start of `intent`."""
    whole = SegmentRun(run.directory, run.segment_bytes, fs=fs)
    whole.load()
    try:
        total, cuts = _remains(whole, intent)
        return Undone(intent.start, [_describe(intent, run, total)], cuts)
    finally:
        whole.close()


def undo(txn: TxnFile, run: SegmentWriter, checksum: Checksum, flushed: int | None) -> Undone:
    """Cut back an unfinished bulk append and clear its intent, before anything else reads the log.

    May be repeated, and killed at any time, since the intent is cleared last.

    `flushed` is the watermark of the checkpoint. A file without an intent is written again, too. A killed process may
    have left it in the page cache alone, and an older one with an intent must not reappear (format#flush).
    """
    nothing = Undone(None, [], [])
    intent = txn.state.intent
    if intent is None:
        if txn.written:
            txn.save(txn.state)
        return nothing
    why = doubt(intent, run, checksum, flushed, from_backup=bool(txn.problems))
    if why:
        txn.save(txn.state._replace(intent=None))
        detail = (
            f"an intent to append version {intent.version} of {intent.app!r} from {intent.start} on is ignored: "
            f"{why}; its records, if any, stay, and repeating the bulk append may duplicate them"
        )
        return nothing._replace(findings=[Finding("unfinished_splice", TXN_FILE, 0, 0, detail)])
    total, cuts = _remains(run, intent)
    finding = _describe(intent, run, total)
    _log.warning("%s: %s at %d: %s", finding.kind, finding.file, finding.position, finding.detail)
    run.own(intent.start)
    _cut_back(run, intent.start)
    txn.save(txn.state._replace(intent=None))
    return Undone(intent.start, [finding], cuts)
