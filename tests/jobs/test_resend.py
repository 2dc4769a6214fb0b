"""Sending dead letters again in one store or many: those that were chosen, and nothing if one of them cannot be."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mqstore import SimulatedClock
from mqstore.admin import DeadLetters
from mqstore.broker.background.context import open_tables
from mqstore.errors import ConfigError, FilterError, InvalidMessageError, StoreLockedError
from mqstore.jobs import dlq_report, dlq_resend, select
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore
from tests.log.support import files
from tests.tools.brokers import broker, clock_now


def fail(path: Path, count: int, *, topic: str = "orders", group: str = "billing", first: int = 0) -> None:
    """`group` gives up `count` messages of `topic`, with two reasons by turns."""
    clock = SimulatedClock(clock_now().now_ms() - 3_600_000)
    with broker(path, clock, dlq_retention=None) as running:
        running.topics.create(topic, queues=1)
        for i in range(first, first + count):
            running.put(topic, b"%d" % i, keys=f"k{i}")
            running.run_once()
            [delivery] = running.pop(group, topic, 1)
            running.dead_letter(group, topic, delivery.receipt, ("timeout", "no item")[i % 2])
            clock.advance(1000)


@pytest.fixture
def stores(tmp_path: Path) -> dict[str, Path]:
    """`a` with six letters of `billing`, `b` with two, and three of `audit`."""
    fail(tmp_path / "a", 6)
    fail(tmp_path / "b", 2, first=10)
    fail(tmp_path / "b", 3, topic="other", group="audit", first=20)
    return {name: tmp_path / name for name in "ab"}


def left(path: Path, group: str = "billing") -> list[bytes]:
    with ReadOnlyMessageStore(path) as store:
        return [bytes(letter.body) for letter in DeadLetters(open_tables(store), group)]


def rows(report: Any) -> list[tuple[str, str, int, dict[str, int]]]:
    return [(row.store, row.group, row.count, dict(row.topics)) for row in report.letters]


def test_all_letters_of_all_stores_are_sent_once(stores: dict[str, Path]) -> None:
    planned = dlq_resend(stores, all_groups=True, dry_run=True)
    done = dlq_resend(stores, all_groups=True)

    assert (
        rows(done)
        == rows(planned)
        == [("a", "billing", 6, {"orders": 6}), ("b", "audit", 3, {"other": 3}), ("b", "billing", 2, {"orders": 2})]
    )
    assert (planned.dry_run, done.dry_run, done.count) == (True, False, 11)
    assert left(stores["a"]) == left(stores["b"]) == left(stores["b"], "audit") == []
    with ReadOnlyMessageStore(stores["a"]) as store:
        bodies = [bytes(message.body) for message in store.iter("orders")]
    assert sorted(bodies) == sorted(2 * [b"%d" % i for i in range(6)])
    assert dlq_resend(stores, all_groups=True).count == 0


@pytest.mark.parametrize(
    ("chosen", "options", "expected"),
    [
        ({"where": "dlq_reason = 'no item'"}, {}, [("a", 3), ("b", 1), ("b", 1)]),
        ({"topics": "other"}, {}, [("b", 3)]),
        ({"start": datetime(2100, 1, 1, tzinfo=UTC)}, {}, []),
        ({}, {"groups": ["audit"]}, [("b", 3)]),
    ],
)
def test_letters_are_chosen_and_the_others_stay(
    stores: dict[str, Path], chosen: dict[str, Any], options: dict[str, Any], expected: list[tuple[str, int]]
) -> None:
    done = dlq_resend(select(stores, **chosen), **options)

    assert [(row.store, row.count) for row in done.letters] == expected
    assert dlq_report(stores).total == 11 - done.count
    assert dlq_resend(stores).count == 11 - done.count


def test_letters_are_chosen_by_offset_in_one_group_of_one_store(stores: dict[str, Path]) -> None:
    assert dlq_resend(stores["a"], groups=["billing"], offsets=[1, 4]).count == 2
    assert left(stores["a"]) == [b"0", b"2", b"3", b"5"]
    with pytest.raises(ConfigError, match="no dead letter of 'billing' at offset 4, 7; nothing was sent"):
        dlq_resend(stores["a"], groups=["billing"], offsets=[0, 4, 7])
    for arguments in ({"stores": stores, "groups": ["billing"]}, {"stores": stores["a"]}):
        with pytest.raises(ConfigError, match="need exactly one store and one group"):
            dlq_resend(**arguments, offsets=[0])  # type: ignore[arg-type]
    assert left(stores["a"]) == [b"0", b"2", b"3", b"5"]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"to_topic": "%DLQ%x"}, InvalidMessageError, "to the dead-letter topic"),
        ({"to_topic": "no blanks"}, InvalidMessageError, "no blanks"),
        ({"groups": ["nobody", "audit"]}, ConfigError, "no store has the group 'nobody'; existing: 'audit', 'bi"),
    ],
)
def test_unsendable_message_leaves_all_stores(
    stores: dict[str, Path], arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    before = {name: files(path) for name, path in stores.items()}

    with pytest.raises(error, match=says):
        dlq_resend(stores, **arguments)
    with pytest.raises((FilterError, ConfigError)):
        dlq_resend(select(stores, where="n >"))
    with MessageStore(stores["b"]), pytest.raises(StoreLockedError, match="open for writing"):
        dlq_resend(stores)

    assert files(stores["a"]) == before["a"]
    assert {name: dlq_report(path).total for name, path in stores.items()} == {"a": 6, "b": 5}


@pytest.mark.parametrize(
    "options",
    [
        {"keys": "k1"},
        {"tags": "T"},
        {"assign": '{"orders": [0]}'},
        {"subscribePattern": "o.*"},
        {"startingOffsets": "latest"},
        {"endingOffsets": "earliest"},
    ],
)
def test_an_option_that_would_choose_is_not_passed_over(stores: dict[str, Path], options: dict[str, str]) -> None:
    """All letters were sent, whatever the option said, and counted."""
    before = files(stores["a"])
    chosen = select(stores["a"], options=options)

    for job in (dlq_resend, dlq_report):
        with pytest.raises(ConfigError, match=f"option {next(iter(options))} has no effect in this job"):
            job(chosen)
    assert files(stores["a"]) == before
