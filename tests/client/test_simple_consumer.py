"""Who may consume, what of, from where on; what a receive gives and in which turn; waiting; the end. Time is moved by
hand, but where threads wait for each other."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import RetryPolicy, SimpleConsumer, Store
from tests.client.popsupport import Bench
from tests.client.pushsupport import Told, hook
from tests.client.support import ended, failing, in_thread, parked, until, waits_of


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "store")
    for topic in ("t", "u", "v"):
        bench.store.create_topic(topic, queues=4)
    yield bench
    bench.store.close()


@pytest.fixture
def store(mq_store: Store) -> Store:
    for topic in ("t", "u"):
        mq_store.create_topic(topic, queues=4)
    return mq_store


def bodies(found: list[mqstore.Delivery]) -> list[bytes]:
    return [delivery.message.body for delivery in found]


def taken(consumer: SimpleConsumer, count: int = 1000) -> list[bytes]:
    """All that is ready, settled."""
    found = consumer.receive(count, wait=0)
    for delivery in found:
        delivery.ack()
    return sorted(bodies(found))


# -- who may consume --------------------------------------------------------------------------------------------------


def test_it_is_a_member_from_its_first_receive_to_its_end(bench: Bench) -> None:
    members, listeners = bench.broker.members, list(bench.broker.topics.on_change)
    consumer = bench.store.simple_consumer("g", client_id="c1")
    consumer.subscribe("t", tags="red")
    assert members.members("g") == []
    consumer.receive(wait=0)
    assert members.members("g") == ["c1"]
    assert (str(members.mode("g")), dict(members.subscriptions("g"))) == (
        "pop, unordered, clustering",
        {"t": ("TAG", "red")},
    )
    consumer.close()
    consumer.close()
    assert members.members("g") == []
    assert bench.broker.topics.on_change == listeners


def test_with_topics_it_is_a_member_at_once(bench: Bench) -> None:
    with bench.consumer("t", "u", client_id="c1", ordered=True) as consumer:
        assert bench.broker.members.members("g") == ["c1"]
        assert str(bench.broker.members.mode("g")) == "pop, ordered, clustering"
        assert consumer.subscriptions == {"t": "*", "u": "*"}
    assert bench.broker.members.members("g") == []
    assert "closed" in repr(consumer)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_a_number_of_messages_that_cannot_be(bench: Bench, wrong: Any) -> None:
    consumer = bench.consumer()
    bench.put(b"a")
    for call in (
        lambda: consumer.receive(wrong),
        lambda: consumer.receive(wait=-1),
        lambda: consumer.receive(visibility=0),
    ):
        with pytest.raises(mqstore.errors.ConfigError):
            call()
    assert consumer.pending() == []


def test_receive_without_subscription_is_refused(bench: Bench) -> None:
    consumer = bench.store.simple_consumer("g")
    with pytest.raises(mqstore.errors.ConfigError, match="subscribe"):
        consumer.receive()


# -- what of, and from where on ---------------------------------------------------------------------------------------


def test_a_new_filter_counts_for_prefetched_messages(bench: Bench) -> None:
    bench.store.create_topic("one", queues=1)
    consumer = bench.store.simple_consumer("g")
    consumer.subscribe("one")
    for body in (b"0", b"1", b"2", b"3", b"4"):
        bench.put(body, topic="one", tag="red")
    for body in (b"0", b"1"):  # the second time more are prefetched
        assert bodies(consumer.receive(wait=0)) == [body]
    consumer.subscribe("one", tags="blue")
    bench.put(b"5", topic="one", tag="blue")
    assert bodies(consumer.receive(wait=0)) == [b"5"]


def test_redelivery_ignores_a_new_filter(bench: Bench) -> None:
    consumer = bench.store.simple_consumer("g")
    consumer.subscribe("t", tags="red")
    bench.put(b"1", tag="red")
    consumer.receive(wait=0)[0].nack(1)
    consumer.subscribe("t", tags="blue")
    bench.put(b"2", tag="blue")
    bench.put(b"3", tag="red")
    bench.advance(1)
    assert taken(consumer) == [b"1", b"2"]


def test_a_topic_that_is_deleted_is_no_error(bench: Bench) -> None:
    consumer = bench.consumer("t", "u")
    bench.put(b"a")
    taken(consumer)
    bench.broker.topics.delete("t", force=True)
    assert consumer.receive(wait=0) == []
    bench.put(b"b", topic="u")
    bench.put(b"c", topic="t")
    assert taken(consumer) == [b"b", b"c"]


def test_dead_letters_of_another_group_may_be_consumed(bench: Bench) -> None:
    consumer = bench.consumer("%DLQ%g", group="care")
    sick = bench.consumer()
    bench.put(b"a")
    sick.receive(wait=0)[0].reject("bad")
    [delivery] = consumer.receive(wait=0)
    assert (delivery.message.body, delivery.message.properties["dlq_reason"]) == (b"a", "bad")


# -- what a receive gives ---------------------------------------------------------------------------------------------


def test_more_than_one_pop_can_give(bench: Bench) -> None:
    consumer = bench.consumer("t", "u")
    bench.put(*[b"t%02d" % i for i in range(70)])
    bench.put(*[b"u%02d" % i for i in range(40)], topic="u")
    first = consumer.receive(100, wait=0)
    assert len(first) == 100
    rest = consumer.receive(100, wait=0)
    assert len(rest) == 10
    assert len(set(bodies(first + rest))) == 110
    assert Counter(body[:1] for body in bodies(first)) != {b"t": 70, b"u": 30}  # u has had its turn before t was done


def test_receive_respects_its_limit(bench: Bench) -> None:
    consumer = bench.consumer("t", "u")
    bench.put(*[b"t"] * 50)
    bench.put(*[b"u"] * 50, topic="u")
    assert [len(consumer.receive(n, wait=0)) for n in (1, 31, 33, 35)] == [1, 31, 33, 35]
    assert consumer.receive(10, wait=0) == []


@pytest.mark.parametrize("ordered", [False, True])
def test_a_full_topic_does_not_starve_the_others(bench: Bench, ordered: bool) -> None:
    consumer = bench.consumer("t", "u", "v", ordered=ordered)
    bench.put(*[b"t"] * 40)
    bench.put(b"u", topic="u")
    bench.put(b"v", topic="v")
    seen = []
    for _ in range(3):
        [delivery] = consumer.receive(wait=0)
        delivery.ack()
        seen.append(delivery.message.body)
    assert sorted(seen) == [b"t", b"u", b"v"]


def test_leases_are_as_long_as_was_said(bench: Bench) -> None:
    consumer = bench.consumer(visibility=timedelta(seconds=30))
    bench.put(b"a", b"b")
    consumer.receive(wait=0)
    [short] = consumer.receive(wait=0, visibility=5)
    assert short.expires_at == bench.clock.monotonic_ms() / 1000 + 5
    bench.advance(5)
    [again] = consumer.receive(5, wait=0)
    assert again.message.body == short.message.body
    again.ack()
    bench.advance(25)
    assert len(consumer.receive(5, wait=0)) == 1


def test_a_failure_of_one_topic_does_not_hide_the_others(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = bench.consumer("t", "u")
    pop = bench.broker.pop

    def failing(group: str, topic: str, *rest: Any, **more: Any) -> Any:
        if topic == "t":
            raise mqstore.errors.StoreBusyError("not now")
        return pop(group, topic, *rest, **more)

    monkeypatch.setattr(bench.broker, "pop", failing)
    bench.put(*[b"u"] * 3, topic="u")
    assert [bodies(consumer.receive(wait=0)) for _ in range(3)] == [[b"u"]] * 3
    with pytest.raises(mqstore.errors.StoreBusyError):
        consumer.receive(wait=0)


def test_interrupted_receive_releases_its_messages(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = bench.consumer("t", "u")
    bench.put(b"a")
    bench.put(b"b", topic="u")
    with monkeypatch.context() as patch:
        patch.setattr(bench.broker, "pop", failing(bench.broker.pop, None, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            consumer.receive(2, wait=0)
    assert consumer.pending() == []
    found = consumer.receive(2, wait=0)
    assert sorted((each.message.body, each.attempt) for each in found) == [(b"a", 1), (b"b", 1)]


def test_pending_lists_leases(bench: Bench) -> None:
    consumer = bench.consumer(visibility=30)
    bench.put(b"a", unique_key="K1", queue_id=2)
    [delivery] = consumer.receive(wait=0)
    expires = datetime.fromtimestamp(bench.clock.now_ms() / 1000 + 30, UTC)
    [info] = consumer.pending()
    assert (info.unique_key, info.queue, info.offset) == ("K1", ("t", 2), 0)
    assert (info.attempt, info.expires) == (1, expires)
    delivery.nack(5)
    bench.advance(5)
    [again] = consumer.receive(wait=0)
    [info] = bench.consumer().pending()  # of the group
    assert (info.unique_key, info.queue.topic, info.attempt) == ("K1", "%RETRY%g+t", 2)
    again.ack()
    assert consumer.pending() == []


def test_pending_in_order(bench: Bench) -> None:
    consumer = bench.consumer(ordered=True)
    bench.put(b"a", unique_key="K1", queue_id=1)
    consumer.receive(wait=0)
    [info] = consumer.pending()
    assert (info.unique_key, info.queue, info.attempt) == ("K1", mqstore.QueueRef("t", 1), None)


# -- interceptors -----------------------------------------------------------------------------------------------------


def test_behind_what_was_left_out_there_may_be_more(bench: Bench) -> None:
    consumer = bench.consumer(interceptors=[Told(b"no")])
    bench.put(b"no", b"no", b"yes", queue_id=0)
    assert bodies(consumer.receive(wait=0)) == [b"yes"]


def test_interceptors_hear_how_it_ended_and_how_long_it_took(bench: Bench) -> None:
    settled: list[tuple[bytes, str, float]] = []
    notes = hook(on_settle=lambda message, outcome, seconds: settled.append((message.body, outcome, seconds)))
    consumer = bench.consumer(interceptors=[notes], retry=RetryPolicy(2, [1]))
    bench.put(b"0", b"1", b"2", queue_id=0)
    done, failed, bad = consumer.receive(3, wait=0)
    bench.clock.advance(1_500)
    done.ack()
    done.ack()
    failed.nack()
    bad.reject()
    bench.advance(1)
    [last] = consumer.receive(wait=0)
    last.nack()
    bench.put(b"x")
    [interrupted] = consumer.receive(wait=0)
    with pytest.raises(KeyboardInterrupt), interrupted:
        raise KeyboardInterrupt
    assert settled == [(b"0", "ack", 1.5), (b"1", "retry", 1.5), (b"2", "dlq", 1.5), (b"1", "dlq", 0.0)]


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_a_receive_ends_with_the_wait(store: Store) -> None:
    consumer = store.simple_consumer("g", {"t": "*", "u": "*"})
    assert consumer.receive(wait=0) == consumer.receive(wait=0.02) == []
    assert parked(store.broker) == 0
    assert not waits_of(consumer).open


def test_subscribing_ends_the_wait_for_the_old_subscriptions(store: Store) -> None:
    consumer = store.simple_consumer("g", {"t": "*"})
    store.put("u", b"a")
    waiting = in_thread(lambda: bodies(consumer.receive(wait=math.inf)))
    until(lambda: parked(store.broker) == 1)
    consumer.subscribe("u")
    assert ended(*waiting) == [b"a"]


def test_closing_ends_a_loop_that_waits(store: Store) -> None:
    consumer = store.simple_consumer("g", {"t": "*", "u": "*"})
    waiting = in_thread(lambda: list(consumer))
    until(lambda: parked(store.broker) == 2)
    consumer.close()
    assert ended(*waiting) == list(consumer) == []
    assert parked(store.broker) == 0
    with pytest.raises(mqstore.errors.StoreClosedError):
        consumer.subscribe("u")
    assert store.broker.members.groups() == []


def test_closing_the_store_ends_a_call_that_is_about_to_wait(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not in the list of waits yet, and finds the store closed."""
    consumer = store.simple_consumer("g", {"t": "*"})
    add = store.broker.add_pop_waiter

    def late(*arguments: Any, **options: Any) -> Any:
        store.close()
        return add(*arguments, **options)

    monkeypatch.setattr(store.broker, "add_pop_waiter", late)
    assert consumer.receive(wait=math.inf) == []


