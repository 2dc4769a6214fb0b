"""The stream inside Spark, which gets each message once. What progress is, and what may happen to it, is tested without
Spark (`test_progress`)."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.admin.inspect import PopView, lag_of
from mqstore.broker.background.context import open_parts, open_tables
from mqstore.errors import ConfigError
from mqstore.files.readonly_fs import QUIET
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from tests.log.support import open_store

pytestmark = pytest.mark.spark
Row = tuple[str, int, int]


class Query:
    """A store that is being written, a checkpoint, and a sink that takes each batch once."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark = spark
        self.path = folder / "s"
        self.checkpoint = folder / "checkpoint"
        self.store = open_store(self.path)
        self.sink: dict[int, list[Row]] = {}
        self.fail_at: int | None = None

    def append(self, *counts: int, topic: str = "t", size: int = 5) -> None:
        """So many messages to queue 0, 1, ..."""
        for queue_id, count in enumerate(counts):
            for _ in range(count):
                self.store.put(topic, bytes(size), queue_id)
        self.store.dispatch()

    def retain(self) -> int:
        """Drop most of the log; the oldest offset of `t`, queue 0, then."""
        self.store.flush()
        self.store.drop_before(self.store.max_offset * 3 // 4)
        return self.store.offsets("t", 0)[0]

    def start(self, trigger: dict[str, Any], **options: str) -> Any:
        def take(frame: Any, batch: int) -> None:
            if batch == self.fail_at:
                raise RuntimeError("this sink fails")
            self.sink[batch] = [tuple(row) for row in frame.collect()]

        frame = self.spark.readStream.format("mqstore").options(**options).load(str(self.path))
        writer = frame.select("topic", "queue_id", "queue_offset").writeStream.foreachBatch(take)
        return writer.option("checkpointLocation", str(self.checkpoint)).trigger(**trigger).start()

    def run(self, **options: str) -> list[Any]:
        """All there is; the progress reports of the run's batches."""
        query = self.start({"availableNow": True}, **options)
        query.awaitTermination()
        return list(query.recentProgress)

    def fails(self, **options: str) -> str:
        with pytest.raises(Exception, match="STREAM_FAILED") as caught:
            self.run(**options)
        return str(caught.value)

    def offset(self, batch: int) -> dict[str, Any]:
        """What the checkpoint says that a batch ends at."""
        return json.loads((self.checkpoint / "offsets" / str(batch)).read_text().splitlines()[-1])  # type: ignore[no-any-return]

    def batches(self) -> int:
        """How many of them are done."""
        return sum(name.name.isdecimal() for name in (self.checkpoint / "commits").iterdir())

    def uncommit(self) -> None:
        """As if Spark had died between writing down what the last batch is, and that it is done."""
        last = self.batches() - 1
        for name in (str(last), f".{last}.crc"):
            (self.checkpoint / "commits" / name).unlink()

    def read(self) -> dict[tuple[str, int], list[int]]:
        """Offsets by queue, in the order of batches, sorted within one."""
        found: dict[tuple[str, int], list[int]] = {}
        for batch in sorted(self.sink):
            for topic, queue_id, offset in sorted(self.sink[batch]):
                found.setdefault((topic, queue_id), []).append(offset)
        return found


@pytest.fixture
def query(spark: Any, tmp_path: Path) -> Iterator[Query]:
    query = Query(spark, tmp_path)
    yield query
    query.store.close()


# -- each message once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trigger", [{"availableNow": True}, {"processingTime": "0 seconds"}, {"once": True}])
def test_stop_append_and_restart_is_exact(query: Query, trigger: dict[str, Any]) -> None:
    """With each trigger, with a new queue and a new topic meanwhile, from the position at which it began."""
    query.append(7, 7)

    def run() -> None:
        running = query.start(trigger)
        if "processingTime" in trigger:
            running.processAllAvailable()
            running.stop()
        else:
            running.awaitTermination()

    run()
    assert query.read() == {}
    query.append(3, 0, 2)
    query.append(4, topic="u")
    run()
    query.append(1)
    run()
    assert query.read() == {
        ("t", 0): [7, 8, 9, 10],
        ("t", 2): [0, 1],
        ("u", 0): [0, 1, 2, 3],
    }


@pytest.mark.usefixtures("limits")
def test_a_kill_between_log_and_commit_replays_the_batch_at_every_point(query: Query) -> None:
    """The pin, batches within a run, the last of a run. A batch that is done again has the same messages, although
    more have come; nothing is left out behind it."""
    query.append(5)
    query.run(maxOffsetsPerTrigger="4")
    replayed = []
    for _ in range(3):
        last = query.batches() - 1
        end, rows = query.offset(last), query.sink.pop(last)
        done = {batch: sorted(rows) for batch, rows in query.sink.items()}
        query.uncommit()
        query.append(3, 3)
        query.run(maxOffsetsPerTrigger="4")
        assert query.offset(last) == end
        assert sorted(query.sink[last]) == sorted(rows)  # nothing is there that did not come again
        assert {batch: sorted(query.sink[batch]) for batch in done} == done
        assert all(len(rows) <= 4 for rows in query.sink.values())
        replayed.append(len(rows))
    assert replayed[0] == 0  # the pin
    assert min(replayed[1:]) > 0
    assert query.read() == {("t", 0): [*range(5, 14)], ("t", 1): [*range(9)]}


@pytest.mark.usefixtures("limits")
def test_one_huge_and_many_tiny_queues_keep_to_the_limit(query: Query) -> None:
    query.append(200, *[1] * 20)
    progress = query.run(startingOffsets="earliest", maxOffsetsPerTrigger="50")
    assert [each.numInputRows for each in progress] == [50, 50, 50, 50, 20]
    assert sum(row[1] > 0 for row in query.sink[0]) == 20
    assert sum(map(len, query.read().values())) == 220


@pytest.mark.usefixtures("limits")
def test_a_stream_of_the_log_reads_the_same(query: Query) -> None:
    query.append(20, 20)
    query.run(startingOffsets="earliest", readBy="log")
    assert query.read() == {("t", 0): [*range(20)], ("t", 1): [*range(20)]}
    assert "option maxOffsetsPerTrigger needs queues" in query.fails(readBy="log", maxOffsetsPerTrigger="15")
    says = query.fails(readBy="queue")
    assert "the checkpoint belongs to a stream with readBy=log, but this one has readBy=queue" in says


def test_rows_are_those_of_a_batch(query: Query) -> None:
    """All columns, with an option that looks into messages."""
    for i in range(30):
        query.store.put("t", b"%d" % i, i % 2, tag="ab"[i % 2], keys=f"k{i}")
    query.store.dispatch()
    found: list[Any] = []
    frame = query.spark.readStream.format("mqstore").options(startingOffsets="earliest", tags="a").load(str(query.path))
    writer = frame.writeStream.foreachBatch(lambda frame, batch: found.extend(frame.collect()))
    running = writer.option("checkpointLocation", str(query.checkpoint)).trigger(availableNow=True).start()
    running.awaitTermination()
    expected = query.spark.read.format("mqstore").options(tags="a").load(str(query.path)).collect()
    assert len(expected) == 15
    assert sorted(map(str, found)) == sorted(map(str, expected))


# -- lost data ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("limits")
def test_lost_messages_fail_the_stream_by_default(query: Query) -> None:
    """Also in a batch that was logged before they were lost: it keeps its end, and has what is left."""
    query.append(80, size=300)
    query.run(startingOffsets="earliest", maxOffsetsPerTrigger="40")
    query.uncommit()
    low = query.retain()
    assert 40 < low < 80
    says = query.fails()
    wanted = f"t, queue 0: offset 40 is not in {low}..80: {low - 40} messages are lost"
    assert wanted in says
    assert "failOnDataLoss=false" in says
    assert "Traceback" not in says
    query.append(5)
    query.run(failOnDataLoss="false")
    assert query.read() == {("t", 0): [*range(40), *range(low, 85)]}
    assert [row[2] for row in query.sink[1]] == [*range(low, 80)]


def test_retention_between_plan_and_task_is_judged_in_the_task(query: Query) -> None:
    """No Spark runs: the reader is asked as Spark asks it."""
    query.append(40, size=300)
    strict, lenient = (
        reader(query.path, startingOffsets="earliest", **more) for more in ({}, {"failOnDataLoss": "false"})
    )
    [planned] = strict.partitions(start := strict.initialOffset(), strict.latestOffset(start, None))
    low = query.retain()
    with pytest.raises(LookupError, match=f"{low} messages of t, queue 0 were planned"):
        [*strict.read(planned)]
    assert sum(batch.num_rows for batch in lenient.read(planned)) == 40 - low


# -- progress as a group -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("limits")
def test_a_stream_that_has_read_all_shows_no_lag(query: Query) -> None:
    """The last batch of a run counted as lag until the next run: `mqstore lag --max-age` never stopped its alarm."""

    def lags() -> list[int | None]:
        with ReadOnlyMessageStore(query.path, fs=QUIET) as store:
            return [lag.messages for lag in lag_of(open_tables(store), "reports", PopView())]

    query.append(10, 10)
    query.run(startingOffsets="earliest", commitGroup="reports")  # one batch
    assert lags() == [0, 0]
    query.append(4)
    assert lags() == [4, 0]
    query.run(startingOffsets="earliest", maxOffsetsPerTrigger="2", commitGroup="reports")
    assert lags() == [0, 0]
    open_parts(query.store).offsets.persist()  # as the owner does now and then
    assert not [*(query.path / "config/spark/groups").iterdir()]
    assert lags() == [0, 0]


# -- readers -----------------------------------------------------------------------------------------------------------


def reader(path: Path, **options: str) -> Any:
    from mqstore.spark.source import MQStoreDataSource

    source = MQStoreDataSource({"path": str(path), **options})
    return source.streamReader(schema=source.schema())


@pytest.mark.usefixtures("limits")
def test_a_limit_is_what_spark_says_and_not_what_the_option_says(query: Query) -> None:
    """A trigger may want all there is."""
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

    query.append(30, size=100)
    made = reader(query.path, startingOffsets="earliest", maxOffsetsPerTrigger="7")
    assert made.getDefaultReadLimit() == ReadMaxRows(7)
    assert reader(query.path, maxBytesPerTrigger="99").getDefaultReadLimit() == ReadMaxBytes(99)
    assert reader(query.path).getDefaultReadLimit() == ReadAllAvailable()
    start = made.initialOffset()
    ends = [
        made.latestOffset(start, limit)["s"][str(query.path)]["t"]["0"]
        for limit in (ReadMaxRows(7), ReadMaxBytes(1000), ReadAllAvailable())
    ]
    assert ends == [7, 5, 30]


@pytest.mark.usefixtures("limits")
def test_stream_works_without_limits(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyspark 4.1: no such module, and `latestOffset` is called with nothing."""
    from mqstore.spark import stream

    limited = reader(query.path, maxOffsetsPerTrigger="7")._options
    monkeypatch.setitem(sys.modules, "pyspark.sql.streaming.datasource", None)
    monkeypatch.delattr("pyspark.sql.streaming.datasource")
    assert stream.__file__ is not None
    spec = importlib.util.spec_from_file_location("stream_of_old", stream.__file__)
    assert spec is not None
    assert spec.loader is not None
    old = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(old)
    options = reader(query.path)._options
    query.append(5)
    made = old.stream_reader(options, ["topic"], "binary")
    start = made.initialOffset()
    assert made.latestOffset() == start
    query.append(2)
    end = made.latestOffset()
    [planned] = made.partitions(start, end)
    assert sum(batch.num_rows for batch in made.read(planned)) == 2
    with pytest.raises(ConfigError, match=r"need pyspark 4\.2"):
        old.stream_reader(limited, ["topic"], "binary")


def test_a_reader_that_cannot_be_says_why_whatever_it_is_asked(query: Query) -> None:
    """After a restart Spark may ask for partitions first, or for the latest offset."""
    refused = reader(query.path, endingTimestamp="5")
    for ask in (
        refused.initialOffset,
        lambda: refused.latestOffset({}, None),
        lambda: refused.partitions({}, {}),
        lambda: refused.read(None),
    ):
        with pytest.raises(ConfigError, match="option endingTimestamp is for"):
            ask()


def test_a_reader_copes_with_a_partition_of_nothing(query: Query) -> None:
    query.append(1)
    assert [*reader(query.path).read(None)] == []


def test_options_of_a_batch_are_refused_with_a_sentence(query: Query) -> None:
    query.append(1)
    told = query.fails(endingOffsets="earliest")
    assert "option endingOffsets is for spark.read, not for spark.readStream" in told
    assert "Traceback" not in told
    with pytest.raises(Exception, match=r"option commitGroup is for spark\.readStream, not for spark\.read"):
        query.spark.read.format("mqstore").option("commitGroup", "g").load(str(query.path)).count()
