"""A store with its timer alone, and time by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.delay.recall import recall_handle
from mqstore.broker.delay.timer import TimerService
from mqstore.broker.delay.timerfiles import TimerLog
from mqstore.broker.tables.names import TIMER_TOPIC
from mqstore.files.filesystem import FileSystem
from mqstore.log.store import MessageStore
from tests.broker.support import START_MS, ServiceBench

__all__ = ["DAY", "HOUR", "MIN", "TIMER_TOPIC", "S", "Timers", "count_looks", "recall_handle", "small_steps"]

S, MIN, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000


def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few messages take several of them."""
    monkeypatch.setattr("mqstore.broker.delay.timer._STEP", 2)
    monkeypatch.setattr("mqstore.broker.delay.timer._LOOKS", 3)


class Timers(ServiceBench[TimerService]):
    def __init__(self, path: Path, fs: FileSystem | None = None, **config: Any) -> None:
        sizes = {"index_slots": 10_000, "index_entries": 40_000, "consumequeue_units": 4096}
        super().__init__(path, TimerService, fs, **{**sizes, **config})

    @property
    def timer(self) -> TimerService:
        return self.service

    def leave(self, killed: bool) -> None:
        self.kill() if killed else self.close()

    def put(self, body: str, wait_ms: int, **options: Any) -> str:
        """The recall handle of a message to queue 0 of `orders`."""
        properties = {"TIMER_DELAY_MS": str(wait_ms), **options.pop("properties", {})}
        receipt = self.parts.router.append("orders", 0, body.encode(), properties, **options)
        assert receipt.recall_handle is not None
        return receipt.recall_handle

    def texts(self) -> list[str]:
        return [message.text() for message in self.messages()]

    def delivered(self) -> list[tuple[str, int]]:
        """(body, ms from START_MS to when it was delivered)."""
        return [(message.text(), message.store_timestamp_ms - START_MS) for message in self.messages()]

    def files(self) -> set[str]:
        return {name for name in ("timerwheel", "timerlog", "config/timercheck") if (self.path / name).exists()}


def count_looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of looks at units and at records."""
    looked = Counter[str]()

    def count(kind: type, name: str, what: str) -> None:
        real = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *arguments: looked.update([what]) or real(*arguments))

    count(TimerLog, "unit", "unit")
    count(MessageStore, "at", "record")
    return looked
