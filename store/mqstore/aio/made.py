"""Helpers of the aio classes: objects made, and iterators read, on the store's thread.

await store.queue("jobs")              Made: the object
async with store.queue("jobs") as q    Made: the object, entered; left at the end of the block
async for ... in                       Each: one call for each step
                                       Pages: one call for each page of a synchronous iterator
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager
from itertools import islice
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from mqstore.aio.bridge import Bridge

__all__ = ["Each", "Made", "Pages"]

_PAGE = 64

T = TypeVar("T")


class _Entered(Protocol):
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> object: ...


M = TypeVar("M", bound=_Entered)


class Made(AbstractAsyncContextManager[M], Generic[M]):
    """Object still to be made: `await` it, or enter it by `async with`. Nothing happens before."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, M]]) -> None:
        self._make = make
        self._made: M

    def __await__(self) -> Generator[Any, Any, M]:
        return self._make().__await__()

    async def __aenter__(self) -> M:
        self._made = await self._make()
        entered: M = await self._made.__aenter__()  # type: ignore[attr-defined]  # which gives itself
        return entered

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._made.__aexit__(kind, error, traceback)


class Each(AsyncIterator[T]):
    """Results of `step`, until it returns None. A loop may be left at any time, since it holds nothing."""

    def __init__(self, step: Callable[[], Awaitable[T | None]]) -> None:
        self._step = step

    async def __anext__(self) -> T:
        item = await self._step()
        if item is None:
            raise StopAsyncIteration
        return item


class Pages(AsyncIterator[T]):
    """Synchronous iterator that the store's thread reads page by page. A cancelled step skips nothing."""

    def __init__(self, bridge: Bridge, begin: Callable[[], Iterator[T]]) -> None:
        self._bridge = bridge
        self._begin = begin
        self._items: Iterator[T] | None = None
        self._undone: list[T] = []
        """Items read for a step that was cancelled. Only the thread uses it and `_items`."""
        self._failed: Exception | None = None
        self._page: deque[T] = deque()

    async def __anext__(self) -> T:
        if not self._page:
            self._page.extend(await self._bridge.call(self._turn, self._undone.extend))
            if not self._page:
                raise StopAsyncIteration
        return self._page.popleft()

    def _turn(self) -> list[T]:
        if self._undone:
            page, self._undone[:] = self._undone[:], []
            return page
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        if self._items is None:
            self._items = iter(self._begin())
        page = []
        try:
            page.extend(islice(self._items, _PAGE))
        except Exception as error:
            page = list(page)
            if not page:
                raise
            self._failed = error
        return page
