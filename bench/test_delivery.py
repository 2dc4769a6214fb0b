"""Questions about delivery: queues, simple consumers, push consumers, delays.

A received and acknowledged message costs two entries in the journal of pops, in the page cache when the call returns:
kill -9 loses neither. The peers keep as much: SQLite commits each get and each ack.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import mqstore.aio
from bench import peers
from bench.harness import CPU, Load, Row, Side, Work, asked, each, of_both, side
from bench.sides import PUT, READ, fill, in_store


def take_all(queue: Any, load: Load) -> int:
    """Get and acknowledge the items of a load."""
    taken_bytes = 0
    for _ in range(load.messages):
        task = queue.get()
        taken_bytes += len(task.value)
        task.ack()
    assert taken_bytes == load.messages * load.body_bytes
    return load.messages


@in_store()
def queue_put(store: mqstore.Store, load: Load) -> Work:
    return each(load.bodies(), store.queue(load.topic).put)


@in_store()
def queue_get(
    store: mqstore.Store, load: Load, *, ordered: bool = False, delayed: Literal["no", "before", "now"] = "no"
) -> Work:
    """Get and acknowledge. The same number of other messages may be delayed by an hour. The timer has stored those from
    "before" in their slots, and does so "now" while items are taken."""
    queue = store.queue(load.topic, ordered=ordered)
    for when in ("before", "no", "now"):
        if when == "no":
            queue.put_many(load.bodies())
            store.log.dispatch()
        elif when == delayed:
            for _ in range(load.messages):
                queue.put(b"", delay=3600)
            if when == "before":
                queue.put(b"", delay=0.1)
                queue.get().ack()  # by then the timer has stored all others in their slots
    return partial(take_all, queue, load)


@in_store()
def queue_all(store: mqstore.Store, load: Load, *, priorities: int) -> Work:
    """Put, get and acknowledge, with the items spread over this many priorities. 0: without any."""
    queue, bodies = store.queue(load.topic), load.bodies()
    queue.put(b"", priority=min(1, priorities))  # creating segment and queues belongs to the first item
    queue.get().ack()
    options: list[dict[str, int]] = [{"priority": number} for number in range(priorities)] or [{}]

    def work() -> int:
        put = queue.put
        for number, body in enumerate(bodies):
            put(body, **options[number % len(options)])
        return take_all(queue, load)

    return work


@contextmanager
def asyncio_get(directory: Path, load: Load) -> Iterator[Work]:
    with asyncio.Runner() as runner:

        async def begin() -> tuple[mqstore.aio.Store, mqstore.aio.Queue]:
            store = await mqstore.aio.open(directory / "store")
            queue = await store.queue(load.topic)
            await queue.put_many(load.bodies())
            store.sync.log.dispatch()
            return store, queue

        async def take() -> int:
            taken_bytes = 0
            for _ in range(load.messages):
                task = await queue.get()
                taken_bytes += len(task.value)
                await queue.ack(task)
            assert taken_bytes == load.messages * load.body_bytes
            return load.messages

        store, queue = runner.run(begin())
        try:
            yield lambda: runner.run(take())
        finally:
            runner.run(store.close())


@in_store()
def receive(store: mqstore.Store, load: Load, *, batch: int) -> Work:
    fill(store, load)
    consumer = store.simple_consumer("bench", {load.topic: "*"})

    def work() -> int:
        taken = taken_bytes = 0
        while taken < load.messages:
            for delivery in consumer.receive(batch):
                taken_bytes += len(delivery.message.body)
                delivery.ack()
                taken += 1
        assert taken_bytes == load.messages * load.body_bytes
        return taken

    return work


@contextmanager
def push(
    directory: Path, load: Load, *, queues: int = 4, tag: str | None = None, tags: str = "*", **options: Any
) -> Iterator[Work]:
    """A push consumer that finds a backlog, with a handler that only looks at the body."""
    with mqstore.open(directory / "store") as store:
        fill(store, load, peers.BATCH, queues, None, **({"tag": tag} if tag else {}))
        done = threading.Event()
        taken: list[int] = []

        def handle(message: mqstore.Message) -> None:
            taken.append(len(message.body))  # atomic, as a counter would not be
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


@contextmanager
def delayed(directory: Path, load: Load) -> Iterator[Work]:
    """A backlog that is due all at once, moved from the delay level to its topic."""
    # With a clock of its own a store starts no threads, so nothing is delivered before `run_once`.
    clock = mqstore.SimulatedClock()
    with mqstore.open(directory / "store", config=mqstore.StoreConfig(clock=clock)) as store:
        for body in load.bodies():
            store.put(load.topic, body, queue_id=0, delay_level=1)
        store.flush()  # it would come due within what is timed, as the clock moves
        store.broker.run_once()
        clock.advance(1000)

        def work() -> int:
            while (offsets := store.log.offsets_or_none(load.topic, 0)) is None or offsets[1] < load.messages:
                store.broker.run_once()
            return offsets[1]

        yield work


QUEUE_PUT, QUEUE_GET = Side("mqstore Queue", queue_put), Side("mqstore Queue", queue_get)
QUEUE_ALL = side("mqstore Queue, put and get", queue_all, priorities=0)
PRIORITIES = side("mqstore Queue, ten priorities", queue_all, priorities=10)
ORDERED = side("mqstore Queue, ordered", queue_get, ordered=True)
DELAYED = side("mqstore Queue, as many delayed", queue_get, delayed="before")
DELAYING = side("mqstore Queue, while as many are delayed", queue_get, delayed="now")
ASYNCIO = Side("mqstore.aio Queue", asyncio_get)
RECEIVE_1, RECEIVE_32 = (side("mqstore simple consumer", receive, batch=batch) for batch in (1, 32))
PUSH, PUSH_1 = Side("mqstore push consumer", push), side("mqstore push consumer, one worker", push, queues=1, workers=1)
PUSH_100, PUSH_10K = (side(f"mqstore push consumer, {n:,} queues", push, queues=n) for n in (100, 10_000))
PUSH_TAGGED = side("everything, of tagged messages", push, tag="paid")
QUEUES = {peers.SQLITE_ACK_QUEUE: 150, peers.LITEQUEUE: 10, peers.DISKCACHE_DEQUE: 20, peers.SQLITE_GET: None}
ITEMS = Load(128, 20_000)


def push_options(goal: float, plain: Side = PUSH, **options: Any) -> Row:
    return side("mqstore push consumer with options", push, **options), Load(128, 50_000), {plain: goal}, {"by": "time"}


test_delivery = asked(
    {
        # `queue.put`; `queue.get` and `task.ack`, one item at a time.
        "queue_put": (QUEUE_PUT, Load(128, 100_000), {PUT: 0.667, peers.QUEUELIB: None, peers.SQLITE_PUT: None}),
        **of_both("queue_get", QUEUE_GET, (20_000, 20_000), QUEUES),
        # The time of put, get and ack of items that are spread over ten priorities.
        "queue_priorities": (PRIORITIES, ITEMS, {QUEUE_ALL: 1.3}, CPU),
        # The time of get and ack in an ordered queue; while as many messages of the queue are delayed, or are taken in
        # by the timer, since CPU time of other threads is time that the calls wait; by `mqstore.aio`, on the wall.
        "queue_ordered": (ORDERED, ITEMS, {QUEUE_GET: 2.5}, CPU),
        "queue_delayed[before]": (DELAYED, ITEMS, {QUEUE_GET: 1.1}, CPU),
        "queue_delayed[now]": (DELAYING, ITEMS, {QUEUE_GET: 1.5}, CPU),
        "queue_asyncio": (ASYNCIO, ITEMS, {QUEUE_GET: 2}, {"by": "time"}),
        # `receive` of a simple consumer, and `ack` of each delivery.
        "simple_consumer[1]": (RECEIVE_1, Load(128, 50_000), {QUEUE_GET: None}),
        "simple_consumer[32]": (RECEIVE_32, Load(128, 50_000), {QUEUE_GET: None}, {"limit": (150, "k/s")}),
        # A push consumer with a handler that does nothing.
        **of_both("push", PUSH_1, (100_000, 100_000), {READ: None}, limit=(200, "k/s")),
        "push_queues": (PUSH_10K, Load(128, 300_000), {PUSH_100: 0.9}),  # most of the queues are empty
        # Its time in mode "pop", in order, or subscribed to a tag that all messages have.
        "push_options[pop]": push_options(1.5, mode="pop"),
        "push_options[ordered]": push_options(2, ordered=True),
        "push_options[filter]": push_options(1.1, PUSH_TAGGED, tag="paid", tags="paid"),
        # Delivering a backlog of a delay level that is due at once.
        "delay": (Side("mqstore delay level", delayed), Load(128, 100_000), {PUT: 0.3}),
    }
)
