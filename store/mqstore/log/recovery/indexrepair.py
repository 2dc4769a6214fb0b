"""Comparison of the index with the keys of records, and its repair by opening for writing.

Missing entries are added. Doubtful files, and files that have entries with wrong times, are rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mqstore import arrays as np
from mqstore.layout.arrays.dispatch import Rows
from mqstore.log.derived.index import Index, IndexFile
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.recovery.report import Finding, RecoveryReport

if TYPE_CHECKING:
    Wanted = tuple[np.NDArray[np.int32], np.NDArray[np.int64], np.NDArray[np.int64]]
    """Index entries derived from the log: (key hash, physical offset, store timestamp in ms)."""


def is_nonsense(file: IndexFile, index: Index) -> bool:
    """Return True if the header of `file` is impossible, so that no entry can be added."""
    header = file.header
    return not 1 <= header.next_entry <= index.entries_per_file or header.end_timestamp_ms < 0


def _newest(files: Sequence[IndexFile]) -> int:
    """Return the physical offset of the newest indexed record, or -1 without any entry."""
    return max((file.header.end_physical_offset for file in files if file.header.next_entry > 1), default=-1)


class IndexRepair:
    """Repair of the index while a store is opened. Call `plan`, then `take` in log order, then `finish`.

    With `whole` the whole log will be taken, and every file is compared with it. With `force` all files are rebuilt
    even if they agree with the log. Changes are added to `report`, and made only with `writing`.
    """

    def __init__(self, parts: StoreParts, report: RecoveryReport, *, whole: bool, force: bool, writing: bool) -> None:
        self._parts = parts
        self._report = report
        self._writing = writing
        self._whole = whole
        self._is_forced = force
        self._start = 0
        self._doomed: list[IndexFile] = []
        self._entries: list[Wanted] = []

    def plan(self, start: int, first: int) -> int:
        """Choose the files to rebuild. Return the first physical offset whose entries may be missing.
        The log begins at `first`, and is read from `start` on."""
        parts, files = self._parts, self._parts.index.files
        dispatched = parts.checkpoint.dispatched

        def is_late(file: IndexFile) -> bool:
            if parts.clean:
                return False
            if dispatched is None:
                return file.header.end_timestamp_ms > parts.checkpoint.index_msg_timestamp_ms
            return file.header.end_physical_offset >= dispatched or parts.index.is_ahead(file)

        self._start = first
        if self._whole:
            return first  # `finish` chooses the bad files when all entries are known
        doubtful = (i for i, file in enumerate(files) if is_late(file) or is_nonsense(file, parts.index))
        kept = next(doubtful, len(files))
        self._doomed = files[kept:]
        if self._doomed:
            self._start = max(first, _newest(files[:kept]))
        elif dispatched is not None and not parts.clean:
            self._start = dispatched
        else:  # in a Java store, or after a doubtful clean end, entries follow the newest existing one
            self._start = max(start, _newest(files))
        return self._start

    def take(self, rows: Rows) -> None:
        """Keep the entries derived from these records."""
        if len((entries := rows.entries(self._start))[0]):
            self._entries.append(entries)

    def rebuild(self) -> None:
        """Mark all files for a rebuild, whatever `plan` chose."""
        self._doomed = list(self._parts.index.files)
        self._is_forced = True

    def finish(self, end: int) -> None:
        """Make the index agree with a log that ends at `end`."""
        index, report, doomed = self._parts.index, self._report, self._doomed
        entries, self._entries = self._entries, []
        if self._whole:
            if not self._is_forced and not self._lacks_something(entries, end):
                return
            doomed = list(index.files)
            report.changed |= bool(self._parts.index_findings)
            for finding in self._parts.index_findings if self._writing else ():
                self._parts.fs.unlink(self._parts.root / finding.file, missing_ok=True)
        else:
            entries = self._without_known([file for file in index.files if file not in doomed], entries)
        report.rebuilt.index_entries += sum(len(hashes) for hashes, _, _ in entries)
        report.changed |= bool(doomed or entries)
        if self._writing:
            index.remove(doomed)
            for hashes, physical, stamps in entries:
                index.put(hashes, physical, stamps, end=int(physical[-1]) + 1)

    def reaches(self, end: int) -> bool:
        """Return True if an index file that stays has entries of records at or after `end`."""
        return _newest([file for file in self._parts.index.files if file not in self._doomed]) >= end

    def _without_known(self, kept: list[IndexFile], entries: list[Wanted]) -> list[Wanted]:
        """Return `entries` without those of the newest indexed record that the kept files already have.
        The keys of a record may be in two files."""
        newest = _newest(kept)
        known = 0
        for file in reversed(kept):
            physical = file.places()
            known += int(np.count_nonzero(physical == newest))
            if len(physical) and int(physical[0]) < newest:
                break
        if not known:
            return entries
        result = []
        for hashes, physical, stamps in entries:
            skip = np.zeros(len(physical), np.bool_)
            same = np.flatnonzero(physical == newest)[:known]
            skip[same] = True
            known -= len(same)
            if not skip.all():
                result.append((hashes[~skip], physical[~skip], stamps[~skip]))
        return result

    def _lacks_something(self, entries: list[Wanted], end: int) -> bool:
        """Return True if the files are damaged, point beyond the log, or lack an entry derived from the log."""
        index = self._parts.index
        damaged = bool(self._parts.index_findings) or bool(index.check()) or self.reaches(end)
        return damaged or any(tally_index(index, entries).findings(index))


@dataclass(slots=True)
class IndexTally:
    """Differences between the index and the entries derived from some records.
    Tallies of parts of the log can be added up, since a key has its entry at one physical offset."""

    missing: int = 0
    """Keys without an entry."""
    wrong_times: dict[str, int] = field(default_factory=dict)
    """Number of entries by file whose time differs from their record's. They would hide a key from a query by time."""
    wrong_ends: set[str] = field(default_factory=set)
    """Files whose begin or end is not the time of their first or last entry."""

    def add(self, other: IndexTally) -> None:
        self.missing += other.missing
        for name, count in other.wrong_times.items():
            self.wrong_times[name] = self.wrong_times.get(name, 0) + count
        self.wrong_ends |= other.wrong_ends

    def findings(self, index: Index) -> Iterator[Finding]:
        if self.missing:
            name = f"index/{index.files[0].name}" if index.files else "index"
            yield Finding("bad_index", name, 0, 0, f"{self.missing} keys of the log have no entry")
        for file in index.files:
            name = f"index/{file.name}"
            if file.name in self.wrong_times:
                detail = f"{self.wrong_times[file.name]} entries have other times than their records"
                yield Finding("bad_index", name, 0, 0, detail)
            if file.name in self.wrong_ends:
                detail = "begin and end are not the times of the first and the last entry"
                yield Finding("bad_index", name, 0, 16, detail)


