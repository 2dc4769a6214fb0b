"""Leases and dead letters with coroutines, and consumers that are asked for messages (clients#simple,
clients#pull-consumer).

    ack, clean end of a block    on the loop, if no lock and no disk has to be waited for; else on the store's thread
    other verbs, other ends      on the store's thread

A poll of a pull consumer means that the caller is done with the messages of earlier polls. By default the synchronous
consumer knows its caller by the thread. Here the store's thread makes all calls, and the caller is a task of the loop.
So the messages that one task polled are not taken for done if another task closes or unsubscribes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Self, TypeVar

from mqstore import contract
from mqstore.aio.base import AsyncBase, Closable, Value, called, like, limit, paged
from mqstore.aio.loop_thread import LoopThread
from mqstore.client.items.codecs import T
from mqstore.client.pop import delivery, simpleconsumer
from mqstore.client.pop.delivery import release
from mqstore.client.pull import consumer as pullconsumer
from mqstore.errors import MQStoreError
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message
from mqstore.options import Duration

L = TypeVar("L", bound=delivery.Lease)
R = TypeVar("R")
S = TypeVar("S", covariant=True)


class Lease(AsyncBase[L]):
    """A delivery that has to be settled. No verb can be cancelled half way: CancelledError is raised when it has
    ended."""

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

    @like(delivery.Lease.ack)
    async def ack(self) -> None:
        """If cancelled, that is raised when it has ended."""
        self._bridge.check()
        if not self.sync._ack_at_once():
            await self._bridge.finish(self.sync.ack)
        elif self._bridge.is_turn_over():
            await asyncio.sleep(0)

    async def __aexit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if error is None:
            if not self.sync.settled:
                await self.ack()
            return False
        leave = partial(self.sync.__exit__, kind, error, traceback)
        # A generator that is being closed cannot wait.
        return leave() if isinstance(error, GeneratorExit) else await self._bridge.finish(leave)


class Task(Lease[delivery.Task[T]], Generic[T]):
    """`mqstore.Task` with coroutines, for `async with task:`.
    If the block is cancelled, the item is released at once, and the attempt does not count."""

    __slots__ = ()

    value = Value[T]()

    async def __aenter__(self) -> Self:
        return self


class Delivery(Lease[delivery.Delivery]):
    """`mqstore.Delivery` with coroutines, for `async with delivery as message:`.
    If the block is cancelled, it is released unseen."""

    __slots__ = ()

    receipt = Value[str]()

    async def __aenter__(self) -> Message:
        return self.sync.message


class DeadLetters(AsyncBase[contract.DeadLetters]):
    """`mqstore.engine.DeadLetters` with coroutines: list, replay and purge the dead letters of a group."""

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


class Receiver(Closable[S]):
    """Object that is asked for messages."""

    async def _look(
        self, look: Callable[[], list[R] | None], timeout_s: float | None, undo: Callable[[list[R]], object]
    ) -> list[R]:
        """Return the messages that `look` finds within `timeout_s`."""
        return await self._bridge.look(look, self._park, timeout_s=timeout_s, undo=undo) or []

    def _park(self, again: Callable[[], object]) -> Callable[[], object]:
        sync: Any = self.sync
        cancel: Callable[[], object] = sync._when_ready(again).cancel
        return cancel


class _Consumer(Receiver[S]):
    group = Value[str]()
    client_id = Value[str]()

    @property
    def _closed(self) -> bool:
        sync: Any = self.sync
        return bool(sync._closed)

    async def _received(
        self, receive: Callable[[], list[R]], wait_s: float | None, undo: Callable[[list[R]], object]
    ) -> list[R]:
        """Return the messages that `receive` finds within `wait_s`, or nothing if the consumer is closed meanwhile."""
        return await self._look(lambda: receive() or ([] if self._closed else None), wait_s, undo)


class SimpleConsumer(_Consumer[simpleconsumer.SimpleConsumer]):
    """`mqstore.SimpleConsumer` with coroutines, made by `Store.simple_consumer`.
    A `receive` that is cancelled, at any time, has received nothing. Interceptors are called on the loop and on the
    store's thread."""

    ordered = Value[bool]()
    subscriptions = Value[dict[str, str]]()
    subscribe = called(simpleconsumer.SimpleConsumer.subscribe)
    unsubscribe = called(simpleconsumer.SimpleConsumer.unsubscribe)
    pending = called(simpleconsumer.SimpleConsumer.pending)
    close = called(simpleconsumer.SimpleConsumer.close, LoopThread.finish)

    @like(simpleconsumer.SimpleConsumer.receive)
    async def receive(self, max_messages: int = 1, *, wait: Duration = 20, **options: Any) -> list[Delivery]:
        """If cancelled, it has received nothing, and another receiver is called."""
        receive = partial(self.sync._receive, *self.sync._asked(max_messages, **options), 0)
        return [Delivery(self._bridge, each) for each in await self._received(receive, limit(wait), undo=release)]

    def __aiter__(self) -> SimpleConsumer:
        """Yield deliveries one at a time, waiting for ever, until the consumer is closed."""
        return self

    async def __anext__(self) -> Delivery:
        for found in [] if self._closed else await self.receive(wait=math.inf):
            return found
        raise StopAsyncIteration


class PullConsumer(_Consumer[pullconsumer.PullConsumer]):
    """`mqstore.PullConsumer` with coroutines, made by `Store.pull_consumer`.
    A `poll` that is cancelled, at any time, has returned nothing, and the next one begins at the same message.
    `on_assign`, `on_revoke` and interceptors are plain functions, called on the store's thread."""

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
    close = called(pullconsumer.PullConsumer.close, LoopThread.finish)

    def __init__(self, bridge: LoopThread, sync: pullconsumer.PullConsumer) -> None:
        super().__init__(bridge, sync)
        self.sync.caller = bridge.caller

    @like(pullconsumer.PullConsumer.poll)
    async def poll(self, timeout: Duration | None = 5.0, max_messages: int | None = None) -> list[Message]:
        """If cancelled, it has returned nothing."""
        count = self.sync._asked(max_messages)
        return await self._received(partial(self.sync._take, 0, count, count), limit(timeout), undo=self._unread)

    def __aiter__(self) -> PullConsumer:
        """Yield messages one at a time, waiting for ever, until the consumer is closed.
        A request for the next message means that the caller is done with the last."""
        return self

    async def __anext__(self) -> Message:
        take = partial(self.sync._take, 0, self.sync.fetch_max, 1)
        for message in [] if self._closed else await self._received(take, None, undo=self._unread):
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
