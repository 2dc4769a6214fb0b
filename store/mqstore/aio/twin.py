"""Bases of the asyncio classes. What they only forward becomes theirs in one of these ways:

    called     a coroutine: the method runs on the store's thread, or in another way of the class
    paged      an asynchronous iterator: the store's thread reads it page by page
    Value      a property

Names, parameters and docstrings are those of the synchronous class. A method that does more is written out.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, Never, ParamSpec, Self, TypeVar, cast

from mqstore.aio.bridge import Bridge
from mqstore.aio.made import Pages

__all__ = ["Closable", "Twin", "Value", "apart", "called", "owned", "paged", "takes", "to_its_end"]

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


class Value(Generic[T]):
    """Property of the synchronous object, which can only be read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, twin: Any, owner: type | None = None) -> T:
        value: Any = self if twin is None else getattr(twin.sync, self._name)
        return cast(T, value)

    def __set__(self, twin: Any, value: Never) -> None:
        raise AttributeError(f"{self._name} can only be read")


async def on_thread(self: Any, work: Callable[[], T]) -> T:
    """Run on the store's thread. If cancelled, it has not begun, or runs to its end."""
    result: T = await self._bridge.call(work)
    return result


async def to_its_end(self: Any, work: Callable[[], T]) -> T:
    """Run on the store's thread, to its end. A cancellation is raised after that."""
    result: T = await self._bridge.finish(work)
    return result


async def apart(self: Any, work: Callable[[], T]) -> T:
    """Run on a thread of its own, and call back there. If cancelled, it runs to its end."""
    self._check()
    return await asyncio.to_thread(work)


def called(
    method: Callable[Concatenate[Any, P], T], way: Callable[[Any, Callable[[], T]], Coroutine[Any, Any, T]] = on_thread
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a coroutine function that calls the method by `way(self, work)`."""

    @wraps(method)
    async def call(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        return await way(self, _work(self, method, args, options))

    doc = (inspect.getdoc(method) or "").partition(">>>")[0].rstrip()
    call.__doc__ = f"{doc}\n\n{way.__doc__}"
    return call


def paged(method: Callable[Concatenate[Any, P], Iterator[T]]) -> Callable[Concatenate[Any, P], AsyncIterator[T]]:
    """Return a function for `async for`. Other calls of the store wait while a page is read."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **options: P.kwargs) -> AsyncIterator[T]:
        return Pages(self._bridge, _work(self, method, args, options))

    return call


def _work(twin: Twin[Any], method: Any, args: Iterable[Any], options: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the call. Arguments are copied, so that the caller may change them while it waits."""
    given = {name: owned(value) for name, value in options.items()}
    return partial(getattr(twin.sync, method.__name__), *map(owned, args), **given)


def owned(value: Any) -> Any:
    """Return a copy of an argument. Iterables are read here, on the loop, since they belong to the caller."""
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
