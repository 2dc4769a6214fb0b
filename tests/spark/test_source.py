"""The data source inside Spark: what a query gives is what an export gives, whatever Spark hands down."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
from tests.columnar.support import Odd, as_exported, as_row, exported, many, write_store
from tests.conftest import Golden
from tests.log.support import flip

pytestmark = pytest.mark.spark
PUSH_DOWN = "spark.sql.python.filterPushdown.enabled"
T0 = 1_700_000_000_000


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 messages in each of two queues of `t` and of `orders`, and one of `seed`."""
    return write_store(tmp_path_factory.mktemp("source") / "s", many(80))


@pytest.fixture
def pushing(spark: Any) -> Any:
    """The session with the official push-down setting on."""
    spark.conf.set(PUSH_DOWN, "true")
    yield spark
    spark.conf.unset(PUSH_DOWN)


def load(spark: Any, path: Any, **options: str) -> Any:
    return spark.read.format("mqstore").options(**options).load(str(path))


def rows(frame: Any) -> list[dict[str, Any]]:
    """Rows as an export has them; times as UTC instants."""
    found = []
    for row in frame.collect():
        values = row.asDict()
        for name, value in values.items():
            if isinstance(value, bytearray):
                values[name] = bytes(value)
            elif isinstance(value, datetime):
                values[name] = value.astimezone(UTC)
        found.append(values)
    return found


def sorted_rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(found, key=lambda row: row["physical_offset"])


# -- the same as an export ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan", ["queue", "log"])
@pytest.mark.parametrize("name", ["clean", "crashed", "propcrc", "rolled", "trimmed"])
def test_a_java_store_reads_as_it_exports(spark: Any, golden: Golden, name: str, scan: str) -> None:
    path = golden(name).path
    options = {"readBy": scan, "includeSystemTopics": "true", "onCorrupt": "fail" if scan == "queue" else "skip"}
    found = sorted_rows(rows(load(spark, path, **options)))
    expected = [as_row(line) for line in exported(path)]
    # A DataFrame's times are Python's datetimes: strange ones have been nulled by the source as by the model.
    assert [as_exported(row) for row in found] == sorted_rows(expected)
    assert {row["store"] for row in found} == {str(path)}


# What fails is not made smaller: each try is a query. The same in `test_columns`, without Spark, is.


def test_rows_of_a_queue_come_in_order(spark: Any, store: Path) -> None:
    frame = load(spark, store, assign='{"t":[0]}', columns="queue_offset", minPartitions="4")
    assert [row.queue_offset for row in frame.collect()] == [*range(20)]


# -- columns -----------------------------------------------------------------------------------------------------------


def test_columns_can_be_cut_by_option_and_by_schema(spark: Any, store: Path) -> None:
    whole = sorted_rows(rows(load(spark, store)))
    names = ["physical_offset", "body", "properties"]
    expected = [{name: row[name] for name in names} for row in whole]
    assert sorted_rows(rows(load(spark, store, columns=", ".join(names)))) == expected
    schema = "physical_offset bigint, body binary, properties map<string,string>"
    assert sorted_rows(rows(spark.read.format("mqstore").schema(schema).load(str(store)))) == expected
    assert "properties" not in load(spark, store, includeProperties="false").columns
    assert "error" not in load(spark, store).columns
    assert load(spark, store, onCorrupt="keep").columns[-1] == "error"


def test_bodies_can_be_text(spark: Any, tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [Odd(body="grün".encode()), Odd(body=b"\xff\xfe")])
    expected = ["grün", "\ufffd\ufffd"]
    by_option = load(spark, path, subscribe="t", bodyAs="string", columns="body")
    by_schema = spark.read.format("mqstore").schema("body string").option("subscribe", "t").load(str(path))
    for frame in (by_option, by_schema):
        assert [row.body for row in frame.collect()] == expected


