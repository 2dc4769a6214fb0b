"""Between a loop and the engine: one thread that calls, and one wake-up for all answers (clients#runtime).

    coroutine --- call, look ---> the line ---> the thread: one after the other ---> answers --+
        ^                           ^                                                          |
        |                           +--- whatever a look waits for calls it back               |
        +------------------------------ one turn of the loop for all that are there <----------+

    a look:   look ---> something: the answer
               ^  |---> nothing: park at a callback door, hold no thread
               +--------called

A coroutine may be cancelled at each of these stations, and nothing may be lost by it:

    in the line          it is not begun
    being run            its result is undone (`undo`: messages are given back unseen)
    answered, not heard  the same
    parked               it waits no longer; a turn that it was given is passed on to who else waits

Several threads bring news (the line's own, the store's housekeeper, a producer's writer, workers of a push consumer).
They share the list of answers, and only the first to find it empty wakes the loop. The line's thread does so when its
line is empty, or what comes next may take long: a wake-up for each answer would make the two threads take turns, at ten
times the cost of a look.

Knows neither messages nor queues. Anything that a thread would block for does not belong into the line: what stands
behind it would wait as well. Exceptions are syncs of the disk that were asked for, and closing.
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

__all__ = ["Bridge", "Parked", "uncancelled"]

_log = logging.getLogger("mqstore")

_BATCH = 32
"""Looks whose answers may wait for each other: about a millisecond."""
_ROW = 32
"""Calls that are made on the loop before others have a turn: about two hundred microseconds."""

T = TypeVar("T")


class Parked(Protocol):
    """What a callback door returns."""

    def cancel(self) -> None:
        """Wait no longer; after the callback: pass the turn on. Harmless again."""


class _Call(Generic[T]):
    """A call of the engine, and who waits for it."""

    __slots__ = ("bridge", "future", "over", "result", "undo", "work")

    quick = False
    """Whether it is done in some microseconds, so that who was answered before may wait for it."""

    def __init__(self, bridge: Bridge, work: Callable[[], T | None], undo: Callable[[T], object] | None) -> None:
        self.bridge = bridge
        self.work = work
        self.undo = undo
        self.future: asyncio.Future[T | None] = bridge.loop.create_future()
        self.over = False
        """Nobody waits any more."""
        self.result: T | None = None
        """The thread's own."""

    def __call__(self) -> None:
        """On the thread."""
        if self.over:
            return
        try:
            result = self.work()
        except BaseException as error:
            self.answer(None, error)
        else:
            self.answer(result, None)

    def answer(self, result: T | None, error: BaseException | None) -> None:
        """On the thread: what came of it."""
        self.result = result
        if not self.bridge.mail.tell(partial(self.hear, result, error), wakes=False):
            self._take_back()  # the loop has ended

    def hear(self, result: T | None, error: BaseException | None) -> None:
        """On the loop."""
        if self.future.done():  # cancelled, or its time was over
            return
        if error is None:
            self.future.set_result(result)
        else:
            # A future takes no StopIteration: raised in a coroutine it would mean something else.
            self.future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

    async def wait(self) -> T | None:
        """On the loop: the result, or what was raised."""
        try:
            return await self.future
        except asyncio.CancelledError:
            self.forget()
            if self.future.done() and not self.future.cancelled():
                self.future.exception()  # it was there, and cancelled before it was heard
            raise

    def forget(self) -> None:
        """On the loop: nobody will hear of it. Taken back before anything is done that is asked for from now on."""
        self.over = True
        self.bridge.taking_back.add(self)
        self.bridge.submit(self._take_back)

    def _take_back(self) -> None:
        """On the thread."""
        result, self.result = self.result, None
        try:
            if self.undo is not None and result is not None:
                self.undo(result)
        except Exception as error:  # what was not given back comes again in its own time
            _log.warning("the result of a cancelled call could not be given back: %s", error)
        finally:
            self.bridge.taking_back.discard(self)


