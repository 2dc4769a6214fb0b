"""A store with its delay service, and the timer, which has what cannot wait in a level."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mqstore import Message
from mqstore.broker.background.context import Parts
from mqstore.broker.delay.levels import DelayService
from mqstore.broker.delay.timer import TimerService
from mqstore.broker.redelivery.reason import Reason
from mqstore.broker.tables.names import SCHEDULE_TOPIC
from mqstore.files.filesystem import FileSystem
from mqstore.log.store import MessageStore
from tests.broker.support import ServiceBench


class Delays(ServiceBench[DelayService]):
    """A store with its delay service, and the dead letters that service wrote."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.dead: list[tuple[int, str, str]] = []
        super().__init__(path, self._service, **options)

    def _service(self, parts: Parts, wake: Callable[[], None]) -> DelayService:
        return DelayService(parts, wake, lambda *letter: self.bury(*letter))

    def open(self, fs: FileSystem | None = None, **config: Any) -> None:
        super().open(fs, **config)
        self.mechanisms.append(TimerService(self.parts, self._wake))

    def bury(self, message: Message, group: str, reason: Reason) -> None:
        self.dead.append((message.offset, group, reason.text))

    @property
    def store(self) -> MessageStore:
        return self.parts.store

    def put(self, level: int, body: bytes = b"m", topic: str = "orders", queue_id: int = 0, **more: str) -> int:
        """Put a delayed message; its offset in the level's queue."""
        return self.parts.router.append(topic, queue_id, body, {**more, "DELAY": str(level)}).offset

    def raw(self, level: int, properties: dict[str, str], body: bytes = b"m") -> int:
        """Put a record into a level's queue as another program might have."""
        return self.store.append(SCHEDULE_TOPIC, level - 1, body, properties={"DELAY": str(level), **properties}).offset

    delivered = ServiceBench.bodies

    def file(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads((self.path / "config" / "delayOffset.json").read_bytes())
        return value
