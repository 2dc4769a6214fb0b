"""The producer: rules, queues, attempts, hooks, what is sent later, transactions. Time by hand where time matters; what
blocks, with threads and short real times."""

from __future__ import annotations

import errno
import math
import random
import sys
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mqstore
from mqstore import Interceptor, Message, OutgoingMessage, Producer, QueueRef, SendReceipt
from mqstore.errors import (
    FlushFailedError,
    FlushTimeoutError,
    InvalidMessageError,
    NotPermittedError,
    StoreBusyError,
    StoreClosedError,
    StoreFullError,
    TransactionStateError,
)
from tests.broker import support
from tests.client.pushsupport import hook
from tests.client.support import Broker, ended, failing, in_thread, open_broker, until
from tests.faults import FaultyFileSystem
from tests.interrupts import run_interrupted

COMPRESSED, COMPRESSION_TYPE_MASK, COMPRESSION_ZLIB = 0x1, 0x700, 0x300
"""Bits of RocketMQ's sys flag."""
CHECK_MS = 6_000
AGAIN_MS = 30_000
WAIT_S = 20


class Bench(support.Bench):
    def producer(self, **options: Any) -> Producer:
        return Producer(self.broker, options.pop("group", "till"), **options)

    def stored(self, topic: str = "orders") -> list[Message]:
        """What is visible, in the order in which it lies in the log."""
        try:
            return sorted(self.broker.store.iter(topic), key=lambda message: message.physical_offset)
        except LookupError:
            return []

    def sent(self, topic: str = "orders") -> list[bytes]:
        return [message.body for message in self.stored(topic)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "store", segment_bytes=1 << 20)
    yield bench
    bench.broker.close()


class Gate:
    """Stands for `Broker.put`, for producers that are made afterwards, and lets nothing through until it is opened."""

    def __init__(self, broker: Broker) -> None:
        self.opened = threading.Event()
        self.arrived = threading.Event()
        self._put = broker.put
        broker.put = self  # type: ignore[method-assign]

    def __call__(self, *arguments: Any, **options: Any) -> SendReceipt:
        self.arrived.set()
        assert self.opened.wait(WAIT_S)
        return self._put(*arguments, **options)


class Failing:
    """Stands for `Broker.put`, for producers that are made afterwards: raises each of `errors`, one a call, and notes
    the calls; None: puts."""

    def __init__(self, broker: Broker, *errors: Exception | None) -> None:
        self.errors = deque(errors)
        self.calls: list[dict[str, Any]] = []
        self._put = broker.put
        broker.put = self  # type: ignore[method-assign]

    def __call__(self, topic: str, body: bytes, **options: Any) -> SendReceipt:
        self.calls.append(options)
        error = self.errors.popleft() if self.errors else None
        if error is not None:
            raise error
        return self._put(topic, body, **options)


def busy() -> StoreBusyError:
    return StoreBusyError("busy")


def no_room() -> StoreFullError:
    return StoreFullError(errno.ENOSPC, "full", "file", "append")


def late() -> None:
    raise FlushTimeoutError("late")


# -- rules (clients#message-rules) -------------------------------------------------------------------------------------

MAX = 1000

# What the log and routing refuse of each field is in tests/log/test_put.py and tests/broker/test_road.py.
_BAD: list[tuple[dict[str, Any], str]] = [
    ({"topic": "%a"}, "topic"),
    ({"topic": None}, "topic"),
    ({"body": "text"}, "body"),
    ({"body": bytes(MAX + 1)}, "body"),
    ({"tag": "a|b"}, "tag"),
    ({"keys": ["a", ""]}, "keys"),
    ({"unique_key": ""}, "unique_key"),
    ({"message_group": "é" * 32}, "message_group"),
    ({"message_group": b"x"}, "message_group"),
    ({"message_group": 10**70}, "message_group"),
    ({"properties": {"TAGS": "x"}}, "properties"),
    ({"properties": {f"p{i}": "x" for i in range(129)}}, "properties"),
    ({"properties": {"p": "x" * (1 << 14)}}, "properties"),
    ({"properties": {"p": "x" * ((1 << 14) - 4)}, "tag": "abcd"}, "properties"),
    ({"properties": {"p": "x" * ((1 << 14) - 4)}, "keys": ["ab", "cd"]}, "properties"),
    ({"properties": {"p": "é" * (1 << 13)}}, "properties"),
    ({"keys": "k" * ((1 << 14) + 1)}, "properties"),
    ({"unique_key": "u" * 32_767}, "properties"),
    ({"delay": "soon"}, "delay"),
    ({"delay": timedelta(days=367)}, "delay"),
    ({"deliver_at": math.nan}, "deliver_at"),
    ({"deliver_at": datetime(2030, 1, 1)}, "when"),
    ({"delay_level": -1}, "delay_level"),
    ({"message_group": "g", "deliver_at": 2e9}, "deliver_at"),
    ({"delay": 1, "delay_level": 1}, "delay_level"),
    ({"queue_id": 4}, "queue_id"),
    ({"flag": 1 << 31}, "flag"),
    ({"compressed": "snappy"}, "compressed"),
]


def _send_many(producer: Producer, topic: Any, body: Any, options: dict[str, Any]) -> Any:
    own = {name: options.pop(name) for name in ("queue_id",) if name in options}
    return producer.send_many(topic, [b"fine", OutgoingMessage(body, **options)], **own)


def _in_transaction(producer: Producer, topic: Any, body: Any, options: dict[str, Any]) -> Any:
    with producer.transaction() as tx:
        return tx.send(topic, body, **options)


