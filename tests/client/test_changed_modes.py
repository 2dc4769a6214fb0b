"""A group that changes its mode goes on with what waits for another attempt: nothing of it is stranded in the retry
topic of the mode it had (delivery#send-back, delivery#pop-queues)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Queue, RetryPolicy
from tests.client.pushsupport import PushBench

AGAIN = RetryPolicy(5, [2])
"""Five attempts, two seconds between them."""
Seen = list[tuple[str, bytes, int]]
"""(topic, body, attempt) of each delivery."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[PushBench]:
    bench = PushBench(tmp_path)
    bench.broker.groups.create("g", retry_policy=AGAIN)
    yield bench
    bench.close()


def note(message: mqstore.Message) -> tuple[str, bytes, int]:
    return message.topic, message.body, message.attempt


def push(bench: PushBench, fails: bool, topics: tuple[str, ...] = ("t",), seconds: int = 5, **options: Any) -> Seen:
    """What a push consumer is given in a while."""
    seen: Seen = []

    def handle(message: mqstore.Message) -> None:
        seen.append(note(message))
        if fails:
            raise ValueError("it fails")

    consumer = mqstore.PushConsumer(bench.broker, "g", workers=2, **options)
    for topic in topics:
        consumer.subscribe(topic, handle)
    bench.consumers.append(consumer.start())
    bench.advance(seconds)
    assert consumer.stop()
    bench.consumers.remove(consumer)
    return seen


def pop(bench: PushBench, fails: bool, topics: tuple[str, ...] = ("t",), seconds: int = 5, **options: Any) -> Seen:
    return push(bench, fails, topics, seconds, mode="pop", **options)


def receive(bench: PushBench, fails: bool, topics: tuple[str, ...] = ("t",), seconds: int = 5) -> Seen:
    """What a simple consumer receives in a while."""
    seen: Seen = []
    with mqstore.SimpleConsumer(bench.broker, "g", dict.fromkeys(topics, "*")) as consumer:
        for _ in range(seconds):
            for delivery in consumer.receive(10, wait=0):
                seen.append(note(delivery.message))
                if fails:
                    delivery.nack()
                else:
                    delivery.ack()
            bench.advance(1)
    return seen


def read(bench: PushBench, fails: bool, topics: tuple[str, ...] = ("t",), seconds: int = 5) -> Seen:
    return push(bench, fails, topics, seconds)


Consume = Callable[..., Seen]
CONSUMERS: tuple[Consume, ...] = (read, pop, receive)
OTHER = pytest.mark.parametrize(("before", "after"), [(read, pop), (read, receive), (pop, read), (receive, read)])


def fail_once(bench: PushBench, before: Consume, topics: tuple[str, ...] = ("t",)) -> None:
    """Afterwards a copy of each message waits in the retry topic."""
    assert {attempt for _, _, attempt in before(bench, True, topics, 1)} == {1}
    bench.advance(5)


# --- nothing is stranded ---------------------------------------------------------------------------------------------


@OTHER
@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_failed_message_is_retried_in_the_other_mode(
    bench: PushBench, before: Consume, after: Consume, ordered: bool
) -> None:
    bench.put(b"a", b"b")
    fail_once(bench, before)
    assert sum(bench.broker.lag("g").values()) == 2
    bench.broker.groups.alter("g", orderly=ordered)
    seen = after(bench, False)
    assert [each[:2] for each in sorted(seen)] == [("t", b"a"), ("t", b"b")]
    if not (ordered and after is not read):  # who pops in order counts attempts where the message lies
        assert {attempt for _, _, attempt in seen} == {2}
    assert sum(bench.broker.lag("g").values()) == 0
    assert bench.dead() == []
    for consume in CONSUMERS:
        assert consume(bench, False) == []


@OTHER
def test_attempts_count_on_through_both_modes_up_to_the_dead_letter(
    bench: PushBench, before: Consume, after: Consume
) -> None:
    bench.put(b"a")
    fail_once(bench, before)
    for attempt, consume in ((2, after), (3, before), (4, after)):
        assert consume(bench, True, seconds=1) == [("t", b"a", attempt)]
        bench.advance(5)
    assert before(bench, True) == [("t", b"a", 5)]
    [letter] = bench.broker.dead_letters("g")
    assert letter.body == b"a"
    assert letter.stored_properties()["DLQ_ORIGIN_TOPIC"] == "t"
    assert sum(bench.broker.lag("g").values()) == 0


def test_an_ordered_group_that_read_goes_on_popping_and_back(bench: PushBench) -> None:
    """Its retries are dead letters that were sent again."""
    bench.broker.groups.alter("g", orderly=True, max_attempts=1)
    bench.put(b"a", b"b")
    for before, after in ((read, pop), (pop, read)):
        before(bench, True)
        assert sorted(bench.dead()) == [b"a", b"b"]
        bench.broker.dead_letters("g").replay()
        assert after(bench, False) == [("t", b"a", 1), ("t", b"b", 1)]
        assert sum(bench.broker.lag("g").values()) == 0
        bench.put(b"a", b"b")
    read(bench, False)


