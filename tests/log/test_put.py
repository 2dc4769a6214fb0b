"""Putting: what is refused and what that leaves behind, the bytes of what is accepted, and where they come to lie.

Limits and statuses: format#blank, format#limits, format#batch, format#put-errors, clients#message-rules.
"""

from __future__ import annotations

import errno
import itertools
import shutil
import struct
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import Durability, OutgoingMessage, SimulatedClock
from mqstore.errors import (
    ConfigError,
    InvalidMessageError,
    StoreBusyError,
    StoreClosedError,
    StoreFullError,
    StoreIOError,
)
from tests.faults import FaultyFileSystem
from tests.log.support import (
    HEADER,
    SEGMENT,
    Unsynced,
    act_behind,
    files,
    kill,
    note_in_checkpoint,
    open_store,
    units_of,
)
from tests.without import COMPILED, put_by_python

PROFILES = ["mqstore", "rocketmq"]
V1, V2, BLANK = -626843481, -626843477, -875286124

# -- what is refused -------------------------------------------------------------------------------------------------

BAD_TOPICS = [
    "", " ", "a b", "a/b", "../a", ".", "a.b", "a\n", "a\0b", "é", "订单", "a+b", "t" * 128, None, b"t", 7, ["t"],
]  # fmt: skip
BAD_TOPICS += ["%RETRY%" + "g" * 249, "%DLQ%" + "g" * 251]
BAD_BODIES = [None, "text", 5, [1, 2], {}, 1.5]
BAD_TAGS = ["", "  ", "a|b", "|", "a\x01", "a\x02b", "a\nb", "\x7f", "\x85", "\ud800", b"tag", 5]
BAD_KEYS = [
    "", "a b", " ", "a\tb", ["ok", ""], ["ok", "two words"], ["ok", 5], ["\x01"], ["\x02"], [None], "\udfff", [b"k"],
]  # fmt: skip
BAD_PROPERTIES: list[Any] = [
    {"": "v"}, {"n": ""}, {" ": "v"}, {"n": " "}, {"n": "a\x01b"}, {"n": "a\x02b"}, {"n\x01": "v"}, {"n\x02": "v"},
    {"n": "\0"}, {"n": "a\nb"}, {"n\x9f": "v"}, {"n": "\ud800"}, {"n": 5}, {5: "v"}, {"n": None}, {"n": b"v"},
    {"KEYS": "k"}, {"TAGS": "t"}, {"UNIQ_KEY": "u"}, {"DELAY": "1"}, {"__CRC32#": "0000000000"}, {"REAL_TOPIC": "x"},
    {"WAIT": "true"}, {"dlq_reason": "x"}, {"__RMQ.TRANSIENT.X": "1"}, {"__SHARDINGKEY": "g"}, {"n": "v" * 32_767},
]  # fmt: skip
BAD_FLAGS = [1 << 31, -(1 << 31) - 1, "1", None, 1.5, 1 << 80]
BAD_QUEUE_IDS = [-1, 16_384, 1 << 40, "0", None, 0.5]

REFUSED: list[tuple[str, dict[str, Any]]] = [
    *(("topic", {"topic": topic}) for topic in BAD_TOPICS),
    *(("body", {"body": body}) for body in BAD_BODIES),
    *(("tag", {"tag": tag}) for tag in BAD_TAGS),
    *(("keys", {"keys": keys}) for keys in BAD_KEYS),
    *(("properties", {"properties": properties}) for properties in BAD_PROPERTIES),
    *(("flag", {"flag": flag}) for flag in BAD_FLAGS),
    *(("queue_id", {"queue_id": queue_id}) for queue_id in BAD_QUEUE_IDS),
    ("unique_key", {"unique_key": ""}),
    ("unique_key", {"unique_key": " "}),
    ("unique_key", {"unique_key": "a\x02b"}),
    ("unique_key", {"unique_key": 5}),
    *(("message_group", {"message_group": group}) for group in ("", " ", "a\n", "g" * 64, "é" * 32, True, 1.5, b"g")),
    ("body", {"body": bytes(SEGMENT)}),
    ("body", {"body": bytes(SEGMENT - 8 - HEADER - len("topic") + 1)}),
]
SURROGATE = ("tag", "keys", "properties")
"""UTF-8 cannot hold a lone surrogate: the encoder finds that, and names the properties as a whole."""


def put_one(store: Any, topic: Any = "topic", body: Any = b"x", queue_id: Any = 0, **options: Any) -> None:
    store.put(topic, body, queue_id, **options)


def put_second_of_two(store: Any, topic: Any = "topic", body: Any = b"x", queue_id: Any = 0, **options: Any) -> None:
    store.put_many(topic, [b"first", OutgoingMessage(body, **options)], queue_id)


@pytest.mark.parametrize("put", [put_one, put_second_of_two])
def test_invalid_message_is_refused_and_leaves_nothing(store: Any, put: Callable[..., None]) -> None:
    before = files(store.path)
    for field, arguments in REFUSED:
        with pytest.raises(InvalidMessageError) as caught:
            put(store, **arguments)
        surrogate = any(c in repr(arguments) for c in ("\\ud800", "\\udfff"))
        assert caught.value.field == ("properties" if surrogate and field in SURROGATE else field), arguments
        assert (store.max_offset, store.topics(), store.stats().puts) == (0, [], 0), arguments
    assert files(store.path) == before
    assert store.put("topic", b"next").offset == 0


