"""Message store as one object, open for writing: opening, putting, housekeeping, closing.

    put -> commitlog -> (dispatcher) -> consume queue + index -> read

    thread       does                                                        waits for
    dispatcher   builds units from what was appended, wakes waiting readers  a put; 10 ms or 4 MiB while puts go on
    flusher      interval syncs, checkpoint, next segment, retention         its next due time, or a position in the log

Both are plain `run` functions. A test with a simulated clock calls `dispatch` and `run_once` instead. A put with
durability "flush" syncs in its own thread, or waits for another that does. Nothing here knows consumer groups.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import ClassVar, Concatenate, Literal, ParamSpec, TypeVar

from mqstore.clock import SYSTEM_CLOCK
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.lock import AbortMark, WriterLock
from mqstore.layout.hosts import encode_host
from mqstore.log import manifest as manifests
from mqstore.log.background import BackgroundWork, Checkpointer
from mqstore.log.bulk.inbox import BulkAppender, CreateTopics
from mqstore.log.bulk.splice import Splicer, SpliceResult
from mqstore.log.bulk.txn import TxnFile
from mqstore.log.commitlog import CommitLog
from mqstore.log.manifest import check_own
from mqstore.log.news import OwnNews
from mqstore.log.opening import Opening
from mqstore.log.parts import StoreParts
from mqstore.log.reader import StoreReader
from mqstore.log.recovery.recover import Progress, RecoverOptions
from mqstore.log.recovery.verify import Verifier
from mqstore.log.reput import Dispatcher, DispatchThread
from mqstore.log.retention import Retainer
from mqstore.log.room import Room
from mqstore.log.stats import StoreStats
from mqstore.log.syncs import LogSyncs
from mqstore.log.taskerrors import TaskErrors
from mqstore.log.wakeups import PagesAhead, Wakeups
from mqstore.log.writer import LogWriter, Sending, compiled_put
from mqstore.options import Durability, Duration, Profile, Retention, StoreConfig, check_durability, seconds
from mqstore.threads import start_thread

__all__ = ["MessageStore"]

_log = logging.getLogger("mqstore")
_P = ParamSpec("_P")
_R = TypeVar("_R")

_RETENTION_MS = 10_000
_ROOM_MS = 1_000
_INBOX_MS = 2_000
_LOOK_MS = 500
"""Interval at which a store makes sure that its directory is still there."""


_open_stores: weakref.WeakSet[MessageStore] = weakref.WeakSet()


def _close_all() -> None:
    for store in list(_open_stores):
        try:
            store.close()
        except Exception:  # there is no caller to report to, and the other stores must still be closed cleanly
            _log.exception("%s: not closed cleanly", store.path)


def _disown_all() -> None:
    # In a forked child the mappings are shared with the parent, which continues to write them.
    for store in list(_open_stores):
        store.disown()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)


def _by_writer(method: Callable[Concatenate[LogWriter, _P], _R]) -> Callable[Concatenate[MessageStore, _P], _R]:
    """Return the method of a store that calls `method` of its writer."""

    @wraps(method)
    def call(self: MessageStore, /, *args: _P.args, **options: _P.kwargs) -> _R:
        return method(self.writer, *args, **options)

    return call


class MessageStore(StoreReader, Sending):
    """Store directory, opened for writing. Use `mqstore.open`.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.engine.MessageStore(folder) as store:
    ...     receipt = store.put("orders", b"hello", tag="created", keys=["o-1"])
    ...     [message] = store.read("orders")
    ...     message.body, message.tag, message.keys, receipt.offset
    (b'hello', 'created', ('o-1',), 0)
    """

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
            # Another process may have made the store while we waited.
            self.manifest = resolve(self.path, clock=self.clock)
            self._open_for_writing(recover_options or RecoverOptions(), progress)
            self._opened()
            _open_stores.add(self)
            self._errors.attempt("inbox", self.take_inbox)
            if self._background:
                self._start_threads()
            self.room.start()
        except BaseException:  # nobody else would release the lock
            if not self._closed:
                self.close()
            else:
                self._release()
            raise

    # -- opening ----------------------------------------------------------------------------------------------------

    def _build(self, txn: TxnFile) -> None:
        """Create the objects that work on the parts."""
        parts, config, errors = self.parts, self.config, self._errors
        pages = PagesAhead(parts.log_writer, self.clock)
        flushes = self.durability == "flush"
        self.wakeups = Wakeups(pages, background=self._background, after_sync=flushes)
        self._log = self.wakeups.log = CommitLog(
            parts.log_writer,
            checksum=parts.checksum,
            clock=self.clock,
            store_host=encode_host(config.store_host),
            on_alarm=self.wakeups.passed,
        )
        self._syncs = LogSyncs(parts, self._log, self.wakeups, self.is_lost, by_default=flushes)
        self._commit = self._syncs.commit
        visible_end = self._syncs.visible_end
        self._dispatcher = Dispatcher(
            self._log, parts.queue_table, parts.index, checksum=parts.checksum, end_of=visible_end
        )
        self.on_growth = self._dispatcher.listeners
        self.default_retention: Retention | None = None
        """Retention of a store that was given none. Set by a broker."""
        self.on_lost: list[Callable[[], object]] = []
        """Called when the directory is gone, in any thread and under any lock. They may only wake other threads."""
        self._read_by(OwnNews(self._dispatcher, self.wakeups, visible_end=visible_end, check_open=self.check_closed))
        self._checkpointer = Checkpointer(parts, self._dispatcher, errors)
        self.background = BackgroundWork(
            parts, self._commit, self._dispatcher, self._checkpointer, self.wakeups, errors
        )
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
        self._retainer = Retainer(
            parts,
            self._log,
            self._dispatcher,
            self._checkpointer,
            errors,
            settled=lambda: min(self._dispatcher.position, self._commit.flushed),
        )
        splicer = Splicer(
            parts,
            txn,
            self._log,
            queue_of=self.writer.queue_to_splice,
            check_room=self.writer.check_room,
            sync=self._syncs.sync_beyond,
            poison=self._syncs.poison,
            stopping=lambda: self.wakeups.stopping,
        )
        self._bulk = BulkAppender(parts, splicer, self._commit, appended=self.wakeups.passed)
        self.background.add_task("look", _LOOK_MS, self.is_lost)
        self.room = Room(
            parts,
            self._log,
            self._dispatcher,
            policy=lambda: config.retention or self.default_retention,
            clean=self.clean,
            drop_before=self._retainer.drop_before,
            call_flusher=self._call_flusher,
        )
        self.background.add_task("retention", _RETENTION_MS, self.room.run_once)
        self.background.add_task("room", _ROOM_MS, self.room.look)
        self.background.add_task("inbox", _INBOX_MS, self._bulk.take_inbox_if_idle)

    def _open_for_writing(self, options: RecoverOptions, progress: Progress | None) -> None:
        parts = StoreParts(self.path, self.manifest, self.config, self.fs, self.clock, writable=True)
        self._set_parts(parts)
        txn = TxnFile(self.path, self.fs, self.clock, self.config.file_mode)
        opened = Opening(parts, txn, self._abort).run(options, progress)
        outcome, end = opened.outcome, opened.outcome.end
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
            # Segments lost at its beginning stay in the checkpoint, until retention has passed them.
            noted = parts.checkpoint.log_start if parts.log_files.starts else None
            self._checkpointer.log_start = self._log.min_offset if noted is None else min(noted, self._log.min_offset)
        self._checkpointer.save(
            end,
            end,
            index_ms=parts.index.full_end_timestamp_ms(),
            clean_end=-1,
            last_record=max(0, outcome.last_record),
        )
        self.background.check_clock()
        if opened.went_down:
            self._abort.set(os.getpid())
        self.wakeups.set()

    # -- putting: documented in `LogWriter` -------------------------------------------------------------------------

    put = compiled_put(_by_writer(LogWriter.put))
    put_many = _by_writer(LogWriter.put_many)
    append = _by_writer(LogWriter.append)
    copy_many = _by_writer(LogWriter.copy_many)
    outlet = _by_writer(LogWriter.outlet)
    take_put_times = _by_writer(LogWriter.take_put_times)

    def flush(self) -> None:
        """Return when all earlier puts are on disk. Raises FlushFailedError, FlushTimeoutError."""
        self.check_open()
        self._syncs.flush()

    # -- dispatch and waiting ---------------------------------------------------------------------------------------

    def dispatch(self) -> int:
        """Make all earlier puts visible, in this thread. Return the bytes dispatched. Reads do it themselves."""
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

    def attend(self, waiting: bool) -> None:
        """Note whether somebody waits for `on_growth`.
        Meanwhile puts become visible at once, and not after the dispatcher has let puts run for a while."""
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
        """Do the background work that is due at `now_ms` (monotonic). Return when to call again.
        For tests with a simulated clock. A task that fails is logged, shows in `stats().errors`, and is tried again."""
        return self.background.run_once(now_ms)

    # -- splicing ---------------------------------------------------------------------------------------------------

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

        `shards` are folders as in `log.shard`. `app` and `version` identify this bulk append. If the version is not
        above the last one of the application, it is in already, and nothing is done. All shards are checked before
        anything is written. Puts wait meanwhile. Readers see all records together at the end. `progress(done, total)`
        gets bytes, each counted twice: checked and copied. Its errors undo the bulk append. Without `remembered` the
        version is not saved, for callers that use a new `app` each time and never repeat a bulk append. With `accepted`
        a store has taken the messages before, and they may be larger than `max_message_size`.

        Raises FormatError for a bad shard, ConfigError for a bad `app` or `version`, StoreFullError and StoreIOError.
        Then the store is as before. After FlushFailedError the result is not known: the next opening decides it, and a
        repeated call shows it. Also raises ReadOnlyStoreError, StoreBusyError and StoreClosedError.
        """
        self.check_open()
        splice = partial(self._bulk.splicer.splice, remembered=remembered, accepted=accepted)
        with self._bulk.lock:
            result = splice(shards, app=app, version=version, progress=progress)
        return self._bulk.show(result)

    def spliced_version(self, app: str) -> int:
        """Return the last version that was appended in bulk for `app`, or -1 if none is remembered."""
        self.check_open()
        return self._bulk.txn.state.version_of(app)

    def take_inbox(self) -> int:
        """Append the bundles that wait in `inbox/`, in this thread. Return how many.
        Opening does this, and the background work from time to time. Raises the error that keeps a bundle from being
        appended. Bad bundles are moved aside."""
        with self._bulk.lock:
            self.check_open()
            return self._bulk.take_inbox()

    def enter_topics_by(self, create_topics: CreateTopics) -> None:
        """Create the topics of bundles with `create_topics` from now on (spark#splice). For a broker.
        Topics of bundles that were appended without a broker are created at once."""
        self._bulk.enter_topics_by(create_topics, self._errors)

    # -- retention --------------------------------------------------------------------------------------------------

    def drop_before(self, physical_offset: int) -> list[str]:
        """Delete whole segments below `physical_offset`, oldest first, never the one that is written.

        Consume queues and index follow. Returns the names of the deleted segments. Messages that a program holds stay
        valid (format#retention). Raises FlushFailedError, with nothing deleted, if the units of the remaining records
        cannot be made durable."""
        self.check_open()
        return self._retainer.drop_before(physical_offset)

    def delete_topics(self, topics: Collection[str]) -> None:
        """Delete all messages of `topics` that were put before. No reader finds them any more, also after a crash.
        Queue offsets continue. Retention frees the space in the log. Raises what `dispatch` raises, StoreFullError and
        StoreIOError. Then nothing has changed, or the next call or opening does what is left."""
        self.dispatch()
        self._retainer.delete(topics)

    def clean(self, retention: Retention | None = None) -> list[str]:
        """Delete segments that `retention` (default: the store's) does not keep. Return their names."""
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
        Ignores what a broker still needs."""
        self.check_open()
        return self._retainer.expired(retention)

    # -- looking at it ----------------------------------------------------------------------------------------------

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
            errors["index"] = f"{self.index.dropped_entries} entries given up while the disk was full"
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
        self._dispatcher.catch_up()
        problems = [*self.parts.missing_in_front(), *self.parts.misplaced()]
        return partial(Verifier, self.parts, live=True, until=until, problems=problems)

    # -- closing ----------------------------------------------------------------------------------------------------

    def close(self, timeout: Duration = 30) -> None:
        """Dispatch, flush, write the checkpoint, and release the lock.

        A store whose last sync failed, or whose closing was interrupted, is not marked clean: the next opening reads
        the log again. Calling it again only releases what an interrupted call has kept. If the directory was removed
        or moved, the lock is released, and MissingFileError is raised.
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
            with self._bulk.lock:  # a bulk append sees that the store is closing, and undoes itself
                failed = self._log.failed
                self._log.poison(self._refusal())
            if failed is None:
                self._finish()
        finally:  # Ctrl-C in between costs the clean end, but puts are refused, and the lock is released
            self.wakeups.stop()
            self._log.close(self._refusal())
            self._join_threads(timeout_s)
            # The files must not be closed while a bulk append undoes itself.
            with self._bulk.lock:
                self._release()

    def _join_threads(self, timeout_s: float) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():  # it may be the one that collects a forgotten store
                thread.join(timeout_s)

    def _finish(self) -> None:
        """Do all that a clean end needs (format#opening). Until the last line, a crash is not a clean end."""
        if (soiled := self._log.settle()) is not None:
            self._log.run.sync(*soiled)
        if self._log.end > self._commit.flushed:
            self._commit.sync_now()
        try:
            # Ctrl-C in a put may have left a segment behind the end, which opening would take for another log's.
            self._log.run.drop_from(max(self._log.end, self.log_files.min_offset + 1))
            self._dispatcher.run_once()
            self._dispatcher.put_pending()
        except OSError as error:
            _log.error("%s: not closed cleanly: %s; the next opening reads the log again", self.path, error)
            return
        if not self._checkpointer.sync_units():
            errors = self._errors.messages
            _log.error("%s: not closed cleanly: %s; the next opening reads the log again", self.path, errors)
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
            _log.error("%s: a background thread still runs, so its lock is kept; close the store again", self.path)
            return
        try:
            if hasattr(self, "parts"):  # opening may have failed before that
                self.parts.close()
        finally:
            if self._lock is not None:
                self._lock.release()
            self._released = True
            _open_stores.discard(self)

    def disown(self) -> None:
        """Never touch the parent's files again, in a forked child."""
        self._closed = self._released = True
        self._parent = os.getppid()
        self.wakeups.stopping = True
        self._log.poison(self._refusal())
