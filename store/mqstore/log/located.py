"""Record in a buffer, found by a unit: base of `Message`, compiled where possible.

It decodes at each call and keeps nothing. Its numbers are in the places of the byte table (format#record), moved by
IPv6 hosts.
"""

from __future__ import annotations

import mmap
from struct import Struct
from typing import TYPE_CHECKING

from mqstore.layout.messageid import encode_message_id
from mqstore.layout.properties import KEYS, SHARDINGKEY, TAGS, decode_properties
from mqstore.layout.record import (
    BODY_AT_V4,
    BODY_LENGTH_BYTES,
    BORN_HOST_V6,
    BORN_TIMESTAMP_AT,
    FLAG_AT,
    MAGIC_AT,
    MAGIC_V2,
    PHYSICAL_OFFSET_AT,
    PREPARED_OFFSET_AT_V4,
    RECONSUME_TIMES_AT_V4,
    STORE_HOST_V6,
    SYS_FLAG_AT,
    TRANSACTION_COMMIT,
    TRANSACTION_MASK,
    store_timestamp_at,
)
from mqstore.log.recordbatch import RecordBatch, UnitBatch
from mqstore.log.tip import QueueRef
from mqstore.native import kernel

__all__ = ["Located"]

_I4 = Struct(">i").unpack_from
_I8 = Struct(">q").unpack_from
_V6 = BORN_HOST_V6 | STORE_HOST_V6


class Located:
    # Four slots, since readers make thousands at once. Values that messages share stay in their batch.
    __slots__ = ("_batch", "_body_end", "_start", "offset")

    def __init__(self, batch: RecordBatch | UnitBatch, start: int, offset: int, body_end: int = -1) -> None:
        """`start` is the record's position in the buffer of `batch`.
        `body_end` is the end of a body that needs no decoding, or -1 if it is not known."""
        self._batch = batch
        self._start = start
        self.offset = offset
        self._body_end = body_end

    @property
    def _buffer(self) -> mmap.mmap | bytes:
        return self._batch.buffer

    @property
    def queue(self) -> QueueRef:
        """Queue of this copy."""
        return self._batch.queue

    @property
    def topic(self) -> str:
        """Topic of that queue."""
        return self.queue.topic

    @property
    def queue_id(self) -> int:
        """Number of that queue in its topic, from 0."""
        return self.queue.queue_id

    @property
    def body(self) -> bytes:
        """The body as it was sent. Raises FormatError when a compressed one does not inflate."""
        end = self._body_end
        return self._batch.buffer[self._start + BODY_AT_V4 : end] if end >= 0 else self._stored_body()

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
        """Number that the sender set, 32 bits, or 0."""
        return int(_I4(self._buffer, self._start + FLAG_AT)[0])

    @property
    def sys_flag(self) -> int:
        """Bits of the record: compression, transaction, IPv6 hosts (format#flags)."""
        return int(_I4(self._buffer, self._start + SYS_FLAG_AT)[0])

    @property
    def born_timestamp_ms(self) -> int:
        """Time at which the sender made the message, by its clock: ms since the epoch."""
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
    def prepared_transaction_offset(self) -> int:
        """Physical offset of the half message, in a half message and its ends. 0 in other messages."""
        return int(_I8(self._buffer, self._body_start() - BODY_AT_V4 + PREPARED_OFFSET_AT_V4)[0])

    def plain_parts(self) -> tuple[bytes, bytes] | None:
        """Return (header, stored body) of an ordinary record, or None.
        Ordinary records have two IPv4 hosts and are not held back by a transaction."""
        buffer, start, flags = self._batch.buffer, self._start, self.sys_flag
        if flags & _V6 or flags & TRANSACTION_MASK not in (0, TRANSACTION_COMMIT):
            return None
        begin = start + BODY_AT_V4
        return buffer[start:begin], buffer[begin : begin + _I4(buffer, begin - BODY_LENGTH_BYTES)[0]]

    @property
    def encoded_properties(self) -> bytes:
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
        return self.stored_property(TAGS)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that `find` looks the message up by, besides its unique key."""
        return tuple(filter(None, (self.stored_property(KEYS) or "").split(" ")))

    @property
    def message_group(self) -> str | None:
        """Name of the group whose messages keep their order, or None."""
        return self.stored_property(SHARDINGKEY)

    def stored_property(self, name: str) -> str | None:
        """Return one of `stored_properties` without decoding the others, or None if it is not there."""
        return decode_properties(self.encoded_properties).get(name)


if not TYPE_CHECKING and kernel is not None:
    Located = kernel.Located
