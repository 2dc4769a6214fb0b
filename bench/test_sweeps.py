"""Questions about commands that read a whole store, and how many queues and segments change them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import mqstore
from bench import peers
from bench.harness import CPU, Load, Row, Work, asked, side
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


def exported(path: Path, _: int) -> None:
    export.main([str(path), "--output", "/dev/null"], standalone_mode=False)


@contextmanager
def sweep(
    directory: Path, load: Load, *, check: Check, queues: int = 4, segment: int | None = None, of: str = "messages"
) -> Iterator[Work]:
    log_end = fill_in_turn(directory / "store", load, queues, segment)
    summed(directory / "store", log_end)  # so that the page cache has it
    amount = {"messages": load.messages, "bytes": log_end, "calls": 1}[of]
    yield lambda: (check(directory / "store", log_end), amount)[1]


@contextmanager
def bare_sweep(directory: Path, load: Load, *, queues: int) -> Iterator[Work]:
    log_end = fill_in_turn(directory / "store", load, queues)
    with peers.mapped_segments(directory / "store" / "commitlog") as views:
        yield partial(peers.crc32c_sweep, views, log_end)


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


def sweep_beside(check: Check, messages: int, goal: float, **many: int) -> Row:
    bare = side("bare crc32c, each segment opened", sweep, check=summed, **many)
    ours, few = side("mqstore", sweep, check=check, **many), side("few", sweep, check=check)
    return ours, Load(128, messages), {few: 1.5, bare: goal}, CPU


def export_beside(queues: int) -> Row:
    ours, crc32c = (
        side("mqstore export", sweep, check=exported, queues=queues, of="bytes"),
        side("bare crc32c, one sweep", bare_sweep, queues=queues),
    )
    return ours, Load(550, 200_000), {crc32c: 40}, {**CPU, "unit": "bytes"}


INSPECT = side("mqstore inspect", sweep, check=lambda path, _: inspect_store(path), queues=10_000, of="calls")
FIRST_READ, FEW_SEGMENTS = (
    side("mqstore first read", first_read, segments=3000),
    side("30 segments", first_read, segments=30),
)

test_sweeps = asked(
    {
        # The time of `verify` and `recover --dry-run` with 3,000 queues, or segments of 8 KiB, compared with few.
        "sweep[verify-queues]": sweep_beside(verified, 600_000, 4, queues=3000),
        "sweep[verify-segments]": sweep_beside(verified, 150_000, 4, segment=8192),
        "sweep[recover-queues]": sweep_beside(planned, 600_000, 8, queues=3000),
        "sweep[recover-segments]": sweep_beside(planned, 150_000, 8, segment=8192),
        # The time of `mqstore export` as JSON lines.
        "export[4]": export_beside(4),
        "export[3000]": export_beside(3000),
        # The time of `inspect_store` with 10,000 queues; of the first read after opening, with 3,000 segments.
        "inspect": (INSPECT, Load(128, 100_000), {}, {**CPU, "unit": "calls", "limit": (1000, "ms")}),
        "read_after_open": (FIRST_READ, Load(1024, 3000), {FEW_SEGMENTS: 1.5}, {**CPU, "unit": "calls"}),
    }
)
