"""Walk a commitlog from end to end, damaged or not (store-format 9.2, 9.8).

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

import numpy as np
import numpy.typing as npt

from mqstore.files.segments import Segment, SegmentRun
from mqstore.layout.consumequeue import is_void
from mqstore.layout.record import MIN_RECORD_BYTES, Checksum, Record, check_record, decode_record
from mqstore.layout.scan import Headers, content_end, find_next, read_run
from mqstore.layout.spares import Spares
from mqstore.log.ahead import Ahead
from mqstore.log.consumequeue import ConsumeQueue
from mqstore.native import kernel

__all__ = [
    "MAX_SLOT",
    "Bad",
    "End",
    "Event",
    "Good",
    "OnFront",
    "first_good_in",
    "first_slot_in_range",
    "join_segments",
    "least_plausible",
    "record_at",
    "scan_log",
    "scan_segment",
    "sort_out",
    "strays_in_front",
    "until_torn",
    "used_end",
    "wrong_number",
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


Leads = Callable[[ConsumeQueue, int, int], bool]
MAX_SLOT = (1 << 63) // 64
"""No queue can have more units: their byte offset is an i64, and 20 bytes each."""


def least_plausible(offsets: npt.NDArray[np.int64], physical: npt.NDArray[np.int64]) -> int:
    """The smallest of the queueOffsets of one queue's records that lie at `physical`, ascending, leaving out those that
    are too far from the middle one for the bytes between the first record and the last."""
    middle = int(np.median(offsets))
    room = int(physical[-1] - physical[0]) // MIN_RECORD_BYTES + 1
    return int(offsets[np.abs(offsets - middle) <= room].min(initial=middle))


def first_slot_in_range(queue: ConsumeQueue, start: int, least: int | None) -> tuple[int | None, int]:
    """(the first slot whose unit is none of a record below `start`, where the record before that slot ends).

    Units grow along the queue, so this looks backwards from its end, or from the least number seen if that is
    lower. A void unit below that one counts as such a record's: an earlier recovery let the queue begin behind it.
    Where no file reaches that far back there is no such slot: the queue begins with the first number seen, None.
    """
    if not queue.list_files() or (least is not None and least < queue.first_offset()):
        return (None if least is not None else queue.max_offset), 0
    slot = end = queue.max_offset if least is None else min(queue.max_offset, least)
    for slot, units in queue.held_before(end, 1024):
        void = is_void(units)
        passed = (units["physical_offset"] < start) & (units["size"] > 0)
        older = np.flatnonzero(passed | void if least is not None else passed)
        if len(older):
            live = older[~void[older]]
            seen = sum(units[live[-1]].tolist()[:2]) if len(live) else 0
            return slot + int(older[-1]) + 1, max(0, min(seen, start))
    return slot, 0


def strays_in_front(queue: ConsumeQueue, stop: int, start: int) -> Iterator[tuple[int, int]]:
    """Slots before `stop` are those of records that retention took. Of these the runs [low, high) whose units point
    behind `start`, where the log begins, all the same: they are of no record, and a queue whose first file begins with
    one would begin there (4.6). They are to become void."""
    for at, units in queue.held(queue.first_offset(), min(stop, queue.max_offset)):
        wrong = np.flatnonzero((units["physical_offset"] >= start) & ~is_void(units))
        for group in np.split(wrong, np.flatnonzero(np.diff(wrong) > 1) + 1) if len(wrong) else []:
            yield at + int(group[0]), at + int(group[-1]) + 1


def wrong_number(queue: ConsumeQueue, said: int, slot: int) -> str:
    """Return the detail of a finding: a record says queue offset `said`, and has `slot`, or none if it is the same."""
    rest = f"; by its unit and neighbours it is {slot}" if slot != said else ""
    return f"queueOffset {said} of {queue.topic}/{queue.queue_id} does not follow those around it{rest}"


def sort_out(
    expected: int | None,
    seen: int,
    offsets: npt.NDArray[np.int64],
    physical: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    queue: ConsumeQueue | None = None,
    leads: Leads = lambda queue, slot, physical: False,
) -> tuple[npt.NDArray[np.int64], list[tuple[int, int]], list[int]]:
    """Find the slots of one queue's records, which lie at `physical` in the log and say `offsets`.

    Returns (the slot of each record; index ranges of consecutive slots, in order; indices of the records that get no
    slot). `expected` is the slot behind the last record before these, which ends at `seen`; None when there is none to
    go by. A number that another record has already, one that jumps further than lost records could explain, or one that
    later records contradict, is wrong: profile `rocketmq` has no checksum over it (2.10). To believe it would void the
    slots of the rest. Such a record gets the slot whose unit leads to it, where its neighbours leave room for that, or
    else the only slot that they leave. A record of another queue, whose queue id is damaged, gets no slot that another
    record has. `queue` None: its units are not asked. `leads` tells whether a unit leads to the record of its slot.
    """
    count = len(offsets)
    follow = (
        count
        and (offsets[0] == expected or (expected is None and 0 <= offsets[0] < MAX_SLOT))
        and offsets[-1] - offsets[0] == count - 1
        and bool((np.diff(offsets) == 1).all())
    )
    if follow and (queue is None or not _contrary(queue.units(int(offsets[0]), count), physical).any()):
        return offsets, [(0, count)], []
    said = offsets
    if queue is not None:
        offsets = _by_units(queue, expected, offsets, physical, sizes, leads)
    # The smallest number among those behind: a record whose own is greater stands in the way of that one.
    wanted = np.where(offsets >= (expected or 0), offsets, MAX_SLOT)
    least_behind = np.append(np.minimum.accumulate(wanted[::-1])[::-1], MAX_SLOT).tolist()
    runs: list[tuple[int, int]] = []
    odd: list[int] = []
    ends = (physical + sizes).tolist()
    for i, (offset, at, end) in enumerate(zip(offsets.tolist(), physical.tolist(), ends, strict=True)):
        if expected is None:
            follows = 0 <= offset < least_behind[i + 1] or offset == 0
        else:
            gap = offset - expected
            follows = gap == 0 or (0 < gap <= (at - seen) // MIN_RECORD_BYTES and offset < least_behind[i + 1])
            if gap > 0 and follows and queue is not None:  # is the record lost that it leaves out?
                follows = not _is_kept(queue, expected, leads)
        if not follows:
            odd.append(i)
            continue
        skipped = i - (runs[-1][1] if runs else 0)
        if skipped and offset - skipped >= 0 and expected in (None, offset - skipped):  # the only slots that are left
            offsets = offsets.copy()
            offsets[i - skipped : i] = np.arange(offset - skipped, offset)
            del odd[-skipped:]
            runs.append((i - skipped, i))
        if runs and runs[-1][1] == i and offset == offsets[i - 1] + 1:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
        expected, seen = offset + 1, end
    if odd and offsets is not said:
        offsets[odd] = said[odd]
    return offsets, runs, odd


def _is_kept(queue: ConsumeQueue, slot: int, leads: Leads) -> bool:
    """Return True if the unit of a slot leads to the record of that slot."""
    physical, size, _ = queue.units(slot, 1)[0].tolist()
    return size > 0 and leads(queue, slot, physical)


def _contrary(units: npt.NDArray[np.void], physical: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return which units lead to another place than `physical`."""
    contrary: npt.NDArray[np.bool_] = (units["size"] > 0) & ~is_void(units) & (units["physical_offset"] != physical)
    return contrary


