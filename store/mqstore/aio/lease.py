"""Tasks, deliveries and dead letters with coroutines.

    ack, clean end of a block    on the loop, if no lock and no disk has to be waited for; else on the store's thread
    nack, extend, progress,      on the store's thread
    reject, release, end of a
    block that failed

No verb can be cancelled half way. A caller that is cancelled meanwhile gets CancelledError when the verb has ended.
"""

from __future__ import annotations

import asyncio
from functools import partial
from types import TracebackType
from typing import Generic, Self, TypeVar

from mqstore import contract
from mqstore.aio.base import AsyncBase, Value, called, paged
from mqstore.aio.loop_thread import LoopThread
from mqstore.client import delivery
from mqstore.client.codecs import T
from mqstore.log.message import Message

L = TypeVar("L", bound=delivery.Lease)


class Lease(AsyncBase[L]):
    """A delivery that has to be settled. No verb can be cancelled half way."""

    __slots__ = ()

    message = Value[Message]()
    attempt = Value[int]()
    expires_at = Value[float]()
    settled = Value[bool]()
    nack = called(delivery.Lease.nack, LoopThread.finish)
    extend = called(delivery.Lease.extend, LoopThread.finish)
    reject = called(delivery.Lease.reject, LoopThread.finish)
    release = called(delivery.Lease.release, LoopThread.finish)
    progress = called(delivery.Lease.progress, LoopThread.finish)

    async def ack(self) -> None:
        """Acknowledge as the `ack` of the synchronous class. If cancelled, that is raised when it has ended."""
        self._bridge.check()
        if not self.sync._ack_at_once():
            await self._bridge.finish(self.sync.ack)
        elif self._bridge.is_turn_over():
            await asyncio.sleep(0)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is None:
            if not self.sync.settled:
                await self.ack()
            return False
        leave = partial(self.sync.__exit__, kind, error, traceback)
        # A generator that is being closed cannot wait.
        return leave() if isinstance(error, GeneratorExit) else await self._bridge.finish(leave)


class Task(Lease[delivery.Task[T]], Generic[T]):
    """Leased item with coroutines.
    `async with task:` acknowledges it at a clean end, and gives it back after an exception, which passes on. If
    cancelled, the item is released at once, and the attempt does not count. `Queue.run` is a loop that survives
    exceptions.

    >>> import asyncio, mqstore, tempfile
    >>> async def main(folder):
    ...     async with mqstore.aio.open(folder) as store, store.queue("jobs") as queue:
    ...         receipt = await queue.put(b"a.png")
    ...         async with await queue.get() as task:
    ...             return task.value, task.attempt
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    (b'a.png', 1)
    """

    __slots__ = ()

    value = Value[T]()

    async def __aenter__(self) -> Self:
        return self


class Delivery(Lease[delivery.Delivery]):
    """Delivery with coroutines.
    `async with delivery as message:` acknowledges it at a clean end, gives it back after an exception, and obeys
    `Retry` and `Reject`. If cancelled, it is released unseen.

    >>> import asyncio, mqstore, tempfile
    >>> async def main(folder):
    ...     async with mqstore.aio.open(folder) as store, store.simple_consumer("mailer", {"mail": "*"}) as consumer:
    ...         await store.put("mail", b"hello")
    ...         [delivery] = await consumer.receive(wait=10)
    ...         async with delivery as message:
    ...             return message.body, delivery.attempt
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    (b'hello', 1)
    """

    __slots__ = ()

    receipt = Value[str]()
    received_at = Value[float]()

    async def __aenter__(self) -> Message:
        return self.sync.message


class DeadLetters(AsyncBase[contract.DeadLetters]):
    """Dead letters of a group: list, replay and purge them, as with the synchronous class.

    >>> import asyncio, mqstore, mqstore.aio, tempfile
    >>> async def main(folder):
    ...     async with mqstore.aio.open(folder) as store, store.queue("jobs") as jobs:
    ...         receipt = await jobs.put(b"poison")
    ...         await (await jobs.get()).reject("no such page")
    ...         async for letter in jobs.dead_letters:
    ...             print(letter.body, letter.properties["dlq_reason"])
    ...         print((await jobs.dead_letters.replay()).count, await jobs.dead_letters.count())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    b'poison' no such page
    1 0
    """

    group = Value[str]()
    topic = Value[str]()
    select = paged(contract.DeadLetters.select)
    replay = called(contract.DeadLetters.replay)
    purge = called(contract.DeadLetters.purge)
    count = called(contract.DeadLetters.__len__)
    __aiter__ = paged(contract.DeadLetters.__iter__)

    async def bounds(self) -> tuple[int, int]:
        """Return the offsets of the first letter and of the next one to come."""
        return await self._bridge.call(lambda: self.sync.bounds)
