"""Everyday work beside the plain case: options of a put, fields of a message, asyncio, reading right behind a put.

Both sides of each question are mqstore's, through its public interface, with durability "append".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Unpack

import mqstore.aio
from bench.harness import Load, Side, Work

READ_BATCH = 32
"""Number of messages that `read` returns by default."""


@contextmanager
def put(directory: Path, load: Load, **options: Unpack[mqstore.SendOptions]) -> Iterator[Work]:
    with mqstore.open(directory / "store") as store:
        bodies = load.bodies()
        # Creating segment, queue and folders belongs to the first message of a store, not to each.
        store.put(load.topic, bodies[0], **options)

        def work() -> int:
            put_one, topic = store.put, load.topic
            for body in bodies:
                put_one(topic, body, **options)
            return len(bodies)

        yield work


def _with_options(load: Load) -> list[mqstore.OutgoingMessage]:
    return [mqstore.OutgoingMessage(body, tag="paid", keys=f"o-{i}") for i, body in enumerate(load.bodies())]


@contextmanager
def put_many(directory: Path, load: Load, *, options: bool) -> Iterator[Work]:
    """All in one call: of messages with tag and key, or of bodies."""
    messages = _with_options(load) if options else load.bodies()
    with mqstore.open(directory / "store") as store:
        store.put(load.topic, b"")
        yield lambda: len(store.put_many(load.topic, messages))


@contextmanager
def read(directory: Path, load: Load, *, look: Callable[[mqstore.Message], object]) -> Iterator[Work]:
    with closing(mqstore.engine.MessageStore(directory / "store")) as store:
        store.put_many(load.topic, _with_options(load), queue_id=0)
        store.dispatch()

        def work() -> int:
            for offset in range(0, load.messages, READ_BATCH):
                for message in store.read(load.topic, 0, offset, READ_BATCH):
                    look(message)
            return load.messages

        yield work


@contextmanager
def first_read(directory: Path, load: Load, *, dispatched: bool) -> Iterator[Work]:
    """The first read of the last messages behind a `put_many`, at once or after all has been dispatched."""
    count = min(READ_BATCH, load.messages)
    with closing(mqstore.engine.MessageStore(directory / "store")) as store:
        store.put_many(load.topic, load.bodies(), queue_id=0)
        if dispatched:
            store.dispatch()

        def work() -> int:
            assert len(store.read(load.topic, 0, load.messages - count, count)) == count
            return 1

        yield work


@contextmanager
def asyncio_get(directory: Path, load: Load) -> Iterator[Work]:
    """Get and acknowledge, one item at a time, in a coroutine."""
    with asyncio.Runner() as runner:

        async def begin() -> mqstore.aio.Store:
            return await mqstore.aio.open(directory / "store")

        async def fill() -> mqstore.aio.Queue:
            queue = await store.queue(load.topic)
            await queue.put_many(load.bodies())
            store.sync.log.dispatch()
            return queue

        async def take() -> int:
            taken_bytes = 0
            for _ in range(load.messages):
                task = await queue.get()
                taken_bytes += len(task.value)
                await queue.ack(task)
            assert taken_bytes == load.messages * load.body_bytes
            return load.messages

        store = runner.run(begin())
        try:
            queue = runner.run(fill())
            yield lambda: runner.run(take())
        finally:
            runner.run(store.close())


TAG_AND_KEYS = mqstore.SendOptions(tag="paid", keys=["o-7", "c-9"])

PUT = Side("mqstore put", put)
PUT_TAG_KEYS = Side("mqstore put, tag and keys", partial(put, **TAG_AND_KEYS))
PUT_GROUP = Side("mqstore put, message group", partial(put, message_group="c-9"))
PUT_PROPERTIES = Side(
    "mqstore put, group and properties", partial(put, message_group="c-9", properties={"shop": "3", "kind": "x"})
)
PUT_DELAY = Side("mqstore put, delay", partial(put, delay=3600))
PUT_MANY = Side("mqstore put_many of bodies", partial(put_many, options=False))
PUT_MANY_OPTIONS = Side("mqstore put_many, tag and key", partial(put_many, options=True))
READ_BODY = Side("mqstore read, body alone", partial(read, look=lambda message: message.body))
READ_FIELDS = Side(
    "mqstore read, body, tag and keys", partial(read, look=lambda message: (message.body, message.tag, message.keys))
)
FIRST_READ = Side("mqstore first read behind put_many", partial(first_read, dispatched=False))
FIRST_READ_DISPATCHED = Side("the same once dispatched", partial(first_read, dispatched=True))
ASYNCIO_GET = Side("mqstore.aio Queue", asyncio_get)