WAYS: dict[str, Callable[[Producer, Any, Any, dict[str, Any]], Any]] = {
    "send": lambda producer, topic, body, options: producer.send(topic, body, **options),
    "send_oneway": lambda producer, topic, body, options: producer.send_oneway(topic, body, **options),
    "submit": lambda producer, topic, body, options: producer.submit(topic, body, **options),
    "send_many": _send_many,
    "transaction": _in_transaction,
}


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A bench that takes messages up to `MAX` bytes. It stays empty, so all refusals share it."""
    bench = Bench(tmp_path_factory.mktemp("limited") / "store", segment_bytes=1 << 20, max_message_size=MAX)
    yield bench
    bench.broker.close()


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
@pytest.mark.parametrize("way", WAYS)
def test_invalid_message_is_refused_and_not_stored(limited: Bench, way: str, hooked: bool) -> None:
    seen = Recorder()
    producer = limited.producer(interceptors=[seen] if hooked else [])
    for wrong, field in _BAD:
        given = {"topic": "orders", "body": b"x", **wrong}
        fields = [name for name in ("message_group", "delay", "deliver_at", "delay_level") if name in given]
        with pytest.raises(InvalidMessageError) as caught:
            WAYS[way](producer, given.pop("topic"), given.pop("body"), given)
        assert caught.value.field == (fields[0] if fields and way == "transaction" else field), wrong
    producer.flush()
    assert limited.sent() == []
    assert limited.broker.stats().open_transactions == 0
    assert [event for event in seen.events if event[0] == "after" and event[4] is None] == []
    producer.close()


_GOOD: list[dict[str, Any]] = [
    {"body": b""},
    {"body": bytes(MAX)},
    {"body": bytearray(b"x")},
    {"body": memoryview(b"x")},
    {"topic": "t" * 127},
    {"message_group": "g" * 63},
    {"message_group": "é" * 31},
    {"properties": {f"p{i}": "x" for i in range(128)}},
    {"properties": {"p": "x" * ((1 << 14) - 1)}},
    {"properties": {"p": "é" * ((1 << 13) - 1)}},
    {"keys": "k" * (1 << 14)},
    {"keys": []},
    {"queue_id": 3},
    {"flag": -(1 << 31)},
]


@pytest.mark.parametrize("way", [way for way in WAYS if way != "transaction"])
def test_a_message_at_the_limit_is_stored(bench: Bench, way: str) -> None:
    bench.again(max_message_size=MAX)
    producer = bench.producer()
    for fine in _GOOD:
        given = {"topic": "orders", "body": b"x", **fine}
        topic, body = given.pop("topic"), given.pop("body")
        stored = len(bench.sent(topic))
        WAYS[way](producer, topic, body, given)
        producer.flush()
        assert bytes(body) in bench.sent(topic)[stored:], fine


@pytest.mark.parametrize("way", WAYS)
def test_nobody_sends_to_a_topic_of_the_engine(bench: Bench, way: str) -> None:
    producer = bench.producer()
    for topic in ("SCHEDULE_TOPIC_XXXX", "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_mine", "%RETRY%g"):
        with pytest.raises(NotPermittedError):
            WAYS[way](producer, topic, b"x", {})


@pytest.mark.parametrize("way", WAYS)
def test_unknown_option_is_a_caller_error(bench: Bench, way: str) -> None:
    with pytest.raises(TypeError):
        WAYS[way](bench.producer(), "orders", b"x", {"colour": "red"})
    with pytest.raises(mqstore.MQStoreError):
        WAYS[way](bench.producer(), "orders", b"x", {"durability": "maybe"})
    assert bench.sent() == []


def test_read_only_queue_gets_no_message(bench: Bench) -> None:
    bench.broker.topics.create("orders", read_queues=4, write_queues=2)
    producer = bench.producer()

    with pytest.raises(InvalidMessageError):
        producer.send("orders", b"x", queue_id=2)

    assert {producer.send("orders", b"x").queue_id for _ in range(8)} == {0, 1}


def test_keys_that_can_be_read_only_once_are_stored(bench: Bench) -> None:
    seen = Recorder()
    for producer in (bench.producer(), bench.producer(interceptors=[seen]), bench.producer(compression="zlib")):
        producer.send("orders", b"x", keys=(key for key in ("a", "b")))
        producer.submit("orders", b"x", keys=(key for key in ("a", "b")))
        producer.send_many("orders", [b"x", b"y"], keys=(key for key in ("a", "b")))
        producer.flush()

    assert {message.keys for message in bench.stored()} == {("a", "b")}
    assert len(bench.stored()) == 12


def test_change_after_submit_has_no_effect(bench: Bench) -> None:
    producer = bench.producer()
    body, properties = bytearray(b"before"), {"p": "before"}

    producer.submit("orders", body, properties=properties)
    body[:], properties["p"] = b"after!", "after"
    producer.flush()

    [message] = bench.stored()
    assert (message.body, message.properties["p"]) == (b"before", "before")


def test_a_put_of_many_to_one_queue_refuses_what_it_cannot_do_for_one(bench: Bench) -> None:
    wishes: list[dict[str, Any]] = [
        {"topic": "others"},
        {"queue_id": 1},
        {"durability": "flush"},
        {"message_group": "g"},
        {"delay": 1},
        {"deliver_at": 2e9},
        {"delay_level": 1},
        {"compressed": "zlib"},
    ]
    for wish in wishes:
        for put_many in (bench.broker.put_many, bench.broker.store.put_many):
            with pytest.raises(InvalidMessageError) as caught:
                put_many("orders", [b"fine", OutgoingMessage(b"x", **wish)])
            assert caught.value.field == next(iter(wish))
    assert bench.sent() == []
    assert len(bench.broker.put_many("orders", [OutgoingMessage(b"x", topic="orders")])) == 1


# -- which queue (delivery#queue-choice) -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["send", "submit", "send_many", "hooked"])
def test_a_message_group_has_its_queue_whoever_puts(bench: Bench, way: str) -> None:
    """tests/broker/test_selection.py has which one."""
    bench.broker.topics.create("orders", queues=8)
    producer = bench.producer(interceptors=[Recorder()] if way == "hooked" else [])
    for group in ("order-1", "order-3", "4711", 4711):  # it may be a number
        expected = bench.broker.put("orders", b"x", message_group=str(group)).queue
        if way == "send_many":
            receipt = producer.send_many("orders", [b"before", OutgoingMessage(b"x", message_group=group)])[1]
        elif way == "submit":
            future = producer.submit("orders", b"x", message_group=group)
            producer.flush()
            receipt = future.result()
        else:
            receipt = producer.send("orders", b"x", message_group=group)
        assert receipt.queue == expected
        assert bench.broker.message_at(receipt).message_group == str(group)


def test_a_selector_decides_unless_a_queue_is_named(bench: Bench) -> None:
    asked: list[tuple[int, str | None]] = []

    def like_4x(queues: Any, group: str | None) -> QueueRef:
        asked.append((len(queues), group))
        return queues[6]  # type: ignore[no-any-return]

    bench.broker.topics.create("orders", queues=8)
    producer = bench.producer(selector=like_4x)

    assert producer.send("orders", b"x").queue_id == 6
    assert producer.send("orders", b"x", queue_id=5).queue_id == 5
    assert {receipt.queue_id for receipt in producer.send_many("orders", [b"x", b"y"])} == {6}
    assert asked == [(8, None), (8, None)]


def _third(queues: Any, group: str | None) -> Any:
    return queues[3]


_GROUP: dict[str, Any] = {"message_group": "g"}
TWO_CHOICES: dict[str, Callable[[Bench], object]] = {
    "send": lambda bench: bench.producer().send("orders", b"x", queue_id=3, **_GROUP),
    "send_oneway": lambda bench: bench.producer().send_oneway("orders", b"x", queue_id=3, **_GROUP),
    "submit": lambda bench: bench.producer().submit("orders", b"x", queue_id=3, **_GROUP),
    "send_many": lambda bench: bench.producer().send_many("orders", [OutgoingMessage(b"x", queue_id=3, **_GROUP)]),
    "send_many to a queue": lambda bench: bench.producer().send_many("orders", [b"x"], queue_id=3, **_GROUP),
    "send, selector": lambda bench: bench.producer().send("orders", b"x", selector=_third, **_GROUP),
    "submit, selector": lambda bench: bench.producer().submit("orders", b"x", selector=_third, **_GROUP),
    "selector of the producer": lambda bench: bench.producer(selector=_third).send("orders", b"x", **_GROUP),
    "a hook": lambda bench: bench.producer(interceptors=[Recorder(lambda message: replace(message, queue_id=3))]).send(
        "orders", b"x", **_GROUP
    ),
    "put": lambda bench: bench.broker.put("orders", b"x", queue_id=3, **_GROUP),
    "put_async": lambda bench: bench.broker.put_async("orders", b"x", queue_id=3, **_GROUP).result(0),
}


@pytest.mark.parametrize("way", TWO_CHOICES)
def test_a_message_group_excludes_another_choice_of_queue(bench: Bench, way: str) -> None:
    """The message went to the other queue, and the order of its group was lost without a word."""
    bench.broker.put("orders", b"first")  # so that compiled parts know the topic
    with pytest.raises(InvalidMessageError, match="message_group chooses the queue"):
        TWO_CHOICES[way](bench)
    assert bench.sent() == [b"first"]


@pytest.mark.parametrize("chosen", [None, 0, ("others", 0), QueueRef("orders", 4), QueueRef("orders", -1)], ids=str)
def test_a_selector_names_a_queue_of_the_topic(bench: Bench, chosen: Any) -> None:
    producer = bench.producer(selector=lambda queues, group: chosen)
    for way in WAYS.values():
        with pytest.raises(InvalidMessageError, match="selector"):
            way(producer, "orders", b"x", {})
    assert bench.sent() == []


# -- attempts (clients#send-retry) -------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["send", "submit", "hooked"])
@pytest.mark.parametrize(
    ("options", "attempts"),
    [
        ({}, 3),
        ({"message_group": "g"}, 3),
        ({"queue_id": 1}, 1),
        ({"selector": True}, 1),
        ({"retries": 0}, 1),
    ],
    ids=str,
)
def test_a_busy_store_is_asked_again_where_the_queue_is_free(
    bench: Bench, options: dict[str, Any], attempts: int, way: str
) -> None:
    options = dict(options)
    made: dict[str, Any] = {"interceptors": [Recorder()]} if way == "hooked" else {}
    if options.pop("selector", None):
        made["selector"] = lambda queues, group: queues[2]
    if "retries" in options:
        made["retries"] = options.pop("retries")
    put = Failing(bench.broker)
    producer = bench.producer(**made)

    for failures in range(5):
        put.errors, put.calls = deque(busy() for _ in range(failures)), []
        if way == "submit":
            future = producer.submit("orders", b"x", **options)
            producer.flush()
            stored = future.exception() is None
        else:
            try:
                producer.send("orders", b"x", **options)
                stored = True
            except StoreBusyError:
                stored = False
        assert stored == (failures < attempts)
        assert len(put.calls) == min(failures + 1, attempts)
        assert len({call["queue_id"] for call in put.calls}) == 1
        assert len({call["unique_key"] for call in put.calls}) == 1


def test_pauses_double_and_end_with_the_timeout(bench: Bench) -> None:
    Failing(bench.broker, *(busy() for _ in range(100)))
    producer = bench.producer(retries=100, timeout=3)
    pauses: list[float] = []

    def pause(duration_s: float) -> None:
        pauses.append(duration_s)
        bench.clock.advance(round(duration_s * 1000))

    producer._pause = pause

    with pytest.raises(StoreBusyError):
        producer.send("orders", b"x")

    # 10 ms doubled up to 1 s; what is left of the 3 s comes last.
    assert pauses == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, pytest.approx(0.73)]


@pytest.mark.parametrize(
    "error",
    [
        FlushTimeoutError("late"),
        FlushFailedError("failed"),
        no_room(),
        InvalidMessageError("bad", "body"),
        StoreClosedError("closed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_nothing_else_is_tried_again(bench: Bench, error: mqstore.MQStoreError) -> None:
    put = Failing(bench.broker, error)
    producer = bench.producer()

    with pytest.raises(type(error)):
        producer.send("orders", b"x")

    assert len(put.calls) == 1
    assert bench.sent() == []


def test_oneway_tries_once_and_logs_what_the_engine_says(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    put = Failing(bench.broker, busy(), no_room(), None, None)
    producer = bench.producer(durability="flush")

    for _ in range(3):
        producer.send_oneway("orders", b"x")
    producer.send_oneway("orders", b"x", durability="flush")

    assert [call["durability"] for call in put.calls] == ["append", "append", "append", "flush"]
    assert bench.sent() == [b"x", b"x"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


# -- identity (clients#unique-key) -------------------------------------------------------------------------------------


def test_unique_keys_are_unique(bench: Bench) -> None:
    producer = bench.producer()
    producer.send("orders", b"x")
    producer.send_oneway("orders", b"x")
    producer.submit("orders", b"x")
    producer.send_many("orders", [b"x", OutgoingMessage(b"x", tag="t"), OutgoingMessage(b"x", message_group="g")])
    producer.flush()
    with producer.transaction() as tx:
        known = {tx.send("orders", b"x"), tx.send("orders", b"x")}

    keys = {message.unique_key for message in bench.stored()}

    assert len(keys) == 8
    assert known < keys
    assert all(len(key) == 34 and key.startswith("01") for key in keys)
    assert bench.broker.store.find("orders", unique_key=known.pop())


def test_a_unique_key_that_the_caller_gives_is_kept(bench: Bench) -> None:
    producer = bench.producer()
    assert producer.send("orders", b"x", unique_key="a").unique_key == "a"
    future = producer.submit("orders", b"x", unique_key="b")
    producer.flush()
    assert future.result().unique_key == "b"
    [receipt] = producer.send_many("orders", [OutgoingMessage(b"x", unique_key="c")])
    assert receipt.unique_key == "c"
    with producer.transaction() as tx:
        assert tx.send("orders", b"x", unique_key="d") == "d"
    assert [message.unique_key for message in bench.stored()] == ["a", "b", "c", "d"]
    with pytest.raises(InvalidMessageError, match="names one message"):
        producer.send_many("orders", [b"x", b"y"], unique_key="e")


# -- compression (clients#compression) ---------------------------------------------------------------------------------


def is_compressed(message: Message) -> bool:
    if not message.sys_flag & COMPRESSED:
        return False
    assert message.sys_flag & COMPRESSION_TYPE_MASK == COMPRESSION_ZLIB  # what a Java client knows, and inflates
    return True


@pytest.mark.parametrize(
    ("body", "small"),
    [(bytes(4095), False), (bytes(4096), True), (random.Random(1).randbytes(8192), False), (b"", False)],
    ids=["4095", "4096", "noise", "empty"],
)
@pytest.mark.parametrize("way", ["send", "send_oneway", "submit", "hooked", "transaction", "delayed"])
def test_large_bodies_are_stored_compressed_and_read_as_they_were(
    bench: Bench, body: bytes, small: bool, way: str
) -> None:
    producer = bench.producer(compression="zlib", interceptors=[Recorder()] if way == "hooked" else [])
    if way == "delayed":
        producer.send("orders", bytearray(body), delay=5)
        bench.advance(7_000)
    else:
        WAYS["send" if way == "hooked" else way](producer, "orders", bytearray(body), {})
        producer.flush()

    [message] = bench.stored()
    assert message.body == body
    assert is_compressed(message) == small
    assert (zlib.decompress(message.body_view) if small else bytes(message.body_view)) == body
    [delivery] = bench.broker.pop("billing", "orders")
    assert delivery.message.body == body


@given(noise=st.integers(0, 400), zeros=st.integers(0, 400), over=st.integers(0, 300))
def test_a_body_is_kept_raw_unless_that_saves_a_twentieth(bench: Bench, noise: int, zeros: int, over: int) -> None:
    body = random.Random(noise).randbytes(noise) + bytes(zeros)
    receipt = bench.producer(compression="zlib", compress_over=over).send("orders", body)

    message = bench.broker.store.at(receipt.physical_offset)
    deflated = len(zlib.compress(body, 5))
    assert is_compressed(message) == (len(body) >= over and deflated <= 0.95 * len(body))
    assert message.body == body


def test_the_limit_of_a_body_is_that_of_the_body_and_batches_stay_raw(bench: Bench) -> None:
    bench.again(max_message_size=10_000)
    producer = bench.producer(compression="zlib")

    for way in WAYS.values():
        with pytest.raises(InvalidMessageError, match="10001 bytes"):
            way(producer, "orders", bytes(10_001), {})
    producer.send_many("orders", [bytes(10_000), OutgoingMessage(bytes(9_999), message_group="g")])

    assert [is_compressed(message) for message in bench.stored()] == [False, False]


def test_compressed_body_is_not_compressed_again(bench: Bench) -> None:
    producer = bench.producer(compression="zlib", compress_over=0)
    squeezed = zlib.compress(bytes(9000))
    producer.send("orders", squeezed, compressed="zlib")
    producer.send_many("orders", [OutgoingMessage(squeezed, compressed="zlib"), b"plain"])
    with producer.transaction() as tx:
        tx.send("orders", squeezed, compressed="zlib")

    assert bench.sent() == [bytes(9000), bytes(9000), b"plain", bytes(9000)]


# -- hooks (clients#interceptors) --------------------------------------------------------------------------------------


class Recorder(Interceptor):
    """Notes what it is told; changes what `change` says."""

    def __init__(self, change: Callable[[OutgoingMessage], Any] = lambda message: message, name: str = "") -> None:
        self.change = change
        self.name = name
        self.events: list[tuple[Any, ...]] = []

    def before_send(self, message: OutgoingMessage) -> OutgoingMessage:
        self.events.append(("before", self.name, message))
        return self.change(message)  # type: ignore[no-any-return]

    def after_send(self, message: OutgoingMessage, receipt: SendReceipt | None, error: BaseException | None) -> None:
        self.events.append(("after", self.name, message, receipt, error))

    @property
    def after(self) -> list[tuple[OutgoingMessage, SendReceipt | None, BaseException | None]]:
        return [event[2:] for event in self.events if event[0] == "after"]


@pytest.mark.parametrize("way", WAYS)
def test_hooks_run_in_order_and_see_the_message_as_it_is_meant(bench: Bench, way: str) -> None:
    events: list[tuple[Any, ...]] = []
    first = Recorder(lambda message: replace(message, tag="first"), "1")
    second = Recorder(lambda message: replace(message, body=bytes(message.body) + b"+2"), "2")
    first.events = second.events = events
    producer = bench.producer(interceptors=[first, second], compression="zlib", compress_over=0)

    WAYS[way](producer, "orders", bytes(5000), {"keys": "k"})
    producer.flush()

    message = bench.stored()[-1]
    assert (message.body, message.tag, message.keys) == (bytes(5000) + b"+2", "first", ("k",))
    mine = [event for event in events if event[2].body != b"fine" and event[2].body != b"fine+2"]
    assert [event[:2] for event in mine] == [("before", "1"), ("before", "2"), ("after", "1"), ("after", "2")]
    before, changed, after, _ = (event[2] for event in mine)
    assert (before.topic, before.body, before.tag, before.keys) == (
        "orders",
        bytes(5000),
        None,
        ("k",) if isinstance(before.keys, tuple) else "k",
    )
    assert before.unique_key == changed.unique_key == after.unique_key == message.unique_key
    assert changed.tag == "first"
    assert (after.body, after.compressed) == (bytes(5000) + b"+2", None)
    receipt = mine[-1][3]
    assert (receipt.physical_offset, mine[-1][4]) == (message.physical_offset, None)


@pytest.mark.parametrize("way", WAYS)
def test_a_veto_reaches_the_sender_and_nothing_is_sent(bench: Bench, way: str) -> None:
    class Forbidden(Exception):  # noqa: N818
        pass

    def veto(message: OutgoingMessage) -> OutgoingMessage:
        raise Forbidden

    seen = Recorder()
    producer = bench.producer(interceptors=[seen, Recorder(veto)])

    with pytest.raises(Forbidden):
        WAYS[way](producer, "orders", b"x", {})

    producer.flush()
    assert bench.sent() == []
    _, receipt, error = seen.after[-1]
    assert (receipt, type(error)) == (None, Forbidden)


def test_message_changed_by_a_hook_is_checked(bench: Bench) -> None:
    def changing(**changes: Any) -> Producer:
        return bench.producer(interceptors=[Recorder(lambda message: replace(message, **changes))])

    assert changing(topic="others").send("orders", b"x").topic == "others"
    assert changing(queue_id=2).send("orders", b"x").queue_id == 2
    assert changing(message_group="order-3").send("orders", b"x").queue_id == 3
    assert changing(delay=60).send("orders", b"x").recall_handle is not None
    assert changing(unique_key=None).send("orders", b"x").unique_key.startswith("01")
    for changes in ({"body": None}, {"tag": "a|b"}, {"queue_id": 4}, {"delay": -1}):
        before = len(bench.stored())
        with pytest.raises(InvalidMessageError):
            changing(**changes).send("orders", b"x")
        with pytest.raises(InvalidMessageError):
            changing(**changes).submit("orders", b"x")  # at once, not in the future
        assert len(bench.stored()) == before
    for wrong in (None, b"x"):
        with pytest.raises(TypeError, match="has to return the message"):
            bench.producer(interceptors=[Recorder(lambda message, wrong=wrong: wrong)]).send("orders", b"x")  # type: ignore[misc]
    with pytest.raises(InvalidMessageError, match="transaction"), changing(delay=1).transaction() as tx:
        tx.send("orders", b"x")


def test_after_send_sees_failures_and_successes(bench: Bench) -> None:
    seen = Recorder()
    receipt = bench.broker.put("others", b"x")
    Failing(bench.broker, no_room(), FlushTimeoutError("late", receipt), no_room())
    producer = bench.producer(interceptors=[seen])

    for _ in range(2):
        with pytest.raises(mqstore.errors.SendError):
            producer.send("orders", b"x")
    future = producer.submit("orders", b"x")
    producer.flush()

    assert [(r, type(e)) for _, r, e in seen.after] == [
        (None, StoreFullError),
        (receipt, FlushTimeoutError),
        (None, StoreFullError),
    ]
    assert isinstance(future.exception(), StoreFullError)


def test_an_after_send_that_fails_is_logged_and_changes_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def bad(*_: object) -> None:
        raise RuntimeError("in the hook")

    seen = Recorder()
    producer = bench.producer(interceptors=[hook(after_send=bad), seen])

    producer.send("orders", b"x")

    assert bench.sent() == [b"x"]
    assert len(seen.after) == 1
    assert "in the hook" in caplog.text


# -- many (format#batch) -----------------------------------------------------------------------------------------------


def test_batches_rotate_over_queues(bench: Bench) -> None:
    producer = bench.producer()

    batches = [producer.send_many("orders", [b"%d" % i for i in range(4)]) for _ in range(8)]

    for batch in batches:
        assert len({receipt.queue for receipt in batch}) == 1
        assert [receipt.offset for receipt in batch] == list(range(batch[0].offset, batch[0].offset + 4))
    queues = [batch[0].queue_id for batch in batches]
    assert queues == [(queues[0] + i) % 4 for i in range(8)]
    assert list(producer.send_many("orders", [])) == []


_ITEM = st.fixed_dictionaries(
    {},
    optional={
        "topic": st.sampled_from(["orders", "others"]),
        "queue_id": st.integers(0, 3),
        "tag": st.sampled_from("ab"),
        "routing": st.sampled_from([{"message_group": "g"}, {"message_group": "h"}, {"delay_level": 1}]),
        "bare": st.booleans(),
    },
)


@given(items=st.lists(_ITEM, max_size=12), hooked=st.booleans(), queue_id=st.none() | st.integers(0, 3))
def test_many_of_any_kind_lie_in_the_order_given(
    bench: Bench, items: list[dict[str, Any]], hooked: bool, queue_id: int | None
) -> None:
    bodies: list[bytes | OutgoingMessage] = []
    for i, item in enumerate(items):
        body = b"%d" % i
        if item.pop("bare", False):
            item.clear()
            bodies.append(body)
        else:
            routing = item.pop("routing", {})
            if queue_id is not None or item.get("queue_id") is not None:
                routing.pop("message_group", None)  # it chooses the queue itself
            bodies.append(OutgoingMessage(body, **routing, **item))
    producer = bench.producer(interceptors=[Recorder()] if hooked else [])

    receipts = producer.send_many("orders", iter(bodies), queue_id=queue_id)

    stored = [bench.broker.store.at(receipt.physical_offset) for receipt in receipts]
    assert [message.body for message in stored] == [b"%d" % i for i in range(len(items))]
    offsets = [receipt.physical_offset for receipt in receipts]
    assert offsets == sorted(offsets)
    assert [m.tag for m in stored] == [getattr(b, "tag", None) for b in bodies]
    free: dict[str, set[int]] = {}
    for sent, receipt in zip(bodies, receipts, strict=True):
        asked = sent if isinstance(sent, OutgoingMessage) else OutgoingMessage(sent)
        where = asked.queue_id if asked.queue_id is not None else queue_id
        if asked.delay_level:
            continue
        assert receipt.topic == (asked.topic or "orders")
        if where is not None:
            assert receipt.queue_id == where
        elif asked.message_group is None:
            free.setdefault(receipt.topic, set()).add(receipt.queue_id)
    assert all(len(queues) == 1 for queues in free.values())


def test_options_of_the_call_hold_where_a_message_has_none_of_its_own(bench: Bench) -> None:
    bench.producer().send_many("orders", [b"1", OutgoingMessage(b"2", tag="own")], tag="all", keys="k", queue_id=0)

    assert [(message.tag, message.keys) for message in bench.stored()] == [("all", ("k",)), ("own", ("k",))]


def test_partial_batch_failure_names_the_stored(bench: Bench) -> None:
    seen = Recorder()
    Failing(bench.broker, no_room())
    producer = bench.producer(interceptors=[seen])
    items: list[bytes | OutgoingMessage] = [b"0", b"1", OutgoingMessage(b"2", message_group="g"), b"3"]

    with pytest.raises(StoreFullError) as caught:
        producer.send_many("orders", items)

    assert bench.sent() == [b"0", b"1"]
    assert [bench.broker.store.at(r.physical_offset).body for r in caught.value.receipts] == [b"0", b"1"]  # type: ignore[attr-defined]
    assert [(m.body, r is not None, type(e)) for m, r, e in seen.after] == [
        (b"0", True, type(None)),
        (b"1", True, type(None)),
        (b"2", False, StoreFullError),
        (b"3", False, StoreFullError),
    ]


def test_many_that_met_a_busy_store_half_way_are_not_stored_twice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_many = bench.broker.put_many
    left = [2, 1]

    def half(topic: str, bodies: list[Any], **options: Any) -> Any:
        if not left:
            return put_many(topic, bodies, **options)
        error = busy()
        error.receipts = put_many(topic, bodies[: left.pop()], **options)
        raise error

    monkeypatch.setattr(bench.broker, "put_many", half)
    receipts = bench.producer().send_many("orders", [b"%d" % i for i in range(6)])

    assert bench.sent() == [b"%d" % i for i in range(6)]
    assert [receipt.offset for receipt in receipts] == list(range(6))
    assert left == []


class Syncs(FaultyFileSystem):
    """Counts the syncs of the log since `made` was called last."""

    seen = 0

    def made(self) -> int:
        before, self.seen = self.seen, sum(c.operation == "fdatasync" and "commitlog" in c.path for c in self.calls)
        return self.seen - before


@pytest.fixture
def syncs() -> Syncs:
    return Syncs()


@pytest.fixture
def flushing(tmp_path: Path, syncs: Syncs) -> Iterator[Producer]:
    """A producer that waits for the disk, behind the first message of a segment."""
    with open_broker(tmp_path / "s", fs=syncs, segment_bytes=1 << 20) as broker:
        producer = Producer(broker, durability="flush")
        producer.send("orders", b"first of its segment")
        syncs.made()
        yield producer


def test_many_share_one_sync_whatever_they_are(flushing: Producer, syncs: Syncs) -> None:
    flushing.send_many("orders", [b"x", OutgoingMessage(b"y", message_group="g"), b"z"])
    assert syncs.made() == 1
    flushing.send_many("orders", [b"x", b"y"], durability="append")
    assert syncs.made() == 0
    for _ in range(3):
        flushing.send("orders", b"x")
    assert syncs.made() == 3


# -- later (clients#submit) --------------------------------------------------------------------------------------------


def test_each_thread_s_submits_keep_their_order(broker: Broker) -> None:
    producer = Producer(broker, max_inflight=7, max_inflight_bytes=2000)

    def work(me: int) -> None:
        for i in range(400):
            producer.submit(
                "orders", b"%d %d" % (me, i), message_group=f"g{me}", properties={"pad": "x" * (i % 50 + 1)}
            )

    threads = [in_thread(lambda me=me: work(me)) for me in range(4)]  # type: ignore[misc]
    for thread, outcome in threads:
        assert ended(thread, outcome) is None
    producer.close()

    lines = [
        tuple(map(int, m.body.split())) for m in sorted(broker.store.iter("orders"), key=lambda m: m.physical_offset)
    ]
    for me in range(4):
        assert [i for who, i in lines if who == me] == list(range(400))


@pytest.mark.parametrize("bound", [{"max_inflight": 3}, {"max_inflight_bytes": 30}], ids=str)
def test_submit_blocks_when_so_much_is_in_flight_and_not_before(broker: Broker, bound: dict[str, Any]) -> None:
    gate = Gate(broker)
    producer = Producer(broker, **bound)
    for _ in range(3):
        producer.submit("orders", bytes(10))
    assert gate.arrived.wait(WAIT_S)

    thread, outcome = in_thread(lambda: producer.submit("orders", bytes(10)))
    thread.join(0.2)
    assert thread.is_alive()
    gate.opened.set()
    future = ended(thread, outcome)

    assert future.result(WAIT_S).offset >= 0
    producer.close()
    assert len(list(broker.store.iter("orders"))) == 4


def test_close_while_others_submit_and_wait_for_room(broker: Broker) -> None:
    gate = Gate(broker)
    producer = Producer(broker, max_inflight=4)
    accepted: list[Future[SendReceipt]] = []

    def work() -> None:
        while True:
            accepted.append(producer.submit("orders", b"x"))

    threads = [in_thread(work) for _ in range(4)]
    assert gate.arrived.wait(WAIT_S)
    until(lambda: len(accepted) == 4)
    closer = in_thread(producer.close)
    for thread, outcome in threads:
        assert isinstance(ended(thread, outcome), StoreClosedError)  # though nothing moves yet
    gate.opened.set()
    ended(*closer)

    assert len(accepted) == 4
    assert [future.result(0).topic for future in accepted] == ["orders"] * 4  # close waited for them


def test_close_fails_unstored_messages(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    seen = Recorder()
    gate = Gate(broker)
    producer = Producer(broker, interceptors=[seen])
    first = producer.submit("orders", b"stuck")
    assert gate.arrived.wait(WAIT_S)
    others = [producer.submit("orders", b"%d" % i) for i in range(3)]
    others[1].cancel()

    producer.close(timeout=0.05)

    assert isinstance(others[0].exception(0), StoreClosedError)
    assert others[1].cancelled()
    assert isinstance(others[2].exception(0), StoreClosedError)
    assert "3 submitted messages were not stored" in caplog.text
    assert not first.done()
    gate.opened.set()
    assert first.result(WAIT_S).offset == 0
    assert len(seen.after) == 4


def test_a_future_that_was_cancelled_in_time_is_not_stored(bench: Bench) -> None:
    seen = Recorder()
    producer = bench.producer(interceptors=[seen])
    futures = [producer.submit("orders", b"%d" % i) for i in range(3)]
    assert futures[1].cancel()

    producer.flush()

    assert bench.sent() == [b"0", b"2"]
    assert [(m.body, r is None, type(e)) for m, r, e in seen.after] == [
        (b"0", False, type(None)),
        (b"1", True, CancelledError),
        (b"2", False, type(None)),
    ]


def test_failed_message_fails_alone(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    put = Failing(bench.broker, None, no_room(), None)
    producer = bench.producer()

    futures = [producer.submit("orders", b"%d" % i) for i in range(3)]
    producer.flush()

    assert bench.sent() == [b"0", b"2"]
    assert [type(future.exception()) for future in futures] == [type(None), StoreFullError, type(None)]
    assert "1 submitted messages failed" in caplog.text
    caplog.clear()
    put.errors += [no_room(), no_room()]
    for wait_ms, told in ((9_999, False), (1, True)):
        bench.clock.advance(wait_ms)
        producer.submit("orders", b"x")
        producer.flush()
        assert bool(caplog.text) == told


def test_a_callback_that_calls_exit_ends_nothing_but_itself(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    """It ended the writer: what was submitted afterwards was never stored, and its futures were never answered."""
    with Producer(broker, linger=0.05) as producer:
        futures = [producer.submit("orders", b"0"), producer.submit("orders", b"1")]
        futures[0].add_done_callback(lambda done: sys.exit(1))
        producer.flush(20)
        futures.append(producer.submit("orders", b"2"))
        assert [future.result(20).topic for future in futures] == ["orders"] * 3
    assert "the writer continues" in caplog.text


def test_an_after_send_that_calls_exit_leaves_no_future_unanswered(broker: Broker) -> None:
    def exits(message: OutgoingMessage, receipt: Any, error: Any) -> None:
        if message.body == b"0":
            sys.exit(1)

    with Producer(broker, interceptors=[hook(after_send=exits)]) as producer:
        futures = [producer.submit("orders", b"%d" % i) for i in range(2)]
        assert [future.result(20).topic for future in futures] == ["orders"] * 2


def test_failed_sync_of_a_batch_reaches_each_waiter(flushing: Producer, syncs: Syncs) -> None:
    futures = [flushing.submit("orders", b"x") for _ in range(5)]
    assert not any(future.done() for future in futures)
    flushing.flush()
    assert syncs.made() == 1
    assert all(future.result().offset >= 0 for future in futures)

    syncs.fail("fdatasync", errno.EIO, path_part="commitlog")
    seen = [flushing.submit("orders", b"x") for _ in range(3)]
    hasty = flushing.submit("orders", b"x", durability="append")
    flushing.flush()

    errors = [future.exception() for future in seen]
    assert [type(error) for error in errors] == [FlushFailedError] * 3
    assert len({id(error) for error in errors}) == 3
    assert len({id(error.__cause__) for error in errors if error}) == 1
    assert hasty.result(0)  # it was promised no more than the page cache
    with pytest.raises(mqstore.MQStoreError):
        flushing.send("orders", b"x")


def test_late_sync_gives_each_waiter_its_receipt(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = bench.producer(durability="flush")
    monkeypatch.setattr(bench.broker.store, "flush", late)
    futures = [producer.submit("orders", b"%d" % i) for i in range(3)]
    producer.flush()

    for i, future in enumerate(futures):
        error = future.exception()
        assert isinstance(error, FlushTimeoutError)
        assert isinstance(error.receipt, SendReceipt)
        assert bench.broker.store.at(error.receipt.physical_offset).body == b"%d" % i
    with pytest.raises(FlushTimeoutError) as caught:
        producer.send_many("orders", [b"a", OutgoingMessage(b"b", message_group="g")])
    assert len(caught.value.receipts) == 2


@pytest.mark.parametrize(
    ("of_store", "of_producer", "waits"),
    [("flush", None, True), ("flush", "append", False), ("append", "flush", True), ("append", None, False)],
)
def test_the_durability_is_the_producer_s_else_the_store_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_store: Any, of_producer: Any, waits: bool
) -> None:
    with open_broker(tmp_path / "s", durability=of_store, segment_bytes=1 << 20) as broker:
        producer = Producer(broker, durability=of_producer)
        with monkeypatch.context() as patch:
            patch.setattr(broker.store, "flush", late)
            future = producer.submit("orders", b"x")
            producer.flush()
        assert isinstance(future.exception(), FlushTimeoutError) == waits


def test_linger_gathers_for_so_long_or_so_many_bytes(bench: Bench) -> None:
    producer = bench.producer(linger=0.05, linger_bytes=100)

    producer.submit("orders", bytes(40))
    now_ms = bench.clock.now_ms()
    assert producer.run_once() == now_ms + 50
    bench.clock.advance(30)
    producer.submit("orders", bytes(40))
    assert producer.run_once() == now_ms + 50  # the oldest counts
    bench.clock.advance(19)
    assert producer.run_once() == now_ms + 50
    assert bench.sent() == []
    bench.clock.advance(1)
    assert producer.run_once() is None
    assert len(bench.sent()) == 2

    producer.submit("orders", bytes(60))
    assert producer.run_once() is not None
    producer.submit("orders", bytes(40))
    assert producer.run_once() is None
    assert len(bench.sent()) == 4

    producer.submit("orders", b"")
    producer.flush()
    assert len(bench.sent()) == 5
    producer.submit("orders", b"")
    producer.close()
    assert len(bench.sent()) == 6


def test_nothing_lingers_when_the_line_is_full(bench: Bench) -> None:
    producer = bench.producer(linger=30, max_inflight=2)
    for _ in range(5):
        producer.submit("orders", b"x")
    assert len(bench.sent()) >= 3
    producer.close()
    assert len(bench.sent()) == 5


def test_linger_ends_in_real_time_without_anybody_s_help(broker: Broker) -> None:
    with Producer(broker, linger=0.01, durability="flush") as producer:
        futures = [producer.submit("orders", b"x") for _ in range(3)]
        assert [future.result(WAIT_S).size > 0 for future in futures] == [True] * 3


def test_a_flush_that_takes_too_long_says_so_and_nothing_is_lost(broker: Broker) -> None:
    gate = Gate(broker)
    producer = Producer(broker)
    future = producer.submit("orders", b"x")

    with pytest.raises(FlushTimeoutError):
        producer.flush(timeout=0.05)
    assert isinstance(future, Future)
    assert not future.done()
    gate.opened.set()
    producer.flush(timeout=WAIT_S)
    assert future.done()
    producer.close()


def test_a_callback_of_a_future_may_submit_and_flush(broker: Broker) -> None:
    with Producer(broker, max_inflight=1) as producer:
        more: list[Future[SendReceipt]] = []
        refused: list[FlushTimeoutError] = []

        def follow(future: Future[SendReceipt]) -> None:
            more.append(producer.submit("orders", b"second", queue_id=0))
            more.append(producer.submit("orders", b"third", queue_id=0))
            try:
                producer.flush()
            except FlushTimeoutError as error:  # it would wait for itself
                refused.append(error)

        producer.submit("orders", b"first", queue_id=0).add_done_callback(follow)
        producer.flush(timeout=WAIT_S)
    assert len(refused) == 1
    assert [future.result(0).offset for future in more] == [1, 2]
    assert [m.body for m in broker.store.iter("orders", 0)] == [b"first", b"second", b"third"]


def test_an_idle_writer_ends_and_another_begins(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqstore.client.send.submitter._IDLE_S", 0.01)
    with Producer(broker) as producer:
        producer.submit("orders", b"x").result(WAIT_S)
        for thread in threading.enumerate():
            if thread.name.startswith("mqstore-submit"):
                thread.join(WAIT_S)
                assert not thread.is_alive()
        producer.submit("orders", b"x").result(WAIT_S)


def test_a_store_that_is_closed_first_fails_what_was_submitted(tmp_path: Path) -> None:
    store = mqstore.open(tmp_path / "s")
    producer = Producer(store.broker, linger=30)
    future = producer.submit("orders", b"x")
    store.close()
    with pytest.raises(StoreClosedError):
        producer.submit("orders", b"x")
    producer.close()
    assert isinstance(future.exception(0), StoreClosedError)


def test_a_submit_that_found_the_producer_open_is_not_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread closed it meanwhile: the future would never be answered."""
    monkeypatch.setattr(Producer, "_check_open", lambda producer: None)
    producer = bench.producer()
    producer.close()
    with pytest.raises(StoreClosedError):
        producer.submit("orders", b"x")


