"""Bridge between a loop and the engine: one thread that calls, one wake-up for all answers.

    coroutine --- call, look ---> the line ---> the thread: one after the other ---> answers --+
        ^                           ^                                                          |
        |                           +--- the awaited event of a look calls it back             |
        +------------------------------ one turn of the loop for all answers <-----------------+

    a look:   look ---> found: the answer
               ^  |---> nothing: park at a callback door, hold no thread
               +--------called

A coroutine may be cancelled at each of these stations, and nothing may be lost (clients#runtime):

    in the line          it is not begun
    running              its result is undone (`undo`: messages are released unseen)
    answered, not heard  the same
    parked               it stops waiting; a turn that it got is passed on to another receiver

Several threads bring news: the line's own, the store's housekeeper, a producer's writer, and workers of a push
consumer. They share the list of answers, and only the first to find it empty wakes the loop. The line's thread does so
when its line is empty, or the next call may take long. A wake-up for each answer would make the two threads take turns,
at ten times the cost of a look.

The bridge knows neither messages nor queues. A call that blocks its thread does not belong into the line, since the
calls behind it would wait too. Exceptions are requested syncs of the disk, and closing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, cast

from mqstore.errors import StoreClosedError
from mqstore.signalsafe import Lock

__all__ = ["Bridge", "Parked", "uncancelled"]

_log = logging.getLogger("mqstore")

_BATCH = 32
"""Number of looks whose answers may wait for each other: about a millisecond."""
_ROW = 256
"""Number of calls on the loop before others have a turn: about a millisecond."""

T = TypeVar("T")


class Parked(Protocol):
    """Object that a callback door returns."""

    def cancel(self) -> None:
        """Stop waiting. After the callback, pass the turn on. Repeating it is harmless."""


class _Call(Generic[T]):
    """Call of the engine, and the future of its caller."""

    __slots__ = ("bridge", "future", "over", "result", "undo", "work")

    quick = False
    """True if it takes some microseconds, so that earlier answers may wait for it."""

    def __init__(self, bridge: Bridge, work: Callable[[], T | None], undo: Callable[[T], object] | None) -> None:
        self.bridge = bridge
        self.work = work
        self.undo = undo
        self.future: asyncio.Future[T | None] = bridge.loop.create_future()
        self.over = False
        """True if the caller no longer waits."""
        self.result: T | None = None
        """Result of the call. Only the thread uses it."""

    def __call__(self) -> None:
        """Make the call, on the thread."""
        if self.over:
            return
        try:
            result = self.work()
        except BaseException as error:
            self.answer(None, error)
        else:
            self.answer(result, None)

    def answer(self, result: T | None, error: BaseException | None) -> None:
        """Send the result or the error to the loop, on the thread."""
        self.result = result
        if not self.bridge.mail.tell(partial(self.hear, result, error), wakes=False):
            self._take_back()  # the loop has ended

    def hear(self, result: T | None, error: BaseException | None) -> None:
        """Give the result or the error to the caller, on the loop."""
        if self.future.done():  # cancelled, or its time was over
            return
        if error is None:
            self.future.set_result(result)
        else:
            # A future takes no StopIteration: raised in a coroutine it would mean something else.
            self.future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

    async def wait(self) -> T | None:
        """Return the result or raise the error, on the loop."""
        try:
            return await self.future
        except asyncio.CancelledError:
            self.forget()
            if self.future.done() and not self.future.cancelled():
                self.future.exception()  # it was answered, and cancelled before the caller saw it
            raise

    def forget(self) -> None:
        """Forget the call, on the loop. Its result is undone before any later call is made."""
        self.over = True
        self.bridge.taking_back.add(self)
        self.bridge.submit(self._take_back)

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


class _Look(_Call[T]):
    """Call that is repeated whenever there may be more to find, until it finds something."""

    __slots__ = ("late", "looked", "park", "parked")

    quick = True

    def __init__(
        self,
        bridge: Bridge,
        work: Callable[[], T | None],
        undo: Callable[[T], object] | None,
        park: Callable[[Callable[[], object]], Parked],
    ) -> None:
        super().__init__(bridge, work, undo)
        self.park = park
        self.parked: Parked | None = None
        self.looked = False
        self.late = False

    def __call__(self) -> None:
        if self.over:  # `forget` has passed its turn on
            return
        try:
            result = self.work()
            if result is None:
                self.looked = True
                if self.late:
                    self.answer(None, None)
                    return
                self._park()
                return
        except BaseException as error:
            if self.parked is not None:
                self.parked.cancel()  # its turn, if any, goes to another receiver
            self.answer(None, error)
        else:
            self.answer(result, None)

    def _park(self) -> None:
        self.parked = parked = self.park(self._again)
        if self.over:  # forgotten meanwhile, perhaps with the previous `parked`
            parked.cancel()

    def _again(self) -> None:
        """Repeat the look. This is the door's callback, on any thread."""
        self.bridge.submit(self)

    def time_out(self) -> None:
        """End the wait, on the loop. If it has not looked yet, it looks once and does not wait."""
        self.late = True
        if self.looked and not self.future.done():
            self.future.set_result(None)
            self.forget()

    def forget(self) -> None:
        super().forget()
        if self.parked is not None:
            self.parked.cancel()


