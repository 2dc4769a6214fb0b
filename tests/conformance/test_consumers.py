"""The promises that every kind of consumer keeps: deliver, settle, fail, retry, dead letter, order, share, restart."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import Any

import pytest

from mqstore import DeliveryResult, Interceptor, Message, QueueRef, Reject, Retry
from mqstore.errors import (
    ConfigError,
    FilterError,
    GroupInUseError,
    InvalidMessageError,
    NotPermittedError,
    OffsetOutOfRangeError,
    SubscriptionConflictError,
)
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
def test_each_group_gets_every_message(world: World) -> None:
    first = world.consumer()
    world.group = "other"
    second = world.consumer()
    world.put("a", "b")
    assert first.handle() == second.handle() == [("a", 1), ("b", 1)]


@every_kind
def test_members_of_a_group_share_the_messages(world: World) -> None:
    queues = 1 if world.kind.family == "queue" and world.kind.ordered else 4
    world.store.create_topic(world.topic, queues=queues)
    members = [world.consumer(), world.consumer()]
    handled: list[tuple[str, int]] = []
    for number in range(40):
        world.put(str(number), queue_id=number % queues)
        handled += members[number % 2].handle()
        world.advance(1)
    for _ in range(3):  # each may wait for a queue of the other
        for member in members:
            handled += member.handle()
        world.advance(30)
    assert sorted(handled) == sorted((str(number), 1) for number in range(40))


@in_groups
def test_only_messages_with_the_tags_or_properties_are_delivered(world: World) -> None:
    consumer = world.consumer(tags="red || green")
    for tag in ("red", "blue", "green", None):
        world.put(str(tag), tag=tag)
    assert consumer.handle() == [("red", 1), ("green", 1)]
    consumer.subscribe(sql="price > 5")
    world.put("5", properties={"price": "5"})
    world.put("6", properties={"price": "6"})
    assert consumer.handle() == [("6", 1)]
    consumer.close()
    assert world.lag() == 0


@in_groups
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"topic": "a b"}, InvalidMessageError),
        ({"topic": "rmq_sys_wheel_timer"}, NotPermittedError),
        ({"tags": "price > 5"}, FilterError),
        ({"tags": "\t "}, FilterError),  # a group would pass over all, and nobody would know why
        ({"sql": "price >"}, FilterError),
        ({"tags": "a", "sql": "price > 5"}, ConfigError),
    ],
)
def test_wrong_subscription_is_refused(world: World, options: dict[str, str], error: type[Exception]) -> None:
    consumer = world.consumer(tags="red")
    consumer.handle()
    before = world.store.broker.members.subscriptions(world.group)
    with pytest.raises(error):
        consumer.subscribe(**options)
    assert world.store.broker.members.subscriptions(world.group) == before


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


@in_groups
def test_members_of_a_group_consume_alike(world: World) -> None:
    """Another kind of member is refused, and the group stays as it is."""
    world.store.create_topic(world.topic, queues=1)
    groups = world.store.broker.groups
    first = world.consumer(client_id="c1")
    first.handle()
    settings = groups.require(world.group)
    for error, options in ((GroupInUseError, {"client_id": "c1"}), (SubscriptionConflictError, {"tags": "red"})):
        with pytest.raises(error):
            world.consumer(start="latest", **options).handle()
    other = world.store.push_consumer(world.group, mode="pop" if world.kind.commits else "queue")
    other.subscribe(world.topic, print)
    with pytest.raises(GroupInUseError):
        other.start()
    assert groups.require(world.group) == settings
    second = world.consumer()
    second.handle()
    with pytest.raises(SubscriptionConflictError):
        second.subscribe("red")
    world.put("a")
    assert [*first.handle(), *second.handle()] == [("a", 1)]
    first.close()
    second.subscribe("red")
    world.put("b")
    world.put("c", tag="red")
    assert second.handle() == [("c", 1)]
    second.close()
    if world.kind.family != "pull":  # it has no order, or this one
        with pytest.raises(ConfigError, match=f"ordered={world.kind.ordered}"):
            world.consumer(ordered=not world.kind.ordered)


@in_groups
@pytest.mark.parametrize("who", ["consumer", "group", "consumer before group"])
def test_group_begins_at_the_start_that_was_said(world: World, who: str) -> None:
    groups = world.store.broker.groups
    world.put("old")
    world.advance(100)
    world.put("new")
    between = datetime.fromtimestamp(1.7e9 + 50, UTC)
    starts: dict[Any, list[str]] = {"earliest": ["old", "new", "last"], "latest": ["last"], between: ["new", "last"]}
    consumers, handled = [], []
    for world.group, start in zip("abc", starts, strict=True):
        kept = 1_700_000_050_000 if start is between else start
        if who != "consumer":
            kept = kept if who == "group" else "latest"
            groups.create(world.group, start=kept, orderly=world.kind.ordered)
        consumers.append(world.consumer(**({} if who == "group" else {"start": start})))
        handled.append(consumers[-1].handle())
        assert groups.require(world.group).start == kept
    world.put("last")
    for consumer, before, expected in zip(consumers, handled, starts.values(), strict=True):
        assert [text for text, _ in before + consumer.handle()] == expected


@in_groups
@pytest.mark.parametrize("start", ["earliest", "latest"])
def test_topic_that_comes_later_is_consumed_from_its_first_message(
    world: World, start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mqstore"):
        consumer = world.consumer(start=start)
        assert consumer.handle() == []
        world.advance(60)
        assert consumer.handle() == []
    assert caplog.text.count("topic 'work' is not there") == 1
    world.put("a")
    world.put("b", queue_id=3)
    assert sorted(consumer.handle()) == [("a", 1), ("b", 1)]


@in_groups
def test_messages_of_queues_that_come_later_are_all_consumed(world: World) -> None:
    world.store.create_topic(world.topic, queues=1)
    world.put("old")
    consumer = world.consumer(start="latest")
    assert consumer.handle() == []
    world.store.broker.topics.alter(world.topic, read_queues=3, write_queues=3, force=True)
    for queue_id in range(3):
        world.put(str(queue_id), queue_id=queue_id)
    assert sorted(consumer.handle()) == [("0", 1), ("1", 1), ("2", 1)]


@in_groups
def test_topics_come_and_go_while_it_runs(world: World) -> None:
    world.put("a")
    world.store.put("more", b"0", queue_id=0)
    consumer = world.consumer()
    assert consumer.handle() == [("a", 1)]
    consumer.subscribe(topic="more")
    world.store.put("more", b"1", queue_id=0)
    assert consumer.handle() == [("0", 1), ("1", 1)]
    subscriptions = world.store.broker.members.subscriptions
    assert subscriptions(world.group).keys() >= {world.topic, "more"}
    consumer.unsubscribe("more")
    consumer.unsubscribe("nothing")
    world.store.put("more", b"2", queue_id=0)
    world.put("b")
    assert consumer.handle() == [("b", 1)]
    assert "more" not in subscriptions(world.group)
    consumer.subscribe(topic="more")
    consumer.unsubscribe(world.topic)
    world.put("c")
    assert consumer.handle() == [("2", 1)]
    consumer.close()
    assert world.lag() == 1


@pytest.mark.parametrize("kind", kinds(lambda kind: kind.family == "push"), ids=str)
def test_messages_of_an_unsubscribed_topic_have_not_failed(world: World) -> None:
    """They were sent back one by one, and ended among the dead letters."""
    consumer = world.consumer()
    consumer.subscribe(topic="more")
    world.put("a", "b", "c")
    assert consumer.handle(lambda message: consumer.consumer.unsubscribe(world.topic)) == [("a", 1)]
    world.advance(60)
    assert consumer.handle() == world.dead() == []
    consumer.subscribe()
    assert consumer.handle() == [("b", 1), ("c", 1)]
    consumer.close()
    assert world.lag() == 0


@every_kind
def test_reset_group_continues_at_its_new_offset(world: World) -> None:
    consumer = world.consumer()
    world.put("a", "b", "c")
    assert len(consumer.handle()) == 3
    reset = world.store.broker.reset
    reset(world.group, world.topic, 0, 1)
    assert consumer.handle() == [("b", 1), ("c", 1)]
    reset(world.group, world.topic, 0, 2)
    consumer.close()  # which commits nothing that was before
    assert world.consumer().handle() == [("c", 1)]


# -- offsets ----------------------------------------------------------------------------------------------------------

owners = pytest.mark.parametrize("kind", kinds(lambda kind: kind.commits), ids=str)
"""Consumers that own queues."""


@owners
def test_seek_moves_to_an_offset_or_a_time(world: World) -> None:
    world.store.create_topic(world.topic, queues=1)
    queue = QueueRef(world.topic, 0)
    world.put("0", "1")
    world.advance(60)
    when = datetime.fromtimestamp(world.clock.now_ms() / 1000, UTC)
    world.put("2", "3")
    consumer = world.consumer()
    seek = partial(world.run, consumer.consumer.seek)
    assert len(consumer.handle()) == 4
    for to, first in ((1, 1), ("earliest", 0), ("latest", 4), (when, 2), (4, 4)):
        seek(queue, to)
        assert [text for text, _ in consumer.handle()] == list("0123"[first:])
    for outside in (-1, 5):
        with pytest.raises(OffsetOutOfRangeError) as raised:
            seek(queue, outside)
        assert (raised.value.min_offset, raised.value.max_offset) == (0, 4)
    for where, to in ((queue, "first"), (queue, None), (queue, 1.5), (queue, True), (QueueRef(world.topic, 1), 0)):
        with pytest.raises(ConfigError):
            seek(where, to)
    seek(queue, 1)
    consumer.close()
    assert world.lag() == 3  # the caller has ordered it


@owners
def test_paused_queue_is_kept_and_not_consumed(world: World) -> None:
    world.store.create_topic(world.topic, queues=2)
    first, second = (QueueRef(world.topic, queue_id) for queue_id in range(2))
    consumer = world.consumer()
    assert consumer.handle() == []
    world.run(consumer.consumer.pause, first)
    world.put("a")
    world.put("A", queue_id=1)
    handled = consumer.handle()
    for _ in range(4):  # nor is it taken for silent or lost
        world.advance(50)
        handled += consumer.handle()
    assert handled == [("A", 1)]
    assert {first, second} <= world.run(consumer.consumer.assignment)
    world.run(consumer.consumer.resume, first)
    assert consumer.handle() == [("a", 1)]


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
