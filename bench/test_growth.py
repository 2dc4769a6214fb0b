"""Questions about growth: a store that holds much, beside one that holds little or nothing."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import mqstore
from bench.harness import CPU, Ask, Load, Row, Work, asked, each, scratch, side
from bench.sides import in_store

HOURS_S = 12 * 3600
_PROBES = 2000
Fill = Callable[[mqstore.Store, int], None]
"""Brings a store to a size along one axis."""


def messages(store: mqstore.Store, size: int) -> None:
    for at in range(0, size, 1000):
        store.put_many("bench", [b"x" * 128] * min(1000, size - at))
    store.log.dispatch()


def queues(store: mqstore.Store, size: int) -> None:
    store.create_topic("many", queues=max(1, size))
    for queue_id in range(size):
        store.put("many", b"x", queue_id=queue_id)


def topics(store: mqstore.Store, size: int) -> None:
    for number in range(size):
        store.put(f"topic-{number}", b"x")


def in_flight(store: mqstore.Store, size: int) -> None:
    messages(store, size)
    with store.simple_consumer("idle", {"bench": "*"}, visibility=HOURS_S) as consumer:
        held = 0
        while held < size:
            held += len(consumer.receive(32))


def delayed(store: mqstore.Store, size: int) -> None:
    for number in range(size):
        store.put("bench", b"x", delay=3600 + number * 7919 % HOURS_S)


@in_store()
def use(store: mqstore.Store, load: Load, *, fill: Fill, part: float) -> Work:
    """Put, get and acknowledge items of a queue in a store of this size."""
    fill(store, round(load.messages * part))
    queue = store.queue("probe")

    def probe(_: int) -> None:
        queue.put(b"x")
        queue.get().ack()

    return each(range(min(_PROBES, load.messages)), probe)


def growth(fill: Fill, size: int, part: float) -> Row:
    few, many = (side(f"{size * each:,.0f} of them", use, fill=fill, part=each) for each in (part, 1))
    return many, Load(128, size), {few: 1.5}, CPU


test_growth = asked(
    {
        # The time of put, get and ack in a store that holds much.
        "growth[messages]": growth(messages, 1_000_000, 0.01),
        "growth[queues]": growth(queues, 500, 0.02),
        "growth[topics]": growth(topics, 200, 0.05),
        "growth[in_flight]": growth(in_flight, 100_000, 0),
        "growth[delayed]": growth(delayed, 100_000, 0),
    }
)


def hold(path: Path, size: int) -> float:
    """Have this number of messages in flight. Returns the anonymous memory that they take, in MiB."""

    def anonymous_kib() -> int:
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))

    with mqstore.open(path) as store:
        before = anonymous_kib()
        in_flight(store, size)
        return (anonymous_kib() - before) / 1024


def test_in_flight(ask: Ask) -> None:
    """Memory of a million deliveries in flight, and the time of a restart with them."""
    with scratch() as directory:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            mib = pool.submit(hold, directory / "store", ask.scaled(1_000_000)).result()
        begin = time.perf_counter()
        ask.benchmark.pedantic(mqstore.open, (directory / "store",)).close()
        ask.answer("restart", "s", [time.perf_counter() - begin], 3)
    ask.answer("memory", "MiB", [mib], 500)
