"""Reads by offset: status, what a group is told, where it begins and begins anew (delivery#group-start)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mqstore import QueueRef
from mqstore.broker.context import Parts
from mqstore.broker.filters.filter import parse_filter
from mqstore.broker.names import QueueKey, retry_topic
from mqstore.broker.reading import Reads, Start
from mqstore.errors import ConfigError, GroupNotFoundError, NotPermittedError, OffsetOutOfRangeError, TopicNotFoundError
from tests.broker.support import START_MS, clock_of, new_parts


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    """Tables of a store with topic `t` of two queues."""
    parts = new_parts(tmp_path / "s", segment_bytes=4096)
    parts.topics.create("t", queues=2)
    yield parts
    parts.store.close()


@pytest.fixture
def reads(parts: Parts) -> Reads:
    return Reads(parts)


def _fill(parts: Parts, topic: str = "t", queue_id: int = 0, count: int = 5, step_ms: int = 0, size: int = 1) -> None:
    for _ in range(count):
        parts.store.put(topic, b"x" * size, queue_id)
        clock_of(parts).advance(step_ms)
    parts.store.dispatch()


def _lose_front(parts: Parts, keep: int = 2) -> int:
    """Have retention drop all segments but the last `keep`; the first offset left."""
    starts = parts.store.log_files.starts
    parts.store.flush()
    parts.store.dispatch()
    parts.store.drop_before(starts[-keep])
    return parts.store.offsets("t", 0)[0]


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
    parts: Parts, reads: Reads, queue_id: int, offset: int, status: str, next_offset: int, found: int, group: str | None
) -> None:
    _fill(parts)
    result = reads.read("t", queue_id, offset, 3, group=group)
    assert (result.status, result.next_offset, len(result.messages), result.lost) == (status, next_offset, found, 0)
    assert (result.min_offset, result.max_offset) == ((0, 5) if queue_id == 0 else (0, 0))
    assert [m.offset for m in result.messages] == [*range(offset, offset + found)]
    assert parts.offsets.query_pull(QueueKey("g", "t", queue_id)) == (next_offset if group else None)


def test_filtered_messages_are_skipped(parts: Parts, reads: Reads) -> None:
    for tag in "aab":
        parts.store.put("t", b"", 0, tag=tag)
    result = reads.read("t", 0, 0, filter=parse_filter("b"))
    assert ([m.tag for m in result.messages], result.next_offset) == (["b"], 3)
    result = reads.read("t", 0, 0, filter=parse_filter("c"), group="g")
    assert (result.status, result.next_offset) == ("NO_MATCHED_MESSAGE", 3)
    assert parts.offsets.query_pull(QueueKey("g", "t", 0)) == 3


def test_the_limits_are_the_callers(parts: Parts, reads: Reads) -> None:
    _fill(parts, count=100, size=100)
    assert len(reads.read("t", 0, 0, 100).messages) == 100
    size = reads.read("t", 0, 0, 1).messages[0].size
    assert len(reads.read("t", 0, 0, 100, max_bytes=3 * size).messages) == 3
    assert len(reads.read("t", 0, 0, 100, max_bytes=1).messages) == 1


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
def test_bad_arguments(reads: Reads, arguments: tuple[Any, ...], error: type[Exception]) -> None:
    with pytest.raises(error):
        reads.read(*arguments)
    with pytest.raises(error):
        reads.read(*arguments, group="g")


def test_a_topic_that_may_not_be_read(parts: Parts, reads: Reads) -> None:
    parts.topics.alter("t", perm=2)
    with pytest.raises(NotPermittedError, match="may not be read"):
        reads.read("t", 0, 0)


def test_a_group_that_may_not_consume(parts: Parts, reads: Reads) -> None:
    parts.groups.create("g", consume_enable=False)
    parts.groups.create("h")
    parts.groups.forbid("h", "t")
    for group in "gh":
        with pytest.raises(NotPermittedError):
            reads.read("t", 0, 0, group=group)
        with pytest.raises(NotPermittedError):
            reads.first_position(QueueKey(group, "t", 0))
    reads.read("t", 0, 0)


def test_an_unknown_group_is_made_unless_that_is_off(parts: Parts, reads: Reads, tmp_path: Path) -> None:
    reads.read("t", 0, 0, group="g")
    assert parts.groups.get("g") is not None
    closed = new_parts(tmp_path / "closed", auto_create_groups=False)
    closed.topics.create("t")
    with pytest.raises(GroupNotFoundError):
        Reads(closed).read("t", 0, 0, group="g")
    closed.store.close()


def test_the_groups_retry_topic_passes_sql_filters_unexamined(parts: Parts, reads: Reads) -> None:
    for topic in (retry_topic("g"), "t"):
        parts.topics.ensure(topic)
        for tag in "ab":
            parts.store.append(topic, 0, b"", properties={"TAGS": tag})
    sql, tags = parse_filter("TAGS = 'a'", "SQL92"), parse_filter("a")

    def offsets(topic: str, chosen: Any, group: str | None) -> list[int]:
        return [m.offset for m in reads.read(topic, 0, 0, filter=chosen, group=group).messages]

    assert offsets(retry_topic("g"), sql, "g") == [0, 1]
    assert offsets(retry_topic("g"), tags, "g") == [0]
    assert offsets(retry_topic("g"), sql, "other") == [0]
    assert offsets(retry_topic("g"), sql, None) == [0]
    assert offsets("t", sql, "g") == [0]


# -- what is lost ------------------------------------------------------------------------------------------------------


def test_group_behind_retention_hears_the_gap(parts: Parts, reads: Reads, caplog: pytest.LogCaptureFixture) -> None:
    _fill(parts, count=100, size=200)
    first = _lose_front(parts)
    assert first > 10
    with caplog.at_level(logging.WARNING, "mqstore"):
        result = reads.read("t", 0, 4, group="g")
    assert (result.status, result.next_offset, result.min_offset) == ("OFFSET_TOO_SMALL", first, first)
    assert result.lost == first - 4
    assert f"group g lost {first - 4} messages" in caplog.text
    assert parts.offsets.query_pull(QueueKey("g", "t", 0)) == first
    assert reads.read("t", 0, first, group="g").lost == 0
    assert reads.read("t", 0, 2, group="g").lost == first - 2  # another member, farther back
    assert reads.read("t", 0, 3).lost == first - 3  # nobody's loss
    assert reads.read("t", 0, 0, group="h").lost == first
    assert parts.statistics.snapshot().lost == {("g", "t", 0): first - 4, ("h", "t", 0): first}


def test_a_second_loss_is_added(parts: Parts, reads: Reads) -> None:
    _fill(parts, count=100, size=200)
    first = _lose_front(parts, keep=5)
    reads.read("t", 0, 0, group="g")
    second = _lose_front(parts, keep=2)
    assert second > first
    assert reads.read("t", 0, first + 1, group="g").lost == second - first - 1
    assert parts.statistics.snapshot().lost == {("g", "t", 0): second - 1}


def test_an_offset_above_the_end_is_logged_for_groups(
    parts: Parts, reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    _fill(parts)
    with caplog.at_level(logging.ERROR, "mqstore"):
        reads.read("t", 0, 9)
        reads.read("t", 0, 5, group="g")
        assert caplog.text == ""
        assert reads.read("t", 0, 9, group="g").lost == 0
    assert "group g is at 9 of t/0, which ends at 5" in caplog.text


@pytest.mark.parametrize(
    ("offset", "status", "next_offset", "lost"),
    [
        (0, "OFFSET_TOO_SMALL", 3, 3),
        (2, "OFFSET_TOO_SMALL", 3, 1),
        (3, "FOUND", 5, 0),
        (5, "OFFSET_OVERFLOW_ONE", 5, 0),
    ],
)
def test_before_the_logical_start_nothing_counts(
    parts: Parts, reads: Reads, offset: int, status: str, next_offset: int, lost: int
) -> None:
    _fill(parts)
    parts.offsets.move_start("t", 0, 3)
    result = reads.read("t", 0, offset, group="g")
    assert (result.status, result.next_offset, result.lost) == (status, next_offset, lost)
    assert (result.min_offset, result.max_offset) == (3, 5)
    assert reads.min_offset("t", 0) == 3


def test_a_logical_start_behind_the_end_is_the_end(parts: Parts, reads: Reads) -> None:
    """Units that a power cut took back: what is put in their place counts again once the start is reached."""
    _fill(parts)
    parts.offsets.move_start("t", 0, 9)
    result = reads.read("t", 0, 5, group="g")
    assert (result.status, result.next_offset, result.min_offset) == ("OFFSET_OVERFLOW_ONE", 5, 5)
    result = reads.read("t", 0, 4, group="g")
    assert (result.status, result.next_offset, result.lost) == ("OFFSET_TOO_SMALL", 5, 1)


def test_delivered_messages_are_counted(parts: Parts, reads: Reads) -> None:
    _fill(parts)
    size = sum(m.size for m in reads.read("t", 0, 0).messages)
    reads.read("t", 0, 0, group="g")
    reads.read("t", 0, 5, group="g")
    reads.read("t", 0, 0, group="g", delivers=False)
    [(key, fetched)] = reads.counts().items()
    assert key == ("g", "t", 0)
    assert (fetched.times, fetched.messages, fetched.size, fetched.reads) == (1, 5, size, 2)
    assert reads.counts() == {}


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_bounds_and_times(parts: Parts, reads: Reads) -> None:
    _fill(parts, step_ms=10)
    assert (reads.min_offset("t", 0), reads.max_offset("t", 0)) == (0, 5)
    assert (reads.min_offset("t", 1), reads.max_offset("t", 1)) == (0, 0)
    assert reads.offset_for_time("t", 0, START_MS + 11) == 2
    assert reads.offset_for_time("t", 0, START_MS + 11, "upper") == 1
    assert reads.offset_for_time("t", 0, START_MS + 1000) == 5
    assert reads.offset_for_time("t", 1, START_MS) == 0
    parts.offsets.move_start("t", 0, 3)
    assert reads.offset_for_time("t", 0, START_MS) == 3
    assert reads.offset_for_time("t", 0, START_MS, "upper") == 3
    for ask in (reads.min_offset, reads.max_offset):
        with pytest.raises(TopicNotFoundError):
            ask("nowhere", 0)
    with pytest.raises(TopicNotFoundError):
        reads.offset_for_time("nowhere", 0, 0)


# -- where a group begins ----------------------------------------------------------------------------------------------

_WHEN = datetime.fromtimestamp(START_MS / 1000, UTC) + timedelta(milliseconds=25)


@pytest.mark.parametrize(
    ("start", "position"),
    [(None, 1), ("earliest", 1), ("latest", 5), (_WHEN, 3), (START_MS + 20, 2), (START_MS, 1), (START_MS + 10_000, 5)],
)
def test_a_new_group_begins_where_it_says_and_that_is_committed(
    parts: Parts, reads: Reads, start: Start | None, position: int
) -> None:
    _fill(parts, step_ms=10)
    parts.offsets.move_start("t", 0, 1)
    assert reads.first_position(QueueKey("g", "t", 0), start) == position
    assert parts.offsets.committed(QueueKey("g", "t", 0)) == position
    _fill(parts)
    assert reads.first_position(QueueKey("g", "t", 0), "earliest") == position  # from then on it goes on there
    assert reads.first_position(QueueKey("g", "t", 0), "latest") == position


def test_the_groups_own_start_is_the_default(parts: Parts, reads: Reads) -> None:
    _fill(parts)
    parts.groups.create("g", start="latest")
    assert reads.first_position(QueueKey("g", "t", 0)) == 5
    assert reads.first_position(QueueKey("g", "t", 1)) == 0


def test_latest_means_the_end_of_what_there_was_when_the_group_came(parts: Parts, reads: Reads) -> None:
    """A queue that was added later, and had messages before a member came to it, was begun at its end: they were
    skipped."""
    parts.topics.alter("t", read_queues=2, write_queues=2)
    _fill(parts)
    assert reads.first_position(QueueKey("g", "t", 0), "latest") == 5
    assert (
        parts.offsets.committed(QueueKey("g", "t", 1)) == 0
    )  # of every queue at once: what comes from now on is not skipped
    parts.topics.alter("t", read_queues=3, write_queues=3)
    parts.store.put("t", b"new", 2)
    parts.store.dispatch()
    assert reads.first_position(QueueKey("g", "t", 2), "latest") == 0


def test_offset_zero_is_a_commit(parts: Parts, reads: Reads) -> None:
    _fill(parts)
    parts.offsets.commit(QueueKey("g", "t", 0), 0)
    assert reads.first_position(QueueKey("g", "t", 0), "latest") == 0


@pytest.mark.parametrize("start", ["earliest", "latest", START_MS + 10_000])
def test_retries_are_always_read_from_the_first(parts: Parts, reads: Reads, start: Start) -> None:
    parts.topics.ensure(retry_topic("g"))
    _fill(parts, retry_topic("g"))
    assert reads.first_position(QueueKey("g", retry_topic("g"), 0), start) == 0


@pytest.mark.parametrize("start", ["first", True, 1.5])
def test_a_start_that_is_none(parts: Parts, reads: Reads, start: Any) -> None:
    with pytest.raises(ConfigError, match="start must be"):
        reads.first_position(QueueKey("g", "t", 0), start)
    assert parts.offsets.committed(QueueKey("g", "t", 0)) is None


# -- and begins anew ---------------------------------------------------------------------------------------------------


def test_the_next_read_after_a_reset_says_so_once(parts: Parts, reads: Reads) -> None:
    _fill(parts)
    assert reads.read("t", 0, 0, group="g").next_offset == 5
    assert reads.reset("g", "t", 0, 2) == {QueueRef("t", 0): 2}
    assert parts.offsets.query_pull(QueueKey("g", "t", 0)) == 2
    parts.offsets.commit(QueueKey("g", "t", 0), 5)  # late: dropped
    assert parts.offsets.committed(QueueKey("g", "t", 0)) == 2
    assert reads.read("t", 0, 5).status == "OFFSET_OVERFLOW_ONE"  # nobody's read takes it
    assert reads.read("t", 0, 5, group="h").status == "OFFSET_OVERFLOW_ONE"
    result = reads.read("t", 0, 5, group="g")
    assert (result.status, result.messages, result.next_offset, result.lost) == ("OFFSET_RESET", [], 2, 0)
    assert (result.min_offset, result.max_offset) == (0, 5)
    assert parts.offsets.query_pull(QueueKey("g", "t", 0)) == 2
    assert reads.read("t", 0, 2, group="g").status == "FOUND"


@pytest.mark.parametrize(
    ("to", "positions"),
    [("earliest", (1, 0)), ("latest", (5, 3)), (1, (1, 1)), (_WHEN, (3, 0)), (_WHEN + timedelta(days=1), (5, 3))],
)
def test_a_reset_of_all_queues(parts: Parts, reads: Reads, to: Any, positions: tuple[int, int]) -> None:
    _fill(parts, step_ms=10)
    _fill(parts, queue_id=1, count=3)
    parts.offsets.move_start("t", 0, 1)
    parts.groups.create("g")
    told: list[Any] = []
    expected = {QueueRef("t", 0): positions[0], QueueRef("t", 1): positions[1]}
    assert reads.reset("g", "t", None, to, lambda *reset: told.append(reset)) == expected
    assert told == [(("g", "t", 0), positions[0]), (("g", "t", 1), positions[1])]
    assert parts.offsets.of_group("g") == {("t", 0): positions[0], ("t", 1): positions[1]}


@pytest.mark.parametrize("to", [-1, 4, 6])
def test_a_reset_is_of_all_queues_or_of_none(parts: Parts, reads: Reads, to: int) -> None:
    _fill(parts)
    _fill(parts, queue_id=1, count=3)
    parts.groups.create("g")
    with pytest.raises(OffsetOutOfRangeError):
        reads.reset("g", "t", None, to)
    assert parts.offsets.of_group("g") == {}
    assert parts.offsets.resets == {}


def test_a_reset_needs_a_topic_and_a_group(parts: Parts, reads: Reads) -> None:
    _fill(parts)
    with pytest.raises(GroupNotFoundError):
        reads.reset("g", "t", 0, "latest")
    parts.offsets.commit(QueueKey("g", "t", 0), 1)  # of a directory whose groups nobody entered
    reads.reset("g", "t", 0, "latest")
    with pytest.raises(TopicNotFoundError):
        reads.reset("g", "nowhere", 0, "latest")
    with pytest.raises(ConfigError):
        reads.reset("g", "t", 2, "latest")
    with pytest.raises(ConfigError, match="start must be"):
        reads.reset("g", "t", 0, True)
