"""What a store tells of itself."""

from __future__ import annotations

import errno
from pathlib import Path

from mqstore import SimulatedClock, StoreConfig
from tests.faults import FaultyFileSystem
from tests.log.support import HEADER, SEGMENT, kill, open_in, open_store


def test_counters_and_sizes(tmp_path: Path) -> None:
    size = HEADER + 1 + 1000
    with open_store(tmp_path / "s") as store:
        empty = store.stats()
        assert (empty.puts, empty.put_bytes, empty.gets, empty.get_bytes, empty.dispatched) == (0, 0, 0, 0, 0)
        assert (empty.segments, empty.commitlog_bytes, empty.queues, empty.max_offset) == (0, 0, 0, 0)
        for i in range(4):
            store.put("t", bytes(1000), i % 2)
        stats = store.stats()
        assert (stats.puts, stats.put_bytes, stats.dispatched) == (4, SEGMENT + size, 0)  # the BLANK of the roll counts
        assert (stats.segments, stats.commitlog_bytes) == (2, 2 * SEGMENT)
        assert stats.dispatch_lag_bytes == stats.flush_lag_bytes == stats.max_offset == SEGMENT + size
        assert [m.body for m in store.iter("t", 0)] == [bytes(1000)] * 2
        store.read("t", 1)
        store.flush()
        stats = store.stats()
        assert (stats.gets, stats.get_bytes, stats.dispatched, stats.queues) == (4, 4 * size, 4, 2)
        assert (stats.dispatch_lag_bytes, stats.flush_lag_bytes, stats.errors) == (0, 0, {})
        assert sum(stats.flush_latency_ns.values()) == 1
    with open_store(tmp_path / "s") as store:
        stats = store.stats()  # from opening on
        assert (stats.puts, stats.put_bytes, stats.gets, stats.queues, stats.max_offset) == (0, 0, 0, 2, SEGMENT + size)
        store.put_many("t", [b"x"] * 5)
        store.append("u", 0, b"x")
        assert store.stats().puts == 6
    with open_store(tmp_path / "s", "r") as store:
        store.read("t")
        stats = store.stats()
        assert (stats.puts, stats.gets, stats.dispatch_lag_bytes, stats.flush_lag_bytes) == (0, 7, 0, 0)


def test_a_store_is_open_when_it_is_recovered(tmp_path: Path) -> None:
    store = open_store(tmp_path / "s")
    store.put("t", b"x")
    kill(store)
    clock = SimulatedClock()
    begin_ms = clock.now_ms()
    config = StoreConfig(clock=clock)
    with open_in("rw", tmp_path / "s", config=config, progress=lambda *_: clock.advance(1000)) as store:
        assert begin_ms < clock.now_ms() == store.stats().opened_ms


def test_a_background_task_that_fails_shows_until_it_succeeds(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs) as store:
        store.put("t", b"x")
        store.dispatch()
        store.run_once(0)
        fs.fail("pwrite", errno.EIO, path_part="checkpoint")
        store.run_once(5_000)
        assert list(store.stats().errors) == ["checkpoint"]
        store.put("t", b"x")
        store.run_once(10_000)
        assert store.stats().errors == {}
