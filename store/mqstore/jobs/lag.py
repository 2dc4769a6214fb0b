"""Lag of consumer groups, in one store or many.

A task compares the groups' offsets in one store with the ends of queues (`broker/admin/inspect.py`). The only message
that it reads is the oldest one that each group has not consumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Unpack

from mqstore.broker.admin.inspect import group_names, lag_of, pop_view
from mqstore.broker.background.context import open_tables
from mqstore.broker.tables.names import QueueKey
from mqstore.jobs.options.options import SourceOptions
from mqstore.jobs.options.selection import Selection, Shaped, Stores, check_followed, check_known, names_of, select
from mqstore.jobs.reading.opening import StoreName, open_store
from mqstore.jobs.reading.plan import names_queue
from mqstore.jobs.runner import Runner, Where


@dataclass(frozen=True, slots=True)
class QueueRow(Shaped):
    """Lag of a group in one queue."""

    store: str
    topic: str
    queue_id: int
    committed: int | None
    """First offset not consumed, or None. A group that pops may have consumed later offsets."""
    end: int
    """End of the queue, the offset of its next message."""
    messages: int | None
    """Messages not consumed, those in flight included. None without a committed offset."""
    in_flight: int
    """Messages popped and not acknowledged."""
    lost: int
    """Messages deleted before the group read them."""
    oldest_store_timestamp_ms: int | None
    """Store time of the oldest message that is not consumed."""
    oldest_age_ms: int | None
    suspended: Mapping[str, Any] | None
    """Failed message that blocks an ordered queue: `offset`, `attempt`, `since_ms`, `error`."""


@dataclass(frozen=True, slots=True)
class GroupLag(Shaped):
    """Lag of a group, summed over its queues in all stores."""

    group: str
    messages: int | None
    """None if the group has no committed offset in any queue."""
    in_flight: int
    lost: int
    oldest_store_timestamp_ms: int | None
    oldest_age_ms: int | None
    queues: tuple[QueueRow, ...]


@dataclass(frozen=True, slots=True)
class Unlisted(Shaped):
    """A queue that lacks messages of the log after a crash. Its lag is larger than reported."""

    store: str
    topic: str
    queue_id: int


@dataclass(frozen=True, slots=True)
class LagReport(Shaped):
    """Result of `lag_report`."""

    taken_ms: int
    """Earliest time of a task."""
    groups: tuple[GroupLag, ...]
    """Groups, sorted by name."""
    incomplete: tuple[Unlisted, ...]
    """At most one queue of each store. Others may be incomplete, too. `mqstore recover` repairs them."""


def lag_report(
    stores: Stores | Selection,
    *,
    topics: str | Sequence[str] | None = None,
    groups: Iterable[str] | None = None,
    **where: Unpack[Where],
) -> LagReport:
    """Return the lag of `groups` (default all) on `topics` (default all, retry topics included).
    The figures are those on disk. A running broker saves committed offsets within a few seconds. `spark` and
    `progress`: see `mqstore.jobs`. Raises ConfigError for an unknown group or topic, and the errors of opening."""
    chosen = select(stores, topics=topics)
    check_followed(chosen, "topics", "topic_pattern", "assign", "include_system_topics")
    wanted = None if groups is None else names_of(groups)
    options = replace(chosen.options, include_system_topics=True)  # retry topics count, unless topics are named
    found = Runner(**where).run(chosen.stores(), partial(_look, options, wanted), "mqstore lag")
    check_known("group", wanted or (), (name for each in found for name in each.groups))
    check_known("topic", options.topics or options.assign or (), (name for each in found for name in each.topics))
    now_ms = min(each.taken_ms for each in found)
    rows: dict[str, list[QueueRow]] = {name: [] for each in found for name in each.groups}
    for each in found:
        for group, row in each.rows:
            rows[group].append(row)
    return LagReport(
        now_ms,
        tuple(_sum(name, rows[name], now_ms) for name in sorted(rows) if wanted is None or name in wanted),
        tuple(each.incomplete for each in found if each.incomplete is not None),
    )


# -- in the tasks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Seen:
    """Lag of groups in one store."""

    taken_ms: int
    groups: list[str]
    """All groups of the store."""
    topics: list[str]
    """All topics of the store."""
    rows: list[tuple[str, QueueRow]]
    """Each queue of each wanted group, with the group."""
    incomplete: Unlisted | None


def _look(options: SourceOptions, groups: tuple[str, ...] | None, name: StoreName) -> _Seen:
    wanted = names_queue(options)
    with open_store(name) as store:
        tables = open_tables(store)
        now_ms = tables.clock.now_ms()
        pops = pop_view(tables, now_ms)
        known = group_names(tables)
        rows = []
        for group in known if groups is None else sorted({*known} & {*groups}):
            for lag in lag_of(tables, group, pops):
                if not wanted(lag.topic, lag.queue_id):
                    continue
                suspended = pops.suspended.get(QueueKey(group, lag.topic, lag.queue_id))
                row = QueueRow(
                    store=name.id,
                    topic=lag.topic,
                    queue_id=lag.queue_id,
                    committed=lag.committed,
                    end=lag.end,
                    messages=None if lag.committed is None else lag.messages,
                    in_flight=lag.in_flight,
                    lost=lag.lost,
                    oldest_store_timestamp_ms=lag.oldest_ms,
                    oldest_age_ms=_age_ms(lag.oldest_ms, now_ms),
                    suspended=None if suspended is None else asdict(suspended),
                )
                rows.append((group, row))
        # Known topics have messages, an entry in the table of topics, or a committed offset of a group.
        topics = {*store.topics(), *tables.topics.names(), *(row.topic for _, row in rows)}
        unlisted = store.unlisted_queue({row.topic for _, row in rows}) if rows else None
    incomplete = None if unlisted is None else Unlisted(name.path, unlisted.topic, unlisted.queue_id)
    return _Seen(now_ms, known, sorted(topics), rows, incomplete)


def _age_ms(stored_ms: int | None, now_ms: int) -> int | None:
    return None if stored_ms is None else max(0, now_ms - stored_ms)


# -- in the driver -----------------------------------------------------------------------------------------------------


def _sum(group: str, rows: list[QueueRow], now_ms: int) -> GroupLag:
    known = [row.messages for row in rows if row.messages is not None]
    stored = [row.oldest_store_timestamp_ms for row in rows if row.oldest_store_timestamp_ms is not None]
    oldest_ms = min(stored, default=None)
    return GroupLag(
        group,
        messages=sum(known) if known else None,
        in_flight=sum(row.in_flight for row in rows),
        lost=sum(row.lost for row in rows),
        oldest_store_timestamp_ms=oldest_ms,
        oldest_age_ms=_age_ms(oldest_ms, now_ms),
        queues=tuple(sorted(rows, key=lambda row: (row.topic, row.queue_id, row.store))),
    )
