"""The push consumer from outside: what it refuses, its life, and a few runs with real threads (clients#group)."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Message, PushConsumer, QueueRef, Reject, Retry, cancelled
from mqstore.errors import (
    ConfigError,
    GroupInUseError,
    InvalidMessageError,
    StoreClosedError,
    SubscriptionConflictError,
)
from tests.children import speaking_child
from tests.client import support
from tests.client.pushsupport import PushBench, Told, hook
from tests.client.support import ended, in_thread, parked, subscribed, until

T0 = QueueRef("t", 0)
LONG_S = 20.0
"""For what should happen at once."""


def nothing(message: Message) -> None:
    """A handler."""


# --- what it refuses -----------------------------------------------------------------------------------------------


def test_a_subscription_is_checked_when_it_is_made(bench: PushBench) -> None:
    consumer = PushConsumer(bench.broker, "g", client_id="10.0.0.1@1#1")

    for subscribe in (consumer.subscribe, lambda topic, handler: consumer.subscribe(topic)(handler)):
        for topic, handler, error in (("t", "no function", ConfigError), ("a b", nothing, InvalidMessageError)):
            with pytest.raises(error):
                subscribe(topic, handler)  # type: ignore[arg-type,operator]
    with pytest.raises(ConfigError, match=r"@consumer\.subscribe\('topic'\)"):
        consumer.subscribe(lambda message: None)  # type: ignore[arg-type]
    assert consumer.subscribe("t")(nothing) is nothing


def test_one_that_ran_for_nothing_can_be_run_again(broker: Any) -> None:
    consumer = PushConsumer(broker, "g", workers=1)
    with pytest.raises(ConfigError, match="subscribe to a topic first"):
        consumer.run()
    consumer.subscribe("t", lambda message: consumer.stop())
    broker.put("t", b"x")
    assert consumer.run()


def test_unstarted_consumer_changes_nothing(bench: PushBench) -> None:
    """The group was made an ordered one, for all its members, by a consumer that was never started."""
    bench.consumer(run=False, group="new", ordered=True, retry=mqstore.RetryPolicy(3))
    assert bench.broker.groups.get("new") is None

    bench.broker.groups.create("g")
    with pytest.raises(ConfigError, match=r"was made to consume without order.*orderly=True"):
        bench.consumer(run=False, ordered=True)
    bench.broker.groups.alter("g", orderly=True)
    with pytest.raises(ConfigError, match=r"was made to consume in order.*orderly=False"):
        bench.consumer(run=False, ordered=False)
    policy = bench.broker.groups.require("g").retry_policy
    other = bench.consumer(ordered=True)
    pop = bench.consumer(run=False, ordered=True, mode="pop", retry=mqstore.RetryPolicy(3))
    with pytest.raises(GroupInUseError):
        pop.start()
    assert bench.broker.groups.require("g").retry_policy == policy
    other.stop()
    pop.start()  # what kept it from starting is over
    assert bench.broker.groups.require("g").retry_policy == mqstore.RetryPolicy(3)


def test_one_that_was_stopped_is_of_no_more_use(bench: PushBench) -> None:
    consumer = bench.consumer()
    with pytest.raises(ConfigError, match="already"):
        consumer.start()
    assert consumer.stop()
    assert consumer.stop()
    assert PushConsumer(bench.broker, "g").stop()  # never started
    for use in (consumer.start, lambda: consumer.subscribe("t", nothing), lambda: consumer.unsubscribe("t")):
        with pytest.raises(StoreClosedError, match="make a new one"):
            use()
    bench.consumers.remove(consumer)


@pytest.mark.parametrize("ordered", [False, True])
def test_hook_may_stop_a_starting_consumer(bench: PushBench, ordered: bool) -> None:
    seen: list[Message] = []
    bench.put(b"x")
    stops = hook(on_assign=lambda queues: consumer.stop())
    consumer = bench.consumer(seen.append, interceptors=[stops], ordered=ordered)
    bench.consumers.remove(consumer)
    consumer.run_once()
    assert seen == []
    assert consumer.stop() is True
    assert bench.broker.members.members("g") == []
    assert bench.broker.locks.snapshot() == []


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_consumers_that_were_never_started_are_forgotten(bench: PushBench, mode: Any) -> None:
    listeners = len(bench.broker.topics.on_change)
    made = [PushConsumer(bench.broker, "g", mode=mode, workers=1) for _ in range(3)]
    for consumer in made:
        consumer.subscribe("t", nothing)
    gone = [weakref.ref(consumer) for consumer in made]
    del made, consumer
    gc.collect()
    assert [each() for each in gone] == [None] * 3
    assert len(bench.broker.topics.on_change) == listeners


def test_stats_show_what_was_done_and_what_is_left(bench: PushBench) -> None:
    outcomes = iter([None, Retry(), Reject("x"), None])

    def handler(message: Message) -> None:
        error = next(outcomes, None)
        if error is not None:
            raise error

    consumer = bench.consumer(handler)
    bench.put(b"0", b"1", b"2")
    bench.settle()
    consumer.pause()
    bench.advance(30)
    bench.put(b"3", b"4")
    bench.settle()
    stats = consumer.stats()
    assert (stats.topics["t"].ok, stats.topics["t"].failed, stats.topics["t"].pulled) == (1, 2, 3)
    assert (stats.queues[T0].lag, stats.queues[T0].committed, stats.running) == (2, 3, 0)
    assert stats.topics["t"].pulled_per_s > 0
    assert (stats.group, stats.client_id) == ("g", consumer.client_id)


def idle(bench: PushBench, step_s: float, steps: int) -> None:
    """Let time pass in long steps, each with one sample of each window that is due."""
    for _ in range(steps):
        bench.clock.advance(1000 * step_s)
        bench.settle()


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_averages_outlast_the_minute(bench: PushBench, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five minutes after the last message a handler took 0.0 ms; and how long pulls took was counted for nobody."""

    def slow(call: Any) -> Any:
        return lambda *arguments, **options: (time.sleep(0.004), bench.clock.advance(4), call(*arguments, **options))[2]

    consumer = bench.consumer(lambda message: time.sleep(0.002), mode=mode, workers=1)
    for name in ("read", "pop"):
        monkeypatch.setattr(bench.broker, name, slow(getattr(bench.broker, name)))
    bench.put(*[b"x"] * 5)
    assert (consumer.stats().topics.get("t"), bench.settle()) != (None, None)
    # Before there is a sample, in the minute, before the hour's first, in it, later.
    for step_s, steps in ((0, 1), (10, 1), (30, 10), (150, 6), (600, 7)):
        idle(bench, step_s, steps)
        stats = consumer.stats().topics["t"]
        assert 2 <= stats.handler_ms < 1_000
        assert 4 <= stats.pull_ms < 1_000
    assert stats.ok_per_s == 0


