"""The rule for paths: no link is written through, and nothing but regular files and folders is opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mqstore.errors import ReadOnlyStoreError, StoreIOError
from mqstore.files import safe_open, system
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.readonly_fs import QUIET
from mqstore.files.safe_open import resolved

WRITING = [os.O_WRONLY, os.O_RDWR, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC]


@pytest.fixture(params=["as here", "folder by folder"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways to refuse links: by the system's own call, and by hand where there is none."""
    if request.param == "folder by folder":
        monkeypatch.setattr(system, "_syscall", None)
        monkeypatch.setattr(safe_open, "_NOFOLLOW_ANY", 0)
    return str(request.param)


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """Somebody's folder; afterwards all in it is as it was."""
    folder = tmp_path / "precious"
    (folder / "empty").mkdir(parents=True)
    (folder / "file").write_bytes(b"precious")
    before = _seen(folder)
    yield folder
    assert _seen(folder) == before


def _seen(folder: Path) -> list[tuple[str, int, int, bytes]]:
    found = []
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found.append((str(path), status.st_mode, status.st_mtime_ns, content))
    return found


def _refused(call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(StoreIOError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value)


# -- opening -----------------------------------------------------------------------------------------------------------


def test_name_with_a_null_byte_opens_nothing(tmp_path: Path) -> None:
    """A call of C would take the part before it."""
    for call in (lambda name: safe_open.open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL), safe_open.open_folder):
        with pytest.raises(ValueError, match="null byte"):
            call(f"{tmp_path}\0/new")
        with pytest.raises(ValueError, match="null byte"):
            call(f"{tmp_path}/new\0")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("flags", WRITING)
@pytest.mark.parametrize("target", ["file", "nowhere", "empty"])
def test_a_link_is_not_opened_for_writing(tmp_path: Path, precious: Path, flags: int, target: str) -> None:
    link = tmp_path / "checkpoint"
    link.symlink_to(precious / target)
    _refused(lambda: REAL.open(link, flags), str(link), "symbolic link")


def test_a_new_file_does_not_come_where_a_link_leads(tmp_path: Path, precious: Path) -> None:
    link = tmp_path / "new"
    link.symlink_to(precious / "nowhere")
    with pytest.raises(FileExistsError):
        REAL.open(link, os.O_RDWR | os.O_CREAT | os.O_EXCL)


@pytest.mark.parametrize("flags", [*WRITING, os.O_RDWR | os.O_CREAT | os.O_EXCL])
def test_no_folder_above_a_file_to_write_is_a_link(tmp_path: Path, precious: Path, flags: int) -> None:
    (tmp_path / "config").symlink_to(precious)
    for name in ("file", "empty/new") if flags & os.O_CREAT else ("file",):
        path = tmp_path / "config" / name
        _refused(lambda path=path: REAL.open(path, flags), str(path), f"{tmp_path / 'config'} is a symbolic link")


def test_a_file_is_opened_for_writing_and_made_with_its_mode(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        fd = REAL.open(tmp_path / "a", os.O_RDWR | os.O_CREAT, 0o666)
        REAL.pwrite(fd, b"hello", 0)
        REAL.close(fd)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    fd = REAL.open(tmp_path / "a", os.O_RDWR)
    assert REAL.pread(fd, 10, 0) == b"hello"
    assert not os.get_inheritable(fd)
    REAL.close(fd)


def test_reading_follows_links_to_files(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "folder").symlink_to(precious)
    (tmp_path / "file").symlink_to(precious / "file")
    for fs in (REAL, QUIET):
        for path in (tmp_path / "folder" / "file", tmp_path / "file"):
            assert fs.read_whole(path, 100) == b"precious"


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _to_a_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_fifo, _to_a_fifo, _to_a_device, Path.mkdir])
@pytest.mark.parametrize("fs", [REAL, QUIET])
def test_irregular_file_is_refused_at_once(tmp_path: Path, make: Callable[[Path], None], fs: FileSystem) -> None:
    make(tmp_path / "a")
    _refused(lambda: fs.open(tmp_path / "a", os.O_RDONLY), str(tmp_path / "a"), "not a regular file")
    _refused(lambda: fs.read_whole(tmp_path / "a", 100), str(tmp_path / "a"), "not a regular file")
    for flags in WRITING:
        _refused(lambda flags=flags: REAL.open(tmp_path / "a", flags), str(tmp_path / "a"), "not a regular file")


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY, os.O_RDWR])
def test_late_fifo_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: int) -> None:
    (tmp_path / "a").touch()
    os.mkfifo(tmp_path / "b")
    reader = os.open(tmp_path / "b", os.O_RDONLY | os.O_NONBLOCK)
    file = os.stat(tmp_path / "a")
    monkeypatch.setattr(os, "stat", lambda *_, **__: file)
    try:
        _refused(lambda: REAL.open(tmp_path / "b", flags), "FIFO")
    finally:
        os.close(reader)


