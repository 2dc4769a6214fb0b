"""A scan beside a writer: what was half-way in when it was looked at is whole by the time that more lies behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mqstore import SimulatedClock, StoreConfig
from mqstore.files.segment import Segment
from mqstore.files.segments import SegmentRun
from mqstore.layout.indexfile import IndexHeader
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.recovery.scanning import scanner
from mqstore.log.recovery.scanning.scanner import Bad, End, Good, record_at, scan_log, scan_segment
from mqstore.log.store import MessageStore
from tests.log.support import overwrite


def test_a_record_finished_during_the_scan_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` beside a busy writer reported a bad record now and then: the scan saw zeros, the writer put two records
    there, and the second one then seemed to lie behind damage."""
    with MessageStore(tmp_path, config=StoreConfig(segment_bytes=1 << 14, clock=SimulatedClock())) as writer:
        writer.put("orders", b"before")
        look = scanner.used_end
        looks = 0

        def look_later(*arguments: object) -> int:
            nonlocal looks
            looks += 1
            if looks == 1:
                writer.put_many("orders", [b"meanwhile", b"and this"])
            return look(*arguments)  # type: ignore[arg-type]  # passed through

        monkeypatch.setattr(scanner, "used_end", look_later)
        with ReadOnlyMessageStore(tmp_path) as reader:
            events = list(scan_log(reader.log_files, 0, reader.manifest.checksum))

    assert looks > 0
    assert not [event for event in events if isinstance(event, Bad)]
    assert sum(len(event.headers) for event in events if isinstance(event, Good)) == 3


def test_a_segment_begun_during_the_scan_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the log had ended there were zeros, and suddenly records in the file behind, which a Java broker makes
    ahead of time."""
    with MessageStore(tmp_path, config=StoreConfig(segment_bytes=1 << 14, clock=SimulatedClock())) as writer:
        places = [writer.put("orders", b"some").physical_offset for _ in range(200)]
    files = [tmp_path / "commitlog" / f"{start:020d}" for start in (0, 1 << 14)]
    whole = [file.read_bytes() for file in files]
    files[0].write_bytes(whole[0][: places[100]].ljust(1 << 14, bytes(1)))
    files[1].write_bytes(bytes(1 << 14))
    look = scanner.first_good_in

    def look_later(run: SegmentRun, segment: Segment, *arguments: Any) -> int | None:
        for file, data in zip(files, whole, strict=True) if segment.start else ():
            overwrite(file, 0, data)
        return look(run, segment, *arguments)

    monkeypatch.setattr(scanner, "first_good_in", look_later)
    with ReadOnlyMessageStore(tmp_path) as reader:
        events = list(scan_log(reader.log_files, 0, reader.manifest.checksum))

    assert not [event for event in events if isinstance(event, Bad)]
    assert sum(len(event.headers) for event in events if isinstance(event, Good)) == 200


def test_check_of_a_store_ends_where_its_log_ended(tmp_path: Path) -> None:
    """Otherwise it would never end beside a thread that puts as fast as it reads."""
    with MessageStore(tmp_path, config=StoreConfig(segment_bytes=1 << 14)) as store:
        put = 0
        while put < 300:  # it ends within several segments
            verifier = store.verifier()
            store.put_many("orders", [bytes(200)] * 70)
            assert (list(verifier.findings()), verifier.messages) == ([], put)
            put += 70


def test_index_entries_put_during_a_check_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header and slots were read one after the other, and a slot then had an entry that the header did not count."""
    decode = IndexHeader.decode

    with MessageStore(tmp_path) as store:
        store.put("orders", b"before", keys="k")
        store.dispatch()

        def decode_slowly(buf: Any) -> IndexHeader:
            header = decode(buf)
            if threading.current_thread() is threading.main_thread():
                store.put("orders", b"since", keys="k")
                time.sleep(0.05)
            return header

        with monkeypatch.context() as patch:
            patch.setattr(IndexHeader, "decode", decode_slowly)
            findings = list(store.verify())
    assert not findings