def test_a_schema_that_rows_cannot_have_is_refused(spark: Any, store: Path) -> None:
    """One without a column gave no rows, whatever was in the store; of one that has a column twice a view ended in
    Spark's own words, and messages in a task."""
    from pyspark.errors import AnalysisException
    from pyspark.sql.types import MapType, StringType, StructField, StructType

    text = StringType()
    topic = StructField("topic", text)
    cases: tuple[tuple[Any, str, str], ...] = (
        ("bodies binary", "messages", "no column 'bodies'; there are store, topic"),
        ("topic int", "messages", "column 'topic' is string, not int"),
        ([StructField("topic", text, False)], "messages", "column 'topic' is string, not string not null"),
        ([], "messages", "schema: it needs at least one column"),
        ([], "queues", "schema: it needs at least one column"),
        ([topic, topic], "messages", "a column is named twice in topic, topic"),
        ([topic, topic], "queues", "a column is named twice in topic, topic"),
        ([StructField("properties", MapType(text, text, False))], "messages", "their values can be null"),
    )
    for fields, view, says in cases:
        schema = StructType(fields) if isinstance(fields, list) else fields
        reader = spark.read.format("mqstore").schema(schema).option("view", view)
        with pytest.raises(AnalysisException, match=f"ConfigError: .*{says}"):
            reader.load(str(store)).count()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"colums": "body"}, r"no option 'colums'; did you mean 'columns'\?\s+SQLSTATE"),
        ({"startingOffset": "latest"}, "no option 'startingoffset'; did you mean 'startingOffsets'"),
        ({"kafka.bootstrap.servers": "h:1"}, "no option 'kafka.bootstrap.servers': a store is a folder, not"),
        ({"readBy": "fast"}, "option readBy='fast'"),
        ({"columns": "bodies"}, "no column 'bodies'"),
        ({"view": "queues", "columns": "body"}, "the view queues has no 'body'; its columns are store, topic"),
        ({"view": "queues", "columns": "topic,topic"}, "a column is named twice in topic, topic"),
    ],
)
def test_a_wrong_option_is_refused_at_load(spark: Any, store: Path, options: dict[str, str], says: str) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match=says) as caught:
        load(spark, store, **options)
    assert caught.value.getCondition() == "PYTHON_DATA_SOURCE_ERROR"


def test_a_table_by_name_is_refused_and_a_view_works(spark: Any, store: Path) -> None:
    """Spark gave `option.columns` to CREATE TABLE, and no option at all to a query of the table."""
    options = f"USING mqstore OPTIONS (path '{store}', columns 'queue_offset')"
    with pytest.raises(Exception, match="use CREATE TEMPORARY VIEW name USING mqstore OPTIONS"):
        spark.sql(f"CREATE TABLE messages {options}")
    with pytest.raises(Exception, match="use CREATE TEMPORARY VIEW name USING mqstore OPTIONS"):
        spark.sql(f"CREATE TABLE messages USING mqstore LOCATION '{store}'")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW messages {options}")
    assert spark.sql("SELECT * FROM messages").columns == ["queue_offset"]
    spark.catalog.dropTempView("messages")


_NEW_TABLES: dict[str, Callable[[Any, str], Any]] = {
    "saveAsTable": lambda frame, path: (
        frame.write.format("mqstore").mode("append").option("path", path).saveAsTable("messages")
    ),
    "saveAsTable, overwrite": lambda frame, path: (
        frame.write.format("mqstore")
        .mode("overwrite")
        .options(path=path, confirmOverwrite="true")
        .saveAsTable("messages")
    ),
    "writeTo.create": lambda frame, path: frame.writeTo("messages").using("mqstore").option("path", path).create(),
    "CREATE TABLE AS SELECT": lambda frame, path: frame.sparkSession.sql(
        f"CREATE TABLE messages USING mqstore OPTIONS (path '{path}') AS SELECT 'b' AS body, 't' AS topic"
    ),
}


@pytest.mark.parametrize("way", _NEW_TABLES)
def test_write_that_makes_a_table_is_refused(spark: Any, tmp_path: Path, way: str) -> None:
    """It left a table that could not be read, because Spark passes no option to a query of it."""
    frame = spark.range(0, 4, 1, 2).selectExpr("cast(id as string) as body", "'t' as topic")
    with pytest.raises(Exception, match="use CREATE TEMPORARY VIEW name USING mqstore OPTIONS"):
        _NEW_TABLES[way](frame, str(tmp_path / "s"))
    assert not spark.catalog.tableExists("messages")
    assert not (tmp_path / "s" / "commitlog").exists()


def test_table_with_columns_says_what_to_use(spark: Any, store: Path) -> None:
    """Spark makes it without a call of ours, so its use is refused."""
    spark.sql(f"CREATE TABLE messages (topic string, body binary) USING mqstore OPTIONS (path '{store}')")
    try:
        for statement in ("SELECT * FROM messages", "INSERT INTO messages VALUES ('t', X'62')"):
            with pytest.raises(Exception, match="use CREATE TEMPORARY VIEW name USING mqstore OPTIONS"):
                spark.sql(statement).collect()
    finally:
        spark.sql("DROP TABLE messages")


