"""The values that go in and out of pop: a question, a delivery, what is in flight (delivery#pop-request)."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, NamedTuple

from mqstore.broker.filters import Filter
from mqstore.log.message import Message

__all__ = ["Ask", "Delivery", "Pending", "Start"]

Start = Literal["earliest", "latest"] | int | datetime
"""Where a group begins in a queue in which it never was; a number: ms since the epoch."""


class Delivery(NamedTuple):
    """A message, handed to one receiver for a while."""

    message: Message
    receipt: str
    """What acknowledges it, renews it or gives it back. Opaque."""
    visible_at_ms: int
    """When it comes again unless it was acknowledged, wall clock."""
    topic: str
    """Where it was sent to; `message.topic` may be the group's retry topic."""
    queue_id: int
    redeliveries: int | None
    """FIFO: how often it was delivered before. None: the message itself tells (`reconsume_times`)."""

    @property
    def attempt(self) -> int:
        """Which delivery this is, from 1."""
        return (self.message.reconsume_times if self.redeliveries is None else self.redeliveries) + 1


class Pending(NamedTuple):
    """A delivery in flight, as `pending` lists it."""

    topic: str
    """Where the message lies; may be a retry topic."""
    queue_id: int
    offset: int
    pop_time_ms: int
    visible_at_ms: int
    fifo: bool


class Ask(NamedTuple):
    """One pop, as each of the queues it looks at sees it."""

    topic: str
    """As the user named it."""
    invisible_ms: int
    filter: Filter | None
    start: Start | None
    attempt_id: str | None
    local: bool
    now_ms: int
    max_attempts: int | None
    skip_acked: bool
    """FIFO: what was acknowledged behind an unsettled message is not handed out again."""
