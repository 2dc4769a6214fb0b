"""The commitlog record: vectors of format#vectors, every record of the golden stores, and damage of each sort.

`tests.records` builds records field by field, apart from the code under test.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from collections.abc import Callable
from typing import Any

import crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.errors import FormatError
from mqstore.layout.arrays.encode import encode_copies
from mqstore.layout.hosts import IPV4_BYTES, decode_host, encode_host
from mqstore.layout.properties import decode_crc_tail, decode_properties, encode_properties
from mqstore.layout.record import (
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    Check,
    Checksum,
    Record,
    check_record,
    decode_record,
    encode_blank,
)
from tests.conftest import GOLDEN_NAMES, GoldenStore
from tests.records import encode_crc_tail, encode_record

CHECKSUMS: tuple[Checksum, ...] = ("crc32-body", "crc32c-record")

# format#vectors: the record, and that of profile `mqstore`, which differs in bytes 8..11
WORKED_BYTES = bytes.fromhex("""
    00 00 00 b0 da a3 20 a7 30 f1 01 36 00 00 00 01  00 00 00 00 00 00 00 00 00 00 00 05 00 00 00 00
    00 00 04 00 00 00 00 00 00 00 01 8b cf e5 68 00  7f 00 00 01 00 00 c3 50 00 00 01 8b cf e5 68 7b
    c0 a8 01 0a 00 00 2a 9f 00 00 00 00 00 00 00 00  00 00 00 00 00 00 00 0c 68 65 6c 6c 6f 20 e8 ae
    a2 e5 8d 95 0a 4f 72 64 65 72 54 6f 70 69 63 00  3f 4b 45 59 53 01 4f 52 44 2d 31 02 54 41 47 53
    01 54 61 67 41 02 55 4e 49 51 5f 4b 45 59 01 37  46 30 30 30 30 30 31 30 34 44 32 31 38 42 34 41
    41 43 32 30 38 41 32 42 31 43 30 30 30 30 30 02
""")
WORKED_BYTES_MQSTORE = WORKED_BYTES[:8] + bytes.fromhex("9f c0 0d f9") + WORKED_BYTES[12:]
WORKED = {
    "topic": "OrderTopic",
    "queue_id": 1,
    "queue_offset": 5,
    "physical_offset": 1024,
    "born_timestamp_ms": 1700000000000,
    "born_host": encode_host("127.0.0.1:50000"),
    "store_timestamp_ms": 1700000000123,
    "store_host": encode_host("192.168.1.10:10911"),
    "body": "hello 订单".encode(),
    "properties": encode_properties({"KEYS": "ORD-1", "TAGS": "TagA", "UNIQ_KEY": "7F00000104D218B4AAC208A2B1C00000"}),
}
ZEROS: dict[str, Any] = {
    "queue_id": 0, "queue_offset": 0, "physical_offset": 0, "born_timestamp_ms": 0, "store_timestamp_ms": 0,
}  # fmt: skip
SEGMENT_BYTES = 4096


i32 = st.integers(-(2**31), 2**31 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
hosts = st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20)
models = st.fixed_dictionaries(
    {
        # Lengths picked outright: left to itself, hypothesis hardly ever draws one that needs V2.
        "topic": st.sampled_from([1, 2, 20, 127, 128, 255]).flatmap(
            lambda size: st.binary(min_size=size, max_size=size)
        ),
        "body": st.binary(max_size=300),
        "properties": st.dictionaries(st.sampled_from(["KEYS", "TAGS", "色"]), st.sampled_from(["a", "b c"])).map(
            encode_properties
        ),
        "numbers": st.tuples(i32, i32, i64, i64, i32, i64, i64, i32, i64),
        "born_host": hosts,
        "store_host": hosts,
        "checksum": st.sampled_from(CHECKSUMS),
    }
)


def encode_model(model: dict[str, Any]) -> bytes:
    """The record of a model."""
    names = (
        "queue_id", "flag", "queue_offset", "physical_offset", "sys_flag", "born_timestamp_ms", "store_timestamp_ms",
        "reconsume_times", "prepared_transaction_offset",
    )  # fmt: skip
    others = {name: value for name, value in model.items() if name != "numbers"}
    return encode_record(**others, **dict(zip(names, model["numbers"], strict=True)))


def worked(checksum: Checksum, **changes: Any) -> bytes:
    return encode_record(**{**WORKED, **changes}, checksum=checksum)


def copy_of(stored: bytes, record: Record, checksum: Checksum = "crc32-body") -> bytes:
    """The record as the code under test makes it of its own parts."""
    body_at = 88
    data, positions = encode_copies(
        [stored[:body_at]],
        [record.body],
        [stored[body_at + len(record.body) :]],
        magics=[record.magic],
        queue_ids=[record.queue_id],
        queue_offsets=[record.queue_offset],
        physical_offset=record.physical_offset,
        timestamp_ms=record.store_timestamp_ms,
        store_host=record.store_host,
        checksum=checksum,
    )
    assert [*positions] == [record.physical_offset, record.physical_offset + record.total_size]
    data[76:84] = record.prepared_transaction_offset.to_bytes(8, "big")  # a copy is of no transaction
    return bytes(data)


def in_segment(record: bytes) -> bytes:
    """The record at the start of an otherwise empty segment."""
    return record.ljust(SEGMENT_BYTES, b"\0")


# --- worked vectors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_compiled", [True, False])
def test_copy_has_the_checksum_of_its_own_bytes(monkeypatch: pytest.MonkeyPatch, is_compiled: bool) -> None:
    """Without compiled parts it was that of bytes with the source's checksum: every redelivered message was lost."""
    if not is_compiled:
        monkeypatch.setattr("mqstore.layout.arrays.encode.kernel", None)
    record = decode_record(WORKED_BYTES_MQSTORE)
    assert copy_of(WORKED_BYTES_MQSTORE, record, "crc32c-record") == WORKED_BYTES_MQSTORE


