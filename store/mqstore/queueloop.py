"""Worker loops of a queue, for `Queue.run` (clients#queue-run).

    running -- SIGTERM, SIGINT, shutdown(immediate) --> halted: nothing more is taken ---+-- all loops end -----> over
       +------ shutdown() ----------------------------> ready items are still taken -----+-- `grace` is over:
                                                                                         leased items released -> over

A loop survives a failing item, a full disk and a lost connection. Handlers that still run when it is over keep their
threads, because Python cannot end them. Their results no longer count.

The loops are coroutines, also for threads: there each awaited call blocks its thread, so nothing is ever suspended.

A rate lets at most one item start in each interval, for all items or for each key:

    an item comes ---- its key is free within 0.25 s ----> its start is reserved, the caller holds it until then
                  +--- later ----------------------------> given back until its planned start, the end of its key's line

So an item holds up others for a quarter of a second at most. A limit without keys holds every item, since no other item
could start earlier. A key has two times: its next start, and the time for which the last item was given back. Items are
given back for five minutes at most. Later starts are not planned, so a restart without the limit waits no longer.

At most 65,536 keys are stored. Then those that are free are forgotten. If none is, an item of another key waits like
one of a key that is at its limit.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mqstore.client.interceptors import Settled
from mqstore.client.pop.delivery import Task, release
from mqstore.client.pop.renewal import Held, Renewer
from mqstore.client.push.handlers import check_handler, check_has_run
from mqstore.client.push.workers import Worker, Workers, at_signals
from mqstore.errors import ConfigError, MQStoreError, QueueShutDown, StoreClosedError
from mqstore.logger import log as _log
from mqstore.options import UNIT_MS, Duration, check_whole, seconds
from mqstore.signalsafe import Bell, Gate, Lock

if TYPE_CHECKING:
    from mqstore.queue import Queue

PAUSE_S: Final = 1.0
"""Pause of a loop whose queue failed, because the disk is full or a connection was lost."""
LOOK_S: Final = 0.5
"""Longest wait of the main thread. A signal that comes right before a wait does not end it."""
_END_S: Final = 0.2
"""Time for loops that are in no handler to end."""
_WORKERS_MAX: Final = 100_000
_ENDED: Final = (QueueShutDown, StoreClosedError)
"""Errors of `get` that end a loop."""
HOLD_MS: Final = 250
"""Longest time that an item of a limited key is held. Later ones are given back."""
PARK_MS: Final = 300_000
"""Longest time for which an item is given back."""
KEYS_MAX: Final = 1 << 16

_RATE = re.compile(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)?([smhd])")


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Result of `Queue.run`. Each delivery is counted once, except that of an item that was given back for its rate."""

    handled: int
    """Number of acknowledged items."""
    failed: int
    """Number of failed attempts whose items are redelivered."""
    dead_lettered: int
    """Number of items that became dead letters."""
    released: int
    """Number of items given back without counting an attempt: by a handler, or because the run ended."""
    seconds: float

    def __str__(self) -> str:
        counts = f"{self.handled} handled, {self.failed} failed, {self.dead_lettered} dead-lettered"
        return f"{counts}, {self.released} released in {self.seconds:.1f} s"


