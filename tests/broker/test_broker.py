"""The broker whole: mechanisms on one store, driven by one clock, through its door (clients#contract)."""

from __future__ import annotations

import errno
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import mqstore
from mqstore import Durability, QueueRef, Retention, SendReceipt, SimulatedClock
from mqstore.errors import (
    ConfigError,
    CorruptStoreError,
    FilterError,
    GroupNotFoundError,
    NotPermittedError,
    OffsetOutOfRangeError,
    ReadOnlyStoreError,
    StoreClosedError,
    TopicNotFoundError,
)
from mqstore.log.store import _close_all
from tests.broker.support import Bench, Broker, Mode, full
from tests.children import in_child
from tests.faults import FaultyFileSystem
from tests.holding import new_threads
from tests.log.support import Unsynced, open_store
from tests.waiting import ended, in_thread, until

MINUTE, HOUR = 60_000, 3_600_000


def test_reading_by_offset_with_commits(bench: Bench, broker: Broker) -> None:
    for n in range(5):
        broker.put("t", b"%d" % n)
    assert broker.committed("g", "t", 0) is None
    offset = broker.start_of("g", "t", 0)
    result = broker.read("t", 0, offset, 3, group="g")
    assert (result.status, [m.body for m in result.messages]) == ("FOUND", [b"0", b"1", b"2"])

    broker.commit("g", "t", 0, result.next_offset)

    assert broker.lag("g") == {QueueRef("t", 0): 2}
    assert bench.again().committed("g", "t", 0) == 3
    assert bench.broker.reset("g", "t", None, "earliest") == {QueueRef("t", 0): 0}
    saved = json.loads((bench.path / "config" / "consumerOffset.json").read_text())
    assert saved["offsetTable"]["t@g"] == {"0": 0}  # at once: nobody would say it again after a crash
    assert bench.broker.lag("g") == {QueueRef("t", 0): 5}


def test_commit_moves_a_group_and_reset_waits_for_its_member(broker: Broker) -> None:
    """The vector of clients#offset-vectors, at the door that consumers commit by: the last one counts, also if it is
    less; after a reset, which is the engine's freeze, late ones do not; of a group that is deleted nothing is known."""
    broker.put_many("t", [b""] * 1_100, queue_id=0)
    for offset in (1024, 1023):
        broker.commit("g", "t", 0, offset)
    assert broker.committed("g", "t", 0) == 1023

    broker.reset("g", "t", 0, 7)
    broker.commit("g", "t", 0, 1024)
    assert broker.committed("g", "t", 0) == 7
    found = broker.read("t", 0, 1024, 1, group="g")  # by who has not heard of it
    assert (found.messages, found.next_offset) == ([], 7)
    broker.commit("g", "t", 0, 8)
    assert broker.committed("g", "t", 0) == 8

    broker.delete_group("g")
    assert broker.committed("g", "t", 0) is None


@pytest.mark.parametrize("options", [{"delay": 0.05}, {"delay_level": 1}], ids=["any delay", "level"])
def test_returned_message_keeps_its_unique_key(bench: Bench, options: dict[str, Any]) -> None:
    """It was given another one while it waited for a delay of no level, so that nobody could tell it came twice."""
    broker = bench.broker
    broker.groups.create("g")
    first = broker.put("t", b"x", queue_id=0)
    assert first.unique_key == first.message_id

    broker.send_back("g", first.physical_offset, **options)
    bench.advance(2_000)
    [second] = broker.read("%RETRY%g", 0, 0).messages
    broker.send_back("g", second.physical_offset, **options)
    bench.advance(2_000)
    [_, third] = broker.read("%RETRY%g", 0, 0).messages

    assert [second.unique_key, third.unique_key] == [first.unique_key] * 2


# -- retention ----------------------------------------------------------------------------------------------------


def fill(broker: Broker, topic: str, megabytes: float) -> None:
    body = b"." * 1000
    for _ in range(int(megabytes * 1000)):
        broker.put(topic, body, queue_id=0)


