"""Records put together field by field, apart from the code under test (format#record, format#checksum)."""

from __future__ import annotations

import zlib

import crc32c

from mqstore.layout.record import Checksum

__all__ = ["encode_crc_tail", "encode_record"]

LOCAL_HOST = bytes([127, 0, 0, 1, 0, 0, 0, 0])


def encode_record(
    *,
    topic: str | bytes,
    body: bytes,
    queue_id: int,
    queue_offset: int,
    physical_offset: int,
    born_timestamp_ms: int,
    store_timestamp_ms: int,
    checksum: Checksum,
    properties: bytes = b"",
    flag: int = 0,
    sys_flag: int = 0,
    born_host: bytes = LOCAL_HOST,
    store_host: bytes = LOCAL_HOST,
    reconsume_times: int = 0,
    prepared_transaction_offset: int = 0,
    crc_tail: bool = False,
) -> bytes:
    """Return a record. `crc_tail` closes the properties by the CRC of all before."""
    if crc_tail and properties and not properties.endswith(b"\x02"):
        properties += b"\x02"
    topic = topic.encode() if isinstance(topic, str) else topic
    sys_flag = sys_flag & ~0x30 | (0x10 if len(born_host) == 20 else 0) | (0x20 if len(store_host) == 20 else 0)

    def number(value: int, size: int) -> bytes:
        return value.to_bytes(size, "big", signed=True)

    fields = [
        number(queue_id, 4), number(flag, 4), number(queue_offset, 8), number(physical_offset, 8), number(sys_flag, 4),
        number(born_timestamp_ms, 8), born_host, number(store_timestamp_ms, 8), store_host, number(reconsume_times, 4),
        number(prepared_transaction_offset, 8), number(len(body), 4), body,
        number(len(topic), 1 if len(topic) < 128 else 2), topic, number(len(properties) + 20 * crc_tail, 2), properties,
    ]  # fmt: skip
    rest = b"".join(fields)
    start = number(12 + len(rest) + 20 * crc_tail, 4) + (
        b"\xda\xa3\x20\xa7" if len(topic) < 128 else b"\xda\xa3\x20\xab"
    )
    if checksum == "crc32c-record":
        return start + crc32c.crc32c(start + bytes(4) + rest).to_bytes(4, "big") + rest
    record = start + (zlib.crc32(body) & 0x7FFFFFFF).to_bytes(4, "big") + rest
    return record + encode_crc_tail(zlib.crc32(record) & 0x7FFFFFFF) if crc_tail else record


def encode_crc_tail(value: int) -> bytes:
    """Return the 20 bytes that hold `value`.

    >>> encode_crc_tail(552320511)
    b'__CRC32#\\x011150232550\\x02'
    """
    return b"__CRC32#\x01" + f"{value:010d}"[::-1].encode() + b"\x02"
