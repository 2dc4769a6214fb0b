"""What a push consumer holds in mode "pop": deliveries, units of work, and settlements that are not through."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from mqstore.broker.pop import service as pop
from mqstore.client.chunks import Chunk
from mqstore.client.delivery import as_delivered
from mqstore.client.handling import Failure
from mqstore.client.interceptors import Settled

__all__ = ["SETTLE_AGAIN_MAX_MS", "Item", "Settling", "Unit", "failed_of"]

SETTLE_AGAIN_MS, SETTLE_AGAIN_MAX_MS = 100, 1_000


class Item:
    """A delivery that is here."""

    __slots__ = ("delivery", "is_begun", "message", "size", "topic")

    def __init__(self, delivery: pop.Delivery) -> None:
        self.delivery = delivery
        self.message = message = as_delivered(delivery)
        self.topic = delivery.topic if message is delivery.message else message.topic
        """Whose handler gets it; `delivery.topic` settles it."""
        self.size = message.size
        self.is_begun = False

    def __str__(self) -> str:
        return f"{self.delivery.topic}/{self.delivery.queue_id}, offset {self.message.offset}"


class Unit(Chunk[Item, tuple[list[Item], float]]):
    """Items of one topic, a line's of one queue. All are settled in one topic. A line of the group's retry topic has
    messages that were sent to several. `done` has those of one call, and the milliseconds that they took."""

    __slots__ = ()


class Settling:
    """Steps that are gone through in order, each until it is through."""

    __slots__ = ("delay_ms", "line", "steps")

    def __init__(self, line: Unit | None = None) -> None:
        self.steps: deque[tuple[Callable[[], Settled], Sequence[Item], float]] = deque()
        """(what to do, for which, how long their handler took)"""
        self.line = line
        """What goes on then."""
        self.delay_ms = SETTLE_AGAIN_MS


def failed_of(batch: list[Item], failure: Failure | None) -> list[Item]:
    """Return those of `batch` that a handler did not get done with."""
    if failure is None:
        return []
    if failure.failed is None:
        return batch
    failed = {(message.queue, message.offset) for message in failure.failed}
    return [item for item in batch if (item.message.queue, item.message.offset) in failed]
