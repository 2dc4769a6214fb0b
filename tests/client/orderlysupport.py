"""A store with time by hand, members of one group, and a record of every handler call: who overlaps is caught there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mqstore import Message, PushConsumer, QueueRef
from tests.client import popsupport

__all__ = ["Bench", "Call"]


@dataclass(frozen=True)
class Call:
    """One message in one handler call."""

    member: str
    queue: QueueRef
    offset: int
    body: str
    attempt: int
    at_ms: int


class Bench(popsupport.Bench):
    """Topic t has `queues` queues. Members are run in the order in which they joined."""

    def __init__(self, path: Path, queues: int = 1) -> None:
        super().__init__(path)
        self.calls: list[Call] = []
        self.running: dict[QueueRef, str] = {}
        self.overlaps: list[str] = []
        self.errors: list[tuple[BaseException, Message | None]] = []
        self.store.create_topic("t", queues=queues)

    def kill(self) -> None:
        self.running.clear()
        super().kill()

    def close(self) -> None:
        self.consumers.clear()
        self.store.close()

    def put(self, *bodies: str | bytes, topic: str = "t", queue_id: int | None = 0, **options: Any) -> None:
        super().put(*bodies, topic=topic, queue_id=queue_id, **options)

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

        def recorded(got: Message | Sequence[Message], *more: Any) -> Any:
            messages = [got] if isinstance(got, Message) else got
            with self.recording(name, messages):
                return handler(got, *more)

        for topic in topics:
            consumer.subscribe(topic, recorded)
        self.consumers.append(consumer)
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

    # -- what came of it ------------------------------------------------------------------------------------------

    @property
    def bodies(self) -> list[str]:
        return [call.body for call in self.calls]

    @property
    def attempts(self) -> list[tuple[str, int]]:
        return [(call.body, call.attempt) for call in self.calls]

    def dead(self) -> list[str]:
        return [letter.text() for letter in self.store.dead_letters("g")]

    def told(self, kind: type[BaseException]) -> list[str]:
        return [str(error) for error, _ in self.errors if isinstance(error, kind)]
