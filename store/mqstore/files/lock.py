"""The writer lock: one writer for a store directory, across processes, threads and forks (format#lock). The abort mark.

A writer takes two locks on one descriptor of ``ROOT/lock``, since no single kind excludes all others:

====================  ==============================  =============================================================
lock                  keeps out                       lost when
====================  ==============================  =============================================================
``flock``             other mqstore processes         the last descriptor of this open file is closed
byte 0, Linux         a Java broker, which takes a    as above (an open file description lock)
byte 0, elsewhere     POSIX record lock on byte 0     *any* descriptor of the file is closed in this process
====================  ==============================  =============================================================

Because of the last row, and because a process never conflicts with its own POSIX locks, there is a registry by (device,
inode) of the directory and of the file. A second open in the same process, and `writer_alive`, check it before they
open the file.

A forked child shares the open file description, so it would keep the store locked after its parent died. Therefore
children close the descriptor at once (`os.register_at_fork`), and their inherited lock objects have `held == False`. A
child forked by C code is not covered.

The file only informs people about the holder, by a line of JSON after ``lock`` and a newline. The locks decide, so a
file left by a crash is harmless. A Java broker rewrites the first four bytes.
"""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import os
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from mqstore.clock import SYSTEM_CLOCK, Clock
from mqstore.errors import FormatError, MQStoreError, StoreFullError, StoreIOError, StoreLockedError, raise_os_error
from mqstore.files.filesystem import FILE_MODE, REAL, FileSystem
from mqstore.files.safe_open import resolved
from mqstore.layout.jsontext import decode

_PREFIX = b"lock\n"
_CONTENT_BYTES_MAX = 4096
_ABORT_BYTES_MAX = 128
_POLL_MS_MIN = 1
_POLL_MS_MAX = 50

# struct flock of the two platforms. "0q" pads to the size that the system copies.
if sys.platform == "darwin":
    _FLOCK, _FLOCK_FIELDS = struct.Struct("@qqihh0q"), ("start", "len", "pid", "type", "whence")
else:
    _FLOCK, _FLOCK_FIELDS = struct.Struct("@hhqqi0q"), ("type", "whence", "start", "len", "pid")


def _pack(kind: int) -> bytes:
    wanted = {"type": kind, "whence": os.SEEK_SET, "start": 0, "len": 1, "pid": 0}
    return _FLOCK.pack(*map(wanted.__getitem__, _FLOCK_FIELDS))


# macOS has F_OFD_SETLK, too, but its headers call it private and POSIX lockers do not always see it. F_SETLK is that of
# fcntl.lockf. The two differ only in the owner of the lock.
_SET_BYTE: int = getattr(fcntl, "F_OFD_SETLK", fcntl.F_SETLK) if sys.platform == "linux" else fcntl.F_SETLK


def _take(lock: Callable[..., object], *arguments: object) -> bool:
    """Take a lock without waiting. Return False if it is held."""
    try:
        lock(*arguments)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        raise
    return True


def _byte_holder(fd: int) -> int | None:
    """Return the process id of the holder of a write lock on byte 0, or None without a holder.
    It is -1 for a Linux open file description lock. Does not see POSIX locks of this process."""
    found = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, _pack(fcntl.F_RDLCK)))
    holder: dict[str, int] = dict(zip(_FLOCK_FIELDS, found, strict=True))
    return None if holder["type"] == fcntl.F_UNLCK else holder["pid"]


Identity = tuple[int, int]  # device, inode

_registry: dict[Identity, WriterLock] = {}
# Held for every change of the registry and across fork(), so that a child never inherits a half-made change.
_registry_lock = threading.RLock()


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


class _Holder(NamedTuple):
    pid: int | None = None
    host: str | None = None
    since: int | None = None


class _TakenError(Exception):
    """One of the locks is held elsewhere."""

    def __init__(self, holder: _Holder) -> None:
        self.holder = holder


