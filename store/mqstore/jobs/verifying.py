"""Check of one store or many: `MessageStore.verify`, with the logs read by tasks (format#damage).

    driver       lists the segments of every store and cuts them into ranges
    range task   checks each record: checksums, lengths, its own offset, its unit in the queue, its keys in the index
    index task   checks an index file: chains, header
    store task   joins the results of a store (`Verifier.findings`), and does the checks that need the order of the log

Findings are those of `MessageStore.verify`, but at most `max_errors` of a range are listed, and `unlisted` counts the
others. Only reads, takes no lock, and works while a writer has the store open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Unpack

from mqstore.broker.admin.inspect import delay_levels
from mqstore.broker.background.context import broker_findings, open_tables
from mqstore.broker.tables.configchecks import CONFIG_CHECKS
from mqstore.errors import ConfigError, MQStoreError
from mqstore.files.filesystem import REAL
from mqstore.files.lock import writer_alive
from mqstore.files.readonly_fs import QUIET
from mqstore.files.safe_open import REFUSED
from mqstore.jobs.options.selection import Selection, Shaped, Stores, check_followed, select
from mqstore.jobs.reading.opening import StoreName, open_store
from mqstore.jobs.runner import Progress, Runner, Where
from mqstore.layout.arrays.dispatch import SCHEDULE_TOPIC
from mqstore.log.directory.manifest import check_own
from mqstore.log.reading.reader import StoreReader
from mqstore.log.reading.readonly import ReadOnlyMessageStore
from mqstore.log.recovery.known_damage import load_known
from mqstore.log.recovery.recover import RecoverOptions
from mqstore.log.recovery.repair import recover_store
from mqstore.log.recovery.report import Finding, Kind, RecoveryReport
from mqstore.log.recovery.scanning.ranges import RANGE_BYTES, LogRange, RangeResult
from mqstore.log.recovery.verify import Verifier

_Opened = tuple[ReadOnlyMessageStore, Verifier]
_Open = Callable[..., AbstractContextManager[_Opened]]
"""Function of a store's name, and optionally the end of the part to check."""

MAX_ERRORS = 100
"""Limit of listed findings of a range."""
_TASK_BYTES = 16 * RANGE_BYTES
"""Limit of bytes of a task's ranges, since all of them are read again when a task is lost. A task opens its stores, so
small segments share one."""


@dataclass(frozen=True, slots=True)
class VerifyFinding(Shaped):
    """A finding: `length` bytes at `position` of `file`, a path in the store.
    docs/recovery.md explains the kinds."""

    store: str
    kind: Kind
    file: str
    position: int
    length: int
    detail: str
    known: bool
    """Damage in the log that a recovery has reported before."""


@dataclass(frozen=True, slots=True)
class VerifiedStore(Shaped):
    """Counts of checked records and findings in one store."""

    store: str
    path: str
    messages: int
    """Valid records."""
    bytes: int
    """Bytes of these records."""
    body_checksum_only: int
    """Records with a checksum of their body only: changed properties and headers are not detected."""
    read_again: int
    """Ranges that had to be read again from another offset."""
    findings: int
    """Number of findings, listed and unlisted."""
    unlisted: int
    foreign: tuple[str, ...]
    """Files of a Java broker that are not read (`MessageStore.foreign`), and a link that a writer refuses."""
    front: tuple[int, int]
    """First physical offset of the log at the start and at the end, since retention may delete segments meanwhile."""
    error: str | None
    """Reason why the store could not be opened or read, or None."""


@dataclass(frozen=True, slots=True)
class VerifyReport(Shaped):
    """Result of `verify`."""

    ok: bool
    """True if every store could be read without findings."""
    messages: int
    bytes: int
    stores: tuple[VerifiedStore, ...]
    findings: tuple[VerifyFinding, ...]
    """Listed findings, known ones included."""


