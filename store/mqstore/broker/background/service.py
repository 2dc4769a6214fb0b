"""Common interface of a broker's background services, and the thread that runs them (ARCHITECTURE.md).

    mechanism   run_once(now_ms) -> next_run_ms     does due work; a housekeeper thread or a test calls it
                persist()                           writes its state to disk
                close()                             releases files
                pins()                              records of the log that it still needs
    roller      waiting_below(offset)               waiting records that it can relocate to the log end
                roll(offset, count, now_ms)         relocates them

Each mechanism gets a function `wake` for "something may be due before my next run". Any thread may call it.
"""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from mqstore import arrays as np
from mqstore.clock import Clock
from mqstore.logger import log as _log
from mqstore.signalsafe import Bell, Lock
from mqstore.threads import start_thread

Wake = Callable[[], None]


class Pin(NamedTuple):
    """Record that must stay, and the group that needs it."""

    physical_offset: int
    topic: str
    queue_id: int
    group: str
    why: str
    rolls: bool = False
    """True if the mechanism can relocate the message to the log end (`Roller`)."""
    reach: int = 0
    """Number of bytes before the record that must stay, too, because its body may be there (`references.py`)."""

    @property
    def kept_from(self) -> int:
        """Physical offset of the first byte that must stay."""
        return max(0, self.physical_offset - self.reach)


def oldest_of(pins: Iterable[Pin]) -> Pin | None:
    """Return the pin that keeps the most, or None without one."""
    return min(pins, default=None, key=lambda pin: pin.kept_from)


class BackgroundService:
    """Background service of a broker. Never runs, saves or closes in two threads at once (`Housekeeper.turn`)."""

    def run_once(self, now_ms: int) -> int | None:
        """Do the work that is due at `now_ms` (wall clock). Return the time of the next run. None: when woken."""
        raise NotImplementedError

    def persist(self) -> None:
        """Write to disk all state that the next process needs. For saving, snapshots and closing."""

    def close(self) -> None:
        """Release files. Called once, after the last `persist`, while the store is still open.
        Listeners stay: the store ends next, and may call them for the last time, which does no harm."""

    def pins(self) -> Iterable[Pin]:
        """Return pins of the oldest records that the mechanism still needs. This class needs none."""
        return ()


class Roller(BackgroundService):
    """Service whose messages may wait for long, and which can relocate them (delivery#retention-bound).
    A relocated message no longer keeps the segments after its old record. Both methods are called in the thread of
    `run_once`."""

    def waiting_below(self, physical_offset: int) -> Iterable[tuple[np.NDArray[np.int64], np.NDArray[np.int64]]]:
        """Yield (physical offsets, sizes) of waiting records below `physical_offset`, in parts. An estimate."""
        raise NotImplementedError

    def roll(self, physical_offset: int, count: int, now_ms: int) -> int:
        """Relocate up to `count` waiting messages, oldest first. Return how many were handled.
        They wait for the same time. 0 means that there are none, or that none can be relocated now. The copies may not
        be on disk when it returns: `pins` changes when they are. Raises the errors of a put. Messages relocated before
        the error remain relocated."""
        raise NotImplementedError


_RETRY_MIN_MS, _RETRY_MAX_MS = 100, 10_000
_LOOK_MS = 500
"""Longest sleep in ms while work is due later, since a jump of the wall clock wakes no thread."""


@dataclass(slots=True)
class _Job:
    mechanism: BackgroundService
    due_ms: int | None = None
    woken: bool = True
    failures: int = 0

    def is_due(self, now_ms: int) -> bool:
        # A failed job ignores wake-ups and waits. Otherwise frequent puts on a full disk would make a busy loop.
        return (self.woken and not self.failures) or (self.due_ms is not None and self.due_ms <= now_ms)


