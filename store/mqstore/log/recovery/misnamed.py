"""Segments in wrong files, found by the physical offsets in their records: misnamed, or after the end of another one.

Files that were concatenated have whole segments as surplus bytes. `mqstore recover` renames files, makes missing
segments of the surplus, and moves all other surplus to `cut/`. Commands that read show the log as if that was done.
Opening for writing refuses the store: misplaced records would count as damage, and be cut at the end of the log.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from mqstore.errors import CorruptStoreError
from mqstore.files.filesystem import FileSystem
from mqstore.files.segment import LoadProblem, Segment, segment_name, segment_start
from mqstore.files.segments import SegmentRun
from mqstore.layout.arrays.scan import content_end, find_next
from mqstore.layout.record import MAGIC_AT, MAGIC_V1, MAGIC_V2, PHYSICAL_OFFSET_AT, Checksum, check_record
from mqstore.log.recovery.report import Cut, RecoveryReport
from mqstore.log.recovery.tail import free_cut_path, save_bytes

_MAGICS = tuple(magic.to_bytes(4, "big", signed=True) for magic in (MAGIC_V1, MAGIC_V2))
_TRIED = 1000
"""Maximum number of magic numbers to examine in one file. A hostile file may contain nothing else."""
_UNFINISHED = ".moved"
"""Suffix of a file that a killed recovery was renaming."""


class MisnamedSegmentsError(CorruptStoreError):
    """Segments are in files with wrong names, or after the end of another one. Nothing was changed."""

    def __init__(self, root: str | os.PathLike[str], places: dict[str, int]) -> None:
        name, start = next(iter(places.items()))
        text = f"{len(places)} segments are in the wrong file: {name} has the records of {segment_name(start)}"
        super().__init__(text, os.path.join(root, "commitlog", name), repair=f"mqstore recover {os.fspath(root)}")


def misnamed_segments(run: SegmentRun, checksum: Checksum, fs: FileSystem, start: int = 0) -> dict[str, int]:
    """Return the right physical offset of each misnamed segment file, by file name.
    Empty if the names from physical offset `start` on are right. Leaves out a file whose right place another file
    occupies rightly."""
    others = _other_names(run, fs)
    if not others and _begin_with_records(run, start, checksum):
        return {}
    said = {os.path.basename(segment.path): segment.start for segment in run.segments()}
    found = {
        os.path.basename(segment.path): _place_of(
            run.mapping(segment), run.data_end(segment, 0), segment.start, run.segment_bytes, checksum
        )
        for segment in run.segments()
    }
    for name in others:
        with fs.opened(run.directory / name, os.O_RDONLY) as fd:
            length = min(fs.size(fd), run.segment_bytes)
            buffer = fs.map(fd, length, writable=False) if length else None
            stop = fs.data_end(fd, 0, length)
        found[name] = None if buffer is None else _place_of(buffer, stop, None, run.segment_bytes, checksum)
        if found[name] is None and name.endswith(_UNFINISHED):
            found[name] = segment_start(name.removesuffix(_UNFINISHED))
    claims = Counter(found.values())
    places = {
        name: place
        for name, place in found.items()
        if place is not None and place != said.get(name, segment_start(name)) and claims[place] == 1
    }
    # A file without any record is moved out of the way, to the first free name.
    used = {*places.values(), *(start for name, start in said.items() if name not in places)}
    free = (start for start in itertools.count(run.min_offset, run.segment_bytes) if start not in used)
    taken = set(places.values())
    for name, start in said.items():
        if start in taken and name not in places:
            places[name] = next(free)
    return places


def _begin_with_records(run: SegmentRun, start: int, checksum: Checksum) -> bool:
    """Return True if a record verifies at the start of each segment from physical offset `start` on."""

    def verifies(buffer: bytes | mmap.mmap, segment: Segment) -> bool:
        return check_record(buffer, 0, len(buffer), segment.start, checksum).status == "ok"

    return all(
        verifies(run.head(segment), segment) or verifies(run.mapping(segment), segment)  # a record may be longer
        for segment in run.segments()
        if segment.end > start
    )


def rename_segments(run: SegmentRun, places: dict[str, int], fs: FileSystem) -> None:
    """Rename segment files to match their places.
    If it is killed, call it again with the files that are misnamed then."""
    if not places:
        return
    for name, place in places.items():
        fs.replace(run.directory / name, run.directory / (segment_name(place) + _UNFINISHED))
    fs.sync_directory(run.directory)
    for place in places.values():
        fs.replace(run.directory / (segment_name(place) + _UNFINISHED), run.directory / segment_name(place))
    fs.sync_directory(run.directory)


def _other_names(run: SegmentRun, fs: FileSystem) -> list[str]:
    """Return the files of the log's folder that are not segments of it, but have, or had, names of segments."""
    own = {os.path.basename(segment.path) for segment in run.segments()}
    with suppress(FileNotFoundError):
        names = {*fs.scandir(run.directory)} - own - run.unreadable.keys()
        if others := {name for name in names if segment_start(name.removesuffix(_UNFINISHED)) is not None}:
            return [name for name, _ in fs.scandir_files(run.directory) if name in others]
    return []


