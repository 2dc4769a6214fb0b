"""Items that a push consumer holds in mode "pop": units of work, and settlements to try again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter

from mqstore.broker.pop.service import Delivery
from mqstore.client.chunks import Chunk, Home
from mqstore.client.interceptors import Settled
from mqstore.client.renewal import Held
from mqstore.log.message import Message

__all__ = ["SETTLE_AGAIN_MAX_MS", "Settling", "Unit"]

SETTLE_AGAIN_MS, SETTLE_AGAIN_MAX_MS = 100, 1_000
_receipt = attrgetter("receipt")


class Unit(Chunk):
    """Messages that are settled in one topic.
    In order they are of one queue, but may have been sent to several topics. Without order they were sent to one."""

    __slots__ = ("held",)

    def __init__(
        self, home: Home, topic: str, held: Held, messages: Sequence[Message] | None = None, *, ordered: bool
    ) -> None:
        """`messages` are some of `held`. None means all."""
        super().__init__(home, topic, held.messages() if messages is None else messages, apart=ordered)
        self.held = held

    def delivery(self, message: Message) -> Delivery:
        """Return the delivery of a message that is not settled."""
        return self.held.deliveries[id(message)]

    def receipts(self, messages: Sequence[Message]) -> list[str]:
        """Return the receipts of messages that are not settled."""
        return list(map(_receipt, map(self.held.deliveries.__getitem__, map(id, messages))))


class Settling:
    """Settlement steps that run in order, each until it succeeds."""

    __slots__ = ("delay_ms", "steps", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.steps: deque[tuple[Callable[[], Settled], Sequence[Message], float]] = deque()
        """Tuples (function, messages, milliseconds that their handlers took)."""
        self.delay_ms = SETTLE_AGAIN_MS
