"""Repair on request, by `mqstore recover` (format#damage, format#json-load)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mqstore.clock import SYSTEM_CLOCK
from mqstore.errors import CorruptStoreError, NotAStoreError
from mqstore.files.filesystem import REAL, FileSystem
from mqstore.files.jsonfile import NO_CHECKS, Check, load_json, set_aside_json
from mqstore.files.lock import WriterLock, refuse_beside_writer
from mqstore.files.safe_open import resolved
from mqstore.log.directory import manifest as manifests
from mqstore.log.directory.manifest import check_own
from mqstore.log.reading.reader import StoreReader
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.recovery.known_damage import load_known, save_known
from mqstore.log.recovery.recover import Progress, RecoverOptions
from mqstore.log.recovery.report import Finding, RecoveryReport
from mqstore.log.recovery.verify import bad_json, json_files, json_tables
from mqstore.log.store import MessageStore
from mqstore.options import StoreConfig


def recover_store(
    path: str | os.PathLike[str],
    options: RecoverOptions,
    *,
    config: StoreConfig | None = None,
    progress: Progress | None = None,
    json_checks: Mapping[str, Check] = NO_CHECKS,
    record_check: Callable[[StoreReader], Iterable[Finding]] = lambda _: (),
    fs: FileSystem = REAL,
) -> RecoveryReport:
    """Read the whole log of a store, make queues and index agree with it, and return a report.

    Bad JSON files are replaced by good backups. A file is bad if it does not decode, or fails its check in
    `json_checks` (path within the store -> check). Files without a good backup are reported and left. `rebuild_config`
    repairs them. `record_check` finds whole records with unreadable content. They are reported and left, too.

    With `options.dry_run` nothing is written, and the report lists the changes. May be killed and repeated. Raises
    StoreLockedError while a writer has the store, and otherwise the errors of `mqstore.open`.

    Surplus bytes of a segment become a missing segment, or are moved to `cut/`. Damage that stays in the log becomes
    known damage (`recovery/known_damage.py`). The report's `known` lists the findings that were known before.
    """
    options = options._replace(full=True)
    root = Path(resolved(path))
    if options.dry_run:
        refuse_beside_writer(root, fs)  # a record being written cannot be checked
        with ReadOnlyMessageStore(root, config=config, fs=fs, exact=True) as store:
            if store.manifest.derived:
                manifests.stored(root, store.config, fs)  # raises, since a recovery refuses a derived manifest
            report = store.plan_recovery(options, progress)
            if all(each.kind != "missing_segment" for each in report.findings):  # this may be such a name
                check_own(root, fs, whole=True)  # raises for a link, too, which reading follows
            return _completed(report, store, json_checks, record_check)
    with MessageStore(root, create=False, config=config, fs=fs, recover_options=options, progress=progress) as store:
        return _completed(store.recovery, store, json_checks, record_check)


def _completed(
    report: RecoveryReport,
    store: StoreReader,
    json_checks: Mapping[str, Check],
    record_check: Callable[[StoreReader], Iterable[Finding]],
) -> RecoveryReport:
    """Add bad JSON files, unreadable records and known damage to a report. A writer saves the lasting damage."""
    root, size, fs, writing = store.path, store.manifest.commitlog_segment_bytes, store.fs, store.mode == "rw"
    for finding, mended in bad_json(root, json_files(root, json_checks), fs, mend=writing):
        report.findings.append(finding)
        report.changed |= mended
    report.findings += record_check(store)
    known = load_known(root, size, fs)
    report.known = {finding for finding in report.findings if finding in known}
    if writing:
        lasting = [each for each in report.findings if not _is_extended(root / each.file, each, size)]
        save_known(root, known, lasting, report.log_end, size, fs)
    return report


def _is_extended(path: Path, finding: Finding, size: int) -> bool:
    """Return True if a finding is about a short segment that now has its full length."""
    return finding.kind == "segment_size" and path.exists() and path.stat().st_size == size


def rebuild_config(
    path: str | os.PathLike[str],
    *,
    dry_run: bool = False,
    json_checks: Mapping[str, Check] = NO_CHECKS,
    fs: FileSystem = REAL,
) -> list[str]:
    """Replace the bad JSON files of a store, and return a sentence about each replaced file.

    A file is bad if it does not decode, or fails its check in `json_checks`. A lost manifest is rebuilt from the files:
    the checksum of the first record gives the profile, names and lengths give the sizes. Any other bad file is moved
    aside with its backup, so it starts from defaults. Its offsets are lost, so this must be requested explicitly.
    """
    root = Path(resolved(path))
    if not (root / "commitlog").is_dir() and not (root / manifests.MANIFEST).exists():
        raise NotAStoreError(f"{root} is not a store: it has neither {manifests.MANIFEST} nor commitlog/")
    check_own(root, fs)
    lock = WriterLock(root, "mqstore recover", fs=fs)
    try:
        if dry_run:
            refuse_beside_writer(root, fs)
        else:
            lock.acquire()
        done = _rebuild_manifest(root, dry_run=dry_run, fs=fs)
        for name, check in json_tables(root, json_checks):
            try:
                load_json(root / name, writer=False, fs=fs, root=root, check=check)
            except CorruptStoreError as error:
                if not dry_run:
                    set_aside_json(root / name, fs=fs, check=check)
                done.append(f"{name} is moved aside and starts from defaults: {error.args[0]}")
        return done
    finally:
        lock.release()


def _rebuild_manifest(root: Path, *, dry_run: bool, fs: FileSystem) -> list[str]:
    try:
        manifests.stored(root, StoreConfig(), fs)
    except CorruptStoreError:
        found, sentence = manifests.derived(root, fs)
    else:
        return []
    if not dry_run:
        set_aside_json(root / manifests.MANIFEST, fs=fs)
        store_id = found.store_id or secrets.token_hex(16)
        manifests.save(found._replace(store_id=store_id, created_ms=SYSTEM_CLOCK.now_ms()), root, fs)
    return [f"{manifests.MANIFEST} is written again: {sentence}"]
