"""A group's settings belong to the group: what consumers take from it, what they give it, when they are refused
(clients#group)."""

from __future__ import annotations

import asyncio
import errno
import logging
from pathlib import Path
from typing import Any

import pytest

import mqstore
import mqstore.aio
from mqstore import QueueRef, RetryPolicy
from mqstore.errors import ConfigError, GroupInUseError, SubscriptionConflictError
from tests.client.aiosupport import in_store
from tests.client.pushsupport import PushBench
from tests.faults import FaultyFileSystem

# --- where a group begins --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_group", "given", "expected"),
    [
        ("earliest", None, [b"old", b"new"]),
        ("latest", None, []),
        ("latest", "earliest", [b"old", b"new"]),
        (1_700_000_030_000, None, [b"new"]),
        (None, "latest", []),
    ],
)
def test_broadcasting_begins_where_it_or_its_group_says(
    bench: PushBench, of_group: Any, given: Any, expected: list[bytes]
) -> None:
    """tests/conformance has the others."""
    seen: list[bytes] = []
    bench.put(b"old")
    bench.advance(60)
    bench.put(b"new")
    if of_group is not None:
        bench.broker.groups.create("g", start=of_group)
    bench.consumer(lambda message: seen.append(message.body), model="broadcasting", client_id="c1", start=given)
    bench.settle()
    assert seen == expected
    assert bench.broker.groups.require("g").start == (of_group or given)


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_push_consumer_follows_the_group_order(bench: PushBench, mode: Any) -> None:
    bench.broker.groups.create("g", orderly=True)
    bench.consumer(mode=mode)
    assert bench.broker.members.mode("g")[:2] == (mode, True)


def test_a_group_that_came_in_order_meanwhile_is_refused_at_start(bench: PushBench) -> None:
    consumer = bench.consumer(run=False)
    bench.broker.groups.create("g", orderly=True)
    with pytest.raises(ConfigError, match="ordered=True"):
        consumer.start()
    bench.broker.groups.alter("g", orderly=False)
    consumer.start()


# --- the retry policy ------------------------------------------------------------------------------------------------

THREE, FOUR = RetryPolicy(3), RetryPolicy(4)


def joined(bench: PushBench, mode: str, group: str = "g", topic: str = "t", **options: Any) -> Any:
    """A member of the group, that consumes so."""
    if mode == "simple":
        return mqstore.SimpleConsumer(bench.broker, group, {topic: "*"}, **options)
    return bench.consumer(group=group, topic=topic, mode=mode, **options)


MODES = pytest.mark.parametrize("mode", ["queue", "pop", "simple"])


@MODES
@pytest.mark.parametrize("there", [None, FOUR], ids=["a new group", "a group"])
def test_the_policy_that_a_consumer_asks_for_becomes_its_groups(
    bench: PushBench, caplog: pytest.LogCaptureFixture, mode: str, there: RetryPolicy | None
) -> None:
    if there is not None:
        bench.broker.groups.create("g", retry_policy=there)
    with caplog.at_level(logging.INFO, logger="mqstore"):
        for _ in range(2):
            joined(bench, mode, retry=THREE)
    assert bench.broker.groups.require("g").retry_policy == THREE
    if there is not None:
        [line] = [record.getMessage() for record in caplog.records if "retry policy" in record.getMessage()]
        assert line == "group g: retry policy changed to 3 attempts, standard (was 4, standard)"


@MODES
@pytest.mark.parametrize("asked", [None, FOUR], ids=["who asked for none", "who asked for four"])
def test_beside_live_members_another_policy_is_refused(bench: PushBench, mode: str, asked: RetryPolicy | None) -> None:
    bench.broker.groups.create("g", retry_policy=FOUR)
    first = joined(bench, mode, retry=asked)
    with pytest.raises(GroupInUseError) as caught:
        joined(bench, mode, retry=THREE)
    assert "3 attempts" in str(caught.value)
    assert "4 attempts" in str(caught.value)
    assert bench.broker.groups.require("g").retry_policy == FOUR
    assert bench.broker.members.members("g") == [first.client_id]
    joined(bench, mode, retry=FOUR)
    joined(bench, mode)


