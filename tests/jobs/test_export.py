"""Export to Parquet: the files have every message of the store once, and a run that is stopped leaves no folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

import mqstore
import mqstore as library
from mqstore.errors import ConfigError, CorruptStoreError, OffsetOutOfRangeError
from mqstore.jobs import export as module
from mqstore.jobs import export_parquet, select
from mqstore.jobs.runner import Runner
from tests.columnar.support import SEGMENT, Odd, as_exported, as_row, exported, many, write_store
from tests.conftest import Golden
from tests.log.support import flip, open_store

DAY_MS = 86_400_000
T0 = 1_700_000_000_000


def visible(dest: Path) -> list[Path]:
    """The files that any reader of folders of Parquet would read: names with an underscore are passed over."""
    found = []
    for folder, folders, files in os.walk(dest):
        folders[:] = [name for name in folders if not name.startswith(("_", "."))]
        found += [Path(folder, name) for name in files if not name.startswith(("_", "."))]
    return sorted(found)


def rows(dest: Path) -> list[dict[str, Any]]:
    """All rows, with the columns that became folders; sorted by where they lie."""
    files = [str(path) for path in visible(dest)]
    if not files:
        return []
    dataset = ds.dataset(files, partitioning=ds.partitioning(flavor="hive"), partition_base_dir=str(dest))
    found = dataset.to_table().to_pylist()
    return sorted(found, key=lambda row: (str(row.get("store")), row["physical_offset"]))


def offsets(dest: Path) -> list[tuple[str, int, int]]:
    return sorted((row["topic"], row["queue_id"], row["queue_offset"]) for row in rows(dest))


def model(path: Path) -> list[tuple[str, int, int]]:
    """What a loop over messages gives."""
    with library.open(path, "r") as store:
        topics = store.topics(system=True)
        return sorted((m.topic, m.queue_id, m.offset) for topic in topics for m in store.iter(topic))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "s", many(80))


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["clean"])
def test_files_have_the_messages_of_a_java_store(golden: Golden, tmp_path: Path, name: str) -> None:
    path = golden(name).path
    chosen = select(path, options={"includeSystemTopics": "true", "minPartitions": "3"})

    done = export_parquet(chosen, tmp_path / "out")

    found = rows(tmp_path / "out")
    expected = sorted((as_row(line) for line in exported(path)), key=lambda row: row["physical_offset"])
    days = [row.pop("date") for row in found]
    for row in found:
        row["properties"] = dict(row["properties"])
        row["topic"] = str(row["topic"])
    assert days == [str(row["store_timestamp"].date()) for row in expected]
    assert ([as_exported(row) for row in found], done.messages) == (expected, len(expected))
    assert done.record_bytes == sum(row["size"] for row in expected)
    assert done.files == len(visible(tmp_path / "out"))
    assert done.file_bytes == sum(each.stat().st_size for each in visible(tmp_path / "out"))


def test_a_file_for_each_topic_day_and_task(tmp_path: Path) -> None:
    records = [Odd(topic=("a", "b")[i % 2], queue_id=i // 2 % 2, store_ms=T0 + DAY_MS * (i // 12)) for i in range(36)]
    path = write_store(tmp_path / "s", records)

    done = export_parquet(select(path, topics="a,b", options={"minPartitions": "2"}), tmp_path / "out")

    folders = [each.parent.relative_to(tmp_path / "out").as_posix() for each in visible(tmp_path / "out")]
    days = [str(date.fromordinal(date(2023, 11, 14).toordinal() + i)) for i in range(3)]
    assert sorted(set(folders)) == [f"topic={t}/date={d}" for t in "ab" for d in days]
    assert done.files == len(folders) <= 2 * 6
    assert done.messages == 36


def test_messages_without_a_date_have_their_folder(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [Odd(topic="t", store_ms=T0), Odd(topic="t", store_ms=1 << 60)])

    export_parquet(path, tmp_path / "out", topics="t")

    assert [row["date"] for row in rows(tmp_path / "out")] == ["2023-11-14", None]


def test_columns_and_partitions_can_be_chosen(store: Path, tmp_path: Path) -> None:
    export_parquet(
        {"one": store}, tmp_path / "out", columns=["body", "keys", "topic"], partition_by=["store", "topic", "queue_id"]
    )

    first = visible(tmp_path / "out")[0]
    assert first.relative_to(tmp_path / "out").as_posix().startswith("store=one/topic=orders/queue_id=0/")
    file = pq.ParquetFile(first)
    assert file.schema_arrow.names == ["body", "keys"]


def test_columns_that_repeat_are_written_once(store: Path, tmp_path: Path) -> None:
    export_parquet(store, tmp_path / "out", topics="t", partition_by=())

    group = pq.ParquetFile(visible(tmp_path / "out")[0]).metadata.row_group(0)
    coded = {
        group.column(i).path_in_schema
        for i in range(group.num_columns)
        if "RLE_DICTIONARY" in group.column(i).encodings
    }
    assert coded >= {"topic", "tags", "born_host", "properties.key_value.key", "properties.key_value.value"}
    assert not coded & {"body", "queue_offset", "message_id"}


def test_names_that_a_path_cannot_hold_come_back_as_they_were(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [Odd(topic="%RETRY%g"), Odd(topic="t")])
    chosen = select({"a/b": path}, options={"includeSystemTopics": "true"})

    export_parquet(chosen, tmp_path / "out", partition_by=["store", "topic"])

    assert {(row["store"], row["topic"]) for row in rows(tmp_path / "out")} == {
        ("a/b", "%RETRY%g"),
        ("a/b", "t"),
        ("a/b", "seed"),
    }


@pytest.mark.parametrize(("limit", "files", "groups"), [("_ROUND_BYTES", 6, 1), ("_GROUP_ROWS", 1, 5)])
def test_large_tasks_are_written_in_parts(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, files: int, groups: int
) -> None:
    """Batches of 8, 8 and 4 messages come from each of two queues."""
    monkeypatch.setattr(module, limit, 8)

    export_parquet(select(store, topics="t", options={"maxRowsPerBatch": "8"}), tmp_path / "out")

    found = visible(tmp_path / "out")
    assert sorted(pq.ParquetFile(path).metadata.num_row_groups for path in found) == [groups] * files
    assert len(rows(tmp_path / "out")) == 40


def test_filters_and_bounds_narrow_what_is_written(store: Path, tmp_path: Path) -> None:
    chosen = select(store, topics="t", start=str(T0 + 12), where="n < 40", options={"tags": "a"})

    export_parquet(chosen, tmp_path / "out")

    found = rows(tmp_path / "out")
    assert {(row["tags"], int(dict(row["properties"])["n"]) < 40) for row in found} == {("a", True)}
    assert all(row["queue_offset"] >= 3 for row in found)
    expected = [i for i in range(80) if i % 2 == 0 and i % 3 == 0 and i < 40 and i // 4 >= 3]
    assert sorted(int(dict(row["properties"])["n"]) for row in found) == expected


def test_damage_stops_an_export_or_is_counted(store: Path, tmp_path: Path) -> None:
    log = store / "commitlog" / f"{0:020d}"
    with library.open(store, "r") as opened:
        place = opened.read("t", 0, 4)[0].physical_offset
    flip(log, place + 100)

    with pytest.raises(CorruptStoreError):
        export_parquet(store, tmp_path / "out")
    assert visible(tmp_path / "out") == []

    done = export_parquet(select(store, options={"onCorrupt": "skip"}), tmp_path / "out")
    assert (done.damaged, done.messages) == (1, 80)
    assert ("t", 0, 4) not in offsets(tmp_path / "out")


def test_an_export_into_a_folder_that_is_not_empty_is_refused(store: Path, tmp_path: Path) -> None:
    """A second run into the same folder would mix its files with those of the first."""
    dest = tmp_path / "out"
    dest.mkdir()
    assert export_parquet(store, dest).messages == 81
    before = visible(dest)

    with pytest.raises(ConfigError, match=r"out exists and is not an empty folder"):
        export_parquet(store, dest)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file exists and is not an empty folder"):
        export_parquet(store, tmp_path / "file")

    assert visible(dest) == before


def test_an_export_without_messages_makes_no_folder(store: Path, tmp_path: Path) -> None:
    done = export_parquet(select(store, topics="t", start="2100-01-01"), tmp_path / "out")

    assert (done.messages, done.files) == (0, 0)
    assert not (tmp_path / "out").exists()


def test_export_starts_at_committed_or_given_offsets(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with mqstore.open(path) as store:
        store.log.put_many("t", [b"x"] * 10, queue_id=0)
        store.broker.commit("g", "t", 0, 4)

    for name, value, first in (("startingGroup", "g", 4), ("startingOffsets", '{"t": {"0": 7}}', 7)):
        export_parquet(select(path, topics="t", options={name: value}), tmp_path / name)
        assert offsets(tmp_path / name) == [("t", 0, at) for at in range(first, 10)]


def test_messages_that_retention_took_are_an_error_or_left_out(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(400))
    with open_store(path) as store:
        assert store.drop_before(2 * SEGMENT)
        low, high = store.offsets("t", 0)
    assert low > 2
    given = {"startingOffsets": '{"t": {"0": 0}}'}

    with pytest.raises(OffsetOutOfRangeError, match=r"messages are lost.* \(failOnDataLoss=false"):
        export_parquet(select(path, topics="t", options=given), tmp_path / "out")
    export_parquet(select(path, topics="t", options={**given, "failOnDataLoss": "false"}), tmp_path / "out")
    assert [offset for _, queue, offset in offsets(tmp_path / "out") if queue == 0] == [*range(low, high)]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"partition_by": ["tags"]}, "partition_by"),
        ({"partition_by": ["topic", "topic"]}, "partition_by"),
        ({"columns": ["topic"]}, "the files would have no column"),
        ({"columns": ["nonsense"]}, "no column 'nonsense'"),
        ({"options": {"readBy": "log"}}, "readBy"),
        ({"options": {"onCorrupt": "keep"}}, "onCorrupt"),
        ({"dest": "."}, "is in the store"),
        ({"dest": "out"}, "is in the store"),
    ],
)
def test_wrong_arguments_write_nothing(store: Path, tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    given = dict(arguments)
    dest = store / given.pop("dest") if "dest" in given else tmp_path / "out"
    with pytest.raises(ConfigError, match=text):
        export_parquet(select(store, options=given.pop("options", {})), dest, **given)
    assert not (tmp_path / "out").exists()
    assert not (store / "out").exists()


def test_unknown_file_system_is_refused(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'s3://lake/mq'.*only paths of mounted file systems"):
        export_parquet(store, "s3://lake/mq")
    with pytest.raises(ConfigError, match=r"'hdfs://a/s'.*only paths of mounted file systems"):
        export_parquet("hdfs://a/s", tmp_path / "out")
    assert export_parquet(store, f"file://{tmp_path}/out").path == str(tmp_path / "out")


# -- stopped -----------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The end of the process: nobody tidies up."""


