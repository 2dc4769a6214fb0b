"""Waiting for the first item of several queues, with coroutines (clients#get-any)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from contextlib import suppress

from mqstore.aio.base import limit
from mqstore.aio.lease import Task
from mqstore.aio.queue import Queue
from mqstore.client.codecs import T
from mqstore.client.waits import Wait
from mqstore.errors import QueueEmpty, QueueShutDown
from mqstore.getany import queues_of
from mqstore.options import Duration


async def get_any(queues: Iterable[Queue[T]], timeout: Duration | None = None) -> Task[T]:
    """Return the next item of the first of `queues` that has one, as `mqstore.get_any`.
    If cancelled, it has taken nothing.

    >>> import mqstore.aio, tempfile
    >>> async def main(folder):
    ...     async with mqstore.aio.open(folder) as store, store.queue("high") as high, store.queue("low") as low:
    ...         await low.put(b"newsletter")
    ...         await high.put(b"password reset")
    ...         return [(await mqstore.aio.get_any([high, low], timeout=1)).value for _ in range(2)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     asyncio.run(main(folder))
    [b'password reset', b'newsletter']
    """
    left = queues_of(queues, Queue)
    clock, wait_s = asyncio.get_running_loop().time, limit(timeout)
    end = math.inf if wait_s is None else clock() + wait_s
    waits: dict[Queue[T], Wait] = {}
    try:
        while True:
            for queue in tuple(left):
                try:
                    task = await queue.get(block=False)
                except QueueEmpty:
                    task = None
                except QueueShutDown:
                    left.remove(queue)
                    if not left:
                        raise
                    continue
                waits.pop(queue, None)  # the look has used its turn
                if task is not None:
                    return task
            if clock() >= end:
                raise QueueEmpty(f"nothing to get from {', '.join(repr(queue.name) for queue in left)}")
            ready = asyncio.Event()
            for queue in left:
                waits[queue] = await queue._when_ready(ready.set)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if end == math.inf else end - clock()):
                    await ready.wait()
            for wait in waits.values():
                wait.end()  # before the look, so that each turn is used by it or passed on
    finally:
        for wait in waits.values():
            wait.cancel()
