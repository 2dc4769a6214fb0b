"""Checks for handlers that would not run when they are called (clients#handler-end), and exceptions that they raise.

A coroutine function is refused before it is called, except in aio. So is a generator function, or a function of
another number of arguments. A call that returns a coroutine or a generator has failed.

A caller of such a function gets an object, and no work is done. A message acknowledged for that would be lost.

A handler decides about its messages:

    returns                           done
    raises Retry(delay)               again after `delay`; None: by the retry policy
    raises Reject(reason)             to the dead letters
    raises BatchFailure(failed)       of a batch: those again, all others done
    raises anything else              logged with its traceback, again by the retry policy
    returns COMMIT or ROLLBACK        with `auto_commit=False`: all messages since the last commit are done, or again

The exceptions are not errors of the store, so `except MQStoreError` in a handler does not catch them.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any, Final

from mqstore.client.limitedlog import LimitedLog
from mqstore.errors import ConfigError, MQStoreError
from mqstore.log.message import Message
from mqstore.options import Duration, seconds


def check_handler(handler: object, *, coroutines: bool = False) -> None:
    """Raise ConfigError for a handler that cannot be called, or would do nothing if called.
    If `coroutines`, coroutine functions are awaited, and so allowed."""
    if not callable(handler):
        raise ConfigError(f"a handler is something to call, not {handler!r:.100}")
    if not coroutines and _is(handler, _makes_coroutines):
        raise ConfigError(f"{handler!r:.100} is a coroutine function; those are for mqstore.aio")
    if _is(handler, inspect.isasyncgenfunction) or (
        _is(handler, inspect.isgeneratorfunction) and not _is(handler, _makes_coroutines)
    ):
        raise ConfigError(
            f"{handler!r:.100} has a `yield`, which makes it a generator function: nothing of it would run when it is "
            f"called. Have the handler do its work and return"
        )
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):  # Python does not know it for some builtins
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise ConfigError(
            "a handler is called with one argument, the message (with batch_size above 1 a tuple of messages); "
            f"{handler!r:.100} cannot be: {error}"
        ) from None


def check_plain(what: str, function: Callable[..., object]) -> None:
    """Raise ConfigError for a coroutine function where it is never awaited, which holds for aio too."""
    if _is(function, _makes_coroutines) or _is(function, inspect.isasyncgenfunction):
        raise ConfigError(f"{what} is called as it is, so it must be a plain function, not {function!r:.100}")


def _is(handler: Callable[..., object], test: Callable[[Any], bool]) -> bool:
    """Return True if `test` holds for a function, a method, a callable object, or a partial of these."""
    while isinstance(handler, partial):
        handler = handler.func
    return test(handler) or test(getattr(type(handler), "__call__", None))  # noqa: B004  (of its class, not its own)


def _makes_coroutines(function: Any) -> bool:
    if inspect.iscoroutinefunction(function):
        return True
    code = getattr(function, "__code__", None)  # a generator function under `types.coroutine` returns an awaitable
    return bool(getattr(code, "co_flags", 0) & inspect.CO_ITERABLE_COROUTINE)


class Decision(Enum):
    """Result of an ordered handler with `auto_commit=False`, about all messages that were handled since the last one.
    `COMMIT` settles them. `ROLLBACK` has them delivered again, without counting attempts."""

    COMMIT = "commit"
    ROLLBACK = "rollback"


COMMIT: Final = Decision.COMMIT
ROLLBACK: Final = Decision.ROLLBACK


def check_has_run(result: object) -> Decision | None:
    """Return a handler's result if it is a decision. Raise TypeError if it is work that was not started."""
    if isinstance(result, Decision) or result is None:
        return result
    if inspect.isawaitable(result):
        what, advice = (
            "something to await",
            "Handlers that are coroutines are for mqstore.aio; asyncio.run(...) runs one",
        )
    elif isinstance(result, Generator | AsyncGenerator):
        what, advice = "a generator", "A handler does its work and returns: loop over the generator in it"
    else:
        return None
    shown = f"{result!r:.100}"
    if isinstance(result, Coroutine | Generator):
        with suppress(Exception):  # it may run elsewhere, or not end
            result.close()  # otherwise Python warns later, elsewhere
    raise TypeError(f"the handler returned {what} that nobody runs, {shown}: its message was not handled. {advice}")


class Retry(Exception):  # noqa: N818  (an order, no error)
    """Redeliver this message after `delay` seconds or a timedelta. The attempt counts.
    With None the retry policy decides. An ordered push consumer suspends the queue meanwhile, for 0.01 to 60 seconds.
    In mode "pop", simple consumers and `store.queue` the longest delay is 12 hours. A longer delay is shortened to the
    longest one, and the log says so once.

    Raises ConfigError for a delay that is not a number of seconds, is negative or endless.
    >>> Retry(delay=2).delay_s
    2.0
    """

    __reduce__ = MQStoreError.__reduce__

    def __init__(self, delay: Duration | None = None) -> None:
        self.delay_s = None if delay is None else _finite(delay)
        super().__init__("again" if self.delay_s is None else f"again in {self.delay_s:g} s")


class Reject(Exception):  # noqa: N818
    """Dead-letter this message, with the reason: a text, or an exception.

    >>> Reject("no such customer").reason
    'no such customer'
    """

    __reduce__ = MQStoreError.__reduce__

    def __init__(self, reason: object = "") -> None:
        self.reason = reason
        super().__init__(reason or "rejected")


class BatchFailure(Exception):  # noqa: N818
    """Redeliver messages of a batch: `failed` by the retry policy, and `untried`, whose attempts do not count.
    All others are done. An ordered consumer takes the first named message as the failed one, and redelivers it alone.
    All messages after it in the batch are redelivered after it. Their attempts do not count.

    Raises ConfigError for `untried` without `failed`: the handler would be called again with the same messages.

    >>> BatchFailure([]).failed
    ()
    """

    __reduce__ = MQStoreError.__reduce__

    def __init__(self, failed: Iterable[Message], untried: Iterable[Message] = ()) -> None:
        self.failed = tuple(failed)
        self.untried = tuple(untried)
        if self.untried and not self.failed:
            raise ConfigError("a BatchFailure with untried messages names a failed one too, or nothing would change")
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
