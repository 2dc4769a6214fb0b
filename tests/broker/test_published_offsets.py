"""Progress that others publish, seen and taken over by the offset table: once, at its saves, and never against it."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.admin.contents import inspect_store
from mqstore.broker.admin.inspect import PopView, group_names, lag_of
from mqstore.broker.admin.operations import of_directory as operations
from mqstore.broker.background.context import open_tables
from mqstore.broker.tables.external_offsets import publish
from mqstore.broker.tables.names import START_GROUP, QueueKey
from mqstore.broker.tables.offsets import OffsetTable
from mqstore.files.readonly_fs import QUIET
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from tests.broker.support import TableBench


class Owner(TableBench[OffsetTable]):
    """A store with ten messages in each of two queues of `t`, and its offsets."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "consumerOffset.json", OffsetTable)
        for queue_id in (0, 1):
            self.fill("t", queue_id, 10)
        self.store.dispatch()
        self.table = self.again()

    def publish(self, offset: int, *, group: str = "sp", topic: str = "t", queue_id: int = 0) -> None:
        publish(self.path, group, {(topic, queue_id): offset})

    def tick(self) -> None:
        self.table.run_once(0)
        self.table.run_once(5_000)

    def on_disk(self) -> Any:
        return self.stored()["offsetTable"]

    def waiting(self) -> list[str]:
        return sorted(path.name for path in (self.path / "config/spark/groups").iterdir())


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    owner = Owner(tmp_path / "s")
    yield owner
    owner.store.close()


@pytest.mark.parametrize("at", ["the next save", "open", "close"])
def test_progress_is_folded_in_when_offsets_are_saved(owner: Owner, at: str) -> None:
    owner.publish(4)
    assert owner.table.committed(QueueKey("sp", "t", 0)) is None
    if at == "open":
        owner.table = owner.again()
    else:
        (owner.table.persist if at == "close" else owner.tick)()
    assert owner.table.committed(QueueKey("sp", "t", 0)) == 4
    assert owner.on_disk() == {"t@sp": {"0": 4}}
    assert owner.waiting() == []
    assert owner.table.groups() == {"sp"}


def test_reset_holds_until_the_next_progress(owner: Owner) -> None:
    """A stream asks nobody where to start, so nobody takes the reset, which would drop all it tells from then on."""
    owner.publish(4)
    owner.tick()
    owner.table.reset(QueueKey("sp", "t", 0), 1)
    owner.table.reset(QueueKey("sp", "t", 1), 2)
    owner.tick()
    assert owner.table.committed(QueueKey("sp", "t", 0)) == 1
    for offset in (1, 6, 7):
        owner.publish(offset)
        owner.tick()
        assert owner.table.committed(QueueKey("sp", "t", 0)) == offset
        assert QueueKey("sp", "t", 0) not in owner.table.resets
    assert owner.on_disk() == {"t@sp": {"0": 7, "1": 2}}
    assert QueueKey("sp", "t", 1) in owner.table.resets  # of which nothing was published


def test_a_group_that_is_removed_does_not_come_back(owner: Owner) -> None:
    owner.table.commit(QueueKey("sp", "t", 0), 1)
    owner.publish(9)
    owner.table.remove_group("sp")
    owner.tick()
    assert owner.table.groups() == set()
    owner.publish(10)  # unless it goes on
    owner.tick()
    assert owner.table.committed(QueueKey("sp", "t", 0)) == 10


def test_a_removed_group_takes_nobody_elses_progress_along(owner: Owner) -> None:
    owner.publish(9, group="sp2")
    owner.table.commit(QueueKey("sp", "t", 0), 1)
    owner.table.remove_group("sp")
    owner.tick()
    assert owner.table.groups() == {"sp2"}


@pytest.mark.parametrize("group", ["a@b", "a\n"])
def test_file_of_an_invalid_group_is_ignored(owner: Owner, group: str) -> None:
    owner.publish(4)
    content = {"version": 1, "group": group, "offsets": {"t": {"0": 5}}}
    (owner.path / f"config/spark/groups/{group}.json").write_text(json.dumps(content))
    table = owner.again()
    assert table.groups() == {"sp"}
    assert owner.waiting() == [f"{group}.json.corrupt"]


def test_progress_beyond_the_end_is_lowered_and_reported(owner: Owner) -> None:
    """The tail was lost in a power cut after it had been read: what comes next bears its numbers."""
    owner.publish(15)
    owner.tick()
    assert owner.table.committed(QueueKey("sp", "t", 0)) == 10
    assert "published by sp: t, queue 0: offset 15 is above the end" in owner.table._file.problems[-1]


def test_progress_in_a_queue_that_is_not_there_makes_none(owner: Owner) -> None:
    publish(owner.path, "sp", {("gone", 0): 5, ("t", 7): 5, ("t", 1): 6, ("../x", 0): 1, ("t@x", 0): 1})
    owner.tick()
    assert owner.table.of_group("sp") == {("t", 1): 6}


def test_progress_of_the_engines_own_groups_is_not_taken(owner: Owner) -> None:
    """A queue's logical start is kept in that table: it would hide messages."""
    owner.publish(9, group=START_GROUP)
    owner.tick()
    assert owner.table.start_of("t", 0) == 0
    assert START_GROUP in owner.table._file.problems[-1]


def test_a_save_that_fails_keeps_what_was_taken_for_the_next(owner: Owner) -> None:
    owner.publish(9)
    owner.fs.fail("create", errno.ENOSPC, path_part="consumerOffset")
    with pytest.raises(OSError, match="consumerOffset"):
        owner.table.persist()
    assert owner.waiting() == ["sp.json.taken"]
    owner.table.persist()
    assert owner.on_disk() == {"t@sp": {"0": 9}}
    assert owner.waiting() == []


def test_reader_sees_progress_before_the_owner(owner: Owner) -> None:
    owner.publish(4)
    before = sorted((owner.path / "config").rglob("*"))
    with ReadOnlyMessageStore(owner.path, fs=QUIET) as store:
        tables = open_tables(store)
        assert group_names(tables) == ["sp"]
        lags = {lag.queue_id: (lag.committed, lag.messages) for lag in lag_of(tables, "sp", PopView())}
        assert lags == {0: (4, 6), 1: (None, 0)}
    assert inspect_store(owner.path)["consumer_offsets"] == {"sp": {"t": {"0": 4}}}
    assert sorted((owner.path / "config").rglob("*")) == before
    assert owner.waiting() == ["sp.json"]


def test_group_of_a_closed_store_can_be_deleted(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "s")
    owner.store.close()
    owner.publish(4)
    operations(owner.path).delete_group("sp")
    with ReadOnlyMessageStore(owner.path, fs=QUIET) as store:
        assert group_names(open_tables(store)) == []
