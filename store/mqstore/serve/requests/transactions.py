"""Half messages: prepared by a send, ended by the producer, or after a check (remoting-server, section 10).

    send with TRAN_MSG -> half, invisible -> END_TRANSACTION: commit, rollback, unknown
                              |
                              +-- no end for 6 s, then each 30 s: CHECK_TRANSACTION_STATE to a producer of the group,
                                  which answers by END_TRANSACTION

They wait for the disk in a store with durability "flush", so they run in the server's worker thread.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from mqstore.contract import NOT_ASKED, NobodyAsked, TransactionHandle
from mqstore.errors import ConfigError
from mqstore.layout.hosts import encode_host
from mqstore.layout.properties import PGROUP, REAL_QID, REAL_TOPIC, encode_properties
from mqstore.layout.record import MAGIC_V1, TRANSACTION_MASK, header_struct
from mqstore.log.message import Message
from mqstore.remoting.codes import Code
from mqstore.remoting.frames import Frame

if TYPE_CHECKING:
    from mqstore.serve.connection import Call
    from mqstore.serve.server import Handler, Server

_OUTCOMES: Final[Mapping[int, Literal["commit", "rollback", "unknown"]]] = {8: "commit", 12: "rollback", 0: "unknown"}


def prepare(server: Server, call: Call, queue_id: int, properties: Mapping[str, str], sys_flag: int) -> None:
    """Store a half message, and answer with its place."""
    values = call.values
    work = partial(
        server.broker.transactions.prepare,
        values["topic"],
        call.frame.body,
        properties,
        producer_group=values["producerGroup"],
        queue_id=queue_id,
        flag=values["flag"],
        sys_flag=sys_flag,
    )

    def answer(half: TransactionHandle) -> None:
        message_id = server.broker.store.at(half.physical_offset).message_id
        call.reply(
            fields={
                "msgId": message_id,
                "queueId": queue_id,
                "queueOffset": half.offset,
                "transactionId": half.transaction_id,
            }
        )

    server.do_in_thread(call, work, answer)


def _end(server: Server, call: Call) -> None:
    values = call.values
    if (outcome := _OUTCOMES.get(values["commitOrRollback"])) is None:
        raise ConfigError(f"commitOrRollback must be 8, 12 or 0, not {values['commitOrRollback']}")
    half = server.broker.transactions.get(values["transactionId"] or values["msgId"])
    if half is not None and (half.producer_group, half.offset, half.physical_offset) != (
        values["producerGroup"],
        values["tranStateTableOffset"],
        values["commitLogOffset"],
    ):
        raise ConfigError(f"the transaction {half.transaction_id} is another one, of group {half.producer_group!r}")
    if outcome == "unknown":
        call.reply()
        return
    work = partial(
        server.broker.transactions.end,
        half or values["transactionId"] or values["msgId"],
        outcome,
        from_check=values["fromTransactionCheck"],
    )
    server.do_in_thread(call, work, lambda _: call.reply())


def ask(server: Server, message: Message) -> bool | NobodyAsked | None:
    """Ask a producer of a half message's group for its outcome, which comes as a request. The callback of
    `Transactions.on_check`, in the thread of the housekeeper."""
    if not server.registry.producers(_group(message)):
        return NOT_ASKED
    server.post(partial(_ask, server, message))
    return None


def _ask(server: Server, message: Message) -> None:
    connections = server.registry.producers(_group(message))
    if not connections:
        return  # it has gone since
    key = message.unique_key
    fields = {
        "commitLogOffset": str(message.physical_offset),
        "msgId": key,
        "offsetMsgId": message.message_id,
        "topic": message.stored_properties().get(REAL_TOPIC, ""),
        "tranStateTableOffset": str(message.offset),
        "transactionId": key,
    }
    server.notify(random.choice(connections), Frame(Code.CHECK_TRANSACTION_STATE, fields, _record(message)))


def _group(message: Message) -> str:
    return message.stored_properties().get(PGROUP, "")


def _record(message: Message) -> bytes:
    """Return the record of a half message as its producer sent it, with the real topic and queue."""
    properties: dict[str, str | None] = dict(message.stored_properties())
    topic, queue_id = (properties.pop(REAL_TOPIC) or "").encode(), int(properties.pop(REAL_QID) or 0)
    body, pairs = bytes(message.body_view), encode_properties(properties)
    born, stored = encode_host(message.born_host), encode_host(message.store_host)
    head = header_struct(len(born), len(stored))
    size = head.size + len(body) + 1 + len(topic) + 2 + len(pairs)
    return b"".join(
        (
            head.pack(
                size,
                MAGIC_V1,
                zlib.crc32(body) & 0x7FFF_FFFF,
                queue_id,
                message.flag,
                message.offset,
                message.physical_offset,
                message.sys_flag & ~TRANSACTION_MASK,
                message.born_timestamp_ms,
                born,
                message.store_timestamp_ms,
                stored,
                message.reconsume_times,
                0,
                len(body),
            ),
            body,
            bytes((len(topic),)),
            topic,
            len(pairs).to_bytes(2, "big"),
            pairs,
        )
    )


HANDLERS: Mapping[Code, Handler] = {Code.END_TRANSACTION: _end}
