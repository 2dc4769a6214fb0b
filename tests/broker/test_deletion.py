"""Messages under way when queues, topics or groups are removed.

Such a message waits for a delay level or a moment, is a half message or a retry, or is in flight.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import mqstore
from mqstore import QueueRef, Retention, SimulatedClock, StoreConfig, jobs
from mqstore.errors import (
    GroupNotFoundError,
    OffsetOutOfRangeError,
    ReceiptExpiredError,
    TopicNotFoundError,
    TransactionStateError,
)
from tests.broker.popsupport import PopBench, bodies
from tests.broker.support import Bench, Broker, scanned
from tests.faults import STEP, Crash, FaultyFileSystem
from tests.log.support import kill, open_store

DAY = 86_400_000


def three_under_way(bench: Bench, topic: str = "t", queue_id: int = 3) -> Any:
    """One by level, one by timer, and a half message, which is returned."""
    bench.broker.put(topic, b"level", queue_id=queue_id, delay_level=3)
    bench.broker.put(topic, b"timer", queue_id=queue_id, delay=10)
    return bench.broker.transactions.begin(topic, b"half", producer_group="p", queue_id=queue_id)


# -- fewer queues -----------------------------------------------------------------------------------------------------


def test_delayed_messages_of_a_removed_queue_come_into_another(bench: Bench) -> None:
    """Three messages were stored where nobody may read, and held the log for ever."""
    bench.broker.topics.create("t", queues=4)
    assert bench.drain() == []
    half = three_under_way(bench)
    bench.broker.topics.alter("t", write_queues=2)
    bench.broker.topics.alter("t", read_queues=2)
    bench.broker.transactions.end(half, "commit")
    bench.jump(20_000)
    assert sorted(bench.drain()) == [b"half", b"level", b"timer"]
    assert bench.broker.store.offsets_or_none("t", 3) is None


def test_half_message_of_a_group_goes_to_the_groups_new_queue(bench: Bench) -> None:
    bench.broker.topics.create("t", queues=8)
    names = [f"g{i}" for i in range(20)]
    prepare = bench.broker.transactions.prepare
    halves = [prepare("t", b"", {"__SHARDINGKEY": name}, producer_group="p", queue_id=7) for name in names]
    bench.broker.topics.alter("t", write_queues=3)
    bench.broker.topics.alter("t", read_queues=3)
    for half, name in zip(halves, names, strict=True):
        receipt = bench.broker.transactions.end(half, "commit")
        assert receipt is not None
        assert receipt.queue == bench.broker.put("t", b"", message_group=name).queue


# -- deleted topics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True])
def test_messages_waiting_for_a_deleted_topic_are_dropped(bench: Bench, again: bool) -> None:
    bench.broker.topics.create("t", queues=2)
    half = three_under_way(bench, queue_id=1)
    bench.broker.put("t", b"far", queue_id=1, delay=5 * 86_400)  # rolled on its way
    bench.settle()
    bench.broker.topics.delete("t")
    if again:
        bench.broker.topics.create("t", queues=1)
        bench.broker.put("t", b"new", delay=5)
    bench.again()
    bench.jump(20_000)
    with pytest.raises(TransactionStateError, match="deleted"):
        bench.broker.transactions.end(half, "commit")
    assert bench.broker.stats().open_transactions == 0
    for _ in range(7):
        bench.jump(DAY)
    if again:
        assert bench.drain() == [b"new"]
    else:
        assert "t" not in bench.broker.topics.names()
    assert bench.broker.stats().timer_waiting == 0
    pin = bench.broker.stats().oldest_pin
    assert pin is None or pin.topic == "rmq_sys_pop_log", "nothing of them holds the log"


def test_check_ends_a_half_message_of_a_deleted_topic(bench: Bench) -> None:
    bench.broker.topics.create("t", queues=2)
    bench.broker.transactions.begin("t", b"half", producer_group="p")
    bench.broker.transactions.on_check("p", bench.check)
    bench.broker.topics.delete("t")
    bench.jump(60_000)
    assert bench.asked == [b"half"]
    assert bench.broker.stats().open_transactions == 0
    assert "t" not in bench.broker.topics.names()


def test_deletion_spares_later_messages_after_a_lost_log_end(bench: Bench) -> None:
    """Where the log ended is where a topic was deleted; if it ends before that now, positions mean other messages."""
    bench.broker.topics.create("t", queues=1)
    bench.broker.put_many("fill", [bytes(1000)] * 50, queue_id=0)
    bench.broker.topics.delete("t")
    bench.broker.close()
    note = bench.path / "config" / "deletedTopics.json"
    value = json.loads(note.read_text())
    value["topics"]["t"] += 1 << 20  # as if so much of the log were gone
    note.write_text(json.dumps(value))
    bench.open()
    bench.broker.topics.create("t", queues=1)
    bench.broker.put("t", b"new", delay=5)
    bench.jump(20_000)
    assert bench.drain() == [b"new"]


def put_three(store: mqstore.Store, start: int) -> None:
    for i in range(start, start + 3):
        store.put("t", b"%d" % i, queue_id=0, keys="k", unique_key=f"u{i}")


def until_not_found(call: Callable[[], Any]) -> Any:
    """The result of a call, or None if it raises that there is nothing."""
    try:
        return call()
    except (TopicNotFoundError, OffsetOutOfRangeError, LookupError):
        return None


def bodies_of(messages: Any) -> list[bytes]:
    return [message.body for message in messages or ()]


READERS: dict[str, Callable[[mqstore.Store, str], list[bytes]]] = {
    "read": lambda store, first: bodies_of(until_not_found(lambda: store.read("t", 0, 0))),
    "get": lambda store, first: bodies_of(until_not_found(lambda: store.log.get("t", 0, 0).messages)),
    "iter": lambda store, first: bodies_of(until_not_found(lambda: [*store.iter("t")])),
    "iter one queue": lambda store, first: bodies_of(until_not_found(lambda: [*store.iter("t", 0)])),
    "find by key": lambda store, first: bodies_of(store.find("t", key="k"))[::-1],
    "find by unique key": lambda store, first: bodies_of(store.find("t", unique_key="u0")),
    "message id": lambda store, first: bodies_of(until_not_found(lambda: [store.get(first)])),
    "arrow": lambda store, first: until_not_found(lambda: store.to_arrow("t")["body"].to_pylist()) or [],
    "log scan": lambda store, first: scanned(store.log),
    "units": lambda store, first: [b"unit" for _ in store.log.units("t", 0, 0, 9)],
}


@pytest.mark.parametrize("ended", ["closed", "killed", "never"])
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("mode", ["rw", "r"])
def test_messages_of_a_deleted_topic_are_out_of_every_readers_reach(
    tmp_path: Path, ended: str, again: bool, mode: Any
) -> None:
    """`read`, `iter` and `find` returned them, also after the topic was made anew and after a restart."""
    path = tmp_path / "s"
    config = StoreConfig(clock=SimulatedClock())
    new = [b"3", b"4", b"5"] if again else []
    with ExitStack() as opened:
        store = opened.enter_context(mqstore.open(path, config=config))
        put_three(store, 0)
        first = store.read("t", 0, 0)[0].message_id
        store.broker.topics.delete("t")
        if again:
            store.create_topic("t", queues=2)
            put_three(store, 3)
            assert store.offsets("t", 0) == (3, 6), "numbers go on"
        store.broker.run_once()
        if ended == "closed":
            store.close()
        elif ended == "killed":
            kill(store.log)
        if mode == "r" or ended != "never":
            store = opened.enter_context(mqstore.open(path, mode, config=config))
        found = {name: reader(store, first) for name, reader in READERS.items()}
        from_0 = ("read", "get", "find by unique key", "message id", "units")
        assert found == {name: [] if name in from_0 else new for name in READERS}
        assert store.topics() == (["t"] if again else [])
        assert list(store.verify()) == []


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
@pytest.mark.parametrize("again", [False, True])
def test_a_rebuild_from_the_log_brings_no_deleted_message_back(tmp_path: Path, again: bool, profile: Any) -> None:
    path = tmp_path / "s"
    small = StoreConfig(segment_bytes=1 << 16, consumequeue_units=64, index_slots=16, index_entries=64)
    with mqstore.open(path, profile=profile, config=small) as store:
        put_three(store, 0)
        store.put("other", b"x")
        store.broker.topics.delete("t")
        if again:
            put_three(store, 3)
    shutil.rmtree(path / "consumequeue")
    [recovered] = jobs.recover(path)
    assert recovered.report is not None
    assert recovered.report.rebuilt.consume_queues
    with mqstore.open(path) as store:
        assert [message.body for message in store.iter("other")] == [b"x"]
        assert READERS["iter"](store, "") == ([b"3", b"4", b"5"] if again else [])
        assert store.put("t", b"", queue_id=0).offset == (6 if again else 3)
        assert list(store.verify()) == []


def test_a_process_that_dies_in_a_deletion_leaves_all_messages_or_none(tmp_path: Path) -> None:
    seen = set()
    for nth in range(1, 60, max(1, STEP // 4)):
        path, fs = tmp_path / str(nth), FaultyFileSystem()
        broker = Broker(open_store(path, fs=fs))
        broker.put_many("t", [b"0", b"1", b"2"], queue_id=0)
        broker.put("t", b"3", queue_id=1)
        broker.commit("g", "t", 0, 1, durability="flush")
        fs.crash(nth, torn=True)
        try:
            broker.topics.delete("t", force=True)
            done = True
        except Crash:
            done = False
        kill(broker.store)
        with mqstore.open(path, config=StoreConfig(clock=SimulatedClock())) as store:
            left = READERS["iter"](store, "")
            assert sorted(left) in ([], [b"0", b"1", b"2", b"3"])
            # Messages first, then offsets, then the entry: what is left can be deleted again.
            steps = "t" in store.broker.topics.names(), bool(left), store.broker.committed("g", "t", 0)
            assert steps in {(True, True, 1), (True, False, 1), (True, False, None), (False, False, None)}
            if steps[0] and not left:
                store.broker.topics.delete("t", force=True)
                assert store.broker.committed("g", "t", 0) is None
                assert "t" not in store.broker.topics.names()
                assert [store.log.offsets("t", queue_id) for queue_id in (0, 1)] == [(3, 3), (1, 1)]
            assert list(store.verify()) == []
            assert store.put("t", b"new", queue_id=0).offset == 3
            assert READERS["iter one queue"](store, "")[-1:] == [b"new"]
            store.broker.topics.delete("t", force=True)
            assert store.log.offsets("t", 0) == (4, 4)
        seen.add((done, bool(left)))
        if done:
            break
    assert seen == {(False, True), (False, False), (True, False)}


def test_a_damaged_note_of_deletions_is_not_reported_with_every_look(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader read the note, and reported it, each time that it looked for news."""
    with mqstore.open(tmp_path / "s") as store:
        put_three(store, 0)
        store.broker.topics.delete("t")
    (tmp_path / "s" / "config" / "deletedTopics.json").write_text("{")
    with mqstore.open(tmp_path / "s", "r") as reader:
        assert "deletedTopics.json" in caplog.text
        caplog.clear()
        for _ in range(5):
            reader.topics()
    assert len(caplog.records) <= 1


