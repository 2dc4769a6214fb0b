"""Walk a commitlog from end to end, damaged or not (format#verifies, format#opening).

    Good   a stretch of consecutive records that verify, as arrays
    Bad    bytes that are no record, with a record that verifies somewhere behind them
    End    nothing behind this position verifies: here the log ends, or its readable part

`until_torn` says where bad bytes are damage and where they are a torn tail, for everybody who has to know. Reads
through the segments' mappings only; at most one stretch of headers is in memory at a time, however long the log.

Beside a writer the front of the log moves: its retention unlinks the oldest segment. A walk that was given `on_front`
goes on at the new front, and says so by calling it; without, FileNotFoundError ends the walk. A segment that vanishes
while older ones are there is no work of retention, and is missing.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from mqstore.files.segment import Segment
from mqstore.files.segments import SegmentRun
from mqstore.layout.record import Checksum, Record, check_record, decode_record
from mqstore.layout.scan import Headers, content_end, find_next, read_run
from mqstore.layout.spares import Spares
from mqstore.log.ahead import Ahead
from mqstore.native import kernel

__all__ = [
    "Bad",
    "End",
    "Event",
    "Good",
    "OnFront",
    "first_good_in",
    "join_segments",
    "record_at",
    "scan_log",
    "scan_segment",
    "until_torn",
    "used_end",
]

T = TypeVar("T")
_BATCH = 8192
_MOST_MET = 16 << 20


@dataclass(frozen=True, slots=True)
class Good:
    """Consecutive records in one segment; `headers.positions` count from the segment's start, `base`."""

    segment: Segment
    base: int
    buffer: mmap.mmap
    headers: Headers
    end: int
    """Physical offset behind the last of them."""


@dataclass(frozen=True, slots=True)
class Bad:
    """[start, end) holds no record that verifies, but one begins at `end`."""

    kind: Literal["bad_record", "missing_segment", "segment_size"]
    start: int
    end: int
    detail: str


@dataclass(frozen=True, slots=True)
class End:
    """The last position that a record led to. `detail` tells what lies there; "" for zeros or the end of the files."""

    position: int
    detail: str
    torn: Bad | None = None
    """Bad bytes at `position` with whole records behind them, none of which is of the log (`until_torn`)."""


OnFront = Callable[[int], None]
"""Called with the physical offset where a walk goes on, when retention has taken what it was about to read."""
Event = Good | Bad | End


def first_good_in(
    run: SegmentRun, segment: Segment, start: int, checksum: Checksum, before: int | None = None
) -> int | None:
    """Physical offset of the first record that begins in bytes `[start, before)` of `segment` and verifies; None
    without one."""
    buffer = run.mapping(segment)
    # Holes of a sparse file need not be read.
    stop = min(len(buffer) if before is None else before, run.data_end(segment, start))
    found = find_next(buffer, start, len(buffer), segment.start, checksum, stop) if start < stop else None
    return None if found is None else segment.start + found


def record_at(run: SegmentRun, physical: int, checksum: Checksum) -> Record | None:
    """Return the record at a physical offset; None if none that verifies begins there."""
    segment = run.find(physical)
    if segment is None:
        return None
    buffer = run.mapping(segment)
    at = physical - segment.start
    if at >= len(buffer) or check_record(buffer, at, len(buffer), physical, checksum).status != "ok":
        return None
    return decode_record(buffer, at)


def used_end(run: SegmentRun, segment: Segment, start: int = 0) -> int:
    """The position behind the last byte in a segment, from `start` on, that is not zero; `start` when there is none."""
    buffer = run.mapping(segment)
    return content_end(buffer, start, max(start, min(len(buffer), run.data_end(segment, start))))


def scan_log(
    run: SegmentRun, start: int, checksum: Checksum, *, checksums: bool = True, on_front: OnFront | None = None
) -> Iterator[Event]:
    """What the log holds from physical offset `start` on, in order; the last event is an `End`.

    `checksums` False trusts bytes as dispatch does: lengths, magic and the record's own offset are still checked.
    """
    blank: set[int] = set()

    def read(segment: Segment, at: int) -> Generator[Good | Bad, None, int]:
        return scan_segment(run, segment, at, checksum, checksums=checksums, blank=blank)

    return join_segments(run, start, checksum, read, blank, on_front)


def until_torn(events: Iterable[T | Bad | End], watermark: Callable[[], int]) -> Iterator[T | Bad | End]:
    """Yield the events of a log up to its end, which is at the first bad bytes at or beyond its watermark. `Bad` then
    means damage. `watermark` is called only if there are bad bytes, since it may have to be found out."""
    for event in events:
        if isinstance(event, Bad) and event.start >= watermark():
            yield End(event.start, event.detail, event)
            return
        yield event


