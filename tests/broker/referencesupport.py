"""A broker whose group fails with messages that are large enough to be referred to while they wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mqstore import Message, Retention
from mqstore.layout.bodyref import REFERENCE_BYTES, is_reference
from mqstore.log.store import MessageStore
from tests.broker import support

__all__ = ["BODY", "DAY_MS", "DELAYS", "REFERENCE_BYTES", "RETRY", "SEGMENT", "Bench", "is_reference"]

SEGMENT = 1 << 16
BODY = bytes(range(250)) * 40
"""10,000 bytes: six to a segment."""
RETRY = "%RETRY%g"
DAY_MS = 86_400_000

DELAYS: dict[str, dict[str, Any]] = {"level": {}, "timer": {"delay": 77.7}, "rolled timer": {"delay": 5 * 86_400}}


class Bench(support.Bench):
    def __init__(self, path: Path, **config: Any) -> None:
        policy = Retention(age=None, max_bytes=SEGMENT, unconsumed=config.pop("unconsumed", "keep"))
        super().__init__(path, segment_bytes=SEGMENT, retention=policy, **config)

    @property
    def store(self) -> MessageStore:
        return self.broker.store

    def to_the_edge(self) -> None:
        """Fill a segment so that a record with `BODY` is the last one in it."""
        size = 10_200  # of that record; the waiting one has more than the rest
        while (room := SEGMENT - self.store.max_offset % SEGMENT) > 3 * size or room < size + 100:
            self.broker.put("busy", bytes(5_000), queue_id=0)
        while (rest := SEGMENT - self.store.max_offset % SEGMENT - size) > 150:
            self.broker.put("busy", bytes(min(5_000, rest - 100)), queue_id=0)

    def fail(self, way: str = "level", body: bytes = BODY, **options: Any) -> Message:
        """Put a message, and fail with it. Return the waiting record."""
        receipt = self.broker.put("orders", body, queue_id=0, tag="t", keys="k", properties={"p": "1"}, **options)
        waiting = self.broker.send_back("g", receipt.physical_offset, **DELAYS[way])
        self.broker.commit("g", "orders", 0, receipt.offset + 1)
        return self.store.at(waiting.physical_offset)

    def busy(self, count: int = 60) -> None:
        """Others put, and consume."""
        for _ in range(count):
            receipt = self.broker.put("busy", bytes(10_000), queue_id=0)
        self.broker.commit("reader", "busy", 0, receipt.offset + 1)
        self.broker.save()

    def clean(self) -> None:
        """Delete whatever may be deleted."""
        self.store.drop_before(self.parts.store.room.bound(Retention(age=None, max_bytes=0)))  # type: ignore[misc]

    def retries(self) -> list[Message]:
        return support.messages_of(self.parts, RETRY)

    def unreadable(self) -> int:
        return sum(support.counted(self.parts, name) for name in ("delay_unreadable", "TIMER_UNREADABLE"))

    def wait(self) -> list[Message]:
        for _ in range(12):
            self.jump(DAY_MS // 2)
        return self.retries()
