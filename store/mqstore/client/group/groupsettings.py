"""Settings that a consumer shares with its group, and committed offsets (clients#group, clients#positions).

given to the consumer     the group is not there yet    the group is there
ordered    None           False                         as the group has it
           True, False    the group is created so       ConfigError if it differs
start      None           "earliest"                    as the group has it
           given          the group is created so       counts in queues without a position of the group
retry      None           the default                   as the group has it
           given          the group is created so       replaces the group's when the consumer joins; with other
                                                        members, GroupInUseError if it differs (`Members.set_retry`)

A `Queue` is not a member of its group. Its `retry` follows the same rule when the `Queue` is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from mqstore.broker.reads.filters.filter import as_filter
from mqstore.broker.tables.names import check_user_topic, is_dlq_topic, is_system_topic
from mqstore.contract import BrokerContract, Expression, Filter, GroupConfig, RetryPolicy, Start
from mqstore.errors import ConfigError, FilterError, OffsetOutOfRangeError
from mqstore.log.commitlog import QueueRef
from mqstore.log.reading.reader import to_ms


class _Beginnings:
    """Start of a consumer in queues that it has not read yet: `start`, or the group's own if that is None.
    If this is "latest", a topic that did not exist when the consumer subscribed is read from its first message."""

    def __init__(self, broker: BrokerContract, group: str, start: Start | None) -> None:
        self._broker = broker
        self._group = group
        self._start = start
        self._there: set[str] = set()
        """Topics that existed when they were subscribed to."""

    def enter(self, topics: Iterable[str]) -> None:
        """Note which topics exist now."""
        self._there.update(topic for topic in topics if self._broker.topics.get(topic) is not None)

    def _start_in(self, topic: str) -> Start | int:
        start = self._start or self._broker.groups.require(self._group).start
        return "earliest" if start == "latest" and topic not in self._there else start


class GroupProgress(_Beginnings):
    """Offsets of a group, of which this client is a member (delivery#group-start).
    The broker keeps one for each queue, written 100 ms later, and on disk every `commit_interval` of the store.

    A commit goes to the broker's memory at once. In one process that is as cheap as storing it here, and lags are
    always exact. A kill loses only the commits that the broker had not written yet.
    """

    def __init__(self, broker: BrokerContract, group: str, client_id: str, start: Start | None) -> None:
        super().__init__(broker, group, start)
        self._client_id = client_id

    def reload(self) -> None:
        """Forget earlier offsets when this consumer takes over."""

    def begin(self, queue: QueueRef) -> int:
        """Return the offset at which to continue or begin in a queue."""
        self._broker.release_all(self._group, *queue)
        start = self._start_in(queue.topic)
        return self._broker.start_of(self._group, *queue, None if isinstance(start, int) else start)

    def commit(self, queue: QueueRef, offset: int) -> None:
        """Note that everything below `offset` is settled."""
        self._broker.commit(self._group, *queue, offset, owner=self._client_id)

    def committed(self, queue: QueueRef) -> int | None:
        return self._broker.committed(self._group, *queue)

    def save(self) -> None:
        self._broker.save_offsets()


class LocalProgress(_Beginnings):
    """Offsets of a broadcasting client, with the methods of `GroupProgress`. Retention ignores them."""

    def __init__(self, broker: BrokerContract, client_id: str, group: str, start: Start | None) -> None:
        super().__init__(broker, group, start)
        offsets = broker.local_offsets(client_id, group)
        self.reload, self.save = offsets.reload, offsets.save
        self.committed, self.commit = offsets.committed, offsets.commit

    def begin(self, queue: QueueRef) -> int:
        known = self.committed(queue)
        if known is not None:
            return known
        queues = [QueueRef(queue.topic, i) for i in self._broker.topics.require(queue.topic).queue_ids]
        if any(self.committed(each) is not None for each in queues):  # a later queue has only new messages
            begins = {queue: self._broker.min_offset(*queue)}
        else:
            begins = {each: self._first(each) for each in queues}
        for each, begin in begins.items():
            self.commit(each, begin)
        return begins[queue]

    def _first(self, queue: QueueRef) -> int:
        start = self._start_in(queue.topic)
        if type(start) is int:
            return self._broker.offset_for_time(*queue, start)
        return place(self._broker, queue, start)


Progress = GroupProgress | LocalProgress
"""Offsets of one consumer."""


def check_start(start: object) -> None:
    """Raise ConfigError if `start` is not a valid start. None means the group's own start."""
    if start not in (None, "earliest", "latest") and not (isinstance(start, datetime) and start.tzinfo is not None):
        raise ConfigError(f"start is 'earliest', 'latest' or an aware datetime, not {start!r}")


def place(broker: BrokerContract, queue: QueueRef, to: int | Start) -> int:
    """Return the offset that a number, a word or a time names in a queue.
    Raises OffsetOutOfRangeError for a number that the queue does not have, ConfigError for anything else."""
    if type(to) is int:
        low, high = broker.min_offset(*queue), broker.max_offset(*queue)
        if not low <= to <= high:
            where = f"queue {queue.queue_id} of {queue.topic!r}"
            raise OffsetOutOfRangeError(f"{where} has offsets {low}..{high}, not {to}", low, high)
        return to
    if to == "earliest":
        return broker.min_offset(*queue)
    if to == "latest":
        return broker.max_offset(*queue)
    if isinstance(to, datetime):
        return broker.offset_for_time(*queue, to_ms(to))
    raise ConfigError(f"a place in a queue is an offset, 'earliest', 'latest' or an aware datetime, not {to!r}")


def order_of(broker: BrokerContract, group: str, ordered: bool | None) -> bool:
    """Return True if a consumer of `group` consumes in order.
    With None it follows the group. A new group has no order."""
    if ordered is not None:
        return ordered
    known = broker.groups.get(group)
    return known is not None and known.orderly


def check_order(known: GroupConfig, ordered: bool) -> None:
    """Raise ConfigError, with advice, if the group consumes in another order."""
    if known.orderly != ordered:
        raise ConfigError(
            f"group {known.name!r} was made to consume {'in order' if known.orderly else 'without order'}: give "
            f"ordered={known.orderly}, use another group, or alter it: broker.groups.alter({known.name!r}, "
            f"orderly={ordered})"
        )


def enter_group(
    broker: BrokerContract,
    group: str,
    *,
    ordered: bool = False,
    start: Start | None = None,
    retry: RetryPolicy | None = None,
) -> GroupConfig:
    """Return the group, created with these settings if it is new. Raises the errors of `GroupTable.create`."""
    settings: dict[str, Any] = {"orderly": ordered}
    if retry is not None:
        settings["retry_policy"] = retry
    if start is not None:
        settings["start"] = max(0, to_ms(start)) if isinstance(start, datetime) else start
    return broker.groups.get(group) or broker.groups.create(group, **settings)


def begin_in(broker: BrokerContract, group: str, topic: str, start: Start | None) -> bool:
    """Note where the group begins in each existing queue. Return False if the topic does not exist.
    So later messages are found, and retention keeps them until then."""
    config = broker.topics.get(topic)
    for queue_id in () if config is None else config.queue_ids:
        broker.start_of(group, topic, queue_id, start)
    return config is not None


class Wanted(NamedTuple):
    """Choice of messages of a topic."""

    expression: Expression
    """Kind and text, as members register it."""
    filter: Filter | None


def wanted(broker: BrokerContract, topic: str, tags: str = "*", sql: str | None = None) -> Wanted:
    """Return the choice of messages of `topic` by tags or by an SQL92 expression.
    Raises InvalidMessageError or NotPermittedError for a name that no user topic has, FilterError, and ConfigError for
    both.

    A blank choice of tags is refused. The engine takes it for no tag at all, which no message has, so the group would
    skip everything (delivery#tags).
    """
    # Existing topics may have other names: dead letters, or topics of a Java broker.
    if (
        type(topic) is not str
        or is_system_topic(topic)
        or not (is_dlq_topic(topic) or broker.topics.get(topic) is not None)
    ):
        check_user_topic(topic)
    if sql is not None:
        if tags != "*":
            raise ConfigError(f"topic {topic!r}: give tags or sql, not both")
        return Wanted(("SQL92", sql), broker.filter(sql, "SQL92"))
    chosen = as_filter(tags)
    if tags and not tags.strip():
        raise FilterError(f"topic {topic!r}: tags is blank, and would let nothing through; '*' is everything", 0)
    return Wanted(("TAG", tags), chosen)
