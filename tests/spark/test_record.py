"""The column `record`: stored messages go from one store into another, unchanged except for their place. Without Spark,
except for the last tests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import StoreConfig
from mqstore.broker.tables.names import is_system_topic
from mqstore.columnar.encode import Encoder
from mqstore.columnar.inputs import Rules, TopicRule
from mqstore.columnar.rows import Policy
from mqstore.errors import CorruptStoreError, InvalidMessageError
from mqstore.jobs.options.options import SinkOptions
from mqstore.jobs.writing.publish import Commit, commit
from mqstore.layout.properties import CRC_TAIL_BYTES, decode_crc_tail, encode_properties
from mqstore.layout.record import Record, decode_record
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
from tests.columnar.support import Odd, many, odd_records, read_all, write_store
from tests.conftest import GOLDEN_NAMES, Golden
from tests.jobs.staged import records, stage
from tests.records import encode_record

Queues = dict[tuple[str, int], list[Record]]


def renamed(topic: str) -> str:
    """The topic of a copy: names that a sink refuses (retry topics, too long ones) become another one."""
    return topic if len(topic) < 128 and "%" not in topic else "moved"


def stored(path: Path) -> Queues:
    """The messages of a store by (topic of the copy, queue id), read from its files, with every field that is not
    decided by the place in a store, or by the length of the topic's name. The store must verify."""
    found: Queues = defaultdict(list)
    with ReadOnlyMessageStore(path) as store:
        assert [*store.verify()] == []
        for topic in store.topics():
            if is_system_topic(topic):
                continue
            name = renamed(topic)
            for ref in store.queues(topic):
                low, high = store.offsets(*ref)
                for physical, size, _ in store.units(*ref, low, high - low).tolist():
                    segment = store.log_files.find(physical)
                    assert segment is not None
                    at = physical - segment.start
                    record = decode_record(bytes(store.log_files.mapping(segment)[at : at + size]))
                    properties = record.properties_bytes
                    tail = CRC_TAIL_BYTES if decode_crc_tail(properties) is not None else 0
                    found[name, ref.queue_id].append(
                        record._replace(
                            checksum=0,
                            physical_offset=0,
                            store_timestamp_ms=0,
                            total_size=0,
                            magic=0,
                            queue_offset=0 if name == "moved" else record.queue_offset - low,
                            topic_bytes=name.encode(),
                            properties_bytes=properties[: len(properties) - tail],
                        )
                    )
    return dict(found)


def copy(path: Path, target: Path, **options: str) -> None:
    """What a job does that copies the store at `path`, one task for each batch."""
    parsed = SinkOptions.parse({"path": str(target), **options})
    batches = []
    for batch in read_all(path, ["topic", "record"]):
        rows = [
            {**row, "topic": renamed(row["topic"])} for row in batch.to_pylist() if not is_system_topic(row["topic"])
        ]
        batches.append(pa.RecordBatch.from_pylist(rows, schema=batch.schema))
    commit(parsed, Commit("copy", 0, stage(parsed, "copy", 0, batches)))


@given(
    records=st.lists(odd_records(), min_size=1, max_size=20),
    source=st.sampled_from(["mqstore", "rocketmq"]),
    target=st.sampled_from(["mqstore", "rocketmq"]),
)
def test_a_copy_equals_the_original_in_every_field(
    tmp_path_factory: pytest.TempPathFactory, records: list[Odd], source: str, target: Any
) -> None:
    folder = tmp_path_factory.mktemp("copy")
    path = write_store(folder / "a", records, source)
    with MessageStore(folder / "b", profile=target, config=StoreConfig(segment_bytes=1 << 16)):
        pass

    copy(path, folder / "b")

    assert stored(folder / "b") == stored(path)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_a_copy_of_a_java_store_equals_the_original(golden: Golden, tmp_path: Path, name: str) -> None:
    path = golden(name).path
    copy(path, tmp_path / "b", queues="16")
    assert stored(tmp_path / "b") == stored(path)


# -- one row -----------------------------------------------------------------------------------------------------------


def record(**fields: Any) -> bytes:
    """A stored record of a store of profile `mqstore`."""
    given = {
        "topic": "t",
        "body": b"body",
        "queue_id": 3,
        "queue_offset": 7,
        "physical_offset": 4096,
        "born_timestamp_ms": 5,
        "store_timestamp_ms": 6,
        "checksum": "crc32c-record",
        **fields,
    }
    return encode_record(**given)


def encoded(rows: Sequence[dict[str, Any]], rules: Rules | None = None, **options: Any) -> list[Record]:
    names = [name for name in ("record", "topic", "queue_id") if name in rows[0]]
    kinds = {"record": pa.binary(), "topic": pa.string(), "queue_id": pa.int32()}
    arrays = [pa.array([row[name] for row in rows], kinds[name]) for name in names]
    encoder = Encoder(rules or Rules(), app="job", version=3, partition=1, **options)
    return [decode_record(each) for each in records(encoder.encode(pa.RecordBatch.from_arrays(arrays, names)))]


def test_a_row_or_the_option_gives_another_place() -> None:
    rows = [
        {"record": record(), "topic": None, "queue_id": None},
        {"record": record(), "topic": "other", "queue_id": 0},
        {"record": record(), "topic": "x" * 127, "queue_id": None},
    ]
    assert [(r.topic, r.queue_id) for r in encoded(rows)] == [("t", 3), ("other", 0), ("x" * 127, 3)]
    assert [(r.topic, r.queue_id) for r in encoded(rows, topic="one")] == [("one", 3), ("one", 0), ("one", 3)]


