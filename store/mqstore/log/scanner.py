"""Walk a commitlog from end to end, damaged or not (store-format 9.2, 9.8).

    Good   a stretch of consecutive records that verify, as arrays
    Bad    bytes that are no record, with a record that verifies somewhere behind them
    End    nothing behind this position verifies: here the log ends, or its readable part

What Bad and End mean - torn or damaged, cut or passed over - is for the reader to say. Reads through the segments'
mappings only; at most one stretch of headers is in memory at a time, however long the log.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mqstore.files.segments import Segment, SegmentRun
from mqstore.layout.record import MIN_RECORD_BYTES, Checksum, check_record
from mqstore.layout.scan import Headers, find_next, gather, verify, walk

__all__ = ["Bad", "End", "Event", "Good", "first_good_in", "least_plausible", "scan_log", "sort_out"]

_BATCH = 8192


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


Event = Good | Bad | End


def _is_zero(buffer: mmap.mmap, start: int) -> bool:
    """Whether `buffer` holds only zeros from `start` on."""
    step = 1 << 20
    for at in range(start, len(buffer), step):
        if np.frombuffer(buffer, np.uint8, min(step, len(buffer) - at), at).any():
            return False
    return True


def _verified(
    buffer: mmap.mmap, positions: np.ndarray, base: int, checksum: Checksum, *, checksums: bool
) -> tuple[Headers, int]:
    """Headers of `positions`, and how many of them verify before the first that does not."""
    headers = gather(buffer, positions)
    good = headers.ok & (headers.physical_offset == headers.positions + base) & (headers.topic_size > 0)
    if checksums:
        if not good.all():
            positions = positions[: int(np.argmin(good))]
            headers = gather(buffer, positions)
            good = good[: len(positions)]
        good = good & verify(buffer, headers, checksum)
    return headers, len(good) if bool(good.all()) else int(np.argmin(good))


def first_good_in(run: SegmentRun, segment: Segment, start: int, checksum: Checksum) -> int | None:
    """Physical offset of the first record at or behind byte `start` of `segment` that verifies; None without one."""
    buffer = run.mapping(segment)
    found = find_next(buffer, start, len(buffer), segment.start, checksum)
    return None if found is None else segment.start + found


def scan_log(run: SegmentRun, start: int, checksum: Checksum, *, checksums: bool = True) -> Iterator[Event]:
    """What the log holds from physical offset `start` on, in order; the last event is an `End`.

    `checksums` False trusts bytes as dispatch does: lengths, magic and the record's own offset are still checked.
    """
    position = start
    starts = run.starts
    index = next((i for i, s in enumerate(starts) if s + run.segment_bytes > start), len(starts))
    if index < len(starts) and starts[index] > start:
        position = starts[index]  # the front was dropped
    while index < len(starts):
        segment = run.find(starts[index])
        assert segment is not None
        base = segment.start
        buffer = run.mapping(segment)
        segment_end = base + run.segment_bytes
        at = position - base
        doubted = -1
        while True:
            if at >= len(buffer):
                break
            positions, stop = walk(buffer, at, len(buffer), _BATCH)
            if len(positions):
                headers, count = _verified(buffer, positions, base, checksum, checksums=checksums)
                bad_at = int(positions[count]) if count < len(positions) else None
                if count:
                    if count < len(headers):
                        headers = gather(buffer, positions[:count])
                    at = stop if bad_at is None else bad_at
                    yield Good(segment, base, buffer, headers, base + at)
                    position = base + at
                if bad_at is None:
                    if len(positions) == _BATCH:
                        continue
                    at = stop
            if at >= len(buffer):
                break
            check = check_record(buffer, at, len(buffer), base + at, checksum)
            if check.status == "blank":
                at = run.segment_bytes
                break
            # Not a record. Is there one behind?
            found = find_next(buffer, at + 1, len(buffer), base, checksum)
            if found is None:
                break
            if at != doubted and check_record(buffer, at, len(buffer), base + at, checksum).status != "bad":
                # Another process's writer has finished it since we looked, and gone on to the one behind.
                doubted = at
                continue
            yield Bad("bad_record", base + at, base + found, check.detail)
            at = found
            position = base + at
        if at >= run.segment_bytes or (at >= len(buffer) and len(buffer) == run.segment_bytes):
            # Full to its end. Is the next one there?
            position = segment_end
            index += 1
            if index < len(starts) and starts[index] != position:
                following = _next_good(run, index, checksum)
                if following is None:
                    yield End(position, "")
                    return
                index, found_at = following
                yield Bad(
                    "missing_segment",
                    position,
                    found_at,
                    f"no file holds [{position}, {starts[index]})",
                )
                position = found_at
            continue
        # The rest of this segment holds no record.
        short = len(buffer) < run.segment_bytes
        following = _next_good(run, index + 1, checksum)
        here = base + at
        if short and at >= len(buffer):
            detail = f"the file ends after {len(buffer)} of {run.segment_bytes} bytes"
        elif _is_zero(buffer, at):
            detail = ""
        else:
            detail = check_record(buffer, at, len(buffer), here, checksum).detail
        if following is None:
            yield End(here, detail)
            return
        index, found_at = following
        yield Bad("segment_size" if short else "bad_record", here, found_at, detail or "zeros where records should be")
        position = found_at
    yield End(position, "")


def _next_good(run: SegmentRun, index: int, checksum: Checksum) -> tuple[int, int] | None:
    """(index of the segment, position) of the first record that verifies in segments `index` and later."""
    starts = run.starts
    for i in range(index, len(starts)):
        segment = run.find(starts[i])
        assert segment is not None
        found = first_good_in(run, segment, 0, checksum)
        if found is not None:
            return i, found
    return None


_MAX_SLOT = (1 << 63) // 64
"""No queue can have more units: their byte offset is an i64, and 20 bytes each."""


def least_plausible(offsets: npt.NDArray[np.int64], physical: npt.NDArray[np.int64]) -> int:
    """The smallest of the queueOffsets of one queue's records that lie at `physical`, ascending, leaving out those that
    are too far from the middle one for the bytes between the first record and the last."""
    middle = int(np.median(offsets))
    room = int(physical[-1] - physical[0]) // MIN_RECORD_BYTES + 1
    return int(offsets[np.abs(offsets - middle) <= room].min(initial=middle))


def sort_out(
    expected: int | None, seen: int, offsets: npt.NDArray[np.int64], physical: npt.NDArray[np.int64]
) -> tuple[list[tuple[int, int]], list[int]]:
    """Tell slots from nonsense among the queueOffsets of one queue's records, which lie at `physical` in the log.

    Returns (index ranges of consecutive slots, in order; indices of the records that can have none). `expected` is the
    slot behind the last record before these, which lies below `seen`; None when there is none to go by. A number that
    was given out already, one that jumps further than lost records could explain, or one that later records contradict,
    is nonsense: profile `rocketmq` has no checksum over it (2.10). To believe it would void the slots of the rest.
    """
    count = len(offsets)
    if (
        count
        and (offsets[0] == expected or (expected is None and 0 <= offsets[0] < _MAX_SLOT))
        and offsets[-1] - offsets[0] == count - 1
        and bool((np.diff(offsets) == 1).all())
    ):
        return [(0, count)], []
    # The smallest number among those behind: a record whose own is greater stands in the way of that one.
    wanted = np.where(offsets >= (expected or 0), offsets, _MAX_SLOT)
    least_behind = np.append(np.minimum.accumulate(wanted[::-1])[::-1], _MAX_SLOT).tolist()
    runs: list[tuple[int, int]] = []
    odd: list[int] = []
    for i, (offset, at) in enumerate(zip(offsets.tolist(), physical.tolist(), strict=True)):
        if expected is None:
            follows = 0 <= offset <= least_behind[i + 1] and offset < _MAX_SLOT
        else:
            gap = offset - expected
            follows = gap == 0 or (0 < gap <= (at - seen) // MIN_RECORD_BYTES and offset <= least_behind[i + 1])
        if not follows:
            odd.append(i)
            continue
        if runs and runs[-1][1] == i and offset == expected:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
        expected, seen = offset + 1, at
    return runs, odd
