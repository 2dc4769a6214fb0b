"""How far consumer groups are behind, over many stores, and whether they catch up (spec `spark.md` B7).

A task looks at one store: its groups' offsets beside the ends of queues (`mqstore.broker.inspect`), no message but the
oldest that each group has not consumed. One look says how far; two say which way it goes. The report of an earlier look
is all that a later one needs: keep its `to_dict()`, or `mqstore spark lag --json`.

    consumed a second    how much was consumed, by the time between the looks: what the end of a queue and the lag there
                         tell, for of a group that pops the committed offset may stay while much behind it is done
    arriving a second    how far the ends of queues moved
    stuck                a queue that had messages to consume at both looks, and of which none was consumed
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mqstore.broker.inspect import group_names, lag_of, pop_view
from mqstore.broker.parts import open_parts
from mqstore.errors import ConfigError
from mqstore.spark.jobs.shape import Plan, Progress, Selection, Shaped, Stores, check_followed, check_known, run, select
from mqstore.spark.options import SourceOptions
from mqstore.spark.plan import StoreName, is_wanted, open_store

__all__ = ["LagReport", "LagRow", "QueueRow", "lag_plan", "lag_report"]

_Key = tuple[str, str, str, int]
"""Store, group, topic, queue id."""


@dataclass(frozen=True, slots=True)
class QueueRow(Shaped):
    """A group in one queue."""

    store: str
    group: str
    topic: str
    queue_id: int
    committed: int
    """The first offset that is not consumed. Of a group that pops, some behind it may be."""
    end: int
    lag: int
    """Messages not consumed, those in flight included."""
    in_flight: int
    lost: int
    """Messages that were gone before the group came to them."""
    oldest_ms: int | None
    """When the oldest of the lag was stored."""
    stuck: bool | None
    """None without an earlier look."""


@dataclass(frozen=True, slots=True)
class LagRow(Shaped):
    """A group on a topic, in all queues of all stores."""

    group: str
    topic: str
    queues: int
    lag: int
    lag_seconds: float
    """Age of the oldest message that is not consumed; 0 if all are."""
    in_flight: int
    lost: int
    consumed_per_second: float | None
    arriving_per_second: float | None
    seconds_left: float | None
    """Until nothing is left, as things go; None if they do not go that way, or nobody knows."""
    stuck_queues: int | None


@dataclass(frozen=True, slots=True)
class LagReport(Shaped):
    """What `lag_report` found."""

    taken_ms: int
    """The earliest clock of a task; what was counted is from then on."""
    previous_ms: int | None
    rows: tuple[LagRow, ...]
    """Largest lag first; `top` of them."""
    groups: int
    """Pairs of group and topic that there are."""
    total_lag: int
    queues: tuple[QueueRow, ...]
    """All of them: what a later look compares with."""


def lag_report(
    spark: Any,
    stores: Stores | Selection,
    *,
    topics: str | Sequence[str] | None = None,
    groups: Iterable[str] | None = None,
    top: int | None = 20,
    previous: LagReport | Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> LagReport:
    """The lag of `groups` (all) on `topics` (all, those of retries as well) in `stores`. `previous`: an earlier report,
    or its `to_dict()`, to compare with. `spark`: a session, or None to run here.

    By what is on disk: a running broker writes its groups' progress within a few seconds. Raises ConfigError for a
    group or topic that no store knows and for what is no report; what opening a store raises.
    """
    chosen = _checked(stores, topics)
    wanted = None if groups is None else tuple(dict.fromkeys(groups))
    before = None if previous is None else _earlier(previous)
    work = partial(_look, _options(chosen.options), wanted)
    found = run(spark, chosen.stores(), work, progress, "mqstore lag")
    check_known("group", wanted or (), (name for each in found for name in each.groups))
    named = chosen.options.topics or chosen.options.assign or ()
    check_known("topic", named, (name for each in found for name in each.topics))
    now_ms = min(each.taken_ms for each in found)
    queues = [_compared(row, before) for each in found for row in each.rows]
    queues.sort(key=lambda row: (-row.lag, row.group, row.topic, row.store, row.queue_id))
    rows = sorted(_rows(queues, before, now_ms), key=lambda row: (-row.lag, row.group, row.topic))
    return LagReport(
        now_ms,
        None if before is None else before[0],
        tuple(rows[:top]),
        len(rows),
        sum(row.lag for row in rows),
        tuple(queues),
    )


def lag_plan(stores: Stores | Selection, *, topics: str | Sequence[str] | None = None) -> Plan:
    """What `lag_report` would look at: queues, and none of their messages."""
    chosen = _checked(stores, topics)
    return Plan.of_stores(chosen, is_wanted(_options(chosen.options)))


def _checked(stores: Stores | Selection, topics: str | Sequence[str] | None) -> Selection:
    chosen = select(stores, topics=topics)
    check_followed(chosen, "topics", "topic_pattern", "assign", "include_system_topics")
    return chosen


def _options(options: SourceOptions) -> SourceOptions:
    """Retry topics count, unless topics are named."""
    return replace(options, include_system_topics=True)


# -- in the tasks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Seen:
    """One store."""

    taken_ms: int
    groups: list[str]
    """All of them."""
    topics: list[str]
    """Likewise."""
    rows: list[QueueRow]
    """For each queue of each group that was asked for."""


def _look(options: SourceOptions, groups: tuple[str, ...] | None, name: StoreName) -> _Seen:
    wanted, assign = is_wanted(options), options.assign
    with open_store(name) as store:
        parts = open_parts(store)
        now_ms = parts.clock.now_ms()
        pops = pop_view(parts, now_ms)
        known = group_names(parts)
        rows = [
            QueueRow(
                store=name.id,
                group=group,
                topic=lag.topic,
                queue_id=lag.queue_id,
                committed=lag.committed,
                end=lag.end,
                lag=lag.messages,
                in_flight=lag.in_flight,
                lost=lag.lost,
                oldest_ms=lag.oldest_ms,
                stuck=None,
            )
            for group in (known if groups is None else sorted({*known} & {*groups}))
            for lag in lag_of(parts, group, pops)
            if lag.committed is not None  # without progress there is nothing to be behind of
            and wanted(lag.topic)
            and (assign is None or lag.queue_id in assign[lag.topic])
        ]
        # Known is a topic that has messages, one that was made and has none yet, and one that a group has committed on.
        topics = {*store.topics(), *parts.topics.names(), *(row.topic for row in rows)}
    return _Seen(now_ms, known, sorted(topics), rows)


# -- in the driver -----------------------------------------------------------------------------------------------------

_Earlier = tuple[int, dict[_Key, tuple[int, int]]]
"""When it was taken; messages consumed and end of each queue."""


def _earlier(previous: LagReport | Mapping[str, Any]) -> _Earlier:
    value = previous.to_dict() if isinstance(previous, LagReport) else previous
    try:
        queues = {
            (row["store"], row["group"], row["topic"], row["queue_id"]): (
                int(row["end"]) - int(row["lag"]),
                int(row["end"]),
            )
            for row in value["queues"]
        }
        return int(value["taken_ms"]), queues
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"what to compare with is no report of lag: {error!r}") from error


def _compared(row: QueueRow, before: _Earlier | None) -> QueueRow:
    if before is None:
        return row
    then = before[1].get((row.store, row.group, row.topic, row.queue_id))
    stuck = then is not None and then[0] < then[1] and row.lag > 0 and row.end - row.lag == then[0]
    return replace(row, stuck=stuck)


def _rows(queues: Sequence[QueueRow], before: _Earlier | None, now_ms: int) -> Iterator[LagRow]:
    by_topic: dict[tuple[str, str], list[QueueRow]] = {}
    for row in queues:
        by_topic.setdefault((row.group, row.topic), []).append(row)
    for (group, topic), rows in by_topic.items():
        lag = sum(row.lag for row in rows)
        oldest_ms = min((row.oldest_ms for row in rows if row.oldest_ms is not None), default=None)
        consumed, arriving = _rates(rows, before, now_ms)
        left = None
        if lag and consumed is not None and arriving is not None and consumed > arriving:
            left = round(lag / (consumed - arriving), 3)
        yield LagRow(
            group,
            topic,
            len(rows),
            lag,
            0.0 if oldest_ms is None else max(0, now_ms - oldest_ms) / 1000,
            sum(row.in_flight for row in rows),
            sum(row.lost for row in rows),
            consumed,
            arriving,
            left,
            None if before is None else sum(bool(row.stuck) for row in rows),
        )


def _rates(rows: Sequence[QueueRow], before: _Earlier | None, now_ms: int) -> tuple[float, float] | tuple[None, None]:
    """Consumed and arriving a second since the earlier look, by the queues that it knew."""
    if before is None or now_ms <= before[0]:
        return None, None
    pairs = [(row, then) for row in rows if (then := before[1].get((row.store, row.group, row.topic, row.queue_id)))]
    if not pairs:
        return None, None
    passed_s = (now_ms - before[0]) / 1000
    consumed = sum(row.end - row.lag - then[0] for row, then in pairs)  # negative after a reset: it goes the other way
    arriving = sum(row.end - then[1] for row, then in pairs)
    return round(consumed / passed_s, 6), round(arriving / passed_s, 6)
