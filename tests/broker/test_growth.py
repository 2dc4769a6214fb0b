"""Work that looks at every topic, queue or group takes in proportion to their number, counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

import pytest

from mqstore.admin import inspect_store
from mqstore.broker.admin.inspect import group_names, lag_of, pop_view
from mqstore.broker.background.context import open_tables
from mqstore.broker.broker import Broker
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from tests.faults import FaultyFileSystem
from tests.log.support import open_store

TraceFunction: TypeAlias = Callable[[FrameType, str, Any], Any]


def steps_of(work: Callable[[], object]) -> int:
    """Lines of Python that this thread runs, each turn of a loop or comprehension included."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> TraceFunction:
        nonlocal count
        count += 1
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def filled(path: Path, size: int) -> Path:
    """A store of `size` topics with a message each; `size` groups have progress on one of them, and one on all."""
    with Broker(open_store(path, segment_bytes=1 << 20)) as broker:
        for number in range(size):
            broker.topics.create(f"t{number}", queues=1)
            broker.put(f"t{number}", b"x")
        broker.store.dispatch()
        for number in range(size):
            broker.commit(f"g{number}", "t0", 0, 1)
            broker.commit("all", f"t{number}", 0, 1)
    return path


def lag_of_one(path: Path) -> int:
    with ReadOnlyMessageStore(path) as store:
        tables = open_tables(store)
        return steps_of(lambda: lag_of(tables, "all", pop_view(tables, 0)))


def lag_of_all(path: Path) -> int:
    """Count calls of the file system."""
    fs = FaultyFileSystem()
    with ReadOnlyMessageStore(path, fs=fs) as store:
        tables = open_tables(store)
        fs.calls.clear()
        pops = pop_view(tables, 0)
        for group in group_names(tables):
            lag_of(tables, group, pops)
    return len(fs.calls)


def stats(path: Path) -> int:
    with Broker(open_store(path)) as broker:
        return steps_of(broker.stats)


LOOKS: dict[str, Callable[[Path], int]] = {
    "inspect": lambda path: steps_of(lambda: inspect_store(path)),
    "lag of one group": lag_of_one,
    "lag of all groups": lag_of_all,
    "stats": stats,
}


@pytest.mark.parametrize("look", LOOKS)
def test_looking_at_everything_is_linear_in_topics(tmp_path: Path, look: str) -> None:
    """Each topic once had all queues listed again: `inspect` of 1,000 topics took 23 s."""
    small, middle, large = (LOOKS[look](filled(tmp_path / str(size), size)) for size in (8, 16, 32))
    assert large - middle < 2.2 * (middle - small)
