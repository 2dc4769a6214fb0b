"""The examples of the pages on source and stream, sink, jobs, and for people who know Kafka run as they are printed.
The tutorial is typed in by `test_tutorial.py`."""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import mqstore

pytestmark = pytest.mark.spark
DOCS = Path(__file__).parent.parent.parent / "docs"


def blocks(page: str, folder: Path) -> list[tuple[str, str]]:
    """(language, code) of the examples of a page, their files below `folder`: Spark stands elsewhere."""
    found = re.findall(r"^```(py|sql)\n(.*?)^```", (DOCS / page).read_text(), re.S | re.M)
    return [(kind, re.sub(r"""(["'])var/""", rf"\1{folder}/var/", code)) for kind, code in found]


def rows(path: Path) -> list[tuple[str, str | None, bytes]]:
    """(topic, key, body) of all messages, in the order of the log."""
    with mqstore.open(path, "r") as store:
        found = [m for topic in store.topics(system=True) for ref in store.queues(topic) for m in store.iter(*ref)]
        return [
            (m.topic, m.keys[0] if m.keys else None, m.body) for m in sorted(found, key=lambda m: m.physical_offset)
        ]


def test_the_examples_for_people_who_know_kafka_run(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with mqstore.open(tmp_path / "var/mq") as store:
        store.log.put_many("orders", [b"%d" % i for i in range(30)], queue_id=0)
        store.log.put_many("orders", [b"other"] * 2, queue_id=1)
        store.log.put_many("payments", [b"p"] * 3, queue_id=0)
    (_, batch), (_, write), (_, both) = blocks("spark-options.md", tmp_path)
    typed: dict[str, Any] = {"spark": spark}

    exec(compile(batch, "batch", "exec"), typed)
    assert typed["df"].count() == 7 + 2 + 3
    typed["df"] = spark.sql(
        "select encode('k', 'utf-8') as key, encode('v', 'utf-8') as value, array(named_struct('key', 'h', 'value', "
        "encode('x', 'utf-8'))) as headers union all select null, null, null"
    )
    exec(compile(write, "write", "exec"), typed)
    assert rows(tmp_path / "var/mq")[-1] == ("orders", "k", b"v")
    compile(both, "both", "exec")  # there is no Kafka here
    capsys.readouterr()


def test_the_examples_of_source_and_stream_run(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with mqstore.open(tmp_path / "var/mq") as store:
        for i in range(6):
            store.put("orders", b"%d" % i, tag="paid" if i % 3 else "created")
    (_, batch), (_, sql), (_, stream) = blocks("spark-source.md", tmp_path)
    typed: dict[str, Any] = {}

    exec(compile(batch, "batch", "exec"), typed)
    assert "|   paid|    4|" in capsys.readouterr().out
    view, query = sql.strip().removesuffix(";").split(";")
    spark.sql(view)
    assert {row[0]: row[1] for row in spark.sql(query).collect()} == {"paid": 4, "created": 2}
    exec(compile(stream, "stream", "exec"), typed)
    assert "|   paid|    4|" in capsys.readouterr().out


def test_the_stream_of_the_page_on_jobs_adds_what_is_new(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, (_, stream) = blocks("jobs.md", tmp_path)
    for topic, total in (("orders", 3), ("orders", 6), ("bills", 9)):
        with mqstore.open(tmp_path / "var/mq") as store:
            store.put_many(topic, [b"x"] * 3)

        exec(compile(stream, "stream", "exec"), {})

        assert capsys.readouterr().out == f"{total}\n"
    day = f"date={datetime.now(UTC).date()}"
    found = {path.parent.relative_to(tmp_path / "var/lake") for path in (tmp_path / "var/lake").rglob("*.parquet")}
    assert found == {Path("topic=orders", day), Path("topic=bills", day)}


def test_the_examples_of_the_sink_run(spark: Any, tmp_path: Path) -> None:
    first, (_, stream), (_, each_batch), (_, copy), (_, order) = blocks("spark-sink.md", tmp_path)
    typed: dict[str, Any] = {"spark": spark}

    typed["orders"] = spark.sql("select '7' as order_id, 'paid' as status, 'me' as customer")
    exec(compile(first[1], "first", "exec"), typed)
    assert rows(tmp_path / "var/mq") == [("orders", "7", b'{"order_id":"7","status":"paid","customer":"me"}')]

    with mqstore.open(tmp_path / "source") as store:
        store.put_many("orders", [b"%d" % i for i in range(5)], queue_id=0)
    reader = spark.readStream.format("mqstore").option("startingOffsets", "earliest").option("columns", "topic,body")
    typed["orders"] = reader.load(str(tmp_path / "source"))
    for number, code in enumerate((stream, each_batch, copy)):
        checkpoint = code.replace("var/checkpoint", f"var/checkpoint-{number}")
        exec(compile(checkpoint.replace("10 seconds", "0 seconds"), "stream", "exec"), typed)
        try:
            typed["query"].processAllAvailable()
        finally:
            typed["query"].stop()
        assert len(rows(tmp_path / "var/mq")) == 1 + 5 * min(number + 1, 2)
    assert Counter(rows(tmp_path / "var/copy")) == Counter(rows(tmp_path / "var/mq"))

    typed["events"] = spark.range(40).selectExpr(
        "cast(id as string) as body",
        "'events' as topic",
        "concat('k', id % 3) as sharding_key",
        "40 - id as event_time",
    )
    exec(compile(order, "order", "exec"), typed)
    written = [int(body) for topic, _, body in rows(tmp_path / "var/mq") if topic == "events"]
    assert [[i for i in written if i % 3 == key] for key in range(3)] == [
        [i for i in reversed(range(40)) if i % 3 == key] for key in range(3)
    ]