def test_a_reader_in_another_process_sees_the_new_topic_alone(tmp_path: Path) -> None:
    """Its descriptors were of the deleted files, and files of the same names came."""
    with mqstore.open(tmp_path / "s") as store, mqstore.open(tmp_path / "s", "r") as reader:
        put_three(store, 0)
        store.log.dispatch()  # type: ignore[union-attr]
        assert READERS["iter"](reader, "") == [b"0", b"1", b"2"]
        store.broker.topics.delete("t")
        put_three(store, 3)
        store.log.dispatch()  # type: ignore[union-attr]
        reader.log.news._next_listing = 0.0  # type: ignore[attr-defined]
        assert READERS["iter"](reader, "") == [b"3", b"4", b"5"]


def test_the_note_of_a_deletion_goes_with_the_log(tmp_path: Path) -> None:
    with Bench(tmp_path / "s", segment_bytes=4096, retention=Retention(age=60)).broker as broker:
        assert isinstance(broker.store.clock, SimulatedClock)
        broker.put("t", b"x", queue_id=0)
        broker.topics.delete("t")
        assert [*broker.store.queue_table.deleted] == ["t"]
        broker.put_many("other", [bytes(1000)] * 20, queue_id=0)
        broker.store.flush()
        broker.store.dispatch()
        broker.store.drop_before(broker.store.max_offset)
        assert broker.store.queue_table.deleted == {}
        assert json.loads((broker.store.path / "config" / "deletedTopics.json").read_text())["topics"] == {}


