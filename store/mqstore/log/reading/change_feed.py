"""Sources of change notices for readers: this process's dispatcher, or the files of another process."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from contextlib import suppress

from mqstore.errors import StoreFullError
from mqstore.files.jsonfile import FileState, state_of
from mqstore.log.bulk.txn import Intent, IntentWatch
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.reading.deleted import DELETED_FILE, load_deleted
from mqstore.log.writing.dispatcher import Dispatcher
from mqstore.log.writing.wakeups import Wakeups
from mqstore.signalsafe import Lock

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.001, 0.1


class WriterFeed:
    """Changes of a store that this process writes. `FileFeed` has the same methods."""

    def __init__(self, dispatcher: Dispatcher, wakeups: Wakeups, check_open: Callable[[], None]) -> None:
        self._dispatcher = dispatcher
        self._ring = wakeups.dispatcher.ring
        self._check_open = check_open

    def catch_up(self, queue: ConsumeQueue | None, topic: str | None = None) -> None:
        """Make new messages of `queue` visible. Without a queue, those of `topic`, or of all topics.
        Here it dispatches all visible messages, in this thread, unless all messages of `queue` are dispatched."""
        if queue is not None and queue.max_offset == queue.next_offset:
            return
        if self._dispatcher.position < self._dispatcher.visible_end():
            self._check_open()  # in a forked child a lock may belong to a thread that does not exist
            self._dispatcher.catch_up()

    def check_complete(self) -> None:
        """Raise StoreFullError if the units of stored messages have no disk space. For callers that found none."""
        error = self._dispatcher.error
        if isinstance(error, StoreFullError) and not self._dispatcher.catch_up():
            text = f"{error.strerror}, so stored messages cannot be shown"
            raise StoreFullError(errno.ENOSPC, text, str(error.filename), error.operation)

    def list_again(self) -> None:
        """List the segments again. Does nothing here, since this process creates and deletes them."""

    def wait(self, queue: ConsumeQueue, offset: int, timeout_s: float, is_closed: Callable[[], bool]) -> bool:
        """Block until `queue` has a unit at `offset`, and return True. Return False if the time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.catch_up(queue)
            if queue.max_offset > offset:
                return True
            left = deadline - time.monotonic()
            if left <= 0 or is_closed():
                return False
            self._dispatcher.wait(queue, offset, left, self._ring)


class FileFeed:
    """Changes of a store that another process, or none, writes."""

    def __init__(self, parts: StoreParts, check_open: Callable[[], None]) -> None:
        self.pending_splice: Intent | None = None
        """Bulk append that the writer, or a killed one, has not finished."""
        self._parts = parts
        self._run, self._queues, self._index = parts.log_files, parts.queue_table, parts.index
        self._check_open = check_open
        self._intents = IntentWatch(parts.root, parts.fs)
        self._lock = Lock()
        self._deletions: FileState | None = None
        """State of the file of deleted topics when it was last read. It is read again only after a change."""
        self._first_listed = 0
        self._next_listing = 0.0

    def begin(self) -> None:
        """Start with the loaded segments."""
        self._first_listed = self._run.min_offset
        self._next_listing = time.monotonic() + 1.0  # they were just listed, and there may be thousands

    def stop_at_splice(self) -> None:
        """Hide an uncommitted bulk append (spark#commit): the log ends where it starts."""
        self.pending_splice = self._intents.pending()
        self._run.limit = None if self.pending_splice is None else self.pending_splice.start

    def check_complete(self) -> None:
        """Do nothing, since the writing process reports it."""

    def list_again(self) -> None:
        with self._lock:  # an older intent of one thread must not replace a newer one of another thread
            self.stop_at_splice()
            self._run.refresh()

    def catch_up(self, queue: ConsumeQueue | None, topic: str | None = None) -> None:
        """Find new units of `queue`, and once a second new segments.
        Without a queue, find new segments, new queues of `topic` (None: of all topics), and new index files."""
        if queue is not None:
            cuts = queue.cuts
            queue.refresh()
            if queue.cuts != cuts:
                self._run.map_again()
        now = time.monotonic()
        if queue is None or now >= self._next_listing:
            self._next_listing = now + 1.0
            self._check_open()  # if the directory is gone, raise: without this the store would only look idle
            self.list_again()
            self._take_deletions()
            if queue is not None:
                changed = [queue]
            else:
                changed = self._queues.refresh(topic)
                self._index.refresh()
                for each in self._queues if topic is None else self._queues.of(topic):
                    if not each.max_offset:  # a queue with messages stays as it is: callers only need to know of some
                        each.refresh()
                        changed.append(each)
            first = self._run.min_offset
            if queue is None and first != self._first_listed:
                changed = [*self._queues]
                self._first_listed = first
            for each in changed:
                each.correct_min(first)

    def _take_deletions(self) -> None:
        """Reload the queues of topics that were deleted since: new ones with the same names may exist."""
        state: FileState | None = None
        with suppress(OSError):
            state = state_of(self._parts.root / DELETED_FILE, self._parts.fs)
        if state == self._deletions:
            return
        before = self._queues.deleted
        load_deleted(self._parts, writer=False)
        self._deletions = state
        for topic in [topic for topic, at in self._queues.deleted.items() if at != before.get(topic)]:
            for queue in self._queues.of(topic):
                queue.forget_files()
                queue.load(exact=False)
                queue.correct_min(self._run.min_offset)

    def wait(self, queue: ConsumeQueue, offset: int, timeout_s: float, is_closed: Callable[[], bool]) -> bool:
        """Poll until the queue has grown, or the time is up."""
        deadline = time.monotonic() + timeout_s
        pause = _PAUSE_MIN_S
        while queue.max_offset <= offset:
            left = deadline - time.monotonic()
            if left <= 0 or is_closed():
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _PAUSE_MAX_S)
            self.catch_up(queue)
        return True


ChangeFeed = WriterFeed | FileFeed
"""Source of new messages of a reader."""
