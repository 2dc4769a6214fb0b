"""Room on the disk: what is kept back for consumers, and what is deleted when the disk is full (format#room).

    free bytes of the disk, and blocks that the log has ahead
    +------------------------------+--------------------------------------------+
      a put may take this            kept back: acknowledgements, units, checkpoints

Puts and bulk appends of applications ask (`LogWriter.check_room`) before the log grows beyond `CommitLog.free_until`.
The engine's own records do not. A put that would take what is kept back is refused, after segments that nobody needs
were deleted. So a full disk can be consumed down to the last message, and is free then.

A part of it is kept in the file tmp/room. Opening on a full disk removes it: it can be freed then, whoever filled it.

Only the flusher deletes, if it runs. A put waits for it, because its own thread may hold a lock, or be a signal
handler's. The flusher does not wait for itself when it appends the bundles of the inbox.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mqstore.errors import MQStoreError, StoreFullError
from mqstore.files.filesystem import FileSystem
from mqstore.layout.record import MIN_RECORD_BYTES
from mqstore.log.commitlog import CommitLog
from mqstore.log.parts import StoreParts
from mqstore.log.reput import Dispatcher
from mqstore.options import Retention
from mqstore.signalsafe import Gate, Lock

__all__ = ["Room", "give_up_room"]

_KEPT_BYTES = 1 << 20
"""Kept back for units, checkpoints and JSON files, whatever waits: as much, or a segment if that is smaller."""
_FILE = "tmp/room"
"""File that holds a quarter of it."""
_CLEAN_MS = 100
"""A log that is larger than retention allows is cleaned again after this time, as long as puts come."""
_PATIENCE_S = 10.0
"""Maximum time that a put waits for the flusher to free room."""
_SETTLING_BYTES = 448
"""Bytes of the records and units by which a message is popped and acknowledged alone: about 400 (`python -m bench`)."""
_SHARE = 8
"""A put checks again when the log has grown by this part of the bytes that were to spare, divided by the groups.
Each group needs at most six times the bytes of messages to acknowledge them one by one, and the log needs them once."""


class _Append(NamedTuple):
    """Messages that an application appends."""

    size: int = 0
    """Bytes of their records, units and index entries."""
    messages: Mapping[str, int] = {}
    """Number of messages by topic. A few need not be counted."""


def give_up_room(root: Path, fs: FileSystem) -> None:
    """Free the room that the last writer of a store has kept, if the disk is full. For opening, which needs some."""
    if fs.free_bytes(root) < _KEPT_BYTES:
        fs.unlink(root / _FILE, missing_ok=True)


class Room:
    """Room for the log of a store that is open for writing."""

    def __init__(
        self,
        parts: StoreParts,
        log: CommitLog,
        dispatcher: Dispatcher,
        *,
        policy: Callable[[], Retention | None],
        clean: Callable[[Retention], object],
        drop_before: Callable[[int], object],
        call_flusher: Callable[[], bool],
    ) -> None:
        """`policy` returns the retention in force, or None. `clean` applies it. `call_flusher` makes the flusher call
        `run_once`. It returns False if it is called by the flusher, or there is none."""
        self.deliveries: Callable[[], int] = lambda: (log.end - log.min_offset) // MIN_RECORD_BYTES
        """Returns how many deliveries of stored messages are to come: each group gets each of its messages.
        Set by a broker. Nobody knows while the store is opened, so all of the log counts then."""
        self.groups: Callable[[str | None], int] = lambda topic: 1
        """Returns how many groups may consume each message of a topic (None: of any), at least 1. Set by a broker."""
        self.bound: Callable[[Retention], int] | None = None
        """Returns the physical offset below which no message is needed. Set by a broker."""
        self.settle: Callable[[], None] = lambda: None
        """Saves the state that decides `bound`, as of now. Set by a broker."""
        self._parts = parts
        self._log = log
        self._dispatcher = dispatcher
        self._policy = policy
        self._clean = clean
        self._drop_before = drop_before
        self._call_flusher = call_flusher
        self._kept = min(_KEPT_BYTES, log.run.segment_bytes)
        self._lock = Lock()
        self._is_held = False
        """True if `tmp/room` exists."""
        self._wanted = _Append()
        """Largest append that waits for room."""
        self._paced_to = 0
        """End of the log up to which records of the engine do not wait."""
        self._cleaned_ms = 0
        self._cleaned = Gate()
        """Opened when the next run has cleaned."""
        self._is_closed = False

    def start(self) -> None:
        """Free room if an earlier process has left the disk full, once a broker knows what is needed."""
        if self.bound is None:
            self.deliveries = lambda: 0
        if not self._has_room(_Append()) and self.bound is not None:
            self._wait_for_run()

    def check(self, size: int, messages: Mapping[str, int]) -> None:
        """Make room for `size` bytes for which `CommitLog.has_room` is false. Raises StoreFullError.
        `messages` is the number of messages by topic. A few need not be counted."""
        log, segment_bytes = self._log, self._log.run.segment_bytes
        policy = self._policy()
        if policy is not None and policy.max_bytes is not None:
            over = log.end - log.min_offset - policy.max_bytes - 2 * segment_bytes
            if over > 0 and not 0 <= self._parts.clock.monotonic_ms() - self._cleaned_ms < _CLEAN_MS:
                self._wait_for_run()
        new = _Append(size, messages)
        if log.end + size <= log.free_until or self._has_room(new, amply=True):
            return
        with self._lock:
            self._wanted = max(self._wanted, new, key=lambda each: each.size)
        self._wait_for_run()
        if not self._has_room(new):
            raise self._error(new)

    def pace(self) -> None:
        """Wait for the flusher once consumers have used an eighth of what is kept back. The caller holds no lock.
        Else a thread that consumes without pause may use all of it before the segments that it has settled are gone."""
        if self._log.end > max(self._log.free_until, self._paced_to):
            self._wait_for_run()
            self._paced_to = self._log.end + self._kept // _SHARE

    def run_once(self) -> None:
        """Delete what retention does not keep and, on a full disk, what nobody needs. For the flusher."""
        cleaned, self._cleaned = self._cleaned, Gate()
        with self._lock:
            wanted, self._wanted = self._wanted, _Append()
        try:
            self._dispatcher.catch_up()
            policy = self._policy()
            if policy is not None:
                self._clean(policy)
                if self._log.end + wanted.size > self._log.free_until and not self._has_room(wanted, amply=True):
                    self._free(policy, wanted)
                    self._has_room(wanted)
        finally:
            self._cleaned_ms = self._parts.clock.monotonic_ms()
            cleaned.open()

    def close(self) -> None:
        """Let puts wait no longer: the flusher ends."""
        self._is_closed = True
        self._cleaned.open()

    def look(self) -> None:
        """Do what `run_once` does if the engine's own records have used the room that was found. For the flusher."""
        if self._log.end > self._log.free_until:
            self.run_once()

    def _wait_for_run(self) -> None:
        cleaned = self._cleaned
        if self._is_closed:
            return
        if self._call_flusher():
            cleaned.wait(_PATIENCE_S)
        else:
            self.run_once()

    def _has_room(self, new: _Append, *, amply: bool = False) -> bool:
        """Return True if `new` leaves free what is kept back. Note the result for later puts.
        `amply` asks for a part of the last segment more. It may end early now, but not once new messages are in it."""
        free, last, groups = self._free_bytes(), self._log.run.last, self.groups(None)
        more = max(0, self._log.end - last.start) // _SHARE if amply and last is not None else 0
        spare = free - self._kept_bytes(new, groups, free) - new.size
        fits = spare >= more and (not isinstance(self._dispatcher.error, StoreFullError) or self._dispatcher.catch_up())
        self._log.free_until = self._log.end + (new.size + spare // (_SHARE * groups) if fits else 0)
        self._hold(fits)
        return fits

    def _hold(self, wanted: bool) -> None:
        """Keep room in a file if `wanted`, or give it up."""
        fs, path = self._parts.fs, self._parts.root / _FILE
        with self._lock:
            if wanted and not self._is_held:
                with suppress(StoreFullError):
                    with fs.opened(path, os.O_RDWR | os.O_CREAT, self._parts.config.file_mode) as fd:
                        fs.allocate(fd, self._kept // 4, self._kept // 4)
                    self._is_held = True
            elif not wanted:
                fs.unlink(path, missing_ok=True)
                self._is_held = False

    def _free_bytes(self) -> int:
        run = self._log.run
        held = self._kept // 4 if self._is_held else 0
        return self._parts.fs.free_bytes(run.directory.parent) + run.allocated_beyond(self._log.end) + held

    def _kept_bytes(self, new: _Append, groups: int, free: int = 0) -> int:
        """Return how many bytes to keep back once `new` is stored: for settling, until segments can be deleted.

        A settled segment is deleted, then the next one. More than one segment's worth is needed only if settling takes
        more bytes than the messages have. No queue is looked at if `free` bytes are enough in any case: there may be
        100,000."""
        log = self._log
        held = max(1, log.end - log.min_offset + new.size)
        most = self._kept + held // MIN_RECORD_BYTES * _SETTLING_BYTES * groups
        if most <= free - new.size:
            return most
        deliveries = self.deliveries() + sum(count * self.groups(topic) for topic, count in new.messages.items())
        settling = deliveries * _SETTLING_BYTES
        return self._kept + settling * min(log.run.segment_bytes, held) // held + max(0, settling - held)

    def _free(self, policy: Retention, wanted: _Append) -> None:
        """Delete the oldest segments that nobody needs, as many as there is room missing and an eighth of the log."""
        if self.bound is None:
            return
        log, run = self._log, self._log.run
        with suppress(MQStoreError):  # then what was saved before decides
            self.settle()
        unneeded = self.bound(policy)
        kept = self._kept_bytes(wanted, self.groups(None))
        missing = max(0, kept + wanted.size - self._free_bytes()) + (log.end - log.min_offset) // _SHARE
        count = -(-missing // run.segment_bytes)
        self._drop_before(min(unneeded, log.min_offset + count * run.segment_bytes))
        last = run.last
        is_unneeded = last is not None and 2 * (unneeded - last.start) > log.end - last.start > 0
        if is_unneeded and not self._has_room(wanted, amply=True):
            # The last segment is never deleted. It ends early if most of it is not needed any more.
            log.end_segment()
            self._dispatcher.catch_up()
            self._drop_before(self.bound(policy))

    def _error(self, new: _Append) -> StoreFullError:
        free, kept = self._free_bytes(), self._kept_bytes(new, self.groups(None))
        segment_bytes = self._log.run.segment_bytes
        text = (
            f"{free:,} bytes are free, of which {kept:,} are kept back so that consumers can settle what waits. This "
            f"needs {new.size:,}. Consumed messages give space back in whole segments, of {segment_bytes:,} bytes "
            "here; a new store can have smaller ones (StoreConfig.segment_bytes)"
        )
        return StoreFullError(errno.ENOSPC, text, str(self._parts.root), "put")
