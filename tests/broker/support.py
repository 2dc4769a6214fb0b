"""Small brokers for tests: the log's small stores (tests/log/support.py), tables over them, and time by hand."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

import pytest

from mqstore import Durability, Message, Profile, SimulatedClock, StoreConfig
from mqstore.broker.background.context import Parts, open_parts, open_tables
from mqstore.broker.background.service import BackgroundService
from mqstore.broker.broker import Broker
from mqstore.broker.delay.levels import DelayService
from mqstore.broker.delay.timer import TimerService
from mqstore.broker.reads.waiting import Waiters
from mqstore.broker.tables.members import Mode
from mqstore.broker.tables.names import QueueKey
from mqstore.columnar.columns import ColumnReader
from mqstore.errors import StoreFullError
from mqstore.files.filesystem import FileSystem
from mqstore.log.directory import manifest
from mqstore.log.reading.reader import StoreReader
from mqstore.log.store import MessageStore
from tests.faults import FaultyFileSystem
from tests.log.support import kill, open_store
from tests.waiting import pass_time

__all__ = [
    "START_MS",
    "Bench",
    "Broker",
    "Mode",
    "ServiceBench",
    "TableBench",
    "advance",
    "clock_of",
    "counted",
    "full",
    "messages_of",
    "new_parts",
    "parked_thread",
    "scanned",
    "settle",
    "shrink_timer_log",
]

START_MS = 1_700_000_000_000
"""Where a `SimulatedClock` starts."""


def new_parts(
    path: Path,
    mode: Literal["rw", "r"] = "rw",
    *,
    profile: Profile | None = None,
    durability: Durability = "append",
    fs: FileSystem | None = None,
    **config: Any,
) -> Parts:
    """Open (or open again) the store at `path` without threads, with its tables. `clock=` goes on with another's time.

    Close with `parts.store.close()`; mechanisms first.
    """
    config = {"segment_bytes": 1 << 16, **config} if not (path / "commitlog").exists() else config
    store = open_store(path, mode, profile=profile, durability=durability, fs=fs, **config)
    return open_parts(store) if mode == "rw" else open_tables(store)


def clock_of(parts: Parts) -> SimulatedClock:
    assert isinstance(parts.clock, SimulatedClock)
    return parts.clock


def settle(parts: Parts, mechanisms: Sequence[BackgroundService], *, rounds: int = 1000) -> int | None:
    """Run everything that is due now, until nothing is; when the next is."""
    now_ms = parts.clock.now_ms()
    for _ in range(rounds):
        parts.store.dispatch()
        before = parts.store.max_offset
        due = [each.run_once(now_ms) for each in mechanisms]
        parts.store.dispatch()
        if parts.store.max_offset == before and all(when is None or when > now_ms for when in due):
            return min((when for when in due if when is not None), default=None)
    raise AssertionError(f"something is due again and again at {now_ms}")


def advance(parts: Parts, mechanisms: Sequence[BackgroundService], duration_ms: int) -> None:
    """Let time pass as a housekeeper would see it: from one due time to the next."""
    pass_time(clock_of(parts), duration_ms, lambda: settle(parts, mechanisms))


def shrink_timer_log(monkeypatch: pytest.MonkeyPatch, units: int = 10) -> None:
    """Let stores that are made from now on have `units` units in a file of the timer's log."""
    sizes = manifest._SIZES
    monkeypatch.setitem(sizes, "mqstore", (*sizes["mqstore"][:4], units * 52 + 16))


def full(*_: object, **__: object) -> Any:
    """Meet a full disk, in the place of a function that writes."""
    raise StoreFullError(errno.ENOSPC, "no space", "file", "put")


def parked_thread(waiters: Waiters, target: Callable[[], object]) -> threading.Thread:
    """A started thread that has parked."""
    before = len(waiters.parked)
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    for _ in range(30_000):
        if len(waiters.parked) > before:
            break
        thread.join(0.001)
    assert len(waiters.parked) == before + 1
    return thread


def messages_of(parts: Parts, topic: str, queue_id: int = 0) -> list[Message]:
    """All messages of a queue, which need not exist."""
    bounds = parts.store.offsets_or_none(topic, queue_id)
    return parts.store.read(topic, queue_id, bounds[0], 1_000_000) if bounds and bounds[1] else []


def scanned(store: StoreReader) -> list[bytes]:
    """What `readBy=log` of Spark reads, of topic t."""
    batches = ColumnReader(store, ["body"]).log(0, store.parts.readable_end(0), lambda topic: topic == "t")
    return [body for batch in batches for body in batch.column(0).to_pylist()]


def counted(parts: Parts, name: str) -> int:
    """Sum of a counter over all its keys."""
    totals = parts.statistics.snapshot().totals
    return sum(total.value for (kind, _), total in totals.items() if kind == name)


Table = TypeVar("Table")


class TableBench(Generic[Table]):
    """A store, and one table of its folder `config`. `fs` injects faults."""

    def __init__(self, path: Path, name: str, load: Callable[[MessageStore], Table], **config: Any) -> None:
        self.path = path
        self.file = path / "config" / name
        self.fs = FaultyFileSystem()
        self.store: MessageStore = open_store(path, fs=self.fs, **config)
        self._load = load
        self.table = self.again()

    def fill(self, topic: str, queue_id: int = 0, count: int = 1) -> None:
        for _ in range(count):
            self.store.put(topic, b"x", queue_id)

    def again(self) -> Table:
        """Return the table as a new process would read it."""
        return self._load(self.store)

    def stored(self) -> dict[str, Any]:
        return json.loads(self.file.read_text())  # type: ignore[no-any-return]

    def write(self, text: str) -> Table:
        """Put `text` in the place of the file, and read it."""
        self.file.parent.mkdir(exist_ok=True)
        self.file.write_text(text)
        self.table = self.again()
        return self.table


