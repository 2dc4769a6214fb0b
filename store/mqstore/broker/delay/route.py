"""Rules of delay, without state: which messages wait, where and until when (delivery#timer-put).

    a message with                         waits
    DELAY > 0                              in the queue of its level
    TIMER_OUT_MS                           not again: it has waited, or is in the timer topic
    TIMER_DELAY_SEC, TIMER_DELAY_MS,       in the timer topic, from now or until the given time. The first of these
    TIMER_DELIVER_MS                       counts. A past time means no delay. An invalid or too late one is refused

Time is cut into slots of one precision P. A message due at D waits in the slot that begins before D and ends at D or
later. While that slot passes, each of its messages is delivered at its own D (`due_of`).

    D          2000      2001 .. 3000              P = 1000
    slot       1000      2000                      = TIMER_OUT_MS
    slot ends  2000      3000

A message that is due in more than the roll window W waits for a part of its time. Then it is copied to the end of the
log, and waits again (`placement`). So it keeps its segment no longer than W, and the wheel need not cover more than W.

A message of a level that alone keeps an old segment is relocated to the timer topic (`level_properties`):

    level n, REAL_TOPIC, REAL_QID, due at D    DELAY is gone; TIMER_DELIVER_MS = D, TIMER_OUT_MS as above,
                                               TIMER_DELAY_LEVEL = n

TIMER_DELAY_LEVEL marks it, so it is delivered with the properties that the level would have given it.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import Any

from mqstore.broker.delay.recall import RecallHandle
from mqstore.broker.routing.uniquekey import new_unique_key
from mqstore.broker.tables.names import SCHEDULE_TOPIC, TIMER_TOPIC
from mqstore.errors import InvalidMessageError
from mqstore.layout.properties import (
    CRC32,
    DELAY,
    NAME_END,
    ORIGIN_MESSAGE_ID,
    PAIR_END,
    REAL_QID,
    REAL_TOPIC,
    TIMER_DEL_UNIQKEY,
    TIMER_DELAY_LEVEL,
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    TIMER_ROLL_TIMES,
    UNIQ_KEY,
    WAIT,
)
from mqstore.log.message import Message
from mqstore.log.reading.reader import StoreReader, to_ms
from mqstore.log.writing.outgoing import ROUTING, check_integer, user_properties
from mqstore.options import Duration, seconds

PRECISION_MS = 1_000
"""Length of a slot."""
RECALLED_BORN_MS = "mqstore_recalled_born_ms"
"""Property of a cancellation: birth time of the message of its key. Negative if it covers no message of mqstore."""
WINDOW_MS = 172_800 * PRECISION_MS
"""Two days: the longest that a message waits in one slot."""

LEVEL_MARKS = frozenset({TIMER_DELIVER_MS, TIMER_OUT_MS, TIMER_DELAY_LEVEL, TIMER_ROLL_TIMES, TIMER_DEL_UNIQKEY})
"""Properties that a message of a level has only while the timer holds it.
They are removed from a message that came with one: a record of a Java broker, put again after its delay.
TIMER_DEL_UNIQKEY would make it a cancellation."""

_LEVEL_MARKS = frozenset(name.encode() for name in LEVEL_MARKS)

_RELATIVE_NAMES = frozenset({TIMER_DELAY_MS, TIMER_DELAY_SEC})
TIMER_NAMES = _RELATIVE_NAMES | {TIMER_DELIVER_MS}
"""Properties that ask for a delay by the timer."""
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")

_REMOVED = frozenset(name.encode() for name in (DELAY, TIMER_DELIVER_MS, TIMER_DELAY_SEC, TIMER_DELAY_MS, WAIT, CRC32))
"""Properties that would delay the copy of a message again, or that describe the original record."""
_REAL_TOPIC, _REAL_QID = REAL_TOPIC.encode(), REAL_QID.encode()
_NO_WAIT = f"{WAIT}\x01false".encode()
_QUEUE_ID = re.compile(rb"[+-]?[0-9]{1,10}")
TOUCHED_NAMES = tuple(name + NAME_END for name in (*_REMOVED, _REAL_TOPIC, _REAL_QID))
"""Prefixes of the pairs that `restored` reads or removes."""
_TOUCHED = re.compile(rb"(?:\A|\x02)(?:" + rb"|".join(map(re.escape, TOUCHED_NAMES)) + rb")")
DELAY_PIECE = b"\x02" + DELAY.encode() + NAME_END
_MEMO_ENTRIES = 1024


def number(text: str | None) -> int | None:
    """Parse `text` like Java's `parseLong`, with at most 18 digits. Return None if it is not a number."""
    return int(text) if text is not None and _NUMBER.fullmatch(text) else None


