"""Group commit: one sync at a time serves all threads that wait for durability (format#flush).

It has a watermark, "every byte below `flushed` is durable", and the rule that decides who syncs next. A function given
at construction syncs. The first caller during whose call no other thread syncs becomes the leader, and syncs in its own
thread. That saves the two thread switches that a flusher thread would cost each lone put. A waiting caller:

    ============  ========================================  ========================================================
    state         meaning                                   ends as
    ============  ========================================  ========================================================
    waiting       another thread leads a round              covered, leading or failed, when its lock is released;
                                                            or its time runs out and it removes itself from the list
    covered       a round ended at or above its target      `wait_until` returns True
    leading       a round ended below its target and it     it runs the next round, then covers or promotes others
                  is the first in line
    failed        a sync failed                             `FlushFailedError`
    ============  ========================================  ========================================================

While any thread waits, one thread leads: a leader leaves by covering all or by promoting the next. If Ctrl-C prevents
this, waiters notice within `_LOOK_S` that no thread leads. A round covers the bytes appended before it started, so a
thread that joins during a round needs one more. A failed sync ends everything, since the kernel may have dropped the
pages that it could not write, and a second sync would report success without them.
"""

from __future__ import annotations

import sys
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable
from itertools import zip_longest
from typing import NoReturn

from mqstore.errors import FlushFailedError, StoreBusyError
from mqstore.files.filesystem import SyncNotBegunError
from mqstore.signalsafe import Lock

_WAITING, _COVERED, _LEADING, _FAILED = range(4)
_LOOK_S = 0.1
"""Interval in seconds at which a waiter checks by itself that a thread leads."""


class _Waiter:
    """Caller in line. `state` is written before `lock` is released, never after."""

    __slots__ = ("following", "lock", "round", "state", "target")

    def __init__(self, target: int | None, in_round: int) -> None:
        self.lock = allocate_lock()
        self.lock.acquire()
        self.state = _WAITING
        self.following: _Waiter | None = None  # waiter to wake next, when covered
        self.target = target
        self.round = in_round