def scan_segment(
    run: SegmentRun,
    segment: Segment,
    start: int,
    checksum: Checksum,
    *,
    stop: int | None = None,
    checksums: bool = True,
    blank: set[int] | None = None,
) -> Generator[Good | Bad, None, int]:
    """What a segment holds of records that begin in `[start, stop)`, counted from its own start; `stop` None: to its
    end. `start` is where a record should begin.

    Returns where it ended: at or behind `stop` the next record should begin there, the size of a segment says that
    this one is full; below both, nothing that verifies begins in `[there, stop)`. A physical offset from which on there
    were nothing but zeros is added to `blank`.
    """
    base = segment.start
    buffer = run.mapping(segment)
    stop = len(buffer) if stop is None else min(stop, len(buffer))
    run.read_ahead(segment, start, stop)
    spares = Spares()

    def read(at: int, met: int) -> tuple[Headers, int, int]:
        return read_run(buffer, at, stop, base, checksum, _BATCH, checksums=checksums, met=met, spares=spares)

    at = start
    doubted = -1
    met = length = used = 0
    with Ahead[tuple[Headers, int, int]]("mqstore-scanner") as ahead:
        while at < stop:
            if kernel is not None and ahead.begun:
                # As a rule it is still being read. Meanwhile the pages behind it come in, about as many as it takes.
                near = max(met, at + length)
                far = min(near + length, near + _MOST_MET, used)
                if near < far:
                    kernel.meet(buffer, near, far)
                headers, at, met = ahead.result()
                met = max(met, far)
            else:
                headers, at, met = read(at, met)
            if len(headers):
                many = len(headers) == _BATCH
                if many and at < stop and kernel is not None:
                    # Compiled code reads the next one on another processor, while this one is dealt with.
                    ahead.begin(partial(read, at, met))
                    used = used or min(stop, run.data_end(segment, at))
                    length = at - int(headers.positions[0])
                yield Good(segment, base, buffer, headers, base + at)
                del headers  # its memory is for another one
                if many:
                    continue
            if at >= stop:
                break
            check = check_record(buffer, at, len(buffer), base + at, checksum)
            if check.status == "blank":
                return run.segment_bytes
            if blank is not None and stop == len(buffer) and used_end(run, segment, at) == at:
                blank.add(base + at)
                break
            # Not a record. Is there one behind?
            found = first_good_in(run, segment, at + 1, checksum, stop)
            if found is None:
                break
            found -= base
            if at != doubted and check_record(buffer, at, len(buffer), base + at, checksum).status != "bad":
                # Another process's writer has finished it since we looked, and gone on to the one behind.
                doubted = at
                continue
            yield Bad("bad_record", base + at, base + found, check.detail)
            at = found
    return at


def join_segments(
    run: SegmentRun,
    start: int,
    checksum: Checksum,
    read: Callable[[Segment, int], Generator[T | Bad, None, int]],
    blank: Collection[int] = (),
    on_front: OnFront | None = None,
) -> Iterator[T | Bad | End]:
    """What `read` tells of each segment from physical offset `start` on, and what lies between: segments that are
    missing, or hold nothing any more from some place on. The last event is an `End`.

    `read(segment, position)` is `scan_segment`, or who knows already what that would say, and returns as it does. Where
    it adds to `blank` is not looked at again. Segments that come meanwhile are not read.
    """
    position = start
    stop = run.end
    doubted = -1
    at_front = True
    while (segment := _next_segment(run, position, stop)) is not None:
        try:
            if at_front:
                position = max(position, segment.start)  # the front was dropped
                at_front = False
            elif segment.start > position and on_front is not None and segment.start == run.min_offset:
                position = segment.start  # whoever takes the events has listed the log again
                on_front(position)
            elif segment.start > position:
                following = _next_good(run, position, stop, checksum)
                if following is None:
                    break
                found_in, found = following
                yield Bad("missing_segment", position, found, f"no file holds [{position}, {found_in.start})")
                position, segment = found, found_in
            at = yield from read(segment, position - segment.start)
            if at >= run.segment_bytes:
                position = segment.end  # full to its end
                continue
            # The rest of this segment holds no record.
            buffer = run.mapping(segment)
            short = len(buffer) < run.segment_bytes
            following = _next_good(run, segment.end, stop, checksum)
            here = segment.start + at
            if short and here == run.limit:
                detail = ""  # what lies behind is none of a reader's business
            elif short and at >= len(buffer):
                detail = f"the file ends after {len(buffer)} of {run.segment_bytes} bytes"
            elif here in blank or used_end(run, segment, at) == at:
                detail = ""
            else:
                detail = check_record(buffer, at, len(buffer), here, checksum).detail
            if following is None:
                yield End(here, detail)
                return
            if not short and here != doubted and check_record(buffer, at, len(buffer), here, checksum).status != "bad":
                # As in `scan_segment`: the writer has gone on, here and then to the next segment.
                position = doubted = here
                continue
            kind: Literal["bad_record", "segment_size"] = "segment_size" if short else "bad_record"
            yield Bad(kind, here, following[1], detail or "zeros where records should be")
            position = following[1]
        except FileNotFoundError:
            if on_front is None or not run.is_gone(segment):
                raise
            if not run.starts or run.min_offset > segment.start:
                # Retention may have passed all that a reader with a limit sees.
                position = run.min_offset if run.starts else stop if run.limit is None else min(stop, run.limit)
                on_front(position)
    yield End(position, "")


def _next_segment(run: SegmentRun, position: int, stop: int) -> Segment | None:
    """The segment that holds `position`, or the first one behind; none that begins at `stop` or behind."""
    here = run.find(position)
    if here is None:
        starts = run.starts
        index = bisect_left(starts, position)
        here = run.find(starts[index]) if index < len(starts) else None
    return here if here is not None and here.start < stop else None


def _next_good(run: SegmentRun, position: int, stop: int, checksum: Checksum) -> tuple[Segment, int] | None:
    """The first record that verifies in the segments from `position` on, up to `stop`: (its segment, where it is)."""
    while (segment := _next_segment(run, position, stop)) is not None:
        found = first_good_in(run, segment, 0, checksum)
        if found is not None:
            return segment, found
        position = segment.end
    return None
