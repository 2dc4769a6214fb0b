"""Retention: whole segments go, oldest first, never the last; all else follows (format#retention)."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import struct
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mqstore import Retention, SimulatedClock
from mqstore.errors import FlushFailedError, OffsetOutOfRangeError, StoreIOError
from mqstore.jobs import recover
from tests.faults import FaultyFileSystem
from tests.log.support import SEGMENT, open_store
from tests.waiting import ended, in_thread

DAY_MS = 86_400_000
PER_SEGMENT = 4
"""Messages that a segment holds."""


def segments(store: Any) -> list[int]:
    return sorted(int(name) for name in os.listdir(store.path / "commitlog") if name.isdigit())


def fill(store: Any, clock: SimulatedClock | None = None, count: int = 10, step_ms: int = DAY_MS) -> None:
    """`count` segments full but for the last, a day apart."""
    for i in range(count * PER_SEGMENT - 1):
        store.put("t", b"%03d" % i + bytes(890), i % 2, keys="k")
        if clock is not None and i % PER_SEGMENT == PER_SEGMENT - 1:
            clock.advance(step_ms)
    store.flush()
    store.dispatch()
    assert segments(store) == [n * SEGMENT for n in range(count)]


def check_front(store: Any, kept: int, count: int = 10) -> None:
    """Of `count` segments the last `kept` are there, and queues, index, bounds and reads know of no others."""
    first = (count - kept) * SEGMENT
    message = (count - kept) * PER_SEGMENT
    assert segments(store) == [n * SEGMENT for n in range(count - kept, count)]
    assert store.min_offset == first
    for queue_id in (0, 1):
        low, high = store.offsets("t", queue_id)
        assert (low, high) == (message // 2, (count * PER_SEGMENT - queue_id) // 2)
        assert [int(m.body[:3]) for m in store.iter("t", queue_id)] == [2 * i + queue_id for i in range(low, high)]
        if low:
            with pytest.raises(OffsetOutOfRangeError) as caught:
                store.read("t", queue_id, low - 1)
            assert (caught.value.min_offset, caught.value.max_offset) == (low, high)
        # No file whose units are all dead, but never the last one.
        names = sorted(os.listdir(store.path / "consumequeue" / "t" / str(queue_id)))
        assert int(names[0]) == min(low // 8, (high - 1) // 8) * 160
    found = store.find("t", key="k", limit=1000)
    assert [int(m.body[:3]) for m in found] == list(range(count * PER_SEGMENT - 2, message - 1, -1))
    assert list(store.verify()) == []


@pytest.mark.parametrize("kept", [1, 4, 9, 10])
def test_dropping_on_demand_takes_whole_segments_below_the_offset(tmp_path: Path, kept: int) -> None:
    with open_store(tmp_path / "s") as store:
        fill(store)
        first = (10 - kept) * SEGMENT
        removed = store.drop_before(first + SEGMENT - 1)  # all but the last byte of the next one
        assert removed == [f"{n * SEGMENT:020d}" for n in range(10 - kept)]
        assert store.drop_before(first) == []
        check_front(store, kept)
        shutil.copytree(store.path, tmp_path / "crashed")
    for name in ("s", "crashed"):
        with open_store(tmp_path / name) as store:
            check_front(store, kept)
            assert store.put("t", b"next").offset == 20


@pytest.mark.parametrize(("offset", "count"), [(-1, 0), (SEGMENT - 1, 0), (10 * SEGMENT, 9), (1 << 62, 9)])
def test_requested_segments_are_dropped_except_the_last(store: Any, offset: int, count: int) -> None:
    """Of an empty store there is nothing to drop, and the one that is written is never dropped."""
    assert store.drop_before(offset) == store.clean(Retention(age=0, max_bytes=0)) == []
    fill(store)
    assert len(store.drop_before(offset)) == count
    check_front(store, 10 - count)
    assert store.drop_before(offset) == []


def test_undurable_or_undispatched_segments_stay(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs) as store:
        for i in range(40):
            store.put("t", bytes(890), i % 2)
        assert store.drop_before(1 << 62) == []  # neither
        store.dispatch()
        assert store.drop_before(1 << 62) == []  # in queues, but not on disk
        store.flush()
        assert len(store.drop_before(1 << 62)) == 9


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        *(({"age": age}, kept) for age, kept in ((0, 1), (2 * 86_400, 2), (4.5 * 86_400, 5), (100 * 86_400, 10))),
        *(
            ({"max_bytes": size}, kept)
            for size, kept in ((0, 1), (3 * SEGMENT, 3), (3 * SEGMENT + 1, 3), (1 << 40, 10))
        ),
        *(({"disk_ratio": ratio}, kept) for ratio, kept in ((0.5, 10), (0.46, 6), (0.1, 1))),
        ({"age": 8 * 86_400, "max_bytes": 5 * SEGMENT}, 5),
        ({"age": 3 * 86_400, "max_bytes": 9 * SEGMENT}, 3),
    ],
    ids=str,
)
def test_each_limit_of_a_policy_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any], kept: int
) -> None:
    """Segment n was written n days after the first, it is the ninth day, and 50 segments of a disk of 100 are in use.
    The files' mtime says nothing."""
    usage = SimpleNamespace(f_blocks=100, f_bfree=50, f_bavail=50, f_frsize=SEGMENT)
    monkeypatch.setattr(os, "statvfs", lambda path: usage)
    clock = SimulatedClock()
    with open_store(tmp_path / "s", clock=clock) as store:
        fill(store, clock)
        for path in (store.path / "commitlog").iterdir():
            os.utime(path, (1, 1))
        store.clean(Retention(**{"age": None, "max_bytes": None, "disk_ratio": None, **policy}))
        check_front(store, kept)
        assert store.clean() == []  # without a policy of its own a store drops nothing


