"""Prefetch: a call that runs in a separate thread before its result is needed.
It suits reads, which wait for the disk or run compiled code. Meanwhile the caller handles the previous result."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from types import TracebackType
from typing import Generic, TypeVar

_T = TypeVar("_T")
_alone = False


def stay_alone() -> None:
    """Run each later call of this process when its result is needed, without a thread.
    For a process that is one of as many as there are processors. A second thread would take time from the others."""
    global _alone
    _alone = True


class Prefetch(Generic[_T]):
    """Runner of calls, used in a `with` by one thread at a time. No call runs after the `with`."""

    def __init__(self, name: str) -> None:
        """`name` is the name of the thread, which the first call starts."""
        self._name = name
        self._threads: ThreadPoolExecutor | None = None
        self._process = 0
        """Process that started the thread. A fork does not copy the thread."""
        self._call: Callable[[], _T] | None = None
        self._future: Future[_T] | None = None
        """Result of the call, while it runs in the thread."""

    @property
    def begun(self) -> bool:
        """True if there is a call whose result was not fetched."""
        return self._call is not None

    def begin(self, call: Callable[[], _T]) -> None:
        """Start a call. The previous result must have been fetched."""
        assert self._call is None
        self._call, self._future = call, None
        if _alone:
            return
        if self._threads is None or self._process != os.getpid():
            self._threads, self._process = ThreadPoolExecutor(1, self._name), os.getpid()
        try:
            self._future = self._threads.submit(call)
        except RuntimeError:  # no more threads: the interpreter is shutting down, or the system has no room for one
            # Without this, the call might still run in a later thread, long after `result` has run it here.
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    def result(self) -> _T:
        """Return the result of the call, or raise its error. Without a thread, make the call now."""
        assert self._call is not None
        call, future = self._call, self._future
        self._call = None
        if future is None or self._process != os.getpid():
            return call()
        try:
            return future.result()
        finally:
            if future.done():  # after Ctrl-C it may not be, and `__exit__` waits for it
                self._future = None

    def __enter__(self) -> Prefetch[_T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._threads is not None:
            try:
                with suppress(RuntimeError):  # the garbage collector may run this in the thread itself
                    self._threads.shutdown()
            except BaseException:
                # After Ctrl-C the caller closes the objects that the call uses, so wait. Python may count the thread as
                # ended.
                while self._future is not None and not self._future.done():
                    with suppress(KeyboardInterrupt):
                        wait([self._future])
                raise
