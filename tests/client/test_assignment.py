"""Which queues a push consumer has, and what it pulls of them (clients#subscription)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mqstore import BatchFailure, Interceptor, Message, PushConsumer, QueueRef, Retry
from mqstore.errors import ConfigError, GroupInUseError, StoreBusyError
from tests.client.pushsupport import (
    PushBench,
    Told,
    engine_of,
    fail_outside_of_handlers,
    hook,
    pulls,
    unsettled,
)
from tests.client.support import failing, parked

T0, T1 = QueueRef("t", 0), QueueRef("t", 1)


class Seen(list[bytes]):
    """The bodies that a handler was given."""

    def __call__(self, message: Message) -> None:
        self.append(message.body)


def place(bench: PushBench, index: int = 0) -> str:
    [where] = pulls(bench.consumers[index])[T0]
    return where


def stick(bench: PushBench) -> Any:
    """From now on nothing that fails can be sent back; what ends that."""

    def send_back(*args: Any, **kwargs: Any) -> None:
        raise OSError("no")

    real, bench.broker.send_back = bench.broker.send_back, send_back  # type: ignore[method-assign,assignment]
    return lambda: setattr(bench.broker, "send_back", real)


# --- filters -------------------------------------------------------------------------------------------------------


def test_range_that_an_interceptor_skips_keeps_unsettled_messages(bench: PushBench) -> None:
    free = stick(bench)
    consumer = bench.consumer(lambda message: 1 / 0, interceptors=[Told(b"b")])
    bench.put(b"a", tag="A")
    bench.settle()
    bench.put(b"b", b"b", tag="B")
    bench.advance(4)
    bench.put(b"b", tag="B")
    bench.advance(2.5)
    assert consumer.stats().queues[T0].cached.next_offset > 1
    assert bench.committed() == 0
    free()
    bench.advance(30)
    assert bench.committed() == 4


def test_interceptor_order_does_not_move_the_position(bench: PushBench) -> None:
    """Messages that it gave back in another order became the order of the cache, whose first one is the position: that
    was committed, and after a crash the others were gone."""

    committed: list[int | None] = []
    reverses = hook(on_receive=lambda messages: [each for each in messages[::-1] if each.body != b"3"])
    bench.put(b"0", b"1", b"2", b"3")
    bench.consumer(lambda batch: committed.append(bench.committed()), batch_size=2, workers=1, interceptors=[reverses])
    bench.settle()
    assert committed[0] == 0
    assert bench.committed() == 4


# --- gates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "stuck", "pulled"),
    [({"prefetch": 4}, 40, 4), ({"prefetch_bytes": 600}, 40, None), ({"max_span": 4}, 1, 5)],
    ids=["messages", "bytes", "span"],
)
def test_a_full_cache_is_not_added_to_until_there_is_room(
    bench: PushBench, limit: dict[str, int], stuck: int, pulled: int | None
) -> None:
    """A span is that of what a crash would bring again: one message that is stuck bounds it, be
    all behind it done."""

    free = stick(bench)

    def handler(message: Message) -> None:
        if message.attempt == 1 and message.offset < stuck:
            raise Retry(0)

    consumer = bench.consumer(handler, **limit)
    for _ in range(40):
        bench.put(b"m" * 50)
        bench.settle()
    assert place(bench) == "full"
    if pulled is None:
        size = bench.broker.read("t", 0, 0, 1).messages[0].size
        pulled = -(-600 // size)
    assert consumer.stats().queues[T0].cached.next_offset == pulled
    free()
    bench.advance(10)
    assert bench.committed() == 40
    assert place(bench) == "waiting"


@pytest.mark.parametrize(
    ("span", "options", "every"),
    [(1, {}, 1), (1, {"batch_size": 4}, 3), (30, {"prefetch": 3}, 3), (30, {"batch_size": 4}, 50), (99, {}, 50)],
    ids=str,
)
def test_no_message_is_begun_beyond_max_span(bench: PushBench, span: int, options: dict[str, Any], every: int) -> None:
    """With max_span=1 others reached offset 999, since a pull brought up to 1,000 at once.

    Offset 0 stays unfinished, and every third message, say, has the wanted tag."""

    free = stick(bench)
    begun: list[int] = []

    def handler(got: Any) -> None:
        messages = got if isinstance(got, tuple) else (got,)
        begun.extend(int(message.body) for message in messages)
        failed = [message for message in messages if message.body == b"0" and message.attempt == 1]
        if failed and len(messages) > 1:
            raise BatchFailure(failed)
        if failed:
            raise Retry(0)

    for i in range(200):
        bench.put(b"%d" % i, tag="B" if i % every else "A")
    bench.consumer(handler, tags="A", max_span=span, **options)
    bench.settle()
    assert sorted(begun) == list(range(0, min(span + 1, 200), every))
    assert bench.committed() == 0
    free()
    bench.advance(10)
    assert bench.committed() == 200
    assert sorted(set(begun)) == list(range(0, 200, every))


@pytest.mark.parametrize("unit", ["messages", "bytes"])
def test_a_total_is_divided_by_the_queues_here(tmp_path: Path, unit: str) -> None:
    """clients#topic-limits: 16 messages of the topic, so 4, 8 and 4 again of each queue. Messages that a queue
    held when its part shrank stay."""
    bench = PushBench(tmp_path, queues=4)
    for queue_id in range(4):
        bench.put(*[b"%02d" % i for i in range(30)], queue_id=queue_id)
    each = bench.broker.read("t", 0, 0, 1).messages[0].size
    options: dict[str, Any] = {"prefetch_total": 16} if unit == "messages" else {"prefetch_total_bytes": 16 * each}

    def held(member: Any) -> list[int]:
        return [number for ref, number in sorted(unsettled(member).items()) if ref.topic == "t"]

    stick(bench)
    first = bench.consumer(lambda message: 1 / 0, **options, client_id="a")
    bench.settle()
    assert held(first) == [4, 4, 4, 4]
    second = bench.consumer(lambda message: 1 / 0, **options, client_id="b")
    bench.settle()
    bench.advance(1)
    assert held(first) == held(second) == [8, 8]
    assert bench.leave(second)
    bench.advance(1)
    assert held(first) == [8, 8, 4, 4]
    bench.close()


def test_the_total_is_of_each_topic(bench: PushBench) -> None:
    bench.broker.topics.create("u", queues=2)
    for topic, queue_id in (T0, ("u", 0), ("u", 1)):
        bench.put(*[b"m"] * 20, topic=topic, queue_id=queue_id)
    stick(bench)
    consumer = bench.consumer(lambda message: 1 / 0, prefetch_total=10, run=False)
    consumer.subscribe("u", lambda message: 1 / 0)
    consumer.start()
    bench.settle()
    assert unsettled(consumer) == {T0: 10, QueueRef("u", 0): 5, QueueRef("u", 1): 5}
    bench.broker.topics.alter("t", read_queues=2, write_queues=2)
    bench.put(*[b"m"] * 20, queue_id=1)
    consumer.unsubscribe("u")
    bench.settle()
    assert unsettled(consumer) == {T0: 10, T1: 5}
    consumer.seek(T0, "earliest")
    bench.settle()
    assert unsettled(consumer) == {T0: 5, T1: 5}  # one that is restarted has its share


def test_a_paused_consumer_moves_nothing_until_it_is_resumed(bench: PushBench) -> None:
    seen = Seen()
    consumer = bench.consumer(seen)
    bench.settle()
    consumer.pause()
    bench.put(b"0")
    bench.broker.topics.alter("t", read_queues=2, write_queues=2)
    bench.put(b"1", queue_id=1)
    bench.advance(60)
    assert (seen, consumer.assignment()) == ([], {T0})
    consumer.resume(T0)  # all are paused: this alone is not enough
    bench.settle()
    assert seen == []
    consumer.resume()
    bench.settle()
    assert (sorted(seen), consumer.assignment()) == ([b"0", b"1"], {T0, T1})


def test_a_queue_that_is_paused_before_it_is_ours_is_paused_then(bench: PushBench) -> None:
    seen = Seen()
    consumer = bench.consumer(seen)
    consumer.pause(T1)
    bench.broker.topics.alter("t", read_queues=2, write_queues=2)
    bench.put(b"1", queue_id=1)
    bench.settle()
    assert (seen, consumer.assignment()) == ([], {T0, T1})
    consumer.resume(("t", 1))  # type: ignore[arg-type]
    bench.settle()
    assert seen == [b"1"]


# --- what a pull finds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["waiting", "full", "paused", "timer"])
def test_reset_reaches_the_consumer_in_any_pull_state(
    bench: PushBench, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    hook, free = Told(), stick(bench)
    handler = (lambda message: 1 / 0) if where == "full" else Seen()
    consumer = bench.consumer(handler, prefetch=4, interceptors=[hook])
    bench.put(*[b"m"] * 12)
    bench.settle()
    if where == "paused":
        consumer.pause(T0)
        bench.advance(15)
    elif where == "timer":
        monkeypatch.setattr(bench.broker, "read", failing(bench.broker.read, OSError("no")))
        bench.advance(15)
    assert place(bench) == where
    bench.broker.reset("g", "t", 0, 10)
    if where == "paused":
        consumer.resume(T0)
    bench.advance(21)
    assert ("reset", T0, 4 if where == "full" else 12, 10) in hook.news
    free()
    bench.advance(21)
    assert bench.committed() == 12
    assert place(bench) == "waiting"


def test_earlier_commits_do_not_undo_a_reset(bench: PushBench) -> None:
    seen = Seen()

    def handler(message: Message) -> None:
        seen.append(message.body)
        if len(seen) == 2:
            bench.broker.reset("g", "t", 0, "earliest")

    bench.consumer(handler, workers=1)
    bench.put(b"0", b"1", b"2")
    bench.settle()
    assert seen == [b"0", b"1", b"2", b"0", b"1", b"2"]
    assert bench.committed() == 3


def test_a_read_that_fails_is_tried_again_in_a_second(bench: PushBench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    bench.consumer(seen)
    bench.settle()
    read = failing(bench.broker.read, OSError("bad sector"), ValueError("a bug"))
    monkeypatch.setattr(bench.broker, "read", read)
    bench.put(b"0")
    bench.settle()
    for _ in range(2):
        assert (seen, place(bench)) == ([], "timer")
        bench.advance(1)
    assert (seen, place(bench)) == ([b"0"], "waiting")


def test_busy_pull_is_repeated_after_a_second(bench: PushBench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    monkeypatch.setattr(bench.broker, "add_waiter", failing(bench.broker.add_waiter, StoreBusyError("too many")))
    bench.consumer(seen)
    bench.put(b"0")
    bench.settle()
    assert (seen, place(bench)) == ([b"0"], "timer")  # what was found is handled all the same
    bench.advance(1)
    assert place(bench) == "waiting"


# --- silence -------------------------------------------------------------------------------------------------------


def test_a_pull_that_was_lost_is_begun_anew_after_two_minutes(
    bench: PushBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real = Seen(), bench.broker.add_waiter
    monkeypatch.setattr(
        bench.broker, "add_waiter", lambda *queue, **options: real(*queue[:-1], lambda worth: None, **options)
    )
    bench.consumer(seen)
    bench.settle()
    monkeypatch.setattr(bench.broker, "add_waiter", real)
    bench.put(b"0")
    bench.advance(119)
    assert seen == []
    bench.advance(22)
    assert (seen, place(bench)) == ([b"0"], "waiting")


def test_a_queue_whose_workers_are_busy_is_not_silent(bench: PushBench) -> None:
    """With every worker in a handler for more than two minutes the queue was taken for silent and restarted: what was
    in its handler did not count, came again, and took as long again, for ever."""
    seen = Seen()

    def handler(message: Message) -> None:
        seen.append(message.body)
        for _ in range(30):
            bench.clock.advance(10_000)
            bench.broker.run_once()
            consumer.run_once()

    consumer = bench.consumer(handler, workers=1)
    bench.put(b"0", b"1", b"2")
    bench.settle()
    assert seen == [b"0", b"1", b"2"]
    assert bench.committed() == 3


@pytest.mark.parametrize("name", ["share", "renew"])
def test_failed_step_is_repeated(bench: PushBench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An error in one of them ended it for good: no more sweeps, or locks that ran out."""
    consumer = bench.consumer()
    bench.settle()
    membership = engine_of(consumer).membership
    real, calls = getattr(membership, name), list[int]()

    def fails_once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise ConfigError("once")
        return real(*args)

    monkeypatch.setattr(membership, name, fails_once)
    bench.advance(100)
    assert [str(error) for error in bench.errors] == ["once"]
    assert len(calls) >= 4
    assert bench.broker.locks.owner("g", T0) == consumer.client_id