def test_unconsumed_messages_are_kept_by_a_named_pin(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", retention=Retention(age=None, max_bytes=100_000))
    broker = bench.broker
    broker.topics.create("t", queues=1)
    fill(broker, "t", 0.3)
    broker.commit("slow", "t", 0, 0)
    broker.commit("quick", "t", 0, 300)
    bench.advance(20_000)
    assert broker.min_offset("t", 0) == 0
    pin = broker.stats().oldest_pin
    assert pin is not None
    assert (pin.topic, pin.queue_id, pin.group) == ("t", 0, "slow")

    broker.commit("slow", "t", 0, 200)
    broker.store.flush()
    bench.advance(20_000)

    assert 0 < broker.min_offset("t", 0) <= 200
    bench.broker.close()


@pytest.mark.parametrize("held", [("popped",), ("popped", "delayed")])  # alone, a delayed one is rolled
def test_a_message_in_flight_and_one_delayed_hold_the_log(tmp_path: Path, held: tuple[str, ...]) -> None:
    bench = Bench(tmp_path / "store", retention=Retention(age=None, max_bytes=0))
    broker = bench.broker
    broker.topics.create("t", queues=1)
    for body in held:
        broker.put("t", body.encode(), delay_level=18 if body == "delayed" else None)
    deliveries = broker.pop("g", "t", invisible=HOUR / 1000)
    fill(broker, "other", 0.3)
    broker.commit("g", "other", 0, 300)
    broker.store.flush()
    bench.advance(HOUR // 2)

    assert broker.store.min_offset == 0
    assert [each.message.body for each in deliveries] == [b"popped"] * ("popped" in held)
    broker.ack("g", "t", [each.receipt for each in deliveries])
    bench.advance(2 * HOUR)
    assert bench.bodies() == [b"delayed"] * ("delayed" in held)
    broker.store.flush()
    bench.advance(MINUTE)
    assert broker.store.min_offset > 0
    bench.broker.close()


@pytest.fixture
def dropping(tmp_path: Path) -> Iterator[Bench]:
    """Topic `t` of one queue, in small segments that go after a minute, consumed or not."""
    bench = Bench(tmp_path / "store", segment_bytes=4096, retention=Retention(age=60, unconsumed="drop"))
    bench.broker.topics.create("t", queues=1)
    yield bench
    bench.broker.close()


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize("ends", ["acknowledged", "expired"])
def test_unconsumed_drop_drops_a_message_in_flight(dropping: Bench, order: bool, ends: str) -> None:
    """One handler that hung and renewed its message kept the whole log, for ever."""
    broker = dropping.broker
    broker.put("t", b"held", queue_id=0)
    [delivery] = broker.pop("g", "t", invisible=60, order=order)
    for _ in range(40):
        broker.put_many("t", [bytes(100)] * 20, queue_id=0)
        broker.renew("g", "t", delivery.receipt, 60)
        dropping.jump(30_000)
    assert broker.store.offsets("t", 0)[0] > 0
    # Of 40 rounds in more than 40 segments the policy keeps the last three. Replaying pops needs four segments.
    assert broker.store.max_offset - broker.store.min_offset < 12 * 4096
    assert delivery.message.body == b"held"
    if ends == "acknowledged":
        broker.ack("g", "t", [delivery.receipt])
    dropping.jump(60_000)
    assert all(each.message.body != b"held" for _ in range(12) for each in broker.pop("g", "t", 32, order=order))
    assert any(loss.old == 0 for loss in broker.take_losses("g")) == (ends == "expired")


@pytest.mark.parametrize("how", ["released", "in order, too late"])
def test_unconsumed_drop_drops_released_and_late_deliveries(dropping: Bench, how: str) -> None:
    """A group that went away filled the disk, under the policy that is to prevent that."""
    broker = dropping.broker
    broker.groups.create("g", max_attempts=None)
    broker.put("t", b"x", queue_id=0)
    [delivery] = broker.pop("g", "t", invisible=30, order=how != "released")
    if how == "released":
        broker.release("g", "t", [delivery.receipt])
    for _ in range(40):
        broker.put_many("t", [bytes(100)] * 20, queue_id=0)
        dropping.jump(30_000)
    assert broker.store.min_offset > 0


# -- running it ---------------------------------------------------------------------------------------------------


def test_a_reader_is_no_broker(bench: Bench) -> None:
    bench.broker.put("t", b"x")
    bench.broker.store.flush()

    with open_store(bench.path, "r") as reader, pytest.raises(ReadOnlyStoreError):
        Broker(reader)


def test_a_mechanism_that_fails_shows_and_goes_on_when_the_cause_is_gone(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    clock = SimulatedClock()
    broker = Broker(open_store(tmp_path / "store", clock=clock, fs=fs, segment_bytes=1 << 16))
    broker.put("t", b"x")
    broker.commit("g", "t", 0, 0)
    broker.run_once()
    fs.fail("pwrite", errno.ENOSPC, times=None, path_part="consumerOffset.json")
    clock.advance(6000)
    broker.run_once()
    assert "StoreFullError" in broker.stats().errors["offsets"]
    assert [each.message.body for each in broker.pop("g", "t")] == [b"x"]

    fs.heal()
    clock.advance(20_000)
    broker.run_once()

    assert broker.stats().errors == {}
    broker.close()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda broker: broker.groups.alter("g", consume_enable=False), NotPermittedError),
        (lambda broker: broker.groups.forbid("g", "t"), NotPermittedError),
        (lambda broker: broker.delete_group("g"), GroupNotFoundError),
        (lambda broker: broker.topics.alter("t", perm=2), NotPermittedError),
        (lambda broker: broker.topics.delete("t", force=True), TopicNotFoundError),
    ],
)
def test_waiting_pop_ends_when_the_group_is_deleted(
    bench: Bench, broker: Broker, change: Callable[[Broker], object], error: type[Exception]
) -> None:
    """Only of a topic that was deleted. Of a group that was deleted or disabled who waited heard when his time was
    over; and if a message came first his pop made the deleted group anew."""
    broker.groups.create("g")
    waiting = in_thread(lambda: broker.pop("g", "t", poll=3600))
    until(lambda: bench.waiters.parked)
    change(broker)

    assert type(ended(*waiting)) is error
    assert (broker.groups.get("g") is None) == (error is GroupNotFoundError)


