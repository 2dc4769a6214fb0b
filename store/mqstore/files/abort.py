"""The abort mark: a file that exists while a writer runs, so that the next one knows whether it ended cleanly.

``ROOT/abort``: the process id in decimal, no newline (store-format 7; the Java broker's own shape). Only its presence
counts; the id is for people. Set right after the locks are taken and its absence was noted, before anything else
changes; cleared as the last change of a clean close. Knows nothing of what a clean close demands.
"""

from __future__ import annotations

import os

from mqstore.files.filesystem import FILE_MODE, REAL, FileSystem

__all__ = ["AbortMark"]


class AbortMark:
    """The mark of one store directory; every change is durable when the call returns.

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
        """Whether the last writer is still running, or did not end cleanly."""
        return self._fs.exists(self._path)

    def set(self, pid: int) -> None:
        """Leave the mark, over the one that a crash left. A crash in here leaves it too, be it empty."""
        text = b"%d" % pid
        flags = os.O_WRONLY | os.O_CREAT
        # Not without need: to free a block that was written takes ext4 a millisecond.
        if self.exists() and self._fs.size(self._path) > len(text):
            flags |= os.O_TRUNC
        fd = self._fs.open(self._path, flags, self._file_mode)
        try:
            self._fs.pwrite(fd, text, 0)
            self._fs.fdatasync(fd)
        finally:
            self._fs.close(fd)
        self._fs.sync_directory(self._root)

    def clear(self) -> None:
        """Take the mark away; fine when there is none."""
        self._fs.unlink(self._path, missing_ok=True)
        self._fs.sync_directory(self._root)
