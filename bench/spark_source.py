"""The data source inside Spark: goals S1, S2, S3, S6, S7 and S15 of its design, both sides in one run.

    python -m bench.spark_source [--rows N] [--quick] [--store DIR]

`local[2]`, page cache warm, wall time, the best of five after two warm-ups, sides in turn (--quick: of two after one).
Ratios count, seconds depend on the machine. The store: four topics of four queues, interleaved, bodies of 100 to 300
bytes, three properties, one message in a hundred with the tag `rare`; 3 million rows are about 1 GiB. S15 is a goal for
10 GiB: `--rows 30000000`.

    decoded    a source with the same plan that yields a tuple a message, from a loop that checks and decodes one
               record after the other: what the goal of S1 was set by
    tuples     the same from a loop over the store's reader, which compiled code does most of
    one        one process and no Spark, the same columns
    filtered   all rows to Spark, which filters them
    parquet    the same bodies in Parquet, by Spark's own reader
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.goals import ROUNDS, SOCKETS, WARM_UPS, Side, measure, report
from bench.spark_columns import decoded, make
from mqstore.columnar.columns import ColumnReader, default_columns
from mqstore.engine import ReadOnlyMessageStore
from mqstore.jobs.options import SourceOptions
from mqstore.jobs.plan import QueueSlice, open_store, plan
from mqstore.log.tip import QueueRef
from mqstore.spark.sessions import session

FOUR = "topic,queue_id,queue_offset,body"
TAGS = ["rare", *"ABC" * 33]


def tuple_source(decode: bool) -> Any:
    """A baseline. Made in a function, so that Spark sends it to its workers by value."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    from mqstore.spark.source import MQStoreDataSource

    class Reader(DataSourceReader):
        def __init__(self, options: SourceOptions, every: bool) -> None:
            assert not (decode and every), "of four columns only"
            self.options, self.every = options, every

        def partitions(self) -> list[InputPartition]:
            return [InputPartition(slices) for slices in plan(self.options)]

        def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
            for piece in partition.value:
                assert isinstance(piece, QueueSlice)
                with open_store(piece.store) as store:
                    if decode:
                        ref = QueueRef(piece.topic, piece.queue_id)
                        for r in decoded(store, ref, piece.start, piece.stop, verify=self.options.verify):
                            yield ref.topic, ref.queue_id, r.queue_offset, r.body
                        continue
                    for m in store.iter(piece.topic, piece.queue_id, start=piece.start, stop=piece.stop):
                        if not self.every:
                            yield m.topic, m.queue_id, m.offset, m.body
                        else:
                            yield (
                                *(piece.store.id, m.topic, m.queue_id, m.offset, m.body, " ".join(m.keys), m.tag),
                                *(dict(m.properties), m.born_at, m.stored_at, m.born_host, m.store_host),
                                *(m.reconsume_times, m.flag, m.sys_flag, 0, m.message_id, m.unique_key),
                                *(m.physical_offset, m.size, m.tags_code),
                            )

    class Tuples(DataSource):
        @classmethod
        def name(cls) -> str:
            return "decoded" if decode else "tuples"

        def schema(self) -> Any:
            return MQStoreDataSource(self.options).schema()

        def reader(self, schema: Any) -> DataSourceReader:
            options = SourceOptions.parse(dict(self.options))
            return Reader(options, options.columns is None)

    return Tuples


def one_process(path: Path) -> int:
    with ReadOnlyMessageStore(path) as store:
        reader = ColumnReader(store, FOUR.split(","))
        refs = [ref for topic in store.topics() for ref in store.queues(topic)]
        return sum(batch.num_rows for ref in refs for batch in reader.queue(*ref, *store.offsets(*ref)))


class PeakAnon:
    """The most memory of its own (RssAnon, in MiB) that any Python process below this one had."""

    def __init__(self) -> None:
        self.peak_mib = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> PeakAnon:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(0.02):
            family = {os.getpid()}
            for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
                try:
                    with open(f"/proc/{pid}/status") as file:
                        said = dict(line.split(":", 1) for line in file)
                    if int(said["PPid"]) not in family:
                        continue
                    family.add(pid)
                    if said["Name"].strip().startswith("python"):
                        self.peak_mib = max(self.peak_mib, int(said["RssAnon"].split()[0]) / 1024)
                except (OSError, KeyError):
                    continue


