"""Scan of a commitlog from start to end, damaged or not (format#verifies, format#opening).

    Good   a batch of consecutive records that verify, as arrays
    Bad    bytes that are not a record, with a record that verifies somewhere after them
    End    nothing after this position verifies: the log, or its readable part, ends here

`until_torn` is the only rule that separates damage from a torn tail. Everything is read through the mappings of
segments. At most one batch of headers, and one prefetched batch, are in memory, however long the log is.

While a writer runs, the front of the log moves, since retention unlinks the oldest segment. A scan with `on_front`
calls it and continues at the new front. Without `on_front`, FileNotFoundError ends the scan. A segment that vanishes
while older ones exist is missing, since retention does not remove it first.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, TypeVar

from mqstore import arrays as np
from mqstore.files.segment import Segment
from mqstore.files.segments import SegmentRun
from mqstore.layout.arrays.scan import Headers, check_place, content_end, find_next, read_run
from mqstore.layout.checkpoint import Checkpoint
from mqstore.layout.record import MIN_RECORD_BYTES, Check, Checksum, Record, check_record, decode_record
from mqstore.log.reading.prefetch import Prefetch
from mqstore.native import kernel

T = TypeVar("T")
NEVER_TORN = 1 << 62
"""Watermark for the case that all bad bytes are damage."""
_BATCH = 8192
_BATCH_MAX = 1 << 19
_MOST_MET = 16 << 20
_CLOSE_BYTES = 4096


class Good(NamedTuple):
    """Consecutive records in a segment, or in several small ones.
    `headers.positions` count from the physical start of the first one, `base`."""

    base: int
    buffer: mmap.mmap | bytes
    headers: Headers
    end: int
    """Physical offset after the last record."""

    def by_segment(self, size: int) -> Iterator[tuple[int, int, np.NDArray[np.int64]]]:
        """Yield (start of a segment, end of its records, their store times). Segments have `size` bytes."""
        positions, stamps = self.headers.positions, self.headers.store_timestamp_ms
        edges = np.flatnonzero(np.diff(positions // size)) + 1
        for low, high in pairwise((0, *edges.tolist(), len(positions))):
            last = self.base + positions.item(high - 1)
            yield last - last % size, last + self.headers.size.item(high - 1), stamps[low:high]


class Bad(NamedTuple):
    """[start, end) has no record that verifies, but a record begins at `end`."""

    kind: Literal["bad_record", "missing_segment", "segment_size"]
    start: int
    end: int
    detail: str


class End(NamedTuple):
    """Position after the last record of the log. `detail` describes the next bytes: "" for zeros or no bytes."""

    position: int
    detail: str
    torn: Bad | None = None
    """Bad bytes at `position`. Whole records follow, none of which is part of the log (`until_torn`)."""


OnFront = Callable[[int], None]
"""Function called with the new front if retention has removed the next segment to read."""
Event = Good | Bad | End


def first_good_in(
    run: SegmentRun, segment: Segment, start: int, checksum: Checksum, before: int | None = None
) -> int | None:
    """Return the physical offset of the first record in bytes `[start, before)` of `segment`, or None.
    Only a record that verifies counts."""
    buffer, used = run.mapping(segment), run.data_end(segment, start)
    stop = used if before is None else min(before, used)  # holes of a sparse file have no record
    found = find_next(buffer, start, used, segment.start, checksum, stop) if start < stop else None
    return None if found is None else segment.start + found


def check_at(run: SegmentRun, segment: Segment, at: int, checksum: Checksum) -> Check:
    """Check the record that begins at byte `at` of a segment, as `check_place` does."""
    buffer = run.mapping(segment)
    return check_place(buffer, at, len(buffer), segment.start + at, checksum, run.data_end(segment, at))


def record_at(run: SegmentRun, physical: int, checksum: Checksum) -> Record | None:
    """Return the record at a physical offset, or None if no record verifies there, or retention has deleted it."""
    segment = run.find(physical)
    if segment is None:
        return None
    try:
        buffer = run.mapping(segment)
    except FileNotFoundError:
        return None
    at = physical - segment.start
    if at >= len(buffer) or check_record(buffer, at, len(buffer), physical, checksum).status != "ok":
        return None
    return decode_record(buffer, at)


def used_end(run: SegmentRun, segment: Segment, start: int = 0) -> int:
    """Return the position after the last non-zero byte of a segment, or `start` if there is none."""
    buffer = run.mapping(segment)
    return content_end(buffer, start, max(start, min(len(buffer), run.data_end(segment, start))))


def goes_on(run: SegmentRun, end: int) -> bool:
    """Return True if anything but zeros closely follows physical offset `end` in its segment."""
    segment = run.find(end)
    if segment is None:
        return False
    at = end - segment.start
    return any(run.mapping(segment)[at : min(at + _CLOSE_BYTES, run.data_end(segment, at))])


def batch_for(queues: int) -> int:
    """Return the number of records to read at once if each queue of a batch has a cost.
    With many queues a small batch has only a few records of each."""
    return max(_BATCH, min(128 * queues, _BATCH_MAX))


def joined_bytes(batch: int = _BATCH) -> int:
    """Return the number of bytes of small segments to read at once, instead of `batch` records."""
    return 128 * batch


def scan_log(
    run: SegmentRun,
    start: int,
    checksum: Checksum,
    *,
    checksums: bool = True,
    on_front: OnFront | None = None,
    batch: int = _BATCH,
) -> Iterator[Event]:
    """Yield the events of the log from physical offset `start` on. The last event is an `End`.

    With `checksums` False bytes are trusted as in dispatch: only lengths, magic and the record's own offset are
    checked.
    """
    blank: set[int] = set()

    def read(segment: Segment, at: int) -> Generator[Good | Bad, None, int]:
        return scan_segment(run, segment, at, checksum, checksums=checksums, blank=blank, batch=batch)

    return join_segments(run, start, checksum, read, blank, on_front)


def used_ranges(run: SegmentRun, position: int) -> Iterator[tuple[Segment, int, int]]:
    """Yield the range of each segment from physical offset `position` on to its last byte that is not zero.
    Ranges are counted from the segment's start. Segments of zeros are left out."""
    for segment in run.segments():
        at = max(position - segment.start, 0)
        if segment.end > position and (stop := used_end(run, segment, at)) > at:
            yield segment, at, stop


