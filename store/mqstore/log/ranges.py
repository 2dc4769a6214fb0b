"""A commitlog read in byte ranges, each by a task of its own, and put together again: for `verify`.

A record says where it lies, so reading may begin anywhere: at the first place of a range where a record verifies whose
own physical offset is that place (store-format 9.2, 9.8; spark.md B8).

    segment   |........................|........................|..........BLANK|
    ranges    low                      high = low of the next
    results   first ............... end     end: where the next record should begin, mostly a little behind `high`
                                  = first of the next result, or what was read does not fit together

A result says of every queue whether its records followed each other: a *straight* part needs no second look, whatever
came before. `Stitcher` joins the results of a segment into what a scan from its start gives, event for event:

    first == end before    it counts
    nothing verified since, and first is behind    bytes that are no record lead up to it: `Bad`, and it counts
    anything else          read again, from where the result before ended. A record image inside a body, at its own
                           offset, is such a false start; so is a record that only a start from its front accepts

Ranges and results are plain values, and small: no record, and at most `max_errors` findings, are in them. Knows no
Spark, and nothing of what is done with the records.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise

import numpy as np

from mqstore.errors import ConfigError
from mqstore.files.segments import Segment
from mqstore.layout.dispatch import Listed, Rows
from mqstore.layout.record import check_record
from mqstore.log.names import is_path_safe
from mqstore.log.report import Finding
from mqstore.log.scanner import Bad, End, OnFront, first_good_in, join_segments, scan_segment, until_torn
from mqstore.log.slots import MAX_SLOT
from mqstore.log.store import MessageStore
from mqstore.log.verify import IndexTally, Verifier, Wanted

__all__ = [
    "MAX_ERRORS",
    "RANGE_BYTES",
    "LogRange",
    "QueueKey",
    "QueuePart",
    "RangeResult",
    "SegmentParts",
    "Stitcher",
    "check_range",
    "cut_ranges",
    "is_straight",
    "read_range",
    "verified_ranges",
]

RANGE_BYTES = 64 << 20
"""Of a log, read in one go."""
MAX_ERRORS = 100
"""Findings of a range that are told; of more, only how many."""

QueueKey = tuple[str, int]
"""Topic and queue id."""
TakeRun = Callable[[str, int, int, np.ndarray], Iterable[Finding]]
"""Takes topic, queue id, first queue offset and the units of a straight run; what it finds wrong with them."""


@dataclass(frozen=True, slots=True)
class LogRange:
    """Bytes [low, high) of the segment that starts at physical offset `base`, counted from there: the records that
    begin in them."""

    base: int
    low: int
    high: int

    @property
    def weight(self) -> int:
        """Bytes to read."""
        return self.high - self.low


@dataclass(slots=True)
class QueuePart:
    """Queue offsets of a queue's records in a range, where the first record begins, and where the last one ends."""

    first: int
    """Smallest queue offset."""
    stop: int
    """Behind the greatest."""
    first_physical: int
    last_end: int
    straight: bool = True
    """Each record's queue offset was one more than that of the record before."""
    findings: list[Finding] = field(default_factory=list)
    """What `take_run` found up to the first break."""
    unlisted: int = 0
    """How much more."""


@dataclass(slots=True)
class RangeResult:
    """What a range holds. Positions count from the segment's start."""

    range: LogRange
    first: int | None
    """Where reading began; None: no record that verifies begins in the range."""
    end: int
    """Where it ended, as `scan_segment` returns it."""
    records: int = 0
    bytes: int = 0
    bads: list[Bad] = field(default_factory=list)
    torn: Bad | None = None
    """What ends the log in this range, and reading with it (`until_torn`)."""
    unlisted: int = 0
    """How many more."""
    queues: dict[QueueKey, QueuePart] = field(default_factory=dict)
    index: IndexTally = field(default_factory=IndexTally)

    @property
    def errors(self) -> int:
        """Findings, listed or not."""
        of_queues = sum(part.unlisted + len(part.findings) for part in self.queues.values())
        return self.unlisted + len(self.bads) + of_queues

    def count_bad(self, bad: Bad, max_errors: int) -> None:
        """Note bytes that are no record."""
        if len(self.bads) < max_errors:
            self.bads.append(bad)
        else:
            self.unlisted += 1


# -- cutting ----------------------------------------------------------------------------------------------------------


