# ruff: noqa: A002  (`filter` is the word of the engine contract, clients#contract)
"""Reads by offset, first positions and resets of groups (delivery#read, delivery#group-start).

    the group may not consume, the topic not be read, or no such queue    an error
    a reset is pending                                                    OFFSET_RESET, once
    offset < first                                                        OFFSET_TOO_SMALL, next = first, `lost` set
    all other reads                                                       status of the store (delivery#read-status)

`first` is the queue's first message, or its logical start if that is higher (dead letters that were replayed or purged,
topics that were deleted and created again). A read never blocks, and changes only the offset tables in memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Literal, NamedTuple

from mqstore.broker.reads.filters.filter import Filter
from mqstore.broker.tables.localoffsets import clients_of, refuse_clients
from mqstore.broker.tables.names import QueueKey, is_retry_topic, retry_topic
from mqstore.broker.tables.topics import TopicConfig
from mqstore.errors import ConfigError, GroupNotFoundError, NotPermittedError, OffsetOutOfRangeError, TopicNotFoundError
from mqstore.log.commitlog import QueueRef
from mqstore.log.message import Message, stored_bytes
from mqstore.log.reading.reader import Bound, GetStatus
from mqstore.logger import log as _log
from mqstore.signalsafe import Lock

if TYPE_CHECKING:
    from mqstore.broker.background.context import Tables

Start = Literal["earliest", "latest"] | datetime
"""Start of a group without a committed offset: a word, or the earliest store time of a message (aware)."""
ReadStatus = Literal[GetStatus, "OFFSET_RESET"]

_LOSSES_KEPT = 1_024
"""Number of losses to keep for a popping group. Older ones were only logged and counted."""


class ReadResult(NamedTuple):
    """Result of a read, with the bounds at the time of the read."""

    status: ReadStatus
    messages: list[Message]
    next_offset: int
    """Offset of the next read, for every status."""
    min_offset: int
    max_offset: int
    """Offset of the next message that will be put."""
    lost: int
    """Number of messages from the requested offset to `min_offset` lost to retention, expiry or purge."""


class Loss(NamedTuple):
    """Messages that a popping group will never get."""

    queue: QueueRef
    old: int
    """First lost offset, or the group's offset if it was after the end."""
    new: int
    """Next offset: after the last lost one, or the end."""


class Fetched:
    """Counts of messages that a group read from one queue."""

    __slots__ = ("behind_bytes", "behind_ms", "messages", "reads", "size", "times", "took_ns")

    def __init__(self) -> None:
        self.times = self.messages = self.size = 0
        """Number of reads that delivered messages, number of these messages, and their stored bytes."""
        self.reads = self.took_ns = 0
        """Number of all reads that returned messages, and their total time in ns."""
        self.behind_bytes = self.behind_ms = 0
        """Distance of the last message from the log end in bytes, and its age in ms."""


