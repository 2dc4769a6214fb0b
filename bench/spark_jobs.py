"""What work kept inside the tasks saves: jobs beside the same through DataFrames (S5 and S14 of the design).

    python -m bench.spark_jobs [--messages N] [--rounds N] [--master local[2]]

Needs pyspark and Java. One session, page cache warm, wall time, the best of some rounds in which every side has its
turn, after two that do not count.

    export    Parquet, zstd: `export_parquet`, beside `frame.write` of the same columns; once without folders, once with
              a folder for each topic
    traffic   messages and bytes by topic, queue and minute: `traffic_report`, which adds percentiles, delays and
              retries, beside `groupBy` with a count and a sum

Messages as in the measurements behind the design: four topics of four queues, interleaved, bodies of 100 to 300 bytes,
three properties. Goals: at least 3 times for both.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bench.goals import ROUNDS, SOCKETS, measure, report
from bench.spark_columns import make
from mqstore.jobs import export_parquet, select, traffic_report
from mqstore.spark import session

FIVE = ("topic", "queue_id", "queue_offset", "store_timestamp", "body")

Side = Callable[[Any, Path, Path], object]


def _frame(spark: Any, store: Path, columns: tuple[str, ...]) -> Any:
    return spark.read.format("mqstore").option("columns", ",".join(columns)).load(str(store))


def export_task(spark: Any, store: Path, out: Path) -> object:
    return export_parquet(store, out, spark=spark, columns=FIVE, partition_by=())


def export_frame(spark: Any, store: Path, out: Path) -> object:
    return _frame(spark, store, FIVE).write.option("compression", "zstd").parquet(str(out))


def export_task_by_topic(spark: Any, store: Path, out: Path) -> object:
    return export_parquet(store, out, spark=spark, columns=FIVE, partition_by=("topic",))


def export_frame_by_topic(spark: Any, store: Path, out: Path) -> object:
    return _frame(spark, store, FIVE).write.partitionBy("topic").option("compression", "zstd").parquet(str(out))


def traffic_task(spark: Any, store: Path, out: Path) -> object:
    del out
    return traffic_report(select(store), spark=spark, by=("topic", "queue_id"))


def traffic_frame(spark: Any, store: Path, out: Path) -> object:
    del out
    _frame(spark, store, ("topic", "queue_id", "store_timestamp", "body")).createOrReplaceTempView("bench")
    return spark.sql(
        "select topic, queue_id, date_trunc('minute', store_timestamp) as minute, count(*), sum(length(body)) "
        "from bench group by 1, 2, 3"
    ).collect()


SIDES: dict[str, Side] = {
    "export, in the task": export_task,
    "export, frame.write": export_frame,
    "export by topic, in the task": export_task_by_topic,
    "export by topic, frame.write": export_frame_by_topic,
    "traffic, in the task": traffic_task,
    "traffic, groupBy": traffic_frame,
}
RATIOS = (
    ("S5", "export, frame.write", "export, in the task", 3),
    ("S5", "export by topic, frame.write", "export by topic, in the task", 3),
    ("S14", "traffic, groupBy", "traffic, in the task", 3),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--master", default="local[2]")
    given = parser.parse_args()
    spark = session("mqstore bench", {"spark.master": given.master, "spark.sql.shuffle.partitions": "2", **SOCKETS})
    with tempfile.TemporaryDirectory() as folder:
        store, out = Path(folder, "s"), Path(folder, "out")
        make(store, given.messages)
        sides = {name: partial(side, spark, store, out) for name, side in SIDES.items()}
        best = measure(sides, given.rounds, tidy=lambda: shutil.rmtree(out, ignore_errors=True))
    print(f"{given.messages:,} messages, {given.master}, best of {given.rounds}")
    for name, seconds in best.items():
        print(f"  {name:30} {seconds:7.2f} s  {given.messages / seconds / 1e6:6.2f} M/s")
    for number, slow, fast, goal in RATIOS:
        report(number, f"{slow}, time / {fast}", best[slow] / best[fast], goal)
    spark.stop()


if __name__ == "__main__":
    main()
