"""Checks for handlers that would not run when they are called (clients#handler-end).

                             before it is called       what comes back of a call
    coroutine function       refused, but by aio       a coroutine: aio awaits it, elsewhere it has not run
    generator function       refused                   a generator: has not run
    of another number of
    arguments                refused                   never called
    what returns one of them is not to be seen         likewise
    anything else            taken                     not looked at

A caller of such a function gets an object, and no work is done. A message acknowledged for that would be lost.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import suppress
from functools import partial
from typing import Any

from mqstore.errors import ConfigError

__all__ = ["check_handler", "check_has_run", "check_plain"]


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


def check_has_run(result: object) -> None:
    """Raise TypeError if a handler has returned work that was not begun."""
    if result is None:
        return
    if inspect.isawaitable(result):
        what, advice = (
            "something to await",
            "Handlers that are coroutines are for mqstore.aio; asyncio.run(...) runs one",
        )
    elif isinstance(result, Generator | AsyncGenerator):
        what, advice = "a generator", "A handler does its work and returns: loop over the generator in it"
    else:
        return
    shown = f"{result!r:.100}"
    if isinstance(result, Coroutine | Generator):
        with suppress(Exception):  # it may run elsewhere, or not end
            result.close()  # otherwise Python warns later, elsewhere
    raise TypeError(f"the handler returned {what} that nobody runs, {shown}: its message was not handled. {advice}")
