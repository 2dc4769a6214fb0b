"""Questions of `make spark-bench`: columns and jobs, which need no Spark, and the data source in Spark.

In Spark they are asked on `local[2]`, with pyspark and Java. The page cache is warm.
"""

from __future__ import annotations

import random
import shutil
import statistics
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest

import mqstore
from bench.harness import Ask, Load, ready, scratch
from mqstore.layout.record import Record, check_record, decode_record
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.writing.log_tail import QueueRef

pa = pytest.importorskip("pyarrow")

FOUR = ("topic", "queue_id", "queue_offset", "body")
FIVE = (*FOUR, "store_timestamp")
COPIED = "topic,queue_id,body,tags,keys,born_timestamp,flag"
SETTINGS = {
    "spark.master": "local[2]",
    "spark.driver.memory": "2g",
    "spark.sql.shuffle.partitions": "2",
    # TCP between Spark and its workers would hide the time of the source.
    "spark.python.unix.domain.socket.enabled": "true",
}
_ADJACENT = 50
"""Messages of a queue that are adjacent in the log."""
_BATCH, _WARM = 16, 5
Make = Callable[[int], Path]


def compare(ask: Ask, ours: Callable[[], object], beside: Mapping[str, tuple[Any, float]], **options: Any) -> None:
    """Ask about a call, given the name, call and goal of each peer."""
    peers = {ready(name, call): goal for name, (call, goal) in beside.items()}
    ask(ready("mqstore", ours), Load(0, 1), peers, unit="calls", **options)


@pytest.fixture
def folder() -> Iterator[Path]:
    with scratch() as made:
        yield made


