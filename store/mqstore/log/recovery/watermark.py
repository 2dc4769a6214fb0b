"""Watermark of a log: bytes below it were synced when a writer last had the store (format#watermark).

docs/recovery.md#torn-or-damaged has the rule that separates damage from a torn tail. `scanner.until_torn` applies it.
"""

from __future__ import annotations

import numpy as np

from mqstore.files.segments import SegmentRun
from mqstore.layout.checkpoint import Checkpoint
from mqstore.layout.record import Checksum
from mqstore.log.recovery.scanner import End, Good, goes_on, record_at, scan_log

__all__ = ["NEVER_TORN", "first_record_time", "watermark", "written_end"]

NEVER_TORN = 1 << 62
"""Watermark for the case that all bad bytes are damage."""


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