def names_in(root: object, mark: str) -> Iterator[str]:
    """Yield what is reachable from `root` and holds a name that begins with `mark`."""
    seen: set[int] = set()
    stack = [root]
    while stack:
        each = stack.pop()
        if id(each) in seen or isinstance(each, (ModuleType, type, str)):
            continue
        seen.add(id(each))
        inside = [each.__closure__] if isinstance(each, FunctionType) else gc.get_referents(each)
        yield from (f"{type(each).__name__}: {text}" for text in inside if isinstance(text, str) and text[:7] == mark)
        stack += inside


def test_deleted_topics_and_groups_leave_nothing_that_grows(tmp_path: Path) -> None:
    """1,200 of them left 64 MiB, folders, descriptors, and 790 KiB of Prometheus lines while the store was open."""
    bench = Bench(tmp_path / "s")
    with bench.broker as broker:
        transactions = broker.transactions

        def use(topic: str, group: str) -> None:
            broker.topics.create(topic, queues=2)
            for queue_id in (None, 0, 1):
                broker.put(topic, b"x", queue_id=queue_id, keys="k")
            deliveries = broker.pop(group, topic, 3)
            broker.ack(group, topic, [each.receipt for each in deliveries[1:]])
            broker.nack(group, topic, deliveries[0].receipt, delay=0)
            bench.jump(1)
            broker.groups.create(f"{group}-reads")
            broker.read(topic, 0, 0, group=f"{group}-reads")
            broker.commit(f"{group}-reads", topic, 0, 1)
            broker.locks.try_lock(f"{group}-reads", QueueRef(topic, 0), "c")
            transactions.end(transactions.begin(topic, b"x", producer_group="p"), "rollback")
            broker.stats()
            broker.topics.delete(topic, force=True)
            broker.delete_group(group)
            broker.delete_group(f"{group}-reads")

        for number in range(3):
            use(f"first{number}", f"early{number}")
        bench.jump(120_000)
        lines, folders = broker.prometheus().count("\n"), sorted(os.listdir(bench.path / "consumequeue"))
        descriptors = len(os.listdir("/proc/self/fd"))
        for number in range(8):
            use(f"temporary{number}", f"passing{number}")
        bench.jump(2 * DAY)
        assert broker.prometheus().count("\n") == lines
        assert sorted(os.listdir(bench.path / "consumequeue")) == folders
        assert len(os.listdir("/proc/self/fd")) < descriptors + 5, "of 8 topics with two queues"
        offsets = json.loads((bench.path / "config" / "consumerOffset.json").read_text())["offsetTable"]
        assert not [key for key in offsets if "temporary" in key or "passing" in key]
        assert set(names_in(broker, "passing")) == set()


