"""The timer's files: bytes against the tables (delivery#timer-files), and what survives damage and full disks."""

from __future__ import annotations

import errno
import itertools
import os
import random
import struct
from pathlib import Path

import crc32c
import numpy as np
import pytest

from mqstore.broker.delay import timercheck
from mqstore.broker.delay.timercheck import JavaProgress, Progress, TimerCheck
from mqstore.broker.delay.timerfiles import (
    CANCELS,
    NOWHERE,
    UNIT_BYTES,
    WAITS,
    WHEEL_BYTES,
    WHEEL_SLOTS,
    Slot,
    TimerFilesDamaged,
    TimerLog,
    TimerUnit,
    TimerWheel,
    decode_unit,
    encode_unit,
)
from mqstore.errors import FlushFailedError, StoreIOError
from mqstore.files.filesystem import REAL, FileSystem
from tests.faults import FaultyFileSystem

UNIT = TimerUnit(1040, WAITS | CANCELS, 1_700_000_000_000, 172_800_000, 67_108_864, 250, -1_008_770_331)
SEGMENT = 4 * 52 + 16
"""Room for four units and what must be left."""
P = 1000
DAY = 86_400_000


def new_log(folder: Path, fs: FileSystem = REAL, segment_bytes: int = SEGMENT) -> TimerLog:
    return TimerLog(folder / "timerlog", folder / "tmp", segment_bytes, fs, 0o600)


def reloaded(folder: Path, low: int, end: int) -> TimerLog:
    log = new_log(folder)
    log.load(low, end)
    return log


def new_wheel(folder: Path, fs: FileSystem = REAL) -> TimerWheel:
    return TimerWheel(folder / "timerwheel", folder / "tmp", fs, 0o600)


def empty_wheel(folder: Path, fs: FileSystem = REAL) -> TimerWheel:
    wheel = new_wheel(folder, fs)
    wheel.make(np.empty(0, np.int64), np.empty(0, np.int64))
    return wheel


def units(count: int) -> list[TimerUnit]:
    return [UNIT._replace(previous=NOWHERE, physical_offset=1000 * i) for i in range(count)]


def filled(folder: Path) -> TimerLog:
    """A log of three segments, all written."""
    log = new_log(folder)
    for unit in units(12):
        log.append(unit)
    log.write()
    return log


def all_of(log: TimerLog, low: int = 0) -> list[tuple[int, int]]:
    """(position, physical offset) of every unit."""
    return [
        pair
        for positions, found in log.scan(low, verified=True)
        for pair in zip(positions.tolist(), found["physical_offset"].tolist(), strict=True)
    ]


# --- units ------------------------------------------------------------------------------------------------------------


def test_a_unit_has_the_bytes_of_the_table() -> None:
    data = encode_unit(2080, UNIT)
    front = (
        "00000034"  # size 52
        "0000000000000410"  # prevPos 1040
        "00000005"  # magic 1 + 4
        "0000018bcfe56800"  # writeTime 1 700 000 000 000
        "0a4cb800"  # delay 172 800 000
        "0000000004000000"  # offsetPy 67 108 864
        "000000fa"  # sizePy 250
        "c3df62e5"  # hash
    )
    assert data[:44].hex() == front
    assert data[44:] == struct.pack(">q", crc32c.crc32c(bytes.fromhex(front), 2080))
    assert len(data) == UNIT_BYTES == 52
    assert decode_unit(2080, data) == UNIT
    assert UNIT.slot_ms == 1_700_172_800_000


def test_a_unit_with_any_bit_flipped_is_no_unit() -> None:
    data = encode_unit(52, UNIT)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TimerFilesDamaged):
            decode_unit(52, bytes(changed))


def test_a_unit_is_no_unit_at_another_position() -> None:
    with pytest.raises(TimerFilesDamaged):
        decode_unit(104, encode_unit(52, UNIT))


# --- the log ----------------------------------------------------------------------------------------------------------


def test_units_that_do_not_fit_go_to_the_next_segment_behind_a_blank(tmp_path: Path) -> None:
    log = new_log(tmp_path, segment_bytes=SEGMENT + 20)
    positions = [log.append(unit) for unit in units(9)]
    size = SEGMENT + 20
    assert positions == [0, 52, 104, 156, size, size + 52, size + 104, size + 156, 2 * size]
    log.write()
    first = (tmp_path / "timerlog" / f"{0:020d}").read_bytes()
    assert first[208:224] == struct.pack(">iqI", 36, 0, 0xCBD43194)
    assert len(first) == size
    assert first[224:] == bytes(20)
    assert sorted(path.name for path in (tmp_path / "timerlog").iterdir()) == [f"{n * size:020d}" for n in range(3)]


