"""Push consumer with handlers that are coroutines (clients#concurrent, clients#orderly).

    a job of the sync consumer ---> the loop: a task for this call of the handler
             continues at its end <---         returns, raises: the outcome, as of any handler
                                               cancelled by `stop`: nothing is settled, the messages are redelivered
                                               cancelled after `consume_timeout`, unordered: then redelivered

The synchronous consumer decides about results of handlers, retries, order, timeouts and flow control, so these are the
same. A running call holds one of its `workers` and no thread. A few threads begin and settle all calls. An interceptor
with `around_consume`, which is a plain function around the call, changes that: then each running call has a thread,
which waits.

    running ---- stop ----> nothing new is started ---- all have ended ----------------------------> stopped
                                        +-- `timeout` is over: tasks cancelled --- they have ended --+
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, overload

from mqstore.aio.base import Closable, Value, called
from mqstore.aio.loop_thread import LoopThread, settle, uncancelled
from mqstore.client.push import consumer as pushconsumer
from mqstore.client.push import workers
from mqstore.client.push.handlers import check_handler, check_has_run
from mqstore.client.push.workers import at_signals
from mqstore.logger import log as _log
from mqstore.options import Duration, seconds
from mqstore.queueloop import LOOK_S

Handler = Callable[..., Any]
"""Function with the parameters of a synchronous handler. Called on the loop, its result awaited."""
H = TypeVar("H", bound=Handler)

_GRACE_S = 5.0
"""Time for cancelled handlers to end."""
_THREADS = 4
"""Number of threads for hooks and other work around handlers, if there are that many workers."""

_worker: contextvars.ContextVar[workers.Worker | None] = contextvars.ContextVar("mqstore.aio worker", default=None)


def cancelled() -> bool:
    """Return the value of `mqstore.cancelled`, inside a handler that is a coroutine."""
    worker = _worker.get()
    return worker is not None and worker.cancelled()


class _Abandoned(BaseException):
    """Error in a job whose handler was cancelled or whose loop has ended. Nothing is settled."""


@dataclass(eq=False)
class _Run(workers.Awaited):
    """One call of a handler."""

    bridge: LoopThread
    begin: Callable[[_Run], object]
    handler: Handler
    argument: Any
    worker: workers.Worker | None = field(default_factory=workers.current)
    task: asyncio.Task[None] | None = None
    done: list[Callable[[BaseException | None], object]] = field(default_factory=list)
    """Function to call at the end, once. Empty after the call."""

    async def __call__(self) -> None:
        """Call the handler, on the loop."""
        _worker.set(self.worker)
        result = self.handler(self.argument)
        if inspect.isawaitable(result):
            result = await result
        self.decision = check_has_run(result)

    # -- on any thread ----------------------------------------------------------------------------------------------

    def start(self, done: Callable[[BaseException | None], object]) -> None:
        self.done.append(done)
        if not self.bridge.post(partial(self.begin, self)):
            self.look()  # the loop has ended, perhaps after it took the call

    def look(self) -> None:
        """End the call if the loop was closed. Nothing else reports that, and waiting calls are lost."""
        if self.bridge.loop.is_closed() and self.end(_Abandoned("the event loop has ended")):
            # A task that its loop never started is not a fault, so Python must not warn.
            coroutine = self.task and self.task.get_coro()
            if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()
                self.task._log_destroy_pending = False  # type: ignore[union-attr]

    def cancel(self, then: Callable[[], object]) -> None:
        if not self.bridge.post(partial(self._cancel, then)):
            then()

    def _cancel(self, then: Callable[[], object]) -> None:
        """Cancel the task, on the loop. Its message must not wait for ever for a task that continues."""
        if self.task is None:  # the consumer stops
            then()
            return
        self.task.cancel()
        ended = asyncio.wait([self.task], timeout=_GRACE_S)
        self.bridge.loop.create_task(ended).add_done_callback(lambda _: then())

    def end(self, error: BaseException | None) -> bool:
        """Report the end of the call. Return False if that was done before."""
        try:
            done = self.done.pop()
        except IndexError:
            return False
        done(error)
        return True

    def stack(self) -> str:
        """Return the stack of the coroutine and of its awaitables. If it blocks the loop, its thread's stack."""
        if self.task is not None and self.task.done():
            return "  (its end)\n"
        awaited: Any = self.task and self.task.get_coro()
        lines: list[str] = []
        while awaited is not None:
            if getattr(awaited, "cr_running", False):
                return "".join(traceback.format_stack(sys._current_frames().get(self.bridge.loop_thread)))
            frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
            if frame is not None:
                lines += traceback.format_stack(frame, 1)
            awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
        return "".join(lines) or "  (the event loop, which has not started it)\n"