def test_received_message_can_be_settled_after_close(bench: Bench) -> None:
    consumer = bench.consumer()
    bench.put(b"a")
    [delivery] = consumer.receive(wait=0)
    consumer.close()
    delivery.ack()
    assert sum(bench.store.lag("g").values()) == 0


def test_iterating_waits_and_gives_one_at_a_time(store: Store) -> None:
    consumer = store.simple_consumer("g", {"t": "*"})
    seen: list[bytes] = []

    def work() -> None:
        for delivery in consumer:
            with delivery as message:
                seen.append(message.body)
            assert consumer.pending() == []
            if len(seen) == 3:
                consumer.close()

    store.put_many("t", [b"0", b"1"], queue_id=0)
    waiting = in_thread(work)
    until(lambda: len(seen) == 2 and parked(store.broker))
    store.put("t", b"2", queue_id=0)
    assert ended(*waiting) is None
    assert seen == [b"0", b"1", b"2"]


def test_a_wait_that_cannot_begin_leaves_nothing_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = store.simple_consumer("g", {"t": "*", "u": "*"})
    busy = failing(store.broker.add_pop_waiter, None, mqstore.errors.StoreBusyError("too many"))
    monkeypatch.setattr(store.broker, "add_pop_waiter", busy)
    with pytest.raises(mqstore.errors.StoreBusyError):
        consumer.receive()
    assert parked(store.broker) == 0
    assert not waits_of(consumer).open