def slot_of(deliver_ms: int) -> int:
    """Return the start of the slot of a due time: the slot begins before it and ends then or later.

    >>> slot_of(2000), slot_of(2001), slot_of(3000)
    (1000, 2000, 2000)
    """
    return (deliver_ms - 1) // PRECISION_MS * PRECISION_MS


class Cancellations:
    """Cancellations of one slot or one handle.
    A cancellation by mqstore covers messages that were born by its time, so a message put later with the same key is
    delivered. A cancellation by a Java broker covers all messages of its key."""

    __slots__ = ("_born_ms",)

    def __init__(self, messages: Iterable[Message] = ()) -> None:
        self._born_ms: dict[str, float] = {}
        for message in messages:
            self.add(message)

    def add(self, message: Message) -> None:
        """Add a message of the timer topic if it is a cancellation."""
        properties = message.stored_properties()
        key = properties.get(TIMER_DEL_UNIQKEY)
        if key is not None:
            born_ms = number(properties.get(RECALLED_BORN_MS))
            self._born_ms[key] = max(self._born_ms.get(key, -1), math.inf if born_ms is None else born_ms)

    def cover(self, message: Message) -> bool:
        """Return True if a waiting message was recalled."""
        properties = message.stored_properties()
        key = properties.get(UNIQ_KEY)
        # 5.3 adds the topic. 5.4 adds it only with the option `appendTopicForTimerDeleteKey`.
        names = (f"{properties.get(REAL_TOPIC)}+{key}", key)
        return any(message.born_timestamp_ms <= self._born_ms.get(name, -1) for name in names if name is not None)


def copies_of(store: StoreReader, wanted: RecallHandle) -> list[Message]:
    """Return the messages of the timer topic with a handle's key, topic and time.
    These are the first one, its rolled copies, and cancellations. Messages of a level are left out, since they cannot
    be recalled."""
    real = {REAL_TOPIC: wanted.topic, TIMER_OUT_MS: str(slot_of(wanted.deliver_ms))}
    found = []
    for message in store.find(TIMER_TOPIC, unique_key=wanted.unique_key, limit=sys.maxsize):
        properties = message.stored_properties()
        if real.items() <= properties.items() and TIMER_DELAY_LEVEL not in properties:
            found.append(message)
    return found


def recallable(copies: Iterable[Message], now_ms: int) -> list[Message]:
    """Return the messages of `copies_of` that are neither cancellations nor due."""
    stored = [(message, message.stored_properties()) for message in copies]
    return [message for message, has in stored if TIMER_DEL_UNIQKEY not in has and due_of(has) > now_ms]


def delay_route(
    topic: str,
    queue_id: int,
    properties: Mapping[str, str],
    now_ms: Callable[[], int],
    *,
    levels: int,
    max_delay_ms: int,
) -> tuple[str, int, dict[str, str]] | None:
    """Return the topic, queue id and properties with which a message waits, or None if it does not wait.

    It waits in one of `levels` levels or in the timer topic. A level that is not a number is ignored. `now_ms` is only
    called if the time matters, as it does for few records.

    In the timer topic TIMER_DELIVER_MS is its due time. It gets a UNIQ_KEY if it has none, since a recall needs it.
    Raises InvalidMessageError (field "properties") for a time that is not a number, negative, or more than
    `max_delay_ms` ahead, and for a cancellation that is too late.

    >>> delay_route("orders", 0, {"DELAY": "99"}, lambda: 0, levels=18, max_delay_ms=0)
    ('SCHEDULE_TOPIC_XXXX', 17, {'DELAY': '18', 'REAL_TOPIC': 'orders', 'REAL_QID': '0'})
    """
    level = min(number(properties.get(DELAY)) or 0, levels)
    if level > 0:
        stored = {name: value for name, value in properties.items() if name not in TIMER_NAMES}
        stored |= {DELAY: str(level), REAL_TOPIC: topic, REAL_QID: str(queue_id)}
        return SCHEDULE_TOPIC, level - 1, stored
    if TIMER_NAMES.isdisjoint(properties) or topic == TIMER_TOPIC or TIMER_OUT_MS in properties:
        return None
    given_ms = now_ms()
    deliver_ms = _deliver_ms(properties, given_ms)
    if deliver_ms <= given_ms:
        if TIMER_DEL_UNIQKEY in properties:
            raise InvalidMessageError(
                f"too late to cancel {properties[TIMER_DEL_UNIQKEY][:80]!r}: it was due at {deliver_ms}", "properties"
            )
        return None
    if deliver_ms - given_ms > max_delay_ms:
        raise InvalidMessageError(
            f"delay of {deliver_ms - given_ms} ms exceeds max_delay, {max_delay_ms} ms", "properties"
        )
    stored = {name: value for name, value in properties.items() if name not in _RELATIVE_NAMES}
    stored[TIMER_DELIVER_MS] = str(deliver_ms)
    stored[TIMER_OUT_MS] = str(slot_of(deliver_ms))
    stored[REAL_TOPIC] = topic
    stored[REAL_QID] = str(queue_id)
    if UNIQ_KEY not in stored:  # a copy made by retries keeps its known key
        stored[UNIQ_KEY] = stored.get(ORIGIN_MESSAGE_ID) or new_unique_key()
    return TIMER_TOPIC, 0, stored


