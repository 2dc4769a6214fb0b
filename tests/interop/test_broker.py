"""A whole broker of the real engine takes over what ours left, and the other way round: tables, progress, and messages
that wait."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import mqstore
from mqstore import RetryPolicy, StoreConfig, exponential
from tests.interop.comparing import assert_same, seen_by_java, seen_by_us
from tests.interop.javaengine import SIZES, JavaEngine
from tests.waiting import until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def open_ours(path: Path) -> mqstore.Store:
    return mqstore.open(path, profile="rocketmq", config=StoreConfig(**SIZES))


def test_a_java_broker_knows_our_topics_groups_and_progress(path: Path, engine: JavaEngine) -> None:
    with open_ours(path) as store:
        broker = store.broker
        broker.topics.create("orders", read_queues=3, write_queues=2)
        broker.topics.create("steps", queues=1, message_type="FIFO")
        broker.topics.create("quiet", queues=1, perm=4)
        broker.groups.create("billing", retry_policy=RetryPolicy(5, [1, 60]))
        broker.groups.create("audit", retry_policy=exponential(3, 2, 600), orderly=True)
        for i in range(7):
            store.put("orders", b"%d" % i, queue_id=i % 2)
            store.put("steps", b"%d" % i, queue_id=0)
        broker.commit("billing", "orders", 0, 3)
        broker.commit("billing", "orders", 1, 1)
        first, *_ = broker.pop("audit", "steps", 3, queue_id=0, invisible=600, order=True)
        broker.ack("audit", "steps", [first.receipt])
    engine.start_broker(path)
    java = engine.config()
    topics = java["topics"]["topicConfigTable"]
    assert [topics["orders"][name] for name in ("readQueueNums", "writeQueueNums", "perm")] == [3, 2, 6]
    assert topics["steps"]["attributes"] == {"message.type": "FIFO"}
    assert topics["quiet"]["perm"] == 4
    groups = java["groups"]["subscriptionGroupTable"]
    assert groups["billing"]["retryMaxTimes"] == 4
    assert groups["billing"]["groupRetryPolicy"]["customizedRetryPolicy"]["next"][:2] == [1000, 60000]
    assert groups["audit"]["consumeMessageOrderly"] is True
    assert groups["audit"]["groupRetryPolicy"]["exponentialRetryPolicy"]["initial"] == 3000
    assert java["offsets"]["offsetTable"]["orders@billing"] == {"0": 3, "1": 1}
    assert engine.blocked("audit", "steps", 0, attempt_id="somebody", invisible_ms=600_000)
    assert not engine.blocked("audit", "orders", 0, attempt_id="somebody", invisible_ms=600_000)
    engine.commit("billing", "orders", 0, 4)
    engine.close()
    with open_ours(path) as store:
        broker = store.broker
        assert broker.committed("billing", "orders", 0) == 4
        assert broker.committed("billing", "orders", 1) == 1
        assert (broker.topics.require("orders").read_queues, broker.topics.require("orders").write_queues) == (3, 2)
        assert broker.groups.require("billing").retry_policy == RetryPolicy(5, [1, 60])
        # What receivers of a process had that ended is visible again, with what is acknowledged of it.
        assert [each.message.body for each in broker.pop("audit", "steps", 9, order=True)][:2] == [b"1", b"2"]


def test_a_java_broker_delivers_what_waits_in_our_store(path: Path, engine: JavaEngine) -> None:
    with open_ours(path) as store:
        store.create_topic("late", queues=1)
        store.put("late", b"at once", queue_id=0)
        for level in (1, 2, 3):
            store.put("late", b"level %d" % level, queue_id=0, delay_level=level)
        store.put("late", b"a moment", queue_id=0, delay=4)
        store.put("late", b"another", queue_id=0, delay=9)
        handle = store.put("late", b"recalled", queue_id=0, delay=9).recall_handle
        store.put("late", b"far off", queue_id=0, delay=3600)
        store.recall(handle)
        until(lambda: store.offsets("late", 0)[1] == 2, pause_s=0.2)  # level 1 is ours to deliver
        ours = seen_by_us(path)["late", 0]
    engine.start_broker(path)
    until(lambda: engine.queues()["late", 0][1] >= 6, pause_s=0.2)
    time.sleep(3)
    java = seen_by_java(engine)["late", 0]
    assert java[: len(ours)] == ours
    assert sorted(row["body"] for row in java) == sorted(
        [b"at once", b"level 1", b"level 2", b"level 3", b"a moment", b"another"]
    )
    engine.close()
    with open_ours(path) as store:
        until(lambda: store.broker.stats().timer_waiting == 1, pause_s=0.2)
        time.sleep(1)
        assert store.offsets("late", 0) == (0, 6)


def test_we_deliver_what_waits_in_a_java_store(path: Path, engine: JavaEngine) -> None:
    with open_ours(path) as store:
        store.create_topic("late", queues=1)
    engine.start_broker(path)
    engine.put("late", 0, b"at once")
    for level in (1, 2, 3):
        engine.put("late", 0, b"level %d" % level, {"DELAY": str(level)})
    engine.put("late", 0, b"a moment", {"TIMER_DELIVER_MS": str(time.time_ns() // 1_000_000 + 8_000)})
    engine.put("late", 0, b"far off", {"TIMER_DELIVER_MS": str(time.time_ns() // 1_000_000 + 3_600_000)})
    until(lambda: engine.queues()["late", 0][1] == 2, pause_s=0.2)
    java = seen_by_java(engine)["late", 0]
    engine.close()
    with open_ours(path) as store:
        until(lambda: store.offsets("late", 0)[1] >= 5, pause_s=0.2)
        time.sleep(2)
        ours = seen_by_us(path)
        assert ours["late", 0][: len(java)] == java
        assert sorted(row["body"] for row in ours["late", 0]) == sorted(
            [b"at once", b"level 1", b"level 2", b"level 3", b"a moment"]
        )
        assert store.broker.stats().timer_waiting == 1
    engine.open(path)
    assert_same(seen_by_us(path), seen_by_java(engine))


def test_a_java_broker_goes_on_with_our_batch_in_order_and_we_with_its_end(path: Path, engine: JavaEngine) -> None:
    with open_ours(path) as store:
        store.create_topic("steps", queues=1)
        store.broker.groups.create("g", orderly=True)
        for i in range(6):
            store.put("steps", b"%d" % i, queue_id=0)
        batch = store.broker.pop("g", "steps", 3, queue_id=0, order=True, invisible=600)
        store.broker.ack("g", "steps", [batch[0].receipt])
    pop_time_ms = int(batch[0].receipt.split()[1])
    engine.start_broker(path)
    assert engine.settle("g", "steps", 0, 1, pop_time_ms) == 2
    assert engine.settle("g", "steps", 0, 2, pop_time_ms) == 3
    engine.close()
    with open_ours(path) as store:
        assert store.broker.committed("g", "steps", 0) == 3
        assert [each.message.body for each in store.broker.pop("g", "steps", 3, order=True)] == [b"3", b"4", b"5"]


def test_progress_that_a_java_broker_committed_behind_our_batch_stays(path: Path, engine: JavaEngine) -> None:
    with open_ours(path) as store:
        store.create_topic("steps", queues=1)
        store.broker.groups.create("g", orderly=True)
        for i in range(6):
            store.put("steps", b"%d" % i, queue_id=0)
        store.broker.pop("g", "steps", 3, queue_id=0, order=True, invisible=600)
    engine.start_broker(path)
    engine.commit("g", "steps", 0, 5)
    engine.close()
    with open_ours(path) as store:
        assert store.broker.committed("g", "steps", 0) == 5
        assert [each.message.body for each in store.broker.pop("g", "steps", 3, order=True)] == [b"5"]


def test_a_java_broker_ends_our_transactions(path: Path, engine: JavaEngine) -> None:
    with open_ours(path) as store:
        store.create_topic("bills", queues=1)
        begin = store.broker.transactions.begin
        handles = [begin("bills", body, producer_group="till", queue_id=0) for body in (b"pay", b"forget", b"open")]
        store.log.dispatch()
        halves = seen_by_us(path)["RMQ_SYS_TRANS_HALF_TOPIC", 0]
    engine.start_broker(path)
    for half, commit in zip(halves, (True, False), strict=False):
        assert half["unique_key"] in {handle.transaction_id for handle in handles}
        where = (half["queue_offset"], half["physical_offset"], half["unique_key"])
        assert engine.end_transaction("till", *where, commit=commit) == 0
    assert [row["body"] for row in seen_by_java(engine)["bills", 0]] == [b"pay"]
    engine.close()
    with open_ours(path) as store:
        (left,) = store.broker.transactions.open_transactions()  # where it lies now, for a broker puts it again to ask
        assert left.transaction_id == handles[2].transaction_id
        store.broker.transactions.end(left, "commit")
        assert [message.body for message in store.read("bills", 0, 0)] == [b"pay", b"open"]
    engine.start_broker(path)
    assert [row["body"] for row in seen_by_java(engine)["bills", 0]] == [b"pay", b"open"]
