"""The abort mark: there from open to clean close, whatever happens between."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqstore.files.filesystem import FileSystem
from mqstore.files.lock import AbortMark
from tests.faults import FaultyFileSystem


class Booted(FileSystem):
    """A machine whose present run has this id."""

    def __init__(self, boot_id: str | None) -> None:
        super().__init__()
        self._boot_id = boot_id

    def boot_id(self) -> str | None:
        return self._boot_id


def test_set_over_the_mark_of_a_crash(tmp_path: Path) -> None:
    (tmp_path / "abort").write_bytes(b"1234567 of-a-longer-one")
    mark = AbortMark(tmp_path, Booted("run"))
    assert mark.exists()
    mark.set(42)
    assert (tmp_path / "abort").read_bytes() == b"42 run"  # as in the Java broker it begins with the process id
    mark.clear()
    mark.clear()
    assert not mark.exists()


@pytest.mark.parametrize(
    ("content", "boot_id", "expected"),
    [
        (b"4711 run", "run", True),
        (b"4711 run", "another", False),
        (b"4711 run", None, False),
        (b"4711", "run", False),
        (b"", "run", False),
        (b"4711 run and-more", "run", False),
        (b"4711 run" + bytes(1 << 20), "run", False),
        (None, "run", False),
    ],
)
def test_mark_shows_whether_the_machine_restarted(
    tmp_path: Path, content: bytes | None, boot_id: str | None, expected: bool
) -> None:
    if content is not None:
        (tmp_path / "abort").write_bytes(content)
    assert AbortMark(tmp_path, Booted(boot_id)).is_of_this_boot() is expected


def test_a_mark_without_a_boot_id_is_never_of_this_boot(tmp_path: Path) -> None:
    mark = AbortMark(tmp_path)
    mark.set(42)
    assert mark.is_of_this_boot()
    mark.set(42, boot_id=False)
    assert not mark.is_of_this_boot()


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
