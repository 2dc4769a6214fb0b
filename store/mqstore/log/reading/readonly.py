"""Store opened for reading, with or without another process that writes it (format#readers).

It changes nothing in the directory, even after a crash. `plan_recovery` returns the plan of `mqstore recover`.
`unlisted_queue` shows whether queues lack messages until then.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import partial
from typing import ClassVar, Literal

from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.lock import AbortMark, writer_alive
from mqstore.files.readonly_fs import QUIET
from mqstore.log.bulk.splice import would_undo
from mqstore.log.bulk.txn import Intent
from mqstore.log.derived.consumequeue import ConsumeQueue
from mqstore.log.directory import manifest as manifests
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.opening import report_renamed, report_undone
from mqstore.log.reading.change_feed import FileFeed
from mqstore.log.reading.deleted import load_deleted
from mqstore.log.reading.iteration import IteratingReader
from mqstore.log.recovery.misnamed import Piece, misnamed_segments, settle_surplus, surplus_pieces
from mqstore.log.recovery.recover import Progress, RecoverOptions, recover, unlisted_queue
from mqstore.log.recovery.report import Finding, RecoveryReport, finding_of
from mqstore.log.recovery.verify import Verifier
from mqstore.log.writing.log_tail import QueueRef
from mqstore.logger import log as _log
from mqstore.options import Duration, Profile, StoreConfig

_KEPT_UNITS, _KEPT_HEADS = 16 << 20, 32 << 20
"""Number of bytes of small files that a command keeps when it reads them for the first time."""


class ReadOnlyMessageStore(IteratingReader):
    """Store directory, opened for reading. Use `mqstore.open` with mode="r"."""

    mode: ClassVar[Literal["r", "rw"]] = "r"
    news: FileFeed

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        profile: Profile | None = None,
        config: StoreConfig | None = None,
        fs: FileSystem = REAL,
        exact: bool = False,
    ) -> None:
        """Open the store. With `profile`, refuse a store of another profile. With `exact`, read the whole last file of
        each queue also after a clean close.
        Raises NotAStoreError, ConfigError, CorruptStoreError and UnsupportedStoreError."""
        super().__init__(path, config, fs)
        self._exact = exact
        self._surplus: list[Piece] = []
        resolve = partial(manifests.resolve, writer=False, create=False, derive=True, config=self.config, fs=fs)
        self.manifest = resolve(self.path, profile=profile, clock=self.clock)
        parts = StoreParts(self.path, self.manifest, self.config, fs, self.clock, writable=False)
        if fs is QUIET:  # others may stay open for long
            parts.queue_table.may_keep, parts.log_files.may_keep = _KEPT_UNITS, _KEPT_HEADS
        self._set_parts(parts)
        self._read_by(FileFeed(parts, self.check_open))
        self.recovery = RecoveryReport()
        if derived := self.manifest.derived:
            _log.warning("%s", derived)
            self.recovery.findings.append(Finding("bad_json", manifests.MANIFEST, 0, 0, derived))
        self.news.stop_at_splice()
        parts.load_problems = self.log_files.load()
        parts.load_checkpoint()
        abort = AbortMark(self.path, fs, self.config.file_mode)
        parts.clean = not abort.exists() and parts.checkpoint.clean_end != -1
        parts.machine_ran_on = abort.is_of_this_boot()
        self.recovery.clean_shutdown = parts.clean
        self._load_queues()
        parts.index_findings = self.index.load()
        self.news.begin()
        self._opened()

    def _load_queues(self) -> None:
        """Load every queue, and find its readable part."""
        first, parts = self.log_files.min_offset, self.parts
        missing = (each for each in parts.load_problems if each.kind == "missing_segment" and each.position < first)
        for problem in (*parts.missing_in_front(), *missing):  # no read reaches these segments
            finding = finding_of(problem, self.log_files.segment_bytes)
            self.records.log_lost(finding, "Its messages are skipped")
        load_deleted(self.parts, writer=False)
        self.queue_table.load(exact=self._exact or not self.clean_shutdown, then=self._bound)
        lost = self.clean_shutdown and self.parts.has_lost_queues()
        if lost or (self.parts.has_no_queues() and not writer_alive(self.path, self.fs)):
            _log.warning(
                "%s: queues have lost files. Messages of the log cannot be read by queue until the store is opened for "
                "writing, or `mqstore recover` has run",
                self.path,
            )

    def _bound(self, queue: ConsumeQueue) -> None:
        """Set the start and the end of a loaded queue."""
        if not self.clean_shutdown:
            queue.stop_at_hole(self.parts.checkpoint.dispatched or 0)
        queue.correct_min(self.log_files.min_offset)

    @property
    def max_offset(self) -> int:
        return self.log_files.end

    @property
    def pending_splice(self) -> Intent | None:
        return self.news.pending_splice

    def stop_at(self, end: int) -> None:
        """Hide the log at and beyond physical offset `end` until the next refresh."""
        self.log_files.limit = end if self.log_files.limit is None else min(self.log_files.limit, end)
        self.log_files.refresh()

    def place_segments(self) -> dict[str, int]:
        """Map misnamed segment files, and missing segments in surplus bytes, to their right places.
        Return the places by file name. Does nothing while a writer runs."""
        if writer_alive(self.path, self.fs):
            return {}
        run = self.log_files
        places = misnamed_segments(run, self.checksum, self.fs)
        if places:
            run.places = places
            self.parts.load_problems = run.load()
        if not self._surplus:
            self._surplus = surplus_pieces(run, self.parts.load_problems, self.checksum, self.fs)
        run.added = {piece.start: piece.content for piece in self._surplus if piece.kind == "missing"}
        if run.added:
            self.parts.load_problems = run.load()
        if places or run.added:
            for queue in self.queue_table:
                self._bound(queue)
        return places

    def plan_recovery(self, options: RecoverOptions, progress: Progress | None = None) -> RecoveryReport:
        """Return the plan of `mqstore recover`. Changes nothing. `options` must have `dry_run`."""
        assert options.dry_run
        places = self.place_segments()
        run, now_ms = self.log_files, self.clock.now_ms()
        surplus = settle_surplus(run, self._surplus, self.path, now_ms, self.fs, writing=False)
        self.parts.load_problems = [p for p in self.parts.load_problems if not p.is_surplus(run.segment_bytes)]
        if not (self._exact and self.clean_shutdown):  # otherwise this has been done, and no queue was shortened
            self.queue_table.load(exact=True)
        self.log_files.extend_in_memory()
        self.recovery = recover(self.parts, options, progress).report
        report_renamed(self.recovery, places, surplus)
        self.recovery.changed |= self.clean_shutdown and self.parts.has_lost_queues()
        if self.pending_splice is not None:
            report_undone(self.recovery, would_undo(self.pending_splice, self.log_files, self.fs))
        return self.recovery

    def has_unlisted(self) -> bool:
        """Return True if a crash left messages that no queue lists, and no writer will list them.
        Reading by queue skips them until the store is opened for writing, or recovered."""
        return not self.clean_shutdown and self.unlisted_queue() is not None

    def unlisted_queue(self, topics: Collection[str] | None = None) -> QueueRef | None:
        """Return a queue of `topics`, or of all, that does not list all its messages in the log, or None.

        The cause is a crash, or lost queue files. Returns None while a writer runs, since it will list them.

        This is cheap if mqstore closed the store and its queues exist. Otherwise it reads headers of the part of the
        log that an opening would read, or of the whole log if queues are known to be lost."""
        if self.parts.has_all_queues() or self.queue_table.in_rocksdb or writer_alive(self.path, self.fs):
            return None
        wanted: Callable[[str], bool] = (lambda topic: True) if topics is None else topics.__contains__
        return unlisted_queue(self.parts, wanted, whole=self.clean_shutdown and self.parts.has_lost_queues())

    def _verifier_until(self, until: int | None) -> Callable[..., Verifier]:
        if until is None and writer_alive(self.path, self.fs):
            self.news.catch_up(None)
            for queue in self.queue_table:
                queue.refresh()
            until = self.parts.listed_end()
        if until is not None:
            self.stop_at(until)
        self.place_segments()
        pending = self.pending_splice
        return partial(
            Verifier,
            self.parts,
            live=until is not None,
            until=until,
            problems=[*self.parts.load_problems, *self.parts.missing_in_front(), *self.parts.misplaced()],
            unfinished=[] if pending is None else would_undo(pending, self.log_files, self.fs).findings,
        )

    def close(self, timeout: Duration = 30) -> None:
        """Close all files. A repeated call only closes files that an interrupted call has left open.
        `timeout` has no effect. It exists for stores open for writing."""
        del timeout
        if self._released or self._close_lock.is_held_here:
            return
        with self._close_lock:
            self._closed = True
            self.parts.close()
            self._released = True
