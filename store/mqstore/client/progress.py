"""Where a consumer goes on, and who remembers it (clients#positions, delivery#group-start, clients#broadcasting).

    clustering      the group: one offset a queue, kept by the broker, written 100 ms later, and on disk every
                    `commit_interval` of the store
    broadcasting    the client: a file of its own, `local_offsets/<client id>/<group>.json` in the store

A commit goes to the broker's memory at once: in one process that costs no more than to remember it here, lags are true
to the moment, and a kill loses what the broker had not written yet, not that and an interval more.
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
    """The group's, of which this client is a member."""

    def __init__(self, broker: Broker, group: str, client_id: str, start: Start | None) -> None:
        """`start`: where the group begins in a topic in which it never was; None: as the group has it."""
        self._broker = broker
        self._group = group
        self._client_id = client_id
        self._start = start

    def reload(self) -> None:
        """Now it is this consumer that goes on: forget what was known before."""

    def begin(self, queue: QueueRef) -> int:
        """Where to go on in a queue, or to begin."""
        self._broker.end_pops(self._group, *queue)
        return self._broker.start_of(self._group, *queue, self._start)

    def commit(self, queue: QueueRef, offset: int) -> None:
        """Everything below `offset` is settled."""
        self._broker.commit(self._group, *queue, offset, owner=self._client_id)

    def committed(self, queue: QueueRef) -> int | None:
        """What was committed last."""
        return self._broker.committed(self._group, *queue)

    def save(self) -> None:
        """Have it on disk when this returns."""
        self._broker.save()


class LocalProgress:
    """A broadcasting client's own, with the methods of `GroupProgress`. Retention knows nothing of it."""

    def __init__(self, broker: Broker, offsets: LocalOffsets, group: str, start: Start | None) -> None:
        """`start`: where the client begins in a topic in which it never was; None: as its group has it."""
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
        if any(self._offsets.get(each) is not None for each in queues):  # one that came later: nothing of it is old
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
"""Positions of one consumer."""


def check_start(start: object) -> None:
    """ConfigError unless a group can begin there. None: as the group has it."""
    if start not in (None, "earliest", "latest") and not (isinstance(start, datetime) and start.tzinfo is not None):
        raise ConfigError(f"start is 'earliest', 'latest' or an aware datetime, not {start!r}")


def place(broker: Broker, queue: QueueRef, to: int | Start) -> int:
    """The offset that a number, a word or a time names in a queue. OffsetOutOfRangeError for a number that it does not
    have, ConfigError for what is none of these."""
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