# --- members -------------------------------------------------------------------------------------------------------


def test_strategy_that_fails_or_invents_queues_moves_nothing(
    bench: PushBench, caplog: pytest.LogCaptureFixture
) -> None:
    answer: list[Any] = [[T0]]
    asked: list[Any] = []
    consumer = bench.consumer(strategy=lambda *arguments: asked.append(arguments) or answer[0], client_id="c1")
    for wrong in ([T1], [QueueRef("other", 0)], None, [7]):
        answer[0] = wrong
        bench.advance(20)
        assert asked[-1] == ("c1", (T0,), ("c1",))
        assert consumer.assignment() == {T0}
    assert caplog.text.count("the strategy failed") == 1
    for right, share in (([T0, T0], {T0}), ([], set())):
        answer[0] = right
        bench.advance(20)
        assert consumer.assignment() == share


def test_topic_that_may_not_be_read_is_released(bench: PushBench) -> None:
    consumer = bench.consumer()
    bench.broker.topics.alter("t", perm=2)
    bench.settle()
    assert consumer.assignment() == frozenset()
    bench.broker.topics.alter("t", perm=6)
    bench.settle()
    assert consumer.assignment() == {T0}


def test_member_that_hangs_without_queues_loses_its_seat(bench: PushBench) -> None:
    """Otherwise a queue that comes later would be nobody's: the share of one who never takes it."""
    members = [bench.consumer(client_id=f"c{i}") for i in range(2)]
    bench.settle()
    bench.consumers.remove(members[1])  # of one queue it has none
    bench.advance(80)
    bench.broker.topics.alter("t", read_queues=2, write_queues=2)
    bench.settle()
    assert members[0].assignment() == {T0, T1}


