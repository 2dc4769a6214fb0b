"""Arbitrary delay: messages that wait for a moment of their own, on a timer wheel (delivery#timer).

    put (`route.py`)      -> rmq_sys_wheel_timer, queue 0 --place-> slot of the wheel --read-> REAL_TOPIC, REAL_QID
                                      ^                                      |
                                      +--- rolled: half way, or early -------+

One step (`run_once`) does, in this order, a bounded amount of

    place    each message that came into the timer topic goes to the slot in which it is due, or is to be rolled: a unit
             in the timer log, chained to the others of its slot (`timerunits.py`)
    read     each slot that has begun, oldest first, once nothing is left to be placed: its chain is looked through,
             then dealt with in the order of due times, each unit at its own (`timerslot.py`): what was cancelled there
             is left out, what is due is put to its real queue, what is to be rolled is put to the timer topic again
             (`timermessages.py`)
    flush    every second: commitlog, timer log, checkpoint; at the end of each step until it has caught up after
             opening, and after messages were rolled early

A message costs one unit and one slot when it is placed, and one record and two looks at its unit when it is read,
however many wait. Nothing is kept in memory for those that wait, but for each of the slot that is being read eight
bytes. Slots without messages are passed over half an hour at a time. A recall asks the index for its records, and finds
their units without a walk through the slot: the log is in the order of the topic's queue, so they are counted off from
its end (`TimerLog.find`).

Never early. A unit is dealt with when the wall clock has reached its due time, and before a message is delivered its
record is asked as well. A clock set back by more than a few seconds is followed: what waits is placed again, and what
comes then is not late (`_turn_back`).

Never lost. The checkpoint says which slots were read and which messages were placed; the commitlog is flushed before
it is written, so that it never rests on copies that a power cut takes. After a crash everything since is done again,
in the same order. At most one second of deliveries is repeated. While catching up, progress is saved after each step:
a process that crashes within each second repeats a message once, not each time. Files that are missing or damaged are
built again from the timer topic's queue: `placement` tells of each message, and of each copy that was rolled, whether
it was done by then. Retention keeps the oldest record that waits (`pins`).

Rolled early (`roll`): what waits where all else in the log is dead is put to the timer topic again, as it is. Units
before `TimerUnits.low` are done by that. A crash falls back to the one of the checkpoint, which is written when the
copies are on disk: what was rolled since comes twice. So does, if the files have to be built again, what was rolled and
its first record not yet deleted.

A cancellation is a message for the same slot, and takes effect for all of it that is not delivered. A recall that
returned True holds: it is refused once its message is due, and nothing is read before all that came into the topic is
placed.

    slots in use     [read, read + 7 days): the wheel holds 14, so none is taken from another. What belongs farther on,
                     as after a long stop what comes then does, is rolled from the last of them
    late             overdue before it could be placed: goes to the slot that is being read, or the next one, and comes
                     at once, behind what was delivered from there

Knows the store, the road and its files; knows nothing of consumers.

Long because placing, delivering, rolling and saving move one progress under one lock; the files have their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from mqstore.broker.delay.route import (
    PRECISION_MS,
    Cancellations,
    copies_of,
    due_of,
    number,
    placement,
    recallable,
    slot_of,
)
from mqstore.broker.delay.timercheck import JavaPlaces, JavaProgress, Progress, TimerCheck
from mqstore.broker.delay.timerfiles import (
    CANCELS,
    NOWHERE,
    ROLLS,
    WAITS,
    TimerFilesDamaged,
    TimerLog,
    TimerUnit,
    TimerWheel,
)
from mqstore.broker.delay.timermessages import TimerMessages
from mqstore.broker.delay.timerslot import SlotReading
from mqstore.broker.delay.timerunits import REACH_MS, TimerUnits, unit_times, within
from mqstore.broker.names import TIMER_TOPIC
from mqstore.broker.parts import Parts, Pin, Wake
from mqstore.broker.pop.receipts import parse_recall_handle
from mqstore.broker.retention import physical_of
from mqstore.errors import InvalidMessageError
from mqstore.layout.javahash import java_hash
from mqstore.layout.properties import (
    REAL_QID,
    REAL_TOPIC,
    TIMER_DEL_UNIQKEY,
    TIMER_OUT_MS,
)
from mqstore.log.message import Message

__all__ = ["TimerService"]

_log = logging.getLogger("mqstore")

_STEP: Final = 1_000
"""Messages placed, and messages read, in one step: some ten milliseconds, then others have their turn."""
_LOOKS: Final = 4_000
"""Units of a slot looked through in one step, before any of it is dealt with: as long, if all of them cancel others."""
_FLUSH_MS: Final = 1_000
_PENDING_BYTES: Final = 4 << 20
"""Units in memory that make a flush worth it before its time."""
_TURN_MS: Final = 5_000
"""A clock set back by less is waited for: what then comes late does so by less than this."""
_JAVA_MARGIN_MS: Final = 60_000
"""RocketMQ places by the time of looking, not of storing: what its log does not tell of is delivered rather twice."""


class TimerService:
    """The mechanism. `recall`, `waiting` and `pins` may be called from any thread; the last two never wait."""

    def __init__(self, parts: Parts, wake: Wake) -> None:
        self._parts = parts
        self._store = store = parts.store
        self._wake = wake
        self._messages = TimerMessages(parts)
        self._lock = threading.RLock()
        fs, mode, tmp = parts.fs, parts.config.file_mode, store.path / "tmp"
        size = store.manifest.timerlog_segment_bytes
        self._log = TimerLog(store.path / "timerlog", tmp, size, fs, mode)
        self._units = TimerUnits(self._log, TimerWheel(store.path / "timerwheel", tmp, fs, mode))
        self._check = TimerCheck(store.path / "config" / "timercheck", fs, mode)
        self._begun = False
        """Whether there are files; until the first message of the timer topic there are none."""
        self._left: JavaProgress | None = None
        """What a Java broker left, and nobody has taken over yet."""
        self._reading: SlotReading | None = None
        self._start(0, 0)
        self._durable: Progress | None = None
        self._dirty_ms: int | None = None
        self._flushes_each_step = True
        """True until all overdue messages are delivered after opening, and after messages were relocated. Saving each
        step keeps a second crash from repeating the same messages."""
        self._pinned: tuple[int | None, int] = (None, 0)
        self._stuck: int | None = None
        """Physical offset of a message that cannot be put again, not being due."""
        self._load()
        store.on_growth.append(self._grown)

    def _start(self, read_ms: int, queue_offset: int) -> None:
        """The state of a timer without units."""
        self._read_ms = read_ms
        self._queue_offset = queue_offset
        self._reading = None
        self._skip_ms = self._skip_until = 0
        """Whatever was read, messages before that offset whose slot lies before that time are done."""
        self._java: JavaPlaces | None = None
        """Which of them a Java broker had placed, and where, when it was the last to have the store."""
        self._late_offset = self._late_slot_ms = NOWHERE

    # -- the mechanism ----------------------------------------------------------------------------------------------

    def run_once(self, now_ms: int) -> int | None:
        """A step, see the module. Returns when there is more to do: at once, at the next due time, when the next slot
        that holds a message has begun, or for the next flush. Errors of a put or a file are raised, nothing is lost: it
        is done again."""
        with self._lock:
            if self._left is not None:
                self._take_over(self._left)
                self._left = None
            if not self._begun:
                if not self._has_first_messages():
                    return None
                self._log.restart()
                self._begin(now_ms)
            try:
                more = self._step(now_ms)
                if self._flush_due(now_ms):
                    self._flush(now_ms)
                self._flushes_each_step &= more
                return now_ms if more else self._next_due()
            except TimerFilesDamaged as damage:
                self._rebuild(damage)
                return now_ms

    def close(self) -> None:
        """Flush, and give the files back."""
        with self._lock:
            is_open = self._grown in self._store.on_growth
            if is_open:
                self._store.on_growth.remove(self._grown)
            now_ms = self._parts.clock.now_ms()
            try:
                if is_open and self._has_first_messages():
                    # Without a checkpoint the next opening would take it for lost.
                    self._log.restart()
                    self._begin(now_ms)
                if self._begun and self._dirty_ms is not None:
                    self._flush(now_ms)
            except TimerFilesDamaged as damage:  # found after all was written; the next opening finds it, too
                _log.warning("%s: %s", self._store.path, damage)
            finally:
                self._begun = False
                self._units.wheel.close()
                self._log.close()

    def _has_first_messages(self) -> bool:
        """Return True if there are messages, and no files yet."""
        there = self._store.offsets_or_none(TIMER_TOPIC, 0) is not None
        return there and not self._begun and self._left is None

    def pins(self) -> Iterable[Pin]:
        """The oldest message that waits, by what is on disk: a crash falls back to that."""
        physical, queue_offset = self._pinned
        if physical is None:
            bounds = self._store.offsets_or_none(TIMER_TOPIC, 0)
            if bounds is None:
                return
            physical = physical_of(self._store, TIMER_TOPIC, 0, max(queue_offset, bounds[0]))
        if physical is not None:
            rolls = physical != self._stuck
            yield Pin(physical, TIMER_TOPIC, 0, "", "the oldest message that waits for its time", rolls)

    def waiting(self) -> int:
        """How many messages wait."""
        low, high = self._store.offsets_or_none(TIMER_TOPIC, 0) or (0, 0)
        not_in_the_wheel_yet = max(0, high - max(low, self._queue_offset))
        return self._units.waiting + not_in_the_wheel_yet

    def recall(self, handle: str) -> bool:
        """Cancel the message of a recall handle. True: it waits no more, and will not be delivered. False: it is
        due or delivered already, or there is none. Raises InvalidReceiptError for what is no handle, and what a put
        does. As durable as a put, by the store's durability."""
        wanted = parse_recall_handle(handle)
        # Under the lock, so that none is delivered between the look at it and the cancellation.
        with self._lock:
            now_ms = self._parts.clock.now_ms()
            copies = copies_of(self._store, wanted)
            waiting = [m for m in recallable(copies, now_ms) if self._waits(m)]
            recalled = Cancellations(copies)
            if not all(map(recalled.cover, waiting)):
                self._messages.cancel(wanted, max(message.born_timestamp_ms for message in waiting))
            return bool(waiting)

    # -- rolled early -----------------------------------------------------------------------------------------------

    def waiting_below(self, physical_offset: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """As `Roller` says; of what is placed and written."""
        offsets, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        with self._lock:
            try:
                for _, units in self._units.old(physical_offset, self._read_ms) if self._begun else ():
                    offsets.append(units["physical_offset"].astype(np.int64))
                    sizes.append(units["record_size"].astype(np.int64))
            except TimerFilesDamaged:
                pass  # whoever reads the slot, or rolls, finds the same
        return np.concatenate(offsets), np.concatenate(sizes)

    def roll(self, physical_offset: int, count: int, now_ms: int) -> int:
        """As `Roller` says. 0 as well while something is overdue: that goes first, and needs no copy."""
        with self._lock:
            try:
                next_ms = self._next_read() if self._begun else None
                if next_ms is None or next_ms <= now_ms:
                    return 0
                return self._roll_some(physical_offset, count, now_ms)
            except TimerFilesDamaged as damage:
                self._rebuild(damage)
                self._wake()
                return 0

    def _roll_some(self, physical_offset: int, count: int, now_ms: int) -> int:
        """How many of the first `count` units were dealt with."""
        positions: list[int] = []
        for found, _ in self._units.old(physical_offset, self._read_ms):
            positions += found[: count - len(positions)].tolist()
            if len(positions) >= count:
                break
        if not positions:
            return 0
        self._touch(now_ms)
        self._flushes_each_step = True
        self._wake()  # for the flush: until then all of this holds the log as it did
        for rolled, position in enumerate(positions):
            if not self._roll(position):
                return rolled
        return len(positions)

    def _roll(self, position: int) -> bool:
        """Put the message of the unit at `position` to the timer topic again, and be done with the unit. False: that
        cannot be. A record that cannot be read is counted, and waits no longer."""
        unit = self._log.unit(position)
        if self._reading is not None and unit.slot_ms == self._reading.slot_ms:
            return False  # it is due within a second
        self._units.chain(unit.slot_ms)  # before the message is put: it is not put again and again
        try:
            self._messages.put_again(unit)
        except InvalidMessageError as error:  # by a limit that has changed since it was put
            if self._stuck != unit.physical_offset:
                _log.error("%s: timer: the message at %d cannot be put again, and holds the log until it is due: %s",
                           self._store.path, unit.physical_offset, error)  # fmt: skip
            self._stuck = unit.physical_offset
            return False
        self._units.put_again(position, unit)
        return True

    def _next_due(self) -> int | None:
        due = [] if self._dirty_ms is None else [self._dirty_ms + _FLUSH_MS]
        if (next_ms := self._next_read()) is not None:
            due.append(next_ms)
        return min(due, default=None)

    def _next_read(self) -> int | None:
        """When there is something to be read next."""
        if self._reading is not None:
            return self._reading.next_ms
        slot_ms = self._units.next_slot(self._read_ms)
        return None if slot_ms is None else slot_ms + 1

    def _waits(self, message: Message) -> bool:
        """Whether a message of the timer topic is neither delivered nor rolled. Where it is placed tells; the time does
        not, for the clock may have been set back."""
        behind = self._queue_offset - message.offset
        if behind <= 0:
            return True
        try:
            # Hardly ever does a message get no unit, so its own is the one counted off from the end.
            found = self._log.find(message.physical_offset, self._units.low, behind)
            if found is None:
                return False
            reading, (position, unit) = self._reading, found
            if reading is None or unit.slot_ms != reading.slot_ms:
                return unit.slot_ms >= self._read_ms
            while not reading.complete:  # after an opening: which units are done shows when all are known
                reading.look(_LOOKS, self._messages.record)
        except TimerFilesDamaged:
            return True  # what is built again from the topic finds the cancellation there
        return reading.waits(position, unit)

    def _grown(self, topic: str, queue_id: int, begin: int, end: int) -> None:
        if topic == TIMER_TOPIC:
            self._wake()

    # -- one step ---------------------------------------------------------------------------------------------------

    def _step(self, now_ms: int) -> bool:
        """Place, then read; whether there is more to do now."""
        places = reads = _STEP
        looks = _LOOKS
        while True:
            if self._is_clock_back(now_ms):
                self._turn_back(now_ms)
            # Nothing is read before all that came is placed: a cancellation may be among it.
            placed, more = self._place_some(places, now_ms)
            places -= placed
            if more:
                return True
            if self._reading is None and not self._open_slot(now_ms):
                return False
            reading = self._reading
            assert reading is not None
            looks -= reading.look(looks, self._messages.record)
            if not reading.complete:
                return True
            reads -= self._read_some(reading, reads, now_ms)
            if self._reading is not None and reading.next_ms > now_ms and not self._is_clock_back(now_ms):
                return False
            if reads <= 0:
                return True

    def _place_some(self, count: int, now_ms: int) -> tuple[int, bool]:
        """Place up to `count` messages; how many, and whether there are more."""
        bounds = self._store.offsets_or_none(TIMER_TOPIC, 0)
        if bounds is None:
            return 0, False
        low, end = bounds
        if self._queue_offset < low:
            self._messages.count(
                "TIMER_LOST", low - self._queue_offset, "messages were deleted before they were placed"
            )
            self._queue_offset = low
        if self._queue_offset >= end:
            return 0, False
        if count <= 0:
            return 0, True
        self._touch(now_ms)
        begin = self._queue_offset
        result = self._store.get(TIMER_TOPIC, 0, begin, min(count, end - begin))
        try:
            for message in result.messages:
                self._place(message)
                self._queue_offset = message.offset + 1
        finally:
            self._units.wheel.write()
        unreadable = result.next_offset - begin - len(result.messages)
        if unreadable > 0:
            self._messages.count("TIMER_UNREADABLE", unreadable, f"damaged, near offset {begin} of {TIMER_TOPIC}")
        self._queue_offset = result.next_offset
        return self._queue_offset - begin, self._queue_offset < end

    def _place(self, message: Message) -> None:
        properties = message.stored_properties()
        topic, out_ms = properties.get(REAL_TOPIC), number(properties.get(TIMER_OUT_MS))
        if not topic or topic == TIMER_TOPIC or out_ms is None or number(properties.get(REAL_QID)) is None:
            self._messages.bury(message, f"{REAL_TOPIC}, {REAL_QID} or {TIMER_OUT_MS} is missing or wrong")
            return
        stored_ms, out_slot_ms = message.store_timestamp_ms, slot_of(out_ms + 1)
        slot_ms, rolls = placement(stored_ms, out_slot_ms)
        if message.offset < self._skip_until:
            done = None if self._java is None else self._java.was_done(message.physical_offset)
            if slot_ms < self._skip_ms if done is None else done:
                return  # delivered, or rolled, before the files were lost
        due_ms = slot_ms + PRECISION_MS if rolls else due_of(properties)
        earliest_ms = self._read_ms + 1 if self._reading is None else self._reading.earliest_ms
        if due_ms < earliest_ms:
            due_ms = earliest_ms
            if slot_ms < self._read_ms:
                # Overdue itself: not rolled past its cancellation, which comes as late, and into the same slot.
                rolls = rolls and out_slot_ms > self._read_ms
                self._late_slot_ms = self._read_ms
                if self._late_offset < 0:
                    self._late_offset = message.offset
        magic = WAITS | (ROLLS if rolls else 0) | (CANCELS if TIMER_DEL_UNIQKEY in properties else 0)
        times = unit_times(stored_ms, due_ms)
        unit = TimerUnit(NOWHERE, magic, *times, message.physical_offset, message.size, java_hash(topic))
        # Beyond reach after a long stop, or when the clock was ahead: rolled from there. It cannot wait for its turn:
        # a cancellation may lie behind it, of what is read next.
        unit = within(unit, self._read_ms + REACH_MS)
        position = self._units.add(unit)
        if self._reading is not None and unit.slot_ms == self._reading.slot_ms:
            self._reading.add(position, unit, message)

    def _open_slot(self, now_ms: int) -> bool:
        """Begin to read the next slot that has begun; whether there is one."""
        slot_ms = self._units.next_slot(self._read_ms)
        if slot_ms is None or slot_ms >= now_ms:
            # Nothing was there, so there is nothing to write down.
            self._read_ms = max(self._read_ms, slot_of(now_ms))
            return False
        self._read_ms = slot_ms
        self._reading = SlotReading(slot_ms, self._units)
        return True

    def _read_some(self, reading: SlotReading, count: int, now_ms: int) -> int:
        """Deal with up to `count` units of the slot that is being read; with how many, at least 1."""
        dealt = 0
        while dealt < count and (position := reading.next_position(now_ms)) is not None:
            self._touch(now_ms)
            unit = self._log.unit(position)
            self._messages.finish(unit, reading.cancelled, now_ms)
            reading.settle()  # only now: an error leaves this one to be done again
            self._units.done(unit)
            dealt += 1
        if reading.is_over(now_ms):
            self._touch(now_ms)
            self._reading = None
            self._units.slot_done()
            self._read_ms += PRECISION_MS
            if self._late_slot_ms < self._read_ms:
                self._late_offset = self._late_slot_ms = NOWHERE
        return max(1, dealt)

    # -- what is on disk --------------------------------------------------------------------------------------------

    def _touch(self, now_ms: int) -> None:
        if self._dirty_ms is None:
            self._dirty_ms = now_ms

    def _flush_due(self, now_ms: int) -> bool:
        dirty_ms = self._dirty_ms
        if dirty_ms is None:
            return False
        is_over = not dirty_ms <= now_ms < dirty_ms + _FLUSH_MS
        return self._flushes_each_step or is_over or self._log.pending_bytes >= _PENDING_BYTES

    def _flush(self, now_ms: int) -> None:
        """Write down what is done. First what it rests on: the copies in the commitlog, the units in the timer log."""
        reading = self._reading
        progress = Progress(
            read_ms=self._read_ms,
            log_end=self._log.end,
            queue_offset=self._queue_offset,
            log_low=self._units.low,
            slot_done=0 if reading is None else reading.done,
            skip_ms=self._skip_ms,
            skip_until=self._skip_until,
            late_offset=self._late_offset,
        )
        self._store.flush()
        self._log.write()
        self._check.save(progress, now_ms)
        self._durable = progress
        self._dirty_ms = None
        self._log.drop_before(progress.log_low)
        self._settle()

    def _settle(self) -> None:
        """Pin the record of the first unit that is not done by the checkpoint."""
        durable = self._durable
        assert durable is not None
        self._pinned = (self._units.settle(durable.read_ms, durable.log_end), durable.queue_offset)

    def _load(self) -> None:
        """Take up the state of the last run, or build it again."""
        found = self._check.load()
        bounds = self._store.offsets_or_none(TIMER_TOPIC, 0)
        if found is None:
            if bounds is not None:
                # The first second of the first timer message; or the checkpoint was lost, which nobody can tell.
                self._rebuild("no checkpoint: all that the log still holds is delivered, perhaps again")
            return
        if isinstance(found, JavaProgress):
            self._left = found
            return
        self._read_ms, self._queue_offset = found.read_ms, found.queue_offset
        self._skip_ms, self._skip_until = found.skip_ms, found.skip_until
        self._late_offset = found.late_offset
        try:
            if bounds is None or found.queue_offset > bounds[1]:
                raise TimerFilesDamaged("the commitlog ends before what the checkpoint says was placed")
            done_ms = self._units.load(found)
            if self._late_offset >= 0:
                self._late_slot_ms = self._units.newest_ms  # which of them is late is forgotten; this is late enough
            if found.slot_done:
                self._reading = SlotReading(found.read_ms, self._units, found.slot_done, done_ms)
        except TimerFilesDamaged as damage:
            self._rebuild(damage)
            return
        self._begun = True
        self._durable = found
        self._settle()

    def _take_over(self, found: JavaProgress) -> None:
        """Place what a Java broker left, behind its log, which tells what it had done and goes only when all of that is
        on disk: whoever dies before does it again."""
        _log.warning("%s: timer files are built again from the timer topic: left by a Java broker", self._store.path)
        java = JavaPlaces(found.read_ms, *self._log.placed_by_java(found.log_end))
        now_ms = self._parts.clock.now_ms()
        try:
            self._log.restart(keep=True)
            self._begin(now_ms)
            bounds = self._store.offsets_or_none(TIMER_TOPIC, 0)
            self._queue_offset = bounds[0] if bounds else 0
            self._java, self._skip_ms, self._skip_until = java, found.read_ms - _JAVA_MARGIN_MS, found.queue_offset
            while self._place_some(_STEP, now_ms)[1]:
                if self._log.pending_bytes >= _PENDING_BYTES:
                    self._log.write()
            self._java, self._skip_ms, self._skip_until = None, 0, 0
            self._flush(now_ms)
        except BaseException:
            self._begun = False  # all of it is done again
            raise

    def _begin(self, now_ms: int) -> None:
        """Make the files; the log was restarted."""
        self._units.clear()
        self._start(slot_of(now_ms), 0)
        self._begun = True
        self._touch(now_ms)

    def _rebuild(self, why: object) -> None:
        """Forget log and wheel, and place every message of the timer topic again but those that were done: those before
        `_queue_offset` whose slot lies before `_read_ms`. Not those that were placed late, and are perhaps not done.

        The checkpoint keeps what it says until the next flush, so a crash meanwhile leads here again."""
        read_ms, queue_offset = self._read_ms, self._queue_offset
        if queue_offset < self._skip_until:  # not the first time, and not done the last time
            read_ms, queue_offset = self._skip_ms, self._skip_until
        elif self._late_offset >= 0:
            queue_offset = min(queue_offset, self._late_offset)
        _log.warning("%s: timer files are built again from the timer topic: %s", self._store.path, why)
        self._log.restart()
        self._begin(self._parts.clock.now_ms())
        bounds = self._store.offsets_or_none(TIMER_TOPIC, 0)
        self._queue_offset = bounds[0] if bounds else 0
        self._skip_ms, self._skip_until = read_ms, queue_offset
        self._durable = None
        self._pinned = (None, self._queue_offset)

    def _is_clock_back(self, now_ms: int) -> bool:
        """Return True if the wall clock was set back by more than is waited for."""
        known = self._reading is None or self._reading.complete
        return known and self._read_ms > slot_of(now_ms) + PRECISION_MS + _TURN_MS

    def _turn_back(self, now_ms: int) -> None:
        """Follow a wall clock that was set back: place again, behind the others, all units that are not done, and read
        on from the present. What was read before stays done, for its units lie below `TimerUnits.low` now.

        Costs as much as wait, once for each time that the clock is set back."""
        if self._log.pending_bytes:
            self._flush(now_ms)
        begin_ms = slot_of(now_ms)
        left = None if self._reading is None else self._reading.left()
        count = self._units.place_again(self._read_ms, begin_ms, left)
        _log.warning("%s: the clock was set back by %d s; %d messages that wait are placed again",
                     self._store.path, (self._read_ms - begin_ms) // 1000, count)  # fmt: skip
        self._skip_ms, self._skip_until = self._read_ms, self._queue_offset
        self._read_ms, self._reading = begin_ms, None
        if self._late_offset >= 0:
            self._late_slot_ms = self._units.newest_ms
        self._touch(now_ms)
