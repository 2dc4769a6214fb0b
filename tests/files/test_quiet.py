"""Reading through `QUIET` moves no time, and changing anything through it is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mqstore.errors import ReadOnlyStoreError
from mqstore.files.readonly_fs import QUIET

_OLD = (1_000_000_000, 1_600_000_000)
"""Read before it was written: even a mount with relatime moves such an access time."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "f" / "sub").mkdir(parents=True)
    (tmp_path / "f" / "a").write_bytes(b"hello")
    (tmp_path / "f" / "link").symlink_to("a")
    (tmp_path / "f" / "dangling").symlink_to("nowhere")
    for path in (tmp_path / "f" / "a", tmp_path / "f" / "sub", tmp_path / "f"):
        os.utime(path, _OLD)
    return tmp_path / "f"


@pytest.mark.skipif(not hasattr(os, "O_NOATIME"), reason="the platform cannot read without moving access times")
def test_access_times_stay(folder: Path) -> None:
    QUIET.scandir(folder)
    QUIET.scandir_files(folder)
    QUIET.scandir_directories(folder)
    QUIET.read_whole(folder / "a", 10)
    fd = QUIET.open(folder / "a", os.O_RDONLY)
    mapping = QUIET.map(fd, 5, writable=False)
    assert mapping[:] == b"hello"
    QUIET.close(fd)

    assert (folder / "a").stat().st_atime == _OLD[0]
    assert folder.stat().st_atime == _OLD[0]


def test_files_of_others_are_read_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """O_NOATIME is granted to the owner only; whoever may merely read still reads."""
    real = os.open

    def not_the_owner(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & getattr(os, "O_NOATIME", 0):
            raise PermissionError(1, "Operation not permitted")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", not_the_owner)

    assert QUIET.read_whole(folder / "a", 10) == b"hello"
    assert QUIET.scandir_directories(folder) == ["sub"]


def test_changes_are_refused_before_they_happen(folder: Path) -> None:
    for change in (
        lambda: QUIET.open(folder / "new", os.O_RDWR | os.O_CREAT),
        lambda: QUIET.open(folder / "a", os.O_WRONLY),
        lambda: QUIET.open(folder / "a", os.O_RDONLY | os.O_TRUNC),
        lambda: QUIET.mkdir(folder / "new"),
        lambda: QUIET.rmdir(folder / "sub"),
        lambda: QUIET.unlink(folder / "a"),
        lambda: QUIET.unlink(folder / "nonesuch", missing_ok=True),
        lambda: QUIET.replace(folder / "a", folder / "b"),
        lambda: QUIET.link(folder / "a", folder / "b"),
    ):
        with pytest.raises(ReadOnlyStoreError):
            change()

    assert sorted(os.listdir(folder)) == ["a", "dangling", "link", "sub"]
    assert (folder / "a").read_bytes() == b"hello"
