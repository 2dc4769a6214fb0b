"""Locks and wake-ups that an exception of a signal handler cannot break.

CPython runs signal handlers in the main thread, between two bytecodes: at the start of a function, behind a call of
compiled code, and where a loop turns back. A handler may raise there, as Ctrl-C does. These rules follow for everything
that an application's thread can run:

* A lock is taken by `with` on a `threading.Lock` or `RLock` itself. Between `lock.acquire()` and a `try` an exception
  leaves the lock held for ever. So does one inside the `__enter__` of a class written in Python, such as
  `threading.Condition`, `threading.Event` and `contextlib.contextmanager`: those are for background threads only.
  (CPython 3.14 may raise behind the `with` of any lock: docs/design.md, Signals.)
* State that has to be taken back (a count, a mark, an entry in a list) is set inside the `try` whose `finally` takes it
  back, and taking it back is harmless where it was not set. Better is no such state: derive it.
* Under a lock, the step that makes a change visible is one bytecode, and it comes last.
* `RLock`, where a signal handler may call the function that it interrupts.

`Bell` and `Gate` stand in for `threading.Event`, `Condition` for `threading.Condition`, `Future` for
`concurrent.futures.Future`.
"""

from __future__ import annotations

import concurrent.futures
import threading
from _thread import RLock, allocate_lock
from contextlib import suppress
from typing import TypeVar

__all__ = ["Bell", "Condition", "Future", "Gate", "is_held_here"]

Result = TypeVar("Result")


def _timeout(timeout_s: float | None) -> float:
    """Return `timeout_s` as `lock.acquire` takes it: -1 for None and infinity, 0 for a negative time."""
    if timeout_s is None or timeout_s > threading.TIMEOUT_MAX:
        return -1.0
    return max(timeout_s, 0.0)


def is_held_here(lock: RLock) -> bool:
    """Return True if the calling thread holds `lock`: it is a signal handler that interrupted the holder."""
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # threading.Condition relies on it, too


class Bell:
    """Wake-up of one waiting thread. Several rings before a wait count as one.

    Any thread may ring, a signal handler in the middle of its own thread's wait included.

    >>> bell = Bell()
    >>> bell.ring(); bell.ring()
    >>> bell.wait(0), bell.wait(0)
    (True, False)
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()

    def ring(self) -> None:
        """End the present wait, or the next one if nobody waits."""
        if self._lock.locked():
            with suppress(RuntimeError):  # another thread has just rung
                self._lock.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a ring, at most `timeout_s` seconds (None: without limit). Return True if it was rung."""
        return self._lock.acquire(timeout=_timeout(timeout_s))


class Condition(RLock):  # type: ignore[misc]  # final for typeshed, not for CPython
    """`threading.Condition` that is its own lock, taken by `with`. The caller of `wait` holds it once.

    >>> changed = Condition()
    >>> with changed:
    ...     changed.notify_all()
    ...     changed.wait(0.001)
    False
    """

    # Derived from RLock, and not made of one: so `with` runs compiled code only.
    __slots__ = ("_bells",)

    def __init__(self) -> None:
        self._bells: list[Bell] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Give the lock back, wait for `notify_all`, and take the lock again. Return True if it was notified.
        It waits at most `timeout` seconds (None: without limit)."""
        bell = Bell()
        try:
            self._bells.append(bell)
            self.release()
            rung = bell.wait(timeout)
            self.acquire()
            return rung
        except BaseException:  # not `finally`: a signal handler may raise in there, too
            if not is_held_here(self):
                self.acquire()
            raise
        finally:
            self._bells[:] = [each for each in self._bells if each is not bell]

    def notify_all(self) -> None:
        """Wake all that wait. The lock is held."""
        for bell in self._bells:
            bell.ring()


class Future(concurrent.futures.Future[Result]):
    """`concurrent.futures.Future` that survives Ctrl-C in `result`.
    The standard one stays locked for ever then, and with it the thread that sets its result."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()  # type: ignore[assignment]


class Gate:
    """Gate that is opened once, for any number of waiting threads.

    >>> gate = Gate()
    >>> gate.wait(0)
    False
    >>> gate.open(); gate.wait()
    True
    """

    __slots__ = ("_opened", "is_open")

    def __init__(self) -> None:
        self.is_open = False
        self._opened = Condition()

    def open(self) -> None:
        """Let everybody through, now and later. May be repeated."""
        with self._opened:
            self.is_open = True
            self._opened.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait at most `timeout_s` seconds (None: without limit) for the gate to open. Return True if it is open."""
        with self._opened:
            if not self.is_open:
                self._opened.wait(timeout_s)
            return self.is_open
