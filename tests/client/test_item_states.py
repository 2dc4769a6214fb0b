"""Items in each state: a unique name is taken while its item is not done, and an item that nobody has is cancelled. By
each door, over restarts and kills."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import RetryPolicy, Store
from mqstore.errors import InvalidReceiptError
from tests.client.doors import Doors, opened
from tests.client.popsupport import BOTH

_RETRY = RetryPolicy(9, [5])
_THEN = pytest.mark.parametrize("then", ["continue", "restart", "crash"])
_WAITING = {
    "ready": "put",
    "delayed": "delay",
    "delivered late": "delay wait",
    "failed": "put get nack",
    "failed late": "delay wait get nack",
    "ready again": "put get nack wait",
    "failed twice": "put get nack wait get nack",
}
"""State of an item, and the steps to it."""
_LEASED = {"leased": "put get", "leased again": "put get nack wait get"}


def _make(doors: Doors, queue: Any, steps: str, wait_s: int = 6, **options: Any) -> Any:
    """Put an item, do the other steps, and return its receipt."""
    receipt = queue.put(b"x", delay=5 if steps.startswith("delay") else None, **options)
    for step in steps.split()[1:]:
        if step == "get":
            task = queue.get(block=False)
        elif step == "nack":
            task.nack()
        else:
            doors.advance(wait_s)
    return receipt


def _reopened(doors: Doors, then: str, ordered: bool) -> Any:
    if then != "continue":
        getattr(doors, then)()
    return doors.queue(ordered=ordered)


# -- unique names ------------------------------------------------------------------------------------------------------


@BOTH
@_THEN
@pytest.mark.parametrize("state", _WAITING | _LEASED)
def test_put_of_a_name_in_use_returns_the_first_receipt(doors: Doors, ordered: bool, state: str, then: str) -> None:
    queue = doors.queue(ordered=ordered, retry=_RETRY)
    first = _make(doors, queue, (_WAITING | _LEASED)[state], unique="n")
    size = queue.qsize()
    queue = _reopened(doors, then, ordered)
    assert [queue.put(b"y", unique="n").id for _ in range(2)] == [first.id] * 2
    assert queue.qsize() == size
    assert queue.put(b"z", unique="m").id != first.id
    doors.advance(61)
    doors.advance(61)
    assert sorted(doors.values(queue)) == [b"x", b"z"]


@BOTH
@_THEN
@pytest.mark.parametrize("end", ["ack", "reject", "cancel"])
def test_name_is_free_once_its_item_is_done(doors: Doors, ordered: bool, end: str, then: str) -> None:
    queue = doors.queue(ordered=ordered)
    for round_ in range(3):
        receipt = queue.put(b"%d" % round_, unique="n")
        assert queue.qsize() == 1
        if end == "cancel":
            assert queue.cancel(receipt)
        else:
            getattr(queue.get(block=False), end)()
        assert queue.qsize() == 0
        queue = _reopened(doors, then, ordered)


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
    first = queue.put(b"0", unique="n", unique_for=60)
    assert queue.put(b"1", unique="n", unique_for=timedelta(minutes=1)).id == first.id
    assert doors.values(queue) == [b"0"]
    doors.advance(59)
    doors.restart()
    queue = doors.queue()
    assert queue.put(b"2", unique="n", unique_for=60).id == first.id
    assert queue.qsize() == 0
    doors.advance(1)
    second = queue.put(b"3", unique="n", unique_for=60, delay=120)
    assert second.id != first.id
    doors.advance(60)
    third = queue.put(b"4", unique="n", unique_for=60)  # although the second one still waits
    assert third.id != second.id
    doors.advance(61)
    assert doors.values(queue) == [b"4", b"3"]


@pytest.mark.parametrize("name", ["report 7", "ünïq", "a\tb\nc", "x" * 4000, "%", "50%20;"], ids=repr)
def test_any_text_is_a_name(doors: Doors, name: str) -> None:
    queue = doors.queue()
    first = queue.put(b"x", unique=name, key="k")
    assert queue.put(b"y", unique=name).id == first.id
    assert queue.put(b"z", unique=name + "!").id != first.id
    assert queue.put(b"z", key=f"unique:{name}x".replace(" ", "").strip().split()[0]).id != first.id
    assert queue.qsize() == 3


def test_first_one_of_many_threads_is_stored(store: Store) -> None:
    queue = store.queue("jobs")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: queue.put(b"%d" % i, unique=f"n{i % 5}").id, range(200)))
    assert len(set(found)) == 5
    assert queue.qsize() == 5


def test_processes_that_share_a_directory_agree(tmp_path: Path) -> None:
    with mqstore.open(tmp_path, shared=True) as one, mqstore.open(tmp_path, shared=True) as two:
        first, second = (store.queue("jobs", codec=mqstore.TEXT) for store in (one, two))
        assert first.put("a", unique="n").id == second.put("b", unique="n").id
        first.put("c", delay=60)
        assert second.purge("delayed") == 1
        assert first.purge() == 1
        assert set(second.counts().values()) == {0}
        assert second.put("b", unique="n").id == first.put("a", unique="n").id


def test_retention_keeps_names_for_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Story: the log was deleted after ten seconds, and with it the name that counts for ten minutes."""
    config: Any = {"segment_bytes": 4096, "retention": mqstore.Retention(age=10)}
    with opened(tmp_path / "store", "here", monkeypatch, **config) as doors:
        queue, other = doors.queue(), doors.queue("other")
        firsts = [queue.put(b"x", unique="n", unique_for=600), queue.put(b"x", unique="d", unique_for=600, delay=1)]
        doors.advance(2)
        assert len(doors.values(queue)) == 2

        def a_while() -> int:
            for _ in range(4):
                other.put_many([bytes(100)] * 50)
                doors.values(other)
                doors.advance(50)
            return doors.broker.min_offset("other", 0)

        assert a_while() == 0
        doors.restart()
        queue, other = doors.queue(), doors.queue("other")
        assert a_while() == 0
        assert [queue.put(b"y", unique=name, unique_for=600).id for name in "nd"] == [first.id for first in firsts]
        pin = doors.broker.stats().oldest_pin
        assert pin is not None
        assert "unique" in pin.why
        for _ in range(5):
            a_while()
        assert doors.broker.min_offset("other", 0) > 0
        assert queue.put(b"z", unique="n", unique_for=600).id != firsts[0].id


def test_index_that_lost_entries_is_named(doors: Doors) -> None:
    queue = doors.queue()
    queue.put(b"x", unique="n")
    doors.store.broker._parts.store.index.dropped_entries = 1
    with pytest.raises(mqstore.errors.CorruptStoreError, match="--rebuild index"):
        queue.put(b"y", unique="m")
    assert queue.qsize() == 1


# -- cancel ------------------------------------------------------------------------------------------------------------


@BOTH
@_THEN
@pytest.mark.parametrize("state", _WAITING)
def test_cancelled_item_is_never_delivered(doors: Doors, ordered: bool, state: str, then: str) -> None:
    queue = doors.queue(ordered=ordered, retry=_RETRY)
    receipt = _make(doors, queue, _WAITING[state], wait_s=5)  # the timer has not saved its progress yet
    queue.put(b"after")
    size = queue.qsize()
    assert queue.cancel(receipt) is True
    assert queue.qsize() == size - (state != "delayed")
    queue = _reopened(doors, then, ordered)
    doors.advance(61)
    assert doors.values(queue) == [b"after"]
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
