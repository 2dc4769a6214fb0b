"""Export to Parquet: every message once, whatever a run is stopped by; what is in the files is what the store has."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from mqstore.engine import MessageStore, ReadOnlyMessageStore
from mqstore.errors import ConfigError, CorruptStoreError, OffsetOutOfRangeError
from mqstore.jobs import export as module
from mqstore.jobs import export_parquet
from mqstore.jobs.export import read_manifest
from mqstore.jobs.runner import Runner
from mqstore.jobs.selection import select
from tests.columnar.support import SEGMENT, Odd, as_exported, as_row, exported, many, write_store
from tests.conftest import Golden
from tests.log.support import all_queues, flip

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
    with ReadOnlyMessageStore(path) as store:
        refs = all_queues(store)
        return sorted((m.topic, m.queue_id, m.offset) for ref in refs for m in store.iter(*ref))


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
        assert row.pop("export") == 1
        row["properties"] = dict(row["properties"])
        row["topic"] = str(row["topic"])
    assert days == [str(row["store_timestamp"].date()) for row in expected]
    assert [as_exported(row) for row in found] == expected
    assert done.messages == len(expected)
    assert done.record_bytes == sum(row["size"] for row in expected)
    assert done.files == len(visible(tmp_path / "out"))
    assert done.file_bytes == sum(each.stat().st_size for each in visible(tmp_path / "out"))


def test_a_file_for_each_topic_day_and_task(tmp_path: Path) -> None:
    records = [Odd(topic=("a", "b")[i % 2], queue_id=i // 2 % 2, store_ms=T0 + DAY_MS * (i // 12)) for i in range(36)]
    path = write_store(tmp_path / "s", records)

    done = export_parquet(select(path, topics="a,b", options={"minPartitions": "2"}), tmp_path / "out")

    folders = [each.parent.relative_to(tmp_path / "out").as_posix() for each in visible(tmp_path / "out")]
    days = [str(date.fromordinal(date(2023, 11, 14).toordinal() + i)) for i in range(3)]
    assert sorted(set(folders)) == [f"export=00000001/topic={t}/date={d}" for t in "ab" for d in days]
    assert done.files == len(folders) <= 2 * 6
    assert done.messages == 36


def test_messages_with_a_time_that_no_date_has_lie_in_a_folder_of_their_own(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [Odd(topic="t", store_ms=T0), Odd(topic="t", store_ms=1 << 60)])

    export_parquet(path, tmp_path / "out", topics="t")

    assert [row["date"] for row in rows(tmp_path / "out")] == ["2023-11-14", None]


def test_columns_and_partitions_can_be_chosen(store: Path, tmp_path: Path) -> None:
    export_parquet(
        {"one": store}, tmp_path / "out", columns=["body", "keys", "topic"], partition_by=["store", "topic", "queue_id"]
    )

    first = visible(tmp_path / "out")[0]
    assert (
        first.relative_to(tmp_path / "out").as_posix().startswith("export=00000001/store=one/topic=orders/queue_id=0/")
    )
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
    assert sum(each["rows"] for each in read_manifest(tmp_path / "out")["files"]) == 40


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
    with ReadOnlyMessageStore(store) as opened:
        place = opened.get("t", 0, 4, 1).messages[0].physical_offset
    flip(log, place + 100)

    with pytest.raises(CorruptStoreError):
        export_parquet(store, tmp_path / "out")
    assert visible(tmp_path / "out") == []

    done = export_parquet(select(store, options={"onCorrupt": "skip"}), tmp_path / "out")
    assert (done.damaged, done.messages) == (1, 80)
    assert ("t", 0, 4) not in offsets(tmp_path / "out")


# -- run again ---------------------------------------------------------------------------------------------------------


def test_a_second_run_writes_what_came_since(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with MessageStore(path) as store:
        store.put_many("t", [b"%d" % i for i in range(10)], queue_id=0)
    first = export_parquet(path, tmp_path / "out")
    nothing = export_parquet(path, tmp_path / "out")
    with MessageStore(path) as store:
        store.put_many("t", [b"%d" % i for i in range(5)], queue_id=0)
        store.put_many("u", [b"x"] * 3, queue_id=2)
    third = export_parquet(path, tmp_path / "out")

    assert (first.messages, first.folder) == (10, "export=00000001")
    assert (nothing.messages, nothing.folder) == (0, None)
    assert (third.messages, third.folder) == (8, "export=00000002")
    assert third.high_water == {str(path): {"t": {"0": 15}, "u": {"2": 3}}}
    assert offsets(tmp_path / "out") == model(path)


def test_a_later_run_over_a_store_that_lost_its_queues_does_not_find_nothing_new(store: Path, tmp_path: Path) -> None:
    export_parquet(store, tmp_path / "lake")
    shutil.rmtree(store / "consumequeue")
    chosen = select(store, options={"failOnDataLoss": "false"})
    with pytest.raises(ConfigError, match=r"consume queues of .* are lost"):
        export_parquet(chosen, tmp_path / "lake")


def test_what_a_start_bound_leaves_out_is_left_out_in_every_queue_for_good(tmp_path: Path) -> None:
    def put(topic: str, count: int, at_ms: int) -> list[Odd]:
        return [Odd(topic=topic, queue_id=0, body=b"x", store_ms=at_ms + i) for i in range(count)]

    old, new = 1_700_000_000_000, 1_700_000_100_000
    # `busy` has messages on both sides of the bound, `quiet` only old ones, `young` only new ones.
    path = write_store(tmp_path / "s", [*put("busy", 6, old), *put("quiet", 4, old), *put("busy", 3, new)])
    start = datetime.fromtimestamp(new / 1000, UTC)
    first = export_parquet(select(path, topics="busy,quiet", start=start), tmp_path / "out")
    with MessageStore(path) as store:
        store.put_many("quiet", [b"later"] * 2, queue_id=0)
        store.put_many("busy", [b"later"], queue_id=0)
    second = export_parquet(select(path, topics="busy,quiet"), tmp_path / "out")
    third = export_parquet(select(path, topics="busy,quiet"), tmp_path / "out")

    assert first.high_water[str(path)] == {"busy": {"0": 9}, "quiet": {"0": 4}}
    assert first.messages == 3
    assert second.messages == 3
    assert third.folder is None
    assert offsets(tmp_path / "out") == [
        *(("busy", 0, at) for at in range(6, 10)),
        *(("quiet", 0, at) for at in (4, 5)),
    ]


def test_a_store_that_was_moved_goes_on_under_its_old_name_or_by_a_link(store: Path, tmp_path: Path) -> None:
    dest, moved = tmp_path / "out", tmp_path / "moved"
    export_parquet(store, dest)
    store.rename(moved)

    assert export_parquet({str(store): moved}, dest).folder is None
    store.symlink_to(moved)
    assert export_parquet(store, dest).folder is None


def test_stores_and_topics_may_join_and_leave(store: Path, tmp_path: Path) -> None:
    other = write_store(tmp_path / "other", many(8))
    dest = tmp_path / "out"
    export_parquet(store, dest, topics="t")
    second = export_parquet([store, other], dest)
    third = export_parquet(other, dest, topics="orders")

    assert second.messages == 41 + 9
    assert third.folder is None
    assert set(third.high_water) == {str(store), str(other)}


def test_another_shape_is_refused(store: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    export_parquet(store, dest, topics="t")

    for arguments, text in (
        ({"columns": ["body"]}, "was exported with columns="),
        ({"partition_by": ["topic"]}, "was exported with partition_by="),
        ({"stores": select(store, where="n > 3")}, "was exported with filter=None, not 'n > 3'"),
        ({"stores": select(store, options={"tags": "a"})}, "was exported with tags="),
    ):
        with pytest.raises(ConfigError, match=text):
            export_parquet(**{"stores": store, "dest": dest, **arguments})
    assert len(rows(dest)) == 40


def test_messages_that_retention_took_before_they_were_exported_are_told(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(400))
    dest = tmp_path / "out"
    export_parquet(select(path, topics="t", stop=str(T0 + 8)), dest)
    with MessageStore(path) as store:
        assert store.drop_before(2 * SEGMENT)
        low, high = store.offsets("t", 0)
    assert low > 2

    with pytest.raises(OffsetOutOfRangeError, match=r"messages are lost.* \(failOnDataLoss=false"):
        export_parquet(path, dest, topics="t")
    export_parquet(select(path, topics="t", options={"failOnDataLoss": "false"}), dest)
    assert [offset for _, queue, offset in offsets(dest) if queue == 0] == [0, 1, *range(low, high)]


def test_a_queue_that_lost_its_tail_is_refused(tmp_path: Path) -> None:
    """A store was restored from a backup. Nothing was exported until the queue had grown beyond its old end: 80
    messages that no run said a word of."""

    def put(*bodies: int) -> None:
        with MessageStore(path) as store:
            store.put_many("t", [b"%d" % body for body in bodies], queue_id=0)

    path, dest = tmp_path / "s", tmp_path / "out"
    put(*range(10))
    shutil.copytree(path, tmp_path / "backup")
    put(*range(10, 100))
    export_parquet(path, dest)
    shutil.rmtree(path)
    (tmp_path / "backup").rename(path)
    before = visible(dest)
    with pytest.raises(OffsetOutOfRangeError, match="t, queue 0 ends at 10, and was read up to 100 before"):
        export_parquet(path, dest)
    put(200, 201)

    lax = {"failOnDataLoss": "false"}
    with pytest.raises(OffsetOutOfRangeError, match="t, queue 0 ends at 12, and was read up to 100 before"):
        export_parquet(select(path, options=lax), dest)

    assert visible(dest) == before
    assert export_parquet(select({"restored": path}, options=lax), dest).messages == 12


def test_ends_of_queues_that_are_not_there_are_kept(store: Path, tmp_path: Path) -> None:
    """Their store may be on a disk that comes back."""
    dest = tmp_path / "out"
    export_parquet(store, dest)
    other = write_store(tmp_path / "other", many(8))
    store.rename(tmp_path / "away")
    lax = select([store, other], options={"failOnDataLoss": "false"})

    assert export_parquet(lax, dest).messages == 9
    (tmp_path / "away").rename(store)
    assert export_parquet(lax, dest).folder is None


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"partition_by": ["tags"]}, "partition_by"),
        ({"partition_by": ["topic", "topic"]}, "partition_by"),
        ({"columns": ["topic"]}, "no column is left"),
        ({"columns": ["nonsense"]}, "no column 'nonsense'"),
    ],
)
def test_wrong_arguments_write_nothing(store: Path, tmp_path: Path, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        export_parquet(store, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_fit_are_refused(store: Path, tmp_path: Path) -> None:
    for name, value in (
        ("startingOffsets", "latest"),
        ("startingGroup", "g"),
        ("readBy", "log"),
        ("onCorrupt", "keep"),
    ):
        with pytest.raises(ConfigError, match=name):
            export_parquet(select(store, options={name: value}), tmp_path / "out")


def test_what_is_no_file_system_is_refused(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'s3://lake/mq' is no path.*only local paths"):
        export_parquet(store, "s3://lake/mq")
    with pytest.raises(ConfigError, match=r"'hdfs://a/s' is no path.*only local paths"):
        export_parquet("hdfs://a/s", tmp_path / "out")
    assert export_parquet(store, f"file://{tmp_path}/out").path == str(tmp_path / "out")


def test_an_export_into_a_store_is_refused(store: Path) -> None:
    for dest in (store, store / "out"):
        with pytest.raises(ConfigError, match="lies in the store"):
            export_parquet(store, dest)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"version": 2}', '{"version": 1, "number": 1}', "[" * 200_000], ids=range(6)
)
def test_a_folder_that_is_no_export_is_left_alone(store: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "out" / "export=00000001").mkdir(parents=True)
    (tmp_path / "out" / "export=00000001" / "_manifest.json").write_text(text)

    with pytest.raises(ConfigError):
        export_parquet(store, tmp_path / "out")


@pytest.mark.parametrize(
    "member",
    [
        {"ends": {"s": 5}},
        {"ends": {"s": {"t": [0]}}},
        {"ends": {"s": {"t": {"0": "x"}}}},
        {"ends": {"s": {"t": {"0": -1}}}},
        {"ends": {"s": {"t": {"00": 1}}}},
        {"ends": {"s": {"t": {"a": 1}}}},
        {"number": "1"},
        {"number": -1},
        {"shape": []},
    ],
    ids=str,
)
def test_a_damaged_manifest_is_told_with_its_file_and_the_way_out(
    store: Path, tmp_path: Path, member: dict[str, Any]
) -> None:
    """Only the outermost objects were looked at: what was wrong in them ended in `please report it`."""
    export_parquet({"s": store}, tmp_path / "out", topics="t")
    path = tmp_path / "out" / "export=00000001" / "_manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **member}))

    with pytest.raises(
        ConfigError, match=r"_manifest\.json is not the manifest of an export, or it is damaged.*bring it"
    ):
        export_parquet({"s": store}, tmp_path / "out")


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


def test_a_crash_at_any_step_leaves_the_old_export_or_the_new_one(
    tmp_path: Path, crashing: Callable[[int], list[str]]
) -> None:
    path = tmp_path / "s"
    with MessageStore(path) as store:
        store.put_many("t", [b"%d" % i for i in range(10)], queue_id=0)
    export_parquet(path, tmp_path / "first")
    old = offsets(tmp_path / "first")
    with MessageStore(path) as store:
        store.put_many("t", [b"%d" % i for i in range(4)], queue_id=0)
        store.put_many("u", [b"x"] * 3, queue_id=2)
    outcomes = set()
    step = 0
    while True:
        dest = tmp_path / f"out{step}"
        shutil.copytree(tmp_path / "first", dest)
        seen = crashing(step)
        try:
            export_parquet(path, dest)
        except Crash:
            crashed = True
        else:
            crashed = False
        crashing(-1)
        found = offsets(dest)
        assert found in (old, model(path)), (step, seen[-1])
        outcomes.add((crashed, found == old))
        again = export_parquet(path, dest)
        assert offsets(dest) == model(path), (step, seen[-1])
        assert (again.folder is None) == (found != old)
        if not crashed:
            break
        step += 1
    assert step >= 10
    assert outcomes == {(True, True), (True, False), (False, False)}


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

    with pytest.raises(ConfigError, match="another export has ended meanwhile"):
        export_parquet(store, tmp_path / "out")
    assert offsets(tmp_path / "out") == model(store)
    assert [*(tmp_path / "out" / "_staging").iterdir()] == []


def twice(work: Callable[[Any], Any], task: Any) -> Any:
    work(task)
    return work(task)


def test_what_a_failed_attempt_of_a_task_left_is_not_published(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark runs a task again that failed; only what the last attempt tells of counts."""
    run = Runner.run

    def run_twice(runner: Runner, tasks: Any, work: Any, title: str) -> Any:
        return run(runner, tasks, partial(twice, work), title)

    monkeypatch.setattr(Runner, "run", run_twice)

    export_parquet(store, tmp_path / "out")

    assert offsets(tmp_path / "out") == model(store)


