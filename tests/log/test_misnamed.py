"""Segment files with wrong names: recovery renames them by what their records say."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mqstore.log.recovery.misnamed import MisnamedSegmentsError
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from tests.faults import Crash, deaths
from tests.log.support import SEGMENT, Unsynced, files, kill, open_store, overwrite, segment

COUNT = 120


def make(path: Path, profile: str, *, killed: bool) -> None:
    store = open_store(path, profile=profile)  # type: ignore[arg-type]
    for n in range(COUNT):
        store.put("orders", b"message %03d" % n * 5, n % 2, keys=f"k{n}")
    store.dispatch()
    kill(store) if killed else store.close()


def last(path: Path) -> int:
    return max(int(file.name) for file in (path / "commitlog").iterdir() if file.name.isdigit()) // SEGMENT


def swap(path: Path, one: int, other: int) -> None:
    segment(path, one).rename(path / "aside")
    segment(path, other).rename(segment(path, one))
    (path / "aside").rename(segment(path, other))


def shift(path: Path) -> None:
    """Each file has the name of the next one."""
    for number in range(last(path), -1, -1):
        segment(path, number).rename(segment(path, number + 1))


def damage_first_record(path: Path) -> None:
    swap(path, 1, 2)
    overwrite(segment(path, 1), 95, b"\xff")


def one_of_zeros(path: Path) -> None:
    """What belongs to the second name is gone; the other file holds it."""
    swap(path, 1, 2)
    segment(path, 1).write_bytes(bytes(SEGMENT))


def off_the_grid(path: Path) -> None:
    segment(path, 1).rename(path / "commitlog" / f"{SEGMENT + 1:020d}")


RENAMED: dict[str, tuple[Callable[[Path], None], int]] = {
    "two in the middle": (lambda path: swap(path, 1, 2), 0),
    "first and last": (lambda path: swap(path, 0, last(path)), 0),
    "last two": (lambda path: swap(path, last(path) - 1, last(path)), 0),
    "all by one": (shift, 0),
    "off the grid": (off_the_grid, 0),
    "the last one beyond the end": (lambda path: segment(path, last(path)).rename(segment(path, 40)), 0),
    "two, and the first record of one damaged": (damage_first_record, 1),
}
"""What was done -> (how, messages that it costs)."""


def held(path: Path) -> list[bytes]:
    with open_store(path, "r") as store:
        return sorted(m.body for ref in store.queues("orders") for m in store.iter(*ref))


EVERY = sorted(b"message %03d" % n * 5 for n in range(COUNT))


@pytest.mark.parametrize("name", RENAMED)
@pytest.mark.parametrize("killed", [False, True], ids=["closed", "killed"])
@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
def test_recover_renames_segments_by_their_records(path: Path, profile: str, killed: bool, name: str) -> None:
    make(path, profile, killed=killed)
    names = sorted(file.name for file in (path / "commitlog").iterdir())
    how, lost = RENAMED[name]
    how(path)
    before = files(path)

    with open_store(path, "r") as store:
        verified = list(store.verify())
    planned = recover_store(path, RecoverOptions(dry_run=True), fs=Unsynced())
    assert files(path) == before
    if killed or name not in ("two in the middle", "two, and the first record of one damaged"):
        with pytest.raises(MisnamedSegmentsError, match="mqstore recover"):
            open_store(path)
    else:
        open_store(path).close()  # the end of a store that was closed proves itself, and nothing else is read
    report = recover_store(path, RecoverOptions(), fs=Unsynced())

    assert report.renamed == planned.renamed
    assert {f.file for f in verified if f.kind == "segment_name"} == set(report.renamed)
    assert sorted(file.name for file in (path / "commitlog").iterdir()) == names
    found = held(path)
    assert set(found) <= set(EVERY)
    assert len(found) == COUNT - lost
    assert [f.kind for f in report.findings] == ["bad_record"] * lost
    assert recover_store(path, RecoverOptions(), fs=Unsynced()).renamed == {}


def test_a_refused_store_is_left_as_closed_as_it_was(tmp_path: Path) -> None:
    make(tmp_path / "s", "mqstore", killed=False)
    swap(tmp_path / "s", last(tmp_path / "s") - 1, last(tmp_path / "s"))
    with pytest.raises(MisnamedSegmentsError):
        open_store(tmp_path / "s")
    assert not (tmp_path / "s" / "abort").exists()


@pytest.mark.parametrize("name", ["first and last", "all by one", "one of zeros"])
def test_renaming_may_be_killed_at_every_change_and_run_again(tmp_path: Path, name: str) -> None:
    make(tmp_path / "made", "mqstore", killed=True)
    expected = EVERY
    if name == "one of zeros":
        with open_store(tmp_path / "made", "r") as store:
            found = [m for ref in store.queues("orders") for m in store.iter(*ref)]
        expected = sorted(m.body for m in found if m.physical_offset // SEGMENT != 2)
        one_of_zeros(tmp_path / "made")
    else:
        RENAMED[name][0](tmp_path / "made")
    renamed = recover_store(tmp_path / "made", RecoverOptions(dry_run=True), fs=Unsynced()).renamed
    renames = 0
    for nth, fs in deaths(1, torn=False):
        path = tmp_path / f"{nth}"
        shutil.copytree(tmp_path / "made", path)
        with pytest.raises(Crash):
            recover_store(path, RecoverOptions(), fs=fs)
        with suppress(MisnamedSegmentsError):
            open_store(path).close()
        recover_store(path, RecoverOptions(), fs=Unsynced())
        assert held(path) == expected, f"killed before change {nth}"
        shutil.rmtree(path)
        renames = sum(each.operation == "replace" and "commitlog" in each.path for each in fs.changes())
        if renames == 2 * len(renamed):  # what follows is any recovery
            break
    assert renames >= 4


def test_a_copy_under_another_name_is_left_alone(tmp_path: Path) -> None:
    """The place of its records is rightly taken."""
    make(tmp_path / "s", "mqstore", killed=False)
    shutil.copy(segment(tmp_path / "s", 1), segment(tmp_path / "s", 2))
    report = recover_store(tmp_path / "s", RecoverOptions(), fs=Unsynced())
    assert report.renamed == {}
    assert [f.kind for f in report.findings] == ["bad_record"]