class _Mail:
    """Calls that threads send to the loop. Thread-safe."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = Lock()
        """Guards the two below, and is held only to access them, so that senders do not wait."""
        self._news: list[Callable[[], object]] = []
        self._woken = False
        """True if the loop is on its way to the news."""

    def tell(self, call: Callable[[], object], *, wakes: bool = True) -> bool:
        """Make the loop call `call()`, in the order of these calls. Return False if the loop has ended.
        If `wakes` is false, the call waits for `wake`."""
        if self._loop.is_closed():
            return False
        with self._lock:
            self._news.append(call)
        return not wakes or self.wake()

    def wake(self) -> bool:
        """Make the loop fetch the news, if there is any. Return False if the loop has ended."""
        with self._lock:
            if self._woken or not self._news:
                return True
            self._woken = True
        try:
            self._loop.call_soon_threadsafe(self._hear)
        except RuntimeError:  # just closed
            return False
        return True

    def _hear(self) -> None:
        with self._lock:
            self._woken = False
            news, self._news = self._news, []
        for call in news:
            try:
                call()
            except Exception:  # a fault of ours: call the others
                _log.exception("bringing news to an event loop failed")


class Bridge:
    """Thread of one aio store, and the way back to its loop. Made on that loop.
    Other threads may only call the methods that say so.

    >>> async def main():
    ...     bridge = Bridge("demo")
    ...     try:
    ...         return await bridge.call(lambda: 6 * 7)
    ...     finally:
    ...         bridge.close()
    >>> asyncio.run(main())
    42
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.loop = asyncio.get_running_loop()
        self.closed = False
        self.mail = _Mail(self.loop)
        self.tell = self.mail.tell
        """Has the loop call a function. Any thread may use it."""
        self._line: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._looks: set[_Look[Any]] = set()
        self.taking_back: set[_Call[Any]] = set()
        """Forgotten calls whose results the thread has not undone yet."""
        self._in_a_row = 0
        self._thread = threading.Thread(
            target=_run, args=(self._line, weakref.WeakMethod(self.mail.wake)), name=f"mqstore-aio {name}", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._line.put, None)  # an unclosed store leaves no thread behind

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
        """Count a call that was made on the loop. True after some of them: the caller then lets others have a turn, by
        `asyncio.sleep(0)`."""
        self._in_a_row += 1
        if self._in_a_row < _ROW:
            return False
        self._in_a_row = 0
        return True

    async def call(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Return what `work()` returns on the thread.
        If cancelled, it is not begun, or runs to its end. Then `undo(result)` is called there."""
        self.check()
        call: _Call[T] = _Call(self, work, undo)
        self._line.put(call)
        return cast(T, await call.wait())

    async def look(
        self,
        work: Callable[[], T | None],
        park: Callable[[Callable[[], object]], Parked],
        *,
        timeout_s: float | None,
        undo: Callable[[T], object] | None = None,
    ) -> T | None:
        """Return what `work()` finds, and repeat it after each callback until it is not None.
        `park` is given the callback. Return None after `timeout_s` seconds (None: never), but not before one look.
        `work` must be quick."""
        self.check()
        look = _Look(self, work, undo, park)
        self._looks.add(look)
        look.late = timeout_s == 0
        timer = self.loop.call_later(timeout_s, look.time_out) if timeout_s else None
        self._line.put(look)
        try:
            return await look.wait()
        finally:
            self._looks.discard(look)
            if timer is not None:
                timer.cancel()

    async def wait(self, future: Future[T]) -> T:
        """Return the result of a future that another thread answers. If cancelled, the future is cancelled.
        A future that cannot be cancelled continues."""
        if not future.done():
            call: _Call[T] = _Call(self, _nothing, None)
            future.add_done_callback(lambda done: _pass_answer(call))
            try:
                await call.wait()
            except asyncio.CancelledError:
                future.cancel()
                raise
        return future.result()

    async def finish(self, work: Callable[[], T]) -> T:
        """Return what `work()` returns, as `call` does. A cancellation is raised after the end of `work`."""
        self.check()
        call: _Call[T] = _Call(self, work, None)
        self._line.put(call)
        return cast(T, await uncancelled(call.future))

    def close(self) -> None:
        """End the thread after the work in its line. Parked callers get StoreClosedError."""
        if not self.closed:
            self.closed = True
            self._end()
            for look in list(self._looks):
                look.hear(None, StoreClosedError(f"{self.name} was closed"))
                look.forget()

    # -- from any thread --------------------------------------------------------------------------------------------

    def submit(self, work: Callable[[], object]) -> None:
        """Make the thread call `work()`. Never blocks."""
        self._line.put(work)


async def uncancelled(future: asyncio.Future[T]) -> T:
    """Return the result of `future`. A cancellation meanwhile is raised after the end."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not future.cancelled() and (error_ := future.exception()) is not None:
            _log.warning("what was cancelled has failed before: %r", error_)
        raise cancelled
    return future.result()


def _run(line: SimpleQueue[Callable[[], object] | None], waker: weakref.WeakMethod[Callable[[], bool]]) -> None:
    """Run the thread. It refers to neither bridge nor mail, since unread news keep the bridge alive."""

    def wake() -> None:
        if (found := waker()) is not None:
            found()

    held = 0  # answers that the loop was not woken for
    while True:
        if line.empty():
            wake()
            held = 0
        work = line.get()
        if work is None:
            wake()
            return
        if held and (held >= _BATCH or not getattr(work, "quick", False)):
            wake()
            held = 0
        try:
            work()
        except Exception:  # a fault of ours, since calls catch their errors
            _log.exception("a call for an event loop failed")
        held += 1
        del work  # it may hold messages, and those their segment


def _pass_answer(call: _Call[T]) -> None:
    call.bridge.tell(partial(call.hear, None, None))


def _nothing() -> None:
    return None
