"""Half messages through the broker: crashes, long pauses, lowered limits and immunity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mqstore import Retention
from mqstore.errors import ConfigError, InvalidMessageError
from tests.broker.support import Bench

DAY = 86_400_000


def test_half_message_above_a_lowered_limit_is_given_up(bench: Bench) -> None:
    bench.broker.topics.create("t", queues=1)
    bench.broker.transactions.begin("t", b"H" * 3000, producer_group="p")
    bench.again(max_message_size=1000)
    for _ in range(20):
        bench.jump(DAY)
    assert bench.broker.stats().open_transactions == 0
    assert bench.broker.stats().errors == {}
    assert bench.broker.store.offsets_or_none("TRANS_CHECK_MAX_TIME_TOPIC", 0) == (0, 1)


@pytest.mark.parametrize("come_back", [True, False])
def test_producers_are_asked_after_four_closed_days_if_they_come_back(bench: Bench, come_back: bool) -> None:
    bench.broker.topics.create("t", queues=1)
    bench.broker.transactions.begin("t", b"half", producer_group="p")
    bench.broker.close()
    bench.clock.advance(4 * DAY)
    bench.open()
    bench.settle()  # before they are back
    bench.jump(30_000)
    assert bench.broker.stats().open_transactions == 1
    if come_back:
        bench.broker.transactions.on_check("p", bench.check)
    for _ in range(25):
        bench.jump(30_000)
    assert bench.asked == bench.drain() == ([b"half"] if come_back else [])
    assert bench.broker.stats().open_transactions == 0


def test_half_message_is_checked_after_an_immunity_above_age(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", retention=Retention(age=3600))
    bench.broker.topics.create("t", queues=1)
    bench.broker.transactions.on_check("p", bench.check)
    bench.broker.transactions.begin("t", b"half", producer_group="p", immunity=7200)
    for _ in range(130):
        bench.jump(60_000)
    assert bench.asked == [b"half"]
    assert bench.drain() == [b"half"]
    bench.broker.close()


@pytest.mark.parametrize("immunity", [float("inf"), 10**400, 1e18])
def test_impossible_immunity_is_refused(bench: Bench, immunity: Any) -> None:
    with pytest.raises(ConfigError, match="immunity"):
        bench.broker.transactions.begin("t", b"", producer_group="p", immunity=immunity)


def test_half_message_without_room_for_its_timer_is_refused(tmp_path: Path) -> None:
    """The half message fitted, its commit did not: it could only be given up, after 15 questions."""
    with Bench(tmp_path).broker as broker:
        refused = 0
        for size in range(32_767, 0, -1):
            properties = {"a": "x" * size, "UNIQ_KEY": f"key-{size}", "TIMER_DELAY_MS": "5000"}
            try:
                half = broker.transactions.prepare("t", b"", properties, producer_group="p", queue_id=0)
            except InvalidMessageError:
                refused += 1
                continue
            break
        assert refused
        assert broker.transactions.end(half, "commit") is not None


def test_ended_transactions_leave_the_list_of_checks(bench: Bench) -> None:
    """Each stayed on the list of those to ask about for as long as it might have taken."""
    transactions = bench.broker.transactions
    transactions.on_check("p", bench.check)
    first = transactions.begin("t", b"open", producer_group="p", immunity=3_600)
    for _ in range(300):
        transactions.end(transactions.begin("t", b"", producer_group="p", immunity=86_400), "rollback")
    last = transactions.begin("t", b"too", producer_group="p", immunity=7_200)
    assert transactions.open_transactions() == [first, last]
    bench.jump(7_200_000)
    assert bench.asked == [b"open", b"too"]
