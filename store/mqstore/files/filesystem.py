"""The only place that makes system calls on files, so that a test can record each or make it fail.

Callers decide which order of calls makes bytes safe. The methods add these to `os`:

* a short read or write is continued, so callers get all of it or an error;
* a call that finds no descriptor free is repeated once, after all caches have freed theirs. The limit of descriptors
  belongs to the process, so the caches of all its stores are emptied (`register`);
* an error has the path, and is a `StoreFullError`, `ReadOnlyStoreError` or `StoreIOError` (`errors.raise_os_error`).
  Two are answers rather than failures: `FileExistsError` passes unchanged, and a `MissingFileError` is a
  `FileNotFoundError`;
* differences between systems are hidden (`files/system.py`);
* nothing is written through a link, and only regular files and folders are opened (`files/safe_open.py`);
* no file is shortened that a reader may have mapped (format#readers). `truncate_sparse` refuses it, and `shorten` is
  only for surplus bytes after a segment's length.

Descriptors are close-on-exec. Safe to use from several threads.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

from mqstore.errors import MQStoreError, StoreIOError, raise_os_error
from mqstore.files import safe_open, system

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


#: Modes of files and folders (format#manifest) unless options change them.
FILE_MODE = 0o600
DIRECTORY_MODE = 0o700

StrPath = str | os.PathLike[str]

TOO_MANY_OPEN = (errno.EMFILE, errno.ENFILE)
"""Error numbers for "no descriptor is free", in the process or in the system."""

#: The system may ignore the part of one read-ahead request that exceeds the device's read-ahead, often this much.
_READ_AHEAD_STEP = 1 << 17

_ZEROS = bytes(1 << 20)

#: `sync_each` starts a thread for each `_FEW_SYNCS` targets, up to `_SYNC_THREADS`.
_SYNC_THREADS, _FEW_SYNCS = 7, 4

#: Paths of open descriptors. They belong to the process, since any file system may read another one's descriptor.
_paths: dict[int, str] = {}

#: Maximum bytes that the system copies in one call. Signals are handled between two calls.
_COPY_STEP = 64 << 20


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Return True for a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link that leads in a circle
            raise
        return False


class _Cache(Protocol):
    def release(self) -> None: ...


_caches: weakref.WeakValueDictionary[int, _Cache] = weakref.WeakValueDictionary()
os.register_at_fork(after_in_child=_caches.clear)  # their locks may belong to threads that the child lacks


def register(cache: _Cache) -> None:
    """Call `cache.release()` when no descriptor is free, for as long as the cache exists.
    It runs in any thread and with any lock of a store held. So it must not wait for a lock under which a file is opened
    or mapped."""
    _caches[id(cache)] = cache


def free_descriptors() -> int:
    """Return how many descriptors the process may still open, or half of the limit if that is unknown."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 31
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = limit // 2
    return max(0, limit - used)


class SyncNotBegunError(StoreIOError):
    """No descriptor was free for one of several syncs.
    The other syncs succeeded. The system has not seen the missing ones, and dropped no bytes. Repeat all syncs."""


def is_not_begun(error: OSError) -> bool:
    """Return True if an error of syncing files one by one means that no sync began (`SyncNotBegunError`)."""
    return isinstance(error, StoreIOError) and error.errno in TOO_MANY_OPEN and error.operation != "fdatasync"


def _rank_of(error: BaseException) -> int:
    """Return the rank of an error of several syncs. Nothing may hide that pages are lost, and little hides Ctrl-C."""
    if isinstance(error, OSError) and not is_not_begun(error):
        return 0
    return 2 if isinstance(error, Exception) else 1


Self_ = TypeVar("Self_", bound="FileSystem")
File_ = TypeVar("File_", bound=int | StrPath)
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Target = TypeVar("Target")
_Method = Callable[Concatenate[Self_, File_, Arguments], Result]