def _deliver_ms(properties: Mapping[str, str], now_ms: int) -> int:
    ways = ((TIMER_DELAY_SEC, 1000, now_ms), (TIMER_DELAY_MS, 1, now_ms), (TIMER_DELIVER_MS, 1, 0))
    name, unit_ms, origin_ms = next(way for way in ways if way[0] in properties)
    value = number(properties[name])
    if value is None or value < 0:
        raise InvalidMessageError(
            f"property {name} must be a number from 0, got {properties[name][:40]!r}", "properties"
        )
    return origin_ms + value * unit_ms


def due_of(properties: Mapping[str, str]) -> int:
    """Return the due time of a timer message, which must have TIMER_OUT_MS (delivery#timer-due).

    It is due at TIMER_DELIVER_MS. A record by a Java broker may not have it, or have it outside its slot. Then it is
    due at the end of its slot.

    >>> due_of({"TIMER_OUT_MS": "2000", "TIMER_DELIVER_MS": "2345"}), due_of({"TIMER_OUT_MS": "2000"})
    (2345, 3000)
    """
    out_ms = int(properties[TIMER_OUT_MS])
    end_ms = slot_of(out_ms + 1) + PRECISION_MS
    asked_ms = number(properties.get(TIMER_DELIVER_MS))
    if asked_ms is None or not _RELATIVE_NAMES.isdisjoint(properties):  # the due time was another one
        return end_ms
    return asked_ms if out_ms < asked_ms <= end_ms else end_ms


def restored(properties: bytes) -> tuple[str, int, bytes]:
    """Return (topic, queue id, properties) of the copy to deliver, from a message's stored properties.

    Works on the bytes, so unknown properties stay as they are (delivery#restore). Raises ValueError if there is no
    valid topic or queue id.

    >>> restored(b"TAGS\\x01a\\x02DELAY\\x013\\x02REAL_TOPIC\\x01orders\\x02REAL_QID\\x012\\x02")
    ('orders', 2, b'TAGS\\x01a\\x02REAL_TOPIC\\x01orders\\x02REAL_QID\\x012\\x02WAIT\\x01false\\x02')
    """
    kept: list[bytes] = []
    real: dict[bytes, bytes] = {}
    for piece in properties.removesuffix(PAIR_END).split(PAIR_END):
        name, _, value = piece.partition(NAME_END)
        if name in _REMOVED:
            continue
        if value and name in (_REAL_TOPIC, _REAL_QID):
            real[name] = value
        kept.append(piece)
    kept += (_NO_WAIT, b"")
    topic, queue_id = real.get(_REAL_TOPIC, b""), real.get(_REAL_QID, b"")
    if not topic:
        raise ValueError(f"no {REAL_TOPIC}")
    if topic == SCHEDULE_TOPIC.encode():
        raise ValueError(f"{REAL_TOPIC} is {SCHEDULE_TOPIC}, so it would be delayed for ever")
    if not _QUEUE_ID.fullmatch(queue_id):
        raise ValueError(f"{REAL_QID} must be a queue id, got {queue_id[:40]!r}")
    return topic.decode(), int(queue_id), PAIR_END.join(kept)


restored_end = lru_cache(_MEMO_ENTRIES)(restored)
"""`restored`, cached, for the second part of a result of `parted`."""


def parted(properties: bytes) -> tuple[bytes, bytes]:
    """Split properties into (a prefix that the copy has, too; the rest, which must be restored).

    The engine writes DELAY and its own properties last (delivery#level-put). So there are few different rests.

    >>> parted(b"TAGS\\x01a\\x02DELAY\\x013\\x02REAL_TOPIC\\x01orders\\x02REAL_QID\\x012\\x02")
    (b'TAGS\\x01a\\x02', b'DELAY\\x013\\x02REAL_TOPIC\\x01orders\\x02REAL_QID\\x012\\x02')
    """
    at = properties.rfind(DELAY_PIECE) + 1
    begin = properties[:at]
    return (b"", properties) if _TOUCHED.search(begin) else (begin, properties[at:])


