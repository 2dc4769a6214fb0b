"""What a queue holds is complete and counted once: right after a crash, and while items are redelivered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import mqstore
from mqstore import SimulatedClock, StoreConfig
from tests.client.support import ended, in_thread
from tests.log.support import kill

ITEMS = 400
"""Each got alone. Of the leases of a dead process one run of the housekeeper moves 256."""
OPEN = [b"%d" % i for i in range(ITEMS) if i % 4]


def opened(path: Path, clock: SimulatedClock, durability: mqstore.Durability = "append") -> mqstore.Store:
    return mqstore.open(path, durability=durability, config=StoreConfig(clock=clock))


def crash(path: Path, clock: SimulatedClock, durability: mqstore.Durability = "append") -> None:
    """Leave a queue `jobs` whose reader died with three of four items leased. The others are done."""
    store = opened(path, clock)
    queue = store.queue("jobs", visibility=3600)
    queue.put_many(b"%d" % i for i in range(ITEMS))
    for i in range(ITEMS):
        task = queue.get()
        if i % 4 == 0:
            task.ack()
    kill(store.log)


@pytest.fixture(params=["append", "flush"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[mqstore.Store]:
    """The crashed store, just opened: nothing has run in the background yet."""
    clock = SimulatedClock()
    crash(tmp_path / "s", clock)
    with opened(tmp_path / "s", clock, request.param) as store:
        yield store


def by_loop(store: mqstore.Store) -> list[tuple[bytes, int]]:
    return [(task.value, task.attempt) for task in store.queue("jobs")]


def by_get_many(store: mqstore.Store) -> list[tuple[bytes, int]]:
    return [(task.value, task.attempt) for task in store.queue("jobs").get_many(2 * ITEMS)]


def by_pop(store: mqstore.Store) -> list[tuple[bytes, int]]:
    found = []
    while deliveries := store.broker.pop("jobs", "jobs", 32):
        found += [(each.message.body, each.attempt) for each in deliveries]
    return found


def by_receive(store: mqstore.Store) -> list[tuple[bytes, int]]:
    found = []
    with store.simple_consumer("jobs", {"jobs": "*"}) as consumer:
        while received := consumer.receive(32, wait=0):
            found += [(each.message.body, each.attempt) for each in received]
    return found


@pytest.mark.parametrize("take", [by_loop, by_get_many, by_pop, by_receive])
def test_crash_leaves_every_leased_item_ready(
    store: mqstore.Store, take: Callable[[mqstore.Store], list[tuple[bytes, int]]]
) -> None:
    assert sorted(take(store)) == sorted((body, 2) for body in OPEN)


def test_crash_leaves_the_right_count(store: mqstore.Store) -> None:
    queue = store.queue("jobs", maxsize=len(OPEN) + 1)
    assert (queue.qsize(), queue.empty(), queue.full()) == (len(OPEN), False, False)
    assert sum(store.lag("jobs").values()) == len(OPEN)
    samples = [line for line in store.broker.prometheus().splitlines() if 'consumer_group="jobs"' in line]
    lags = [int(line.split()[-1]) for line in samples if line.startswith("rocketmq_consumer_lag_messages{")]
    assert sum(lags) == len(OPEN)


@pytest.mark.parametrize("durability", ["append", "flush"])
def test_redelivery_does_not_change_the_count(tmp_path: Path, durability: mqstore.Durability) -> None:
    """Items were counted where they had been and where they came, or in neither place."""
    clock = SimulatedClock()
    with opened(tmp_path / "s", clock, durability) as store:
        queue = store.queue("jobs", visibility=10)
        queue.put_many([b"x"] * 2000)
        over = threading.Event()

        def count() -> set[int]:
            seen = {queue.qsize()}
            while not over.is_set():
                seen.add(queue.qsize())
            return seen | {queue.qsize()}

        for _ in range(3):  # the second time within the retry topic
            assert len(queue.get_many(2000)) == 2000
            clock.advance(11_000)
            over.clear()
            counting = in_thread(count)
            while (due_ms := store.broker.run_once()) is not None and due_ms <= clock.now_ms():
                pass
            over.set()
            assert ended(*counting) == {2000}
