"""Items by key, by each door."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import mqstore
from mqstore import RetryPolicy
from tests.client.doors import DOORS, Doors, opened

BOTH = pytest.mark.parametrize("ordered", [False, True], ids=["standard", "ordered"])


@pytest.fixture(params=DOORS)
def doors(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doors]:
    with opened(tmp_path / "store", request.param, monkeypatch) as doors:
        yield doors


def test_items_of_a_key_are_found_in_each_state(doors: Doors) -> None:
    queue, other = doors.queue(codec=mqstore.TEXT, retry=RetryPolicy(2, [5])), doors.queue("other")
    for value in ("done", "dead", "retry", "leased", "ready", "delayed"):
        queue.put(value, key=["k", value], delay=60 if value == "delayed" else None)
    queue.put("else", key="k2")
    other.put(b"ready", key="k")
    tasks = queue.get_many(4)
    tasks[0].ack()
    tasks[1].reject("no")
    tasks[2].nack(60)
    found = {item.value: item for item in queue.find("k")}
    assert {value: item.state for value, item in found.items()} == {
        value: value for value in ("dead", "retry", "leased", "ready", "delayed")
    }
    for value, item in found.items():
        assert [each.id for each in queue.find(value)] == [item.id]
        assert queue.cancel(item) is (value in ("retry", "ready", "delayed"))
    assert {item.value for item in queue.find("k")} == {"dead", "leased"}
    assert queue.find("nothing") == []


@BOTH
def test_find_costs_the_same_after_a_long_past(doors: Doors, ordered: bool) -> None:
    queue = doors.queue(ordered=ordered)
    for value in range(200):
        queue.put(b"%d" % value, key="k")
    assert len(queue.find("k")) == 200
    assert len(doors.values(queue)) == 200
    receipt = queue.put(b"new", key="k")
    log = doors.store.broker._parts.store
    reads, at = [], log.at
    log.at = lambda offset: reads.append(offset) or at(offset)
    assert [item.id for item in queue.find("k")] == [receipt.id]
    assert len(reads) <= 4
