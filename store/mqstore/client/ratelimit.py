"""Rate limit of a worker loop: at most one start in each interval, for all items or for each key (clients#queue-run).

    an item comes ---- its key is free within 0.25 s ----> its start is reserved, the caller holds it until then
                  +--- later ----------------------------> given back until its planned start, the end of its key's line

So an item holds up others for a quarter of a second at most. A limit without keys holds every item, since no other item
could start earlier. A key has two times: its next start, and the time for which the last item was given back. Items are
given back for five minutes at most. Later starts are not planned, so a restart without the limit waits no longer.

At most 65,536 keys are stored. Then those that are free are forgotten. If none is, an item of another key waits like
one of a key that is at its limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from typing import Final

from mqstore.errors import ConfigError
from mqstore.options import _UNIT_MS
from mqstore.signalsafe import Lock

HOLD_MS: Final = 250
"""Longest time that an item of a limited key is held. Later ones are given back."""
PARK_MS: Final = 300_000
"""Longest time for which an item is given back."""
KEYS_MAX: Final = 1 << 16

_RATE = re.compile(r"(\d+(?:\.\d+)?)/(\d+(?:\.\d+)?)?([smhd])")


def interval_ms(rate: str) -> float:
    """Return the time between two starts. Raises ConfigError for a rate that is not like "10/s" or "1/2.5s".

    >>> interval_ms("10/s"), interval_ms("1/2.5s"), interval_ms("90/h")
    (100.0, 2500.0, 40000.0)
    """
    match = _RATE.fullmatch(str(rate))
    interval = 0.0
    if match is not None and float(match[1]):
        interval = float(match[2] or 1) * _UNIT_MS[match[3]] / float(match[1])
    if not 0 < interval < math.inf:
        raise ConfigError(f"rate is a number per s, m, h or d, such as '10/s', '90/h' or '1/2.5s', not {rate!r:.80}")
    return interval


class RateLimit:
    """Times at which items may start, at most one of a key in each interval. Thread-safe.

    >>> limit = RateLimit("1/s", hold_ms=0)
    >>> [limit.wait_ms("a", 0), limit.wait_ms("a", 0), limit.wait_ms("b", 0), limit.wait_ms("a", 0)]
    [0.0, 1000.0, 0.0, 2000.0]
    """

    def __init__(self, rate: str, *, hold_ms: float = HOLD_MS) -> None:
        self._interval_ms = interval_ms(rate)
        self.hold_ms = hold_ms
        """Longest wait for which `wait_ms` has reserved the start. After a longer one the item has to ask again."""
        self._lock = Lock()
        self._keys: dict[Hashable, tuple[float, float]] = {}
        """Next start of a key, and end of the starts that are planned for items given back (ms)."""
        self._swept_ms = -math.inf
        """Time of the last look for keys that are free."""

    def wait_ms(self, key: Hashable, now_ms: float) -> float:
        """Return the time after which an item of `key` may start."""
        with self._lock:
            if key not in self._keys and len(self._keys) >= KEYS_MAX:
                pause_ms = min(self._interval_ms, PARK_MS)
                if now_ms >= self._swept_ms + pause_ms:  # not for each item
                    self._swept_ms = now_ms
                    self._keys = {each: times for each, times in self._keys.items() if times[1] > now_ms}
                if len(self._keys) >= KEYS_MAX:
                    return self.hold_ms + pause_ms
            free_ms, planned_ms = self._keys.get(key, (now_ms, now_ms))
            start_ms = max(now_ms, free_ms)
            if start_ms - now_ms <= self.hold_ms:
                free_ms = start_ms + self._interval_ms
            else:
                start_ms = max(planned_ms, free_ms)
                if start_ms - now_ms > PARK_MS:
                    return PARK_MS
                planned_ms = start_ms + self._interval_ms
            self._keys[key] = free_ms, max(planned_ms, free_ms)
            return float(start_ms - now_ms)