def until_torn(events: Iterable[T | Bad | End], watermark: Callable[[], int]) -> Iterator[T | Bad | End]:
    """Yield the events of a log up to its end, the first bad bytes at or beyond its watermark.
    So each yielded `Bad` is damage. `watermark` is only called if there are bad bytes, since it may need a scan."""
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
    batch: int = _BATCH,
) -> Generator[Good | Bad, None, int]:
    """Yield the events of a segment for records that begin in `[start, stop)`, counted from its start.

    A record should begin at `start`. `stop` None means the end of the segment. Physical offsets after which a segment
    has only zeros are added to `blank`. Whole small segments after this one are read with it, up to `stop` if that is
    given.

    Returns the position where the scan ended. The next record should begin there if it is at or after `stop`. The size
    of a segment means that this segment is full, a multiple that so are the next ones. A smaller position means that no
    record verifies from there to `stop`.
    """
    base, size = segment.start, run.segment_bytes
    most = joined_bytes(batch) if stop is None else stop
    if start == 0 and kernel is not None and (joined := run.joined(segment, most)):
        least = len(joined) // MIN_RECORD_BYTES + 1
        read_joined = partial(read_run, joined, 0, checksums=checksums, met=len(joined), segment_bytes=size)
        headers, end, _ = read_joined(len(joined), base, checksum, least)
        if rest := end % size:
            headers, end, _ = read_joined(end - rest, base, checksum, least)
        run.alone = range(base + end, base + len(joined))
        if len(headers):
            yield Good(base, joined, headers, base + headers.positions.item(-1) + headers.size.item(-1))
        if end:
            return end
    buffer = run.mapping(segment)
    stop = len(buffer) if stop is None else min(stop, len(buffer))
    run.read_ahead(segment, start, stop)

    def read(at: int, met: int) -> tuple[Headers, int, int]:
        # Up to the last data, not `stop`: on a full tmpfs, reading a hole of a mapped file raises SIGBUS.
        return read_run(buffer, at, max(at, used), base, checksum, batch, checksums=checksums, met=met)

    at = start
    doubted = -1
    met = length = used = 0
    with Prefetch[tuple[Headers, int, int]]("mqstore-scanner") as ahead:
        while at < stop:
            if at >= used:  # read it again, since another process may be writing
                used = min(stop, run.data_end(segment, at))
            if kernel is not None and ahead.begun:
                # The batch is usually still being read. Meanwhile load about as many of the pages after it.
                near = max(met, at + length)
                far = min(near + length, near + _MOST_MET, used)
                if near < far:
                    kernel.meet(buffer, near, far)
                headers, at, met = ahead.result()
                met = max(met, far)
            else:
                headers, at, met = read(at, met)
            if len(headers):
                many = len(headers) == batch
                if many and at < stop and kernel is not None:
                    # Compiled code reads the next batch on another processor, while the caller handles this one.
                    ahead.begin(partial(read, at, met))
                    length = at - int(headers.positions[0])
                yield Good(base, buffer, headers, base + at)
                del headers  # so that its memory is free before the next batch
                if many:
                    continue
            if at >= stop:
                break
            check = check_at(run, segment, at, checksum)
            if check.status == "blank":
                return size
            if blank is not None and stop == len(buffer) and used_end(run, segment, at) == at:
                blank.add(base + at)
                break
            # These bytes are not a record. Look for one after them.
            found = first_good_in(run, segment, at + 1, checksum, stop)
            if found is None:
                break
            found -= base
            if at != doubted and check_at(run, segment, at, checksum).status != "bad":
                # Another process's writer has finished this record since, and written the next one.
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
    """Yield the events of each segment from physical offset `start` on, and those between segments.

    Between segments, segments may be missing, or the end of a segment is unused. The last event is an `End`.

    `read(segment, position)` yields and returns the same as `scan_segment`. Positions that it adds to `blank` are not
    checked for zeros again. Segments created meanwhile are not read.
    """
    position = start
    stop = run.end
    doubted = -1
    at_front = True
    while (segment := _next_segment(run, position, stop)) is not None:
        try:
            if at_front:
                position = max(position, segment.start)  # retention has removed the front
                at_front = False
            elif segment.start > position and on_front is not None and segment.start == run.min_offset:
                position = segment.start  # the caller has listed the log again
                on_front(position)
            elif segment.start > position:
                following = _next_good(run, position, stop, checksum)
                if following is None:
                    break
                found_in, found = following
                why = run.reasons(position, found_in.start)
                yield Bad("missing_segment", position, found, f"no file holds [{position}, {found_in.start}){why}")
                position, segment = found, found_in
            at = yield from read(segment, position - segment.start)
            if at >= run.segment_bytes:
                position = segment.start + at  # full to its end
                continue
            # The rest of this segment has no record.
            buffer = run.mapping(segment)
            short = len(buffer) < run.segment_bytes
            following = _next_good(run, segment.end, stop, checksum)
            here = segment.start + at
            if short and here == run.limit:
                detail = ""  # bytes beyond its limit do not concern a reader
            elif short and at >= len(buffer):
                detail = f"the file ends after {len(buffer)} of {run.segment_bytes} bytes"
            elif here in blank or used_end(run, segment, at) == at:
                detail = ""
            else:
                detail = check_at(run, segment, at, checksum).detail
            if following is None:
                yield End(here, detail)
                return
            if not short and here != doubted and check_at(run, segment, at, checksum).status != "bad":
                # As in `scan_segment`, the writer has continued here, and then in the next segment.
                position = doubted = here
                continue
            kind: Literal["bad_record", "segment_size"] = "segment_size" if short else "bad_record"
            yield Bad(kind, here, following[1], detail or "zeros instead of records")
            position = following[1]
        except FileNotFoundError:
            if on_front is None or not run.is_gone(segment):
                raise
            if not run.starts or run.min_offset > segment.start:
                # Retention may have passed everything that a reader with a limit sees.
                position = run.min_offset if run.starts else stop if run.limit is None else min(stop, run.limit)
                on_front(position)
    yield End(position, "")


