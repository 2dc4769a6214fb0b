"""Items of a queue by the engine: pages, delay levels, purge, and what only a broker is asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.items.state import Item, State
from mqstore.errors import ConfigError, ReceiptExpiredError, TopicNotFoundError
from tests.client import popsupport


class Bench(popsupport.Bench):
    """A store whose clock stands still, and its topic and group t."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.broker.topics.create("t", queues=1)
        self.broker.groups.create("t")
        self.broker.start_of("t", "t", 0, "earliest")

    def pop(self, n: int = 1, **options: Any) -> list[str]:
        return [each.receipt for each in self.broker.pop("t", "t", n, **options)]

    def items(self, state: State | None = None, limit: int = 256) -> Iterator[Item]:
        page = self.broker.items.page("t", "t", state, None, limit)
        yield from page.items
        while page.after is not None:
            page = self.broker.items.page("t", "t", state, page.after, limit)
            yield from page.items

    def shown(self, **options: Any) -> list[str]:
        """ "body state attempt" of each item, by body."""
        found = sorted(self.items(**options), key=lambda item: item.message.body)
        return [f"{item.message.body.decode()} {item.state} {item.attempt}" for item in found]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "store")
    yield bench
    bench.store.close()


def reasons(bench: Bench) -> list[tuple[str, int, str]]:
    return [(item.state, item.attempt, item.reason) for item in bench.items() if item.message.body == b"a"]


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


@pytest.mark.parametrize("order", [False, True])
def test_reason_of_a_failed_item_stays_until_its_next_attempt_ends(bench: Bench, order: bool) -> None:
    """It was lost once the item was ready again."""
    bench.put("a")
    [receipt] = bench.pop(order=order)
    bench.broker.nack("t", "t", receipt, delay=10, error="ValueError: no\x02")
    shown = "ValueError: no\x02" if order else "ValueError: no"  # a property has no separators

    bench.advance(11)
    assert reasons(bench) == [("ready", 2, shown)]
    if not order:
        bench.store.close()
        bench.open()
        assert reasons(bench) == [("ready", 2, shown)]
    bench.pop(order=order, invisible=5)
    assert reasons(bench) == [("leased", 2, "")]
    bench.advance(6)
    assert reasons(bench) == [("ready", 3, "")]


def test_each_failed_item_keeps_its_own_reason(bench: Bench) -> None:
    """Those with the same reason are copied together, by compiled code."""
    errors = ["x", "x", "y", "", "y", "x", "z" * 400]
    bench.put(*"0123456")
    for error, receipt in zip(errors, bench.pop(7), strict=True):
        bench.broker.nack("t", "t", receipt, delay=10, error=error)

    bench.advance(11)

    found = sorted(bench.items(), key=lambda item: item.message.body)
    assert [item.reason for item in found] == [error[:300] for error in errors]


def test_reason_leaves_properties_their_room(bench: Bench) -> None:
    """It must not prevent the copy."""
    bench.store.put("t", b"a", queue_id=0, properties={"p": "v" * 32_500})
    [receipt] = bench.pop()
    bench.broker.nack("t", "t", receipt, delay=10, error="ValueError: " + "no" * 150)

    bench.advance(11)

    assert reasons(bench) == [("ready", 2, "")]


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("done", [0, 30], ids=["many_in_flight", "few_in_flight"])
def test_pages_of_one_item_are_together_all_items(bench: Bench, done: int, order: bool) -> None:
    keys = [f"{i:02}" for i in range(34)]
    bench.put(*keys)
    receipts = bench.pop(32, order=order)
    bench.broker.ack("t", "t", receipts[1 : 1 + done])

    found = islice(bench.items(limit=1), len(keys) + 1)  # otherwise pages that repeat would have no end

    wanted = [f"{key} leased" for key in (keys[0], *keys[1 + done : 32])] + ["32 ready", "33 ready"]
    assert [f"{item.message.body.decode()} {item.state}" for item in found] == wanted


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
    for limit, shown in ((1, 1), (2, 2), (256, 2)):
        page = bench.broker.items.page("t", "t", limit=limit)
        assert (len(page.items), limit > 2) == (shown, page.after is None)  # one page for all places
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
    assert [item.message.body for item in found] in ([b"a"], [])


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
            bench.store.put("t", b"late", queue_id=0, delay=60)
            bench.store.put("t", b"new", queue_id=0)
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
