"""What tests of all clients need: threads that wait for each other, time that passes for a broker and its consumers,
and looks inside of clients. A test that has to see or do what no public name shows takes a helper of this module, or of
the module of its bench: a change inside then changes one place."""

from __future__ import annotations

import _thread
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, cast

from mqstore import PushConsumer, Queue, SimpleConsumer, SimulatedClock, Store
from mqstore.broker.broker import Broker
from mqstore.client.push.pop import PopEngine
from mqstore.client.push.workers import Workers
from mqstore.client.waits import Waits
from mqstore.log.store import MessageStore
from tests import waiting
from tests.log.support import open_store
from tests.waiting import ended, in_thread, pass_time

__all__ = [
    "Broker",
    "advance",
    "elsewhere",
    "ended",
    "every_lock_held",
    "failing",
    "in_thread",
    "open_broker",
    "parked",
    "settle",
    "subscribed",
    "turns_left",
    "until",
    "waits_of",
    "workers_of",
]

# -- threads ----------------------------------------------------------------------------------------------------------


def open_broker(path: Path, **options: Any) -> Broker:
    """Return a broker over a log with these options (`tests.log.support.open_store`)."""
    return Broker(open_store(path, **options))


until = partial(waiting.until, limit_s=20, pause_s=0.001)


def failing(call: Callable[..., Any], *errors: BaseException | None) -> Callable[..., Any]:
    """Return a stand-in for `call` that raises these errors first, one a call. None: this time it calls."""
    left = deque(errors)

    def called(*arguments: Any, **options: Any) -> Any:
        if left and (error := left.popleft()) is not None:
            raise error
        return call(*arguments, **options)

    return called


def subscribed(
    owner: Broker | Store, handler: Callable[..., object], topic: str = "t", *, group: str = "g", **options: Any
) -> PushConsumer:
    """Return a push consumer that has this handler and is not started."""
    make = owner.push_consumer if isinstance(owner, Store) else partial(PushConsumer, owner)
    consumer = make(group, **options)
    consumer.subscribe(topic, handler)
    return consumer


@contextmanager
def every_lock_held(*owners: object) -> Iterator[None]:
    """Hold every free lock of these objects and of what they are made of."""
    with ExitStack() as held:
        for lock in _locks_of(*owners):
            if lock.acquire(timeout=0.05):  # a bell is held until somebody rings it
                held.callback(lock.release)
        yield


@contextmanager
def elsewhere(context: AbstractContextManager[Any], limit_s: float) -> Iterator[None]:
    """Be in `context` in another thread. The test fails if that takes longer than `limit_s`."""
    entered, done = threading.Event(), threading.Event()

    def stay() -> bool:
        with context:
            entered.set()
            return done.wait(limit_s)

    staying = in_thread(stay)
    assert entered.wait(20)
    try:
        yield
    finally:
        done.set()
        assert ended(*staying) is True


def _locks_of(*owners: object) -> list[Any]:
    seen: set[int] = set()
    todo, found = list(owners), []
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, _thread.LockType | _thread.RLock):
            found.append(each)
        elif isinstance(each, dict):
            todo += list(each.values())  # other threads change it
        elif isinstance(each, list | tuple | set):
            todo += list(each)
        elif isinstance(each, MethodType):
            todo.append(each.__self__)
        elif type(each).__module__.startswith("mqstore"):
            names = {name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())}
            todo += [*getattr(each, "__dict__", {}).values(), *(getattr(each, name, None) for name in names)]
    return found


# -- time -------------------------------------------------------------------------------------------------------------


def settle(broker: Broker, clock: SimulatedClock, consumers: Sequence[PushConsumer]) -> int | None:
    """Run all that is due now, until nothing is, and return when the next is (wall ms)."""
    quiet = 0
    for _ in range(10_000):
        end = behind(broker).store.max_offset
        times = [broker.run_once()]
        for consumer in list(consumers):
            due_ms = consumer.run_once()
            times.append(None if due_ms is None else due_ms + clock.now_ms() - clock.monotonic_ms())
        known = [due_ms for due_ms in times if due_ms is not None]
        rests = behind(broker).store.max_offset == end and all(due_ms > clock.now_ms() for due_ms in known)
        quiet = quiet + 1 if rests else 0
        if quiet == 2:  # in the first round one may have woken another that had had its turn
            return min(known, default=None)
    raise AssertionError("something is due again and again")


def advance(broker: Broker, clock: SimulatedClock, consumers: Sequence[PushConsumer], duration_s: float) -> None:
    """Let time pass, from one due time to the next."""
    pass_time(clock, round(duration_s * 1000), lambda: settle(broker, clock, consumers))


def running_broker(path: Path) -> Broker:
    """Return a broker that has its threads, on a store of its own."""
    return Broker(MessageStore(path))


# -- inside -----------------------------------------------------------------------------------------------------------


def behind(broker: Broker) -> Broker:
    """Return the broker itself, if `broker` stands for one at the other end of a pipe."""
    return getattr(broker, "behind", broker)


def parked(broker: Broker) -> int:
    """Return the number of parked readers and receivers."""
    getattr(broker, "settle", lambda: None)()
    return len(behind(broker)._waiters.parked)


def waits_of(receiver: Queue | SimpleConsumer | PushConsumer) -> Waits:
    """Return its waits for messages to pop."""
    if isinstance(receiver, Queue):
        return receiver._waits
    if isinstance(receiver, PushConsumer):
        return cast(PopEngine, receiver._engine)._source.waits
    return receiver._source.waits


def workers_of(consumer: PushConsumer) -> Workers:
    return consumer._workers


def turns_left(consumer: PushConsumer) -> int:
    """Return the number of jobs that wait for a thread or a worker."""
    workers = consumer._workers
    return workers._turns.qsize() + len(workers._waiting)
