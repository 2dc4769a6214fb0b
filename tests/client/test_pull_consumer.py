"""The consumer that is polled (clients#pull-consumer): positions, commits, sharing, hanging members, waiting.

Time is moved by hand, but for the tests of threads that wait. What a poll returns is compared with what was put; what
is shared by several members, with a model that knows only what was put, what was returned, and who came back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import Message, PullConsumer, QueueRef, SimulatedClock
from mqstore.errors import (
    ConfigError,
    NotPermittedError,
    OffsetOutOfRangeError,
    StoreClosedError,
    StoreIOError,
    SubscriptionConflictError,
    TopicNotFoundError,
)
from tests.client.pushsupport import Told
from tests.client.support import Broker, ended, in_thread, parked, until

Q = [QueueRef("orders", i) for i in range(6)]
LEASE_MS = 60_000
SOON_S = 15
"""Less than the 20 s after which a poll that waits looks by itself."""


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture
def broker(tmp_path: Path, clock: SimulatedClock) -> Iterator[Broker]:
    with mqstore.open(tmp_path / "mq", config=mqstore.StoreConfig(clock=clock)) as store:
        store.create_topic("orders", queues=4)
        yield store.broker


def put(broker: Broker, *texts: str, queue_id: int = 0, topic: str = "orders", **options: Any) -> None:
    for text in texts:
        broker.put(topic, text.encode(), queue_id=queue_id, **options)


def texts(messages: list[Message]) -> list[str]:
    return [message.text() for message in messages]


def subscribed(
    broker: Broker,
    client_id: str = "c1",
    *,
    group: str = "g",
    tags: str = "*",
    on_assign: Any = None,
    on_revoke: Any = None,
    **options: Any,
) -> PullConsumer:
    consumer = PullConsumer(broker, group, client_id=client_id, **options)
    consumer.subscribe("orders", tags=tags, on_assign=on_assign, on_revoke=on_revoke)
    return consumer


def assigned(broker: Broker, *queues: QueueRef, **options: Any) -> PullConsumer:
    consumer = PullConsumer(broker, "g", **options)
    consumer.assign(*queues)
    return consumer


def look(consumer: PullConsumer, max_messages: int | None = None) -> list[str]:
    return texts(consumer.poll(0, max_messages))


def committed(broker: Broker, queue: QueueRef = Q[0], group: str = "g") -> int | None:
    return broker.committed(group, *queue)


# --- what a poll returns -------------------------------------------------------------------------------------------


def test_a_poll_goes_on_where_the_last_one_ended(broker: Broker) -> None:
    put(broker, *"abcde")
    consumer = assigned(broker, Q[0], fetch_max=3)

    assert look(consumer, 1) == ["a"]
    assert consumer.position(Q[0]) == 1
    assert [look(consumer) for _ in range(2)] == [["b", "c", "d"], ["e"]]
    assert look(consumer) == []
    put(broker, "f")
    assert look(consumer) == ["f"]


def test_queues_take_turns_and_an_empty_one_holds_up_nobody(broker: Broker) -> None:
    put(broker, *"abcd", queue_id=0)
    put(broker, *"ABCD", queue_id=3)
    consumer = subscribed(broker)

    assert [look(consumer, 2) for _ in range(5)] == [["a", "b"], ["A", "B"], ["c", "d"], ["C", "D"], []]


def test_a_poll_reads_on_over_more_than_one_read_passes(broker: Broker) -> None:
    broker.put_many("orders", [b"x"] * 70_000, queue_id=0)
    put(broker, "y", tag="yes")
    consumer = subscribed(broker, tags="yes")
    found = [consumer.poll(0) for _ in range(20)]

    assert [texts(each) for each in found if each] == [["y"]]


def test_interceptors_choose_and_hear(broker: Broker) -> None:
    told = Told(b"b")
    put(broker, *"bab")
    with subscribed(broker, interceptors=[told], auto_commit_interval=0) as consumer:
        assert look(consumer) == ["a"]
        assert consumer.position(Q[0]) == 3
        put(broker, "b")
        assert look(consumer) == []  # all left out: done with
        broker.reset("g", "orders", 0, 2)
        look(consumer)
    assert told.news == [("assign", *Q[:4]), ("reset", Q[0], 4, 2), ("revoke", *Q[:4])]
    assert committed(broker) == 4


# --- where a group begins ------------------------------------------------------------------------------------------


# --- commits -------------------------------------------------------------------------------------------------------


def test_poll_commits_earlier_polls_by_interval(broker: Broker, clock: SimulatedClock) -> None:
    put(broker, *"abcdef")
    consumer = subscribed(broker)
    look(consumer, 1)
    clock.advance(4999)
    look(consumer, 1)
    assert committed(broker) == 0
    clock.advance(1)
    look(consumer, 1)  # returns c: nobody knows what becomes of it
    assert committed(broker) == 2
    look(consumer, 1)
    assert committed(broker) == 2
    clock.advance(5000)
    look(consumer, 1)
    assert committed(broker) == 4


@pytest.mark.parametrize(
    ("close", "done"),
    [
        (lambda consumer: consumer.__exit__(None, None, None), 2),
        (lambda consumer: consumer.__exit__(ValueError, ValueError(), None), 1),
        (lambda consumer: consumer.close(done=False), 1),
        (lambda consumer: ended(*in_thread(consumer.close)), 1),
    ],
    ids=["clean", "an exception", "not done", "another thread"],
)
def test_closing_commits_what_is_known_to_be_done(
    broker: Broker, close: Callable[[PullConsumer], None], done: int
) -> None:
    put(broker, *"abc")
    consumer = subscribed(broker)
    look(consumer, 1)
    look(consumer, 1)
    close(consumer)

    assert committed(broker) == done


def test_manual_commit_is_the_only_one(broker: Broker, clock: SimulatedClock) -> None:
    put(broker, *"abcd")
    with subscribed(broker, auto_commit=False) as consumer:
        look(consumer, 2)
        clock.advance(10_000)
        look(consumer, 1)
        assert committed(broker) == 0
        consumer.commit()
        assert committed(broker) == consumer.committed(Q[0]) == 3
        look(consumer, 1)
    assert committed(broker) == 3


def test_offsets_can_be_committed_one_by_one(broker: Broker) -> None:
    put(broker, *"abcd")
    put(broker, *"AB", queue_id=1)
    consumer = subscribed(broker, auto_commit=False)
    look(consumer)
    consumer.commit({Q[0]: 2})

    assert [committed(broker, queue) for queue in Q[:2]] == [2, 0]
    for wrong in ({Q[1]: 1, Q[0]: 5}, {Q[1]: 1, Q[0]: -1}, {Q[1]: 1, Q[0]: True}):
        with pytest.raises(OffsetOutOfRangeError):
            consumer.commit(wrong)
    with pytest.raises(ConfigError, match="not this consumer's"):
        consumer.commit({Q[1]: 1, Q[5]: 0})
    with pytest.raises(ConfigError, match="durability"):
        consumer.commit(durability="disk")  # type: ignore[arg-type]
    assert [committed(broker, queue) for queue in Q[:2]] == [2, 0]


def test_a_commit_can_be_on_disk_when_it_returns(broker: Broker, tmp_path: Path) -> None:
    put(broker, *"abcd")
    consumer = subscribed(broker, auto_commit=False)
    look(consumer, 3)
    consumer.commit(durability="flush")

    assert '"0": 3' in (tmp_path / "mq" / "config" / "consumerOffset.json").read_text()


def test_failed_commit_of_a_queue_stops_no_other(broker: Broker) -> None:
    put(broker, "a", topic="bills")
    put(broker, "b")
    consumer = PullConsumer(broker, "g", auto_commit=False)
    consumer.subscribe("bills", "orders")
    assert sorted(look(consumer)) == ["a", "b"]
    broker.topics.delete("bills", force=True)

    with pytest.raises(TopicNotFoundError):
        consumer.commit()
    assert committed(broker) == 1


# --- the loop ------------------------------------------------------------------------------------------------------


def test_loop_commits_the_previous_message(broker: Broker) -> None:
    put(broker, *"abcde")
    seen = []
    with subscribed(broker) as consumer:
        for message in consumer:
            seen.append(message.text())
            assert consumer.position(Q[0]) == message.offset + 1
            if message.text() == "c":
                break

    assert seen == ["a", "b", "c"]
    assert committed(broker) == 3  # though more had been read


def test_a_commit_in_the_loop_covers_what_the_loop_has_given(broker: Broker) -> None:
    put(broker, *"abcde")
    consumer = subscribed(broker, auto_commit=False)
    for message in consumer:
        consumer.commit()
        assert committed(broker) == message.offset + 1
        if message.text() == "d":
            break
    assert look(consumer) == ["e"]


def test_the_loop_ends_when_the_consumer_is_closed(broker: Broker) -> None:
    put(broker, *"abc")
    consumer = subscribed(broker)
    seen = []
    for message in consumer:
        seen.append(message.text())
        consumer.close()

    assert seen == ["a"]
    assert committed(broker) == 1


def test_a_seek_in_the_loop_forgets_what_was_read_ahead(broker: Broker) -> None:
    put(broker, *"abcde")
    consumer = subscribed(broker)
    seen = []
    for message in consumer:
        seen.append(message.text())
        if seen == ["a", "b"]:
            consumer.seek(Q[0], 4)
        if seen == ["a", "b", "e"]:
            consumer.seek(Q[0], 1)
        if len(seen) == 5:
            break

    assert seen == ["a", "b", "e", "b", "c"]


def test_a_pause_in_the_loop_holds_back_what_was_read_ahead(broker: Broker) -> None:
    put(broker, *"abc")
    put(broker, *"AB", queue_id=1)
    consumer = subscribed(broker)
    seen = []
    for message in consumer:
        seen.append(message.text())
        if len(seen) == 1:
            consumer.pause(Q[0])
        if len(seen) == 3:
            consumer.resume()
        if len(seen) == 5:
            break

    assert seen == ["a", "A", "B", "b", "c"]


# --- moving about --------------------------------------------------------------------------------------------------


def test_all_queues_can_be_paused(broker: Broker) -> None:
    put(broker, *"ab")
    consumer = subscribed(broker)
    consumer.poll(0, 1)
    consumer.pause()
    assert look(consumer) == []
    consumer.resume()
    assert look(consumer) == ["b"]


def test_a_reset_before_it_begins_is_no_surprise(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    put(broker, *"abcd")
    broker.groups.create("g")
    broker.reset("g", "orders", 0, 2)

    assert look(subscribed(broker)) == ["c", "d"]
    assert caplog.text == ""


def test_missing_offset_continues_at_the_first(broker: Broker) -> None:
    told = Told()
    put(broker, *"abc")
    consumer = subscribed(broker, interceptors=[told])
    look(consumer, 1)
    broker.topics.delete("orders", force=True)
    assert look(consumer) == []
    broker.topics.create("orders", queues=4)
    put(broker, "d")

    assert look(consumer) == ["d"]
    assert told.news[1:] == [("reset", Q[0], 1, 3)]


def test_a_read_that_fails_is_tried_again_and_keeps_nothing_of_the_others(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for queue_id, text in enumerate("abcd"):
        put(broker, text, queue_id=queue_id)
    read = broker.read
    bad = [2]

    def fail(topic: str, queue_id: int, *arguments: Any, **options: Any) -> Any:
        if queue_id in bad:
            raise StoreIOError(5, "Input/output error", "00000000000000000000", "read")
        return read(topic, queue_id, *arguments, **options)

    monkeypatch.setattr(broker, "read", fail)
    consumer = subscribed(broker)
    seen: list[str] = []
    failures = 0
    for _ in range(6):
        try:
            seen += look(consumer)
        except StoreIOError:
            failures += 1
    assert sorted(seen) == ["a", "b", "d"]
    assert failures >= 2
    bad.clear()
    assert look(consumer) == ["c"]


# --- misuse --------------------------------------------------------------------------------------------------------


def test_to_subscribe_and_to_assign_exclude_each_other(broker: Broker) -> None:
    with pytest.raises(ConfigError, match="assign"):
        subscribed(broker).assign(Q[0])
    consumer = assigned(broker, Q[0])
    with pytest.raises(ConfigError, match="subscribe"):
        consumer.subscribe("orders")
    assert consumer.assignment() == {Q[0]}


def test_assigning_what_is_not_there_changes_nothing(broker: Broker) -> None:
    consumer = assigned(broker, Q[0])
    with pytest.raises(ConfigError):
        consumer.assign(Q[1], QueueRef("orders", 4))
    with pytest.raises(TopicNotFoundError):
        consumer.assign(Q[1], QueueRef("nothing", 0))

    assert consumer.assignment() == {Q[0]}
    assert committed(broker, Q[1]) in (None, 0)


def test_a_poll_needs_something_to_poll(broker: Broker) -> None:
    consumer = PullConsumer(broker, "g")
    for call in (consumer.subscribe, lambda: consumer.poll(0), lambda: next(iter(consumer))):
        with pytest.raises(ConfigError, match="subscribe"):
            call()
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="max_messages"):
            consumer.poll(0, wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="timeout"):
        consumer.poll(-1)
    for name in ("position", "pause", "resume"):
        with pytest.raises(ConfigError, match="not this consumer's"):
            getattr(consumer, name)(Q[0])
    with pytest.raises(ConfigError, match="not this consumer's"):
        consumer.seek(Q[0], 0)


def test_closed_consumer_raises(broker: Broker) -> None:
    consumer = subscribed(broker)
    look(consumer)
    consumer.close()
    consumer.close()

    calls: list[Callable[[], object]] = [
        lambda: consumer.poll(0),
        lambda: consumer.subscribe("orders"),
        lambda: consumer.unsubscribe(),
        lambda: consumer.assign(Q[0]),
        lambda: consumer.commit(),
        lambda: consumer.seek(Q[0], 0),
        lambda: consumer._when_ready(print),
    ]
    for call in calls:
        with pytest.raises(StoreClosedError):
            call()
    assert list(consumer) == []
    assert "closed" in repr(consumer)


def test_a_consumer_outlives_its_store_harmlessly(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    put(broker, "a")
    consumer = subscribed(broker)
    look(consumer)
    broker.close()
    with pytest.raises(StoreClosedError):
        consumer.poll(0)
    consumer.close()

    assert "are redelivered" in caplog.text


def test_a_poll_within_what_a_poll_calls_is_refused(broker: Broker) -> None:
    consumer = subscribed(broker, on_assign=lambda queues: consumer.poll(0))
    with pytest.raises(ConfigError, match="poll was called"):
        consumer.poll(0)
    assert consumer.assignment() == set(Q[:4])
    assert look(consumer) == []


# --- several members -----------------------------------------------------------------------------------------------


def test_a_consumer_that_has_not_polled_keeps_nobody_from_anything(broker: Broker) -> None:
    subscribed(broker, "c0")

    assert broker.members.members("g") == []
    consumer = subscribed(broker, "c1")
    look(consumer)
    assert consumer.assignment() == set(Q[:4])


def test_a_queue_goes_over_where_it_was_left(broker: Broker) -> None:
    for queue_id in range(4):
        put(broker, *"abcdef", queue_id=queue_id)
    first = subscribed(broker, "c1")
    seen = [first.poll(0, 3) for _ in range(4)]
    second = subscribed(broker, "c2")
    assert second.poll(0) == []  # the first one does not know yet
    seen.append(first.poll(0, 1))
    assert first.assignment() == {Q[0], Q[1]}
    seen += [second.poll(0, 100), first.poll(0, 100)]

    everything = [(message.queue.queue_id, message.text()) for each in seen for message in each]
    assert len(everything) == len(set(everything)) == 24
    assert second.assignment() == {Q[2], Q[3]}


def test_poll_calls_on_assign_and_on_revoke(broker: Broker) -> None:
    told: list[tuple[str, set[int]]] = []

    def note(what: str) -> Callable[[frozenset[QueueRef]], None]:
        return lambda queues: told.append((what, {queue.queue_id for queue in queues}))

    first = subscribed(broker, on_assign=note("assign"), on_revoke=note("revoke"))
    assert told == []
    look(first)
    second = subscribed(broker, "c2")
    look(second)
    assert told == [("assign", {0, 1, 2, 3})]
    look(first)
    assert told[1:] == [("revoke", {2, 3})]
    look(second)
    second.close()
    look(first)
    assert told[2:] == [("assign", {2, 3})]
    first.close()
    assert told[3:] == [("revoke", {0, 1, 2, 3})]


def test_on_revoke_may_commit(broker: Broker) -> None:
    put(broker, *"abc", queue_id=3)
    first = subscribed(broker, auto_commit=False, on_revoke=lambda queues: first.commit({Q[3]: 2}))
    look(first)
    second = subscribed(broker, "c2", auto_commit=False)
    look(second)
    look(first)

    assert look(second) == ["c"]


def test_on_assign_may_seek(broker: Broker) -> None:
    put(broker, *"abc")
    consumer = PullConsumer(broker, "g")

    def to_the_end(queues: frozenset[QueueRef]) -> None:
        for queue in queues:
            consumer.seek(queue, "latest")

    consumer.subscribe("orders", on_assign=to_the_end)
    assert look(consumer) == []
    put(broker, "d")
    assert look(consumer) == ["d"]


def test_error_of_on_revoke_is_raised_after_release(broker: Broker) -> None:
    def fail(queues: frozenset[QueueRef]) -> None:
        raise ZeroDivisionError

    first = subscribed(broker, on_revoke=fail)
    look(first)
    second = subscribed(broker, "c2")
    look(second)
    with pytest.raises(ZeroDivisionError):
        look(first)
    look(second)
    assert second.assignment() == {Q[2], Q[3]}
    look(first)
    assert first.assignment() == {Q[0], Q[1]}
    with pytest.raises(ZeroDivisionError):
        first.close()
    look(second)
    assert second.assignment() == set(Q[:4])


def test_error_of_on_revoke_delays_nothing(broker: Broker) -> None:
    def fail(queues: frozenset[QueueRef]) -> None:
        raise ZeroDivisionError

    put(broker, "A", topic="bills")
    consumer = subscribed(broker, on_revoke=fail)
    look(consumer)
    consumer.subscribe("bills")
    consumer.unsubscribe("orders")
    with pytest.raises(ZeroDivisionError):
        look(consumer)

    assert look(consumer) == ["A"]


def test_closing_in_what_a_poll_calls_leaves_nothing_behind(broker: Broker) -> None:
    put(broker, "a")
    consumer = subscribed(broker, on_assign=lambda queues: consumer.close())

    assert look(consumer) == []
    assert broker.locks.snapshot() == []
    assert broker.members.members("g") == []


def test_closing_when_a_queue_goes_takes_nothing_any_more(broker: Broker) -> None:
    first = subscribed(broker, on_revoke=lambda queues: first.close())
    look(first)
    second = subscribed(broker, "c2")
    look(second)
    assert look(first) == []
    look(second)

    assert second.assignment() == set(Q[:4])
    second.close()
    assert broker.locks.snapshot() == []


def test_a_consumer_without_topics_leaves_its_group(broker: Broker) -> None:
    put(broker, "a")
    consumer = subscribed(broker)
    assert look(consumer) == ["a"]
    consumer.unsubscribe()
    assert broker.members.members("g") == []
    assert committed(broker) == 1
    with pytest.raises(ConfigError):
        consumer.poll(0)


def test_assigned_queues_can_be_exchanged_and_positions_stay(broker: Broker) -> None:
    put(broker, *"ab")
    put(broker, *"AB", queue_id=1)
    consumer = assigned(broker, Q[0])
    look(consumer, 1)
    consumer.assign(Q[0], Q[1])
    assert look(consumer) == ["b", "A", "B"]
    consumer.assign(Q[1])
    assert committed(broker) == 2
    assert consumer.assignment() == {Q[1]}
    assert broker.members.members("g") == []
    assert broker.locks.snapshot() == []


def test_manual_reader_commits_nothing_for_members(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    put(broker, *"ab")
    member = subscribed(broker, "c1")
    assert look(member, 1) == ["a"]
    other = assigned(broker, Q[0], auto_commit_interval=0)
    assert look(other) == ["a", "b"]
    with pytest.raises(NotPermittedError):
        other.commit()
    assert look(other) == []
    assert "was not committed" in caplog.text
    assert committed(broker) == 0


def test_new_queues_are_shared_at_once(broker: Broker) -> None:
    first, second = subscribed(broker, "c1"), subscribed(broker, "c2")
    for _ in range(2):
        look(first), look(second)
    broker.topics.alter("orders", read_queues=6, write_queues=6)
    for queue_id in range(6):
        put(broker, str(queue_id), queue_id=queue_id)
    seen = [look(second), look(first), look(second)]

    assert sorted(text for each in seen for text in each) == list("012345")
    assert (first.assignment(), second.assignment()) == (frozenset(Q[:3]), frozenset(Q[3:]))


# --- members that hang ---------------------------------------------------------------------------------------------


def test_absent_member_loses_its_queues(broker: Broker, clock: SimulatedClock) -> None:
    revoked: list[frozenset[QueueRef]] = []
    put(broker, *"abcd")
    first = subscribed(broker, auto_commit_interval=0, on_revoke=revoked.append)
    assert look(first, 1) == ["a"]
    assert look(first, 1) == ["b"]
    second = subscribed(broker, "c2", auto_commit_interval=0)
    clock.advance(LEASE_MS)
    assert look(second) == []
    clock.advance(1)
    assert look(second) == []  # it has just asked
    clock.advance(20_000)
    assert look(second, 2) == ["b", "c"]  # b was returned once, but nobody came back for more
    look(second, 1)
    assert committed(broker) == 3
    second.close()  # and leaves: the queue is free again

    with pytest.raises(NotPermittedError, match="orders/0"):
        first.commit()
    assert committed(broker) == 4
    assert look(first) == []
    assert revoked == [frozenset(Q[:4])]
    assert first.position(Q[0]) == 4
    first.close()
    assert committed(broker) == 4


def test_a_lock_that_nobody_gives_back_is_taken_within_a_second_of_its_end(
    broker: Broker, clock: SimulatedClock
) -> None:
    broker.locks.try_lock("g", Q[3], "somebody")
    consumer = subscribed(broker)
    for _ in range(61):
        look(consumer)
        assert consumer.assignment() == set(Q[:3])
        clock.advance(1000)
    look(consumer)

    assert consumer.assignment() == set(Q[:4])


def test_a_queue_that_was_lost_is_taken_as_soon_as_it_is_free(broker: Broker, clock: SimulatedClock) -> None:
    consumer = subscribed(broker)
    look(consumer)
    broker.locks.unlock_batch("g", [Q[3]], "c1")  # as if it had run out
    broker.locks.try_lock("g", Q[3], "somebody")
    clock.advance(1000)
    look(consumer)
    assert consumer.assignment() == set(Q[:3])
    broker.locks.unlock_batch("g", [Q[3]], "somebody")
    look(consumer)

    assert consumer.assignment() == set(Q[:4])


def test_queues_that_come_and_go_do_not_put_off_commits(broker: Broker, clock: SimulatedClock) -> None:
    put(broker, *"abc")
    first = subscribed(broker, "c1")
    look(first, 1)
    look(first, 1)
    clock.advance(4000)
    second = subscribed(broker, "c2")
    look(second), look(first), look(second)
    assert committed(broker) == 0
    clock.advance(1000)
    look(first)

    assert committed(broker) == 3


def test_absent_member_that_closes_takes_nothing_back(broker: Broker, clock: SimulatedClock) -> None:
    put(broker, *"abcd")
    first = subscribed(broker, "c1")
    look(first, 1)
    clock.advance(LEASE_MS + 1)
    with subscribed(broker, "c2") as second:
        assert look(second) == ["a", "b", "c", "d"]
    first.close()

    assert committed(broker) == 4
    assert broker.members.members("g") == []
    assert broker.locks.snapshot() == []


def test_absent_member_that_disagrees_can_close(broker: Broker, clock: SimulatedClock) -> None:
    put(broker, *"abcd", tag="paid")
    first = subscribed(broker, "c1")
    look(first, 1)
    clock.advance(LEASE_MS + 1)
    second = subscribed(broker, "c2", tags="paid")
    assert look(second, 3) == ["a", "b", "c"]
    with pytest.raises(SubscriptionConflictError):
        first.poll(0)
    first.close()
    second.close()

    assert committed(broker) == 3


def test_a_poll_that_waits_keeps_the_locks(broker: Broker, clock: SimulatedClock) -> None:
    consumer = subscribed(broker)
    look(consumer)
    ready = threading.Event()
    for _ in range(6):
        consumer._when_ready(ready.set)
        clock.advance(19_999)
        broker.run_once()
        assert not ready.is_set()
        clock.advance(1)
        broker.run_once()
        assert ready.is_set()
        ready.clear()
        look(consumer)
    assert broker.locks.try_lock("g", Q[0], "c2") is False


# --- waiting without a thread --------------------------------------------------------------------------------------


def test_present_message_calls_back(broker: Broker) -> None:
    consumer = subscribed(broker)
    calls: list[int] = []
    consumer._when_ready(lambda: calls.append(1))  # a poll would join the group
    assert calls == [1]
    look(consumer)
    put(broker, "a")
    consumer._when_ready(lambda: calls.append(2))
    broker.run_once()
    assert calls == [1, 2]


def test_a_callback_that_is_cancelled_is_not_called(broker: Broker) -> None:
    consumer = subscribed(broker)
    look(consumer)
    calls: list[int] = []
    ready = consumer._when_ready(lambda: calls.append(1))
    ready.cancel()
    ready.cancel()
    assert parked(broker) == 0
    put(broker, "a")
    broker.run_once()
    consumer.close()

    assert calls == []


NEWS: dict[str, Callable[[Broker, PullConsumer, SimulatedClock], object]] = {
    "messages": lambda broker, consumer, clock: (put(broker, "a", queue_id=2), put(broker, "b", queue_id=3)),
    "a due commit": lambda broker, consumer, clock: clock.advance(5000),
    "seek": lambda broker, consumer, clock: consumer.seek(Q[0], 0),
    "resume": lambda broker, consumer, clock: consumer.resume(Q[0]),
    "close": lambda broker, consumer, clock: consumer.close(),
    "subscribe": lambda broker, consumer, clock: consumer.subscribe("bills"),
    "queues": lambda broker, consumer, clock: broker.topics.alter("orders", read_queues=5),
    "member": lambda broker, consumer, clock: look(subscribed(broker, "c2")),
    "reset": lambda broker, consumer, clock: broker.reset("g", "orders", 0, 0),
}


@pytest.mark.parametrize("kind", NEWS)
def test_news_of_every_kind_call_once(broker: Broker, clock: SimulatedClock, kind: str) -> None:
    put(broker, "a")
    consumer = subscribed(broker)
    look(consumer)
    look(consumer)
    consumer.pause(Q[1])
    calls: list[int] = []
    consumer._when_ready(lambda: calls.append(1))
    broker.run_once()
    assert calls == []
    NEWS[kind](broker, consumer, clock)
    broker.run_once()

    assert calls == [1]
    assert parked(broker) == 0


def test_a_topic_that_is_gone_does_not_call_again_and_again(broker: Broker) -> None:
    put(broker, *"ab")
    consumer = subscribed(broker)
    look(consumer, 1)
    broker.topics.delete("orders", force=True)
    look(consumer)
    calls: list[int] = []
    consumer._when_ready(lambda: calls.append(1))
    broker.run_once()

    assert calls == []


def test_a_callback_that_fails_harms_nobody(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    consumer = subscribed(broker)
    look(consumer)
    consumer._when_ready(lambda: 1 // 0)
    look(subscribed(broker, "c2"))

    assert "ZeroDivisionError" in caplog.text


# --- threads that wait ---------------------------------------------------------------------------------------------


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Broker]:
    """A broker with its threads, by the machine's clock."""
    with mqstore.open(tmp_path / "live") as store:
        store.create_topic("orders", queues=4)
        yield store.broker


