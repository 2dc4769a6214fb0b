"""The commitlog record: decoding and checking (format#record). `encode` builds many at once, `scan` reads many.

    #  field                      size  offset (IPv4/IPv4)
    1  totalSize                  i32     0   length of the whole record
    2  magic                      i32     4   V1 DAA320A7, V2 DAA320AB
    3  checksum                   i32     8   by profile: crc32-body, crc32c-record (below)
    4  queueId                    i32    12
    5  flag                       i32    16   the user's, opaque
    6  queueOffset                i64    20
    7  physicalOffset             i64    28   position of byte 0 of this record in the log
    8  sysFlag                    i32    36
    9  bornTimestamp              i64    40   ms
    10 bornHost                   B      48   8 bytes, or 20 with sysFlag bit 4
    11 storeTimestamp             i64    56   ms; 48 + B
    12 storeHost                  S      64   8 bytes, or 20 with sysFlag bit 5
    13 reconsumeTimes             i32    72   from here on + (B - 8) + (S - 8)
    14 preparedTransactionOffset  i64    76
    15 bodyLength                 i32    84   then the body, n bytes, as stored (maybe compressed)
    16 topicLength                i8 (V1) or i16 (V2), then the topic, t bytes of UTF-8
    17 propertiesLength           i16         then the properties, p bytes (`properties`)

    BLANK, the unused end of a segment:
    totalSize i32 = bytes to the segment's end | magic i32 CBD43194 | anything

Checksum `crc32-body` (profile rocketmq): crc32(body) with the sign bit cleared, 0 for an empty body.
Checksum `crc32c-record` (profile mqstore): crc32c over all totalSize bytes, with bytes 8..11 taken as zero.
The manifest has the store's checksum. A record contains neither its checksum's kind nor its segment.
"""

from __future__ import annotations

import re
import struct
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from mqstore.errors import FormatError, InvalidMessageError
from mqstore.layout.hosts import IPV4_BYTES, IPV6_BYTES
from mqstore.layout.messageid import encode_message_id
from mqstore.layout.properties import CRC_TAIL_BYTES, DELAY, INNER_BASE, INNER_NUM, decode_crc_tail, decode_properties
from mqstore.native import crc32c, kernel

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Checksum = Literal["crc32c-record", "crc32-body"]

# Magic codes as signed integers, as they are on disk.
MAGIC_V1: Final = 0xDAA320A7 - 0x1_0000_0000
MAGIC_V2: Final = 0xDAA320AB - 0x1_0000_0000
MAGIC_BLANK: Final = 0xCBD43194 - 0x1_0000_0000

# Positions, each derived from the one before. Those up to BORN_HOST_AT never move.
TOTAL_SIZE_AT: Final = 0
MAGIC_AT: Final = TOTAL_SIZE_AT + 4
CHECKSUM_AT: Final = MAGIC_AT + 4
QUEUE_ID_AT: Final = CHECKSUM_AT + 4
FLAG_AT: Final = QUEUE_ID_AT + 4
QUEUE_OFFSET_AT: Final = FLAG_AT + 4
PHYSICAL_OFFSET_AT: Final = QUEUE_OFFSET_AT + 8
SYS_FLAG_AT: Final = PHYSICAL_OFFSET_AT + 8
BORN_TIMESTAMP_AT: Final = SYS_FLAG_AT + 4
BORN_HOST_AT: Final = BORN_TIMESTAMP_AT + 8

BODY_LENGTH_BYTES: Final = 4
PROPERTIES_LENGTH_BYTES: Final = 2

