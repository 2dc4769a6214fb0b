"""State of each item of a queue, by the engine: one table of ways to get there, in any order and not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import SimulatedClock, StoreConfig
from mqstore.broker.items.state import STATES, Item, State
from mqstore.errors import ConfigError, ReceiptExpiredError, TopicNotFoundError


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
    assert bench.shown() == bench.shown(limit=1) == wanted
    states = [text.split()[1] for text in wanted]
    assert bench.broker.items.counts("t", "t") == {state: states.count(state) for state in STATES}
    assert [bench.shown(state=state) for state in STATES] == [
        [text for text in wanted if text.split()[1] == state] for state in STATES
    ]


def reasons(bench: Bench) -> list[tuple[str, int, str]]:
    return [(item.state, item.attempt, item.reason) for item in bench.items() if item.message.unique_key == "a"]


def test_reason_of_a_failed_item_survives_compaction_and_restart(bench: Bench) -> None:
    bench.put("a", "b")
    receipts = bench.pop(2)
    bench.broker.nack("t", "t", receipts[0], delay=600, error="ValueError: no")
    [state] = bench.broker._pop.tables.states.values()
    bench.broker._pop._unordered.rewrite(state, state.in_flight[0])
    assert reasons(bench) == [("retry", 2, "ValueError: no")]

    bench.store.close()
    bench.open()

    assert reasons(bench) == [("retry", 2, "ValueError: no")]
    assert bench.broker.items.counts("t", "t")["retry"] == 1


def test_page_has_a_limit_of_bytes(bench: Bench) -> None:
    for i in range(6):
        bench.store.put("t", bytes(1 << 20), unique_key=str(i), queue_id=0)

    first = bench.broker.items.page("t", "t")

    assert len(first.items) == 3
    assert [item.message.unique_key for item in bench.items()] == [str(i) for i in range(6)]


def test_items_in_a_delay_level_are_shown(bench: Bench) -> None:
    bench.put("a", delay_level=3)
    bench.put("b")
    assert bench.shown() == bench.shown(limit=1) == ["a delayed 1", "b ready 1"]
    assert bench.broker.items.counts("t", "t")["delayed"] == 1
    assert [item.until_ms for item in bench.items("delayed")] == [bench.clock.now_ms() + 10_000]

    bench.advance(11)
    assert bench.shown() == ["a ready 1", "b ready 1"]


def test_lease_that_was_purged_ends(bench: Bench) -> None:
    bench.put("a", "b")
    [first, second] = bench.pop(2)
    assert bench.broker.items.purge("t", "t", "leased") == 2

    bench.broker.ack("t", "t", [first])
    with pytest.raises(ReceiptExpiredError):
        bench.broker.nack("t", "t", second)
    assert bench.shown() == []


@pytest.mark.parametrize("place", [("t", 0, -5), ("t", 7, 0), ("nonesuch", 0, 0), ("t", 0, 1 << 60)])
def test_page_from_a_foreign_place_has_items_or_none(bench: Bench, place: tuple[str, int, int]) -> None:
    bench.put("a")
    found = bench.broker.items.page("t", "t", None, place).items
    assert [item.message.unique_key for item in found] in (["a"], [])


def test_unknown_names_and_states_are_refused(bench: Bench) -> None:
    for call in (bench.broker.items.page, bench.broker.items.counts, bench.broker.items.purge):
        with pytest.raises(TopicNotFoundError):
            call("t", "nonesuch")
    for change in (bench.broker.items.page, bench.broker.items.purge):
        with pytest.raises(ConfigError, match="ready, leased, retry, delayed or dead"):
            change("t", "t", "lost")
    bench.put("a", "b")
    bench.pop(order=True)
    with pytest.raises(ConfigError, match="consumed in order"):
        bench.broker.items.purge("t", "t", "ready")
    assert bench.shown() == ["a leased 1", "b ready 1"]


@pytest.mark.parametrize("leases", [False, True], ids=["ready", "leased"])
def test_items_put_after_a_purge_began_stay(bench: Bench, monkeypatch: pytest.MonkeyPatch, leases: bool) -> None:
    timer, cancel_all = bench.broker._timer, bench.broker._timer.cancel_all

    def with_later_puts(topics: Any, begin: Callable[[], int]) -> int:
        def then_put() -> int:
            stop = begin()
            bench.store.put("t", b"", unique_key="late", queue_id=0, delay=60)
            bench.store.put("t", b"", unique_key="new", queue_id=0)
            if leases:
                bench.pop()
            return stop

        return cancel_all(topics, then_put)

    monkeypatch.setattr(timer, "cancel_all", with_later_puts)
    bench.put("a", "b")
    bench.put("c", delay=60)
    bench.broker.ack("t", "t", bench.pop(2)[:1])

    assert bench.broker.items.purge("t", "t") == 2
    assert bench.shown() == ["late delayed 1", f"new {'leased' if leases else 'ready'} 1"]
