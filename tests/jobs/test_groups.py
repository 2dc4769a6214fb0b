"""Lag, dead letters, traces and delays of stores that a broker has worked on. Without pyspark."""

from __future__ import annotations

import shutil
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import mqstore as library
from mqstore import SimulatedClock
from mqstore.admin import offline, operations
from mqstore.broker.tables.names import QueueKey
from mqstore.errors import ConfigError
from mqstore.jobs import dlq_report, dlq_resend, lag_report, select, trace
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading.opening import StoreName
from mqstore.jobs.views import view_batch
from tests.conftest import Golden
from tests.tools.brokers import broker

T0 = 1_760_000_000_000
DAY_MS = 86_400_000


# -- lag ---------------------------------------------------------------------------------------------------------------


def fill(path: Path, counts: dict[int, int], commits: dict[tuple[str, int], int]) -> Path:
    """`orders` with so many messages in each queue, and what groups have committed."""
    clock = SimulatedClock(T0)
    with broker(path, clock) as running:
        running.topics.create("orders", queues=2)
        for queue_id, count in counts.items():
            for i in range(count):
                running.put("orders", b"%d" % i, queue_id=queue_id)
                clock.advance(1000)
        for (group, queue_id), offset in commits.items():
            running.commit(group, "orders", queue_id, offset)
    return path


def test_the_lag_of_a_group_is_that_of_all_its_queues_and_stores(tmp_path: Path) -> None:
    a = fill(tmp_path / "a", {0: 10, 1: 4}, {("billing", 0): 7, ("billing", 1): 4, ("audit", 0): 10, ("audit", 1): 4})
    b = fill(tmp_path / "b", {0: 5}, {("billing", 0): 1})

    report = lag_report({"a": a, "b": b})

    audit, billing = report.groups
    assert [(row.group, row.messages) for row in report.groups] == [("audit", 0), ("billing", 7)]
    assert billing.oldest_age_ms == report.taken_ms - (T0 + 1000)  # offset 1 of store b
    assert audit.oldest_age_ms is None
    assert report.incomplete == ()
    assert [(row.store, row.queue_id, row.committed, row.end, row.messages) for row in billing.queues[:2]] == [
        ("a", 0, 7, 10, 3),
        ("b", 0, 1, 5, 4),
    ]


def test_groups_and_topics_can_be_chosen(tmp_path: Path) -> None:
    path = fill(tmp_path / "s", {0: 3}, {("a", 0): 1, ("b", 0): 2})
    with broker(path, SimulatedClock(T0)) as running:
        running.topics.create("empty", queues=1)

    assert [row.group for row in lag_report(path, groups=["b"]).groups] == ["b"]
    [b] = lag_report(path, topics="empty", groups=["b"]).groups  # the topic is there, and the group has not read it
    assert (b.messages, b.queues) == (None, ())
    assert [row.group for row in lag_report(path, topics="orders,empty").groups] == ["a", "b"]
    with pytest.raises(ConfigError, match="no store has the group 'c'; existing: 'a', 'b'"):
        lag_report(path, groups=["a", "c"])
    with pytest.raises(ConfigError, match="no store has the topic 'nope'; existing: 'empty', 'orders'"):
        lag_report(path, topics="orders,nope")


# -- dead letters ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine dead letters, a day apart: of `billing` and `audit`, from `orders` and `payments`; with odd bodies."""
    path = tmp_path_factory.mktemp("letters") / "s"
    clock = SimulatedClock(T0)
    with broker(path, clock, dlq_retention=None) as running:
        for i in range(9):
            group, topic = ("billing", "audit")[i % 3 == 2], ("orders", "payments")[i % 2]
            running.put(topic, b"\x1b[2J caf\xc3\xa9 \xff\\ %d" % i, queue_id=0, keys=f"k-{i}")
            running.run_once()
            delivery = next(each for each in running.pop(group, topic, 32) if each.message.keys == (f"k-{i}",))
            running.dead_letter(group, topic, delivery.receipt, "no stock" if i % 3 else "")
            clock.advance(DAY_MS)
    return path