def _next_segment(run: SegmentRun, position: int, stop: int) -> Segment | None:
    """Return the segment that contains `position`, or else the next one that begins before `stop`, or None."""
    here = run.find(position)
    if here is None:
        starts = run.starts
        index = bisect_left(starts, position)
        here = run.find(starts[index]) if index < len(starts) else None
    return here if here is not None and here.start < stop else None


def _next_good(run: SegmentRun, position: int, stop: int, checksum: Checksum) -> tuple[Segment, int] | None:
    """Return the first record that verifies from the segment of `position` on, as (its segment, its offset).
    Returns None if there is none in the segments that begin before `stop`."""
    while (segment := _next_segment(run, position, stop)) is not None:
        found = first_good_in(run, segment, 0, checksum)
        if found is not None:
            return segment, found
        position = segment.end
    return None


# -- the watermark -----------------------------------------------------------------------------------------------------


def watermark(
    run: SegmentRun, checkpoint: Checkpoint, checksum: Checksum, *, clean: bool, start: int | None = None
) -> int:
    """Return the watermark, a physical offset, of a log that is not empty and that no writer has open.

    `clean` means that the store was closed. `start` is the first physical offset that the caller reads, and the start
    of a segment. None means the front of the log. May read the headers of the log from there on.
    """
    if clean:
        end = max(checkpoint.flushed or 0, checkpoint.clean_end or 0)
        if checkpoint.flushed is None or goes_on(run, end):
            # A closed log was synced completely. A log that continues there has another store's checkpoint, or none.
            return max(end, written_end(run, run.min_offset if start is None else start, checksum))
        return end
    if checkpoint.flushed is not None:
        return checkpoint.flushed
    stamp = checkpoint.physic_msg_timestamp_ms
    if stamp <= 0:
        return run.min_offset
    # In a Java store all records before that time were flushed. Times ascend along the log, so check the first record
    # of each segment, then search the last segment that begins before that time.
    begin = run.min_offset
    for candidate in run.starts:
        first = first_record_time(run, candidate, checksum)
        if first is not None and first < stamp:
            begin = candidate
    for event in scan_log(run, begin, checksum, checksums=False):
        if isinstance(event, Good):
            late = np.flatnonzero(event.headers.store_timestamp_ms >= stamp)
            if len(late):
                return event.base + int(event.headers.positions[late[0]])
        elif isinstance(event, End):
            return event.position
    return run.min_offset


def first_record_time(run: SegmentRun, start: int, checksum: Checksum) -> int | None:
    """Return the store time of the record at the start of a segment, or None if it does not verify."""
    record = record_at(run, start, checksum)
    return None if record is None else record.store_timestamp_ms or None


def written_end(run: SegmentRun, start: int, checksum: Checksum) -> int:
    """Return the end of a cleanly closed log, by following the lengths of records from `start`.
    `start` is the start of a segment. Records that do not verify count, since they were written."""
    end = start
    for event in scan_log(run, start, checksum, checksums=False):
        end = event.position if isinstance(event, End) else event.end
    return end
