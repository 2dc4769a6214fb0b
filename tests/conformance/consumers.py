"""Every kind of consumer behind one face, by public names only: `mqstore` and `mqstore.aio`.

A kind that leases (`Queue`, `SimpleConsumer`) is asked for messages; a push consumer calls a handler; a pull consumer
polls and commits. `Consumer.handle` hides that difference. Time is moved by hand, so no test sleeps.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import mqstore
from mqstore import Message, RetryPolicy, SimulatedClock, StoreConfig, aio
from tests.waiting import pass_time

__all__ = [
    "KINDS",
    "LEASING",
    "RETRY",
    "Consumer",
    "HandlerError",
    "Kind",
    "Lease",
    "Leasing",
    "OpenStore",
    "World",
    "kinds",
]

Act = Callable[[Message], object]
OpenStore = Callable[..., mqstore.Store]
"""Opens a store, as `mqstore.open` does."""

RETRY = RetryPolicy(3, [10, 20])
"""Three attempts, after 10 s and 20 s."""


@dataclass(frozen=True)
class Kind:
    """One kind of consumer."""

    family: Literal["queue", "simple", "push", "pull"]
    ordered: bool = False
    mode: Literal["queue", "pop"] = "pop"
    aio: bool = False

    @property
    def leases(self) -> bool:
        """True if each message is leased for a visibility timeout, and settled by a verb."""
        return self.family in ("queue", "simple")

    @property
    def commits(self) -> bool:
        """True if a committed offset says what is done. After a kill the last messages may come again."""
        return self.mode == "queue"

    @property
    def in_order(self) -> bool:
        """True if nothing overtakes a failed message."""
        return self.ordered or self.family == "pull"

    def __str__(self) -> str:
        words = ("aio" * self.aio, self.family, self.mode * (self.family == "push"), "ordered" * self.ordered)
        return "-".join(word for word in words if word)


_SYNC = [
    *(Kind(family, ordered) for family in ("queue", "simple") for ordered in (False, True)),
    *(Kind("push", ordered, mode) for mode in ("queue", "pop") for ordered in (False, True)),
    Kind("pull", mode="queue"),
]
KINDS = [*_SYNC, *(Kind(kind.family, kind.ordered, kind.mode, aio=True) for kind in _SYNC)]
LEASING = [kind for kind in KINDS if kind.leases]


def kinds(wanted: Callable[[Kind], bool]) -> list[Kind]:
    return [kind for kind in KINDS if wanted(kind)]


class Consumer(Protocol):
    """Consumer of one group. What `act` raises is a failed attempt of its message."""

    def handle(self, act: Act = ..., /) -> list[tuple[str, int]]:
        """Handle all messages that are ready, and return (text, attempt) of each delivery."""

    def close(self) -> object: ...


class Leasing(Consumer, Protocol):
    """Consumer that leases messages."""

    def take(self) -> Lease:
        """Return the next message, which must be ready."""

    def nothing(self) -> bool:
        """Return True if no message is ready."""


class Lease:
    """Leased message whose verbs block, also where the consumer is one of asyncio."""

    def __init__(self, lease: Any, run: Callable[..., Any]) -> None:
        self._lease = lease
        self._run = run

    @property
    def message(self) -> Message:
        message = self._lease.message
        assert isinstance(message, Message)
        return message

    @property
    def seen(self) -> tuple[str, int]:
        return self.message.text(), self._lease.attempt

    @property
    def settled(self) -> bool:
        return bool(self._lease.settled)

    @property
    def expires_at(self) -> float:
        return float(self._lease.expires_at)

    def ack(self) -> None:
        self._run(self._lease.ack)

    def nack(self, delay: float | None = None) -> None:
        self._run(self._lease.nack, delay)

    def reject(self, *reason: str) -> None:
        self._run(self._lease.reject, *reason)

    def release(self, delay: float = 0) -> None:
        self._run(self._lease.release, delay)

    def extend(self, visibility: float) -> None:
        self._run(self._lease.extend, visibility)

    def block(self, act: Act, verb: str = "") -> None:
        """Enter a `with` block of the lease. Call this verb of it, if any, and then `act`."""
        if not hasattr(self._lease, "__aenter__"):
            with self._lease:
                if verb:
                    getattr(self._lease, verb)()
                act(self.message)
            return

        async def block() -> None:
            async with self._lease:
                if verb:
                    await getattr(self._lease, verb)()
                act(self.message)

        self._run(block)


class World:
    """One store, its clock, and the consumers of one group. Topic and group of a `Queue` have its name."""

    def __init__(self, kind: Kind, path: Path, open_store: OpenStore = mqstore.open, **config: Any) -> None:
        self.kind = kind
        self.path = path
        self.topic = "work"
        self.group = self.topic if kind.family == "queue" else "crew"
        self.clock = SimulatedClock()
        self._config = StoreConfig(clock=self.clock, **config)
        self._open_store = open_store
        self._runner: asyncio.Runner | None = None
        self.opened = False
        self.open()

    # -- the store --------------------------------------------------------------------------------------------------

    def open(self) -> None:
        if self.kind.aio:
            self._runner = asyncio.Runner()
            self.aio: aio.Store = self.run(aio.open(self.path, config=self._config).__aenter__)
            self.store = self.aio.sync
        else:
            self.store = self._open_store(self.path, config=self._config)
        self.opened = True

    def close(self) -> None:
        if not self.opened:
            return
        self.opened = False
        if self._runner is None:
            self.store.close()
        else:
            self.run(self.aio.close)
            self._runner.close()
            self._runner = None

    def reopen(self) -> None:
        self.close()
        self.open()

    def run(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function. With asyncio it is called in the loop, and what it returns is awaited if it can be."""
        if self._runner is None:
            return call(*arguments, **options)

        async def run() -> Any:
            result = call(*arguments, **options)
            return await result if inspect.isawaitable(result) else result

        return self._runner.run(run())

    # -- messages ---------------------------------------------------------------------------------------------------

    def put(self, *texts: str, queue_id: int = 0, **options: Any) -> None:
        for text in texts:
            self.store.put(self.topic, text.encode(), queue_id=queue_id, **options)

    def dead(self) -> list[tuple[str, str]]:
        """Return (text, reason) of the group's dead letters."""
        return [(letter.text(), letter.properties["dlq_reason"]) for letter in self.store.dead_letters(self.group)]

    def lag(self) -> int:
        return sum(self.store.lag(self.group).values())

    # -- time -------------------------------------------------------------------------------------------------------

    def settle(self, push: _Push | None = None) -> int | None:
        """Run all that is due now, also of `push`. Return the time (wall ms) when something is due next."""
        quiet, log = 0, getattr(self.store, "behind", self.store).log
        for _ in range(10_000):
            before = log.max_offset, push and len(push.seen)
            times = [self.store.broker.run_once(), push and push.run_once()]
            due = min((each for each in times if each is not None), default=None)
            rests = before == (log.max_offset, push and len(push.seen))
            quiet = quiet + 1 if rests and (due is None or due > self.clock.now_ms()) else 0
            if quiet == (6 if self.kind.aio else 2):  # a task of asyncio takes a few turns of the loop
                return due
        raise AssertionError("something is due again and again")

    def advance(self, duration_s: float) -> None:
        """Let time pass, from one due time to the next."""
        pass_time(self.clock, round(duration_s * 1000), self.settle)

    # -- consumers --------------------------------------------------------------------------------------------------

    def consumer(self, *, tags: str = "*", **options: Any) -> Any:
        """Return a consumer of this kind."""
        owner: Any = self.aio if self.kind.aio else self.store
        ordered = {"ordered": True} if self.kind.ordered else {}
        if self.kind.family == "queue":
            return _Queue(self, self.run(owner.queue, self.topic, **{"retry": RETRY, **ordered, **options}))
        if self.kind.family == "simple":
            options = {"retry": RETRY, **ordered, **options}
            return _Simple(self, self.run(owner.simple_consumer, self.group, {self.topic: tags}, **options))
        if self.kind.family == "pull":
            return _Pull(self, self.run(owner.pull_consumer, self.group, **options), tags)
        options = {"retry": RETRY, "mode": self.kind.mode, "workers": 1, **ordered, **options}
        return _Push(self, self.run(owner.push_consumer, self.group, **options), tags)


