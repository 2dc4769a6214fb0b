"""Items of a queue by state, and purge: by each door, in any order and not."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore.errors import ReceiptExpiredError
from tests.client.doors import Doors

STATES = ("ready", "leased", "retry", "delayed", "dead")


def filled(doors: Doors, name: str = "jobs") -> tuple[Any, Any]:
    """A queue with items in all states, and the leased task: retry, leased, dead, ready, ready, delayed."""
    queue = doors.queue(name, codec=mqstore.JSON)
    queue.put_many(["retry", "leased", "dead", "ready 1", "ready 2"])
    queue.put("delayed", delay=60)
    failed, leased, dead = queue.get_many(3)
    queue.nack(failed, delay=60)
    dead.reject("no such page")
    doors.settle()
    return queue, leased


def counts(**some: int) -> dict[str, int]:
    return {state: some.get(state, 0) for state in STATES}


# -- looking ---------------------------------------------------------------------------------------------------------


def test_items_are_listed_by_state(doors: Doors) -> None:
    queue, _ = filled(doors)
    now = doors.clock.now_ms() / 1000
    expected = [
        ("retry", "retry", 2, now + 60, ""),
        ("leased", "leased", 1, now + 60, ""),
        ("ready 1", "ready", 1, None, ""),
        ("ready 2", "ready", 1, None, ""),
        ("delayed", "delayed", 1, now + 60, ""),
        ("dead", "dead", 1, None, "no such page"),
    ]

    assert [(each.value, each.state, each.attempt, each.until, each.reason) for each in queue.items()] == expected
    for state in STATES:
        assert [each.value for each in queue.items(state)] == [row[0] for row in expected if row[1] == state]
    assert [each.value for each in queue.peek(3)] == ["retry", "leased", "ready 1"]
    assert [each.value for each in queue.peek()] == ["retry"]
    assert queue.counts() == counts(ready=2, leased=1, retry=1, delayed=1, dead=1)
    assert queue.qsize() == 4


# -- purge -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "purged", "left"),
    [
        (None, 5, counts(dead=1)),
        ("ready", 2, counts(leased=1, retry=1, delayed=1, dead=1)),
        ("leased", 1, counts(ready=2, retry=1, delayed=1, dead=1)),
        ("retry", 1, counts(ready=2, leased=1, delayed=1, dead=1)),
        ("delayed", 1, counts(ready=2, leased=1, retry=1, dead=1)),
        ("dead", 1, counts(ready=2, leased=1, retry=1, delayed=1)),
    ],
)
def test_purge_removes_one_state_or_all(doors: Doors, state: Any, purged: int, left: dict[str, int]) -> None:
    queue, leased = filled(doors)

    assert queue.purge(state) == purged
    assert queue.counts() == left
    assert len(list(queue.items())) == sum(left.values())
    assert queue.purge(state) == 0
    queue.put("after")
    queue.ack(leased)
    doors.advance(120)
    names = {"ready": ["ready 1", "ready 2"], "retry": ["retry"], "delayed": ["delayed"]}
    expected = [value for state in names for value in names[state] if left[state]]
    assert sorted(doors.values(queue)) == sorted(["after", *expected])
    assert queue.join(0)


@pytest.mark.parametrize("act", ["crash", "restart"])
def test_purged_items_do_not_come_back(doors: Doors, act: str) -> None:
    """Story: the timer saves its progress once a second, so after a kill it delivered an item that was purged again."""
    queue, _ = filled(doors)
    queue.put("due", delay=5)
    doors.advance(5)
    assert queue.counts()["ready"] == 3

    assert queue.purge() == 6
    queue.put("after")
    getattr(doors, act)()

    queue = doors.queue(codec=mqstore.JSON)
    doors.advance(120)
    assert doors.values(queue) == ["after"]
    assert queue.counts() == counts(dead=1)


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
