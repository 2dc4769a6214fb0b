"""When a delivery was made and whether it is over, by a wall clock that may be set back (delivery#clock).

    pop time       when it was popped, or its receipt was changed; the receipt names it
    visible time   when the message comes again; what lies between the two is the invisible time

Both are stored, so both are wall time. A clock set back by less than the invisible time makes a delivery last longer by
as much. Set back by more it would hold the message for as long as the clock was wrong: such a delivery is over, as if
its time had run out. What is changed since is told by the new clock: its visible time lies before its pop time then.
"""

from __future__ import annotations

__all__ = ["SAME_MOMENT_MS", "is_visible", "pop_time"]

SAME_MOMENT_MS = 1_000
"""How far a pop time may be ahead of the clock with nobody having set that back."""


def pop_time(now_ms: int, last_ms: int) -> int:
    """Now, or just behind `last_ms` if that is now: the pop time is what tells two deliveries of a message apart. After
    a clock was set back it is now again: the past is not to hold messages invisible."""
    return last_ms + 1 if now_ms <= last_ms < now_ms + SAME_MOMENT_MS else now_ms


def is_visible(pop_time_ms: int, visible_ms: int, now_ms: int) -> bool:
    """Whether a delivery is over: its time has come, or its pop time lies farther ahead than its invisible time can
    explain.

    >>> is_visible(1_000_000, 1_060_000, 1_059_999), is_visible(1_000_000, 1_060_000, 1_060_000)
    (False, True)
    >>> is_visible(1_000_000, 1_060_000, 1_000_000 - 60_000), is_visible(1_000_000, 1_060_000, 1_000_000 - 61_001)
    (False, True)
    """
    if visible_ms <= now_ms:
        return True
    lasts_ms = visible_ms - pop_time_ms
    return lasts_ms >= -SAME_MOMENT_MS and pop_time_ms - now_ms > max(0, lasts_ms) + SAME_MOMENT_MS
