"""Redelivery of messages that a group could not consume (delivery#send-back).
The limits and delays are in delivery#groups and delivery#backoff.

    outcome of an attempt                             copy goes to                  with
    failed, reconsume_times < limit, level 0          %RETRY%group, by the policy   DELAY, or a timer property
    failed, level > 0 or delay_ms given               %RETRY%group, after that      likewise
    failed, reconsume_times >= limit                  %DLQ%group, queue 0           DELAY = 0, dlq_reason
    level < 0, or a group without retry queues        %DLQ%group, queue 0           likewise

    property of a copy     set by                   and then
    RETRY_TOPIC            the first failure        never changed: consumers show it as the topic
    ORIGIN_MESSAGE_ID      the first failure        never changed: address of the first copy
    reconsumeTimes         each copy                counts up; attempt = reconsumeTimes + 1
    DLQ_ORIGIN_*           the dead letter          topic and id of the original
    1ST_POP_TIME           a group that pops        its dead letters are replayed into its retry topic of pop

The copy is in the log before the caller settles the original. So a crash between the two makes a second copy, and never
loses the only one. Nor does a power cut, because the settlement is written after the copy, or flushes the log first.
Only `send_back` waits for the disk, as a put does, because its caller has no other copy. For the same reason it is not
idempotent. A waiting copy may refer to its body instead of having it (`references.py`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Final

from mqstore.broker.background.context import Parts
from mqstore.broker.redelivery.reason import EXPIRED, Reason, set_reason
from mqstore.broker.tables.names import (
    QueueKey,
    dlq_topic,
    is_retry_topic,
    is_system_topic,
    popped_topic,
    retry_topic,
)
from mqstore.broker.tables.priorities import letter_properties
from mqstore.errors import ConfigError, InvalidMessageError, NotPermittedError
from mqstore.layout.properties import (
    CRC_TAIL_BYTES,
    DELAY,
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    DLQ_REASON,
    FIRST_POP_TIME,
    MAX_PROPERTIES_BYTES,
    NOT_RETRIED,
    ORIGIN_MESSAGE_ID,
    REAL_QID,
    REAL_TOPIC,
    RETRY_REASON,
    RETRY_TOPIC,
    TIMER_DELAY_MS,
    WAIT,
    kept,
)
from mqstore.log.commitlog import SendReceipt
from mqstore.log.message import Message
from mqstore.log.writing.writer import RecordOptions, fields_of
from mqstore.options import Durability, milliseconds

_ROOM: Final = MAX_PROPERTIES_BYTES - CRC_TAIL_BYTES
_DISPENSABLE: Final = (
    DLQ_REASON,
    DLQ_ORIGIN_MESSAGE_ID,
    DLQ_ORIGIN_TOPIC,
    WAIT,
    ORIGIN_MESSAGE_ID,
    FIRST_POP_TIME,
    REAL_QID,
    RETRY_TOPIC,
    DELAY,
)
"""Properties that a dead letter may lose if the message's own fill the record, the least important first."""
_MAX_TIMES: Final = 0x7FFF_FFFF


