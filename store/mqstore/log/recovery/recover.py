"""Recovery of a possibly damaged store that is opened for writing (format#damage, format#opening).

Only the commitlog is trusted. Recovery finds the end of the log, distinguishes a torn tail from damage, and makes the
consume queues and the index agree with the log:

    F  watermark: all bytes below it were synced
    S  start of reading                     E  end of the log
    ----------- S ===== scanned ===== E        everything in [S, E) gets its unit; beyond E there will be zeros

    bad bytes at p
    no whole record after them                   E = p                    torn_tail (lost_tail when p < F: goes to cut/)
    whole records after, p is a torn tail        E = p, they go to cut/   torn_tail
    whole records after, p is damage             skipped                  bad_record

The watermark decides when p is a torn tail. For `mqstore recover` it never is, except with `--prefix`.

Every step may be repeated. The `abort` mark stays until the end, so after a kill the next opening does the same again.
Two facts would be lost with the process, so `_begin` saves them in the checkpoint before the first change. These are F
of a store that ended cleanly, and the position from which units and index entries are uncertain. If the checkpoint is
lost, the store saves F before it sets the mark. With `dry_run` nothing is written, and the report lists the changes.

Bytes of a killed process may be in the page cache alone. After a failed fsync they look as if they were on disk. From
here on they count as durable, so recovery writes all bytes beyond the old watermarks again before it syncs.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from mqstore import arrays as np
from mqstore.files.segment import LoadProblem, place_in_file
from mqstore.files.segmentwriter import EXTENDED
from mqstore.layout.arrays.dispatch import Rows
from mqstore.layout.arrays.scan import Headers
from mqstore.layout.consumequeue import VOID_SIZE, differing, is_void, unit_dtype
from mqstore.layout.record import QUEUE_OFFSET_AT
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.directory.names import is_path_safe
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.recovery.indexrepair import IndexRepair
from mqstore.log.recovery.misnamed import MisnamedSegmentsError, misnamed_segments, surplus_pieces
from mqstore.log.recovery.offset_assigner import (
    Misnumbered,
    OffsetAssigner,
    TopicGenerations,
    first_slot_in_range,
    strays_in_front,
    unit_findings,
)
from mqstore.log.recovery.report import Cut, Finding, RecoveryReport, finding_of
from mqstore.log.recovery.scanning.scanner import NEVER_TORN, Bad, End, Good, batch_for, scan_log, until_torn
from mqstore.log.recovery.scanning.scanstart import ScanStart, WholeLogNeededError
from mqstore.log.recovery.tail import COPY_BYTES, Tail
from mqstore.log.writing.log_tail import QueueRef
from mqstore.logger import log as _log

_VOIDS = 1 << 16
"""Void units written at a time. A damaged queue offset may require many."""

Progress = Callable[[int, int], None]
"""Function called from time to time with (bytes done, total bytes)."""


class RecoverOptions(NamedTuple):
    """Options of `mqstore recover` beyond those of an opening."""

    full: bool = False
    """Read the whole log and compare every queue and the index with it."""
    dry_run: bool = False
    prefix: bool = False
    """End the log at the first damage, as the Java broker would, instead of passing over it."""
    copied_live: bool = False
    """The files were copied while a writer ran, the log first. So units beyond the end of the log show no loss."""
    rebuild_index: bool = False
    """Rebuild the index even if it seems correct."""


@dataclass(slots=True)
class Outcome:
    """Result of a recovery, with values for the next checkpoint."""

    report: RecoveryReport
    end: int
    last_record: int
    last_store_timestamp_ms: int


def recover(parts: StoreParts, options: RecoverOptions, progress: Progress | None = None) -> Outcome:
    """Repair the store, or with `dry_run` report the repair. May be repeated.
    Raises StoreIOError, StoreFullError, and MisnamedSegmentsError before anything is changed."""
    try:
        return _Recovery(parts, options, progress, whole=False).run()
    except WholeLogNeededError:
        return _Recovery(parts, options, progress, whole=True).run()


def unlisted_queue(parts: StoreParts, wanted: Callable[[str], bool], *, whole: bool = False) -> QueueRef | None:
    """Return a queue of a `wanted` topic to which recovery will add units after its end or before its first file.
    Returns None without such a queue. Reads headers from S on (with `whole` all), up to the first such record."""
    if not parts.log_files.starts:
        return None
    generations = TopicGenerations(parts)
    start = ScanStart(parts, whole=whole).start()
    found = scan_log(parts.log_files, start, parts.checksum, checksums=False)
    for event in until_torn(found, lambda: parts.torn_from(start)):
        if not isinstance(event, Good):
            continue
        rows = parts.queue_table.rows_of(event.buffer, event.headers, event.base)
        for topic, queue_id, offsets, units in rows.queues().each():
            if queue_id < 0 or not is_path_safe(topic) or not wanted(topic):
                continue
            queue = parts.queue_table.create(topic, queue_id)
            kept = generations.current(queue, offsets, units["physical_offset"])
            if kept is not None:
                offsets = offsets[kept]
            if len(offsets) and (offsets.max() >= queue.max_offset or 0 <= offsets.min() < queue.first_offset()):
                return queue.ref
    return None


class _Recovery:
    def __init__(self, parts: StoreParts, options: RecoverOptions, progress: Progress | None, *, whole: bool) -> None:
        self.parts = parts
        self.options = options
        self.progress = progress
        self.whole = whole or options.full
        self.report = RecoveryReport(clean_shutdown=parts.clean)
        self.writing = not options.dry_run
        self.first = parts.log_files.min_offset
        noted = parts.checkpoint.log_start
        # Where the log should begin. Segments between it and `first` are lost.
        self.log_start = self.first if noted is None else min(noted, self.first)
        self.start = self.first  # records from here on get their units
        self.slots = OffsetAssigner(parts, self._first_slot)
        self.damage: list[tuple[int, int]] = []  # ranges [start, stop) of the log, ascending
        self.touched: set[ConsumeQueue] = set()
        self.index = IndexRepair(
            parts, self.report, whole=self.whole, force=options.rebuild_index, writing=self.writing
        )
        self.tail = Tail(parts, self.report, writing=self.writing)
        self.last_record = -1
        self.last_store_timestamp_ms = 0
        # Units of records from this offset on may never have been synced. After a clean end all were.
        dispatched = parts.checkpoint.dispatched
        self.unsynced_from = 1 << 62 if parts.clean else dispatched if dispatched is not None else 0

    def run(self) -> Outcome:
        begin = time.monotonic()
        parts, report = self.parts, self.report
        for problem in parts.load_problems:
            if problem.kind != "missing_segment":
                self._note_load_problem(problem)
        report.changed |= bool(parts.queue_table.short_files) or (
            self.options.full and parts.bad_checkpoint() is not None
        )
        if self.writing:
            parts.queue_table.lengthen()  # units will be rebuilt from the log
        if parts.log_files.starts:
            where = ScanStart(parts, whole=self.whole)
            known = where.clean_end(self.log_start)
            self.last_record, self.last_store_timestamp_ms = where.last_record, where.last_store_timestamp_ms
            end = self._scan(where.start()) if known is None else known
        else:
            end = self._empty_log()
        if self.writing:
            parts.queue_table.sync()
            parts.queue_table.short_files.clear()
            parts.index.sync()
            if not parts.clean:
                # Names that a killed process created may never have been synced. Its bytes are written again where they
                # are read (`_repair`, `_write_again`).
                if parts.log_files.starts:
                    parts.fs.sync_directory(parts.log_files.directory)
                parts.index.sync_all()
        for queue in parts.queue_table:
            queue.correct_min(self.first)
        report.seconds = time.monotonic() - begin
        report.log_end = end
        for finding in report.findings:
            _log.warning("%s: %s at %d: %s", finding.kind, finding.file, finding.position, finding.detail)
        if report.moved_to_cut and self.writing:
            _log.warning(
                "%s: %d whole messages after damage at %d were moved to cut/. `mqstore quarantine list %s` lists them, "
                "`mqstore quarantine restore` appends them again",
                parts.root,
                report.moved_to_cut,
                end,
                parts.root,
            )
        return Outcome(report, end, self.last_record, self.last_store_timestamp_ms)

    def _note_load_problem(self, problem: LoadProblem) -> None:
        """Report a problem found by listing the segments.
        A writer has already extended a short last segment. A dry run only reports it."""
        run, report = self.parts.log_files, self.report
        finding = finding_of(problem, run.segment_bytes)
        if problem.kind == "empty_segment" and problem.position >= run.end:
            report.truncated.append(Cut(finding.file, 0, 0, "empty file"))
            report.changed = True
            return
        # A short last segment is extended. A surplus stays.
        if problem.kind == "segment_size" and run.starts and run.starts[-1] < problem.position < run.end:
            report.changed = True
            if not self.writing:
                finding = replace(finding, detail=finding.detail + EXTENDED)
        report.findings.append(finding)

    def _refuse_misnamed(self, start: int) -> None:
        """Raise MisnamedSegmentsError if segments from physical offset `start` on are in wrong files.
        `mqstore recover` and a plan have put all segments in their places before."""
        parts = self.parts
        if self.options.full or self.options.dry_run:
            return
        places = misnamed_segments(parts.log_files, parts.checksum, parts.fs, start)
        pieces = surplus_pieces(parts.log_files, parts.load_problems, parts.checksum, parts.fs)
        places |= {piece.name: piece.start for piece in pieces if piece.kind == "missing"}
        if places:
            raise MisnamedSegmentsError(parts.root, places)

    def _empty_log(self) -> int:
        """Recover a log without any segment. It continues after the last known physical offset.
        So old units point below its start, and queue offsets continue. If no checkpoint has that offset, the log begins
        at 0 and units into it are cut."""
        self._refuse_misnamed(0)
        checkpoint = self.parts.checkpoint
        end = max(checkpoint.clean_end or 0, checkpoint.flushed or 0)
        end += -end % self.parts.log_files.segment_bytes
        self.first = self.start = end
        if end:
            detail = "the commitlog folder is empty"
            self.report.findings.append(Finding("missing_segment", "commitlog", 0, end, detail))
        self._begin(end, end, end)
        self._note_lost_tail(end, end)
        self._finish_queues(end)
        self.index.rebuild()
        self.index.finish(end)
        return end

    def _torn_from(self, mark: int) -> int:
        """Return the physical offset from which bad bytes are a torn tail. `mark` is the watermark."""
        if self.options.prefix:
            return 0
        return NEVER_TORN if self.parts.machine_ran_on or (self.options.full and not self.parts.clean) else mark

    def _begin(self, watermark: int, start: int, index_from: int) -> None:
        """Save the facts that a kill during recovery would lose. Called before the first change.
        The next opening then finds the same F, and reads at least the range that this one reads."""
        if not self.writing:
            return
        checkpoint = self.parts.checkpoint
        uncertain = (start, index_from, watermark, checkpoint.dispatched)
        dispatched = min(each for each in uncertain if each is not None)
        noted = replace(checkpoint, flushed=watermark, dispatched=dispatched, clean_end=-1)
        if noted != checkpoint:
            self.parts.checkpoint_file.save(noted)

    def _scan(self, start: int) -> int:
        parts, report = self.parts, self.report
        run = parts.log_files
        self.start = start
        self._refuse_misnamed(start)
        mark = parts.watermark(start)
        gap = self._gap_in_front()
        torn_from = self._torn_from(mark)
        if gap is not None and gap.start >= torn_from:  # no record was synced: the log ends where it began
            self.first = self.start = start = gap.start
        elif gap is not None:
            self._note_damage(gap)
            gap = None
        report.scanned_from = start
        index_from = self.index.plan(start, self.first)
        self._begin(mark, start, index_from)
        read_from = min(start, max([s for s in run.starts if s <= index_from], default=start))
        for problem in parts.load_problems:
            # Reading finds a gap, but not a problem before the start of the log or after its end.
            if problem.kind == "missing_segment" and not read_from <= problem.position < run.end:
                found = finding_of(problem, run.segment_bytes)
                if (found.kind, found.file) not in {(each.kind, each.file) for each in report.findings}:
                    report.findings.append(found)
        total = run.end - read_from
        last = End(read_from, "")
        batch = batch_for(len(parts.queue_table))
        events = scan_log(run, read_from, parts.checksum, batch=batch) if gap is None else (gap,)
        for event in until_torn(events, lambda: torn_from):
            if isinstance(event, Good):
                self._take(event)
                if self.progress is not None:
                    self.progress(event.end - read_from, total)
            elif isinstance(event, Bad):
                self._note_damage(event)
            else:
                last = event
        end, torn = last.position, last.torn
        # If a queue file was cut, or lost all its units, records before the range may lack their units.
        has_short_files = bool(parts.queue_table.short_files) and not parts.clean
        if start > self.first and (has_short_files or any(map(self._lacks_units, parts.queue_table))):
            raise WholeLogNeededError
        if not self.whole and self.index.reaches(end):
            raise WholeLogNeededError
        self.start = min(start, end)  # index entries may have been read from an earlier offset
        if not self.options.prefix:
            self._note_lost_tail(end, mark)
        cuts, report.moved_to_cut = self.tail.plan(last)
        why = "torn_tail"
        if torn is not None:
            why = "prefix" if self.options.prefix else why
        elif last.detail:
            why = f"torn_tail: {last.detail}"
        # A torn record alone was never acknowledged. Synced bytes and whole records may be the only copy.
        self.tail.cut(end, cuts, why, keep=torn is not None or end < mark)
        self._finish_queues(end)
        self.index.finish(end)
        if self.writing and not parts.clean and parts.checkpoint.flushed is not None:
            self._write_again(max(parts.checkpoint.flushed, self.first), end)
        if self.progress is not None:
            self.progress(total, total)
        return end

    def _lacks_units(self, queue: ConsumeQueue) -> bool:
        """Return True if the last file of a queue has no unit, and the range had no record of the queue.
        Then units may be lost, since a file is only created for the unit of a record."""
        return (
            not self.slots.is_met(queue) and bool(queue.list_files()) and queue.max_offset <= queue.last_file_offset()
        )

    def _gap_in_front(self) -> Bad | None:
        """Return the range of the segments that are missing at the start of the log, or None."""
        if self.log_start == self.first:
            return None
        why = self.parts.log_files.reasons(self.log_start, self.first)
        detail = f"the log begins at {self.log_start}, but no file has [{self.log_start}, {self.first}){why}"
        return Bad("missing_segment", self.log_start, self.first, detail)

    def _write_again(self, start: int, end: int) -> None:
        """Write the bytes of [start, end) to themselves, so that the next sync really writes the pages.
        After a failed fsync the kernel treats unwritten pages as written (format#flush)."""
        run = self.parts.log_writer
        for segment in run.segments():
            if segment.end <= start:
                continue
            # Holes stay holes: a segment that ended early has one after its BLANK.
            at = max(start - segment.start, 0)
            stop = min(run.data_end(segment, at), end - segment.start)
            for place in range(at, stop, COPY_BYTES):
                run.write(segment.start + place, run.mapping(segment)[place : min(place + COPY_BYTES, stop)])

    def _take(self, good: Good) -> None:
        """Write the units of a record batch, and keep its index entries."""
        places = good.headers.positions
        if good.base + places.item(0) < self.start < good.end:  # only the index needs the segments before `start`
            before = places < self.start - good.base
            for part, end in (before, self.start), (~before, good.end):
                if part.any():
                    self._take(good._replace(headers=Headers(good.buffer, places[part]), end=end))
            return
        rows = self.parts.queue_table.rows_of(good.buffer, good.headers, good.base)
        self.last_record = int(rows.physical_offset[len(rows) - 1])
        self.last_store_timestamp_ms = int(rows.store_timestamp_ms[len(rows) - 1])
        if good.end > self.start:
            self.report.messages += len(rows)
            if self.report.damaged_ranges:
                self.report.quarantined += len(rows)
            self._give_units(rows)
        self.index.take(rows)

    def _give_units(self, rows: Rows) -> None:
        for found in self.slots.place(rows, skip_listed=not self.writing):
            if isinstance(found, Finding):
                self.report.findings.append(found)
                continue
            if isinstance(found, Misnumbered):
                if found.slot is None:
                    self.report.findings.append(found.finding(self.parts.log_files.segment_bytes))
                else:
                    self._renumber(found.physical_offset, found.slot)
                continue
            queue, first, expected, units, is_first, seen = found
            if is_first:
                self._mend_front(queue, min(first, expected))
            if first > expected:
                if is_first and self.start > self.first:
                    self._doubt_gap(queue, expected, first)
                self._note_gap(queue, expected, first, seen, int(units["physical_offset"][0]))
                self._void(queue, expected, first)
            self._repair(queue, first, units)

    def _first_slot(self, queue: ConsumeQueue, least: int) -> tuple[int | None, int]:
        """Return the result of `first_slot_in_range`.
        Raises WholeLogNeededError if a slot from `least` on points to a record before the range. Only all records
        together show which record owns the slot, as they did when that unit was written."""
        for _, units in queue.held(least, queue.max_offset) if self.start > self.first else ():
            if ((units["physical_offset"] < self.start) & (units["size"] > 0) & ~is_void(units)).any():
                raise WholeLogNeededError
        return first_slot_in_range(queue, self.start, least)

    def _renumber(self, position: int, slot: int) -> None:
        """Write a new queue offset into a record whose checksum does not cover it."""
        self.report.renumbered += 1
        self.report.changed = True
        if self.writing:
            self.parts.log_writer.own(position)
            self.parts.log_writer.write(position + QUEUE_OFFSET_AT, slot.to_bytes(8, "big"))

    def _mend_front(self, queue: ConsumeQueue, stop: int) -> None:
        """Void units before slot `stop` that point into the log, since retention removed their records."""
        if self.start > self.first:
            return  # such a unit may have its record before the range being read
        for low, high in strays_in_front(queue, stop, self.first):
            self._void(queue, low, high)

    def _doubt_gap(self, queue: ConsumeQueue, low: int, high: int) -> None:
        """Raise WholeLogNeededError if a unit is missing where the queue enters the range.
        Either damage destroyed its record, or the record is before the range and has lost its unit."""
        for _, units in queue.chunks(low, high):
            if (units["size"] <= 0).any():
                raise WholeLogNeededError

    def _repair(self, queue: ConsumeQueue, first: int, units: np.NDArray[np.void]) -> None:
        """Write `units` to slots [first, first + len) where they differ, and count the differences.
        Units that may never have been synced are written, too, but not counted."""
        data = (queue.read if self.writing else queue.kept)(first, len(units))
        if not self.writing and data == units.tobytes():
            return
        found = np.frombuffer(data, units.dtype)
        low, high = 0, len(units)
        if self.unsynced_from > 0 or (found.view(np.uint32) != units.view(np.uint32)).any():
            units = queue.as_kept(found, units)
            wrong = differing(found, units)
            count = int(np.count_nonzero(wrong))
            if count:
                self.report.rebuilt.units += count
                self.touched.add(queue)
                self.report.changed = True
            at = np.flatnonzero(wrong | (units["physical_offset"] >= self.unsynced_from))
            low, high = (int(at[0]), int(at[-1]) + 1) if len(at) else (0, 0)
        if not self.writing:
            return
        if low < high:
            queue.write(first + low, units[low:high].view(np.uint8).data)
            queue.write_back(first + low, first + high)
            self.parts.queue_table.note_names(queue.directory)
        queue.publish(first + len(units))

    def _void(self, queue: ConsumeQueue, low: int, high: int) -> None:
        """Make slots [low, high) void, since they no longer have a record (format#void)."""
        if not queue.list_files() and queue not in self.touched:
            return
        for at in range(low, high, _VOIDS):
            units = np.zeros(min(_VOIDS, high - at), unit_dtype())
            units["size"] = VOID_SIZE
            self._repair(queue, at, units)

    def _note_damage(self, bad: Bad) -> None:
        name, at = place_in_file(bad.start, self.parts.log_files.segment_bytes)
        findings = self.report.findings
        # The listing of segments knows the start of such a range, but not its end.
        findings[:] = [each for each in findings if (each.kind, each.file, each.position) != (bad.kind, name, at)]
        findings.append(Finding(bad.kind, name, at, bad.end - bad.start, bad.detail))
        self.report.damaged_ranges += 1
        self.damage.append((bad.start, bad.end))

    def _note_gap(self, queue: ConsumeQueue, low: int, high: int, start: int, stop: int) -> None:
        """Report slots [low, high) that lost their records, unless damage in [start, stop) of the log explains it.
        Void slots were reported by an earlier recovery."""
        before = bisect_left(self.damage, (stop,))
        if before and self.damage[before - 1][1] > start:
            return
        for at, units in queue.chunks(low, high):
            detail = "their records are not in the log, without damage where they were"
            self.report.findings += unit_findings(queue, "bad_unit", at, ~is_void(units), detail)

    def _note_lost_tail(self, end: int, mark: int) -> None:
        """Report that records existed beyond the end of the log, before the evidence is removed."""
        parts, options = self.parts, self.options
        lost = self.slots.lost_tail(() if options.copied_live else parts.queue_table, self.start, end, mark)
        if lost is not None and (end < mark or options.full or parts.clean or parts.machine_ran_on):
            self.report.findings.append(lost)
        elif lost is not None:  # the machine went down, and may have lost them: for an opening that is not damage
            _log.warning("%s: the log ends at %d: %s", parts.root, end, lost.detail)

    def _finish_queues(self, end: int) -> None:
        """Remove units after each queue's last record that point into the scanned range or beyond its end."""
        for queue in self.parts.queue_table:
            first, zero_from, *_, seen = self.slots.behind(queue, self.start, end)
            if not self.slots.is_met(queue):
                self._mend_front(queue, first)
            if zero_from > first:
                self._note_gap(queue, first, zero_from, seen, end)
                self._void(queue, first, zero_from)
            if zero_from < queue.max_offset:
                self.report.changed = True
                self.touched.add(queue)
                self.report.rebuilt.units += queue.max_offset - zero_from
                if self.writing:
                    queue.zero_from(zero_from)
            queue.next_offset = queue.max_offset
        self.report.rebuilt.consume_queues = len(self.touched)
