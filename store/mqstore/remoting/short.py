"""Short forms of the calls of each message: arguments are fields of the header, and messages are the body.

    call       request: fields | body                                answer: fields | body
    put        topic queueId OPTIONS | the message                   | receipt
    puts       topic queueId | sizes, messages                       failed | errors, receipts of the others
    put_many   topic queueId | sizes, messages                       | receipts
    read       topic queueId offset n bytes group                    status next min max lost | records
    pop        group topic n queueId invisible order skip | receipts, to acknowledge first
                                                                     topic visible receipts | records
    ack        group topic | receipts

A header is read and written by compiled code, and a body is not copied into a text and back. A request is short if it
has the field `topic`. The server answers a short request in the long form (`remoting/calls.py`) where the short one
cannot say it: an answer without fields.

    receipt    i32 queue | i64 offset | i64 physical offset | i32 size | i64 store time | host
    errors     of puts: i32 size, error body for each of the messages whose numbers are in `failed`
    receipts   of put_many: u8 size, host | i32 queue | for each chunk i32 count of numbers, i64 offset, i64 store time,
               i64 positions: of each message, and the end. Of pop: the texts, one a line
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter, itemgetter
from struct import Struct, error, pack, unpack_from
from typing import Any, Final

from mqstore.contract import Delivery
from mqstore.errors import ConfigError, FormatError
from mqstore.layout.arrays.dispatch import tags_code_at
from mqstore.layout.hosts import IPV4_BYTES, IPV6_BYTES
from mqstore.layout.record import MIN_RECORD_BYTES, QUEUE_OFFSET_AT
from mqstore.log.commitlog import QueueRef, SendReceipt, SendReceipts
from mqstore.log.message import Message, UnitBatch, records_of
from mqstore.remoting.calls import error_of

Fields = Mapping[str, str]
OPTIONS: Final = ("tag", "keys", "unique_key", "message_group")
"""Options of a short put."""
_TEXT_MAX: Final = 512
_RECEIPT: Final = Struct(">iqqiq")
_RECEIPTS: Final = {
    size: each for host in (IPV4_BYTES, IPV6_BYTES) if (size := (each := Struct(f">iqqiq{host}s")).size)
}
"""Receipts with their hosts, by their size."""
_QUEUE: Final = Struct(">i")
_terms, _queue = itemgetter(slice(2, None)), attrgetter("queue")
"""Functions that return the fields of a delivery without message and receipt, and the queue of a message."""
_RECORD: Final = Struct(f">i{QUEUE_OFFSET_AT - 4}xq")


def put_fields(topic: str, queue_id: int | None, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of a short put, or None if it must be a long one."""
    fields: dict[str, Any] = {"topic": topic}
    if queue_id is not None:
        fields["queueId"] = queue_id
    for name, value in options.items():
        if value is not None:
            if name not in OPTIONS or (type(value) is not str and name != "message_group"):
                return None  # the long form refuses other types
            fields[name] = value
    return fields if fits(*fields.values()) else None


def fits(*values: object) -> bool:
    """Return True for numbers and texts that a header of compiled code has room for, and none that is refused there."""
    for value in values:
        if type(value) is str:
            if len(value) > _TEXT_MAX or not value.isascii():
                return False
        elif type(value) is not int:
            return False
    return True


def number(fields: Fields, name: str) -> int:
    """Return a field as a number. Raises ConfigError without one."""
    try:
        return int(fields[name])
    except (KeyError, ValueError):
        raise ConfigError(f"a short call needs the number {name}, not {fields.get(name)!r:.40}") from None


def receipt_bytes(receipt: SendReceipt) -> bytes:
    """Return a receipt without topic and unique key, which its caller knows."""
    ref, offset, physical_offset, size, stamp, host, _ = receipt
    return _RECEIPT.pack(ref.queue_id, offset, physical_offset, size, stamp) + host


def receipt_of(topic: str, unique_key: str | None, data: bytes) -> SendReceipt:
    """Return a receipt. Raises FormatError."""
    if (form := _RECEIPTS.get(len(data))) is None:
        raise FormatError(f"a receipt of {len(data)} bytes", "body", 0)
    queue_id, offset, physical_offset, size, stamp, host = form.unpack(data)
    return SendReceipt((QueueRef(topic, queue_id), offset, physical_offset, size, stamp, host, unique_key))


def outcomes_answer(outcomes: Iterable[SendReceipt | bytes]) -> tuple[dict[str, Any], bytes]:
    """Return fields and body of the answer to a `puts`: the receipt of each message, or its error as a body."""
    failed, errors, receipts = list[str](), list[bytes](), list[bytes]()
    for i, outcome in enumerate(outcomes):
        if isinstance(outcome, bytes):
            failed.append(str(i))
            errors += (_QUEUE.pack(len(outcome)), outcome)
        else:
            receipts.append(receipt_bytes(outcome))
    return {"failed": " ".join(failed)} if failed else {}, b"".join((*errors, *receipts))


