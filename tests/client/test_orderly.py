"""Ordered consumption: one batch of a queue after the other, whoever comes, fails or hangs (clients#orderly)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import BatchFailure, Message, QueueRef, Reject, Retry, RetryPolicy, cancelled, exponential
from mqstore.errors import StoreBusyError
from tests.client.orderlysupport import Bench
from tests.client.pushsupport import hook

T0, T1 = QueueRef("t", 0), QueueRef("t", 1)
MODES = pytest.mark.parametrize("mode", ["queue", "pop"])


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "mq")
    yield bench
    bench.close()
    assert bench.overlaps == []


@pytest.fixture
def wide(bench: Bench) -> Bench:
    bench.broker.topics.alter("t", read_queues=2, write_queues=2)
    return bench


def fails(*bodies: str, times: int = 1_000_000, error: Callable[[], Exception] = lambda: ValueError("no")) -> Any:
    """A handler that fails so many times at each of these."""
    left = dict.fromkeys(bodies, times)

    def handle(got: Message | Sequence[Message], *more: Any) -> None:
        for message in [got] if isinstance(got, Message) else got:
            if left.get(message.text(), 0) > 0:
                left[message.text()] -= 1
                raise error()

    return handle


# --- the task of a queue (clients#orderly) ----------------------------------------------------------------------------


def test_a_position_is_committed_every_ten_milliseconds_and_at_the_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: bench.clock.monotonic_ms() / 1000)
    committed = []

    def handle(message: Message) -> None:
        committed.append(bench.committed())
        bench.clock.advance(4)

    bench.put(*"01234567")
    bench.join(handler=handle)
    bench.settle()

    assert committed == [0, 0, 0, 3, 3, 3, 6, 6]
    assert bench.committed() == 8


def test_stats_show_the_cache_of_a_queue(bench: Bench) -> None:
    during: list[Any] = []

    def handle(message: Message) -> None:
        during.append(consumer.stats().queues[T0].cached)
        if message.text() == "1":
            raise ValueError

    bench.put(*"01234")
    consumer = bench.join(handler=handle, prefetch=3)
    bench.settle()
    bench.clock.advance(500)
    after = consumer.stats().queues[T0].cached
    size = sum(message.size for message in bench.store.read("t", 0, 0)[:3])
    assert (during[0].messages, during[0].size, during[0].first, during[0].taken) == (3, size, 0, 3)
    assert (after.messages, after.first, after.taken, after.next_offset, after.throttled) == (3, 1, 0, 4, True)
    assert after.idle_ms == 500


@pytest.mark.parametrize("together_s", [0, 1_000])
def test_every_message_is_counted_once_its_queue_rests(
    wide: Bench, monkeypatch: pytest.MonkeyPatch, together_s: int
) -> None:
    """Those that were handled well are counted together, up to a failure or the end."""
    monkeypatch.setattr("mqstore.client.push.batches.SETTLE_S", together_s)
    wide.put(*"01234")
    wide.put(*"ab", queue_id=1)
    consumer = wide.join(handler=fails("3", times=2), batch_size=2)
    wide.settle()
    counted = consumer.stats().topics["t"]
    assert (counted.ok, counted.failed) == (5, 1)  # "2" and "3" were one batch, then each was alone
    wide.advance(10)
    counted = consumer.stats().topics["t"]
    assert (counted.ok, counted.failed) == (7, 1)


@pytest.mark.parametrize(
    ("slice_ms", "turns"),
    [(5_000, ("01ab23cd", "ab01cd23")), (9_000, ("0123abcd", "abcd0123"))],  # "longer than", so four
)
def test_a_queue_lets_another_have_the_thread_after_its_slice(
    wide: Bench, monkeypatch: pytest.MonkeyPatch, slice_ms: int, turns: tuple[str, str]
) -> None:
    monkeypatch.setattr("mqstore.client.push.orderly.SLICE_MS", slice_ms)
    monkeypatch.setattr("mqstore.client.push.batches.SETTLE_S", 0)
    wide.put(*"0123")
    wide.put(*"abcd", queue_id=1)
    wide.join(handler=lambda message: wide.clock.advance(3_000))
    wide.settle()

    assert "".join(wide.bodies) in turns


S = 1_000


@pytest.mark.parametrize(
    ("error", "options", "pauses_ms"),
    [
        (ValueError, {}, [S, 2 * S, 4 * S, 8 * S, 16 * S, 32 * S, 60 * S, 60 * S]),
        (lambda: Retry(), {}, [S, 2 * S, 4 * S]),
        (lambda: Retry(0), {}, [10, 10]),
        (lambda: Retry(0.0101), {}, [10, 10]),
        (lambda: Retry(0.5), {"suspend": 2}, [500, 500]),
        (lambda: Retry(60), {}, [60 * S, 60 * S]),
        (lambda: Retry(60.001), {}, [60 * S, 60 * S]),
        (lambda: Retry(1e9), {}, [60 * S, 60 * S]),
        (ValueError, {"suspend": 2.5}, [2_500, 2_500]),
        (ValueError, {"retry": RetryPolicy(9, [3, 7])}, [3 * S, 7 * S, 7 * S]),
        (ValueError, {"retry": RetryPolicy(9, [3, 7]), "suspend": 0.01}, [10, 10]),
        (ValueError, {"retry": RetryPolicy(9, [0, 90])}, [10, 60 * S]),
        (ValueError, {"retry": exponential(1, 3, 100)}, [S, 3 * S, 9 * S, 27 * S, 60 * S]),
        (ValueError, {"retry": RetryPolicy(9)}, [S, 5 * S, 10 * S, 30 * S, 60 * S, 60 * S]),
    ],
)
def test_a_queue_is_suspended_as_asked_for_within_10_ms_to_60_s(
    bench: Bench, error: Callable[[], Exception], options: dict[str, Any], pauses_ms: list[int]
) -> None:
    bench.put("0")
    bench.join(handler=fails("0", error=error), **options)
    bench.advance(sum(pauses_ms) / 1000)

    times = [call.at_ms for call in bench.calls]
    assert [later - earlier for earlier, later in pairwise(times)] == pauses_ms


def test_internal_failure_pauses_for_5_s_only(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put("0", "1")
    bench.join(handler=fails("0", times=1))
    with monkeypatch.context() as patch:
        patch.setattr(bench.broker, "note_attempt", lambda *arguments, **options: 1 / 0)
        bench.settle()
    bench.advance(4.9)
    assert bench.bodies == ["0"]
    assert bench.told(ZeroDivisionError)

    bench.advance(0.1)
    assert bench.bodies == ["0", "0", "1"]
    assert bench.committed() == 2


# --- attempts and dead letters (delivery#order-file) ------------------------------------------------------------------


def started(consumer: mqstore.PushConsumer) -> None:
    consumer.subscribe("t", lambda message: None)
    with consumer:
        pass


@pytest.mark.parametrize(
    "make",
    [
        lambda store: started(store.push_consumer("g", ordered=True)),
        lambda store: started(store.push_consumer("g", ordered=True, mode="pop")),
        lambda store: started(store.push_consumer("g", ordered=True, model="broadcasting", client_id="c")),
        lambda store: store.simple_consumer("g", {"t": "*"}, ordered=True).close(),
        lambda store: store.queue("g", ordered=True),
        lambda store: store.broker.groups.create("g", orderly=True),
    ],
)
def test_every_way_to_an_ordered_group_retries_for_ever(bench: Bench, make: Callable[[Any], object]) -> None:
    make(bench.store)
    policy = bench.broker.groups.require("g").retry_policy
    assert policy.max_attempts is None
    assert [policy.delay(attempt) for attempt in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize(
    ("group", "retry", "attempts"),
    [(None, RetryPolicy(1, [1]), 1), (None, RetryPolicy(None, [10]), 101), (RetryPolicy(), None, 17)],
    ids=["one", "no limit", "a group that was there before"],
)
def test_a_message_has_as_many_attempts_as_its_group_says(
    bench: Bench, group: RetryPolicy | None, retry: RetryPolicy | None, attempts: int
) -> None:
    if group is not None:
        bench.broker.groups.create("g", orderly=True, retry_policy=group)
    bench.put("0", "1")
    bench.join(handler=fails("0"), retry=retry)
    bench.advance(1_000)

    ends = attempts <= 17
    assert bench.bodies == ["0"] * attempts + ["1"] * ends
    assert bench.dead() == ["0"] * ends


def test_crash_at_a_dead_letter_never_loses_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put("0", "1")
    bench.join(handler=fails("0"), retry=RetryPolicy(1, [1]))
    send_back = bench.broker.send_back

    def crash(*arguments: Any, **options: Any) -> Any:
        receipt = send_back(*arguments, **options)
        bench.store.flush()
        bench.kill()
        return receipt

    monkeypatch.setattr(bench.broker, "send_back", crash)
    bench.consumers[0].run_once()
    bench.open()
    assert bench.committed() in (0, None)
    bench.join(handler=fails("0"))
    bench.advance(2)

    assert bench.dead() == ["0", "0"]
    assert bench.committed() == 2


def test_failed_dead_letter_keeps_its_message(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put("0", "1")
    bench.join(handler=fails("0"), retry=RetryPolicy(2, [1]))

    def busy(*arguments: Any, **options: Any) -> Any:
        raise StoreBusyError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(bench.broker, "send_back", busy)
        bench.advance(1)
        assert bench.attempts == [("0", 1), ("0", 2)]
        assert bench.committed() == 0
        assert bench.told(StoreBusyError) == ["the disk is full"]
        bench.advance(4.9)
        assert len(bench.calls) == 2
    bench.advance(5)

    assert bench.attempts == [("0", 1), ("0", 2), ("0", 3), ("1", 1)]
    assert bench.dead() == ["0"]


def test_retention_during_retries_does_not_stop_the_queue(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put("0", "1")
    bench.join(handler=fails("0"), retry=RetryPolicy(1, [1]))

    def gone(*arguments: Any, **options: Any) -> Any:
        return bench.store.log.at(1 << 40)

    monkeypatch.setattr(bench.broker, "send_back", gone)
    bench.settle()

    assert bench.bodies == ["0", "1"]
    assert bench.told(LookupError)
    assert bench.committed() == 2


# --- batches ----------------------------------------------------------------------------------------------------------


def named(messages: Sequence[Message], place: int) -> Exception:
    return BatchFailure([messages[place]])


def end_named(messages: Sequence[Message], place: int) -> Exception:
    return BatchFailure(messages[place:])


def untried_named(messages: Sequence[Message], place: int) -> Exception:
    return BatchFailure([messages[place]], messages[place + 1 :])


def own_error(messages: Sequence[Message], place: int) -> Exception:
    return ValueError("no")


@MODES
@pytest.mark.parametrize("poison", [0, 1, 3, 6])
@pytest.mark.parametrize(
    ("says", "is_named"),
    [
        (named, True),
        (end_named, True),
        (untried_named, True),
        (own_error, False),
        (lambda *_: Reject("odd"), False),
    ],
)
def test_failed_message_of_a_batch_fails_alone(
    bench: Bench, mode: Any, poison: int, says: Callable[[Sequence[Message], int], Exception], is_named: bool
) -> None:
    """A poison message in an ordered batch took its neighbours to the dead letters, although no handler saw them."""
    done: list[str] = []
    batches: list[tuple[str, ...]] = []

    def handle(messages: Sequence[Message]) -> None:
        batches.append(tuple(message.text() for message in messages))
        for place, message in enumerate(messages):
            if message.text() == str(poison):
                raise says(messages, place)
            done.append(message.text())

    bench.put(*"0123456")
    bench.join(handler=handle, batch_size=4, retry=RetryPolicy(3, [1]), mode=mode)
    bench.advance(4)

    others = [each for each in "0123456" if each != str(poison)]
    assert bench.dead() == [str(poison)]
    assert bench.committed() == 7
    assert list(dict.fromkeys(done)) == others  # the first time each was handled: in order
    assert {attempt for body, attempt in bench.attempts if body != str(poison)} == {1}
    poisoned = [batch for batch in batches if str(poison) in batch]
    if is_named:
        assert done == others
        assert len(poisoned) == 3
    assert poisoned[1:] == [(str(poison),)] * (len(poisoned) - 1)
    attempts = [attempt for body, attempt in bench.attempts if body == str(poison)]
    assert attempts[-1] == 1 or attempts[-3:] == [1, 2, 3]


@MODES
def test_failed_message_of_a_batch_comes_alone_after_a_restart(bench: Bench, mode: Any) -> None:
    def handle(messages: Sequence[Message]) -> None:
        batches.append([message.text() for message in messages])
        for message in messages:
            if message.text() == "1" and message.attempt < 3:
                raise BatchFailure([message])

    batches: list[list[str]] = []
    bench.put(*"0123")
    consumer = bench.join(handler=handle, batch_size=4, mode=mode)
    bench.settle()
    assert bench.committed() == 1
    assert bench.leave(consumer)
    bench.close()
    bench.open()
    bench.join(handler=handle, batch_size=4, mode=mode)
    bench.advance(5)
    assert batches == [["0", "1", "2", "3"], ["1"], ["1"], ["2", "3"]]
    assert bench.committed() == 4


def test_a_failed_batch_is_handled_alone_though_its_call_took_a_slice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next slice began with the whole batch again, so no message of it was ever tried alone."""

    def handle(messages: Sequence[Message]) -> None:
        batches.append("".join(message.text() for message in messages))
        bench.clock.advance(2_000)
        if len(messages) > 1 and len(batches) < 5:
            raise ValueError("no")

    monkeypatch.setattr("mqstore.client.push.orderly.SLICE_MS", 1_000)
    monkeypatch.setattr("mqstore.client.push.batches.SETTLE_S", 0)
    batches: list[str] = []
    bench.put(*"012")
    bench.join(handler=handle, batch_size=3)
    bench.settle()
    assert batches == ["012", "0", "1", "2"]
    assert bench.committed() == 3


