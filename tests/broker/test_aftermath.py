"""What happens to messages that are under way when what they belong to changes: topics deleted and made again, with
fewer queues; groups deleted; limits lowered; and where a new group begins when the process dies at once.

Under way is what waits for a level or a moment, a half message, a retry, a delivery in flight. Each of these was lost,
hidden or given to the wrong consumer once; a test says what a user would have seen.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mqstore import (
    Broker,
    ConfigError,
    InvalidMessageError,
    MessageStore,
    QueueRef,
    Retention,
    SimulatedClock,
    StoreConfig,
    TopicNotFoundError,
    TransactionStateError,
)
from mqstore.broker.localoffsets import LOCAL_OFFSETS, LocalOffsets
from mqstore.broker.names import POP_LOG_TOPIC, SCHEDULE_GROUP, dlq_topic
from mqstore.broker.parts import open_parts
from mqstore.layout.properties import SHARDINGKEY

S = 1_000
DAY = 86_400 * S


class Bench:
    """A broker under a clock that can die, leaving what SIGKILL leaves, and come back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = SimulatedClock()
        self.asked: list[bytes] = []

    def open(self, **config: Any) -> Bench:
        self.broker = Broker(MessageStore(self.path, config=StoreConfig(clock=self.clock, **config)))
        return self

    def reopen(self, **config: Any) -> None:
        self.broker.close()
        self.broker.store.close()
        self.open(**config)

    def kill(self) -> None:
        image = self.path.with_name("image")
        shutil.copytree(self.path, image)
        self.broker.close()
        self.broker.store.close()
        shutil.rmtree(self.path)
        image.rename(self.path)
        self.open()

    def ten_old(self) -> int:
        """Put ten messages; where the sixth lies."""
        self.broker.put_many("t", [b"old %d" % n for n in range(10)], queue_id=0)
        return self.broker.read("t", 0, 5, 1).messages[0].physical_offset

    def lose_tail(self, physical_offset: int) -> None:
        """Die, and find a log that ends there."""
        self.broker.close()
        self.broker.store.close()
        with (self.path / "commitlog" / f"{0:020d}").open("r+b") as log:
            log.seek(physical_offset)
            log.write(bytes(1 << 20))
        (self.path / "abort").write_text("1")

    def settle(self) -> None:
        while (due_ms := self.broker.run_once()) is not None and due_ms <= self.clock.now_ms():
            pass

    def advance(self, duration_ms: int) -> None:
        self.clock.advance(duration_ms)
        self.settle()

    def pop(self, group: str = "g", topic: str = "t", n: int = 32) -> list[bytes]:
        """Bodies of what comes, acknowledged."""
        bodies = []
        for _ in range(5):  # of its retries a topic gives some at some pops only
            found = self.broker.pop(group, topic, n)
            bodies += [each.message.body for each in found]
            self.broker.ack(group, topic, [each.receipt for each in found])
        return bodies

    def check(self, message: Any) -> bool:
        self.asked.append(message.body)
        return True


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "store").open()
    yield made
    made.broker.close()
    made.broker.store.close()


def three_under_way(bench: Bench, topic: str = "t", queue_id: int = 3) -> Any:
    """One by level, one by timer, and a half message, which is returned."""
    bench.broker.put(topic, b"level", queue_id=queue_id, delay_level=3)
    bench.broker.put(topic, b"timer", queue_id=queue_id, delay=10)
    return bench.broker.transactions.begin(topic, b"half", producer_group="p", queue_id=queue_id)


# --- fewer queues -----------------------------------------------------------------------------------------------------


def test_what_was_to_come_into_a_queue_that_is_no_more_comes_into_another(bench: Bench) -> None:
    """Three messages were stored where nobody may read, and held the log for ever."""
    bench.broker.topics.create("t", queues=4)
    assert bench.pop() == []
    half = three_under_way(bench)
    bench.broker.topics.alter("t", write_queues=2)
    bench.broker.topics.alter("t", read_queues=2)
    bench.broker.transactions.end(half, "commit")
    bench.advance(20 * S)
    assert sorted(bench.pop()) == [b"half", b"level", b"timer"]
    assert bench.broker.store.offsets_or_none("t", 3) is None


