"""Asyncio version of mqstore: every object of `mqstore` with coroutines.

    mqstore.open            mqstore.aio.open           await it, or `async with`
    mqstore.connect         mqstore.aio.connect        the same
    Store, Queue, Task      Store, Queue, Task
    Producer, Transaction   Producer, Transaction
    SimpleConsumer, ...     SimpleConsumer, Delivery, PullConsumer, PushConsumer, DeadLetters

Names, arguments, results and errors are those of the synchronous classes, which have the documentation. Each object has
its counterpart as `sync`. Coroutines return the same messages, receipts and statistics. One thread for each store calls
the engine, which waits by callback. So a thousand waiting coroutines need no thread (`loop_thread.py`).

>>> import asyncio, tempfile
>>> async def main(folder):
...     async with open(folder) as store:
...         receipt = await store.put("greetings", b"hello")
...         return [message.body for message in await store.read(*receipt.queue, receipt.offset)]
>>> with tempfile.TemporaryDirectory() as folder:
...     asyncio.run(main(folder))
[b'hello']
"""

from __future__ import annotations

from mqstore.aio.consumers import DeadLetters, Delivery, PullConsumer, SimpleConsumer, Task
from mqstore.aio.producer import Producer, Transaction
from mqstore.aio.pushconsumer import Handler, PushConsumer, cancelled
from mqstore.aio.queue import Queue, get_any
from mqstore.aio.store import Store, connect, open  # noqa: A004

__all__ = [
    "DeadLetters",
    "Delivery",
    "Handler",
    "Producer",
    "PullConsumer",
    "PushConsumer",
    "Queue",
    "SimpleConsumer",
    "Store",
    "Task",
    "Transaction",
    "cancelled",
    "connect",
    "get_any",
    "open",
]


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return __all__
