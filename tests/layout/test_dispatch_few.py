"""Records looked at one struct at a time give what arrays give: `few` against `walk`, `Headers`, `rows_of`. The arrays
are checked against the Java engine's files elsewhere; here they are the model.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.layout.arrays.dispatch import FEW_RECORDS, SCHEDULE_TOPIC, Output, few, rows_of, tags_code_at
from mqstore.layout.arrays.scan import Headers, walk
from mqstore.layout.record import INNER_BATCH, MAGIC_V1, MAGIC_V2, encode_blank

LEVELS_MS = (1_000, 5_000, 10_000)
BASE = 3 << 26

NAMES = st.sampled_from([b"TAGS", b"KEYS", b"UNIQ_KEY", b"DELAY", b"TAG", b"TAGS ", b"UNIQ_KEYS", b"tags", b"", b"k"])
VALUES = st.one_of(
    st.sampled_from(
        [
            *(b"", b"a", b" ", b"k1 k2", b"  k1  k1 ", b"1", b"3", b"99", b"-1", b"0", b"polygenelubricants"),
            *("²".encode(), "订单 😀".encode(), b"\xff\xfe bad", b"v\x01w", b"AC1E0C0200002A9F0000000000000001"),
        ]
    ),
    st.binary(max_size=12),
)
PAIRS = st.tuples(NAMES, st.sampled_from([b"\x01", b"\x01", b"\x01", b"\x01\x01", b""]), VALUES).map(b"".join)
PROPERTIES = st.tuples(st.lists(PAIRS, max_size=6), st.sampled_from([b"", b"\x02", b"\x02\x02"])).map(
    lambda parts: b"\x02".join(parts[0]) + parts[1]
)
TOPICS = st.sampled_from(
    [b"t", b"t", b"orders", SCHEDULE_TOPIC.encode(), b"SCHEDULE_TOPIC_XXXY", b"\xff\xfe", "订".encode(), b"x" * 200]
)
STAMPS = st.one_of(
    st.sampled_from([1_700_000_000_123, 0, -1, (1 << 63) - 1, -(1 << 63), (1 << 63) - 1_000]), st.integers(0, 1 << 42)
)


def record(
    topic: bytes = b"t",
    body: bytes = b"body",
    properties: bytes = b"",
    *,
    second: bool = False,
    queue_id: int = 0,
    queue_offset: int = 0,
    sys_flag: int = 0,
    stamp: int = 1_700_000_000_123,
) -> bytes:
    """A record (format#record) of either magic and any hosts. Checksum and physical offset are not looked at here."""
    born, store = bytes(20 if sys_flag & 0x10 else 8), bytes(20 if sys_flag & 0x20 else 8)
    second = second or len(topic) > 127
    tail = struct.pack(">h" if second else ">b", len(topic)) + topic + struct.pack(">h", len(properties)) + properties
    rest = struct.pack(">iiiqqiq", 0, queue_id, 7, queue_offset, -5, sys_flag, 11) + born
    rest += struct.pack(">q", stamp) + store + struct.pack(">iqi", 2, 13, len(body)) + body + tail
    return struct.pack(">ii", len(rest) + 8, MAGIC_V2 if second else MAGIC_V1) + rest


RECORDS = st.builds(
    record,
    TOPICS,
    st.binary(max_size=20),
    PROPERTIES,
    second=st.booleans(),
    queue_id=st.sampled_from([0, 0, 1, 2, -1, 0x7FFFFFFF]),
    queue_offset=st.sampled_from([0, 1, 2, 1 << 40, -1]),
    sys_flag=st.sampled_from([0, 0, 4, 8, 12, 0x10, 0x20, 0x30, 0x38, 0x301, -1]),
    stamp=STAMPS,
)


def plain(output: Output) -> tuple[Any, ...]:
    """An output in plain values."""
    lists = [np.asarray(part, np.int64).tolist() for part in output[1:4]]
    queues = [(t, q, np.asarray(offsets, np.int64).tolist(), units) for t, q, offsets, units in output.queues]
    return queues, *lists, output.last_store_timestamp_ms


def by_arrays(data: bytes) -> tuple[Output, bool]:
    """What the array path gives, and whether there was nothing but good records."""
    positions, stop = walk(data, 0, len(data), 8192)
    headers = Headers(data, positions)
    whole = stop == len(data) and bool(headers.ok.all())
    with np.errstate(over="ignore"):
        return rows_of(data, Headers(data, positions[headers.ok]), BASE, LEVELS_MS).output(), whole


@given(st.lists(RECORDS, min_size=1, max_size=FEW_RECORDS))
def test_few_records_give_what_arrays_give(records: list[bytes]) -> None:
    data = b"".join(records)
    expected, whole = by_arrays(data)
    found = few(data, 0, len(data), BASE, LEVELS_MS)
    assert whole
    if found is None:  # for nothing but what is no ordinary record
        headers = Headers(data, walk(data, 0, len(data))[0])
        assert (headers.sys_flag & INNER_BATCH).any() or b"INNER_MULTI_DISPATCH" in data
    else:
        assert plain(found) == plain(expected)


@given(st.data())
def test_damaged_records_give_what_arrays_give_or_are_left_to_them(data: st.DataObject) -> None:
    image = bytearray(b"".join(data.draw(st.lists(RECORDS, min_size=1, max_size=3))))
    for at in data.draw(st.lists(st.integers(0, len(image) - 1), min_size=1, max_size=3)):
        image[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF, image[at] ^ 1]))
    expected, whole = by_arrays(bytes(image))
    found = few(image, 0, len(image), BASE, LEVELS_MS)
    if found is not None:
        assert whole
        assert plain(found) == plain(expected)


@given(RECORDS)
def test_the_tags_code_of_one_record(whole: bytes) -> None:
    assert tags_code_at(whole, 0, LEVELS_MS) == rows_of(whole, Headers(whole, [0]), BASE, LEVELS_MS).tags_code[0]


@pytest.mark.parametrize("cut", [1, 8, 60])
def test_a_stretch_that_something_else_ends_is_left_to_arrays(cut: int) -> None:
    good = record()
    assert few(good, 0, len(good), BASE, LEVELS_MS) is not None
    assert few(good + encode_blank(16) + bytes(8), 0, len(good) + 16, BASE, LEVELS_MS) is None
    assert few(good + bytes(cut), 0, len(good) + cut, BASE, LEVELS_MS) is None
    assert few(good, 0, len(good) - cut, BASE, LEVELS_MS) is None
    assert few(good * FEW_RECORDS, 0, FEW_RECORDS * len(good), BASE, LEVELS_MS) is not None
    assert few(good * (FEW_RECORDS + 1), 0, (FEW_RECORDS + 1) * len(good), BASE, LEVELS_MS) is None
