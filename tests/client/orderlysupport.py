"""A store with time by hand, members of one group, and a record of every handler call: who overlaps is caught there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mqstore
from mqstore import Message, PushConsumer, QueueRef, SimulatedClock, StoreConfig
from mqstore.admin import Broker
from tests.log.support import kill

__all__ = ["Bench", "Call", "fire"]


@dataclass(frozen=True)
class Call:
    """One message in one handler call."""

    member: str
    queue: QueueRef
    offset: int
    body: str
    attempt: int
    at_ms: int


def fire(consumer: PushConsumer) -> None:
    """What a consumer's timer thread does now, and its second worker if it has one, while the first is in a handler."""
    workers = consumer._workers
    workers._fire()
    while workers._free and not workers._turns.empty():
        turn = workers._turns.get()
        assert turn is not None
        turn()


@dataclass
class Bench:
    """Group g, topic t with `queues` queues. Members are run by `settle` and `advance`, in the order they joined."""

    path: Path
    queues: int = 1
    config: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = SimulatedClock()
        self.calls: list[Call] = []
        self.running: dict[QueueRef, str] = {}
        self.overlaps: list[str] = []
        self.errors: list[tuple[BaseException, Message | None]] = []
        self.members: list[PushConsumer] = []
        self.open()
        self.store.create_topic("t", queues=self.queues)

    def open(self) -> None:
        self.store = mqstore.open(self.path, config=StoreConfig(clock=self.clock, **self.config))

    @property
    def broker(self) -> Broker:
        return self.store.broker

    def kill(self) -> None:
        """What the system does for a dead process: locks and descriptors are given back, nothing else happens."""
        self.members.clear()
        self.running.clear()
        self.store._consumers.clear()
        self.broker._closed = True
        kill(self.store.log)

    def close(self) -> None:
        self.members.clear()
        self.store.close()

    def put(self, *bodies: str, topic: str = "t", queue: int = 0, **options: Any) -> None:
        for body in bodies:
            self.store.put(topic, body.encode(), queue_id=queue, **options)

    # -- members --------------------------------------------------------------------------------------------------

    def join(
        self,
        name: str = "a",
        handler: Callable[..., Any] = lambda *arguments: None,
        *,
        topics: Sequence[str] = ("t",),
        **options: Any,
    ) -> PushConsumer:
        """A member that calls `handler` inside a record of the call, started; not yet run."""
        options = {"ordered": True, "workers": 1, **options}
        consumer = self.store.push_consumer(
            options.pop("group", "g"),
            client_id=name,
            on_error=lambda error, message: self.errors.append((error, message)),
            **options,
        )

        def recorded(got: Message | Sequence[Message], *more: Any) -> None:
            messages = [got] if isinstance(got, Message) else got
            with self.recording(name, messages):
                handler(got, *more)

        for topic in topics:
            consumer.subscribe(topic, recorded)
        self.members.append(consumer)
        return consumer.start()

    @contextmanager
    def recording(self, name: str, messages: Sequence[Message]) -> Iterator[None]:
        queue = messages[0].queue
        if queue in self.running:  # raising here would only be a handler's failure
            self.overlaps.append(f"{queue} is in a handler of {self.running[queue]}, and now in one of {name}")
        self.running[queue] = name
        now_ms = self.clock.monotonic_ms()
        for message in messages:
            self.calls.append(Call(name, queue, message.offset, message.text(), message.attempt, now_ms))
        try:
            yield
        finally:
            self.running.pop(queue, None)

    def leave(self, consumer: PushConsumer) -> bool:
        self.members.remove(consumer)
        return consumer.stop()

    # -- time -----------------------------------------------------------------------------------------------------

    def settle(self) -> int:
        """Run what is due now; when to come again (monotonic ms)."""
        quiet = 0
        for _ in range(1000):
            wall_ms = self.broker.run_once()
            ahead_ms = self.clock.now_ms() - self.clock.monotonic_ms()
            dues = [due for each in list(self.members) if (due := each.run_once()) is not None]
            if wall_ms is not None:
                dues.append(wall_ms - ahead_ms)
            due_ms = min(dues, default=self.clock.monotonic_ms() + 1_000)
            quiet = quiet + 1 if due_ms > self.clock.monotonic_ms() else 0
            if quiet == 2:
                return due_ms
        raise AssertionError("something is due again and again")

    def advance(self, duration_s: float) -> None:
        until_ms = self.clock.monotonic_ms() + round(duration_s * 1000)
        while (due_ms := self.settle()) <= until_ms:
            self.clock.advance(max(0, due_ms - self.clock.monotonic_ms()))
        self.clock.advance(max(0, until_ms - self.clock.monotonic_ms()))
        self.settle()

    # -- what came of it ------------------------------------------------------------------------------------------

    @property
    def bodies(self) -> list[str]:
        return [call.body for call in self.calls]

    @property
    def attempts(self) -> list[tuple[str, int]]:
        return [(call.body, call.attempt) for call in self.calls]

    def committed(self, queue: int = 0, topic: str = "t") -> int | None:
        return self.broker.committed("g", topic, queue)

    def letters(self, group: str = "g") -> list[str]:
        return [letter.text() for letter in self.broker.dead_letters(group)]

    def told(self, kind: type[BaseException]) -> list[str]:
        return [str(error) for error, _ in self.errors if isinstance(error, kind)]
