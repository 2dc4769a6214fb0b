"""Outcome of a message of the timer topic when its time has come.

delivered     put to REAL_TOPIC, REAL_QID, without the properties of its delay
rolled        put to the timer topic again, half way or early
skipped       it was cancelled, or its topic was deleted
dead letter   it can never be delivered
lost          its record is damaged, or was deleted by retention: counted and logged
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Mapping
from typing import Final

from mqstore.broker.background.context import Parts
from mqstore.broker.delay.recall import RecallHandle
from mqstore.broker.delay.route import (
    LEVEL_MARKS,
    PRECISION_MS,
    RECALLED_BORN_MS,
    TIMER_NAMES,
    Cancellations,
    due_of,
    number,
    slot_of,
)
from mqstore.broker.delay.timerfiles import NOWHERE, ROLLS, TimerFilesDamaged, TimerUnit
from mqstore.broker.redelivery.reason import Reason
from mqstore.broker.redelivery.retry import Retries
from mqstore.broker.tables.names import SCHEDULE_GROUP, TIMER_TOPIC
from mqstore.errors import FormatError, InvalidMessageError
from mqstore.layout.properties import (
    CRC32,
    DELAY,
    REAL_QID,
    REAL_TOPIC,
    TIMER_DEL_UNIQKEY,
    TIMER_DELAY_LEVEL,
    TIMER_DELIVER_MS,
    TIMER_DEQUEUE_MS,
    TIMER_ENQUEUE_MS,
    TIMER_OUT_MS,
    TIMER_ROLL_TIMES,
    UNIQ_KEY,
)
from mqstore.log.directory.manifest import Manifest
from mqstore.log.message import Message
from mqstore.logger import log as _log

_ROLLED_WITHOUT: Final = frozenset({DELAY, CRC32})
_DELIVERED_WITHOUT: Final = TIMER_NAMES | {REAL_TOPIC, REAL_QID} | _ROLLED_WITHOUT
_DELIVERED_BY_LEVEL_WITHOUT: Final = LEVEL_MARKS | _ROLLED_WITHOUT


def cancellations(manifest: Manifest) -> int:
    """Return the number of messages that cancel one.
    In a profile that RocketMQ knows it has a second name, for a broker of 5.4 that may open the store later."""
    return 2 if manifest.profile == "rocketmq" else 1


class TimerMessages:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._store = parts.store
        self._retries = Retries(parts)
        self.cancellations: Final = cancellations(parts.store.manifest)

    def finish(self, unit: TimerUnit, cancelled: Cancellations, now_ms: int) -> bool:
        """Handle the message of a unit. Return True if it was cancelled."""
        message = self.record(unit)
        if message is None:
            return False
        properties = message.stored_properties()
        topic = properties.get(REAL_TOPIC, "")
        home = self._parts.router.target_queue(message, topic, int(properties[REAL_QID]))
        if home is None:
            self._pass_over(message, topic)
            return False
        due_ms = due_of(properties)
        # A message to be rolled is rolled even if it is overdue, since its cancellation waits in its own slot.
        if unit.magic & ROLLS or due_ms > now_ms:
            hops = str((number(properties.get(TIMER_ROLL_TIMES)) or 0) + 1)
            self._put(message, TIMER_TOPIC, 0, properties, _ROLLED_WITHOUT, {TIMER_ROLL_TIMES: hops})
            return False
        by_level = TIMER_DELAY_LEVEL in properties  # cannot be recalled, and gets the properties of its level
        if not by_level and cancelled.cover(message):
            self._parts.statistics.add("TIMER_CANCELLED", topic)
            return True
        without = _DELIVERED_BY_LEVEL_WITHOUT if by_level else _DELIVERED_WITHOUT
        placed_ms = unit.write_ms // PRECISION_MS * PRECISION_MS
        marks = {} if by_level else {TIMER_ENQUEUE_MS: str(placed_ms), TIMER_DEQUEUE_MS: str(now_ms)}
        self._put(message, topic, home, properties, without, marks)
        self._parts.statistics.add("DELAY_LATENCY", topic, max(0, self._parts.clock.now_ms() - due_ms))
        return False

    def _pass_over(self, message: Message, topic: str) -> None:
        _log.warning("%s: the timer skips the message at %d of the log, since its topic %s was deleted",
                     self._store.path, message.physical_offset, topic)  # fmt: skip
        self._parts.statistics.add("TIMER_PASSED_OVER", topic)

    def _put(
        self,
        message: Message,
        topic: str,
        queue_id: int,
        properties: Mapping[str, str],
        without: frozenset[str],
        marks: Mapping[str, str],
    ) -> None:
        """Copy a message to its next queue.
        A message that can never be stored there becomes a dead letter. Any other error is raised, and the put is tried
        again."""
        if (whole := self._whole(message)) is None:
            return
        message = whole
        kept = {name: value for name, value in properties.items() if name not in without}
        copy = self._parts.router.copy
        try:
            copy(message, topic, queue_id, {**kept, **marks}, durability="append")
        except InvalidMessageError:
            # Try without the added properties, since the message may be too large only because of these.
            try:
                copy(message, topic, queue_id, kept, durability="append")
            except InvalidMessageError as error:
                self.dead_letter(message, str(error))

    def dead_letter(self, message: Message, reason: str) -> None:
        """Put a message that can never be delivered to the dead letters of delay."""
        text = f"message at {message.physical_offset} of {TIMER_TOPIC}: {reason}"
        try:
            self._retries.dead_letter(message, SCHEDULE_GROUP, Reason(text))
        except (InvalidMessageError, FormatError) as error:
            # It is too large for a dead letter, or its body is lost. Retention will delete its record.
            text += f"; it cannot be dead-lettered either ({error})"
        self.count("TIMER_UNDELIVERABLE", 1, text)

    def record(self, unit: TimerUnit) -> Message | None:
        """Return the record of a unit. If it is damaged or deleted, count it and return None.
        Raises TimerFilesDamaged if the unit does not point to a message of the timer topic."""
        try:
            message = self._store.at(unit.physical_offset)
        except LookupError:
            message = None
        if message is not None and message.topic == TIMER_TOPIC and message.size == unit.record_size:
            return message
        if unit.physical_offset >= self._store.min_offset and not self._in_queue(unit):
            raise TimerFilesDamaged(f"timer log: no record of the timer topic at {unit.physical_offset}")
        self.count("TIMER_UNREADABLE", 1, f"damaged or deleted, at {unit.physical_offset} of the log")
        return None

    def _whole(self, message: Message) -> Message | None:
        """Return a message with its body. If its body is in another, damaged record, count it and return None."""
        try:
            return message._whole()
        except FormatError as error:
            text = f"damaged, at {message.physical_offset} of the log, unique key {message.unique_key}: {error}"
            self.count("TIMER_UNREADABLE", 1, text)
            return None

    def _in_queue(self, unit: TimerUnit) -> bool:
        """Return True if the timer topic's queue has that record, so that it must be damaged."""
        low, high = self._store.offsets_or_none(TIMER_TOPIC, 0) or (0, 0)

        def record(offset: int) -> tuple[int, int]:
            units = self._store.units(TIMER_TOPIC, 0, offset, 1)
            return tuple(units[0].tolist()[:2]) if len(units) else (sys.maxsize, 0)

        wanted = unit.physical_offset, unit.record_size
        at = bisect_left(range(high), wanted, low, key=record)
        return at < high and record(at) == wanted

    def count(self, name: str, number_of: int, text: str) -> None:
        _log.error("%s: timer: %d lost: %s", self._store.path, number_of, text)
        self._parts.statistics.add(name, TIMER_TOPIC, number_of)

    def cancel(self, wanted: RecallHandle, born_ms: int) -> None:
        """Put a cancellation of the messages of a handle that were born by `born_ms`."""
        properties = {
            TIMER_DELIVER_MS: str(wanted.deliver_ms),
            TIMER_OUT_MS: str(slot_of(wanted.deliver_ms)),
            REAL_TOPIC: wanted.topic,
            REAL_QID: "0",
            UNIQ_KEY: wanted.unique_key,  # so that a second recall finds the first
        }
        names = {f"{wanted.topic}+{wanted.unique_key}": born_ms}
        if self.cancellations > 1:
            names[wanted.unique_key] = NOWHERE
        for name, until_ms in names.items():
            marks = {TIMER_DEL_UNIQKEY: name, RECALLED_BORN_MS: str(until_ms)}
            self._parts.router.append(TIMER_TOPIC, 0, b"", {**properties, **marks})

    def put_again(self, unit: TimerUnit) -> None:
        """Put the message of a unit to the timer topic again, unchanged, for the rest of its time.
        A message that cannot be read is counted. Raises InvalidMessageError if it cannot be put."""
        message = self.record(unit)
        if message is None or (message := self._whole(message)) is None:
            return
        properties = message.stored_properties()
        topic = properties.get(REAL_TOPIC, "")
        if self._parts.router.target_queue(message, topic, 0) is None:
            self._pass_over(message, topic)
            return
        kept = {name: value for name, value in properties.items() if name not in _ROLLED_WITHOUT}
        self._parts.router.copy(message, TIMER_TOPIC, 0, kept, durability="append")
        self._parts.statistics.add("TIMER_ROLLED", TIMER_TOPIC)
