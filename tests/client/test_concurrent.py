"""Messages handled in no order: what becomes of each (clients#handler-end, clients#overdue), in simulated time."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mqstore import BatchFailure, Message, PushConsumer, QueueRef, Reject, Retry, RetryPolicy, cancelled, exponential
from mqstore.errors import ConfigError, NotPermittedError, StoreFullError
from tests.client.pushsupport import PushBench, Told, engine_of, hook, unsettled
from tests.client.support import failing, turns_left, workers_of
from tests.faults import FaultyFileSystem

T0 = QueueRef("t", 0)
RETRIES = "%RETRY%g"
LEVELS_S = [10, 30, 60, 120, 180, 240, 300, 360]
"""First pauses by the delay levels (clients#backoff-vectors)."""


class Handler:
    """Notes what it is given, and raises what it is told to."""

    def __init__(self, bench: PushBench, *errors: BaseException | None, then: BaseException | None = None) -> None:
        self.bench = bench
        self.errors = list(errors)
        self.then = then
        self.seen: list[tuple[bytes, int]] = []
        """(body, attempt)."""
        self.at_s: list[float] = []
        self.topics: list[str] = []
        self._begin_ms = bench.clock.now_ms()

    def __call__(self, given: Message | Sequence[Message]) -> None:
        batch = [given] if isinstance(given, Message) else given
        self.seen += [(message.body, message.attempt) for message in batch]
        self.topics += [message.topic for message in batch]
        self.at_s.append((self.bench.clock.now_ms() - self._begin_ms) / 1000)
        error = self.errors.pop(0) if self.errors else self.then
        if error is not None:
            raise error


# --- outcomes ------------------------------------------------------------------------------------------------------


class NoTextError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("cannot be shown")


class BareRetry(Retry):
    def __init__(self, **given: object) -> None:
        """Does not call the constructor of its base class."""
        self.__dict__.update(given)


class BareReject(Reject):
    def __init__(self) -> None:
        """Likewise."""


class BareBatch(BatchFailure):
    def __init__(self, **given: object) -> None:
        """Likewise."""
        self.__dict__.update(given)


class BrokenBatch(BareBatch):
    @property
    def failed(self) -> Any:
        raise RuntimeError("cannot be told")


@pytest.mark.parametrize(
    ("error", "again_s", "reason", "reported"),
    [
        (None, None, None, 0),
        (ValueError("x"), 10, None, 1),
        (NoTextError(), 10, None, 1),
        (Retry(), 10, None, 0),
        (Retry(3), 3, None, 0),
        (Retry(0), 0, None, 0),
        (Retry(10 * 365 * 86_400), 10, None, 1),  # longer than any delay here
        (Reject("bad"), None, "bad", 0),
        (Reject(), None, "rejected by its handler", 0),
        (Reject(17), None, "17", 0),
        (BareReject(), None, "rejected by its handler", 0),
        (BareRetry(), 10, None, 0),
        *((BareRetry(delay_s=delay_s), 10, None, 0) for delay_s in ("soon", float("nan"), float("inf"), -1)),
        (BareRetry(delay_s=3), 3, None, 0),
        (BareBatch(), 10, None, 1),
        (BareBatch(failed=7), 10, None, 1),
        (BrokenBatch(), 10, None, 1),
    ],
    ids=repr,
)
def test_handler_outcome_is_obeyed(
    bench: PushBench, error: Exception | None, again_s: float | None, reason: str | None, reported: int
) -> None:
    """Also if an exception of a user's class lacks what it should have: its message must not be nowhere."""
    handler, hook = Handler(bench, error), Told()
    bench.consumer(handler, interceptors=[hook])
    bench.put(b"m")
    bench.settle()
    assert bench.committed() == 1  # settled here, whatever comes of it
    bench.advance(60)

    assert handler.at_s == ([0.0] if again_s is None else [0.0, again_s])
    assert handler.topics == ["t"] * len(handler.at_s)
    again = ["ack"] if reason is None else ["dlq"]
    assert [outcome for _, outcome in hook.settled] == (again if again_s is None else ["retry", "ack"])
    letters = [(each.body, each.properties["dlq_reason"]) for each in bench.broker.dead_letters("g")]
    assert letters == ([] if reason is None else [(b"m", reason)])
    assert len(bench.errors) == reported


@pytest.mark.parametrize("mode", ["queue", "pop"])
@pytest.mark.parametrize(
    ("failed", "untried", "reported"),
    [
        ([], [], 0),
        ([3, 1], [], 0),
        ([1, 1], [2, 3], 0),
        ([1], [0, 2, 2, 1], 0),  # named as both, it has failed
        ([0, 1, 2, 3], [], 0),
        (["other"], [], 1),
        ([0, "x"], [], 1),
    ],
)
def test_batch_failure_names_the_failed_and_the_untried(
    bench: PushBench, mode: Any, failed: list[Any], untried: list[int], reported: int
) -> None:
    """All others are done. If it names something else, all of the batch have failed."""
    calls: list[list[tuple[str, int]]] = []
    bench.put(b"other", topic="u")

    def handler(batch: Sequence[Message]) -> None:
        assert isinstance(batch, tuple)  # not our list, which a handler might change
        calls.append([(message.text(), message.attempt) for message in batch])
        if len(calls) == 1:
            copies = bench.broker.read("t", 0, 0).messages  # equal to the messages, which is enough
            error = BatchFailure([copies[i] for i in failed if i in range(4)], [copies[i] for i in untried])
            if reported:
                error.failed = (*error.failed, bench.broker.read("u", 0, 0).messages[0] if "other" in failed else "x")
            raise error

    bench.consumer(handler, mode=mode, batch_size=4, workers=1)
    bench.put(b"0", b"1", b"2", b"3")
    bench.advance(30)

    have_failed = {0, 1, 2, 3} if reported else {*failed}
    assert calls[0] == [(str(i), 1) for i in range(4)]
    again = sorted(each for call in calls[1:] for each in call)
    assert again == sorted([*((str(i), 2) for i in have_failed), *((str(i), 1) for i in {*untried} - have_failed)])
    assert bench.committed() == 4
    assert len(bench.errors) == reported


def test_batch_failure_of_untried_messages_only_is_refused(bench: PushBench) -> None:
    """An endless loop: nothing failed, so nothing would change."""
    bench.put(b"0")
    with pytest.raises(ConfigError, match="failed"):
        BatchFailure([], bench.broker.read("t", 0, 0).messages)


# --- attempts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "delays_s"),
    [
        (RetryPolicy(9), LEVELS_S),
        (RetryPolicy(4, delays=[0, 2]), [0, 2, 2]),
        (exponential(1, 5, 60, max_attempts=5), [1, 5, 25, 60]),
        (RetryPolicy(1), []),
    ],
    ids=["levels", "custom", "exponential", "one"],
)
def test_repeated_failure_ends_as_one_dead_letter(bench: PushBench, policy: RetryPolicy, delays_s: list[int]) -> None:
    """clients#invariants, and the delays of delivery#backoff."""
    handler, hook = Handler(bench, then=ValueError("always")), Told()
    bench.consumer(handler, retry=policy, interceptors=[hook])
    bench.put(b"m")
    bench.advance(sum(delays_s) + 60)

    assert [attempt for _, attempt in handler.seen] == list(range(1, len(delays_s) + 2))
    assert handler.at_s == pytest.approx([sum(delays_s[:k]) for k in range(len(delays_s) + 1)], abs=0.1)
    assert bench.dead() == [b"m"]
    assert [outcome for _, outcome in hook.settled] == ["retry"] * len(delays_s) + ["dlq"]
    bench.advance(900)
    assert len(handler.seen) == policy.max_attempts
    assert bench.dead() == [b"m"]


