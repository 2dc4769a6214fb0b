"""A store seen by both engines, and whether they see the same."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from mqstore.log.message import row_of
from mqstore.log.store import MessageStore
from tests.interop.javaengine import SIZES, JavaEngine
from tests.log.support import EXPORTED, as_ours, open_store

__all__ = ["assert_same", "new_store", "seen_by_java", "seen_by_us"]

Rows = dict[tuple[str, int], list[dict[str, Any]]]


def new_store(path: Path, **config: Any) -> MessageStore:
    """A store as a Java broker has it, made or opened again, without threads."""
    return open_store(path, "rw", profile="rocketmq", **SIZES, **config)


def seen_by_us(path: Path) -> Rows:
    """The messages of each queue that has any, with the code that their unit bears, read beside whoever writes."""
    with open_store(path, "r") as store:
        return {
            (ref.topic, ref.queue_id): [
                {**{name: row_of(each)[name] for name in (*EXPORTED, "body")}, "tags_code": each.tags_code}
                for each in messages
            ]
            for topic in store.topics()
            for ref in store.queues(topic)
            if (messages := list(store.iter(*ref)))
        }


def seen_by_java(engine: JavaEngine) -> Rows:
    """The same, by the engine that has the store open."""
    rows: Rows = {}
    for (topic, queue_id), (first, end) in engine.queues().items():
        lines = engine.messages(topic, queue_id)
        units = engine.units(topic, queue_id)
        assert len(units) == end - first
        code_at = {position: code for position, _, code in units}
        for line in lines:
            assert (line["topic"], line["queue_id"]) == (topic, queue_id)
            rows.setdefault((topic, queue_id), []).append(
                {
                    **{name: as_ours(name, line[name]) for name in EXPORTED},
                    "body": base64.b64decode(line["body"]),
                    "tags_code": code_at[line["physical_offset"]],
                }
            )
    return rows


def assert_same(ours: Rows, java: Rows) -> None:
    """Queue by queue, message by message: what differs is shown, not all there is."""
    assert ours.keys() == java.keys()
    for queue, mine in ours.items():
        theirs = java[queue]
        assert [row["queue_offset"] for row in mine] == [row["queue_offset"] for row in theirs], queue
        for one, other in zip(mine, theirs, strict=True):
            differs = {name: (one[name], other[name]) for name in one if one[name] != other[name]}
            assert not differs, (queue, one["queue_offset"], differs)
