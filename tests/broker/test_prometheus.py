"""Counters and series by the names of delivery#statistics."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

import pytest

from mqstore.engine import compiled_parts
from mqstore.errors import InvalidMessageError, StoreFullError
from tests.broker.support import Bench, Broker
from tests.faults import FaultyFileSystem

DOCS = Path(__file__).parents[2] / "docs" / "statistics.md"

# RocketMQ's names, by hand.
COUNTERS = [
    *(f"{name}_{what}" for name in ("TOPIC_PUT", "GROUP_GET") for what in ("NUMS", "SIZE", "LATENCY")),
    *(f"QUEUE_{name}_{what}" for name in ("PUT", "GET") for what in ("NUMS", "SIZE")),
    *(f"{whose}_{what}_NUMS" for whose in ("GROUP", "BROKER") for what in ("CK", "ACK")),
    *("SNDBCK_PUT_NUMS", "SNDBCK2DLQ_TIMES", "DLQ_PUT_NUMS", "BROKER_PUT_NUMS", "BROKER_GET_NUMS"),
    *("BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC", "BROKER_GET_NUMS_WITHOUT_SYSTEM_TOPIC"),
    *("GROUP_GET_FALL_SIZE", "GROUP_GET_FALL_TIME"),
]
SERIES = [
    *("messages_in_total", "messages_out_total", "throughput_in_total", "throughput_out_total", "message_size"),
    *("consumer_lag_messages", "consumer_lag_latency", "consumer_inflight_messages", "consumer_queueing_latency"),
    *("consumer_ready_messages", "send_to_dlq_messages_total", "storage_size", "storage_flush_behind_bytes"),
    *("storage_dispatch_behind_bytes", "storage_message_reserve_time", "pop_revive_lag", "pop_revive_latency"),
    *("pop_checkpoint_buffer_size", "half_messages", "commit_messages_total", "rollback_messages_total"),
    *("timing_messages", "delay_message_latency"),
]


@pytest.fixture
def used(bench: Bench) -> Broker:
    """A broker on which a little of everything has happened."""
    broker = bench.broker
    broker.topics.create("t", queues=1)
    broker.put("t", b"late", delay_level=1)
    for _ in range(4):
        broker.put("t", b"x")
    popped = broker.pop("g", "t", 2)
    broker.ack("g", "t", [popped[0].receipt])
    broker.dead_letter("g", "t", popped[1].receipt, "no")
    broker.groups.create("q", retry_max_times=1)
    first = broker.read("t", 0, 0, group="q").messages[0]
    broker.send_back("q", first.physical_offset, delay=0)
    [copy] = broker.read("%RETRY%q", 0, 0, group="q").messages
    broker.send_back("q", copy.physical_offset)
    bench.advance(10_000)
    return broker


def test_each_counter_and_series_is_there_and_in_the_docs(used: Broker) -> None:
    counters, text, page = used.stats().counters, used.prometheus(), DOCS.read_text()
    assert set(COUNTERS) - {key[0] for key in (*counters.totals, *counters.latest)} == set()
    assert [name for name in COUNTERS if name not in page] == []
    assert [name for name in SERIES if f"# TYPE rocketmq_{name} " not in text] == []


# -- what stands at 0 from the start -----------------------------------------------------------------------------------


def test_unseen_outcomes_are_zero(broker: Broker) -> None:
    """A series that begins with 1 has no increase: the first dead letter was in no alert."""
    broker.start_of("g", "t", 0)
    lines = broker.prometheus().splitlines()
    topic = 'is_retry="false",is_system="false",topic="t"}'
    assert f'rocketmq_send_to_dlq_messages_total{{consumer_group="g",{topic} 0' in lines
    for name in ("commit_messages_total", "rollback_messages_total", "delay_message_latency_sum"):
        assert f"rocketmq_{name}{{{topic} 0" in lines
    assert not [line for line in lines if "%" in line and "commit" in line]


def test_empty_store_has_no_labels(bench: Bench) -> None:
    lines = bench.broker.prometheus().splitlines()
    for name in ("send_to_dlq", "commit", "rollback"):
        assert f"rocketmq_{name}_messages_total 0" in lines
    for gauge in ("storage_message_reserve_time", "pop_revive_lag", "pop_revive_latency", "half_messages"):
        assert f"rocketmq_{gauge} 0" in lines
    assert "rocketmq_delay_message_latency_count 0" in lines


def test_many_topics_show_only_consumed_ones(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape is not to grow by three lines for each of a hundred thousand idle topics."""
    monkeypatch.setattr("mqstore.broker.admin.metrics._ALL_TOPICS", 2)
    for name in ("idle", "consumed"):
        broker.topics.create(name, queues=1)
    broker.start_of("g", "consumed", 0)
    text = broker.prometheus()
    assert 'topic="consumed"} 0' in text
    assert "idle" not in text


