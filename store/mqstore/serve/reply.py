"""Requests with a reply, and recalls of delayed messages (remoting-server, sections 4 and 7).

    requester -- message with CORRELATION_ID, REPLY_TO_CLIENT --> topic --> consumer
        ^                                                                      |
        +-- 326, answered <-- server <-- 325, with the same properties --------+

A reply is stored nowhere. The consumer's send succeeds when the requester has answered.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from mqstore.broker.pop.receipts import parse_recall_handle
from mqstore.errors import InvalidReceiptError, ResultCode
from mqstore.remoting.codes import Code
from mqstore.remoting.frames import Frame
from mqstore.remoting.shapes import properties_of

if TYPE_CHECKING:
    from mqstore.serve.connection import Call
    from mqstore.serve.server import Handler, Server

_REPLY_TO = "REPLY_TO_CLIENT"


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
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in sent.items()}
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
    Code.SEND_REPLY_MESSAGE: _reply,
    Code.SEND_REPLY_MESSAGE_V2: _reply,
    Code.RECALL_MESSAGE: _recall,
}
