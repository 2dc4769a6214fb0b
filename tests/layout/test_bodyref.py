"""References to bodies: bytes in place of a body, and the record with the body again (format#flags)."""

from __future__ import annotations

import pytest

from mqstore.errors import FormatError
from mqstore.layout.bodyref import filled, is_reference, place_of, reference_to
from mqstore.layout.hosts import LOCAL_HOST, encode_host
from mqstore.layout.record import decode_record
from tests.records import encode_record

V6 = encode_host("[2001:db8::1]:99")


def record(body: bytes, sys_flag: int = 0, physical_offset: int = 7, born: bytes = LOCAL_HOST) -> bytes:
    return encode_record(
        topic="t" * 130,
        body=body,
        queue_id=1,
        queue_offset=2,
        physical_offset=physical_offset,
        born_timestamp_ms=3,
        store_timestamp_ms=4,
        checksum="crc32c-record",
        properties=b"a\x01b\x02",
        sys_flag=sys_flag,
        born_host=born,
        store_host=V6,
        reconsume_times=5,
    )


@pytest.mark.parametrize("body", [b"", b"x", b"body" * 9_000])
@pytest.mark.parametrize("compression", [0, 0x301])
@pytest.mark.parametrize("born", [LOCAL_HOST, V6], ids=["IPv4", "IPv6"])
def test_filled_record_is_the_record_with_the_body(body: bytes, compression: int, born: bytes) -> None:
    origin = record(body, compression, physical_offset=1 << 40)
    waiting = record(reference_to(origin), 0x709, born=born)
    assert place_of(decode_record(waiting, 0).body) == 1 << 40
    found, wanted = (
        decode_record(filled(waiting, compression, body), 0),
        decode_record(record(body, compression | 8, born=born), 0),
    )
    assert found._replace(checksum=0) == wanted._replace(checksum=0)


def test_reference_differs_for_each_record() -> None:
    records = [record(b"a"), record(b"b"), record(b"a", physical_offset=8), record(b"ab")]
    assert len({reference_to(each) for each in records}) == len(records)


@pytest.mark.parametrize("flag", [0, 1, 0x301, 0x700, 0x601])
def test_other_bodies_are_no_references(flag: int) -> None:
    assert not is_reference(flag)
    assert is_reference(flag | 0x701)


@pytest.mark.parametrize("size", [0, 15, 17])
def test_reference_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(FormatError, match="has 16 bytes"):
        place_of(bytes(size))
