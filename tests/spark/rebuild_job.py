"""What test_cluster runs to have queues sorted by a cluster, in a process of its own:

    python rebuild_job.py MASTER STORE FOLDER [NAME=VALUE ...]

Rebuilds STORE into FOLDER/built and then in place, all queues by way of the shuffle. The first task that puts a sorted
queue into its slots is killed when it has done that. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any


def die_once(folder: str, jobs: Any, rows: Iterator[Any]) -> Iterator[Any]:
    import os
    import signal
    from pathlib import Path

    from mqstore.spark.jobs import rebuild

    for outcome in rebuild._gather(jobs, rows):
        try:
            Path(folder, "killed").touch(exist_ok=False)
        except FileExistsError:
            yield outcome
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def main(master: str, store: str, folder: str, *settings: str) -> None:
    from pyspark.sql import SparkSession

    from mqstore.spark.jobs import rebuild as job

    builder = SparkSession.builder.master(master).appName("mqstore rebuild test")
    for setting in settings:
        builder = builder.config(*setting.split("=", 1))
    spark = builder.getOrCreate()
    gather = job._gather
    try:
        job._gather = partial(die_once, folder)  # type: ignore[assignment]
        report = job.rebuild(spark, store, dest=f"{folder}/built", shuffle="always", range_bytes=6_000)
        job._gather = gather
        job.rebuild(spark, store, shuffle="always", range_bytes=6_000)
    finally:
        spark.stop()
    ways = sorted({queue.way for queue in report.queues})
    sys.stdout.write(json.dumps({"ways": ways}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
