"""What opening for writing does to a store that may be damaged (store-format 9.7, 9.8).

The commitlog alone is trusted. From it this finds the end of the log, tells a torn tail from damage, and brings
consume queues and index in line with it:

    F  watermark: below it a bad record is damage, at or above it a torn tail
    S  where reading starts                 E  the end of the log
    ----------- S ===== scanned ===== E        everything in [S, E) gets its unit; beyond E there will be zeros

                     bad bytes at p
    nothing whole behind               E = p                      torn_tail (lost_tail when p < F)
    whole records behind,  p >= F      E = p, they go to cut/     torn_tail
    whole records behind,  p <  F      reported, passed over      bad_record

Every step may be repeated: until the end the `abort` mark stands, and a kill in between lets the next opening derive
the same again. With `dry_run` nothing is written and the report says what would be.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mqstore.clock import Clock
from mqstore.files.filesystem import FileSystem
from mqstore.files.segments import LoadProblem, SegmentRun
from mqstore.layout.checkpoint import Checkpoint, min_timestamp
from mqstore.layout.consumequeue import UNIT_DTYPE, VOID_SIZE, is_void
from mqstore.layout.dispatch import Rows, rows_of
from mqstore.layout.record import Checksum, check_record, decode_record
from mqstore.log.consumequeue import ConsumeQueue, QueueTable
from mqstore.log.index import Index, IndexFile
from mqstore.log.names import is_path_safe
from mqstore.log.report import Cut, Finding, RecoveryReport
from mqstore.log.reput import slot_runs
from mqstore.log.scanner import Bad, End, Good, scan_log
from mqstore.log.verify import missing_entries

__all__ = ["Progress", "RecoverOptions", "recover"]

_log = logging.getLogger("mqstore")
_BEYOND = 1 << 62

Progress = Callable[[int, int], None]
"""Called now and then with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class RecoverOptions:
    """What `mqstore recover` asks beyond an opening."""

    full: bool = False
    """Read the whole log and compare every queue and the index with it."""
    dry_run: bool = False
    truncate: bool = False
    """Cut at the first damage, as the Java broker would, instead of passing over it."""
    keep_cut: Path | None = None
    """Folder for whole records that are cut; None: `cut/` under the root."""
    salvage: Path | None = None
    """Folder for a raw copy of each damaged range, and of every whole record in the segments around them."""
    rebuild_index: bool = False
    """Build the index anew even if nothing seems wrong with it."""


@dataclass(slots=True)
class Parts:
    """The pieces of a store that recovery works on."""

    root: Path
    run: SegmentRun
    queues: QueueTable
    index: Index
    checkpoint: Checkpoint
    has_checkpoint: bool
    clean: bool
    checksum: Checksum
    delay_table_ms: Sequence[int]
    fs: FileSystem
    clock: Clock


@dataclass(slots=True)
class Outcome:
    """Where the log ends, and what the caller puts into the next checkpoint."""

    report: RecoveryReport
    end: int
    last_record: int
    last_store_timestamp_ms: int


def recover(
    parts: Parts, problems: Sequence[LoadProblem], options: RecoverOptions, progress: Progress | None = None
) -> Outcome:
    """Bring the store in order, or with `dry_run` say how. Raises StoreIOError, StoreFullError; may be run again."""
    return _Recovery(parts, problems, options, progress).run()