def test_the_worked_vector_decodes_to_its_fields() -> None:
    record = decode_record(WORKED_BYTES_MQSTORE)
    assert (record.total_size, record.magic, record.checksum) == (176, MAGIC_V1, -1614803463)
    assert (record.topic, record.body.decode()) == ("OrderTopic", "hello 订单")
    assert record.message_id == "C0A8010A00002A9F0000000000000400"
    assert (decode_host(record.born_host), decode_host(record.store_host)) == ("127.0.0.1:50000", "192.168.1.10:10911")
    assert record.properties == {"KEYS": "ORD-1", "TAGS": "TagA", "UNIQ_KEY": "7F00000104D218B4AAC208A2B1C00000"}


def test_a_crc_tail_equals_the_worked_vector() -> None:
    record = encode_record(
        **ZEROS, topic="T", body=b"abc", properties=b"TAGS\x01a\x02", checksum="crc32-body", crc_tail=True
    )
    assert len(record) == 122
    assert record[8:12].hex() == "352441c2"
    assert int.from_bytes(record[122 - 29 : 122 - 27], "big") == 27
    assert record[-20:].hex() == "5f5f43524333322301313135303233323535" + "3002"
    assert check_record(in_segment(record), 0, SEGMENT_BYTES, 0, "crc32-body") == Check("ok", 122)


@pytest.mark.parametrize("size", [7, 0, -1])
def test_a_blank_of_less_than_eight_bytes_cannot_be(size: int) -> None:
    with pytest.raises(ValueError, match="BLANK"):
        encode_blank(size)


# --- the Java engine's stores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_the_log_of_java_verifies_and_encodes_alike(golden: Callable[[str], GoldenStore], name: str) -> None:
    store = golden(name)
    bounds = store.of("store")[0]
    kinds: set[str] = set()
    copied = 0
    offset = bounds["min_physical_offset"]
    for start, segment in store.segments:
        position = 0
        while True:
            check = check_record(segment, position, len(segment), start + position, "crc32-body")
            kinds.add(check.status)
            if check.status != "ok":
                break
            stored = segment[position : position + check.size]
            record = decode_record(segment, position)
            assert (decode_crc_tail(record.properties_bytes) is not None) == (name == "propcrc")
            if len(record.born_host) == len(record.store_host) == IPV4_BYTES:  # what a copy may have
                assert stored == copy_of(stored, record)
                copied += 1
            position += check.size
        if check.status == "blank":
            assert position + check.size == len(segment)
            position = len(segment)
        else:
            assert (check.size, check.field, check.detail) == (0, "magic", "zeros: nothing was written here")
        offset = start + position
        if check.status == "bad":
            break
    assert offset == bounds["max_physical_offset"]
    assert kinds == {"ok", "blank", "bad"}
    assert copied


