"""The file system: all bytes or an error that names the file; nothing is ever shortened."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from mqstore.errors import ReadOnlyStoreError, StoreFullError, StoreIOError
from mqstore.files import system
from mqstore.files.filesystem import REAL
from mqstore.files.readonly_fs import QUIET
from tests.faults import FaultyFileSystem

NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL


@pytest.fixture
def fs() -> FaultyFileSystem:
    return FaultyFileSystem()


def test_a_new_file_is_private_and_not_inherited_by_programs(tmp_path: Path) -> None:
    fd = REAL.open(tmp_path / "a", NEW)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(fd)
    REAL.close(fd)
    REAL.mkdir(tmp_path / "folder")
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o700


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    pread = os.pread
    fd = REAL.open(tmp_path / "a", os.O_RDONLY)
    monkeypatch.setattr(os, "pread", lambda fd, length, position: pread(fd, min(length, 3), position))
    assert REAL.pread(fd, 8, 1) == b"12345678"
    assert REAL.pread(fd, 20, 1) == b"123456789"
    REAL.close(fd)


@pytest.mark.parametrize("length", [1, 3, 7, 100, 799])
def test_short_writes_are_continued_for_every_kind_of_buffer(tmp_path: Path, fs: FaultyFileSystem, length: int) -> None:
    rows = np.arange(100, dtype=">i8")  # 100 elements, 800 bytes: a length in elements must not pass for bytes
    fs.shorten("pwrite", length=length)
    fd = fs.open(tmp_path / "a", NEW)
    fs.pwrite(fd, rows.data, 5)
    fs.close(fd)
    assert (tmp_path / "a").read_bytes() == bytes(5) + rows.tobytes()


def test_a_write_without_progress_is_an_error_and_no_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    fd = REAL.open(tmp_path / "a", NEW)
    with pytest.raises(StoreIOError, match="no progress"):
        REAL.pwrite(fd, b"x", 0)
    REAL.pwrite(fd, b"", 0)
    REAL.close(fd)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StoreFullError),
        (errno.EDQUOT, StoreFullError),
        (errno.EROFS, ReadOnlyStoreError),
        (errno.EACCES, ReadOnlyStoreError),
        (errno.EIO, StoreIOError),
        (errno.EMFILE, StoreIOError),
    ],
)
def test_errors_name_operation_and_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[OSError]
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    fd = REAL.open(tmp_path / "victim", NEW)
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(kind, match="pwrite") as caught:
        REAL.pwrite(fd, b"x", 0)
    assert caught.value.errno == number
    assert caught.value.filename == str(tmp_path / "victim")
    assert str(tmp_path / "victim") in str(caught.value)
    assert "[Errno" not in str(caught.value)
    REAL.close(fd)


def test_a_missing_file_and_a_taken_name_are_answers(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        REAL.open(tmp_path / "a", os.O_RDONLY)
    with pytest.raises(FileNotFoundError):
        REAL.scandir(tmp_path / "a")
    with pytest.raises(FileNotFoundError):
        REAL.unlink(tmp_path / "a")
    REAL.unlink(tmp_path / "a", missing_ok=True)
    assert not REAL.exists(tmp_path / "a")
    REAL.mkdir(tmp_path / "a")
    with pytest.raises(FileExistsError):
        REAL.mkdir(tmp_path / "a")
    REAL.mkdir(tmp_path / "a", exist_ok=True)
    (tmp_path / "file").touch()
    with pytest.raises(StoreIOError, match="regular file, not a folder"):
        REAL.mkdir(tmp_path / "file", exist_ok=True)
    with pytest.raises(FileExistsError):
        REAL.link(tmp_path / "file", tmp_path / "file")


@pytest.mark.parametrize("by_hand", [False, True])
def test_allocated_files_have_length_and_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_hand: bool) -> None:
    if by_hand:
        monkeypatch.setattr(system, "allocate", lambda *_: False)
    length = (2 << 20) + 5  # by hand, zeros are written a MiB at a time
    fd = REAL.open(tmp_path / "a", NEW)
    REAL.pwrite(fd, b"kept", 0)
    REAL.allocate(fd, length, length)
    REAL.allocate(fd, 10, 10)  # never shorter
    assert REAL.size(fd) == length
    assert os.fstat(fd).st_blocks * 512 >= length
    assert REAL.pread(fd, length, 0) == b"kept" + bytes(length - 4)
    REAL.close(fd)


def test_a_sparse_file_grows_and_never_shrinks(tmp_path: Path) -> None:
    fd = REAL.open(tmp_path / "a", NEW)
    REAL.truncate_sparse(fd, 1 << 20)
    assert REAL.size(tmp_path / "a") == 1 << 20
    with pytest.raises(ValueError, match="never shortened"):
        REAL.truncate_sparse(fd, 10)
    assert REAL.size(fd) == 1 << 20
    REAL.close(fd)


def test_mapping_is_shared_and_bounded(tmp_path: Path) -> None:
    fd = REAL.open(tmp_path / "a", NEW)
    REAL.allocate(fd, 8192, 8192)
    for length in (0, 8193):
        with pytest.raises(StoreIOError, match="cannot map"):
            REAL.map(fd, length, writable=True)
    writable, read_only = REAL.map(fd, 8192, writable=True), REAL.map(fd, 4096, writable=False)
    REAL.close(fd)
    writable[:3] = b"abc"
    assert read_only[:3] == b"abc"
    assert (tmp_path / "a").read_bytes()[:3] == b"abc"
    with pytest.raises(TypeError):
        read_only[0] = 1
    writable.close()
    read_only.close()


def test_listing_is_sorted_and_typed(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"12345")
    (tmp_path / "a").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "gone").symlink_to("nowhere")
    assert REAL.scandir(tmp_path) == ["a", "b", "folder", "gone"]
    assert REAL.scandir_files(tmp_path) == [("a", 0), ("b", 5)]
    assert REAL.scandir_directories(tmp_path) == ["folder"]
    REAL.rmdir(tmp_path / "folder")
    assert REAL.scandir_directories(tmp_path) == []


def test_reading_a_whole_file_has_a_bound_and_takes_only_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")  # opening it for reading would wait for a writer that never comes
    assert REAL.read_whole(tmp_path / "a", 5) == b"12345"
    for name, limit, number in (("a", 4, errno.EFBIG), ("pipe", 4, errno.EINVAL), ("", 4, errno.EISDIR)):
        with pytest.raises(StoreIOError) as caught:
            REAL.read_whole(tmp_path / name, limit)
        assert caught.value.errno == number


def test_a_failed_sync_of_a_folder_counts_if_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(number: int) -> None:
        def fsync(_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    REAL.sync_directory(tmp_path)
    answer(errno.EINVAL)
    REAL.sync_directory(tmp_path)
    answer(errno.EIO)
    with pytest.raises(StoreIOError, match="sync_directory"):
        REAL.sync_directory(tmp_path)


def test_each_folder_that_was_missing_is_durable_before_the_next_is_made(tmp_path: Path, fs: FaultyFileSystem) -> None:
    assert fs.make_folders(tmp_path / "a" / "b")
    made = [(call.operation, call.path) for call in fs.calls if call.operation in ("mkdir", "sync_directory")]
    assert made == [
        ("mkdir", str(tmp_path / "a")),
        ("sync_directory", str(tmp_path)),
        ("mkdir", str(tmp_path / "a" / "b")),
        ("sync_directory", str(tmp_path / "a")),
    ]
    assert not fs.make_folders(tmp_path / "a" / "b")


@pytest.mark.parametrize("some", [None, 0, 3])
def test_a_copy_by_any_call_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, some: int | None) -> None:
    """All at once, nothing, or three bytes and then no more."""
    content = bytes(range(256)) * 5000 + bytes(1 << 20)
    (tmp_path / "a").write_bytes(content)
    with open(tmp_path / "a", "ab") as file:
        file.truncate(len(content) + (1 << 20))
    if some is not None:
        calls: list[int] = []

        def partly(source: int, target: int, count: int, at: int, to: int) -> int:
            calls.append(count)
            if some == 0 or len(calls) > 1:
                raise OSError(errno.EXDEV, "not here")
            return os.pwrite(target, os.pread(source, some, at), to)

        monkeypatch.setattr(os, "copy_file_range", partly, raising=False)
    source = REAL.open(tmp_path / "a", os.O_RDONLY)
    for length in (0, 5, len(content) - 9, len(content) + 100, 1 << 40):
        target = REAL.open(tmp_path / str(length), NEW)
        REAL.truncate_sparse(target, len(content) + (1 << 20))
        REAL.copy(source, target, length)
        REAL.close(target)
        expected = (content + bytes(1 << 20))[:length]
        assert (tmp_path / str(length)).read_bytes() == expected + bytes(len(content) + (1 << 20) - len(expected))
    REAL.close(source)


def test_failed_copy_names_its_side(tmp_path: Path, fs: FaultyFileSystem) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000)
    source, target = fs.open(tmp_path / "a", os.O_RDONLY), fs.open(tmp_path / "b", NEW)
    fs.fail("pread", errno.EIO)
    with pytest.raises(StoreIOError) as unreadable:
        fs.copy(source, target, 5000)
    assert unreadable.value.filename == str(tmp_path / "a")
    fs.fail("pwrite", errno.ENOSPC)
    with pytest.raises(StoreFullError) as full:
        fs.copy(source, target, 5000)
    assert full.value.filename == str(tmp_path / "b")
    fs.close(source)
    fs.close(target)


def test_mode_and_times_are_those_of_the_other_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    os.chmod(tmp_path / "a", 0o446)
    os.utime(tmp_path / "a", ns=(10**18 + 1, 10**18 + 2))
    fd = REAL.open(tmp_path / "b", NEW)
    REAL.take_after(fd, REAL.stat(tmp_path / "a"))
    REAL.close(fd)
    found = (tmp_path / "b").stat()
    assert (found.st_mode & 0o777, found.st_atime_ns, found.st_mtime_ns) == (0o646, 10**18 + 1, 10**18 + 2)
    (tmp_path / "c").mkdir(mode=0o555)
    (tmp_path / "d").mkdir()
    REAL.take_after(tmp_path / "d", REAL.stat(tmp_path / "c"))
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o755
    fd = QUIET.open(tmp_path / "b", os.O_RDONLY)
    with pytest.raises(ReadOnlyStoreError):
        QUIET.take_after(fd, found)
    QUIET.close(fd)


def test_removing_a_tree_keeps_link_targets(tmp_path: Path) -> None:
    (tmp_path / "tree" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "a").write_text("a")
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "b").write_text("b")
    (tmp_path / "tree" / "folder").symlink_to(tmp_path / "kept")
    (tmp_path / "tree" / "file").symlink_to(tmp_path / "kept" / "b")
    (tmp_path / "top").symlink_to(tmp_path / "kept")
    for name in ("tree", "tree", "top"):
        REAL.remove_tree(tmp_path / name)
    assert os.listdir(tmp_path) == ["kept"]
    assert (tmp_path / "kept" / "b").read_text() == "b"


def test_many_files_are_synced_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=30)  # breaks unless two calls wait at once
    synced: list[int] = []

    def sync(number: int) -> None:
        both.wait()
        synced.append(number)

    REAL.sync_each(sync, range(8))
    assert sorted(synced) == [*range(8)]


def test_other_file_systems_see_syncs_in_their_order(fs: FaultyFileSystem) -> None:
    synced: list[tuple[int, str]] = []
    fs.sync_each(lambda number: synced.append((number, threading.current_thread().name)), range(100))
    assert synced == [(number, threading.current_thread().name) for number in range(100)]


def test_syncs_without_a_free_thread_are_made_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    synced: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", start)
    REAL.sync_each(synced.append, range(100))
    assert synced == [*range(100)]


@pytest.mark.parametrize("other", [StoreIOError(errno.EMFILE, "no descriptor", "a", "open"), KeyboardInterrupt()])
def test_final_error_of_a_sync_is_raised_before_others(other: BaseException) -> None:
    final = StoreIOError(errno.EIO, "lost", "b", "fdatasync")
    both = threading.Barrier(2, timeout=30)
    errors: list[BaseException] = [other, final]

    def sync(_: int) -> None:
        both.wait()
        with turn:
            raise errors.pop(0)

    turn = threading.Lock()
    with pytest.raises(StoreIOError) as caught:
        REAL.sync_each(sync, range(4))
    assert caught.value is final


def test_ctrl_c_in_a_sync_is_raised_before_a_sync_that_did_not_begin() -> None:
    both = threading.Barrier(2, timeout=30)
    errors: list[BaseException] = [KeyboardInterrupt(), StoreIOError(errno.EMFILE, "no descriptor", "a", "open")]

    def sync(_: int) -> None:
        both.wait()
        raise errors.pop()

    with pytest.raises(KeyboardInterrupt):
        REAL.sync_each(sync, range(4))


def test_no_sync_begins_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class LateThread(threading.Thread):
        ident = 1

        def start(self) -> None:
            pass

        def join(self, timeout: float | None = None) -> None:
            self.run()

    synced: list[int] = []

    def sync(number: int) -> None:
        synced.append(number)
        raise StoreIOError(errno.EIO, "lost", "a", "fdatasync")

    monkeypatch.setattr(threading, "Thread", LateThread)
    with pytest.raises(StoreIOError, match="lost"):
        REAL.sync_each(sync, range(10))
    assert synced == [0]