def test_no_member_broadcasts_in_a_group_that_may_not(bench: Bench) -> None:
    """Only the push consumer of this library asked: what registers for a remote client was let in."""
    members, subscriptions = bench.broker.members, {"t": ("TAG", "*")}
    bench.broker.groups.create("g", consume_broadcast_enable=False)
    with pytest.raises(NotPermittedError, match="'g' may not broadcast; alter it: consume_broadcast_enable=True"):
        members.register("c", "g", subscriptions, Mode("queue", broadcasting=True))
    assert members.members("g") == []
    assert members.register("c", "g", subscriptions, Mode("queue"))
    assert members.register("c", "new", subscriptions, Mode("queue", broadcasting=True))
    bench.broker.groups.alter("g", consume_broadcast_enable=True)
    assert members.register("c", "g", subscriptions, Mode("queue", broadcasting=True))


def test_leaving_a_closed_broker_is_harmless(bench: Bench) -> None:
    broker, queue = bench.broker, QueueRef("t", 0)
    broker.locks.try_lock("g", queue, "c")
    broker.members.register("c", "g", {"t": ("TAG", "*")}, Mode("queue"))
    broker.transactions.on_check("p", lambda half: True)
    broker.close()
    assert broker.locks.unlock_batch("g", [queue], "c") == {queue}
    assert broker.members.unregister("c", "g")
    broker.transactions.on_check("p", None)


