"""The checkpoint page: how much of the store was durable when it was last written (format#checkpoint).

    offset size type  field
         0    8 i64   physicMsgTimestamp    store time (ms) of the last message of a thorough commitlog flush
         8    8 i64   logicsMsgTimestamp    the same for the consume queues
        16    8 i64   indexMsgTimestamp     end time of the last full index file
        24    8 i64   masterFlushedOffset   replication; 0
        32    8 i64   confirmPhyOffset      start of the last valid record
        40   24       zero
        64    4 i32   extension magic 0x4D515331 "MQS1"            from here on ours; a Java broker never changes it
        68    4 i32   extension version 1
        72    8 i64   flushed       every commitlog byte below this physical offset was synced
        80    8 i64   dispatched    units and index entries of every record below it were synced
        88    8 i64   cleanEnd      end of the log at a clean close, -1 while a writer has the store open
        96    4 i32   CRC-32C of bytes [0, 40) and [64, 96)
       100    8 u64   queues        at a clean close: `QueueTable.digest`
       108    4 i32   CRC-32C of bytes [64, 108); with another value the field does not exist
       112    8 i64   logStart      where the log begins: retention moves it before it deletes segments
       120    4 i32   CRC-32C of bytes [64, 100) and [112, 120); with another value the field does not exist
       124    4       zero
       128            the file is a page of 4096 bytes; the rest stays zero

The CRC covers the first five fields, too. Once a Java broker has changed one of them, the extension no longer counts,
since the broker may have cut the log below the watermarks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Final

from mqstore.native import crc32c

_FIELDS: Final = struct.Struct(">qqqqq")
_EXTENSION: Final = struct.Struct(">iiqqq")
_CRC: Final = struct.Struct(">I")
_EXTENSION_AT: Final = 64
_CRC_AT: Final = _EXTENSION_AT + _EXTENSION.size
_COVERED: Final = ((0, _FIELDS.size), (_EXTENSION_AT, _CRC_AT))
_LATER: Final = (
    ("queues", struct.Struct(">Q"), 100, 108, ((_EXTENSION_AT, 108),)),
    ("log_start", struct.Struct(">q"), 112, 120, ((_EXTENSION_AT, 100), (112, 120))),
)
"""Later fields of the extension: name, format, position, position of its CRC, and the bytes that this covers."""
_EXTENSION_MAGIC: Final = 0x4D515331
_EXTENSION_VERSION: Final = 1
_MARGIN_MS: Final = 3000
_TIMES: Final = 3
"""The first fields are times, the other two are offsets."""
_TIME_END_MS: Final = 1 << 47
"""Year 6429."""
_OFFSET_END: Final = 1 << 62

ENCODED_BYTES: Final = 128  # written with one pwrite, inside one sector
FILE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Fields of the checkpoint page. Times are ms since the epoch, 0 = never. Offsets are physical.
    `flushed`, `dispatched` and `clean_end` are the extension: all given, or all None without a valid one. Raises
    ValueError if only some are None."""

    physic_msg_timestamp_ms: int = 0
    logics_msg_timestamp_ms: int = 0
    index_msg_timestamp_ms: int = 0
    master_flushed_offset: int = 0
    confirm_physical_offset: int = 0
    flushed: int | None = None
    dispatched: int | None = None
    clean_end: int | None = None
    queues: int | None = None
    """Digest of the queues and their ends at a clean close. None if unknown."""
    log_start: int | None = None
    """Physical offset at which the log begins. None if unknown."""

    def __post_init__(self) -> None:
        if (self.flushed is None) != (self.dispatched is None) or (self.flushed is None) != (self.clean_end is None):
            raise ValueError("flushed, dispatched and clean_end belong together: give all three or none")


def encode(checkpoint: Checkpoint) -> bytes:
    """Return the first 128 bytes of the file. A missing extension is zeros, which every reader rejects."""
    page = bytearray(ENCODED_BYTES)
    values = astuple(checkpoint)  # in the order of the page
    _FIELDS.pack_into(page, 0, *values[:5])
    if checkpoint.flushed is not None:
        _EXTENSION.pack_into(page, _EXTENSION_AT, _EXTENSION_MAGIC, _EXTENSION_VERSION, *values[5:8])
        _CRC.pack_into(page, _CRC_AT, _crc(page, _COVERED))
        for name, kind, at, crc_at, covered in _LATER:
            if (value := getattr(checkpoint, name)) is not None:
                kind.pack_into(page, at, value)
                _CRC.pack_into(page, crc_at, _crc(page, covered))
    return bytes(page)


def decode(data: bytes) -> Checkpoint:
    """Decode a page. Missing bytes at its end count as zero. Never fails."""
    page = bytes(data[:ENCODED_BYTES]).ljust(ENCODED_BYTES, b"\0")
    fields: tuple[int, ...] = _FIELDS.unpack_from(page)
    magic, version, *watermarks = _EXTENSION.unpack_from(page, _EXTENSION_AT)
    known = magic == _EXTENSION_MAGIC and version == _EXTENSION_VERSION
    if not known or _CRC.unpack_from(page, _CRC_AT)[0] != _crc(page, _COVERED):
        return Checkpoint(*fields)
    later = {
        name: kind.unpack_from(page, at)[0]
        for name, kind, at, crc_at, covered in _LATER
        if _CRC.unpack_from(page, crc_at)[0] == _crc(page, covered)
    }
    return Checkpoint(*fields, *watermarks, **later)


def is_plausible(data: bytes) -> bool:
    """Return True if `data` can be the beginning of a checkpoint.
    Times and offsets are within bounds, and unused bytes are zero. A Java broker writes -1 for an unknown offset."""
    if len(data) < _FIELDS.size:
        return False
    page = bytes(data[:ENCODED_BYTES]).ljust(ENCODED_BYTES, b"\0")
    fields = _FIELDS.unpack_from(page)
    (magic,) = struct.unpack_from(">i", page, _EXTENSION_AT)
    return (
        all(0 <= time_ms < _TIME_END_MS for time_ms in fields[:_TIMES])
        and all(-1 <= offset < _OFFSET_END for offset in fields[_TIMES:])
        and not any(page[_FIELDS.size : _EXTENSION_AT])
        and (magic == _EXTENSION_MAGIC or not any(page[_EXTENSION_AT:]))
    )


def min_timestamp(checkpoint: Checkpoint) -> int:
    """Return the store time (ms) up to which a Java broker's store is certainly durable.
    It is 3 s before the older mark, at least 0."""
    return max(0, min(checkpoint.physic_msg_timestamp_ms, checkpoint.logics_msg_timestamp_ms) - _MARGIN_MS)


def _crc(page: bytes | bytearray, covered: Iterable[tuple[int, int]]) -> int:
    """Return the CRC-32C of ranges of the page, one after the other."""
    return crc32c(b"".join(page[start:stop] for start, stop in covered))