class WriterLock:
    """Exclusive right to write one store directory. Not re-entrant.
    Kept until `release`, or until the process ends.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        program: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        sleep: Callable[[float], object] = time.sleep,
        fs: FileSystem = REAL,
        file_mode: int = FILE_MODE,
    ) -> None:
        self._root = resolved(root)
        self._path = os.path.join(self._root, "lock")
        self._program = program
        self._clock = clock
        self._sleep = sleep
        self._fs = fs
        self._file_mode = file_mode
        self._fd: int | None = None

    @property
    def held(self) -> bool:
        """True if this object holds the lock. Always False in a forked child."""
        return self._fd is not None

    def acquire(self, timeout_s: float = 0.0) -> None:
        """Take both locks. Tries for `timeout_s` seconds while they are held elsewhere.

        Call it inside the `try` whose `finally` calls `release`, since a signal handler may raise right after it.
        Raises `StoreLockedError` (pid, host, since, as far as known). Raises `ReadOnlyStoreError` or `StoreIOError` if
        the file cannot be opened, and FileNotFoundError without the directory.
        """
        deadline_ms = self._clock.monotonic_ms() + timeout_s * 1000
        pause_ms, collections = _POLL_MS_MIN, 3
        while True:
            try:
                return self._try()
            except _TakenError as taken:
                if taken.holder.pid == os.getpid() and collections:
                    # An unreferenced store closes itself. The later collections are for threads that were using it.
                    self._sleep(0 if collections > 1 else _POLL_MS_MAX / 1000)
                    collections -= 1
                    gc.collect()
                    continue
                left_ms = deadline_ms - self._clock.monotonic_ms()
                if left_ms <= 0:
                    raise _refusal(self._root, taken.holder) from None
            # Polling: neither lock can be awaited with a time limit, except by signals, which belong to the program.
            self._sleep(min(pause_ms, left_ms) / 1000)
            pause_ms = min(2 * pause_ms, _POLL_MS_MAX)

    def release(self) -> None:
        """Release both locks. May be repeated, and completes an interrupted release."""
        with _registry_lock:
            fd = self._fd
            if fd is None:
                return
            try:
                # Explicitly, not only by closing: a child forked by C code may still have the descriptor.
                fcntl.fcntl(fd, _SET_BYTE, _pack(fcntl.F_UNLCK))
                fcntl.flock(fd, fcntl.LOCK_UN)
            finally:
                # A copy: the garbage collector may close another store during this loop.
                for identity in [identity for identity, lock in _registry.copy().items() if lock is self]:
                    del _registry[identity]
                self._fd = None
                self._fs.close(fd)

    def disown(self) -> None:
        """Forget the lock in a forked child. Closes without unlocking, which would release the parent's lock."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):
                os.close(fd)

    # -- one attempt ------------------------------------------------------------------------------------------------

    def _try(self) -> None:
        with _registry_lock:
            directory = _identity(self._fs.stat(self._root))
            self._refuse_registered(directory)
            with suppress(FileNotFoundError):
                self._refuse_registered(_identity(self._fs.stat(self._path)))
            fd = self._fs.open(self._path, os.O_RDWR | os.O_CREAT, self._file_mode)
            try:
                self._fd = fd
                self._lock(fd)
                file = _identity(self._fs.stat(fd))
                # The file may have been removed between our open and our lock. Then the next writer would lock a new
                # file, and there would be two writers.
                if not self._leads_to(file):
                    raise _TakenError(_Holder())
                self._describe(fd)
                _registry[directory] = _registry[file] = self
            except BaseException:
                self._fd = None
                self._fs.close(fd)  # releases the locks taken so far
                raise

    def _refuse_registered(self, identity: Identity) -> None:
        if identity in _registry:
            raise _TakenError(_Holder(os.getpid(), os.uname().nodename))

    def _leads_to(self, file: Identity) -> bool:
        try:
            return _identity(self._fs.stat(self._path)) == file
        except FileNotFoundError:
            return False

    def _lock(self, fd: int) -> None:
        try:
            file = _take(fcntl.flock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (file and _take(fcntl.fcntl, fd, _SET_BYTE, _pack(fcntl.F_WRLCK))):
                raise _TakenError(_holder(self._fs, fd))
        except MQStoreError:
            raise
        except OSError as error:
            raise_os_error(error, self._path, "lock")

    def _describe(self, fd: int) -> None:
        line = json.dumps(
            {
                "pid": os.getpid(),
                "host": os.uname().nodename,
                "started_ms": self._clock.now_ms(),
                "program": self._program,
            }
        )
        content = _PREFIX + line.encode("ascii")
        # No file of a store is ever shortened, so blanks cover the rest of an earlier, longer line.
        content = content.ljust(min(self._fs.size(fd), _CONTENT_BYTES_MAX) - 1) + b"\n"
        with suppress(StoreFullError):  # only informs people. A full disk must still open, to be consumed and freed
            self._fs.pwrite(fd, content, 0)


def _holder(fs: FileSystem, fd: int) -> _Holder:
    pid = _byte_holder(fd)
    content = fs.pread(fd, _CONTENT_BYTES_MAX, 0)
    named = _parse(content)
    if pid is not None and pid > 0 and pid != named.pid:
        return _Holder(pid)  # a Java broker: the line is from an earlier mqstore
    return named


def _refusal(root: str | os.PathLike[str], holder: _Holder) -> StoreLockedError:
    by = "another process" if holder.pid is None else f"process {holder.pid}"
    # Anyone may have written the host to the file: !a passes no control character to a terminal.
    on = "" if holder.host is None else f" on host {holder.host!a}"
    if holder.pid == os.getpid():
        text = f"{by}, which is this process; use that Store, or close it first"
    elif _is_served(root, holder):
        text = f"{by}{on}, which serves it; use mqstore.connect({os.fspath(root)!r}) or open(..., shared=True)"
    else:
        text = f"{by}{on}; put and consume there, or close it there first"
    return StoreLockedError(f"{os.fspath(root)} is open for writing in {text}; mode='r' can read messages", *holder)


def _is_served(root: str | os.PathLike[str], holder: _Holder) -> bool:
    """Return True if the holder has announced in serve.json that other processes can connect."""
    with suppress(MQStoreError, OSError, LookupError, TypeError):
        notice: Any = decode(REAL.read_whole(os.path.join(root, "serve.json"), _CONTENT_BYTES_MAX))
        return holder.pid is not None and bool(notice["pid"] == holder.pid)
    return False


def refusal_to_reader(root: str | os.PathLike[str], fs: FileSystem = REAL) -> str:
    """Return why a store that was opened for reading refuses a call, and a step that works."""
    step = "open it with mode='rw'"
    if (holder := _found_holder(root, fs)) is not None:
        where = "this process" if holder.pid == os.getpid() else f"process {holder.pid or 'of another program'}"
        step = f"it is open for writing in {where}: make this call there, or close it there and {step}"
    return f"{os.fspath(root)} was opened for reading; {step}"


def _parse(content: bytes) -> _Holder:
    """Return the holder that a lock file names. Any part of it may be missing or have a wrong type."""
    try:
        found: Any = decode(content[len(_PREFIX) :].partition(b"\n")[0])
    except FormatError:
        return _Holder()
    if not isinstance(found, dict):
        return _Holder()
    pid, host, since = found.get("pid"), found.get("host"), found.get("started_ms")
    return _Holder(
        pid if type(pid) is int else None, host if type(host) is str else None, since if type(since) is int else None
    )


def writer_alive(root: str | os.PathLike[str], fs: FileSystem = REAL) -> bool:
    """Return True if a writer, mqstore or Java, has the directory now. Takes no lock and disturbs none.
    Sees processes of this machine, and of others if a network file system transmits byte locks."""
    return _found_holder(root, fs) is not None


def _found_holder(root: str | os.PathLike[str], fs: FileSystem) -> _Holder | None:
    path = os.path.join(root, "lock")
    with _registry_lock:
        try:
            # The registry first: opening and closing the file would drop our own lock if it is a POSIX one.
            if _identity(fs.stat(root)) in _registry or _identity(fs.stat(path)) in _registry:
                return _Holder(os.getpid())
            fd = fs.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except StoreIOError as error:
            if error.errno != errno.ENOTDIR:
                raise
            return None  # `root` is a file, and opening it raises
        try:
            return None if _byte_holder(fd) is None else _holder(fs, fd)
        except OSError as error:
            raise_os_error(error, path, "lock test")
        finally:
            fs.close(fd)


def refuse_beside_writer(root: str | os.PathLike[str], fs: FileSystem = REAL) -> None:
    """Raise the StoreLockedError that taking the lock would raise now. Takes no lock. For a `--dry-run`."""
    if (holder := _found_holder(root, fs)) is not None:
        raise _refusal(root, holder)


def _close_in_child() -> None:
    """Drop the locks that a forked child inherited."""
    global _registry_lock
    _registry_lock = threading.RLock()  # the inherited one is held by the forking thread, which only the parent has
    for lock in set(_registry.values()):
        lock.disown()
    _registry.clear()


# By lambdas, since the child has a new lock.
os.register_at_fork(
    before=lambda: _registry_lock.acquire(),
    after_in_parent=lambda: _registry_lock.release(),
    after_in_child=_close_in_child,
)


class AbortMark:
    """The abort mark: a file that exists while a writer runs. It shows the next writer how the last one ended.

    ``ROOT/abort`` has the process id in decimal, as the Java broker writes it (format#abort), then a space and the boot
    id of the machine. The boot id shows the next opening whether the machine went down, too. If it did not, all writes
    are still in the page cache. Every change is durable when the call returns.
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
        """Return True if the mark was set since the machine was started, so that no write is lost.
        False without a mark, for a mark without a boot id, and if the system has none."""
        if not self.exists() or (boot_id := self._fs.boot_id()) is None:
            return False
        with self._fs.opened(self._path, os.O_RDONLY) as fd:
            return self._fs.pread(fd, _ABORT_BYTES_MAX, 0).split()[1:] == [boot_id.encode()]

    def set(self, pid: int, *, boot_id: bool = True) -> None:
        """Set the mark, over the mark of a crash. A crash during the call also leaves it, perhaps empty.
        `boot_id` False: the files are still as the last boot left them, and an opening that is killed must not hide
        that."""
        text = b"%d" % pid
        if boot_id and (known := self._fs.boot_id()) is not None:
            text += b" " + known.encode()
        flags = os.O_WRONLY | os.O_CREAT
        # Only if needed: freeing a written block takes ext4 a millisecond.
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
