"""Priorities of a queue, and tasks that are given back, by each door. Random runs: tests/crash/test_items_kill.py."""

from __future__ import annotations

from typing import Any

import pytest

import mqstore
from mqstore.errors import ConfigError, ReceiptExpiredError
from tests.client.doors import Doors
from tests.client.popsupport import BOTH
from tests.client.support import ended, in_thread, parked, until


def texts(doors: Doors, **options: Any) -> Any:
    return doors.queue(codec=mqstore.TEXT, **options)


def taken(queue: Any) -> list[tuple[str, int]]:
    """Return (item, attempt) of all that is ready, and acknowledge it."""
    found = []
    while tasks := queue.get_many(1):
        tasks[0].ack()
        found.append((tasks[0].value, tasks[0].attempt))
    return found


# -- priorities --------------------------------------------------------------------------------------------------------


def test_items_come_by_priority_and_then_in_order(doors: Doors) -> None:
    queue = texts(doors)
    for item, priority in (("d", 0), ("b", 5), ("a", 9), ("c", 5), ("e", None)):
        queue.put(item, priority=priority)
    queue.put_many("fg")
    assert [task.value for task in queue.get_many(2)] == ["a", "b"]
    assert doors.values(queue) == list("cdefg")


def test_first_priority_overtakes_what_is_there(doors: Doors) -> None:
    queue = texts(doors)
    queue.put_many("bc")
    leased = queue.get(block=False)
    queue.put("a", priority=1)
    assert doors.values(queue) == ["a", "c"]
    leased.ack()
    assert queue.qsize() == 0


def test_a_priority_that_is_none_is_refused_and_nothing_is_stored(doors: Doors) -> None:
    queue = texts(doors)
    with pytest.raises(ConfigError, match="priority is 0 to 9"):
        queue.put_many("x", priority=10)
    assert queue.empty()
    assert doors.store.broker.topics.require("jobs").read_queues == 1


def test_an_ordered_queue_refuses_priorities(doors: Doors) -> None:
    queue = texts(doors, ordered=True)
    queue.put("a", priority=0)
    for put in (queue.put, queue.put_many):
        with pytest.raises(ConfigError, match="queue 'jobs' is ordered"):
            put("b", priority=1)
    assert taken(queue) == [("a", 1)]


def test_a_topic_whose_queues_are_no_priorities_is_refused(doors: Doors) -> None:
    doors.store.create_topic("jobs", queues=4)
    queue = texts(doors)
    with pytest.raises(ConfigError, match="'jobs' has 4 queues that are no priorities"):
        queue.put("a", priority=1)
    doors.broker.topics.alter("jobs", message_type="PRIORITY")
    for priority in range(10):
        queue.put(str(priority), priority=priority)
    # As in RocketMQ 5.4 the last queue has all priorities above.
    assert [value for value, _ in taken(queue)] == list("3456789210")


def test_topic_that_was_created_again_has_no_priorities(doors: Doors) -> None:
    queue = texts(doors)
    for item in "ab":
        queue.put(item, priority=9)
    doors.broker.topics.delete("jobs", force=True)
    doors.store.create_topic("jobs", queues=10)
    with pytest.raises(ConfigError, match="'jobs' has 10 queues that are no priorities"):
        queue.put("c", priority=9)


def test_items_that_no_longer_exist_leave_the_topic_its_priorities(doors: Doors) -> None:
    queue = texts(doors)
    queue.put("a", priority=9)
    assert taken(queue) == [("a", 1)]
    doors.restart()
    queue = texts(doors)
    queue.put("low")
    queue.put("high", priority=1)
    assert [value for value, _ in taken(queue)] == ["high", "low"]


def test_retries_keep_their_priority_and_precede_lower_items(doors: Doors) -> None:
    queue = texts(doors)
    queue.put("low")
    queue.get().nack(delay=0)  # its retry topic has one queue now
    doors.settle()
    queue.put("high", priority=9)
    queue.get().nack(delay=5)
    queue.put("middle", priority=5)
    doors.advance(5)
    assert taken(queue) == [("high", 2), ("middle", 1), ("low", 2)]


@pytest.mark.parametrize("failed_before", [False, True], ids=["first failure", "retries are there"])
@pytest.mark.parametrize("to_topic", [None, "jobs"], ids=["to its group", "to the topic"])
def test_replayed_dead_letters_keep_their_priority_and_order(
    doors: Doors, failed_before: bool, to_topic: str | None
) -> None:
    queue = texts(doors)
    if failed_before:  # so the retry topic has queues for priorities 0 to 4
        queue.put("earlier", priority=4)
        queue.get().nack(delay=0)
        doors.settle()
        queue.get().ack()
    for item, priority in (("a", 6), ("b", 3), ("c", 6), ("d", 0), ("e", 6), ("f", 3)):
        queue.put(item, priority=priority, delay=1)
    doors.advance(2)
    for task in queue.get_many(6):
        task.reject("no such host")
    doors.settle()
    doors.store.dead_letters("jobs").replay(to_topic=to_topic)
    queue.put("new", priority=5)
    assert [value for value, _ in taken(queue)] == ["a", "c", "e", "new", "b", "f", "d"]