# --- decoding --------------------------------------------------------------------------------------------------------


@given(models)
def test_records_decode_to_the_fields_of_the_model(model: dict[str, Any]) -> None:
    data = encode_model(model)
    record = decode_record(b"front" + data + b"behind", 5)
    assert (record.total_size, record.topic_bytes, record.body) == (len(data), model["topic"], model["body"])
    assert record.properties_bytes == model["properties"]
    assert record.properties == decode_properties(model["properties"])
    assert (record.born_host, record.store_host) == (model["born_host"], model["store_host"])
    numbers = model["numbers"]
    assert numbers[4] & ~0x30 == record.sys_flag & ~0x30
    assert numbers[:4] + numbers[5:] == (
        record.queue_id, record.flag, record.queue_offset, record.physical_offset, record.born_timestamp_ms,
        record.store_timestamp_ms, record.reconsume_times, record.prepared_transaction_offset,
    )  # fmt: skip


@given(models)
def test_encoded_record_verifies_and_a_flipped_bit_does_not(model: dict[str, Any]) -> None:
    model = {**model, "checksum": "crc32c-record"}
    data = encode_model(model)
    limit, offset = len(data) + 8, model["numbers"][3]
    assert check_record(data + encode_blank(8), 0, limit, offset, "crc32c-record") == Check("ok", len(data))
    for position in range(0, len(data), 7):
        broken = bytearray(data + encode_blank(8))
        broken[position] ^= 1 << position % 8
        assert check_record(broken, 0, limit, offset, "crc32c-record").status == "bad"


def test_reading_leaves_no_view_behind_on_a_mapping() -> None:
    with mmap.mmap(-1, SEGMENT_BYTES) as mapping:  # closing a mapping that has views raises BufferError
        mapping[:176] = WORKED_BYTES
        assert decode_record(mapping).body == WORKED["body"]
        assert check_record(mapping, 0, SEGMENT_BYTES, 1024, "crc32-body").status == "ok"
        with pytest.raises(FormatError):
            decode_record(mapping, 1)


def test_a_topic_that_is_not_utf8_keeps_its_bytes() -> None:
    record = decode_record(worked("crc32-body", topic=b"a\xff"))
    assert (record.topic, record.topic_bytes) == ("a\ufffd", b"a\xff")


# --- damage ---------------------------------------------------------------------------------------------------------


def damaged(position: int, data: bytes, checksum: Checksum = "crc32c-record") -> bytes:
    """The worked record with `data` at `position`, its checksum made to fit again: only other rules can refuse it."""
    record = bytearray(worked(checksum))
    record[position : position + len(data)] = data
    if checksum == "crc32c-record":
        record[8:12] = bytes(4)
        record[8:12] = crc32c.crc32c(bytes(record)).to_bytes(4, "big")
    return bytes(record)


