"""The timer's rules of a put, and its files: bytes against the tables (delivery#timer-files), damage, full disks."""

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
from hypothesis import given
from hypothesis import strategies as st

from mqstore.broker.delay import timercheck
from mqstore.broker.delay.route import WINDOW_MS, delay_route, due_of, placement, slot_of
from mqstore.broker.delay.timercheck import JavaProgress, Progress, TimerCheck
from mqstore.broker.delay.timerfiles import (
    CANCELS,
    NOWHERE,
    UNIT_BYTES,
    WAITS,
    WHEEL_SLOTS,
    Slot,
    TimerFilesDamaged,
    TimerLog,
    TimerUnit,
    TimerWheel,
    decode_unit,
    encode_unit,
)
from mqstore.broker.routing.uniquekey import new_unique_key
from mqstore.errors import FlushFailedError, InvalidMessageError, StoreIOError
from mqstore.files.filesystem import REAL, FileSystem
from tests.broker.support import START_MS
from tests.broker.timersupport import DAY, HOUR, TIMER_TOPIC, S, Timers
from tests.faults import FaultyFileSystem

UNIT = TimerUnit(1040, WAITS | CANCELS, 1_700_000_000_000, 172_800_000, 67_108_864, 250, -1_008_770_331)
SEGMENT = 4 * 52 + 16
"""Room for four units and what must be left."""
P = 1000
NOW, MAX = START_MS, 366 * DAY


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


# --- rules of a put ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("properties", "wait_ms", "slot_ms"),
    [
        ({"TIMER_DELAY_SEC": "5"}, 5000, 4000),
        ({"TIMER_DELAY_MS": "5001"}, 5001, 5000),
        ({"TIMER_DELAY_MS": "6000"}, 6000, 5000),
        ({"TIMER_DELAY_MS": "+1"}, 1, 0),
        ({"TIMER_DELIVER_MS": str(NOW + 1234)}, 1234, 1000),
        ({"TIMER_DELIVER_MS": str(NOW + MAX)}, MAX, MAX - 1000),
        # precedence: seconds, then milliseconds, then the moment
        ({"TIMER_DELAY_SEC": "3", "TIMER_DELAY_MS": "9000", "TIMER_DELIVER_MS": str(NOW + 50_000)}, 3000, 2000),
        ({"TIMER_DELAY_MS": "9000", "TIMER_DELIVER_MS": str(NOW + 50_000)}, 9000, 8000),
        # no level, so the timer's turn
        ({"DELAY": "x", "TIMER_DELAY_SEC": "5"}, 5000, 4000),
    ],
)
def test_a_message_with_a_moment_ahead_goes_to_the_timer_topic(
    properties: dict[str, str], wait_ms: int, slot_ms: int
) -> None:
    given_too = {"TAGS": "a", "UNIQ_KEY": "u", "mine": "x"}
    routed = delay_route("orders", 3, {**given_too, **properties}, lambda: NOW, levels=18, max_delay_ms=MAX)
    assert routed is not None
    topic, queue_id, stored = routed
    assert (topic, queue_id) == ("rmq_sys_wheel_timer", 0)
    level = {name: value for name, value in properties.items() if name == "DELAY"}
    times = {"TIMER_DELIVER_MS": str(NOW + wait_ms), "TIMER_OUT_MS": str(NOW + slot_ms)}
    assert stored == {**given_too, **level, **times, "REAL_TOPIC": "orders", "REAL_QID": "3"}