def test_a_half_message_of_a_group_goes_where_its_group_goes_now(bench: Bench) -> None:
    bench.broker.topics.create("t", queues=8)
    names = [f"g{i}" for i in range(20)]
    prepare = bench.broker.transactions.prepare
    halves = [prepare("t", b"", {SHARDINGKEY: name}, producer_group="p", queue_id=7) for name in names]
    bench.broker.topics.alter("t", write_queues=3)
    bench.broker.topics.alter("t", read_queues=3)
    for half, name in zip(halves, names, strict=True):
        receipt = bench.broker.transactions.end(half, "commit")
        assert receipt is not None
        assert receipt.queue == bench.broker.put("t", b"", message_group=name).queue


# --- deleted topics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True])
def test_what_waited_for_a_deleted_topic_does_not_bring_it_back_nor_come_into_a_new_one(
    bench: Bench, again: bool
) -> None:
    bench.broker.topics.create("t", queues=2)
    half = three_under_way(bench, queue_id=1)
    bench.broker.put("t", b"far", queue_id=1, delay=5 * DAY // S)  # rolled on its way
    bench.settle()
    bench.broker.topics.delete("t")
    if again:
        bench.broker.topics.create("t", queues=1)
        bench.broker.put("t", b"new", delay=5)
    bench.reopen()
    bench.advance(20 * S)
    with pytest.raises(TransactionStateError, match="deleted"):
        bench.broker.transactions.end(half, "commit")
    assert bench.broker.stats().open_transactions == 0
    for _ in range(7):
        bench.advance(DAY)
    if again:
        assert bench.pop() == [b"new"]
    else:
        assert "t" not in bench.broker.topics.names()
    assert bench.broker.stats().timer_waiting == 0
    pin = bench.broker.stats().oldest_pin
    assert pin is None or pin.topic == POP_LOG_TOPIC, "nothing of them holds the log"


def test_a_check_of_a_half_message_of_a_deleted_topic_ends_it(bench: Bench) -> None:
    bench.broker.topics.create("t", queues=2)
    bench.broker.transactions.begin("t", b"half", producer_group="p")
    bench.broker.transactions.on_check("p", bench.check)
    bench.broker.topics.delete("t")
    bench.advance(60 * S)
    assert bench.asked == [b"half"]
    assert bench.broker.stats().open_transactions == 0
    assert "t" not in bench.broker.topics.names()


def test_a_lost_tail_of_the_log_does_not_make_a_deletion_reach_what_comes_later(bench: Bench) -> None:
    """Where the log ended is where a topic was deleted; if it ends before that now, positions mean other messages."""
    bench.broker.topics.create("t", queues=1)
    bench.broker.put_many("fill", [bytes(1000)] * 50, queue_id=0)
    bench.broker.topics.delete("t")
    table = bench.broker._parts.offsets
    table._committed["t"]["CID_RMQ_SYS_DELETED"][0] += 1 << 20  # as if so much were gone
    table._changes += 1
    bench.reopen()
    bench.broker.topics.create("t", queues=1)
    bench.broker.put("t", b"new", delay=5)
    bench.advance(20 * S)
    assert bench.pop() == [b"new"]


@pytest.mark.parametrize("version", [1, 2])
def test_retries_of_pop_go_with_their_topic(bench: Bench, version: Any) -> None:
    bench.reopen(pop_retry_version=version)
    broker = bench.broker
    broker.topics.create("orders", queues=1)
    broker.put("orders", b"old")
    [delivery] = broker.pop("g", "orders")
    broker.nack("g", "orders", delivery.receipt, delay=0)
    bench.advance(1)
    broker.topics.delete("orders", force=True)
    assert broker.topics.names() == []
    broker.topics.create("orders", queues=1)
    broker.put("orders", b"new")
    assert bench.pop("g", "orders") == [b"new"]


def test_retries_whose_name_another_group_shares_stay(bench: Bench) -> None:
    """Version 1: group `a`, topic `b_c` and group `a_b`, topic `c` have one retry topic."""
    bench.reopen(pop_retry_version=1)
    broker = bench.broker
    for group, topic in (("a", "b_c"), ("a_b", "c")):
        broker.topics.create(topic, queues=1)
        broker.put(topic, topic.encode())
        [delivery] = broker.pop(group, topic)
        broker.nack(group, topic, delivery.receipt, delay=0)
    bench.advance(1)
    broker.topics.delete("b_c", force=True)
    assert b"c" in bench.pop("a_b", "c")


@pytest.mark.parametrize("deleted", ["group", "topic"])
def test_the_retries_of_a_group_whose_name_meets_those_of_another_group_and_a_topic_stay(
    bench: Bench, deleted: str
) -> None:
    """`%RETRY%a_b` is of group `a_b`, and was taken for that of group `a` and topic `b`."""
    broker = bench.broker
    for topic in ("orders", "b"):
        broker.topics.create(topic, queues=1)
        broker.put(topic, topic.encode())
    assert bench.pop("a", "b") == [b"b"]
    broker.groups.create("a_b")  # it has no progress anywhere yet
    [message] = broker.read("orders", 0, 0, 1).messages
    broker.send_back("a_b", message.physical_offset, delay_level=1)
    if deleted == "group":
        broker.delete_group("a")
    else:
        broker.topics.delete("b", force=True)
    bench.advance(2 * S)
    assert broker.store.offsets_or_none("%RETRY%a_b", 0) == (0, 1)
    assert bench.pop("a_b", "%RETRY%a_b") == [b"orders"]


def test_retries_of_pop_whose_name_is_that_of_a_groups_retry_topic_stay(bench: Bench) -> None:
    bench.reopen(pop_retry_version=1)
    broker = bench.broker
    broker.topics.create("b", queues=1)
    broker.put("b", b"x")
    [delivery] = broker.pop("a", "b")
    broker.nack("a", "b", delivery.receipt, delay=0)
    bench.advance(1)
    broker.groups.create("a_b")
    broker.delete_group("a_b")
    assert bench.pop("a", "b") == [b"x"]


# --- deleted groups ---------------------------------------------------------------------------------------------------


def test_a_group_of_the_same_name_does_not_get_what_was_to_come_again(bench: Bench) -> None:
    """It was acknowledged, even; the copy among the retries came again, since nobody's progress said so any more."""
    broker = bench.broker
    broker.topics.create("t", queues=1)
    broker.groups.create("g", start="latest")
    assert broker.start_of("g", "t", 0) == 0
    for body in (b"acknowledged", b"waits"):
        broker.put("t", body)
        [delivery] = broker.pop("g", "t")
        broker.nack("g", "t", delivery.receipt, delay=0)
        bench.advance(1)
        if body == b"acknowledged":
            assert bench.pop() == [body]
    [message] = broker.read("t", 0, 0, 1).messages
    broker.send_back("g", message.physical_offset)  # due in ten seconds
    broker.delete_group("g")
    assert not [name for name in broker.topics.names() if name.startswith("%RETRY%")]
    broker.groups.create("g", start="latest")
    bench.advance(20 * S)
    assert bench.pop() == []


def test_nothing_of_a_deleted_group_holds_the_log(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store").open(segment_bytes=4096, retention=Retention(age=60))
    broker = bench.broker
    broker.topics.create("t", queues=1)
    broker.put("t", b"x")
    [delivery] = broker.pop("g", "t")
    broker.nack("g", "t", delivery.receipt, delay=0)
    bench.advance(1)
    broker.delete_group("g")
    broker.groups.create("h")
    for _ in range(30):
        broker.put_many("t", [bytes(100)] * 20, queue_id=0)
        while bench.pop("h"):
            pass
        bench.advance(30 * S)
    assert broker.store.min_offset > 0
    bench.broker.close()
    bench.broker.store.close()


def test_what_a_deleted_group_was_to_have_is_given_to_no_other(bench: Bench) -> None:
    """`%RETRY%a_b` is the retry topic of group `a_b`, and of group `a` and topic `b` in version 1."""
    broker = bench.broker
    broker.topics.create("x", queues=1)
    broker.topics.create("b", queues=1)
    broker.put("x", b"of a_b")
    [delivery] = broker.pop("a_b", "x")
    broker.send_back("a_b", delivery.message.physical_offset, delay=0)
    broker.delete_group("a_b")
    broker.put("b", b"for a")
    assert bench.pop("a", "b") == [b"for a"]


# --- where a group begins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [0, 3])
@pytest.mark.parametrize("joins", ["start_of", "pop"])
def test_a_group_that_begins_at_the_end_skips_nothing_when_the_process_dies(bench: Bench, joins: str, old: int) -> None:
    """What was put between its coming and the crash was skipped for ever (reliability#p3)."""
    broker = bench.broker
    broker.topics.create("t", queues=2)
    for queue_id in range(2):
        broker.put_many("t", [b"old"] * old, queue_id=queue_id)
    broker.groups.create("g", start="latest")
    if joins == "pop":
        assert broker.pop("g", "t") == []
    else:
        assert broker.start_of("g", "t", 0) == old
    for queue_id in (0, 1):
        broker.put("t", b"new", queue_id=queue_id)
    broker.store.flush()
    bench.kill()
    assert bench.pop() == [b"new", b"new"]


def test_a_beginning_that_could_not_be_saved_is_none(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = bench.broker
    broker.topics.create("t", queues=1)
    broker.groups.create("g", start="latest")

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(broker._parts.offsets._file, "save", refuse)
        with pytest.raises(OSError, match="no space"):
            broker.start_of("g", "t", 0)
        assert broker.committed("g", "t", 0) is None
    broker.put("t", b"old", queue_id=0)
    assert broker.start_of("g", "t", 0) == 1
    broker.put("t", b"new", queue_id=0)
    bench.kill()
    assert bench.pop() == [b"new"]


# --- limits that were lowered -----------------------------------------------------------------------------------------


def test_what_is_larger_than_may_be_put_by_now_is_delivered_all_the_same(bench: Bench) -> None:
    """The timer threw it away; a level tried again for ever, and nothing behind it came."""
    broker = bench.broker
    broker.topics.create("t", queues=1)
    broker.put("t", b"T" * 3000, delay=30)
    broker.put("t", b"L" * 3000, delay_level=3)
    broker.put("t", b"small", delay_level=3)
    half = broker.transactions.begin("t", b"H" * 3000, producer_group="p")
    bench.settle()
    bench.reopen(max_message_size=1000)
    bench.broker.transactions.end(half, "commit")
    bench.advance(60 * S)
    assert sorted(body[:1] for body in bench.pop()) == [b"H", b"L", b"T", b"s"]
    assert bench.broker.store.offsets_or_none(dlq_topic(SCHEDULE_GROUP), 0) is None


def test_a_half_message_that_is_larger_than_may_be_put_by_now_is_given_up_like_others(bench: Bench) -> None:
    bench.broker.topics.create("t", queues=1)
    bench.broker.transactions.begin("t", b"H" * 3000, producer_group="p")
    bench.reopen(max_message_size=1000)
    for _ in range(20):
        bench.advance(DAY)
    assert bench.broker.stats().open_transactions == 0
    assert bench.broker.stats().errors == {}
    assert bench.broker.store.offsets_or_none("TRANS_CHECK_MAX_TIME_TOPIC", 0) == (0, 1)


def test_what_stops_a_level_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError("no space left")

    bench.broker.put("t", b"x", delay_level=1)
    monkeypatch.setattr(bench.broker._delay._road, "copy_many", refuse)
    bench.advance(2 * S)
    assert bench.broker.stats().errors == {"delay level 1": "OSError: no space left"}


# --- retention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [False, True])
def test_deliveries_are_kept_where_what_is_unconsumed_is_not(tmp_path: Path, order: bool) -> None:
    config: Any = {"segment_bytes": 4096, "retention": Retention(age=60, unconsumed="drop")}
    bench = Bench(tmp_path / "store").open(**config)
    broker = bench.broker
    broker.topics.create("t", queues=1)
    broker.put("t", b"in flight")
    broker.put_many("t", [bytes(100)] * 100)
    bench.advance(50 * S)
    [delivery] = broker.pop("g", "t", invisible=600, order=order)
    for _ in range(6):
        bench.advance(20 * S)
        broker.put_many("t", [bytes(100)] * 10)
    pin = broker.stats().oldest_pin
    assert pin is not None
    assert (pin.topic, pin.group, pin.why) == ("t", "g", "in flight")
    broker.nack("g", "t", delivery.receipt, delay=0)
    bench.advance(1 * S)
    assert not broker.stats().counters.lost
    assert b"in flight" in [each.message.body for _ in range(12) for each in broker.pop("g", "t", 32, order=order)]
    broker.close()
    broker.store.close()


@pytest.mark.parametrize("how", ["released", "in order, too late"])
def test_a_delivery_that_nobody_has_holds_nothing_there(tmp_path: Path, how: str) -> None:
    """A group that went away filled the disk, under the policy that is to prevent that."""
    config: Any = {"segment_bytes": 4096, "retention": Retention(age=60, unconsumed="drop")}
    bench = Bench(tmp_path / "store").open(**config)
    broker = bench.broker
    broker.topics.create("t", queues=1)
    broker.groups.create("g", max_attempts=None)
    broker.put("t", b"x", queue_id=0)
    [delivery] = broker.pop("g", "t", invisible=30, order=how != "released")
    if how == "released":
        broker.release("g", "t", [delivery.receipt])
    for _ in range(40):
        broker.put_many("t", [bytes(100)] * 20, queue_id=0)
        bench.advance(30 * S)
    assert broker.store.min_offset > 0
    broker.close()
    broker.store.close()


def test_a_delivery_whose_copy_cannot_be_put_is_kept_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time was over, so nothing held it; and on a full disk retention is busiest."""
    config: Any = {"segment_bytes": 4096, "retention": Retention(age=60, unconsumed="drop")}
    bench = Bench(tmp_path / "store").open(**config)
    broker = bench.broker
    broker.topics.create("t", queues=1)
    broker.put("t", b"x", queue_id=0)
    [_] = broker.pop("g", "t", invisible=90)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(broker._parts.road, "copy", refuse)
        for _ in range(20):
            broker.put_many("t", [bytes(100)] * 20, queue_id=0)
            bench.advance(30 * S)
    bench.advance(120 * S)
    assert not broker.stats().counters.lost
    assert b"x" in [each.message.body for _ in range(20) for each in broker.pop("g", "t", 32)]
    broker.close()
    broker.store.close()


# --- transactions -----------------------------------------------------------------------------------------------------


def test_producers_are_asked_however_long_the_store_was_closed(bench: Bench) -> None:
    bench.broker.topics.create("t", queues=1)
    bench.broker.transactions.begin("t", b"half", producer_group="p")
    bench.broker.close()
    bench.broker.store.close()
    bench.clock.advance(4 * DAY)
    bench.open()
    bench.settle()  # before they are back
    bench.advance(30 * S)
    assert bench.broker.stats().open_transactions == 1
    bench.broker.transactions.on_check("p", bench.check)
    bench.advance(60 * S)
    assert bench.asked == [b"half"]
    assert bench.pop() == [b"half"]


def test_one_that_nobody_asks_about_is_given_up_all_the_same(bench: Bench) -> None:
    bench.broker.topics.create("t", queues=1)
    bench.broker.transactions.begin("t", b"half", producer_group="p")
    bench.broker.close()
    bench.broker.store.close()
    bench.clock.advance(4 * DAY)
    bench.open()
    for _ in range(25):
        bench.advance(30 * S)
    assert bench.broker.stats().open_transactions == 0


def test_an_immunity_longer_than_the_age_does_not_keep_it_from_being_asked(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store").open(retention=Retention(age=3600))
    bench.broker.topics.create("t", queues=1)
    bench.broker.transactions.on_check("p", bench.check)
    bench.broker.transactions.begin("t", b"half", producer_group="p", immunity=7200)
    for _ in range(130):
        bench.advance(60 * S)
    assert bench.asked == [b"half"]
    assert bench.pop() == [b"half"]
    bench.broker.close()
    bench.broker.store.close()


# --- a log that was cut -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", ["put", "twice", "nothing"])
def test_a_group_skips_nothing_of_a_queue_that_was_cut_and_put_to_before_a_broker_came(
    tmp_path: Path, between: str
) -> None:
    """It had come to 100; the queue was cut at 40, and by the time that a broker looked it was longer than before."""
    path = tmp_path / "store"
    bench = Bench(path).open(segment_bytes=4096)
    bench.broker.topics.create("t", queues=1)
    for n in range(100):
        bench.broker.put("t", b"old %d" % n)
    while bench.pop():
        pass
    bench.broker.close()
    bench.broker.store.close()
    segments = sorted(file for file in (path / "commitlog").iterdir() if file.name.isdigit())
    for file in segments[-3:]:
        file.unlink()
    expected = []
    for turn in range({"put": 1, "twice": 2, "nothing": 0}[between]):
        with MessageStore(path, config=StoreConfig(clock=bench.clock)) as store:
            for n in range(100):
                expected.append(b"new %d %d" % (turn, n))
                store.put("t", expected[-1])
        (path / "abort").write_text("1")  # as if it had been killed
        (path / "checkpoint").unlink()
    bench.open()
    got = []
    while found := bench.pop():
        got += found
    assert [body for body in got if body.startswith(b"new")] == expected
    bench.broker.put("t", b"last")
    assert bench.pop() == [b"last"]
    bench.reopen()
    assert bench.pop() == [], "the note counts once"
    bench.broker.close()
    bench.broker.store.close()


# --- who waits --------------------------------------------------------------------------------------------------------


def test_who_waits_for_a_topic_that_is_deleted_is_told_at_once(tmp_path: Path) -> None:
    """It slept until its time was over, and was told that nothing had come."""
    with Broker(MessageStore(tmp_path / "store")) as broker, ThreadPoolExecutor() as pool:
        broker.topics.create("t", queues=1)
        assert broker.pop("g", "t") == []
        waiting = pool.submit(broker.pop, "g", "t", poll=600)
        while not broker._waiters.parked:
            time.sleep(0.001)
        broker.topics.delete("t", force=True)
        with pytest.raises(TopicNotFoundError):
            waiting.result(60)
    broker.store.close()


@pytest.mark.parametrize("immunity", [float("inf"), 10**400, 1e18])
def test_an_immunity_that_cannot_be_is_refused_by_name(bench: Bench, immunity: Any) -> None:
    with pytest.raises(ConfigError, match="immunity"):
        bench.broker.transactions.begin("t", b"", producer_group="p", immunity=immunity)


def test_a_level_is_a_number(bench: Bench) -> None:
    """True was stored as such, and the message not delayed."""
    with pytest.raises(InvalidMessageError, match="delay_level"):
        bench.broker.put("t", b"", delay_level=True)


@pytest.mark.parametrize("between", ["nothing", "puts", "tables", "puts, crash", "crash"])
def test_a_batch_in_order_of_a_queue_that_was_cut_leaves_no_gap(tmp_path: Path, between: str) -> None:
    """The file of order info said that 4, 5 and 6 were acknowledged, and the queue ended at 5: what came as 5 and 6 was
    skipped."""
    path = tmp_path / "store"
    bench = Bench(path).open()
    broker = bench.broker
    broker.topics.create("t", queues=1)
    broker.groups.create("g", orderly=True)
    sixth = bench.ten_old()
    first = broker.pop("g", "t", 4, order=True)
    broker.ack("g", "t", [each.receipt for each in first])
    second = broker.pop("g", "t", 6, order=True)
    broker.ack("g", "t", [each.receipt for each in second[:3]])
    bench.advance(10 * S)
    broker.save()
    bench.lose_tail(sixth)
    expected = [b"new %d" % n for n in range(8)]
    if between.startswith("puts") or between == "tables":
        with MessageStore(path, config=StoreConfig(clock=bench.clock)) as store:
            for body in expected:
                store.put("t", body, queue_id=0)
    if between == "tables":  # a command that changes tables, and knows nothing of pop
        with MessageStore(path, config=StoreConfig(clock=bench.clock)) as store:
            open_parts(store).topics.create("other")
    bench.open()
    if between in ("nothing", "crash"):
        for body in expected:
            bench.broker.put("t", body, queue_id=0)
    if between.endswith("crash"):
        bench.broker.store.flush()
        bench.kill()
    bench.advance(100 * S)
    got: list[bytes] = []
    while batch := bench.broker.pop("g", "t", 32, order=True):
        got += [each.message.body for each in batch]
        bench.broker.ack("g", "t", [each.receipt for each in batch])
    assert [body for body in got if body.startswith(b"new")] == expected
    bench.broker.close()
    bench.broker.store.close()


def test_attempts_of_a_queue_that_was_cut_are_no_other_messages(tmp_path: Path) -> None:
    """A message that had failed fifteen times was cut; the new one of its number died of its first failure."""
    path = tmp_path / "store"
    bench = Bench(path).open()
    broker = bench.broker
    broker.topics.create("t", queues=1)
    broker.groups.create("g", orderly=True)
    sixth = bench.ten_old()
    for offset in (3, 7):
        broker.note_attempt("g", "t", 0, offset, 15)
    bench.advance(10 * S)
    broker.save()
    bench.lose_tail(sixth)
    with MessageStore(path, config=StoreConfig(clock=bench.clock)) as store:
        store.put_many("t", [b"new"] * 8, queue_id=0)
    bench.open()
    assert bench.broker.attempts("g", "t", 0) == {3: 15}
    bench.broker.close()
    bench.broker.store.close()


def test_a_client_that_broadcasts_skips_nothing_in_a_queue_that_was_cut(tmp_path: Path) -> None:
    """Of a file that is damaged nothing is changed: its own client tells what to do."""
    path = tmp_path / "store"
    bench = Bench(path).open()
    bench.broker.topics.create("t", queues=2)
    sixth = bench.ten_old()

    def offsets(client: str) -> LocalOffsets:
        return LocalOffsets(path / LOCAL_OFFSETS, client, "prices")

    for client, offset in (("a-1", 10), ("b-1", 3)):
        file = offsets(client)
        file.update(QueueRef("t", 0), offset)
        file.update(QueueRef("t", 1), 0)
        file.persist()
    (path / LOCAL_OFFSETS / "bad").mkdir()
    (path / LOCAL_OFFSETS / "bad" / "prices.json").write_text("{")
    bench.lose_tail(sixth)
    with MessageStore(path, config=StoreConfig(clock=bench.clock)) as store:
        store.put_many("t", [b"new"] * 8, queue_id=0)
    bench.open()
    assert [offsets(client).get(QueueRef("t", 0)) for client in ("a-1", "b-1")] == [5, 3]
    assert [offsets(client).get(QueueRef("t", 1)) for client in ("a-1", "b-1")] == [0, 0]
    assert (path / LOCAL_OFFSETS / "bad" / "prices.json").read_text() == "{"
    bench.broker.close()
    bench.broker.store.close()


def test_the_start_of_a_queue_that_was_cut_hides_nothing_new(tmp_path: Path) -> None:
    """What a deletion had hidden began behind the new messages' numbers."""
    path = tmp_path / "store"
    bench = Bench(path).open()
    broker = bench.broker
    broker.topics.create("t", queues=1)
    sixth = bench.ten_old()
    broker.topics.delete("t")
    bench.lose_tail(sixth)
    with MessageStore(path, config=StoreConfig(clock=bench.clock)) as store:
        store.put_many("t", [b"new %d" % n for n in range(8)], queue_id=0)
    bench.open()
    bench.broker.topics.create("t", queues=1)
    assert bench.pop() == [b"new %d" % n for n in range(8)]
    bench.broker.close()
    bench.broker.store.close()


def test_nobody_counts_on_a_beginning_before_it_is_on_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two members that come at once the second took what the first was just saving; and when that failed, what the
    second had committed since was taken back with it."""
    broker = bench.broker
    broker.topics.create("t", queues=1)
    broker.put_many("t", [b"old"] * 3, queue_id=0)
    broker.groups.create("g", start="latest")
    file = broker._parts.offsets._file
    saving, go_on, save = threading.Event(), threading.Event(), file.save

    def slow(value: Any, **options: Any) -> None:
        saving.set()
        assert go_on.wait(30)
        save(value, **options)

    monkeypatch.setattr(file, "save", slow)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(broker.start_of, "g", "t", 0)
        assert saving.wait(30)
        second = pool.submit(broker.start_of, "g", "t", 0)
        assert broker.committed("g", "t", 0) is None
        with pytest.raises(TimeoutError):
            second.result(0.1)
        go_on.set()
        assert (first.result(30), second.result(30)) == (3, 3)


def test_where_a_group_that_begins_at_the_end_was_put_at_the_front_it_stays(bench: Bench) -> None:
    broker = bench.broker
    broker.topics.create("t", queues=2)
    broker.groups.create("g", start="latest")
    assert broker.start_of("g", "t", 0, "earliest") == 0
    broker.put("t", b"new", queue_id=0)
    broker.store.flush()
    bench.kill()
    assert bench.pop() == [b"new"]