def test_our_message_stands_at_the_top_of_what_spark_shows(spark: Any, store: Path, tmp_path: Path) -> None:
    """Behind Spark's own words for the step, and no traceback. Leans on SPARK_HIDE_TRACEBACK, which a worker of Spark
    looks at when it reports an error (`telling`)."""
    path = write_store(tmp_path / "s", many(8))
    log = path / "commitlog" / f"{0:020d}"
    with ReadOnlyMessageStore(path) as opened:
        place = int(opened.units("t", 0, 1, 1)["physical_offset"][0])
    flip(log, place + 90)
    wrong = spark.read.format("mqstore").schema("bodies binary")
    for ask, begins in (
        (
            lambda: load(spark, store, readBy="fast"),
            "ConfigError: option readBy='fast': unknown value; give auto, queue or log",
        ),
        (lambda: wrong.load(str(store)).collect(), "ConfigError: schema: no column 'bodies'; there are store, topic"),
        (lambda: load(spark, tmp_path / "x").collect(), f"NotAStoreError: {tmp_path / 'x'} is not a store"),
        (lambda: load(spark, store, subscribe="u").collect(), "TopicNotFoundError: no store has the topic 'u', which"),
        (lambda: load(spark, path).collect(), f"CorruptStoreError: {path}: bad_record: commitlog/{0:020d} at"),
    ):
        with pytest.raises(Exception, match="mqstore") as caught:
            ask()
        first = str(caught.value).partition("mqstore.errors.")
        assert first[2].startswith(begins)
        assert len(first[0].strip().splitlines()) == 1  # [CONDITION] Spark's words for the step:
        assert "Traceback" not in str(caught.value)


# -- filters -----------------------------------------------------------------------------------------------------------


def test_one_frame_serves_many_queries_whatever_the_session_has_set(pushing: Any, store: Path) -> None:
    frame = load(pushing, store, columns="topic,queue_id")
    assert frame.where("topic = 't'").count() == 40
    assert frame.where("topic = 't' or queue_id = 1").count() == 60
    assert frame.where("topic = 't'").union(frame.where("topic = 'seed'")).count() == 41
    assert frame.count() == 81


# -- many stores, views, damage ----------------------------------------------------------------------------------------


def test_many_stores_are_one_table(spark: Any, tmp_path: Path) -> None:
    for name, count in (("a", 8), ("b", 12)):
        write_store(tmp_path / name, many(count))
    paths = json.dumps({name: str(tmp_path / name) for name in "ab"})
    frame = spark.read.format("mqstore").option("paths", paths).option("subscribe", "t").load()
    assert {row["store"]: row["count"] for row in frame.groupBy("store").count().collect()} == {"a": 4, "b": 6}
    assert frame.where("store = 'b'").count() == 6
    both = spark.read.format("mqstore").load([str(tmp_path / name) for name in "ab"])
    assert both.select("store").distinct().count() == 2
    assert load(spark, tmp_path / "[ab]", subscribe="t").count() == 10


def test_views_are_tables_too(spark: Any, tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(40))
    queues = rows(load(spark, path, view="queues").where("topic = 't'").orderBy("queue_id"))
    with ReadOnlyMessageStore(path) as opened:
        sizes = [int(opened.units("t", q, 0, 10)["size"].sum()) for q in range(2)]
    assert [(row["min_offset"], row["max_offset"], row["messages"], row["bytes"]) for row in queues] == [
        (0, 10, 10, sizes[0]),
        (0, 10, 10, sizes[1]),
    ]
    assert queues[0]["first_store_timestamp"] == datetime.fromtimestamp(T0 / 1000, UTC)
    assert {row["state"] for row in queues} == {"whole"}
    segments = rows(load(spark, path, view="segments", columns="base,messages,sealed"))
    assert [row["messages"] for row in segments] == [41]
    assert segments[0] == {"base": 0, "messages": 41, "sealed": False}
    assert rows(load(spark, path, view="groups")) == []


def test_glob_view_is_fixed_when_planned(spark: Any, tmp_path: Path) -> None:
    """Tasks were told the number of their store among those that the glob fits. Spark uses the plan of a frame again:
    when a store had come that sorts before the others, the rows of the last one were missing, without a word; when one
    had gone, the query failed with an IndexError."""
    for name in ("b", "c"):
        write_store(tmp_path / name, many(4))
    frame = load(spark, tmp_path / "*", view="queues")
    wanted = {str(tmp_path / name) for name in ("b", "c")}
    assert {row["store"] for row in rows(frame)} == wanted

    write_store(tmp_path / "a", many(4))

    assert {row["store"] for row in rows(frame)} == wanted


