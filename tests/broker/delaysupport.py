"""A store with its delay service alone, with time by hand, that can be killed and opened again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mqstore.broker.delay.levels import DelayService
from mqstore.broker.names import SCHEDULE_TOPIC
from mqstore.broker.parts import Parts
from mqstore.clock import SimulatedClock
from mqstore.log.message import Message
from mqstore.log.store import MessageStore
from tests.broker.support import advance, clock_of, new_parts, settle
from tests.log.support import kill


class Delays:
    """A store with its delay service, and the dead letters that service wrote."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.wakes = 0
        self.dead: list[tuple[int, str, str]] = []
        self.parts: Parts = new_parts(path, **options)
        self.service = DelayService(self.parts, self._wake, self._bury)

    def _wake(self) -> None:
        self.wakes += 1

    def _bury(self, message: Message, group: str, reason: str) -> None:
        self.dead.append((message.offset, group, reason))

    @property
    def store(self) -> MessageStore:
        return self.parts.store

    @property
    def clock(self) -> SimulatedClock:
        return clock_of(self.parts)

    def put(self, level: int, body: bytes = b"m", topic: str = "orders", queue_id: int = 0, **more: str) -> int:
        """Put a delayed message; its offset in the level's queue."""
        return self.parts.road.append(topic, queue_id, body, {**more, "DELAY": str(level)}).offset

    def raw(self, level: int, properties: dict[str, str], body: bytes = b"m") -> int:
        """Put a record into a level's queue as another program might have."""
        return self.store.append(SCHEDULE_TOPIC, level - 1, body, properties={"DELAY": str(level), **properties}).offset

    def run(self) -> int | None:
        """Everything that is due now; when the next is."""
        return settle(self.parts, [self.service])

    def pass_ms(self, duration_ms: int) -> None:
        advance(self.parts, [self.service], duration_ms)

    def delivered(self, topic: str = "orders", queue_id: int = 0) -> list[bytes]:
        return [message.body for message in self.messages(topic, queue_id)]

    def messages(self, topic: str = "orders", queue_id: int = 0) -> list[Message]:
        bounds = self.store.offsets_or_none(topic, queue_id)
        return [] if bounds is None else self.store.read(topic, queue_id, bounds[0], 1_000_000)

    def file(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.path / "config" / "delayOffset.json").read_bytes())
        return value

    def counted(self, name: str) -> int:
        return sum(total[0] for (kind, _), total in self.parts.statistics.snapshot().totals.items() if kind == name)

    def close(self) -> None:
        self.service.close()
        self.store.close()

    def again(self, **options: Any) -> Delays:
        """Closed and opened, at the same time of day."""
        self.close()
        return Delays(self.path, **{"clock": self.clock, **options})

    def killed(self, **options: Any) -> Delays:
        """Opened after the process died: nothing was written at the end."""
        kill(self.store)
        return Delays(self.path, **{"clock": self.clock, **options})