def test_batch_failure_naming_untried_before_failed_loses_nothing(bench: Bench) -> None:
    """Taken by its word, it would leave a hole in the order."""

    def handle(messages: Sequence[Message]) -> None:
        if len(messages) == 4:
            raise BatchFailure([messages[3]], [messages[1]])

    bench.put(*"0123")
    bench.join(handler=handle, batch_size=4)
    bench.settle()
    assert bench.attempts == [*[(each, 1) for each in "0123"], *[(each, 1) for each in "123"]]
    assert bench.committed() == 4


# --- members that come, go, hang and die (clients#orderly, delivery#locks) --------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_revoked_queue_starts_no_message_and_counts_failures(wide: Bench, fails: bool) -> None:
    def handle(message: Message) -> None:
        wide.join("b")
        first.run_once()
        if fails:
            raise ValueError

    wide.put("0", "1", "2", queue_id=1)
    first = wide.join("a", handle)
    wide.settle()
    wide.advance(2)

    calls = [(call.member, call.body, call.attempt) for call in wide.calls]
    assert calls == [("a", "0", 1), *[("b", "0", 2)] * fails, ("b", "1", 1), ("b", "2", 1)]


def test_hanging_ordered_handler_is_reported_and_keeps_its_queue(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def timeout(message: Message, stack: str) -> None:
        timeouts.append((message.text(), bench.clock.monotonic_ms()))

    def handle(messages: Sequence[Message]) -> None:
        if messages[0].text() != "0":
            return
        seen.append(cancelled())
        for _ in range(3600):
            bench.clock.advance(1_000)
            first.run_once()
            other.run_once()
        seen.append(cancelled())

    seen: list[bool] = []
    timeouts: list[tuple[str, int]] = []
    bench.put("0", "1", "2")
    first = bench.join("a", handle, batch_size=2, consume_timeout=900, interceptors=[hook(on_timeout=timeout)])
    other = bench.join("b", lambda messages: None, batch_size=2)
    bench.consumers.remove(other)
    with caplog.at_level(logging.ERROR):
        bench.settle()

    assert [body for body, _ in timeouts] == ["0", "1"]
    assert 900_000 <= timeouts[0][1] <= 902_000
    assert seen == [False, True]
    assert len([record for record in caplog.records if "has been in its handler for 900 s" in record.message]) == 1
    bench.advance(1)
    assert [(call.member, call.body) for call in bench.calls] == [("a", "0"), ("a", "1"), ("a", "2")]
    assert bench.committed() == 3  # however late: its result counts


# --- subscriptions and retry topics --------------------------------------------------------------------------------


def formerly_concurrent(bench: Bench, bodies: Sequence[str], topics: Sequence[str]) -> None:
    """Have these fail once in group g, unordered: they lie in its retry topic then."""
    concurrent = bench.join("c", fails(*bodies), topics=topics, ordered=False)
    bench.advance(1)
    bench.leave(concurrent)
    bench.calls.clear()
    bench.errors.clear()
    bench.broker.groups.alter("g", orderly=True)
    bench.advance(10)


def test_retries_of_a_concurrent_group_become_ordered(bench: Bench) -> None:
    bench.store.create_topic("u", queues=1)
    bench.put("0", "1")
    bench.put("2", topic="u")
    bench.put("3")
    formerly_concurrent(bench, "0123", ("t", "u"))
    got: list[tuple[str, str, int]] = []

    def takes(topic: str) -> Callable[[Sequence[Message]], None]:
        return lambda messages: got.extend((topic, f"{each.topic} {each.text()}", each.attempt) for each in messages)

    consumer = bench.store.push_consumer("g", ordered=True, workers=1, batch_size=10)
    for topic in ("t", "u"):
        consumer.subscribe(topic, takes(topic))
    bench.consumers.append(consumer.start())
    bench.advance(2)

    assert sorted(got) == [("t", "t 0", 2), ("t", "t 1", 2), ("t", "t 3", 2), ("u", "u 2", 2)]
    assert bench.broker.lag("g")[QueueRef("%RETRY%g", 0)] == 0


def test_attempts_of_a_formerly_concurrent_group_are_counted_on(bench: Bench) -> None:
    bench.put("0")
    formerly_concurrent(bench, "0", ("t",))
    bench.join(handler=fails("0"), retry=RetryPolicy(3, [1]))
    bench.advance(5)

    assert bench.attempts == [("0", 2), ("0", 3)]
    assert bench.dead() == ["0"]
    [letter] = bench.broker.dead_letters("g")
    assert letter.stored_properties()["DLQ_ORIGIN_TOPIC"] == "t"


# --- broadcasting (clients#broadcasting) ------------------------------------------------------------------------------


def test_broadcasting_failure_blocks_its_queue_then_is_skipped(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.put("0", "1")
    bench.join("a", fails("0"), model="broadcasting", retry=RetryPolicy(3, [1]))
    bench.join("b", model="broadcasting")
    bench.advance(10)

    assert [(call.body, call.attempt) for call in bench.calls if call.member == "a"] == [
        *[("0", 1), ("0", 2), ("0", 3)],
        ("1", 1),
    ]
    assert [call.body for call in bench.calls if call.member == "b"] == ["0", "1"]
    assert bench.dead() == []
    assert bench.broker.attempts("g", "t", 0) == {}
    assert "t/0, offset 0: it is passed over: attempt 3 failed: ValueError: no" in caplog.text


# --- message groups, end to end ------------------------------------------------------------------------------------


def test_nothing_overtakes_a_suspected_message_that_waits_for_its_turn(bench: Bench) -> None:
    bench.put("0", "1")
    suspects = bench.broker.begun.suspects
    suspects.add("g", [("t", 0, 1)])
    suspects.come("another", "other consumer", lambda: None)
    bench.join()
    bench.settle()
    bench.put("2")
    bench.settle()
    assert bench.bodies == ["0"]
    suspects.release("another")
    bench.settle()
    assert bench.bodies == ["0", "1", "2"]
    assert not suspects.left
