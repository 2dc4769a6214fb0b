"""Opening, verifying and recovering damaged stores: format#damage row by row, and format#opening.

Each test makes a sound store, does one kind of damage to its files, and states what open, verify and recover must say
and do. What the store held is known from the receipts of its puts, never from the code under test.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mqstore import SendReceipt, SimulatedClock, StoreConfig
from tests.faults import Crash, FaultyFileSystem, deaths
from tests.log.recovering import checkpoint_of, recover
from tests.log.support import (
    HEADER,
    SEGMENT,
    checkpointed,
    files,
    flip,
    flip_log,
    kill,
    open_in,
    open_store,
    overwrite,
    overwrite_log,
    reboot,
    segment_of,
    units_of,
)

PROFILES = ("mqstore", "rocketmq")
VOID = (0, 0x7FFF_FFFF, 0)
CONFIG = StoreConfig(
    segment_bytes=SEGMENT, consumequeue_units=8, index_slots=16, index_entries=32, clock=SimulatedClock()
)


@dataclass
class Made:
    """A store of a few segments, and what was put into it, in log order."""

    path: Path
    profile: str
    receipts: list[SendReceipt]

    @property
    def end(self) -> int:
        return self.receipts[-1].physical_offset + self.receipts[-1].size

    def segment(self, start: int) -> Path:
        return self.path / "commitlog" / f"{start:020d}"

    def place(self, receipt: SendReceipt) -> tuple[Path, int]:
        """The segment of a record, and where it begins there."""
        return segment_of(self.path, receipt.physical_offset), receipt.physical_offset % SEGMENT

    def last_of(self, segment: int) -> SendReceipt:
        """The last record of a segment."""
        return [r for r in self.receipts if r.physical_offset // SEGMENT == segment][-1]

    def in_segment(self, segment: int) -> list[SendReceipt]:
        return [r for r in self.receipts if r.physical_offset // SEGMENT == segment]

    def open(self, mode: str = "rw") -> Any:
        return open_in(mode, self.path, profile=self.profile, config=CONFIG)

    def recover(self, *, checks: Any = None, **options: Any) -> Any:
        return recover(self.path, config=CONFIG, checks=checks, **options)


def body(n: int) -> bytes:
    return b"message %03d " % n * (1 + n % 9)


def make(path: Path, profile: str = "mqstore", *, count: int = 80, crash: bool = False) -> Made:
    """Two topics, three queues, keys, several segments. With `crash` the machine goes down behind a flush."""
    store = open_store(path, profile=profile)  # type: ignore[arg-type]
    receipts = []
    for n in range(count):
        topic, queue_id = (("orders", n % 2), ("clicks", 0))[n % 3 == 0]
        receipts.append(store.put(topic, body(n), queue_id, keys=f"k{n}", tag="even" if n % 2 == 0 else None))
        if crash and n == count - 11:
            checkpointed(store)
    if crash:
        store.dispatch()
        kill(store)
        reboot(path)
    else:
        store.close()
    return Made(path, profile, receipts)


def snapshot(root: Path) -> dict[str, tuple[bytes, int, int]]:
    """Content, modification time and inode of every file, and the time of every folder."""
    found = {}
    for folder, _, names in os.walk(root):
        info = os.stat(folder)
        found[folder] = (b"", info.st_mtime_ns, info.st_ino)
        for name in names:
            path = os.path.join(folder, name)
            info = os.stat(path)
            found[path] = (Path(path).read_bytes(), info.st_mtime_ns, info.st_ino)
    return found


def kinds(report: Any) -> list[str]:
    return [finding.kind for finding in getattr(report, "findings", report)]


def held(store: Any, made: Made) -> list[int]:
    """Numbers of the messages that the queues show, after comparing each with what was put."""
    place = {(r.topic, r.queue_id, r.offset): n for n, r in enumerate(made.receipts)}
    found = []
    for topic, queue_id in (("orders", 0), ("orders", 1), ("clicks", 0)):
        try:
            low, high = store.offsets(topic, queue_id)
        except LookupError:
            continue
        position = low
        while position < high:
            messages = store.read(topic, queue_id, position, 50)
            if not messages:
                break
            for message in messages:
                n = place[topic, queue_id, message.offset]
                assert message.body == body(n)
                assert message.physical_offset == made.receipts[n].physical_offset
                found.append(n)
            position = messages[-1].offset + 1
    return sorted(found)


def killed_recoveries(damaged: Made, *, prefix: bool = False, torn: bool = True) -> Iterator[tuple[int, Path]]:
    """(n, copy of a store whose recovery was killed before its n-th change), for n by STEP.
    With `torn` every second time half of that change is there, even of one within a sector."""
    for nth, fs in deaths(torn=torn):
        copy = damaged.path.with_name(f"killed-{nth}")
        shutil.copytree(damaged.path, copy)
        with contextlib.suppress(Crash):
            recover(copy, config=CONFIG, fs=fs, prefix=prefix)
        if fs.crashed:
            yield nth, copy


def settle(made: Made) -> None:
    """Nothing may be left to do: recover again says so and writes no byte of the store's data."""
    before = {k: v for k, v in files(made.path).items() if k not in ("checkpoint", "lock")}
    report = made.recover()
    assert not report.changed, report
    assert report.truncated == []
    after = {k: v for k, v in files(made.path).items() if k not in ("checkpoint", "lock")}
    assert after == before


