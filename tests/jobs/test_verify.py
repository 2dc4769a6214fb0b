"""A store checked in byte ranges says what it says when checked from end to end, whatever is wrong with it."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqstore.engine import Finding
from mqstore.errors import ConfigError
from mqstore.files.filesystem import FILE_MODE, FileSystem
from mqstore.files.lock import writer_alive
from mqstore.files.readonly_fs import ReadOnlyFileSystem
from mqstore.jobs import recover, verify, verifying
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.reading import opening
from mqstore.jobs.reading.opening import StoreName
from mqstore.jobs.verifying import VerifyReport
from mqstore.jobs.views import view_batch
from mqstore.layout.arrays.scan import find_next
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.recovery.scanning import scanner
from mqstore.log.recovery.verify import verified_ranges
from mqstore.native import kernel
from mqstore.options import Profile
from tests.columnar.support import SEGMENT, Odd, many, write_store
from tests.conftest import GOLDEN_NAMES, Golden
from tests.log.support import files, flip, flip_log, open_store, overwrite_log
from tests.records import encode_record

Told = tuple[str, str, int, int, str]


def told(findings: Iterable[Finding | Any]) -> list[Told]:
    """Findings as values. Those of units are joined where they lie side by side, for who finds them in stretches of
    his own."""
    joined: list[Told] = []
    for each in sorted(findings, key=lambda each: (each.file, each.kind, each.position, each.detail)):
        kind, file, position, length, detail = each.kind, each.file, each.position, each.length, each.detail
        if kind in ("missing_units", "bad_unit"):
            detail = detail.split(": ", 1)[1]
            if joined and joined[-1][:2] == (kind, file) and joined[-1][4] == detail:
                _, _, before, size, _ = joined[-1]
                if before + size == position:
                    joined[-1] = (kind, file, before, size + length, detail)
                    continue
        joined.append((kind, file, position, length, detail))
    return sorted(joined)


def one_process(path: Path) -> tuple[list[Told], int, int]:
    with ReadOnlyMessageStore(path) as store:
        verifier = store.verifier()
        return told(verifier.findings()), verifier.messages, verifier.bytes


def in_ranges(path: Path, range_bytes: int) -> tuple[list[Told], int, int]:
    report = verify(path, range_bytes=range_bytes, max_errors=1 << 30)
    [row] = report.stores
    assert (row.error, row.unlisted) == (None, 0)
    return told(report.findings), row.messages, row.bytes


# -- stores in order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_java_store_is_found_as_by_one_process(golden: Golden, name: str) -> None:
    path = golden(name).path
    before = files(path)

    assert in_ranges(path, 2_500) == one_process(path)

    assert files(path) == before


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Stores of several segments with units, keys, transactions, delays and records of every shape."""
    root = tmp_path_factory.mktemp("masters")
    odd = [Odd(body=b"half", sys_flag=4), Odd(topic="x" * 200, body=b"long topic"), Odd(body=b"")]
    records = many(160)
    records[20:20] = odd
    found = []
    for profile in ("mqstore", "rocketmq"):
        found.append(write_store(root / profile, records, profile, segment_bytes=6_000))
    crashed = root / "crashed"
    shutil.copytree(found[0], crashed)
    (crashed / "abort").write_bytes(b"1")
    return [*found, crashed]


@st.composite
def damages(draw: st.DrawFn) -> list[tuple[int, float, float, str]]:
    """(which file, where in it, how much, what)."""
    kinds = st.sampled_from(["flip", "flip", "zero", "noise", "move", "remove"])
    each = st.tuples(st.integers(0, 1 << 16), st.floats(0, 1), st.floats(0, 0.2), kinds)
    return draw(st.lists(each, min_size=1, max_size=6))


