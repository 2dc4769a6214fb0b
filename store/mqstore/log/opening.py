"""Opening of a store for writing, with repair of an unclean end.

    mark -> segment names -> folders -> unfinished bulk append undone -> recovery -> queue ends saved -> log synced

The `abort` mark is set before the first change. If opening fails on a file that it must not write, it removes the mark.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from mqstore.errors import CorruptStoreError, MQStoreError, ReadOnlyStoreError, StoreIOError
from mqstore.files.jsonfile import load_json
from mqstore.files.lock import AbortMark
from mqstore.files.segment import segment_name
from mqstore.files.tmp import remove_temporaries
from mqstore.log.bulk.splice import Undone, undo
from mqstore.log.bulk.txn import TXN_FILE, IntentWatch, TxnFile
from mqstore.log.directory import manifest as manifests
from mqstore.log.directory.store_files import StoreParts
from mqstore.log.reading.deleted import continue_numbers, load_deleted, remove_queues, save_deleted
from mqstore.log.recovery.misnamed import (
    MisnamedSegmentsError,
    misnamed_segments,
    rename_segments,
    settle_surplus,
    surplus_pieces,
)
from mqstore.log.recovery.queueends import is_progress_ahead, note_ends
from mqstore.log.recovery.recover import Outcome, Progress, RecoverOptions, recover
from mqstore.log.recovery.report import Finding, RecoveryReport
from mqstore.log.recovery.scanning.scanner import written_end
from mqstore.log.writing.room import give_up_room
from mqstore.logger import log as _log


def report_renamed(report: RecoveryReport, places: Mapping[str, int], surplus: RecoveryReport) -> None:
    """Add misnamed segment files with their right names, and the handling of surplus bytes, to `report`."""
    report.renamed = {f"commitlog/{name}": f"commitlog/{segment_name(place)}" for name, place in places.items()}
    report.renamed |= surplus.renamed
    report.truncated += surplus.truncated
    report.kept += surplus.kept
    report.changed |= bool(places) or surplus.changed


def report_undone(report: RecoveryReport, undone: Undone) -> None:
    """Add an undone bulk append to `report`."""
    report.findings[:0] = undone.findings
    report.truncated[:0] = undone.truncated
    report.changed |= bool(undone.findings)


class Opening:
    """Opening of a store for writing. The caller holds its lock."""

    def __init__(self, parts: StoreParts, txn: TxnFile, abort: AbortMark) -> None:
        """`parts` are writable, and none of them is loaded yet."""
        self._parts = parts
        self._txn = txn
        self._abort = abort
        self._path, self._fs, self._manifest = parts.root, parts.fs, parts.manifest
        self._mended_checkpoint = False
        """True if a bad checkpoint was replaced before the recovery could see it."""

    def run(self, options: RecoverOptions, progress: Progress | None) -> tuple[Outcome, bool]:
        """Load and recover the store. On an error the caller closes the parts.
        Also returns True if the last writer was killed together with the machine. The mark does not name this boot
        before the store is open."""
        parts, abort, txn = self._parts, self._abort, self._txn
        created = not self._manifest.exists
        give_up_room(self._path, self._fs)
        clean = not abort.exists()
        parts.machine_ran_on = abort.is_of_this_boot()
        went_down = not clean and not parts.machine_ran_on
        renamed, surplus = self._place_segments() if options.full else ({}, RecoveryReport())
        had_checkpoint = self._note_watermark() if clean and not created else None
        abort.set(os.getpid(), boot_id=not went_down)
        mended = self._save_manifest(created)
        with self._taking_mark_back(clean, StoreIOError, ReadOnlyStoreError):
            self._prepare_folders(created)
            parts.load_problems = parts.log_files.load()
        parts.load_checkpoint()
        if had_checkpoint is not None:
            parts.has_checkpoint = had_checkpoint
        else:
            clean = clean and parts.checkpoint.clean_end != -1  # -1 means that somebody removed `abort`
        txn.load()
        undone = undo(txn, parts.log_writer, parts.checksum, parts.checkpoint.flushed)
        if undone.start is not None:
            clean = False
            # Puts before it may not have been synced. Then the log ends earlier, and later segments are missing.
            end = min(undone.start, parts.log_files.end)
            parts.load_problems = [each for each in parts.load_problems if each.position < end]
        ends = load_deleted(parts, writer=True)
        deleted = parts.queue_table.deleted
        with self._taking_mark_back(clean, StoreIOError, ReadOnlyStoreError):
            parts.queue_table.load(exact=not clean or options.full)
        remove_queues(parts.queue_table, deleted)
        parts.index_findings = parts.index.load()
        parts.clean = clean
        parts.has_checkpoint |= created
        with self._taking_mark_back(clean, MisnamedSegmentsError):
            outcome = recover(parts, options, progress)
        parts.index_findings = ()
        continue_numbers(parts.queue_table, ends)
        if any(at > outcome.end for at in deleted.values()):  # the log lost its end, and new messages will follow there
            save_deleted(parts, {topic: min(at, outcome.end) for topic, at in deleted.items()})
        report = outcome.report
        report.changed |= options.full and self._mended_checkpoint
        report_renamed(report, renamed, surplus)
        report_undone(report, undone)
        # The backup of this file is one version older. With it a batch could be appended twice.
        mended += [(TXN_FILE, problem) for problem in txn.problems]
        for name, problem in mended:
            _log.warning("%s: %s", self._path, problem)
            report.findings.append(Finding("bad_json", name, 0, 0, problem))
            report.changed = True
        self._note_queue_ends(outcome)
        if report.scanned_from is not None:
            # Bytes that a killed process left in the page cache now count as stored, so they must be on disk.
            parts.log_writer.sync(report.scanned_from, outcome.end)
        return outcome, went_down

    @contextmanager
    def _taking_mark_back(self, clean: bool, *refusals: type[MQStoreError]) -> Iterator[None]:
        """Remove the abort mark again if opening fails on a file that it must not write."""
        try:
            yield
        except refusals:
            if clean:
                self._abort.clear()
            raise

    def _readable_parts(self) -> StoreParts:
        parts = self._parts
        return StoreParts(parts.root, parts.manifest, parts.config, parts.fs, parts.clock, writable=False)

    def _place_segments(self) -> tuple[dict[str, int], RecoveryReport]:
        """Rename misnamed segment files, and settle surplus bytes.
        Returns the right positions of these files by old name, and a report about the surplus."""
        parts = self._readable_parts()
        run, fs = parts.log_files, parts.fs
        try:
            run.load()
            for name, why in run.unreadable.items():  # otherwise later records would be cut, or its place be reused
                raise CorruptStoreError(
                    f"{run.directory}{os.sep}{why}, or move it away and lose its messages",
                    str(run.directory / name),
                )
            places = misnamed_segments(run, parts.checksum, fs)
            rename_segments(run, places, fs)
            pieces = surplus_pieces(run, run.load(), parts.checksum, fs)
            return places, settle_surplus(run, pieces, parts.root, parts.clock.now_ms(), fs, writing=True)
        finally:
            parts.close()

    def _note_watermark(self) -> bool | None:
        """Save the log end of a store that ended cleanly, if its checkpoint does not have it.

        Returns True if there was a checkpoint, False if not, None if nothing had to be saved. With the mark alone, the
        store would look as if its first writer had been killed before any sync. Then whole records after damage would
        be cut."""
        parts = self._readable_parts()
        parts.load_checkpoint()
        known = parts.checkpoint
        if known.flushed is not None or known.physic_msg_timestamp_ms > 0:
            return None
        try:
            parts.log_files.load()
            pending = IntentWatch(parts.root, parts.fs).pending()
            if not parts.log_files.starts or pending is not None:  # during a bulk append it did not end cleanly
                return None
            start = parts.log_files.min_offset
            end = written_end(parts.log_files, start, parts.checksum)
            self._mended_checkpoint = parts.bad_checkpoint() is not None
            parts.save_checkpoint(replace(known, flushed=end, dispatched=start, clean_end=-1))
        finally:
            parts.close()
        return parts.has_checkpoint

    def _save_manifest(self, created: bool) -> list[tuple[str, str]]:
        """Write the manifest if it is new, changed or damaged. Return (file, problem) of repaired faults."""
        manifest, path, fs = self._manifest, self._path, self._fs
        mended: list[tuple[str, str]] = []
        if manifest.problems:  # there is only one good copy, so restore the second
            _, problems = load_json(path / manifests.MANIFEST, writer=True, fs=fs, root=path)
            mended = [(manifests.MANIFEST, problem) for problem in problems]
        if created or (manifest.has_file and manifest.is_changed):
            manifests.save(manifest, path, fs)
        return mended

    def _prepare_folders(self, created: bool) -> None:
        fs, path = self._fs, self._path
        fs.mkdir(path / "tmp", exist_ok=True)
        remove_temporaries(fs, path / "tmp")
        guarded = self._manifest.profile != "mqstore" or manifests.is_guarded(path)
        if created or not guarded:  # not guarded if the creator was killed in between
            fs.mkdir(path / "commitlog", exist_ok=True)
            if not guarded:
                manifests.write_guard(path, fs)
            fs.sync_directory(path)

    def _note_queue_ends(self, outcome: Outcome) -> None:
        """Save the queue ends, if consumers may have got further than the log shows."""
        parts, report = self._parts, outcome.report
        # After retention has removed a queue's records, only the queue's own files know its end offset. Without them
        # its offsets begin again at 0, and the log does not show this.
        lost = report.scanned_from is not None and parts.has_lost_queues()
        if lost:
            _log.warning("%s: lost queues, or queues with lost ends, are numbered from 0 again", parts.root)
        ahead = not parts.clean and is_progress_ahead(parts.root, outcome.end, parts.fs)
        if report.changed or report.findings or lost or ahead:
            ends = {(queue.topic, queue.queue_id): queue.next_offset for queue in parts.queue_table}
            note_ends(parts.root, ends, outcome.end, parts.fs, parts.config.file_mode)