def each_receipt(topic: str, count: int, fields: Fields, data: bytes) -> list[SendReceipt | Exception]:
    """Return the receipt or error of each of the `count` messages of a `puts`. Raises FormatError."""
    try:
        failed, at = [int(number) for number in fields.get("failed", "").split()], 0
        errors: list[tuple[int, Exception]] = []
        for number in failed:
            [size] = _QUEUE.unpack_from(data, at)
            errors.append((number, error_of(1, None, data[at + _QUEUE.size : at + _QUEUE.size + size])))
            at += _QUEUE.size + size
        stored = count - len(failed)
        width = (len(data) - at) // stored if stored else 0
        refs: dict[int, QueueRef] = {}
        found: list[SendReceipt | Exception] = []
        for queue_id, offset, physical_offset, size, stamp, host in (
            _RECEIPTS[width].iter_unpack(data[at:]) if stored else ()
        ):
            ref = refs.get(queue_id) or refs.setdefault(queue_id, QueueRef(topic, queue_id))
            found.append(SendReceipt((ref, offset, physical_offset, size, stamp, host, None)))
        for number, problem in errors:
            found.insert(number, problem)
    except (error, KeyError, ValueError):
        found = []
    if len(found) != count:
        raise FormatError("the receipts are damaged", "body", 0)
    return found


def receipts_bytes(receipts: SendReceipts) -> bytes:
    """Return the receipts of a `put_many`, without topic and unique keys."""
    host = receipts.host
    pieces = [pack(f">B{len(host)}si", len(host), host, receipts.queue.queue_id)]
    for offset, positions, stamp in receipts.chunks():
        count = 2 + len(positions)
        pieces.append(pack(f">i{count}q", count, offset, stamp, *positions))
    return b"".join(pieces)


def receipts_of(topic: str, data: bytes) -> SendReceipts:
    """Return the receipts of a `put_many`. Raises FormatError."""
    try:
        at = 1 + data[0]
        receipts = SendReceipts(QueueRef(topic, *_QUEUE.unpack_from(data, at)), data[1:at], {})
        at += _QUEUE.size
        while at < len(data):
            [count] = _QUEUE.unpack_from(data, at)
            numbers = unpack_from(f">{count}q", data, at + _QUEUE.size)
            offset, stamp, _ = numbers[:3]
            receipts.add(offset, numbers[2:], stamp)
            at += _QUEUE.size + 8 * count
        return receipts
    except (error, ValueError, IndexError):
        raise FormatError("the receipts are damaged", "body", 0) from None


def bodies_bytes(bodies: Sequence[bytes]) -> bytes:
    """Return the body of a `put_many`."""
    count = len(bodies)
    return b"".join((pack(f">i{count}i", count, *map(len, bodies)), *bodies))


def bodies_of(data: bytes) -> list[bytes]:
    """Return the messages of a `put_many`. Raises FormatError."""
    try:
        [count] = unpack_from(">i", data)
        sizes = unpack_from(f">{count}i", data, 4)
        ends = [*accumulate(sizes, initial=4 + 4 * count)]
    except error:
        ends, sizes = [], (-1,)
    if min(sizes, default=0) < 0 or ends[-1] != len(data):
        raise FormatError("the messages are not as large as their sizes say", "body", 0)
    return [data[start:end] for start, end in pairwise(ends)]


class _Batch(UnitBatch):
    """Records that were received, without their units."""

    __slots__ = ()

    def tags_code(self, slot: int) -> int:
        """Return the tags code of the record's unit. It is seldom asked for."""
        buffer: Any = self.buffer
        start = next(start for start, offset in places_of(buffer) if offset == slot)
        return tags_code_at(buffer, start, ())


def places_of(data: bytes) -> Iterable[tuple[int, int]]:
    """Yield the start and the queue offset of each record. Raises FormatError."""
    at, end = 0, len(data)
    while at < end:
        size, offset = _RECORD.unpack_from(data, at) if end - at >= MIN_RECORD_BYTES else (0, 0)
        if not MIN_RECORD_BYTES <= size <= end - at:
            raise FormatError(f"a record of {size} bytes", "body", at)
        yield at, offset
        at += size


def messages_of(topic: str, queue_id: int, data: bytes) -> list[Message]:
    """Return the messages of received records. Raises FormatError."""
    batch = _Batch(QueueRef(topic, queue_id), data, b"", 0)
    return [Message(batch, start, offset) for start, offset in places_of(data)]


def deliveries_answer(found: Sequence[Delivery]) -> tuple[dict[str, Any], bytes | memoryview] | None:
    """Return fields and body of the answer to a pop, or None if they differ in more than their receipts."""
    if not found:
        return {"receipts": ""}, b""
    messages = [delivery[0] for delivery in found]
    queue = messages[0].queue
    if len(set(map(_terms, found))) > 1 or len(set(map(_queue, messages))) > 1:
        return None
    _, _, visible_at_ms, topic, queue_id, redeliveries = found[0]
    fields = {
        "receipts": "\n".join([delivery[1] for delivery in found]),
        "visible": visible_at_ms,
        "topic": topic,
        "from": queue.topic,
        "queueId": queue_id,
        "again": "" if redeliveries is None else redeliveries,
    }
    return fields, records_of(messages)


def deliveries_of(fields: Fields, data: bytes) -> list[Delivery]:
    """Return the deliveries of an answer. Raises FormatError."""
    if not data:
        return []
    try:
        topic, visible_at_ms, queue_id = fields["topic"], int(fields["visible"]), int(fields["queueId"])
        redeliveries = int(fields["again"]) if fields["again"] else None
        messages, receipts = messages_of(fields["from"], queue_id, data), fields["receipts"].split("\n")
        return [
            Delivery(message, receipt, visible_at_ms, topic, queue_id, redeliveries)
            for message, receipt in zip(messages, receipts, strict=True)
        ]
    except (KeyError, ValueError):
        raise FormatError("an answer to a pop is damaged", "fields", 0) from None
