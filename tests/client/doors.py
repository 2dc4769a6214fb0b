"""A queue by its three doors: in this process, over a connection, with coroutines. One test of a verb runs in each."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mqstore
import mqstore.aio
from mqstore.aio.loop_thread import LoopThread
from mqstore.aio.store import Store as AsyncStore
from mqstore.broker import opening
from mqstore.remote.broker import RemoteBroker
from tests.client.popsupport import Bench
from tests.connecting import ConnectedBroker

DOORS = ("here", "connect", "aio")


class Awaited:
    """An object of `mqstore.aio` whose coroutines are awaited on a loop in another thread. Its iterators are lists."""

    def __init__(self, on_loop: Callable[[Any], Any], wrapped: Any) -> None:
        self._on_loop, self._wrapped = on_loop, wrapped

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._wrapped, name)
        return (lambda *args, **options: self._call(found, args, options)) if callable(found) else self._shown(found)

    def _call(self, method: Any, args: Any, options: Any) -> Any:
        async def call() -> Any:
            result = method(*[_unwrapped(each) for each in args], **options)
            if isinstance(result, AsyncIterator):
                return [each async for each in result]
            return await result if inspect.isawaitable(result) else result

        found = self._on_loop(call())
        if isinstance(found, list):
            return [self._shown(each) for each in found]
        return self._shown(found)

    def _shown(self, found: Any) -> Any:
        return Awaited(self._on_loop, found) if type(found).__module__.startswith("mqstore.aio") else found


def _unwrapped(each: Any) -> Any:
    if isinstance(each, list):
        return [_unwrapped(one) for one in each]
    return getattr(each, "_wrapped", each)


class Doors(Bench):
    """A store whose clock stands still unless `advance` moves it, and its queues by one door."""

    def __init__(self, path: Path, door: str, **config: Any) -> None:
        self.door = door
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        super().__init__(path, **config)

    def open(self) -> None:
        super().open()
        self._aio = self._on_loop(self._begin()) if self.door == "aio" else None

    async def _begin(self) -> AsyncStore:
        return AsyncStore(LoopThread("tests"), self.store)

    def _on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def queue(self, name: str = "jobs", **options: Any) -> Any:
        if self._aio is None:
            return self.store.queue(name, **options)

        async def make() -> Any:
            return await self._aio.queue(name, **options)

        return Awaited(self._on_loop, self._on_loop(make()))

    @property
    def mqstore(self) -> Any:
        """Functions of `mqstore`, or of `mqstore.aio`."""
        return mqstore if self._aio is None else Awaited(self._on_loop, mqstore.aio)

    def restart(self) -> None:
        """Close the store and open it again."""
        self.close()
        self.open()

    def crash(self) -> None:
        """Open the store as after the death of its process."""
        self.kill()
        if self.door == "connect":
            RemoteBroker.close(self.store.broker)  # type: ignore[arg-type]
            self.store.broker.serving.close()  # type: ignore[attr-defined]
        self.open()

    def close(self) -> None:
        self.store.close()

    def values(self, queue: Any) -> list[Any]:
        """Get and acknowledge all items that are ready."""
        found = []
        while tasks := queue.get_many(32):
            found += [task.value for task in tasks]
            for task in tasks:
                task.ack()
            self.settle()
        return found


@contextmanager
def opened(path: Path, door: str, monkeypatch: pytest.MonkeyPatch, **config: Any) -> Iterator[Doors]:
    """Open a new store by a door."""
    if door == "connect":
        here = opening.Broker
        for module in ("mqstore.store", "mqstore.broker.opening"):
            monkeypatch.setattr(f"{module}.Broker", lambda store: ConnectedBroker(here(store)))
    doors = Doors(path, door, **config)
    yield doors
    doors.close()
