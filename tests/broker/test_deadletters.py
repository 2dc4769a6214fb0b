"""Looking at dead letters, sending them again, letting go of them (delivery#dead-letters)."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mqstore import Message
from mqstore.admin import DeadLetters
from mqstore.broker.background.context import Parts
from mqstore.broker.background.retention import all_pins
from mqstore.broker.background.service import oldest_of
from mqstore.broker.redelivery.dead_letters import DeadLetterExpiry
from mqstore.broker.redelivery.reason import Reason
from mqstore.broker.redelivery.retry import Retries
from mqstore.broker.routing.router import Router
from mqstore.broker.tables.names import SCHEDULE_GROUP, QueueKey
from mqstore.errors import ConfigError, InvalidMessageError, NotPermittedError, StoreFullError, TopicNotFoundError
from tests.broker.support import START_MS, clock_of, full, messages_of, new_parts
from tests.log.support import flip, kill

DAY_MS = 86_400_000


def die(parts: Parts, n: int, *, topic: str = "orders", group: str = "g", **properties: str) -> None:
    """File `n` dead letters, bodies 0, 1, ..., their tag the parity."""
    for i in range(n):
        stored = {"UNIQ_KEY": f"{topic}-{i}", "TAGS": "even" if i % 2 == 0 else "odd", "mine": "kept"} | properties
        parts.topics.ensure(topic, 1)
        receipt = parts.store.append(topic, 0, str(i).encode(), properties=stored, flag=7, reconsume_times=16)
        Retries(parts).dead_letter(parts.store.at(receipt.physical_offset), group, Reason(f"reason {i}"))


def sent_again(parts: Parts, topic: str = "orders", after: int = 0) -> list[Message]:
    return messages_of(parts, topic)[after:]


def bodies(messages: Any) -> list[int]:
    return [int(message.body) for message in messages]


# -- looking ---------------------------------------------------------------------------------------------------------


def test_selection_by_offset_time_and_filter(parts: Parts) -> None:
    for _ in range(3):
        die(parts, 2)
        clock_of(parts).advance(1_000)
    letters = DeadLetters(parts, "g")

    def is_even(letter: Message) -> bool:
        return letter.tag == "even"

    def offsets(**chosen: Any) -> list[int]:
        return [letter.offset for letter in letters.select(**chosen)]

    assert offsets(offsets=[4, 1, 1, 99]) == [1, 4]
    assert offsets(start_ms=START_MS + 1_000) == [2, 3, 4, 5]
    assert offsets(stop_ms=START_MS + 1_000) == [0, 1]
    assert offsets(start_ms=START_MS + 1_000, stop_ms=START_MS + 2_000) == [2, 3]
    assert offsets(where=is_even) == [0, 2, 4]
    assert offsets(where=is_even, offsets=[0, 1, 2], start_ms=START_MS + 1) == [2]
    for wrong in (-1, True, "1"):
        with pytest.raises(ConfigError):
            letters.select(offsets=[wrong])  # type: ignore[list-item]


# -- sending again ---------------------------------------------------------------------------------------------------


def test_a_replayed_message_starts_anew_as_the_same_message(parts: Parts) -> None:
    die(parts, 1, __SHARDINGKEY="user", KEYS="k")
    [letter] = DeadLetters(parts, "g")
    origin_id = letter.stored_properties()["ORIGIN_MESSAGE_ID"]
    result = DeadLetters(parts, "g").replay(all_groups=True)
    assert (result.count, dict(result.topics), result.start) == (1, {"orders": 1}, 1)
    copy = sent_again(parts)[-1]
    assert copy.stored_properties() == {
        "UNIQ_KEY": "orders-0",
        "TAGS": "even",
        "KEYS": "k",
        "mine": "kept",
        "__SHARDINGKEY": "user",
        "ORIGIN_MESSAGE_ID": origin_id,
    }
    assert (copy.body, copy.flag, copy.reconsume_times, copy.attempt) == (b"0", 7, 0, 1)
    assert (copy.born_timestamp_ms, copy.born_host) == (letter.born_timestamp_ms, letter.born_host)


def test_each_letter_goes_to_where_it_came_from_or_all_to_one_topic(parts: Parts) -> None:
    die(parts, 2, topic="orders")
    die(parts, 3, topic="clicks")
    die(parts, 1, group=SCHEDULE_GROUP)  # delayed messages that never arrived: that group consumes nothing
    assert DeadLetters(parts, SCHEDULE_GROUP).replay().count == 1
    assert bodies(sent_again(parts, after=3)) == [0]
    letters = DeadLetters(parts, "g")
    assert dict(letters.replay(dry_run=True).topics) == {"orders": 2, "clicks": 3}
    parts.topics.create("elsewhere", queues=1)
    assert dict(letters.replay(to_topic="elsewhere").topics) == {"elsewhere": 5}
    assert bodies(sent_again(parts, "elsewhere")) == [0, 1, 0, 1, 2]
    assert len(letters) == 0


def test_rocketmq_letter_returns_by_its_retry_topic(parts: Parts) -> None:
    """RocketMQ writes no DLQ_ORIGIN_TOPIC (delivery#x26)."""
    parts.topics.create("orders", queues=1)
    parts.topics.ensure("%DLQ%g", 1)
    parts.store.append("%DLQ%g", 0, b"0", properties={"RETRY_TOPIC": "orders", "REAL_TOPIC": "%RETRY%g"})
    parts.store.append("%DLQ%g", 0, b"1")
    letters = DeadLetters(parts, "g")
    with pytest.raises(InvalidMessageError, match="to_topic"):
        letters.replay(all_groups=True)
    assert bodies(sent_again(parts)) == [0]
    assert bodies(letters) == [1], "what was sent is let go of, the other is not"
    assert letters.replay(to_topic="orders").count == 1


@pytest.mark.parametrize(
    ("there", "lands"),
    [((), "%RETRY%g"), (("%RETRY%g+orders",), "%RETRY%g+orders"), (("%RETRY%g", "%RETRY%g+orders"), "%RETRY%g")],
)
def test_a_letter_without_a_mark_goes_where_its_group_had_retries(
    parts: Parts, there: tuple[str, ...], lands: str
) -> None:
    """Older versions did not note whether the group pops, and no more does RocketMQ."""
    die(parts, 1)
    for topic in there:
        parts.topics.ensure(topic, 1)
    DeadLetters(parts, "g").replay()
    assert bodies(sent_again(parts, lands)) == [0]
    assert parts.offsets.committed(QueueKey("g", lands, 0)) == 0, (
        "it counts as lag, and is kept, before the group reads it"
    )


def test_replay_reaches_only_its_group(parts: Parts) -> None:
    die(parts, 1)
    with pytest.raises(InvalidMessageError):  # nobody ever retried, so nobody reads there
        DeadLetters(parts, "g").replay(to_topic="%RETRY%g")
    parts.topics.ensure("%RETRY%g", 1)
    assert dict(DeadLetters(parts, "g").replay(to_topic="%RETRY%g").topics) == {"%RETRY%g": 1}
    [copy] = sent_again(parts, "%RETRY%g")
    assert (copy.stored_properties()["RETRY_TOPIC"], copy.reconsume_times) == ("orders", 0)


def test_a_dry_run_changes_nothing_and_finds_what_would_fail(parts: Parts) -> None:
    die(parts, 3)
    letters = DeadLetters(parts, "g")
    end = parts.store.max_offset
    result = letters.replay(dry_run=True, all_groups=True)
    assert (result.count, result.start) == (3, 3)
    assert (parts.store.max_offset, len(letters)) == (end, 3)
    assert letters.replay(dry_run=True, to_topic="new").count == 3
    assert parts.topics.get("new") is None
    parts.topics.alter("orders", perm=4)
    with pytest.raises(NotPermittedError):
        letters.replay(dry_run=True, all_groups=True)
    for topic in ("SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"):
        with pytest.raises(NotPermittedError):
            letters.replay(dry_run=True, to_topic=topic)
    with pytest.raises(InvalidMessageError):
        letters.replay(to_topic="%DLQ%other")
    assert parts.store.max_offset == end


def test_without_auto_creation_a_dry_run_misses_the_topic_too(tmp_path: Path) -> None:
    parts = new_parts(tmp_path / "store", auto_create_topics=False)
    parts.topics.ensure("%DLQ%g", 1)
    parts.store.append("%DLQ%g", 0, b"0", properties={"RETRY_TOPIC": "gone"})
    for dry_run in (True, False):
        with pytest.raises(TopicNotFoundError):
            DeadLetters(parts, "g").replay(all_groups=True, dry_run=dry_run)
    assert len(DeadLetters(parts, "g")) == 1
    parts.store.close()


def test_letters_that_were_sent_are_listed_no_more_and_not_sent_again(parts: Parts) -> None:
    die(parts, 6)
    letters = DeadLetters(parts, "g")
    [*all_of_them] = letters
    chosen = [all_of_them[0], 1, 3]
    assert letters.replay(chosen, all_groups=True, dry_run=True).start == 2
    assert letters.replay(chosen, all_groups=True).start == 2
    assert (bodies(letters), len(letters), letters.bounds) == ([2, 4, 5], 3, (2, 6))
    assert bodies(letters.select(offsets=[3, 4])) == [4]
    assert letters.replay([3], all_groups=True).count == 0
    assert letters.purge(before_offset=5, dry_run=True) == 2
    assert letters.replay([2], all_groups=True, dry_run=True).start == 4
    assert letters.replay([2], all_groups=True).start == 4
    assert letters.replay(where=lambda letter: letter.body == b"5", all_groups=True).start == 4
    assert letters.replay(all_groups=True).count == 1
    assert (bodies(letters), len(letters), letters.bounds) == ([], 0, (6, 6))
    assert bodies(sent_again(parts, after=6)) == [0, 1, 3, 2, 5, 4]


def test_marks_of_letters_that_a_power_cut_took_do_not_hide_later_ones(tmp_path: Path) -> None:
    """The file may say more than the queue has: another program wrote it, or a recovery shortened the queue."""
    parts = new_parts(tmp_path / "store")
    die(parts, 5)
    DeadLetters(parts, "g").replay([1, 3])
    parts.offsets.persist()
    parts.store.close()
    path = tmp_path / "store" / "config" / "consumerOffset.json"
    value = json.loads(path.read_text())
    assert value["sentLetters"] == {"%DLQ%g": [[1, 2], [3, 4]]}
    value["sentLetters"]["%DLQ%g"] = [[1, 2], [4, 7], [9, 10]]
    path.write_text(json.dumps(value))
    parts = new_parts(tmp_path / "store")
    die(parts, 5)
    assert [letter.offset for letter in DeadLetters(parts, "g")] == [0, 2, 3, 5, 6, 7, 8, 9]
    parts.store.close()


@pytest.mark.parametrize("damaged", [0, 2])
def test_damaged_letter_is_skipped_and_deleted(tmp_path: Path, damaged: int) -> None:
    parts = new_parts(tmp_path / "store")
    die(parts, 5)
    letter = [*DeadLetters(parts, "g")][damaged]
    at = letter.physical_offset + letter.size - 1
    del letter
    parts.offsets.persist()
    parts.store.close()
    segments = sorted((tmp_path / "store" / "commitlog").iterdir())
    flip(segments[at >> 16], at & 0xFFFF)
    parts = new_parts(tmp_path / "store")
    letters = DeadLetters(parts, "g")
    sound = [i for i in range(5) if i != damaged]
    assert bodies(letters) == bodies(letters.select(offsets=range(5))) == sound
    assert letters.replay(offsets=[damaged]).count == 0
    assert (letters.replay(all_groups=True).count, len(letters)) == (4, 0)
    assert bodies(sent_again(parts, after=5)) == sound
    parts.store.close()


def test_letters_filed_meanwhile_are_not_sent(parts: Parts) -> None:
    """A message that dies again at once must not keep its replay busy for ever."""
    die(parts, 2)

    def copy(*message: Any, **options: Any) -> Any:
        receipt = parts.router.copy(*message, **options)
        Retries(parts).dead_letter(parts.store.at(receipt.physical_offset), "g", Reason("again"))
        return receipt

    assert DeadLetters(replace(parts, router=cast(Router, SimpleNamespace(copy=copy))), "g").replay().count == 2
    assert len(DeadLetters(parts, "g")) == 2


@pytest.mark.parametrize("fails_at", [0, 270])
def test_when_a_copy_fails_what_was_sent_is_let_go_of_and_the_rest_is_not(parts: Parts, fails_at: int) -> None:
    die(parts, 300)
    calls = iter([parts.router.copy] * fails_at)
    router = SimpleNamespace(copy=lambda *rest, **options: next(calls, full)(*rest, **options))
    with pytest.raises(StoreFullError):
        DeadLetters(replace(parts, router=cast(Router, router)), "g").replay(all_groups=True)
    letters = DeadLetters(parts, "g")
    assert letters.bounds[0] == fails_at
    assert letters.replay(all_groups=True).count == 300 - fails_at
    assert bodies(sent_again(parts, after=300)) == [*range(300)]


# -- letting go ------------------------------------------------------------------------------------------------------


def test_purge_lets_go_of_all_or_of_those_before_an_offset_or_a_time(parts: Parts) -> None:
    letters = DeadLetters(parts, "g")
    for _ in range(3):
        die(parts, 2)
        clock_of(parts).advance(1_000)
    assert letters.purge(before_offset=1) == 1
    assert letters.purge(before_offset=1) == 0
    assert letters.purge(before_ms=START_MS + 1_000) == 1
    assert letters.purge(before_ms=START_MS + 1_999, before_offset=3) == 1
    assert [letter.offset for letter in letters] == [3, 4, 5]
    assert letters.purge(before_offset=99) == 3
    die(parts, 1)
    assert letters.purge() == 1
    with pytest.raises(ConfigError):
        letters.purge(before_offset=-1)


def test_deleted_and_sent_letters_stay_so_after_a_kill(tmp_path: Path) -> None:
    parts = new_parts(tmp_path / "store")
    die(parts, 6)
    DeadLetters(parts, "g").replay([1, 3])
    DeadLetters(parts, "g").purge(before_offset=1)
    kill(parts.store)
    again = new_parts(tmp_path / "store")
    letters = DeadLetters(again, "g")
    assert (bodies(letters), letters.bounds) == ([2, 4, 5], (2, 6))
    assert not again.offsets.dirty
    letters.purge(before_offset=3)
    assert (letters.bounds, again.offsets.sent(letters.topic)) == ((4, 6), ())
    again.store.close()


def test_letters_hold_the_log_until_deleted(parts: Parts) -> None:
    die(parts, 2)
    parts.offsets.commit(QueueKey("g", "orders", 0), 2)
    [_, second] = DeadLetters(parts, "g")
    DeadLetters(parts, "g").purge(before_offset=1)
    pin = oldest_of(all_pins(parts, []))
    assert pin is not None
    assert (pin.physical_offset, pin.topic) == (second.physical_offset, "%DLQ%g")
    DeadLetters(parts, "g").purge()
    assert oldest_of(all_pins(parts, [])) is None


# -- expiry ----------------------------------------------------------------------------------------------------------


def test_expired_letters_are_deleted_and_logged(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    expiry = DeadLetterExpiry(parts)
    die(parts, 2)
    clock_of(parts).advance(DAY_MS)
    die(parts, 1)
    die(parts, 1, group="other")
    assert expiry.run_once(START_MS + DAY_MS) == START_MS + 30 * DAY_MS
    assert expiry.run_once(START_MS + 30 * DAY_MS - 1) == START_MS + 30 * DAY_MS - 1 + 60_000, "one look a minute"
    assert len(DeadLetters(parts, "g")) == 3
    with caplog.at_level(logging.WARNING, "mqstore"):
        assert expiry.run_once(START_MS + 30 * DAY_MS) == START_MS + 31 * DAY_MS
    assert len(DeadLetters(parts, "g")) == 1
    assert len(DeadLetters(parts, "other")) == 1
    assert parts.statistics.snapshot().total("DLQ_EXPIRED_NUMS", "%DLQ%g@g") == 2
    assert "2 dead letters of group 'g'" in caplog.text
    expiry.run_once(START_MS + 40 * DAY_MS)
    assert (len(DeadLetters(parts, "g")), len(DeadLetters(parts, "other"))) == (0, 0)


@pytest.mark.parametrize(("age", "left"), [(None, 2), (timedelta(days=1), 0)])
def test_dead_letter_retention_is_an_option(tmp_path: Path, age: timedelta | None, left: int) -> None:
    parts = new_parts(tmp_path / "store", dlq_retention=age)
    die(parts, 2)
    expiry = DeadLetterExpiry(parts)
    due = expiry.run_once(START_MS + 365 * DAY_MS)
    assert (due is None) == (age is None)
    assert len(DeadLetters(parts, "g")) == left
    parts.store.close()
