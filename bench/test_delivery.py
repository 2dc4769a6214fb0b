"""Questions about delivery: queues, simple consumers, push consumers, delays.

A received and acknowledged message costs two entries in the journal of pops, in the page cache when the call returns:
kill -9 loses neither. The peers keep as much: SQLite commits each get and each ack.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

import mqstore.aio
from bench import peers
from bench.harness import Ask, Load, Side, Work, each
from bench.peers import BATCH
from bench.sides import PUT, READ, filled

CPU = pytest.mark.benchmark(timer=time.process_time)
"""CPU time of the whole process is steady on a busy machine. It fits where no thread waits for another."""


@contextmanager
def queue_put(directory: Path, load: Load) -> Iterator[Work]:
    with mqstore.open(directory / "store") as store:
        yield each(load.bodies(), store.queue(load.topic).put)


@contextmanager
def queue_get(
    directory: Path,
    load: Load,
    *,
    ordered: bool = False,
    delayed: Literal["no", "before", "now"] = "no",
) -> Iterator[Work]:
    """Get and acknowledge. The same number of other messages may be delayed by an hour. The timer has stored those from
    "before" in their slots, and does so "now" while items are taken."""
    with mqstore.open(directory / "store") as store:
        queue = store.queue(load.topic, ordered=ordered)

        def delay() -> None:
            for _ in range(load.messages):
                queue.put(b"", delay=3600)

        if delayed == "before":
            delay()
            queue.put(b"", delay=0.1)
            queue.get().ack()  # by then the timer has stored all others in their slots
        queue.put_many(load.bodies())
        store.log.dispatch()
        if delayed == "now":
            delay()

        def work() -> int:
            taken_bytes = 0
            for _ in range(load.messages):
                task = queue.get()
                taken_bytes += len(task.value)
                task.ack()
            assert taken_bytes == load.messages * load.body_bytes
            return load.messages

        yield work


QUEUE_GET = Side("mqstore Queue", queue_get)


@contextmanager
def queue_all(directory: Path, load: Load, *, priorities: int) -> Iterator[Work]:
    """Put, get and acknowledge, with the items spread over this many priorities. 0: without any."""
    with mqstore.open(directory / "store") as store:
        queue, bodies = store.queue(load.topic), load.bodies()
        queue.put(b"", priority=min(1, priorities))  # creating segment and queues belongs to the first item
        queue.get().ack()
        options: list[dict[str, int]] = [{"priority": number} for number in range(priorities)] or [{}]

        def work() -> int:
            put, taken_bytes = queue.put, 0
            for number, body in enumerate(bodies):
                put(body, **options[number % len(options)])
            for _ in range(load.messages):
                task = queue.get()
                taken_bytes += len(task.value)
                task.ack()
            assert taken_bytes == load.messages * load.body_bytes
            return load.messages

        yield work


QUEUE_ALL = Side("mqstore Queue, put and get", partial(queue_all, priorities=0))


def test_queue_put(ask: Ask) -> None:
    """`queue.put`, one item at a time."""
    beside = {PUT: 0.667, peers.QUEUELIB: None, peers.SQLITE_PUT: None}
    ask(Side("mqstore Queue", queue_put), Load(128, 100_000), beside)


@CPU
def test_queue_priorities(ask: Ask) -> None:
    """The time of put, get and ack of items that are spread over ten priorities."""
    ours = Side("mqstore Queue, ten priorities", partial(queue_all, priorities=10))
    ask(ours, Load(128, 20_000), {QUEUE_ALL: 1.3}, by="time")


@pytest.mark.parametrize("body", [128, 1024])
def test_queue_get(ask: Ask, body: int) -> None:
    """`queue.get` and `task.ack`, one item at a time."""
    beside = {
        peers.SQLITE_ACK_QUEUE: 150,
        peers.LITEQUEUE: 10,
        peers.DISKCACHE_DEQUE: 20,
        peers.SQLITE_GET: None,
    }
    ask(QUEUE_GET, Load(body, 20_000), beside)


@CPU
def test_queue_ordered(ask: Ask) -> None:
    """The time of get and ack in an ordered queue."""
    ask(
        Side("mqstore Queue, ordered", partial(queue_get, ordered=True)), Load(128, 20_000), {QUEUE_GET: 2.5}, by="time"
    )


@CPU
@pytest.mark.parametrize(("delayed", "goal"), [("before", 1.1), ("now", 1.5)])
def test_queue_delayed(ask: Ask, delayed: Literal["before", "now"], goal: float) -> None:
    """The time of get and ack while as many messages of the queue are delayed, or are taken in by the timer.
    The process has one interpreter: CPU time of other threads is time that the calls wait."""
    ours = Side(f"mqstore Queue, delayed {delayed}", partial(queue_get, delayed=delayed))
    ask(ours, Load(128, 20_000), {QUEUE_GET: goal}, by="time")


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


def test_queue_asyncio(ask: Ask) -> None:
    """The time of get and ack by `mqstore.aio`, on the wall: a thread makes the calls."""
    ask(Side("mqstore.aio Queue", asyncio_get), Load(128, 20_000), {QUEUE_GET: 2}, by="time")


@contextmanager
def receive(directory: Path, load: Load, *, batch: int) -> Iterator[Work]:
    with filled(directory, load) as store, store.simple_consumer("bench", {load.topic: "*"}) as consumer:

        def work() -> int:
            taken = taken_bytes = 0
            while taken < load.messages:
                for delivery in consumer.receive(batch):
                    taken_bytes += len(delivery.message.body)
                    delivery.ack()
                    taken += 1
            assert taken_bytes == load.messages * load.body_bytes
            return taken

        yield work


@pytest.mark.parametrize("batch", [1, 32])
def test_simple_consumer(ask: Ask, batch: int) -> None:
    """`receive` of a simple consumer, and `ack` of each delivery."""
    ours = Side("mqstore simple consumer", partial(receive, batch=batch))
    ask(ours, Load(128, 50_000), {QUEUE_GET: None}, limit=(150, "k/s") if batch > 1 else None)


@contextmanager
def push(
    directory: Path, load: Load, *, queues: int = 4, tag: str | None = None, tags: str = "*", **options: Any
) -> Iterator[Work]:
    """A push consumer that finds a backlog, with a handler that only looks at the body."""
    with mqstore.open(directory / "store") as store:
        store.create_topic(load.topic, queues=queues)
        messages = [mqstore.OutgoingMessage(body, tag=tag) if tag else body for body in load.bodies()]
        for start in range(0, len(messages), BATCH):
            store.put_many(load.topic, messages[start : start + BATCH])
        store.log.dispatch()
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


PUSH = Side("mqstore push consumer", push)
PUSH_TAGGED = Side("everything, of tagged messages", partial(push, tag="paid"))


@pytest.mark.parametrize("body", [128, 1024])
def test_push(ask: Ask, body: int) -> None:
    """A push consumer of one worker with a handler that does nothing."""
    ours = Side("mqstore push consumer, one worker", partial(push, queues=1, workers=1))
    ask(ours, Load(body, 100_000), {READ: None}, limit=(200, "k/s"))


@pytest.mark.parametrize(
    ("options", "plain", "goal"),
    [
        pytest.param({"mode": "pop"}, PUSH, 1.5, id="pop"),
        pytest.param({"ordered": True}, PUSH, 2, id="ordered"),
        pytest.param({"tag": "paid", "tags": "paid"}, PUSH_TAGGED, 1.1, id="filter"),
    ],
)
def test_push_options(ask: Ask, options: dict[str, Any], plain: Side, goal: float) -> None:
    """The time of a push consumer in mode "pop", in order, or subscribed to a tag that all messages have."""
    ours = Side("mqstore push consumer with options", partial(push, **options))
    ask(ours, Load(128, 50_000), {plain: goal}, by="time")


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


def test_delay(ask: Ask) -> None:
    """Delivering a backlog of a delay level that is due at once."""
    ask(Side("mqstore delay level", delayed), Load(128, 100_000), {PUT: 0.3})
