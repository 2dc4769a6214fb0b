"""Committed offsets of a consumer (clients#positions, delivery#group-start, clients#broadcasting).

    clustering      the group: one offset a queue, kept by the broker, written 100 ms later, and on disk every
                    `commit_interval` of the store
    broadcasting    the client: the file `local_offsets/<client id>/<group>.json` in the store

A commit goes to the broker's memory at once. In one process that is as cheap as storing it here, and lags are always
exact. A kill loses only what the broker had not written yet.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from mqstore.broker.broker import Broker
from mqstore.broker.localoffsets import LocalOffsets
from mqstore.errors import ConfigError, OffsetOutOfRangeError
from mqstore.log.commitlog import QueueRef
from mqstore.log.reader import to_ms

__all__ = ["GroupProgress", "LocalProgress", "Progress", "Start", "check_start", "place"]

Start = Literal["earliest", "latest"] | datetime


class GroupProgress:
    """Offsets of a group, of which this client is a member."""

    def __init__(self, broker: Broker, group: str, client_id: str, start: Start | None) -> None:
        """`start` is where the group begins in a new topic. None means the group's own start."""
        self._broker = broker
        self._group = group
        self._client_id = client_id
        self._start = start

    def reload(self) -> None:
        """Forget what was known before, when this consumer takes over."""

    def begin(self, queue: QueueRef) -> int:
        """Return the offset at which to continue or begin in a queue."""
        self._broker.end_pops(self._group, *queue)
        return self._broker.start_of(self._group, *queue, self._start)

    def commit(self, queue: QueueRef, offset: int) -> None:
        """Note that everything below `offset` is settled."""
        self._broker.commit(self._group, *queue, offset, owner=self._client_id)

    def committed(self, queue: QueueRef) -> int | None:
        return self._broker.committed(self._group, *queue)

    def save(self) -> None:
        self._broker.offsets.save()


class LocalProgress:
    """Offsets of a broadcasting client, with the methods of `GroupProgress`. Retention ignores them."""

    def __init__(self, broker: Broker, offsets: LocalOffsets, group: str, start: Start | None) -> None:
        """`start` is where the client begins in a new topic. None means its group's start."""
        self._broker = broker
        self._group = group
        self._offsets = offsets
        self._start = start

    def reload(self) -> None:
        self._offsets.reload()

    def begin(self, queue: QueueRef) -> int:
        known = self._offsets.get(queue)
        if known is not None:
            return known
        queues = [QueueRef(queue.topic, i) for i in range(self._broker.topics.need(queue.topic).read_queues)]
        if any(self._offsets.get(each) is not None for each in queues):  # a later queue has only new messages
            begins = {queue: self._broker.min_offset(*queue)}
        else:
            begins = {each: self._first(each) for each in queues}
        for each, begin in begins.items():
            self._offsets.update(each, begin)
        return begins[queue]

    def _first(self, queue: QueueRef) -> int:
        start = self._start or self._broker.groups.need(self._group).start
        if type(start) is int:
            return self._broker.offset_for_time(*queue, start)
        return place(self._broker, queue, start)

    def commit(self, queue: QueueRef, offset: int) -> None:
        self._offsets.update(queue, offset)

    def committed(self, queue: QueueRef) -> int | None:
        return self._offsets.get(queue)

    def save(self) -> None:
        self._offsets.persist()


Progress = GroupProgress | LocalProgress
"""Offsets of one consumer."""


def check_start(start: object) -> None:
    """Raise ConfigError unless a group can begin there. None stands for the group's own start."""
    if start not in (None, "earliest", "latest") and not (isinstance(start, datetime) and start.tzinfo is not None):
        raise ConfigError(f"start is 'earliest', 'latest' or an aware datetime, not {start!r}")


def place(broker: Broker, queue: QueueRef, to: int | Start) -> int:
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
