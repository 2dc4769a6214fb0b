"""Writing inside Spark: what comes in counts once, or not at all, and who gets it wrong is told how it is right.

What Spark does and does not document is pinned here: the names of two local properties, that a batch that is done again
keeps its query and number, that `abort` follows a commit that raised.
"""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import SimulatedClock, StoreConfig
from mqstore.errors import ConfigError
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
from tests.jobs.staged import bodies, manifest, set_bodies
from tests.waiting import until

pytestmark = pytest.mark.spark


def rows_of(path: Path) -> list[dict[str, Any]]:
    """All messages of a store, by queue and offset."""
    with ReadOnlyMessageStore(path) as store:
        refs = [ref for topic in store.topics() for ref in store.queues(topic)]
        return [
            {
                "topic": message.topic,
                "queue_id": message.queue_id,
                "body": message.body,
                "tag": message.tag,
                "keys": message.keys,
                "properties": message.stored_properties(),
                "flag": message.flag,
                "born": message.born_timestamp_ms,
            }
            for ref in refs
            for message in store.iter(*ref)
        ]


def writer(frame: Any, **options: str) -> Any:
    return frame.write.format("mqstore").mode("append").options(**options)


def numbers(spark: Any, start: int, stop: int, partitions: int = 2) -> Any:
    """Bodies "start" ... in a topic."""
    return spark.range(start, stop, 1, partitions).selectExpr("cast(id as string) as body", "'t' as topic")


def texts(start: int, stop: int) -> list[str]:
    return sorted(map(str, range(start, stop)))


# -- batch -------------------------------------------------------------------------------------------------------------


def test_every_column_arrives(spark: Any, tmp_path: Path) -> None:
    begun_ms = int(time.time() * 1000)
    born = datetime(2024, 2, 29, 12, 0, 0, 123_000, UTC)
    due = datetime.now(UTC).replace(microsecond=0) + timedelta(days=2)
    schema = (
        "body binary, topic string, tags string, keys array<string>, properties map<string,string>, queue_id int, "
        "sharding_key string, delay_level int, deliver_time timestamp, delay_seconds bigint, born_timestamp timestamp, "
        "flag int, unique_key string"
    )
    plain = (b"\x00\xff", "a", "tag", ["k1", "k2"], {"colour": "blau ä"}, 3, "g", None, None, None, born, -7, "u-1")
    bare = (b"", "b", None, None, None, None, None, None, None, None, None, None, None)
    leveled = (b"l", "a", None, None, None, 1, None, 2, None, None, None, None, None)
    timed = (b"d", "a", None, None, None, 1, None, None, due, None, None, None, None)
    waiting = (b"w", "a", None, None, None, 1, None, None, None, 3600, None, None, None)
    frame = spark.createDataFrame([plain, bare, leveled, timed, waiting], schema).coalesce(1)

    writer(frame).save(str(tmp_path / "s"))

    found = {(row["topic"], row["body"]): row for row in rows_of(tmp_path / "s")}
    first = found["a", b"\x00\xff"]
    assert (first["tag"], first["keys"], first["flag"], first["queue_id"]) == ("tag", ("k1", "k2"), -7, 3)
    assert first["born"] == born.timestamp() * 1000
    assert first["properties"].items() >= {"colour": "blau ä", "UNIQ_KEY": "u-1", "__SHARDINGKEY": "g"}.items()
    assert ("b", b"") in found
    assert found["SCHEDULE_TOPIC_XXXX", b"l"]["properties"]["REAL_TOPIC"] == "a"
    later = [found["rmq_sys_wheel_timer", body]["properties"] for body in (b"d", b"w")]
    assert later[0]["TIMER_DELIVER_MS"] == str(int(due.timestamp() * 1000))
    assert begun_ms <= int(later[1]["TIMER_DELIVER_MS"]) - 3_600_000 <= time.time() * 1000


