"""A guess of the topic makes records cheaper to look at, and changes nothing else, whatever lies there."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mqstore.layout.hosts import LOCAL_HOST, encode_host
from mqstore.layout.record import encode_record
from mqstore.layout.scan import gather, topic_is

_COLUMNS = (
    *("ok", "body_position", "body_size", "topic_position", "topic_size", "properties_position", "properties_size"),
    *("size", "magic", "queue_id", "store_timestamp_ms", "reconsume_times"),
)


def record(topic: str, body: bytes, properties: bytes, host: bytes) -> bytes:
    return encode_record(
        topic=topic,
        body=body,
        properties=properties,
        queue_id=1,
        queue_offset=2,
        physical_offset=3,
        born_timestamp_ms=4,
        store_timestamp_ms=5,
        born_host=host,
        checksum="crc32c-record",
    )


@given(
    records=st.lists(
        st.builds(
            record,
            st.sampled_from(["t", "t", "t", "u", "tt", "x" * 130]),
            st.binary(max_size=9),
            st.binary(max_size=9),
            st.sampled_from([LOCAL_HOST, LOCAL_HOST, LOCAL_HOST, encode_host("[::1]:5")]),
        ),
        min_size=1,
        max_size=6,
    ),
    flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 255)), max_size=2),
    guess=st.sampled_from([b"t", b"tt", b"x" * 130, b""]),
)
def test_records_gathered_with_a_topic_in_mind_are_the_same(
    records: list[bytes], flips: list[tuple[int, int]], guess: bytes
) -> None:
    starts = np.cumsum([0, *map(len, records)])[:-1]
    data = bytearray(b"".join(records))
    for at, change in flips:
        data[at % len(data)] ^= change
    plain, guessed = gather(data, starts), gather(data, starts, topic=guess)
    for name in _COLUMNS:
        assert getattr(guessed, name).tolist() == getattr(plain, name).tolist(), name
    for topic in (b"t", b"tt", b"x" * 130):
        expected = [
            bool(ok) and bytes(data[a : a + n]) == topic
            for ok, a, n in zip(plain.ok, plain.topic_position, plain.topic_size, strict=True)
        ]
        assert topic_is(data, plain, topic).tolist() == topic_is(data, guessed, topic).tolist() == expected


def test_the_guess_is_used() -> None:
    records = [record("orders", b"x" * i, b"n\x01v\x02", LOCAL_HOST) for i in range(20)]
    starts = np.cumsum([0, *map(len, records)])[:-1]
    headers = gather(b"".join(records), starts, topic=b"orders")
    assert headers.ok.all()
    assert headers.known_topic == b"orders"


def test_any_damaged_byte_is_seen_as_it_is_without_a_guess() -> None:
    whole = record("orders", b"body", b"n\x01v\x02", LOCAL_HOST)
    for at in range(len(whole)):
        for change in (0x01, 0x10, 0x80, 0xFF):
            data = bytearray(whole + whole)
            data[at] ^= change
            starts = np.array([0, len(whole)])
            plain, guessed = gather(data, starts), gather(data, starts, topic=b"orders")
            for name in _COLUMNS:
                assert getattr(guessed, name).tolist() == getattr(plain, name).tolist(), (at, change, name)
