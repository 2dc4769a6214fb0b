"""Consumers, transactions and delays of a cluster against Apache RocketMQ's brokers (`make cluster`)."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import mqstore
from mqstore import Message, PushConsumer, Store
from mqstore.errors import ConfigError, NotSupportedError
from tests.cluster.support import Cluster
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)

SOON = mqstore.RetryPolicy(3, [1])


class Seen:
    """Handler that notes messages, and fails as often as it is told for some."""

    def __init__(self, **failures: int) -> None:
        self.bodies: list[str] = []
        self.attempts: defaultdict[str, list[int]] = defaultdict(list)
        self._failures = failures
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> None:
        text = message.text()
        with self._lock:
            self.attempts[text].append(message.attempt)
            if len(self.attempts[text]) <= self._failures.get(text, 0):
                raise ValueError("not yet")
            self.bodies.append(text)


@pytest.fixture
def other(cluster: Cluster) -> Iterator[Store]:
    """A second client, with connections of its own."""
    with mqstore.connect(cluster.name_server) as connected:
        yield connected


def consumer(store: Store, topic: str, handler: Any, **options: Any) -> PushConsumer:
    made = store.push_consumer(topic, **options)
    made.subscribe(topic, handler)
    return made


def share(member: PushConsumer, topic: str) -> int:
    """Return how many queues of the topic are assigned, without those of retries."""
    return sum(queue.topic == topic for queue in member.assignment())


@pytest.mark.parametrize("options", [{}, {"mode": "pop"}, {"ordered": True}, {"mode": "pop", "ordered": True}], ids=str)
def test_push_consumer_gets_every_message_once(store: Store, name: str, options: dict[str, Any]) -> None:
    seen = Seen()
    store.create_topic(name, queues=4)
    store.put_many(name, [b"before%d" % n for n in range(10)])

    with consumer(store, name, seen, **options):
        until(lambda: len(seen.bodies) >= 10)
        for n in range(20):
            store.put(name, f"after{n}".encode())
        until(lambda: len(seen.bodies) >= 30)

    assert Counter(seen.bodies) == Counter([f"before{n}" for n in range(10)] + [f"after{n}" for n in range(20)])


@pytest.mark.parametrize("options", [{}, {"mode": "pop"}, {"ordered": True}], ids=str)
def test_failed_message_is_retried_and_dead_lettered(store: Store, name: str, options: dict[str, Any]) -> None:
    seen = Seen(flaky=1, bad=99)
    for text in ("good", "flaky", "bad"):
        store.put(name, text.encode())

    with consumer(store, name, seen, retry=SOON, **options):
        until(lambda: len(store.dead_letters(name)) == 1, limit_s=120)
        until(lambda: len(seen.bodies) == 2)

    assert seen.attempts == {"good": [1], "flaky": [1, 2], "bad": [1, 2, 3]}
    [letter] = store.dead_letters(name)
    assert letter.text() == "bad"
    assert "ValueError" in letter.properties["dlq_reason"]


def test_ordered_consumer_keeps_the_order_of_a_group(store: Store, name: str) -> None:
    seen = Seen(a3=1, b5=2)
    for n in range(10):
        for group in "ab":
            store.put(name, f"{group}{n}".encode(), message_group=group)

    with consumer(store, name, seen, ordered=True, retry=mqstore.RetryPolicy(9, [0.1])):
        until(lambda: len(seen.bodies) >= 20)

    for group in "ab":
        assert [text for text in seen.bodies if text[0] == group] == [f"{group}{n}" for n in range(10)]


@pytest.mark.parametrize("ordered", [False, True])
def test_two_members_share_queues(store: Store, other: Store, name: str, ordered: bool) -> None:
    first, second = Seen(), Seen()
    store.create_topic(name, queues=4)

    with consumer(store, name, first, ordered=ordered) as one, ExitStack() as stack:
        until(lambda: share(one, name) == 4)
        two = stack.enter_context(consumer(other, name, second, ordered=ordered))
        until(lambda: share(one, name) == share(two, name) == 2)
        for n in range(40):
            store.put(name, str(n).encode())
        until(lambda: len(first.bodies) + len(second.bodies) >= 40)
        assert sorted(map(int, first.bodies + second.bodies)) == list(range(40))
        assert first.bodies
        assert second.bodies

        stack.close()
        until(lambda: share(one, name) == 4)


@pytest.mark.parametrize("ordered", [False, True])
def test_java_member_shares_queues_with_ours(cluster: Cluster, store: Store, name: str, ordered: bool) -> None:
    seen = Seen()
    store.create_topic(name, queues=4)

    with consumer(store, name, seen, ordered=ordered) as ours:
        until(lambda: share(ours, name) == 4)
        cluster.do("join", name, ordered)
        try:
            until(lambda: share(ours, name) == 2)
            for n in range(40):
                store.put(name, str(n).encode())
            until(lambda: len(seen.bodies) + len(cluster.do("received")) >= 40)
            assert sorted(map(int, seen.bodies + cluster.do("received"))) == list(range(40))
            assert len(seen.bodies) == 20
        finally:
            cluster.do("leave")
        until(lambda: share(ours, name) == 4)


def test_offsets_outlive_the_consumer(store: Store, other: Store, name: str) -> None:
    store.create_topic(name, queues=2)
    store.put_many(name, [b"1", b"2"], queue_id=0)
    seen = Seen()
    with consumer(store, name, seen):
        until(lambda: len(seen.bodies) == 2)
    store.put(name, b"3", queue_id=0)

    later = Seen()
    with consumer(other, name, later):
        until(lambda: later.bodies)

    assert later.bodies == ["3"]
    assert other.committed(name, (name, 0)) == 3
    until(lambda: other.lag(name)[mqstore.QueueRef(name, 0)] == 0)


def test_filters_are_applied(store: Store, name: str) -> None:
    for n in range(9):
        store.put(name, str(n).encode(), tag=f"t{n % 3}", properties={"n": str(n)})
    tags, sql = Seen(), Seen()
    by_tag = store.push_consumer(f"{name}-tags")
    by_tag.subscribe(name, tags, tags="t1 || t2")
    by_sql = store.push_consumer(f"{name}-sql")
    by_sql.subscribe(name, sql, sql="n > 6 AND TAGS <> 't1'")

    with by_tag, by_sql:
        until(lambda: len(tags.bodies) >= 6 and sql.bodies)

    assert sorted(tags.bodies) == ["1", "2", "4", "5", "7", "8"]
    assert sql.bodies == ["8"]


@pytest.mark.parametrize("mode", ["queue", "pop"])
def test_tags_with_the_same_hash_differ(store: Store, name: str, mode: Any) -> None:
    """Brokers compare only hashes. Those of "Aa" and "BB" are equal in Java."""
    store.put(name, b"no", tag="BB")
    store.put(name, b"yes", tag="Aa")
    seen = Seen()
    member = store.push_consumer(name, mode=mode)
    member.subscribe(name, seen, tags="Aa")

    with member:
        until(lambda: seen.bodies)
        store.put(name, b"no", tag="BB")
        store.put(name, b"last", tag="Aa")
        until(lambda: "last" in seen.bodies)

    assert seen.bodies == ["yes", "last"]


def test_broadcasting_members_get_every_message(store: Store, name: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store.create_topic(name, queues=2)
    seen = Seen(), Seen()
    members = [consumer(store, name, each, model="broadcasting", client_id=f"c{i}") for i, each in enumerate(seen)]

    with members[0], members[1]:
        for n in range(4):
            store.put(name, str(n).encode())
        until(lambda: all(len(each.bodies) == 4 for each in seen))

    again = Seen()
    store.put(name, b"4")
    with consumer(store, name, again, model="broadcasting", client_id="c0"):
        until(lambda: again.bodies)
    assert again.bodies == ["4"]


def test_simple_consumer_receives_and_settles(store: Store, name: str) -> None:
    store.put_many(name, [b"a", b"b"])
    with store.simple_consumer(name, {name: "*"}, visibility=30) as simple:
        got = simple.receive(10, wait=20)
        for each in got:
            each.ack()
        store.put(name, b"c")
        [late] = simple.receive(10, wait=20)
        late.nack(delay=1)
        [again] = simple.receive(10, wait=60)

        assert [each.message.body for each in got] == [b"a", b"b"]
        assert (again.message.body, again.attempt) == (b"c", 2)
        again.ack()


def test_pull_consumer_polls_seeks_and_commits(store: Store, name: str) -> None:
    store.create_topic(name, queues=2)
    for n in range(20):
        store.put(name, str(n).encode())
    with store.pull_consumer(name) as pull:
        pull.subscribe(name)
        got: list[Message] = []
        until(lambda: got.extend(pull.poll(1)) or len(got) >= 20)  # type: ignore[func-returns-value]
        pull.commit()
        pull.seek((name, 0), "earliest")
        [first, *_] = pull.poll(20)

    assert sorted(int(message.body) for message in got) == list(range(20))
    assert (first.queue_id, first.offset) == (0, 0)
    assert store.committed(name, (name, 1)) == 10


def test_group_can_be_reset(store: Store, name: str) -> None:
    store.put_many(name, [b"1", b"2"], queue_id=0)
    seen = Seen()
    with consumer(store, name, seen):
        until(lambda: len(seen.bodies) == 2)

    store.broker.reset(name, name, 0, "earliest")
    with consumer(store, name, seen):
        until(lambda: len(seen.bodies) == 4)


def test_dead_letters_are_replayed_to_their_group(store: Store, name: str) -> None:
    store.put(name, b"bad")
    seen = Seen(bad=1)
    with consumer(store, name, seen, retry=mqstore.RetryPolicy(1)):
        until(lambda: len(store.dead_letters(name)) == 1)
        assert store.dead_letters(name).replay().topics == {name: 1}
        until(lambda: seen.bodies == ["bad"], limit_s=120)

    with pytest.raises(NotSupportedError, match="mqadmin"):
        store.dead_letters(name).purge()


# -- transactions and delays ------------------------------------------------------------------------------------------


def test_transactions_commit_roll_back_and_are_checked(store: Store, name: str) -> None:
    seen = Seen()
    store.create_topic(name, queues=2)
    asked: list[str] = []

    def check(message: Message) -> bool:
        asked.append(message.text())
        return message.text() == "kept"

    with store.producer(name, checker=check) as producer, consumer(store, name, seen):
        with producer.transaction() as tx:
            tx.send(name, b"committed")
        tx = producer.transaction()
        tx.__enter__()
        tx.send(name, b"rolled back")
        tx.__exit__(ValueError, ValueError(), None)
        for text in (b"kept", b"dropped"):  # by a process that has ended inside of a block
            store.broker.transactions.prepare(name, text, {"UNIQ_KEY": f"{name}{text.decode()}"}, producer_group=name)
        until(lambda: len(seen.bodies) == 2 and "dropped" in asked, limit_s=120)

    assert sorted(seen.bodies) == ["committed", "kept"]
    assert "rolled back" not in asked


def test_delayed_message_comes_later(store: Store, name: str) -> None:
    receipt = store.put(name, b"level", delay_level=1)
    store.put(name, b"timer", delay=1.5)
    assert not list(store.iter(name, receipt.queue_id))

    found: list[bytes] = []
    with store.simple_consumer(name, {name: "*"}) as simple:
        until(lambda: found.extend(each.message.body for each in simple.receive(wait=5)) or len(found) == 2)  # type: ignore[func-returns-value]

    assert sorted(found) == [b"level", b"timer"]


def test_delayed_message_is_recalled(store: Store, name: str) -> None:
    receipt = store.put(name, b"no", delay=3)
    last = store.put(name, b"yes", delay=4)

    assert receipt.recall_handle is not None
    assert store.recall(receipt.recall_handle)
    with store.simple_consumer(name, {name: "*"}) as simple:
        [got] = simple.receive(wait=60)
        assert got.message.unique_key == last.unique_key


# -- limits -----------------------------------------------------------------------------------------------------------


def test_operations_that_a_cluster_lacks_say_what_to_do(store: Store, name: str) -> None:
    store.put(name, b"x")
    for call in (store.stats, lambda: list(store.verify()), lambda: store.snapshot("/nowhere")):
        with pytest.raises(NotSupportedError, match="Apache RocketMQ cluster; "):
            call()
    with pytest.raises(ConfigError, match=r"has queues 0\.\.3"):
        store.read(name, 4, 0)


def test_differences_are_logged_once(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mqstore")
    with mqstore.connect(cluster.name_server):
        pass

    [line] = [each.message for each in caplog.records if "Apache RocketMQ cluster" in each.message]
    assert "docs/cluster.md" in line


def test_stopped_broker_is_left_out_of_sends(cluster: Cluster, store: Store, name: str) -> None:
    store.create_topic(name, queues=4)
    with store.producer() as producer:
        producer.send(name, b"before")
        cluster.do("stop", "broker-b")
        try:
            receipts = [producer.send(name, b"during") for _ in range(8)] + [store.put(name, b"during")]
            queue_ids = {receipt.queue_id for receipt in receipts}
            with pytest.raises(mqstore.MQStoreError):
                store.put(name, b"to that one", queue_id=3)
        finally:
            cluster.do("start", "broker-b")

    assert queue_ids <= {0, 1}
    with mqstore.connect(cluster.name_server) as later:
        assert {later.put(name, b"after").queue_id for _ in range(4)} == {0, 1, 2, 3}
