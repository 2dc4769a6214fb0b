"""Consumer groups: heartbeats, offsets, queue locks, assignments (remoting-server, sections 6, 9 and 10).

A consumer of RocketMQ 5 asks for its assignments with `setClientRebalance(false)`: the server divides the queues, and
says whether they are pulled or popped. A 4.x consumer divides by itself.

    mode PULL              the strategy's share
    mode POP, share 0      queue -1 for every member: all queues
    mode POP, share n      its own share and those of the next n members, or one queue if members are more than queues
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mqstore.broker.tables.requestmodes import RequestMode
from mqstore.client.group.allocation import STRATEGIES, Strategy
from mqstore.errors import FormatError, ResultCode
from mqstore.log.commitlog import QueueRef
from mqstore.remoting.codes import QUERY_NOT_FOUND, Code
from mqstore.remoting.shapes import dumps, loads, queue_key, read_body

if TYPE_CHECKING:
    from mqstore.serve.connection import Call
    from mqstore.serve.server import Handler, Server

_STRATEGIES: Final[Mapping[str, Strategy]] = {"AVG": STRATEGIES["avg"], "AVG_BY_CIRCLE": STRATEGIES["circle"]}


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
    body = loads(call.frame.body)
    with read_body():
        data = body.get("subscriptionData") or {}
        kind, text = data.get("expressionType"), str(data.get("subString"))
    if kind == "SQL92":
        server.broker.filter(text, "SQL92")
    call.reply()


# -- offsets --------------------------------------------------------------------------------------------------------


def _committed(server: Server, call: Call) -> None:
    values = call.values
    topic, queue_id = values["topic"], values["queueId"]
    offset = server.broker.committed(values["consumerGroup"], topic, queue_id)
    if offset is None and values["setZeroIfNotFound"] and server.broker.min_offset(topic, queue_id) == 0:
        offset = 0  # a young queue is read from its beginning, whatever the client prefers
    if offset is None:
        call.reply(QUERY_NOT_FOUND, remark="the group has no offset in this queue")
        return
    call.reply(fields={"offset": offset})


def _commit(server: Server, call: Call) -> None:
    values = call.values
    server.broker.commit(values["consumerGroup"], values["topic"], values["queueId"], values["commitOffset"])
    call.reply()


def _bound(server: Server, call: Call) -> None:
    of = server.broker.max_offset if call.frame.code == Code.GET_MAX_OFFSET else server.broker.min_offset
    call.reply(fields={"offset": of(call.values["topic"], call.values["queueId"])})


def _offset_for_time(server: Server, call: Call) -> None:
    values = call.values
    upper = values["boundaryType"].upper() == "UPPER"
    offset = server.broker.offset_for_time(
        values["topic"], values["queueId"], values["timestamp"], "upper" if upper else "lower"
    )
    call.reply(fields={"offset": offset})


def _earliest_time(server: Server, call: Call) -> None:
    topic, queue_id = call.values["topic"], call.values["queueId"]
    broker, first = server.broker, server.broker.min_offset(topic, queue_id)
    messages = broker.read(topic, queue_id, first, 1).messages if first < broker.max_offset(topic, queue_id) else []
    call.reply(fields={"timestamp": messages[0].store_timestamp_ms if messages else -1})


# -- locks ----------------------------------------------------------------------------------------------------------


def _lock(server: Server, call: Call) -> None:
    group, client_id, queues = _lock_request(call)
    # After a kill the clients that held locks go on with their messages for a while.
    wanted = queues if server.lock_list.may_lock(group, client_id) else ()
    held = server.broker.locks.try_lock_batch(group, wanted, client_id)
    locked = [dict(queue_key(server.broker_name, *queue)) for queue in sorted(held)]
    call.reply(body=dumps({"lockOKMQSet": locked}))


def _unlock(server: Server, call: Call) -> None:
    group, client_id, queues = _lock_request(call)
    server.broker.locks.unlock_batch(group, queues, client_id)
    call.reply()


def _lock_request(call: Call) -> tuple[str, str, list[QueueRef]]:
    body: Mapping[str, Any] = loads(call.frame.body)
    with read_body():
        queues = [QueueRef(str(each["topic"]), int(each["queueId"])) for each in body.get("mqSet") or ()]
        return str(body["consumerGroup"]), str(body["clientId"]), queues


# -- assignments ----------------------------------------------------------------------------------------------------


def _assignments(server: Server, call: Call) -> None:
    body = _body(call, "topic", "consumerGroup", "clientId", "strategyName", "messageModel")
    topic, group = body["topic"], body["consumerGroup"]
    mode = server.request_modes.get(topic, group)
    queues = _queues_of(server, mode, body)
    if queues is None:
        call.reply(body=dumps({}))  # the client keeps what it has
        return
    assignments = [
        {"messageQueue": dict(queue_key(server.broker_name, topic, queue)), "mode": mode.mode} for queue in queues
    ]
    call.reply(body=dumps({"messageQueueAssignments": assignments}))


def _queues_of(server: Server, mode: RequestMode, body: Mapping[str, str]) -> list[int] | None:
    """Return the queues of a client, or None if they are not known: no such topic, members or strategy."""
    config, client_id = server.broker.topics.get(body["topic"]), body["clientId"]
    if config is None:
        return None
    every = [QueueRef(config.name, i) for i in range(config.read_queues if config.readable else 0)]
    members, divide = server.members(body["consumerGroup"]), _STRATEGIES.get(body["strategyName"])
    if body["messageModel"] == "BROADCASTING":
        mine = set(every)
    elif not members or divide is None:
        return None
    elif not every or client_id not in members:
        mine = set()
    elif mode.mode == "POP" and mode.share <= 0:
        return [-1]
    else:
        at, share = members.index(client_id), mode.share if mode.mode == "POP" else 0
        if share and len(members) > len(every):
            mine = {every[at % len(every)]}
        else:
            sharing = {members[(at + i) % len(members)] for i in range(min(share, len(members) - 1) + 1)}
            mine = {queue for name in sharing for queue in divide(name, every, members)}
    return sorted(queue.queue_id for queue in mine)


def _set_mode(server: Server, call: Call) -> None:
    body = _body(call, "topic", "consumerGroup", "mode")
    share = loads(call.frame.body).get("popShareQueueNum") or 0
    if type(share) is not int:
        raise FormatError(f"popShareQueueNum must be a number, not {share!r:.80}", "body", 0)
    mode: Any = body["mode"]
    work = partial(server.request_modes.put, body["topic"], body["consumerGroup"], RequestMode(mode, share))
    server.do_in_thread(call, work, lambda _: call.reply())


def _body(call: Call, *names: str) -> dict[str, str]:
    """Return texts of the body. Raises FormatError if one is missing."""
    body = loads(call.frame.body)
    for name in names:
        if type(body.get(name)) is not str:
            raise FormatError(f"the body has no {name}", "body", 0)
    return {name: body[name] for name in names}


HANDLERS: Mapping[Code, Handler] = {
    Code.HEART_BEAT: _heartbeat,
    Code.UNREGISTER_CLIENT: _unregister,
    Code.GET_CONSUMER_LIST_BY_GROUP: _consumer_list,
    Code.CHECK_CLIENT_CONFIG: _check_client,
    Code.QUERY_CONSUMER_OFFSET: _committed,
    Code.UPDATE_CONSUMER_OFFSET: _commit,
    Code.GET_MAX_OFFSET: _bound,
    Code.GET_MIN_OFFSET: _bound,
    Code.SEARCH_OFFSET_BY_TIMESTAMP: _offset_for_time,
    Code.GET_EARLIEST_MSG_STORETIME: _earliest_time,
    Code.LOCK_BATCH_MQ: _lock,
    Code.UNLOCK_BATCH_MQ: _unlock,
    Code.QUERY_ASSIGNMENT: _assignments,
    Code.SET_MESSAGE_REQUEST_MODE: _set_mode,
}
