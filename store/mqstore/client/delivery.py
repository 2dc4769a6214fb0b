"""A message on loan, as the application holds it (clients#renewal).

    verb                 by `with`, at its end            then
    ack                  a clean one                      done
    nack(delay)          Retry(delay); it goes no farther comes again after `delay`, None: as the retry policy says.
                                                          Of more than 12 h the verb is ConfigError, Retry is 12 h
    nack()               another Exception, which passes  comes again, as the retry policy says
    reject(reason)       Reject(reason); no farther       a dead letter
    (release)            Ctrl-C, SystemExit, which pass   comes again at once, as if nobody had had it
    extend(visibility)                                    on loan for so long from now
    none                                                  comes again when the loan is over

Settled once, it stays so: the same verb again does nothing, another one is ReceiptExpiredError. Within a process a verb
can fail for a while only because the disk is full (StoreFullError). Then nothing has changed, and the caller, who is
there, decides: the same verb again once there is room, or nothing, and the message comes again. No verb waits or
retries by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal

from mqstore.broker.broker import Broker
from mqstore.broker.names import is_retry_topic
from mqstore.broker.pop import service as pop
from mqstore.client.interceptors import Settled
from mqstore.client.limitedlog import LimitedLog
from mqstore.client.outcome import Reject, Retry, retry_delay, shortened
from mqstore.client.shown import shown
from mqstore.errors import ConfigError, MQStoreError, ReceiptExpiredError
from mqstore.layout.properties import RETRY_TOPIC
from mqstore.log.message import Message
from mqstore.options import Duration, seconds

__all__ = ["Delivery", "Lender", "Loan", "as_delivered", "fail", "loan_seconds"]

_log = logging.getLogger("mqstore")

_LONGEST_S = 12 * 3600
"""Of a loan, and before what failed comes again."""

Verb = Literal["ack", "nack", "reject", "release"]


class Lender:
    """What loans know of where they come from."""

    __slots__ = ("broker", "group", "log", "monotonic_ms", "told")

    def __init__(
        self, broker: Broker, group: str, log: LimitedLog, told: Callable[[Any, Settled], None] | None = None
    ) -> None:
        """`told` hears of each loan that was settled. Whose `log` it is closes it."""
        self.broker = broker
        self.group = group
        self.log = log
        self.monotonic_ms = broker.store.clock.monotonic_ms
        self.told = told


class Loan:
    """A delivery, and what may be done with it. Any thread may; who settles it first has settled it."""

    __slots__ = ("_delivery", "_lender", "_message", "_verb", "expires_at")

    def __init__(self, lender: Lender, delivery: pop.Delivery, expires_at: float) -> None:
        self._lender = lender
        self._delivery = delivery
        self._message: Message | None = None
        self._verb: Verb | None = None
        self.expires_at = expires_at
        """When it is given to others unless it is settled, on the scale of `time.monotonic` (of the store's clock)."""

    @property
    def message(self) -> Message:
        """The message under the topic it was sent to, with its `attempt`. Its `queue` is where it lies: of one that
        comes again that may be the group's retry topic."""
        message = self._message
        if message is None:
            message = self._message = as_delivered(self._delivery)
        return message

    @property
    def attempt(self) -> int:
        """Which delivery of its message this is, from 1."""
        return self._delivery.attempt

    @property
    def settled(self) -> bool:
        """Whether it was acknowledged, given back or rejected by way of this object."""
        return self._verb is not None

    def ack(self) -> None:
        """Done. Again is harmless; ReceiptExpiredError when the message was given to others already."""
        if self._verb is None:
            lender, delivery = self._lender, self._delivery
            lender.broker.ack(lender.group, delivery.topic, [delivery.receipt])
            self._verb = "ack"
            if lender.told is not None:
                lender.told(self, "ack")
        elif self._verb != "ack":
            self._refuse()

    def ack_at_once(self) -> bool:
        """Acknowledge, if that takes no wait for a lock or the disk. Return False if nothing was done: call `ack`."""
        lender, delivery = self._lender, self._delivery
        if self._verb is not None:
            return False
        if not lender.broker.ack_at_once(lender.group, delivery.topic, [delivery.receipt]):
            return False
        self._note("ack", "ack")
        return True

    def nack(self, delay: Duration | None = None) -> None:
        """Failed: it comes again in `delay` seconds (at most 12 h), None: as the retry policy says; after the last
        attempt it is a dead letter. ReceiptExpiredError as `ack`, ConfigError for the delay."""
        if self._is_new("nack"):
            if delay is not None:
                _bounded("delay", delay)
            lender, delivery = self._lender, self._delivery
            receipt = lender.broker.nack(lender.group, delivery.topic, delivery.receipt, delay)
            self._note("nack", "dlq" if receipt is None else "retry")

    def extend(self, visibility: Duration) -> None:
        """Keep it for `visibility` seconds (at most 12 h) from now, be that longer or shorter. ReceiptExpiredError as
        `ack`, and when it was settled; ConfigError for the seconds."""
        if self._verb is not None:
            self._refuse()
        lender, delivery = self._lender, self._delivery
        expires_at = lender.monotonic_ms() / 1000 + _bounded("visibility", visibility)
        # Renewed, not changed: the receipt stays good, so an `ack` of another thread that comes just now counts.
        lender.broker.renew(lender.group, delivery.topic, delivery.receipt, visibility)
        self.expires_at = expires_at

    def reject(self, reason: str = "") -> None:
        """Straight to the dead letters, with the reason. ReceiptExpiredError as `ack`."""
        if self._is_new("reject"):
            lender, delivery = self._lender, self._delivery
            lender.broker.dead_letter(lender.group, delivery.topic, delivery.receipt, reason or "rejected")
            self._note("reject", "dlq")

    def _release(self) -> None:
        if self._verb is None:
            lender, delivery = self._lender, self._delivery
            lender.broker.release(lender.group, delivery.topic, [delivery.receipt])
            self._verb = "release"

    def _is_new(self, verb: Verb) -> bool:
        if self._verb is not None and self._verb != verb:
            self._refuse()
        return self._verb is None

    def _refuse(self) -> None:
        raise ReceiptExpiredError(f"{self!r} was settled before, by {self._verb}; nothing was changed")

    def _note(self, verb: Verb, outcome: Settled) -> None:
        self._verb = verb
        if self._lender.told is not None:
            self._lender.told(self, outcome)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            if self._verb is None:
                self.ack()
            return False
        # What was asked for is done, or its failure raised.
        if isinstance(error, Retry):
            lender = self._lender
            # Here and not in `nack`, whose caller is there to be told that he asks for too much.
            self.nack(shortened(retry_delay(error), _LONGEST_S, lender.log, self.message))
            return True
        if isinstance(error, Reject):
            self.reject(error.reason)
            return True
        try:
            if not isinstance(error, Exception):  # Ctrl-C and the like: that is no failure of the message
                self._release()
            elif self._verb is None:
                lender = self._lender
                self._note(
                    "nack", fail(lender.broker, lender.group, self._delivery, f"{type(error).__name__}: {error}")
                )
        except MQStoreError as late:  # the caller is to see what happened first
            _log.warning("%r could not be given back: %s", self, late)
        return False

    def __repr__(self) -> str:
        delivery = self._delivery
        where = f"{delivery.topic}/{delivery.queue_id}, offset {delivery.message.offset}, attempt {delivery.attempt}"
        return f"<{type(self).__name__} of {where}{f', {self._verb}' if self._verb else ''}>"


class Delivery(Loan):
    """A message that `SimpleConsumer.receive` gave. `with delivery as message:` acknowledges it at a clean end, gives
    it back at an exception, and does as `Retry` and `Reject` say, which go no farther.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     receipt = store.put("mail", b"hello")
    ...     consumer = store.simple_consumer("mailer", {"mail": "*"})
    ...     [delivery] = consumer.receive(wait=0)
    ...     with delivery as message:
    ...         message.body, message.attempt, delivery.settled
    ...     delivery.settled
    (b'hello', 1, False)
    True
    """

    __slots__ = ("received_at",)

    def __init__(self, lender: Lender, delivery: pop.Delivery, received_at: float, expires_at: float) -> None:
        super().__init__(lender, delivery, expires_at)
        self.received_at = received_at
        """When it was received, on the scale of `expires_at`."""

    @property
    def receipt(self) -> str:
        """What settles it, by `Broker.ack` and so on: for whoever carries it elsewhere."""
        return self._delivery.receipt

    def __enter__(self) -> Message:
        return self.message


def as_delivered(delivery: pop.Delivery) -> Message:
    """The message as a handler is to see it: one from a retry topic under the topic it was sent to, one delivered in
    order with the attempts that were counted for it."""
    message, _, _, topic, _, redeliveries = delivery
    if is_retry_topic(topic):
        topic = message.stored_property(RETRY_TOPIC) or topic
    return shown(message, topic, redeliveries)


def fail(broker: Broker, group: str, delivery: pop.Delivery, reason: str, delay: Duration | None = None) -> Settled:
    """Give a delivery back as failed, or, if that was the last attempt, to the dead letters with the reason."""
    limit = broker.groups.need(group).max_attempts
    if limit is not None and delivery.attempt >= limit:
        broker.dead_letter(group, delivery.topic, delivery.receipt, reason)
        return "dlq"
    again = broker.nack(group, delivery.topic, delivery.receipt, delay, error=reason)
    return "dlq" if again is None else "retry"


def loan_seconds(visibility: Duration) -> float:
    """How long a loan is to be; ConfigError unless that lies in 0.1 s to 12 h."""
    value = visibility if type(visibility) is int else seconds(visibility, "visibility")
    if not 0.1 <= value <= _LONGEST_S:
        raise ConfigError(f"visibility is {visibility!r}; give 0.1 seconds to 12 hours")
    return value


def _bounded(name: str, given: Duration) -> float:
    """Seconds from now. The broker refuses them too, in milliseconds and not by the name that the caller knows."""
    value = seconds(given, name)
    if value > _LONGEST_S:
        raise ConfigError(f"{name} is {given!r}; give 12 hours at most, 43200")
    return value