def _place_of(buffer: mmap.mmap, stop: int, start: int | None, segment_bytes: int, checksum: Checksum) -> int | None:
    """Return the physical offset at which a file begins, by its records, or None if none verifies.
    Examines the bytes before `stop`. `start` is the physical offset in the file's name."""
    first = check_record(buffer, 0, len(buffer), start, checksum).status if start is not None and stop else None
    if start is not None:
        end = content_end(buffer, 0, stop)
        if first == "ok" or find_next(buffer, 0, end, start, checksum) is not None:
            return start
    for magic in _MAGICS:
        at = -1
        for _ in range(_TRIED):
            at = buffer.find(magic, at + 1, stop)
            if at < 0:
                break
            begin = at - MAGIC_AT
            physical = int.from_bytes(buffer[begin + PHYSICAL_OFFSET_AT : begin + PHYSICAL_OFFSET_AT + 8], "big")
            if begin < 0 or physical < begin or (physical - begin) % segment_bytes:
                continue
            if check_record(buffer, begin, len(buffer), physical, checksum).status == "ok":
                return physical - begin
    return start if first == "blank" else None


class Piece(NamedTuple):
    """Surplus bytes [position, stop) of `file`: as many as a segment has, or the rest of the file."""

    file: str
    position: int
    stop: int
    start: int
    """Physical offset of the first byte: from the records in it, otherwise from its place in the file."""
    kind: Literal["missing", "present", "other"]
    """Kind of bytes: a segment that the log lacks, a second copy of bytes of the log, or anything else."""
    content: mmap.mmap

    @property
    def name(self) -> str:
        return f"{os.path.basename(self.file)} [{self.position}, {self.stop})"


def surplus_pieces(run: SegmentRun, problems: Iterable[LoadProblem], checksum: Checksum, fs: FileSystem) -> list[Piece]:
    """Return the surplus of all files in `problems`, the result of loading `run`.
    A segment before the start of the log is not missing, since retention has deleted it."""
    size, end = run.segment_bytes, run.end
    found: list[Piece] = []
    for problem in problems:
        if not problem.is_surplus(size):
            continue
        for position, content in _contents(problem.file, size, fs):
            place = _place_of(content, len(content), None, size, checksum)
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
    """Yield (position, copy) of the bytes after the first `size` bytes of a file, at most `size` at a time."""
    with fs.opened(file, os.O_RDONLY) as fd:
        length = fs.size(fd)
        for position in range(size, length, size):
            content = mmap.mmap(-1, min(size, length - position))
            fs.read_into(fd, memoryview(content), position)
            yield position, content


def settle_surplus(
    run: SegmentRun, pieces: Sequence[Piece], root: Path, now_ms: int, fs: FileSystem, *, writing: bool
) -> RecoveryReport:
    """Make segments of missing ones, move the others to `cut/`, shorten the files, and return a report.
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
