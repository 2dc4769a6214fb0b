"""Slot that is being read: its waiting messages, in order of due time.

    examined     from the newest unit of its chain back to the oldest, a bounded number at a time
    complete     all units are in order: by due time, and within a millisecond by place in the log
    handled      the first unit that is due, then the next one. `done` counts them

A unit that is added meanwhile is put in order, too. Its due time is `earliest_ms` or later, which is behind all units
that are done. So `done` means the same units after a restart.

Not thread-safe: its owner is.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from mqstore.broker.delay.route import PRECISION_MS, Cancellations
from mqstore.broker.delay.timerfiles import CANCELS, ROLLS, TimerFilesDamaged, TimerUnit
from mqstore.broker.delay.timerunits import TimerUnits
from mqstore.log.message import Message

__all__ = ["SlotReading"]

_POSITION_BITS: Final = 52
_POSITION: Final = (1 << _POSITION_BITS) - 1


class SlotReading:
    """Slot. Its first `done` units by due time are done already, the last of them at `done_ms`."""

    def __init__(self, slot_ms: int, units: TimerUnits, done: int = 0, done_ms: int = 0) -> None:
        self.slot_ms = slot_ms
        self.done = done
        self.earliest_ms = max(slot_ms + 1, done_ms)
        """Earliest due time that a unit may be added with."""
        self.cancelled = Cancellations()
        self.complete = False
        """True when all units of the chain have been examined."""
        self._units = units
        chain = units.chain(slot_ms)
        self._count, self._next, self._looked = chain.num, chain.last, 0
        self._turns = array("q")
        """Order of all units except cancellations that take effect here.
        An entry is milliseconds from the slot's begin to the due time, with the position in the low bits. Sorted once
        it is complete. A million `TimerUnit`s would fill 300 MB."""

    def look(self, count: int, record: Callable[[TimerUnit], Message | None]) -> int:
        """Examine up to `count` more units. Return how many. `record` reads the message of a unit."""
        units, begin = self._units, self._looked
        while self._next >= units.low and self._looked - begin < count:  # NOWHERE, or one that was put again
            position = self._next
            unit = units.log.unit(position)
            if unit.slot_ms != self.slot_ms or unit.previous >= position:
                raise TimerFilesDamaged(f"timer log: the chain of slot {self.slot_ms} is broken at {position}")
            if unit.magic & (CANCELS | ROLLS) != CANCELS:
                self._turns.append(self._turn(position, unit))
            elif (message := record(unit)) is not None:
                self.cancelled.add(message)
            self._looked += 1
            self._next = unit.previous
        if self._next < units.low and not self.complete:
            if self._looked != self._count:
                raise TimerFilesDamaged(
                    f"timer wheel: slot {self.slot_ms} does not hold the {self._looked} units of its chain"
                )
            self._turns = array("q", np.sort(np.frombuffer(self._turns, np.int64)).tobytes())
            self.complete = True
        return self._looked - begin

    def add(self, position: int, unit: TimerUnit, message: Message) -> None:
        """Add a unit that was just placed in the slot."""
        if unit.magic & (CANCELS | ROLLS) == CANCELS:
            self.cancelled.add(message)
        elif self.complete:
            insort(self._turns, self._turn(position, unit), self.done)
        else:
            self._turns.append(self._turn(position, unit))

    @property
    def next_ms(self) -> int:
        """Time of the next call: the first due time or the slot's end, or its begin if it is not complete."""
        if not self.complete:
            return self.slot_ms
        if self.done == len(self._turns):
            return self.slot_ms + PRECISION_MS
        return self.slot_ms + (self._turns[self.done] >> _POSITION_BITS)

    def next_position(self, now_ms: int) -> int | None:
        """Position of the unit to deal with now. None if none is due."""
        if self.done == len(self._turns) or self.next_ms > now_ms:
            return None
        return self._turns[self.done] & _POSITION

    def settle(self) -> None:
        """Mark the unit at `next_position` as handled."""
        self.earliest_ms = self.next_ms
        self.done += 1

    def is_over(self, now_ms: int) -> bool:
        """Return True if all units are done and no more can come."""
        return self.complete and self.done == len(self._turns) and self.slot_ms + PRECISION_MS <= now_ms

    def waits(self, position: int, unit: TimerUnit) -> bool:
        """Return True if a unit of this slot is not done. The slot must be complete."""
        turn = self._turn(position, unit)
        at = bisect_left(self._turns, turn, self.done)
        return at < len(self._turns) and self._turns[at] == turn

    def left(self) -> npt.NDArray[np.int64]:
        """Return the positions of the units that are not done."""
        return np.frombuffer(self._turns, np.int64)[self.done :] & _POSITION

    def _turn(self, position: int, unit: TimerUnit) -> int:
        return (unit.due_ms - self.slot_ms) << _POSITION_BITS | position