def settling_calls(broker: Broker) -> dict[str, Callable[..., object]]:
    """Each call that says what became of a delivery, with one of its own; to be given a durability or none."""
    for n in range(7):
        broker.put("t", b"%d" % n)
    receipts = [each.receipt for each in broker.pop("g", "t", 6, durability="append")]
    [last] = broker.read("t", 0, 6).messages
    broker.store.flush()
    return {
        "ack": partial(broker.ack, "g", "t", receipts[:1]),
        "change_invisible": partial(broker.change_invisible, "g", "t", receipts[1], 600),
        "renew": partial(broker.renew, "g", "t", receipts[2], 600),
        "nack": partial(broker.nack, "g", "t", receipts[3]),
        "release": partial(broker.release, "g", "t", receipts[4:5]),
        "dead_letter": partial(broker.dead_letter, "g", "t", receipts[5], "x"),
        "send_back": partial(broker.send_back, "g", last.physical_offset),
        "send_back, to the dead letters": partial(broker.send_back, "g", last.physical_offset, delay_level=-1),
    }


@pytest.mark.parametrize(("of_store", "of_call"), [("flush", None), ("append", "flush"), ("flush", "append")])
def test_settling_is_as_durable_as_a_put(tmp_path: Path, of_store: Durability, of_call: Durability | None) -> None:
    """`ack` waited for the disk, where the store or the call says so; the others never did, and could not be told to.
    A power cut then took what they had promised: a delivery that was kept for an hour came at once, what was nacked
    for two hours with it, and a dead letter was a message again."""
    store = open_store(tmp_path / "store", durability=of_store, clock=SimulatedClock(), segment_bytes=1 << 16)
    with Broker(store) as broker:
        broker.topics.create("t", queues=1)
        behind = {}
        for name, call in settling_calls(broker).items():
            call(**({} if of_call is None else {"durability": of_call}))
            behind[name] = broker.store.stats().flush_lag_bytes > 0
            broker.store.flush()
        assert behind == dict.fromkeys(behind, of_call == "append")


def test_a_durability_that_there_is_not_changes_nothing(broker: Broker) -> None:
    for name, call in settling_calls(broker).items():
        end = broker.store.max_offset
        with pytest.raises(ConfigError, match="durability"):
            call(durability="soon")
        assert broker.store.max_offset == end, name


def test_puts_that_do_not_wait_say_when_they_are_on_disk(tmp_path: Path) -> None:
    broker = Broker(open_store(tmp_path / "store", durability="flush", fs=Unsynced(), segment_bytes=1 << 16))

    futures = [broker.put_async("t", b"%d" % n, queue_id=0) for n in range(10)]
    receipts = [future.result(timeout=30) for future in futures]

    assert [receipt.offset for receipt in receipts] == list(range(10))
    assert broker.store.stats().flush_lag_bytes == 0
    for wrong, says in ({"delay_level": -1}, "negative"), ({"durability": "fast"}, "durability"):
        with pytest.raises((ValueError, ConfigError), match=says):
            broker.put_async("t", b"x", **cast(Any, wrong)).result(timeout=30)
    broker.close()
    with pytest.raises(StoreClosedError):
        broker.put_async("t", b"x").result(timeout=30)


