"""Options of a put that route a message: message group, delay, delivery time, delay level."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from mqstore.errors import InvalidMessageError
from mqstore.layout.properties import DELAY, TIMER_DELIVER_MS
from mqstore.log.outgoing import ROUTING, check_integer, user_properties
from mqstore.log.reader import to_ms
from mqstore.options import Duration, seconds

__all__ = ["routed_properties"]


def routed_properties(options: Mapping[str, Any], *, now_ms: int, max_delay_ms: int) -> dict[str, str]:
    """Return what `user_properties` does for all options of a put, including those of `ROUTING`.
    Raises InvalidMessageError as that does, and for two options that exclude each other."""
    given = [name for name in ROUTING if options.get(name) is not None]
    if len(given) > 1:
        raise InvalidMessageError(f"{' and '.join(given)} exclude each other: give one of them", given[1])
    stored = user_properties(
        options.get("tag"),
        options.get("keys"),
        options.get("properties"),
        options.get("unique_key"),
        options.get("message_group"),
    )
    level = options.get("delay_level")
    if level is not None:
        check_integer(level, 32, "delay_level")
        if level < 0:
            raise InvalidMessageError(f"delay_level {level} is negative; 0 is no delay", "delay_level")
        if level:
            stored[DELAY] = str(level)
    deliver_ms = _deliver_ms(options.get("delay"), options.get("deliver_at"), now_ms, max_delay_ms)
    if deliver_ms is not None:
        stored[TIMER_DELIVER_MS] = str(deliver_ms)
    return stored


def _deliver_ms(delay: Duration | None, deliver_at: object, now_ms: int, max_delay_ms: int) -> int | None:
    """Return the requested time, rounded up to the next millisecond, or None for no delay."""
    if delay is not None:
        try:
            wait_ms = math.ceil(seconds(delay, "delay") * 1000)
        except (ValueError, OverflowError, TypeError) as error:  # ConfigError is a ValueError
            raise InvalidMessageError(f"delay {delay!r} is no number of seconds, zero or more", "delay") from error
        if wait_ms > max_delay_ms:
            raise InvalidMessageError(
                f"delay {delay!r} is longer than max_delay, {max_delay_ms / 1000:g} seconds", "delay"
            )
        return now_ms + wait_ms if wait_ms else None
    if deliver_at is None:
        return None
    if isinstance(deliver_at, datetime):
        return to_ms(deliver_at)
    if isinstance(deliver_at, (int, float)) and not isinstance(deliver_at, bool):
        with suppress(OverflowError):  # of an int beyond every float
            if math.isfinite(deliver_at):
                return math.ceil(deliver_at * 1000)
    raise InvalidMessageError(
        f"deliver_at {deliver_at!r} is neither an aware datetime nor seconds since the epoch", "deliver_at"
    )
