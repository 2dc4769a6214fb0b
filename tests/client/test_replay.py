"""Dead letters that are sent again come to the group that gave them up, whatever kind of group it is, and to no other
(delivery#send-back)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mqstore import Store

LONG_S = 30.0


def in_topic(store: Store, topic: str) -> int:
    """How many messages were ever put into a topic: what any group that reads it gets."""
    return sum(store.offsets(*ref)[1] for ref in store.queues(topic))


def pop_all(broker: Any, group: str, topic: str, *, order: bool = False) -> list[tuple[bytes, int]]:
    """(body, attempt) of all that the group gets now; acknowledged."""
    found = []
    while deliveries := broker.pop(group, topic, n=32, order=order):
        broker.ack(group, topic, [each.receipt for each in deliveries])
        found += [(bytes(each.message.body), each.attempt) for each in deliveries]
    return found


# -- groups that pop -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [False, True])
def test_popping_group_alone_gets_its_letter(store: Store, order: bool) -> None:
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
def test_all_groups_get_a_letter_on_request(store: Store, order: bool) -> None:
    store.put("orders", b"poison")
    assert pop_all(store.broker, "audit", "orders", order=order) == [(b"poison", 1)]
    [delivery] = store.broker.pop("billing", "orders", order=order)
    store.broker.dead_letter("billing", "orders", delivery.receipt, "bad")

    assert store.dead_letters("billing").replay(all_groups=True).count == 1

    for group in ("audit", "billing"):
        assert pop_all(store.broker, group, "orders", order=order) == [(b"poison", 1)]


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
def test_replay_wakes_a_waiting_get(store: Store, ordered: bool) -> None:
    jobs = store.queue("jobs", ordered=ordered)
    jobs.put(b"poison")
    jobs.get().reject("bad")
    ready = threading.Event()
    jobs._when_ready(ready.set)
    assert not ready.is_set()
    jobs.dead_letters.replay()
    assert ready.wait(LONG_S)
    assert jobs.get(block=False).value == b"poison"
