"""Messages out, by receipt: pops, their receipts, and what only looks (remoting-server, section 9).

    pop   -> messages, or parked until one may come        ack, batch ack, change   -> the receipt decides
    peek  -> messages, delivered to nobody                 notification             -> True once a pop may find one

The text of a receipt is the engine's, and RocketMQ's too (`broker/pop/batch.py`). A pop's answer has its parts::

    popTime, invisibleTime, reviveQid   one of each for the whole answer
    startOffsetInfo                     mark queue start;...
    msgOffsetInfo                       mark queue offset,offset;...
    orderCountInfo                      mark qo<queue>%<offset> redeliveries;...

From these the client makes the receipts again. A pop does not wait for the disk, also with durability "flush": if its
record is lost with the power, the messages are redelivered. An acknowledgement does.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mqstore.broker.reads.filters.filter import Filter
from mqstore.broker.tables.names import BROKER_NAME, popped_topic
from mqstore.contract import MAX_BATCH, Delivery
from mqstore.errors import GroupNotFoundError, ReceiptExpiredError, ResultCode
from mqstore.remoting.codes import POLLING_FULL, POLLING_NOT_FOUND, Code
from mqstore.remoting.shapes import loads, read_body
from mqstore.serve.requests.pull import WAIT_MS_MAX

if TYPE_CHECKING:
    from mqstore.log.message import Message
    from mqstore.options import Durability
    from mqstore.serve.connection import Call
    from mqstore.serve.server import Handler, Server

_LAST: Final = 1
"""initMode of a group that begins at the end of a queue. Every other one begins at the first message."""
_ACKS_MAX: Final = 4_096
"""Receipts of one request. They are settled in the loop's thread."""
_BITS_MAX: Final = 16_384
"""Bytes of a bitmap, in base64. A batch has 32 messages, with some that a filter refuses between them."""


def _pop(server: Server, call: Call) -> None:
    _look(server, call, _deadline_ms(server, call))


def _deadline_ms(server: Server, call: Call) -> int:
    # From its arrival, not from bornTime: the clock of the client's machine may be wrong.
    poll_ms: int = call.values["pollTime"]
    return server.now_ms() + max(0, min(poll_ms, WAIT_MS_MAX))


def _look(server: Server, call: Call, deadline_ms: int) -> None:
    """Answer a pop, or park it until it may find a message."""
    values = call.values
    only = _filter(server, call)
    found = server.broker.pop(
        values["consumerGroup"],
        values["topic"],
        values["maxMsgNums"],
        queue_id=values["queueId"],
        invisible=values["invisibleTime"] / 1000,
        filter=only,
        order=values["order"],
        start="latest" if values["initMode"] == _LAST else "earliest",
        attempt_id=values["attemptId"],
        local=False,
        durability="append",
    )
    if found:
        server.broker.items.note_holder(values["consumerGroup"], found, call.connection.holder)
        _deliver(server, call, found)
    elif (left_ms := deadline_ms - server.now_ms()) <= 0:
        _nothing(server, call, POLLING_NOT_FOUND)
    elif not server.may_park(call.connection):
        _nothing(server, call, POLLING_FULL)
    else:
        again = partial(_look, server, call, deadline_ms)
        _wait(server, call, only, left_ms, lambda _: again(), partial(_nothing, server, call, POLLING_NOT_FOUND))


def _filter(server: Server, call: Call) -> Filter | None:
    text, kind = call.values["exp"], call.values["expType"]
    return server.broker.filter(text, "SQL92" if kind == "SQL92" else "TAG") if text else None


def _wait(
    server: Server,
    call: Call,
    only: Filter | None,
    left_ms: int,
    work: Callable[[bool], object],
    end: Callable[[], object],
) -> None:
    """Do `work(True)` once a pop may find a message, or `work(False)` at the deadline."""
    values = call.values
    queue = values["consumerGroup"], values["topic"]
    add = partial(
        server.broker.add_pop_waiter,
        *queue,
        queue_id=values["queueId"],
        filter=only,
        order=values["order"],
        timeout=left_ms / 1000,
    )
    server.park_until(call, add, work, end, (*queue, values["queueId"]))