class PushConsumer(Closable[pushconsumer.PushConsumer]):
    """`mqstore.PushConsumer` with coroutines as handlers, run as tasks of the loop, at most `workers` at a time.
    Made by `Store.push_consumer`. Interceptors and `on_error` are plain functions, called on other threads."""

    group = Value[str]()
    client_id = Value[str]()
    pause = called(pushconsumer.PushConsumer.pause)
    resume = called(pushconsumer.PushConsumer.resume)
    assignment = called(pushconsumer.PushConsumer.assignment)
    seek = called(pushconsumer.PushConsumer.seek)
    stats = called(pushconsumer.PushConsumer.stats)
    # Not on the store's thread: it waits for handlers, which may wait for the store's thread.
    run_once = called(pushconsumer.PushConsumer.run_once, LoopThread.apart)

    def __init__(self, bridge: LoopThread, sync: pushconsumer.PushConsumer) -> None:
        super().__init__(bridge, sync)
        self._running: set[_Run] = set()
        self._cut: bool | None = None
        """True if a handler was cancelled because the time to stop was over, None before it is."""
        self._stopping = False
        self._stopped: asyncio.Future[bool] = bridge.loop.create_future()
        self.sync._run_on_loop(_THREADS, self._exited)
        bridge.consumers.add(self)

    # -- handlers ---------------------------------------------------------------------------------------------------

    @overload
    def subscribe(self, topic: str, handler: H, *, tags: str = "*", sql: str | None = None) -> H: ...

    @overload
    def subscribe(
        self, topic: str, handler: None = None, *, tags: str = "*", sql: str | None = None
    ) -> Callable[[H], H]: ...

    def subscribe(self, topic: str, handler: Handler | None = None, *, tags: str = "*", sql: str | None = None) -> Any:
        """Subscribe as `mqstore.PushConsumer.subscribe`. It may return a decorator, and is not a coroutine."""
        if handler is None:
            return partial(self.subscribe, topic, tags=tags, sql=sql)
        self._bridge.check()
        check_handler(handler, coroutines=True)
        self.sync.subscribe(topic, partial(_Run, self._bridge, self._begin, handler), tags=tags, sql=sql)
        return handler

    def unsubscribe(self, topic: str) -> None:
        """Unsubscribe as `mqstore.PushConsumer.unsubscribe`."""
        self._bridge.check()
        self.sync.unsubscribe(topic)

    def _begin(self, run: _Run) -> None:
        if self._cut is not None:
            self._cut = True
            run.end(_Abandoned("the consumer stops"))
            return
        self._running.add(run)
        run.task = self._bridge.loop.create_task(run(), name=f"handler of group {self.group}")
        run.task.add_done_callback(partial(self._ended, run))

    def _ended(self, run: _Run, task: asyncio.Task[None]) -> None:
        self._running.discard(run)
        if not task.cancelled():
            run.end(task.exception())
        elif self._stopping or self._bridge.closed:
            run.end(_Abandoned("cancelled"))
        else:  # by itself, by other code with its task, or after `consume_timeout`: the handler has failed
            run.end(RuntimeError("the handler was cancelled"))

    def _exited(self, error: BaseException) -> bool:
        """Stop after an error that ended a worker's job, which is not settled. Return False without a loop."""
        if isinstance(error, _Abandoned):
            return self._stopping
        _log.error("group %s: a handler raised %r, so the consumer stops", self.group, error)
        return self._bridge.post(lambda: self._begin_to_stop(30.0))

    # -- running ----------------------------------------------------------------------------------------------------

    async def start(self) -> PushConsumer:
        """Start as `mqstore.PushConsumer.start`."""
        await self._bridge.finish(self.sync.start)
        return self

    async def stop(self, timeout: Duration = 30) -> bool:
        """Start no more handlers, wait up to `timeout` seconds for running ones, then cancel the rest.
        Messages of cancelled handlers are redelivered. Return True if all have ended by themselves and offsets are on
        disk. Repeating it is harmless. When called by a handler it does not wait. A cancellation is raised once it has
        stopped."""
        if not self._bridge.closed:
            self._bridge.check()
        stopped = self._begin_to_stop(seconds(timeout, "timeout"))
        return False if self.is_mine() else await uncancelled(stopped)

    def _begin_to_stop(self, timeout_s: float) -> asyncio.Future[bool]:
        if not self._stopping:
            self._stopping = True
            self._bridge.loop.call_later(min(timeout_s, threading.TIMEOUT_MAX / 2), self._cancel)
            # A separate thread: it waits for handlers, which may wait for the store's thread.
            name, timeout_s = f"mqstore-{self.group}-stop", timeout_s + _GRACE_S
            threading.Thread(target=self._stop, args=(timeout_s,), name=name, daemon=True).start()
        return self._stopped

    def _cancel(self) -> None:
        """Cancel the running handlers, because the time is over."""
        self._cut = bool(self._running)
        for run in self._running:
            if run.task is not None:
                run.task.cancel()

    def _stop(self, timeout_s: float) -> None:
        """Stop the synchronous consumer, on a separate thread."""
        ended = False
        try:
            ended = self.sync.stop(timeout_s)
        except Exception:
            _log.exception("group %s: stopping failed", self.group)
        finally:
            self._bridge.post(lambda: self._stopped.set_result(ended and not self._cut))

    async def run(self, stop_timeout: Duration = 30) -> bool:
        """Start, wait for SIGINT or SIGTERM, and stop. Return the result of `stop`.
        Outside the main thread it waits for a `stop` from elsewhere. A second signal has its former effect."""
        timeout_s = seconds(stop_timeout, "stop_timeout")
        signalled: asyncio.Future[None] = self._bridge.loop.create_future()
        with at_signals(lambda: self._bridge.post(partial(settle, signalled, None, None)), on_loop=True):
            await self._enter(self.sync.start)  # to its end: a consumer that was stopped does not start
            try:
                # A signal right before the loop waits does not wake it, so this looks again and again.
                ends: set[asyncio.Future[Any]] = {self._stopped, signalled}
                while not (await asyncio.wait(ends, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                    pass
            finally:
                ended = await self.stop(timeout_s)
        return ended

    def is_mine(self) -> bool:
        """Return True if called by a handler of this consumer."""
        current = asyncio.current_task()
        return current is not None and any(run.task is current for run in self._running)

    async def _enter(self, start: Callable[[], object]) -> None:
        try:
            await self._bridge.finish(start)
        except asyncio.CancelledError:  # there is no exit from a block that was not entered
            await self.stop()
            raise

    async def __aenter__(self) -> PushConsumer:
        await self._enter(self.sync.__enter__)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()
