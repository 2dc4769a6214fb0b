"""Leased messages of simple consumers, with and without order. tests/conformance has what all leases promise."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Delivery, Message, RetryPolicy, SimpleConsumer
from tests.client.popsupport import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "store")
    bench.store.create_topic("t", queues=1)
    yield bench
    bench.store.close()


@pytest.fixture(params=[False, True], ids=["standard", "ordered"])
def consumer(bench: Bench, request: pytest.FixtureRequest) -> SimpleConsumer:
    return bench.consumer(ordered=request.param, visibility=30, retry=RetryPolicy(3, [10, 20]))


def received(bench: Bench, consumer: SimpleConsumer, body: bytes = b"a") -> Delivery:
    bench.put(body)
    [delivery] = consumer.receive(wait=0)
    return delivery


FACTS = (
    *("topic", "queue", "offset", "body", "text", "tag", "keys", "properties", "unique_key", "message_id", "attempt"),
    *("reconsume_times", "tags_code", "message_group", "born_host", "store_timestamp_ms", "physical_offset", "flag"),
)


def facts_of(message: Message) -> list[Any]:
    found = [getattr(message, name) for name in FACTS]
    return [each() if callable(each) else dict(each) if isinstance(each, Mapping) else each for each in found]


@pytest.mark.parametrize("batch", [1, 40], ids=["one", "a batch of arrays"])
def test_messages_can_be_pickled(bench: Bench, consumer: SimpleConsumer, batch: int) -> None:
    """The pages offer a process pool for handlers that compute: a task's message could not be passed to it."""
    producer = mqstore.Producer(bench.broker, compress_over=100)
    for body in (b"small", b"large" * 1000):
        producer.send("t", body, tag="a", keys="k", properties={"p": "x"}, flag=7, queue_id=0)
    bench.broker.put_many("t", [b"more"] * (batch - 1), queue_id=0)
    [delivery] = consumer.receive(1, wait=0)
    first = delivery.message
    delivery.nack(0)
    bench.advance(1)
    received = (each.message for _ in range(20) for each in consumer.receive(32, wait=0))
    again = next(message for message in received if message.attempt == 2)
    messages = [first, again, *bench.broker.read("t", 0, 0, 64).messages]
    expected = [facts_of(message) for message in messages]
    copies = pickle.loads(pickle.dumps(messages))
    assert copies == messages
    bench.broker.close()
    assert [facts_of(copy) for copy in copies] == expected
    assert again.topic == "t", "as it was sent"


def test_a_receipt_settles_from_elsewhere(bench: Bench, consumer: SimpleConsumer) -> None:
    delivery = received(bench, consumer)
    bench.broker.ack("g", "t", [delivery.receipt])
    delivery.ack()
    assert bench.lag() == 0


def test_repr_identifies_the_delivery(bench: Bench, consumer: SimpleConsumer) -> None:
    delivery = received(bench, consumer)
    assert repr(delivery) == "<Delivery of t/0, offset 0, attempt 1, leased>"
    delivery.ack()
    assert repr(delivery) == "<Delivery of t/0, offset 0, attempt 1, ack>"
