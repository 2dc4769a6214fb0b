"""Kafka's columns, read and written: names and types of Spark's Kafka source and sink. Without Spark, except for the
last tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from mqstore.broker.routing.selection import group_queue
from mqstore.columnar.encode import Encoder
from mqstore.columnar.inputs import Rules
from mqstore.errors import InvalidMessageError
from mqstore.layout.properties import encode_properties
from mqstore.layout.record import Record, decode_record
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from tests.columnar.support import Odd, instant, read_all, write_store
from tests.jobs.staged import records

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TYPES = {"key": pa.binary(), "value": pa.binary(), "topic": pa.string(), "partition": pa.int32(), "headers": HEADERS}


# -- reading -----------------------------------------------------------------------------------------------------------


def test_kafkas_columns_are_those_of_the_messages(tmp_path: Path) -> None:
    properties = {"KEYS": "k", "TAGS": "a", "colour": "blue", "WAIT": "true", "n": "1"}
    records = [Odd(queue_id=2, body=b"b", properties=encode_properties(properties), store_ms=1_700_000_000_001), Odd()]

    rows = [row for batch in read_all(write_store(tmp_path / "s", records), ["kafka"]) for row in batch.to_pylist()]

    assert [row for row in rows if row["topic"] == "t" and row["partition"] == 2] == [
        {
            "key": b"k",
            "value": b"b",
            "topic": "t",
            "partition": 2,
            "offset": 0,
            "timestamp": instant(1_700_000_000_001),
            "timestampType": 1,
            "headers": [{"key": "colour", "value": b"blue"}, {"key": "n", "value": b"1"}],
        }
    ]
    [bare] = [row for row in rows if row["topic"] == "t" and row["partition"] == 0]
    assert (bare["key"], bare["headers"]) == (None, None)


def test_a_compressed_value_is_inflated(tmp_path: Path) -> None:
    import zlib

    path = write_store(tmp_path / "s", [Odd(body=zlib.compress(b"plain"), sys_flag=0x301)])
    assert b"plain" in [value for batch in read_all(path, ["value"]) for value in batch["value"].to_pylist()]


# -- writing -----------------------------------------------------------------------------------------------------------


def encoded(rows: Sequence[Mapping[str, Any]], **options: Any) -> list[Record]:
    schema = pa.schema([(name, kind) for name, kind in TYPES.items() if any(name in row for row in rows)])
    encoder = Encoder(Rules(), app="job", version=3, partition=1, **options)
    return [decode_record(each) for each in records(encoder.encode(pa.RecordBatch.from_pylist([*rows], schema=schema)))]


def test_a_frame_for_kafka_becomes_messages() -> None:
    headers = [{"key": "colour", "value": b"blue"}, {"key": "gone", "value": None}]
    rows = [
        {"key": b"k", "value": b"a", "topic": "t", "headers": headers},
        {"key": b"k", "value": b"", "topic": "u", "partition": 5, "headers": []},
        {"value": b"c", "topic": "t"},
    ]
    first, second, third = encoded(rows)
    assert (first.topic, first.body, first.queue_id) == ("t", b"a", group_queue("k", 8, "jump"))
    assert (second.topic, second.body, second.queue_id) == ("u", b"", 5)
    assert [{n: v for n, v in r.properties.items() if n != "UNIQ_KEY"} for r in (first, second, third)] == [
        {"colour": "blue", "KEYS": "k", "__SHARDINGKEY": "k"},
        {"KEYS": "k", "__SHARDINGKEY": "k"},
        {},
    ]
    assert encoded(rows, topic="one")[1].topic == "one"


@pytest.mark.parametrize(
    ("row", "column", "says"),
    [
        ({"value": None}, "value", "null"),
        ({"key": b""}, "key", "not blank"),
        ({"key": b"\xff"}, "key", "not UTF-8"),
        ({"partition": 8}, "partition", "0 to 7"),
        ({"headers": [{"key": "a", "value": b"\xff"}]}, "headers", "not UTF-8"),
        ({"headers": [{"key": "a", "value": b"1"}, {"key": "a", "value": b"2"}]}, "headers", "a name is repeated"),
        ({"headers": [{"key": "TAGS", "value": b"1"}]}, "headers", "'TAGS': the name is reserved"),
    ],
)
def test_a_bad_row_is_refused_by_the_name_of_its_column(row: dict[str, Any], column: str, says: str) -> None:
    good = {"key": b"k", "value": b"v", "topic": "t", "partition": 1, "headers": [{"key": "a", "value": b"1"}]}
    with pytest.raises(InvalidMessageError, match=f"^row 1 of partition 1, column '{column}': .*{says}"):
        encoded([good, {**good, **row}, good])
    for header in (None, {"key": None, "value": b"1"}):
        with pytest.raises(InvalidMessageError, match="column 'headers': a header has no name"):
            encoded([{**good, "headers": [header]}])


# -- Spark -------------------------------------------------------------------------------------------------------------


@pytest.mark.spark
def test_spark_writes_and_reads_kafkas_columns(spark: Any, tmp_path: Path) -> None:
    """The schema is the one of Spark's Kafka source with `includeHeaders`."""
    frame = spark.createDataFrame(
        [
            (b"k1", b"v1", "t", 1, [("a", b"1"), ("b", b"2")]),
            (None, b"v2", "t", 1, None),
        ],
        "key binary, value binary, topic string, partition int, headers array<struct<key:string,value:binary>>",
    ).coalesce(1)

    frame.write.format("mqstore").mode("append").save(str(tmp_path / "s"))
    found = spark.read.format("mqstore").option("columns", "kafka").load(str(tmp_path / "s"))

    assert [(field.name, field.dataType.simpleString()) for field in found.schema] == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
        ("headers", "array<struct<key:string,value:binary>>"),
    ]
    assert [tuple(row) for row in found.drop("timestamp").orderBy("offset").collect()] == [
        (b"k1", b"v1", "t", 1, 0, 1, [("a", b"1"), ("b", b"2")]),
        (None, b"v2", "t", 1, 1, 1, None),
    ]


@pytest.mark.spark
def test_spark_writes_strings(spark: Any, tmp_path: Path) -> None:
    frame = spark.sql("select 'k' as key, 'v' as value, array(struct('a' as key, binary('1') as value)) as headers")
    frame.write.format("mqstore").mode("append").option("topic", "t").save(str(tmp_path / "s"))
    with ReadOnlyMessageStore(tmp_path / "s") as store:
        [message] = [message for ref in store.queues("t") for message in store.iter(*ref)]
    assert (message.body, message.keys, message.properties) == (b"v", ("k",), {"a": "1"})