@pytest.mark.parametrize(
    ("properties", "due_ms"),
    [
        ({"TIMER_DELIVER_MS": "4001"}, 4001),
        ({"TIMER_DELIVER_MS": "5000"}, 5000),
        # of a Java broker with a finer precision
        ({"TIMER_OUT_MS": "4300"}, 5000),
        ({"TIMER_OUT_MS": "4300", "TIMER_DELIVER_MS": "4400"}, 4400),
        # a record of an earlier version or of a Java broker, which may name another moment or none that can be
        ({}, 5000),
        ({"TIMER_DELAY_SEC": "3", "TIMER_DELIVER_MS": "4200"}, 5000),
        ({"TIMER_DELAY_MS": "300", "TIMER_DELIVER_MS": "4200"}, 5000),
        ({"TIMER_DELIVER_MS": "4000"}, 5000),
        ({"TIMER_DELIVER_MS": "5001"}, 5000),
        ({"TIMER_DELIVER_MS": "soon"}, 5000),
    ],
)
def test_message_is_due_at_its_record_time_or_slot_end(properties: dict[str, str], due_ms: int) -> None:
    assert due_of({"TIMER_OUT_MS": "4000", **properties}) == due_ms


@pytest.mark.parametrize(
    ("topic", "properties"),
    [
        ("orders", {}),
        ("orders", {"TIMER_DELAY_SEC": "5", "TIMER_OUT_MS": "1"}),
        (TIMER_TOPIC, {"TIMER_DELAY_SEC": "5"}),
        ("orders", {"TIMER_DELAY_SEC": "0"}),
        ("orders", {"TIMER_DELIVER_MS": str(NOW)}),
        # the first that is there counts, even if it says "now"
        ("orders", {"TIMER_DELAY_SEC": "0", "TIMER_DELIVER_MS": str(NOW + DAY)}),
    ],
)
def test_a_message_that_is_not_to_wait_goes_where_it_went(topic: str, properties: dict[str, str]) -> None:
    assert delay_route(topic, 0, properties, lambda: NOW, levels=18, max_delay_ms=MAX) is None


NO_TIMES = {
    "TIMER_DELAY_SEC": ["x", "", "1.5", "1_0", " 1", "1\n", "٣", "nan", "-1"],
    "TIMER_DELAY_MS": ["-1", "9" * 400, str(MAX + 1)],
    "TIMER_DELIVER_MS": ["-1", str(NOW + MAX + 1)],
}


@pytest.mark.parametrize(
    "properties",
    [
        *({name: value} for name, values in NO_TIMES.items() for value in values),
        {"TIMER_DELAY_SEC": "x", "TIMER_DELAY_MS": "5"},
        {"TIMER_DELIVER_MS": str(NOW), "TIMER_DEL_UNIQKEY": "orders+u"},
    ],
)
def test_a_moment_that_cannot_be_is_refused(properties: dict[str, str]) -> None:
    with pytest.raises(InvalidMessageError) as caught:
        delay_route("orders", 0, properties, lambda: NOW, levels=18, max_delay_ms=MAX)
    assert caught.value.field == "properties"


@given(stored=st.integers(NOW, NOW + 10 * DAY), wait=st.integers(1, MAX))
def test_hops_lead_to_the_moment_and_none_is_longer_than_the_window(stored: int, wait: int) -> None:
    out = slot_of(stored + wait)
    hops = 0
    at = stored
    while True:
        slot, rolls = placement(at, out)
        assert slot <= out
        assert slot - at <= WINDOW_MS
        assert (slot == out) == (not rolls)
        if not rolls:
            break
        assert slot - at >= WINDOW_MS // 2 - S
        at = slot + S  # a slot is read when it is over
        hops += 1
    assert hops <= 366


def test_unique_keys_do_not_repeat_in_a_forked_child() -> None:
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(there, " ".join(new_unique_key() for _ in range(50)).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(there)
    theirs = os.read(here, 10_000).decode().split()
    os.close(here)
    mine = [new_unique_key() for _ in range(50)]
    assert len({*theirs, *mine}) == 100
    assert {key[2:18] for key in theirs}.isdisjoint({key[2:18] for key in mine})


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
    with pytest.raises(TimerFilesDamaged):  # nor at another position
        decode_unit(104, data)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TimerFilesDamaged):
            decode_unit(52, bytes(changed))


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


@pytest.mark.parametrize("seed", range(6))
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
    assert [unit["physical_offset"].tolist() for _, unit in log.scan(2 * SEGMENT, verified=True)] == [
        [UNIT.physical_offset]
    ]
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
    again = reloaded(tmp_path, 0, log.end)
    assert [again.unit(position) for position in positions] == [*units(4), *[UNIT] * 20]


