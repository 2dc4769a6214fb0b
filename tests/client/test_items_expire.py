"""Items that expire before they are first delivered, by each door."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mqstore import RetryPolicy
from mqstore.errors import InvalidMessageError
from tests.client.doors import DOORS, Doors, opened

BOTH = pytest.mark.parametrize("ordered", [False, True], ids=["standard", "ordered"])


@pytest.fixture(params=DOORS)
def doors(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    with opened(tmp_path / "store", request.param, monkeypatch) as doors:
        yield doors


@BOTH
def test_item_that_nobody_began_in_time_is_dropped(doors: Doors, ordered: bool) -> None:
    queue = doors.queue(ordered=ordered)
    for value, expires in (("stays", None), ("short", 10), ("long", 30), ("also short", timedelta(seconds=10))):
        queue.put(value.encode(), expires=expires)
    doors.advance(9.9)
    assert queue.qsize() == 4
    doors.advance(0.1)
    assert queue.qsize() == 4  # until somebody looks
    assert doors.values(queue) == [b"stays", b"long"]
    assert queue.qsize() == 0
    assert doors.store.broker._statistics.snapshot().total("EXPIRED_NUMS", "jobs@jobs") == 2
    assert list(doors.store.dead_letters("jobs")) == []


@BOTH
def test_prefetched_item_expires_too(doors: Doors, ordered: bool) -> None:
    queue = doors.queue(ordered=ordered)
    for value in range(40):
        queue.put(str(value).encode(), expires=10 if value % 2 else None)
    first = queue.get(block=False)
    doors.advance(10)
    first.ack()
    assert doors.values(queue) == [str(value).encode() for value in range(2, 40, 2)]


@BOTH
def test_item_that_was_delivered_once_does_not_expire(doors: Doors, ordered: bool) -> None:
    queue = doors.queue(ordered=ordered, retry=RetryPolicy(5, [1]))
    queue.put(b"x", expires=10)
    queue.get(block=False).nack(20)
    doors.advance(21)
    task = queue.get(block=False)
    assert (task.value, task.attempt) == (b"x", 2)


def test_delayed_item_expires_by_its_own_time(doors: Doors) -> None:
    queue = doors.queue()
    queue.put(b"late", delay=5, expires=10)
    queue.put(b"in time", delay=5, expires=20)
    doors.advance(12)
    assert doors.values(queue) == [b"in time"]


def test_time_may_be_a_datetime(doors: Doors) -> None:
    queue = doors.queue()
    at = datetime.fromtimestamp(doors.clock.now_ms() / 1000 + 10, UTC)
    queue.put(b"x", expires=at)
    doors.advance(9.9)
    queue.put(b"y", expires=at)
    task = queue.get(block=False)
    doors.advance(0.2)
    task.ack()
    assert doors.values(queue) == []


@pytest.mark.parametrize(
    "options", [{"expires": 0}, {"expires": -1}, {"expires": datetime(2000, 1, 1, tzinfo=UTC)},
                {"expires": datetime(2000, 1, 1)}, {"expires": 5, "delay": 5}, {"expires": "5"}],
    ids=str,
)  # fmt: skip
def test_time_that_cannot_be_is_refused(doors: Doors, options: Any) -> None:
    queue = doors.queue()
    with pytest.raises((InvalidMessageError, ValueError, TypeError), match=r"expires|time zone"):
        queue.put(b"x", **options)
    assert queue.qsize() == 0


@BOTH
@pytest.mark.parametrize("end", ["close", "kill"])
def test_expired_item_is_a_dead_letter_on_request(doors: Doors, ordered: bool, end: str) -> None:
    queue = doors.queue(ordered=ordered, dead_letter_expired=True)
    receipt = queue.put(b"x", expires=10)
    queue.put(b"y")
    doors.advance(10)
    queue = doors.queue(ordered=ordered)  # keeps the choice
    task = queue.get(block=False)
    assert task.value == b"y"
    if end == "close":
        doors.restart()
    else:
        doors.crash()
    queue = doors.queue(ordered=ordered)
    doors.advance(61)
    assert doors.values(queue) == [b"y"]
    [letter] = doors.store.dead_letters("jobs")
    assert (letter.body, letter.unique_key, letter.reconsume_times) == (b"x", receipt.id, 0)
    assert letter.properties["dlq_reason"] == "expired"
    queue.dead_letters.replay()
    doors.settle()
    assert doors.values(queue) == [b"x"]  # begun by whoever replays it


def test_choice_of_dead_letters_is_taken_back(doors: Doors) -> None:
    doors.queue(dead_letter_expired=True)
    queue = doors.queue(dead_letter_expired=False)
    queue.put(b"x", expires=10)
    doors.advance(10)
    assert doors.values(queue) == []
    assert list(doors.store.dead_letters("jobs")) == []


def test_queue_without_expiring_items_keeps_the_compiled_path(doors: Doors) -> None:
    queue = doors.queue()
    queue.put_many([b"1", b"2", b"3"])
    route = doors.store.broker._pop._routes.require("jobs", "jobs")  # a connection has the server's
    assert route.pops == route.quick
    queue.put(b"4", expires=10)
    assert not doors.store.broker._pop._routes.require("jobs", "jobs").pops
