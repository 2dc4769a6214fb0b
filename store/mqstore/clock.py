"""Time as a parameter: the clocks of a store.

Everything that reads a clock takes a `Clock`. Production uses `SystemClock`; a test moves a `SimulatedClock` by
hand and calls the `run_once(now_ms)` functions that a background thread would call.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Clock of a store.

    Any object with these two methods is a clock:

    >>> class Late:  # one hour slow
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
        """Return the wall-clock time in ms since the epoch. It may step backwards."""

    def monotonic_ms(self) -> int:
        """Return milliseconds on a scale that never steps back. Its zero is arbitrary."""


class SystemClock:
    """The clocks of the machine.

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
    """A clock that only moves when a test moves it.

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
        """Move both scales forward by `duration_ms`."""
        self._now_ms += duration_ms
        self._monotonic_ms += duration_ms

    def set_wall(self, now_ms: int) -> None:
        """Step only the wall clock, as NTP or an operator might."""
        self._now_ms = now_ms


SYSTEM_CLOCK = SystemClock()
