"""Consumer groups: heartbeats, offsets of groups and queues, queue locks (remoting-server, sections 6 and 10)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mqstore.errors import FormatError, ResultCode
from mqstore.log.commitlog import QueueRef
from mqstore.remoting.codes import QUERY_NOT_FOUND, Code
from mqstore.remoting.shapes import dumps, loads

if TYPE_CHECKING:
    from mqstore.serve.connection import Call
    from mqstore.serve.server import Handler, Server


def _heartbeat(server: Server, call: Call) -> None:
    connection, body = call.connection, loads(call.frame.body)
    frame = call.frame
    changed = server.registry.heartbeat(connection, body, server.loop.time(), frame.language, frame.version)
    server.join(str(body.get("clientID")))
    server.consumers_changed(changed)
    server.heard(connection)
    call.reply(fields={"IS_SUPPORT_HEART_BEAT_V2": True, "IS_SUB_CHANGE": True})


def _unregister(server: Server, call: Call) -> None:
    values = call.values
    group = values["consumerGroup"]
    if server.registry.leave(values["clientID"], consumer_group=group, producer_group=values["producerGroup"]):
        server.dismiss(values["clientID"], {group})
    call.reply()


def _consumer_list(server: Server, call: Call) -> None:
    group = call.values["consumerGroup"]
    if not (names := server.members(group)):
        call.reply(ResultCode.SYSTEM_ERROR, remark=f"the group {group!r} has no consumers")
        return
    call.reply(body=dumps({"consumerIdList": names}))


def _check_client(server: Server, call: Call) -> None:
    """Check the filter of a subscription. A consumer asks before it starts."""
    data = loads(call.frame.body).get("subscriptionData") or {}
    if data.get("expressionType") == "SQL92":
        server.broker.filter(str(data.get("subString")), "SQL92")
    call.reply()


# -- offsets --------------------------------------------------------------------------------------------------------


def _committed(server: Server, call: Call) -> None:
    values = call.values
    topic, queue_id = values["topic"], values["queueId"]
    offset = server.broker.committed(values["consumerGroup"], topic, queue_id)
    if offset is None and values["setZeroIfNotFound"] and _bounds(server, topic, queue_id)[0] == 0:
        offset = 0  # a young queue is read from its beginning, whatever the client prefers
    if offset is None:
        call.reply(QUERY_NOT_FOUND, remark="the group has no offset in this queue")
        return
    call.reply(fields={"offset": offset})


def _commit(server: Server, call: Call) -> None:
    values = call.values
    server.broker.commit(values["consumerGroup"], values["topic"], values["queueId"], values["commitOffset"])
    call.reply()


def _bounds(server: Server, topic: str, queue_id: int) -> tuple[int, int]:
    return server.broker.min_offset(topic, queue_id), server.broker.max_offset(topic, queue_id)


def _max_offset(server: Server, call: Call) -> None:
    call.reply(fields={"offset": server.broker.max_offset(call.values["topic"], call.values["queueId"])})


def _min_offset(server: Server, call: Call) -> None:
    call.reply(fields={"offset": server.broker.min_offset(call.values["topic"], call.values["queueId"])})


def _offset_for_time(server: Server, call: Call) -> None:
    values = call.values
    upper = values["boundaryType"].upper() == "UPPER"
    offset = server.broker.offset_for_time(
        values["topic"], values["queueId"], values["timestamp"], "upper" if upper else "lower"
    )
    call.reply(fields={"offset": offset})


def _earliest_time(server: Server, call: Call) -> None:
    topic, queue_id = call.values["topic"], call.values["queueId"]
    first, end = _bounds(server, topic, queue_id)
    messages = server.broker.read(topic, queue_id, first, 1).messages if first < end else []
    call.reply(fields={"timestamp": messages[0].store_timestamp_ms if messages else -1})


# -- locks ----------------------------------------------------------------------------------------------------------


def _lock(server: Server, call: Call) -> None:
    group, client_id, queues = _lock_request(call)
    # After a kill the clients that held locks go on with their messages for a while.
    wanted = queues if server.lock_list.may_lock(group, client_id) else ()
    held = server.broker.locks.try_lock_batch(group, wanted, client_id)
    locked = [
        {"brokerName": server.broker_name, "queueId": queue.queue_id, "topic": queue.topic} for queue in sorted(held)
    ]
    call.reply(body=dumps({"lockOKMQSet": locked}))


def _unlock(server: Server, call: Call) -> None:
    group, client_id, queues = _lock_request(call)
    server.broker.locks.unlock_batch(group, queues, client_id)
    call.reply()


def _lock_request(call: Call) -> tuple[str, str, list[QueueRef]]:
    body: Mapping[str, Any] = loads(call.frame.body)
    try:
        queues = [QueueRef(str(each["topic"]), int(each["queueId"])) for each in body.get("mqSet") or ()]
        return str(body["consumerGroup"]), str(body["clientId"]), queues
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the request for locks is damaged: {error!r}", "body", 0) from None


HANDLERS: Mapping[Code, Handler] = {
    Code.HEART_BEAT: _heartbeat,
    Code.UNREGISTER_CLIENT: _unregister,
    Code.GET_CONSUMER_LIST_BY_GROUP: _consumer_list,
    Code.CHECK_CLIENT_CONFIG: _check_client,
    Code.QUERY_CONSUMER_OFFSET: _committed,
    Code.UPDATE_CONSUMER_OFFSET: _commit,
    Code.GET_MAX_OFFSET: _max_offset,
    Code.GET_MIN_OFFSET: _min_offset,
    Code.SEARCH_OFFSET_BY_TIMESTAMP: _offset_for_time,
    Code.GET_EARLIEST_MSG_STORETIME: _earliest_time,
    Code.LOCK_BATCH_MQ: _lock,
    Code.UNLOCK_BATCH_MQ: _unlock,
}