def test_written_rows_are_read_back_beside_others(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    writer(numbers(spark, 0, 50)).save(path)
    writer(numbers(spark, 50, 60), topic="other").save(path)

    frame = spark.read.format("mqstore").load(path)

    counts = {row["topic"]: row["count"] for row in frame.groupBy("topic").count().collect()}
    assert counts == {"t": 50, "other": 10}
    assert os.listdir(tmp_path / "s" / "_staging") == []


def test_set_is_one_table_and_overwritable(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "set")
    writer(numbers(spark, 0, 20), target="set").save(path)
    writer(numbers(spark, 20, 30), target="set").save(path)
    assert spark.read.format("mqstore").load(path).count() == 30

    numbers(spark, 100, 105).write.format("mqstore").mode("overwrite").option("target", "set").save(path)

    assert sorted(set_bodies(tmp_path / "set")) == texts(100, 105)


def test_messages_of_a_key_keep_their_order(spark: Any, tmp_path: Path) -> None:
    from mqstore.spark import ordered

    frame = spark.range(0, 400, 1, 4).selectExpr(
        "cast((id * 7) % 400 as int) as flag",
        "concat('k', (id * 7) % 11) as sharding_key",
        "'x' as body",
        "'t' as topic",
    )
    writer(ordered(frame, by=["flag"])).save(str(tmp_path / "s"))

    seen: dict[str, list[int]] = {}
    for row in rows_of(tmp_path / "s"):
        seen.setdefault(row["properties"]["__SHARDINGKEY"], []).append(row["flag"])
    assert len(seen) == 11
    assert all(flags == sorted(flags) for flags in seen.values())
    assert sum(map(len, seen.values())) == 400
    for wrong, says in ((["time"], "UNRESOLVED_COLUMN.*`time`"), ([], "CANNOT_BE_EMPTY")):
        with pytest.raises(Exception, match=says):
            ordered(frame, by=wrong)


def test_a_batch_for_a_store_that_is_open_is_taken_in_by_its_owner(spark: Any, tmp_path: Path) -> None:
    """By itself, while it works; a version that came twice counts once, whether the owner has come to it or not."""
    path = tmp_path / "s"
    with mqstore.open(path) as owner:
        owner.put("t", b"mine")
        for start, version in ((0, "1"), (0, "1"), (10, "2")):
            job = writer(numbers(spark, start, start + 10), target="inbox", queues="3", txnAppId="job")
            job.option("txnVersion", version).save(str(path))

        def found() -> list[str]:
            return sorted(message.body.decode() for ref in owner.queues("t") for message in owner.iter(*ref))

        until(lambda: not os.listdir(path / "inbox") and len(found()) >= 21, 600)
        assert found() == sorted([*texts(0, 20), "mine"])
        assert owner.stats().inbox_refused == 0
        owner.put("t", b"more")  # nobody else has the store

    assert sorted(bodies(path)) == sorted([*texts(0, 20), "mine", "more"])


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "options", "says"),
    [
        (["body", "topic"], {"quues": "3"}, "no option 'quues'.*did you mean 'queues'"),
        (["body", "topic", "7L as queue_id"], {}, r"column 'queue_id' is bigint, and must be int: cast it"),
        (["body", "topic", "timestamp_ntz'2024-01-01' as deliver_time"], {}, "is timestamp_ntz, and must be timestamp"),
    ],
)
def test_a_write_that_cannot_work_says_so_before_a_task_runs(
    spark: Any, tmp_path: Path, columns: list[str], options: dict[str, str], says: str
) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match=says):
        writer(numbers(spark, 0, 2).selectExpr(*columns), **options).save(str(tmp_path / "s"))

    assert not (tmp_path / "s").exists()


def test_a_bad_row_fails_the_job_with_its_place_and_nothing_is_written(spark: Any, tmp_path: Path) -> None:
    writer(numbers(spark, 0, 5)).save(str(tmp_path / "s"))
    bad = numbers(spark, 0, 30, 1).selectExpr("body", "topic", "if(body = '17', 'a|b', 'fine') as tags")

    with pytest.raises(Exception, match=r"row 17 of partition 0, column 'tags': tags 'a\|b': use text without"):
        writer(bad).save(str(tmp_path / "s"))

    assert sorted(bodies(tmp_path / "s")) == texts(0, 5)
    assert os.listdir(tmp_path / "s" / "_staging") == []


def test_overwriting_a_store_has_to_be_confirmed(spark: Any, tmp_path: Path) -> None:
    from pyspark.errors import AnalysisException

    path = str(tmp_path / "s")
    writer(numbers(spark, 0, 5)).save(path)
    again = numbers(spark, 50, 53).write.format("mqstore").mode("overwrite")

    with pytest.raises(AnalysisException, match="would hide the old messages"):
        again.save(path)
    assert sorted(bodies(tmp_path / "s")) == texts(0, 5)

    again.option("confirmOverwrite", "true").save(path)
    with MessageStore(tmp_path / "s") as store:
        from mqstore.broker.background.context import open_parts

        left = sum(store.offsets(*ref)[1] - open_parts(store).offsets.start_of(*ref) for ref in store.queues("t"))
    assert left == 3


