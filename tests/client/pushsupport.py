"""A store whose time stands still, with push consumers on it that run when a test says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mqstore import Interceptor, Message, PushConsumer, QueueRef
from mqstore.broker import opening
from mqstore.broker.broker import Broker
from mqstore.broker.tables.names import QueueKey
from mqstore.client.push.assignment import Assignment
from mqstore.client.push.handler_call import Handling
from mqstore.files.filesystem import FileSystem
from tests.client import popsupport, support
from tests.log.support import open_store

__all__ = [
    "PushBench",
    "Told",
    "commit_unchecked",
    "engine_of",
    "fail_outside_of_handlers",
    "hook",
    "note_losses",
    "pulls",
    "unsettled",
]

SEGMENT = 1 << 18


def hook(**calls: Callable[..., Any]) -> Interceptor:
    """An interceptor whose hooks are these functions."""
    found = type("Hook", (Interceptor,), {name: staticmethod(call) for name, call in calls.items()})()
    assert isinstance(found, Interceptor)
    return found


def _is_parked(waiter: Any) -> bool:
    """Return True for a waiter that nothing has woken, of this process or of a connection."""
    return bool(waiter.places) if hasattr(waiter, "places") else waiter[0].answer is None


class Told(Interceptor):
    """Notes what it is told, and leaves out messages with one of these bodies."""

    def __init__(self, *left_out: bytes) -> None:
        self.left_out = left_out
        self.news: list[tuple[Any, ...]] = []
        self.settled: list[tuple[bytes, str]] = []
        self.timeouts: list[tuple[bytes, str]] = []

    def on_receive(self, messages: list[Message]) -> list[Message]:
        return [message for message in messages if message.body not in self.left_out]

    def on_assign(self, queues: frozenset[QueueRef]) -> None:
        self.news.append(("assign", *sorted(queues)))

    def on_revoke(self, queues: frozenset[QueueRef]) -> None:
        self.news.append(("revoke", *sorted(queues)))

    def on_offset_reset(self, queue: QueueRef, old: int, new: int) -> None:
        self.news.append(("reset", queue, old, new))

    def on_settle(self, message: Message, outcome: str, seconds: float) -> None:
        self.settled.append((message.body, outcome))

    def on_timeout(self, message: Message, stack: str) -> None:
        self.timeouts.append((message.body, stack))


class PushBench(popsupport.Bench):
    """A broker without a store object, on any file system."""

    def __init__(self, path: Path, *, fs: FileSystem | None = None, queues: int = 1, **config: Any) -> None:
        self.fs = fs
        self.errors: list[BaseException] = []
        super().__init__(path, **{"segment_bytes": SEGMENT, **config})
        if self.broker.topics.get("t") is None:
            self.broker.topics.create("t", queues=queues)

    def open(self) -> None:
        new = not (self.path / "commitlog").exists()
        config = self.config if new else {k: v for k, v in self.config.items() if k != "segment_bytes"}
        self._broker: Broker = opening.Broker(open_store(self.path, fs=self.fs, clock=self.clock, **config))

    @property
    def broker(self) -> Broker:
        return self._broker

    def close(self) -> None:
        for consumer in self.consumers:
            consumer.stop()
        self.consumers.clear()
        self.broker.close()

    # -- messages ---------------------------------------------------------------------------------------------------

    def put(self, *bodies: Any, topic: str = "t", queue_id: int | None = 0, **options: Any) -> None:
        for body in bodies:
            self.broker.put(topic, body, queue_id=queue_id, **options)

    def consumer(  # type: ignore[override]
        self,
        handler: Callable[..., object] | None = None,
        topic: str = "t",
        *,
        group: str = "g",
        tags: str = "*",
        run: bool = True,
        **options: Any,
    ) -> PushConsumer:
        options.setdefault("workers", 2)
        options.setdefault("start", "earliest")
        options.setdefault("on_error", lambda error, message: self.errors.append(error))
        consumer = PushConsumer(self.broker, group, **options)
        consumer.subscribe(topic, (lambda message: None) if handler is None else handler, tags=tags)
        self.consumers.append(consumer)
        return consumer.start() if run else consumer

    def dead(self, group: str = "g") -> list[bytes]:
        return [message.body for message in self.broker.dead_letters(group)]


def commit_unchecked(broker: Broker, offset: int) -> None:
    """Write a position that the queue may not have, as a crash may leave one."""
    support.behind(broker).offsets.commit(QueueKey("g", "t", 0), offset)


def note_losses(broker: Broker, losses: Iterable[tuple[int, int]]) -> None:
    """Have the broker note that group g lost the messages between these offsets."""
    for old, new in losses:
        broker._reads.note_loss(QueueKey("g", "t", 0), old, new)


def fail_outside_of_handlers(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Have the next call of a handler fail before the handler is called."""
    monkeypatch.setattr(Handling, "call", support.failing(Handling.call, error))


def engine_of(consumer: PushConsumer) -> Assignment:
    engine = consumer._engine
    assert isinstance(engine, Assignment)
    return engine


def pulls(consumer: PushConsumer) -> dict[QueueRef, list[str]]:
    """Of each queue that a consumer at rest has, where its pull is (clients#invariants). Looks inside."""
    engine, workers = engine_of(consumer), consumer._workers
    assert not support.turns_left(consumer), "it is not at rest"
    timers: Counter[tuple[str, int]] = Counter()
    for _, _, call in workers._heap:
        if isinstance(call, partial) and call.func in (engine._submit_pull, engine._restart):
            timers["restart" if call.func == engine._restart else "timer", id(call.args[0])] += 1
    found: dict[QueueRef, list[str]] = {}
    for ref, queue in engine._queues.items():
        places = ["waiting"] if queue.waiter is not None and _is_parked(queue.waiter) else []
        places += ["full"] * queue.throttled + ["paused"] * queue.parked + ["timer"] * timers["timer", id(queue)]
        if queue.dropped:  # whatever was to pull it finds it closed; who begins it anew is what counts
            places = []
        places += ["restart"] * timers["restart", id(queue)]
        assert not queue.submitted, f"{ref}: a pull is said to be on its way, and is not"
        found[ref] = places
    return found


def unsettled(consumer: PushConsumer) -> dict[QueueRef, int]:
    """How many messages a consumer holds of each queue."""
    return {ref: queue.cached.messages for ref, queue in consumer.stats().queues.items()}
