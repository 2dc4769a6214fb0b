"""Signal handlers that call the store while their own thread is inside a call: it works, or raises an error at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import product

import pytest

from mqstore import SendReceipt, StoreConfig
from mqstore.errors import MQStoreError, QueueEmpty, StoreBusyError
from mqstore.signalsafe import Lock
from tests.publiccalls import CALLS, CLOSING, Things, names_of, opened

INTERRUPTED = [
    *("Broker.put", "Broker.put_many", "Store.put_many", "Store.flush", "Store.find", "Store.recall"),
    *("Broker.pop", "Broker.ack", "Broker.nack", "Broker.pending", "Broker.lag", "Broker.stats", "Broker.prometheus"),
    *("Broker.save", "Broker.commit", "Broker.reset", "Queue.put", "Queue.get", "Transactions.begin"),
    *("Transactions.end", "Producer.submit", "PullConsumer.poll", "PullConsumer.commit", "SimpleConsumer.receive"),
    *("Members.register", "TopicTable.delete", "GroupTable.create", "QueueLocks.try_lock", "PushConsumer.start"),
]
"""Calls that take locks of every kind."""
AT_MOST = 3
"""How many times the handler runs in one call."""


@contextmanager
def handler_under_locks(handler: Callable[[], object], skipped: int) -> Iterator[None]:
    """Have `handler` called by this thread right after it has taken a lock, but not the first `skipped` times."""
    thread, looked_up, count, inside = threading.get_ident(), Lock.__enter__, [-skipped], []

    def enter(lock: Lock) -> Callable[[], bool]:
        take: Callable[[], bool] = looked_up.__get__(lock)

        def taken() -> bool:
            result = take()
            if threading.get_ident() == thread and not inside and count[0] < AT_MOST:
                count[0] += 1
                inside.append(True)
                try:
                    if count[0] > 0:
                        handler()
                except BaseException:
                    lock.release()
                    raise
                finally:
                    inside.clear()
            return result

        return taken

    Lock.__enter__ = property(enter)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Lock.__enter__ = looked_up  # type: ignore[method-assign]


def called(things: Things, name: str) -> BaseException | None:
    """Make a call. Return the error that it raises by its documentation."""
    try:
        CALLS[name](things)
    except (MQStoreError, QueueEmpty, ValueError) as error:
        return error
    return None


def interrupted(things: Things, outer: str, inner: str, skipped: int = 0) -> list[BaseException | None]:
    """Make the call `outer`, with a handler that calls `inner`. Return what the handler got."""
    outcomes: list[BaseException | None] = []
    with handler_under_locks(lambda: outcomes.append(called(things, inner)), skipped):
        called(things, outer)
    return outcomes


def check_whole(things: Things) -> None:
    receipt = things.store.put("after", b"after", queue_id=0)
    assert things.store.read("after", 0, receipt.offset)[0].body == b"after"
    assert not list(things.store.verify())


def test_every_public_method_is_called() -> None:
    assert names_of() == CALLS.keys()


@pytest.mark.parametrize("outer", INTERRUPTED)
def test_handler_call_within_a_call_never_hangs(outer: str) -> None:
    with opened(config=StoreConfig(segment_bytes=1 << 16)) as things:
        inner = [name for name in CALLS if name not in CLOSING]
        assert sum(len(interrupted(things, outer, name, number % 5)) for number, name in enumerate(inner))
        check_whole(things)


def test_put_async_of_a_handler_is_stored() -> None:
    """Also if it was refused, under the locks of a put."""
    with opened() as things:
        futures: list[Future[SendReceipt]] = []
        for skipped, outer in product(range(3), INTERRUPTED):
            topic = things.new()
            with handler_under_locks(lambda: futures.append(things.broker.put_async(topic, b"async")), skipped):  # noqa: B023
                called(things, outer)
        receipts = [future.result(20) for future in futures]
        assert len(receipts) > len(INTERRUPTED)
        for receipt in receipts:
            assert things.store.read(*receipt.queue, receipt.offset, 1)[0].body == b"async"
        check_whole(things)


@pytest.mark.parametrize("outer", ["Broker.put", "Broker.pop", "Broker.stats"])
@pytest.mark.parametrize("inner", sorted(CLOSING))
def test_handler_that_closes_within_a_call_never_hangs(outer: str, inner: str) -> None:
    with opened() as things:
        outcomes = interrupted(things, outer, inner)
        if inner in ("Store.close", "Broker.close", "PushConsumer.stop"):
            assert outcomes
            assert {type(each) for each in outcomes} == {StoreBusyError}
            check_whole(things)
