"""Messages of a cluster: the records of answers, receipts, and the fields and bodies of sends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from struct import Struct
from typing import Any, Final

from mqstore.broker.reads.filters.filter import Filter
from mqstore.errors import ResultCode
from mqstore.layout.consumequeue import UNIT
from mqstore.layout.hosts import encode_host
from mqstore.layout.messageid import decode_message_id
from mqstore.layout.properties import encode_properties
from mqstore.layout.record import MAGIC_AT, MAGIC_V2, PHYSICAL_OFFSET_AT, SYS_FLAG_AT, body_length_at
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.message import Message, UnitBatch
from mqstore.remoting.codes import DEFAULT_TOPIC
from mqstore.remoting.frames import Frame
from mqstore.remoting.short import places_of

STORED: Final = (0, ResultCode.FLUSH_DISK_TIMEOUT, 11, 12)
"""Codes of a message that is stored: on disk, not yet on disk, not yet with the broker's copies."""
KEPT_FLAGS: Final = 0x701
"""Bits of a record's sysFlag that a copy keeps: its compression."""
_I4, _I8 = Struct(">i").unpack_from, Struct(">q").unpack_from
_QUEUE_ID_AT: Final = 12


def records(body: bytes) -> Iterator[tuple[int, str, int, int]]:
    """Yield (position, topic, queue id of its broker, queue offset) of each record of an answer."""
    for at, offset in places_of(body):
        text = at + body_length_at(_I4(body, at + SYS_FLAG_AT)[0])
        text += 4 + _I4(body, text)[0]
        wide = 2 if _I4(body, at + MAGIC_AT)[0] == MAGIC_V2 else 1
        end = text + wide + int.from_bytes(body[text : text + wide], "big")
        yield at, body[text + wide : end].decode(), _I4(body, at + _QUEUE_ID_AT)[0], offset


def message_at(body: bytes, at: int, queue: QueueRef, offset: int) -> Message:
    """Return the message of the record at a position. It keeps the whole answer alive."""
    unit = UNIT.pack(_I8(body, at + PHYSICAL_OFFSET_AT)[0], _I4(body, at)[0], 0)
    return Message(UnitBatch(queue, body, unit, offset), at, offset)


class Receipt(SendReceipt):
    """Receipt of a cluster. The size of the record is not known, and 0. A delayed message has a handle."""

    __slots__ = ()

    @property
    def recall_handle(self) -> str | None:
        return self[7]  # type: ignore[misc, no-any-return]


def receipts(queue: QueueRef, answer: Frame, keys: list[str], now_ms: int) -> list[SendReceipt]:
    """Return the receipts of messages that were sent in one request."""
    first, handle = int(answer.fields["queueOffset"]), answer.fields.get("recallHandle")
    found: list[SendReceipt] = []
    for i, (message_id, key) in enumerate(zip(answer.fields["msgId"].split(","), keys, strict=True)):
        host, physical = decode_message_id(message_id)
        items = queue, first + i, physical, 0, now_ms, encode_host(host), key, handle
        found.append(Receipt(items))  # type: ignore[arg-type]  # one more
    return found


def send_fields(
    group: str, topic: str, broker: str, queue_id: int, properties: Mapping[str, str], born_ms: int, **more: Any
) -> dict[str, Any]:
    """Return the fields of SEND_MESSAGE_V2. `more` is some of sys_flag, flag, reconsume_times, batch and queues, the
    number for a topic that the broker creates. Raises InvalidMessageError for bad properties."""
    text = encode_properties(properties).decode()
    sys_flag, flag, reconsume_times = (more.get(name, 0) for name in ("sys_flag", "flag", "reconsume_times"))
    queues = more.get("queues", 4)
    values = group, topic, DEFAULT_TOPIC, queues, queue_id, sys_flag, born_ms, flag, text, reconsume_times
    return {**dict(zip("abcdefghij", values, strict=True)), "k": False, "m": more.get("batch", False), "n": broker}


def expression_of(chosen: Filter | None) -> tuple[str, str]:
    """Return kind and text of a filter, as requests have them."""
    return ("TAG", "*") if chosen is None else (chosen.kind, chosen.expression)
