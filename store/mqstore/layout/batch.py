"""The wire form in which a producer hands over a batch: elements one behind the other, never stored as such.

    size  field
     i32  totalSize of the element
     i32  magic     0, ignored on reading
     i32  bodyCRC   0, ignored on reading
     i32  flag
     i32  bodyLength, then the body
     i16  propertiesLength, then the properties

Topic, queue and hosts are the batch's and travel outside. The store makes an ordinary record of each element.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from mqstore.errors import FormatError, InvalidMessageError
from mqstore.layout.properties import MAX_PROPERTIES_BYTES

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["BatchElement", "decode_batch", "encode_batch"]

_HEAD: Final = struct.Struct(">iiiii")
_I16: Final = struct.Struct(">h")
_BODY_LENGTH_AT: Final = _HEAD.size - 4
_MIN_BYTES: Final = _HEAD.size + _I16.size


class BatchElement(NamedTuple):
    """One message of a batch: the user's flag (i32), the body, and the encoded properties (format#properties)."""

    flag: int
    body: bytes
    properties: bytes


def encode_batch(elements: Iterable[tuple[int, bytes, bytes]]) -> bytes:
    """The wire form of (flag, body, encoded properties) triples.

    Raises `InvalidMessageError` for properties over 32767 bytes, a flag beyond 32 bits and an element beyond 2 GiB.

    >>> encode_batch([(0, b"m1", b"TAGS\\x01a\\x02")]).hex()
    '0000001f000000000000000000000000000000026d31000754414753016102'
    """
    pieces: list[bytes] = []
    for flag, body, properties in elements:
        if len(properties) > MAX_PROPERTIES_BYTES:
            raise InvalidMessageError(
                f"properties take {len(properties)} bytes, the limit is {MAX_PROPERTIES_BYTES}", "properties"
            )
        size = _MIN_BYTES + len(body) + len(properties)
        try:
            head = _HEAD.pack(size, 0, 0, flag, len(body))
        except struct.error as error:
            field = "flag" if size < 1 << 31 else "body"
            raise InvalidMessageError(f"flag {flag!r} or size {size} does not fit 32 bits", field) from error
        pieces += (head, body, _I16.pack(len(properties)), properties)
    return b"".join(pieces)


def decode_batch(data: ReadableBuffer) -> list[BatchElement]:
    """Take a batch apart; empty bytes are a batch of none. Magic and CRC are not looked at, as the broker does not.

    Raises `FormatError` with the field and its position in `data` when lengths do not add up, to the last byte.
    """
    elements: list[BatchElement] = []
    with memoryview(data) as view:
        position, length = 0, view.nbytes
        while position < length:
            available = length - position
            if available < _MIN_BYTES:
                raise FormatError(f"{available} bytes behind the last element", "total_size", position)
            size, _, _, flag, body_size = _HEAD.unpack_from(view, position)
            if not _MIN_BYTES <= size <= available:
                raise FormatError(f"an element of {size} bytes where {available} are left", "total_size", position)
            body_at, end = position + _HEAD.size, position + size
            if not 0 <= body_size <= size - _MIN_BYTES:
                raise FormatError(
                    f"bodyLength {body_size} in an element of {size} bytes", "body", position + _BODY_LENGTH_AT
                )
            properties_at = body_at + body_size + _I16.size
            (properties_size,) = _I16.unpack_from(view, properties_at - _I16.size)
            if properties_at + properties_size != end:
                raise FormatError(
                    f"propertiesLength {properties_size} where {end - properties_at} bytes are left",
                    "properties",
                    properties_at - _I16.size,
                )
            body = bytes(view[body_at : body_at + body_size])
            elements.append(BatchElement(flag, body, bytes(view[properties_at:end])))
            position = end
    return elements
