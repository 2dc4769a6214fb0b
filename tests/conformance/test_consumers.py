"""The promises that every kind of consumer keeps: deliver, settle, fail, retry, dead letter, order, share, restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest

from mqstore import DeliveryResult, Interceptor, Message, Reject, Retry
from tests.conformance.consumers import KINDS, HandlerError, World, kinds

every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
retrying = pytest.mark.parametrize("kind", kinds(lambda kind: kind.family != "pull"), ids=str)
"""A pull consumer counts no attempts: it goes back to an offset."""
in_groups = pytest.mark.parametrize("kind", kinds(lambda kind: kind.family != "queue"), ids=str)
"""A `Queue` is its only group, takes all, and begins with the first."""


def done(message: Message) -> None:
    """Handle a message."""


def fail(message: Message) -> None:
    raise HandlerError(message.text())


def failing(*texts: str, error: Callable[[], Exception] = HandlerError) -> Callable[[Message], None]:
    """Return a handler that fails at messages with these texts."""

    def handle(message: Message) -> None:
        if message.text() in texts:
            raise error()

    return handle


class Picky(Interceptor):
    """Leaves out messages with the text "no", and notes the outcomes of the others, and of calls of a handler."""

    def __init__(self) -> None:
        self.settled: list[tuple[str, str]] = []
        self.calls: list[tuple[str, str, list[str], str]] = []

    def on_receive(self, messages: list[Message]) -> list[Message]:
        return [message for message in messages if message.text() != "no"]

    def on_settle(self, message: Message, outcome: str, seconds: float) -> None:
        self.settled.append((message.text(), outcome))

    def after_consume(self, consumed: DeliveryResult) -> None:
        texts = [message.text() for message in consumed.messages]
        self.calls.append((consumed.group, consumed.topic, texts, consumed.outcome))


# -- deliver and settle -----------------------------------------------------------------------------------------------


@every_kind
def test_messages_are_delivered_once_in_order(world: World) -> None:
    consumer = world.consumer()
    world.put("a", "b")
    assert consumer.handle() == [("a", 1), ("b", 1)]
    world.put("c")
    assert consumer.handle() == [("c", 1)]
    world.advance(100)
    assert consumer.handle() == []
    consumer.close()
    assert (world.lag(), world.dead()) == (0, [])


@every_kind
def test_message_arrives_as_it_was_sent_each_time(world: World) -> None:
    seen: list[Message] = []

    def look(message: Message) -> None:
        seen.append(message)
        if world.kind.family != "pull":
            fail(message)

    consumer = world.consumer()
    world.put("a", tag="red", keys=["k1", "k2"], properties={"color": "blue"}, unique_key="u")
    consumer.handle(look)
    world.advance(10)
    consumer.handle(look)
    assert (seen[0].queue_id, seen[0].offset) == (0, 0)
    for message in seen:
        assert (message.topic, message.body, message.tag) == (world.topic, b"a", "red")
        assert (list(message.keys), message.properties["color"], message.unique_key) == (["k1", "k2"], "blue", "u")
    assert [message.attempt for message in seen] == [1, 2][: len(seen)]
    assert len(seen) == 1 + (world.kind.family != "pull")


@pytest.mark.parametrize("kind", kinds(lambda kind: not (kind.family == "queue" and kind.ordered)), ids=str)
def test_all_queues_of_a_topic_are_consumed(world: World) -> None:
    world.store.create_topic(world.topic, queues=4)
    consumer = world.consumer()
    for number in range(12):
        world.put(f"{number % 4}{number // 4}", queue_id=number % 4)
    texts = [text for text, _ in consumer.handle()]
    assert [[text[1] for text in texts if text[0] == str(queue)] for queue in range(4)] == [["0", "1", "2"]] * 4


@in_groups
def test_message_that_an_interceptor_leaves_out_is_done(world: World) -> None:
    picky = Picky()
    consumer = world.consumer(interceptors=[picky])
    world.put("no", "a", "no", "no", "b")
    assert consumer.handle() == [("a", 1), ("b", 1)]
    world.advance(200)
    assert consumer.handle() == []
    consumer.close()
    assert world.lag() == 0
    assert picky.settled == [("a", "ack"), ("b", "ack")] * (world.kind.family != "pull")


@in_groups
def test_hooks_that_fail_stop_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Interceptor):
        def on_receive(self, messages: list[Message]) -> list[Message]:
            raise RuntimeError("mine")

        def on_settle(self, message: Message, outcome: str, seconds: float) -> None:
            raise RuntimeError("mine")

        def after_consume(self, consumed: DeliveryResult) -> None:
            raise RuntimeError("mine")

    after = Picky()
    consumer = world.consumer(interceptors=[Broken(), after])
    for text in "abc":
        world.put(text)
        assert consumer.handle() == [(text, 1)]
    assert after.settled == [(text, "ack") for text in "abc"] * (world.kind.family != "pull")
    assert [end for *_, end in after.calls] == ["success"] * 3 * (world.kind.family == "push")
    lines = [line for line in caplog.messages if "Broken." in line]
    assert len(lines) == {"pull": 1, "simple": 2, "push": 3}[world.kind.family]
    assert all("group crew" in line for line in lines)
    consumer.close()
    assert "more were held back" in caplog.text
    assert world.lag() == 0


# -- fail, retry, dead letter -----------------------------------------------------------------------------------------


@retrying
def test_failed_message_is_retried_after_each_pause_then_dead(world: World) -> None:
    consumer = world.consumer()
    world.put("a")
    for attempt, pause_s in ((1, 10), (2, 20)):
        assert consumer.handle(fail) == [("a", attempt)]
        world.advance(pause_s - 0.1)
        assert consumer.handle(fail) == []
        world.advance(0.1)
    assert consumer.handle(fail) == [("a", 3)]
    world.advance(100)
    assert consumer.handle() == []
    [(text, reason)] = world.dead()
    assert text == "a"
    assert "HandlerError: a" in reason
    assert [letter.attempt for letter in world.store.dead_letters(world.group)] == [3]
    assert world.lag() == 0


@retrying
def test_handler_sets_the_pause_or_rejects(world: World) -> None:
    notes = Picky()
    consumer = world.consumer(**({} if world.kind.family == "queue" else {"interceptors": [notes]}))
    world.put("a", "b")
    assert consumer.handle(failing("a", error=lambda: Reject("no such customer"))) == [("a", 1), ("b", 1)]
    assert world.dead() == [("a", "no such customer")]
    assert [letter.attempt for letter in world.store.dead_letters(world.group)] == [1]
    world.advance(100)
    assert consumer.handle() == []
    world.put("c")
    assert consumer.handle(failing("c", error=lambda: Retry(5))) == [("c", 1)]
    world.advance(4.9)
    assert consumer.handle() == []
    world.advance(0.1)
    assert consumer.handle() == [("c", 2)]
    outcomes = [("a", "dlq"), ("b", "ack"), ("c", "retry"), ("c", "ack")]
    assert sorted(notes.settled) == ([] if world.kind.family == "queue" else sorted(outcomes))
    ends = [("a", "reject"), ("b", "success"), ("c", "retry"), ("c", "success")]
    calls = [("crew", "work", [text], end) for text, end in ends]
    assert notes.calls == (calls if world.kind.family == "push" else [])


@retrying
def test_failure_holds_up_its_queue_only_in_order(world: World) -> None:
    consumer = world.consumer()
    world.put("a", "b", "c")
    handled = consumer.handle(failing("a"))
    world.advance(10)
    handled += consumer.handle()
    last = [("a", 2), ("b", 1), ("c", 1)] if world.kind.in_order else [("b", 1), ("c", 1), ("a", 2)]
    assert handled == [("a", 1), *last]


@pytest.mark.parametrize("kind", kinds(lambda kind: kind.ordered and kind.family != "queue"), ids=str)
def test_failure_holds_up_no_other_queue(world: World) -> None:
    world.store.create_topic(world.topic, queues=2)
    consumer = world.consumer()
    world.put("a0", "a1")
    world.put("b0", "b1", queue_id=1)
    assert sorted(consumer.handle(failing("a0"))) == [("a0", 1), ("b0", 1), ("b1", 1)]
    world.advance(10)
    assert consumer.handle() == [("a0", 2), ("a1", 1)]


@retrying
def test_replayed_dead_letter_is_a_new_message_of_its_group(world: World) -> None:
    other = world.store.simple_consumer("audit", {world.topic: "*"})
    consumer = world.consumer()
    world.put("a")
    for delivery in other.receive(wait=0):
        delivery.ack()
    letters = world.store.dead_letters(world.group)
    for _ in range(2):  # one that fails again is a letter again
        assert consumer.handle(failing("a", error=Reject)) == [("a", 1)]
        assert len(letters) == 1
        assert letters.replay().topics == {world.topic: 1}
    consumer.close()
    consumer = world.consumer()
    assert consumer.handle() == [("a", 1)]
    assert world.dead() == []
    assert other.receive(wait=0) == []


@retrying
def test_delayed_message_is_delivered_when_due(world: World) -> None:
    consumer = world.consumer()
    world.put("later", delay=30)
    world.put("now")
    assert consumer.handle() == [("now", 1)]
    world.advance(29)
    assert consumer.handle() == []
    world.advance(2)
    assert consumer.handle() == [("later", 1)]


# -- restart ----------------------------------------------------------------------------------------------------------


@every_kind
def test_reopened_store_delivers_the_rest(world: World) -> None:
    consumer = world.consumer()
    world.put("a", "b")
    assert consumer.handle() == [("a", 1), ("b", 1)]
    consumer.close()
    world.put("c", "d")
    world.reopen()
    assert world.consumer().handle() == [("c", 1), ("d", 1)]


@retrying
def test_attempts_and_pauses_outlive_a_reopening(world: World) -> None:
    consumer = world.consumer()
    world.put("a")
    assert consumer.handle(fail) == [("a", 1)]
    world.advance(2)
    consumer.close()
    world.reopen()
    consumer = world.consumer()
    if not (world.kind.ordered and world.kind.commits):  # its pause is in memory: nobody else has the queue
        world.advance(7)
        assert consumer.handle(fail) == []
    world.advance(1)
    assert consumer.handle(fail) == [("a", 2)]
    world.advance(20)
    consumer.close()
    world.reopen()
    assert world.consumer().handle(fail) == [("a", 3)]
    assert [text for text, _ in world.dead()] == ["a"]


@pytest.mark.parametrize("kind", kinds(lambda kind: kind.family == "queue"), ids=str)
def test_message_put_before_its_queue_exists_is_delivered(world: World) -> None:
    world.store.create_topic(world.topic, queues=1)
    world.put("a")
    world.reopen()
    assert world.consumer().handle() == [("a", 1)]


# -- any outcomes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds(lambda kind: kind.family != "pull" and not kind.aio), ids=str)
def test_each_message_ends_done_or_dead_once(world: World) -> None:
    """Random outcomes and pauses. Each message ends after its first success, its rejection, or its third failure."""
    random = Random(str(world.kind))
    ends: Counter[tuple[str, str]] = Counter()
    attempts: dict[str, int] = {}

    def handle(message: Message) -> None:
        text, attempt = message.text(), message.attempt
        assert attempt == attempts.get(text, 0) + 1
        attempts[text] = attempt
        outcome = random.choice(("done", "done", "fail", "retry", "reject"))
        if outcome in ("fail", "retry"):
            if attempt == 3:
                ends[text, "dead"] += 1
            raise HandlerError if outcome == "fail" else Retry(random.randrange(5))
        ends[text, "done" if outcome == "done" else "dead"] += 1
        if outcome == "reject":
            raise Reject

    consumer = world.consumer()
    for number in range(20):
        world.put(str(number))
        consumer.handle(handle)
        world.advance(random.randrange(12))
        if number % 8 == 7:
            consumer.close()
            world.reopen()
            consumer = world.consumer()
    while world.lag():
        world.advance(20)
        consumer.handle(handle)
    assert sorted(text for text, _ in ends) == sorted(map(str, range(20)))
    assert set(ends.values()) == {1}
    assert sorted(text for text, _ in world.dead()) == sorted(text for text, end in ends if end == "dead")
