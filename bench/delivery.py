"""mqstore's side of the questions about delivery, through the engine contract (`Broker`), with its threads at work.

A popped and acknowledged message costs two records in the pop log, in the page cache when the call returns: kill -9
loses neither. The peers keep as much: SQLite commits each get and each ack.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mqstore
from bench.harness import Load, Side, Work
from bench.peers import BATCH
from mqstore.broker.broker import Broker

POP_BATCH = 32
"""The most that one pop gives."""


def _fill(broker: Broker, load: Load, *, queues: int = 1, tag: str | None = None) -> None:
    broker.topics.create(load.topic, queues=queues)
    messages = [mqstore.OutgoingMessage(body, tag=tag) if tag else body for body in load.bodies()]
    for number, start in enumerate(range(0, len(messages), BATCH)):
        broker.put_many(load.topic, messages[start : start + BATCH], queue_id=number % queues)
    broker.store.dispatch()


@contextmanager
def pop_and_ack(directory: Path, load: Load, *, batch: int) -> Iterator[Work]:
    with closing(Broker(mqstore.engine.MessageStore(directory / "store"))) as broker:
        _fill(broker, load)

        def work() -> int:
            pop, ack, topic = broker.pop, broker.ack, load.topic
            taken = taken_bytes = 0
            while deliveries := pop("bench", topic, batch):
                for delivery in deliveries:
                    taken_bytes += len(delivery.message.body)
                ack("bench", topic, [delivery.receipt for delivery in deliveries])
                taken += len(deliveries)
            assert (taken, taken_bytes) == (load.messages, load.messages * load.body_bytes)
            return taken

        yield work


@contextmanager
def delayed(directory: Path, load: Load) -> Iterator[Work]:
    """A backlog that is due all at once: from the delay queue to where it was going."""
    # With a clock of its own a broker starts no thread, so what is put stays undelivered until we say so.
    clock = mqstore.SimulatedClock()
    config = mqstore.StoreConfig(clock=clock)
    with closing(Broker(mqstore.engine.MessageStore(directory / "store", config=config))) as broker:
        put = broker.put
        for body in load.bodies():
            put(load.topic, body, queue_id=0, delay_level=1)
        broker.store.flush()  # of the backlog: it would come due within what is timed, as the clock goes on
        broker.run_once()
        clock.advance(1000)

        def work() -> int:
            while (offsets := broker.store.offsets_or_none(load.topic, 0)) is None or offsets[1] < load.messages:
                broker.run_once()
            return offsets[1]

        yield work


@contextmanager
def put_and_dispatch(directory: Path, load: Load) -> Iterator[Work]:
    """Putting and dispatching the same messages at once: delivery is a put, and what has been put is to be seen."""
    config = mqstore.StoreConfig(clock=mqstore.engine.SystemClock())
    with closing(mqstore.engine.MessageStore(directory / "store", config=config)) as store:
        bodies = load.bodies()

        def work() -> int:
            put, topic = store.put, load.topic
            for body in bodies:
                put(topic, body, queue_id=0)
            store.dispatch()
            return len(bodies)

        yield work


@contextmanager
def queue_put(directory: Path, load: Load) -> Iterator[Work]:
    with mqstore.open(directory / "store") as store:
        queue = store.queue(load.topic)
        bodies = load.bodies()

        def work() -> int:
            put = queue.put
            for body in bodies:
                put(body)
            return len(bodies)

        yield work


@contextmanager
def queue_get(
    directory: Path,
    load: Load,
    *,
    ordered: bool = False,
    beside_delayed: bool = False,
    durability: Literal["append", "flush"] = "append",
) -> Iterator[Work]:
    """Get and acknowledge. `beside_delayed`: as many messages as are taken wait for their time meanwhile."""
    with mqstore.open(directory / "store", durability=durability) as store:
        queue = store.queue(load.topic, ordered=ordered)
        if beside_delayed:
            for _ in range(load.messages):
                queue.put(b"", delay=3600)
            queue.put(b"", delay=0.1)
            queue.get().ack()  # by then the timer has put all others in their places, which is not what is asked
        queue.put_many(load.bodies())
        store.log.dispatch()

        def work() -> int:
            taken_bytes = 0
            for _ in range(load.messages):
                task = queue.get()
                taken_bytes += len(task.value)
                task.ack()
            assert taken_bytes == load.messages * load.body_bytes
            return load.messages

        yield work


@contextmanager
def push(
    directory: Path,
    load: Load,
    *,
    queues: int = 4,
    tag: str | None = None,
    tags: str = "*",
    **options: Any,
) -> Iterator[Work]:
    """A push consumer that finds a backlog, with a handler that only looks at the body."""
    with mqstore.open(directory / "store") as store:
        _fill(store.broker, load, queues=queues, tag=tag)
        done = threading.Event()
        taken: list[int] = []

        def handle(message: mqstore.Message) -> None:
            taken.append(len(message.body))  # as good as a lock around a counter
            if len(taken) == load.messages:
                done.set()

        consumer = store.push_consumer("bench", **options)
        consumer.subscribe(load.topic, handle, tags=tags)

        def work() -> int:
            consumer.start()
            assert done.wait(300)
            return load.messages

        yield work
        consumer.stop()
        assert taken == [load.body_bytes] * load.messages


POP_ONE = Side("mqstore", partial(pop_and_ack, batch=1))
POP_MANY = Side("mqstore", partial(pop_and_ack, batch=POP_BATCH))
DELAYED = Side("mqstore", delayed)
PUT_AND_DISPATCH = Side("mqstore put and dispatch", put_and_dispatch)
QUEUE_PUT = Side("mqstore Queue", queue_put)
QUEUE_GET = Side("mqstore Queue", queue_get)
QUEUE_GET_FLUSH = Side("mqstore Queue, durability flush", partial(queue_get, durability="flush"))
QUEUE_GET_ORDERED = Side("mqstore Queue, ordered", partial(queue_get, ordered=True))
QUEUE_GET_DELAYED = Side("mqstore Queue, delayed messages wait", partial(queue_get, beside_delayed=True))
# One worker takes the most messages a second from one queue while handlers are empty; four queues are the default.
PUSH_ALONE = Side("mqstore push consumer, one worker", partial(push, queues=1, workers=1))
PUSH = Side("mqstore push consumer", push)
PUSH_POP = Side("mqstore push consumer, mode pop", partial(push, mode="pop"))
PUSH_ORDERED = Side("mqstore push consumer, ordered", partial(push, ordered=True))
PUSH_TAGGED = Side("mqstore push consumer, tagged messages", partial(push, tag="paid"))
PUSH_FILTERED = Side("mqstore push consumer, by tag", partial(push, tag="paid", tags="paid"))