def test_a_message_popped_by_an_older_version_s_name_comes_again_by_offset(tmp_path: Path) -> None:
    bench = PushBench(tmp_path, pop_retry_version=1)
    bench.broker.groups.create("g", retry_policy=AGAIN)
    bench.put(b"a")
    fail_once(bench, pop)
    assert bench.broker.topics.get("%RETRY%g_t") is not None
    assert read(bench, False) == [("t", b"a", 2)]
    bench.close()


@pytest.mark.parametrize("made_late", [False, True], ids=["before", "while it runs"])
def test_the_retries_of_a_group_whose_name_looks_like_it_are_left_alone(bench: PushBench, made_late: bool) -> None:
    """`%RETRY%g_t` is group `g_t`'s, though version 1 of pop's retry topic for group `g` and topic `t` is called so."""
    seen: list[bytes] = []
    if not made_late:
        bench.broker.groups.create("g_t", retry_policy=AGAIN)
    mine = bench.consumer(lambda message: seen.append(message.body))
    bench.settle()
    other = bench.consumer(lambda message: 1 / 0, "u", group="g_t", retry=AGAIN)
    bench.put(b"theirs", topic="u")
    bench.advance(3)
    other.stop()
    bench.consumers.remove(other)
    bench.advance(30)
    assert bench.broker.topics.get("%RETRY%g_t") is not None
    assert seen == []
    assert {queue.topic for queue in mine.assignment()} == {"t"}
    assert sum(bench.broker.lag("g_t").values()) == 1


def test_letters_are_replayed_after_a_mode_change(bench: PushBench) -> None:
    """Their retry topic comes into being while the consumer runs."""
    bench.put(b"a")
    with mqstore.SimpleConsumer(bench.broker, "g", {"t": "*"}) as consumer:
        [delivery] = consumer.receive(wait=0)
        delivery.reject("wrong")
    seen: Seen = []
    bench.consumer(lambda message: seen.append(note(message)))
    bench.settle()
    bench.broker.dead_letters("g").replay()
    bench.settle()
    assert seen == [("t", b"a", 1)]


def test_a_receive_that_waits_hears_of_the_retry_topic_of_reading(bench: PushBench) -> None:
    bench.put(b"a")
    assert read(bench, True, seconds=1) == [("t", b"a", 1)]
    with mqstore.SimpleConsumer(bench.broker, "g", {"t": "*"}) as consumer:
        assert consumer.receive(wait=0) == []
        called: list[int] = []
        consumer._when_ready(lambda: called.append(1))
        bench.advance(5)
        assert called == [1]
        [delivery] = consumer.receive(wait=0)
        assert note(delivery.message) == ("t", b"a", 2)
        assert [each.offset for each in consumer.pending()] == [delivery.message.offset]
        delivery.ack()


