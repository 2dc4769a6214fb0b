"""The one object: what it opens, what it passes on, what it refuses when it may only read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import mqstore
from mqstore import QueueRef, SimulatedClock, Store, StoreConfig
from tests.children import speaking_child
from tests.client.support import ended, in_thread, until


def test_open_and_close(tmp_path: Path) -> None:
    store = mqstore.open(tmp_path / "store")
    assert (store.mode, store.path, store.closed) == ("rw", tmp_path / "store", False)
    with pytest.raises(
        mqstore.errors.StoreLockedError, match=r"in process [0-9]+, which is this process; use that Store"
    ) as locked:
        mqstore.open(tmp_path / "store")
    assert locked.value.pid == os.getpid()
    store.close()
    store.close()
    assert store.closed
    for call in (lambda: store.put("t", b"x"), lambda: store.read("t", 0, 0), lambda: store.queue("q")):
        with pytest.raises(mqstore.errors.StoreClosedError):
            call()


def test_no_directory_is_made_unasked(tmp_path: Path) -> None:
    with pytest.raises(mqstore.errors.NotAStoreError):
        mqstore.open(tmp_path / "store", create=False)
    with pytest.raises(mqstore.errors.NotAStoreError):
        mqstore.open(tmp_path / "store", "r")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("wrong", [{"mode": "w"}, {"durability": "disk"}, {"durability": "disk", "mode": "r"}])
def test_a_mode_or_durability_that_there_is_not_is_refused(tmp_path: Path, wrong: Any) -> None:
    mqstore.open(tmp_path / "there").close()
    for name in ("there", "new"):
        with pytest.raises(mqstore.errors.ConfigError, match=next(iter(wrong))):
            mqstore.open(tmp_path / name, **wrong)
    assert not (tmp_path / "new").exists()


def test_lock_holder_is_named(tmp_path: Path) -> None:
    def hold(pipe: int) -> None:
        with mqstore.open(tmp_path / "store"):
            os.write(pipe, b"open")
            signal.pause()

    with speaking_child(hold) as (pid, pipe):
        assert os.read(pipe, 10) == b"open"
        with pytest.raises(mqstore.errors.StoreLockedError, match=f"in process {pid}.*close it there") as locked:
            mqstore.open(tmp_path / "store")
        assert locked.value.pid == pid
    mqstore.open(tmp_path / "store", lock_timeout=5).close()


def test_a_topic_is_there_before_its_first_message(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.create_topic("t", queues=2)
    assert not caplog.records
    store.create_topic("t", queues=7)  # stays as it is
    assert "'t' has 2 queues already, not 7" in caplog.text
    with pytest.raises(mqstore.errors.ConfigError):
        store.create_topic("t", exist_ok=False)
    assert store.topics() == ["t"]
    assert store.queues("t") == [QueueRef("t", 0), QueueRef("t", 1)]
    assert store.read("t", 0, 0) == []
    assert store.offsets("t", 1) == (0, 0)
    assert store.offset_at("t", 1, datetime(2030, 1, 1, tzinfo=UTC)) == 0
    assert list(store.iter("t")) == list(store.iter("t", 1)) == []
    with pytest.raises(mqstore.errors.OffsetOutOfRangeError) as caught:  # not: there is no such topic
        store.read("t", 0, 5)
    assert (caught.value.min_offset, caught.value.max_offset) == (0, 0)
    store.put("t", b"x", queue_id=0)
    with pytest.raises(mqstore.errors.OffsetOutOfRangeError):
        store.read("t", 0, 5)


@pytest.mark.parametrize("queue_id", [-1, 2])
def test_missing_things_raise(store: Store, queue_id: int) -> None:
    store.create_topic("t", queues=2)
    for call in (
        lambda: store.read("t", queue_id, 0),
        lambda: store.offsets("t", queue_id),
        lambda: store.queues("u"),
        lambda: store.read("u", 0, 0),
        lambda: list(store.iter("u")),
    ):
        with pytest.raises(mqstore.errors.TopicNotFoundError):
            call()


def test_puts_rotate_over_queues(store: Store) -> None:
    store.create_topic("t", queues=4)
    assert {store.put("t", b"x").queue.queue_id for _ in range(4)} == {0, 1, 2, 3}
    assert store.put("t", b"x", queue_id=3).queue == QueueRef("t", 3)
    assert len({store.put("t", b"x", message_group="g").queue for _ in range(8)}) == 1
    assert len({receipt.queue for receipt in store.put_many("t", [b"x"] * 8)}) == 1


def test_put_message_is_read_found_and_iterated(store: Store) -> None:
    store.create_topic("t", queues=2)
    receipts = [store.put("t", b"%d" % i, tag="even" if i % 2 == 0 else "odd", keys=f"k{i}") for i in range(10)]
    first = receipts[0]
    assert [m.body for m in store.read(*first.queue, first.offset, 1)] == [b"0"]
    assert [m.body for m in store.iter("t")] == [b"%d" % i for i in range(10)]
    assert [m.body for m in store.iter("t", tags="odd")] == [b"1", b"3", b"5", b"7", b"9"]
    assert [m.body for m in store.find("t", key="k7")] == [b"7"]
    assert store.get(receipts[3].message_id).body == b"3"
    assert store.offsets("t", 0) == (0, 5)
    assert store.stats().puts >= 1
    assert list(store.verify()) == []


def test_find_between_two_times(tmp_path: Path) -> None:
    clock = SimulatedClock()
    with mqstore.open(tmp_path / "store", config=StoreConfig(clock=clock)) as store:
        times = []
        for i in range(3):
            times.append(datetime.fromtimestamp(clock.now_ms() / 1000, UTC))
            store.put("t", b"%d" % i, keys="k", queue_id=0)
            clock.advance(60_000)
        assert [m.body for m in store.find("t", key="k")] == [b"2", b"1", b"0"]
        assert [m.body for m in store.find("t", key="k", start=times[1])] == [b"2", b"1"]
        assert [m.body for m in store.find("t", key="k", start=times[1], stop=times[1])] == [b"1"]
        assert store.offset_at("t", 0, times[2]) == 2


def test_following_a_topic_that_is_still_empty(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create_topic("t", queues=2)
    found: list[bytes] = []
    looks: list[bool] = []
    is_empty = Store._is_empty
    monkeypatch.setattr(Store, "_is_empty", lambda *args: looks.append(is_empty(*args)) or looks[-1])

    def follow() -> None:
        for message in store.iter("t", start="latest", follow=True):
            found.append(message.body)
            if len(found) == 2:
                return

    following = in_thread(follow)
    until(lambda: looks)  # "latest" is behind what was put before its first look
    store.put_many("t", [b"a", b"b"], queue_id=1)
    ended(*following)
    assert found == [b"a", b"b"]


@pytest.mark.parametrize("queue_id", [None, 0])
def test_following_an_empty_topic_ends_when_the_store_is_closed(tmp_path: Path, queue_id: int | None) -> None:
    with mqstore.open(tmp_path / "mq") as store:
        store.create_topic("t")
        following = in_thread(lambda: list(store.iter("t", queue_id, follow=True)))
    assert isinstance(ended(*following), mqstore.errors.StoreClosedError)


def test_the_lag_of_a_group_that_was_never_there_is_not_known(store: Store) -> None:
    """It was `{}`, whose sum is 0: a misspelt name looked as if all was done."""
    store.put("t", b"x", queue_id=0)
    with pytest.raises(mqstore.errors.GroupNotFoundError, match="'nobody'"):
        store.lag("nobody")
    store.broker.groups.create("g")
    assert store.lag("g") == {}  # it is there, and has started nowhere


def test_progress_of_a_group(store: Store) -> None:
    queue = store.put("t", b"x", queue_id=0).queue
    assert store.committed("g", queue) is None
    store.commit_offset("g", queue, 0)
    assert store.lag("g") == {queue: 1}
    store.commit_offset("g", queue, 1, durability="flush")
    assert (store.committed("g", queue), store.lag("g")) == (1, {queue: 0})
    with pytest.raises(mqstore.errors.OffsetOutOfRangeError):
        store.commit_offset("g", queue, 2)


def test_a_delayed_message_can_be_recalled(tmp_path: Path) -> None:
    clock = SimulatedClock()
    with mqstore.open(tmp_path / "store", config=StoreConfig(clock=clock)) as store:
        handle = store.put("t", b"later", delay=60).recall_handle
        store.put("t", b"too", delay=60)
        assert handle is not None
        assert store.recall(handle)
        for _ in range(200):
            clock.advance(1_000)
            store.broker.run_once()
        assert [m.body for m in store.iter("t")] == [b"too"]
        assert not store.recall(handle)


def test_reading_beside_a_writer(tmp_path: Path) -> None:
    with mqstore.open(tmp_path / "store") as writer:
        writer.create_topic("empty")
        receipt = writer.put("t", b"x", queue_id=0)
        writer.queue("jobs").put(b"y")
        writer.log.dispatch()  # a reader sees what has been dispatched
        with mqstore.open(tmp_path / "store", "r") as reader:
            assert reader.mode == "r"
            assert [m.body for m in reader.read(*receipt.queue, 0)] == [b"x"]
            assert reader.topics() == ["jobs", "t"]
            assert reader.queues("t") == [QueueRef("t", 0)]
            assert reader.offsets("t", 0) == (0, 1)
            for call in (
                lambda: reader.put("t", b"no"),
                lambda: reader.put_many("t", [b"no"]),
                lambda: reader.create_topic("u"),
                lambda: reader.queue("jobs"),
                lambda: reader.commit_offset("g", receipt.queue, 1),
                lambda: reader.lag("g"),
                lambda: reader.recall("x"),
                lambda: reader.dead_letters("g"),
                reader.flush,
            ):
                with pytest.raises(mqstore.errors.ReadOnlyStoreError, match="mode='rw'"):
                    call()
        assert reader.closed
        assert [m.body for m in writer.read(*receipt.queue, 0)] == [b"x"]


def test_another_process_follows_from_the_latest_message(tmp_path: Path) -> None:
    def follow(pipe: int) -> None:
        with mqstore.open(tmp_path / "store", mode="r") as reader:
            os.write(pipe, b"ready")
            os.write(pipe, next(reader.iter("orders", start="latest", follow=True)).body)
            signal.pause()

    with mqstore.open(tmp_path / "store") as store:
        store.put("orders", b"old")
        store.log.dispatch()  # so that the other process finds the topic
        with speaking_child(follow) as (_, pipe):
            assert os.read(pipe, 10) == b"ready"
            stop = threading.Event()

            def put() -> None:
                while not stop.wait(0.05):  # "latest" is where it is once the reader has looked
                    store.put("orders", b"new")

            thread = threading.Thread(target=put)
            thread.start()
            assert os.read(pipe, 10) == b"new"
            stop.set()
            thread.join()


def test_other_profile_is_refused_and_unlocked(tmp_path: Path) -> None:
    mqstore.open(tmp_path / "store").close()
    with pytest.raises(mqstore.errors.ConfigError):
        mqstore.open(tmp_path / "store", profile="rocketmq")
    mqstore.open(tmp_path / "store").close()


# -- a refusal names a step that works -------------------------------------------------------------------------------


READER_CALLS = ("store.dead_letters('jobs')", "store.lag('jobs')", "store.queue('jobs')", "store.put('t', b'')")
PROGRAM = """
import mqstore, sys
for mode, call in ("rw", "pass"), *(("r", call) for call in sys.argv[2:]):
    try:
        with mqstore.open(sys.argv[1], mode) as store:
            exec(call)
        print("opened")
    except mqstore.MQStoreError as error:
        print(error)