class _Look(_Call[T]):
    """A call that is made again whenever there may be more to find, until it finds something."""

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
        if self.over:  # who forgot it passed its turn on
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
                self.parked.cancel()  # the turn that it was given, if any, is another's
            self.answer(None, error)
        else:
            self.answer(result, None)

    def _park(self) -> None:
        self.parked = parked = self.park(self._again)
        if self.over:  # meanwhile: who forgot it may have seen the one of before
            parked.cancel()

    def _again(self) -> None:
        """The door's callback, on any thread."""
        self.bridge.submit(self)

    def time_out(self) -> None:
        """On the loop: it may have looked once, or does so and waits no more."""
        self.late = True
        if self.looked and not self.future.done():
            self.future.set_result(None)
            self.forget()

    def forget(self) -> None:
        super().forget()
        if self.parked is not None:
            self.parked.cancel()


class _Mail:
    """What threads have for the loop. Fine to use from any."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        """Of the two below. Nothing is done under it but to touch them: who brings news must not wait."""
        self._news: list[Callable[[], object]] = []
        self._woken = False
        """The loop is on its way to the news."""

    def tell(self, call: Callable[[], object], *, wakes: bool = True) -> bool:
        """Have `call()` called by the loop, in the order of telling: soon, or (not `wakes`) after `wake`. False: the
        loop has ended."""
        if self._loop.is_closed():
            return False
        with self._lock:
            self._news.append(call)
        return not wakes or self.wake()

    def wake(self) -> bool:
        """Have the loop come for the news, if there are any; False: it has ended."""
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
            except Exception:  # a mistake of ours; the others are called
                _log.exception("bringing news to an event loop failed")


class Bridge:
    """The thread of one aio store, and the way back to its loop. Made and used on that loop, unless it says otherwise.

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
        """From any thread: have something called by the loop."""
        self._line: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._looks: set[_Look[Any]] = set()
        self.taking_back: set[_Call[Any]] = set()
        """Forgotten calls whose results the thread has not given back yet."""
        self._in_a_row = 0
        self._thread = threading.Thread(
            target=_run, args=(self._line, weakref.WeakMethod(self.mail.wake)), name=f"mqstore-aio {name}", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._line.put, None)  # a store that nobody closed leaves no thread

    # -- from the loop ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """RuntimeError on another loop than its own, StoreClosedError when it was closed."""
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError(
                f"{self.name} was opened on another event loop; open the store again on this one, or use store.sync"
            )
        if self.closed:
            raise StoreClosedError(f"{self.name} was closed; open it again")

    async def breathe(self) -> None:
        """Count a call that was made on the loop, and let others have a turn after some of them."""
        self._in_a_row += 1
        if self._in_a_row >= _ROW:
            self._in_a_row = 0
            await asyncio.sleep(0)

    async def call(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """What `work()` returns on the thread. Cancelled: it is not begun, or runs to its end, and then `undo(result)`
        is called there."""
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
        """What `work()` finds; while that is None, it is called again after each time that what `park` was given is
        called. None after `timeout_s` seconds (None: never), but not before it has looked once. It must be quick."""
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
        """The result of a future that another thread answers. Cancelled: it goes on, unless it can be cancelled."""
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
        """As `call`, to the end: who is cancelled meanwhile hears of it when `work` has returned."""
        self.check()
        call: _Call[T] = _Call(self, work, None)
        self._line.put(call)
        return cast(T, await uncancelled(call.future))

    def close(self) -> None:
        """Let the thread end when it has done what is in the line. Whoever is parked gets StoreClosedError."""
        if not self.closed:
            self.closed = True
            self._end()
            for look in list(self._looks):
                look.hear(None, StoreClosedError(f"{self.name} was closed"))
                look.forget()

    # -- from any thread --------------------------------------------------------------------------------------------

    def submit(self, work: Callable[[], object]) -> None:
        """Have `work()` called by the thread. Never blocks."""
        self._line.put(work)


async def uncancelled(future: asyncio.Future[T]) -> T:
    """The result of `future`, however often the caller is cancelled meanwhile; then that is raised."""
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
    """The thread. Holds neither the bridge nor its mail: news that a loop never heard hold the bridge."""

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
        except Exception:  # a mistake of ours: calls answer for what they raise
            _log.exception("a call for an event loop failed")
        held += 1
        del work  # it may hold messages, and those their segment


def _pass_answer(call: _Call[T]) -> None:
    call.bridge.tell(partial(call.hear, None, None))


def _nothing() -> None:
    return None
