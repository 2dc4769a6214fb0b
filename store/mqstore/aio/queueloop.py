"""Worker loops of a queue with coroutines, for `Queue.run` (clients#queue-run).

Each loop is a task of the event loop. A halt cancels those that wait for an item or for their rate. After the grace all
are cancelled, and a cancelled handler's item is released.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from mqstore.aio.lease import Task
from mqstore.client.push.handlers import check_has_run
from mqstore.client.push.workers import at_signals
from mqstore.errors import MQStoreError, StoreClosedError
from mqstore.queueloop import ENDED, LOOK_S, PAUSE_S, QueueRun, RunSummary

if TYPE_CHECKING:
    from mqstore.aio.queue import Queue

_CANCEL_S: Final = 5.0
"""Time for cancelled handlers to end."""


class LoopRun(QueueRun):
    """Run with coroutines. Made on the event loop."""

    def __init__(self, twin: Queue[Any], handler: Callable[[Task[Any]], object], *options: Any) -> None:
        super().__init__(twin.sync, handler, *options, coroutines=True)
        self._twin = twin
        self._bridge = twin._bridge
        self._handler = handler
        self._woken = asyncio.Event()
        self._is_halted = False
        self._idle: set[asyncio.Task[None]] = set()
        """Loops that wait for an item or for their rate."""

    async def run(self) -> RunSummary:
        self._bridge.check()
        cancelled: asyncio.CancelledError | None = None
        with at_signals(self.stop, self.interrupt):
            self.queue._runs.add(self.wake)
            loops = [asyncio.create_task(self._loop(), name=f"run of {self.queue.name}") for _ in range(self.workers)]
            ended = asyncio.gather(*loops, return_exceptions=True)
            ended.add_done_callback(lambda _: self._woken.set())
            renewal = asyncio.create_task(self._renew())
            try:
                while not ended.done() and (left_s := self.left_s()) > 0:
                    self._woken.clear()
                    try:
                        async with asyncio.timeout(min(left_s, LOOK_S)):
                            await self._woken.wait()
                    except TimeoutError:
                        continue
                    except asyncio.CancelledError as error:
                        if cancelled is not None or self._stopping:
                            raise
                        cancelled = error
                        self._stopping = True
            finally:
                self.queue._runs.discard(self.wake)
                for each in (renewal, *loops):
                    each.cancel()
                await asyncio.wait([renewal, *loops], timeout=_CANCEL_S)
                await self._bridge.finish(self.release_rest)
        summary = self.summary()
        if cancelled is not None:
            raise cancelled
        return summary

    def wake(self) -> None:
        self._bridge.post(self._woken.set)

    def halt(self) -> None:
        self._is_halted = True
        for loop in self._idle:
            loop.cancel()

    async def _renew(self) -> None:
        with suppress(StoreClosedError):
            while True:
                await asyncio.sleep(self.renew_s)
                await self._bridge.call(self.renew)

    async def _wait(self, awaited: Any) -> Any:
        """Await something that a halt may cancel."""
        me = asyncio.current_task()
        assert me is not None
        self._idle.add(me)
        try:
            return await awaited
        finally:
            self._idle.discard(me)

    async def _loop(self) -> None:
        while not self._is_halted:
            try:
                task = await self._wait(self._twin.get())
            except ENDED:
                return
            except MQStoreError as error:
                self.failed(error)
                await self._wait(asyncio.sleep(PAUSE_S))
                continue
            with self.leased(task.sync):
                async with task:
                    await self._handle(task)

    async def _handle(self, task: Task[Any]) -> None:
        wait_s, parked = self.wait_s(task.sync)
        if parked:
            await task.release(delay=wait_s)
            return
        if wait_s:
            await self._wait(asyncio.sleep(wait_s))
        result = self._handler(task)
        if inspect.isawaitable(result):
            try:
                result = await result
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is None or current.cancelling():
                    raise
                raise RuntimeError("the handler was cancelled") from None
        check_has_run(result)
