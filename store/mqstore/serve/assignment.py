"""Assignments: the server divides the queues, and says whether they are pulled or popped (remoting-server, section 9).

A consumer of RocketMQ 5 asks for its assignments with `setClientRebalance(false)`. A 4.x consumer divides by itself.

    mode PULL              the strategy's share
    mode POP, share 0      queue -1 for every member: all queues
    mode POP, share n      its own share and those of the next n members, or one queue if members are more than queues
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mqstore.broker.tables.requestmodes import RequestMode
from mqstore.client.allocation import STRATEGIES, Strategy
from mqstore.errors import FormatError
from mqstore.log.commitlog import QueueRef
from mqstore.remoting.codes import Code
from mqstore.remoting.shapes import dumps, loads

if TYPE_CHECKING:
    from mqstore.serve.connection import Call
    from mqstore.serve.server import Handler, Server

_STRATEGIES: Final[Mapping[str, Strategy]] = {"AVG": STRATEGIES["avg"], "AVG_BY_CIRCLE": STRATEGIES["circle"]}


def _query(server: Server, call: Call) -> None:
    body = _body(call, "topic", "consumerGroup", "clientId", "strategyName", "messageModel")
    topic, group = body["topic"], body["consumerGroup"]
    mode = server.request_modes.get(topic, group)
    queues = _queues_of(server, mode, body)
    if queues is None:
        call.reply(body=dumps({}))  # the client keeps what it has
        return
    assignments = [
        {"messageQueue": {"brokerName": server.broker_name, "queueId": queue, "topic": topic}, "mode": mode.mode}
        for queue in queues
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


HANDLERS: Mapping[Code, Handler] = {Code.QUERY_ASSIGNMENT: _query, Code.SET_MESSAGE_REQUEST_MODE: _set_mode}
