"""Host addresses in records (format#hosts).

    IPv4   address  4 bytes | port i32      8 bytes
    IPv6   address 16 bytes | port i32     20 bytes

The port is a full i32, not the two bytes of the network. A record's sysFlag selects the form. Names are never
resolved.
"""

from __future__ import annotations

import ipaddress
import re
import struct
from functools import lru_cache

from mqstore.errors import FormatError, InvalidMessageError

_PORT = struct.Struct(">i")
_PORT_TEXT = re.compile(r"[0-9]{1,5}")
IPV4_BYTES = 4 + _PORT.size
IPV6_BYTES = 16 + _PORT.size

# Host of an embedded store for which the caller names none, since it has no socket.
LOCAL_HOST = bytes((127, 0, 0, 1)) + _PORT.pack(0)


@lru_cache(maxsize=1024)
def encode_host(text: str) -> bytes:
    """Encode `ip:port` as 8 bytes, `[v6]:port` as 20 (format#hosts).

    Raises `InvalidMessageError` (field "host") for other texts: a port outside 0..65535, a name instead of an address,
    or a zone (`%eth0`), which does not fit.

    >>> encode_host("192.168.1.10:10911").hex()
    'c0a8010a00002a9f'
    """
    address, colon, port_text = text.rpartition(":")
    if not colon or not _PORT_TEXT.fullmatch(port_text) or (port := int(port_text)) > 65535:
        raise InvalidMessageError(f"host {text!r} does not end in a colon and a port 0..65535", "host")
    try:
        if address.startswith("[") and address.endswith("]") and "%" not in address:
            return ipaddress.IPv6Address(address[1:-1]).packed + _PORT.pack(port)
        return ipaddress.IPv4Address(address).packed + _PORT.pack(port)
    except ipaddress.AddressValueError as error:
        raise InvalidMessageError(f"host {text!r} is neither ip:port nor [v6]:port ({error})", "host") from error


@lru_cache(maxsize=1024)
def decode_host(data: bytes) -> str:
    """Return the text of an encoded host. Any number in the i32 port is printed unchanged.

    Raises `FormatError` (field "host") if `data` is neither 8 nor 20 bytes long.

    >>> decode_host(bytes(15) + bytes([1, 0, 0, 0, 124]))
    '[::1]:124'
    """
    if len(data) == IPV4_BYTES:
        return f"{ipaddress.IPv4Address(data[:4])}:{_PORT.unpack_from(data, 4)[0]}"
    if len(data) == IPV6_BYTES:
        address = ipaddress.IPv6Address(data[:16])
        # Python versions print ::ffff:a.b.c.d differently. Always use the dotted form, so that texts compare equal.
        text = str(address) if address.ipv4_mapped is None else f"::ffff:{address.ipv4_mapped}"
        return f"[{text}]:{_PORT.unpack_from(data, 16)[0]}"
    raise FormatError(f"a host has {IPV4_BYTES} or {IPV6_BYTES} bytes, not {len(data)}", "host", 0)