def test_lone_member_loses_nothing_by_being_away(bench: PushBench) -> None:
    consumer = bench.consumer()
    bench.settle()
    bench.clock.advance(600_000)
    bench.advance(30)
    assert consumer.assignment() == {T0}
    assert bench.errors == []


def test_client_id_of_one_who_hangs_is_free_after_its_lease(bench: PushBench) -> None:
    seen, other = Seen(), Seen()
    hung = bench.consumer(seen, client_id="c1")
    bench.settle()
    bench.consumers.remove(hung)
    bench.clock.advance(60_000)
    with pytest.raises(GroupInUseError, match="c1"):
        bench.consumer(other, client_id="c1")
    bench.consumers.clear()
    bench.clock.advance(1)
    heir = bench.consumer(other, client_id="c1")
    bench.settle()
    bench.consumers.append(hung)  # the locks look like its own
    bench.put(b"m")
    bench.advance(30)
    assert (seen, other) == ([], [b"m"])
    assert {type(error) for error in bench.errors} == {GroupInUseError}
    assert (hung.assignment(), heir.assignment()) == (frozenset(), {T0})
    bench.leave(hung)
    assert bench.broker.members.members("g") == ["c1"]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_queue_is_given_up_when_its_handler_has_ended(bench: PushBench, ordered: bool) -> None:
    """However long that takes: until then the heir has nothing of it, and then it goes on behind it."""
    seen, heirs = list[tuple[str, bytes]](), list[PushConsumer]()

    def handler(message: Message) -> None:
        seen.append(("first", message.body))
        if not heirs:
            heirs.append(bench.consumer(lambda each: seen.append(("heir", each.body)), client_id="0", ordered=ordered))
            for _ in range(100):  # ten minutes; the queue is for one that comes first by name
                bench.clock.advance(6_000)
                first.run_once()
                heirs[0].run_once()
            assert heirs[0].assignment() == frozenset()

    first = bench.consumer(handler, client_id="1", ordered=ordered, workers=1)
    bench.put(b"m", b"n")
    bench.settle()
    bench.advance(5)
    assert seen == [("first", b"m"), ("heir", b"n")]
    assert heirs[0].assignment() == {T0}
    assert bench.committed() == 2


