"""Calls of each message, at the client: in their short form (`remoting/short.py`) if it can say them.

    put, put_many, read, pop, ack    one call, one answer
    put_async -> a future, gathered -> one frame for those to the same topic and queue -> one answer -> futures

The thread that waits for a future reads the answers itself (`Connection.gather`). Messages with options, large
ones, and those that wait for the disk have a frame each, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from operator import is_not
from typing import Any, Final

from mqstore.broker.reads.reading import ReadResult
from mqstore.contract import Delivery
from mqstore.errors import ConnectionLostError, FormatError, MQStoreError
from mqstore.layout.arrays.encode import lengths_of
from mqstore.log.commitlog import SendReceipt
from mqstore.log.writing.outgoing import Body, OutgoingMessage, flat_body
from mqstore.options import Durability, Duration, milliseconds
from mqstore.remote.connection import Connection
from mqstore.remote.line import Answered
from mqstore.remoting.calls import CALLS, Call, error_of
from mqstore.remoting.frames import Frame
from mqstore.remoting.short import (
    bodies_bytes,
    deliveries_of,
    each_receipt,
    fits,
    messages_of,
    number,
    put_fields,
    receipt_of,
    receipts_of,
)
from mqstore.signalsafe import Future

_PUT, _PUTS, _PUT_MANY, _READ, _POP, _ACK = (
    CALLS[name] for name in ("put", "session.puts", "put_many", "read", "pop", "ack")
)
_SMALL_BYTES: Final = 4 << 10
"""Largest message that shares a frame. For a larger one its copies take longer than its frame."""
_CHUNK_BYTES: Final = 4 << 20
_MESSAGE_BYTES: Final = 200
"""Room for the other fields of a message."""
_DELAYS: Final = ("delay", "deliver_at", "delay_level")
"""Options with which a message is not found by its unique key before its time."""


class Put(Future[SendReceipt]):
    """Future receipt of a put. A thread that waits for it sends and reads for all."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._state = "RUNNING"  # it cannot be cancelled
        self._connection = connection

    def result(self, timeout: float | None = None) -> SendReceipt:
        if not self.done():
            self._connection.read_for(self.done, timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._connection.read_for(self.done, timeout)
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        super().add_done_callback(fn)
        if not self.done():
            self._connection.read_soon()


class MessageCalls:
    """Methods of the contract (`BrokerContract`) that are called for each message."""

    _call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
    """Makes a call in its long form."""
    _connection: Connection
    _news: Any
    """Function that calls another one in a thread of its own."""
    durability: Durability

    def _ask(self, call: Call, fields: dict[str, Any], body: bytes = b"", *, repeat: bool = True) -> Frame:
        answer = self._connection.call(call.code, body, fields=fields, repeat=repeat)
        if answer.code:
            raise error_of(answer.code, answer.remark, answer.body)
        return answer

    # -- puts -------------------------------------------------------------------------------------------------------

    def put(self, topic: str, body: Body, *, queue_id: int | None = None, **options: Any) -> SendReceipt:
        fields, data = _put_request(topic, body, queue_id, options)
        try:
            answer = self._connection.call(_PUT.code, data, fields=fields)
        except ConnectionLostError as lost:
            if not lost.sent or not _may_repeat(options):
                raise
            fields, data = None, _long_request(topic, body, queue_id, options)
            answer = self._connection.call(_PUT.code, data, fields={"again": "1"}, repeat=True)
        return _receipt_in(topic, options, fields, answer)

    def put_many(
        self, topic: str, bodies: Iterable[Body | OutgoingMessage], *, queue_id: int | None = None, **options: Any
    ) -> Sequence[SendReceipt]:
        """Put as the contract says, some megabytes a call."""
        items, receipts = list(bodies), list[SendReceipt]()
        plain = lengths_of(items)
        if plain is not None and plain[1] + _MESSAGE_BYTES * len(items) <= _CHUNK_BYTES:
            return self._put_chunk(topic, items, queue_id, options, is_plain=True)
        for chunk in _chunks(items):
            try:
                receipts += self._put_chunk(topic, chunk, queue_id, options, is_plain=plain is not None)
            except MQStoreError as error:
                error.receipts = [*receipts, *error.receipts]
                raise
            if receipts:
                queue_id = receipts[0].queue_id
        return receipts

    def _put_chunk(
        self, topic: str, items: list[Any], queue_id: int | None, options: dict[str, Any], *, is_plain: bool
    ) -> Sequence[SendReceipt]:
        if _given(options) or not items or not fits(topic, queue_id or 0) or not is_plain:
            receipts: Sequence[SendReceipt] = self._call("put_many", (topic, items), {"queue_id": queue_id, **options})
            return receipts
        answer = self._ask(_PUT_MANY, _target(topic, queue_id), bodies_bytes(items), repeat=False)
        return receipts_of(topic, answer.body)

    def put_async(self, topic: str, body: Body, *, queue_id: int | None = None, **options: Any) -> Future[SendReceipt]:
        future = Put(self._connection)
        plain = type(body) is bytes and len(body) <= _SMALL_BYTES and not options and fits(topic, queue_id or 0)
        if plain and self.durability != "flush":  # the server makes those of a frame wait one after the other
            self._connection.gather(((topic, queue_id), body, future))
        else:
            self._connection.gather((None, self._single(topic, body, queue_id, options, future), future))
        return future

    def pack(self, puts: Sequence[tuple[Any, Any, Put]]) -> tuple[Frame, Answered]:
        """Return the frame of gathered puts, and the function for its answer."""
        key, first, _ = puts[0]
        if key is None:
            single: tuple[Frame, Answered] = first
            return single
        frame = Frame(_PUTS.code, _target(*key), bodies_bytes([body for _, body, _ in puts]))
        return frame, partial(self._answered, key[0], [future for _, _, future in puts])

    def _answered(self, topic: str, futures: Sequence[Put], answer: Frame | None) -> None:
        """Settle the futures of one frame. Each has an exception of its own, which gets a traceback."""
        results: Sequence[SendReceipt | Exception]
        if answer is None:
            results = [self._lost() for _ in futures]
        elif answer.code:
            results = [error_of(answer.code, answer.remark, answer.body) for _ in futures]
        else:
            try:
                results = each_receipt(topic, len(futures), answer.fields, answer.body)
            except FormatError as error:
                results = [error] * len(futures)
        for future, result in zip(futures, results, strict=True):
            if future.done():  # an interrupt has left it gathered
                continue
            if isinstance(result, SendReceipt):
                future.set_result(result)
            else:
                future.set_exception(result)

    def _single(
        self, topic: str, body: Body, queue_id: int | None, options: dict[str, Any], future: Put
    ) -> tuple[Frame, Answered]:
        """Return the frame of one put. With a unique key it is put again if its answer is lost, and stored once."""
        fields, data = _put_request(topic, body, queue_id, options)

        def answered(answer: Frame | None) -> None:
            if answer is not None:
                _settle(future, lambda: _receipt_in(topic, options, fields, answer))
            elif _may_repeat(options) and not self._connection.closed:
                self._news(again)
            else:
                future.set_exception(self._lost())

        def again() -> None:
            try:
                long = _long_request(topic, body, queue_id, options)
                self._connection.park(_PUT.code, last, long, fields={"again": "1"})
            except MQStoreError as error:
                future.set_exception(error)

        def last(answer: Frame | None) -> None:
            if answer is None:
                future.set_exception(self._lost())
            else:
                _settle(future, lambda: result_of(_PUT, answer))

        return Frame(_PUT.code, fields or {}, data), answered

    def _lost(self) -> ConnectionLostError:
        address = self._connection.address
        return ConnectionLostError(f"the connection to {address} was lost: the message is perhaps stored", sent=True)

    # -- deliveries -------------------------------------------------------------------------------------------------

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = 32,
        *,
        max_bytes: int | None = None,
        filter: Any = None,  # noqa: A002  # the word of the contract
        group: str | None = None,
    ) -> ReadResult:
        if filter is not None or not fits(topic, queue_id, offset, max_messages, max_bytes or 0, group or ""):
            options = {"max_bytes": max_bytes, "filter": filter, "group": group}
            result: ReadResult = self._call("read", (topic, queue_id, offset, max_messages), options)
            return result
        fields: dict[str, Any] = {"topic": topic, "queueId": queue_id, "offset": offset, "n": max_messages}
        if max_bytes is not None:
            fields["bytes"] = max_bytes
        if group is not None:
            fields["group"] = group
        answer = self._ask(_READ, fields)
        found = answer.fields
        numbers = [number(found, name) for name in ("next", "min", "max", "lost")]
        return ReadResult(found["status"], messages_of(topic, queue_id, answer.body), *numbers)

    def pop(
        self,
        group: str,
        topic: str,
        n: int = 1,
        *,
        queue_id: int = -1,
        invisible: Duration = 60,
        order: bool = False,
        skip_acked: bool = False,
        acks: Sequence[str] = (),
        **options: Any,
    ) -> list[Delivery]:
        if _given(options) or not fits(group, topic, n, queue_id):
            options |= {"queue_id": queue_id, "invisible": invisible, "order": order, "skip_acked": skip_acked}
            found: list[Delivery] = self._call("pop", (group, topic, n), {**options, "acks": acks})
            return found
        fields: dict[str, Any] = {"group": group, "topic": topic, "n": n, "queueId": queue_id}
        fields["invisible"] = milliseconds(invisible, "invisible")
        if order:
            fields["order"] = "1"
        if skip_acked:
            fields["skip"] = "1"
        answer = self._ask(_POP, fields, _text(acks))
        return deliveries_of(answer.fields, answer.body) if answer.fields else result_of(_POP, answer)

    def ack(self, group: str, topic: str, receipts: Sequence[str], **options: Any) -> None:
        if _given(options) or not fits(group, topic) or isinstance(receipts, str) or not receipts:
            self._call("ack", (group, topic, receipts), options)
        else:
            self._ask(_ACK, {"group": group, "topic": topic}, _text(receipts))


