"""Half messages in a cluster (remoting-server, sections 7 and 10).

prepare      a send with TRAN_MSG                   answered with the place of the half message
end          END_TRANSACTION to its broker
on_check     producer group in the heartbeat        a broker asks by CHECK_TRANSACTION_STATE, and `end` answers
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from mqstore.contract import NOT_ASKED, NobodyAsked, TransactionHandle
from mqstore.errors import InvalidMessageError
from mqstore.layout.properties import PGROUP, TRAN_MSG, UNIQ_KEY
from mqstore.layout.record import TRANSACTION_PREPARED
from mqstore.log.commitlog import SendReceipt
from mqstore.log.message import Message
from mqstore.log.writing.outgoing import Body, flat_body
from mqstore.remote.cluster.links import Links, named
from mqstore.remote.cluster.records import Receipt
from mqstore.remote.cluster.sends import Sends
from mqstore.remote.cluster.tables import Members
from mqstore.remoting.codes import Code
from mqstore.remoting.frames import Frame

Answer = Callable[[Message], "bool | NobodyAsked | None"]
_OUTCOMES: Final[Mapping[str | bool | None, int]] = {
    "commit": 8,
    "rollback": 12,
    "unknown": 0,
    True: 8,
    False: 12,
    None: 0,
}
_NO_OFFSET: Final = -1
_ENDED_KEPT: Final = 10_000
_NOTED_S: Final = 60.0
"""Time after an end in which a broker may ask although it knows: it notes ends some seconds later. An answer would
commit the message twice."""


class _Half(NamedTuple):
    broker: str
    handle: TransactionHandle
    receipt: SendReceipt


class Transactions:
    """Half messages of one client (`contract.TransactionCalls`)."""

    def __init__(self, links: Links, sends: Sends, members: Members) -> None:
        self._links = links
        self._sends = sends
        self._members = members
        self._open: dict[str, _Half] = {}
        self._ended: dict[str, tuple[str | bool, float]] = {}
        """Outcomes and times of the end, the oldest first."""
        self._answers: dict[str, Answer] = {}

    def prepare(
        self, topic: str, body: Body, properties: Mapping[str, str], *, producer_group: str, **asked: Any
    ) -> TransactionHandle:
        """Store a half message (`TransactionCalls.prepare`). `asked` is some of queue_id, flag and sys_flag."""
        route = self._sends.topics.for_send(topic)
        marked = {**properties, TRAN_MSG: "true", PGROUP: producer_group}
        prepared = marked, asked.get("flag", 0), asked.get("sys_flag", 0) | TRANSACTION_PREPARED, flat_body(body)
        answer, receipt = self._sends.send_prepared(route, asked.get("queue_id"), {}, prepared, producer_group)
        key = marked[UNIQ_KEY]
        offset = int(answer.fields["queueOffset"])
        handle = TransactionHandle(key, topic, producer_group, offset, receipt.physical_offset)
        self._open[key] = _Half(route.places[receipt.queue_id].broker, handle, receipt)
        return handle

    def end(
        self, transaction: TransactionHandle | str, outcome: str, *, from_check: bool = False, **asked: object
    ) -> SendReceipt | None:
        """End a half message. The receipt of a commit has the address of the half message and the offset -1, since a
        broker does not tell where the visible message is."""
        key = transaction if isinstance(transaction, str) else transaction.transaction_id
        if (half := self._open.get(key)) is None:
            raise InvalidMessageError(f"unknown transaction {key[:150]!r}", "transaction_id")
        self._end(half.broker, half.handle, outcome, from_check=from_check)
        if outcome != "commit":
            return None
        queue, _, *more = half.receipt
        return Receipt((queue, _NO_OFFSET, *more))  # type: ignore[arg-type]

    def _end(self, broker: str, handle: TransactionHandle, outcome: str | bool | None, *, from_check: bool) -> None:
        names = "producerGroup tranStateTableOffset commitLogOffset commitOrRollback fromTransactionCheck msgId"
        key, _, group, offset, physical = handle
        fields = {"transactionId": key} | named(
            names, group, offset, physical, code := _OUTCOMES[outcome], from_check, key
        )
        self._links.call(broker, Code.END_TRANSACTION, fields)
        if code:
            self._open.pop(key, None)
            self._ended[key] = outcome or False, time.monotonic()
            while len(self._ended) > _ENDED_KEPT:
                self._ended.pop(next(iter(self._ended)), None)

    def on_check(self, producer_group: str | None, callback: Answer | None) -> None:
        if producer_group is None:
            return
        if callback is None:
            self._answers.pop(producer_group, None)
            self._members.producers.discard(producer_group)
        else:
            self._answers[producer_group] = callback
            self._members.producers.add(producer_group)
            self._links.later(0, self._members.beat_producers)

    def half_message(self, transaction: TransactionHandle) -> Message:
        return self._links.record(self._open[transaction.transaction_id].broker, transaction.physical_offset)

    def get(self, transaction_id: str) -> TransactionHandle | None:
        half = self._open.get(transaction_id)
        return None if half is None else half.handle

    def answer(self, broker: str, frame: Frame) -> None:
        """Answer a broker's question about a half message."""
        [message] = self._links.messages(broker, frame.body)
        group = message.stored_properties().get(PGROUP, "")
        said: str | bool | NobodyAsked | None
        if (ended := self._ended.get(message.unique_key)) is not None:
            said = NOT_ASKED if time.monotonic() - ended[1] < _NOTED_S else ended[0]
        else:
            callback = self._answers.get(group)
            said = NOT_ASKED if callback is None else callback(message)
        if isinstance(said, NobodyAsked):
            return
        offset, physical = int(frame.fields["tranStateTableOffset"]), int(frame.fields["commitLogOffset"])
        handle = TransactionHandle(message.unique_key, message.topic, group, offset, physical)
        self._end(broker, handle, said, from_check=True)