# Positions in a record whose two hosts are IPv4. `*_at(sys_flag)` below returns them for any record.
STORE_TIMESTAMP_AT_V4: Final = BORN_HOST_AT + IPV4_BYTES
STORE_HOST_AT_V4: Final = STORE_TIMESTAMP_AT_V4 + 8
RECONSUME_TIMES_AT_V4: Final = STORE_HOST_AT_V4 + IPV4_BYTES
PREPARED_OFFSET_AT_V4: Final = RECONSUME_TIMES_AT_V4 + 4
BODY_LENGTH_AT_V4: Final = PREPARED_OFFSET_AT_V4 + 8
BODY_AT_V4: Final = BODY_LENGTH_AT_V4 + BODY_LENGTH_BYTES

IPV6_EXTRA: Final = IPV6_BYTES - IPV4_BYTES

# sysFlag bits (format#flags). Other bits are kept unchanged.
COMPRESSED: Final = 0x001
TRANSACTION_MASK: Final = 0x00C
TRANSACTION_PREPARED: Final = 0x004
TRANSACTION_COMMIT: Final = 0x008
TRANSACTION_ROLLBACK: Final = 0x00C
BORN_HOST_V6: Final = 0x010
STORE_HOST_V6: Final = 0x020
INNER_BATCH: Final = 0x080
COMPRESSION_TYPE_MASK: Final = 0x700
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300
BODY_ELSEWHERE: Final = COMPRESSED | COMPRESSION_TYPE_MASK  # ours: the body is in an earlier record (`bodyref`)

MAX_TOPIC_BYTES_V1: Final = 127  # topicLength is a signed i8
MIN_RECORD_BYTES: Final = BODY_AT_V4 + 1 + PROPERTIES_LENGTH_BYTES  # no body, no topic, no properties, V1
BLANK_BYTES: Final = 8

_SCHEDULE_TOPIC: Final = b"SCHEDULE_TOPIC_XXXX"  # delay levels. The only topic whose records have a rule of their topic

_BLANK: Final = struct.Struct(">ii")
_START: Final = struct.Struct(">iii")
_I32: Final = struct.Struct(">i")
_I16: Final = struct.Struct(">h")
_I8: Final = struct.Struct(">b")

HEADER_FIELDS: Final = (
    ("size", "i"), ("magic", "i"), ("checksum", "i"), ("queue_id", "i"), ("flag", "i"), ("queue_offset", "q"),
    ("physical_offset", "q"), ("sys_flag", "i"), ("born_timestamp_ms", "q"), ("born_host", "s"),
    ("store_timestamp_ms", "q"), ("store_host", "s"), ("reconsume_times", "i"), ("prepared_transaction_offset", "q"),
    ("body_size", "i"),
)  # fmt: skip
"""Fields before the body, in order: name, and code of `struct`. Hosts are bytes of either length."""


def _head(born_host_bytes: int, store_host_bytes: int) -> struct.Struct:
    hosts = {"born_host": f"{born_host_bytes}s", "store_host": f"{store_host_bytes}s"}
    return struct.Struct(">" + "".join(hosts.get(name, code) for name, code in HEADER_FIELDS))


# One struct for all fields, for the four combinations of host sizes: index = sysFlag >> 4 & 3.
_HEADS: Final = tuple(_head(born, store) for store in (IPV4_BYTES, IPV6_BYTES) for born in (IPV4_BYTES, IPV6_BYTES))


def header_struct(born_host_bytes: int, store_host_bytes: int) -> struct.Struct:
    """Return the struct of fields 1 to 15, all before the body, for hosts of these lengths (8 or 20).
    For callers that pack many records of one shape. It does not check its arguments."""
    return _HEADS[(born_host_bytes == IPV6_BYTES) + 2 * (store_host_bytes == IPV6_BYTES)]


def store_timestamp_at(sys_flag: int) -> int:
    """Return the position of storeTimestamp in a record with this sysFlag."""
    return STORE_TIMESTAMP_AT_V4 + (IPV6_EXTRA if sys_flag & BORN_HOST_V6 else 0)


def body_length_at(sys_flag: int) -> int:
    """Return the position of bodyLength in a record with this sysFlag. The body follows it."""
    return _HEADS[sys_flag >> 4 & 3].size - BODY_LENGTH_BYTES


