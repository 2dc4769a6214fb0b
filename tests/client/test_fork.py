"""Forked children of a process that has a store open are refused, and wait for no lock of their parent."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mqstore.aio
from mqstore.errors import StoreClosedError
from tests.children import in_child
from tests.client.support import elsewhere, ended, every_lock_held, in_thread, subscribed, until
from tests.publiccalls import CALLS, CLOSING, opened


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(StoreClosedError):
        call()


def test_forked_child_does_not_wait_for_messages_of_its_parent(store: mqstore.Store) -> None:
    """It was told that there is nothing, and waited for ever: what would come is its parent's."""
    queue = store.queue("jobs")
    queue.put(b"x")
    store.put("orders", b"x")
    consumer = store.simple_consumer("g", {"orders": "*"})
    for task in queue:
        task.ack()
    for delivery in consumer.receive(wait=0):
        delivery.ack()
    assert consumer.receive(wait=0) == []

    assert in_child(partial(refused, lambda: consumer.receive(wait=0)), 20) == 0
    assert in_child(partial(refused, lambda: next(iter(consumer))), 20) == 0
    assert in_child(partial(refused, lambda: store.broker.pop("g", "orders")), 20) == 0
    assert in_child(partial(refused, lambda: list(queue)), 20) == 0
    assert in_child(partial(refused, lambda: queue.get()), 20) == 0


def test_forked_child_does_not_wait_for_a_pass_of_the_dispatcher(store: mqstore.Store) -> None:
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with store.log._dispatcher.lock:  # type: ignore[union-attr]
            held.set()
            let_go.wait(60)

    store.queue("jobs").put(b"x")
    holder = in_thread(hold)
    assert held.wait(20)
    store.log.append("jobs", 0, b"not dispatched")  # type: ignore[union-attr]
    try:
        for call in (lambda: store.lag("jobs"), lambda: store.log.offsets_or_none("jobs", 0)):
            assert in_child(partial(refused, call), 20) == 0
    finally:
        let_go.set()
        ended(*holder)


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_forked_child_closes_nothing_and_does_not_hang(tmp_path: Path, mode: Any) -> None:
    """A child that left the parent's `with` block, by `sys.exit` say, waited for locks that threads held which it does
    not have."""
    seen: list[bytes] = []
    with mqstore.open(tmp_path / "s") as store:
        queue, producer = store.queue("jobs"), store.producer(linger=0.5, checker=lambda message: None)
        queue.put(b"x")
        submitted = producer.submit("orders", b"parent")
        consumer = subscribed(store, lambda message: seen.append(message.body), mode=mode, workers=1).start()
        calls: list[Callable[[], object]] = [
            *(queue.shutdown, consumer.stop, producer.close, store.close),
            partial(refused, lambda: store.lag("jobs")),
            partial(refused, lambda: consumer.subscribe("other", print)),
            *(partial(refused, partial(send, "orders", b"x")) for send in (producer.send, producer.submit)),
            partial(refused, lambda: producer.send_oneway("orders", b"x")),
            partial(refused, lambda: producer.send_many("orders", [b"x"])),
            *(partial(refused, producer.flush), partial(refused, producer.transaction)),
        ]
        with elsewhere(every_lock_held(store, queue, consumer, producer), 300):
            for call in calls:
                assert in_child(call, 20) == 0
        store.put("t", b"0")
        until(lambda: seen)
        producer.close()
        assert submitted.result(0).topic == "orders"
        assert [message.body for message in store.iter("orders")] == [b"parent"]
    assert seen == [b"0"]


RETURNING = frozenset(
    [
        *("Store.broker", "Store.closed", "Store.mode", "Store.path", "Store.recovery", "Store.stats"),
        *("Store.producer", "Store.push_consumer", "Broker.filter", "Broker.pop_retry_topics", "Broker.take_losses"),
        *(
            "Broker.closed",
            "Broker.listen",
            "Broker.unlisten",
            "Broker.wait",
            "Members.get",
            "Transactions.get",
            "Transactions.open_count",
        ),
        *("TopicTable.entered", "TopicTable.get", "TopicTable.require"),
        *("GroupTable.get", "GroupTable.may_read", "GroupTable.names"),
        *("Queue.full", "Queue._get_at_once", "Producer.closed", "SimpleConsumer.closed"),
        *("SimpleConsumer.subscriptions", "PullConsumer.closed"),
        *("Task.attempt", "Task.expires_at", "Task.message", "Task.settled", "Task.value", "Task._ack_at_once"),
        *("Delivery.attempt", "Delivery.expires_at", "Delivery.message", "Delivery.receipt"),
        *("Delivery.settled", "Delivery._ack_at_once"),
        *CLOSING,
    ]
)
"""Calls that tell what is in memory, or have nothing to do in a forked child."""


def test_every_call_in_a_forked_child_is_refused_at_once(tmp_path: Path) -> None:
    """Each call with every lock held by a thread that the child does not have."""
    report = tmp_path / "report"

    def child() -> None:
        for name, call in CALLS.items():
            report.write_text(f"{name} hung")
            signal.alarm(10)
            try:
                value = call(things)
            except StoreClosedError:
                outcome = "refused"
            except Exception as error:
                outcome = repr(error)
            else:
                outcome = "refused" if isinstance(value, Future) and refused(value.result) is None else "returned"  # type: ignore[func-returns-value]
            wrong = outcome != "returned" if name in RETURNING else outcome != "refused"
            if wrong:
                faults.append(f"{name}: {outcome}")
        report.write_text("\n".join(faults))

    faults: list[str] = []
    with opened() as things:
        held = [getattr(things, name) for name in vars(things)]
        with elsewhere(every_lock_held(*held), 400):
            in_child(child, 300)
    assert report.read_text().splitlines() == []
