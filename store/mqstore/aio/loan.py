"""What `Task` and `Delivery` share: a loan of the sync library, with coroutines for its verbs."""

from __future__ import annotations

from types import TracebackType
from typing import Generic, TypeVar

from mqstore.aio.bridge import Bridge
from mqstore.client.delivery import Delivery
from mqstore.log.message import Message
from mqstore.options import Duration
from mqstore.queue import Task

__all__ = ["Loan"]

L = TypeVar("L", Task, Delivery)


class Loan(Generic[L]):
    """Something that has to be settled. None of the verbs has a point at which it could be cancelled half way."""

    __slots__ = ("_bridge", "sync")

    def __init__(self, bridge: Bridge, sync: L) -> None:
        self._bridge = bridge
        self.sync: L = sync
        """The loan of the sync library."""

    @property
    def message(self) -> Message:
        """The message under the topic it was sent to, with its `attempt`."""
        return self.sync.message

    @property
    def attempt(self) -> int:
        """Which delivery of its message this is, from 1."""
        return self.sync.attempt

    @property
    def expires_at(self) -> float:
        """When it is given to others unless it is settled, on the scale of `time.monotonic`."""
        return self.sync.expires_at

    @property
    def settled(self) -> bool:
        """Whether it was acknowledged, given back or rejected by way of this object."""
        return self.sync.settled

    async def ack(self) -> None:
        """As `ack` of the sync library."""
        self._bridge.check()
        self.sync.ack()

    async def nack(self, delay: Duration | None = None) -> None:
        """As `nack` of the sync library."""
        self._bridge.check()
        self.sync.nack(delay)

    async def extend(self, visibility: Duration) -> None:
        """As `extend` of the sync library."""
        self._bridge.check()
        self.sync.extend(visibility)

    async def reject(self, reason: str = "") -> None:
        """As `reject` of the sync library."""
        self._bridge.check()
        self.sync.reject(reason)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        return self.sync.__exit__(kind, error, traceback)

    def __repr__(self) -> str:
        return repr(self.sync)