def fail_one(bench: Bench, group: str, topic: str, body: bytes) -> None:
    """Create a topic with a message that a group pops and gives back, so that it goes to a retry topic."""
    bench.broker.topics.create(topic, queues=1)
    bench.broker.put(topic, body)
    [delivery] = bench.broker.pop(group, topic)
    bench.broker.nack(group, topic, delivery.receipt, delay=0)


@pytest.mark.parametrize("version", [1, 2])
def test_retries_of_pop_are_deleted_with_their_topic(bench: Bench, version: Any) -> None:
    bench.again(pop_retry_version=version)
    broker = bench.broker
    fail_one(bench, "g", "orders", b"old")
    bench.jump(1)
    broker.topics.delete("orders", force=True)
    assert broker.topics.names() == []
    broker.topics.create("orders", queues=1)
    broker.put("orders", b"new")
    assert bench.drain("g", "orders") == [b"new"]


def test_retry_topic_shared_with_another_group_is_kept(bench: Bench) -> None:
    """Version 1: group `a`, topic `b_c` and group `a_b`, topic `c` have one retry topic."""
    bench.again(pop_retry_version=1)
    broker = bench.broker
    for group, topic in (("a", "b_c"), ("a_b", "c")):
        fail_one(bench, group, topic, topic.encode())
    bench.jump(1)
    broker.topics.delete("b_c", force=True)
    assert b"c" in bench.drain("a_b", "c")


