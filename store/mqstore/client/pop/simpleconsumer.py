"""Simple consumer: receives messages on request, each leased for a time (clients#simple).

    subscribe --> the first `receive`: a member of the group --> receive, receive, ... --> close
                                                                   |
                  nothing there: wait at all topics at once, look first at the one that calls

Queues have no owner. Any number of threads may share a consumer, and any number of consumers a group. It has no thread,
and no messages that it did not hand out. So a process may stop between two calls, and nothing is lost.

    newcomer             error
    a member that        consumes in another mode (GroupInUseError), subscribes otherwise (SubscriptionConflictError)
    `ordered` or not     unlike the group, which remembers it (ConfigError)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from mqstore.client.group.groupsettings import check_order, enter_group, order_of, wanted
from mqstore.client.group.membership import client_id_of
from mqstore.client.interceptors import Interceptor, Interceptors, Settled
from mqstore.client.limitedlog import LimitedLog
from mqstore.client.pop.delivery import Delivery, LeaseContext, visibility_seconds
from mqstore.client.pop.popsource import PopSource
from mqstore.client.waits import Wait
from mqstore.closing import Closing
from mqstore.contract import BrokerContract, RetryPolicy, Start
from mqstore.contract import Delivery as Popped
from mqstore.errors import ConfigError, MQStoreError, StoreClosedError
from mqstore.log.commitlog import QueueRef
from mqstore.logger import log as _log
from mqstore.options import Duration, check_whole, seconds
from mqstore.signalsafe import Lock


@dataclass(frozen=True, slots=True)
class PendingInfo:
    """Message of the group that a consumer has received and not settled.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     with store.simple_consumer("mailer", {"mail": "*"}) as consumer:
    ...         _ = store.put("mail", b"hello", unique_key="m-1")
    ...         [delivery] = consumer.receive(wait=10)
    ...         before = [(each.unique_key, each.attempt) for each in consumer.pending()]
    ...         delivery.ack()
    ...         before, consumer.pending()
    ([('m-1', 1)], [])
    """

    unique_key: str
    queue: QueueRef
    """Queue in which it is stored. After a redelivery it can be the group's retry topic."""
    offset: int
    attempt: int | None
    """Number of this delivery, from 1. None for a message delivered in order, if it is not known."""
    expires: datetime
    """Time of its redelivery unless it is settled."""