def cut_ranges(store: MessageStore, range_bytes: int = RANGE_BYTES, end: int | None = None) -> list[LogRange]:
    """The log of an open store up to `end` in ranges of about equal size, none over two segments. ConfigError for a
    size that is none."""
    if range_bytes < 1:
        raise ConfigError(f"range_bytes={range_bytes} is no size of a range; give at least 1, or leave it out")
    ranges = []
    for segment in store._run.segments():
        length = min(segment.length, segment.size, segment.size if end is None else end - segment.start)
        if length <= 0:
            break
        pieces = -(-length // range_bytes)
        edges = [length * i // pieces for i in range(pieces + 1)]
        ranges += [LogRange(segment.start, low, high) for low, high in pairwise(edges)]
    return ranges


# -- reading ----------------------------------------------------------------------------------------------------------


def read_range(
    store: MessageStore,
    piece: LogRange,
    *,
    take_run: TakeRun,
    take_rows: Callable[[Rows], None],
    start: int | None,
    max_errors: int,
    watermark: Callable[[], int],
) -> RangeResult | None:
    """Read a range of an open store; None when retention has taken its segment.

    Each run of records of a queue that follow each other goes to `take_run`, until the first break; all records go to
    `take_rows`. `start` is where a record has to begin; None: at the front of the segment, or where the first one
    verifies. `watermark` as of `Stitcher`.
    """
    segment = store._run.find(piece.base)
    if segment is None:
        return None
    checksum = store.manifest.checksum
    first = start if start is not None else 0 if piece.low == 0 else _first_in(store, segment, piece)
    if first is None:
        return RangeResult(piece, None, piece.low)
    result = RangeResult(piece, first, first)
    events = scan_segment(store._run, segment, first, checksum, stop=piece.high)
    while True:
        try:
            event = next(events)
        except StopIteration as over:
            result.end = over.value
            return result
        if isinstance(event, Bad):
            if event.start >= watermark():
                result.end, result.torn = event.start - segment.start, event
                return result
            result.count_bad(event, max_errors)
            continue
        rows = store.rows_of(event.buffer, event.headers, event.base)
        result.records += len(rows)
        result.bytes += rows.record_bytes
        take_rows(rows)
        for listed in rows.listed():
            _take_queue(result, rows, listed, take_run, max_errors)


def _first_in(store: MessageStore, segment: Segment, piece: LogRange) -> int | None:
    found = first_good_in(store._run, segment, piece.low, store.manifest.checksum, piece.high)
    return None if found is None else found - segment.start


def _take_queue(result: RangeResult, rows: Rows, listed: Listed, take_run: TakeRun, max_errors: int) -> None:
    topic, queue_id, chosen, offsets, units, follow = listed
    begin, last = int(chosen[0]), int(chosen[-1])
    low, high = int(offsets[0]), int(offsets[-1])
    straight = follow or bool((np.diff(offsets) == 1).all())
    part = result.queues.get((topic, queue_id))
    if part is None:
        part = QueuePart(low, low, int(rows.physical_offset[begin]), 0)
        result.queues[topic, queue_id] = part
    else:
        straight = straight and low == part.stop
    usable = 0 <= low < MAX_SLOT and queue_id >= 0 and is_path_safe(topic)
    if not (straight and usable):
        low, high = int(offsets.min()), int(offsets.max())
        part.straight = False
    part.first, part.stop = min(part.first, low), max(part.stop, high + 1)
    part.last_end = int(rows.physical_offset[last]) + int(rows.size[last])
    if not part.straight:
        return
    for finding in take_run(topic, queue_id, low, units):
        if len(part.findings) < max_errors:
            part.findings.append(finding)
        else:
            part.unlisted += 1


def check_range(
    store: MessageStore,
    verifier: Verifier,
    piece: LogRange,
    start: int | None = None,
    *,
    deep: bool = True,
    max_errors: int = MAX_ERRORS,
) -> RangeResult | None:
    """Check the records of a range, their units, and with `deep` their index entries; None when retention has taken
    them. `verifier`: of the store; `start` as of `read_range`."""
    wanted: list[Wanted] = []

    def take_rows(rows: Rows) -> None:
        if deep and (entries := verifier.wanted_of(rows)) is not None:
            wanted.append(entries)

    result = read_range(
        *(store, piece),
        take_run=verifier.compare,
        take_rows=take_rows,
        start=start,
        max_errors=max_errors,
        watermark=verifier.torn_from,
    )
    if result is not None:
        result.index = verifier.tally(wanted)
    return result


# -- putting together --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SegmentParts:
    """The results of a segment that fit together, and where its records begin."""

    segment: Segment
    start: int
    """From the segment's start: where a scan of the whole log enters it."""
    results: list[RangeResult] = field(default_factory=list)

    def queues(self) -> dict[QueueKey, list[QueuePart]]:
        """The parts of each queue, in log order."""
        found: dict[QueueKey, list[QueuePart]] = {}
        for result in self.results:
            for key, part in result.queues.items():
                found.setdefault(key, []).append(part)
        return found


def is_straight(parts: Sequence[QueuePart]) -> bool:
    """Whether the records of a queue followed each other through all these parts."""
    return all(part.straight for part in parts) and all(part.stop == behind.first for part, behind in pairwise(parts))


class Stitcher:
    """Joins results to what a scan of the whole log would tell. `read_again(range, start)` reads a range anew from a
    position where a record should begin; that a range was never read (the segment is new) is fine. `watermark` as of
    `until_torn`, `on_front` as of `scan_log`."""

    def __init__(
        self,
        store: MessageStore,
        results: Iterable[RangeResult],
        read_again: Callable[[LogRange, int], RangeResult | None],
        *,
        watermark: Callable[[], int],
        on_front: OnFront,
    ) -> None:
        self.read_again_count = 0
        self._store = store
        self._again = read_again
        self._watermark = watermark
        self._on_front = on_front
        self._by_base: dict[int, list[RangeResult]] = {}
        for result in results:
            self._by_base.setdefault(result.range.base, []).append(result)
        for each in self._by_base.values():
            each.sort(key=lambda result: result.range.low)
        self._entered: dict[int, tuple[Segment, int]] = {}
        self._fronts: list[int] = []

    def events(self) -> Iterator[SegmentParts | Bad | End]:
        """Segment by segment, with what is no record in and between them; the last event is an `End`."""
        run = self._store._run
        parts: SegmentParts | None = None
        joined = join_segments(
            *(run, run.min_offset, self._store.manifest.checksum, self._read), on_front=self._fronts.append
        )
        for event in until_torn(joined, self._watermark):
            while self._fronts:
                if parts is not None:
                    yield parts
                    parts = None
                self._on_front(self._fronts.pop(0))
            if isinstance(event, RangeResult):
                if parts is None or parts.segment.start != event.range.base:
                    if parts is not None:
                        yield parts
                    parts = SegmentParts(*self._entered[event.range.base])
                parts.results.append(event)
                continue
            if isinstance(event, End) and parts is not None:
                yield parts
            yield event

    def _read(self, segment: Segment, start: int) -> Generator[RangeResult | Bad, None, int]:
        """As `scan_segment`, from results."""
        self._entered[segment.start] = segment, start
        length = min(segment.length, segment.size)
        at, lost = start, False  # lost: nothing behind `at` has verified yet
        for result in self._results_of(segment, length):
            high = result.range.high
            if at >= high:
                continue
            if lost:
                if result.first is None:
                    continue
                yield self._bad(segment, at, result.first)
            elif result.first != at:
                again = self._again(result.range, at)
                if again is None:
                    return at
                self.read_again_count += 1
                result = again
            yield from result.bads
            yield result
            if result.torn is not None:
                yield result.torn
            at = result.end
            if at >= self._store._run.segment_bytes:
                return at
            lost = at < high
        return at

    def _results_of(self, segment: Segment, length: int) -> list[RangeResult]:
        found = self._by_base.get(segment.start, [])
        edges = [0, *(result.range.high for result in found)]
        if edges[-1] >= length and edges[:-1] == [result.range.low for result in found]:
            return found
        # Nobody has read this one, or all of it: as if somebody had begun in the wrong place.
        return [RangeResult(LogRange(segment.start, 0, length), None, 0)]

    def _bad(self, segment: Segment, at: int, found: int) -> Bad:
        buffer = self._store._run.mapping(segment)
        here = segment.start + at
        check = check_record(buffer, at, len(buffer), here, self._store.manifest.checksum)
        return Bad("bad_record", here, segment.start + found, check.detail)


def verified_ranges(store: MessageStore) -> Iterator[tuple[RangeResult, int, str | None]]:
    """The ranges of an open store as they fit together, each with how much is wrong in it, and what first: bytes that
    are no record, up to where the next one begins or the log should have ended; wrong units; keys that the index
    lacks."""
    verifier = store.verifier()
    pieces = cut_ranges(store)
    results = [result for piece in pieces if (result := check_range(store, verifier, piece)) is not None]
    stitcher = Stitcher(
        *(store, results, partial(check_range, store, verifier)),
        watermark=verifier.torn_from,
        on_front=verifier.front_moved,
    )
    fitting: list[RangeResult] = []
    outside: list[tuple[int, Finding]] = []
    for event in stitcher.events() if results else ():
        if isinstance(event, SegmentParts):
            fitting += event.results
        elif isinstance(event, Bad):
            outside.append((event.start, verifier.bad(event)))
        else:
            outside += [(event.position, finding) for finding in verifier.end(event)]
    within = {bad.start for result in fitting for bad in result.bads}
    starts = [result.range.base + result.range.low for result in fitting]
    behind: dict[int, list[Finding]] = {}
    for position, finding in outside:
        if position not in within:  # it belongs to the range that it begins in, or lies behind
            behind.setdefault(max(0, bisect_right(starts, position) - 1), []).append(finding)
    for number, result in enumerate(fitting):
        of_index = list(result.index.findings(store._index))
        of_queues = (finding for part in result.queues.values() for finding in part.findings)
        more = behind.get(number, [])
        first = next(chain(map(verifier.bad, result.bads), more, of_queues, of_index), None)
        told = None if first is None else f"{first.kind} at {first.position} of {first.file}: {first.detail}"
        yield result, result.errors + len(more) + len(of_index), told
