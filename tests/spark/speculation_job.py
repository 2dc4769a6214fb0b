"""What test_cluster runs to have a task tried twice at once, in a process of its own:

    python speculation_job.py MASTER FOLDER [NAME=VALUE ...]

Writes 400 rows in four tasks into FOLDER/store. The last one's first attempt hands on all of its rows, and then hangs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

ROWS, TASKS = 400, 4


def hang(folder: str, rows: Iterator[Any]) -> Iterator[Any]:
    import time
    from pathlib import Path

    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    yield from rows
    partition, attempt = context.partitionId(), context.attemptNumber()
    Path(folder, f"attempt-{partition}-{attempt}").touch()
    if (partition, attempt) == (TASKS - 1, 0):
        time.sleep(600)


def main(master: str, folder: str, *settings: str) -> None:
    from functools import partial

    from pyspark.sql import SparkSession

    from mqstore.spark import register

    builder = SparkSession.builder.master(master).appName("mqstore speculation test")
    for setting in settings:
        builder = builder.config(*setting.split("=", 1))
    spark = builder.getOrCreate()
    try:
        register(spark)
        rows = spark.range(0, ROWS, numPartitions=TASKS).selectExpr("cast(id as string) as body", "'t' as topic")
        twice = rows.rdd.mapPartitions(partial(hang, folder))  # not `mapInArrow`, which wants pandas
        spark.createDataFrame(twice, rows.schema).write.format("mqstore").mode("append").save(f"{folder}/store")
    finally:
        spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
