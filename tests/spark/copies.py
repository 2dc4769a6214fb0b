"""What tests of copies compare: all messages of a store, one by one, by the plain reader."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from mqstore import SimulatedClock
from mqstore.engine import MessageStore
from tests.tools.brokers import broker, clock_now


class Copy(NamedTuple):
    """What a copy has in common with its original."""

    body: bytes
    properties: tuple[tuple[str, str], ...]
    flag: int
    sys_flag: int
    born_ms: int
    born_host: str
    attempts: int


Queues = dict[tuple[str, int], list[Copy]]


def messages(path: Path) -> Queues:
    """By queue, in order. The store verifies, to the last byte."""
    found: Queues = {}
    with MessageStore(path, "r") as store:
        assert [*store.verify()] == []
        for topic in store.topics():
            if not topic.startswith("%"):
                for ref in store.queues(topic):
                    copies = [_copy(message) for message in store.iter(*ref)]
                    if copies:
                        found[ref.topic, ref.queue_id] = copies
    return found


def _copy(message: Any) -> Copy:
    properties = message.stored_properties()
    return Copy(
        bytes(message.body_view),
        tuple((name, value) for name, value in properties.items() if name != "__CRC32#"),
        message.flag,
        message.sys_flag,
        message.born_timestamp_ms,
        str(message.born_host),
        message.reconsume_times,
    )


def tree(path: Path) -> dict[str, bytes | None]:
    """Everything below a folder, with content; that it is not there is also something."""
    if not path.exists():
        return {}
    found: dict[str, bytes | None] = {".": None}
    for folder, folders, files in os.walk(path):
        found |= {str(Path(folder, name).relative_to(path)): None for name in folders}
        found |= {str(Path(folder, name).relative_to(path)): Path(folder, name).read_bytes() for name in files}
    return found


def fail(path: Path, count: int, *, topic: str = "orders", group: str = "billing", first: int = 0) -> None:
    """`group` gives up `count` messages of `topic`, with reasons by turns."""
    clock = SimulatedClock(clock_now().now_ms() - 3_600_000)
    with broker(path, clock, dlq_retention=None) as running:
        if topic not in running.topics.names():
            running.topics.create(topic, queues=2)
        for i in range(first, first + count):
            running.put(topic, b"%d" % i, keys=f"k{i}", tag="T", properties={"n": str(i)}, queue_id=i % 2)
        running.run_once()
        left = count
        while left > 0:
            for delivery in running.pop(group, topic, 16):
                running.dead_letter(
                    group, topic, delivery.receipt, ("timeout", "no item")[int(delivery.message.body) % 2]
                )
                left -= 1
            clock.advance(1000)
            running.run_once()