class GroupCommit:
    """A durable watermark that threads wait on.

    `sync(flushed)` is called by one thread at a time with the present watermark. It makes all bytes durable that were
    appended before the call, and returns the new watermark. Any `Exception` it raises is final (format#flush): it is
    saved in `failure`, and from then on each call that needs a sync raises `FlushFailedError`. A `KeyboardInterrupt` of
    the leader proves nothing about the disk: the next in line takes over, as after a `SyncNotBegunError`.
    """

    def __init__(self, sync: Callable[[int], int]) -> None:
        #: Every byte below is durable. Only grows. Reading it needs no lock.
        self.flushed = 0
        #: Error of the failed sync, or None.
        self.failure: BaseException | None = None
        self._sync = sync
        self._lock = Lock()
        self._crowded = False  # the last leader left others in line
        self._leader: int | None = None  # the thread that runs a round
        self._turn = threading.Lock()  # held during a round. Compiled code releases it, however Ctrl-C ends the round
        self._next: _Waiter | None = None  # promoted, and about to run its round
        self._round = 0  # number of started rounds
        self._done = 0  # the last round that succeeded
        self._waiters: list[_Waiter] = []

    @property
    def busy(self) -> bool:
        """Return True if a put is likely to share its sync: one runs, or the last one had others in line."""
        return self._turn.locked() or self._next is not None or self._crowded

    def wait_until(self, target: int, timeout_s: float | None) -> bool:
        """Return True once every byte below `target`, which must have been appended, is durable.

        Returns False if another thread's sync has not covered it within `timeout_s` seconds (None: no limit). Then it
        is stored, and its durability is unknown. A sync in this thread cannot be interrupted, so a call may last
        longer. Raises `FlushFailedError` if a sync failed, now or earlier, unless the target was covered before, and
        `SyncNotBegunError` if this thread could not start one.
        """
        return self.flushed >= target or self._join(target, timeout_s)

    def sync_now(self) -> None:
        """Make all bytes durable that were appended before this call. Errors are those of `wait_until`."""
        self._join(None, None)

    def poison(self, error: BaseException) -> None:
        """Act as if a sync had raised `error`. The first failure is kept."""
        with self._lock:
            self._fail_all(error)

    def _join(self, target: int | None, timeout_s: float | None) -> bool:
        waiter: _Waiter | None = None
        with self._lock:
            if target is not None and self.flushed >= target:
                return True
            if self.failure is not None:
                self._raise_failure()
            if self._leader == threading.get_ident():
                raise StoreBusyError("called in a signal handler that interrupted a sync; call it later")
            joined = self._round
            if self._turn.locked() or self._next is not None:
                waiter = _Waiter(target, joined)
                self._waiters.append(waiter)
        try:
            if waiter is not None:
                if not self._is_told(waiter, timeout_s):
                    return False
                if waiter.state == _COVERED:
                    return True
                if self.failure is not None:
                    self._raise_failure()
            with self._turn:
                self._next = None
                try:
                    self._leader = threading.get_ident()
                    if self.failure is not None:
                        self._raise_failure()
                    if not self._is_covered(target, joined):  # by a faster thread
                        self._run_round()
                finally:
                    self._leader = None
                    self._hand_over()
            if target is not None and self.flushed < target:
                raise AssertionError(f"waited for {target}, but only {self.flushed} bytes had been appended")
            return True
        finally:
            if waiter is not None:
                self._leave(waiter)
                if waiter.following is not None:
                    waiter.following.lock.release()

    def _is_told(self, waiter: _Waiter, timeout_s: float | None) -> bool:
        """Wait until the state of `waiter` changes or no thread leads. Return False if its time is up and it left."""
        end_s = None if timeout_s is None else time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX)
        while True:
            left_s = _LOOK_S if end_s is None else end_s - time.monotonic()
            if waiter.lock.acquire(timeout=max(0, min(left_s, _LOOK_S))) or waiter.state != _WAITING:
                return True
            if left_s <= 0 or not self._turn.locked():
                return not self._leave(waiter) or left_s > 0

    def _run_round(self) -> None:
        """Sync, and record the covered bytes. Only one thread at a time does this."""
        before = sys.exc_info()[1]
        self._round = this_round = self._round + 1
        try:
            end = self._sync(self.flushed)
        except (SyncNotBegunError, StoreBusyError):
            raise  # to this caller, which may be a signal handler. The next in line tries for itself
        except BaseException as error:
            self._judge(error, before)
            raise
        if self.failure is not None:  # poisoned during the sync, so its success proves nothing
            self._raise_failure()
        if end > self.flushed:
            self.flushed = end
        self._done = this_round

    def _is_covered(self, target: int | None, joined: int) -> bool:
        """Return True if a round covers `target`, or without one if it started after round `joined`."""
        return joined < self._done if target is None else target <= self.flushed

    def _leave(self, waiter: _Waiter) -> bool:
        """Remove `waiter` from the list. Return False if its state changed in the meantime. Then that state counts."""
        if waiter.state != _WAITING:
            return False
        with self._lock:
            if waiter.state != _WAITING:
                return False
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            return True

    def _judge(self, error: BaseException, before: BaseException | None) -> None:
        """Save the error of a sync as a failure of the disk, unless it is Ctrl-C alone.
        If Ctrl-C was raised while a failed sync was handled, that failure is saved. `before` is the exception that the
        caller was already handling, and is ignored."""
        verdict: BaseException | None = error
        while verdict is not None and verdict is not before and not isinstance(verdict, Exception):
            verdict = verdict.__context__
        if verdict is None or verdict is before:
            return
        with self._lock:
            self._fail_all(verdict)
        if verdict is error:
            self._raise_failure()

    def _hand_over(self) -> None:
        """Wake the waiters that a round has covered, and promote the first of the others.
        They wake each other in a chain. All at once would compete for the interpreter lock, which takes 1.5 times as
        long for sixteen threads."""
        with self._lock:
            waiters = self._waiters
            self._crowded = bool(waiters)
            if not waiters:
                return
            covered: list[_Waiter] = []
            left: list[_Waiter] = []
            for waiter in waiters:
                (covered if self._is_covered(waiter.target, waiter.round) else left).append(waiter)
            self._waiters = left
            # The successor first: its sync runs without the interpreter lock while the others wake and append.
            if left:
                self._next = successor = left.pop(0)
                successor.state = _LEADING
                successor.lock.release()
            for waiter, following in zip_longest(covered, covered[1:]):
                waiter.following = following
                waiter.state = _COVERED
            if covered:
                covered[0].lock.release()

    def _fail_all(self, error: BaseException) -> None:
        """Save the failure and wake all waiters. The lock is held."""
        if self.failure is None:
            self.failure = error
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.state = _FAILED
            waiter.lock.release()

    def _raise_failure(self) -> NoReturn:
        raise FlushFailedError(
            f"a sync failed ({self.failure}), so the content of the disk is unknown. Close the store and open it again"
        ) from self.failure
