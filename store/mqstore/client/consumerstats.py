"""Statistics of one push consumer, as `PushConsumer.stats` returns them (delivery#statistics)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mqstore.broker.admin.statistics import CounterKey, Rate, StatisticsSnapshot, Total
from mqstore.client.push.handler_call import CONSUME_FAILED, CONSUME_OK, CONSUME_US, PULL, PULL_US
from mqstore.client.push.processqueue import QueueInfo
from mqstore.contract import BlockedQueue
from mqstore.log.commitlog import QueueRef


@dataclass(frozen=True, slots=True)
class TopicStats:
    """Statistics of one topic since the consumer was started (delivery#statistics)."""

    ok: int
    """Messages that were handled."""
    failed: int
    """Attempts that failed, timed out, or were rejected."""
    ok_per_s: float | None
    """Rates are of the last minute, and 0.0 if nothing happened. In the first 10 s they are None.
    Averages of a minute in which nothing happened are of the last hour, or else since the start."""
    failed_per_s: float | None
    handler_ms: float | None
    """Average per message, or None before the first one."""
    pulled: int
    """Messages that were received, handled or not."""
    pulled_per_s: float | None
    pull_ms: float | None
    """Average per read that found messages. In mode "pop" one read covers several queues."""


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Statistics of a queue that is assigned to a consumer."""

    cached: QueueInfo
    committed: int | None
    max_offset: int

    @property
    def lag(self) -> int | None:
        """Number of messages that are not settled, pulled or not. None if no offset is committed."""
        return None if self.committed is None else self.max_offset - self.committed


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """Snapshot of one consumer.

    >>> import mqstore, tempfile
    >>> with tempfile.TemporaryDirectory() as folder, mqstore.open(folder) as store:
    ...     store.create_topic("orders", queues=2)
    ...     with store.push_consumer("billing", workers=1) as consumer:
    ...         _ = consumer.subscribe("orders", lambda message: None)
    ...         stats = consumer.stats()
    ...     stats.group, {queue.queue_id: each.lag for queue, each in stats.queues.items()}
    ('billing', {0: 0, 1: 0})
    """

    group: str
    client_id: str
    topics: Mapping[str, TopicStats]
    queues: Mapping[QueueRef, QueueStats]
    """Empty in mode "pop"."""
    running: int
    """Workers in a handler now."""
    suspended: Mapping[QueueRef, BlockedQueue]
    """Queues held up by a failed message, from its first failure until it is settled.
    They are those of the whole ordered group, in either mode. A broadcasting consumer has its own."""


def topic_stats(counted: StatisticsSnapshot) -> dict[str, TopicStats]:
    """Return the statistics of each topic, by name."""
    return {topic: _of(counted, topic) for topic in sorted({topic for _, topic in counted.totals})}


def _of(counted: StatisticsSnapshot, topic: str) -> TopicStats:
    none = Rate(0, 0, 1)

    def per_s(name: str) -> float | None:
        return counted.minute.get((name, topic), none).tps if counted.minute_ms else None

    return TopicStats(
        ok=counted.total(CONSUME_OK, topic),
        failed=counted.total(CONSUME_FAILED, topic),
        ok_per_s=per_s(CONSUME_OK),
        failed_per_s=per_s(CONSUME_FAILED),
        handler_ms=_average_ms(counted, CONSUME_US, topic),
        pulled=counted.total(PULL, topic),
        pulled_per_s=per_s(PULL),
        pull_ms=_average_ms(counted, PULL_US, topic),
    )


def _average_ms(counted: StatisticsSnapshot, name: str, topic: str) -> float | None:
    """Return the average of the shortest window in which something was added.
    For an idle consumer the last known duration is more useful than none (delivery#statistics)."""
    windows: Sequence[Mapping[CounterKey, Rate | Total]] = (counted.minute, counted.hour, counted.totals)
    for window in windows:
        found = window.get((name, topic))
        if found is not None and found.times:
            return found.value / found.times / 1000
    return None
