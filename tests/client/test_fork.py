"""Forked children of a process that has a store open are refused, and wait for no lock of their parent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import mqstore.aio
from mqstore.errors import StoreClosedError
from tests.children import in_child


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(StoreClosedError):
        call()


def test_forked_child_does_not_wait_for_messages_of_its_parent(tmp_path: Path) -> None:
    """It was told that there is nothing, and waited for ever: what would come is its parent's."""
    with mqstore.open(tmp_path / "s") as store:
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


def test_forked_child_hangs_at_no_lock_of_another_thread(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "s") as store:
        queue = store.queue("jobs")
        queue.put(b"x")
        consumer = store.push_consumer("g")
        held, let_go = threading.Event(), threading.Event()

        def hold() -> None:
            with store.log._dispatcher._lock, queue._waits.lock, queue._changed, consumer._lock:
                held.set()
                let_go.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(20)
        store.log.append("jobs", 0, b"not dispatched")
        try:
            assert in_child(queue.shutdown, 20) == 0
            assert in_child(partial(refused, lambda: store.lag("jobs")), 20) == 0
            assert in_child(partial(refused, lambda: consumer.subscribe("other", print)), 20) == 0
            assert in_child(partial(refused, lambda: store.log.offsets_or_none("jobs", 0)), 20) == 0
        finally:
            let_go.set()
            holder.join()
