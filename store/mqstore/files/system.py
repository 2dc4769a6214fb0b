"""Calls that differ between systems, or that `os` and `mmap` lack, for `filesystem.py`.

=================  =======================================  =====================================================
function           Linux                                    elsewhere, or if the file system refuses
=================  =======================================  =====================================================
``sync_data``      ``fdatasync``                            macOS ``F_FULLFSYNC`` (its fsync leaves data in the
                                                            drive's cache), else ``fsync``
``allocate``       ``posix_fallocate``                      False: the caller writes zeros
``map_file``       needs no descriptor                      keeps one while the mapping exists, before CPython 3.13
``write_back``     ``sync_file_range``                      nothing
``data_end``       ``lseek``                                the end: nothing is known
``open_linkless``  ``openat2``                              -1: the caller opens folder by folder
``advise``         ``madvise``                              False
``boot_id``        ``/proc/sys/kernel/random/boot_id``      macOS ``kern.bootsessionuuid``
=================  =======================================  =====================================================

Calls by ctypes let other threads run meanwhile. If the C library cannot be called (a static interpreter), the last
column applies.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
from functools import lru_cache
from struct import Struct
from typing import Any

UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})
"""Errors that mean "this file system, or this kernel, cannot do that"."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14: fault pages in for writing."""
DONT_NEED = 4
"""MADV_DONTNEED: empty a mapping. Dirty pages of a file stay dirty."""
_BEGIN = 2  # SYNC_FILE_RANGE_WRITE: begin, and do not wait
_MAP_FIXED = 0x10
_OPENAT2, _AT_FDCWD, _RESOLVE_NO_SYMLINKS, _OPEN_HOW = 437, -100, 4, Struct("@3Q")
_HOLES_KNOWN = frozenset({0xEF53, 0x58465342, 0x01021994})
"""ext4, xfs and tmpfs: asked for holes, they are known to consider the page cache, too."""
_PATIENCE = 1 << 14
"""Covers a segment with data in every second page."""

if sys.platform == "darwin":
    import fcntl

    def sync_data(fd: int) -> None:
        """Make all writes to a file durable."""
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            os.fsync(fd)
else:
    sync_data = os.fdatasync


def allocate(fd: int, start: int, stop: int) -> bool:
    """Reserve blocks for [start, stop) of a file. Return False, with nothing changed, if the system cannot."""
    if sys.platform == "darwin":
        return False
    else:  # mypy treats code after a platform test as unreachable unless it is in the other branch
        try:
            os.posix_fallocate(fd, start, stop - start)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            return False
        return True


@lru_cache(maxsize=1)
def boot_id() -> str | None:
    """Return the system's id of this boot of the machine, or None if there is none."""
    with contextlib.suppress(OSError, AttributeError):
        if sys.platform == "darwin":
            text, size = ctypes.create_string_buffer(64), ctypes.c_size_t(64)
            if ctypes.CDLL(None).sysctlbyname(b"kern.bootsessionuuid", text, ctypes.byref(size), None, 0) == 0:
                return text.value.decode()
        else:
            with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
                return file.read().strip() or None
    return None


def _call_of_c(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of the C library of Linux, or None elsewhere or if it does not exist."""
    if sys.platform == "linux" and sys.maxsize > 1 << 32:
        with contextlib.suppress(OSError, AttributeError):
            call = getattr(ctypes.CDLL(None, use_errno=True), name)
            call.restype, call.argtypes = result, arguments
            return call
    return None


_int, _size, _pointer = ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p
_sync_file_range = _call_of_c("sync_file_range", _int, _int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_syscall = _call_of_c("syscall", ctypes.c_long, ctypes.c_long, _int, ctypes.c_char_p, ctypes.c_char_p, _size)
_fstatfs = _call_of_c("fstatfs", _int, _int, _pointer)
_madvise = _call_of_c("madvise", _int, _pointer, _size, _int)
# A mapping keeps its file alive by itself. Before 3.13 Python also kept a duplicate descriptor in each, which counts
# against the descriptor limit. Since then it need not.
_MAP_OPTIONS: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
_mmap = None if _MAP_OPTIONS else _call_of_c("mmap", _pointer, _pointer, _size, _int, _int, _int, ctypes.c_long)


def map_file(fd: int, length: int, access: int) -> mmap.mmap:
    """Map a file, if possible without a descriptor that stays open."""
    if _mmap is None:
        return mmap.mmap(fd, length, access=access, **_MAP_OPTIONS)
    mapping = mmap.mmap(-1, length, access=access)
    address, size = _pointer(), ctypes.c_ssize_t()
    # Finds read-only buffers too, which ctypes does not. It is deprecated, but in the stable ABI.
    ctypes.pythonapi.PyObject_AsReadBuffer(ctypes.py_object(mapping), ctypes.byref(address), ctypes.byref(size))
    protection = mmap.PROT_READ if access == mmap.ACCESS_READ else mmap.PROT_READ | mmap.PROT_WRITE
    if _mmap(address, length, protection, mmap.MAP_SHARED | _MAP_FIXED, fd, 0) != address.value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return mapping


def open_linkless(name: str, flags: int, mode: int) -> int:
    """Open a path of which no part is a link. Return -1 if that fails, or if the system lacks the call."""
    path = os.fsencode(name)
    if _syscall is None or b"\0" in path:
        return -1
    how = _OPEN_HOW.pack(flags, mode if flags & os.O_CREAT else 0, _RESOLVE_NO_SYMLINKS)
    fd: int = _syscall(_OPENAT2, _AT_FDCWD, path, how, _OPEN_HOW.size)
    return fd


def data_end(fd: int, start: int, end: int) -> int:
    """Return a position in [start, end] after which the file has only holes, and blocks that were never written to.
    Return `end` if that is not known."""
    status = (ctypes.c_long * 32)()  # struct statfs, which begins with the type
    if _fstatfs is None or _fstatfs(fd, status) or status[0] not in _HOLES_KNOWN:
        return end
    last = at = start
    with contextlib.suppress(OSError):
        for _ in range(_PATIENCE):
            try:
                data = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as error:
                return last if error.errno == errno.ENXIO else end
            if data >= end:
                return last
            last = at = os.lseek(fd, data, os.SEEK_HOLE)
            if last >= end:
                break
    return end


def write_back(fd: int) -> None:
    """Start writing back a file's dirty pages. Never fails."""
    if _sync_file_range is not None:
        _sync_file_range(fd, 0, 0, _BEGIN)


def advise(mapping: mmap.mmap, position: int, length: int, advice: int) -> bool:
    """Call madvise for bytes of a writable mapping. Return False if the system lacks such advice."""
    if _madvise is None:
        return False
    anchor = ctypes.c_char.from_buffer(mapping)  # exports the buffer, so the mapping stays while this exists
    while _madvise(ctypes.addressof(anchor) + position, length, advice) != 0:
        if ctypes.get_errno() not in (errno.EINTR, errno.EAGAIN):
            return False
    return True