class _Asked:
    """Consumer that is asked for leases."""

    def __init__(self, world: World, consumer: Any) -> None:
        self._world = world
        self.consumer = consumer

    def _next(self) -> Any:
        raise NotImplementedError

    def take(self) -> Lease:
        self._world.settle()
        found = self._next()
        assert found is not None, "nothing is ready"
        return Lease(found, self._world.run)

    def nothing(self) -> bool:
        self._world.settle()
        return self._next() is None

    def handle(self, act: Act = lambda message: None) -> list[tuple[str, int]]:
        seen = []
        self._world.settle()
        while (found := self._next()) is not None:
            lease = Lease(found, self._world.run)
            seen.append(lease.seen)
            with suppress(HandlerError):
                lease.block(act)
            self._world.settle()
        return seen


class _Member:
    """Consumer with subscriptions, which a `Queue` has not."""

    _world: World
    consumer: Any
    _handler: tuple[Act, ...] = ()
    """Handler of a push consumer."""

    def subscribe(self, tags: str = "*", topic: str = "", **options: str) -> None:
        self._world.run(self.consumer.subscribe, topic or self._world.topic, *self._handler, tags=tags, **options)

    def unsubscribe(self, topic: str) -> None:
        self._world.run(self.consumer.unsubscribe, topic)


