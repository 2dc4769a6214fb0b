"""Syncs of a log: its durable end, and callers that wait for it (format#flush)."""

from __future__ import annotations

import time
from collections.abc import Callable

from mqstore.errors import FlushFailedError, FlushTimeoutError, MQStoreError, StoreBusyError
from mqstore.files.filesystem import SyncNotBegunError
from mqstore.files.flusher import GroupCommit
from mqstore.log.commitlog import CommitLog, SendReceipt
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.stats import Histogram
from mqstore.log.writing.wakeups import Wakeups
from mqstore.options import seconds


class LogSyncs:
    """Durability of a log. A caller that waits for the disk syncs in its own thread, or shares a sync."""

    def __init__(
        self, parts: StoreParts, log: CommitLog, wakeups: Wakeups, is_lost: Callable[[], bool], *, by_default: bool
    ) -> None:
        self.by_default = by_default
        """True if a put waits for the disk by default."""
        self.commit = GroupCommit(self._sync)
        self.latency = Histogram()
        self._parts = parts
        self._log = log
        self._wakeups = wakeups
        self._is_lost = is_lost
        self._timeout_s = seconds(parts.config.flush_timeout, "flush_timeout")
        self._sync_to = 0
        """End of a bulk append that is synced before the end of the log moves there."""
        log.group = self.commit if by_default else None

    def visible_end(self) -> int:
        """Return the physical offset below which readers see messages.
        With durability "flush" these are only messages that a crash cannot lose."""
        return self.commit.flushed if self.by_default else self._log.end

    def flush(self, receipt: SendReceipt | None = None) -> None:
        """Return when all earlier puts are on disk, or with `receipt`, when that message is.

        Raises FlushFailedError, FlushTimeoutError."""
        end = self._log.end if receipt is None else receipt.physical_offset + receipt.size
        try:
            done = self.commit.wait_until(end, self._timeout_s)
        except (StoreBusyError, SyncNotBegunError) as error:  # raising it unchanged would mean that nothing was stored
            raise FlushTimeoutError(f"stored, but not known to be on disk yet: {error}", receipt) from error
        if not done:
            raise FlushTimeoutError(
                f"stored, but not known to be on disk after {self._timeout_s} s (flush_timeout)", receipt
            )
        self._wakeups.synced()

    def sync_beyond(self, end: int) -> None:
        """Make the log durable up to `end`, which is beyond its end.
        No other sync may run at the same time, since an error is reported only once, and to one caller."""
        self._sync_to = end
        try:
            self.commit.sync_now()
        finally:
            self._sync_to = 0

    def poison(self, error: MQStoreError) -> None:
        """Refuse every later put and sync with `error`."""
        self._log.poison(error)
        self.commit.poison(error)

    def _sync(self, flushed: int) -> int:
        """Make all appended records durable. The group commit calls it, one thread at a time."""
        self._is_lost()  # then puts and syncs are refused: syncing a removed directory would promise too much
        begin = time.perf_counter_ns()
        end = self._log.end
        try:
            self._log.run.sync(flushed, max(end, self._sync_to))
        except (StoreBusyError, SyncNotBegunError):
            raise
        except Exception as error:
            self._log.poison(
                FlushFailedError(f"a sync of {self._parts.root} failed ({error}). Close the store and open it again")
            )
            raise
        self.latency.add(time.perf_counter_ns() - begin)
        return end
