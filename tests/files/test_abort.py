"""The abort mark: there from open to clean close, whatever happens between."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from mqstore.errors import StoreFullError
from mqstore.files.abort import AbortMark
from tests.faults import Crash, FaultyFileSystem


def test_the_mark_holds_the_process_id_as_the_java_broker_writes_it(tmp_path: Path) -> None:
    AbortMark(tmp_path).set(4711)
    assert (tmp_path / "abort").read_bytes() == b"4711"


def test_set_over_the_mark_of_a_crash(tmp_path: Path) -> None:
    (tmp_path / "abort").write_bytes(b"1234567")
    mark = AbortMark(tmp_path)
    assert mark.exists()
    mark.set(42)
    assert (tmp_path / "abort").read_bytes() == b"42"
    mark.clear()
    mark.clear()
    assert not mark.exists()


def test_set_and_clear_are_durable_when_they_return(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    mark = AbortMark(tmp_path, fs)
    mark.set(42)
    mark.clear()
    assert [(call.operation, Path(call.path).name) for call in fs.changes()] == [
        ("create", "abort"),
        ("pwrite", "abort"),
        ("fdatasync", "abort"),
        ("sync_directory", tmp_path.name),
        ("unlink", "abort"),
        ("sync_directory", tmp_path.name),
    ]


@pytest.mark.parametrize("nth", [2, 3, 4])
def test_a_crash_inside_set_leaves_a_mark(tmp_path: Path, nth: int) -> None:
    fs = FaultyFileSystem()
    fs.crash(nth, torn=True)
    with pytest.raises(Crash):
        AbortMark(tmp_path, fs).set(4711)
    assert AbortMark(tmp_path).exists()


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    fs.fail("pwrite", errno.ENOSPC)
    with pytest.raises(StoreFullError):
        AbortMark(tmp_path, fs).set(4711)


def test_a_link_of_that_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"data")
    (tmp_path / "abort").symlink_to("precious")
    with pytest.raises(OSError, match="abort"):
        AbortMark(tmp_path).set(4711)
    assert (tmp_path / "precious").read_bytes() == b"data"
