"""How a handler says what became of its messages.

    returns                           done
    raises Retry(delay)               again after `delay`; None: as the retry policy says
    raises Reject(reason)             to the dead letters
    raises BatchFailure(failed)       of a batch: those again, all others done
    raises anything else              logged with its traceback, again as the retry policy says

These three are no errors of the store: who catches `MQStoreError` in a handler does not catch them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable

from mqstore.client.limitedlog import LimitedLog
from mqstore.log.message import Message
from mqstore.options import Duration, seconds

__all__ = ["BatchFailure", "Reject", "Retry", "retry_delay", "shortened"]


class Retry(Exception):  # noqa: N818  (an order, no error)
    """Deliver this message again: after `delay` seconds (or a timedelta), None: as the retry policy says. The attempt
    counts. In an ordered push consumer its queue is suspended meanwhile, 0.01 to 60 seconds. What is on loan (mode
    "pop", simple consumers, `store.queue`) comes again in 12 hours at most. A longer delay is the longest there is, and
    the log says so once.

    ConfigError for a delay that is no number of seconds, negative or endless.

    >>> Retry(delay=2).delay_s
    2.0
    """

    def __init__(self, delay: Duration | None = None) -> None:
        self.delay_s = None if delay is None else _finite(delay)
        super().__init__("again" if self.delay_s is None else f"again in {self.delay_s:g} s")


class Reject(Exception):  # noqa: N818
    """Give this message up: it goes to the group's dead letters, with the reason.

    >>> Reject("no such customer").reason
    'no such customer'
    """

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        super().__init__(reason or "rejected")


class BatchFailure(Exception):  # noqa: N818
    """Of a batch only `failed` could not be handled; they come again as the retry policy says, the rest is done. In an
    ordered consumer they must be the end of the batch: what stands behind a failure is not done either.

    >>> BatchFailure([]).failed
    ()
    """

    def __init__(self, failed: Iterable[Message]) -> None:
        self.failed = tuple(failed)
        super().__init__(f"{len(self.failed)} messages of a batch failed")


def retry_delay(error: Retry) -> float | None:
    """Seconds, None: as the retry policy says. The exception may be of the user's own class: whatever it lacks."""
    try:
        delay_s = getattr(error, "delay_s", None)
    except Exception:
        return None
    sane = isinstance(delay_s, int | float) and 0 <= delay_s < math.inf
    return delay_s if sane else None


def shortened(delay_s: float | None, longest_s: float, log: LimitedLog, message: Message) -> float | None:
    """What comes of the delay of a `Retry` where there is a longest one. Refusing it would leave its message to nobody:
    who could be told has raised it, and is gone."""
    if delay_s is None or delay_s <= longest_s:
        return delay_s
    what = f"it was to come again in {delay_s:g} s; the longest delay here is {longest_s:g} s"
    log.say(logging.WARNING, what, at=message, like="shortened", once=True)
    return longest_s


def _finite(delay: Duration) -> float:
    value = seconds(delay, "delay")
    return seconds(-1, "delay") if value == math.inf else value
