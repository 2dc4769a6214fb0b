"""Bases of the asyncio classes. A method of the synchronous class becomes one of theirs in one of these ways:

    called     a coroutine: runs on the store's thread, by `LoopThread.call` or another method of that class
    paged      an asynchronous iterator: the store's thread reads it page by page
    made       an object, made on the store's thread: `await` it, or enter it by `async with`
    like       written out, because it is called on the loop or waits by callback
    Value      a property

Names, parameters and docstrings are those of the synchronous method.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from functools import partial, wraps
from itertools import islice
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Never, ParamSpec, Self, TypeVar, cast

from mqstore.aio.loop_thread import LoopThread, owned
from mqstore.options import Duration, seconds

_PAGE = 64

P = ParamSpec("P")
S = TypeVar("S", covariant=True)
T = TypeVar("T")


class AsyncBase(Generic[S]):
    """A synchronous object, and the bridge to the thread that calls it."""

    __slots__ = ("_bridge", "sync")

    def __init__(self, bridge: LoopThread, sync: S) -> None:
        """Objects are made by methods of `mqstore.aio`, on the store's thread."""
        self._bridge = bridge
        self.sync: S = sync
        """The object of the synchronous library."""

    def __repr__(self) -> str:
        return repr(self.sync)


class Closable(AsyncBase[S]):
    """A twin that is closed at the end of its `async with` block, as the synchronous object is."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: Any) -> None:
        sync: Any = self.sync
        await self._bridge.finish(partial(sync.__exit__, *error))


class Made(Generic[T]):
    """Object still to be made: `await` it, or enter it by `async with`. Nothing happens before."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._make = make

    def __await__(self) -> Generator[Any, Any, T]:
        return self._make().__await__()

    if not TYPE_CHECKING:  # type checkers report the missing attribute themselves

        def __getattr__(self, name: str) -> Never:
            raise AttributeError(f"no {name!r} before `await`, as in `queue = await store.queue('jobs')`")

    async def __aenter__(self) -> T:
        made: Any = await self._make()
        self._made = made
        return cast(T, await made.__aenter__())  # which gives itself

    async def __aexit__(self, *error: Any) -> None:
        await self._made.__aexit__(*error)


class Pages(AsyncIterator[T]):
    """Synchronous iterator that the store's thread reads page by page. A cancelled step skips nothing."""

    def __init__(self, bridge: LoopThread, begin: Callable[[], Iterator[T]]) -> None:
        self._bridge = bridge
        self._begin: Callable[[], Iterator[T]] | None = begin
        self._items: Iterator[T] = iter(())
        self._page: deque[T] = deque()
        """Items that were read, by cancelled steps too."""

    async def __anext__(self) -> T:
        if not self._page:
            await self._fill()
        if not self._page:
            raise StopAsyncIteration
        return self._page.popleft()

    async def _fill(self) -> None:
        await self._bridge.call(self._read)

    def _read(self) -> None:
        """Read a page, on the thread."""
        if self._begin is not None:
            self._items, self._begin = self._begin(), None
        try:
            self._page.extend(islice(self._items, _PAGE))
        except Exception as error:
            if not self._page:
                raise
            self._items = _raising(error)


def _raising(error: Exception) -> Iterator[Any]:
    yield from ()
    raise error


class Value(Generic[T]):
    """Property of the synchronous object, which can only be read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, twin: Any, owner: type | None = None) -> T:
        value: Any = self if twin is None else getattr(twin.sync, self._name)
        return cast(T, value)

    def __set__(self, twin: Any, value: Never) -> None:
        raise AttributeError(f"{self._name} can only be read")


def called(
    method: Callable[Concatenate[Any, P], T],
    way: Callable[[LoopThread, Callable[[], T]], Coroutine[Any, Any, T]] = LoopThread.call,
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a coroutine function that calls the method by `way(bridge, work)`."""

    @wraps(method)
    async def call(self: Any, /, *args: P.args, **options: P.kwargs) -> T:
        return await way(self._bridge, _work(self, method, args, options))

    call.__doc__ = _doc(method, way)
    return call


def paged(method: Callable[Concatenate[Any, P], Iterator[T]]) -> Callable[Concatenate[Any, P], AsyncIterator[T]]:
    """Return a function for `async for`. Other calls of the store wait while a page is read."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **options: P.kwargs) -> AsyncIterator[T]:
        return Pages(self._bridge, _work(self, method, args, options))

    return call


def made(method: Callable[Concatenate[Any, P], Any], twin: Callable[..., T]) -> Callable[Concatenate[Any, P], Made[T]]:
    """Return a function that has the store's thread make an object, and `twin(bridge, object)`.
    If that is cancelled, its block has ended."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **options: P.kwargs) -> Made[T]:
        def make() -> T:
            return twin(self._bridge, getattr(self.sync, method.__name__)(*args, **options))

        return Made(partial(self._bridge.call, make, lambda made: made.sync.__exit__(None, None, None)))

    return call


def takes(sync: Callable[P, object]) -> Callable[[Callable[..., T]], Callable[P, T]]:
    """Give a function the parameters of `sync`, and its docstring in front of the function's."""

    def decorate(function: Callable[..., T]) -> Callable[P, T]:
        function.__signature__ = inspect.signature(sync)  # type: ignore[attr-defined]
        function.__doc__ = _doc(sync, function)
        return function

    return decorate


def like(
    method: Callable[Concatenate[Any, P], object],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """Decorate a method as `takes` does."""
    return takes(method)


def _doc(method: Any, other: Any) -> str:
    """Return the docstring of a synchronous method without its example, followed by that of `other`."""
    text = (inspect.getdoc(method) or "").partition(">>>")[0].rstrip()
    return f"{text}\n\n{inspect.getdoc(other) or ''}".rstrip()


def _work(twin: AsyncBase[Any], method: Any, args: Any, options: Any) -> Callable[[], Any]:
    """Return the call. Arguments are copied, so that the caller may change them while it waits."""
    given = {name: owned(value) for name, value in options.items()}
    return partial(getattr(twin.sync, method.__name__), *map(owned, args), **given)


def limit(timeout: Duration | None) -> float | None:
    """Return the longest wait in seconds, or None for ever. Raises ConfigError for a bad time."""
    wait_s = None if timeout is None else seconds(timeout, "timeout")
    return None if wait_s == math.inf else wait_s
