"""Items of a queue against a model: what is listed, counted and purged, after any operations, restarts and crashes."""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore.errors import ConfigError, QueueEmpty, ReceiptExpiredError
from tests.client.popsupport import Bench

STATES = ("ready", "leased", "retry", "delayed", "dead")
VISIBLE_S = 60


class Model:
    """Each item by its number: state, deliveries so far, and the time at which the state ends."""

    def __init__(self, bench: Bench, ordered: bool) -> None:
        self.bench, self.ordered = bench, ordered
        self.items: dict[int, tuple[str, int, float]] = {}
        self.next = 0
        self.given: set[int] = set()
        """Items that wait because they were given back with a delay."""
        self.open()

    def open(self) -> None:
        self.queue: Any = self.bench.store.queue("jobs", codec=mqstore.JSON, ordered=self.ordered)
        self.tasks: dict[int, Any] = {}

    @property
    def now(self) -> float:
        return self.bench.clock.now_ms() / 1000

    def pass_time(self) -> None:
        for number, (state, deliveries, until) in self.items.items():
            if state in ("leased", "retry", "delayed") and until <= self.now:
                self.items[number] = "ready", deliveries, 0
                self.tasks.pop(number, None)

    def check(self) -> None:
        self.bench.settle()
        self.pass_time()
        shown = {item.value: (item.state, item.attempt, item.until or 0) for item in self.queue.items()}
        expected = {
            number: (state, deliveries + (state in ("ready", "retry", "delayed")), until)
            for number, (state, deliveries, until) in self.items.items()
        }
        assert shown == expected
        counts = Counter(state for state, *_ in self.items.values())
        assert self.queue.counts() == {state: counts[state] for state in STATES}
        self.given = {number for number in self.given if self.items.get(number, ("",))[0] == "delayed"}
        assert self.queue.qsize() == counts["ready"] + counts["leased"] + counts["retry"] + len(self.given)
        for state in STATES:
            assert {item.value for item in self.queue.items(state)} == {
                number for number, each in self.items.items() if each[0] == state
            }

    # -- operations -------------------------------------------------------------------------------------------------

    def put(self, rng: random.Random) -> None:
        number = self.next
        self.next += 1
        if rng.random() < 0.4:
            delay = rng.choice([5, 100, 4000])
            self.queue.put(number, delay=delay)
            self.items[number] = "delayed", 0, self.now + delay
        else:
            self.queue.put(number)
            self.items[number] = "ready", 0, 0

    def get(self, rng: random.Random) -> None:
        try:
            task = self.queue.get_nowait()
        except QueueEmpty:
            assert self.ordered or not any(state == "ready" for state, *_ in self.items.values())
            return
        state, deliveries, _ = self.items[task.value]
        assert (state, task.attempt) == ("ready", deliveries + 1)
        self.items[task.value] = "leased", deliveries + 1, self.now + VISIBLE_S
        self.tasks[task.value] = task

    def settle(self, rng: random.Random) -> None:
        if not self.tasks:
            return
        number, task = rng.choice(sorted(self.tasks.items()))
        del self.tasks[number]
        _, deliveries, _ = self.items[number]
        verb = rng.choice(["ack", "nack", "reject", "release", "later"])
        if verb == "ack":
            task.ack()
            del self.items[number]
        elif verb == "nack":
            delay = rng.choice([5, 100, 4000])
            task.nack(delay)
            self.items[number] = "retry", deliveries, self.now + delay
        elif verb == "reject":
            task.reject("no")
            self.items[number] = "dead", deliveries, 0
        elif verb == "release":
            task.release()
            self.items[number] = "ready", deliveries - 1, 0
        else:
            delay = rng.choice([5, 100, 4000])
            task.release(delay=delay)
            self.given.add(number)
            self.items[number] = "delayed", deliveries - 1, self.now + delay

    def purge(self, rng: random.Random) -> None:
        state = rng.choice([None, *STATES])
        chosen = {
            number for number, each in self.items.items() if each[0] == state or (state is None and each[0] != "dead")
        }
        try:
            assert self.queue.purge(state) == len(chosen)
        except ConfigError:
            assert self.ordered
            assert state == "ready"
            return
        for number in chosen:
            del self.items[number]
            if task := self.tasks.pop(number, None):
                task.ack()

    def wait(self, rng: random.Random) -> None:
        self.bench.advance(rng.choice([1, 10, 70, 5000]))

    def restart(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            self.bench.store.close()
        else:
            self.bench.kill()
        self.bench.open()
        self.items = {
            number: ("ready", deliveries, 0) if state == "leased" else (state, deliveries, until)
            for number, (state, deliveries, until) in self.items.items()
        }
        self.open()


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize("seed", range(6))
def test_items_are_those_of_the_model(tmp_path: Path, seed: int, ordered: bool) -> None:
    rng, bench = random.Random(seed), Bench(tmp_path / "store")
    model = Model(bench, ordered)
    kinds = ["put"] * 6 + ["get"] * 5 + ["settle"] * 5 + ["wait"] * 2 + ["purge", "restart"]
    for _ in range(120):
        getattr(model, rng.choice(kinds))(rng)
        model.check()
    bench.store.close()


def test_items_put_during_a_purge_are_counted_or_left(tmp_path: Path) -> None:
    """Each of them is in one result of `purge`, or still there, and none twice."""
    count, purged = 3_000, []
    with mqstore.open(tmp_path / "store") as store:
        queue: Any = store.queue("jobs", codec=mqstore.JSON)

        def put(first: int) -> None:
            for number in range(first, first + count):
                queue.put(number, **({"delay": 0.002 * (number % 7)} if number % 3 == 0 else {}))

        def lease() -> None:
            while any(thread.is_alive() for thread in threads[:2]):
                for task in queue.get_many(3):
                    with suppress(ReceiptExpiredError):  # it was purged
                        task.nack(0.01)

        threads = [threading.Thread(target=put, args=(i * count,)) for i in range(2)]
        threads.append(threading.Thread(target=lease))
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            purged.append(queue.purge())

        assert sum(purged) + queue.purge() == 2 * count
        assert list(queue.items()) == []
        assert set(queue.counts().values()) == {0}
