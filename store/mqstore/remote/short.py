"""Calls of each message in their short form (`remoting/short.py`), at the client. Others go the long way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mqstore.broker.reading import ReadResult
from mqstore.contract import Delivery
from mqstore.layout.encode import lengths_of
from mqstore.log.commitlog import SendReceipt
from mqstore.log.writing.outgoing import Body, OutgoingMessage
from mqstore.options import Duration, milliseconds
from mqstore.remote.connection import Connection
from mqstore.remoting.calls import CALLS, Call, error_of
from mqstore.remoting.frames import Frame
from mqstore.remoting.short import bodies_bytes, deliveries_of, fits, messages_of, number, receipts_of

_PUT_MANY, _READ, _POP, _ACK = (CALLS[name] for name in ("put_many", "read", "pop", "ack"))


def result_of(call: Call, answer: Frame) -> Any:
    """Return the result in a long answer, or raise its error."""
    if answer.code:
        raise error_of(answer.code, answer.remark, answer.body)
    return call.result(answer.body)


class ShortCalls:
    """Methods of the contract that have a short form."""

    _call: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]
    """Makes a call in its long form."""
    _connection: Connection

    def _ask(self, call: Call, fields: dict[str, Any], body: bytes = b"", *, repeat: bool = True) -> Frame:
        answer = self._connection.call(call.code, body, fields=fields, repeat=repeat)
        if answer.code:
            raise error_of(answer.code, answer.remark, answer.body)
        return answer

    def put_many(
        self, topic: str, bodies: Iterable[Body | OutgoingMessage], *, queue_id: int | None = None, **options: Any
    ) -> Sequence[SendReceipt]:
        """See `BrokerContract`."""
        items: Any = list(bodies)
        if _given(options) or not items or not fits(topic, queue_id or 0) or lengths_of(items) is None:
            receipts: Sequence[SendReceipt] = self._call("put_many", (topic, items), {"queue_id": queue_id, **options})
            return receipts
        fields = {"topic": topic} if queue_id is None else {"topic": topic, "queueId": queue_id}
        return receipts_of(topic, self._ask(_PUT_MANY, fields, bodies_bytes(items), repeat=False).body)

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
        """See `BrokerContract`."""
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
        """See `BrokerContract`."""
        if _given(options) or not fits(group, topic, n, queue_id):
            options |= {"queue_id": queue_id, "invisible": invisible, "order": order, "skip_acked": skip_acked}
            found: list[Delivery] = self._call("pop", (group, topic, n), {**options, "acks": acks})
            return found
        invisible_ms = milliseconds(invisible, "invisible")
        fields: dict[str, Any] = {
            "group": group,
            "topic": topic,
            "n": n,
            "queueId": queue_id,
            "invisible": invisible_ms,
        }
        if order:
            fields["order"] = "1"
        if skip_acked:
            fields["skip"] = "1"
        answer = self._ask(_POP, fields, _text(acks))
        return deliveries_of(answer.fields, answer.body) if answer.fields else result_of(_POP, answer)

    def ack(self, group: str, topic: str, receipts: Sequence[str], **options: Any) -> None:
        """See `BrokerContract`."""
        if _given(options) or not fits(group, topic) or isinstance(receipts, str) or not receipts:
            self._call("ack", (group, topic, receipts), options)
        else:
            self._ask(_ACK, {"group": group, "topic": topic}, _text(receipts))


def _given(options: dict[str, Any]) -> bool:
    return any(value is not None for value in options.values())


def _text(receipts: Sequence[str]) -> bytes:
    return "\n".join(receipts).encode()