class Retries:
    """Copies of failed messages. Stateless and thread-safe. No closing is needed."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._levels_ms = parts.store.delay_table_ms
        self._max_delay_ms = milliseconds(parts.config.max_delay, "max_delay")

    def send_back(
        self,
        group: str,
        physical_offset: int,
        *,
        delay_level: int = 0,
        delay_ms: int | None = None,
        max_reconsume: int | None = None,
        attempts: int | None = None,
        reason: Reason | None = None,
        durability: Durability | None = None,
    ) -> SendReceipt:
        """Redeliver or dead-letter the message at `physical_offset` (bytes) that `group` failed to consume.
        See delivery#send-back. `delay_level` 0 means the group's policy, > 0 that level, < 0 a dead letter now.
        `delay_ms` replaces a level. `max_reconsume` replaces the group's limit, and may be 0. `attempts` is the number
        of attempts that have ended, and the copy's `reconsume_times`. None means one more than the message's. `reason`
        is that of the failure, which a copy keeps if there is room. `durability` is that of the copy. Returns the
        receipt of the stored copy, for a delayed copy in the topic where it waits.
        Raises, with nothing written, ConfigError, GroupNotFoundError, NotPermittedError (the topic is not writable),
        LookupError (no readable message there), and the errors of a put."""
        self._check_arguments(delay_level, delay_ms, max_reconsume, attempts)
        parts = self._parts
        config = parts.groups.require(group)
        message = parts.store.at(physical_offset)
        limit = config.retry_max_times if max_reconsume is None else max_reconsume
        times = _next(message.reconsume_times) if attempts is None else attempts
        properties = failed_properties(message, group) | {WAIT: "false"}
        key = f"{properties[RETRY_TOPIC]}@{group}"

        def give_up(reason: Reason) -> SendReceipt:
            receipt = self.dead_letter(message, group, reason, reconsume_times=times, durability=durability)
            parts.statistics.add("SNDBCK2DLQ_TIMES", key)
            return receipt

        if delay_level < 0 or times > limit or config.retry_queues <= 0:
            return give_up(reason or Reason(_why(delay_level, times, limit)))
        topic = retry_topic(group)
        queue_id = self._ensured_queue(topic, config.retry_queues)
        if delay_level == 0 and delay_ms is None:
            delay_ms = min(config.retry_policy._next_delay_ms(times - 1), self._max_delay_ms)
        self._delay(properties, delay_level, delay_ms)
        set_reason(properties, RETRY_REASON, reason or EXPIRED)
        try:
            for each in (0, queue_id):  # retries that wait count in the first queue
                parts.offsets.begin(QueueKey(group, topic, each))
            receipt = parts.router.copy(
                message, topic, queue_id, properties, refers=True, reconsume_times=times, durability=durability
            )
        except InvalidMessageError as error:
            # A later try would fail, too, because the properties leave no room for those of a retry.
            return give_up(Reason(f"cannot be retried: {error}"))
        parts.statistics.add("SNDBCK_PUT_NUMS", key)
        return receipt

    def dead_letter(
        self,
        message: Message,
        group: str,
        reason: Reason,
        *,
        origin_topic: str | None = None,
        reconsume_times: int | None = None,
        durability: Durability | None = "append",
    ) -> SendReceipt:
        """Put a copy of `message` into `%DLQ%group`, which is created with 1 queue, readable and writable.

        `origin_topic` is the topic from which the group popped it. None means that the group does not pop: the origin
        is its RETRY_TOPIC, or else the topic it was sent to. `reconsume_times` is that of the copy, the number of
        deliveries. None means one more than the message's, or the message's if it waited in a system topic.
        `durability` None is the store's. `reason` is cut to 1024 bytes. It and other additions are left out if the
        message's own properties leave no room, because they must not prevent the copy. Raises NotPermittedError if the
        topic is not writable, and the errors of a put."""
        topic = dlq_topic(group)
        queue_id = self._ensured_queue(topic, 1)
        properties = failed_properties(message, group, origin_topic)
        came_from = origin_topic or properties[RETRY_TOPIC]
        properties |= {DLQ_ORIGIN_TOPIC: came_from, DLQ_ORIGIN_MESSAGE_ID: properties[ORIGIN_MESSAGE_ID]}
        set_reason(properties, DLQ_REASON, reason)
        if origin_topic is not None:
            first = message._stored_property(FIRST_POP_TIME)
            properties[FIRST_POP_TIME] = first or str(self._parts.clock.now_ms())
            properties |= letter_properties(self._parts.topics.get(origin_topic), message.queue_id)
        properties |= {DELAY: "0", WAIT: "false"}
        _shed(properties)
        # Readers accept the separator (format#properties), a put does not.
        properties = {name: value.replace("\x01", " ") for name, value in properties.items()}
        if reconsume_times is None:
            times = message.reconsume_times
            reconsume_times = times if is_system_topic(message.topic) else _next(times)
        whole = message._whole()
        options: RecordOptions = {**fields_of(whole), "reconsume_times": reconsume_times, "durability": durability}
        # Not `copy`, which would add an origin although there may be no room.
        put = partial(self._parts.router.append, topic, queue_id, bytes(whole.body_view), **options)
        try:
            receipt = put(properties)
        except InvalidMessageError:  # the whole record is too long
            _shed(properties, 0)
            receipt = put(properties)
        self._parts.statistics.add("DLQ_PUT_NUMS", f"{came_from}@{group}")
        return receipt

    def _check_arguments(
        self, delay_level: int, delay_ms: int | None, max_reconsume: int | None, attempts: int | None
    ) -> None:
        if delay_ms is not None and delay_level != 0:
            raise ConfigError(f"delay_level={delay_level} and delay_ms={delay_ms}: give only one")
        if delay_ms is not None and not 0 <= delay_ms <= self._max_delay_ms:
            raise ConfigError(f"delay_ms must be 0..{self._max_delay_ms} (max_delay), got {delay_ms}")
        if max_reconsume is not None and not 0 <= max_reconsume <= _MAX_TIMES:
            raise ConfigError(f"max_reconsume must be 0..{_MAX_TIMES}, got {max_reconsume}")
        if attempts is not None and not 1 <= attempts <= _MAX_TIMES:
            raise ConfigError(f"attempts must be 1..{_MAX_TIMES}, got {attempts}")

    def _ensured_queue(self, topic: str, queues: int) -> int:
        """Return a queue of `topic` to write to. A missing topic is created with this number of `queues`."""
        config = self._parts.topics.ensure(topic, queues)
        if not config.writable:
            raise NotPermittedError(f"topic {topic!r} is not writable; give it permission 6")
        # An altered topic may have fewer queues, and a message in a queue that is not read would be lost.
        there = min(queues, config.read_queues, config.write_queues)
        return random.randrange(there) if there > 1 else 0

    def _delay(self, properties: MutableMapping[str, str], level: int, delay_ms: int | None) -> None:
        """Set the delay, if possible as a level, because levels need no timer."""
        if delay_ms is not None and delay_ms in self._levels_ms:
            level, delay_ms = self._levels_ms.index(delay_ms) + 1, None
        if level > 0:
            properties[DELAY] = str(level)
        elif delay_ms:
            properties[TIMER_DELAY_MS] = str(delay_ms)


def failed_properties(message: Message, group: str, origin_topic: str | None = None) -> dict[str, str]:
    """Return the properties of a retry or a dead letter: the message's with its origin, without those of this delivery.
    `origin_topic` is that of `dead_letter`."""
    stored = message.stored_properties()
    if origin_topic is None and is_system_topic(message.topic):  # an undelivered delayed message
        origin_topic = stored.get(REAL_TOPIC)
    properties = kept(stored, NOT_RETRIED)
    properties.setdefault(RETRY_TOPIC, origin_topic or popped_topic(group, message.topic))
    properties.setdefault(ORIGIN_MESSAGE_ID, message.message_id)
    return properties


def origin_topic(message: Message, group: str) -> str:
    """Return the topic from which `group` first received a message that may now be in its retry topic."""
    topic = message.topic
    if not is_retry_topic(topic):
        return topic
    popped = popped_topic(group, topic)
    return popped if popped != topic else (message._stored_property(RETRY_TOPIC) or topic)


def _next(times: int) -> int:
    return min(times + 1, _MAX_TIMES)


def _why(delay_level: int, attempts: int, limit: int) -> str:
    if delay_level < 0:
        return "rejected by its consumer"
    return f"attempt {attempts} failed" + (f", {limit + 1} are allowed" if attempts > limit else ", no retry queues")


def _size(properties: Mapping[str, str]) -> int:
    return sum(len(name.encode()) + len(value.encode()) + 2 for name, value in properties.items())


def _shed(properties: MutableMapping[str, str], room: int = _ROOM) -> None:
    """Remove properties that mqstore added until the rest fits a record (format#properties)."""
    size = _size(properties)
    for name in _DISPENSABLE:
        if size <= room:
            return
        value = properties.pop(name, None)
        if value is not None:
            size -= len(name) + len(value.encode()) + 2
