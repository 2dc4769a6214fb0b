"""How many messages, how large, when, under which keys.

A task adds up the records of its slices as arrays (`mqstore.spark.tally`) and gives back sums of intervals, histograms
and a summary of its keys: what leaves it does not grow with what it read. The driver adds these up.

Bodies are never touched: a record's header says its size, and is compared with where it lies and what its unit says;
checksums are not, unless `verify=true` is among the options.

Times are those of storing. Sizes are those of bodies as they are stored. Without topics named, messages of users'
topics are read, and of retry topics: what was delivered before lies there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mqstore.broker.names import is_dlq_topic, is_system_topic
from mqstore.errors import ConfigError
from mqstore.jobs.runner import Progress, Runner
from mqstore.layout.properties import KEYS
from mqstore.options import seconds
from mqstore.spark.arrow import cut, text
from mqstore.spark.options import SourceOptions, interval_ms
from mqstore.spark.plan import QueueSlice, open_store
from mqstore.spark.rows import OnCorrupt, Piece
from mqstore.spark.selection import Selection, Shaped, Stores, select
from mqstore.spark.tally import HeavyHitters, Tally
from mqstore.spark.tasks import policy_of, read_pieces

__all__ = [
    "HotKey",
    "Skew",
    "TrafficPoint",
    "TrafficReport",
    "TrafficRow",
    "traffic_report",
]

_BY: Final = ("store", "topic", "queue_id")
_KEYS_AT_ONCE: Final = 1 << 18

Group = tuple[str | None, str | None, int | None]
"""Store, topic and queue id; None for what is not told apart."""
Queue = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class TrafficRow(Shaped):
    """Messages of a group together. Percentiles are off by 3 % at most; all else is exact."""

    store: str | None
    topic: str | None
    queue_id: int | None
    """None for what is not told apart."""
    messages: int
    bytes: int
    rate: float
    """Messages a second, from the first interval with messages to the last."""
    peak_rate: float
    """Messages a second in the interval that had most."""
    first_ms: int | None
    last_ms: int | None
    """When the first interval begins, and the last one ends."""
    size_p50: int | None
    size_p95: int | None
    size_max: int | None
    delay_p50_ms: int | None
    delay_p95_ms: int | None
    delay_max_ms: int | None
    """From produced to stored; 0 where the producer's clock is ahead."""
    retries: int
    """Messages that were delivered before."""


@dataclass(frozen=True, slots=True)
class TrafficPoint(Shaped):
    """Messages of a group in one interval; intervals without messages are left out."""

    store: str | None
    topic: str | None
    queue_id: int | None
    start_ms: int
    messages: int
    bytes: int


@dataclass(frozen=True, slots=True)
class HotKey(Shaped):
    """A key that many messages of a topic bear."""

    topic: str
    key: str
    at_least: int
    at_most: int


@dataclass(frozen=True, slots=True)
class Skew(Shaped):
    """How evenly the messages of a topic lie in its queues."""

    topic: str
    queues: int
    """Of all stores; empty ones count."""
    hottest_store: str
    hottest_queue_id: int
    share: float
    """Of the messages that the hottest queue has."""
    ratio: float
    """Its messages to those of a queue on average: 1 is even."""


@dataclass(frozen=True, slots=True)
class TrafficReport(Shaped):
    """What `traffic_report` found."""

    interval_ms: int
    by: tuple[str, ...]
    total: TrafficRow
    rows: tuple[TrafficRow, ...]
    """Most messages first."""
    series: tuple[TrafficPoint, ...]
    """By group in the order of `rows`, and by time."""
    hot_keys: tuple[HotKey, ...]
    """Most frequent first; none that may be as rare as others."""
    skew: tuple[Skew, ...]
    """Least even first."""
    damaged: int
    """Messages left out, with `onCorrupt` other than `fail`."""