@pytest.mark.parametrize("ordered", [False, True])
def test_a_queue_at_work_is_not_lost_though_its_lease_has_run_out(bench: PushBench, ordered: bool) -> None:
    """The process was stopped inside of a handler and goes on a minute later; the other member looks first."""
    seen, other = list[bytes](), list[bytes]()

    def handler(message: Message) -> None:
        seen.append(message.body)
        if len(seen) == 1:
            bench.clock.advance(90_000)
            for _ in range(10):
                heir.run_once()
                bench.clock.advance(500)
            assert heir.assignment() == frozenset()
        if message.reconsume_times == 0:
            raise ValueError("what a handler does counts")

    first = bench.consumer(handler, client_id="0", ordered=ordered, workers=1)
    heir = bench.consumer(lambda message: other.append(message.body), client_id="1", ordered=ordered, workers=1)
    bench.put(b"m")
    first.run_once()
    assert seen == [b"m"]
    bench.advance(30)
    assert len([*seen, *other]) == 2  # once more, since it failed
    assert sum(bench.broker.lag("g").values()) == 0


def test_a_handler_is_not_begun_on_a_queue_that_was_lost(bench: PushBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped for a minute between two calls: what is cached of the queue is another's by now."""
    seen, other = list[bytes](), list[bytes]()

    def handler(message: Message) -> None:
        seen.append(message.body)
        raise Retry(5)

    first = bench.consumer(handler, client_id="0", ordered=True, workers=1)
    bench.put(b"m")
    bench.settle()
    heir = bench.consumer(lambda message: other.append(message.body), client_id="1", ordered=True, workers=1)
    bench.consumers.remove(first)
    bench.advance(90)
    assert (seen, other) == ([b"m"], [b"m"])
    monkeypatch.setattr(engine_of(first).membership, "renew", set)  # when it goes on, the retry is due before this
    first.run_once()
    assert seen == [b"m"]
    assert first.assignment() == frozenset()
    assert heir.assignment() == {T0}


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("client_id", ["0", "1"])
def test_a_stopped_consumer_keeps_the_queue_of_a_handler_that_hangs(
    bench: PushBench, ordered: bool, client_id: str
) -> None:
    """However long, and whatever the name of the one that comes after it."""
    other, heirs = list[bytes](), list[PushConsumer]()

    def handler(message: Message) -> None:
        first.stop(timeout=0)
        bench.consumers.remove(first)
        heirs.append(bench.consumer(lambda each: other.append(each.body), client_id=client_id, ordered=ordered))
        for _ in range(10):
            bench.clock.advance(30_000)
            heirs[0].run_once()
        assert heirs[0].assignment() == frozenset()

    first = bench.consumer(handler, client_id="0", ordered=ordered, workers=1)
    bench.put(b"m")
    first.run_once()
    assert other == []
    bench.advance(5)
    assert heirs[0].assignment() == {T0}
    assert other == [b"m"]  # what ends after `stop` counts for nothing


def test_the_queues_of_one_who_is_not_heard_of_are_taken_over(bench: PushBench) -> None:
    seen, other = Seen(), Seen()
    hung = bench.consumer(seen, client_id="0")
    bench.settle()
    heir = bench.consumer(other, client_id="1")
    bench.consumers.remove(hung)
    bench.put(b"m")
    bench.advance(50)
    assert other == []
    bench.advance(40)
    assert (seen, other) == ([], [b"m"])
    # It comes back, finds out what it has lost, and neither commits nor handles any more of that.
    bench.consumers.append(hung)
    bench.advance(25)
    assert len(hung.assignment()) + len(heir.assignment()) == 1
    bench.put(b"n")
    bench.settle()
    assert sorted([*seen, *other].count(body) for body in (b"m", b"n")) == [1, 1]


def test_a_consumer_leaves_no_waiter_and_no_listener_behind(bench: PushBench) -> None:
    broker = bench.broker
    before = (parked(broker), len(broker.members.on_change), len(broker.topics.on_change))
    consumer = bench.consumer()
    bench.settle()
    assert parked(broker) > before[0]
    bench.leave(consumer)
    assert (parked(broker), len(broker.members.on_change), len(broker.topics.on_change)) == before
    assert broker.locks.snapshot() == []


# --- by hand -------------------------------------------------------------------------------------------------------


def test_hook_that_stops_its_consumer_leaves_no_lock(bench: PushBench) -> None:
    """A lock that was taken after the stop would keep its queue from everybody for a minute."""
    bench.broker.topics.create("u", queues=1)
    turn = ["t"]

    def strategy(client_id: str, queues: Any, members: Any) -> Any:
        return list(queues) if queues[0].topic == turn[0] else []

    stops = hook(on_revoke=lambda queues: consumer.stop())
    consumer = bench.consumer(strategy=strategy, interceptors=[stops], run=False)
    consumer.subscribe("u", lambda message: None)
    consumer.start()
    bench.settle()
    assert consumer.assignment() == {T0}
    turn[0] = "u"  # t goes, which stops it, and u comes
    engine_of(consumer).request_rebalance()
    bench.settle()
    assert consumer.assignment() == frozenset()
    assert bench.broker.locks.snapshot() == []


def test_another_filter_counts_at_once_for_who_waits(bench: PushBench) -> None:
    """clients#broadcasting: a pull that waits by the filter of before would have been five seconds late."""
    seen = Seen()
    consumer = bench.consumer(seen, tags="A")
    bench.settle()
    consumer.subscribe("t", seen, tags="B")
    bench.settle()
    bench.put(b"b", tag="B")
    bench.settle()
    assert seen == [b"b"]
    bench.put(b"a", tag="A")
    bench.advance(6)
    assert (seen, bench.committed()) == ([b"b"], 2)


def test_of_two_seeks_at_once_the_second_counts(bench: PushBench) -> None:
    seen = Seen()
    consumer = bench.consumer(seen)
    bench.put(b"0", b"1", b"2", b"3")
    bench.settle()
    seen.clear()
    consumer.seek(T0, 0)
    consumer.seek(T0, 2)  # the first one is not carried out yet
    assert bench.committed() == 2
    bench.settle()
    assert seen == [b"2", b"3"]


def test_lost_batch_is_pulled_again(bench: PushBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is no handler's leaves neither messages that nobody handles nor a position that stands still."""
    seen = Seen()
    bench.consumer(seen)
    fail_outside_of_handlers(monkeypatch, MemoryError())
    bench.put(b"0", b"1")
    bench.advance(2)
    assert set(seen) == {b"0", b"1"}
    assert bench.committed() == 2


def test_seek_from_a_handler_voids_its_message(bench: PushBench) -> None:
    seen, committed, told = Seen(), list[int | None](), Told()

    def handler(message: Message) -> None:
        seen.append(message.body)
        committed.append(bench.committed())
        if seen == [b"0", b"1"]:
            consumer.seek(T0, 0)

    consumer = bench.consumer(handler, workers=1, interceptors=[told])
    bench.put(b"0", b"1", b"2")
    bench.advance(1)
    assert seen == [b"0", b"1", b"0", b"1", b"2"]
    assert committed[2] == 0  # what ended after the seek has not moved it
    assert [body for body, _ in told.settled] == [b"0", b"0", b"1", b"2"]  # nor was anybody told that it was done
    assert bench.committed() == 3


@pytest.mark.parametrize("ordered", [False, True])
def test_a_queue_is_begun_anew_when_its_handlers_have_ended(bench: PushBench, ordered: bool) -> None:
    """clients#broadcasting: a message is never in two handlers of one consumer."""
    seen, meanwhile = Seen(), list[Any]()

    def handler(message: Message) -> None:
        seen(message)
        if len(seen) == 1:
            consumer.seek(T0, 0)
            for wait_ms in (0, 500, 60_000):
                bench.clock.advance(wait_ms)
                consumer.run_once()  # the timer thread, and another worker
                meanwhile.append((len(seen), consumer.assignment()))

    consumer = bench.consumer(handler, ordered=ordered)
    bench.put(b"0")
    bench.settle()
    assert meanwhile == [(1, {T0})] * 3
    assert seen == [b"0", b"0"]
    assert bench.committed() == 1


@pytest.mark.parametrize("when", ["running", "reopened"])
def test_group_that_broadcasts_refuses_reset_and_lag(bench: PushBench, when: str) -> None:
    """A reset moved one member of two, and left a committed offset that nobody moved and that pinned the log."""
    bench.put(b"0", b"1")
    seen = {client: Seen() for client in "ab"}
    members = [bench.consumer(seen[each], model="broadcasting", client_id=each) for each in "ab"]
    bench.settle()
    if when == "reopened":
        bench.close()
        bench.open()
    for call in (lambda: bench.broker.reset("g", "t", None, "earliest"), lambda: bench.broker.lag("g")):
        with pytest.raises(ConfigError, match=r"\(a, b\).*seek.*stats"):
            call()
    assert bench.committed() is None
    pin = bench.broker.stats().oldest_pin
    assert pin is None or not pin.group
    if when == "running":
        members[0].seek(T0, "earliest")
        bench.advance(1)
        assert (seen["a"], seen["b"]) == ([b"0", b"1", b"0", b"1"], [b"0", b"1"])
    else:
        bench.consumer()
        bench.settle()
        assert bench.broker.reset("g", "t", None, "earliest") == {T0: 0}


def test_broadcasting_goes_on_where_its_client_was(bench: PushBench, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": "broadcasting", "client_id": "cache-1"}
    first, second = Seen(), Seen()
    consumer = bench.consumer(first, **options)
    other = bench.consumer(second, model="broadcasting", client_id="cache-2")
    bench.put(b"0", b"1")
    bench.settle()
    assert first == second == [b"0", b"1"]  # each has all
    file = tmp_path / "local_offsets" / "cache-1" / "g.json"
    bench.advance(5)  # written without a stop, too
    assert json.loads(file.read_bytes())["offsets"] == {"t": {"0": 2}}
    for each in (consumer, other):
        bench.leave(each)
    bench.put(b"2")
    third = Seen()
    bench.consumer(third, **options)
    bench.settle()
    assert third == [b"2"]
    assert bench.committed() is None


def test_broadcasting_successor_continues(bench: PushBench, tmp_path: Path) -> None:
    """The new one is made while the old one still runs, and takes its place: it must not go back to where the old one
    was when it was made, nor write that over positions in topics that it does not even read."""
    options: dict[str, Any] = {"model": "broadcasting", "client_id": "cache-1"}
    bench.broker.topics.create("u", queues=1)
    first, second = Seen(), Seen()
    old = bench.consumer(first, **options)
    old.subscribe("u", first)
    bench.put(b"0")
    bench.put(b"u0", topic="u")
    bench.advance(5)
    new = bench.consumer(second, run=False, **options)
    bench.put(b"1")
    bench.put(b"u1", topic="u")
    bench.settle()
    bench.leave(old)
    new.start()
    bench.put(b"2")
    bench.settle()
    assert sorted(first) == [b"0", b"1", b"u0", b"u1"]
    assert second == [b"2"]
    new.stop()
    file = tmp_path / "local_offsets" / "cache-1" / "g.json"
    assert json.loads(file.read_bytes())["offsets"] == {"t": {"0": 3}, "u": {"0": 2}}


def test_broadcasting_skips_nothing_that_comes_later(bench: PushBench) -> None:
    bench.put(b"old")
    seen = Seen()
    consumer = bench.consumer(seen, start="latest", model="broadcasting", client_id="cache-1")
    consumer.subscribe("later", seen)
    bench.settle()
    bench.broker.topics.alter("t", read_queues=2, write_queues=2)
    bench.put(b"new", queue_id=1)  # before anybody has looked there
    bench.put(b"first", topic="later")
    bench.settle()
    assert sorted(seen) == [b"first", b"new"]


# --- on_assign before all else ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"ordered": True}, {"batch_size": 3}], ids=str)
def test_on_assign_returns_before_the_first_message_is_handed_out(bench: PushBench, options: dict[str, Any]) -> None:
    """On real threads the hook came when it came: a handler had no cache, no file, no client for its queue yet."""
    news: list[str] = []

    class Prepares(Interceptor):
        def on_assign(self, queues: frozenset[QueueRef]) -> None:
            news.append("begins")
            bench.put(b"meanwhile")
            consumer.run_once()  # what others would do now
            news.append(f"ends {sorted(queue.queue_id for queue in queues)}")

    bench.put(b"before")
    consumer = bench.consumer(lambda message: news.append("message"), interceptors=[Prepares()], run=False, **options)
    consumer.start()
    bench.advance(1)
    assert news[:3] == ["begins", "ends [0]", "message"]
    assert bench.committed() == 2


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("when", ["before", "in"])
def test_seek_until_on_assign_ends_is_where_it_begins(bench: PushBench, ordered: bool, when: str) -> None:
    news: list[Any] = []

    def prepare(queues: Any) -> None:
        news.append("assign")
        if when == "in":
            consumer.seek(T0, 3)

    bench.put(*[b"%d" % i for i in range(5)])
    consumer = bench.consumer(
        lambda message: news.append(message.body), interceptors=[hook(on_assign=prepare)], ordered=ordered
    )
    if when == "before":
        consumer.seek(T0, 3)
    bench.advance(2)
    assert news[-2:] == [b"3", b"4"]
    assert {*news[:-2]} == {"assign"}
    assert bench.committed() == 5


def test_queue_lost_before_on_assign_is_not_announced(bench: PushBench) -> None:
    told = Told()
    consumer = bench.consumer(interceptors=[told])
    assert bench.leave(consumer)  # nothing has run
    assert told.news == []
    assert bench.broker.locks.snapshot() == []


@pytest.mark.parametrize("ordered", [False, True])
def test_on_assign_cannot_stop_renewals(bench: PushBench, ordered: bool) -> None:
    """A hook that took a minute lost the consumer its queues: it ran on the thread that renews their locks."""
    kept: list[bool] = []

    class Slow(Interceptor):
        def on_assign(self, queues: frozenset[QueueRef]) -> None:
            for _ in range(4):
                bench.clock.advance(20_000)
                consumer.run_once()  # the timer thread, which goes on meanwhile
                kept.extend(not lock.expired for lock in bench.broker.locks.snapshot())

    consumer = bench.consumer(interceptors=[Slow()], ordered=ordered)
    bench.put(b"x")
    bench.settle()
    assert kept == [True] * 8
    assert consumer.assignment() == {T0}
    assert bench.committed() == 1
