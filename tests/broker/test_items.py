"""State of each item of a queue, by the engine: one table of ways to get there, in any order and not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import SimulatedClock, StoreConfig
from mqstore.broker.items.state import STATES, Item, State


class Bench:
    """A store whose clock stands still, and its topic and group t."""

    def __init__(self, path: Path) -> None:
        self.path, self.clock = path, SimulatedClock()
        self.open()
        self.broker.topics.create("t", queues=1)
        self.broker.groups.create("t")
        self.broker.start_of("t", "t", 0, "earliest")

    def open(self) -> None:
        self.store = mqstore.open(self.path, config=StoreConfig(clock=self.clock))
        self.broker = self.store.broker

    def put(self, *keys: str, **options: Any) -> None:
        for key in keys:
            self.store.put("t", key.encode(), unique_key=key, queue_id=0, **options)
        self.broker.run_once()

    def pop(self, n: int = 1, **options: Any) -> list[str]:
        return [each.receipt for each in self.broker.pop("t", "t", n, **options)]

    def advance(self, duration_s: float) -> None:
        self.clock.advance(round(duration_s * 1000))
        self.broker.run_once()
        self.broker.run_once()

    def items(self, state: State | None = None, limit: int = 256) -> Iterator[Item]:
        page = self.broker.items.page("t", "t", state, None, limit)
        yield from page.items
        while page.after is not None:
            page = self.broker.items.page("t", "t", state, page.after, limit)
            yield from page.items

    def shown(self, **options: Any) -> list[str]:
        """ "key state attempt" of each item, by key."""
        found = sorted(self.items(**options), key=lambda item: item.message.unique_key)
        return [f"{item.message.unique_key} {item.state} {item.attempt}" for item in found]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "store")
    yield bench
    bench.store.close()


def leased(bench: Bench, order: bool) -> None:
    bench.pop(order=order)


def failed(bench: Bench, order: bool) -> None:
    [receipt] = bench.pop(order=order)
    bench.broker.nack("t", "t", receipt, delay=5, error="ValueError: no")


def failed_and_due(bench: Bench, order: bool) -> None:
    failed(bench, order)
    bench.advance(6)


def failed_and_leased(bench: Bench, order: bool) -> None:
    failed_and_due(bench, order)
    found = bench.broker.pop("t", "t", 2, order=order)
    bench.broker.release("t", "t", [each.receipt for each in found if each.message.unique_key == "b"])


def expired(bench: Bench, order: bool) -> None:
    bench.pop(order=order)
    bench.advance(61)


def released(bench: Bench, order: bool) -> None:
    bench.broker.release("t", "t", bench.pop(order=order))


def rejected(bench: Bench, order: bool) -> None:
    [receipt] = bench.pop(order=order)
    bench.broker.dead_letter("t", "t", receipt, "no such page")


def done(bench: Bench, order: bool) -> None:
    bench.broker.ack("t", "t", bench.pop(order=order))


CASES: list[tuple[Callable[[Bench, bool], object], str | None]] = [
    (lambda bench, order: None, "a ready 1"),
    (leased, "a leased 1"),
    (failed, "a retry 2"),
    (failed_and_due, "a ready 2"),
    (failed_and_leased, "a leased 2"),
    (expired, "a ready 2"),
    (released, "a ready 1"),
    (rejected, "a dead 1"),
    (done, None),
]


@pytest.mark.parametrize("order", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize(("act", "expected"), CASES)
def test_state_of_an_item(
    bench: Bench, act: Callable[[Bench, bool], object], expected: str | None, order: bool
) -> None:
    bench.put("a", "b")

    act(bench, order)

    wanted = [text for text in (expected, "b ready 1") if text]
    found = bench.broker.items.find("t", "t", "a")
    assert bench.shown() == bench.shown(limit=1) == wanted
    assert (None if found is None else f"a {found.state} {found.attempt}") == expected
    states = [text.split()[1] for text in wanted]
    assert bench.broker.items.counts("t", "t") == {state: states.count(state) for state in STATES}
    assert [bench.shown(state=state) for state in STATES] == [
        [text for text in wanted if text.split()[1] == state] for state in STATES
    ]