def traffic_report(
    stores: Stores | Selection,
    *,
    jobs: int = 1,
    spark: Any = None,
    progress: Progress | None = None,
    topics: str | Sequence[str] | None = None,
    interval: str | float | timedelta = "1m",
    by: Sequence[str] = ("topic",),
    top: int = 20,
) -> TrafficReport:
    """Add up the messages of `stores` by `interval` (`30s`, `5m`, `1h`, seconds) and `by` (of `store`, `topic`,
    `queue_id`); the `top` most frequent keys, which makes it slower: 0 for none.

    `jobs`, `spark` and `progress`: see `mqstore.jobs`. Raises ConfigError, and what reading raises.
    """
    length_ms = _checked_interval(interval)
    by = _checked_by(by)
    if type(top) is not int or top < 0:
        raise ConfigError(f"top={top!r} is no number from 0 on")
    chosen = select(stores, topics=topics)
    work = partial(_count, _reading(chosen), length_ms, bool(top))
    with Runner(jobs, spark, progress) as runner:
        parts = runner.run(_tasks(chosen, runner.slots), work, "mqstore traffic")
    tallies: dict[Queue, Tally] = {}
    keys = HeavyHitters()
    for part in parts:
        for queue, tally in part.queues.items():
            tallies.setdefault(queue, Tally(length_ms)).merge(tally)
        keys.merge(part.keys)
    groups = _grouped(tallies, by, length_ms)
    total = Tally(length_ms)
    for tally in tallies.values():
        total.merge(tally)
    rows = sorted(
        (_row(group, tally) for group, tally in groups.items() if tally.sizes.counts.any()),
        key=lambda row: (-row.messages, row.topic or "", row.store or "", row.queue_id or 0),
    )
    return TrafficReport(
        length_ms,
        by,
        _row((None, None, None), total),
        tuple(rows),
        tuple(point for row in rows for point in _points(_group_of(row), groups[_group_of(row)])),
        tuple(_hot(keys, top)),
        _skew(chosen, tallies),
        sum(part.damaged for part in parts),
    )


def _checked_interval(interval: str | float | timedelta) -> int:
    text = f"{seconds(interval, 'interval'):.3f}" if not isinstance(interval, str) else interval
    try:
        return interval_ms(text)
    except ValueError as error:
        raise ConfigError(f"interval={interval!r}: {error}; it is a length of time from 1s on (30s, 5m, 1h)") from error


def _checked_by(by: Sequence[str]) -> tuple[str, ...]:
    if isinstance(by, str) or set(by) - set(_BY) or len(set(by)) < len(by):
        raise ConfigError(f"by={by!r}: each of {', '.join(_BY)} may be there once")
    return tuple(name for name in _BY if name in by)


# -- what is read ------------------------------------------------------------------------------------------------------


def _tasks(selection: Selection, slots: int = 1) -> list[list[QueueSlice]]:
    """Slices of queues; of retry topics as well, if no topics are named."""
    options = selection.options
    if options.scan == "log":
        raise ConfigError("option scan=log: traffic is counted by queues: use scan=queue")
    if options.topics or options.assign or options.topic_pattern or options.include_system_topics:
        return selection.queue_tasks(by_region=True, slots=slots)
    tasks = selection.with_options(include_system_topics=True).queue_tasks(by_region=True, slots=slots)
    kept = [[piece for piece in task if _counts(piece.topic)] for task in tasks]
    return [task for task in kept if task]


def _counts(topic: str) -> bool:
    return not is_system_topic(topic) and not is_dlq_topic(topic)


def _reading(selection: Selection) -> SourceOptions:
    """How to read: bodies are not looked at, so their checksums are not compared unless that is asked for."""
    # A damaged record has no size and no time, so there is nothing of it to keep.
    on_corrupt: OnCorrupt = "fail" if selection.options.on_corrupt == "fail" else "skip"
    asked = "verify" in {name.lower() for name in selection.given}
    return replace(selection.options, on_corrupt=on_corrupt, verify=asked and selection.options.verify)


# -- in the tasks ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Part:
    """What a task has counted."""

    queues: dict[Queue, Tally]
    keys: HeavyHitters
    damaged: int


def _count(options: SourceOptions, interval: int, with_keys: bool, task: list[QueueSlice]) -> _Part:
    policy = policy_of(options)
    part = _Part({}, HeavyHitters(), 0)
    keys: dict[str, _Keys] = {}
    for piece in task:
        part.queues.setdefault((piece.store.id, piece.topic, piece.queue_id), Tally(interval))
        keys.setdefault(piece.topic, _Keys(piece.topic, part.keys))
    for piece, records in read_pieces(options, task, policy):
        part.queues[piece.store.id, piece.topic, piece.queue_id].add(records)
        if with_keys:
            keys[piece.topic].add(records)
    for each in keys.values():
        each.count()
    for tally in part.queues.values():
        tally.by_interval()  # refuses too many
    part.damaged = policy.corrupt
    return part