@pytest.mark.parametrize("stop", [1, 500, 3_000, 1 << 14])
def test_a_scan_of_a_part_ends_where_the_next_part_begins(tmp_path: Path, stop: int) -> None:
    config = StoreConfig(segment_bytes=1 << 14, clock=SimulatedClock())
    with MessageStore(tmp_path, config=config) as writer:
        places = [writer.put("orders", bytes(100 + 7 * i)).physical_offset for i in range(30)]
        end = writer.max_offset
    with ReadOnlyMessageStore(tmp_path) as reader:
        checksum = reader.manifest.checksum
        [segment] = reader.log_files.segments()
        scan = scan_segment(reader.log_files, segment, 0, checksum, stop=stop)
        found = []
        while True:
            try:
                event = next(scan)
            except StopIteration as over:
                ended = over.value
                break
            assert isinstance(event, Good)
            found += event.headers.positions.tolist()

    assert found == [place for place in places if place < stop]
    assert ended == next((place for place in places if place >= stop), end)


def _walk_while(
    path: Path, change: Callable[[], None], *, limit: int | None = None, lists: bool = False
) -> tuple[list[int], list[object]]:
    """(fronts that a walk was told of, the other events but for records) of a store that `change` changes at each
    event, and that is then listed again if `lists`."""
    with ReadOnlyMessageStore(path) as reader:
        if limit is not None:
            reader.stop_at(limit)
        fronts: list[int] = []
        told: list[object] = []
        for event in scan_log(reader.log_files, 0, reader.manifest.checksum, on_front=fronts.append):
            if not isinstance(event, Good):
                told.append(event)
            change()
            if lists:
                reader.log_files.refresh()
    return fronts, told


@pytest.fixture(params=[1, 2])
def ten_segments(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Path of a store whose segments a scan reads one by one, or two by two."""
    monkeypatch.setattr(scanner, "joined_bytes", lambda _: request.param << 14)
    with MessageStore(tmp_path, config=StoreConfig(segment_bytes=1 << 14, clock=SimulatedClock())) as writer:
        while writer.max_offset < 10 << 14:
            writer.put("orders", bytes(1000))
    return tmp_path


def _segment(path: Path, number: int) -> Path:
    return path / "commitlog" / f"{number << 14:020d}"


@pytest.mark.parametrize("lists", [False, True])
def test_a_walk_goes_on_at_the_front_that_retention_has_moved(ten_segments: Path, lists: bool) -> None:
    def drop_five() -> None:
        for number in range(5):
            _segment(ten_segments, number).unlink(missing_ok=True)

    fronts, told = _walk_while(ten_segments, drop_five, lists=lists)

    assert fronts == [5 << 14]
    assert len(told) == 1
    assert isinstance(told[0], End)


def test_a_walk_that_is_overtaken_to_its_end_ends_there(ten_segments: Path) -> None:
    def drop_nine() -> None:
        for number in range(9):
            _segment(ten_segments, number).unlink(missing_ok=True)

    assert _walk_while(ten_segments, drop_nine, limit=4 << 14) == ([4 << 14], [End(4 << 14, "")])


def test_no_record_is_in_a_segment_that_retention_has_deleted(ten_segments: Path) -> None:
    """A unit led there: small segments are read without a mapping, so an export ended with "No such file"."""
    with ReadOnlyMessageStore(ten_segments) as reader:
        checksum = reader.manifest.checksum
        _segment(ten_segments, 0).unlink()

        assert record_at(reader.log_files, 0, checksum) is None
        assert record_at(reader.log_files, reader.get("orders", 0, 20).messages[0].physical_offset, checksum)


@pytest.mark.parametrize("lists", [False, True])
def test_a_segment_that_vanishes_from_the_middle_is_missing(ten_segments: Path, lists: bool) -> None:
    fronts, told = _walk_while(ten_segments, lambda: _segment(ten_segments, 4).unlink(missing_ok=True), lists=lists)

    assert fronts == []
    [bad, _] = told
    assert isinstance(bad, Bad)
    assert (bad.kind, bad.start, bad.end) == ("missing_segment", 4 << 14, 5 << 14)


def test_a_walk_that_does_not_expect_it_says_what_is_gone(ten_segments: Path) -> None:
    with ReadOnlyMessageStore(ten_segments) as reader:
        _segment(ten_segments, 0).unlink()
        with pytest.raises(FileNotFoundError):
            list(scan_log(reader.log_files, 0, reader.manifest.checksum))
