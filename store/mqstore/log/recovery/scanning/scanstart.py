"""Position at which recovery begins to read a log, if it must read it at all (format#opening)."""

from __future__ import annotations

from mqstore.layout.checkpoint import min_timestamp
from mqstore.layout.consumequeue import VOID
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.recovery.indexrepair import is_nonsense
from mqstore.log.recovery.scanning.scanner import check_at, first_record_time, goes_on, record_at


class WholeLogNeededError(Exception):
    """A queue lacks units below the range being read, so everything must be read."""


class ScanStart:
    """Decides where to start reading a log that has segments. With `whole` it is always the front."""

    def __init__(self, parts: StoreParts, *, whole: bool) -> None:
        self._parts = parts
        self._whole = whole
        self._first = parts.log_files.starts[0]
        self.last_record = -1
        """Physical offset of the log's last record as found by `clean_end`."""
        self.last_store_timestamp_ms = 0

    def clean_end(self, log_start: int) -> int | None:
        """Return the end of the log if the last close proves it, or None if the log must be read.
        `log_start` is where the log should begin (format#opening). Raises WholeLogNeededError if a queue has lost
        files."""
        parts = self._parts
        checkpoint = parts.checkpoint
        if self._whole or not parts.clean or checkpoint.clean_end is None or checkpoint.clean_end < 0:
            return None
        if checkpoint.queues is not None and checkpoint.queues != parts.queue_table.digest():
            raise WholeLogNeededError  # a queue has lost files, so it would use a queue offset again
        end = checkpoint.clean_end
        run = parts.log_files
        if end < self._first or end > run.end or log_start < self._first:
            return None
        if any(p.kind != "segment_name" for p in parts.load_problems):
            return None
        if run.starts[-1] >= end and run.starts[-1] != self._first:
            return None  # a segment of another log, such as a longer log that this one was copied over
        if end > self._first and not self._last_record_proves(checkpoint.confirm_physical_offset, end):
            return None
        if goes_on(run, end):
            return None
        if not self._last_units_hold(end, end):
            return None
        if any(is_nonsense(file, parts.index) or file.header.end_physical_offset >= end for file in parts.index.files):
            return None
        return end

    def _last_record_proves(self, start: int, end: int) -> bool:
        """Return True if the record at `start` verifies, ends the log at `end`, and has its unit."""
        record = record_at(self._parts.log_files, start, self._parts.checksum)
        if record is None:
            return False
        after = start + record.total_size
        queue = self._parts.queue_table.get(record.topic, record.queue_id)
        if (after != end and not self._blank_between(after, end)) or queue is None:
            return False
        if not 0 <= record.queue_offset < queue.max_offset:
            return False
        self.last_record = start
        self.last_store_timestamp_ms = record.store_timestamp_ms
        return queue.unit(record.queue_offset)[:2] == (start, record.total_size)

    def _blank_between(self, position: int, end: int) -> bool:
        """Return True if a BLANK fills the segment from `position` to its end, and the log ends there."""
        segment = self._parts.log_files.find(position)
        if segment is None or end != segment.end:
            return False
        at = position - segment.start
        return (
            at >= segment.length or check_at(self._parts.log_files, segment, at, self._parts.checksum).status == "blank"
        )

    def start(self) -> int:
        """Return S (format#opening), which is always the start of a segment."""
        if self._whole or not self._parts.has_checkpoint or not len(self._parts.queue_table):
            return self._first
        start = self._start_by_checkpoint()
        return start if start == self._first or self._last_units_hold(start, None) else self._first

    def _start_by_checkpoint(self) -> int:
        parts = self._parts
        checkpoint = parts.checkpoint
        starts = parts.log_files.starts
        if checkpoint.flushed is not None and checkpoint.dispatched is not None and not parts.clean:
            mark = min(checkpoint.flushed, checkpoint.dispatched)
            return max([s for s in starts if s <= mark], default=self._first)
        if parts.clean:
            dispatched = max((queue.last_message()[0] for queue in parts.queue_table), default=-1)
            for start in reversed(starts):
                if start <= dispatched and first_record_time(parts.log_files, start, parts.checksum) is not None:
                    return start
            return self._first
        limit = min_timestamp(checkpoint)
        for start in reversed(starts):
            stamp = first_record_time(parts.log_files, start, parts.checksum)
            if stamp is not None and stamp <= limit:
                return start
        return self._first

    def _last_units_hold(self, mark: int, end: int | None) -> bool:
        """Return True if the newest unit of each queue points to its record.
        Units at or beyond `mark` are not checked, since they are read anyway. With `end`, units must not point at or
        beyond it."""
        parts = self._parts
        for queue in parts.queue_table:
            physical, size, slot = queue.last_message()
            if physical >= mark and end is None:
                continue
            if physical < self._first:
                if (
                    physical < 0
                    and queue.max_offset > queue.first_offset()
                    and queue.unit(queue.max_offset - 1) != VOID
                ):
                    return False  # a negative offset is not a unit
                continue
            if end is not None and physical >= end:
                return False
            record = record_at(parts.log_files, physical, parts.checksum)
            if record is None or record.total_size != size:
                return False
            if (record.topic, record.queue_id, record.queue_offset) != (queue.topic, queue.queue_id, slot):
                return False
        return True