# -- transactions (clients#transaction) --------------------------------------------------------------------------------


def test_messages_of_a_transaction_are_seen_when_its_block_ends_well(bench: Bench) -> None:
    seen = Recorder()
    producer = bench.producer(interceptors=[seen])
    with producer.transaction() as tx:
        tx.send("orders", b"paid", tag="t", keys="k", properties={"p": "v"}, flag=7, queue_id=2)
        tx.send("others", b"booked")
        assert bench.sent() == bench.sent("others") == []
        assert seen.after == []

    [paid] = bench.stored()
    assert (paid.body, paid.tag, paid.keys, paid.flag, paid.queue) == (b"paid", "t", ("k",), 7, ("orders", 2))
    assert dict(paid.properties) == {"p": "v"}
    assert bench.sent("others") == [b"booked"]
    assert [receipt.topic for receipt in tx.receipts if receipt] == ["orders", "others"]
    assert [(m.body, r) for m, r, _ in seen.after] == [(b"paid", tx.receipts[0]), (b"booked", tx.receipts[1])]
    assert bench.broker.stats().open_transactions == 0


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_rolls_all_of_them_back(bench: Bench, error: type[BaseException]) -> None:
    seen = Recorder()
    producer = bench.producer(interceptors=[seen], checker=lambda message: True)

    with pytest.raises(error), producer.transaction() as tx:  # noqa: PT012
        tx.send("orders", b"paid")
        tx.send("orders", b"booked")
        raise error
    bench.advance(CHECK_MS + AGAIN_MS)

    assert bench.sent() == []
    assert bench.broker.stats().open_transactions == 0
    assert [(r, type(e)) for _, r, e in seen.after] == [(None, error)] * 2


