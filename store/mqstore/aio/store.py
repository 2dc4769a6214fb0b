"""Store with coroutines.

    put                        on the loop (`puts.py`)
    reads, tables, the rest    on the store's thread (`bridge.py`), iterators a page at a time
    close                      push consumers end their handlers first; then on the thread, to its end

A store belongs to the loop on which it was opened. Other stores, in other directories, may belong to other loops.
"""

from __future__ import annotations

import asyncio
import builtins
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from heapq import merge
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack
from weakref import WeakSet

from mqstore import store as sync_store
from mqstore.aio.bridge import Bridge, uncancelled
from mqstore.aio.deadletters import DeadLetters
from mqstore.aio.made import Made, Pages
from mqstore.aio.producer import Producer
from mqstore.aio.pullconsumer import PullConsumer
from mqstore.aio.pushconsumer import PushConsumer
from mqstore.aio.puts import Puts
from mqstore.aio.queue import Queue
from mqstore.aio.simpleconsumer import SimpleConsumer
from mqstore.aio.twin import Closable, Value, apart, called, paged, takes
from mqstore.broker.road import SendOptions
from mqstore.client.waits import Ready
from mqstore.errors import InvalidMessageError
from mqstore.files.beneath import resolved
from mqstore.log.commitlog import SendReceipt
from mqstore.log.message import Message
from mqstore.log.outgoing import Body
from mqstore.log.recovery.report import RecoveryReport
from mqstore.options import Duration, seconds
from mqstore.signalsafe import Lock

__all__ = ["Store", "open"]

M = TypeVar("M", bound=Closable[Any])
T = TypeVar("T")

_LOOK_S = 0.02
"""Time between the looks of a follower, if another process writes the store."""
_NEW_QUEUES_S = 1.0
"""Time between the looks of a follower for new queues, and for unreported news."""


@takes(sync_store.Store)
def open(path: str | PathLike[str], *args: Any, **options: Any) -> Made[Store]:  # noqa: A001
    """Open a store as `mqstore.open` does.
    Use `async with mqstore.aio.open(path) as store`, or `await mqstore.aio.open(path)`, and then close it."""

    path = resolved(path)  # now: it is opened later, by another thread

    async def begin() -> Store:
        bridge = Bridge(f"store {path!r}")
        try:
            return Store(
                bridge, await bridge.call(partial(sync_store.Store, path, *args, **options), sync_store.Store.close)
            )
        except BaseException:
            bridge.close()
            raise

    return Made(begin)


def _close(made: Closable[Any]) -> None:
    made.sync.close()


