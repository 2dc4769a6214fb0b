# ruff: noqa: A002  (`filter` is the word of the engine contract, clients#contract)
"""Deliveries by receipt, and failed messages, in a cluster (remoting-server, sections 9 and 13.5).

    pop     each broker of the topic in turn, until there is enough     POP_MESSAGE, in a JSON header
    wait    a question to each of them                                  NOTIFICATION, which takes no message
    ack     to the broker in the receipt                                ACK_MESSAGE
    renew, nack, release                                                CHANGE_INVISIBLETIME, which makes a new receipt

A broker accepts any receipt, and says nothing. So this process keeps when each delivery ends, its attempt, and its
newest receipt. A receipt of another process has its times in it.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final

from mqstore.broker.pop.batch import claim_of, expired
from mqstore.broker.reads.filters.filter import as_filter
from mqstore.broker.reads.waiting import Callback, Waiter
from mqstore.broker.redelivery.reason import Reason, set_reason
from mqstore.broker.redelivery.retry import failed_properties, origin_topic
from mqstore.broker.tables.names import dlq_topic, pop_retry_topic, retry_topic
from mqstore.contract import MAX_BATCH, Delivery, Filter, Loss, Pending
from mqstore.errors import ConfigError, ConnectionLostError
from mqstore.layout.properties import (
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    DLQ_REASON,
    FIRST_POP_TIME,
    ORIGIN_MESSAGE_ID,
    POP_CK,
    RETRY_TOPIC,
)
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.log.message import Message
from mqstore.options import DEFAULT_DELAY_LEVELS, Duration, delay_table_ms, milliseconds
from mqstore.remote.cluster.degrade import refuse
from mqstore.remote.cluster.links import Fields, named
from mqstore.remote.cluster.reads import PULLED, Reads, pull_fields
from mqstore.remote.cluster.records import KEPT_FLAGS, STORED, expression_of, message_at, records, send_fields
from mqstore.remoting.codes import Code
from mqstore.remoting.frames import Frame
from mqstore.signalsafe import Bell

_POPPED: Final = (0, 19, 20, 209, 210)
_LOOK_MS: Final = 5_000
"""Longest question to a broker: a redelivery that it does not report is found then."""
_AT_ONCE_S, _PAUSE_S = 0.03, 0.1
"""A question that is answered at once may be about messages that no pop gets now, so the callback is a little later."""
_RELEASE_MS: Final = 1_000
_LEASES_MAX: Final = 100_000
_POP_OPTIONS: Final[dict[str, Any]] = {
    "queue_id": -1, "filter": None, "order": False, "start": None, "attempt_id": None, "acks": ()
}  # fmt: skip


@dataclass(slots=True)
class _Lease:
    """Delivery of this process that is not settled."""

    receipt: str
    """Newest receipt."""
    ends_ms: int
    """Time by the monotonic clock."""
    attempt: int
    is_acked: bool = False


class Pops(Reads):
    """Deliveries and failures of a `ClusterBroker`. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = count(time.monotonic_ns())
        self._leases: dict[str, _Lease] = {}

    # -- pop --------------------------------------------------------------------------------------------------------

    def pop(
        self, group: str, topic: str, n: int = 1, *, invisible: Duration = 60, poll: Duration = 0, **options: Any
    ) -> list[Delivery]:
        """Deliver messages (`BrokerContract.pop`). `local`, `durability` and `skip_acked` have no effect."""
        unknown = options.keys() - _POP_OPTIONS.keys() - {"local", "durability", "skip_acked"}
        if unknown:  # one that is not known here must not be ignored
            raise TypeError(f"a pop from a cluster has no {', '.join(sorted(unknown))}")
        if not 1 <= n <= MAX_BATCH:
            raise ConfigError(f"n must be 1 to {MAX_BATCH}, got {n}")
        options = _POP_OPTIONS | options
        options["filter"] = as_filter(options["filter"])
        if options["acks"]:
            self.ack(group, topic, options["acks"])
        invisible_ms = milliseconds(invisible, "invisible")
        end_ms = self.clock.monotonic_ms() + milliseconds(poll, "poll")
        while not (found := self._pop(group, topic, n, invisible_ms, options)):
            left_ms = end_ms - self.clock.monotonic_ms()
            if left_ms <= 0:
                break
            bell = Bell()
            wanted = {name: options[name] for name in ("queue_id", "filter", "order")}
            waiter = self.add_pop_waiter(group, topic, partial(_ring, bell), timeout=left_ms / 1000, **wanted)
            bell.wait(left_ms / 1000)
            self.remove_waiter(waiter)
        return found

    def _pop(self, group: str, topic: str, n: int, invisible_ms: int, options: dict[str, Any]) -> list[Delivery]:
        """Pop once, from the brokers in turn."""
        known = self.groups.get(group)
        begin = options["start"] or (known.start if known is not None else "earliest")
        chosen, attempt_id = options["filter"], options["attempt_id"]
        found: list[Delivery] = []
        lost: ConnectionLostError | None = None
        asked = self._popped(topic, options["queue_id"])
        for broker, its_queue in asked:
            fields = named(
                "consumerGroup topic queueId maxMsgNums invisibleTime pollTime bornTime initMode expType exp order "
                "attemptId",
                *(group, topic, its_queue, n - len(found), invisible_ms, 0, self.clock.now_ms()),
                *(int(begin == "latest"), *expression_of(chosen), options["order"], attempt_id),
            )
            try:
                # Not repeated: the messages of a lost answer come again when their time is over.
                answer = self._links.call(broker, Code.POP_MESSAGE, fields, ok=_POPPED, repeat=attempt_id is not None)
            except ConnectionLostError as error:
                lost = error
                continue
            if answer.code == 0:
                found += self._deliveries(answer, group, topic, broker, invisible_ms, chosen)
            if len(found) >= n:
                break
        if lost is not None and not found and len(asked) == 1:
            raise lost
        return found

    def _popped(self, topic: str, queue_id: int) -> list[tuple[str, int]]:
        """Return the brokers to ask, each with its queue, or -1 for all its queues."""
        if queue_id >= 0:
            return [self._links.place(topic, queue_id)[:2]]
        brokers = self.topics.require(topic).brokers
        brokers = [broker for broker in brokers if not self._links.is_out(broker)] or brokers
        turn = next(self._turn) % max(1, len(brokers))
        return [(broker, -1) for broker in brokers[turn:] + brokers[:turn]]

    def _deliveries(
        self, answer: Frame, group: str, topic: str, broker: str, invisible_ms: int, filter: Filter | None
    ) -> list[Delivery]:
        fields = answer.fields
        starts = {(mark, queue): start for mark, queue, start in _parts(fields.get("startOffsetInfo"))}
        counts = {key: int(times) for _, key, times in _parts(fields.get("orderCountInfo"))}
        visible_at_ms, ends_ms = self.clock.now_ms() + invisible_ms, self.clock.monotonic_ms() + invisible_ms
        found = []
        for at, its_topic, its_queue, offset in records(answer.body):
            message = message_at(answer.body, at, QueueRef(topic, self._links.number(topic, broker, its_queue)), offset)
            properties = message.stored_properties()
            # A retry is sent with the topic of the request, and its receipt as a property.
            if (receipt := properties.get(POP_CK)) is None:
                mark = "0" if its_topic == topic else "1" if its_topic == pop_retry_topic(group, topic, 1) else "2"
                start = starts.get((mark, str(its_queue)), str(offset))
                times = " ".join(fields[name] for name in ("popTime", "invisibleTime", "reviveQid"))
                receipt = f"{start} {times} {mark} {broker} {its_queue} {offset}"
            redeliveries = counts.get(f"qo{its_queue}%{offset}", 0) if fields["reviveQid"] == "999" else None
            delivery = Delivery(message, receipt, visible_at_ms, topic, message.queue_id, redeliveries)
            while len(self._leases) >= _LEASES_MAX:  # the oldest one's receipt has its times
                self._leases.pop(next(iter(self._leases)), None)
            self._leases[receipt] = _Lease(receipt, ends_ms, delivery.attempt)
            if filter is not None and filter.kind == "TAG" and not filter.matches(properties):
                self._settle(group, topic, [receipt])  # its tag only has the hash of a wanted one
            else:
                found.append(delivery)
        return found

    def add_pop_waiter(
        self, group: str, topic: str, callback: Callback, *, queue_id: int = -1, order: bool = False, **asked: Any
    ) -> Waiter:
        """Park a waiter (`BrokerContract.add_pop_waiter`). `asked` is some of filter and timeout."""
        waiter = self._waiter(None, callback, asked.get("timeout"))
        chosen = expression_of(as_filter(asked.get("filter")))
        asked_s: dict[str, float] = {}
        for broker, its_queue in self._popped(topic, queue_id):

            def request(hold_ms: int, broker: str = broker, its_queue: int = its_queue) -> tuple[str, int, Fields]:
                asked_s[broker] = time.monotonic()
                names = "consumerGroup topic queueId pollTime bornTime order expType exp"
                values = group, topic, its_queue, min(hold_ms, _LOOK_MS), self.clock.now_ms(), order, *chosen
                return broker, Code.NOTIFICATION, named(names, *values)

            def took(answer: Frame, broker: str = broker) -> float | None:
                if answer.code == 0 and answer.fields.get("hasMsg") != "true":
                    return None
                return _PAUSE_S if time.monotonic() - asked_s[broker] < _AT_ONCE_S else 0

            self._park(waiter, request, took)
        return waiter

    # -- settling ---------------------------------------------------------------------------------------------------

    def ack(self, group: str, topic: str, receipts: Sequence[str], *, durability: object = None) -> None:
        late = [receipt for receipt in receipts if not self._is_live(receipt)]
        self._settle(group, topic, [receipt for receipt in receipts if receipt not in late])
        if late:
            raise expired(late)

    def _settle(self, group: str, topic: str, receipts: Sequence[str]) -> None:
        """Acknowledge live receipts, all at once."""
        leases = [self._lease(receipt) for receipt in receipts]
        for lease in leases:
            lease.is_acked = True
        self._acknowledge(group, topic, [lease.receipt for lease in leases])
        for receipt in receipts:
            self._leases.pop(receipt, None)

    def _acknowledge(self, group: str, topic: str, newest: Sequence[str]) -> None:
        code = Code.ACK_MESSAGE
        self._links.call_many([(each.split(" ")[5], code, self._fields(group, topic, each)) for each in newest])

    def renew(self, group: str, topic: str, receipt: str, invisible: Duration, **asked: object) -> str:
        """Extend a delivery (`BrokerContract.renew`). `asked` is some of progress and durability, without effect."""
        lease = self._leases.setdefault(receipt, self._lease(receipt))
        ends_ms = self.clock.monotonic_ms() + (invisible_ms := milliseconds(invisible, "invisible"))
        lease.receipt, lease.ends_ms = self._change(group, topic, receipt, invisible_ms), ends_ms
        if lease.is_acked:  # meanwhile, by the receipt that this call has made an old one, which brokers ignore
            self._acknowledge(group, topic, [lease.receipt])
        return receipt

    def _change(self, group: str, topic: str, receipt: str, invisible_ms: int) -> str:
        """Make a delivery end in this time. Return its new receipt. Raises ReceiptExpiredError."""
        self._check(receipt)
        newest = self._lease(receipt).receipt
        place = newest.split(" ")[4:8]  # mark, broker, queue id, offset
        fields = {**self._fields(group, topic, newest), "invisibleTime": invisible_ms}
        answer = self._links.call(place[1], Code.CHANGE_MESSAGE_INVISIBLETIME, fields).fields
        return " ".join((place[3], answer["popTime"], answer["invisibleTime"], answer["reviveQid"], *place))

    def _give_back(self, group: str, topic: str, receipt: str, delay_ms: int) -> str:
        """Settle a delivery as failed. Return its new receipt."""
        newest = self._change(group, topic, receipt, max(1, delay_ms))
        self._leases.pop(receipt, None)
        return newest

    def nack(
        self, group: str, topic: str, receipt: str, delay: Duration | None = None, *, error: str = "", **asked: object
    ) -> str | None:
        if delay is not None:
            return self._give_back(group, topic, receipt, milliseconds(delay, "delay"))
        config, attempt = self.groups.require(group), self._lease(receipt).attempt
        if config.max_attempts is not None and attempt >= config.max_attempts:
            self.dead_letter(group, topic, receipt, error or f"attempt {attempt} failed")
            return None
        return self._give_back(group, topic, receipt, config.delay_ms(attempt))

    def release(
        self, group: str, topic: str, receipts: Sequence[str], *, delay: Duration = 0, durability: object = None
    ) -> None:
        for receipt in receipts:
            self._give_back(group, topic, receipt, max(_RELEASE_MS, milliseconds(delay, "delay")))

    def dead_letter(self, group: str, topic: str, receipt: str, reason: str, *, durability: object = None) -> None:
        self._check(receipt)
        lease = self._lease(receipt)
        broker, fields = lease.receipt.split(" ")[5], self._fields(group, topic, lease.receipt)
        offset = fields["offset"]
        pull = pull_fields(None, fields["topic"], fields["queueId"], offset, 1)
        answer = self._links.call(broker, Code.PULL_MESSAGE, pull, ok=PULLED)
        for message in self._links.messages(broker, answer.body):
            if message.offset == offset:  # otherwise it is gone
                self._bury(group, broker, message, topic, reason, lease.attempt, popped=True)
        self._settle(group, topic, [receipt])

    def _fields(self, group: str, topic: str, receipt: str) -> Fields:
        """Return the fields that name a delivery: those of where its message is stored."""
        claim = claim_of(receipt)
        stored = pop_retry_topic(group, topic, claim.mark) if claim.mark else topic
        names = "consumerGroup topic queueId offset extraInfo"
        return named(names, group, stored, claim.queue_id, claim.offset, receipt)

    def _lease(self, receipt: str) -> _Lease:
        """Return a delivery, of another process by the times in its receipt. Raises InvalidReceiptError."""
        if (lease := self._leases.get(receipt)) is not None:
            return lease
        ends_ms = claim_of(receipt).pop_time_ms + int(receipt.split(" ")[2])
        return _Lease(receipt, ends_ms - self.clock.now_ms() + self.clock.monotonic_ms(), 1)

    def _is_live(self, receipt: str) -> bool:
        return self.clock.monotonic_ms() < self._lease(receipt).ends_ms

    def _check(self, receipt: str) -> None:
        if not self._is_live(receipt):
            raise expired([receipt])

    def take_losses(self, group: str) -> tuple[Loss, ...]:
        return ()

    def pending(self, group: str) -> list[Pending]:
        refuse("listing deliveries in flight", "settle each delivery where it was received")

    # -- failures ---------------------------------------------------------------------------------------------------

    def release_all(self, group: str, topic: str, queue_id: int) -> None:
        pass  # a broker forgets the deliveries of a group by itself when their time is over

    def pop_retry_topics(self, group: str, topic: str) -> list[str]:
        return [pop_retry_topic(group, topic, version) for version in (1, 2)]

    def send_back(
        self, group: str, message: Message | SendReceipt | int, *, delay_level: int = 0, **asked: Any
    ) -> SendReceipt:
        """Redeliver or dead-letter a failed message (`BrokerContract.send_back`). `asked` is some of delay,
        max_reconsume, attempts and reason. A delay becomes the next level of the broker. The receipt has only the
        topic."""
        delay, max_reconsume, attempts, reason = map(asked.get, ("delay", "max_reconsume", "attempts", "reason"))
        if isinstance(message, int):
            raise ConfigError("a physical offset does not name a message of a cluster: pass the message")
        if isinstance(message, SendReceipt):
            message = self._links.record(self._links.place(*message.queue).broker, message.physical_offset)
        broker = self._links.place(*message.queue).broker
        config = self.groups.require(group)
        limit = config.retry_max_times if max_reconsume is None else max_reconsume
        times = message.reconsume_times + 1 if attempts is None else attempts
        topic = retry_topic(group)
        if delay_level < 0 or times > limit or config.retry_queues <= 0:
            why = reason or ("rejected by its consumer" if delay_level < 0 else f"attempt {times} failed")
            topic = self._bury(group, broker, message, origin_topic(message, group), why, times, popped=False)
        else:
            if not delay_level:
                by_policy_ms = config.retry_policy._next_delay_ms(times - 1)
                wait_ms = by_policy_ms if delay is None else milliseconds(delay, "delay")
                levels_ms = delay_table_ms(self._links.config(broker).get("messageDelayLevel") or DEFAULT_DELAY_LEVELS)
                delay_level = min(bisect_left(levels_ms, wait_ms), len(levels_ms) - 1) + 1
            names = "offset group delayLevel originMsgId originTopic unitMode maxReconsumeTimes"
            values = message.physical_offset, group, delay_level, message.message_id, message.queue.topic, False, limit
            self._links.call(broker, Code.CONSUMER_SEND_MSG_BACK, named(names, *values))
        if self.topics.get(topic) is None:
            self._links.forget(topic)  # it is there now
        return SendReceipt((QueueRef(topic, 0), -1, -1, 0, self.clock.now_ms(), bytes(8), message.unique_key))

    def _bury(
        self, group: str, broker: str, message: Message, origin: str, reason: str, attempts: int, *, popped: bool
    ) -> str:
        """Store a copy of a message as a dead letter, at its broker. Return the topic."""
        properties = failed_properties(message, group, origin)
        identity = properties[ORIGIN_MESSAGE_ID]
        properties |= {DLQ_ORIGIN_TOPIC: properties[RETRY_TOPIC], DLQ_ORIGIN_MESSAGE_ID: identity}
        if popped:
            first = message._stored_property(FIRST_POP_TIME)
            properties[FIRST_POP_TIME] = first or str(self.clock.now_ms())
        set_reason(properties, DLQ_REASON, Reason(reason))
        topic = dlq_topic(group)
        numbers = {"flag": message.flag, "sys_flag": message.sys_flag & KEPT_FLAGS, "reconsume_times": attempts}
        fields = send_fields(group, topic, broker, 0, properties, message.born_timestamp_ms, queues=1, **numbers)
        self._links.call(broker, Code.SEND_MESSAGE_V2, fields, bytes(message.body_view), ok=STORED)
        self._links.forget(topic)
        return topic


def _ring(bell: Bell, worth: bool) -> None:
    bell.ring()


def _parts(text: str | None) -> list[list[str]]:
    """Return the triples of a field of a pop's answer."""
    return [part.split(" ") for part in (text or "").split(";") if part]
