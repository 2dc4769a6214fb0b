"""A consumer that takes messages when it wants some, each for a while (clients#simple).

    subscribe --> the first `receive`: a member of the group --> receive, receive, ... --> close
                                                                   |
                  nothing there: wait at all topics at once, look first at the one that calls

No queue is anybody's: any number of threads may share a consumer, and any number of consumers a group. It has no thread
and no message that it did not hand out, so a process that stops between two calls leaves nothing behind.

    who comes             is refused
    a member that         consumes in another mode: GroupInUseError; subscribes otherwise: SubscriptionConflictError
    `ordered` or not      other than the group is, which remembers it: ConfigError
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypedDict

from mqstore.broker.broker import Broker, Start
from mqstore.broker.groups import RetryPolicy
from mqstore.client.delivery import Delivery, Lender, loan_seconds
from mqstore.client.groupsettings import check_order, enter_group, order_of
from mqstore.client.interceptors import Interceptor, Interceptors, Settled
from mqstore.client.limitedlog import LimitedLog
from mqstore.client.membership import client_id_of
from mqstore.client.popsource import PopSource
from mqstore.client.waits import Wait
from mqstore.client.wanted import wanted
from mqstore.closing import Closing
from mqstore.errors import ConfigError, MQStoreError
from mqstore.log.commitlog import QueueRef
from mqstore.options import Duration, check_whole, seconds

__all__ = ["PendingInfo", "SimpleConsumer", "SimpleConsumerOptions"]

_log = logging.getLogger("mqstore")


@dataclass(frozen=True, slots=True)
class PendingInfo:
    """A message of the group that somebody has received and not settled.

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
    """Where it lies; of one that came again that is the group's retry topic."""
    offset: int
    attempt: int | None
    """Which delivery this is, from 1; None: of one delivered in order that is not known from outside."""
    expires: datetime
    """When it comes again unless it is settled."""


class SimpleConsumerOptions(TypedDict, total=False):
    """Options of a `SimpleConsumer`, which has their meanings and defaults."""

    visibility: Duration
    start: Start | None
    ordered: bool | None
    retry: RetryPolicy | None
    client_id: str | None
    interceptors: Sequence[Interceptor]


