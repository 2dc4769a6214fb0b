"""Store with coroutines.

    put                        on the loop (`loop_thread.py`)
    reads, tables, the rest    on the store's thread, iterators a page at a time
    close                      push consumers end their handlers first; then on the thread, to its end

A store belongs to the loop on which it was opened. Other stores, in other directories, may belong to other loops.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

import mqstore
from mqstore import store as sync
from mqstore.aio.base import Closable, Made, Pages, Value, called, made, paged, takes
from mqstore.aio.consumers import DeadLetters, PullConsumer, SimpleConsumer
from mqstore.aio.loop_thread import LoopThread, uncancelled
from mqstore.aio.producer import Producer
from mqstore.aio.pushconsumer import PushConsumer
from mqstore.aio.queue import Queue
from mqstore.client.items.codecs import Codec, T
from mqstore.client.waits import Ready
from mqstore.contract import SendOptions
from mqstore.files.safe_open import resolved
from mqstore.log.commitlog import SendReceipt
from mqstore.log.message import Message
from mqstore.log.reading.iteration import AtEnd, Begin
from mqstore.log.recovery.report import RecoveryReport
from mqstore.log.writing.outgoing import Body
from mqstore.options import Duration, seconds
from mqstore.queue import QueueOptions
from mqstore.signalsafe import Lock

if TYPE_CHECKING:
    from mqstore.remote.dialing import Tls

_LOOK_S = 0.02
"""Time between the looks of a follower, if another process writes the store."""
_NEW_QUEUES_S = 1.0
"""Time between the looks of a follower for new queues, and for unreported news."""


@takes(mqstore.open)
def open(path: str | PathLike[str], *args: Any, **options: Any) -> Made[Store]:  # noqa: A001
    """Open a store as `mqstore.open` does.
    Use `async with mqstore.aio.open(path) as store`, or `await mqstore.aio.open(path)`, and then close it."""

    path = resolved(path)  # now: it is opened later, by another thread
    return _opened(path, partial(mqstore.open, path, *args, **options))


def connect(
    address: str | PathLike[str],
    *,
    timeout: Duration = 10,
    access_key: str | None = None,
    secret_key: str | None = None,
    tls: Tls = None,
) -> Made[Store]:
    """Connect as `mqstore.connect` does. Use it as `open`."""
    # Looked up later: it loads the client of servers.
    return _opened(
        fspath(address),
        lambda: mqstore.connect(address, timeout=timeout, access_key=access_key, secret_key=secret_key, tls=tls),
    )


def _opened(name: str, make: Callable[[], sync.Store]) -> Made[Store]:
    async def begin() -> Store:
        bridge = LoopThread(f"store {name!r}")
        try:
            return Store(bridge, await bridge.call(make, sync.Store.close))
        except BaseException:
            bridge.close()
            raise

    return Made(begin)


class Store(Closable[sync.Store]):
    """Store with coroutines: the same names, arguments, results and errors as `mqstore.Store`.
    Opened by `mqstore.aio.open`. `async with` closes it. Calls from another loop than its own raise RuntimeError.
    Any thread may use `sync`."""

    path = Value[Path]()
    mode = Value[str]()
    recovery = Value[RecoveryReport]()

    create_topic = called(sync.Store.create_topic)
    topics = called(sync.Store.topics)
    queues = called(sync.Store.queues)
    put_many = called(sync.Store.put_many, LoopThread.in_order)
    recall = called(sync.Store.recall)
    read = called(sync.Store.read)
    to_arrow = called(sync.Store.to_arrow)
    find = called(sync.Store.find)
    get = called(sync.Store.get)
    offsets = called(sync.Store.offsets)
    offset_at = called(sync.Store.offset_at)
    committed = called(sync.Store.committed)
    commit_offset = called(sync.Store.commit_offset)
    lag = called(sync.Store.lag)
    stats = called(sync.Store.stats)
    verify = paged(sync.Store.verify)
    snapshot = called(sync.Store.snapshot, LoopThread.apart)
    flush = called(sync.Store.flush)
    serve = called(sync.Store.serve)

    if TYPE_CHECKING:

        @overload
        def queue(self, name: str, *, codec: Codec[T], **options: Unpack[QueueOptions]) -> Made[Queue[T]]: ...
        @overload
        def queue(self, name: str, *, codec: None = None, **options: Unpack[QueueOptions]) -> Made[Queue[bytes]]: ...
        def queue(self, *args: Any, **options: Any) -> Made[Queue[Any]]: ...

    else:
        queue = made(sync.Store.queue, Queue)
    producer = made(sync.Store.producer, Producer)
    simple_consumer = made(sync.Store.simple_consumer, SimpleConsumer)
    pull_consumer = made(sync.Store.pull_consumer, PullConsumer)
    push_consumer = made(sync.Store.push_consumer, PushConsumer)

    def __init__(self, bridge: LoopThread, sync: sync.Store) -> None:
        super().__init__(bridge, sync)
        bridge.store = sync
        self._end: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        """True if `close` was called, or this is a forked child of the process that opened it."""
        return self._bridge.closed or self.sync.closed

    async def put(
        self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]
    ) -> SendReceipt:
        """Put as `mqstore.Store.put`. Messages are stored in the order of the calls.
        With durability "flush" all waiting puts share a sync, and the loop continues. If cancelled, the message is
        stored whole or not at all."""
        return await self._bridge.put(topic, body, queue_id=queue_id, **options)

    def iter(
        self,
        topic: str,
        queue_id: int | None = None,
        *,
        start: Begin = "earliest",
        stop: int | None = None,
        follow: bool = False,
        tags: str | None = "*",
    ) -> AsyncIterator[Message]:
        """Iterate with `async for`, as `mqstore.Store.iter`. With `follow` it waits without a thread."""
        parts = self.sync._in_parts(topic, queue_id, start, stop, follow, tags)  # noqa: SLF001
        return _Follower(self._bridge, parts, tags)

    def dead_letters(self, group: str) -> DeadLetters:
        """Return dead letters as `mqstore.Store.dead_letters`."""
        return DeadLetters(self._bridge, self.sync.dead_letters(group))

    async def close(self, timeout: Duration = 30) -> None:
        """Close as `mqstore.Store.close`. A cancellation is raised once it is closed.
        Handlers of push consumers end, or are cancelled after `timeout` seconds. Then all else is closed, and waiting
        callers get StoreClosedError. It does not wait when called by a handler, since it would wait for that
        handler."""
        timeout_s = seconds(timeout, "timeout")
        if self._end is None:
            self._bridge.check()
            self._end = self._bridge.loop.create_task(self._close(timeout_s))
        if not any(consumer.is_mine() for consumer in self._bridge.consumers):
            await uncancelled(self._end)

    async def _close(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        try:
            await asyncio.gather(
                self._bridge.finish(self.sync._stop_handlers),  # consumers made by `sync` too
                *(consumer.stop(timeout_s) for consumer in tuple(self._bridge.consumers)),
            )
        finally:
            try:
                await self._bridge.finish(partial(self.sync._close_stopped, timeout_s, until))
            finally:
                await self._bridge.finish(lambda: None)  # after the looks that the closing of consumers has called
                self._bridge.close()

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class _Follower(Pages[Message]):
    """Present and future messages of one queue, or all of a topic."""

    def __init__(self, bridge: LoopThread, parts: Iterator[Iterable[Message]], tags: str | None) -> None:
        super().__init__(bridge, lambda: iter(()))
        self._parts = parts
        self._tags = tags
        self._end = AtEnd({})

    async def _fill(self) -> None:
        every_s = _NEW_QUEUES_S if self._bridge.store.mode == "rw" else _LOOK_S
        await self._bridge.look(self._find, self._park, timeout_s=None, every_s=every_s)

    def _find(self) -> bool | None:
        """Read a page. Return True if there is something, None if not yet, and False at the stop."""
        self._read()
        while not self._page:
            part = next(self._parts, None)
            if part is None:
                return False
            if isinstance(part, AtEnd):
                self._end = part
                return None
            self._items = iter(part)
            self._read()
        return True

    def _park(self, again: Callable[[], object]) -> Callable[[], object]:
        """Have `again` called when there may be something to read, if this process writes the store."""
        ready = Ready(again, Lock(), set())
        for ref, offset in self._end.positions.items() if self._bridge.store.mode == "rw" else ():
            ready.park(self._bridge.store.broker, *ref, offset, self._tags)
        return ready.cancel
