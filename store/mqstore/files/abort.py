"""The abort mark: a file that exists while a writer runs. It tells the next writer how the last one ended.

``ROOT/abort``: the process id in decimal, as the Java broker writes it (format#abort), then a space and the boot id of
the machine. The boot id tells the next opening whether the machine went down, too: if not, everything that was written
is still in the page cache.
"""

from __future__ import annotations

import os

from mqstore.files.filesystem import FILE_MODE, REAL, FileSystem

__all__ = ["AbortMark"]

_READ_BYTES = 128


class AbortMark:
    """The abort mark of one store directory. Every change is durable when the call returns.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as root:
    ...     mark = AbortMark(root)
    ...     mark.set(4711)
    ...     print(mark.exists())
    ...     mark.clear()
    ...     print(mark.exists())
    True
    False
    """

    def __init__(self, root: str | os.PathLike[str], fs: FileSystem = REAL, file_mode: int = FILE_MODE) -> None:
        self._root = os.fspath(root)
        self._path = os.path.join(self._root, "abort")
        self._fs = fs
        self._file_mode = file_mode

    def exists(self) -> bool:
        """Return True if the last writer is still running, or did not end cleanly."""
        return self._fs.exists(self._path)

    def is_of_this_boot(self) -> bool:
        """Return True if the mark was set since the machine was started, so nothing written is lost.
        False without a mark, for a mark without a boot id, and where the system has none."""
        if not self.exists() or (boot_id := self._fs.boot_id()) is None:
            return False
        with self._fs.opened(self._path, os.O_RDONLY) as fd:
            return self._fs.pread(fd, _READ_BYTES, 0).split()[1:] == [boot_id.encode()]

    def set(self, pid: int, *, boot_id: bool = True) -> None:
        """Leave the mark, over the one that a crash left. A crash in here leaves it too, maybe empty.
        `boot_id` False: the files are still as the last machine left them, and an opening that is killed must not hide
        that."""
        text = b"%d" % pid
        if boot_id and (known := self._fs.boot_id()) is not None:
            text += b" " + known.encode()
        flags = os.O_WRONLY | os.O_CREAT
        # Not without need: to free a block that was written takes ext4 a millisecond.
        if self.exists() and self._fs.size(self._path) > len(text):
            flags |= os.O_TRUNC
        with self._fs.opened(self._path, flags, self._file_mode) as fd:
            self._fs.pwrite(fd, text, 0)
            self._fs.fdatasync(fd)
        self._fs.sync_directory(self._root)

    def clear(self) -> None:
        """Remove the mark, if there is one."""
        self._fs.unlink(self._path, missing_ok=True)
        self._fs.sync_directory(self._root)