class Reads:
    """Reads for clients. Thread-safe. An ordinary read takes only locks that record its end and its counts."""

    def __init__(self, parts: Tables) -> None:
        self._store = parts.store
        self._topics = parts.topics
        self._groups = parts.groups
        self._offsets = parts.offsets
        self._statistics = parts.statistics
        self._clock = parts.clock
        self._fetched: dict[QueueKey, Fetched] = {}
        self._fetched_lock = Lock()
        self._begin_lock = Lock()
        self._told_lock = Lock()
        self._lost_to: dict[QueueKey, int] = {}
        """Offset, by queue, below which losses are already counted."""
        self._losses: dict[str, deque[Loss]] = {}
        """Losses of popping groups until a caller takes them."""

    def read(
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_messages: int = 32,
        *,
        max_bytes: int | None = None,
        filter: Filter | None = None,
        group: str | None = None,
        delivers: bool = True,
    ) -> ReadResult:
        """Return the messages of a queue from `offset` on that pass `filter`.

        Limits are `max_messages` and `max_bytes` of records, but the first message may have any size. With a `group`,
        its permissions are checked, a pending reset is taken, the end of the read is recorded, and delivered and lost
        messages are counted. Without `delivers` they are not counted as delivered, for callers that deliver them later,
        or never. All messages of the group's retry topic pass an SQL filter (delivery#sql92).

        Raises TopicNotFoundError, GroupNotFoundError, NotPermittedError, ConfigError (no such queue), StoreClosedError.
        """
        if max_messages < 1:
            raise ConfigError(f"max_messages must be at least 1, got {max_messages}")
        if group is not None:
            self.check_group(group, topic)
        self._check_queue(topic, queue_id)
        if group is None:
            return self._read(topic, queue_id, offset, max_messages, max_bytes, filter)
        key = QueueKey(group, topic, queue_id)
        target = self._offsets.take_reset(key)
        if target is not None:
            result = ReadResult("OFFSET_RESET", [], target, *self._offsets.bounds(topic, queue_id), 0)
        else:
            begin_ns = time.perf_counter_ns()
            unfiltered = filter is not None and filter.kind == "SQL92" and topic == retry_topic(group)
            result = self._read(topic, queue_id, offset, max_messages, max_bytes, None if unfiltered else filter)
            if result.messages:
                took_ns = time.perf_counter_ns() - begin_ns
                self._count(key, result.messages, took_ns, delivers=delivers)
            elif result.next_offset != offset:
                moved_from = self._report_loss(key, offset, result)
                if moved_from is not None and not delivers:
                    self.note_loss(key, moved_from, result.next_offset)
        self._offsets.note_pull(key, result.next_offset)
        return result

    def _count(self, key: QueueKey, messages: list[Message], took_ns: int, *, delivers: bool) -> None:
        last = messages[-1]
        size = stored_bytes(messages) if delivers else 0
        behind_bytes = self._store.max_offset - last.physical_offset - last.size
        behind_ms = self._clock.now_ms() - last.store_timestamp_ms
        with self._fetched_lock:
            fetched = self._fetched.get(key)
            if fetched is None:
                fetched = self._fetched[key] = Fetched()
            if delivers:
                fetched.times += 1
                fetched.messages += len(messages)
                fetched.size += size
            fetched.reads += 1
            fetched.took_ns += took_ns
            fetched.behind_bytes = behind_bytes
            fetched.behind_ms = behind_ms

    def counts(self) -> dict[QueueKey, Fetched]:
        """Return the counts of reads since the last call."""
        with self._fetched_lock:
            fetched, self._fetched = self._fetched, {}
        return fetched

    def check_group(self, group: str, topic: str) -> None:
        """Raise NotPermittedError unless the group may consume the topic. A missing group may be created."""
        if not self._groups.require(group).consume_enable:
            raise NotPermittedError(f"group {group!r} may not consume; alter the group with consume_enable=True")
        if not self._groups.may_read(group, topic):
            raise NotPermittedError(f"group {group!r} is forbidden to read topic {topic!r}")

    def check_topic(self, topic: str) -> TopicConfig:
        """Return the topic. Raises TopicNotFoundError without it, NotPermittedError if it may not be read."""
        config = self._topics.require(topic)
        if not config.readable:
            raise NotPermittedError(f"topic {topic!r} may not be read; alter it with a perm that has 4 (READ)")
        return config

    def _check_queue(self, topic: str, queue_id: int) -> None:
        config = self.check_topic(topic)
        if not 0 <= queue_id < config.read_queues:
            raise ConfigError(f"topic {topic!r} has queues 0..{config.read_queues - 1} for readers, not {queue_id}")

    def _read(
        self, topic: str, queue_id: int, offset: int, max_messages: int, max_bytes: int | None, filter: Filter | None
    ) -> ReadResult:
        start = self._offsets.start_of(topic, queue_id)
        if offset < start:
            low, high = self._offsets.bounds(topic, queue_id)
            if offset < low:
                return ReadResult("OFFSET_TOO_SMALL", [], low, low, high, low - max(offset, 0))
        try:
            found = self._store.get(topic, queue_id, offset, max_messages, max_bytes=max_bytes, tags=filter)
        except TopicNotFoundError:  # the topic exists, a queue is created with its first message
            return ReadResult("NO_MATCHED_LOGIC_QUEUE", [], 0, 0, 0, 0)
        messages, next_offset, low = found.messages, found.next_offset, found.min_offset
        if start > low:
            low = min(start, found.max_offset)
        lost = low - max(offset, 0) if found.status == "OFFSET_TOO_SMALL" else 0
        return ReadResult(found.status, messages, next_offset, low, found.max_offset, lost)

    def _report_loss(self, key: QueueKey, offset: int, result: ReadResult) -> int | None:
        """Count messages that the group lost, each once. Log an offset that the queue never had.
        Returns the first lost offset, or the wrong offset, or None."""
        group, topic, queue_id = key
        if result.lost:
            with self._told_lock:  # several members may have the same old offset
                first = max(offset, 0, self._lost_to.get(key, 0))
                uncounted = result.min_offset - first
                if uncounted <= 0:
                    return None
                self._lost_to[key] = result.min_offset
            self._statistics.lost(key, uncounted)
            facts = group, uncounted, topic, queue_id, offset, result.min_offset
            _log.warning("group %s lost %d messages of %s/%d: it was at %d, the first one kept is %d", *facts)
            return first
        if offset > result.max_offset:
            where = group, offset, topic, queue_id, result.max_offset
            _log.error("group %s is at %d of %s/%d, which ends at %d; it continues there", *where)
            return offset
        return None

    def note_loss(self, key: QueueKey, old: int, new: int) -> None:
        """Keep a loss for `take_losses`, because a pop cannot return it, and must not call back under its locks."""
        queue = QueueRef(key.topic, key.queue_id)
        with self._told_lock:
            losses = self._losses.setdefault(key.group, deque(maxlen=_LOSSES_KEPT))
            # Losses of single messages in flight are reported one by one, so consecutive ones are joined.
            if losses and losses[-1].queue == queue and losses[-1].new == old < new:
                old = losses.pop().old
            losses.append(Loss(queue, old, new))

    def take_losses(self, group: str) -> tuple[Loss, ...]:
        """Return the messages that a popping group has lost since the last call."""
        if group not in self._losses:
            return ()
        with self._told_lock:
            return tuple(self._losses.pop(group, ()))

    def offset_for_time(self, topic: str, queue_id: int, when: datetime | int, bound: Bound = "lower") -> int:
        """Return the offset for a time (an aware datetime, or ms since the epoch).
        "lower": the first message stored at or after it, or the end. "upper": the last one stored at or before it, or
        the first. Raises TopicNotFoundError."""
        self._topics.require(topic)
        low, _ = self._offsets.bounds(topic, queue_id)
        try:
            return max(low, self._store.offset_at(topic, queue_id, when, bound))
        except TopicNotFoundError:
            return low

    def first_position(self, key: QueueKey, start: Start | int | None = None) -> int:
        """Return the group's committed offset in a queue, or commit and return its first position.

        A group that is new in the topic begins at `start` (None: the group's own), in retry topics at the first
        message. This is committed at once for every queue of the topic, so that retention keeps the messages for the
        group. It is also saved, because after a crash "latest" would be a later offset; only the first message need not
        be saved. In a queue that was added later a group begins at the first message, because "latest" meant the end of
        the older queues.

        Raises TopicNotFoundError, GroupNotFoundError, NotPermittedError, ConfigError, and the errors of
        `OffsetTable.save`."""
        self.check_group(key.group, key.topic)
        self._check_queue(key.topic, key.queue_id)
        committed = self._offsets.committed(key)
        if committed is None:
            with self._begin_lock:  # so that two members that start at the same time get the same offset
                committed = self._offsets.committed(key)
                if committed is None:
                    committed = self._begin(key, self._groups.require(key.group).start if start is None else start)
        return committed

    def _begin(self, key: QueueKey, start: Start | int) -> int:
        """Commit the first position of a group that has no committed offset in a queue."""
        group, topic, queue_id = key
        queues = range(self._topics.require(topic).read_queues)
        is_new = all(self._offsets.committed(QueueKey(group, topic, each)) is None for each in queues)
        if not is_new or is_retry_topic(topic):
            start, queues = "earliest", range(queue_id, queue_id + 1)
        begins = {each: self.place(topic, each, start) for each in queues}
        # If the position could be another one after a crash, it must be on disk before a message is delivered.
        same = is_retry_topic(topic) or (start == "earliest" and self._groups.require(group).start == "earliest")
        self._offsets.start(group, topic, begins, durable=not same)
        return begins[queue_id]

    def place(self, topic: str, queue_id: int, start: Start | int) -> int:
        """Return the offset at which a group starts in a queue. An integer is ms since the epoch."""
        low, high = self._offsets.bounds(topic, queue_id)
        if start == "earliest":
            return low
        if start == "latest":
            return high
        if type(start) is int or isinstance(start, datetime):
            return self.offset_for_time(topic, queue_id, start)
        raise ConfigError(f"start must be 'earliest', 'latest', an aware datetime or ms since the epoch, not {start!r}")

    def reset(
        self,
        group: str,
        topic: str,
        queue_id: int | None,
        to: Start | int,
        on_reset: Callable[[QueueKey, int], object] | None = None,
    ) -> dict[QueueRef, int]:
        """Move the group's committed offset in one queue, or all readable ones. Return the offsets set.
        `to` is a word, a time or an offset (int). `on_reset` is called with each queue and its offset. Commits of
        members are dropped until the next read or pop starts there (delivery#reset). If this raises, nothing is reset:
        TopicNotFoundError, GroupNotFoundError (no such group, and no committed offset of one), ConfigError, also for a
        group that broadcasts, or OffsetOutOfRangeError for an offset that a queue does not have."""
        config = self._topics.require(topic)
        if self._groups.get(group) is None and group not in self._offsets.groups_of(topic):
            raise GroupNotFoundError(f"there is no group {group!r}; nothing to reset")
        if group not in self._offsets.groups():
            refuse_clients(group, clients_of(self._store, group))
        if queue_id is not None:
            self._check_queue(topic, queue_id)
        targets: dict[QueueRef, int] = {}
        for each in range(config.read_queues) if queue_id is None else (queue_id,):
            low, high = self._offsets.bounds(topic, each)
            target = to if type(to) is int else self.place(topic, each, to)
            if not low <= target <= high:
                raise OffsetOutOfRangeError(
                    f"offset {target} of queue {each} of {topic!r} must be {low}..{high}", low, high
                )
            targets[QueueRef(topic, each)] = target
        for ref, target in targets.items():
            key = QueueKey(group, *ref)
            self._offsets.reset(key, target)
            if on_reset is not None:
                on_reset(key, target)
        return targets
