"""Renewing deliveries in use: when, and what a failure does. By a broker whose clock is moved by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.pop.request import Delivery
from mqstore.client.renewal import Held, Renewer
from tests.broker.support import full
from tests.client.popsupport import Bench

VISIBILITY_MS = 60_000


class Consumer:
    """A renewer of one group that holds what was popped."""

    def __init__(self, bench: Bench, ordered: bool) -> None:
        self.bench = bench
        self.ordered = ordered
        self.renewer = Renewer(bench.broker, "g", VISIBILITY_MS)

    @property
    def now_ms(self) -> int:
        return self.bench.clock.monotonic_ms()

    def pop(self, n: int = 1) -> list[Delivery]:
        return self.bench.broker.pop("g", "t", n, invisible=VISIBILITY_MS / 1000, order=self.ordered)

    def take(self, n: int = 1) -> Held:
        """Put and pop `n` messages, which are held from then on."""
        self.bench.put(*[b"a"] * n, queue_id=0)
        held = Held(self.pop(n))
        self.renewer.add(held, self.now_ms + VISIBILITY_MS)
        return held

    def settle(self, held: Held, n: int = 1) -> None:
        """Acknowledge the first `n` of what is held, and hold it no more."""
        first = list(held.deliveries.values())[:n]
        self.bench.broker.ack("g", "t", [delivery.receipt for delivery in first])
        assert len(self.renewer.remove(held, [delivery.message for delivery in first])) == n

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
def consumer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Consumer]:
    bench = Bench(tmp_path / "store")
    bench.store.create_topic("t", queues=1)
    yield Consumer(bench, request.param)
    bench.store.close()


def test_a_renewal_comes_when_a_third_of_the_lease_is_left(consumer: Consumer) -> None:
    consumer.take()
    assert consumer.renewer.run_once(consumer.now_ms) == consumer.now_ms + 40_000
    consumer.pass_time(39.999)
    assert consumer.renewals() == 0
    consumer.pass_time(0.001)
    assert consumer.renewals() == 1
    assert consumer.renewer.run_once(consumer.now_ms) == consumer.now_ms + 40_000
    consumer.pass_time(400)
    assert consumer.renewals() == 11


def test_removed_lease_is_not_renewed(consumer: Consumer) -> None:
    held = consumer.take(2)
    first, second = held.messages()
    assert consumer.renewer.remove(held, [first]) == [first]
    assert consumer.renewer.remove(held, [first]) == []
    consumer.pass_time(40)
    assert (consumer.renewals(), len(consumer.renewer)) == (1, 1)
    consumer.renewer.remove(held, [second])
    assert consumer.renewer.run_once(consumer.now_ms) is None
    consumer.bench.advance(60)
    assert [each.attempt for each in consumer.pop(2)] == [2, 2]


def test_late_renewal_is_reported_and_dropped(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    consumer.take()
    renew, calls = consumer.bench.broker.renew, []
    monkeypatch.setattr(
        consumer.bench.broker, "renew", lambda *rest, **more: calls.append(rest) or renew(*rest, **more)
    )
    consumer.bench.advance(61)  # who drives it slept
    [again] = consumer.pop()
    consumer.pass_time(1)
    consumer.pass_time(45)
    assert caplog.text.count("t/0, offset 0 was lost") == 1
    assert len(calls) == 1
    consumer.bench.broker.ack("g", "t", [again.receipt])


def test_a_full_disk_is_tried_again(consumer: Consumer, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer.take()
    with monkeypatch.context() as disk:
        disk.setattr(consumer.bench.broker, "renew", full)
        consumer.pass_time(40)
        assert consumer.renewer.run_once(consumer.now_ms) == consumer.now_ms + 1_000
        consumer.pass_time(15)
    consumer.pass_time(100)
    assert consumer.pop() == []


def test_settlement_during_a_renewal_is_kept(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker settles and removes just before the renewal reaches the broker."""
    held = consumer.take()
    renew = consumer.bench.broker.renew

    def late(*arguments: Any, **options: Any) -> str:
        consumer.settle(held)
        return renew(*arguments, **options)

    monkeypatch.setattr(consumer.bench.broker, "renew", late)
    consumer.pass_time(41)
    assert "lost" not in caplog.text
