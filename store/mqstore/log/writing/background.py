"""Background work of a store open for writing: the flusher thread, and saving of the checkpoint.

The thread does interval syncs, saves the checkpoint, prepares pages and segments, and runs added tasks (retention, the
inbox). A test with a simulated clock calls `run_once` itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from mqstore.files.filesystem import SyncNotBegunError, is_not_begun
from mqstore.files.flusher import GroupCommit
from mqstore.layout.checkpoint import Checkpoint
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.stats import TaskErrors
from mqstore.log.writing.dispatcher import Dispatcher
from mqstore.log.writing.wakeups import Wakeups
from mqstore.options import milliseconds
from mqstore.signalsafe import Lock

_FLUSH_PAGES = 4
"""Number of dirty 4 KiB pages that make an interval flush worth its sync."""

_CHECKPOINT_MS = 1_000
_CLOCK_MS = 60_000
_QUEUE_SYNC_MS = 10_000
_FEW_FILES = 64
AHEAD_MS = 300_000
"""A store time that is later than now by less than this is accepted: a clock was set back a little."""


class BackgroundWork:
    """Tasks of the flusher thread. A failed task is recorded in `errors` and retried."""

    def __init__(self, parts: StoreParts, commit: GroupCommit, checkpointer: Checkpointer, wakeups: Wakeups) -> None:
        self._parts = parts
        self._commit = commit
        self._dispatcher, self._errors = checkpointer.dispatcher, checkpointer.errors
        self._checkpointer = checkpointer
        self._wakeups = wakeups
        self._clock = parts.clock
        self._is_flush_wanted = False
        self._due_ms: dict[str, int] = {}
        self._tasks: list[tuple[str, int, Callable[[], object]]] = []
        self._thorough_ms = milliseconds(parts.config.full_flush_interval, "full_flush_interval")
        self.add_task("flush", milliseconds(parts.config.flush_interval, "flush_interval"), self._flush)
        self.add_task("checkpoint", _CHECKPOINT_MS, self.save_checkpoint)
        self.add_task("time", _CLOCK_MS, self.check_clock)

    def add_task(self, name: str, interval_ms: int, task: Callable[[], object]) -> None:
        """Call `task` every `interval_ms` from now on, after the tasks that were added before."""
        self._tasks.append((name, interval_ms, task))

    def step(self) -> float | None:
        """Do the due work of the flusher thread (`mqstore.threads`). Return None once the store is closed."""
        if self._wakeups.stopping:
            return None
        due = self.run_once(self._clock.monotonic_ms())
        return max(0.001, (due - self._clock.monotonic_ms()) / 1000)

    def run_once(self, now_ms: int) -> int:
        """Do the work due at `now_ms` (monotonic). Return the time of the next call."""
        if self._wakeups.log.end >= self._wakeups.room_mark:
            self._due_ms["room"] = 0
        for name, interval_ms, task in self._tasks:
            if now_ms < self._due_ms.setdefault(name, now_ms + interval_ms):
                continue
            self._due_ms[name] = now_ms + max(1, interval_ms)
            self._errors.attempt(name, task)
        self._errors.attempt("prepare", self._wakeups.prepare)  # cheap if nothing is due
        return min(self._due_ms[name] for name, _, _ in self._tasks)

    def call(self, name: str) -> None:
        """Wake the flusher to do a task now."""
        self._due_ms[name] = 0
        self._wakeups.flusher.ring()

    def flush_soon(self) -> None:
        """Wake the flusher to sync at once. For puts that do not wait, if only synced messages are shown."""
        self._is_flush_wanted = True  # first, since the flusher clears it before it reads the end of the log
        self.call("flush")

    def _flush(self) -> None:
        now = self._clock.monotonic_ms()
        wanted, self._is_flush_wanted = self._is_flush_wanted, False
        end, flushed = self._wakeups.log.end, self._commit.flushed
        last = self._due_ms.setdefault("thorough", now + self._thorough_ms)
        pages = end // 4096 - flushed // 4096
        if end > flushed and (wanted or now >= last or pages >= _FLUSH_PAGES):
            try:
                self._commit.sync_now()
            except SyncNotBegunError:
                self._is_flush_wanted |= wanted
                raise
            self._wakeups.synced()
        if now >= last:
            self._due_ms["thorough"] = now + self._thorough_ms

    def check_clock(self) -> None:
        """Warn once if the last message is from the future. Its store time stays wrong if the clock is corrected."""
        ahead_ms = self._dispatcher.last_store_timestamp_ms - self._clock.now_ms()
        if ahead_ms < AHEAD_MS:
            self._errors.clear("clock")
        else:
            ahead = timedelta(milliseconds=min(ahead_ms, 10**16))  # a damaged time may be beyond what timedelta holds
            self._errors.warn("clock", f"the last message was stored {ahead} ahead of the clock; is the clock right?")

    def save_checkpoint(self) -> None:
        """Save the checkpoint. Units are synced first, unless the last sync is recent and there are many files."""
        now = self._clock.monotonic_ms()
        parts, dispatcher = self._parts, self._dispatcher
        current = parts.checkpoint
        dispatched, index_ms = current.dispatched or 0, current.index_msg_timestamp_ms
        self._errors.attempt("index", dispatcher.put_pending)
        # Many small queues make a sync expensive, and it only saves reading after the next crash.
        if parts.queue_table.dirty_count <= _FEW_FILES or now >= self._due_ms.get("queues", 0):
            position, full_ms = dispatcher.position, parts.index.full_end_timestamp_ms()
            if not parts.index.pending and self._checkpointer.sync_units():
                dispatched, index_ms = position, full_ms
                self._due_ms["queues"] = now + _QUEUE_SYNC_MS
        last = current.confirm_physical_offset
        self._checkpointer.save(self._commit.flushed, dispatched, index_ms=index_ms, last_record=last)


class Checkpointer:
    """Syncs units and index entries, and saves the checkpoint while the store is open (format#checkpoint)."""

    def __init__(self, parts: StoreParts, dispatcher: Dispatcher, errors: TaskErrors) -> None:
        self.log_start: int | None = None
        """Start of the log in the checkpoint. None in profile `rocketmq`, since a Java broker does not update it."""
        self.is_doubtful = False
        """True if a sync of units has failed. They do not count as durable until the store is reopened."""
        self.dispatcher = dispatcher
        self.errors = errors
        self._parts = parts
        self._units_lock = Lock()
        self._lock = Lock()

    def sync_units(self) -> bool:
        """Make units and index entries durable. Return True if they are.

        A failed sync is not retried, except for lack of a descriptor. The system may have dropped unwritten bytes, and
        a second sync would succeed without them. The next opening rebuilds them from the log."""
        with self._units_lock:  # a second caller must not return before the first one is done
            if self.is_doubtful:
                return False
            try:
                self._parts.queue_table.sync()
                self._parts.index.sync()
            except OSError as error:
                self.is_doubtful = not is_not_begun(error)
                self.errors.note("units", error)
                return False
            self.errors.clear("units")
            return True

    def note_log_start(self, start: int) -> None:
        """Save the start of the log, before segments below it are deleted.
        A crash in between leaves too many segments, which is harmless."""
        with self._lock:
            if self.log_start is not None and self.log_start < start:
                self._parts.save_checkpoint(replace(self._parts.checkpoint, log_start=start))
                self.log_start = start  # only now: without the note on disk nothing may be deleted

    def save(
        self,
        flushed: int,
        dispatched: int,
        *,
        index_ms: int,
        last_record: int,
        clean_end: int = -1,
        queues: int | None = None,
    ) -> None:
        """Save the checkpoint. `index_ms` is the end of the newest full index file that was synced.
        `clean_end` and `queues` are given at a clean close alone.

        Times move only after their records are on disk. The last dispatched message is the newest one whose store time
        is known to be below both watermarks."""
        dispatcher = self.dispatcher
        with self._lock:
            current = self._parts.checkpoint
            physic = logics = dispatcher.last_store_timestamp_ms
            if dispatcher.position > flushed:
                physic = current.physic_msg_timestamp_ms
            if dispatcher.position > dispatched:
                logics = current.logics_msg_timestamp_ms
            self._parts.save_checkpoint(
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
                    log_start=self.log_start,
                )
            )
