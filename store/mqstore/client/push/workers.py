"""Threads of a consumer: some for handlers, one for timers (clients#runtime).

    submit(job) ---> turns, first in first out ---> a thread: job(worker), with a worker that is free
                       ^                               | a handler that is a coroutine
                       +--- it has ended <-------------+ holds the worker, and no thread
    later(ms, call) ---> timers ---> the timer thread: call(), which must be quick and submits longer work

The number of workers is fixed. A job should be worth the wake-up of a thread (clients#runtime). A job that calls
handlers is a generator (`Flow`): the work it yields runs elsewhere, and the job continues when that has ended. A worker
is a place for a job, not a thread. There are as many threads as workers, unless handlers hold none.

Without threads (`threads=False`) `run_once` fires due timers and runs the jobs, on the caller's thread. It is the same
code, in an order that a test chooses.
"""

from __future__ import annotations

import heapq
import os
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from queue import Empty, SimpleQueue
from types import FrameType, GeneratorType
from typing import Any, TypeVar

from mqstore.broker.redelivery.attempt_journal import NONE, UNREAD
from mqstore.client.push.handlers import Decision
from mqstore.clock import Clock
from mqstore.log.message import Message
from mqstore.logger import log as _log
from mqstore.signalsafe import Bell, Condition, Lock

LOOK_MS = 500
"""Time between two checks that work without a thread has not ended."""
_POLL_S = 0.005

T = TypeVar("T")


class Awaited(ABC):
    """Work without a thread of ours: a handler that is a coroutine."""

    decision: Decision | None = None
    """Result of the work, if it is a decision."""

    @abstractmethod
    def start(self, done: Callable[[BaseException | None], object]) -> None:
        """Begin. `done(error)` must be called once, by any thread, when it has ended."""

    def wait(self, worker: Worker) -> Decision | None:
        """Begin, and block until it has ended. Return its decision, or raise its error."""
        bell = Bell()
        errors: list[BaseException | None] = []

        def done(error: BaseException | None) -> None:
            errors.append(error)
            bell.ring()

        worker.awaits = self
        self.start(done)
        while not bell.wait(LOOK_MS / 1000):
            self.look()
        worker.awaits = None
        if errors[0] is not None:
            raise errors[0]
        return self.decision

    @abstractmethod
    def look(self) -> None:
        """End the work if it can never end by itself. Called now and then, until it has ended."""

    @abstractmethod
    def cancel(self, then: Callable[[], object]) -> None:
        """Cancel the work. Call `then` when it has ended, or after a while if it does not end."""

    @abstractmethod
    def stack(self) -> str:
        """Return the current stack, for a log."""


Flow = Generator[Awaited, None, T]
"""Work that stops at each `Awaited`, and continues on any thread when the `Awaited` has ended.
An error of the `Awaited` is raised in it. It must hold no lock meanwhile."""
Job = Callable[["Worker"], object]
"""Function that does its work, or returns a `Flow` that does."""
_here = threading.local()


def current() -> Worker | None:
    """Return the worker whose job the caller's thread runs, or None."""
    return getattr(_here, "worker", None)


def cancelled() -> bool:
    """Return True inside a handler if its result may no longer count. Return False anywhere else.
    Reasons are that another consumer got its queue, its time (`consume_timeout`) is up, or the consumer stops.

    >>> cancelled()
    False
    """
    worker = current()
    return worker is not None and worker.cancelled()


