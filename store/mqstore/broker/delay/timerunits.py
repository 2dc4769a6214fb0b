"""Units of the timer: all are in the timer log, and the wheel chains the units of each slot.

    unit                 before `low`                     from `low` on
    slot before `read`   done                             done
    slot from `read` on  put again, with another unit     waits

`read` is the first slot that is not read, a field of the timer (`timer.py`). The log is in the order of the timer
topic, so the first units from `low` on keep the oldest segments. `low` moves past units that were put again, and a
chain ends where its next unit is below `low`. Not thread-safe. The timer calls it under its lock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from mqstore import arrays as np
from mqstore.broker.delay.route import PRECISION_MS, Cancellations, slot_of
from mqstore.broker.delay.timercheck import Progress
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
    unit_dtype,
)
from mqstore.log.message import Message

REACH_MS: Final = (7 * 86_400 - 60) * PRECISION_MS
"""Greatest distance of a slot after `read`: half the wheel."""
_LAG_MS: Final = 86_400_000
"""Tolerance at opening for `REACH_MS`. A slot farther ahead means damage, since the checkpoint is a second old."""


class TimerUnits:
    """Log and wheel together. Raises TimerFilesDamaged if one of them is damaged."""

    def __init__(self, log: TimerLog, wheel: TimerWheel) -> None:
        self.log = log
        self.wheel = wheel
        self.low = log.end
        """Every unit before this position is done, or its message was put again."""
        self.waiting: Counter[int] = Counter()
        """Number of waiting units that are not cancellations, by the hash of their topic."""
        self.cancels: Counter[int] = Counter()
        """Number of cancellations whose message waits, by the hash of its topic."""
        self.newest_ms = NOWHERE
        """Latest slot that may have a unit."""
        self._next_ms: int | None = None
        """First unread slot with a unit, or None if it is not known."""

    def clear(self) -> None:
        """Empty the wheel. No unit before the log's end waits afterwards."""
        self.wheel.make(np.empty(0, np.int64), np.empty(0, np.int64))
        self.low = self.log.end
        self.waiting, self.cancels, self.newest_ms, self._next_ms = Counter(), Counter(), NOWHERE, None

    def load(self, progress: Progress) -> int:
        """Load the log up to a checkpoint, and make a wheel of all units that wait.
        Returns the latest due time of `waiting_units`."""
        self.log.load(progress.log_low, progress.log_end)
        self.low = progress.log_low
        positions, units = units_from(self.log, progress.log_low, progress.read_ms)
        slots_ms = slots_of_units(units)
        newest_ms = int(slots_ms.max(initial=NOWHERE))
        if newest_ms > progress.read_ms + REACH_MS + _LAG_MS:
            raise TimerFilesDamaged("timer log: a slot is too far ahead")
        waits, done_ms = waiting_units(units, progress)
        self.wheel.make(slots_ms, positions)
        self.waiting, self.newest_ms, self._next_ms = Counter(units["topic_hash"][waits].tolist()), newest_ms, None
        self.cancels = Counter(units["topic_hash"][units["magic"] & CANCELS != 0].tolist())
        return done_ms

    def add(self, unit: TimerUnit) -> int:
        """Append a unit to the log and to the chain of its slot. Returns its position."""
        slot_ms = unit.slot_ms
        slot = self.wheel.get(slot_ms)
        position = self.log.append(TimerUnit(NOWHERE if slot is None else slot.last, *unit[1:]))
        self.wheel.put(
            slot_ms, Slot(position, position, 1) if slot is None else Slot(slot.first, position, slot.num + 1)
        )
        self.newest_ms = max(self.newest_ms, slot_ms)
        if self._next_ms is not None:
            self._next_ms = min(self._next_ms, slot_ms)
        (self.cancels if unit.magic & CANCELS else self.waiting)[unit.topic_hash] += 1
        return position

    def next_slot(self, read_ms: int) -> int | None:
        """Return the first slot from `read_ms` on with a unit, or None."""
        if self._next_ms is None and self.newest_ms >= read_ms:
            self._next_ms = self.wheel.first(read_ms, self.newest_ms + PRECISION_MS)
            if self._next_ms is None:
                if self.waiting.total():
                    raise TimerFilesDamaged(f"timer wheel: empty up to {self.newest_ms}")
                self.newest_ms = NOWHERE  # all were put again
        return self._next_ms

    def done(self, unit: TimerUnit) -> None:
        (self.cancels if unit.magic & CANCELS else self.waiting)[unit.topic_hash] -= 1

    def slot_done(self, reading: SlotReading) -> None:
        self.cancels.subtract(reading.cancels)
        self._next_ms = None

    def chain(self, slot_ms: int) -> Slot:
        """Return the chain of a slot. Raises TimerFilesDamaged if it is empty."""
        slot = self.wheel.get(slot_ms)
        if slot is None:
            raise TimerFilesDamaged(f"timer wheel: slot {slot_ms} is empty")
        return slot

    def put_again(self, position: int, unit: TimerUnit) -> None:
        """Move `low` past the first waiting unit, since its message was put again."""
        slot = self.chain(unit.slot_ms)
        self.wheel.put(unit.slot_ms, slot._replace(num=slot.num - 1))
        self.low = position + UNIT_BYTES
        self._next_ms = None
        self.done(unit)

    def of_topics(self, hashes: Sequence[int], physical_offset: int, read_ms: int) -> Iterator[tuple[int, int]]:
        """Yield (position, physical offset) of the waiting units of some topics with records from `physical_offset`
        on. Cancelled ones are included."""
        for positions, units in self.log.units(self.low, physical_offset):
            waits = (slots_of_units(units) >= read_ms) & (units["magic"] & CANCELS == 0)
            waits &= np.isin(units["topic_hash"], hashes)
            yield from zip(positions[waits].tolist(), units["physical_offset"][waits].tolist(), strict=True)

    def old(self, physical_offset: int, read_ms: int) -> Iterator[tuple[np.NDArray[np.int64], np.NDArray[np.void]]]:
        """Yield (positions, units) of the written units that wait and have records below `physical_offset`.
        These are the first from `low` on, since later units have later records."""
        for positions, units in self.log.scan(self.low, max(self.low, self.log.written), verified=False):
            young = np.flatnonzero(units["physical_offset"] >= physical_offset)
            count = int(young[0]) if len(young) else len(units)
            waits = slots_of_units(units[:count]) >= read_ms
            yield positions[:count][waits], units[:count][waits]
            if len(young):
                return

    def settle(self, read_ms: int, end: int) -> int | None:
        """Move `low` over units up to `end` that are done. Return the first waiting record's offset, or None."""
        for positions, units in self.log.scan(self.low, verified=False):
            live = np.flatnonzero(slots_of_units(units) >= read_ms)
            if len(live):
                self.low = int(positions[live[0]])
                return int(units["physical_offset"][live[0]])
        self.low = max(self.low, end)
        return None

    def place_again(self, read_ms: int, begin_ms: int, left: np.NDArray[np.int64] | None) -> int:
        """Append all waiting units again, for reading from `begin_ms`. Return their number.
        The log must be written. `left` are the positions of slot `read_ms` that are not done. None means that all
        wait."""
        positions, units = units_from(self.log, self.low, read_ms)
        live = np.ones(len(units), np.bool_)
        if left is not None:
            in_turn = (slots_of_units(units) == read_ms) & in_order_of_due(units)
            live[in_turn] = np.isin(positions[in_turn], left)
        again = [TimerUnit(*unit[1:8]) for unit in units[live].tolist()]
        self.clear()
        try:
            for unit in again:
                self.add(within(unit, begin_ms + REACH_MS))
        except OSError as error:  # only some are placed, so the files must be rebuilt
            raise TimerFilesDamaged(f"timer wheel: {error}") from error
        return len(again)


