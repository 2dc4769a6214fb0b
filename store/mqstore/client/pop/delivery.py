"""Leased message, or item of a queue, as the application holds it (clients#renewal, clients#queue).

    verb                 by `with`, at its end            then
    ack                  a clean end                      done
    nack(delay)          Retry(delay), not re-raised      redelivered after `delay`, or by the retry policy for None.
                                                          Above 12 h the verb raises ConfigError, Retry uses 12 h
    nack()               another Exception, re-raised     redelivered by the retry policy
    reject(reason)       Reject(reason), not re-raised    a dead letter
    release(delay)       Ctrl-C, SystemExit, re-raised    redelivered after `delay`, as if nobody had received it
    extend(visibility)                                    leased for that time from now
    progress(text)                                        leased for the consumer's time from now
    none                                                  redelivered when the lease expires

The first verb settles a message. To repeat it does nothing, and another one raises ReceiptExpiredError. Within a
process a verb can fail for a while only because the disk is full (StoreFullError). Then nothing has changed. The caller
can repeat the verb once there is room, or do nothing, and the message is redelivered. No verb waits or retries by
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Self

from mqstore.broker.redelivery.retry import origin_topic
from mqstore.broker.tables.names import is_retry_topic, queue_name
from mqstore.client.interceptors import Settled
from mqstore.client.items.codecs import BYTES, Codec, T
from mqstore.client.limitedlog import LimitedLog
from mqstore.client.push.handlers import Reject, Retry, retry_delay, shortened
from mqstore.contract import BrokerContract
from mqstore.contract import Delivery as Popped
from mqstore.errors import ConfigError, MQStoreError, ReceiptExpiredError
from mqstore.layout.properties import RETRY_TOPIC
from mqstore.log.message import Message
from mqstore.logger import log as _log
from mqstore.native import kernel
from mqstore.options import Duration, seconds


class _Shown(Message):
    """Message as a handler sees it, with its original topic and all its attempts.
    `queue` and `offset` are where it is stored.

    source                             its record has                    it is shown with
    a copy from a retry topic          that topic; the right attempt      the topic it was sent to
    redelivered in order               its topic; attempt 1               the attempts that were counted elsewhere
    """

    __slots__ = ("_redeliveries", "_topic")

    def __init__(self, message: Message, topic: str, redeliveries: int) -> None:
        super().__init__(message._batch, message._start, message.offset)
        self._topic = topic
        self._redeliveries = redeliveries

    def __reduce__(self) -> tuple[Any, ...]:
        stored = Message(self._batch, self._start, self.offset)
        return _Shown, (stored, self._topic, self._redeliveries)

    @property
    def topic(self) -> str:
        """Topic it was sent to."""
        return self._topic

    @property
    def reconsume_times(self) -> int:
        """Number of earlier deliveries to the group."""
        return self._redeliveries


def shown(message: Message, topic: str, redeliveries: int | None = None) -> Message:
    """Return `message` with this topic and number of earlier deliveries. None means its record's number."""
    if message.topic == topic and (redeliveries is None or message.reconsume_times == redeliveries):
        return message
    return _Shown(message, topic, message.reconsume_times if redeliveries is None else redeliveries)


def as_sent(message: Message, group: str) -> Message:
    """Return `message`, from a retry topic of the group with the topic that it was sent to."""
    return shown(message, origin_topic(message, group))


_LONGEST_S = 12 * 3600
"""Longest lease, and longest delay before a failed message is redelivered."""
_PROGRESS_MAX = 200

Verb = Literal["ack", "nack", "reject", "release"]


class LeaseContext(NamedTuple):
    """State that the leases of a consumer share. Compiled code uses the first four members."""

    broker: BrokerContract
    group: str
    waiting: AbstractSet[object] | None
    """`told` need not be called while this set is empty. None: it is always called."""
    told: Callable[[Any, Settled], None] | None
    """Function to call for each lease that was settled."""
    log: LimitedLog
    """Its owner closes it."""
    visibility_s: float = 60
    """Time by which `progress` extends a lease."""
    codec: Codec[Any] = BYTES


class LeaseFields:
    """Base of `Lease`."""

    __slots__ = ("_context", "_delivery", "_expires_at", "_message", "_value", "_verb")

    _context: LeaseContext
    _delivery: Popped
    _message: Message | None
    _verb: Verb | None
    _expires_at: float | None
    _value: Any


if not TYPE_CHECKING and kernel is not None:
    LeaseFields = kernel.LeaseFields


