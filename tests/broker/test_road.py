"""Puts: which queue a put goes to, and what delay makes of it (delivery#auto-create)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import SimulatedClock, Store, StoreConfig
from mqstore.errors import InvalidMessageError

START_MS = SimulatedClock().now_ms()
LEVELS, TIMER = "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"


def opened(path: Path, **config: Any) -> Store:
    return mqstore.open(path, config=StoreConfig(clock=SimulatedClock(), segment_bytes=1 << 16, **config))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path / "store") as store:
        yield store


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ("text", {}),
        (b"x" * (1 << 16), {}),
        (b"x", {"keys": "k" * 40_000}),
        (b"x", {"tag": 5}),
        (b"x", {"delay": "soon"}),
        (b"x", {"properties": {"a\x01": "b"}}),
        (b"x", {"flag": 1 << 40}),
        (b"x", {"compressed": "lz4"}),
        (b"x", {"priority": 9}),
    ],
)
def test_refused_put_creates_no_topic(store: Store, body: Any, options: dict[str, Any]) -> None:
    with pytest.raises((InvalidMessageError, TypeError)):
        store.put("orders", body, **options)
    assert store.topics() == []


@pytest.mark.parametrize("queue_id", [-1, 4, True, "0", 1.0])
@pytest.mark.parametrize("put", ["put", "put_many"])
def test_put_to_a_queue_that_the_topic_does_not_have_is_refused(store: Store, put: str, queue_id: Any) -> None:
    store.create_topic("orders", queues=4)
    with pytest.raises(InvalidMessageError, match=r"queue_id must be 0\.\.3, the queues of 'orders'"):
        getattr(store, put)("orders", {"put": b"x", "put_many": [b"x"]}[put], queue_id=queue_id)
    assert list(store.iter("orders")) == []


def test_keys_of_the_first_put_may_be_read_once(store: Store) -> None:
    receipt = store.put("orders", b"x", keys=iter(["a", "b"]), delay=None)  # type: ignore[arg-type]
    [message] = store.read(*receipt.queue, 0)
    assert message.keys == ("a", "b")


@pytest.mark.parametrize(("asked", "stored", "due_s"), [(1, 1, 1), (3, 3, 10), (18, 18, 7200), (19, 18, 7200)])
def test_a_level_diverts_to_its_queue_and_is_clamped(store: Store, asked: int, stored: int, due_s: int) -> None:
    receipt = store.put("orders", b"x", queue_id=2, delay_level=asked)

    assert receipt.queue == (LEVELS, stored - 1)
    [message] = store.read(*receipt.queue, 0)
    properties = message.stored_properties()
    assert (properties["DELAY"], properties["REAL_TOPIC"], properties["REAL_QID"]) == (str(stored), "orders", "2")
    assert message.tags_code == START_MS + due_s * 1000  # when it is due
    assert store.offsets("orders", 2) == (0, 0)


@pytest.mark.parametrize(
    "options",
    [
        {"delay": 5},
        {"delay": timedelta(seconds=5)},
        {"deliver_at": START_MS / 1000 + 5},
        {"deliver_at": datetime.fromtimestamp(START_MS / 1000 + 5, UTC)},
    ],
)
def test_a_moment_is_given_in_any_of_four_ways(store: Store, options: Any) -> None:
    receipt = store.put("orders", b"x", **options)

    assert receipt.topic == TIMER
    [message] = store.read(TIMER, 0, 0)
    # START_MS is a whole second; the slot that is over at D is D - 1000.
    assert message.stored_properties()["TIMER_OUT_MS"] == str(START_MS + 4000)
    assert receipt.recall_handle is not None


def test_a_moment_that_has_come_is_no_delay(store: Store) -> None:
    options: Any
    for options in ({"delay_level": 0}, {"delay": 0.0}, {"deliver_at": 0}, {"deliver_at": START_MS / 1000}):
        assert store.put("orders", b"x", **options).topic == "orders"


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
def test_invalid_message_is_refused_before_a_write(store: Store, options: Any, field: str) -> None:
    store.put("orders", b"first")
    end = store.log.max_offset

    with pytest.raises(InvalidMessageError) as caught:
        store.put("orders", b"x", **options)

    assert caught.value.field == field
    assert store.log.max_offset == end
