"""Latency counts from when a message was due, whatever held it up."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest

import mqstore
from bench import endtoend
from bench.endtoend import A_DAYS_MIX, CASES, PLAIN, Arrivals, Case, Kind, Round


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that sleeping moves exactly."""
    made = SimpleNamespace(now_ns=0)

    def sleep(seconds: float) -> None:
        made.now_ns += round(seconds * 1e9)

    monkeypatch.setattr(endtoend, "time", SimpleNamespace(perf_counter_ns=lambda: made.now_ns, sleep=sleep))
    return made


def _case(**changed: object) -> Case:
    return Case(**{"name": "c", "title": "", "rate": 1000, **changed})  # type: ignore[arg-type]


def test_a_stall_counts_for_all_messages_due_meanwhile(clock: SimpleNamespace) -> None:
    due_ns = []

    def put(body: bytes) -> None:
        due_ns.append(struct.unpack_from("<q", body)[0])
        clock.now_ns += 3_500_000 if len(due_ns) == 2 else 0

    begin_ns, late_ms = _case()._produce(put, 7)

    assert [(each - begin_ns) / 1e6 for each in due_ns] == [0, 1, 2, 3, 4, 5, 6]
    assert late_ms == [0, 0, 2.5, 1.5, 0.5, 0, 0]


def test_threads_share_the_rate(clock: SimpleNamespace) -> None:
    due_ns: list[int] = []

    begin_ns, _ = _case(threads=4)._produce(lambda body: due_ns.append(struct.unpack_from("<q", body)[0]), 8)

    assert sorted(round((each - begin_ns) / 1e6) for each in due_ns) == [*range(8)]


def test_bodies_have_the_length_that_is_asked_for(clock: SimpleNamespace) -> None:
    lengths: list[int] = []

    _case(body_bytes=16)._produce(lambda body: lengths.append(len(body)), 3)

    assert lengths == [16] * 3


def test_what_a_put_raises_is_raised(clock: SimpleNamespace) -> None:
    def put(body: bytes) -> None:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        _case()._produce(put, 3)


def test_a_percentile_is_the_median_over_the_rounds() -> None:
    rounds = [Round({"": [float(factor * n) for n in range(1, 2000)]}, [0.1], 1.0) for factor in (3, 1, 2)]

    row = _case(goal_ms=1000)._row("", rounds)

    found = {name: row.figures[name] for name in ("50", "90", "99", "99.9", "max")}
    assert found == {"50": 2000, "90": 3600, "99": 3960, "99.9": 3996, "max": 5997}
    assert (row.value, row.low, row.high, row.met) == (3960, 1980, 5940, False)


@pytest.mark.parametrize(("kept", "said"), [(1.0, False), (0.96, False), (0.5, True)])
def test_a_rate_that_is_not_kept_is_told(kept: float, said: bool) -> None:
    row = _case()._row("", [Round({"": [1.0]}, [0.0], kept)])

    assert ("of the rate" in row.said) is said


def test_a_days_mix_is_four_fifths_plain() -> None:
    plain = [kind for kind in A_DAYS_MIX if not kind.options and not kind.fails]

    assert len(plain) / len(A_DAYS_MIX) == 0.8
    assert {name for kind in A_DAYS_MIX for name in kind.options} == {"tag", "keys", "message_group", "delay"}


def test_names_of_cases_differ() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def _body(due_ms: float, number: int = 0) -> bytes:
    return struct.pack("<qq", int(due_ms * 1e6), number) + b"padding"


def test_latency_counts_from_when_a_message_was_due(clock: SimpleNamespace) -> None:
    arrivals = Arrivals([PLAIN, Kind({"delay": 0.5}, "delayed", delay_s=0.5)], 2)

    clock.now_ns = 3_000_000
    arrivals.arrive(_body(due_ms=1, number=0))
    assert (arrivals.left, arrivals.done.is_set()) == (1, False)
    clock.now_ns = 510_000_000
    arrivals.arrive(_body(due_ms=2, number=1))

    assert arrivals.latencies_ms() == {"": [2.0], "delayed": [8.0]}
    assert (arrivals.done.is_set(), arrivals.last_ns) == (True, 3_000_000)


def test_a_retry_counts_from_the_end_of_its_pause(clock: SimpleNamespace) -> None:
    arrivals = Arrivals([Kind({}, fails=True)], 1)

    clock.now_ns = 4_000_000
    with pytest.raises(mqstore.Retry):
        arrivals.arrive(_body(due_ms=1))
    assert not arrivals.done.is_set()
    clock.now_ns = 210_000_000
    arrivals.arrive(_body(due_ms=1))

    assert arrivals.latencies_ms() == {"": [3.0], "retried": [6.0]}
    assert arrivals.done.is_set()