def _deliver(server: Server, call: Call, found: Sequence[Delivery]) -> None:
    """Answer with the messages of one pop time. A client that dates the others alike could not settle them."""
    parts = [delivery.receipt.split(" ") for delivery in found]
    times = parts[0][1:4]
    later = [delivery.receipt for delivery, each in zip(found, parts, strict=True) if each[1:4] != times]
    if later:  # their queue was popped a moment later, or again for the same attempt
        server.broker.release(call.values["consumerGroup"], call.values["topic"], later, durability="append")
    starts: dict[str, str] = {}
    offsets: dict[str, list[str]] = {}
    counts: list[str] = []
    kept: list[Message] = []
    for delivery, (start, *of_batch, mark, _, queue_id, offset) in zip(found, parts, strict=True):
        if of_batch != times:
            continue
        kept.append(delivery.message)
        starts[f"{mark} {queue_id}"] = start
        offsets.setdefault(f"{mark} {queue_id}", []).append(offset)
        if delivery.redeliveries is not None:
            counts.append(f"{mark} qo{queue_id}%{offset} {delivery.redeliveries}")
    fields: dict[str, object] = {
        **dict(zip(("popTime", "invisibleTime", "reviveQid"), times, strict=True)),
        "restNum": 0,
        "startOffsetInfo": ";".join(f"{queue} {start}" for queue, start in starts.items()),
        "msgOffsetInfo": ";".join(f"{queue} {','.join(each)}" for queue, each in offsets.items()),
    }
    if counts:
        fields["orderCountInfo"] = ";".join(counts)
    call.reply(ResultCode.SUCCESS, fields, _records(kept))


def _nothing(server: Server, call: Call, code: int) -> None:
    # All four: a Java client decodes them before it looks at the code.
    call.reply(code, _no_times(server, call.values.get("invisibleTime", 0)))


def _no_times(server: Server, invisible_ms: int) -> dict[str, object]:
    return {"popTime": server.broker.clock.now_ms(), "invisibleTime": invisible_ms, "reviveQid": 0, "restNum": 0}


def _records(messages: Sequence[Message]) -> bytes:
    return b"".join(message._whole()._record_bytes() for message in messages)


# -- receipts -------------------------------------------------------------------------------------------------------


def _ack(server: Server, call: Call) -> None:
    values = call.values
    group, topic = values["consumerGroup"], values["topic"]
    work = partial(server.broker.ack, group, popped_topic(group, topic), [values["extraInfo"]])
    _settle(server, call, work, lambda _: call.reply())


def _change(server: Server, call: Call) -> None:
    """Change the time at which a delivery is visible. A push consumer does this with a message that has failed."""
    values = call.values
    group, topic = values["consumerGroup"], popped_topic(values["consumerGroup"], values["topic"])
    work = partial(
        server.broker.change_invisible, group, topic, values["extraInfo"], max(0, values["invisibleTime"]) / 1000
    )

    def answer(receipt: str) -> None:
        _, pop_time_ms, invisible_ms, revive_id, *_ = receipt.split(" ")
        call.reply(fields={"popTime": pop_time_ms, "invisibleTime": invisible_ms, "reviveQid": revive_id})

    _settle(server, call, work, answer)


def _batch_ack(server: Server, call: Call) -> None:
    """Acknowledge receipts from a proxy. One code cannot say which have expired: those are redelivered,
    and the answer is 0, as a real broker's."""
    acks = list(_acks(loads(call.frame.body)))

    def work(durability: Durability | None = None) -> None:
        for group, topic, receipts in acks:
            with suppress(ReceiptExpiredError):
                server.broker.ack(group, topic, receipts, durability=durability)

    _settle(server, call, work, lambda _: call.reply())


