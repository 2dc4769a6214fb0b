"""Sources of a broker's statistics: counters, and values measured on demand (delivery#statistics).

    put ------> dispatcher --- "this queue grew from .. to .." --> noted    |
    read -----> `Reads`        plain numbers by group and queue             |--- `harvest` --> `Statistics` --> windows
    pop, ack -> `QueueState`   plain numbers, under the lock it holds       |
    lags, ages, sizes, waiting messages   ----- measured by `prometheus` when somebody asks --> text

Counting costs a put nothing: the dispatcher reports each queue once a pass, and sizes are summed over the units
afterwards, thousands at once. `harvest` runs every ten seconds and on demand. Queues that did not grow have no entry,
so opening costs the same with one queue or a hundred thousand.

Puts are messages appended to a queue. A delayed message counts where it waited and again in its own topic. A
redelivered copy counts in its retry topic. Gets are messages delivered to a consumer by a read or a pop. Messages that
a pop has only prefetched do not count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from mqstore.broker.admin.statistics import CounterKey, Samples, labels_of
from mqstore.broker.background.context import messages_of
from mqstore.broker.background.retention import physical_of
from mqstore.broker.background.service import BackgroundService
from mqstore.broker.pop.state import Standing
from mqstore.broker.tables.names import (
    HALF_TOPIC,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    QueueKey,
    is_dlq_topic,
    is_retry_topic,
    is_system_topic,
    retry_topic,
)
from mqstore.layout.consumequeue import UNIT_BYTES, count_messages
from mqstore.layout.properties import REAL_TOPIC
from mqstore.logger import log as _log
from mqstore.signalsafe import Lock

if TYPE_CHECKING:
    from mqstore.broker.background.context import Parts
    from mqstore.broker.delay.levels import DelayService
    from mqstore.broker.delay.timer import TimerService
    from mqstore.broker.pop.service import PopService
    from mqstore.broker.reads.reading import Reads
    from mqstore.broker.tables.offsets import OffsetTable
    from mqstore.broker.transactions.service import Transactions
    from mqstore.log.reading.reader import StoreReader
    from mqstore.log.stats import StoreStats


class Lag(NamedTuple):
    """Standing of a group in a queue, and the end of the queue, for its lag.
    Brokers and file views use one rule (delivery#statistics).

        lag       = ready + in flight + waiting (retries that wait for their time)
        group     ready                                           in flight
        popped    not delivered yet, or free to be redelivered    delivered and not settled
        read      after the last read                             read and not committed

    Messages acknowledged after a message in flight do not count as lag, although the committed offset is lower.
    Without a committed offset the lag is 0. In file views, messages in flight of a reading group count as ready.
    """

    standing: Standing
    end: int
    waiting: int

    @property
    def ready(self) -> int:
        return self.end - self.standing.next + self.standing.again - self.standing.skipped

    @property
    def messages(self) -> int:
        return self.ready + self.standing.in_flight + self.waiting


class WaitingRetries:
    """Messages that wait for their time. Retries of a group count in queue 0 of `%RETRY%group`.
    Only its record shows the topic of a message in a level, so they are counted in blocks, each of them once."""

    def __init__(
        self, store: StoreReader, levels: Callable[[], Mapping[int, tuple[int, int]]], timer: Callable[[str], int]
    ) -> None:
        """`levels` returns (next offset, queue end) by level. `timer` counts waiting messages of a topic."""
        self._store, self._levels, self._timer = store, levels, timer
        self._topics = lru_cache(_BLOCKS)(self._count)

    def _count(self, level: int, begin: int, end: int) -> Counter[str]:
        messages = messages_of(self._store, SCHEDULE_TOPIC, begin, end, level - 1)
        return Counter(message._stored_property(REAL_TOPIC) or "" for message in messages)

    def count(self, key: QueueKey) -> int:
        """Return the number of retries that wait, and count in this queue."""
        return self.of_topic(key.topic) if (key.topic, key.queue_id) == (retry_topic(key.group), 0) else 0

    def of_topic(self, topic: str) -> int:
        """Return the number of messages that wait for a topic."""
        count = self._timer(topic)
        for level, (offset, end) in self._levels().items():
            bounds = [offset, *range(offset // _BLOCK * _BLOCK + _BLOCK, end, _BLOCK), end]
            count += sum(self._topics(level, *block)[topic] for block in pairwise(bounds))
        return count


def measure(
    store: StoreReader, offsets: OffsetTable, key: QueueKey, committed: int, popped: Standing | None, waiting: int
) -> Lag | None:
    """Return the lag of a group whose next offset is `committed`, or None if the queue does not exist.
    `popped` is its standing by the pop log, if it pops. `waiting` is the number of its `WaitingRetries`."""
    bounds = store.offsets_or_none(key.topic, key.queue_id) or ((0, 0) if waiting else None)
    if bounds is None:
        return None
    low, high = max(bounds[0], offsets.start_of(key.topic, key.queue_id)), bounds[1]
    if popped is not None:
        first, ready, next_ = (max(low, offset) for offset in (popped.first, popped.ready_from, popped.next))
        return Lag(Standing(first, ready, next_, *popped[3:]), max(next_, high), waiting)
    # For a group that reads, the messages in flight are those that were read and not committed.
    first = min(high, max(low, committed))
    pulled = min(high, max(first, offsets.query_pull(key) or 0))
    return Lag(Standing(first, pulled, pulled, pulled - first, 0), high, waiting)


_PAGE_UNITS = 65_536
_BLOCK, _BLOCKS = 1024, 4096
_NS_A_MS = 1_000_000
_ALL_TOPICS = 1_000
"""If there are more topics, those that no group consumes get no zeros in a scrape."""

_SERVES = {SCHEDULE_TOPIC: "delay", TIMER_TOPIC: "delay", HALF_TOPIC: "transaction"}
"""Message type of the engine's own topics."""

_Item = tuple[str, str, int, int]
"""Name, key, value, times."""


class Metrics(BackgroundService):
    """Statistics of one store. Thread-safe."""

    def __init__(
        self,
        parts: Parts,
        *,
        reads: Reads,
        pop: PopService,
        delay: DelayService,
        timer: TimerService,
        transactions: Transactions,
    ) -> None:
        self._store = parts.store
        self._clock = parts.clock
        self._offsets = parts.offsets
        self._statistics = parts.statistics
        self._reads = reads
        self._pop = pop
        self._delay = delay
        self._timer = timer
        self.waiting = WaitingRetries(parts.store, delay.progress, timer.waiting_for)
        self._transactions = transactions
        self._topics = parts.topics
        self._lock = Lock()
        """Held for a whole harvest, so that each caller sees all earlier counts."""
        self._grown_lock = Lock()
        self._grown_by: dict[tuple[str, int], tuple[int, int]] = {}
        """Bounds of the messages that are not counted yet, by (topic, queue id)."""
        self._rest_ns: dict[QueueKey, int] = {}
        """Time that reads took beyond whole milliseconds."""
        self._put_rest_ns: dict[tuple[str, int], int] = {}
        """Time that puts took beyond whole milliseconds."""
        self._store.on_growth.append(self._grown)

    # -- as a mechanism ---------------------------------------------------------------------------------------------

    def run_once(self, now_ms: int) -> int:
        """Count, then take the samples of windows that are due. Return the wall time of the next one in ms."""
        self.harvest()
        return self._statistics.run_once(now_ms)

    def _grown(self, topic: str, queue_id: int, begin: int, end: int) -> None:
        """Note that a queue grew. `store.on_growth` calls this in the dispatching thread."""
        key = (topic, queue_id)
        with self._grown_lock:
            self._grown_by[key] = self._grown_by.get(key, (begin, end))[0], end

    # -- counting ---------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Update the counters with every put that has returned. Raises StoreClosedError.
        Puts do not count yet if the disk has no room for their units."""
        with suppress(OSError):  # errors of dispatch are reported elsewhere, and other counts are still useful
            self._store.dispatch()
        self.harvest()

    def forget(self, *, topic: str | None = None, group: str | None = None) -> None:
        """Forget all counters of a deleted topic or group."""
        self.harvest()  # first, or the next one would count them again
        self._statistics.forget(topic=topic, group=group)
        with self._lock:
            rests = self._rest_ns.items(), self._put_rest_ns.items()
            self._rest_ns = {key: rest for key, rest in rests[0] if key.topic != topic and key.group != group}
            self._put_rest_ns = {key: rest for key, rest in rests[1] if key[0] != topic}

    def harvest(self) -> None:
        """Update the counters with what readers can see."""
        with self._lock:
            items = [*self._puts(), *self._put_times(), *self._pops(), *self._gets()]
            if items:
                self._statistics.add_many(items)

    def _puts(self) -> Iterator[_Item]:
        with self._grown_lock:
            grown, self._grown_by = self._grown_by, {}
        by_topic: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for (topic, queue_id), (begin, end) in grown.items():
            messages, size = self._came(topic, queue_id, begin, end)
            of_topic = by_topic[topic]
            of_topic[0] += messages
            of_topic[1] += size
            key = f"{topic}@{queue_id}"
            yield "QUEUE_PUT_NUMS", key, messages, messages
            yield "QUEUE_PUT_SIZE", key, size, messages
        for topic, (messages, size) in by_topic.items():
            yield "TOPIC_PUT_NUMS", topic, messages, messages
            yield "TOPIC_PUT_SIZE", topic, size, messages
            yield "BROKER_PUT_NUMS", "", messages, messages
            if not is_system_topic(topic):
                yield "BROKER_PUT_NUMS_WITHOUT_SYSTEM_TOPIC", "", messages, messages

    def _put_times(self) -> Iterator[_Item]:
        for (topic, queue_id), (took_ns, times) in self._store._take_put_times().items():
            rest_ns = self._put_rest_ns.get((topic, queue_id), 0)
            took_ms, self._put_rest_ns[topic, queue_id] = divmod(rest_ns + took_ns, _NS_A_MS)
            yield "TOPIC_PUT_LATENCY", f"{queue_id}@{topic}", took_ms, times

    def _came(self, topic: str, queue_id: int, begin: int, end: int) -> tuple[int, int]:
        """Return (messages, bytes) between two offsets of a queue.
        Messages that retention has deleted since, or that cannot be read now, are counted without their bytes."""
        count, size = 0, 0
        bounds = self._store.offsets_or_none(topic, queue_id) or (end, end)
        if begin < bounds[0]:
            count, begin = min(end, bounds[0]) - begin, min(end, bounds[0])
        while begin < end:
            try:
                units = self._store.unit_bytes(topic, queue_id, begin, min(_PAGE_UNITS, end - begin))
            except OSError as error:
                _log.warning("%s: cannot read the sizes of %s/%d (%s)", self._store.path, topic, queue_id, error)
                return count + end - begin, size
            if not len(units):
                return count + end - begin, size
            messages, their_bytes = count_messages(units)
            count += messages
            size += their_bytes
            begin += len(units) // UNIT_BYTES
        return count, size

    def _pops(self) -> Iterator[_Item]:
        for key, counts in self._pop.tables.counts():
            if counts.messages:
                yield from _got(key, counts.pops, counts.messages, counts.size)
            # One checkpoint record for each batch that was popped.
            for name, of_broker, value in (
                ("GROUP_CK_NUMS", "BROKER_CK_NUMS", counts.pops),
                ("GROUP_ACK_NUMS", "BROKER_ACK_NUMS", counts.acked),
            ):
                if value:
                    yield name, f"{key.topic}@{key.group}", value, value
                    yield of_broker, "", value, value

    def _gets(self) -> Iterator[_Item]:
        for key, fetched in self._reads.counts().items():
            if fetched.messages:
                yield from _got(key, fetched.times, fetched.messages, fetched.size)
            place = f"{key.queue_id}@{key.topic}@{key.group}"
            took_ms, self._rest_ns[key] = divmod(self._rest_ns.get(key, 0) + fetched.took_ns, _NS_A_MS)
            yield "GROUP_GET_LATENCY", place, took_ms, fetched.reads
            self._statistics.set("GROUP_GET_FALL_SIZE", place, fetched.behind_bytes)
            self._statistics.set("GROUP_GET_FALL_TIME", place, fetched.behind_ms)

    # -- measuring --------------------------------------------------------------------------------------------------

    def lag(self, group: str) -> dict[tuple[str, int], int]:
        """Return (topic, queue id) -> number of messages, as `Broker.lag` does."""
        self._store.news.check_complete()
        with self._pop.tables.moving:
            return {
                queue: 0 if (lag := self._lag(QueueKey(group, *queue), offset)) is None else lag.messages
                for queue, offset in self._offsets.of_group(group).items()
            }

    def prometheus(self) -> str:
        """Return all counters and gauges in Prometheus' text format 0.0.4. Raises StoreClosedError."""
        stats = self._store.stats()  # before the refresh dispatches
        self.refresh()
        return self._statistics.prometheus_text(
            self._gauges(stats), expected=self._expected(), type_of=self._message_type
        )

    def _message_type(self, topic: str) -> str:
        """Return the message type of a topic, in the words of RocketMQ's metrics."""
        config = self._topics.get(topic)
        return _SERVES.get(topic) or ("unspecified" if config is None else config.message_type.lower())

    def _expected(self) -> Iterator[CounterKey]:
        """Yield the counters that are 0 until something happens: those of user topics and their groups."""
        topics = [name for name in self._topics.names() if not (is_retry_topic(name) or is_dlq_topic(name))]
        pairs = [(group, topic) for group, topic, _ in self._offsets.of_all()]
        if len(topics) > _ALL_TOPICS:
            consumed = {topic for _, topic in pairs}
            topics = [topic for topic in topics if topic in consumed]
        for topic in topics:
            yield "COMMIT_NUMS", topic
            yield "ROLLBACK_NUMS", topic
            yield "DELAY_LATENCY", topic
        for group, topic in pairs:
            if not (is_retry_topic(topic) or is_dlq_topic(topic) or is_system_topic(topic)):
                yield "DLQ_PUT_NUMS", f"{topic}@{group}"

    def _gauges(self, stats: StoreStats) -> dict[str, int | Samples]:
        """Return the samples of each series, as of now.
        Reads each queue with a committed offset one to three times."""
        now_ms = self._clock.now_ms()
        overdue, overdue_ms, batches = self._pop.tables.backlog(now_ms)
        waiting: Samples = [({"kind": "level"}, self._delay.waiting()), ({"kind": "moment"}, self._timer.waiting())]
        gauges: dict[str, int | Samples] = {
            "rocketmq_storage_size": stats.commitlog_bytes,
            "rocketmq_storage_flush_behind_bytes": stats.flush_lag_bytes,
            "rocketmq_storage_dispatch_behind_bytes": stats.dispatch_lag_bytes,
            "rocketmq_storage_message_reserve_time": self._age_ms(stats.min_offset, now_ms),
            "rocketmq_pop_revive_lag": overdue,
            "rocketmq_pop_revive_latency": overdue_ms,
            "rocketmq_pop_checkpoint_buffer_size": batches,
            "rocketmq_half_messages": self._transactions.open_count(),
            "rocketmq_timing_messages": waiting,
        }
        of_groups: dict[str, Samples] = defaultdict(list)
        with self._pop.tables.moving:
            for group, topic, queues in self._offsets.of_all():
                labels = labels_of(group, topic)
                for series, value in self._of_group(group, topic, queues, now_ms).items():
                    of_groups[series].append((labels, value))
        return {**gauges, **of_groups}

    def _of_group(self, group: str, topic: str, queues: dict[int, int], now_ms: int) -> dict[str, int]:
        """Return series -> value, summed over the queues of a topic."""
        sums: Counter[str] = Counter()
        unsettled: list[int] = []
        undelivered: list[int] = []
        for queue_id, offset in queues.items():
            lag = self._lag(QueueKey(group, topic, queue_id), offset)
            if lag is None:
                continue
            sums["messages"] += lag.messages
            sums["ready"] += lag.ready
            sums["in_flight"] += lag.standing.in_flight
            for found, first, waits in (
                (unsettled, lag.standing.first, lag.messages),
                (undelivered, lag.standing.ready_from, lag.ready),
            ):
                physical = physical_of(self._store, topic, queue_id, first) if waits else None
                if physical is not None:
                    found.append(physical)
        # The log is in time order, so the lowest of several physical offsets is the oldest message.
        return {
            "rocketmq_consumer_lag_messages": sums["messages"],
            "rocketmq_consumer_ready_messages": sums["ready"],
            "rocketmq_consumer_inflight_messages": sums["in_flight"],
            "rocketmq_consumer_lag_latency": self._age_ms(min(unsettled, default=None), now_ms),
            "rocketmq_consumer_queueing_latency": self._age_ms(min(undelivered, default=None), now_ms),
        }

    def _lag(self, key: QueueKey, committed: int) -> Lag | None:
        popped = self._pop.tables.standing(key)
        return measure(self._store, self._offsets, key, committed, popped, self.waiting.count(key))

    def _age_ms(self, physical_offset: int | None, now_ms: int) -> int:
        """Return the age of the message at a physical offset, or 0 if there is none that can be read."""
        if physical_offset is None:
            return 0
        try:
            return max(0, now_ms - self._store.at(physical_offset).store_timestamp_ms)
        except LookupError:
            return 0


def _got(key: QueueKey, times: int, messages: int, size: int) -> Iterator[_Item]:
    group, topic, queue_id = key
    by_group, by_queue = f"{topic}@{group}", f"{topic}@{queue_id}@{group}"
    yield "GROUP_GET_NUMS", by_group, messages, times
    yield "GROUP_GET_SIZE", by_group, size, times
    yield "QUEUE_GET_NUMS", by_queue, messages, times
    yield "QUEUE_GET_SIZE", by_queue, size, times
    yield "BROKER_GET_NUMS", "", messages, times
    if not is_system_topic(topic):
        yield "BROKER_GET_NUMS_WITHOUT_SYSTEM_TOPIC", "", messages, times
