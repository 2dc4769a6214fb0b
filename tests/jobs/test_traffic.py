"""Traffic: what arrays add up to is what a loop over messages adds up to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mqstore as library
from mqstore import Message
from mqstore.errors import ConfigError, CorruptStoreError
from mqstore.jobs import select, traffic_report
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading.opening import StoreName
from mqstore.jobs.traffic import TrafficReport
from mqstore.jobs.views import view_batch
from tests.columnar.support import Odd, many, odd_records, write_store
from tests.conftest import Golden
from tests.log.support import flip

T0 = 1_700_000_000_000
YEAR_1_MS, YEAR_9999_MS = -62_135_596_800_000, 253_402_300_799_999


def messages(path: Path, topics: Callable[[str], bool]) -> list[Message]:
    with library.open(path, "r") as store:
        refs = [ref for topic in store.topics(system=True) if topics(topic) for ref in store.queues(topic)]
        return [m for ref in refs for m in store.iter(*ref)]


def counted(topic: str) -> bool:
    """Of users, or of retries."""
    return not topic.startswith(("%DLQ%", "rmq_sys_", "RMQ_SYS_")) and topic not in (
        "SCHEDULE_TOPIC_XXXX",
        "TRANS_CHECK_MAX_TIME_TOPIC",
    )


def size(message: Message) -> int:
    return len(message.body_view)


def delay(message: Message) -> int:
    born, stored = (
        min(max(ms, YEAR_1_MS), YEAR_9999_MS) for ms in (message.born_timestamp_ms, message.store_timestamp_ms)
    )
    return max(0, stored - born)


def rank(values: Sequence[int], percent: int) -> int:
    return sorted(values)[max(1, -(-len(values) * percent // 100)) - 1]


def assert_row(row: Any, found: list[Message], interval_ms: int) -> None:
    """The row against a loop over its messages."""
    assert row.messages == len(found)
    assert row.bytes == sum(map(size, found))
    assert row.retries == sum(m.reconsume_times > 0 for m in found)
    if not found:
        return
    intervals = Counter(m.store_timestamp_ms // interval_ms for m in found)
    first, last = min(intervals) * interval_ms, (max(intervals) + 1) * interval_ms
    assert (row.first_ms, row.last_ms) == (first, last)
    assert row.rate == pytest.approx(len(found) * 1000 / (last - first), abs=1e-6)
    assert row.peak_rate == pytest.approx(max(intervals.values()) * 1000 / interval_ms, abs=1e-6)
    sizes, delays = [*map(size, found)], [*map(delay, found)]
    assert (row.size_max, row.delay_max_ms) == (max(sizes), max(delays))
    for percent, value, values in (
        (50, row.size_p50, sizes),
        (95, row.size_p95, sizes),
        (50, row.delay_p50_ms, delays),
        (95, row.delay_p95_ms, delays),
    ):
        assert abs(value - rank(values, percent)) <= rank(values, percent) / 32


def assert_report(report: TrafficReport, found: list[Message], interval_ms: int) -> None:
    """Rows by topic and queue, and their series."""
    groups: dict[Any, list[Message]] = {}
    for message in found:
        groups.setdefault((message.topic, message.queue_id), []).append(message)
    assert {(row.topic, row.queue_id) for row in report.rows} == set(groups)
    for row in report.rows:
        assert_row(row, groups[row.topic, row.queue_id], interval_ms)
    assert [row.messages for row in report.rows] == sorted((row.messages for row in report.rows), reverse=True)
    points = {(p.topic, p.queue_id, p.start_ms): (p.messages, p.bytes) for p in report.series}
    model: dict[Any, tuple[int, int]] = {}
    for message in found:
        at = (message.topic, message.queue_id, message.store_timestamp_ms // interval_ms * interval_ms)
        count, length = model.get(at, (0, 0))
        model[at] = count + 1, length + size(message)
    assert points == model
    assert len(points) == len(report.series)
    assert_row(report.total, found, interval_ms)


@pytest.mark.parametrize(("name", "interval"), [("clean", "1s"), ("trimmed", "5m")])
def test_the_traffic_of_a_java_store_is_that_of_its_messages(golden: Golden, name: str, interval: str) -> None:
    path = golden(name).path
    chosen = select(path, options={"minPartitions": "4"})

    report = traffic_report(chosen, interval=interval, by=("topic", "queue_id"))

    assert_report(report, messages(path, counted), {"1s": 1000, "5m": 300_000}[interval])


@given(records=st.lists(odd_records(), min_size=1, max_size=40), parts=st.sampled_from(["1", "5"]))
def test_the_traffic_of_any_store_is_that_of_its_messages(
    tmp_path_factory: pytest.TempPathFactory, records: list[Odd], parts: str
) -> None:
    path = write_store(tmp_path_factory.mktemp("any") / "s", records)
    chosen = select(path, options={"minPartitions": parts})

    report = traffic_report(chosen, interval="365d", by=("queue_id", "topic"))

    assert report.by == ("topic", "queue_id")
    assert_report(report, messages(path, counted), 365 * 86_400_000)


def test_stores_are_separate_or_summed(tmp_path: Path) -> None:
    paths = {name: write_store(tmp_path / name, many(count)) for name, count in (("a", 40), ("b", 8))}

    by_store = traffic_report(paths, topics="t", by=["store"])
    together = traffic_report(paths, topics="t", by=[])

    assert [(row.store, row.topic, row.messages) for row in by_store.rows] == [("a", None, 20), ("b", None, 4)]
    assert [(row.store, row.messages) for row in together.rows] == [(None, 24)]
    assert_row(together.total, [m for path in paths.values() for m in messages(path, "t".__eq__)], 60_000)


def test_without_topics_retries_count_and_dead_letters_do_not(tmp_path: Path) -> None:
    path = write_store(
        tmp_path / "s",
        [
            Odd(topic="t"),
            Odd(topic="%RETRY%g", reconsume_times=2),
            Odd(topic="%DLQ%g"),
            Odd(topic="SCHEDULE_TOPIC_XXXX"),
            Odd(topic="rmq_sys_wheel_timer"),
        ],
    )

    report = traffic_report(path)

    assert {row.topic: row.retries for row in report.rows} == {"t": 0, "seed": 0, "%RETRY%g": 1}
    assert report.total.messages == 3
    assert [row.topic for row in traffic_report(path, topics="%DLQ%g").rows] == ["%DLQ%g"]
    everything = traffic_report(select(path, options={"includeSystemTopics": "true"}))
    assert everything.total.messages == 6


def test_filters_and_bounds_count(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(80))

    report = traffic_report(select(path, topics="t", start=str(T0 + 12), where="n < 40", options={"tags": "a"}))

    assert report.total.messages == len([i for i in range(80) if i % 6 == 0 and 12 <= i < 40])


@pytest.mark.parametrize("on_corrupt", ["skip", "keep"])
def test_damaged_messages_stop_it_or_are_counted_apart(tmp_path: Path, on_corrupt: str) -> None:
    path = write_store(tmp_path / "s", many(80))
    log = path / "commitlog" / f"{0:020d}"
    with library.open(path, "r") as store:
        place = store.read("t", 0, 4)[0].physical_offset
    flip(log, place + 100)

    with pytest.raises(CorruptStoreError):
        traffic_report(select(path, options={"verify": "true"}))
    report = traffic_report(select(path, options={"verify": "true", "onCorrupt": on_corrupt}))
    assert (report.damaged, report.total.messages) == (1, 80)
    # Without checksums what is wrong inside does not matter, and a header that is wrong does.
    assert traffic_report(path).total.messages == 81
    flip(log, place + 4)
    with pytest.raises(CorruptStoreError):
        traffic_report(path)
    assert traffic_report(select(path, options={"onCorrupt": on_corrupt})).damaged == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"interval": "fast"}, "interval='fast': not a duration; give a duration of at least 1s"),
        ({"interval": "10ms"}, "interval='10ms': too short"),
        ({"by": "topic"}, "by='topic': give some of store, topic, queue_id"),
        ({"by": ["tag"]}, "by="),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        traffic_report("/nowhere", **arguments)


def test_too_many_intervals_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqstore.columnar.tally.MAX_INTERVALS", 9)
    path = write_store(tmp_path / "s", [Odd(store_ms=T0 + 1000 * i) for i in range(75)])

    with pytest.raises(ConfigError, match="interval=1000 ms cuts a queue into 75 intervals, which is more than 9"):
        traffic_report(path, topics="t", interval="1s")


def test_nothing_gives_an_empty_report(tmp_path: Path) -> None:
    report = traffic_report(select(write_store(tmp_path / "s", []), topics="seed", stop="1"))

    assert (report.total.messages, report.rows, report.series, report.total.first_ms) == (0, (), (), None)


# -- the same as a view ------------------------------------------------------------------------------------------------


def test_the_view_has_a_row_for_each_queue_and_interval(golden: Golden) -> None:
    path = golden("clean").path
    options = SourceOptions.parse(
        {"path": str(path), "view": "traffic", "interval": "1s", "includeSystemTopics": "true"}
    )

    rows = view_batch("traffic", StoreName("one", str(path)), options).to_pylist()

    groups: dict[Any, list[Message]] = {}
    for message in messages(path, lambda topic: True):
        at = (message.topic, message.queue_id, message.store_timestamp_ms // 1000)
        groups.setdefault(at, []).append(message)
    assert [(row["topic"], row["queue_id"], int(row["interval_start"].timestamp())) for row in rows] == sorted(groups)
    for row in rows:
        found = groups[row["topic"], row["queue_id"], int(row["interval_start"].timestamp())]
        sizes = [*map(size, found)]
        assert (row["store"], row["messages"], row["bytes"]) == ("one", len(found), sum(sizes))
        assert row["size_max"] == max(sizes)
        for name, percent in (("size_p50", 50), ("size_p95", 95)):
            assert abs(row[name] - rank(sizes, percent)) <= rank(sizes, percent) / 32


def test_an_interval_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match="option interval='10ms': too short; give a duration from 1s"):
        SourceOptions.parse({"path": "x", "interval": "10ms"})