class Worker:
    """Place for a job, with its state, which handlers and the consumer read."""

    def __init__(self) -> None:
        self._lock = Lock()
        """Guards the end of a call, which either ends in time or lapses, never both."""
        self.ident: int | None = None
        """Identity of the thread that runs its job, or ran the last one."""
        self.awaits: Awaited | None = None
        """Work without a thread that its job waits for."""
        self.ended_at = 0.0
        """Time at which its last handler ended (`time.perf_counter`)."""
        self.messages: Sequence[Message] = ()
        """Messages that its handler has now. Empty if it is in no handler."""
        self.cells = UNREAD
        """Notes of its handler's messages, for the next process (broker/redelivery/attempt_journal.py)."""
        self.calls = 0
        """Number of handler calls, which distinguishes one from the next."""
        self.lapsed = -1
        """Last call whose time was up."""
        self.is_cancelled: Callable[[], bool] | None = None
        """Returns True if the result of this call is void for another reason."""

    def begin(self, messages: Sequence[Message]) -> None:
        self.calls += 1
        self.messages = messages

    def end(self) -> None:
        """Note that the handler has returned. Then `lapse` finds nothing.
        If `lapsed == calls`, the call lapsed before."""
        with self._lock:
            self.messages = ()

    def rest(self) -> None:
        """Note that it is in no handler, and not about to be in one."""
        self.cells[0] = NONE

    def lapse(self, call: int) -> Sequence[Message]:
        """Void the result of this call, and return its handler's messages. Return () if it has ended."""
        with self._lock:
            messages = self.messages  # first, since a call increments `calls` before it sets `messages`
            if self.calls != call or not messages:
                return ()
            self.lapsed = call
            return messages

    def cancelled(self) -> bool:
        """Return True if the result of the present handler may not count."""
        return self.lapsed == self.calls or (self.is_cancelled is not None and self.is_cancelled())

    def stack(self) -> str:
        awaited = self.awaits
        if awaited is not None:
            return awaited.stack()
        frame = sys._current_frames().get(self.ident) if self.ident is not None else None
        return "" if frame is None else "".join(traceback.format_stack(frame))


