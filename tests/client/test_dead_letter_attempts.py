"""A dead letter has one number of attempts: how often the message was delivered, however the group consumes."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

import mqstore
from mqstore import RetryPolicy, SimulatedClock, Store, StoreConfig
from mqstore.jobs import dlq_report
from tests.tools.support import mqstore as command

LIMIT = 3
RETRIES = RetryPolicy(LIMIT, (1,))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with mqstore.open(tmp_path / "mq", config=StoreConfig(clock=SimulatedClock())) as store:
        store.create_topic("jobs", queues=1)
        yield store


def pass_s(store: Store) -> Iterator[None]:
    """Let half a minute pass in small steps."""
    clock = store.log.clock
    assert isinstance(clock, SimulatedClock)
    for _ in range(60):
        store.broker.run_once()
        yield
        clock.advance(500)


def check(store: Store, delivered: int) -> None:
    [letter] = store.broker.dead_letters("g")
    for each in (letter, pickle.loads(pickle.dumps(letter))):
        assert (each.attempt, each.reconsume_times) == (delivered, delivered)
    path = store.log.path
    store.close()
    [row] = dlq_report(path).rows
    assert row.max_attempts == delivered
    shown = [line.split() for line in command("dlq", "list", path).stdout.splitlines()]
    assert next(words[-1] for words in shown if words[:2] == ["g", "jobs"]) == str(delivered)


@pytest.mark.parametrize("how", ["nack", "nothing", "dead_letter", "lowered limit"])
@pytest.mark.parametrize("order", [False, True])
def test_letter_of_a_pop_counts_deliveries(store: Store, order: bool, how: str) -> None:
    broker = store.broker
    broker.groups.create("g", retry_policy=RETRIES)
    store.put("jobs", b"poison", queue_id=0)
    seen: list[int] = []
    for _ in pass_s(store):
        for delivery in broker.pop("g", "jobs", order=order, invisible=2):
            seen.append(delivery.attempt)
            if how == "dead_letter":
                broker.dead_letter("g", "jobs", delivery.receipt, "no")
            elif how != "nothing":
                broker.nack("g", "jobs", delivery.receipt)
        if how == "lowered limit" and len(seen) == 2:
            broker.groups.alter("g", retry_policy=RetryPolicy(1, (1,)))
    assert seen == [1, 2, 3][: {"dead_letter": 1, "lowered limit": 2}.get(how, LIMIT)]
    check(store, len(seen))


def test_letter_of_a_lowered_limit_counts_deliveries(store: Store) -> None:
    """The copy was there before the limit was lowered, and is found at the next pop."""
    broker = store.broker
    broker.groups.create("g", retry_policy=RETRIES)
    store.put("jobs", b"poison", queue_id=0)
    for _ in range(2):
        [delivery] = broker.pop("g", "jobs")
        broker.nack("g", "jobs", delivery.receipt, delay=0)
        broker.run_once()
    broker.groups.alter("g", retry_policy=RetryPolicy(2, (1,)))
    assert broker.pop("g", "jobs") == []
    check(store, 2)


def test_letter_of_a_delayed_message_was_not_delivered(store: Store) -> None:
    store.log.append("SCHEDULE_TOPIC_XXXX", 0, b"no topic", properties={"DELAY": "1"})
    for _ in pass_s(store):
        pass
    [letter] = store.broker.dead_letters("CID_RMQ_SYS_SCHEDULE")
    assert letter.attempt == 0


def test_trace_shows_the_deliveries_of_a_letter(store: Store) -> None:
    store.broker.groups.create("g")
    store.put("jobs", b"poison", queue_id=0, keys="k")
    [message] = store.read("jobs", 0, 0)
    store.broker.send_back("g", message.physical_offset, delay_level=-1)
    path = store.log.path
    store.close()
    shown = [line.split() for line in command("trace", path, "k").stdout.splitlines()]
    [state] = [words for words in shown if words[1] == "dead"][-1:]
    assert state[:5] == ["now", "dead", "g", "attempt", "1,"]
