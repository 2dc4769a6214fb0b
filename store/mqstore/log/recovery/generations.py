"""Records of earlier generations of a topic: those from before it was deleted and created again.

A Java broker that deletes a topic removes the folders of its queues. The records stay in the commitlog until retention
takes them. The queues of the next generation count from 0 again:

    log      0 1 2 ... 89 | 0 1 2 ... 14         of one queue
    files                   0 1 2 ... 14         slot 0 leads to the second 0

A record is of an earlier generation if it lies before all records that the queue lists, and its queue offset is not
below that of the first listed one. A log of one generation has no such record, since offsets before the first listed
one are smaller. So a lost unit, or one that leads elsewhere, is still missed.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt

from mqstore.files.segments import SegmentRun
from mqstore.layout.consumequeue import is_void
from mqstore.layout.record import Checksum
from mqstore.log.consumequeue import ConsumeQueue
from mqstore.log.recovery.scanner import record_at

__all__ = ["TopicGenerations"]

_TRIED = 64
"""Maximum number of units to examine in search of one that leads to its record. Some may be damaged."""
_NONE = 0, -1


class TopicGenerations:
    """Classifies records by topic generation: the current one or an earlier one.
    The answer for a queue rests on its files as they were when they were first asked for."""

    def __init__(self, run: SegmentRun, checksum: Checksum) -> None:
        self._run = run
        self._checksum = checksum
        self._begins: dict[ConsumeQueue, tuple[int, int]] = {}
        self._listed: dict[ConsumeQueue, int] = {}
        """Physical offset from which on all records are of the current generation."""

    def current(
        self, queue: ConsumeQueue, offsets: npt.NDArray[np.int64], physical: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_] | None:
        """Return a mask of a queue's records of the current generation, or None if all are.
        `offsets` are their queue offsets, `physical` their physical offsets, ascending."""
        slot, place = self._begin(queue, int(offsets[0]), int(physical[0]))
        if place < 0:
            return None
        kept: npt.NDArray[np.bool_] = (physical >= place) | (offsets < slot)
        return None if kept.all() else kept

    def may_be_older(self, queue: ConsumeQueue, offset: int, physical: int) -> bool:
        """Return True if records of a queue from this one on may be of an earlier generation."""
        return self._begin(queue, offset, physical)[1] >= 0

    def are_older(self, queue: ConsumeQueue, least: int, physical: int, end: int) -> bool:
        """Return True if all records of a queue in `[physical, end)` are of an earlier generation.
        `least` is the smallest of their queue offsets."""
        slot, place = self._begin(queue, least, physical)
        return end <= place and least >= slot

    def leads_to_record(self, queue: ConsumeQueue, slot: int, physical: int) -> bool:
        """Return True if the record at a physical offset verifies and is that of a slot."""
        record = record_at(self._run, physical, self._checksum)
        if record is None:
            return False
        return (record.topic, record.queue_id, record.queue_offset) == (queue.topic, queue.queue_id, slot)

    def _begin(self, queue: ConsumeQueue, offset: int, physical: int) -> tuple[int, int]:
        """Return the slot and the physical offset that delimit the earlier generations of a queue.
        Their records have at least that slot and lie before that offset. Returns (0, -1) if the record `offset` at
        `physical`, and all behind it, are of the current generation."""
        if physical >= self._listed.get(queue, 1 << 62):
            return _NONE
        begin = self._begins.get(queue)
        if begin is None:
            if self._is_behind_one_listed(queue, offset, physical):
                self._listed[queue] = physical
                return _NONE
            begin = self._begins[queue] = self._first_listed(queue)
        return begin if physical < begin[1] else _NONE

    @staticmethod
    def _is_behind_one_listed(queue: ConsumeQueue, offset: int, physical: int) -> bool:
        """Return True if a unit shows that a record is listed, or lies behind a listed record."""
        if not queue.max_offset:
            return False
        unit = queue.units(max(0, min(offset, queue.max_offset - 1)), 1)
        return bool(unit["size"][0] > 0 and unit["physical_offset"][0] <= physical and not is_void(unit)[0])

    def _first_listed(self, queue: ConsumeQueue) -> tuple[int, int]:
        """Return the first slot whose unit leads to its record, and the least physical offset so far.
        The latter is the least of all units up to that slot. Returns (0, -1) if there is no such slot."""
        tried, place = 0, 1 << 62
        first, end = queue.first_offset(), queue.max_offset
        near = min(first + _TRIED, end)  # mostly enough, and much less than a whole file
        for at, units in chain(queue.held(first, near), queue.held(near, end)):
            for i in np.flatnonzero((units["size"] > 0) & ~is_void(units))[: _TRIED - tried].tolist():
                physical = int(units["physical_offset"][i])
                place = min(place, physical)
                if self.leads_to_record(queue, at + i, physical):
                    return at + i, place
                tried += 1
            if tried == _TRIED:
                break
        return _NONE
