"""Segment files with wrong names: refused openings and killed recoveries. `tests/damage` has each kind of name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from mqstore import jobs
from mqstore.errors import CorruptStoreError
from tests.faults import Crash, deaths
from tests.log.recovering import recover
from tests.log.support import SEGMENT, kill, open_store, segment

COUNT = 120


def make(path: Path, *, killed: bool) -> None:
    store = open_store(path)
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


def one_of_zeros(path: Path) -> None:
    """What belongs to the second name is gone; the other file holds it."""
    swap(path, 1, 2)
    segment(path, 1).write_bytes(bytes(SEGMENT))


def held(path: Path) -> list[bytes]:
    with open_store(path, "r") as store:
        return sorted(m.body for ref in store.queues("orders") for m in store.iter(*ref))


EVERY = sorted(b"message %03d" % n * 5 for n in range(COUNT))


def test_a_refused_store_is_left_as_closed_as_it_was(tmp_path: Path) -> None:
    make(tmp_path / "s", killed=False)
    swap(tmp_path / "s", last(tmp_path / "s") - 1, last(tmp_path / "s"))
    with pytest.raises(CorruptStoreError):
        open_store(tmp_path / "s")
    assert not (tmp_path / "s" / "abort").exists()


WAYS: dict[str, Callable[[Path], None]] = {
    "first and last": lambda path: swap(path, 0, last(path)),
    "all by one": shift,
    "one of zeros": one_of_zeros,
}


@pytest.mark.parametrize("name", WAYS)
def test_renaming_may_be_killed_at_every_change_and_run_again(tmp_path: Path, name: str) -> None:
    make(tmp_path / "made", killed=True)
    expected = EVERY
    if name == "one of zeros":
        with open_store(tmp_path / "made", "r") as store:
            found = [m for ref in store.queues("orders") for m in store.iter(*ref)]
        expected = sorted(m.body for m in found if m.physical_offset // SEGMENT != 2)
    WAYS[name](tmp_path / "made")
    renamed = recover(tmp_path / "made", dry_run=True).renamed
    renames = 0
    for nth, fs in deaths(1, torn=False):
        path = tmp_path / f"{nth}"
        shutil.copytree(tmp_path / "made", path)
        with pytest.raises(Crash):
            recover(path, fs=fs)
        with suppress(CorruptStoreError):
            open_store(path).close()
        recover(path)
        assert held(path) == expected, f"killed before change {nth}"
        shutil.rmtree(path)
        renames = sum(each.operation == "replace" and "commitlog" in each.path for each in fs.changes())
        if renames == 2 * len(renamed):  # what follows is any recovery
            break
    assert renames >= 4


def test_verify_and_the_plan_read_small_segments_by_their_records(tmp_path: Path) -> None:
    make(tmp_path, killed=False)
    swap(tmp_path, 1, 2)
    assert {finding.kind for finding in jobs.verify(tmp_path).findings} == {"segment_name"}
    [planned] = jobs.recover(tmp_path, dry_run=True)
    assert planned.report is not None
    assert planned.report.changed
