"""Receipts of `Queue.put`, items by key, and items that expire before they are first delivered, by each door."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import mqstore
from mqstore import RetryPolicy
from tests.client.doors import Doors
from tests.client.popsupport import BOTH


@pytest.mark.parametrize("options", [{}, {"maxsize": 100}], ids=["unlimited", "limited"])
def test_each_put_returns_the_receipt_of_its_item(doors: Doors, options: Any) -> None:
    queue = doors.queue(**options)
    receipts = [
        queue.put(b"0"),
        queue.put(b"1", tag="t", properties={"by": "web"}),
        queue.put_nowait(b"2", key=("k", "l")),
        *queue.put_many([b"3", b"4"]),
    ]
    assert [receipt.offset for receipt in receipts] == [0, 1, 2, 3, 4]
    messages = [task.message for task in queue.get_many(5)]
    assert [message.unique_key for message in messages] == [receipt.id for receipt in receipts]
    assert [message.tag for message in messages] == [None, "t", None, None, None]
    assert [message.keys for message in messages] == [(), (), ("k", "l"), (), ()]
    assert [message.properties for message in messages] == [{}, {"by": "web"}, {}, {}, {}]


def test_id_of_a_delayed_item_is_that_of_its_delivery(doors: Doors) -> None:
    queue = doors.queue()
    receipt = queue.put(b"later", delay=5)
    doors.advance(6)
    task = queue.get(block=False)
    assert (task.message.unique_key, task.attempt) == (receipt.id, 1)


# -- by key ------------------------------------------------------------------------------------------------------------


def test_items_of_a_key_are_found_in_each_state(doors: Doors) -> None:
    queue, other = doors.queue(codec=mqstore.TEXT, retry=RetryPolicy(2, [5])), doors.queue("other")
    for value in ("done", "dead", "retry", "leased", "ready", "delayed"):
        queue.put(value, key=["k", value], delay=60 if value == "delayed" else None)
    queue.put("else", key="k2")
    other.put(b"ready", key="k")
    tasks = queue.get_many(4)
    tasks[0].ack()
    tasks[1].reject("no")
    tasks[2].nack(60)
    found = {item.value: item for item in queue.find("k")}
    assert {value: item.state for value, item in found.items()} == {
        value: value for value in ("dead", "retry", "leased", "ready", "delayed")
    }
    for value, item in found.items():
        assert [each.id for each in queue.find(value)] == [item.id]
        assert queue.cancel(item) is (value in ("retry", "ready", "delayed"))
    assert {item.value for item in queue.find("k")} == {"dead", "leased"}
    assert queue.find("nothing") == []


@BOTH
def test_find_costs_the_same_after_a_long_past(doors: Doors, ordered: bool) -> None:
    queue = doors.queue(ordered=ordered)
    for value in range(200):
        queue.put(b"%d" % value, key="k")
    assert len(queue.find("k")) == 200
    assert len(doors.values(queue)) == 200
    receipt = queue.put(b"new", key="k")
    log = doors.store.broker._parts.store
    reads, at = [], log.at
    log.at = lambda offset: reads.append(offset) or at(offset)
    assert [item.id for item in queue.find("k")] == [receipt.id]
    assert len(reads) <= 4


# -- expiry ------------------------------------------------------------------------------------------------------------


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
    queue.put(b"x", expires=10, properties={"mine": "1"})
    queue.get(block=False).nack(20)
    doors.advance(21)
    task = queue.get(block=False)
    assert (task.value, task.attempt) == (b"x", 2)
    assert dict(task.message.properties) == {"mine": "1"}
    assert "mqstore_expires_ms" in task.message.system_properties


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
    assert route.pops == (route.settled is not None)
    queue.put(b"4", expires=10)
    assert not doors.store.broker._pop._routes.require("jobs", "jobs").pops
