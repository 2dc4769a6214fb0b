"""Wake-ups of dispatcher and flusher by puts, and pages that the flusher prepares for the writer.

A put compares the end of the log with `CommitLog.alarm` and calls `Wakeups.passed` at or beyond it. So a put that wakes
no thread costs one comparison.
"""

from __future__ import annotations

from mqstore.clock import Clock
from mqstore.files.segment import Segment
from mqstore.files.segmentwriter import SegmentWriter
from mqstore.log.commitlog import CommitLog
from mqstore.signalsafe import Bell, Lock

NEVER = 1 << 62
"""Physical offset that no log reaches."""
_ROOM_BYTES = 1 << 16
"""Bytes that the engine may store on a full disk before the flusher looks for room again."""
_POPULATE_MIN, _POPULATE_MAX = 4 << 20, 32 << 20
_POPULATE_MS = 30
"""Pages are prepared for the bytes that a writer stores in this time, at its recent pace.
The flusher may wait as long for the interpreter. A page fault of the writer costs more than the record."""


class PagePrefetch:
    """Faults pages in, and creates the next segment, before the writer needs them."""

    def __init__(self, run: SegmentWriter, clock: Clock) -> None:
        self._run = run
        self._clock = clock
        self._bytes = _POPULATE_MIN
        self._prepared = 0
        self.reset(0)

    def reset(self, end: int) -> None:
        """Begin with a log that ends at `end`."""
        self._first = end
        self._populated = end
        self._asked = -1
        """End of the disk blocks when more were last allocated ahead."""
        self._ahead = 0
        """Number of prepared bytes after the end at the last look."""
        self._begun = 0
        """Number of prepared bytes at the start of the next segment: none for a writer that writes by calls."""
        self._seen = self._clock.monotonic_ms(), end
        """Time (monotonic ms) and position of the writer at the last look."""

    def mark(self, end: int, is_called: bool) -> int:
        """Return the position at which the flusher is needed next for a log that ends at `end`.
        It is before the first page that is not populated, or for a writer that writes by calls (`is_called`) before
        the first without disk blocks. The flusher is also needed to create the next segment, and when the writer has
        entered it."""
        last = self._run.last
        if last is None:
            return 0
        mark = last.end
        if is_called:
            mark = self._room_mark(last)
        elif self._populated < last.end:
            mark = self._populated - self._ahead // 2
        return mark if self._prepared >= last.end else min(mark, last.start + last.size * 3 // 4)

    def prepare(self, end: int, is_called: bool) -> None:
        """Prepare the pages or the segment needed now. Cheap if none is needed."""
        last = self._run.last
        if last is None:
            return
        try:
            if is_called and end >= self._room_mark(last):
                self._asked = last.start + last.allocated  # once: on a full disk it fails
                self._run.allocate(last, last.allocated + 1)
            elif (
                last.start <= end < last.end
                and not is_called
                and end + self._ahead // 2 >= self._populated
                and self._populated < last.end
            ):
                wanted = self._keep_pace(end)
                allocated = last.start + last.allocated
                if end + wanted > allocated and last.allocated < last.size:
                    self._run.allocate(last, last.allocated + 1)
                    allocated = last.start + last.allocated
                start = max(end, self._populated)
                stop = min(allocated, end + self._bytes)
                if stop > start:
                    self._run.populate(last, start - last.start, stop - start)
                    self._populated = stop
                self._ahead = max(0, stop - end)
            if end - last.start >= last.size * 3 // 4 and end > self._first:
                self._prepared = last.end
                self._begun = 0 if is_called else self._bytes
                self._run.prepare(last.end, populate_bytes=self._begun)
        finally:  # on a full disk too, or every later put would wake the flusher
            if self._populated < last.start:
                self._populated = last.start + min(last.allocated, self._begun)

    def _room_mark(self, last: Segment) -> int:
        """Return the position from which a writer that writes by calls needs the next disk blocks."""
        whole = last.allocated >= last.size or self._asked == last.start + last.allocated
        return last.end if whole else last.start + last.allocated * 3 // 4

    def _keep_pace(self, end: int) -> int:
        """Adapt the number of pages prepared at a time to the pace at which the writer reached `end`.
        Return the number of bytes that the writer is expected to store until the next look."""
        now_ms = self._clock.monotonic_ms()
        seen_ms, seen = self._seen
        self._seen = now_ms, end
        wanted = (end - seen) * _POPULATE_MS // max(1, now_ms - seen_ms)
        self._bytes = min(max(wanted, _POPULATE_MIN), _POPULATE_MAX)
        return wanted


class Wakeups:
    """Bells of the two background threads, and the position in the log at which a put rings them."""

    log: CommitLog
    """Log whose `alarm` is set here. It is created after this object, since it needs `passed`."""

    def __init__(self, pages: PagePrefetch, *, background: bool, after_sync: bool) -> None:
        """With `background` there are threads. With `after_sync` messages become visible after their sync."""
        self.pages = pages
        self.dispatcher = Bell()
        self.flusher = Bell()
        self.stopping = False
        """If true, both threads end as soon as they see it."""
        self.dispatcher_mark = NEVER
        """Physical offset at which a put wakes the dispatcher: 0 while it rests, `NEVER` while it works."""
        self.room_mark = NEVER
        """Physical offset at which the flusher looks for room again, since the engine may have used it."""
        self._background = background
        self._after_sync = after_sync
        self._lock = Lock()
        self._is_flusher_called = False
        """True if a put has woken the flusher, which still waits for the interpreter.
        It is not woken again until it has run."""

    def stop(self) -> None:
        """End both threads."""
        self.stopping = True
        self.dispatcher.ring()
        self.flusher.ring()

    def passed(self) -> None:
        """Wake the threads that wait for a put that has passed `log.alarm`."""
        if self._lock.is_held_here:
            return  # a signal handler's put interrupted this call: the woken threads find its message, too
        with self._lock:
            log = self.log
            if log.end >= self.dispatcher_mark:
                self.dispatcher_mark = NEVER
                self.dispatcher.ring()
            if (
                self._background
                and not self._is_flusher_called
                and (log.end >= self._mark(log.end) or log.end >= self.room_mark)
            ):
                self._is_flusher_called = True
                self.flusher.ring()
            self.set()

    def synced(self) -> None:
        """Wake the dispatcher after a put has waited for its sync, since the message may be visible now."""
        if self._after_sync and self.log.end >= self.dispatcher_mark:
            self.passed()

    def wake_dispatcher_at(self, mark: int) -> None:
        """Set the physical offset at which a put wakes the dispatcher."""
        with self._lock:
            self.dispatcher_mark = mark
            self.set()

    def prepare(self) -> None:
        """Prepare pages and the next segment, in the flusher's thread."""
        if self.stopping or self.log.run.last is None:
            return
        end = self.log.end
        try:
            self.pages.prepare(end, end == self.log.called_end)
        finally:
            with self._lock:
                self._is_flusher_called = False
                self.room_mark = max(self.log.free_until, end + _ROOM_BYTES)
                self.set()

    def set(self) -> None:
        """Set the position at which the next put calls `passed`."""
        log = self.log
        end = log.end
        alarm = NEVER if self._after_sync else self.dispatcher_mark  # nothing new is visible before the sync
        if self._background and not self._is_flusher_called:
            alarm = min(alarm, self._mark(end), self.room_mark)
        log.alarm = alarm

    def _mark(self, end: int) -> int:
        return self.pages.mark(end, end == self.log.called_end)