Service = TypeVar("Service", bound=BackgroundService)


class ServiceBench(Generic[Service]):
    """A store with one service of the broker alone, that can be closed, killed and opened again under one clock."""

    def __init__(
        self,
        path: Path,
        make: Callable[[Parts, Callable[[], None]], Service],
        fs: FileSystem | None = None,
        **config: Any,
    ) -> None:
        self.path, self.wakes, self._make = path, 0, make
        self._config = {"clock": SimulatedClock(), **config}
        self.open(fs)

    def open(self, fs: FileSystem | None = None, **config: Any) -> None:
        """Open, with options that count from then on."""
        self._config |= config
        self.parts: Parts = new_parts(self.path, fs=fs, **self._config)
        self.service = self._make(self.parts, self._wake)
        self.mechanisms: list[BackgroundService] = [self.service]

    def _wake(self) -> None:
        self.wakes += 1

    def close(self) -> None:
        for mechanism in (*self.mechanisms, self.parts.offsets):
            mechanism.persist()
            mechanism.close()
        self.parts.store.close()

    def kill(self) -> None:
        """Do what the system does for a dead process: what was written is there, what was in memory is not."""
        kill(self.parts.store)

    def reopen(self, fs: FileSystem | None = None, *, killed: bool = False, **config: Any) -> None:
        if not self.parts.store.closed:
            (self.kill if killed else self.close)()
        self.open(fs, **config)

    def crash(self, **config: Any) -> None:
        self.reopen(killed=True, **config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.parts.store.closed:
            self.close()

    @property
    def clock(self) -> SimulatedClock:
        return clock_of(self.parts)

    def settle(self) -> int | None:
        """Run everything that is due now, and return when the next is."""
        return settle(self.parts, self.mechanisms)

    def pass_ms(self, duration_ms: int) -> None:
        advance(self.parts, self.mechanisms, duration_ms)

    def messages(self, topic: str = "orders", queue_id: int = 0) -> list[Message]:
        return messages_of(self.parts, topic, queue_id)

    def bodies(self, topic: str = "orders", queue_id: int = 0) -> list[bytes]:
        return [message.body for message in self.messages(topic, queue_id)]

    def counted(self, name: str) -> int:
        return counted(self.parts, name)


class Bench:
    """A broker without threads and a clock moved by hand."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.path = path
        self.config = {"segment_bytes": 1 << 16, "consumequeue_units": 64, **config}
        self.clock = SimulatedClock()
        self.asked: list[bytes] = []
        """Bodies of the half messages that `check` was asked about."""
        self.broker = self.open()

    @property
    def parts(self) -> Parts:
        """The tables behind the broker's door. Tests look there, and at the three below, only by these names."""
        return self.broker._parts

    @property
    def delay(self) -> DelayService:
        return self.broker._delay

    @property
    def timer(self) -> TimerService:
        return self.broker._timer

    @property
    def waiters(self) -> Waiters:
        return self.broker._waiters

    def open(self, **kwargs: Any) -> Broker:
        self.broker = Broker(open_store(self.path, clock=self.clock, **{**self.config, **kwargs}))
        return self.broker

    def again(self, **config: Any) -> Broker:
        self.broker.close()
        return self.open(**config)

    def kill(self) -> Broker:
        """Open the store again after its process died: locks and descriptors were given back, and nothing else."""
        kill(self.broker.store)
        return self.open()

    def put_without_broker(self, bodies: Sequence[bytes], topic: str = "t") -> None:
        """Put to queue 0 of the closed store, as who uses the log alone."""
        with MessageStore(self.path, config=StoreConfig(clock=self.clock)) as store:
            store.put_many(topic, bodies, queue_id=0)

    def jump(self, duration_ms: int) -> None:
        """Move the clock at once, as if nothing had run meanwhile, then run what is due."""
        self.clock.advance(duration_ms)
        self.settle()

    def advance(self, duration_ms: int) -> None:
        """Let time pass from one due time to the next, as the housekeeper would."""
        pass_time(self.clock, duration_ms, self.settle)

    def settle(self) -> int | None:
        """Run what is due now, until nothing is, and return when the next is (wall ms)."""
        for _ in range(1000):
            due_ms = self.broker.run_once()
            if due_ms is None or due_ms > self.clock.now_ms():
                return due_ms
        raise AssertionError(f"something is due again and again: {self.broker.stats().errors}")

    def pulled(self, group: str, topic: str, queue_id: int) -> int | None:
        """Return the end of the group's last read."""
        return self.parts.offsets.query_pull(QueueKey(group, topic, queue_id))

    def check(self, half: Message) -> bool:
        """Answer a question about a half message: it is to be committed."""
        self.asked.append(half.body)
        return True

    def bodies(self, group: str = "g", topic: str = "t", **options: Any) -> list[bytes]:
        deliveries = self.broker.pop(group, topic, 32, **options)
        self.broker.ack(group, topic, [each.receipt for each in deliveries])
        return [each.message.body for each in deliveries]

    def drain(self, group: str = "g", topic: str = "t") -> list[bytes]:
        """Return the bodies of several pops, acknowledged. Not every pop looks at the retries of its topic."""
        return [body for _ in range(5) for body in self.bodies(group, topic)]
