"""Queues that a failed message of an ordered consumer holds up, in either mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from mqstore import Message, PushConsumer, QueueRef, Reject, RetryPolicy
from tests.client.orderlysupport import Bench

T0, T1 = QueueRef("t", 0), QueueRef("t", 1)
RETRY = RetryPolicy(None, [10])
MODES: list[dict[str, Any]] = [{"mode": "queue"}, {"mode": "pop"}]
BROADCASTING = {"model": "broadcasting"}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "mq", queues=2)
    yield bench
    bench.close()


def failing(bench: Bench, body: str = "1", times: int = 1_000_000) -> Callable[[Message], None]:
    """A handler that fails so many times at one message, and says with which attempt."""
    left = [times]

    def handle(message: Message) -> None:
        if message.text() == body and left[0]:
            left[0] -= 1
            raise KeyError(f"attempt {message.attempt}")

    return handle


Known = dict[QueueRef, tuple[Any, ...]]
"""(offset, attempt, since_ms, error) by queue."""


def known(bench: Bench) -> Known:
    """What the broker says of the group."""
    return {queue: astuple(each) for queue, each in bench.broker.suspended("g").items()}


def suspended(consumer: PushConsumer) -> Known:
    return {queue: astuple(each) for queue, each in consumer.stats().suspended.items()}


@pytest.mark.parametrize("options", [*MODES, BROADCASTING])
def test_a_queue_is_suspended_until_its_message_is_settled(bench: Bench, options: dict[str, Any]) -> None:
    during: list[tuple[Any, ...] | None] = []

    def handle(message: Message) -> None:
        if message.text() == "1":
            during.append(suspended(consumer).get(T0))
            if len(during) < 4:
                raise KeyError(f"attempt {message.attempt}")

    bench.put("0", "1", "2")
    bench.put("a", "b", queue_id=1)
    consumer = bench.join(handler=handle, retry=RETRY, **options)
    failures = [(1, i, bench.clock.now_ms(), f"KeyError: 'attempt {i}'") for i in (1, 2, 3)]
    bench.settle()
    for each in failures:
        assert suspended(consumer) == {T0: each}
        bench.advance(10)
    assert bench.bodies[-1] == "2"
    assert suspended(consumer) == {}
    assert during == [None, *failures]  # also while the next attempt runs


@pytest.mark.parametrize("options", [*MODES, BROADCASTING])
@pytest.mark.parametrize("last", [Reject("no"), ValueError("no")])
def test_abandoned_message_blocks_no_queue(bench: Bench, options: dict[str, Any], last: Exception) -> None:
    def handle(message: Message) -> None:
        if message.text() == "0":
            raise last if message.attempt == 2 else ValueError("not yet")

    bench.put("0", "1")
    consumer = bench.join(handler=handle, retry=RetryPolicy(2, [10]), **options)
    bench.settle()
    assert list(suspended(consumer)) == [T0]
    bench.advance(10)
    assert suspended(consumer) == {}
    assert bench.bodies[-1] == "1"


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("killed", [False, True])
def test_it_is_known_after_a_restart(bench: Bench, options: dict[str, Any], killed: bool) -> None:
    bench.put("0", "1")
    first = bench.join(handler=failing(bench), retry=RETRY, **options)
    since_ms = bench.clock.now_ms()
    bench.advance(1)  # on disk within a second
    if killed:
        bench.kill()
    else:
        bench.leave(first)
        bench.close()
    bench.open()
    assert known(bench) == {T0: (1, 1, since_ms, "KeyError: 'attempt 1'")}

    bench.clock.advance(10_000)
    consumer = bench.join(handler=failing(bench), **options)
    bench.settle()
    assert suspended(consumer) == {T0: (1, 2, since_ms, "KeyError: 'attempt 2'")}
    bench.leave(consumer)
    bench.close()
    bench.open()
    assert known(bench) == {T0: (1, 2, since_ms, "KeyError: 'attempt 2'")}

    bench.join(**options)
    bench.advance(10)
    assert bench.bodies[-1] == "1"
    assert bench.broker.suspended("g") == {}
    bench.close()
    bench.open()
    assert bench.broker.suspended("g") == {}


@pytest.mark.parametrize("options", [*MODES, BROADCASTING])
def test_a_long_error_is_cut(bench: Bench, options: dict[str, Any]) -> None:
    def handle(message: Message) -> None:
        raise ValueError("é" * 100_000)

    bench.put("0")
    consumer = bench.join(handler=handle, retry=RETRY, **options)
    bench.settle()
    assert suspended(consumer)[T0][3] == "ValueError: " + "é" * 288


@pytest.mark.parametrize("pops", [False, True])
def test_an_error_of_any_characters_is_kept(bench: Bench, pops: bool) -> None:
    """Text that a file cannot hold must not keep the attempts of all groups from disk."""
    error = "\x00 \x1b[31m \udc80 \U0001f600"
    bench.put("0")
    bench.broker.groups.create("g", orderly=True)
    if pops:
        [delivery] = bench.broker.pop("g", "t", order=True)
        bench.broker.nack("g", "t", delivery.receipt, error=error)
    else:
        bench.broker.note_attempt("g", "t", 0, 0, 1, error=error)
    bench.close()
    bench.open()
    assert known(bench)[T0][3] == error


@pytest.mark.parametrize("options", MODES)
@pytest.mark.parametrize("ends", ["reset", "delete"])
def test_a_reset_or_deleted_group_is_not_suspended(bench: Bench, options: dict[str, Any], ends: str) -> None:
    bench.put("0", "1")
    consumer = bench.join(handler=failing(bench), retry=RETRY, **options)
    bench.settle()
    bench.leave(consumer)
    assert list(bench.broker.suspended("g")) == [T0]
    if ends == "reset":
        bench.broker.reset("g", "t", None, "latest")
    else:
        bench.broker.delete_group("g")
    assert bench.broker.suspended("g") == {}


def test_groups_and_queues_are_suspended_each_by_itself(bench: Bench) -> None:
    bench.put("0", "1")
    bench.put("1", queue_id=1)
    bench.join(handler=failing(bench), retry=RETRY)
    bench.join("other", group="h")
    bench.settle()
    assert {queue: each.offset for queue, each in bench.broker.suspended("g").items()} == {T0: 1, T1: 0}
    assert bench.broker.suspended("h") == {}


@pytest.mark.parametrize(
    "fail", [lambda delivery: delivery.nack(), lambda delivery: delivery.__exit__(ValueError, ValueError("no"), None)]
)
def test_a_simple_consumer_in_order_suspends_its_queue(bench: Bench, fail: Callable[[Any], Any]) -> None:
    bench.put("0")
    with bench.store.simple_consumer("g", {"t": "*"}, ordered=True) as consumer:
        [delivery] = consumer.receive(wait=0)
        fail(delivery)
        [each] = bench.broker.suspended("g").values()
        assert (each.offset, each.attempt, each.error) in [(0, 1, ""), (0, 1, "ValueError: no")]
