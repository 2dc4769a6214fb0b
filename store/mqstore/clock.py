"""Time as a parameter: what a store knows about clocks.

Everything that reads a clock takes a `Clock`. Production uses `SystemClock`; a test moves a `SimulatedClock` by
hand and calls the `run_once(now_ms)` functions that a background thread would call.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["SYSTEM_CLOCK", "Clock", "SimulatedClock", "SystemClock"]


class Clock(Protocol):
    """Clock of a store.

    Any object with these two methods will do:

    >>> class Late:  # an hour behind
    ...     def now_ms(self):
    ...         return SYSTEM_CLOCK.now_ms() - 3_600_000
    ...
    ...     def monotonic_ms(self):
    ...         return SYSTEM_CLOCK.monotonic_ms()
    >>> import mqstore, tempfile
    >>> config = mqstore.StoreConfig(clock=Late())
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder, config=config) as store:
    ...     receipt = store.put("t", b"")
    ...     SYSTEM_CLOCK.now_ms() - receipt.store_timestamp_ms >= 3_600_000
    True
    """

    def now_ms(self) -> int:
        """Wall-clock time, milliseconds since the epoch. May step backwards."""

    def monotonic_ms(self) -> int:
        """Milliseconds on a scale that never steps back. Its zero has no meaning."""


class SystemClock:
    """The machine's clocks.

    >>> clock = SystemClock()
    >>> before = clock.monotonic_ms()
    >>> before <= clock.monotonic_ms(), abs(clock.now_ms() - time.time() * 1000) < 60_000
    (True, True)
    """

    __slots__ = ()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000


class SimulatedClock:
    """A clock that stands still until a test moves it.

    >>> clock = SimulatedClock(1_700_000_000_000)
    >>> clock.advance(7_200_000)
    >>> clock.now_ms()
    1700007200000
    """

    __slots__ = ("_monotonic_ms", "_now_ms")

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic_ms = 0

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def advance(self, duration_ms: int) -> None:
        """Let `duration_ms` pass on both scales."""
        self._now_ms += duration_ms
        self._monotonic_ms += duration_ms

    def set_wall(self, now_ms: int) -> None:
        """Step the wall clock alone, as NTP or an operator might."""
        self._now_ms = now_ms


SYSTEM_CLOCK = SystemClock()
