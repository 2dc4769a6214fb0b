"""Number and sizes of messages by time.

A task counts the records of its slices as arrays (`mqstore.columnar.tally`). The driver adds up the results.

Only headers are read, and compared with their offset and unit. Checksums are compared if the option `verify=true` is
given.

Times are store times. Sizes are those of stored bodies. If no topic is named, users' topics and retry topics are read,
because retry topics have the messages that were delivered before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Unpack

from mqstore.broker.tables.names import is_dlq_topic, is_system_topic
from mqstore.columnar.rows import OnCorrupt
from mqstore.columnar.tally import Tally
from mqstore.errors import ConfigError
from mqstore.jobs.options.options import SourceOptions, interval_ms
from mqstore.jobs.options.selection import Selection, Shaped, Stores, select
from mqstore.jobs.reading.plan import QueueSlice
from mqstore.jobs.reading.tasks import policy_of, read_pieces
from mqstore.jobs.runner import Runner, Where

_BY: Final = ("store", "topic", "queue_id")

Group = tuple[str | None, str | None, int | None]
"""Store, topic and queue id. None for those that the report does not group by."""


@dataclass(frozen=True, slots=True)
class TrafficRow(Shaped):
    """Figures of a group of messages. Percentiles have an error of at most 3 %, other figures are exact."""

    store: str | None
    topic: str | None
    queue_id: int | None
    """None if the report has no such groups."""
    messages: int
    bytes: int
    rate: float
    """Messages per second, from the first interval with messages to the last."""
    peak_rate: float
    """Messages per second in the interval with the most messages."""
    first_ms: int | None
    last_ms: int | None
    """Start of the first interval and end of the last one."""
    size_p50: int | None
    size_p95: int | None
    size_max: int | None
    delay_p50_ms: int | None
    delay_p95_ms: int | None
    delay_max_ms: int | None
    """Time from producer to store. 0 if the producer's clock is ahead."""
    retries: int
    """Messages that were delivered before."""


@dataclass(frozen=True, slots=True)
class TrafficPoint(Shaped):
    """Figures of a group in one interval. Intervals without messages are left out."""

    store: str | None
    topic: str | None
    queue_id: int | None
    start_ms: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class TrafficReport(Shaped):
    """Result of `traffic_report`."""

    interval_ms: int
    by: tuple[str, ...]
    total: TrafficRow
    rows: tuple[TrafficRow, ...]
    """Most messages first."""
    series: tuple[TrafficPoint, ...]
    """Points by group in the order of `rows`, then by time."""
    damaged: int
    """Messages skipped, unless `onCorrupt` is `fail`."""


def traffic_report(
    stores: Stores | Selection,
    *,
    topics: str | Sequence[str] | None = None,
    interval: str = "1m",
    by: Sequence[str] = ("topic",),
    **where: Unpack[Where],
) -> TrafficReport:
    """Count the messages of `stores` by `interval` (`30s`, `5m`, `1h`) and by the columns in `by`.
    `by` has some of `store`, `topic` and `queue_id`. `spark` and `progress`: see `mqstore.jobs`. Raises
    ConfigError, and the errors of reading."""
    try:
        length_ms = interval_ms(interval)
    except ValueError as error:
        raise ConfigError(f"interval={interval!r}: {error}; give a duration of at least 1s (30s, 5m, 1h)") from error
    if isinstance(by, str) or set(by) - set(_BY) or len(set(by)) < len(by):
        raise ConfigError(f"by={by!r}: give some of {', '.join(_BY)}, each once")
    by = tuple(name for name in _BY if name in by)
    chosen = select(stores, topics=topics)
    work = partial(_count, _reading(chosen), length_ms, by)
    runner = Runner(**where)
    parts = runner.run(_tasks(chosen, runner.slots), work, "mqstore traffic")
    total = Tally(length_ms)
    groups: dict[Group, Tally] = {}
    for tallies, _ in parts:
        for group, tally in tallies.items():
            total.merge(tally)
            groups.setdefault(group, Tally(length_ms)).merge(tally)
    found = [(_row(group, tally), tally) for group, tally in groups.items() if tally.sizes.counts]
    found.sort(key=lambda each: (-each[0].messages, each[0].topic or "", each[0].store or "", each[0].queue_id or 0))
    return TrafficReport(
        length_ms,
        by,
        _row((None, None, None), total),
        tuple(row for row, _ in found),
        tuple(
            TrafficPoint(row.store, row.topic, row.queue_id, number * length_ms, messages, size)
            for row, tally in found
            for number, messages, size in tally.by_interval()
        ),
        sum(damaged for _, damaged in parts),
    )


# -- reading -----------------------------------------------------------------------------------------------------------


def _tasks(selection: Selection, slots: int = 1) -> list[list[QueueSlice]]:
    """Return slices of queues. If no topic is named, retry topics are included."""
    options = selection.options
    if options.topics or options.assign or options.topic_pattern or options.include_system_topics:
        return selection.queue_tasks(by_region=True, slots=slots)
    tasks = selection.with_options(include_system_topics=True).queue_tasks(by_region=True, slots=slots)
    kept = [[piece for piece in task if _counts(piece.topic)] for task in tasks]
    return [task for task in kept if task]


def _counts(topic: str) -> bool:
    return not is_system_topic(topic) and not is_dlq_topic(topic)


def _reading(selection: Selection) -> SourceOptions:
    """Return the options for reading. Bodies are not needed, so checksums are compared only on request."""
    # A damaged record has neither size nor time, so onCorrupt=keep cannot count it.
    on_corrupt: OnCorrupt = "fail" if selection.options.on_corrupt == "fail" else "skip"
    asked = "verify" in {name.lower() for name in selection.given}
    return replace(selection.options, on_corrupt=on_corrupt, verify=asked and selection.options.verify)


# -- in the tasks ------------------------------------------------------------------------------------------------------


def _count(
    options: SourceOptions, interval: int, by: Sequence[str], task: list[QueueSlice]
) -> tuple[dict[Group, Tally], int]:
    """Return the sums of each group, and the number of damaged messages."""
    policy = policy_of(options)
    groups: dict[Group, Tally] = {}
    for piece, records in read_pieces(options, {"header"}, task, policy):
        group = (
            piece.store.id if "store" in by else None,
            piece.topic if "topic" in by else None,
            piece.queue_id if "queue_id" in by else None,
        )
        groups.setdefault(group, Tally(interval)).add(records)
    for tally in groups.values():
        tally.by_interval()  # raises for too many intervals
    return groups, policy.corrupt


# -- in the driver -----------------------------------------------------------------------------------------------------


def _row(group: Group, tally: Tally) -> TrafficRow:
    intervals, ms = tally.by_interval(), tally.interval_ms
    count = sum(messages for _, messages, _ in intervals)
    first = last = None
    rate = peak = 0.0
    if count:
        first, last = intervals[0][0] * ms, (intervals[-1][0] + 1) * ms
        rate = round(count * 1000 / (last - first), 6)
        peak = round(max(messages for _, messages, _ in intervals) * 1000 / ms, 6)
    sizes, delays = tally.sizes, tally.delays
    return TrafficRow(
        *group,
        messages=count,
        bytes=sum(size for _, _, size in intervals),
        rate=rate,
        peak_rate=peak,
        first_ms=first,
        last_ms=last,
        size_p50=sizes.percentile(50),
        size_p95=sizes.percentile(95),
        size_max=sizes.largest if count else None,
        delay_p50_ms=delays.percentile(50),
        delay_p95_ms=delays.percentile(95),
        delay_max_ms=delays.largest if count else None,
        retries=tally.retries,
    )
