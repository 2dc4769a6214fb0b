"""Repair of the index by opening for writing: missing entries are added, doubtful files are rebuilt."""

from __future__ import annotations

import numpy as np

from mqstore.layout.dispatch import Rows
from mqstore.log.index import Index, IndexFile
from mqstore.log.parts import StoreParts
from mqstore.log.recovery.indextally import Wanted, tally_index
from mqstore.log.recovery.report import RecoveryReport

__all__ = ["IndexRepair", "is_nonsense"]


def is_nonsense(file: IndexFile, index: Index) -> bool:
    """Return True if the header of `file` is impossible, so that no entry can be added."""
    header = file.header
    return not 1 <= header.next_entry <= index.entries_per_file or header.end_timestamp_ms < 0


class IndexRepair:
    """Repair of the index while a store is opened. Call `plan`, then `take` in log order, then `finish`.

    With `whole` the whole log will be taken, and every file is compared with it. With `force` all files are rebuilt
    even if they agree with the log. Changes are noted in `report`, and made only with `writing`.
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
        """Choose the files to be rebuilt. Return the first physical offset whose entries may be missing.
        The log begins at `first`, and is read from `start` on."""
        self._start = self._plan(start, first)
        return self._start

    def _plan(self, start: int, first: int) -> int:
        parts = self._parts
        files = parts.index.files
        if self._whole:
            return first  # which files are bad is decided when all entries are known
        dispatched = parts.checkpoint.dispatched
        stamp = parts.checkpoint.index_msg_timestamp_ms
        doomed: list[IndexFile] = []
        for i, file in enumerate(files):
            late = False
            if parts.clean:
                pass
            elif dispatched is not None:
                late = file.header.end_physical_offset >= dispatched or parts.index.is_ahead(file)
            else:
                late = file.header.end_timestamp_ms > stamp
            if late or is_nonsense(file, parts.index):
                doomed = files[i:]
                break
        kept = files[: len(files) - len(doomed)]
        newest = max((f.header.end_physical_offset for f in kept if f.header.next_entry > 1), default=-1)
        if doomed:
            self._doomed = list(doomed)
            return max(first, newest)
        if dispatched is not None and not parts.clean:
            return dispatched
        # In a Java store, or after a clean end that was doubted, entries follow the newest existing one.
        return max(start, newest)

    def take(self, rows: Rows) -> None:
        """Remember the entries that these records ask for."""
        if len((entries := rows.entries(self._start))[0]):
            self._entries.append(entries)

    def rebuild(self) -> None:
        """Mark all files to be rebuilt, regardless of what `plan` chose."""
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
        """Return True if an index file that stays has entries of records at or behind `end`."""
        kept = [file for file in self._parts.index.files if file not in self._doomed and file.header.next_entry > 1]
        return any(file.header.end_physical_offset >= end for file in kept)

    def _without_known(self, kept: list[IndexFile], entries: list[Wanted]) -> list[Wanted]:
        """Return `entries` without those that the kept files already have for the newest indexed record.
        The keys of a record may be spread over two files."""
        newest = max((f.header.end_physical_offset for f in kept if f.header.next_entry > 1), default=-1)
        known = 0
        for file in reversed(kept):
            physical = file.places()
            known += int(np.count_nonzero(physical == newest))
            if len(physical) and int(physical[0]) < newest:
                break
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
        """Return True if the files are damaged, point beyond the log, or lack an entry that the log asks for."""
        index = self._parts.index
        damaged = bool(self._parts.index_findings) or bool(index.check()) or self.reaches(end)
        return damaged or any(tally_index(index, entries).findings(index))