def test_averages_cover_the_last_minute(bench: PushBench, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])

    def handler(message: Message) -> None:
        now_s[0] += int(message.body) / 1000

    consumer = bench.consumer(handler, workers=1)
    for took_ms in (100, 2):
        bench.put(b"%d" % took_ms)
        bench.advance(20)
        assert consumer.stats().topics["t"].handler_ms == pytest.approx(took_ms)
        idle(bench, 10, 7)
    for step_s, steps in ((0, 1), (590, 1), (1_000, 7)):
        idle(bench, step_s, steps)
        assert consumer.stats().topics["t"].handler_ms == pytest.approx(51)
    bench.put(b"30")
    idle(bench, 300, 9)  # it has left the minute, and is still in the hour
    assert consumer.stats().topics["t"].handler_ms == pytest.approx(30)


# --- threads -------------------------------------------------------------------------------------------------------


def test_starting_and_stopping_leaves_nothing_behind(broker: Any) -> None:
    threads, before = set(threading.enumerate()), parked(broker)
    handled = Counter[bytes]()
    for i in range(50):
        consumer = subscribed(broker, lambda message: handled.update([message.body]), workers=3)
        with consumer:
            broker.put("t", b"%d" % i)
            if i % 2:
                until(lambda i=i: handled[b"%d" % i])  # type: ignore[misc]
        assert set(threading.enumerate()) <= threads
    assert set(handled) == {b"%d" % i for i in range(50)}
    assert set(handled.values()) == {1}  # each stop left off where the next start went on
    assert parked(broker) == before
    assert broker.locks.snapshot() == []


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_messages_behind_a_slow_one_go_to_others(broker: Any, mode: Any) -> None:
    """Handlers were fast so far, so nobody was asked to help with this pull."""
    fast, last = list[bytes](), threading.Event()
    waited = list[bool]()

    def handler(message: Message) -> None:
        if message.body == b"slow":
            waited.append(last.wait(LONG_S))
        elif message.body == b"last":
            last.set()
        else:
            fast.append(message.body)

    consumer = subscribed(broker, handler, workers=2, mode=mode)
    with consumer:
        broker.put_many("t", [b"m"] * 800, queue_id=0)
        until(lambda: len(fast) == 800)
        broker.put_many("t", [b"slow", *[b"m"] * 5, b"last"], queue_id=0)
        until(lambda: waited)
    assert waited == [True]


