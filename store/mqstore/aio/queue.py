"""Persistent queue with coroutines (clients#queue).

    put      on the loop: a few microseconds. On the store's thread: large items, and queues with `maxsize`
    get      on the loop, if the item was prefetched and no lock is held. Else it looks on the store's thread, and
             waits at the queue's callback door
    settle   see `lease.py`

Callers that wait for room stand in line, and only the first looks. It looks when an item is settled, and every 0.25 s,
since other consumers and time settle items too.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from mqstore import queue
from mqstore.aio.bridge import Bridge
from mqstore.aio.deadletters import DeadLetters
from mqstore.aio.lease import Lease as AsyncLease
from mqstore.aio.made import Each
from mqstore.aio.puts import Puts
from mqstore.aio.twin import Closable, Value, called
from mqstore.broker.broker import Broker
from mqstore.broker.road import SendOptions
from mqstore.client.codecs import BYTES
from mqstore.client.delivery import release
from mqstore.client.interceptors import Settled
from mqstore.errors import QueueEmpty, QueueFull, QueueShutDown
from mqstore.log.commitlog import SendReceipt
from mqstore.options import Duration, seconds
from mqstore.store import Store

__all__ = ["Queue", "Task", "limit"]

_LOOK_S = 0.25


def _no_task() -> None:
    return None


def limit(timeout: Duration | None) -> float | None:
    """Return the longest wait in seconds, or None for ever. Raises ConfigError for a bad time."""
    wait_s = None if timeout is None else seconds(timeout, "timeout")
    return None if wait_s == math.inf else wait_s


class Task(AsyncLease[queue.Task]):
    """Leased item with coroutines.
    `async with task:` acknowledges it at a clean end, and gives it back after an exception. If cancelled, the item is
    released at once, and the attempt does not count.

    >>> import asyncio, mqstore, tempfile
    >>> async def main(folder):
    ...     async with mqstore.aio.open(folder) as store, store.queue("jobs") as queue:
    ...         await queue.put(b"a.png")
    ...         async with await queue.get() as task:
    ...             return task.value, task.attempt
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    (b'a.png', 1)
    """

    __slots__ = ()

    value = Value[Any]()

    async def __aenter__(self) -> Task:
        return self


class _Told(queue.Queue):
    """Synchronous queue that reports settlements, and leaves the disk to the caller."""

    def __init__(self, bridge: Bridge, broker: Broker, name: str, **options: Any) -> None:
        self.waiting: set[asyncio.Future[None]] = set()
        """Futures that are set when something is settled, on the loop."""
        self._tell = bridge.tell
        super().__init__(broker, name, **options)

    def _settled(self, task: queue.Task, outcome: Settled) -> None:
        if self._waiting:
            super()._settled(task, outcome)
        if self.waiting:
            self._tell(self.ring)

    def ring(self) -> None:
        """Wake the waiting callers, on the loop."""
        waiting, self.waiting = self.waiting, set()
        for news in waiting:
            if not news.done():
                news.set_result(None)

    @property
    def left(self) -> bool:
        """True if the remaining items will not be taken any more."""
        return self._shut == "all"

    def check_open(self) -> None:
        if self._shut:
            raise QueueShutDown(f"queue {self.name!r} was shut down")

    def append(self, body: bytes, delay: Duration | None) -> Future[SendReceipt]:
        """Put an encoded item without waiting for room. Return a future for the disk."""
        self.check_open()
        options: SendOptions = {} if delay is None else {"delay": delay}
        with self._changed:
            self._wait_for_room(1, False, None)
            future = self._broker.put_async(self.name, body, queue_id=0, **options)
        if delay is not None:
            future.add_done_callback(partial(self._note, delay))
        return future

    def _note(self, delay: Duration, done: Future[SendReceipt]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.note_delay(done.result(), delay)

    def note_delay(self, receipt: SendReceipt, delay: Duration) -> None:
        """Have `join` wait for an item that was put with a delay."""
        self._note_delay(receipt)


class Queue(Closable[_Told]):
    """Persistent queue with coroutines, made by `Store.queue`.
    An `await queue.get()` that is cancelled, at any moment, has taken nothing. A cancelled `put` has stored the item or
    has not.

    >>> import mqstore, mqstore.aio, tempfile
    >>> async def main(folder):
    ...     async with mqstore.aio.open(folder) as store, store.queue("jobs", codec=mqstore.JSON) as jobs:
    ...         await jobs.put({"page": 7})
    ...         async with await jobs.get() as task:
    ...             print(task.value, task.attempt)
    ...         print(await jobs.empty())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    {'page': 7} 1
    True
    """

    def __init__(self, bridge: Bridge, puts: Puts, store: Store, name: str, **options: Any) -> None:
        """Make the queue, on the store's thread."""
        super().__init__(bridge, _Told(bridge, store.broker, name, **options))
        self.name = name
        self._puts = puts
        codec = options.get("codec")
        self._codec = BYTES if codec is None else codec
        self._bounded = bool(options.get("maxsize"))
        self._line = asyncio.Lock()
        """Line of the callers that wait for room."""
        self._last: WeakKeyDictionary[asyncio.Task[Any], list[Task]] = WeakKeyDictionary()
        """Last item of each task of the loop, in a list of one."""
        self._latest: tuple[Callable[[], asyncio.Task[Any] | None], list[Task]] = _no_task, []
        """The entry of `_last` that was used last, since finding it costs a fraction of a get."""

    # -- in ---------------------------------------------------------------------------------------------------------

    async def put(
        self, item: Any, block: bool = True, timeout: Duration | None = None, *, delay: Duration | None = None
    ) -> None:
        """Put as `mqstore.Queue.put`. Items are stored in the order of the calls."""
        body = self._codec.encode(item)
        if not self._bounded:
            self.sync.check_open()
            options: SendOptions = {} if delay is None else {"delay": delay}
            receipt = await self._puts.put(self.name, body, 0, options)
            if delay is not None:
                self.sync.note_delay(receipt, delay)
            return
        append = partial(self.sync.append, body, delay)
        left_s = limit(timeout)
        stored = await (self._append_in_turn(append, left_s) if block else self._bridge.call(append))
        await self._bridge.wait(stored)

    async def _append_in_turn(
        self, append: Callable[[], Future[SendReceipt]], timeout_s: float | None
    ) -> Future[SendReceipt]:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._line.acquire()
        except TimeoutError:
            raise QueueFull(f"queue {self.name!r} has had no room for {timeout_s:g} s") from None
        try:
            while True:
                # Before the look, so that later settlements are noticed.
                news = self._listen()
                try:
                    return await self._bridge.call(append)
                except QueueFull:
                    left_s = _LOOK_S if end is None else end - time.monotonic()
                    if left_s <= 0:
                        raise
                    await asyncio.wait((news,), timeout=min(left_s, _LOOK_S))
                finally:
                    self.sync.waiting.discard(news)
        finally:
            self._line.release()

    async def put_nowait(self, item: Any) -> None:
        """Put as `mqstore.Queue.put_nowait`."""
        await self.put(item, block=False)

    async def put_many(self, items: Iterable[Any], *, delay: None = None) -> None:
        """Put as `mqstore.Queue.put_many`."""
        given = list(items)  # the iterable is the caller's, so it is read here
        await self._puts.in_order(partial(self.sync.put_many, given, delay=delay))

    # -- out --------------------------------------------------------------------------------------------------------

    async def get(
        self, block: bool = True, timeout: Duration | None = None, *, visibility: Duration | None = None
    ) -> Task:
        """Get as `mqstore.Queue.get`. If cancelled, it has taken nothing, and another receiver is called."""
        left_s = (None if timeout is None else limit(timeout)) if block else 0
        self._bridge.check()
        if self._bridge.is_turn_over():
            await asyncio.sleep(0)  # before the get: a caller that is cancelled here has taken nothing
        if not self._bridge.taking_back:  # released items go first
            task = self.sync.get_at_once(visibility)
            if task is not None:
                return self._taken(task)

        def look() -> list[queue.Task] | None:
            try:
                return [self.sync.get(False, visibility=visibility)]
            except QueueEmpty:
                return None

        found = await self._look(look, left_s)
        if not found:
            raise QueueEmpty(f"nothing to get from queue {self.name!r}")
        return self._taken(found[0])

    async def get_nowait(self) -> Task:
        """Get as `mqstore.Queue.get_nowait`."""
        return await self.get(block=False)

    async def get_many(self, max_items: int, timeout: Duration | None = 0) -> list[Task]:
        """Get as `mqstore.Queue.get_many`."""
        found = await self._look(lambda: self.sync.get_many(max_items, 0) or None, limit(timeout))
        return [self._taken(each) for each in found or ()]

    async def _look(
        self, look: Callable[[], list[queue.Task] | None], timeout_s: float | None
    ) -> list[queue.Task] | None:
        return await self._bridge.look(look, self.sync.when_ready, timeout_s=timeout_s, undo=release)

    def _taken(self, found: queue.Task) -> Task:
        task = Task(self._bridge, found)
        current = asyncio.current_task(self._bridge.loop)
        if current is not None:
            latest, last = self._latest
            if latest() is not current:
                last = self._last.setdefault(current, [])
                self._latest = weakref.ref(current), last
            last[:] = (task,)
        return task

    def __aiter__(self) -> AsyncIterator[Task]:
        """Yield tasks until nothing is ready. It does not wait for the next attempts of failed items."""
        return Each(self._next)

    async def _next(self) -> Task | None:
        try:
            return await self.get(block=False)
        except (QueueEmpty, QueueShutDown):
            return None

    # -- done -------------------------------------------------------------------------------------------------------

    async def ack(self, task: Task) -> None:
        """Call `await task.ack()`."""
        await task.ack()

    async def nack(self, task: Task, delay: Duration | None = None) -> None:
        """Call `await task.nack(delay)`."""
        await task.nack(delay)

    async def task_done(self) -> None:
        """Acknowledge the last item of this task of the loop. Raises ValueError if there is none."""
        current = asyncio.current_task()
        last = None if current is None else self._last.get(current)
        if not last:
            raise ValueError("task_done() called, but this task has no item that it did not call it for")
        await last[0].ack()
        last.clear()

    async def join(self, timeout: Duration | None = None) -> bool:
        """Wait as `mqstore.Queue.join`."""
        left_s = limit(timeout)
        end = None if left_s is None else time.monotonic() + left_s
        while True:
            news = self._listen()
            try:
                if await self._bridge.call(partial(self.sync.join, 0)):
                    return True
                left_s = _LOOK_S if end is None else end - time.monotonic()
                if left_s <= 0 or self.sync.left:
                    return False
                await asyncio.wait((news,), timeout=min(left_s, _LOOK_S))
            finally:
                self.sync.waiting.discard(news)

    def _listen(self) -> asyncio.Future[None]:
        """Return a future that is done when something is settled, or the queue is shut."""
        self._bridge.check()
        news = self._bridge.loop.create_future()
        self.sync.waiting.add(news)
        return news

    # -- state ------------------------------------------------------------------------------------------------------

    qsize = called(queue.Queue.qsize)
    empty = called(queue.Queue.empty)
    full = called(queue.Queue.full)

    @property
    def dead_letters(self) -> DeadLetters:
        """Items that were rejected or failed too often."""
        return DeadLetters(self._bridge, self.sync.dead_letters)

    # -- the end ----------------------------------------------------------------------------------------------------

    async def shutdown(self, immediate: bool = False) -> None:
        """Shut down as `mqstore.Queue.shutdown`. A cancellation is raised once it is shut."""
        if self._bridge.closed:
            self.sync.shutdown(immediate)
        else:
            await self._bridge.finish(partial(self.sync.shutdown, immediate))
        self.sync.ring()

    async def _leave(self, error: BaseException | None) -> None:
        await self.shutdown(immediate=True)
