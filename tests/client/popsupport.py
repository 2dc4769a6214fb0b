"""A store with time by hand for who consumes by pop, and threads whose outcome can be looked at."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import SimpleConsumer, SimulatedClock, StoreConfig
from mqstore.admin import Broker
from mqstore.client.poppush import PopEngine
from tests.broker.support import advance_broker, settle_broker
from tests.log.support import kill

__all__ = ["BOTH", "Bench", "Push", "ended", "full", "in_thread", "on_call", "until"]


class Bench:
    """A store whose clock stands still unless `advance` moves it; group g, topic t unless said."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.path = path
        self.clock = SimulatedClock()
        self.config = config
        self.open()

    def open(self) -> None:
        self.store = mqstore.open(self.path, config=StoreConfig(clock=self.clock, **self.config))

    @property
    def broker(self) -> Broker:
        return self.store.broker

    def kill(self) -> None:
        """What the system does for a dead process: locks and descriptors are given back, nothing else happens."""
        kill(self.store.log)

    def put(self, *bodies: bytes, topic: str = "t", queue_id: int | None = None, **options: Any) -> None:
        for body in bodies:
            self.store.put(topic, body, queue_id=queue_id, **options)
        self.broker.run_once()

    def consumer(self, *topics: str, group: str = "g", **options: Any) -> SimpleConsumer:
        return self.store.simple_consumer(group, dict.fromkeys(topics or ("t",), "*"), **options)

    def advance(self, duration_s: float) -> None:
        advance_broker(self.broker, self.clock, round(duration_s * 1000))

    def settle(self) -> int | None:
        """Run what is due; when to come again."""
        return settle_broker(self.broker, self.clock)


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs `work`; what it returned or raised comes into the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def ended(thread: threading.Thread, outcome: list[Any], timeout_s: float = 20) -> Any:
    """What the thread returned or raised."""
    thread.join(timeout_s)
    assert not thread.is_alive()
    return outcome[0]


def until(condition: Callable[[], object]) -> None:
    """Wait for another thread to get somewhere."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def on_call(number: int, error: BaseException, call: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for `call`, and raises `error` in its place when it is called the `number`-th time."""
    calls = count(1)

    def called(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise error
        return call(*arguments, **options)

    return called


def full(*_: Any, **__: Any) -> Any:
    """Stands for a call that finds the disk full."""
    raise mqstore.errors.StoreFullError(errno.ENOSPC, "no space", "log", "put")


BOTH = pytest.mark.parametrize("ordered", [False, True], ids=["standard", "ordered"])


class Push:
    """A push consumer and what its handler was given."""

    def __init__(
        self,
        bench: Bench,
        act: Callable[[Any], object] = lambda _: None,
        *topics: str,
        group: str = "g",
        start: bool = True,
        tags: str = "*",
        **options: Any,
    ) -> None:
        self.bench = bench
        self.act = act
        self.seen: list[tuple[bytes, int]] = []
        """(body, attempt) of each message handled."""
        self.consumer = bench.store.push_consumer(group, mode="pop", **{"workers": 2, **options})
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

    def bodies(self) -> list[bytes]:
        return [body for body, _ in self.seen]

    def go(self) -> None:
        """Until nothing is left to do now."""
        turns = self.consumer._workers._turns
        for _ in range(10_000):
            self.bench.settle()
            self.consumer.run_once()
            self.bench.settle()
            if turns.empty():
                return
        raise AssertionError("it never comes to rest")

    def advance(self, duration_s: float) -> None:
        clock = self.bench.clock
        end_ms = clock.monotonic_ms() + round(duration_s * 1000)
        while True:
            self.go()
            dues = [end_ms]
            if (timer_ms := self.consumer._workers.run_once()) is not None:
                dues.append(timer_ms)
            if (wall_ms := self.bench.settle()) is not None:
                dues.append(wall_ms - clock.now_ms() + clock.monotonic_ms())
            step_ms = min(dues) - clock.monotonic_ms()
            if step_ms <= 0 and clock.monotonic_ms() >= end_ms:
                return
            clock.advance(max(step_ms, 1))
