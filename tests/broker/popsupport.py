"""A pop service on a small store, with time by hand, that can be killed and opened again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.context import Parts
from mqstore.broker.names import QueueKey
from mqstore.broker.pop.service import Delivery, PopService
from mqstore.broker.pop.state import Batch, QueueState
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.reading import Reads
from mqstore.broker.redelivery.retry import Retries
from mqstore.broker.waiting import Waiters
from mqstore.files.filesystem import FileSystem
from mqstore.log.store import MessageStore
from tests.broker.support import ServiceBench

__all__ = ["PopBench", "bodies", "fail_once", "interrupted_puts", "memory", "offsets", "orders"]


class PopBench(ServiceBench[PopService]):
    """Everything that pop needs, opened; `reopen` after `kill` or `close`. Time goes on across them."""

    def __init__(
        self,
        path: Path,
        fs: FileSystem | None = None,
        *,
        rng: Callable[[], float] = lambda: 0.5,  # no luck: the retry topic comes last
        queues: int = 0,
        **config: Any,
    ) -> None:
        """Open it. `queues`: with a topic `t` of so many."""
        self._fs = fs
        self._rng = rng
        super().__init__(path, self._service, fs, **config)
        if queues:
            self.parts.topics.create("t", queues=queues)

    def open(self, fs: FileSystem | None = None, **config: Any) -> None:
        super().open(fs or self._fs, **config)
        self.mechanisms += [self.waiters, self.parts.offsets]

    def _service(self, parts: Parts, wake: Callable[[], None]) -> PopService:
        self.reads, self.waiters = Reads(parts), Waiters(parts, lambda: None)
        return PopService(parts, wake, self.waiters, self.reads, Retries(parts).dead_letter, rng=self._rng)

    advance = ServiceBench.pass_ms
    read = ServiceBench.messages

    # -- what is known in memory: tests look there by these names only, and by `memory` and `orders` below ------------

    @property
    def tables(self) -> PopTables:
        return self.service._tables

    @property
    def state(self) -> QueueState:
        """State of queue 0 of topic t for group g."""
        return self.tables.states[QueueKey("g", "t", 0)]

    @property
    def announced(self) -> int:
        """Number of times at which the housekeeper is to look at a queue."""
        return len(self.tables._agenda)

    def by_python(self) -> None:
        """Pop and settle without compiled parts from now on."""
        self.tables._tip = None

    @property
    def is_compiled(self) -> bool:
        return self.tables._tip is not None

    def rewrite(self) -> None:
        """Append the last batch in order again, as the keeper does if it lies too far behind the log end."""
        if self.state.fifo is not None:
            self.service._fifo.rewrite(self.state)

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    # -- messages ---------------------------------------------------------------------------------------------------

    def put(
        self, topic: str, count: int, *, queue_id: int = 0, first: int = 0, body_bytes: int = 0, **options: Any
    ) -> None:
        """Messages with bodies `first`, `first` + 1 and so on, as text."""
        for i in range(first, first + count):
            self.parts.store.put(topic, str(i).encode().ljust(body_bytes, b"."), queue_id, **options)

    def log_size(self) -> int:
        return self.parts.store.max_offset

    # -- group g, topic t unless said -------------------------------------------------------------------------------

    def pop(self, *, group: str = "g", topic: str = "t", **options: Any) -> list[Delivery]:
        return self.service.pop(group, topic, **options)

    def ack(self, *deliveries: Delivery) -> None:
        self.service.ack("g", "t", [delivery.receipt for delivery in deliveries])

    def release(self, *deliveries: Delivery) -> None:
        self.service.release("g", "t", [delivery.receipt for delivery in deliveries])

    def committed(self, queue_id: int = 0, *, topic: str = "t") -> int | None:
        return self.parts.offsets.committed(QueueKey("g", topic, queue_id))

    def reset(self, offset: int, queue_id: int = 0, *, topic: str = "t") -> None:
        """As `Broker.reset`."""
        self.reads.reset("g", topic, queue_id, offset, self.service.reset)
        self.parts.offsets.save()


def fail_once(monkeypatch: pytest.MonkeyPatch, target: object, name: str, *, call: int = 1) -> None:
    """Let the `call`-th coming call of `target.name` meet a full disk."""
    real, calls = getattr(target, name), [0]

    def put(*args: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise OSError("no space left")
        return real(*args, **options)

    monkeypatch.setattr(target, name, put)


def bodies(deliveries: list[Delivery]) -> list[bytes]:
    return [delivery.message.body for delivery in deliveries]


def offsets(deliveries: list[Delivery]) -> list[int]:
    return [delivery.message.offset for delivery in deliveries]


_FIELDS = (
    *("key", "head", "cursor", "committed", "written", "ahead_at", "ahead_from", "ahead_next", "ahead_filter"),
    *("announced_ms", "last_pop_ms", "reset_ms", "pops", "popped", "popped_bytes", "acked", "gone", "_batches"),
)
"""Those that are values; `memory` shows the others."""


def _shown(batch: Batch | None) -> Any:
    names = ("name", "start", "count", "pop_time_ms", "invisible_ms", "deltas", "left", "moved", "local", "failed")
    return None if batch is None else tuple(repr(getattr(batch, name)) for name in names)


def memory(state: QueueState) -> dict[str, Any]:
    """All that is known of a queue, as values."""
    timeline = state.timeline
    return {name: getattr(state, name) for name in _FIELDS} | {
        "in_flight": [(offset, _shown(batch)) for offset, batch in state.in_flight.items()],
        "released": [(offset, _shown(batch)) for offset, batch in state.released.items()],
        "revived": list(state.revived),
        "fifo": _shown(state.fifo),
        "ahead": [message.offset for message in state.ahead],
        "entries": timeline.entries,
        "asked": timeline.asked,
        "timeline": {at: [_shown(batch) for batch in timeline._at(at)] for at in timeline._buckets},
        "times": timeline._times,
    }


def orders(bench: PopBench) -> tuple[int, Any, set[QueueKey]]:
    """All that the order info says, and the queues whose record is the batch itself."""
    tables = bench.tables
    batches = {key for key, entry in tables.orders.entries.items() if isinstance(entry, Batch)}
    assert all(tables.orders.entries[key] is tables.states[key].fifo for key in batches)
    return tables.order_version, tables.orders.as_json(), batches


@contextmanager
def interrupted_puts(store: MessageStore) -> Iterator[None]:
    """Let Ctrl-C come into each put: into the alarm that it rings, which runs Python."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    log = store._log
    real, log._on_alarm, log.alarm = log._on_alarm, interrupt, 0
    yield
    log._on_alarm = real
