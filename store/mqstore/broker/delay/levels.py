"""Delay levels: messages that wait a fixed time and then go on to where they were sent (delivery#levels).

    put, DELAY = n  ->  SCHEDULE_TOPIC_XXXX, queue n - 1  ->  (due)  ->  REAL_TOPIC, queue REAL_QID

Who puts has rewritten the message, and the dispatcher has written its time of delivery into its unit. What
is left to do is to look at the head of each level's queue. All messages of a level wait equally long, so a queue is in
the order of its times: nothing is sorted, nothing is kept in memory, and a level costs the same with a million waiting.

    a level is   because                             until
    idle         its queue has nothing more          the queue grows
    waiting      its head is not due                 the head's time, to the millisecond
    failing      a copy could not be put             100 ms later, then twice as long each time, at most 10 s

    a message that is due                what is done
    can be restored                      the same body and properties without DELAY, to the end of its real queue
    cannot: REAL_TOPIC, REAL_QID         a dead letter of CID_RMQ_SYS_SCHEDULE, with the reason
    belongs to the half topic            passed over
    does not verify                      passed over, reported and counted

What waits long, where only such messages still hold the log, is rolled: the same is done with it before it is
due, but that it goes to the timer topic, for the rest of its time. The queue of a level is in the order of the log, so
that is its front, and progress tells it from the rest. It comes as if the level had delivered it, at the same time.
Where delivery is late, it may come behind messages of the level that were put after it and not rolled.

Progress, the next unit of each level to look at, is written to `delayOffset.json` every ten seconds and at the end, and
never before the log is on disk as far as it had been written: a progress on disk rests on copies on disk. In between
it is saved quickly (`configfile`), 100 ms after a delivery that was not saved. So `kill -9` repeats at most what was
delivered in that time, a power cut what was delivered in ten seconds, and neither loses anything. Until nothing
more is due after opening, and after messages were rolled, it is written at the end of each step: a machine that crashes
again and again within ten seconds repeats a message once, not each time.

Knows the store's queues, the road and the progress file; knows nothing of consumers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from mqstore.broker.configfile import QUICK_MS, ConfigFile, DataVersion, object_member
from mqstore.broker.delay.route import DELAY_PIECE, TOUCHED_NAMES, level_properties, parted, restored_end
from mqstore.broker.names import HALF_TOPIC, SCHEDULE_GROUP, SCHEDULE_TOPIC, TIMER_TOPIC
from mqstore.broker.parts import Parts, Pin, Wake
from mqstore.errors import InvalidMessageError
from mqstore.layout.consumequeue import LAST_ADDRESS, is_message
from mqstore.log.message import Message
from mqstore.log.outgoing import Copy
from mqstore.native import kernel

__all__ = ["DelayService", "check_delay_offsets", "deliver_time_ms"]

_log = logging.getLogger("mqstore")

_STEP_UNITS = 2048
"""Messages of one `run_once`: some tens of milliseconds, after which other mechanisms get their turn."""
_BATCH_UNITS = 1024
"""Messages of one level before the level that is most behind is chosen anew."""
_RETRY_MIN_MS, _RETRY_MAX_MS = 100, 10_000
_SAVE_MS = 10_000
_VERSION_STEP = 200
"""Deliveries for which RocketMQ counts the file's version up by one (delivery#tables)."""
_UNKNOWN_LEVEL_MS = 1_000
_LEVEL = re.compile("[1-9][0-9]{0,8}")


def deliver_time_ms(table_ms: Sequence[int], level: int, store_timestamp_ms: int) -> int:
    """When a message of `level` is due; a level that the table does not have waits a second (delivery#level-unit).

    >>> deliver_time_ms((1000, 5000), 2, 1_700_000_000_000), deliver_time_ms((1000, 5000), 999, 0)
    (1700000005000, 1000)
    """
    delay_ms = table_ms[level - 1] if 1 <= level <= len(table_ms) else _UNKNOWN_LEVEL_MS
    return store_timestamp_ms + delay_ms


# -- delivering ------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Level:
    """One level's queue. Only `run_once` changes it, but for `grown`."""

    number: int
    delay_ms: int | None
    """Delay by the table; None: the table has no such level, and its messages are due now."""
    offset: int
    """Progress: the next unit to look at."""
    saved: int
    """The same as the file on disk has it."""
    due_ms: int | None = 0
    """When to look next; None: when the queue grows."""
    ahead_ms: int = 0
    """`due_ms` was so far ahead when it was set: farther now means that the clock was set back since."""
    failures: int = 0
    grown: bool = False
    stuck: int | None = None
    """Offset of a message that cannot wait elsewhere."""

    @property
    def queue_id(self) -> int:
        return self.number - 1

    def ready(self, now_ms: int) -> bool:
        if self.due_ms is None:
            return self.grown
        return not now_ms < self.due_ms <= now_ms + self.ahead_ms


