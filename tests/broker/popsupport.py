"""A pop service on a small store, with time by hand, that can be killed and opened again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.background.context import Parts
from mqstore.broker.pop.batch import Batch
from mqstore.broker.pop.poplog import compaction
from mqstore.broker.pop.poplog.log import PopLog
from mqstore.broker.pop.request import Delivery, PopRequest
from mqstore.broker.pop.service import PopService
from mqstore.broker.pop.state import QueueState
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.reads.filters.filter import parse_filter
from mqstore.broker.reads.reading import Reads
from mqstore.broker.reads.waiting import Waiters
from mqstore.broker.redelivery.retry import Retries
from mqstore.broker.tables.names import POP_LOG_KEY, QueueKey
from mqstore.files.filesystem import FileSystem
from mqstore.log.store import MessageStore
from tests.broker.support import ServiceBench, full

__all__ = [
    *("DLQ", "POP_LOG_TOPIC", "RETRY", "RETRY_V1"),
    *("PopBench", "bodies", "interrupted_puts", "memory", "offsets", "orders", "queue", "tags"),
]

RETRY, RETRY_V1 = "%RETRY%g+t", "%RETRY%g_t"
DLQ = "%DLQ%g"
POP_LOG_TOPIC = "rmq_sys_pop_log"
tags = parse_filter


def queue(group: str = "g", topic: str = "t", queue_id: int = 0) -> QueueKey:
    """Queue of a topic, for a group."""
    return QueueKey(group, topic, queue_id)


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
        return self.service.tables

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
            self.service._ordered.rewrite(self.state)

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
        poll_s, durability = options.pop("poll_s", 0), options.pop("durability", None)
        return self.service.pop(PopRequest(group, topic, **options), poll_s, durability)

    def park(self, callback: Callable[[bool], Any], *, topic: str = "t", **options: Any) -> None:
        """Have `callback` called when a pop may find a message."""
        self.service.add_waiter(PopRequest("g", topic, **options), callback)

    def may_find(self, **options: Any) -> bool:
        """Return True if a pop may find a message now."""
        return self.service.wait_for(PopRequest("g", "t", **options), 0)

    def change(self, verb: str, receipt: str, *arguments: Any, **options: Any) -> Any:
        """Call `nack`, `change_invisible` or `dead_letter`."""
        return getattr(self.service, verb)("g", "t", receipt, *arguments, **options)

    def ack(self, *deliveries: Delivery) -> None:
        self.service.ack("g", "t", [delivery.receipt for delivery in deliveries])

    def release(self, *deliveries: Delivery) -> None:
        self.service.release("g", "t", [delivery.receipt for delivery in deliveries])

    def committed(self, queue_id: int = 0, *, topic: str = "t") -> int | None:
        return self.parts.offsets.committed(QueueKey("g", topic, queue_id))

    @property
    def replay_position(self) -> int | None:
        """Record of the pop log from which the next opening reads."""
        return self.parts.offsets.committed(POP_LOG_KEY)

    def replay_from(self, position: int) -> None:
        self.parts.offsets.commit(POP_LOG_KEY, position)

    # -- faults -----------------------------------------------------------------------------------------------------

    def replay_at_most(self, monkeypatch: pytest.MonkeyPatch, records: int) -> None:
        """Have batches put again that are more records behind the log end."""
        monkeypatch.setattr(compaction, "_REPLAY_RECORDS", records)

    def refuse(self, monkeypatch: pytest.MonkeyPatch, name: str, fail: Callable[..., Any] = full) -> None:
        """Let each write of that kind to the pop log fail."""
        monkeypatch.setattr(PopLog, name, fail)

    def fail_once(self, monkeypatch: pytest.MonkeyPatch, name: str, *, call: int = 1) -> None:
        """Let the `call`-th coming write of that kind meet a full disk."""
        target = PopTables if name == "file_dead_letter" else PopLog
        real, calls = getattr(target, name), [0]

        def put(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == call:
                raise OSError("no space left")
            return real(*args, **options)

        monkeypatch.setattr(target, name, put)

    def reset(self, offset: int, queue_id: int = 0, *, topic: str = "t") -> None:
        """As `Broker.reset`."""
        self.reads.reset("g", topic, queue_id, offset, self.service.reset)
        self.parts.offsets.save()


def bodies(deliveries: list[Delivery]) -> list[bytes]:
    return [delivery.message.body for delivery in deliveries]


def offsets(deliveries: list[Delivery]) -> list[int]:
    return [delivery.message.offset for delivery in deliveries]


_FIELDS = (
    *("key", "head", "cursor", "committed", "written", "ahead_at", "ahead_from", "ahead_next", "ahead_filter"),
    *("announced_ms", "last_pop_ms", "reset_ms", "pops", "popped", "popped_bytes", "acked", "gone", "_batches"),
    *("noted", "acks"),
)
"""Those that are values; `memory` shows the others."""


def _shown(batch: Batch | None) -> Any:
    names = ("name", "start", "count", "pop_time_ms", "invisible_ms", "deltas", "left", "moved", "local")
    return None if batch is None else tuple(repr(getattr(batch, name)) for name in names)


def memory(state: QueueState) -> dict[str, Any]:
    """All that is known of a queue, as values."""
    timeline = state.timeline
    return {name: getattr(state, name) for name in _FIELDS} | {
        "in_flight": [(offset, _shown(batch)) for offset, batch in state.in_flight.items()],
        "released": [(offset, _shown(batch)) for offset, batch in state.released.items()],
        "revived": list(state.revived),
        "reasons": {offset: reason for offset, (_, reason) in state.reasons.items()},
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