def damage(path: Path, changes: list[tuple[int, float, float, str]]) -> None:
    targets = sorted(
        Path(folder, name)
        for folder, _, names in os.walk(path)
        for name in names
        if folder.split(os.sep)[-1] in ("commitlog", "index") or "consumequeue" in folder
    )
    logs = [target for target in targets if target.parent.name == "commitlog" and target.name.isdigit()]
    targets = logs * 3 + targets
    for which, where, much, kind in changes:
        target = targets[which % len(targets)]
        if not target.exists() or target.name == "mqstore.profile":
            continue
        data = bytearray(target.read_bytes())
        at = min(int(where * len(data)), len(data) - 1)
        stop = min(len(data), at + 1 + int(much * len(data)))
        if kind == "flip":
            data[at] ^= 1 << which % 8
        elif kind == "zero":
            data[at:stop] = bytes(stop - at)
        elif kind == "noise":
            data[at:stop] = random.Random(which).randbytes(stop - at)
        elif kind == "move":
            data[at:stop] = data[: stop - at]
        elif which % 4 == 0:
            target.unlink()
            continue
        target.write_bytes(data)


@given(which=st.integers(0, 2), changes=damages(), range_bytes=st.integers(120, 9_000))
def test_ranges_of_any_size_find_the_same_damage(
    masters: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
    which: int,
    changes: list[tuple[int, float, float, str]],
    range_bytes: int,
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "s"
    shutil.copytree(masters[which], path)
    damage(path, changes)

    found = one_process(path)
    assert in_ranges(path, range_bytes) == found
    with pytest.MonkeyPatch.context() as patch:  # the index held against some records at a time
        patch.setattr("mqstore.log.recovery.verify._ENTRIES_TALLIED", range_bytes % 50)
        assert one_process(path) == found

    shutil.rmtree(path)


@pytest.mark.parametrize("range_bytes", [250, 1_700, 1 << 26])
def test_damage_at_a_seam_is_reported_once(masters: list[Path], tmp_path: Path, range_bytes: int) -> None:
    for number, place in enumerate((5, 250, 1_700, 1_750, 5_500, 6_005, 11_000)):
        path = tmp_path / str(number)
        shutil.copytree(masters[0], path)
        start = place - place % 6_000
        flip(path / "commitlog" / f"{start:020d}", place - start)

        found = in_ranges(path, range_bytes)

        assert found == one_process(path)
        assert [kind for kind, *_ in found[0]].count("bad_record") == 1


# -- seams -------------------------------------------------------------------------------------------------------------


def with_an_image_inside(path: Path) -> Path:
    """A store whose fourth record has in its body a record that verifies where it lies."""
    before, behind = many(3), many(9)[3:]

    def written(body: bytes) -> Path:
        return write_store(path, [*before, Odd(topic="large", body=body), *behind])

    blank = written(bytes(2_000))
    with ReadOnlyMessageStore(blank) as store:
        [large] = store.iter("large")
        at = large.physical_offset + 1_900
        checksum = store.manifest.checksum
    shutil.rmtree(path)
    image = encode_record(
        topic="t",
        body=b"never sent",
        queue_id=0,
        queue_offset=0,
        physical_offset=at,
        born_timestamp_ms=1,
        store_timestamp_ms=1,
        checksum=checksum,
    )
    body_at = at - large.physical_offset - large._record_bytes().index(bytes(2_000))
    body = bytes(body_at) + image
    return written(body + bytes(2_000 - len(body)))


def test_a_record_image_inside_a_body_at_its_own_offset_is_read_over(tmp_path: Path) -> None:
    """A range that began in that body took the image for its first record, and what followed for damage."""
    path = with_an_image_inside(tmp_path / "s")
    with ReadOnlyMessageStore(path) as store:
        log = bytes(store.log_files.mapping(store.log_files.segments()[0]))
        assert find_next(log, log.index(b"never sent") - 91, len(log), 0, store.manifest.checksum) is not None

    reports = [verify(path, range_bytes=size) for size in (300, 700, 1_100, 1_600)]

    assert [(report.findings, report.messages) for report in reports] == [((), 11)] * 4
    assert any(report.stores[0].read_again for report in reports)


def with_a_stale_record_in_a_blank(path: Path) -> Path:
    """A store whose first segment ends in a BLANK, and in it lies a record of an earlier life of the file: what a BLANK
    holds is not defined (format#blank)."""
    write_store(path, [*many(3), Odd(body=bytes(9_000)), Odd(topic="large", body=bytes(9_000))])
    with ReadOnlyMessageStore(path) as store:
        at = 12_000
        [large] = store.iter("large")
        assert large.physical_offset == SEGMENT
        checksum = store.manifest.checksum
    stale = encode_record(
        topic="t",
        body=b"of an earlier life",
        queue_id=0,
        queue_offset=1,
        physical_offset=at,
        born_timestamp_ms=1,
        store_timestamp_ms=1,
        checksum=checksum,
    )
    overwrite_log(path, at, stale)
    return path


def test_a_stale_record_in_a_blank_is_none(tmp_path: Path) -> None:
    path = with_a_stale_record_in_a_blank(tmp_path / "s")
    assert one_process(path)[0] == []

    for size in (500, 3_000, 1 << 26):
        report = verify(path, range_bytes=size)
        assert (report.ok, report.messages) == (True, 6)


def test_ranges_inside_one_large_record_hold_nothing(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", [*many(3), Odd(body=bytes(5_000)), *many(9)[3:]])

    report = verify(path, range_bytes=400)

    assert (report.ok, report.messages) == (True, 11)


def test_segments_that_nobody_has_read_are_read_when_the_store_is_joined(tmp_path: Path) -> None:
    """A writer rolls on between the planning of a job and its end."""
    path = write_store(tmp_path / "s", many(200), segment_bytes=6_000)
    with ReadOnlyMessageStore(path) as store:
        read = store.verifier()
        results = [read.check(piece) for piece in read.ranges(1_000)]
    with ReadOnlyMessageStore(path) as store:
        joined = store.verifier()
        assert [*joined.findings([result for result in results[::2] if result is not None])] == []
        assert joined.messages == 201


def test_findings_of_a_range_are_limited_and_counted(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(60))
    log = path / "commitlog" / f"{0:020d}"
    with ReadOnlyMessageStore(path) as store:
        places = [message.physical_offset for message in store.iter("orders", 0)]
    for place in places[1:]:
        flip(log, place + 100)
    every = verify(path)

    report = verify(path, max_errors=3)

    assert len(every.findings) == every.stores[0].findings >= len(places)
    assert report.stores[0].findings == every.stores[0].findings
    assert report.stores[0].unlisted == every.stores[0].findings - len(report.findings)
    assert [each.kind for each in report.findings].count("bad_record") == 3
    assert set(report.findings) <= set(every.findings)


def test_a_store_is_checked_beside_its_writer(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(100))
    with open_store(path) as writer:
        writer.put("t", b"more")
        writer.dispatch()
        before = files(path)

        report = verify({"live": path}, range_bytes=2_000)

        assert (report.ok, report.messages, report.stores[0].store) == (True, 102, "live")
        assert files(path) == before
        assert writer_alive(path)


def test_a_store_is_opened_once_for_all_its_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each 16 segments were a task, which listed and opened every segment again: hours for 23,000 of them."""
    opened: list[StoreName] = []
    monkeypatch.setattr(verifying, "open_store", lambda name: opened.append(name) or opening.open_store(name))
    paths = [write_store(tmp_path / name, many(1000)) for name in "ab"]

    assert verify(paths[0]).ok
    assert len(opened) == 1
    assert verify(paths).ok
    assert len(opened) <= 1 + 4 * len(paths)


@pytest.mark.parametrize("batch", [1, 7, 1 << 18])
@pytest.mark.parametrize("profile", ["mqstore", "rocketmq"])
def test_damage_in_one_of_many_queues_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: Profile, batch: int
) -> None:
    """The log is read in larger batches if there are many queues, and a plan of `recover` finds the same."""
    with open_store(tmp_path / "s", profile=profile, segment_bytes=1 << 20) as writer:
        for i in range(900):
            writer.put("t", b"x", queue_id=i % 300)
    flip(tmp_path / "s/consumequeue/t/150/00000000000000000000", 20 + 7)  # the physical offset of the second unit
    monkeypatch.setattr(scanner, "_BATCH", 1)
    monkeypatch.setattr(scanner, "_BATCH_MAX", batch)

    report = verify(tmp_path / "s")
    [plan] = recover(tmp_path / "s", dry_run=True)

    assert report.messages == 900
    assert [(each.kind, each.file, each.position, each.length) for each in report.findings] == [
        ("bad_unit", "consumequeue/t/150/00000000000000000000", 20, 20)
    ]
    assert plan.report is not None
    assert (plan.report.rebuilt.units, plan.report.messages) == (1, 900)


@pytest.mark.parametrize("closed", [False, True])
def test_concurrent_puts_are_not_judged(tmp_path: Path, closed: bool) -> None:
    """What was seen of a segment before the writer filled it, and the next one after, looked like damage between."""
    with open_store(tmp_path / "s") as writer:

        def put(count: int, queue_id: int) -> None:
            for i in range(count):
                writer.put("t", bytes(i % 50), queue_id=queue_id, keys=[f"k{i}"])
            writer.dispatch()

        def go_on(done: int, total: int) -> None:
            if not writer.closed:
                put(80, done)  # a queue that was not there, too
            if closed and done == total:
                writer.close()

        put(50, 0)
        report = verify(writer.path, range_bytes=1_000, progress=go_on)
        assert not closed or writer.closed

    assert report.findings == ()
    assert report.messages == 50
    after = verify(tmp_path / "s")
    assert (after.ok, after.findings) == (True, ())
    assert after.messages > 300


def test_a_writer_that_comes_while_a_task_is_at_it_is_noticed(tmp_path: Path) -> None:
    """The store was closed when the task opened it; what is put into its last segment has no unit and no entry yet."""
    path = write_store(tmp_path / "s", many(100))
    with ReadOnlyMessageStore(path) as store:
        verifier = store.verifier()
        first, *others = verifier.ranges(5_000)
        found = [verifier.check(first)]
        with open_store(path) as writer:  # dispatches nothing by itself
            for i in range(20):
                writer.put("t", b"x", keys=[f"new-{i}"])
            found += [verifier.check(piece) for piece in others]
        results = [result for result in found if result is not None]
        assert sum(result.records for result in results) > 101
        assert [part.findings for result in results for part in result.queues.values() if part.findings] == []
        assert [finding for result in results for finding in result.index.findings(store.index)] == []


@pytest.mark.parametrize("options", [{"range_bytes": 0}, {"max_errors": 0}])
def test_sizes_that_are_none_are_refused(tmp_path: Path, options: dict[str, int]) -> None:
    path = write_store(tmp_path / "s", [])

    with pytest.raises(ConfigError, match=next(iter(options))):
        verify(path, **options)  # type: ignore[arg-type]


def test_a_report_is_plain_values(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(10))
    flip_log(path, 300)

    report: VerifyReport = verify(path)

    row = report.to_dict()
    assert row["ok"] is False
    assert set(row["findings"][0]) == {"store", "kind", "file", "position", "length", "detail", "known"}


# -- the view ----------------------------------------------------------------------------------------------------------


def test_view_has_a_row_for_each_range(tmp_path: Path) -> None:
    path = write_store(tmp_path / "s", many(200), segment_bytes=6_000)
    flip(path / "commitlog" / f"{6_000:020d}", 1_000)
    with ReadOnlyMessageStore(path) as store:
        [bad] = [finding for finding in store.verify() if finding.kind == "bad_record"]
        messages = store.verifier()
        list(messages.findings())

    rows = view_batch("verify", StoreName("s", str(path)), SourceOptions(paths=[str(path)])).to_pylist()

    assert [row["file"] for row in rows] == sorted(
        file.name for file in (path / "commitlog").iterdir() if file.name.isdigit()
    )
    assert sum(row["records"] for row in rows) == messages.messages
    assert [row["errors"] > 0 for row in rows] == [row["file"] == f"{6_000:020d}" for row in rows]
    assert rows[1]["first_error"].startswith(f"bad_record at {bad.position} of {bad.file}: ")
    assert {row["store"] for row in rows} == {"s"}
    for row, behind in pairwise(rows):
        assert row["end"] == behind["first"]


def test_the_ranges_of_the_view_know_of_every_stretch_that_is_no_record(tmp_path: Path) -> None:
    """Up to the end of a segment, of a whole one, and where the log should have ended: a row each, as the job finds."""
    path = write_store(tmp_path / "s", [*many(60), *[Odd(topic="u", body=bytes(3000))] * 12])
    segments = [name for name in sorted(os.listdir(path / "commitlog")) if name.isdigit()]
    assert len(segments) == 3
    for number, begin in ((0, 0), (0, 5000), (1, 0), (1, 3100), (2, 0), (2, 3100), (1, None)):
        damaged = tmp_path / f"{number}-{begin}"
        shutil.copytree(path, damaged)
        file = damaged / "commitlog" / segments[number]
        if begin is None:
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:begin] + b"\xff" * (SEGMENT - begin))
        with ReadOnlyMessageStore(damaged) as store:
            wrong = [said for _, errors, said in verified_ranges(store.verifier()) if errors]
        of_log = [each for each in verify(damaged).findings if each.file.startswith("commitlog")]
        [expected] = [f"{each.kind} at {each.position} of {each.file}: {each.detail}" for each in of_log]
        [row] = wrong
        assert expected.startswith(row)  # the job counts the units that lead behind the end, too


@pytest.mark.parametrize("job", [verify, partial(recover, dry_run=True)])
def test_the_file_of_a_small_queue_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Callable[[Path], object]
) -> None:
    """However many ranges the log is read in. Looking at thousands of files again takes longer than all else."""
    with open_store(tmp_path / "s", segment_bytes=SEGMENT, consumequeue_units=1000) as store:
        for n in range(200):
            store.put("t", bytes(500), queue_id=n % 4)
    counts = Counter[str]()

    def pread(self: FileSystem, fd: int, length: int, position: int) -> bytes:
        counts[os.path.relpath(self.path_of(fd), tmp_path / "s")] += 1
        return read(self, fd, length, position)

    read = FileSystem.pread
    monkeypatch.setattr(FileSystem, "pread", pread)
    job(tmp_path / "s")

    assert {name: count for name, count in counts.items() if "consumequeue" in name} == {
        f"consumequeue/t/{queue_id}/{0:020d}": 1 for queue_id in range(4)
    }


@pytest.mark.skipif(kernel is None, reason="without compiled parts the records are read by mappings")
@pytest.mark.parametrize("job", [verify, partial(recover, dry_run=True)])
def test_small_segments_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Callable[[Path], object]
) -> None:
    """Both for their names and for their records. Each is opened once more, to see that it can be."""
    with open_store(tmp_path / "s", segment_bytes=1024) as store:
        for _ in range(100):
            store.put("t", bytes(400), queue_id=0)
    full = sorted((tmp_path / "s" / "commitlog").glob("0*"))[:-2]
    counts = Counter[str]()

    def opened(self: ReadOnlyFileSystem, path: str, flags: int, mode: int = FILE_MODE) -> int:
        counts[os.fspath(path)] += 1
        return open_file(self, path, flags, mode)

    open_file = ReadOnlyFileSystem.open
    monkeypatch.setattr(ReadOnlyFileSystem, "open", opened)
    job(tmp_path / "s")

    assert len(full) > 40
    assert {counts[str(file)] for file in full} == {2}
