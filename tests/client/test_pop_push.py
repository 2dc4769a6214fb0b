"""The push consumer in mode "pop", with and without order. Time is moved by hand and everything runs on the test's
thread, but in the last part."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Message, Retry, Store
from tests.broker.support import full
from tests.client.popsupport import BOTH, Bench, Push
from tests.client.pushsupport import Told, hook
from tests.client.support import failing, parked, subscribed, turns_left, until, waits_of


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "store")
    for topic in ("t", "u"):
        bench.store.create_topic(topic, queues=2)
    yield bench
    bench.store.close()


def fails(*bodies: bytes) -> Callable[[Message], None]:
    def act(message: Message) -> None:
        if message.body in bodies:
            raise RuntimeError("mine")

    return act


# -- what both do -----------------------------------------------------------------------------------------------------


@BOTH
def test_the_delay_that_a_handler_wishes_is_bounded(
    bench: Bench, ordered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing said that 24 h had become 12."""

    def act(message: Message) -> None:
        if message.attempt == 1:
            raise Retry(delay=1e6)

    push = Push(bench, act, ordered=ordered)
    bench.put(b"a", queue_id=0)
    push.advance(0)
    assert "t/0, offset 0: it was to be redelivered in 1e+06 s" in caplog.text
    most_s = 60 if ordered else 12 * 3600
    bench.clock.advance((most_s - 10) * 1000)
    push.advance(9)
    assert len(push.seen) == 1
    push.advance(1)
    assert push.seen[1:] == [(b"a", 2)]
    bench.put(b"b")
    push.advance(100)
    assert caplog.text.count("be redelivered in") == 1


