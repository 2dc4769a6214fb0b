"""Values that pop takes and returns: questions, deliveries, what is in flight (delivery#pop-request)."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, NamedTuple

from mqstore.broker.filters import Filter
from mqstore.log.message import Message

__all__ = ["Ask", "Delivery", "Pending", "Start"]

Start = Literal["earliest", "latest"] | int | datetime
"""Position at which a group without a committed offset begins. A number is in ms since the epoch."""


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


class Ask(NamedTuple):
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
    """FIFO: do not redeliver messages that were acknowledged behind an unsettled one."""
