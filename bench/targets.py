"""What is aimed at, as ratios to what runs beside it; `compare` prints met or not met next to each.

A ratio is our rate divided by the other's, so `at_least` reads "so many times as fast". A "limit" is an absolute
time: its ratio is the time allowed divided by the time taken. A side without a target here is shown for comparison
only.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TARGETS", "Target", "target_for"]


class Target(NamedTuple):
    """The ratio to `peer` that an answer to `question` should reach."""

    question: str
    peer: str
    at_least: float
    or_rate: float | None = None
    """Also met at so many a second: a bound for a peer that is our own and may be faster than anybody needs."""

    def met(self, ratio: float, rate: float) -> bool:
        return ratio >= self.at_least or (self.or_rate is not None and rate >= self.or_rate)

    def __str__(self) -> str:
        return f"{self.at_least:g} x" + ("" if self.or_rate is None else f" or {self.or_rate / 1000:g} k/s")


TARGETS = (
    Target("put", "queuelib FifoDiskQueue", 1.0),
    Target("put", "SQLite WAL, synchronous=off", 5.0),
    Target("put", "persist-queue Queue", 50.0),
    Target("put_many", "LMDB put, 1000 a transaction", 1.5),
    Target("put_many", "LMDB putmulti, 1000 a transaction", 1.5),
    Target("flush_1", "bare pwrite O_DSYNC", 0.9),
    Target("flush_16", "mqstore, 1 thread", 6.0),
    Target("read_messages", "LMDB cursor", 0.5),
    Target("reput", "mqstore put", 3.0),
    Target("recovery", "bare crc32c, one sweep", 0.3),
    Target("recovery", "bare crc32c, a call a record", 0.3),
    Target("pop_one", "persist-queue SQLiteAckQueue", 20.0),
    Target("pop_one", "litequeue", 10.0),
    Target("pop_many", "mqstore read", 0.25, or_rate=150_000),
    Target("delay", "mqstore put", 0.3),
    Target("queue_put", "mqstore put", 0.667),
    Target("queue_get", "persist-queue SQLiteAckQueue", 20.0),
    Target("queue_get", "localqueue", 5.0),
    Target("queue_get", "diskcache Deque", 1.0),
    Target("push", "mqstore read", 0.3, or_rate=200_000),
    Target("open", "limit of 100 ms", 1.0),
    # Eight times the messages in as many segments: only noise may tell the two apart.
    Target("open", "200 segments, an eighth of the messages", 0.8),
)


def target_for(question: str, peer: str) -> Target | None:
    return next((target for target in TARGETS if target[:2] == (question, peer)), None)
