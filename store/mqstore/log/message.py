"""View of a stored message that decodes each attribute when it is read.

A `Message` keeps only the record's position and a `UnitBatch`, which has the buffer and the units. All messages of a
read share the batch. The buffer is a mapped segment. The view pins it, so the bytes stay valid after retention has
unlinked the file.
"""

from __future__ import annotations

import json
import mmap
from binascii import b2a_base64
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from operator import attrgetter
from struct import Struct
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from mqstore.layout.bodyref import filled, is_reference, reference_to
from mqstore.layout.compression import inflate
from mqstore.layout.consumequeue import UNIT, UNIT_BYTES
from mqstore.layout.hosts import IPV4_BYTES, IPV6_BYTES, decode_host
from mqstore.layout.jsontext import BODY, decode
from mqstore.layout.messageid import encode_message_id
from mqstore.layout.properties import (
    DLQ_REASON,
    KEYS,
    ORIGIN_MESSAGE_ID,
    RESERVED,
    SHARDINGKEY,
    TAGS,
    UNIQ_KEY,
    decode_properties,
)
from mqstore.layout.record import (
    BODY_AT_V4,
    BODY_LENGTH_BYTES,
    BORN_HOST_AT,
    BORN_HOST_V6,
    BORN_TIMESTAMP_AT,
    COMPRESSED,
    FLAG_AT,
    IPV6_EXTRA,
    MAGIC_AT,
    MAGIC_V2,
    PHYSICAL_OFFSET_AT,
    PREPARED_OFFSET_AT_V4,
    RECONSUME_TIMES_AT_V4,
    STORE_HOST_AT_V4,
    STORE_HOST_V6,
    SYS_FLAG_AT,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    body_length_at,
    store_timestamp_at,
)
from mqstore.log.writing.log_tail import QueueRef
from mqstore.native import kernel

Find: TypeAlias = "Callable[[bytes], Message]"
"""Function that returns the message whose body a reference names (`layout/bodyref.py`)."""

_I4 = Struct(">i").unpack_from
_I8 = Struct(">q").unpack_from
_V6 = BORN_HOST_V6 | STORE_HOST_V6
_size = attrgetter("size")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class UnitBatch:
    """Messages of one queue in one segment, without arrays. `Message`s are made from it."""

    __slots__ = ("_first", "_units", "buffer", "find", "queue")

    def __init__(
        self, queue: QueueRef, buffer: mmap.mmap | bytes, units: bytes, first: int, find: Find | None = None
    ) -> None:
        """`units` has the units of the slots from `first` on, of these messages and perhaps of others.
        `find` is None if records of this queue always contain their bodies."""
        self.queue = queue
        self.buffer = buffer
        self.find = find
        self._units = units
        self._first = first

    def tags_code(self, slot: int) -> int:
        code: int = UNIT.unpack_from(self._units, (slot - self._first) * UNIT_BYTES)[2]
        return code


