"""Methods and properties of the aio classes that only forward to the synchronous object.

    topics = called(store.Store.topics)          coroutine: the method runs on the store's thread
    put_many = in_order(store.Store.put_many)    coroutine: the same, and later puts are stored after it
    snapshot = apart(store.Store.snapshot)       coroutine: the method runs on a separate thread
    verify = paged(store.Store.verify)           asynchronous iterator: the store's thread reads it page by page
    queue = made(store.Store.queue, Queue)       the twin, to be awaited or entered
    path = Value[Path](store.Store)              property

Signature and docstring are those of the synchronous class, also for a type checker. So an argument is added or
documented in one place. A method that does more is written out in its class.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial, update_wrapper
from types import TracebackType
from typing import Any, Concatenate, Generic, Never, ParamSpec, Protocol, Self, TypeVar, cast, overload

from mqstore.aio.bridge import Bridge
from mqstore.aio.made import Made, Pages

__all__ = ["Closable", "Twin", "Value", "apart", "called", "in_order", "made", "owned", "paged", "takes"]

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])


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

    async def _call(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, called on the store's thread."""
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


M = TypeVar("M", bound=Closable[Any])


class Forwarded(Protocol[P, R]):
    """Type of a method that forwards: on an object it takes the parameters `P`."""

    @overload
    def __get__(self, instance: None, owner: type[Any], /) -> Callable[Concatenate[Any, P], R]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any], /) -> Callable[P, R]: ...


def called(method: Callable[Concatenate[Any, P], T]) -> Forwarded[P, Coroutine[Any, Any, T]]:
    """Return a coroutine method that calls `method` of the synchronous object on the store's thread."""

    @_as(method, "Runs on the store's thread. If cancelled, it has not begun, or runs to its end.")
    async def forward(self: Any, /, *args: Any, **options: Any) -> Any:
        return await self._call(_bound(self, method, args, options))

    return cast(Forwarded[P, Coroutine[Any, Any, T]], forward)


def in_order(method: Callable[Concatenate[Any, P], T]) -> Forwarded[P, Coroutine[Any, Any, T]]:
    """Return a coroutine method, as `called` does, that stores messages in the order of the calls."""

    @_as(method, "Stores messages in the order of the calls. If cancelled, it has not begun, or runs to its end.")
    async def forward(self: Any, /, *args: Any, **options: Any) -> Any:
        self._check()
        return await self._puts.in_order(_bound(self, method, args, options))

    return cast(Forwarded[P, Coroutine[Any, Any, T]], forward)


def apart(method: Callable[Concatenate[Any, P], T]) -> Forwarded[P, Coroutine[Any, Any, T]]:
    """Return a coroutine method that calls a slow `method` on a separate thread."""

    @_as(method, "Runs on a thread of its own, and calls back there. If cancelled, it runs to its end.")
    async def forward(self: Any, /, *args: Any, **options: Any) -> Any:
        self._check()
        return await asyncio.to_thread(_bound(self, method, args, options))

    return cast(Forwarded[P, Coroutine[Any, Any, T]], forward)


def made(
    method: Callable[Concatenate[Any, P], object], twin: Callable[..., M], undo: Callable[[M], object] | None = None
) -> Forwarded[P, Made[M]]:
    """Return a method that makes a `twin` of what `method` makes, on the store's thread.

    If the call is cancelled, `undo` is called with a twin that was made.
    """

    @_as(method, "To be awaited, or entered by `async with`, which closes it at its end.")
    def forward(self: Any, /, *args: Any, **options: Any) -> Any:
        make = partial(twin, self._bridge, self._puts, self.sync, *args, **options)
        return Made(partial(self._bridge.call, make, undo))

    return cast(Forwarded[P, Made[M]], forward)


def paged(method: Callable[Concatenate[Any, P], Iterator[T]]) -> Forwarded[P, AsyncIterator[T]]:
    """Return a method whose asynchronous iterator reads that of `method` on the store's thread."""

    @_as(method, "For `async for`. Other calls of this store wait while a page is read.")
    def forward(self: Any, /, *args: Any, **options: Any) -> Any:
        return Pages(self._bridge, _bound(self, method, args, options))

    return cast(Forwarded[P, AsyncIterator[T]], forward)


def _bound(self: Any, method: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Callable[[], Any]:
    """Return a call of `method` with copies of arguments that its caller may change meanwhile."""
    copies = {name: owned(value) for name, value in options.items()}
    return partial(getattr(self.sync, method.__name__), *map(owned, args), **copies)


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


def _as(method: Callable[..., Any], note: str) -> Callable[[F], F]:
    """Give a function the name, signature and docstring of `method`, and add the note."""

    def decorate(forward: F) -> F:
        update_wrapper(forward, method)
        forward.__doc__ = f"{inspect.cleandoc(method.__doc__ or '')}\n\n{note}"
        return forward

    return decorate


def takes(sync: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the parameters of `sync`."""

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        function.__signature__ = inspect.signature(sync)  # type: ignore[attr-defined]
        return function

    return decorate


class Value(Generic[T]):
    """A property of the synchronous object, read on the loop."""

    def __init__(self, sync: type[Any]) -> None:
        self._sync = sync

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name
        self.__doc__ = getattr(self._sync, name).__doc__

    @overload
    def __get__(self, instance: None, owner: type[Any], /) -> Self: ...
    @overload
    def __get__(self, instance: Twin[Any], owner: type[Any], /) -> T: ...
    def __get__(self, instance: Twin[Any] | None, owner: type[Any], /) -> Self | T:
        return self if instance is None else getattr(instance.sync, self._name)

    def __set__(self, instance: Twin[Any], value: Never, /) -> None:
        raise AttributeError(f"{self._name} of {instance!r} cannot be set")