def _fingerprints(hashes: np.NDArray[np.int32], physical: np.NDArray[np.int64]) -> np.NDArray[np.uint64]:
    """Return one number for each (hash, physical offset). Different pairs almost never have the same number."""
    mixed = physical.astype(np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)
    return mixed ^ hashes.astype(np.uint64)


def tally_index(index: Index, wanted: Sequence[Wanted]) -> IndexTally:
    """Compare the index with the `wanted` entries.
    Only files and entries in the part of the log that `wanted` covers count."""
    tally = IndexTally()
    if not any(len(part[0]) for part in wanted):
        return tally
    hashes, physical, stamps = (np.concatenate(column) for column in zip(*wanted, strict=True))
    asked = _fingerprints(hashes, physical)
    if (physical[1:] < physical[:-1]).any():
        order = np.argsort(physical, kind="stable")
        physical, stamps = physical[order], stamps[order]
    low, high = int(physical[0]), int(physical[-1])
    there = [np.zeros(0, np.uint64)]
    matched = 0
    for file, header in index.headers():
        last = header.next_entry - 2  # a writer may have added more since; `header` has the end of the last one
        try:
            if file.lies_outside(low, high):
                continue
            here, keys, places, diffs = file.between(last + 1, low, high)
        except FileNotFoundError:  # another process's retention removed it
            continue
        if not len(here):
            continue
        there.append(_fingerprints(keys, places))
        # In an intact index the entries are in the order of `wanted`, so nothing has to be searched.
        met = slice(matched, matched + len(places))
        if np.array_equal(physical[met], places):
            known, times = np.ones(len(places), np.bool_), stamps[met]
            matched += len(places)
        else:
            at = np.searchsorted(physical, places)
            known, times = physical[at] == places, stamps[at]
        seconds = (
            np.maximum(times - header.begin_timestamp_ms, 0) // 1000 if header.begin_timestamp_ms > 0 else times * 0
        )
        wrong = known & (np.minimum(seconds, 0x7FFF_FFFF) != diffs)
        wrong &= here != 0  # RocketMQ counts the first entry from the end of the previous file (format#index-put)
        if wrong.any():
            tally.wrong_times[file.name] = int(np.count_nonzero(wrong))
        begins, ends = known & (here == 0), known & (here == last)
        if (times[begins] != header.begin_timestamp_ms).any() or (times[ends] != header.end_timestamp_ms).any():
            tally.wrong_ends.add(file.name)
    found = np.concatenate(there)
    if np.array_equal(found, asked):
        return tally
    tally.missing = len(asked)
    if len(found):
        found.sort()
        at = np.searchsorted(found, asked)
        at[at == len(found)] = 0
        tally.missing = int(np.count_nonzero(found[at] != asked))
    return tally
