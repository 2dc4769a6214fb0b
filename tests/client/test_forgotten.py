"""A store that nobody refers to any more closes itself, as a file object does.

In a notebook a store that went out of reach could never be closed or opened again in that process: its own threads and
a list of open stores kept it alive, and opening it said that this very process has it.
"""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import mqstore
import mqstore.aio
from mqstore import QueueEmpty, QueueRef, Store
from mqstore.errors import StoreLockedError
from tests.client.support import until


@pytest.fixture(autouse=True)
def _frozen() -> Iterator[None]:
    """Let collections look at the objects of the test alone."""
    gc.freeze()
    yield
    gc.unfreeze()


def collected(found: weakref.ref[Any]) -> bool:
    """Collect garbage. Return True if the object is gone. A thread may be in the middle of a step for it."""
    gc.collect()
    return found() is None


@contextmanager
def warned() -> Iterator[None]:
    """Expect the warning of one store that was not closed."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    assert [(each.category, "was not closed" in str(each.message)) for each in seen] == [(ResourceWarning, True)]


def _queue(store: Store) -> object:
    queue = store.queue("jobs")
    queue.put_many([b"1", b"2"])
    queue.put(b"3", delay=60)
    queue.get(timeout=20).ack()
    task = queue.get(timeout=20)
    task.nack()
    with suppress(QueueEmpty):
        store.queue("nothing").get(timeout=0.01)
    return task


def _producer(store: Store) -> object:
    producer = store.producer()
    producer.send_many("t", [b"1", b"2"])
    producer.submit("t", b"3").result(20)
    with producer.transaction() as transaction:
        transaction.send("t", b"4")
    return producer


def _simple(store: Store) -> object:
    store.put("t", b"1")
    consumer = store.simple_consumer("g", {"t": "*"}, start="earliest")
    [delivery] = consumer.receive(wait=20)
    delivery.ack()
    return consumer, delivery


def _pull(store: Store) -> object:
    store.put("t", b"1")
    consumer = store.pull_consumer("g", start="earliest")
    consumer.subscribe("t")
    consumer.poll(20)
    return consumer


def _push(store: Store) -> object:
    seen = threading.Event()
    consumer = store.push_consumer("g", start="earliest")
    consumer.subscribe("t", lambda message: seen.set())
    with consumer:
        store.put("t", b"1")
        assert seen.wait(20)
    return consumer


def _following(store: Store) -> object:
    store.put("t", b"1")
    following = store.iter("t", follow=True)
    next(following)
    return following


def _cycle(store: Store) -> object:
    holder: dict[str, object] = {"store": store}
    holder["itself"] = holder
    store.mark = holder  # type: ignore[attr-defined]
    return holder


def _waiter(store: Store) -> object:
    store.put("t", b"1")
    return store.broker.add_waiter("t", 0, 99, lambda found: None, timeout=100)


USES: dict[str, Callable[[Store], object]] = {
    "nothing": lambda store: store,
    "put": lambda store: store.put("t", b"1"),
    "async put": lambda store: store.broker.put_async("t", b"1", durability="flush").result(20),
    "queue": _queue,
    "dead letters": lambda store: store.dead_letters("jobs"),
    "producer": _producer,
    "simple consumer": _simple,
    "pull consumer": _pull,
    "push consumer": _push,
    "following": _following,
    "cycle": _cycle,
    "waiter": _waiter,
    "log": lambda store: store.log,
    "transactions": lambda store: store.broker.transactions,
    "statistics": lambda store: (store.broker.stats(), store.broker.prometheus()),
    "verify": lambda store: [*store.verify()],
}


def _used(path: Path, use: Callable[[Store], object]) -> weakref.ref[Any]:
    store = mqstore.open(path)
    store.commit_offset("kept", store.put("t", b"0", queue_id=0).queue, 1)
    use(store)
    return weakref.ref(store.log)


@pytest.mark.parametrize("use", USES)
def test_forgotten_store_is_closed_cleanly(tmp_path: Path, use: str) -> None:
    with warned():
        found = _used(tmp_path / "mq", USES[use])
        until(lambda: collected(found))
    with mqstore.open(tmp_path / "mq") as store:
        assert store.recovery.clean_shutdown
        assert not store.recovery.findings
        assert store.committed("kept", QueueRef("t", 0)) == 1


def _opened(path: Path) -> Store:
    stores: list[Store] = []

    def attempt() -> list[Store]:
        with suppress(StoreLockedError):  # a thread of the store may be at work for very long on a busy machine
            stores.append(mqstore.open(path))
        return stores

    until(attempt)
    return stores[0]


def test_a_forgotten_store_can_be_opened_again_at_once(tmp_path: Path) -> None:
    """Opening collects garbage before it says that this process has the store."""
    gc.disable()
    try:
        with warned():
            _used(tmp_path / "mq", lambda store: store.queue("jobs").put(b"1"))
            store = _opened(tmp_path / "mq")
    finally:
        gc.enable()
    with store, store.queue("jobs").get() as task:
        assert task.value == b"1"
        with pytest.raises(StoreLockedError, match="which is this process; use that Store, or close it"):
            mqstore.open(tmp_path / "mq")


HOLDERS: dict[str, tuple[Callable[[Store], Any], Callable[[Any], object]]] = {
    "queue": (lambda store: store.queue("jobs"), lambda queue: [queue.put(b"2"), queue.get().ack()]),
    "task": (lambda store: store.queue("jobs").get(), lambda task: task.ack()),
    "producer": (lambda store: store.producer(), lambda producer: producer.send("t", b"2")),
    "simple consumer": (_simple, lambda made: made[0].receive(wait=0)),
    "pull consumer": (_pull, lambda consumer: consumer.commit()),
    "following": (_following, lambda following: iter(following)),
    "dead letters": (lambda store: store.dead_letters("jobs"), lambda letters: [*letters.select()]),
    "broker": (lambda store: store.broker, lambda broker: broker.put("t", b"2")),
    "log": (lambda store: store.log, lambda log: log.put("t", b"2")),
    "transactions": (
        lambda store: store.broker.transactions,
        lambda transactions: transactions.begin("t", b"2", producer_group="g"),
    ),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_held_objects_keep_their_store_open(tmp_path: Path, name: str) -> None:
    hold, use = HOLDERS[name]

    def make() -> Any:
        store = mqstore.open(tmp_path / "mq")
        store.queue("jobs").put(b"1")
        return hold(store), weakref.ref(store.log)

    holder, found = make()
    gc.collect()
    assert not found().closed
    use(holder)
    with warned():
        del holder
        until(lambda: collected(found))


def test_a_message_outlives_its_store(tmp_path: Path) -> None:
    def make() -> Any:
        store = mqstore.open(tmp_path / "mq")
        store.put("t", b"1")
        return next(store.iter("t")), weakref.ref(store.log)

    with warned():
        message, found = make()
        until(lambda: collected(found))
    assert message.body == b"1"


def test_a_consumer_that_runs_holds_its_store(tmp_path: Path) -> None:
    seen: list[bytes] = []

    def make() -> Any:
        store = mqstore.open(tmp_path / "mq")
        store.create_topic("t")  # a put to the log alone is no news of a topic
        consumer = store.push_consumer("g", start="earliest")
        consumer.subscribe("t", lambda message: seen.append(message.body))
        consumer.start()
        return weakref.ref(store.log), weakref.ref(consumer)

    found, consumer = make()
    gc.collect()
    found().put("t", b"1")
    until(lambda: seen == [b"1"])
    with warned():
        consumer().stop()
        until(lambda: collected(found))


def test_futures_of_a_forgotten_store_are_done(tmp_path: Path) -> None:
    def make() -> Any:
        store = mqstore.open(tmp_path / "mq")
        futures = [store.broker.put_async("t", b"%d" % i, durability="flush") for i in range(100)]
        futures += [store.producer().submit("t", b"%d" % i) for i in range(100)]
        return futures, weakref.ref(store.log)

    with warned():
        futures, found = make()
        until(lambda: collected(found))
    assert len({(future.result(20).queue, future.result().offset) for future in futures}) == 200


def test_forgotten_reader_gives_its_descriptors_back(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "mq") as store:
        store.put("t", b"1", keys="k", queue_id=0)
    before = os.listdir("/dev/fd")

    def use() -> weakref.ref[Any]:
        reader = mqstore.open(tmp_path / "mq", "r")
        assert [*reader.iter("t", 0)]
        assert reader.find("t", key="k")
        return weakref.ref(reader)

    with warned():
        found = use()
        until(lambda: collected(found))
    assert len(os.listdir("/dev/fd")) == len(before)


def test_forgotten_store_of_a_loop_is_closed_cleanly(tmp_path: Path) -> None:
    async def main() -> weakref.ref[Any]:
        store = await mqstore.aio.open(tmp_path / "mq")
        queue = await store.queue("jobs")
        await queue.put(b"1")
        await (await queue.get()).ack()
        await store.put("t", b"1", durability="flush")
        return weakref.ref(store.sync.log)

    with warned():
        found = asyncio.run(main())
        until(lambda: collected(found))
    with mqstore.open(tmp_path / "mq") as store:
        assert store.recovery.clean_shutdown


def test_store_that_is_reachable_is_closed_at_exit(tmp_path: Path) -> None:
    """Nothing but a module holds it, and only weakly does mqstore know it."""
    program = "import mqstore, sys; store = mqstore.open(sys.argv[1]); store.queue('jobs').put(b'1')"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "mq")], check=True)
    with mqstore.open(tmp_path / "mq") as store:
        assert store.recovery.clean_shutdown