# --- what cannot be sent back --------------------------------------------------------------------------------------


def test_unreturnable_message_holds_the_position(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    bench = PushBench(tmp_path, fs=fs, segment_bytes=1 << 14)
    handler = Handler(bench, ValueError("0"), None, None, ValueError("again"))
    consumer = bench.consumer(handler)
    bench.put(*(body * 9_000 for body in (b"0", b"1", b"2")))  # too far away to refer to the first
    fs.fail("allocate", errno.ENOSPC, times=None)
    filling = [b"filling" * 100] * 100
    with pytest.raises(StoreFullError):  # as full as it gets: the copy does not fit any more
        bench.put(*filling, topic="other", queue_id=None)
    bench.settle()

    assert [body[:1] for body, _ in handler.seen] == [b"0", b"1", b"2"]
    assert [type(error) for error in bench.errors] == [ValueError, StoreFullError]
    assert bench.committed() == 0
    assert unsettled(consumer)[T0] == 1

    bench.advance(5)
    assert [body[:1] for body, _ in handler.seen] == [b"0", b"1", b"2", b"0"]
    assert bench.committed() == 0

    fs.heal()
    bench.advance(5)  # this time it succeeds
    assert (handler.seen[-1][0][:1], bench.committed()) == (b"0", 3)
    assert unsettled(consumer)[T0] == 0
    assert bench.dead() == []
    bench.close()


# --- topics --------------------------------------------------------------------------------------------------------


def test_a_batch_of_retries_is_of_one_topic(bench: PushBench) -> None:
    """Both topics' copies lie in one retry queue; a handler was given those of the other, too."""
    bench.broker.topics.create("u", queues=1)
    got: dict[str, list[list[str]]] = {"t": [], "u": []}

    def of(topic: str) -> Callable[[Sequence[Message]], None]:
        def handler(batch: Sequence[Message]) -> None:
            if batch[0].attempt == 1:
                raise ValueError("again")
            got[topic].append([f"{message.topic}{message.text()}" for message in batch])

        return handler

    consumer = bench.consumer(of("t"), batch_size=8, run=False, retry=RetryPolicy(3, delays=[1]))
    consumer.subscribe("u", of("u"))
    for i in range(6):
        bench.put(b"%d" % i, topic="tu"[i % 2])
        bench.put(b"%d" % i, topic="tu"[i % 2])
    consumer.start()
    bench.advance(10)
    for topic in "tu":
        flat = [shown for batch in got[topic] for shown in batch]
        assert sorted(flat) == sorted(2 * [f"{topic}{i}" for i in range(6) if "tu"[i % 2] == topic])


def test_unsubscribing_a_paused_queue_gives_back_what_was_not_begun(bench: PushBench) -> None:
    """A paused consumer keeps its queue."""
    bench.broker.topics.create("u", queues=1)
    seen: list[bytes] = []

    def handler(message: Message) -> None:
        seen.append(message.body)
        consumer.pause()
        consumer.unsubscribe("t")

    consumer = bench.consumer(handler, run=False, workers=1)
    consumer.subscribe("u", lambda message: None)
    bench.put(*(b"%d" % i for i in range(5)))
    consumer.start()
    bench.advance(60)
    assert (seen, bench.committed(), T0 in consumer.assignment()) == ([b"0"], 1, True)
    handled = Handler(bench)
    consumer.subscribe("t", handled)
    bench.advance(1)
    assert [body for body, _ in handled.seen] == [b"%d" % i for i in range(1, 5)]
    assert bench.broker.topics.get(RETRIES) is None  # nothing was ever sent back


# --- what takes long -----------------------------------------------------------------------------------------------


def hang(bench: PushBench, consumer: PushConsumer, seconds: float) -> None:
    """As if the handler that calls this took so long: time passes, and the timer thread does its work."""
    for _ in range(2):  # a call is noticed at one tick and given up at another
        bench.clock.advance(50)
        consumer.run_once()
    bench.clock.advance(round(seconds * 1000))
    consumer.run_once()


@pytest.mark.parametrize("end", ["returns", "rejects"])
def test_overdue_message_is_returned_once(bench: PushBench, end: str) -> None:
    hook, flags = Told(), list[bool]()
    attempts: list[int] = []

    def handler(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt > 1:
            return
        flags.append(cancelled())
        hang(bench, consumer, 30)
        flags.append(cancelled())
        assert bench.committed() == 1  # settled before it ends
        hang(bench, consumer, 30)
        if end != "returns":
            raise Reject("late")

    consumer = bench.consumer(handler, consume_timeout=20, interceptors=[hook])
    bench.put(b"m")
    bench.advance(60)
    assert flags == [False, True]
    assert attempts == [1, 2]
    assert hook.settled == [(b"m", "retry"), (b"m", "ack")]
    assert [body for body, _ in hook.timeouts] == [b"m"]
    assert bench.dead() == []
    assert bench.broker.max_offset(RETRIES, 0) == 1


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_hanging_message_follows_the_policy(bench: PushBench, mode: Any) -> None:
    at_ms = list[int]()

    def handler(message: Message) -> None:
        at_ms.append(bench.clock.now_ms())
        if len(at_ms) == 1:
            hang(bench, consumer, 30)
            at_ms.append(bench.clock.now_ms())

    consumer = bench.consumer(handler, mode=mode, consume_timeout=20, retry=RetryPolicy(5, delays=[300]))
    bench.put(b"m")
    bench.advance(400)
    assert at_ms[2] - at_ms[1] == pytest.approx(300_000, abs=1_000)


def test_a_handler_that_takes_another_s_place_does_so_within_a_chunk(bench: PushBench) -> None:
    """A chunk may hold a thousand messages, of minutes each."""
    after = Handler(bench)
    consumer = bench.consumer(lambda message: consumer.subscribe("t", after), workers=1, run=False)
    bench.put(b"0", b"1", b"2")
    consumer.start()
    bench.settle()
    assert [body for body, _ in after.seen] == [b"1", b"2"]


@pytest.mark.parametrize(("takes_s", "outcome"), [(19.8, "ack"), (30, "dlq")])
def test_last_attempt_is_dead_if_it_hangs_too_long(bench: PushBench, takes_s: float, outcome: str) -> None:
    hook = Told()
    consumer = bench.consumer(
        lambda message: hang(bench, consumer, takes_s), consume_timeout=20, interceptors=[hook], retry=RetryPolicy(1)
    )
    bench.put(b"m")
    bench.advance(60)
    assert hook.settled == [(b"m", outcome)]
    assert len(hook.timeouts) == len(bench.dead()) == (outcome == "dlq")


def test_the_next_call_of_that_worker_counts(bench: PushBench) -> None:
    hook = Told()

    def handler(message: Message) -> None:
        if message.body == b"0" and message.attempt == 1:
            hang(bench, consumer, 30)

    consumer = bench.consumer(handler, consume_timeout=20, interceptors=[hook], workers=1)
    bench.put(b"0", b"1")
    bench.settle()
    assert hook.settled == [(b"0", "retry"), (b"1", "ack")]
    assert bench.committed() == 2


def test_return_of_a_hanging_message_is_repeated(bench: PushBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is void already: were it only noted that this failed, and the handler back by then, nobody would ever
    settle the message, and its queue would stand still."""
    send_back = failing(bench.broker.send_back, NotPermittedError("no"), NotPermittedError("no"))
    monkeypatch.setattr(bench.broker, "send_back", send_back)
    hook, attempts = Told(), list[int]()

    def handler(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt == 1:
            hang(bench, consumer, 30)

    consumer = bench.consumer(handler, consume_timeout=20, interceptors=[hook])
    bench.put(b"m")
    bench.settle()
    assert (bench.committed(), len(bench.errors)) == (0, 1)
    bench.advance(5)
    assert (bench.committed(), len(bench.errors)) == (0, 2)
    bench.advance(5)
    assert bench.committed() == 1
    bench.advance(30)
    assert attempts == [1, 2]
    assert hook.settled == [(b"m", "retry"), (b"m", "ack")]


def test_ticks_end_when_nothing_is_due(bench: PushBench) -> None:
    def fails(message: Message, stack: str) -> None:
        raise SystemExit

    lapses: list[int] = []

    def handler(message: Message) -> None:
        if message.attempt == 1:
            workers_of(consumer).on_exit = lambda error: lapses.append(message.offset)
            hang(bench, consumer, 30)

    consumer = bench.consumer(handler, consume_timeout=20, interceptors=[hook(on_timeout=fails)], workers=1)
    bench.put(b"0")
    bench.settle()
    bench.put(b"1")
    bench.settle()
    assert lapses == [0, 1]
    bench.advance(60)
    due_ms = consumer.run_once()
    assert due_ms is not None
    assert due_ms - bench.clock.monotonic_ms() > 50


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_while_all_workers_are_held_up_invitations_do_not_pile_up(bench: PushBench, mode: Any) -> None:
    """Every tick asked all workers to each chunk again: handlers that took minutes left millions of jobs behind, and
    every pull in the queue after them."""
    most = 0

    def handler(message: Message) -> None:
        nonlocal most
        for _ in range(200):
            bench.clock.advance(50)
            consumer.run_once()
        most = max(most, turns_left(consumer))

    consumer = bench.consumer(handler, workers=4, run=False, mode=mode)
    bench.put(*[b"m"] * 40)
    consumer.start()
    bench.settle()
    assert most <= 3 + 1  # the other workers, and a pull
    assert sum(bench.broker.lag("g").values()) == 0


@pytest.mark.parametrize(
    ("overtaken", "moment_s", "handled"), [(False, 1e9, b"0"), (True, 1e9, b"04123"), (True, 0.0, b"04")]
)
def test_revoked_queue_finishes_only_overtaken_messages(
    bench: PushBench, monkeypatch: pytest.MonkeyPatch, overtaken: bool, moment_s: float, handled: bytes
) -> None:
    """What stands before a later pull that was begun is done for an exact hand-over; but where handlers take seconds,
    `stop` would have waited for hundreds of them."""
    monkeypatch.setattr("mqstore.client.push.concurrent._HAND_OVER_S", moment_s)
    seen: list[bytes] = []

    def halts(message: Message) -> None:
        seen.append(message.body)
        if message.offset == 0:
            if overtaken:
                bench.put(b"4")
                bench.broker.run_once()
                consumer.run_once()  # the second worker, at what was pulled later
            engine_of(consumer).halt()

    consumer = bench.consumer(halts, run=False)
    monkeypatch.setattr("mqstore.client.push.batches.WORTH_MS", 1e9)  # nobody helps with the first pull
    bench.put(b"0", b"1", b"2", b"3")
    consumer.start()
    bench.settle()
    assert b"".join(seen) == handled
    assert bench.committed() == (5 if len(handled) == 5 else 1)


# --- broadcasting --------------------------------------------------------------------------------------------------


def test_broadcasting_passes_over_what_fails(bench: PushBench) -> None:
    hook = Told()
    handler = Handler(bench, ValueError("x"), Reject("y"), Retry(1))
    consumer = bench.consumer(handler, model="broadcasting", client_id="cache", interceptors=[hook])
    bench.put(b"0", b"1", b"2", b"3")
    bench.advance(60)
    assert [body for body, _ in handler.seen] == [b"0", b"1", b"2", b"3"]
    assert [outcome for _, outcome in hook.settled] == ["dlq", "dlq", "dlq", "ack"]
    assert bench.dead() == []
    assert consumer.stats().queues[T0].committed == 4
    assert bench.committed() is None  # the group's progress is no business of it