class Store(Closable[sync_store.Store]):
    """Store with coroutines: the same names, arguments, results and errors as `mqstore.Store`.
    Opened by `mqstore.aio.open`. `async with` closes it. Calls from another loop than its own raise RuntimeError.
    Any thread may use `sync`.

    >>> import mqstore.aio, tempfile
    >>> async def main(folder):
    ...     async with mqstore.aio.open(folder) as store:
    ...         receipt = await store.put("orders", b"hello", keys="o-1")
    ...         async for message in store.iter("orders"):
    ...             print(message.body, message.keys)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    b'hello' ('o-1',)
    """

    def __init__(self, bridge: Bridge, sync: sync_store.Store) -> None:
        super().__init__(bridge, sync)
        self._puts = Puts(bridge, sync)
        self._consumers: WeakSet[PushConsumer] = WeakSet()
        self._end: asyncio.Task[None] | None = None

    @property
    def closed(self) -> bool:
        """True if `close` was called, or this is a forked child of the process that opened it."""
        return self._bridge.closed or self.sync.closed

    path = Value[Path]()
    mode = Value[str]()
    recovery = Value[RecoveryReport]()

    # -- topics -----------------------------------------------------------------------------------------------------

    create_topic = called(sync_store.Store.create_topic)
    topics = called(sync_store.Store.topics)
    queues = called(sync_store.Store.queues)

    # -- in ---------------------------------------------------------------------------------------------------------

    async def _in_order(self, work: Callable[[], T]) -> T:
        """Store messages in the order of the calls. If cancelled, it has not begun, or runs to its end."""
        return await self._puts.in_order(work)

    put_many = called(sync_store.Store.put_many, _in_order)
    recall = called(sync_store.Store.recall)

    async def put(
        self, topic: str, body: Body, *, queue_id: int | None = None, **options: Unpack[SendOptions]
    ) -> SendReceipt:
        """Put as `mqstore.Store.put`. Messages are stored in the order of the calls.
        With durability "flush" all waiting puts share a sync, and the loop continues. If cancelled, the message is
        stored whole or not at all."""
        return await self._puts.put(topic, body, queue_id, options)

    # -- out --------------------------------------------------------------------------------------------------------

    read = called(sync_store.Store.read)
    to_arrow = called(sync_store.Store.to_arrow)
    find = called(sync_store.Store.find)
    get = called(sync_store.Store.get)

    def iter(
        self,
        topic: str,
        queue_id: int | None = None,
        *,
        start: Literal["earliest", "latest"] | datetime | int = "earliest",
        stop: int | None = None,
        follow: bool = False,
        tags: str | None = "*",
    ) -> AsyncIterator[Message]:
        """Iterate with `async for`, as `mqstore.Store.iter`. With `follow` it waits without a thread."""
        if follow:
            if queue_id is None and (isinstance(start, int) or stop is not None):
                raise InvalidMessageError("start and stop as offsets belong to one queue: give queue_id=", "start")
            return _Follower(self._bridge, self.sync, topic, queue_id, start, stop, tags)
        return Pages(self._bridge, partial(self.sync.iter, topic, queue_id, start=start, stop=stop, tags=tags))

    # -- positions --------------------------------------------------------------------------------------------------

    offsets = called(sync_store.Store.offsets)
    offset_at = called(sync_store.Store.offset_at)
    committed = called(sync_store.Store.committed)
    commit_offset = called(sync_store.Store.commit_offset)
    lag = called(sync_store.Store.lag)

    # -- queues, producers, consumers -------------------------------------------------------------------------------

    @takes(sync_store.Store.queue)
    def queue(self, *args: Any, **options: Any) -> Made[Queue]:
        """Return a persistent queue, to be awaited, or entered by `async with`, which shuts it down at its end."""
        return self._made(Queue, args, options)

    @takes(sync_store.Store.producer)
    def producer(self, *args: Any, **options: Any) -> Made[Producer]:
        """Return a producer, to be awaited, or entered by `async with`, which closes it at its end."""
        return self._made(Producer, args, options, _close)

    @takes(sync_store.Store.simple_consumer)
    def simple_consumer(self, *args: Any, **options: Any) -> Made[SimpleConsumer]:
        """Return a simple consumer, to be awaited, or entered by `async with`, which closes it at its end."""
        return self._made(SimpleConsumer, args, options, _close)

    @takes(sync_store.Store.pull_consumer)
    def pull_consumer(self, *args: Any, **options: Any) -> Made[PullConsumer]:
        """Return a pull consumer, to be awaited, or entered by `async with`, which closes it at its end."""
        return self._made(PullConsumer, args, options, _close)

    def _made(
        self,
        twin: Callable[..., M],
        args: tuple[Any, ...],
        options: dict[str, Any],
        undo: Callable[[M], object] | None = None,
    ) -> Made[M]:
        """Have the store's thread make a `twin`. If the call is cancelled, `undo` is called with it."""
        make = partial(twin, self._bridge, self._puts, self.sync, *args, **options)
        return Made(partial(self._bridge.call, make, undo))

    @takes(sync_store.Store.push_consumer)
    def push_consumer(self, *args: Any, **options: Any) -> Made[PushConsumer]:
        """Return a push consumer with coroutines as handlers, to be awaited or entered."""

        def made() -> PushConsumer:
            consumer = PushConsumer(self._bridge, self.sync.push_consumer(*args, **options))
            self._consumers.add(consumer)
            return consumer

        return Made(partial(self._bridge.call, made, lambda made: made.sync.stop(0)))

    def dead_letters(self, group: str) -> DeadLetters:
        """Return dead letters as `mqstore.Store.dead_letters`."""
        return DeadLetters(self._bridge, self.sync.dead_letters(group))

    # -- the store --------------------------------------------------------------------------------------------------

    stats = called(sync_store.Store.stats)
    verify = paged(sync_store.Store.verify)
    snapshot = called(sync_store.Store.snapshot, apart)
    flush = called(sync_store.Store.flush)

    async def close(self, timeout: Duration = 30) -> None:
        """Close as `mqstore.Store.close`. A cancellation is raised once it is closed.
        Handlers of push consumers end, or are cancelled after `timeout` seconds. Then all else is closed, and waiting
        callers get StoreClosedError. It does not wait when called by a handler, since it would wait for that
        handler."""
        timeout_s = seconds(timeout, "timeout")
        if self._end is None:
            self._bridge.check()
            self._end = self._bridge.loop.create_task(self._close(timeout_s))
        if not any(consumer.is_mine() for consumer in self._consumers):
            await uncancelled(self._end)

    async def _close(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        try:
            await asyncio.gather(
                self._bridge.finish(self.sync.halt),  # consumers made by `sync` too
                *(consumer.stop(timeout_s) for consumer in builtins.list(self._consumers)),
            )
        finally:
            try:
                await self._bridge.finish(partial(self.sync.close_halted, timeout_s, until))
            finally:
                self._bridge.close()

    async def _leave(self, error: BaseException | None) -> None:
        await self.close()


@dataclass(eq=False)
class _Follower(AsyncIterator[Message]):
    """Present and future messages of one queue, or all of a topic. A cancelled step skips nothing."""

    bridge: Bridge
    sync: sync_store.Store
    topic: str
    queue_id: int | None
    start: Literal["earliest", "latest"] | datetime | int
    stop: int | None
    tags: str | None
    positions: dict[int, int] | None = None
    """Next offset to read by queue id. Only the store's thread uses it."""
    round: Pages[Message] | None = None
    """Messages found by the last look."""

    async def __anext__(self) -> Message:
        while True:
            if self.round is None:
                if not await self.bridge.look(self.find, self.park, timeout_s=None):
                    raise StopAsyncIteration
                self.round = Pages(self.bridge, self.read)
            try:
                return await self.round.__anext__()
            except StopAsyncIteration:
                self.round = None

    def find(self) -> bool | None:
        """Return True if there is something to read, None if not yet, and False at the stop."""
        if self.positions is None:
            ids = [ref.queue_id for ref in self.sync.queues(self.topic)] if self.queue_id is None else [self.queue_id]
            self.positions = {each: self._begin(each) for each in ids}
        elif self.queue_id is None:
            for ref in self.sync.queues(self.topic):
                self.positions.setdefault(ref.queue_id, self.sync.offsets(*ref)[0])
        if self.stop is not None and all(offset >= self.stop for offset in self.positions.values()):
            return False
        news = any(self.sync.offsets(self.topic, each)[1] > offset for each, offset in self.positions.items())
        return True if news else None

    def _begin(self, queue_id: int) -> int:
        if isinstance(self.start, int):
            return self.start
        if isinstance(self.start, datetime):
            return self.sync.offset_at(self.topic, queue_id, self.start)
        low, high = self.sync.offsets(self.topic, queue_id)
        return high if self.start == "latest" else low

    def read(self) -> Iterator[Message]:
        """Iterate over the present messages, merged by store time, and move the positions behind them."""
        assert self.positions is not None
        scans = []
        for queue_id, begin in self.positions.items():
            end = self.sync.offsets(self.topic, queue_id)[1]
            end = end if self.stop is None else min(end, self.stop)
            if end > begin:
                scans.append(self.sync.iter(self.topic, queue_id, start=begin, stop=end, tags=self.tags))
                self.positions[queue_id] = end
        return merge(*scans, key=lambda message: (message.store_timestamp_ms, message.physical_offset))

    def park(self, again: Callable[[], object]) -> Ready:
        """Call `again` once, when there may be something to read."""
        ready = Ready(again, Lock(), set())
        if self.sync.mode == "rw":
            for queue_id, offset in (self.positions or {}).items():
                ready.park(self.sync.broker, self.topic, queue_id, offset, self.tags, _NEW_QUEUES_S)
        else:
            self.bridge.tell(lambda: self.bridge.loop.call_later(_LOOK_S, ready.fire))
        return ready
