"""Rows as records: they are what a put writes, byte for byte but for the place, or the row is refused by name."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import SendReceipt, SimulatedClock, StoreConfig
from mqstore.broker.background.context import Parts, open_parts
from mqstore.broker.routing.selection import group_queue
from mqstore.columnar.encode import Encoder, derived_prefix
from mqstore.columnar.inputs import INPUTS, Rules, TopicRule, check_columns
from mqstore.errors import ConfigError, InvalidMessageError
from mqstore.layout.properties import RESERVED
from mqstore.layout.record import Record, decode_record
from mqstore.log.store import MessageStore
from tests.jobs.staged import records

NOW = 1_700_000_000_000
TYPES = {
    "body": pa.binary(),
    "topic": pa.string(),
    "tags": pa.string(),
    "keys": pa.string(),
    "properties": pa.map_(pa.string(), pa.string()),
    "queue_id": pa.int32(),
    "sharding_key": pa.string(),
    "delay_level": pa.int32(),
    "deliver_time": pa.timestamp("us", "UTC"),
    "delay_seconds": pa.int64(),
    "born_timestamp": pa.timestamp("us", "UTC"),
    "flag": pa.int32(),
    "unique_key": pa.string(),
}
_UNSET = (slice(8, 12), slice(20, 36), slice(56, 64))
"""checksum; queue offset and physical offset; store time."""


def frame(rows: Sequence[Mapping[str, Any]], **types: Any) -> pa.RecordBatch:
    """A batch of these rows with the columns that any of them has."""
    names = [name for name in TYPES if any(name in row for row in rows)]
    fields = [pa.field(name, types.get(name, TYPES[name])) for name in names]
    columns = [
        pa.array([_cell(name, row.get(name)) for row in rows], each.type)
        for name, each in zip(names, fields, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def _cell(name: str, value: Any) -> Any:
    return list(value.items()) if name == "properties" and isinstance(value, dict) else value


def encoder(rules: Rules | None = None, **options: Any) -> Encoder:
    given = {"app": "job", "version": 3, "partition": 1, "clock": SimulatedClock(NOW), **options}
    return Encoder(rules or Rules(), **given)


def encode(rows: Sequence[Mapping[str, Any]], rules: Rules | None = None, **options: Any) -> list[bytes]:
    return records([*encoder(rules, **options).encode(frame(rows))])


def decoded(rows: Sequence[Mapping[str, Any]], rules: Rules | None = None, **options: Any) -> list[Record]:
    return [decode_record(record) for record in encode(rows, rules, **options)]


# -- as a put writes it ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterable[Parts]:
    """A store whose clock stands still; it may hold what other tests put."""
    config = StoreConfig(segment_bytes=1 << 20, clock=SimulatedClock(NOW), default_queues=8)
    with MessageStore(tmp_path_factory.mktemp("parts") / "store", config=config) as store:
        yield open_parts(store)


def put_bytes(parts: Parts, receipt: SendReceipt) -> bytes:
    """The record that a put wrote, with nothing in it that depends on where it lies."""
    store = parts.store
    segment = store.log_files.find(receipt.physical_offset)
    assert segment is not None
    at = receipt.physical_offset - segment.start
    record = bytearray(store.log_files.mapping(segment)[at : at + receipt.size])
    for part in _UNSET:
        record[part] = bytes(part.stop - part.start)
    return bytes(record)


def put_row(parts: Parts, row: Mapping[str, Any]) -> bytes:
    """`row` by the engine's own way in."""
    keys = row.get("keys")
    receipt = parts.router.put(
        row["topic"],
        row["body"],
        queue_id=row.get("queue_id"),
        tag=row.get("tags"),
        keys=keys,
        properties=row.get("properties"),
        unique_key=row["unique_key"],
        flag=row.get("flag", 0),
        message_group=row.get("sharding_key"),
        delay_level=row.get("delay_level"),
        deliver_at=row.get("deliver_time"),
    )
    return put_bytes(parts, receipt)


_text = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=9).filter(
    lambda t: bool(t.strip())
)
_word = _text.filter(lambda t: " " not in t)
_name = _text.filter(lambda t: t not in RESERVED)
_moment = st.datetimes(
    datetime.datetime(2023, 11, 1), datetime.datetime(2023, 11, 30), timezones=st.just(datetime.UTC)
).filter(lambda when: when.microsecond % 1000 == 0)  # the engine's datetimes are cut to milliseconds, ours rounded up


