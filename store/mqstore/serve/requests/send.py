"""Messages in: sends, batches, replies, recalls, and what consumers send back (remoting-server, sections 4 and 7).

    requester -- message with CORRELATION_ID, REPLY_TO_CLIENT --> topic --> consumer
        ^                                                                      |
        +-- 326, answered <-- server <-- 325, with the same properties --------+

A reply is stored nowhere. The consumer's send succeeds when the requester has answered.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mqstore.broker.delay.recall import parse_recall_handle
from mqstore.broker.routing.uniquekey import new_unique_key
from mqstore.broker.tables.names import RETRY_PREFIX, dlq_topic, is_retry_topic
from mqstore.errors import (
    ConfigError,
    InvalidMessageError,
    InvalidReceiptError,
    MQStoreError,
    ResultCode,
    TopicNotFoundError,
)
from mqstore.layout.hosts import encode_host
from mqstore.layout.properties import DELAY, TRAN_MSG, UNIQ_KEY
from mqstore.layout.record import COMPRESSED, COMPRESSION_TYPE_MASK
from mqstore.log.commitlog import SendReceipt
from mqstore.remoting.codes import DEFAULT_TOPIC, Code
from mqstore.remoting.frames import Frame, sent_text
from mqstore.remoting.shapes import batch_items, properties_of
from mqstore.serve.requests.creation import own_topic
from mqstore.serve.requests.routes import TRACE_TOPIC
from mqstore.serve.requests.transactions import prepare

if TYPE_CHECKING:
    from mqstore.serve.connection import Call
    from mqstore.serve.server import Handler, Server

_MULTI_TAGS: Final = 2
_KEPT_FLAGS: Final = COMPRESSED | COMPRESSION_TYPE_MASK | _MULTI_TAGS
"""Bits of a client's sysFlag that pass into the record. Those of addresses and transactions are the server's."""
_Put = Future[SendReceipt] | SendReceipt
"""Receipt of a stored message, or its future, which waits for the disk."""
_CORRELATION_ID, _CLUSTER, _REPLY_TO = "CORRELATION_ID", "CLUSTER", "REPLY_TO_CLIENT"


def _send(server: Server, call: Call) -> None:
    values = call.values
    if values["batch"]:
        _send_batch(server, call)
        return
    server.check_busy(call.connection)
    text, topic = values["properties"], values["topic"]
    if is_retry_topic(topic):
        _send_retry(server, call, _properties(server, text))
        return
    queue_id = _queue(server, call)
    put: _Put | None = _append_plain(server, call, queue_id, call.frame.body, text, values["flag"])
    if put is None:
        properties = _properties(server, text)
        if properties.get(TRAN_MSG, "").lower() == "true":
            prepare(server, call, queue_id, properties, values["sysFlag"] & _KEPT_FLAGS)
            return
        put = _append(server, call, topic, queue_id, call.frame.body, properties, values["flag"])
    _when_stored(server, call, [put])


def _send_retry(server: Server, call: Call, properties: dict[str, str]) -> None:
    """Store a message that a consumer sends back by itself: an ordered one after its last attempt, another one after
    `CONSUMER_SEND_MSG_BACK` failed. A group that holds queue locks is an ordered one."""
    values = call.values
    topic = values["topic"]
    group = topic.removeprefix(RETRY_PREFIX)
    config = server.broker.groups.require(group)
    limit = values["maxReconsumeTimes"]
    times = values["reconsumeTimes"]
    clients = server.registry.consumers(group)  # consumers of this process lock their queues without order, too
    locks = server.broker.locks.snapshot()
    ordered = any(lock.group == group and lock.client_id in clients and not lock.expired for lock in locks)
    if ordered or times > (config.retry_max_times if limit is None else limit):
        topic = dlq_topic(group)
        properties.pop(DELAY, None)

    def store() -> None:
        _when_stored(server, call, [_append(server, call, topic, 0, call.frame.body, properties, values["flag"])])

    server.creation.ensure(call, [own_topic(topic)], store)


def _send_batch(server: Server, call: Call) -> None:
    values = call.values
    server.check_busy(call.connection)
    queue_id = _queue(server, call)
    items = list(batch_items(call.frame.body))
    if not items:
        raise InvalidMessageError("the batch has no messages", "body")
    puts: list[_Put] = [
        _append_plain(server, call, queue_id, body, text, flag)
        or _append(server, call, values["topic"], queue_id, body, _properties(server, text), flag)
        for flag, body, text in items
    ]
    _when_stored(server, call, puts)


def _append_plain(
    server: Server, call: Call, queue_id: int, body: bytes, text: str | None, flag: int
) -> SendReceipt | None:
    """Append a message whose properties are stored as they came, in one compiled call. None: use `_append`."""
    values = call.values
    return server.broker._append_plain(
        values["topic"],
        queue_id,
        body,
        text or "",
        flag,
        values["sysFlag"] & _KEPT_FLAGS,
        values["bornTimestamp"],
        encode_host(call.connection.peer),
        values["reconsumeTimes"],
    )


def _append(
    server: Server, call: Call, topic: str, queue_id: int, body: bytes, properties: Mapping[str, str], flag: int
) -> Future[SendReceipt]:
    """Append a message of a send, with the fields that all messages of the send share."""
    values = call.values
    return server.broker._append_async(
        topic,
        queue_id,
        body,
        properties,
        flag=flag,
        sys_flag=values["sysFlag"] & _KEPT_FLAGS,
        reconsume_times=values["reconsumeTimes"],
        born_timestamp_ms=values["bornTimestamp"],
        born_host=call.connection.peer,
    )


def _properties(server: Server, text: str | None) -> dict[str, str]:
    properties = properties_of(text)
    properties.setdefault(UNIQ_KEY, new_unique_key())
    if _CORRELATION_ID in properties:
        properties.setdefault(_CLUSTER, server.cluster)  # a consumer cannot answer a request without it
    return properties


def _queue(server: Server, call: Call) -> int:
    """Return the queue of a send. A new topic has been created if the producer's model may be copied."""
    values = call.values
    topic: str = values["topic"]
    queue_id: int = values["queueId"]
    topics = server.broker.topics
    if topics.get(topic) is None and values["defaultTopic"] != DEFAULT_TOPIC:  # it may be known only by its messages
        raise TopicNotFoundError(f"there is no topic {topic!r}, and {values['defaultTopic']!r} is not its model")
    config = topics.require(topic) if topic == TRACE_TOPIC else topics.for_send(topic)
    if queue_id < 0:
        return server.turns.next(topic, config.write_queues)
    if queue_id >= max(config.write_queues, config.read_queues):
        raise ConfigError(f"the topic {topic!r} has no queue {queue_id}")
    return queue_id


