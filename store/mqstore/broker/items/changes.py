"""Changes of items: put once, find, cancel, purge (clients#queue-unique, clients#queue-cancel, clients#queue-items).

The name of an item is one of its keys, so the index of the log has all names, and nothing else must be stored, saved or
replayed. A look-up follows the name's entries from the newest on, and ends at the first record of each queue that is
not done. So it costs the same however long the queue's past is.

A purge removes the items that were put before the call. Nothing moves from one place to another meanwhile: the timer
and `PopTables.moving` are locked.

    delayed, and retries in the timer      a cancellation for each
    a queue, in all states                 one record: it continues at its end, with nothing in flight
    ready ones after the cursor            two records: a batch that reaches the end, and its acknowledgement
    leased, retrying, released ones        an acknowledgement for each batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any, Unpack

from mqstore.broker.background.context import Parts
from mqstore.broker.background.retention import physical_of
from mqstore.broker.background.service import BackgroundService, Pin
from mqstore.broker.delay.timerqueries import TimerQueries
from mqstore.broker.items.state import Item, Items, State, check_state, status_of, unsettled
from mqstore.broker.pop.batch import Claim
from mqstore.broker.pop.ordered import OrderedQueues
from mqstore.broker.pop.request import Delivery
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.pop.unordered import UnorderedQueues
from mqstore.broker.redelivery.dead_letters import DeadLetters
from mqstore.broker.routing.router import DelayedReceipt, SendOptions
from mqstore.broker.tables.names import (
    KEPT_NAMES,
    SCHEDULE_TOPIC,
    TIMER_TOPIC,
    QueueKey,
    dlq_topic,
    retry_topics,
    unique_word,
)
from mqstore.errors import ConfigError, CorruptStoreError
from mqstore.layout.hosts import encode_host
from mqstore.layout.properties import REAL_TOPIC, TIMER_DEQUEUE_MS, TIMER_OUT_MS
from mqstore.log.commitlog import SendReceipt
from mqstore.log.message import Message
from mqstore.log.writing.outgoing import Body, key_words
from mqstore.options import Durability, Duration, milliseconds, waits_for_disk
from mqstore.signalsafe import Lock

_ASKED = 8
"""Number of entries of the index to examine at first."""
_FOR_EVER_MS = 1 << 62
_message, _queue, _offset = itemgetter(0), attrgetter("queue"), attrgetter("offset")
_LETTERS_MAX = 1_000


class WritableItems(Items):
    """Items of a store that is open for writing. Thread-safe."""

    def __init__(self, parts: Parts, pops: PopTables, timer: TimerQueries, *others: Any) -> None:
        super().__init__(parts, pops, timer, *others)
        self._parts, self._timers = parts, timer
        self._ways = UnorderedQueues(pops), OrderedQueues(pops)
        self._naming = Lock()
        """Held from the look for a name to its put."""

    def put(
        self,
        group: str,
        topic: str,
        body: Body,
        unique: str,
        *,
        unique_for: Duration | None = None,
        queue_id: int = 0,
        **options: Unpack[SendOptions],
    ) -> SendReceipt:
        """Put an item with a name, unless there is one that `group` has not done, and return the receipt of either.
        `unique_for` instead: unless one was put in these seconds. Raises InvalidMessageError for a bad name,
        CorruptStoreError if the index lacks entries, and the errors of `Router.put`."""
        word = unique_word(unique)
        keys = options.get("keys")
        options["keys"] = (*(() if keys is None else key_words(keys)), word)
        given, options["durability"] = options.get("durability"), "append"
        since_ms = None if unique_for is None else milliseconds(unique_for, "unique_for")
        if since_ms is not None:
            self._parts.topics.keep_names(topic, -(-since_ms // 1000))
        if (store := self._parts.store).index.dropped_entries:
            text = f"the index of {store.path} lost entries on a full disk, so names of items are not known"
            raise CorruptStoreError(text, "index", repair=f"mqstore recover {store.path} --rebuild index")
        with self._naming:
            if since_ms is None:
                with self._pops.moving:
                    first = next(self._alive(group, topic, partial(self._open, word)), None)
                found = None if first is None else first.message
            else:
                found = self._newest(group, topic, word, self._parts.clock.now_ms() - since_ms)
            if found is None:
                receipt = self._parts.router.put(topic, body, queue_id=queue_id, **options)
            else:
                receipt = receipt_of(found)
        self._flush_if(given)  # also for the first one, whose put may still wait for the disk
        return receipt

    def by_key(self, group: str, topic: str, key: str) -> list[Item]:
        """Return the items with this key that are not done, dead ones included. Raises TopicNotFoundError."""
        with self._pops.moving:
            found = list(self._alive(group, topic, partial(self._open, key)))
        return [*found, *self._letters(group, self._parts.store.find(dlq_topic(group), key=key, limit=_LETTERS_MAX))]

    def cancel(self, group: str, topic: str, unique_key: str) -> bool:
        """Settle an item that nobody holds. Return True if nobody will get it, and False if somebody has it, or if it
        is done, dead, or due from the timer at this time. It is as durable as a put. Raises TopicNotFoundError, and
        the errors of a put."""
        done, names = False, {topic, *retry_topics(group, topic)}
        with self._pops.moving:
            # Where it waits comes first: it is put to its queue before it stops to wait.
            for message in self._parts.store.find(TIMER_TOPIC, unique_key=unique_key):
                if message._stored_property(REAL_TOPIC) in names and self._timers.waits(message):
                    if not self._timers.recall(receipt_of(message).recall_handle or ""):
                        return False
                    done = True
            for key in self._keys(group, topic):
                state = self._pops.state(key)
                for message in self._copies(unique_key, key):
                    if message._stored_property(TIMER_DEQUEUE_MS) is not None:
                        self._timers.persist()  # a kill would let the timer deliver it again
                    with state.lock:
                        if not self._pops.ready(state, None):
                            continue
                        order = self._pops.order(state)
                        status = status_of(state, order, message.offset, self._parts.clock.now_ms())
                        if status is not None and status.state == "leased":
                            return False
                        if status is not None:
                            self._ways[order is not None].cancel(state, message.offset)
                            done = True
        self._flush_if(None)
        return done

    def note_holder(self, group: str, found: Iterable[Delivery], holder: str) -> None:
        """Note which client of a server has received some deliveries."""
        for queue, messages in groupby(map(_message, found), _queue):
            state = self._pops.states.get(QueueKey(group, *queue))
            if state is not None:
                with state.lock:
                    state.note_holder(map(_offset, messages), holder)

    def purge(self, group: str, topic: str, state: State | None = None) -> int:
        """Remove items as `Queue.purge`. It is as durable as a put. A message that a delay level of RocketMQ has
        delivered in the last ten seconds may be delivered again after a kill. Raises TopicNotFoundError, and the
        errors of both."""
        check_state(state)
        if state == "dead":
            return DeadLetters(self._parts, group).purge()
        ends: dict[QueueKey, int] = {}

        def begin() -> int:
            ends.update((key, self._parts.offsets.bounds(*key[1:])[1]) for key in self._keys(group, topic))
            return self._parts.store.max_offset

        with self._pops.moving:
            count = self._timers.cancel_all(self._waiting_names(group, topic, state), begin)
            count += sum(self._purge(key, end, state) for key, end in ends.items())
        self._timers.persist()  # a kill would let the timer deliver again messages that were delivered and purged
        self._flush_if(None)
        return count

    def _flush_if(self, durability: Durability | None) -> None:
        """Flush the log if a call of this durability waits for the disk. None means the store's default."""
        if waits_for_disk(durability, self._parts.store.durability == "flush"):
            self._parts.store.flush()

    def _purge(self, key: QueueKey, end: int, wanted: State | None) -> int:
        """Remove the items of one queue before `end`."""
        pops, now_ms, state = self._pops, self._tables.clock.now_ms(), self._pops.state(key)
        low = self._tables.offsets.bounds(key.topic, key.queue_id)[0]
        with state.lock:
            if not pops.ready(state, None):
                return 0
            order = pops.order(state)
            standing = state.standing(order, now_ms)
            first = max(low, standing.next)
            skipped = sum(offset < end for offset in state.skips(first))
            ready = max(0, end - first - skipped) if wanted in (None, "ready") else 0
            known = {each: status_of(state, order, each, now_ms) for each in unsettled(state, order, low, end, wanted)}
            chosen = [o for o, status in known.items() if o < end and status and wanted in (None, status.state)]
            if standing.next <= end and (wanted is None or (ready and not standing.in_flight + standing.again)):
                pops.reset(state, end)
                return len(chosen) + ready
            if ready and order is not None:
                raise ConfigError(
                    f"{key.topic!r} is consumed in order, and item {standing.first} is not settled: the ready ones "
                    "after it can be purged only together with it, in all states"
                )
            claims, count = [], len(chosen) + ready
            if ready:
                batch = pops.log_batch(state, [first], now_ms, 0, end, local=False)
                state.add(batch, [first])
                state.cursor = end
                state.drop_ahead()
                chosen.append(first)
            for offset in chosen:
                if offset in state.released:
                    self._ways[0].cancel(state, offset)
                else:
                    pop_time_ms = state.in_flight[offset].times(offset)[0] if order is None else order.pop_time_ms
                    claims.append(Claim(offset, pop_time_ms, order is not None, 0, key.queue_id, ""))
            self._ways[order is not None].settle(state, claims)
            pops.commit(state)
            return count

    # -- messages with a key, the newest first ------------------------------------------------------------------------

    def _open(self, word: str, key: QueueKey) -> Iterator[Message]:
        """Yield the messages of a queue with this key, except those before the first one that is not done."""

        def first() -> int | None:
            """Return the physical offset of that one, or None if all are done."""
            if key.topic == TIMER_TOPIC:
                pins = self._timers.pins() if self._timers.waiting() else ()
                return next((pin.physical_offset for pin in pins), None)
            is_level = key.topic == SCHEDULE_TOPIC
            begin = self._levels()[key.queue_id + 1][0] if is_level else self._parts.offsets.committed(key) or 0
            low, high = self._parts.offsets.bounds(key.topic, key.queue_id)
            return physical_of(self._parts.store, *key[1:], max(low, begin)) if begin < high else None

        yield from (each for each in self._entries(key.topic, word, first) if each.queue_id == key.queue_id)

    def _newest(self, group: str, topic: str, word: str, since_ms: int) -> Message | None:
        """Return the newest item with this name that was put after `since_ms`, or None."""
        names = {topic, *retry_topics(group, topic)}
        found = []
        for name in (TIMER_TOPIC, *names):
            for message in self._entries(name, word, lambda: 0, since_ms):
                if name != TIMER_TOPIC or message._stored_property(REAL_TOPIC) in names:
                    found.append(message)
                    break
        newest = max(found, key=lambda message: message.born_timestamp_ms, default=None)
        return newest if newest is not None and newest.born_timestamp_ms > since_ms else None

    def _entries(self, topic: str, word: str, first: Callable[[], int | None], since_ms: int = 0) -> Iterator[Message]:
        """Yield the messages of a topic with this key, from about `since_ms` on.
        `first` returns the first physical offset, or None for no message. Most names are new, and need no call."""
        store = self._parts.store
        store.news.catch_up(None)
        store.index.put_pending()  # entries that a full disk has kept from the index count, too
        asked, seen, bound = _ASKED, 0, None
        while True:
            offsets = store.index.query(topic, word, since_ms, _FOR_EVER_MS, asked)
            for offset in offsets[seen:]:
                if bound is None and (bound := first()) is None:
                    return
                if offset < max(bound, store.deleted_at(topic)):
                    return
                with suppress(LookupError):  # retention has deleted it, or it is damaged
                    message = store.at(offset)
                    if message.topic == topic and word in message.keys:
                        yield message
            if len(offsets) < asked:
                return
            asked, seen = 4 * asked, len(offsets)


