"""What a push consumer holds in mode "pop": units of work, and settlements that are not through."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from mqstore.broker.pop.service import Delivery
from mqstore.client.chunks import Chunk, Home
from mqstore.client.interceptors import Settled
from mqstore.client.renewal import Held
from mqstore.log.message import Message

__all__ = ["SETTLE_AGAIN_MAX_MS", "Settling", "Unit"]

SETTLE_AGAIN_MS, SETTLE_AGAIN_MAX_MS = 100, 1_000


class Unit(Chunk):
    """Messages that are settled in one topic. In order they are of one queue, and may have been sent to several topics.
    Without order they were sent to one topic."""

    __slots__ = ("held",)

    def __init__(self, home: Home, topic: str, messages: Sequence[Message], held: Held, *, ordered: bool) -> None:
        """`held` has the deliveries of all messages."""
        super().__init__(home, topic, messages, apart=ordered)
        self.held = held

    def delivery(self, message: Message) -> Delivery:
        """Return the delivery of a message that is not settled."""
        return self.held.deliveries[id(message)]


class Settling:
    """Steps that are gone through in order, each until it is through."""

    __slots__ = ("delay_ms", "steps", "unit")

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.steps: deque[tuple[Callable[[], Settled], Sequence[Message], float]] = deque()
        """(what to do, for which messages, how many milliseconds their handlers took)"""
        self.delay_ms = SETTLE_AGAIN_MS
