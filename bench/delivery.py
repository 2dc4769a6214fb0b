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

import mqstore
from bench import engine
from bench.harness import Load, Side, Work
from bench.peers import BATCH
from mqstore.broker.broker import Broker

POP_BATCH = 32
"""The most that one pop gives."""


def _fill(broker: Broker, load: Load) -> None:
    broker.topics.create(load.topic, queues=1)
    bodies = load.bodies()
    for start in range(0, len(bodies), BATCH):
        broker.put_many(load.topic, bodies[start : start + BATCH])
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
def queue_get(directory: Path, load: Load) -> Iterator[Work]:
    with mqstore.open(directory / "store") as store:
        queue = store.queue(load.topic)
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
def push(directory: Path, load: Load, *, ordered: bool) -> Iterator[Work]:
    """A push consumer that finds a backlog, with a handler that only looks at the body."""
    with mqstore.open(directory / "store") as store:
        _fill(store.broker, load)
        done = threading.Event()
        taken = taken_bytes = 0

        def handle(message: mqstore.Message) -> None:
            nonlocal taken, taken_bytes
            taken += 1
            taken_bytes += len(message.body)
            if taken == load.messages:
                done.set()

        # One worker: what is counted here needs no lock, and empty handlers have no use for more.
        consumer = store.push_consumer("bench", workers=1, ordered=ordered)
        consumer.subscribe(load.topic, handle)

        def work() -> int:
            consumer.start()
            assert done.wait(300)
            return taken

        yield work
        consumer.stop()
        assert (taken, taken_bytes) == (load.messages, load.messages * load.body_bytes)


PUSH = Side("mqstore push consumer", partial(push, ordered=False))
PUSH_ORDERED = Side("mqstore push consumer, ordered", partial(push, ordered=True))
QUEUE_PUT = Side("mqstore Queue", queue_put)
QUEUE_GET = Side("mqstore Queue", queue_get)
POP_ONE = Side("mqstore", partial(pop_and_ack, batch=1))
POP_MANY = Side("mqstore", partial(pop_and_ack, batch=POP_BATCH))
DELAYED = Side("mqstore", delayed)
PUT = Side("mqstore put", engine.PUT.prepare)
PUT_AND_DISPATCH = Side("mqstore put and dispatch", put_and_dispatch)
READ = Side("mqstore read", engine.READ_MESSAGES.prepare)