def test_staging_of_a_week_ago_is_removed_and_newer_is_not(store: Path, tmp_path: Path) -> None:
    staging = tmp_path / "out" / "_staging"
    for name, age_s in (("old", 8 * 86_400), ("new", 3600)):
        (staging / name).mkdir(parents=True)
        when = datetime.now(UTC).timestamp() - age_s
        os.utime(staging / name, (when, when))

    export_parquet(store, tmp_path / "out")

    assert [each.name for each in staging.iterdir()] == ["new"]


def test_a_manifest_says_what_a_run_has_done(store: Path, tmp_path: Path) -> None:
    done = export_parquet(store, tmp_path / "out", topics="t")
    manifest = json.loads((tmp_path / "out" / "export=00000001" / "_manifest.json").read_text())

    assert manifest == read_manifest(tmp_path / "out")
    assert (manifest["messages"], manifest["number"]) == (40, 1)
    assert sum(file["rows"] for file in manifest["files"]) == 40
    folder = tmp_path / "out" / "export=00000001"
    assert sorted(file["path"] for file in manifest["files"]) == [
        each.relative_to(folder).as_posix() for each in visible(tmp_path / "out")
    ]
    assert all((folder / file["path"]).stat().st_size == file["bytes"] for file in manifest["files"])
    assert json.loads(json.dumps(done.to_dict()))["high_water"] == {str(store): {"t": {"0": 20, "1": 20}}}
