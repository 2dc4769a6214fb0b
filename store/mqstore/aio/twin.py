"""Bases of the aio classes. What they only forward is in `forwards.py`, which a script writes.

A method that does more is written out in its class.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Generic, ParamSpec, Self, TypeVar

from mqstore.aio.bridge import Bridge

__all__ = ["Closable", "Twin", "owned", "takes"]

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class Twin(Generic[S]):
    """A synchronous object, and the bridge to the thread that calls it."""

    __slots__ = ("_bridge", "sync")

    def __init__(self, bridge: Bridge, sync: S) -> None:
        self._bridge = bridge
        self.sync: S = sync
        """The object of the synchronous library."""

    def _check(self) -> None:
        """Raise StoreClosedError or RuntimeError if nothing can be called here."""
        self._bridge.check()

    async def _call(self, work: Callable[P, T], /, *args: P.args, **options: P.kwargs) -> T:
        """Return the result of `work`, called on the store's thread."""
        return await self._run(partial(work, *args, **options) if args or options else work)

    async def _run(self, work: Callable[[], T]) -> T:
        return await self._bridge.call(work)

    def __repr__(self) -> str:
        return repr(self.sync)


class Closable(Twin[S], ABC):
    """A twin that is closed at the end of its `async with` block."""

    @abstractmethod
    async def _leave(self, error: BaseException | None) -> None:
        """Close at the end of the block, after `error` if there was one."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._leave(error)


def owned(value: Any) -> Any:
    """Return a copy of an argument, so that its caller may change it while the call waits.

    Iterables are read here, on the loop, since they belong to the caller.
    """
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | tuple):
        return [bytes(each) if isinstance(each, bytearray | memoryview) else each for each in value]
    return value


def takes(sync: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the parameters of `sync`."""

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        function.__signature__ = inspect.signature(sync)  # type: ignore[attr-defined]
        return function

    return decorate
