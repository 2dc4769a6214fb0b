"""Removal of the bytes after the end of a log (format#zeros).

Useful bytes are first kept under `cut/`. Then the bytes are zeroed, or deleted with their segment."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from mqstore.files.filesystem import FileSystem
from mqstore.files.segment import place_in_file
from mqstore.layout.record import check_record
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.recovery.report import Cut, RecoveryReport
from mqstore.log.recovery.scanning.scanner import End, Good, scan_log, used_ranges

COPY_BYTES = 1 << 20
"""Number of bytes of a log copied at a time."""


class Tail:
    """Cuts a log at its end. Changes are added to `report`, and made only with `writing`."""

    def __init__(self, parts: StoreParts, report: RecoveryReport, *, writing: bool) -> None:
        self._parts = parts
        self._report = report
        self._writing = writing

    def plan(self, last: End) -> tuple[list[tuple[int, int]], int]:
        """Return the ranges after the log's end that are not zeros, one a segment, and their number of whole records.
        A record that begins or ends a range is included in full, even if it ends in zeros."""
        run, checksum = self._parts.log_files, self._parts.checksum
        whole_to: dict[int, int] = {}
        count = 0
        for event in () if last.torn is None else scan_log(run, last.torn.end, checksum):
            if isinstance(event, Good):
                whole_to |= {start: end for start, end, _ in event.by_segment(run.segment_bytes)}
                count += len(event.headers)
        # Without any bytes at the end, its segment need not be read again.
        skipped = run.find(last.position) if last.torn is None and not last.detail else None
        cuts = []
        for segment, at, stop in used_ranges(run, last.position if skipped is None else skipped.end):
            buffer, begin = run.mapping(segment), segment.start + at
            claimed = check_record(buffer, at, len(buffer), begin, checksum).size
            stop = segment.start + min(max(stop, at + claimed), len(buffer))
            cuts.append((begin, max(stop, whole_to.get(segment.start, 0))))
        return cuts, count

    def _save(self, begin: int, stop: int) -> str:
        """Copy [begin, stop) of the log, in one segment, to a new file under `cut/`. Return its path.
        In a dry run, only return the path."""
        run = self._parts.log_files
        path = free_cut_path(self._parts.root, begin, self._parts.clock.now_ms(), self._report.kept)
        if self._writing:
            segment = run.find(begin)
            assert segment is not None
            buffer, first = run.mapping(segment), begin - segment.start
            end = min(stop - segment.start, len(buffer))
            parts = ((at - first, buffer[at : min(at + COPY_BYTES, end)]) for at in range(first, end, COPY_BYTES))
            save_bytes(Path(path), parts, self._parts.fs)
        return path

    def cut(self, end: int, cuts: Sequence[tuple[int, int]], why: str, *, keep: bool) -> None:
        """Write zeros from `end` to the end of its segment, and remove later segments.
        `cuts` are the ranges that are not zeros. With `keep` they are copied first."""
        run, report = self._parts.log_files, self._report
        for begin, stop in cuts:
            name, at = place_in_file(begin, run.segment_bytes)
            # The detail describes the bytes after the last record, not later segments.
            reason = why if begin == end else why.partition(":")[0]
            report.truncated.append(Cut(name, at, at + stop - begin, reason))
            if keep:
                report.kept.append(self._save(begin, stop))
        report.changed |= bool(cuts)
        segment = run.find(end)
        if segment is not None:
            if self._writing:
                self._parts.log_writer.own(end)  # the log continues in it, even if nothing is cut
                if any(begin < segment.end for begin, _ in cuts):
                    self._parts.log_writer.zero(end)
            report.changed |= segment.length < segment.size
        for problem in self._parts.load_problems:
            if problem.kind == "empty_segment" and end <= problem.position < run.end:
                report.truncated.append(Cut("commitlog/" + os.path.basename(problem.file), 0, 0, "empty file"))
                report.changed = True
        # A segment that begins at the end is kept if it is the only one, so that the log keeps its position.
        doomed = [s for s in run.segments() if s.start > end or (s.start == end != run.starts[0])]
        report.changed |= bool(doomed)
        listed = {place_in_file(begin, run.segment_bytes)[0] for begin, _ in cuts}
        unused = (place_in_file(s.start, run.segment_bytes)[0] for s in doomed)
        report.truncated += [Cut(name, 0, 0, "unused file") for name in unused if name not in listed]
        if self._writing:
            if doomed:
                self._parts.log_writer.drop_from(doomed[0].start)
            self._parts.log_writer.finish(end)


def free_cut_path(root: Path, start: int, now_ms: int, taken: Collection[str]) -> str:
    """Return a new path under `cut/` for bytes from physical offset `start` on.
    It does not exist, and is not in `taken`, the paths of a plan."""
    name = f"{start:020d}-{now_ms}"
    names = (name if number == 1 else f"{name}.{number}" for number in itertools.count(1))
    paths = (root / "cut" / name for name in names)
    return next(str(path) for path in paths if not (path.exists() or str(path) in taken))


def save_bytes(path: Path, parts: Iterable[tuple[int, bytes]], fs: FileSystem) -> None:
    """Write a file of `parts`, each (position, bytes). Durable on return.
    The file gets its name when it is complete."""
    fs.make_folders(path.parent)
    unfinished = path.with_name(f"{path.name}.tmp")
    fs.unlink(unfinished, missing_ok=True)
    with fs.opened(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
        for at, data in parts:
            fs.pwrite(fd, data, at)
        fs.fdatasync(fd)
    fs.replace(unfinished, path)
    fs.sync_directory(path.parent)
