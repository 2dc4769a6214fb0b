"""Items with a unique name, by each door, over restarts and kills."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import RetryPolicy, Store
from mqstore.errors import InvalidMessageError
from tests.client.doors import DOORS, Doors, opened

BOTH = pytest.mark.parametrize("ordered", [False, True], ids=["standard", "ordered"])
_RETRY = RetryPolicy(3, [5])


@pytest.fixture(params=DOORS)
def doors(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    with opened(tmp_path / "store", request.param, monkeypatch) as doors:
        yield doors


def _ready(doors: Doors, queue: Any) -> Any:
    return queue.put(b"x", unique="n")


def _delayed(doors: Doors, queue: Any) -> Any:
    return queue.put(b"x", unique="n", delay=600)


def _delivered_late(doors: Doors, queue: Any) -> Any:
    receipt = queue.put(b"x", unique="n", delay=5)
    doors.advance(6)
    return receipt


def _leased(doors: Doors, queue: Any) -> Any:
    receipt = _ready(doors, queue)
    doors.task = queue.get(block=False)
    return receipt


def _failed(doors: Doors, queue: Any) -> Any:
    receipt = _leased(doors, queue)
    doors.task.nack()
    return receipt


def _retried(doors: Doors, queue: Any) -> Any:
    receipt = _failed(doors, queue)
    doors.advance(6)
    return receipt


def _leased_again(doors: Doors, queue: Any) -> Any:
    receipt = _retried(doors, queue)
    doors.task = queue.get(block=False)
    assert doors.task.attempt == 2
    return receipt


def _failed_twice(doors: Doors, queue: Any) -> Any:
    receipt = _leased_again(doors, queue)
    doors.task.nack()
    return receipt


_ALIVE = (_ready, _delayed, _delivered_late, _leased, _failed, _retried, _leased_again, _failed_twice)


@BOTH
@pytest.mark.parametrize("then", ["go on", "close", "crash"])
@pytest.mark.parametrize("make", _ALIVE, ids=lambda make: make.__name__)
def test_put_of_a_name_in_use_returns_the_first_receipt(doors: Doors, ordered: bool, make: Any, then: str) -> None:
    queue = doors.queue(ordered=ordered, retry=_RETRY)
    first = make(doors, queue)
    size = queue.qsize()
    if then == "close":
        doors.restart()
    elif then == "crash":
        doors.crash()
    queue = doors.queue(ordered=ordered)
    assert [queue.put(b"y", unique="n").id for _ in range(2)] == [first.id] * 2
    assert queue.qsize() == size
    assert queue.put(b"z", unique="m").id != first.id
    doors.advance(601)
    doors.advance(61)
    assert sorted(doors.values(queue)) == [b"x", b"z"]


def _acked(queue: Any, receipt: Any) -> None:
    queue.get(block=False).ack()


def _rejected(queue: Any, receipt: Any) -> None:
    queue.get(block=False).reject("no")


def _cancelled(queue: Any, receipt: Any) -> None:
    assert queue.cancel(receipt)


@BOTH
@pytest.mark.parametrize("then", ["go on", "close", "crash"])
@pytest.mark.parametrize("end", [_acked, _rejected, _cancelled], ids=lambda end: end.__name__)
def test_name_is_free_once_its_item_is_done(doors: Doors, ordered: bool, end: Any, then: str) -> None:
    queue = doors.queue(ordered=ordered)
    for round_ in range(3):
        receipt = queue.put(b"%d" % round_, unique="n")
        assert queue.qsize() == 1
        end(queue, receipt)
        assert queue.qsize() == 0
        if then == "close":
            doors.restart()
        elif then == "crash":
            doors.crash()
        queue = doors.queue(ordered=ordered)


def test_expired_and_recalled_names_are_free(doors: Doors) -> None:
    queue = doors.queue()
    first = queue.put(b"x", unique="n", expires=5)
    doors.advance(5)
    assert doors.values(queue) == []
    second = queue.put(b"y", unique="n", delay=60)
    assert queue.cancel(second)
    third = queue.put(b"z", unique="n")
    assert len({first.id, second.id, third.id}) == 3
    doors.advance(61)
    assert doors.values(queue) == [b"z"]


@pytest.mark.parametrize("done", [b"old", b"new"])
def test_name_is_taken_while_either_of_two_items_waits(doors: Doors, done: bytes) -> None:
    """Story: a dead letter that is replayed may share its name with a later item."""
    queue = doors.queue()
    old = queue.put(b"old", unique="n")
    queue.get(block=False).reject("no")
    new = queue.put(b"new", unique="n")
    queue.dead_letters.replay()
    doors.settle()
    tasks = {task.value: task for task in queue.get_many(2)}
    tasks[done].ack()
    assert queue.put(b"third", unique="n").id == (new if done == b"old" else old).id
    assert queue.qsize() == 1


def test_queues_do_not_share_names(doors: Doors) -> None:
    one, two = doors.queue("one"), doors.queue("two")
    for delay in (None, 5):
        assert one.put(b"x", unique=f"n{delay}", delay=delay).id != two.put(b"x", unique=f"n{delay}", delay=delay).id
    doors.advance(6)
    assert (doors.values(one), doors.values(two)) == ([b"x"] * 2, [b"x"] * 2)


def test_name_counts_for_a_time_instead(doors: Doors) -> None:
    queue = doors.queue()
    first = queue.put(b"0", unique="n", unique_for=3600)
    assert queue.put(b"1", unique="n", unique_for=timedelta(hours=1)).id == first.id
    assert doors.values(queue) == [b"0"]
    doors.advance(3599)
    doors.restart()
    queue = doors.queue()
    assert queue.put(b"2", unique="n", unique_for=3600).id == first.id
    assert queue.qsize() == 0
    doors.advance(1)
    second = queue.put(b"3", unique="n", unique_for=3600, delay=7200)
    assert second.id != first.id
    doors.advance(3600)
    third = queue.put(b"4", unique="n", unique_for=3600)  # although the second one still waits
    assert third.id != second.id
    doors.advance(3601)
    assert doors.values(queue) == [b"4", b"3"]


@pytest.mark.parametrize("name", ["report 7", "ünïq", "a\tb\nc", "x" * 4000, "%", "50%20;"], ids=repr)
def test_any_text_is_a_name(doors: Doors, name: str) -> None:
    queue = doors.queue()
    first = queue.put(b"x", unique=name, key="k")
    assert queue.put(b"y", unique=name).id == first.id
    assert queue.put(b"z", unique=name + "!").id != first.id
    assert queue.put(b"z", key=f"unique:{name}x".replace(" ", "").strip().split()[0]).id != first.id
    assert queue.qsize() == 3


_BAD: tuple[Any, ...] = ({"unique": ""}, {"unique": " "}, {"unique": 7}, {"unique_for": 5})


@pytest.mark.parametrize("options", [*_BAD, {"unique": "n", "unique_for": -1}], ids=str)
def test_bad_name_is_refused(doors: Doors, options: Any) -> None:
    queue = doors.queue()
    with pytest.raises((InvalidMessageError, mqstore.errors.ConfigError), match="unique"):
        queue.put(b"x", **options)
    assert queue.qsize() == 0


def test_first_one_of_many_threads_is_stored(store: Store) -> None:
    queue = store.queue("jobs")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: queue.put(b"%d" % i, unique=f"n{i % 5}").id, range(200)))
    assert len(set(found)) == 5
    assert queue.qsize() == 5


def test_retention_keeps_names_for_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the log was deleted after a minute, and with it the name that counts for an hour."""
    config: Any = {"segment_bytes": 4096, "retention": mqstore.Retention(age=60)}
    with opened(tmp_path / "store", "here", monkeypatch, **config) as doors:
        queue, other = doors.queue(), doors.queue("other")
        firsts = [queue.put(b"x", unique="n", unique_for=3600), queue.put(b"x", unique="d", unique_for=3600, delay=1)]
        doors.advance(2)
        assert len(doors.values(queue)) == 2

        def a_while() -> int:
            for _ in range(4):
                other.put_many([bytes(100)] * 50)
                doors.values(other)
                doors.advance(300)
            return doors.broker.min_offset("other", 0)

        assert a_while() == 0
        doors.restart()
        queue, other = doors.queue(), doors.queue("other")
        assert a_while() == 0
        assert [queue.put(b"y", unique=name, unique_for=3600).id for name in "nd"] == [first.id for first in firsts]
        pin = doors.broker.stats().oldest_pin
        assert pin is not None
        assert "unique" in pin.why
        for _ in range(5):
            a_while()
        assert doors.broker.min_offset("other", 0) > 0
        assert queue.put(b"z", unique="n", unique_for=3600).id != firsts[0].id


def test_index_that_lost_entries_is_named(doors: Doors) -> None:
    queue = doors.queue()
    queue.put(b"x", unique="n")
    doors.store.broker._parts.store.index.dropped_entries = 1
    with pytest.raises(mqstore.errors.CorruptStoreError, match="--rebuild index"):
        queue.put(b"y", unique="m")
    assert queue.qsize() == 1
