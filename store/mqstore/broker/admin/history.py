"""History of a message: each event that the files of a store still show, and its state for each group (operating).

    records of the log    stored, with dispatch; delayed, recalled; prepared, rolled back; retry, dead letter
    pop log and journal   delivered, extended, failed, released, lease ended, process ended, acknowledged, cancelled,
                          expired, reset
    cut/                  cut
    `Items`, offsets      state for each group

A lease ends at the time at which it was due, however late the redelivery was. A delivery to a receiver in the store's
own process leaves a record only if it did not succeed at once (delivery#pop-journal), and reads by offset leave none:
then the committed offset shows that the message is done. Each search has a bound, and `missed` names the gaps.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Final, NamedTuple

from mqstore.broker.admin.inspect import looked_pops
from mqstore.broker.admin.salvage.cut import contents, cut_files
from mqstore.broker.admin.search import Search
from mqstore.broker.background.context import messages_of, open_tables
from mqstore.broker.delay.levels import deliver_time_ms
from mqstore.broker.delay.route import due_of, number
from mqstore.broker.delay.timerqueries import is_cancelled
from mqstore.broker.items.files import items_of
from mqstore.broker.items.state import Items
from mqstore.broker.pop.poplog.log import ACK, CHANGE, GIVE, POP, RESET, SKIP
from mqstore.broker.redelivery.dead_letters import DeadLetters
from mqstore.broker.redelivery.reason import EXPIRED, REOPENED, Reason, reason_of
from mqstore.broker.tables import names
from mqstore.broker.tables.names import SCHEDULE_TOPIC, TIMER_TOPIC, QueueKey, is_dlq_topic, is_retry_topic
from mqstore.errors import FormatError, InvalidMessageError, MQStoreError
from mqstore.layout.consumequeue import UNIT
from mqstore.layout.jsontext import decode
from mqstore.layout.messageid import is_message_id
from mqstore.layout.properties import DLQ_ORIGIN_TOPIC, EXPIRES_MS, REAL_TOPIC, RETRY_TOPIC, TIMER_DEL_UNIQKEY, UNIQ_KEY
from mqstore.layout.record import TRANSACTION_COMMIT, TRANSACTION_MASK
from mqstore.log.message import Message
from mqstore.log.reading.directory import StoreFiles

_MESSAGES: Final = 100
_COPIES: Final = 1_000
_EVENTS: Final = 10_000
_LOOKS: Final = 200_000
"""Maximum number of messages to examine where no index helps."""
_RECORDS: Final = 1_000_000
"""Maximum number of records of the pop log to read."""
_PLACE: Final = re.compile(r"(.+)/([0-9]{1,9})@([0-9]{1,18})")
_BATCH: Final = re.compile(rb'\{"k":([0-9]{1,19}),')
_CUT_MS: Final = re.compile(r"-([0-9]{1,18})[.0-9]*$")
_NEVER_MS: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a message. Times are ms since the epoch."""

    at_ms: int | None
    """None: the files do not say."""
    event: str
    group: str | None
    topic: str
    queue_id: int
    queue_offset: int
    """Copy that it happened to."""
    attempt: int | None = None
    until_ms: int | None = None
    """End of a lease, or time at which it is due, or at which the item expires."""
    holder: str = ""
    """Client of a server that had the delivery."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class GroupState:
    """State of a message for a group: that of an item, or `done`, or `not started`."""

    group: str
    state: str
    attempt: int | None = None
    until_ms: int | None = None
    holder: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class History:
    """A message with its copies."""

    store: str
    unique_key: str
    topic: str
    """Topic to which it was sent."""
    keys: tuple[str, ...]
    tag: str | None
    events: tuple[Event, ...]
    groups: tuple[GroupState, ...]


class _Named(Search):
    """Search by a key of any kind. Entries of the index do not say which one it is."""

    def _matches(self, message: Message) -> bool:
        return self.key in message.keys or self.key == message.unique_key


class Histories:
    """Search for the histories of messages in one store. Use it once."""

    def __init__(self, files: StoreFiles, name: str, groups: Collection[str] = ()) -> None:
        """`name` is that of the store in the result, `groups` the only ones to show."""
        self._files, self._store, self._name, self._only = files, files._store, name, groups  # noqa: SLF001
        self._tables = open_tables(self._store)
        self._indexed, self._committed = set[int](), set[int]()
        self._popped: Collection[QueueKey] = ()
        self.missed: list[str] = []
        """Reasons why something may be missing from the result."""

    def find(self, what: str) -> list[History]:
        """Return the messages with this key, unique key, unique name, message id, place `topic/queue@offset`, or
        physical offset, whichever first leads to one. Raises StoreIOError."""
        histories: dict[str, list[Message]] = defaultdict(list)
        for message in self._copies(what):
            histories[message.unique_key].append(message)
        cuts: dict[str, list[tuple[Message, int | None]]] = defaultdict(list)
        for message, cut_ms in self._cut(what, {*histories}):
            cuts[message.unique_key].append((message, cut_ms))
        if (more := len({*histories, *cuts}) - _MESSAGES) > 0:
            self.missed.append(f"{more} older messages that have it, too: give an id")
        chosen = [*dict.fromkeys((*reversed(histories), *cuts))][:_MESSAGES][::-1]
        pops = items = None
        try:
            pops = looked_pops(self._tables)
            self._popped = pops.states.keys()
            items = items_of(self._tables, pops)
        except MQStoreError as error:
            self.missed.append(f"states: {error}")
        copies = [message for key in chosen for message in histories[key]]
        commits = (each for each in copies if each.sys_flag & TRANSACTION_MASK == TRANSACTION_COMMIT)
        self._committed = {each.prepared_transaction_offset for each in commits}
        deliveries = _Deliveries(copies)
        entries = [] if pops is None else pops.journal.read()  # before the log, into which it may be folded meanwhile
        self._read_pops(deliveries, entries)
        found = []
        for key in chosen:
            events = [(message, event) for message in histories[key] for event in self._of_copy(message, deliveries)]
            for message, cut_ms in cuts[key]:
                stored = replace(self._stored(message), reason="")
                events += [(message, stored), (message, replace(stored, at_ms=cut_ms, event="cut"))]
            first = events[0][0]
            if is_retry_topic(first.topic) or is_dlq_topic(first.topic):
                self.missed.append(f"events of {key} before {first.topic}: retention has deleted the records")
            events.sort(
                key=lambda each: (_NEVER_MS if each[1].at_ms is None else each[1].at_ms, each[0].physical_offset)
            )
            some = [event for _, event in events if not self._only or event.group in (None, *self._only)]
            topic = _origin(first)
            states = self._states(items, histories[key], topic, {event.group for event in some}) if items else ()
            found.append(History(self._name, key, topic, tuple(first.keys), first.tag, tuple(some), tuple(states)))
        return found

    # -- copies ------------------------------------------------------------------------------------------------------

    def _copies(self, what: str) -> list[Message]:
        """Return all copies of the messages, in the order of the log."""
        found = self._by_key(what)
        if not found:
            with suppress(InvalidMessageError):
                found = self._by_key(names.unique_word(what))
        found = found or self._by_place(what)
        known, bare = {message.physical_offset: message for message in found}, set[str]()
        for unique, message in islice({message.unique_key: message for message in found}.items(), _MESSAGES):
            word = next(filter(None, (message._stored_property(UNIQ_KEY), *message.keys)), None)
            more = [] if word in (None, what) else self._by_key(str(word))
            if word is None:
                bare.add(unique)
                with suppress(LookupError, MQStoreError):
                    more = [self._store.get_by_id(unique)]
            known.update((each.physical_offset, each) for each in more if each.unique_key == unique)
        known.update((each.physical_offset, each) for each in self._walk(bare, [*known.values()]))
        return [known[place] for place in sorted(known)]

    def _by_key(self, word: str) -> list[Message]:
        search, found = _Named(key=word, limit=_COPIES), list[Message]()
        for item in search.run(self._files):
            if isinstance(item, Message):
                found.append(item)
            else:
                self.missed.append(f"{item.file} at {item.position}: {item.detail}")
        self.missed += search.missed
        if search.by == "index":
            self._indexed.update(each.physical_offset for each in found)
        if len(found) == _COPIES:
            self.missed.append(f"records older than the newest {_COPIES} with the key {word}")
        return found

    def _by_place(self, what: str) -> list[Message]:
        place, store = _PLACE.fullmatch(what), self._store
        try:
            if place is not None:
                found = store.get(place[1], int(place[2]), int(place[3]), 1).messages
                return [each for each in found if each.offset == int(place[3])]
            if is_message_id(what) or (what.isdecimal() and len(what) < 20):
                return [store.get_by_id(what) if is_message_id(what) else store.at(int(what))]
        except LookupError as error:
            self.missed.append(str(error.args[0] if error.args else error))
        return []

    def _walk(self, bare: Collection[str], copies: list[Message]) -> Iterator[Message]:
        """Yield copies of messages that have neither keys nor a unique key, so that no index lists them."""
        where = [each for each in self._store.topics() if is_retry_topic(each) or is_dlq_topic(each)]
        topics = [*where, *{SCHEDULE_TOPIC}.intersection(self._store.topics())]
        search = Search(topics, start_ms=min((each.store_timestamp_ms for each in copies), default=0))
        for item in search.run(self._files) if topics and bare else ():
            if isinstance(item, Message) and item.unique_key in bare:
                yield item
            if search.messages >= _LOOKS:
                self.missed.append(f"copies of a message without keys after {_LOOKS} others")
                return

    def _stored(self, message: Message) -> Event:
        properties, topic, at_ms = message.stored_properties(), message.topic, message.store_timestamp_ms
        event, group, attempt, until_ms, reason = "stored", None, None, None, self._dispatched(message)
        if topic == TIMER_TOPIC:
            event, reason = "delayed", reason_of(message) or reason
            with suppress(KeyError, ValueError):  # a damaged or foreign record
                if TIMER_DEL_UNIQKEY in properties:
                    event = "recall"
                else:
                    until_ms = due_of(properties)
                    reason = "recalled" if is_cancelled(self._store, message) else reason
        elif topic == SCHEDULE_TOPIC:
            event, until_ms = "delayed", deliver_time_ms(self._store.delay_table_ms, message.queue_id + 1, at_ms)
            reason = reason_of(message) or reason
        elif is_retry_topic(topic):
            event, group, attempt = "retry", _group_of(topic, properties), message.attempt
            reason = reason_of(message)
        elif is_dlq_topic(topic):
            event, group, reason = "dead letter", topic.removeprefix(names.DLQ_PREFIX), reason_of(message)
        elif topic == names.HALF_TOPIC:
            event, reason = "prepared", self._half(message)
        else:
            until_ms = number(properties.get(EXPIRES_MS))
        return Event(at_ms, event, group, topic, message.queue_id, message.offset, attempt, until_ms, "", reason)

    def _dispatched(self, message: Message) -> str:
        """Say where the record is listed."""
        place, unit = message.physical_offset, self._store.unit_bytes(*message.queue, message.offset, 1)
        if not unit or UNIT.unpack(unit)[0] != place:
            return "not dispatched to its queue"
        return "dispatched to its queue" + " and the index" * (place in self._indexed)

    def _half(self, half: Message) -> str:
        """Say whether a half message has ended: by its commit, which may have no operation yet, or by an operation."""
        if half.physical_offset in self._committed:
            return "committed"
        ops = islice(self._since(names.OP_TOPIC, half.store_timestamp_ms), _LOOKS)
        ended = any(str(half.offset).encode() in bytes(op.body_view).split(b",") for op in ops)
        return "committed or rolled back" if ended else "not ended, as far as known"

    def _since(self, topic: str, at_ms: int) -> Iterator[Message]:
        if (bounds := self._store.offsets_or_none(topic, 0)) is not None:
            yield from messages_of(self._store, topic, self._store.offset_at(topic, 0, at_ms), bounds[1])

    def _cut(self, what: str, known: Collection[str]) -> Iterator[tuple[Message, int | None]]:
        """Yield the messages in `cut/` that are searched for, with the times at which they were cut."""
        looks = 0
        for file in cut_files(self._store):
            at = _CUT_MS.search(file.name)
            try:
                for looks, item in enumerate(contents(self._store, file), looks + 1):  # noqa: B020
                    if looks > _LOOKS:
                        self.missed.append(f"cut messages after the first {_LOOKS}")
                        return
                    if isinstance(item, Message) and (
                        item.unique_key in known or what in (*item.keys, item.unique_key, str(item.physical_offset))
                    ):
                        yield item, None if at is None else int(at[1])
            except MQStoreError as error:
                self.missed.append(f"cut/{file.name}: {error}")

    # -- deliveries and states ---------------------------------------------------------------------------------------

    def _of_copy(self, message: Message, deliveries: _Deliveries) -> list[Event]:
        events = deliveries.events[message.physical_offset]
        if len(events) > _EVENTS:
            self.missed.append(
                f"events after the first {_EVENTS} of {message.topic}/{message.queue_id}@{message.offset}"
            )
        return [self._stored(message), *events[:_EVENTS]]

    def _read_pops(self, deliveries: _Deliveries, entries: list[tuple[int, Any]]) -> None:
        """Read the deliveries from the pop log, and from the `entries` of the journal."""
        if deliveries.since_ms is None:
            return
        for count, record in enumerate(self._since(names.POP_LOG_TOPIC, deliveries.since_ms)):
            if count == _RECORDS:
                self.missed.append(f"deliveries later than {_RECORDS} records of the pop log")
                break
            if deliveries.concerns(record):
                with suppress(FormatError):
                    deliveries.read(record.tag or "", record.offset, record.store_timestamp_ms, decode(record.body))
        begin = self._tables.offsets.committed(names.POP_LOG_KEY) or 0
        for position, entry in entries:
            if position >= begin:
                deliveries.read(entry.kind, entry.position, None, entry.value)

    def _states(self, items: Items, copies: list[Message], topic: str, known: set[str | None]) -> Iterator[GroupState]:
        offsets = self._tables.offsets
        for group in sorted(self._only or {*filter(None, known), *offsets.groups_of(topic)}) if copies else ():
            first, letters = copies[0], DeadLetters(self._tables, group)
            try:
                item = items.of(group, topic, copies)
                dead = letters.select(offsets=[each.offset for each in copies if each.topic == letters.topic])
                letter = next(iter(dead), None)
            except (LookupError, MQStoreError) as error:
                self.missed.append(f"state for {group}: {error}")
                continue
            committed = offsets.committed(QueueKey(group, *first.queue))
            if item is not None:
                yield GroupState(group, item.state, item.attempt, item.until_ms, item.holder, item.reason)
            elif letter is not None:  # without keys, so that `find` has not found it
                yield GroupState(group, "dead", letter.reconsume_times, reason=self._stored(letter).reason)
            elif (copy := next((each for each in copies if self._is_new(group, topic, each)), None)) is not None:
                yield GroupState(group, "ready", copy.attempt)
            elif committed is None and group not in known:
                yield GroupState(group, "not started")
            else:
                passed = f"committed offset {committed} of {first.topic}/{first.queue_id}"
                yield GroupState(group, "done", reason=passed if (committed or 0) > first.offset else "")

    def _is_new(self, group: str, topic: str, copy: Message) -> bool:
        """Return True for a retry in a queue whose first position a running writer has not saved yet."""
        key = QueueKey(group, *copy.queue)
        unknown = self._tables.offsets.committed(key) is None and key not in self._popped
        return unknown and copy.topic in names.retry_topics(group, topic)


class _Place(NamedTuple):
    group: str
    topic: str
    queue_id: int
    offset: int


@dataclass(slots=True)
class _Lease:
    due_ms: int
    local: bool
    failed: bool = False
    ended: bool = False


class _Deliveries:
    """Deliveries of some copies, by the records of the pop log in order."""

    def __init__(self, copies: Iterable[Message]) -> None:
        self._copies = {(*message.queue, message.offset): message for message in copies}
        self.events: dict[int, list[Event]] = defaultdict(list)
        """Events by the physical offset of the copy."""
        self.since_ms = min((message.store_timestamp_ms for message in self._copies.values()), default=None)
        self._topics = {topic.encode() for topic, _, _ in self._copies}
        self._batches: dict[int, set[_Place]] = {}
        self._leases: dict[_Place, _Lease] = {}
        self._seen = set[object]()
        """Deliveries and changes that a record has shown. The log may have them again, for a later replay."""

    def concerns(self, record: Message) -> bool:
        """Return False for a record that can be passed over without decoding it."""
        body = bytes(record.body_view)
        if record.tag not in (POP, SKIP, RESET):
            named = _BATCH.match(body)
            return named is None or int(named[1]) in self._batches
        return b"\\" in body or any(topic in body for topic in self._topics)

    def read(self, kind: str, position: int, at_ms: int | None, value: Any) -> None:
        """Add the events of a record. One with invalid members has none."""
        with suppress(KeyError, TypeError, ValueError, AttributeError):
            if kind == POP:
                self._pop(position, at_ms, value)
            elif kind in (SKIP, RESET):
                key, named = QueueKey(value["c"], value["t"], value["q"]), value["o"]
                for place in [_Place(key.group, *each) for each in self._copies if each[:2] == key[1:]]:
                    if kind == RESET:
                        self._leases.pop(place, None)
                        reason = (
                            f"the group was set to offset {_whole(named)}" if named >= 0 else "the group was deleted"
                        )
                        self._add(place, at_ms, "reset", reason=reason)
                    elif place.offset in named and self._is_new(place, SKIP):
                        expires_ms = number(self._copies[place[1:]]._stored_property(EXPIRES_MS)) or _NEVER_MS
                        self._add(place, at_ms, "expired" if at_ms is None or expires_ms <= at_ms else "cancelled")
            else:
                for place in self._batches.get(value["k"], ()):
                    if place.offset == value["o"] if kind == CHANGE else place.offset in value["o"]:
                        self._change(place, kind, at_ms, value)

    def _add(self, place: _Place, at_ms: int | None, event: str, **more: Any) -> None:
        events = self.events[self._copies[place[1:]].physical_offset]
        if len(events) <= _EVENTS:
            events.append(Event(at_ms, event, *place, **more))

    def _is_new(self, *what: object) -> bool:
        before = len(self._seen)
        self._seen.add(what)
        return len(self._seen) > before

    def _pop(self, position: int, at_ms: int | None, value: Any) -> None:
        start, pop_ms, lasts_ms = map(_whole, (value["so"], value["pt"], value["it"]))
        kept, local, due_ms = value.get("cm", 0) | value.get("rel", 0), value.get("l") == 1, pop_ms + lasts_ms
        in_order = value.get("f") == 1
        for i, distance in enumerate(value["d"]):
            place = _Place(value["c"], value["t"], value["q"], start + _whole(distance))
            copy, last = self._copies.get(place[1:]), self._leases.get(place)
            if copy is None or (in_order and kept >> i & 1):
                continue
            self._batches.setdefault(position, set()).add(place)
            if lasts_ms <= 0:  # it shows the cursor, or replaces a lost record
                self._leases.setdefault(place, _Lease(due_ms, local))
                if kept:
                    self._change(place, ACK, at_ms, value)
            elif self._is_new(place, pop_ms):
                if last is not None and not last.ended:  # in order, no record says that
                    self._end(place, last, pop_ms, REOPENED if last.local and pop_ms < last.due_ms else EXPIRED)
                self._leases[place] = _Lease(due_ms, local)
                attempt = 1 + value.get("oc", {}).get(str(place.offset), 0) if in_order else copy.attempt
                whom = "in the store's process" if local else "by a client"
                self._add(place, pop_ms, "delivered", attempt=attempt, until_ms=due_ms, reason=whom)

    def _change(self, place: _Place, kind: str, at_ms: int | None, value: Any) -> None:
        lease, reason = self._leases[place], Reason.of(value)
        why = {"reason": reason.text, "holder": reason.holder}
        if kind == CHANGE:
            pop_ms = _whole(value["pt"])
            lease.failed, lease.due_ms = value.get("n") == 1, pop_ms + _whole(value["it"])
            event = "extended" if not lease.failed else "failed" if reason.counts else "released"
            self._seen.add((place, pop_ms))
            if self._is_new(place, lease.due_ms, event):
                events = self.events[self._copies[place[1:]].physical_offset]
                if event == "extended" and events[-1:] and events[-1].event == event:
                    del events[-1]  # only the last one of many matters
                self._add(place, at_ms, event, until_ms=max(lease.due_ms, at_ms or 0), **why)
        elif not lease.ended and kind == ACK:
            self._add(place, at_ms, "acknowledged", reason="then or before" * lease.local)
        elif not lease.ended and kind == GIVE and not lease.failed and (at_ms or 0) < lease.due_ms:
            self._add(place, at_ms, "released", **why)
        elif not lease.ended:
            self._end(place, lease, at_ms or lease.due_ms, reason)
        lease.ended = kind != CHANGE

    def _end(self, place: _Place, lease: _Lease, at_ms: int, reason: Reason) -> None:
        """Add the end of a lease, unless it had failed, or its receiver made it a dead letter in time."""
        if reason.text:
            self._add(place, at_ms, "process ended", reason=reason.text)
        elif at_ms >= lease.due_ms and not lease.failed:
            self._add(place, lease.due_ms, "lease ended", holder=reason.holder, reason="not settled in time")


def _whole(value: Any) -> int:
    """Return a number of a record. Raises ValueError for one that mqstore never writes."""
    if type(value) is not int or abs(value) > _NEVER_MS:
        raise ValueError(f"{value!r:.40} is not an offset or a time")
    return value


def _origin(message: Message) -> str:
    """Return the topic to which a message was sent, by any of its copies."""
    found = map(message._stored_property, (DLQ_ORIGIN_TOPIC, RETRY_TOPIC, REAL_TOPIC))
    return next(filter(None, found), message.topic)


def _group_of(topic: str, properties: Mapping[str, str]) -> str:
    """Return the group of a retry topic, also of version 1, whose names have no `+`."""
    name, _, popped = topic.removeprefix(names.RETRY_PREFIX).partition("+")
    return name if popped else name.removesuffix(f"_{properties.get(RETRY_TOPIC)}")
