"""Forked children of a process that has a store open are refused, and wait for no lock of their parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import mqstore.aio
from mqstore import StoreClosedError


def in_a_child(work: Callable[[], object]) -> int:
    """How a forked child that did `work` ended: 0; 1: StoreClosedError; 2: another error; or by which signal."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        try:
            work()
        except StoreClosedError:
            os._exit(1)
        except BaseException:
            os._exit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


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

        assert in_a_child(lambda: consumer.receive(wait=0)) == 1
        assert in_a_child(lambda: next(iter(consumer))) == 1
        assert in_a_child(lambda: store.broker.pop("g", "orders")) == 1
        assert in_a_child(lambda: list(queue)) == 1
        assert in_a_child(lambda: queue.get()) == 1


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
            assert in_a_child(queue.shutdown) == 0
            assert in_a_child(lambda: store.lag("jobs")) == 1
            assert in_a_child(lambda: consumer.subscribe("other", print)) == 1
            assert in_a_child(lambda: store.log.offsets_or_none("jobs", 0)) == 1
        finally:
            let_go.set()
            holder.join()
