"""Renewing deliveries in use: when, and what a failure does. By a broker whose clock is moved by hand."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore.broker.pop.service import Delivery
from mqstore.client.renewal import Renewer
from tests.client.popsupport import Bench

LOAN_MS = 60_000


class Held:
    """A renewer of one group, with what it said."""

    def __init__(self, bench: Bench, ordered: bool) -> None:
        self.bench = bench
        self.ordered = ordered
        self.renewer: Renewer[Any] = Renewer(bench.broker, "g", LOAN_MS)

    @property
    def now_ms(self) -> int:
        return self.bench.clock.monotonic_ms()

    def pop(self, n: int = 1) -> list[Delivery]:
        return self.bench.broker.pop("g", "t", n, invisible=LOAN_MS / 1000, order=self.ordered)

    def take(self, key: Any) -> Delivery:
        self.bench.put(b"a", queue_id=0)
        [delivery] = self.pop()
        self.renewer.add([(key, "t", delivery.receipt)], self.now_ms + LOAN_MS)
        return delivery

    def pass_time(self, duration_s: float) -> None:
        """As who drives it does: it is called when it said it is to be called."""
        end_ms = self.now_ms + round(duration_s * 1000)
        while True:
            next_ms = self.renewer.run_once(self.now_ms)
            assert next_ms is None or next_ms > self.now_ms
            step_ms = min(end_ms, end_ms if next_ms is None else next_ms) - self.now_ms
            if step_ms <= 0:
                return
            self.bench.advance(step_ms / 1000)

    def renewals(self) -> int:
        log = self.bench.store.log
        low, high = log.offsets("rmq_sys_pop_log", 0)
        return sum(message.tag == "chg" for message in log.read("rmq_sys_pop_log", 0, low, high - low))


@pytest.fixture(params=[False, True], ids=["standard", "ordered"])
def held(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Held]:
    bench = Bench(tmp_path / "store")
    bench.store.create_topic("t", queues=1)
    yield Held(bench, request.param)
    bench.store.close()


def test_what_is_held_stays_invisible_and_its_receipt_good(held: Held) -> None:
    delivery = held.take("a")
    held.pass_time(1_000)
    assert held.pop() == []
    held.bench.broker.ack("g", "t", [delivery.receipt])
    assert sum(held.bench.store.lag("g").values()) == 0


def test_a_renewal_comes_when_a_third_of_the_loan_is_left(held: Held) -> None:
    held.take("a")
    assert held.renewer.run_once(held.now_ms) == held.now_ms + 40_000
    held.pass_time(39.999)
    assert held.renewals() == 0
    held.pass_time(0.001)
    assert held.renewals() == 1
    assert held.renewer.run_once(held.now_ms) == held.now_ms + 40_000
    held.pass_time(400)
    assert held.renewals() == 11


def test_what_is_removed_is_renewed_no_more(held: Held) -> None:
    held.take("a")
    assert held.renewer.remove("a")
    assert not held.renewer.remove("a")
    assert held.renewer.run_once(held.now_ms) is None
    held.bench.advance(60)
    assert [each.attempt for each in held.pop()] == [2]


def test_each_has_times_of_its_own(held: Held) -> None:
    first = held.take("first")
    held.bench.broker.ack("g", "t", [first.receipt])
    held.renewer.remove("first")
    held.take("second")
    held.bench.advance(30)
    held.renewer.add([("third", "t", first.receipt)], held.now_ms + LOAN_MS)
    assert held.renewer.run_once(held.now_ms) == held.now_ms + 10_000
    held.renewer.remove("second")
    assert held.renewer.run_once(held.now_ms) == held.now_ms + 40_000


def test_what_came_too_late_is_told_once(held: Held, caplog: pytest.LogCaptureFixture) -> None:
    held.take("a")
    held.bench.advance(61)  # who drives it slept
    [again] = held.pop()
    held.pass_time(1)
    held.pass_time(30)
    assert caplog.text.count(" a was lost") == 1
    assert len(held.renewer) == 0
    held.bench.broker.ack("g", "t", [again.receipt])


def test_a_full_disk_is_tried_again(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    held.take("a")

    def full(*_: Any, **__: Any) -> str:
        raise mqstore.errors.StoreFullError(errno.ENOSPC, "no space", "log", "put")

    with monkeypatch.context() as disk:
        disk.setattr(held.bench.broker, "renew", full)
        held.pass_time(40)
        assert held.renewer.run_once(held.now_ms) == held.now_ms + 1_000
        held.pass_time(15)
    held.pass_time(100)
    assert held.pop() == []


def test_what_is_settled_while_others_are_renewed_is_not_lost(
    held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker settles and removes just before the renewal reaches the broker."""
    delivery = held.take("a")
    renew = held.bench.broker.renew

    def late(*arguments: Any, **options: Any) -> str:
        held.bench.broker.ack("g", "t", [delivery.receipt])
        held.renewer.remove("a")
        return renew(*arguments, **options)

    monkeypatch.setattr(held.bench.broker, "renew", late)
    held.pass_time(41)
    assert "lost" not in caplog.text