def test_reading_leaves_no_trace_and_takes_no_lock(spark: Any, tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(20))
    with MessageStore(path) as writer:
        before = sorted(file.relative_to(path) for file in path.rglob("*"))
        assert load(spark, path).count() == 21
        writer.put("t", b"more")
        assert load(spark, path).count() == 22
        assert sorted(file.relative_to(path) for file in path.rglob("*")) == before


def test_nothing_stays_mapped_or_open_in_a_worker(spark: Any, tmp_path: Path) -> None:
    """A worker lives on; what it kept mapped would keep the disk space of segments that retention has deleted, and a
    descriptor more a query would end it some day."""
    path = write_store(tmp_path / "s", many(300))

    def looked(_: Any) -> list[tuple[int, int, list[str]]]:
        import os

        with open("/proc/self/maps") as file:
            found = [line for line in file if str(path) in line]
        names = os.listdir("/proc/self/fd")
        for fd in names:
            with contextlib.suppress(OSError):
                found += [name for name in [os.readlink(f"/proc/self/fd/{fd}")] if str(path) in name]
        return [(os.getpid(), len(names), found)]

    descriptors: dict[int, set[int]] = {}
    for turn in range(50):
        assert load(spark, path, columns="body").count() == 301
        if turn % 10 == 9:
            for worker, count, kept in spark.sparkContext.parallelize(range(4), 4).flatMap(looked).collect():
                assert kept == []
                descriptors.setdefault(worker, set()).add(count)
    assert all(max(counts) - min(counts) <= 2 for counts in descriptors.values())


@pytest.mark.parametrize("scan", ["auto", "queue", "log"])
def test_a_store_without_messages_reads_as_no_rows(spark: Any, tmp_path: Path, scan: str) -> None:
    """Its plan has no partition: then Spark runs a task all the same, and gives it a partition of nothing."""
    from mqstore.spark.source import MQStoreDataSource

    MessageStore(tmp_path / "s").close()
    source = MQStoreDataSource({"path": str(tmp_path / "s"), "readBy": scan})
    assert source.reader(source.schema()).partitions() == []

    frame = load(spark, tmp_path / "s", readBy=scan)

    assert frame.columns == load(spark, tmp_path / "s").columns != []
    assert (frame.collect(), frame.where("topic = 't'").count()) == ([], 0)


@pytest.mark.usefixtures("spark_environment")
def test_a_reader_copes_with_a_partition_of_nothing(store: Path) -> None:
    from pyspark.sql.datasource import InputPartition

    from mqstore.spark.source import MQStoreDataSource

    for view in ("messages", "queues"):
        source = MQStoreDataSource({"path": str(store), "view": view})
        reader = source.reader(source.schema())
        assert [*reader.read(reader.partitions()[0])] != []
        assert [[*reader.read(nothing)] for nothing in (None, InputPartition(None))] == [[], []]


# -- registration ------------------------------------------------------------------------------------------------------


def test_registering_twice_or_once_is_harmless(spark: Any, store: Path) -> None:
    from mqstore.spark import register

    for _ in range(2):
        register(spark)
        assert load(spark, store).where("topic = 't'").count() == 40


def test_a_frame_reads_what_was_there_when_it_was_first_used(spark: Any, tmp_path: Path) -> None:
    """Spark plans it once. A new frame sees what is new, and nothing of a store is remembered by its path."""
    with MessageStore(write_store(tmp_path / "s", many(8))) as writer:
        frame = load(spark, tmp_path / "s", subscribe="t")
        assert frame.count() == 4
        writer.put("t", b"more")
        assert frame.count() == 4
        assert load(spark, tmp_path / "s", subscribe="t").count() == 5
    shutil.rmtree(tmp_path / "s")
    write_store(tmp_path / "s", many(20))
    assert load(spark, tmp_path / "s", subscribe="t").count() == 10


def test_filtered_query_reads_new_rows_by_setting(pushing: Any, tmp_path: Path) -> None:
    """Pins what the documentation says of frames: Spark plans one anew for each filter, also of a frame that takes none
    over, and goes on with that plan. Within a query all readings of a frame are the same."""
    with MessageStore(write_store(tmp_path / "s", many(8))) as writer:
        frame = load(pushing, tmp_path / "s", columns="topic")
        assert frame.count() == 9
        writer.put("t", b"more")
        assert frame.count() == 9
        assert frame.where("topic = 't'").union(frame).count() == 5 + 10
        assert frame.count() == 10