class SimpleConsumer(Closing):
    """Receives messages of a group, each hidden from others for `visibility` seconds. Thread-safe.

        topics       topic -> tags ("*": all), as by `subscribe`; then the group is joined here, not at first `receive`
        visibility   0.1 s to 12 h, unless `receive` is given another
        start        where the group begins in a new topic: "earliest", "latest", an aware datetime, or None for the
                     group's setting
        ordered      nothing after an unsettled message of its queue is received. A property of the group: set when it
                     is created, the same for all afterwards; None: the group's
        retry        when failed messages are redelivered, and after how many attempts they are dead letters; None: the
                     group's. A policy given here replaces the group's when the consumer joins, but must equal that of
                     other members
        client_id    name of this consumer in the group; None: a new one

    A new group is created with the options given here. Raises ConfigError for bad options, and GroupInUseError if the
    group is consumed in another mode.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     with SimpleConsumer(store.broker, "mailer") as consumer:
    ...         consumer.subscribe("mail", tags="urgent")
    ...         _ = store.put("mail", b"now", tag="urgent")
    ...         for delivery in consumer.receive(16, wait=0):
    ...             with delivery as message:
    ...                 print(message.text())
    now
    """

    def __init__(
        self,
        broker: BrokerContract,
        group: str,
        topics: Mapping[str, str] | None = None,
        *,
        visibility: Duration = 60,
        start: Start | None = None,
        ordered: bool | None = None,
        retry: RetryPolicy | None = None,
        client_id: str | None = None,
        interceptors: Sequence[Interceptor] = (),
    ) -> None:
        self.group = group
        self.ordered = order_of(broker, group, ordered)
        self.client_id = client_id_of(client_id)
        """Name of this consumer in its group."""
        self._broker = broker
        self._visibility_s = visibility_seconds(visibility)
        self._clock = broker.clock
        self._log = LimitedLog(f"group {group}", self._clock)
        self._hooks = Interceptors(interceptors, self._log)
        self._changing = Lock()
        told = self._settled if self._hooks.on_settle else None
        self._context = LeaseContext(broker, group, None, told, self._log, self._visibility_s)
        if topics is not None and not isinstance(topics, Mapping):
            raise ConfigError(f"topics is a mapping of names to tags, {{'orders': '*'}}, not {topics!r:.80}")
        subscriptions = {topic: wanted(broker, topic, tags) for topic, tags in (topics or {}).items()}
        self._source = PopSource(
            broker,
            group,
            self.client_id,
            ordered=self.ordered,
            start=start,
            retry=retry,
            on_loss=self._hooks.loss_teller(),
        )
        try:
            self._source.check(subscriptions or None)
            check_order(enter_group(broker, group, ordered=self.ordered, start=start, retry=retry), self.ordered)
            if subscriptions:
                self._source.change(subscriptions, join=True)
        except BaseException:
            self._source.leave()
            raise

    # -- subscriptions ----------------------------------------------------------------------------------------------

    def subscribe(self, topic: str, *, tags: str = "*", sql: str | None = None) -> None:
        """Receive from a topic, too. The topic may be created later.
        Messages with one of `tags` ("paid || refunded"; "*" for all), or for which the SQL92 expression over their
        properties holds, are received. The whole group skips the others. A topic that is already subscribed gets the
        new expression. Raises InvalidMessageError for a bad name, FilterError and NotPermittedError. After the first
        `receive`, raises GroupInUseError and SubscriptionConflictError, since members of a group subscribe alike. Then
        nothing has changed.
        """
        new = wanted(self._broker, topic, tags, sql)
        with self._changing:
            self._source.change({**self._source.wanted, topic: new})

    def unsubscribe(self, topic: str) -> None:
        """Stop receiving from a topic. Received messages may still be settled. Raises as `subscribe` does."""
        with self._changing:
            self._source.change({name: each for name, each in self._source.wanted.items() if name != topic})

    @property
    def subscriptions(self) -> dict[str, str]:
        """Expressions over tags or properties, by topic."""
        return {topic: each.expression[1] for topic, each in self._source.wanted.items()}

    # -- receiving --------------------------------------------------------------------------------------------------

    def receive(
        self, max_messages: int = 1, *, wait: Duration = 20, visibility: Duration | None = None
    ) -> list[Delivery]:
        """Return up to `max_messages` messages, each leased for `visibility` seconds.
        None means the consumer's. It waits up to `wait` seconds for a first one, with math.inf for ever. It returns []
        if there is none, or the consumer is closed meanwhile. Raises ConfigError without a subscription,
        GroupInUseError, SubscriptionConflictError, StoreFullError, and StoreClosedError if this consumer or the store
        was closed before. Then nothing was received.
        """
        return self._receive(*self._asked(max_messages, visibility), seconds(wait, "wait"))

    def _asked(self, max_messages: int, visibility: Duration | None = None) -> tuple[int, float]:
        """Return count and seconds of a `receive` that begins now, for `mqstore.aio`, too."""
        check_whole("max_messages", max_messages, 1)
        visibility_s = self._visibility_s if visibility is None else visibility_seconds(visibility)
        self._source.check_open()
        return max_messages, visibility_s

    def _receive(self, count: int, visibility_s: float, wait_s: float) -> list[Delivery]:
        try:
            return self._looked_for(count, visibility_s, wait_s)
        except StoreClosedError:
            if not self._closed:
                raise
            return []  # a call that was on its way to a server when the store closed this consumer and the connection

    def _looked_for(self, count: int, visibility_s: float, wait_s: float) -> list[Delivery]:
        source, waits = self._source, self._source.waits
        end_s = time.monotonic() + wait_s
        ticket = waits.next_turn()
        while True:
            generation = waits.generation  # before the look, so that later changes end the wait
            topics = source.topics(ticket)
            if topics is None:
                return []
            begin_s = self._clock.monotonic_ms() / 1000
            found = source.look(topics, ticket, count, visibility_s)
            if found:
                deliveries = [Delivery(self._context, each, begin_s) for each in found]
                if not self._hooks.on_receive or (deliveries := self._filtered(found, deliveries)):
                    return deliveries
                ticket = None
                continue  # more may follow
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return []
            ticket = waits.wait(topics, left_s, generation)

    def _filtered(self, found: Sequence[Popped], deliveries: list[Delivery]) -> list[Delivery]:
        """Return the deliveries that the interceptors leave. The others are acknowledged."""
        left = {id(message) for message in self._hooks.receiving([each.message for each in deliveries])}
        for popped, each in zip(found, deliveries, strict=True):
            if id(each.message) not in left:
                try:
                    self._broker.ack(self.group, popped.topic, [popped.receipt])
                except MQStoreError as error:  # it is redelivered, and left out again
                    _log.warning("%r was left out by an interceptor, and could not be acknowledged: %s", each, error)
        return [each for each in deliveries if id(each.message) in left]

    def _settled(self, delivery: Delivery, outcome: Settled) -> None:
        took_s = self._clock.monotonic_ms() / 1000 - delivery._received_at
        self._hooks.notify(self._hooks.on_settle, delivery.message, outcome, took_s)

    def __iter__(self) -> Iterator[Delivery]:
        """Yield deliveries one at a time, waiting for ever, until the consumer is closed."""
        while not self._closed:
            yield from self._receive(1, self._visibility_s, math.inf)

    def _when_ready(self, callback: Callable[[], object]) -> Wait:
        """Call `callback()` once, under the rules of `Waits.add`, when another `receive(wait=0)` may find messages.
        It is also called when that may raise an error. Then receive, or call `cancel` of the result."""
        waits = self._source.waits
        generation = waits.generation
        topics = self._source.topics()
        return waits.add(topics or (), callback, generation if topics else -1, keep=True)

    # -- inspection -------------------------------------------------------------------------------------------------

    def pending(self) -> list[PendingInfo]:
        """Return the messages that members of the group hold unsettled, by topic, queue and offset."""
        found = []
        for each in self._broker.pending(self.group):
            read = self._broker.read(each.topic, each.queue_id, each.offset, 1).messages
            message = read[0] if read and read[0].offset == each.offset else None
            found.append(
                PendingInfo(
                    unique_key="" if message is None else message.unique_key,
                    queue=QueueRef(each.topic, each.queue_id),
                    offset=each.offset,
                    attempt=None if message is None or each.fifo else message.attempt,
                    expires=datetime.fromtimestamp(each.visible_at_ms / 1000, UTC),
                )
            )
        return found

    @property
    def _closed(self) -> bool:
        return self._source.closed

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop receiving and leave the group. A waiting `receive` returns []. Repeating it is harmless.
        Received messages may still be settled, and are redelivered otherwise."""
        if not self._changing.is_inherited:
            self._source.leave()
            self._log.close()

    def __repr__(self) -> str:
        topics = ", ".join(sorted(self._source.wanted)) or "nothing"
        return f"<SimpleConsumer {self.client_id} of {self.group!r} for {topics}{', closed' if self._closed else ''}>"