def test_letters_are_counted_by_group_and_origin(letters: Path) -> None:
    report = dlq_report({"a": letters})

    expected: Counter[tuple[str, str]] = Counter()
    times: dict[tuple[str, str], list[int]] = {}
    reasons: dict[tuple[str, str], Counter[str]] = {}
    for i in range(9):
        key = ("billing", "audit")[i % 3 == 2], ("orders", "payments")[i % 2]
        expected[key] += 1
        times.setdefault(key, []).append(T0 + i * DAY_MS)
        reasons.setdefault(key, Counter())["no stock" if i % 3 else ""] += 1
    rows = {(row.group, row.origin_topic): row for row in report.rows}
    assert {key: row.count for key, row in rows.items()} == dict(expected)
    assert report.total == 9
    for key, row in rows.items():
        assert (row.oldest_ms, row.newest_ms) == (min(times[key]), max(times[key]))
        assert row.max_attempts == 1
        assert row.reasons == dict(reasons[key])


def test_of_very_many_reasons_the_later_ones_are_counted_together(
    letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqstore.jobs.dlq._DISTINCT", 1)

    reasons: Counter[str] = Counter()
    for row in dlq_report(letters).rows:
        assert len(row.reasons) <= 2
        assert sum(row.reasons.values()) == row.count
        reasons.update(row.reasons)
    assert reasons["other reasons"] > 0


def test_one_group_may_be_a_text(letters: Path, travelled: Path) -> None:
    """Its letters were taken for the groups."""
    assert {row.group for row in dlq_report(letters, groups="audit").rows} == {"audit"}
    assert [each.group for each in trace(travelled, "k", "billing").messages[0].groups] == ["billing"]
    with pytest.raises(ConfigError, match="no store has the group 'nosuch'"):
        lag_report(letters, groups="nosuch")


def test_letters_can_be_chosen(letters: Path) -> None:
    def day(number: int) -> datetime:
        return datetime.fromtimestamp((T0 + number * DAY_MS) / 1000, UTC)

    assert dlq_report(letters, groups=["audit"]).total == 3
    with pytest.raises(ConfigError, match="no store has the group 'nosuch'; existing: 'audit', 'billing'"):
        dlq_report(letters, groups=["audit", "nosuch"])
    assert dlq_report(select(letters, topics="payments")).total == 4
    assert dlq_report(select(letters, start=day(2), stop=day(6))).total == 4


@pytest.mark.parametrize(
    "given",
    [
        {"where": "a = 1"},
        {"start": "5"},
        {"stop": datetime(2026, 1, 1, tzinfo=UTC)},
        {"options": {"tags": "A"}},
        {"options": {"startingOffsets": "latest"}},
    ],
)
def test_message_filters_are_refused_for_groups(letters: Path, given: dict[str, Any]) -> None:
    """They told of all messages, whatever had been asked for."""
    chosen = select(letters, **given)
    for job in (lag_report, lambda stores: trace(stores, "k-1")):
        with pytest.raises(ConfigError, match="has no effect in this job; leave it out"):
            job(chosen)
    with pytest.raises(ConfigError, match="option subscribe has no effect"):  # a trace goes everywhere
        trace(select(letters, topics="orders"), "k-1")


def test_lag_is_that_of_the_queues_that_are_assigned(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with broker(path, SimulatedClock(T0)) as running:
        running.topics.create("orders", queues=2)
        for queue_id in (0, 1):
            running.put("orders", b"x", queue_id=queue_id)
            running.offsets.commit(QueueKey("g", "orders", queue_id), 0)
    assigned = {"assign": '{"orders": [1]}'}

    [group] = lag_report(select(path, options=assigned)).groups
    assert [row.queue_id for row in group.queues] == [1]
    rows = view_batch("groups", StoreName("s", str(path)), SourceOptions.parse({"path": str(path), **assigned}))
    assert rows.column("queue_id").to_pylist() == [1]


@pytest.mark.parametrize(
    "given",
    [
        {"start": str(T0 + 2 * DAY_MS)},
        {"stop": str(T0 + 2 * DAY_MS)},
        {"where": "DLQ_ORIGIN_TOPIC = 'payments'"},
        {"where": "KEYS in ('k-1', 'k-4')", "start": str(T0 + DAY_MS)},
        {"where": "KEYS = 'nobody'"},
    ],
)
def test_the_letters_that_are_counted_are_those_that_would_be_sent(letters: Path, given: dict[str, Any]) -> None:
    """A filter was passed over: the report was of all letters, before a resend of some."""
    chosen = select(letters, **given)
    sent = dlq_resend(chosen, dry_run=True)

    report = dlq_report(chosen)

    assert (report.total, report.total < 9) == (sent.count, True)
    assert sum(row.count for row in report.rows) == report.total


def test_groups_without_letters_or_only_letters_are_listed(letters: Path, tmp_path: Path) -> None:
    other = fill(tmp_path / "o", {0: 1}, {("fine", 0): 1})
    shutil.copytree(letters, tmp_path / "left")
    for name in ("consumerOffset.json", "subscriptionGroup.json"):
        (tmp_path / "left" / "config" / name).unlink(missing_ok=True)

    assert dlq_report([letters, other], groups=["fine"]).total == 0
    assert dlq_report(tmp_path / "left", groups=["audit"]).total == 3


def test_letters_that_were_let_go_of_do_not_count(letters: Path, tmp_path: Path) -> None:
    shutil.copytree(letters, tmp_path / "s")
    with offline(tmp_path / "s") as opened:
        opened.dead_letters("audit").purge(before_offset=2)

    rows = dlq_report([letters, tmp_path / "s"], groups=["audit"]).rows

    assert sum(row.count for row in rows) == 3 + 1


def test_lag_is_known_without_a_broker_and_changes_nothing(tmp_path: Path) -> None:
    """A view of the pops needs no receivers, and does not take the counter of saved offsets."""
    with library.open(tmp_path / "s") as store:
        jobs = store.queue("jobs")
        jobs.put_many([b"x"] * 3)
        for _ in range(2):
            jobs.get().ack()

    with offline(tmp_path / "s") as opened:
        assert [(each.queue_id, each.messages) for each in opened.lag("jobs")] == [(0, 1)]
    assert [each.suspended for each in operations(tmp_path / "s").groups("jobs")] == [{}]


# -- traces ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def travelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A message with key `k` that was retried once and then given up, one that waits, and many others."""
    path = tmp_path_factory.mktemp("travelled") / "s"
    clock = SimulatedClock(T0)
    with broker(path, clock, dlq_retention=None, index_slots=8, index_entries=16) as running:
        running.topics.create("orders", queues=1)
        running.groups.create("billing")
        for i in range(40):
            running.put("orders", b"other", keys=[f"o-{i}", f"k{i}"])
        running.put("orders", b"this one", keys=["a", "k"], tag="t", unique_key="U" * 32)
        running.put("orders", b"later", keys="k", delay_level=3)
        running.run_once()
        sent = next(m for m in running.store.iter("orders") if "k" in m.keys)
        running.commit("billing", "orders", 0, 20)
        clock.advance(1000)
        running.send_back("billing", sent.physical_offset, delay_level=1)
        for _ in range(4):
            clock.advance(1000)
            running.run_once()
        [retried] = running.store.iter("%RETRY%billing")
        running.send_back("billing", retried.physical_offset, delay_level=-1, reason="poison")
    return path


def told(found: Any) -> list[list[tuple[str, str]]]:
    return [[(event.event, event.topic) for event in history.events] for history in found.messages]


JOURNEY = [
    ("stored", "orders"),
    ("delayed", "SCHEDULE_TOPIC_XXXX"),  # the retry, on its way
    ("retry", "%RETRY%billing"),
    ("dead letter", "%DLQ%billing"),
]
WAITS = [("delayed", "SCHEDULE_TOPIC_XXXX")]


def test_a_key_is_followed_through_retries_delays_and_dead_letters(travelled: Path) -> None:
    found = trace({"a": travelled}, "k")

    assert told(found) == [JOURNEY, WAITS]
    sent, waits = found.messages
    stored, back, retry, dead = sent.events
    assert (sent.store, sent.topic, sent.unique_key, sent.keys, sent.tag) == ("a", "orders", "U" * 32, ("a", "k"), "t")
    assert (stored.at_ms, stored.reason) == (T0, "dispatched to its queue and the index")
    assert (back.at_ms, back.until_ms) == (T0 + 1000, T0 + 2000)
    assert (retry.at_ms, retry.group, retry.attempt) == (T0 + 2000, "billing", 2)
    assert (dead.at_ms, dead.group, dead.reason) == (T0 + 5000, "billing", "poison")
    assert [(each.group, each.state) for each in sent.groups] == [("billing", "ready")]  # its offset is still 20
    assert (waits.topic, waits.events[0].until_ms, waits.groups[0].state) == ("orders", T0 + 10_000, "delayed")
    assert found.missed == ()


@pytest.mark.parametrize("what", ["all gone", "one cut off", "last gone"])
def test_missing_index_entries_are_searched_in_the_log(travelled: Path, tmp_path: Path, what: str) -> None:
    path = tmp_path / "s"
    shutil.copytree(travelled, path)
    files = sorted((path / "index").iterdir())
    assert len(files) >= 4
    if what == "one cut off":
        files[1].write_bytes(files[1].read_bytes()[:50])
    else:
        for file in {"all gone": files, "last gone": files[-2:]}[what]:
            file.unlink()

    found = trace({"a": path}, "k")

    assert told(found) == [JOURNEY, WAITS]
    assert "index" in found.missed[0]
    assert [len(trace(path, f"o-{i}").messages) for i in (0, 9, 20, 30, 39)] == [1] * 5


def test_a_unique_key_leads_to_the_copies_of_one_message(travelled: Path) -> None:
    assert told(trace(travelled, "U" * 32)) == [JOURNEY]


def test_all_stores_are_searched(travelled: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with broker(other, SimulatedClock(T0 + 500)) as running:
        running.put("copy", b"x", keys="k")

    found = trace({"a": travelled, "b": other}, "k")

    assert [history.store for history in found.messages] == ["a", "a", "b"]


def test_unknown_key_finds_nothing(travelled: Path) -> None:
    assert trace(travelled, "nobody").messages == ()
    # Words, not parts of them.
    assert trace(travelled, "o").messages == ()
    for key in ("", " ", "a\x01b"):
        with pytest.raises(ConfigError, match="is not a key"):
            trace(travelled, key)


def test_a_trace_of_a_store_that_lost_its_queues_reads_the_log(travelled: Path, tmp_path: Path) -> None:
    shutil.copytree(travelled, tmp_path / "lost")
    shutil.rmtree(tmp_path / "lost" / "consumequeue")

    found = trace(tmp_path / "lost", "k")

    assert told(found) == [JOURNEY, WAITS]
    assert {history.events[0].reason for history in found.messages} == {"not dispatched to its queue"}


def test_keys_of_a_java_store_are_found_as_java_finds_them(golden: Golden) -> None:
    store = golden("clean")
    with library.open(store.path, "r") as opened:
        topics = opened.topics(system=True)
        places = {m.physical_offset: (m.topic, m.queue_id, m.offset) for topic in topics for m in opened.iter(topic)}
    for line in store.of("key")[:8]:
        events = [event for history in trace(store.path, line["key"]).messages for event in history.events]
        found = {(event.topic, event.queue_id, event.queue_offset) for event in events}
        assert found >= {places[place] for place in line["physical_offsets"]}, line


# -- delays ------------------------------------------------------------------------------------------------------------


def test_the_view_of_delays_has_a_row_for_each_level_and_one_for_the_timer(tmp_path: Path) -> None:
    with broker(tmp_path / "s", SimulatedClock(T0)) as running:
        for level in (2, 2, 5):
            running.put("orders", b"x", delay_level=level)
        running.put("orders", b"x", delay=timedelta(days=1))
        running.run_once()

    rows = view_batch(
        "delay", StoreName("a", str(tmp_path / "s")), SourceOptions.parse({"path": "x", "view": "delay"})
    ).to_pylist()

    assert [(row["store"], row["level"], row["delay_ms"], row["waiting"], row["delay_offset"]) for row in rows] == [
        ("a", 2, 5_000, 2, 0),
        ("a", 5, 60_000, 1, 0),
        ("a", None, None, 1, None),
    ]
    due = [round(row["next_deliver_timestamp"].timestamp() * 1000) for row in rows]
    assert due[:2] == [T0 + 5_000, T0 + 60_000]
    assert abs(due[2] - (T0 + DAY_MS)) <= 2000  # to the precision of the timer
