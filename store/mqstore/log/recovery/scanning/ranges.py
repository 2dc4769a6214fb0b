"""Reading of a log in byte ranges, and joining of the results, in one process or in many tasks.

A record has its own physical offset, so reading may begin anywhere. It begins at the first place in a range where a
record with this physical offset verifies (format#verifies, format#opening, spark#ranges).

    segment   |........................|........................|..........BLANK|
    ranges    low                      high = low of the next
    results   first ............... end     end: where the next record should begin, usually a little after `high`
                                  = first of the next result, or the two do not fit together

A result says for every queue whether its records followed each other. Such a *straight* part is not checked again.
`Stitcher` joins the results of a segment. Its events are those of a scan from the segment's start:

    first == end of the previous result         the result counts
    nothing verified since, and first is later  the bytes in between are `Bad`, and the result counts
    no result, or anything else                 the range is read again, from the end of the previous result. The range
                                                may start at a false start: a record image inside a body, or a
                                                record that only verifies if reading starts there

Ranges and results are small, plain values. They contain no record, and at most `max_errors` findings.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, TypeVar

from mqstore import arrays as np
from mqstore.errors import ConfigError
from mqstore.files.segment import Segment
from mqstore.files.segments import SegmentRun
from mqstore.layout.arrays.dispatch import Edges, Rows
from mqstore.layout.arrays.scan import has_crc_tail
from mqstore.log.directory.names import is_path_safe
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.recovery.indexrepair import IndexTally
from mqstore.log.recovery.offset_assigner import MAX_SLOT
from mqstore.log.recovery.report import Finding
from mqstore.log.recovery.scanning.scanner import (
    Bad,
    End,
    Good,
    OnFront,
    batch_for,
    check_at,
    first_good_in,
    join_segments,
    scan_segment,
    until_torn,
)

if TYPE_CHECKING:
    TakeRun = Callable[[tuple[str, int], int, np.ndarray], Iterable[Finding]]
    """Function of a queue, first queue offset and the units of a straight run. Returns its findings."""

T = TypeVar("T")
RANGE_BYTES = 64 << 20
"""Default size of a range."""


@dataclass(frozen=True, slots=True)
class LogRange:
    """The records that begin in bytes [low, high) of the segment at physical offset `base`.
    `low` and `high` count from the start of the segment. `high` is greater than its size if the range has several whole
    segments, which are small."""

    base: int
    low: int
    high: int


@dataclass(slots=True)
class _QueuePart:
    """A queue's records in a range: their queue offsets from `first` up to `stop`, and their range of bytes."""

    first: int
    stop: int
    first_physical: int
    last_end: int
    straight: bool = True
    """True if each record's queue offset was one more than the previous record's."""
    findings: Sequence[Finding] = ()
    """Findings of `take_run`, up to the first break. At most `max_errors`."""
    unlisted: int = 0
    """Number of findings that were left out."""

    def follows(self, other: _QueuePart) -> bool:
        """Return True if these records and those of `other`, the part before, followed each other."""
        return self.straight and other.straight and other.stop == self.first


@dataclass(slots=True)
class RangeResult:
    """Result of reading a range. Positions count from the segment's start."""

    range: LogRange
    first: int | None
    """Position at which reading began, or None if no record that verifies begins in the range."""
    end: int
    """Position at which reading ended, as `scan_segment` returns it."""
    records: int = 0
    bytes: int = 0
    body_checksum_only: int = 0
    """Number of records whose checksum covers only their body."""
    blank: set[int] = field(default_factory=set)
    """Physical offset after which the segment has only zeros, if that was seen."""
    bads: list[Bad] = field(default_factory=list)
    torn: Bad | None = None
    """Bad bytes that end the log in this range, and reading with it (`until_torn`)."""
    unlisted: int = 0
    """Number of bad ranges that were left out of `bads`."""
    queues: dict[tuple[str, int], _QueuePart] = field(default_factory=dict)
    index: IndexTally = field(default_factory=IndexTally)

    @property
    def errors(self) -> int:
        """Number of findings, listed or not."""
        of_queues = sum(part.unlisted + len(part.findings) for part in self.queues.values())
        return self.unlisted + len(self.bads) + of_queues


