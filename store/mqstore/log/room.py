"""Room on the disk: what is kept back for consumers, and what is deleted when the disk is full (format#room).

    free bytes of the disk, and blocks that the log has ahead
    +------------------------------+--------------------------------------------+
      a put may take this            kept back: acknowledgements, units, checkpoints

Puts of applications ask before the log grows beyond `CommitLog.free_until`; the engine's own records do not. A put that
would take what is kept back is refused, after segments that nobody needs were deleted. So a full disk can be consumed
down to the last message, and is free then.

A part of it is kept in the file tmp/room. Opening on a full disk removes it: it can be freed then, whoever filled it.

Only the flusher deletes. A put waits for it, because its own thread may hold a lock, or be a signal handler's.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mqstore.errors import MQStoreError, StoreFullError
from mqstore.files.filesystem import FileSystem
from mqstore.log.commitlog import CommitLog
from mqstore.log.parts import StoreParts
from mqstore.log.reput import Dispatcher
from mqstore.options import Retention
from mqstore.signalsafe import Gate

__all__ = ["Room", "give_up_room"]

_KEPT_BYTES = 1 << 20
"""Kept back for units, checkpoints and JSON files, whatever waits: as much, or a segment if that is smaller."""
_FILE = "tmp/room"
"""File that holds a quarter of it."""
_CLEAN_MS = 100
"""A log that is larger than retention allows is cleaned again after this time, as long as puts come."""
_PATIENCE_S = 10.0
"""Maximum time that a put waits for the flusher to free room."""
_SHARE = 8
"""A put checks again when the log has grown by this part of the bytes that were to spare, divided by the groups.
Each group needs at most six times the bytes of messages to acknowledge them one by one, and the log needs them once."""


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
        call_flusher: Callable[[], None] | None,
    ) -> None:
        """`policy` returns the retention in force, or None. `clean` applies it. `call_flusher` makes the flusher call
        `run_once`; it is None for a store without background threads."""
        self.needed: Callable[[int], int] = lambda free: 0
        """Returns the bytes that consumers will store to settle what waits. It may return more, up to `free`.
        Set by a broker."""
        self.groups: Callable[[], int] = lambda: 1
        """Returns how many groups may consume each message, at least 1. Set by a broker."""
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
        self._lock = threading.RLock()
        self._is_held = False
        """True if `tmp/room` exists."""
        self._wanted = 0
        """Size of the largest put that waits for room."""
        self._cleaned_ms = 0
        self._cleaned = Gate()
        """Opened when the next run has cleaned."""

    def start(self) -> None:
        """Free room if an earlier process has left the disk full, once a broker knows what is needed."""
        if not self._has_room(0) and self.bound is not None:
            self._wait_for_run()

    def check(self, size: int) -> None:
        """Make room for a put of `size` bytes for which `CommitLog.has_room` is false. Raises StoreFullError."""
        log, segment_bytes = self._log, self._log.run.segment_bytes
        policy = self._policy()
        if policy is not None and policy.max_bytes is not None:
            over = log.end - log.min_offset - policy.max_bytes - 2 * segment_bytes
            if over > 0 and not 0 <= self._parts.clock.monotonic_ms() - self._cleaned_ms < _CLEAN_MS:
                self._wait_for_run()
        if log.end + size <= log.free_until or self._has_room(size, amply=True):
            return
        self._wanted = max(self._wanted, size)
        self._wait_for_run()
        if not self._has_room(size):
            raise self._error(size)

    def run_once(self) -> None:
        """Delete what retention does not keep and, on a full disk, what nobody needs. For the flusher."""
        cleaned, self._cleaned = self._cleaned, Gate()
        wanted, self._wanted = self._wanted, 0
        try:
            self._dispatcher.catch_up()
            policy = self._policy()
            if policy is not None:
                self._clean(policy)
                if self._log.end + wanted > self._log.free_until and not self._has_room(wanted, amply=True):
                    self._free(policy, wanted)
                    self._has_room(wanted)
        finally:
            self._cleaned_ms = self._parts.clock.monotonic_ms()
            cleaned.open()

    def close(self) -> None:
        """Let puts wait no longer: the flusher has ended."""
        self._cleaned.open()

    def look(self) -> None:
        """Do what `run_once` does if the engine's own records have used the room that was found. For the flusher."""
        if self._log.end > self._log.free_until:
            self.run_once()

    def _wait_for_run(self) -> None:
        if self._call_flusher is None:
            self.run_once()
            return
        cleaned = self._cleaned
        self._call_flusher()
        cleaned.wait(_PATIENCE_S)

    def _has_room(self, size: int, *, amply: bool = False) -> bool:
        """Return True if a put of `size` bytes leaves free what is kept back. Note the result for later puts.
        `amply` asks for a part of the last segment more. It may end early now, but not once new messages are in it."""
        free, last = self._free_bytes(), self._log.run.last
        more = max(0, self._log.end - last.start) // _SHARE if amply and last is not None else 0
        spare = free - self._kept_bytes(free - self._kept - size) - size
        fits = spare >= more and (not isinstance(self._dispatcher.error, StoreFullError) or self._dispatcher.catch_up())
        self._log.free_until = self._log.end + (size + spare // (_SHARE * self.groups()) if fits else 0)
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

    def _kept_bytes(self, free: int = 0) -> int:
        return self._kept + self.needed(free)

    def _free(self, policy: Retention, wanted: int) -> None:
        """Delete the oldest segments that nobody needs, as many as there is room missing and an eighth of the log."""
        if self.bound is None:
            return
        log, run = self._log, self._log.run
        with suppress(MQStoreError):  # then what was saved before decides
            self.settle()
        unneeded = self.bound(policy)
        missing = max(0, self._kept_bytes() + wanted - self._free_bytes()) + (log.end - log.min_offset) // _SHARE
        count = -(-missing // run.segment_bytes)
        self._drop_before(min(unneeded, log.min_offset + count * run.segment_bytes))
        last = run.last
        is_unneeded = last is not None and 2 * (unneeded - last.start) > log.end - last.start > 0
        if is_unneeded and not self._has_room(wanted, amply=True):
            # The last segment is never deleted. It ends early if most of it is not needed any more.
            log.end_segment()
            self._dispatcher.catch_up()
            self._drop_before(self.bound(policy))

    def _error(self, size: int) -> StoreFullError:
        free, kept = self._free_bytes(), self._kept_bytes()
        segment_bytes = self._log.run.segment_bytes
        text = (
            f"{free:,} bytes are free, of which {kept:,} are kept back so that consumers can settle what waits. This "
            f"needs {size:,}. Consumed messages give space back in whole segments, of {segment_bytes:,} bytes here; a "
            "new store can have smaller ones (StoreConfig.segment_bytes)"
        )
        return StoreFullError(errno.ENOSPC, text, str(self._parts.root), "put")