def test_a_transaction_is_one_block(bench: Bench) -> None:
    tx = bench.producer().transaction()
    with pytest.raises(TransactionStateError):
        tx.send("orders", b"too early")
    with tx:
        tx.send("orders", b"in time")
    with pytest.raises(TransactionStateError):
        tx.send("orders", b"too late")
    with pytest.raises(TransactionStateError), tx:
        pass
    assert bench.sent() == [b"in time"]


def test_nobody_is_asked_about_a_block_that_is_still_running(bench: Bench) -> None:
    asked: list[bytes] = []

    def checker(message: Message) -> bool:
        asked.append(message.body)
        return False  # it looks into a database that does not know yet

    producer = bench.producer(checker=checker)
    with producer.transaction() as tx:
        tx.send("orders", b"paid")
        bench.advance(40 * AGAIN_MS)  # far longer than all 15 questions
    assert asked == []
    assert bench.sent() == [b"paid"]


def crashed_inside(bench: Bench) -> None:
    """Reopen the store as after a process that died within two transactions."""
    producer = bench.producer()
    for body in (b"paid", b"unpaid"):
        tx = producer.transaction()
        tx.__enter__()
        tx.send("orders", body)
    bench.again()


def test_after_a_crash_the_checker_decides(bench: Bench) -> None:
    crashed_inside(bench)
    assert bench.broker.stats().open_transactions == 2

    with bench.producer(checker=lambda message: message.body == b"paid"):
        bench.advance(CHECK_MS)

    assert bench.sent() == [b"paid"]
    assert bench.broker.stats().open_transactions == 0


