"""Bridge between a loop and the engine: one thread that calls.

    coroutine --- call, look ---> the line ---> the thread: one after the other
        ^                                                    |
        +-------------------- the loop <--- answer ----------+

    look -- found ------------------> the answer
     ^  +-- nothing: park, hold no thread --+
     +-------- called back, or `every_s` ---+

A coroutine may be cancelled anywhere, and nothing may be lost (clients#runtime):

    in the line          it never starts
    running              its result is undone (`undo`: messages are released unseen)
    answered, not heard  the same
    parked               it stops waiting; a turn that it got is passed on to another receiver

A call that blocks the thread holds up those after it, so only syncs of the disk and closing may. A put into the page
cache takes some microseconds, less than handing it over. So it is made on the loop, except:

    durability "flush"           appended on the loop, and a shared sync awaited (`put_async`)
    a large body                 copied and checked on the thread: a megabyte takes a millisecond
    an unknown topic             creating it writes a file
    a full segment               creating the next one may wait for the disk
    a log in a bulk append       the put waits until that has ended
    an earlier put not stored    messages are stored in the order of the calls
"""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from asyncio import current_task
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet

from mqstore.errors import StoreClosedError
from mqstore.log.commitlog import SendReceipt
from mqstore.log.writing.outgoing import Body
from mqstore.logger import log as _log
from mqstore.signalsafe import Bell
from mqstore.store import Store
from mqstore.threads import start_thread

_ROW: Final = 256
"""Number of calls on the loop before others have a turn: about a millisecond."""
_LARGE: Final = 16 << 10
_LARGEST_RECORD: Final = 64 << 10
"""Maximum size in bytes of a record without a large body. Its properties have less than 32 KiB."""