def _by_units(
    queue: ConsumeQueue,
    expected: int | None,
    offsets: npt.NDArray[np.int64],
    physical: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    leads: Leads,
) -> npt.NDArray[np.int64]:
    """`offsets`, with the slot whose unit leads to a record in place of a number that does not fit the neighbours."""
    low = int(np.median(offsets)) - len(offsets) if expected is None else expected
    found = np.full(len(offsets), -1, np.int64)
    displaced = []
    for at, units in queue.held(max(0, low), min(queue.max_offset, max(0, low) + 2 * len(offsets))):
        order = np.argsort(units["physical_offset"], kind="stable")
        nearest = order[np.minimum(np.searchsorted(units["physical_offset"][order], physical), len(units) - 1)]
        own = np.clip(offsets - at, 0, len(units) - 1)
        for chosen in (nearest, own):  # its own number, if a unit there leads to it, too
            here = (units["physical_offset"][chosen] == physical) & (units["size"][chosen] == sizes)
            found[here] = at + chosen[here]
        for i in np.flatnonzero(_contrary(units[own], physical) & (at + own == offsets)).tolist():
            if leads(queue, int(offsets[i]), int(units["physical_offset"][own[i]])):
                displaced.append(i)
    fixed = offsets.copy()
    fixed[displaced] = -1
    for i in np.flatnonzero((found >= 0) & (found != offsets)).tolist():
        before = max(fixed[:i].max(initial=-1), -1 if expected is None else expected - 1)
        behind = offsets[i + 1] if i + 1 < len(offsets) else MAX_SLOT
        if before < found[i] < behind:
            fixed[i] = found[i]
    return fixed
