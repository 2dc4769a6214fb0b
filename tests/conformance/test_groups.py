"""Members of a group: each kind of consumer gets its share, its topics and the group's offsets."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from functools import partial
from itertools import product
from typing import Any

import pytest

from mqstore import QueueRef
from mqstore.errors import (
    ConfigError,
    FilterError,
    GroupInUseError,
    InvalidMessageError,
    NotPermittedError,
    OffsetOutOfRangeError,
    SubscriptionConflictError,
)
from tests.conformance.consumers import KINDS, World, kinds

every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
in_groups = pytest.mark.parametrize("kind", kinds(lambda kind: kind.family != "queue"), ids=str)
"""A `Queue` is its only group, takes all, and begins with the first."""
owners = pytest.mark.parametrize("kind", kinds(lambda kind: kind.commits), ids=str)
"""Consumers that own queues."""


# -- groups ------------------------------------------------------------------------------------------------------------


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
    for number in range(12):
        world.put(str(number), queue_id=number % queues)
        handled += members[number % 2].handle()
        world.advance(1)
    for _ in range(3):  # each may wait for a queue of the other
        for member in members:
            handled += member.handle()
        world.advance(30)
    assert sorted(handled) == sorted((str(number), 1) for number in range(12))


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
def test_group_begins_at_the_start_that_was_said(world: World) -> None:
    """By the consumer, by the group's settings, or by the consumer although the settings say another."""
    groups = world.store.broker.groups
    world.put("old")
    world.advance(100)
    world.put("new")
    between = datetime.fromtimestamp(1.7e9 + 50, UTC)
    starts: dict[Any, list[str]] = {"earliest": ["old", "new", "last"], "latest": ["last"], between: ["new", "last"]}
    handled = []
    for who, (start, expected) in product(("consumer", "group", "consumer before group"), starts.items()):
        world.group = f"group-{len(handled)}"
        kept = 1_700_000_050_000 if start is between else start
        if who != "consumer":
            kept = kept if who == "group" else "latest"
            groups.create(world.group, start=kept, orderly=world.kind.ordered)
        consumer = world.consumer(**({} if who == "group" else {"start": start}))
        handled.append((consumer, consumer.handle(), expected))
        assert groups.require(world.group).start == kept
    world.put("last")
    for consumer, before, expected in handled:
        assert [text for text, _ in before + consumer.handle()] == expected


# -- subscriptions -----------------------------------------------------------------------------------------------------


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


WRONG: list[tuple[type[Exception], dict[str, str]]] = [
    (InvalidMessageError, {"topic": "a b"}),
    (NotPermittedError, {"topic": "rmq_sys_wheel_timer"}),
    (FilterError, {"tags": "price > 5"}),
    (FilterError, {"tags": "\t "}),  # a group would pass over all, and nobody would know why
    (FilterError, {"sql": "price >"}),
    (ConfigError, {"tags": "a", "sql": "price > 5"}),
]


@in_groups
def test_wrong_subscription_is_refused(world: World) -> None:
    consumer = world.consumer(tags="red")
    consumer.handle()
    before = world.store.broker.members.subscriptions(world.group)
    for error, options in WRONG:
        with pytest.raises(error):
            consumer.subscribe(**options)
        assert world.store.broker.members.subscriptions(world.group) == before


@in_groups
def test_topic_that_comes_later_is_consumed_from_its_first_message(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    consumers = []
    with caplog.at_level(logging.INFO, "mqstore"):
        for world.group in ("earliest", "latest"):
            consumers.append(world.consumer(start=world.group))
            assert consumers[-1].handle() == []
        world.advance(60)
        assert [consumer.handle() for consumer in consumers] == [[], []]
    assert caplog.text.count("topic 'work' is not there") == 2
    world.put("a")
    world.put("b", queue_id=3)
    for consumer in consumers:
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


# -- offsets -----------------------------------------------------------------------------------------------------------


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