@pytest.mark.parametrize("written", [0, 3, 4, 5, 11])
def test_units_are_read_alike_before_and_after_they_are_written(tmp_path: Path, written: int) -> None:
    log = new_log(tmp_path)
    many = units(11)
    positions = [log.append(unit) for unit in many[:written]]
    log.write()
    positions += [log.append(unit) for unit in many[written:]]
    assert [log.unit(position) for position in positions] == many
    log.write()
    assert [log.unit(position) for position in positions] == many
    again = reloaded(tmp_path, 0, log.end)
    assert [again.unit(position) for position in positions] == many


@pytest.mark.parametrize("seed", range(20))
def test_the_unit_of_a_record_is_found_wherever_it_lies(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    log = new_log(tmp_path, segment_bytes=SEGMENT + rng.randrange(0, 60, 4))
    records = sorted(rng.sample(range(1000), 40))
    positions = {}
    for record in records:
        if rng.random() < 0.1:
            log.restart()
            positions.clear()
        elif rng.random() < 0.3:
            log.write()
        positions[record] = log.append(UNIT._replace(physical_offset=record))
    low = rng.choice([*positions.values(), *(at + UNIT_BYTES for at in positions.values()), log.end])
    for wanted in range(-1, 1001):
        behind = rng.choice((sum(record >= wanted for record in positions), rng.randrange(-2, 50)))
        position = positions.get(wanted, -1)
        expected = (position, UNIT._replace(physical_offset=wanted)) if position >= low else None
        assert log.find(wanted, low, behind) == expected
    log.close()


@pytest.mark.parametrize("end", [0, SEGMENT, SEGMENT + 52, 3 * SEGMENT])
def test_the_log_goes_on_at_any_promised_end(tmp_path: Path, end: int) -> None:
    filled(tmp_path)
    again = reloaded(tmp_path, end, end)
    position = again.append(units(1)[0])
    again.write()
    assert all_of(reloaded(tmp_path, end, again.end), end) == [(position, 0)]


@pytest.mark.parametrize("harm", ["missing", "missing first", "short"])
def test_a_log_that_lacks_a_part_is_damaged(tmp_path: Path, harm: str) -> None:
    log = filled(tmp_path)
    path = tmp_path / "timerlog" / f"{0 if harm == 'missing first' else SEGMENT:020d}"
    if harm == "short":
        os.truncate(path, 100)
    else:
        path.unlink()
    with pytest.raises(TimerFilesDamaged):
        reloaded(tmp_path, 0, log.end)
    # What is not needed may be missing.
    assert len(all_of(reloaded(tmp_path, 2 * SEGMENT, log.end), 2 * SEGMENT)) == 4


def test_positions_never_come_back_after_a_restart(tmp_path: Path) -> None:
    log = new_log(tmp_path)
    for unit in units(6):
        log.append(unit)
    log.write()
    log.append(UNIT)
    log.restart()
    assert not list((tmp_path / "timerlog").iterdir())
    assert log.append(UNIT) == 2 * SEGMENT
    log.write()
    assert all_of(log, 2 * SEGMENT) == [(2 * SEGMENT, UNIT.physical_offset)]
    # A log that was never loaded steps over what it finds.
    other = new_log(tmp_path)
    other.restart()
    assert other.end == 3 * SEGMENT


def test_a_failed_sync_is_final(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    log = new_log(tmp_path, fs)
    log.append(UNIT)
    log.write()
    log.append(UNIT)
    fs.fail("fdatasync", errno.EIO, path_part="timerlog")
    with pytest.raises(StoreIOError):
        log.write()
    with pytest.raises(FlushFailedError, match="open it again"):
        log.write()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
@pytest.mark.parametrize("operation", ["open", "sync_directory"])
def test_a_sync_that_finds_no_descriptor_free_is_made_by_the_next_write(
    tmp_path: Path, operation: str, number: int
) -> None:
    """Nothing was synced, so nothing was dropped; the timer did nothing more until the store was opened again."""
    fs = FaultyFileSystem()
    log = new_log(tmp_path, fs)
    positions = [log.append(unit) for unit in units(4)]
    log.write()
    # So many that the first segments are written, and their descriptors given back, before the sync begins.
    positions += [log.append(UNIT) for _ in range(20)]
    if operation == "open":
        written = 6  # each segment but the first is opened to be written to; next are those that the sync opens
        fs.fail("open", number, nth=written, times=None, path_part="timerlog")
    else:
        fs.fail("sync_directory", number, times=None, path_part="timerlog")
    with pytest.raises(StoreIOError):
        log.write()
    assert log.written == positions[3] + UNIT_BYTES
    fs.heal()
    log.write()
    assert [position for position, _ in all_of(reloaded(tmp_path, 0, log.end))] == positions


# --- the wheel --------------------------------------------------------------------------------------------------------


def test_the_wheel_has_its_length_without_the_blocks(tmp_path: Path) -> None:
    wheel = empty_wheel(tmp_path)
    stat = (tmp_path / "timerwheel").stat()
    assert stat.st_size == WHEEL_BYTES == 38_707_200
    assert WHEEL_SLOTS == 1_209_600
    assert stat.st_blocks < 64
    wheel.close()


def test_a_slot_has_the_bytes_of_the_table_at_its_place(tmp_path: Path) -> None:
    wheel = empty_wheel(tmp_path)
    wheel.put(1_700_000_001_000, Slot(52, 4160, 7))
    wheel.write()
    wheel.close()
    place = 1_700_000_001 % 1_209_600 * 32
    with (tmp_path / "timerwheel").open("rb") as file:
        file.seek(place)
        assert file.read(32) == struct.pack(">qqqii", 1_700_000_001, 52, 4160, 7, 0)


def test_a_slot_that_holds_another_time_is_empty(tmp_path: Path) -> None:
    wheel = empty_wheel(tmp_path)
    wheel.put(5 * P, Slot(0, 0, 1))
    wheel.write()
    assert wheel.get(5 * P) == (0, 0, 1)
    assert wheel.get((5 + WHEEL_SLOTS) * P) is None
    assert wheel.get(6 * P) is None
    assert wheel.first((5 + WHEEL_SLOTS) * P, (6 + WHEEL_SLOTS) * P) is None
    wheel.close()


@pytest.mark.parametrize("seed", range(6))
def test_the_wheel_is_a_table_of_slots(tmp_path: Path, seed: int) -> None:
    """Against a dict, over the place where the wheel begins anew."""
    rng = random.Random(seed)
    base = rng.choice((WHEEL_SLOTS - 3000, WHEEL_SLOTS - 1, 1_700_000_000, 2048 * 7)) * P
    model: dict[int, Slot] = {}
    wheel = empty_wheel(tmp_path)
    for step in range(300):
        at = base + rng.choice((rng.randrange(40), rng.randrange(6000), rng.randrange(WHEEL_SLOTS // 2))) * P
        match rng.randrange(4):
            case 0 | 1:
                model[at] = Slot(step, step + 1, step + 2)
                wheel.put(at, model[at])
            case 2:
                assert wheel.get(at) == model.get(at)
            case 3:
                stop = at + rng.randrange(9000) * P
                assert wheel.first(at, stop) == min((t for t in model if at <= t < stop), default=None)
        if not rng.randrange(20):
            wheel.write()
    wheel.write()
    assert {t: wheel.get(t) for t in model} == model
    wheel.close()


@pytest.mark.parametrize("count", [0, 1, 50, 5000])
def test_a_wheel_made_of_units_is_as_if_they_were_put_one_by_one(tmp_path: Path, count: int) -> None:
    rng = random.Random(count)
    base = (WHEEL_SLOTS - 2500) * P
    slots = [base + rng.randrange(4000) * P for _ in range(count)]
    positions = [52 * i for i in range(count)]
    model: dict[int, Slot] = {}
    for slot, position in zip(slots, positions, strict=True):
        first, _, num = model.get(slot, Slot(position, position, 0))
        model[slot] = Slot(first, position, num + 1)
    wheel = empty_wheel(tmp_path)
    wheel.put(base, Slot(1, 2, 3))
    wheel.make(np.array(slots, np.int64), np.array(positions, np.int64))
    found = {t: wheel.get(t) for t in range(base, base + 4000 * P, P)}
    assert {t: slot for t, slot in found.items() if slot is not None} == model
    assert (tmp_path / "timerwheel").stat().st_size == WHEEL_BYTES
    wheel.close()


def test_making_a_wheel_of_a_million_takes_few_writes(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    wheel = new_wheel(tmp_path, fs)
    slots = np.arange(500_000, dtype=np.int64) * P
    wheel.make(np.repeat(slots, 2), np.arange(1_000_000, dtype=np.int64) * 52)
    assert len(fs.changes("timerwheel")) < 300
    assert wheel.get(499_999 * P) == (52 * 999_998, 52 * 999_999, 2)
    wheel.close()


# --- the checkpoint ---------------------------------------------------------------------------------------------------


def progress(n: int) -> Progress:
    return Progress(1_700_000_000_000 + n * P, 52 * n, 100 + n, 26 * n, n % 3, n * 7, n * 11, n - 1)


def new_check(folder: Path, fs: FileSystem = REAL) -> TimerCheck:
    (folder / "config").mkdir(exist_ok=True)
    return TimerCheck(folder / "config" / "timercheck", fs, 0o600)


def test_the_checkpoint_begins_with_what_a_java_broker_reads(tmp_path: Path) -> None:
    check = new_check(tmp_path)
    assert check.load() is None
    check.save(progress(5), 77)
    check.save(progress(6), 78)
    data = (tmp_path / "config" / "timercheck").read_bytes()
    assert len(data) == 4096
    assert struct.unpack_from(">7q", data) == (1_700_000_006_000, 312, 106, 106, 0, 78, 2)
    assert data[56:1024] == bytes(968)


@pytest.mark.parametrize("saves", range(1, 5))
def test_the_last_checkpoint_is_found_again(tmp_path: Path, saves: int) -> None:
    check = new_check(tmp_path)
    for n in range(saves):
        check.save(progress(n), n)
    again = new_check(tmp_path)
    assert again.load() == progress(saves - 1)
    again.save(progress(9), 9)
    assert new_check(tmp_path).load() == progress(9)


@pytest.mark.parametrize("saves", [2, 3])
def test_a_checkpoint_torn_between_sectors_never_says_too_much(tmp_path: Path, saves: int) -> None:
    """The old one, the new one, or what a Java broker would read of the new one: then all is built again."""
    path = tmp_path / "config" / "timercheck"
    check = new_check(tmp_path)
    for n in range(saves):
        check.save(progress(n), n)
    old = path.read_bytes()
    check.save(progress(saves), saves)
    new = path.read_bytes()
    seen = set()
    for kept in itertools.product((False, True), repeat=8):
        path.write_bytes(b"".join((old, new)[k][i * 512 : i * 512 + 512] for i, k in enumerate(kept)))
        found = new_check(tmp_path).load()
        p = progress(saves)
        assert found in (progress(saves - 1), p, JavaProgress(p.read_ms, p.log_end, p.queue_offset))
        seen.add(found)
    assert len(seen) == 3


def test_java_checkpoint_is_recognized(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    page = struct.pack(">7q", 1_700_000_000_000, 5200, 42, 42, 0, 0, 0).ljust(4096, b"\0")
    (tmp_path / "config" / "timercheck").write_bytes(page)
    assert new_check(tmp_path).load() == JavaProgress(1_700_000_000_000, 5200, 42)


def test_checkpoint_of_another_version_counts_partly(tmp_path: Path) -> None:
    """Version 1 counted the units of a slot in another order, so some would have been passed over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timercheck, "_EXTENSION_VERSION", 1)
        new_check(tmp_path).save(progress(5), 5)
    p = progress(5)
    assert new_check(tmp_path).load() == JavaProgress(p.read_ms, p.log_end, p.queue_offset)


@pytest.mark.parametrize("fields", [(2, 0, 0), (0, 52, 0), (0, 0, 1)])
def test_newer_java_state_wins(tmp_path: Path, fields: tuple[int, int, int]) -> None:
    """It writes its 56 bytes and leaves ours: what it had delivered came again, all of it."""
    check = new_check(tmp_path)
    check.save(progress(1), 1)
    check.save(progress(2), 2)
    path = tmp_path / "config" / "timercheck"
    page = bytearray(path.read_bytes())
    p = progress(2)
    java = JavaProgress(p.read_ms + fields[0] * P, p.log_end + fields[1], p.queue_offset + fields[2])
    struct.pack_into(">7q", page, 0, *java, java.queue_offset, 0, 99, 3)
    path.write_bytes(page)
    check = new_check(tmp_path)
    assert check.load() == java
    check.save(progress(7), 7)
    assert new_check(tmp_path).load() == progress(7)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 4096, b"\xff" * 4096, b"\0" * 100], ids=["empty", "zero", "ones", "short"]
)
def test_a_checkpoint_that_says_nothing_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "timercheck").write_bytes(data)
    check = new_check(tmp_path)
    assert check.load() is None
    check.save(progress(1), 1)
    assert new_check(tmp_path).load() == progress(1)


def test_a_checkpoint_is_synced_with_its_names_when_it_is_new(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    check = TimerCheck(tmp_path / "config" / "timercheck", fs, 0o600)
    check.save(progress(1), 1)
    assert [(call.operation, Path(call.path).name) for call in fs.changes()] == [
        ("mkdir", "config"),
        ("sync_directory", tmp_path.name),
        ("create", "timercheck"),
        ("pwrite", "timercheck"),
        ("pwrite", "timercheck"),
        ("fdatasync", "timercheck"),
        ("sync_directory", "config"),
    ]
    before = len(fs.changes())
    check.save(progress(2), 2)
    assert [call.operation for call in fs.changes()[before:]] == ["create", "pwrite", "pwrite", "fdatasync"]


def test_a_checkpoint_that_could_not_be_synced_is_not_tried_again(tmp_path: Path) -> None:
    fs = FaultyFileSystem()
    check = new_check(tmp_path, fs)
    check.save(progress(1), 1)
    fs.fail("fdatasync", errno.EIO)
    with pytest.raises(StoreIOError):
        check.save(progress(2), 2)
    with pytest.raises(FlushFailedError):
        check.save(progress(3), 3)
