"""The message store: the log's door. Opening, putting, keeping house, closing.

    put -> commitlog -> (dispatcher) -> consume queue + index -> read

    thread       does                                                        waits for
    dispatcher   builds units from what was appended, wakes waiting readers  a put, or 10 ms while puts keep coming
    flusher      interval syncs, checkpoint, next segment, retention         its next due time, or a position in the log

Both are plain `run` functions that a test with a clock of its own calls by hand (`dispatch`, `run_once`). A put with
durability "flush" syncs in its own thread, or waits for the one who does. Nothing here knows of consumer groups.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from mqstore.clock import SYSTEM_CLOCK
from mqstore.errors import (
    ConfigError,
    FlushFailedError,
    InvalidMessageError,
    MQStoreError,
    NotPermittedError,
    ReadOnlyStoreError,
    StoreBusyError,
    StoreClosedError,
    StoreIOError,
)
from mqstore.files.abort import AbortMark
from mqstore.files.beneath import resolved
from mqstore.files.descriptors import DescriptorCache
from mqstore.files.filesystem import REAL, FileSystem, SyncNotBegunError, is_not_begun
from mqstore.files.flusher import GroupCommit
from mqstore.files.jsonfile import NO_CHECKS, Check, load_json
from mqstore.files.limit import free_descriptors
from mqstore.files.lock import WriterLock, writer_alive
from mqstore.files.segments import LoadProblem, SegmentRun, segment_name
from mqstore.files.tmp import remove_temporaries
from mqstore.layout.checkpoint import Checkpoint
from mqstore.layout.consumequeue import VOID_SIZE, is_message
from mqstore.layout.hosts import encode_host
from mqstore.log import manifest as manifests
from mqstore.log.bulk.inbox import CreateTopics, Inbox
from mqstore.log.bulk.shard import Limits
from mqstore.log.bulk.splice import Splicer, SpliceResult, Undone, undo, would_undo
from mqstore.log.bulk.txn import TXN_FILE, Intent, IntentWatch, TxnFile
from mqstore.log.checkpoint import CheckpointFile
from mqstore.log.commitlog import CommitLog
from mqstore.log.consumequeue import ConsumeQueue, QueueTable
from mqstore.log.index import Index
from mqstore.log.own import check_own
from mqstore.log.recovery.misnamed import MisnamedSegmentsError, misnamed_segments, rename_segments
from mqstore.log.recovery.parts import StoreParts
from mqstore.log.recovery.queueends import is_progress_ahead, note_ends
from mqstore.log.recovery.recover import Outcome, Progress, RecoverOptions, recover, unlisted_queue
from mqstore.log.recovery.report import Finding, RecoveryReport, finding_of
from mqstore.log.recovery.scanner import End, scan_log, until_torn
from mqstore.log.recovery.verify import Verifier
from mqstore.log.recovery.watermark import first_record_time, written_end
from mqstore.log.reput import Dispatcher
from mqstore.log.retention import disk_ratio, expired_before
from mqstore.log.stats import StoreStats
from mqstore.log.tip import QueueRef
from mqstore.log.writer import StoreWriter
from mqstore.options import Durability, Duration, Profile, Retention, StoreConfig, delay_table_ms, seconds
from mqstore.signalsafe import Bell, is_held_here

__all__ = ["MessageStore"]

_log = logging.getLogger("mqstore")

_PACE_S = 0.01
"""How long the dispatcher lets puts run before it takes the next stretch, while nobody waits: a pass has a fixed cost,
and each switch of threads costs as much as thousands of puts."""
_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 10.0
_POPULATE_MIN, _POPULATE_MAX = 4 << 20, 32 << 20
_POPULATE_MS = 30
"""Pages are made ready for what a writer stores in such a time, at its pace of late: so long may it take until the
thread that does it has its turn with the interpreter. A page that it comes to first costs more than the record."""
_CHECKPOINT_MS = 1_000
_QUEUE_SYNC_MS = 10_000
_FEW_FILES = 64
_RETENTION_MS = 10_000
_INBOX_MS = 2_000


_open_stores: weakref.WeakSet[MessageStore] = weakref.WeakSet()


def _unnoticed(front: int) -> None:
    """Ignore that the front of the log has moved."""


def _close_all() -> None:
    for store in list(_open_stores):
        try:
            store.close()
        except Exception:  # nobody is left to be told, and the others have a right to a clean end
            _log.exception("%s: not closed cleanly", store.path)


def _disown_all() -> None:
    # In a forked child: the mappings are shared with the parent, who goes on writing them.
    for store in list(_open_stores):
        store._disown()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)


class MessageStore(StoreWriter):
    """A store directory, opened. Use `mqstore.open`.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.MessageStore(folder) as store:
    ...     receipt = store.put("orders", b"hello", tag="created", keys=["o-1"])
    ...     [message] = store.read("orders")
    ...     message.body, message.tag, message.keys, receipt.offset
    (b'hello', 'created', ('o-1',), 0)
    """

    _threads: Sequence[threading.Thread] = ()
    _closed = _released = True
    """Nothing may be done with the store any more; everything that it held was given back. Both until it is open."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Literal["rw", "r"] = "rw",
        *,
        create: bool = True,
        profile: Profile | None = None,
        durability: Durability = "append",
        lock_timeout: Duration = 0,
        config: StoreConfig | None = None,
        fs: FileSystem = REAL,
        recover_options: RecoverOptions | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._close_lock = threading.RLock()
        if mode not in ("rw", "r"):
            raise ConfigError(f"mode must be 'rw' or 'r', not {mode!r}")
        if durability not in ("append", "flush"):
            raise ConfigError(f"durability must be 'append' or 'flush', not {durability!r}")
        if config is not None and not isinstance(config, StoreConfig):
            raise ConfigError(f"config is a mqstore.StoreConfig, not {config!r:.80}")
        self.path = Path(resolved(path))
        self.mode = mode
        self.durability: Durability = durability
        self.config = config = config or StoreConfig()
        self.fs = fs
        self.clock = config.clock or SYSTEM_CLOCK
        self._background = config.clock is None
        self._verify_reads = config.verify_reads
        self._errors: dict[str, str] = {}
        writer = mode == "rw"
        self.manifest = manifests.resolve(
            self.path, writer=writer, create=create, profile=profile, config=config, clock=self.clock, fs=fs
        )
        self._abort = AbortMark(self.path, fs, config.file_mode)
        self._lock: WriterLock | None = None
        if not writer:
            self._build(writable=False)
            self._open_for_reading()
            return
        check_own(self.path, fs)
        if self._background or not self.path.exists():
            self._make_root()
        self._lock = WriterLock(self.path, "mqstore", clock=SYSTEM_CLOCK, fs=fs, file_mode=config.file_mode)
        try:
            self._lock.acquire(seconds(lock_timeout, "lock_timeout"))
            # Another process may have made the store while we waited.
            self.manifest = manifests.resolve(
                self.path, writer=True, create=create, profile=profile, config=config, clock=self.clock, fs=fs
            )
            self._open_for_writing(recover_options or RecoverOptions(), progress)
            self._closed = self._released = False
            _open_stores.add(self)
            self._attempt("inbox", self.take_inbox)
            if self._background:
                self._start_threads()
        except BaseException:  # nobody else would ever give the lock back
            if not self._closed:
                self.close()
            else:
                self._release()
            raise

    # -- opening ----------------------------------------------------------------------------------------------------

    def _make_root(self) -> None:
        created = []
        folder = self.path
        while not folder.exists():
            created.append(folder)
            folder = folder.parent
        for folder in reversed(created):
            self.fs.mkdir(folder, exist_ok=True)
            self.fs.sync_directory(folder.parent)

    def _build(self, *, writable: bool) -> None:
        """The parts, over the sizes of the manifest. Opens no file yet."""
        manifest, config, fs = self.manifest, self.config, self.fs
        # Cached descriptors and mappings; leave the program half of what is free.
        budget = max(4, min(config.max_mappings, free_descriptors() // 4))
        tmp = self.path / "tmp"
        self._checksum = manifest.checksum
        self.delay_table_ms = delay_table_ms(manifest.delay_levels)
        self._run = SegmentRun(
            self.path / "commitlog",
            tmp,
            manifest.commitlog_segment_bytes,
            fs=fs,
            writable=writable,
            max_mappings=budget,
            file_mode=config.file_mode,
        )
        self._descriptors = DescriptorCache(fs, budget, writable=writable)
        self._queues = QueueTable(
            self.path / "consumequeue",
            tmp,
            manifest.consumequeue_segment_bytes,
            fs=fs,
            descriptors=self._descriptors,
            file_mode=config.file_mode,
            delay_table_ms=self.delay_table_ms,
            own=writable,
        )
        self._index = Index(
            self.path / "index",
            tmp,
            manifest.index_slots,
            manifest.index_entries,
            fs=fs,
            clock=self.clock,
            writable=writable,
            file_mode=config.file_mode,
        )
        self._checkpoint = CheckpointFile(self.path, fs, config.file_mode)
        self._store_host = encode_host(config.store_host)
        self._log = CommitLog(
            self._run, checksum=self._checksum, clock=self.clock, store_host=self._store_host, on_alarm=self._on_alarm
        )
        self._commit = GroupCommit(self._sync)
        self._dispatcher = Dispatcher(
            self._log,
            self._queues,
            self._index,
            checksum=self._checksum,
            end_of=self._visible_end,
        )
        self.on_growth = self._dispatcher.listeners
        self.retention_bound: Callable[[Retention], int] | None = None
        """What a broker above still needs: `clean` deletes nothing at or behind this physical offset."""
        self._first_put_position = 0
        self._opened_ms = self.clock.now_ms()
        self._alarm_lock = threading.RLock()
        self._dispatcher_idle = False
        self._dispatcher_wake = Bell()
        self._flusher_wake = Bell()
        self._stopping = False
        self._flush_wanted = False
        self._units_doubtful = False
        self._units_lock = threading.Lock()
        self._checkpoint_lock = threading.RLock()
        self._log_start: int | None = None
        self._dropped_before = 0
        """Queues and index know that the log begins there."""
        """Start of the log as noted in the checkpoint. None in profile `rocketmq`: a Java broker does not update it."""
        self._retention_lock = threading.Lock()
        self._news_lock = threading.RLock()
        self._newest_times: dict[int, int] = {}
        self._populated = 0
        self._populate_bytes = _POPULATE_MIN
        self._populate_seen = (0, 0)
        """When (monotonic ms) and where the writer was the last time."""
        self._prepared = 0
        self._flusher_called = False
        """By a put, and it has not come yet: getting the interpreter takes it a while. Not called again till then."""
        self._due_ms: dict[str, int] = {}
        self._tasks: list[tuple[str, int, Callable[[], object]]] = [
            ("flush", int(seconds(config.flush_interval, "flush_interval") * 1000), self._interval_flush),
            ("checkpoint", _CHECKPOINT_MS, self._interval_checkpoint),
        ]
        if config.retention is not None:
            self._tasks.append(("retention", _RETENTION_MS, self.clean))
        self._init_reader()
        self._init_writer()
        self._txn = TxnFile(self.path, fs, self.clock, config.file_mode)
        self._intents = IntentWatch(self.path, fs)
        self._pending: Intent | None = None
        """Of a reader: the splice that its writer, or one that died, has under way."""
        self._splicer = Splicer(
            self._txn,
            self._run,
            self._log,
            limits=Limits(manifest.profile, manifest.commitlog_segment_bytes, config.max_message_size),
            checksum=self._checksum,
            clock=self.clock,
            fs=fs,
            queue_of=self._queue_to_put,
            sync=self._sync_beyond,
            poison=self._poison,
            stopping=lambda: self._stopping,
        )
        self._inbox = Inbox(self.path, fs, self.clock, splice=self._take_bundle, file_mode=config.file_mode)
        self._tasks.append(("inbox", _INBOX_MS, self._interval_inbox))

    def _open_for_reading(self) -> None:
        self._passes_over_bad = False
        self.recovery = RecoveryReport()
        self._stop_at_splice()
        self._load_problems: list[LoadProblem] = self._run.load()
        self._has_checkpoint = self._checkpoint.load()
        self.clean_shutdown = not self._abort.exists() and self._checkpoint.current.clean_end != -1
        self._machine_ran_on = self._abort.is_of_this_boot()
        self.recovery.clean_shutdown = self.clean_shutdown
        self._load_queues()
        self._index_findings = self._index.load()
        self._log.end = self._run.end
        self._first_listed = self._run.min_offset
        self._next_listing = 0.0
        self._closed = self._released = False

    def _load_queues(self) -> None:
        """Of a reader: find every queue, and what of it can be read."""
        for problem in self._missing_in_front():  # no read comes there
            self._tell_lost(finding_of(problem, self._run.segment_bytes), "Its messages are passed over")
        self._queues.load(exact=not self.clean_shutdown)
        lost = self.clean_shutdown and self.have_queues_lost()
        if lost or (self._have_no_queues() and not writer_alive(self.path, self.fs)):
            _log.warning(
                "%s: queues have lost files, and messages of the log cannot be read by queue, until the store is "
                "opened for writing or `mqstore recover` has run",
                self.path,
            )
        for queue in self._queues:
            self._bound(queue)

    def _have_no_queues(self) -> bool:
        """Whether the log holds records, and no queue is there: what a Java broker's directory says nothing of."""
        return not (len(self._queues) or self._queues.in_rocksdb or self._queues.batch_topics) and self.has_records()

    def has_records(self) -> bool:
        """Whether anything is in the log, listed or not."""
        events = scan_log(self._run, self._run.min_offset, self._checksum, checksums=False, on_front=_unnoticed)
        return not isinstance(next(events), End)

    def have_queues_lost(self) -> bool:
        """Whether queues have not the files or ends that the last clean close noted."""
        noted = self._checkpoint.current.queues
        return noted is not None and noted != self._queues.digest()

    def has_all_queues(self) -> bool:
        """Return True if the last clean close noted which queues there are and where they end, and so they are."""
        noted = self._checkpoint.current.queues
        return self.clean_shutdown and noted is not None and noted == self._queues.digest()

    def _bound(self, queue: ConsumeQueue) -> None:
        """Of a reader: where a queue that was loaded begins and ends."""
        if not self.clean_shutdown:
            queue.stop_at_hole(self._checkpoint.current.dispatched or 0)
        queue.correct_min(self._run.min_offset)

    def _open_for_writing(self, options: RecoverOptions, progress: Progress | None) -> None:
        fs = self.fs
        created = not self.manifest.exists
        clean = not self._abort.exists()
        self._machine_ran_on = self._abort.is_of_this_boot()
        went_down = not clean and not self._machine_ran_on
        renamed = self._rename_segments() if options.full else {}
        had_checkpoint = self._note_watermark() if clean and not created else None
        self._abort.set(os.getpid(), boot_id=not went_down)
        self._build(writable=True)
        mended: list[tuple[str, str]] = []
        if self.manifest.problems:  # there is one good copy of it: make it two again
            _, problems = load_json(self.path / manifests.MANIFEST, writer=True, fs=fs, root=self.path)
            mended += [(manifests.MANIFEST, problem) for problem in problems]
        if created or (self.manifest.has_file and self.manifest.delay_levels != self._stored_delay_levels()):
            manifests.save(self.manifest, self.path, fs)
        with self._taking_mark_back(clean):
            self._prepare_folders(created)
            self._load_problems = self._run.load()
        self._has_checkpoint = self._checkpoint.load()
        if had_checkpoint is not None:
            self._has_checkpoint = had_checkpoint
        else:
            clean = clean and self._checkpoint.current.clean_end != -1  # somebody took `abort` away
        self._txn.load()
        undone = undo(self._txn, self._run, self._checksum, self._checkpoint.current.flushed)
        if undone.start is not None:
            clean = False
            # Puts before the splice were perhaps not synced: then the log ends before it, and what was behind is gone.
            end = min(undone.start, self._run.end)
            self._load_problems = [each for each in self._load_problems if each.position < end]
        with self._taking_mark_back(clean):
            self._queues.load(exact=not clean or options.full)
        self._index_findings = self._index.load()
        self.clean_shutdown = clean
        self._has_checkpoint |= created
        try:
            outcome: Outcome = recover(self._parts(), self._load_problems, options, progress)
        except MisnamedSegmentsError:
            if clean:
                self._abort.clear()
            raise
        self._index_findings = []
        self.recovery = outcome.report
        self._report_renamed(renamed)
        self._report_undone(undone)
        # The backup of this one knows one version less: that one could be spliced twice.
        mended += [(TXN_FILE, problem) for problem in self._txn.problems]
        for name, problem in mended:
            _log.warning("%s: %s", self.path, problem)
            self.recovery.findings.append(Finding("bad_json", name, 0, 0, problem))
            self.recovery.changed = True
        # Of a queue whose records retention took nobody but its files knew where it ended. Without them its numbers
        # begin anew, of which the log shows nothing.
        lost = outcome.report.scanned_from is not None and self.have_queues_lost()
        if lost:
            _log.warning("%s: the numbers of queues that were lost, or their ends, begin anew", self.path)
        ahead = not clean and is_progress_ahead(self.path, outcome.end, fs)
        if self.recovery.changed or self.recovery.findings or lost or ahead:
            ends = {(queue.topic, queue.queue_id): queue.next_offset for queue in self._queues}
            note_ends(self.path, ends, outcome.end, fs, self.config.file_mode)
        end = outcome.end
        if outcome.report.scanned_from is not None:
            # What a killed process left in the page cache counts from now on, so it has to be on disk from now on.
            self._run.sync(outcome.report.scanned_from, end)
        self._log.reset(end)
        self._commit.flushed = end
        self._first_put_position = end
        self._numbered_before = sum(queue.next_offset for queue in self._queues)
        self._dispatcher.position = end
        self._dispatcher.last_store_timestamp_ms = outcome.last_store_timestamp_ms
        self._populated = end
        self._populate_seen = self.clock.monotonic_ms(), end
        if self.manifest.profile == "mqstore":
            # Segments that it has lost at its beginning stay noted, until retention comes there.
            noted = self._checkpoint.current.log_start if self._run.starts else None
            self._log_start = self._log.min_offset if noted is None else min(noted, self._log.min_offset)
        index_ms = self._index.full_end_timestamp_ms()
        self._write_checkpoint(end, end, index_ms=index_ms, clean_end=-1, last_record=max(0, outcome.last_record))
        if went_down:
            self._abort.set(os.getpid())
        self._set_alarm()

    @contextmanager
    def _taking_mark_back(self, clean: bool) -> Iterator[None]:
        """Remove the abort mark again if opening fails on a file that must not be written. The store stays closed."""
        try:
            yield
        except StoreIOError:
            if clean:
                self._abort.clear()
            raise

    def _rename_segments(self) -> dict[str, int]:
        """Rename segment files with wrong names; return where they belong, by their old names."""
        self._build(writable=False)
        try:
            self._run.load()
            places = misnamed_segments(self._run, self._checksum, self.fs)
            rename_segments(self._run, places, self.fs)
        finally:
            self._run.close()
        return places

    def _report_renamed(self, places: Mapping[str, int]) -> None:
        report = self.recovery
        report.renamed = {f"commitlog/{name}": f"commitlog/{segment_name(place)}" for name, place in places.items()}
        report.changed |= bool(places)

    def _report_undone(self, undone: Undone) -> None:
        report = self.recovery
        report.findings[:0] = undone.findings
        report.truncated[:0] = undone.truncated
        report.changed |= bool(undone.findings)

    def torn_from(self) -> int:
        """As `StoreParts.torn_from`, of a store opened for reading."""
        return self._parts().torn_from()

    def listed_end(self) -> int:
        """Return the end of what queues list; of a store whose queues are lost, the end of its log."""
        end = 0
        for queue in self._queues:
            for _, units in queue.held_before(queue.max_offset, 64):
                live = units[is_message(units)]
                if len(live):
                    end = max(end, int(live["physical_offset"][-1]) + int(live["size"][-1]))
                    break
        return min(end, self.max_offset) if end else self.readable_end(self.min_offset)

    def readable_end(self, start: int) -> int:
        """Return the position behind the last record from physical offset `start` on, as far as recovery keeps them: of
        a batch that was being put when its writer was killed, parts may lie behind a hole, and beyond the watermark the
        log ends at the first hole."""
        end = start
        events = scan_log(self._run, start, self._checksum, checksums=False, on_front=_unnoticed)
        for event in until_torn(events, self.torn_from):
            if isinstance(event, End):
                end = event.position
        return end

    def stop_at(self, end: int) -> None:
        """Hide the log at and beyond physical offset `end` until the next refresh. For readers only."""
        self._run.limit = end if self._run.limit is None else min(self._run.limit, end)
        self._run.refresh()

    def _parts(self) -> StoreParts:
        return StoreParts(
            root=self.path,
            run=self._run,
            queues=self._queues,
            index=self._index,
            checkpoint=self._checkpoint.current,
            has_checkpoint=self._has_checkpoint,
            clean=self.clean_shutdown,
            machine_ran_on=self._machine_ran_on,
            checksum=self._checksum,
            fs=self.fs,
            clock=self.clock,
            save_checkpoint=self._checkpoint.save,
            index_findings=self._index_findings,
        )

    def place_segments(self) -> dict[str, int]:
        """Show segment files with wrong names where their records belong. Return the places by file name. Of a store
        opened for reading; does nothing beside a writer."""
        if self.mode != "r" or writer_alive(self.path, self.fs):
            return {}
        places = misnamed_segments(self._run, self._checksum, self.fs)
        if places:
            self._run.places = places
            self._load_problems = self._run.load()
            self._log.end = self._run.end
            for queue in self._queues:
                self._bound(queue)
        return places

    def plan_recovery(self, options: RecoverOptions, progress: Progress | None = None) -> RecoveryReport:
        """What `mqstore recover` would do to this store, opened for reading; changes nothing."""
        assert self.mode == "r"
        assert options.dry_run
        places = self.place_segments()
        self._queues.load(exact=True)
        self._run.extend_in_memory()
        parts = self._parts()
        self.recovery = recover(parts, self._load_problems, options, progress).report
        self._report_renamed(places)
        self.recovery.changed |= self.clean_shutdown and self.have_queues_lost()
        if self._pending is not None:
            self._report_undone(would_undo(self._pending, self._run, self.fs))
        return self.recovery

    def has_unlisted(self) -> bool:
        """Of a reader: whether a crash left messages that no queue lists, and nobody is there who will list them. Who
        reads by queues misses them until the store is opened for writing, or recovered."""
        return not self.clean_shutdown and self.unlisted_queue() is not None

    def unlisted_queue(self, topics: Collection[str] | None = None) -> QueueRef | None:
        """Return a queue, of `topics` if they are given, that does not list all its messages in the log: after a crash,
        or because its files are lost. None beside a writer, who will list them. For readers only.

        Cheap for a store that mqstore closed, and that has its queues. Else it reads headers of the part of the log
        that an opening would read, or of all if queues are known to be lost."""
        if self.has_all_queues() or self._queues.in_rocksdb or writer_alive(self.path, self.fs):
            return None
        parts = self._parts()
        wanted = (lambda topic: True) if topics is None else topics.__contains__
        return unlisted_queue(parts, wanted, whole=self.clean_shutdown and self.have_queues_lost())

    def index_doubt(self) -> str:
        """Return why the index of a reader may lack keys, as the lists of its files show: "" if they show nothing."""
        if self._index_findings:
            return f"{self._index_findings[0].file} is damaged"
        newest_ms = max((file.header.end_timestamp_ms for file in self._index.files), default=0)
        synced_ms = self._checkpoint.current.index_msg_timestamp_ms
        if newest_ms < synced_ms and self._run.starts:
            first_ms = first_record_time(self._run, self._run.starts[0], self._checksum)
            if first_ms is not None and first_ms <= synced_ms:  # else retention has taken those files
                return "index files are missing"
        return "" if self._index.files or not self.has_records() else "there is no index"

    def _stored_delay_levels(self) -> str:
        value, _ = load_json(self.path / manifests.MANIFEST, writer=False, fs=self.fs)
        return str(value.get("delay_levels")) if isinstance(value, dict) else ""

    def _note_watermark(self) -> bool | None:
        """Of a store that ended cleanly, and whose checkpoint says nothing: note how far it was written, and return
        whether there was a checkpoint. With the mark, and without this, it looks like one whose first writer was killed
        before it synced anything, and what is whole behind damage would be cut. None: nothing was to be noted."""
        checkpoint = CheckpointFile(self.path, self.fs, self.config.file_mode)
        there = checkpoint.load()
        known = checkpoint.current
        if known.flushed is not None or known.physic_msg_timestamp_ms > 0:
            return None
        self._build(writable=False)
        try:
            self._run.load()
            if not self._run.starts or self._intents.pending() is not None:  # who spliced did not end cleanly
                return None
            start = self._run.min_offset
            end = written_end(self._run, start, self._checksum)
            checkpoint.save(replace(known, flushed=end, dispatched=start, clean_end=-1))
        finally:
            self._run.close()
        return there

    def _prepare_folders(self, created: bool) -> None:
        fs = self.fs
        tmp = self.path / "tmp"
        fs.mkdir(tmp, exist_ok=True)
        remove_temporaries(fs, tmp)
        guarded = self.manifest.profile != "mqstore" or manifests.is_guarded(self.path)
        if created or not guarded:  # the latter: who created it was killed in between
            fs.mkdir(self.path / "commitlog", exist_ok=True)
            if not guarded:
                manifests.write_guard(self.path, fs)
            fs.sync_directory(self.path)

    # -- dispatch and waiting ---------------------------------------------------------------------------------------

    def dispatch(self) -> int:
        """Make everything put so far visible, now, in this thread; bytes done. Readers do it by themselves."""
        self._check_writable()
        done = self._dispatcher.run_once()
        self._dispatcher.put_pending()
        return done

    def _catch_up(self, queue: ConsumeQueue | None) -> None:
        if self.mode == "rw":
            if self._dispatcher.position < self._visible_end():
                self._check_open()  # in a forked child a lock may be held by a thread that is not there
                self._dispatcher.catch_up()
            return
        if queue is not None:
            cuts = queue.cuts
            queue.refresh()
            if queue.cuts != cuts:
                self._run.map_anew()
        now = time.monotonic()
        if queue is None or now >= self._next_listing:
            self._next_listing = now + 1.0
            self._find_news()
            if queue is not None:
                changed = [queue]
            else:
                changed = self._queues.refresh()
                self._index.refresh()
                for each in self._queues:
                    if not each.max_offset:  # of one with messages nobody asks more here than that it has some
                        each.refresh()
                        changed.append(each)
            first = self._run.starts[0] if self._run.starts else 0
            if queue is None and first != self._first_listed:
                changed = [*self._queues]
                self._first_listed = first
            for each in changed:
                each.correct_min(first)

    def _stop_at_splice(self) -> None:
        """A reader sees nothing of a splice that is not recorded (spark#splice): the log ends where that began."""
        self._pending = self._intents.pending()
        self._run.limit = None if self._pending is None else self._pending.start

    def _find_news(self) -> None:
        if self.mode == "r":
            with self._news_lock:  # an intent that one thread saw must not be put in place over later news of another
                self._stop_at_splice()
                self._run.refresh()
                self._log.end = self._run.end

    def wait(self, topic: str, queue_id: int, offset: int, timeout: Duration) -> bool:
        """Block until the queue has a message at `offset`, or `timeout` seconds have passed; whether it has."""
        return self._wait_for(self._queue(topic, queue_id, offset), offset, seconds(timeout, "timeout"))

    def _wait_for(self, queue: ConsumeQueue, offset: int, timeout_s: float) -> bool:
        if self.mode == "r":
            return super()._wait_for(queue, offset, timeout_s)
        deadline = time.monotonic() + timeout_s
        while True:
            self._catch_up(queue)
            if queue.max_offset > offset:
                return True
            left = deadline - time.monotonic()
            if left <= 0 or self._closed:
                return False
            self._dispatcher.wait(queue, offset, left, self._dispatcher_wake.ring)

    def attend(self, waiting: bool) -> None:
        """Note whether somebody waits for `on_growth`. While this is so, what is put becomes visible at once, and not
        when the dispatcher has let puts run for a while."""
        self._dispatcher.attended = waiting
        if waiting and not self._dispatcher_idle:  # it may be in that pause
            self._dispatcher_wake.ring()

    def _flushed(self) -> None:
        if self._flush_by_default and self._dispatcher_idle:
            self._on_alarm()

    def _flush_soon(self) -> None:
        self._flush_wanted = True  # first: the flusher clears it before it looks how far to sync
        self._due_ms["flush"] = 0
        self._flusher_wake.ring()

    def _on_alarm(self) -> None:
        """A put has passed `log.alarm`: wake whoever asked for it."""
        if is_held_here(self._alarm_lock):
            return  # a signal handler's put, in the middle of this: who is being woken finds its message, too
        with self._alarm_lock:
            if self._dispatcher_idle:
                self._dispatcher_idle = False
                self._dispatcher_wake.ring()
            end = self._log.end
            if self._background and not self._flusher_called and end >= self._flusher_mark(end):
                self._flusher_called = True
                self._flusher_wake.ring()
            self._set_alarm()

    def _flusher_mark(self, end: int) -> int:
        """Where the flusher is wanted next by the log that ends at `end`: before the writer comes to pages that are not
        populated, if it stores and does not call; for the next segment; and once it has gone on to that."""
        last = self._run.last
        if last is None:
            return 0
        mark = last.end
        if self._populated < last.end and end != self._log.called_end:
            mark = self._populated - self._populate_bytes // 2
        return mark if self._prepared >= last.end else min(mark, last.start + last.size * 3 // 4)

    def _set_alarm(self) -> None:
        end = self._log.end
        if self._dispatcher_idle and not self._flush_by_default:  # else there is nothing to see before the sync
            self._log.alarm = 0
        elif self._background and not self._flusher_called:
            # Behind a call each put is looked at: the mark is another one should the next be stored.
            self._log.alarm = 0 if end == self._log.called_end else self._flusher_mark(end)
        else:
            self._log.alarm = 1 << 62

    def _run_dispatcher(self) -> None:
        wake = self._dispatcher_wake
        retry_s = _RETRY_MIN_S
        while not self._stopping:
            try:
                done = self._dispatcher.run_again()
            except Exception as error:
                self._background_error("dispatch", error)
                wake.wait(retry_s)
                retry_s = min(2 * retry_s, _RETRY_MAX_S)
                continue
            if "dispatch" in self._errors:
                del self._errors["dispatch"]
            retry_s = _RETRY_MIN_S
            if done and not self._dispatcher.is_awaited:
                wake.wait(_PACE_S)
                continue
            with self._alarm_lock:
                self._dispatcher_idle = True
                self._set_alarm()
            # A put between our pass and that line saw no alarm: look again before sleeping.
            if self._dispatcher.position >= self._visible_end():
                wake.wait()
            with self._alarm_lock:
                self._dispatcher_idle = False
                self._set_alarm()

    def _background_error(self, task: str, error: BaseException) -> None:
        text = f"{type(error).__name__}: {error}"
        if self._errors.get(task) != text:
            _log.error("%s: %s: %s", self.path, task, text)
            self._errors[task] = text

    # -- housekeeping -----------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        for name, target in (("dispatcher", self._run_dispatcher), ("flusher", self._run_flusher)):
            thread = threading.Thread(target=target, name=f"mqstore-{name}", daemon=True)
            thread.start()
            self._threads = (*self._threads, thread)

    def _run_flusher(self) -> None:
        while not self._stopping:
            now = self.clock.monotonic_ms()
            due = self.run_once(now)
            self._flusher_wake.wait(max(0.001, (due - self.clock.monotonic_ms()) / 1000))

    def run_once(self, now_ms: int) -> int:
        """Do the background work that is due at `now_ms` (monotonic); when to come again. For tests that own the clock
        and for the flusher thread. A task that fails is logged, shows in `stats().errors`, and is tried again."""
        if self.mode == "r":
            raise ReadOnlyStoreError(f"{self.path} was opened for reading and has no background work")
        for name, interval_ms, task in self._tasks:
            if now_ms < self._due_ms.setdefault(name, now_ms + interval_ms):
                continue
            self._due_ms[name] = now_ms + max(1, interval_ms)
            self._attempt(name, task)
        self._attempt("prepare", self._prepare_ahead)  # cheap when there is nothing to do
        return min(self._due_ms[name] for name, _, _ in self._tasks)

    def _attempt(self, name: str, task: Callable[[], object]) -> None:
        try:
            task()
            self._errors.pop(name, None)
        except Exception as error:
            self._background_error(name, error)

    def _prepare_ahead(self) -> None:
        """Fault pages in and make the next segment before the writer needs them."""
        last = self._run.last
        if last is None or self._stopping:
            return
        end = self._log.end
        try:
            if (
                last.start <= end < last.end
                and end != self._log.called_end
                and end + self._populate_bytes // 2 >= self._populated
                and self._populated < last.end
            ):
                self._keep_pace(end)
                start = max(end, self._populated)
                stop = min(last.end, end + self._populate_bytes)
                if stop > start:
                    self._run.populate(last, start - last.start, stop - start)
                    self._populated = stop
            if end - last.start >= last.size * 3 // 4 and end > self._first_put_position:
                self._prepared = last.end
                self._run.prepare(last.end, populate_bytes=self._populate_bytes)
        finally:  # on a full disk too: else every put to come calls for us
            if self._populated < last.start:
                self._populated = min(last.end, last.start + self._populate_bytes)
            with self._alarm_lock:
                self._flusher_called = False
                self._set_alarm()

    def _keep_pace(self, end: int) -> None:
        """Make ready more or less at a time, by how fast the writer came to where it is."""
        now_ms = self.clock.monotonic_ms()
        seen_ms, seen = self._populate_seen
        self._populate_seen = now_ms, end
        wanted = (end - seen) * _POPULATE_MS // max(1, now_ms - seen_ms)
        self._populate_bytes = min(max(wanted, _POPULATE_MIN), _POPULATE_MAX)

    def _interval_flush(self) -> None:
        now = self.clock.monotonic_ms()
        wanted, self._flush_wanted = self._flush_wanted, False
        end, flushed = self._log.end, self._commit.flushed
        thorough_ms = int(seconds(self.config.flush_thorough, "flush_thorough") * 1000)
        last = self._due_ms.setdefault("thorough", now + thorough_ms)
        if end > flushed and (wanted or now >= last or end // 4096 - flushed // 4096 >= self.config.flush_pages):
            try:
                self._commit.sync_now()
            except SyncNotBegunError:
                self._flush_wanted |= wanted
                raise
            self._flushed()
        if now >= last:
            self._due_ms["thorough"] = now + thorough_ms

    def _interval_checkpoint(self) -> None:
        now = self.clock.monotonic_ms()
        current = self._checkpoint.current
        dispatched, index_ms = current.dispatched or 0, current.index_msg_timestamp_ms
        self._attempt("index", self._dispatcher.put_pending)
        # Many small queues make a sync expensive; what it saves is only reading on the next crash.
        if self._queues.dirty_count <= _FEW_FILES or now >= self._due_ms.get("queues", 0):
            position, full_ms = self._dispatcher.position, self._index.full_end_timestamp_ms()
            if not self._index.pending and self._sync_units():
                dispatched, index_ms = position, full_ms
                self._due_ms["queues"] = now + _QUEUE_SYNC_MS
        self._write_checkpoint(
            self._commit.flushed,
            dispatched,
            index_ms=index_ms,
            clean_end=-1,
            last_record=current.confirm_physical_offset,
        )

    def _sync_units(self) -> bool:
        """Make units and index entries durable; whether they are. A failed sync is not tried again, but for want of a
        descriptor: the system may have dropped what it could not write, and a second sync would not know. Until the
        store is opened anew, and builds them from the log, nothing claims them."""
        with self._units_lock:  # who finds another at it must not return before that one is done
            if self._units_doubtful:
                return False
            try:
                self._queues.sync()
                self._index.sync()
            except OSError as error:
                self._units_doubtful = not is_not_begun(error)
                self._background_error("units", error)
                return False
            self._errors.pop("units", None)
            return True

    def _write_checkpoint(
        self,
        flushed: int,
        dispatched: int,
        *,
        index_ms: int,
        clean_end: int,
        last_record: int,
        queues: int | None = None,
    ) -> None:
        """Times only move once what they stand for is on disk: the last dispatched message is the newest whose store
        time we know to lie below both watermarks. `index_ms`: end of the newest full index file that was synced."""
        with self._checkpoint_lock:
            current = self._checkpoint.current
            physic = logics = self._dispatcher.last_store_timestamp_ms
            if self._dispatcher.position > flushed:
                physic = current.physic_msg_timestamp_ms
            if self._dispatcher.position > dispatched:
                logics = current.logics_msg_timestamp_ms
            self._checkpoint.save(
                Checkpoint(
                    physic_msg_timestamp_ms=max(physic, 0),
                    logics_msg_timestamp_ms=max(logics, 0),
                    index_msg_timestamp_ms=index_ms,
                    master_flushed_offset=0,
                    confirm_physical_offset=last_record,
                    flushed=flushed,
                    dispatched=min(dispatched, flushed),
                    clean_end=clean_end,
                    queues=queues,
                    log_start=self._log_start,
                )
            )

    # -- splicing ---------------------------------------------------------------------------------------------------

    def splice(
        self,
        shards: Sequence[Path],
        *,
        app: str,
        version: int,
        progress: Progress | None = None,
        remembered: bool = True,
    ) -> SpliceResult:
        """Append the records of staged shards, in the given order, all of them or none, durably (spark#splice).

        `shards`: folders as `log.shard` describes them. `app`, `version`: who splices what; a version that is not above
        the last one of that application is in already, and nothing is done. All shards are checked before anything is
        written. Puts wait meanwhile, readers see the records at the end, all together. `progress(done, total)` is told
        bytes, each counted twice: checked and copied; what it raises takes the splice back. Without `remembered` the
        version is not kept: for who draws a new `app` each time, and never splices the same again.

        Raises FormatError for a bad shard, ConfigError for a bad `app` or `version`, StoreFullError and StoreIOError
        (in each case the store is as before), FlushFailedError (not known; opening the store anew decides it, and a
        second splice finds out), ReadOnlyStoreError, StoreBusyError, StoreClosedError.
        """
        self._check_writable()
        return self._splice(shards, app, version, progress, {}, remembered)

    def _splice(
        self,
        shards: Sequence[Path],
        app: str,
        version: int,
        progress: Progress | None,
        create: Mapping[str, int],
        remembered: bool = True,
    ) -> SpliceResult:
        result = self._splicer.splice(
            shards, app=app, version=version, progress=progress, create=create, remembered=remembered
        )
        if not result.already:  # on disk it is: let everybody see it
            try:
                self._commit.sync_now()
            except (OSError, MQStoreError) as error:  # puts will hear of it; to say so of the splice would be wrong
                _log.error("%s: %s; what was spliced before is in", self.path, error)
            self._on_alarm()
        return result

    def _take_bundle(self, shards: list[Path], app: str, version: int, create: Mapping[str, int]) -> int:
        """Splice a bundle of the inbox; the version of `app` that is the last one in by now. `create`: topics to be
        noted for a broker."""
        self._splice(shards, app, version, None, create)
        return self._txn.state.version_of(app)  # also while the store is being closed: it is in

    def spliced_version(self, app: str) -> int:
        """The last version that was spliced for `app`; -1: none, or none that is remembered. Of a store open for
        writing."""
        self._check_writable()
        return self._txn.state.version_of(app)

    def take_inbox(self) -> int:
        """Splice the bundles that wait in `inbox/`, now, in this thread; how many. Opening does it, and the
        background work from time to time. Raises what keeps one from being taken in; bad ones are moved aside."""
        with self._splicer.lock:
            self._check_writable()
            return self._inbox.run_once()

    def _interval_inbox(self) -> None:
        if self._splicer.is_busy:
            return  # the flusher has better to do than to wait
        with self._splicer.lock:
            if not self._closed:
                self._inbox.run_once()

    def enter_topics_by(self, create_topics: CreateTopics) -> None:
        """For a broker: have topics of bundles entered by `create_topics` from now on, and those of bundles that were
        spliced without a broker at once (spark#splice)."""
        with self._splicer.lock:
            self._inbox.create_topics = create_topics
            if self._txn.state.create:
                self._attempt("topics of bundles", self._enter_noted)

    def _enter_noted(self) -> None:
        """Topic by topic: one that the broker may not enter must not keep the others out. Its messages stay."""
        assert self._inbox.create_topics is not None
        for topic, queues in self._txn.state.create.items():
            try:
                self._inbox.create_topics({topic: queues})
            except (InvalidMessageError, ConfigError, NotPermittedError) as error:
                _log.error("%s: topic %r, which a bundle asked for, is not entered: %s", self.path, topic, error)
        self._txn.save(replace(self._txn.state, create={}))

    def _sync_beyond(self, end: int) -> None:
        """Make the log durable up to `end`, which lies beyond its end. As any sync it has to be the only one: an error
        is told once, and to one caller (format#flush)."""
        self._sync_to = end
        try:
            self._commit.sync_now()
        finally:
            self._sync_to = 0

    def _poison(self, error: MQStoreError) -> None:
        self._log.poison(error)
        self._commit.poison(error)

    # -- retention --------------------------------------------------------------------------------------------------

    def drop_before(self, physical_offset: int) -> list[str]:
        """Delete whole segments below `physical_offset`, oldest first, never the one being written; consume queues and
        index follow. The names of the deleted segments. A view that is held stays valid (format#retention).

        Raises FlushFailedError, nothing deleted, when the units of what stays cannot be made durable."""
        self._check_writable()
        with self._retention_lock:  # the flusher's turn may come while somebody else calls
            return self._drop_before(physical_offset)

    def _drop_before(self, physical_offset: int) -> list[str]:
        bound = min(physical_offset, self._log.end, self._dispatcher.position, self._commit.flushed)
        starts = self._run.starts
        # With the records go the last witnesses of their numbers but the units: a queue that a power cut took them from
        # would count from 0 again.
        if len(starts) > 1 and starts[1] <= bound:
            if not self._sync_units():
                advice = ": close the store and open it again" if self._units_doubtful else ""
                why = f"consume queues may not be on disk ({self._errors.get('units')}), so no segment is deleted"
                raise FlushFailedError(f"{self.path}: {why}{advice}")
            ends = bound - self._run.segment_bytes
            self._note_log_start(next((start for start in starts if start > ends), starts[-1]))
        try:
            return self._run.drop_before(bound)
        finally:  # what is gone is gone, even if the next one could not be deleted
            first = self._log.min_offset
            if first > self._dropped_before:
                for queue in self._queues:
                    queue.drop_before(first)
                self._index.drop_before(first)
                self._dropped_before = first

    def _note_log_start(self, start: int) -> None:
        """Before segments below `start` are deleted: a crash in between leaves too many of them, which is no loss."""
        with self._checkpoint_lock:
            if self._log_start is not None and self._log_start < start:
                self._checkpoint.save(replace(self._checkpoint.current, log_start=start))
                self._log_start = start  # only now: without the note on disk nothing may be deleted

    def clean(self, retention: Retention | None = None) -> list[str]:
        """Delete what `retention` (default: the store's) no longer keeps; the names of the deleted segments."""
        self._check_writable()
        policy = retention or self.config.retention
        if policy is None:
            return []
        bound = self.expired(policy)
        if bound and self.retention_bound is not None:
            bound = min(bound, self.retention_bound(policy))
        return self.drop_before(bound) if bound else []

    def expired(self, retention: Retention) -> int:
        """The physical offset below which `retention` keeps nothing, whoever still needs it; 0: it keeps everything."""
        with self._retention_lock:
            return expired_before(self._run, retention, self._log.end, self.clock.now_ms(), self._newest_times)

    # -- looking at it ----------------------------------------------------------------------------------------------

    @property
    def min_offset(self) -> int:
        """First physical offset that is kept."""
        return self._log.min_offset

    @property
    def max_offset(self) -> int:
        """Physical offset of the next record; for a reader the end of the last file."""
        return self._log.end

    def stats(self) -> StoreStats:
        """A snapshot of counters, lags and sizes."""
        errors = dict(self._errors)
        if self._index.dropped_entries:
            errors["index"] = f"{self._index.dropped_entries} entries given up while the disk was full"
        return StoreStats(
            puts=sum(queue.next_offset for queue in self._queues) - self._numbered_before if self.mode == "rw" else 0,
            put_bytes=self._log.end - self._first_put_position if self.mode == "rw" else 0,
            gets=self._gets,
            get_bytes=self._get_bytes,
            dispatched=self._dispatcher.dispatched,
            failed_puts=self._failed_puts,
            put_latency_ns=self._put_latency.buckets(),
            put_longest_ns=self._put_latency.longest_ns,
            flush_latency_ns=self._flush_latency.buckets(),
            dispatch_lag_bytes=max(0, self._log.end - self._dispatcher.position) if self.mode == "rw" else 0,
            flush_lag_bytes=max(0, self._log.end - self._commit.flushed) if self.mode == "rw" else 0,
            index_pending=self._index.pending,
            min_offset=self.min_offset,
            max_offset=self.max_offset,
            segments=len(self._run.starts),
            commitlog_bytes=len(self._run.starts) * self._run.segment_bytes,
            disk_ratio=disk_ratio(self._run),
            opened_ms=self._opened_ms,
            queues=len(self._queues),
            bad_records=len(self._bad),
            inbox_spliced=self._inbox.spliced,
            inbox_refused=self._inbox.refused,
            errors=errors,
        )

    def verifier(
        self,
        json_checks: Mapping[str, Check] = NO_CHECKS,
        *,
        until: int | None = None,
        max_errors: int | None = None,
    ) -> Verifier:
        """A `Verifier` of this store: its `findings()` go through everything; for progress look at it meanwhile.
        `json_checks`: by path within the store, what else than decode a JSON file must (`broker.configchecks`).
        `until`: a writer has been at work since, and what lies at this physical offset or behind is not judged. Beside
        a writer that is there now it is the end of what queues list. `max_errors`: findings listed of a range of the
        log; None: all."""
        self._check_open()
        if self.mode == "rw":
            self._dispatcher.catch_up()
        else:
            if until is None and writer_alive(self.path, self.fs):
                self._catch_up(None)
                for queue in self._queues:
                    queue.refresh()
                until = self.listed_end()
            if until is not None:
                self.stop_at(until)
            self.place_segments()
            if self.clean_shutdown:
                self._queues.find_short()
        return Verifier(
            self._parts(),
            live=self.mode == "rw" or until is not None,
            until=until,
            problems=[
                *(self._load_problems if self.mode == "r" else ()),
                *self._missing_in_front(),
                *self._misplaced(),
            ],
            unfinished=[] if self._pending is None else would_undo(self._pending, self._run, self.fs).findings,
            json_checks=json_checks,
            max_errors=max_errors,
        )

    def _misplaced(self) -> list[LoadProblem]:
        """Segment files with wrong names, which a reader shows where they belong."""
        return [
            LoadProblem(name, "segment_name", place, 0, f"holds the records of {segment_name(place)}")
            for name, place in self._run.places.items()
        ]

    def _missing_in_front(self) -> list[LoadProblem]:
        """The segments that the log has lost at its beginning. The note of where that is was moved before retention
        deleted anything, so it is read after the segments were listed."""
        starts = self._run.starts
        checkpoint = CheckpointFile(self.path, self.fs, self.config.file_mode)
        checkpoint.load()
        noted = checkpoint.current.log_start
        if not starts or noted is None or noted >= starts[0]:
            return []
        detail = f"the log begins at {noted}, and no file holds [{noted}, {starts[0]})"
        path = str(self._run.directory / segment_name(noted))
        return [LoadProblem(path, "missing_segment", noted, starts[0] - noted, detail)]

    def verify(self) -> Iterator[Finding]:
        """Everything in the store that is not as it should be (format#damage); nothing for one in order."""
        return self.verifier().findings()

    # -- closing ----------------------------------------------------------------------------------------------------

    def close(self, timeout: Duration = 30) -> None:
        """Dispatch, flush, write the checkpoint, and give the lock back.

        A store whose last sync failed, or whose closing was interrupted, is not declared clean: the next opening reads
        the log again. Calling it again does nothing, except that it gives back whatever an interrupted call has kept.
        """
        timeout_s = seconds(timeout, "timeout")
        if self._released or is_held_here(self._close_lock):
            return
        if self.mode == "rw" and is_held_here(self._splicer.lock):
            raise StoreBusyError(f"{self.path} cannot be closed by a signal handler that interrupted a splice")
        if self._log.is_writing:
            raise StoreBusyError(
                f"{self.path} cannot be closed by a signal handler that interrupted a put which is writing"
            )
        with self._close_lock:
            if self._closed:
                self._join_threads(timeout_s)
                self._release()
            else:
                self._close(timeout_s)

    def _close(self, timeout_s: float) -> None:
        closed = StoreClosedError(f"{self.path} was closed; open it again")
        try:
            self._closed = True
            self._dispatcher.wake_all()
            if self.mode == "r":
                return
            self._stopping = True
            self._dispatcher_wake.ring()
            self._flusher_wake.ring()
            self._join_threads(timeout_s)
            with self._splicer.lock:  # who splices sees that we are closing, and takes it back
                failed = self._log.failed
                self._log.poison(closed)
            if failed is None:
                self._finish()
        finally:  # Ctrl-C in between costs the clean end, but nobody puts from here on, and the lock is given back
            self._stopping = True
            self._dispatcher_wake.ring()
            self._flusher_wake.ring()
            self._log.poison(closed)
            self._join_threads(timeout_s)
            with self._splicer.lock:  # its files must not be taken from a splice that takes itself back
                self._release()

    def _join_threads(self, timeout_s: float) -> None:
        for thread in self._threads:
            thread.join(timeout_s)

    def _finish(self) -> None:
        """Everything a clean end promises (format#opening); until the last line a crash is a crash."""
        if (soiled := self._log.settle()) is not None:
            self._run.sync(*soiled)
        if self._log.end > self._commit.flushed:
            self._commit.sync_now()
        try:
            # Ctrl-C in a put may have left a segment behind the end, which opening would take for another log's.
            self._run.drop_from(max(self._log.end, self._run.min_offset + 1))
            self._dispatcher.run_once()
            self._dispatcher.put_pending()
        except OSError as error:
            _log.error("%s: not closed cleanly: %s; the next opening reads the log again", self.path, error)
            return
        if not self._sync_units():
            _log.error("%s: not closed cleanly: %s; the next opening reads the log again", self.path, self._errors)
            return
        end = self._log.end
        index_ms = self._index.full_end_timestamp_ms()
        digest, last = self._queues.digest(), self._last_record(end)
        self._write_checkpoint(end, end, index_ms=index_ms, clean_end=end, last_record=last, queues=digest)
        if (self._queues.batch_topics and not self.clean_shutdown) or self._queues.in_rocksdb:
            return  # with the mark there RocketMQ reads the log again, and such queues get what they lack
        self._abort.clear()

    def _last_record(self, end: int) -> int:
        """Physical offset of the newest record, for the checkpoint: opening looks there for proof of a clean end."""
        newest = -1
        for queue in self._queues:
            if queue.max_offset > queue.min_offset:
                physical, size, _ = queue.units(queue.max_offset - 1, 1)[0].tolist()
                if size < VOID_SIZE:
                    newest = max(newest, physical)
        return newest if newest >= 0 else min(self._checkpoint.current.confirm_physical_offset, end)

    def _release(self) -> None:
        if any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread()):
            # It may be writing. Beside another writer that would be two.
            _log.error("%s: a background thread still runs, so its lock is kept; close the store again", self.path)
            return
        try:
            for name in ("_run", "_descriptors", "_index"):
                if hasattr(self, name):  # opening may have ended before that
                    getattr(self, name).close()
        finally:
            if self._lock is not None:
                self._lock.release()
            self._released = True
            _open_stores.discard(self)

    def _disown(self) -> None:
        """In a forked child: never touch the parent's files again."""
        self._closed = self._released = True
        self._stopping = True
        self._log.disown(StoreClosedError(f"{self.path} belongs to the process that forked this one; open it here"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<MessageStore {str(self.path)!r} mode={self.mode!r}{' closed' if self._closed else ''}>"
