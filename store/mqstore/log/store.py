"""Message store as one object, open for writing: opening, putting, housekeeping, closing.

    put -> commitlog -> (dispatcher) -> consume queue + index -> read

    thread       work                                                        waits for
    dispatcher   builds units of new records, wakes waiting readers          a put; 10 ms or 4 MiB during constant puts
    flusher      interval syncs, checkpoint, next segment, retention         its next due time, or a position in the log

Both are plain `run` functions. A test with a simulated clock calls `dispatch` and `run_once` instead. A put with
durability "flush" syncs in its own thread, or waits for another one that syncs. This module knows no consumer groups.
The class is long because it documents every call of a store without consumers.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Concatenate, Literal, ParamSpec, TypeVar
from weakref import WeakSet

from mqstore.clock import SYSTEM_CLOCK
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.lock import AbortMark, WriterLock
from mqstore.log.bulk.inbox import BulkAppender, CreateTopics
from mqstore.log.bulk.splice import Splicer, SpliceResult
from mqstore.log.bulk.txn import TxnFile
from mqstore.log.commitlog import CommitLog
from mqstore.log.directory import manifest as manifests
from mqstore.log.directory.manifest import check_own
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.opening import Opening
from mqstore.log.reading.change_feed import WriterFeed
from mqstore.log.reading.iteration import IteratingReader
from mqstore.log.recovery.recover import Progress, RecoverOptions
from mqstore.log.stats import StoreStats, TaskErrors
from mqstore.log.writing.background import BackgroundWork, Checkpointer
from mqstore.log.writing.dispatcher import Dispatcher, DispatchThread
from mqstore.log.writing.retention import Retainer
from mqstore.log.writing.room import Room
from mqstore.log.writing.syncs import LogSyncs
from mqstore.log.writing.wakeups import PagePrefetch, Wakeups
from mqstore.log.writing.writer import LogWriter
from mqstore.logger import log as _log
from mqstore.native import Sending, compiled_put
from mqstore.options import Durability, Duration, Profile, Retention, StoreConfig, check_durability, seconds
from mqstore.signalsafe import in_each_child
from mqstore.threads import start_thread

if TYPE_CHECKING:
    from mqstore.log.recovery.verify import Verifier

_P = ParamSpec("_P")
_R = TypeVar("_R")

_RETENTION_MS = 10_000
_ROOM_MS = 1_000
_INBOX_MS = 2_000
_LOOK_MS = 500
"""Interval at which a store checks that its directory still exists."""


# In a forked child the mappings are shared with the parent, which continues to write them.
_open_stores: WeakSet[MessageStore] = in_each_child(lambda store: store._disown())


def _close_all() -> None:
    for store in list(_open_stores):
        try:
            store.closer()  # its broker first, if it has one
        except Exception:  # there is no caller to report to, and the other stores must still be closed cleanly
            _log.exception("%s: not closed cleanly", store.path)


atexit.register(_close_all)


def _by_writer(method: Callable[Concatenate[LogWriter, _P], _R]) -> Callable[Concatenate[MessageStore, _P], _R]:
    @wraps(method)
    def call(self: MessageStore, /, *args: _P.args, **options: _P.kwargs) -> _R:
        return method(self.writer, *args, **options)

    return call


class MessageStore(IteratingReader, Sending):
    """Store directory, opened for writing. Use `mqstore.open`."""

    mode: ClassVar[Literal["r", "rw"]] = "rw"
    _threads: Sequence[threading.Thread] = ()

    def __init__(
        self,
        path: str | os.PathLike[str],
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
        super().__init__(path, config, fs)
        check_durability(durability)
        self.durability: Durability = durability
        config = self.config
        self._background = config.clock is None
        self._errors = TaskErrors(self.path)
        resolve = partial(manifests.resolve, writer=True, create=create, profile=profile, config=config, fs=fs)
        self.manifest = resolve(self.path, clock=self.clock)
        self._abort = AbortMark(self.path, fs, config.file_mode)
        self._lock: WriterLock | None = None
        check_own(self.path, fs)
        if self._background or not self.path.exists():
            fs.make_folders(self.path)
        self._lock = WriterLock(self.path, "mqstore", clock=SYSTEM_CLOCK, fs=fs, file_mode=config.file_mode)
        try:
            self._lock.acquire(seconds(lock_timeout, "lock_timeout"))
            # Another process may have created the store during the wait for the lock.
            self.manifest = resolve(self.path, clock=self.clock)
            self._open_for_writing(recover_options or RecoverOptions(), progress)
            self._opened()
            _open_stores.add(self)
            self._errors.attempt("inbox", self.take_inbox)
            if self._background:
                self._start_threads()
            self.room.start()
        except BaseException:  # without this, nothing would release the lock
            if not self._closed:
                self.close()
            else:
                self._release()
            raise

    # -- opening ----------------------------------------------------------------------------------------------------

    def _build(self, txn: TxnFile) -> None:
        """Create the services of the store."""
        parts, config, errors = self.parts, self.config, self._errors
        pages = PagePrefetch(parts.log_writer, self.clock)
        flushes = self.durability == "flush"
        self.wakeups = Wakeups(pages, background=self._background, after_sync=flushes)
        self._log = self.wakeups.log = CommitLog(parts, self.wakeups.passed)
        self._syncs = LogSyncs(parts, self._log, self.wakeups, self.is_lost, by_default=flushes)
        self._commit = self._syncs.commit
        self._dispatcher = Dispatcher(parts, self._log, self._syncs.visible_end)
        self.on_growth = self._dispatcher.listeners
        self.default_retention: Retention | None = None
        """Retention if the configuration has none. Set by a broker."""
        self.on_lost: list[Callable[[], object]] = []
        """Called when the directory is gone, in any thread and under any lock. They may only wake other threads."""
        self._read_by(WriterFeed(self._dispatcher, self.wakeups, self.check_closed))
        self._checkpointer = Checkpointer(parts, self._dispatcher, errors)
        self.background = BackgroundWork(parts, self._commit, self._checkpointer, self.wakeups)
        self.writer = LogWriter(
            parts,
            self._log,
            self._syncs,
            flush_soon=self.background.flush_soon,
            check_open=self.check_open,
            dispatch=self._dispatcher.catch_up,
            make_room=lambda size, messages: self.room.check(size, messages),
        )
        self._sender = self.writer.sender()
        self._retainer = Retainer(parts, self._log, self._checkpointer, self._commit)
        splicer = Splicer(parts, txn, self._log, self.writer, self._syncs, self.wakeups)
        self._bulk = BulkAppender(parts, splicer, self._commit)
        self.background.add_task("look", _LOOK_MS, self.is_lost)
        self.background.add_task("ahead", _LOOK_MS, lambda: self.records.drop_ahead())
        self.room = Room(
            parts,
            self._log,
            self._dispatcher,
            policy=lambda: config.retention or self.default_retention,
            clean=self.clean,
            drop_before=self._drop_before,
            call_flusher=self._call_flusher,
        )
        self.background.add_task("retention", _RETENTION_MS, self.room.run_once)
        self.background.add_task("room", _ROOM_MS, self.room.look)
        self.background.add_task("inbox", _INBOX_MS, self._bulk.take_inbox_if_idle)

    def _open_for_writing(self, options: RecoverOptions, progress: Progress | None) -> None:
        parts = StoreParts(self.path, self.manifest, self.config, self.fs, self.clock, writable=True)
        self._set_parts(parts)
        txn = TxnFile(parts)
        outcome, went_down = Opening(parts, txn, self._abort).run(options, progress)
        end = outcome.end
        self.recovery = outcome.report
        self._build(txn)
        self._log.reset(end)
        self._commit.flushed = end
        self._first_put_position = end
        self._numbered_before = sum(queue.next_offset for queue in parts.queue_table)
        self._dispatcher.position = end
        self._dispatcher.last_store_timestamp_ms = outcome.last_store_timestamp_ms
        self.wakeups.pages.reset(end)
        if self.manifest.profile == "mqstore":
            # Segments lost at its start stay in the checkpoint until retention has passed them.
            noted = parts.checkpoint.log_start if parts.log_files.starts else None
            self._checkpointer.log_start = self._log.min_offset if noted is None else min(noted, self._log.min_offset)
        index_ms = parts.index.full_end_timestamp_ms()
        self._checkpointer.save(end, end, index_ms=index_ms, last_record=max(0, outcome.last_record))
        self.background.check_clock()
        if went_down:
            self._abort.set(os.getpid())
        self.wakeups.set()

    # -- putting: documented in `LogWriter` -------------------------------------------------------------------------

    put = compiled_put(_by_writer(LogWriter.put))
    put_many = _by_writer(LogWriter.put_many)
    append = _by_writer(LogWriter.append)
    copy_many = _by_writer(LogWriter.copy_many)
    _outlet = _by_writer(LogWriter.outlet)
    _take_put_times = _by_writer(LogWriter.take_put_times)

    def flush(self) -> None:
        """Return when all earlier puts are on disk. Raises FlushFailedError, FlushTimeoutError."""
        self.check_open()
        self._syncs.flush()

    # -- dispatch and waiting ---------------------------------------------------------------------------------------

    def dispatch(self) -> int:
        """Make all earlier puts visible, in this thread. Return the bytes dispatched. Reads do this themselves."""
        self.check_open()
        done = self._dispatcher.run_once()
        self._dispatcher.put_pending()
        return done

    def wait(self, topic: str, queue_id: int, offset: int, timeout: Duration) -> bool:
        """Wait up to `timeout` seconds until the queue has a message at `offset`. Return True if it has."""
        queue = self.queue_named(topic, queue_id, offset)
        found = self.news.wait(queue, offset, seconds(timeout, "timeout"), lambda: self.closed)
        if self._is_lost:
            self.check_closed()
        return found

    def _attend(self, waiting: bool) -> None:
        """Set whether somebody waits for `on_growth`.
        Meanwhile puts become visible at once. Otherwise the dispatcher first lets puts run for a while."""
        self._dispatcher.attended = waiting
        if waiting and self.wakeups.dispatcher_mark:  # the dispatcher may be letting puts run
            self.wakeups.dispatcher.ring()

    # -- housekeeping -----------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        self._dispatching = DispatchThread(self._dispatcher, self.wakeups, self._errors)
        self._threads = (start_thread(self._dispatching, self.wakeups.dispatcher, "dispatcher"),)
        self._threads = (*self._threads, start_thread(self.background, self.wakeups.flusher, "flusher"))

    def _call_flusher(self) -> bool:
        """Make the flusher free room. Return False if it is this thread, or was not started."""
        if not self._threads[1:] or self._threads[1] is threading.current_thread():
            return False
        self.background.call("retention")
        return True

    def run_once(self, now_ms: int) -> int:
        """Do the background work due at `now_ms` (monotonic). Return the time of the next call.
        For tests with a simulated clock. A failed task is logged, shows in `stats().errors`, and is retried."""
        return self.background.run_once(now_ms)

    # -- bulk append ------------------------------------------------------------------------------------------------

    def splice(
        self,
        shards: Sequence[Path],
        *,
        app: str,
        version: int,
        progress: Progress | None = None,
        remembered: bool = True,
        accepted: bool = False,
    ) -> SpliceResult:
        """Append the records of staged shards durably, in the given order, all or none (spark#splice).

        `shards` are folders in the format of `log.shard`. `app` and `version` identify this bulk append. Nothing is
        done if the version is not above the application's last one, since that was already appended. All shards are
        checked before anything is written. Puts wait meanwhile. Readers see all records together at the end.
        `progress(done, total)` gets bytes, each counted twice: checked and copied. Its errors undo the bulk append.
        Without `remembered` the version is not saved. This suits callers that use a new `app` each time and never
        repeat a bulk append. With `accepted` the messages may be larger than `max_message_size`, since a store has
        accepted them before.

        Raises FormatError for a bad shard, ConfigError for a bad `app` or `version`, StoreFullError and StoreIOError.
        Then the store is as before. After FlushFailedError the result is unknown: the next opening decides it, and a
        repeated call returns it. Also raises ReadOnlyStoreError, StoreBusyError and StoreClosedError.
        """
        self.check_open()
        splice = partial(self._bulk.splicer.splice, remembered=remembered, accepted=accepted)
        with self._bulk.lock:
            result = splice(shards, app=app, version=version, progress=progress)
        return self._bulk.show(result)

    def spliced_version(self, app: str) -> int:
        """Return the last version appended in bulk for `app`, or -1 if none is saved."""
        self.check_open()
        return self._bulk.txn.state.version_of(app)

    def take_inbox(self) -> int:
        """Append the bundles waiting in `inbox/`, in this thread. Return their number.
        Opening does this, and so does the background work from time to time. Raises the error that keeps a bundle from
        being appended. Bad bundles are moved aside."""
        with self._bulk.lock:
            self.check_open()
            return self._bulk.take_inbox()

    def _enter_topics_by(self, create_topics: CreateTopics) -> None:
        """Create the topics of later bundles with `create_topics` (spark#splice). For a broker.
        Topics of bundles that were appended without a broker are created at once."""
        self._bulk.enter_topics_by(create_topics, self._errors)

    # -- retention --------------------------------------------------------------------------------------------------

    def drop_before(self, physical_offset: int) -> list[str]:
        """Delete whole segments below `physical_offset`, oldest first, never the one being written.

        Consume queues and index are shortened, too. Returns the names of the deleted segments. Messages that a program
        holds stay valid (format#retention). Raises FlushFailedError, with nothing deleted, if the units of the
        remaining records cannot be made durable."""
        self.check_open()
        return self._drop_before(physical_offset)

    def _drop_before(self, physical_offset: int) -> list[str]:
        try:
            return self._retainer.drop_before(physical_offset)
        finally:
            self.records.drop_ahead()  # now, since a put may wait for the space

    def delete_topics(self, topics: Collection[str]) -> None:
        """Delete all messages of `topics` put before this call. Readers no longer find them, even after a crash.
        Queue offsets continue. Retention frees the space in the log. Raises errors of `dispatch`, StoreFullError and
        StoreIOError. Then nothing has changed, or the next call or opening completes the deletion."""
        self.dispatch()
        self._retainer.delete(topics)

    def clean(self, retention: Retention | None = None) -> list[str]:
        """Delete segments beyond `retention` (default: the store's). Return their names."""
        self.check_open()
        policy = retention or self.config.retention
        if policy is None:
            return []
        bound = self.expired(policy)
        if not bound:
            return []
        if self.room.bound is None:
            self.flush()
        else:
            bound = min(bound, self.room.bound(policy))
        return self.drop_before(bound)

    def expired(self, retention: Retention) -> int:
        """Return the physical offset below which `retention` keeps nothing, or 0 if it keeps everything.
        Ignores the needs of a broker."""
        self.check_open()
        return self._retainer.expired(retention)

    # -- inspection -------------------------------------------------------------------------------------------------

    @property
    def min_offset(self) -> int:
        return self._log.min_offset

    @property
    def max_offset(self) -> int:
        return self._log.end

    @property
    def dispatched_end(self) -> int:
        """Physical offset up to which all messages are in their queues."""
        return self._dispatcher.position

    def stats(self) -> StoreStats:
        errors = dict(self._errors.messages)
        if self.index.dropped_entries:
            errors["index"] = f"{self.index.dropped_entries} entries were dropped while the disk was full"
        return replace(
            super().stats(),
            puts=sum(queue.next_offset for queue in self.queue_table) - self._numbered_before,
            put_bytes=self._log.end - self._first_put_position,
            dispatched=self._dispatcher.dispatched,
            failed_puts=self.writer.failed_puts,
            put_latency_ns=self.writer.latency.buckets(),
            put_longest_ns=self.writer.latency.longest_ns,
            flush_latency_ns=self._syncs.latency.buckets(),
            dispatch_lag_bytes=max(0, self._log.end - self._dispatcher.position),
            flush_lag_bytes=max(0, self._log.end - self._commit.flushed),
            index_pending=self.index.pending,
            inbox_spliced=self._bulk.spliced,
            inbox_refused=self._bulk.refused,
            errors=errors,
        )

    def _verifier_until(self, until: int | None) -> Callable[..., Verifier]:
        from mqstore.log.recovery.verify import Verifier

        # Without an end, reading a log that grows as fast would never end.
        until = self._log.end if until is None else until
        self._dispatcher.catch_up()
        problems = [*self.parts.missing_in_front(), *self.parts.misplaced()]
        return partial(Verifier, self.parts, live=True, until=until, problems=problems)

    # -- closing ----------------------------------------------------------------------------------------------------

    def close(self, timeout: Duration = 30) -> None:
        """Dispatch, flush, write the checkpoint, and release the lock.

        A store whose last sync failed, or whose closing was interrupted, is not marked clean. Then the next opening
        reads the log again. A repeated call only releases resources that an interrupted call has kept. If the directory
        was removed or moved, the lock is released, and MissingFileError is raised.
        """
        timeout_s = seconds(timeout, "timeout")
        if self._released or self._close_lock.is_held_here:
            return
        for lock in self._bulk.lock, self._log.lock:
            lock.refuse_owner()
        with self._close_lock:
            self.is_lost()
            if self._closed:
                self._join_threads(timeout_s)
                self._release()
            else:
                self._close(timeout_s)
            if self._is_lost:
                self.check_closed()

    def _lose(self) -> None:
        self._is_lost = True
        self._errors.note("directory", self._refusal())
        self._syncs.poison(self._refusal())
        self.wakeups.stop()
        self.room.close()
        super()._lose()
        self._dispatcher.wake_all()
        for call in self.on_lost:
            call()

    def _close(self, timeout_s: float) -> None:
        try:
            self._closed = True
            self._dispatcher.wake_all()
            self.wakeups.stop()
            self._join_threads(timeout_s)
            self.room.close()
            with self._bulk.lock:  # a running bulk append notices that the store is closing, and undoes itself
                failed = self._log.failed
                self._log.poison(self._refusal())
            if failed is None:
                self._finish()
        finally:  # after Ctrl-C the end is not clean, but puts are refused, and the lock is released
            self.wakeups.stop()
            self._log.close(self._refusal())
            self._join_threads(timeout_s)
            # The files must not be closed while a bulk append undoes itself.
            with self._bulk.lock:
                self._release()

    def _join_threads(self, timeout_s: float) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():  # the garbage collector may run this in that thread
                thread.join(timeout_s)

    def _finish(self) -> None:
        """Do the steps of a clean end (format#opening). Until the last one, a crash is not a clean end."""
        if (soiled := self._log.settle()) is not None:
            self._log.run.sync(*soiled)
        if self._log.end > self._commit.flushed:
            self._commit.sync_now()
        try:
            # Ctrl-C in a put may have left a segment after the end, which opening would take for another log's.
            self._log.run.drop_from(max(self._log.end, self.log_files.min_offset + 1))
            self._dispatcher.run_once()
            self._dispatcher.put_pending()
        except OSError as error:
            _log.error("%s: not closed cleanly (%s); the next opening reads the log again", self.path, error)
            return
        if not self._checkpointer.sync_units():
            errors = self._errors.messages
            _log.error("%s: not closed cleanly (%s); the next opening reads the log again", self.path, errors)
            return
        end = self._log.end
        index_ms = self.index.full_end_timestamp_ms()
        digest, last = self.queue_table.digest(), self.parts.last_record(end)
        self._checkpointer.save(end, end, index_ms=index_ms, clean_end=end, last_record=last, queues=digest)
        if (self.queue_table.batch_topics and not self.clean_shutdown) or self.queue_table.in_rocksdb:
            return  # because of the mark RocketMQ reads the log again, and completes such queues
        self._abort.clear()

    def _release(self) -> None:
        if any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread()):
            # It may be writing, and another process must not become a second writer.
            _log.error("%s: a background thread still runs, so the lock is kept. Close the store again", self.path)
            return
        try:
            if hasattr(self, "parts"):  # opening may have failed before it was set
                self.parts.close()
            if hasattr(self, "records"):
                self.records.drop_ahead()
        finally:
            if self._lock is not None:
                self._lock.release()
            self._released = True
            _open_stores.discard(self)

    def _disown(self) -> None:
        """Detach from the parent's files for good, in a forked child."""
        self._closed = self._released = True
        self._parent = os.getppid()
        self.wakeups.stopping = True
        self._log.poison(self._refusal())
