"""Priorities of a queue, and tasks that are given back. `tests/crash/test_items_kill.py` has random runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
import mqstore.aio
from mqstore import Queue, RetryPolicy
from mqstore.errors import ConfigError, ReceiptExpiredError
from tests.client import popsupport
from tests.client.doors import Doors
from tests.client.support import ended, in_thread, parked, until


class Bench(popsupport.Bench):
    def queue(self, **options: Any) -> Queue:
        return self.store.queue("jobs", codec=mqstore.TEXT, **options)

    def restart(self, how: str) -> None:
        (self.kill if how == "kill" else self.store.close)()
        self.open()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "store")
    yield bench
    bench.store.close()


def taken(queue: Queue) -> list[tuple[str, int]]:
    """Return (item, attempt) of all that is ready, and acknowledge it."""
    found = []
    for task in queue:
        with task:
            found.append((task.value, task.attempt))
    return found


# -- priorities --------------------------------------------------------------------------------------------------------


def test_items_come_by_priority_and_then_in_order(doors: Doors) -> None:
    queue = doors.queue(codec=mqstore.TEXT)
    for item, priority in (("d", 0), ("b", 5), ("a", 9), ("c", 5), ("e", None)):
        queue.put(item, priority=priority)
    queue.put_many("fg")
    assert [task.value for task in queue.get_many(2)] == ["a", "b"]
    assert doors.values(queue) == list("cdefg")


def test_first_priority_overtakes_what_is_there(doors: Doors) -> None:
    queue = doors.queue(codec=mqstore.TEXT)
    queue.put_many("bc")
    leased = queue.get(block=False)
    queue.put("a", priority=1)
    assert doors.values(queue) == ["a", "c"]
    leased.ack()
    assert queue.qsize() == 0


def test_a_priority_that_is_none_is_refused_and_nothing_is_stored(bench: Bench) -> None:
    queue = bench.queue()
    with pytest.raises(ConfigError, match="priority is 0 to 9"):
        queue.put_many("x", priority=10)
    assert queue.empty()
    assert bench.store.broker.topics.require("jobs").read_queues == 1


def test_an_ordered_queue_refuses_priorities(bench: Bench) -> None:
    queue = bench.queue(ordered=True)
    queue.put("a", priority=0)
    for put in (queue.put, queue.put_many):
        with pytest.raises(ConfigError, match="queue 'jobs' is ordered"):
            put("b", priority=1)
    assert taken(queue) == [("a", 1)]


def test_a_topic_whose_queues_are_no_priorities_is_refused(bench: Bench) -> None:
    bench.store.create_topic("jobs", queues=4)
    queue = bench.queue()
    with pytest.raises(ConfigError, match="'jobs' has 4 queues that are no priorities"):
        queue.put("a", priority=1)
    bench.broker.topics.alter("jobs", message_type="PRIORITY")
    for priority in range(10):
        queue.put(str(priority), priority=priority)
    # As in RocketMQ 5.4 the last queue has all priorities above.
    assert [value for value, _ in taken(queue)] == list("3456789210")


def test_topic_that_was_created_again_has_no_priorities(bench: Bench) -> None:
    queue = bench.queue()
    for item in "ab":
        queue.put(item, priority=9)
    bench.broker.topics.delete("jobs", force=True)
    bench.store.create_topic("jobs", queues=10)
    with pytest.raises(ConfigError, match="'jobs' has 10 queues that are no priorities"):
        queue.put("c", priority=9)


def test_items_that_no_longer_exist_leave_the_topic_its_priorities(bench: Bench) -> None:
    queue = bench.queue()
    queue.put("a", priority=9)
    assert taken(queue) == [("a", 1)]
    bench.restart("close")
    queue = bench.queue()
    queue.put("low")
    queue.put("high", priority=1)
    assert [value for value, _ in taken(queue)] == ["high", "low"]


def test_retries_keep_their_priority_and_precede_lower_items(bench: Bench) -> None:
    queue = bench.queue()
    queue.put("low")
    queue.get().nack(delay=0)  # its retry topic has one queue now
    bench.settle()
    queue.put("high", priority=9)
    queue.get().nack(delay=5)
    queue.put("middle", priority=5)
    bench.advance(5)
    assert taken(queue) == [("high", 2), ("middle", 1), ("low", 2)]


def test_a_delayed_item_keeps_its_priority(bench: Bench) -> None:
    queue = bench.queue()
    queue.put("later", delay=5, priority=7)
    queue.put("now", priority=6)
    bench.advance(6)
    queue.put("new", priority=7)
    assert [value for value, _ in taken(queue)] == ["later", "new", "now"]


def test_peek_shows_the_highest_first(bench: Bench) -> None:
    queue = bench.queue()
    queue.put("low")
    queue.put("high", priority=9)
    queue.get().nack(delay=0)
    bench.settle()
    queue.put("middle", priority=5)
    assert [(item.value, item.state) for item in queue.peek(9)] == [
        (each, "ready") for each in ("high", "middle", "low")
    ]


def test_all_items_count_before_anybody_has_looked(bench: Bench) -> None:
    queue = bench.queue(maxsize=3)
    for priority in (0, 4, 9):
        queue.put(str(priority), priority=priority)
    assert (queue.qsize(), queue.full()) == (3, True)
    with pytest.raises(mqstore.QueueFull):
        queue.put("x", block=False, priority=9)
    assert not queue.join(timeout=0)
    assert len(taken(queue)) == 3
    assert queue.join(timeout=0)


def test_a_waiting_get_is_woken_by_an_item_of_any_priority(bench: Bench) -> None:
    queue = bench.queue()
    for priority in (9, 0, 4):
        thread, found = in_thread(queue.get)
        until(lambda: parked(bench.broker))
        queue.put("x", priority=priority)
        bench.settle()
        assert ended(thread, found).value == "x"


def test_after_a_kill_the_first_priority_is_kept(bench: Bench) -> None:
    queue = bench.queue()
    queue.put("low")
    queue.put("high", priority=9)
    bench.restart("kill")
    queue = bench.queue()
    assert queue.qsize() == 2
    assert [value for value, _ in taken(queue)] == ["high", "low"]


# -- given back --------------------------------------------------------------------------------------------------------


@popsupport.BOTH
@pytest.mark.parametrize("end", ["runs on", "close", "kill"])
def test_released_task_returns_after_its_delay_with_the_same_attempt(bench: Bench, ordered: bool, end: str) -> None:
    queue = bench.queue(ordered=ordered)
    queue.put("a")
    queue.get().nack(delay=1)
    bench.advance(1)
    queue.get().release(delay=60)
    bench.advance(59)
    if end != "runs on":
        bench.restart(end)
        queue = bench.queue(ordered=ordered)
    bench.settle()
    assert taken(queue) == []
    assert queue.qsize() == 1
    bench.advance(1)
    assert taken(queue) == [("a", 2)]


@popsupport.BOTH
def test_a_task_is_released_any_number_of_times(bench: Bench, ordered: bool) -> None:
    queue = bench.queue(ordered=ordered, retry=RetryPolicy(1))
    queue.put("a")
    for delay in (0, 3, 0, 12 * 3600):
        queue.get().release(delay=delay)
        bench.clock.advance(1000 * delay)
        bench.settle()
    assert taken(queue) == [("a", 1)]
    assert len(queue.dead_letters) == 0


def test_an_ordered_queue_holds_later_items_until_a_released_one_returns(bench: Bench) -> None:
    queue = bench.queue(ordered=True)
    queue.put_many("ab")
    queue.get().release(delay=5)
    assert taken(queue) == []
    bench.advance(5)
    assert taken(queue) == [("a", 1), ("b", 1)]


@popsupport.BOTH
def test_release_is_a_verb_like_the_others(bench: Bench, ordered: bool) -> None:
    queue = bench.queue(ordered=ordered)
    queue.put("a")
    task = queue.get()
    for delay in (-1, 12 * 3600 + 1, "soon"):
        with pytest.raises(ConfigError, match="delay"):
            task.release(delay=delay)  # type: ignore[arg-type]
    assert not task.settled
    task.release(delay=1)
    task.release()  # to repeat it does nothing
    for verb in (task.ack, task.nack, task.reject):
        with pytest.raises(ReceiptExpiredError, match="by release"):
            verb()
    bench.advance(1)
    again = queue.get()
    with again:
        again.release(delay=2)
    assert taken(queue) == []


def test_a_task_whose_lease_has_ended_cannot_be_released(bench: Bench) -> None:
    queue = bench.queue(visibility=1)
    queue.put("a")
    for delay in (0, 5):
        task = queue.get()
        bench.advance(1)
        with pytest.raises(ReceiptExpiredError):
            task.release(delay=delay)
    assert [value for value, _ in taken(queue)] == ["a"]


def test_a_delivery_of_a_simple_consumer_is_released_likewise(bench: Bench) -> None:
    consumer = bench.consumer(group="g")
    bench.put("a")
    [delivery] = consumer.receive(wait=0)
    delivery.release(delay=2)
    bench.advance(1)
    assert consumer.receive(wait=0) == []
    bench.advance(1)
    assert [each.attempt for each in consumer.receive(wait=0)] == [1]


# -- progress ----------------------------------------------------------------------------------------------------------


def shown(queue: Queue) -> list[tuple[str, str, str, int]]:
    """Return (item, state, progress, attempt) of all items."""
    return [(each.value, each.state, each.progress, each.attempt) for each in queue.items()]


@popsupport.BOTH
def test_progress_is_shown_and_extends_the_lease(bench: Bench, ordered: bool) -> None:
    queue = bench.queue(ordered=ordered, visibility=30)
    queue.put("a")
    task = queue.get()
    for text in ("1 %", "42 %", ""):
        bench.advance(20)
        task.progress(text)
        assert shown(queue) == [("a", "leased", text, 1)]
    bench.advance(29)
    assert taken(queue) == []
    bench.advance(1)
    assert taken(queue) == [("a", 2)]


@popsupport.BOTH
@pytest.mark.parametrize("end", ["release", "nack", "expiry"])
def test_progress_ends_with_its_lease(bench: Bench, ordered: bool, end: str) -> None:
    queue = bench.queue(ordered=ordered, visibility=1)
    queue.put("a")
    task = queue.get()
    task.progress("42 %")
    if end != "expiry":
        getattr(task, end)(delay=1)
        assert [progress for _, _, progress, _ in shown(queue)] == [""]
        with pytest.raises(ReceiptExpiredError):
            task.progress("43 %")
    bench.advance(1)
    queue.get()
    assert shown(queue) == [("a", "leased", "", 1 if end == "release" else 2)]


@pytest.mark.parametrize("text", ["x" * 201, "two\nlines", "\x1b[2J", b"42", 42, None])
def test_progress_that_no_screen_should_show_is_refused(bench: Bench, text: Any) -> None:
    queue = bench.queue()
    queue.put("a")
    with pytest.raises(ConfigError, match="progress is a text of at most 200 printable characters"):
        queue.get().progress(text)


@popsupport.BOTH
def test_released_item_is_delayed_until_it_returns(bench: Bench, ordered: bool) -> None:
    queue = bench.queue(ordered=ordered)
    queue.put("a")
    task = queue.get()
    task.release(delay=5)
    assert shown(queue) == [("a", "delayed", "", 1)]
    assert {state: count for state, count in queue.counts().items() if count} == {"delayed": 1}
    assert [len(list(queue.items(state))) for state in ("delayed", "retry", "leased")] == [1, 0, 0]
    bench.advance(5)
    assert shown(queue) == [("a", "ready", "", 1)]
    queue.get().release(delay=5)
    assert [queue.purge(state) for state in ("leased", "retry", "delayed")] == [0, 0, 1]
    bench.advance(5)
    assert taken(queue) == []
