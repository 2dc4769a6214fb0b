"""A file system that records every call and fails the ones a test picks: fault injection for all rooms.

>>> import os, tempfile, errno
>>> fs = FaultyFileSystem()
>>> fs.fail("pwrite", errno.ENOSPC, nth=2)
>>> with tempfile.TemporaryDirectory() as folder:
...     fd = fs.open(os.path.join(folder, "a"), os.O_RDWR | os.O_CREAT)
...     fs.pwrite(fd, b"stored", 0)
...     try:
...         fs.pwrite(fd, b"refused", 6)
...     except OSError as error:
...         print(type(error).__name__)
...     fs.close(fd)
StoreFullError
>>> [call.operation for call in fs.calls]
['create', 'pwrite', 'pwrite', 'close']

Three kinds of trouble, all counted from the moment they are asked for:

* `fail`: the call has no effect and raises what the real one would;
* `shorten`: one system write moves fewer bytes than asked, as POSIX allows; the file system goes on with the rest,
  unless `fail_rest` makes that part fail, which leaves a torn write;
* `crash`: the process "dies" at a change: that call does nothing (or half of it), raises `Crash`, and so does each
  later one. What is then on disk is what kill -9 would leave; not a power cut, which may lose unsynced bytes as well.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from mqstore.files.filesystem import DIRECTORY_MODE, FILE_MODE, FileSystem, StrPath

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["CHANGES", "STEP", "Call", "Crash", "FaultyFileSystem", "deaths"]

STEP = 1 if "MQSTORE_CRASH_IMAGES" in os.environ else 13
"""Step of a test that tries a fault at every change of a run. `make crash` tries them all. Odd: every second one is
torn."""

#: The operations that can leave something else on disk, or decide what is durable.
CHANGES = frozenset(
    {
        "create",
        "pwrite",
        "fdatasync",
        "sync_directory",
        "allocate",
        "allocate_more",
        "truncate_sparse",
        "replace",
        "link",
        "unlink",
        "mkdir",
        "rmdir",
    }
)


class Crash(BaseException):
    """The process is gone. A BaseException, so that no `except Exception` of the code under test survives it."""


class Call(NamedTuple):
    """One call. `operation` is the method's name, but "create" for an `open` with O_CREAT. `length` and `position` are
    0 where they mean nothing; `target` is the second path of `replace` and `link`."""

    operation: str
    path: str
    position: int = 0
    length: int = 0
    target: str = ""


@dataclass
class _Rule:
    operations: frozenset[str]
    path_part: str
    nth: int
    times: int | None
    errno: int
    seen: int = 0

    def fires(self, call: Call) -> bool:
        if call.operation not in self.operations or self.path_part not in call.path:
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


@dataclass
class _Short:
    operations: frozenset[str]
    path_part: str
    nth: int
    length: int
    fail_rest: int | None
    seen: int = 0


class FaultyFileSystem(FileSystem):
    """`FileSystem` on real files, with a record and scripted faults. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.crashed = False
        self.before_change: Callable[[], object] | None = None
        """Called before each change, if set."""
        self.failed: list[Call] = []
        """Calls that a `fail` has struck."""
        self._guard = threading.Lock()
        self._rules: list[_Rule] = []
        self._shorts: list[_Short] = []
        self._crash_at: tuple[int, bool] | None = None
        self._changes = 0

    # -- the script -------------------------------------------------------------------------------------------------

    def fail(
        self, operations: str | Iterable[str], errno: int, *, nth: int = 1, times: int | None = 1, path_part: str = ""
    ) -> None:
        """Fail the `nth` of the coming calls of `operations` whose path contains `path_part`, and the `times - 1` after
        it (None: all after it), with `errno`."""
        self._rules.append(_Rule(_set(operations), path_part, nth, times, errno))

    def shorten(
        self,
        operations: str | Iterable[str] = "pwrite",
        *,
        length: int,
        nth: int = 1,
        path_part: str = "",
        fail_rest: int | None = None,
    ) -> None:
        """Let the `nth` coming system write move only `length` bytes; with `fail_rest` the next one fails so."""
        self._shorts.append(_Short(_set(operations), path_part, nth, length, fail_rest))

    def crash(self, nth: int, *, torn: bool = False) -> None:
        """Die at the `nth` coming change (see `CHANGES`): before it, or with `torn` after half of its bytes when it is
        a write."""
        self._crash_at = (self._changes + nth, torn)

    def heal(self) -> None:
        """Forget every scripted fault; the record stays."""
        self._rules.clear()
        self._shorts.clear()
        self._crash_at = None
        self.crashed = False

    def changes(self, path_part: str = "") -> list[Call]:
        """The recorded calls that change something, on paths that contain `path_part`."""
        return [call for call in self.calls if call.operation in CHANGES and path_part in call.path]

    # -- the machine ------------------------------------------------------------------------------------------------

    def _enter(
        self, operation: str, file: int | StrPath, position: int = 0, length: int = 0, target: StrPath = ""
    ) -> bool:
        """Record a call and let its fault happen; True when it shall be torn by a crash."""
        path = self.path_of(file) if isinstance(file, int) else os.fspath(file)
        call = Call(operation, path, position, length, os.fspath(target))
        if self.before_change is not None and operation in CHANGES:
            self.before_change()
        with self._guard:
            if self.crashed:
                raise Crash(f"{operation} after the crash")
            self.calls.append(call)
            if operation in CHANGES:
                self._changes += 1
                if self._crash_at is not None and self._changes >= self._crash_at[0]:
                    self.crashed = True
                    if self._crash_at[1] and operation == "pwrite":
                        return True
                    raise Crash(f"at {call}")
            failing = [rule for rule in self._rules if rule.fires(call)]
        if failing:
            self.failed.append(call)
            number = failing[0].errno
            self._fail(OSError(number, os.strerror(number), path), file, operation)
        return False

    def _shortened(self, operation: str, fd: int, size: int) -> int:
        """How many bytes a system write may move now."""
        path = self.path_of(fd)
        with self._guard:
            for short in self._shorts:
                if operation not in short.operations or short.path_part not in path:
                    continue
                short.seen += 1
                if short.seen == short.nth:
                    return min(size, short.length)
                if short.seen == short.nth + 1 and short.fail_rest is not None:
                    raise OSError(short.fail_rest, os.strerror(short.fail_rest), path)
        return size

    # -- the calls --------------------------------------------------------------------------------------------------

    def open(self, path: StrPath, flags: int, mode: int = FILE_MODE) -> int:
        self._enter("create" if flags & os.O_CREAT else "open", path)
        return super().open(path, flags, mode)

    def close(self, fd: int) -> None:
        try:
            if not self.crashed:  # the system closes what a dead process leaves
                self._enter("close", fd)
        finally:
            super().close(fd)  # gone even when it raises

    def pread(self, fd: int, length: int, position: int) -> bytes:
        self._enter("pread", fd, position, length)
        return super().pread(fd, length, position)

    def read_into(self, fd: int, buffer: memoryview, position: int) -> int:
        self._enter("pread", fd, position, len(buffer))
        return super().read_into(fd, buffer, position)

    def pwrite(self, fd: int, data: ReadableBuffer, position: int) -> None:
        view = memoryview(data)
        if self._enter("pwrite", fd, position, view.nbytes):
            super().pwrite(fd, view.cast("B")[: view.nbytes // 2], position)
            raise Crash("torn pwrite")
        super().pwrite(fd, data, position)

    def fdatasync(self, fd: int) -> None:
        self._enter("fdatasync", fd)
        super().fdatasync(fd)

    def sync_directory(self, path: StrPath) -> None:
        self._enter("sync_directory", path)
        super().sync_directory(path)

    def allocate(self, fd: int, length: int, first: int) -> int:
        self._enter("allocate", fd, 0, length)
        return super().allocate(fd, length, first)

    def allocate_more(self, fd: int, start: int, stop: int) -> None:
        self._enter("allocate_more", fd, start, stop - start)
        super().allocate_more(fd, start, stop)

    def truncate_sparse(self, fd: int, length: int) -> None:
        self._enter("truncate_sparse", fd, 0, length)
        super().truncate_sparse(fd, length)

    def map(self, fd: int, length: int, *, writable: bool) -> mmap.mmap:
        self._enter("map", fd, 0, length)
        return super().map(fd, length, writable=writable)

    def replace(self, source: StrPath, target: StrPath) -> None:
        self._enter("replace", source, target=target)
        super().replace(source, target)

    def link(self, source: StrPath, target: StrPath) -> None:
        self._enter("link", source, target=target)
        super().link(source, target)

    def unlink(self, path: StrPath, *, missing_ok: bool = False) -> None:
        self._enter("unlink", path)
        super().unlink(path, missing_ok=missing_ok)

    def mkdir(self, path: StrPath, mode: int = DIRECTORY_MODE, *, exist_ok: bool = False) -> None:
        self._enter("mkdir", path)
        super().mkdir(path, mode, exist_ok=exist_ok)

    def rmdir(self, path: StrPath) -> None:
        self._enter("rmdir", path)
        super().rmdir(path)

    def scandir(self, path: StrPath) -> list[str]:
        self._enter("scandir", path)
        return super().scandir(path)

    def scandir_files(self, path: StrPath, *, own: bool = False) -> list[tuple[str, int]]:
        self._enter("scandir_files", path)
        return super().scandir_files(path, own=own)

    def scandir_own(self, path: StrPath) -> tuple[list[str], list[str]]:
        self._enter("scandir_own", path)
        return super().scandir_own(path)

    def scandir_directories(self, path: StrPath) -> list[str]:
        self._enter("scandir_directories", path)
        return super().scandir_directories(path)

    def stat(self, file: int | StrPath) -> os.stat_result:
        self._enter("stat", file)
        return super().stat(file)

    # -- beneath the calls ------------------------------------------------------------------------------------------

    def _copy_some(self, source: int, target: int, position: int, length: int) -> int:
        return 0  # by `pwrite`, which is seen

    def _pwrite_some(self, fd: int, data: memoryview, position: int) -> int:
        size = self._shortened("pwrite", fd, data.nbytes)
        return super()._pwrite_some(fd, data if size == data.nbytes else data.cast("B")[:size], position)


def deaths(step: int = STEP, *, first: int = 1, torn: bool = True) -> Iterator[tuple[int, FaultyFileSystem]]:
    """(n, a file system that dies at its n-th change), n by `step`, up to the first that outlives what is done with it.
    With `torn` every second one dies in the middle of a write."""
    for nth in count(first, step):
        fs = FaultyFileSystem()
        fs.crash(nth, torn=torn and nth % 2 == 0)
        yield nth, fs
        if not fs.crashed:
            break


def _set(operations: str | Iterable[str]) -> frozenset[str]:
    return frozenset({operations} if isinstance(operations, str) else operations)
