"""Each verb and option of a queue, by each door: one row of a table for each. Other files test them in depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import pytest

import mqstore
from tests.client.doors import Doors

TASK = ("release", "progress", "reject")
OTHERS = ("put_many", "cancel", "find", "peek", "items", "counts", "purge", "get_any", "run", "codec", "name")


@dataclass
class Job:
    page: int


def texts(doors: Doors, **options: Any) -> Any:
    return doors.queue(codec=mqstore.TEXT, **options)


def delay(doors: Doors, queue: Any) -> Any:
    queue.put("a", delay=5)
    now = doors.values(queue)
    doors.advance(5)
    return now, doors.values(queue)


def expires(doors: Doors, queue: Any) -> Any:
    queue.put("a", expires=5)
    queue.put("b")
    doors.advance(5)
    return doors.values(queue)


def carried(**options: Any) -> Callable[[Doors, Any], Any]:
    """Return a row whose item carries these options to the receiver."""

    def row(doors: Doors, queue: Any) -> Any:
        queue.put("a", **options)
        message = queue.get().message
        return message.keys, message.tag, message.properties

    return row


def unique(doors: Doors, queue: Any) -> Any:
    return queue.put("a", unique="n").id == queue.put("b", unique="n").id, queue.put("c").id == queue.put("d").id


def unique_for(doors: Doors, queue: Any) -> Any:
    first, again = queue.put("a", unique="n", unique_for=9), doors.values(queue)
    second = queue.put("b", unique="n", unique_for=9)
    doors.advance(10)
    return again, first.id == second.id, queue.put("c", unique="n", unique_for=9).id == first.id


def priority(doors: Doors, queue: Any) -> Any:
    queue.put("low")
    queue.put("high", priority=9)
    first = doors.values(queue)
    queue.put("one", priority=9)  # the only message of its queue that was not delivered
    return first, doors.values(queue)


def put_many(doors: Doors, queue: Any) -> Any:
    queue.put_many(["low", "low 2"])
    return len(queue.put_many(["high", "high 2"], priority=1)), doors.values(queue)


def cancel(doors: Doors, queue: Any) -> Any:
    return queue.cancel(queue.put("a")), queue.cancel(queue.put("b", delay=5).id), doors.values(queue)


def reject(doors: Doors, queue: Any) -> Any:
    queue.put_many(["a", "b", "c"])
    for reason in (ValueError("no address"), None, KeyError()):  # also what `raise Reject(reason)` carries out
        queue.get().reject(reason)
    return [letter.properties["dlq_reason"] for letter in doors.store.dead_letters("jobs")]


def find(doors: Doors, queue: Any) -> Any:
    queue.put("a", key="k")
    return [(item.value, item.state) for item in queue.find("k")]


def listed(verb: str, *given: Any) -> Callable[[Doors, Any], Any]:
    def row(doors: Doors, queue: Any) -> Any:
        queue.put_many(["a", "b", "c"])
        queue.get().nack(60)
        found = getattr(queue, verb)(*given)
        return [(item.value, item.state, item.attempt) for item in found]

    return row


def counts(doors: Doors, queue: Any) -> Any:
    queue.put("a", delay=5)
    queue.put("b")
    return {state: n for state, n in queue.counts().items() if n}


def purge(doors: Doors, queue: Any) -> Any:
    queue.put_many(["a", "b"])
    queue.put("c", delay=5)
    return queue.purge("delayed"), queue.purge(), doors.values(queue)


def release(doors: Doors, queue: Any) -> Any:
    queue.put("a")
    queue.get().release(delay=5)
    doors.advance(5)
    return queue.get().attempt


def progress(doors: Doors, queue: Any) -> Any:
    queue.put("a")
    task = queue.get()
    doors.advance(40)
    task.progress("42 %")
    doors.advance(40)
    return [(item.state, item.progress) for item in queue.peek()]


def get_any(doors: Doors, queue: Any) -> Any:
    second = doors.queue("second", codec=mqstore.TEXT)
    second.put("a")
    return doors.mqstore.get_any([queue, second], timeout=5).value


def run(doors: Doors, queue: Any) -> Any:
    found: list[str] = []

    def handle(task: Any) -> None:
        found.append(task.value)

    async def handle_async(task: Any) -> None:
        handle(task)

    queue.put_many(["a", "b"])
    queue.shutdown()
    summary = queue.run(handle_async if doors.door == "aio" else handle, 1)
    return found, summary.handled


def codec(doors: Doors, queue: Any) -> Any:
    jobs = doors.queue("typed", codec=mqstore.DATACLASS(Job))
    jobs.put(Job(7))
    return jobs.get().value


def name(doors: Doors, queue: Any) -> Any:
    mails = doors.queue("mails to send", codec=mqstore.TEXT)
    mails.put("a")
    return mails.name, mails.get().value


RETRY, READY = ("a", "retry", 2), [("b", "ready", 1), ("c", "ready", 1)]
ROWS: dict[str, tuple[Callable[[Doors, Any], Any], Any]] = {
    "delay": (delay, ([], ["a"])),
    "expires": (expires, ["b"]),
    "key": (carried(key=["k", "l"]), (("k", "l"), None, {})),
    "tag": (carried(tag="t"), ((), "t", {})),
    "properties": (carried(properties={"by": "web"}), ((), None, {"by": "web"})),
    "unique": (unique, (True, False)),
    "unique_for": (unique_for, (["a"], True, False)),
    "priority": (priority, (["high", "low"], ["one"])),
    "put_many": (put_many, (2, ["high", "high 2", "low", "low 2"])),
    "cancel": (cancel, (True, True, [])),
    "find": (find, [("a", "ready")]),
    "peek": (listed("peek", 2), [RETRY, READY[0]]),
    "items": (listed("items", "ready"), READY),
    "counts": (counts, {"ready": 1, "delayed": 1}),
    "purge": (purge, (1, 2, [])),
    "release": (release, 1),
    "progress": (progress, [("leased", "42 %")]),
    "reject": (reject, ["no address", "rejected", "rejected"]),
    "get_any": (get_any, "a"),
    "run": (run, (["a", "b"], 2)),
    "codec": (codec, Job(7)),
    "name": (name, ("mails to send", "a")),
}


def test_table_has_all_verbs_and_options() -> None:
    [options] = get_args(get_type_hints(mqstore.Queue.put)["options"])

    assert set(ROWS) == {*options.__annotations__, *TASK, *OTHERS}


@pytest.mark.parametrize("verb", ROWS)
def test_verb_does_the_same_by_each_door(doors: Doors, verb: str) -> None:
    row, expected = ROWS[verb]
    assert row(doors, texts(doors)) == expected
