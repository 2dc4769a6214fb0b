"""The client of a cluster against Apache RocketMQ's name server and two brokers (`make cluster`)."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import mqstore
import mqstore.aio
from mqstore import Message, Store
from mqstore.errors import InvalidMessageError, ReceiptExpiredError
from tests.cluster.support import Cluster
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)

SOON = mqstore.RetryPolicy(3, [0.5])


def bodies(messages: list[Message]) -> list[bytes]:
    return [message.body for message in messages]


# -- sends and reads --------------------------------------------------------------------------------------------------


def test_messages_are_put_and_read(store: Store, name: str) -> None:
    store.create_topic(name, queues=4)
    receipt = store.put(name, b"one", tag="paid", keys=["k1"], properties={"shop": "3"}, queue_id=3)
    store.put_many(name, [b"two", b"three"], queue_id=3)

    until(lambda: len(store.read(name, 3, 0)) == 3)
    [first, *rest] = store.read(name, 3, 0)

    assert (first.body, first.tag, first.keys, first.properties["shop"]) == (b"one", "paid", ("k1",), "3")
    assert (first.queue, first.offset, first.unique_key) == (receipt.queue, receipt.offset, receipt.unique_key)
    assert bodies(rest) == [b"two", b"three"]
    assert store.get(receipt.message_id).body == b"one"


def test_messages_without_a_queue_go_to_both_brokers(store: Store, name: str) -> None:
    store.create_topic(name, queues=2)

    receipts = [store.put(name, b"x") for _ in range(4)]

    assert Counter(receipt.queue_id for receipt in receipts) == {0: 2, 1: 2}


def test_message_group_keeps_its_queue(store: Store, name: str) -> None:
    store.create_topic(name, queues=4)

    assert len({store.put(name, b"x", message_group="customer-7").queue_id for _ in range(4)}) == 1


def test_messages_are_found_by_keys(store: Store, name: str) -> None:
    receipt = store.put(name, b"one", keys=["o-1"])

    until(lambda: store.find(name, unique_key=receipt.unique_key))
    assert bodies(store.find(name, key="o-1")) == [b"one"]


def test_large_bodies_are_compressed_on_the_way(store: Store, name: str) -> None:
    body = b"0123456789" * 100_000
    with store.producer(compress_over=4096) as producer:
        receipt = producer.send(name, body)

    until(lambda: store.read(*receipt.queue, receipt.offset))
    assert store.read(*receipt.queue, receipt.offset)[0].body == body


# -- queues -----------------------------------------------------------------------------------------------------------


def test_queue_gives_items_once(store: Store, name: str) -> None:
    queue = store.queue(name, codec=mqstore.JSON)
    queue.put_many([{"n": n} for n in range(40)])

    with mqstore.connect(store.broker.name) as other:
        far = other.queue(name, codec=mqstore.JSON)
        seen = []
        for source in (queue, far) * 20:
            with source.get(timeout=20) as task:
                seen.append(task.value["n"])

    assert sorted(seen) == list(range(40))
    assert queue.get_many(1) == []


def test_failed_item_is_redelivered_then_dead_lettered(store: Store, name: str) -> None:
    queue = store.queue(name, retry=SOON)
    queue.put(b"bad")

    attempts = []
    for _ in range(3):
        task = queue.get(timeout=60)
        attempts.append(task.attempt)
        task.nack()

    assert attempts == [1, 2, 3]
    until(lambda: len(queue.dead_letters) == 1)
    [letter] = queue.dead_letters
    assert (letter.body, letter.attempt) == (b"bad", 3)
    assert "attempt 3 failed" in letter.properties["dlq_reason"]
    assert queue.dead_letters.replay(to_topic=name).count == 1
    assert queue.get(timeout=20).value == b"bad"


def test_expired_lease_is_refused_here(store: Store, name: str) -> None:
    queue = store.queue(name, visibility=1)
    queue.put(b"slow")
    late = queue.get(timeout=20)
    again = queue.get(timeout=60)

    with pytest.raises(ReceiptExpiredError):
        late.ack()
    again.ack()
    assert again.attempt == 2


def test_extended_lease_is_not_redelivered(store: Store, name: str) -> None:
    queue = store.queue(name, visibility=2)
    queue.put(b"slow")
    with queue.get(timeout=20) as task:
        task.extend(60)
        with pytest.raises(mqstore.QueueEmpty):
            queue.get(timeout=6)


def test_extended_lease_is_acknowledged_by_its_newest_receipt(store: Store, name: str) -> None:
    """A broker ignores the receipt before the extension, and says nothing."""
    queue = store.queue(name)
    queue.put(b"slow")
    with queue.get(timeout=20) as task:
        task.extend(3)

    with pytest.raises(mqstore.QueueEmpty):
        queue.get(timeout=8)


def test_get_acknowledges_done_tasks(store: Store, name: str) -> None:
    queue = store.queue(name, visibility=3)
    queue.put_many([b"1", b"2"])
    first = queue.get(timeout=20)
    second = queue.get(timeout=20, done=[first])
    second.ack()

    with pytest.raises(mqstore.QueueEmpty):
        queue.get(timeout=8)


def test_queue_counts_and_waits_for_its_items(store: Store, name: str) -> None:
    queue = store.queue(name, maxsize=3)
    queue.put_many([b"1", b"2"])
    queue.put(b"3", delay=2)
    assert queue.qsize() == 2

    done = []
    while len(done) < 3:
        with queue.get(timeout=30) as task:
            done.append(task.value)
    queue.join()

    assert sorted(done) == [b"1", b"2", b"3"]
    until(lambda: queue.qsize() == 0)


def test_ordered_queue_waits_for_a_failed_item(store: Store, name: str) -> None:
    queue = store.queue(name, ordered=True, retry=mqstore.RetryPolicy(5, [1]))
    queue.put_many([b"1", b"2", b"3"])
    queue.get(timeout=20).nack()

    seen = []
    while len(seen) < 3:
        with queue.get(timeout=60) as task:
            seen.append((task.value, task.attempt))

    assert seen == [(b"1", 2), (b"2", 1), (b"3", 1)]


def test_messages_that_brokers_would_refuse_are_refused(store: Store, name: str) -> None:
    store.create_topic(name)
    limit = store.broker.limits.max_message_size
    for put in (
        lambda: store.put(name, bytes(limit + 1)),
        lambda: store.put_many(name, [mqstore.OutgoingMessage(b"x", delay=1)]),
        lambda: store.put(name, b"x", properties={"a": "\x01"}),
        lambda: store.put(name, b"x", queue_id=4),
        lambda: store.put(name, b"x", queue_id=0, message_group="g"),
    ):
        with pytest.raises(InvalidMessageError):
            put()
    with pytest.raises(TypeError, match="did you mean 'tag'"):
        store.put(name, b"x", tga="a")  # type: ignore[call-arg]


def test_own_topics_of_brokers_are_not_listed(store: Store, name: str) -> None:
    store.create_topic(name)

    assert name in store.topics()
    assert not {"TBW102", "broker-a", "DefaultCluster", "SCHEDULE_TOPIC_XXXX"}.intersection(store.topics())


def test_coroutines_use_a_cluster(cluster: Cluster, name: str) -> None:
    async def main() -> list[bytes]:
        async with mqstore.aio.connect(cluster.name_server) as store:
            queue = await store.queue(name)
            await asyncio.gather(*(queue.put(str(n).encode()) for n in range(10)))
            found = []
            for _ in range(10):
                async with await queue.get(timeout=30) as task:
                    found.append(task.value)
            return sorted(found)

    assert asyncio.run(main()) == [str(n).encode() for n in range(10)]