"""


def _in_another_process(path: Path) -> list[str]:
    """What an opening for writing, and then each of READER_CALLS, is answered there."""
    command = [sys.executable, "-c", PROGRAM, str(path), *READER_CALLS]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def test_a_refusal_names_a_step_that_works(tmp_path: Path) -> None:
    """Reading said "open it with mode='rw'", and mode "rw" said "open read-only"."""
    with mqstore.open(tmp_path / "mq") as store:
        store.queue("jobs").put(b"x")
        beside = _in_another_process(tmp_path / "mq")
    steps = [("put and consume there", "close it there"), *[("make this call there", "mode='rw'")] * len(READER_CALLS)]
    for said, wanted in zip(beside, steps, strict=True):
        assert [text for text in (f"open for writing in process {os.getpid()}", *wanted) if text not in said] == []
    opened, *refused = _in_another_process(tmp_path / "mq")
    assert opened == "opened"  # since it was closed there, as the step says
    assert len(refused) == len(READER_CALLS)
    assert all(said.endswith("mq was opened for reading; open it with mode='rw'") for said in refused)


def test_a_reader_of_this_process_is_sent_to_its_writer(tmp_path: Path) -> None:
    refused = pytest.raises(mqstore.errors.ReadOnlyStoreError, match="writing in this process: make this call there")
    with mqstore.open(tmp_path / "mq"), mqstore.open(tmp_path / "mq", "r") as reader, refused:
        reader.lag("g")


def test_forked_child_hears_the_remedy(tmp_path: Path) -> None:
    store = mqstore.open(tmp_path / "mq")
    store.queue("jobs").put(b"x")
    parent = os.getpid()

    def child(pipe: int) -> None:
        for call in (lambda: store.put("t", b""), store.flush, store.producer, lambda: mqstore.open(tmp_path / "mq")):
            try:
                found = call()
                if isinstance(found, mqstore.Producer):
                    found.send("t", b"")
            except mqstore.MQStoreError as error:
                os.write(pipe, f"{error}\n".encode())
        os.write(pipe, b"close it\n")
        until(lambda: _opens(tmp_path / "mq"))
        os.write(pipe, b"opened\n")
        signal.pause()

    with speaking_child(child) as (_, pipe), open(pipe, "rb", closefd=False) as said:
        for _ in range(3):
            line = said.readline().decode()
            assert f"use it in process {parent}, which forked this one, or close it there and open it here" in line
        assert f"in process {parent}" in said.readline().decode()
        assert said.readline() == b"close it\n"
        store.close()
        assert said.readline() == b"opened\n"


def _opens(path: Path) -> bool:
    try:
        mqstore.open(path).close()
    except mqstore.errors.StoreLockedError:
        return False
    return True
