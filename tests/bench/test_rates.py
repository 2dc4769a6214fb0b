"""Latency counts from the time at which a message was due, whatever held it up."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

from bench import rates
from bench.rates import Arrivals, produce


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that sleeping moves exactly."""
    made = SimpleNamespace(now_ns=0)

    def sleep(seconds: float) -> None:
        made.now_ns += round(seconds * 1e9)

    monkeypatch.setattr(rates, "time", SimpleNamespace(perf_counter_ns=lambda: made.now_ns, sleep=sleep))
    return made


def _due_ns(body: bytes) -> int:
    return int(struct.unpack_from("<q", body)[0])


def test_stall_counts_for_all_messages_due_meanwhile(clock: SimpleNamespace) -> None:
    due_ns = []

    def put(body: bytes) -> None:
        due_ns.append(_due_ns(body))
        clock.now_ns += 3_500_000 if len(due_ns) == 2 else 0

    begin_ns, late_ms = produce(put, 1000, 7)

    assert [(each - begin_ns) / 1e6 for each in due_ns] == [0, 1, 2, 3, 4, 5, 6]
    assert late_ms == [0, 0, 2.5, 1.5, 0.5, 0, 0]


def test_latency_counts_from_when_a_message_was_due(clock: SimpleNamespace) -> None:
    arrivals = Arrivals(2)

    for now_ns, due_ns in ((3_000_000, 1_000_000), (10_000_000, 2_000_000)):
        assert not arrivals.done.is_set()
        clock.now_ns = now_ns
        arrivals.arrive(struct.pack("<q", due_ns) + b"padding")

    assert arrivals.latencies_ms == [2.0, 8.0]
    assert arrivals.done.is_set()