@st.composite
def good_rows(draw: st.DrawFn) -> dict[str, Any]:
    row: dict[str, Any] = {
        "topic": draw(st.sampled_from(["orders", "b", "T_-9", "x" * 127])),
        "body": draw(st.binary(max_size=30)),
        "unique_key": draw(_text),
    }
    optional = {
        "tags": _text.filter(lambda t: "|" not in t),
        "keys": _word,
        "properties": st.dictionaries(_name, _text, max_size=3),
        "flag": st.integers(-(1 << 31), (1 << 31) - 1),
        "queue_id": st.integers(0, 7),
        "sharding_key": _text,
    }
    for name, values in optional.items():
        if draw(st.booleans()):
            row[name] = draw(values)
    kind = draw(st.sampled_from(["now", "level", "time"]))
    if kind == "level":
        row["delay_level"] = draw(st.integers(0, 40))
    elif kind == "time":
        row["deliver_time"] = draw(_moment)
    if "queue_id" not in row:
        row["sharding_key"] = row.get("sharding_key", "g")
    if kind != "now" and "sharding_key" in row:  # a producer's put refuses both together; ours has no reason to
        del row["sharding_key"]
        row.setdefault("queue_id", 3)
    if "sharding_key" in row:
        row.pop("queue_id", None)
    return row


@given(rows=st.lists(good_rows(), min_size=1, max_size=6))
def test_a_row_becomes_the_record_that_a_put_of_it_writes(parts: Parts, rows: list[dict[str, Any]]) -> None:
    assert encode(rows) == [put_row(parts, row) for row in rows]


@pytest.mark.parametrize("seconds", [1, 59, 86_400])
def test_delay_seconds_becomes_what_a_record_with_that_property_becomes(parts: Parts, seconds: int) -> None:
    [found] = encode([{"topic": "t", "body": b"x", "queue_id": 2, "unique_key": "u", "delay_seconds": seconds}])
    parts.topics.create("t", queues=8)

    put = parts.router.append("t", 2, b"x", {"UNIQ_KEY": "u", "TIMER_DELAY_SEC": str(seconds)})

    assert found == put_bytes(parts, put)


def test_a_deliver_time_is_never_rounded_down() -> None:
    when = datetime.datetime(2030, 1, 1, 0, 0, 0, 1, datetime.UTC)
    rules = Rules(max_delay_ms=1 << 60)
    [record] = decoded([{"topic": "t", "body": b"", "queue_id": 0, "deliver_time": when}], rules)

    assert record.properties["TIMER_DELIVER_MS"] == "1893456000001"


def test_group_routes_and_queue_id_wins() -> None:
    rows: list[dict[str, Any]] = [
        {"topic": "t", "body": b"", "sharding_key": "order-1", "delay_level": 2},
        {"topic": "t", "body": b"", "sharding_key": "order-1", "queue_id": 6},
        {"topic": "t", "body": b"", "sharding_key": "order-1"},
    ]
    waiting, named, plain = decoded(rows)

    assert (waiting.topic, waiting.queue_id) == ("SCHEDULE_TOPIC_XXXX", 1)
    assert waiting.properties.items() >= {"REAL_TOPIC": "t", "REAL_QID": "3", "__SHARDINGKEY": "order-1"}.items()
    assert (named.queue_id, named.properties["__SHARDINGKEY"]) == (6, "order-1")
    assert plain.queue_id == 3  # delivery#queue-choice


@pytest.mark.parametrize("how", ["jump", "siphash24"])
@given(keys=st.lists(_text, min_size=1, max_size=9), queues=st.integers(1, 40))
def test_group_goes_to_the_producer_queue(how: Any, keys: list[str], queues: int) -> None:
    rules = Rules(new_queues=queues, group_hash=how)

    found = [
        record.queue_id for record in decoded([{"topic": "t", "body": b"", "sharding_key": k} for k in keys], rules)
    ]

    assert found == [group_queue(key, queues, how) for key in keys]


def test_rows_without_queue_rotate_repeatably() -> None:
    rows = [{"topic": "ab"[i % 2], "body": b""} for i in range(16)]
    rules = Rules(new_queues=4)

    one = encoder(rules)
    split = records([*one.encode(frame(rows[:5])), *one.encode(frame(rows[5:]))])
    found = [(record.topic, record.queue_id) for record in map(decode_record, split)]

    assert split == encode(rows, rules)
    for topic in "ab":
        queues = [queue for name, queue in found if name == topic]
        assert queues == [(queues[0] + i) % 4 for i in range(8)]
    assert len({tuple(encode(rows, rules, partition=p)) for p in range(8)}) > 1