def test_topic_kind_is_a_label(broker: Broker) -> None:
    broker.topics.create("ordered", queues=1, message_type="FIFO")
    broker.put("ordered", b"x", message_group="a")
    broker.put("t", b"x", delay_level=1)
    broker.put("t", b"x")
    lines = broker.prometheus().splitlines()
    for topic, kind, system in (
        ("ordered", "fifo", "false"),
        ("t", "unspecified", "false"),
        ("SCHEDULE_TOPIC_XXXX", "delay", "true"),
    ):
        labels = f'is_retry="false",is_system="{system}",message_type="{kind}",topic="{topic}"'
        assert f"rocketmq_messages_in_total{{{labels}}} 1" in lines
        assert f"rocketmq_message_size_count{{{labels}}} 1" in lines


# -- what the names mean -----------------------------------------------------------------------------------------------


def test_puts_that_raise_are_counted(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    with Bench(tmp_path / "s", fs=fs).broker as broker:
        broker.topics.create("t", queues=1)
        too_long = {"p": "x" * 40_000}
        for put in (
            lambda: broker.put("t", bytes(5 << 20)),
            lambda: broker.put("t", b"x", properties=too_long),
            lambda: broker.put("t", b"x", properties=too_long, message_group="a"),
            lambda: broker.put_many("t", [bytes(5 << 20)]),
        ):
            with pytest.raises(InvalidMessageError):
                put()
        assert broker.stats().store.failed_puts == 4
        fs.fail("allocate", errno.ENOSPC)
        while broker.stats().store.failed_puts == 4:  # until the segment is full
            with suppress(StoreFullError):
                broker.put("t", bytes(6_000))
        assert broker.stats().store.failed_puts == 5


@pytest.mark.parametrize("by_python", [False, True])
def test_put_times_are_counted_by_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_python: bool) -> None:
    if by_python:
        monkeypatch.setattr("mqstore.log.writing.writer.kernel", None)
    broker = Bench(tmp_path / "store").broker
    by_python = by_python or compiled_parts() != "with compiled parts"
    now_ns = iter(range(0, 10**15, 1_500_000))  # each look at the clock 1.5 ms after the last
    monkeypatch.setattr("mqstore.log.writing.writer.time.perf_counter_ns", lambda: next(now_ns))
    broker.topics.create("u", queues=2)
    for _ in range(65):
        broker.put("u", b"x", queue_id=1)
    broker.put("u", b"x", queue_id=0, tag="a")
    totals = broker.stats().counters.totals
    assert totals["TOPIC_PUT_LATENCY", "1@u"].times == 2  # one of 64
    assert totals["TOPIC_PUT_LATENCY", "0@u"].times == 1
    if by_python:  # compiled parts have a clock of their own
        assert totals["TOPIC_PUT_LATENCY", "1@u"].value == 3
    broker.topics.create("v", queues=1)
    broker.put("v", b"x", delay_level=1)
    broker.put("u", b"x", queue_id=0)
    assert broker.stats().counters.totals["TOPIC_PUT_LATENCY", "0@u"].times == 1
    if by_python:
        assert broker.stats().store.put_longest_ns == 1_500_000
    assert broker.stats().store.put_longest_ns > 0
    broker.close()
    broker.store.close()