@pytest.mark.parametrize("checksum", CHECKSUMS)
@pytest.mark.parametrize(
    ("position", "data", "field"),
    [
        (0, (0).to_bytes(4, "big"), "total_size"),
        (0, (90).to_bytes(4, "big"), "total_size"),
        (0, (-176 & 0xFFFFFFFF).to_bytes(4, "big"), "total_size"),
        (0, (SEGMENT_BYTES + 1).to_bytes(4, "big"), "total_size"),
        (0, (175).to_bytes(4, "big"), "properties"),
        (0, (177).to_bytes(4, "big"), "properties"),
        (0, (99).to_bytes(4, "big"), "body"),
        (0, (110).to_bytes(4, "big"), "topic"),
        (4, bytes.fromhex("daa320ac"), "magic"),
        (36, bytes.fromhex("00000030"), "body"),  # host bits that do not fit the hosts
        (84, bytes.fromhex("ffffffff"), "body"),
        (84, bytes.fromhex("7fffffff"), "body"),
        (84, bytes.fromhex("00000000"), "topic"),
        (100, bytes.fromhex("80"), "topic"),  # the topic length of V1 is signed
        (100, bytes.fromhex("ff"), "topic"),
        (100, bytes.fromhex("7f"), "topic"),
        (111, bytes.fromhex("ffff"), "properties"),
        (111, bytes.fromhex("0040"), "properties"),
        (28, (1025).to_bytes(8, "big"), "physical_offset"),
    ],
)
def test_damage_is_named_by_its_field(checksum: Checksum, position: int, data: bytes, field: str) -> None:
    record = in_segment(damaged(position, data, checksum))
    check = check_record(record, 0, SEGMENT_BYTES, 1024, checksum)
    assert (check.status, check.field) == ("bad", field)
    assert check.detail
    if field == "physical_offset":
        assert check.size == 176  # the lengths hold: the next record can still be found
        assert decode_record(record).physical_offset == 1025
    else:
        with pytest.raises(FormatError) as caught:
            decode_record(record)
        assert caught.value.field == field


@pytest.mark.parametrize("checksum", CHECKSUMS)
def test_a_record_without_a_topic_is_bad(checksum: Checksum) -> None:
    record = in_segment(
        encode_record(**ZEROS, topic=b"", body=b"abc", born_host=bytes(8), store_host=bytes(8), checksum=checksum)
    )
    check = check_record(record, 0, SEGMENT_BYTES, 0, checksum)
    assert (check.status, check.size, check.field) == ("bad", 94, "topic")


@pytest.mark.parametrize(
    ("body", "position", "statuses"),
    [
        *((WORKED["body"], at, ["bad", "bad"]) for at in (8, 11, 88, 99)),
        *((WORKED["body"], at, ["ok", "bad"]) for at in (15, 19, 27, 39, 47, 55, 63, 71, 75, 83, 101, 113, 175)),
        (b"", 11, ["ok", "bad"]),  # RocketMQ compares no checksum of an empty body
    ],
)
def test_changed_byte_is_found_by_the_checksum(body: bytes, position: int, statuses: list[str]) -> None:
    """The body in both profiles; header, topic and properties under the wider checksum only."""
    checks = []
    for checksum in CHECKSUMS:
        record = bytearray(in_segment(worked(checksum, body=body)))
        record[position] ^= 1
        checks.append(check_record(record, 0, SEGMENT_BYTES, 1024, checksum))
    assert [check.status for check in checks] == statuses
    bad = {(check.size, check.field) for check in checks if check.status == "bad"}
    assert bad == {(len(worked("crc32-body", body=body)), "checksum")}


@pytest.mark.parametrize("checksum", CHECKSUMS)
def test_the_other_profiles_record_does_not_verify(checksum: Checksum) -> None:
    other = CHECKSUMS[1 - CHECKSUMS.index(checksum)]
    assert check_record(in_segment(worked(other)), 0, SEGMENT_BYTES, 1024, checksum).field == "checksum"


@pytest.mark.parametrize("position", [12, 36 + 3, 88, 176 + 9, 176 + 12, 176 + 19])
def test_a_crc_tail_is_verified_when_it_is_there(position: int) -> None:
    record = bytearray(in_segment(worked("crc32-body", crc_tail=True)))
    assert check_record(record, 0, SEGMENT_BYTES, 1024, "crc32-body") == Check("ok", 196)
    record[position] ^= 0x40 if position >= 176 else 1
    check = check_record(record, 0, SEGMENT_BYTES, 1024, "crc32-body")
    assert (check.status, check.size) == ("bad", 196)
    assert check.field == ("checksum" if position == 88 else "properties")


@pytest.mark.parametrize("difference", [-1, 1])
def test_a_crc_tail_must_be_met_exactly(difference: int) -> None:
    record = worked("crc32-body", crc_tail=True)
    other = encode_crc_tail((zlib.crc32(record[:-20]) & 0x7FFFFFFF) + difference)
    check = check_record(in_segment(record[:-20] + other), 0, SEGMENT_BYTES, 1024, "crc32-body")
    assert (check.status, check.size, check.field) == ("bad", 196, "properties")


