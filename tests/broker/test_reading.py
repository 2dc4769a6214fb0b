"""Reads by offset: status, what a group is told, where it begins and begins anew (delivery#group-start)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mqstore import QueueRef
from mqstore.errors import ConfigError, GroupNotFoundError, NotPermittedError, OffsetOutOfRangeError, TopicNotFoundError
from tests.broker.support import START_MS, Bench, Broker

RETRY = "%RETRY%g"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "s", segment_bytes=4096)
    yield bench
    bench.broker.close()


@pytest.fixture
def broker(bench: Bench) -> Broker:
    """A broker with topic `t` of two queues."""
    bench.broker.topics.create("t", queues=2)
    return bench.broker


def _fill(bench: Bench, queue_id: int = 0, count: int = 5, step_ms: int = 0, size: int = 1) -> None:
    for _ in range(count):
        bench.broker.put("t", b"x" * size, queue_id=queue_id)
        bench.clock.advance(step_ms)
    bench.broker.store.dispatch()


def _lose_front(broker: Broker, keep: int = 2) -> int:
    """Have retention drop all segments but the last `keep`; the first offset left."""
    starts = broker.store.log_files.starts
    broker.store.flush()
    broker.store.dispatch()
    broker.store.drop_before(starts[-keep])
    return broker.store.offsets("t", 0)[0]


# -- status ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queue_id", "offset", "status", "next_offset", "found"),
    [
        (0, 0, "FOUND", 3, 3),
        (0, 3, "FOUND", 5, 2),
        (0, 5, "OFFSET_OVERFLOW_ONE", 5, 0),
        (0, 6, "OFFSET_OVERFLOW_BADLY", 5, 0),
        (0, -1, "OFFSET_TOO_SMALL", 0, 0),
        (1, 0, "NO_MATCHED_LOGIC_QUEUE", 0, 0),
        (1, 7, "NO_MATCHED_LOGIC_QUEUE", 0, 0),
    ],
)
@pytest.mark.parametrize("group", [None, "g"])
def test_statuses(
    bench: Bench, broker: Broker, queue_id: int, offset: int, status: str, next_offset: int, found: int, group: Any
) -> None:
    _fill(bench)
    result = broker.read("t", queue_id, offset, 3, group=group)
    assert (result.status, result.next_offset, len(result.messages), result.lost) == (status, next_offset, found, 0)
    assert (result.min_offset, result.max_offset) == ((0, 5) if queue_id == 0 else (0, 0))
    assert [m.offset for m in result.messages] == [*range(offset, offset + found)]
    assert bench.pulled("g", "t", queue_id) == (next_offset if group else None)


# -- who may -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("nowhere", 0, 0), TopicNotFoundError),
        (("t", 2, 0), ConfigError),
        (("t", -1, 0), ConfigError),
        (("t", 0, 0, 0), ConfigError),
    ],
)
@pytest.mark.parametrize("group", [None, "g"])
def test_bad_arguments(broker: Broker, arguments: Any, error: type[Exception], group: str | None) -> None:
    with pytest.raises(error):
        broker.read(*arguments, group=group)


def test_a_topic_or_group_without_permission_is_refused(broker: Broker) -> None:
    broker.groups.create("g", consume_enable=False)
    broker.groups.create("h")
    broker.groups.forbid("h", "t")
    for group in "gh":
        with pytest.raises(NotPermittedError):
            broker.read("t", 0, 0, group=group)
        with pytest.raises(NotPermittedError):
            broker.start_of(group, "t", 0)
    broker.read("t", 0, 0)
    broker.topics.alter("t", perm=2)
    with pytest.raises(NotPermittedError, match="may not be read"):
        broker.read("t", 0, 0)


def test_the_groups_retry_topic_passes_sql_filters_unexamined(broker: Broker) -> None:
    for topic in (RETRY, "t"):
        broker.topics.ensure(topic)
        for tag in "ab":
            broker.store.append(topic, 0, b"", properties={"TAGS": tag})
    sql, tags = broker.filter("TAGS = 'a'", "SQL92"), broker.filter("a")

    def offsets(topic: str, chosen: Any, group: str | None) -> list[int]:
        return [m.offset for m in broker.read(topic, 0, 0, filter=chosen, group=group).messages]

    assert offsets(RETRY, sql, "g") == [0, 1]
    assert offsets(RETRY, tags, "g") == [0]
    assert offsets(RETRY, sql, "other") == [0]
    assert offsets(RETRY, sql, None) == [0]
    assert offsets("t", sql, "g") == [0]


# -- what is lost ------------------------------------------------------------------------------------------------------


def test_group_behind_retention_hears_each_gap_once(
    bench: Bench, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    _fill(bench, count=100, size=200)
    first = _lose_front(broker, keep=5)
    assert first > 10
    with caplog.at_level(logging.WARNING, "mqstore"):
        result = broker.read("t", 0, 4, group="g")
    assert (result.status, result.next_offset, result.min_offset) == ("OFFSET_TOO_SMALL", first, first)
    assert result.lost == first - 4
    assert f"group g lost {first - 4} messages" in caplog.text
    assert bench.pulled("g", "t", 0) == first
    assert broker.read("t", 0, first, group="g").lost == 0
    assert broker.read("t", 0, 2, group="g").lost == first - 2  # another member, farther back
    assert broker.read("t", 0, 3).lost == first - 3  # nobody's loss
    assert broker.read("t", 0, 0, group="h").lost == first
    assert broker.stats().counters.lost == {("g", "t", 0): first - 4, ("h", "t", 0): first}
    second = _lose_front(broker, keep=2)
    assert second > first
    assert broker.read("t", 0, first + 1, group="h").lost == second - first - 1
    assert broker.stats().counters.lost["h", "t", 0] == second - 1


def test_an_offset_above_the_end_is_logged_for_groups(
    bench: Bench, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    _fill(bench)
    with caplog.at_level(logging.ERROR, "mqstore"):
        broker.read("t", 0, 9)
        broker.read("t", 0, 5, group="g")
        assert caplog.text == ""
        assert broker.read("t", 0, 9, group="g").lost == 0
    assert "group g is at 9 of t/0, which ends at 5" in caplog.text


@pytest.mark.parametrize(
    ("start", "offset", "status", "next_offset", "lost"),
    [
        (3, 0, "OFFSET_TOO_SMALL", 3, 3),
        (3, 2, "OFFSET_TOO_SMALL", 3, 1),
        (3, 3, "FOUND", 5, 0),
        (3, 5, "OFFSET_OVERFLOW_ONE", 5, 0),
        # Units that a power cut took back: what is put in their place counts again once the start is reached.
        (9, 5, "OFFSET_OVERFLOW_ONE", 5, 0),
        (9, 4, "OFFSET_TOO_SMALL", 5, 1),
    ],
)
def test_before_the_logical_start_nothing_counts(
    bench: Bench, broker: Broker, start: int, offset: int, status: str, next_offset: int, lost: int
) -> None:
    _fill(bench)
    broker.offsets.move_start("t", 0, start)
    result = broker.read("t", 0, offset, group="g")
    assert (result.status, result.next_offset, result.lost) == (status, next_offset, lost)
    assert (result.min_offset, result.max_offset) == (min(start, 5), 5)
    assert broker.min_offset("t", 0) == min(start, 5)


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_bounds_and_times(bench: Bench, broker: Broker) -> None:
    _fill(bench, step_ms=10)
    assert (broker.min_offset("t", 0), broker.max_offset("t", 0)) == (0, 5)
    assert (broker.min_offset("t", 1), broker.max_offset("t", 1)) == (0, 0)
    assert broker.offset_for_time("t", 0, START_MS + 11) == 2
    assert broker.offset_for_time("t", 0, START_MS + 11, "upper") == 1
    assert broker.offset_for_time("t", 0, START_MS + 1000) == 5
    assert broker.offset_for_time("t", 1, START_MS) == 0
    broker.offsets.move_start("t", 0, 3)
    assert broker.offset_for_time("t", 0, START_MS) == 3
    assert broker.offset_for_time("t", 0, START_MS, "upper") == 3
    for ask in (broker.min_offset, broker.max_offset, lambda *queue: broker.offset_for_time(*queue, 0)):
        with pytest.raises(TopicNotFoundError):
            ask("nowhere", 0)


# -- where a group begins ----------------------------------------------------------------------------------------------

_WHEN = datetime.fromtimestamp(START_MS / 1000, UTC) + timedelta(milliseconds=25)


@pytest.mark.parametrize(
    ("start", "position"),
    [(None, 1), ("earliest", 1), ("latest", 5), (_WHEN, 3), (START_MS + 20, 2), (START_MS, 1), (START_MS + 10_000, 5)],
)
def test_a_new_group_begins_where_it_says_and_that_is_committed(
    bench: Bench, broker: Broker, start: Any, position: int
) -> None:
    _fill(bench, step_ms=10)
    broker.offsets.move_start("t", 0, 1)
    assert broker.start_of("g", "t", 0, start) == position
    assert broker.committed("g", "t", 0) == position
    _fill(bench)
    assert broker.start_of("g", "t", 0, "earliest") == position  # from then on it goes on there
    assert broker.start_of("g", "t", 0, "latest") == position


def test_latest_means_the_end_of_what_there_was_when_the_group_came(bench: Bench, broker: Broker) -> None:
    """A queue that was added later, and had messages before a member came to it, was begun at its end: they were
    skipped."""
    _fill(bench)
    assert broker.start_of("g", "t", 0, "latest") == 5
    assert broker.committed("g", "t", 1) == 0  # of every queue at once: what comes from now on is not skipped
    broker.topics.alter("t", read_queues=3, write_queues=3)
    broker.put("t", b"new", queue_id=2)
    assert broker.start_of("g", "t", 2, "latest") == 0


@pytest.mark.parametrize("start", ["first", True, 1.5])
def test_a_start_that_is_none(broker: Broker, start: Any) -> None:
    with pytest.raises(ConfigError, match="start must be"):
        broker.start_of("g", "t", 0, start)
    assert broker.committed("g", "t", 0) is None


# -- and begins anew ---------------------------------------------------------------------------------------------------


def test_the_next_read_after_a_reset_says_so_once(bench: Bench, broker: Broker) -> None:
    _fill(bench)
    assert broker.read("t", 0, 0, group="g").next_offset == 5
    assert broker.reset("g", "t", 0, 2) == {QueueRef("t", 0): 2}
    assert bench.pulled("g", "t", 0) == 2
    broker.commit("g", "t", 0, 5)  # late: dropped
    assert broker.committed("g", "t", 0) == 2
    assert broker.read("t", 0, 5).status == "OFFSET_OVERFLOW_ONE"  # nobody's read takes it
    assert broker.read("t", 0, 5, group="h").status == "OFFSET_OVERFLOW_ONE"
    result = broker.read("t", 0, 5, group="g")
    assert (result.status, result.messages, result.next_offset, result.lost) == ("OFFSET_RESET", [], 2, 0)
    assert (result.min_offset, result.max_offset) == (0, 5)
    assert bench.pulled("g", "t", 0) == 2
    assert broker.read("t", 0, 2, group="g").status == "FOUND"


@pytest.mark.parametrize(
    ("to", "positions"),
    [("earliest", (1, 0)), ("latest", (5, 3)), (1, (1, 1)), (_WHEN, (3, 0)), (_WHEN + timedelta(days=1), (5, 3))],
)
def test_a_reset_of_all_queues(bench: Bench, broker: Broker, to: Any, positions: tuple[int, int]) -> None:
    _fill(bench, step_ms=10)
    _fill(bench, queue_id=1, count=3)
    broker.offsets.move_start("t", 0, 1)
    broker.groups.create("g")
    assert broker.reset("g", "t", None, to) == {QueueRef("t", i): positions[i] for i in (0, 1)}
    assert tuple(broker.committed("g", "t", i) for i in (0, 1)) == positions


@pytest.mark.parametrize("to", [-1, 4, 6])
def test_a_reset_is_of_all_queues_or_of_none(bench: Bench, broker: Broker, to: int) -> None:
    _fill(bench)
    _fill(bench, queue_id=1, count=3)
    broker.groups.create("g")
    with pytest.raises(OffsetOutOfRangeError):
        broker.reset("g", "t", None, to)
    assert [broker.committed("g", "t", i) for i in (0, 1)] == [None, None]
    assert [broker.read("t", i, 0, group="g").status for i in (0, 1)] == ["FOUND", "FOUND"]


def test_a_reset_needs_a_topic_and_a_group(bench: Bench, broker: Broker) -> None:
    _fill(bench)
    with pytest.raises(GroupNotFoundError):
        broker.reset("g", "t", 0, "latest")
    broker.commit("g", "t", 0, 1)
    for topic, queue_id, to, error in (
        ("nowhere", 0, "latest", TopicNotFoundError),
        ("t", 2, "latest", ConfigError),
        ("t", 0, True, ConfigError),
    ):
        with pytest.raises(error):
            broker.reset("g", topic, queue_id, to)  # type: ignore[arg-type]
    broker.groups.delete("g")
    broker.reset("g", "t", 0, "latest")  # of a directory whose groups nobody entered