class Workers:
    """`number` workers, as many threads for their jobs and one for timers, from `start` to `stop`.

    >>> from mqstore.clock import SimulatedClock
    >>> clock = SimulatedClock()
    >>> workers = Workers("demo", clock, 2, print, threads=False)
    >>> workers.submit(lambda worker: print("a job"))
    >>> workers.later(5_000, lambda: print("a timer"))
    >>> workers.run_once()
    a job
    5000
    >>> clock.advance(5_000)
    >>> workers.run_once()
    a timer
    """

    def __init__(
        self, name: str, clock: Clock, number: int, on_exit: Callable[[BaseException], object], *, threads: bool
    ) -> None:
        self.name = name
        self.all = [Worker() for _ in range(number)]
        self.threads = number if threads else 0
        """Number of threads for jobs. Set before `start`. Fewer suffice if flows mostly wait for handlers."""
        self.on_exit = on_exit
        """Called with a SystemExit or KeyboardInterrupt that a job raised."""
        self._clock = clock
        self._turns: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        """Turns for threads. At None a thread may end."""
        self._lock = Lock()
        """Guards the next five."""
        self._free = self.all[::-1]
        self._waiting: deque[Job] = deque()
        """Jobs without a worker."""
        self._suspended = 0
        """Number of workers whose jobs wait without a thread."""
        self._looking = False
        """True if a timer is set that looks at them."""
        self._stayed = False
        """True if a thread that could have ended stayed because of such jobs."""
        self._threads: list[threading.Thread] = []
        self._heap: list[tuple[int, int, Callable[[], object]]] = []
        self._serial = count()
        self._changed = Condition()
        """Guards the timers, and wakes the thread that waits for them."""
        self._stopping = False

    def submit(self, job: Job) -> None:
        """Have a worker run `job`. Never blocks. After `stop` the job is dropped."""
        if not self._stopping:
            self._turns.put(partial(self._begin, job))

    def later(self, delay_ms: float, call: Callable[[], object]) -> None:
        """Schedule `call` on the timer thread after `delay_ms`. It must not block."""
        timer = self._clock.monotonic_ms() + max(0, int(delay_ms)), next(self._serial), call
        with self._changed:
            heapq.heappush(self._heap, timer)
            if self._heap[0] is timer:
                self._changed.notify_all()

    def is_mine(self) -> bool:
        return threading.current_thread() in self._threads

    def busy(self) -> list[Worker]:
        """Return the workers that are in a handler now."""
        return [worker for worker in self.all if worker.messages]

    def start(self) -> None:
        """Start the threads, unless the store has its own clock."""
        targets = {f"{self.name}-{i}": self._serve for i in range(self.threads)}
        if targets:
            targets[f"{self.name}-timers"] = self._time
        for name, target in targets.items():
            self._threads.append(threading.Thread(target=target, name=name, daemon=True))
            self._threads[-1].start()

    def _serve(self) -> None:
        while True:
            turn = self._turns.get()
            if turn is not None:
                turn()
                del turn  # it may hold messages, and those their segment
                continue
            with self._lock:
                if not self._suspended:
                    return
                self._stayed = True  # suspended jobs need a thread to continue

    def _begin(self, job: Job) -> None:
        """Run a job if a worker is free. Otherwise the next free worker takes it."""
        with self._lock:
            if not self._free:
                self._waiting.append(job)
                return
            worker = self._free.pop()
        self._work(worker, _flow(job, worker))

    def _has_ended(self, worker: Worker, flow: Flow[None], error: BaseException | None) -> None:
        """Have the worker's job continue, because the awaited work has ended. Any thread may call it."""
        worker.ended_at = time.perf_counter()
        worker.end()  # now, since it has ended in time, even if no thread is free
        worker.awaits = None
        self._turns.put(partial(self._go_on, worker, flow, error))

    def _go_on(self, worker: Worker, flow: Flow[None], error: BaseException | None) -> None:
        with self._lock:
            self._suspended -= 1
        self._work(worker, flow, error)

    def _work(self, worker: Worker, flow: Flow[None], error: BaseException | None = None) -> None:
        while not self._is_suspended(worker, flow, error):
            worker.rest()
            with self._lock:
                if not self._waiting:
                    self._free.append(worker)
                    if self._stayed and not self._suspended:
                        self._stayed = False
                        self._dismiss()
                    return
                job = self._waiting.popleft()
            flow, error = _flow(job, worker), None
            del job

    def _is_suspended(self, worker: Worker, flow: Flow[None], error: BaseException | None) -> bool:
        """Run a job until it ends or waits without a thread. Return True if it waits."""
        worker.ident = threading.get_ident()
        before, _here.worker = current(), worker
        try:
            awaited = next(flow) if error is None else flow.throw(error)
        except StopIteration:
            return False
        except Exception:  # errors of handlers are caught earlier
            _log.exception("%s: a job failed", self.name)
            return False
        except BaseException as left:
            worker.end()
            self.on_exit(left)
            return False
        finally:
            _here.worker = before
        with self._lock:
            self._suspended += 1
        worker.awaits = awaited
        self._look_later()
        try:
            awaited.start(partial(self._has_ended, worker, flow))
        except BaseException as failed:
            self._has_ended(worker, flow, failed)
        return True

    def _look_later(self) -> None:
        with self._lock:
            if self._looking or not self.threads:
                return
            self._looking = True
        self.later(LOOK_MS, self._look)

    def _look(self) -> None:
        """Check work without threads, on the timer thread."""
        with self._lock:
            self._looking = False
        for worker in self.all:
            awaited = worker.awaits
            if awaited is not None:
                awaited.look()
                self._look_later()

    def _dismiss(self) -> None:
        for _ in range(self.threads):
            self._turns.put(None)

    def _time(self) -> None:
        while True:
            self._fire()
            with self._changed:
                if self._stopping:
                    return
                due_ms = self._due_ms()
                left_s = None if due_ms is None else (due_ms - self._clock.monotonic_ms()) / 1000
                if left_s is None or left_s > 0:
                    self._changed.wait(left_s)

    def _due_ms(self) -> int | None:
        return self._heap[0][0] if self._heap else None

    def _fire(self) -> None:
        now_ms = self._clock.monotonic_ms()
        due: list[Callable[[], object]] = []
        with self._changed:
            while (due_ms := self._due_ms()) is not None and due_ms <= now_ms:
                due.append(heapq.heappop(self._heap)[2])
        for call in due:
            if self._stopping:
                return
            try:
                call()
            except Exception:
                _log.exception("%s: a timer failed", self.name)
            except BaseException as error:  # from a user's hook; the other timers must continue
                self.on_exit(error)

    def run_once(self) -> int | None:
        """Fire due timers and run the jobs. Return when the next timer is due (monotonic ms).
        For workers without threads."""
        while True:
            self._fire()
            turns = self._take_turns()
            if not turns and not self._suspended:
                break
            if not turns:
                try:
                    turns.append(self._turns.get(timeout=LOOK_MS / 1000))
                except Empty:
                    self._look()
            for turn in turns:
                if turn is not None:
                    turn()
        with self._changed:
            return self._due_ms()

    def _take_turns(self) -> list[Callable[[], object] | None]:
        turns: list[Callable[[], object] | None] = []
        try:
            while True:
                turns.append(self._turns.get_nowait())
        except Empty:
            return turns

    def halt(self) -> None:
        """Run the submitted jobs, then no more. Does not wait, while `stop` does."""
        with self._changed:
            halted, self._stopping = self._stopping, True
            self._changed.notify_all()
        if not halted:
            self._dismiss()

    def stop(self, timeout_s: float) -> bool:
        """Call `halt` and wait. Return True if all threads have ended.
        A thread that does not end stays as a daemon, since Python cannot interrupt it."""
        self.halt()
        end = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX / 2)
        here = threading.current_thread()
        for thread in self._threads:
            while thread is not here and thread.is_alive() and (left_s := end - time.monotonic()) > 0:
                thread.join(min(left_s, LOOK_MS / 1000))
                self._look()
        if not self.threads and current() is None:
            while self._suspended and time.monotonic() < end:  # another thread is in `run_once`
                time.sleep(_POLL_S)
        ended = all(thread is here or not thread.is_alive() for thread in self._threads) and not self._suspended
        with self._changed:
            self._heap.clear()  # timers hold messages, and messages their segments
        if ended and not any(thread.is_alive() for thread in self._threads):  # otherwise they need the Nones there
            self._take_turns()
        return ended