@pytest.fixture(params=PROFILES)
def clean(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    return make(tmp_path / "store", request.param)


@pytest.fixture(params=PROFILES)
def crashed(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    """Its machine went down with ten messages behind the last checkpoint."""
    return make(tmp_path / "store", request.param, crash=True)


# --- the last good record, and what lies behind it ---


@pytest.mark.parametrize("kept_bytes", [0, 4, 8, 60, 100])
def test_a_torn_tail_is_cut_at_the_last_good_record(crashed: Made, kept_bytes: int) -> None:
    last = crashed.receipts[-1]
    path, at = crashed.place(last)
    overwrite(path, at + kept_bytes, bytes(last.size - kept_bytes))
    with crashed.open("r") as store:
        found = [finding.kind for finding in store.verify() if finding.file.startswith("commitlog")]
        assert found == (["torn_tail"] if kept_bytes else ["lost_tail"])  # behind zeros its unit alone shows it
    with crashed.open() as store:
        report = store.recovery
        assert report.log_end == last.physical_offset
        assert report.findings == []
        assert [(cut.start, cut.reason.split(":")[0]) for cut in report.truncated] == (
            [(at, "torn_tail")] if kept_bytes else []
        )
        assert held(store, crashed) == list(range(79))
        assert store.offsets(last.topic, last.queue_id)[1] == last.offset
    assert not any(path.read_bytes()[at:])
    assert not (crashed.path / "cut").exists()
    settle(crashed)


def test_tail_lost_below_the_watermark_is_reported(clean: Made) -> None:
    first_lost = clean.receipts[-3]
    path, at = clean.place(first_lost)
    overwrite(path, at, bytes(SEGMENT - at))
    (clean.path / "commitlog" / f"{(first_lost.physical_offset // SEGMENT + 1) * SEGMENT:020d}").unlink(missing_ok=True)
    with clean.open("r") as store:
        assert "lost_tail" in kinds(store.verify())
    with clean.open() as store:
        [finding] = [f for f in store.recovery.findings if f.kind == "lost_tail"]
        assert (finding.position, finding.length) == (at, clean.end - first_lost.physical_offset)
        assert held(store, clean) == list(range(77))
    settle(clean)


def test_a_reader_knows_that_a_crash_left_messages_in_no_queue(tmp_path: Path) -> None:
    def unlisted(path: Path) -> bool:
        with open_store(path, "r") as store:
            return store.has_unlisted()

    with open_store(tmp_path / "s") as store:
        store.put("t", b"a", queue_id=0)
        store.dispatch()
        shutil.copytree(store.path, tmp_path / "listed")
        store.put("t", b"b", queue_id=1)
        shutil.copytree(store.path, tmp_path / "behind")
        assert not unlisted(tmp_path / "s")  # its owner will list it
        store.put("t", b"c", queue_id=0)
        store.dispatch()
        shutil.copytree(store.path, tmp_path / "between")
    # Killed between two queues: that c is listed does not say that b is.
    unit_of_b = tmp_path / "between/consumequeue/t/1" / f"{0:020d}"
    unit_of_b.write_bytes(bytes(unit_of_b.stat().st_size))

    found = {name: unlisted(tmp_path / name) for name in ("s", "listed", "behind", "between")}

    assert found == {"s": False, "listed": False, "behind": True, "between": True}
    for name in ("behind", "between"):
        open_store(tmp_path / name).close()
        assert not unlisted(tmp_path / name)


def test_records_behind_a_torn_one_are_cut_and_kept(crashed: Made) -> None:
    torn = crashed.receipts[72]
    path, at = crashed.place(torn)
    flip(path, at + 50)
    flip(path, at + 95)  # the body, for the profile that looks at nothing else
    with crashed.open() as store:
        assert store.recovery.log_end == torn.physical_offset
        assert store.recovery.findings == []
        assert store.recovery.truncated[0].reason == "torn_tail"
        assert held(store, crashed) == list(range(72))
        kept = store.recovery.kept
        # A put comes where the torn record was, and no stale one comes back behind it. RocketMQ leaves the old bytes:
        # behind a record of equal length they were whole again (format#zeros, format#engine-runs).
        again = store.put(torn.topic, body(72), torn.queue_id, keys="k72", tag="even")
        assert (again.physical_offset, again.offset, again.size) == (torn.physical_offset, torn.offset, torn.size)
        store.dispatch()
        kill(store)
    saved = b"".join(Path(name).read_bytes() for name in kept)
    for n in range(73, 80):
        assert body(n) in saved
    assert all(Path(name).parent == crashed.path / "cut" for name in kept)
    assert int(Path(kept[0]).name[:20]) == torn.physical_offset
    with crashed.open() as store:
        assert store.max_offset == again.physical_offset + again.size
        assert held(store, crashed) == list(range(73))


def spoil_last(made: Made) -> tuple[Path, int, bytes]:
    """Flip a bit in the body of the last record: (its file, its position there, the bytes that it is now)."""
    last = made.receipts[-1]
    path, at = made.place(last)
    flip(path, at + 93)
    return path, at, path.read_bytes()[at : at + last.size]


def kept_bytes(report: Any) -> dict[str, bytes]:
    """What the files in `kept` hold, by the position that begins their names."""
    return {Path(name).name: Path(name).read_bytes() for name in report.kept}


@pytest.mark.parametrize("way", ["open", "recover"])
def test_a_lost_tail_is_kept_aside_before_it_is_cut(clean: Made, way: str) -> None:
    """One flipped bit in the last record of a store that was closed: it was zeroed, and nothing had a copy."""
    path, at, raw = spoil_last(clean)
    start = clean.receipts[-1].physical_offset
    if way == "open":
        with clean.open() as store:
            report = store.recovery
    else:
        report = clean.recover()
    assert kinds(report) == ["lost_tail"]
    assert [(cut.file, cut.start, cut.stop) for cut in report.truncated] == [
        (f"commitlog/{path.name}", at, at + len(raw))
    ]
    assert not any(path.read_bytes()[at:])
    aside = [Path(name) for name in report.kept if Path(name).name.startswith(f"{start:020d}")]
    assert {each.parent for each in aside} == {clean.path / "cut"}
    assert all(each.read_bytes() == raw for each in aside)
    settle(clean)


def test_kept_tail_has_its_zeros(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        store.put("t", b"a")
        last = store.put("t", bytes(300))
    path = tmp_path / "s/commitlog" / f"{0:020d}"
    flip(path, last.physical_offset + 95)
    raw = path.read_bytes()[last.physical_offset : last.physical_offset + last.size]
    with open_store(tmp_path / "s") as store:
        assert list(kept_bytes(store.recovery).values()) == [raw]


@pytest.mark.parametrize("damage", ["torn among whole ones", "prefix"])
def test_each_range_that_is_cut_is_kept(crashed: Made, damage: str) -> None:
    last = crashed.receipts[-1]
    path, at = crashed.place(last)
    overwrite(path, at + 60, bytes(last.size - 60))  # a torn one, which nothing whole follows
    if damage == "torn among whole ones":
        bad = crashed.receipts[72].physical_offset
        flip_log(crashed.path, bad + 95)
        crashed.segment(last.physical_offset - at + SEGMENT).write_bytes((b"junk" * SEGMENT)[:SEGMENT])
    else:
        bad = crashed.in_segment(1)[2].physical_offset
        flip(crashed.segment(SEGMENT), bad % SEGMENT + 93)
    before = {f"commitlog/{each.name}": each.read_bytes() for each in (crashed.path / "commitlog").iterdir()}

    if damage == "prefix":
        report = crashed.recover(prefix=True)
    else:
        with crashed.open() as store:
            report = store.recovery

    copies = {int(name[:20]): data for name, data in kept_bytes(report).items()}
    cuts = {int(cut.file[-20:]) + cut.start: before[cut.file][cut.start : cut.stop] for cut in report.truncated}
    assert copies == cuts
    # Nothing but what is told was taken: put back, it is what was there.
    for name, data in before.items():
        after = crashed.path / name
        now = bytearray(after.read_bytes() if after.exists() else SEGMENT)
        for cut in report.truncated:
            if cut.file == name:
                now[cut.start : cut.stop] = data[cut.start : cut.stop]
        assert bytes(now) == data, name
    whole = [r for r in crashed.receipts if bad < r.physical_offset < last.physical_offset]
    assert report.moved_to_cut == len(whole) > 0
    settle(crashed)


@pytest.mark.parametrize("prefix", [False, True], ids=["lost tail", "prefix"])
def test_a_copy_is_not_written_over_when_a_killed_recovery_is_run_again(tmp_path: Path, prefix: bool) -> None:
    """The second run finds part of it cut, and would have put that in place of the whole."""
    damaged = make(tmp_path / "damaged")
    bad = damaged.in_segment(1)[2] if prefix else damaged.receipts[-1]
    at = bad.physical_offset % SEGMENT
    segment = bad.physical_offset - at
    flip(damaged.segment(segment), at + 93)
    end = max(r.physical_offset + r.size for r in damaged.in_segment(segment // SEGMENT)) - segment
    wanted = damaged.segment(segment).read_bytes()[at:end]
    nth = 0
    for nth, copy in killed_recoveries(damaged, prefix=prefix):
        recover(copy, config=CONFIG, prefix=prefix)
        found = {each.read_bytes() for each in (copy / "cut").iterdir() if not each.name.endswith(".tmp")}
        assert wanted in {data[: len(wanted)] for data in found}, f"killed before change {nth}"
    assert nth > 10


def test_a_record_that_lies_elsewhere_than_it_says_is_no_record(crashed: Made) -> None:
    """A recycled or restored file holds records with a valid checksum at places that are not theirs."""
    stale = crashed.receipts[70]
    path = crashed.segment(stale.physical_offset // SEGMENT * SEGMENT)
    at = stale.physical_offset % SEGMENT
    data = path.read_bytes()[at : at + stale.size]
    end = crashed.end % SEGMENT
    assert end + len(data) + 8 < SEGMENT
    overwrite_log(crashed.path, crashed.end, data)
    with crashed.open() as store:
        assert store.recovery.log_end == crashed.end
        assert held(store, crashed) == list(range(80))
    assert not any(crashed.segment(crashed.end - end).read_bytes()[end:])


@pytest.mark.parametrize("known", [True, False])
def test_unsynced_units_are_written_again_and_synced(crashed: Made, known: bool) -> None:
    """After a failed fsync the kernel takes them for written. Without a checkpoint that may be true of all."""
    if not known:
        (crashed.path / "checkpoint").unlink()
    fs = FaultyFileSystem()
    with open_in("rw", crashed.path, config=StoreConfig(clock=SimulatedClock()), fs=fs) as store:
        assert store.recovery.rebuilt.units == 0
    calls = [(call.operation, call.path.split("consumequeue/")[1]) for call in fs.calls if "queue/" in call.path]
    for receipt in crashed.receipts[70 if known else 0 :]:
        name = f"{receipt.topic}/{receipt.queue_id}/{receipt.offset // 8 * 160:020d}"
        assert {("pwrite", name), ("fdatasync", name)} <= {*calls}


# --- segments ---


def test_a_short_last_segment_is_extended_and_cut_as_a_torn_tail(crashed: Made) -> None:
    last = crashed.receipts[-1]
    path, at = crashed.place(last)
    os.truncate(path, at + 40)
    planned = crashed.recover(dry_run=True)
    with crashed.open("r") as store:
        assert "segment_size" in kinds(store.verify())
    with crashed.open() as store:
        assert kinds(store.recovery) == ["segment_size"]
        assert store.recovery.changed
        assert held(store, crashed) == list(range(79))
    assert path.stat().st_size == SEGMENT
    assert planned.changed
    settle(crashed)


@pytest.mark.parametrize("behind", [False, True], ids=["", "empty file behind"])
@pytest.mark.parametrize(
    "length", ["in a header", "in a record", "behind a record", "in zeros", "in the blank", "torn"]
)
def test_plan_of_a_short_last_segment_equals_the_run(crashed: Made, length: str, behind: bool) -> None:
    """It judged a record by where the file ended, while the run extends the file first: it told other reasons."""
    last = crashed.receipts[-1]
    if length == "in the blank":  # a segment that was full
        last = crashed.last_of(1)
        for each in sorted((crashed.path / "commitlog").iterdir())[2:]:
            each.unlink()
    path, at = crashed.place(last)
    sizes = {"in a header": at + 6, "in a record": at + 40, "behind a record": at + last.size}
    os.truncate(path, sizes.get(length, at + last.size + 8))
    if length == "torn":  # before a whole one
        flip(path, crashed.receipts[-2].physical_offset % SEGMENT + 93)
    if behind:
        crashed.segment(last.physical_offset - at + SEGMENT).touch()
    before = snapshot(crashed.path)

    planned = crashed.recover(dry_run=True)
    assert snapshot(crashed.path) == before
    done = crashed.recover()

    assert planned.as_dict() | {"seconds": 0} == done.as_dict() | {"seconds": 0}
    assert "segment_size" in kinds(done)
    settle(crashed)


def test_removal_of_a_prepared_segment_is_reported(golden: Callable[[str], Any]) -> None:
    java = golden("crashed")  # its broker had made one more
    planned = recover(java.path, dry_run=True)
    before = {file.name for file in (java.path / "commitlog").iterdir()}
    done = recover(java.path)
    gone = before - {file.name for file in (java.path / "commitlog").iterdir()}
    assert len(gone) == 1
    for report in (planned, done):
        assert [(cut.file, cut.reason) for cut in report.truncated] == [(f"commitlog/{min(gone)}", "unused file")]
    assert not recover(java.path).changed


def test_without_any_segment_the_stream_goes_on_behind_what_was(clean: Made) -> None:
    ends = {(r.topic, r.queue_id): r.offset + 1 for r in clean.receipts}
    for path in (clean.path / "commitlog").glob("0*"):
        path.unlink()
    with clean.open() as store:
        assert kinds(store.recovery) == ["missing_segment"]
        receipt = store.put("orders", b"after")
        assert receipt.physical_offset >= clean.end
        assert receipt.offset == ends["orders", 0]  # no number is given twice
        assert [m.body for m in store.read("orders", 0, receipt.offset)] == [b"after"]


def test_without_segments_and_checkpoint_units_into_nothing_are_cut(clean: Made) -> None:
    for path in (clean.path / "commitlog").glob("0*"):
        path.unlink()
    (clean.path / "checkpoint").unlink()
    with clean.open() as store:
        receipt = store.put("orders", b"after")
        assert (receipt.physical_offset, receipt.offset) == (0, 0)
        assert store.find("clicks", key="k3") == []
    with clean.open("r") as store:
        assert list(store.verify()) == []


# --- consume queues ---


def originals(made: Made) -> dict[str, bytes]:
    return {k: v for k, v in files(made.path).items() if k.startswith("consumequeue")}


def test_a_unit_that_points_beyond_the_end_is_cut(clean: Made) -> None:
    last = max((r for r in clean.receipts if r.topic == "clicks"), key=lambda r: r.offset)
    slot = last.offset + 1
    folder = clean.path / "consumequeue" / "clicks" / "0"
    path = folder / f"{slot // 8 * 160:020d}"
    if not path.exists():
        path.write_bytes(bytes(160))
    overwrite(path, slot % 8 * 20, struct.pack(">qiq", clean.end + 1000, 150, 0))
    with clean.open("r") as store:
        assert kinds(store.verify()) == ["lost_tail"]
    with clean.open() as store:
        assert store.offsets("clicks")[1] == slot
        assert store.put("clicks", b"next").offset == slot
    settle(clean)


@pytest.mark.parametrize("wrong", ["hole", "other record", "other size", "other tag", "void", "no file"])
def test_wrong_units_are_found_by_verify_and_rebuilt_by_recover(clean: Made, wrong: str) -> None:
    before = originals(clean)
    mine = [r for r in clean.receipts if (r.topic, r.queue_id) == ("orders", 1)]
    right = units_of(clean.path, "orders", 1)[5]
    assert right[:2] == (mine[5].physical_offset, mine[5].size)
    file = clean.path / "consumequeue" / "orders" / "1" / f"{0:020d}"
    if wrong == "no file":
        file.unlink()
    else:
        unit = {
            "hole": (0, 0, 0),
            "other record": (mine[4].physical_offset, mine[4].size, 0),
            "other size": (right[0], right[1] + 1, right[2]),
            "other tag": (right[0], right[1], right[2] ^ 1),
            "void": VOID,
        }[wrong]
        overwrite(file, 5 * 20, struct.pack(">qiq", *unit))
    kind = "missing_units" if wrong in ("hole", "no file") else "bad_unit"
    with clean.open("r") as store:
        [finding] = store.verify()
        place = (0, 160) if wrong == "no file" else (100, 20)
        assert (finding.kind, finding.position, finding.length) == (kind, *place)
    assert clean.recover().rebuilt.units == place[1] // 20
    assert originals(clean) == before
    settle(clean)


@pytest.mark.parametrize("left", ["records", "none"])
@pytest.mark.parametrize("state", ["dead", "void"])
def test_a_bad_unit_before_the_first_record_is_mended(path: Path, state: str, left: str) -> None:
    """Retention had taken the records of the first slots. One that is changed points into the log: `verify` said so for
    ever, `recover` found nothing to do, and the queue began with that slot."""
    with open_store(path, consumequeue_units=8) as store:
        for n in range(18):
            store.put("t", b"%03d" % n + bytes(890), n % 2 if left == "records" or n < 8 else 1)
        store.flush()
        store.dispatch()
        store.drop_before(2 * SEGMENT)
        low, high = store.offsets("t", 0)
        first = [m.body for m in store.iter("t", 0)][:1]
    assert low == 4
    file = path / "consumequeue/t/0" / f"{0:020d}"
    assert file.exists()
    void = struct.pack(">qiq", *VOID)
    sound = (void * low if state == "void" else file.read_bytes()[: 20 * low]) + file.read_bytes()[20 * low :]
    file.write_bytes(sound)
    # The log begins at 8 Ki; a bit of this byte is worth 64 Ki at least.
    flip(file, 5)
    flip(file, 2 * 20 + 5)
    with open_store(path, "r") as store:
        assert [(f.kind, f.position) for f in store.verify()] == [("bad_unit", 0), ("bad_unit", 40)]

    planned = recover(path, dry_run=True)
    reports = [recover(path) for _ in range(2)]

    assert [report.changed for report in (planned, *reports)] == [True, True, False]
    assert planned.rebuilt == reports[0].rebuilt
    assert (reports[0].rebuilt.units, reports[0].rebuilt.consume_queues) == (2, 1)
    assert file.read_bytes() == void + sound[20:40] + void + sound[60:]
    with open_store(path) as store:
        assert list(store.verify()) == []
        assert store.offsets("t", 0) == (low, high)
        assert [m.body for m in store.iter("t", 0)][:1] == first


@pytest.mark.parametrize("length", [0, 10, 20, 33, 100])
def test_a_queue_file_that_a_power_cut_left_short_gets_its_length_again(crashed: Made, length: int) -> None:
    """A new file's name may be durable before its length. The session that mended it reported it all the same."""
    path = sorted((crashed.path / "consumequeue" / "orders" / "0").iterdir())[-1]
    before = originals(crashed)
    os.truncate(path, length)
    planned = crashed.recover(dry_run=True)
    assert planned.changed
    assert path.stat().st_size == length
    with crashed.open("r") as store:
        assert "segment_size" not in kinds(store.verify())
    with crashed.open() as store:
        assert kinds(store.recovery) == []
        assert store.recovery.changed
        assert held(store, crashed) == list(range(80))
    assert originals(crashed) == before


def test_void_last_unit_does_not_hide_the_file(clean: Made) -> None:
    """Its physical offset is 0, below every minimum: the whole file was taken for dead."""
    mine = [r for r in clean.receipts if (r.topic, r.queue_id) == ("orders", 0)]
    assert len(mine) > 16
    bad = mine[15]
    flip_log(clean.path, bad.physical_offset + 93)
    clean.recover()
    with clean.open() as store:
        assert units_of(clean.path, "orders", 0)[15] == VOID
        store.drop_before(mine[9].physical_offset // SEGMENT * SEGMENT)
        first = store.min_offset
        alive = [r.offset for r in mine if r.physical_offset >= first and r is not bad]
        assert store.offsets("orders", 0)[0] == alive[0]
        assert [m.offset for m in store.read("orders", 0, alive[0], 100)] == alive


# --- the numbers in the records ---


def test_wild_offset_at_a_segment_end_costs_no_slot(path: Path) -> None:
    """The room it lay in did not count when the next record's number jumped by its own: that got none, either, and so
    on for as many records as it took to make up for it. They were there, and no queue listed them."""
    with open_store(path, profile="rocketmq", segment_bytes=SEGMENT) as store:
        receipts = [store.put("t", b"short") for _ in range(100)]
    last = [r for r in receipts if r.physical_offset < SEGMENT][-1]
    flip_log(path, last.physical_offset + 20 + 2)
    made = Made(path, "rocketmq", receipts)
    assert kinds(made.recover()) == []
    with open_in("r", path) as reader:
        assert kinds(reader.verify()) == []
        assert [m.offset for m in reader.iter("t")] == list(range(100))


def test_units_that_are_not_of_the_queue_do_not_count_as_numbers_given_out(path: Path) -> None:
    """A queue got another one's file: behind its own records the units of that became void, more than there was room
    for. The next message went behind these; the next recovery called its number nonsense, and no queue listed it any
    more."""
    store = open_store(path)
    for n in range(60):
        store.put("t", b"x", int(n % 20 < 19))
    store.dispatch()
    kill(store)
    first, other = (path / "consumequeue" / "t" / str(queue_id) / f"{0:020d}" for queue_id in (0, 1))
    first.write_bytes(other.read_bytes())
    made = Made(path, "mqstore", [])
    made.recover()
    assert not made.recover().changed
    with open_store(path) as store:
        receipt = store.put("t", b"next")
    assert kinds(made.recover()) == []
    with open_in("r", path) as reader:
        assert kinds(reader.verify()) == []
        assert [m.offset for m in reader.iter("t", 0)] == [0, 1, 2, receipt.offset]


@pytest.mark.parametrize("segment", [0, 1], ids=["first", "later"])
@pytest.mark.parametrize("number", [5, 8, 16])
def test_recovery_and_verify_agree_on_a_wild_queue_offset(path: Path, number: int, segment: int) -> None:
    """Verify took a large record for room in which others were lost, and a queue to begin wherever its first record
    says: it believed numbers that recovery did not, called the slots of all that followed damaged, and no recovery
    helped."""
    with open_store(path, profile="rocketmq") as store:
        receipts = [store.put("t", bytes(4003 - HEADER)) for _ in range(20)]
        store.dispatch()
        store.flush()
        store.drop_before(2 * SEGMENT)
    bad = receipts[2 + 4 * segment]
    overwrite_log(path, bad.physical_offset + 20, number.to_bytes(8, "big"))
    made = Made(path, "rocketmq", receipts)
    with open_in("r", path) as reader:
        assert kinds(reader.verify()) == ["queue_offset"]
    assert kinds(made.recover()) == []
    with open_in("r", path) as reader:
        assert kinds(reader.verify()) == []
        assert [m.offset for m in reader.iter("t")] == list(range(2, 20))
    settle(made)


def test_queue_with_a_wild_first_offset_keeps_it(path: Path) -> None:
    """Nothing told against the number when the queue had no file yet. Then it had one, which began with a void slot
    in a log that begins at 0: the next recovery made the number nonsense."""
    store = open_store(path, profile="rocketmq")
    receipts = [store.put("t", bytes(2000)) for _ in range(2)]
    kill(store)
    overwrite_log(path, 20, (1).to_bytes(8, "big"))
    made = Made(path, "rocketmq", receipts)
    assert kinds(made.recover()) == ["bad_record"]
    with open_store(path) as store:
        receipts.append(store.put("t", bytes(2000)))
    with open_in("r", path) as reader:
        assert kinds(reader.verify()) == ["bad_record"]
        assert [m.physical_offset for m in reader.iter("t")] == [0, receipts[2].physical_offset]
    settle(made)


def test_message_after_a_wild_offset_survives_a_second_crash(path: Path) -> None:
    """One recovery read the whole log, believed 3 and not the 2 behind it; the next message got 4. The recovery after
    it read the end only, believed the 2 and not the 4, and no queue listed that message any more."""
    store = open_store(path, profile="rocketmq")
    receipts = [store.put("t", bytes(size)) for size in (2000, 3900, 2000)]
    kill(store)
    overwrite_log(path, SEGMENT + 20, (3).to_bytes(8, "big"))
    store = open_store(path)
    assert [m.physical_offset for m in store.iter("t")] == [0, SEGMENT]
    receipts.append(store.put("t", b"next"))
    store.dispatch()
    kill(store)
    with open_store(path) as store:
        assert [(m.offset, m.physical_offset) for m in store.iter("t")] == [
            (0, 0),
            (3, SEGMENT),
            (4, receipts[-1].physical_offset),
        ]
        assert store.recovery.rebuilt.units == 0


@pytest.mark.parametrize(
    ("profile", "unit", "left"),
    [("mqstore", b"\1" * 20, "records"), ("rocketmq", b"\1" * 20, "none"), ("mqstore", bytes(20), "none")],
)
def test_a_queue_file_from_far_away_costs_neither_time_nor_room(
    tmp_path: Path, profile: str, unit: bytes, left: str
) -> None:
    """Who looked at what lay before it never came to an end, and who zeroed it made all the files in between."""
    clean = make(tmp_path / "store", profile)
    stray = clean.path / "consumequeue" / ("orders" if left == "records" else "gone") / "0" / f"{160 << 40:020d}"
    stray.parent.mkdir(parents=True, exist_ok=True)
    (stray.parent / f"{0:020d}").touch()
    os.truncate(stray.parent / f"{0:020d}", 160)
    stray.write_bytes(unit * 8)
    before = {path.name for path in stray.parent.iterdir()}
    with clean.open("r") as store:
        assert set(kinds(store.verify())) == ({"bad_unit"} if any(unit) else set())
    report = clean.recover()
    assert report.changed == any(unit)
    assert {path.name for path in stray.parent.iterdir()} == before
    with clean.open("r") as store:
        assert list(store.verify()) == []
        assert held(store, clean) == list(range(80))
    settle(clean)


BITS = [(0, 0), (0, 1), (0, 5), (7, 3)]
"""(byte of the queue offset counted from its last one, bit): near, and far beyond any room in the log."""


PLACES = [*((which, "there") for which in (0, 1, 5, -1)), *((which, "lost") for which in (0, 1, 5, -2))]
"""Of a last record without its unit nothing says which it is."""


@pytest.mark.parametrize(
    ("which", "units", "byte", "bit"),
    [*((*PLACES[i], *BITS[i % 4]) for i in range(8)), *((*PLACES[i], *BITS[(i + 2) % 4]) for i in range(8))],
)
def test_a_flipped_bit_in_a_queue_offset_is_free(tmp_path: Path, which: int, byte: int, bit: int, units: str) -> None:
    """Profile `rocketmq` has no checksum over it. The message was dropped, and its unit voided."""
    made = make(tmp_path / "store", "rocketmq")
    orders = [r for r in made.receipts if (r.topic, r.queue_id) == ("orders", 0)]
    bad = orders[which]
    if units == "lost":
        shutil.rmtree(made.path / "consumequeue")
    flip_log(made.path, bad.physical_offset + 20 + 7 - byte, bit)
    with made.open("r") as store:
        (found,) = [f for f in store.verify() if f.file.startswith("commitlog")]
        assert (found.kind, found.position) == ("queue_offset", bad.physical_offset % SEGMENT)

    planned = made.recover(dry_run=True)
    report = made.recover()
    assert (report.renumbered, report.findings) == (planned.renumbered, planned.findings) == (1, [])
    with made.open("r") as store:
        assert held(store, made) == list(range(80))
        assert list(store.verify()) == []
    settle(made)


# --- checkpoint, watermark, where reading starts ---


def spoil_checkpoint(made: Made, state: str) -> None:
    (made.path / "checkpoint").unlink()
    if state != "missing":
        content = {"empty": b"", "short": b"\1" * 20, "zeros": bytes(4096), "garbage": b"\xa5" * 4096}[state]
        (made.path / "checkpoint").write_bytes(content)


@pytest.mark.parametrize("behind", ["a copy", "a later life"])
def test_a_segment_behind_the_end_of_a_clean_log_is_found_and_cut(path: Path, behind: str) -> None:
    """An older copy of a store was put over it, and what it had since was left there. The checkpoint vouched for the
    end, so opening looked no further; the put that came to that segment raised BufferError, and each one after it."""
    with open_store(path) as store:
        made = Made(path, "mqstore", [store.put("t", body(n), keys=f"k{n}") for n in range(30)])
    left = made.end // SEGMENT * SEGMENT + SEGMENT
    before = files(path)
    if behind == "a copy":
        made.segment(left).write_bytes(made.segment(0).read_bytes())
    else:
        with open_store(path) as store:
            store.put_many("t", [body(n) for n in range(30)])
        for name, data in before.items():
            (path / name).write_bytes(data)
    with made.open("r") as reader:
        assert kinds(reader.verify())
    with open_store(path) as store:
        assert store.recovery.changed
        receipts = [store.put("t", body(n), keys=f"k{n}") for n in range(30, 60)]
        assert receipts[-1].physical_offset > left
    with made.open("r") as reader:
        assert kinds(reader.verify()) == []
        assert [m.body for m in reader.iter("t")] == [body(n) for n in range(60)]


@pytest.mark.parametrize("damage", ["record", "bytes behind", "no unit", "bad unit", "index header"])
def test_a_proof_that_does_not_hold_means_reading(clean: Made, damage: str) -> None:
    last = clean.receipts[-1]
    segment = clean.segment(clean.end // SEGMENT * SEGMENT)
    if damage == "record":
        flip(segment, last.physical_offset % SEGMENT + 93)
    elif damage == "bytes behind":
        flip(segment, clean.end % SEGMENT + 5)
    elif damage.endswith("unit"):  # RocketMQ gives its number to the next message (format#engine-runs)
        path = clean.path / "consumequeue" / last.topic / str(last.queue_id) / f"{last.offset // 8 * 160:020d}"
        at = last.offset % 8 * 20
        overwrite(path, at, bytes(20)) if damage == "no unit" else flip(path, at + 6)
    else:
        newest = sorted((clean.path / "index").iterdir())[-1]
        flip(newest, 36, 7)  # indexCount becomes negative
    lost = 1 if damage == "record" else 0
    with clean.open() as store:
        assert store.recovery.scanned_from is not None
        assert held(store, clean) == list(range(80 - lost))
        store.put("orders", b"next", keys="after-all")
        assert [m.body for m in store.find("orders", key="after-all")] == [b"next"]
    settle(clean)


def test_an_unclean_store_is_read_from_the_segment_of_the_lower_watermark(crashed: Made) -> None:
    checkpoint = checkpoint_of(crashed.path)
    assert checkpoint.flushed is not None
    assert checkpoint.dispatched is not None
    assert 0 < checkpoint.dispatched <= checkpoint.flushed < crashed.end
    with crashed.open() as store:
        assert store.recovery.scanned_from == checkpoint.dispatched // SEGMENT * SEGMENT


@pytest.mark.parametrize("state", ["missing", "empty", "short", "zeros", "garbage"])
@pytest.mark.parametrize("profile", PROFILES)
def test_a_store_without_a_checkpoint_is_read_from_its_beginning(tmp_path: Path, profile: str, state: str) -> None:
    for crash in (False, True):
        made = make(tmp_path / f"store-{crash}", profile, crash=crash)
        spoil_checkpoint(made, state)
        if profile == "mqstore" or state not in ("zeros", "garbage"):
            with made.open("r") as store:
                assert "bad_checkpoint" in kinds(store.verify())
        with made.open() as store:
            if crash or state in ("missing", "empty", "short"):
                assert store.recovery.scanned_from == 0
            assert held(store, made) == list(range(80))
        settle(made)


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize(("profile", "state"), [("mqstore", "missing"), ("rocketmq", "short"), ("mqstore", "zeros")])
def test_a_bad_checkpoint_is_work_for_recover(tmp_path: Path, profile: str, state: str, crash: bool) -> None:
    """`verify` reported it, and the plan of the repair said that there was nothing to do."""
    made = make(tmp_path / "s", profile, crash=crash)
    spoil_checkpoint(made, state)
    assert recover(made.path, dry_run=True).changed
    assert recover(made.path).changed
    with made.open("r") as store:
        assert not [*store.verify()]
    assert not recover(made.path, dry_run=True).changed
    assert not recover(made.path).changed


@pytest.mark.parametrize(
    ("profile", "state"), [("mqstore", "missing"), ("rocketmq", "short"), ("rocketmq", "zeros"), ("mqstore", "garbage")]
)
def test_a_kill_forgets_no_clean_end_without_checkpoint(tmp_path: Path, profile: str, state: str) -> None:
    """Else the abort mark would turn damage into a torn tail, and cut what is whole behind it."""
    made = make(tmp_path / "s", profile)
    bad = made.in_segment(1)[2]
    n = made.receipts.index(bad)
    flip_log(made.path, bad.physical_offset + 93)
    spoil_checkpoint(made, state)
    nth = 0
    for nth, copy in killed_recoveries(made, torn=False):
        killed = Made(copy, profile, made.receipts)
        with killed.open() as store:
            if store.recovery.scanned_from == 0:  # it had not got far
                assert kinds(store.recovery) == ["bad_record"], nth
            assert store.recovery.truncated == []
            assert held(store, killed) == [i for i in range(80) if i != n]
    assert nth > 10


def test_a_checkpoint_that_a_java_broker_changed_loses_its_extension_only(tmp_path: Path) -> None:
    made = make(tmp_path / "store", "rocketmq")
    path = made.path / "checkpoint"
    data = bytearray(path.read_bytes())
    struct.pack_into(">q", data, 8, struct.unpack_from(">q", data, 8)[0] + 5)
    path.write_bytes(data)
    assert checkpoint_of(made.path).flushed is None
    with made.open("r") as store:
        assert list(store.verify()) == []  # no fault
    with made.open() as store:
        assert store.recovery.scanned_from == made.end // SEGMENT * SEGMENT
        assert held(store, made) == list(range(80))
    assert checkpoint_of(made.path).clean_end == made.end


def test_java_watermark_is_the_first_record_stored_at_or_after_the_stamp(golden: Callable[[str], Any]) -> None:
    """Crashed, all stamps zero: everything may be torn. With a stamp, what was stored before it is damaged."""
    for stamped in (False, True):
        java = golden("crashed")
        messages = sorted(java.of("message"), key=lambda line: line["physical_offset"])
        third = messages[len(messages) // 3]
        stamp = messages[len(messages) // 2]["store_timestamp_ms"]
        overwrite(java.path / "checkpoint", 0, struct.pack(">qq", *[stamp if stamped else 0] * 2))
        flip_log(java.path, third["physical_offset"] + 88)
        with open_in("rw", java.path, config=StoreConfig(clock=SimulatedClock())) as store:
            if stamped:
                assert "bad_record" in kinds(store.recovery)
                assert store.max_offset > messages[-1]["physical_offset"]
            else:
                assert store.recovery.log_end == third["physical_offset"]
                assert store.recovery.kept


# --- index ---


def keys_found(made: Made, numbers: list[int]) -> None:
    with made.open() as store:
        for n in numbers:
            receipt = made.receipts[n]
            assert [m.physical_offset for m in store.find(receipt.topic, key=f"k{n}")] == [receipt.physical_offset]


@pytest.mark.parametrize("damage", ["slot", "hash", "offset", "seconds", "end time", "count", "missing", "short"])
def test_a_damaged_index_is_found_by_verify_and_rebuilt_by_recover(clean: Made, damage: str) -> None:
    names = sorted((clean.path / "index").iterdir())
    assert len(names) == 3
    before = [path.read_bytes() for path in names]
    path = names[1]
    entry = 40 + 4 * 16 + 20 * 9
    if damage == "missing":
        path.unlink()
    elif damage == "short":
        os.truncate(path, 100)
    else:
        position = {"slot": 43 + 4 * 3, "hash": entry + 3, "offset": entry + 11, "seconds": entry + 15, "end time": 14,
                    "count": 39}[damage]  # fmt: skip
        flip(path, position, 1)
    with clean.open("r") as store:
        assert set(kinds(store.verify())) == {"bad_index"}
    report = clean.recover()
    assert report.rebuilt.index_entries == 80
    after = [path.read_bytes() for path in sorted((clean.path / "index").iterdir())]
    assert after == before
    keys_found(clean, list(range(80)))
    settle(clean)


def test_a_record_whose_keys_lie_in_two_index_files_keeps_them_all(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    receipts = [store.put("t", b"x", keys=[f"a{n}", f"b{n}", f"c{n}"]) for n in range(30)]  # files of 31 entries
    checkpointed(store)
    more = [store.put("t", b"y", keys=[f"a{n}", f"b{n}", f"c{n}"]) for n in range(30, 40)]
    store.dispatch()
    kill(store)
    with open_store(tmp_path / "store") as store:
        assert store.recovery.findings == []  # reading from the middle of a record would look like damage
        assert store.recovery.truncated == []
        for n, receipt in enumerate(receipts + more):
            for letter in "abc":
                assert [m.physical_offset for m in store.find("t", key=f"{letter}{n}")] == [receipt.physical_offset]
    with open_store(tmp_path / "store", "r") as store:
        assert list(store.verify()) == []
        assert sum(file.header.next_entry - 1 for file in store.index.files) == 120


def test_stale_index_header_is_rebuilt(tmp_path: Path) -> None:
    """The slot's page was written, the header's was not: the chain behind that slot can no longer be reached."""
    store = open_store(tmp_path / "store", index_slots=1, index_entries=64)
    receipts = [store.put("t", b"x", keys=f"k{n}") for n in range(20)]
    checkpointed(store)
    kill(store)
    [path] = (tmp_path / "store" / "index").iterdir()
    overwrite(path, 40, struct.pack(">i", 23))
    with open_store(tmp_path / "store") as store:
        for n, receipt in enumerate(receipts):
            assert [m.physical_offset for m in store.find("t", key=f"k{n}")] == [receipt.physical_offset]


def test_index_entries_of_a_lost_tail_are_removed(clean: Made) -> None:
    lost = clean.receipts[-5]
    path, at = clean.place(lost)
    overwrite(path, at, bytes(SEGMENT - at))
    path.with_name(f"{int(path.name) + SEGMENT:020d}").unlink(missing_ok=True)
    with clean.open() as store:
        assert store.recovery.log_end == lost.physical_offset
    keys_found(clean, list(range(75)))
    with clean.open("r") as store:
        assert list(store.verify()) == []
    settle(clean)


# --- recover as a command ---


def damage_a_lot(made: Made) -> None:
    bad = made.in_segment(1)[1]
    flip_log(made.path, bad.physical_offset + 93)
    (made.path / "consumequeue" / "orders" / "0" / f"{160:020d}").unlink()
    flip(sorted((made.path / "index").iterdir())[0], 43)
    last = made.receipts[-1]
    path, at = made.place(last)
    overwrite(path, at + 30, bytes(SEGMENT - at - 30))


@pytest.mark.parametrize("options", [{}, {"prefix": True}, {"rebuild_index": True}], ids=["plain", "prefix", "index"])
def test_dry_run_writes_nothing_and_shows_the_plan(crashed: Made, options: dict[str, Any]) -> None:
    damage_a_lot(crashed)
    before = snapshot(crashed.path)
    planned = crashed.recover(dry_run=True, **options)
    assert snapshot(crashed.path) == before
    done = crashed.recover(**options)
    assert done.changed
    assert planned.as_dict() | {"seconds": 0} == done.as_dict() | {"seconds": 0}


def test_segments_read_for_the_index_alone_give_no_units(path: Path) -> None:
    """The index file was not full, so its keys are read from the first segment on. The queues lack only later units."""
    store = open_store(path, index_slots=16, index_entries=500, segment_bytes=SEGMENT)
    receipts = [store.put("orders", body(n), 0, keys=f"k{n}") for n in range(80)]
    checkpointed(store)
    receipts += [store.put("orders", body(n), 0, keys=f"k{n}") for n in range(80, 160)]
    store.dispatch()
    kill(store)
    reboot(path)
    with open_store(path) as store:
        start = store.recovery.scanned_from
        assert start > SEGMENT
        assert store.recovery.messages == sum(receipt.physical_offset >= start for receipt in receipts)
        assert [message.offset for n in range(160) for message in store.find("orders", key=f"k{n}")] == [*range(160)]


def test_progress_grows_to_the_total(clean: Made) -> None:
    seen: list[tuple[int, int]] = []
    recover(clean.path, config=CONFIG, progress=lambda done, total: seen.append((done, total)))
    assert len(seen) > 2
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("prefix", [False, True], ids=["plain", "prefix"])
@pytest.mark.parametrize("profile", PROFILES)
def test_recover_may_be_killed_before_every_change_and_run_again(tmp_path: Path, profile: str, prefix: bool) -> None:
    """A process that dies (reliability#p7): what was written stays. Power cuts are in tests/crash/test_images.py."""
    damaged = make(tmp_path / "damaged", profile, crash=True)
    damage_a_lot(damaged)
    shutil.copytree(damaged.path, tmp_path / "whole")
    whole = recover(tmp_path / "whole", config=CONFIG, prefix=prefix)
    expected = {k: v for k, v in files(tmp_path / "whole").items() if k.startswith(("commitlog", "consumequeue"))}
    nth = 0
    for nth, copy in killed_recoveries(damaged, prefix=prefix):
        again = recover(copy, config=CONFIG, prefix=prefix)
        found = {k: v for k, v in files(copy).items() if k.startswith(("commitlog", "consumequeue"))}
        assert found == expected, f"killed before change {nth}"
        assert not recover(copy, config=CONFIG, prefix=prefix).changed
        assert again.log_end == whole.log_end
    assert nth > 20


# --- manifest and guard ---


@pytest.mark.parametrize("state", ["missing", "empty"])
def test_the_guard_is_put_back(tmp_path: Path, state: str) -> None:
    """Creation was killed between manifest and guard: without it a Java broker would cut the log."""
    made = make(tmp_path / "store")
    guard = made.path / "commitlog" / "mqstore.profile"
    text = guard.read_bytes()
    guard.unlink()
    if state == "empty":
        guard.touch()
    with made.open():
        assert guard.read_bytes() == text


# --- where the log goes on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 2000])
@pytest.mark.parametrize("crashed", [False, True])
def test_a_short_file_that_becomes_the_last_one_is_written_on(tmp_path: Path, length: int, crashed: bool) -> None:
    """It was short in the middle, so nobody gave it its length; then what was behind it went, and each put that came to
    its end raised IndexError."""
    made = make(tmp_path / "s")
    starts = sorted(int(file.name) for file in (made.path / "commitlog").iterdir() if file.name.isdigit())
    os.truncate(made.segment(starts[1]), length)
    if crashed:
        (made.path / "abort").write_text("1")
        (made.path / "checkpoint").unlink()
    else:
        for start in starts[2:]:
            made.segment(start).write_bytes(bytes(SEGMENT))
    expected = made.recover(dry_run=True, prefix=crashed).as_dict()
    report = made.recover(prefix=crashed).as_dict()
    told = report.keys() - {"seconds", "kept"}
    assert {name: report[name] for name in told} == {name: expected[name] for name in told}
    assert not made.recover().changed
    with made.open() as store:
        receipts = [store.put("orders", body(n), 0) for n in range(100)]
    with made.open("r") as store:
        assert [store.read(*r.queue, r.offset, 1)[0].body for r in receipts] == [body(n) for n in range(100)]
    lengths = {file.stat().st_size for file in (made.path / "commitlog").iterdir() if file.name.isdigit()}
    assert lengths == {SEGMENT}


# --- JSON files that mean nothing -------------------------------------------------------------------------------------


def refuse_strings(value: dict[str, Any]) -> None:
    if not all(type(each) is int for each in value.values()):
        raise ValueError("numbers only")


CHECKS = {"config/x.json": refuse_strings}


def with_json(made: Made, text: str, backup: str | None) -> Path:
    """Write a file that CHECKS knows, and its backup; return their folder."""
    folder = made.path / "config"
    folder.mkdir(exist_ok=True)
    (folder / "x.json").write_text(text)
    if backup is not None:
        (folder / "x.json.bak").write_text(backup)
    return folder


@pytest.mark.parametrize("text", ['{"n": "five"}', "{", ""])
def test_damaged_json_backup_is_reported_and_repaired(tmp_path: Path, text: str) -> None:
    """Nobody looked at it: that there was one good copy left showed when that was damaged, too."""
    made = make(tmp_path / "s")
    folder = with_json(made, '{"n": 5}', text)
    with made.open("r") as store:
        assert [(f.kind, f.file) for f in store.verifier(CHECKS).findings()] == [("bad_json", "config/x.json.bak")]
    dry = made.recover(checks=CHECKS, dry_run=True)
    assert ([f.file for f in dry.findings], dry.changed) == (["config/x.json.bak"], True)
    assert (folder / "x.json.bak").read_text() == text
    report = made.recover(checks=CHECKS)
    assert ([f.file for f in report.findings], report.changed) == (["config/x.json.bak"], True)
    assert (folder / "x.json").read_text() == (folder / "x.json.bak").read_text() == '{"n": 5}'
    assert [path.read_text() for path in folder.glob("*.corrupt-*")] == [text]
    again = made.recover(checks=CHECKS)
    assert (again.findings, again.changed) == ([], False)


@pytest.mark.parametrize("loss", ["queue", "last file", "last units"])
def test_a_queue_that_lost_files_is_rebuilt(path: Path, loss: str, caplog: pytest.LogCaptureFixture) -> None:
    """It was numbered anew from where its files ended, and old messages were out of sight."""
    with open_store(path) as store:
        for n in range(60):
            store.put("t", b"%d" % n, n % 2)
        store.put("last", b"x")
    file = path / "consumequeue" / "t" / "0" / f"{480:020d}"
    if loss == "queue":
        shutil.rmtree(file.parent)
    elif loss == "last file":
        file.unlink()
    else:
        file.write_bytes(bytes(160))
    with open_store(path, "r"):
        assert "queues have lost files" in caplog.text
    with open_store(path) as store:
        assert store.recovery.changed
        assert store.put("t", b"new", 0).offset == 30
        assert [message.offset for message in store.iter("t", 0)] == [*range(31)]
    with open_store(path) as store:
        assert store.recovery.scanned_from is None
        assert not list(store.verifier().findings())


def test_a_queue_whose_units_are_zeros_is_built_again_after_a_kill(path: Path) -> None:
    """Its records lie before the range that is read, and nothing in the range belongs to it."""
    store = open_store(path)
    store.put_many("early", [b"a", b"b", b"c"], queue_id=0)
    store.put_many("t", [bytes(100)] * 100, queue_id=0)
    checkpointed(store)
    kill(store)
    (file,) = (path / "consumequeue/early/0").iterdir()
    file.write_bytes(bytes(file.stat().st_size))
    with open_store(path) as store:
        assert [message.body for message in store.iter("early", 0)] == [b"a", b"b", b"c"]
        assert store.recovery.scanned_from == 0


def test_a_close_that_knew_nothing_of_queues_still_counts(path: Path) -> None:
    """A former version left the field at zero."""
    with open_store(path) as store:
        store.put("t", b"x")
    overwrite(path / "checkpoint", 100, bytes(12))
    with open_store(path) as store:
        assert store.recovery.scanned_from is None