def result_of(call: Call, answer: Frame) -> Any:
    """Return the result in a long answer, or raise its error."""
    if answer.code:
        raise error_of(answer.code, answer.remark, answer.body)
    return call.result(answer.body)


def _given(options: dict[str, Any]) -> bool:
    return any(map(is_not, options.values(), repeat(None)))


def _text(receipts: Sequence[str]) -> bytes:
    return "\n".join(receipts).encode()


def _target(topic: str, queue_id: int | None) -> dict[str, Any]:
    return {"topic": topic} if queue_id is None else {"topic": topic, "queueId": queue_id}


def _put_request(
    topic: str, body: Body, queue_id: int | None, options: dict[str, Any]
) -> tuple[dict[str, Any] | None, bytes]:
    """Return fields and body of the request for a put. The fields are None if it must be a long one."""
    if type(body) is bytes and (fields := put_fields(topic, queue_id, options)) is not None:
        return fields, body
    return None, _long_request(topic, body, queue_id, options)


def _long_request(topic: str, body: Body, queue_id: int | None, options: dict[str, Any]) -> bytes:
    return _PUT.request({"topic": topic, "body": body, "queue_id": queue_id, **options})


def _receipt_in(topic: str, options: dict[str, Any], fields: object, answer: Frame) -> SendReceipt:
    """Return the receipt in the answer to a put, which was short with `fields`, or raise its error."""
    if fields is None or answer.code:
        receipt: SendReceipt = result_of(_PUT, answer)
        return receipt
    return receipt_of(topic, options.get("unique_key"), answer.body)


def _may_repeat(options: dict[str, Any]) -> bool:
    """Return True if a put whose answer was lost is found by its unique key."""
    return options.get("unique_key") is not None and all(options.get(name) is None for name in _DELAYS)


def _settle(future: Future[Any], result: Callable[[], Any]) -> None:
    try:
        future.set_result(result())
    except Exception as error:
        future.set_exception(error)


def _chunks(bodies: Iterable[Body | OutgoingMessage]) -> Iterator[list[Body | OutgoingMessage]]:
    """Yield the messages of a call in parts that a frame can hold, at least one part."""
    chunk: list[Body | OutgoingMessage] = []
    size = 0
    for each in bodies:
        body = each.body if isinstance(each, OutgoingMessage) else each
        of = len(flat_body(body))
        if chunk and size + of > _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
        chunk.append(each)
        size += of + _MESSAGE_BYTES
    yield chunk