def system_call(
    operation: str,
) -> Callable[[_Method[Self_, File_, Arguments, Result]], _Method[Self_, File_, Arguments, Result]]:
    """Decorate a method that makes system calls on the file that is its first argument.
    An error names that file and the `operation`. If no descriptor is free, the method is called again (`register`)."""

    def decorate(method: _Method[Self_, File_, Arguments, Result]) -> _Method[Self_, File_, Arguments, Result]:
        @wraps(method)
        def call(self: Self_, file: File_, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            try:
                try:
                    return method(self, file, *args, **kwargs)
                except OSError as error:
                    if error.errno not in TOO_MANY_OPEN:
                        raise
                for reference in _caches.valuerefs():
                    if (cache := reference()) is not None:
                        cache.release()
                return method(self, file, *args, **kwargs)
            except OSError as error:
                self._fail(error, file, operation)

        return call

    return decorate


class FileSystem:
    """System calls on files. Stateless except for the paths of open descriptors, which errors name.

    All lengths and positions are bytes. Every method raises the errors that the module describes.
    """

    def __init__(self) -> None:
        self._paths = _paths

    # -- descriptors ------------------------------------------------------------------------------------------------

    @system_call("open")
    def open(self, path: StrPath, flags: int, mode: int = FILE_MODE) -> int:
        """Open the regular file `path` with these flags of `os.open`, and return the descriptor."""
        fd = safe_open.open_file(path, flags, mode)
        self._paths[fd] = os.fspath(path)
        return fd

    def close(self, fd: int) -> None:
        """Close the descriptor. It is closed even if this raises."""
        # Forget the path first: once the descriptor is closed, another thread may get the same number.
        path = self._paths.pop(fd, "")
        try:
            os.close(fd)
        except OSError as error:
            self._fail(error, path, "close")

    @contextlib.contextmanager
    def opened(self, path: StrPath, flags: int, mode: int = FILE_MODE) -> Iterator[int]:
        """Yield a descriptor as `open` returns it, and close it at the end."""
        fd = self.open(path, flags, mode)
        try:
            yield fd
        finally:
            self.close(fd)

    def path_of(self, fd: int) -> str:
        """Return the path by which `fd` was opened, or "fd N" for a descriptor opened elsewhere."""
        return self._paths.get(fd) or f"fd {fd}"

    # -- bytes ------------------------------------------------------------------------------------------------------

    def pread(self, fd: int, length: int, position: int) -> bytes:
        """Return the bytes at [position, position + length), fewer only at the file's end. Allocates first."""
        try:
            data = part = os.pread(fd, length, position)
            while part and len(data) < length:
                part = os.pread(fd, length - len(data), position + len(data))
                data += part
        except OSError as error:
            self._fail(error, fd, "pread")
        return data

    @system_call("pread")
    def read_into(self, fd: int, buffer: memoryview, position: int) -> int:
        """Fill `buffer` from `position`. Return the number of bytes, fewer only at the file's end."""
        done = 0
        while done < len(buffer) and (part := os.preadv(fd, [buffer[done:]], position + done)):
            done += part
        return done

    def read_ahead(self, fd: int, position: int, length: int) -> None:
        """Start reading these bytes before they are needed. A hint that never fails."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                for step in range(position, position + length, _READ_AHEAD_STEP):
                    os.posix_fadvise(fd, step, _READ_AHEAD_STEP, os.POSIX_FADV_WILLNEED)

    def data_end(self, fd: int, start: int, end: int) -> int:
        """Return a position in [start, end] after which the file system knows only zeros up to `end`.
        They are holes, and blocks never written to. It may be `end` in any case. Moves the descriptor's own
        position."""
        return system.data_end(fd, start, end) if start < end else end

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` bytes of one descriptor's file to the same positions of another, new file.
        Zeros at their end that the file system knows are left out. If both are on one file system, it may do this
        without moving a byte."""
        end = self.data_end(source, 0, min(length, self.size(source)))
        done = 0
        while done < end and (some := self._copy_some(source, target, done, end - done)):
            done += some
        # The system cannot copy the rest, or there is an error. Then these calls will report whose it is.
        buffer = memoryview(bytearray(min(end - done, len(_ZEROS))))
        while done < end and (some := self.read_into(source, buffer[: end - done], done)):
            self.pwrite(target, buffer[:some], done)
            done += some

    def write_back(self, fd: int) -> None:
        """Start writing back a file's dirty pages, so that later syncs have less to do.
        Files that are synced one after the other are then written concurrently. A hint that never fails."""
        system.write_back(fd)

    def pwrite(self, fd: int, data: ReadableBuffer, position: int) -> None:
        """Write all of `data`, any contiguous buffer, at `position`. After an error a part may be written."""
        view = memoryview(data)
        size = view.nbytes
        try:
            done = self._pwrite_some(fd, view, position)
            if done != size:
                view = view.cast("B")
                while done < size:
                    done += self._pwrite_some(fd, view[done:], position + done)
        except OSError as error:
            self._fail(error, fd, "pwrite")

    def fdatasync(self, fd: int) -> None:
        """Make all writes to this file durable, including its length (`sync_directory` does the same for its name).
        An error is final, never retry: the kernel may have dropped the pages, and the next call would succeed without
        them (format#flush)."""
        try:
            system.sync_data(fd)
        except OSError as error:
            self._fail(error, fd, "fdatasync")

    def sync_each(self, sync: Callable[[Target], None], targets: Sequence[Target]) -> None:
        """Call `sync` for each target, from several threads if there are many.
        A disk makes many files durable in hardly more time than one, if it is asked for all at once. After an error no
        more calls start. It is raised when those that had started have ended. A final error is raised before any other,
        such as Ctrl-C."""
        rest = iter(targets)
        errors: list[BaseException] = []

        def work() -> None:
            try:
                for target in rest:
                    if errors:
                        break
                    sync(target)
            except BaseException as error:
                errors.append(error)

        threads: list[threading.Thread] = []
        try:
            # Other file systems must see the calls in their order.
            for _ in range(min(_SYNC_THREADS, len(targets) // _FEW_SYNCS) if type(self) is FileSystem else 0):
                threads.append(threading.Thread(target=work, name="mqstore-sync", daemon=True))
                threads[-1].start()
        except RuntimeError:  # no more threads
            pass
        except BaseException as error:
            errors.append(error)
        work()
        while threads:
            try:
                if threads[-1].ident is not None:  # it started
                    threads[-1].join()
                threads.pop()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise min(errors, key=_rank_of)

    @system_call("sync_directory")
    def sync_directory(self, path: StrPath) -> None:
        """Make the names in the folder `path` durable: files created, renamed, linked and removed there."""
        fd = safe_open.open_folder(path)
        try:
            os.fsync(fd)
        except OSError as error:
            # Some network and FUSE file systems lack this call, and order names on their own.
            if error.errno not in system.UNSUPPORTED:
                raise
        finally:
            os.close(fd)

    @system_call("allocate")
    def allocate(self, fd: int, length: int, first: int) -> int:
        """Make the file at least `length` bytes long, with disk blocks for the `first` ones. Return how many have them.
        So a write through a mapping cannot hit a full disk (SIGBUS). On a system that cannot reserve blocks, zeros are
        written up to `length`, and old holes stay. After an error the file may have grown. The creator removes it."""
        present = os.fstat(fd).st_size
        if system.allocate(fd, 0, first):
            if length > max(first, present):
                os.ftruncate(fd, length)
            return first
        zeros = memoryview(_ZEROS)
        for position in range(present, length, len(_ZEROS)):
            self.pwrite(fd, zeros[: length - position], position)
        return length

    @system_call("allocate_more")
    def allocate_more(self, fd: int, start: int, stop: int) -> None:
        """Reserve disk blocks for [start, stop) of a longer file. Existing bytes stay.
        Does nothing if the system cannot: then files got all their blocks at creation."""
        system.allocate(fd, start, stop)

    @system_call("statvfs")
    def free_bytes(self, path: StrPath) -> int:
        """Return the number of bytes that may still be written to the file system of `path`."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    @system_call("truncate_sparse")
    def truncate_sparse(self, fd: int, length: int) -> None:
        """Give a new file its length without disk blocks. Raises ValueError if it would shorten the file.
        For files written with `pwrite` only, never through a mapping."""
        present = os.fstat(fd).st_size
        if length < present:
            raise ValueError(f"{self.path_of(fd)} has {present} bytes and is never shortened (to {length})")
        os.ftruncate(fd, length)

    @system_call("shorten")
    def shorten(self, fd: int, length: int) -> None:
        """Cut the bytes after the first `length` bytes of a file. No mapping may reach beyond them."""
        os.ftruncate(fd, length)

    @system_call("map")
    def map(self, fd: int, length: int, *, writable: bool) -> mmap.mmap:
        """Map the first `length` bytes, shared. The descriptor may be closed afterwards.
        Raises StoreIOError for a shorter file, since accessing pages beyond its end would raise SIGBUS."""
        if not 0 < length <= os.fstat(fd).st_size:
            raise OSError(errno.EINVAL, f"cannot map {length} bytes of a file of {os.fstat(fd).st_size}")
        return system.map_file(fd, length, mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)

    # -- names ------------------------------------------------------------------------------------------------------

    @system_call("replace")
    def replace(self, source: StrPath, target: StrPath) -> None:
        """Rename `source` to `target` in one step, over an existing one. Durable after `sync_directory`."""
        with safe_open.folder_of(source) as (folder, name), safe_open.folder_of(target) as (other, new_name):
            os.replace(name, new_name, src_dir_fd=folder, dst_dir_fd=other)

    @system_call("link")
    def link(self, source: StrPath, target: StrPath) -> None:
        """Give the file `source`, or the link itself, a second name. Raises FileExistsError if `target` exists."""
        with safe_open.folder_of(target) as (folder, name):
            os.link(source, name, dst_dir_fd=folder, follow_symlinks=False)

    @system_call("unlink")
    def unlink(self, path: StrPath, *, missing_ok: bool = False) -> None:
        """Remove a name. Open descriptors and mappings keep the bytes."""
        try:
            with safe_open.folder_of(path) as (folder, name):
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            if not missing_ok:
                raise

    @system_call("mkdir")
    def mkdir(self, path: StrPath, mode: int = DIRECTORY_MODE, *, exist_ok: bool = False) -> None:
        """Create one folder, whose parent must exist. With `exist_ok` it may exist."""
        with safe_open.folder_of(path) as (folder, name):
            try:
                os.mkdir(name, mode, dir_fd=folder)
            except FileExistsError:
                if not exist_ok:
                    raise
                found = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
                safe_open.check(path, found, "folder")

    @system_call("rmdir")
    def rmdir(self, path: StrPath) -> None:
        with safe_open.folder_of(path) as (folder, name):
            os.rmdir(name, dir_fd=folder)

    @system_call("scandir")
    def scandir(self, path: StrPath) -> list[str]:
        """Return all names in a folder, sorted. Bytes that are not UTF-8 become lone surrogates (PEP 383)."""
        with self._entries(path) as entries:
            return sorted(entry.name for entry in entries)

    @system_call("scandir")
    def scandir_files(self, path: StrPath, *, own: bool = False) -> list[tuple[str, int]]:
        """Return (name, length) of the regular files in a folder, sorted.
        A symbolic link counts as its target, but is refused in a folder of our `own` (`scandir_own`)."""
        found = []
        others: list[str] = []
        with self._entries(path) as entries:
            for entry in entries:
                try:
                    if entry.is_file(follow_symlinks=not own):
                        found.append((entry.name, entry.stat().st_size))
                    elif own:
                        others.append(entry.path)
                except OSError as error:
                    # Removed between the listing and this call, or a link that leads in a circle.
                    if not isinstance(error, FileNotFoundError) and error.errno != errno.ELOOP:
                        raise
        for other in sorted(others):
            self.check_own(other)
        return sorted(found)

    @system_call("scandir")
    def scandir_directories(self, path: StrPath) -> list[str]:
        """Return the names of the folders in a folder, sorted."""
        with self._entries(path) as entries:
            return sorted(entry.name for entry in entries if _is_folder(entry))

    @system_call("scandir")
    def scandir_own(self, path: StrPath) -> tuple[list[str], list[str]]:
        """Return the names of files and of folders, each sorted, in a folder that only we write.
        Raises StoreIOError that names any other entry, such as a link."""
        files: list[str] = []
        folders: list[str] = []
        others: list[str] = []
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    files.append(entry.name)
                else:
                    (folders if entry.is_dir(follow_symlinks=False) else others).append(entry.name)
        for name in sorted(others):
            self.check_own(os.path.join(path, name))
        return sorted(files), sorted(folders)

    @system_call("opening for writing")
    def check_own(self, path: StrPath, wanted: str = "regular file or folder") -> None:
        """Raise StoreIOError if a name exists but is not of the `wanted` kind (`safe_open.check`)."""
        with contextlib.suppress(FileNotFoundError):
            safe_open.check(path, os.lstat(path).st_mode, wanted)

    @system_call("stat")
    def stat(self, file: int | StrPath) -> os.stat_result:
        """Return `os.stat` of a descriptor or a path. Links are followed."""
        return os.stat(file)

    def size(self, file: int | StrPath) -> int:
        """Return the length of a descriptor's or path's file in bytes."""
        return self.stat(file).st_size

    @system_call("take_after")
    def take_after(self, file: int | StrPath, found: os.stat_result) -> None:
        """Give a file or folder the mode and the times of another, and its owner if that is permitted.
        The owner may always read and write it. Set-user-ID bits of files are dropped."""
        with self._descriptor(file) as fd:
            self.give_to(fd, found)
            folder = stat.S_ISDIR(found.st_mode)
            os.chmod(fd, stat.S_IMODE(found.st_mode) | 0o700 if folder else found.st_mode & 0o777 | 0o600)
            os.utime(fd, ns=(found.st_atime_ns, found.st_mtime_ns))

    @system_call("chown")
    def give_to(self, file: int | StrPath, found: os.stat_result) -> None:
        """Give a file or folder the owner of another, if that is permitted and the file system has owners."""
        if os.geteuid() == 0:
            try:
                with self._descriptor(file) as fd:
                    os.chown(fd, found.st_uid, found.st_gid)
            except OSError as error:
                if error.errno not in (errno.EPERM, *system.UNSUPPORTED):
                    raise

    def exists(self, path: StrPath) -> bool:
        """Return True if the name leads to something. Errors other than "no such file" are raised."""
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    def boot_id(self) -> str | None:
        """Return an id of the machine's present boot, which a restart changes, or None if the system has none."""
        return system.boot_id()

    # -- whole files, by the calls above ------------------------------------------------------------------------------

    def read_whole(self, path: StrPath, limit_bytes: int) -> bytes:
        """Return the content of a regular file. Raises StoreIOError (EFBIG) if it has more than `limit_bytes`."""
        with self.opened(path, os.O_RDONLY) as fd:
            size = self.size(fd)
            if size > limit_bytes:
                text = f"{size} bytes, more than the {limit_bytes} that such a file may have"
                self._fail(OSError(errno.EFBIG, text), fd, "read")
            return self.pread(fd, size, 0)

    # -- whole folders, by the calls above ----------------------------------------------------------------------------

    def make_folders(self, path: StrPath) -> bool:
        """Create a folder and its missing parents, durably. Return True if any was missing."""
        missing = []
        folder = os.fspath(path)
        while not self.exists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder) or os.curdir
        for each in reversed(missing):
            self.mkdir(each, exist_ok=True)  # another process may be creating it, too
            self.sync_directory(os.path.dirname(each) or os.curdir)
        return bool(missing)

    def remove_tree(self, path: StrPath) -> None:
        """Delete a file, or a folder with its content, if it exists. Links are not followed."""
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                self.unlink(path)
                return
            for name in self.scandir(path):  # if a name is replaced by a link meanwhile, `unlink` and `rmdir` refuse it
                self.remove_tree(os.path.join(path, name))
            self.rmdir(path)

    # -- beneath ----------------------------------------------------------------------------------------------------

    def _entries(self, path: StrPath) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        return os.scandir(path)

    @contextlib.contextmanager
    def _descriptor(self, file: int | StrPath) -> Iterator[int]:
        """Yield the descriptor itself, or one of the file or folder at a path without links."""
        if isinstance(file, int):
            yield file
            return
        fd = safe_open.open_any(file)
        try:
            yield fd
        finally:
            os.close(fd)

    def _copy_some(self, source: int, target: int, position: int, length: int) -> int:
        """Copy once by the system. Return the number of bytes, 0 if it cannot. Tests shorten it."""
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                return os.copy_file_range(source, target, min(length, _COPY_STEP), position, position)
        return 0

    def _pwrite_some(self, fd: int, data: memoryview, position: int) -> int:
        """Write once. Return the number of bytes, at least one if there were any. Tests shorten it."""
        done = os.pwrite(fd, data, position)
        if not done and data.nbytes:
            raise OSError(errno.EIO, "the write made no progress")
        return done

    def _fail(self, error: OSError, file: int | StrPath, operation: str) -> NoReturn:
        if isinstance(error, FileExistsError | MQStoreError):
            raise error
        raise_os_error(error, self.path_of(file) if isinstance(file, int) else file, operation)


#: The file system that production uses.
REAL = FileSystem()
