"""Properties: format#properties, format#crc-tail, and what the golden stores hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.errors import FormatError, InvalidMessageError
from mqstore.layout.properties import (
    MAX_PROPERTIES_BYTES,
    RESERVED,
    decode_crc_tail,
    decode_properties,
    encode_properties,
    is_reserved,
)
from tests.records import encode_crc_tail

# The table of format#property-names, spelled again, and names of ours.
# fmt: off
SECTION_3 = [
    "KEYS", "TAGS", "UNIQ_KEY", "WAIT", "DELAY", "REAL_TOPIC", "REAL_QID", "RETRY_TOPIC", "RECONSUME_TIME",
    "MAX_RECONSUME_TIMES", "ORIGIN_MESSAGE_ID", "DLQ_ORIGIN_TOPIC", "DLQ_ORIGIN_MESSAGE_ID", "MIN_OFFSET",
    "MAX_OFFSET", "TRAN_MSG", "PGROUP", "__transactionId__", "TRAN_PREPARED_QUEUE_OFFSET", "TRANSACTION_CHECK_TIMES",
    "CHECK_IMMUNITY_TIME_IN_SECONDS", "CONSUME_START_TIME", "__SHARDINGKEY", "POP_CK", "POP_CK_OFFSET",
    "1ST_POP_TIME", "INNER_NUM", "INNER_BASE", "INNER_MULTI_DISPATCH", "INNER_MULTI_QUEUE_OFFSET", "DUP_INFO",
    "__CRC32#", "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "TIMER_OUT_MS", "TIMER_ENQUEUE_MS",
    "TIMER_DEQUEUE_MS", "TIMER_ROLL_TIMES", "TIMER_DEL_UNIQKEY", "TIMER_DELAY_LEVEL", "MSG_REGION", "TRACE_ON",
    "TRACE_CONTEXT", "CLUSTER", "MSG_TYPE", "INSTANCE_ID", "BUYER_ID", "EXTEND_UNIQ_INFO", "__BORNHOST",
    "BORN_TIMESTAMP", "CORRELATION_ID", "REPLY_TO_CLIENT", "TTL", "ARRIVE_TIME", "PUSH_REPLY_TIME", "TRANSFER_FLAG",
    "CORRECTION_FLAG", "MQ2_FLAG", "REDIRECT", "PROPERTY_FORWARD_QUEUE_ID", "dlq_reason",
    "mqstore_retry_reason", "mqstore_expires_ms",
]
# fmt: on

storable = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1, max_size=20)
property_maps = st.dictionaries(storable, storable, max_size=8)


def model_decode(data: bytes) -> dict[str, str]:
    """The parse rule as the Java loop walks it: indices into one decoded string, no splitting."""
    text = data.decode("utf-8", "replace")
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        end = text.find("\x02", at)
        end = len(text) if end < 0 else end
        if end - at >= 3:
            middle = text.find("\x01", at)
            if at < middle < end - 1:
                found[text[at:middle]] = text[middle + 1 : end]
        at = end + 1
    return found


def test_reserved_names_are_those_of_section_3() -> None:
    assert sorted(RESERVED) == sorted(SECTION_3)


@pytest.mark.parametrize(
    ("name", "reserved"),
    [
        ("KEYS", True),
        ("keys", False),
        ("mqstore_retry_reason", True),
        ("mqstore_expires_ms", True),
        ("__RMQ.TRANSIENT.TOPIC_SYS_FLAG", True),
        ("__RMQ.OTHER", False),
        ("colour", False),
    ],
)
def test_reserved_names_are_recognized(name: str, reserved: bool) -> None:
    assert is_reserved(name) is reserved


def test_encoding_keeps_the_order_and_closes_each_pair() -> None:
    data = encode_properties({"KEYS": "ORD-1", "WAIT": None, "TAGS": "订单"})
    assert data == b"KEYS\x01ORD-1\x02TAGS\x01" + "订单".encode() + b"\x02"


@pytest.mark.parametrize(
    "wrong",
    [
        {"": "v"},
        {"n": ""},
        {"a\x01": "v"},
        {"a\x02": "v"},
        {"n": "\x01"},
        {"n": "v\x02"},
        {"n": "\ud800"},
        {"\udfff": "v"},
    ],
)
def test_unreadable_property_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        encode_properties({"fine": "yes", **wrong})
    assert caught.value.field == "properties"


def test_the_limit_counts_bytes_not_characters() -> None:
    room = MAX_PROPERTIES_BYTES - len(b"n\x01\x02")
    assert len(encode_properties({"n": "v" * room})) == 32767
    assert len(encode_properties({"n": "单" * (room // 3)})) <= 32767
    with pytest.raises(InvalidMessageError):
        encode_properties({"n": "v" * (room + 1)})
    with pytest.raises(InvalidMessageError):
        encode_properties({"n": "单" * (room // 3 + 1)})


@pytest.mark.parametrize(
    ("data", "properties"),
    [
        (b"a\x01b\x02", {"a": "b"}),
        (b"a\x01b", {"a": "b"}),  # the last separator may be missing
        (b"a\x01b\x02\x02c\x01d\x02", {"a": "b", "c": "d"}),
        (b"a\x01b\x01c\x02", {"a": "b\x01c"}),  # the first 0x01 separates
        (b"a\x01b\x02a\x01c\x02", {"a": "c"}),  # the last of equal names wins
        (b"\x01b\x02a\x01\x02ab\x02abc\x02\x01\x02", {}),
        (b"\x01a\x01b\x02", {}),
        (b"a\x01\xff\xfe\x02\xe4\x01c\x02", {"a": "\ufffd\ufffd", "\ufffd": "c"}),
    ],
)
def test_reading_is_lenient(data: bytes, properties: dict[str, str]) -> None:
    assert decode_properties(data) == properties


@given(property_maps)
def test_properties_survive_a_round_trip(properties: dict[str, str]) -> None:
    assert decode_properties(encode_properties(properties)) == properties


@given(
    st.binary(max_size=80)
    | st.lists(st.sampled_from([b"\x01", b"\x02", b"a", b"\xe4", b"K"]), max_size=30).map(b"".join)
)
def test_reading_any_bytes_equals_the_java_loop(data: bytes) -> None:
    assert decode_properties(data) == model_decode(data)


# --- CRC tail -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"", b"TAGS\x01a\x02", b"x\x01y" + encode_crc_tail(5), encode_crc_tail(5)[1:], encode_crc_tail(5) + b"a\x01b\x02"],
)
def test_properties_without_a_tail_have_none(data: bytes) -> None:
    assert decode_crc_tail(data) is None


@pytest.mark.parametrize("position", range(9, 20))
def test_damaged_tail_differs_from_a_missing_one(position: int) -> None:
    tail = bytearray(encode_crc_tail(552320511))
    tail[position] ^= 0x40
    with pytest.raises(FormatError):
        decode_crc_tail(bytes(tail))