class Record(NamedTuple):
    """Fields of a record as stored: the body may be compressed, hosts and properties are encoded.
    Only `topic_bytes` distinguishes names that are not UTF-8 (format#names)."""

    total_size: int
    magic: int
    checksum: int
    queue_id: int
    flag: int
    queue_offset: int
    physical_offset: int
    sys_flag: int
    born_timestamp_ms: int
    born_host: bytes
    store_timestamp_ms: int
    store_host: bytes
    reconsume_times: int
    prepared_transaction_offset: int
    body: bytes
    topic_bytes: bytes
    properties_bytes: bytes

    @property
    def topic(self) -> str:
        """Topic as text. Bytes that are not UTF-8 become U+FFFD."""
        return self.topic_bytes.decode("utf-8", "replace")

    @property
    def properties(self) -> dict[str, str]:
        """Properties by the lenient rule of format#properties, decoded at each call."""
        return decode_properties(self.properties_bytes)

    @property
    def message_id(self) -> str:
        """Offset message id, the address of this copy (format#ids)."""
        return encode_message_id(self.store_host, self.physical_offset)


# --- encoding -------------------------------------------------------------------------------------------------------


def encode_blank(size: int) -> bytes:
    """Return the 8 defined bytes of a BLANK that fills the last `size` bytes of a segment (format#blank).

    >>> encode_blank(100).hex()
    '00000064cbd43194'
    """
    if size < BLANK_BYTES:
        raise ValueError(f"a BLANK needs {BLANK_BYTES} bytes, but {size} are left, so the last record was too long")
    return _BLANK.pack(size, MAGIC_BLANK)


_HOST_BITS: Final = {
    (IPV4_BYTES, IPV4_BYTES): 0,
    (IPV6_BYTES, IPV4_BYTES): BORN_HOST_V6,
    (IPV4_BYTES, IPV6_BYTES): STORE_HOST_V6,
    (IPV6_BYTES, IPV6_BYTES): BORN_HOST_V6 | STORE_HOST_V6,
}


def host_bits(born_host: bytes, store_host: bytes) -> int:
    """Return the sysFlag bits for two encoded hosts. Raises InvalidMessageError if a length is wrong."""
    bits = _HOST_BITS.get((len(born_host), len(store_host)))
    if bits is None:
        field, host = ("born_host", born_host)
        if len(born_host) in (IPV4_BYTES, IPV6_BYTES):
            field, host = ("store_host", store_host)
        raise InvalidMessageError(f"an encoded host has {IPV4_BYTES} or {IPV6_BYTES} bytes, not {len(host)}", field)
    return bits


# --- decoding -------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """A record's fields before its body, and the positions in the buffer of its three parts of variable length."""

    head: tuple[int, int, int, int, int, int, int, int, int, bytes, int, bytes, int, int, int]
    body_at: int
    body_size: int
    topic_at: int
    topic_size: int
    properties_at: int
    properties_size: int


