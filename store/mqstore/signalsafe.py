"""Locks and wake-ups that an exception of a signal handler cannot break.

CPython runs signal handlers in the main thread, between two bytecodes: at the start of a function, after a call of
compiled code, and at the end of a loop's turn. A handler may raise there, as Ctrl-C does. These rules follow for all
code that an application's thread can run:

* Every lock is a `Lock`, taken by `with`. An exception between `lock.acquire()` and a `try` leaves the lock held for
  ever. So does one inside the `__enter__` of a class written in Python, such as `threading.Condition`,
  `threading.Event` and `contextlib.contextmanager`: those are for background threads only.
  (CPython 3.14 may raise right after the `with` of any lock: docs/design.md, Signals.)
* A handler may call the store, too. It then interrupts its own thread, which may hold any lock. A `Lock` is not
  reentrant, and refuses its owner with StoreBusyError. The interrupted code sees it as an exception of the handler.
* State that has to be undone (a count, a mark, an entry in a list) is set inside the `try` whose `finally` undoes it.
  Undoing it is harmless if it was not set. It is better to have no such state, and to derive it.
* Under a lock, the step that makes a change visible is one bytecode, and it comes last.

`Bell` and `Gate` replace `threading.Event`, `Condition` replaces `threading.Condition`, and `Future` replaces
`concurrent.futures.Future`.
"""

from __future__ import annotations

import concurrent.futures
import gc
import inspect
import os
import re
import threading
from _thread import RLock, allocate_lock
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakSet

from mqstore.errors import StoreBusyError, StoreClosedError

Result = TypeVar("Result")
T = TypeVar("T")


def _timeout(timeout_s: float | None) -> float:
    """Convert `timeout_s` for `lock.acquire`: -1 for None and infinity, 0 for a negative time."""
    if timeout_s is None or timeout_s > threading.TIMEOUT_MAX:
        return -1.0
    return max(timeout_s, 0.0)


class Lock(RLock):  # type: ignore[misc]  # final for typeshed, not for CPython
    """Lock that knows its owner and its process. All locks of a store are of this kind.

    A thread that wants a lock it already has is in a signal handler that interrupted it, and gets StoreBusyError. So
    does a handler that wants the lock of a thread which waits for the interrupted thread. In a forked child the locks
    of the parent raise StoreClosedError, since no thread of the child could release them.

    >>> lock = Lock()
    >>> with lock:
    ...     lock.is_held_here
    True
    """

    __slots__ = ("_process", "is_lent")

    if TYPE_CHECKING:

        def _is_owned(self) -> bool:
            """Return True if the calling thread has this lock. `threading.Condition` relies on it, too."""

    def __init__(self) -> None:
        self._process = _process
        self.is_lent = False
        """True while the owner lends the lock (`lend`)."""

    @property
    def __enter__(self):  # type: ignore[no-untyped-def, override]
        """Compiled function for `with`. Looking it up here already takes the lock, or raises."""
        if self._process is not _process or self._is_owned():
            self.refuse_owner()
            return super().__enter__
        try:
            if not self.acquire(False):
                self._wait()
            return self._is_owned
        except BaseException:  # from a signal handler. It can raise only before the return, which makes no call
            if self._is_owned():
                self.release()
            raise

    def _wait(self) -> None:
        """Take the lock, which another thread has. The main thread wakes up to look for deadlocks with its handlers."""
        me = threading.get_ident()
        try:
            _waiting[me] = self
            while not self.acquire(timeout=_LOOK_S if me == threading.main_thread().ident else -1):
                if me in self._owners():
                    raise StoreBusyError("called in a signal handler while another thread waits for it; call it later")
        finally:
            _waiting.pop(me, None)

    def _owners(self) -> Iterator[int]:
        """Yield the thread that has this lock, the one that has the lock for which that thread waits, and so on."""
        lock: Lock | None = self
        for _ in range(len(_waiting) + 1):
            found = None if lock is None else _OWNER.search(repr(lock))
            if found is None:
                return
            yield int(found[1])
            lock = _waiting.get(int(found[1]))

    def lend(self, work: Callable[[], Result]) -> Result:
        """Return `work()`, which may take this lock, too: it calls the application, or methods that take the lock."""
        before = self.is_lent
        try:
            self.is_lent = True
            return work()
        finally:
            self.is_lent = before

    is_held_here = property(RLock._is_owned, doc="True if the calling thread has this lock.")  # type: ignore[attr-defined]

    @property
    def is_inherited(self) -> bool:
        """True in a forked child of the process that made this lock."""
        return self._process is not _process

    def refuse_owner(self) -> None:
        """Raise the error that `with` would raise without waiting."""
        if self._process is not _process:
            steps = f"use it in process {os.getppid()}, which forked this one, or close it there and open it here"
            raise StoreClosedError(f"this belongs to another process: {steps}")
        if self._is_owned() and not self.is_lent:
            raise StoreBusyError("called in a signal handler that interrupted a call with this lock; call it later")