# --- the wheel --------------------------------------------------------------------------------------------------------


def test_a_slot_has_the_bytes_of_the_table_at_its_place(tmp_path: Path) -> None:
    wheel = empty_wheel(tmp_path)
    wheel.put(1_700_000_001_000, Slot(52, 4160, 7))
    wheel.write()
    wheel.close()
    place = 1_700_000_001 % 1_209_600 * 32
    with (tmp_path / "timerwheel").open("rb") as file:
        file.seek(place)
        assert file.read(32) == struct.pack(">qqqii", 1_700_000_001, 52, 4160, 7, 0)


@pytest.mark.parametrize("seed", range(4))
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


# --- the files of a store ---------------------------------------------------------------------------------------------


def test_unit_holds_its_slot_for_other_programs(timers: Timers) -> None:
    """RocketMQ finds the slot as writeTime + delay, a multiple of its precision."""
    timers.clock.advance(250)
    for wait_ms in (1, 200, 749, 750, 751, 3 * DAY):
        timers.put("", wait_ms)
    timers.pass_ms(0)
    timers.close()
    data = (timers.path / "timerlog" / f"{0:020d}").read_bytes()
    slots = []
    for at in range(0, 6 * 52, 52):
        write_ms, delay_ms = struct.unpack_from(">qi", data, at + 16)
        slots.append(write_ms + delay_ms - START_MS)
    assert slots == [0, 0, 0, 0, S, 2 * DAY]


def test_logs_are_synced_before_the_checkpoint(timers: Timers, monkeypatch: pytest.MonkeyPatch) -> None:
    save, saves = TimerCheck.save, []
    timers.reopen(fs := FaultyFileSystem())
    log = timers.path / "timerlog" / f"{0:020d}"

    def saved(check: TimerCheck, progress: Progress, now_ms: int) -> None:
        assert timers.parts.store.stats().flush_lag_bytes == 0
        written = log.read_bytes().rstrip(b"\0")
        assert progress.log_end - 52 < len(written) <= progress.log_end
        kinds = [call.operation for call in fs.changes("timerlog")][::-1]
        assert "pwrite" not in kinds[: kinds.index("fdatasync")]
        saves.append(progress)
        save(check, progress, now_ms)

    monkeypatch.setattr(TimerCheck, "save", saved)
    for n in range(10):
        timers.put(str(n), 1500 + n * 900)
        timers.pass_ms(700)
    timers.pass_ms(20 * S)
    assert len(saves) > 5


def test_java_timer_log_shows_a_message(timers: Timers) -> None:
    """It rolls two days from when it looks: one that it took up three hours after its put, having been down, was taken
    for rolled when nothing stood for it any more. And what it had delivered in its last minute came again."""
    timers.put("far", 5 * DAY)
    timers.pass_ms(100 * S)
    timers.put("near", 2 * DAY - 10 * S)
    timers.pass_ms(S)
    timers.close()
    log = timers.path / "timerlog" / f"{0:020d}"
    far, near = (decode_unit(at, log.read_bytes()[at : at + 52]) for at in (0, 52))
    late = far._replace(write_ms=far.write_ms + 3 * HOUR)
    with log.open("r+b") as file:
        file.write(encode_unit(0, late)[:44] + bytes(8) + encode_unit(52, near)[:44] + bytes(8))
    check = timers.path / "config" / "timercheck"
    read_ms = far.slot_ms + 120 * S
    assert read_ms - 60 * S < near.slot_ms < read_ms
    with check.open("r+b") as file:  # which leaves what we had written there
        file.write(struct.pack(">7q", read_ms, 104, 2, 2, 0, read_ms, 9))
    timers.clock.advance(read_ms - timers.clock.now_ms())
    for leave in (timers.kill, timers.close):  # at once, before anything is delivered
        timers.open()
        leave()
    timers.open()
    timers.pass_ms(6 * DAY)
    assert timers.texts() == ["far"]
    assert not log.exists(), "what the Java broker had placed is placed here by now"
