"""The one way in: which queue a put goes to, and what delay makes of it (delivery#auto-create)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.context import Parts
from mqstore.broker.names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqstore.errors import InvalidMessageError, NotPermittedError, TopicNotFoundError
from mqstore.layout.record import TRANSACTION_COMMIT, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from mqstore.options import DEFAULT_DELAY_LEVELS, delay_table_ms
from tests.broker.support import START_MS, new_parts


def test_without_a_queue_id_the_queues_of_a_topic_take_turns(parts: Parts) -> None:
    ids = [parts.router.put("orders", b"x").queue_id for _ in range(8)]

    assert sorted(ids[:4]) == [0, 1, 2, 3]
    assert ids[4:] == ids[:4]


# delivery#queue-choice: jump hash of the group's Java hash, measured against Guava, for n = 4.
@pytest.mark.parametrize(
    ("group", "queue_id"), [("a", 0), ("order-1", 3), ("order-2", 2), ("order-42", 3), ("用户-7", 1)]
)
def test_a_message_group_has_its_queue_and_is_stored(parts: Parts, group: str, queue_id: int) -> None:
    receipts = [parts.router.put("orders", b"x", message_group=group) for _ in range(2)]

    assert {receipt.queue_id for receipt in receipts} == {queue_id}
    assert [m.message_group for m in parts.store.read("orders", queue_id)] == [group, group]


@pytest.mark.parametrize(
    ("asked", "stored", "queue_id"), [(1, "1", 0), (3, "3", 2), (18, "18", 17), (19, "18", 17), (99, "18", 17)]
)
def test_a_level_diverts_to_its_queue_and_is_clamped(parts: Parts, asked: int, stored: str, queue_id: int) -> None:
    receipt = parts.router.put("orders", b"x", queue_id=2, delay_level=asked)

    assert (receipt.topic, receipt.queue_id) == (SCHEDULE_TOPIC, queue_id)
    [message] = parts.store.read(SCHEDULE_TOPIC, queue_id)
    properties = message.stored_properties()
    assert (properties["DELAY"], properties["REAL_TOPIC"], properties["REAL_QID"]) == (stored, "orders", "2")
    assert message.tags_code == START_MS + delay_table_ms(DEFAULT_DELAY_LEVELS)[queue_id]  # when it is due
    assert parts.store.offsets_or_none("orders", 2) is None


def test_a_level_wins_over_a_timer(parts: Parts) -> None:
    topic, queue_id, properties = parts.router.route(
        "orders", 1, {"DELAY": "2", "TIMER_DELIVER_MS": "5", "TIMER_DELAY_SEC": "6", "TIMER_DELAY_MS": "7", "k": "v"}
    )

    assert (topic, queue_id) == (SCHEDULE_TOPIC, 1)
    assert properties == {"DELAY": "2", "REAL_TOPIC": "orders", "REAL_QID": "1", "k": "v"}


@pytest.mark.parametrize("level", ["0", "-1", "no number", ""])
def test_a_property_that_is_no_level_diverts_nothing(parts: Parts, level: str) -> None:
    assert parts.router.route("orders", 1, {"DELAY": level}) == ("orders", 1, {"DELAY": level})


@pytest.mark.parametrize(
    ("sys_flag", "diverted"),
    [(0, True), (TRANSACTION_COMMIT, True), (TRANSACTION_PREPARED, False), (TRANSACTION_ROLLBACK, False)],
)
def test_only_plain_and_committed_records_are_delayed(parts: Parts, sys_flag: int, diverted: bool) -> None:
    topic, _, _ = parts.router.route("orders", 1, {"DELAY": "2"}, sys_flag)

    assert (topic == SCHEDULE_TOPIC) == diverted


@pytest.mark.parametrize(
    "options",
    [
        {"delay": 5},
        {"delay": timedelta(seconds=5)},
        {"deliver_at": START_MS / 1000 + 5},
        {"deliver_at": datetime.fromtimestamp(START_MS / 1000 + 5, UTC)},
    ],
)
def test_a_moment_is_given_in_any_of_four_ways(parts: Parts, options: Any) -> None:
    receipt = parts.router.put("orders", b"x", **options)

    assert receipt.topic == TIMER_TOPIC
    [message] = parts.store.read(TIMER_TOPIC)
    # START_MS is a whole second; the slot that is over at D is D - 1000.
    assert message.stored_properties()["TIMER_OUT_MS"] == str(START_MS + 4000)
    assert receipt.recall_handle is not None


@pytest.mark.parametrize(
    "options", [{"delay_level": 0}, {"delay": 0}, {"delay": 0.0}, {"deliver_at": 0}, {"deliver_at": START_MS / 1000}]
)
def test_a_moment_that_has_come_is_no_delay(parts: Parts, options: Any) -> None:
    assert parts.router.put("orders", b"x", **options).topic == "orders"


WRONG: dict[str, list[Any]] = {
    "delay": [-1, float("nan"), float("inf"), "soon", True, timedelta(days=366, milliseconds=1)],
    "deliver_at": [float("nan"), 10**400, "tomorrow", True],
    "delay_level": [-1, 1.5, True],
    "message_group": ["", "a\x01b", 7.5, True, " ", "g" * 64],
    "queue_id": [4, -1, True],
}
"""Values that are none of an option."""


@pytest.mark.parametrize(
    ("options", "field"),
    [
        *(({name: value}, name) for name, values in WRONG.items() for value in values),
        ({"deliver_at": datetime(2024, 1, 1)}, "when"),
        ({"deliver_at": START_MS / 1000 + 367 * 86400}, "properties"),
        ({"delay": 1, "delay_level": 1}, "delay_level"),
        ({"message_group": "g", "delay": 1}, "delay"),
        ({"message_group": " ", "queue_id": 0}, "message_group"),
        ({"message_group": 7.5, "queue_id": 0}, "message_group"),
        ({"flag": 1 << 40, "delay": 1}, "flag"),
        ({"properties": {"REAL_TOPIC": "x"}, "delay": 1}, "properties"),
    ],
)
def test_invalid_message_is_refused_before_a_write(parts: Parts, options: Any, field: str) -> None:
    parts.router.put("orders", b"first")
    end = parts.store.max_offset

    with pytest.raises(InvalidMessageError) as caught:
        parts.router.put("orders", b"x", **options)

    assert caught.value.field == field
    assert parts.store.max_offset == end


@pytest.mark.parametrize(
    "topic", [SCHEDULE_TOPIC, TIMER_TOPIC, "rmq_sys_anything", "RMQ_SYS_TRANS_HALF_TOPIC", "TBW102"]
)
def test_a_user_does_not_put_to_a_topic_of_the_engine(parts: Parts, topic: str) -> None:
    with pytest.raises(NotPermittedError):
        parts.router.put(topic, b"x")


def test_with_auto_create_off_an_unknown_topic_is_an_error(tmp_path: Path) -> None:
    parts = new_parts(tmp_path / "store", auto_create_topics=False)

    with pytest.raises(TopicNotFoundError):
        parts.router.put("orders", b"x")
    parts.topics.create("orders", queues=1)
    assert parts.router.put("orders", b"x").offset == 0
    parts.store.close()


def test_copy_keeps_its_origin(parts: Parts) -> None:
    born: dict[str, Any] = {"flag": 7, "born_timestamp_ms": 123, "born_host": "10.1.2.3:4567"}
    receipt = parts.store.append("orders", 0, b"body", properties={"k": "v"}, reconsume_times=2, **born)
    [original] = parts.store.read("orders")

    parts.router.copy(original, "other", 0, {"k": "w"}, reconsume_times=3)

    [copy] = parts.store.read("other")
    assert {name: getattr(copy, name) for name in born} == born
    assert (copy.body, copy.reconsume_times) == (b"body", 3)
    assert copy.stored_properties() == {"k": "w", "ORIGIN_MESSAGE_ID": receipt.message_id}
    assert copy.unique_key == original.unique_key == receipt.message_id


def test_a_compressed_body_is_copied_as_it_lies(parts: Parts) -> None:
    import zlib

    stored = zlib.compress(b"text " * 100)
    parts.store.append("orders", 0, stored, sys_flag=1)
    [original] = parts.store.read("orders")

    parts.router.copy(original, "other", 0, {})

    [copy] = parts.store.read("other")
    assert bytes(copy.body_view) == stored
    assert copy.body == b"text " * 100
