"""Stores under asyncio."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import mqstore
from mqstore import aio


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
