"""Messages that wait in the timer: how many, which, and their cancellation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from mqstore import arrays as np
from mqstore.broker.background.context import Parts, messages_of
from mqstore.broker.background.service import Roller
from mqstore.broker.delay.recall import RecallHandle, parse_recall_handle
from mqstore.broker.delay.route import Cancellations, copies_of, recallable
from mqstore.broker.delay.timerfiles import TimerFilesDamaged, TimerLog, TimerUnit
from mqstore.broker.delay.timermessages import TimerMessages
from mqstore.broker.delay.timerunits import SlotReading, TimerUnits
from mqstore.broker.tables.names import TIMER_TOPIC
from mqstore.layout.javahash import java_hash
from mqstore.layout.properties import REAL_TOPIC, TIMER_DEL_UNIQKEY, TIMER_DELAY_LEVEL, TIMER_OUT_MS, UNIQ_KEY
from mqstore.log.message import Message
from mqstore.log.reading.reader import StoreReader
from mqstore.log.store import MessageStore
from mqstore.signalsafe import Lock

_LOOKS = 4_000
"""Number of units of a slot to examine at once."""


class TimerQueries(Roller):
    """Base of `TimerService`, which has the fields. Thread-safe."""

    _parts: Parts
    _store: MessageStore
    _messages: TimerMessages
    _lock: Lock
    _log: TimerLog
    _units: TimerUnits
    _begun: bool
    _reading: SlotReading | None
    _read_ms: int
    _queue_offset: int

    def waiting(self) -> int:
        low, high = self._store.offsets_or_none(TIMER_TOPIC, 0) or (0, 0)
        not_in_the_wheel_yet = max(0, high - max(low, self._queue_offset))
        return self._units.waiting.total() + not_in_the_wheel_yet

    def waiting_for(self, topic: str) -> int:
        """Return the number of messages that wait for a topic. A cancelled one does not count. Never waits.
        For a second or less after opening, one that is due then may be missing."""
        units, topic_hash = self._units, java_hash(topic)
        at = -1
        while at != self._queue_offset:  # again if a message got its unit meanwhile
            at, waiting, cancels = self._queue_offset, units.waiting[topic_hash], units.cancels[topic_hash]
        kinds = [TIMER_DEL_UNIQKEY in each.stored_properties() for each in self._new(at) if waits_for(each, {topic})]
        return max(0, waiting + kinds.count(False) - (cancels + sum(kinds)) // self._messages.cancellations)

    def _new(self, begin: int) -> Iterator[Message]:
        """Yield the messages from `begin` on, the first one without a unit."""
        low, high = self._store.offsets_or_none(TIMER_TOPIC, 0) or (0, 0)
        return messages_of(self._store, TIMER_TOPIC, max(low, begin), high)

    def page(self, topics: Collection[str], begin: int, count: int) -> tuple[list[Message], int | None]:
        """Return about `count` messages that wait for one of `topics`, with records from physical offset `begin` on,
        and where the next page begins. Cancelled ones are left out."""
        found: list[Message] = []
        with self._lock:
            cancels = self._has_cancels(topics)
            for looked, message in enumerate(self._waiting(topics, begin)):
                if looked == count:
                    return found, message.physical_offset
                if not (cancels and is_cancelled(self._store, message)):
                    found.append(message)
        return found, None

    def _waiting(self, topics: Collection[str], begin: int) -> Iterator[Message]:
        """Yield the messages that wait for one of `topics` in the order of their records. Call under the lock."""
        hashes = [java_hash(topic) for topic in topics]
        for position, physical in self._units.of_topics(hashes, begin, self._read_ms) if self._begun else ():
            if self._unit_waits(position, self._log.unit(position)):
                with suppress(LookupError):  # it is lost, which its delivery reports
                    if waits_for(message := self._store.at(physical), topics):
                        yield message
        for message in self._new(self._queue_offset):
            cancels = TIMER_DEL_UNIQKEY in message.stored_properties()
            if message.physical_offset >= begin and not cancels and waits_for(message, topics):
                yield message

    def _has_cancels(self, topics: Collection[str]) -> bool:
        """Return True if one of the messages for `topics` may be cancelled: a look for each would cost more than it."""
        new = self._new(self._queue_offset)
        units = any(self._units.cancels[java_hash(topic)] for topic in topics)
        return units or any(TIMER_DEL_UNIQKEY in each.stored_properties() for each in new)

    def waits(self, message: Message) -> bool:
        """Return True if a message of the timer topic will be delivered."""
        with self._lock:
            return (
                TIMER_DEL_UNIQKEY not in message.stored_properties()
                and self._waits(message)
                and not is_cancelled(self._store, message)
            )

    def cancel_all(self, topics: Collection[str], begin: Callable[[], int]) -> int:
        """Cancel the messages that wait for one of `topics`, overdue ones included. Return their number.
        Only those with records before the physical offset that `begin` returns. It is called when nothing is delivered
        any more until the end of this call. They are as durable as puts."""
        with self._lock:
            stop, count, cancels = begin(), 0, self._has_cancels(topics)
            for message in self._waiting(topics, 0) if topics else ():
                if message.physical_offset >= stop:
                    break
                by_level = TIMER_DELAY_LEVEL in message.stored_properties()
                if not by_level and not (cancels and is_cancelled(self._store, message)):
                    self._messages.cancel(_handle(message), message.born_timestamp_ms)
                    count += 1
            return count

    def recall(self, handle: str) -> bool:
        """Cancel the message of a recall handle.
        Returns True if the message will not be delivered, and False if it is due, was delivered, or does not exist.
        Raises InvalidReceiptError for an invalid handle, and the errors of a put. It is as durable as a put."""
        wanted = parse_recall_handle(handle)
        # Under the lock, so that no message is delivered between the check and the cancellation.
        with self._lock:
            now_ms = self._parts.clock.now_ms()
            copies = copies_of(self._store, wanted)
            waiting = [m for m in recallable(copies, now_ms) if self._waits(m)]
            recalled = Cancellations(copies)
            if not all(map(recalled.cover, waiting)):
                self._messages.cancel(wanted, max(message.born_timestamp_ms for message in waiting))
            return bool(waiting)

    def waiting_below(self, physical_offset: int) -> list[tuple[np.NDArray[np.int64], np.NDArray[np.int64]]]:
        """Return the waiting messages that are placed and written, as far as the files are whole. See `Roller`."""
        found = []
        with self._lock, suppress(TimerFilesDamaged):  # reading the slot, or `roll`, will find the same damage
            for _, units in self._units.old(physical_offset, self._read_ms) if self._begun else ():
                found.append((units["physical_offset"].astype(np.int64), units["record_size"].astype(np.int64)))
        return found

    def _waits(self, message: Message) -> bool:
        """Return True if a message of the timer topic is neither delivered nor rolled.
        Its unit decides, not the time, since the clock may have been set back."""
        from_end = self._queue_offset - message.offset
        if from_end <= 0:
            return True
        try:
            # Nearly every message has a unit, so counting from the end usually finds it at once.
            found = self._log.find(message.physical_offset, self._units.low, from_end)
            return found is not None and self._unit_waits(*found)
        except TimerFilesDamaged:
            return True  # the files will be rebuilt from the topic, which then has the cancellation

    def _unit_waits(self, position: int, unit: TimerUnit) -> bool:
        reading = self._reading
        if reading is None or unit.slot_ms != reading.slot_ms:
            return unit.slot_ms >= self._read_ms
        while not reading.complete:  # after opening, which units are done is known only when all are sorted
            reading.look(_LOOKS, self._messages.record)
        return reading.waits(position, unit)


def waits_for(message: Message, topics: Collection[str]) -> bool:
    """Return True if a message of the timer topic is for one of `topics`."""
    return message._stored_property(REAL_TOPIC) in topics


def is_cancelled(store: StoreReader, message: Message) -> bool:
    """Return True if a waiting message of the timer topic was cancelled. One of a delay level cannot be."""
    by_level = TIMER_DELAY_LEVEL in message.stored_properties()
    return not by_level and Cancellations(copies_of(store, _handle(message))).cover(message)


def _handle(message: Message) -> RecallHandle:
    properties = message.stored_properties()
    return RecallHandle(properties[REAL_TOPIC], int(properties[TIMER_OUT_MS]) + 1, properties.get(UNIQ_KEY, ""))