def measure(view: memoryview, position: int, end: int) -> Shape:
    """Follow the lengths in the record at `position`, up to `end`. FormatError names the first wrong one."""
    available = end - position
    if available < MIN_RECORD_BYTES:
        raise FormatError(f"{available} bytes are left, too few for a record", "total_size", position)
    total_size, magic = _BLANK.unpack_from(view, position)
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise FormatError(f"magic {magic & 0xFFFFFFFF:08X} is not a record's", "magic", position + MAGIC_AT)
    if not MIN_RECORD_BYTES <= total_size <= available:
        raise FormatError(
            f"a record of {total_size} bytes, but {MIN_RECORD_BYTES}..{available} are possible", "total_size", position
        )
    end = position + total_size
    (sys_flag,) = _I32.unpack_from(view, position + SYS_FLAG_AT)
    head_struct = _HEADS[sys_flag >> 4 & 3]
    body_at = position + head_struct.size
    if body_at > end:
        raise FormatError("the hosts that sysFlag requires do not fit", "sys_flag", position + SYS_FLAG_AT)
    head = head_struct.unpack_from(view, position)
    body_size = head[-1]
    topic_length = _I8 if magic == MAGIC_V1 else _I16
    if not 0 <= body_size <= end - body_at - topic_length.size - _I16.size:
        raise FormatError(f"bodyLength {body_size} in a record of {total_size} bytes", "body", body_at - _I32.size)
    topic_at = body_at + body_size + topic_length.size
    (topic_size,) = topic_length.unpack_from(view, topic_at - topic_length.size)
    if not 0 <= topic_size <= end - topic_at - _I16.size:
        raise FormatError(
            f"topicLength {topic_size} in a record of {total_size} bytes", "topic", topic_at - topic_length.size
        )
    properties_at = topic_at + topic_size + _I16.size
    (properties_size,) = _I16.unpack_from(view, properties_at - _I16.size)
    if properties_at + properties_size != end:
        raise FormatError(
            f"propertiesLength {properties_size}, but the record of {total_size} bytes has {end - properties_at} left",
            "properties",
            properties_at - _I16.size,
        )
    return Shape(head, body_at, body_size, topic_at, topic_size, properties_at, properties_size)


def decode_record(buf: ReadableBuffer, position: int = 0) -> Record:
    """Return the record that starts at `buf[position]`.

    All values are copied. Only compares the inner lengths with totalSize, and neither checksum nor physical offset
    (`check_record` does). Raises `FormatError` with the field and its position in `buf`.
    """
    with memoryview(buf) as view:
        shape = measure(view, position, view.nbytes)
        return Record(
            *shape.head[:-1],
            bytes(view[shape.body_at : shape.body_at + shape.body_size]),
            bytes(view[shape.topic_at : shape.topic_at + shape.topic_size]),
            bytes(view[shape.properties_at : shape.properties_at + shape.properties_size]),
        )


