"""Statistics: counters, the windows of delivery#statistics against a model, losses, and what Prometheus is sent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore import SimulatedClock
from mqstore.broker.admin.statistics import Rate, Samples, Statistics
from mqstore.broker.tables.names import QueueKey
from tests.broker.scraping import scraped, series

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000


@pytest.fixture
def statistics(clock: SimulatedClock) -> Statistics:
    return Statistics(clock)


def run_for(statistics: Statistics, clock: SimulatedClock, duration_ms: int) -> None:
    """What the housekeeper does: come back when told to, until the time is over."""
    end = clock.monotonic_ms() + duration_ms
    while True:
        due = statistics.run_once(clock.now_ms())
        if clock.monotonic_ms() + due - clock.now_ms() > end:
            break
        clock.advance(due - clock.now_ms())
    clock.advance(end - clock.monotonic_ms())


def test_a_counter_that_was_forgotten_begins_again(statistics: Statistics, clock: SimulatedClock) -> None:
    """A window took more additions than before for a counter that goes on, and showed a negative growth."""
    statistics.add("TOPIC_PUT_SIZE", "t", 1_000)
    run_for(statistics, clock, 10 * SECOND)
    statistics.forget(topic="t")
    statistics.add_many([("TOPIC_PUT_SIZE", "t", 10, 3)])
    run_for(statistics, clock, 10 * SECOND)
    snapshot = statistics.snapshot()
    assert snapshot.total("TOPIC_PUT_SIZE", "t") == 10
    assert snapshot.minute["TOPIC_PUT_SIZE", "t"][:2] == (1_010, 4)


# --- windows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "period", "span"),
    [("minute", 10 * SECOND, MINUTE), ("hour", 10 * MINUTE, HOUR), ("day", HOUR, 24 * HOUR)],
)
def test_a_window_reaches_from_its_oldest_sample_to_its_newest(
    statistics: Statistics, clock: SimulatedClock, window: str, period: int, span: int
) -> None:
    statistics.add("GROUP_GET_LATENCY", "0@t", 60)
    statistics.add("GROUP_GET_LATENCY", "0@t", 20)
    run_for(statistics, clock, span)
    rates = getattr(statistics.snapshot(), window)
    rate = rates["GROUP_GET_LATENCY", "0@t"]
    assert rate == Rate(80, 2, span)
    assert rate.tps == 80 * 1000 / span
    assert rate.average == 40
    run_for(statistics, clock, period)  # one sample further, and what was added at first is out
    assert getattr(statistics.snapshot(), window) == {}


@pytest.mark.parametrize("step", [-86_400_000, 86_400_000])
def test_a_step_of_the_wall_clock_bends_no_rate(statistics: Statistics, clock: SimulatedClock, step: int) -> None:
    statistics.add("TOPIC_PUT_NUMS", "t", 50)
    clock.set_wall(clock.now_ms() + step)
    assert statistics.run_once(clock.now_ms()) == clock.now_ms() + 10 * SECOND
    clock.advance(10 * SECOND)
    assert statistics.run_once(clock.now_ms()) == clock.now_ms() + 10 * SECOND
    assert statistics.snapshot().minute["TOPIC_PUT_NUMS", "t"].tps == 5.0


@given(
    st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 9), st.sampled_from([0, 1, 4_000, 10_000, 35_000])))
)
def test_the_minute_is_that_of_a_model_that_keeps_whole_samples(steps: list[tuple[str, int, int]]) -> None:
    """The model does as 13 says: seven samples of everything, the newest minus the oldest."""
    clock = SimulatedClock()
    statistics = Statistics(clock)
    totals: dict[str, tuple[int, int]] = {"a": (0, 0), "b": (0, 0)}
    samples = [(clock.monotonic_ms(), dict(totals))]
    for key, value, pause in steps:
        statistics.add("TOPIC_PUT_NUMS", key, value)
        totals[key] = (totals[key][0] + value, totals[key][1] + 1)
        clock.advance(pause)
        statistics.run_once(clock.now_ms())
        if clock.monotonic_ms() - samples[-1][0] >= 10_000:
            samples = [*samples, (clock.monotonic_ms(), dict(totals))][-7:]
        (start, oldest), (end, newest) = samples[0], samples[-1]
        expected = {
            ("TOPIC_PUT_NUMS", name): Rate(
                newest[name][0] - oldest[name][0], newest[name][1] - oldest[name][1], end - start
            )
            for name in totals
            if newest[name] != oldest[name]
        }
        assert statistics.snapshot().minute == expected


# --- Prometheus ----------------------------------------------------------------------------------------------------

TIMING = "rocketmq_timing_messages"


def told(statistics: Statistics, gauges: dict[str, int | Samples] | None = None) -> str:
    return statistics.prometheus_text(gauges or {}, expected=(), type_of=lambda topic: "normal")


def told_of(statistics: Statistics, gauges: dict[str, int | Samples] | None = None) -> dict[Any, float]:
    """The samples that are not 0."""
    return {key: value for key, value in scraped(told(statistics, gauges)).items() if value}


def test_the_text_is_the_documented_form(statistics: Statistics) -> None:
    statistics.add("TOPIC_PUT_NUMS", "orders", 3)
    statistics.lost(QueueKey("g", "orders", 2), 9)
    text = told(statistics, {"rocketmq_half_messages": 4})
    for lines in (
        "# HELP mqstore_lost_messages_total Messages deleted by retention before the group consumed them.\n"
        "# TYPE mqstore_lost_messages_total counter\n"
        'mqstore_lost_messages_total{consumer_group="g",queue_id="2",topic="orders"} 9\n',
        "# HELP rocketmq_half_messages Half messages that are neither committed nor rolled back.\n"
        "# TYPE rocketmq_half_messages gauge\n"
        "rocketmq_half_messages 4\n",
        "# HELP rocketmq_messages_in_total Messages put.\n"
        "# TYPE rocketmq_messages_in_total counter\n"
        'rocketmq_messages_in_total{is_retry="false",is_system="false",message_type="normal",topic="orders"} 3\n',
    ):
        assert lines in text


def test_counters_become_series_with_labels(statistics: Statistics) -> None:
    statistics.add_many(
        [
            ("TOPIC_PUT_NUMS", "orders", 2, 1),
            ("TOPIC_PUT_SIZE", "orders", 300, 1),
            ("TOPIC_PUT_NUMS", "%RETRY%g+orders", 1, 1),
            ("TOPIC_PUT_NUMS", "%DLQ%g", 1, 1),
            ("TOPIC_PUT_NUMS", "SCHEDULE_TOPIC_XXXX", 1, 1),
            ("GROUP_GET_NUMS", "orders@g", 5, 1),
            ("GROUP_GET_SIZE", "orders@CID_RMQ_SYS_TRANS", 70, 1),
            ("DLQ_PUT_NUMS", "orders@g", 1, 1),
            ("COMMIT_NUMS", "orders", 6, 1),
            ("DELAY_LATENCY", "orders", 12, 1),
            ("DELAY_LATENCY", "orders", 8, 1),
            ("GROUP_GET_LATENCY", "0@orders", 5, 1),  # kept for stats(), not exported
        ]
    )
    kind = {"message_type": "normal"}
    assert told_of(statistics) == {
        series("messages_in_total", "orders", **kind): 2,
        series("messages_in_total", "%RETRY%g+orders", retry=True, **kind): 1,
        series("messages_in_total", "%DLQ%g", retry=True, **kind): 1,
        series("messages_in_total", "SCHEDULE_TOPIC_XXXX", system=True, **kind): 1,
        series("throughput_in_total", "orders", **kind): 300,
        series("message_size_sum", "orders", **kind): 300,
        series("message_size_count", "orders", **kind): 2,
        series("messages_out_total", "orders", consumer_group="g"): 5,
        series("throughput_out_total", "orders", system=True, consumer_group="CID_RMQ_SYS_TRANS"): 70,
        series("send_to_dlq_messages_total", "orders", consumer_group="g"): 1,
        series("commit_messages_total", "orders"): 6,
        series("delay_message_latency_sum", "orders"): 20,
        series("delay_message_latency_count", "orders"): 2,
    }


def test_odd_label_values_are_escaped_and_surrogates_replaced(statistics: Statistics) -> None:
    text = told(statistics, {TIMING: [({"kind": 'say "no"\\\nx 2'}, 1)]})
    assert text.splitlines()[-1] == TIMING + r'{kind="say \"no\"\\\nx 2"} 1'
    statistics.lost(QueueKey("g\udc80", "t", 0), 1)
    assert 'consumer_group="g?"' in told(statistics).encode("utf-8").decode()
