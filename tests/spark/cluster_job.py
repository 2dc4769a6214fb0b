"""What test_cluster runs on a cluster, in a process of its own that knows only the installed package:

    python cluster_job.py MASTER STORE FOLDER [NAME=VALUE ...]

Reads STORE in tasks on all executors, streams it into Parquet, writes it into another store, streams that into a set of
stores, and verifies both. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def origin(_: Any) -> list[tuple[int, str]]:
    """Where a task ran, and where it has the package from."""
    import os

    import mqstore

    return [(os.getppid(), os.path.dirname(mqstore.__file__))]


def stream_into_set(spark: Any, source: str, folder: str) -> list[int]:
    """All that the source has; restarted with the same checkpoint it goes on. The batches that were done."""
    stream = spark.readStream.format("mqstore").options(startingOffsets="earliest", minPartitions="2").load(source)
    query = (
        stream.select("topic", "queue_id", "body")
        .writeStream.format("mqstore")
        .options(target="set", checkpointLocation=f"{folder}/checkpoint-set")
        .trigger(availableNow=True)
        .start(f"{folder}/set")
    )
    query.awaitTermination()
    return [progress["batchId"] for progress in query.recentProgress]


def forget_last_commit(checkpoint: Path) -> None:
    """As if the driver had been killed between the sink's commit and the entry in Spark's log."""
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


def main(master: str, store: str, folder: str, *settings: str) -> None:
    from pyspark.sql import SparkSession

    import mqstore
    from mqstore.jobs import verify
    from mqstore.spark import register

    builder = SparkSession.builder.master(master).appName("mqstore cluster test")
    for setting in settings:
        builder = builder.config(*setting.split("=", 1))
    spark = builder.getOrCreate()
    try:
        register(spark)
        columns = "topic,queue_id,queue_offset,tags,body"
        frame = (
            spark.read.format("mqstore").options(subscribe="t,orders", columns=columns, minPartitions="4").load(store)
        )
        rows = [[row.topic, row.queue_id, row.queue_offset, row.tags, row.body.hex()] for row in frame.collect()]
        tasks = frame.rdd.getNumPartitions()
        # A barrier begins its tasks together, so each executor, which has one core, runs one.
        origins = spark.sparkContext.parallelize(range(2), 2).barrier().mapPartitions(origin).collect()

        stream = spark.readStream.format("mqstore").options(subscribe="t", startingOffsets="earliest").load(store)
        query = (
            stream.select("queue_offset", "body")
            .writeStream.format("parquet")
            .option("checkpointLocation", f"{folder}/checkpoint")
            .trigger(availableNow=True)
            .start(f"{folder}/parquet")
        )
        query.awaitTermination()
        streamed = spark.read.parquet(f"{folder}/parquet").count()

        written = frame.where("topic = 't'").select("topic", "queue_id", "tags", "body")
        written.write.format("mqstore").mode("append").save(f"{folder}/copy")

        batches = [stream_into_set(spark, f"{folder}/copy", folder)]
        more = written.selectExpr("'more' as topic", "queue_id", "concat('more ', body) as body")
        more.write.format("mqstore").mode("append").save(f"{folder}/copy")
        batches.append(stream_into_set(spark, f"{folder}/copy", folder))
        forget_last_commit(Path(folder, "checkpoint-set"))
        batches.append(stream_into_set(spark, f"{folder}/copy", folder))
        in_set = spark.read.format("mqstore").option("columns", "topic,body").load(f"{folder}/set").collect()
        verified = verify([f"{folder}/copy", f"{folder}/set"], spark=spark)
    finally:
        spark.stop()
    with mqstore.open(Path(folder, "copy"), mode="r") as copy:
        found = [(m.queue_id, m.tag, m.body.hex()) for m in copy.log.iter("t")]
    result = {
        "package": str(Path(mqstore.__file__).parent),
        "rows": rows,
        "tasks": tasks,
        "executors": len({parent for parent, _ in origins}),
        "origins": sorted({where for _, where in origins}),
        "streamed": streamed,
        "written": found,
        "batches": batches,
        "set": [(row.topic, bytes(row.body).decode()) for row in in_set],
        "verified": (verified.ok, verified.messages),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
