"""Items of a queue by name and by key: put once, find, cancel (clients#queue-unique, clients#queue-cancel).

The name of an item is one of its keys, so the index of the log has all names, and nothing else must be stored, saved or
replayed. A look-up follows the name's entries from the newest on, and ends at the first record of each queue that is
not done. So it costs the same however long the queue's past is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Unpack

from mqstore.broker.context import Parts
from mqstore.broker.delay.timerqueries import TimerQueries
from mqstore.broker.items.purge import Purging
from mqstore.broker.items.state import Item, status_of
from mqstore.broker.names import SCHEDULE_TOPIC, TIMER_TOPIC, QueueKey, dlq_topic, retry_topics, unique_word
from mqstore.broker.pop.tables import PopTables
from mqstore.broker.retention import physical_of
from mqstore.broker.router import DelayedReceipt, SendOptions
from mqstore.errors import CorruptStoreError
from mqstore.layout.hosts import encode_host
from mqstore.layout.properties import REAL_TOPIC, TIMER_DEQUEUE_MS, TIMER_OUT_MS
from mqstore.log.commitlog import SendReceipt
from mqstore.log.message import Message
from mqstore.log.writing.outgoing import Body, key_words
from mqstore.options import Duration, milliseconds
from mqstore.signalsafe import Lock

_ASKED = 8
"""Number of entries of the index to examine at first."""
_FOR_EVER_MS = 1 << 62
_LETTERS_MAX = 1_000


class NamedItems(Purging):
    """Items of a store that is open for writing. Thread-safe."""

    def __init__(self, parts: Parts, pops: PopTables, timer: TimerQueries, *others: Any) -> None:
        super().__init__(parts, pops, timer, *others)
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
                receipt = _receipt(found)
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
                    if not self._timers.recall(_receipt(message).recall_handle or ""):
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


def _receipt(message: Message) -> SendReceipt:
    """Return the receipt of the put that has stored this record."""
    properties = message.stored_properties()
    host = encode_host(message.store_host)
    at = message.queue, message.offset, message.physical_offset, message.size, message.store_timestamp_ms, host
    if message.topic != TIMER_TOPIC:
        return SendReceipt((*at, message.unique_key))
    delayed = properties[REAL_TOPIC], int(properties[TIMER_OUT_MS]) + 1
    return DelayedReceipt((*at, message.unique_key, *delayed))  # type: ignore[arg-type]  # two more
