"""Where a queue begins and ends, as its files have it: found with few reads, and the same as a look at every unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.clock import SYSTEM_CLOCK
from mqstore.files.filesystem import REAL, FileSystem, StrPath
from mqstore.layout.consumequeue import UNIT, UNIT_BYTES, VOID_UNIT
from mqstore.log.derived.consumequeue import ConsumeQueue, QueueTable
from mqstore.log.directory.manifest import sizes_found
from mqstore.log.directory.store_files import StoreParts
from mqstore.options import StoreConfig

RECORD = 100
"""Bytes of every record: unit i of a queue points at i * RECORD."""


@contextmanager
def queue_of(
    root: Path, units: Sequence[bytes], per_file: int, first_file: int = 0
) -> Iterator[tuple[QueueTable, ConsumeQueue]]:
    """A queue whose files are full-length and hold these units from the first file on, loaded with no message known,
    and the table that it is in."""
    folder = root / "consumequeue" / "t" / "0"
    folder.mkdir(parents=True)
    data = b"".join(units)
    size = per_file * UNIT_BYTES
    for number in range(max(1, -(-len(data) // size))):
        piece = data[number * size : (number + 1) * size]
        (folder / f"{(first_file + number) * size:020d}").write_bytes(piece.ljust(size, b"\0"))
    parts = parts_of(root, per_file)
    parts.queue_table.load(exact=False)
    queue = parts.queue_table.get("t", 0)
    assert queue is not None
    yield parts.queue_table, queue
    parts.close()


def parts_of(root: Path, per_file: int, fs: FileSystem = REAL) -> StoreParts:
    """The files of a store that has nothing but queues."""
    config = StoreConfig(consumequeue_units=per_file)
    return StoreParts(root, sizes_found(root, "mqstore", config), config, fs, SYSTEM_CLOCK, writable=False)


def live(slot: int) -> bytes:
    return UNIT.pack(slot * RECORD, RECORD, 7)


@pytest.mark.parametrize("per_file", [1, 2, 203, 204, 205, 408, 1000])
def test_the_end_is_behind_the_last_unit_in_use(tmp_path: Path, per_file: int) -> None:
    edges = {0, 1, 2, 203, 204, 205, 407, 408, 409, 999, per_file - 1, per_file, per_file + 1, 2 * per_file}
    for number, count in enumerate(sorted(edges)):
        with queue_of(tmp_path / str(number), [live(i) for i in range(count)], per_file) as (_, queue):
            assert queue.max_offset == count


def test_the_last_message_is_found_before_void_and_empty_units(tmp_path: Path) -> None:
    units = [live(i) for i in range(100)] + [VOID_UNIT, bytes(UNIT_BYTES)] * 40 + [VOID_UNIT]
    with queue_of(tmp_path / "a", units, 64) as (_, queue):
        assert queue.max_offset == 181
        assert queue.last_message() == (99 * RECORD, RECORD, 99)
    with queue_of(tmp_path / "b", [VOID_UNIT] * 3, 64) as (_, queue):
        assert queue.last_message() == (-1, 0, -1)


@pytest.mark.parametrize("may_keep", [0, 1 << 20])
def test_a_large_file_is_not_read_to_find_its_end(tmp_path: Path, may_keep: int) -> None:
    read: list[int] = []

    class Counting(FileSystem):
        def pread(self, fd: int, length: int, position: int) -> bytes:
            read.append(length)
            return super().pread(fd, length, position)

    with queue_of(tmp_path, [live(i) for i in range(123_456)], 300_000):
        table = parts_of(tmp_path, 300_000, Counting()).queue_table
        table.may_keep = may_keep
        table.load(exact=False)
        assert [queue.max_offset for queue in table] == [123_456]
    assert len(read) <= 13
    assert max(read) <= 4096


UNITS = st.lists(st.booleans(), max_size=40)


@given(is_live=UNITS, per_file=st.integers(1, 12), first_file=st.integers(0, 2), gone=st.integers(0, 60))
def test_the_front_is_the_first_message_left(is_live: list[bool], per_file: int, first_file: int, gone: int) -> None:
    """Void units stand between the messages, files in front are deleted, and so is the log before message `gone`."""
    base = first_file * per_file
    units = [live(base + i) if here else VOID_UNIT for i, here in enumerate(is_live)]
    with TemporaryDirectory() as folder, queue_of(Path(folder), units, per_file, first_file) as (_, queue):
        queue.correct_min(gone * RECORD)
        end = base + len(units)
        expected = next((base + i for i, here in enumerate(is_live) if here and base + i >= gone), end)
        assert (queue.min_offset, queue.max_offset) == (expected, end)


@pytest.mark.parametrize("at", ["load", "refresh"])
def test_a_queue_whose_files_go_meanwhile_is_listed_again(tmp_path: Path, at: str) -> None:
    """Listed files that are gone read as zeros: the queue seemed empty for as long as the reader was open."""
    folder, size = tmp_path / "consumequeue" / "t" / "0", 8 * UNIT_BYTES

    def write(number: int, count: int) -> None:
        units = b"".join(live(slot) for slot in range(number * 8, number * 8 + count))
        (folder / f"{number * size:020d}").write_bytes(units.ljust(size, b"\0"))

    class Overtaken(FileSystem):
        """Between the first listing and the first look at what it shows, retention and dispatch go on."""

        listings = 0

        def scandir_files(self, path: StrPath, *, own: bool = False) -> list[tuple[str, int]]:
            files = super().scandir_files(path, own=own)
            self.listings += 1
            if self.listings == (1 if at == "load" else 2):
                write(2, 5)
                for number in (0, 1):
                    (folder / f"{number * size:020d}").unlink()
            return files

    folder.mkdir(parents=True)
    write(0, 0 if at == "refresh" else 8)
    write(1, 0)
    fs = Overtaken()
    table = parts_of(tmp_path, size // UNIT_BYTES, fs).queue_table
    table.load(exact=False)
    queue = table.get("t", 0)
    assert queue is not None
    if at == "refresh":
        fs.scandir_files(folder)
        queue.refresh()

    assert (queue.first_offset(), queue.max_offset) == (16, 21)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("per_file", [1, 203, 204, 205, 206, 1000])
def test_keeping_units_changes_no_end(tmp_path: Path, per_file: int, exact: bool) -> None:
    """A hole from unit 3 on, as a crash leaves it, hides units only from the search that does not read every unit."""
    for number, count in enumerate({*range(5), *range(202, 208), 999, per_file - 1, per_file}):
        units = [live(slot) for slot in range(count)]
        units[3 : count - 1 if exact else 3] = [bytes(UNIT_BYTES)] * max(0, count - 4 if exact else 0)
        with queue_of(tmp_path / str(number), units, per_file) as (table, queue):
            table.may_keep = 1 << 20
            table.load(exact=exact)
            assert queue.max_offset == count
            for many in (1, 3):
                assert [queue.kept(slot, many) for slot in range(count)] == [
                    b"".join(units[slot : slot + many]).ljust(many * UNIT_BYTES, b"\0") for slot in range(count)
                ]


def test_kept_units_are_those_of_the_last_load(tmp_path: Path) -> None:
    with queue_of(tmp_path, [live(slot) for slot in range(8)], 1000) as (table, queue):
        file = tmp_path / "consumequeue" / "t" / "0" / queue.list_files()[0]
        old, new = live(5), live(6)
        table.may_keep = 1 << 20
        queue.load(exact=False)
        file.write_bytes(file.read_bytes().replace(old, new))
        assert (queue.kept(5, 1), queue.read(5, 1), queue.kept(7, 2)) == (old, new, live(7) + bytes(UNIT_BYTES))
        queue.load(exact=False)
        assert queue.kept(5, 1) == new
        file.write_bytes(b"".join(map(live, range(1000))))
        queue.load(exact=False)
        assert queue.kept(5, 1) == old


def test_no_more_units_are_kept_than_allowed(tmp_path: Path) -> None:
    folder = tmp_path / "consumequeue" / "t"
    for queue_id in range(4):
        (folder / str(queue_id)).mkdir(parents=True)
        (folder / str(queue_id) / f"{0:020d}").write_bytes(b"".join(map(live, range(10))).ljust(16 * UNIT_BYTES, b"\0"))
    table = parts_of(tmp_path, 16).queue_table
    table.may_keep = 27 * UNIT_BYTES
    table.load(exact=False)
    for file in folder.glob("*/*"):
        file.write_bytes(bytes(16 * UNIT_BYTES))

    assert [any(queue.kept(0, 1)) for queue in table] == [True, True, False, False]