@pytest.mark.parametrize(
    ("ahead", "file_day", "left"),
    [
        pytest.param([3], 0, [1, 1], id="the last record of the segment"),
        pytest.param([0], 0, [1, 1], id="another record of the segment"),
        pytest.param([3, 4], 0, [1, 1], id="a record on both sides"),
        pytest.param(range(4), 0, [1, 1], id="the whole segment"),
        pytest.param(range(9), 0, [1, 1], id="two segments and a record more"),
        pytest.param(range(16), 0, [1, 1], id="all there is, and the file has its time"),
        pytest.param(range(16), 9, [4, 3], id="all there is, and the file's time is wrong, too"),
    ],
)
def test_messages_of_the_future_do_not_stop_retention(
    tmp_path: Path, ahead: Iterable[int], file_day: int, left: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """On day 0 four segments of four messages are written, some with the clock a year ahead. What is a day old goes.
    `left` are the segments on days 1 and 2. Where nothing has a usable time, a segment counts from the first look."""
    clock = SimulatedClock()
    begin_ms, policy = clock.now_ms(), Retention(age=86_400, max_bytes=None)
    with open_store(tmp_path / "s", clock=clock) as store:
        for i in range(16):
            clock.set_wall(begin_ms + 365 * DAY_MS * (i in ahead))
            store.put("t", bytes(890), i % 2)
        clock.set_wall(begin_ms)
        store.flush()
        store.dispatch()
        for path in (tmp_path / "s" / "commitlog").iterdir():
            os.utime(path, (begin_ms / 1000 + file_day * 86_400,) * 2)
        for number in left:
            clock.advance(DAY_MS)
            store.clean(policy)
            assert len(segments(store)) == number
        said = [each for each in caplog.messages if "ahead of the clock" in each]
        assert bool(said) == (3 in ahead)


def test_messages_a_moment_ahead_count_as_they_are(tmp_path: Path) -> None:
    """The clock was set back by a second. The file's time, which a write through a mapping need not move, is old."""
    clock = SimulatedClock()
    with open_store(tmp_path / "s", clock=clock) as store:
        fill(store, clock, count=2, step_ms=500)
        clock.set_wall(clock.now_ms() - 1_000)
        for path in (tmp_path / "s" / "commitlog").iterdir():
            os.utime(path, (1, 1))
        store.clean(Retention(age=60, max_bytes=None))
        assert len(segments(store)) == 2


def test_the_store_cleans_by_itself_where_a_policy_was_given(tmp_path: Path) -> None:
    with open_store(tmp_path / "s", retention=Retention(age=None, max_bytes=2 * SEGMENT)) as store:
        fill(store)
        due = store.run_once(0)
        check_front(store, 10)
        while len(segments(store)) == 10:
            assert due <= 10_000
            due = store.run_once(due)
        check_front(store, 2)


def test_a_queue_all_of_whose_messages_are_gone_keeps_its_numbers(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        for i in range(20):
            store.put("old", b"%d" % i)
        fill_from = store.put_many("t", [bytes(890)] * 20)
        store.flush()
        store.dispatch()
        store.drop_before(fill_from[10].physical_offset)
        assert store.offsets("old") == (20, 20)
        assert store.read("old", 0, 20) == []
        shutil.copytree(store.path, tmp_path / "crashed")
    for name in ("s", "crashed"):
        with open_store(tmp_path / name) as store:
            assert store.offsets("old") == (20, 20)
            assert store.put("old", b"new").offset == 20
            assert [m.body for m in store.read("old", 0, 20)] == [b"new"]
            assert list(store.verify()) == []


@pytest.mark.parametrize("kept_segments", [9, 7])
def test_a_queue_that_lost_its_first_file_is_built_once_and_for_all(tmp_path: Path, kept_segments: int) -> None:
    """Slots before the first record that is left are those of records that retention took, so they are void. They
    were zeros where later files of the queue were still there, and each second recovery changed them."""
    with open_store(tmp_path / "s") as store:
        fill(store)
        store.drop_before((10 - kept_segments) * SEGMENT)
        low, high = store.offsets("t", 0)
    assert 0 < low < 8
    first = tmp_path / "s" / "consumequeue" / "t" / "0" / f"{0:020d}"
    lost = first.read_bytes()
    first.unlink()

    reports = [each.report for _ in range(2) for each in recover(tmp_path / "s")]

    assert [report and report.changed for report in reports] == [True, False]
    assert reports[0] is not None
    assert reports[0].rebuilt.units == 8 - low
    assert first.read_bytes() == struct.pack(">qiq", 0, 0x7FFFFFFF, 0) * low + lost[20 * low :]
    with open_store(tmp_path / "s") as store:
        check_front(store, kept_segments)
        assert store.offsets("t", 0) == (low, high)


def test_undeletable_segment_is_reported_and_retried(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs) as store:
        fill(store)
        fs.fail("unlink", errno.EIO, nth=3, path_part="commitlog")
        with pytest.raises(StoreIOError):
            store.drop_before(6 * SEGMENT)
        assert segments(store) == [n * SEGMENT for n in range(2, 10)]
        # Two are gone, so reads below must say so, even though the caller got an error.
        assert store.offsets("t") == (PER_SEGMENT, 20)
        with pytest.raises(OffsetOutOfRangeError):
            store.read("t", 0, 0)
        assert store.drop_before(6 * SEGMENT) == [f"{n * SEGMENT:020d}" for n in range(2, 6)]
        check_front(store, 4)


@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
def test_segments_dropped_one_after_the_other_while_writing_goes_on(tmp_path: Path, profile: Any) -> None:
    with open_store(tmp_path / "s", profile=profile, retention=Retention(age=None, max_bytes=3 * SEGMENT)) as store:
        for i in range(160):
            store.put("t", b"%03d" % i + bytes(i % 7 * 100), keys="k")
            if i % 10 == 0:
                store.flush()
                store.dispatch()
                store.clean()
                assert len(segments(store)) <= 3
                low, high = store.offsets("t")
                assert [int(m.body[:3]) for m in store.iter("t", 0)] == list(range(low, high))
                assert high == i + 1
        assert len(os.listdir(store.path / "index")) < 10
        assert list(store.verify()) == []


def test_unreadable_segment_goes_with_the_next(tmp_path: Path) -> None:
    clock = SimulatedClock()
    with open_store(tmp_path / "s", clock=clock) as store:
        for _ in range(16):
            store.put("t", bytes(900))
    names = sorted(p.name for p in (tmp_path / "s" / "commitlog").iterdir() if p.name.isdigit())
    assert len(names) == 4
    first = tmp_path / "s" / "commitlog" / names[0]
    first.write_bytes(bytes(first.stat().st_size))
    clock.advance(10_000)

    with open_store(tmp_path / "s", clock=clock) as store:
        removed = store.clean(Retention(age=5, max_bytes=None))

        assert removed == names[:3]


def test_nothing_is_deleted_after_a_failed_sync_of_units(tmp_path: Path) -> None:
    """A second sync reports success for pages that the system has dropped; deletion believed it, the checkpoint too."""
    fs = FaultyFileSystem()
    with open_store(tmp_path / "s", fs=fs) as store:
        fill(store)
        fs.fail("fdatasync", errno.EIO, path_part="consumequeue")
        for _ in range(2):
            with pytest.raises(FlushFailedError):
                store.drop_before(6 * SEGMENT)
        assert segments(store) == [n * SEGMENT for n in range(10)]
        assert "EIO" in store.stats().errors["units"] or "Input/output" in store.stats().errors["units"]
        store.background.save_checkpoint()
        assert (store.parts.checkpoint.dispatched or 0) == 0
    with open_store(tmp_path / "s") as store:
        assert len(store.drop_before(6 * SEGMENT)) == 6
        check_front(store, 4)


def test_two_deletions_at_once(tmp_path: Path) -> None:
    """Public calls met the flusher's: both deleted the same files of queues, and struck the next ones off the lists."""

    class Meeting(FaultyFileSystem):
        """Brings both to the same file at the same time, if it can."""

        def unlink(self, path: Any, *, missing_ok: bool = False) -> None:
            for folder, barrier in meetings.items():
                if folder in str(path):
                    with contextlib.suppress(threading.BrokenBarrierError):
                        barrier.wait(0.05)
            super().unlink(path, missing_ok=missing_ok)

    meetings: dict[str, threading.Barrier] = {}
    with open_store(tmp_path / "s", fs=Meeting(), index_entries=4) as store:
        fill(store)
        meetings |= {folder: threading.Barrier(2) for folder in ("commitlog", "consumequeue", "index")}
        deleting = [in_thread(lambda: store.drop_before(6 * SEGMENT)) for _ in range(2)]
        assert sorted(len(ended(*each)) for each in deleting) == [0, 6]
        check_front(store, 4)


def test_the_age_of_a_segment_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest segment was read from end to end every ten seconds, for as long as it was kept."""
    clock = SimulatedClock(1_700_000_000_000)
    with open_store(tmp_path / "s", clock=clock) as store:
        fill(store, clock)
        assert len(store.clean(Retention(age=6.5 * 86_400))) == 3
        read: list[object] = []
        mapping = type(store.log_files).mapping
        monkeypatch.setattr(
            type(store.log_files), "mapping", lambda run, segment: read.append(segment) or mapping(run, segment)
        )
        assert store.clean(Retention(age=6.5 * 86_400)) == []
        assert read == []
        assert len(store.clean(Retention(age=4.5 * 86_400))) == 2
        check_front(store, 5)


def test_clock_ahead_of_the_last_message_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = SimulatedClock()
    begin_ms = clock.now_ms()

    def warnings() -> list[str]:
        return [each for each in caplog.messages if "ahead of the clock" in each]

    with open_store(tmp_path / "s", clock=clock) as store:
        clock.set_wall(begin_ms + 30 * DAY_MS)
        store.put("t", b"", 0)
        store.dispatch()
        store.run_once(clock.monotonic_ms())
        assert warnings() == []
    clock.set_wall(begin_ms)
    with open_store(tmp_path / "s", clock=clock) as store:
        for _ in range(3):
            clock.advance(3_600_000)
            store.run_once(clock.monotonic_ms())
        assert len(warnings()) == 1
        assert "30 days" in warnings()[0]
        assert "30 days" in store.stats().errors["clock"]
        store.put("t", b"", 0)
        store.dispatch()
        clock.advance(60_000)
        store.run_once(clock.monotonic_ms())
        assert "clock" not in store.stats().errors


@pytest.mark.parametrize(("ahead_ms", "expected"), [(299_999, 0), (300_000, 1)])
def test_clock_a_moment_behind_is_no_warning(
    tmp_path: Path, ahead_ms: int, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimulatedClock()
    with open_store(tmp_path / "s", clock=clock) as store:
        store.put("t", b"", 0)
    clock.set_wall(clock.now_ms() - ahead_ms)
    with open_store(tmp_path / "s", clock=clock) as store:
        assert ("clock" in store.stats().errors) == expected