def cut_ranges(run: SegmentRun, range_bytes: int, end: int, together: int) -> list[LogRange]:
    """Return the log of an open store up to `end`, cut into ranges of about equal size.
    Small segments share a range of at most `together` bytes. Raises ConfigError if `range_bytes` is less than 1."""
    if range_bytes < 1:
        raise ConfigError(f"range_bytes must be at least 1, not {range_bytes}")
    ranges: list[LogRange] = []
    for segment in run.segments():
        if not ranges or ranges[-1].base + ranges[-1].high <= segment.start:
            ranges += _cut(run, segment, range_bytes, end, together)
    return ranges


def _cut(run: SegmentRun, segment: Segment, range_bytes: int, end: int, together: int) -> list[LogRange]:
    """Return a range of small segments from `segment` on, or the ranges of `segment`."""
    base = segment.start
    if whole := run.whole(segment, min(range_bytes, together, end - base)):
        return [LogRange(base, 0, whole[-1].end - base)]
    length = min(segment.length, segment.size, end - base)
    if length <= 0:
        return []
    pieces = -(-length // range_bytes)
    edges = [length * i // pieces for i in range(pieces + 1)]
    return [LogRange(base, low, high) for low, high in pairwise(edges)]


def read_range(
    parts: StoreParts,
    piece: LogRange,
    start: int | None,
    *,
    take: Callable[[Good], Rows],
    take_run: TakeRun,
    max_errors: int | None,
    watermark: Callable[[], int],
) -> RangeResult | None:
    """Read a range of a log. Returns None if retention has removed its segment.

    All records are passed to `take`, which returns their `Rows`. Each run of consecutive records of a queue is passed
    to `take_run`, until the first break. A record must begin at `start`. If `start` is None, reading begins at the
    start of the segment, or at the first record that verifies. `Stitcher` describes `watermark`.
    """
    run, checksum = parts.log_files, parts.checksum
    segment = run.find(piece.base)
    if segment is None:
        return None
    first = 0 if start is None else start
    if start is None and piece.low > 0:
        found = first_good_in(run, segment, piece.low, checksum, piece.high)
        if found is None:
            return RangeResult(piece, None, piece.low)
        first = found - segment.start
    result = RangeResult(piece, first, first)
    batch = batch_for(len(parts.queue_table))
    size = run.segment_bytes

    def events() -> Iterator[Good | Bad]:
        result.end = yield from scan_segment(
            run, segment, first, checksum, stop=piece.high, blank=result.blank, batch=batch
        )
        if piece.high > size:  # at a segment that is not whole the range ends
            result.range = LogRange(piece.base, 0, max(size, result.end))

    for event in events():
        if isinstance(event, Bad):
            if event.start >= watermark():
                result.end, result.torn = event.start - segment.start, event
                break
            result.unlisted += _list(result.bads, [event], max_errors)
            continue
        rows = take(event)
        result.records += len(rows)
        result.bytes += rows.record_bytes
        if checksum == "crc32-body":
            result.body_checksum_only += len(rows) - int(np.count_nonzero(has_crc_tail(event.buffer, event.headers)))
        queues = rows.queues()
        for edges in queues.edges():
            part = _take_queue(result, edges, queues.slots)
            if part.straight and (
                differences := take_run(edges.queue, edges.low, queues.units[edges.start : edges.stop])
            ):
                findings = [*part.findings]
                part.unlisted += _list(findings, differences, max_errors)
                part.findings = findings
    return result


def _take_queue(result: RangeResult, edges: Edges, slots: np.NDArray[np.int64]) -> _QueuePart:
    """Add the records of a queue in a batch to the queue's part of the range, and return the part.
    `slots` are the queue offsets of all records of the batch."""
    name, start, stop, low, high, begin, end, straight = edges
    part = result.queues.get(name)
    if part is None:
        part = result.queues[name] = _QueuePart(low, low, begin, 0)
    elif low != part.stop:
        straight = False
    if not (straight and 0 <= low < MAX_SLOT and name[1] >= 0 and is_path_safe(name[0])):
        offsets = slots[start:stop]
        low, high = int(offsets.min()), int(offsets.max())
        part.straight = False
    part.first, part.stop = min(part.first, low), max(part.stop, high + 1)
    part.last_end = end
    return part


def _list(listed: list[T], found: Iterable[T], max_errors: int | None) -> int:
    """Append `found` to `listed`, up to `max_errors`. Return the number of those that were left out."""
    found = iter(found)
    listed += found if max_errors is None else islice(found, max_errors - len(listed))
    return sum(1 for _ in found)


@dataclass(slots=True)
class SegmentParts:
    """The results of a segment that fit together, and the position of its first record."""

    segment: Segment
    start: int
    """Position at which a scan of the whole log enters the segment, counted from the segment's start."""
    results: list[RangeResult] = field(default_factory=list)

    def queues(self) -> dict[tuple[str, int], list[_QueuePart]]:
        """Return the parts of each queue, in log order."""
        found: dict[tuple[str, int], list[_QueuePart]] = {}
        for result in self.results:
            for key, part in result.queues.items():
                found.setdefault(key, []).append(part)
        return found


class Stitcher:
    """Joins results so that they equal the events of a scan of the whole log.
    `read(range, start)` is called for ranges whose result is missing or does not fit. A record should begin at `start`.
    None means where the first one verifies. Records from `until` on are not read. `cut_ranges` describes `together`,
    `until_torn` describes `watermark`, `scan_log` describes `on_front`."""

    def __init__(
        self,
        parts: StoreParts,
        results: Iterable[RangeResult],
        read: Callable[[LogRange, int | None], RangeResult | None],
        *,
        until: int,
        together: int,
        watermark: Callable[[], int],
        on_front: OnFront,
    ) -> None:
        self._until, self._together = until, together
        self.read_again_count = 0
        self._run, self._checksum = parts.log_files, parts.checksum
        self._check = read
        self._watermark = watermark
        self._on_front = on_front
        self._by_base: dict[int, list[RangeResult]] = {}
        for result in results:
            self._by_base.setdefault(result.range.base, []).append(result)
        for each in self._by_base.values():
            each.sort(key=lambda result: result.range.low)
        self._entered: dict[int, tuple[Segment, int]] = {}
        self._fronts: list[int] = []
        self._blank: set[int] = set()

    def events(self) -> Iterator[SegmentParts | Bad | End]:
        """Yield the parts of each segment, bad bytes in and between segments, and an `End` as the last event."""
        run = self._run
        parts: SegmentParts | None = None
        joined = join_segments(run, run.min_offset, self._checksum, self._read, self._blank, self._fronts.append)
        for event in until_torn(joined, self._watermark):
            base = event.range.base if isinstance(event, RangeResult) else None
            if parts is not None and (
                self._fronts or isinstance(event, End) or base not in (None, parts.segment.start)
            ):
                yield parts
                parts = None
            while self._fronts:
                self._on_front(self._fronts.pop(0))
            if isinstance(event, RangeResult):
                parts = parts or SegmentParts(*self._entered[event.range.base])
                parts.results.append(event)
            else:
                yield event

    def _read(self, segment: Segment, start: int) -> Generator[RangeResult | Bad, None, int]:
        """Yield the events of `scan_segment`, from results. Ranges without a usable result are read."""
        self._entered[segment.start] = segment, start
        at, lost = start, False  # lost: nothing after `at` has verified yet
        for piece in self._pieces_of(segment):
            high = piece.high if isinstance(piece, LogRange) else piece.range.high
            if at >= high:
                continue
            result = self._read_range(piece, at, lost=lost)
            if result is None:
                return at
            if lost:
                if result.first is None:
                    continue
                check = check_at(self._run, segment, at, self._checksum)
                yield Bad("bad_record", segment.start + at, segment.start + result.first, check.detail)
            yield from result.bads
            yield result
            if result.torn is not None:
                yield result.torn
            at = result.end
            self._blank |= result.blank
            if at >= self._run.segment_bytes or segment.start + at in self._blank:
                return at
            lost = at < high
        return at

    def _read_range(self, piece: LogRange | RangeResult, at: int, *, lost: bool) -> RangeResult | None:
        if isinstance(piece, LogRange):
            return self._check(piece, None if lost else at)
        if lost or piece.first == at:
            return piece
        self.read_again_count += 1
        return self._check(piece.range, at)

    def _pieces_of(self, segment: Segment) -> Sequence[LogRange | RangeResult]:
        """Return the results of a segment, or ranges to read if the results do not cover it."""
        length = min(segment.length, segment.size, self._until - segment.start)
        found = self._by_base.get(segment.start, [])
        edges = [0, *(result.range.high for result in found)]
        if edges[-1] >= length and edges[:-1] == [result.range.low for result in found]:
            return found
        return _cut(self._run, segment, RANGE_BYTES, self._until, self._together)