@BOTH
@pytest.mark.parametrize("full_s", [0, 45])
def test_long_handling_is_renewed(
    bench: Bench, ordered: bool, full_s: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lease is of 60 s. On a full disk its renewal, due after 40 s, is tried again every 5 s."""

    def act(message: Message) -> None:
        if message.body == b"0":
            with monkeypatch.context() as disk:
                disk.setattr(bench.broker, "renew", full)
                for _ in range(full_s):
                    bench.advance(1)
                    push.consumer.run_once()  # the timer thread
            for _ in range(50):
                bench.advance(10)
                push.consumer.run_once()

    bench.put(b"0", b"1", b"2", queue_id=0)
    push = Push(bench, act, ordered=ordered, workers=1)
    push.go()
    push.advance(100)
    assert push.seen == [(b"0", 1), (b"1", 1), (b"2", 1)]
    assert bench.lag() == 0
    assert ("could not be renewed" in caplog.text) == bool(full_s)


def test_settlement_during_a_renewal_is_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was taken for lost, and logged."""
    renew = bench.broker.renew

    def late(*arguments: Any, **options: Any) -> str:
        bench.broker.save()  # settles what was handled, as a worker may do now
        return renew(*arguments, **options)

    def act(message: Message) -> None:
        if message.body == b"1":
            bench.advance(41)
            push.consumer.run_once()

    monkeypatch.setattr(bench.broker, "renew", late)
    bench.put(b"0", b"1", queue_id=0)
    push = Push(bench, act, workers=1)
    push.go()
    assert push.seen == [(b"0", 1), (b"1", 1)]
    assert "lost" not in caplog.text


@BOTH
def test_a_settlement_that_fails_is_tried_again(bench: Bench, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the message is kept meanwhile, for longer than its handler may take: that one has ended."""
    push = Push(bench, fails(b"bad"), ordered=ordered, consume_timeout=5)
    bench.put(b"good", b"bad", queue_id=0)
    with monkeypatch.context() as disk:
        for verb in ("ack", "nack"):
            disk.setattr(bench.broker, verb, full)
        push.advance(100)
        assert [type(error).__name__ for error in push.errors].count("StoreFullError") > 90
        assert push.seen == ([(b"good", 1)] if ordered else [(b"good", 1), (b"bad", 1)])
    push.advance(1)
    if ordered:
        assert push.seen[:2] == [(b"good", 1), (b"bad", 1)]  # not begun before
    push.advance(1)
    assert Counter(push.seen) >= Counter([(b"good", 1), (b"bad", 1), (b"bad", 2)])
    assert push.bodies().count(b"good") == 1


@BOTH
@pytest.mark.parametrize("heals", [True, False])
def test_stop_is_the_last_chance_to_settle(
    bench: Bench, ordered: bool, heals: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    push = Push(bench, ordered=ordered)
    bench.put(b"a")
    with monkeypatch.context() as disk:
        disk.setattr(bench.broker, "ack", full)
        push.go()
        if not heals:
            assert push.consumer.stop()
    assert push.consumer.stop()
    assert push.seen == [(b"a", 1)]
    assert ("is redelivered" in caplog.text) is not heals
    other = Push(bench, ordered=ordered)
    other.advance(61)
    assert other.seen == ([] if heals else [(b"a", 2)])
    assert bench.lag() == 0


@BOTH
def test_late_settlement_is_reported_and_dropped(bench: Bench, ordered: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The process slept: the message was given to another member meanwhile."""
    recorder = Told()

    def act(message: Message) -> None:
        if message.attempt == 1 and message.body == b"0":
            bench.advance(61)
            [delivery] = bench.broker.pop("g", "t", 1, order=ordered, invisible=300)
            for _ in range(9):
                push.consumer.run_once()  # the timer thread: it renews no more
                bench.advance(10)
            bench.broker.ack("g", "t", [delivery.receipt])

    push = Push(bench, act, ordered=ordered, interceptors=[recorder], workers=1)
    bench.put(b"0", queue_id=0)
    push.go()
    bench.put(b"1", queue_id=0)
    push.advance(10)
    assert push.seen == [(b"0", 1), (b"1", 1)]
    assert recorder.settled == [(b"0", "ack")] * ordered + [(b"1", "ack")]  # in order, what is done is done
    assert caplog.text.count("t/0, offset 0 was lost") == 1
    assert bench.lag() == 0
    assert push.held() == 0


@BOTH
def test_hooks_hear_how_long_the_handler_of_a_message_took(
    bench: Bench, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They heard the sum of all that were acknowledged together."""
    now, took = [0.0], dict[bytes, float]()
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def timed(message: Message, outcome: str, seconds: float) -> None:
        took[message.body] = seconds

    def act(message: Message) -> None:
        now[0] += int(message.body) / 1000

    bench.put(b"1", b"2", b"3", queue_id=0)
    push = Push(bench, act, ordered=ordered, interceptors=[hook(on_settle=timed)], workers=1)
    push.go()
    assert took == {body: pytest.approx(int(body) / 1000) for body in (b"1", b"2", b"3")}


@BOTH
def test_pause_and_seek_are_refused(bench: Bench, ordered: bool) -> None:
    push = Push(bench, ordered=ordered)
    queue = mqstore.QueueRef("t", 0)
    for call in (lambda: push.consumer.pause(queue), lambda: push.consumer.resume(queue)):
        with pytest.raises(mqstore.errors.ConfigError, match="no queues"):
            call()
    with pytest.raises(mqstore.errors.ConfigError, match="no positions"):
        push.consumer.seek(queue, 0)


@BOTH
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("how", ["pause", "halt"])
def test_idle_consumer_takes_no_turn(bench: Bench, ordered: bool, how: str, when: str) -> None:
    """The broker calls one receiver for a message. "between": it is called, and before it looks it is to do nothing."""
    push = Push(bench, ordered=ordered)
    push.go()
    called: list[str] = []
    bench.broker.add_pop_waiter("g", "t", lambda worth: called.append("another"), order=ordered)
    stop = push.consumer.pause if how == "pause" else push.engine.halt
    if when == "before":
        stop()
        assert parked(bench.broker) == 1
    bench.store.put("t", b"a")
    bench.settle()
    assert called == ["another"] * (when == "before")
    stop()
    push.go()
    assert called == ["another"]
    assert push.seen == []


@pytest.mark.parametrize("how", ["pause", "halt"])
def test_a_turn_that_comes_with_the_end_is_passed_on(bench: Bench, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was chosen before, and called after."""
    push = Push(bench)
    push.go()
    monkeypatch.setattr(waits_of(push.consumer), "ring", lambda: None)
    called: list[str] = []
    bench.broker.add_pop_waiter("g", "t", lambda worth: called.append("another"))
    (push.consumer.pause if how == "pause" else push.engine.halt)()
    bench.put(b"a")
    assert called == ["another"]


@BOTH
@pytest.mark.parametrize(("bound", "most_held"), [({"prefetch": 7}, 7), ({"prefetch_bytes": 2_000}, 2 + 32)])
def test_no_more_is_held_than_prefetch_allows(
    bench: Bench, ordered: bool, bound: dict[str, int], most_held: int
) -> None:
    """Beyond `prefetch_bytes` lies what one pop brings."""
    held: list[int] = []
    bench.put(*[b"%03d" % i + b"." * 997 for i in range(100)])
    push = Push(bench, lambda _: held.append(push.held()), ordered=ordered, **bound)
    push.go()
    assert len(push.seen) == 100
    assert 2 <= max(held) <= most_held


@BOTH
@pytest.mark.parametrize("pace_ms", [0.0, 5.0])
def test_handlers_that_are_worth_it_have_other_workers_called(bench: Bench, ordered: bool, pace_ms: float) -> None:
    """Who fetched lets another fetch on, and others take of what it found. In order that is one line for each queue,
    whatever the pace: lines do not wait for each other."""
    waiting: list[int] = []
    push = Push(bench, lambda _: waiting.append(turns_left(push.consumer)), ordered=ordered, start=False)
    push.pace(pace_ms)
    for queue_id in (0, 1):
        bench.put(b"0", b"1", queue_id=queue_id)
    push.consumer.start()
    push.go()
    assert waiting[0] == ordered + (pace_ms > 0) + (pace_ms > 0 and not ordered)
    assert parked(bench.broker) == 1  # who has handed the fetch over looks no more


@BOTH
def test_message_fetched_after_the_end_is_released(
    bench: Bench, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that fetches does not end in time."""
    push = Push(bench, ordered=ordered, start=False)
    pop = bench.broker.pop

    def late(*rest: Any, **options: Any) -> Any:
        found = pop(*rest, **options)
        push.engine.halt()
        push.engine.close()
        return found

    bench.put(b"a")
    with monkeypatch.context() as patch:
        patch.setattr(bench.broker, "pop", late)
        push.consumer.start()
        push.go()
    assert push.seen == []
    assert bench.broker.pending("g") == []
    assert push.held() == 0
    [delivery] = bench.broker.pop("g", "t", order=ordered)
    assert delivery.attempt == 1


@BOTH
@pytest.mark.parametrize(("pace_ms", "fetched"), [(60_000, 4), (2_000, 20), (0, 32)])
def test_slow_handlers_have_little_fetched_for_them(bench: Bench, ordered: bool, pace_ms: int, fetched: int) -> None:
    held: list[int] = []
    bench.put(*[b"a"] * 100, queue_id=0)
    push = Push(bench, lambda _: held.append(push.held()), ordered=ordered, start=False)
    push.pace(pace_ms)
    push.consumer.start()
    push.go()
    assert held[0] == fetched


@BOTH
def test_a_fetch_that_fails_is_made_again(bench: Bench, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put(b"a")
    push = Push(bench, ordered=ordered, start=False)
    with monkeypatch.context() as disk:
        disk.setattr(bench.broker, "pop", full)
        push.consumer.start()
        push.advance(3.5)
        assert [type(error) for error in push.errors] == [mqstore.errors.StoreFullError] * 4
    push.advance(1)
    assert push.seen == [(b"a", 1)]


@BOTH
def test_a_batch_is_of_one_topic(bench: Bench, ordered: bool) -> None:
    batches: list[list[str]] = []
    push = Push(bench, lambda given: batches.append([m.topic for m in given]), "t", "u", ordered=ordered, batch_size=3)
    bench.put(*[b"t"] * 4, queue_id=0)
    bench.put(*[b"u"] * 4, topic="u", queue_id=0)
    push.go()
    assert sorted(batches) == [["t"], ["t"] * 3, ["u"], ["u"] * 3]
    assert bench.lag() == 0


# -- in order ---------------------------------------------------------------------------------------------------------


@BOTH
def test_failure_of_a_fetch_silences_nobody(bench: Bench, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    size_of = failing(lambda messages: sum(message.size for message in messages), MemoryError())
    monkeypatch.setattr("mqstore.client.push.pop.stored_bytes", size_of)
    push = Push(bench, ordered=ordered)
    bench.put(b"0", queue_id=0)
    push.advance(2)
    assert push.bodies() == [b"0"]
    assert bench.lag() == 0


def test_in_order_what_stands_behind_what_was_lost_is_not_begun(bench: Bench) -> None:
    """Its handler took so long, and nobody renewed meanwhile, that another one has got it, and all behind it: to go on
    would put two handlers at one queue, and repeat what that one does."""
    others: list[Any] = []

    def act(message: Message) -> None:
        if message.body == b"1" and not others:
            bench.clock.advance(100_000)
            bench.broker.run_once()
            others.extend(bench.broker.pop("g", "t", 3, order=True))

    push = Push(bench, act, ordered=True, workers=1)
    bench.put(*(b"%d" % i for i in range(5)), queue_id=0)
    push.go()
    assert [each.message.body for each in others] == [b"1", b"2", b"3"]
    assert push.bodies() == [b"0", b"1"]
    bench.broker.ack("g", "t", [each.receipt for each in others])
    push.advance(1)
    assert push.bodies() == [b"0", b"1", b"4"]
    assert bench.lag() == 0


# -- with threads -----------------------------------------------------------------------------------------------------


@BOTH
def test_an_idle_consumer_is_woken_each_time(store: Store, ordered: bool) -> None:
    store.create_topic("t")
    seen: list[bytes] = []
    consumer = subscribed(store, lambda message: seen.append(message.body), mode="pop", ordered=ordered, workers=2)
    with consumer:
        for i in range(50):
            until(lambda: parked(store.broker))
            store.put("t", b"%d" % i)
            until(lambda i=i: len(seen) == i + 1)
    assert seen == [b"%d" % i for i in range(50)]


def test_an_ordered_queue_is_strictly_serial(store: Store) -> None:
    running, seen, overlaps = [], [], []

    def handle(message: Message) -> None:
        overlaps.extend(running)
        running.append(message.body)
        time.sleep(0.001)
        seen.append(message.body)
        running.remove(message.body)

    bodies = [b"%d" % i for i in range(60)]
    store.put_many("t", bodies, queue_id=0)
    consumer = subscribed(store, handle, mode="pop", ordered=True, workers=4)
    with consumer:
        until(lambda: len(seen) == 60)
    assert overlaps == []
    assert seen == bodies