class Located:
    """Record in a buffer, found by a unit: base of `Message`, compiled where possible.

    It decodes on each access and caches nothing. Numbers are at the positions of the byte table (format#record), moved
    IPv6 hosts.
    """

    # Three slots, since readers create thousands at once. Values that messages share are in their batch.
    __slots__ = ("_batch", "_start", "offset")

    def __init__(self, batch: UnitBatch, start: int, offset: int) -> None:
        """`start` is the record's position in the buffer of `batch`."""
        self._batch = batch
        self._start = start
        self.offset = offset

    @property
    def _buffer(self) -> mmap.mmap | bytes:
        return self._batch.buffer

    @property
    def queue(self) -> QueueRef:
        """Queue of this copy."""
        return self._batch.queue

    @property
    def topic(self) -> str:
        """Topic of the queue."""
        return self.queue.topic

    @property
    def queue_id(self) -> int:
        """Number of the queue in its topic, from 0."""
        return self.queue.queue_id

    @property
    def body(self) -> bytes:
        """Body as it was sent. Raises FormatError if a compressed one cannot be inflated."""
        return self._stored_body()

    if TYPE_CHECKING:  # methods of `Message`, for records that are not plain

        def _stored_body(self) -> bytes: ...
        def _body_start(self) -> int: ...
        def _host(self, *, store: bool) -> bytes: ...

    @property
    def size(self) -> int:
        """Size of the whole record in bytes."""
        return int(_I4(self._buffer, self._start)[0])

    @property
    def physical_offset(self) -> int:
        """Position of the record in the commitlog."""
        return int(_I8(self._buffer, self._start + PHYSICAL_OFFSET_AT)[0])

    @property
    def message_id(self) -> str:
        """Offset message id, the address of this stored copy (format#ids)."""
        return encode_message_id(self._host(store=True), self.physical_offset)

    @property
    def flag(self) -> int:
        """32-bit number set by the sender, or 0."""
        return int(_I4(self._buffer, self._start + FLAG_AT)[0])

    @property
    def sys_flag(self) -> int:
        """Bits of the record: compression, transaction, IPv6 hosts (format#flags)."""
        return int(_I4(self._buffer, self._start + SYS_FLAG_AT)[0])

    @property
    def born_timestamp_ms(self) -> int:
        """Time at which the sender created the message, by its clock: ms since the epoch."""
        return int(_I8(self._buffer, self._start + BORN_TIMESTAMP_AT)[0])

    @property
    def store_timestamp_ms(self) -> int:
        """Time at which this copy was stored: ms since the epoch."""
        return int(_I8(self._buffer, self._start + store_timestamp_at(self.sys_flag))[0])

    @property
    def reconsume_times(self) -> int:
        """Number of attempts that have ended, as stored with this copy."""
        return int(_I4(self._buffer, self._body_start() - BODY_AT_V4 + RECONSUME_TIMES_AT_V4)[0])

    @property
    def _encoded_properties(self) -> bytes:
        """Properties as stored bytes (format#properties)."""
        buffer, at = self._batch.buffer, self._body_start()
        at += _I4(buffer, at - BODY_LENGTH_BYTES)[0]
        if _I4(buffer, self._start + MAGIC_AT)[0] == MAGIC_V2:
            at += 2 + (buffer[at] << 8 | buffer[at + 1])
        else:
            at += 1 + buffer[at]
        length = buffer[at] << 8 | buffer[at + 1]
        return buffer[at + 2 : at + 2 + length]

    @property
    def tag(self) -> str | None:
        """Tag that consumers filter by, or None."""
        return self._stored_property(TAGS)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys by which `find` looks the message up, besides its unique key."""
        return tuple(filter(None, (self._stored_property(KEYS) or "").split(" ")))

    @property
    def message_group(self) -> str | None:
        """Name of the group whose messages keep their order, or None."""
        return self._stored_property(SHARDINGKEY)

    def _stored_property(self, name: str) -> str | None:
        """Return one of `stored_properties` without decoding the others, or None if it does not exist."""
        return decode_properties(self._encoded_properties).get(name)


if not TYPE_CHECKING and kernel is not None:
    Located = kernel.Located


def _instant(timestamp_ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=timestamp_ms)


class Message(Located):
    """Stored message, an immutable value. Attributes have the names of clients#message-names.

    `offset` is the queue offset, `attempt` counts deliveries from 1, `properties` has those that the user set.
    `body` is bytes, inflated if they were stored compressed. `body_view` is the stored bytes, without a copy.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     receipt = store.put("orders", b'{"id": 7}', tag="paid", keys=["o-7"], properties={"shop": "3"})
    ...     [message] = store.read(*receipt.queue, receipt.offset)
    ...     message.json()["id"], message.tag, message.keys, message.properties["shop"], message.attempt
    (7, 'paid', ('o-7',), '3', 1)
    """

    __slots__ = ()

    # -- position ---------------------------------------------------------------------------------------------------

    @property
    def tags_code(self) -> int:
        """Tags code of the consume-queue unit: hash of the tag, or the due time (format#tags-code)."""
        return self._batch.tags_code(self.offset)

    @property
    def unique_key(self) -> str:
        """Key that is the same in every copy of the message. Use it to detect duplicates."""
        return self._stored_property(UNIQ_KEY) or self._stored_property(ORIGIN_MESSAGE_ID) or self.message_id

    # -- header -----------------------------------------------------------------------------------------------------

    @property
    def born_at(self) -> datetime:
        """`born_timestamp_ms` in UTC."""
        return _instant(self.born_timestamp_ms)

    @property
    def stored_at(self) -> datetime:
        """`store_timestamp_ms` in UTC."""
        return _instant(self.store_timestamp_ms)

    @property
    def prepared_transaction_offset(self) -> int:
        """Physical offset of the half message, in a half message and in the records that end it. Otherwise 0."""
        return int(_I8(self._batch.buffer, self._body_start() - BODY_AT_V4 + PREPARED_OFFSET_AT_V4)[0])

    def _host(self, *, store: bool) -> bytes:
        flags = self.sys_flag
        at, six = BORN_HOST_AT, flags & BORN_HOST_V6
        if store:
            at, six = STORE_HOST_AT_V4 + (IPV6_EXTRA if six else 0), flags & STORE_HOST_V6
        at += self._start
        return self._batch.buffer[at : at + (IPV6_BYTES if six else IPV4_BYTES)]

    @property
    def born_host(self) -> str:
        """Address of the sender, as "host:port"."""
        return decode_host(self._host(store=False))

    @property
    def store_host(self) -> str:
        """Address of the store that has this copy, as "host:port"."""
        return decode_host(self._host(store=True))

    @property
    def attempt(self) -> int:
        """Number of this delivery of the message, from 1."""
        return self.reconsume_times + 1

    # -- body -------------------------------------------------------------------------------------------------------

    def _body_start(self) -> int:
        return self._start + body_length_at(self.sys_flag) + BODY_LENGTH_BYTES

    def _whole(self) -> Message:
        """Return this message with its body, even if an earlier record has the body (`layout/bodyref.py`).
        Raises FormatError if that record cannot be read, and RemovedBodyError if retention removed it."""
        find = self._batch.find
        if find is None or not is_reference(self.sys_flag):
            return self
        origin = find(bytes(self.body_view))
        record = filled(self._record_bytes(), origin.sys_flag, origin.body_view)
        unit = UNIT.pack(self.physical_offset, len(record), self.tags_code)
        return Message(UnitBatch(self.queue, record, unit, self.offset), 0, self.offset)

    def _reference(self) -> bytes:
        """Return the reference to the body of this record."""
        return reference_to(self._batch.buffer[self._start : self._start + BODY_AT_V4])

    def _stored_body(self) -> bytes:
        """Return the body as its header describes it, inflated if it was stored compressed."""
        if (whole := self._whole()) is not self:
            return whole.body
        buffer = self._batch.buffer
        start = self._body_start()
        stored = buffer[start : start + _I4(buffer, start - BODY_LENGTH_BYTES)[0]]
        return inflate(self.sys_flag, stored) if self.sys_flag & COMPRESSED else stored

    def _plain_parts(self) -> tuple[bytes, bytes] | None:
        """Return (header, stored body) of an ordinary record, or None.
        Ordinary records have two IPv4 hosts and their own body. No transaction holds them back."""
        buffer, start, flags = self._batch.buffer, self._start, self.sys_flag
        if flags & _V6 or flags & TRANSACTION_MASK not in (0, TRANSACTION_COMMIT) or is_reference(flags):
            return None
        begin = start + BODY_AT_V4
        return buffer[start:begin], buffer[begin : begin + _I4(buffer, begin - BODY_LENGTH_BYTES)[0]]

    @property
    def body_view(self) -> memoryview:
        """Stored bytes of the body, read-only, not copied. They keep the mapping alive."""
        buffer, start = self._batch.buffer, self._body_start()
        return memoryview(buffer)[start : start + _I4(buffer, start - BODY_LENGTH_BYTES)[0]].toreadonly()

    def text(self, encoding: str = "utf-8") -> str:
        """Return the body as text."""
        return self.body.decode(encoding)

    def json(self) -> Any:
        """Return the body decoded as JSON. Raises FormatError, a ValueError, if it is not JSON."""
        return decode(self.body, BODY)

    # -- properties -------------------------------------------------------------------------------------------------

    def stored_properties(self) -> dict[str, str]:
        """Return every property of the record: the user's and the system's."""
        encoded = self._encoded_properties
        return decode_properties(encoded) if encoded else {}

    @property
    def properties(self) -> Mapping[str, str]:
        """Properties that the user set, and `dlq_reason`."""
        return MappingProxyType(
            {k: v for k, v in self.stored_properties().items() if k not in RESERVED or k == DLQ_REASON}
        )

    @property
    def system_properties(self) -> Mapping[str, str]:
        """Reserved properties: tag, keys, ids, retry and delay marks (format#property-names)."""
        return MappingProxyType({k: v for k, v in self.stored_properties().items() if k in RESERVED})

    # -- as a value -------------------------------------------------------------------------------------------------

    def __copy__(self) -> Message:
        return self  # immutable

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the record alone, so that another process needs no store to read it."""
        record = self._whole()._record_bytes()
        unit = UNIT.pack(self.physical_offset, len(record), self.tags_code)
        return _restored, (type(self), tuple(self.queue), record, unit, self.offset)

    def _record_bytes(self) -> bytes:
        """Return the whole record as stored."""
        return self._batch.buffer[self._start : self._start + self.size]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return (
            self.queue == other.queue and self.offset == other.offset and self._record_bytes() == other._record_bytes()
        )

    def __hash__(self) -> int:
        return hash((self.queue, self.offset, self.physical_offset))

    def __repr__(self) -> str:
        body = self.body_view
        shown = bytes(body[:32])
        more = f"... {len(body)} bytes" if len(body) > 32 else ""
        return f"Message({self.topic!r}, queue_id={self.queue_id}, offset={self.offset}, body={shown!r}{more})"


def _restored(kind: type[Message], queue: tuple[str, int], record: bytes, unit: bytes, offset: int) -> Message:
    return kind(UnitBatch(QueueRef(*queue), record, unit, offset), 0, offset)


def records_of(messages: list[Message]) -> bytes | memoryview:
    """Return the records of messages as they are stored, one after the other, with their own bodies.
    If they follow each other in one segment, the result is a view, which pins its mapping. Raises the errors of
    `Message._whole`."""
    found: bytes | memoryview | None = None if kernel is None else kernel.records_of(messages)
    return b"".join([message._whole()._record_bytes() for message in messages]) if found is None else found


def stored_bytes(messages: Iterable[Message]) -> int:
    """Return the sum of the messages' sizes, quickly enough for a hot path."""
    return sum(map(_size, messages))


def row_of(message: Message, *, stored: bool = False) -> dict[str, Any]:
    """Return the message as a row of exports and columns (clients#message-names). `body` is bytes.

    With `stored` a compressed body stays as it is in the log, which serves bodies that cannot be inflated.
    """
    properties = message.stored_properties()
    return {
        "topic": message.topic,
        "queue_id": message.queue_id,
        "queue_offset": message.offset,
        "physical_offset": message.physical_offset,
        "size": message.size,
        "body": bytes(message.body_view) if stored else message.body,
        "tags": properties.get(TAGS),
        "keys": properties.get(KEYS),
        "properties": properties,
        "flag": message.flag,
        "sys_flag": message.sys_flag,
        "born_timestamp_ms": message.born_timestamp_ms,
        "born_host": message.born_host,
        "store_timestamp_ms": message.store_timestamp_ms,
        "store_host": message.store_host,
        "reconsume_times": message.reconsume_times,
        "prepared_transaction_offset": message.prepared_transaction_offset,
        "message_id": message.message_id,
        "unique_key": properties.get(UNIQ_KEY),
    }


@lru_cache(maxsize=1 << 14)
def _begin_of(queue: QueueRef) -> str:
    """Return the first fields of each line of JSON of a queue."""
    return f'{{"topic": {encode_basestring_ascii(queue.topic)}, "queue_id": {queue.queue_id}, "queue_offset": '


def json_lines(messages: list[Message], first: int = 0, *, stored: bool = False) -> tuple[str, int]:
    """Return messages from `first` on as lines of JSON, and the number of the first message that is not among them.

    A line is `row_of` in printable ASCII, its `body` in base64. There are about as many lines as fill a MiB. Raises
    FormatError if the body of the message `first` cannot be inflated, and ImportError if that needs a package.
    """
    if kernel is not None:
        text, after = kernel.json_lines(messages, first, stored, encode_basestring_ascii, _begin_of)
        if after > first:
            return text, after
    row = row_of(messages[first], stored=stored)
    row["body"] = b2a_base64(row["body"], newline=False).decode("ascii")
    return json.dumps(row) + "\n", first + 1
