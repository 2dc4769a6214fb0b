"""Options of `Queue.put` and its receipts, by each door."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore.errors import InvalidMessageError
from tests.client.doors import DOORS, Doors, opened


@pytest.fixture(params=DOORS)
def doors(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    with opened(tmp_path / "store", request.param, monkeypatch) as doors:
        yield doors


def test_options_reach_the_receiver(doors: Doors) -> None:
    queue = doors.queue(codec=mqstore.TEXT)
    receipt = queue.put("a", key=["k1", "k2"], tag="red", properties={"by": "web"})
    task = queue.get(block=False)
    message = task.message
    assert (task.value, message.keys, message.tag, message.properties) == ("a", ("k1", "k2"), "red", {"by": "web"})
    assert message.unique_key == receipt.id


@pytest.mark.parametrize("options", [{}, {"maxsize": 100}], ids=["unlimited", "limited"])
def test_each_put_returns_the_receipt_of_its_item(doors: Doors, options: Any) -> None:
    queue = doors.queue(**options)
    receipts = [
        queue.put(b"0"),
        queue.put(b"1", tag="t"),
        queue.put_nowait(b"2", key="k"),
        *queue.put_many([b"3", b"4"]),
    ]
    assert [receipt.offset for receipt in receipts] == [0, 1, 2, 3, 4]
    assert [task.message.unique_key for task in queue.get_many(5)] == [receipt.id for receipt in receipts]


def test_id_of_a_delayed_item_is_that_of_its_delivery(doors: Doors) -> None:
    queue = doors.queue()
    receipt = queue.put(b"later", delay=5)
    doors.advance(6)
    task = queue.get(block=False)
    assert (task.message.unique_key, task.attempt) == (receipt.id, 1)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dealy": 5}, TypeError, "'delay'"),
        ({"keys": "k"}, TypeError, "'key'"),
        ({"key": ""}, InvalidMessageError, "key"),
        ({"tag": "a|b"}, InvalidMessageError, "tag"),
        ({"properties": {"KEYS": "k"}}, InvalidMessageError, "KEYS"),
        ({"delay": -1}, InvalidMessageError, "delay"),
    ],
)
def test_bad_option_is_refused_and_nothing_stored(doors: Doors, options: Any, error: Any, text: str) -> None:
    queue = doors.queue()
    with pytest.raises(error, match=text):
        queue.put(b"x", **options)
    assert queue.qsize() == 0
