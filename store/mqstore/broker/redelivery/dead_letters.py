"""Dead letters of a group: list, replay, purge, expire (delivery#dead-letters).

    %DLQ%group, queue 0      gone | gone | letter | letter | letter | ...
                                         ^ logical start         ^ end

Dead letters before the queue's logical start (`START_GROUP`) are no longer listed and keep no segment. Three operations
move the start, always forward:

    replay   copies of the chosen dead letters are in the log first
    purge    moves the start at once
    expiry   dead letters older than `dlq_retention` are counted and logged

A dead letter after one that was not chosen is recorded as sent (`OffsetTable.note_sent`). It is not listed or sent
again, and the start moves past it when it gets there. A crash in a replay sends some messages twice and loses none.

A replay sends each dead letter to its own group, in a retry topic which that group reads anyway:

    the group               reads                               its dead letters
    pops, in order or not   %RETRY%group+topic, queue 0 or      have 1ST_POP_TIME,
                            that of its priority                and REAL_QID, the priority
    reads by offset         %RETRY%group, `retry_queues`        do not
    is a system group       nothing                             are delayed messages, which are sent to their topic
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from mqstore.broker.background.context import Parts, Tables, messages_of
from mqstore.broker.background.service import BackgroundService
from mqstore.broker.routing.selection import RoundRobin, group_queue
from mqstore.broker.tables.names import (
    DLQ_PREFIX,
    QueueKey,
    check_user_topic,
    dlq_topic,
    is_dlq_topic,
    is_retry_topic,
    is_system_group,
    pop_retry_topic,
    popped_topic,
    retry_topic,
)
from mqstore.broker.tables.offsets import after_sent
from mqstore.broker.tables.priorities import letter_priority
from mqstore.broker.tables.topics import TopicConfig
from mqstore.errors import ConfigError, InvalidMessageError, NotPermittedError, ReadOnlyStoreError
from mqstore.files.lock import refusal_to_reader
from mqstore.layout.properties import DLQ_ORIGIN_TOPIC, FIRST_POP_TIME, NOT_REPLAYED, RETRY_TOPIC, SHARDINGKEY, kept
from mqstore.log.message import Message
from mqstore.logger import log as _log
from mqstore.options import milliseconds

_PAGE: Final = 256
"""Number of dead letters copied before the start moves. A crash or an error can make a replay repeat this many."""
_QUEUE: Final = 0
_LOOK_MIN_MS: Final = 60_000
"""Shortest pause between checks. Dead letters wait for days, so one check a minute is enough."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Result of a replay, or with `dry_run` its expected result."""

    topics: Mapping[str, int]
    """Number of dead letters by original topic, or by `to_topic`."""
    start: int
    """First queue offset of the remaining dead letters."""

    @property
    def count(self) -> int:
        """Number of dead letters sent again."""
        return sum(self.topics.values())


class _Letter(Message):
    """Dead letter. Its `attempt` is the number of its deliveries, since no other follows."""

    __slots__ = ()
    attempt = Message.reconsume_times


