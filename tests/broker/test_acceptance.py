"""What the specification says of the broker as a whole and no mechanism's own tests show, through its door."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqstore.broker.groups import RetryPolicy
from mqstore.errors import ConfigError
from tests.broker.test_broker import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "store")
    yield bench
    bench.broker.close()


# -- the number of queues, and order (12; client-semantics A1.12) ---------------------------------------------------


def _fifo_topic(bench: Bench) -> None:
    bench.broker.topics.create("t", message_type="FIFO")
    bench.broker.start_of("g", "t", 0)


def _orderly_group(bench: Bench) -> None:
    bench.broker.topics.create("t")
    bench.broker.groups.create("g", orderly=True)
    bench.broker.start_of("g", "t", 0)


def _ordered_pop(bench: Bench) -> None:
    bench.broker.put("t", b"a", queue_id=0)
    bench.broker.pop("g", "t", order=True)


def _counted_attempts(bench: Bench) -> None:
    bench.broker.put("t", b"a", queue_id=0)
    bench.broker.start_of("g", "t", 0)
    bench.broker.note_attempt("g", "t", 0, 0, 1)


@pytest.mark.parametrize("prepare", [_fifo_topic, _orderly_group, _ordered_pop, _counted_attempts])
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("queues", [2, 8])
def test_the_number_of_queues_stays_while_a_group_relies_on_order(
    bench: Bench, prepare: Any, queues: int, restart: bool
) -> None:
    prepare(bench)
    broker = bench.again() if restart else bench.broker
    wish = {"write_queues": queues, "read_queues": max(queues, 4)}
    with pytest.raises(ConfigError, match=r"in order by g.*force=True"):
        broker.topics.alter("t", **wish)
    assert broker.topics.need("t").write_queues == 4
    broker.topics.alter("t", read_queues=8)  # moves no message
    broker.topics.alter("t", perm=4)
    assert broker.topics.alter("t", **wish, force=True).write_queues == queues


def test_the_number_of_queues_is_free_without_order_or_without_progress(bench: Bench) -> None:
    bench.broker.topics.create("fifo", message_type="FIFO")
    assert bench.broker.topics.alter("fifo", write_queues=8, read_queues=8).write_queues == 8
    bench.broker.topics.create("t")
    bench.broker.start_of("g", "t", 0)
    assert bench.broker.topics.alter("t", write_queues=8, read_queues=8).write_queues == 8


def test_a_topic_may_not_become_fifo_and_change_its_queues_at_once(bench: Bench) -> None:
    bench.broker.topics.create("t")
    bench.broker.start_of("g", "t", 0)
    with pytest.raises(ConfigError, match="in order by g"):
        bench.broker.topics.alter("t", write_queues=2, attributes={"+message.type": "FIFO"})


# -- groups (1.4) ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("attempts", "stored"), [(3, 2), (1, 0), (None, 2147483647)])
def test_a_group_is_created_and_altered_by_its_attempts(bench: Bench, attempts: int | None, stored: int) -> None:
    created = bench.broker.groups.create("g", max_attempts=attempts)
    assert (created.max_attempts, created.retry_max_times) == (attempts, stored)
    assert bench.again().groups.need("g") == created
    policy = RetryPolicy(delays=[1, 2])
    altered = bench.broker.groups.alter("g", retry_policy=policy, max_attempts=attempts)
    assert altered.retry_policy == policy.with_attempts(attempts)
    assert bench.broker.groups.alter("g", max_attempts=5).retry_policy == policy.with_attempts(5)


@pytest.mark.parametrize(
    "wish", [{"max_attempts": 0}, {"max_attempts": True}, {"max_attempts": 3, "retry_max_times": 3}]
)
def test_attempts_that_cannot_be_make_no_group(bench: Bench, wish: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="max_attempts"):
        bench.broker.groups.create("g", **wish)
    assert bench.broker.groups.get("g") is None


def test_a_group_is_dead_lettered_after_the_attempts_it_was_created_with(bench: Bench) -> None:
    bench.broker.groups.create("g", max_attempts=3)
    bench.broker.put("t", b"a")
    attempts = []
    while not len(bench.broker.dead_letters("g")):
        [delivery] = bench.broker.pop("g", "t")
        attempts.append(delivery.attempt)
        bench.broker.nack("g", "t", delivery.receipt, 0)
        bench.advance(10)
    assert attempts == [1, 2, 3]


def test_creating_a_group_that_is_there_gives_it_as_it_is(bench: Bench) -> None:
    first = bench.broker.groups.create("g", max_attempts=3)
    assert bench.broker.groups.create("g", max_attempts=9) is first
    with pytest.raises(ConfigError, match="exists already"):
        bench.broker.groups.create("g", exist_ok=False)
