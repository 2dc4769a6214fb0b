"""Consumers that are asked for messages, with coroutines (clients#simple, clients#pull-consumer).

A poll of a pull consumer means that the caller is done with the messages of earlier polls. By default the synchronous
consumer knows its caller by the thread. Here the store's thread makes all calls, and the caller is a task of the loop.
So the messages that one task polled are not taken for done if another task closes or unsubscribes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from mqstore.aio.base import Closable, Value, called, limit
from mqstore.aio.lease import Delivery
from mqstore.aio.loop_thread import LoopThread
from mqstore.client import simpleconsumer
from mqstore.client.delivery import release
from mqstore.client.pull import consumer as pullconsumer
from mqstore.errors import MQStoreError, StoreClosedError
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message
from mqstore.options import Duration

S = TypeVar("S", simpleconsumer.SimpleConsumer, pullconsumer.PullConsumer)
T = TypeVar("T")


class _Consumer(Closable[S]):
    """Consumer that is asked for messages."""

    group = Value[str]()
    client_id = Value[str]()
    closed = Value[bool]()

    async def _received(
        self, receive: Callable[[], list[T]], wait_s: float | None, undo: Callable[[list[T]], object]
    ) -> list[T]:
        """Return the messages that `receive` finds within `wait_s`, or nothing if the consumer is closed meanwhile."""
        was_closed = self.closed

        def look() -> list[T] | None:
            try:
                return receive() or ([] if self.closed else None)
            except StoreClosedError:
                if was_closed or not self.closed:
                    raise
                return []

        return await self._bridge.look(look, self._park, timeout_s=wait_s, undo=undo) or []

    def _park(self, again: Callable[[], object]) -> Callable[[], object]:
        return self.sync._when_ready(again).cancel


class SimpleConsumer(_Consumer[simpleconsumer.SimpleConsumer]):
    """Simple consumer with coroutines, made by `Store.simple_consumer`.
    A `receive` that is cancelled, at any time, has received nothing. Interceptors are called on the loop and on the
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

    ordered = Value[bool]()
    subscriptions = Value[dict[str, str]]()
    subscribe = called(simpleconsumer.SimpleConsumer.subscribe)
    unsubscribe = called(simpleconsumer.SimpleConsumer.unsubscribe)
    pending = called(simpleconsumer.SimpleConsumer.pending)
    close = called(simpleconsumer.SimpleConsumer.close, LoopThread.finish)

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


class PullConsumer(_Consumer[pullconsumer.PullConsumer]):
    """Pull consumer with coroutines, made by `Store.pull_consumer`.
    A `poll` that is cancelled, at any time, has returned nothing, and the next one begins at the same message.
    `on_assign`, `on_revoke` and interceptors are plain functions, called on the store's thread.

    >>> import asyncio, mqstore.aio, tempfile
    >>> async def main(folder):
    ...     async with mqstore.aio.open(folder) as store:
    ...         receipt = await store.put("orders", b"a")
    ...         async with store.pull_consumer("billing") as consumer:
    ...             await consumer.subscribe("orders")
    ...             print([message.body for message in await consumer.poll()])
    ...         print(await store.committed("billing", receipt.queue))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    [b'a']
    1
    """

    subscribe = called(pullconsumer.PullConsumer.subscribe)
    unsubscribe = called(pullconsumer.PullConsumer.unsubscribe)
    assign = called(pullconsumer.PullConsumer.assign)
    assignment = called(pullconsumer.PullConsumer.assignment)
    position = called(pullconsumer.PullConsumer.position)
    committed = called(pullconsumer.PullConsumer.committed)
    commit = called(pullconsumer.PullConsumer.commit)
    seek = called(pullconsumer.PullConsumer.seek)
    pause = called(pullconsumer.PullConsumer.pause)
    resume = called(pullconsumer.PullConsumer.resume)
    paused = called(pullconsumer.PullConsumer.paused)
    close = called(pullconsumer.PullConsumer.close, LoopThread.finish)

    def __init__(self, bridge: LoopThread, sync: pullconsumer.PullConsumer) -> None:
        """Made by a method of the store, with the options of the synchronous one."""
        super().__init__(bridge, sync)
        self.sync.caller = bridge.caller

    async def poll(self, timeout: Duration | None = 5.0, max_messages: int | None = None) -> list[Message]:
        """Return messages as `mqstore.PullConsumer.poll` does. If cancelled, it has returned nothing."""
        return await self._received(partial(self.sync.poll, 0, max_messages), limit(timeout), undo=self._unread)

    def __aiter__(self) -> PullConsumer:
        """Yield messages one at a time, waiting for ever, until the consumer is closed.
        A request for the next message means that the caller is done with the last."""
        return self

    async def __anext__(self) -> Message:
        take = partial(self.sync._take, 0, self.sync.fetch_max, 1)
        for message in [] if self.closed else await self._received(take, None, undo=self._unread):
            return message
        raise StopAsyncIteration

    def _unread(self, messages: list[Message]) -> None:
        """Seek back to the messages of a cancelled poll, on the thread, so that they are polled again."""
        firsts: dict[QueueRef, int] = {}
        for message in messages:
            firsts.setdefault(message.queue, message.offset)
        for queue, offset in firsts.items():
            try:
                if self.sync.position(queue) > offset:  # otherwise another caller has moved it since
                    self.sync.seek(queue, offset)
            except MQStoreError:  # another member has it, and continues at the committed offset
                pass
