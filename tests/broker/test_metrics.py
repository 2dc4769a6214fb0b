"""Metrics: what the broker counts and measures of itself (delivery#statistics), through its door."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mqstore import QueueRef
from mqstore.errors import StoreClosedError
from tests.broker.scraping import scraped, series
from tests.broker.support import Bench, Broker, full
from tests.faults import FaultyFileSystem
from tests.waiting import in_threads

MINUTE = 60_000
RETRY = "%RETRY%g+t"


def totals(broker: Broker, *names: str, key: str = "") -> list[int]:
    found = broker.stats().counters
    return [found.total(name, key) for name in names]


def times(broker: Broker, name: str, key: str) -> int:
    return broker.stats().counters.totals[name, key].times


# -- puts -------------------------------------------------------------------------------------------------------------


def test_puts_are_counted_by_queue_topic_and_store(broker: Broker) -> None:
    broker.topics.create("u", queues=2)
    sizes: dict[tuple[str, int], int] = {}
    for topic, queue_id, body in [("t", 0, b"a"), ("u", 0, b"bb"), ("u", 1, b"c" * 900), ("u", 1, b"")]:
        size = broker.put(topic, body, queue_id=queue_id).size
        sizes[topic, queue_id] = sizes.get((topic, queue_id), 0) + size
    found = broker.stats().counters
    assert [found.total("QUEUE_PUT_NUMS", f"u@{i}") for i in (0, 1)] == [1, 2]
    assert [found.total("QUEUE_PUT_SIZE", f"u@{i}") for i in (0, 1)] == [sizes["u", 0], sizes["u", 1]]
    assert [found.total("TOPIC_PUT_NUMS", topic) for topic in ("t", "u", "v")] == [1, 3, 0]
    assert found.total("TOPIC_PUT_SIZE", "u") == sizes["u", 0] + sizes["u", 1]
    assert found.total("BROKER_PUT_NUMS") == found.total("BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC") == 4
    assert found.totals["TOPIC_PUT_SIZE", "u"].times == 3  # so that the average is that of a message
    assert found.totals["QUEUE_PUT_SIZE", "u@1"].times == 2


def test_a_slot_without_a_message_is_no_put(broker: Broker) -> None:
    broker.put("t", b"0")
    queue = broker.store.queue_table.get("t", 0)
    assert queue is not None
    queue.next_offset += 3  # numbers that were given and lost
    size = broker.put("t", b"4").size
    broker.store.dispatch()
    assert broker.max_offset("t", 0) == 5
    assert totals(broker, "QUEUE_PUT_NUMS", "QUEUE_PUT_SIZE", key="t@0")[0] == 2
    assert totals(broker, "QUEUE_PUT_SIZE", key="t@0") == [2 * size]


def test_messages_removed_meanwhile_are_counted(bench: Bench, broker: Broker) -> None:
    size = broker.put_many("t", [bytes(6000)] * 40)[0].size
    broker.store.dispatch()
    broker.store.flush()
    third = broker.store.log_files.starts[2]
    broker.store.drop_before(third)
    kept = 40 - broker.min_offset("t", 0)
    assert 0 < kept < 40
    assert totals(broker, "QUEUE_PUT_NUMS", "QUEUE_PUT_SIZE", key="t@0") == [40, kept * size]


def test_looks_from_many_threads_count_each_put_once(broker: Broker) -> None:
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            broker.stats()

    def put() -> None:
        for _ in range(200):
            broker.put("t", b"x")
            broker.store.dispatch()
        done.set()

    in_threads(put, *[look] * 3)
    assert totals(broker, "TOPIC_PUT_NUMS", "BROKER_PUT_NUMS", key="t") == [200, 0]


# -- gets -------------------------------------------------------------------------------------------------------------

GETS = ("GROUP_GET_NUMS", "GROUP_GET_SIZE")
QUEUE_GETS = ("QUEUE_GET_NUMS", "QUEUE_GET_SIZE")


def test_reads_are_counted_by_group_and_queue(broker: Broker, bench: Bench) -> None:
    receipts = [broker.put("t", b"x" * i) for i in range(5)]
    size = sum(receipt.size for receipt in receipts)
    bench.clock.advance(700)
    last = broker.put("u", b"later", queue_id=0)
    broker.start_of("g", "t", 0, "earliest")
    broker.read("t", 0, 0, 3, group="g")
    broker.read("t", 0, 3, group="g")
    broker.read("t", 0, 5, group="g")  # finds nothing
    broker.read("t", 0, 0)  # nobody's
    assert totals(broker, *GETS, key="t@g") == [5, size]
    assert totals(broker, *QUEUE_GETS, key="t@0@g") == [5, size]
    assert totals(broker, "BROKER_GET_NUMS", "BROKER_GET_NUMS_WITHOUT_SYSTEM_TOPIC") == [5, 5]
    assert times(broker, "GROUP_GET_NUMS", "t@g") == times(broker, "GROUP_GET_LATENCY", "0@t@g") == 2
    latest = broker.stats().counters.latest
    assert latest["GROUP_GET_FALL_SIZE", "0@t@g"] == broker.store.max_offset - last.physical_offset
    assert latest["GROUP_GET_FALL_TIME", "0@t@g"] == 700


def test_milliseconds_of_reads_add_up(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = iter(range(0, 10**12, 300_000))  # each look at the clock 0.3 ms after the last
    monkeypatch.setattr("mqstore.broker.reads.reading.time.perf_counter_ns", lambda: next(now_ns))
    broker.put("t", b"x")
    for _ in range(10):
        broker.read("t", 0, 0, group="g")
        broker.stats()
    assert totals(broker, "GROUP_GET_LATENCY", key="0@t@g") == [3]


@pytest.mark.parametrize("order", [False, True])
def test_pops_count_what_they_deliver_not_what_they_read_ahead(broker: Broker, order: bool) -> None:
    receipts = [broker.put("t", b"x" * i) for i in range(40)]
    found = broker.pop("g", "t", 3, order=order)
    size = sum(receipt.size for receipt in receipts[:3])
    assert totals(broker, *GETS, key="t@g") == [3, size]
    assert totals(broker, *QUEUE_GETS, key="t@0@g") == [3, size]
    assert totals(broker, "GROUP_CK_NUMS", "GROUP_ACK_NUMS", key="t@g") == [1, 0]
    assert times(broker, "GROUP_GET_LATENCY", "0@t@g") == 1
    two = [each.receipt for each in found[:2]]
    broker.ack("g", "t", [*two, two[0]])
    broker.ack("g", "t", two)  # again
    assert totals(broker, "GROUP_CK_NUMS", "GROUP_ACK_NUMS", key="t@g") == [1, 2]
    assert totals(broker, "BROKER_CK_NUMS", "BROKER_ACK_NUMS") == [1, 2]
    broker.release("g", "t", [found[2].receipt])
    assert [each.message.offset for each in broker.pop("g", "t", 1, order=order)] == [2]
    assert totals(broker, *GETS, "GROUP_CK_NUMS", "GROUP_ACK_NUMS", key="t@g") == [4, size + receipts[2].size, 2, 2]
    assert totals(broker, "BROKER_GET_NUMS") == [4]


def test_counts_of_a_deleted_group_or_topic_stay_in_those_of_the_store(broker: Broker) -> None:
    broker.put_many("t", [b"x"] * 4)
    broker.pop("g", "t", 4)
    broker.delete_group("g")
    assert totals(broker, "GROUP_GET_NUMS", "GROUP_CK_NUMS", key="t@g") == [0, 0]
    assert totals(broker, "TOPIC_PUT_NUMS", key="t") == [4]
    broker.topics.delete("t")
    assert totals(broker, "TOPIC_PUT_NUMS", key="t") == [0]
    assert totals(broker, "BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC", "BROKER_GET_NUMS", "BROKER_CK_NUMS") == [4, 4, 1]


def test_lateness_of_delayed_messages(bench: Bench, broker: Broker) -> None:
    broker.put("t", b"level", delay_level=1)  # 1 s
    broker.put("t", b"moment", delay=30)
    broker.run_once()
    bench.clock.advance(1_250)
    bench.settle()
    assert totals(broker, "DELAY_LATENCY", key="t") == [250]
    bench.clock.advance(31_000)
    bench.settle()
    assert times(broker, "DELAY_LATENCY", "t") == 2
    assert totals(broker, "DELAY_LATENCY", key="t") == [250 + 2_250]


def test_a_clock_set_back_makes_nothing_early(bench: Bench, broker: Broker) -> None:
    broker.put("t", b"x", delay_level=1)
    broker.run_once()
    bench.clock.set_wall(bench.clock.now_ms() - 60 * MINUTE)
    bench.advance(999)
    assert broker.max_offset("t", 0) == 0
    bench.advance(1)
    assert broker.max_offset("t", 0) == 1
    assert totals(broker, "DELAY_LATENCY", key="t") == [0]


# -- failures ---------------------------------------------------------------------------------------------------------


def test_failures_count_for_the_original_topic(bench: Bench, broker: Broker) -> None:
    broker.groups.create("g", retry_max_times=1)
    broker.put("t", b"x")
    broker.send_back("g", broker.put("t", b"y").physical_offset, delay=0)
    [copy] = broker.read("%RETRY%g", 0, 0, group="g").messages
    broker.send_back("g", copy.physical_offset)  # the second attempt is the last
    assert totals(broker, "SNDBCK_PUT_NUMS", "SNDBCK2DLQ_TIMES", "DLQ_PUT_NUMS", key="t@g") == [1, 1, 1]
    assert totals(broker, "SNDBCK2DLQ_TIMES", "DLQ_PUT_NUMS", key="%RETRY%g@g") == [0, 0]


# -- lag --------------------------------------------------------------------------------------------------------------


def test_lag_counts_what_waits_in_the_retry_topic_of_pop(bench: Bench, broker: Broker) -> None:
    broker.put_many("t", [b"x"] * 5)
    broker.pop("g", "t", 2, invisible=1)
    bench.advance(2_000)
    assert broker.lag("g") == {QueueRef("t", 0): 3, QueueRef(RETRY, 0): 2}
    assert broker.committed("g", RETRY, 0) == 0
    bench.again()
    assert bench.broker.lag("g") == {QueueRef("t", 0): 3, QueueRef(RETRY, 0): 2}


def test_old_group_starts_at_its_retry_topic(bench: Bench, broker: Broker) -> None:
    broker.put_many("t", [b"x"] * 2)
    broker.pop("g", "t", 1, invisible=1)
    bench.advance(2_000)
    broker.delete_group("g")
    broker.offsets.move_start(RETRY, 0, 1)
    broker.pop("g", "t", 1, invisible=1, start="earliest")
    bench.advance(2_000)
    assert broker.committed("g", RETRY, 0) == 1
    assert broker.stats().counters.lost == {}


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("to", [6, 3])
@pytest.mark.parametrize("restart", [Bench.again, Bench.kill])
def test_lag_of_a_group_that_popped_follows_its_commits(
    bench: Bench, broker: Broker, order: bool, to: int, restart: Callable[[Bench], Broker]
) -> None:
    """What the group had popped still counted. After a kill, the group fell back to the first of it."""
    broker.topics.create("T", queues=1)
    broker.groups.create("g", orderly=order)
    broker.put_many("T", [b"x"] * 6, queue_id=0)
    popped = broker.pop("g", "T", 4, order=order)
    broker.ack("g", "T", [popped[0].receipt, popped[2].receipt])
    broker.nack("g", "T", popped[1].receipt, delay=60)

    broker.commit("g", "T", 0, to, durability="flush")

    for _ in range(2):
        assert broker.lag("g")[QueueRef("T", 0)] == 6 - to
        assert broker.committed("g", "T", 0) == to
        assert broker.pending("g") == []
        broker = restart(bench)
        bench.advance(2 * MINUTE)


# -- gauges -----------------------------------------------------------------------------------------------------------

SERIES = ("lag_messages", "ready_messages", "inflight_messages", "lag_latency", "queueing_latency")


def of_group(broker: Broker, topic: str = "t", group: str = "g") -> list[float]:
    """Values of SERIES."""
    found, retry = scraped(broker.prometheus()), topic.startswith("%")
    return [found[series(f"consumer_{name}", topic, retry=retry, consumer_group=group)] for name in SERIES]


def value_of(broker: Broker, name: str, **labels: str) -> float:
    return scraped(broker.prometheus())[f"rocketmq_{name}", frozenset(labels.items())]


def put_one_a_second(bench: Bench, broker: Broker, count: int) -> None:
    """Message i is `count - i` seconds old then."""
    for i in range(count):
        broker.put("t", str(i).encode())
        bench.clock.advance(1_000)


def test_position_of_a_reading_group(bench: Bench, broker: Broker) -> None:
    put_one_a_second(bench, broker, 10)
    broker.start_of("g", "t", 0, "earliest")
    assert of_group(broker) == [10, 10, 0, 10_000, 10_000]
    broker.read("t", 0, 0, 6, group="g")
    assert of_group(broker) == [10, 4, 6, 10_000, 4_000]
    broker.commit("g", "t", 0, 5)
    assert of_group(broker) == [5, 4, 1, 5_000, 4_000]
    broker.read("t", 0, 6, group="g")
    broker.commit("g", "t", 0, 10)
    assert of_group(broker) == [0, 0, 0, 0, 0]


def test_position_of_a_popping_group(bench: Bench, broker: Broker) -> None:
    put_one_a_second(bench, broker, 10)
    found = broker.pop("g", "t", 6, invisible=60)
    assert of_group(broker) == [10, 4, 6, 10_000, 4_000]
    broker.ack("g", "t", [found[0].receipt, found[2].receipt, found[3].receipt])
    assert of_group(broker) == [7, 4, 3, 9_000, 4_000]
    broker.release("g", "t", [found[4].receipt])
    assert of_group(broker) == [7, 5, 2, 9_000, 6_000]
    assert value_of(broker, "pop_checkpoint_buffer_size") == 1
    bench.advance(61_000)
    assert of_group(broker)[:3] == [5, 5, 0]
    assert of_group(broker, RETRY)[:3] == [2, 2, 0]


def test_position_of_an_ordered_popping_group(bench: Bench, broker: Broker) -> None:
    put_one_a_second(bench, broker, 10)
    found = broker.pop("g", "t", 4, order=True, invisible=60)
    assert of_group(broker) == [10, 6, 4, 10_000, 6_000]
    broker.ack("g", "t", [found[0].receipt, found[2].receipt])
    assert of_group(broker) == [8, 6, 2, 9_000, 6_000]
    bench.advance(61_000)  # both are visible again
    assert of_group(broker) == [8, 8, 0, 70_000, 70_000]


def test_waiting_and_stored_messages_are_counted(bench: Bench, broker: Broker) -> None:
    broker.put("t", b"x", delay_level=18)
    broker.put("t", b"x", delay_level=18)
    broker.put("t", b"x", delay=3_600)
    transaction = broker.transactions.begin("t", b"half", producer_group="p")
    bench.clock.advance(5_000)
    broker.store.dispatch()
    assert value_of(broker, "timing_messages", kind="level") == 2
    assert value_of(broker, "timing_messages", kind="moment") == 1
    assert value_of(broker, "half_messages") == 1
    assert value_of(broker, "storage_message_reserve_time") == 5_000
    assert value_of(broker, "storage_size") == broker.store.stats().commitlog_bytes > 0
    assert value_of(broker, "storage_flush_behind_bytes") == broker.store.stats().flush_lag_bytes > 0
    size = broker.put("t", b"x").size
    assert value_of(broker, "storage_dispatch_behind_bytes") == size
    assert value_of(broker, "storage_dispatch_behind_bytes") == 0  # since somebody looked
    broker.transactions.end(transaction, "commit")
    assert value_of(broker, "half_messages") == 0
    assert value_of(broker, "commit_messages_total", topic="t", is_retry="false", is_system="false") == 1


def test_metrics_are_served_on_a_full_disk(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    bench = Bench(tmp_path / "store", fs=fs)
    bench.broker.put("t", b"x")
    bench.broker.stats()
    fs.fail("pwrite", errno.ENOSPC, path_part="consumequeue", times=None)
    size = bench.broker.put("t", b"y").size
    assert totals(bench.broker, "TOPIC_PUT_NUMS", key="t") == [1]
    assert value_of(bench.broker, "storage_dispatch_behind_bytes") == size
    fs.heal()
    assert totals(bench.broker, "TOPIC_PUT_NUMS", key="t") == [2]
    bench.broker.close()
    with pytest.raises(StoreClosedError):
        bench.broker.prometheus()


def test_redeliveries_that_are_overdue(bench: Bench, broker: Broker) -> None:
    broker.put_many("t", [b"x"] * 5)
    found = broker.pop("g", "t", 5, invisible=10)
    broker.ack("g", "t", [found[0].receipt])
    broker.change_invisible("g", "t", found[1].receipt, 100)
    assert value_of(broker, "pop_revive_lag") == 0
    bench.clock.advance(12_500)  # and the housekeeper did not come
    assert value_of(broker, "pop_revive_lag") == 3
    assert value_of(broker, "pop_revive_latency") == 2_500
    bench.settle()
    assert value_of(broker, "pop_revive_lag") == value_of(broker, "pop_revive_latency") == 0


def test_redeliveries_that_cannot_be_put_stay_overdue(
    bench: Bench, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.put_many("t", [b"x"] * 5)
    broker.pop("g", "t", 5, invisible=10)

    monkeypatch.setattr("mqstore.broker.routing.router.Router.copy_many", full)
    bench.clock.advance(10_500)
    broker.run_once()
    assert "pop" in broker.stats().errors
    assert value_of(broker, "pop_revive_lag") == 5
    assert value_of(broker, "pop_revive_latency") == 500


def test_opening_looks_at_no_queue(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand of them would make it slow."""
    looked: list[str] = []
    bench.broker.topics.create("t", queues=100)
    for queue_id in range(100):
        bench.broker.put("t", b"x", queue_id=queue_id)
    store = bench.broker.store
    bench.broker.close()
    monkeypatch.setattr(type(store), "offsets_or_none", lambda _, topic, __: looked.append(topic))
    bench.open()
    monkeypatch.undo()
    assert "t" not in looked
