"""Send dead letters again, in the stores where they lie: `DeadLetters.replay` in one store or many.

All stores are looked at before anything is written in one of them. A second run sends nothing again, because letters
that were sent are no longer listed; a crash in the middle of a run can send up to a page of letters twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mqstore.broker import sql92
from mqstore.broker.deadletters import DeadLetters
from mqstore.broker.names import DLQ_PREFIX, is_dlq_topic
from mqstore.broker.offline import offline
from mqstore.broker.parts import Parts, open_parts
from mqstore.errors import ConfigError
from mqstore.files.lock import refuse_beside_writer
from mqstore.files.quiet import QUIET
from mqstore.jobs.dlq import groups_of
from mqstore.jobs.runner import Progress, Runner
from mqstore.layout.properties import DLQ_ORIGIN_TOPIC, RETRY_TOPIC
from mqstore.log.message import Message
from mqstore.spark.plan import StoreName, open_store
from mqstore.spark.selection import Selection, Shaped, Stores, check_followed, check_known, select

__all__ = ["ResendReport", "Resent", "dlq_resend"]


@dataclass(frozen=True, slots=True)
class Resent(Shaped):
    """Letters of a group that were sent again, or would be."""

    store: str
    group: str
    count: int
    topics: Mapping[str, int]
    """Number of letters by the topic they came from, or by `to_topic`."""
    min_offset: int
    """Offset where the dead letters of the group begin afterwards."""


@dataclass(frozen=True, slots=True)
class ResendReport(Shaped):
    """What `dlq_resend` did, or with `dry_run` would do."""

    dry_run: bool
    count: int
    letters: tuple[Resent, ...]
    """Each group of each store that has letters to send."""


@dataclass(frozen=True, slots=True)
class _Job:
    selection: Selection
    groups: frozenset[str] | None
    offsets: tuple[int, ...] | None
    all_groups: bool
    to_topic: str | None


def dlq_resend(
    stores: Stores | Selection,
    *,
    jobs: int = 1,
    spark: Any = None,
    progress: Progress | None = None,
    groups: Iterable[str] | None = None,
    offsets: Iterable[int] | None = None,
    all_groups: bool = False,
    to_topic: str | None = None,
    dry_run: bool = False,
) -> ResendReport:
    """Send the dead letters of `groups` (all) again as new messages, each to the group that gave it up.

    With `all_groups` each goes to the topic it came from, with `to_topic` all go to that topic, for every group that
    reads it. A selection chooses letters: topics name where they came from, bounds are of when they were filed or of
    their offsets, and a filter tests their properties. `offsets` chooses letters of one store and one group. `dry_run`
    changes nothing. `jobs`, `spark` and `progress`: see `mqstore.jobs`.

    Raises ConfigError for a group that no store knows and for an offset without a letter; StoreLockedError for a store
    that is open for writing; NotPermittedError, TopicNotFoundError or InvalidMessageError for a letter that cannot be
    sent. Then nothing was sent in any store.
    """
    chosen = select(stores)
    check_followed(chosen, "topics", "filter", bounds=True)
    names = chosen.stores()
    wanted = None if groups is None else frozenset(groups)
    picked = None if offsets is None else tuple(sorted(set(offsets)))
    if picked is not None and (len(names) > 1 or wanted is None or len(wanted) > 1):
        raise ConfigError("offsets are those of one group in one store: name one store and one group")
    job = _Job(chosen, wanted, picked, all_groups, to_topic)
    with Runner(jobs, spark, progress) as runner:
        planned = runner.run(names, partial(_plan, job), "mqstore dlq replay: plan")
        check_known("group", wanted or (), (group for known, _ in planned for group in known))
        done = [rows for _, rows in planned]
        if not dry_run:
            with_letters = [name for name, rows in zip(names, done, strict=True) if rows]
            done = runner.run(with_letters, partial(_send, job), "mqstore dlq replay")
    letters = tuple(row for rows in done for row in rows)
    return ResendReport(dry_run, sum(row.count for row in letters), letters)


# -- in the tasks ------------------------------------------------------------------------------------------------------


def _plan(job: _Job, name: StoreName) -> tuple[set[str], list[Resent]]:
    """Return all groups of a store, and what would be sent."""
    with open_store(name) as store:
        refuse_beside_writer(name.path, QUIET)
        parts = open_parts(store)
        known = groups_of(parts)
        if job.offsets is not None and job.groups and job.groups <= known:
            [group] = job.groups
            there = {letter.offset for letter in DeadLetters(parts, group).select(offsets=job.offsets)}
            if missing := sorted({*job.offsets} - there):
                numbers = ", ".join(map(str, missing))
                raise ConfigError(f"no dead letter of {group!r} at offset {numbers}; nothing is sent")
        return known, _replay(job, name, parts, dry_run=True)


def _send(job: _Job, name: StoreName) -> list[Resent]:
    with offline(Path(name.path)) as desk:
        return _replay(job, name, desk.parts, dry_run=False)


def _replay(job: _Job, name: StoreName, parts: Parts, *, dry_run: bool) -> list[Resent]:
    chosen, plain = job.selection, Selection(job.selection.options)
    start_ms, stop_ms = chosen.times_ms if chosen.times_ms != plain.times_ms else (None, None)
    narrowed = chosen.offsets != plain.offsets or chosen.options.topics or chosen.options.filter
    found = []
    for topic in sorted(filter(is_dlq_topic, parts.store.topics())):
        group = topic.removeprefix(DLQ_PREFIX)
        if job.groups is not None and group not in job.groups:
            continue
        done = DeadLetters(parts, group).replay(
            job.offsets,
            all_groups=job.all_groups,
            to_topic=job.to_topic,
            start_ms=start_ms,
            stop_ms=stop_ms,
            where=_passes(chosen) if narrowed else None,
            dry_run=dry_run,
        )
        if done.count:
            found.append(Resent(name.id, group, done.count, done.topics, done.start))
    return found


def _passes(chosen: Selection) -> Callable[[Message], bool]:
    """Return the test of a letter's offset, origin and properties."""
    first, behind = chosen.offsets
    topics, where = chosen.options.topics, chosen.options.filter
    matches = None if where is None else sql92.compile(where).matches

    def passes(letter: Message) -> bool:
        properties = letter.stored_properties()
        origin = properties.get(DLQ_ORIGIN_TOPIC) or properties.get(RETRY_TOPIC)
        if topics is not None and origin not in topics:
            return False
        return first <= letter.offset < behind and (matches is None or matches(properties))

    return passes