def test_without_a_checker_they_are_given_up_after_15_questions(bench: Bench) -> None:
    crashed_inside(bench)
    bench.advance(CHECK_MS + 20 * AGAIN_MS)
    assert bench.broker.stats().open_transactions == 2  # there is nobody of the group

    producer = bench.producer()
    with producer.transaction():
        pass
    bench.advance(14 * AGAIN_MS)
    assert bench.broker.stats().open_transactions == 2
    bench.advance(3 * AGAIN_MS)
    assert bench.broker.stats().open_transactions == 0
    assert bench.sent() == []


def test_only_a_producer_of_the_group_that_is_open_is_asked(bench: Bench) -> None:
    crashed_inside(bench)
    asked: list[str] = []

    def checker(name: str) -> Callable[[Message], bool | None]:
        return lambda message: asked.append(name)

    elder, younger = (bench.producer(checker=checker(name)) for name in ("elder", "younger"))
    bench.producer(checker=checker("foreign"), group="another")
    bench.producer()  # of the group, without a checker
    bench.advance(CHECK_MS)
    younger.close()
    bench.advance(AGAIN_MS)
    elder.close()
    bench.advance(3 * AGAIN_MS)

    assert asked == ["younger"] * 2 + ["elder"] * 2


def test_commit_without_room_is_repeated(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    bench = Bench(tmp_path / "store", fs=fs, segment_bytes=4096, max_message_size=3000)
    producer = bench.producer(checker=lambda message: False)
    tx = producer.transaction()

    with pytest.raises(StoreFullError) as caught, tx:  # noqa: PT012
        for i in range(3):
            tx.send("orders", bytes([i]) * 1000, queue_id=0)
        fs.fail("allocate", errno.ENOSPC, times=None)
    stored = [receipt for receipt in tx.receipts if receipt]
    assert len(stored) < 3
    assert list(caught.value.receipts) == stored
    producer.close()  # what was decided is known all the same

    fs.heal()
    bench.advance(CHECK_MS + AGAIN_MS)

    assert sorted(bench.sent()) == [bytes([i]) * 1000 for i in range(3)]
    assert bench.broker.stats().open_transactions == 0
    bench.broker.close()


def test_a_rollback_that_fails_is_logged_and_the_cause_reaches_the_caller(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producer = bench.producer(checker=lambda message: True)
    end = bench.broker.transactions.end

    with pytest.raises(ValueError, match="mine"), producer.transaction() as tx:  # noqa: PT012
        tx.send("orders", b"x")
        monkeypatch.setattr(bench.broker.transactions, "end", support.full)
        raise ValueError("mine")
    assert "could not be rolled back yet" in caplog.text
    monkeypatch.setattr(bench.broker.transactions, "end", end)
    bench.advance(CHECK_MS + AGAIN_MS)
    assert bench.sent() == []
    assert bench.broker.stats().open_transactions == 0


def test_a_ctrl_c_between_two_commits_leaves_none_undecided(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = bench.producer(checker=lambda message: False)
    end = failing(bench.broker.transactions.end, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt), producer.transaction() as tx:  # noqa: PT012
        tx.send("orders", b"1")
        tx.send("orders", b"2")
        monkeypatch.setattr(bench.broker.transactions, "end", end)
    bench.advance(CHECK_MS + AGAIN_MS)

    assert sorted(bench.sent()) == [b"1", b"2"]


def test_a_half_that_cannot_be_stored_leaves_nothing_behind(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Recorder()
    producer = bench.producer(interceptors=[seen])
    prepare = failing(bench.broker.transactions.prepare, busy(), busy(), None, no_room())
    monkeypatch.setattr(bench.broker.transactions, "prepare", prepare)
    with producer.transaction() as tx:
        tx.send("orders", b"third time lucky")
        with pytest.raises(StoreFullError):
            tx.send("orders", b"no")

    assert bench.sent() == [b"third time lucky"]
    assert {(m.body, r is None) for m, r, _ in seen.after} == {(b"third time lucky", False), (b"no", True)}


def test_transaction_waits_for_its_durability(flushing: Producer, syncs: Syncs) -> None:
    with flushing.transaction() as tx:
        tx.send("orders", b"x")
        tx.send("orders", b"y")
        assert syncs.made() == 2  # a half must be known before the work begins
    assert syncs.made() == 1
    with pytest.raises(ValueError, match="mine"), flushing.transaction() as tx:  # noqa: PT012
        tx.send("orders", b"z")
        syncs.made()
        raise ValueError("mine")
    assert syncs.made() == 1, "a rollback that a power cut takes back could become a commit"


@pytest.mark.parametrize(
    ("answers", "raises", "sent", "open_after"),
    [
        ((True, True), True, 2, 0),
        ((True, False), TransactionStateError, 0, 2),
        ((True, None), TransactionStateError, 0, 2),
        ((ValueError("database gone"),), ValueError, 0, 2),
    ],
    ids=str,
)
def test_a_block_that_is_checked_ends_by_the_checkers_answers(
    bench: Bench, answers: Any, raises: Any, sent: int, open_after: int
) -> None:
    """SQLAlchemy's `with Session()` does not commit: the message was sent all the same, and nobody was asked."""
    said = list(answers)

    def committed(message: Message) -> Any:
        answer = said.pop(0) if said else True
        if isinstance(answer, Exception):
            raise answer
        return answer

    with bench.producer(checker=committed) as producer:
        tx = producer.transaction(check=True)
        with nullcontext() if raises is True else pytest.raises(raises), tx:
            tx.send("orders", b"x")
            tx.send("orders", b"y")
        assert (len(bench.sent()), bench.broker.stats().open_transactions) == (sent, open_after)
        bench.advance(CHECK_MS)  # then it is asked again
        assert (len(bench.sent()), bench.broker.stats().open_transactions) == (sent + open_after, 0)


def test_a_block_is_checked_only_with_a_checker(bench: Bench) -> None:
    with pytest.raises(mqstore.errors.ConfigError, match="checker"):
        bench.producer().transaction(check=True)


# -- the end -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_sent_once_the_producer_or_its_store_was_closed(bench: Bench, way: str) -> None:
    for producer in (bench.producer(), bench.producer(interceptors=[Recorder()])):
        producer.close()
        producer.close()
        assert repr(producer).endswith(" closed>")
        with pytest.raises(StoreClosedError):
            WAYS[way](producer, "orders", b"x", {})
        with pytest.raises(StoreClosedError):
            producer.flush()
    assert bench.sent() == []
    producer = bench.producer()
    bench.broker.close()
    with pytest.raises(StoreClosedError):
        WAYS[way](producer, "orders", b"x", {})
    producer.close()


def test_a_block_that_outlives_its_producer_still_ends(bench: Bench) -> None:
    producer = bench.producer(checker=lambda message: False)
    with producer.transaction() as tx:
        tx.send("orders", b"x")
        producer.close()
        bench.advance(CHECK_MS + AGAIN_MS)
    assert bench.sent() == [b"x"]


def test_with_closes_and_stores_what_was_submitted_even_when_it_raises(broker: Broker) -> None:
    producer = Producer(broker)

    with pytest.raises(ValueError, match="mine"), producer:  # noqa: PT012
        producer.submit("orders", b"x")
        raise ValueError("mine")
    assert "closed" in repr(producer)
    assert [m.body for m in broker.store.iter("orders")] == [b"x"]


def test_a_half_message_that_ctrl_c_cut_off_is_asked_about_like_any_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noted as one whose block still runs, it would neither be asked about nor given up while the process lives."""
    prepare, asked = bench.broker.transactions.prepare, list[bytes]()

    def interrupted(*arguments: Any, **options: Any) -> Any:
        prepare(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.broker.transactions, "prepare", interrupted)
    with bench.producer(checker=lambda message: asked.append(message.body)).transaction() as tx:
        with pytest.raises(KeyboardInterrupt):
            tx.send("orders", b"x")
        bench.advance(CHECK_MS)
        assert asked == [b"x"]


def test_interrupted_send_leaves_no_message_of_a_block(bench: Bench) -> None:
    producer = bench.producer(checker=lambda message: False)
    with producer.transaction() as tx:
        tx.send("orders", b"x")  # the first one makes the topic
    at, stack = 0, ["first"]
    while stack:
        with producer.transaction() as tx:
            stack, at = run_interrupted(lambda tx=tx: tx.send("orders", b"x"), at), at + 1
        assert not producer._checks._running, stack
    assert at > 10


# --- what one send may say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["send", "send_oneway", "submit"])
@pytest.mark.parametrize("hooked", [False, True])
def test_one_send_may_have_its_selector(bench: Bench, way: str, hooked: bool) -> None:
    bench.broker.topics.create("orders", queues=8)
    asked: list[tuple[int, str | None]] = []

    def last(queues: Any, group: str | None) -> QueueRef:
        asked.append((len(queues), group))
        return QueueRef(*queues[-1])

    hooks = [Recorder()] if hooked else []
    with bench.producer(selector=lambda queues, group: queues[2], interceptors=hooks) as producer:
        send = getattr(producer, way)
        send("orders", b"mine", selector=last)
        send("orders", b"its")
        producer.run_once()
        with pytest.raises(InvalidMessageError, match="exclude"):
            send("orders", b"both", selector=last, queue_id=1)
        with pytest.raises(mqstore.errors.ConfigError, match="selector"):
            send("orders", b"none", selector="last")
    assert [(message.body, message.queue.queue_id) for message in bench.stored()] == [(b"mine", 7), (b"its", 2)]
    assert asked == [(8, None)]