@pytest.mark.parametrize(
    ("topic", "properties", "verifies"),
    [
        ("SCHEDULE_TOPIC_XXXX", {"DELAY": "3"}, True),
        ("SCHEDULE_TOPIC_XXXX", {"DELAY": "+3"}, True),
        ("SCHEDULE_TOPIC_XXXX", {}, True),
        ("SCHEDULE_TOPIC_XXXX", {"DELAY": "three"}, False),
        ("SCHEDULE_TOPIC_XXXX", {"DELAY": " 3"}, False),
        ("SCHEDULE_TOPIC_XXXX", {"DELAY": "2147483648"}, False),
        ("SCHEDULE_TOPIC_XXXX", {"DELAY": "9" * 5000}, False),
        ("orders", {"DELAY": "three"}, True),
        ("orders", {"INNER_NUM": "32767", "INNER_BASE": "-9223372036854775808"}, True),
        ("orders", {"INNER_NUM": "32768"}, False),
        ("orders", {"INNER_BASE": "9223372036854775808"}, False),
        ("orders", {"INNER_BASE": "x"}, False),
        ("orders", {"INNER_MULTI_DISPATCH": "x"}, True),
    ],
)
@pytest.mark.parametrize("checksum", CHECKSUMS)
def test_numbers_that_the_dispatch_needs_must_be_numbers(
    topic: str, properties: dict[str, str], verifies: bool, checksum: Checksum
) -> None:
    record = worked(checksum, topic=topic, properties=encode_properties(properties)) + bytes(8)
    check = check_record(record, 0, len(record), 1024, checksum)
    assert check.status == ("ok" if verifies else "bad")
    assert check.field == ("" if verifies else "properties")


# --- where a segment ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [8, 9, 100, 4096])
def test_a_blank_fills_its_segment_exactly(left: int) -> None:
    blank = bytes(3) + encode_blank(left) + b"\xee" * (left - 8)
    assert check_record(blank, 3, 3 + left, 77, "crc32c-record") == Check("blank", left)
    for limit in (2 + left, 4 + left):
        check = check_record(blank + b"\0", 3, limit, 77, "crc32c-record")
        assert check.status == "bad"
        assert check.size == 0


def test_a_blank_is_known_by_its_first_eight_bytes() -> None:
    """A read-only tool maps what the file really holds, which may be less than the segment."""
    assert check_record(encode_blank(100), 0, 100, 0, "crc32-body") == Check("blank", 100)


@pytest.mark.parametrize("left", range(-1, 8))
def test_less_than_eight_bytes_hold_nothing(left: int) -> None:
    assert check_record(bytes(20), 20 - left, 20, 0, "crc32-body").status == "bad"


@pytest.mark.parametrize("cut", [0, 7, 8, 40, 90, 91, 175])
def test_a_record_that_is_cut_off_is_bad(cut: int) -> None:
    for buf, limit in ((WORKED_BYTES[:cut], SEGMENT_BYTES), (WORKED_BYTES, cut)):
        assert check_record(buf, 0, limit, 1024, "crc32-body").status == "bad"
        with pytest.raises(FormatError):
            decode_record(buf[:limit])


@pytest.mark.parametrize("checksum", CHECKSUMS)
@given(
    data=st.binary(max_size=200), size=st.integers(-1, 300), magic=st.sampled_from([MAGIC_V1, MAGIC_V2, MAGIC_BLANK])
)
def test_no_bytes_make_a_reader_fail_otherwise(data: bytes, size: int, magic: int, checksum: Checksum) -> None:
    buf = struct.pack(">ii", size, magic) + data
    check = check_record(buf, 0, 250, int.from_bytes(data[20:28], "big", signed=True), checksum)
    assert check.status in ("ok", "blank", "bad")
    assert 0 <= check.size <= 250
    position, total_size = 0, size
    try:
        total_size = decode_record(buf).total_size
    except FormatError as error:
        position = error.position
    assert 0 <= position < len(buf)
    assert total_size == size
