"""Detection and renaming of segment files with wrong names, by the physical offsets in their records.

`mqstore recover` renames such files. Commands that read show the log as if they were renamed already. Opening for
writing refuses the store: records in a wrong place would count as damage, and be cut at the end of the log.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections import Counter

from mqstore.errors import CorruptStoreError
from mqstore.files.filesystem import FileSystem
from mqstore.files.segment import segment_name, segment_start
from mqstore.files.segments import SegmentRun
from mqstore.layout.record import MAGIC_AT, MAGIC_V1, MAGIC_V2, PHYSICAL_OFFSET_AT, Checksum, check_record
from mqstore.layout.scan import content_end, find_next
from mqstore.log.recovery.scanner import record_at

__all__ = ["MisnamedSegmentsError", "misnamed_segments", "place_of", "rename_segments"]

_MAGICS = tuple(magic.to_bytes(4, "big", signed=True) for magic in (MAGIC_V1, MAGIC_V2))
_TRIED = 1000
"""Number of magic numbers to examine in one file. A hostile file may consist of them."""
_UNFINISHED = ".moved"
"""Suffix of a file that a killed recovery was renaming."""


class MisnamedSegmentsError(CorruptStoreError):
    """Segments are in files with wrong names, or behind the end of another one. Nothing was changed."""

    def __init__(self, root: str | os.PathLike[str], places: dict[str, int]) -> None:
        name, start = next(iter(places.items()))
        text = f"{len(places)} segments are in the wrong file: {name} holds the records of {segment_name(start)}"
        super().__init__(text, os.path.join(root, "commitlog", name), repair=f"mqstore recover {os.fspath(root)}")


def misnamed_segments(run: SegmentRun, checksum: Checksum, fs: FileSystem, start: int = 0) -> dict[str, int]:
    """Return the right physical offset of each segment file with a wrong name, by file name.
    Empty if the names from physical offset `start` on are right. Leaves out a file whose place another file rightly
    has."""
    others = [name for name in _names(run, fs) if name not in {os.path.basename(s.path) for s in run.segments()}]
    looked_at = [segment.start for segment in run.segments() if segment.end > start]
    if not others and all(record_at(run, each, checksum) is not None for each in looked_at):
        return {}
    said = {os.path.basename(segment.path): segment.start for segment in run.segments()}
    found = {
        os.path.basename(segment.path): place_of(
            run.mapping(segment), run.data_end(segment, 0), segment.start, run.segment_bytes, checksum
        )
        for segment in run.segments()
    }
    for name in others:
        with fs.opened(run.directory / name, os.O_RDONLY) as fd:
            length = min(fs.size(fd), run.segment_bytes)
            buffer = fs.map(fd, length, writable=False) if length else None
            stop = fs.data_end(fd, 0, length)
        found[name] = None if buffer is None else place_of(buffer, stop, None, run.segment_bytes, checksum)
        if found[name] is None and name.endswith(_UNFINISHED):
            found[name] = segment_start(name.removesuffix(_UNFINISHED))
    claims = Counter(found.values())
    places = {
        name: place
        for name, place in found.items()
        if place is not None and place != said.get(name, segment_start(name)) and claims[place] == 1
    }
    # A file without any record makes room, and gets the first name that is free.
    used = {*places.values(), *(start for name, start in said.items() if name not in places)}
    free = (start for start in itertools.count(run.min_offset, run.segment_bytes) if start not in used)
    taken = set(places.values())
    for name, start in said.items():
        if start in taken and name not in places:
            places[name] = next(free)
    return places


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


def _names(run: SegmentRun, fs: FileSystem) -> list[str]:
    """Return the names in the folder of the log that are, or were, those of segments."""
    try:
        files = fs.scandir_files(run.directory)
    except FileNotFoundError:
        return []
    known = (name for name, _ in files if name not in run.unreadable)
    return [name for name in known if segment_start(name.removesuffix(_UNFINISHED)) is not None]


def place_of(buffer: mmap.mmap, stop: int, start: int | None, segment_bytes: int, checksum: Checksum) -> int | None:
    """Return the physical offset at which a file begins, by its records, or None if none verifies.
    Looks at the bytes before `stop`. `start` is the physical offset in the file's name."""
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