def units_from(log: TimerLog, low: int, read_ms: int) -> tuple[np.NDArray[np.int64], np.NDArray[np.void]]:
    """Return (positions, units) from `low` on whose slot is `read_ms` or later. Each is checked.
    The log must be written."""
    found = [(np.empty(0, np.int64), np.empty(0, unit_dtype()))]
    for positions, units in log.scan(low, verified=True):
        live = slots_of_units(units) >= read_ms
        found.append((positions[live], units[live]))
    all_positions, all_units = zip(*found, strict=True)
    return np.concatenate(all_positions), np.concatenate(all_units)


def in_order_of_due(units: np.NDArray[np.void]) -> np.NDArray[np.bool_]:
    """Return a mask of the units that are handled one by one.
    These are all but cancellations that take effect in their slot."""
    mask: np.NDArray[np.bool_] = units["magic"] & (CANCELS | ROLLS) != CANCELS
    return mask


def waiting_units(units: np.NDArray[np.void], progress: Progress) -> tuple[np.NDArray[np.bool_], int]:
    """Return a mask of the `units_from` that wait, and the latest due time of those that are done.
    `progress` decides. Cancellations are not in the mask. The due time is that of units of slot `read_ms`, or 0 if none
    is done. Raises TimerFilesDamaged if the slot has fewer units than are done."""
    waits: np.NDArray[np.bool_] = units["magic"] & CANCELS == 0
    in_turn = np.flatnonzero((slots_of_units(units) == progress.read_ms) & in_order_of_due(units))
    done = in_turn[np.argsort(due_times(units[in_turn]), kind="stable")][: progress.slot_done]
    if len(done) < progress.slot_done:
        raise TimerFilesDamaged(f"timer log: more units of slot {progress.read_ms} are done than it has")
    waits[done] = False
    return waits, int(due_times(units[done]).max(initial=0))