def _acks(body: Mapping[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (group, topic, receipts) of each entry. Raises FormatError."""
    count = 0
    with read_body():
        for each in body.get("acks") or ():
            group, bitmap = str(each["c"]), str(each["b"])
            if len(bitmap) > _BITS_MAX:
                raise ValueError(f"a bitmap of {len(bitmap)} characters")
            bits = bin(int.from_bytes(base64.b64decode(bitmap, validate=True), "little"))[:1:-1]
            start, queue_id = int(each["so"]), int(each["q"])
            head = f"{start} {int(each['pt'])} {int(each['it'])} {int(each['rq'])} {each['r']} {BROKER_NAME} {queue_id}"
            receipts = [f"{head} {start + i}" for i, bit in enumerate(bits) if bit == "1"]
            if (count := count + len(receipts)) > _ACKS_MAX:
                raise ValueError(f"more than {_ACKS_MAX} receipts")
            if receipts:
                yield group, popped_topic(group, str(each["t"])), receipts


def _settle(server: Server, call: Call, work: Callable[..., Any], answer: Callable[[Any], object]) -> None:
    """Do `work`, which takes a durability, and answer when it is as durable as the store's sends."""
    server.check_busy(call.connection)
    server.when_done(call, server.broker._without_wait(work, {}), answer)


# -- looking --------------------------------------------------------------------------------------------------------


def _peek(server: Server, call: Call) -> None:
    """Answer with the next messages that the group has not popped yet. They are delivered to nobody by this."""
    values, broker = call.values, server.broker
    group, topic, queue_id = values["consumerGroup"], values["topic"], values["queueId"]
    if broker.groups.get(group) is None:
        raise GroupNotFoundError(f"there is no group {group!r}")
    queues = range(broker.topics.require(topic).read_queues) if queue_id < 0 else (queue_id,)
    popped = {(each.topic, each.queue_id): each.offset + 1 for each in broker.pending(group)}  # the last one counts
    limit = max(1, min(values["maxMsgNums"], MAX_BATCH))
    found: list[Message] = []
    for each in queues:
        begin = max(broker.committed(group, topic, each) or 0, broker.min_offset(topic, each))
        found += broker.read(topic, each, max(begin, popped.get((topic, each), 0)), limit - len(found)).messages
        if len(found) == limit:
            break
    call.reply(ResultCode.SUCCESS if found else ResultCode.PULL_NOT_FOUND, _no_times(server, 0), _records(found))


def _notify(server: Server, call: Call) -> None:
    """Answer once a pop may find a message."""

    def answer(worth: bool, *, full: bool = False) -> None:
        call.reply(fields={"hasMsg": worth, "pollingFull": full})
        if worth:  # it does not pop itself, and another one that waits may
            server.broker.wake_one(call.values["consumerGroup"], call.values["topic"], call.values["queueId"])

    if not server.may_park(call.connection):
        answer(False, full=True)
        return
    left_ms = max(0, _deadline_ms(server, call) - server.now_ms())
    _wait(server, call, _filter(server, call), left_ms, answer, partial(answer, False))


def _polling_info(server: Server, call: Call) -> None:
    """Answer with the number of pops that wait for this queue, or with queue -1 for all of the topic."""
    names = "consumerGroup", "topic", "queueId"
    wanted = [call.values[name] for name in names]
    waiting = sum(
        each.frame.code == Code.POP_MESSAGE and [each.values[name] for name in names] == wanted
        for each in server.parked_calls()
    )
    call.reply(fields={"pollingNum": waiting})


HANDLERS: Mapping[Code, Handler] = {
    Code.POP_MESSAGE: _pop,
    Code.ACK_MESSAGE: _ack,
    Code.BATCH_ACK_MESSAGE: _batch_ack,
    Code.CHANGE_MESSAGE_INVISIBLETIME: _change,
    Code.PEEK_MESSAGE: _peek,
    Code.NOTIFICATION: _notify,
    Code.POLLING_INFO: _polling_info,
}
