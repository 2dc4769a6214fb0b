"""Puts in flight of a connection: many messages travel in one frame, and one answer completes all their futures.

    put_async -> a future, gathered -> one frame for those to the same topic and queue -> one answer -> futures

The thread that waits for a future reads the answers itself (`Connection.gather`). Messages with options, large
ones, and those that wait for the disk have a frame each, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from mqstore.errors import ConnectionLostError, MQStoreError
from mqstore.log.commitlog import SendReceipt
from mqstore.log.writing.outgoing import Body
from mqstore.options import Durability
from mqstore.remote.connection import Answered, Connection
from mqstore.remote.short import result_of
from mqstore.remoting.calls import CALLS, error_of
from mqstore.remoting.frames import Frame
from mqstore.remoting.short import bodies_bytes, each_receipt, fits, put_fields, receipt_of
from mqstore.signalsafe import Future

_PUT, _PUTS = CALLS["put"], CALLS["session.puts"]
_SMALL_BYTES: Final = 4 << 10
"""Largest message that shares a frame. For a larger one its copies take longer than its frame."""
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


class PutsInFlight:
    """`put_async` of the contract."""

    _connection: Connection
    _news: Any
    """Function that calls another one in a thread of its own."""
    durability: Durability

    def put_async(self, topic: str, body: Body, *, queue_id: int | None = None, **options: Any) -> Future[SendReceipt]:
        """See `BrokerContract`."""
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
        topic, queue_id = key
        fields = {"topic": topic} if queue_id is None else {"topic": topic, "queueId": queue_id}
        frame = Frame(_PUTS.code, fields, bodies_bytes([body for _, body, _ in puts]))
        return frame, partial(self._answered, topic, [future for _, _, future in puts])

    def _answered(self, topic: str, futures: Sequence[Put], answer: Frame | None) -> None:
        """Settle the futures of one frame."""
        try:
            found: list[SendReceipt | Exception] | None = None
            if answer is not None and not answer.code:
                found = each_receipt(topic, len(futures), answer.fields, answer.body)
        except MQStoreError as error:
            found = [error] * len(futures)
        for i, future in enumerate(futures):
            if future.done():  # an interrupt has left it gathered
                continue
            result: SendReceipt | Exception
            if found:
                result = found[i]
            elif answer is None:
                result = self._lost()
            else:  # an exception has a traceback of its own for each
                result = error_of(answer.code, answer.remark, answer.body)
            if isinstance(result, SendReceipt):
                future.set_result(result)
            else:
                future.set_exception(result)

    def _single(
        self, topic: str, body: Body, queue_id: int | None, options: dict[str, Any], future: Put
    ) -> tuple[Frame, Answered]:
        """Return the frame of one put. With a unique key it is put again if its answer is lost, and stored once."""
        fields, data = put_request(topic, body, queue_id, options)

        def answered(answer: Frame | None) -> None:
            if answer is not None:
                _settle(future, lambda: receipt_in(topic, options, fields, answer))
            elif may_repeat(options) and not self._connection.closed:
                self._news(again)
            else:
                future.set_exception(self._lost())

        def again() -> None:
            try:
                long = long_request(topic, body, queue_id, options)
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


def put_request(
    topic: str, body: Body, queue_id: int | None, options: dict[str, Any]
) -> tuple[dict[str, Any] | None, bytes]:
    """Return fields and body of the request for a put. The fields are None if it must be a long one."""
    if type(body) is bytes and (fields := put_fields(topic, queue_id, options)) is not None:
        return fields, body
    return None, long_request(topic, body, queue_id, options)


def long_request(topic: str, body: Body, queue_id: int | None, options: dict[str, Any]) -> bytes:
    """Return the body of a long request for a put."""
    return _PUT.request({"topic": topic, "body": body, "queue_id": queue_id, **options})


def receipt_in(topic: str, options: dict[str, Any], fields: object, answer: Frame) -> SendReceipt:
    """Return the receipt in the answer to a put, which was short with `fields`, or raise its error."""
    if fields is None or answer.code:
        receipt: SendReceipt = result_of(_PUT, answer)
        return receipt
    return receipt_of(topic, options.get("unique_key"), answer.body)


def may_repeat(options: dict[str, Any]) -> bool:
    """Return True if a put whose answer was lost is found by its unique key."""
    return options.get("unique_key") is not None and all(options.get(name) is None for name in _DELAYS)


def _settle(future: Future[Any], result: Callable[[], Any]) -> None:
    try:
        future.set_result(result())
    except Exception as error:
        future.set_exception(error)
