"""Syncing of units and index entries, and saving of the checkpoint (format#checkpoint)."""

from __future__ import annotations

import threading
from dataclasses import replace

from mqstore.files.filesystem import is_not_begun
from mqstore.layout.checkpoint import Checkpoint
from mqstore.log.parts import StoreParts
from mqstore.log.reput import Dispatcher
from mqstore.log.taskerrors import TaskErrors

__all__ = ["Checkpointer"]


class Checkpointer:
    """The only writer of the checkpoint while the store is open."""

    def __init__(self, parts: StoreParts, dispatcher: Dispatcher, errors: TaskErrors) -> None:
        self.log_start: int | None = None
        """Start of the log in the checkpoint. None in profile `rocketmq`: a Java broker does not update it."""
        self.is_doubtful = False
        """True if a sync of units has failed. They do not count as durable until the store is opened again."""
        self._parts = parts
        self._dispatcher = dispatcher
        self._errors = errors
        self._units_lock = threading.Lock()
        self._lock = threading.RLock()

    def sync_units(self) -> bool:
        """Make units and index entries durable. Return True if they are.

        A failed sync is not tried again, except for lack of a descriptor. The system may have dropped unwritten bytes,
        and a second sync would not know. The next opening rebuilds them from the log."""
        with self._units_lock:  # a second caller must not return before the first one is done
            if self.is_doubtful:
                return False
            try:
                self._parts.queue_table.sync()
                self._parts.index.sync()
            except OSError as error:
                self.is_doubtful = not is_not_begun(error)
                self._errors.note("units", error)
                return False
            self._errors.clear("units")
            return True

    def note_log_start(self, start: int) -> None:
        """Save the start of the log, before segments below it are deleted.
        After a crash in between there are too many segments, which is no loss."""
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
        clean_end: int,
        last_record: int,
        queues: int | None = None,
    ) -> None:
        """Save the checkpoint. `index_ms` is the end of the newest full index file that was synced.

        Times only move once their records are on disk. The last dispatched message is the newest whose store time is
        known to lie below both watermarks."""
        dispatcher = self._dispatcher
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
