"""Surplus bytes of segment files. Files that were concatenated have whole segments there.

`mqstore recover` makes missing segments of them, and moves all other surplus to `cut/`. Commands that read show these
segments as if they were files already.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from mqstore.files.filesystem import FileSystem
from mqstore.files.segment import LoadProblem, segment_name
from mqstore.files.segments import SegmentRun
from mqstore.layout.record import Checksum
from mqstore.log.recovery.misnamed import place_of
from mqstore.log.recovery.report import Cut, RecoveryReport
from mqstore.log.recovery.tail import free_cut_path, save_bytes

__all__ = ["Piece", "settle_surplus", "surplus_pieces"]


class Piece(NamedTuple):
    """Surplus bytes [position, stop) of `file`: as many as a segment has, or the rest of the file."""

    file: str
    position: int
    stop: int
    start: int
    """Physical offset of the first byte: by the records in it, else by the place in the file."""
    kind: Literal["missing", "present", "other"]
    """Whether it is a segment that the log lacks, a second copy of bytes of the log, or anything else."""
    content: mmap.mmap

    @property
    def name(self) -> str:
        return f"{os.path.basename(self.file)} [{self.position}, {self.stop})"


def surplus_pieces(run: SegmentRun, problems: Iterable[LoadProblem], checksum: Checksum, fs: FileSystem) -> list[Piece]:
    """Return the surplus of all files in `problems`, which loading `run` has returned.
    A segment in front of the log is not missing: retention has deleted it."""
    size, end = run.segment_bytes, run.end
    found: list[Piece] = []
    for problem in problems:
        if not problem.is_surplus(size):
            continue
        for position, content in _contents(problem.file, size, fs):
            place = place_of(content, len(content), None, size, checksum)
            start = problem.position - size + position if place is None else place
            there = run.find(start)
            kind: Literal["missing", "present", "other"] = "other"
            if there is None and place is not None and run.min_offset < start <= end:
                kind = "missing"
                end = max(end, start + size)
            elif there is not None and memoryview(run.mapping(there))[: len(content)] == memoryview(content):
                kind = "present"
            found.append(Piece(problem.file, position, position + len(content), start, kind, content))
    return found


def _contents(file: str, size: int, fs: FileSystem) -> Iterator[tuple[int, mmap.mmap]]:
    """Yield (position, copy) of what lies behind the first `size` bytes of a file, as much as that at a time."""
    with fs.opened(file, os.O_RDONLY) as fd:
        length = fs.size(fd)
        for position in range(size, length, size):
            content = mmap.mmap(-1, min(size, length - position))
            fs.read_into(fd, memoryview(content), position)
            yield position, content


def settle_surplus(
    run: SegmentRun, pieces: Sequence[Piece], root: Path, now_ms: int, fs: FileSystem, *, writing: bool
) -> RecoveryReport:
    """Make segments of missing ones, move the others to `cut/`, shorten the files, and return a report of it.
    Without `writing` it is a plan. May be repeated after a kill. Then `cut/` may have a second copy of some bytes."""
    report = RecoveryReport(changed=bool(pieces))
    for piece in pieces:
        name = segment_name(piece.start)
        if piece.kind == "missing":
            report.renamed[f"commitlog/{piece.name}"] = f"commitlog/{name}"
        else:
            report.truncated.append(
                Cut(f"commitlog/{os.path.basename(piece.file)}", piece.position, piece.stop, "surplus")
            )
        if piece.kind == "other":
            report.kept.append(free_cut_path(root, piece.start, now_ms, report.kept))
        if not writing or piece.kind == "present":
            continue
        target = root / "tmp" / name if piece.kind == "missing" else Path(report.kept[-1])
        save_bytes(target, [(0, piece.content[:])], fs)
        if piece.kind == "missing":
            fs.replace(target, run.directory / name)
            fs.sync_directory(run.directory)
    for each in {piece.file for piece in pieces} if writing else ():
        with fs.opened(each, os.O_RDWR) as fd:
            fs.shorten(fd, run.segment_bytes)
            fs.fdatasync(fd)
    return report