# -- names -------------------------------------------------------------------------------------------------------------


def test_folder_behind_a_link_is_not_changed(tmp_path: Path, precious: Path) -> None:
    link = tmp_path / "tmp"
    link.symlink_to(precious)
    (tmp_path / "mine").touch()
    like = os.stat("/")
    for call in (
        lambda: REAL.unlink(link / "file"),
        lambda: REAL.unlink(link / "file", missing_ok=True),
        lambda: REAL.rmdir(link / "empty"),
        lambda: REAL.mkdir(link / "new"),
        lambda: REAL.mkdir(link / "empty", exist_ok=True),
        lambda: REAL.mkdir(link, exist_ok=True),
        lambda: REAL.replace(link / "file", tmp_path / "taken"),
        lambda: REAL.replace(tmp_path / "mine", link / "file"),
        lambda: REAL.link(tmp_path / "mine", link / "new"),
        lambda: REAL.remove_tree(link / "empty"),
        lambda: REAL.sync_directory(link),
        lambda: REAL.take_after(link, like),
        lambda: REAL.take_after(link / "file", like),
    ):
        _refused(call, str(link), "symbolic link")
    assert (tmp_path / "mine").exists()


def test_a_link_itself_is_removed_and_renamed_over(tmp_path: Path, precious: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).symlink_to(precious / "file")
    (tmp_path / "mine").write_bytes(b"mine")
    REAL.unlink(tmp_path / "a")
    REAL.replace(tmp_path / "mine", tmp_path / "b")
    assert not (tmp_path / "b").is_symlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_no_owner_is_changed_through_a_link(tmp_path: Path, precious: Path) -> None:
    (tmp_path / "link").symlink_to(precious)
    like = os.stat_result((0o600, 0, 0, 1, 65534, 65534, 0, 0, 0, 0))
    for path in (tmp_path / "link", tmp_path / "link" / "file"):
        with pytest.raises((StoreIOError, ReadOnlyStoreError)):
            REAL.give_to(path, like)
        assert path.stat().st_uid == 0


def test_removing_a_tree_does_not_leave_it_by_a_link_that_comes_meanwhile(tmp_path: Path, precious: Path) -> None:
    class Swapping(FileSystem):
        def scandir(self, path: str | os.PathLike[str]) -> list[str]:
            if path == tmp_path / "tree":
                os.rename(path, tmp_path / "away")
                os.symlink(precious, path)
            return super().scandir(path)

    (tmp_path / "tree").mkdir()
    _refused(lambda: Swapping().remove_tree(tmp_path / "tree"), "symbolic link")


# -- listing -----------------------------------------------------------------------------------------------------------


def test_own_folder_with_a_special_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b").touch()
    (tmp_path / "a").mkdir()
    assert REAL.scandir_own(tmp_path) == (["b"], ["a"])
    os.mkfifo(tmp_path / "c")
    _refused(lambda: REAL.scandir_own(tmp_path), str(tmp_path / "c"), "FIFO")
    (tmp_path / "c").unlink()
    (tmp_path / "d").symlink_to("b")
    _refused(lambda: REAL.scandir_own(tmp_path), str(tmp_path / "d"), "symbolic link")


@pytest.mark.parametrize("fs", [REAL, QUIET])
def test_a_link_that_leads_in_a_circle_is_no_file_and_no_folder(tmp_path: Path, fs: FileSystem) -> None:
    (tmp_path / "circle").symlink_to("circle")
    assert fs.scandir_files(tmp_path) == []
    assert fs.scandir_directories(tmp_path) == []


# -- the door ----------------------------------------------------------------------------------------------------------


def test_a_resolved_path_is_absolute_and_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "link").symlink_to("store")
    monkeypatch.chdir(tmp_path)
    assert resolved("store") == str(tmp_path / "store")
    assert resolved("./link/../store/") == str(tmp_path / "store")
    assert resolved(tmp_path / "new" / "er") == str(tmp_path / "new" / "er")
    assert resolved("link/new") == str(tmp_path / "store" / "new")
