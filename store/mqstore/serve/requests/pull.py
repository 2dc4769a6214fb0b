"""Messages out, by offset: pulls, and pulls that wait for a message (remoting-server, section 8)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from mqstore.broker.reads.filters.filter import Filter
from mqstore.errors import OffsetOutOfRangeError, ResultCode
from mqstore.log.message import records_of
from mqstore.remoting.codes import Code

if TYPE_CHECKING:
    from mqstore.broker.reads.reading import ReadResult
    from mqstore.serve.connection import Body, Call
    from mqstore.serve.server import Handler, Server

_COMMIT, _SUSPEND, _HAS_FILTER = 1, 2, 4
"""Bits of sysFlag: commit first, may wait, the expression is in the request."""
_MESSAGES_MAX: Final = 1024
_BYTES_MAX: Final = 4 << 20
WAIT_MS_MAX: Final = 300_000
"""Longest wait. Clients ask for 15 to 20 s; a connection that is gone without a word must not be kept for ever."""
_NO_WAIT_MS: Final = 1_000
"""Delay of the answer that there is nothing, for a client that may not wait. It would ask again at once."""


def _pull(server: Server, call: Call) -> None:
    values = call.values
    group, topic, queue_id = values["consumerGroup"], values["topic"], values["queueId"]
    config, consumer = server.broker.groups.require(group), server.registry.consumer(group, call.connection)
    if consumer is not None and consumer.broadcasting:
        config.check_broadcast()
    if values["sysFlag"] & _COMMIT and values["commitOffset"] >= 0:
        with suppress(OffsetOutOfRangeError):  # no client would report it, and the pull itself is fine
            server.broker.commit(group, topic, queue_id, values["commitOffset"])
    _read(server, call, server.now_ms() + max(0, min(values["suspendTimeoutMillis"], WAIT_MS_MAX)))


def _read(server: Server, call: Call, deadline_ms: int) -> None:
    """Answer a pull, or park it until there is something."""
    values = call.values
    topic, queue_id, offset = values["topic"], values["queueId"], values["queueOffset"]
    found, chosen = _filter_of(server, call)
    if not found:
        if server.registry.consumer(values["consumerGroup"], call.connection) is None:
            _wait_for_heartbeat(server, call, deadline_ms)
        else:
            call.reply(ResultCode.SUBSCRIPTION_NOT_EXIST, remark=f"the group does not subscribe to {topic!r}")
        return
    limit = values["maxMsgBytes"]
    result = server.broker.read(
        topic,
        queue_id,
        offset,
        max(1, min(values["maxMsgNums"], _MESSAGES_MAX)),
        max_bytes=_BYTES_MAX if limit <= 0 else min(limit, _BYTES_MAX),
        filter=chosen,
        group=values["consumerGroup"],
    )
    if result.messages:
        _answer(call, ResultCode.SUCCESS, result, records_of(result.messages))
    elif result.next_offset != offset:
        passed = result.status in ("NO_MATCHED_MESSAGE", "MESSAGE_WAS_REMOVING")
        _answer(call, ResultCode.PULL_RETRY_IMMEDIATELY if passed else ResultCode.PULL_OFFSET_MOVED, result)
    else:
        _wait(server, call, chosen, result, deadline_ms)


def _filter_of(server: Server, call: Call) -> tuple[bool, Filter | None]:
    """Return True and the filter of a pull, from the request or the last heartbeat. False: there is none."""
    values = call.values
    if values["sysFlag"] & _HAS_FILTER:
        text, kind = values["subscription"] or "*", values["expressionType"] or "TAG"
    else:
        consumer = server.registry.consumer(values["consumerGroup"], call.connection)
        known = None if consumer is None else consumer.subscriptions.get(values["topic"])
        if known is None:
            return False, None
        text, kind = known.expression, known.kind
    return True, server.broker.filter(text, "SQL92" if kind == "SQL92" else "TAG")


def _wait(server: Server, call: Call, chosen: Filter | None, result: ReadResult, deadline_ms: int) -> None:
    values, left_ms = call.values, deadline_ms - server.now_ms()
    nothing = partial(_answer, call, ResultCode.PULL_NOT_FOUND, result)
    if not values["sysFlag"] & _SUSPEND or not server.may_park(call.connection):
        server.park_for(call, _NO_WAIT_MS, nothing)
        return
    if left_ms <= 0:
        nothing()
        return
    queue = values["topic"], values["queueId"], values["queueOffset"]
    add = partial(server.broker.add_waiter, *queue, filter=chosen, timeout=left_ms / 1000)
    server.park_until(call, add, lambda _: _read(server, call, deadline_ms), nothing)


def _wait_for_heartbeat(server: Server, call: Call, deadline_ms: int) -> None:
    """Park a pull of a client that the server does not know yet, as after a restart of the server.
    A refusal would make the client pause longer than the next heartbeat takes."""
    left_ms = deadline_ms - server.now_ms()
    refuse = partial(call.reply, ResultCode.SUBSCRIPTION_NOT_EXIST, None, b"", "the group has sent no heartbeat")
    if left_ms <= 0:
        refuse()
        return
    server.after_heartbeat(call, partial(_read, server, call, deadline_ms))
    server.park_for(call, left_ms, refuse)


def _answer(call: Call, code: ResultCode, result: ReadResult, body: Body = b"") -> None:
    # All four: without one of them a Java client consumes nothing, and shows nothing.
    fields = {
        "suggestWhichBrokerId": 0,
        "nextBeginOffset": result.next_offset,
        "minOffset": result.min_offset,
        "maxOffset": result.max_offset,
    }
    call.reply(code, fields, body)


HANDLERS: Mapping[Code, Handler] = {Code.PULL_MESSAGE: _pull, Code.LITE_PULL_MESSAGE: _pull}
