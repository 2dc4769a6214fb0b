"""Disk space: the part reserved for consumers, and deletion when the disk is full (format#room).

    free bytes of the disk, and blocks that the log has allocated
    +------------------------------+--------------------------------------------+
      available to puts              reserved: acknowledgements, units, checkpoints

Puts and bulk appends of applications ask (`LogWriter.check_room`) before the log grows beyond `CommitLog.free_until`.
The engine's own records do not. A put that would use the reserve is refused, after segments that nobody needs were
deleted. So a full disk can be consumed down to the last message, and is free then.

A part of the reserve is the file tmp/room. Opening on a full disk deletes it, whoever filled the disk.

If the flusher runs, only the flusher deletes. A put waits for it, because the put's own thread may hold a lock, or be
in a signal handler. The flusher does not wait for itself when it appends the bundles of the inbox.
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
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.writing.dispatcher import Dispatcher
from mqstore.options import Retention
from mqstore.signalsafe import Gate, Lock

_KEPT_BYTES = 1 << 20
"""Minimum reserve for units, checkpoints and JSON files: as much, or a segment if that is smaller."""
_FILE = "tmp/room"
"""File that takes a quarter of the reserve."""
_CLEAN_MS = 100
"""Time after which a log above its retention limit is cleaned again, while puts continue."""
_PATIENCE_S = 10.0
"""Maximum time that a put waits for the flusher to free room."""
_SETTLING_BYTES = 448
"""Bytes of the records and units that pop and acknowledge one message: about 400 (`python -m bench`)."""
_SHARE = 8
"""A put checks again when the log has grown by this part of the spare bytes, divided by the groups.
Each group needs at most six times the bytes of messages to acknowledge them one by one, and the log needs them once."""


class _Append(NamedTuple):
    """Messages that an application appends."""

    size: int = 0
    """Bytes of their records, units and index entries."""
    messages: Mapping[str, int] = {}
    """Number of messages by topic. It may leave out a few."""


def give_up_room(root: Path, fs: FileSystem) -> None:
    """Free the reserve of a store's last writer if the disk is full. For opening, which needs some space."""
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
        `run_once`. It returns False if the caller is the flusher, or if there is none."""
        self.deliveries: Callable[[], int] = lambda: (log.end - log.min_offset) // MIN_RECORD_BYTES
        """Function that returns the number of pending deliveries: each group gets each of its messages.
        Set by a broker. While the store is opened, the number is unknown, so all of the log counts."""
        self.groups: Callable[[str | None], int] = lambda topic: 1
        """Function that returns how many groups may consume each message of a topic (None: any), at least 1.
        Set by a broker."""
        self.bound: Callable[[Retention], int] | None = None
        """Function that returns the physical offset below which no message is needed. Set by a broker."""
        self.settle: Callable[[], None] = lambda: None
        """Function that saves the present state that decides `bound`. Set by a broker."""
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
        """Free room if an earlier process left the disk full, once a broker knows which messages are needed."""
        if self.bound is None:
            self.deliveries = lambda: 0
        if not self._has_room(_Append()) and self.bound is not None:
            self._wait_for_run()

    def check(self, size: int, messages: Mapping[str, int]) -> None:
        """Make room for `size` bytes for which `CommitLog.has_room` is false. Raises StoreFullError.
        `messages` is the number of messages by topic. It may leave out a few."""
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
        """Wait for the flusher once consumers have used an eighth of the reserve. The caller holds no lock.
        Otherwise a thread that consumes without pause may use all of it before the flusher has deleted the consumed
        segments."""
        if self._log.end > max(self._log.free_until, self._paced_to):
            self._wait_for_run()
            self._paced_to = self._log.end + self._kept // _SHARE

    def run_once(self) -> None:
        """Delete segments beyond retention and, on a full disk, segments that nobody needs. For the flusher."""
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
        """Make no put wait any longer, since the flusher ends."""
        self._is_closed = True
        self._cleaned.open()

    def look(self) -> None:
        """Call `run_once` if the engine's own records have used the room found before. For the flusher."""
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
        """Return True if `new` leaves the reserve free. Save the result for later puts.
        `amply` requires a part of the last segment in addition. That segment may be closed early now, but not once it
        has new messages."""
        free, last, groups = self._free_bytes(), self._log.run.last, self.groups(None)
        more = max(0, self._log.end - last.start) // _SHARE if amply and last is not None else 0
        spare = free - self._kept_bytes(new, groups, free) - new.size
        fits = spare >= more and (not isinstance(self._dispatcher.error, StoreFullError) or self._dispatcher.catch_up())
        self._log.set_free_until(self._log.end + (new.size + spare // (_SHARE * groups) if fits else 0))
        self._hold(fits)
        return fits

    def _hold(self, wanted: bool) -> None:
        """Reserve room in a file if `wanted`, or free it."""
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
        """Return the number of bytes to reserve once `new` is stored: for settling, until segments can be deleted.

        A settled segment is deleted, then the next one. More than one segment's worth is needed only if settling takes
        more bytes than the messages have. If `free` bytes are enough in any case, no queue is examined: there may be
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
        """Delete the oldest segments that nobody needs: enough for the missing room and an eighth of the log."""
        if self.bound is None:
            return
        log, run = self._log, self._log.run
        with suppress(MQStoreError):  # then the state saved before decides
            self.settle()
        unneeded = self.bound(policy)
        kept = self._kept_bytes(wanted, self.groups(None))
        missing = max(0, kept + wanted.size - self._free_bytes()) + (log.end - log.min_offset) // _SHARE
        count = -(-missing // run.segment_bytes)
        self._drop_before(min(unneeded, log.min_offset + count * run.segment_bytes))
        last = run.last
        is_unneeded = last is not None and 2 * (unneeded - last.start) > log.end - last.start > 0
        if is_unneeded and not self._has_room(wanted, amply=True):
            # The last segment is never deleted. It is closed early if most of it is not needed any more.
            log.end_segment()
            self._dispatcher.catch_up()
            self._drop_before(self.bound(policy))

    def _error(self, new: _Append) -> StoreFullError:
        free, kept = self._free_bytes(), self._kept_bytes(new, self.groups(None))
        segment_bytes = self._log.run.segment_bytes
        text = (
            f"{free:,} bytes are free, of which {kept:,} are reserved so that consumers can settle waiting messages. "
            f"This needs {new.size:,}. Consumed messages free space in whole segments of {segment_bytes:,} bytes. "
            "A new store can have smaller ones (StoreConfig.segment_bytes)"
        )
        return StoreFullError(errno.ENOSPC, text, str(self._parts.root), "put")