@pytest.mark.parametrize("mode", ["error", "ignore"])
def test_spark_refuses_save_modes_that_ask_whether_something_is_there(spark: Any, tmp_path: Path, mode: str) -> None:
    """Its own rule for data sources in Python; the page on writing says so."""
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match="UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):
        numbers(spark, 0, 1).write.format("mqstore").mode(mode).save(str(tmp_path / "s"))


def test_an_owner_that_is_in_the_way_is_named_before_any_task_runs(spark: Any, tmp_path: Path) -> None:
    """The job failed when it committed, after all its tasks."""
    from pyspark.sql.functions import udf

    ran = str(tmp_path / "ran")

    def note(body: str) -> str:
        Path(ran).touch()
        return body

    frame = numbers(spark, 0, 5).withColumn("body", udf(note, "string", useArrow=False)("body"))
    job = writer(frame, lockTimeout="10ms", topic="u")
    with MessageStore(tmp_path / "s") as owner:
        owner.put("t", b"mine")
        with pytest.raises(Exception, match=rf"open for writing in process {os.getpid()}.*lockTimeout=0.01 s.*inbox"):
            job.save(str(tmp_path / "s"))
        assert not Path(ran).exists()

    assert bodies(tmp_path / "s") == ["mine"]
    job.save(str(tmp_path / "s"))
    assert Path(ran).exists()


# -- commits that raise ------------------------------------------------------------------------------------------------


def _test_source(name_: str) -> Any:
    """Our data source under another name, whose commits can be made to raise by files beside the target: `before` or
    `after` the real one. An abort leaves a file, too. Made in a function: so it travels to the workers by value."""
    from mqstore.spark.sink import batch_writer, stream_writer
    from mqstore.spark.source import MQStoreDataSource

    def unlucky(made: Any, path: str) -> Any:
        import os

        class Unlucky(type(made)):  # type: ignore[misc]
            def commit(self, *arguments: Any) -> None:
                if os.path.exists(path + ".before"):
                    raise OSError("the test says: before")
                super().commit(*arguments)
                if os.path.exists(path + ".after"):
                    raise OSError("the test says: after")

            def abort(self, *arguments: Any) -> None:
                with open(path + ".aborted", "a") as file:
                    file.write("x")
                super().abort(*arguments)

        found = Unlucky.__new__(Unlucky)
        found.__dict__.update(made.__dict__)
        return found

    class TestSource(MQStoreDataSource):
        @classmethod
        def name(cls) -> str:
            return name_

        def writer(self, schema: Any, overwrite: bool) -> Any:
            return unlucky(batch_writer(self._raw, schema, overwrite), self._raw["path"])

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
            return unlucky(stream_writer(self._raw, schema, overwrite), self._raw["path"])

    return TestSource


@pytest.fixture(scope="module")
def unlucky(spark: Any) -> str:
    """Name of a format whose commits raise when a file says so."""
    spark.dataSource.register(_test_source("mqstore_unlucky"))
    return "mqstore_unlucky"


@pytest.mark.parametrize("target", ["store", "set"])
def test_raising_commit_is_all_or_nothing(spark: Any, tmp_path: Path, unlucky: str, target: str) -> None:
    path = tmp_path / "s"
    found = bodies if target == "store" else set_bodies
    save = (
        numbers(spark, 0, 10).write.format(unlucky).mode("append").options(target=target, txnAppId="a", txnVersion="1")
    )
    before, after, aborted = (tmp_path / f"s.{name}" for name in ("before", "after", "aborted"))

    before.touch()
    with pytest.raises(Exception, match="the test says: before"):
        save.save(str(path))
    assert aborted.exists()
    assert os.listdir(path / "_staging") == []
    assert target == "store" or set_bodies(path) == []
    before.unlink()
    aborted.unlink()

    after.touch()
    with pytest.raises(Exception, match="the test says: after"):
        save.save(str(path))
    assert aborted.exists()  # Spark aborts what was published
    assert sorted(found(path)) == texts(0, 10)
    after.unlink()

    save.save(str(path))
    assert sorted(found(path)) == texts(0, 10)


# -- streams -----------------------------------------------------------------------------------------------------------


