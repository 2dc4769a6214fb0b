"""Stores with kinds of queues that only RocketMQ writes, as sources (see tests/log/test_foreign.py)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from mqstore.jobs import select, verify
from mqstore.jobs.reading.plan import QueueSlice, plan
from tests.columnar.support import read_all, rows_of


def chosen(path: Path, **options: str) -> dict[str, int]:
    """How many messages of each topic a query is given."""
    found: Counter[str] = Counter()
    for task in plan(select(str(path), options=options).options):
        for piece in task:
            assert isinstance(piece, QueueSlice)
            found[piece.topic] += piece.stop - piece.start
    return dict(found)


@pytest.mark.parametrize("name", ["light", "addresses"])
def test_each_message_is_read_once(foreign: Callable[[str], Path], name: str) -> None:
    assert chosen(foreign(name)) == {"orders": 12}


def test_light_queues_are_there_for_who_asks_for_them(foreign: Callable[[str], Path]) -> None:
    path = foreign("light")
    assert chosen(path, subscribe="%LMQ%a") == {"%LMQ%a": 8}
    assert chosen(path, includeSystemTopics="true") == {"orders": 12, "%LMQ%a": 8, "%LMQ%b": 8}
    said = json.loads((path.parent / "said.json").read_text())["light"]
    rows = rows_of(read_all(path))
    for line in said:
        here = [row for row in rows if (row["topic"], row["queue_id"]) == (line["topic"], line["queue_id"])]
        assert [row["physical_offset"] for row in here] == line["messages"]
        assert [row["queue_offset"] for row in here] == [*range(len(here))]


def test_tags_are_found_behind_addresses(foreign: Callable[[str], Path]) -> None:
    rows = rows_of(read_all(foreign("addresses"), tags="odd"))
    assert [(row["queue_id"], row["queue_offset"]) for row in rows] == [(1, offset) for offset in range(6)]


@pytest.mark.parametrize("name", ["light", "batch", "addresses", "rocksdb"])
def test_they_are_sound(foreign: Callable[[str], Path], name: str) -> None:
    report = verify(str(foreign(name)))
    assert report.ok
    assert report.findings == ()
