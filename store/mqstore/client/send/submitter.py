"""Submitter: one thread writes the loads of many threads, in order (clients#submit).

    put ---> the line, bounded in number and bytes ---> write(batch)
     ^                                            ^
     waits while it is full                       when the oldest has waited `linger`, `linger_bytes` are there,
                                                  a thread waits for room or in `flush`, or it is closed

It knows no messages. A load is anything with a size in bytes. `write` reports the result of each load to its waiting
caller. So it must answer for each load, and not raise.

    no thread --put--> waiting --due--> writing --> waiting --nothing for 10 s--> no thread
                                                       |
                                                     close --> the line is written, then no thread

If a test owns the time no thread runs. Then `run_once` writes the loads that are due. `flush`, `close`, and a `put`
without room write everything, in the calling thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from mqstore.clock import Clock
from mqstore.errors import StoreClosedError
from mqstore.logger import log as _log
from mqstore.signalsafe import Condition, Lock
from mqstore.threads import HoldingBell, start_thread

_LOOK_S = 0.25
"""Time after which a waiting thread checks that the wait still makes sense."""
_IDLE_S = 10.0

Load = TypeVar("Load")


class Submitter(Generic[Load]):
    """Bounded line with one writer."""

    def __init__(
        self,
        write: Callable[[list[Load]], None],
        clock: Clock,
        *,
        name: str,
        threaded: bool,
        alive: Callable[[], None],
        max_loads: int = 1024,
        max_bytes: int = 100 << 20,
        linger_ms: int = 0,
        linger_bytes: int = 32 << 10,
    ) -> None:
        """`alive` raises once nothing will be written any more. Waiting threads call it now and then."""
        self._write = write
        self._clock = clock
        self._name = name
        self._threaded = threaded
        self._alive = alive
        self.max_loads = max_loads
        self.max_bytes = max_bytes
        self.linger_ms = linger_ms
        self._linger_bytes = linger_bytes
        self._turn = Lock()
        """Held while a batch is taken and written, so that batches do not overtake each other."""
        self._lock = Condition()
        """Threads wait here for a written batch."""
        self._bell = HoldingBell()
        """The writer waits here for due loads. Then it holds this object, and with it the store."""
        self._rested = False
        """True if the writer found nothing when it looked last."""
        self._line: deque[tuple[Load, int]] = deque()
        self._line_bytes = 0
        self._oldest_ms = 0
        """Time at which the first load of the line came (monotonic ms)."""
        self._held = 0
        self._held_bytes = 0
        """Number of bytes in the line or being written."""
        self._taken_in = 0
        self._written = 0
        self._urgent = 0
        """Number of threads that wait for room or in `flush`. Nothing lingers while there are any."""
        self._closed = False
        self._thread: threading.Thread | None = None
        self._writer: int | None = None
        """Identity of the thread that is in `write`."""

    def put(self, load: Load, size: int) -> None:
        """Append a load to the line, and wait for room. A load larger than all the room enters an empty line.

        Raises StoreClosedError after `close`, and the errors of `alive`. Then the load was not taken. If called inside
        `write`, such as by the callback of a future, it does not wait, since it would wait for itself.
        """
        while True:
            with self._lock:
                if self._closed:
                    raise StoreClosedError(f"{self._name} was closed")
                if self._has_room(size) or self._writer == threading.get_ident():
                    self._append(load, size)
                    return
                if self._threaded:
                    self._wait_for_writer(_LOOK_S)
            self._alive()
            if not self._threaded:
                self._write_due(everything=True)

    def _has_room(self, size: int) -> bool:
        if self._held == 0:
            return True
        return self._held < self.max_loads and self._held_bytes + size <= self.max_bytes

    def _append(self, load: Load, size: int) -> None:
        if self._threaded and self._thread is None:  # first, so that nothing is taken if no thread can start
            self._thread = start_thread(self, self._bell, f"submit-{self._name}")
        if not self._line and self.linger_ms:
            self._oldest_ms = self._clock.monotonic_ms()
        # Calls come first: a signal handler may raise after one, and the load must be in completely or not at all.
        if not self._line or self._line_bytes < self._linger_bytes <= self._line_bytes + size:
            self._bell.ring()
        self._bell.held = self
        self._line_bytes += size
        self._held += 1
        self._held_bytes += size
        self._taken_in += 1
        self._line.append((load, size))

    def _wait_for_writer(self, timeout_s: float) -> None:
        """Wait until a batch was written, or the time is over. The caller holds the lock."""
        self._urgent += 1
        try:
            self._bell.ring()
            self._lock.wait(timeout_s)
        finally:
            self._urgent -= 1

    def _due_in_ms(self) -> int | None:
        """Return for how long the line may linger, or None if it is empty. The caller holds the lock."""
        if not self._line:
            return None
        if not self.linger_ms or self._urgent or self._closed or self._line_bytes >= self._linger_bytes:
            return 0
        if self._held >= self.max_loads:
            return 0
        return max(0, self._oldest_ms + self.linger_ms - self._clock.monotonic_ms())

    def _write_due(self, *, everything: bool) -> bool:
        """Write the line as one batch if it is due. Return True if it was."""
        with self._turn:
            with self._lock:
                if self._due_in_ms() != 0 and not (everything and self._line):
                    return False
                batch, size = [load for load, _ in self._line], self._line_bytes
                self._line.clear()
                self._line_bytes = 0
                self._writer = threading.get_ident()
            try:
                self._write(batch)
            finally:
                with self._lock:
                    self._writer = None
                    self._held -= len(batch)
                    self._held_bytes -= size
                    self._written += len(batch)
                    self._lock.notify_all()
        return True

    def step(self) -> float | None:
        """Write the loads that are due, in the thread (`mqstore.threads`). Return None to end it."""
        with self._lock:
            due_ms = self._due_in_ms()
            rested, self._rested = self._rested, due_ms is None
            if due_ms is None:
                self._bell.held = None
                if not (rested or self._closed):
                    return _IDLE_S
                self._rested, self._thread = False, None  # the next `put` starts another
                return None
        if due_ms:
            return due_ms / 1000
        try:
            self._write_due(everything=False)
        except BaseException:  # a fault of ours, or `sys.exit` in a hook: the line continues
            _log.exception("%s: writing submitted messages failed", self._name)
        return 0.0

    def run_once(self) -> int | None:
        """Write the loads that are due. Return in how many ms to call again, or None for the next `put`."""
        while self._write_due(everything=False):
            pass
        with self._lock:
            return self._due_in_ms()

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until everything put before is written. Return False if the time ends. Raises as `alive` does."""
        with self._lock:
            target = self._taken_in
            if self._writer == threading.get_ident():
                return self._written >= target  # as in `put`
        if not self._threaded:
            while self._write_due(everything=True):
                pass
            return True
        end_ms = None if timeout_s is None else self._clock.monotonic_ms() + timeout_s * 1000
        while True:
            with self._lock:
                if self._written >= target:
                    return True
                left_ms = _LOOK_S * 1000 if end_ms is None else end_ms - self._clock.monotonic_ms()
                if left_ms <= 0:
                    return False
                self._wait_for_writer(min(left_ms / 1000, _LOOK_S))
                if self._written >= target:
                    return True
            self._alive()

    def close(self, timeout_s: float) -> list[Load]:
        """Refuse more loads and write the line. Return the loads that were not written in time."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
            self._bell.ring()
            thread = self._thread
            inside = self._writer == threading.get_ident()
        if thread is not None and not inside:
            thread.join(min(timeout_s, threading.TIMEOUT_MAX))
        elif not self._threaded and not inside:
            while self._write_due(everything=True):
                pass
        with self._lock:
            if inside and self._threaded:
                return []  # the writer itself closes, and still writes the whole line
            left = [load for load, _ in self._line]
            self._held -= len(left)
            self._line.clear()
            self._line_bytes = 0
            self._lock.notify_all()
        return left