def _when_stored(server: Server, call: Call, puts: list[_Put]) -> None:
    """Answer when all `puts` are done: now, or after the sync that stores with durability "flush" wait for."""
    waiting = [put for put in puts if isinstance(put, Future) and not put.done()]
    if waiting:  # puts of one call are synced in their order, so the last one is done last
        server.when_done(call, waiting[-1], lambda _: _stored(call, puts))
    else:
        _stored(call, puts)


def _stored(call: Call, puts: list[_Put]) -> None:
    receipts = [put.result() if isinstance(put, Future) else put for put in puts]
    first = receipts[0]
    fields: dict[str, Any] = {
        "msgId": ",".join(receipt.message_id for receipt in receipts),
        "queueId": first.queue_id,
        "queueOffset": first.offset,
        "transactionId": ",".join(receipt.unique_key for receipt in receipts),
    }
    if (handle := getattr(first, "recall_handle", None)) is not None:
        fields["recallHandle"] = handle
    call.reply(fields=fields)


def _send_back(server: Server, call: Call) -> None:
    values = call.values
    limit = values["maxReconsumeTimes"]

    def work() -> None:
        try:
            server.broker.send_back(
                values["group"],
                values["offset"],
                delay_level=values["delayLevel"],
                max_reconsume=None if limit < 0 else limit,
            )
        except LookupError as error:  # the offset is the client's
            raise error if isinstance(error, MQStoreError) else MQStoreError(str(error)) from error

    server.do_in_thread(call, work, lambda _: call.reply())


# -- replies and recalls --------------------------------------------------------------------------------------------


def _reply(server: Server, call: Call) -> None:
    values = call.values
    name = properties_of(values["properties"]).get(_REPLY_TO)
    client = None if name is None else server.registry.clients.get(name)
    if client is None:
        call.reply(ResultCode.SYSTEM_ERROR, remark=f"the client {name!r} that waits for the reply is not connected")
        return
    extra = {
        "bornHost": call.connection.peer,
        "storeHost": server.address_for(call.connection),
        "storeTimestamp": round(time.time() * 1000),
    }
    sent = {name: value for name, value in values.items() if value is not None and name != "batch"} | extra
    texts = {name: sent_text(value) for name, value in sent.items()}
    request = Frame(Code.PUSH_REPLY_MESSAGE_TO_CLIENT, texts, call.frame.body)

    def answer(frame: Frame) -> None:
        # As RocketMQ without the store: Java clients decode all three.
        fields = {"msgId": "0", "queueId": max(0, values["queueId"]), "queueOffset": 0} if frame.code == 0 else {}
        call.reply(frame.code, fields, remark=frame.remark)

    server.forward(call, client.connection, request, answer)


def _recall(server: Server, call: Call) -> None:
    values = call.values
    server.broker.topics.require(values["topic"])
    try:
        handle = parse_recall_handle(values["recallHandle"])
        if handle.topic != values["topic"]:
            raise InvalidReceiptError(f"the recall handle is one of the topic {handle.topic!r}")
    except InvalidReceiptError as error:
        call.reply(ResultCode.ILLEGAL_OPERATION, remark=str(error))
        return

    def answer(recalled: bool) -> None:
        if recalled:  # also by an earlier recall
            call.reply(fields={"msgId": handle.unique_key})
        else:
            call.reply(ResultCode.ILLEGAL_OPERATION, remark="no such message waits: it is due, or was delivered")

    server.do_in_thread(call, partial(server.broker.recall, values["recallHandle"]), answer)


HANDLERS: Mapping[Code, Handler] = {
    Code.SEND_MESSAGE: _send,
    Code.SEND_MESSAGE_V2: _send,
    Code.SEND_BATCH_MESSAGE: _send_batch,
    Code.CONSUMER_SEND_MSG_BACK: _send_back,
    Code.SEND_REPLY_MESSAGE: _reply,
    Code.SEND_REPLY_MESSAGE_V2: _reply,
    Code.RECALL_MESSAGE: _recall,
}