class _Recovery:
    def __init__(
        self, parts: Parts, problems: Sequence[LoadProblem], options: RecoverOptions, progress: Progress | None
    ) -> None:
        self.parts = parts
        self.options = options
        self.progress = progress
        self.report = RecoveryReport(clean_shutdown=parts.clean)
        self.writing = not options.dry_run
        self.problems = problems
        self.first = parts.run.starts[0] if parts.run.starts else 0
        self.next_slot: dict[ConsumeQueue, int] = {}
        """For each queue met in the scan: the slot behind the last record seen."""
        self.touched: set[ConsumeQueue] = set()
        self.index_entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.salvage_segments: set[int] = set()
        self.last_record = -1
        self.last_store_timestamp_ms = 0

    # -- the whole --------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        begin = time.monotonic()
        parts, report = self.parts, self.report
        for problem in self.problems:
            self._note_load_problem(problem)
        if parts.run.starts:
            known = self._clean_end()
            end = self._scan() if known is None else known
        else:
            end = self._empty_log()
        if report.changed and self.writing:
            parts.queues.sync()
            parts.index.sync()
        for queue in parts.queues:
            queue.correct_min(self.first)
        report.seconds = time.monotonic() - begin
        report.log_end = end
        for finding in report.findings:
            _log.warning("%s: %s at %d: %s", finding.kind, finding.file, finding.position, finding.detail)
        return Outcome(report, end, self.last_record, self.last_store_timestamp_ms)

    def _note_load_problem(self, problem: LoadProblem) -> None:
        name = "commitlog/" + os.path.basename(problem.file)
        if problem.kind == "empty_segment":
            self.report.truncated.append(Cut(name, 0, 0, "empty file"))
            self.report.changed |= self.writing
        elif problem.kind == "segment_size":
            position = problem.position % self.parts.run.segment_bytes
            self.report.findings.append(Finding("segment_size", name, position, problem.length, problem.detail))
        elif problem.kind == "segment_name":
            self.report.findings.append(Finding("segment_size", name, 0, 0, problem.detail))

    def _empty_log(self) -> int:
        """No segment: queues point at nothing. Their numbers go on, so that no offset is given twice."""
        checkpoint = self.parts.checkpoint
        end = max(checkpoint.clean_end or 0, checkpoint.flushed or 0)
        end += -end % self.parts.run.segment_bytes
        self.first = end
        return end

    # -- where to read ----------------------------------------------------------------------------------------------

    def _clean_end(self) -> int | None:
        """The end of the log when the last close vouches for it and nothing contradicts; None: read (9.8)."""
        parts = self.parts
        checkpoint = parts.checkpoint
        if self.options.full or not parts.clean or checkpoint.clean_end is None or checkpoint.clean_end < 0:
            return None
        end = checkpoint.clean_end
        run = parts.run
        if end < self.first or end > run.end or any(p.kind != "segment_name" for p in self.problems):
            return None
        if end > self.first:
            if not len(parts.queues):
                return None
            start = checkpoint.confirm_physical_offset
            segment = run.find(start)
            if segment is not None:
                buffer = run.mapping(segment)
                check = check_record(buffer, start - segment.start, len(buffer), start, parts.checksum)
                if check.status != "ok":
                    return None
                if start + check.size != end and not self._blank_between(start + check.size, end):
                    return None
                self.last_record = start
                self.last_store_timestamp_ms = decode_record(buffer, start - segment.start).store_timestamp_ms
            elif start >= self.first:
                return None
        segment = run.find(end)
        if segment is not None:
            buffer = run.mapping(segment)
            at = end - segment.start
            if any(buffer[at : at + 4096]):
                return None
        return end

    def _blank_between(self, position: int, end: int) -> bool:
        """Whether a BLANK leads from `position` to `end`: the log was closed right behind a roll."""
        segment = self.parts.run.find(position)
        if segment is None or end != segment.end:
            return False
        buffer = self.parts.run.mapping(segment)
        at = position - segment.start
        return (
            at >= len(buffer) or check_record(buffer, at, len(buffer), position, self.parts.checksum).status == "blank"
        )

    def _watermark(self) -> int:
        """F: a bad record below it is damage."""
        parts = self.parts
        checkpoint = parts.checkpoint
        if checkpoint.flushed is not None:
            return max(checkpoint.flushed, checkpoint.clean_end or 0) if parts.clean else checkpoint.flushed
        if parts.clean:
            return _BEYOND
        stamp = checkpoint.physic_msg_timestamp_ms
        if stamp <= 0:
            return self.first
        # A Java store: what was stored before that time had been flushed. Times grow along the log, so look at the
        # first record of each segment, then inside the last one that begins before.
        starts = parts.run.starts
        begin = starts[0]
        for start in starts:
            first = self._first_record_time(start)
            if first is not None and first < stamp:
                begin = start
        for event in scan_log(parts.run, begin, parts.checksum, checksums=False):
            if isinstance(event, Good):
                late = np.flatnonzero(event.headers.store_timestamp_ms >= stamp)
                if len(late):
                    return event.base + int(event.headers.positions[late[0]])
            elif isinstance(event, End):
                return event.position
        return self.first

    def _first_record_time(self, start: int) -> int | None:
        """Store time of the record at the start of a segment; None when it does not verify."""
        segment = self.parts.run.find(start)
        assert segment is not None
        buffer = self.parts.run.mapping(segment)
        if check_record(buffer, 0, len(buffer), start, self.parts.checksum).status != "ok":
            return None
        return decode_record(buffer, 0).store_timestamp_ms or None

    def _scan_start(self) -> int:
        """S (9.8), always the start of a segment."""
        parts = self.parts
        checkpoint = parts.checkpoint
        starts = parts.run.starts
        if self.options.full or not parts.has_checkpoint or not len(parts.queues) or self._some_queue_is_lost():
            return starts[0]
        if checkpoint.flushed is not None and checkpoint.dispatched is not None and not parts.clean:
            mark = min(checkpoint.flushed, checkpoint.dispatched)
            return max([s for s in starts if s <= mark], default=starts[0])
        if parts.clean:
            dispatched = max((self._last_physical(queue)[0] for queue in parts.queues), default=-1)
            for start in reversed(starts):
                if start <= dispatched and self._first_record_time(start) is not None:
                    return start
            return starts[0]
        limit = min_timestamp(checkpoint)
        for start in reversed(starts):
            stamp = self._first_record_time(start)
            if stamp is not None and stamp <= limit:
                return start
        return starts[0]

    def _last_physical(self, queue: ConsumeQueue) -> tuple[int, int, int]:
        """(physical offset, size, slot) of the queue's newest unit that is a message; (-1, 0, -1) without one."""
        end = queue.max_offset
        while end > queue.first_offset():
            count = min(64, end - queue.first_offset())
            units = queue.units(end - count, count)
            live = np.flatnonzero((units["size"] > 0) & ~is_void(units))
            if len(live):
                i = int(live[-1])
                return int(units["physical_offset"][i]), int(units["size"][i]), end - count + i
            end -= count
        return -1, 0, -1

    def _some_queue_is_lost(self) -> bool:
        """Whether the newest unit of a queue points at something else than its record, below where reading starts."""
        parts = self.parts
        if parts.clean and parts.checkpoint.flushed is None:
            return False
        mark = parts.checkpoint.dispatched if parts.checkpoint.dispatched is not None else 0
        for queue in parts.queues:
            physical, size, slot = self._last_physical(queue)
            if not self.first <= physical < mark:
                continue  # beyond the mark it is written anew anyway
            segment = parts.run.find(physical)
            if segment is None:
                return True
            buffer = parts.run.mapping(segment)
            at = physical - segment.start
            if check_record(buffer, at, len(buffer), physical, parts.checksum).size != size:
                return True
            record = decode_record(buffer, at)
            if (record.topic, record.queue_id, record.queue_offset) != (queue.topic, queue.queue_id, slot):
                return True
        return False

    # -- reading and repairing --------------------------------------------------------------------------------------

    def _scan(self) -> int:
        parts, report = self.parts, self.report
        run = parts.run
        watermark = self._watermark()
        start = self._scan_start()
        report.scanned_from = start
        doomed_index, index_from = self._plan_index(start)
        read_from = min(start, index_from)
        total = run.end - read_from
        end = read_from
        tail = ""
        for event in scan_log(run, read_from, parts.checksum):
            if isinstance(event, Good):
                self._take(event, start, index_from)
                end = event.end
                if self.progress is not None:
                    self.progress(end - read_from, total)
            elif isinstance(event, Bad):
                if event.start >= watermark or self.options.truncate:
                    end = event.start
                    tail = event.detail
                    if self.options.truncate and self.options.salvage is not None:
                        self._note_damage(event)
                    self._keep(end, event.end)
                    break
                self._note_damage(event)
                end = event.end
            else:
                end = event.position
                tail = event.detail
        self.report.log_end = end
        if watermark != _BEYOND and end < watermark:
            name, at = self._where(end)
            report.findings.append(
                Finding("lost_tail", name, at, watermark - end, f"the log once reached {watermark} and was synced")
            )
        self._salvage()
        self._cut(end, tail)
        self._finish_queues(start, end)
        self._finish_index(doomed_index)
        if self.progress is not None:
            self.progress(total, total)
        return end

    def _where(self, position: int) -> tuple[str, int]:
        start = position - position % self.parts.run.segment_bytes
        return f"commitlog/{start:020d}", position - start

    def _take(self, good: Good, start: int, index_from: int) -> None:
        """Give the records of one stretch their units, and remember their index entries."""
        rows = rows_of(good.buffer, good.headers, good.base, self.parts.delay_table_ms)
        self.last_record = int(rows.physical_offset[-1])
        self.last_store_timestamp_ms = int(rows.store_timestamp_ms[-1])
        if good.end > start:
            self.report.messages += len(rows)
            for topic, queue_id, chosen in rows.by_queue():
                chosen = chosen[rows.physical_offset[chosen] >= start]
                if not len(chosen):
                    continue
                if queue_id < 0 or not is_path_safe(topic):
                    name, at = self._where(int(rows.physical_offset[chosen[0]]))
                    self.report.findings.append(
                        Finding("unsafe_name", name, at, 0, f"topic {topic!r}, queue {queue_id} can be no folder")
                    )
                    continue
                self._take_queue(self.parts.queues.create(topic, queue_id), rows, chosen, start)
        if len(rows.entry_row):
            physical = rows.physical_offset[rows.entry_row]
            wanted = physical >= index_from
            if wanted.any():
                stamps = rows.store_timestamp_ms[rows.entry_row[wanted]]
                self.index_entries.append((rows.entry_hash[wanted], physical[wanted], stamps))

    def _take_queue(self, queue: ConsumeQueue, rows: Rows, chosen: np.ndarray, start: int) -> None:
        offsets = rows.queue_offset[chosen]
        expected = self.next_slot.get(queue)
        if expected is None:
            expected = self._first_slot_in_range(queue, start, int(offsets[0]))
        for low, high in slot_runs(expected, offsets):
            first = int(offsets[low])
            if first > expected:
                self._void(queue, expected, first)
            self._repair(queue, first, rows.units(chosen[low:high]))
            expected = first + high - low
        self.next_slot[queue] = expected

    def _first_slot_in_range(self, queue: ConsumeQueue, start: int, first_seen: int) -> int:
        """The first slot whose unit points at or beyond `start`, or the slot of the first record seen if that is
        lower. Units grow along the queue, so this looks backwards from the record's slot."""
        slot = first_seen
        while slot > queue.first_offset():
            count = min(1024, slot - queue.first_offset())
            units = queue.units(slot - count, count)
            older = np.flatnonzero((units["physical_offset"] < start) & (units["size"] > 0))
            if len(older):
                return slot - count + int(older[-1]) + 1
            slot -= count
        return slot if queue.list_files() else first_seen

    def _repair(self, queue: ConsumeQueue, first: int, units: np.ndarray) -> None:
        """Make slots [first, first + len) hold `units`; only what differs is written, and counted."""
        differs = queue.units(first, len(units)) != units
        if first > queue.max_offset and not queue.list_files():
            differs[:] = True
        count = int(np.count_nonzero(differs))
        if count:
            self.report.rebuilt.units += count
            self.touched.add(queue)
            self.report.changed = True
            if self.writing:
                at = np.flatnonzero(differs)
                low, high = int(at[0]), int(at[-1]) + 1
                queue.write(first + low, units[low:high].tobytes())
        if self.writing:
            queue.publish(first + len(units))

    def _void(self, queue: ConsumeQueue, low: int, high: int) -> None:
        """Slots [low, high) have no record any more: they become void units (4.3)."""
        if not queue.list_files() or low >= high:
            return
        units = np.zeros(high - low, UNIT_DTYPE)
        units["size"] = VOID_SIZE
        self._repair(queue, low, units)

    def _note_damage(self, bad: Bad) -> None:
        name, at = self._where(bad.start)
        self.report.findings.append(Finding(bad.kind, name, at, bad.end - bad.start, bad.detail))
        if self.options.salvage is not None and self.writing:
            self.report.kept.append(self._copy(self.options.salvage, bad.start, bad.end, "damaged"))
            size = self.parts.run.segment_bytes
            self.salvage_segments.update((bad.start - bad.start % size, bad.end - bad.end % size))

    def _salvage(self) -> None:
        """Copy the whole records of damaged segments, one chain of raw records a segment."""
        folder = self.options.salvage
        if folder is None or not self.writing:
            return
        for start in sorted(self.salvage_segments):
            segment = self.parts.run.find(start)
            if segment is None:
                continue
            records = []
            for event in scan_log(self.parts.run, start, self.parts.checksum):
                if isinstance(event, End) or (isinstance(event, Good) and event.base != start):
                    break
                if isinstance(event, Good):
                    ends = event.headers.positions + event.headers.size
                    pairs = zip(event.headers.positions.tolist(), ends.tolist(), strict=True)
                    records += [event.buffer[a:b] for a, b in pairs]
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = folder / f"{start:020d}-records"
            fs = self.parts.fs
            fd = fs.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            try:
                fs.pwrite(fd, b"".join(records), 0)
                fs.fdatasync(fd)
            finally:
                fs.close(fd)
            self.report.kept.append(str(path))
            self.report.salvaged += len(records)

    def _keep(self, end: int, good_from: int) -> None:
        """Copy whole records that lie behind the cut to `cut/`, one file a stretch."""
        size = self.parts.run.segment_bytes
        stretches: dict[int, int] = {}
        for event in scan_log(self.parts.run, good_from, self.parts.checksum):
            if isinstance(event, Good):
                stretches[event.base] = event.end
        for base, stop in sorted(stretches.items()):
            start = max(end, base)
            name, at = self._where(start)
            reason = "truncate" if self.options.truncate else "torn_tail"
            self.report.truncated.append(Cut(name, at, at + stop - start, reason))
            if self.writing:
                folder = self.options.keep_cut or self.parts.root / "cut"
                stamp = str(self.parts.clock.now_ms())
                self.report.kept.append(self._copy(folder, start, min(stop, base + size), stamp))

    def _copy(self, folder: Path, start: int, stop: int, suffix: str) -> str:
        """Copy bytes [start, stop) of the log, as far as files hold them, to `folder`; the file's path."""
        fs = self.parts.fs
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{start:020d}-{suffix}"
        fd = fs.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            position = start
            while position < stop:
                segment = self.parts.run.find(position)
                if segment is None:
                    position += self.parts.run.segment_bytes - position % self.parts.run.segment_bytes
                    continue
                buffer = self.parts.run.mapping(segment)
                at = position - segment.start
                data = buffer[at : min(len(buffer), at + min(stop - position, 1 << 20))]
                if not data:
                    position = segment.start + self.parts.run.segment_bytes
                    continue
                fs.pwrite(fd, data, position - start)
                position += len(data)
            fs.fdatasync(fd)
        finally:
            fs.close(fd)
        fs.sync_directory(folder)
        return str(path)

    def _cut(self, end: int, tail: str) -> None:
        """Zeros from `end` to the end of its segment, no segments behind (9.6)."""
        run, report = self.parts.run, self.report
        segment = run.find(end)
        if segment is not None:
            buffer = run.mapping(segment)
            last = _last_nonzero(buffer, end - segment.start)
            if last is not None:
                name, at = self._where(end)
                if not any(cut.file == name and cut.start == at for cut in report.truncated):
                    report.truncated.append(Cut(name, at, last + 1, f"torn_tail: {tail}" if tail else "torn_tail"))
                report.changed = True
                if self.writing:
                    run.zero(end)
        # A segment that begins at the end is kept when it is the only one, so that the log remembers where it is.
        doomed = [s for s in run.segments() if s.start >= end and s.start != run.starts[0]]
        for extra in doomed:
            used = _last_nonzero(run.mapping(extra), 0)
            name, _ = self._where(extra.start)
            if used is not None and not any(cut.file == name for cut in report.truncated):
                report.truncated.append(Cut(name, 0, used + 1, "torn_tail"))
            report.changed |= used is not None
        if doomed and self.writing:
            run.drop_from(doomed[0].start)

    def _finish_queues(self, start: int, end: int) -> None:
        """Behind the last record seen no unit may point into the scanned range or beyond its end."""
        for queue in self.parts.queues:
            first = self.next_slot.get(queue)
            if first is None:
                first = self._first_slot_in_range(queue, start, queue.max_offset)
            zero_from = queue.max_offset
            for at, units in queue.chunks(first, queue.max_offset):
                beyond = np.flatnonzero((units["physical_offset"] >= end) | (units["size"] <= 0))
                if len(beyond):
                    zero_from = at + int(beyond[0])
                    break
            if zero_from > first:
                self._void(queue, first, zero_from)
            if zero_from < queue.max_offset:
                self.report.changed = True
                self.touched.add(queue)
                self.report.rebuilt.units += queue.max_offset - zero_from
                if self.writing:
                    queue.zero_from(zero_from)
            queue.next_offset = queue.max_offset
        self.report.rebuilt.consume_queues = len(self.touched)

    # -- the index --------------------------------------------------------------------------------------------------

    def _plan_index(self, start: int) -> tuple[list[IndexFile], int]:
        """(files to be built anew, physical offset from which entries are missing)."""
        parts = self.parts
        files = parts.index.files
        if self.options.full:
            return [], self.first  # decided when all entries are known
        dispatched = parts.checkpoint.dispatched
        stamp = parts.checkpoint.index_msg_timestamp_ms
        doomed: list[IndexFile] = []
        for i, file in enumerate(files):
            header = file.header
            nonsense = not 0 <= header.next_entry <= parts.index.entries_per_file or header.end_timestamp_ms < 0
            if dispatched is not None:
                late = header.end_physical_offset >= dispatched
            else:
                late = not parts.clean and header.end_timestamp_ms > stamp
            if nonsense or (late and not parts.clean):
                doomed = files[i:]
                break
        kept = files[: len(files) - len(doomed)]
        if doomed:
            newest = max((f.header.end_physical_offset for f in kept if f.header.next_entry > 1), default=-1)
            return list(doomed), max(self.first, newest + 1)
        if dispatched is not None and not parts.clean:
            return [], dispatched
        # A Java store, or a clean end that was doubted: entries go on behind the newest one there is.
        newest = max((f.header.end_physical_offset for f in files if f.header.next_entry > 1), default=-1)
        return [], max(start, newest + 1)

    def _finish_index(self, doomed: list[IndexFile]) -> None:
        index, report = self.parts.index, self.report
        if self.options.full:
            if not self.options.rebuild_index and not self._index_lacks_something():
                return
            doomed = list(index.files)
        entries = sum(len(hashes) for hashes, _, _ in self.index_entries)
        report.rebuilt.index_entries += entries
        report.changed |= bool(doomed or entries)
        if self.writing:
            index.remove(doomed)
            for hashes, physical, stamps in self.index_entries:
                index.put(hashes, physical, stamps)
        self.index_entries = []

    def _index_lacks_something(self) -> bool:
        """Whether the files are damaged, or lack an entry that the log asks for."""
        index = self.parts.index
        return bool(index.check() or missing_entries(index, [(hashes, at) for hashes, at, _ in self.index_entries]))


def _last_nonzero(buffer: object, start: int) -> int | None:
    """Position of the last byte at or behind `start` that is not zero; None when there is none."""
    data = np.frombuffer(buffer, np.uint8)  # type: ignore[call-overload]  # an mmap is a buffer
    step = 1 << 20
    high = len(data)
    while high > start:
        low = max(start, high - step)
        found = np.flatnonzero(data[low:high])
        if len(found):
            return low + int(found[-1])
        high = low
    return None
