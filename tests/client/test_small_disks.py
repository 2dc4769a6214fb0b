"""Stores on small disks: what they take, and what they do when the disk is full (format#allocation, format#room)."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import pytest

import mqstore
from mqstore import Retention, SimulatedClock, StoreConfig
from mqstore.errors import MissingFileError, StoreFullError
from tests.broker.support import new_parts, open_parts
from tests.children import in_child
from tests.client.support import open_broker
from tests.faults import FaultyFileSystem
from tests.log.splicesupport import Halfway, Row, bundle, stage
from tests.log.support import open_store
from tests.smalldisk import blocks, small_disk
from tests.waiting import until

MIB = 1 << 20
SEGMENT = 65_536


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
def test_store_with_three_messages_takes_at_most_two_mib(
    tmp_path: Path, profile: Literal["mqstore", "rocketmq"]
) -> None:
    with mqstore.open(tmp_path / "mq", profile=profile) as store:
        for number in range(3):
            store.put("orders", b"body", keys=f"o-{number}" if profile == "mqstore" else None)
        queue = store.queue("jobs")
        queue.put(b"item")
        with queue.get() as task:
            assert task.value == b"item"
        assert len(store.find("orders", key="o-1")) == (profile == "mqstore")
        assert blocks(tmp_path) <= 2 * MIB
    assert blocks(tmp_path) <= 2 * MIB


@pytest.mark.parametrize("unconsumed", ["drop", "keep"])
def test_retention_by_size_keeps_up_with_puts(tmp_path: Path, unconsumed: Literal["drop", "keep"]) -> None:
    """The bound may be exceeded by two segments and what is put in a tenth of a second: puts wait for the deletion."""
    clock = SimulatedClock()
    policy = Retention(age=None, max_bytes=4 * SEGMENT, unconsumed=unconsumed)
    config = StoreConfig(clock=clock, segment_bytes=SEGMENT, retention=policy)
    with mqstore.open(tmp_path / "mq", config=config) as store:
        log = store.broker.store
        for _ in range(20):
            before = log.max_offset
            for _ in range(50):
                receipt = store.put("t", bytes(5000), queue_id=0)
                if unconsumed == "keep":
                    store.commit_offset("g", receipt.queue, receipt.offset + 1)
            written = log.max_offset - before
            clock.advance(101)
            store.put("t", bytes(5000), queue_id=0)
            assert log.max_offset - log.min_offset <= 4 * SEGMENT + 2 * SEGMENT + written
        assert log.min_offset > 0


def fill(put: Callable[[], object]) -> None:
    """Put until the disk is full."""
    with suppress(StoreFullError):
        while True:
            put()


def drain(queue: mqstore.Queue) -> None:
    while queue.qsize():
        queue.get(timeout=15).ack()


class Disk(NamedTuple):
    size: int
    config: StoreConfig


DISKS = {
    "less than a segment": Disk(20 * MIB, StoreConfig()),
    "a segment and a half": Disk(12 * MIB, StoreConfig(segment_bytes=8 * MIB)),
    "three segments": Disk(13 * MIB, StoreConfig(segment_bytes=4 * MIB)),
}
EVERY_DISK = pytest.mark.parametrize("kind", DISKS.values(), ids=DISKS)


@EVERY_DISK
def test_queue_that_is_always_empty_never_fills_the_disk(tmp_path: Path, kind: Disk) -> None:
    size = kind.size
    with small_disk(tmp_path / "disk", size) as disk, mqstore.open(disk / "mq", config=kind.config) as store:
        queue = store.queue("jobs")
        for _ in range(size * 5 // 2 // 100_000):
            queue.put(bytes(100_000))
            queue.get(timeout=15).ack()
        assert queue.qsize() == 0
        assert store.stats().errors == {}


@EVERY_DISK
@pytest.mark.parametrize("length", [100, 10_000])
def test_full_disk_refuses_puts_and_is_consumed_to_the_last_item(tmp_path: Path, kind: Disk, length: int) -> None:
    size, config = kind
    with small_disk(tmp_path / "disk", size) as disk:
        bodies = [bytes(length)] * (MIB // (length + 400))
        with mqstore.open(disk / "mq", config=config) as store:
            queue = store.queue("jobs")
            fill(lambda: queue.put_many(bodies))
            with pytest.raises(StoreFullError, match=r"bytes are free.*segment_bytes"):
                queue.put_many(bodies)
        with mqstore.open(disk / "mq", config=config) as store:
            queue = store.queue("jobs")
            count = queue.qsize()
            assert count > size // 4 // (length + 500)
            for _ in range(count):
                queue.get(timeout=15).ack()
            assert queue.qsize() == 0
            for body in bodies:
                queue.put(body)
            assert queue.qsize() == len(bodies)


def test_each_of_many_groups_has_room_to_consume_short_messages(tmp_path: Path) -> None:
    groups = "abcd"
    with small_disk(tmp_path / "disk", 6 * MIB) as disk:
        with mqstore.open(disk / "mq") as store:
            receipt = store.put("t", b"x", queue_id=0)
            for group in groups:
                store.commit_offset(group, receipt.queue, 1)
        with mqstore.open(disk / "mq") as store:
            fill(lambda: store.put("t", b"x", queue_id=0))
            count = store.broker.lag("a")["t", 0]
            for group in groups:
                for _ in range(count):
                    [delivery] = store.broker.pop(group, "t")
                    store.broker.ack(group, "t", [delivery.receipt])
                assert store.broker.lag(group)["t", 0] == 0


def test_batch_needs_no_more_room_than_its_bytes(tmp_path: Path) -> None:
    bodies = [bytes(100_000), *[b"x"] * 1000]
    with small_disk(tmp_path / "disk", 32 * MIB) as disk, mqstore.open(disk / "mq") as store:
        assert len(store.put_many("t", bodies)) == len(bodies)


DOORS = ["splice", "splice of a job", "inbox", "inbox at opening"]


@pytest.mark.parametrize("door", DOORS)
def test_bulk_append_takes_nothing_that_is_kept_back(tmp_path: Path, door: str) -> None:
    """It is refused before anything is written, what waits can be consumed to the last item, and then it fits."""
    rows = [Row(b"x" * 100)] * 5_000
    config = StoreConfig(segment_bytes=MIB // 2)
    with small_disk(tmp_path / "disk", 8 * MIB) as disk:
        shard = stage(tmp_path / "shard", rows)
        hidden = bundle(disk / "mq", "job", 0, [rows], name=".job-0") if "inbox" in door else None
        with mqstore.open(disk / "mq", config=config) as store:
            queue = store.queue("jobs")
            fill(lambda: queue.put(bytes(5000)))
            end = store.broker.store.max_offset
            if hidden is not None and door == "inbox":
                hidden.rename(hidden.with_name("job-0"))
                with pytest.raises(StoreFullError, match="bytes are free"):
                    store.broker.store.take_inbox()
            elif door == "splice":
                with pytest.raises(StoreFullError, match="bytes are free"):
                    store.broker.store.splice([shard], app="job", version=0)
            assert store.broker.store.max_offset == end
        if door == "splice of a job":
            with new_parts(disk / "mq").store as log, pytest.raises(StoreFullError, match="bytes are free"):
                log.splice([shard], app="job", version=0)
        elif hidden is not None and door == "inbox at opening":
            hidden.rename(hidden.with_name("job-0"))
        with mqstore.open(disk / "mq", config=config) as store:
            log = store.broker.store
            assert log.max_offset < end + MIB // 2
            queue = store.queue("jobs")
            drain(queue)
            if hidden is None:
                log.splice([shard], app="job", version=0)
            else:
                until(lambda: log.stats().inbox_spliced == 1)
            assert sum(1 for _ in store.iter("orders")) == len(rows)


def test_flusher_does_not_wait_for_itself_when_it_takes_the_inbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqstore.log.writing.room._PATIENCE_S", threading.TIMEOUT_MAX)
    config = StoreConfig(segment_bytes=SEGMENT)
    with small_disk(tmp_path / "disk", 8 * MIB) as disk:
        hidden = bundle(disk / "mq", "job", 0, [[Row(bytes(60_000))] * 20], name=".job-0")
        with mqstore.open(disk / "mq", config=config) as store:
            queue = store.queue("jobs")
            fill(lambda: queue.put(bytes(10_000)))
            hidden.rename(hidden.with_name("job-0"))
            log = store.broker.store
            log.background.call("inbox")
            until(lambda: "bytes are free" in log.stats().errors.get("inbox", ""))


def test_check_for_room_counts_the_groups_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes 8 ms in a store of 20,000 topics."""
    calls: list[None] = []
    with mqstore.open(tmp_path / "mq", config=StoreConfig(clock=SimulatedClock())) as store:
        log, groups = store.broker.store, store.broker.offsets.groups
        monkeypatch.setattr(store.broker.offsets, "groups", lambda: calls.append(None) or groups())
        log._log.set_free_until(0)
        log.room.check(MIB, {})
    assert len(calls) == 1


