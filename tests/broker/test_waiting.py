# ruff: noqa: A002  (`filter`, as in the contract)
"""Who is woken, when, and who is not (delivery#waiting).

Most tests own the clock and the dispatcher: `Hall.put` makes a message visible, `Hall.turn` is the housekeeper's turn.
Those with threads use none of either: whoever misses a wake-up there hangs, and the join finds it.
"""

from __future__ import annotations

import gc
import logging
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mqstore import SimulatedClock
from mqstore.broker.background.context import Parts
from mqstore.broker.reads import waiting
from mqstore.broker.reads.filters.filter import parse_filter
from mqstore.broker.reads.waiting import ANY_QUEUE, Waiter, Waiters, Wanted
from mqstore.errors import ConfigError, StoreBusyError, StoreClosedError
from mqstore.log.reading.tagfilter import UnitFilter
from mqstore.log.store import MessageStore
from mqstore.signalsafe import Bell
from tests.broker.support import parked_thread
from tests.log.support import open_store

PAID = parse_filter("paid")
BIG = parse_filter("amount > 100", "SQL92")
HANGS_S = 20.0
"""For joins: nobody waits that long unless a wake-up was lost."""


@dataclass
class Hall:
    """A store, its waiters, and what the callbacks were told: (name, worth reading)."""

    store: MessageStore
    clock: SimulatedClock
    waiters: Waiters = field(init=False)
    wakes: int = 0
    told: list[tuple[str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.waiters = Waiters(_parts(self.store), self._wake)

    def _wake(self) -> None:
        self.wakes += 1

    def put(self, topic: str = "t", queue_id: int = 0, tag: str | None = None, count: int = 1) -> None:
        for _ in range(count):
            self.store.put(topic, b"", queue_id, tag=tag)
        self.store.dispatch()

    def turn(self) -> int | None:
        return self.waiters.run_once(self.clock.now_ms())

    def pass_ms(self, duration_ms: int) -> None:
        self.clock.advance(duration_ms)
        self.turn()

    def park(
        self,
        name: str,
        queue_id: int = 0,
        offset: int | None = None,
        filter: UnitFilter | None = None,
        in_ms: int | None = None,
        topic: str = "t",
        **more: Any,
    ) -> Waiter:
        deadline_ms = None if in_ms is None else self.clock.monotonic_ms() + in_ms
        wanted = Wanted(topic, queue_id, offset, filter, **more)
        return self.waiters.add_waiter(wanted, lambda worth: self.told.append((name, worth)), deadline_ms)

    def woken(self) -> list[str]:
        """Who was woken since this was asked last, each told True."""
        self.turn()
        told, self.told = self.told, []
        assert all(worth for _, worth in told), told
        return [name for name, _ in told]

    def is_empty(self) -> bool:
        """Nothing is left of anybody: not a bucket, not a reader that the dispatcher heeds."""
        return not (self.waiters.parked or self.waiters._buckets or self.is_awaited)

    @property
    def is_awaited(self) -> bool:
        """Whether the dispatcher shows puts at once."""
        return self.store._dispatcher.is_awaited


def _parts(store: MessageStore) -> Parts:
    return cast(Parts, SimpleNamespace(store=store, clock=store.clock, config=store.config))


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    clock = SimulatedClock()
    with open_store(tmp_path / "s", clock=clock, segment_bytes=1 << 18) as store:
        yield Hall(store, clock)


# -- who is concerned --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queue_id", "filter", "put", "woken"),
    [
        (0, None, {}, True),
        (0, None, {"queue_id": 1}, False),
        (ANY_QUEUE, None, {"queue_id": 3}, True),
        (ANY_QUEUE, None, {"topic": "u"}, False),
        (0, PAID, {}, False),
        (ANY_QUEUE, PAID, {"tag": "paid", "queue_id": 2}, True),
        (ANY_QUEUE, PAID, {"tag": "open", "queue_id": 2}, False),
        (0, BIG, {"tag": "open"}, True),  # what a unit cannot tell is worth a read
    ],
)
def test_a_put_wakes_whom_it_concerns(
    hall: Hall, queue_id: int, filter: UnitFilter | None, put: dict[str, Any], woken: bool
) -> None:
    hall.park("w", queue_id, None, filter, group="g")  # without a group: the model below
    hall.put(**put)
    assert hall.woken() == (["w"] if woken else [])
    assert hall.is_empty() is woken


def test_earlier_messages_are_not_news(hall: Hall) -> None:
    """The first growth of a queue that stood full when the first waiter came is the new unit, not all of them."""
    for queue_id in range(3):
        hall.put(queue_id=queue_id, tag="paid", count=4)
    other = Hall(hall.store, hall.clock)  # has seen none of that
    for name in "abc":
        other.park(name, ANY_QUEUE, filter=PAID, group="g")
    other.put(queue_id=1, tag="open")
    assert other.woken() == []
    other.put(queue_id=1, tag="paid")
    assert other.woken() == ["a"]
    other.put(queue_id=7, tag="paid")  # a queue that is new altogether
    assert other.woken() == ["b"]


def test_growth_between_parking_and_the_second_look_is_seen(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    look = hall.store.offsets_or_none

    def late_look(*queue: Any) -> Any:
        monkeypatch.undo()
        hall.put()  # finds the waiter parked: fired by this
        return look(*queue)  # and found once more

    monkeypatch.setattr(hall.store, "offsets_or_none", late_look)
    hall.park("w", offset=0)
    assert hall.woken() == ["w"]
    assert hall.is_empty()


def test_a_filter_or_callback_that_fails_harms_nobody(hall: Hall, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def units(self, tags_codes: Any) -> Any:
            raise ZeroDivisionError

        def apply(self, messages: list[Any]) -> list[Any]:
            return []

    hall.waiters.add_waiter(Wanted("t", 0, 0), lambda worth: [][1])
    hall.park("broken", offset=0, filter=Broken())
    hall.park("sound", offset=0, filter=PAID)
    with caplog.at_level(logging.ERROR, "mqstore"):
        hall.put(tag="paid")
    assert sorted(hall.woken()) == ["broken", "sound"]
    assert "could not be matched" in caplog.text
    assert "a waiter's callback failed" in caplog.text
    assert hall.is_empty()


# -- receivers that compete --------------------------------------------------------------------------------------------


def test_as_many_of_a_group_are_woken_as_units_came_the_oldest_first(hall: Hall) -> None:
    for name in "abcde":
        hall.park(name, ANY_QUEUE, group="g")
    hall.put()
    assert hall.woken() == ["a"]
    hall.store.put_many("t", [b""] * 3)
    hall.store.dispatch()
    assert hall.woken() == ["b", "c", "d"]
    assert len(hall.waiters.parked) == 1


def test_wake_one(hall: Hall) -> None:
    hall.park("any", ANY_QUEUE, group="g")
    hall.park("q1", 1, group="g")
    hall.park("other", 1, group="h")
    hall.park("reader", 1)
    assert hall.waiters.wake_one("g", "t", 1)
    assert hall.woken() == ["q1"]
    assert hall.waiters.wake_one("g", "t", 1)
    assert hall.woken() == ["any"]
    seen = hall.waiters.seen("t")
    assert not hall.waiters.wake_one("g", "t", 1)
    assert hall.woken() == []
    hall.park("on the way", 1, group="g", seen=seen)  # had looked before, was not parked yet
    assert hall.woken() == ["on the way"]


# -- time --------------------------------------------------------------------------------------------------------------


def test_the_housekeeper_is_roused_for_an_earlier_deadline_only(hall: Hall) -> None:
    hall.park("a", in_ms=1000)
    assert hall.wakes == 1
    assert hall.turn() == hall.clock.now_ms() + 1000
    hall.park("later", in_ms=1000)
    hall.park("never")
    assert hall.wakes == 1
    hall.park("sooner", in_ms=999)
    assert hall.wakes == 2
    assert hall.turn() == hall.clock.now_ms() + 999


def test_of_a_group_one_is_sent_to_step_over(hall: Hall) -> None:
    for name in "abc":
        hall.park(name, ANY_QUEUE, filter=PAID, group="g")
    hall.put(tag="open")
    hall.pass_ms(2_000)
    hall.put(tag="open")  # does not put it off
    hall.pass_ms(2_999)
    assert hall.told == []
    hall.pass_ms(1)
    assert hall.told == [("a", True)]
    hall.pass_ms(60_000)
    assert hall.told == [("a", True)]
    hall.put(tag="open")
    hall.pass_ms(2_000)
    hall.put(tag="paid")  # who takes this steps over the other
    assert hall.told == [("a", True), ("b", True)]
    hall.pass_ms(60_000)
    assert hall.told == [("a", True), ("b", True)]


def test_entries_of_those_who_left_do_not_pile_up(hall: Hall) -> None:
    for i in range(20_000):
        hall.waiters.remove_waiter(hall.park("w", in_ms=20_000 + i % 7))
    assert sum(type(each) is Waiter for each in gc.get_objects()) < 2_100
    hall.park("last", in_ms=20_000)
    hall.pass_ms(20_010)
    assert hall.told == [("last", False)]


# -- callbacks ---------------------------------------------------------------------------------------------------------


def test_a_callback_is_called_by_who_dispatches(hall: Hall) -> None:
    told: list[tuple[bool, bool]] = []

    def hand_over(worth: bool) -> None:
        other = threading.Thread(target=hall.waiters.seen, args=("t",), daemon=True)  # takes the lock
        other.start()
        other.join(HANGS_S)
        told.append((worth, other.is_alive()))

    hall.waiters.add_waiter(Wanted("t", 0, 0), hand_over)
    wakes = hall.wakes
    hall.put()
    assert told == [(True, False)]
    assert hall.wakes == wakes  # nothing is left for the housekeeper

    hall.waiters.add_waiter(Wanted("t", 0, 0), hand_over)  # what is there already
    hall.waiters.add_waiter(Wanted("t", 0, 1), hand_over, hall.clock.monotonic_ms() + 5)
    assert told[1:] == [(True, False)]
    hall.pass_ms(5)
    assert told[2:] == [(False, False)]
    hall.waiters.add_waiter(Wanted("t", 0, 1), hand_over)
    hall.waiters.close()
    assert told[3:] == [(False, False)]


# -- limits, arguments, the end ----------------------------------------------------------------------------------------


def test_there_is_an_end_to_parking(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_MAX_PARKED", 2)
    first = hall.park("a")
    hall.park("b")
    with pytest.raises(StoreBusyError, match="too many waiting receivers"):
        hall.park("c")
    with pytest.raises(StoreBusyError):
        hall.waiters.wait(Wanted("t", 0, 0), 1)
    hall.waiters.remove_waiter(first)
    hall.park("c")
    assert len(hall.waiters.parked) == 2


@pytest.mark.parametrize(
    ("queue_id", "offset", "group"), [(-2, None, None), (ANY_QUEUE, 0, None), (0, 0, "g"), (ANY_QUEUE, 5, "g")]
)
def test_arguments_that_do_not_go_together(hall: Hall, queue_id: int, offset: int | None, group: str | None) -> None:
    with pytest.raises(ConfigError):
        hall.park("w", queue_id, offset, group=group)
    with pytest.raises(ConfigError):
        hall.waiters.wait(Wanted("t", queue_id, offset, group=group), 0)
    assert hall.is_empty()


def test_closing_ends_every_wait(hall: Hall) -> None:
    hall.park("a", in_ms=100)
    hall.park("b", ANY_QUEUE, group="g", also=["u"])
    results: list[bool] = []
    thread = parked_thread(hall.waiters, lambda: results.append(hall.waiters.wait(Wanted("t", 0, 0), 100)))
    hall.waiters.close()
    hall.waiters.close()
    thread.join(HANGS_S)
    assert results == [False]
    assert sorted(hall.told) == [("a", False), ("b", False)]
    assert hall.is_empty()
    with pytest.raises(StoreClosedError):
        hall.park("late")
    hall.put()  # tells nobody
    assert hall.turn() is None


# -- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("happens", "result"),
    [
        (lambda hall: hall.put(tag="paid"), True),
        (lambda hall: (hall.put(tag="open"), hall.pass_ms(4_999), hall.pass_ms(1)), True),
        (lambda hall: (hall.pass_ms(19_999), hall.pass_ms(1)), False),
    ],
)
def test_a_thread_by_the_clock_of_a_test(hall: Hall, happens: Callable[[Hall], object], result: bool) -> None:
    results: list[bool] = []
    thread = parked_thread(hall.waiters, lambda: results.append(hall.waiters.wait(Wanted("t", 0, 0, PAID), 20)))
    assert hall.is_awaited
    happens(hall)
    thread.join(HANGS_S)
    assert results == [result]
    assert hall.is_empty()


def test_a_wait_for_what_is_there_does_not_park(hall: Hall) -> None:
    hall.store.put("t", b"", tag="open")
    assert hall.waiters.wait(Wanted("t", 0, 0), 1000)
    assert hall.waiters.wait(Wanted("t", 0, 0), 0)
    assert not hall.waiters.wait(Wanted("t", 0, 1), 0)
    assert not hall.waiters.wait(Wanted("t", 0, 0, PAID), 0)
    assert not hall.waiters.wait(Wanted("nowhere", 0, 0), 0)
    seen = hall.waiters.seen("t")
    assert not hall.waiters.wait(Wanted("t", ANY_QUEUE, group="g", seen=seen), 0)
    hall.put()
    assert hall.waiters.wait(Wanted("t", ANY_QUEUE, group="g", seen=seen), 0)
    assert hall.waiters.wait(Wanted("t", ANY_QUEUE, group="g", seen=seen), 1000)
    assert hall.is_empty()


def test_an_interrupted_wait_passes_its_message_on(hall: Hall, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen for a message and then ended by Ctrl-C: another of its group gets it."""

    class InterruptedBell(Bell):
        def wait(self, timeout_s: float | None = None) -> bool:
            hall.park("other", ANY_QUEUE, group="g")
            hall.put()
            raise KeyboardInterrupt

    monkeypatch.setattr(waiting, "Bell", InterruptedBell)
    with pytest.raises(KeyboardInterrupt):
        hall.waiters.wait(Wanted("t", ANY_QUEUE, group="g"), 10)
    assert hall.woken() == ["other"]
    assert hall.is_empty()


# -- against a model ---------------------------------------------------------------------------------------------------


@dataclass
class Modelled:
    """What the spec says of one waiter, without buckets or heaps."""

    name: str
    topic: str
    queue_id: int
    from_unit: dict[int, int]
    tag: str | None
    group: str | None
    deadline_ms: int
    passed_over_ms: int | None = None
    token: Waiter | None = None


@pytest.mark.parametrize("seed", range(8))
def test_as_a_naive_model_would_wake(hall: Hall, seed: int) -> None:
    """Random parking, leaving, putting and waiting; after each step the same have been told the same. Readers without a
    group only: whom a group sends is another test's."""
    rng = random.Random(seed)
    log: dict[tuple[str, int], list[str]] = {}
    parked: list[Modelled] = []
    expected: list[tuple[str, bool]] = []
    filters = {tag: parse_filter(tag) for tag in ("a", "b")}
    clock = hall.clock

    def tell(which: Callable[[Modelled], bool | None]) -> None:
        nonlocal parked
        staying = []
        for each in parked:
            worth = which(each)
            if worth is None:
                staying.append(each)
            else:
                expected.append((each.name, worth))
        parked = staying

    def news(each: Modelled) -> bool | None:
        for (topic, queue_id), tags in log.items():
            if topic == each.topic and each.queue_id in (queue_id, ANY_QUEUE):
                units = tags[each.from_unit.get(queue_id, 0) :]
                if any(each.tag in (None, tag) for tag in units):
                    return True
                if units and each.passed_over_ms is None:
                    each.passed_over_ms = clock.monotonic_ms()
        return None

    def time(each: Modelled) -> bool | None:
        now = clock.monotonic_ms()
        if now >= each.deadline_ms:
            return False
        return True if each.passed_over_ms is not None and now >= each.passed_over_ms + 5_000 else None

    for step in range(120):
        action = rng.randrange(10)
        topic, queue_id = rng.choice("tu"), rng.randrange(2)
        if action < 4:
            end = len(log.get((topic, queue_id), ()))
            anywhere = rng.random() < 0.3
            offset = None if anywhere else max(0, end + rng.choice((-1, 0, 0, 0, 0, 1)))
            starts = {q: len(log.get((topic, q), ())) for q in range(2)} if offset is None else {queue_id: offset}
            place = ANY_QUEUE if anywhere else queue_id
            tag = rng.choice((None, "a", "b"))
            in_ms = rng.choice((1_000, 7_000, 20_000))
            waiter = Modelled(f"w{step}", topic, place, starts, tag, None, clock.monotonic_ms() + in_ms)
            parked.append(waiter)
            waiter.token = hall.park(waiter.name, place, offset, filters.get(tag or ""), in_ms, topic)
            tell(news)
        elif action < 5 and parked:
            leaving = parked.pop(rng.randrange(len(parked)))
            assert leaving.token is not None
            assert hall.waiters.remove_waiter(leaving.token)
        elif action < 8:
            tag = rng.choice("abc")
            log.setdefault((topic, queue_id), []).append(tag)
            hall.put(topic, queue_id, tag)
            tell(news)
        else:
            clock.advance(rng.choice((1, 500, 4_000, 5_000)))
            tell(time)
        hall.turn()
        assert sorted(hall.told) == sorted(expected), f"step {step}"
        assert len(hall.waiters.parked) == len(parked)
