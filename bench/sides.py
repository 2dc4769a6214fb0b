"""What mqstore does in the questions of several modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mqstore
from bench.harness import Load, Side, Work


def outgoing(load: Load, options: Mapping[str, str]) -> list[Any]:
    """Return the bodies, or messages with these options."""
    return [mqstore.OutgoingMessage(body, **options) for body in load.bodies()] if options else load.bodies()


@contextmanager
def put(directory: Path, load: Load, **options: Any) -> Iterator[Work]:
    with mqstore.open(directory / "store") as store:
        bodies = load.bodies()
        # Creating segment, queues and folders belongs to the first message of a store, not to each.
        store.put(load.topic, bodies[0], **options)

        def work() -> int:
            put_one, topic = store.put, load.topic
            for body in bodies:
                put_one(topic, body, **options)
            return len(bodies)

        yield work


PUT = Side("mqstore put", put)


def fill(store: mqstore.Store, load: Load, batch: int | None = None, **options: str) -> list[mqstore.SendReceipt]:
    """Put all messages into queue 0. Returns the receipts, dispatched."""
    messages, receipts = outgoing(load, options), list[mqstore.SendReceipt]()
    store.create_topic(load.topic)
    for start in range(0, len(messages), batch or len(messages)):
        receipts += store.put_many(load.topic, messages[start : start + (batch or len(messages))], queue_id=0)
    store.log.dispatch()
    return receipts


@contextmanager
def filled(directory: Path, load: Load, **options: str) -> Iterator[mqstore.Store]:
    with mqstore.open(directory / "store") as store:
        fill(store, load, **options)
        yield store


@contextmanager
def read(directory: Path, load: Load, *, batch: int) -> Iterator[Work]:
    with filled(directory, load) as store:

        def work() -> int:
            offset = read_bytes = 0
            while messages := store.read(load.topic, 0, offset, batch):
                for message in messages:
                    read_bytes += len(message.body)
                offset += len(messages)
            assert read_bytes == load.messages * load.body_bytes
            return offset

        yield work


READ = Side("mqstore read, 1000 at a time", partial(read, batch=1000))