# -- turns: the broker calls one for each message, and whoever is called and does not come keeps the others asleep -----


def test_a_turn_that_came_from_two_topics_is_passed_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads put to two topics at once, and both choose the same one of two who wait. It comes once."""
    first = bench.consumer("t", "u")
    second = bench.consumer("t", "u")
    called: list[str] = []
    chosen: list[tuple[Any, Any]] = []
    add = bench.broker.add_pop_waiter

    def noted(group: str, topic: str, callback: Any, **more: Any) -> Any:
        chosen.append((add(group, topic, callback, **more), callback))
        return chosen[-1][0]

    with monkeypatch.context() as patch:
        patch.setattr(bench.broker, "add_pop_waiter", noted)
        first._when_ready(lambda: called.append("first"))
    second._when_ready(lambda: called.append("second"))
    for waiter, _ in chosen:  # the broker lets go of it in both, before it calls
        assert bench.broker.remove_waiter(waiter)
    for _, callback in chosen:
        callback(True)
    assert called == ["first", "second"]


def test_called_waiter_looks_at_the_calling_topic_first(bench: Bench) -> None:
    """Else it might find something elsewhere, and the message that it was called for would lie there."""
    called: list[str] = []
    for _ in range(4):  # whichever topic has the next turn
        consumer, other = bench.consumer("t", "u", "v"), bench.consumer("t", "u", "v")
        called.clear()
        consumer._when_ready(lambda: called.append("one"))
        bench.put(b"u", topic="u")
        assert called == ["one"]
        bench.store.put("t", b"t")
        bench.store.put("v", b"v")
        assert bodies(consumer.receive(wait=0)) == [b"u"]
        assert len(other.receive(5, wait=0)) == 2
        consumer.close()
        other.close()


def test_absent_waiter_passes_its_turn(bench: Bench) -> None:
    consumers = [bench.consumer("t", "u") for _ in range(3)]
    called: list[int] = []
    waits = [each._when_ready(lambda i=i: called.append(i)) for i, each in enumerate(consumers)]
    bench.put(b"a")
    assert called == [0]
    waits[0].cancel()
    waits[0].cancel()  # again passes nothing on
    bench.settle()
    assert called == [0, 1]
    assert not waits_of(consumers[0]).turns


def test_a_wait_that_ends_while_it_begins_parks_nowhere(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody subscribes just between two topics of a wait that is being begun."""
    consumer = bench.consumer("t", "u")
    add = bench.broker.add_pop_waiter
    called: list[str] = []

    def interrupted(*rest: Any, **more: Any) -> Any:
        waiter = add(*rest, **more)
        waits_of(consumer).ring()
        return waiter

    monkeypatch.setattr(bench.broker, "add_pop_waiter", interrupted)
    consumer._when_ready(lambda: called.append("one"))
    assert called == ["one"]
    assert parked(bench.broker) == 0


