"""Dead letters of one store or many: a report of counts and reasons, and sending them again.

A task works on one store. A report does not count dead letters that were purged or sent again. A resend checks all
stores before it writes to the first (`DeadLetters.replay`). A second resend sends nothing again. A crash during a
resend can cause up to a page of messages to be sent twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Unpack

from mqstore.broker.admin.offline import offline
from mqstore.broker.admin.operations import check_letters, letter_filter, letter_groups
from mqstore.broker.background.context import Tables, open_tables
from mqstore.broker.redelivery.dead_letters import DeadLetters, letter_origin, letters_of
from mqstore.broker.redelivery.reason import reason_of
from mqstore.errors import ConfigError
from mqstore.files.lock import refuse_beside_writer
from mqstore.files.readonly_fs import QUIET
from mqstore.jobs.options.selection import Selection, Shaped, Stores, check_followed, check_known, names_of, select
from mqstore.jobs.reading.opening import StoreName, open_store
from mqstore.jobs.runner import Runner, Where
from mqstore.log.message import Message

_SHOWN: Final = 10
_DISTINCT: Final = 1000
"""Limit of distinct reasons that are counted for a group and origin in a store, since each text may be different."""
_OTHER: Final = "other reasons"


@dataclass(frozen=True, slots=True)
class DeadLetterRow(Shaped):
    """Dead letters of a group from one original topic."""

    group: str
    origin_topic: str | None
    """None if unknown."""
    count: int
    oldest_ms: int
    newest_ms: int
    max_attempts: int
    """Largest number of deliveries of a message."""
    reasons: Mapping[str, int]
    """Number of dead letters by reason, the ten most frequent. `""` means that no reason is known."""


@dataclass(frozen=True, slots=True)
class DeadLetterReport(Shaped):
    """Result of `dlq_report`."""

    total: int
    rows: tuple[DeadLetterRow, ...]
    """Rows, largest count first."""


@dataclass(frozen=True, slots=True)
class Resent(Shaped):
    """Dead letters of a group that were sent again, or would be."""

    store: str
    group: str
    count: int
    topics: Mapping[str, int]
    """Number of dead letters by original topic, or by `to_topic`."""
    min_offset: int
    """First offset of the remaining dead letters of the group."""


@dataclass(frozen=True, slots=True)
class ResendReport(Shaped):
    """Result of `dlq_resend`. With `dry_run` nothing was done."""

    dry_run: bool
    count: int
    letters: tuple[Resent, ...]
    """A row for each store and group with dead letters to send."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Choice of dead letters, and where to send them."""

    selection: Selection
    groups: frozenset[str] | None
    offsets: tuple[int, ...] | None = None
    all_groups: bool = False
    to_topic: str | None = None

    @classmethod
    def of(cls, stores: Stores | Selection, groups: Iterable[str] | None, **how: Any) -> _Job:
        chosen = select(stores)
        check_followed(chosen, "topics", "filter", "starting_timestamp_ms", "ending_timestamp_ms")
        return cls(chosen, None if groups is None else frozenset(names_of(groups)), **how)

    def letters(self, tables: Tables) -> Iterator[DeadLetters]:
        """Return the dead letters of each chosen group that has some."""
        return (each for each in letters_of(tables) if self.groups is None or each.group in self.groups)

    def choice(self) -> dict[str, Any]:
        options = self.selection.options
        where = letter_filter(options.topics or None, options.filter or None)
        return {"start_ms": options.starting_timestamp_ms, "stop_ms": options.ending_timestamp_ms, "where": where}


def dlq_report(
    stores: Stores | Selection, *, groups: Iterable[str] | None = None, **where: Unpack[Where]
) -> DeadLetterReport:
    """Count the dead letters of `groups` (default: all) by original topic, with the most frequent reasons.

    A selection chooses dead letters, as for `dlq_resend`: by original topic, by the time when they were stored as dead
    letters, and by a filter of their properties. `spark` and `progress`: see `mqstore.jobs`. Raises ConfigError, also
    for a group that no store has, and the errors of opening a store.
    """
    job = _Job.of(stores, groups)
    found: dict[tuple[str, str | None], _Heap] = {}
    parts = Runner(**where).run(job.selection.stores(), partial(_count, job), "mqstore dlq")
    check_known("group", job.groups or (), (name for groups_there, _ in parts for name in groups_there))
    for _, part in parts:
        for key, heap in part.items():
            found.setdefault(key, _Heap()).merge(heap)
    rows = [
        DeadLetterRow(*key, heap.count, heap.oldest_ms, heap.newest_ms, heap.max_attempts, heap.frequent())
        for key, heap in found.items()
    ]
    rows.sort(key=lambda row: (-row.count, row.group, row.origin_topic or ""))
    return DeadLetterReport(sum(row.count for row in rows), tuple(rows))


