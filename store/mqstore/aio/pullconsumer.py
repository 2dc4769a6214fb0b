"""`mqstore.PullConsumer` with coroutines (clients#pull-consumer).

A poll says that the caller is done with what polls before it returned. The sync consumer knows its caller by the
thread. Here every call is made by the store's thread, and the caller is a task of the loop: what one polled, another
that closes or unsubscribes does not declare done.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, TypeVar
from weakref import ref

from mqstore.aio.bridge import Bridge
from mqstore.aio.made import Each
from mqstore.aio.queue import limit
from mqstore.client import pullconsumer
from mqstore.client.progress import Start
from mqstore.client.pullconsumer import Told
from mqstore.errors import MQStoreError, StoreClosedError
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message
from mqstore.options import Durability, Duration

__all__ = ["PullConsumer"]

T = TypeVar("T")


class PullConsumer(AbstractAsyncContextManager["PullConsumer"]):
    """`mqstore.PullConsumer` with coroutines, made by `Store.pull_consumer`. A `poll` that is cancelled, at any moment,
    has returned nothing: the next one begins at the same message. `on_assign`, `on_revoke` and interceptors are plain
    functions, called on the store's thread.

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

    def __init__(self, bridge: Bridge, sync: pullconsumer.PullConsumer) -> None:
        self._bridge = bridge
        self.sync = sync
        """The `mqstore.PullConsumer`."""
        self.group = sync.group
        self.client_id = sync.client_id
        self._poller: ref[asyncio.Task[Any]] | None = None
        """The task that polled last."""

    # -- what is read -----------------------------------------------------------------------------------------------

    async def subscribe(
        self,
        *topics: str,
        tags: str = "*",
        sql: str | None = None,
        on_assign: Told | None = None,
        on_revoke: Told | None = None,
    ) -> None:
        """As `mqstore.PullConsumer.subscribe`."""
        await self._call(
            partial(self.sync.subscribe, *topics, tags=tags, sql=sql, on_assign=on_assign, on_revoke=on_revoke)
        )

    async def unsubscribe(self, *topics: str) -> None:
        """As `mqstore.PullConsumer.unsubscribe`."""
        await self._call(partial(self.sync.unsubscribe, *topics))

    async def assign(self, *queues: QueueRef) -> None:
        """As `mqstore.PullConsumer.assign`."""
        await self._call(partial(self.sync.assign, *queues))

    # -- messages ---------------------------------------------------------------------------------------------------

    async def poll(self, timeout: Duration | None = 5.0, max_messages: int | None = None) -> list[Message]:
        """As `mqstore.PullConsumer.poll`. Cancelled, it has returned nothing."""
        if self.sync.closed:
            raise StoreClosedError(f"this consumer of group {self.group!r} was closed; make another one")
        return await self._poll(limit(timeout), lambda: self.sync.poll(0, max_messages))

    def __aiter__(self) -> AsyncIterator[Message]:
        """Messages one at a time, waiting for ever, until the consumer is closed. Asking for the next one says that the
        caller is done with the last."""
        return Each(self._next)

    async def _next(self) -> Message | None:
        if self.sync.closed:
            return None
        found = await self._poll(None, lambda: self.sync._poll(0, self.sync.fetch_max, 1))
        return found[0] if found else None

    async def _poll(self, timeout_s: float | None, poll: Callable[[], list[Message]]) -> list[Message]:
        current = asyncio.current_task()
        self._poller = None if current is None else ref(current)

        def look() -> list[Message] | None:
            try:
                found = poll()
            except StoreClosedError:
                if self.sync.closed:  # meanwhile
                    return []
                raise
            return found or ([] if self.sync.closed else None)

        found = await self._bridge.look(look, self.sync.when_ready, timeout_s=timeout_s, undo=self._unread)
        return found or []

    def _unread(self, messages: list[Message]) -> None:
        """On the thread: have what was polled for somebody who was cancelled polled again."""
        firsts: dict[QueueRef, int] = {}
        for message in messages:
            firsts.setdefault(message.queue, message.offset)
        for queue, offset in firsts.items():
            try:
                if self.sync.position(queue) > offset:  # else somebody else has gone elsewhere since
                    self.sync.seek(queue, offset)
            except MQStoreError:  # it is another's now, who goes on from what is committed
                pass

    # -- positions --------------------------------------------------------------------------------------------------

    async def assignment(self) -> frozenset[QueueRef]:
        """As `mqstore.PullConsumer.assignment`."""
        return await self._call(self.sync.assignment)

    async def position(self, queue: QueueRef) -> int:
        """As `mqstore.PullConsumer.position`."""
        return await self._call(partial(self.sync.position, queue))

    async def committed(self, queue: QueueRef) -> int | None:
        """As `mqstore.PullConsumer.committed`."""
        return await self._call(partial(self.sync.committed, queue))

    async def commit(
        self, offsets: Mapping[QueueRef, int] | None = None, *, durability: Durability | None = None
    ) -> None:
        """As `mqstore.PullConsumer.commit`. Cancelled: it is committed, or not."""
        given = None if offsets is None else dict(offsets)
        await self._call(partial(self.sync.commit, given, durability=durability))

    async def seek(self, queue: QueueRef, to: int | Start) -> None:
        """As `mqstore.PullConsumer.seek`."""
        await self._call(partial(self.sync.seek, queue, to))

    async def pause(self, *queues: QueueRef) -> None:
        """As `mqstore.PullConsumer.pause`."""
        await self._call(partial(self.sync.pause, *queues))

    async def resume(self, *queues: QueueRef) -> None:
        """As `mqstore.PullConsumer.resume`."""
        await self._call(partial(self.sync.resume, *queues))

    async def paused(self) -> frozenset[QueueRef]:
        """As `mqstore.PullConsumer.paused`."""
        return await self._call(self.sync.paused)

    # -- the end ----------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether it receives no more."""
        return self.sync.closed

    async def close(self, *, done: bool = True) -> None:
        """As `mqstore.PullConsumer.close`: of the last poll only what the same task of the loop polled is taken for
        done. Who is cancelled meanwhile hears of it when it is closed."""
        if not self._bridge.closed:
            await self._bridge.finish(self._as_caller(partial(self.sync.close, done=done)))

    async def _call(self, work: Callable[[], T]) -> T:
        return await self._bridge.call(self._as_caller(work))

    def _as_caller(self, work: Callable[[], T]) -> Callable[[], T]:
        """`work` for the thread, which the sync consumer takes for the poller only if this task is."""
        if self._is_poller():
            return work

        def as_another() -> T:
            poller, self.sync._poller = self.sync._poller, None
            try:
                return work()
            finally:
                self.sync._poller = poller

        return as_another

    def _is_poller(self) -> bool:
        return self._poller is None or self._poller() is asyncio.current_task()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close(done=error is None)

    def __repr__(self) -> str:
        return repr(self.sync)
