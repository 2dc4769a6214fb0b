"""A store one of whose own names is a link or a special file is refused by a writer before it changes anything."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import mqstore
from mqstore.admin import rebuild_config
from mqstore.errors import MissingFileError, StoreIOError
from mqstore.jobs import recover, verify
from tests.log.support import open_in

OWN = (
    *("tmp", "commitlog", "commitlog/00000000000000000000", "commitlog/mqstore.profile", "checkpoint", "mqstore.json"),
    *("lock", "abort", "config", "config/topics.json", "consumequeue", "consumequeue/orders", "consumequeue/orders/0"),
    *("consumequeue/orders/0/00000000000000000000", "index", "timerlog", "timerwheel", "inbox", "cut", "_staging"),
)
"""Names in the root of a store and below it; those that a new store lacks are made by the test."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    with mqstore.open(root, config=mqstore.StoreConfig(segment_bytes=1 << 16)) as store:
        store.put("orders", b"1", queue_id=0, keys="k")
    return root


def _everything(root: Path) -> dict[str, object]:
    """All below a folder but its lock, which is taken before the queues are listed: kinds, contents and times."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        if path.name != "lock":
            found[str(path)] = (status.st_mode, content, status.st_mtime_ns if content else 0)
    return found


@pytest.mark.parametrize("name", OWN)
def test_a_link_is_refused_by_name_and_nothing_is_changed(root: Path, tmp_path: Path, name: str) -> None:
    path, elsewhere = root / name, tmp_path / "elsewhere"
    if path.exists():
        path.rename(elsewhere)
    elif name in ("abort", "timerwheel"):
        elsewhere.write_bytes(b"precious")
    else:
        elsewhere.mkdir()
        (elsewhere / "cq-1").write_bytes(b"precious")
    path.symlink_to(elsewhere)
    before = _everything(tmp_path)
    for opened in (lambda: mqstore.open(root), lambda: recover(root)):
        with pytest.raises(StoreIOError, match="symbolic link") as caught:
            opened()
        assert str(path) in str(caught.value)
    assert _everything(tmp_path) == before


@pytest.mark.parametrize("name", ["checkpoint", "config/topics.json", "consumequeue/orders/0/00000000000000000000"])
def test_a_fifo_is_refused_by_name(root: Path, name: str) -> None:
    (root / name).unlink()
    os.mkfifo(root / name)
    for mode in ("rw", "r"):
        if mode == "rw" or name == "checkpoint":
            with pytest.raises(StoreIOError, match="FIFO") as caught:
                open_in(mode, root)
            assert str(root / name) in str(caught.value)


def test_repair_of_the_tables_refuses_a_link(root: Path, tmp_path: Path) -> None:
    (root / "config" / "topics.json").rename(tmp_path / "topics.json")
    (tmp_path / "topics.json").write_text("{")
    (root / "config" / "topics.json").symlink_to(tmp_path / "topics.json")
    with pytest.raises(StoreIOError, match="symbolic link"):
        rebuild_config(root)
    assert (tmp_path / "topics.json").read_text() == "{"


def test_a_refused_store_still_counts_as_closed_cleanly(root: Path, tmp_path: Path) -> None:
    queue = root / "consumequeue" / "orders" / "0"
    queue.rename(tmp_path / "elsewhere")
    queue.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreIOError, match="symbolic link"):
        mqstore.open(root)
    queue.unlink()
    (tmp_path / "elsewhere").rename(queue)
    with open_in("rw", root) as store:
        assert store.clean_shutdown


def test_names_that_are_not_the_stores_are_left_alone(root: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (root / "backup").symlink_to(tmp_path / "precious")
    (root / "tmp" / "keep").mkdir()
    (root / "tmp" / "keep" / "letter").write_bytes(b"precious")
    (root / "tmp" / "notes").write_bytes(b"precious")
    with mqstore.open(root) as store:
        store.put("orders", b"2", queue_id=0)
    assert (root / "tmp" / "keep" / "letter").exists()
    assert (root / "tmp" / "notes").exists()
    assert (root / "backup").is_symlink()


def test_a_store_is_reached_by_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "var").symlink_to(tmp_path)
    (tmp_path / "link").symlink_to("var/store")
    for path in (tmp_path / "var" / "store", tmp_path / "link", tmp_path / "var" / "new"):
        with mqstore.open(path) as store:
            store.put("more", b"x", queue_id=0, keys="k")
            assert store.read("more", 0, 0)[-1].body == b"x"
    assert (tmp_path / "new" / "commitlog").is_dir()


def test_a_reader_follows_links(root: Path, tmp_path: Path) -> None:
    for name in ("commitlog", "consumequeue/orders", "checkpoint"):
        (root / name).rename(tmp_path / Path(name).name)
        (root / name).symlink_to(tmp_path / Path(name).name)
    with mqstore.open(root, "r") as store:
        assert [message.body for message in store.read("orders", 0, 0)] == [b"1"]


@pytest.mark.parametrize("name", ["commitlog", "commitlog/00000000000000000000", "consumequeue/orders/0"])
def test_a_plan_and_a_check_name_the_link_that_recover_refuses(root: Path, tmp_path: Path, name: str) -> None:
    """A plan said that nothing was to be done, and a check that all was well."""
    (root / name).rename(tmp_path / "elsewhere")
    (root / name).symlink_to(tmp_path / "elsewhere")
    before = _everything(tmp_path)
    with pytest.raises(StoreIOError, match="symbolic link") as caught:
        recover(root, dry_run=True)
    assert str(root / name) in str(caught.value)
    [said] = verify(root).stores[0].foreign
    assert said == str(caught.value)
    assert _everything(tmp_path) == before


def test_a_folder_that_retention_removes_meanwhile_is_not_mentioned(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = MissingFileError(errno.ENOENT, "No such file or directory", str(root / "consumequeue/orders"), "scandir")
    monkeypatch.setattr("mqstore.jobs.verifying.check_own", Mock(side_effect=gone))
    assert verify(root).stores[0].foreign == ()


def test_names_below_the_log_are_no_part_of_it(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is mounted at commitlog/ has a folder there that only root may list."""
    below = root / "commitlog" / "lost+found"
    below.mkdir()
    (below / "link").symlink_to(tmp_path)
    assert recover(root, dry_run=True)[0].report
    assert verify(root).stores[0].foreign == ()

    scandir = os.scandir

    def refused(path: str) -> Any:
        if str(path).endswith("cut"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    (root / "cut").mkdir()
    monkeypatch.setattr(os, "scandir", refused)
    assert verify(root).stores[0].foreign == ()
