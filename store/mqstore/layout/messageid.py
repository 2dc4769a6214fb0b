"""The offset message id: the address of one stored copy of a message, as text (format#ids).

    storeHost (address 4 or 16 bytes, port i32) | physicalOffset i64        as upper-case hex: 32 or 56 characters

The *unique key* (property UNIQ_KEY) may look the same but is something else. It is opaque to the store.
"""

from __future__ import annotations

import re
import struct

from mqstore.errors import FormatError
from mqstore.layout.hosts import IPV4_BYTES, IPV6_BYTES, decode_host

_OFFSET = struct.Struct(">q")
_HEX = re.compile("[0-9a-fA-F]{32}|[0-9a-fA-F]{56}")


def encode_message_id(store_host: bytes, physical_offset: int) -> str:
    """Return the id of the record at `physical_offset` in the store of `store_host` (8 or 20 encoded bytes).

    Raises `FormatError` if the host has another length or the offset does not fit an i64.

    >>> encode_message_id(bytes.fromhex("c0a8010a00002a9f"), 1024)
    'C0A8010A00002A9F0000000000000400'
    """
    if len(store_host) not in (IPV4_BYTES, IPV6_BYTES):
        raise FormatError(
            f"a store host has {IPV4_BYTES} or {IPV6_BYTES} bytes, not {len(store_host)}", "store_host", 0
        )
    try:
        return (store_host + _OFFSET.pack(physical_offset)).hex().upper()
    except struct.error as error:
        raise FormatError(
            f"physical offset {physical_offset} does not fit 64 bits", "physical_offset", len(store_host)
        ) from error


def is_message_id(text: str) -> bool:
    """Return True for 32 or 56 hex digits."""
    return _HEX.fullmatch(text) is not None


def decode_message_id(text: str) -> tuple[str, int]:
    """Return (host as `ip:port` or `[v6]:port`, physical offset) of 32 or 56 hex digits of either case.
    Raises `FormatError` for any other text.

    >>> decode_message_id("c0a8010a00002a9f0000000000000400")
    ('192.168.1.10:10911', 1024)
    """
    if not is_message_id(text):
        raise FormatError(f"a message id has 32 or 56 hex digits, not {text[:80]!r}", "message_id", 0)
    data = bytes.fromhex(text)
    host, offset = data[: -_OFFSET.size], data[-_OFFSET.size :]
    return decode_host(host), _OFFSET.unpack(offset)[0]