@pytest.mark.parametrize("error", [None, mqstore.errors.StoreBusyError("not now"), KeyboardInterrupt()], ids=repr)
def test_called_waiter_that_takes_nothing_passes_its_turn(
    bench: Bench, error: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails, or has unsubscribed from the topic (None)."""
    consumer = bench.consumer("t", "u")
    called: list[str] = []
    consumer._when_ready(lambda: called.append("one"))
    bench.broker.add_pop_waiter("g", "t", lambda worth: called.append("another"))
    bench.put(b"a")
    assert called == ["one"]
    if error is None:
        consumer.unsubscribe("t")
        bench.put(b"b", topic="u")
        assert bodies(consumer.receive(wait=0)) == [b"b"]
    else:
        monkeypatch.setattr(bench.broker, "pop", failing(bench.broker.pop, error))
        with pytest.raises(type(error)):
            consumer.receive(wait=0)
    bench.settle()
    assert called == ["one", "another"]


def test_filtered_message_calls_nobody(bench: Bench) -> None:
    consumer = bench.store.simple_consumer("g", {"t": "red"})
    called: list[str] = []
    consumer._when_ready(lambda: called.append("one"))
    bench.put(b"a", tag="blue")
    assert called == []
    bench.put(b"b", tag="red")
    assert called == ["one"]


@pytest.mark.parametrize("event", ["close", "subscribe", "topic", "store"])
def test_news_of_other_kinds_call_too(bench: Bench, event: str) -> None:
    consumer = bench.consumer("t", "later")
    called: list[str] = []
    consumer._when_ready(lambda: called.append("one"))
    {
        "close": consumer.close,
        "subscribe": lambda: consumer.subscribe("u"),
        "topic": lambda: bench.store.create_topic("later"),
        "store": bench.store.close,
    }[event]()
    assert called == ["one"]
    assert not waits_of(consumer).open


def test_closed_consumer_calls_back_at_once(bench: Bench) -> None:
    consumer = bench.consumer()
    consumer.close()
    called: list[str] = []
    assert consumer._when_ready(lambda: called.append("one")).over
    assert called == ["one"]


def test_a_message_for_each_of_many_who_wait_wakes_them_all(store: Store) -> None:
    """Two consumers of two topics, sixteen threads that take one message each, sixteen messages one by one."""
    consumers = [store.simple_consumer("g", {"t": "*", "u": "*"}) for _ in range(2)]
    threads = [in_thread(lambda i=i: bodies(consumers[i % 2].receive(wait=20))) for i in range(16)]
    until(lambda: parked(store.broker) == 32)
    for i in range(16):
        store.put("tu"[i % 2], b"%d" % i)
    assert sorted(ended(*each)[0] for each in threads) == sorted(b"%d" % i for i in range(16))
    assert parked(store.broker) == 0


@pytest.mark.parametrize("ordered", [False, True])
def test_many_workers_lose_no_wake_up(store: Store, ordered: bool) -> None:
    """Messages in bursts, one at a time in flight per worker, some given back: nothing is ever left while all sleep."""
    consumers = [store.simple_consumer("g", {"t": "*", "u": "*"}, ordered=ordered, visibility=600) for _ in range(2)]
    count, done, lock = 120, Counter[bytes](), threading.Lock()

    def work(consumer: SimpleConsumer) -> None:
        for delivery in consumer:
            with delivery as message:
                if delivery.attempt == 1 and message.body.endswith(b"7"):
                    raise mqstore.Retry(0)
                with lock:
                    done[message.body] += 1

    workers = [in_thread(lambda i=i: work(consumers[i % 2])) for i in range(8)]
    for i in range(count):
        store.put("tu"[i % 2], b"%d" % i)
        if i % 20 == 0:
            until(lambda i=i: len(done) >= i // 2)
    end = time.monotonic() + 60
    while len(done) < count and time.monotonic() < end:
        time.sleep(0.005)
    for consumer in consumers:
        consumer.close()
    for each in workers:
        assert ended(*each) is None
    assert len(done) == count
    if not ordered:
        assert set(done.values()) == {1}