class Housekeeper:
    """Runner of due mechanisms. `start` starts its thread. Without it, a test calls `run_once`.

        next    name      work                      due = min over all; a wake-up makes one due at once
        12:00   delay     run_once(now) -> 12:00:07
        12:03   pop       run_once(now) -> None     only when woken

    The error of a mechanism is logged once and kept in `errors`. The mechanism is tried again after growing pauses,
    because the disk may be full. The others continue.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self.errors: dict[str, str] = {}
        """Error of each mechanism that failed in its last run. A successful run removes it."""
        self._name = name
        self._clock = clock
        self.turn = Lock()
        """Held while a mechanism runs or is saved. Lent to a mechanism: it calls the application, which may save."""
        self._jobs: dict[str, _Job] = {}
        self._bell = Bell()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._last_ms = 0

    def waker(self, name: str) -> Callable[[], None]:
        """Return a function that makes the named mechanism due at once. It may be called before `add`."""

        def wake() -> None:
            if (job := self._jobs.get(name)) is not None:
                job.woken = True  # before the bell, because the woken thread reads it
            self._bell.ring()

        return wake

    def add(self, name: str, mechanism: BackgroundService) -> None:
        """Add a mechanism. It is due at once, then at the times that its `run_once` returns."""
        self._jobs[name] = _Job(mechanism)

    def run(self, name: str) -> None:
        """Run the named mechanism until it is no longer due. Call this before `start`.
        Python collects no garbage meanwhile. Each collection would go through all messages in flight, and with a
        million of them take almost half of the time."""
        job, now_ms, collects = self._jobs[name], self._clock.now_ms(), gc.isenabled()
        try:
            gc.disable()
            while job.is_due(now_ms):
                self._run(name, job, now_ms)
        finally:
            if collects:
                gc.enable()

    def run_once(self, now_ms: int) -> int | None:
        """Run the due mechanisms. Return the next due time. One caller at a time."""
        if now_ms < self._last_ms:  # the clock was set back, so times of the old clock are meaningless
            for job in self._jobs.values():
                job.due_ms = now_ms
        self._last_ms = now_ms
        for name, job in self._jobs.items():
            if self._stopping:
                return None
            if job.is_due(now_ms):
                self._run(name, job, now_ms)
        return self.next_due_ms(now_ms)

    def next_due_ms(self, now_ms: int) -> int | None:
        """Return the next due time, or None if only a wake-up can make a mechanism due."""
        if any(job.is_due(now_ms) for job in self._jobs.values()):
            return now_ms
        return min((job.due_ms for job in self._jobs.values() if job.due_ms is not None), default=None)

    def _run(self, name: str, job: _Job, now_ms: int) -> None:
        job.woken = False
        try:
            with self.turn:
                job.due_ms = self.turn.lend(partial(job.mechanism.run_once, now_ms))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if self.errors.get(name) != text:
                _log.error("%s: %s: %s", self._name, name, text, exc_info=True)
            self.errors[name] = text
            job.due_ms = now_ms + min(_RETRY_MAX_MS, _RETRY_MIN_MS << min(job.failures, 10))
            job.failures += 1
        else:
            job.failures = 0
            self.errors.pop(name, None)

    def start(self) -> None:
        """Run due mechanisms in a thread until `stop`."""
        self._thread = start_thread(self, self._bell, "housekeeper")

    def step(self) -> float | None:
        """Run the due mechanisms in the thread (`mqstore.threads`). Return the time to wait, or None after `stop`."""
        if self._stopping:
            return None
        due_ms = self.run_once(self._clock.now_ms())
        return math.inf if due_ms is None else max(0, min(due_ms - self._clock.now_ms(), _LOOK_MS)) / 1000

    def stop(self, timeout_s: float) -> bool:
        """Start no other job, and wait for the running one. Return True if it has ended."""
        self._stopping = True
        self._bell.ring()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def soon(self, work: Callable[[], object]) -> None:
        """Call `work` under `turn`, unless a mechanism runs for long: its put may be waiting for this thread."""
        if self.turn.acquire(timeout=0.5):
            try:
                work()
            finally:
                self.turn.release()

    def persist(self, first: Iterable[Callable[[], object]] = ()) -> list[Exception]:
        """Call `first`, then save every mechanism, the last one added first. Log and return the errors."""
        return self._do([*first, *(job.mechanism.persist for job in reversed(self._jobs.values()))])

    def close(self, timeout_s: float, *, persist: bool = True) -> bool:
        """Stop, then save (`persist`) and close every mechanism. Return False if one still runs after the timeout."""
        stopped = self.stop(timeout_s)
        with self.turn if stopped else nullcontext():  # a hanging mechanism never releases the lock
            if persist:
                self.persist()
            self._do(job.mechanism.close for job in reversed(self._jobs.values()))
        return stopped

    def _do(self, steps: Iterable[Callable[[], object]]) -> list[Exception]:
        errors = []
        for step in steps:
            try:
                step()
            except Exception as error:  # the others must be saved and closed, too
                _log.exception("%s: not persisted", self._name)
                errors.append(error)
        return errors
