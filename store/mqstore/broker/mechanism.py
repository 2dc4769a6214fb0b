"""What a broker's background services have in common, and the thread that runs them (ARCHITECTURE.md).

    mechanism   run_once(now_ms) -> next_run_ms     does what is due; a housekeeper thread or a test calls it
                persist()                           writes its state to disk
                close()                             releases listeners and files
                pins()                              records of the log that it still needs
    roller      waiting_below(offset)               those of them that it can relocate to the log end
                roll(offset, count, now_ms)         relocates them

Each mechanism gets a function `wake` for "something may be due before my next run". Any thread may call it.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mqstore.clock import Clock
from mqstore.signalsafe import Bell, Lock
from mqstore.threads import start_thread

__all__ = ["Housekeeper", "Mechanism", "Pin", "Roller", "Wake", "oldest_of"]

_log = logging.getLogger("mqstore")

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
    """Number of bytes in front of the record that must stay, too: there may be its body (`references.py`)."""

    @property
    def kept_from(self) -> int:
        """Physical offset of the first byte that must stay."""
        return max(0, self.physical_offset - self.reach)


def oldest_of(pins: Iterable[Pin]) -> Pin | None:
    """Return the pin that keeps the most, or None without one."""
    return min(pins, default=None, key=lambda pin: pin.kept_from)


class Mechanism:
    """Background mechanism of a broker. Never runs, saves or closes in two threads at once (`Housekeeper.turn`)."""

    def run_once(self, now_ms: int) -> int | None:
        """Do what is due at `now_ms` (wall clock). Return the time of the next run, None: when woken."""
        raise NotImplementedError

    def persist(self) -> None:
        """Write to disk everything that the next process must know. For saving, snapshots and closing."""

    def close(self) -> None:
        """Release listeners and files. Called once, after the last `persist`, while the store is still open."""

    def pins(self) -> Iterable[Pin]:
        """Return pins of the oldest records that the mechanism still needs. This class needs none."""
        return ()


class Roller(Mechanism):
    """Mechanism that keeps messages for long, and can relocate them (delivery#retention-bound).
    Relocated messages do not hold the log that was written since. Both methods are called in the thread of
    `run_once`."""

    def waiting_below(self, physical_offset: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return physical offsets and sizes of waiting records below `physical_offset`. An estimate."""
        raise NotImplementedError

    def roll(self, physical_offset: int, count: int, now_ms: int) -> int:
        """Relocate up to `count` waiting messages, oldest first. Return how many were handled.
        They wait for the same time. 0 means that there are none, or that none can be relocated now. The copies may not
        be on disk when it returns: `pins` changes when they are. Raises what a put raises, after which relocated
        messages stay so."""
        raise NotImplementedError


_RETRY_MIN_MS, _RETRY_MAX_MS = 100, 10_000
_LOOK_MS = 500
"""Longest sleep in ms while something is due later. Nobody reports a jump of the wall clock."""


@dataclass(slots=True)
class _Job:
    mechanism: Mechanism
    due_ms: int | None = None
    woken: bool = True
    failures: int = 0

    def is_due(self, now_ms: int) -> bool:
        # A failed job is not woken, but waits. Otherwise frequent puts would make a full disk a busy loop.
        return (self.woken and not self.failures) or (self.due_ms is not None and self.due_ms <= now_ms)


class Housekeeper:
    """Runner of due mechanisms. `start` gives it a thread. Without one, a test calls `run_once`.

        next    name      work                      due = min over all; a wake-up makes one due at once
        12:00   delay     run_once(now) -> 12:00:07
        12:03   pop       run_once(now) -> None     only when woken

    A mechanism that fails is logged once, is shown in `errors`, and is tried again after growing pauses, because the
    disk may be full. The others continue.
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
                job.woken = True  # before the bell: the woken thread looks here
            self._bell.ring()

        return wake

    def add(self, name: str, mechanism: Mechanism) -> None:
        """Add a mechanism. It is due at once, then at the times that its `run_once` returns."""
        self._jobs[name] = _Job(mechanism)

    def run(self, name: str) -> None:
        """Run the mechanism of that name until nothing of it is due, before `start`."""
        job, now_ms = self._jobs[name], self._clock.now_ms()
        while job.is_due(now_ms):
            job.woken = False
            self._run(name, job, now_ms)

    def run_once(self, now_ms: int) -> int | None:
        """Run what is due. Return the next due time. One caller at a time."""
        if now_ms < self._last_ms:  # the clock was set back: times of the old clock mean nothing now
            for job in self._jobs.values():
                job.due_ms = now_ms
        self._last_ms = now_ms
        for name, job in self._jobs.items():
            if self._stopping:
                return None
            if job.is_due(now_ms):
                job.woken = False
                self._run(name, job, now_ms)
        return self.next_due_ms(now_ms)

    def next_due_ms(self, now_ms: int) -> int | None:
        """Return the next due time, or None if only a wake-up can make something due."""
        if any(job.is_due(now_ms) for job in self._jobs.values()):
            return now_ms
        return min((job.due_ms for job in self._jobs.values() if job.due_ms is not None), default=None)

    def _run(self, name: str, job: _Job, now_ms: int) -> None:
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
        """Do the work of the thread (`mqstore.threads`) that is due. Return None after `stop`."""
        if self._stopping:
            return None
        due_ms = self.run_once(self._clock.now_ms())
        return math.inf if due_ms is None else max(0, min(due_ms - self._clock.now_ms(), _LOOK_MS)) / 1000

    def stop(self, timeout_s: float) -> bool:
        """Wait for the running job and start no other. Return True if it has ended."""
        self._stopping = True
        self._bell.ring()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def soon(self, work: Callable[[], object]) -> None:
        """Call `work` under `turn`, or not if a mechanism runs for long: it may have called a put that waits for this
        thread."""
        if self.turn.acquire(timeout=0.5):
            try:
                work()
            finally:
                self.turn.release()

    def persist(self, first: Iterable[Callable[[], object]] = ()) -> list[Exception]:
        """Save `first`, then every mechanism, the last one added first. Return the errors, which are logged."""
        return self._do([*first, *(job.mechanism.persist for job in reversed(self._jobs.values()))])

    def close(self, timeout_s: float, *, persist: bool = True) -> bool:
        """Stop, then save (`persist`) and close every mechanism. Return False if one still runs after the timeout."""
        stopped = self.stop(timeout_s)
        with self.turn if stopped else nullcontext():  # a mechanism that hangs has the lock
            if persist:
                self.persist()
            self._do(job.mechanism.close for job in reversed(self._jobs.values()))
        return stopped

    def _do(self, steps: Iterable[Callable[[], object]]) -> list[Exception]:
        errors = []
        for step in steps:
            try:
                step()
            except Exception as error:  # the others are saved and closed, even if one fails
                _log.exception("%s: not persisted", self._name)
                errors.append(error)
        return errors
