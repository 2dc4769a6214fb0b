"""What a retention policy no longer keeps: whole segments, oldest first, never the last (format#retention).

Age is the store time of a segment's last record, not the file's: a directory that was copied is not young.

Segments beyond the end of the log are those of a splice under way. They count for nothing: it may yet be taken back,
and what was deleted to make room for it would be lost for nothing.
"""

from __future__ import annotations

import os

from mqstore.files.segments import SegmentRun
from mqstore.layout.scan import gather, walk
from mqstore.options import Retention, seconds

__all__ = ["disk_ratio", "expired_before"]


def expired_before(run: SegmentRun, policy: Retention, end: int, now_ms: int, known: dict[int, int]) -> int:
    """The physical offset below which `policy` keeps nothing; 0 when it keeps all.

    `end`: where the log ends. `known`: start of segment -> store time of its last record (ms), kept by the caller from
    one time to the next. To find it out every page of the segment is read, and the oldest is asked for every few
    seconds for days."""
    listed = run.segments()
    segments = [segment for segment in listed if segment.start < end]
    size = run.segment_bytes
    excess = 0
    if policy.max_bytes is not None:
        excess = -(-max(0, len(segments) * size - policy.max_bytes) // size)
    if policy.disk_ratio is not None:
        held = (len(listed) - len(segments)) * size
        excess = max(excess, -(-(_bytes_over(run, policy.disk_ratio) - held) // size))
    for gone in known.keys() - set(run.starts):
        del known[gone]
    bound = 0
    for i, segment in enumerate(segments[:-1]):
        if i >= excess:
            newest = None if policy.age is None else _newest_time(run, segment.start, known)
            if policy.age is None or (newest is not None and newest + seconds(policy.age, "age") * 1000 > now_ms):
                break
            if newest is None:
                continue  # nothing readable, so no age of its own: it goes with the next segment that is old
        bound = segment.end
    return bound


def _bytes_over(run: SegmentRun, ratio: float) -> int:
    """How many bytes too many the file system holds."""
    used, total = _disk_usage(run)
    return max(0, used - int(total * ratio))


def disk_ratio(run: SegmentRun) -> float:
    """How full the file system is, from 0 to 1; 0 where there is no log, as in a store that was never written to."""
    try:
        used, total = _disk_usage(run)
    except FileNotFoundError:
        return 0.0
    return used / total if total else 0.0


def _disk_usage(run: SegmentRun) -> tuple[int, int]:
    """(used, total) bytes of the file system, as `df` counts them."""
    usage = os.statvfs(run.directory)
    used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
    return used, used + usage.f_bavail * usage.f_frsize


def _newest_time(run: SegmentRun, start: int, known: dict[int, int]) -> int | None:
    """Store time (ms) of the last record of a full segment; None when no record leads there."""
    if start in known:
        return known[start]
    segment = run.find(start)
    if segment is None:
        return None
    buffer = run.mapping(segment)
    positions, _ = walk(buffer, 0, len(buffer))
    if not len(positions):
        return None
    known[start] = newest = int(gather(buffer, positions[-1:]).store_timestamp_ms[0])
    return newest