def test_a_delayed_item_keeps_its_priority(doors: Doors) -> None:
    queue = texts(doors)
    queue.put("later", delay=5, priority=7)
    queue.put("now", priority=6)
    doors.advance(6)
    queue.put("new", priority=7)
    assert [value for value, _ in taken(queue)] == ["later", "new", "now"]


def test_peek_shows_the_highest_first(doors: Doors) -> None:
    queue = texts(doors)
    queue.put("low")
    queue.put("high", priority=9)
    queue.get().nack(delay=0)
    doors.settle()
    queue.put("middle", priority=5)
    assert [(item.value, item.state) for item in queue.peek(9)] == [
        (each, "ready") for each in ("high", "middle", "low")
    ]


def test_all_items_count_before_anybody_has_looked(doors: Doors) -> None:
    queue = texts(doors, maxsize=3)
    for priority in (0, 4, 9):
        queue.put(str(priority), priority=priority)
    assert (queue.qsize(), queue.full()) == (3, True)
    with pytest.raises(mqstore.QueueFull):
        queue.put("x", block=False, priority=9)
    assert not queue.join(timeout=0)
    assert len(taken(queue)) == 3
    assert queue.join(timeout=0)


def test_a_waiting_get_is_woken_by_an_item_of_any_priority(doors: Doors) -> None:
    queue = texts(doors)
    for priority in (9, 0, 4):
        thread, found = in_thread(queue.get)
        until(lambda: parked(doors.broker))
        queue.put("x", priority=priority)
        doors.settle()
        assert ended(thread, found).value == "x"


def test_after_a_kill_the_first_priority_is_kept(doors: Doors) -> None:
    queue = texts(doors)
    queue.put("low")
    queue.put("high", priority=9)
    doors.crash()
    queue = texts(doors)
    assert queue.qsize() == 2
    assert [value for value, _ in taken(queue)] == ["high", "low"]


# -- given back --------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("end", ["runs on", "restart", "crash"])
def test_released_task_returns_after_its_delay_with_the_same_attempt(doors: Doors, ordered: bool, end: str) -> None:
    queue = texts(doors, ordered=ordered)
    queue.put("a")
    queue.get().nack(delay=1)
    doors.advance(1)
    queue.get().release(delay=60)
    doors.advance(59)
    if end != "runs on":
        getattr(doors, end)()
        queue = texts(doors, ordered=ordered)
    doors.settle()
    assert taken(queue) == []
    assert queue.qsize() == 1
    doors.advance(1)
    assert taken(queue) == [("a", 2)]


def test_an_ordered_queue_holds_later_items_until_a_released_one_returns(doors: Doors) -> None:
    queue = texts(doors, ordered=True)
    queue.put_many("ab")
    queue.get().release(delay=5)
    assert taken(queue) == []
    doors.advance(5)
    assert taken(queue) == [("a", 1), ("b", 1)]


# -- progress ----------------------------------------------------------------------------------------------------------


def shown(queue: Any) -> list[tuple[str, str, str, int]]:
    """Return (item, state, progress, attempt) of all items."""
    return [(each.value, each.state, each.progress, each.attempt) for each in queue.items()]


@BOTH
def test_progress_is_shown_and_extends_the_lease(doors: Doors, ordered: bool) -> None:
    queue = texts(doors, ordered=ordered, visibility=30)
    queue.put("a")
    task = queue.get()
    for text in ("1 %", "42 %", ""):
        doors.advance(20)
        task.progress(text)
        assert shown(queue) == [("a", "leased", text, 1)]
    doors.advance(29)
    assert taken(queue) == []
    doors.advance(1)
    assert taken(queue) == [("a", 2)]


@BOTH
@pytest.mark.parametrize("end", ["release", "nack", "expiry"])
def test_progress_ends_with_its_lease(doors: Doors, ordered: bool, end: str) -> None:
    queue = texts(doors, ordered=ordered, visibility=1)
    queue.put("a")
    task = queue.get()
    task.progress("42 %")
    if end != "expiry":
        getattr(task, end)(delay=1)
        assert [progress for _, _, progress, _ in shown(queue)] == [""]
        with pytest.raises(ReceiptExpiredError):
            task.progress("43 %")
    doors.advance(1)
    queue.get()
    assert shown(queue) == [("a", "leased", "", 1 if end == "release" else 2)]


@pytest.mark.parametrize("text", ["x" * 201, "two\nlines", "\x1b[2J", b"42", 42, None])
def test_progress_that_no_screen_should_show_is_refused(doors: Doors, text: Any) -> None:
    queue = texts(doors)
    queue.put("a")
    with pytest.raises(ConfigError, match="progress is a text of at most 200 printable characters"):
        queue.get().progress(text)


@BOTH
def test_released_item_is_delayed_until_it_returns(doors: Doors, ordered: bool) -> None:
    queue = texts(doors, ordered=ordered)
    queue.put("a")
    task = queue.get()
    task.release(delay=5)
    assert shown(queue) == [("a", "delayed", "", 1)]
    assert {state: count for state, count in queue.counts().items() if count} == {"delayed": 1}
    assert [len(list(queue.items(state))) for state in ("delayed", "retry", "leased")] == [1, 0, 0]
    doors.advance(5)
    assert shown(queue) == [("a", "ready", "", 1)]
    queue.get().release(delay=5)
    assert [queue.purge(state) for state in ("leased", "retry", "delayed")] == [0, 0, 1]
    doors.advance(5)
    assert taken(queue) == []
