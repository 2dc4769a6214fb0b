"""What a consumer runs on: threads for handlers, one for what happens later (client-semantics A6.1, A14).

    submit(job) ---> jobs, first in first out ---> a worker: job(worker)
    later(ms, call) ---> timers ---> the timer thread: call(), which must be quick and submits what is not

One number of workers, fixed: RocketMQ's pool never grows beyond its minimum either. A job is whatever is worth a
wake-up of a thread, never one message of many: that costs more than most handlers do.

Who owns the clock (`threads=False`) has no threads: `run_once` fires the timers that are due and runs the jobs there
are, on the caller's thread, as worker 0. The same code, in an order that a test chooses.
"""

from __future__ import annotations

import heapq
import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from queue import SimpleQueue

from mqstore.clock import Clock
from mqstore.log.message import Message

__all__ = ["Job", "Timer", "Worker", "Workers", "cancelled"]

_log = logging.getLogger("mqstore")

Job = Callable[["Worker"], object]
_here = threading.local()


def cancelled() -> bool:
    """Inside a handler: whether its result may no longer count, since its queue was given to another consumer, its time
    (`consume_timeout`) is up, or the consumer is stopping. False anywhere else.

    >>> cancelled()
    False
    """
    worker: Worker | None = getattr(_here, "worker", None)
    return worker is not None and worker.cancelled()


