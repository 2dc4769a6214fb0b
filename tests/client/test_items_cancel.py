"""Cancelled items, in each state, by each door, over restarts and kills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqstore import RetryPolicy
from mqstore.errors import InvalidReceiptError
from tests.client.doors import DOORS, Doors, opened

BOTH = pytest.mark.parametrize("ordered", [False, True], ids=["standard", "ordered"])
_RETRY = RetryPolicy(9, [5])


@pytest.fixture(params=DOORS)
def doors(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    with opened(tmp_path / "store", request.param, monkeypatch) as doors:
        yield doors


def _ready(doors: Doors, queue: Any) -> Any:
    return queue.put(b"x")


def _prefetched(doors: Doors, queue: Any) -> Any:
    first, *_, receipt = [queue.put(value) for value in (b"first", b"second", b"x")]
    task = queue.get(block=False)
    assert task.message.unique_key == first.id
    task.ack()
    return receipt


def _delayed(doors: Doors, queue: Any) -> Any:
    return queue.put(b"x", delay=5)


def _delivered_late(doors: Doors, queue: Any) -> Any:
    receipt = queue.put(b"x", delay=5)
    doors.advance(6)
    return receipt


def _failed(doors: Doors, queue: Any) -> Any:
    receipt = queue.put(b"x")
    queue.get(block=False).nack()
    return receipt


def _failed_late(doors: Doors, queue: Any) -> Any:
    receipt = _delivered_late(doors, queue)
    queue.get(block=False).nack()
    return receipt


def _retried(doors: Doors, queue: Any) -> Any:
    receipt = _failed(doors, queue)
    doors.advance(6)
    return receipt


def _failed_twice(doors: Doors, queue: Any) -> Any:
    receipt = _retried(doors, queue)
    task = queue.get(block=False)
    assert task.attempt == 2
    task.nack()
    return receipt


_WAITING = {
    "ready": _ready,
    "prefetched": _prefetched,
    "delayed": _delayed,
    "delivered late": _delivered_late,
    "failed": _failed,
    "failed late": _failed_late,
    "ready again": _retried,
    "failed twice": _failed_twice,
}


@BOTH
@pytest.mark.parametrize("then", ["go on", "close", "crash"])
@pytest.mark.parametrize("make", _WAITING.values(), ids=_WAITING)
def test_cancelled_item_is_never_delivered(doors: Doors, ordered: bool, make: Callable[..., Any], then: str) -> None:
    queue = doors.queue(ordered=ordered, retry=_RETRY)
    receipt = make(doors, queue)
    queue.put(b"after")
    size = queue.qsize()
    assert queue.cancel(receipt) is True
    assert queue.qsize() == size - (make is not _delayed)
    if then == "close":
        doors.restart()
    elif then == "crash":
        doors.crash()
    queue = doors.queue(ordered=ordered)
    doors.advance(61)
    assert doors.values(queue) == [*([b"second"] if make is _prefetched else []), b"after"]
    doors.advance(61)
    assert (doors.values(queue), queue.qsize()) == ([], 0)


@BOTH
@pytest.mark.parametrize("settle", ["hold", "ack", "reject"])
def test_leased_done_or_dead_item_is_not_cancelled(doors: Doors, ordered: bool, settle: str) -> None:
    queue = doors.queue(ordered=ordered)
    receipt = queue.put(b"x")
    task = queue.get(block=False)
    if settle != "hold":
        getattr(task, settle)()
    assert queue.cancel(receipt) is False
    assert len(list(doors.store.dead_letters("jobs"))) == (settle == "reject")
    if settle == "hold":
        task.nack(0)
        doors.settle()
        assert doors.values(queue) == [b"x"]


@BOTH
def test_any_of_many_may_be_cancelled(doors: Doors, ordered: bool) -> None:
    queue = doors.queue(ordered=ordered)
    receipts = queue.put_many([str(value).encode() for value in range(100)])
    cancelled = {0, 1, 7, 50, 98, 99}
    assert all(queue.cancel(receipts[value].id) for value in sorted(cancelled))
    assert queue.qsize() == 94
    task = queue.get(block=False)  # prefetches the others
    assert task.value == b"2"
    assert queue.cancel(receipts[3])
    task.ack()
    assert doors.values(queue) == [str(value).encode() for value in range(4, 100) if value not in cancelled]


def test_cancelled_twice_or_unknown(doors: Doors) -> None:
    queue, other = doors.queue(), doors.queue("other")
    ready, delayed, foreign = queue.put(b"x"), queue.put(b"y", delay=5), other.put(b"z")
    assert queue.cancel(ready)
    assert not queue.cancel(ready)
    assert queue.cancel(delayed)
    assert not queue.cancel(foreign)
    assert not queue.cancel("no such item")
    for wrong in (None, 7, b"x"):
        with pytest.raises(InvalidReceiptError, match="receipt"):
            queue.cancel(wrong)
    doors.advance(6)
    assert (doors.values(queue), doors.values(other)) == ([], [b"z"])


def test_cancelled_item_makes_room_and_ends_a_join(doors: Doors) -> None:
    queue = doors.queue(maxsize=2)
    receipts = [queue.put(b"1"), queue.put(b"2")]
    assert queue.full()
    assert queue.cancel(receipts[0])
    late = [queue.put(b"3", delay=5), queue.put(b"4", delay=9)]
    assert queue.cancel(receipts[1])
    assert queue.cancel(late[1])
    assert queue.join(timeout=0) is False
    assert queue.cancel(late[0])
    assert queue.join(timeout=0) is True
    assert doors.values(queue) == []


@BOTH
def test_reset_to_an_earlier_offset_keeps_what_is_cancelled(doors: Doors, ordered: bool) -> None:
    queue = doors.queue(ordered=ordered)
    receipts = queue.put_many([b"0", b"1", b"2"])
    assert queue.cancel(receipts[2])
    task = queue.get(block=False)
    assert task.value == b"0"
    doors.store.broker.reset("jobs", "jobs", 0, 0)
    assert doors.values(queue) == [b"0", b"1"]


@BOTH
def test_compaction_of_the_log_keeps_what_is_cancelled(doors: Doors, ordered: bool) -> None:
    queue = doors.queue(ordered=ordered, retry=_RETRY)
    first = queue.put(b"first")
    receipts = queue.put_many([b"%d" % value for value in range(20)])
    task = queue.get(block=False)
    assert (task.message.unique_key, queue.cancel(receipts[3])) == (first.id, True)
    keeper = doors.store.broker._pop._keeper
    keeper._rewrite_bound = lambda end: end  # all records are far away
    keeper._advance()
    keeper._advance()
    doors.crash()
    doors.advance(61)
    queue = doors.queue(ordered=ordered)
    assert sorted(doors.values(queue)) == sorted([b"first", *(b"%d" % value for value in range(20) if value != 3)])


@BOTH
def test_cancelled_items_are_neither_listed_nor_purged(doors: Doors, ordered: bool) -> None:
    queue = doors.queue(ordered=ordered)
    receipts = queue.put_many([b"0", b"1", b"2", b"3"])
    assert queue.cancel(receipts[0])
    assert queue.cancel(receipts[2])
    assert queue.counts()["ready"] == 2
    assert [item.value for item in queue.peek(9)] == [b"1", b"3"]
    assert queue.purge("ready") == 2
    assert (queue.qsize(), doors.values(queue)) == (0, [])


def test_crash_keeps_what_is_cancelled_behind_the_last_delivery(doors: Doors) -> None:
    """Only memory knows that the group has passed it."""
    queue, values = doors.queue(), [b"%d" % value for value in range(33)]
    receipts = queue.put_many(values)
    assert queue.cancel(receipts[32])
    tasks = [queue.get(block=False) for _ in range(32)]
    doors.store.broker.sync()
    assert doors.values(queue) == []
    doors.store.broker._pop.persist()
    doors.store.broker.save_offsets()
    doors.crash()
    doors.advance(61)
    assert sorted(doors.values(doors.queue())) == sorted(task.value for task in tasks)
