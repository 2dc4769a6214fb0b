"""Runs of segments: names and lengths, growing, cutting, mappings that outlive their segment, a disk that is full."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from mqstore.errors import StoreFullError, StoreIOError
from mqstore.files import system
from mqstore.files.filesystem import REAL, FileSystem, StrPath
from mqstore.files.segment import LoadProblem, segment_name
from mqstore.files.segments import SegmentRun
from mqstore.files.segmentwriter import SegmentWriter
from mqstore.files.system import data_end
from tests.faults import FaultyFileSystem
from tests.holding import linux_only, mapped_files
from tests.smalldisk import small_disk

SIZE = 16 * 1024  # a few pages
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


def open_run(folder: Path, *, fs: FileSystem = REAL, **options: Any) -> SegmentWriter:
    run = SegmentWriter(folder, folder.parent / "tmp", options.pop("size", SIZE), fs=fs, **options)
    run.load()
    return run


def open_reader(folder: Path, *, fs: FileSystem = REAL, max_mappings: int = 64) -> SegmentRun:
    run = SegmentRun(folder, SIZE, fs=fs, max_mappings=max_mappings)
    run.load()
    return run


def filled(folder: Path, count: int, *, first: int = 0, fs: FileSystem = REAL, **options: Any) -> SegmentWriter:
    """A run of `count` segments; each byte of the n-th is n + 1."""
    run = open_run(folder, fs=fs, **options)
    for number in range(count):
        segment = run.create(first + number * SIZE)
        run.write(segment.start, bytes([number + 1]) * SIZE)
    run.sync(run.min_offset, run.end)
    return run


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


def mapped_names(folder: Path) -> list[str]:
    """Names of the files of `folder` that this process has mapped, once for each mapping."""
    return [Path(path).name for path in mapped_files(folder)]


# --- growing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, SIZE, 2 * SIZE + 20, -SIZE, 1 << 63])
def test_a_segment_is_created_only_behind_the_last_and_on_the_grid(folder: Path, start: int) -> None:
    run = filled(folder, 2)

    with pytest.raises(ValueError, match="can start at"):
        run.create(start)

    assert len(names(folder)) == 2


def test_prepared_segment_is_renamed_into_place(folder: Path) -> None:
    run = filled(folder, 1)
    run.prepare(SIZE, populate_bytes=8192)
    assert names(folder) == [segment_name(0)]
    (prepared,) = (folder.parent / "tmp").iterdir()
    inode = prepared.stat().st_ino

    segment = run.create(SIZE)

    assert os.stat(segment.path).st_ino == inode
    assert Path(segment.path) == folder / segment_name(SIZE)
    assert names(folder.parent / "tmp") == []
    run.mapping(segment)[0:3] = b"abc"
    assert Path(segment.path).read_bytes() == b"abc" + bytes(SIZE - 3)


def test_preparing_twice_makes_one_and_another_start_gives_up_the_first(folder: Path) -> None:
    run = filled(folder, 1)
    run.prepare(SIZE)
    first = names(folder.parent / "tmp")
    run.prepare(SIZE)
    assert names(folder.parent / "tmp") == first

    run.prepare(2 * SIZE)

    (only,) = names(folder.parent / "tmp")
    assert only.startswith(segment_name(2 * SIZE))
    run.create(SIZE)
    assert names(folder.parent / "tmp") == []


def test_close_removes_what_was_prepared_and_keeps_what_was_created(folder: Path) -> None:
    run = filled(folder, 1)
    run.prepare(SIZE)

    run.close()

    assert names(folder.parent / "tmp") == []
    assert names(folder) == [segment_name(0)]


def test_files_and_folders_have_their_modes(folder: Path) -> None:
    filled(folder, 1)
    shared = folder.parent / "shared"
    filled(shared, 1, file_mode=0o640)

    umask = os.umask(0)
    os.umask(umask)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / segment_name(0))] == [0o700, 0o600]
    assert [path.stat().st_mode & 0o777 for path in (shared, shared / segment_name(0))] == [
        0o750 & ~umask,
        0o640 & ~umask,
    ]


# --- a full disk, and other refusals ----------------------------------------------------------------------------------


FAILING = [("allocate", errno.ENOSPC), ("allocate", errno.EDQUOT), ("allocate", errno.EIO), ("create", errno.EIO)]
FAILING += [("fdatasync", errno.EIO)]


@pytest.mark.parametrize(
    ("call", "operation", "number"),
    [
        *(("prepare", *each) for each in [*FAILING, ("map", errno.ENOMEM)]),
        *(("create", *each) for each in [*FAILING, ("replace", errno.EIO)]),
    ],
)
def test_whatever_step_fails_nothing_is_left_behind(folder: Path, call: str, operation: str, number: int) -> None:
    fs = FaultyFileSystem()
    run = filled(folder, 2, fs=fs)
    fs.fail(operation, number)

    with pytest.raises(StoreFullError if number in (errno.ENOSPC, errno.EDQUOT) else StoreIOError):
        run.create(2 * SIZE) if call == "create" else run.prepare(2 * SIZE, populate_bytes=4096)

    assert names(folder) == [segment_name(0), segment_name(SIZE)]
    assert names(folder.parent / "tmp") == []
    assert run.end == 2 * SIZE
    assert run.create(2 * SIZE) is run.last, "goes on when there is room again"


# --- what is durable --------------------------------------------------------------------------------------------------


def order_of(fs: FaultyFileSystem) -> list[tuple[str, str]]:
    return [(call.operation, Path(call.path).name.split(".")[0]) for call in fs.calls if call.operation
            in ("allocate", "fdatasync", "replace", "sync_directory", "unlink", "mkdir")]  # fmt: skip


def test_a_name_that_comes_during_a_folder_sync_is_not_taken_for_durable(folder: Path) -> None:
    class Meddling(FaultyFileSystem):
        def sync_directory(self, path: Any) -> None:
            super().sync_directory(path)
            if meddle:
                meddle.pop()
                run.create(2 * SIZE)

    meddle: list[bool] = []
    fs = Meddling()
    run = filled(folder, 1, fs=fs)
    run.create(SIZE)
    meddle.append(True)
    run.sync_folder()
    fs.calls.clear()

    run.sync(2 * SIZE, 2 * SIZE + 1)

    assert ("sync_directory", "log") in order_of(fs)


# --- mappings ---------------------------------------------------------------------------------------------------------


def test_only_the_last_segments_can_be_changed_through_a_mapping(folder: Path) -> None:
    run = open_run(folder)
    segments = [run.create(number * SIZE) for number in range(4)]
    for segment in segments:
        run.mapping(segment)

    assert [segment.writable for segment in segments] == [False, False, False, True]
    with pytest.raises(TypeError):
        run.mapping(segments[1])[0:1] = b"x"
    run.mapping(segments[3])[0:1] = b"x"


def test_only_the_last_two_segments_are_writable(folder: Path) -> None:
    run = open_run(folder)
    segments = []
    for number in range(3):
        segments.append(run.create(number * SIZE))
        run.mapping(segments[-1])[0:1] = b"x"

    assert [segment.writable for segment in segments] == [False, True, True]
    assert segments[0].mapping is None
    assert run.mapping(segments[0])[0:1] == b"x"


@pytest.mark.parametrize(
    ("offset", "error"), [(SIZE - 3, ValueError), (2 * SIZE - 3, ValueError), (3 * SIZE, ValueError)]
)
def test_a_write_across_the_end_of_a_segment_is_refused(folder: Path, offset: int, error: type[Exception]) -> None:
    run = filled(folder, 2)

    with pytest.raises(error):
        run.write(offset, b"four")

    assert (folder / segment_name(0)).read_bytes() == b"\x01" * SIZE
    assert [os.path.getsize(folder / name) for name in names(folder)] == [SIZE, SIZE]


def test_next_segment_retires_the_others(folder: Path) -> None:
    run = open_run(folder)
    segments = []
    for number in range(2):
        segments.append(run.create(number * SIZE))
        run.mapping(segments[-1])[0:SIZE] = bytes([number + 1]) * SIZE
    view = memoryview(run.mapping(segments[0]))

    run.prepare(2 * SIZE)

    assert [segment.writable for segment in segments] == [False, True]
    assert segments[0].mapping is None
    assert bytes(view) == b"\x01" * SIZE
    view[0:1] = b"!"  # a writer that is late still reaches the file
    run.sync(0, SIZE)
    assert (folder / segment_name(0)).read_bytes() == b"!" + b"\x01" * (SIZE - 1)
    assert run.mapping(segments[0])[0:2] == b"!\x01"


@linux_only
def test_the_run_keeps_as_many_mappings_as_it_may_the_last_used_ones(folder: Path) -> None:
    filled(folder, 8).close()
    run = open_reader(folder, max_mappings=3)
    for segment in run.segments():
        assert run.mapping(segment)[0] == segment.start // SIZE + 1
    run.mapping(run.segments()[5])  # used again, so 6 is now the one unused for longest

    run.mapping(run.segments()[0])

    assert mapped_names(folder) == [segment_name(number * SIZE) for number in (0, 5, 7)]
    run.close()
    assert mapped_names(folder) == []


def test_replaced_segment_does_not_return(folder: Path) -> None:
    run = filled(folder, 2)
    old = run.find(SIZE)
    assert old is not None
    run.drop_from(SIZE)
    new = run.create(SIZE)

    run.mapping(old)

    assert old.mapping is None
    assert run.find(SIZE) is new


# --- cutting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 4095, 4096, 4097, 5000, SIZE - 1])
def test_zero_leaves_what_is_before_and_clears_what_is_behind(folder: Path, cut: int) -> None:
    run = filled(folder, 3)

    run.zero(SIZE + cut)

    assert (folder / segment_name(0)).read_bytes() == b"\x01" * SIZE
    assert (folder / segment_name(SIZE)).read_bytes() == b"\x02" * cut + bytes(SIZE - cut)
    assert (folder / segment_name(2 * SIZE)).read_bytes() == b"\x03" * SIZE


def test_zero_reaches_the_far_end_of_a_segment_of_many_chunks(folder: Path) -> None:
    size = (3 << 20) + 4100
    run = open_run(folder, size=size)
    run.create(0)
    run.write(1000, b"kept")
    run.write(2 << 20, b"stale")
    run.write(size - 1, b"!")

    run.zero(1002)

    assert (folder / segment_name(0)).read_bytes() == bytes(1000) + b"ke" + bytes(size - 1002)


def test_drop_before_removes_whole_segments(folder: Path) -> None:
    run = filled(folder, 4)

    assert run.drop_before(2 * SIZE + 1) == [segment_name(0), segment_name(SIZE)]
    assert run.drop_before(100 * SIZE) == [segment_name(2 * SIZE)]

    assert run.starts == (3 * SIZE,)
    assert names(folder) == [segment_name(3 * SIZE)]


def test_drop_from_removes_whole_segments_the_last_first(folder: Path) -> None:
    run = filled(folder, 4)

    assert run.drop_from(SIZE + 1) == [segment_name(3 * SIZE), segment_name(2 * SIZE)]

    assert names(folder) == [segment_name(0), segment_name(SIZE)]
    assert run.end == 2 * SIZE


# --- opening ----------------------------------------------------------------------------------------------------------


def problems_of(folder: Path, *, writable: bool = True) -> tuple[SegmentRun, list[tuple[str, str, int, int]]]:
    run = SegmentWriter(folder, folder.parent / "tmp", SIZE) if writable else SegmentRun(folder, SIZE)
    found: list[LoadProblem] = run.load()
    assert all(problem.detail for problem in found)
    return run, [(Path(p.file).name, p.kind, p.position, p.length) for p in found]


def test_names_that_are_no_segments_are_passed_over(folder: Path) -> None:
    filled(folder, 1).close()
    (folder / "mqstore.profile").write_text("mqstore\n")
    (folder / ("0" * 19)).write_bytes(b"")
    (folder / ("0" * 19 + "٣")).write_bytes(b"")  # a digit, but not ours

    run, problems = problems_of(folder)

    assert problems == []
    assert run.starts == (0,)
    assert len(names(folder)) == 4
    (folder / segment_name(SIZE)).mkdir()
    with pytest.raises(StoreIOError, match="folder"):  # a writer would put a file there
        problems_of(folder)


def test_a_short_last_file_is_read_as_far_as_it_goes_by_a_reader(folder: Path) -> None:
    filled(folder, 2).close()
    os.truncate(folder / segment_name(SIZE), 5000)

    run, problems = problems_of(folder, writable=False)

    assert problems == [(segment_name(SIZE), "segment_size", SIZE + 5000, SIZE - 5000)]
    assert run.last is not None
    assert run.last.length == 5000
    assert run.mapping(run.last)[:] == b"\x02" * 5000
    assert os.path.getsize(folder / segment_name(SIZE)) == 5000


def test_empty_last_file_is_removed_by_a_writer_only(folder: Path) -> None:
    filled(folder, 2).close()
    (folder / segment_name(2 * SIZE)).touch()
    expected = [(segment_name(2 * SIZE), "empty_segment", 2 * SIZE, 0)]

    reader, problems = problems_of(folder, writable=False)
    assert problems == expected
    assert reader.end == 2 * SIZE
    assert len(names(folder)) == 3

    writer, problems = problems_of(folder)
    assert problems == expected
    assert writer.end == 2 * SIZE
    assert names(folder) == [segment_name(0), segment_name(SIZE)]


def test_missing_segments_are_reported_as_one_range(folder: Path) -> None:
    filled(folder, 5).close()
    for number in (1, 2):
        os.unlink(folder / segment_name(number * SIZE))

    run, problems = problems_of(folder)

    assert problems == [(segment_name(SIZE), "missing_segment", SIZE, 2 * SIZE)]
    assert run.find(SIZE) is None
    assert run.find(2 * SIZE) is None
    assert run.starts == (0, 3 * SIZE, 4 * SIZE)
    run.sync(0, run.end)


def test_misplaced_names_are_reported_and_ignored(folder: Path) -> None:
    filled(folder, 1).close()
    for start in (SIZE + 1, 10**20 - 10**20 % SIZE - SIZE):
        (folder / segment_name(start)).write_bytes(bytes(SIZE))

    run, problems = problems_of(folder)

    assert [(kind, length) for _, kind, _, length in problems] == [("segment_name", 0)] * 2
    assert run.starts == (0,)


# --- readers beside a writer ------------------------------------------------------------------------------------------


def test_a_reader_sees_a_mended_segment_in_full(folder: Path) -> None:
    filled(folder, 2).close()
    os.truncate(folder / segment_name(SIZE), 10)
    reader = open_reader(folder)
    open_run(folder)

    assert reader.refresh() is True

    assert reader.last is not None
    assert len(reader.mapping(reader.last)) == SIZE


@pytest.mark.parametrize("how", ["mapping", "call"])
@pytest.mark.parametrize("synced", [False, True])
def test_data_end_is_never_too_low(tmp_path: Path, how: str, synced: bool) -> None:
    """Bytes that are in memory only count, be they stored behind blocks that were never written to."""
    size = 1 << 20
    run = SegmentWriter(tmp_path / "log", tmp_path / "tmp", size)
    segment = run.create(0)
    assert 0 <= run.data_end(segment, 0) <= size
    for position in (0, 100, 5 * 4096 + 1, 700_000, size - 1):
        if how == "mapping":
            run.mapping(segment)[position] = 1
        else:
            run.write(position, b"\x01")
        if synced:
            run.sync(position, position + 1)
        for start in (0, position // 2, position):
            assert position < run.data_end(segment, start) <= size
    assert run.data_end(segment, size) == size


def test_zeros_that_were_never_written_are_not_read(tmp_path: Path) -> None:
    """They may be most of a segment, and would fill as much memory."""
    run = SegmentWriter(tmp_path / "log", tmp_path / "tmp", 1 << 20)
    segment = run.create(0)
    run.write(0, b"x" * 10_000)
    run.sync(0, 10_000)
    end = run.data_end(segment, 0)
    with open(segment.path, "rb") as file:
        if os.lseek(file.fileno(), 0, os.SEEK_HOLE) < 1 << 20:  # a file system that tells
            assert end in (12_288, 1 << 20)  # the latter for one that is not believed
        assert data_end(file.fileno(), 5000, 6000) == 6000
        with patch.object(system, "_HOLES_KNOWN", ()):
            assert data_end(file.fileno(), 0, 1 << 20) == 1 << 20
    assert data_end(-1, 5, 100) == 100


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has tmpfs")
def test_tmpfs_is_asked_for_its_holes(tmp_path: Path) -> None:
    """When it is full, reading a hole by a mapping ends the process."""
    with small_disk(tmp_path / "disk", 1 << 20, needs_mount=True) as disk, open(disk / "file", "xb") as file:
        file.truncate(1 << 19)
        for position in (0, 5 * 4096, 9 * 4096):
            os.pwrite(file.fileno(), b"x", position)
            assert data_end(file.fileno(), 0, 1 << 19) == position + 4096
        assert data_end(file.fileno(), 6 * 4096, 8 * 4096) == 6 * 4096


# --- second names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 100])
def test_a_file_with_a_second_name_is_copied_before_it_is_cut(folder: Path, more: int) -> None:
    filled(folder, 2).close()
    path, kept = folder / segment_name(0), folder.parent / "kept"
    with open(path, "ab") as file:
        file.write(b"x" * more)  # surplus is nobody's, and stays
    os.chmod(path, 0o640)
    os.link(path, kept)
    before, times = kept.read_bytes(), kept.stat().st_mtime_ns

    run = open_run(folder, fs=(fs := FaultyFileSystem()))
    segment = run.find(0)
    assert segment is not None
    held = run.mapping(segment)
    run.own(2)
    run.zero(2)

    assert bytes(run.mapping(segment)[:SIZE]) == path.read_bytes()[:SIZE] == b"\1\1" + bytes(SIZE - 2)
    assert bytes(held[:SIZE]) == b"\1" * SIZE
    assert (kept.read_bytes(), kept.stat().st_mtime_ns) == (before, times)
    assert (path.stat().st_nlink, path.stat().st_size, path.stat().st_mode & 0o777) == (1, SIZE + more, 0o640)
    assert names(folder.parent / "tmp") == []
    identity = path.stat().st_ino
    done = [call.operation for call in fs.changes()]
    assert done.index("sync_directory", done.index("replace")) < len(done) - done[::-1].index("pwrite")
    run.own(2)
    run.own(5 * SIZE)  # where there is none
    assert path.stat().st_ino == identity


def test_no_room_for_a_copy_of_its_own_changes_nothing(folder: Path) -> None:
    filled(folder, 1).close()
    os.link(folder / segment_name(0), folder.parent / "kept")
    fs = FaultyFileSystem()
    run = open_run(folder, fs=fs)
    for operation in ("truncate_sparse", "pwrite", "replace"):
        fs.fail(operation, errno.ENOSPC)
        with pytest.raises(StoreFullError):
            run.own(2)
        assert (folder.parent / "kept").stat().st_nlink == 2
        assert names(folder.parent / "tmp") == []
    run.own(2)
    assert (folder / segment_name(0)).stat().st_nlink == 1


class _Listing(FileSystem):
    """A file system whose listings of a folder are not of one moment."""

    def __init__(self, *starts: int) -> None:
        super().__init__()
        self._starts = starts

    def scandir_files(self, path: StrPath, *, own: bool = False) -> list[tuple[str, int]]:
        return [(segment_name(start * SIZE), SIZE) for start in self._starts]


@pytest.mark.parametrize(
    ("there", "listed", "found", "missing"),
    [
        pytest.param([3, 4], [0, 3, 4], [3, 4], [], id="the front was dropped meanwhile"),
        pytest.param([0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3], [], id="one came meanwhile"),
        pytest.param([0, 1, 2, 3, 4], [0, 1, 4], [0, 1, 2, 3, 4], [], id="two came meanwhile"),
        pytest.param([0, 1, 3], [0, 1, 3], [0, 1, 3], [2], id="a hole in the middle"),
        pytest.param([1, 4], [0, 1, 4], [1, 4], [2], id="a hole behind a front that was dropped"),
    ],
)
def test_reader_distinguishes_moving_front_and_hole(
    folder: Path, there: list[int], listed: list[int], found: list[int], missing: list[int]
) -> None:
    folder.mkdir()
    for start in there:
        (folder / segment_name(start * SIZE)).write_bytes(bytes(SIZE))
    run = SegmentRun(folder, SIZE, fs=_Listing(*listed))

    problems = run.load()

    assert [start // SIZE for start in run.starts] == found
    assert [(problem.kind, problem.position // SIZE) for problem in problems] == [
        ("missing_segment", start) for start in missing
    ]


def test_first_bytes_are_kept_once_and_up_to_a_limit(folder: Path) -> None:
    """They are dropped with the list of segments, since another segment may get the same place."""
    filled(folder, 4)
    fs = FaultyFileSystem()
    reader = SegmentRun(folder, SIZE, fs=fs)
    reader.may_keep = 2048
    reader.load()
    heads = [(folder / segment_name(start)).read_bytes()[:1024] for start in (0, SIZE)]
    for file in folder.iterdir():
        file.write_bytes(b"new" + file.read_bytes()[3:])

    assert [reader.head(segment) for segment in reader.segments()] == [*heads, b"", b""]
    assert reader.head(reader.segments()[0]) == b""
    reader.load()
    assert reader.head(reader.segments()[0])[:3] == b"new"
    fs.fail("pread", errno.EIO)
    reader.load()  # a later read reports the damage
    assert (len(reader.segments()), reader.unreadable, reader.head(reader.segments()[0])) == (4, {}, b"")
