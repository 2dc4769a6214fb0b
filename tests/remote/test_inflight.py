"""Puts in flight: many messages in one frame, and futures that are done once, whatever happens to the connection."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mqstore
from mqstore import Store
from mqstore.errors import (
    ConnectionLostError,
    FormatError,
    InvalidMessageError,
    StoreBusyError,
    StoreClosedError,
)
from mqstore.log.commitlog import QueueRef, SendReceipt
from mqstore.remote.broker import RemoteBroker
from mqstore.remote.messages import Put
from mqstore.remoting.calls import error_body
from mqstore.remoting.short import each_receipt, outcomes_answer
from mqstore.serve.thread import ServerThread
from mqstore.signalsafe import Future
from tests.interrupts import run_interrupted
from tests.waiting import until

HOST = b"\x7f\0\0\1\0\0\0\0"


@pytest.fixture
def behind(tmp_path: Path) -> Iterator[Store]:
    with mqstore.open(tmp_path, config=mqstore.StoreConfig(max_message_size=1000)) as store:
        store.create_topic("orders", queues=2)
        yield store


@pytest.fixture
def remote(serving: ServerThread) -> Iterator[RemoteBroker]:
    broker = RemoteBroker(serving.address)
    yield broker
    broker.close()


def bodies_in(store: Store, queue_id: int = 0) -> list[bytes]:
    return [message.body for message in store.iter("orders") if message.queue_id == queue_id]


def lose(remote: RemoteBroker) -> None:
    """Lose the connection, as a network does."""
    line: Any = remote._connection.line
    line._socket.shutdown(socket.SHUT_RDWR)


def requests_of(serving: ServerThread) -> int:
    return sum(count for code, count in serving._server.metrics.requests.items() if code in (31007, 31011))


# -- what travels -----------------------------------------------------------------------------------------------------

_NUMBERS = st.tuples(*[st.integers(0, (1 << 31) - 1)] * 5)
_OUTCOMES = st.lists(
    _NUMBERS | st.sampled_from([StoreBusyError("later"), InvalidMessageError("no", "body")]), max_size=9
)


@given(_OUTCOMES, st.sampled_from([HOST, bytes(20)]), st.data())
def test_outcomes_are_read_as_written(outcomes: list[Any], host: bytes, data: st.DataObject) -> None:
    wanted = [
        SendReceipt((QueueRef("t", each[0]), *each[1:], host, None)) if isinstance(each, tuple) else each
        for each in outcomes
    ]
    sent: list[Any] = [each if isinstance(each, SendReceipt) else error_body(each) for each in wanted]
    fields, body = outcomes_answer(sent)
    found = each_receipt("t", len(wanted), fields, body)
    assert [(type(each), str(each)) for each in found] == [(type(each), str(each)) for each in wanted]
    with contextlib.suppress(FormatError):  # and nothing else, for damaged ones
        each_receipt("t", data.draw(st.integers(0, 9)), fields, body[: data.draw(st.integers(0, len(body)))])


def test_many_puts_are_few_requests_and_keep_their_order(
    remote: RemoteBroker, behind: Store, serving: ServerThread
) -> None:
    wanted: dict[int, list[bytes]] = {0: [], 1: []}
    futures = []
    for i in range(300):
        body, queue_id = b"%d" % i, i // 10 % 2
        options: dict[str, Any] = {"tag": "paid"} if i % 50 == 7 else {}
        wanted[queue_id].append(body)
        futures.append(remote.put_async("orders", body, queue_id=queue_id, **options))
    receipts = [future.result() for future in futures]
    assert {queue_id: bodies_in(behind, queue_id) for queue_id in wanted} == wanted
    for receipt, i in zip(receipts, range(300), strict=True):
        assert (receipt.topic, receipt.queue_id) == ("orders", i // 10 % 2)
        assert behind.log.at(receipt.physical_offset).body == b"%d" % i
    assert requests_of(serving) < 100


def test_puts_without_a_queue_use_all_queues(remote: RemoteBroker, behind: Store) -> None:
    receipts = [future.result() for future in [remote.put_async("orders", b"x") for _ in range(64)]]
    assert [receipt.queue_id for receipt in receipts].count(0) == 32


def test_message_that_is_refused_fails_alone(remote: RemoteBroker, behind: Store) -> None:
    futures = [remote.put_async("orders", bytes(2000 if i == 5 else i), queue_id=0) for i in range(10)]
    with pytest.raises(InvalidMessageError, match="max_message_size is 1000"):
        futures[5].result()
    assert [future.result().offset for future in futures if future is not futures[5]] == list(range(9))
    assert [len(body) for body in bodies_in(behind)] == [i for i in range(10) if i != 5]


def test_errors_of_a_frame_are_those_of_each_put(remote: RemoteBroker, behind: Store) -> None:
    futures = [remote.put_async("orders", b"x", queue_id=7) for _ in range(3)]
    errors = [future.exception() for future in futures]
    with pytest.raises(InvalidMessageError) as caught:
        behind.broker.put("orders", b"x", queue_id=7)
    assert [str(error) for error in errors] == [str(caught.value)] * 3
    assert len({id(error) for error in errors}) == 3


def test_puts_to_a_flushing_store_wait_for_the_disk(tmp_path: Path) -> None:
    with (
        mqstore.open(tmp_path / "synced", durability="flush") as behind,
        mqstore.connect(behind.serve("127.0.0.1:0").address) as store,
    ):
        broker: Any = store.broker
        futures = [broker.put_async("orders", b"%d" % i, queue_id=0) for i in range(20)]
        assert [future.result().offset for future in futures] == list(range(20))
        call = {"topic": "orders", "queueId": 0}  # a frame of many, from a client that does not ask
        answer = broker._connection.call(31007, b"\0\0\0\1\0\0\0\1x", fields=call)
        [receipt] = each_receipt("orders", 1, answer.fields, answer.body)
        assert isinstance(receipt, SendReceipt)
        assert receipt.offset == 20


# -- who waits --------------------------------------------------------------------------------------------------------


def test_puts_that_nobody_waits_for_are_stored(remote: RemoteBroker, behind: Store) -> None:
    futures = [remote.put_async("orders", b"x", queue_id=0) for _ in range(3)]
    until(lambda: len(bodies_in(behind)) == 3)
    until(lambda: all(future.done() for future in futures))


def test_puts_are_sent_while_a_thread_waits_for_messages(remote: RemoteBroker, serving: ServerThread) -> None:
    """It reads the connection, and is not answered for long."""
    waiter = remote.add_waiter("orders", 1, 10, lambda worth: None, timeout=300)
    for _ in range(20):
        future = remote.put_async("orders", b"x", queue_id=0)
        until(future.done)
    assert remote.remove_waiter(waiter)
    until(lambda: serving._server.parked == 0)


@pytest.mark.parametrize(
    "wait", [concurrent.futures.wait, lambda futures: list(concurrent.futures.as_completed(futures))]
)
def test_futures_are_those_of_the_standard_library(remote: RemoteBroker, wait: Callable[[Any], object]) -> None:
    for count in (1, 40):
        futures = [remote.put_async("orders", b"x", queue_id=0) for _ in range(count)]
        called: list[object] = []
        futures[-1].add_done_callback(called.append)
        wait(futures)
        until(partial(bool, called))
        assert all(future.done() and not future.cancel() for future in futures)
        assert futures[0].exception() is None


def test_one_connection_serves_threads_that_wait_in_all_ways(remote: RemoteBroker, behind: Store) -> None:
    def work(number: int) -> None:
        for i in range(30):
            futures = [remote.put_async("orders", b"x", queue_id=0) for _ in range(1 + i % 5)]
            if number % 3 == 0:
                remote.put("orders", b"x", queue_id=1)
            for future in futures:
                future.result(None if number % 2 else 60)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(6))) == [None] * 6
    assert (len(bodies_in(behind)), len(bodies_in(behind, 1))) == (6 * 90, 60)


# -- what a lost connection leaves ------------------------------------------------------------------------------------


def test_puts_of_a_lost_connection_are_perhaps_stored(remote: RemoteBroker, behind: Store) -> None:
    [*first] = [remote.put_async("orders", b"before", queue_id=0) for _ in range(20)]
    lose(remote)
    later = [remote.put_async("orders", b"after", queue_id=0) for _ in range(20)]
    acknowledged = 0
    for future in [*first, *later]:
        error = future.exception()
        assert error is None or (isinstance(error, ConnectionLostError) and error.sent)
        acknowledged += error is None
    assert acknowledged <= len(bodies_in(behind)) <= 40
    assert remote.put_async("orders", b"again").result().offset >= 0


def test_gathered_puts_go_on_the_next_line(remote: RemoteBroker, behind: Store) -> None:
    """They were not sent on the line that was lost."""
    connection = remote._connection
    remote.put("orders", b"first", queue_id=0)
    connection.gathered.append((("orders", 0), b"second", future := Put(connection)))
    assert connection.line is not None
    connection.line.fail("the test ends it")
    remote.put("orders", b"third", queue_id=0)
    assert bodies_in(behind) == [b"first", b"second", b"third"]
    assert future.result().offset == 1


def test_interrupt_at_any_point_leaves_no_future_undone(remote: RemoteBroker, behind: Store) -> None:
    """The thread that waits reads for all, so Ctrl-C may come in the middle of an answer."""
    at, stack, acknowledged = 0, ["first"], 0
    futures: list[Any] = []

    def work() -> None:
        futures.extend(remote.put_async("orders", b"x", queue_id=0) for _ in range(2))
        for future in futures:
            future.result()

    while stack:
        futures.clear()
        remote.max_offset("orders", 0)  # there is a line again
        stack, at = run_interrupted(work, at), at + 1
        errors = [future.exception(20) for future in futures]
        assert all(error is None or isinstance(error, ConnectionLostError) for error in errors), stack
        acknowledged += errors.count(None)
    assert at > 100
    assert acknowledged <= len(bodies_in(behind)) <= 2 * at


def test_put_with_a_key_is_stored_once_though_its_answer_is_lost(remote: RemoteBroker, behind: Store) -> None:
    future = remote.put_async("orders", b"x", queue_id=0, unique_key="k")
    until(lambda: len(bodies_in(behind)) == 1)
    lose(remote)
    assert future.result(60).unique_key == "k"
    assert len(bodies_in(behind)) == 1


def test_puts_fail_when_there_is_no_server_any_more(behind: Store) -> None:
    serving = behind.serve("127.0.0.1:0")
    remote = RemoteBroker(serving.address, timeout_s=0.3)
    remote.put("orders", b"x")
    serving.close()
    futures: list[Any] = []
    with contextlib.suppress(ConnectionLostError):
        futures.extend(remote.put_async("orders", b"x") for _ in range(5))
    assert all(isinstance(future.exception(), ConnectionLostError) for future in futures)
    remote.close()


def test_closing_gives_up_puts_in_flight(remote: RemoteBroker) -> None:
    futures = [remote.put_async("orders", b"x") for _ in range(40)]
    remote.close()
    for future in futures:
        assert isinstance(future.exception(60), ConnectionLostError | StoreClosedError | None)
    with pytest.raises(StoreClosedError):
        remote.put_async("orders", b"x")


# -- the future -------------------------------------------------------------------------------------------------------


def test_future_wakes_a_thread_that_begins_to_wait_while_it_is_set() -> None:
    """Its condition is made when somebody first looks, here after the look of `set_result`."""
    found: list[object] = []

    class Looked(Future[int]):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "_result" and value is not None:
                self.add_done_callback(lambda of: found.append(of.result()))
                thread.start()
                until(lambda: bool(self._condition._bells))

    future = Looked()
    future._state = "RUNNING"
    thread = threading.Thread(target=lambda: found.append(future.result(20)))
    future.set_result(7)
    thread.join(20)
    assert found == [7, 7]
