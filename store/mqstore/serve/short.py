"""Short forms of the calls of each message (`remoting/short.py`), at the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mqstore.log.commitlog import SendReceipt, SendReceipts
from mqstore.log.message import records_of
from mqstore.remoting.calls import CALLS, error_body, is_known
from mqstore.remoting.short import (
    OPTIONS,
    Fields,
    bodies_of,
    deliveries_answer,
    number,
    outcomes_answer,
    receipt_bytes,
    receipts_bytes,
)

if TYPE_CHECKING:
    from mqstore.remoting.calls import Call as Spec
    from mqstore.serve.connection import Call
    from mqstore.serve.own import Own

_NO_OPTIONS: Final[Mapping[str, Any]] = {}


def _put(own: Own, call: Call, spec: Spec, fields: Fields) -> None:
    broker, topic, body = own.broker, fields["topic"], call.frame.body
    queue_id = number(fields, "queueId") if "queueId" in fields else None
    options: Any = _NO_OPTIONS
    if len(fields) > 1 + (queue_id is not None):
        options = {name: fields[name] for name in OPTIONS if name in fields}
    if broker.durability == "flush":
        then = lambda receipt: call.reply(body=receipt_bytes(receipt))  # noqa: E731
        own.server.when_done(call, broker.put_async(topic, body, queue_id=queue_id, **options), then)
    else:
        call.reply(body=receipt_bytes(broker.put(topic, body, queue_id=queue_id, **options)))


def _put_many(own: Own, call: Call, spec: Spec, fields: Fields) -> None:
    queue_id = number(fields, "queueId") if "queueId" in fields else None
    done = own.broker._put_packed(fields["topic"], call.frame.body, queue_id)
    if isinstance(done, bytes):
        call.reply(body=done)
        return
    bodies = bodies_of(call.frame.body)

    def answer(receipts: Any) -> None:
        assert isinstance(receipts, SendReceipts)
        call.reply(body=receipts_bytes(receipts))

    own.do(call, spec, {}, partial(own.broker.put_many, fields["topic"], bodies, queue_id=done), answer)


def _puts(own: Own, call: Call, spec: Spec, fields: Fields) -> None:
    queue_id = number(fields, "queueId") if "queueId" in fields else None
    put, topic, bodies = own.broker.put, fields["topic"], bodies_of(call.frame.body)

    def outcome(body: bytes) -> SendReceipt | bytes:
        try:
            return put(topic, body, queue_id=queue_id)
        except Exception as error:
            if not is_known(error):
                raise
            return error_body(error)

    def answer(found: Any) -> None:
        call.reply(fields=found[0], body=found[1])

    own.do(call, spec, {}, lambda: outcomes_answer(map(outcome, bodies)), answer)


def _read(own: Own, call: Call, spec: Spec, fields: Fields) -> None:
    result = own.broker.read(
        fields["topic"],
        number(fields, "queueId"),
        number(fields, "offset"),
        number(fields, "n"),
        max_bytes=number(fields, "bytes") if "bytes" in fields else None,
        group=fields.get("group"),
    )
    status, messages, next_offset, min_offset, max_offset, lost = result
    answer = {"status": status, "next": next_offset, "min": min_offset, "max": max_offset, "lost": lost}
    call.reply(fields=answer, body=records_of(messages) if messages else b"")


def _pop(own: Own, call: Call, spec: Spec, fields: Fields) -> None:
    def answer(found: Any) -> None:
        own.broker.items.note_holder(fields.get("group", ""), found, call.connection.holder)
        if (short := deliveries_answer(found)) is None:
            call.reply(body=spec.answer(found))
        else:
            call.reply(fields=short[0], body=short[1])

    invisible_ms = number(fields, "invisible")
    work = partial(
        own.broker.pop,
        fields.get("group", ""),
        fields["topic"],
        number(fields, "n"),
        queue_id=number(fields, "queueId"),
        invisible=invisible_ms / 1000 if invisible_ms % 1000 else invisible_ms // 1000,
        order="order" in fields,
        skip_acked="skip" in fields,
        acks=_receipts(call),
        local=False,  # a restart of the server ends no receiver
    )
    own.do(call, spec, {}, work, answer)


def _ack(own: Own, call: Call, spec: Spec, fields: Fields) -> None:
    work = partial(own.broker.ack, fields.get("group", ""), fields["topic"], _receipts(call))
    own.do(call, spec, {}, work, lambda _: call.reply())


def _receipts(call: Call) -> list[str]:
    body = call.frame.body
    return body.decode(errors="replace").split("\n") if body else []


FORMS: Final[Mapping[int, Callable[[Own, Call, Spec, Fields], None]]] = {
    CALLS[name].code: form
    for name, form in {
        "put": _put,
        "put_many": _put_many,
        "session.puts": _puts,
        "read": _read,
        "pop": _pop,
        "ack": _ack,
    }.items()
}
"""Functions that serve a call of a session, by its code."""
