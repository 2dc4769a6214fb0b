"""Messages that came together, and the workers that are asked to them (clients#concurrent).

A worker takes the next batch from the front of a chunk. Others are asked to it if handlers took long of late: waking a
thread for what is done in less is a loss. A guess that was wrong is mended at the next tick (overdue.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic, TypeVar

from mqstore.client.workers import Flow, Worker, Workers

__all__ = ["SETTLE_S", "WORTH_MS", "Chunk", "Helpers", "next_of"]

SETTLE_S = 0.01
"""How long what is done may wait to be settled together with more."""
WORTH_MS = 1.0
"""Handling that takes so long is worth another thread."""

T = TypeVar("T")
C = TypeVar("C", bound="Chunk[Any, Any]")
D = TypeVar("D")


class Chunk(Generic[T, D]):
    """Items in the order in which they are to be begun. What is handled well waits in `done` to be settled."""

    __slots__ = ("done", "invited", "items")

    def __init__(self, items: Iterable[T]) -> None:
        self.items = deque(items)
        self.done: deque[D] = deque()
        self.invited = 0
        """Workers that were asked to it and have not come yet."""


class Helpers:
    """Workers that are asked to chunks at which another one is."""

    def __init__(self, workers: Workers, batch_size: int) -> None:
        self._workers = workers
        self._batch_size = batch_size
        self._lock = threading.Lock()
        """Of invitations."""
        self.others = len(workers.all) - 1
        self.pace_ms = WORTH_MS
        """How long a handler takes of late. The first call may take long."""

    def begin(self, chunk: C, work: Callable[[C, Worker], Flow[None]]) -> None:
        """A worker is about to begin a chunk: ask as many others as are worth it."""
        batches = -(-len(chunk.items) // self._batch_size)
        self.ask(chunk, min(batches - 1, int(batches * self.pace_ms / WORTH_MS)), work)

    def ask(self, chunk: C, number: int, work: Callable[[C, Worker], Flow[None]]) -> None:
        """Have up to `number` workers on their way to a chunk; those that are asked already count."""
        with self._lock:
            number = min(number, self.others) - chunk.invited
            chunk.invited += max(0, number)
        for _ in range(number):
            self._workers.submit(partial(self._come, chunk, work))

    def _come(self, chunk: C, work: Callable[[C, Worker], Flow[None]], worker: Worker) -> Flow[None]:
        with self._lock:
            chunk.invited -= 1
        return work(chunk, worker)


def next_of(items: deque[T], number: int) -> list[T]:
    """Up to `number` from the front; others may be taking from it, too."""
    taken: list[T] = []
    try:
        for _ in range(number):
            taken.append(items.popleft())
    except IndexError:
        pass
    return taken