def dlq_resend(
    stores: Stores | Selection,
    *,
    groups: Iterable[str] | None = None,
    offsets: Iterable[int] | None = None,
    all_groups: bool = False,
    to_topic: str | None = None,
    dry_run: bool = False,
    **where: Unpack[Where],
) -> ResendReport:
    """Send the dead letters of `groups` (default: all) again as new messages, each to its own group.

    With `all_groups` each is sent to its original topic, with `to_topic` all are sent to that topic, where every group
    receives them. A selection chooses dead letters by original topic, by the time when they were stored as dead
    letters, and by a filter of their properties. `offsets` chooses dead letters of one store and one group. `dry_run`
    changes nothing. `spark` and `progress`: see `mqstore.jobs`.

    Raises ConfigError for a group that no store has and for an offset without a dead letter, StoreLockedError for a
    store that is open for writing, and NotPermittedError, TopicNotFoundError or InvalidMessageError for a dead letter
    that cannot be sent. Then nothing was sent in any store.
    """
    picked = None if offsets is None else tuple(sorted(set(offsets)))
    job = _Job.of(stores, groups, offsets=picked, all_groups=all_groups, to_topic=to_topic)
    names = job.selection.stores()
    if picked is not None and (len(names) > 1 or job.groups is None or len(job.groups) > 1):
        raise ConfigError("offsets need exactly one store and one group")
    runner = Runner(**where)
    planned = runner.run(names, partial(_plan, job), "mqstore dlq replay: plan")
    check_known("group", job.groups or (), (group for known, _ in planned for group in known))
    done = [rows for _, rows in planned]
    if not dry_run:
        with_letters = [name for name, rows in zip(names, done, strict=True) if rows]
        done = runner.run(with_letters, partial(_send, job), "mqstore dlq replay")
    letters = tuple(row for rows in done for row in rows)
    return ResendReport(dry_run, sum(row.count for row in letters), letters)


# -- in the tasks ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Heap:
    """Counts for a group's dead letters from one topic."""

    count: int = 0
    oldest_ms: int = (1 << 63) - 1
    newest_ms: int = -(1 << 63)
    max_attempts: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, letter: Message, reason: str) -> None:
        known = reason in self.reasons or len(self.reasons) < _DISTINCT
        stored_ms = letter.store_timestamp_ms
        self.merge(_Heap(1, stored_ms, stored_ms, letter.reconsume_times, Counter([reason if known else _OTHER])))

    def merge(self, other: _Heap) -> None:
        self.count += other.count
        self.oldest_ms = min(self.oldest_ms, other.oldest_ms)
        self.newest_ms = max(self.newest_ms, other.newest_ms)
        self.max_attempts = max(self.max_attempts, other.max_attempts)
        self.reasons.update(other.reasons)

    def frequent(self) -> dict[str, int]:
        return dict(sorted(self.reasons.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN])


def _count(job: _Job, name: StoreName) -> tuple[set[str], Mapping[tuple[str, str | None], _Heap]]:
    found: dict[tuple[str, str | None], _Heap] = {}
    with open_store(name) as store:
        tables = open_tables(store)
        known = letter_groups(tables)
        for letters in job.letters(tables):
            for letter in letters.select(**job.choice()):
                key = letters.group, letter_origin(letter)
                found.setdefault(key, _Heap()).add(letter, reason_of(letter))
    return known, found


def _plan(job: _Job, name: StoreName) -> tuple[set[str], list[Resent]]:
    with open_store(name) as store:
        refuse_beside_writer(name.path, QUIET)
        tables = open_tables(store)
        known = letter_groups(tables)
        if job.offsets is not None and job.groups and job.groups <= known:
            check_letters(tables, job.groups, job.offsets)
        return known, _replay(job, name, tables, dry_run=True)


def _send(job: _Job, name: StoreName) -> list[Resent]:
    with offline(Path(name.path)) as opened:
        return _replay(job, name, opened.tables, dry_run=False)


def _replay(job: _Job, name: StoreName, tables: Tables, *, dry_run: bool) -> list[Resent]:
    found = []
    for letters in job.letters(tables):
        done = letters.replay(
            job.offsets, all_groups=job.all_groups, to_topic=job.to_topic, dry_run=dry_run, **job.choice()
        )
        if done.count:
            found.append(Resent(name.id, letters.group, done.count, done.topics, done.start))
    return found
