"""Values that pop takes and returns, and the times of deliveries (delivery#pop-request, delivery#clock).

    pop time       time of the pop, or of the last change of the receipt, which names it
    visible time   time at which the message is redelivered; the time between the two is the invisible time

Both are stored, so both are wall time. If the clock is set back by less than the invisible time, a delivery lasts
longer by that much. If it is set back by more, the delivery would hide its message for as long as the clock was wrong,
so it counts as over. A later change uses the new clock, so its visible time may be before its pop time.
"""

from __future__ import annotations

from typing import NamedTuple

from mqstore.broker.filters.filter import Filter
from mqstore.broker.reading import Start
from mqstore.log.message import Message

__all__ = ["SAME_MOMENT_MS", "Delivery", "Pending", "PopRequest", "is_visible", "pop_time"]


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
    """One pop, as passed to each queue that it examines."""

    topic: str
    """Topic as the caller named it."""
    invisible_ms: int
    filter: Filter | None
    start: Start | None
    attempt_id: str | None
    local: bool
    now_ms: int
    max_attempts: int | None
    skip_acked: bool
    """FIFO: do not redeliver messages that were acknowledged after an unsettled one."""


SAME_MOMENT_MS = 1_000
"""Number of ms that a pop time may be ahead of a clock that was not set back."""


def pop_time(now_ms: int, last_ms: int) -> int:
    """Return `now_ms`, or `last_ms` + 1 if that is at most a second later.
    The pop time distinguishes two deliveries of a message, so it must grow. But after a clock was set back it is
    `now_ms`, because old times must not keep messages invisible."""
    return last_ms + 1 if now_ms <= last_ms < now_ms + SAME_MOMENT_MS else now_ms


def is_visible(pop_time_ms: int, visible_ms: int, now_ms: int) -> bool:
    """Return True if a delivery is over.
    Either its visible time has come, or its pop time is farther in the future than its invisible time can explain.

    >>> is_visible(1_000_000, 1_060_000, 1_059_999), is_visible(1_000_000, 1_060_000, 1_060_000)
    (False, True)
    >>> is_visible(1_000_000, 1_060_000, 1_000_000 - 60_000), is_visible(1_000_000, 1_060_000, 1_000_000 - 61_001)
    (False, True)
    """
    if visible_ms <= now_ms:
        return True
    lasts_ms = visible_ms - pop_time_ms
    return lasts_ms >= -SAME_MOMENT_MS and pop_time_ms - now_ms > max(0, lasts_ms) + SAME_MOMENT_MS
