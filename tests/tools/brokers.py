"""Stores that a broker has worked on, for the tests of the commands about it. Its clock stands at the real time, for
the commands go by that."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mqstore import SimulatedClock, StoreConfig
from mqstore.broker.admin.inspect import lag_of, pop_view
from mqstore.broker.background.context import Tables, open_tables
from mqstore.broker.broker import Broker
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.store import MessageStore


def clock_now() -> SimulatedClock:
    """A clock that stands at the present."""
    return SimulatedClock(int(time.time() * 1000))


@contextmanager
def broker(path: Path, clock: SimulatedClock | None = None, **config: Any) -> Iterator[Broker]:
    """A broker without threads on the store at `path`. The files of a new one are small: many tests copy them."""
    small = {"segment_bytes": 1 << 16, "consumequeue_units": 256, "index_slots": 64, "index_entries": 256}
    config = config if path.exists() else {**small, **config}
    with Broker(MessageStore(path, config=StoreConfig(clock=clock or clock_now(), **config))) as running:
        yield running


@contextmanager
def tables(path: Path) -> Iterator[Tables]:
    """The tables of the store at `path`, read."""
    with ReadOnlyMessageStore(path) as store:
        yield open_tables(store)


def behind(path: Path, group: str) -> dict[tuple[str, int], tuple[int, int]]:
    """(messages, in flight) of each queue of a group, by the library."""
    with tables(path) as parts:
        pops = pop_view(parts, parts.clock.now_ms())
        return {(lag.topic, lag.queue_id): (lag.messages, lag.in_flight) for lag in lag_of(parts, group, pops)}


def lags(path: Path, group: str) -> dict[tuple[str, int], int]:
    """Messages not consumed, of each queue in which a group has a committed offset, by the library."""
    with tables(path) as parts:
        found = lag_of(parts, group, pop_view(parts, parts.clock.now_ms()))
        return {(lag.topic, lag.queue_id): lag.messages for lag in found if lag.committed is not None}


def filled(path: Path) -> Path:
    """Return the path of a store with 10 messages in each of two queues of `orders`, and a dead letter of `audit`.

    `billing` has consumed 7 and 2 of the messages.
    """
    clock = SimulatedClock(clock_now().now_ms() - 3_600_000)
    with broker(path, clock, dlq_retention=None) as running:
        running.topics.create("orders", queues=2)
        for i in range(20):
            running.put(
                "orders", b"body \x1b[31m %d" % i, queue_id=i % 2, keys=["all", f"k-{i}"], properties={"n": str(i)}
            )
        running.commit("billing", "orders", 0, 7)
        running.commit("billing", "orders", 1, 2)
        running.put("other", b"\x1b[2J body", keys="poison")
        running.run_once()
        [delivery] = running.pop("audit", "other", 1)
        running.dead_letter("audit", "other", delivery.receipt, "no such thing")
        clock.advance(60_000)
        running.run_once()
    return path