def verify(
    stores: Stores | Selection, *, range_bytes: int = RANGE_BYTES, max_errors: int = MAX_ERRORS, **where: Unpack[Where]
) -> VerifyReport:
    """Check every record, unit, index entry and JSON file of `stores`, checksums included.
    Changes nothing. If a store cannot be opened, its row has the error, and the others are checked. The error of a
    single store is raised. `spark` and `progress`: see `mqstore.jobs`. Raises ConfigError."""
    chosen = select(stores)
    check_followed(chosen)
    if max_errors < 1:
        raise ConfigError(f"max_errors must be at least 1, got {max_errors}")
    names = chosen.stores()
    runner = Runner(**where)
    with _Opener(max_errors) as last:
        opener = last if where.get("spark") is None else partial(_opened, max_errors)
        pieces, wholes = _cut(names, range_bytes, opener)
        by_store = {whole.store: whole for whole in wholes}
        # More tasks than slots, so that a slot that is done early gets another one, and progress is visible.
        log_bytes = sum(part.high - part.low for _, part in pieces if isinstance(part, LogRange))
        most = _TASK_BYTES * len(pieces) // max(1, log_bytes)
        size = max(1, min(-(-len(pieces) // max(8, 2 * runner.slots)), most))
        tasks = [pieces[at : at + size] for at in range(0, len(pieces), size)]
        for part in chain.from_iterable(runner.run(tasks, partial(_read, opener), "mqstore verify: ranges")):
            by_store[part.store].add(part)
        checked = runner.run(wholes, partial(_join, opener), "mqstore verify: stores")
    rows = tuple(row for row, _ in checked)
    return VerifyReport(
        ok=not any(row.findings or row.error for row in rows),
        messages=sum(row.messages for row in rows),
        bytes=sum(row.bytes for row in rows),
        stores=rows,
        findings=tuple(finding for _, found in checked for finding in found),
    )


@contextmanager
def _opened(max_errors: int, name: StoreName, until: int | None = None) -> Iterator[_Opened]:
    """Yield a store that is opened for one task, and its verifier."""
    with open_store(name) as store:
        yield store, store.verifier(CONFIG_CHECKS, until=until, max_errors=max_errors)


class _Opener(ExitStack):
    """Opener of stores for tasks in this process. The last one stays open for the next tasks, which are mostly about
    the same store: finding the files of many segments and queues can take longer than reading them."""

    def __init__(self, max_errors: int) -> None:
        super().__init__()
        self._max_errors = max_errors
        self._last: tuple[StoreName, _Opened] | None = None

    @contextmanager
    def __call__(self, name: StoreName, until: int | None = None) -> Iterator[_Opened]:
        if self._last is None or self._last[0] != name:
            self._last = None
            self.close()
            self._last = name, self.enter_context(_opened(self._max_errors, name, until))
        yield self._last[1]


def _cut(names: Sequence[StoreName], range_bytes: int, opener: _Open) -> tuple[list[_Piece], list[_Found]]:
    """Return the ranges of all logs followed by the index files, and an empty result for each store."""
    ranges: list[_Piece] = []
    files: list[_Piece] = []
    wholes: list[_Found] = []
    for name in names:
        wholes.append(whole := _Found(name))
        try:
            with opener(name) as (store, verifier):
                whole.end, whole.front = verifier.until, verifier.front
                ranges += [(name, each) for each in verifier.ranges(range_bytes)]
                files += [(name, file.name) for file in store.index.files]
        except (MQStoreError, OSError) as error:
            if len(names) == 1 or isinstance(error, ConfigError):
                raise
            whole.error = str(error)
    return [*ranges, *files], wholes


# -- tasks -------------------------------------------------------------------------------------------------------------


_Piece = tuple[StoreName, LogRange | str]
"""A range of a store's log, or the name of an index file."""


@dataclass(slots=True)
class _Found:
    """Findings in a store, of one task or of all tasks."""

    store: StoreName
    end: int | None = None
    """End of the checked part of the log. A writer may append more meanwhile."""
    front: int = 0
    results: list[RangeResult] = field(default_factory=list)
    of_index: list[Finding] = field(default_factory=list)
    error: str | None = None

    def add(self, part: _Found) -> None:
        self.results += part.results
        self.of_index += part.of_index
        self.error = self.error or part.error


def _read(opener: _Open, task: Sequence[_Piece]) -> list[_Found]:
    parts = []
    for name, pieces in groupby(task, itemgetter(0)):
        parts.append(found := _Found(name))
        try:
            with opener(name) as (store, verifier):
                files = {file.name: file for file in store.index.files}
                for _, part in pieces:
                    with suppress(FileNotFoundError):  # deleted by retention: `_join` reads the remaining segments
                        if isinstance(part, LogRange):
                            result = verifier.check(part)
                            found.results += [] if result is None else [result]
                        elif part in files:
                            live = writer_alive(store.path, store.fs)
                            found.of_index += store.index.check_file(files[part], live=live)
        except (MQStoreError, OSError) as error:
            found.error = str(error)
    return parts


def _join(opener: _Open, whole: _Found) -> tuple[VerifiedStore, list[VerifyFinding]]:
    name = whole.store
    if whole.error is None:
        try:
            with opener(name, whole.end) as (store, verifier):
                known = load_known(store.path, store.manifest.commitlog_segment_bytes, store.fs)
                findings = [
                    VerifyFinding(name.id, each.kind, each.file, each.position, each.length, each.detail, each in known)
                    for each in chain(verifier.findings(whole.results, whole.of_index), broker_findings(store))
                ]
                row = VerifiedStore(
                    store=name.id,
                    path=name.path,
                    messages=verifier.messages,
                    bytes=verifier.bytes,
                    body_checksum_only=verifier.body_checksum_only,
                    read_again=verifier.read_again,
                    findings=len(findings) + verifier.unlisted,
                    unlisted=verifier.unlisted,
                    foreign=(*store.foreign(), *_refusal(store)),
                    front=(whole.front, verifier.front),
                    error=None,
                )
                return row, findings
        except (MQStoreError, OSError) as failed:
            whole.error = str(failed)
    return VerifiedStore(name.id, name.path, 0, 0, 0, 0, 0, 0, (), (0, 0), whole.error), []


def _refusal(store: StoreReader) -> Iterator[str]:
    """Yield the error of opening for writing if a name is a link, which reading follows."""
    try:
        check_own(store.path, store.fs, whole=True)
    except OSError as error:
        if error.errno in REFUSED:  # else retention has removed a folder meanwhile, or it cannot be listed
            yield str(error)


@dataclass(frozen=True, slots=True)
class Recovered:
    """Result of the recovery of one store, or of a dry run."""

    store: str
    path: str
    report: RecoveryReport | None
    error: str | None
    """Reason why the store could not be recovered, or None if it could."""
    profile: str = ""
    """Profile of the store. "" if it could not be recovered, or its delay levels could not be read. The next two are
    empty then."""
    orphan_levels: Mapping[int, int] = field(default_factory=dict)
    """Number of messages by delay level that the store's table does not have. The next broker moves them to the timer
    (delivery#level-crash)."""
    foreign: tuple[str, ...] = ()
    """Files of a Java broker that are not read (`MessageStore.foreign`)."""


def recover(
    stores: Stores | Selection,
    *,
    dry_run: bool = False,
    prefix: bool = False,
    rebuild_index: bool = False,
    **where: Unpack[Where],
) -> tuple[Recovered, ...]:
    """Recover each store as `mqstore recover` does, and return a result for each.

    With `dry_run` nothing is changed, and the reports are plans. `prefix` ends the log at the first damage, as a Java
    broker would. `rebuild_index` builds the index again, even if nothing seems wrong with it. A store that cannot be
    recovered is named with its error, and the others are recovered. With a single store the error is raised. `spark`
    and `progress`: see `mqstore.jobs`. With a single store in this process, progress is in bytes of its log. Raises
    ConfigError.
    """
    chosen = select(stores)
    check_followed(chosen)
    names = chosen.stores()
    work = partial(_recover, RecoverOptions(dry_run=dry_run, prefix=prefix, rebuild_index=rebuild_index))
    runner, title = Runner(**where), "mqstore recover"
    if len(names) > 1:
        return tuple(runner.run(names, partial(_attempt, work), title))
    here = where.get("spark") is None
    [found] = [work(names[0], where.get("progress"))] if here else runner.run(names, work, title)
    return (found,)


def _attempt(work: partial[Recovered], name: StoreName) -> Recovered:
    try:
        return work(name)
    except (MQStoreError, OSError) as error:
        return Recovered(name.id, name.path, None, str(error))


def _recover(options: RecoverOptions, name: StoreName, progress: Progress | None = None) -> Recovered:
    found = Recovered(name.id, name.path, None, None)

    def check(store: StoreReader) -> Iterator[Finding]:
        nonlocal found
        with suppress(MQStoreError, OSError):  # damage in config/ does not concern a recovery of the log
            levels = delay_levels(open_tables(store)) if store.queue_table.of(SCHEDULE_TOPIC) else ()
            orphans = {view.level: view.waiting for view in levels if view.delay_ms is None and view.waiting}
            profile = store.manifest.profile
            found = replace(found, profile=profile, orphan_levels=orphans, foreign=tuple(store.foreign()))
        return broker_findings(store)

    fs = QUIET if options.dry_run else REAL
    report = recover_store(name.path, options, progress=progress, fs=fs, json_checks=CONFIG_CHECKS, record_check=check)
    return replace(found, report=report)