class SimpleConsumer(Closing):
    """Receives messages of a group, each invisible to the others for `visibility` seconds. Thread-safe.

        topics       topic -> tags ("*": all), as by `subscribe`; then the group is joined here, not at first `receive`
        visibility   0.1 s to 12 h, unless `receive` is given another
        start        where the group begins in a topic in which it never was: "earliest", "latest", an aware datetime;
                     None: as the group has it
        ordered      nothing behind an unsettled message of its queue is received. A property of the group: set when it
                     comes into being, the same for all afterwards; None: as the group has it
        retry        when failed messages come again, and after how many attempts they are dead letters; None: as the
                     group has it. Given, it replaces the group's when the consumer joins; beside other members it must
                     be the one in force
        client_id    by which the group knows this consumer; None: one of its own

    A group that is not there is created with what is given here. Raises ConfigError for what cannot be,
    GroupInUseError when the group is consumed in another mode.

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
        broker: Broker,
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
        """By which the group knows this consumer."""
        self._broker = broker
        self._loan_s = loan_seconds(visibility)
        self._clock = broker.store.clock
        self._log = LimitedLog(f"group {group}", self._clock)
        self._hooks = Interceptors(interceptors, self._log)
        self._changing = threading.Lock()
        self._lender = Lender(broker, group, self._log, self._settled if self._hooks.on_settle else None)
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

    # -- what is received -------------------------------------------------------------------------------------------

    def subscribe(self, topic: str, *, tags: str = "*", sql: str | None = None) -> None:
        """Receive from a topic, too: messages with one of `tags` ("paid || refunded"; "*": all), or those for which the
        SQL92 expression over their properties holds. Others are passed over, for the whole group. Subscribed to
        already: by this expression from now on. A topic that is not there yet is waited for.

        InvalidMessageError for a bad name, FilterError, NotPermittedError; once messages were received, GroupInUseError
        and SubscriptionConflictError: members of a group subscribe alike. Then nothing has changed.
        """
        new = wanted(self._broker, topic, tags, sql)
        with self._changing:
            self._source.change({**self._source.wanted, topic: new})

    def unsubscribe(self, topic: str) -> None:
        """Receive no more from a topic. What was received of it may still be settled. Errors as `subscribe`."""
        with self._changing:
            self._source.change({name: each for name, each in self._source.wanted.items() if name != topic})

    @property
    def subscriptions(self) -> dict[str, str]:
        """Topic -> its expression over tags or properties."""
        return {topic: each.expression[1] for topic, each in self._source.wanted.items()}

    # -- receiving --------------------------------------------------------------------------------------------------

    def receive(
        self, max_messages: int = 1, *, wait: Duration = 20, visibility: Duration | None = None
    ) -> list[Delivery]:
        """Up to `max_messages`, each on loan for `visibility` seconds (None: the consumer's). Waits up to `wait`
        seconds (0: not at all; math.inf) for a first one; [] when there is none, or the consumer is closed meanwhile.

        Raises ConfigError without a subscription, GroupInUseError, SubscriptionConflictError, StoreClosedError when
        this consumer or the store was closed before, StoreFullError. When it raises nothing was received.
        """
        check_whole("max_messages", max_messages, 1)
        loan_s = self._loan_s if visibility is None else loan_seconds(visibility)
        wait_s = seconds(wait, "wait")
        self._source.check_open()
        return self._receive(max_messages, wait_s, loan_s)

    def _receive(self, count: int, wait_s: float, loan_s: float) -> list[Delivery]:
        source, waits = self._source, self._source.waits
        end_s = time.monotonic() + wait_s
        turn = waits.next_turn()
        while True:
            rings = waits.rings  # before the look: what changes later ends the wait
            topics = source.topics(turn)
            if topics is None:
                return []
            begin_s = self._clock.monotonic_ms() / 1000
            found = source.look(topics, turn, count, loan_s)
            if found:
                deliveries = [Delivery(self._lender, each, begin_s, begin_s + loan_s) for each in found]
                if not self._hooks.on_receive or (deliveries := self._filtered(deliveries)):
                    return deliveries
                turn = None
                continue  # there may be more behind them
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return []
            turn = waits.wait(topics, left_s, rings)

    def _filtered(self, deliveries: list[Delivery]) -> list[Delivery]:
        """Those that the interceptors leave; the others are done."""
        left = {id(message) for message in self._hooks.receiving([each.message for each in deliveries])}
        for each in deliveries:
            if id(each.message) not in left:
                try:
                    self._broker.ack(self.group, each._delivery.topic, [each.receipt])
                except MQStoreError as error:  # it comes again, and is left out again
                    _log.warning("%r was left out by an interceptor, and could not be acknowledged: %s", each, error)
        return [each for each in deliveries if id(each.message) in left]

    def _settled(self, delivery: Delivery, outcome: Settled) -> None:
        took_s = self._clock.monotonic_ms() / 1000 - delivery.received_at
        self._hooks.tell(self._hooks.on_settle, delivery.message, outcome, took_s)

    def __iter__(self) -> Iterator[Delivery]:
        """Deliveries one at a time, waiting for ever, until the consumer is closed."""
        while not self._source.closed:
            yield from self._receive(1, math.inf, self._loan_s)

    def when_ready(self, callback: Callable[[], object]) -> Wait:
        """Have `callback()` called once, when another `receive(wait=0)` may find something, or say why it never will:
        for who waits without a thread, such as an event loop.

        It is called in the middle of somebody's `put`, by the store's own thread, by who subscribes or closes, or right
        here. So it hands on the news (`loop.call_soon_threadsafe`) and returns; it must not use the store. Who was
        called either receives or calls `cancel` on what is returned, for the broker calls one for each message. Look
        first, then register, then look again only when called: what comes in between calls. Errors as `receive`.
        """
        waits = self._source.waits
        rings = waits.rings
        topics = self._source.topics()
        return waits.add(topics or (), callback, rings if topics else -1, keep=True)

    # -- looking at it ----------------------------------------------------------------------------------------------

    def pending(self) -> list[PendingInfo]:
        """What members of the group have received and not settled, by topic, queue and offset."""
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
    def closed(self) -> bool:
        """Whether it receives no more."""
        return self._source.closed

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Receive nothing more, and leave the group; who waits in `receive` gets []. What was received may still be
        settled, and comes again if it is not. Again is harmless."""
        self._source.leave()
        self._log.close()

    def __repr__(self) -> str:
        topics = ", ".join(sorted(self._source.wanted)) or "nothing"
        return f"<SimpleConsumer {self.client_id} of {self.group!r} for {topics}{', closed' if self.closed else ''}>"
