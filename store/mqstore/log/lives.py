"""Which records of the log a queue's own files disown: those of a topic that was deleted and made anew.

A Java broker that deletes a topic takes the folders of its queues away; their records stay in the commitlog until
retention takes them. Made anew, its queues count from 0 again:

    log      0 1 2 ... 89 | 0 1 2 ... 14         of one queue
    files                   0 1 2 ... 14         slot 0 leads to the second 0

So a record that lies before all that the queue lists, and bears the number of the first one that it lists or a greater
one, is of an earlier life. In a log of one life there is none: what lies before the first that is listed has a smaller
number. A unit that was lost or leads elsewhere is therefore missed as ever.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt

from mqstore.files.segments import SegmentRun
from mqstore.layout.consumequeue import is_void
from mqstore.layout.record import Checksum
from mqstore.log.consumequeue import ConsumeQueue
from mqstore.log.scanner import record_at

__all__ = ["Lives"]

_TRIED = 64
"""Units that are looked at for one that leads to its record: in front of it there may be damage."""
_NONE = 0, -1


class Lives:
    """Remembers where queues begin, as their files said when they were first asked for."""

    def __init__(self, run: SegmentRun, checksum: Checksum) -> None:
        self._run = run
        self._checksum = checksum
        self._begins: dict[ConsumeQueue, tuple[int, int]] = {}
        self._listed: dict[ConsumeQueue, int] = {}
        """A place from which on all records are of this life."""

    def of_this(
        self, queue: ConsumeQueue, offsets: npt.NDArray[np.int64], physical: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_] | None:
        """Which of a queue's records, of which there are the queue offsets and where they lie, in log order, are of the
        topic that there is now; None for all."""
        slot, place = self._begin(queue, int(offsets[0]), int(physical[0]))
        if place < 0:
            return None
        kept: npt.NDArray[np.bool_] = (physical >= place) | (offsets < slot)
        return None if kept.all() else kept

    def is_in_doubt(self, queue: ConsumeQueue, offset: int, physical: int) -> bool:
        """Whether `of_this` may pass over records of a queue of which the first is this one."""
        return self._begin(queue, offset, physical)[1] >= 0

    def is_over(self, queue: ConsumeQueue, least: int, physical: int, end: int) -> bool:
        """Whether it passes over all records that lie in `[physical, end)`; of their queue offsets none is less than
        `least`."""
        slot, place = self._begin(queue, least, physical)
        return end <= place and least >= slot

    def _begin(self, queue: ConsumeQueue, offset: int, physical: int) -> tuple[int, int]:
        """(slot, physical offset) that a record of an earlier life has at least, and lies before; (0, -1) if the record
        `offset` at `physical`, and all behind it, are of this one."""
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
        """Whether a record is listed, or not yet and lies behind one that is: as a rule, and to be told from a unit."""
        if not queue.max_offset:
            return False
        unit = queue.units(max(0, min(offset, queue.max_offset - 1)), 1)
        return bool(unit["size"][0] > 0 and unit["physical_offset"][0] <= physical and not is_void(unit)[0])

    def _first_listed(self, queue: ConsumeQueue) -> tuple[int, int]:
        """(the first slot whose unit leads to its record, the least physical offset of the units up to that one); (0,
        -1) without one."""
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

    def leads_to_record(self, queue: ConsumeQueue, slot: int, physical: int) -> bool:
        """Return True if the record at a physical offset verifies and is that of a slot."""
        record = record_at(self._run, physical, self._checksum)
        if record is None:
            return False
        return (record.topic, record.queue_id, record.queue_offset) == (queue.topic, queue.queue_id, slot)
