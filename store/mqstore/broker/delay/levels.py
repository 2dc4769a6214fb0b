"""Delay levels: messages that wait a fixed time before they reach their topic (delivery#levels).

    put, DELAY = n  ->  SCHEDULE_TOPIC_XXXX, queue n - 1  ->  (due)  ->  REAL_TOPIC, queue REAL_QID

The dispatcher has written the due time into the unit, so this service only reads the head of each level's queue.
Nothing is sorted or kept in memory, and a level costs the same with a million waiting messages. A head that would block
later messages is relocated to the timer topic (delivery#level-delivery).

    a level is   because                             until
    idle         its queue has no more messages      the queue grows
    waiting      its head is not due                 the head's time, to the millisecond
    failing      a copy could not be put             100 ms later, then twice as long each time, at most 10 s

    a message that is due                outcome
    can be restored                      the same body and properties without DELAY, to the end of its real queue
    invalid REAL_TOPIC or REAL_QID       a dead letter of CID_RMQ_SYS_SCHEDULE, with the reason
    belongs to the half topic            skipped
    damaged, or its body's record is     skipped, reported and counted

Messages that wait long are relocated, too, if only such messages still keep old segments. They are at the front of the
queue, and progress passes them. If delivery is late, one may come after messages of the level that were put later.

After opening, until nothing more is due, and after messages were relocated, progress is written at the end of each
step. So a machine that crashes again and again within ten seconds repeats a message once, not each time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import groupby
from operator import itemgetter
from typing import Any

from mqstore import arrays as np
from mqstore.broker.background.context import Parts
from mqstore.broker.background.retention import physical_of
from mqstore.broker.background.service import Pin, Roller, Wake
from mqstore.broker.delay.route import DELAY_PIECE, TOUCHED_NAMES, level_properties, parted, restored_end
from mqstore.broker.redelivery.reason import Reason
from mqstore.broker.tables.configfile import QUICK_MS, ConfigFile, data_version, object_member
from mqstore.broker.tables.names import HALF_TOPIC, SCHEDULE_GROUP, SCHEDULE_TOPIC, TIMER_TOPIC, QueueKey
from mqstore.errors import FormatError, InvalidMessageError
from mqstore.layout.consumequeue import LAST_ADDRESS, is_message
from mqstore.log.message import Message
from mqstore.log.reading.reader import StoreReader
from mqstore.log.writing.outgoing import Copy
from mqstore.logger import log as _log
from mqstore.native import kernel
from mqstore.threads import breathe

_STEP_UNITS = 2048
"""Number of messages in one `run_once`: some ms, after which other services get their turn."""
_BATCH_UNITS = 256
"""Number of messages of one level before the most overdue level is chosen again: half a millisecond."""
_RETRY_MIN_MS, _RETRY_MAX_MS = 100, 10_000
_SAVE_MS = 10_000
_VERSION_STEP = 200
"""Number of deliveries after which RocketMQ increments the version of the file (delivery#tables)."""
_UNKNOWN_LEVEL_MS = 1_000
_LEVEL = re.compile("[1-9][0-9]{0,8}")


def deliver_time_ms(table_ms: Sequence[int], level: int, store_timestamp_ms: int) -> int:
    """Return the due time of a message of `level`. An unknown level waits a second (delivery#level-unit).

    >>> deliver_time_ms((1000, 5000), 2, 1_700_000_000_000), deliver_time_ms((1000, 5000), 999, 0)
    (1700000005000, 1000)
    """
    delay_ms = table_ms[level - 1] if 1 <= level <= len(table_ms) else _UNKNOWN_LEVEL_MS
    return store_timestamp_ms + delay_ms


def overdue_ms(store: StoreReader, level: int, offset: int, now_ms: int) -> int:
    """Return how long the oldest of the next `_BATCH_UNITS` messages of a level is overdue, or 0 if none is."""
    times = store.units(SCHEDULE_TOPIC, level - 1, offset, _BATCH_UNITS)["tags_code"]
    return max(0, now_ms - int(times[times > 0].min(initial=now_ms)))


# -- delivering ------------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Level:
    """Queue of one level. Only `run_once` changes it, except `grown`."""

    number: int
    delay_ms: int | None
    """Delay in the table. 0 if the table has no such level, and None if its messages are due now."""
    offset: int
    """Progress: the next unit to read."""
    saved: int
    """Progress in the file on disk."""
    due_ms: int | None = 0
    """Time of the next read. None means when the queue grows."""
    ahead_ms: int = 0
    """Distance of `due_ms` when it was set. If it is greater now, the clock was set back meanwhile."""
    failures: int = 0
    grown: bool = False
    stuck: int | None = None
    """Offset of a message that cannot be relocated."""

    @property
    def queue_id(self) -> int:
        return self.number - 1

    def ready(self, now_ms: int) -> bool:
        if self.due_ms is None:
            return self.grown
        return not now_ms < self.due_ms <= now_ms + self.ahead_ms


class DelayService(Roller):
    """Service that delivers the messages of the delay levels when they are due.

    A message is never early by the wall clock. It is late if `run_once` is called after the time that it returned.

    `dead_letter(message, group, reason)` stores a dead letter, and must remove DELAY. If the table no longer has a
    level with waiting messages, `orphan_level_policy="deliver_now"` delivers them at once, and "keep" keeps their due
    times. Raises CorruptStoreError if the progress file and its backup are damaged.

    The class is long because delivering, relocating, skipping and saving all move the offset of a level.
    """

    def __init__(self, parts: Parts, wake: Wake, dead_letter: Callable[[Message, str, Reason], object]) -> None:
        self._store = parts.store
        self._router = parts.router
        self._topics = parts.topics
        self._statistics = parts.statistics
        self._clock = parts.clock
        self._wake = wake
        self._dead_letter = dead_letter
        self.errors: dict[int, str] = {}
        """Current error that stops delivery, by level."""
        self._table_ms = self._store.delay_table_ms
        self._reach = parts.router.references.reach
        self._file = ConfigFile(self._store, "delayOffset.json", check_delay_offsets, log_end=self._store.max_offset)
        self._table = object_member(self._file.load() or {}, "offsetTable")
        self._uncounted = 0
        self._save_due_ms: int | None = None
        self._quick_due_ms: int | None = None
        self._saves_each_step = True
        """True until overdue messages are delivered after opening, and after messages were relocated."""
        self._saved_ms = self._clock.now_ms()
        self._levels = {level.queue_id: level for level in self._open(parts.config.orphan_level_policy)}
        # Corrected offsets are written before the queues grow. Otherwise a queue might grow beyond the old offset
        # before the next crash, which would then count as progress.
        self.save(self._clock.now_ms())
        self._store.on_growth.append(self._on_growth)

    # -- opening ----------------------------------------------------------------------------------------------------

    def _open(self, orphan_level_policy: str) -> Iterator[_Level]:
        """Yield the levels to deliver, each from its offset in the file."""
        for number, delay_ms in enumerate(self._table_ms, 1):
            yield self._level(number, delay_ms, self._table.get(str(number), 0))
        for ref in self._store.queues(SCHEDULE_TOPIC) if SCHEDULE_TOPIC in self._store.topics() else ():
            number, high = ref.queue_id + 1, self._store.offsets(*ref)[1]
            offset = min(self._table.get(str(number), 0), high)
            if number > len(self._table_ms) and offset < high:
                at_once = orphan_level_policy == "deliver_now"
                self._warn(
                    f"{high - offset} messages wait in delay level {number}, but the table has {len(self._table_ms)} "
                    f"levels: they are delivered {'at once' if at_once else 'when they are due'}"
                )
                yield self._level(number, None if at_once else 0, offset)

    def _level(self, number: int, delay_ms: int | None, stored: int) -> _Level:
        """Return a level at its stored offset, or its queue's end if lower (delivery#level-progress)."""
        high = (self._store.offsets_or_none(SCHEDULE_TOPIC, number - 1) or (0, 0))[1]
        if stored > high:
            self._warn(f"delay level {number} was at {stored}, but its queue ends at {high}; it continues there")
        return _Level(number, delay_ms, min(stored, high), stored)

    def _warn(self, problem: str) -> None:
        _log.warning("%s: %s", self._store.path, problem)

    # -- looking at it ----------------------------------------------------------------------------------------------

    def progress(self) -> dict[int, tuple[int, int]]:
        """Return (next offset, end of its queue) of each level whose queue ever had a message."""
        found = {}
        for level in self._levels.values():
            bounds = self._store.offsets_or_none(SCHEDULE_TOPIC, level.queue_id)
            if bounds is not None:
                found[level.number] = (min(level.offset, bounds[1]), bounds[1])
        return found

    def waiting(self) -> int:
        return sum(high - offset for offset, high in self.progress().values())

    def overdue_ms(self) -> dict[int, int]:
        """Return level -> ms for which its oldest message is overdue. Levels without such a message are left out."""
        now_ms = self._clock.now_ms()
        late = {level: overdue_ms(self._store, level, at, now_ms) for level, (at, _) in self.progress().items()}
        return {level: late_ms for level, late_ms in late.items() if late_ms}

    def pins(self) -> Iterator[Pin]:
        """Yield the record of the first message of each level that a crash now would redeliver."""
        for level in [*self._levels.values()]:
            low, _ = self._store.offsets_or_none(SCHEDULE_TOPIC, level.queue_id) or (0, 0)
            first = max(low, min(level.saved, level.offset))
            record = physical_of(self._store, SCHEDULE_TOPIC, level.queue_id, first)
            if record is not None:
                why = f"delay level {level.number} is at {level.offset}, on disk at {level.saved}"
                rolls = level.offset != level.stuck
                yield Pin(record, SCHEDULE_TOPIC, level.queue_id, SCHEDULE_GROUP, why, rolls, self._reach)

    # -- delivery ---------------------------------------------------------------------------------------------------

    def _on_growth(self, topic: str, queue_id: int, begin: int, end: int) -> None:
        """Record that a queue grew. Any dispatching thread may call it, even this service's, so it takes no lock.
        It sets `grown` before it reads `due_ms`, and `run_once` sets `due_ms` before it reads `grown`. So one of them
        sees the other's change."""
        if topic != SCHEDULE_TOPIC:
            return
        level = self._levels.get(queue_id)
        if level is not None:
            level.grown = True
            if level.due_ms is None:
                self._wake()

    def run_once(self, now_ms: int) -> int | None:
        """Deliver at most 2048 due messages, the most overdue level first. Return when to call again."""
        heap = [(level.due_ms or 0, level.queue_id) for level in self._levels.values() if level.ready(now_ms)]
        heapify(heap)
        budget = _STEP_UNITS
        while heap and budget > 0:
            level = self._levels[heappop(heap)[1]]
            budget -= max(1, self._step(level, now_ms, min(budget, _BATCH_UNITS)))
            if level.ready(now_ms):
                heappush(heap, (level.due_ms or 0, level.queue_id))
            breathe()
        each_step, self._saves_each_step = self._saves_each_step, False  # a failed save is tried again later
        if self._save_due_ms is not None and (each_step or not now_ms < self._save_due_ms <= now_ms + _SAVE_MS):
            # The times are set first. Otherwise, on a full disk, each call would only try to save.
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
        """Deliver the due messages among up to `count` units of a level. Return how many units were passed.
        Sets the time of the next step."""
        level.due_ms = None
        level.grown = False  # before the queue is read, so that later growth is not missed
        begin = level.offset
        try:
            level.due_ms = self._look(level, now_ms, count)
        except Exception as error:  # an error must neither lose the message nor stop the other levels
            self._fail(level, now_ms, error)
        else:
            level.ahead_ms = 0 if level.due_ms is None else max(0, level.due_ms - now_ms)
            if level.failures:
                level.failures = 0
                self.errors.pop(level.number, None)
        return level.offset - begin

    def _look(self, level: _Level, now_ms: int, count: int) -> int | None:
        """Deliver the due messages among the next `count` units. Return the time of the next step."""
        low, high = self._store.offsets_or_none(SCHEDULE_TOPIC, level.queue_id) or (0, 0)
        if not low <= level.offset <= high:
            self._move_into(level, low, high)
        if level.offset == high:
            return None
        begin = level.offset
        units = self._store.units(SCHEDULE_TOPIC, level.queue_id, begin, count + 1)
        times = self._times(level, units, now_ms)
        due = int(np.append(times[:count] > now_ms, True).argmax())
        # Not from `now_ms`, which may be older than a message that was put meanwhile.
        last_ms = self._clock.now_ms() + (level.delay_ms or 0)
        stop = due + int(np.append(times[due:count] <= last_ms, True).argmax())
        due_ms: dict[int, int] = dict(enumerate(times[: stop + 1].tolist(), begin))
        self._deliver(level, begin + due, due_ms)
        while level.offset < begin + stop:
            try:
                self._relocate(level, begin + stop, due_ms)
            except InvalidMessageError:  # too large with the timer's properties: deliver it now, as RocketMQ does
                self._deliver(level, level.offset + 1, due_ms)
        return due_ms.get(begin + stop, now_ms)

    def _times(self, level: _Level, units: np.NDArray[np.void], now_ms: int) -> np.NDArray[np.int64]:
        """Return the due times of the messages of `units`, which the units usually have."""
        times = units["tags_code"].astype(np.int64)
        if level.delay_ms is None:
            return np.minimum(times, now_ms)
        for i in np.flatnonzero(times <= LAST_ADDRESS).tolist():
            for message in self._store.get(SCHEDULE_TOPIC, level.queue_id, level.offset + i, 1).messages:
                if message.offset == level.offset + i:
                    times[i] = deliver_time_ms(self._table_ms, level.number, message.store_timestamp_ms)
        return times

    # -- rolling ----------------------------------------------------------------------------------------------------

    def waiting_below(self, physical_offset: int) -> Iterator[tuple[np.NDArray[np.int64], np.NDArray[np.int64]]]:
        """Yield the waiting messages with records below `physical_offset`. See `Roller`."""
        for level in self._levels.values():
            offset = level.offset
            while len(units := self._store.units(SCHEDULE_TOPIC, level.queue_id, offset, _BATCH_UNITS)):
                messages = units[is_message(units)]
                old = messages[messages["physical_offset"] < physical_offset]
                yield old["physical_offset"].astype(np.int64), old["size"].astype(np.int64)
                if len(old) < len(messages):
                    break
                offset += len(units)

    def roll(self, physical_offset: int, count: int, now_ms: int) -> int:
        """Relocate messages. See `Roller`. A level whose head is due is skipped, because delivery copies it anyway."""
        done = 0
        for level in self._levels.values():
            if done < count:
                done += self._roll(level, physical_offset, min(count - done, _BATCH_UNITS), now_ms)
        return done

    def _roll(self, level: _Level, physical_offset: int, count: int, now_ms: int) -> int:
        """Relocate up to `count` messages of a level to the timer topic. Return the number of units passed."""
        begin = level.offset
        units = self._store.units(SCHEDULE_TOPIC, level.queue_id, begin, count)
        messages = is_message(units)
        times = self._times(level, units, now_ms)
        stops = np.flatnonzero(messages & ((units["physical_offset"] >= physical_offset) | (times <= now_ms)))
        old = np.flatnonzero(messages[: stops[0] if len(stops) else None])
        if not len(old):
            return 0
        end = begin + int(old[-1]) + 1
        try:
            self._relocate(level, end, dict(enumerate(times.tolist(), begin)))
        except InvalidMessageError as error:  # too large with the timer's properties
            if level.stuck != level.offset:
                _log.error("%s: the message at %d of delay level %d cannot be relocated, so segments are kept until it "
                           "is due (%s)", self._store.path, level.offset, level.number, error)  # fmt: skip
            level.stuck = level.offset
        finally:
            if level.offset > begin:
                self._wake()  # to save progress
        return level.offset - begin

    def _relocate(self, level: _Level, end: int, times: Mapping[int, int]) -> None:
        """Put the messages of a level up to `end` to the timer topic. `times` has the due time of each offset.
        Raises InvalidMessageError for a message that is too large for it, with progress at that message."""
        self._topics.ensure(TIMER_TOPIC, 1)
        self._saves_each_step = True  # a crash before the save would deliver from both places
        self._deliver(level, end, times, rolled=True)

    # -- dealing with messages --------------------------------------------------------------------------------------

    def _move_into(self, level: _Level, low: int, high: int) -> None:
        """Move a level into the bounds of its queue: retention may have deleted its front, or its end was lost."""
        if level.offset < low:
            lost = low - level.offset
            self._statistics.lost(QueueKey(SCHEDULE_GROUP, SCHEDULE_TOPIC, level.queue_id), lost)
            _log.error("%s: %d messages of delay level %d were deleted before they were due (retention), offsets %d "
                       "to %d", self._store.path, lost, level.number, level.offset, low - 1)  # fmt: skip
            self._advance(level, low)
        elif level.offset > high:
            _log.error("%s: delay level %d was at %d, but its queue ends at %d; it continues there",
                       self._store.path, level.number, level.offset, high)  # fmt: skip
            self._advance(level, high)

    def _deliver(self, level: _Level, end: int, times: Mapping[int, int], *, rolled: bool = False) -> None:
        """Deliver the units of a level up to `end`, or relocate them to the timer topic if `rolled`.
        `times` has the due time of each offset. After an error, progress is at the message that failed."""
        while level.offset < end:
            found = self._store.get(SCHEDULE_TOPIC, level.queue_id, level.offset, end - level.offset)
            if found.status == "OFFSET_TOO_SMALL":  # retention ran in between
                self._move_into(level, found.min_offset, found.max_offset)
                continue
            # A read returns later messages in place of dangling units, and these may not be due.
            messages = [message for message in found.messages if message.offset < end]
            self._pass_on(level, messages, times, rolled=rolled)
            self._skip(level, min(found.next_offset, end))

    def _fail(self, level: _Level, now_ms: int, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if self.errors.get(level.number) != text:
            _log.error("%s: delay level %d cannot deliver the message at %d (%s); it will be retried",
                       self._store.path, level.number, level.offset, text)  # fmt: skip
            self.errors[level.number] = text
        level.ahead_ms = min(_RETRY_MAX_MS, _RETRY_MIN_MS << min(level.failures, 10))
        level.due_ms = now_ms + level.ahead_ms
        level.failures += 1

    def _pass_on(self, level: _Level, messages: list[Message], times: Mapping[int, int], *, rolled: bool) -> None:
        """Copy each of `messages`, in order, to its real queue, or to the timer topic if `rolled`.
        Progress follows the stored copies."""
        copies: list[Copy] = []
        settled: dict[str, int] = {}
        ways: dict[bytes, tuple[str, int, bytes]] = {}
        at = 0
        while at < len(messages):
            if kernel is not None and ways:  # compiled, for messages that are restored as an earlier one was
                at += kernel.restore(messages, at, DELAY_PIECE, ways, TOUCHED_NAMES, copies)
                if at == len(messages):
                    break
            message = messages[at]
            at += 1
            reason, home, settles = "", None, False
            begin, end = parted(message._encoded_properties)
            try:
                topic, queue_id, rest = restored_end(end)
            except ValueError as error:
                reason = f"a delayed message that cannot be restored: {error}"
            else:
                queues = settled.get(topic)
                if queues is None:
                    queues = settled[topic] = self._router.settled_queues(topic)
                settles = queue_id < queues
                home = queue_id if settles else self._router.target_queue(message, topic, queue_id)
            if home is not None and topic != HALF_TOPIC:
                properties = begin + rest
                if rolled:
                    due_ms = times[message.offset]
                    # The clock may have been ahead when it was put.
                    due_ms = min(due_ms, self._clock.now_ms() + max(0, due_ms - message.store_timestamp_ms))
                    properties = level_properties(properties, level.number, due_ms)
                    topic, home = TIMER_TOPIC, 0
                elif settles:  # independent of sender and time
                    ways[end] = topic, home, rest
                copies.append((message, topic, home, properties))
                continue
            self._copy(level, copies, times, rolled=rolled)
            if reason:
                self._move_to_dead_letters(level, message, reason)
            else:  # the half message was delivered or given up long ago (delivery#level-delivery)
                what = f"to {HALF_TOPIC}" if home is not None else f"to {topic}, which was deleted,"
                _log.warning("%s: the delayed message at %d of level %d belongs %s and is skipped",
                             self._store.path, message.offset, level.number, what)  # fmt: skip
                self._statistics.add("delay_passed_over", str(level.number))
                self._done(level, message)
        self._copy(level, copies, times, rolled=rolled)

    def _copy(self, level: _Level, copies: list[Copy], times: Mapping[int, int], *, rolled: bool) -> None:
        """Put `copies` at the ends of their queues, and clear the list.
        Raises InvalidMessageError for a copy that cannot be `rolled`, since the message may still be delivered."""
        at = 0
        while at < len(copies):
            try:
                count = self._router.copy_many(copies[at:] if at else copies)
            except InvalidMessageError as error:  # about the first copy, which stays invalid
                if rolled:
                    raise
                self._move_to_dead_letters(level, copies[at][0], f"a delayed message that cannot be put: {error}")
                at += 1
                continue
            except FormatError as error:
                self._lose(level, copies[at][0], error)
                at += 1
                continue
            if rolled:
                self._statistics.add("delay_rolled", str(level.number), count)
            else:
                self._count_latency(copies[at : at + count], times)
            at += count
            last = copies[at - 1][0]
            if last.offset + 1 - level.offset == count:  # no gaps
                self._advance(level, last.offset + 1)
            else:
                for message, *_ in copies[at - count : at]:
                    self._done(level, message)
        copies.clear()

    def _count_latency(self, copies: Sequence[Copy], times: Mapping[int, int]) -> None:
        now_ms = self._clock.now_ms()
        sums: dict[str, list[int]] = {}
        for topic, run in groupby(copies, itemgetter(1)):
            due_ms = [times[copy[0].offset] for copy in run]
            late = sums.setdefault(topic, [0, 0])
            late[0] += sum([now_ms - due for due in due_ms if 0 < due < now_ms])
            late[1] += len(due_ms)
        self._statistics.add_many(("DELAY_LATENCY", topic, late_ms, count) for topic, (late_ms, count) in sums.items())

    def _done(self, level: _Level, message: Message) -> None:
        """Continue after `message`, which is settled."""
        self._skip(level, message.offset)
        self._advance(level, message.offset + 1)

    def _lose(self, level: _Level, message: Message, error: FormatError) -> None:
        """Skip a message whose body is in another, damaged record."""
        _log.error("%s: the message at %d of delay level %d, unique key %s, is damaged and skipped (%s); see "
                   "`mqstore verify`", self._store.path, message.offset, level.number, message.unique_key,
                   error)  # fmt: skip
        self._statistics.add("delay_unreadable", str(level.number))
        self._done(level, message)

    def _move_to_dead_letters(self, level: _Level, message: Message, reason: str) -> None:
        try:
            self._dead_letter(message, SCHEDULE_GROUP, Reason(reason))
        except FormatError as error:
            self._lose(level, message, error)
            return
        self._done(level, message)
        self._statistics.add("delay_dead_letters", str(level.number))
        _log.error("%s: %s (offset %d of level %d), now a dead letter of %s",
                   self._store.path, reason, message.offset, level.number, SCHEDULE_GROUP)  # fmt: skip

    def _skip(self, level: _Level, offset: int) -> None:
        """Continue at `offset`. The messages before it cannot be read."""
        count = offset - level.offset
        if count > 0:
            self._statistics.add("delay_unreadable", str(level.number), count)
            _log.error("%s: %d messages of delay level %d are damaged and skipped, from offset %d on; "
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
        """Write the progress file if it has changed. The log is synced first, so that no message is lost.
        Raises the errors of `flush` and of writing, and then the old file stays."""
        offsets = self._moved()
        if offsets:
            self._file.flush_log()
            self._write(offsets)
            for level, offset in offsets.items():
                level.saved = offset
        self._saved_ms = now_ms
        self._save_due_ms = self._quick_due_ms = None

    def _save_quickly(self, now_ms: int) -> None:
        """Write the progress to the page cache. Raises the errors of `save`."""
        if not self._file.has_saved:
            self.save(now_ms)
            return
        self._write(self._moved(), self._store.max_offset)
        self._quick_due_ms = None

    def _moved(self) -> dict[_Level, int]:
        return {level: level.offset for level in self._levels.values() if level.offset != level.saved}

    def _write(self, offsets: Mapping[_Level, int], quick_log_end: int | None = None) -> None:
        steps, uncounted = divmod(self._uncounted, _VERSION_STEP)
        table = self._table | {str(level.number): offset for level, offset in offsets.items()}
        self._file.save({"offsetTable": table}, steps=steps, quick_log_end=quick_log_end)
        self._table, self._uncounted = table, uncounted

    def persist(self) -> None:
        self.save(self._clock.now_ms())


def check_delay_offsets(value: Mapping[str, Any]) -> None:
    """Raise ValueError if `value` does not have the shape of the progress file."""
    data_version(value)
    for level, offset in object_member(value, "offsetTable").items():
        if type(offset) is not int or offset < 0 or not _LEVEL.fullmatch(level):
            raise ValueError(f"offsetTable: {level!r} has {offset!r:.80}, which is not progress of a level")


def due_counts(
    store: StoreReader, levels: Iterable[tuple[int, int, int, int | None]], timer: Iterable[Any]
) -> dict[str, Any]:
    """Return the number of delayed messages by due time, in at most 501 intervals: the `due` of an inspection.

    `levels` are (queue id, offset, end, due time of the first message in ms), `timer` has due times (ms). A message of
    the timer that is due in more than two days counts at the time at which it is moved on.
    """
    times: list[Any] = [np.asarray(each, np.int64) for each in timer]
    for queue_id, offset, end, known in levels:
        while offset < end and len(units := store.units(SCHEDULE_TOPIC, queue_id, offset, min(1 << 16, end - offset))):
            offset += len(units)
            codes = units["tags_code"].astype(np.int64)
            times.append(np.where(codes > 0, codes, known or 0))  # RocketMQ may store an address here
    due = np.concatenate(times) if times else np.empty(0, np.int64)
    seconds = 1 + (int(due.max()) - int(due.min())) // 500_000 if len(due) else 1
    starts, counts = np.unique(due // (seconds * 1000), return_counts=True)
    rows = zip((starts * seconds * 1000).tolist(), counts.tolist(), strict=True)
    return {"interval_ms": seconds * 1000, "counts": [[*row] for row in rows]}
