"""The jobs that copy messages, run by Spark: the same as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mqstore import MessageStore
from mqstore.errors import InvalidMessageError
from mqstore.jobs.resend import dlq_resend
from mqstore.layout.properties import encode_properties
from mqstore.spark.jobs.compact import compact
from mqstore.spark.jobs.dedup import dedup
from mqstore.spark.jobs.importing import import_rows
from mqstore.spark.jobs.mirror import mirror
from mqstore.spark.jobs.replay import replay
from mqstore.spark.selection import Selection, select
from tests.spark.copies import joined, members, messages
from tests.spark.support import Odd, many, write_store

pytestmark = pytest.mark.spark


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "s", many(80))


def cut(store: Path) -> Selection:
    """In several tasks."""
    return select(store, options={"minPartitions": "4"})


def test_a_replay_keeps_order_across_tasks(spark: Any, store: Path, tmp_path: Path) -> None:
    done = replay(spark, cut(store), tmp_path / "t")

    assert messages(tmp_path / "t") == messages(store)
    assert done.messages == 81
    assert replay(spark, cut(store), tmp_path / "t").already


def test_a_replay_of_several_targets_into_sets(spark: Any, store: Path, tmp_path: Path) -> None:
    replay(spark, cut(store), [tmp_path / "a", tmp_path / "b"], route="queue", target="set", rate=1e6)

    found = joined([*members(tmp_path / "a"), *members(tmp_path / "b")])
    assert {key: sorted(copies) for key, copies in found.items()} == {
        key: sorted(copies) for key, copies in messages(store).items()
    }


def test_an_error_of_a_task_is_the_one_that_it_raised(spark: Any, tmp_path: Path) -> None:
    full = encode_properties({"x": "y" * 32_700})
    source = write_store(tmp_path / "s", [Odd(), Odd(properties=full)], segment_bytes=1 << 17)

    with pytest.raises(InvalidMessageError, match="offset 1 cannot be copied"):
        replay(spark, source, tmp_path / "t", topics="t", tag=True, id="x" * 90)

    assert not (tmp_path / "t").exists()


def test_a_mirror_copies_batch_by_batch(spark: Any, store: Path, tmp_path: Path) -> None:
    mirror(spark, cut(store), tmp_path / "t", tmp_path / "cp", max_messages=50)
    with MessageStore(store) as writer:
        writer.put("t", b"more")

    assert mirror(spark, cut(store), tmp_path / "t", tmp_path / "cp").messages == 1
    assert messages(tmp_path / "t") == messages(store)


def test_compaction_and_dedup_are_those_without_spark(spark: Any, store: Path, tmp_path: Path) -> None:
    with_spark = compact(spark, cut(store), str(tmp_path / "1"), key="tags")
    dedup(spark, cut(store), str(tmp_path / "2"), by="tags", window=None)
    without = compact(None, cut(store), str(tmp_path / "3"), key="tags")
    dedup(None, cut(store), str(tmp_path / "4"), by="tags", window=None)

    assert messages(tmp_path / "1") == messages(tmp_path / "3")
    assert messages(tmp_path / "2") == messages(tmp_path / "4")
    assert with_spark.topics == without.topics


def test_dead_letters_are_sent_again_once(spark: Any, tmp_path: Path) -> None:
    marks = encode_properties({"DLQ_ORIGIN_TOPIC": "t"})
    paths = {
        name: write_store(tmp_path / name, [Odd(topic="%DLQ%g", body=b"1", properties=marks), Odd(body=b"2")])
        for name in ("x", "y")
    }

    assert dlq_resend(paths, spark=spark).count == 2
    assert dlq_resend(paths, spark=spark).count == 0

    for path in paths.values():
        assert sorted(copy.body for key, found in messages(path).items() if key[0] == "t" for copy in found) == [
            b"1",
            b"2",
        ]


# -- import ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    for number in range(2):
        table = pa.table(
            {
                "id": list(range(10 * number, 10 * number + 10)),
                "text": [f"text {i}" for i in range(10)],
                "kind": ["a|b" if i == 3 else "fine" for i in range(10)],
            }
        )
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(table, tmp_path / "in" / f"{number}.parquet")
    return tmp_path / "in"


def bodies(path: Path) -> list[bytes]:
    with MessageStore(path, "r") as store:
        found = [m for topic in store.topics() for ref in store.queues(topic) for m in store.iter(*ref)]
        return [bytes(m.body) for m in sorted(found, key=lambda m: m.physical_offset)]


def test_files_are_imported_as_without_spark(spark: Any, rows: Path, tmp_path: Path) -> None:
    how: Any = {"mapping": {"body": "text", "keys": "id", "tags": "kind"}, "topic": "t"}

    done = import_rows(spark, rows, tmp_path / "1", refused=tmp_path / "no1", **how)
    import_rows(None, rows, tmp_path / "2", refused=tmp_path / "no2", **how)

    assert bodies(tmp_path / "1") == bodies(tmp_path / "2")
    assert (done.messages, done.refused) == (18, 2)
    assert sorted(each["_row"] for each in pq.read_table(tmp_path / "no1").to_pylist()) == [3, 3]


def test_expressions_make_messages_and_rows_are_sorted(spark: Any, rows: Path, tmp_path: Path) -> None:
    mapping = {"body": "to_json(struct(id, text))", "topic": "concat('t-', id % 2)", "keys": "cast(id as string)"}

    done = import_rows(spark, rows, tmp_path / "t", mapping=mapping, order="id desc", queues=1)

    assert done.topics == {"t-0": 10, "t-1": 10}
    assert bodies(tmp_path / "t") == [b'{"id":%d,"text":"text %d"}' % (i, i % 10) for i in reversed(range(20))]
    assert not (tmp_path / "t" / "_staging").exists()
    assert import_rows(spark, rows, tmp_path / "t", mapping=mapping, order="id desc", queues=1).already


@pytest.mark.parametrize("kind", ["parquet", "json", "csv"])
def test_names_of_folders_that_look_like_numbers_stay_as_they_are(spark: Any, tmp_path: Path, kind: str) -> None:
    """Spark takes 007 for 7, and 1e5 for 100000.0."""
    names = ["007", "1e5", "42"]
    for name in names:
        folder = tmp_path / "in" / f"topic={name}" / "n=5"
        folder.mkdir(parents=True)
        if kind == "parquet":
            pq.write_table(pa.table({"text": [name]}), folder / "f.parquet")
        else:
            (folder / f"f.{kind}").write_text(f'{{"text": "{name}"}}\n' if kind == "json" else f"text\n{name}\n")
    mapping = {"body": "concat(text, '.', n + 1)", "topic": "topic"}

    import_rows(spark, tmp_path / "in", tmp_path / "t", format=kind, mapping=mapping, order="topic")

    found = {topic: copy.body for (topic, _), copies in messages(tmp_path / "t").items() for copy in copies}
    assert found == {name: f"{name}.6".encode() for name in names}