def test_broker_threads_end_when_it_closes(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    config = {"segment_bytes": 1 << 16, "clock": None}
    with Broker(open_store(tmp_path / "store", **config)) as broker:
        broker.put("t", b"x")
        [delivery] = broker.pop("g", "t", poll=10)
        waiting = in_thread(lambda: broker.pop("g", "t", poll=30))
        broker.put("t", b"y")
        assert [each.message.body for each in ended(*waiting)] == [b"y"]
        assert delivery.message.body == b"x"
    assert not new_threads(before)


def test_a_broker_that_cannot_open_gives_the_directory_back(tmp_path: Path) -> None:
    Broker(open_store(tmp_path / "store")).close()
    (tmp_path / "store" / "config").mkdir(exist_ok=True)
    (tmp_path / "store" / "config" / "consumerOffset.json").write_text("{")

    for _ in range(2):  # StoreLockedError the second time, if the first kept the lock
        with pytest.raises(CorruptStoreError):
            Broker(open_store(tmp_path / "store"))


def test_a_store_has_one_broker(bench: Bench) -> None:
    with pytest.raises(ConfigError):
        Broker(bench.broker.store)
    assert bench.broker.put("t", b"x").offset == 0


def test_commits_that_are_refused(bench: Bench, broker: Broker) -> None:
    broker.put("t", b"x")
    for queue_id, offset in ((0, 2), (0, -1), (1, 0)):
        with pytest.raises(OffsetOutOfRangeError):
            broker.commit("g", "t", queue_id, offset)
    assert broker.locks.try_lock("g", QueueRef("t", 0), "a")
    with pytest.raises(NotPermittedError):
        broker.commit("g", "t", 0, 0, owner="b")
    broker.commit("g", "t", 0, 0, owner="a")
    broker = bench.again(auto_create_groups=False)
    for group, topic, error in (("h", "t", GroupNotFoundError), ("g", "u", TopicNotFoundError)):
        with pytest.raises(error):
            broker.commit(group, topic, 0, 0)
    broker.close()
    with pytest.raises(StoreClosedError):
        broker.commit("g", "t", 0, 1)


@pytest.mark.parametrize(
    ("tags", "position", "says"),
    [
        ("amount > 5", 7, "SQL92"),
        *((tags, at, "single bar") for tags, at in (("a|b", 1), ("a || b|c", 6), ("a|", 1), ("a|||b", 3), ("|", 0))),
    ],
)
def test_sql_and_single_bars_as_a_choice_of_tags_are_refused(bench: Bench, tags: str, position: int, says: str) -> None:
    bench.broker.put("t", b"x")

    with pytest.raises(FilterError, match=says) as caught:
        bench.broker.pop("g", "t", filter=tags)

    assert caught.value.position == position


def test_callback_runs_when_a_pop_may_succeed(bench: Bench) -> None:
    bench.broker.topics.create("t")
    told: list[bool] = []
    bench.broker.add_pop_waiter("g", "t", told.append)
    timed: list[bool] = []
    bench.broker.add_pop_waiter("other", "t", timed.append, filter="never", timeout=1)
    bench.settle()
    assert (told, timed) == ([], [])

    bench.broker.put("t", b"x")
    bench.settle()
    assert told == [True]
    bench.advance(1000)
    assert timed == [False]


def test_delayed_messages_above_a_lowered_limit_are_delivered(bench: Bench, broker: Broker) -> None:
    """The timer threw it away; a level tried again for ever, and nothing behind it came."""
    broker.put("t", b"T" * 3000, delay=30)
    broker.put("t", b"L" * 3000, delay_level=3)
    broker.put("t", b"small", delay_level=3)
    half = broker.transactions.begin("t", b"H" * 3000, producer_group="p")
    bench.settle()
    bench.again(max_message_size=1000)
    bench.broker.transactions.end(half, "commit")
    bench.jump(60_000)
    assert sorted(body[:1] for body in bench.drain()) == [b"H", b"L", b"T", b"s"]
    assert "%DLQ%CID_RMQ_SYS_SCHEDULE" not in bench.broker.topics.names()


def test_error_of_a_delay_level_is_in_stats(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.broker.put("t", b"x", delay_level=1)
    monkeypatch.setattr("mqstore.broker.routing.router.Router.copy_many", full)
    bench.jump(2_000)
    [(where, error)] = bench.broker.stats().errors.items()
    assert (where, error[:15]) == ("delay level 1", "StoreFullError:")


def test_close_while_another_thread_calls_waiters(tmp_path: Path) -> None:
    """Both took from the same queue of callbacks; one found it empty, raised, and the store stayed open and locked."""
    called: list[threading.Thread] = []
    bench = Bench(tmp_path)
    broker = bench.broker
    broker.put("t", b"")

    def call(_worth_a_read: bool) -> None:
        called.append(threading.current_thread())
        if len(called) == 1:  # of the two, in any order
            other = threading.Thread(target=bench.waiters.run_once, args=(0,))
            other.start()
            other.join()

    for _ in range(2):
        broker.add_waiter("u", 0, 0, call)
    broker.close()
    assert len({*called}) == 2, "the other thread has taken the second one"
    Bench(tmp_path).broker.close()


def test_impossible_attempts_are_refused(tmp_path: Path) -> None:
    """The file was written, and the next open took it for damaged."""
    with Bench(tmp_path).broker as broker:
        broker.put("t", b"", queue_id=0)
        broker.groups.create("g")
        wrong: Any
        for wrong in ((0, 2**63, 1), (0, 1, 2**31), (-1, 1, 1), (2**31, 1, 1), (0, 1.5, 1)):
            with pytest.raises(ValueError, match="must be"):
                broker.note_attempt("g", "t", *wrong)
        with pytest.raises(ValueError, match="must be"):
            broker.note_attempt("a@b", "t", 0, 1, 1)
        with pytest.raises(ConfigError, match="attempt_id"):
            broker.pop("g", "t", order=True, attempt_id=5)  # type: ignore[arg-type]
        assert len(broker.pop("g", "t", order=True, attempt_id="5")) == 1
    Bench(tmp_path).broker.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda broker: broker.pop("g", "t", invisible=math.inf),
        lambda broker: broker.change_invisible("g", "t", "0 0 0 0 0 mqstore 0 0", math.inf),
        lambda broker: broker.nack("g", "t", "0 0 0 0 0 mqstore 0 0", math.inf),
        lambda broker: broker.send_back("g", 0, delay=math.inf),
        lambda broker: broker.groups.create("h", retry_policy=mqstore.RetryPolicy(delays=[1, math.inf])),
        lambda broker: broker.groups.create("h", retry_policy=mqstore.exponential(maximum=math.inf)),
    ],
)
def test_infinite_times_are_refused(tmp_path: Path, call: Callable[[Broker], object]) -> None:
    """OverflowError, from deep inside."""
    with Bench(tmp_path).broker as broker:
        broker.put("t", b"")
        with pytest.raises(ConfigError, match="must be finite"):
            call(broker)
        assert broker.stats().in_flight == 0


