"""Delta tables beside stores: written into a store, and by streams, each batch once. `make delta` fetches Delta and a
pyspark that it knows, and sets MQSTORE_DELTA to the folder of its jars; without that these tests are skipped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore.spark import session

pytestmark = pytest.mark.spark_alone


@pytest.fixture(scope="module")
def spark(spark_environment: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = os.environ.get("MQSTORE_DELTA")
    if folder is None:
        pytest.skip("MQSTORE_DELTA names no folder with Delta's jars: `make delta` fetches them")
    running = session(
        "mqstore with Delta",
        {
            "spark.master": "local[2]",
            "spark.ui.enabled": "false",
            "spark.jars": ",".join(str(path.resolve()) for path in sorted(Path(folder).glob("*.jar"))),
            "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
            "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
        },
    )
    yield running
    running.stop()


def bodies(path: Path, topic: str = "orders") -> list[int]:
    with mqstore.open(path, "r") as store:
        return sorted(message.json()["n"] for ref in store.queues(topic) for message in store.iter(*ref))


def test_rows_that_a_table_has_now_are_written_once_and_no_others(spark: Any, tmp_path: Path) -> None:
    """The recipe of an import."""
    table = str(tmp_path / "table")
    rows = spark.range(0, 1000).selectExpr(
        "id", "concat('k', id) as who", "to_json(struct(id as n)) as payload", "id % 3 as part"
    )
    rows.write.format("delta").partitionBy("part").save(table)
    spark.sql(f"delete from delta.`{table}` where id >= 900")
    spark.sql(f"update delta.`{table}` set who = 'changed' where id < 10")

    for _ in range(2):
        (
            spark.read.format("delta")
            .load(table)
            .selectExpr(
                "payload as body",
                "array(who) as keys",
                "map('part', string(part)) as properties",
                "if(id < 10, 'a', 'b') as tags",
            )
            .write.format("mqstore")
            .mode("append")
            .options(topic="orders", txnAppId="import", txnVersion=1)
            .save(str(tmp_path / "mq"))
        )

    assert bodies(tmp_path / "mq") == [*range(900)]
    with mqstore.open(tmp_path / "mq", "r") as store:
        changed = list(store.find("orders", key="changed", limit=100))
        assert sorted(message.json()["n"] for message in changed) == [*range(10)]
        assert {(message.tag, message.properties["part"]) for message in changed} == {("a", each) for each in "012"}


def follow(spark: Any, store: Path, table: Path, checkpoint: Path) -> None:
    stream = spark.readStream.format("mqstore").option("startingOffsets", "earliest").option("columns", "body")
    query = (
        stream.option("maxOffsetsPerTrigger", "40")
        .load(str(store))
        .selectExpr("cast(body as string) as body")
        .writeStream.format("delta")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start(str(table))
    )
    query.awaitTermination()


def test_a_stream_into_a_table_goes_on_and_does_no_batch_twice(spark: Any, tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "mq") as store:
        store.put_many("orders", [json.dumps({"n": i}).encode() for i in range(100)])
    follow(spark, tmp_path / "mq", tmp_path / "table", tmp_path / "checkpoint")
    with mqstore.open(tmp_path / "mq") as store:
        store.put_many("orders", [json.dumps({"n": i}).encode() for i in range(100, 130)])
    # As if Spark had died between the table's commit and its own note of the last batch.
    last = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    follow(spark, tmp_path / "mq", tmp_path / "table", tmp_path / "checkpoint")

    found = [json.loads(row.body)["n"] for row in spark.read.format("delta").load(str(tmp_path / "table")).collect()]
    assert sorted(found) == [*range(130)]


def test_a_batch_to_a_table_and_to_a_store_is_in_both_once(spark: Any, tmp_path: Path) -> None:
    """The recipe of two places, with a table for one of them; the batch fails between the two writes, once."""
    with mqstore.open(tmp_path / "mq") as store:
        store.put_many("orders", [json.dumps({"n": i}).encode() for i in range(60)])
    failed: list[int] = []

    def save(frame: Any, batch: int) -> None:
        frame = frame.selectExpr("cast(body as string) as body").persist()
        once = {"txnAppId": "two-places", "txnVersion": str(batch)}
        frame.write.format("delta").mode("append").options(**once).save(str(tmp_path / "table"))
        if batch == 1 and not failed:
            failed.append(batch)
            raise RuntimeError("between the two")
        frame.write.format("mqstore").mode("append").option("topic", "orders").options(**once).save(
            str(tmp_path / "out")
        )
        frame.unpersist()

    stream = spark.readStream.format("mqstore").option("startingOffsets", "earliest").option("columns", "body")
    stream = stream.option("maxOffsetsPerTrigger", "25").load(str(tmp_path / "mq"))
    writer = stream.writeStream.foreachBatch(save).option("checkpointLocation", str(tmp_path / "checkpoint"))
    with pytest.raises(Exception, match="between the two"):
        writer.trigger(availableNow=True).start().awaitTermination()
    writer.trigger(availableNow=True).start().awaitTermination()

    assert failed == [1]
    rows = spark.read.format("delta").load(str(tmp_path / "table")).collect()
    assert sorted(json.loads(row.body)["n"] for row in rows) == [*range(60)]
    assert bodies(tmp_path / "out") == [*range(60)]