class DeadLetters:
    """Dead letters of one group. The object is cheap to make and keeps only the names.

    Offsets are those of its only queue. No method reads more than a page of dead letters at once.

    >>> import mqstore, tempfile
    >>> from mqstore.log.store import MessageStore
    >>> from mqstore.broker.background.context import open_parts
    >>> from mqstore.broker.redelivery.reason import Reason
    >>> from mqstore.broker.redelivery.retry import Retries
    >>> with tempfile.TemporaryDirectory() as folder, MessageStore(folder) as store:
    ...     parts = open_parts(store)
    ...     failed = parts.router.put("orders", b"poison")
    ...     why, place = Reason("no such item"), failed.physical_offset
    ...     receipt = Retries(parts).send_back("billing", place, delay_level=-1, reason=why)
    ...     letters = DeadLetters(parts, "billing")
    ...     [letter.properties["dlq_reason"] for letter in letters], letters.replay().topics, len(letters)
    (['no such item'], {'orders': 1}, 0)
    """

    def __init__(self, tables: Tables, group: str) -> None:
        if not isinstance(group, str):
            raise ConfigError(f"group must be a str, not {type(group).__name__}")
        self.group = group
        self.topic = dlq_topic(group)
        self._tables = tables
        self._turns = RoundRobin()

    @property
    def bounds(self) -> tuple[int, int]:
        """Return (offset of the first dead letter, end of the queue), which are equal without dead letters."""
        return self._tables.offsets.bounds(self.topic, _QUEUE)

    @property
    def _sent(self) -> Sequence[tuple[int, int]]:
        """Ascending ranges [start, stop) of later dead letters that were sent again. They are not listed."""
        return self._tables.offsets.sent(self.topic)

    def __len__(self) -> int:
        """Return the number of dead letters, damaged ones included."""
        return self._count(*self.bounds)

    def _count(self, start: int, stop: int) -> int:
        """Return the number of dead letters in [start, stop) that were not sent again."""
        sent = self._sent
        return stop - start - sum(max(0, min(stop, high) - max(start, low)) for low, high in sent)

    def __iter__(self) -> Iterator[Message]:
        """Yield the dead letters, oldest first, up to the end of the queue at the time of the call."""
        return self.select()

    def select(
        self,
        *,
        offsets: Iterable[int] | None = None,
        start_ms: int | None = None,
        stop_ms: int | None = None,
        where: Callable[[Message], bool] | None = None,
    ) -> Iterator[Message]:
        """Yield the chosen dead letters, oldest first. They are read during the iteration.
        They are at one of `offsets`, were stored in [start_ms, stop_ms), and `where` returns True for them. Raises
        ConfigError for an invalid offset."""
        store, sent, (start, end) = self._tables.store, self._sent, self.bounds
        if offsets is None:
            letters = messages_of(store, self.topic, start, end)
        else:
            letters = self._chosen(start, end, sorted(set(map(_checked_offset, offsets))))
        times = range(start_ms or 0, sys.maxsize if stop_ms is None else stop_ms)
        chosen = (
            _Letter(message._batch, message._start, message.offset)
            for message in letters
            if after_sent(message.offset, sent) == message.offset and message.store_timestamp_ms in times
        )
        return chosen if where is None else filter(where, chosen)

    def _chosen(self, start: int, end: int, chosen: list[int]) -> Iterator[Message]:
        for offset in chosen:
            if start <= offset < end:
                for message in self._tables.store.get(self.topic, _QUEUE, offset, 1).messages:
                    if message.offset == offset:  # otherwise it is damaged, and this is the next one
                        yield message

    def replay(
        self,
        offsets: Iterable[int | Message] | None = None,
        *,
        all_groups: bool = False,
        to_topic: str | None = None,
        start_ms: int | None = None,
        stop_ms: int | None = None,
        where: Callable[[Message], bool] | None = None,
        dry_run: bool = False,
    ) -> Replay:
        """Send dead letters again, as new messages: attempt 1, without properties of retries, the same unique key.

        Only this group receives them. With `all_groups` each is sent to its original topic, with `to_topic` all are
        sent to that topic, where every group receives them. They are chosen as by `select`, without those that are
        added meanwhile. A dead letter that was sent again is no longer listed, and no later replay sends it.

        At least once: the copies are on disk before the dead letters are removed. The replay stops at the first one
        that cannot be sent, after all before it were sent and removed. It then raises GroupNotFoundError,
        NotPermittedError, TopicNotFoundError, InvalidMessageError, or an error of a put. `dry_run` writes nothing, and
        raises the same errors for topics."""
        if to_topic is not None:
            self._target(to_topic, create=not dry_run)
        start, end = self.bounds
        numbers = None if offsets is None else [each.offset if isinstance(each, Message) else each for each in offsets]
        letters = self.select(offsets=numbers, start_ms=start_ms, stop_ms=stop_ms, where=where)
        whole = numbers is None and start_ms is None and stop_ms is None and where is None
        to_group = not (all_groups or to_topic is not None or is_system_group(self.group))
        counts: Counter[str] = Counter()
        front, moved = start, 0  # all before `front` are sent, and `moved` of these are removed
        apart: list[tuple[int, int]] = []  # sent, too, but after dead letters that were not chosen
        try:
            for message in letters:
                origin = to_topic or origin_of(message)
                if to_group:
                    config = self._of_group(message, origin, create=not dry_run)
                else:
                    config = self._target(origin, create=not dry_run)
                if not dry_run:
                    self._send(message, config)
                counts[origin] += 1
                # With `whole` all readable ones are sent. Skipped ones are damaged, so nobody will ever read them.
                if whole or message.offset == front:
                    front = message.offset + 1
                else:
                    apart.append((message.offset, message.offset + 1))
                if counts.total() - moved >= _PAGE and not dry_run:
                    self._remove(front, apart)
                    self._tables.offsets.save()  # which flushes the copies first, so that a crash loses none
                    moved = counts.total()
            if whole:
                front = end
        finally:
            if not dry_run:
                self._remove(front, apart)
        if dry_run:
            return Replay(dict(counts), after_sent(front, sorted([*self._sent, *apart])))
        if counts or front > start:
            self._tables.offsets.save()
        return Replay(dict(counts), self.bounds[0])

    def _remove(self, front: int, apart: list[tuple[int, int]]) -> None:
        """Remove the dead letters before `front` and those in `apart`. Clears `apart`."""
        self._tables.offsets.move_start(self.topic, _QUEUE, front)
        self._tables.offsets.note_sent(self.topic, apart)
        apart.clear()

    def _of_group(self, letter: Message, origin: str, *, create: bool) -> TopicConfig:
        """Return the topic in which only this group gets a dead letter from `origin`.
        A missing topic is created only if `create` is true."""
        topics, groups = self._tables.topics, self._tables.groups
        group = groups.require(self.group) if create else groups.get(self.group)
        name, queues = retry_topic(self.group), max(1, group.retry_queues if group else 1)
        popped = pop_retry_topic(self.group, origin, self._tables.config.pop_retry_version)
        # A dead letter of an older version lacks the property. If the group has popped before, it pops this one, too.
        if FIRST_POP_TIME in letter.stored_properties() or (
            topics.get(name) is None and topics.get(popped) is not None
        ):
            name, queues = popped, 1 + self._priority(letter)
        config = topics.ensure_queues(name, queues) if create else topics.get(name) or TopicConfig(name)
        if not config.writable:
            raise NotPermittedError(f"topic {name!r} is not writable; give it permission 6")
        return config

    def _target(self, topic: str, *, create: bool) -> TopicConfig:
        """Return the topic to send to. A missing one is created only if `create` is true."""
        topics = self._tables.topics
        if is_dlq_topic(topic):
            raise InvalidMessageError(f"dead letters cannot be sent to the dead-letter topic {topic!r}", "topic")
        config = topics.get(topic)
        if config is None and is_retry_topic(topic):
            raise InvalidMessageError(f"there is no topic {topic!r}: its group never retried a message", "topic")
        if config is None or not is_retry_topic(topic):
            if create or not self._tables.config.auto_create_topics:
                return topics.for_send(topic)
            check_user_topic(topic)
            config = config or TopicConfig(topic)
        if not config.writable:
            raise NotPermittedError(f"topic {topic!r} is not writable; give it permission 6")
        return config

    def _send(self, message: Message, config: TopicConfig) -> None:
        queue_id, properties = self._placed(message, config)
        if is_retry_topic(config.name):  # so that it counts as the group's lag, and retention keeps it
            self._tables.offsets.begin(QueueKey(self.group, config.name, queue_id))
        if not isinstance(self._tables, Parts):
            raise ReadOnlyStoreError(refusal_to_reader(self._tables.store.path, self._tables.store.fs))
        self._tables.router.copy(message, config.name, queue_id, properties, reconsume_times=0, durability="append")

    def _placed(self, message: Message, config: TopicConfig) -> tuple[int, dict[str, str]]:
        stored = message.stored_properties()
        properties, shown = kept(stored, NOT_REPLAYED), stored.get(RETRY_TOPIC) or stored.get(DLQ_ORIGIN_TOPIC)
        if shown is not None and is_retry_topic(config.name):
            properties[RETRY_TOPIC] = shown  # consumers see this topic instead of the retry topic
        group = properties.get(SHARDINGKEY)
        queues = min(config.write_queues, config.read_queues) if is_retry_topic(config.name) else config.write_queues
        home = self._tables.topics.get(popped_topic(self.group, config.name))
        if home is not None and home.by_priority:
            queue_id = min(self._priority(message), queues - 1)
        elif group is None:
            queue_id = self._turns.next(config.name, queues)
        else:
            queue_id = group_queue(group, queues, self._tables.store.manifest.group_hash)
        return queue_id, properties

    def _priority(self, letter: Message) -> int:
        return letter_priority(self._tables.topics.get(origin_of(letter)), letter)

    def purge(self, *, before_offset: int | None = None, before_ms: int | None = None, dry_run: bool = False) -> int:
        """Remove all dead letters, or those below `before_offset`, or stored before `before_ms`. Return how many.
        The change is on disk when this returns. Space is freed when retention deletes the segments. `dry_run` only
        counts."""
        start, end = self.bounds
        stop = end if before_offset is None else min(end, _checked_offset(before_offset))
        if before_ms is not None and start < stop:
            stop = min(stop, self._tables.store.offset_at(self.topic, _QUEUE, before_ms, "lower"))
        if stop <= start:
            return 0
        count = self._count(start, stop)
        if not dry_run:
            self._tables.offsets.move_start(self.topic, _QUEUE, stop)
            self._tables.offsets.save()
        return count