def test_infinite_waits_are_allowed(tmp_path: Path) -> None:
    with Bench(tmp_path).broker as broker:
        broker.put("t", b"")
        assert len(broker.pop("g", "t", poll=math.inf)) == 1
        woken: list[bool] = []
        broker.add_waiter("u", 0, 0, woken.append, timeout=math.inf)
        broker.put("u", b"", queue_id=0)
        broker.run_once()
        assert woken == [True]


@pytest.mark.parametrize("queues", [0, -1])
def test_topic_without_queues_in_its_file_is_named(tmp_path: Path, queues: int) -> None:
    """ZeroDivisionError, or a message in queue 0 that nobody reads."""
    with Bench(tmp_path).broker as broker:
        broker.topics.create("t")
    file = tmp_path / "config" / "topics.json"
    value = json.loads(file.read_bytes())
    value["topicConfigTable"]["t"] |= {"readQueueNums": queues, "writeQueueNums": queues}
    file.write_text(json.dumps(value))
    with Bench(tmp_path).broker as broker:
        for call in (lambda: broker.put("t", b""), lambda: broker.put_many("t", [b""]), lambda: broker.pop("g", "t")):
            with pytest.raises(NotPermittedError, match="queues"):
                call()
        broker.topics.alter("t", write_queues=2, read_queues=2)
        broker.put("t", b"")
        assert len(broker.pop("g", "t")) == 1