_PARKED: Final[Any] = object()
"""Result of a look that found nothing, and will be called again."""

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class _Call(Generic[T]):
    """Call of the engine, and the future of its caller. Made on the loop."""

    bridge: LoopThread
    work: Callable[[], T]
    undo: Callable[[Any], object] | None = None
    """Called on the thread with the result of a call that was cancelled too late."""
    result: T | None = None
    """Result of the call. Only the thread uses it, and the next."""
    is_answered: bool = False
    future: asyncio.Future[T] = field(init=False)
    """Done when the call was answered, or its caller no longer waits."""
    caller: object = None

    def __post_init__(self) -> None:
        self.bridge.check()
        self.future = self.bridge.loop.create_future()
        task = asyncio.current_task()
        self.caller = None if task is None else weakref.ref(task)

    def __call__(self) -> None:
        """Make the call, on the thread."""
        if self.is_answered or self.future.done():  # the latter: cancelled
            return
        self.bridge.calling = self.caller
        error: BaseException | None = None
        try:
            result = self.work()
            if result is _PARKED:
                return
            self.result = result
        except BaseException as raised:  # a future does not take StopIteration
            error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
        self.is_answered = True  # a look may be called once more before the loop hears of it
        if not self.bridge.post(partial(settle, self.future, self.result, error)):
            self.take_back()  # the loop has ended

    async def wait(self) -> T:
        """Make the call, and return its result, on the loop. If cancelled, undo the result before any later call."""
        self.bridge.submit(self)
        try:
            return await self.future
        except (asyncio.CancelledError, StoreClosedError):
            self.bridge.taking_back.add(self)
            self.bridge.submit(self.take_back)
            if not self.future.cancelled():
                self.future.exception()  # it was answered, and cancelled before the caller saw it
            raise

    def take_back(self) -> None:
        """Undo the result of a call whose caller no longer waits, on the thread."""
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

    store: Store
    """The synchronous store, once it is open."""

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
        self._looks: set[asyncio.Future[Any]] = set()
        self._in_a_row = 0
        self._on_thread = 0
        """Number of puts that were given to the thread."""
        self.consumers: WeakSet[Any] = WeakSet()
        """Push consumers of the store, which it stops."""
        self._thread = start_thread(self, self._bell, f"aio {name}")
        weakref.finalize(self, self._bell.ring)  # the thread of an unclosed store ends, too

    # -- from the loop ----------------------------------------------------------------------------------------------

    def check(self) -> asyncio.Task[Any] | None:
        """Return the task of the caller. Raises RuntimeError on another loop than its own, and StoreClosedError after
        `close`."""
        # A thread that runs a task of the loop runs no other. `get_running_loop` makes a system call in Python 3.11.
        task = current_task(self.loop) if get_ident() == self.loop_thread else None
        if task is None and asyncio.get_running_loop() is not self.loop:
            raise RuntimeError(
                f"{self.name} was opened on another event loop; open the store again on this one, or use store.sync"
            )
        if self.closed:
            raise StoreClosedError(f"{self.name} was closed; open it again")
        return task

    def is_turn_over(self) -> bool:
        """Count a call that was made on the loop. True after some calls: the caller then lets others have a turn, by
        `asyncio.sleep(0)`."""
        self._in_a_row += 1
        if self._in_a_row < _ROW:
            return False
        self._in_a_row = 0
        return True

    async def call(self, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Run on the store's thread. If cancelled, it never starts, or runs to its end."""
        return await _Call(self, work, undo).wait()

    async def finish(self, work: Callable[[], T]) -> T:
        """Run on the store's thread, to its end. A cancellation is raised after that."""
        if self.closed:  # then nothing blocks, and no thread runs
            return work()
        call = _Call(self, work)
        self.submit(call)
        return await uncancelled(call.future)

    async def apart(self, work: Callable[[], T]) -> T:
        """Run on a separate thread, and call back there. If cancelled, it runs to its end."""
        self.check()
        return await asyncio.to_thread(work)

    async def look(
        self,
        work: Callable[[], T | None],
        park: Callable[[Callable[[], object]], Callable[[], object]],
        *,
        timeout_s: float | None,
        every_s: float = math.inf,
        undo: Callable[[T], object] | None = None,
    ) -> T | None:
        """Return the result of `work()`, which must be quick, and repeat it until it is not None.
        `park(again)` has `again` called when there may be something, and returns a function to cancel that. It is also
        repeated every `every_s` seconds. Returns None after `timeout_s` seconds (None: never), but not before one look.
        """
        end_s = math.inf if timeout_s is None else self.loop.time() + timeout_s
        parked: list[Callable[[], object]] = []
        looks = 0
        timer: asyncio.TimerHandle | None = None

        def once() -> Any:
            """Look, and park if nothing is found, on the thread."""
            nonlocal looks
            looks += 1
            found = work()
            parked.clear()  # the look has used its turn
            if found is None and self.loop.time() < end_s:
                parked.append(park(partial(self.submit, partial(called, looks))))
                if call.future.done():  # since the check before this call
                    leave()
                return _PARKED
            return found

        def leave() -> None:
            for cancel in list(parked):
                cancel()

        def called(after: int) -> None:
            if after == looks:  # else `look_uncalled` came first, and passed the turn on
                call()

        def look_uncalled() -> None:
            leave()
            call()

        def tick() -> None:
            self.submit(look_uncalled)
            arm()

        def arm() -> None:
            nonlocal timer
            wait_s = min(every_s, end_s - self.loop.time())
            if 0 < wait_s < math.inf:
                timer = self.loop.call_later(wait_s, tick)

        call: _Call[T | None] = _Call(self, once, undo)
        self._looks.add(call.future)
        arm()
        try:
            return await call.wait()
        finally:
            self._looks.discard(call.future)
            if timer is not None:
                timer.cancel()
            leave()  # passes an unused turn on

    def close(self) -> None:
        """End the thread after the work in its line. Parked callers get StoreClosedError."""
        self.closed = True
        for look in list(self._looks):
            settle(look, None, StoreClosedError(f"{self.name} was closed"))
        self._bell.ring()

    # -- puts -------------------------------------------------------------------------------------------------------

    def here(self, topic: str, size: int) -> bool:
        """Return True if the put may be made on the loop."""
        broker = self.store.broker
        return (
            not self._on_thread
            and size <= _LARGE
            and broker.topics.get(topic) is not None
            and broker.has_room(_LARGEST_RECORD)
        )

    async def put(self, topic: str, body: Body, **options: Any) -> SendReceipt:
        """Put as `Store.put`. If cancelled, the message is stored whole or not at all."""
        self.check()
        broker = self.store.broker
        put: Callable[..., Any] = broker.put
        flushes = (options.get("durability") or broker.durability) == "flush"
        if flushes:
            put = broker.put_async
        if self.here(topic, size_of(body)):
            stored = put(topic, body, **options)
            if not flushes and self.is_turn_over():
                await asyncio.sleep(0)  # the message is stored, even if the caller is cancelled here
        else:
            stored = await self.in_order(partial(put, topic, owned(body), **options))
        receipt: SendReceipt = await asyncio.wrap_future(stored) if flushes else stored
        return receipt

    async def in_order(self, work: Callable[[], T]) -> T:
        """Store messages in the order of the calls. If cancelled, it never starts, or runs to its end."""
        # On the thread. Later puts wait for it there.
        self._on_thread += 1
        try:
            return await self.call(work)
        finally:
            self._on_thread -= 1

    # -- from any thread --------------------------------------------------------------------------------------------

    def caller(self) -> object:
        """Return the identity of the caller of the present call: a task of the loop, or another thread."""
        thread = threading.current_thread()
        return self.calling if thread is self._thread else thread

    def submit(self, work: Callable[[], object]) -> None:
        """Make the thread call `work()`. Never blocks."""
        self._line.append(work)
        self._bell.ring()

    def post(self, call: Callable[[], object]) -> bool:
        """Make the loop call `call()`, in the order of these calls. Return False if the loop has ended."""
        try:
            self.loop.call_soon_threadsafe(call)
        except RuntimeError:
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
        return None if self.closed and not self._line else math.inf


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


def size_of(body: object) -> int:
    """Return the number of bytes of a body, or 0 for a bad body, which the engine will refuse."""
    return memoryview(body).nbytes if isinstance(body, bytes | bytearray | memoryview) else 0


def owned(value: Any) -> Any:
    """Return a copy of an argument, so that its caller may change it while the call waits.
    Iterables are read here, on the loop, since they belong to the caller."""
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | tuple):
        return [bytes(each) if isinstance(each, bytearray | memoryview) else each for each in value]
    return value