class HandlerError(Exception):
    """Failure of a handler."""


class _Queue(_Asked):
    def _next(self) -> Any:
        try:
            return self._world.run(self.consumer.get, block=False)
        except mqstore.QueueEmpty:
            return None

    def close(self) -> None:
        self._world.run(self.consumer.shutdown)


class _Simple(_Asked, _Member):
    def _next(self) -> Any:
        found: Sequence[Any] = self._world.run(self.consumer.receive, wait=0)
        return found[0] if found else None

    def close(self) -> None:
        self._world.run(self.consumer.close)


class _Pull(_Member):
    """Handles polled messages one by one. At a failure it goes back to that message."""

    def __init__(self, world: World, consumer: Any, tags: str) -> None:
        self._world = world
        self.consumer = consumer
        self.subscribe(tags)

    def handle(self, act: Act = lambda message: None) -> list[tuple[str, int]]:
        run, seen = self._world.run, []
        self._world.settle()
        while found := run(self.consumer.poll, timeout=0, max_messages=1):
            [message] = found
            seen.append((message.text(), message.attempt))
            try:
                act(message)
            except HandlerError:
                run(self.consumer.seek, message.queue, message.offset)
                break
        return seen

    def close(self) -> None:
        self._world.run(self.consumer.close)


class _Push(_Member):
    """Push consumer that runs only in `handle`."""

    def __init__(self, world: World, consumer: Any, tags: str) -> None:
        self._world = world
        self.consumer = consumer
        self.seen: list[tuple[str, int]] = []
        self._act: Act = lambda message: None

        async def handle(message: Message) -> None:
            await asyncio.sleep(0)
            self._handle(message)

        self._handler = (handle if world.kind.aio else self._handle,)
        self.subscribe(tags)
        world.run(consumer.start)

    def _handle(self, message: Message) -> None:
        self.seen.append((message.text(), message.attempt))
        self._act(message)

    def run_once(self) -> int | None:
        due_ms = self._world.run(self.consumer.run_once)
        clock = self._world.clock
        return None if due_ms is None else due_ms + clock.now_ms() - clock.monotonic_ms()

    def handle(self, act: Act = lambda message: None) -> list[tuple[str, int]]:
        start, self._act = len(self.seen), act
        self._world.settle(self)
        return self.seen[start:]

    def close(self) -> None:
        self._world.run(self.consumer.stop)