def test_a_handler_may_stop_its_consumer(broker: Any) -> None:
    results = list[bool]()
    seen = list[bytes]()

    def handler(message: Message) -> None:
        seen.append(message.body)
        results.append(consumer.stop(LONG_S))

    consumer = subscribed(broker, handler, workers=2).start()
    broker.put("t", b"0")
    until(lambda: results)
    assert results == [True]
    until(lambda: not any(thread.name.startswith("mqstore-g") for thread in threading.enumerate()))
    again = PushConsumer(broker, "g", workers=1)
    done = threading.Event()
    again.subscribe("t", lambda message: done.set())
    with again:
        assert done.wait(LONG_S)  # its result did not count: the queue was given back under it
    assert seen == [b"0"]


def test_a_handler_that_stops_its_consumer_is_not_waited_for_by_itself(broker: Any) -> None:
    """`stop` waits for the handler, which waited for `stop`: both had to time out."""
    begun, go = threading.Event(), threading.Event()
    results: dict[str, bool] = {}

    def handler(message: Message) -> None:
        begun.set()
        go.wait(LONG_S)
        results["handler"] = consumer.stop(LONG_S)

    consumer = subscribed(broker, handler, workers=1).start()
    broker.put("t", b"0")
    assert begun.wait(LONG_S)
    stopping = in_thread(lambda: results.update(main=consumer.stop(LONG_S)))
    until(lambda: "stopping" in repr(consumer))
    go.set()
    ended(*stopping, LONG_S / 2)
    assert results == {"handler": False, "main": True}


def test_one_that_could_not_start_has_nothing_left_to_stop(broker: Any) -> None:
    with PushConsumer(broker, "g", workers=1, ordered=True) as first:
        first.subscribe("t", lambda message: None)  # which starts it
        second = subscribed(broker, lambda message: None, "u", workers=1, ordered=True)
        with pytest.raises(SubscriptionConflictError):
            second.start()
        assert second.stop() is True


def test_stop_lets_what_runs_end_and_what_it_does_counts(broker: Any) -> None:
    begun, seen = threading.Event(), list[bytes]()

    def handler(message: Message) -> None:
        begun.set()
        until(cancelled)
        seen.append(message.body)

    consumer = subscribed(broker, handler, workers=1).start()
    for body in (b"0", b"1"):
        broker.put("t", body, queue_id=0)
    assert begun.wait(LONG_S)
    assert consumer.stop()
    assert seen == [b"0"]  # the second one was not begun
    assert broker.committed("g", "t", 0) == 1


