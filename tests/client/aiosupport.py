"""Stores under asyncio."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import aio
from tests.client import support


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run a test in a loop, for at most a minute."""

    async def limited() -> Any:
        async with asyncio.timeout(60):
            return await main

    return asyncio.run(limited())


def with_store(test: Callable[[aio.Store], Awaitable[Any]], path: Path, **options: Any) -> Any:
    """Run a test with a store that is open under asyncio."""

    async def main() -> Any:
        async with aio.open(path / "store", **options) as store:
            return await test(store)

    return run(main())


@asynccontextmanager
async def slow_flush(store: aio.Store) -> AsyncIterator[Callable[[], Awaitable[Any]]]:
    """Let each flush of the store's log wait until the block has ended. The block gets a function whose result can be
    awaited: until a flush has begun."""
    syncing, go_on = threading.Event(), threading.Event()
    flush = type(store.sync.log).flush

    def slow(log: Any) -> None:
        syncing.set()
        assert go_on.wait(20)
        flush(log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store.sync.log), "flush", slow)
        try:
            yield lambda: asyncio.to_thread(syncing.wait)
        finally:
            go_on.set()


def on_thread(store: aio.Store, work: Callable[[], object]) -> None:
    """Have the store's thread do `work` behind what it was given before."""
    store._bridge.submit(work)


def until_news(store: aio.Store) -> None:
    """Hold up the loop until a thread has something to tell it."""
    support.until(lambda: store._bridge.loop._ready)


async def until(condition: Callable[[], object]) -> None:
    """Let the other tasks of the loop, and threads, get somewhere. For at most 20 s."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def in_store(test: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Make a coroutine function a test. `store` is open under asyncio, with these options; with `steps` it is run with
    0 to 7 of them, in one store. The other parameters are fixtures."""
    if test is None:
        return partial(in_store, **options)
    parameters = inspect.signature(test).parameters
    rounds = [{"steps": steps} for steps in range(8)] if "steps" in parameters else [{}]

    def run_test(tmp_path: Path, **fixtures: Any) -> None:
        if "tmp_path" in parameters:
            fixtures["tmp_path"] = tmp_path

        async def each(store: aio.Store) -> None:
            for given in rounds:
                await test(store, **given, **fixtures)

        with_store(each, tmp_path, **options)

    update_wrapper(run_test, test)
    names = ["tmp_path", *(name for name in parameters if name not in ("store", "steps", "tmp_path"))]
    seen = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    run_test.__signature__ = inspect.Signature(seen)  # type: ignore[attr-defined]
    return run_test


def environment() -> dict[str, str]:
    """Return an environment in which a child process imports this mqstore."""
    return {**os.environ, "PYTHONPATH": str(Path(mqstore.__file__).parent.parent)}
