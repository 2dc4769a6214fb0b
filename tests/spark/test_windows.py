"""Windows of the log: bounded, never beyond the file, and read where they cannot be mapped."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mqstore import MessageStore
from mqstore.spark.windows import Windows, lie_far_apart
from tests.spark.support import Odd, as_exported, as_row, by_log, exported, read_all, rows_of, write_store
from tests.without import compiled


@pytest.fixture
def store(tmp_path: Path) -> Any:
    path = write_store(tmp_path / "s", [Odd(body=bytes([i]) * 900) for i in range(60)])
    with MessageStore(path, "r") as opened:
        yield opened


def test_a_window_is_kept_and_few_are(store: MessageStore) -> None:
    windows = Windows(store._run, store.fs, window_bytes=4096, keep=2)
    first = windows.of(0, 100)
    assert first is not None
    assert (first.base, len(first.buffer), first.at_end) == (0, 4096, False)
    assert windows.of(0, 4096) is first
    assert windows.of(4096, 4100) is not first
    assert windows.of(0, 1) is first
    windows.of(8192, 8200)
    windows.of(12_288, 12_300)
    assert windows.of(0, 1) is not first


def test_a_window_grows_for_a_record_that_lies_across_its_end_but_not_beyond_the_file(store: MessageStore) -> None:
    windows = Windows(store._run, store.fs, window_bytes=4096)
    assert windows.of(0, 4096).end == 4096  # type: ignore[union-attr]
    assert windows.of(0, 5000).end == 5000  # type: ignore[union-attr]
    last = windows.of(12_288, 20_000)
    assert last is not None
    assert (last.end, last.at_end) == (16_384, True)
    assert windows.of(12_288, 30_000) is last  # there is no more: asking again maps nothing


def test_there_is_no_window_where_there_is_no_file(store: MessageStore) -> None:
    windows = Windows(store._run, store.fs)
    assert windows.of(1 << 30, 1 << 31) is None
    Path(store._run.segments()[1].path).unlink()
    assert windows.of(16_384, 20_000) is None


def test_cells_begin_anew_in_each_segment(store: MessageStore) -> None:
    windows = Windows(store._run, store.fs, window_bytes=12_288)
    places = np.array([0, 12_287, 12_288, 16_383, 16_384, 28_672])
    assert windows.cells(places).tolist() == [
        0,
        0,
        12_288,
        12_288,
        16_384,
        28_672,
    ]


def test_where_no_address_space_is_left_the_bytes_are_read(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark may limit a worker's address space (spark.executor.pyspark.memory), to which mappings count."""

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    expected = [as_row(line) for line in exported(store.path)]
    monkeypatch.setattr(mmap, "mmap", full)
    windows = Windows(store._run, store.fs, window_bytes=8192)
    found = windows.of(0, 5000)
    assert found is not None
    assert (found.base, len(found.buffer), found.at_end) == (0, 5000, False)
    assert isinstance(found.buffer, bytes)
    for each in (read_all(store.path, window_bytes=4096), by_log(store.path, [20_000], window_bytes=4096)):
        rows = sorted(rows_of(each), key=lambda row: row["physical_offset"])
        assert [as_exported(row) for row in rows] == sorted(expected, key=lambda row: row["physical_offset"])


def test_no_window_reaches_into_a_splice_that_is_not_in_yet(store: MessageStore) -> None:
    store._run.limit = 5000
    windows = Windows(store._run, store.fs, window_bytes=4096)
    found = windows.of(4096, 4200)
    assert found is not None
    assert (found.end, found.at_end) == (5000, True)
    assert windows.of(8192, 8200) is None
    assert windows.from_(4096, 4200).end == 5000  # type: ignore[union-attr]


# -- records that lie far apart ----------------------------------------------------------------------------------------


@compiled
def test_what_lies_far_apart_is_read_and_not_mapped() -> None:
    small = np.full(100, 400)
    far, near = np.arange(100) * (16 << 10) * 2, np.arange(100) * 400
    assert lie_far_apart(far, small)
    assert lie_far_apart(far[::-1], small)
    assert not lie_far_apart(near, small)
    assert not lie_far_apart(far[:20], small[:20])  # a few are not worth it
    assert not lie_far_apart(far, np.full(100, 32 << 10))  # side by side, each large
    stray = near.copy()
    stray[50] = 1 << 40
    assert not lie_far_apart(stray, small)
    claims = small.copy()
    claims[7] = 500 << 20  # a damaged unit: to look at it through a window costs nothing
    assert not lie_far_apart(far, claims)


def places(store: MessageStore) -> tuple[Any, Any]:
    units = store._queues.get("t", 0).units(0, 60)  # type: ignore[union-attr]
    return units["physical_offset"].astype(np.int64), units["size"].astype(np.int64)


@compiled
def test_records_of_several_segments_are_read_side_by_side_in_any_order(store: MessageStore) -> None:
    physical, sizes = places(store)
    assert len(store._run.segments()) > 2
    log = b"".join(Path(segment.path).read_bytes() for segment in store._run.segments())
    for order in (slice(None), slice(None, None, -1), slice(1, None, 7)):
        data = Windows(store._run, store.fs).read(physical[order], sizes[order])
        expected = zip(physical[order].tolist(), sizes[order].tolist(), strict=True)
        assert data == b"".join(log[at : at + size] for at, size in expected)


@compiled
def test_however_many_segments_there_are_one_file_is_open_at_a_time(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    physical, sizes = places(store)
    most = opened = 0

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(store.fs, name)

        def open(self, *given: Any) -> int:
            nonlocal most, opened
            opened += 1
            most = max(most, opened)
            return store.fs.open(*given)

        def close(self, fd: int) -> None:
            nonlocal opened
            opened -= 1
            store.fs.close(fd)

    assert Windows(store._run, Counting()).read(physical, sizes)  # type: ignore[arg-type]
    assert (most, opened) == (1, 0)


@compiled
@pytest.mark.parametrize("why", ["file", "length", "negative", "splice", "truncated"])
def test_nothing_is_read_where_a_record_does_not_lie_in_its_file(store: MessageStore, why: str) -> None:
    physical, sizes = places(store)
    if why == "file":
        Path(store._run.segments()[1].path).unlink()
    elif why == "length":
        sizes[3] = 20_000  # beyond its segment
    elif why == "negative":
        sizes[3] = -1
    elif why == "splice":
        store._run.limit = int(physical[-1])
    else:
        with open(store._run.segments()[-1].path, "r+b") as file:
            file.truncate(100)
    assert Windows(store._run, store.fs).read(physical, sizes) is None


@compiled
def test_what_cannot_be_read_record_by_record_is_looked_up_through_windows(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mqstore.spark.rows.lie_far_apart", lambda *_: True)
    expected = rows_of(read_all(store.path))
    monkeypatch.setattr(Windows, "read", lambda *_: None)
    assert rows_of(read_all(store.path)) == expected
    assert len(expected) == 61  # with a seed in a queue of its own
