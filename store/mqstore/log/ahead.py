"""One call made ahead of its turn, in a thread of its own: for reading, which waits for the disk or runs compiled code,
and so lets what was read before be dealt with meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from types import TracebackType
from typing import Generic, TypeVar

__all__ = ["Ahead", "stay_alone"]

_T = TypeVar("_T")
_alone = False


def stay_alone() -> None:
    """From now on this process makes each call in its turn: it is one of as many as there are processors, and a second
    thread would take the time of another one."""
    global _alone
    _alone = True


class Ahead(Generic[_T]):
    """To be used in a `with`, at whose end nothing runs any more. By one thread at a time.

    >>> with Ahead[int]("mqstore-example") as ahead:
    ...     ahead.begin(lambda: 6 * 7)
    ...     ahead.result(), ahead.begun
    (42, False)
    """

    def __init__(self, name: str) -> None:
        """`name`: of the thread, which there is from the first call on."""
        self._name = name
        self._threads: ThreadPoolExecutor | None = None
        self._process = 0
        """Of the thread: a fork leaves it behind."""
        self._call: Callable[[], _T] | None = None
        self._future: Future[_T] | None = None
        """Of the call, until it is made."""

    @property
    def begun(self) -> bool:
        """Whether there is a call whose result was not taken."""
        return self._call is not None

    def begin(self, call: Callable[[], _T]) -> None:
        """Have it made. Only when the one before was taken."""
        assert self._call is None
        self._call, self._future = call, None
        if _alone:
            return
        if self._threads is None or self._process != os.getpid():
            self._threads, self._process = ThreadPoolExecutor(1, self._name), os.getpid()
        try:
            self._future = self._threads.submit(call)
        except RuntimeError:  # no more threads: the interpreter is ending, or the system has no room for one
            # The call may wait there for a thread that comes later, when it has long been made.
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def result(self) -> _T:
        """What it gave, or raised; where there is no thread it is made now."""
        assert self._call is not None
        call, future = self._call, self._future
        self._call = None
        if future is None or self._process != os.getpid():
            return call()
        try:
            return future.result()
        finally:
            if future.done():  # else Ctrl-C: the end will wait for it
                self._future = None

    def __enter__(self) -> Ahead[_T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._threads is not None:
            try:
                with suppress(RuntimeError):  # this is the thread itself: the garbage collector runs anywhere
                    self._threads.shutdown()
            except BaseException:
                # Ctrl-C. What the call works with will be given back, and Python may take its thread for ended now.
                while self._future is not None and not self._future.done():
                    with suppress(KeyboardInterrupt):
                        wait([self._future])
                raise
