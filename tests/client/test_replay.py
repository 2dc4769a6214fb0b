"""Dead letters that are sent again come to the group that gave them up, whatever kind of group it is, and to no other
(delivery#send-back)."""

from __future__ import annotations

import queue as queues
import threading
from pathlib import Path
from typing import Literal

import pytest

import mqstore
from mqstore import Reject, RetryPolicy, SimulatedClock, Store, StoreConfig
from mqstore.broker.broker import Broker

LONG_S = 30.0


def in_topic(store: Store, topic: str) -> int:
    """How many messages were ever put into a topic: what any group that reads it gets."""
    return sum(store.offsets(*ref)[1] for ref in store.queues(topic))


def pop_all(broker: Broker, group: str, topic: str, *, order: bool = False) -> list[tuple[bytes, int]]:
    """(body, attempt) of all that the group gets now; acknowledged."""
    found = []
    while deliveries := broker.pop(group, topic, n=32, order=order):
        broker.ack(group, topic, [each.receipt for each in deliveries])
        found += [(bytes(each.message.body), each.attempt) for each in deliveries]
    return found


# -- groups that pop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [False, True])
def test_a_group_that_pops_gets_its_letter_and_no_other_group_does(store: Store, order: bool) -> None:
    broker = store.broker
    store.put("orders", b"poison")
    assert pop_all(broker, "audit", "orders", order=order) == [(b"poison", 1)]
    [delivery] = broker.pop("billing", "orders", order=order)
    broker.dead_letter("billing", "orders", delivery.receipt, "on the first attempt")

    assert store.dead_letters("billing").replay(dry_run=True).topics == {"orders": 1}
    assert store.dead_letters("billing").replay().topics == {"orders": 1}

    assert pop_all(broker, "billing", "orders", order=order) == [(b"poison", 1)]
    assert pop_all(broker, "audit", "orders", order=order) == []
    assert in_topic(store, "orders") == 1


@pytest.mark.parametrize("order", [False, True])
def test_all_groups_of_the_topic_get_it_when_asked_for(store: Store, order: bool) -> None:
    store.put("orders", b"poison")
    assert pop_all(store.broker, "audit", "orders", order=order) == [(b"poison", 1)]
    [delivery] = store.broker.pop("billing", "orders", order=order)
    store.broker.dead_letter("billing", "orders", delivery.receipt, "bad")

    assert store.dead_letters("billing").replay(all_groups=True).count == 1

    for group in ("audit", "billing"):
        assert pop_all(store.broker, group, "orders", order=order) == [(b"poison", 1)]


@pytest.mark.parametrize("order", [False, True])
def test_a_letter_that_fails_again_is_a_letter_again(tmp_path: Path, order: bool) -> None:
    clock = SimulatedClock()
    with mqstore.open(tmp_path / "mq", config=StoreConfig(clock=clock)) as store:
        broker = store.broker
        broker.groups.create("billing", retry_policy=RetryPolicy(2, [1]))
        store.put("orders", b"poison")
        letters = store.dead_letters("billing")
        for _ in range(3):
            for attempt in (1, 2):
                [delivery] = broker.pop("billing", "orders", order=order)
                assert (bytes(delivery.message.body), delivery.attempt) == (b"poison", attempt)
                broker.nack("billing", "orders", delivery.receipt)
                clock.advance(1_000)
                broker.run_once()
            assert broker.pop("billing", "orders", order=order) == []
            assert len(letters) == 1
            assert letters.replay().topics == {"orders": 1}
        assert pop_all(broker, "billing", "orders", order=order) == [(b"poison", 1)]


def test_letters_of_an_ordered_group_come_in_their_order_and_one_at_a_time(store: Store) -> None:
    broker = store.broker
    store.create_topic("orders", queues=1)
    for i in range(4):
        store.put("orders", b"%d" % i, message_group="user")
        [delivery] = broker.pop("billing", "orders", order=True)
        broker.dead_letter("billing", "orders", delivery.receipt, "bad")
    store.dead_letters("billing").replay()
    [first] = broker.pop("billing", "orders", order=True)
    assert first.message.body == b"0"
    assert broker.pop("billing", "orders", order=True) == [], "the first is not done"
    broker.ack("billing", "orders", first.receipt)
    assert pop_all(broker, "billing", "orders", order=True) == [(b"1", 1), (b"2", 1), (b"3", 1)]


# -- queue objects ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
def test_a_rejected_item_comes_back_to_its_queue(store: Store, ordered: bool) -> None:
    jobs = store.queue("jobs", ordered=ordered)
    jobs.put(b"poison")
    jobs.get().reject("bad")
    jobs.dead_letters.replay()
    assert (jobs.qsize(), jobs.empty()) == (1, False)
    task = jobs.get(timeout=LONG_S)
    assert (task.value, task.attempt) == (b"poison", 1)
    task.ack()
    assert jobs.join(LONG_S)
    assert in_topic(store, "jobs") == 1


@pytest.mark.parametrize("ordered", [False, True])
def test_who_waits_for_an_item_is_called_by_a_replay(store: Store, ordered: bool) -> None:
    jobs = store.queue("jobs", ordered=ordered)
    jobs.put(b"poison")
    jobs.get().reject("bad")
    ready = threading.Event()
    jobs._when_ready(ready.set)
    assert not ready.is_set()
    jobs.dead_letters.replay()
    assert ready.wait(LONG_S)
    assert jobs.get(block=False).value == b"poison"


# -- push consumers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("mode", ["queue", "pop"])
@pytest.mark.parametrize("running", [False, True], ids=["while it is stopped", "while it runs"])
def test_a_push_consumer_gets_its_letter_and_no_other_group_does(
    store: Store, mode: Literal["queue", "pop"], ordered: bool, running: bool
) -> None:
    got: queues.Queue[tuple[str, bytes, int]] = queues.Queue()

    def takes(message: mqstore.Message) -> None:
        got.put((message.topic, bytes(message.body), message.attempt))
        if not mended.is_set():
            raise Reject("on the first attempt")

    def consumer() -> mqstore.PushConsumer:
        found = store.push_consumer("billing", mode=mode, ordered=ordered)
        found.subscribe("orders", takes)
        return found

    mended = threading.Event()
    store.put("orders", b"poison")
    letters = store.dead_letters("billing")
    with consumer():
        assert got.get(timeout=LONG_S) == ("orders", b"poison", 1)
        while not len(letters):  # it is filed when the handler has returned
            store.broker.wait("%DLQ%billing", 0, 0, 0.1)
        if running:
            mended.set()
            assert letters.replay().count == 1
            assert got.get(timeout=LONG_S) == ("orders", b"poison", 1)
    if not running:
        mended.set()
        assert letters.replay().count == 1
        with consumer():
            assert got.get(timeout=LONG_S) == ("orders", b"poison", 1)
    assert (len(letters), in_topic(store, "orders"), got.qsize()) == (0, 1, 0)
