"""Names of queues and types of items, by each door."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date

import pytest

import mqstore
from mqstore.admin import queue_topic
from mqstore.errors import FormatError, InvalidMessageError
from tests.client.doors import Doors


@dataclass
class Job:
    page: int
    due: date | None = None


@pytest.mark.parametrize("name", ["mails to send", "größe.v2", "注文", "100%", "a|20b", "ns%jobs"])
@pytest.mark.parametrize("ordered", [False, True])
def test_queue_of_any_name_does_everything(doors: Doors, name: str, ordered: bool) -> None:
    queue = doors.queue(name, ordered=ordered)
    assert queue.name == name
    assert f"Queue {name!r}" in repr(queue if doors.door != "aio" else queue._wrapped)
    queue.put(b"1")
    queue.put_many([b"2", b"3"])
    queue.get(block=False).nack(0)
    doors.settle()
    task = queue.get(block=False)
    while task.value != b"1":  # its second attempt comes first in an ordered queue
        task.ack()
        task = queue.get(block=False)
    assert task.attempt == 2
    task.reject("no such page")
    doors.settle()
    doors.values(queue)
    assert queue.empty()
    topic = queue_topic(name)
    topics = doors.store.topics(system=True)
    assert name == topic or not any(name in each for each in topics)
    used = {each for each in topics if topic in each}
    assert {topic, f"%DLQ%{topic}"} <= used <= {topic, f"%RETRY%{topic}+{topic}", f"%DLQ%{topic}"}
    assert [letter.body for letter in doors.store.dead_letters(topic)] == [b"1"]


def test_queue_of_another_name_is_another_queue(doors: Doors) -> None:
    names = ["a b", "a|20b", "a.b", "a_b", "A b", "a  b"]
    for name in names:
        doors.queue(name, codec=mqstore.TEXT).put(name)
    for name in names:
        assert doors.values(doors.queue(name, codec=mqstore.TEXT)) == [name]


def test_wrong_type_is_refused_before_anything_is_stored(doors: Doors) -> None:
    queue = doors.queue(codec=mqstore.DATACLASS(Job))
    for put in (queue.put, queue.put_nowait, lambda item: queue.put_many([Job(1), item])):
        for item in (Job("1"), Job(1, "2026-11-29"), {"page": 1}, b"1", None):  # type: ignore[arg-type]
            with pytest.raises(InvalidMessageError, match=r"Job\.|an item must be Job"):
                put(item)
    assert queue.qsize() == 0


def test_stored_item_of_a_wrong_type_is_refused(doors: Doors) -> None:
    queue = doors.queue(codec=mqstore.DATACLASS(Job))
    doors.store.put("jobs", b'{"page":"1"}', queue_id=0)
    task = queue.get(block=False)
    with pytest.raises(FormatError, match=r"Job\.page must be int, not str"):
        _ = task.value
    task.reject("not a job")
    assert queue.empty()