DAMAGED = record().replace(b"body", b"b0dy")
_EMPTY = record(body=b"", properties=b"a\x01b\x02")


@pytest.mark.parametrize(
    ("row", "column", "says"),
    [
        (None, "record", "null"),
        (b"", "record", "not a record: its lengths"),
        (b"x" * 200, "record", "not a record: its lengths"),
        (record()[:-1], "record", "not a record: its lengths"),
        (record() + b"x", "record", "not a record: its lengths"),
        (DAMAGED, "record", "t, queue 3, offset 7: it is damaged: its checksum"),
        (_EMPTY[:-2] + b"c\x02", "record", "it is damaged: its checksum"),
        (record(sys_flag=0x004), "record", "not committed"),
        (record(sys_flag=0x00C), "record", "not committed"),
        (record(sys_flag=0x080), "record", "a batch in one record"),
        (record(topic="SCHEDULE_TOPIC_XXXX"), "record", "X, queue 3, offset 7: .* belongs to the engine"),
        (record(topic="rmq_sys_wheel_timer"), "record", "belongs to the engine"),
        (record(topic="RMQ_SYS_TRANS_HALF_TOPIC"), "record", "belongs to the engine"),
        (record(topic="%RETRY%g"), "topic", "'%RETRY%g' must be"),
        (record(topic="closed"), "topic", "it may not be written"),
        (record(queue_id=8), "queue_id", "a topic that is not there yet gets"),
        (record(queue_id=-1), "queue_id", "the queues of its topic are 0 to 7"),
        (record(body=bytes(101)), "record", "its body is too large; a message has at most 100 bytes here"),
        (record(properties=encode_properties({"n": "v" * 300})), "record", "a message has at most 300 bytes here"),
        (record(properties=encode_properties({"INNER_NUM": "x"})), "record", "INNER_NUM is 'x', not a number"),
        (record(properties=encode_properties({"INNER_MULTI_DISPATCH": "%LMQ%a"})), "record", "light queues"),
    ],
)  # fmt: skip
def test_a_record_that_cannot_be_copied_is_refused_by_row(row: bytes | None, column: str, says: str) -> None:
    rules = Rules(max_body_bytes=100, max_record_bytes=300, topics={"closed": TopicRule(4, 4, "it may not be written")})
    with pytest.raises(InvalidMessageError, match=f"^row 2 of partition 1, column '{column}': .*{says}"):
        encoded([{"record": each} for each in (record(), record(), row, record())], rules)


def test_a_record_of_the_engine_goes_to_no_topic_of_a_user() -> None:
    with pytest.raises(InvalidMessageError, match="belongs to the engine"):
        encoded([{"record": record(topic="SCHEDULE_TOPIC_XXXX"), "topic": "t"}])


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_damaged_message_has_no_record(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [Odd(body=b"%06d" % i) for i in range(9)])
    log = path / "commitlog" / f"{0:020d}"
    log.write_bytes(log.read_bytes().replace(b"000004", b"00x004"))

    with pytest.raises(CorruptStoreError):
        read_all(path, ["record"])

    kept = [
        row
        for batch in read_all(path, ["record", "error"], policy=Policy(on_corrupt="keep"))
        for row in batch.to_pylist()
    ]
    assert [row["record"] is None for row in kept if row["error"]] == [True]
    assert all(decode_record(row["record"]).total_size == len(row["record"]) for row in kept if not row["error"])


def test_record_column_is_read_on_request(tmp_path: Path) -> None:
    [batch, *_] = read_all(write_store(tmp_path / "s", [Odd()]))
    assert "record" not in batch.schema.names


# -- Spark -------------------------------------------------------------------------------------------------------------


@pytest.mark.spark
def test_spark_copies_a_store_by_record(spark: Any, tmp_path: Path) -> None:
    path = write_store(tmp_path / "a", many(200))
    frame = spark.read.format("mqstore").option("columns", "record").option("minPartitions", 3).load(str(path))

    frame.write.format("mqstore").mode("append").save(str(tmp_path / "b"))

    assert stored(tmp_path / "b") == stored(path)


@pytest.mark.spark
def test_a_stream_mirrors_a_store_by_record(spark: Any, tmp_path: Path) -> None:
    path = write_store(tmp_path / "a", many(200))
    for _ in range(2):
        frame = spark.readStream.format("mqstore").option("columns", "record")
        query = (
            frame.option("startingOffsets", "earliest")
            .load(str(path))
            .writeStream.format("mqstore")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "b"))
        )
        query.awaitTermination()
        assert stored(tmp_path / "b") == stored(path)
        with MessageStore(path) as store:
            store.put_many("orders", [b"more %d" % i for i in range(10)], queue_id=0)


@pytest.mark.spark
def test_a_damaged_record_fails_the_job_before_anything_is_written(spark: Any, tmp_path: Path) -> None:
    frame = spark.createDataFrame([(record(),), (DAMAGED,)], "record binary").coalesce(1)
    with pytest.raises(Exception, match="row 1 of partition 0, column 'record': t, queue 3, offset 7: it is damaged"):
        frame.write.format("mqstore").mode("append").save(str(tmp_path / "b"))
    assert not (tmp_path / "b" / "commitlog").exists()