@pytest.mark.parametrize(
    ("options", "settings", "forbidden"),
    [
        ({"mode": "pop"}, {"consume_enable": False}, False),
        ({"mode": "pop"}, {}, True),
        ({"mode": "simple"}, {"consume_enable": False}, False),
        ({"mode": "simple"}, {}, True),
        (
            {"mode": "queue", "model": "broadcasting", "client_id": "c1", "ordered": True},
            {"consume_broadcast_enable": False, "orderly": True},
            False,
        ),
    ],
    ids=["pop", "pop, the topic", "simple", "simple, the topic", "queue, broadcasting"],
)
def test_a_consumer_that_is_not_permitted_changes_nothing(
    bench: PushBench, options: dict[str, Any], settings: dict[str, Any], forbidden: bool
) -> None:
    """Its policy became the group's before it was refused."""
    bench.broker.groups.create("g", retry_policy=FOUR, **settings)
    if forbidden:
        bench.broker.groups.forbid("g", "t")
    told: list[str] = []
    bench.broker.members.on_change.append(told.append)
    before = listeners(bench.broker)
    for _ in range(2):
        with pytest.raises(mqstore.errors.NotPermittedError):
            joined(bench, retry=THREE, **options)
    assert bench.broker.groups.require("g").retry_policy == FOUR
    assert (bench.broker.members.members("g"), told, listeners(bench.broker)) == ([], [], before)


@pytest.mark.parametrize("mode", ["pop", "simple"])
def test_a_consumer_that_does_not_agree_begins_in_no_queue(bench: PushBench, mode: str) -> None:
    """A group that begins in a topic has its messages kept."""
    bench.broker.topics.create("other")
    joined(bench, mode)
    with pytest.raises(SubscriptionConflictError):
        joined(bench, mode, topic="other")
    assert bench.committed(topic="other") is None


# --- the policy of a queue -------------------------------------------------------------------------------------------


@MODES
def test_a_queue_agrees_with_the_live_members_of_its_group(bench: PushBench, mode: str) -> None:
    """It replaced the policy that they retry by."""
    bench.broker.topics.create("one", queues=1)
    bench.broker.groups.create("one", retry_policy=FOUR)
    live = joined(bench, mode, "one", "one")
    with pytest.raises(GroupInUseError, match="4 attempts"):
        mqstore.Queue(bench.broker, "one", retry=THREE)
    assert bench.broker.groups.require("one").retry_policy == FOUR
    mqstore.Queue(bench.broker, "one", retry=FOUR)
    mqstore.Queue(bench.broker, "one")
    live.__exit__(None, None, None)
    mqstore.Queue(bench.broker, "one", retry=THREE)
    assert bench.broker.groups.require("one").retry_policy == THREE


@pytest.mark.parametrize("retries", [(THREE, None), (FOUR, THREE)])
def test_queues_of_one_name_are_no_members_and_the_last_policy_holds(
    bench: PushBench, retries: tuple[RetryPolicy | None, RetryPolicy | None]
) -> None:
    one, other = (mqstore.Queue(bench.broker, "jobs", retry=retry) for retry in retries)
    assert bench.broker.groups.require("jobs").retry_policy == THREE
    one.put(b"a")
    assert other.get(timeout=0).value == b"a"


# --- strategies ------------------------------------------------------------------------------------------------------


def mine(client_id: str, queues: Any, members: Any) -> Any:
    return queues if client_id == members[0] else ()


def pull(bench: PushBench, strategy: Any) -> None:
    consumer = mqstore.PullConsumer(bench.broker, "g", strategy=strategy)
    consumer.subscribe("t")
    consumer.poll(0)


def push(bench: PushBench, strategy: Any) -> None:
    bench.consumer(strategy=strategy)


@pytest.mark.parametrize("join", [push, pull])
@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ("avg", "circle", ("'avg'", "'circle'")),
        ("avg", mine, ("'avg'", f"'{__name__}.mine'")),
        (mine, mqstore.fixed_queues([("t", 0)]), (f"'{__name__}.mine'", "fixed_queues")),
    ],
    ids=["avg and circle", "avg and a function", "two functions"],
)
def test_members_that_divide_queues_differently_are_refused(
    bench: PushBench, join: Any, one: Any, other: Any, names: tuple[str, str]
) -> None:
    """Two strategies in one group left queues that nobody had."""
    join(bench, one)
    with pytest.raises(GroupInUseError) as caught:
        join(bench, other)
    assert all(name in str(caught.value) for name in names)
    assert len(bench.broker.members.members("g")) == 1


def test_members_with_fixed_queues_agree_whatever_they_list(bench: PushBench) -> None:
    bench.broker.topics.create("two", queues=2)
    both = [bench.consumer(topic="two", strategy=mqstore.fixed_queues([("two", i), ("%RETRY%g", i)])) for i in range(2)]
    bench.settle()
    assert [consumer.assignment() for consumer in both] == [{QueueRef("two", 0)}, {QueueRef("two", 1)}]


# --- a start that failed ---------------------------------------------------------------------------------------------


def listeners(broker: Any) -> list[int]:
    """How many listen to the broker's tables."""
    return [len(each) for each in (broker.members.on_change, broker.topics.on_change, broker.locks.on_release)]


