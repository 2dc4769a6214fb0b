"""How far consumer groups are behind, in one store or many, and whether they catch up.

A task looks at one store: its groups' offsets beside the ends of queues (`broker/admin/inspect.py`), and no message but
the oldest that each group has not consumed. One look says how far; two say which way it goes: a later look compares
with the report of an earlier one.

    consumed a second    messages consumed between the looks, by the time between them. The end of a queue and the lag
                         tell it: the committed offset of a group that pops may stay while much behind it is done
    arriving a second    how far the ends of queues moved
    stuck                a queue that had messages to consume at both looks, and of which none was consumed
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from mqstore.broker.admin.inspect import group_names, lag_of, pop_view
from mqstore.broker.parts import open_parts
from mqstore.broker.pop.state import QueueKey
from mqstore.jobs.runner import Progress, Runner
from mqstore.spark.options import SourceOptions
from mqstore.spark.plan import StoreName, is_wanted, open_store
from mqstore.spark.selection import Selection, Shaped, Stores, check_followed, check_known, select

__all__ = ["GroupLag", "LagReport", "QueueRow", "Unlisted", "lag_report"]

_Key = tuple[str, str, str, int]
"""Group, store, topic, queue id."""


@dataclass(frozen=True, slots=True)
class QueueRow(Shaped):
    """A group in one queue."""

    store: str
    topic: str
    queue_id: int
    committed: int | None
    """The first offset that is not consumed; of a group that pops, later ones may be. None: no progress here."""
    end: int
    """Offset of the next message to come."""
    messages: int | None
    """Messages not consumed, those in flight included; None without progress."""
    in_flight: int
    """Messages popped and not acknowledged."""
    lost: int
    """Messages that were gone before the group read them."""
    oldest_store_timestamp_ms: int | None
    """Store time of the oldest message that is not consumed."""
    oldest_age_ms: int | None
    suspended: Mapping[str, Any] | None
    """The failed message that holds up an ordered queue: `offset`, `attempt`, `since_ms`, `error`."""
    stuck: bool | None
    """None without an earlier look."""


@dataclass(frozen=True, slots=True)
class GroupLag(Shaped):
    """A group in all its queues, of all stores."""

    group: str
    messages: int | None
    """None if the group has no progress in any queue."""
    in_flight: int
    lost: int
    oldest_store_timestamp_ms: int | None
    oldest_age_ms: int | None
    consumed_per_second: float | None
    arriving_per_second: float | None
    """None without an earlier look that knew the group."""
    seconds_left: float | None
    """Time until nothing is left, at these rates; None if that is not where they lead."""
    stuck_queues: int | None
    queues: tuple[QueueRow, ...]


@dataclass(frozen=True, slots=True)
class Unlisted(Shaped):
    """A queue that does not list all its messages of the log, after a crash: its lag is larger than reported."""

    store: str
    topic: str
    queue_id: int


@dataclass(frozen=True, slots=True)
class LagReport(Shaped):
    """What `lag_report` found."""

    taken_ms: int
    """The earliest clock of a task; what was counted is from then on."""
    previous_ms: int | None
    groups: tuple[GroupLag, ...]
    """By name."""
    incomplete: tuple[Unlisted, ...]
    """One queue at most of each store; others may be incomplete too. `mqstore recover` lists their messages."""


def lag_report(
    stores: Stores | Selection,
    *,
    jobs: int = 1,
    spark: Any = None,
    progress: Progress | None = None,
    topics: str | Sequence[str] | None = None,
    groups: Iterable[str] | None = None,
    previous: LagReport | None = None,
) -> LagReport:
    """Return the lag of `groups` (all) on `topics` (all, those of retries as well) in `stores`, compared with the
    `previous` report. `jobs`, `spark` and `progress`: see `mqstore.jobs`.

    By what is on disk: a running broker writes its groups' progress within a few seconds. Raises ConfigError for a
    group or topic that no store knows, and what opening a store raises.
    """
    chosen = select(stores, topics=topics)
    check_followed(chosen, "topics", "topic_pattern", "assign", "include_system_topics")
    wanted = None if groups is None else tuple(dict.fromkeys(groups))
    before = None if previous is None else _earlier(previous)
    options = replace(chosen.options, include_system_topics=True)  # retry topics count, unless topics are named
    with Runner(jobs, spark, progress) as runner:
        found = runner.run(chosen.stores(), partial(_look, options, wanted), "mqstore lag")
    check_known("group", wanted or (), (name for each in found for name in each.groups))
    check_known("topic", options.topics or options.assign or (), (name for each in found for name in each.topics))
    now_ms = min(each.taken_ms for each in found)
    rows: dict[str, list[QueueRow]] = {name: [] for each in found for name in each.groups}
    for each in found:
        for group, row in each.rows:
            rows[group].append(row)
    return LagReport(
        now_ms,
        None if before is None else before[0],
        tuple(_sum(name, rows[name], before, now_ms) for name in sorted(rows) if wanted is None or name in wanted),
        tuple(each.incomplete for each in found if each.incomplete is not None),
    )


# -- in the tasks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Seen:
    """One store."""

    taken_ms: int
    groups: list[str]
    """All groups of the store."""
    topics: list[str]
    """All topics of the store."""
    rows: list[tuple[str, QueueRow]]
    """Each queue of each group that was asked for, with the group."""
    incomplete: Unlisted | None


def _look(options: SourceOptions, groups: tuple[str, ...] | None, name: StoreName) -> _Seen:
    wanted, assign = is_wanted(options), options.assign
    with open_store(name) as store:
        parts = open_parts(store)
        now_ms = parts.clock.now_ms()
        pops = pop_view(parts, now_ms)
        known = group_names(parts)
        rows = []
        for group in known if groups is None else sorted({*known} & {*groups}):
            for lag in lag_of(parts, group, pops):
                if not wanted(lag.topic) or (assign is not None and lag.queue_id not in assign[lag.topic]):
                    continue
                suspended = pops.suspended.get(QueueKey(lag.topic, group, lag.queue_id))
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
                    stuck=None,
                )
                rows.append((group, row))
        # Known is a topic that has messages, one that was made and has none yet, and one that a group has committed on.
        topics = {*store.topics(), *parts.topics.names(), *(row.topic for _, row in rows)}
        unlisted = store.unlisted_queue({row.topic for _, row in rows}) if rows else None
    incomplete = None if unlisted is None else Unlisted(name.path, unlisted.topic, unlisted.queue_id)
    return _Seen(now_ms, known, sorted(topics), rows, incomplete)


def _age_ms(stored_ms: int | None, now_ms: int) -> int | None:
    return None if stored_ms is None else max(0, now_ms - stored_ms)


# -- in the driver -----------------------------------------------------------------------------------------------------

_Earlier = tuple[int, dict[_Key, tuple[int, int]]]
"""When it was taken; messages consumed and end of each queue with progress."""


def _earlier(previous: LagReport) -> _Earlier:
    return previous.taken_ms, {
        _key(group.group, row): (row.end - row.messages, row.end)
        for group in previous.groups
        for row in group.queues
        if row.messages is not None
    }


def _sum(group: str, rows: list[QueueRow], before: _Earlier | None, now_ms: int) -> GroupLag:
    if before is not None:
        rows = [replace(row, stuck=_is_stuck(row, before[1].get(_key(group, row)))) for row in rows]
    known = [row.messages for row in rows if row.messages is not None]
    lag = sum(known)
    oldest_ms = min(
        (row.oldest_store_timestamp_ms for row in rows if row.oldest_store_timestamp_ms is not None), default=None
    )
    consumed, arriving = _rates(group, rows, before, now_ms)
    left = None
    if lag and consumed is not None and arriving is not None and consumed > arriving:
        left = round(lag / (consumed - arriving), 3)
    return GroupLag(
        group,
        messages=lag if known else None,
        in_flight=sum(row.in_flight for row in rows),
        lost=sum(row.lost for row in rows),
        oldest_store_timestamp_ms=oldest_ms,
        oldest_age_ms=_age_ms(oldest_ms, now_ms),
        consumed_per_second=consumed,
        arriving_per_second=arriving,
        seconds_left=left,
        stuck_queues=None if before is None else sum(bool(row.stuck) for row in rows),
        queues=tuple(sorted(rows, key=lambda row: (row.topic, row.queue_id, row.store))),
    )


def _key(group: str, row: QueueRow) -> _Key:
    return group, row.store, row.topic, row.queue_id


def _is_stuck(row: QueueRow, then: tuple[int, int] | None) -> bool:
    if then is None or not row.messages:
        return False
    consumed, end = then
    return consumed < end and row.end - row.messages == consumed


def _rates(
    group: str, rows: Sequence[QueueRow], before: _Earlier | None, now_ms: int
) -> tuple[float, float] | tuple[None, None]:
    """Return messages consumed and arriving a second since the earlier look, in the queues that it knew."""
    if before is None or now_ms <= before[0]:
        return None, None
    pairs = [
        (row.end, row.messages, then)
        for row in rows
        if row.messages is not None and (then := before[1].get(_key(group, row))) is not None
    ]
    if not pairs:
        return None, None
    passed_s = (now_ms - before[0]) / 1000
    consumed = sum(end - messages - then[0] for end, messages, then in pairs)  # negative after a reset: it goes back
    arriving = sum(end - then[1] for end, _, then in pairs)
    return round(consumed / passed_s, 6), round(arriving / passed_s, 6)