class Lease(LeaseFields):
    """Delivery with the verbs that settle it. Thread-safe: the first verb settles it."""

    __slots__ = ()

    def __init__(self, context: LeaseContext, delivery: Popped) -> None:
        self._context = context
        self._delivery = delivery
        self._message = self._verb = self._expires_at = self._value = None

    if TYPE_CHECKING or kernel is None:

        @classmethod
        def _get_at_once(cls, context: LeaseContext, topic: str, invisible_ms: int, order: bool) -> Self | None:
            """Get a message by `pop_at_once`. None does not mean that there is none: then call `pop`."""
            found = context.broker.pop_at_once(context.group, topic, 1, invisible_ms, order)
            return cls(context, found[0]) if found else None

        def _ack_here(self) -> bool:
            """Acknowledge by `ack_at_once`. Return False if nothing was done: then call `ack` of the broker."""
            context, delivery = self._context, self._delivery
            if self._verb is not None:
                return False
            if not context.broker.ack_at_once(context.group, delivery.topic, [delivery.receipt]):
                return False
            self._note("ack", "ack")
            return True

        def _ack_at_once(self) -> bool:
            """Call `_ack_here` on an event loop, so without waiting for a lock: only compiled code can do that."""
            return False
    else:
        _ack_here = LeaseFields._ack_at_once

    @property
    def expires_at(self) -> float:
        """Time at which an unsettled message is redelivered to others, on the scale of `time.monotonic`.
        It is measured by the store's clock."""
        if self._expires_at is None:
            clock = self._context.broker.clock
            expires_at = (clock.monotonic_ms() + self._delivery.visible_at_ms - clock.now_ms()) / 1000
            if self._expires_at is None:  # else extended meanwhile
                self._expires_at = expires_at
        return self._expires_at

    @property
    def message(self) -> Message:
        """Message under the topic it was sent to, with its `attempt`.
        Its `queue` is where it is stored, which can be the group's retry topic."""
        message = self._message
        if message is None:
            message = self._message = as_delivered(self._delivery)
        return message

    @property
    def attempt(self) -> int:
        """Number of this delivery of its message, from 1."""
        return self._delivery.attempt

    @property
    def settled(self) -> bool:
        """True if it was acknowledged, released or rejected by this object."""
        return self._verb is not None

    def ack(self) -> None:
        """Acknowledge the message. Repeating it is harmless.
        Raises ReceiptExpiredError if the message has been delivered to others already."""
        if not self._ack_here() and self._is_new("ack"):
            context, delivery = self._context, self._delivery
            context.broker.ack(context.group, delivery.topic, [delivery.receipt])
            self._note("ack", "ack")

    def _is_poppable(self, context: LeaseContext, topic: str) -> bool:
        """Return True if a pop of this topic by this owner may acknowledge it (`BrokerContract.pop`)."""
        return self._verb is None and self._context is context and self._delivery.topic == topic

    def nack(self, delay: Duration | None = None) -> None:
        """Give a failed message back. It is redelivered in `delay` seconds, at most 12 h.
        With None the retry policy decides. After its last attempt the message is a dead letter. Raises
        ReceiptExpiredError as `ack` does, and ConfigError for a bad delay."""
        if self._is_new("nack"):
            if delay is not None:
                _bounded("delay", delay)
            context, delivery = self._context, self._delivery
            receipt = context.broker.nack(context.group, delivery.topic, delivery.receipt, delay)
            self._note("nack", "dlq" if receipt is None else "retry")

    def extend(self, visibility: Duration) -> None:
        """Make the lease end `visibility` seconds from now, at most 12 h, sooner or later than before.
        Raises ReceiptExpiredError as `ack` does and after settling, and ConfigError for bad seconds."""
        self._renew(_bounded("visibility", visibility))

    def progress(self, text: str) -> None:
        """Extend the lease by the visibility of its queue or consumer, and have `Queue.peek` show a text meanwhile.
        The text has at most 200 printable characters. It is kept in memory, and lost with the lease or the process of
        the store. Raises the errors of `extend`, and ConfigError for another text."""
        if type(text) is not str or len(text) > _PROGRESS_MAX or not text.isprintable():
            raise ConfigError(f"progress is a text of at most {_PROGRESS_MAX} printable characters, not {text!r:.80}")
        self._renew(self._context.visibility_s, text)

    def _renew(self, visibility_s: float, progress: str | None = None) -> None:
        if self._verb is not None:
            self._refuse()
        context, delivery = self._context, self._delivery
        expires_at = context.broker.clock.monotonic_ms() / 1000 + visibility_s
        # Renew without a new receipt, so that a simultaneous `ack` of another thread counts.
        context.broker.renew(context.group, delivery.topic, delivery.receipt, visibility_s, progress=progress)
        self._expires_at = expires_at

    def reject(self, reason: object = "") -> None:
        """Dead-letter the message with the reason, a text or an exception. Raises ReceiptExpiredError as `ack` does."""
        if self._is_new("reject"):
            context, delivery = self._context, self._delivery
            context.broker.dead_letter(context.group, delivery.topic, delivery.receipt, str(reason or "") or "rejected")
            self._note("reject", "dlq")

    def release(self, delay: Duration = 0) -> None:
        """Give the message back without a failed attempt. It is redelivered in `delay` seconds, at most 12 h.
        For work that must wait, or that a shutdown interrupts. Raises ReceiptExpiredError as `ack` does, and
        ConfigError for a bad delay."""
        if self._is_new("release"):
            _bounded("delay", delay)
            context, delivery = self._context, self._delivery
            context.broker.release(context.group, delivery.topic, [delivery.receipt], delay=delay)
            self._verb = "release"

    def _is_new(self, verb: Verb) -> bool:
        if self._verb is not None and self._verb != verb:
            self._refuse()
        return self._verb is None

    def _refuse(self) -> None:
        raise ReceiptExpiredError(f"{self!r} was settled before, by {self._verb}; nothing was changed")

    def _note(self, verb: Verb, outcome: Settled) -> None:
        self._verb, context = verb, self._context
        if context.told is not None and (context.waiting is None or context.waiting):
            context.told(self, outcome)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            if self._verb is None:
                self.ack()
            return False
        # Retry and Reject are carried out, or their failure is raised.
        if isinstance(error, Retry):
            context = self._context
            # Shorten here and not in `nack`, whose caller can handle the error.
            self.nack(shortened(retry_delay(error), _LONGEST_S, context.log, self.message))
            return True
        if isinstance(error, Reject):
            self.reject(error.reason)
            return True
        try:
            if not isinstance(error, Exception):  # Ctrl-C or similar is not a failure of the message
                if self._verb is None:
                    self.release()
            elif self._verb is None:
                context = self._context
                self._note(
                    "nack", fail(context.broker, context.group, self._delivery, f"{type(error).__name__}: {error}")
                )
        except MQStoreError as late:  # the caller must see the first error
            _log.warning("%r could not be released: %s", self, late)
        return False

    def __repr__(self) -> str:
        delivery = self._delivery
        where = f"{delivery.queue_id}, offset {delivery.message.offset}, attempt {delivery.attempt}"
        return f"<{type(self).__name__} of {self._source}/{where}, {self._verb or 'leased'}>"

    @property
    def _source(self) -> str:
        """Topic, for people."""
        return self._delivery.topic


