"""Times of deliveries, by a wall clock that may be set back (delivery#clock).

    pop time       time of the pop, or of the last change of the receipt, which names it
    visible time   time at which the message is redelivered; the time between the two is the invisible time

Both are stored, so both are wall time. A clock set back by less than the invisible time makes a delivery last longer by
as much. If the clock is set back by more, the delivery would hold its message for as long as the clock was wrong. Such
a delivery is over, as if its time had ended. A later change uses the new clock, so that its visible time may lie before
its pop time.
"""

from __future__ import annotations

__all__ = ["SAME_MOMENT_MS", "is_visible", "pop_time"]

SAME_MOMENT_MS = 1_000
"""Number of ms that a pop time may be ahead of a clock that was not set back."""


def pop_time(now_ms: int, last_ms: int) -> int:
    """Return `now_ms`, or `last_ms` + 1 if the two are about the same moment.
    The pop time distinguishes two deliveries of a message. After a clock was set back it is `now_ms`, because old times
    must not keep messages invisible."""
    return last_ms + 1 if now_ms <= last_ms < now_ms + SAME_MOMENT_MS else now_ms


def is_visible(pop_time_ms: int, visible_ms: int, now_ms: int) -> bool:
    """Return True if a delivery is over.
    Either its visible time has come, or its pop time is farther in the future than its invisible time can explain.

    >>> is_visible(1_000_000, 1_060_000, 1_059_999), is_visible(1_000_000, 1_060_000, 1_060_000)
    (False, True)
    >>> is_visible(1_000_000, 1_060_000, 1_000_000 - 60_000), is_visible(1_000_000, 1_060_000, 1_000_000 - 61_001)
    (False, True)
    """
    if visible_ms <= now_ms:
        return True
    lasts_ms = visible_ms - pop_time_ms
    return lasts_ms >= -SAME_MOMENT_MS and pop_time_ms - now_ms > max(0, lasts_ms) + SAME_MOMENT_MS
