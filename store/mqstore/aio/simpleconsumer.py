"""Simple consumer with coroutines (clients#simple)."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from mqstore.aio.lease import Delivery
from mqstore.aio.puts import Puts
from mqstore.aio.twin import Closable, Value, called, limit, to_its_end
from mqstore.client import simpleconsumer
from mqstore.client.delivery import release
from mqstore.options import Duration

__all__ = ["SimpleConsumer"]


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

    group = Value[str]()
    ordered = Value[bool]()
    client_id = Value[str]()
    subscriptions = Value[dict[str, str]]()
    closed = Value[bool]()
    subscribe = called(simpleconsumer.SimpleConsumer.subscribe)
    unsubscribe = called(simpleconsumer.SimpleConsumer.unsubscribe)
    pending = called(simpleconsumer.SimpleConsumer.pending)
    close = called(simpleconsumer.SimpleConsumer.close, to_its_end)

    def __init__(self, bridge: Puts, *args: Any, **options: Any) -> None:
        """Make the consumer, on the store's thread. Arguments are those of `mqstore.Store.simple_consumer`."""
        super().__init__(bridge, bridge.store.simple_consumer(*args, **options))

    async def receive(
        self, max_messages: int = 1, *, wait: Duration = 20, visibility: Duration | None = None
    ) -> list[Delivery]:
        """Receive as `mqstore.SimpleConsumer.receive`.
        If cancelled, it has received nothing, and another receiver is called."""
        receive = partial(self.sync.receive, max_messages, wait=0, visibility=visibility)
        found = await self._received(receive, limit(wait), undo=release)
        return [Delivery(self._bridge, each) for each in found]

    def __aiter__(self) -> SimpleConsumer:
        """Yield deliveries one at a time, waiting for ever, until the consumer is closed."""
        return self

    async def __anext__(self) -> Delivery:
        for delivery in [] if self.closed else await self.receive(wait=math.inf):
            return delivery
        raise StopAsyncIteration
