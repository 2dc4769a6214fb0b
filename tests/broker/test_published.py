"""Progress that others publish: each file counts once, whoever dies when; what is damaged hurts nobody."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from mqstore.broker.tables.external_offsets import ExternalOffsetFiles, publish
from tests.faults import FaultyFileSystem

PROGRESS = {("t", 0): 5, ("t", 10): 7, ("u", 0): 0}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "s").mkdir()
    return tmp_path / "s"


def folder(root: Path) -> Path:
    return root / "config" / "spark" / "groups"


def names(root: Path) -> list[str]:
    return sorted(os.listdir(folder(root)))


class Owner(ExternalOffsetFiles):
    """The files as their owner has them, and what was amiss."""

    def __init__(self, root: Path, fs: FaultyFileSystem | None = None) -> None:
        self.problems: list[str] = []
        super().__init__(root, fs or FaultyFileSystem(), self.problems.append)


def test_the_file_is_as_documented(root: Path) -> None:
    publish(root, "sp", PROGRESS)
    assert json.loads((folder(root) / "sp.json").read_text()) == {
        "version": 1,
        "group": "sp",
        "offsets": {"t": {"0": 5, "10": 7}, "u": {"0": 0}},
    }


def test_taken_files_are_left_for_the_next_owner(root: Path) -> None:
    publish(root, "sp", {("t", 0): 4})
    files = Owner(root)
    assert [*files.take()] == [("sp", {("t", 0): 4})]
    assert names(root) == ["sp.json.taken"]
    assert [*Owner(root).look()] == [("sp", {("t", 0): 4})]
    assert [*Owner(root).take()] == [("sp", {("t", 0): 4})]
    # The same owner, whose save has failed: it has it in hand still.
    assert [*files.take()] == [("sp", {("t", 0): 4})]
    # What comes meanwhile is newer.
    publish(root, "sp", {("t", 0): 6})
    assert [found.offsets["t", 0] for found in Owner(root).look()] == [4, 6]
    assert [*files.take()] == [("sp", {("t", 0): 6})]
    files.settle()
    assert names(root) == []


def test_file_published_meanwhile_stays(root: Path) -> None:
    publish(root, "sp", {("t", 0): 4})
    files = Owner(root)
    assert len([*files.take()]) == 1
    publish(root, "sp", {("t", 0): 6})
    files.settle()
    assert names(root) == ["sp.json"]
    assert [*files.take()] == [("sp", {("t", 0): 6})]


def test_a_settled_file_does_not_come_back_though_it_cannot_be_removed(root: Path) -> None:
    publish(root, "sp", {("t", 0): 4})
    fs = FaultyFileSystem()
    files = Owner(root, fs)
    assert len([*files.take()]) == 1
    fs.fail("unlink", errno.EACCES)
    files.settle()
    assert [*files.take()] == []
    assert "cannot remove" in files.problems[0]


GOOD = {"version": 1, "group": "sp", "offsets": {"t": {"0": 5}}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"version": 1',
        json.dumps({**GOOD, "version": 2}).encode(),
        json.dumps({**GOOD, "group": "another"}).encode(),
        json.dumps({**GOOD, "offsets": [5]}).encode(),
        json.dumps({**GOOD, "offsets": {"t": 5}}).encode(),
        *(
            json.dumps({**GOOD, "offsets": {"t": {queue: offset}}}).encode()
            for queue, offset in [("x", 1), ("00", 1), ("9" * 12, 1), ("0", -1), ("0", 1.5)]
        ),
    ],
)
def test_damaged_file_is_reported_once_and_moved(root: Path, content: bytes) -> None:
    publish(root, "sp", {("t", 0): 4})
    publish(root, "fine", {("t", 0): 1})
    (folder(root) / "sp.json").write_bytes(content)
    look = Owner(root)
    assert [*look.look()] == [*look.look()] == [("fine", {("t", 0): 1})]
    assert len(look.problems) == 1
    files = Owner(root)
    assert [*files.take()] == [("fine", {("t", 0): 1})]
    files.settle()
    assert [*files.take()] == []
    assert names(root) == ["sp.json.corrupt"]
    [problem] = files.problems
    assert "sp.json" in problem
    assert "damaged and ignored" in problem


def test_a_publisher_that_dies_leaves_the_old_or_the_new(root: Path) -> None:
    publish(root, "sp", {("t", 0): 1})
    fs = FaultyFileSystem()
    publish(root, "sp", {("t", 0): 2}, fs)
    order = [call.operation for call in fs.changes() if call.operation != "unlink"]
    assert order == ["create", "pwrite", "fdatasync", "replace", "sync_directory"]
    assert names(root) == ["sp.json"]


def test_unusable_folder_is_reported_and_not_fatal(root: Path) -> None:
    publish(root, "sp", {("t", 0): 4})
    fs = FaultyFileSystem()
    files = Owner(root, fs)
    fs.fail("replace", errno.EACCES)
    assert [*files.take()] == []
    assert "cannot rename" in files.problems[0]
    assert [*files.take()] == [("sp", {("t", 0): 4})]


@pytest.mark.parametrize("group", ["..", "a@b", "x" * 201, "a\n"])
def test_invalid_name_is_refused_before_a_write(root: Path, group: str) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a file"):
        publish(root, group, PROGRESS)
    assert os.listdir(root) == []


def test_the_folders_have_the_permissions_of_config(root: Path) -> None:
    (root / "config").mkdir()
    (root / "config").chmod(0o770)
    publish(root, "sp", PROGRESS)
    modes = [path.stat().st_mode & 0o777 for path in (folder(root).parent, folder(root), folder(root) / "sp.json")]
    assert modes == [0o770 & ~_umask(), 0o770 & ~_umask(), 0o660 & ~_umask()]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