@pytest.fixture
def crashing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[str]]]:
    """`crashing(n)`: the n-th change of a folder from then on does not happen, and nothing after it."""
    state = {"left": -1}
    seen: list[str] = []

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if state["left"] == 0:
                raise Crash
            state["left"] -= 1
            return real(*args, **kwargs)

        monkeypatch.setattr(module.os, name, call)

    for name in ("mkdir", "rename", "fsync"):
        wrap(name)
    remove = shutil.rmtree
    monkeypatch.setattr(module.shutil, "rmtree", lambda *a, **k: None if state["left"] == 0 else remove(*a, **k))

    def arm(left: int) -> list[str]:
        state["left"] = left
        seen.clear()
        return seen

    yield arm
    state["left"] = -1


def test_a_crash_at_any_step_leaves_no_folder_or_a_whole_one(
    tmp_path: Path, crashing: Callable[[int], list[str]]
) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        store.put_many("t", [b"%d" % i for i in range(10)], queue_id=0)
        store.put_many("u", [b"x"] * 3, queue_id=2)
    outcomes = set()
    step = 0
    crashed = True
    while crashed:
        dest = tmp_path / f"out{step}"
        seen = crashing(step)
        try:
            export_parquet(path, dest)
        except Crash:
            pass
        else:
            crashed = False
        crashing(-1)
        whole = dest.exists()
        assert offsets(dest) == (model(path) if whole else []), (step, seen[-1])
        outcomes.add((crashed, whole))
        if not whole:
            export_parquet(path, dest)
            assert offsets(dest) == model(path), (step, seen[-1])
        step += 1
    assert step >= 10
    assert outcomes == {(True, False), (True, True), (False, True)}


def test_of_two_that_race_one_wins_and_the_other_keeps_nothing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def slow(source: str, target: str) -> None:
        if os.path.basename(source) == "ready":
            monkeypatch.setattr(os, "rename", rename)
            export_parquet(store, tmp_path / "out")
        rename(source, target)

    monkeypatch.setattr(os, "rename", slow)

    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        export_parquet(store, tmp_path / "out")
    assert offsets(tmp_path / "out") == model(store)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "s"]


def twice(work: Callable[[Any], Any], task: Any) -> Any:
    work(task)
    return work(task)


def test_leftovers_of_a_failed_task_are_not_published(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark runs a task again that failed; only what the last attempt tells of counts."""
    run = Runner.run

    def run_twice(runner: Runner, tasks: Any, work: Any, title: str) -> Any:
        return run(runner, tasks, partial(twice, work), title)

    monkeypatch.setattr(Runner, "run", run_twice)

    export_parquet(store, tmp_path / "out")

    assert offsets(tmp_path / "out") == model(store)