def questions(spark: Any, path: Path, folder: Path, rounds: int, warm: int) -> None:
    for decode in (True, False):
        spark.dataSource.register(tuple_source(decode))

    def load(kind: str = "mqstore", **options: str) -> Any:
        return spark.read.format(kind).options(**options).load(str(path))

    def counts(kind: str, **options: str) -> Side:
        return lambda: load(kind, **options).count()

    times = measure(
        {
            "decoded": counts("decoded", columns=FOUR),
            "tuples": counts("tuples", columns=FOUR),
            "ours": counts("mqstore", columns=FOUR),
            "one": lambda: one_process(path),
        },
        rounds,
        warm,
    )
    report("S1", "count() of 4 columns / tuples, each record decoded", times["decoded"] / times["ours"], 8)
    report("S1", "count() of 4 columns / tuples by compiled code", times["tuples"] / times["ours"], None)
    report("S2", "the same, of the rate of one process without Spark", times["one"] / times["ours"], 0.4)
    times = measure({"tuples": counts("tuples"), "ours": counts("mqstore")}, rounds, warm)
    report("S3", f"all {len(default_columns())} columns / tuples", times["tuples"] / times["ours"], 5)

    with ReadOnlyMessageStore(path) as store:
        low, high = store.offsets("topic-0", 0)
        [message] = store.read("topic-0", 0, high - max(1, (high - low) // 100), 1)
        since_ms = message.store_timestamp_ms
    since = f"timestamp_millis({since_ms})"
    columns = FOUR + ",tags,store_timestamp"
    filters: dict[str, tuple[dict[str, str], str]] = {
        "one queue of 16": ({"assign": '{"topic-1":[2]}'}, "topic = 'topic-1' and queue_id = 2"),
        "a tag of 1 %": ({"tags": "rare"}, "tags = 'rare'"),
        "the last 1 % by time": (
            {"startingTimestamp": str(since_ms)},
            f"store_timestamp >= {since}",
        ),
    }
    for name, (options, where) in filters.items():
        found = load(columns=columns, **options).count()
        assert found == load(columns=columns).where(where).count(), name
        times = measure(
            {
                "filtered": lambda where=where: load(columns=columns).where(where).count(),  # type: ignore[misc]
                "ours": counts("mqstore", columns=columns, **options),
            },
            rounds,
            warm,
        )
        report("S6", f"{name} ({found:,} rows) / all rows and Spark's filter", times["filtered"] / times["ours"], 4)

    parquet = str(folder / "parquet")
    load(columns=FOUR).write.mode("overwrite").parquet(parquet)
    times = measure(
        {
            "ours": lambda: load(columns="body").selectExpr("sum(length(body))").collect(),
            "parquet": lambda: spark.read.parquet(parquet).selectExpr("sum(length(body))").collect(),
        },
        rounds,
        warm,
    )
    report("S7", "sum(length(body)): time / from Parquet", times["ours"] / times["parquet"], 2.5, most=True)

    peaks = []
    for options in ({"subscribe": "topic-0"}, {}):
        with PeakAnon() as memory:
            load(**options).count()
        peaks.append(memory.peak_mib)
    report("S15", f"most MiB of a worker over all columns (a quarter of it: {peaks[0]:.0f})", peaks[1], 300, most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; 300 000 rows unless --rows says otherwise")
    parser.add_argument("--store", type=Path, help="where the store is made, or is from another run")
    given = parser.parse_args()
    rows = 300_000 if given.quick and "--rows" not in sys.argv else given.rows
    with tempfile.TemporaryDirectory() as folder:
        path = given.store or Path(folder) / "s"
        if not path.exists():
            make(path, rows, TAGS)
        spark = session("mqstore bench", {"spark.master": "local[2]", "spark.driver.memory": "1g", **SOCKETS})
        load = os.getloadavg()[0]
        print(f"{rows:,} rows, {os.cpu_count()} processors, load {load:.1f}" + " (busy!)" * (load > 1))
        try:
            questions(spark, path, Path(folder), *((2, 1) if given.quick else (ROUNDS, WARM_UPS)))
        finally:
            spark.stop()


if __name__ == "__main__":
    main()