@pytest.mark.parametrize("deleted", ["group", "topic"])
def test_retry_topic_of_a_group_with_an_ambiguous_name_is_kept(bench: Bench, deleted: str) -> None:
    """`%RETRY%a_b` is of group `a_b`, and was taken for that of group `a` and topic `b`."""
    broker = bench.broker
    for topic in ("orders", "b"):
        broker.topics.create(topic, queues=1)
        broker.put(topic, topic.encode())
    assert bench.drain("a", "b") == [b"b"]
    broker.groups.create("a_b")  # it has no progress anywhere yet
    [message] = broker.read("orders", 0, 0, 1).messages
    broker.send_back("a_b", message.physical_offset, delay_level=1)
    if deleted == "group":
        broker.delete_group("a")
    else:
        broker.topics.delete("b", force=True)
    bench.jump(2_000)
    assert broker.store.offsets_or_none("%RETRY%a_b", 0) == (0, 1)
    assert bench.drain("a_b", "%RETRY%a_b") == [b"orders"]


def test_retries_of_pop_survive_deleting_a_group_of_that_name(bench: Bench) -> None:
    bench.again(pop_retry_version=1)
    broker = bench.broker
    fail_one(bench, "a", "b", b"x")
    bench.jump(1)
    broker.groups.create("a_b")
    broker.delete_group("a_b")
    assert bench.drain("a", "b") == [b"x"]


def test_ack_during_a_topic_deletion_says_the_receipt_expired(tmp_path: Path) -> None:
    """`ack` raised ConfigError: offset -1 cannot be committed."""
    with PopBench(tmp_path) as bench:
        bench.put("t", 1)
        [delivery] = bench.pop()
        state = bench.state
        find = bench.service._state_of
        bench.service._state_of = lambda *args: (find(*args), bench.parts.topics.delete("t", force=True))[0]  # type: ignore[method-assign,func-returns-value]
        with pytest.raises(ReceiptExpiredError):
            bench.ack(delivery)
        assert state.gone