def _flow(job: Job, worker: Worker) -> Flow[None]:
    rest = job(worker)
    if isinstance(rest, GeneratorType):
        yield from rest


class _Handler:
    """Handler of a signal for blocks of `at_signals`, in place of the program's. If the program sets another one, later
    blocks put a new handler in place of that."""

    def __init__(self, number: int) -> None:
        self.former: Any = signal.getsignal(number) or signal.SIG_DFL
        self.blocks: list[tuple[list[Callable[[], object]], bool, int]] = []
        """The calls of the next signals of each block, its `on_loop`, and its process: a signal ends a forked one."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        own = [(block, on_loop) for block, on_loop, process in self.blocks if process == os.getpid()]
        calls = [block.pop(0) for block, _ in own if block]
        for call in calls:
            call()
        origin = getattr(getattr(self.former, "func", None), "__module__", None)
        if not calls:
            signal.signal(number, self.former)
            signal.raise_signal(number)
        elif any(on_loop for _, on_loop in own) and callable(self.former) and origin != "asyncio.runners":
            with suppress(BaseException):  # that, like `asyncio.run`, would end the program before its runs have ended
                self.former(number, frame)


@contextmanager
def at_signals(
    stop: Callable[[], object], second: Callable[[], object] | None = None, *, on_loop: bool = False
) -> Iterator[None]:
    """On the main thread, call `stop` at SIGINT and SIGTERM, and then `second` (None: their former effect).
    Blocks on an event loop overlap, in any order: a signal is for each, and for the handler of a server around them."""
    calls = [stop] if second is None else [stop, second]
    block = (calls, on_loop, os.getpid())
    joined: list[tuple[signal.Signals, _Handler]] = []
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                found = signal.getsignal(number)
                handler = found if isinstance(found, _Handler) else _Handler(number)
                joined.append((number, handler))
                handler.blocks.append(block)
                signal.signal(number, handler)
        yield
    finally:
        calls.clear()
        for number, handler in joined:
            handler.blocks[:] = [each for each in handler.blocks if each is not block]
            current: Any = signal.getsignal(number)
            if current is handler and not handler.blocks:
                signal.signal(number, handler.former)
