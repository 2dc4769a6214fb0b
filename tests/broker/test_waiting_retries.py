"""Retries that wait for their time are part of their group's lag, wherever they wait (delivery#statistics)."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from mqstore.broker.admin import metrics
from mqstore.broker.admin.inspect import lag_of, pop_view
from mqstore.broker.background.context import open_tables
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from tests.broker.support import Bench, messages_of

DAY_MS = 86_400_000


def fail(bench: Bench, group: str, **delay: Any) -> None:
    """Have a group fail to consume a new message of queue 0."""
    broker = bench.broker
    receipt = broker.put("orders", b"x", queue_id=0)
    bench.settle()
    broker.commit(group, "orders", 0, receipt.offset + 1)
    broker.send_back(group, receipt.physical_offset, **delay)


def lags(bench: Bench, *groups: str) -> list[int]:
    """Return the sum of each group's lag."""
    return [sum(bench.broker.lag(group).values()) for group in groups]


def lags_outside(bench: Bench, *groups: str) -> list[int]:
    """Return the same from the files."""
    with ReadOnlyMessageStore(bench.path) as store:
        tables = open_tables(store)
        pops = pop_view(tables, bench.clock.now_ms())
        return [sum(lag.messages for lag in lag_of(tables, group, pops)) for group in groups]


@pytest.mark.parametrize("delay", [{}, {"delay": 1.5}, {"delay": 3 * 86_400}])
@pytest.mark.parametrize(("restart", "settles"), [("none", False), ("kill", True), ("other table", False)])
def test_waiting_retry_counts_until_it_is_consumed(
    bench: Bench, delay: dict[str, Any], restart: str, settles: bool
) -> None:
    for group in ("g", "h"):
        bench.broker.groups.create(group)
    bench.broker.topics.create("orders", queues=1)
    bench.broker.commit("h", "orders", 0, 0)
    bench.broker.put("reminders", b"no retry", delay_level=3)
    fail(bench, "g", **delay)
    if settles:
        bench.settle()
    bench.broker.save()
    bench.broker.store.flush()
    if restart == "kill":
        bench.kill()
    elif restart != "none":
        bench.again(**({"delay_levels": "1s"} if restart == "other table" else {}))
    assert lags(bench, "g", "h") == [1, 1]
    bench.settle()
    bench.broker.save()
    assert lags(bench, "g", "h") == lags_outside(bench, "g", "h") == [1, 1]
    for _ in range(4):
        bench.jump(DAY_MS)
    bench.broker.save()
    assert lags(bench, "g", "h") == lags_outside(bench, "g", "h") == [1, 1]
    assert len(messages_of(bench.parts, "%RETRY%g")) == 1
    bench.broker.commit("g", "%RETRY%g", 0, 1)
    assert lags(bench, "g", "h") == [0, 1]


def test_waiting_retries_of_many_groups_are_counted_by_group(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small blocks, most of them are partly delivered when they are counted."""
    monkeypatch.setattr(metrics, "_BLOCK", 4)
    generator = random.Random(45)
    groups = ["a", "b", "c"]
    for group in groups:
        bench.broker.groups.create(group, retry_queues=2)
    failed: Counter[str] = Counter()
    for _ in range(60):
        group = generator.choice(groups)
        fail(bench, group, **generator.choice(({}, {"delay": 30}, {"delay": 7}, {"delay_level": 2})))
        failed[group] += 1
        bench.broker.put("orders", b"user", delay_level=generator.randint(1, 4))
        bench.advance(generator.choice((1, 900, 5_000)))
        bench.broker.commit(group, "orders", 0, bench.broker.store.offsets("orders", 0)[1])
        waiting = [
            sum(lag for queue, lag in bench.broker.lag(each).items() if queue.topic == f"%RETRY%{each}")
            for each in groups
            if failed[each]
        ]
        assert waiting == [failed[each] for each in groups if failed[each]]