def test_derived_unique_key_has_its_parts() -> None:
    rows = [{"topic": "t", "body": b"", "unique_key": None}] * 3
    one = encoder()
    keys = [decode_record(each).properties["UNIQ_KEY"] for _ in (1, 2) for each in records(one.encode(frame(rows)))]

    assert keys == [derived_prefix("job", 3, 1) + f"{row:010X}" for row in range(6)]
    assert all(len(key) == 34 and key.startswith("01") for key in keys)
    others = [derived_prefix("job", 3, 2), derived_prefix("job", 4, 1), derived_prefix("jo", 3, 1)]
    assert len({derived_prefix("job", 3, 1), *others}) == 4


def test_a_key_that_is_given_is_kept_and_a_null_is_derived() -> None:
    given, derived = decoded([{"topic": "t", "body": b"", "unique_key": k} for k in ("mine", None)])

    assert (given.properties["UNIQ_KEY"], derived.properties["UNIQ_KEY"][-10:]) == ("mine", "0000000001")


def test_columns_of_any_form_that_spark_sends_are_taken() -> None:
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(["ä", "b"], pa.large_string()),
            pa.array([["k1", "k2"], []], pa.list_(pa.large_string())),
            pa.array([None, [("n", "v"), ("gone", None)]], pa.map_(pa.large_string(), pa.large_string())),
            pa.array([5, None], pa.int32()),
            pa.array(
                [None, datetime.datetime(2020, 1, 1, 0, 0, 0, 999_999, datetime.UTC)], pa.timestamp("us", "Asia/Tokyo")
            ),
        ],
        names=["body", "keys", "properties", "delay_seconds", "born_timestamp"],
    )
    late, plain = [decode_record(each) for each in records(encoder(topic="t").encode(batch))]

    assert (late.topic, late.body, late.properties["KEYS"]) == ("rmq_sys_wheel_timer", "ä".encode(), "k1 k2")
    assert late.born_timestamp_ms == NOW
    assert (plain.body, plain.born_timestamp_ms) == (b"b", 1_577_836_800_999)
    assert {name: value for name, value in plain.properties.items() if name != "UNIQ_KEY"} == {"n": "v"}


def test_lists_and_maps_are_cut_where_the_rows_are() -> None:
    """Arrow cuts neither: a slice of a column points into the values of the whole."""
    rows = 23
    keys = [None if i % 4 == 0 else [f"k{i}-{j}" for j in range(i % 3)] for i in range(rows)]
    properties = [None if i % 5 == 0 else [(f"n{j}", str(i)) for j in range(i % 4)] for i in range(rows)]
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array([b"%d" % i for i in range(rows)]),
            pa.array(keys, pa.list_(pa.string())),
            pa.array(properties, TYPES["properties"]),
            pa.array([1 if i % 6 == 0 else None for i in range(rows)], pa.int32()),
        ],
        names=["body", "keys", "properties", "delay_level"],
    )
    pieces = [*encoder(topic="t", max_rows=4).encode(batch.slice(2))]

    assert [piece.records for piece in pieces] == [4, 4, 4, 4, 4, 1]
    for i, record in enumerate(map(decode_record, records(pieces)), 2):
        found = record.properties
        assert (record.body, found.get("KEYS")) == (b"%d" % i, " ".join(keys[i] or []) or None)
        assert {name: value for name, value in found.items() if name.startswith("n")} == dict(properties[i] or [])
        assert ("DELAY" in found) == (i % 6 == 0)


def test_large_batches_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"topic": "t", "body": bytes(i % 50)} for i in range(100)]
    whole = encode(rows)
    monkeypatch.setattr("mqstore.columnar.encode._SLICE_ROWS", 7)
    monkeypatch.setattr("mqstore.columnar.encode._SLICE_BYTES", 40)

    pieces = [*encoder().encode(frame(rows))]

    assert len(pieces) > 30
    assert records(pieces) == whole


def test_existing_topic_keeps_queues_and_form() -> None:
    long = "%RETRY%" + "g" * 200
    rules = Rules(topics={"t": TopicRule(2, 5), long: TopicRule(1, 1)}, new_queues=9)
    rows: list[dict[str, Any]] = [{"topic": "t", "body": b"", "sharding_key": f"g{i}"} for i in range(20)]
    rows += [{"topic": "t", "body": b"", "queue_id": 4}, {"topic": long, "body": b"x"}]

    found = decoded(rows, rules)

    assert {record.queue_id for record in found[:20]} == {0, 1}
    assert (found[20].queue_id, found[21].topic, found[21].body) == (4, long, b"x")