@pytest.mark.parametrize("mode", ["queue", "pop"])
@pytest.mark.parametrize(
    ("options", "error"),
    [({"tags": "other"}, SubscriptionConflictError), ({"client_id": "c1"}, GroupInUseError)],
    ids=["subscription", "client id"],
)
def test_a_start_that_was_refused_may_be_tried_again(
    bench: PushBench, mode: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    bench.put(b"a", tag="other")
    first = bench.consumer(lambda message: None, mode=mode, client_id="c1")
    seen: list[bytes] = []
    second = bench.consumer(lambda message: seen.append(message.body), mode=mode, run=False, **options)
    before = listeners(bench.broker)
    for _ in range(2):
        with pytest.raises(error):
            second.start()
        assert listeners(bench.broker) == before
        assert bench.broker.members.members("g") == ["c1"]
    first.stop()
    second.start()
    bench.settle()
    assert seen == [b"a"]
    assert second.stop()
    assert bench.broker.members.members("g") == []


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_a_start_on_a_full_disk_may_be_tried_again(tmp_path: Path, mode: Any) -> None:
    """The policy cannot be written, so the consumer is no member, and the group has the policy that it had."""
    fs = FaultyFileSystem()
    bench = PushBench(tmp_path, fs=fs)
    bench.broker.groups.create("g", retry_policy=FOUR)
    bench.put(b"a")
    seen: list[bytes] = []
    consumer = bench.consumer(lambda message: seen.append(message.body), mode=mode, run=False, retry=THREE)
    before = listeners(bench.broker)
    fs.fail("pwrite", errno.ENOSPC, path_part="subscriptionGroup")
    with pytest.raises(mqstore.errors.StoreFullError):
        consumer.start()
    assert (listeners(bench.broker), bench.broker.members.members("g")) == (before, [])
    assert bench.broker.groups.require("g").retry_policy == FOUR
    fs.heal()
    consumer.start()
    bench.settle()
    assert (seen, bench.broker.groups.require("g").retry_policy) == ([b"a"], THREE)
    bench.close()


def test_pause_survives_a_failed_start(bench: PushBench) -> None:
    bench.put(b"a")
    first = bench.consumer(client_id="c1")
    seen: list[bytes] = []
    second = bench.consumer(lambda message: seen.append(message.body), run=False, mode="pop")
    second.pause()
    with pytest.raises(GroupInUseError):
        second.start()
    first.stop()
    bench.put(b"b")
    second.start()
    bench.settle()
    assert seen == []
    second.resume()
    bench.settle()
    assert seen == [b"a", b"b"]


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_paused_new_consumer_starts_at_latest(bench: PushBench, mode: Any) -> None:
    seen: list[bytes] = []
    bench.put(b"old")
    consumer = bench.consumer(lambda message: seen.append(message.body), run=False, mode=mode, start="latest")
    consumer.pause()
    consumer.start()
    bench.put(b"new")
    bench.settle()
    consumer.resume()
    bench.settle()
    assert seen == [b"new"]


def test_consumer_stopped_by_a_hook_stays_stopped(bench: PushBench) -> None:
    """`on_error` is told in the middle of `start` that a queue cannot be begun, and stops the consumer."""
    bench.broker.groups.create("g", consume_enable=False)
    consumer = bench.consumer(run=False, on_error=lambda error, message: consumer.stop())
    with pytest.raises(mqstore.errors.StoreClosedError):
        consumer.start()
    bench.broker.groups.alter("g", consume_enable=True)
    with pytest.raises(mqstore.errors.StoreClosedError):
        consumer.start()
    assert consumer.stop()
    assert bench.broker.members.members("g") == []


@in_store
async def test_an_async_consumer_takes_from_its_group_and_starts_again_too(store: mqstore.aio.Store) -> None:
    groups = store.sync.broker.groups
    groups.create("g", orderly=True, start="latest")
    await store.put("t", b"old")
    consumer = await store.push_consumer("g", workers=1)
    seen, done = [], asyncio.Event()

    @consumer.subscribe("t")
    async def handle(message: mqstore.Message) -> None:
        seen.append(message.body)
        done.set()

    in_the_way = store.sync.push_consumer("g", mode="pop")
    in_the_way.subscribe("t", print)
    in_the_way.start()
    for enter in (consumer.start, consumer.__aenter__, consumer.run):
        with pytest.raises(GroupInUseError):
            await enter()
    in_the_way.stop()
    async with consumer:
        await store.put("t", b"new")
        await asyncio.wait_for(done.wait(), 20)
    assert seen == [b"new"]
    async with store.simple_consumer("g") as simple:
        assert simple.ordered