class Lines:
    """A stream of text files: each file is a batch, if they come one by one."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self.checkpoint = folder / "checkpoint"
        self.trigger = "availableNow"
        (folder / "in").mkdir(parents=True)

    def add(self, start: int, stop: int) -> None:
        (self.folder / "in" / f"{time.time_ns()}.txt").write_text("".join(f"{i}\n" for i in range(start, stop)))

    def run(self, path: Path, format_: str = "mqstore", mode: str = "append", **options: str) -> Any:
        """Write all that is there, and end."""
        frame = self.spark.readStream.schema("body string").text(str(self.folder / "in"))
        if mode == "complete":
            frame = frame.groupBy().count().selectExpr("cast(count as string) as body")
        query = (
            frame.writeStream.format(format_)
            .outputMode(mode)
            .options(topic="t", checkpointLocation=str(self.checkpoint), **options)
            .trigger(**{self.trigger: True})
            .start(str(path))
        )
        query.awaitTermination()
        return query

    def forget_last_commit(self) -> None:
        """As if the driver had been killed between the sink's commit and the entry in Spark's log."""
        last = max((self.checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
        last.unlink()
        last.with_name(f".{last.name}.crc").unlink(missing_ok=True)


@pytest.fixture
def lines(spark: Any, tmp_path: Path) -> Lines:
    return Lines(spark, tmp_path / "stream")


@pytest.mark.parametrize(("target", "trigger"), [("store", "availableNow"), ("set", "availableNow"), ("store", "once")])
def test_a_stream_that_is_stopped_and_started_writes_each_row_once(
    lines: Lines, tmp_path: Path, target: str, trigger: str
) -> None:
    """And who writes is known as what Spark calls the query and the batch: the two properties are still called so."""
    path = tmp_path / "s"
    found = bodies if target == "store" else set_bodies
    lines.trigger = trigger
    lines.add(0, 10)
    query = lines.run(path, target=target)
    lines.add(10, 15)
    lines.run(path, target=target)
    assert sorted(found(path)) == texts(0, 15)

    lines.forget_last_commit()
    again = lines.run(path, target=target)

    assert [each["batchId"] for each in again.recentProgress] == [1]  # it was done again, and not counted again
    assert sorted(found(path)) == texts(0, 15)
    if target == "set":
        assert manifest(path)["recorded"] == {query.id: 1}
    else:
        applications = json.loads((path / "config" / "spark" / "txn.json").read_text())["apps"]
        assert {name: each["version"] for name, each in applications.items()} == {query.id: 1}


def test_a_stream_into_a_store_that_is_open_writes_each_row_once(lines: Lines, tmp_path: Path) -> None:
    """Batches that are done again while their bundle waits, and when its owner has taken it in."""
    path = tmp_path / "s"
    with MessageStore(path, config=StoreConfig(clock=SimulatedClock(1_700_000_000_000))) as owner:

        def found() -> list[str]:
            owner.dispatch()
            return sorted(message.body.decode() for ref in owner.queues("t") for message in owner.iter(*ref))

        owner.put("t", b"mine")
        lines.add(0, 10)
        query = lines.run(path, target="inbox")
        assert found() == ["mine"]  # with that clock it takes in when it is told
        assert owner.take_inbox() == 1
        assert found() == sorted([*texts(0, 10), "mine"])

        lines.add(10, 15)
        lines.run(path, target="inbox")
        for taken in (1, 0):
            lines.forget_last_commit()
            again = lines.run(path, target="inbox")
            assert [each["batchId"] for each in again.recentProgress] == [1]
            assert owner.take_inbox() == taken

        lines.add(15, 20)
        lines.run(path, target="inbox")
        assert owner.take_inbox() == 1
        assert found() == sorted([*texts(0, 20), "mine"])
        assert (owner.spliced_version(query.id), owner.stats().inbox_refused) == (2, 0)
        assert (os.listdir(path / "inbox"), os.listdir(path / "_staging")) == ([], [])

    assert sorted(bodies(path)) == sorted([*texts(0, 20), "mine"])


def test_a_batch_whose_commit_raises_is_done_again_and_counts_once(lines: Lines, tmp_path: Path, unlucky: str) -> None:
    path = tmp_path / "s"
    lines.add(0, 10)
    for name in ("before", "after"):
        marker = tmp_path / f"s.{name}"
        marker.touch()
        with pytest.raises(Exception, match=f"the test says: {name}"):
            lines.run(path, unlucky)
        marker.unlink()
    assert (tmp_path / "s.aborted").exists()

    lines.run(path, unlucky)

    assert sorted(bodies(path)) == texts(0, 10)


def test_output_mode_complete_replaces_a_set_and_is_refused_for_a_store(lines: Lines, tmp_path: Path) -> None:
    lines.add(0, 10)
    lines.run(tmp_path / "set", mode="complete", target="set")
    lines.add(10, 14)
    lines.run(tmp_path / "set", mode="complete", target="set")
    assert set_bodies(tmp_path / "set") == ["14"]

    lines.add(14, 15)
    with pytest.raises(Exception, match="like output mode complete"):
        lines.run(tmp_path / "s", mode="complete")


def test_foreach_batch_with_a_transaction_writes_each_batch_once(lines: Lines, tmp_path: Path) -> None:
    def save(frame: Any, batch: int) -> None:
        writer(frame, topic="t", txnAppId="each", txnVersion=str(batch)).save(str(tmp_path / "s"))

    lines.add(0, 10)
    for _ in range(2):
        frame = lines.spark.readStream.schema("body string").text(str(lines.folder / "in"))
        query = frame.writeStream.foreachBatch(save).option("checkpointLocation", str(lines.checkpoint))
        query.trigger(availableNow=True).start().awaitTermination()
        lines.forget_last_commit()

    assert sorted(bodies(tmp_path / "s")) == texts(0, 10)


@pytest.mark.usefixtures("spark_environment")
def test_task_without_batch_id_fails_with_a_remedy() -> None:
    from mqstore.spark.sink import _batch_of

    for told in ({}, {"sql.streaming.queryId": "q"}, {"sql.streaming.queryId": "q", "streaming.sql.batchId": "x"}):
        with pytest.raises(ConfigError, match=r"foreachBatch.*txnAppId.*txnVersion"):
            _batch_of(told.get)
    assert _batch_of({"sql.streaming.queryId": "q-1", "streaming.sql.batchId": "12"}.get) == ("q-1", 12)


@pytest.mark.usefixtures("spark_environment")
def test_invalid_topic_names_its_option(tmp_path: Path) -> None:
    from pyspark.sql.types import StringType, StructField, StructType

    from mqstore.spark.sink import batch_writer, stream_writer

    schema = StructType([StructField("body", StringType())])
    for topic, says in (("a/b", "topic 'a/b' must be 1 to 127"), ("SCHEDULE_TOPIC_XXXX", ".* is a system topic")):
        for writer_of in (batch_writer, stream_writer):
            with pytest.raises(ConfigError, match=f"^option topic='{topic}': {says}"):
                writer_of({"path": str(tmp_path / "s"), "topic": topic}, schema, False)


@pytest.mark.usefixtures("spark_environment")
def test_write_options_are_listed_on_error() -> None:
    """Spark makes one object for a format's options, and does not say whether it is to read or to write."""
    from mqstore.spark.source import MQStoreDataSource

    for given, says in (
        ({"path": "/p", "topci": "a"}, r"^no option 'topci'; did you mean 'topic'\?$"),
        (
            {"path": "/p", "qwertz": ""},
            "^no option 'qwertz'; to write there are path, .*; to read there are path",
        ),
        ({"path": "/p", "topic": ""}, "^option topic='': it "),
        ({"topic": "t"}, r"^no target: give \.save\(PATH\)"),
        ({"path": "/p", "topic": "t", "view": "queues"}, "^option 'topic' is for writing and 'view' for reading; "),
    ):
        with pytest.raises(ConfigError, match=says):
            MQStoreDataSource(given)
    with pytest.raises(ConfigError, match=r"^option 'topic' is for writing; to read there are .*subscribe"):
        MQStoreDataSource({"path": "/p", "topic": "t"}).schema()


@pytest.mark.usefixtures("spark_environment")
def test_a_continuous_trigger_is_refused_rather_than_its_rows_passed_over(tmp_path: Path) -> None:
    """Spark calls `commit([None, None], epoch)` and never `write`. That was taken for a batch without tasks, and the
    checkpoint moved on."""
    from pyspark.sql.types import StringType, StructField, StructType

    from mqstore.spark.sink import stream_writer

    schema = StructType([StructField("body", StringType())])
    stream = stream_writer({"path": str(tmp_path / "s"), "topic": "t"}, schema, False)
    stream.commit([], 0)  # such a batch
    with pytest.raises(ConfigError, match=r"continuous.*processingTime.*availableNow"):
        stream.commit([None, None], 1)