def test_topic_deletion_is_complete_though_the_pop_log_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`delete` raised after the topic was gone, its other queues stayed in flight, and other listeners never heard."""
    told: list[str] = []
    with PopBench(tmp_path) as bench:
        bench.put("t", 1)
        bench.put("t", 1, queue_id=1)
        bench.pop(n=2)
        bench.parts.topics.on_change.append(told.append)
        bench.fail_once(monkeypatch, "put_reset")
        bench.parts.topics.delete("t", force=True)
        assert told == ["t"]
        assert bench.service.in_flight() == 0
        bench.put("t", 1, first=7)
        assert bodies(bench.pop(n=8)) == [b"7"]


# -- deleted groups ---------------------------------------------------------------------------------------------------


def test_recreated_group_gets_no_retries_of_the_deleted_one(bench: Bench, broker: Broker) -> None:
    """It was acknowledged, even; the copy among the retries came again, since nobody's progress said so any more."""
    broker.groups.create("g", start="latest")
    assert broker.start_of("g", "t", 0) == 0
    for body in (b"acknowledged", b"waits"):
        broker.put("t", body)
        [delivery] = broker.pop("g", "t")
        broker.nack("g", "t", delivery.receipt, delay=0)
        bench.jump(1)
        if body == b"acknowledged":
            assert bench.drain() == [body]
    [message] = broker.read("t", 0, 0, 1).messages
    broker.send_back("g", message.physical_offset)  # due in ten seconds
    broker.delete_group("g")
    assert not [name for name in broker.topics.names() if name.startswith("%RETRY%")]
    broker.groups.create("g", start="latest")
    bench.jump(20_000)
    assert bench.drain() == []


def test_deleted_group_holds_no_part_of_the_log(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "store", segment_bytes=4096, retention=Retention(age=60))
    broker = bench.broker
    broker.topics.create("t", queues=1)
    broker.put("t", b"x")
    [delivery] = broker.pop("g", "t")
    broker.nack("g", "t", delivery.receipt, delay=0)
    bench.jump(1)
    broker.delete_group("g")
    broker.groups.create("h")
    for _ in range(30):
        broker.put_many("t", [bytes(100)] * 20, queue_id=0)
        while bench.drain("h"):
            pass
        bench.jump(30_000)
    assert broker.store.min_offset > 0
    bench.broker.close()


def test_retries_of_a_deleted_group_go_to_no_other_group(bench: Bench) -> None:
    """`%RETRY%a_b` is the retry topic of group `a_b`, and of group `a` and topic `b` in version 1."""
    broker = bench.broker
    broker.topics.create("x", queues=1)
    broker.topics.create("b", queues=1)
    broker.put("x", b"of a_b")
    [delivery] = broker.pop("a_b", "x")
    broker.send_back("a_b", delivery.message.physical_offset, delay=0)
    broker.delete_group("a_b")
    broker.put("b", b"for a")
    assert bench.drain("a", "b") == [b"for a"]


def test_group_deletion_survives_a_crash(tmp_path: Path) -> None:
    """Its settings were gone and its progress was not: a new group of that name never got what the old had consumed."""
    broker = Bench(tmp_path).broker
    broker.put("t", b"", queue_id=0)
    broker.commit("g", "t", 0, 1, durability="flush")
    broker.delete_group("g")
    kill(broker.store)
    with Bench(tmp_path).broker as broker:
        assert broker.committed("g", "t", 0) is None
        assert len(broker.pop("g", "t", queue_id=0)) == 1


def test_recreated_group_inherits_no_attempts(tmp_path: Path) -> None:
    """Its first delivery of a message counted as the seventeenth, and made a dead letter of it."""
    with Bench(tmp_path).broker as broker:
        broker.put("t", b"", queue_id=0)
        broker.groups.create("g")
        broker.note_attempt("g", "t", 0, 0, 16)
        broker.delete_group("g")
        broker.groups.create("g")
        assert broker.attempts("g", "t", 0) == {}


def test_deleted_group_is_forgotten(bench: Bench) -> None:
    bench.broker.put("t", b"x")
    assert bench.bodies() == [b"x"]

    bench.broker.delete_group("g")

    with pytest.raises(GroupNotFoundError, match="not known"):
        bench.broker.lag("g")
    assert bench.bodies() == [b"x"]
