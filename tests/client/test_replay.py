"""Dead letters that are sent again come to the group that gave them up, whatever kind of group it is, and to no other
(delivery#send-back)."""

from __future__ import annotations

from typing import Any

import pytest

from mqstore import Store


def pop_all(broker: Any, group: str, topic: str, *, order: bool = False) -> list[tuple[bytes, int]]:
    """(body, attempt) of all that the group gets now; acknowledged."""
    found = []
    while deliveries := broker.pop(group, topic, n=32, order=order):
        broker.ack(group, topic, [each.receipt for each in deliveries])
        found += [(bytes(each.message.body), each.attempt) for each in deliveries]
    return found


# -- groups that pop -------------------------------------------------------------------------------------------------


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
