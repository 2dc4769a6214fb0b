"""Exceptions by which a handler decides about its messages.

    returns                           done
    raises Retry(delay)               again after `delay`; None: by the retry policy
    raises Reject(reason)             to the dead letters
    raises BatchFailure(failed)       of a batch: those again, all others done
    raises anything else              logged with its traceback, again by the retry policy
They are no errors of the store, so `except MQStoreError` in a handler does not catch them.
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
    """Redeliver this message after `delay` seconds or a timedelta. The attempt counts.
    With None the retry policy decides. An ordered push consumer suspends the queue meanwhile, for 0.01 to 60 seconds.
    In mode "pop", simple consumers and `store.queue` the longest delay is 12 hours. A longer delay is shortened to the
    longest one, and the log says so once.

    Raises ConfigError for a delay that is not a number of seconds, is negative or endless.
    >>> Retry(delay=2).delay_s
    2.0
    """

    def __init__(self, delay: Duration | None = None) -> None:
        self.delay_s = None if delay is None else _finite(delay)
        super().__init__("again" if self.delay_s is None else f"again in {self.delay_s:g} s")


class Reject(Exception):  # noqa: N818
    """Dead-letter this message, with the reason.

    >>> Reject("no such customer").reason
    'no such customer'
    """

    def __init__(self, reason: str = "") -> None:
        self.reason = reason
        super().__init__(reason or "rejected")


class BatchFailure(Exception):  # noqa: N818
    """Redeliver only the messages in `failed` of a batch, by the retry policy. The others are done.
    In an ordered consumer they must be the end of the batch, since no message behind a failed one is done.

    >>> BatchFailure([]).failed
    ()
    """

    def __init__(self, failed: Iterable[Message]) -> None:
        self.failed = tuple(failed)
        super().__init__(f"{len(self.failed)} messages of a batch failed")


def retry_delay(error: Retry) -> float | None:
    """Return the delay in seconds, or None for that of the retry policy.
    An exception of a user's own class may lack the delay."""
    try:
        delay_s = getattr(error, "delay_s", None)
    except Exception:
        return None
    sane = isinstance(delay_s, int | float) and 0 <= delay_s < math.inf
    return delay_s if sane else None


def shortened(delay_s: float | None, longest_s: float, log: LimitedLog, message: Message) -> float | None:
    """Return the delay of a `Retry`, at most `longest_s`. A shortened delay is logged.
    An error here would leave the message unsettled, since the handler that raised `Retry` has ended."""
    if delay_s is None or delay_s <= longest_s:
        return delay_s
    what = f"it was to be redelivered in {delay_s:g} s; the longest delay here is {longest_s:g} s"
    log.say(logging.WARNING, what, at=message, like="shortened", once=True)
    return longest_s


def _finite(delay: Duration) -> float:
    value = seconds(delay, "delay")
    return seconds(-1, "delay") if value == math.inf else value