_LOOK_S = 0.01
"""Interval at which the main thread, where signal handlers run, checks that no thread waits for it."""
_OWNER = re.compile(r"owner=([1-9]\d*)")
_waiting: dict[int, Lock] = {}
"""Lock for which each thread waits."""
_process = object()
"""Identity of this process for its locks."""


def _begin_child() -> None:
    global _process
    _process = object()
    _waiting.clear()


os.register_at_fork(after_in_child=_begin_child)


def in_each_child(call: Callable[[T], object]) -> WeakSet[T]:
    """Return a set. A forked child does `call` with each object that is in it."""
    members: WeakSet[T] = WeakSet()
    os.register_at_fork(after_in_child=lambda: [call(each) for each in list(members)])
    return members


_CLOSING = ("__exit__", "_close_stopped", "_end_all", "_in_time", "check_holds_none", "close", "stop")


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("mqstore.")


def check_holds_none() -> None:
    """Raise StoreBusyError if the calling thread has a lock that is not lent.
    For calls that wait for threads which may want that lock. Such a call is made by a signal handler. The check goes
    through all locks of the process, but only if the call was made inside another call of this package."""
    frame = inspect.currentframe()
    while frame is not None and (frame.f_code.co_name in _CLOSING or not _is_ours(frame)):
        frame = frame.f_back
    if frame is not None and frame.f_code.co_name != "__del__":
        for each in gc.get_referrers(Lock, *Lock.__subclasses__()):  # an object refers to its class
            if issubclass(type(each), Lock) and each.is_held_here and not each.is_lent:
                raise StoreBusyError("called in a signal handler that interrupted a call with a lock; call it later")


class Bell:
    """Wake-up of one waiting thread. Several rings before a wait count as one.

    Any thread may ring, even a signal handler in the middle of its own thread's wait.

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
            try:  # noqa: SIM105  # `suppress` would take twice as long as the rest
                self._lock.release()
            except RuntimeError:  # another thread has just rung
                pass

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for a ring, at most `timeout_s` seconds (None: without limit). Return True if it was rung."""
        return self._lock.acquire(timeout=_timeout(timeout_s))


class Condition(Lock):  # type: ignore[misc]
    """`threading.Condition` that is its own lock, taken by `with`.

    >>> changed = Condition()
    >>> with changed:
    ...     changed.notify_all()
    ...     changed.wait(0.001)
    False
    """

    __slots__ = ("_bells",)

    def __init__(self) -> None:
        super().__init__()
        self._bells: list[Bell] = []

    def wait(self, timeout: float | None = None) -> bool:
        """Release the lock, wait for `notify_all`, and take the lock again. Return True if notified.
        Waits at most `timeout` seconds (None: without limit)."""
        bell = Bell()
        try:
            self._bells.append(bell)
            self.release()
            rung = bell.wait(timeout)
            self.acquire()
            return rung
        except BaseException:  # not `finally`: a signal handler may raise in there, too
            if not self.is_held_here:
                self.acquire()
            raise
        finally:
            self._bells[:] = [each for each in self._bells if each is not bell]

    def notify_all(self) -> None:
        """Wake all that wait. The lock is held."""
        for bell in self._bells:
            bell.ring()


class Future(concurrent.futures.Future[Result]):
    """`concurrent.futures.Future` whose `result` survives Ctrl-C.
    The standard one would stay locked for ever, and block the thread that sets its result.

    Its condition is made when somebody first waits or looks, since most futures of puts are done before. Only a future
    that is running, which nobody can cancel, gets its result without one."""

    _has_condition = False

    def __init__(self) -> None:
        self._state, self._result, self._exception = "PENDING", None, None
        self._waiters = []
        self._done_callbacks: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name != "_condition":
            raise AttributeError(name)
        self._has_condition = True  # first: `set_result` looks at it after the change of the state
        return vars(self).setdefault(name, Condition())

    def done(self) -> bool:
        return self._state in ("FINISHED", "CANCELLED", "CANCELLED_AND_NOTIFIED")

    def set_result(self, result: Result) -> None:
        if self._has_condition or self._state != "RUNNING":
            super().set_result(result)
            return
        self._result = result
        self._state = "FINISHED"
        if self._has_condition:  # somebody has looked in between, and perhaps waits
            with self._condition:  # type: ignore[unreachable]  # for mypy, nobody else changes it
                for waiter in self._waiters:
                    waiter.add_result(self)
                self._condition.notify_all()
            self._invoke_callbacks()

    def result(self, timeout: float | None = None) -> Result:
        if self._state == "FINISHED" and self._exception is None:
            return cast("Result", self._result)
        return super().result(timeout)


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
        """Open the gate for all waiting and later threads. May be repeated."""
        with self._opened:
            self.is_open = True
            self._opened.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait at most `timeout_s` seconds (None: without limit) for the gate to open. Return True if it is open."""
        with self._opened:
            if not self.is_open:
                self._opened.wait(timeout_s)
            return self.is_open
