"""Short forms of calls: what is read is what was written, and bytes that are none are refused (remoting/short.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import Store
from mqstore.contract import Delivery
from mqstore.errors import (
    ConfigError,
    FormatError,
    InvalidReceiptError,
    MQStoreError,
    ReceiptExpiredError,
    TopicNotFoundError,
)
from mqstore.log.commitlog import QueueRef, SendReceipt, SendReceipts
from mqstore.remote.broker import RemoteBroker
from mqstore.remoting.frames import Frame
from mqstore.remoting.short import (
    bodies_bytes,
    bodies_of,
    deliveries_answer,
    deliveries_of,
    messages_of,
    put_fields,
    receipt_bytes,
    receipt_of,
    receipts_bytes,
    receipts_of,
)

_I64, _I32 = st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 31) - 1)
_HOST = st.sampled_from([b"\x7f\0\0\1\0\0\0\0", bytes(20)])


@given(_I32, _I64, _I64, _I32, _I64, _HOST, st.none() | st.text())
def test_receipt_is_read_as_written(
    queue_id: int, offset: int, at: int, size: int, stamp: int, host: bytes, key: str | None
) -> None:
    receipt = SendReceipt((QueueRef("orders", queue_id), offset, at, size, stamp, host, key))
    assert receipt_of("orders", key, receipt_bytes(receipt)) == receipt


@given(_I32, _HOST, st.lists(st.tuples(_I64, st.lists(_I64, min_size=2, max_size=5), _I64), max_size=3))
def test_receipts_are_read_as_written(queue_id: int, host: bytes, chunks: list[tuple[int, list[int], int]]) -> None:
    receipts = SendReceipts(QueueRef("orders", queue_id), host, {})
    for offset, positions, stamp in chunks:
        receipts.add(offset, positions, stamp)
    assert list(receipts_of("orders", receipts_bytes(receipts))) == list(receipts)


@given(st.lists(st.binary(max_size=9), max_size=5))
def test_bodies_are_read_as_written(bodies: list[bytes]) -> None:
    assert bodies_of(bodies_bytes(bodies)) == bodies


@given(st.binary(max_size=60) | st.lists(st.binary(max_size=9), max_size=3).map(bodies_bytes), st.integers(0, 20))
def test_damaged_bodies_are_refused(data: bytes, cut: int) -> None:
    for read in (
        bodies_of,
        lambda data: receipt_of("t", None, data),
        lambda data: list(receipts_of("t", data)),
        lambda data: [message.body for message in messages_of("t", 0, data)],
        lambda data: deliveries_of({"receipts": "a", "visible": "x"}, data),
    ):
        with contextlib.suppress(FormatError, IndexError):
            read(data[cut:])


@pytest.mark.parametrize(
    ("topic", "queue_id", "options", "fields"),
    [
        ("orders", None, {}, {"topic": "orders"}),
        ("orders", 3, {"tag": "paid", "keys": None}, {"topic": "orders", "queueId": 3, "tag": "paid"}),
        ("orders", 3, {"keys": ["a", "b"]}, None),
        ("orders", 3, {"delay": 5}, None),
        ("orders", True, {}, None),
        ("orders", 3, {"tag": "ü"}, None),
        ("o" * 1000, 3, {}, None),
    ],
)
def test_puts_that_are_short(topic: str, queue_id: int, options: dict[str, object], fields: object) -> None:
    assert put_fields(topic, queue_id, options) == fields


# -- against a server -------------------------------------------------------------------------------------------------


@pytest.fixture
def store(mq_store: Store) -> Store:
    """Without a topic."""
    return mq_store


@pytest.fixture
def remote(store: Store) -> Iterator[RemoteBroker]:
    serving = store.serve("127.0.0.1:0")
    broker = RemoteBroker(serving.address)
    broker.server = serving._server  # type: ignore[attr-defined]
    yield broker
    broker.close()


def codes_of(remote: RemoteBroker, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Code of each call from now on, and True if it is short."""
    sent: list[tuple[int, bool]] = []
    call = remote._connection.call

    def noted(code: int, body: bytes = b"", **options: object) -> Frame:
        sent.append((code, "topic" in (options.get("fields") or ())))
        return call(code, body, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(remote._connection, "call", noted)
    return sent


def test_messages_go_through_short_calls(remote: RemoteBroker, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = codes_of(remote, monkeypatch)
    remote.put("orders", b"one", queue_id=0, tag="paid", keys="k", unique_key="u")
    [second, third] = remote.put_many("orders", [b"two", b"three"], queue_id=0)
    first, *_ = result = remote.read("orders", 0, 0).messages
    assert [message.body for message in result] == [b"one", b"two", b"three"]
    assert (first.tag, first.keys, first.unique_key, first.tags_code) == ("paid", ("k",), "u", 3433164)
    assert (second.offset, third.offset, third.physical_offset) == (1, 2, result[2].physical_offset)
    deliveries = remote.pop("g", "orders", 2, queue_id=0)
    [last] = remote.pop("g", "orders", 2, queue_id=0, acks=[each.receipt for each in deliveries])
    remote.ack("g", "orders", [last.receipt])
    assert [(each.message.body, each.attempt, each.topic) for each in [*deliveries, last]] == [
        (body, 1, "orders") for body in (b"one", b"two", b"three")
    ]
    assert remote.pop("g", "orders", 2, queue_id=0) == []
    assert store.broker.pending("g") == []
    assert [short for _, short in sent] == [True] * 7


def test_batches_take_queues_in_turn(remote: RemoteBroker, store: Store) -> None:
    """Also those that the compiled call declines, as they are large."""
    store.create_topic("orders", queues=3)
    queues = [remote.put_many("orders", [bytes(1 << 16)] * (1 + n % 2))[0].queue_id for n in range(9)]
    assert queues == [(queues[0] + n) % 3 for n in range(9)]


def test_deliveries_are_those_of_the_broker(remote: RemoteBroker, store: Store) -> None:
    """From several queues, and of the retry topic: the answers that have no short form, too."""
    for queue_id in (0, 1, 0):
        store.broker.put("orders", b"x", queue_id=queue_id)
    seen: list[Delivery] = []
    for _ in range(5000):
        for delivery in remote.pop("g", "orders", 32, invisible=30.5):
            if delivery.attempt == 1:
                remote.nack("g", "orders", delivery.receipt, 0)
            else:
                seen.append(delivery)
        if len(seen) == 3:
            break
    assert [(each.topic, each.message.topic, each.attempt) for each in seen] == [("orders", "%RETRY%g+orders", 2)] * 3
    remote.ack("g", "orders", [each.receipt for each in seen])
    assert list(store.broker.pending("g")) == []


def test_deliveries_that_differ_have_no_short_form(store: Store) -> None:
    """A new message and a redelivered one differ in the topic that stores them, or in an ordered queue in attempts."""
    for topic in ("orders", "again"):
        store.broker.put(topic, b"x", queue_id=0)
    new, again = (
        Delivery(store.broker.read(topic, 0, 0).messages[0], "receipt", 5, "orders", 0, None)
        for topic in ("orders", "again")
    )
    for other in (again, new._replace(redeliveries=1)):
        assert deliveries_answer([new, other]) is None
    assert deliveries_answer([new, new]) is not None


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda remote: remote.put("orders", b"x", queue_id=99), MQStoreError),
        (lambda remote: remote.put_many("orders", [b"x"], queue_id=99), MQStoreError),
        (lambda remote: remote.put("orders", b"x", tag="a|b"), MQStoreError),
        (lambda remote: remote.read("nothing", 0, 0), TopicNotFoundError),
        (lambda remote: remote.read("orders", 0, 0, 0), ConfigError),
        (lambda remote: remote.pop("g", "orders", 99), MQStoreError),
        (lambda remote: remote.ack("g", "orders", ["junk"]), InvalidReceiptError),
        (lambda remote: remote.pop("g", "orders", acks=["junk"]), InvalidReceiptError),
        (lambda remote: remote.pop("g", "orders", acks=["ü"]), InvalidReceiptError),
        (lambda remote: remote.put("orders", "text"), (TypeError, MQStoreError)),
        (lambda remote: remote.put("orders", b"x", colour="red"), TypeError),
    ],
)
def test_errors_are_those_of_the_broker(
    remote: RemoteBroker, store: Store, call: Callable[[Any], object], error: Any
) -> None:
    store.broker.topics.create("orders", queues=1)
    raised = []
    for broker in (remote, store.broker):
        with pytest.raises(error) as caught:
            call(broker)
        raised.append((caught.type, str(caught.value)))
    assert raised[0] == raised[1]