def polling(broker: Broker, consumer: PullConsumer) -> tuple[threading.Thread, list[Any]]:
    """A thread that waits in a poll, for as long as it takes."""
    thread = in_thread(lambda: texts(consumer.poll(None)))
    until(lambda: parked(broker))
    return thread


def test_closing_between_the_look_and_the_wait_is_noticed(live: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = subscribed(live)
    look(consumer)
    read, ring = live.read, consumer._ring
    threads: list[threading.Thread] = []
    rung = threading.Event()

    def ring_and_tell() -> None:
        ring()
        rung.set()

    def read_and_be_closed(*arguments: Any, **options: Any) -> Any:
        found = read(*arguments, **options)
        if not threads:
            threads.append(threading.Thread(target=consumer.close))
            threads[0].start()
            assert rung.wait(30)  # whoever waits was told: but we do not wait yet
        return found

    monkeypatch.setattr(live, "read", read_and_be_closed)
    monkeypatch.setattr(consumer, "_ring", ring_and_tell)

    assert ended(*in_thread(lambda: consumer.poll(None)), SOON_S) == []
    threads[0].join(30)
    assert live.members.members("g") == []


def test_waiting_member_hands_over(live: Broker) -> None:
    first, second = subscribed(live, "c1"), subscribed(live, "c2")
    one, two = polling(live, first), polling(live, second)
    until(lambda: (first.assignment(), second.assignment()) == (frozenset(Q[:2]), frozenset(Q[2:4])))
    put(live, "a", queue_id=0)
    put(live, "b", queue_id=3)

    assert (ended(*one, SOON_S), ended(*two, SOON_S)) == (["a"], ["b"])


def test_a_poll_gives_up_when_its_time_is_over(live: Broker) -> None:
    assert subscribed(live).poll(0.02) == []


def test_a_store_closes_its_consumers_and_claims_nothing_for_them(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "mq") as store:
        store.create_topic("orders", queues=1)
        for text in "abc":
            store.put("orders", text.encode())
        consumer = store.pull_consumer("g", fetch_max=1)
        consumer.subscribe("orders")
        assert texts(consumer.poll(0) + consumer.poll(0)) == ["a", "b"]

    assert "closed" in repr(consumer)
    with mqstore.open(tmp_path / "mq") as store:
        assert store.committed("g", Q[0]) == 1