def test_an_unknown_durability_is_refused_before_anything_is_written(store: Any) -> None:
    wrong: Any = "disk"
    for put in (
        lambda: store.put("t", b"x", durability=wrong),
        lambda: store.put_many("t", [b"x"], durability=wrong),
        lambda: store.append("t", 0, b"x", durability=wrong),
    ):
        with pytest.raises(ConfigError, match="durability"):
            put()
    assert store.max_offset == 0


def test_reader_cannot_change_the_store(tmp_path: Path) -> None:
    changing = (
        *("put", "put_many", "append", "copy_many", "_outlet", "flush", "dispatch", "run_once"),
        *("splice", "take_inbox", "clean", "drop_before"),
    )
    with open_store(tmp_path / "s") as writer:
        assert all(hasattr(writer, name) for name in changing)
    before = files(tmp_path)
    with open_store(tmp_path / "s", "r") as reader:
        assert not any(hasattr(reader, name) for name in changing)
    assert files(tmp_path) == before


def test_a_closed_store_takes_no_put(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    store.put("t", b"x")
    store.close()
    store.close()
    for act in (
        lambda: store.put("t", b"x"),
        lambda: store.put("new", b"x"),
        lambda: store.put_many("t", [b"x"]),
        lambda: store.append("t", 0, b"x"),
        lambda: store.read("t"),
        lambda: store.at(0),
        lambda: store.find("t", key="k"),
        lambda: store.offsets("t"),
        lambda: next(store.iter("t")),
        store.topics,
        store.flush,
        store.dispatch,
    ):
        with pytest.raises(StoreClosedError):
            act()


# -- what is accepted ------------------------------------------------------------------------------------------------

TEXT = st.text(
    st.characters() | st.sampled_from("\0\x01\x02\x03|% \t\n\x7f\x85\xad\u200b\ud800\U0001f600é订"), max_size=6
)


@given(
    body=st.binary(max_size=60),
    tag=st.none() | TEXT,
    keys=st.none() | TEXT | st.lists(TEXT, max_size=3),
    properties=st.none() | st.dictionaries(TEXT, TEXT, max_size=3),
    unique_key=st.none() | TEXT,
    group=st.none() | TEXT | st.integers(),
    flag=st.just(0) | st.integers(-(1 << 31), (1 << 31) - 1),
)
def test_any_text_and_bytes_come_back_the_same_or_are_refused(
    store: Any, body: bytes, tag: Any, keys: Any, properties: Any, unique_key: Any, group: Any, flag: int
) -> None:
    end = store.max_offset
    refused = None
    try:
        receipt = store.put(
            "odd",
            body,
            tag=tag,
            keys=keys,
            properties=properties,
            unique_key=unique_key,
            message_group=group,
            flag=flag,
        )
    except InvalidMessageError as error:
        refused = error
    if refused is not None:
        assert refused.field in ("tag", "keys", "properties", "unique_key", "message_group")
        assert store.max_offset == end
        return
    (message,) = store.read("odd", 0, receipt.offset)
    assert (message.body, message.tag, message.flag) == (body, tag, flag)
    assert message.keys == ((keys,) if isinstance(keys, str) else tuple(keys or ()))
    assert message.properties == (properties or {})
    assert message.message_group == (None if group is None else str(group))
    assert message.unique_key == receipt.unique_key == (unique_key or message.message_id)


@pytest.mark.parametrize("body", [b"", bytearray(b"array"), memoryview(b"a view")[2:], bytes(range(256))])
def test_any_kind_of_bytes_is_a_body(store: Any, body: Any) -> None:
    store.put("t", body)
    store.put_many("t", [body, OutgoingMessage(body)])
    assert [m.body for m in store.read("t")] == [bytes(body)] * 3


def test_a_body_of_max_message_size_fits_and_one_byte_more_does_not(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", max_message_size=100) as store:
        store.put("t", bytes(100), properties={"n": "v" * 1000})  # only the body counts
        for put in (
            lambda: store.put("t", bytes(101)),
            lambda: store.put_many("t", [b"", bytes(101)]),
            lambda: store.append("t", 0, bytes(101)),
        ):
            with pytest.raises(InvalidMessageError, match="101 bytes; max_message_size is 100") as caught:
                put()
            assert caught.value.field == "body"
        assert [len(m.body) for m in store.read("t")] == [100]


def test_properties_of_32767_bytes_fit_and_one_byte_more_does_not(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", segment_bytes=1 << 16) as store:
        value = "v" * (32_767 - len("n\1\2"))
        store.put("t", b"", properties={"n": value})
        with pytest.raises(InvalidMessageError, match="32768") as caught:
            store.put("t", b"", properties={"n": value + "v"})
        assert caught.value.field == "properties"
        assert [m.properties for m in store.read("t")] == [{"n": value}]


@pytest.mark.parametrize(
    ("topic", "magic"),
    [
        ("t" * 127, V1),
        ("%RETRY%" + "g" * 120, V1),
        ("%RETRY%" + "g" * 121, V2),
        ("%DLQ%" + "g" * 250, V2),
    ],
)
def test_version_2_begins_where_a_topic_has_more_than_127_bytes(store: Any, topic: str, magic: int) -> None:
    store.put(topic, b"one", tag="T")
    store.put_many(topic, [b"two"])
    store.append(topic, 0, b"three")
    messages = store.read(topic)
    assert [struct.unpack_from(">i", m._record_bytes(), 4)[0] for m in messages] == [magic] * 3
    assert [(m.topic, m.body) for m in messages] == [(topic, b"one"), (topic, b"two"), (topic, b"three")]
    assert messages[0].size == HEADER + (magic == V2) + len(topic) + len(b"oneTAGS\1T\2")
    assert list(store.verify()) == []


# -- the bytes (vectors of format#vectors) -----------------------------------------------------------------------------

VECTOR = bytes.fromhex(
    "000000b0daa320a730f101360000000100000000000000000000000500000000000004000000000000000"
    "18bcfe568007f0000010000c3500000018bcfe5687bc0a8010a00002a9f000000000000000000000000000"
    "0000c68656c6c6f20e8aea2e58d950a4f72646572546f706963003f4b455953014f52442d31025441475301"
    "5461674102554e49515f4b4559013746303030303031303444323138423441414332303841324231433030303030"
    "02".replace(" ", "")
)  # fmt: skip


@pytest.mark.parametrize(("profile", "checksum"), [("rocketmq", "30f10136"), ("mqstore", "9fc00df9")])
def test_the_worked_vector_byte_by_byte(tmp_path: Path, profile: Any, checksum: str) -> None:
    clock = SimulatedClock(1_700_000_000_123)
    with open_store(tmp_path / "s", profile=profile, clock=clock, store_host="192.168.1.10:10911") as store:
        empty = HEADER + len("OrderTopic")
        for _ in range(4):
            store.put("OrderTopic", b"", 1)
        store.put("OrderTopic", bytes(1024 - 5 * empty), 1)
        receipt = store.append(
            "OrderTopic",
            1,
            "hello 订单".encode(),
            properties={"KEYS": "ORD-1", "TAGS": "TagA", "UNIQ_KEY": "7F00000104D218B4AAC208A2B1C00000"},
            born_timestamp_ms=1_700_000_000_000,
            born_host="127.0.0.1:50000",
        )
        assert (receipt.offset, receipt.physical_offset, receipt.size) == (5, 1024, 176)
        assert receipt.message_id == "C0A8010A00002A9F0000000000000400"
        assert receipt.unique_key == "7F00000104D218B4AAC208A2B1C00000"
        (message,) = store.read("OrderTopic", 1, 5)
        assert message._record_bytes() == VECTOR[:8] + bytes.fromhex(checksum) + VECTOR[12:]
    assert units_of(tmp_path / "s", "OrderTopic", 1)[5] == struct.unpack(
        ">qiq", bytes.fromhex("0000000000000400000000b0000000000027a807")
    )


def test_hosts_of_either_family_lie_where_the_vector_has_them(tmp_path: Path) -> None:
    topic = "%RETRY%" + "G" * 120 + "_" + "T" * 20
    with open_store(tmp_path / "s", store_host="[::1]:124") as store:
        receipt = store.append(topic, 0, b"x", born_host="[1050:0:0:0:5:600:300c:326b]:123", born_timestamp_ms=77)
        (message,) = store.read(topic)
        record = message._record_bytes()
        assert record[:8].hex() == "00000109daa320ab"
        assert record[36:40].hex() == "00000030"
        assert record[48:68].hex() == "105000000000000000050600300c326b0000007b"
        assert struct.unpack_from(">q", record, 68) == (message.store_timestamp_ms,)
        assert record[76:96].hex() == "00000000000000000000000000000001" + "0000007c"
        assert receipt.message_id == "00000000000000000000000000000001" + "0000007C" + "0" * 16
        assert (message.born_host, message.store_host) == ("[1050::5:600:300c:326b]:123", "[::1]:124")
        assert store.get_by_id(receipt.message_id) == message


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("store_host", ["10.1.2.3:9", "[fe80::1]:9"])
@pytest.mark.parametrize("born_host", ["10.9.8.7:1", "[::ffff:1.2.3.4]:65535"])
def test_all_four_mixtures_of_host_families(tmp_path: Path, profile: Any, store_host: str, born_host: str) -> None:
    with open_store(tmp_path / "s", profile=profile, store_host=store_host) as store:
        receipt = store.append("t", 3, b"body", born_host=born_host, reconsume_times=5, flag=-2)
        store.put("t", b"put", 3, tag="T", flag=9)
        store.put_many("t", [b"many", OutgoingMessage(b"more", keys="k", flag=-9)], 3)
        first, *others = store.read("t", 3)
        assert (first.store_host, first.reconsume_times, first.flag) == (store_host, 5, -2)
        assert first.store_timestamp_ms == receipt.store_timestamp_ms
        # an IPv4 address written as IPv6 may come back in either notation, but with its bytes
        assert first._record_bytes()[39] & 0x10 == (0x10 if born_host.startswith("[") else 0)
        assert [(m.body, m.flag) for m in others] == [(b"put", 9), (b"many", 0), (b"more", -9)]
        assert store.get_by_id(receipt.message_id).body == b"body"
        assert list(store.verify()) == []


@pytest.mark.parametrize(
    ("sys_flag", "has_unit"), [(0, True), (0x4, False), (0x8, True), (0xC, False), (0x40, True), (1 << 20, True)]
)
def test_prepared_and_rollback_records_take_no_number(store: Any, sys_flag: int, has_unit: bool) -> None:
    first = store.put("t", b"before")
    receipt = store.append("t", 0, b"x", sys_flag=sys_flag, prepared_transaction_offset=1 << 40)
    last = store.put("t", b"after")
    assert (first.offset, receipt.offset, last.offset) == ((0, 1, 2) if has_unit else (0, 0, 1))
    message = store.at(receipt.physical_offset)
    assert (message.sys_flag, message.prepared_transaction_offset) == (sys_flag, 1 << 40)
    assert len(store.read("t")) == (3 if has_unit else 2)
    assert list(store.verify()) == []


def test_the_crc_property_of_another_record_is_left_out(store: Any) -> None:
    """It once was stored as it came. The record then failed its own check: it could not be read, and the next
    recovery took it, and all behind it, for a torn tail."""
    foreign = "0123456789"
    store.append("t", 0, b"copy", properties={"TAGS": "T", "__CRC32#": foreign})
    store.append("t", 0, b"bare", properties={"__CRC32#": foreign})
    messages = store.read("t")
    assert [(m.body, m.stored_properties()) for m in messages] == [(b"copy", {"TAGS": "T"}), (b"bare", {})]
    assert list(store.verify()) == []


# -- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_a_batch_lies_together_with_one_time_and_consecutive_offsets(tmp_path: Path, profile: Any) -> None:
    with open_store(tmp_path / "s", profile=profile) as store:
        store.put("t", b"before", 2)
        many = store.put_many("t", (OutgoingMessage(b"b%d" % i, tag=f"T{i}", keys=["k", f"k{i}"]) for i in range(5)), 2)
        messages = [
            OutgoingMessage(b"w0", tag="a", flag=7),
            OutgoingMessage(b"", flag=-7),
            OutgoingMessage(b"w2", unique_key="u2", keys=["x", "y"]),
        ]
        batch = store.put_many("t", messages, 2)
        for receipts, first in ((many, 1), (batch, 6)):
            assert [r.offset for r in receipts] == list(range(first, first + len(receipts)))
            assert len({r.store_timestamp_ms for r in receipts}) == 1
            assert all(a.physical_offset + a.size == b.physical_offset for a, b in itertools.pairwise(receipts))
            assert {(r.topic, r.queue_id) for r in receipts} == {("t", 2)}
        messages = store.read("t", 2, 1)
        assert [m.physical_offset for m in messages] == [r.physical_offset for r in (*many, *batch)]
        assert [m.unique_key for m in messages] == [r.unique_key for r in (*many, *batch)]
        assert [m.message_id for m in messages] == [r.message_id for r in (*many, *batch)]
        assert [(m.body, m.flag, m.tag, m.keys) for m in messages[5:]] == [
            (b"w0", 7, "a", ()),
            (b"", -7, None, ()),
            (b"w2", 0, None, ("x", "y")),
        ]
        assert [m.tag for m in messages[:5]] == ["T0", "T1", "T2", "T3", "T4"]
        assert batch[-1].unique_key == "u2"
        assert [m.offset for m in store.find("t", key="k3")] == [4]
        assert list(store.verify()) == []


@pytest.mark.parametrize("free", range(0, 240, 7))
def test_a_batch_that_does_not_fit_the_rest_goes_to_the_next_segment_whole(store: Any, free: int) -> None:
    """The roll test takes the sum (format#batch)."""
    store.put("t", bytes(SEGMENT - 8 - free - HEADER - 1))
    receipts = store.put_many("t", [b"", b""])
    total = 2 * (HEADER + 1)
    start = SEGMENT - 8 - free if total <= free else SEGMENT
    assert [r.physical_offset for r in receipts] == [start, start + HEADER + 1]
    assert len(store.read("t")) == 3


def test_a_batch_larger_than_a_segment_is_cut(store: Any) -> None:
    bodies = [bytes([i]) * 700 for i in range(12)]
    receipts = store.put_many("t", bodies)
    assert [r.offset for r in receipts] == list(range(12))
    assert [m.body for m in store.read("t")] == bodies
    assert [m.physical_offset for m in store.read("t")] == [r.physical_offset for r in receipts]
    assert list(store.verify()) == []


@pytest.mark.parametrize("at", [0, 5, 9])
def test_one_bad_message_keeps_the_whole_lot_out(store: Any, at: int) -> None:
    bodies: list[Any] = [b"x" * 600] * 10  # several segments' worth
    bodies[at] = bytes(SEGMENT)
    with pytest.raises(InvalidMessageError):
        store.put_many("t", bodies)
    bodies[at] = OutgoingMessage(b"x", properties={"n": ""})
    with pytest.raises(InvalidMessageError):
        store.put_many("t", bodies)
    assert store.max_offset == 0


# -- where it lies ---------------------------------------------------------------------------------------------------


def blank_at(path: Path, position: int, segment_bytes: int) -> tuple[int, int]:
    start = position // segment_bytes * segment_bytes
    data = (path / "commitlog" / f"{start:020d}").read_bytes()
    return struct.unpack_from(">ii", data, position - start)  # type: ignore[return-value]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_roll_at_every_position_of_a_segment(tmp_path: Path, profile: Any) -> None:
    """A record fits iff its size + 8 is free; else a BLANK fills the rest, 8 bytes at the least (format#blank)."""
    size, second = 1024, 150
    starts = {*range(HEADER + 1, size - 8 + 1, 9)}
    if profile == "mqstore":
        starts.update(range(size - second - 120, size - 8 + 1))  # where the second one just fits, or just does not
    least = HEADER + 1
    expected: list[tuple[int, int]] = []
    blanks: list[tuple[int, int]] = []
    with open_store(tmp_path / "s", profile=profile, segment_bytes=size, consumequeue_units=256) as store:
        end = 0

        def put(record_bytes: int) -> None:
            nonlocal end
            free = size - end % size
            if record_bytes + 8 > free:
                blanks.append((end, free))
                end += free
            receipt = store.put("t", bytes(record_bytes - least))
            assert (receipt.physical_offset, receipt.size) == (end, record_bytes)
            expected.append((end, record_bytes))
            end += record_bytes

        for first in sorted(starts):
            put(first)  # at the start of a segment, since the one before was filled to the last byte
            put(second)
            put(size - 8 - end % size if size - 8 - end % size >= least else size - 8)
        assert {free for _, free in blanks} >= ({8} if profile == "rocketmq" else set(range(8, second + 8)))
        assert [(m.physical_offset, m.size) for m in store.iter("t", 0)] == expected
        assert list(store.verify()) == []
        shutil.copytree(store.path, tmp_path / "crashed")
    for position, free in blanks:
        assert blank_at(tmp_path / "s", position, size) == (free, BLANK)
    for name in ("s", "crashed"):
        with open_store(tmp_path / name) as store:
            assert (store.max_offset, store.offsets("t")) == (end, (0, len(expected)))
            assert store.recovery.truncated == store.recovery.findings == []
            assert [(m.physical_offset, m.size) for m in store.iter("t", 0)] == expected


def test_the_largest_record_fills_a_segment_but_8_bytes(tmp_path: Path) -> None:
    largest = SEGMENT - 8 - HEADER - 1
    with open_store(tmp_path / "s") as store:
        for put in (
            lambda body: store.put("t", body),
            lambda body: store.put_many("t", [body])[0],
            lambda body: store.append("t", 0, body),
        ):
            assert put(bytes(largest)).size == SEGMENT - 8
            with pytest.raises(InvalidMessageError, match="segment") as caught:
                put(bytes(largest + 1))
            assert caught.value.field == "body"
        assert len(store.read("t")) == 3


@pytest.mark.parametrize("boundary", [1 << 31, 1 << 32, 1 << 40], ids=["2GiB", "4GiB", "1TiB"])
@pytest.mark.parametrize("profile", PROFILES)
def test_physical_offsets_cross_what_32_bits_can_say(tmp_path: Path, profile: Any, boundary: int) -> None:
    """Records on both sides of 2 and 4 GiB, by a log that begins shortly below."""
    path, start = tmp_path / "s", boundary - 2 * SEGMENT
    if profile == "mqstore":  # an emptied store goes on at the end that its checkpoint knows
        open_store(path).close()
        note_in_checkpoint(path, flushed=start, dispatched=start, clean_end=start, log_start=None)
    else:  # a Java broker's directory, all of whose segments but the last, unused one are gone
        (path / "commitlog").mkdir(parents=True)
        with open(path / "commitlog" / f"{start:020d}", "wb") as file:
            file.truncate(SEGMENT)
    with open_store(path) as store:
        assert store.manifest.profile == profile
        receipts = [store.put("t", b"%03d" % i * 50, tag=f"T{i % 2}", keys=f"k{i}") for i in range(90)]
        receipts += store.put_many("t", [b"%03d" % i * 50 for i in range(90, 100)])
        assert receipts[0].physical_offset == start
        assert receipts[-1].physical_offset > boundary + SEGMENT
        shutil.copytree(path, tmp_path / "crashed")
    assert [unit[0] for unit in units_of(path, "t")] == [r.physical_offset for r in receipts]
    for name in ("s", "crashed"):
        with open_store(tmp_path / name) as store:
            assert store.offsets("t") == (0, 100)
            assert [m.body for m in store.iter("t", 0)] == [b"%03d" % i * 50 for i in range(100)]
            assert [m.physical_offset for m in store.find("t", key="k77")] == [receipts[77].physical_offset]
            assert store.get_by_id(receipts[60].message_id).offset == 60
            assert len(list(store.iter("t", 0, tags="T1"))) == 45
            assert [m.physical_offset for m in store.iter("t", 0)] == [r.physical_offset for r in receipts]
            assert list(store.verify()) == []
            assert store.put("t", b"x").offset == 100


# -- trouble ---------------------------------------------------------------------------------------------------------


def test_a_full_disk_at_the_roll_leaves_everything_as_it_was(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs) as store:
        store.put("t", b"kept" * 500)
        end = store.max_offset
        fs.fail("allocate", errno.ENOSPC, times=None, path_part="tmp")
        for put in (lambda: store.put("t", bytes(3000)), lambda: store.put_many("t", [bytes(3000)])):
            with pytest.raises(StoreFullError):
                put()
        assert store.max_offset == end
        assert store.put("t", b"fits").offset == 1  # what needs no new segment goes on
        fs.heal()
        assert store.put("t", bytes(3000)).offset == 2
        assert [len(m.body) for m in store.read("t")] == [2000, 4, 3000]
        assert list(store.verify()) == []


@pytest.mark.parametrize("between", [0, 1])
@pytest.mark.parametrize("prepared", [False, True])
def test_a_roll_that_failed_half_way_is_finished_by_a_later_put(tmp_path: Path, between: int, prepared: bool) -> None:
    """Out of descriptors for the new segment's mapping, every put that needed the segment met a ValueError for ever."""
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs) as store:
        store.put("t", b"0" * 2000)
        if prepared:
            store.log_files.prepare(SEGMENT)
        fs.fail("map", errno.EMFILE, times=3, path_part="commitlog")
        for put in (lambda: store.put("t", bytes(3000)), lambda: store.put_many("t", [bytes(3000)])):
            with pytest.raises(StoreIOError):
                put()
        fs.heal()
        for _ in range(between):
            store.put("t", b"small")
        assert store.put("t", b"1" * 3000).offset == 1 + between
        assert store.put("t", b"2" * 3000).offset == 2 + between
        assert [m.body[:1] for m in store.read("t")] == [b"0", *[b"s"] * between, b"1", b"2"]
        assert list(store.verify()) == []
    with open_store(tmp_path / "s") as store:
        assert store.clean_shutdown
        assert store.offsets("t") == (0, 3 + between)


def test_repeated_error_does_not_grow(tmp_path: Path) -> None:
    """One exception object was raised for every put to a closed or failed store, and gathered the frames of them all:
    a producer that kept trying filled the memory."""
    store = open_store(tmp_path / "s")
    store.put("t", b"x")
    store.close()
    depths = set()
    for _ in range(3):
        with pytest.raises(StoreClosedError) as caught:
            store.put("t", b"x")
        depths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(depths) == 1


def test_flushed_put_is_synced_on_return(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs) as store:
        store.put("t", b"not synced")
        for put in (
            lambda: store.put("t", b"x", durability="flush"),
            lambda: store.append("t", 0, b"x", durability="flush"),
            lambda: store.put_many("t", [b"x", b"y"], durability="flush"),
        ):
            assert store.stats().flush_lag_bytes >= 0
            fs.calls.clear()
            put()
            assert store.stats().flush_lag_bytes == 0  # nor what was appended before it (format#flush)
            assert [c for c in fs.calls if c.operation == "fdatasync" and "commitlog" in c.path]
            store.put("t", b"not synced")


def test_messages_of_a_flush_store_are_seen_once_they_are_durable(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", durability="flush") as store:
        store.put("t", b"durable")
        store.put("t", b"not yet", durability="append")
        assert [m.body for m in store.read("t")] == [b"durable"]
        store.flush()
        assert [m.body for m in store.read("t")] == [b"durable", b"not yet"]
        store.put("t", b"soon", durability="append")
        store.run_once(1)  # what the flusher is woken for at once
        assert [m.body for m in store.read("t")] == [b"durable", b"not yet", b"soon"]


def test_partial_put_many_names_the_stored(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs, max_message_size=1000) as store:
        store.put("t", b"first")  # makes the first segment
        fs.fail("allocate", errno.ENOSPC)

        with pytest.raises(StoreFullError) as caught:
            store.put_many("t", [bytes([i]) * 900 for i in range(200)])

        stored = list(caught.value.receipts)
        fs.heal()
        assert 0 < len(stored) < 200
        assert [m.body[:1] for m in store.iter("t", 0, start=1)] == [bytes([i]) for i in range(len(stored))]
        assert [r.offset for r in stored] == list(range(1, 1 + len(stored)))


@pytest.mark.parametrize(
    ("topic", "fields"),
    [
        ("t", {"flag": 1 << 31}),
        ("t", {"sys_flag": 1 << 31}),
        ("t", {"reconsume_times": 1 << 31}),
        ("t", {"prepared_transaction_offset": 1 << 63}),
        ("t", {"born_timestamp_ms": 1 << 63}),
        *(("t", {"sys_flag": batch}) for batch in (0x80, 0x81, 0xC0)),
        ("SCHEDULE_TOPIC_XXXX", {"properties": {"DELAY": "soon"}}),
        ("SCHEDULE_TOPIC_XXXX", {"properties": {"DELAY": "99999999999"}}),
        ("t", {"properties": {"INNER_NUM": "two"}}),
        ("t", {"properties": {"INNER_BASE": "x"}}),
    ],
)
def test_a_copy_that_nobody_could_read_is_refused(store: Any, topic: str, fields: dict[str, Any]) -> None:
    """Fields that its bits cannot hold, and numbers that RocketMQ and our own record check take for damage
    (format#verifies). Batches in one record are listed by queues of another kind only (format#batch): one took a number
    of its queue, and nobody ever saw it."""
    with pytest.raises(InvalidMessageError) as caught:
        store.append(topic, 0, b"x", **fields)
    assert (caught.value.field, store.max_offset) == (next(iter(fields)), 0)
    assert store.put("t", b"next").offset == 0
    store.append("SCHEDULE_TOPIC_XXXX", 2, b"x", properties={"DELAY": "3"})


@pytest.mark.parametrize("call", ["crc32c", "_CRC.pack_into", "encode_records", "encode_copies", "encode_blank"])
def test_handler_in_the_middle_of_a_put_is_refused(store: Any, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Neither its put nor its close may come between the place of a record and its bytes."""
    store.put("t", b"f" * 2000)
    [copied] = store.read("t")
    refused = []

    def handler() -> None:
        for act in (lambda: store.put("t", b"handler"), lambda: store.put_many("t", [b"handler"]), store.close):
            with pytest.raises(StoreBusyError):
                act()
            refused.append(act)

    act_behind(monkeypatch, call, handler)
    monkeypatch.setattr("mqstore.log.commitlog.kernel", None)  # in a compiled put no handler comes in between
    put_by_python(store)
    if call == "encode_records":
        store.put_many("t", [b"m", b"n"])
    elif call == "encode_copies":
        store.copy_many([(copied, "t", 0, b"")])
    else:
        store.put("t", bytes(3000) if call == "encode_blank" else b"m")
    assert len(refused) == 3
    after = store.put("t", b"after")
    assert [m.offset for m in store.read("t")] == [*range(after.offset + 1)]
    assert list(store.verify()) == []


@pytest.mark.parametrize("durability", ["append", "flush"])
@pytest.mark.parametrize("call", ["_make", "create", "mapping"])
@pytest.mark.parametrize("filled", [0, 1])
def test_a_signal_handler_cannot_close_a_store_while_a_segment_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: int, call: str, durability: Durability
) -> None:
    """It waited for a lock that its own thread had, or left a segment behind the end; what the put then did was done in
    files that might be another process's by then."""
    with open_store(tmp_path / "s", durability=durability) as store:
        for _ in range(filled):
            store.put("t", bytes(3000))
        kind = type(store.log_files)
        real = getattr(kind, call)

        def interrupted(run: Any, where: Any) -> Any:
            result = real(run, where)
            if run is store.log_files:
                monkeypatch.undo()
                with pytest.raises(StoreBusyError):
                    store.close()
            return result

        monkeypatch.setattr(kind, call, interrupted)
        assert store.put("t", bytes(3000)).offset == filled
    with open_store(tmp_path / "s") as store:
        assert store.recovery.scanned_from is None
        assert [m.offset for m in store.read("t")] == [*range(filled + 1)]


@pytest.mark.parametrize("moment", ["replace", "create", "mapping"])
@pytest.mark.parametrize("filled", [0, 1])
def test_ctrl_c_in_a_new_segment_leaves_no_file_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: int, moment: str
) -> None:
    """The next opening did not believe that it had been closed, read the log, and said that it changed the store."""
    store = open_store(tmp_path / "s", fs=FaultyFileSystem())
    for _ in range(filled):
        store.put("t", bytes(3000))
    where = type(store.fs if moment == "replace" else store.log_files)
    real = getattr(where, moment)

    def interrupted(self: object, *arguments: Any) -> Any:
        real(self, *arguments)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(where, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put("t", bytes(3000))
    store.close()
    with open_store(tmp_path / "s") as store:
        assert (store.recovery.scanned_from, store.recovery.changed) == (None, False)
        assert store.put("t", bytes(3000)).offset == filled
        assert [m.offset for m in store.read("t")] == [*range(filled + 1)]


@pytest.mark.parametrize("by", ["put", "put_many"])
def test_a_handler_can_neither_put_nor_close_in_the_middle_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """The call went on when the lock was given back, over what another process might have written by then."""
    with open_store(tmp_path / "s", durability="flush" if by == "put" else "append") as store:
        store.put("t", b"0")
        write = type(store.log_files).write

        def handler() -> None:
            for call in (lambda: store.put("t", b"handler"), store.close):
                with pytest.raises(StoreBusyError):
                    call()

        def interrupted(*arguments: Any) -> None:
            handler()
            write(*arguments)
            handler()

        with monkeypatch.context() as patch:
            patch.setattr("mqstore.log.commitlog._CALL_BYTES", 1000)
            patch.setattr(type(store.log_files), "write", interrupted)
            stored = [store.put("t", b"1")] if by == "put" else store.put_many("t", [b"1" * 900, b"2" * 900])
        assert store.put("t", b"last").offset == 1 + len(stored)
        assert [m.body[:1] for m in store.read("t")] == [b"0", b"1", *[b"2"] * (len(stored) - 1), b"l"]
        assert list(store.verify()) == []
    assert open_store(tmp_path / "s").clean_shutdown


# -- many bytes, written by a call -----------------------------------------------------------------------------------


@pytest.fixture
def by_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes 128 KiB elsewhere takes a kilobyte here, so that small segments hold it."""
    monkeypatch.setattr("mqstore.log.commitlog._CALL_BYTES", 1000)


@pytest.mark.parametrize("profile", PROFILES)
def test_written_bytes_equal_a_stored_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: Any) -> None:
    clock = SimulatedClock()
    batches = [[bytes([65 + i]) * n for n in (5, 700, 0, 300 + i)] for i in range(12)]
    for name, limit in (("called", 1000), ("stored", 1 << 40)):
        monkeypatch.setattr("mqstore.log.commitlog._CALL_BYTES", limit)
        fs = FaultyFileSystem()
        with open_store(tmp_path / name, fs=fs, profile=profile, clock=clock) as store:
            for batch in batches:
                store.put("t", b"alone")
                receipts = store.put_many("t", batch)
                assert [m.body for m in store.read("t", 0, receipts[0].offset)] == batch
            assert [m.body for m in store.iter("t", 0)] == [b for batch in batches for b in (b"alone", *batch)]
            assert list(store.verify()) == []
        paths = [Path(call.path) for call in fs.calls if call.operation == "pwrite"]
        writes = [path for path in paths if path.parent.name == "commitlog" and path.name.isdigit()]
        assert len(writes) == (len(batches) if name == "called" or not COMPILED else 0)
    called, stored = (files(tmp_path / name) for name in ("called", "stored"))
    for file in stored:
        if file.startswith(("commitlog", "consumequeue", "index")):
            assert called[file] == stored[file], file


@pytest.mark.usefixtures("by_a_call")
@pytest.mark.parametrize("operation", ["pwrite", "open"])
def test_a_call_that_fails_stores_nothing_and_takes_no_number(tmp_path: Path, operation: str) -> None:
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs) as store:
        store.put("t", b"first")
        end = store.max_offset
        fs.fail(operation, errno.EIO, path_part="commitlog")
        with pytest.raises(StoreIOError):
            store.put_many("t", [b"m" * 900, b"n" * 900])
        fs.heal()
        assert store.max_offset == end
        assert store.put("t", b"second").offset == 1
        assert [r.offset for r in store.put_many("t", [b"m" * 900, b"n" * 900])] == [2, 3]
        assert [m.body[:1] for m in store.read("t")] == [b"f", b"s", b"m", b"n"]
        assert list(store.verify()) == []


class Interrupting(Unsynced):
    """Writes to the log, and then raises, as Ctrl-C does: when the call has returned, and its bytes are there."""

    def __init__(self) -> None:
        super().__init__()
        self.raises: list[BaseException] = []
        self.share = 1.0

    def pwrite(self, fd: int, data: Any, position: int) -> None:
        if not self.raises or "commitlog" not in self.path_of(fd):
            return super().pwrite(fd, data, position)
        view = memoryview(data)
        super().pwrite(fd, view[: int(len(view) * self.share)], position)
        raise self.raises.pop(0)


@pytest.mark.usefixtures("by_a_call")
@pytest.mark.parametrize("again", [False, True], ids=["once", "while it wipes, too"])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("end", ["put", "put_many", "copy_many", "close", "kill"])
def test_interrupted_write_is_not_a_message(tmp_path: Path, end: str, share: float, again: bool) -> None:
    """Whole records lay behind the end of the log: a clean close or a crash brought back all of a call that had
    raised, or, once another record had taken the place of the first, all but that."""
    fs = Interrupting()
    fs.share = share
    size = 500
    store = open_store(tmp_path / "s", fs=fs)
    store.put("t", b"f" * size)
    kinds = {1.0: KeyboardInterrupt(), 0.5: StoreIOError(errno.EIO, "broken", "log", "write")}
    fs.raises = [kinds[share]] * (2 if again else 1)
    (first,) = store.read("t")
    with pytest.raises((KeyboardInterrupt, StoreIOError)):
        store.copy_many([(first, "u", 0, b"")] * 5) if end == "copy_many" else store.put_many("t", [b"m" * size] * 5)
    assert not fs.raises
    expected = [b"f" * size]
    if end == "put":
        assert store.put("t", b"o" * size).offset == 1
        expected.append(b"o" * size)
    elif end == "put_many":
        assert [r.offset for r in store.put_many("t", [b"o" * size] * 4)] == [1, 2, 3, 4]
        expected += [b"o" * size] * 4
    if end == "close":
        store.close()
    else:
        if end in ("copy_many", "kill") and again:
            store.put("t", b"")  # killed before that, it would be a crash in the middle of a put
            expected.append(b"")
        kill(store)
    with open_store(tmp_path / "s") as reopened:
        assert [m.body for m in reopened.read("t")] == expected
        assert sum(len(reopened.read(topic)) for topic in reopened.topics()) == len(expected)
        assert list(reopened.verify()) == []


def test_a_body_of_a_class_derived_from_bytes_is_what_it_holds(tmp_path: Path) -> None:
    class Odd(bytes):
        def __len__(self) -> int:
            return 1

        def __bytes__(self) -> bytes:
            return b"other"

    with open_store(tmp_path / "s") as store:
        store.put("t", Odd(b"held"))
        store.put_many("t", [Odd(b"held"), b"plain"])
        assert [m.body for m in store.read("t")] == [b"held", b"held", b"plain"]