def test_callback_of_an_async_put_may_close_the_broker(tmp_path: Path) -> None:
    """The thread that calls it waited for itself: RuntimeError, and no table was written."""
    closed: Future[None] = Future()
    broker = Bench(tmp_path).broker

    def close(_: object) -> None:
        try:
            broker.commit("g", "t", 0, 1)
            broker.close()
        except BaseException as error:
            closed.set_exception(error)
        else:
            closed.set_result(None)

    broker.put("t", b"", queue_id=0)
    broker.put_async("t", b"", durability="flush").add_done_callback(close)
    closed.result(30)
    with Bench(tmp_path).broker as broker:
        assert broker.committed("g", "t", 0) == 1


def test_async_puts_that_start_a_thread_each_all_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two first puts at once, of two threads or of a signal handler, started two threads. `close` woke one of them and
    waited for the other, for ever."""
    started: list[threading.Thread] = []
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        begin(thread)
        if thread.name == "mqstore-async-put":
            started.append(thread)
            if len(started) == 1:  # another put comes before the thread is noted
                futures.append(broker.put_async("t", b"1", durability="flush"))

    monkeypatch.setattr(threading.Thread, "start", start)
    for _ in range(5):
        started.clear()
        futures: list[Future[SendReceipt]] = []
        with Bench(tmp_path).broker as broker:
            futures.append(broker.put_async("t", b"0", durability="flush"))
        assert len(started) == 2
        assert [future.result(20).size > 0 for future in futures] == [True, True]
        for thread in started:
            thread.join(20)
            assert not thread.is_alive()


def test_an_async_put_may_be_taken_by_another_thread_between_look_and_take(tmp_path: Path) -> None:
    """IndexError ended the thread, or left the call of the put, and what else had been taken was never answered."""

    class TakenByAnother(deque[Any]):
        def __bool__(self) -> bool:
            return True

    broker = Bench(tmp_path).broker
    broker._async_puts._later, broker._async_puts._waiting = TakenByAnother(), TakenByAnother()
    future = broker.put_async("t", b"x", durability="flush")
    broker.close()
    assert future.result(20).size > 0


def test_every_table_has_the_permissions_of_its_store(tmp_path: Path) -> None:
    """Progress of delay levels was for its owner alone, whatever `file_mode` said."""
    bench = Bench(tmp_path / "store", file_mode=0o640)
    bench.broker.put("t", b"x", delay_level=1)
    bench.broker.groups.create("g")
    bench.broker.commit("g", "t", 0, 0)
    bench.advance(20_000)
    bench.broker.close()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "store" / "config").glob("*.json")}
    assert {"consumerOffset.json", "delayOffset.json", "subscriptionGroup.json", "topics.json"} <= modes.keys()
    assert set(modes.values()) == {0o640}


@pytest.mark.parametrize(
    "config",
    [
        {"max_delay": math.inf},
        {"dlq_retention": math.inf},
        {"commit_interval": math.inf},
        {"retention": Retention(age=math.inf)},
    ],
    ids=lambda config: next(iter(config)),
)
def test_a_configuration_with_a_time_that_never_ends_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    """OverflowError, from deep inside; and it did not say which."""
    with pytest.raises(ConfigError, match=f"{next(iter(config))}.*must be finite"):
        Bench(tmp_path / "store", **config)


def test_store_that_is_closed_while_its_broker_opens_ends_it_quietly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C during an opening on another thread ended the process, and each background service logged an error."""
    store = open_store(tmp_path)

    def items(*parts: Any) -> object:
        store.close()
        return None

    monkeypatch.setattr("mqstore.broker.broker.WritableItems", items)
    with pytest.raises(StoreClosedError):
        Broker(store)
    assert caplog.messages == []


def test_end_of_the_process_saves_a_broker_without_a_store_object(tmp_path: Path) -> None:
    """It closed the log alone if it came before the broker had its `Store`."""

    def end() -> None:
        broker = Broker(open_store(tmp_path))
        broker.put("orders", b"x", queue_id=0)
        broker.commit("billing", "orders", 0, 1)
        _close_all()

    assert in_child(end) == 0
    with Broker(open_store(tmp_path)) as again:
        assert again.committed("billing", "orders", 0) == 1