@pytest.fixture(scope="module")
def made(share: float) -> Iterator[Make]:
    """Makes stores that the questions share: four topics of four queues, interleaved, bodies of 100 to 300 bytes."""
    source, tags = random.Random(), ["rare", *"ABC" * 33]

    def message(i: int, j: int) -> mqstore.OutgoingMessage:
        body, tag = source.randbytes(source.randint(100, 300)), tags[(i * _ADJACENT + j) % len(tags)]
        return mqstore.OutgoingMessage(body, tag=tag, keys=[f"k{i}-{j}"], properties={"colour": "blue"})

    def make(messages: int) -> Path:
        path = folder / str(messages)
        source.seed(20_240_229)
        if not path.exists():
            with mqstore.open(path) as store:
                for i, queue in product(range(max(1, int(messages * share) // (16 * _ADJACENT))), range(16)):
                    batch = [message(i, j) for j in range(_ADJACENT)]
                    store.put_many(f"topic-{queue % 4}", batch, queue_id=queue // 4)
        return path

    with scratch() as folder:
        yield make


def decoded(store: Any, ref: QueueRef, low: int, high: int) -> Iterator[Record]:
    """Yield the records of a part of a queue, checked and decoded one by one: what a source without columns does."""
    for physical, _, _ in struct.iter_unpack(">qiq", store.queue_table.get(*ref).read(low, high - low)):
        segment = store.log_files.find(physical)
        buffer, at = store.log_files.mapping(segment), physical - segment.start
        assert check_record(buffer, at, len(buffer), physical, store.manifest.checksum).status == "ok"
        yield decode_record(buffer, at)


def by_records(path: Path, every: bool) -> None:
    with ReadOnlyMessageStore(path) as store:
        for ref in [ref for topic in store.topics() for ref in store.queues(topic)]:
            records = decoded(store, ref, *store.offsets(*ref))
            [(*r, r.properties) if every else (ref.topic, ref.queue_id, r.queue_offset, r.body) for r in records]


def by_columns(path: Path, every: bool) -> None:
    with mqstore.open(path, "r") as store:
        for topic in store.topics():
            assert store.to_arrow(topic, columns=None if every else FOUR).num_rows


@pytest.mark.parametrize(("columns", "goal"), [("four", 20), ("all", 8)], ids=["four", "all"])
def test_columns(ask: Ask, made: Make, columns: str, goal: float) -> None:
    """`store.to_arrow` of four columns or all, beside a loop that makes a tuple of each record."""
    how = made(300_000), columns == "all"
    compare(ask, partial(by_columns, *how), {"a loop over records": (partial(by_records, *how), goal)})


def test_plan(ask: Ask, folder: Path) -> None:
    """The time that Spark waits before the first task of a query over a thousand stores of 16 queues."""
    from mqstore.jobs.options.options import SourceOptions
    from mqstore.jobs.reading.plan import plan

    config = mqstore.StoreConfig(segment_bytes=1 << 16, consumequeue_units=1000, index_slots=100, index_entries=400)
    for number in range(ask.scaled(1000)):
        with mqstore.open(folder / f"store-{number:05d}", config=config) as store:
            for each in range(64):
                store.put(f"topic-{each % 16 // 4}", b"x" * 100, queue_id=each % 4, keys=f"k{each}")
    compare(ask, partial(plan, SourceOptions.parse({"path": str(folder / "*")})), {}, limit=(3000, "ms"))


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    pytest.importorskip("pyspark")
    from mqstore.spark import session

    made = session("mqstore bench", SETTINGS)
    yield made
    made.stop()


def frame(spark: Any, path: Path, *columns: str, kind: str = "mqstore", **options: str) -> Any:
    if columns:
        options["columns"] = ",".join(columns)
    return spark.read.format(kind).options(**options).load(str(path))


def tuple_source(decode: bool) -> Any:
    """A source of tuples: of decoded records, or of messages. Made in a function, so that Spark sends it by value."""
    from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

    from mqstore.jobs.options.options import SourceOptions
    from mqstore.jobs.reading.opening import open_store
    from mqstore.jobs.reading.plan import plan
    from mqstore.spark.source import MQStoreDataSource

    class Reader(DataSourceReader):
        def __init__(self, options: SourceOptions) -> None:
            self.options = options

        def partitions(self) -> list[InputPartition]:
            return [InputPartition(slices) for slices in plan(self.options)]

        def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
            for piece in partition.value:
                ref = QueueRef(piece.topic, piece.queue_id)
                with open_store(piece.store) as store:
                    if decode:
                        for r in decoded(store, ref, piece.start, piece.stop):
                            yield ref.topic, ref.queue_id, r.queue_offset, r.body
                        continue
                    for m in store.iter(*ref, start=piece.start, stop=piece.stop):
                        yield (
                            *(piece.store.id, m.topic, m.queue_id, m.offset, m.body, " ".join(m.keys), m.tag),
                            *(dict(m.properties), m.born_at, m.stored_at, m.born_host, m.store_host),
                            *(m.reconsume_times, m.flag, m.sys_flag, 0, m.message_id, m.unique_key),
                            *(m.physical_offset, m.size, m.tags_code),
                        )

    class Tuples(DataSource):
        @classmethod
        def name(cls) -> str:
            return "tuples"

        def schema(self) -> Any:
            return MQStoreDataSource(self.options).schema()

        def reader(self, schema: Any) -> DataSourceReader:
            return Reader(SourceOptions.parse(dict(self.options)))

    return Tuples


def one_process(path: Path) -> None:
    from mqstore.columnar.columns import ColumnReader

    with ReadOnlyMessageStore(path) as store:
        reader = ColumnReader(store, FOUR)
        for ref in [ref for topic in store.topics() for ref in store.queues(topic)]:
            assert sum(batch.num_rows for batch in reader.queue(*ref, *store.offsets(*ref)))


@pytest.mark.parametrize(("columns", "goal"), [(FOUR, 8), ((), 5)], ids=["four_columns", "all_columns"])
def test_spark_count(ask: Ask, spark: Any, made: Make, columns: tuple[str, ...], goal: float) -> None:
    """`count()` of four columns beside a source of decoded records, of all columns beside a source of messages."""
    path = made(3_000_000)
    spark.dataSource.register(tuple_source(bool(columns)))
    beside = {"a source of tuples": (lambda: frame(spark, path, *columns, kind="tuples").count(), goal)}
    if columns:
        beside["one process without Spark"] = (partial(one_process, path), 0.4)
    compare(ask, lambda: frame(spark, path, *columns).count(), beside)


@pytest.mark.parametrize("name", ["queue", "tag", "time"])
def test_spark_filter(ask: Ask, spark: Any, made: Make, name: str) -> None:
    """One queue of 16, a tag of 1 %, the last 1 % by time: beside all rows and Spark's filter."""
    path = made(3_000_000)
    with ReadOnlyMessageStore(path) as store:
        low, high = store.offsets("topic-0", 0)
        since_ms = store.read("topic-0", 0, high - max(1, (high - low) // 100), 1)[0].store_timestamp_ms
    options, where = {
        "queue": ({"assign": '{"topic-1":[2]}'}, "topic = 'topic-1' and queue_id = 2"),
        "tag": ({"tags": "rare"}, "tags = 'rare'"),
        "time": ({"startingTimestamp": str(since_ms)}, f"store_timestamp >= timestamp_millis({since_ms})"),
    }[name]
    every = partial(frame, spark, path, *FIVE, "tags")
    compare(ask, lambda: every(**options).count(), {"Spark's filter": (lambda: every().where(where).count(), 4)})


def test_spark_parquet(ask: Ask, spark: Any, made: Make, folder: Path) -> None:
    """The time of `sum(length(body))`, beside the same bodies in Parquet."""
    path, parquet = made(3_000_000), f"{folder}/parquet"
    frame(spark, path, *FOUR).write.parquet(parquet)

    def total(read: Callable[[], Any]) -> None:
        read().selectExpr("sum(length(body))").collect()

    theirs = partial(total, lambda: spark.read.parquet(parquet))
    compare(ask, partial(total, lambda: frame(spark, path, "body")), {"Parquet": (theirs, 2.5)}, by="time")


def row_source() -> Any:
    """The data source with a writer that takes rows one by one."""
    from pyspark.sql.datasource import DataSourceWriter

    from mqstore.spark.source import MQStoreDataSource

    class RowWriter(DataSourceWriter):
        def __init__(self, writer: Any) -> None:
            self._writer = writer
            self.commit, self.abort = writer.commit, writer.abort

        def write(self, iterator: Any) -> Any:
            return self._writer.write(self._batches(iterator))

        def _batches(self, rows: Any) -> Any:
            kinds = pa.schema({"body": pa.binary(), "tags": pa.string()})
            while chunk := list(islice(rows, 10_000)):
                yield pa.RecordBatch.from_pydict({name: [row[name] for row in chunk] for name in kinds.names}, kinds)

    class ByRows(MQStoreDataSource):
        @classmethod
        def name(cls) -> str:
            return "mqstore_rows"

        def writer(self, schema: Any, overwrite: bool) -> Any:
            return RowWriter(super().writer(schema, overwrite))

    return ByRows


def test_spark_write(ask: Ask, spark: Any, folder: Path) -> None:
    """A frame written to a new store by Arrow batches, beside rows one by one."""
    spark.dataSource.register(row_source())
    rows = spark.range(0, ask.scaled(300_000), 1, 2).selectExpr(
        "unhex(repeat(sha1(cast(id as string)), 5 + cast(id % 10 as int))) as body",
        "element_at(array('A', 'B', 'C'), cast(id % 3 as int) + 1) as tags",
    )

    def write(kind: str) -> None:
        rows.write.format(kind).mode("append").option("topic", "orders").save(empty(folder / "target"))

    compare(ask, partial(write, "mqstore"), {"row by row": (partial(write, "mqstore_rows"), 1.8)})


def empty(folder: Path) -> str:
    shutil.rmtree(folder, ignore_errors=True)
    return str(folder)


@pytest.mark.parametrize("partition_by", [(), ("topic",)], ids=["one", "by_topic"])
def test_spark_export(ask: Ask, spark: Any, made: Make, folder: Path, partition_by: tuple[str, ...]) -> None:
    """`export_parquet` in the tasks, beside `frame.write` of the same columns."""
    from mqstore.jobs import export_parquet

    path, out = made(1_000_000), folder / "out"

    def in_tasks() -> None:
        export_parquet(path, empty(out), spark=spark, columns=FIVE, partition_by=partition_by)

    def by_frame() -> None:
        writer = frame(spark, path, *FIVE).write.partitionBy(*partition_by)
        writer.option("compression", "zstd").parquet(empty(out))

    compare(ask, in_tasks, {"frame.write": (by_frame, 3)})


def test_spark_traffic(ask: Ask, spark: Any, made: Make) -> None:
    """`traffic_report` in the tasks, beside `groupBy` with a count and a sum."""
    from mqstore.jobs import select, traffic_report

    path = made(1_000_000)
    minute = ("topic", "queue_id", "date_trunc('minute', store_timestamp) as minute", "length(body) as size")

    def grouped() -> None:
        rows = frame(spark, path, *FIVE).selectExpr(*minute)
        rows.groupBy("topic", "queue_id", "minute").agg({"*": "count", "size": "sum"}).collect()

    ours = partial(traffic_report, select(path), spark=spark, by=("topic", "queue_id"))
    compare(ask, ours, {"groupBy": (grouped, 3)})


def batch_s(stream: Any, batches: int) -> float:
    """Return the median time of a micro-batch of a query that does nothing with its rows, as it reports it."""
    with scratch() as folder:
        query = stream.writeStream.format("noop").option("checkpointLocation", f"{folder}/checkpoint").start()
        try:
            while query.isActive and (query.lastProgress is None or query.lastProgress["batchId"] < _WARM + batches):
                query.awaitTermination(0.2)
            if query.exception() is not None:
                raise query.exception()
            done = [each for each in query.recentProgress if each["numInputRows"] and each["batchId"] >= _WARM]
        finally:
            query.stop()
    return statistics.median(each["durationMs"]["triggerExecution"] for each in done) / 1000


def test_spark_micro_batch(ask: Ask, spark: Any, made: Make) -> None:
    """The time of a micro-batch of 16 messages, beside Spark's own `rate-micro-batch` source."""
    batches = max(3, ask.scaled(40))
    spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", str(2 * (_WARM + batches)))
    small = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": str(_BATCH), "columns": "topic,queue_id,body"}
    ours = spark.readStream.format("mqstore").options(**small).load(str(made(1_000_000)))
    rate = spark.readStream.format("rate-micro-batch").options(rowsPerBatch=str(_BATCH), numPartitions="1").load()
    seen: list[tuple[float, float]] = []
    ask.benchmark.pedantic(lambda: seen.append((batch_s(ours, batches), batch_s(rate, batches))), rounds=ask.rounds)
    note = " beside ".join(f"{statistics.median(each) * 1000:.0f} ms" for each in zip(*seen, strict=True))
    ask.answer("rate-micro-batch", "x time", [our / their for our, their in seen], 1.3, note)


def test_spark_stream(ask: Ask, spark: Any, made: Make, folder: Path) -> None:
    """Store to store by a stream of one batch, beside a batch write of the same frame."""
    path = made(1_000_000)

    def by_stream() -> None:
        stream = spark.readStream.format("mqstore").options(startingOffsets="earliest", columns=COPIED)
        write = stream.load(str(path)).writeStream.format("mqstore").trigger(availableNow=True)
        write = write.option("checkpointLocation", empty(folder / "checkpoint"))
        write.start(empty(folder / "target")).awaitTermination()

    def by_batch() -> None:
        frame(spark, path, COPIED).write.format("mqstore").mode("append").save(empty(folder / "target"))

    compare(ask, by_stream, {"a batch write": (by_batch, 0.5)})
