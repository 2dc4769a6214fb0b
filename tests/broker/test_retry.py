"""Send-back, dead letters and plain puts into retry topics, held against delivery#send-back and delivery#backoff."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqstore import Message, RetryPolicy, SendReceipt
from mqstore.broker.background.context import Parts
from mqstore.broker.redelivery.reason import DLQ_REASON_BYTES, Reason
from mqstore.broker.redelivery.retry import Retries
from mqstore.broker.tables.names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqstore.errors import ConfigError, GroupNotFoundError, NotPermittedError
from mqstore.layout.properties import MAX_PROPERTIES_BYTES
from tests.broker.support import START_MS, new_parts


def at(parts: Parts, receipt: SendReceipt) -> Message:
    return parts.store.at(receipt.physical_offset)


def put(parts: Parts, *, reconsume: int = 0, properties: dict[str, str] | None = None, body: bytes = b"b") -> Message:
    """A message of topic `orders`, as if it had failed `reconsume` times."""
    receipt = parts.store.append(
        "orders", 0, body, properties=properties or {"UNIQ_KEY": "u"}, reconsume_times=reconsume
    )
    return at(parts, receipt)


def back(parts: Parts, message: Message, **options: Any) -> Message:
    return at(parts, Retries(parts).send_back("g", message.physical_offset, **options))


def delivered(parts: Parts, waiting: Message) -> Message:
    """What a delay service makes of a waiting message (delivery#restore), which is not what is tested here."""
    properties = waiting.stored_properties()
    topic, queue_id = properties["REAL_TOPIC"], int(properties["REAL_QID"])
    for name in ("DELAY", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"):
        properties.pop(name, None)
    return at(parts, parts.router.copy(waiting, topic, queue_id, properties))


# -- where a copy goes -----------------------------------------------------------------------------------------------

# (reconsume times of what failed, options, level it waits in; or None and the reason of a dead letter).
# The group allows 17 attempts (delivery#send-back).
WAYS: list[tuple[int, dict[str, Any], int | None, str]] = [
    (0, {}, 3, ""),
    (15, {}, 18, ""),
    (16, {}, None, "attempt 17 failed, 17 are allowed"),
    (15, {"delay_level": 1}, 1, ""),
    (16, {"delay_level": 1}, None, "attempt 17 failed, 17 are allowed"),
    (0, {"delay_level": 99}, 18, ""),
    (0, {"max_reconsume": 0}, None, "attempt 1 failed, 1 are allowed"),
    (0, {"max_reconsume": 1}, 3, ""),
    (16, {"max_reconsume": 20}, 18, ""),
    (0, {"delay_ms": 7_200_000}, 18, ""),
    (0, {"attempts": 16}, 18, ""),
    (0, {"attempts": 17}, None, "attempt 17 failed, 17 are allowed"),
    (0, {"attempts": 3, "max_reconsume": 2}, None, "attempt 3 failed, 3 are allowed"),
    (0, {"attempts": 3, "max_reconsume": 3}, 5, ""),
    (0, {"attempts": 3, "delay_level": -1}, None, "rejected by its consumer"),
    (2, {"delay_level": -1, "reason": Reason("no such customer")}, None, "no such customer"),
]


@pytest.mark.parametrize(("times", "options", "level", "reason"), WAYS)
def test_a_copy_waits_in_its_level_or_is_a_dead_letter(
    parts: Parts, times: int, options: dict[str, Any], level: int | None, reason: str
) -> None:
    copy = back(parts, put(parts, reconsume=times), **options)
    properties = copy.stored_properties()
    assert copy.reconsume_times == options.get("attempts", times + 1)
    assert (properties["RETRY_TOPIC"], properties["WAIT"]) == ("orders", "false")
    assert properties.get("dlq_reason", "") == reason
    if level is None:
        assert (copy.topic, copy.queue_id, properties["DELAY"]) == ("%DLQ%g", 0, "0")
        assert properties["DLQ_ORIGIN_TOPIC"] == "orders"
    else:
        assert (copy.topic, copy.queue_id, properties["DELAY"]) == (SCHEDULE_TOPIC, level - 1, str(level))
        assert (properties["REAL_TOPIC"], properties["REAL_QID"]) == ("%RETRY%g", "0")


# (table in force, reconsume times of what failed, level it waits in; None: the timer): delivery#backoff
TABLES: list[tuple[str, int, int | None]] = [
    ("1h 5h", 14, 1),
    ("1h 5h", 15, None),
    ("10s 1m 2h", 1, None),
    ("10s 1m 2h", 2, 2),
]
SENT_BACK_S = [10, 30, *(60 * n for n in range(1, 11)), 1_200, 1_800, 3_600, 7_200]


@pytest.mark.parametrize(("table", "times", "level"), TABLES)
def test_another_level_table_changes_no_pause_of_a_retry(
    tmp_path: Path, table: str, times: int, level: int | None
) -> None:
    parts = new_parts(tmp_path / "other", delay_levels=table)
    properties = (copy := back(parts, put(parts, reconsume=times))).stored_properties()
    if level is None:
        due_ms = START_MS + SENT_BACK_S[times] * 1_000
        assert copy.topic == TIMER_TOPIC
        assert due_ms - 1_000 <= int(properties["TIMER_OUT_MS"]) <= due_ms
    else:
        assert (copy.topic, properties["DELAY"]) == (SCHEDULE_TOPIC, str(level))
    parts.store.close()


def test_a_group_with_endless_attempts_never_dead_letters(parts: Parts) -> None:
    parts.groups.create("g", retry_policy=RetryPolicy(max_attempts=None))
    copy = back(parts, put(parts, reconsume=1_000_000))
    assert copy.topic == SCHEDULE_TOPIC
    assert (back(parts, put(parts), delay_ms=0).topic, parts.topics.require("%RETRY%g").perm) == ("%RETRY%g", 6)
    assert back(parts, put(parts, reconsume=0x7FFF_FFFF)).reconsume_times == 0x7FFF_FFFF, "the count must not overflow"


def test_a_copy_has_no_marks_of_earlier_deliveries(parts: Parts) -> None:
    """A message that was delivered by the timer keeps TIMER_OUT_MS, which says "has waited": its retry would not."""
    timer = {"TIMER_OUT_MS": "1", "TIMER_DEQUEUE_MS": "2", "TIMER_DELIVER_MS": "1"}
    popped = {"POP_CK": "1 2 3", "1ST_POP_TIME": "5"}
    message = put(parts, properties={"UNIQ_KEY": "u", **timer, **popped})
    assert back(parts, message, delay_ms=1_500).topic == TIMER_TOPIC
    dead = at(parts, Retries(parts).dead_letter(message, "g", Reason("no"), reconsume_times=17))
    assert (dead.topic, dead.reconsume_times) == ("%DLQ%g", 17)
    assert at(parts, Retries(parts).dead_letter(put(parts, reconsume=4), "g", Reason("no"))).reconsume_times == 5
    for copy in (back(parts, message), dead):
        assert not {*timer, *popped} & copy.stored_properties().keys()


# -- what a copy is --------------------------------------------------------------------------------------------------


def test_a_copy_is_the_same_message(parts: Parts) -> None:
    receipt = parts.store.append(
        "orders",
        3,
        b"\0\xff" * 40,
        properties={"TAGS": "paid", "KEYS": "a b", "mine": "é", "UNIQ_KEY": "u", "__SHARDINGKEY": "user-1"},
        flag=-7,
        born_timestamp_ms=123,
        born_host="10.1.2.3:4567",
    )
    original = at(parts, receipt)
    for copy in (back(parts, original), back(parts, original, delay_level=-1)):
        assert (copy.body, copy.flag) == (original.body, -7)
        assert (copy.born_timestamp_ms, copy.born_host) == (123, "10.1.2.3:4567")
        assert (copy.tag, copy.keys, copy.message_group, copy.unique_key) == ("paid", ("a", "b"), "user-1", "u")
        assert copy.properties["mine"] == "é"
        assert copy.stored_properties()["ORIGIN_MESSAGE_ID"] == original.message_id


def test_narrow_retry_topic_is_respected(parts: Parts) -> None:
    parts.topics.ensure("%RETRY%g", 1)
    parts.groups.create("g", retry_queues=8)
    assert {int(back(parts, put(parts)).stored_properties()["REAL_QID"]) for _ in range(30)} == {0}


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"delay_level": 2, "delay_ms": 5},
        {"delay_ms": -1},
        {"delay_ms": 366 * 86_400_000 + 1},
        {"max_reconsume": -1},
        {"attempts": 0},
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(parts: Parts, options: dict[str, Any]) -> None:
    message = put(parts)
    end = parts.store.max_offset
    with pytest.raises(ConfigError):
        back(parts, message, **options)
    assert parts.store.max_offset == end
    assert parts.topics.get("%RETRY%g") is None
    assert parts.groups.get("g") is None


def test_an_unknown_physical_offset_is_a_lookup_error(parts: Parts) -> None:
    message = put(parts)
    for offset in (message.physical_offset + 1, 1 << 40, -1):
        with pytest.raises(LookupError):
            Retries(parts).send_back("g", offset)


def test_a_retry_topic_that_was_made_unwritable_is_refused(parts: Parts) -> None:
    message = put(parts)
    parts.topics.ensure("%RETRY%g", 1)
    parts.topics.alter("%RETRY%g", perm=4)
    end = parts.store.max_offset
    with pytest.raises(NotPermittedError, match="%RETRY%g"):
        back(parts, message)
    assert parts.store.max_offset == end


def test_an_unknown_group_without_auto_creation_is_refused(tmp_path: Path) -> None:
    parts = new_parts(tmp_path / "store", auto_create_groups=False)
    message = put(parts)
    with pytest.raises(GroupNotFoundError):
        back(parts, message)
    parts.store.close()


# -- dead letters ----------------------------------------------------------------------------------------------------


def test_the_reason_is_kept_within_its_bytes_and_without_separators(parts: Parts) -> None:
    message = put(parts)
    text = "Traceback\n\x01\x02\ud800" + "ü" * 2000
    reason = at(parts, Retries(parts).dead_letter(message, "g", Reason(text))).properties["dlq_reason"]
    assert reason.startswith("Traceback   ?üü")
    assert DLQ_REASON_BYTES - 2 <= len(reason.encode()) <= DLQ_REASON_BYTES
    assert "dlq_reason" not in at(parts, Retries(parts).dead_letter(message, "g", Reason(" \n "))).properties


def test_the_origin_given_wins_and_else_it_is_where_the_message_was_sent(parts: Parts) -> None:
    retries = Retries(parts)
    waiting = at(parts, parts.router.put("orders", b"b", delay_level=2))
    failed = back(parts, put(parts))
    plain = put(parts)

    def origin(message: Message, **options: Any) -> tuple[str, str]:
        properties = at(parts, retries.dead_letter(message, "g", Reason("why"), **options)).stored_properties()
        return properties["DLQ_ORIGIN_TOPIC"], properties["RETRY_TOPIC"]

    assert origin(plain) == ("orders", "orders")
    assert origin(waiting) == ("orders", "orders")
    assert origin(failed) == ("orders", "orders")
    assert origin(plain, origin_topic="clicks") == ("clicks", "clicks")
    assert origin(failed, origin_topic="%RETRY%g") == ("%RETRY%g", "orders")


@pytest.mark.parametrize("spare", [0, 60, 600])
def test_message_without_room_for_properties_is_dead(parts: Parts, spare: int) -> None:
    """Its retry can never be written: neither may it be tried for ever, nor be lost."""
    room = MAX_PROPERTIES_BYTES - 20 - spare
    message = put(parts, properties={"mine": "x" * (room - len("mine") - 2)})
    copy = back(parts, message)
    if copy.topic == SCHEDULE_TOPIC:
        assert spare >= 200
    else:
        assert copy.topic == "%DLQ%g"
    assert copy.properties["mine"] == message.properties["mine"]


def test_message_with_a_separator_in_a_value_is_dead(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    message = put(parts)
    monkeypatch.setattr(Message, "stored_properties", lambda self: {"UNIQ_KEY": "u", "mine": "a\x01b"})
    receipt = Retries(parts).send_back("g", message.physical_offset)
    monkeypatch.undo()
    assert receipt.topic == "%DLQ%g"
    assert at(parts, receipt).properties["mine"] == "a b"


def test_retry_queues_of_none_dead_letter_at_once(tmp_path: Path) -> None:
    """RocketMQ answers SUCCESS and writes nothing: the message is lost (delivery#x21)."""
    new_parts(tmp_path / "store").store.close()
    (tmp_path / "store" / "config").mkdir(exist_ok=True)
    (tmp_path / "store" / "config" / "subscriptionGroup.json").write_text(
        '{"subscriptionGroupTable":{"g":{"groupName":"g","retryQueueNums":0}}}'
    )
    parts = new_parts(tmp_path / "store")
    assert back(parts, put(parts)).topic == "%DLQ%g"
    parts.store.close()
