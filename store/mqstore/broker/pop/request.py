"""Values that pop takes and returns (delivery#pop-request)."""

from __future__ import annotations

from typing import NamedTuple

from mqstore.broker.reads.filters.filter import Filter
from mqstore.broker.reads.reading import Start
from mqstore.log.message import Message

MIN_INVISIBLE_MS, MAX_INVISIBLE_MS = 100, 12 * 3_600_000


class Delivery(NamedTuple):
    """A message, delivered to one receiver for a limited time."""

    message: Message
    receipt: str
    """Opaque text that acknowledges, renews or releases the delivery."""
    visible_at_ms: int
    """Wall-clock time at which the message is redelivered unless it is acknowledged."""
    topic: str
    """Topic to which the message was sent. `message.topic` may be the group's retry topic."""
    queue_id: int
    redeliveries: int | None
    """Number of earlier deliveries in a FIFO queue. None: read `reconsume_times` of the message."""

    @property
    def attempt(self) -> int:
        """Number of this delivery of the message, from 1."""
        return (self.message.reconsume_times if self.redeliveries is None else self.redeliveries) + 1


class Pending(NamedTuple):
    """A delivery in flight, as `pending` lists it."""

    topic: str
    """Topic that holds the message. It may be a retry topic."""
    queue_id: int
    offset: int
    pop_time_ms: int
    visible_at_ms: int
    fifo: bool


class PopRequest(NamedTuple):
    """One pop, as `BrokerContract.pop` describes it. Compiled code takes `order` and `local` only as bool."""

    group: str
    topic: str
    queue_id: int = -1
    """One queue, or -1: all queues, beginning at a random one, and the group's retry topic."""
    n: int = 1
    """Maximum number of messages, 1 to 32."""
    invisible_ms: int = 60_000
    """100 ms to 12 h."""
    filter: Filter | None = None
    order: bool = False
    """Deliver a queue's next batch only when no message of its last batch is invisible. The retry topic is one more
    queue, since it has dead letters that were sent again."""
    start: Start | None = None
    """First position of a group without a committed offset in a queue. None: the group's configuration."""
    attempt_id: str | None = None
    """With `order`: the same id receives again the messages of its lost answer."""
    local: bool = True
    """True if the receiver ends with this process: the next open redelivers its messages at once."""
    skip_acked: bool = False
    """With `order`: do not redeliver messages that were acknowledged after an unsettled one."""