def letters_of(tables: Tables) -> Iterator[DeadLetters]:
    """Yield the dead letters of each group that has some, by group."""
    topics = sorted(filter(is_dlq_topic, tables.store.topics()))
    return (DeadLetters(tables, topic.removeprefix(DLQ_PREFIX)) for topic in topics)


def letter_origin(letter: Message) -> str | None:
    """Return the topic that a dead letter was first sent to, if it is known.
    Dead letters of RocketMQ have only RETRY_TOPIC (delivery#x26)."""
    properties = letter.stored_properties()
    return properties.get(DLQ_ORIGIN_TOPIC) or properties.get(RETRY_TOPIC)


def origin_of(letter: Message) -> str:
    """Return `letter_origin`. Raises InvalidMessageError if it is not known."""
    if (origin := letter_origin(letter)) is None:
        raise InvalidMessageError(
            f"the dead letter at {letter.offset} of {letter.topic} does not have its original topic; give to_topic=",
            "topic",
        )
    return origin


def _checked_offset(offset: object) -> int:
    if type(offset) is not int or offset < 0:
        raise ConfigError(f"a queue offset must be an integer from 0, got {offset!r}")
    return offset


class DeadLetterExpiry(BackgroundService):
    """Service that removes dead letters older than `dlq_retention`, so that they do not keep segments for ever."""

    def __init__(self, parts: Parts) -> None:
        age = parts.config.dlq_retention
        self._age_ms = None if age is None else milliseconds(age, "dlq_retention")
        self._parts = parts

    def run_once(self, now_ms: int) -> int | None:
        """Expire due dead letters. Return when the oldest remaining one expires, at the earliest in a minute."""
        if self._age_ms is None:
            return None
        # A dead letter stored from now on is not due before this time.
        due_ms = now_ms + self._age_ms
        for letters in letters_of(self._parts):
            due_ms = min(due_ms, self._expire(letters, now_ms))
        return max(due_ms, now_ms + _LOOK_MIN_MS)

    def _expire(self, letters: DeadLetters, now_ms: int) -> int:
        """Expire due dead letters of one group. Return the time at which the next one is due."""
        assert self._age_ms is not None
        count = letters.purge(before_ms=now_ms - self._age_ms + 1)
        if count:
            self._parts.statistics.add("DLQ_EXPIRED_NUMS", f"{letters.topic}@{letters.group}", count)
            _log.warning("%s: %d dead letters of group %r have expired after %d days (dlq_retention); the oldest "
                         "remaining one is at offset %d", self._parts.store.path, count, letters.group,
                         self._age_ms // 86_400_000, letters.bounds[0])  # fmt: skip
        oldest = next(iter(letters), None)
        return now_ms + self._age_ms if oldest is None else oldest.store_timestamp_ms + self._age_ms
