"""The units that wait for their time: each stands in the timer log, and the wheel chains those of one slot.

    unit                 before `low`                     from `low` on
    slot before `read`   done                             done
    slot from `read` on  put again, another stands for it waits

`read` is the first slot that is not read, which the timer knows (`timer.py`). The log is in the order of the timer
topic, so what holds the front of the commitlog are the first units from `low` on; `low` moves over those that were put
again, and a chain ends where it goes on below. Not thread-safe: its owner is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from mqstore.broker.delay.route import PRECISION_MS
from mqstore.broker.delay.timerfiles import (
    CANCELS,
    NOWHERE,
    ROLLS,
    UNIT_BYTES,
    Slot,
    TimerFilesDamaged,
    TimerLog,
    TimerUnit,
    TimerWheel,
    slots_of_units,
)

__all__ = ["REACH_MS", "TimerUnits", "unit_times", "within"]

REACH_MS: Final = (7 * 86_400 - 60) * PRECISION_MS
"""How far beyond `read` a slot may lie: half the wheel."""
_LAG_MS: Final = 86_400_000
"""A slot farther ahead than that, beyond reach, was never placed: the checkpoint is a second old."""


class TimerUnits:
    """Log and wheel as one. Raises TimerFilesDamaged where they do not hold what was written."""

    def __init__(self, log: TimerLog, wheel: TimerWheel) -> None:
        self.log = log
        self.wheel = wheel
        self.low = log.end
        """Every unit before this position is done, or its message was put again."""
        self.waiting = 0
        """Number of units that wait and are no cancellations."""
        self.newest_ms = NOWHERE
        """No unit lies in a later slot than this one."""
        self._next_ms: int | None = None
        """The first slot that is not read and holds a unit, once it was looked for."""

    def clear(self) -> None:
        """An empty wheel: no unit before the log's end waits any more."""
        self.wheel.make(np.empty(0, np.int64), np.empty(0, np.int64))
        self.low = self.log.end
        self.waiting, self.newest_ms, self._next_ms = 0, NOWHERE, None

    def load(self, low: int, end: int, read_ms: int, done: int) -> None:
        """Take up the log from `low` to `end`, and make a wheel of all that waits. The first `done` units of slot
        `read_ms` do not."""
        self.log.load(low, end)
        self.low = low
        slots, positions, waiting, left = [], [], 0, done
        for at, units in self.log.scan(low, verified=True):
            slots_ms = slots_of_units(units)
            live = slots_ms >= read_ms
            slots.append(slots_ms[live])
            positions.append(at[live])
            magic = units["magic"]
            waiting += int(np.count_nonzero(magic[live] & CANCELS == 0))
            over = magic[(slots_ms == read_ms) & (magic & (CANCELS | ROLLS) != CANCELS)][:left]
            left -= len(over)
            waiting -= int(np.count_nonzero(over & CANCELS == 0))
        if left:
            raise TimerFilesDamaged(f"timer log: {done} of {done - left} units of a slot are done")
        none = [np.empty(0, np.int64)]
        all_slots = np.concatenate(slots or none)
        if len(all_slots) and int(all_slots.max()) > read_ms + REACH_MS + _LAG_MS:
            raise TimerFilesDamaged("timer log: slots farther ahead than any is placed")
        self.wheel.make(all_slots, np.concatenate(positions or none))
        self.waiting, self.newest_ms, self._next_ms = waiting, int(all_slots.max(initial=NOWHERE)), None

    def add(self, unit: TimerUnit) -> None:
        """Append a unit to the log and to the chain of its slot."""
        slot_ms = unit.slot_ms
        slot = self.wheel.get(slot_ms)
        position = self.log.append(unit if slot is None else unit._replace(previous=slot.last))
        self.wheel.put(
            slot_ms, Slot(position, position, 1) if slot is None else Slot(slot.first, position, slot.num + 1)
        )
        self.newest_ms = max(self.newest_ms, slot_ms)
        if self._next_ms is not None:
            self._next_ms = min(self._next_ms, slot_ms)
        self.waiting += not unit.magic & CANCELS

    def next_slot(self, read_ms: int) -> int | None:
        """The first slot from `read_ms` on that holds a unit."""
        if self._next_ms is None and self.newest_ms >= read_ms:
            self._next_ms = self.wheel.first(read_ms, self.newest_ms + PRECISION_MS)
            if self._next_ms is None:
                if self.waiting:
                    raise TimerFilesDamaged(f"timer wheel: empty up to {self.newest_ms}")
                self.newest_ms = NOWHERE  # all were put again
        return self._next_ms

    def done(self, unit: TimerUnit) -> None:
        """A unit was dealt with."""
        self.waiting -= not unit.magic & CANCELS

    def slot_done(self) -> None:
        """A slot was read to its end."""
        self._next_ms = None

    def chain(self, slot_ms: int) -> Slot:
        """The units of a slot."""
        slot = self.wheel.get(slot_ms)
        if slot is None:
            raise TimerFilesDamaged(f"timer wheel: slot {slot_ms} holds nothing")
        return slot

    def put_again(self, position: int, unit: TimerUnit) -> None:
        """The message of the first unit that waits was put again: the unit is passed over from now on."""
        slot = self.chain(unit.slot_ms)
        self.wheel.put(unit.slot_ms, slot._replace(num=slot.num - 1))
        self.low = position + UNIT_BYTES
        self._next_ms = None
        self.done(unit)

    def old(self, physical_offset: int, read_ms: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.void]]]:
        """(positions, units) of what waits and has its record below `physical_offset`, as far as it is written. These
        are the first from `low` on: whoever is placed later lies farther on in the commitlog as well."""
        for positions, units in self.log.scan(self.low, max(self.low, self.log.written), verified=False):
            young = np.flatnonzero(units["physical_offset"] >= physical_offset)
            count = int(young[0]) if len(young) else len(units)
            waits = slots_of_units(units[:count]) >= read_ms
            yield positions[:count][waits], units[:count][waits]
            if len(young):
                return

    def settle(self, read_ms: int, end: int) -> int | None:
        """Move `low` over units up to `end` that are done. The physical offset of the first that waits, None: none."""
        for positions, units in self.log.scan(self.low, verified=False):
            live = np.flatnonzero(slots_of_units(units) >= read_ms)
            if len(live):
                self.low = int(positions[live[0]])
                return int(units["physical_offset"][live[0]])
        self.low = max(self.low, end)
        return None

    def place_again(self, read_ms: int, begin_ms: int) -> int:
        """Place all units that wait behind the others, since slots from `begin_ms` on are read again; how many. The log
        must be written."""
        units = []
        for _, found in self.log.scan(self.low, verified=True):
            live = found[slots_of_units(found) >= read_ms]
            units += [TimerUnit(*unit[1:8]) for unit in live.tolist()]
        self.clear()
        try:
            for unit in units:
                self.add(within(unit, begin_ms + REACH_MS))
            self.wheel.write()
        except OSError as error:  # some are placed and some are not
            raise TimerFilesDamaged(f"timer wheel: {error}") from error
        return len(units)


def within(unit: TimerUnit, last_ms: int) -> TimerUnit:
    """`unit` for another chain, rolled on the way if its slot lies beyond `last_ms`: the wheel reaches no farther."""
    slot_ms, magic = unit.slot_ms, unit.magic
    if slot_ms > last_ms:
        slot_ms, magic = last_ms, magic | ROLLS
    return TimerUnit(NOWHERE, magic, *unit_times(unit.write_ms, slot_ms), *unit[4:])


def unit_times(stored_ms: int, slot_ms: int) -> tuple[int, int]:
    """writeTime and delay of a unit: the slot is their sum, and the delay has 32 bits."""
    begin_ms = stored_ms // PRECISION_MS * PRECISION_MS
    return (begin_ms, slot_ms - begin_ms) if 0 <= slot_ms - begin_ms < 1 << 31 else (slot_ms, 0)
