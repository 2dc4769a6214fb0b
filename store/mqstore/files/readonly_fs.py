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

from mqstore.files.filesystem import FILE_MODE, FileSystem, StrPath, system_call
from mqstore.files.safe_open import open_file

_NO_ATIME: int = getattr(os, "O_NOATIME", 0)
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _open_quietly(path: StrPath, flags: int, opened: Callable[[StrPath, int], int] = open_file) -> int:
    if _NO_ATIME:
        try:
            return opened(path, flags | _NO_ATIME)
        except PermissionError:
            pass  # another user's file. If it may not be read at all, the next line raises
    return opened(path, flags)


def _refusing(operation: str) -> Callable[..., NoReturn]:
    """Return a method in place of one that would change a file."""

    @system_call(operation)
    def refuse(self: FileSystem, file: int | StrPath, /, *args: object, **options: object) -> NoReturn:
        raise OSError(errno.EROFS, "opened for reading only")

    return refuse


class ReadOnlyFileSystem(FileSystem):
    """Reads without traces."""

    @system_call("open")
    def open(self, path: StrPath, flags: int, mode: int = FILE_MODE) -> int:
        if flags & _CHANGES:
            self._fail(OSError(errno.EROFS, "opened for reading only"), path, "open for writing")
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

    replace = _refusing("replace")
    link = _refusing("link")
    unlink = _refusing("unlink")
    mkdir = _refusing("mkdir")
    rmdir = _refusing("rmdir")
    take_after = _refusing("take_after")
    give_to = _refusing("chown")


#: File system of commands that only read.
QUIET = ReadOnlyFileSystem()