class KeptNames(BackgroundService):
    """Pins of all topics that had an item with `unique_for`. The time is an attribute of the topic."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def pins(self) -> Iterator[Pin]:
        """Yield the first record of each queue whose name may still count."""
        store, now_ms = self._parts.store, self._parts.clock.now_ms()
        for config in self._parts.topics.configs():
            if (kept_s := config.attributes.get(KEPT_NAMES)) is None or not kept_s.isdecimal():
                continue
            for topic, queue_id in ((TIMER_TOPIC, 0), *((config.name, i) for i in config.queue_ids)):
                if store.offsets_or_none(topic, queue_id) is not None:
                    offset = store.offset_at(topic, queue_id, now_ms - 1000 * int(kept_s))
                    if (physical := physical_of(store, topic, queue_id, offset)) is not None:
                        yield Pin(physical, topic, queue_id, "", "names of items that are unique for a time")


def receipt_of(message: Message) -> SendReceipt:
    """Return the receipt of the put that has stored this record."""
    properties = message.stored_properties()
    host = encode_host(message.store_host)
    at = message.queue, message.offset, message.physical_offset, message.size, message.store_timestamp_ms, host
    if message.topic != TIMER_TOPIC:
        return SendReceipt((*at, message.unique_key))
    delayed = properties[REAL_TOPIC], int(properties[TIMER_OUT_MS]) + 1
    return DelayedReceipt((*at, message.unique_key, *delayed))  # type: ignore[arg-type]  # two more
