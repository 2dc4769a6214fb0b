"""A batch has the bytes that its records have one by one (format#record, format#batch, format#checksum)."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.layout.arrays.encode import encode_records
from mqstore.layout.hosts import encode_host
from mqstore.layout.properties import encode_properties
from mqstore.layout.record import MAGIC_V1, MAGIC_V2, Checksum
from tests.records import encode_record

HOSTS = [encode_host("127.0.0.1:0"), encode_host("10.1.2.3:10911"), encode_host("[::1]:124")]


def one_by_one(
    topic: str, bodies: list[bytes], properties: list[bytes], flags: list[int], **common: Any
) -> list[bytes]:
    records = []
    at = common.pop("physical_offset")
    first = common.pop("queue_offset")
    for i, body in enumerate(bodies):
        records.append(
            encode_record(
                topic=topic,
                body=body,
                properties=properties[i],
                flag=flags[i],
                queue_offset=first + i,
                physical_offset=at,
                **common,
            )
        )
        at += len(records[-1])
    return records


def tail(topic: str, properties: bytes) -> bytes:
    name = topic.encode()
    return (
        len(name).to_bytes(1 if len(name) <= 127 else 2, "big") + name + len(properties).to_bytes(2, "big") + properties
    )


@pytest.mark.parametrize("checksum", ["crc32c-record", "crc32-body"])
@given(data=st.data())
def test_a_batch_has_the_bytes_of_its_records(checksum: Checksum, data: st.DataObject) -> None:
    topic = data.draw(st.sampled_from(["t", "orders", "%RETRY%" + "g" * 140]))
    body = st.binary(max_size=200)
    size = data.draw(st.integers(0, 100))
    alike = st.binary(min_size=size, max_size=size)
    bodies = data.draw(st.lists(data.draw(st.sampled_from([body, alike])), min_size=1, max_size=20))
    some = [b"", encode_properties({"TAGS": "a"}), encode_properties({"TAGS": "b"}), encode_properties({"KEYS": "k 2"})]
    properties = data.draw(st.lists(st.sampled_from(some), min_size=len(bodies), max_size=len(bodies)))
    common_tail = data.draw(st.booleans())
    if common_tail:
        properties = [properties[0]] * len(bodies)
    flags = data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=len(bodies), max_size=len(bodies)))
    common_flag = data.draw(st.booleans())
    if common_flag:
        flags = [flags[0]] * len(bodies)
    where = {"queue_offset": data.draw(st.integers(0, 2**62)), "physical_offset": data.draw(st.integers(0, 2**62))}
    hosts = {"born_host": data.draw(st.sampled_from(HOSTS)), "store_host": data.draw(st.sampled_from(HOSTS))}
    queue_id = data.draw(st.integers(0, 2**31 - 1))

    encoded, positions = encode_records(
        bodies,
        tail(topic, properties[0]) if common_tail else [tail(topic, each) for each in properties],
        magic=MAGIC_V1 if len(topic) <= 127 else MAGIC_V2,
        queue_id=queue_id,
        timestamp_ms=1_700_000_000_123,
        flags=flags[0] if common_flag else flags,
        checksum=checksum,
        **where,
        **hosts,
    )

    wanted = one_by_one(
        topic,
        bodies,
        properties,
        flags,
        queue_id=queue_id,
        born_timestamp_ms=1_700_000_000_123,
        store_timestamp_ms=1_700_000_000_123,
        checksum=checksum,
        **where,
        **hosts,
    )
    assert encoded == b"".join(wanted)
    assert [*positions] == [*accumulate(map(len, wanted), initial=where["physical_offset"])]
