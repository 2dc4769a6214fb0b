"""Stores on small disks: what they take, and what they do when the disk is full (format#allocation, format#room)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest

import mqstore
from mqstore import Retention, SimulatedClock, StoreConfig
from mqstore.errors import StoreFullError

MIB = 1 << 20
SEGMENT = 65_536


def blocks(root: Path) -> int:
    """Return the number of bytes on disk below `root`, as `du` counts them."""
    return sum(
        os.lstat(os.path.join(folder, name)).st_blocks * 512 for folder, _, names in os.walk(root) for name in names
    )


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


class Disk:
    """File system of limited size, mounted at `path`."""

    def __init__(self, path: Path, mib: int) -> None:
        self.path = path
        self.mib = mib

    def free(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize


@pytest.fixture(params=[32, 100, 200])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}m", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a file system, and not in every container")
    try:
        yield Disk(path, request.param)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)  # tasks may hold mappings


def test_queue_that_is_always_empty_never_fills_the_disk(disk: Disk) -> None:
    with mqstore.open(disk.path / "mq") as store:
        queue = store.queue("jobs")
        rounds = disk.mib * MIB * 5 // 2 // 100_000
        for _ in range(rounds):
            queue.put(bytes(100_000))
            queue.get(timeout=15).ack()
        assert queue.qsize() == 0
        assert store.stats().errors == {}


@pytest.mark.parametrize("size", [100, 10_000])
def test_full_disk_refuses_puts_and_is_consumed_to_the_last_item(disk: Disk, size: int) -> None:
    count = 0
    with mqstore.open(disk.path / "mq") as store:
        queue = store.queue("jobs")
        bodies = [bytes(size)] * (MIB // (size + 400))
        with suppress(StoreFullError):
            while True:
                queue.put_many(bodies)
                count += len(bodies)
        with pytest.raises(StoreFullError, match=r"bytes are free.*segment_bytes"):
            queue.put_many(bodies)
    with mqstore.open(disk.path / "mq") as store:
        queue = store.queue("jobs")
        assert queue.qsize() >= count
        count = queue.qsize()
        for number in range(count):
            for task in queue.get_many(32) if number % 100 == 0 else [queue.get(timeout=15)]:
                task.ack()
                count -= 1
            if not count:
                break
        assert queue.qsize() == count == 0
        for body in bodies:  # as much as before fits again
            queue.put(body)
        assert queue.qsize() == len(bodies)


def test_kills_on_a_full_disk_lose_nothing_that_was_acknowledged(disk: Disk) -> None:
    put: set[bytes] = set()
    begun: set[bytes] = set()  # the kill may have come behind the acknowledgement
    done: set[bytes] = set()
    for seed in range(3):
        arguments = [sys.executable, "-c", BUSY, str(disk.path / "mq"), str(seed)]
        child = subprocess.run(arguments, capture_output=True, check=False)
        assert child.returncode == -signal.SIGKILL, child.stderr
        for line in child.stdout.splitlines(keepends=True):
            if line.endswith(b"\n"):
                {b"+": put, b"?": begun, b"-": done}[line[:1]].add(line[1:-1])
    left: list[bytes] = []
    with mqstore.open(disk.path / "mq") as store:
        queue = store.queue("jobs")
        while queue.qsize():
            task = queue.get(timeout=15)
            left.append(bytes(task.value).rstrip(b"."))
            task.ack()
    assert put - begun <= set(left)
    assert not done & set(left)


BUSY = """
import os, random, signal, sys, threading, mqstore
rng = random.Random(sys.argv[2])
threading.Timer(0.5 + rng.random(), os.kill, (os.getpid(), signal.SIGKILL)).start()
queue = mqstore.open(sys.argv[1]).queue("jobs")
number = 0
while True:
    try:
        while rng.random() < 0.999:
            name = f"{sys.argv[2]}-{number}".encode()
            queue.put(name.ljust(rng.choice([100, 50_000]), b"."))
            print(f"+{name.decode()}", flush=True)
            number += 1
    except mqstore.errors.StoreFullError:
        pass
    for _ in range(rng.randrange(300)):
        try:
            task = queue.get(block=False)
        except mqstore.QueueEmpty:
            break
        print("?" + bytes(task.value).rstrip(b".").decode(), flush=True)
        task.ack()
        print("-" + bytes(task.value).rstrip(b".").decode(), flush=True)
"""
