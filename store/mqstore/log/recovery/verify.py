"""Comparison of every part of a store with the commitlog (format#damage).

Changes nothing, and trusts nothing. Faults are yielded as `Finding`s, in the order log, queues, index, JSON. `mqstore
verify` prints them, tests assert on them, and `mqstore recover` repairs them.

The log is read in ranges (`ranges.py`). `Verifier.findings` reads and joins them one after the other, or joins results
of `Verifier.check` from other processes (`mqstore.jobs.verifying`). A range alone is enough to check records, units
(`compare`) and index entries (`tally`). Checks that need the order of the log (`units`, `straight`, `tails`) follow
when all ranges of a segment are available.

The class is long because the comparisons share what one pass over the log has found.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from mqstore import arrays as np
from mqstore.errors import MQStoreError
from mqstore.files.filesystem import FileSystem
from mqstore.files.jsonfile import Check, check_backup, load_json
from mqstore.files.lock import writer_alive
from mqstore.files.segment import LoadProblem, place_in_file
from mqstore.layout.arrays.dispatch import Rows
from mqstore.layout.consumequeue import UNIT, differing, is_void
from mqstore.log.bulk.txn import TXN_FILE, TxnState
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.directory.manifest import MANIFEST
from mqstore.log.directory.names import is_path_safe
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.reading.deleted import DELETED_FILE, check_deleted
from mqstore.log.recovery.indexrepair import IndexTally, tally_index
from mqstore.log.recovery.known_damage import KNOWN_FILE, check_known
from mqstore.log.recovery.offset_assigner import Misnumbered, OffsetAssigner, Placed, first_slot_in_range, unit_findings
from mqstore.log.recovery.report import Finding, Kind, finding_of
from mqstore.log.recovery.scanning.ranges import (
    RANGE_BYTES,
    LogRange,
    RangeResult,
    SegmentParts,
    Stitcher,
    cut_ranges,
    read_range,
)
from mqstore.log.recovery.scanning.scanner import (
    Bad,
    End,
    Good,
    batch_for,
    joined_bytes,
    scan_segment,
    until_torn,
    used_end,
)

if TYPE_CHECKING:
    from mqstore.log.recovery.indexrepair import Wanted

_ENTRIES_TALLIED = 1 << 20
"""Number of index entries, 20 bytes each, looked up at once.
All entries of a log may need more memory than there is."""

Gap = tuple[str, int, int, int]
"""Queue offsets whose records are lost: (topic, queue id, first offset, offset after the last)."""


def json_tables(root: Path, checks: Mapping[str, Check]) -> Iterator[tuple[str, Check | None]]:
    """Yield (path within the store, its check or None) of the JSON files except the manifest.
    These are the files in `config` and `config/spark`, and those matched by the patterns in `checks`. A file counts
    even if only its backup exists."""
    ours: dict[str, Check] = {TXN_FILE: TxnState.from_json, KNOWN_FILE: check_known, DELETED_FILE: check_deleted}
    known = {**ours, **checks}
    for pattern in ("config/*.json", "config/spark/*.json", *(name for name in checks if "*" in name)):
        found = {*root.glob(pattern), *(path.with_suffix("") for path in root.glob(f"{pattern}.bak"))}
        for path in sorted(found):
            name = str(path.relative_to(root))
            yield name, known.get(name, known.get(pattern))


def json_files(root: Path, checks: Mapping[str, Check]) -> list[tuple[str, Check | None]]:
    """Return the files of `json_tables`, and the manifest if it has a backup.
    A store without a good copy of the manifest cannot be opened at all."""
    manifest: list[tuple[str, Check | None]] = [(MANIFEST, None)] if (root / f"{MANIFEST}.bak").exists() else []
    return [*manifest, *json_tables(root, checks)]


def bad_json(
    root: Path, files: Iterable[tuple[str, Check | None]], fs: FileSystem, *, mend: bool = False
) -> Iterator[tuple[Finding, bool]]:
    """Yield a finding for each bad JSON file or backup, and True if a good copy replaces it.
    A file is bad if it does not decode or fails its check. With `mend`, which only the writer may use, the good copy is
    written over the bad one."""
    for name, check in files:
        problem = None
        try:
            value, problems = load_json(root / name, writer=mend, fs=fs, root=root, check=check)
            if value is not None and not problems:
                problem = check_backup(root / name, writer=mend, fs=fs, check=check)
        except (MQStoreError, OSError) as error:
            yield Finding("bad_json", name, getattr(error, "position", None) or 0, 0, str(error)), False
        else:
            for each in problems:
                yield Finding("bad_json", name, 0, 0, each), True
            if problem is not None:
                yield Finding("bad_json", f"{name}.bak", 0, 0, problem), True


class Verifier:
    """One pass over a store. Read `messages` and `bytes`, the amount that verified, after `findings`."""

    def __init__(
        self,
        parts: StoreParts,
        *,
        live: bool,
        until: int | None,
        problems: Sequence[LoadProblem],
        unfinished: Sequence[Finding] = (),
        json_checks: Mapping[str, Check],
        max_errors: int | None,
    ) -> None:
        self.messages = 0
        self.bytes = 0
        self.body_checksum_only = 0
        """Number of records whose checksum covers only their body. Altered properties and headers go unnoticed."""
        self.unlisted = 0
        """Number of findings that were left out because a range had more than `max_errors`."""
        self.read_again = 0
        """Number of ranges that had to be read again from another position."""
        self.done_bytes = 0
        """Bytes of the log read so far, for a progress bar. At the end equal to `total_bytes`."""
        self._parts = parts
        self._root, self._fs, self._checksum = parts.root, parts.fs, parts.checksum
        self._run = run = parts.log_files
        self._queues, self.index = parts.queue_table, parts.index
        self._checkpoint, self._clean = parts.checkpoint, parts.clean
        self.total_bytes = len(run.starts) * run.segment_bytes
        self.is_live = live
        """True if a writer had the store when this began, or was noticed since."""
        self.until = until
        """End of the part of the log that is checked while a writer runs."""
        self._until = 1 << 62 if until is None else until
        self._together = joined_bytes(batch_for(len(parts.queue_table)))
        self._began_live = live
        self.torn_from: Callable[[], int] = (lambda: self._until) if live else parts.torn_from
        """Function that returns the physical offset from which the next opening treats bad bytes as a torn tail."""
        self._problems = problems
        self._unfinished = unfinished
        self._json_checks = json_checks
        self.slots = OffsetAssigner(parts, self._first_slot)
        self._max_errors = max_errors
        self._entries = IndexTally()
        self._first = run.min_offset
        # While a writer runs, the first segment may be newer than the listing. An unfinished bulk append may hide it.
        self._is_empty = not run.starts and not live and not unfinished
        once = max(parts.checkpoint.flushed or 0, parts.checkpoint.clean_end or 0)
        self.front = run.starts[0] if run.starts else once + -once % run.segment_bytes if self._is_empty else 1 << 62
        """Physical offset where the log begins, as far as known. While a writer runs, retention moves it.
        If all segments are lost, recovery continues the log there."""
        self._cut_from = 1 << 62
        """Physical offset where a torn tail begins. Units that point to it are cut with it."""
        self._end: int | None = None
        """End of the log if no writer runs. Units of records after it make one finding, `lost_tail`."""

    def findings(
        self, results: Iterable[RangeResult] = (), index_findings: Iterable[Finding] | None = None
    ) -> Iterator[Finding]:
        """Yield a finding for each fault of the store.

        `results` are results of `check` for ranges of the log, in any order. Other ranges are read here.
        `index_findings` are likewise results of `Index.check_file`. At most `max_errors` findings of a range are
        listed. `unlisted` counts the others.
        """
        yield from self.folders()
        if self._run.starts:
            yield from self._log(results)
        elif self._is_empty:
            yield from self.end(End(self.front, ""), units=True)
        self.done_bytes = self.total_bytes
        yield from self.tails()
        yield from self._parts.index_findings
        yield from self.index.check(live=self.is_live) if index_findings is None else index_findings
        yield from self._entries.findings(self.index)
        yield from self.json_files()

    def _has_writer(self) -> bool:
        """Return True if a writer has the store now. Called only if something seems to be wrong.
        A writer may have opened it since this began, and its messages are not checked. The call reads the lock."""
        self.is_live = self.is_live or writer_alive(self._root, self._fs)
        return self.is_live

    @cached_property
    def _dispatched_end(self) -> int:
        """Physical offset from which records may not have been dispatched when the writer was killed."""
        if self._checkpoint.dispatched is not None:
            return self._checkpoint.dispatched
        end = max((sum(queue.last_message()[:2]) for queue in self._queues), default=0)
        return end if end > 0 else 1 << 62  # without any unit the queues are lost

    @cached_property
    def watermark(self) -> int:
        """Physical offset below which the log was synced (format#watermark)."""
        # When a check began while a writer ran, all bytes before this end had been written.
        return self._until if self._began_live else self._parts.watermark()

    def front_moved(self, front: int) -> None:
        """Continue at `front`, where the log now begins. Of the queues only their units are known then."""
        self.front = max(self.front, front)
        self.slots.forget()

    def _is_kept(self, physical: np.NDArray[np.int64]) -> np.NDArray[np.bool_]:
        """Return a mask of the records that retention has not removed meanwhile.
        It removes a record before its unit and its index entries. Called only if something seems to be wrong, since it
        lists the log again if there is a writer."""
        front = 0
        if self._has_writer():
            self._run.refresh()
            front = self._run.min_offset if self._run.starts else self._until
        kept: np.NDArray[np.bool_] = physical >= front
        return kept

    # -- the log and the values derived from each record ------------------------------------------------------------

    def folders(self) -> Iterator[Finding]:
        """Yield findings about the names and lengths of files, and about the checkpoint."""
        if not self.is_live:
            yield from self._unfinished
        yield from self.segments()
        for name in self._queues.unsafe_names:
            yield Finding("unsafe_name", f"consumequeue/{name}", 0, 0, "this folder name cannot be a queue")
        short = self._queues.short_files if self._clean else {}  # after an unclean end a power cut explains them
        for path, length in short.items():
            name = os.path.relpath(path, self._root)
            missing = self._queues.segment_bytes - length
            yield Finding("segment_size", name, length, missing, f"{length} bytes instead of {length + missing}")
        bad = self._parts.bad_checkpoint()
        if bad is not None and (self._parts.has_checkpoint or not self.is_live):  # a writer saves one every second
            yield bad

    def segments(self) -> Iterator[Finding]:
        """Yield findings about names and lengths of the log's files, and about a lost manifest, which has lengths."""
        if derived := self._parts.manifest.derived:
            yield Finding("bad_json", MANIFEST, 0, 0, derived)
        for problem in self._problems:
            # The scan finds a gap, but not a problem before the start of the log or after its end.
            if problem.kind != "missing_segment" or not self.front <= problem.position < self._run.end:
                yield finding_of(problem, self._run.segment_bytes)
        if self._is_empty and self.front:
            yield Finding("missing_segment", "commitlog", 0, self.front, "the commitlog folder is empty")

    def ranges(self, range_bytes: int = RANGE_BYTES) -> list[LogRange]:
        """Return the log in ranges that `check` can read separately. Raises ConfigError for a bad size."""
        return cut_ranges(self._run, range_bytes, self._until, self._together)

    def check(self, piece: LogRange, start: int | None = None) -> RangeResult | None:
        """Check the records of a range, their units and index entries. Returns None if retention removed them.
        A record must begin at `start`, counted from the segment's start. None means wherever the first record
        verifies."""
        wanted: list[Wanted] = []
        tally = IndexTally()

        def take(good: Good) -> Rows:
            rows = self.rows_of(good)
            entries = self._among_indexed(rows.entries())
            if entries is not None:
                wanted.append(entries)
                if sum(len(hashes) for hashes, _, _ in wanted) > _ENTRIES_TALLIED:
                    tally.add(self.tally(wanted))
                    wanted.clear()
            self.done_bytes = max(0, good.end - self._first)
            return rows

        most, torn_from = self._max_errors, self.torn_from
        result = read_range(
            self._parts, piece, start, take=take, take_run=self.compare, max_errors=most, watermark=torn_from
        )
        if result is not None:
            tally.add(self.tally(wanted))
            result.index = tally
        return result

    def stitcher(self, results: Iterable[RangeResult] = (), together: int = 0) -> Stitcher:
        """Return a `Stitcher` of `results`. It reads ranges whose result is missing or does not fit."""
        ends = {"until": self._until, "together": together}
        return Stitcher(self._parts, results, self.check, **ends, watermark=self.torn_from, on_front=self.front_moved)

    def _log(self, results: Iterable[RangeResult]) -> Iterator[Finding]:
        stitcher = self.stitcher(results, self._together)
        for event in stitcher.events():
            if isinstance(event, Bad):
                yield self.bad(event)
            elif isinstance(event, End):
                yield from self.end(event, units=True)
            else:
                yield from self._segment(event)
        self.read_again = stitcher.read_again_count

    def _segment(self, parts: SegmentParts) -> Iterator[Finding]:
        """Check the queues whose records follow each other, then the others by reading the segment again."""
        for result in parts.results:
            self.messages += result.records
            self.bytes += result.bytes
            self.body_checksum_only += result.body_checksum_only
            self.unlisted += result.unlisted
            self._entries.add(result.index)
        out_of_order: set[tuple[str, int]] = set()
        for (topic, queue_id), found in parts.queues().items():
            if queue_id < 0 or not is_path_safe(topic):
                out_of_order.add((topic, queue_id))
                continue
            queue = self._queues.create(topic, queue_id)
            older = self.slots.generations.are_older
            here = [each for each in found if not older(queue, each.first, each.first_physical, each.last_end)]
            if not here:
                continue
            first, last = here[0], here[-1]
            # If no checksum covers the queue offset of a record, units may outvote it.
            doubted = self._checksum == "crc32-body" and any(part.findings or part.unlisted for part in here)
            straight = first.straight and all(later.follows(part) for part, later in pairwise(here))
            if doubted or not straight or not self.slots.follows(queue, first.first, first.first_physical):
                out_of_order.add((topic, queue_id))
                continue
            if not self.slots.is_met(queue):
                yield from self._front(queue, first.first)
            self.slots.advance(queue, last.stop, last.last_end)
            for part in here:
                yield from part.findings
                self.unlisted += part.unlisted
        if out_of_order:
            again = self._in_order(parts, out_of_order)
            yield from again if self._max_errors is None else islice(again, self._max_errors * len(parts.results))
            self.unlisted += sum(1 for _ in again)

    def _in_order(self, parts: SegmentParts, queues: Collection[tuple[str, int]]) -> Iterator[Finding]:
        stop = parts.results[-1].range.high
        events = scan_segment(self._run, parts.segment, parts.start, self._checksum, stop=stop)
        with suppress(FileNotFoundError):  # retention removed it meanwhile
            for event in until_torn(events, self.torn_from):
                if isinstance(event, Good):
                    yield from self.units(self.rows_of(event), queues)

    def rows_of(self, good: Good) -> Rows:
        return self._queues.rows_of(good.buffer, good.headers, good.base)

    def bad(self, event: Bad) -> Finding:
        """Return the finding about a part of the log that has no record."""
        name, at = place_in_file(event.start, self._run.segment_bytes)
        return Finding(event.kind, name, at, event.end - event.start, event.detail)

    def end(self, end: End, *, units: bool = False) -> Iterator[Finding]:
        """Yield findings about the end of the log. With `units`, all records must have been taken, and findings about
        units that point beyond the end are included."""
        if self.is_live:
            return  # a record may be half-written
        size = self._run.segment_bytes
        name, at = place_in_file(end.position, size)
        known = self._checkpoint.flushed is not None or end.detail  # otherwise finding the watermark reads the log
        once = self.watermark if known else end.position
        later = [segment for segment in self._run.segments() if segment.start > end.position]
        torn = bool(end.detail) and end.position >= once  # then its units are cut with it
        queues = self._queues if units and not torn else ()
        lost = self.slots.lost_tail(queues, self.front, end.position, once, f"; {end.detail or 'zeros'}")
        if (lost or end.detail or later) and self._has_writer():
            return
        self._end = end.position
        if lost:
            yield lost
        if torn:
            self._cut_from = end.position
            why = end.detail
            if end.torn:
                why += "; `mqstore recover` keeps whole records after it, opening moves them all to cut/"
            yield Finding("torn_tail", name, at, size - at, why)
        for segment in later:
            if used := used_end(self._run, segment):
                why = "the log ends before it" if end.torn else "the log ends before it, and it has no valid record"
                yield Finding("torn_tail", place_in_file(segment.start, size)[0], 0, used, why)

    # -- consume queues ---------------------------------------------------------------------------------------------

    def units(self, rows: Rows, only: Collection[tuple[str, int]]) -> Iterator[Finding]:
        """Yield findings about the units of a record batch, in the queues of `only`, as (topic, queue id).
        The records before it must have been taken."""
        for found in self.placed(rows, lambda *queue: queue in only):
            if isinstance(found, Finding):
                yield found
                continue
            queue, first, expected, units, is_first, _ = found
            if is_first:
                yield from self._front(queue, min(first, expected))
            if first > expected:
                yield from self._no_record(queue, queue.chunks(expected, min(first, queue.max_offset)))
            yield from self._compare(queue, first, units)

    def placed(self, rows: Rows, wanted: Callable[[str, int], bool] | None = None) -> Iterator[Placed | Finding]:
        """Yield the results of `OffsetAssigner.place`, with a finding for each record whose slot is not its offset."""
        for found in self.slots.place(rows, wanted):
            yield found.finding(self._run.segment_bytes) if isinstance(found, Misnumbered) else found

    def _first_slot(self, queue: ConsumeQueue, least: int) -> tuple[int | None, int]:
        """Return the first slot as recovery does, or None while a writer runs if retention may be removing files."""
        found = first_slot_in_range(queue, self.front, least)
        return (None, 0) if found[0] != least and self._has_writer() else found

    def _front(self, queue: ConsumeQueue, stop: int) -> Iterator[Finding]:
        """Yield findings about units before slot `stop` whose records retention cannot have removed."""
        for at, units in queue.held(queue.first_offset(), min(stop, queue.max_offset)):
            wrong = (units["physical_offset"] >= self.front) & ~is_void(units)
            yield from self._leading_nowhere(queue, at, units, wrong)

    def compare(self, name: tuple[str, int], first: int, wanted: np.NDArray[np.void]) -> Iterable[Finding]:
        """Compare the units of a queue from queue offset `first` on with those `wanted`, in log order."""
        queue = self._queues.create(*name)
        units = queue.kept(first, len(wanted))
        if units == wanted.tobytes():  # a fraction of the time of all else, for many queues
            self.slots.generations.note_listed(queue, UNIT.unpack_from(units)[0])
            return ()
        return self._differing(queue, first, wanted)

    def _differing(self, queue: ConsumeQueue, first: int, wanted: np.NDArray[np.void]) -> Iterator[Finding]:
        kept = self.slots.generations.current(queue, np.arange(first, first + len(wanted)), wanted["physical_offset"])
        if kept is None:
            yield from self._compare(queue, first, wanted)
            return
        at = np.flatnonzero(kept)
        for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if len(at) else []:
            yield from self._compare(queue, first + int(run[0]), wanted[run])

    def _compare(self, queue: ConsumeQueue, first: int, wanted: np.NDArray[np.void]) -> Iterator[Finding]:
        if self._queues.in_rocksdb and not queue.max_offset:
            return
        if self.is_live:
            wanted = wanted[: max(0, queue.max_offset - first)]  # the writer has not dispatched the others yet
        found = queue.units(first, len(wanted))
        wrong = differing(found, queue.as_kept(found, wanted))
        if wrong.any() and not self.is_live and self._has_writer():
            yield from self._compare(queue, first, wanted)  # without the writer's new messages
        elif wrong.any():
            wrong &= self._is_kept(wanted["physical_offset"])
            missing = found["size"] == 0
            late = missing & (wanted["physical_offset"] >= self._dispatched_end)
            late[: len(late) if self._clean else max(0, queue.max_offset - first)] = False
            reasons: tuple[tuple[Kind, np.NDArray[np.bool_], str], ...] = (
                ("missing_units", late, "not dispatched yet; opening for writing, or `mqstore recover`, builds them"),
                ("missing_units", missing & ~late, "no unit for a record of the log"),
                ("bad_unit", ~missing, "the unit differs from its record"),
            )
            for kind, mask, detail in reasons:
                yield from unit_findings(queue, kind, first, wrong & mask, detail)

    def _no_record(self, queue: ConsumeQueue, chunks: Iterable[tuple[int, np.NDArray[np.void]]]) -> Iterator[Finding]:
        for at, units in chunks:
            yield from self._leading_nowhere(queue, at, units, ~is_void(units))

    def _leading_nowhere(
        self, queue: ConsumeQueue, first: int, units: np.NDArray[np.void], wrong: np.NDArray[np.bool_]
    ) -> Iterator[Finding]:
        """Yield findings about units of `wrong` whose records are not in the log."""
        physical = units["physical_offset"]
        wrong = wrong & (physical < self._until) & (physical < self._cut_from)
        if wrong.any():
            wrong &= self._is_kept(physical)
            yield from unit_findings(queue, "bad_unit", first, wrong, "the unit's record is not in the log")

    def tails(self) -> Iterator[Finding]:
        """Yield findings about units after the last record of each queue. All records must have been taken."""
        for queue in self._queues:
            first = inside = stop = queue.max_offset
            if self._end is not None:
                first, inside, stop, *_ = self.slots.behind(queue, self.front, self._end)
            if not self.slots.is_met(queue):
                yield from self._front(queue, inside)  # the log has no record of this queue
                first = inside
            yield from self._no_record(queue, chain(queue.held(first, inside), queue.held(stop, queue.max_offset)))

    # -- index and JSON ---------------------------------------------------------------------------------------------

    def _among_indexed(self, wanted: Wanted) -> Wanted | None:
        """Return the entries of records before the end of the index, which may end before the log.
        None means that there are none."""
        hashes, physical, stamps = wanted
        if not len(hashes):
            return None
        ends = [header.end_physical_offset for _, header in self.index.headers() if header.next_entry > 1]
        inside = physical < max(self._indexed_end(), ends[-1] if ends else 0)
        return (hashes[inside], physical[inside], stamps[inside]) if inside.any() else None

    def _indexed_end(self) -> int:
        """Return the physical offset below which every key has its entry, even if index files are missing."""
        if self._clean and not self.is_live:
            return self._until
        if self._checkpoint.dispatched is not None:
            return self._checkpoint.dispatched
        return 0 if self.is_live else self.watermark

    def tally(self, wanted: Sequence[Wanted]) -> IndexTally:
        """Return how the index differs from these entries, which are results of `wanted_of`."""
        if wanted and self._has_writer():
            wanted = [part for each in wanted if (part := self._among_indexed(each)) is not None]
        found = tally_index(self.index, wanted)
        while found.missing and (kept := self._kept_of(wanted)) is not None:
            wanted, found = kept, tally_index(self.index, kept)
        return found

    def _kept_of(self, wanted: Sequence[Wanted]) -> list[Wanted] | None:
        """Return the entries whose records retention has kept, or None if it has kept all."""
        masks = [self._is_kept(physical) for _, physical, _ in wanted]
        if all(mask.all() for mask in masks):
            return None
        return [
            (hashes[mask], physical[mask], stamps[mask])
            for (hashes, physical, stamps), mask in zip(wanted, masks, strict=True)
        ]

    def json_files(self) -> Iterator[Finding]:
        """Yield findings about JSON files that do not decode or fail their check."""
        found = bad_json(self._root, json_files(self._root, self._json_checks), self._fs)
        return (finding for finding, _ in found if not (finding.file == MANIFEST and self._parts.manifest.derived))


def verified_ranges(verifier: Verifier) -> Iterator[tuple[RangeResult, int, str | None]]:
    """Yield each range of the log with its number of faults and its first fault as text, or None.
    Faults are bytes that are not a record, wrong units, and keys that the index lacks. Bad bytes reach to the next
    record, or to where the log should have ended."""
    fitting: list[RangeResult] = []
    outside: list[tuple[int, Finding]] = []
    for event in verifier.stitcher().events() if verifier.total_bytes else ():
        if isinstance(event, SegmentParts):
            fitting += event.results
        elif isinstance(event, Bad):
            outside.append((event.start, verifier.bad(event)))
        else:
            outside += [(event.position, finding) for finding in verifier.end(event)]
    within = {bad.start for result in fitting for bad in result.bads}
    starts = [result.range.base + result.range.low for result in fitting]
    later: dict[int, list[Finding]] = {}
    for position, finding in outside:
        if position not in within:  # it belongs to the range in which it begins, or after which it begins
            later.setdefault(max(0, bisect_right(starts, position) - 1), []).append(finding)
    for number, result in enumerate(fitting):
        of_index = list(result.index.findings(verifier.index))
        of_queues = (finding for part in result.queues.values() for finding in part.findings)
        more = later.get(number, [])
        first = next(chain(map(verifier.bad, result.bads), more, of_queues, of_index), None)
        text = None if first is None else f"{first.kind} at {first.position} of {first.file}: {first.detail}"
        yield result, result.errors + len(more) + len(of_index), text
