"""Detection of handlers that take long or exceed their timeout (clients#overdue).

a worker begins ---> a tick every 50 ms, until no worker was at anything for a second
at a tick            still in the call of the previous tick: `held_up(worker, what it is at)`
                     in one call for `consume_timeout`: logged, reported, and `overdue(what it is at, messages)`
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from mqstore.client.handling import Handling
from mqstore.client.workers import Worker, Workers
from mqstore.clock import Clock
from mqstore.log.message import Message

__all__ = ["Overdue"]

TICK_MS = 50
IDLE_TICKS = 20
"""Number of ticks without work after which ticks end, so that an idle consumer does not wake."""

T = TypeVar("T")


class Overdue(Generic[T]):
    def __init__(
        self,
        workers: Workers,
        handling: Handling,
        clock: Clock,
        timeout_ms: int,
        then: str,
        *,
        held_up: Callable[[Worker, T], object] = lambda worker, at: None,
        overdue: Callable[[T, Sequence[Message]], object] = lambda at, messages: None,
    ) -> None:
        """`then` says in the log what becomes of overdue messages. Callbacks run on the timer thread."""
        self._workers = workers
        self._handling = handling
        self._clock = clock
        self._timeout_ms = timeout_ms
        self._then = then
        self._held_up = held_up
        self._overdue = overdue
        self._at: dict[Worker, T | None] = dict.fromkeys(workers.all)
        """Work that each worker is at."""
        self._seen: dict[Worker, tuple[int, int]] = {}
        """Call that a worker was in at the last tick, and when that call was first seen."""
        self._lock = threading.Lock()
        """Guards `_ticking`."""
        self._ticking = False
        self._idle_ticks = 0

    def begin(self, worker: Worker, at: T, is_cancelled: Callable[[], bool]) -> None:
        """Note that a worker begins work. `is_cancelled` returns True if the result of its calls is void."""
        self._at[worker] = at
        worker.is_cancelled = is_cancelled
        if not self._ticking:
            self._begin_ticks()

    def end(self, worker: Worker) -> None:
        worker.is_cancelled = None
        self._at[worker] = None

    def at_work(self) -> list[T]:
        """Return the work in hand, one item for each busy worker."""
        return [at for at in self._at.values() if at is not None]

    def _begin_ticks(self) -> None:
        with self._lock:
            if self._ticking:
                return
            self._ticking = True
        self._workers.later(TICK_MS, self._tick)

    def _tick(self) -> None:
        """Look once, on the timer thread, and schedule the next tick while there is work."""
        try:
            self._idle_ticks = 0 if self._look() else self._idle_ticks + 1
        finally:  # the next tick comes even after a hook's error
            with self._lock:
                self._ticking = False  # before the check, so that work that begins later starts its own ticks
                self._ticking = goes_on = self._idle_ticks < IDLE_TICKS or bool(self.at_work())
            if goes_on:
                self._workers.later(TICK_MS, self._tick)

    def _look(self) -> bool:
        """Look for workers that are in a call for long. Return True if any worker is at work."""
        now_ms = self._clock.monotonic_ms()
        seen, self._seen = self._seen, {}
        busy = False
        for worker, at in self._at.items():
            if at is None:
                continue
            busy = True
            if not worker.messages:
                continue
            call, since_ms = seen.get(worker, (-1, now_ms))
            if call != worker.calls:
                since_ms = now_ms
            elif call != worker.lapsed and now_ms - since_ms >= self._timeout_ms:
                self._lapse(worker, at, call)
            else:
                self._held_up(worker, at)
            self._seen[worker] = (worker.calls, since_ms)
        return busy

    def _lapse(self, worker: Worker, at: T, call: int) -> None:
        messages = worker.lapse(call)
        if not messages:  # it has just ended
            return
        stack = worker.stack()
        what = f"has been in its handler for {self._timeout_ms / 1000:g} s{self._then}"
        self._handling.log.say(logging.ERROR, what, at=messages, like=stack, stack=stack)
        for message in messages:
            self._handling.timed_out(message, stack, self._timeout_ms)
        self._overdue(at, messages)
