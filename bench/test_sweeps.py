"""Questions about commands that read a whole store, and how many queues and segments change them."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import mqstore
from bench import peers
from bench.harness import Ask, Load, Side, Work
from mqstore import jobs
from mqstore.admin import inspect_store
from mqstore_tools.export import export


def fill_in_turn(path: Path, load: Load, queues: int, segment_bytes: int | None = None) -> int:
    """Put messages to the queues in turn, four for each topic. Returns the end of the log.

    There are no more queues than messages, or a share of the messages would make thousands of empty ones.
    """
    with mqstore.open(path, config=mqstore.StoreConfig(segment_bytes=segment_bytes)) as store:
        topics = [f"{load.topic}{i}" for i in range(max(4, min(queues, load.messages)) // 4)]
        for topic in topics:
            store.create_topic(topic, queues=4)
        for i, body in enumerate(load.bodies()):
            receipt = store.put(topics[i // 4 % len(topics)], body, queue_id=i % 4)
        return receipt.physical_offset + store.log.at(receipt.physical_offset).size


Check = Callable[[Path, int], object]
"""Function of a closed store and the end of its log."""


def verified(path: Path, _: int) -> None:
    assert jobs.verify(path).ok


def planned(path: Path, _: int) -> None:
    [found] = jobs.recover(path, dry_run=True)
    assert found.report is not None
    assert not found.report.changed


def summed(path: Path, end: int) -> None:
    """Open and map each segment, and read the same bytes with the bare checksum: as each check must."""
    for segment in sorted(file for file in (path / "commitlog").iterdir() if file.name.isdigit()):
        if (left := end - int(segment.name)) > 0:
            with segment.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
                peers.crc32c_sweep([memoryview(mapping)], left)


@contextmanager
def sweep(directory: Path, load: Load, *, check: Check, queues: int = 4, segment: int | None = None) -> Iterator[Work]:
    log_end = fill_in_turn(directory / "store", load, queues, segment)
    summed(directory / "store", log_end)  # so that the page cache has it
    yield lambda: (check(directory / "store", log_end), load.messages)[1]


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize(("check", "goal"), [(verified, 4), (planned, 8)])
@pytest.mark.parametrize(("many", "messages"), [({"queues": 3000}, 600_000), ({"segment": 8192}, 150_000)])
def test_sweep(ask: Ask, check: Check, goal: float, many: dict[str, int], messages: int) -> None:
    """The time of `verify` and `recover --dry-run` with 3,000 queues, or segments of 8 KiB, compared with few."""
    few = Side("few", partial(sweep, check=check))
    bare = Side("bare crc32c, each segment opened", partial(sweep, check=summed, **many))
    ask(Side("mqstore", partial(sweep, check=check, **many)), Load(128, messages), {few: 1.5, bare: goal}, by="time")


@contextmanager
def bare_sweep(directory: Path, load: Load, *, queues: int) -> Iterator[Work]:
    log_end = fill_in_turn(directory / "store", load, queues)
    with peers.mapped_segments(directory / "store" / "commitlog") as views:
        yield partial(peers.crc32c_sweep, views, log_end)


@contextmanager
def exported(directory: Path, load: Load, *, queues: int) -> Iterator[Work]:
    log_end = fill_in_turn(directory / "store", load, queues)
    arguments = [str(directory / "store"), "--output", "/dev/null"]
    yield lambda: (export.main(arguments, standalone_mode=False), log_end)[1]


@pytest.mark.benchmark(timer=time.process_time)
@pytest.mark.parametrize("queues", [4, 3000])
def test_export(ask: Ask, queues: int) -> None:
    """The time of `mqstore export` as JSON lines."""
    crc32c = Side("bare crc32c, one sweep", partial(bare_sweep, queues=queues))
    ours = Side("mqstore export", partial(exported, queues=queues))
    ask(ours, Load(550, 200_000), {crc32c: 40}, by="time", unit="bytes")


@contextmanager
def inspected(directory: Path, load: Load) -> Iterator[Work]:
    fill_in_turn(directory / "store", load, queues=10_000)
    yield lambda: (inspect_store(directory / "store"), 1)[1]


@pytest.mark.benchmark(timer=time.process_time)
def test_inspect(ask: Ask) -> None:
    """The time of `inspect_store` with 10,000 queues."""
    ask(Side("mqstore inspect", inspected), Load(128, 100_000), {}, unit="calls", limit=(1000, "ms"))


@contextmanager
def first_read(directory: Path, load: Load, *, segments: int) -> Iterator[Work]:
    segment_bytes = 2 * load.record_bytes + 10
    messages = 2 * min(segments, load.messages)
    fill_in_turn(directory / "store", Load(load.body_bytes, messages, load.topic), 4, segment_bytes)
    with mqstore.open(directory / "store") as store:
        store.put("last", b"")
    with mqstore.open(directory / "store", "r") as store:
        queue_id = next(i for i in range(4) if store.log.offsets_or_none("last", i))
        yield lambda: len(store.read("last", queue_id, 0))


@pytest.mark.benchmark(timer=time.process_time)
def test_read_after_open(ask: Ask) -> None:
    """The time of the first read after opening, with 3,000 segments."""
    few = Side("30 segments", partial(first_read, segments=30))
    ours = Side("mqstore first read", partial(first_read, segments=3000))
    ask(ours, Load(1024, 3000), {few: 1.5}, by="time", unit="calls")
