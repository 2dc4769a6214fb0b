"""Stored message as a reader sees it: a view that decodes each attribute when it is read.

A `Message` keeps only the buffer that holds its record, and the record's position and size. The buffer is a mapped
segment. The view pins it, so the bytes stay valid after retention has unlinked the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from struct import Struct
from types import MappingProxyType
from typing import Any

from mqstore.layout.compression import inflate
from mqstore.layout.hosts import IPV4_BYTES, IPV6_BYTES, decode_host
from mqstore.layout.jsontext import BODY, decode
from mqstore.layout.properties import (
    DLQ_REASON,
    KEYS,
    ORIGIN_MESSAGE_ID,
    RESERVED,
    TAGS,
    UNIQ_KEY,
    decode_properties,
)
from mqstore.layout.record import (
    BODY_LENGTH_BYTES,
    BORN_HOST_AT,
    BORN_HOST_V6,
    COMPRESSED,
    IPV6_EXTRA,
    STORE_HOST_AT_V4,
    STORE_HOST_V6,
    body_length_at,
)
from mqstore.log.located import Located

__all__ = ["Message", "row_of", "stored_bytes"]

_I4 = Struct(">i").unpack_from
_size = attrgetter("size")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


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

    # -- where it is ------------------------------------------------------------------------------------------------

    @property
    def tags_code(self) -> int:
        """Tags code of the consume-queue unit: hash of the tag, or the due time (format#tags-code)."""
        return self._batch.tags_code(self.offset)

    @property
    def unique_key(self) -> str:
        """Key that is the same in every copy of the message. Use it to detect duplicates."""
        return self.stored_property(UNIQ_KEY) or self.stored_property(ORIGIN_MESSAGE_ID) or self.message_id

    # -- header -----------------------------------------------------------------------------------------------------

    @property
    def born_at(self) -> datetime:
        """`born_timestamp_ms` in UTC."""
        return _instant(self.born_timestamp_ms)

    @property
    def stored_at(self) -> datetime:
        """`store_timestamp_ms` in UTC."""
        return _instant(self.store_timestamp_ms)

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
        """Address of the store that keeps this copy, as "host:port"."""
        return decode_host(self._host(store=True))

    @property
    def attempt(self) -> int:
        """Number of this delivery of the message, from 1."""
        return self.reconsume_times + 1

    # -- body -------------------------------------------------------------------------------------------------------

    def _body_start(self) -> int:
        return self._start + body_length_at(self.sys_flag) + BODY_LENGTH_BYTES

    def _stored_body(self) -> bytes:
        """Return the body as its header describes it, inflated if it was stored compressed."""
        buffer = self._batch.buffer
        start = self._body_start()
        stored = buffer[start : start + _I4(buffer, start - BODY_LENGTH_BYTES)[0]]
        return inflate(self.sys_flag, stored) if self.sys_flag & COMPRESSED else stored

    @property
    def body_view(self) -> memoryview:
        """Stored bytes of the body, read-only and uncopied. They keep the mapping alive."""
        buffer, start = self._batch.buffer, self._body_start()
        return memoryview(buffer)[start : start + _I4(buffer, start - BODY_LENGTH_BYTES)[0]].toreadonly()

    def text(self, encoding: str = "utf-8") -> str:
        """Return the body as text."""
        return self.body.decode(encoding)

    def json(self) -> Any:
        """Return the value of the body as JSON. Raises FormatError, a ValueError, if it is not JSON."""
        return decode(self.body, BODY)

    # -- properties -------------------------------------------------------------------------------------------------

    def stored_properties(self) -> dict[str, str]:
        """Return every property of the record, the user's and the system's."""
        encoded = self.encoded_properties
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

    def record_bytes(self) -> bytes:
        """Return the whole record as stored."""
        return self._batch.buffer[self._start : self._start + self.size]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return self.queue == other.queue and self.offset == other.offset and self.record_bytes() == other.record_bytes()

    def __hash__(self) -> int:
        return hash((self.queue, self.offset, self.physical_offset))

    def __repr__(self) -> str:
        body = self.body_view
        shown = bytes(body[:32])
        more = f"... {len(body)} bytes" if len(body) > 32 else ""
        return f"Message({self.topic!r}, queue_id={self.queue_id}, offset={self.offset}, body={shown!r}{more})"


def stored_bytes(messages: Iterable[Message]) -> int:
    """Return the sum of the messages' sizes, quickly enough for a hot path."""
    return sum(map(_size, messages))


def row_of(message: Message, *, stored: bool = False) -> dict[str, Any]:
    """Return the message as a row of exports and columns (clients#message-names). `body` is bytes.

    With `stored` a compressed body stays as it is in the log, for one that cannot be inflated.
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
