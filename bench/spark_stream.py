"""Streams of Spark: goals S10 and S11 of the design, both sides in one run.

    python -m bench.spark_stream [--rows N] [--quick]

    S10  a micro-batch of 16 messages into nothing, beside one of Spark's own `rate-micro-batch` source: the median of
         `triggerExecution` over 40 batches (--quick: 15) after five, as the queries' progress reports it. And beside
         `nothing`, a source in Python that gives a row each time: what Spark itself takes for one
    S11  all messages of a store into a new one by a stream of one batch, beside a batch write of the same frame: wall
         time, best of three after one (--quick: of one after one)

`local[2]`, sides in turn. Ratios count, times depend on the machine.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.goals import ROUNDS, SOCKETS, WARM_UPS, Side, measure, report
from bench.spark_columns import make
from bench.spark_source import TAGS
from mqstore.spark.sessions import session

_BATCH = 16
_WARM = 5
_COPIED = ("topic", "queue_id", "body", "tags", "keys", "born_timestamp", "flag")


def nothing_source() -> Any:
    """Made in a function, so that Spark sends it to its workers by value."""
    from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

    class Reader(DataSourceStreamReader):
        def initialOffset(self) -> dict[str, int]:
            return {"at": 0}

        def latestOffset(self, *_: Any) -> dict[str, int]:
            return {"at": time.monotonic_ns()}

        def partitions(self, start: Any, end: Any) -> list[InputPartition]:
            return [InputPartition(1)]

        def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
            yield (1,)

    class Nothing(DataSource):
        @classmethod
        def name(cls) -> str:
            return "nothing"

        def schema(self) -> str:
            return "value int"

        def streamReader(self, schema: Any) -> DataSourceStreamReader:
            return Reader()

    return Nothing


def batch_ms(spark: Any, stream: Any, checkpoint: Path, batches: int) -> float:
    """The median time of a batch of a query that does nothing with its rows."""
    query = stream.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    try:
        while query.isActive and (query.lastProgress is None or query.lastProgress["batchId"] < _WARM + batches):
            query.awaitTermination(0.2)
        if query.exception() is not None:
            raise query.exception()
        done = [each for each in query.recentProgress if each["numInputRows"] and each["batchId"] >= _WARM]
    finally:
        query.stop()
    return statistics.median(each["durationMs"]["triggerExecution"] for each in done)


def small_batches(spark: Any, path: Path, folder: Path, batches: int, rounds: int) -> None:
    spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", str(2 * (_WARM + batches)))
    ours = (
        spark.readStream.format("mqstore")
        .options(startingOffsets="earliest", maxOffsetsPerTrigger=str(_BATCH), columns="topic,queue_id,body")
        .load(str(path))
    )
    rate = spark.readStream.format("rate-micro-batch").options(rowsPerBatch=str(_BATCH), numPartitions="1").load()
    spark.dataSource.register(nothing_source())
    nothing = spark.readStream.format("nothing").load()
    best = dict.fromkeys(("rate", "nothing", "ours"), math.inf)
    for turn in range(rounds):
        for name, stream in zip(best, (rate, nothing, ours), strict=True):
            best[name] = min(best[name], batch_ms(spark, stream, folder / f"{name}-{turn}", batches))
    print("     a batch:", ", ".join(f"{name} {ms:.0f} ms" for name, ms in best.items()))
    report("S10", "a micro-batch of 16 messages / of the rate source", best["ours"] / best["rate"], 1.3, most=True)
    report("S10", "the same / of a source in Python that does nothing", best["ours"] / best["nothing"], None)
    report("S10", "that one / of the rate source", best["nothing"] / best["rate"], None)


def whole_store(spark: Any, path: Path, folder: Path, rounds: int, warm_ups: int) -> None:
    target = folder / "target"

    def by_stream() -> None:
        shutil.rmtree(target, ignore_errors=True)
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        stream = spark.readStream.format("mqstore").options(startingOffsets="earliest", columns=",".join(_COPIED))
        query = (
            stream.load(str(path))
            .writeStream.format("mqstore")
            .option("checkpointLocation", str(folder / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(target))
        )
        query.awaitTermination()

    def by_batch() -> None:
        shutil.rmtree(target, ignore_errors=True)
        frame = spark.read.format("mqstore").options(columns=",".join(_COPIED)).load(str(path))
        frame.write.format("mqstore").mode("append").save(str(target))

    sides: dict[str, Side] = {"batch": by_batch, "stream": by_stream}
    times = measure(sides, rounds, warm_ups)
    report("S11", "store to store by a stream, of the rate of a batch write", times["batch"] / times["stream"], 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; 100 000 rows unless --rows says otherwise")
    given = parser.parse_args()
    rows = 100_000 if given.quick and "--rows" not in sys.argv else given.rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder / "s", rows, TAGS)
        spark = session("mqstore bench", {"spark.master": "local[2]", "spark.driver.memory": "1g", **SOCKETS})
        load = os.getloadavg()[0]
        print(f"{rows:,} rows, {os.cpu_count()} processors, load {load:.1f}" + " (busy!)" * (load > 1))
        try:
            small_batches(spark, folder / "s", folder, *((15, 2) if given.quick else (40, ROUNDS)))
            whole_store(spark, folder / "s", folder, *((1, 1) if given.quick else (ROUNDS, WARM_UPS)))
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
