"""A bounded cache of file descriptors by path, for files too many to keep open, such as consume queues.

A file is closed when neither the table nor a call refers to it any more. Users are not counted, since an exception
of a signal handler could leave it wrong.

Linux reports a failed write-back to the open descriptors, or to the next one opened while the kernel still has the
inode. A file that is written, evicted, and dropped from the inode cache before its `fdatasync` could lose that report.
So only files that can be rebuilt belong here. The commitlog keeps its own descriptors.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

from mqstore.errors import StoreClosedError
from mqstore.files.filesystem import FILE_MODE, REAL, FileSystem, register
from mqstore.signalsafe import Lock

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class File:
    """Descriptor that is open as long as this object is referred to.

    When a forgotten store is collected, its objects are finalized in any order, and the store still needs its files. So
    the finalizer of a code object closes the descriptor: the garbage collector does not track these, and frees them
    last.
    """

    __slots__ = ("_end", "_fs", "fd")

    def __init__(self, fs: FileSystem, path: str, flags: int, mode: int = FILE_MODE) -> None:
        self._fs = fs
        self._end = _close.__code__.replace()
        self.fd = fs.open(path, flags, mode)
        weakref.finalize(self._end, _close, fs, self.fd).atexit = False

    @property
    def raw_fd(self) -> int:
        """Descriptor for compiled code that makes system calls. -1 if a file system must see every call."""
        return self.fd if type(self._fs) is FileSystem else -1


def _close(fs: FileSystem, fd: int) -> None:
    with contextlib.suppress(Exception):  # there is no caller to raise to, and all that matters was synced before
        fs.close(fd)


class DescriptorCache:
    """Reads and writes of existing files by path, over a table of at most `capacity` open files.

    Thread-safe. Files are opened, never created: their creator renames them into place at full length
    (format#manifest). Errors are those of `FileSystem`, and `StoreClosedError` after `close`.
    """

    def __init__(self, fs: FileSystem = REAL, capacity: int = 256, *, writable: bool = True) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, not {capacity}")
        self._fs = fs
        self._capacity = capacity
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        self._lock = Lock()
        self._files: OrderedDict[str, File] = OrderedDict()  # least recently used first
        self._forgotten = 0  # counts `forget` and `close`: a file opened during one of these is not kept
        self._closed = False
        register(self)

    def __len__(self) -> int:
        return len(self._files)

    def pread(self, path: str, length: int, position: int) -> bytes:
        """Return bytes [position, position + length) of a file, fewer only at its end."""
        file = self._open(path)
        return self._fs.pread(file.fd, length, position)

    def data_end(self, path: str, length: int) -> int:
        """Return a position within `length` bytes of a file, after which it has certainly only zeros."""
        try:
            return self._fs.data_end(self._open(path).fd, 0, length)
        except FileNotFoundError:
            return 0

    def pwrite(self, path: str, data: ReadableBuffer, position: int) -> None:
        """Write all of `data` at `position`. It is durable after `fdatasync`."""
        file = self._open(path)
        self._fs.pwrite(file.fd, data, position)

    def write_back(self, path: str) -> None:
        """Start writing back the file's dirty pages, as a hint before `fdatasync`."""
        file = self._open(path)
        self._fs.write_back(file.fd)

    def fdatasync(self, path: str) -> None:
        """Make all writes to the file durable, whichever descriptor made them. An error is final."""
        file = self._open(path)
        self._fs.fdatasync(file.fd)

    def forget(self, path: str) -> None:
        """Drop a file that was removed or replaced. The next call opens the new file at the path."""
        with self._lock:
            self._forgotten += 1
            self._files.pop(path, None)

    def close(self) -> None:
        """Drop all files. Later calls raise StoreClosedError."""
        with self._lock:
            self._closed = True
            self._forgotten += 1
            self._files.clear()

    def release(self) -> None:
        """Drop all files, since no descriptor is free. Does nothing in a signal handler that interrupted this cache."""
        if not self._lock.is_held_here:
            with self._lock:
                self._files.clear()

    def _open(self, path: str) -> File:
        with self._lock:
            if self._closed:
                raise StoreClosedError(f"{path} belongs to a store that was closed")
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                return file
            forgotten = self._forgotten
        # Outside the lock: a slow disk must not block callers that need an open file, and `release` takes the lock.
        file = File(self._fs, path, self._flags)
        with self._lock:
            other = self._files.get(path)
            if other is not None:  # another thread was faster. This one is closed unused
                return other
            if self._forgotten == forgotten:  # otherwise this may be the old file, so use it only once
                self._files[path] = file
                while len(self._files) > self._capacity:
                    self._files.popitem(last=False)
        return file
