"""The rule for paths: nothing is written through a link, and only regular files and folders are opened.

Anyone may have written to a directory, so any name in it may be a link to a precious file, a FIFO or a device.

====================================  ======================================================================
call                                  handling of such a name
====================================  ======================================================================
opens a file for reading              follows links to regular files, and refuses everything else
opens a file for writing              refuses a link in any part of the path, and all but regular files
makes, renames or removes a name      refuses a link in any part of the path above that name
====================================  ======================================================================

No call waits, and no device is opened: a name is checked before it is opened, opened with O_NONBLOCK, and checked
again. A refusal is an OSError that names the file and its kind. It is ELOOP for a link, EISDIR for a folder instead of
a file, ENOTDIR for a file instead of a folder, and EINVAL for other kinds.

The path of a store, and every other path that a user names, may be relative or lead through links. So it is resolved
once, when it is passed in (`resolved`). After that it is absolute, and no part of it is a link of the user's.

==============  =================================================================================================
system          refusal of links
==============  =================================================================================================
Linux 5.6       ``openat2`` with RESOLVE_NO_SYMLINKS
macOS           O_NOFOLLOW_ANY
other           folder by folder, each opened relative to its parent with O_NOFOLLOW
==============  =================================================================================================

This module knows nothing of stores. Every descriptor that it opens is close-on-exec.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mqstore.errors import ConfigError, raise_os_error
from mqstore.files import system

StrPath = str | os.PathLike[str]

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CAREFUL = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_NOFOLLOW_ANY: int = getattr(os, "O_NOFOLLOW_ANY", 0)
#: Enough to access names in a folder. Where O_PATH exists, the folder's listing permission is not needed.
_TO_PASS = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)

_KINDS = {
    stat.S_IFLNK: ("symbolic link", errno.ELOOP),
    stat.S_IFIFO: ("FIFO", errno.EINVAL),
    stat.S_IFCHR: ("device", errno.EINVAL),
    stat.S_IFBLK: ("device", errno.EINVAL),
    stat.S_IFSOCK: ("socket", errno.EINVAL),
    stat.S_IFDIR: ("folder", errno.EISDIR),
    stat.S_IFREG: ("regular file", errno.ENOTDIR),
}
REFUSED = frozenset(number for _, number in _KINDS.values())
"""Numbers of the errors for a name of the wrong kind."""


def resolved(path: StrPath) -> str:
    """Return the absolute path to which `path` leads, without links. For paths that a user names.

    It is resolved once, so a later change of the working directory has no effect. The target need not exist. Raises
    ConfigError if it is not a path, and StoreIOError or ReadOnlyStoreError if it cannot be accessed, or if it is
    relative and the working directory was removed.
    """
    name, step = os.fsdecode(path), "finding the working directory"
    try:
        real, step = os.path.realpath(name), "stat"
        with suppress(FileNotFoundError, NotADirectoryError):
            os.stat(real)
        return real
    except OSError as error:
        raise_os_error(error, name, step)
    except ValueError as error:
        raise ConfigError(f"{name!r} is not a path: {error}") from error


def check(path: StrPath, mode: int, wanted: str, link: str = "") -> None:
    """Raise OSError unless `mode`, the `st_mode` of `path`, is of a `wanted` kind.
    `wanted` is "regular file", "folder" or both. `link` is the part of the path that is a link, if it is not `path`
    itself."""
    kind, number = _KINDS.get(stat.S_IFMT(mode), ("special file", errno.EINVAL))
    if kind not in wanted:
        advice = f"put the {wanted} itself in its place" if number == errno.ELOOP else "move it away"
        raise OSError(number, f"{link or 'it'} is a {kind}, not a {wanted}; {advice}", os.fspath(path))


def open_file(path: StrPath, flags: int, mode: int = 0o600) -> int:
    """Open a regular file with these flags of `os.open`."""
    name = os.fspath(path)
    writes = flags & _WRITES
    flags |= _CAREFUL
    if flags & os.O_EXCL:  # it will be new, so it is a file
        return _open_strictly(name, flags, mode)
    try:
        found = os.stat(name, follow_symlinks=not (writes or flags & os.O_NOFOLLOW))
        check(name, found.st_mode, "regular file")
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    return _checked(name, _open_strictly(name, flags, mode) if writes else os.open(name, flags))


def open_folder(path: StrPath, flags: int = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) -> int:
    """Open a folder for reading. No part of its path may be a link."""
    return _open_strictly(os.fspath(path), flags, 0)


def open_any(path: StrPath) -> int:
    """Open a file or folder to read it, or to change its mode, owner or times. No part of its path may be a link."""
    name = os.fspath(path)
    if stat.S_ISDIR(os.lstat(name).st_mode):
        return open_folder(name)
    return _checked(name, _open_strictly(name, os.O_RDONLY | _CAREFUL, 0))


@contextmanager
def folder_of(path: StrPath) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the folder of `path`, and the name in it. No part of the folder's path may be a link."""
    folder, name = os.path.split(os.fspath(path))
    fd = open_folder(folder or ".", _TO_PASS)
    try:
        yield fd, name
    finally:
        os.close(fd)


def _checked(name: str, fd: int) -> int:
    """Return `fd` if it is a regular file's, else close it and raise."""
    try:
        check(name, os.fstat(fd).st_mode, "regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _open_strictly(name: str, flags: int, mode: int) -> int:
    if (fd := system.open_linkless(name, flags, mode)) >= 0:
        return fd
    try:  # again, for the error
        if _NOFOLLOW_ANY:
            return os.open(name, flags & ~os.O_NOFOLLOW | _NOFOLLOW_ANY, mode)
        return _walk(name, flags, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and (link := _first_link(name)):
            wanted = "folder" if flags & os.O_DIRECTORY or link != name else "regular file"
            check(name, stat.S_IFLNK, wanted, link)
        raise


def _walk(name: str, flags: int, mode: int) -> int:
    """Open folder by folder, for `_open_strictly`."""
    *above, last = [part for part in name.split(os.sep) if part not in ("", ".")] or ["."]
    fd = os.open(os.sep if name.startswith(os.sep) else ".", _TO_PASS)
    try:
        for part in above:
            inner = os.open(part, _TO_PASS | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner
        return os.open(last, flags | os.O_NOFOLLOW, mode, dir_fd=fd)
    finally:
        os.close(fd)


def _first_link(name: str) -> str | None:
    """Return the first part of a path that is a link."""
    end = -1
    while end < len(name):
        end = name.find(os.sep, end + 1)
        end = len(name) if end < 0 else end
        with suppress(OSError):
            if stat.S_ISLNK(os.lstat(name[:end] or os.sep).st_mode):
                return name[:end]
    return None