class _Keys:
    """The keys of a topic's messages on their way into a summary, many at a time."""

    def __init__(self, topic: str, found: HeavyHitters) -> None:
        self._topic = topic
        self._found = found
        self._waiting: list[Any] = []
        self._length = 0

    def add(self, records: Piece) -> None:
        if not records.records:
            return
        pairs = records.pairs
        chosen = pairs.named(KEYS.encode())
        starts = pairs.value[chosen]
        keys = cut(pairs.data, starts, starts + pairs.value_size[chosen])
        self._waiting.append(keys)
        self._length += len(keys)
        if self._length >= _KEYS_AT_ONCE:
            self.count()

    def count(self) -> None:
        """What waits."""
        if not self._length:
            return
        keys = text(pa.concat_arrays(self._waiting))
        self._waiting, self._length = [], 0
        if pc.any(pc.match_substring(keys, " ")).as_py():
            keys = pc.split_pattern(keys, " ").flatten()
            keys = keys.filter(pc.not_equal(keys, ""))
        values, counts = pc.value_counts(keys).flatten()
        self._found.add(_Named(self._topic, values), counts.to_numpy().astype(np.int64))


class _Named(Sequence[tuple[str, str]]):
    """(topic, key) of keys that stay in Arrow until one is asked for."""

    def __init__(self, topic: str, keys: Any) -> None:
        self._topic, self._keys = topic, keys

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: Any) -> Any:
        return self._topic, self._keys[index].as_py()


# -- in the driver -----------------------------------------------------------------------------------------------------


def _grouped(tallies: Mapping[Queue, Tally], by: Sequence[str], interval: int) -> dict[Group, Tally]:
    groups: dict[Group, Tally] = {}
    for queue, tally in tallies.items():
        values = dict(zip(_BY, queue, strict=True))
        group = tuple(values[name] if name in by else None for name in _BY)
        groups.setdefault(group, Tally(interval)).merge(tally)  # type: ignore[arg-type]
    return groups


def _row(group: Group, tally: Tally) -> TrafficRow:
    intervals, messages, size = tally.by_interval()
    count, ms = int(messages.sum()), tally.interval_ms
    first = last = None
    rate = peak = 0.0
    if count:
        first, last = int(intervals[0]) * ms, (int(intervals[-1]) + 1) * ms
        rate = round(count * 1000 / (last - first), 6)
        peak = round(int(messages.max()) * 1000 / ms, 6)
    sizes, delays = tally.sizes, tally.delays
    return TrafficRow(
        *group,
        messages=count,
        bytes=int(size.sum()),
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


def _group_of(row: TrafficRow) -> Group:
    return row.store, row.topic, row.queue_id


def _points(group: Group, tally: Tally) -> Iterator[TrafficPoint]:
    rows = zip(*(values.tolist() for values in tally.by_interval()), strict=True)
    for number, messages, size in rows:
        yield TrafficPoint(*group, number * tally.interval_ms, messages, size)


def _hot(keys: HeavyHitters, top: int) -> Iterator[HotKey]:
    for (topic, key), least, most in keys.top(top):
        if least > max(1, keys.error):  # else as likely as not one among very many that are rare
            yield HotKey(topic, key, least, most)


def _skew(selection: Selection, tallies: Mapping[Queue, Tally]) -> tuple[Skew, ...]:
    counts: dict[str, dict[tuple[str, int], int]] = {}
    for (store_id, topic, queue_id), tally in tallies.items():
        counts.setdefault(topic, {})[store_id, queue_id] = int(tally.by_interval()[1].sum())
    for name in selection.stores():
        with open_store(name) as store:  # queues without messages are what is uneven about it
            for topic in counts.keys() & set(store.topics()):
                for ref in store.queues(topic):
                    counts[topic].setdefault((name.id, ref.queue_id), 0)
    found = []
    for topic, queues in counts.items():
        total = sum(queues.values())
        (store_id, queue_id), most = max(queues.items(), key=lambda item: (item[1], item[0]))
        if total and len(queues) > 1:
            share, ratio = most / total, most * len(queues) / total
            found.append(Skew(topic, len(queues), store_id, queue_id, round(share, 4), round(ratio, 3)))
    return tuple(sorted(found, key=lambda each: (-each.ratio, each.topic)))