def due_times(units: np.NDArray[np.void]) -> np.NDArray[np.int64]:
    return slots_of_units(units) + 1 + (units["write_ms"].astype(np.int64) - 1) % PRECISION_MS


def within(unit: TimerUnit, last_ms: int) -> TimerUnit:
    """Return `unit`. If its slot is after `last_ms`, where the wheel ends, it is rolled there."""
    if unit.slot_ms <= last_ms:
        return unit
    return TimerUnit(NOWHERE, unit.magic | ROLLS, *unit_times(unit.write_ms, last_ms + PRECISION_MS), *unit[4:])


def unit_times(stored_ms: int, due_ms: int) -> tuple[int, int]:
    """Return writeTime and delay of a unit. Their sum is the slot.
    writeTime has the milliseconds of the due time. The delay has 32 bits."""
    slot_ms = slot_of(due_ms)
    begin_ms = stored_ms // PRECISION_MS * PRECISION_MS
    if abs(slot_ms - begin_ms) >= (1 << 31) - PRECISION_MS:
        begin_ms = slot_ms
    write_ms = begin_ms + due_ms % PRECISION_MS
    return write_ms, slot_ms - write_ms


_POSITION_BITS: Final = 52
_POSITION: Final = (1 << _POSITION_BITS) - 1


class SlotReading:
    """Slot that is being read: its waiting messages, in order of due time.

        examined     from the newest unit of its chain back to the oldest, a bounded number at a time
        complete     all units are in order: by due time, and within a millisecond by place in the log
        handled      the first unit that is due, then the next one. `done` counts them

    A unit that is added meanwhile is put in order, too. Its due time is `earliest_ms` or later, which is after all
    units that are done. So `done` means the same units after a restart.
    """

    def __init__(self, slot_ms: int, units: TimerUnits, done: int = 0, done_ms: int = 0) -> None:
        """The first `done` units by due time are done already. The last of these was due at `done_ms`."""
        self.slot_ms = slot_ms
        self.done = done
        self.earliest_ms = max(slot_ms + 1, done_ms)
        """Earliest due time that a unit may be added with."""
        self.cancelled = Cancellations()
        self.cancels: Counter[int] = Counter()
        """Number of cancellations whose message is not done, by the hash of its topic."""
        self.complete = False
        """True when all units of the chain have been examined."""
        self._units = units
        chain = units.chain(slot_ms)
        self._count, self._next, self._looked = chain.num, chain.last, 0
        self._turns = array("q")
        """Order of all units except cancellations that take effect here.
        An entry is the milliseconds from the slot's start to the due time, with the position in the low bits. Sorted
        when it is complete. An array, because a million `TimerUnit`s would need 300 MB."""

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
            else:
                self._cancel(unit, record(unit))
            self._looked += 1
            self._next = unit.previous
        if self._next < units.low and not self.complete:
            if self._looked != self._count:
                raise TimerFilesDamaged(
                    f"timer wheel: slot {self.slot_ms} has another number of units than its chain, {self._looked}"
                )
            self._turns = array("q", np.sort(np.frombuffer(self._turns, np.int64)).tobytes())
            self.complete = True
        return self._looked - begin

    def add(self, position: int, unit: TimerUnit, message: Message) -> None:
        """Add a unit that was just placed in the slot."""
        if unit.magic & (CANCELS | ROLLS) == CANCELS:
            self._cancel(unit, message)
        elif self.complete:
            insort(self._turns, self._turn(position, unit), self.done)
        else:
            self._turns.append(self._turn(position, unit))

    def _cancel(self, unit: TimerUnit, message: Message | None) -> None:
        self.cancels[unit.topic_hash] += 1
        if message is not None:
            self.cancelled.add(message)

    @property
    def next_ms(self) -> int:
        """Time of the next call: the first due time or the slot's end, or its start if it is not complete."""
        if not self.complete:
            return self.slot_ms
        if self.done == len(self._turns):
            return self.slot_ms + PRECISION_MS
        return self.slot_ms + (self._turns[self.done] >> _POSITION_BITS)

    def next_position(self, now_ms: int) -> int | None:
        """Return the position of the next due unit, or None."""
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

    def left(self) -> np.NDArray[np.int64]:
        """Return the positions of the units that are not done."""
        return np.frombuffer(self._turns, np.int64)[self.done :] & _POSITION

    def _turn(self, position: int, unit: TimerUnit) -> int:
        return (unit.due_ms - self.slot_ms) << _POSITION_BITS | position