class QueueRun:
    """One run, for threads and for `mqstore.aio`: its loops, rate, leases, counts, and end. Thread-safe."""

    _begin: Callable[[], object]
    """Start `loop` for each worker, and call `renew` every `renew_s` seconds."""
    wake: Callable[[], object]
    """End `_wait(seconds)`. Signal handlers call this, and any thread."""
    _wait: Callable[[float], Awaitable[object]]
    _end_waits: Callable[[], object]
    """End each `_next()`, which returns the next task, and `_pause(seconds)`, which returns True if halted."""
    _next: Callable[[], Awaitable[Task[Any]]]
    _pause: Callable[[float], Awaitable[bool]]
    _call: Callable[[Task[Any]], Awaitable[object]]
    """Call the handler with a task."""
    _do: Callable[[Callable[[], Any]], Awaitable[Any]]
    """Call something that may wait for the disk, to its end."""
    _end: Callable[[], Awaitable[object]]
    """End the loops, and call `release_rest`."""

    def __init__(
        self,
        queue: Queue[Any],
        handler: object,
        workers: int,
        rate: str | None,
        rate_per: Callable[[Any], Hashable] | None,
        grace: Duration,
        *,
        coroutines: bool = False,
    ) -> None:
        check_handler(handler, coroutines=coroutines)
        self._on_loop = coroutines
        self.workers = check_whole("workers", workers, 1, _WORKERS_MAX)
        self._grace_s = seconds(grace, "grace")
        if rate_per is not None and (rate is None or not callable(rate_per)):
            raise ConfigError("rate_per is a function of an item, such as its host, and needs a rate such as '1/s'")
        self._limit = None if rate is None else RateLimit(rate, hold_ms=math.inf if rate_per is None else HOLD_MS)
        self._rate_per = rate_per
        self.queue = queue
        self.clock = queue._broker.clock
        self._visibility_ms = queue._visibility_ms
        self._renewer = Renewer(queue._broker, queue._topic, self._visibility_ms, queue._log)
        self.renew_s = self._visibility_ms / 12_000
        """Time between two calls of `renew`."""
        self._lock = Lock()
        """Guards the next four."""
        self._counts: Counter[str | None] = Counter()
        """Number of tasks by their last verb, of "dead" ones by `nack`, and of those "parked" for their rate."""
        self._leased: dict[Task[Any], Held | int] = {}
        """Tasks in handlers: when the lease expires (monotonic ms), or how it is renewed, once `renew` has seen it."""
        self._over = False
        self._loops = self.workers
        """Number of loops that have not ended."""
        self._halted = Gate()
        """Open when nothing more is taken."""
        self._left: BaseException | None = None
        """Error that `run` raises at its end: SystemExit of a handler, or a cancellation."""
        self._stopping = False
        self._interrupted = False
        self._end_s = math.inf
        """Time at which the grace is over (`time.monotonic`)."""
        queue._broker.check_open()  # a store that is closed later ends the run
        self._began_s = time.monotonic()
        self.context = queue._context._replace(waiting=None, told=self._settled)
        """Context of the leases of this run, which counts their outcomes."""

    # -- the loops --------------------------------------------------------------------------------------------------

    async def go(self) -> RunSummary:
        with at_signals(self.stop, self.interrupt, on_loop=self._on_loop):
            try:
                self.queue._runs.add(self.wake)
                self._begin()
                while self._loops and (left_s := self._left_s()) > 0:
                    await self._wait(min(left_s, LOOK_S))
            finally:
                self.queue._runs.discard(self.wake)
                self.halt()
                await self._end()
        summary = self._summary()
        if self._left is not None:
            raise self._left
        return summary

    async def loop(self) -> None:
        try:
            while not self.is_halted():
                try:
                    task = await self._next()
                except _ENDED:
                    break
                except MQStoreError as error:
                    self.queue._log.say(
                        logging.ERROR, "the next item could not be read", at=self.queue._topic, error=error
                    )
                    await self._pause(PAUSE_S)
                    continue
                with self._leasing(task):
                    try:
                        wait_s, parked = self._wait_s(task)
                        if parked:
                            await self._do(partial(task.release, wait_s))
                        elif self.is_halted() or (wait_s and await self._pause(wait_s)):
                            await self._do(task.release)
                        else:
                            await self._call(task)
                    except BaseException as error:
                        if isinstance(error, SystemExit | KeyboardInterrupt):
                            self.halt()  # before the item is released: no other worker may call the handler with it
                        leave = partial(task.__exit__, type(error), error, error.__traceback__)
                        # A generator that is being closed cannot wait.
                        if not (leave() if isinstance(error, GeneratorExit) else await self._do(leave)):
                            raise
                    else:
                        if not (task.settled or task._ack_at_once()):
                            await self._do(task.ack)
        finally:
            with self._lock:
                self._loops -= 1
            self.wake()

    # -- the end ----------------------------------------------------------------------------------------------------

    def is_halted(self) -> bool:
        return self._halted.is_open

    def halt(self) -> None:
        """Take nothing more."""
        if not self.is_halted():
            self._halted.open()
            self._end_waits()

    def stop(self) -> None:
        self._stopping = True
        self.wake()

    def interrupt(self) -> None:
        """End at once, because of a second signal."""
        self._interrupted, self._end_s = True, -math.inf
        self.wake()

    def _left_s(self) -> float:
        """Return the time until the grace is over, which begins now if the end was asked for."""
        now_s, shut = time.monotonic(), self.queue._shut
        if self._stopping or shut:
            self._end_s = min(self._end_s, now_s + self._grace_s)
        if self._stopping or shut == "all":
            self.halt()
        return self._end_s - now_s

    def release_rest(self) -> None:
        """Release the items whose handlers have not ended."""
        with self._lock:
            rest, self._over = list(self._leased), True
            self._leased.clear()
        self._renewer.clear()
        release(rest)
        self._counts["release"] += len(rest)
        if rest:
            what = "queue %s: the handlers of %d items did not end in time; the items were released"
            _log.error(what, self.queue.name, len(rest))

    def _summary(self) -> RunSummary:
        """Log and return the summary. Raises KeyboardInterrupt after a second signal."""
        counts = self._counts
        failed, released = counts[None] + counts["nack"] - counts["dead"], counts["release"] - counts["parked"]
        dead = counts["reject"] + counts["dead"]
        summary = RunSummary(counts["ack"], failed, dead, released, time.monotonic() - self._began_s)
        _log.info("queue %s: run ended: %s", self.queue.name, summary)
        if self._interrupted:
            raise KeyboardInterrupt
        return summary

    # -- one item ---------------------------------------------------------------------------------------------------

    def _settled(self, task: Any, outcome: Settled) -> None:
        if outcome == "dlq" and task._verb == "nack":
            with self._lock:
                self._counts["dead"] += 1
        self.queue._look_again()

    @contextmanager
    def _leasing(self, task: Task[Any]) -> Iterator[None]:
        """Renew the lease of `task` in the block. Log an error that ends the block, and count it."""
        task._context = self.context
        self._leased[task] = self.clock.monotonic_ms() + self._visibility_ms
        try:
            yield
        except Exception as error:
            if not self._over:
                what = f"attempt {task.attempt} failed"
                self.queue._log.say(logging.ERROR, what, at=task.message, error=error, like="failed", traceback=True)
        finally:
            with self._lock:
                held = self._leased.pop(task, None)
                if held is not None:  # else it was released
                    self._counts[task._verb] += 1
            if isinstance(held, Held):
                self._renewer.remove(held, [task._delivery.message])

    def _wait_s(self, task: Task[Any]) -> tuple[float, bool]:
        """Return the time to wait before `task` is handled, and True if it must be given back for that time."""
        if self._limit is None:
            return 0.0, False
        key = None if self._rate_per is None else self._rate_per(task.value)
        wait_ms = self._limit.wait_ms(key, self.clock.monotonic_ms())
        parked = wait_ms > self._limit.hold_ms
        if parked:
            with self._lock:
                self._counts["parked"] += 1
        return wait_ms / 1000, parked

    def renew(self) -> None:
        """Renew the leases that are due. Few handlers are still running when this is called the first time."""
        with self._lock:
            for task, expires_ms in list(self._leased.items()):
                if not isinstance(expires_ms, Held):
                    self._leased[task] = held = Held([task._delivery])
                    self._renewer.add(held, expires_ms)
        self._renewer.run_once(self.clock.monotonic_ms())
        self.queue._log.log_held()


