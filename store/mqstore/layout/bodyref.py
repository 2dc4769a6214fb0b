"""Reference to the body of an earlier record, stored in place of a body (format#flags).

    sysFlag    BODY_ELSEWHERE: compressed, by a type that no producer has
    body       physicalOffset i64 | totalSize i32 | checksum u32      of the earlier record

Only for the checksum `crc32c-record`. It covers the whole record, so no other record has the same position, size and
checksum.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from mqstore.errors import FormatError
from mqstore.layout.record import (
    BODY_ELSEWHERE,
    BODY_LENGTH_BYTES,
    CHECKSUM_AT,
    PHYSICAL_OFFSET_AT,
    SYS_FLAG_AT,
    TOTAL_SIZE_AT,
    body_length_at,
)

_REFERENCE: Final = Struct(">qiI")
REFERENCE_BYTES: Final = _REFERENCE.size
_I32: Final = Struct(">i")
_U32: Final = Struct(">I")
_I64: Final = Struct(">q")


def is_reference(sys_flag: int) -> bool:
    """Return True if a record with this sysFlag has a reference in place of its body."""
    return sys_flag & BODY_ELSEWHERE == BODY_ELSEWHERE


def reference_to(header: bytes) -> bytes:
    """Return the reference to the body of the record that begins with `header`."""
    [size], [checksum] = _I32.unpack_from(header, TOTAL_SIZE_AT), _U32.unpack_from(header, CHECKSUM_AT)
    return _REFERENCE.pack(*_I64.unpack_from(header, PHYSICAL_OFFSET_AT), size, checksum)


def place_of(reference: bytes) -> int:
    """Return the physical offset of the record that has the body. Raises FormatError for other bytes."""
    if len(reference) != REFERENCE_BYTES:
        raise FormatError(f"a reference to a body has {REFERENCE_BYTES} bytes, not {len(reference)}", "body", 0)
    place: int = _REFERENCE.unpack(reference)[0]
    return place


def filled(record: bytes, sys_flag: int, body: bytes | memoryview) -> bytes:
    """Return `record` with a body in place of its reference. `sys_flag` is the flag of the record that has the body.
    The checksum stays that of `record`."""
    own = int(_I32.unpack_from(record, SYS_FLAG_AT)[0])
    start = body_length_at(own) + BODY_LENGTH_BYTES
    head = bytearray(record[:start])
    _I32.pack_into(head, TOTAL_SIZE_AT, len(record) - REFERENCE_BYTES + len(body))
    _I32.pack_into(head, SYS_FLAG_AT, own & ~BODY_ELSEWHERE | sys_flag & BODY_ELSEWHERE)
    _I32.pack_into(head, start - BODY_LENGTH_BYTES, len(body))
    return b"".join((head, body, record[start + REFERENCE_BYTES :]))