class Worker:
    """One who runs jobs, and what it is at: handlers ask, the consumer looks."""

    __slots__ = ("_lock", "calls", "ident", "is_cancelled", "lapsed", "messages")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Of the end of a call: it has either ended in time or lapsed, never both, never neither."""
        self.ident: int | None = None
        """Of its thread."""
        self.messages: Sequence[Message] = ()
        """What its handler has now; empty: it is in no handler."""
        self.calls = 0
        """Handler calls so far: tells one from the next."""
        self.lapsed = -1
        """The last call whose time was up."""
        self.is_cancelled: Callable[[], bool] | None = None
        """What else makes the result of this call void."""

    def begin(self, messages: Sequence[Message]) -> None:
        """A handler gets these now."""
        self.calls += 1
        self.messages = messages

    def end(self) -> None:
        """It has come back. From here on `lapse` finds nothing; `lapsed == calls` tells that it did before."""
        with self._lock:
            self.messages = ()

    def lapse(self, call: int) -> Sequence[Message]:
        """Make the result of this call void; what its handler has. Empty if it has ended: then its result counts."""
        with self._lock:
            messages = self.messages  # first: a call counts itself before it shows its messages
            if self.calls != call or not messages:
                return ()
            self.lapsed = call
            return messages

    def cancelled(self) -> bool:
        """Whether what the handler does now may count for nothing."""
        return self.lapsed == self.calls or (self.is_cancelled is not None and self.is_cancelled())

    def stack(self) -> str:
        """Where its thread is now, for a log."""
        frame = sys._current_frames().get(self.ident) if self.ident is not None else None
        return "" if frame is None else "".join(traceback.format_stack(frame))


class Timer:
    """A call to come. `cancel` unmakes it."""

    __slots__ = ("call", "due_ms")

    def __init__(self, due_ms: int, call: Callable[[], object]) -> None:
        self.due_ms = due_ms
        self.call: Callable[[], object] | None = call

    def cancel(self) -> None:
        self.call = None


class Workers:
    """`number` threads for jobs and one for timers, from `start` to `stop`.

    >>> from mqstore.clock import SimulatedClock
    >>> clock = SimulatedClock()
    >>> workers = Workers("demo", clock, 2, threads=False)
    >>> workers.submit(lambda worker: print("a job"))
    >>> timer = workers.later(5_000, lambda: print("a timer"))
    >>> workers.run_once()
    a job
    5000
    >>> clock.advance(5_000)
    >>> workers.run_once()
    a timer
    """

    def __init__(self, name: str, clock: Clock, number: int, *, threads: bool) -> None:
        self.name = name
        self.all = [Worker() for _ in range(number)]
        self.on_exit: Callable[[BaseException], object] | None = None
        """Told of a SystemExit or KeyboardInterrupt that a job let out."""
        self._clock = clock
        self._threaded = threads
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._heap: list[tuple[int, int, Timer]] = []
        self._serial = count()
        self._changed = threading.Condition()
        """Guards the timers, and wakes the thread that waits for them."""
        self._stopping = False

    # -- work -------------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Have a worker run `job`. Never blocks; after `stop` it is forgotten."""
        self._jobs.put(job)

    def later(self, delay_ms: float, call: Callable[[], object]) -> Timer:
        """Have `call` called in `delay_ms`, by the timer thread: it must not block."""
        timer = Timer(self._clock.monotonic_ms() + max(0, int(delay_ms)), call)
        with self._changed:
            heapq.heappush(self._heap, (timer.due_ms, next(self._serial), timer))
            if self._heap[0][2] is timer:
                self._changed.notify()
        return timer

    def is_mine(self) -> bool:
        """Whether the caller is one of our threads."""
        return threading.current_thread() in self._threads

    def busy(self) -> list[Worker]:
        """Workers that are in a handler now."""
        return [worker for worker in self.all if worker.messages]

    # -- running ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads, unless the clock is somebody's own."""
        if not self._threaded:
            return
        for i, worker in enumerate(self.all):
            self._spawn(f"{self.name}-{i}", partial(self._work, worker))
        self._spawn(f"{self.name}-timers", self._time)

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _work(self, worker: Worker) -> None:
        worker.ident = threading.get_ident()
        _here.worker = worker
        while (job := self._jobs.get()) is not None:
            self._run(job, worker)
            del job  # it may hold messages, and those their segment

    def _run(self, job: Job, worker: Worker) -> None:
        try:
            job(worker)
        except Exception:  # handlers' own errors never come this far
            _log.exception("%s: a job failed", self.name)
        except BaseException as error:
            worker.end()
            self._exit(error)

    def _exit(self, error: BaseException) -> None:
        if self.on_exit is None:
            raise error
        self.on_exit(error)

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
        while self._heap and self._heap[0][2].call is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def _fire(self) -> None:
        now_ms = self._clock.monotonic_ms()
        due: list[Timer] = []
        with self._changed:
            while (due_ms := self._due_ms()) is not None and due_ms <= now_ms:
                due.append(heapq.heappop(self._heap)[2])
        for timer in due:
            call = timer.call
            if call is None or self._stopping:
                continue
            try:
                call()
            except Exception:
                _log.exception("%s: a timer failed", self.name)
            except BaseException as error:  # a hook of the user's; the other timers must not end with it
                self._exit(error)

    def run_once(self) -> int | None:
        """Without threads: fire what is due and run the jobs there are; when the next timer is due (monotonic ms)."""
        before = getattr(_here, "worker", None)
        _here.worker = worker = self.all[0]
        try:
            while True:
                self._fire()
                jobs: deque[Job] = deque()
                while not self._jobs.empty():
                    if (job := self._jobs.get()) is not None:
                        jobs.append(job)
                if not jobs:
                    break
                for job in jobs:
                    self._run(job, worker)
        finally:
            _here.worker = before
        with self._changed:
            return self._due_ms()

    def stop(self, timeout_s: float) -> bool:
        """Run what was submitted, then no more; whether all threads have ended. One that does not is left behind, as a
        daemon: Python cannot interrupt it."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        for _ in self.all:
            self._jobs.put(None)
        end = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX / 2)
        here = threading.current_thread()
        for thread in self._threads:
            if thread is not here:
                thread.join(max(0.0, end - time.monotonic()))
        ended = all(thread is here or not thread.is_alive() for thread in self._threads)
        with self._changed:
            self._heap.clear()  # what is left to come holds messages, and those their segments
        if not any(thread.is_alive() for thread in self._threads):  # else it is their word to end that lies there
            while not self._jobs.empty():
                self._jobs.get()
        return ended