def level_properties(delivered: bytes, level: int, due_ms: int) -> bytes:
    """Return the properties with which a message of `level` waits for `due_ms` in the timer topic.

    `delivered` are those with which the level would deliver it (delivery#restore).

    >>> level_properties(b"REAL_TOPIC\\x01orders\\x02REAL_QID\\x010\\x02", 2, 2001)[29:]
    b'TIMER_DELIVER_MS\\x012001\\x02TIMER_OUT_MS\\x012000\\x02TIMER_DELAY_LEVEL\\x012\\x02'
    """
    pieces = delivered.removesuffix(PAIR_END).split(PAIR_END)
    kept = [piece for piece in pieces if piece.partition(NAME_END)[0] not in _LEVEL_MARKS]
    marks = {TIMER_DELIVER_MS: due_ms, TIMER_OUT_MS: slot_of(due_ms), TIMER_DELAY_LEVEL: level}
    kept += [f"{name}\x01{value}".encode() for name, value in marks.items()]
    kept.append(b"")
    return PAIR_END.join(kept)


def placement(stored_ms: int, out_ms: int) -> tuple[int, bool]:
    """Return (the slot in which a message waits, True if it is rolled then).

    It was stored at `stored_ms`, and is due in slot `out_ms` (TIMER_OUT_MS). RocketMQ counts from the time at which it
    reads the record. mqstore counts from the store time, so that the result depends only on the record. Then a rebuild
    of the wheel can tell which records were rolled before.

    >>> day = 86_400_000
    >>> placement(0, day), placement(0, 10 * day), placement(0, 2 * day + 1000)
    ((86400000, False), (172800000, True), (86400000, True))
    """
    begin_ms = stored_ms // PRECISION_MS * PRECISION_MS
    rest_ms = out_ms - begin_ms - WINDOW_MS
    if rest_ms < 0:
        return out_ms, False
    # Instead of a long and a short wait, two even ones relocate the message, and free the log, earlier.
    return begin_ms + (WINDOW_MS // 2 if rest_ms < WINDOW_MS // 3 else WINDOW_MS), True


def routed_properties(options: Mapping[str, Any], *, now_ms: int, max_delay_ms: int) -> dict[str, str]:
    """Return the properties for the options of a put, those in `ROUTING` included.
    Raises InvalidMessageError like `user_properties`, and for two options that exclude each other."""
    given = [name for name in ROUTING if options.get(name) is not None]
    if len(given) > 1:
        raise InvalidMessageError(f"{' and '.join(given)} exclude each other: give only one", given[1])
    stored = user_properties(
        options.get("tag"),
        options.get("keys"),
        options.get("properties"),
        options.get("unique_key"),
        options.get("message_group"),
    )
    level = options.get("delay_level")
    if level is not None:
        check_integer(level, 32, "delay_level")
        if level < 0:
            raise InvalidMessageError(f"delay_level must not be negative, got {level}; 0 means no delay", "delay_level")
        if level:
            stored[DELAY] = str(level)
    deliver_ms = _requested_ms(options.get("delay"), options.get("deliver_at"), now_ms, max_delay_ms)
    if deliver_ms is not None:
        stored[TIMER_DELIVER_MS] = str(deliver_ms)
    return stored


def _requested_ms(delay: Duration | None, deliver_at: object, now_ms: int, max_delay_ms: int) -> int | None:
    """Return the requested time, rounded up to the next millisecond, or None for no delay."""
    if delay is not None:
        try:
            wait_ms = math.ceil(seconds(delay, "delay") * 1000)
        except (ValueError, OverflowError, TypeError) as error:  # ConfigError is a ValueError
            raise InvalidMessageError(f"delay must be a number of seconds from 0, got {delay!r}", "delay") from error
        if wait_ms > max_delay_ms:
            raise InvalidMessageError(
                f"delay {delay!r} is longer than max_delay, {max_delay_ms / 1000:g} seconds", "delay"
            )
        return now_ms + wait_ms if wait_ms else None
    if deliver_at is None:
        return None
    if isinstance(deliver_at, datetime):
        return to_ms(deliver_at)
    if isinstance(deliver_at, (int, float)) and not isinstance(deliver_at, bool):
        with suppress(OverflowError):  # an int too large for a float
            if math.isfinite(deliver_at):
                return math.ceil(deliver_at * 1000)
    raise InvalidMessageError(
        f"deliver_at must be an aware datetime or seconds since the epoch, got {deliver_at!r}", "deliver_at"
    )