class ThreadRun(QueueRun):
    """Run with threads."""

    def __init__(self, queue: Queue[Any], handler: Callable[[Task[Any]], object], *options: Any) -> None:
        super().__init__(queue, handler, *options)
        self._handler = handler
        self._threads = Workers(f"mqstore-{queue.name}", self.clock, self.workers, self._exit, threads=True)
        self._bell = Bell()

    def run(self) -> RunSummary:
        summary: RunSummary = _now(self.go())
        return summary

    def wake(self) -> None:
        self._bell.ring()

    def _begin(self) -> None:
        self._threads.start()
        self._threads.later(0, self._renew)
        for _ in range(self.workers):
            self._threads.submit(self._loop)

    async def _wait(self, wait_s: float) -> None:
        self._bell.wait(wait_s)

    def _end_waits(self) -> None:
        self.queue._waits.ring()

    async def _end(self) -> None:
        self._threads.stop(_END_S)
        self.release_rest()

    def _exit(self, error: BaseException) -> None:
        _log.error("queue %s: a handler raised %r, so the run stops", self.queue.name, error)
        self._left = self._left or error
        self.stop()

    def _renew(self) -> None:
        self._threads.later(self.renew_s * 1000, self._renew)  # first, so that no error ends it
        self.renew()

    # -- on the threads ---------------------------------------------------------------------------------------------

    def _loop(self, worker: Worker) -> None:
        worker.is_cancelled = self.is_halted
        _now(self.loop())

    async def _next(self) -> Task[Any]:
        queue = self.queue
        task = queue._get_at_once()
        if task is None:
            [delivery] = queue._take(1, True, None, queue._visibility_s, stop=self._halted)
            task = Task(self.context, delivery)
        return task

    async def _pause(self, wait_s: float) -> bool:
        return self._halted.wait(wait_s)

    async def _call(self, task: Task[Any]) -> None:
        check_has_run(self._handler(task))

    async def _do(self, work: Callable[[], Any]) -> Any:
        return work()