# -- refusals ----------------------------------------------------------------------------------------------------------

GOOD = {"topic": "t", "body": b"x"}


@pytest.mark.parametrize(
    ("row", "column", "says"),
    [
        ({"body": None}, "body", "null: a message has a body"),
        ({"body": bytes(101)}, "body", "101 bytes: a message has at most 100 bytes here"),
        (
            {"body": bytes(100), "properties": {"n": "v" * 200}},
            "body",
            "at most 300 bytes here, with topic and properties",
        ),
        ({"topic": None}, "topic", "give each row a topic, or option topic"),
        ({"topic": ""}, "topic", "''"),
        ({"topic": "a b"}, "topic", "must be 1 to 127 letters"),
        ({"topic": "x" * 128}, "topic", "must be 1 to 127 letters"),
        ({"topic": "../up"}, "topic", "must be 1 to 127 letters"),
        ({"topic": "SCHEDULE_TOPIC_XXXX"}, "topic", "is a system topic"),
        ({"topic": "closed"}, "topic", "may not be written"),
        ({"tags": " "}, "tags", "not blank"),
        ({"tags": ""}, "tags", "not blank"),
        ({"tags": "a||b"}, "tags", "without '|'"),
        ({"tags": "a\tb"}, "tags", "control character"),
        ({"tags": "a\x85b"}, "tags", "control character"),
        ({"tags": "a\x7fb"}, "tags", "control character"),
        ({"tags": "\u3000"}, "tags", "not blank"),
        ({"keys": "a\x02b"}, "keys", "control character"),
        ({"properties": {"": "v"}}, "properties", "not blank"),
        ({"properties": {"n": ""}}, "properties", "not blank"),
        ({"properties": {"n": "a\x02b"}}, "properties", "control character"),
        ({"properties": {"a\x01": "v"}}, "properties", "control character"),
        ({"properties": {"TAGS": "v"}}, "properties", "'TAGS': the name is reserved; use a column (TAGS: tags, "),
        ({"properties": {"PGROUP": "v"}}, "properties", "'PGROUP': the name is reserved"),
        ({"properties": {"__RMQ.TRANSIENT.x": "v"}}, "properties", "reserved"),
        ({"properties": {"n": "v" * 32767}}, "properties", "take 32767 bytes at most"),
        ({"queue_id": 8}, "queue_id", "8: the queues of its topic are 0 to 7"),
        (
            {"queue_id": 8, "topic": "new"},
            "queue_id",
            "are 0 to 7: a topic that is not there yet gets as many as option queues says",
        ),
        ({"queue_id": -1}, "queue_id", "-1: the queues of its topic are 0 to 7"),
        ({"sharding_key": "g" * 64}, "sharding_key", "64 bytes: a message group takes 63 at most"),
        ({"sharding_key": "ä" * 32}, "sharding_key", "64 bytes: a message group takes 63 at most"),
        ({"sharding_key": "\n"}, "sharding_key", "not blank"),
        ({"delay_level": -1}, "delay_level", "-1: a delay is 0 or more"),
        ({"delay_seconds": -1}, "delay_seconds", "-1: a delay is 0 or more"),
        ({"delay_seconds": 9 * 10**18}, "delay_seconds", "max_delay allows 31622400 seconds"),
        ({"delay_seconds": 366 * 86_400 + 1}, "delay_seconds", "exceeds max_delay"),
        ({"deliver_time": datetime.datetime(2200, 1, 1, tzinfo=datetime.UTC)}, "deliver_time", "exceeds max_delay"),
        (
            {"deliver_time": datetime.datetime(1969, 1, 1, tzinfo=datetime.UTC)},
            "deliver_time",
            "must be a number from 0",
        ),
        ({"delay_level": 1, "delay_seconds": 1}, "delay_level", "only one"),
        ({"delay_level": 0, "delay_seconds": 0}, "delay_level", "only one"),
        ({"unique_key": ""}, "unique_key", "not blank"),
    ],
)
def test_a_bad_row_is_refused_by_number_column_value_and_rule(row: dict[str, Any], column: str, says: str) -> None:
    rules = Rules(max_body_bytes=100, max_record_bytes=300, topics={"closed": TopicRule(4, 4, "it may not be written")})
    if "properties" in row and len(str(row)) > 1000:
        rules = Rules()
    one = encoder(rules)
    [*one.encode(frame([GOOD] * 4))]

    with pytest.raises(InvalidMessageError) as caught:
        [*one.encode(frame([GOOD, GOOD, {**GOOD, **row}, GOOD]))]

    assert str(caught.value).startswith(f"row 6 of partition 1, column {column!r}: ")
    assert says in str(caught.value)
    assert caught.value.field == column


