"""Items of a queue by state, and purge: by each door, in any order and not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
from tests.client.doors import DOORS, Doors, opened

STATES = ("ready", "leased", "retry", "delayed", "dead")


@pytest.fixture(params=DOORS)
def doors(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    with opened(tmp_path / "store", request.param, monkeypatch) as doors:
        yield doors


def listed(doors: Doors, queue: Any, state: Any = None) -> list[Any]:
    if doors.door != "aio":
        return list(queue.items(state))

    async def collect() -> list[Any]:
        return [item async for item in queue._wrapped.items(state)]

    return list(doors._on_loop(collect()))


def filled(doors: Doors, name: str = "jobs") -> tuple[Any, Any]:
    """A queue with items in all states, and the leased task: retry, leased, dead, ready, ready, delayed."""
    queue = doors.queue(name, codec=mqstore.JSON)
    queue.put_many(["retry", "leased", "dead", "ready 1", "ready 2"])
    queue.put("delayed", delay=60)
    failed, leased, dead = queue.get_many(3)
    failed.nack(delay=60)
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

    assert [
        (each.value, each.state, each.attempt, each.until, each.reason) for each in listed(doors, queue)
    ] == expected
    for state in STATES:
        assert [each.value for each in listed(doors, queue, state)] == [row[0] for row in expected if row[1] == state]
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
    assert len(listed(doors, queue)) == sum(left.values())
    assert queue.purge(state) == 0
    queue.put("after")
    leased.ack()
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
