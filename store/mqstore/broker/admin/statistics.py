"""Counters of the broker, and their rates of growth (delivery#statistics, delivery#read-status).

Each counter has three windows: minute, hour, day. The broker passes measured values (lags, sizes, messages in flight)
to `prometheus_text` as gauges. `docs/statistics.md` lists names and keys. `metrics.py` counts puts, gets and pops. The
services count failures, and the ends of transactions and delays.

Only the changes between two samples are kept, so a counter that does not grow costs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from mqstore.broker.tables.names import QueueKey, is_dlq_topic, is_retry_topic, is_system_group, is_system_topic
from mqstore.clock import Clock
from mqstore.signalsafe import Lock

CounterKey = tuple[str, str]
"""Name and key."""


class Total(NamedTuple):
    """Counter since the store was opened: the sum of all additions, and their number."""

    value: int
    times: int


class Rate(NamedTuple):
    """A counter over a window."""

    value: int
    """Growth between the oldest and the newest sample."""
    times: int
    span_ms: int
    """Time between the oldest and the newest sample."""

    @property
    def tps(self) -> float:
        """Growth in a second, or 0.0 before there are two samples."""
        return self.value * 1000 / self.span_ms if self.span_ms > 0 else 0.0

    @property
    def average(self) -> float:
        """Growth for each addition, or 0.0 if there was none."""
        return self.value / self.times if self.times else 0.0


_NOTHING: Final = Total(0, 0)


@dataclass(frozen=True, slots=True)
class StatisticsSnapshot:
    """All statistics at one time. Immutable."""

    taken_ms: int
    totals: Mapping[CounterKey, Total]
    """Since the store was opened."""
    latest: Mapping[CounterKey, int]
    """Last distances from the end of the log: GROUP_GET_FALL_SIZE in bytes, GROUP_GET_FALL_TIME in ms."""
    minute_ms: int
    """Length of `minute`, or 0 before the first samples, when no rate is known."""
    minute: Mapping[CounterKey, Rate]
    """Counters that changed in the last minute, as of the newest sample. Other counters have rate 0."""
    hour: Mapping[CounterKey, Rate]
    day: Mapping[CounterKey, Rate]
    lost: Mapping[QueueKey, int]
    """Messages deleted by retention before the group consumed them, since the store was opened."""

    def total(self, name: str, key: str = "") -> int:
        """Return the sum of a counter, or 0 if nothing was added to it."""
        return self.totals.get((name, key), _NOTHING).value


class _Window:
    """The samples of one length of time. Times are monotonic."""

    __slots__ = ("_rounds", "due_ms", "last", "period_ms", "sampled_ms")

    def __init__(self, period_ms: int, samples: int, now_ms: int) -> None:
        self.period_ms = period_ms
        self.sampled_ms = now_ms
        self.due_ms = now_ms + period_ms
        self.last: dict[CounterKey, tuple[int, int]] = {}
        """Totals of the last sample."""
        self._rounds: deque[tuple[int, dict[CounterKey, Total]]] = deque(maxlen=samples - 1)
        """Time of a sample, and the changes from it to the next."""

    def sample(self, totals: dict[CounterKey, tuple[int, int]], now_ms: int) -> None:
        # A total is replaced when it changes, never altered: the same object means the same numbers.
        changes = {
            key: Total(total[0] - before[0], total[1] - before[1])
            for key, total in totals.items()
            if (before := self.last.get(key, _NOTHING)) is not total
        }
        self._rounds.append((self.sampled_ms, changes))
        self.last = totals
        self.sampled_ms = now_ms
        self.due_ms = now_ms + self.period_ms

    def span_ms(self) -> int:
        return self.sampled_ms - self._rounds[0][0] if self._rounds else 0

    def rates(self) -> Mapping[CounterKey, Rate]:
        span_ms = self.span_ms()
        sums: dict[CounterKey, Rate] = {}
        for _, changes in self._rounds:
            for key, change in changes.items():
                value, times, _ = sums.get(key, (0, 0, 0))
                sums[key] = Rate(value + change.value, times + change.times, span_ms)
        return MappingProxyType(sums)


class Statistics:
    """Counters of a store. Thread-safe. `add` is one short section under one lock.

    >>> from mqstore.clock import SimulatedClock
    >>> clock = SimulatedClock()
    >>> statistics = Statistics(clock)
    >>> statistics.add("TOPIC_PUT_NUMS", "orders", 50)
    >>> clock.advance(10_000)
    >>> _ = statistics.run_once(clock.now_ms())
    >>> statistics.snapshot().minute["TOPIC_PUT_NUMS", "orders"].tps
    5.0
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        # Bare tuples: making a Total would double the cost of an `add`.
        self._totals: dict[CounterKey, tuple[int, int]] = {}
        self._latest: dict[CounterKey, int] = {}
        self._lost: dict[QueueKey, int] = {}
        # Windows have a separate lock. Taking a sample reads all counters, and no put should wait for that.
        self._window_lock = Lock()
        now_ms = clock.monotonic_ms()
        shapes = {"minute": (10_000, 7), "hour": (600_000, 7), "day": (3_600_000, 25)}
        self._windows = {name: _Window(*shape, now_ms) for name, shape in shapes.items()}

    def add(self, name: str, key: str = "", value: int = 1) -> None:
        """Add `value` to a counter."""
        self.add_many(((name, key, value, 1),))

    def add_many(self, items: Iterable[tuple[str, str, int, int]]) -> None:
        """Add each (name, key, value, times), all under one lock."""
        batch = tuple(items)
        with self._lock:
            for name, key, value, times in batch:
                total = self._totals.get((name, key), (0, 0))
                self._totals[name, key] = (total[0] + value, total[1] + times)

    def set(self, name: str, key: str, value: int) -> None:
        """Set the last value of a measured number: GROUP_GET_FALL_SIZE or GROUP_GET_FALL_TIME."""
        with self._lock:
            self._latest[name, key] = value

    def lost(self, key: QueueKey, messages: int) -> None:
        """Count messages that were dropped before the group had consumed them (delivery#read-status)."""
        if messages <= 0:
            return
        with self._lock:
            self._lost[key] = self._lost.get(key, 0) + messages

    def forget(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Forget all counters of a deleted topic or group. Windows keep its samples until they move on."""
        with self._window_lock, self._lock:
            self._lost = {key: lost for key, lost in self._lost.items() if key.topic != topic and key.group != group}
            samples = [each.last for each in self._windows.values()]  # else a counter that begins again looks old
            tables: tuple[dict[CounterKey, Any], ...] = (self._totals, self._latest, *samples)
            for table in tables:
                for key in [key for key in table if topic == _owners(*key)[0] or group == _owners(*key)[1]]:
                    del table[key]

    def run_once(self, now_ms: int) -> int:
        """Take the samples that are due. Return the wall time of the next one in ms.
        `now_ms` is only used for the result. Windows are measured on the monotonic clock, since the wall clock may be
        set."""
        with self._window_lock:
            monotonic_ms = self._clock.monotonic_ms()
            due = [window for window in self._windows.values() if window.due_ms <= monotonic_ms]
            if due:
                with self._lock:
                    totals = dict(self._totals)
                for window in due:
                    window.sample(totals, monotonic_ms)
            return now_ms + min(window.due_ms for window in self._windows.values()) - monotonic_ms

    def snapshot(self) -> StatisticsSnapshot:
        """Return all statistics as of now. Windows are as of their last samples."""
        with self._window_lock:
            rates = {name: window.rates() for name, window in self._windows.items()}
            minute_ms = self._windows["minute"].span_ms()
        with self._lock:
            counted, latest, lost = dict(self._totals), dict(self._latest), dict(self._lost)
        totals = {key: Total(*total) for key, total in counted.items()}
        return StatisticsSnapshot(
            taken_ms=self._clock.now_ms(),
            totals=MappingProxyType(totals),
            latest=MappingProxyType(latest),
            minute_ms=minute_ms,
            **rates,
            lost=MappingProxyType(lost),
        )

    def prometheus_text(
        self, gauges: Mapping[str, int | Samples], *, expected: Iterable[CounterKey], type_of: Callable[[str], str]
    ) -> str:
        """Return all series in Prometheus' text format 0.0.4: counters from here, `gauges` from the broker.

        `gauges` maps the name of a series to its samples (labels, value), or to one number for a series without labels.
        `expected` are counters that are 0 before their first event. Otherwise a scraper would never see them grow from
        0 to 1. Without any, their series are 0. `type_of` returns a topic's `message_type`.
        """
        series = _counted(self.snapshot(), expected, type_of)
        for name, samples in gauges.items():
            pairs: Samples = samples if isinstance(samples, list) else [({}, samples)]
            series[name] = {_labels(labels): value for labels, value in pairs}
        return "".join(_exposed(name, series[name]) for name in sorted(series))


Samples = list[tuple[dict[str, str], int]]
"""Labels and value of each sample of a series."""
_Series = dict[str, int]
"""Value by labels as text, with braces, or by a suffix and labels."""

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})

_HELP: Final[dict[str, tuple[str, str]]] = {
    "rocketmq_messages_in_total": ("counter", "Messages put."),
    "rocketmq_messages_out_total": ("counter", "Messages handed to consumers."),
    "rocketmq_throughput_in_total": ("counter", "Bytes put."),
    "rocketmq_throughput_out_total": ("counter", "Bytes handed to consumers."),
    "rocketmq_message_size": ("summary", "Bytes of a message as stored."),
    "rocketmq_send_to_dlq_messages_total": ("counter", "Messages that became dead letters."),
    "rocketmq_commit_messages_total": ("counter", "Half messages committed."),
    "rocketmq_rollback_messages_total": ("counter", "Half messages rolled back."),
    "rocketmq_delay_message_latency": ("summary", "Milliseconds by which delayed messages came late."),
    "rocketmq_consumer_lag_messages": ("gauge", "Messages not yet consumed, those in flight included."),
    "rocketmq_consumer_lag_latency": ("gauge", "Age in milliseconds of the first message not yet consumed."),
    "rocketmq_consumer_inflight_messages": ("gauge", "Messages delivered and not yet settled."),
    "rocketmq_consumer_queueing_latency": ("gauge", "Age in milliseconds of the first message not yet delivered."),
    "rocketmq_consumer_ready_messages": ("gauge", "Messages not yet delivered."),
    "rocketmq_storage_size": ("gauge", "Bytes of commitlog segments."),
    "rocketmq_storage_flush_behind_bytes": ("gauge", "Bytes appended and not yet known to be on disk."),
    "rocketmq_storage_dispatch_behind_bytes": ("gauge", "Bytes appended and not yet visible to readers."),
    "rocketmq_storage_message_reserve_time": ("gauge", "Age in milliseconds of the oldest message kept."),
    "rocketmq_pop_revive_lag": ("gauge", "Popped messages that are due for redelivery."),
    "rocketmq_pop_revive_latency": ("gauge", "Milliseconds that the first of them is overdue."),
    "rocketmq_pop_checkpoint_buffer_size": ("gauge", "Popped batches with a message in flight."),
    "rocketmq_half_messages": ("gauge", "Half messages that are neither committed nor rolled back."),
    "rocketmq_timing_messages": ("gauge", "Messages that wait for their due time."),
    "mqstore_lost_messages_total": ("counter", "Messages deleted by retention before the group consumed them."),
    "mqstore_expired_messages_total": ("counter", "Messages that expired before their first delivery."),
}  # fmt: skip

_COUNTED: Final[dict[str, str]] = {
    "TOPIC_PUT_NUMS": "rocketmq_messages_in_total",
    "GROUP_GET_NUMS": "rocketmq_messages_out_total",
    "TOPIC_PUT_SIZE": "rocketmq_throughput_in_total",
    "GROUP_GET_SIZE": "rocketmq_throughput_out_total",
    "DLQ_PUT_NUMS": "rocketmq_send_to_dlq_messages_total",
    "EXPIRED_NUMS": "mqstore_expired_messages_total",
    "COMMIT_NUMS": "rocketmq_commit_messages_total",
    "ROLLBACK_NUMS": "rocketmq_rollback_messages_total",
}
"""Series by counter. Keys are `topic` or `topic@group`."""


def _owners(name: str, key: str) -> tuple[str, str]:
    """Return topic and group of a counter, "" if it has none."""
    parts = key.split("@")
    if name.startswith("QUEUE_"):
        del parts[1]
    elif name.startswith("GROUP_GET_FALL_") or name in ("TOPIC_PUT_LATENCY", "GROUP_GET_LATENCY"):
        del parts[0]
    return parts[0], parts[1] if len(parts) > 1 else ""


_FROM_THE_START: Final = ("DLQ_PUT_NUMS", "COMMIT_NUMS", "ROLLBACK_NUMS")


def _counted(
    snapshot: StatisticsSnapshot, expected: Iterable[CounterKey], type_of: Callable[[str], str]
) -> dict[str, _Series]:
    series: dict[str, _Series] = {}
    totals = {**dict.fromkeys(expected, _NOTHING), **snapshot.totals}
    for (name, key), total in totals.items():
        if name not in _COUNTED and name != "DELAY_LATENCY":
            continue
        topic, _, group = key.partition("@")
        of_key = labels_of(group, topic)
        if name in ("TOPIC_PUT_NUMS", "TOPIC_PUT_SIZE"):
            of_key["message_type"] = type_of(key)
        labels = _labels(of_key)
        if name in _COUNTED:
            series.setdefault(_COUNTED[name], {})[labels] = total.value
        if name == "TOPIC_PUT_SIZE":
            messages = snapshot.totals.get(("TOPIC_PUT_NUMS", key), _NOTHING).value
            series.setdefault("rocketmq_message_size", {}).update(_summary(labels, total.value, messages))
        if name == "DELAY_LATENCY":
            series.setdefault("rocketmq_delay_message_latency", {}).update(_summary(labels, *total))
    for name in _FROM_THE_START:  # for a store without topics and groups
        series.setdefault(_COUNTED[name], {"": 0})
    series.setdefault("rocketmq_delay_message_latency", dict(_summary("", 0, 0)))
    for (group, topic, queue_id), lost in snapshot.lost.items():
        labels = _labels({"topic": topic, "consumer_group": group, "queue_id": str(queue_id)})
        series.setdefault("mqstore_lost_messages_total", {})[labels] = lost
    return series


def _summary(labels: str, total: int, count: int) -> _Series:
    return {f"_sum{labels}": total, f"_count{labels}": count}


def labels_of(group: str, topic: str) -> dict[str, str]:
    """Return the labels of a series of a group on a topic. `group` is empty for the whole topic.

    >>> labels_of("billing", "orders")
    {'topic': 'orders', 'consumer_group': 'billing', 'is_retry': 'false', 'is_system': 'false'}
    """
    retry = is_retry_topic(topic) or is_dlq_topic(topic)
    system = is_system_topic(topic) or is_system_group(group)
    named = {"topic": topic, "consumer_group": group} if group else {"topic": topic}
    return {**named, "is_retry": str(retry).lower(), "is_system": str(system).lower()}


def _labels(labels: Mapping[str, str]) -> str:
    # A lone surrogate, from a name that was not UTF-8, cannot be sent: a question mark replaces it.
    values = ((name, labels[name].encode("utf-8", "replace").decode()) for name in sorted(labels))
    inside = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in values)
    return f"{{{inside}}}" if inside else ""


def _exposed(name: str, samples: _Series) -> str:
    kind, text = _HELP[name]
    lines = [f"{name}{labels} {samples[labels]}\n" for labels in sorted(samples)]
    return "".join((f"# HELP {name} {text}\n", f"# TYPE {name} {kind}\n", *lines)) if lines else ""
