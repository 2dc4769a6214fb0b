"""A bounded cache of file descriptors by path, for files too many to keep open: 100,000 consume queues, say.

Knows paths and bytes. A descriptor that a thread is using is never closed under it; every other one may be, at any
time, so callers name the file on each call. State of an entry::

    open() --> users > 0  <-->  users == 0 --evicted, forgotten, closed--> close()
                  |                                                          ^
                  +--forgotten or closed while in use--> doomed --last user--+

What a caller gives up by this: Linux reports a failed write-back to the descriptors that are open, or to the next one
opened as long as the kernel still holds the inode. A file written, evicted, and dropped from the inode cache before its
`fdatasync` could lose that report. So only files that can be rebuilt belong here; the commitlog keeps descriptors of
its own.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from contextlib import ExitStack
from itertools import islice
from typing import TYPE_CHECKING

from mqstore.errors import StoreClosedError
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.limit import GIVE_BACK_S, register

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["DescriptorCache"]


class _Entry:
    __slots__ = ("doomed", "fd", "users")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.users = 1
        self.doomed = False  # no longer in the table: its last user closes it


class DescriptorCache:
    """Reads and writes of existing files by path, over at most `capacity` idle descriptors (more only while in use).

    Thread-safe. Files are opened, never created: whoever makes a file renames it into place at its full length
    (store-format 1.1). Errors are those of `FileSystem`, FileNotFoundError when the file is not there, and
    `StoreClosedError` after `close`.
    """

    def __init__(self, fs: FileSystem = REAL, capacity: int = 256, *, writable: bool = True) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self._fs = fs
        self._capacity = capacity
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._forgotten = 0  # counts `forget` and `close`: an open that one overtook is not kept
        self._closed = False
        register(self)

    def __len__(self) -> int:
        """How many descriptors the table holds."""
        return len(self._entries)

    def pread(self, path: str, length: int, position: int) -> bytes:
        """Bytes [position, position + length) of a file, fewer only where it ends."""
        entry = self._take(path)
        try:
            return self._fs.pread(entry.fd, length, position)
        finally:
            self._give_back(entry)

    def pwrite(self, path: str, data: ReadableBuffer, position: int) -> None:
        """Write all of `data` at `position`; not durable before `fdatasync`."""
        entry = self._take(path)
        try:
            self._fs.pwrite(entry.fd, data, position)
        finally:
            self._give_back(entry)

    def write_back(self, path: str) -> None:
        """Have the system begin to write what is dirty of the file: a hint, before `fdatasync`."""
        entry = self._take(path)
        try:
            self._fs.write_back(entry.fd)
        finally:
            self._give_back(entry)

    def fdatasync(self, path: str) -> None:
        """Make what was written to the file durable, through whichever descriptor. An error is final."""
        entry = self._take(path)
        try:
            self._fs.fdatasync(entry.fd)
        finally:
            self._give_back(entry)

    def forget(self, path: str) -> None:
        """Let go of a file that was removed or replaced: the next call opens what the path then leads to."""
        with self._lock:
            self._forgotten += 1
            entry = self._entries.pop(path, None)
            idle = [entry] if entry is not None and self._doom(entry) else []
        self._close(idle)

    def close(self) -> None:
        """Close all; descriptors in use are closed by their last user. Later calls raise StoreClosedError."""
        with self._lock:
            self._closed = True
            self._forgotten += 1
            idle = [entry for entry in self._entries.values() if self._doom(entry)]
            self._entries.clear()
        self._close(idle)

    def give_back(self) -> None:
        """Close all that nobody uses at the moment."""
        if self._lock.acquire(timeout=GIVE_BACK_S):
            try:
                idle = self._evict(len(self._entries))
            finally:
                self._lock.release()
            self._close(idle)

    # -- entries ----------------------------------------------------------------------------------------------------

    def _take(self, path: str) -> _Entry:
        with self._lock:
            if self._closed:
                raise StoreClosedError(f"{path} belongs to a store that was closed")
            entry = self._entries.get(path)
            if entry is not None:
                entry.users += 1
                self._entries.move_to_end(path)
                return entry
            forgotten = self._forgotten
        # Outside the lock: a slow disk must not hold up those who only want an open file, and `give_back` takes it.
        entry = _Entry(self._fs.open(path, self._flags))
        with self._lock:
            other = self._entries.get(path)
            if other is not None:  # another thread was faster; ours is closed unused
                other.users += 1
                entry, surplus = other, [entry]
            elif self._forgotten != forgotten:  # perhaps this very path, so this may be the old file: one use only
                entry.doomed = True
                surplus = []
            else:
                self._entries[path] = entry
                surplus = self._evict(len(self._entries) - self._capacity)
        self._close(surplus)
        return entry

    def _give_back(self, entry: _Entry) -> None:
        with self._lock:
            entry.users -= 1
            # All were in use when the table last grew over its capacity: the first to become idle goes.
            surplus = [entry] if entry.doomed and not entry.users else self._evict(len(self._entries) - self._capacity)
        self._close(surplus)

    def _evict(self, count: int) -> list[_Entry]:
        """Take up to `count` idle entries out of the table, least recently used first (lock held)."""
        if count <= 0:
            return []
        idle = list(islice((path for path, entry in self._entries.items() if not entry.users), count))
        return [self._entries.pop(path) for path in idle]

    @staticmethod
    def _doom(entry: _Entry) -> bool:
        """Mark an entry that left the table; True when nobody uses it (lock held)."""
        entry.doomed = True
        return not entry.users

    def _close(self, entries: list[_Entry]) -> None:
        if entries:
            with ExitStack() as stack:  # an error of one close does not leave the others open
                for entry in entries:
                    stack.callback(self._fs.close, entry.fd)
