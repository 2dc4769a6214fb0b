"""What tests of copies compare: all messages of a store, one by one, by the plain reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from mqstore.engine import ReadOnlyMessageStore


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
    with ReadOnlyMessageStore(path) as store:
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
