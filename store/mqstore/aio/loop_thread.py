"""Bridge between a loop and the engine: one thread that calls, one wake-up for all answers.

    coroutine --- call, look ---> the line ---> the thread: one after the other ---> answers --+
        ^                           ^                                                          |
        |                           +--- the awaited event of a look calls it back             |
        +------------------------------ one turn of the loop for all answers <-----------------+

    a look:   look ---> found, the answer
               ^  |---> nothing, park at a callback door, hold no thread
               +--------called

A coroutine may be cancelled at each of these stations, and nothing may be lost (clients#runtime):

    in the line          it never starts
    running              its result is undone (`undo`: messages are released unseen)
    answered, not heard  the same
    parked               it stops waiting; a turn that it got is passed on to another receiver

Several threads bring news: this one, the store's housekeeper, a producer's writer, and workers of a push consumer. Only
the first of them wakes the loop, and this one when its line is empty or the next call may take long. A wake-up for each
answer would make the two threads take turns, at ten times the cost of a look.

The bridge knows neither messages nor queues. A call that blocks its thread does not belong into the line, since the
calls after it would wait too. Exceptions are requested syncs of the disk, and closing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

from mqstore.errors import StoreClosedError
from mqstore.signalsafe import Bell
from mqstore.threads import start_thread

__all__ = ["LoopThread", "Parked", "uncancelled"]

_log = logging.getLogger("mqstore")

_BATCH = 32
"""Number of answers that may wait for each other: about a millisecond."""
_ROW = 256
"""Number of calls on the loop before others have a turn: about a millisecond."""

T = TypeVar("T")


class Parked(Protocol):
    """Object that a callback door returns."""

    def cancel(self) -> None:
        """Stop waiting. After the callback, pass the turn on. Repeating it is harmless."""


@dataclass(eq=False, slots=True)
class _Call(Generic[T]):
    """Call of the engine, and the future of its caller. With `park` it is a look, repeated until it finds something.
    Made on the loop, and in the line from then on."""

    bridge: LoopThread
    work: Callable[[], T | None]
    undo: Callable[[T], object] | None = None
    park: Callable[[Callable[[], object]], Parked] | None = None
    late: bool = False
    """True if the time is over. A look that has not looked yet does so once."""
    parked: Parked | None = None
    result: T | None = None
    """Result of the call. Only the thread uses it."""
    future: asyncio.Future[T | None] = field(init=False)
    """Done when the call was answered, or its caller no longer waits."""
    caller: object = None

    def __post_init__(self) -> None:
        self.bridge.check()
        self.future = self.bridge.loop.create_future()
        task = asyncio.current_task()
        self.caller = None if task is None else weakref.ref(task)
        self.bridge.submit(self)

    def __call__(self) -> None:
        """Make the call, on the thread."""
        if self.future.done():  # forgotten
            return
        if self.park is None:
            self.bridge.wake()  # it may take long, so earlier answers do not wait for it
        self.bridge.calling = self.caller
        try:
            result = self.work()
            if result is None and self.park is not None and not self.late:
                self.parked = parked = self.park(partial(self.bridge.submit, self))
                if not (self.late or self.future.done()):  # type: ignore[redundant-expr]  # the loop sets it
                    return
                parked.cancel()  # forgotten meanwhile, perhaps with the previous `parked`
        except BaseException as error:
            if self.parked is not None:
                self.parked.cancel()  # its turn, if any, goes to another receiver
            self._answer(None, error)
        else:
            self._answer(result, None)

    def _answer(self, result: T | None, error: BaseException | None) -> None:
        self.result = result
        if isinstance(error, StopIteration):  # which a future does not take
            error = RuntimeError(repr(error))
        if not self.bridge.post(partial(settle, self.future, result, error), wakes=False):
            self._take_back()  # the loop has ended

    async def wait(self) -> T | None:
        """Return the result or raise the error, on the loop."""
        try:
            return await self.future
        except asyncio.CancelledError:
            self.forget()
            if not self.future.cancelled():
                self.future.exception()  # it was answered, and cancelled before the caller saw it
            raise

    def forget(self) -> None:
        """Forget the call, on the loop. Its result is undone before any later call is made."""
        self.bridge.taking_back.add(self)
        self.bridge.submit(self._take_back)
        if self.parked is not None:
            self.parked.cancel()

    def end(self, error: BaseException | None) -> None:
        """End the wait of a look without a result, on the loop."""
        if not self.future.done():
            settle(self.future, None, error)
            self.forget()

    def time_out(self) -> None:
        """End the wait of a look, on the loop. If it has not looked yet, it looks once and does not wait."""
        self.late = True
        if self.parked is not None:
            self.end(None)

    def _take_back(self) -> None:
        """Undo the result of a forgotten call, on the thread."""
        result, self.result = self.result, None
        try:
            if self.undo is not None and result is not None:
                self.undo(result)
        except Exception as error:  # messages that were not released are redelivered later
            _log.warning("the result of a cancelled call could not be released: %s", error)
        finally:
            self.bridge.taking_back.discard(self)


class LoopThread:
    """Thread of one aio store, and the way back to its loop. Made on that loop.
    Other threads may only call the methods that say so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop = asyncio.get_running_loop()
        self.loop_thread = threading.get_ident()
        self.closed = False
        self.calling: object = None
        """Weak reference to the task whose call the thread makes."""
        self.taking_back: set[_Call[Any]] = set()
        """Forgotten calls whose results the thread has not undone yet."""
        self._line: deque[Callable[[], object]] = deque()
        self._bell = Bell()
        self._looks: set[_Call[Any]] = set()
        self._news: deque[Callable[[], object]] = deque()
        """Calls that threads send to the loop."""
        self._woken = False
        """True if the loop is on its way to the news."""
        self._in_a_row = 0
        self._thread = start_thread(self, self._bell, f"aio {name}")
        weakref.finalize(self, self._bell.ring)  # the thread of an unclosed store ends, too

    # -- from the loop ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise RuntimeError on another loop than its own, and StoreClosedError after `close`."""
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError(
                f"{self.name} was opened on another event loop; open the store again on this one, or use store.sync"
            )
        if self.closed:
            raise StoreClosedError(f"{self.name} was closed; open it again")

    def is_turn_over(self) -> bool:
        """Count a call that was made on the loop. True after some calls: the caller then lets others have a turn, by
        `asyncio.sleep(0)`."""
        self._in_a_row += 1
        if self._in_a_row < _ROW:
            return False
        self._in_a_row = 0
        return True

    async def call(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Return the result of `work()` on the thread.
        If cancelled, it never starts, or runs to its end. Then `undo(result)` is called there."""
        return cast(T, await _Call(self, work, undo).wait())

    async def finish(self, work: Callable[[], T]) -> T:
        """Return the result of `work()`, as `call` does. A cancellation is raised after the end of `work`."""
        return cast(T, await uncancelled(_Call(self, work).future))

    async def look(
        self,
        work: Callable[[], T | None],
        park: Callable[[Callable[[], object]], Parked],
        *,
        timeout_s: float | None,
        undo: Callable[[T], object] | None = None,
    ) -> T | None:
        """Return the result of `work()`, and repeat it after each callback until it is not None.
        `park` is given the callback. Return None after `timeout_s` seconds (None: never), but not before one look.
        `work` must be quick."""
        look = _Call(self, work, undo, park, timeout_s == 0)
        self._looks.add(look)
        timer = self.loop.call_later(timeout_s, look.time_out) if timeout_s else None
        try:
            return await look.wait()
        finally:
            self._looks.discard(look)
            if timer is not None:
                timer.cancel()

    def wrapped(self, future: Future[T]) -> asyncio.Future[T]:
        """Return a future of the loop for one that another thread answers, as `asyncio.wrap_future` does.
        If it is cancelled, the other is cancelled, unless that continues. Answers that are ready together wake the loop
        once."""
        mine: asyncio.Future[T] = self.loop.create_future()

        def answer() -> None:
            if future.cancelled():
                mine.cancel()
            else:
                error = future.exception()
                settle(mine, None if error else future.result(), error)

        future.add_done_callback(lambda _: self.post(answer))
        mine.add_done_callback(lambda _: mine.cancelled() and future.cancel())
        return mine

    def close(self) -> None:
        """End the thread after the work in its line. Parked callers get StoreClosedError."""
        for look in list(self._looks):
            look.end(StoreClosedError(f"{self.name} was closed"))
        self.closed = True
        self._bell.ring()

    # -- from any thread --------------------------------------------------------------------------------------------

    def caller(self) -> object:
        """Return the identity of the caller of the present call: a task of the loop, or another thread."""
        thread = threading.current_thread()
        return self.calling if thread is self._thread else thread

    def submit(self, work: Callable[[], object]) -> None:
        """Make the thread call `work()`. Never blocks."""
        self._line.append(work)
        self._bell.ring()

    def post(self, call: Callable[[], object], *, wakes: bool = True) -> bool:
        """Make the loop call `call()`, in the order of these calls. Return False if the loop has ended.
        If `wakes` is false, the call may wait for a few others, or for `wake`."""
        if self.loop.is_closed():
            return False
        self._news.append(call)
        return self.wake() if wakes or len(self._news) >= _BATCH else True

    def wake(self) -> bool:
        """Make the loop fetch the news, if there is any. Return False if the loop has ended."""
        if self._news and not self._woken:
            self._woken = True
            try:
                self.loop.call_soon_threadsafe(self._hear)
            except RuntimeError:  # just closed
                return False
        return True

    def step(self) -> float | None:
        """Make the calls in the line, in the thread (`mqstore.threads`)."""
        while self._line:
            work = self._line.popleft()
            try:
                work()
            except Exception:  # a fault of ours, since calls catch their errors
                _log.exception("a call for an event loop failed")
            del work  # it may hold messages, and those their segment
        self.wake()
        return None if self.closed and not self._line else math.inf

    def _hear(self) -> None:
        self._woken = False  # first, so that later answers wake the loop again
        for _ in range(len(self._news)):
            try:
                self._news.popleft()()
            except Exception:  # a fault of ours: call the others
                _log.exception("bringing news to an event loop failed")


def settle(future: asyncio.Future[T], result: Any, error: BaseException | None) -> None:
    """Answer a future, unless it was cancelled."""
    if not future.done():
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


async def uncancelled(future: asyncio.Future[T]) -> T:
    """Return the result of `future`. A cancellation meanwhile is raised after the end."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return future.result()
    if not future.cancelled() and (failed := future.exception()) is not None:
        _log.warning("a cancelled call had failed before: %r", failed)
    raise cancelled
