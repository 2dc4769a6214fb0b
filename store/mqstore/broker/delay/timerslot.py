"""The slot that is being read: what waits in it, in the order of due times.

    looked through     from the newest unit of its chain back to the oldest, a bounded number at a time
    complete           each unit has its turn: by its due time, and within a millisecond by its place in the log
    dealt with         the first in the order that is due, then the next one; `done` counts them

A unit that is added meanwhile gets its turn, too. Its due time is `earliest_ms` or later, which puts it behind all that
are done: so `done` names the same units after a restart.

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
    """A slot. Its first `done` units by due time are done already, the last of them at `done_ms`."""

    def __init__(self, slot_ms: int, units: TimerUnits, done: int = 0, done_ms: int = 0) -> None:
        self.slot_ms = slot_ms
        self.done = done
        self.earliest_ms = max(slot_ms + 1, done_ms)
        """Earliest due time that a unit may be added with."""
        self.cancelled = Cancellations()
        self.complete = False
        """True when all units of the chain were looked at."""
        self._units = units
        chain = units.chain(slot_ms)
        self._count, self._next, self._looked = chain.num, chain.last, 0
        self._turns = array("q")
        """Of all units but cancellations that take effect here: milliseconds from the slot's begin to the due time, and
        the position below them. Sorted once it is complete. A million units would fill 300 MB."""

    def look(self, count: int, record: Callable[[TimerUnit], Message | None]) -> int:
        """Look at up to `count` more units, and return how many that was. `record` reads a unit's message."""
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
        """Take up a unit that was placed into the slot just now."""
        if unit.magic & (CANCELS | ROLLS) == CANCELS:
            self.cancelled.add(message)
        elif self.complete:
            insort(self._turns, self._turn(position, unit), self.done)
        else:
            self._turns.append(self._turn(position, unit))

    @property
    def next_ms(self) -> int:
        """When to come next: the first due time, or the end of the slot; at once (the begin) if it is not complete."""
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
        """The unit at `next_position` was dealt with."""
        self.earliest_ms = self.next_ms
        self.done += 1

    def is_over(self, now_ms: int) -> bool:
        """Return True if all of it is done and nothing more can come."""
        return self.complete and self.done == len(self._turns) and self.slot_ms + PRECISION_MS <= now_ms

    def waits(self, position: int, unit: TimerUnit) -> bool:
        """Return True if a unit of this slot is not done. It is complete."""
        turn = self._turn(position, unit)
        at = bisect_left(self._turns, turn, self.done)
        return at < len(self._turns) and self._turns[at] == turn

    def left(self) -> npt.NDArray[np.int64]:
        """Positions of the units that are not done."""
        return np.frombuffer(self._turns, np.int64)[self.done :] & _POSITION

    def _turn(self, position: int, unit: TimerUnit) -> int:
        return (unit.due_ms - self.slot_ms) << _POSITION_BITS | position