def test_full_disk_ends_no_segment_while_a_bulk_append_holds_the_log(tmp_path: Path) -> None:
    """The flusher would wait for the end of the bulk append, which may take minutes."""
    with open_store(tmp_path / "s", segment_bytes=MIB) as store:
        store.put("t", b"x")
        shard = stage(tmp_path / "shard", [Row(b"y")])
        store.splice([shard], app="a", version=0, progress=Halfway(store._log.end_segment))
        store.put("t", b"z")
        assert store.max_offset < MIB


def test_put_that_waits_for_room_ends_with_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a later one, which the ended flusher would never serve."""
    monkeypatch.setattr("mqstore.log.writing.room._PATIENCE_S", threading.TIMEOUT_MAX)
    config = StoreConfig(segment_bytes=SEGMENT)
    with (
        small_disk(tmp_path / "disk", 8 * MIB) as disk,
        suppress(MissingFileError),
        mqstore.open(disk / "mq", config=config) as store,
    ):
        fill(lambda: store.put("t", bytes(10_000)))
        log = store.broker.store
        monkeypatch.setattr(log.background, "call", lambda name: (shutil.rmtree(disk / "mq"), log.is_lost()))
        for _ in range(2):
            with pytest.raises((MissingFileError, StoreFullError)):
                store.put("t", bytes(10_000))


def test_batch_of_short_messages_leaves_room_to_consume_them(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 9 * MIB) as disk, mqstore.open(disk / "mq") as store:
        queue = store.queue("jobs")
        with suppress(StoreFullError):
            queue.put_many([b"x"] * 30_000)
        drain(queue)


def test_retention_by_size_keeps_unconsumed_items_at_opening_and_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is cleaned at opening. The flusher begins before the broker is open and ends after it is closed."""
    config = StoreConfig(segment_bytes=SEGMENT, retention=Retention(age=None, max_bytes=SEGMENT))
    with small_disk(tmp_path / "disk", 16 * MIB) as disk:
        store = mqstore.open(disk / "mq", config=config)
        for _ in range(50):
            store.queue("jobs").put(bytes(10_000))
        log = store.broker.store
        close = log.close
        monkeypatch.setattr(log, "close", lambda timeout: (log.room.run_once(), close(timeout)))
        store.close()
        Path(disk, "others").write_bytes(bytes(14 * MIB + MIB // 2))
        monkeypatch.setattr("mqstore.broker.broker.open_parts", lambda log: (log.room.run_once(), open_parts(log))[1])
        with mqstore.open(disk / "mq", config=config) as store:
            assert store.queue("jobs").qsize() == 50


def test_callback_that_puts_does_not_keep_the_disk_full(tmp_path: Path) -> None:
    """The flusher saves the mechanisms before it frees room, and may not wait for one that waits for the room."""
    item = bytes(100_000)
    config = StoreConfig(segment_bytes=MIB)
    with small_disk(tmp_path / "disk", 16 * MIB) as disk, mqstore.open(disk / "mq", config=config) as store:
        queue = store.queue("jobs")
        fill(lambda: queue.put(item))
        drain(queue)
        with store.broker._housekeeper.turn:
            for _ in range(20):
                queue.put(item)
        assert queue.qsize() == 20


def test_full_disk_is_looked_at_only_once_something_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for what nobody needs takes seconds in a store of 100,000 queues."""
    looks: list[Retention] = []
    config = StoreConfig(segment_bytes=MIB, clock=SimulatedClock())
    with small_disk(tmp_path / "disk", 16 * MIB) as disk, mqstore.open(disk / "mq", config=config) as store:
        fill(lambda: store.put("t", bytes(100_000)))
        room = store.broker.store.room
        bound = room.bound
        assert bound is not None
        monkeypatch.setattr(room, "bound", lambda policy: looks.append(policy) or bound(policy))
        Path(disk, "others").write_bytes(bytes(MIB // 2))
        assert store.broker.pop("g", "t", local=False)
        for _ in range(3):
            room.look()
        assert len(looks) == 1


def test_message_without_room_for_its_unit_is_not_called_absent(tmp_path: Path) -> None:
    """Other programs may take what is kept back. Then reads, pops and sizes say so, and the next put is refused."""
    fs = FaultyFileSystem()
    with open_broker(tmp_path / "s", fs=fs) as broker:
        broker.put("t", b"first", queue_id=0)
        assert len(broker.pop("g", "t")) == 1
        fs.fail({"pwrite", "create", "truncate_sparse"}, errno.ENOSPC, times=None, path_part="consumequeue")
        broker.put("t", b"second", queue_id=0)
        for call in (
            lambda: broker.pop("g", "t"),
            lambda: broker.lag("g"),
            lambda: broker.store.read("t", 0, 1),
            lambda: broker.put("t", b"third", queue_id=0),
        ):
            with pytest.raises(StoreFullError):
                call()
        assert [message.body for message in broker.store.read("t", 0, 0)] == [b"first"]
        fs.heal()
        assert [message.body for message in broker.store.read("t", 0, 1)] == [b"second"]
        broker.put("t", b"third", queue_id=0)
        assert broker.lag("g")["t", 0] == 3


@EVERY_DISK
def test_kills_on_a_full_disk_lose_nothing_that_was_acknowledged(tmp_path: Path, kind: Disk) -> None:
    put: set[bytes] = set()
    begun: set[bytes] = set()  # the kill may have come behind the acknowledgement
    done: set[bytes] = set()
    with small_disk(tmp_path / "disk", kind.size, needs_mount=True) as disk:
        for seed in range(2):
            said = tmp_path / str(seed)
            assert in_child(partial(use_until_killed, disk / "mq", kind.config, seed, said)) == -signal.SIGKILL
            for line in said.read_bytes().splitlines(keepends=True):
                if line.endswith(b"\n"):
                    {b"+": put, b"?": begun, b"-": done}[line[:1]].add(line[1:-1])
        left: list[bytes] = []
        with mqstore.open(disk / "mq", config=kind.config) as store:
            queue = store.queue("jobs")
            while queue.qsize():
                task = queue.get(timeout=15)
                left.append(name_of(task))
                task.ack()
    assert put - begun <= set(left)
    assert not done & set(left)


def name_of(task: mqstore.Task) -> bytes:
    return bytes(task.value).rstrip(b".")


def use_until_killed(path: Path, config: StoreConfig, seed: int, said: Path) -> None:
    """Put until the disk is full, take some, and again. Say what was done, and what is settled next."""
    rng, number = random.Random(seed), 0
    with said.open("wb", buffering=0) as out:
        threading.Timer(0.3 + rng.random() / 2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        queue = mqstore.open(path, config=config).queue("jobs")
        while True:
            with suppress(StoreFullError):
                while rng.random() < 0.999:
                    name = b"%d-%d" % (seed, number)
                    queue.put(name.ljust(rng.choice([100, 50_000]), b"."))
                    out.write(b"+%s\n" % name)
                    number += 1
            with suppress(mqstore.QueueEmpty):
                for _ in range(rng.randrange(300)):
                    task = queue.get(block=False)
                    out.write(b"?%s\n" % name_of(task))
                    task.ack()
                    out.write(b"-%s\n" % name_of(task))
