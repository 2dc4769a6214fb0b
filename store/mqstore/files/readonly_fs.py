"""A read-only file system that leaves no trace, not even in access times.

Files are opened and folders listed with O_NOATIME, if the platform has it (Linux) and permits it (to the owner of a
file, and to root). Elsewhere access times may change, as with any reader, but not bytes, mtime and ctime. Every call
that would change a file raises.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from mqstore.files.filesystem import FILE_MODE, FileSystem, StrPath, takes_descriptor
from mqstore.files.safe_open import open_file

__all__ = ["QUIET", "ReadOnlyFileSystem"]

_NO_ATIME: int = getattr(os, "O_NOATIME", 0)
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _open_quietly(path: StrPath, flags: int, opened: Callable[[StrPath, int], int] = open_file) -> int:
    if _NO_ATIME:
        try:
            return opened(path, flags | _NO_ATIME)
        except PermissionError:
            pass  # another user's file. If it may not be read at all, the next line raises
    return opened(path, flags)


class ReadOnlyFileSystem(FileSystem):
    """Reads without traces.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     try:
    ...         QUIET.mkdir(os.path.join(folder, "a"))
    ...     except PermissionError as error:
    ...         print(type(error).__name__, os.listdir(folder))
    ReadOnlyStoreError []
    """

    @takes_descriptor("open")
    def open(self, path: StrPath, flags: int, mode: int = FILE_MODE) -> int:
        if flags & _CHANGES:
            self._refuse(path, "open for writing")
        fd = _open_quietly(path, flags)
        self._paths[fd] = os.fspath(path)
        return fd

    @contextmanager
    def _entries(self, path: StrPath) -> Iterator[Iterator[os.DirEntry[str]]]:
        fd = _open_quietly(path, os.O_RDONLY | os.O_DIRECTORY, os.open)
        try:
            with os.scandir(fd) as entries:
                yield entries
        finally:
            os.close(fd)

    def replace(self, source: StrPath, target: StrPath) -> None:
        self._refuse(source, "replace")

    def link(self, source: StrPath, target: StrPath) -> None:
        self._refuse(source, "link")

    def unlink(self, path: StrPath, *, missing_ok: bool = False) -> None:
        self._refuse(path, "unlink")

    def mkdir(self, path: StrPath, mode: int = 0o700, *, exist_ok: bool = False) -> None:
        self._refuse(path, "mkdir")

    def rmdir(self, path: StrPath) -> None:
        self._refuse(path, "rmdir")

    def take_after(self, file: int | StrPath, found: os.stat_result) -> None:
        self._refuse(self.path_of(file) if isinstance(file, int) else file, "take_after")

    def give_to(self, file: int | StrPath, found: os.stat_result) -> None:
        self._refuse(self.path_of(file) if isinstance(file, int) else file, "chown")

    def _refuse(self, path: StrPath, operation: str) -> NoReturn:
        self._fail(OSError(errno.EROFS, "opened for reading only"), path, operation)


#: File system of commands that only read.
QUIET = ReadOnlyFileSystem()