# --- checking -------------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """Kind and size of the bytes at a position of the log (format#verifies).

    `status`: "ok" for a record that verifies, "blank" for a BLANK that fills its segment, "bad" for anything else.
    `size` is the number of bytes to the next position for "ok" and "blank". For "bad" it is the record's claim if it is
    credible (magic and lengths fit), else 0. `detail` and `field` describe the fault. Otherwise both are empty.
    """

    status: Literal["ok", "blank", "bad"]
    size: int
    detail: str = ""
    field: str = ""


def check_record(buf: ReadableBuffer, position: int, limit: int, physical_offset: int, checksum: Checksum) -> Check:
    """Check for a record, or the BLANK that ends the segment, at `buf[position]`. Never raises.

    `limit` is the index in `buf` of the segment's end. If `buf` ends earlier, only its bytes are checked.
    `physical_offset` is the position of `position` in the log. Unlike in RocketMQ, a record must claim exactly that
    offset, since a stale record of a recycled file must not reappear. No length may be negative, and the topic must not
    be empty. The checksum is the profile's. A `__CRC32#` tail must fit if there is one, and a BLANK must end with its
    segment.
    """
    if kernel is not None and checksum == "crc32c-record":
        size = kernel.record_holds(buf, position, limit, physical_offset)
        if size:
            return Check("ok", size)
    with memoryview(buf) as view:
        end = min(limit, view.nbytes)
        if position < 0 or end - position < BLANK_BYTES:
            return Check("bad", 0, f"only {max(0, end - position)} bytes up to the end", "total_size")
        total_size, magic = _BLANK.unpack_from(view, position)
        if magic == MAGIC_BLANK:
            if total_size == limit - position:
                return Check("blank", total_size)
            return Check(
                "bad", 0, f"a BLANK of {total_size} bytes where the segment has {limit - position} left", "total_size"
            )
        if magic == total_size == 0:
            return Check("bad", 0, "zeros: nothing was written here", "magic")
        try:
            shape = measure(view, position, end)
        except FormatError as error:
            return Check("bad", 0, str(error), error.field)

        def bad(detail: str, field: str) -> Check:
            return Check("bad", total_size, detail, field)

        if shape.head[6] != physical_offset:
            return bad(f"the record claims position {shape.head[6]}, but is at {physical_offset}", "physical_offset")
        if shape.topic_size == 0:
            return bad("the topic is empty", "topic")
        stored = shape.head[2]
        if checksum == "crc32c-record":
            expected = record_checksum(view, position, total_size)
            if stored != expected:
                return bad(f"checksum {_hex(stored)} stored, {_hex(expected)} computed over the record", "checksum")
        elif shape.body_size > 0:
            expected = zlib.crc32(view[shape.body_at : shape.body_at + shape.body_size]) & 0x7FFF_FFFF
            if stored != expected:
                return bad(f"checksum {_hex(stored)} stored, {_hex(expected)} computed over the body", "checksum")
        if fault := crc_tail_fault(view, position, position + total_size, shape.properties_size):
            return bad(fault, "properties")
        properties = bytes(view[shape.properties_at : shape.properties_at + shape.properties_size])
        problem = unreadable_number(bytes(view[shape.topic_at : shape.topic_at + shape.topic_size]), properties)
        return bad(problem, "properties") if problem else Check("ok", total_size)


_NUMBER: Final = re.compile(r"[+-]?[0-9]+")


def unreadable_number(topic: bytes, properties: bytes) -> str:
    """Return why RocketMQ cannot dispatch a record with these properties, or "" if it can (format#verifies).
    DELAY must be a number in the schedule topic. INNER_NUM and INNER_BASE must be numbers in every topic."""
    if topic != _SCHEDULE_TOPIC and b"INNER_" not in properties:
        return ""  # all ordinary records: their properties need not be parsed
    values = decode_properties(properties)
    wanted = [(INNER_NUM, 16), (INNER_BASE, 64)]
    if topic == _SCHEDULE_TOPIC:
        wanted.append((DELAY, 32))
    for name, bits in wanted:
        text = values.get(name)
        # Longer texts are not 64-bit numbers either, and int() of a huge one is slow or refused.
        if text is not None and (
            len(text) > 40 or not _NUMBER.fullmatch(text) or not -(1 << bits - 1) <= int(text) < 1 << bits - 1
        ):
            return f"property {name} is {text[:40]!r}, not a number of {bits} bits"
    return ""


def crc_tail_fault(view: memoryview, start: int, end: int, properties_size: int) -> str:
    """Return why the CRC tail of the record in `[start, end)` is wrong, or "" if it is right or if there is none."""
    try:
        # One byte more than the tail shows whether the name begins a property or is inside a value.
        claimed = decode_crc_tail(bytes(view[end - min(CRC_TAIL_BYTES + 1, properties_size) : end]))
    except FormatError as error:
        return str(error)
    if claimed is None or claimed == (actual := zlib.crc32(view[start : end - CRC_TAIL_BYTES]) & 0x7FFF_FFFF):
        return ""
    return f"property CRC {_hex(claimed)} stored, {_hex(actual)} computed"


def record_checksum(view: memoryview, position: int, size: int) -> int:
    """Return the CRC-32C of a whole record, its checksum field read as zero, as a signed number."""
    total_size, magic = _BLANK.unpack_from(view, position)
    value = crc32c(view[position + QUEUE_ID_AT : position + size], _checksum_start(total_size, magic))
    return value - 0x1_0000_0000 if value & 0x8000_0000 else value


@lru_cache(maxsize=4096)
def _checksum_start(total_size: int, magic: int) -> int:
    """Return crc32c after the checksum field, read as zero. It depends on the first two fields alone."""
    return crc32c(_START.pack(total_size, magic, 0))


def _hex(value: int) -> str:
    return f"{value & 0xFFFFFFFF:08X}"
