"""A store with time by hand, and push consumers whose outcome can be looked at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import PushConsumer, SimpleConsumer, SimulatedClock, StoreConfig
from mqstore.broker.broker import Broker
from mqstore.client.push.pop import PopEngine
from tests.client import support
from tests.log.support import kill

__all__ = ["BOTH", "Bench", "Push"]

BOTH = pytest.mark.parametrize("ordered", [False, True], ids=["standard", "ordered"])


class Bench:
    """A store whose clock stands still unless `advance` moves it; group g, topic t unless said."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.path = path
        self.clock = SimulatedClock()
        self.config = config
        self.consumers: list[PushConsumer] = []
        """Run by `settle` and `advance`, in the order of this list, and only then."""
        self.open()

    def open(self) -> None:
        self.store = mqstore.open(self.path, config=StoreConfig(clock=self.clock, **self.config))

    @property
    def broker(self) -> Broker:
        return self.store.broker

    def kill(self) -> None:
        """What the system does for a dead process: locks and descriptors are given back, nothing else happens."""
        self.consumers.clear()
        kill(support.behind(self.broker).store)

    def put(self, *bodies: str | bytes, topic: str = "t", queue_id: int | None = None, **options: Any) -> None:
        for body in bodies:
            self.store.put(topic, body.encode() if isinstance(body, str) else body, queue_id=queue_id, **options)
        self.broker.run_once()

    def consumer(self, *topics: str, group: str = "g", **options: Any) -> SimpleConsumer:
        return self.store.simple_consumer(group, dict.fromkeys(topics or ("t",), "*"), **options)

    def advance(self, duration_s: float) -> None:
        """Let time pass, from one due time to the next."""
        support.advance(self.broker, self.clock, self.consumers, duration_s)

    def settle(self) -> int | None:
        """Do all that is due now; when the next is (wall ms)."""
        return support.settle(self.broker, self.clock, self.consumers)

    def leave(self, consumer: PushConsumer) -> bool:
        """Stop a consumer, and run it no more."""
        self.consumers.remove(consumer)
        return consumer.stop()

    def committed(self, queue_id: int = 0, topic: str = "t", group: str = "g") -> int | None:
        return self.broker.committed(group, topic, queue_id)

    def letters(self) -> list[tuple[bytes, str]]:
        """(body, reason) of the dead letters."""
        return [(letter.body, letter.properties["dlq_reason"]) for letter in self.store.dead_letters("g")]

    def lag(self) -> int:
        return sum(self.store.lag("g").values())


class Push:
    """A push consumer and what its handler was given."""

    def __init__(
        self,
        bench: Bench,
        act: Callable[[Any], object] = lambda _: None,
        *topics: str,
        start: bool = True,
        tags: str = "*",
        **options: Any,
    ) -> None:
        self.bench = bench
        self.act = act
        self.seen: list[tuple[bytes, int]] = []
        """(body, attempt) of each message handled."""
        self.errors: list[BaseException] = []
        noted = {"on_error": lambda error, message: self.errors.append(error)}
        self.consumer = bench.store.push_consumer("g", **{"mode": "pop", "workers": 2, **noted, **options})
        for topic in topics or ("t",):
            self.consumer.subscribe(topic, self.handle, tags=tags)
        if start:
            self.consumer.start()

    def handle(self, given: Any) -> None:
        for message in given if isinstance(given, list | tuple) else [given]:
            self.seen.append((message.body, message.attempt))
        self.act(given)

    @property
    def engine(self) -> PopEngine:
        engine = self.consumer._engine
        assert isinstance(engine, PopEngine)
        return engine

    def held(self) -> int:
        """How many messages it has fetched and not settled."""
        if not isinstance(self.consumer._engine, PopEngine):
            return sum(queue.cached.messages for queue in self.consumer.stats().queues.values())
        return len(self.engine._renewer)

    def halt(self) -> None:
        """Begin nothing more, as if its process had died."""
        self.consumer._engine.halt()

    def pace(self, pace_ms: float) -> None:
        """Go on as if its handlers had taken so long lately."""
        self.engine.pace_ms = pace_ms

    def bodies(self) -> list[bytes]:
        return [body for body, _ in self.seen]

    def go(self) -> None:
        """Until nothing is left to do now."""
        support.settle(self.bench.broker, self.bench.clock, [self.consumer])

    def advance(self, duration_s: float) -> None:
        support.advance(self.bench.broker, self.bench.clock, [self.consumer], duration_s)
