"""Stores under asyncio."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
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


def environment() -> dict[str, str]:
    """Return an environment in which a child process imports this mqstore."""
    return {**os.environ, "PYTHONPATH": str(Path(mqstore.__file__).parent.parent)}
