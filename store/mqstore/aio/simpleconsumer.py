"""Simple consumer with coroutines (clients#simple)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

from mqstore.aio.bridge import Bridge
from mqstore.aio.lease import Lease
from mqstore.aio.made import Each
from mqstore.aio.puts import Puts
from mqstore.aio.queue import limit
from mqstore.aio.twin import Closable, Value, called
from mqstore.client import delivery, simpleconsumer
from mqstore.client.delivery import release
from mqstore.errors import StoreClosedError
from mqstore.log.message import Message
from mqstore.options import Duration
from mqstore.store import Store

__all__ = ["Delivery", "SimpleConsumer"]


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


class SimpleConsumer(Closable[simpleconsumer.SimpleConsumer]):
    """Simple consumer with coroutines, made by `Store.simple_consumer`.
    A `receive` that is cancelled, at any moment, has received nothing. Interceptors are called on the loop and on the
    store's thread.

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

    def __init__(self, bridge: Bridge, _: Puts, store: Store, *args: Any, **options: Any) -> None:
        """Make the consumer, on the store's thread. Arguments are those of `mqstore.Store.simple_consumer`."""
        super().__init__(bridge, store.simple_consumer(*args, **options))

    group = Value[str]()
    ordered = Value[bool]()
    client_id = Value[str]()
    subscriptions = Value[dict[str, str]]()
    closed = Value[bool]()
    subscribe = called(simpleconsumer.SimpleConsumer.subscribe)
    unsubscribe = called(simpleconsumer.SimpleConsumer.unsubscribe)
    pending = called(simpleconsumer.SimpleConsumer.pending)

    async def receive(
        self, max_messages: int = 1, *, wait: Duration = 20, visibility: Duration | None = None
    ) -> list[Delivery]:
        """Receive as `mqstore.SimpleConsumer.receive`.
        If cancelled, it has received nothing, and another receiver is called."""
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
        return await self._bridge.look(look, self.sync.when_ready, timeout_s=wait_s, undo=release)

    def _made(self, found: list[delivery.Delivery] | None) -> list[Delivery]:
        return [Delivery(self._bridge, each) for each in found or ()]

    def __aiter__(self) -> AsyncIterator[Delivery]:
        """Yield deliveries one at a time, waiting for ever, until the consumer is closed."""
        return Each(self._next)

    async def _next(self) -> Delivery | None:
        if self.sync.closed:
            return None
        found = self._made(await self._look(partial(self.sync.receive, 1, wait=0), None))
        return found[0] if found else None

    async def close(self) -> None:
        """Close as `mqstore.SimpleConsumer.close`. If cancelled, that is raised once it is closed."""
        if not self._bridge.closed:
            await self._bridge.finish(self.sync.close)

    async def _leave(self, error: BaseException | None) -> None:
        await self.close()