def test_a_value_of_any_length_makes_a_message_that_can_be_read() -> None:
    with pytest.raises(InvalidMessageError, match=r"use text without '\|', and not blank$") as caught:
        encode([{**GOOD, "tags": "a|" * 1_000_000}])

    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("words", "says"), [(["a", None], "null"), (["a b"], "no blanks"), ([""], "not blank"), (["a\x01"], "control")]
)
def test_a_bad_key_of_an_array_is_refused(words: list[Any], says: str) -> None:
    batch = pa.RecordBatch.from_arrays(
        [pa.array([b"", b"", b""]), pa.array([["fine"], None, words], pa.list_(pa.string()))], names=["body", "keys"]
    )
    with pytest.raises(InvalidMessageError, match=rf"row 2 of partition 1, column 'keys': .*{says}"):
        [*encoder(topic="t").encode(batch)]


@pytest.mark.parametrize("column", ["tags", "keys", "sharding_key", "unique_key", "topic"])
def test_text_that_is_not_utf8_is_refused(column: str) -> None:
    """Spark's cast of a binary to a string checks nothing."""
    bad = pa.Array.from_buffers(pa.string(), 1, pa.array([b"a\xff\xfe"]).buffers())
    batch = pa.RecordBatch.from_arrays([pa.array([b""]), bad], names=["body", column])

    with pytest.raises(InvalidMessageError, match=rf"row 0 .* column '{column}': b'a\\xff\\xfe': it is not UTF-8"):
        [*encoder(topic=None if column == "topic" else "t").encode(batch)]


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"body": "binary", "tag": "string"}, r"column 'tag' cannot be written; did you mean 'tags'\? The columns are"),
        ({"body": "binary", "qwertz": "string"}, r"column 'qwertz' cannot be written\. The columns are .* properties"),
        ({"body": "int"}, r"column 'body' is int, and must be binary or string: cast it"),
        ({"body": "struct<a:int>"}, r"column 'body' is struct.*: .*to_json\(\) it"),
        ({"body": "binary", "properties": "string"}, r"'properties' is string, and must be map<string,string>"),
        ({"body": "binary", "properties": "map<string,int>"}, r"'properties' is map<string,int>, .*"),
        ({"body": "binary", "queue_id": "bigint"}, r"column 'queue_id' is bigint, and must be int"),
        ({"body": "binary", "deliver_time": "timestamp_ntz"}, r"'deliver_time' is timestamp_ntz, and must be timest"),
        ({"body": "binary", "keys": "array<int>"}, r"'keys' is array<int>, and must be string or array<string>"),
        ({"body": "binary", "tags": "void"}, r"'tags' is void, and must be string"),
        ({"tags": "string"}, r"column 'body' is missing; the frame has tags"),
        (
            {"value": "binary", "offset": "bigint"},
            "'offset' cannot be written.* The columns are value, key, topic, p",
        ),
        ({"value": "binary", "tags": "string"}, "with `body` in its place there are others; drop or rename it"),
        ({"value": "int"}, r"column 'value' is int, and must be binary or string"),
        ({"body": "binary", "value": "binary"}, "column 'value' cannot be written.* The columns are body, topic"),
        ({"key": "binary", "topic": "string"}, "column 'key' cannot be written"),
        ({"record": "binary", "body": "binary"}, "'record' is a whole message: drop body"),
        ({"record": "binary", "topic": "string", "tags": "string"}, "drop tags; the other columns may be topic, q"),
        ({"record": "string"}, "column 'record' is string, and must be binary"),
    ],
)
def test_columns_are_checked_before_any_row(columns: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_columns(columns, topic="t")


def test_a_frame_without_any_topic_is_refused() -> None:
    with pytest.raises(ConfigError, match="no topic: add column 'topic', or give option topic"):
        check_columns({"body": "binary"}, topic=None)


def test_the_table_of_columns_names_each_once_and_every_type_is_taken() -> None:
    assert list(INPUTS) == [*TYPES, "record"]
    assert len(encode([{**GOOD, **dict.fromkeys(TYPES), "topic": "t", "body": b""}])) == 1