def test_expired_receipt_pops_nothing(remote: RemoteBroker, store: Store) -> None:
    store.broker.put("orders", b"x", queue_id=0)
    [delivery] = remote.pop("g", "orders", invisible=0.1)
    while not (again := remote.pop("g", "orders", invisible=60)):
        pass
    with pytest.raises(ReceiptExpiredError):
        remote.pop("g", "orders", acks=[delivery.receipt])
    remote.ack("g", "orders", [again[0].receipt])


def test_only_a_withdrawn_wait_leaves_the_server(remote: RemoteBroker, store: Store) -> None:
    store.broker.topics.create("orders", queues=1)
    waits = [remote.add_waiter("orders", 0, 0, lambda worth: None) for _ in range(3)]
    assert remote.remove_waiter(waits[1])
    remote.session.ping()
    assert remote.server.parked == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("code", [31010, 31011, 31016, 31050, 31051, 31060])
def test_short_request_without_its_fields_is_refused(remote: RemoteBroker, code: int) -> None:
    answer = remote._connection.call(code, b"\xff" * 9, fields={"topic": "orders", "queueId": "x"})
    assert answer.code in (13, 29) or code == 31051
    assert remote._call("session.ping", (), {}) is None


# -- calls in flight ---------------------------------------------------------------------------------------------------


def test_puts_of_several_threads_are_all_answered(remote: RemoteBroker, store: Store) -> None:
    store.broker.topics.create("orders", queues=1)

    def put(number: int) -> list[int]:
        if number % 2:
            return [remote.put("orders", b"x", queue_id=0).offset for _ in range(100)]
        return [receipt.result(60).offset for receipt in [remote.put_async("orders", b"x") for _ in range(100)]]

    with ThreadPoolExecutor(6) as pool:
        found = [offset for offsets in pool.map(put, range(6)) for offset in offsets]
    assert sorted(found) == list(range(600))
