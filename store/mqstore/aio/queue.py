"""Persistent queue with coroutines (clients#queue).

    put      on the loop: a few microseconds. On the store's thread: large items, and queues with `maxsize`
    get      on the loop, if the item was prefetched and no lock is held. Else it looks on the store's thread, and
             waits at the queue's callback door
    run      each worker is a task of the loop. A halt cancels those that wait for an item or for their rate. After the
             grace all are cancelled, and a cancelled handler's item is released

Callers that wait for room queue up, and only the first looks. It looks when an item is settled, and every 0.25 s,
since other consumers and time settle items too.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, Self, TypeVar, Unpack
from weakref import WeakKeyDictionary, ref

from mqstore import queue
from mqstore.aio.base import Value, called, like, limit, paged
from mqstore.aio.consumers import DeadLetters, Receiver, Task
from mqstore.aio.loop_thread import LoopThread
from mqstore.client.items.codecs import T
from mqstore.client.items.itemoptions import BLOCKING, ItemOptions, send_options
from mqstore.client.pop.delivery import Task as SyncTask
from mqstore.client.pop.delivery import release
from mqstore.client.push.handlers import check_has_run
from mqstore.errors import QueueEmpty, QueueFull, QueueShutDown, StoreClosedError
from mqstore.getany import AnyOf, queues_of
from mqstore.log.commitlog import SendReceipt
from mqstore.options import Duration
from mqstore.queueloop import QueueRun, RunSummary

_LOOK_S = 0.25
_CANCEL_S: Final = 5.0
"""Time for cancelled handlers of `run` to end."""

R = TypeVar("R")


class Queue(Receiver[queue.Queue[T]], Generic[T]):
    """`mqstore.Queue` with coroutines, made by `Store.queue`.
    An `await queue.get()` that is cancelled, at any time, has taken nothing. A cancelled `put` has stored the item or
    has not."""

    name = Value[str]()
    qsize = called(queue.Queue.qsize)
    empty = called(queue.Queue.empty)
    full = called(queue.Queue.full)
    cancel = called(queue.Queue[T].cancel)
    find = called(queue.Queue[T].find)
    put_many = called(queue.Queue[T].put_many, LoopThread.in_order)
    shutdown = called(queue.Queue.shutdown, LoopThread.finish)
    items = paged(queue.Queue[T].items)
    peek = called(queue.Queue[T].peek)
    counts = called(queue.Queue.counts)
    purge = called(queue.Queue.purge, LoopThread.finish)

    def __init__(self, bridge: LoopThread, sync: queue.Queue[T]) -> None:
        super().__init__(bridge, sync)
        self._codec = sync._codec
        self._maxsize = sync._maxsize
        self._line = asyncio.Lock()
        """Line of the callers that wait for room."""
        self._last: WeakKeyDictionary[asyncio.Task[Any], list[Task[T]]] = WeakKeyDictionary()
        """Last item of each task of the loop, in a list of one."""
        self._caller: tuple[Callable[[], asyncio.Task[Any] | None], list[Task[T]]] = (lambda: None), []
        """The last caller, weakly, and its list: looking for it takes longer than the rest of a get."""

    # -- in ---------------------------------------------------------------------------------------------------------

    async def put(
        self, item: T, block: bool = True, timeout: Duration | None = None, **options: Unpack[ItemOptions]
    ) -> SendReceipt:
        """Put as `mqstore.Queue.put`. Items are stored in the order of the calls."""
        body = self._codec.encode(item)
        if self._maxsize:
            append = partial(self.sync._append, body, options)
            stored = await (self._append_in_turn(append, limit(timeout)) if block else self._bridge.call(append))
            if stored is None:
                raise QueueFull(f"queue {self.name!r} has no room for more than {self._maxsize} items")
            return await asyncio.wrap_future(stored)
        self.sync._check_puts()
        if BLOCKING.isdisjoint(options):
            put_options = send_options(self.sync._broker, self.sync._topic, options)
            return await self._bridge.put(self.sync._topic, body, queue_id=0, **put_options)
        return await self._bridge.in_order(partial(self.sync._put, body, options))

    async def _append_in_turn(self, append: Callable[[], R | None], timeout_s: float | None) -> R | None:
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._line.acquire()
        except TimeoutError:
            return None
        try:
            return await self._until(append, None if end_s is None else max(0, end_s - time.monotonic()))
        finally:
            self._line.release()

    async def _until(self, look: Callable[[], R | None], timeout_s: float | None) -> R | None:
        """Return the result of `look`, repeated when an item was settled."""
        return await self._bridge.look(look, self.sync._when_changed, timeout_s=timeout_s, every_s=_LOOK_S)

    @like(queue.Queue.put_nowait)
    async def put_nowait(self, item: T, **options: Unpack[ItemOptions]) -> SendReceipt:
        return await self.put(item, block=False, **options)

    # -- out --------------------------------------------------------------------------------------------------------

    async def get(
        self,
        block: bool = True,
        timeout: Duration | None = None,
        *,
        visibility: Duration | None = None,
        done: Sequence[Task[T]] = (),
    ) -> Task[T]:
        """Get as `mqstore.Queue.get`. If cancelled, it has taken nothing, and another receiver is called. Tasks that
        are `done` are acknowledged each in a call."""
        wait_s = limit(timeout) if block else 0
        for each in done:
            await each.ack()
        current = self._bridge.check()
        if self._bridge.is_turn_over():
            await asyncio.sleep(0)  # before the get: a caller that is cancelled here has taken nothing
        # Released items go first.
        task = None if self._bridge.taking_back else self.sync._get_at_once(visibility)
        if task is None:

            def look() -> list[SyncTask[T]] | None:
                with suppress(QueueEmpty):
                    return [self.sync.get(False, visibility=visibility)]
                return None

            found = await self._look(look, wait_s, release)
            if not found:
                raise QueueEmpty(f"nothing to get from queue {self.name!r}")
            task = found[0]
        return self._taken(task, current)

    @like(queue.Queue.get_nowait)
    async def get_nowait(self) -> Task[T]:
        return await self.get(block=False)

    async def get_many(
        self, max_items: int, timeout: Duration | None = 0, *, done: Sequence[Task[T]] = ()
    ) -> list[Task[T]]:
        """Get as `mqstore.Queue.get_many`. Tasks that are `done` are acknowledged each in a call."""
        for each in done:
            await each.ack()
        found = await self._look(lambda: self.sync.get_many(max_items, 0) or None, limit(timeout), release)
        current = asyncio.current_task()
        return [self._taken(each, current) for each in found]

    def _taken(self, found: SyncTask[T], current: asyncio.Task[Any] | None) -> Task[T]:
        task = Task(self._bridge, found)
        if current is not None:
            caller, last = self._caller
            if caller() is not current:
                last = self._last.setdefault(current, [])
                self._caller = ref(current), last
            last[:] = (task,)
        return task

    def __aiter__(self) -> Self:
        """Yield tasks until nothing is ready. It does not wait for the next attempts of failed items."""
        return self

    async def __anext__(self) -> Task[T]:
        try:
            return await self.get(block=False)
        except (QueueEmpty, QueueShutDown):
            raise StopAsyncIteration from None

    async def run(
        self,
        handler: Callable[[Task[T]], object],
        workers: int = 4,
        *,
        rate: str | None = None,
        rate_per: Callable[[T], Hashable] | None = None,
        grace: Duration = 30,
    ) -> RunSummary:
        """Handle items as `mqstore.Queue.run`, by `workers` tasks of the loop that await `handler(task)`.
        A plain function is called on the loop. If cancelled, it stops as after a signal, and raises that at its end. A
        second cancellation ends it at once. After the grace the handlers are cancelled."""
        self._bridge.check()
        return await _Run(self, handler, workers, rate, rate_per, grace).go()

    # -- done -------------------------------------------------------------------------------------------------------

    async def ack(self, task: Task[T]) -> None:
        """Call `await task.ack()`."""
        await task.ack()

    async def nack(self, task: Task[T], delay: Duration | None = None) -> None:
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
        return bool(await self._until(self.sync._is_done, limit(timeout)))

    @property
    def dead_letters(self) -> DeadLetters:
        """Items that were rejected or failed too often."""
        return DeadLetters(self._bridge, self.sync.dead_letters)


async def get_any(queues: Iterable[Queue[T]], timeout: Duration | None = None) -> Task[T]:
    """Return the next item of the first of `queues` that has one, as `mqstore.get_any`.
    If cancelled, it has taken nothing."""
    twins = {twin.sync: twin for twin in queues_of(queues, Queue)}
    every: AnyOf[T] = AnyOf(list(twins))
    for twin in twins.values():
        twin._bridge.check()
    # The thread of one store looks at all of them.
    found = await twin._bridge.look(every.look, every.park, timeout_s=limit(timeout), undo=lambda one: release(one[1:]))
    if found is None:
        raise every.empty()
    queue, task = found
    return twins[queue]._taken(task, asyncio.current_task())


class _Run(QueueRun):
    """Run with coroutines. Made on the event loop."""

    def __init__(self, twin: Queue[Any], handler: Callable[[Task[Any]], object], *options: Any) -> None:
        super().__init__(twin.sync, handler, *options, coroutines=True)
        self._twin = twin
        self._bridge = twin._bridge
        self._do = self._bridge.finish
        self._handler = handler
        self._woken = asyncio.Event()
        self._idle: set[Any] = set()
        """Loops that wait for an item or for their rate."""

    def _begin(self) -> None:
        calls = self._renew(), *(self.loop() for _ in range(self.workers))
        self._tasks = [asyncio.create_task(each, name=f"run of {self.queue.name}") for each in calls]

    async def _renew(self) -> None:
        with suppress(StoreClosedError):
            while True:
                await asyncio.sleep(self.renew_s)
                await self._bridge.call(self.renew)

    def wake(self) -> None:
        self._bridge.post(self._woken.set)

    async def _wait(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._woken.wait()
        except TimeoutError:
            pass
        except asyncio.CancelledError as error:
            if self._left is not None or self._stopping:
                raise
            self._left, self._stopping = error, True
        self._woken.clear()

    def _end_waits(self) -> None:
        for loop in self._idle:
            loop.cancel()

    async def _end(self) -> None:
        for each in self._tasks:
            each.cancel()
        await asyncio.wait(self._tasks, timeout=_CANCEL_S)
        await self._bridge.finish(self.release_rest)

    async def _until_halted(self, awaited: Any) -> Any:
        me = asyncio.current_task()
        self._idle.add(me)
        try:
            return await awaited
        finally:
            self._idle.discard(me)

    async def _next(self) -> SyncTask[Any]:
        task: Task[Any] = await self._until_halted(self._twin.get())
        return task.sync

    async def _pause(self, wait_s: float) -> bool:
        await self._until_halted(asyncio.sleep(wait_s))
        return False

    async def _call(self, task: SyncTask[Any]) -> None:
        result = self._handler(Task(self._bridge, task))
        if inspect.isawaitable(result):
            try:
                result = await result
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is None or current.cancelling():
                    raise
                raise RuntimeError("the handler was cancelled") from None
        check_has_run(result)