class DelayService:
    """Delivers what the delay levels hold, each message when it is due: never early by the wall clock it is given, and
    as late as `run_once` is called after the time it named.

    `dead_letter(message, group, reason)` stores a dead letter; it must leave out DELAY. Where the table no longer has a
    level in which messages wait, `orphan_level_policy="deliver_now"` delivers those at once, "keep" leaves them alone
    until the level is back. Raises CorruptStoreError when the progress file and its backup are damaged.

    Long because delivering, rolling, skipping and saving all move the offset of a level, in the same order.
    """

    def __init__(self, parts: Parts, wake: Wake, dead_letter: Callable[[Message, str, str], object]) -> None:
        self._store = parts.store
        self._road = parts.road
        self._topics = parts.topics
        self._statistics = parts.statistics
        self._clock = parts.clock
        self._wake = wake
        self._dead_letter = dead_letter
        self.errors: dict[int, str] = {}
        """By level: what hinders its delivery right now."""
        self._kept: list[int] = []
        """Levels that the table no longer has, whose messages are kept."""
        self._table_ms = self._store.delay_table_ms
        self._file = ConfigFile(self._store, "delayOffset.json", check_delay_offsets, log_end=self._store.max_offset)
        value = self._file.load() or {}
        self._version = DataVersion.from_json(value.get("dataVersion"))
        self._table = object_member(value, "offsetTable")
        self._uncounted = 0
        self._save_due_ms: int | None = None
        self._quick_due_ms: int | None = None
        self._saves_each_step = True
        """True until all overdue messages are delivered after opening, and after messages were relocated. Saving each
        step keeps a second crash from repeating the same messages."""
        self._saved_ms = self._clock.now_ms()
        self._levels = {level.queue_id: level for level in self._open(parts.config.orphan_level_policy)}
        # What was corrected is written before the queues grow: they may pass the old number before the next crash, and
        # it would then be taken for progress.
        self.save(self._clock.now_ms())
        self._store.on_growth.append(self._on_growth)

    # -- opening ----------------------------------------------------------------------------------------------------

    def _open(self, orphan_level_policy: str) -> Iterator[_Level]:
        """The levels to serve, from where the file says they were left."""
        for number, delay_ms in enumerate(self._table_ms, 1):
            yield self._level(number, delay_ms, self._table.get(str(number), 0))
        for number, high in self._queues_beyond_the_table():
            offset = min(self._table.get(str(number), 0), high)
            if offset < high:
                self._warn(
                    f"{high - offset} messages wait in delay level {number}, but the table has {len(self._table_ms)} "
                    f"levels: they stay until it has that level again, or orphan_level_policy is 'deliver_now'"
                )
                if orphan_level_policy == "deliver_now":
                    yield self._level(number, None, offset)
                else:
                    self._kept.append(number)

    def _level(self, number: int, delay_ms: int | None, stored: int) -> _Level:
        """A level at its stored offset, lowered to where its queue ends: a crash may have taken the end, and its
        numbers are given to the messages that come next, which must not be passed over (delivery#level-progress)."""
        high = (self._store.offsets_or_none(SCHEDULE_TOPIC, number - 1) or (0, 0))[1]
        if stored > high:
            self._warn(f"delay level {number} was at {stored}, but its queue ends at {high}: goes on from there")
        return _Level(number, delay_ms, min(stored, high), stored)

    def _queues_beyond_the_table(self) -> Iterator[tuple[int, int]]:
        """(level, end of its queue) of the schedule queues that no level of the table serves."""
        if SCHEDULE_TOPIC not in self._store.topics():
            return
        for ref in self._store.queues(SCHEDULE_TOPIC):
            if ref.queue_id >= len(self._table_ms):
                yield ref.queue_id + 1, self._store.offsets(*ref)[1]

    def _warn(self, problem: str) -> None:
        _log.warning("%s: %s", self._store.path, problem)

    # -- looking at it ----------------------------------------------------------------------------------------------

    def progress(self) -> dict[int, tuple[int, int]]:
        """(next offset to look at, end of its queue) of each level whose queue has ever held a message."""
        found = {}
        for level in self._levels.values():
            bounds = self._store.offsets_or_none(SCHEDULE_TOPIC, level.queue_id)
            if bounds is not None:
                found[level.number] = (min(level.offset, bounds[1]), bounds[1])
        return found

    def waiting(self) -> int:
        """How many messages wait in all levels; orphans are not among them unless they are delivered."""
        return sum(high - offset for offset, high in self.progress().values())

    def pins(self) -> Iterator[Pin]:
        """The record of the first message of each level that a crash now would deliver again."""
        for level in [*self._levels.values()]:
            record = self._first_record(level.queue_id, min(level.saved, level.offset))
            if record is not None:
                why = f"delay level {level.number} is at {level.offset}, on disk at {level.saved}"
                rolls = level.offset != level.stuck
                yield Pin(record, SCHEDULE_TOPIC, level.queue_id, SCHEDULE_GROUP, why, rolls)
        for number in self._kept:
            record = self._first_record(number - 1, self._table.get(str(number), 0))
            if record is not None:
                why = f"delay level {number} is not in the table, and its messages are kept"
                yield Pin(record, SCHEDULE_TOPIC, number - 1, SCHEDULE_GROUP, why)

    def _first_record(self, queue_id: int, offset: int) -> int | None:
        """Physical offset of the first record of a schedule queue at or behind `offset`."""
        low, high = self._store.offsets_or_none(SCHEDULE_TOPIC, queue_id) or (0, 0)
        offset = max(offset, low)
        while offset < high:
            units = self._store.units(SCHEDULE_TOPIC, queue_id, offset, _BATCH_UNITS)
            messages = np.flatnonzero(is_message(units))
            if len(messages):
                return int(units["physical_offset"][messages[0]])
            offset += max(1, len(units))
        return None

    # -- delivery ---------------------------------------------------------------------------------------------------

    def _on_growth(self, topic: str, queue_id: int, begin: int, end: int) -> None:
        """Called by whoever dispatches, ourselves included, so no lock is taken here. `grown` is set before `due_ms` is
        looked at, `run_once` sets `due_ms` before it looks at `grown`: one of the two sees the other."""
        if topic != SCHEDULE_TOPIC:
            return
        level = self._levels.get(queue_id)
        if level is not None:
            level.grown = True
            if level.due_ms is None:
                self._wake()

    def run_once(self, now_ms: int) -> int | None:
        """Deliver what is due, the level that is most behind first, at most 2048 messages; when to come again."""
        heap = [(level.due_ms or 0, level.queue_id) for level in self._levels.values() if level.ready(now_ms)]
        heapify(heap)
        budget = _STEP_UNITS
        while heap and budget > 0:
            level = self._levels[heappop(heap)[1]]
            budget -= max(1, self._step(level, now_ms, min(budget, _BATCH_UNITS)))
            if level.ready(now_ms):
                heappush(heap, (level.due_ms or 0, level.queue_id))
        each_step, self._saves_each_step = self._saves_each_step, False  # for one that fails is tried again by time
        if self._save_due_ms is not None and (each_step or not now_ms < self._save_due_ms <= now_ms + _SAVE_MS):
            # First: a full disk must not make this the only thing we do.
            self._save_due_ms = self._quick_due_ms = now_ms + _SAVE_MS
            self.save(now_ms)
        elif self._quick_due_ms is not None and not now_ms < self._quick_due_ms <= now_ms + _SAVE_MS:
            self._quick_due_ms = self._save_due_ms
            self._save_quickly(now_ms)
        times = [now_ms if level.ready(now_ms) else level.due_ms for level in self._levels.values()]
        self._saves_each_step |= each_step and now_ms in times
        times += self._save_due_ms, self._quick_due_ms
        return min((time for time in times if time is not None), default=None)

    def _step(self, level: _Level, now_ms: int, count: int) -> int:
        """Look at up to `count` units of a level, deliver those that are due, find out when the next one is. How many
        units that was."""
        level.due_ms = None
        level.grown = False  # before the look: what comes behind it is not missed
        begin = level.offset
        try:
            level.due_ms = self._look(level, now_ms, count)
        except Exception as error:  # whatever it is, the message is not lost by it, and the other levels go on
            self._fail(level, now_ms, error)
        else:
            level.ahead_ms = 0 if level.due_ms is None else max(0, level.due_ms - now_ms)
            if level.failures:
                level.failures = 0
                self.errors.pop(level.number, None)
        return level.offset - begin

    def _look(self, level: _Level, now_ms: int, count: int) -> int | None:
        """When to look again, after delivery of what is due among the next `count` units."""
        low, high = self._store.offsets_or_none(SCHEDULE_TOPIC, level.queue_id) or (0, 0)
        if not low <= level.offset <= high:
            self._move_into(level, low, high)
        if level.offset == high:
            return None
        units = self._store.units(SCHEDULE_TOPIC, level.queue_id, level.offset, count + 1)
        times = self._times(level, units, now_ms)
        undue = np.flatnonzero(times > now_ms)
        due = min(int(undue[0]) if len(undue) else len(times), count)
        if due:
            self._deliver(level, level.offset + due, dict(enumerate(times[:due].tolist(), level.offset)))
        return int(times[due]) if due < len(times) else now_ms

    def _times(self, level: _Level, units: npt.NDArray[np.void], now_ms: int) -> npt.NDArray[np.int64]:
        """Return when the messages of `units` are due: at the time in their unit, whatever the clock does.

        A message that was stored while its level had a longer delay is due now. Its record tells it from a
        message that only looks too far ahead because the clock was set back.
        """
        times = units["tags_code"].astype(np.int64)
        if level.delay_ms is None:
            times[times > now_ms] = now_ms
            return times
        for i in np.flatnonzero((times <= LAST_ADDRESS) | (times > now_ms + level.delay_ms)).tolist():
            for message in self._store.get(SCHEDULE_TOPIC, level.queue_id, level.offset + i, 1).messages:
                if message.offset == level.offset + i:
                    due_ms = deliver_time_ms(self._table_ms, level.number, message.store_timestamp_ms)
                    if times[i] <= LAST_ADDRESS:
                        times[i] = due_ms
                    elif due_ms < times[i]:
                        times[i] = now_ms
        return times

    # -- rolling ----------------------------------------------------------------------------------------------------

    def waiting_below(self, physical_offset: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """As `Roller` says."""
        offsets, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for level in self._levels.values():
            offset = level.offset
            while len(units := self._store.units(SCHEDULE_TOPIC, level.queue_id, offset, _BATCH_UNITS)):
                messages = units[is_message(units)]
                old = messages["physical_offset"] < physical_offset
                offsets.append(messages["physical_offset"][old].astype(np.int64))
                sizes.append(messages["size"][old].astype(np.int64))
                if not old.all():
                    break
                offset += len(units)
        return np.concatenate(offsets), np.concatenate(sizes)

    def roll(self, physical_offset: int, count: int, now_ms: int) -> int:
        """As `Roller` says. A level whose head is due is left alone: that is delivered, and needs no other copy."""
        done = 0
        for level in self._levels.values():
            if done < count:
                done += self._roll(level, physical_offset, min(count - done, _BATCH_UNITS), now_ms)
        return done

    def _roll(self, level: _Level, physical_offset: int, count: int, now_ms: int) -> int:
        """Let up to `count` messages of a level wait in the timer topic; how many units were passed."""
        begin = level.offset
        units = self._store.units(SCHEDULE_TOPIC, level.queue_id, begin, count)
        messages = is_message(units)
        times = self._times(level, units, now_ms)
        stops = np.flatnonzero(messages & ((units["physical_offset"] >= physical_offset) | (times <= now_ms)))
        old = np.flatnonzero(messages[: stops[0] if len(stops) else None])
        if not len(old):
            return 0
        end = begin + int(old[-1]) + 1
        self._topics.ensure(TIMER_TOPIC, 1)
        try:
            self._deliver(level, end, dict(enumerate(times.tolist(), begin)), rolled=True)
        except InvalidMessageError as error:  # with what the timer needs it is too large
            if level.stuck != level.offset:
                _log.error("%s: the message at %d of delay level %d cannot be put again, and holds the log until it is "
                           "due: %s", self._store.path, level.offset, level.number, error)  # fmt: skip
            level.stuck = level.offset
        finally:
            if level.offset > begin:
                self._saves_each_step = True
                self._wake()  # there is progress to be saved
        return level.offset - begin

    # -- dealing with messages --------------------------------------------------------------------------------------

    def _move_into(self, level: _Level, low: int, high: int) -> None:
        """Retention has taken what was to come next, or the queue ends before it."""
        if level.offset < low:
            lost = low - level.offset
            self._statistics.lost(SCHEDULE_GROUP, SCHEDULE_TOPIC, level.queue_id, lost)
            _log.error("%s: %d messages of delay level %d were deleted before they were due (retention), offsets %d "
                       "to %d", self._store.path, lost, level.number, level.offset, low - 1)  # fmt: skip
            self._advance(level, low)
        elif level.offset > high:
            _log.error("%s: delay level %d was at %d, but its queue ends at %d: goes on from there",
                       self._store.path, level.number, level.offset, high)  # fmt: skip
            self._advance(level, high)

    def _deliver(self, level: _Level, end: int, times: Mapping[int, int], *, rolled: bool = False) -> None:
        """Deliver the units from where the level is up to `end`, to the timer topic those that are `rolled`. `times`:
        offset -> when it is due. Progress stands at what could not be, if it raises."""
        while level.offset < end:
            found = self._store.get(SCHEDULE_TOPIC, level.queue_id, level.offset, end - level.offset)
            if found.status == "OFFSET_TOO_SMALL":  # retention came in between
                self._move_into(level, found.min_offset, found.max_offset)
                continue
            # Behind units that lead nowhere a read takes as many more, which may not be due.
            messages = [message for message in found.messages if message.offset < end]
            self._pass_on(level, messages, times, rolled=rolled)
            self._skip(level, min(found.next_offset, end))

    def _fail(self, level: _Level, now_ms: int, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if self.errors.get(level.number) != text:
            _log.error("%s: delay level %d cannot deliver the message at %d: %s; tried again until it can",
                       self._store.path, level.number, level.offset, text)  # fmt: skip
            self.errors[level.number] = text
        level.ahead_ms = min(_RETRY_MAX_MS, _RETRY_MIN_MS << min(level.failures, 10))
        level.due_ms = now_ms + level.ahead_ms
        level.failures += 1

    def _pass_on(self, level: _Level, messages: list[Message], times: Mapping[int, int], *, rolled: bool) -> None:
        """Send each of `messages`, in order, to where it belongs, those that are `rolled` to where they wait on;
        progress follows what was stored."""
        copies: list[Copy] = []
        settled: dict[str, int] = {}
        ways: dict[bytes, tuple[str, int, bytes]] = {}
        at = 0
        while at < len(messages):
            if kernel is not None and ways:  # the same, for those that are restored as one before them was
                at += kernel.restore(messages, at, DELAY_PIECE, ways, TOUCHED_NAMES, copies)
                if at == len(messages):
                    break
            message = messages[at]
            at += 1
            reason, home, settles = "", None, False
            begin, end = parted(message.encoded_properties)
            try:
                topic, queue_id, rest = restored_end(end)
            except ValueError as error:
                reason = f"a delayed message that cannot be restored: {error}"
            else:
                queues = settled.get(topic)
                if queues is None:
                    queues = settled[topic] = self._road.settled_queues(topic)
                settles = queue_id < queues
                home = queue_id if settles else self._road.home(message, topic, queue_id)
            if home is not None and topic != HALF_TOPIC:
                properties = begin + rest
                if rolled:
                    properties = level_properties(properties, level.number, times[message.offset])
                    topic, home = TIMER_TOPIC, 0
                elif settles:  # whoever sent it, and when
                    ways[end] = topic, home, rest
                copies.append((message, topic, home, properties))
                continue
            self._copy(level, copies, times, rolled=rolled)
            if reason:
                self._bury(level, message, reason)
            else:  # the half message was delivered or given up long ago (delivery#level-delivery)
                what = f"to {HALF_TOPIC}" if home is not None else f"to {topic}, which was deleted since,"
                _log.warning("%s: the delayed message at %d of level %d belongs %s and is passed over",
                             self._store.path, message.offset, level.number, what)  # fmt: skip
                self._statistics.add("delay_passed_over", str(level.number))
                self._done(level, message)
        self._copy(level, copies, times, rolled=rolled)

    def _copy(self, level: _Level, copies: list[Copy], times: Mapping[int, int], *, rolled: bool) -> None:
        """Put `copies` at the ends of their queues, and forget them. Raises InvalidMessageError for what is `rolled`:
        it may well be delivered."""
        at = 0
        while at < len(copies):
            try:
                count = self._road.copy_many(copies[at:] if at else copies)
            except InvalidMessageError as error:  # of the first, which no later attempt makes valid
                if rolled:
                    raise
                self._bury(level, copies[at][0], f"a delayed message that cannot be put: {error}")
                at += 1
                continue
            if rolled:
                self._statistics.add("delay_rolled", str(level.number), count)
            else:
                self._tell_late(copies[at : at + count], times)
            at += count
            last = copies[at - 1][0]
            if last.offset + 1 - level.offset == count:  # no gaps
                self._advance(level, last.offset + 1)
            else:
                for message, *_ in copies[at - count : at]:
                    self._done(level, message)
        copies.clear()

    def _tell_late(self, copies: Sequence[Copy], times: Mapping[int, int]) -> None:
        """Count how late these were delivered."""
        now_ms = self._clock.now_ms()
        sums: dict[str, list[int]] = {}
        for topic, run in groupby(copies, itemgetter(1)):
            due_ms = [times[copy[0].offset] for copy in run]
            late = sums.setdefault(topic, [0, 0])
            late[0] += sum([now_ms - due for due in due_ms if 0 < due < now_ms])
            late[1] += len(due_ms)
        self._statistics.add_many(("DELAY_LATENCY", topic, late_ms, count) for topic, (late_ms, count) in sums.items())

    def _done(self, level: _Level, message: Message) -> None:
        """Go on behind `message`, which was dealt with."""
        self._skip(level, message.offset)
        self._advance(level, message.offset + 1)

    def _bury(self, level: _Level, message: Message, reason: str) -> None:
        self._dead_letter(message, SCHEDULE_GROUP, reason)
        self._done(level, message)
        self._statistics.add("delay_dead_letters", str(level.number))
        _log.error("%s: %s (offset %d of level %d): dead letter of %s",
                   self._store.path, reason, message.offset, level.number, SCHEDULE_GROUP)  # fmt: skip

    def _skip(self, level: _Level, offset: int) -> None:
        """Go on at `offset`: what lies before it cannot be read."""
        count = offset - level.offset
        if count > 0:
            self._statistics.add("delay_unreadable", str(level.number), count)
            _log.error("%s: %d messages of delay level %d are damaged and passed over, from offset %d on; "
                       "see `mqstore verify`", self._store.path, count, level.number, level.offset)  # fmt: skip
            self._advance(level, offset)

    def _advance(self, level: _Level, offset: int) -> None:
        self._uncounted += max(0, offset - level.offset)
        level.offset = offset
        if self._save_due_ms is None:
            self._save_due_ms = self._saved_ms + _SAVE_MS
        if self._quick_due_ms is None:
            self._quick_due_ms = self._clock.now_ms() + QUICK_MS

    # -- progress on disk -------------------------------------------------------------------------------------------

    def save(self, now_ms: int) -> None:
        """Write the progress file if it has changed, after the log is on disk as far as it counts. Raises what `flush`
        and writing raise; the old file then stays."""
        offsets = self._moved()
        if offsets:
            self._file.flush_log()
            self._write(offsets, now_ms)
            for level, offset in offsets.items():
                level.saved = offset
        self._saved_ms = now_ms
        self._save_due_ms = self._quick_due_ms = None

    def _save_quickly(self, now_ms: int) -> None:
        """Have the progress with the kernel. Raises as `save`."""
        if not self._file.has_saved:
            self.save(now_ms)
            return
        self._write(self._moved(), now_ms, self._store.max_offset)
        self._quick_due_ms = None

    def _moved(self) -> dict[_Level, int]:
        """Progress of the levels that has changed since the last synced save."""
        return {level: level.offset for level in self._levels.values() if level.offset != level.saved}

    def _write(self, offsets: Mapping[_Level, int], now_ms: int, quick_log_end: int | None = None) -> None:
        steps, self._uncounted = divmod(self._uncounted, _VERSION_STEP)
        if steps:
            self._version = self._version.next(now_ms, steps)
        table = self._table | {str(level.number): offset for level, offset in offsets.items()}
        value = {"dataVersion": self._version.as_json(), "offsetTable": table}
        self._file.save(value, quick_log_end=quick_log_end)
        self._table = table

    def close(self) -> None:
        """Write the progress."""
        self._store.on_growth.remove(self._on_growth)
        self.save(self._clock.now_ms())


def check_delay_offsets(value: Mapping[str, Any]) -> None:
    """ValueError unless `value` has the shape of the progress file."""
    DataVersion.from_json(object_member(value, "dataVersion"))
    for level, offset in object_member(value, "offsetTable").items():
        if type(offset) is not int or offset < 0 or not _LEVEL.fullmatch(level):
            raise ValueError(f"offsetTable: {level!r} has {offset!r:.80}, which is not progress of a level")