def _now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a coroutine that blocks instead of being suspended."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("it was suspended")


def interval_ms(rate: str) -> float:
    """Return the time between two starts. Raises ConfigError for a rate that is not like "10/s" or "1/2.5s".

    >>> interval_ms("10/s"), interval_ms("1/2.5s"), interval_ms("90/h")
    (100.0, 2500.0, 40000.0)
    """
    match = _RATE.fullmatch(str(rate))
    interval = 0.0
    if match is not None and float(match[1]):
        interval = float(match[2] or 1) * UNIT_MS[match[3]] / float(match[1])
    if not 0 < interval < math.inf:
        raise ConfigError(f"rate is a number per s, m, h or d, such as '10/s', '90/h' or '1/2.5s', not {rate!r:.80}")
    return interval


class RateLimit:
    """Times at which items may start, at most one of a key in each interval. Thread-safe.

    >>> limit = RateLimit("1/s", hold_ms=0)
    >>> [limit.wait_ms("a", 0), limit.wait_ms("a", 0), limit.wait_ms("b", 0), limit.wait_ms("a", 0)]
    [0.0, 1000.0, 0.0, 2000.0]
    """

    def __init__(self, rate: str, *, hold_ms: float = HOLD_MS) -> None:
        self._interval_ms = interval_ms(rate)
        self.hold_ms = hold_ms
        """Longest wait for which `wait_ms` has reserved the start. After a longer one the item has to ask again."""
        self._lock = Lock()
        self._keys: dict[Hashable, tuple[float, float]] = {}
        """Next start of a key, and end of the starts that are planned for items given back (ms)."""
        self._swept_ms = -math.inf
        """Time of the last look for keys that are free."""

    def wait_ms(self, key: Hashable, now_ms: float) -> float:
        """Return the time after which an item of `key` may start."""
        with self._lock:
            if key not in self._keys and len(self._keys) >= KEYS_MAX:
                pause_ms = min(self._interval_ms, PARK_MS)
                if now_ms >= self._swept_ms + pause_ms:  # not for each item
                    self._swept_ms = now_ms
                    self._keys = {each: times for each, times in self._keys.items() if times[1] > now_ms}
                if len(self._keys) >= KEYS_MAX:
                    return self.hold_ms + pause_ms
            free_ms, planned_ms = self._keys.get(key, (now_ms, now_ms))
            start_ms = max(now_ms, free_ms)
            if start_ms - now_ms <= self.hold_ms:
                free_ms = start_ms + self._interval_ms
            else:
                start_ms = max(planned_ms, free_ms)
                if start_ms - now_ms > PARK_MS:
                    return PARK_MS
                planned_ms = start_ms + self._interval_ms
            self._keys[key] = free_ms, max(planned_ms, free_ms)
            return float(start_ms - now_ms)
