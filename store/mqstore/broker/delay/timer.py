"""Arbitrary delay: messages that wait for any time, on a timer wheel (delivery#timer).

    put (`route.py`)      -> rmq_sys_wheel_timer, queue 0 --place-> slot of the wheel --read-> REAL_TOPIC, REAL_QID
                                      ^                                      |
                                      +--- rolled: half way, or early -------+

One step (`run_once`) does, in this order, a bounded amount of

    place    each new message of the timer topic gets a unit in the timer log, chained to the others of the slot in
             which it is due or rolled (`timerunits.py`)
    read     each started slot, oldest first, after all new messages are placed. Its units are handled at their due
             times (`SlotReading`): skipped if cancelled, put to their real queues, or rolled, which means put to the
             timer topic again (`timermessages.py`)
    flush    every second: commitlog, timer log, checkpoint. Also at the end of each step until the timer has caught up
             after opening, and after messages were relocated. So a process that crashes within each second repeats a
             message once, not each time

Each message costs one unit and one slot when it is placed, and one record and two reads of its unit when its slot is
read. Waiting messages need no memory, except eight bytes for each message of the slot being read. A recall finds its
records by the index, and their units by counting from the end, because the log is in the order of the topic's queue
(`TimerLog.find`).

Never early: a unit is handled when the wall clock has reached its due time, and the record's due time is checked before
delivery. If the clock is set back by more than a few seconds, waiting messages are placed again, and are not late
(`_turn_back`).

Never lost (delivery#timer-crash): after a crash everything since the checkpoint is done again, in the same order.
Missing or damaged files are rebuilt from the timer topic's queue: `placement` shows for each message, and each rolled
copy, whether it was done by then. Retention keeps the oldest waiting record (`pins`).

Relocated (`roll`): waiting messages in an otherwise dead part of the log are put to the timer topic again, unchanged.
Those relocated after the checkpoint are delivered twice after a crash. If the files must be rebuilt, so are those whose
first record is not deleted yet.

A cancellation is a message for the same slot, and covers its messages that are not delivered yet. A recall that
returned True is final: it is refused once its message is due, and all new messages are placed before any slot is read.
Messages overdue before they could be placed are put in the slot being read, or in the next one.

The class is long because placing, delivering, rolling and saving move one progress under one lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from mqstore.broker.background.context import Parts
from mqstore.broker.background.retention import physical_of
from mqstore.broker.background.service import Pin, Wake
from mqstore.broker.delay.route import PRECISION_MS, due_of, number, placement, slot_of
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
from mqstore.broker.delay.timerqueries import TimerQueries
from mqstore.broker.delay.timerunits import REACH_MS, SlotReading, TimerUnits, unit_times, within
from mqstore.broker.tables.names import TIMER_TOPIC
from mqstore.errors import InvalidMessageError
from mqstore.layout.javahash import tag_hash
from mqstore.layout.properties import REAL_QID, REAL_TOPIC, TIMER_DEL_UNIQKEY, TIMER_OUT_MS
from mqstore.log.message import Message
from mqstore.logger import log as _log
from mqstore.signalsafe import Lock
from mqstore.threads import breathe

_STEP: Final = 1_000
"""Maximum number of messages placed, and of messages read, in one step: ten to seventy milliseconds.
Then other services get their turn."""
_LOOKS: Final = 4_000
"""Number of units of a slot that one step examines before it handles any.
If all of them are cancellations, this takes as long as the rest of a step."""
_FLUSH_MS: Final = 1_000
_PENDING_BYTES: Final = 4 << 20
"""Bytes of units in memory after which a flush does not wait for its time."""
_TURN_MS: Final = 5_000
"""If the clock is set back by less, the timer waits. Messages are then late by less than this."""
_JAVA_MARGIN_MS: Final = 60_000
"""Margin for RocketMQ, which counts from the time of reading, not of storing.
Messages that its log does not have may be delivered twice rather than lost."""


class TimerService(TimerQueries):
    """Timer service. `recall`, `waiting` and `pins` are thread-safe, and the last two never wait."""

    def __init__(self, parts: Parts, wake: Wake) -> None:
        self._parts = parts
        self._store = store = parts.store
        self._wake = wake
        self._messages = TimerMessages(parts)
        self._lock = Lock()
        fs, mode, tmp = parts.fs, parts.config.file_mode, store.path / "tmp"
        size = store.manifest.timerlog_segment_bytes
        self._log = TimerLog(store.path / "timerlog", tmp, size, fs, mode)
        self._units = TimerUnits(self._log, TimerWheel(store.path / "timerwheel", tmp, fs, mode))
        self._check = TimerCheck(store.path / "config" / "timercheck", fs, mode)
        self._begun = False
        """True if there are files. There are none before the first message of the timer topic."""
        self._left: JavaProgress | None = None
        """Progress of a Java broker that is not taken over yet."""
        self._reading: SlotReading | None = None
        self._start(0, 0)
        self._durable: Progress | None = None
        self._dirty_ms: int | None = None
        self._flushes_each_step = True
        """True until overdue messages are delivered after opening, and after messages were relocated."""
        self._pinned: tuple[int | None, int] = (None, 0)
        self._stuck: int | None = None
        """Physical offset of a message that cannot be relocated before it is due."""
        self._load()
        store.on_growth.append(self._grown)

    def _start(self, read_ms: int, queue_offset: int) -> None:
        """Set the state of a timer without units."""
        self._read_ms = read_ms
        self._queue_offset = queue_offset
        self._reading = None
        self._skip_ms = self._skip_until = 0
        """Messages before this offset whose slot is before that time are done, whatever slots were read."""
        self._java: JavaPlaces | None = None
        """Slots in which a Java broker had placed them, if it was the last writer of the store."""
        self._late_offset = self._late_slot_ms = NOWHERE

    # -- the mechanism ----------------------------------------------------------------------------------------------

    def run_once(self, now_ms: int) -> int | None:
        """Do one step (see the module), and return when to call again.
        That is at once, at the next due time, when the next slot with a message begins, or for the next flush. Errors
        of a put or a file are raised, and the next call tries again."""
        with self._lock:
            if self._left is not None:
                self._take_over(self._left)
                self._left = None
            if not self._begun:
                if not self._has_first_messages():
                    return None
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

    def persist(self) -> None:
        with self._lock:
            now_ms = self._parts.clock.now_ms()
            try:
                if self._has_first_messages():
                    # Without files, the next opening would assume that the checkpoint was lost.
                    self._begin(now_ms)
                if self._begun and self._dirty_ms is not None:
                    self._flush(now_ms)
            except TimerFilesDamaged as damage:  # the next opening finds the damage, too, and rebuilds the files
                _log.warning("%s: %s", self._store.path, damage)

    def close(self) -> None:
        with self._lock:
            self._begun = False
            self._units.wheel.close()
            self._log.close()

    def _has_first_messages(self) -> bool:
        """Return True if there are messages, but no files yet."""
        there = self._store.offsets_or_none(TIMER_TOPIC, 0) is not None
        return there and not self._begun and self._left is None

    def pins(self) -> Iterable[Pin]:
        """Yield the oldest waiting message by the files on disk, because a crash falls back to these."""
        physical, queue_offset = self._pinned
        if physical is None:
            bounds = self._store.offsets_or_none(TIMER_TOPIC, 0)
            if bounds is None:
                return
            physical = physical_of(self._store, TIMER_TOPIC, 0, max(queue_offset, bounds[0]))
        if physical is not None:
            rolls, reach = physical != self._stuck, self._parts.router.references.reach
            yield Pin(physical, TIMER_TOPIC, 0, "", "the oldest message that waits for its time", rolls, reach)

    # -- rolled early -----------------------------------------------------------------------------------------------

    def roll(self, physical_offset: int, count: int, now_ms: int) -> int:
        """Relocate messages. See `Roller`. Returns 0 while a message is overdue, because delivery copies it anyway."""
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
        """Relocate the first `count` units. Return how many were handled."""
        positions: list[int] = []
        for found, _ in self._units.old(physical_offset, self._read_ms):
            positions += found[: count - len(positions)].tolist()
            if len(positions) >= count:
                break
        if not positions:
            return 0
        self._touch(now_ms)
        self._flushes_each_step = True
        self._wake()  # for the flush, since the old records pin the log until then
        for rolled, position in enumerate(positions):
            if not self._roll(position):
                return rolled
        return len(positions)

    def _roll(self, position: int) -> bool:
        """Put the message of the unit at `position` to the timer topic again. Return False if that is impossible.
        After success the unit is done. A record that cannot be read is counted, and its unit is done."""
        unit = self._log.unit(position)
        if self._reading is not None and unit.slot_ms == self._reading.slot_ms:
            return False  # due within a second
        self._units.chain(unit.slot_ms)  # raises for damage before the put, else each attempt would put a copy
        try:
            self._messages.put_again(unit)
        except InvalidMessageError as error:  # a limit has changed since it was put
            if self._stuck != unit.physical_offset:
                _log.error("%s: the timer cannot relocate the message at %d, so segments stay until it is due (%s)",
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
        """Return the time of the next unit or slot to read, or None."""
        if self._reading is not None:
            return self._reading.next_ms
        slot_ms = self._units.next_slot(self._read_ms)
        return None if slot_ms is None else slot_ms + 1

    def _grown(self, topic: str, queue_id: int, begin: int, end: int) -> None:
        if topic == TIMER_TOPIC:
            self._wake()

    # -- one step ---------------------------------------------------------------------------------------------------

    def _step(self, now_ms: int) -> bool:
        """Place new messages, then read slots. Return True if there is more to do now."""
        places = reads = _STEP
        looks = _LOOKS
        while True:
            if self._is_clock_back(now_ms):
                self._turn_back(now_ms)
            # All new messages are placed before a slot is read, since one of them may be a cancellation.
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
        """Place up to `count` messages. Return how many, and True if there are more."""
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
                breathe()
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
            self._messages.dead_letter(message, f"{REAL_TOPIC}, {REAL_QID} or {TIMER_OUT_MS} is missing or wrong")
            return
        stored_ms, out_slot_ms = message.store_timestamp_ms, slot_of(out_ms + 1)
        slot_ms, rolls = placement(stored_ms, out_slot_ms)
        if message.offset < self._skip_until:
            done = None if self._java is None else self._java.was_done(message.physical_offset)
            if slot_ms < self._skip_ms if done is None else done:
                return  # it was delivered or rolled before the files were lost
        due_ms = slot_ms + PRECISION_MS if rolls else due_of(properties)
        earliest_ms = self._read_ms + 1 if self._reading is None else self._reading.earliest_ms
        if due_ms < earliest_ms:
            due_ms = earliest_ms
            if slot_ms < self._read_ms:
                # An overdue message must not be rolled past its cancellation, which is late, too, in the same slot.
                rolls = rolls and out_slot_ms > self._read_ms
                self._late_slot_ms = self._read_ms
                if self._late_offset < 0:
                    self._late_offset = message.offset
        magic = WAITS | (ROLLS if rolls else 0) | (CANCELS if TIMER_DEL_UNIQKEY in properties else 0)
        times = unit_times(stored_ms, due_ms)
        unit = TimerUnit(NOWHERE, magic, *times, message.physical_offset, message.size, tag_hash(topic))
        # A message for a slot beyond the wheel (after a long stop, or a clock that was ahead) is rolled from the last
        # slot. It cannot wait to be placed, since a cancellation for the next slot may come after it.
        unit = within(unit, self._read_ms + REACH_MS)
        position = self._units.add(unit)
        if self._reading is not None and unit.slot_ms == self._reading.slot_ms:
            self._reading.add(position, unit, message)

    def _open_slot(self, now_ms: int) -> bool:
        """Start to read the next slot that has started. Return False if none has."""
        slot_ms = self._units.next_slot(self._read_ms)
        if slot_ms is None or slot_ms >= now_ms:
            # The skipped slots were empty, so nothing needs to be saved.
            self._read_ms = max(self._read_ms, slot_of(now_ms))
            return False
        self._read_ms = slot_ms
        self._reading = SlotReading(slot_ms, self._units)
        return True

    def _read_some(self, reading: SlotReading, count: int, now_ms: int) -> int:
        """Handle up to `count` units of the slot being read. Return how many, but at least 1."""
        handled = 0
        while handled < count and (position := reading.next_position(now_ms)) is not None:
            self._touch(now_ms)
            unit = self._log.unit(position)
            cancelled = self._messages.finish(unit, reading.cancelled, now_ms)
            reading.settle()  # only now, so that after an error the unit is handled again
            self._units.done(unit)
            if cancelled:
                reading.cancels[unit.topic_hash] -= self._messages.cancellations
                self._units.cancels[unit.topic_hash] -= self._messages.cancellations
            handled += 1
            breathe()
        if reading.is_over(now_ms):
            self._touch(now_ms)
            self._reading = None
            self._units.slot_done(reading)
            self._read_ms += PRECISION_MS
            if self._late_slot_ms < self._read_ms:
                self._late_offset = self._late_slot_ms = NOWHERE
        return max(1, handled)

    # -- state on disk ----------------------------------------------------------------------------------------------

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
        """Save progress, after syncing the copies in the commitlog and the units in the timer log."""
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
        """Pin the record of the first unit that is not done in the checkpoint."""
        durable = self._durable
        assert durable is not None
        self._pinned = (self._units.settle(durable.read_ms, durable.log_end), durable.queue_offset)

    def _load(self) -> None:
        """Continue from the state of the last run, or rebuild it."""
        found = self._check.load()
        bounds = self._store.offsets_or_none(TIMER_TOPIC, 0)
        if found is None:
            if bounds is not None:
                # Either the last run ended within a second of its first message, or the checkpoint was lost.
                self._rebuild("the checkpoint is missing, so some messages may be delivered again")
            return
        if isinstance(found, JavaProgress):
            self._left = found
            return
        self._read_ms, self._queue_offset = found.read_ms, found.queue_offset
        self._skip_ms, self._skip_until = found.skip_ms, found.skip_until
        self._late_offset = found.late_offset
        try:
            if bounds is None or found.queue_offset > bounds[1]:
                raise TimerFilesDamaged("the commitlog ends before the last placed message in the checkpoint")
            done_ms = self._units.load(found)
            if self._late_offset >= 0:
                self._late_slot_ms = self._units.newest_ms  # an upper bound, since the late message's slot is unknown
            if found.slot_done:
                self._reading = SlotReading(found.read_ms, self._units, found.slot_done, done_ms)
        except TimerFilesDamaged as damage:
            self._rebuild(damage)
            return
        self._begun = True
        self._durable = found
        self._settle()

    def _take_over(self, found: JavaProgress) -> None:
        """Place the messages of a Java broker in new segments after its timer log.
        Its log shows which messages were done, and is removed when all units are on disk. After a crash before that,
        this is done again."""
        _log.warning("%s: timer files of a Java broker are rebuilt from the timer topic", self._store.path)
        java = JavaPlaces(found.read_ms, *self._log.placed_by_java(found.log_end))
        now_ms = self._parts.clock.now_ms()
        try:
            self._begin_again(found.read_ms - _JAVA_MARGIN_MS, found.queue_offset, keep=True)
            self._java = java
            while self._place_some(_STEP, now_ms)[1]:
                if self._log.pending_bytes >= _PENDING_BYTES:
                    self._log.write()
            self._java, self._skip_ms, self._skip_until = None, 0, 0
            self._flush(now_ms)
        except BaseException:
            self._begun = False  # so that the next run repeats all of it
            raise

    def _begin(self, now_ms: int, *, keep: bool = False) -> None:
        """Create the files. `keep` is that of `TimerLog.restart`."""
        self._log.restart(keep=keep)
        self._units.clear()
        self._start(slot_of(now_ms), 0)
        self._begun = True
        self._touch(now_ms)

    def _begin_again(self, skip_ms: int, skip_until: int, *, keep: bool = False) -> None:
        """Create new files, and place the messages of the topic in them, except those that the arguments skip."""
        self._begin(self._parts.clock.now_ms(), keep=keep)
        bounds = self._store.offsets_or_none(TIMER_TOPIC, 0)
        self._queue_offset = bounds[0] if bounds else 0
        self._skip_ms, self._skip_until = skip_ms, skip_until

    def _rebuild(self, why: object) -> None:
        """Rebuild log and wheel: place each message of the timer topic again, except those that were done.

        A message was done if it is before `_queue_offset` and its slot before `_read_ms`. Late ones may not be done, so
        they are placed again. The checkpoint does not change until the next flush, so a crash meanwhile repeats this.
        """
        read_ms, queue_offset = self._read_ms, self._queue_offset
        if queue_offset < self._skip_until:  # an earlier rebuild has not reached its end
            read_ms, queue_offset = self._skip_ms, self._skip_until
        elif self._late_offset >= 0:
            queue_offset = min(queue_offset, self._late_offset)
        _log.warning("%s: rebuilding the timer files from the timer topic (%s)", self._store.path, why)
        self._begin_again(read_ms, queue_offset)
        self._durable = None
        self._pinned = (None, self._queue_offset)

    def _is_clock_back(self, now_ms: int) -> bool:
        """Return True if the wall clock was set back by more than `_TURN_MS`."""
        known = self._reading is None or self._reading.complete
        return known and self._read_ms > slot_of(now_ms) + PRECISION_MS + _TURN_MS

    def _turn_back(self, now_ms: int) -> None:
        """Continue from the present after the wall clock was set back.

        All units that are not done are placed again after the others. Slots that were read stay done, since their
        units are below `TimerUnits.low` afterwards. The cost grows with the number of waiting messages."""
        if self._log.pending_bytes:
            self._flush(now_ms)
        begin_ms = slot_of(now_ms)
        left = None if self._reading is None else self._reading.left()
        count = self._units.place_again(self._read_ms, begin_ms, left)
        _log.warning("%s: the clock was set back by %d s; %d waiting messages are placed again",
                     self._store.path, (self._read_ms - begin_ms) // 1000, count)  # fmt: skip
        self._skip_ms, self._skip_until = self._read_ms, self._queue_offset
        self._read_ms, self._reading = begin_ms, None
        if self._late_offset >= 0:
            self._late_slot_ms = self._units.newest_ms
        self._touch(now_ms)
