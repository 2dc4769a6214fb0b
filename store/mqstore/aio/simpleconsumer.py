"""`mqstore.SimpleConsumer` with coroutines (clients#simple)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType

from mqstore.aio.bridge import Bridge
from mqstore.aio.loan import Loan
from mqstore.aio.made import Each
from mqstore.aio.queue import limit, release
from mqstore.client import delivery, simpleconsumer
from mqstore.client.simpleconsumer import PendingInfo
from mqstore.client.waits import Wait
from mqstore.errors import StoreClosedError
from mqstore.log.message import Message
from mqstore.options import Duration

__all__ = ["Delivery", "SimpleConsumer"]


class Delivery(Loan[delivery.Delivery], AbstractAsyncContextManager[Message]):
    """`mqstore.Delivery` with coroutines: `async with delivery as message:` acknowledges it at a clean end, gives it
    back at an exception, does as `Retry` and `Reject` say; when it is cancelled it is given back unseen.

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

    @property
    def receipt(self) -> str:
        """What the broker knows the delivery by."""
        return self.sync.receipt

    @property
    def received_at(self) -> float:
        """When it was received, on the scale of `expires_at`."""
        return self.sync.received_at

    async def __aenter__(self) -> Message:
        return self.sync.message


class SimpleConsumer(AbstractAsyncContextManager["SimpleConsumer"]):
    """`mqstore.SimpleConsumer` with coroutines, made by `Store.simple_consumer`. A `receive` that is cancelled, at any
    moment, has received nothing. Interceptors are called on the loop and on the store's thread.

    >>> import asyncio, mqstore.aio, tempfile
    >>> async def main(folder):
    ...     async with mqstore.aio.open(folder) as store:
    ...         await store.put("mail", b"hello")
    ...         async with store.simple_consumer("mailer", {"mail": "*"}) as consumer:
    ...             async for delivery in consumer:
    ...                 async with delivery as message:
    ...                     print(message.text(), message.attempt)
    ...                 break
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    hello 1
    """

    def __init__(self, bridge: Bridge, sync: simpleconsumer.SimpleConsumer) -> None:
        self._bridge = bridge
        self.sync = sync
        """The `mqstore.SimpleConsumer`."""
        self.group = sync.group
        self.ordered = sync.ordered
        self.client_id = sync.client_id

    async def subscribe(self, topic: str, *, tags: str = "*", sql: str | None = None) -> None:
        """As `mqstore.SimpleConsumer.subscribe`."""
        await self._bridge.call(partial(self.sync.subscribe, topic, tags=tags, sql=sql))

    async def unsubscribe(self, topic: str) -> None:
        """As `mqstore.SimpleConsumer.unsubscribe`."""
        await self._bridge.call(partial(self.sync.unsubscribe, topic))

    @property
    def subscriptions(self) -> dict[str, str]:
        """Topic -> its expression over tags or properties."""
        return self.sync.subscriptions

    async def receive(
        self, max_messages: int = 1, *, wait: Duration = 20, visibility: Duration | None = None
    ) -> list[Delivery]:
        """As `mqstore.SimpleConsumer.receive`. Cancelled, it has received nothing, and who else waits is called."""
        wait_s = limit(wait)
        receive = partial(self.sync.receive, max_messages, wait=0, visibility=visibility)
        return self._made(await self._look(receive, wait_s))

    async def _look(
        self, receive: Callable[[], list[delivery.Delivery]], wait_s: float | None
    ) -> list[delivery.Delivery] | None:
        looked = False

        def look() -> list[delivery.Delivery] | None:
            nonlocal looked
            if looked and self.sync.closed:
                return []
            looked = True
            try:
                return receive() or None
            except StoreClosedError:
                if self.sync.closed and not was_closed:
                    return []
                raise

        was_closed = self.sync.closed
        return await self._bridge.look(look, self._park, timeout_s=wait_s, undo=release)

    def _park(self, again: Callable[[], object]) -> Wait:
        return self.sync.when_ready(again)

    def _made(self, found: list[delivery.Delivery] | None) -> list[Delivery]:
        return [Delivery(self._bridge, each) for each in found or ()]

    def __aiter__(self) -> AsyncIterator[Delivery]:
        """Deliveries one at a time, waiting for ever, until the consumer is closed."""
        return Each(self._next)

    async def _next(self) -> Delivery | None:
        if self.sync.closed:
            return None
        found = self._made(await self._look(partial(self.sync.receive, 1, wait=0), None))
        return found[0] if found else None

    async def pending(self) -> list[PendingInfo]:
        """As `mqstore.SimpleConsumer.pending`."""
        return await self._bridge.call(self.sync.pending)

    @property
    def closed(self) -> bool:
        """Whether it receives no more."""
        return self.sync.closed

    async def close(self) -> None:
        """As `mqstore.SimpleConsumer.close`. Who is cancelled meanwhile hears of it when it is closed."""
        if not self._bridge.closed:
            await self._bridge.finish(self.sync.close)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return repr(self.sync)