class Delivery(Lease):
    """Message that `SimpleConsumer.receive` returned.
    `with delivery as message:` acknowledges it at a clean end, and gives it back after an exception, which passes
    on. `Retry` and `Reject` are obeyed and do not.

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

    __slots__ = ("_received_at",)

    def __init__(self, context: LeaseContext, delivery: Popped, received_at: float) -> None:
        super().__init__(context, delivery)
        self._received_at = received_at
        """Time of receipt, on the scale of `expires_at`, for `on_settle`."""

    @property
    def receipt(self) -> str:
        """Receipt handle for `Broker.ack` and similar methods, to settle the message from elsewhere."""
        return self._delivery.receipt

    def __enter__(self) -> Message:
        return self.message


class Task(Lease, Generic[T]):
    """Leased item. `with task:` acknowledges it at a clean end, and gives it back after an exception.
    The exception passes on, except `Retry` and `Reject`, which are obeyed. `Queue.run` is a loop that survives it.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     queue = store.queue("jobs", codec=mqstore.JSON)
    ...     receipt = queue.put({"page": 7})
    ...     with queue.get() as task:
    ...         task.value, task.attempt, queue.qsize()
    ...     queue.qsize()
    ({'page': 7}, 1, 1)
    0
    """

    __slots__ = ()

    @property
    def value(self) -> T:
        """Item that was put. Raises FormatError if the queue's codec cannot decode it.
        Inside `with` that is a failed attempt."""
        if self._value is None:
            self._value = self._context.codec.decode(self._delivery.message.body)
        value: T = self._value
        return value

    @property
    def _source(self) -> str:
        return repr(queue_name(self._context.group))

    def __enter__(self) -> Self:
        return self


def as_delivered(delivery: Popped) -> Message:
    """Return the message as a handler sees it, with its attempts.
    A message from a retry topic is shown under the topic it was sent to."""
    message, _, _, topic, _, redeliveries = delivery
    if is_retry_topic(topic):
        topic = message._stored_property(RETRY_TOPIC) or topic
    return shown(message, topic, redeliveries)


def fail(broker: BrokerContract, group: str, delivery: Popped, reason: str, delay: Duration | None = None) -> Settled:
    """Give back a failed delivery, or dead-letter it with the reason after its last attempt."""
    limit = broker.groups.require(group).max_attempts
    if limit is not None and delivery.attempt >= limit:
        broker.dead_letter(group, delivery.topic, delivery.receipt, reason)
        return "dlq"
    again = broker.nack(group, delivery.topic, delivery.receipt, delay, error=reason)
    return "dlq" if again is None else "retry"


def release(leases: Iterable[Lease]) -> None:
    """Release the leases of a call that was interrupted or cancelled, as a cancelled block does.
    The attempts do not count. A failure is logged."""
    for lease in leases:
        lease.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def visibility_seconds(visibility: Duration) -> float:
    """Return a lease's duration in seconds. Raises ConfigError unless it is 0.1 s to 12 h."""
    value = visibility if type(visibility) is int else seconds(visibility, "visibility")
    if not 0.1 <= value <= _LONGEST_S:
        raise ConfigError(f"visibility is {visibility!r}; give 0.1 seconds to 12 hours")
    return value


def _bounded(name: str, given: Duration) -> float:
    """Return `given` in seconds. Raises ConfigError, by the name that the caller knows, above 12 h.
    The broker would refuse it too, but in milliseconds and by another name."""
    value = seconds(given, name)
    if value > _LONGEST_S:
        raise ConfigError(f"{name} is {given!r}; give 12 hours at most, 43200")
    return value