def test_process_exit_stops_forgotten_consumers(tmp_path: Path) -> None:
    program = """
        import gc, sys, threading, mqstore
        done = threading.Event()
        def begin():
            store = mqstore.open(sys.argv[1])
            store.put("t", b"0", queue_id=0)
            consumer = store.push_consumer("g", workers=1)
            consumer.subscribe("t", lambda message: done.set())
            consumer.start()
        begin()
        gc.collect()
        done.wait(20)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], check=True, timeout=60)
    with mqstore.open(tmp_path) as store:
        assert store.committed("g", T0) == 1


def test_consumer_of_a_closed_broker_can_be_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    threads = set(threading.enumerate())
    broker = support.running_broker(tmp_path)
    broker.topics.create("t", queues=2)
    begun, go = threading.Event(), threading.Event()
    consumer = subscribed(broker, lambda message: (begun.set(), go.wait(LONG_S), 1 / 0), workers=2).start()
    broker.put("t", b"0")
    assert begun.wait(LONG_S)
    broker.close()
    go.set()
    with suppress(StoreClosedError):  # its progress is on disk already, and there is nothing to write to
        consumer.stop(LONG_S)
    until(lambda: set(threading.enumerate()) <= threads)
    assert "a job failed" not in caplog.text
    with mqstore.open(tmp_path) as store:
        assert sum(store.broker.lag("g").values()) == 1


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("mode", ["queue", "pop"])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_handler_that_ends_the_process_ends_run(broker: Any, error: BaseException, mode: Any, ordered: bool) -> None:
    """`run` came back as if somebody had asked the consumer to stop, and the process ended with 0. What was being
    handled is not settled, and has lost no attempt."""
    seen: list[tuple[bytes, int]] = []

    def handle(message: Message) -> None:
        seen.append((message.body, message.attempt))
        if seen == [(b"0", 1), (b"1", 1)]:
            raise error

    broker.put_many("t", [b"0", b"1", b"2"], queue_id=0)
    consumer = subscribed(broker, handle, workers=1, mode=mode, ordered=ordered)
    with pytest.raises(type(error)) as caught:
        consumer.run()
    assert caught.value is error
    assert sum(broker.lag("g").values()) == 2
    assert "stopped" in repr(consumer)
    assert broker.members.members("g") == []
    other = subscribed(broker, handle, workers=1, mode=mode, ordered=ordered)
    with other:
        until(lambda: len(seen) == 4)
    assert seen[2:] == [(b"1", 1), (b"2", 1)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_run_with_progress_on_disk(tmp_path: Path, number: signal.Signals) -> None:
    def work(pipe: int) -> None:
        with mqstore.open(tmp_path) as store:
            consumer = subscribed(store, lambda message: os.write(pipe, message.body), workers=1)
            for i in range(3):
                store.put("t", b"%d" % i)
            stopped = consumer.run()
        os.write(pipe, b"%d" % stopped)
        signal.pause()

    with speaking_child(work) as (pid, pipe):
        handled = b"".join(os.read(pipe, 1) for _ in range(3))
        os.kill(pid, number)
        assert os.read(pipe, 10) == b"1"
    assert sorted(handled) == sorted(b"012")
    offsets = json.loads((tmp_path / "config" / "consumerOffset.json").read_bytes())["offsetTable"]["t@g"]
    assert sum(offsets.values()) == 3


QUEUE, ORDERED, POP = {"mode": "queue"}, {"ordered": True}, {"mode": "pop"}
ORDERED_POP = {**ORDERED, **POP}
BROADCAST = {"model": "broadcasting", "client_id": "me"}
EVERY_MODE: list[dict[str, Any]] = [QUEUE, ORDERED, POP, ORDERED_POP, BROADCAST, {**BROADCAST, **ORDERED}]


@pytest.mark.parametrize("mode", EVERY_MODE, ids=str)
@pytest.mark.parametrize(
    ("option", "value", "of"),
    [
        ("max_span", 2000, [QUEUE, BROADCAST]),
        ("suspend", 1, [ORDERED, {**BROADCAST, **ORDERED}]),
        ("auto_commit", False, [ORDERED, {**BROADCAST, **ORDERED}]),
        ("strategy", "avg", [QUEUE, ORDERED, BROADCAST, {**BROADCAST, **ORDERED}]),
        ("prefetch_total", 10, [QUEUE, ORDERED, BROADCAST, {**BROADCAST, **ORDERED}]),
        ("prefetch_total_bytes", 10_000, [QUEUE, ORDERED, BROADCAST, {**BROADCAST, **ORDERED}]),
        ("retry", mqstore.RetryPolicy(2, [1]), [QUEUE, ORDERED, POP, ORDERED_POP, {**BROADCAST, **ORDERED}]),
        ("prefetch", 10, EVERY_MODE),
        ("consume_timeout", 10, EVERY_MODE),
    ],
)
def test_an_option_that_does_not_apply_is_refused(
    bench: PushBench, mode: dict[str, Any], option: str, value: Any, of: list[dict[str, Any]]
) -> None:
    """Each is accepted where it has a meaning, be it the default, and nowhere else."""
    if mode in of:
        PushConsumer(bench.broker, "g", **mode, **{option: value})
    else:
        with pytest.raises(ConfigError, match=f"{option} is for .*Leave it out"):
            PushConsumer(bench.broker, "g", **mode, **{option: value})


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_a_rate_is_not_known_before_there_is_a_sample(bench: PushBench, mode: Any) -> None:
    """A consumer at full speed told 0.0 messages a second for ten seconds."""
    consumer = bench.consumer(mode=mode)
    bench.put(*[b"x"] * 20)
    bench.settle()
    stats = consumer.stats().topics["t"]
    assert (stats.ok, stats.ok_per_s, stats.failed_per_s, stats.pulled_per_s) == (20, None, None, None)
    bench.advance(10)
    stats = consumer.stats().topics["t"]
    assert (stats.ok_per_s, stats.failed_per_s, stats.pulled_per_s) == (2.0, 0.0, 2.0)
    bench.advance(120)
    assert consumer.stats().topics["t"].ok_per_s == 0.0  # this is known


def test_the_time_of_a_handler_is_not_known_before_it_was_called(bench: PushBench) -> None:
    consumer = bench.consumer(interceptors=[Told(b"x")])
    bench.put(b"x")
    bench.settle()
    stats = consumer.stats().topics["t"]
    assert (stats.pulled, stats.handler_ms) == (1, None)
