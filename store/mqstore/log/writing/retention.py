"""Retention: deletion of whole segments, oldest first, never the last one (format#retention).

Segments beyond the end of the log belong to an unfinished bulk append, and do not count. It may still be undone, and
messages deleted to make room for it would be lost in vain.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta

from mqstore import arrays as np
from mqstore.errors import FlushFailedError
from mqstore.files.flusher import GroupCommit
from mqstore.files.segment import Segment
from mqstore.files.segments import SegmentRun
from mqstore.layout.arrays.scan import Headers, walk
from mqstore.log.commitlog import CommitLog
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.reading.deleted import remove_queues, save_deleted
from mqstore.log.writing.background import AHEAD_MS, Checkpointer
from mqstore.logger import log as _log
from mqstore.options import Retention, seconds
from mqstore.signalsafe import Lock


class Retainer:
    """Deletion of segments from a store that is open for writing."""

    def __init__(self, parts: StoreParts, log: CommitLog, checkpointer: Checkpointer, commit: GroupCommit) -> None:
        self._parts = parts
        self._log = log
        self._checkpointer = checkpointer
        self._commit = commit
        self._dispatcher = checkpointer.dispatcher
        self._lock = Lock()
        self._newest_times: dict[int, int] = {}
        self._dropped_before = 0
        """Start of the log to which queues and index were last shortened."""

    def expired(self, policy: Retention) -> int:
        """Return the physical offset below which `policy` keeps nothing, or 0 if it keeps everything."""
        parts = self._parts
        with self._lock:
            return expired_before(parts.log_files, policy, self._log.end, parts.clock.now_ms(), self._newest_times)

    def drop_before(self, physical_offset: int) -> list[str]:
        """Delete segments. `MessageStore.drop_before` describes it."""
        parts, run = self._parts, self._parts.log_writer
        with self._lock:  # the flusher may run it while another thread calls it
            # Only what is dispatched and on disk may be deleted.
            bound = min(physical_offset, self._log.end, self._dispatcher.position, self._commit.flushed)
            starts = run.starts
            # Without the records, only the units show the offsets of a queue. If a power cut lost them, the queue would
            # count from 0 again.
            if len(starts) > 1 and starts[1] <= bound:
                if not self._checkpointer.sync_units():
                    advice = ": close the store and open it again" if self._checkpointer.is_doubtful else ""
                    error = self._checkpointer.errors.messages.get("units")
                    why = f"consume queues may not be on disk ({error}), so no segment is deleted"
                    raise FlushFailedError(f"{parts.root}: {why}{advice}")
                ends = bound - run.segment_bytes
                self._checkpointer.note_log_start(next((start for start in starts if start > ends), starts[-1]))
            try:
                return run.drop_before(bound)
            finally:  # some segments may have been deleted before the one that failed
                first = self._log.min_offset
                if first > self._dropped_before:
                    for queue in parts.queue_table:
                        queue.drop_before(first)
                    parts.index.drop_before(first)
                    self._forget_deleted(first)
                    self._dropped_before = first

    def delete(self, topics: Collection[str]) -> None:
        """Delete all dispatched messages of `topics`. `MessageStore.delete_topics` describes it."""
        parts, table = self._parts, self._parts.queue_table
        with self._lock, self._dispatcher.lock:
            places = table.deleted | dict.fromkeys(topics, self._dispatcher.position)
            save_deleted(parts, places)
            remove_queues(table, topics)

    def _forget_deleted(self, first: int) -> None:
        """Forget topics whose messages were all deleted with the log below `first`."""
        table = self._parts.queue_table
        kept = {topic: at for topic, at in table.deleted.items() if at > first}
        if kept != table.deleted:
            with suppress(OSError):  # on a full disk this waits. The entries do no harm, since the segments are deleted
                save_deleted(self._parts, kept)


def expired_before(run: SegmentRun, policy: Retention, end: int, now_ms: int, known: dict[int, int]) -> int:
    """Return the physical offset below which `policy` keeps nothing, or 0 if it keeps everything.

    `end` is the end of the log. `known` caches the time (ms) of segments by their start, computed by `newest_time`.
    The caller keeps it between calls, since computing a time reads every page of a segment, and the oldest segment is
    examined every few seconds for days."""
    listed = run.segments()
    segments = [segment for segment in listed if segment.start < end]
    size = run.segment_bytes
    excess = 0
    if policy.max_bytes is not None:
        excess = -(-max(0, len(segments) * size - policy.max_bytes) // size)
    if policy.disk_ratio is not None:
        used, total = _disk_usage(run)
        over = max(0, used - int(total * policy.disk_ratio))
        held = (len(listed) - len(segments)) * size
        excess = max(excess, -(-(over - held) // size))
    for gone in known.keys() - set(run.starts):
        del known[gone]
    bound = 0
    for i, segment in enumerate(segments[:-1]):
        if i >= excess:
            newest = None if policy.age is None else newest_time(run, segment.start, now_ms, known)
            if policy.age is None or (newest is not None and newest + seconds(policy.age, "age") * 1000 > now_ms):
                break
            if newest is None:
                continue  # it has no age without a readable record, and is deleted with the next old segment
        bound = segment.end
    return bound


def disk_ratio(run: SegmentRun) -> float:
    """Return the used part of the file system, from 0 to 1, or 0 without a log."""
    try:
        used, total = _disk_usage(run)
    except FileNotFoundError:
        return 0.0
    return used / total if total else 0.0


def _disk_usage(run: SegmentRun) -> tuple[int, int]:
    """Return (used, total) bytes of the file system, as `df` counts them."""
    usage = os.statvfs(run.directory)
    used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
    return used, used + usage.f_bavail * usage.f_frsize


def newest_time(run: SegmentRun, start: int, now_ms: int, known: dict[int, int]) -> int | None:
    """Return the time (ms) from which the age of a full segment counts, or None if no record shows it.

    It is the store time of the segment's last record. If a later segment begins with an earlier time, the clock was
    ahead, and that time counts. Times in the future are ignored. If only they remain, the segment counts from its last
    record of the past, or from its file's time, at the latest from now. The file's time is not used otherwise, because
    the system does not update it with each write through a mapping. It may be days too early."""
    latest_ms = now_ms + AHEAD_MS
    if (newest := known.get(start, latest_ms + 1)) <= latest_ms:
        return newest
    if (segment := run.find(start)) is None or not len(times := _store_times(run, segment)):
        return None
    newest = int(times[-1])
    if newest > latest_ms and start == run.min_offset:  # one line for many such segments
        ahead = timedelta(milliseconds=newest - now_ms)
        _log.warning("%s: its last message is %s ahead of the clock; its age counts from others", segment.path, ahead)
    for later in run.segments():
        if later.start > start and len(first := _store_times(run, later, 1)):
            newest = min(newest, int(first[0]))
            if newest <= latest_ms:
                break
    if newest > latest_ms:
        file_ms = os.stat(segment.path).st_mtime_ns // 1_000_000
        newest = max(min(file_ms, now_ms), int(times[times <= now_ms].max(initial=0)))
    known[start] = newest
    return newest


def _store_times(run: SegmentRun, segment: Segment, count: int | None = None) -> np.NDArray[np.int64]:
    """Return the store times (ms) of the first `count` records of a segment, or of all."""
    buffer = run.mapping(segment)
    positions, _ = walk(buffer, 0, len(buffer), count)
    return Headers(buffer, positions).store_timestamp_ms