# --- nobody subscribes any more --------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", CONSUMERS)
@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_retry_of_an_unwanted_topic_ends_dead(
    bench: PushBench, after: Consume, ordered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench.put(b"left", topic="u")
    bench.put(b"a", b"b")
    fail_once(bench, read, ("t", "u"))
    bench.broker.groups.alter("g", orderly=ordered)
    bench.put(b"new")
    caplog.clear()
    seen = after(bench, False, seconds=24)
    assert [each[:2] for each in sorted(seen)] == [("t", b"a"), ("t", b"b"), ("t", b"new")]
    assert ("a retry of topic 'u', to which nobody" in caplog.text) == (ordered and after is read)
    [letter] = bench.broker.dead_letters("g")
    assert letter.body == b"left"
    assert letter.stored_properties()["DLQ_ORIGIN_TOPIC"] == "u"
    assert sum(bench.broker.lag("g").values()) == 0


@pytest.mark.parametrize("after", [pop, receive])
def test_in_order_what_stands_behind_a_retry_that_nobody_pops_comes_once(bench: PushBench, after: Consume) -> None:
    """What was acknowledged behind it came again with it, each time."""
    bench.broker.groups.alter("g", orderly=True)
    for topic, body in (("u", b"left"), ("t", b"a"), ("t", b"b")):
        receipt = bench.broker.put(topic, body, queue_id=0)
        bench.settle()
        bench.broker.send_back("g", receipt.physical_offset, delay=0)
        bench.broker.commit("g", *receipt.queue, bench.broker.max_offset(*receipt.queue))
    bench.settle()
    assert [body for _, body, _ in after(bench, False, seconds=24)] == [b"a", b"b"]
    assert bench.dead() == [b"left"]


@pytest.mark.parametrize("after", [pop, receive])
def test_a_retry_whose_topic_is_subscribed_to_again_is_delivered(bench: PushBench, after: Consume) -> None:
    bench.put(b"a", topic="u")
    fail_once(bench, read, ("t", "u"))
    assert after(bench, False, ("t",), 2) == []
    [(topic, body, attempt)] = after(bench, False, ("t", "u"), 5)
    assert (topic, body) == ("u", b"a")
    assert 2 < attempt < 5


# --- a queue ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [False, True], ids=["unordered", "ordered"])
def test_queue_gets_failed_messages_of_a_push_consumer(tmp_path: Path, ordered: bool) -> None:
    bench = PushBench(tmp_path)
    bench.broker.topics.create("g", queues=1)
    bench.broker.groups.create("g", retry_policy=AGAIN)
    bench.put(b"a", topic="g")
    fail_once(bench, read, ("g",))
    bench.broker.groups.alter("g", orderly=ordered)
    queue = Queue(bench.broker, "g", ordered=ordered)
    assert queue.qsize() == 1
    with queue.get(block=False) as task:
        assert (task.value, task.message.topic, task.attempt) == (b"a", "g", 1 if ordered else 2)
    assert queue.empty()


def test_queue_leaves_retries_of_live_members(tmp_path: Path) -> None:
    bench = PushBench(tmp_path)
    queue = Queue(bench.broker, "g", retry=AGAIN)
    seen: Seen = []

    def handle(message: mqstore.Message) -> None:
        seen.append(note(message))
        if message.attempt == 1:
            raise mqstore.Retry

    consumer = bench.consumer(handle)  # another topic, the same group
    bench.put(b"a")
    bench.settle()
    consumer.pause()
    bench.advance(5)
    assert list(queue) == []
    consumer.resume()
    bench.advance(5)
    assert seen == [("t", b"a", 1), ("t", b"a", 2)]
    bench.close()


# --- positions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [pop, receive])
def test_messages_read_between_pops_are_not_popped(bench: PushBench, first: Consume) -> None:
    """A group that popped went on popping where it had stopped, whatever it had read since."""
    bench.put(b"a")
    assert first(bench, False) == [("t", b"a", 1)]
    bench.put(b"b")
    assert read(bench, False) == [("t", b"b", 1)]
    bench.put(b"c")
    assert first(bench, False) == [("t", b"c", 1)]
    assert read(bench, False) == []


@pytest.mark.parametrize("before", [pop, receive])
def test_popped_messages_in_flight_are_read_once(bench: PushBench, before: Consume) -> None:
    """It was read, and put up for redelivery as well."""
    bench.put(b"a")
    assert before(bench, True, seconds=1) == [("t", b"a", 1)]
    assert read(bench, False, seconds=10) == [("t", b"a", 2)]
    assert sum(bench.broker.lag("g").values()) == 0


@pytest.mark.parametrize("restarts", [False, True])
def test_a_group_that_popped_does_not_read_what_it_acknowledged(bench: PushBench, restarts: bool) -> None:
    """It read again from the first message in flight on. A failed one came before its time."""
    bench.put(*(b"%d" % i for i in range(10)))
    failed, unseen, held, *done = bench.broker.pop("g", "t", 10, invisible=20)
    bench.broker.nack("g", "t", failed.receipt, delay=40)
    bench.broker.release("g", "t", [unseen.receipt])
    bench.broker.ack("g", "t", [each.receipt for each in done])
    if restarts:
        bench.kill()
        bench.open()
    attempts = {failed.message.body: 2, unseen.message.body: 1, held.message.body: 2}
    at_once = [unseen, held] if restarts else [unseen]
    later = [failed] if restarts else [held, failed]
    for seconds, expected in ((10, at_once), (40, later)):
        bodies = [each.message.body for each in expected]
        assert sorted(read(bench, False, seconds=seconds)) == sorted(("t", body, attempts[body]) for body in bodies)


@pytest.mark.parametrize("late", ["ack", "nack"])
def test_late_settlement_repeats_nothing(bench: PushBench, late: str) -> None:
    """The acknowledgement made the group pop again, later, what it had read since."""
    bench.put(b"a")
    with mqstore.SimpleConsumer(bench.broker, "g", {"t": "*"}) as consumer:
        [delivery] = consumer.receive(wait=0, visibility=20)
    seen: list[bytes] = []
    reader = bench.consumer(lambda message: seen.append(message.body))
    bench.settle()
    with suppress(mqstore.errors.ReceiptExpiredError):
        getattr(delivery, late)()
    bench.put(b"b")
    bench.advance(21)
    assert seen == [b"b", b"a"]
    assert reader.stop()
    bench.consumers.clear()
    assert receive(bench, False) == []
