"""Base of `Task` and `Delivery`: a lease of the synchronous library whose verbs are coroutines.

    ack, clean end of a block    on the loop, if no lock and no disk has to be waited for; else on the store's thread
    nack, extend, reject,        on the store's thread
    end of a block that failed

No verb can be cancelled half way. A caller that is cancelled meanwhile gets CancelledError when the verb has ended.
"""

from __future__ import annotations

import asyncio
from functools import partial
from types import TracebackType
from typing import TypeVar

from mqstore.aio.twin import Twin, Value, called, to_its_end
from mqstore.client import delivery
from mqstore.log.message import Message
from mqstore.queue import Task

__all__ = ["Lease"]

L = TypeVar("L", Task, delivery.Delivery)


class Lease(Twin[L]):
    """A delivery that has to be settled. No verb can be cancelled half way."""

    __slots__ = ()

    message = Value[Message]()
    attempt = Value[int]()
    expires_at = Value[float]()
    settled = Value[bool]()
    nack = called(delivery.Lease.nack, to_its_end)
    extend = called(delivery.Lease.extend, to_its_end)
    reject = called(delivery.Lease.reject, to_its_end)

    async def ack(self) -> None:
        """Acknowledge as the `ack` of the synchronous class. If cancelled, that is raised when it has ended."""
        self._bridge.check()
        if self.sync.ack_at_once():
            if self._bridge.is_turn_over():
                await asyncio.sleep(0)
        else:
            await self._bridge.finish(self.sync.ack)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        leave = partial(self.sync.__exit__, kind, error, traceback)
        # A generator that is being closed cannot wait, and a bridge that was closed has no thread.
        if isinstance(error, GeneratorExit) or self._bridge.closed:
            return leave()
        if error is not None:
            return await self._bridge.finish(leave)
        if not self.sync.settled:
            await self.ack()
        return False
