"""What mqstore does in the questions of several modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mqstore
from bench.harness import Load, Side, Work
from bench.peers import BATCH


def in_store(**opening: Any) -> Callable[[Callable[..., Work]], Callable[..., AbstractContextManager[Work]]]:
    """Make a function of an open store, a load and options, which returns the timed part, prepare a side.
    The store is new, and opened with `opening`."""

    def decorate(make: Callable[..., Work]) -> Callable[..., AbstractContextManager[Work]]:
        @contextmanager
        def prepare(directory: Path, load: Load, **options: Any) -> Iterator[Work]:
            with mqstore.open(directory / "store", **opening) as store:
                yield make(store, load, **options)

        return prepare

    return decorate


def outgoing(load: Load, options: Mapping[str, str]) -> list[Any]:
    """Return the bodies, or messages with these options."""
    return [mqstore.OutgoingMessage(body, **options) for body in load.bodies()] if options else load.bodies()


def fill(
    store: mqstore.Store, load: Load, batch: int = 1 << 30, queues: int = 4, queue_id: int | None = 0, **options: str
) -> list[mqstore.SendReceipt]:
    """Put all messages into a queue, or for None into all in turn. Returns the receipts, dispatched."""
    messages, receipts = outgoing(load, options), list[mqstore.SendReceipt]()
    store.create_topic(load.topic, queues=queues)
    for start in range(0, len(messages), batch):
        receipts += store.put_many(load.topic, messages[start : start + batch], queue_id=queue_id)
    store.log.dispatch()
    return receipts


@in_store()
def put(store: mqstore.Store, load: Load, **options: Any) -> Work:
    bodies = load.bodies()
    # Creating segment, queues and folders belongs to the first message of a store, not to each.
    store.put(load.topic, bodies[0], **options)

    def work() -> int:
        put_one, topic = store.put, load.topic
        for body in bodies:
            put_one(topic, body, **options)
        return len(bodies)

    return work


@in_store()
def read(store: mqstore.Store, load: Load, *, batch: int) -> Work:
    fill(store, load)

    def work() -> int:
        offset = read_bytes = 0
        while messages := store.read(load.topic, 0, offset, batch):
            for message in messages:
                read_bytes += len(message.body)
            offset += len(messages)
        assert read_bytes == load.messages * load.body_bytes
        return offset

    return work


PUT = Side("mqstore put", put)
READ = Side(f"mqstore read, {BATCH} at a time", partial(read, batch=BATCH))
