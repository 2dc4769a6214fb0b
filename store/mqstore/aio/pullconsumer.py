"""Pull consumer with coroutines (clients#pull-consumer).

A poll means that the caller is done with the messages of earlier polls. By default the synchronous consumer knows its
caller by the thread. Here the store's thread makes all calls, and the caller is a task of the loop. So the messages
that one task polled are not taken for done if another task closes or unsubscribes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any, TypeVar
from weakref import ref

from mqstore.aio.bridge import Bridge
from mqstore.aio.made import Each
from mqstore.aio.puts import Puts
from mqstore.aio.queue import limit
from mqstore.aio.twin import Closable, Value, called
from mqstore.client import pullconsumer
from mqstore.errors import MQStoreError, StoreClosedError
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message
from mqstore.options import Duration
from mqstore.store import Store

__all__ = ["PullConsumer"]

T = TypeVar("T")


class PullConsumer(Closable[pullconsumer.PullConsumer]):
    """Pull consumer with coroutines, made by `Store.pull_consumer`.
    A `poll` that is cancelled, at any moment, has returned nothing, and the next one begins at the same message.
    `on_assign`, `on_revoke` and interceptors are plain functions, called on the store's thread.

    >>> import mqstore.aio, tempfile
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

    def __init__(self, bridge: Bridge, _: Puts, store: Store, *args: Any, **options: Any) -> None:
        """Make the consumer, on the store's thread. Arguments are those of `mqstore.Store.pull_consumer`."""
        super().__init__(bridge, sync := store.pull_consumer(*args, **options))
        self._caller: object = None
        """Task whose call the store's thread is making."""
        sync.caller = lambda: self._caller or threading.current_thread()

    group = Value[str]()
    client_id = Value[str]()
    closed = Value[bool]()

    async def _as_called(self, work: Callable[[], T]) -> T:
        """Run on the store's thread. If cancelled, it has not begun, or runs to its end."""
        return await self._bridge.call(self._as_caller(work))

    # -- subscriptions ----------------------------------------------------------------------------------------------

    subscribe = called(pullconsumer.PullConsumer.subscribe, _as_called)
    unsubscribe = called(pullconsumer.PullConsumer.unsubscribe, _as_called)
    assign = called(pullconsumer.PullConsumer.assign, _as_called)
    assignment = called(pullconsumer.PullConsumer.assignment)
    pause = called(pullconsumer.PullConsumer.pause)
    resume = called(pullconsumer.PullConsumer.resume)
    paused = called(pullconsumer.PullConsumer.paused)

    # -- messages ---------------------------------------------------------------------------------------------------

    async def poll(self, timeout: Duration | None = 5.0, max_messages: int | None = None) -> list[Message]:
        """Return messages as `mqstore.PullConsumer.poll` does. If cancelled, it has returned nothing."""
        if self.sync.closed:
            raise StoreClosedError(f"this consumer of group {self.group!r} was closed; make another one")
        return await self._poll(limit(timeout), lambda: self.sync.poll(0, max_messages))

    def __aiter__(self) -> AsyncIterator[Message]:
        """Yield messages one at a time, waiting for ever, until the consumer is closed.
        A request for the next message means that the caller is done with the last."""
        return Each(self._next)

    async def _next(self) -> Message | None:
        if self.sync.closed:
            return None
        found = await self._poll(None, lambda: self.sync.take(0, self.sync.fetch_max, 1))
        return found[0] if found else None

    async def _poll(self, timeout_s: float | None, poll: Callable[[], list[Message]]) -> list[Message]:
        call = self._as_caller(poll)

        def look() -> list[Message] | None:
            try:
                found = call()
            except StoreClosedError:
                if self.sync.closed:  # meanwhile
                    return []
                raise
            return found or ([] if self.sync.closed else None)

        found = await self._bridge.look(look, self.sync.when_ready, timeout_s=timeout_s, undo=self._unread)
        return found or []

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

    # -- positions --------------------------------------------------------------------------------------------------

    position = called(pullconsumer.PullConsumer.position)
    committed = called(pullconsumer.PullConsumer.committed)
    commit = called(pullconsumer.PullConsumer.commit, _as_called)
    seek = called(pullconsumer.PullConsumer.seek, _as_called)

    # -- the end ----------------------------------------------------------------------------------------------------

    async def close(self, *, done: bool = True) -> None:
        """Close as `mqstore.PullConsumer.close`. A cancellation is raised once it is closed.
        The messages of the last poll are taken for done only if the same task of the loop polled them."""
        if not self._bridge.closed:
            await self._bridge.finish(self._as_caller(partial(self.sync.close, done=done)))

    def _as_caller(self, work: Callable[[], T]) -> Callable[[], T]:
        """Return `work` for the store's thread, as a call by the current task."""
        current = asyncio.current_task()
        caller = current and ref(current)

        def call() -> T:
            self._caller = caller
            try:
                return work()
            finally:
                self._caller = None

        return call

    async def _leave(self, error: BaseException | None) -> None:
        await self.close(done=error is None)
